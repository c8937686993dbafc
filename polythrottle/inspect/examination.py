"""Examinations: every real device of one machine, and many boards looked at together.

Of a machine: its devices, their sensors, the machine itself, its other programs, and what still stands changed. Of many
boards: of which kind each is, what it draws, what stands applied on it.
"""

import hashlib
import itertools
import json
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, wait
from contextlib import ExitStack, closing, nullcontext
from dataclasses import dataclass, field
from pathlib import Path

from polythrottle.backends import DeviceURI, open_device
from polythrottle.backends.device_uri import at_once, check_distinct, check_uri
from polythrottle.backends.meters import Metered, unmetered
from polythrottle.backends.ssh import SshDevice
from polythrottle.domain.clock import Clock, SystemClock, Thread, VirtualClock
from polythrottle.domain.errors import DeviceError, InvalidInput, PolythrottleError, UnknownName
from polythrottle.domain.measurement import EnergyKind, Reading
from polythrottle.domain.ports import Device, Finding, Inspectable, Recorded, Sampled, findings_of
from polythrottle.domain.space import SearchSpace
from polythrottle.domain.units import show
from polythrottle.inspect.machine import (
    ABOUT_RECORDS,
    System,
    is_jetson,
    machine_findings,
    others_steering,
    record_findings,
)
from polythrottle.storage.identity import INDIVIDUAL, identity_of

# The sensors' self-test: read for a second, and see whether what they say can be true.

_LOOKS_EVERY_S = 0.01
_LOOKS = 100
_MOST_W = 3000.0
_COLDEST_C = -40.0
_HOTTEST_C = 125.0
_IDLE_S = 1.0
_BUDGET = 0.005
_STEPS = 4.0
_WARY = "do not trust it; report it"


def sensor_findings(device: Device) -> tuple[Finding, ...]:
    """Return what a device's sensors say of themselves in a second, and what looking at them costs us.

    Args:
        device: Not entered; nothing is written to it.
    """
    if isinstance(device, Recorded):
        return (Finding("energy reading", None, "a recorded table has no sensors to test"),)
    if isinstance(device, Sampled):
        sampled = device.sampling()
    else:
        sampled = nullcontext()
    try:
        with sampled:
            cost: tuple[Finding, ...] = ()
            if not isinstance(device.clock, VirtualClock):
                cost = (_overhead(device),)
            readings = list(_looked_at(device))
    except PolythrottleError as err:
        return (Finding("energy reading", False, " ".join(str(err).split())),)
    return (_energy(device, readings), _temperature(readings), *_throttling(readings), *cost)


def _looked_at(device: Device) -> Iterator[Reading]:
    device.read()  # the first opens what the others find open
    slow_s = 0.0
    if isinstance(device, Metered):
        slow_s = _STEPS * device.averaging.step_s
    for _ in range(_LOOKS):
        yield device.read()
        device.clock.sleep(max(_LOOKS_EVERY_S, slow_s / _LOOKS))


def _energy(device: Device, readings: Sequence[Reading]) -> Finding:
    first = readings[0]
    last = readings[-1]
    span_s = last.time_s - first.time_s
    grown_j = last.energy_j - first.energy_j
    if any(late.energy_j < early.energy_j for early, late in itertools.pairwise(readings)):
        return Finding("energy reading", False, "the counter went backwards while it was read", _WARY)
    if grown_j <= 0 or span_s <= 0:
        told = f"the counter did not move in {span_s:.2g} s"
        return Finding("energy reading", False, told, "it is frozen, or the device sleeps: try again under load")
    power_w = grown_j / span_s
    if power_w > _MOST_W * (device.uri.count(",") + 1):  # a group names each of its GPUs
        return Finding("energy reading", False, f"{show(power_w, 'W')} cannot be true", _WARY)
    kind = ""
    if device.energy_kind is not EnergyKind.MEASURED:
        kind = f", {device.energy_kind}"
    return Finding("energy reading", True, f"rises by {show(power_w, 'W')} now{kind}; {_step(readings)}")


