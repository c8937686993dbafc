"""What a controller does beside membership: caps nodes by their paces, watches the speed, applies remedies."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from math import isfinite
from statistics import median, median_low
from typing import Any

from polythrottle.domain.errors import InvalidInput
from polythrottle.domain.fleet.gpu_variability import meeting
from polythrottle.domain.fleet.transient_machine import Cap
from polythrottle.storage.fleet_knowledge import CapObservation
from polythrottle.training.elastic.membership import Membership
from polythrottle.training.elastic.nodes.bottleneck_remedies import (
    BottleneckMonitor,
    MonitorTerms,
    ObservedNode,
    proposal_document,
    tried_document,
)
from polythrottle.training.elastic.nodes.power_cap_search import NewcomerStep
from polythrottle.training.elastic.worker.process import Pace, Tally, pace_of

# What the controller hears of nodes' paces and boards, and the caps it answers with: each just meets the slowest.
#
# Only what a node measured itself counts as its step; what caps do to it is its own word, else the middle of what its
# group says, so that one node that lies moves nobody else. The barrier is never later than the job's own steps show.

_MOST = 1000
_LONGEST = 300
_NUMBERS = ("limit_w", "power_w", "temperature_c", "factor", "flagged", "known_s")
_TEXTS = ("device", "title", "energy_kind", "gpu", "verdict", "reason", "trouble")


@dataclass
class PaceReport:
    """What one node has said.

    Attributes:
        pace: Its newest pace; None before it has trained.
        board: What it says of its board; empty where it steers none.
        looks: What it measured itself, in this network and share.
        known: What caps do elsewhere, as it read it from the store.
        limits_w: The limits its board can be set to, in watts.
        step: Its newest steps.
        before: The tally those are counted from.
        power_w: What it was last known to draw, in watts; 0 where that was never known.
    """

    pace: Pace | None = None
    board: Mapping[str, Any] = field(default_factory=dict)
    looks: tuple[CapObservation, ...] = ()
    known: tuple[Cap, ...] = ()
    limits_w: frozenset[float] = frozenset()
    step: Tally = field(default_factory=Tally)
    before: Tally = field(default_factory=Tally)
    power_w: float = 0.0

    @property
    def default_s(self) -> float | None:
        """Return its own step at its default clocks, in seconds; None while it has not measured it."""
        return next((look.step_s for look in self.looks if look.limit_w is None), None)

    def mean_s(self, part: Callable[[Tally], float]) -> float | None:
        """Return a part of its newest steps, in seconds a step; None before it has done one."""
        if self.step.steps:
            return part(self.step) / self.step.steps
        return None


class PacePlanner:
    """The paces of a job's nodes, and the caps that turn slack into joules.

    Args:
        longer: How much later than the slowest node at its default all may be, as a fraction.
    """

    def __init__(self, longer: float = 0.0) -> None:
        self._stretch = 1 + longer
        self.nodes: dict[str, PaceReport] = {}
        self._members: tuple[str, ...] = ()
        self._generation = 0
        self._caps: dict[str, Cap] | None = None
        self._power_w = 0.0
        self.barrier_s: float | None = None

    def formed(self, generation: int, members: Sequence[str]) -> None:
        """Plan anew for the members of a new generation; who is in none is forgotten."""
        self._generation = generation
        self._members = tuple(members)
        self._caps = None
        self.nodes = {name: self.nodes.get(name, PaceReport()) for name in members}
        for heard in self.nodes.values():
            heard.step = heard.before = Tally()
            heard.pace = None
        self._power_w = sum(heard.power_w for heard in self.nodes.values())

    def hear(self, name: str, words: Mapping[str, Any]) -> None:
        """Take note of what a member says with a beat.

        Raises:
            InvalidInput: If it makes no sense.
        """
        heard = self.nodes.get(name)
        if heard is None:
            return
        try:
            if "pace" in words:
                self._take_pace(heard, pace_of(words["pace"]))
            if "steering" in words:
                self._take_board(heard, words["steering"])
        except (KeyError, TypeError, ValueError, AttributeError, ArithmeticError) as error:
            raise InvalidInput(f"what node {name} says of its board makes no sense: {error}") from error

    def answer(self, name: str) -> dict[str, Any]:
        """Return what a node is told of the group's pace."""
        heard = self.nodes.get(name)
        if heard is None:
            return {}
        cap = self._planned().get(name)
        own_s = heard.default_s
        room = 0.0
        if self.barrier_s is not None and own_s:
            room = self.barrier_s / own_s - 1
        return {
            "cap": None if cap is None else [cap.limit_w, cap.slowdown, cap.power_w],
            "room": max(0.0, room),
            "waiting_w": max(0.0, self._power_w - heard.power_w),
        }

    def row(self, name: str) -> dict[str, Any]:
        """Return what is known of a node's pace and board, for `status`; unknown is None."""
        heard = self.nodes.get(name, PaceReport())
        columns: dict[str, Any] = {
            "step_s": heard.mean_s(lambda tally: tally.step_s),
            "own_s": heard.mean_s(lambda tally: tally.own_s),
            "input_s": heard.mean_s(lambda tally: tally.data_s),
            "steering": None,
        }
        if heard.board:
            cap = self._planned().get(name)
            planned = {"planned": cap is not None, "planned_w": None if cap is None else cap.limit_w}
            columns["steering"] = dict(heard.board) | planned
        return columns

    def slowdowns(self) -> dict[str, float | None]:
        """Return what each node's present cap does to its step; None while that is still being measured."""
        middle = self._middle()
        slowdowns: dict[str, float | None] = {}
        for name, heard in self.nodes.items():
            limit_w = heard.board.get("limit_w")
            caps = () if limit_w is None else self._caps_of(name, middle)
            known = next((cap.slowdown for cap in caps if cap.limit_w == limit_w), None)
            slowdowns[name] = 1.0 if limit_w is None else known
        return slowdowns

    def _take_pace(self, heard: PaceReport, pace: Pace) -> None:
        if pace.generation != self._generation:
            return
        # Another share of a step takes another time: what was counted before says nothing of it.
        if heard.pace is None or pace.network != heard.pace.network:
            heard.before = pace.tally
            heard.step = Tally()
        elif (more := pace.tally.since(heard.before)).steps:
            heard.before = pace.tally
            heard.step = more
        heard.pace = pace

    def _take_board(self, heard: PaceReport, board: Mapping[str, Any]) -> None:
        looks = tuple(_look(each) for each in _few(board.get("looks") or ()))
        known = tuple(Cap(*each) for each in _few(board.get("caps") or ()))
        plain: dict[str, Any] = {key: _number(board.get(key)) for key in _NUMBERS}
        plain |= {key: None if board.get(key) is None else str(board[key])[:_LONGEST] for key in _TEXTS}
        plain["throttled"] = board.get("throttled") is True
        heard.limits_w = frozenset(float(each) for each in _few(board.get("limits") or ()))
        if _limits(looks) != _limits(heard.looks) or _limits(known) != _limits(heard.known):
            self._caps = None  # what is known of a limit already drifts with every window, and is no reason to change
        self._power_w -= heard.power_w
        heard.board = plain
        heard.looks = looks
        heard.known = known
        # Right after a change of its cap a node does not know what it draws; it still draws something while it waits.
        heard.power_w = plain["power_w"] or heard.power_w
        self._power_w += heard.power_w

    def _planned(self) -> dict[str, Cap]:
        if self._caps is None:
            self._caps = self._plan()
        return self._caps

    def _plan(self) -> dict[str, Cap]:
        """Return every node's cap, of those that have measured themselves; others run at their default."""
        known = {name: own_s for name in self._members if (own_s := self.nodes[name].default_s) is not None}
        if not known:
            self.barrier_s = None
            return {}
        self.barrier_s = max(known.values()) * self._stretch
        steps_s = [seen_s for name in known if (seen_s := self.nodes[name].mean_s(_whole)) is not None]
        if len(known) > 1 and steps_s:  # who says it is slower than the job's own steps slows nobody down
            self.barrier_s = min(self.barrier_s, max(median_low(steps_s), sorted(known.values())[-2]) * self._stretch)
        middle = self._middle()
        nodes = {name: (own_s, caps) for name, own_s in known.items() if len(caps := self._caps_of(name, middle)) > 1}
        return meeting(nodes, self.barrier_s)

    def _caps_of(self, name: str, middle: Mapping[tuple[str, float], tuple[float, float]]) -> tuple[Cap, ...]:
        """Return what a node can run under, the default first: its own looks, else what its type does elsewhere."""
        heard = self.nodes[name]
        default = next((look for look in heard.looks if look.limit_w is None), None)
        if default is None:
            return ()
        gpu = str(heard.board.get("gpu"))
        # Limits that others of its type have but it has not would be refused by its driver.
        own = heard.limits_w
        pairs = {limit_w: pair for (kind, limit_w), pair in middle.items() if kind == gpu and limit_w in own}
        pairs |= _pairs(heard.looks)
        caps = (
            Cap(limit_w, max(1.0, slow), share * default.power_w)  # no cap makes a node faster: that is chance
            for limit_w, (slow, share) in sorted(pairs.items(), reverse=True)
        )
        return (Cap(None, 1.0, default.power_w), *caps)

    def _middle(self) -> dict[tuple[str, float], tuple[float, float]]:
        """Return slowdown and share of power by type and limit: the middle of all that nodes saw or read."""
        by_limit: dict[tuple[str, float], list[tuple[float, float]]] = {}
        for heard in self.nodes.values():
            for limit_w, pair in (_read(heard.known) | _pairs(heard.looks)).items():
                by_limit.setdefault((str(heard.board.get("gpu")), limit_w), []).append(pair)
        return {key: (median(s for s, _ in pairs), median(p for _, p in pairs)) for key, pairs in by_limit.items()}


