import math

import numpy as np
import pytest

from polythrottle.metering.intervals import SHARES, percentile_interval, percentile_intervals
from polythrottle.testing.ground_truth import Traffic

RUNS, QUERIES = 100, 2000


def test_the_median_of_independent_queries_has_its_textbook_interval() -> None:
    """Of a hundred it is between the 40th and the 61st: the order statistics of David and Nagaraja, §7.1."""
    found = percentile_interval(np.random.default_rng(3).permutation(np.arange(1.0, 101.0)), 0.5)
    assert 39.0 <= found.low <= 42.0
    assert 59.0 <= found.high <= 62.0


@pytest.mark.parametrize(("share", "around"), [(0.99, 19.5), (0.95, 42.7)])
def test_the_tail_of_independent_queries_is_known_as_well_as_can_be(share: float, around: float) -> None:
    """Of ten thousand a percentile lies within 1.96 binomial deviations, and an interval is hardly wider than that."""
    found = percentile_interval(np.random.default_rng(3).permutation(np.arange(1.0, 10_001.0)), share)
    assert 10_000 * share - found.low == pytest.approx(around, rel=0.12)
    assert found.high - 10_000 * share == pytest.approx(around, rel=0.12)


def test_too_few_queries_leave_the_upper_end_unknown() -> None:
    """A p99 needs some 370 independent queries for its upper end, and says so below; its median needs few."""
    rng = np.random.default_rng(0)
    assert math.isinf(percentile_interval(rng.random(300) + 1, 0.99).high)
    assert percentile_interval(rng.random(700) + 1, 0.99).known
    assert percentile_interval(rng.random(30) + 1, 0.5).known
    assert percentile_intervals([1.0]) == {}


def test_clusters_of_misses_widen_the_interval() -> None:
    """The same latencies in clusters say less than shuffled."""
    rng = np.random.default_rng(5)
    times = Traffic(straggle=0.03).latencies_s(rng, 4000)
    apart = percentile_interval(rng.permutation(times), 0.99)
    together = percentile_interval(times, 0.99)
    assert together.half > 1.3 * apart.half


@pytest.mark.slow
@pytest.mark.parametrize("stay", [0.0, 0.6, 0.74])
@pytest.mark.parametrize("name", ["p50", "p95", "p99"])
def test_intervals_hold_as_often_as_they_say(name: str, stay: float) -> None:
    """About 95 % of 100 windows hold the truth, clustered stragglers included; the benchmark counts 400."""
    traffic = Traffic(usual_s=1.0, stay=stay)
    truth = float(np.quantile(traffic.latencies_s(np.random.default_rng(1), 1_000_000), SHARES[name]))
    held = sum(
        truth in percentile_interval(traffic.latencies_s(np.random.default_rng([seed, 7]), QUERIES), SHARES[name])
        for seed in range(RUNS)
    )
    assert 0.88 <= held / RUNS <= 1.0


def waits(seed: int, queries: int, load: float) -> np.ndarray:
    """Return latencies before a server that takes 1 s, at a random load, in the order of sending (Lindley, 1952)."""
    gaps = 1.0 - np.random.default_rng(seed).exponential(1 / load, queries + 2000)
    level = np.cumsum(gaps)
    return (1.0 + level - np.minimum.accumulate(np.minimum(level, 0.0)))[2000:]


def test_intervals_hold_before_a_busy_server_because_of_blocks() -> None:
    """Requests wait together for longer than the lags seen: without blocks four in ten intervals miss the truth."""
    truth = float(np.quantile(waits(1, 1_000_000, 0.9), 0.95))
    held = {
        block: np.mean([truth in percentile_interval(waits(seed, 4000, 0.9), 0.95, block) for seed in range(2, 62)])
        for block in (0, 400)
    }
    assert held[400] >= 0.86
    assert held[0] < 0.8
