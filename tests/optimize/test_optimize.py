"""The search methods: pure, never twice at one point, near the optimum soon, and never a traceback."""

import math
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from builders import measured, study
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from polythrottle.backends.replay import Table
from polythrottle.domain.errors import Exhausted, InvalidInput, UnknownName
from polythrottle.domain.measurement import EnergyKind, Interval, Latency, Measurement
from polythrottle.domain.ports import Optimizer
from polythrottle.domain.problem import Constraint, Objective, Problem
from polythrottle.domain.space import Knob, Level, OperatingPoint, SearchSpace
from polythrottle.domain.study import Daring, Study, Trial
from polythrottle.optimize import METHODS, make_optimizer
from polythrottle.optimize.bayes import Account, ConstrainedBayes, best_rows, beyond_caps
from polythrottle.optimize.features import distinct_rows, untried_rows
from polythrottle.optimize.options import Options
from polythrottle.optimize.quantities import bound, in_units, table
from polythrottle.testing import OptimizerContract
from polythrottle.tuning.stopping import Outlook

Visit = Callable[[OperatingPoint], Measurement | None]
GPU_HZ = tuple(range(200_000_000, 1_400_000_000, 100_000_000))
MEM_HZ = (204_000_000, 665_600_000, 2_133_000_000, 3_199_000_000)


class TestBayesContract(OptimizerContract):
    """The contract of every method that starts at the default, on ours."""

    def make(self) -> Optimizer:
        """Return constrained Bayesian optimisation."""
        return make_optimizer("bayes")


class TestRandomContract(OptimizerContract):
    """The contract on the random order."""

    def make(self) -> Optimizer:
        """Return random search."""
        return make_optimizer("random")


class TestGridContract(OptimizerContract):
    """The contract on the grid."""

    def make(self) -> Optimizer:
        """Return grid search."""
        return make_optimizer("grid")


def board(**rest: Knob) -> SearchSpace:
    """Return GPU clocks × memory clocks × batches, 240 points, times any further knobs; the default is flat out."""
    knobs = (Knob("gpu_max_hz", GPU_HZ), Knob("mem_hz", MEM_HZ), Knob("batch_size", (1, 2, 4, 8, 16)), *rest.values())
    default: dict[str, Level] = {knob.name: knob.levels[-1] for knob in knobs}
    return SearchSpace.grid(knobs, default | {"batch_size": 1})


def physical(point: Mapping[str, Level]) -> Measurement:
    """Return what a made-up board does: roofline time, flat-then-linear voltage, memory and static power."""
    gpu, mem, batch = (float(point[name]) for name in ("gpu_max_hz", "mem_hz", "batch_size"))
    ghz, share = gpu / 1e9, mem / MEM_HZ[-1]
    latency_s = 2e-3 + 6e-3 * batch**0.9 / ghz + 1.5e-3 * batch**0.7 / share
    volt = 1.0 + 0.5 * max(0.0, ghz - 0.7)
    power_w = 6.0 + 14.0 * ghz * volt**2 * (1 - 0.3 / batch) + 5.0 * share
    latency = Latency(latency_s, p50_s=latency_s, p95_s=1.1 * latency_s, p99_s=1.2 * latency_s)
    temperature_c = 30.0 + 1.3 * power_w
    return Measurement(latency, power_w * latency_s / batch, batch / latency_s, power_w, temperature_c=temperature_c)


def noisy(share: float, seed: int = 0) -> Visit:
    """Return the made-up board with lognormal noise on time and power."""
    rng = np.random.default_rng(seed)

    def visit(point: OperatingPoint) -> Measurement:
        true, (late, drawn) = physical(point), np.exp(share * rng.standard_normal(2))
        latency = Latency(true.latency.mean_s * late, p99_s=(true.latency.p99_s or 1.0) * late)
        power_w = (true.power_w or 1.0) * drawn
        return Measurement(latency, true.energy_j * late * drawn, true.throughput_per_s / late, power_w)

    return visit


def searched(
    space: SearchSpace, slo: Sequence[str], trials: int, visit: Visit = physical, method: str = "bayes", seed: int = 0
) -> Study:
    """Return a study after so many trials; where ``visit`` returns None the trial has failed."""
    study, optimizer = Study(Problem(space, tuple(map(Constraint.parse, slo))), method, seed), make_optimizer(method)
    for number in range(trials):
        point = optimizer.suggest(study)
        assert point not in study.visited
        seen = visit(point)
        study = study.with_trial(Trial(number, point, seen, None if seen else "it fell over"))
    return study