def _limits(rows: Iterable[CapObservation] | Iterable[Cap]) -> frozenset[float | None]:
    return frozenset(row.limit_w for row in rows)


def _whole(tally: Tally) -> float:
    return tally.step_s


def _pairs(looks: Iterable[CapObservation]) -> dict[float, tuple[float, float]]:
    """Return slowdown and share of power against the default's look, by limit."""
    by_limit = {look.limit_w: look for look in looks}
    default = by_limit.pop(None, None)
    if default is None:
        return {}
    return {
        limit_w: (look.step_s / default.step_s, look.power_w / default.power_w)
        for limit_w, look in by_limit.items()
        if limit_w is not None
    }


def _read(caps: Sequence[Cap]) -> dict[float, tuple[float, float]]:
    if not caps or caps[0].limit_w is not None:
        return {}
    return {cap.limit_w: (cap.slowdown, cap.power_w / caps[0].power_w) for cap in caps[1:] if cap.limit_w is not None}


def _few(rows: Sequence[Any]) -> Sequence[Any]:
    if len(rows) > _MOST:
        raise InvalidInput(f"a node tells of {len(rows)} limits, more than any board has")
    return rows


def _look(row: Sequence[Any]) -> CapObservation:
    limit_w, step_s, power_w, windows = row
    return CapObservation(limit_w, float(step_s), float(power_w), int(windows))


