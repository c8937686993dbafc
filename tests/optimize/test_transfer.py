"""Learning from earlier studies: they help where they are related, and do little harm where they are not."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from polythrottle.domain.measurement import Latency, Measurement
from polythrottle.domain.problem import Constraint, Problem
from polythrottle.domain.space import Knob, Level, OperatingPoint, SearchSpace
from polythrottle.domain.study import Study, Trial
from polythrottle.optimize import Options, make_optimizer

GPU_HZ = tuple(range(200_000_000, 1_400_000_000, 100_000_000))
MEM_HZ = (204_000_000, 665_600_000, 2_133_000_000, 3_199_000_000)
BATCHES = (1, 2, 4, 8, 16)
Visit = Callable[[Mapping[str, Level]], Measurement | None]


def board(
    gpu: Sequence[float] = GPU_HZ, mem: Sequence[int] = MEM_HZ, name: str = "gpu_max_hz", **rest: Knob
) -> SearchSpace:
    """Return GPU clocks × memory clocks × batches, flat out by default, times any further knobs."""
    knobs = (Knob(name, tuple(gpu)), Knob("mem_hz", tuple(mem)), Knob("batch_size", BATCHES), *rest.values())
    default: dict[str, Level] = {knob.name: knob.levels[-1] for knob in knobs}
    return SearchSpace.grid(knobs, default | {"batch_size": 1})


def model(compute: float, memory: float, size: float = 1.0) -> Visit:
    """Return a made-up workload: milliseconds of arithmetic and memory traffic per item, and how busy a board is."""

    def visit(point: Mapping[str, Level]) -> Measurement:
        gpu, mem, batch = (float(point[name]) for name in ("gpu_max_hz", "mem_hz", "batch_size"))
        ghz, share = gpu / 1e9, mem / MEM_HZ[-1]
        latency_s = size * 1e-3 * (1.0 + compute * batch**0.9 / ghz + memory * batch**0.7 / share)
        busy = compute * batch / ghz / (size * 1e-3 + compute * batch / ghz + memory * batch / share)
        power_w = 6.0 + 16.0 * busy * ghz * (1.0 + 0.5 * max(0.0, ghz - 0.7)) ** 2 + 5.0 * share
        return Measurement(
            Latency(latency_s, p99_s=1.2 * latency_s), power_w * latency_s / batch, batch / latency_s, power_w
        )

    return visit


def asked(space: SearchSpace, *slo: str, workload: str = "new") -> Problem:
    """Return a problem on the made-up board."""
    return Problem(space, tuple(map(Constraint.parse, slo)), "sim:made-up", workload)


def earlier(visit: Visit, space: SearchSpace | None = None, trials: int = 30, seed: int = 0) -> Study:
    """Return a study of so many random points."""
    space = space or board()
    rows = np.random.default_rng(seed).permutation(len(space))[:trials]
    seen = [Trial(i, space[int(row)], visit(space[int(row)])) for i, row in enumerate(rows)]
    return Study(asked(space, workload="old"), "random", 0, tuple(seen))


def arrival(visit: Visit, history: Sequence[Study], slo: str = "mean<=1.6x", most: int = 25, seed: int = 0) -> int:
    """Return the trials until the best feasible one is within 5 % of the least energy there is."""
    space = board()
    study, optimizer = Study(asked(space, slo), "bayes", seed), make_optimizer("bayes", Options(history))
    true = [visit(point) for point in space]
    limit_s = 1.6 * (visit(space.default) or flat()).latency.mean_s
    least = min(m.energy_j for m in true if m and m.latency.mean_s <= limit_s)
    for number in range(most):
        point = optimizer.suggest(study)
        study = study.with_trial(Trial(number, point, visit(point)))
        if study.best and study.best.measurement and study.best.measurement.energy_j <= 1.05 * least:
            return number + 1
    return most + 1


def flat(energy_j: float = 1.0, latency_s: float = 0.01) -> Measurement:
    """Return a measurement without power, temperature or percentiles."""
    return Measurement(Latency(latency_s), energy_j, 1.0 / latency_s)


def shuffled(visit: Visit, seed: int) -> Visit:
    """Return a workload whose measurements are those of another at other points."""
    space = board()
    order = np.random.default_rng(seed).permutation(len(space))
    return lambda point: visit(space[int(order[space.index(point)])])


WORKLOADS = [model(6.0, 1.5), model(2.0, 4.0), model(9.0, 0.5, 2.0)]
RELATED = [model(5.0, 2.0), model(3.0, 3.0), model(8.0, 1.0, 3.0)]


def mean_arrival(history: Sequence[Study]) -> float:
    """Return the mean of the trials needed over the workloads."""
    return float(np.mean([arrival(visit, history) for visit in WORKLOADS]))


@pytest.mark.slow
def test_related_studies_save_trials() -> None:
    """Three earlier studies of thirty trials each, of other workloads on the same board, leave fewer to make."""
    assert mean_arrival([earlier(visit, seed=i) for i, visit in enumerate(RELATED)]) < mean_arrival(())


@pytest.mark.slow
def test_a_misleading_study_costs_at_most_a_trial() -> None:
    """A study whose measurements belong to other points is noticed."""
    misled = [earlier(shuffled(RELATED[0], 1), trials=len(board()))]
    worse = [arrival(visit, misled) - arrival(visit, ()) for visit in WORKLOADS]
    assert float(np.mean(worse)) <= 1.0


@pytest.mark.slow
def test_the_same_workload_again_takes_fewer_trials() -> None:
    """A study of the very same question leads to the optimum sooner than none."""
    again = [arrival(visit, [earlier(visit, trials=60)]) for visit in WORKLOADS]
    assert float(np.mean(again)) < mean_arrival(())


@pytest.mark.slow
def test_other_units_of_a_knob_mean_the_same() -> None:
    """A study in megahertz, under the other name of the clock, leads where the one in hertz does."""

    def in_mhz(point: Mapping[str, Level]) -> Measurement | None:
        return RELATED[0]({**point, "gpu_max_hz": 1e6 * float(point["gpu_freq_mhz"])})

    space = board([hz / 1e6 for hz in GPU_HZ], name="gpu_freq_mhz")
    for visit in WORKLOADS[:2]:
        assert arrival(visit, [earlier(in_mhz, space)]) == arrival(visit, [earlier(RELATED[0])])


@pytest.mark.slow
def test_a_suggestion_with_history_is_a_function_of_the_study() -> None:
    """Asked again, by an optimiser that reads its history afresh, the answer is the same."""
    study = Study(asked(board(), "mean<=1.6x"))
    for number in range(4):
        first, second = (
            make_optimizer("bayes", Options([earlier(visit) for visit in RELATED])).suggest(study) for _ in range(2)
        )
        assert first == second
        study = study.with_trial(Trial(number, first, WORKLOADS[0](first)))


def test_a_history_that_says_nothing_changes_nothing() -> None:
    """Studies without a measurement leave the search as it is without them."""
    nothing = [
        Study(asked(board())),
        Study(asked(board()), trials=(Trial(0, board().default, failure="it fell over"),)),
    ]
    study = Study(asked(board(), "mean<=1.6x"))
    for number in range(3):
        told, alone = (make_optimizer("bayes", Options(past)).suggest(study) for past in (nothing, ()))
        assert told == alone
        study = study.with_trial(Trial(number, told, WORKLOADS[0](told)))


ODD_SPACES = {
    "one point": SearchSpace.unit(),
    "one knob of one level": SearchSpace.grid([Knob("gpu_max_hz", (1_000_000_000,))], {"gpu_max_hz": 1_000_000_000}),
    "other knobs": SearchSpace.grid([Knob("cpu_hz", (1, 2, 3)), Knob("mode", ("a", "b"))], {"cpu_hz": 3, "mode": "a"}),
    "labels for clocks": SearchSpace.grid([Knob("gpu_max_hz", ("low", "high"))], {"gpu_max_hz": "high"}),
    "batches as labels": SearchSpace.grid([Knob("batch_size", (1, 2, 4), label=True)], {"batch_size": 1}),
    "megahertz under a name in hertz": board([200, 400, 1300], (204, 3199)),
    "negative and zero levels": SearchSpace.grid([Knob("gpu_max_hz", (-1, 0, 5))], {"gpu_max_hz": 0}),
}


@pytest.mark.parametrize("space", ODD_SPACES.values(), ids=ODD_SPACES)
@pytest.mark.parametrize("trials", [1, 40])
def test_no_earlier_space_is_too_odd(space: SearchSpace, trials: int) -> None:
    """Other knobs, other units, labels, constants and single rows still lead to suggestions, each a new point."""
    past = earlier(lambda point: flat(1.0 + 0.1 * (hash(str(dict(point))) % 7)), space, trials)
    study, optimizer = Study(asked(board(), "p99<=30ms", "power<=22W")), make_optimizer("bayes", Options([past]))
    for number in range(4):
        point = optimizer.suggest(study)
        assert point not in study.visited
        study = study.with_trial(Trial(number, point, WORKLOADS[0](point)))


def test_a_percentile_is_learnt_from_the_mean() -> None:
    """A study that recorded only mean latencies still informs a limit on the 99th percentile."""
    from polythrottle.optimize.transfer import surface

    past = earlier(lambda point: replace(RELATED[0](point) or flat(), latency=Latency(0.01), power_w=None))
    found = surface(past, asked(board()), ("time", "draw", "p99", "power", "temperature"))
    assert found is not None
    assert np.isfinite(found.mean).all()
    assert (found.variance > 0).all()
    np.testing.assert_array_equal(np.isfinite(found.level), [True, True, True, True, False])


def test_a_quantity_that_half_of_the_trials_lack_does_not_cost_their_other_figures() -> None:
    """Only what most trials recorded is learnt, from those that did."""
    from polythrottle.optimize.transfer import _past_trials

    def known(recorded: int) -> tuple[int, list[bool]]:
        past = earlier(RELATED[0], trials=8)
        trials = [
            replace(trial, measurement=replace(trial.measurement, temperature_c=50.0 if at < recorded else None))
            for at, trial in enumerate(past.trials)
            if trial.measurement is not None
        ]
        found = _past_trials(replace(past, trials=tuple(trials)), ("time", "temperature"), 100)
        return len(found.rows), found.known.tolist()

    assert known(4) == (8, [True, False])
    assert known(5) == (5, [True, True])


def test_a_clock_of_another_chip_counts_from_its_highest_level() -> None:
    """Half of one chip's clock is taken for half of another's, the same watts and batches for the same."""
    from polythrottle.optimize.features import shared_coordinates

    def space(top: int) -> SearchSpace:
        knobs = [Knob("gpu_max_hz", (top // 4, top // 2, top)), Knob("batch_size", (1, 2, top // 100))]
        return SearchSpace.grid(knobs, {"gpu_max_hz": top, "batch_size": 1})

    here, there = Problem(space(800), device="a"), Problem(space(1400), device="b")
    where = shared_coordinates(there, here).where
    clocks = where.offset[: len(there.space), 0].reshape(3, 3)[:, 0]
    batches = where.offset[: len(there.space), 1].reshape(3, 3)[0]
    np.testing.assert_allclose(clocks, np.log([0.25, 0.5, 1.0]), atol=0.01)
    np.testing.assert_allclose(batches, np.log([1, 2, 14]), atol=0.01)


VALUES = st.floats(1e-300, 1e300)
LEVELS = st.one_of(
    st.lists(st.integers(-3, 10**12), min_size=1, max_size=5, unique=True),
    st.lists(st.floats(0, 1e300), min_size=1, max_size=4, unique=True),
    st.lists(st.sampled_from(["a", "b", "c"]), min_size=1, max_size=3, unique=True),
)


@pytest.mark.slow
@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data(), columns=st.lists(LEVELS, min_size=1, max_size=6))
def test_no_history_and_no_value_is_too_odd(data: st.DataObject, columns: list[list[Level]]) -> None:
    """Whatever was measured in whatever space, the next point is a new one of the target."""

    def made(names: Sequence[str], levels: Sequence[list[Level]]) -> SearchSpace:
        knobs = [Knob(name, tuple(some)) for name, some in zip(names, levels, strict=False)]
        return SearchSpace.grid(knobs, {knob.name: data.draw(st.sampled_from(knob.levels)) for knob in knobs})

    def visit(_: OperatingPoint) -> Measurement | None:
        drawn = data.draw(st.one_of(st.none(), st.tuples(VALUES, VALUES, VALUES)))
        return None if drawn is None else Measurement(Latency(drawn[0]), drawn[1], drawn[2])

    half = (len(columns) + 1) // 2
    there, here = made(("a_hz", "b_w", "batch"), columns[:half]), made(("a_mhz", "batch", "d"), columns[-half:])
    optimizer = make_optimizer("bayes", Options([earlier(visit, there, 6), earlier(visit, there, 2)]))
    study = Study(asked(here, "mean<=1s"))
    for number in range(min(4, len(here))):
        point = optimizer.suggest(study)
        assert point not in study.visited
        study = study.with_trial(Trial(number, point, visit(point)))
