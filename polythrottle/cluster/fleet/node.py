"""A node's own GPU under a training job: caps set through its polythrottle actuator, windows read from its counters.

The actuator (or the device itself, in a simulation) holds the right to set the board under a lease that ends by itself:
if the controller or the training process vanishes, the clocks are as found within the lease.
"""

from collections.abc import Callable
from dataclasses import dataclass, field, replace

from polythrottle.cluster.fleet.exploring import Exploring
from polythrottle.cluster.fleet.knowledge import Knowledge, Told
from polythrottle.cluster.fleet.newcomer import Next, Verdict, Window, explored, judged, told
from polythrottle.cluster.machine import Cap
from polythrottle.daemon.ports import Board
from polythrottle.errors import DeviceError, KnobRejected, StorageError, TrialError
from polythrottle.measurement import Reading
from polythrottle.space import OperatingPoint

KNOB = "power_limit_w"
_MOST_WINDOWS = 60
_DEFAULT = Cap(None, 1.0, 1.0)


@dataclass(frozen=True)
class Steps:
    """Training steps between two readings of a board, as the node's own workers timed them.

    Attributes:
        count: How many.
        step_s: Their time, in seconds.
        own_s: Of that, without waiting for other nodes.
    """

    count: int
    step_s: float
    own_s: float


def window(limit_w: float | None, before: Reading, after: Reading, steps: int | Steps) -> Window | None:
    """Return the window between two readings of a board.

    Args:
        limit_w: Under which limit; None for the default.
        before: At its beginning.
        after: At its end.
        steps: Training steps between them: how many if they filled the time, else with their own time. What is drawn
            while it waits for others then counts to its own time, so that power × time is the joules of a step.

    Returns:
        None where nothing can be said: no step, no time, a counter of energy that began anew, or none that counts.
    """
    span_s, energy_j = after.time_s - before.time_s, after.energy_j - before.energy_j
    timed = steps if isinstance(steps, Steps) else Steps(steps, span_s, span_s)
    if timed.count < 1 or not span_s > 0 or not energy_j > 0 or not 0 < timed.own_s <= timed.step_s:
        return None
    power_w = energy_j / span_s * timed.step_s / timed.own_s
    return Window(limit_w, timed.own_s / timed.count, power_w, timed.count)


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
        paced: Whether somebody else plans its cap for the whole group, so that its own best look is not held.
        verdict: What it does now, and why.
        trouble: Why it cannot be steered; empty if it can.
        power_w: Mean power over its last window, waiting included, in watts; None before one has ended under the limit
            that holds now.
        reading: The board's last reading.
    """

    name: str
    board: Board
    knowledge: Knowledge
    wanted: Cap | None = None
    steps: int = 20
    exploring: Exploring | None = None
    age_s: float = 0.0
    paced: bool = False
    verdict: Verdict = field(default=Verdict(Next.WARMING, _DEFAULT, None, "no window yet"), init=False)
    trouble: str = field(default="", init=False)
    power_w: float | None = field(default=None, init=False)
    reading: Reading | None = field(default=None, init=False)
    windows: list[Window] = field(default_factory=list, init=False)
    _limit_w: float | None = field(default=None, init=False)
    _before: Reading | None = field(default=None, init=False)
    _joined_s: float | None = field(default=None, init=False)
    _done: Steps = field(default=Steps(0, 0.0, 0.0), init=False)
    _timed: bool = field(default=False, init=False)
    _dropped: bool = field(default=False, init=False)

    @property
    def limit_w(self) -> float | None:
        """Return the limit that holds now, in watts; None for the default."""
        return self._limit_w

    def stepped(self, done: int | Steps = 1) -> Verdict:
        """Take note of training steps; at the end of a window, judge and set what follows.

        Args:
            done: The steps since the last call: how many, or with their times.
        """
        self._timed = isinstance(done, Steps)
        more = done if isinstance(done, Steps) else Steps(done, 0.0, 0.0)
        before = self._done
        self._done = Steps(before.count + more.count, before.step_s + more.step_s, before.own_s + more.own_s)
        if self._done.count >= self.steps or self._before is None:
            self._safely(self._turn)
            self._done = Steps(0, 0.0, 0.0)
        return self.verdict

    def renew(self) -> None:
        """Renew the right to set the board, between the ends of long windows."""
        if self._before is not None:
            self._safely(self.board.take)

    def rest(self) -> None:
        """Put the board back and keep the right to set it; the window that was begun says nothing."""
        held, self._before, self._limit_w, self.power_w = self._limit_w, None, None, None
        if held is not None:
            self._safely(self.board.restore)

    def _safely(self, doing: Callable[[], object]) -> None:
        """Do something with the board; what fails is trouble, and the training goes on."""
        try:
            doing()
            self.trouble = ""
        except (DeviceError, TrialError, StorageError) as error:
            self.trouble, self._before, self._limit_w, self.power_w = str(error), None, None, None

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
        after = self.reading = self.board.read()
        if self._before is not None:
            self.power_w = _mean_w(self._before, after)
            seen = window(self._limit_w, self._before, after, self._done if self._timed else self._done.count)
            # The first window under another cap holds the change itself, in which clocks and power still move.
            if seen is not None and not self._dropped:
                self._keep(seen)
            self._dropped = False
        self.verdict = self._judged(after.time_s)
        self._hold(self.verdict.cap.limit_w)
        self._before = self.board.read()

    def _keep(self, seen: Window) -> None:
        """Keep a window, and of each limit only the newest: a node may train for weeks."""
        self.windows.append(seen)
        alike = [index for index, each in enumerate(self.windows) if each.limit_w == seen.limit_w]
        if len(alike) > _MOST_WINDOWS:
            del self.windows[alike[0]]

    def _judged(self, now_s: float) -> Verdict:
        verdict = judged(self.windows, self.knowledge, self.wanted)
        if self._joined_s is None:
            self._joined_s = now_s
        if verdict.next is not Next.UNKNOWN or self.exploring is None:
            return verdict
        age_s = self.age_s + now_s - self._joined_s
        found = explored(verdict, self.told(), self.windows, self.exploring, age_s)
        return verdict if self.paced and found.next is Next.KEPT else found

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
        self.power_w = None  # what was drawn before the change is not what this limit draws


def _mean_w(before: Reading, after: Reading) -> float | None:
    span_s, energy_j = after.time_s - before.time_s, after.energy_j - before.energy_j
    return energy_j / span_s if span_s > 0 and energy_j > 0 else None
