"""A thread that does one thing at a time and says when it is done."""

import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from queue import SimpleQueue
from typing import Any


@dataclass(frozen=True)
class Done:
    """Something a lane was asked for.

    Args:
        what: As it was called when asked for.
        began_s: On the clock of `time.monotonic`; ``ended_s`` likewise.
        value: What came of it; None if it failed.
        error: What it failed with; None if it did not.
    """

    what: Any
    began_s: float
    ended_s: float
    value: Any = None
    error: BaseException | None = None

    @property
    def took_s(self) -> float:
        """How long it took."""
        return self.ended_s - self.began_s


class Lane:
    """A thread; what it has done is put into a queue that several lanes may share.

    Args:
        name: Of the thread.
        done: Where to put what is done.
    """

    def __init__(self, name: str, done: "SimpleQueue[Done]") -> None:
        self._pool, self._done = ThreadPoolExecutor(1, thread_name_prefix=name), done

    def begin(self, what: Any, call: Callable[[], Any]) -> None:
        """Have something done; its `Done` comes through the queue, whatever it raises."""
        began_s = time.monotonic()

        def told(future: "Future[Any]") -> None:
            error = future.exception()
            value = None if error is not None else future.result()
            self._done.put(Done(what, began_s, time.monotonic(), value, error))

        self._pool.submit(call).add_done_callback(told)

    def wait(self, call: Callable[[], Any]) -> Any:
        """Have something done and return what came of it, or raise what it raised."""
        return self._pool.submit(call).result()

    def close(self) -> None:
        """End the thread once it has done what it does."""
        self._pool.shutdown()
