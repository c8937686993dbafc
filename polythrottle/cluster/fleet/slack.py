"""Slack turned into joules: who would wait for the slowest node of a synchronous step is slowed to just meet it."""

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


@dataclass(frozen=True)
class Pace:
    """How a fleet takes its steps.

    Attributes:
        step: Time of a step over that of a node in the middle at its default clock.
        caps: What nodes of each grade run under.
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
    within = [cap for cap in caps if cap.slowdown * factor <= step + 1e-9]
    if not within:
        return min(caps, key=lambda cap: cap.slowdown)
    return min(within, key=lambda cap: (cap.power_w - idle_w) * cap.slowdown)


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
    chosen = met(nodes, caps, idle_w, stretch)
    return paced({(grade, grade or _MIDDLE): count for grade, count in nodes.items()}, chosen, idle_w)


def met(nodes: Iterable[int], caps: Sequence[Cap], idle_w: float, stretch: float = 1.0) -> dict[int, Cap]:
    """Return the caps under which nodes of each grade just meet the barrier of the slowest.

    Args:
        nodes: The grades there are; those of grade ``UNKNOWN`` get the default.
        caps: What they can run under; the first is the default.
        idle_w: What a node draws at the barrier, in watts.
        stretch: How much later than at default clocks the barrier opens, >= 1.
    """
    slowest = max((of_grade(grade) for grade in nodes if grade != UNKNOWN), default=1.0)
    barrier = slowest * stretch * caps[0].slowdown * (1 - DOUBT)
    return {grade: caps[0] if grade == UNKNOWN else frugal(caps, of_grade(grade), barrier, idle_w) for grade in nodes}


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
    found = [pace(nodes, caps, idle_w, stretch) for stretch in stretches]
    total = sum(nodes.values())
    return tuple((each, Cap(None, each.step / found[0].step, each.power_w / total)) for each in found)
