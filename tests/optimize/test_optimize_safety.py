"""How slow a point can be at most, and what that does to the chance that a limit holds."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch

from polythrottle.domain.arrivals import Arrivals
from polythrottle.domain.measurement import EnergyKind, Latency, Measurement
from polythrottle.domain.problem import Constraint, Problem
from polythrottle.domain.space import Knob, Level, SearchSpace
from polythrottle.domain.study import Study, Trial
from polythrottle.optimize import make_optimizer
from polythrottle.optimize.features import Array, hopeless
from polythrottle.optimize.quantities import TIME
from polythrottle.optimize.safety import UNTRIED_SD, Ceiling, bounded, ceiling, log_below
from polythrottle.tuning.stopping import Rule

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


def test_a_level_of_an_unknown_knob_that_nobody_tried_is_in_doubt() -> None:
    """A cluster of cores, or a mode, may do anything; what is added to a clock the model tells from its neighbours."""
    cluster = Knob("cpu_cluster", (1, 4, 7))
    space = SearchSpace.grid((cluster, MODE, OFFSET), {"cpu_cluster": 7, "power_mode": "30W", "gpu_offset_hz": 0})
    row = np.array([space.index(space.default)])
    for quantity in ("mean", "power"):
        found = ceiling(Study(Problem(space, (), "d", "w"), "bayes"), row, np.zeros(1), np.zeros(1), [seen()], quantity)

        def doubt(moved: dict[str, Level], unlooked: Array = found.unlooked) -> float:
            return float(unlooked[space.index(space.default.moved(moved))])

        assert doubt({}) == 0.0
        assert doubt({"gpu_offset_hz": -100_000_000}) == 0.0
        assert doubt({"power_mode": "15W"}) == UNTRIED_SD
        assert doubt({"cpu_cluster": 4}) == pytest.approx(UNTRIED_SD * math.log(7 / 4))
        assert doubt({"cpu_cluster": 1}) == UNTRIED_SD  # more than an e-fold away


def too_slow(arrivals: str, limit: str, *points: dict[str, Level], mean_s: float = 0.1) -> Study:
    """Return a study in which these points took 0.1 s, of four clocks of two domains and two batches."""
    space = SearchSpace.grid((GPU, MEMORY, BATCH), {"gpu_max_hz": 1e9, "mem_hz": 800_000_000, "batch_size": 1})
    study = Study(Problem(space, (Constraint.parse(limit),), "d", "w", arrivals=Arrivals.parse(arrivals)), "bayes")
    for point in points:
        measured = replace(seen(), latency=Latency.of([mean_s]))
        study = study.with_trial(Trial(len(study.trials), space.default.moved(point), measured))
    return study


def lost(study: Study, beyond: float = 1.0) -> set[tuple[Level, ...]]:
    """Return the levels of the points that are never faster than one that was too slow."""
    space = study.problem.space
    return {
        tuple(space[row][knob.name] for knob in (GPU, MEMORY, BATCH))
        for row in np.flatnonzero(hopeless(study, beyond)).tolist()
    }


def test_what_has_less_of_everything_than_a_point_too_slow_is_too_slow_as_well() -> None:
    """More of a clock that was not tried may help; where requests queue, so may a larger batch."""
    slow, mid, fast, half = 500_000_000, 800_000_000, 1_600_000_000, 1_000_000_000
    of_default = {(half, mid, 1), (half, mid, 4), (slow, mid, 1), (slow, mid, 4)}
    assert lost(too_slow("closed", "mean<=90ms", {})) == of_default
    assert lost(too_slow("poisson:5/s", "mean<=90ms", {})) == {(half, mid, 1), (slow, mid, 1)}
    assert lost(too_slow("closed", "mean<=90ms", {"gpu_max_hz": slow})) == {(slow, mid, 1), (slow, mid, 4)}
    assert lost(too_slow("closed", "mean<=90ms", {"mem_hz": fast, "batch_size": 4})) == {
        (clock, memory, 4) for clock in (slow, half) for memory in (mid, fast)
    }
    assert not lost(too_slow("closed", "mean<=90ms", {}), beyond=1.25)  # that may be chance
    assert not lost(too_slow("closed", "throughput>=1000/s", {}))  # larger batches may serve more
    assert not lost(too_slow("closed", "mean<=110ms", {}))


def test_a_search_whose_limit_is_out_of_reach_goes_to_the_fast_end_and_says_so() -> None:
    """Not to where nothing is known of: a batch that is larger and clocks that are lower take longer."""
    fastest: dict[str, Level] = {"mem_hz": 1_600_000_000}
    study = too_slow("closed", "mean<=1ms", {})
    assert study.problem.space.default.moved(fastest) == make_optimizer("bayes").suggest(study)
    assert Rule().reason(study, lambda _: math.inf) is None
    after = too_slow("closed", "mean<=1ms", {}, fastest)
    reason = Rule().reason(after, lambda _: math.inf)
    assert reason == "no point left can hold mean<=1 ms: each is at most as fast as one that missed that by a quarter"
    assert Rule(early=False).reason(after, lambda _: math.inf) is None
    assert Rule().reason(too_slow("closed", "mean<=90ms", {}, fastest), lambda _: math.inf) is None
    # The method itself goes on while there are points, from the least slowed on.
    assert make_optimizer("bayes").suggest(after) == study.problem.space.default.moved(
        {"mem_hz": 1_600_000_000, "gpu_max_hz": 500_000_000}
    )