def regret(study: Study) -> float:
    """Return how much more energy the study's best point truly takes than the best feasible point there is, less 1."""
    true = {point: physical(point) for point in study.problem.space}
    assert study.best is not None
    least = min(m.energy_j for m in true.values() if study.holds(m))
    return true[study.best.point].energy_j / least - 1.0


def points(study: Study) -> list[OperatingPoint]:
    """Return where the study went, in order."""
    return [trial.point for trial in study.trials]


def test_an_unknown_method_is_named_with_the_nearest() -> None:
    """A misspelt method says what was probably meant."""
    with pytest.raises(UnknownName, match="bayes"):
        make_optimizer("bays")


def test_importing_the_methods_loads_no_torch() -> None:
    """Making an optimiser, and the default as its first suggestion, cost no model library."""
    code = (
        "import sys\nfrom polythrottle.optimize import make_optimizer\n"
        "from polythrottle.domain.problem import Problem\n"
        "from polythrottle.domain.space import Knob, SearchSpace\nfrom polythrottle.domain.study import Study\n"
        "make_optimizer('bayes').suggest(Study(Problem(SearchSpace.grid([Knob('a', (1, 2))], {'a': 1}))))\n"
        "print('torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"


@pytest.mark.parametrize("method", ["bayes", "random", "grid"])
def test_our_methods_start_at_the_default(method: str) -> None:
    """The first trial is what the device does untuned."""
    space = board()
    assert points(searched(space, (), 1, method=method)) == [space.default]


@pytest.mark.parametrize("method", [name for name in METHODS if name != "preset"])
def test_every_method_visits_each_point_once_and_then_is_exhausted(method: str) -> None:
    """A study that goes on long enough sees the whole space."""
    space = SearchSpace.grid(
        [Knob("gpu_max_hz", (1, 2, 3)), Knob("batch_size", (1, 2))], {"gpu_max_hz": 3, "batch_size": 1}
    )
    study = searched(space, ("mean<=1s",), len(space), lambda p: flat(0.1 * float(p["gpu_max_hz"])), method)
    assert set(points(study)) == set(space)
    with pytest.raises(Exhausted, match="all 6 points"):
        make_optimizer(method).suggest(study)


@pytest.mark.parametrize("method", METHODS)
def test_a_space_of_one_point_is_its_default_and_then_exhausted(method: str) -> None:
    """Nothing to choose is no fault."""
    study = searched(SearchSpace.unit(), (), 1, lambda _: flat(), method)
    with pytest.raises(Exhausted):
        make_optimizer(method).suggest(study)


def flat(energy_j: float = 1.0, latency_s: float = 0.01) -> Measurement:
    """Return a measurement without power, temperature or percentiles."""
    return Measurement(Latency(latency_s), energy_j, 1.0 / latency_s)


@pytest.mark.slow
@pytest.mark.parametrize("method", METHODS)
def test_a_suggestion_is_a_function_of_the_study(method: str) -> None:
    """Asked again, and by an optimiser that has seen other studies, the answer is the same."""
    study = searched(board(), ("p99<=30ms",), 6, noisy(0.02), method, seed=3)
    optimizer = make_optimizer(method)
    first = optimizer.suggest(study)
    optimizer.suggest(Study(study.problem, method, 9, study.trials[:4]))
    np.random.default_rng().random()
    assert optimizer.suggest(study) == first == make_optimizer(method).suggest(study)


@pytest.mark.slow
@pytest.mark.parametrize("visit", [physical, noisy(0.02)])
def test_what_is_left_at_most_bounds_what_is_left(visit: Visit) -> None:
    """At every length of a search, and a long one says less than a short one; a front has no one figure."""
    said, within = list[float](), list[float]()
    for trials in (4, 8, 24):
        made = searched(board(), ("p99<=30ms",), trials, visit)
        assert made.best is not None
        share = ConstrainedBayes().most_left(made, made.best)
        assert 0.0 <= 1.0 - 1.0 / (1.0 + max(regret(made), 0.0)) <= share <= 1.0
        assert ConstrainedBayes().most_left(made, made.best) == share
        said.append(share)
        within.append(ConstrainedBayes(Options(risk=0.05)).most_left(made, made.best))
    assert said[0] > said[-1]
    # What a risk forbids to try is known less.
    assert all(more >= share for share, more in zip(said, within, strict=True))
    assert sum(within) > sum(said) + 0.05
    front = replace(made, problem=replace(made.problem, objective=Objective.PARETO))
    assert math.isnan(ConstrainedBayes().most_left(front, made.trials[0]))
    beside = replace(made.trials[0], point=made.trials[0].point.moved({"batch_size": 3}))
    assert math.isnan(ConstrainedBayes().most_left(made, beside))


@pytest.mark.slow
def test_a_fresh_process_repeats_every_suggestion() -> None:
    """A study resumed elsewhere goes on exactly as it would have here, whatever the method."""
    code = (
        "import sys; sys.path[:0] = sys.argv[1:]\n"
        "from test_optimize import METHODS, suggested\n"
        "print(*map(suggested, METHODS), sep='\\n')"
    )
    command = [sys.executable, "-c", code, *map(str, Path(__file__).parents[:2])]
    there = subprocess.run(command, capture_output=True, text=True, check=True).stdout.split("\n")[:-1]
    assert there == [suggested(method) for method in METHODS]


def suggested(method: str) -> str:
    """Return the points of a search on a noisy board, in words."""
    return str(points(searched(board(), ("p99<=30ms", "power<=22W"), 7, noisy(0.02), method, 3)))


def test_the_seed_decides_a_random_search_and_the_order_of_equals() -> None:
    """Seeds matter where chance does: for random, and where bayes finds several points equally good."""
    assert points(searched(board(), (), 4, method="random")) != points(
        searched(board(), (), 4, method="random", seed=1)
    )
    space = SearchSpace.grid([Knob("mode", tuple("abcdefgh"))], {"mode": "a"})
    seconds = {points(searched(space, (), 2, lambda _: flat(), seed=seed))[1] for seed in range(8)}
    assert len(seconds) > 2


def test_a_grid_is_refined_from_the_corners_inwards() -> None:
    """A grid that is stopped early has still seen the whole range of every knob."""
    space = SearchSpace.grid([Knob("gpu_max_hz", tuple(range(1, 10)))], {"gpu_max_hz": 9})
    order = [point["gpu_max_hz"] for point in points(searched(space, (), 9, lambda _: flat(), "grid"))]
    assert order == [9, 1, 5, 3, 7, 2, 4, 6, 8]


@pytest.mark.slow
@pytest.mark.parametrize(
    "slo",
    [("mean<=12ms",), ("mean<=20ms",), ("p99<=40ms",), ("p95<=25ms", "power<=18W"), ("throughput>=150/s",), (),
     ("temperature<=50C", "mean<=30ms"), ("mean<=1.5x", "power<=0.7x")],
    ids=", ".join,
)  # fmt: skip
def test_bayes_comes_near_the_optimum_of_a_physical_board(slo: tuple[str, ...]) -> None:
    """Twelve trials of 240 points bring the energy within three per cent of the least there is, whatever is bounded."""
    study = searched(board(), slo, 12)
    assert regret(study) <= 0.03
    assert sum(not study.feasible(trial) for trial in study.trials[:6]) <= 4


@pytest.mark.slow
def test_bayes_comes_near_the_optimum_through_noise() -> None:
    """Two per cent of noise on every window leave the result within three per cent, on average over four seeds."""
    ended = [regret(searched(board(), ("mean<=20ms",), 15, noisy(0.02, seed), seed=seed)) for seed in range(4)]
    assert float(np.mean(ended)) <= 0.03


@pytest.mark.slow
def test_bayes_needs_a_fraction_of_the_trials_of_chance() -> None:
    """After ten trials bayes is far nearer than a random order is."""
    ours = regret(searched(board(), ("mean<=20ms",), 10))
    chance = [regret(searched(board(), ("mean<=20ms",), 10, method="random", seed=seed)) for seed in range(5)]
    assert ours < 0.3 * float(np.mean(chance))


def test_a_trial_that_runs_counts_as_ended_as_expected() -> None:
    """Boards that search at once spread: what is measured elsewhere is surer, no different, and not suggested again."""
    seen = study("p99<=13ms", energies=(1.0, 0.9, 0.8), latencies=(0.010, 0.0101, 0.0102))
    method = ConstrainedBayes()
    point = method.suggest(seen)
    running = seen.with_trial(Trial(3, point))
    from polythrottle.optimize.posterior import study_posterior

    alone = study_posterior(seen, ("time", "draw", "p99"), Options())
    beside = study_posterior(running, ("time", "draw", "p99"), Options())
    assert alone is not None
    assert beside is not None
    row = seen.problem.space.index(point)
    assert bool((beside.mean == alone.mean).all())
    assert bool((beside.variance <= 1.000001 * alone.variance).all())
    assert bool((beside.variance[row] < 0.9 * alone.variance[row]).all())
    assert ConstrainedBayes().suggest(running) != point
    assert ConstrainedBayes().saving_left(running) <= method.saving_left(seen)


@pytest.mark.slow
def test_bayes_finds_the_good_label() -> None:
    """A knob whose levels are names, or numbers without order, is learnt level by level."""
    runtime, cluster = Knob("runtime", ("eager", "graph", "tensorrt")), Knob("cpu_cluster", (0, 4, 7), label=True)
    cost = {"eager": 1.5, "graph": 1.2, "tensorrt": 1.4, 0: 1.0, 4: 0.7, 7: 1.1}
    space = board(runtime=runtime, cluster=cluster)

    def visit(point: OperatingPoint) -> Measurement:
        true = physical(point)
        factor = cost[str(point["runtime"])] * cost[int(point["cpu_cluster"])]
        return Measurement(true.latency, true.energy_j * factor, true.throughput_per_s)

    study = searched(space, ("mean<=20ms",), 25, visit)
    assert study.best is not None
    assert (study.best.point["runtime"], study.best.point["cpu_cluster"]) == ("graph", 4)


def test_bayes_finds_a_feasible_point_when_the_default_is_none() -> None:
    """Where the default breaks a limit, feasibility leads until a point holds it."""
    study = searched(board(), ("power<=13W",), 8)
    assert not study.feasible(study.trials[0])
    assert study.best is not None


def test_bayes_goes_on_when_no_point_is_feasible() -> None:
    """A limit nothing meets leads towards what comes closest, not to an error."""
    study = searched(board(), ("mean<=1ms",), 10)
    assert study.best is None
    assert study.closest is not None
    fastest_s = min(physical(point).latency.mean_s for point in study.problem.space)
    assert (study.closest.measurement or flat()).latency.mean_s <= 1.02 * fastest_s


@pytest.mark.slow
def test_bayes_goes_on_when_every_trial_fails() -> None:
    """Failures alone still lead somewhere new, also under a limit relative to a default that was never measured."""
    study = searched(board(), ("mean<=1.5x", "power<=50W"), 8, lambda _: None)
    assert len(study.visited) == 8


@pytest.mark.slow
def test_bayes_goes_on_when_the_default_of_a_relative_limit_failed() -> None:
    """A limit that multiplies what was never measured cannot count yet; the search goes on without it."""
    study = searched(board(), ("mean<=1.5x",), 6, lambda p: None if p == board().default else physical(p))
    assert len(study.completed) == 5


def test_log_expected_improvement_is_exact_near_and_finite_far() -> None:
    """The formula agrees with BoTorch's over forty deviations and stays finite, and falling, at a million."""
    import torch
    from botorch.acquisition.analytic import _log_ei_helper

    from polythrottle.optimize.acquisition_value import log_standard_improvement

    z = torch.linspace(-30.0, 10.0, 2001, dtype=torch.double)
    torch.testing.assert_close(log_standard_improvement(z), _log_ei_helper(z), rtol=1e-9, atol=1e-9)
    far = log_standard_improvement(torch.tensor([-1e8, -1e6, -1e5, -1e4, -1e3], dtype=torch.double))
    assert torch.isfinite(far).all()
    assert (far.diff() > 0).all()


def test_odd_levels_have_finite_distinct_coordinates() -> None:
    """Zero, negative, label and constant knobs all have a place in the unit cube."""
    from polythrottle.optimize.features import coordinates

    knobs = [Knob("a", (0, 1, 10)), Knob("b", (-5, 0, 5)), Knob("c", ("x", "y", "z")), Knob("d", (7,)), Knob("e", (0,))]
    space = SearchSpace.grid(knobs, {"a": 10, "b": 0, "c": "x", "d": 7, "e": 0})
    where = coordinates(space)
    assert where.unit.shape == (27, 5)
    assert np.isfinite(where.offset).all()
    assert len(np.unique(where.unit, axis=0)) == len(space)
    assert where.unit.min() >= 0.0
    assert where.unit.max() <= 1.0


@pytest.mark.slow
def test_bayes_keeps_away_from_where_trials_fail() -> None:
    """Batches that do not fit in memory are tried once or twice, and the search ends at the best that fits."""

    def visit(point: OperatingPoint) -> Measurement | None:
        return physical(point) if float(point["batch_size"]) < 8 else None

    study = searched(board(), ("mean<=100ms",), 20, visit)
    assert sum(trial.failure is not None for trial in study.trials) <= 6
    fits = min(m.energy_j for m in map(visit, study.problem.space) if m and study.holds(m))
    assert study.best is not None
    assert (study.best.measurement or flat()).energy_j <= 1.05 * fits


@pytest.mark.slow
@pytest.mark.parametrize("at", [0, 2, 5])
def test_bayes_outlives_an_outlier(at: int) -> None:
    """One window at ten times its time and energy, be it the default's, costs a few trials, and at most a tenth."""
    seen: list[OperatingPoint] = []

    def visit(point: OperatingPoint) -> Measurement:
        seen.append(point)
        true = physical(point)
        if len(seen) != at + 1:
            return true
        return Measurement(Latency(10 * true.latency.mean_s), 10 * true.energy_j, true.throughput_per_s / 10)

    assert regret(searched(board(), ("mean<=20ms",), 25, visit)) <= 0.1


def test_a_missing_metric_is_said_in_one_line() -> None:
    """A limit on what nobody measures is a fault of the question."""
    with pytest.raises(InvalidInput, match="not measured"):
        searched(board(), ("p90<=20ms",), 3)


def test_a_fit_that_fails_is_no_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without fitted scales the prior's are used; without a posterior the trend leads."""
    from polythrottle.optimize import surrogate

    def broken(*_: object, **__: object) -> None:
        raise RuntimeError("not positive definite")

    def singular(*_: object, **__: object) -> None:
        raise np.linalg.LinAlgError("not positive definite")

    searched(board(), ("mean<=20ms",), 3)
    monkeypatch.setattr(surrogate, "cholesky", singular)
    assert regret(searched(board(), ("mean<=20ms",), 15)) <= 0.1
    monkeypatch.setattr(surrogate, "psd_safe_cholesky", broken)
    assert len(searched(board(), ("mean<=20ms",), 5).visited) == 5


@pytest.mark.parametrize(
    ("trials", "columns", "quantities", "told"), [(1, 1, 1, False), (9, 3, 4, True), (24, 5, 2, False)]
)
def test_scales_are_those_that_botorch_finds(trials: int, columns: int, quantities: int, told: bool) -> None:
    """The density is written out for its speed alone; the model is the library's."""
    import torch
    from botorch.fit import fit_gpytorch_mll
    from gpytorch.mlls import ExactMarginalLogLikelihood

    from polythrottle.optimize.surrogate import _process, fitted

    chance = np.random.default_rng(trials)
    where = chance.random((trials, columns))
    values = np.sin(3 * where.sum(axis=1))[:, np.newaxis] + 0.02 * chance.standard_normal((trials, quantities))
    doubt = 1e-3 * told * chance.random((trials, quantities))
    inputs = torch.from_numpy(np.hstack([where, np.ones((trials, 1)), where - 0.5]))
    targets = torch.from_numpy(values - values.mean(axis=0))
    theirs = _process(inputs, targets, columns, doubt)
    begun = {name: value.clone() for name, value in theirs.state_dict().items()}
    density = ExactMarginalLogLikelihood(theirs.likelihood, theirs)
    fit_gpytorch_mll(density, optimizer_kwargs={"options": {"maxiter": 40}})
    ours = fitted(inputs, targets, columns, doubt).state_dict()
    assert all(torch.allclose(ours[name], value, atol=1e-4) for name, value in theirs.state_dict().items())
    assert trials == 1 or max(float((ours[name] - value).abs().max()) for name, value in begun.items()) > 0.1


LEVELS = st.one_of(
    st.lists(st.integers(-3, 10**12), min_size=1, max_size=5, unique=True),
    st.lists(st.floats(0, 1e300), min_size=1, max_size=4, unique=True),
    st.lists(st.sampled_from(["a", "b", "c"]), min_size=1, max_size=3, unique=True),
)
VALUES = st.floats(1e-300, 1e300)


@pytest.mark.slow
@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data(), columns=st.lists(LEVELS, min_size=1, max_size=4), label=st.booleans())
def test_no_space_and_no_value_is_too_odd(data: st.DataObject, columns: list[list[Level]], label: bool) -> None:
    """Whatever the levels and whatever is measured, the next point is a new one of the space."""
    knobs = [
        Knob(name, tuple(levels), label) for name, levels in zip(("a_hz", "b_w", "batch", "d"), columns, strict=False)
    ]
    space = SearchSpace.grid(knobs, {knob.name: data.draw(st.sampled_from(knob.levels)) for knob in knobs})

    def visit(_: OperatingPoint) -> Measurement | None:
        drawn = data.draw(st.one_of(st.none(), st.tuples(VALUES, VALUES, VALUES)))
        return None if drawn is None else Measurement(Latency(drawn[0]), drawn[1], drawn[2])

    study = searched(space, ("mean<=1s",), min(len(space), 5), visit)
    assert all(math.isfinite(trial.measurement.energy_j) for trial in study.completed if trial.measurement)
    assert len({*points(study)}) == len(study.trials)
    assert all(a != b for a, b in pairwise(points(study)))


