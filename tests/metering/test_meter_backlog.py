"""Open loops: queues that grow, bursts that are too few, and energy at the rate that was asked for."""

import math
import random

import numpy as np
import pytest
from builders import measured as measured_with

from polythrottle.domain.arrivals import Arrivals
from polythrottle.domain.errors import TrialError
from polythrottle.domain.measurement import Measurement, Query, Window
from polythrottle.domain.ports import Sensor
from polythrottle.domain.problem import Constraint
from polythrottle.domain.space import OperatingPoint
from polythrottle.metering.point_measurement import measure
from polythrottle.metering.validity import backlog_per_s, check_reference
from polythrottle.storage.journal.lines import measurement_from, measurement_line
from polythrottle.testing.ground_truth import IdleServer


def seen(arrivals: str, seed: int = 0, queries: int = 1000, step_s: float = 0.0, **rig: float) -> Measurement:
    """Return what the meter says of a server that takes 10 ms a request."""
    device = IdleServer(seed, step_s=step_s, **rig)
    window = Window(queries, 0.0, queries, timeout_s=1e5)
    load, sensor = Arrivals.parse(arrivals), Sensor(step_s=step_s)
    return measure(device, device, OperatingPoint({}), window, arrivals=load, seed=seed, sensor=sensor)


@pytest.mark.parametrize("arrivals", ["poisson:130/s", "uniform:103/s", "burst:2000/s"])
def test_more_than_can_be_served_makes_the_queue_grow(arrivals: str) -> None:
    """What is offered stands beside what is served, and no latency has an upper end."""
    found = seen(arrivals)
    assert not found.keeps_up
    assert found.backlog_per_s is not None
    assert found.offered_per_s == Arrivals.parse(arrivals).offered_per_s
    assert found.throughput_per_s == pytest.approx(100, rel=0.02)
    if "p99" in found.intervals:
        assert found.metric("p99") in found.intervals["p99"]
        assert math.isinf(found.intervals["p99"].high)
        assert math.isinf(found.intervals["mean"].high)


@pytest.mark.parametrize("arrivals", ["poisson:70/s", "uniform:95/s", "poisson:5/s"])
def test_what_can_be_served_keeps_up(arrivals: str) -> None:
    """In none of ten windows below its capacity a server is said not to keep up."""
    assert all(seen(arrivals, seed).keeps_up for seed in range(10))
    assert seen("closed").offered_per_s is None


def test_a_queue_that_grows_is_told_from_chance() -> None:
    """Few requests tell nothing; waiting that grows by less than a request is no queue."""
    late = [Query(0.01 * (1 + number), 1, 0.01 * number) for number in range(100)]
    assert backlog_per_s(late, 50.0, 100.0) == 50.0
    assert backlog_per_s(late, 100.0, 100.0) is None
    assert backlog_per_s(late[:10], 50.0, 100.0) is None
    chance = random.Random(1)
    even = [Query(0.01 * chance.uniform(1, 2), 1, 0.01 * number) for number in range(100)]
    assert backlog_per_s(even, 99.0, 100.0) is None


def test_a_relative_limit_needs_a_default_that_keeps_up() -> None:
    """A latency that grows for as long as one looks can be multiplied by nothing."""
    behind = measured_with(offered_per_s=200.0, backlog_per_s=100.0)
    with pytest.raises(
        TrialError, match=r"serves 100/s of 200/s, so the queue grows and p99<=1\.2x multiplies nothing"
    ):
        check_reference(behind, [Constraint.parse("mean<=1s"), Constraint.parse("p99<=1.2x")])
    check_reference(behind, [Constraint.parse("p99<=20ms")])
    check_reference(measured_with(), [Constraint.parse("p99<=1.2x")])


@pytest.mark.slow
@pytest.mark.parametrize(("rate", "step_s"), [(30, 0.0), (30, 0.1), (70, 0.0)])
def test_energy_at_a_random_rate_is_that_of_the_long_run(rate: int, step_s: float) -> None:
    """About 95 % of 40 windows hold it, and far tighter than the number of requests alone would allow."""
    truth_j, found = IdleServer(0).true_energy_j(rate), []
    for seed in range(40):
        measured = seen(f"poisson:{rate}/s", seed, 600, step_s)
        assert measured.energy_j in measured.intervals["energy"]
        found.append(measured.intervals["energy"])
    assert np.mean([truth_j in interval for interval in found]) >= 0.85
    assert np.median([interval.half for interval in found]) < 0.6 * 1.96 / math.sqrt(600) * truth_j


def test_bursts_that_are_too_few_leave_everything_unknown() -> None:
    """Below ten cycles nothing has an interval; from then on energy has an honest one, and from thirty on latency."""
    few = seen("burst:30/s", queries=1000)
    assert few.intervals == {}
    truth_j = IdleServer(0).true_energy_j(15)
    many = [seen("burst:15/s?length=0.5s", seed, 1500) for seed in range(12)]
    known = [found for found in many if 50.0 <= (found.window_s or 0.0) < 150.0]
    assert len(known) >= 10
    assert sum(truth_j in found.intervals["energy"] for found in known) >= len(known) - 2
    assert not any({"p99", "mean"} & set(found.intervals) for found in known)
    assert {"p50", "mean"} <= set(seen("burst:15/s?length=0.5s", queries=3000).intervals)


def test_what_waits_together_says_less() -> None:
    """Before a server that is busy for nine tenths of the time a mean is known less well than before an idle one."""
    calm, busy = (seen(f"poisson:{rate}/s", 3) for rate in (10, 90))
    assert busy.intervals["mean"].half / busy.latency.mean_s > 5 * calm.intervals["mean"].half / calm.latency.mean_s


def test_requests_that_wait_together_leave_a_percentile_open() -> None:
    """Two thousand show a p95 before a calm server, and before one that is hardly ever free only where it begins."""
    calm, busy = (seen(f"poisson:{rate}/s", 3, 2000).intervals["p95"] for rate in (10, 90))
    assert calm.known
    assert not busy.known


def test_what_is_known_of_a_load_survives_the_journal() -> None:
    """Offered, by how much it grew, and what the sender was like; lines from before have none of it."""
    found = seen("poisson:130/s")
    assert measurement_from(measurement_line(found)) == found
    bare = measurement_line(measured_with())
    assert not {"offered_per_s", "backlog_per_s", "late_p99_s", "sender_s"} & set(bare)
