"""How slow a point can be at most, and what that does to the chance that a limit holds."""

import math

import numpy as np
import pytest
import torch

from polythrottle.domain.arrivals import Arrivals
from polythrottle.domain.measurement import EnergyKind, Latency, Measurement
from polythrottle.domain.problem import Problem
from polythrottle.domain.space import Knob, Level, SearchSpace
from polythrottle.domain.study import Study
from polythrottle.optimize.quantities import TIME
from polythrottle.optimize.safety import Ceiling, bounded, ceiling, log_below

GPU = Knob("gpu_max_hz", (500_000_000, 1_000_000_000))
MEMORY = Knob("mem_hz", (800_000_000, 1_600_000_000))
CORES = Knob("cpu_cores", (1, 4))
CPU = Knob("cpu_max_hz", (1_000_000_000, 2_000_000_000))
LIMIT = Knob("power_limit_w", (100.0, 150.0, 300.0))
BATCH = Knob("batch_size", (1, 4))
OFFSET = Knob("gpu_offset_hz", (-100_000_000, 0))
MODE = Knob("power_mode", ("15W", "30W"), label=True)


def seen(power_w: float = 200.0) -> Measurement:
    """Return what was measured at a point: 10 items a second."""
    return Measurement(
        latency=Latency.of([0.1]),
        energy_j=power_w / 10.0,
        throughput_per_s=10.0,
        power_w=power_w,
        energy_kind=EnergyKind.MEASURED,
    )


def most(
    knobs: tuple[Knob, ...], moved: dict[str, Level], quantity: str = "mean", arrivals: str = "closed", **rest: float
) -> float:
    """Return by which factor a quantity may grow from the last levels of all knobs, the first of a batch, to others."""
    default = {knob.name: knob.levels[0] if knob is BATCH else knob.levels[-1] for knob in knobs}
    space = SearchSpace.grid(knobs, default)
    study = Study(Problem(space, (), "d", "w", arrivals=Arrivals.parse(arrivals)), "bayes")
    row = np.array([space.index(space.default)])
    found = ceiling(study, row, np.zeros(1), np.zeros(1), [seen(**rest)], quantity)
    return math.exp(found.mean[space.index(space.default.moved(moved))])


@pytest.mark.parametrize(
    ("knobs", "moved", "factor"),
    [
        ((GPU, MEMORY), {"gpu_max_hz": 500_000_000}, 2.0),
        ((GPU, MEMORY), {"gpu_max_hz": 500_000_000, "mem_hz": 800_000_000}, 2.0),  # the slower of the two
        ((CPU, CORES), {"cpu_max_hz": 1_000_000_000, "cpu_cores": 1}, 8.0),  # work that all cores share
        ((GPU, BATCH), {"batch_size": 4}, 4.0),  # one after the other
        ((GPU, BATCH), {"batch_size": 4, "gpu_max_hz": 500_000_000}, 8.0),
        ((MODE,), {"power_mode": "15W"}, math.inf),  # a name says nothing
        ((OFFSET,), {"gpu_offset_hz": -100_000_000}, math.inf),  # nor does what is added to a clock: it is none
    ],
)
def test_no_query_takes_longer_than_its_slowest_part_is_slowed(
    knobs: tuple[Knob, ...], moved: dict[str, Level], factor: float
) -> None:
    """Clock domains do not add up; cores, clocks of a domain and batches multiply."""
    assert most(knobs, moved) == pytest.approx(factor)


def test_an_item_of_a_larger_batch_takes_no_longer_than_alone() -> None:
    """Of the time per item the batch bounds the other direction."""
    assert most((GPU, BATCH), {"batch_size": 4}, TIME) == pytest.approx(1.0)


@pytest.mark.parametrize(
    ("limit_w", "power_w", "factor"),
    [(150.0, 140.0, 1.0), (150.0, 230.0, 2.0), (100.0, 100.0, 1.0), (100.0, 160.0, 3.0)],
)
def test_a_power_limit_slows_what_draws_more(limit_w: float, power_w: float, factor: float) -> None:
    """Above what was drawn it does nothing; below, what is left over an idle of at most 70 W shrinks."""
    assert most((LIMIT,), {"power_limit_w": limit_w}, power_w=power_w) == pytest.approx(factor)


def test_queues_grow_by_more_than_service_does() -> None:
    """Where requests come at times of their own only what slows nothing is bounded; other figures never are."""
    assert most((GPU,), {"gpu_max_hz": 500_000_000}, arrivals="poisson:5/s") == math.inf
    assert most((GPU,), {}, arrivals="poisson:5/s") == pytest.approx(1.0)
    assert most((LIMIT,), {"power_limit_w": 150.0}, arrivals="poisson:5/s", power_w=50.0) == math.inf
    assert most((GPU,), {"gpu_max_hz": 500_000_000}, "power") == math.inf


