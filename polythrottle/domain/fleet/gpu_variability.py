"""How GPUs of one model differ, and what the slack of the faster ones saves at a barrier.

Grades, ladders of caps, paces.
"""

from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import ceil
from random import Random
from statistics import median

from polythrottle.domain.errors import InvalidInput
from polythrottle.domain.fleet.transient_machine import Cap

# How GPUs of one model differ: drawn for a simulation, calibrated on a node, and flagged where one stands out.
#
# Five clusters of more than 18,800 hours showed that GPUs of one model differ in speed by 8 % on average over
# programs and at most by 22 %, with outliers of half as fast again as the median (arXiv 2208.11035, SC'22). A factor
# here is the time of a step over that of a node in the middle: 1.04 is 4 % slower.

TYPICAL = 0.08
WORST = 0.22
"""From the fastest to the slowest GPU of one model, without outliers: mean over programs, and most (SC'22)."""
OUTLIER = 1.5
"""How many times slower than the median the slowest outlier was (SC'22)."""
FLAG_MADS = 3.0
"""A node further than this from the middle of its type is named to people."""

_WHISKERS = 5.4  # a box plot's whiskers (quartiles ± 1.5 interquartile ranges) are this many standard deviations apart
_STEP = 0.0025
_LEAST_MAD = 0.005
FEWEST_NODES = 4
"""Fewer nodes have no middle worth the name."""


@dataclass(frozen=True)
class Silicon:
    """How the speeds of one type are spread: normal between the whiskers, with a few outliers.

    Attributes:
        spread: From the fastest to the slowest, as a fraction of the middle.
        outliers: Share of GPUs that are outliers, spread evenly up to ``OUTLIER`` times the middle's time.
    """

    spread: float = TYPICAL
    outliers: float = 0.0

    def __post_init__(self) -> None:
        if not (0 <= self.spread < 1 and 0 <= self.outliers <= 1):
            raise InvalidInput(f"a spread is in [0, 1) and a share in [0, 1], not {self.spread} and {self.outliers}")

    def draw(self, chance: Random) -> float:
        """Return the time factor of one GPU."""
        if self.outliers and chance.random() < self.outliers:
            return 1 + self.spread / 2 + chance.random() * (OUTLIER - 1 - self.spread / 2)
        side = self.spread / 2
        # Cut at the whiskers: what lies beyond them the study counts as outliers, which are drawn above.
        return 1 + min(side, max(-side, chance.gauss(0.0, self.spread / _WHISKERS)))


def grade(factor: float) -> int:
    """Return the class of a factor, in steps of a quarter of a per cent, rounded to the slower side.

    Nodes of one class are planned as one, so that a plan costs no more for a thousand nodes than for fifty.
    """
    # The margin keeps a factor that lies on a grade but for rounding from the next slower one.
    return ceil(factor / _STEP - 1e-9)


def of_grade(number: int) -> float:
    """Return the factor a class stands for."""
    return number * _STEP


def calibrated(steps_s: Sequence[float], expected_s: float) -> float:
    """Return a node's factor from its windows: their median over what a node in the middle takes.

    Args:
        steps_s: Mean step time of each window, at the default clock, in seconds.
        expected_s: What the fleet knows of the type, in seconds.

    Raises:
        InvalidInput: If there is no window, or a time is not positive.
    """
    if not steps_s or expected_s <= 0 or min(steps_s) <= 0:
        raise InvalidInput("a node is calibrated from at least one window and times above 0 s")
    return median(steps_s) / expected_s


def flagged(factors: Mapping[str, float], mads: float = FLAG_MADS) -> dict[str, float]:
    """Return the nodes that stand out from their type, by how many median absolute deviations; slower is positive.

    Args:
        factors: Time factor of each node of one type.
        mads: From how many on.

    Returns:
        Nothing for fewer than four nodes: three have no middle worth the name.
    """
    if len(factors) < FEWEST_NODES:
        return {}
    middle = median(factors.values())
    # Half a per cent is what windows tell apart: a fleet of equals must not flag its noise.
    deviation = max(_LEAST_MAD, median(abs(each - middle) for each in factors.values()))
    away = {name: (each - middle) / deviation for name, each in factors.items()}
    return {name: each for name, each in away.items() if abs(each) > mads}


# Slack turned into joules: who would wait for the slowest node of a synchronous step is slowed to just meet it.

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
        # Over idle power only: that much a node draws up to the barrier in any case.
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


# The caps under which nodes of any type just meet a barrier that is known in seconds.


def meeting(nodes: Mapping[str, tuple[float, Sequence[Cap]]], barrier_s: float, idle_w: float = 0.0) -> dict[str, Cap]:
    """Return the cap under which each node just meets a barrier.

    Unlike `polythrottle.domain.fleet.gpu_variability.met` it needs no common type: what counts is each node's own
    step, and what caps do to it there.

    Args:
        nodes: By name, the time of its own step at its default, in seconds, and what it can run under, the default
            first.
        barrier_s: When all are to be there, in seconds from the beginning of a step.
        idle_w: What a node draws at the barrier, in watts; 0 where it is counted into the power of its steps.
    """
    until_s = barrier_s * (1 - DOUBT)
    return {
        name: caps[0] if own_s * caps[0].slowdown > until_s else frugal(caps, own_s, until_s, idle_w)
        for name, (own_s, caps) in nodes.items()
    }
