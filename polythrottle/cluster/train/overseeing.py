"""What a controller does beside membership: it paces the nodes, watches the job's speed, and does what is allowed."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from polythrottle.cluster.fleet.newcomer import Next
from polythrottle.cluster.train.lookout import Lookout, Member, Terms, proposal_document, tried_document
from polythrottle.cluster.train.membership import Membership
from polythrottle.cluster.train.pacing import Pacing
from polythrottle.errors import InvalidInput

_REMEDIED = ("remedy tried", "remedy kept", "remedy taken back")
OVERSEEN = ("cap", "bottleneck", "no bottleneck", *_REMEDIED)
"""The events of this module."""
_SETTLED = (Next.KEPT, Next.REFUSED, Next.DEFAULT, Next.UNKNOWN)
Note = Callable[[Mapping[str, Any]], object]


@dataclass(frozen=True)
class Watched:
    """How a job's nodes are paced and watched.

    Attributes:
        longer: How much later than the slowest node at its default all may be, as a fraction.
        terms: When a shortfall is a bottleneck, and what may be done about it.
    """

    longer: float = 0.0
    terms: Terms = field(default_factory=Terms)

    def __post_init__(self) -> None:
        if not 0 <= self.longer < 1:
            raise InvalidInput(f"steps may be longer by a share of at least 0 and below 1, not {self.longer}")


def overseen(records: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """Return what a job's events tell of caps, bottlenecks and remedies after its controller: what came last of each.

    Args:
        records: Its events, oldest first.
    """
    caps: dict[str, Mapping[str, Any]] = {}
    remedies: dict[tuple[str, ...], Mapping[str, Any]] = {}
    last: Mapping[str, Any] | None = None
    for record in records:
        if record.get("event") == "cap":
            caps[str(record["node"])] = record
        elif record.get("event") in ("bottleneck", "no bottleneck"):
            last = record
        elif record.get("event") in _REMEDIED:
            remedy = (str(record["remedy"]), *record.get("nodes", ()))
            remedies[remedy] = record
    return {
        "last_caps": [dict(each) for each in caps.values()],
        "last_bottleneck": None if last is None else dict(last),
        "last_remedies": [dict(each) for each in remedies.values()],
    }


class Overseer:
    """Paces and watches one job.

    Args:
        watched: How.
        membership: Who trains.
        note: Keeps an event.
    """

    def __init__(self, watched: Watched, membership: Membership, note: Note) -> None:
        self._membership, self._note = membership, note
        self._pacing, self._lookout = Pacing(watched.longer), Lookout(watched.terms)
        self._generation = -1
        self._held_w: dict[str, float | None] = {}

    def hear(self, name: str, words: Mapping[str, Any]) -> None:
        """Take note of what a node says with a beat.

        Raises:
            InvalidInput: If it makes no sense.
        """
        self._pacing.hear(name, words)
        heard = self._pacing.nodes.get(name)
        if heard is not None and heard.board.get("verdict") in _SETTLED:
            self._mention_cap(name, heard.board)

    def answer(self, name: str, losses_per_h: float) -> dict[str, Any]:
        """Return what a node is told beside its place in the group.

        Args:
            name: The node.
            losses_per_h: Losses of one node per hour, as far as that is known.
        """
        return self._pacing.answer(name) | {"losses_per_h": losses_per_h}

    def row(self, name: str) -> dict[str, Any]:
        """Return what `status` says of a node's pace and board."""
        return self._pacing.row(name)

    def document(self) -> dict[str, Any]:
        """Return what `status` says of the job's speed."""
        return self._lookout.document()

    def tick(self, now_s: float) -> None:
        """Follow the membership, look at the job's speed, and do or take back what is to be.

        Args:
            now_s: The time by the controller's clock.
        """
        held = self._membership
        if held.generation != self._generation:
            self._generation = held.generation
            self._pacing.formed(held.generation, held.members)
            self._lookout.formed(held.generation, held.members, now_s)
        if not self._lookout.due(now_s):
            return
        for event in self._lookout.look(self._members(), now_s):
            self._tell(event)
        self._verify()
        self._remedy()

    def _mention_cap(self, name: str, board: Mapping[str, Any]) -> None:
        """Tell of a cap that holds now, once: not of those that are only looked at."""
        limit_w = board.get("limit_w")
        if limit_w != self._held_w.get(name):
            self._held_w[name] = limit_w
            about = {key: board.get(key) for key in ("limit_w", "verdict", "reason", "power_w", "energy_kind")}
            self._tell({"event": "cap", "node": name, **about})

    def _verify(self) -> None:
        """Keep a remedy that has helped; let a node back in that was dropped for nothing."""
        spoilt, tried = self._lookout.spoilt(), self._lookout.result(self._batch())
        if spoilt is not None:
            self._tell({"event": "remedy taken back", **proposal_document(spoilt), "reason": "the group has changed"})
            self._readmit(spoilt.finding.nodes)
        elif tried is not None:
            self._tell({"event": "remedy kept" if tried.kept else "remedy taken back", **tried_document(tried)})
            self._readmit(() if tried.kept else tried.proposal.finding.nodes)

    def _readmit(self, names: Sequence[str]) -> None:
        for name in names:
            self._membership.readmit(name)

    def _remedy(self) -> None:
        held, batch = self._membership, self._batch()
        proposal = self._lookout.dropping(len(held.members) > held.rules.least)
        if proposal is not None:
            self._lookout.begin(proposal, batch)
            self._tell({"event": "remedy tried", **proposal_document(proposal)})
            for name in proposal.finding.nodes:
                held.drain(name, f"it is tried whether training without it is faster: {proposal.finding.words}")

    def _tell(self, event: Mapping[str, Any]) -> None:
        self._note({**event, "generation": self._membership.generation})

    def _batch(self) -> int:
        return next((each.pace.batch for each in self._pacing.nodes.values() if each.pace is not None), 1)

    def _members(self) -> list[Member]:
        found, slowdowns = [], self._pacing.slowdowns()
        for name, heard in self._pacing.nodes.items():
            if heard.pace is not None:
                board = heard.board
                known_s, throttled = board.get("known_s"), bool(board.get("throttled"))
                about = str(board.get("gpu") or ""), slowdowns[name], known_s, throttled
                found.append(Member(name, heard.pace, *about))
        return found
