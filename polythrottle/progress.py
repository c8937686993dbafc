"""Who shows progress while a function of the package runs: a terminal, a notebook's cell, or nobody."""

import contextlib
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Protocol

from polythrottle.space import OperatingPoint
from polythrottle.study import Study


class Watcher(Protocol):
    """Somebody who looks on while a study runs."""

    def opened(self, study: Study, journal: Path, trials: int) -> None:
        """Take note of the study, the file it is kept in, and how many trials it shall have."""

    def changed(self, study: Study) -> None:
        """Take note that a trial started or ended, or a preset was measured."""

    def told(self, text: str) -> None:
        """Take note of a line a user should read, such as what the search learns from."""


class Silence:
    """A watcher that does nothing."""

    def opened(self, study: Study, journal: Path, trials: int) -> None:
        """Do nothing."""

    def changed(self, study: Study) -> None:
        """Do nothing."""

    def told(self, text: str) -> None:
        """Do nothing."""


@contextlib.contextmanager
def study_progress(
    progress: bool | None, watcher: Watcher | None, to_go_on: Callable[[Path], str]
) -> Iterator[Watcher]:
    """Yield who looks on while a study runs.

    Args:
        progress: Whether to show it; if None, on a terminal and in a notebook.
        watcher: Somebody else who looks on; nothing is shown then unless ``progress`` is true.
        to_go_on: Returns how a study that was interrupted is continued, by its journal.
    """
    if watcher is not None or not _shown(progress):
        yield watcher or Silence()
        return
    from polythrottle.cli.live import LiveStudy
    from polythrottle.cli.notebook import NotebookStudy

    with NotebookStudy() if in_notebook() else LiveStudy(to_go_on=to_go_on) as shown:
        yield shown


@contextlib.contextmanager
def sweep_progress(
    progress: bool | None, advanced: Callable[[int, int, OperatingPoint], None] | None
) -> Iterator[Callable[[int, int, OperatingPoint], None]]:
    """Yield what is called after each point of a sweep.

    Args:
        progress: As of `study_progress`.
        advanced: Somebody else to call; nothing is shown then.
    """
    if advanced is not None or not _shown(progress):
        yield advanced or (lambda done, total, point: None)
        return
    from polythrottle.cli.live import LiveSweep
    from polythrottle.cli.notebook import NotebookSweep

    with NotebookSweep() if in_notebook() else LiveSweep() as shown:
        yield shown.advanced


def in_notebook() -> bool:
    """Return whether this runs in a notebook's kernel, which shows HTML."""
    shell = getattr(sys.modules.get("IPython"), "get_ipython", lambda: None)()
    return hasattr(shell, "kernel")


def _shown(progress: bool | None) -> bool:
    if progress is not None:
        return progress
    return in_notebook() or (sys.stderr is not None and sys.stderr.isatty())
