"""How slow the slowest queries are is told by all windows of a study, because a short one has seen none of them."""

import math
from dataclasses import replace

import numpy as np
import pytest

from polythrottle.backends.simulated.physics import Noise
from polythrottle.domain.measurement import Interval, Latency, Measurement
from polythrottle.metering.intervals import percentile_intervals
from polythrottle.optimize.quantities import doubts, pooled, table

LEVEL = 0.02
TRUE = 1.18
"""The p99 over the median of the simulator's noise at that level (`Latency.of(typical(0.02))`)."""


def window(seed: int, queries: int, median_s: float = 0.01, level: float = LEVEL) -> Measurement:
    """Return what a window of so many queries sees of a point on a simulated board."""
    factors = Noise(level, seed, 0).queries()
    times = [median_s * next(factors) for _ in range(queries)]
    return Measurement(Latency.of(times), 1.0, 1 / median_s, intervals=percentile_intervals(times))


def p99_s(measurements: list[Measurement]) -> np.ndarray:
    """Return the p99 of each window as the models are told it."""
    return np.exp(table(measurements, ["p99"])[:, 0])


def test_short_windows_are_told_what_longer_ones_saw() -> None:
    """Thirty windows of 105 queries are 8 % too low by themselves, and within 4 % beside four of 1,000."""
    short = [window(seed, 105) for seed in range(30)]
    long = [window(100 + seed, 1000) for seed in range(4)]
    own = np.median([one.latency.p99_s for one in short]) / 0.01
    told = np.median(p99_s([*long, *short])[4:]) / 0.01
    assert own < TRUE * 0.92
    assert told == pytest.approx(TRUE, rel=0.04)


def test_long_windows_are_drawn_together_where_points_are_alike() -> None:
    """What they differ by is luck: together they are nearer to the truth than each by itself."""
    long = [window(seed, 1000, median_s=0.01 * (1 + seed)) for seed in range(12)]
    medians_s = np.array([one.latency.p50_s for one in long])
    own = np.array([one.latency.p99_s for one in long]) / medians_s
    assert np.abs(p99_s(long) / medians_s - TRUE).mean() < 0.8 * np.abs(own - TRUE).mean()


def test_points_that_really_differ_keep_their_tails() -> None:
    """Where some points straggle four times as far as others, nobody is told the mean of both."""
    both = [window(seed, 1000, level=level) for level in (0.01, 0.04) for seed in range(5)]
    own, told = np.array([one.latency.p99_s for one in both]), p99_s(both)
    apart, kept = (np.log(times_s[5:].mean() / times_s[:5].mean()) for times_s in (own, told))
    assert kept > 0.7 * apart


def test_what_a_short_window_saw_for_certain_stays() -> None:
    """One whose lower end is far above what others have is at least there, whatever the others say."""
    slow = replace(window(0, 35), intervals={"p99": Interval(0.02, math.inf)})
    told = p99_s([window(1, 1000), window(2, 1000), slow])[2]
    assert 0.02 <= told < 0.022


def test_a_longer_window_is_vaguer_than_none_and_surer_than_a_shorter() -> None:
    """Its doubt shrinks with its queries; what has no interval has none."""
    found = doubts([window(1, 1000), window(2, 600), window(3, 105)], ["p99"])[:, 0]
    assert 0 < found[0] < found[1] < found[2] < 0.1**2
    assert pooled([replace(window(1, 1000), intervals={})], "p99") is None


@pytest.mark.parametrize("metric", ["mean", "p50", "power", "throughput"])
def test_only_percentiles_far_out_are_pooled(metric: str) -> None:
    """Everything else is known from few queries."""
    assert pooled([window(1, 1000)], metric) is None


def test_where_queues_make_the_tail_each_window_speaks_for_itself() -> None:
    """Queries that come at times of their own wait for each other more at one point than at another."""
    loaded = [replace(window(seed, 1000), offered_per_s=50.0) for seed in range(3)]
    assert p99_s(loaded) == pytest.approx([one.latency.p99_s for one in loaded])


def test_first_tokens_wait_for_what_is_in_flight_beside_them() -> None:
    """What their tail is at one point tells nothing of it at another, where more prompts come before them."""
    known = {"ttft_p99": Interval(0.3, 0.5)}
    seen = replace(window(1, 1000), extras={"ttft_p50": 0.1, "ttft_p99": 0.4}, intervals=known)
    assert pooled([seen, replace(seen, extras={"ttft_p50": 0.1, "ttft_p99": 0.8})], "ttft_p99") is None
