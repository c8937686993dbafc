"""Progress of a study or a sweep: a live table on a terminal, plain lines elsewhere, HTML in a notebook's cell.

Imported where something is shown only, for it needs rich.
"""

import contextlib
import io
import shlex
import sys
import textwrap
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from types import TracebackType
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress import BarColumn, MofNCompleteColumn, Progress, ProgressColumn, TextColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text
from typing_extensions import Self

from polythrottle.api.tuning_result import energy_kind, show_joules, show_point
from polythrottle.backends.device_uri import names_more_than_here
from polythrottle.domain.errors import DeviceError, InvalidInput, StorageError
from polythrottle.domain.measurement import EnergyKind, Measurement
from polythrottle.domain.space import OperatingPoint
from polythrottle.domain.study import Study, Trial, TrialState
from polythrottle.domain.units import show, show_name, show_number
from polythrottle.tuning.file_trust import is_own
from polythrottle.tuning.remarks import strange_limit

# A progress bar on standard error: drawn on a terminal alone.


class LiveBar:
    """A bar with one task, shown while it is entered; elsewhere than on a terminal nothing is drawn.

    Args:
        doing: What the task is called.
        columns: What the bar is made of.
    """

    def __init__(self, doing: str, *columns: ProgressColumn) -> None:
        self._console = Console(stderr=True, highlight=False)
        self._progress = Progress(*columns, console=self._console)
        self._task = self._progress.add_task(doing, total=None)

    def __enter__(self) -> Self:
        if self._console.is_terminal:
            self._progress.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._console.is_terminal:
            self._progress.stop()


# What is shown on standard error while a study or a sweep runs: a live table on a terminal, plain lines elsewhere.

_SHOWN = 10
_TIE = "\N{NO-BREAK SPACE}"


def resume_with(journal: Path, device: str | None = None, out: Path | None = None) -> str:
    """Return the command that continues a study.

    Args:
        journal: The study's file.
        device: URI that the user has named; None if it is the journal's.
        out: Place of the profile that the user has named; None for the usual one, or the journal's.
    """
    words = ["polythrottle", "tune", "--resume", str(journal)]
    # A journal that lies elsewhere names neither by itself; see `checked_plan`.
    if not is_own(journal):
        if device is not None and names_more_than_here(device):
            words += ["--device", device]
        if out is not None and not is_own(out) and out.resolve().parent != journal.resolve().parent:
            words += ["--out", str(out.absolute())]
    return f"resume with: {shlex.join(words)}"