def test_tokens_per_joule_are_bounded_from_below() -> None:
    """More is better: a limit is one from above on the negative logarithm, as for throughput."""
    limit = bound(Constraint.parse("tokens_per_j>=2/J"))
    seen = replace(measured(), extras={"tokens_per_j": 4.0})
    assert table([seen], [limit.quantity])[0, 0] < limit.limit
    assert in_units("tokens_per_j", table([seen], [limit.quantity]))[0, 0] == pytest.approx(4.0)


def worth(*promises: tuple[float, float]) -> Any:
    """Return what trials promise: of each the share it is expected to save if it holds, and the chance that it does."""
    gain, feasible = np.log(np.array(promises)).T
    return SimpleNamespace(total=gain + feasible, feasible=feasible, assured=feasible, improving=True)


@pytest.mark.parametrize(
    ("promises", "chosen", "beyond"),
    [
        (((0.02, 0.9), (0.5, 0.1)), 0, Daring.NOTHING),  # the first cap leaves something to gain
        (((0.001, 0.9), (0.02, 0.6)), 1, Daring.NOTHING),  # the next cap does
        (((0.001, 0.9), (0.1, 0.1)), 1, Daring.GAIN),  # only beyond all caps there is anything
        (((0.001, 0.9), (0.02, 0.1)), 0, Daring.GAIN),  # and that is not worth it: within them something may be learnt
        (((0.001, 0.1), (0.02, 0.1)), 1, Daring.ALL),  # unless there is nothing within them
    ],
)
def test_caps_on_risk_are_opened_one_after_the_other(
    promises: tuple[tuple[float, float], ...], chosen: int, beyond: Daring
) -> None:
    """A point beyond them all is known as one, so that a search may end rather than go there for next to nothing."""
    every = np.arange(len(promises))
    rows = best_rows(worth(*promises), every, Options(), few=True)
    assert (rows.tolist(), beyond_caps(worth(*promises), every)) == ([chosen], beyond)


