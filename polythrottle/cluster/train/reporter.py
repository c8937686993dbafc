"""A worker's talk with the controller, in a thread of its own, so that training never waits for it."""

import os
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from polythrottle.clock import Clock, SystemClock
from polythrottle.cluster.train.pace import FOLDER, Pace, write_pace
from polythrottle.cluster.train.wire import ControllerAway, Line
from polythrottle.errors import PolythrottleError

ASK_S = 0.5
GRACE_S = 0.5


class Reporter:
    """Tells the controller of steps and checkpoints, and hears whether to stop.

    Args:
        line: The way to the controller; None outside an elastic job.
        node: The node's name.
        rank: The worker's rank.
        generation: The generation it trains in.
        cut_off: Called when the others are gone for good: the process that holds this worker, or a member.
        clock: Measures the grace after which it is called.
        pace: Says how fast this worker is; written for the node's agent, which steers its board.
    """

    def __init__(
        self,
        line: Line | None,
        node: str,
        rank: int,
        generation: int,
        cut_off: Callable[[], None],
        clock: Clock | None = None,
        pace: Callable[[], Pace | None] = lambda: None,
    ) -> None:
        self._line, self._node, self._rank, self._generation = line, node, rank, generation
        self._cut_off, self._clock = cut_off, clock or SystemClock()
        self._parent = os.getppid()
        self._pace, self._folder = pace, os.environ.get(FOLDER, "")
        self._records: list[dict[str, Any]] = []
        self._place: dict[str, int] = {}
        self._lock = threading.Lock()
        self._more, self._ended = threading.Event(), threading.Event()
        self._broken_s: float | None = None
        self.stop = False
        self.checkpoints_wanted = 0
        self.hazard_per_s = 0.0
        self._thread = threading.Thread(target=self._talk, daemon=True)

    def start(self) -> None:
        """Begin to talk."""
        if self._line is not None:
            self._ask()
            self._thread.start()

    def note(self, record: Mapping[str, Any], now: bool = False) -> None:
        """Tell of something that happened; the next report carries it, ``now`` at once."""
        if self._line is not None:
            with self._lock:
                self._records.append(dict(record))
            if now:
                self._more.set()

    def stand(self, step: int, epoch: int) -> None:
        """Tell of the place the training has reached."""
        self._place = {"step": step, "epoch": epoch}

    def close(self) -> None:
        """Tell what is left, and end."""
        self._ended.set()
        self._more.set()
        if self._thread.is_alive():
            self._thread.join(5.0)

    def _talk(self) -> None:
        while not self._ended.is_set():
            self._more.wait(ASK_S)
            self._more.clear()
            self._show_pace()
            self._ask()
            if os.getppid() != self._parent:
                self._cut_off()
        self._ask()

    def _show_pace(self) -> None:
        pace = self._pace() if self._folder else None
        if pace is not None:
            write_pace(Path(self._folder), self._rank, pace)

    def _ask(self) -> None:
        with self._lock:
            records, self._records = self._records, []
        place = self._place if self._rank == 0 else {}
        words = {"node": self._node, "rank": self._rank, "generation": self._generation, "records": records, **place}
        try:
            assert self._line is not None
            answer = self._line.ask("report", **words)
        except PolythrottleError as err:
            if isinstance(err, ControllerAway):
                with self._lock:
                    self._records = records + self._records
            return
        self._hear(answer)

    def _hear(self, answer: Mapping[str, Any]) -> None:
        self.stop = self.stop or bool(answer["stop"])
        self.checkpoints_wanted = int(answer["checkpoints"])
        self.hazard_per_s = float(answer["hazard_per_s"])
        if not answer["broken"]:
            self._broken_s = None
            return
        self._broken_s = self._clock.now() if self._broken_s is None else self._broken_s
        if self._clock.now() - self._broken_s >= GRACE_S:
            self._cut_off()