def _number(value: Any) -> float | None:
    """Return a finite number, None for anything else."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not isfinite(value):
        return None
    return float(value)


# What a controller does beside membership: it paces the nodes, watches the job's speed, and does what is allowed.

_REMEDIED = ("remedy tried", "remedy kept", "remedy taken back")
OVERSEEN = ("cap", "bottleneck", "no bottleneck", *_REMEDIED)
"""The events of this module."""
_SETTLED = (NewcomerStep.KEPT, NewcomerStep.REFUSED, NewcomerStep.DEFAULT, NewcomerStep.UNKNOWN)
Note = Callable[[Mapping[str, Any]], object]


@dataclass(frozen=True)
class Watched:
    """How a job's nodes are paced and watched.

    Attributes:
        longer: How much later than the slowest node at its default all may be, as a fraction.
        terms: When a shortfall is a bottleneck, and what may be done about it.
    """

    longer: float = 0.0
    terms: MonitorTerms = field(default_factory=MonitorTerms)

    def __post_init__(self) -> None:
        if not 0 <= self.longer < 1:
            raise InvalidInput(f"steps may be longer by a share of at least 0 and below 1, not {self.longer}")


def overseen(records: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """Return what a job's events, oldest first, tell of caps, bottlenecks and remedies: what came last of each."""
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
        self._membership = membership
        self._note = note
        self._pacing = PacePlanner(watched.longer)
        self._lookout = BottleneckMonitor(watched.terms)
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
        spoilt = self._lookout.spoilt()
        tried = self._lookout.result(self._batch())
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
        held = self._membership
        batch = self._batch()
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

    def _members(self) -> list[ObservedNode]:
        found = []
        slowdowns = self._pacing.slowdowns()
        for name, heard in self._pacing.nodes.items():
            if heard.pace is not None:
                board = heard.board
                known_s = board.get("known_s")
                throttled = bool(board.get("throttled"))
                about = str(board.get("gpu") or ""), slowdowns[name], known_s, throttled
                found.append(ObservedNode(name, heard.pace, *about))
        return found