def _step(readings: Sequence[Reading]) -> str:
    """Return how often a counter moves, as far as looking every 10 ms can tell."""
    moves = [late.time_s for early, late in itertools.pairwise(readings) if late.energy_j > early.energy_j]
    if len(moves) >= 0.8 * (len(readings) - 1):
        return f"it moves at every look, {show(_LOOKS_EVERY_S, 's')} apart"
    if len(moves) < 3:
        return f"it moved {len(moves)} times in {show(readings[-1].time_s - readings[0].time_s, 's')}"
    return f"it moves every {show((moves[-1] - moves[0]) / (len(moves) - 1), 's')}"


def _temperature(readings: Sequence[Reading]) -> Finding:
    degrees = next((each.temperature_c for each in reversed(readings) if each.temperature_c is not None), None)
    if degrees is None:
        return Finding("temperature reading", None, "no sensor can be read, so a trial that runs hot is not seen")
    if not _COLDEST_C < degrees < _HOTTEST_C:
        return Finding("temperature reading", False, f"{degrees:.4g} °C cannot be true", _WARY)
    return Finding("temperature reading", True, f"{degrees:.4g} °C")


def _throttling(readings: Sequence[Reading]) -> Iterator[Finding]:
    slowed = [reading for reading in readings if reading.throttled]
    if slowed:
        told = slowed[-1].cause or "heat or current slows the device now"
        yield Finding("throttling", False, told, "let it cool down, look at its supply; if it stays so, restart it")


def _overhead(device: Device) -> Finding:
    """Tell what sampling in the background takes of a core while nothing else is done, and what a reading takes."""
    start_s = device.clock.now()
    busy_s = time.process_time()
    device.clock.sleep(_IDLE_S)
    share = (time.process_time() - busy_s) / (device.clock.now() - start_s)
    busy_s = time.process_time()
    device.read()
    within = share <= _BUDGET
    told = f"sampling takes {share:.2%} of a core, one reading {show(time.process_time() - busy_s, 's')} of its time"
    # A busy machine makes it dearer, which keeps nothing from working.
    if within:
        return Finding("our overhead", True, told)
    return Finding("our overhead", None, f"{told}, more than {_BUDGET:.1%}")


# One examination: every real device of a machine, the machine itself, its other programs, and what stands changed.


@dataclass(frozen=True)
class ExaminedDevice:
    """One device and what was found about it.

    Args:
        uri: What opens it.
        title: The name people know it by; empty if it could not be opened.
        identity: Hardware and firmware.
        findings: What works and what does not.
    """

    uri: str
    title: str = ""
    identity: Mapping[str, str] = field(default_factory=dict)
    findings: tuple[Finding, ...] = ()


@dataclass(frozen=True)
class Examination:
    """What was found, in four parts.

    Args:
        devices: Each device.
        machine: What in kernel, firmware and container keeps something closed.
        others: Who else steers clocks.
        records: What stands changed, and the state folder.
    """

    devices: tuple[ExaminedDevice, ...]
    machine: tuple[Finding, ...] = ()
    others: tuple[Finding, ...] = ()
    records: tuple[Finding, ...] = ()

    @property
    def faults(self) -> tuple[Finding, ...]:
        """Everything that does not work."""
        every = (*self.machine, *self.others, *self.records, *(each for one in self.devices for each in one.findings))
        return tuple(finding for finding in every if finding.works is False)


