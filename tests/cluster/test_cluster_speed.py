"""How fast a cluster trains."""

import pytest

from polythrottle.cluster.predict.completion import asynchronous, think_s
from polythrottle.domain.errors import InvalidInput


def test_few_workers_go_at_their_own_pace_and_many_at_the_servers() -> None:
    """Two make twice one's speed, a hundred what the server can take, and none in between is above either."""
    alone = asynchronous([0.2], 0.02)
    assert alone == pytest.approx(1 / 0.22, rel=0.02)
    assert asynchronous([0.2] * 2, 0.02) == pytest.approx(2 * alone, rel=0.02)
    assert asynchronous([0.2] * 100, 0.02) == pytest.approx(50, rel=0.01)
    for n in range(1, 40):
        assert asynchronous([0.2] * n, 0.02) <= min(n / 0.22, 50) + 1e-9


def test_another_worker_never_slows_a_cluster() -> None:
    """Whether it is like the others or slower."""
    speeds = [asynchronous([0.07] * n, 0.02) for n in range(1, 20)]
    assert speeds == sorted(speeds)
    assert asynchronous([0.07] * 3 + [0.3], 0.02) >= asynchronous([0.07] * 3, 0.02)


def test_servers_without_limit_add_speeds_up() -> None:
    """Unlike workers too; no workers make no speed."""
    assert asynchronous([0.1, 0.5], 0.0) == pytest.approx(12)
    assert asynchronous([], 0.02) == 0


def test_distance_slows_a_worker_by_round_trips() -> None:
    """30 ms to the server cost a K80 worker about 72 ms a step, as in CM-DARE."""
    near, far = think_s(9.45, 0.01), think_s(9.45, 0.01, 0.03)
    assert far - near == pytest.approx(0.072, rel=0.01)
    with pytest.raises(InvalidInput, match="above 0"):
        think_s(0.0, 0.01)
