"""Who has a device, until when: a lease, and the loan of it to a study."""

import os
from dataclasses import dataclass, field

from polythrottle.actuation.wire import LeaseOver, Lent
from polythrottle.daemon.actuator.pace import Pace
from polythrottle.daemon.peers import Peer
from polythrottle.errors import DeviceError, PermissionDenied

WRITES_PER_S, BURST = 10.0, 20
_TOKEN_BYTES = 16


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
        self.ends_s, self.put_off = ends_s, False


@dataclass
class Terms:
    """The lease of one device and the loan of it, if they run.

    Args:
        lease: The lease; None if nobody has the device.
        loan: The loan; None if the lender sets it himself.
        number: Of the lease, for the audit; rises.
    """

    lease: Term | None = None
    loan: Term | None = None
    number: int = 0
    _pace: Pace = field(default_factory=lambda: Pace(WRITES_PER_S, BURST))

    def take(self, peer: Peer, holder: str, ends_s: float, token: str | None) -> tuple[Term, bool]:
        """Return a new lease, or that with this token under a new one, and whether it is the same one.

        Raises:
            DeviceError: If somebody else has one.
        """
        holder = f"{holder or 'somebody'}, {peer}"
        if self.lease is None:
            self.number, self._pace = self.number + 1, Pace(WRITES_PER_S, BURST)
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
                term.ends_s, term.put_off = term.ends_s + seconds, True

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
