"""Many boards looked at together: of which kind each is, what it draws, what stands applied on it."""

import hashlib
import json
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field

from polythrottle.backends import DeviceURI, open_device
from polythrottle.backends.device_uri import at_once, check_distinct
from polythrottle.backends.ssh import SshDevice
from polythrottle.domain.clock import Clock, VirtualClock
from polythrottle.domain.errors import DeviceError, InvalidInput
from polythrottle.domain.measurement import EnergyKind, Reading
from polythrottle.domain.ports import Device, Finding, Inspectable, Recorded, Sampled
from polythrottle.domain.space import SearchSpace
from polythrottle.inspect.machine import ABOUT_RECORDS, record_findings
from polythrottle.storage.identity import INDIVIDUAL, identity_of

WITHIN_S = 30.0
"""How long a board may take; ssh and its Python have to be started first."""
_LOOK_S = 1.0

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
            DeviceURI.parse(uri)
        self._boards = {uri: _WatchedBoard(uri) for uri in uris}
        self._within_s = within_s
        self._clock = clock

    def look(self, heard: Callable[[BoardState], object] = lambda state: None) -> tuple[BoardState, ...]:
        """Return what every board shows, in the order in which they were named.

        Args:
            heard: Called with each as soon as it has answered.
        """
        states: dict[str, BoardState] = {}
        for answer in at_once(tuple(self._boards), lambda uri: self._boards[uri].look(), self._within_s, self._clock):
            state = answer.found or BoardState(answer.uri, failure=" ".join(str(answer.error).split()))
            states[answer.uri] = state
            heard(state)
        return tuple(states[uri] for uri in self._boards)

    def close(self) -> None:
        """Let go of every board."""
        for board in self._boards.values():
            board.close()


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
