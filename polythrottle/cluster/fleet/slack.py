"""Slack turned into joules: who would wait for the slowest node of a synchronous step is slowed to just meet it."""

from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from polythrottle.cluster.fleet.silicon import of_grade
from polythrottle.cluster.machine import Cap
from polythrottle.errors import InvalidInput

UNKNOWN = 0
"""The grade of a node that has not been calibrated: it runs at its default."""
DOUBT = 0.0025
"""How much earlier than the barrier a node is to arrive: grades are no finer, and the slowest of many that seem slow is
the one that was mistaken most."""

_ROUNDING = 1e-9


@dataclass(frozen=True)
class Pace:
    """How a fleet takes its steps.

    Attributes:
        step: Time of a step over that of a node in the middle at its default clock.
        caps: What nodes of each grade run under; of the first where several take turns.
        power_w: Mean power of all nodes together, in watts, what they draw at the barrier included.
        busy: Nodes' worth of time that goes into steps, the rest is waiting at the barrier.
        waiting_w: Of the power, that drawn at the barrier, in watts.
    """

    step: float
    caps: Mapping[int, Cap]
    power_w: float
    busy: float
    waiting_w: float

    @property
    def joules(self) -> float:
        """Return the joules of a step of the whole fleet, in watts × the step of a node in the middle."""
        return self.power_w * self.step


@dataclass(frozen=True)
class Ladder:
    """The caps of one machine by slowdown, worked out once: which costs least that is no slower than so much.

    Attributes:
        default: The cap it runs under when nobody chooses.
        idle_w: What it draws at the barrier, in watts.
        slowdowns: Of the caps, rising.
        best: For each of them the cap of fewest joules, waiting included, among those no slower.
    """

    default: Cap
    idle_w: float
    slowdowns: tuple[float, ...]
    best: tuple[Cap, ...]

    def within(self, slowdown: float) -> Cap:
        """Return the best cap that is no slower than so much; the fastest where none is that fast."""
        return self.best[max(0, bisect_right(self.slowdowns, slowdown + _ROUNDING) - 1)]


def ladder(caps: Sequence[Cap], idle_w: float) -> Ladder:
    """Return the ladder of caps.

    Args:
        caps: What a node can run under; the first is the default.
        idle_w: What it draws at the barrier, in watts.
    """
    rising = sorted(caps, key=lambda cap: cap.slowdown)
    best = rising[:1]
    for cap in rising[1:]:
        spares = (cap.power_w - idle_w) * cap.slowdown < (best[-1].power_w - idle_w) * best[-1].slowdown
        best.append(cap if spares else best[-1])
    return Ladder(caps[0], idle_w, tuple(cap.slowdown for cap in rising), tuple(best))


def frugal(caps: Sequence[Cap], factor: float, step: float, idle_w: float) -> Cap:
    """Return the cap under which a node takes its step for the least joules, waiting at the barrier included.

    Args:
        caps: What it can run under; the first is the default.
        factor: Its silicon's time factor.
        step: When the barrier opens, over the step of a node in the middle at its default.
        idle_w: What it draws at the barrier, in watts.

    Returns:
        The best of the caps that meet the barrier; the fastest where none does.
    """
    return ladder(caps, idle_w).within(step / factor)


def pace(nodes: Mapping[int, int], caps: Sequence[Cap], idle_w: float, stretch: float = 1.0) -> Pace:
    """Return the pace at which every node just meets the barrier of the slowest one.

    Args:
        nodes: How many there are of each grade; those of grade ``UNKNOWN`` run at their default.
        caps: What they can run under; the first is the default.
        idle_w: What a node draws at the barrier, in watts.
        stretch: How much later than at default clocks the barrier opens, >= 1.

    Raises:
        InvalidInput: If there is no node, or the stretch is below 1.
    """
    if stretch < 1 or sum(nodes.values()) < 1:
        raise InvalidInput(f"a pace needs a node and a stretch of at least 1, not {stretch}")
    return _pace(nodes, ladder(caps, idle_w), stretch)


def _pace(nodes: Mapping[int, int], rungs: Ladder, stretch: float) -> Pace:
    chosen = met(nodes, rungs, stretch)
    return paced({(grade, grade or _MIDDLE): count for grade, count in nodes.items()}, chosen, rungs.idle_w)


def met(nodes: Iterable[int], rungs: Ladder, stretch: float = 1.0) -> dict[int, Cap]:
    """Return the caps under which nodes of each grade just meet the barrier of the slowest.

    Args:
        nodes: The grades there are; those of grade ``UNKNOWN`` get the default.
        rungs: What they can run under.
        stretch: How much later than at default clocks the barrier opens, >= 1.
    """
    grades = tuple(nodes)
    barrier = slowest(grades) * stretch * rungs.default.slowdown * (1 - DOUBT)
    return {grade: rungs.default if grade == UNKNOWN else rungs.within(barrier / of_grade(grade)) for grade in grades}


def slowest(nodes: Iterable[int]) -> float:
    """Return the time factor of the slowest grade that is known, or of a node in the middle."""
    return max((of_grade(grade) for grade in nodes if grade != UNKNOWN), default=1.0)


_MIDDLE = 400  # the grade of factor 1


def paced(nodes: Mapping[tuple[int, int], int], chosen: Mapping[int, Cap], idle_w: float) -> Pace:
    """Return the pace that follows from caps, on nodes that may not be of the grade they are taken for.

    Args:
        nodes: How many there are of each pair of believed and true grade.
        chosen: What nodes of each believed grade run under.
        idle_w: What a node draws at the barrier, in watts.
    """
    times = {pair: chosen[pair[0]].slowdown * of_grade(pair[1]) for pair in nodes}
    step = max(times.values())
    busy = sum(count * times[pair] for pair, count in nodes.items()) / step
    running_w = sum(count * times[pair] * chosen[pair[0]].power_w for pair, count in nodes.items()) / step
    waiting_w = (sum(nodes.values()) - busy) * idle_w
    return Pace(step, chosen, running_w + waiting_w, busy, waiting_w)


def by_turns(some: Sequence[tuple[Pace, float]], more: float = 0.0) -> Pace:
    """Return what paces amount to that take turns.

    Args:
        some: Each pace with its share of the steps; shares sum to 1.
        more: What each step takes that no pace changes, over the step of a node in the middle.
    """
    times = [share * (each.step + more) for each, share in some]
    whole = sum(times)

    def mean(values: Iterable[float]) -> float:
        return sum(time * value for time, value in zip(times, values, strict=True)) / whole

    return Pace(
        whole - more,
        some[0][0].caps,
        mean(each.power_w for each, _ in some),
        mean(each.busy for each, _ in some),
        mean(each.waiting_w for each, _ in some),
    )


def paces(
    nodes: Mapping[int, int], caps: Sequence[Cap], idle_w: float, stretches: Sequence[float]
) -> tuple[tuple[Pace, Cap], ...]:
    """Return the paces a fleet may choose from, each with the cap it amounts to for a mean node.

    Such a cap is what `polythrottle.cluster.plan` chooses an interval with: the slowdown of the whole fleet over the
    first stretch's, and the mean power of a node.

    Args:
        nodes: How many there are of each grade.
        caps: What they can run under; the first is the default.
        idle_w: What a node draws at the barrier, in watts.
        stretches: How much later the barrier may open; the first is the least.
    """
    rungs = ladder(caps, idle_w)
    found = [_pace(nodes, rungs, stretch) for stretch in stretches]
    total = sum(nodes.values())
    return tuple((each, Cap(None, each.step / found[0].step, each.power_w / total)) for each in found)
