import numpy as np
import pytest
from builders import FakeDevice, FakeWorkload

from polythrottle.domain.errors import InvalidInput
from polythrottle.domain.measurement import Interval, Measurement, Query, Window
from polythrottle.domain.problem import Constraint, Problem
from polythrottle.domain.space import OperatingPoint
from polythrottle.metering.early_stopping import Goal
from polythrottle.metering.point_measurement import measure
from polythrottle.storage.journal.lines import measurement_from, measurement_line

POINT = OperatingPoint({"gpu_max_hz": 800_000_000, "batch_size": 1})
WINDOW = Window(queries=30, duration_s=0.0, most_queries=1000, timeout_s=3600.0, precision=0.02)


class Noisy(FakeWorkload):
    """Takes 10 ms, give or take."""

    def __init__(self, device: FakeDevice, spread: float) -> None:
        super().__init__(device)
        self.rng, self.spread = np.random.default_rng(0), spread

    def query(self) -> Query:
        """Take a lognormal time."""
        latency_s = 0.01 * float(np.exp(self.spread * self.rng.standard_normal()))
        self.device.clock.sleep(latency_s)
        return Query(latency_s)


def looked(*limits: str, spread: float = 0.05, window: Window = WINDOW, **goal: object) -> Measurement:
    """Return what a window with some goal saw."""
    device = FakeDevice()
    wanted = Goal(tuple(map(Constraint.parse, limits)), **goal)  # type: ignore[arg-type]
    return measure(device, Noisy(device, spread), POINT, window, wanted.limits, goal=wanted)


def queries(measured: Measurement) -> int:
    """Return how many queries a window took."""
    assert measured.latency.queries is not None
    return measured.latency.queries


def test_a_window_ends_once_energy_is_precise() -> None:
    """Even load is known after thirty queries or a few more, uneven load takes as many as its spread asks for."""
    assert 30 <= queries(looked(spread=0.01)) < 50
    uneven = looked(spread=0.2)
    assert 100 < queries(uneven) < 1000
    assert uneven.intervals["energy"].half <= 0.02 * uneven.energy_j
    finer = looked(spread=0.5, window=Window(30, 0.0, 1000, timeout_s=3600.0, precision=0.001))
    assert queries(finer) == 1000


def test_a_point_that_is_plainly_worse_is_not_looked_at_for_long() -> None:
    """It ends as soon as its energy is above the best one's; a p99 that is bounded was then seen once."""
    assert queries(looked("mean<=9.9ms", beat_j=0.05)) == 30
    assert queries(looked("p99<=11.2ms", beat_j=0.05)) == 100
    assert queries(looked("p99<=11.2ms", beat_j=0.2)) > 300


def test_a_limit_that_is_near_is_looked_at_for_longer() -> None:
    """A p99 far inside is clear once it has an upper end at all; near the limit the window goes on."""
    far, near = (
        looked("p99<=20ms"),
        looked("p99<=11.23ms", window=Window(30, 0.0, 3000, timeout_s=99.0, precision=1e-3)),
    )
    assert 300 <= queries(far) <= 500
    assert queries(near) > 1.5 * queries(far)


def test_a_floor_that_is_plainly_held_is_not_looked_at_for_longer() -> None:
    """A hundred items a second are far above: the window is as long as energy alone asks for."""
    assert queries(looked("throughput>=50/s", spread=0.2)) == queries(looked(spread=0.2))


def test_what_others_are_judged_by_is_looked_at_to_the_end() -> None:
    """A percentile that relative limits multiply takes the whole window; a mean, as long as it needs."""
    assert queries(looked(precise=("p99",))) == 1000
    assert 30 <= queries(looked(precise=("mean",), spread=0.01)) < 50


def test_requests_are_counted_with_the_warm_up() -> None:
    """What a trial took is what was sent, not what was kept."""
    measured = looked(spread=0.01)
    assert measured.requests == queries(measured) + WINDOW.warmup


def test_a_window_without_a_precision_is_as_it_was() -> None:
    """Newer fields change neither its length nor the fingerprint of a problem that does not use them."""
    device = FakeDevice()
    assert queries(measure(device, FakeWorkload(device), POINT, Window(queries=40, duration_s=0.0))) == 40
    assert set(Window().fields) == {"queries", "duration_s", "most_queries", "warmup", "timeout_s"}
    space = device.space
    assert Problem(space, window=Window()).fingerprint != Problem(space, window=Window(precision=0.02)).fingerprint
    for wrong in ({"precision": 0.0}, {"precision": 0.9}, {"idle_s": -1.0}, {"settle_s": float("inf")}):
        with pytest.raises(InvalidInput, match="window"):
            Window(**wrong)  # type: ignore[arg-type]


def test_intervals_survive_the_journal() -> None:
    """Both ends, those that are not known as null, idle power and requests; lines from before have none."""
    measured = looked("p99<=20ms")
    kept = measurement_line(measured)
    assert measurement_from(kept) == measured
    short = looked(spread=0.01)
    assert measurement_line(short)["intervals"]["p99"][1] is None
    assert measurement_from(measurement_line(short)).intervals["p99"].high == float("inf")
    bare = {name: value for name, value in kept.items() if name not in ("intervals", "requests")}
    assert measurement_from(bare).intervals == {}
    assert measurement_from(bare).requests is None


def test_an_interval_knows_its_ends() -> None:
    """Half its width, whether both ends are known, and nothing back to front."""
    assert Interval(1.0, 3.0).half == 1.0
    assert not Interval(1.0, float("inf")).known
    assert 2.0 in Interval(1.0, 3.0).scaled(1.5)
    with pytest.raises(InvalidInput, match="cannot go"):
        Interval(2.0, 1.0)
