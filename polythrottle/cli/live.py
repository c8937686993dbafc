"""What is shown on standard error while a study or a sweep runs: a live table on a terminal, plain lines elsewhere."""

import contextlib
import shlex
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path
from types import TracebackType

import typer
from rich.console import Console, Group
from rich.live import Live
from rich.progress import BarColumn, MofNCompleteColumn, Progress, ProgressColumn, TextColumn, TimeRemainingColumn
from rich.table import Table
from typing_extensions import Self

from polythrottle.cli.bars import LiveBar
from polythrottle.cli.documents import energy_kind
from polythrottle.cli.texts import show_joules, show_point
from polythrottle.errors import InvalidInput
from polythrottle.measurement import EnergyKind
from polythrottle.remarks import loose_limit
from polythrottle.space import OperatingPoint
from polythrottle.study import Study, Trial, TrialState
from polythrottle.units import show, show_name, show_number

_SHOWN = 10
_TIE = "\N{NO-BREAK SPACE}"


def resume_with(journal: Path) -> str:
    """Return the command that continues a study."""
    return f"resume with: polythrottle tune --resume {shlex.quote(str(journal))}"


class LiveStudy:
    """Shows a study as it grows, and says how to resume it when it is interrupted.

    Args:
        sure: Whether limits are taken as they were written, also one that looks as if its unit were wrong.
        to_go_on: Returns how it is resumed, by the journal.
    """

    def __init__(self, sure: bool = True, to_go_on: Callable[[Path], str] = resume_with) -> None:
        self._sure, self._to_go_on = sure, to_go_on
        self._console = Console(stderr=True, highlight=False)
        self._progress = Progress(*columns(), console=self._console)
        self._task = self._progress.add_task("tuning", total=None)
        self._live = Live(console=self._console, transient=True, auto_refresh=self._console.is_terminal)
        self._journal: Path | None = None

    def __enter__(self) -> Self:
        if self._console.is_terminal:
            self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._live.stop()
        if kind is KeyboardInterrupt and self._journal is not None:
            self._say(self._to_go_on(self._journal))

    def opened(self, study: Study, journal: Path, trials: int) -> None:
        """Take note of a study that begins or goes on."""
        self._journal = journal
        made = len(study.trials)
        self._progress.update(self._task, total=min(trials, len(study.problem.space)), completed=made)
        if 0 < made < trials:
            self.told(f"continuing with trial {made} of {trials} from {journal}")

    def changed(self, study: Study) -> None:
        """Show the newest trial.

        Raises:
            InvalidInput: If a limit looks as if its unit were wrong, and nobody says that it is not.
        """
        done = [trial for trial in study.trials if trial.state is not TrialState.RUNNING]
        self._progress.update(self._task, completed=len(done))
        if self._console.is_terminal:
            self._live.update(Group(newest(study), self._progress))
        elif study.trials and study.trials[-1].state is not TrialState.RUNNING and not study.references:
            self.told(_plain(study, study.trials[-1]))
        if not self._sure and study.default is not None:
            self._ask(study)

    def _ask(self, study: Study) -> None:
        """Ask on a terminal whether a limit is meant as it was written; elsewhere nobody can be asked."""
        self._sure = True
        if (doubt := loose_limit(study)) is None:
            return
        if not (self._console.is_terminal and sys.stdin.isatty()):
            raise InvalidInput(f"{doubt} If not, add --yes to search with it")
        self._live.stop()
        self._say(doubt)
        if not typer.confirm("search with it as it is?", err=True):
            raise InvalidInput("nothing was searched; write the limit anew")
        self._live.start()

    def told(self, text: str) -> None:
        """Print a line that stays."""
        self._say(folded(text, self._console.width))

    def _say(self, text: str) -> None:
        with contextlib.suppress(OSError):  # a full disk behind standard error must not end a study
            self._console.print(text, soft_wrap=True, markup=False)


class LiveSweep(LiveBar):
    """Shows how far a sweep, or other work that can be counted, has come."""

    def __init__(self, doing: str = "sweeping") -> None:
        super().__init__(doing, *columns())

    def advanced(self, done: int, total: int, point: OperatingPoint) -> None:
        """Show that ``done`` of ``total`` points are in the table."""
        self._progress.update(self._task, completed=done, total=total)
        if not self._console.is_terminal and (done % max(1, total // 20) == 0 or done == total):
            line = folded(f"{done} of {total}: {_tied(point)}", self._console.width)
            self._console.print(line, soft_wrap=True, markup=False)

    def counted(self, done: int, total: int) -> None:
        """Show that ``done`` of ``total`` pieces of work are done."""
        self._progress.update(self._task, completed=done, total=total)


def folded(text: str, width: int) -> str:
    """Return a line folded between words to a width in columns, what follows indented."""
    lines = textwrap.wrap(text, width, subsequent_indent="    ", break_on_hyphens=False, break_long_words=False)
    return "\n".join(lines).replace(_TIE, " ")


def _tied(point: OperatingPoint) -> str:
    """Return a point as people write it, to be folded only between its knobs."""
    return ", ".join(level.replace(" ", _TIE) for level in show_point(point).split(", "))


def columns() -> tuple[ProgressColumn, ...]:
    """Return what a bar is made of."""
    return TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn()


def newest(study: Study) -> Table:
    """Return the newest trials and the best so far: a column per knob, which fits 80 columns up to six knobs."""
    names = sorted(study.problem.space.names)
    table = Table(box=None, padding=(0, 1), header_style="dim")
    kind = energy_kind(study)
    for heading in ("trial", *map(_heading, names), "mean", "p99", f"energy\n{kind or ''}"):
        table.add_column(heading, justify="right", overflow="fold")
    best, shown = study.best, study.trials[-_SHOWN:]
    for trial in (*shown, *(() if best is None or best in shown else (best,))):
        number, _, *measured = _cells(trial)
        levels = [show_number(name, trial.point[name]) for name in names]
        table.add_row(number, *levels, *measured, style=_style(study, trial, best))
    return table


def _heading(name: str) -> str:
    stem, _, ending = show_name(name).rpartition("_")
    return f"{stem}\n_{ending}"


def _style(study: Study, trial: Trial, best: Trial | None) -> str:
    if best is not None and trial.number == best.number:
        return "bold green"
    if trial.state is TrialState.RUNNING:
        return "dim"
    return "" if study.feasible(trial) else "yellow"


def _cells(trial: Trial) -> tuple[str, ...]:
    measured = trial.measurement
    if measured is None:
        return (str(trial.number), show_point(trial.point), "", "", trial.failure or "…")
    times = (show(measured.latency.mean_s, "s"), show(measured.latency.p99_s, "s"))
    return (str(trial.number), show_point(trial.point), *times, show_joules(measured))


def _plain(study: Study, trial: Trial) -> str:
    number, _, mean, p99, energy = _cells(trial)
    point = _tied(trial.point)
    if trial.measurement is None:
        return f"trial {number}: failed: {trial.failure} ({point})"
    kind = "" if trial.measurement.energy_kind is EnergyKind.MEASURED else f" {trial.measurement.energy_kind}"
    broken = "breaks the SLO, stopped early" if trial.measurement.censored else "breaks the SLO"
    verdict = "" if study.feasible(trial) else f", {broken}"
    return f"trial {number}: {energy}{kind} per item, mean {mean}, p99 {p99}{verdict} ({point})"
