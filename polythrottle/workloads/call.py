"""Calling code that is not ours: timed, its output kept off standard output, its exceptions one line."""

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stdout
from typing import TypeVar

from polythrottle.errors import TrialError
from polythrottle.printable import printable

_LONGEST = 300
T = TypeVar("T")


def one_line(error: BaseException) -> str:
    """Return class and message of an exception on one line of bounded length."""
    message = " ".join(printable(str(error)).split())
    text = f"{type(error).__name__}: {message}" if message else type(error).__name__
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]}…"


@contextmanager
def guarded(what: str) -> Iterator[None]:
    """Run foreign code so that what it prints goes to standard error and what it raises becomes a `TrialError`.

    Args:
        what: Begins the message: ``model raised``.

    Raises:
        TrialError: If the code raises anything but an interrupt, or tries to end the process.
    """
    try:
        # Standard output belongs to the command line's one document.
        with redirect_stdout(sys.stderr):
            yield
    except (Exception, SystemExit) as err:
        raise TrialError(f"{what} {one_line(err)}") from err


def timed(what: str, function: Callable[[], object]) -> float:
    """Call a function once and return how long it took, in seconds, above zero.

    Raises:
        TrialError: If it raises.
    """
    with guarded(what):
        start_s = time.perf_counter()
        function()
        elapsed_s = time.perf_counter() - start_s
    return max(elapsed_s, 1e-9)  # the counter's own step