def test_a_search_that_could_end_leaps_for_little_too() -> None:
    """Through noise the worth of a leap is told late; when it is to end is for the rule of stopping to say."""
    promise = worth((0.001, 0.9), (0.02, 0.1))
    assert best_rows(promise, np.arange(2), Options()).tolist() == [1]
    assert best_rows(promise, np.arange(2), Options(), few=True).tolist() == [0]


@pytest.mark.parametrize(
    ("promises", "used", "chosen"),
    [
        (((0.02, 0.9999), (0.5, 0.97)), 0.0, 0),  # next to no risk leaves something to gain
        (((0.001, 0.9999), (0.5, 0.97)), 0.0, 1),  # it does not, and half of 0.1 is left for what does
        (((0.001, 0.9999), (0.5, 0.97)), 0.08, 0),  # of which too much has been used
        (((0.1, 0.96), (0.12, 0.91)), 0.0, 0),  # the share that is opened last is not needed
        (((0.1, 0.98), (0.11, 0.96)), 0.0, 0),  # a little more gain is not worth twice the risk
    ],
)
def test_a_risk_is_used_where_it_gains_most(
    promises: tuple[tuple[float, float], ...], used: float, chosen: int
) -> None:
    """A tenth of chance for the whole search: what is left of it pays for trials, but not for little."""
    assert best_rows(worth(*promises), np.arange(len(promises)), Options(risk=0.1), used).tolist() == [chosen]


