"""The boards of a training node.

The node that holds them at a power cap and reads its windows from their counters.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from polythrottle.actuation.client.board import ActuatorBoard, Board, LocalBoard
from polythrottle.actuation.client.connection import Line
from polythrottle.backends import DeviceURI, open_device
from polythrottle.backends.probe import find_device
from polythrottle.backends.served_devices import description_of, open_served
from polythrottle.domain.clock import Clock, VirtualClock
from polythrottle.domain.errors import (
    DeviceError,
    InvalidInput,
    KnobRejected,
    PolythrottleError,
    StorageError,
    TrialError,
    UnknownName,
)
from polythrottle.domain.fleet.transient_machine import Cap
from polythrottle.domain.measurement import EnergyKind, Reading
from polythrottle.domain.ports import Device, Recorded, Workload
from polythrottle.domain.space import BATCH_SIZE, OperatingPoint
from polythrottle.storage.fleet_knowledge import Knowledge, NodeReport
from polythrottle.storage.paths import ACTUATOR_SOCKET, socket_path
from polythrottle.training.elastic.nodes.power_cap_search import (
    Exploring,
    NewcomerDecision,
    NewcomerStep,
    StepWindow,
    explored,
    judged,
    told,
)

# The boards of a node: behind the machine's actuator where one serves them, else opened here under a lease and guard.
#
# A simulated board is taken to be busy for as long as it is held, so that its caps do something: its powers are
# simulated and have nothing to do with what really trains.

KNOB = "power_limit_w"
_PATIENCE_S = 5.0
_BUSY_WITH = "bert-base-fp16"
_LONGEST_S = 60.0
_SCHEMES = ("auto", "actuator", "jetson", "nvml", "cpu", "sim")


@dataclass(frozen=True)
class Steerable:
    """The boards of one node, together.

    Attributes:
        board: All of them as one.
        gpu: The name under which a fleet keeps what it knows of such a machine.
        limits_w: The power limits of each below its default, in watts; empty where there is none to set.
        gpus: How many boards there are.
        way: How they are reached, for people.
    """

    board: Board
    gpu: str
    limits_w: tuple[float, ...]
    gpus: int = 1
    way: str = ""


def check_boards(texts: Sequence[str]) -> None:
    """Refuse words that name no board, before anything is started.

    Raises:
        InvalidInput: If one is malformed, a recorded table, or one board is named twice.
        UnknownName: If there is no such kind of device, or no such simulated board.
    """
    if len(set(texts)) < len(texts):
        raise InvalidInput(f"--steer names each board once, not {', '.join(texts)[:80]}")
    for text in texts:
        uri = DeviceURI.parse(text)
        if uri.scheme not in _SCHEMES:
            raise InvalidInput(f"--steer {text[:60]} cannot be steered; it takes {', '.join(_SCHEMES)}, or off")
        if uri.several:
            raise InvalidInput(f"--steer {text[:60]} is a group; name each GPU: --steer nvml:0 --steer nvml:1 …")
        if uri.scheme == "sim":
            open_device(text)


def actuator_there() -> bool:
    """Return whether an actuator serves a board of this machine that this user may set."""
    path = socket_path(ACTUATOR_SOCKET)
    if not path.exists():
        return False
    line = Line(path, _PATIENCE_S)
    try:
        return bool(line.ask("hello").get("control"))
    except PolythrottleError:
        return False
    finally:
        line.close()


def open_boards(texts: Sequence[str], clock: Clock, folder: Path, holder: str) -> Steerable:
    """Return the boards that are meant, none of them taken yet.

    Args:
        texts: Their URIs; ``auto`` is what this machine's actuator serves, else the board that is found here.
        clock: Of the node.
        folder: For the tokens of leases; nobody else's.
        holder: Who holds them, for others to read.

    Raises:
        DeviceError: If one is not there.
        PolythrottleError: If a word names none.
    """
    opened = [_opened(text, clock, folder / f"{index}.token", holder) for index, text in enumerate(texts)]
    if len(opened) == 1:
        return opened[0]
    common = set(opened[0].limits_w).intersection(*(each.limits_w for each in opened))
    kinds = sorted({each.gpu for each in opened})
    way = "; ".join(each.way for each in opened)
    board = BoardGroup([each.board for each in opened])
    return Steerable(board, f"{len(opened)}x-{'+'.join(kinds)}"[:100], tuple(sorted(common)), len(opened), way)


def _opened(text: str, clock: Clock, token_file: Path, holder: str) -> Steerable:
    uri = DeviceURI.parse(text)
    if uri.scheme == "actuator":
        if uri.name:
            socket = Path(uri.name)
        else:
            socket = socket_path(ACTUATOR_SOCKET)
        return _served(socket, uri.options.get("device", ""), clock, token_file, holder)
    socket = socket_path(ACTUATOR_SOCKET)
    if socket.exists():
        with suppress(UnknownName, DeviceError):
            return _served(socket, "" if text == "auto" else text, clock, token_file, holder)
    return _here(find_device().uri if text == "auto" else text, clock)


def _served(socket: Path, device: str, clock: Clock, token_file: Path, holder: str) -> Steerable:
    line = Line(socket, _PATIENCE_S)
    try:
        about = line.ask("describe", device=device)
    finally:
        line.close()
    if DeviceURI.parse(str(about["uri"])).several:
        raise InvalidInput(f"{about['title']} are served as a group, whose GPUs cannot be steered one by one")
    board = ActuatorBoard(socket, str(about["uri"]), token_file, clock, holder=holder)
    return Steerable(board, _known_as(about), _limits_w(about), way=f"{about['title']}, through the actuator")


def _here(text: str, clock: Clock) -> Steerable:
    device = open_served(text)
    if isinstance(device, Recorded):
        raise InvalidInput(f"{device.uri} is a recorded table; there is nothing to set")
    about = description_of(device)
    board: Board
    if isinstance(device.clock, VirtualClock):
        board = BusyBoard(device, clock)
    else:
        board = LocalBoard(device, clock)
    return Steerable(board, _known_as(about), _limits_w(about), way=str(about["title"]))


def _known_as(about: Mapping[str, Any]) -> str:
    return re.sub(r"[^A-Za-z0-9_.+@-]+", "-", str(about["title"])).strip("-.")[:80] or "unknown"


def _limits_w(about: Mapping[str, Any]) -> tuple[float, ...]:
    """Return the power limits below the one that was found."""
    return tuple(
        sorted(
            float(level)
            for knob in about["knobs"]
            if knob["name"] == KNOB
            for level in knob["levels"]
            if float(level) < float(knob["default"])
        )
    )


class BusyBoard(LocalBoard):
    """A simulated board that is busy all the time, as a GPU is that trains.

    Args:
        device: Simulated; not entered.
        clock: Of the node; the board's own time follows it.
    """

    def __init__(self, device: Device, clock: Clock) -> None:
        super().__init__(device, clock)
        self._work = _busy_with(device)

    def _follow(self) -> None:
        now_s = self._clock.now()
        # It may be ahead by the query it was in the middle of, as a real board would be.
        until_s = self._device.clock.now() + min(_LONGEST_S, now_s - self._followed_s)
        while self._device.clock.now() < until_s:
            self._work.query()
        self._followed_s = now_s + self._device.clock.now() - until_s


def _busy_with(device: Device) -> Workload:
    from polythrottle.catalog import load_model

    serve: Callable[[object], Workload] = device.serve  # type: ignore[attr-defined]
    work = serve(load_model(_BUSY_WITH))
    work.apply(OperatingPoint({BATCH_SIZE: max(work.space.knob(BATCH_SIZE).levels)}))
    return work


class BoardGroup:
    """At least one board, several as one: all are set alike, their joules are added; satisfies the port ``Board``."""

    def __init__(self, boards: Sequence[Board]) -> None:
        self._boards = tuple(boards)

    @property
    def uri(self) -> str:
        """Their URIs."""
        return ",".join(each.uri for each in self._boards)

    @property
    def title(self) -> str:
        """Their names."""
        return ", ".join(each.title for each in self._boards)

    @property
    def energy_kind(self) -> EnergyKind:
        """How their joules come about; the least certain of them."""
        kinds = {each.energy_kind for each in self._boards}
        kind = EnergyKind
        # A sum is worth no more than its worst part: one estimated board makes the whole estimated.
        order = (kind.SIMULATED, kind.RELATIVE, kind.ESTIMATED, kind.RECORDED, kind.MEASURED)
        return next(each for each in order if each in kinds)

    @property
    def boundary(self) -> str:
        """What their joules cover."""
        return "; ".join(dict.fromkeys(each.boundary for each in self._boards))

    def take(self) -> None:
        """Take or renew the right to set all of them.

        Raises:
            DeviceError: If one cannot be had.
        """
        for each in self._boards:
            each.take()

    def apply(self, point: OperatingPoint) -> None:
        """Set all of them to one point.

        Raises:
            KnobRejected: If one refuses it.
            DeviceError: If one cannot be steered.
        """
        for each in self._boards:
            each.apply(point)

    def read(self) -> Reading:
        """Return their joules together, the highest temperature, and whether any slows itself down.

        Raises:
            DeviceError: If one cannot be read.
        """
        readings = [each.read() for each in self._boards]
        hottest_c = max((each.temperature_c for each in readings if each.temperature_c is not None), default=None)
        joules = sum(each.energy_j for each in readings)
        throttled = any(each.throttled for each in readings)
        return Reading(readings[-1].time_s, joules, hottest_c, readings[0].clocks_hz, throttled)

    def verify(self) -> tuple[str, ...]:
        """Return the knobs that no longer hold what was applied last, on any of them."""
        return tuple(knob for each in self._boards for knob in each.verify())

    def restore(self) -> None:
        """Put all of them back."""
        for each in self._boards:
            each.restore()

    def release(self) -> tuple[str, ...]:
        """Put all of them back and give them up, each whatever became of the others.

        Raises:
            DeviceError: If one cannot be reached; what holds it ends its lease.
        """
        left: list[str] = []
        failed: DeviceError | None = None
        # One GPU that has fallen off the bus must not keep the others at their caps.
        for each in self._boards:
            try:
                left += each.release()
            except DeviceError as error:
                failed = error
        if failed is not None:
            raise failed
        return tuple(left)


# A node's own GPU under a training job: caps set through its polythrottle actuator, windows read from its counters.
#
# The actuator (or the device itself, in a simulation) holds the right to set the board under a lease that ends by
# itself: if the controller or the training process vanishes, the clocks are as found within the lease.

CAP_KNOB = "power_limit_w"
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


def window(limit_w: float | None, before: Reading, after: Reading, steps: int | Steps) -> StepWindow | None:
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
    span_s = after.time_s - before.time_s
    energy_j = after.energy_j - before.energy_j
    if isinstance(steps, Steps):
        timed = steps
    else:
        timed = Steps(steps, span_s, span_s)
    if timed.count < 1 or not span_s > 0 or not energy_j > 0 or not 0 < timed.own_s <= timed.step_s:
        return None
    # Joules of waiting are charged to the step, or a node that waits much would look frugal.
    power_w = energy_j / span_s * timed.step_s / timed.own_s
    return StepWindow(limit_w, timed.own_s / timed.count, power_w, timed.count)


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
    verdict: NewcomerDecision = field(
        default=NewcomerDecision(NewcomerStep.WARMING, _DEFAULT, None, "no window yet"), init=False
    )
    trouble: str = field(default="", init=False)
    power_w: float | None = field(default=None, init=False)
    reading: Reading | None = field(default=None, init=False)
    windows: list[StepWindow] = field(default_factory=list, init=False)
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

    def stepped(self, done: int | Steps = 1) -> NewcomerDecision:
        """Take note of training steps; at the end of a window, judge and set what follows.

        Args:
            done: The steps since the last call: how many, or with their times.
        """
        self._timed = isinstance(done, Steps)
        if isinstance(done, Steps):
            more = done
        else:
            more = Steps(done, 0.0, 0.0)
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
        held = self._limit_w
        self._before = None
        self._limit_w = None
        self.power_w = None
        if held is not None:
            self._safely(self.board.restore)

    def _safely(self, doing: Callable[[], object]) -> None:
        """Do something with the board; what fails is trouble, and the training goes on."""
        try:
            doing()
            self.trouble = ""
        except (DeviceError, TrialError, StorageError) as error:
            self.trouble = str(error)
            self._before = None
            self._limit_w = None
            self.power_w = None

    def want(self, cap: Cap | None) -> None:
        """Ask for another cap, as after a new generation: what this node saw under it before still counts.

        Args:
            cap: The cap; None for the default.
        """
        self.wanted = cap

    def told(self) -> NodeReport:
        """Return what this node has to say to the fleet."""
        return told(self.name, self.knowledge, self.windows)

    def release(self) -> tuple[str, ...]:
        """Put the board back and give up the right to set it; return what is not as it was found.

        Raises:
            DeviceError: If it cannot be reached; the lease ends by itself.
        """
        self._before = None
        self._limit_w = None
        return self.board.release()

    def _turn(self) -> None:
        """End a window, and begin the next under what it says."""
        self.board.take()  # renews the lease, too
        # Before anything is set: this reading ends the window under the old limit.
        after = self.reading = self.board.read()
        if self._before is not None:
            self.power_w = _mean_w(self._before, after)
            ended = window(self._limit_w, self._before, after, self._done if self._timed else self._done.count)
            # The first window under another cap holds the change itself, in which clocks and power still move.
            if ended is not None and not self._dropped:
                self._keep(ended)
            self._dropped = False
        self.verdict = self._judged(after.time_s)
        self._hold(self.verdict.cap.limit_w)
        self._before = self.board.read()

    def _keep(self, seen: StepWindow) -> None:
        """Keep a window, and of each limit only the newest: a node may train for weeks."""
        self.windows.append(seen)
        alike = [index for index, each in enumerate(self.windows) if each.limit_w == seen.limit_w]
        if len(alike) > _MOST_WINDOWS:
            del self.windows[alike[0]]

    def _judged(self, now_s: float) -> NewcomerDecision:
        verdict = judged(self.windows, self.knowledge, self.wanted)
        if self._joined_s is None:
            self._joined_s = now_s
        if verdict.next is not NewcomerStep.UNKNOWN or self.exploring is None:
            return verdict
        age_s = self.age_s + now_s - self._joined_s
        decision = explored(verdict, self.told(), self.windows, self.exploring, age_s)
        if self.paced and decision.next is NewcomerStep.KEPT:
            return verdict
        return decision

    def _hold(self, limit_w: float | None) -> None:
        if limit_w == self._limit_w:
            return
        try:
            if limit_w is None:
                self.board.restore()
            else:
                self.board.apply(OperatingPoint({CAP_KNOB: limit_w}))
        # A board that refuses once refuses always, as a laptop GPU whose firmware owns the limit: it is not asked
        # again.
        except KnobRejected as error:
            self.verdict = replace(self.verdict, next=NewcomerStep.REFUSED, cap=_DEFAULT, reason=str(error))
            self.wanted = self.exploring = limit_w = None
            self.board.restore()
        self._limit_w = limit_w
        self._dropped = True
        self.power_w = None  # what was drawn before the change is not what this limit draws


def _mean_w(before: Reading, after: Reading) -> float | None:
    span_s = after.time_s - before.time_s
    energy_j = after.energy_j - before.energy_j
    if span_s > 0 and energy_j > 0:
        return energy_j / span_s
    return None
