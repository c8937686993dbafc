"""The guard of the limit: smaller slices, then pauses, and back."""

import pytest

from polythrottle.errors import InvalidInput
from polythrottle.finetune.guard import NEAR, WINDOW, Guard

_SLO_S = 0.1


def _seen(guard: Guard, latency_s: float, count: int, now_s: float = 0.0) -> Guard:
    for _ in range(count):
        guard = guard.after(latency_s, now_s)
    return guard


def test_latencies_near_the_limit_halve_slices_and_then_pause() -> None:
    """More than 1 % of a window near the limit: half the size, again, and at the smallest a pause that doubles."""
    guard = Guard(_SLO_S, (1, 2, 4, 8))
    near_s = 1.01 * NEAR * _SLO_S
    sizes = [guard.most(0.0)]
    while guard.most(0.0):
        guard = _seen(guard, near_s, 3)
        sizes.append(guard.most(0.0))
    assert sizes == [8, 4, 2, 1, 0]
    assert (guard.shrunk, guard.pauses) == (3, 1)
    assert guard.most(5.0) == 1
    assert _seen(guard, near_s, 100, now_s=4.0) == guard
    again = _seen(guard, near_s, 3, now_s=6.0)
    assert (again.most(15.9), again.most(16.0)) == (0, 1)


def test_one_per_cent_near_the_limit_is_let_pass() -> None:
    """Two of two hundred change nothing, and the next window begins anew."""
    guard = Guard(_SLO_S, (1, 2, 4))
    for _ in range(5):
        guard = _seen(_seen(guard, 2 * _SLO_S, 2), 0.01, WINDOW - 2)
    assert guard.most(0.0) == 4
    assert guard.shrunk == 0


def test_a_calm_window_doubles_slices_again() -> None:
    """Two hundred requests far from the limit give back what was taken, step by step, and shorten the next pause."""
    tight = Guard(_SLO_S, (1, 2, 4, 8), place=0, pause_s=80.0)
    sizes = []
    for _ in range(4):
        tight = _seen(tight, 0.01, WINDOW)
        sizes.append(tight.most(0.0))
    assert sizes == [2, 4, 8, 8]
    assert tight.pause_s == 5.0


def test_a_guard_of_nothing_is_refused() -> None:
    """A limit of 0 s, or no sizes, is an error."""
    for slo_s, sizes in ((0.0, (1,)), (0.1, ())):
        with pytest.raises(InvalidInput, match="a guard needs"):
            Guard(slo_s, sizes)
