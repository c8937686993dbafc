"""Calling code and services that are not ours: timed, output kept off standard output, errors on one line."""

from __future__ import annotations

import asyncio
import json
import sys
import time
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager, redirect_stdout
from typing import Any, TypeVar

from polythrottle.domain.errors import TrialError
from polythrottle.storage.untrusted import printable

# Calling code that is not ours: timed, its output kept off standard output, its exceptions one line.

_LONGEST = 300
T = TypeVar("T")


def one_line(error: BaseException) -> str:
    """Return class and message of an exception on one line of bounded length."""
    message = " ".join(printable(str(error)).split())
    if message:
        text = f"{type(error).__name__}: {message}"
    else:
        text = type(error).__name__
    if len(text) <= _LONGEST:
        return text
    return f"{text[:_LONGEST]}…"


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
    # A script that was made a function may still call sys.exit; Ctrl-C is the user's and goes through.
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


# What a service says when it refuses, whatever form it gives that.


def refusal_text(body: bytes) -> str:
    """Return the error message in an answer, on one line of bounded length, whatever form the server gives it."""
    try:
        found = json.loads(body)
    except (ValueError, RecursionError):
        found = body.decode(errors="replace")
    for _ in range(4):
        if isinstance(found, dict):
            found = next((found[key] for key in ("error", "message", "detail", "msg") if key in found), str(found))
        elif isinstance(found, list) and found:
            found = found[0]
    text = "".join(char for char in " ".join(str(found).split()) if char.isprintable())
    return (text if len(text) <= _LONGEST else f"{text[:_LONGEST]}…") or "an empty answer"


# An event loop that is kept between calls, as ``asyncio.Runner`` does from Python 3.11 on.


class EventLoop:
    """Runs coroutines one after another in the same loop, so that connections outlive a call.

    Args:
        loop: To run in; None makes one. It is closed with this.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop | None = None) -> None:
        self._loop = loop or asyncio.new_event_loop()

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Return what ``work`` returns; what interrupts it, such as Ctrl-C, cancels it first."""
        task = self._loop.create_task(work)
        try:
            return self._loop.run_until_complete(task)
        except BaseException:
            self._loop.run_until_complete(_cancel({task}))
            raise

    def close(self) -> None:
        """Cancel what still runs and close the loop."""
        try:
            self._loop.run_until_complete(_cancel(asyncio.all_tasks(self._loop)))
            self._loop.run_until_complete(self._loop.shutdown_asyncgens())
            if sys.version_info >= (3, 9):  # in 3.8 closing the loop does it, as far as it can
                self._loop.run_until_complete(self._loop.shutdown_default_executor())  # novermin
        finally:
            self._loop.close()


async def _cancel(tasks: set[asyncio.Task[Any]]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
