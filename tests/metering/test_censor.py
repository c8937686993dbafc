import math

import numpy as np
import pytest
from builders import FakeDevice
from hypothesis import given, settings
from hypothesis import strategies as st

from polythrottle.domain.measurement import Latency, Query, Window
from polythrottle.domain.problem import Constraint
from polythrottle.metering.early_stopping import LEAST_CENSORED_QUERIES, Censor

WINDOW = Window(queries=1000, duration_s=0.0, most_queries=1000)


def stopped_at(limit: str, latencies_s: list[float], items: int = 1, window: Window = WINDOW) -> int | None:
    """Return after how many queries a window is given up; None if never."""
    device = FakeDevice(power_w=10.0)
    censor, queries = Censor(device, window, [Constraint.parse(limit)], device.read()), []
    for latency_s in latencies_s[: window.most_queries]:
        device.clock.sleep(latency_s)
        queries.append(Query(latency_s, items))
        if censor.gives_up(queries):
            return len(queries)
    return None


@pytest.mark.parametrize(
    ("limit", "items", "at"),
    [("mean<=9ms", 1, 100), ("mean<=9.6ms", 1, None), ("p99<=9ms", 1, 100), ("p50<=9ms", 1, 525),
     ("throughput>=500/s", 4, 100), ("throughput>=390/s", 4, None), ("power<=9W", 1, 250), ("power<=9.6W", 1, None),
     ("mean<=10ms", 1, None), ("p99<=10ms", 1, None), ("temperature<=30C", 1, None)],
)  # fmt: skip
def test_each_limit_has_its_rule(limit: str, items: int, at: int | None) -> None:
    """Queries of 10 ms at 10 W: given up once it is plain, 5 % beyond a mean, and never where the limit holds."""
    assert stopped_at(limit, [0.01] * 1000, items) == at


def test_little_is_not_enough() -> None:
    """Thirty queries and a tenth of the window come first, however slow they are."""
    assert stopped_at("mean<=1ms", [1.0] * 30, window=Window(30, 0.0, 100)) == LEAST_CENSORED_QUERIES
    assert stopped_at("mean<=1ms", [1.0] * 29, window=Window(29, 0.0, 100)) is None
    assert stopped_at("mean<=1ms", [1.0] * 60, window=Window(100, 0.0, 500)) == LEAST_CENSORED_QUERIES


def test_a_slow_start_is_no_verdict() -> None:
    """Fifty slow queries among a thousand raise the mean of the first hundred, but their batches disagree."""
    assert stopped_at("mean<=11ms", [0.02] * 50 + [0.01] * 950) is None


@settings(max_examples=100, deadline=None)
@given(seed=st.integers(0, 10_000), name=st.sampled_from(["p50", "p90", "p95", "p99"]), over=st.floats(0.0, 0.6))
def test_a_percentile_that_was_given_up_was_lost(seed: int, name: str, over: float) -> None:
    """Whatever comes after, the whole window would have broken the limit too."""
    latencies_s = np.where(np.random.default_rng(seed).random(1000) < over, 0.02, 0.01).tolist()
    if stopped_at(f"{name}<=15ms", latencies_s) is not None:
        assert (getattr(Latency.of(latencies_s), f"{name}_s") or math.nan) > 0.015


@pytest.mark.slow
@pytest.mark.parametrize("correlation", [0.0, 0.5, 0.9])
def test_a_mean_that_holds_is_hardly_ever_given_up(correlation: float) -> None:
    """Of 100 windows of noisy, correlated queries with their true mean at the limit, none is cut short."""
    lost = 0
    for seed in range(100):
        noise = np.random.default_rng(seed).standard_normal(1000)
        for i in range(1, 1000):
            noise[i] = correlation * noise[i - 1] + math.sqrt(1 - correlation**2) * noise[i]
        lost += stopped_at("mean<=10ms", (0.01 * (1 + 0.1 * noise)).tolist()) is not None
    assert lost == 0
