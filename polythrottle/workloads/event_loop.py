"""An event loop that is kept between calls, as ``asyncio.Runner`` does from Python 3.11 on."""

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


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
            self._loop.run_until_complete(self._loop.shutdown_default_executor())
        finally:
            self._loop.close()


async def _cancel(tasks: "set[asyncio.Task[Any]]") -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