class LiveStudy:
    """Shows a study as it grows, and says how to resume it when it is interrupted or its device goes away.

    Args:
        confirm: Asks whether a limit is meant that looks as if its unit were wrong; None takes every limit as it was
            written.
        to_go_on: Returns how it is resumed, by the journal.
    """

    def __init__(
        self, confirm: Callable[[str], bool] | None = None, to_go_on: Callable[[Path], str] = resume_with
    ) -> None:
        self._confirm = confirm
        self._to_go_on = to_go_on
        self._console = Console(stderr=True, highlight=False)
        self._progress = Progress(*columns(), console=self._console)
        self._task = self._progress.add_task("tuning", total=None)
        self._live = Live(console=self._console, transient=True, auto_refresh=self._console.is_terminal)
        self._journal: Path | None = None
        self._done = 0

    def __enter__(self) -> Self:
        if self._console.is_terminal:
            self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._live.stop()
        # A device that has gone, such as a board whose connection broke, may come back, and a disk that is full be
        # cleared: nothing measured is lost.
        broken = isinstance(error, (DeviceError, StorageError)) and self._done > 0
        interrupted = isinstance(error, KeyboardInterrupt) or broken
        if interrupted and self._journal is not None:
            self._say(self._to_go_on(self._journal))

    def opened(self, study: Study, journal: Path, trials: int) -> None:
        """Take note of a study that begins or goes on."""
        self._journal = journal
        made = len(study.trials)
        # A small space is exhausted before its trials are, and the bar is to end with it.
        self._progress.update(self._task, total=min(trials, len(study.problem.space)), completed=made)
        if 0 < made < trials:
            self.told(f"continuing with trial {made} of {trials} from {journal}")

    def changed(self, study: Study) -> None:
        """Show the newest trial.

        Raises:
            InvalidInput: If a limit looks as if its unit were wrong, and nobody says that it is not.
        """
        done = [trial for trial in study.trials if trial.state is not TrialState.RUNNING]
        self._done = len(done)
        self._progress.update(self._task, completed=self._done)
        if self._console.is_terminal:
            self._live.update(Group(newest(study), self._progress))
        # Presets come after the last trial, which would be said once more with each of them.
        elif study.trials and study.trials[-1].state is not TrialState.RUNNING and not study.references:
            self.told(_plain(study, study.trials[-1]))
        if self._confirm is not None and study.default is not None:
            confirm = self._confirm
            self._confirm = None  # asked once: the limits of a study do not change
            self._ask(study, confirm)

    def _ask(self, study: Study, confirm: Callable[[str], bool]) -> None:
        """Ask on a terminal whether a limit is meant as it was written; elsewhere nobody can be asked."""
        if (doubt := strange_limit(study)) is None:
            return
        if not (self._console.is_terminal and sys.stdin.isatty()):
            raise InvalidInput(f"{doubt} If not, add --yes to search with it")
        self._live.stop()
        # Below a table that no longer moves: a live one would draw over the question.
        self._say(doubt)
        if not confirm("search with it as it is?"):
            raise InvalidInput("nothing was searched; write the limit anew")
        self._live.start()

    def told(self, text: str) -> None:
        """Print a line that stays."""
        self._say(folded(text, self._console.width))

    def _say(self, text: str) -> None:
        with contextlib.suppress(OSError):  # a full disk behind standard error must not end a study
            # As it is: brackets in a path are no markup, and a command that is to be copied must not be broken by rich.
            self._console.print(text, soft_wrap=True, markup=False)


class LiveSweep(LiveBar):
    """Shows how far a sweep, or other work that can be counted, has come."""

    def __init__(self, doing: str = "sweeping") -> None:
        super().__init__(doing, *columns())

    def advanced(self, done: int, total: int, point: OperatingPoint) -> None:
        """Show that ``done`` of ``total`` points are in the table."""
        self._progress.update(self._task, completed=done, total=total)
        # Some twenty lines in a log, however many points there are.
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
    best = study.best
    shown = study.trials[-_SHOWN:]
    # It may lie far back, and is what the user waits for.
    if best is not None and best not in shown:
        shown = (*shown, best)
    for trial in shown:
        number, _, *measured = _cells(trial)
        levels = [show_number(name, trial.point[name]) for name in names]
        table.add_row(f"{number}{_on(study, trial)}", *levels, *measured, style=_style(study, trial, best))
    return table


def _heading(name: str) -> str:
    stem, _, ending = show_name(name).rpartition("_")
    return f"{stem}\n_{ending}"


def _style(study: Study, trial: Trial, best: Trial | None) -> str:
    if best is not None and trial.number == best.number:
        return "bold green"
    if trial.state is TrialState.RUNNING:
        return "dim"
    if study.feasible(trial):
        return ""
    return "yellow"


def _cells(trial: Trial) -> tuple[str, ...]:
    measured = trial.measurement
    if measured is None:
        return (str(trial.number), show_point(trial.point), "", "", trial.failure or "…")
    times = (show(measured.latency.mean_s, "s"), show(measured.latency.p99_s, "s"))
    return (str(trial.number), show_point(trial.point), *times, show_joules(measured))


def _on(study: Study, trial: Trial) -> str:
    """Return on which of several boards a trial was made, to follow its number; nothing where there is one."""
    return f" on {study.problem.brief(trial.board)}" if trial.board else ""


