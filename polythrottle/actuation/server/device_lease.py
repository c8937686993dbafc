"""One device behind the actuator: who has it and until when, how often it may be set, what is applied.

Its return to how it was found.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from typing import Any

from polythrottle.actuation.restore import left_behind
from polythrottle.actuation.server.permits import Rights
from polythrottle.actuation.server.unix_socket import Peer
from polythrottle.actuation.state.lease import LeaseFileLost, boot_s, one_line
from polythrottle.actuation.wire import Later, LeaseOver, Lent
from polythrottle.backends.served_devices import (
    ContinuousReadings,
    background_sampling,
    description_of,
    given_uri,
    offers_of,
    open_served,
)
from polythrottle.domain.errors import DeviceError, KnobRejected, PermissionDenied, PolythrottleError
from polythrottle.domain.ports import Device, Offer, Offering
from polythrottle.domain.space import Level, OperatingPoint
from polythrottle.domain.units import no_level, show_level, show_name

# How often something may be done: a token bucket.

_LEAST_S = 0.001  # nobody can wait for less, and rounding must not refuse who has waited


class TokenBucket:
    """So much a second, and some at once.

    Args:
        per_s: How often a second in the long run.
        burst: How often at once.
    """

    def __init__(self, per_s: float, burst: int) -> None:
        self._per_s = per_s
        self._burst = burst
        self._left = float(burst)
        self._at_s = 0.0

    def wait_s(self, now_s: float) -> float:
        """Count one and return 0; if that is one too many, count none and return in how many seconds it is not.

        Args:
            now_s: On a clock that never goes back.
        """
        self._left = min(self._burst, self._left + (now_s - self._at_s) * self._per_s)
        self._at_s = now_s
        if self._left < 1:
            return max(_LEAST_S, (1 - self._left) / self._per_s)
        self._left -= 1
        return 0.0


# Who has a device, until when: a lease, and the loan of it to a study.

WRITES_PER_S = 10.0
BURST = 20
_TOKEN_BYTES = 16
_MOST_ENDED = 8


@dataclass
class Term:
    """A lease or a loan.

    Args:
        token: Whoever shows it has the device; void as soon as another is given for the same term.
        uid: Of the user whose it is.
        holder: Who, for people.
        ends_s: On the boot clock, unless renewed.
        pid: Of the process whose it is.
        put_off: Whether its end has been put off since it was renewed last.
    """

    token: str
    uid: int
    holder: str
    ends_s: float
    pid: int = 0
    put_off: bool = False

    def renew(self, ends_s: float) -> None:
        """Set the end anew."""
        self.ends_s = ends_s
        self.put_off = False


@dataclass
class LeaseAndLoan:
    """The lease of one device and the loan of it, if they run.

    Args:
        lease: The lease; None if nobody has the device.
        loan: The loan; None if the lender sets it himself.
        number: Of the lease, for the audit; rises.
        ended: The last lease that ended and its loans, whose holders may not have heard of it yet.
    """

    lease: Term | None = None
    loan: Term | None = None
    number: int = 0
    ended: tuple[Term, ...] = ()
    _pace: TokenBucket = field(default_factory=lambda: TokenBucket(WRITES_PER_S, BURST))

    def take(self, peer: Peer, holder: str, ends_s: float, token: str | None) -> tuple[Term, bool]:
        """Return a new lease, or that with this token under a new one, and whether it is the same one.

        Raises:
            DeviceError: If somebody else has one.
        """
        holder = f"{holder or 'somebody'}, {peer}"
        if self.lease is None:
            self.number = self.number + 1
            self._pace = TokenBucket(WRITES_PER_S, BURST)
            self.lease = Term(_token(), peer.uid, holder, ends_s, peer.pid)
            return self.lease, False
        if token != self.lease.token or peer.uid != self.lease.uid:
            raise DeviceError(f"the device is held by {self.lease.holder}; wait until it is given back, or stop that")
        self.lease = Term(_token(), peer.uid, holder, ends_s, peer.pid)
        return self.lease, True

    def lend(self, peer: Peer, holder: str, ends_s: float) -> Term:
        """Return a loan of the lease.

        Raises:
            Lent: If one runs already.
        """
        if self.loan is not None:
            raise Lent(f"the device is lent to {self.loan.holder} already; take it back first")
        self.loan = Term(_token(), peer.uid, f"{holder or 'somebody'}, for {peer}", ends_s, peer.pid)
        return self.loan

    def term(self, token: str, peer: Peer) -> Term | None:
        """Return the lease or loan of a token, None if it is of neither.

        Raises:
            PermissionDenied: If it is another user's.
        """
        for term in (self.lease, self.loan):
            if term is not None and term.token == token:
                if peer.uid not in (0, term.uid):
                    raise PermissionDenied("that token is of another user")
                return term
        return None

    def end(self) -> None:
        """End lease and loan."""
        self.end_loan()
        if self.lease is not None:
            self.ended = (*self.ended, self.lease)[-_MOST_ENDED:]
        self.lease = None

    def end_loan(self) -> None:
        """End the loan alone."""
        if self.loan is not None:
            self.ended = (*self.ended, self.loan)[-_MOST_ENDED:]
        self.loan = None

    def had(self, token: str, peer: Peer) -> bool:
        """Say whether a token of this user's was of the lease that ended last, or of a loan of it."""
        return any(term.token == token and peer.uid in (0, term.uid) for term in self.ended)

    def has(self, token: str) -> bool:
        """Say whether a token is of the lease or the loan."""
        return any(term is not None and term.token == token for term in (self.lease, self.loan))

    def held_by(self, peer: Peer) -> bool:
        """Return whether a process has the lease or the loan."""
        return any(term is not None and _is_of(term, peer) for term in (self.lease, self.loan))

    def setter(self, token: str, peer: Peer) -> Term:
        """Return the term under which a token sets the device now.

        Raises:
            Lent: If its loan runs.
            LeaseOver: If it is no good.
        """
        term = self.term(token, peer)
        if term is None:
            raise LeaseOver("the lease is over; take the device again")
        if self.loan is not None and term is self.lease:
            raise Lent(f"the device is lent to {self.loan.holder}; take it back, or wait")
        return term

    def put_off(self, seconds: float, token: str, peer: Peer) -> None:
        """Put the end of a term off for a slow call of whoever has it, once until it is renewed.

        Nobody can renew during a call. Only who shows a token is known to live: calls of anybody else put off nothing,
        or readers would prolong the lease of a client that has died.

        Args:
            seconds: How long the call took.
            token: That it showed: for the lease, what the process that was lent it does counts too.
            peer: Who called, whose own leases of other devices are put off too.
        """
        shown = self.has(token)
        for term in (self.lease, self.loan):
            if term is not None and not term.put_off and (shown or _is_of(term, peer)):
                term.ends_s = term.ends_s + seconds
                term.put_off = True

    def wait_s(self, now_s: float) -> float:
        """Count a write; return 0, or in how many seconds it may be done."""
        return self._pace.wait_s(now_s)

    def overdue(self, now_s: float) -> Term | None:
        """Return the term that has run out, the lease before the loan; None if none has."""
        due = (term for term in (self.lease, self.loan) if term is not None and term.ends_s <= now_s)
        return next(due, None)

    @property
    def next_s(self) -> float | None:
        """When a term runs out next; None if none does."""
        return min((term.ends_s for term in (self.lease, self.loan) if term is not None), default=None)