def examine(device: str | None = None) -> Examination:
    """Examine one device or all real ones, and the machine around them; writes nothing and runs nothing.

    Args:
        device: URI; every real device that is here if None. With ``?root=PATH`` the machine is the one in that folder.

    Raises:
        InvalidInput: If the URI is malformed.
        UnknownName: If its scheme is not known, or there is no simulated board of that name.
        BadFile: If a simulated board's or a recorded table's file cannot be read.
    """
    given = None
    system = System(Path("/"))
    uris: tuple[str, ...] = ()
    if device is not None and device != "auto":
        given = DeviceURI.parse(device)
        system = System(Path(given.options.get("root", "/")))
        uris = (device,)
    if given is not None and given.scheme == "ssh" and not given.meter:
        return _over_ssh(given, uris[0])
    uris = uris or real_devices(system)
    patients = tuple(_patient(uri) for uri in uris)
    if given is not None and given.scheme in ("sim", "replay"):
        return Examination(patients)
    return Examination(patients, machine_findings(system), others_steering(system), record_findings())


def _over_ssh(given: DeviceURI, uri: str) -> Examination:
    """Return what is found of a device over SSH, and of the machine that it is part of."""
    from polythrottle.backends.ssh import SshDevice

    check_uri(uri)
    try:
        board = SshDevice.of(given.name, given.options)
    except PolythrottleError as err:
        if isinstance(err, InvalidInput):
            raise
        return Examination((_unopened(uri, err),))
    with closing(board.board):
        try:
            around = board.board.examined()
            return Examination((_examined(board),), around["machine"], around["others"], around["records"])
        except PolythrottleError as err:
            return Examination((_unopened(uri, err),))


def real_devices(system: System) -> tuple[str, ...]:
    """Return the URIs of the real devices that are here: a Jetson, each NVIDIA GPU, the processor."""
    if is_jetson(system):  # whose GPU is on the same chip and is no GPU of NVML's
        return ("jetson", "cpu")
    return (*_gpus(system), "cpu")


def _gpus(system: System) -> tuple[str, ...]:
    folders = system.found("proc/driver/nvidia/gpus/*/information")  # by PCI address, as NVML counts
    return tuple(f"nvml:{number}" for number in range(len(folders)))


def groups(uris: Sequence[str]) -> tuple[str, ...]:
    """Return the URIs of what can be steered as one besides: all NVIDIA GPUs, where there are several.

    Args:
        uris: Of the real devices that are here.
    """
    if sum(uri.startswith("nvml:") for uri in uris) > 1:
        return ("nvml:all",)
    return ()


def _patient(uri: str) -> ExaminedDevice:
    try:
        return _examined(open_device(uri))
    except PolythrottleError as err:
        # Not a device that fails, but a name that is wrong.
        if isinstance(err, InvalidInput | UnknownName) or uri.partition(":")[0] in ("sim", "replay"):
            raise
        return _unopened(uri, err)


def _examined(board: Device) -> ExaminedDevice:
    told = findings_of(board)
    if isinstance(unmetered(board), Inspectable):
        own = told
    else:
        own = (*_knobs(board), *told)
    return ExaminedDevice(board.uri, board.title, identity_of(board), (*own, *sensor_findings(board)))


def _unopened(uri: str, err: Exception) -> ExaminedDevice:
    return ExaminedDevice(uri, findings=(Finding("device", False, " ".join(str(err).split())),))


def _knobs(board: Device) -> tuple[Finding, ...]:
    """Return what can be set on a device that does not say so itself."""
    if not board.space.knobs:
        return (Finding("knobs", None, "nothing can be set on this device"),)
    return tuple(Finding(knob.name, True, f"{len(knob.levels)} levels") for knob in board.space.knobs)


WITHIN_S = 30.0
"""How long a board may take; ssh and its Python have to be started first."""
_LOOK_S = 1.0
_PROMPT_S = 1.0
"""What fails sooner holds nobody up."""

# One board at one moment, and which kind it is of.


@dataclass(frozen=True)
class Kind:
    """What boards have in common that can share a profile.

    Args:
        title: The name people know such a board by, of the first; it may say where that one is.
        identity: Hardware and firmware, without what tells one board from another.
        knobs: What can be set on it.
        space: A digest of the knobs and all their levels.
    """

    title: str = field(compare=False)
    identity: tuple[tuple[str, str], ...]
    knobs: tuple[str, ...]
    space: str

    @classmethod
    def of(cls, device: Device) -> "Kind":
        """Return the kind of a device."""
        known = {name: text for name, text in identity_of(device).items() if name not in INDIVIDUAL}
        return cls(device.title, tuple(sorted(known.items())), device.space.names, _digest(device.space))