def test_the_lowest_of_all_bounds_counts() -> None:
    """Of two trials the one that says less of a point is not heard there."""
    space = SearchSpace.grid((GPU, MEMORY), {"gpu_max_hz": 1_000_000_000, "mem_hz": 1_600_000_000})
    study = Study(Problem(space, (), "d", "w"), "bayes")
    rows = np.array([space.index(space.default), space.index(space.default.moved({"gpu_max_hz": 500_000_000}))])
    found = ceiling(study, rows, np.array([0.0, 0.1]), np.full(2, 1e-6), [seen(), seen()], "p99")
    assert found.mean[rows[1]] == pytest.approx(0.1)
    assert found.mean[rows[0]] == 0.0


@pytest.mark.parametrize("name", ["mean", "time", "p50", "p99", "ttft_p99", "tpot_p50"])
def test_all_times_are_bounded(name: str) -> None:
    """Means, percentiles, and those of tokens."""
    assert bounded(name)
    assert not bounded("power")
    assert not bounded("temperature")
    assert not bounded("tokens_per_j")


def below(limit: float, most: float, doubt: float, mean: float = 0.0, unlooked: float = 0.0) -> float:
    """Return how probably y ~ N(mean, 1) holds a limit, below a ceiling."""
    one = torch.ones(1, dtype=torch.double)
    return math.exp(
        log_below(mean * one, one, limit, Ceiling(np.array([most]), np.array([doubt]), np.array([unlooked])))[0]
    )


def test_below_a_ceiling_only_what_is_left_beyond_the_limit_counts() -> None:
    """As by drawing: of all pairs in which y is below z, the share in which y holds."""
    draws = np.random.default_rng(0)
    y, z = draws.normal(0.0, 1.0, 400_000), draws.normal(1.2, 0.3, 400_000)
    assert below(0.8, 1.2, 0.3) == pytest.approx((y[y < z] <= 0.8).mean(), abs=0.005)
    assert below(0.8, math.inf, 0.0) == pytest.approx(0.788, abs=0.001)
    assert below(0.8, 0.5, 0.01) == pytest.approx(1.0, abs=1e-6)
    assert below(0.8, -20.0, 0.1, mean=5.0) == pytest.approx(1.0, abs=1e-6), "the process is contradicted"
    assert below(0.8, math.inf, 0.0, unlooked=math.sqrt(3.0)) == pytest.approx(0.655, abs=0.001), (
        "half of the deviation"
    )


def test_what_lies_beyond_all_trials_is_in_doubt() -> None:
    """By a quarter of what the bound grows, until there is a trial as far out; a limit that does nothing is not far."""
    space = SearchSpace.grid((LIMIT,), {"power_limit_w": 300.0})
    study = Study(Problem(space, (), "d", "w"), "bayes")
    rows = np.array([space.index(space.default)])
    lowest = space.index(space.default.moved({"power_limit_w": 100.0}))
    found = ceiling(study, rows, np.zeros(1), np.zeros(1), [seen(power_w=160.0)], "mean")
    assert found.unlooked[lowest] == pytest.approx(0.25 * math.log(3.0))
    twice = ceiling(study, np.array([rows[0], lowest]), np.zeros(2), np.zeros(2), [seen(160.0), seen(99.0)], "mean")
    assert twice.unlooked.tolist() == [0.0, 0.0, 0.0]


def test_a_knob_that_two_trials_contradict_bounds_nothing() -> None:
    """Half of the memory clock was faster: nothing is said of that knob, and still of the other."""
    space = SearchSpace.grid((GPU, MEMORY), {"gpu_max_hz": 1_000_000_000, "mem_hz": 1_600_000_000})
    study = Study(Problem(space, (), "d", "w"), "bayes")
    slower = space.default.moved({"mem_hz": 800_000_000})
    rows = np.array([space.index(space.default), space.index(slower)])
    found = ceiling(study, rows, np.array([0.0, -0.3]), np.zeros(2), [seen(), seen()], "mean")
    assert found.mean[rows].tolist() == [0.0, -0.3]
    halved = [space.index(point.moved({"gpu_max_hz": 500_000_000})) for point in (space.default, slower)]
    assert found.mean[halved] == pytest.approx([math.log(2.0), math.log(2.0) - 0.3])


def test_more_cores_may_be_slower() -> None:
    """Fewer slow by no more than their share, more by nobody knows how much."""
    space = SearchSpace.grid((CORES,), {"cpu_cores": 1})
    found = ceiling(
        Study(Problem(space, (), "d", "w"), "bayes"), np.array([0]), np.zeros(1), np.zeros(1), [seen()], "mean"
    )
    assert found.mean.tolist() == [0.0, math.inf]