def _plain(study: Study, trial: Trial) -> str:
    energy = _cells(trial)[-1]
    point = _tied(trial.point)
    name = f"trial {trial.number}{_on(study, trial)}"
    if trial.measurement is None:
        return f"{name}: failed: {trial.failure} ({point})"
    if trial.measurement.energy_kind is EnergyKind.MEASURED:
        kind = ""
    else:
        kind = f" {trial.measurement.energy_kind}"
    verdict = ""
    if not study.feasible(trial):
        verdict = f", breaks the SLO{', stopped early' * trial.measurement.censored}"
    return f"{name}: {energy}{kind} per item, {_seen(study, trial.measurement)}{verdict} ({point})"


def _seen(study: Study, measured: Measurement) -> str:
    """Return mean and p99 of a trial; where no p99 was measured, what limits are on instead."""
    shown = {"mean": show(measured.latency.mean_s, "s")}
    if measured.latency.p99_s is not None:
        shown["p99"] = show(measured.latency.p99_s, "s")
    else:
        values = {limit: measured.metric(limit.metric) for limit in study.problem.constraints}
        shown.update({limit.metric: limit.show(value) for limit, value in values.items() if value is not None})
    return ", ".join(f"{name} {value}" for name, value in shown.items())


# Progress in a notebook's cell: what a terminal would show, as HTML that is replaced, with IPython alone.

_WIDTH = 110
_MOST_LINES = 5
_FRAME = '<pre style="line-height:1.2;white-space:pre;overflow-x:auto">{code}</pre>'


class Cell:
    """A place in a notebook's cell whose content is replaced."""

    def __init__(self) -> None:
        self._display = import_module("IPython.display")
        self._handle: Any = None

    def show(self, *parts: RenderableType) -> None:
        """Show something in place of what was there."""
        # Left to itself, rich notices the notebook and puts its output there, once more each time.
        console = Console(file=io.StringIO(), record=True, width=_WIDTH, force_jupyter=False, highlight=False)
        console.print(Group(*parts))
        # Styles inline: rich numbers its classes anew in each export, and all cells are one page.
        page = self._display.HTML(console.export_html(inline_styles=True, code_format=_FRAME))
        if self._handle is None:
            self._handle = self._display.display(page, display_id=True)
        else:
            self._handle.update(page)


class _Bar:
    """A bar with one task, in a cell of its own."""

    def __init__(self, doing: str) -> None:
        self._cell = Cell()
        self._progress = Progress(*columns(), console=Console(file=io.StringIO(), force_jupyter=False))
        self._task = self._progress.add_task(doing, total=None)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Leave what was shown last."""


class NotebookStudy(_Bar):
    """Shows a study as it grows."""

    def __init__(self) -> None:
        super().__init__("tuning")
        self._lines: list[str] = []
        self._study: Study | None = None

    def opened(self, study: Study, journal: Path, trials: int) -> None:
        """Take note of a study that begins or goes on."""
        self._progress.update(self._task, total=min(trials, len(study.problem.space)), completed=len(study.trials))
        self.changed(study)

    def changed(self, study: Study) -> None:
        """Show the newest trials."""
        done = sum(trial.state is not TrialState.RUNNING for trial in study.trials)
        self._progress.update(self._task, completed=done)
        self._study = study
        self._show()

    def told(self, text: str) -> None:
        """Show a line below the trials, in place of the oldest if there are many."""
        self._lines = [*self._lines, text][-_MOST_LINES:]
        self._show()

    def _show(self) -> None:
        trials = []
        if self._study is not None:
            trials.append(newest(self._study))
        self._cell.show(*trials, self._progress.get_renderable(), *map(Text, self._lines))


class NotebookSweep(_Bar):
    """Shows how far a sweep has come."""

    def __init__(self) -> None:
        super().__init__("sweeping")

    def advanced(self, done: int, total: int, point: OperatingPoint) -> None:
        """Show that ``done`` of ``total`` points are in the table."""
        self._progress.update(self._task, completed=done, total=total)
        self._cell.show(self._progress.get_renderable())
