"""The answer of a search is the point the models expect to be best, not the luckiest window."""

from dataclasses import replace

import numpy as np
import pytest
from builders import measured

from polythrottle.domain.measurement import Interval, Measurement
from polythrottle.domain.problem import Constraint, Objective, Problem
from polythrottle.domain.space import Knob, OperatingPoint, SearchSpace
from polythrottle.domain.study import Study, Trial
from polythrottle.optimize import ConstrainedBayes

CLOCKS_HZ = tuple(range(400_000_000, 1_400_000_000, 50_000_000))
LEAST_HZ = 800_000_000


def energy_of(clock_hz: int) -> float:
    """Return the joules per item of a made-up board: a shallow bowl around `LEAST_HZ`."""
    return 1.0 + 0.5 * float(np.log(clock_hz / LEAST_HZ)) ** 2


def seen(latency_s: float, energy_j: float, share: float = 0.02) -> Measurement:
    """Return a measurement that says how far its energy may be off, as a fraction."""
    around = Interval((1 - share) * energy_j, (1 + share) * energy_j)
    return replace(measured(latency_s, energy_j), intervals={"energy": around})


def study(
    values: dict[int, tuple[float, float]], slo: str = "p99<=1s", objective: Objective = Objective.ENERGY
) -> Study:
    """Return a study that saw a latency and an energy at each of these clocks, the highest first."""
    space = SearchSpace.grid((Knob("gpu_max_hz", CLOCKS_HZ),), {"gpu_max_hz": CLOCKS_HZ[-1]})
    order = sorted(values, reverse=True)
    trials = [Trial(i, OperatingPoint({"gpu_max_hz": hz}), seen(*values[hz])) for i, hz in enumerate(order)]
    problem = Problem(space, (Constraint.parse(slo),), "sim:test", "model", objective=objective)
    return Study(problem, "bayes", 0, tuple(trials))


def regret(trial: Trial | None) -> float:
    """Return how much more energy a trial's point truly takes than the least there is."""
    assert trial is not None
    return energy_of(int(trial.point["gpu_max_hz"])) - 1.0


@pytest.mark.slow
def test_the_answer_is_nearer_to_the_best_than_the_luckiest_window() -> None:
    """Over six noisy sweeps of a bowl it loses less than half of what the least figure does."""
    lucky, expected = [], []
    for seed in range(6):
        rng = np.random.default_rng(seed)
        noisy = {hz: (0.01, energy_of(hz) * float(np.exp(0.03 * rng.standard_normal()))) for hz in CLOCKS_HZ}
        known = study(noisy)
        lucky.append(regret(known.best))
        expected.append(regret(ConstrainedBayes().answer(known)))
    assert float(np.mean(expected)) < 0.5 * float(np.mean(lucky))


def test_a_window_that_was_lucky_with_a_limit_is_no_answer() -> None:
    """A point whose neighbours on both sides break a limit breaks it too, whatever a few queries at it saw."""
    known = study({hz: (12e6 / hz, hz / 1e9) for hz in CLOCKS_HZ}, "p99<=18ms")
    at = next(trial for trial in known.trials if trial.point["gpu_max_hz"] == 700_000_000)
    assert at.measurement is not None
    lucky = replace(
        at.measurement,
        latency=replace(at.measurement.latency, p99_s=0.0179),
        intervals={**at.measurement.intervals, "p99": Interval(0.015, float("inf"))},
    )
    known = known.with_trial(replace(at, measurement=lucky))
    assert known.best is not None
    assert known.best.point["gpu_max_hz"] == 700_000_000
    answer = ConstrainedBayes().answer(known)
    assert answer is not None
    assert int(answer.point["gpu_max_hz"]) >= LEAST_HZ


def test_of_two_that_cost_nearly_the_same_the_one_that_surely_holds_is_the_answer() -> None:
    """A window a twentieth of a per cent below the limit, at noise of 3 %, is an even chance to break it next time."""
    rng = np.random.default_rng(2)
    noisy = {hz: (12e6 / hz * float(np.exp(0.03 * rng.standard_normal())), 1.0 + 1e-11 * hz) for hz in CLOCKS_HZ}
    known = study(noisy | {LEAST_HZ: (0.01499, 1.0 + 1e-11 * LEAST_HZ)}, "p99<=18ms")
    assert known.best is not None
    assert int(known.best.point["gpu_max_hz"]) <= LEAST_HZ
    answer = ConstrainedBayes().answer(known)
    assert answer is not None
    assert int(answer.point["gpu_max_hz"]) > LEAST_HZ


def test_what_is_on_record_is_the_answer() -> None:
    """A table has no intervals, and its figures are not drawn again: the least is the best."""
    values = {hz: (0.01, energy_of(hz)) for hz in CLOCKS_HZ} | {1_200_000_000: (0.01, 0.5)}
    known = study(values)
    trials = [
        replace(trial, measurement=measured(0.01, trial.measurement.energy_j))
        for trial in known.completed
        if trial.measurement
    ]
    bare = replace(known, trials=tuple(trials))
    assert ConstrainedBayes().answer(bare) == bare.best


def test_without_a_feasible_trial_there_is_no_answer() -> None:
    """Nothing is chosen that was not seen to hold."""
    assert ConstrainedBayes().answer(study({1_350_000_000: (0.01, 1.0)}, "p99<=1ms")) is None
    assert ConstrainedBayes().answer(study({})) is None


def test_a_single_point_is_the_answer_without_models() -> None:
    """Where nothing can be chosen nothing is asked, be there no knob at all."""
    point = SearchSpace.unit().default
    known = Study(Problem(SearchSpace.unit(), ()), "bayes", 0, (Trial(0, point, seen(0.01, 1.0)),))
    assert ConstrainedBayes().answer(known) == known.trials[0]


def test_where_the_models_believe_no_window_the_best_one_stays() -> None:
    """If every point is expected to break a limit, the best that was seen to hold it is still an answer."""
    values = dict.fromkeys(CLOCKS_HZ[:-1:2], (0.01, 1.0)) | {CLOCKS_HZ[-3]: (0.0083, 1.1)}
    known = study(values, "p99<=10ms")
    assert known.best is not None
    assert ConstrainedBayes().answer(known) == known.best


@pytest.mark.parametrize("objective", [Objective.EDP, Objective.LATENCY, Objective.PARETO])
def test_every_objective_has_an_answer(objective: Objective) -> None:
    """The answer is of what is minimised; that of a front is its point of least energy."""
    values = {hz: (8e6 / hz, energy_of(hz)) for hz in CLOCKS_HZ}
    answer = ConstrainedBayes().answer(study(values, objective=objective))
    assert answer is not None
    clock_hz = int(answer.point["gpu_max_hz"])
    wanted = {Objective.EDP: min(CLOCKS_HZ, key=lambda hz: energy_of(hz) / hz), Objective.LATENCY: CLOCKS_HZ[-1]}
    assert abs(np.log(clock_hz / wanted.get(objective, LEAST_HZ))) < 0.1


def test_the_answer_is_a_function_of_the_study() -> None:
    """Asked again, the answer is the same."""
    known = study({hz: (0.01, energy_of(hz)) for hz in CLOCKS_HZ[::3]})
    assert ConstrainedBayes().answer(known) == ConstrainedBayes().answer(known)
