"""A node's own GPU under a training job: caps set through its polythrottle actuator, windows read from its counters.

The actuator (or the device itself, in a simulation) holds the right to set the board under a lease that ends by itself:
if the controller or the training process vanishes, the clocks are as found within the lease.
"""

from dataclasses import dataclass, field, replace

from polythrottle.cluster.fleet.exploring import Exploring
from polythrottle.cluster.fleet.knowledge import Knowledge, Told
from polythrottle.cluster.fleet.newcomer import Next, Verdict, Window, explored, judged, told
from polythrottle.cluster.machine import Cap
from polythrottle.daemon.ports import Board
from polythrottle.errors import DeviceError, KnobRejected, TrialError
from polythrottle.measurement import Reading
from polythrottle.space import OperatingPoint

KNOB = "power_limit_w"
_DEFAULT = Cap(None, 1.0, 1.0)


def window(limit_w: float | None, before: Reading, after: Reading, steps: int) -> Window | None:
    """Return the window between two readings of a board.

    Args:
        limit_w: Under which limit; None for the default.
        before: At its beginning.
        after: At its end.
        steps: Training steps between them.

    Returns:
        None where nothing can be said: no step, no time, a counter of energy that began anew, or none that counts.
    """
    span_s, energy_j = after.time_s - before.time_s, after.energy_j - before.energy_j
    if steps < 1 or not span_s > 0 or not energy_j > 0:
        return None
    return Window(limit_w, span_s / steps, energy_j / span_s, steps)


@dataclass
class SteeredNode:
    """A node that joins a fleet: verifies what the fleet knows, then holds the cap it is given.

    Whatever happens to the board, training goes on: a node that cannot be steered is left at its default clocks, and
    ``trouble`` says why.

    Attributes:
        name: Its name.
        board: Its board.
        knowledge: What the fleet knows of its type and network.
        wanted: The cap it is to run under; None to leave it at its default.
        steps: Steps of a window.
        exploring: What it may do to learn where the fleet knows nothing; None to leave it at its default then.
        age_s: The machine's age when it joins, in seconds.
        verdict: What it does now, and why.
        trouble: Why it cannot be steered; empty if it can.
    """

    name: str
    board: Board
    knowledge: Knowledge
    wanted: Cap | None = None
    steps: int = 20
    exploring: Exploring | None = None
    age_s: float = 0.0
    verdict: Verdict = field(default=Verdict(Next.WARMING, _DEFAULT, None, "no window yet"), init=False)
    trouble: str = field(default="", init=False)
    windows: list[Window] = field(default_factory=list, init=False)
    _limit_w: float | None = field(default=None, init=False)
    _before: Reading | None = field(default=None, init=False)
    _joined_s: float | None = field(default=None, init=False)
    _done: int = field(default=0, init=False)
    _dropped: bool = field(default=False, init=False)

    def stepped(self, count: int = 1) -> Verdict:
        """Take note of training steps; at the end of a window, judge and set what follows.

        Args:
            count: How many steps were done since the last call.
        """
        self._done += count
        if self._done >= self.steps or self._before is None:
            try:
                self._turn()
                self.trouble = ""
            except (DeviceError, TrialError) as error:
                self.trouble, self._before, self._limit_w = str(error), None, None
            self._done = 0
        return self.verdict

    def want(self, cap: Cap | None) -> None:
        """Ask for another cap, as after a new generation: what this node saw under it before still counts.

        Args:
            cap: The cap; None for the default.
        """
        self.wanted = cap

    def told(self) -> Told:
        """Return what this node has to say to the fleet."""
        return told(self.name, self.knowledge, self.windows)

    def release(self) -> tuple[str, ...]:
        """Put the board back and give up the right to set it; return what is not as it was found.

        Raises:
            DeviceError: If it cannot be reached; the lease ends by itself.
        """
        self._before, self._limit_w = None, None
        return self.board.release()

    def _turn(self) -> None:
        """End a window, and begin the next under what it says."""
        self.board.take()  # renews the lease, too
        after = self.board.read()
        if self._before is not None:
            seen = window(self._limit_w, self._before, after, self._done)
            # The first window under another cap holds the change itself, in which clocks and power still move.
            if seen is not None and not self._dropped:
                self.windows.append(seen)
            self._dropped = False
        self.verdict = self._judged(after.time_s)
        self._hold(self.verdict.cap.limit_w)
        self._before = self.board.read()

    def _judged(self, now_s: float) -> Verdict:
        verdict = judged(self.windows, self.knowledge, self.wanted)
        if self._joined_s is None:
            self._joined_s = now_s
        if verdict.next is not Next.UNKNOWN or self.exploring is None:
            return verdict
        age_s = self.age_s + now_s - self._joined_s
        return explored(verdict, self.told(), self.windows, self.exploring, age_s)

    def _hold(self, limit_w: float | None) -> None:
        if limit_w == self._limit_w:
            return
        try:
            if limit_w is None:
                self.board.restore()
            else:
                self.board.apply(OperatingPoint({KNOB: limit_w}))
        except KnobRejected as error:
            self.verdict = replace(self.verdict, next=Next.REFUSED, cap=_DEFAULT, reason=str(error))
            self.wanted = self.exploring = limit_w = None
            self.board.restore()
        self._limit_w, self._dropped = limit_w, True