def _digest(space: SearchSpace) -> str:
    told = json.dumps([[knob.name, list(knob.levels)] for knob in space.knobs])
    return hashlib.sha256(told.encode()).hexdigest()[:8]


@dataclass(frozen=True)
class BoardState:
    """What a board shows now.

    Args:
        uri: As it was asked for.
        kind: None where it could not be reached; so is every figure.
        power_w: Mean power since the look before, or over a second.
        energy_kind: How its joules come about.
        temperature_c: None where no sensor tells.
        throttled: Whether heat or current slows it now.
        stands: What stands changed on it, by whom, and until when.
        failure: Why it could not be reached; empty if it could.
    """

    uri: str
    kind: Kind | None = None
    power_w: float | None = None
    energy_kind: EnergyKind | None = None
    temperature_c: float | None = None
    throttled: bool | None = None
    stands: tuple[str, ...] = ()
    failure: str = ""

    def holds(self, workload: str) -> bool:
        """Return whether a profile for a workload stands on it, as far as its record names what was applied."""
        words = " ".join(f"profile {workload} stands".split())
        return any(words in " ".join(line.split()) for line in self.stands)


def by_kind(states: Iterable[BoardState]) -> Mapping[Kind, tuple[BoardState, ...]]:
    """Return the boards that could be reached, those of one kind together, in the order in which they came."""
    kinds: dict[Kind, tuple[BoardState, ...]] = {}
    for state in states:
        if state.kind is not None:
            kinds[state.kind] = (*kinds.get(state.kind, ()), state)
    return kinds


# Boards that are looked at again and again: each stays open from one look to the next.


class BoardWatch:
    """Several boards, looked at together; nothing is written to any.

    Args:
        uris: Device URIs.
        within_s: How long a board may take at a look.
        clock: By which that is told.

    Raises:
        InvalidInput: If one is malformed, named twice, or there are none.
        UnknownName: If there is no such scheme.
    """

    def __init__(self, uris: Sequence[str], within_s: float = WITHIN_S, clock: Clock | None = None) -> None:
        if not uris:
            raise InvalidInput("name the boards to look at, such as ssh://nano1,ssh://nano2")
        if not 0 < within_s < float("inf"):
            raise InvalidInput(f"a board is given up after a time above zero, not {within_s:g} s")
        check_distinct(uris)
        # A malformed name is told now, not after the others have answered.
        for uri in uris:
            check_uri(uri)
        self._boards = {uri: _WatchedBoard(uri) for uri in uris}
        self._within_s = within_s
        self._clock = clock
        self._late: dict[str, BoardState] = {}
        self._asked: dict[str, Future[BoardState]] = {}

    def look(self, heard: Callable[[BoardState], object] = lambda state: None) -> tuple[BoardState, ...]:
        """Return what every board shows, in the order in which they were named.

        A board that took its time to fail does not hold up the looks that follow: it is asked beside the others, and
        what it answers is there at the next look.

        Args:
            heard: Called with each as soon as it has answered.
        """
        clock = self._clock or SystemClock()
        began_s = clock.now()
        for uri in self._late:
            if uri not in self._asked:
                self._asked[uri] = self._ask(uri)
        prompt = tuple(uri for uri in self._boards if uri not in self._late)
        states: dict[str, BoardState] = {}
        for answer in at_once(prompt, lambda uri: self._boards[uri].look(), self._within_s, clock):
            state = answer.found or _failed(answer.uri, answer.error)
            states[answer.uri] = state
            heard(state)
            if state.failure and clock.now() - began_s > _PROMPT_S:
                self._late[answer.uri] = state
        wait(self._asked.values(), timeout=_PROMPT_S / 10)
        for uri in tuple(self._asked):
            states[uri] = self._answer(uri)
            heard(states[uri])
        return tuple(states[uri] for uri in self._boards)

    def _ask(self, uri: str) -> "Future[BoardState]":
        """Have a board looked at in a thread of its own, which nobody waits for."""
        asked: Future[BoardState] = Future()

        def run() -> None:
            try:
                asked.set_result(self._boards[uri].look())
            except BaseException as error:  # raised again in the thread of whoever looks
                asked.set_exception(error)

        Thread(target=run, name=f"polythrottle-{uri}", daemon=True).start()
        return asked

    def _answer(self, uri: str) -> BoardState:
        """Return what a board that is late shows; as it failed last, while it still owes its answer."""
        if not self._asked[uri].done():
            return self._late[uri]
        try:
            state = self._asked.pop(uri).result()
        except PolythrottleError as error:
            self._late[uri] = _failed(uri, error)
            return self._late[uri]
        del self._late[uri]
        return state

    def close(self) -> None:
        """Let go of every board."""
        for board in self._boards.values():
            board.close()