def _is_of(term: Term, peer: Peer) -> bool:
    return (term.uid, term.pid) == (peer.uid, peer.pid)


def _token() -> str:
    return os.urandom(_TOKEN_BYTES).hex()


# One device behind the actuator: who has it, what is applied, and its return to how it was found.

_LOOK_S = 60.0
# to inspect a GPU takes a second, in which nobody is answered
_KNOWN_S = 10.0
_KNOWN_HELD_S = 300.0
_AGAIN_S = 5.0


class ServedDevice:
    """A device that is served. Opened anew for each lease, for drivers are reloaded and GPUs move.

    Args:
        uri: What opens it.
        note: Takes number of the lease and what happened to it, for the audit.
        now_s: The clock that leases go by.
    """

    def __init__(self, uri: str, note: Callable[[int, str], None], now_s: Callable[[], float] = boot_s) -> None:
        self.uri = uri
        self.terms = LeaseAndLoan()
        self._note = note
        self._now_s = now_s
        self._device: Device | None = None
        self._offers: Mapping[str, Offer] = {}
        self._point: OperatingPoint | None = None
        self._meter = ContinuousReadings()
        self._looking: ExitStack | None = None
        self._looked: tuple[Device, float] | None = None
        self._known: tuple[float, dict[str, Any]] | None = None
        self._retry_s: float | None = None
        self._owed = ""
        self._left: tuple[str, ...] = ()

    @property
    def names(self) -> tuple[str, ...]:
        """The URIs it is known by."""
        told = [str(self._known[1]["uri"])] if self._known else []
        return tuple(dict.fromkeys((self.uri, given_uri(self.uri), *told)))

    def answers_to(self, name: str) -> bool:
        """Say whether it is known by a URI, also by that which the device gives itself, such as a GPU's UUID."""
        if name and name not in self.names and self._known is None:
            with suppress(PolythrottleError):
                self.description()
        return name in self.names

    @property
    def idle(self) -> bool:
        """Whether nobody has it and everything is as it was found."""
        return self._device is None and self.terms.lease is None and self._retry_s is None

    @property
    def point(self) -> dict[str, Level]:
        """What is applied; empty while the device is as found."""
        return dict(self._point or {})

    def description(self) -> dict[str, Any]:
        """Return what the device is and has; up to ten seconds old, while somebody has it up to five minutes.

        Raises:
            PolythrottleError: As opening the device does.
        """
        now_s = self._now_s()
        stale_s = _KNOWN_S if self._device is None else _KNOWN_HELD_S
        if self._known is None or now_s - self._known[0] > stale_s:
            self._known = now_s, description_of(self._device if self._device is not None else open_served(self.uri))
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
            device = stack.enter_context(open_served(self.uri))
            self._offers = {offer.knob.name: offer for offer in offers_of(device)}
            self._device = device
            self._point = None
            self._retry_s = None
            self._owed = ""
            self._left = ()
            self.terms.ended = ()  # not before: what they have left is still theirs to tell if entering fails
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
        except (DeviceError, LeaseFileLost) as err:
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
            raise KnobRejected(no_level(name, level, levels))
        return levels[levels.index(level)]

    @property
    def entered(self) -> Device:
        """The device under its lease.

        Raises:
            LeaseOver: If there is none.
        """
        return self._entered()

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
            device = open_served(self.uri)
            self._looking = ExitStack()
            self._looking.enter_context(background_sampling(device))
            self._meter.begin()
        else:
            device = self._looked[0]
        self._looked = device, self._now_s() + _LOOK_S
        return device

    def _stop_looking(self) -> None:
        if self._looked is not None and self._looking is not None:
            self._meter.end(self._looked[0])
            self._looking.close()
        self._looked = None
        self._looking = None

    def altered(self) -> tuple[str, ...]:
        """Return the knobs that no longer hold what was applied last.

        Raises:
            DeviceError: If the device is gone, or there is no lease.
        """
        device = self._entered()
        if isinstance(device, Offering) and self._point is not None:
            return device.altered()
        return ()

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
        self.terms.end_loan()
        self._note(self.terms.number, f"loan ended: {one_line(why)}")
        if self._device is not None:
            return self.restore()
        return ()

    def end(self, why: str) -> tuple[str, ...]:
        """End the lease, everything as found; what cannot be put back is tried again until it can.

        Returns:
            What is left.
        """
        device = self._device
        self._device = None
        self._point = None
        self.terms.end()
        self._note(self.terms.number, f"ended: {one_line(why)}")
        if device is None:
            return ()
        before = _differences(device)
        self._meter.end(device)
        try:
            device.__exit__(None, None, None)
        except (PolythrottleError, OSError) as err:
            self._note(self.terms.number, f"not restored: {one_line(str(err))}")
            self._retry_s = self._now_s() + _AGAIN_S
            self._owed = str(err)
            return (self._owed,)
        self._left = tuple(each for each in _differences(device) if each not in before)
        return self._left

    def account(self) -> dict[str, Any]:
        """Return what the lease that ended last has left, as an answer to ``release``."""
        owed = (self._owed,) if self._owed else ()
        return {"left": [*owed, *self._left], "owed": self._owed}

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
            with open_served(self.uri):  # entering puts back what was left
                self._retry_s = None
                self._owed = ""
        except (PolythrottleError, OSError) as err:
            again = str(err)
            if again == self._owed:
                return (self._owed,)
            return (f"{self._owed}; tried again: {again}",)
        return ()

    def _run_out(self, term: Term) -> None:
        if term is self.terms.lease:
            self.end(f"{term.holder} did not renew it")
            return
        try:
            self._left = self.end_loan(f"{term.holder} did not renew it")
        except PolythrottleError as err:
            self.end(str(err))

    def close(self) -> tuple[str, ...]:
        """Put everything back, for good, also what could not be put back before; return what is left."""
        self._stop_looking()
        if self._device is not None:
            return self.end("the actuator ends")
        if self._retry_s is not None:
            return self._try_again()
        if not self._left:
            return ()
        still = {str(each).partition(": ")[0] for outcome in left_behind() for each in outcome.foreign}
        return tuple(each for each in self._left if each.partition(": ")[0] in still)


def _differences(device: Device) -> Sequence[str]:
    return [str(each) for each in getattr(device, "differences", ())]


def _told(point: Mapping[str, Level]) -> str:
    return ", ".join(f"{show_name(name)} to {show_level(name, level)}" for name, level in point.items())[:200]
