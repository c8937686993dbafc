"""Progress in a notebook's cell: what a terminal would show, as HTML that is replaced, with IPython alone."""

import io
from importlib import import_module
from pathlib import Path
from types import TracebackType
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.progress import Progress
from rich.text import Text
from typing_extensions import Self

from polythrottle.cli.live import columns, newest
from polythrottle.space import OperatingPoint
from polythrottle.study import Study, TrialState

_WIDTH, _MOST_LINES = 110, 5
_FRAME = '<pre style="line-height:1.2;white-space:pre;overflow-x:auto">{code}</pre>'


class Cell:
    """A place in a notebook's cell whose content is replaced."""

    def __init__(self) -> None:
        self._display = import_module("IPython.display")
        self._handle: Any = None

    def show(self, *parts: RenderableType) -> None:
        """Show something in place of what was there."""
        console = Console(file=io.StringIO(), record=True, width=_WIDTH, force_jupyter=False, highlight=False)
        console.print(Group(*parts))
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
        trials = [newest(self._study)] if self._study is not None else []
        self._cell.show(*trials, self._progress.get_renderable(), *map(Text, self._lines))


class NotebookSweep(_Bar):
    """Shows how far a sweep has come."""

    def __init__(self) -> None:
        super().__init__("sweeping")

    def advanced(self, done: int, total: int, point: OperatingPoint) -> None:
        """Show that ``done`` of ``total`` points are in the table."""
        self._progress.update(self._task, completed=done, total=total)
        self._cell.show(self._progress.get_renderable())