def _failed(uri: str, error: BaseException | None) -> BoardState:
    return BoardState(uri, failure=" ".join(str(error).split()))


class _WatchedBoard:
    """One board, opened at the first look and anew after one that failed."""

    def __init__(self, uri: str) -> None:
        self._uri = uri
        self._turn = threading.Lock()
        self._device: Device | None = None
        self._kind: Kind | None = None
        self._last: Reading | None = None
        self._open = ExitStack()

    def look(self) -> BoardState:
        """Return where the board stands.

        Raises:
            DeviceError: If it cannot be reached, or the look before has not come back.
        """
        # A look that was given up may still be under way: its board is not asked a second time meanwhile.
        if not self._turn.acquire(blocking=False):
            raise DeviceError("still no answer to what it was asked before")
        try:
            return self._look()
        except BaseException:
            self._let_go()
            raise
        finally:
            self._turn.release()

    def _look(self) -> BoardState:
        device = self._opened()
        before = self._last
        if before is None or isinstance(device.clock, VirtualClock):
            before = device.read()
            device.clock.sleep(_LOOK_S)
        now = device.read()
        self._last = now
        return BoardState(
            self._uri,
            kind=self._kind,
            power_w=_power_w(before, now),
            energy_kind=device.energy_kind,
            temperature_c=now.temperature_c,
            throttled=now.throttled,
            stands=tuple(_standing(device)),
        )

    def _opened(self) -> Device:
        if self._device is None:
            device = open_device(self._uri)
            if isinstance(device, Recorded):
                raise InvalidInput("a recorded table is no board")
            if isinstance(device, Sampled):
                self._open.enter_context(device.sampling())
            if isinstance(device, SshDevice):
                self._open.callback(device.board.close)
            self._kind = Kind.of(device)
            self._device = device
        return self._device

    def _let_go(self) -> None:
        self._device = None
        self._last = None
        self._open.close()

    def close(self) -> None:
        """Let go of the board, unless a look that was given up still holds it."""
        if self._turn.acquire(blocking=False):
            try:
                self._let_go()
            finally:
                self._turn.release()


def _power_w(before: Reading, now: Reading) -> float | None:
    """Return the mean power between two readings; None where the counter began anew or time stood still."""
    span_s = now.time_s - before.time_s
    grown_j = now.energy_j - before.energy_j
    if span_s <= 0 or grown_j < 0:
        return None
    return grown_j / span_s


def _standing(device: Device) -> Iterator[str]:
    """Yield what stands changed on a board's machine; nothing of a simulated one, which keeps nothing."""
    found: Sequence[Finding] = ()
    if isinstance(device, SshDevice):
        found = device.board.examined()["records"]
    elif isinstance(device, Inspectable) and not isinstance(device.clock, VirtualClock):
        found = record_findings()
    for each in found:
        if each.subject not in ABOUT_RECORDS or (each.subject == "originals" and each.works is False):
            yield f"{each.subject}: {each.explanation}"