def test_what_earlier_trials_have_used_of_a_risk_counts_where_there_is_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each suggestion of a careful search asks for it; a free one does not."""
    monkeypatch.setattr("polythrottle.optimize.bayes.Account.used", lambda account, study: 0.04)
    asked = []

    def noted(promise: Any, rows: Any, options: Options, used: float = 0.0, *, few: bool = False) -> Any:
        asked.append(used)
        return rows[:1]

    monkeypatch.setattr("polythrottle.optimize.bayes.best_rows", noted)
    for risk in (0.05, None):
        begun = Study(Problem(board()), "bayes", 0)
        optimizer = make_optimizer("bayes", Options(risk=risk))
        first = optimizer.suggest(begun)
        optimizer.suggest(begun.with_trial(Trial(0, first, physical(first))))
    assert asked == [0.04, 0.0]


def test_a_risk_goes_by_the_chances_that_physics_has_corrected() -> None:
    """What the model alone takes for safe is not, and what it takes for risky is."""
    promise = worth((0.02, 0.9999), (0.02, 0.97))
    promise.assured = promise.feasible[::-1]
    assert best_rows(promise, np.arange(2), Options(risk=0.1)).tolist() == [1]


@pytest.mark.parametrize(
    ("promises", "told"),
    [
        (((0.5, 0.93), (0.5, 0.5)), "the safest that is worth it would be at --risk 0.08"),
        (((0.001, 0.93),), "and none seems worth more"),
        (((100.0, 0.005),), "safe enough to try at a risk of 0.05"),
    ],
)
def test_what_a_greater_risk_would_allow_is_said(promises: tuple[tuple[float, float], ...], told: str) -> None:
    """Of 0.05 a hundredth is used: the safest point left counts, if it is worth it."""
    with pytest.raises(Exhausted, match="safe enough") as caught:
        best_rows(worth(*promises), np.arange(len(promises)), Options(risk=0.05), 0.01)
    assert str(caught.value).endswith(told)


@pytest.mark.parametrize(("batches", "told"), [("8,16,32,64,128", True), ("8", False)])
def test_an_end_says_what_only_the_risk_that_was_asked_for_has_kept_from_it(
    tmp_path: Path, batches: str, *, told: bool
) -> None:
    """A board whose caps do nothing and whose larger batches nobody can vouch for: that is not nothing to gain."""
    every = [int(text) for text in batches.split(",")]
    rows = [f"{cap},{batch},{0.038 * 1.02**batch},{40.0}" for batch in every for cap in (100, 150, 200, 250)]
    table = tmp_path / "table.csv"
    table.write_text("power_limit_w,batch_size,latency_s,power_w\n" + "\n".join(rows) + "\n")
    found = Table.read(table)
    study = Study(Problem(found.space, (Constraint.parse("mean<=50ms"),)), "bayes", 0)
    optimizer = make_optimizer("bayes", Options(risk=0.05))
    for point, measurement in zip(found.points, found.measurements, strict=True):
        if point["batch_size"] == 8:
            study = study.with_trial(Trial(len(study.trials), point, measurement))
    assert bool(Outlook(optimizer).held_back(study)) == told


def test_the_account_of_a_search_follows_from_its_trials_alone() -> None:
    """Each trial counts with the chance it had when it was begun, asked once, and again where trials are others."""
    asked: list[int] = []

    def chance(before: Study, trial: Trial) -> float | None:
        asked.append(len(before.trials))
        return None if not before.trials else float(trial.point["gpu_max_hz"]) / 100.0

    space = SearchSpace.grid((Knob("gpu_max_hz", tuple(range(1, 9))),), {"gpu_max_hz": 8})
    trials = tuple(Trial(number, space[number]) for number in range(4))
    study = Study(Problem(space), "bayes", trials=trials)
    account = Account(chance)
    assert account.used(study) == pytest.approx(0.09)
    assert account.used(replace(study, trials=trials[:3])) == pytest.approx(0.05)
    assert asked == [0, 1, 2, 3], "nothing is worked out twice"
    other = replace(study, trials=(*trials[:3], Trial(3, space[7])))
    assert account.used(other) == pytest.approx(0.13)
    assert asked[4:] == [3]


@pytest.mark.parametrize(("energies", "level"), [((2.0,), 5), ((2.0, 1.0), 3), ((2.0, 3.0), 7), ((2.0, 3.0, 3.0), 8)])
def test_a_step_along_a_knob_ends_half_way_to_the_end_or_to_the_nearest_point_tried(
    energies: tuple[float, ...], level: int
) -> None:
    """From the highest of nine levels to the fifth; on from there if that helped, else back by half, and half again."""
    levels = tuple(10_000_000 * 2**doublings for doublings in range(9))  # steps are equal on a logarithmic scale
    space = SearchSpace.grid((Knob("gpu_max_hz", levels),), {"gpu_max_hz": levels[-1]})
    search, study = make_optimizer("gradient"), Study(Problem(space), "gradient")
    for number, energy in enumerate(energies):
        study = replace(study, trials=(*study.trials, Trial(number, search.suggest(study), measured(energy_j=energy))))
    assert search.suggest(study)["gpu_max_hz"] == levels[level - 1]


LIMITED = SearchSpace.grid(
    (Knob("gpu_max_hz", (1_000_000_000, 2_000_000_000)), Knob("power_limit_w", (100, 150, 200, 300))),
    {"gpu_max_hz": 2_000_000_000, "power_limit_w": 300},
)


def _drew(power_w: float, limit_w: int, kind: EnergyKind = EnergyKind.MEASURED) -> Study:
    """Return a study of the default clock at a power limit, which drew so much."""
    point = OperatingPoint({"gpu_max_hz": 2_000_000_000, "power_limit_w": limit_w})
    trial = Trial(0, point, replace(measured(), power_w=power_w, energy_kind=kind))
    return Study(Problem(LIMITED, (), "sim:test", "model"), "bayes", 0, (trial,))


@pytest.mark.parametrize(
    ("asked", "twins"),
    [
        (_drew(120.0, 300), {150, 200}),
        (_drew(120.0, 150), {200, 300}),
        (_drew(140.0, 150), set()),  # it may have bound there
        (_drew(95.0, 100), set()),
        (_drew(120.0, 300, EnergyKind.RELATIVE), set()),
    ],
)
def test_limits_that_did_not_bind_are_one_point(asked: Study, twins: set[int]) -> None:
    """A card that drew 120 W at a limit of 300 W does the same at 200 and 150 W; at 100 W it does not."""
    untried = untried_rows(asked)
    left = {tuple(LIMITED[int(row)].values()) for row in distinct_rows(asked, untried)}
    assert left == {tuple(LIMITED[int(row)].values()) for row in untried} - {(2_000_000_000, limit) for limit in twins}


def test_a_search_makes_trials_of_what_is_one_point_last() -> None:
    """All clocks, and one limit of those that do not bind; the others only if a search goes on all the same."""
    asked = replace(_drew(120.0, 300), trials=())
    optimizer = make_optimizer("bayes")
    for number in range(len(LIMITED)):
        point = optimizer.suggest(asked)
        clock_hz, limit_w = point["gpu_max_hz"], point["power_limit_w"]
        power_w = min(120.0 if clock_hz == 2_000_000_000 else 60.0, float(limit_w))
        seen = measured(intervals={"energy": Interval(0.9, 1.1)})
        trial = Trial(number, point, replace(seen, power_w=power_w, energy_kind=EnergyKind.MEASURED))
        asked = replace(asked, trials=(*asked.trials, trial))
    first = [tuple(trial.point.values()) for trial in asked.trials[:3]]
    assert len({clock_hz for clock_hz, _ in first}) == 2
    assert (2_000_000_000, 100) in first
    assert len(asked.visited) == len(LIMITED)
