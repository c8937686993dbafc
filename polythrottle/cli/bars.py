"""A progress bar on standard error: drawn on a terminal alone."""

from types import TracebackType

from rich.console import Console
from rich.progress import Progress, ProgressColumn
from typing_extensions import Self


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
