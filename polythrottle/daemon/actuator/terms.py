"""Who has a device, until when: a lease, and the loan of it to a study."""

import os
from dataclasses import dataclass, field

from polythrottle.actuation.wire import LeaseOver, Lent
from polythrottle.daemon.actuator.pace import Pace
from polythrottle.daemon.actuator.peers import Peer
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
    """

    token: str
    uid: int
    holder: str
    ends_s: float


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
            self.lease = Term(_token(), peer.uid, holder, ends_s)
            return self.lease, False
        if token != self.lease.token or peer.uid != self.lease.uid:
            raise DeviceError(f"the device is held by {self.lease.holder}; wait until it is given back, or stop that")
        self.lease = Term(_token(), peer.uid, holder, ends_s)
        return self.lease, True

    def lend(self, peer: Peer, holder: str, ends_s: float) -> Term:
        """Return a loan of the lease.

        Raises:
            Lent: If one runs already.
        """
        if self.loan is not None:
            raise Lent(f"the device is lent to {self.loan.holder} already; take it back first")
        self.loan = Term(_token(), peer.uid, f"{holder or 'somebody'}, for {peer}", ends_s)
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

    def put_off(self, seconds: float) -> None:
        """Put the ends of lease and loan off, for a time in which nobody could renew them."""
        for term in (self.lease, self.loan):
            if term is not None:
                term.ends_s += seconds

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


def _token() -> str:
    return os.urandom(_TOKEN_BYTES).hex()
