"""Caps under which nodes of any type just meet a barrier."""

from polythrottle.domain.fleet.gpu_variability import meeting
from polythrottle.domain.fleet.transient_machine import Cap

FAST = (Cap(None, 1.0, 300.0), Cap(250.0, 1.04, 260.0), Cap(200.0, 1.2, 215.0))
SLOW = (Cap(None, 1.0, 70.0), Cap(60.0, 1.1, 62.0))


def limits_w(nodes: dict[str, tuple[float, tuple[Cap, ...]]], barrier_s: float) -> list[float | None]:
    """Return what each node is capped at, by name."""
    found = meeting(nodes, barrier_s)
    return [found[name].limit_w for name in sorted(found)]


def test_each_gets_what_its_own_slack_allows() -> None:
    """Types differ, and so do their caps; the slowest keeps its default."""
    nodes = {"a": (0.8, FAST), "b": (0.95, FAST), "c": (1.0, SLOW), "d": (0.9, SLOW)}
    assert limits_w(nodes, 1.0) == [200.0, 250.0, None, 60.0]


def test_who_is_late_already_is_not_slowed() -> None:
    """However late, and with no slack but the doubt about its own time neither."""
    assert limits_w({"a": (1.5, FAST), "b": (0.999, FAST)}, 1.0) == [None, None]


def test_a_cap_that_costs_joules_is_not_taken_for_being_slow_enough() -> None:
    """With all the slack in the world the least joules of a step decide."""
    wasteful = (Cap(None, 1.0, 300.0), Cap(100.0, 3.0, 150.0))
    assert limits_w({"a": (0.1, wasteful)}, 1.0) == [None]
