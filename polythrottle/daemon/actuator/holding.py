"""One device behind the actuator: who has it, what is applied, and its return to how it was found."""

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from typing import Any

from polythrottle.actuation.lease import boot_s, one_line
from polythrottle.actuation.wire import Later, LeaseOver
from polythrottle.daemon.actuator.opening import Meter, asked, described, looking, offers_of, opened
from polythrottle.daemon.actuator.permits import Rights
from polythrottle.daemon.actuator.terms import Term, Terms
from polythrottle.daemon.peers import Peer
from polythrottle.errors import (
    DeviceError,
    KnobRejected,
    PermissionDenied,
    PolythrottleError,
)
from polythrottle.ports import Device, Offer, Offering
from polythrottle.space import Level, OperatingPoint
from polythrottle.units import show_level, show_name

_LOOK_S = 60.0
_KNOWN_S, _KNOWN_HELD_S = 10.0, 300.0  # to inspect a GPU takes a second, in which nobody is answered
_AGAIN_S = 5.0


class Holding:
    """A device that is served. Opened anew for each lease, for drivers are reloaded and GPUs move.

    Args:
        uri: What opens it.
        note: Takes number of the lease and what happened to it, for the audit.
        now_s: The clock that leases go by.
    """

    def __init__(self, uri: str, note: Callable[[int, str], None], now_s: Callable[[], float] = boot_s) -> None:
        self.uri = uri
        self.terms = Terms()
        self._note, self._now_s = note, now_s
        self._device: Device | None = None
        self._offers: Mapping[str, Offer] = {}
        self._point: OperatingPoint | None = None
        self._meter = Meter()
        self._looking: ExitStack | None = None
        self._looked: tuple[Device, float] | None = None
        self._known: tuple[float, dict[str, Any]] | None = None
        self._retry_s: float | None = None
        self._owed = ""

    @property
    def names(self) -> tuple[str, ...]:
        """The URIs it is known by."""
        told = [str(self._known[1]["uri"])] if self._known else []
        return tuple(dict.fromkeys((self.uri, asked(self.uri), *told)))

    def answers_to(self, name: str) -> bool:
        """Say whether it is known by a URI, also by that which the device gives itself, such as a GPU's UUID."""
        if name and name not in self.names and self._known is None:
            with suppress(PolythrottleError):
                self.description()
        return name in self.names

    @property
    def point(self) -> dict[str, Level]:
        """What is applied; empty while the device is as found."""
        return dict(self._point or {})

    def description(self) -> dict[str, Any]:
        """Return what the device is and has; up to ten seconds old, while somebody has it up to five minutes.

        Raises:
            PolythrottleError: As opening the device does.
        """
        now_s, stale_s = self._now_s(), _KNOWN_S if self._device is None else _KNOWN_HELD_S
        if self._known is None or now_s - self._known[0] > stale_s:
            self._known = now_s, described(self._device if self._device is not None else opened(self.uri))
        return self._known[1]

    def take(self, peer: Peer, holder: str, seconds: float, token: str | None) -> dict[str, Any]:
        """Give the device to a peer.

        Raises:
            DeviceError: If somebody else has it, or it cannot be entered.
        """
        term, resumed = self.terms.take(peer, one_line(holder), self._now_s() + seconds, token)
        if not resumed:
            try:
                self._enter()
            except BaseException:
                self.terms.lease = None
                raise
            term.renew(self._now_s() + seconds)  # it begins when the device is there, which may take a while
        self._note(self.terms.number, f"{'resumed' if resumed else 'leased'} by {term.holder} (user {peer.uid})")
        return {"token": term.token, "seconds": seconds, "resumed": resumed, "point": self.point}

    def _enter(self) -> None:
        self._stop_looking()
        with ExitStack() as stack:
            device = stack.enter_context(opened(self.uri))
            self._offers = {offer.knob.name: offer for offer in offers_of(device)}
            self._device, self._point = device, None
            self._retry_s, self._owed = None, ""
            stack.pop_all()  # it is left when the lease ends
        self._meter.begin()

    def renew(self, term: Term, seconds: float) -> dict[str, Any]:
        """Put the end of a lease or a loan off."""
        term.renew(self._now_s() + seconds)
        return {"seconds": seconds, "lent": self.terms.loan is not None}

    def apply(self, token: str, peer: Peer, levels: Mapping[str, Level], rights: Rights) -> dict[str, Any]:
        """Set a point.

        Raises:
            KnobRejected: If a level is not one of the device's, or not kept.
            PermissionDenied: If the administrator does not permit it.
            Later: If too many were set lately.
            LeaseOver: If the lease is over, also because the device has gone; `Lent` if it is lent.
        """
        self.terms.setter(token, peer)
        device = self._entered()
        point = OperatingPoint({name: self._level(name, level) for name, level in levels.items()})
        if not rights.allow(point, {name: offer.default for name, offer in self._offers.items()}):
            raise PermissionDenied(f"the administrator's permits do not let {peer.name} set {_told(point)}")
        if after_s := self.terms.wait_s(self._now_s()):
            raise Later(f"too many points were set lately; the next in {after_s:.2g} s", after_s)
        started_s = time.monotonic()
        self._set(device, point)
        return {"point": self.point, "took_s": time.monotonic() - started_s}

    def _set(self, device: Device, point: OperatingPoint) -> None:
        self._meter.advance(device)
        self._point = point  # also if it is kept in part alone
        try:
            device.apply(point)
        except PermissionDenied:
            raise
        except DeviceError as err:
            self.end(f"the device could not be set: {err}")
            raise LeaseOver(f"{err}; the lease has ended") from err

    def _level(self, name: str, level: Level) -> Level:
        """Return the level as the device has it.

        Raises:
            KnobRejected: If it has none such.
        """
        if name not in self._offers:
            raise KnobRejected(f"there is no knob {name[:60]!r} here; there are {', '.join(self._offers) or 'none'}")
        levels = self._offers[name].knob.levels
        if level not in levels or isinstance(level, str) != isinstance(levels[0], str):
            ends = f"{show_level(name, levels[0])} to {show_level(name, levels[-1])}"
            raise KnobRejected(f"{name} has no level {str(level)[:40]}; its {len(levels)} go from {ends}")
        return levels[levels.index(level)]

    def _entered(self) -> Device:
        if self._device is None:
            raise LeaseOver("the lease is over; take the device again")
        return self._device

    def read(self) -> dict[str, Any]:
        """Return a reading.

        Raises:
            DeviceError: If the device cannot be read.
            TrialError: If its joules are not known for a while.
        """
        return self._meter.read(self._device if self._device is not None else self._watched())

    def _watched(self) -> Device:
        """Return the device as it is looked at without a lease, for a minute after each reading."""
        if self._looked is None:
            device = opened(self.uri)
            self._looking = ExitStack()
            self._looking.enter_context(looking(device))
            self._meter.begin()
        else:
            device = self._looked[0]
        self._looked = device, self._now_s() + _LOOK_S
        return device

    def _stop_looking(self) -> None:
        if self._looked is not None and self._looking is not None:
            self._meter.end(self._looked[0])
            self._looking.close()
        self._looked, self._looking = None, None

    def altered(self) -> tuple[str, ...]:
        """Return the knobs that no longer hold what was applied last.

        Raises:
            DeviceError: If the device is gone, or there is no lease.
        """
        device = self._entered()
        return device.altered() if isinstance(device, Offering) and self._point is not None else ()

    def restore(self) -> tuple[str, ...]:
        """Put everything back, keep the lease, and return what is left as somebody else has set it.

        Raises:
            DeviceError: If something cannot be put back; names each.
        """
        device = self._entered()
        before = _differences(device)
        self._meter.advance(device)
        device.restore()
        self._point = None
        return tuple(each for each in _differences(device) if each not in before)

    def lend(self, peer: Peer, holder: str, seconds: float) -> dict[str, Any]:
        """Let another process of the same user set the device.

        Raises:
            Lent: If one does already.
        """
        loan = self.terms.lend(peer, one_line(holder), self._now_s() + seconds)
        self._note(self.terms.number, f"lent to {loan.holder}")
        return {"token": loan.token, "seconds": seconds}

    def end_loan(self, why: str) -> tuple[str, ...]:
        """End the loan, everything as found.

        Raises:
            DeviceError: If something cannot be put back.
        """
        self.terms.loan = None
        self._note(self.terms.number, f"loan ended: {one_line(why)}")
        return self.restore() if self._device is not None else ()

    def end(self, why: str) -> tuple[str, ...]:
        """End the lease, everything as found; what cannot be put back is tried again until it can.

        Returns:
            What is left.
        """
        device, self._device, self._point = self._device, None, None
        self.terms.lease = self.terms.loan = None
        self._note(self.terms.number, f"ended: {one_line(why)}")
        if device is None:
            return ()
        before = _differences(device)
        self._meter.end(device)
        try:
            device.__exit__(None, None, None)
        except (PolythrottleError, OSError) as err:
            self._note(self.terms.number, f"not restored: {one_line(str(err))}")
            self._retry_s, self._owed = self._now_s() + _AGAIN_S, str(err)
            return (self._owed,)
        return tuple(each for each in _differences(device) if each not in before)

    @property
    def next_s(self) -> float | None:
        """When `tick` has something to do next; None if never."""
        looked = None if self._looked is None else self._looked[1]
        return min((each for each in (self.terms.next_s, looked, self._retry_s) if each is not None), default=None)

    def tick(self) -> None:
        """End what has run out, and try again what could not be put back."""
        now_s = self._now_s()
        while (term := self.terms.overdue(now_s)) is not None:
            self._run_out(term)
        if self._looked is not None and self._looked[1] <= now_s:
            self._stop_looking()
        if self._retry_s is not None and self._retry_s <= now_s:
            self._retry_s = now_s + _AGAIN_S
            self._try_again()

    def _try_again(self) -> tuple[str, ...]:
        """Put back what could not be when the lease ended; return what still cannot."""
        try:
            with opened(self.uri):  # entering puts back what was left
                self._retry_s, self._owed = None, ""
        except (PolythrottleError, OSError) as err:
            again = str(err)
            return (self._owed,) if again == self._owed else (f"{self._owed}; tried again: {again}",)
        return ()

    def _run_out(self, term: Term) -> None:
        if term is self.terms.lease:
            self.end(f"{term.holder} did not renew it")
            return
        try:
            self.end_loan(f"{term.holder} did not renew it")
        except PolythrottleError as err:
            self.end(str(err))

    def close(self) -> tuple[str, ...]:
        """Put everything back, for good, also what could not be put back before; return what is left."""
        self._stop_looking()
        if self._device is not None:
            return self.end("the actuator ends")
        return self._try_again() if self._retry_s is not None else ()


def _differences(device: Device) -> Sequence[str]:
    return [str(each) for each in getattr(device, "differences", ())]


def _told(point: Mapping[str, Level]) -> str:
    return ", ".join(f"{show_name(name)} to {show_level(name, level)}" for name, level in point.items())[:200]
