"""Explaining a study: what binds, each knob's share, what other limits buy, for any study a journal can hold."""

import itertools
import json
import math
import re
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from builders import measured, study

from polythrottle.cli.commands import run
from polythrottle.cli.render.explanation import explain_document, print_explanation
from polythrottle.domain.errors import PolythrottleError
from polythrottle.domain.measurement import EnergyKind, Latency, Measurement
from polythrottle.domain.problem import Constraint, Objective, Problem
from polythrottle.domain.space import Knob, Level, OperatingPoint, SearchSpace
from polythrottle.domain.study import Study, Trial
from polythrottle.optimize.explain import Explanation, explain
from polythrottle.optimize.explain.explanation import step
from polythrottle.optimize.explain.shares import EXACT, Mixtures
from polythrottle.storage.journal import Journal

SAMPLES = Path(__file__).parents[1] / "data"
GPU_HZ = (400_000_000, 600_000_000, 800_000_000, 1_000_000_000)
MEM_HZ = (500_000_000, 1_000_000_000, 2_000_000_000)
Visit = Callable[[Mapping[str, Level]], Measurement | None]


def board(*more: Knob) -> SearchSpace:
    """Return GPU clocks × memory clocks × runtimes, 24 points, times any further knobs."""
    knobs = (Knob("gpu_max_hz", GPU_HZ), Knob("mem_hz", MEM_HZ), Knob("runtime", ("eager", "graph")), *more)
    rest = {knob.name: knob.levels[-1] for knob in more}
    return SearchSpace.grid(knobs, {"gpu_max_hz": GPU_HZ[-1], "mem_hz": MEM_HZ[-1], "runtime": "eager", **rest})


def product(point: Mapping[str, Level]) -> Measurement:
    """Return a made-up board whose knobs each multiply time and energy by a factor of their own."""
    gpu, mem = float(point["gpu_max_hz"]) / GPU_HZ[-1], float(point["mem_hz"]) / MEM_HZ[-1]
    graph = point["runtime"] == "graph"
    latency_s = 0.01 * gpu**-0.5 * mem**-0.1 * (0.9 if graph else 1.0)
    energy_j = 2.0 * gpu**0.4 * mem**0.2 * (0.8 if graph else 1.0)
    return Measurement(
        Latency(latency_s, p99_s=1.2 * latency_s),
        energy_j,
        1 / latency_s,
        energy_j / latency_s,
        EnergyKind.SIMULATED,
        temperature_c=30.0 + energy_j / latency_s / 50.0,
    )


def _steep(point: Mapping[str, Level]) -> Measurement:
    """Return what is cheap at the lowest clock alone, and then far slower than any limit nearby."""
    lowest = point["gpu_max_hz"] == GPU_HZ[0]
    return measured(1.0 if lowest else 0.01, 0.5 if lowest else 1.0 + float(point["gpu_max_hz"]) / 1e10)


def visited(space: SearchSpace, *slo: str, visit: Visit = product, count: int | None = None, stride: int = 1) -> Study:
    """Return a study that visited the default, then every n-th other point of the space, at most so many."""
    points = [space.default, *(point for point in space if point != space.default)][::stride][:count]
    trials = [Trial(i, point, seen := visit(point), None if seen else "it fell over") for i, point in enumerate(points)]
    return Study(Problem(space, tuple(map(Constraint.parse, slo)), "sim:test", "model"), "grid", 0, tuple(trials))


def printed(found: Explanation, capsys: pytest.CaptureFixture[str]) -> str:
    """Return what is printed of an explanation, which fits 80 columns and has a document that is proper JSON."""
    json.dumps(explain_document(found), allow_nan=False)
    print_explanation(found)
    text = capsys.readouterr().out
    assert max(map(len, text.splitlines())) <= 80
    return text


def test_shares_of_factors_are_the_factors() -> None:
    """Where every knob multiplies the energy by a factor, its share is that factor's logarithm."""
    found = explain(visited(board(), "mean<=13ms"))
    energy = next(effect for effect in found.effects if effect.metric == "energy")
    assert found.at is not None
    assert found.at.measurement is not None
    levels = found.at.point
    factors = {
        "gpu_max_hz": (float(levels["gpu_max_hz"]) / GPU_HZ[-1]) ** 0.4,
        "mem_hz": (float(levels["mem_hz"]) / MEM_HZ[-1]) ** 0.2,
        "runtime": 0.8,
    }
    whole = math.log(found.at.measurement.energy_j / 2.0)
    shares = {share.knob: share.fraction for share in energy.shares}
    assert shares == {name: pytest.approx(math.log(factors[name]) / whole, abs=0.03) for name in shares}


def test_shares_add_up_to_the_modelled_change() -> None:
    """Knob by knob the changes sum to what the models say lies between default and best, in every metric's unit."""
    found = explain(visited(board(), "p99<=15ms", "temperature<=60C", "throughput>=50/s", count=14))
    assert {effect.metric for effect in found.effects} == {"energy", "p99", "temperature", "throughput"}
    for effect in found.effects:
        total = sum(share.change for share in effect.shares)
        assert total == pytest.approx(effect.predicted_after - effect.predicted_before, rel=1e-6)
        assert sum(share.fraction or 0.0 for share in effect.shares) == pytest.approx(1.0)


def test_the_model_s_saving_stands_beside_the_measured_one() -> None:
    """On a board without noise both savings agree within a hundredth."""
    done = visited(board(), "mean<=13ms")
    assert explain(done).saving_fraction == pytest.approx(done.saving_fraction, abs=0.01)


def shapley(worth: Callable[[frozenset[int]], float], count: int) -> list[float]:
    """Return Shapley values by the definition, over all orders."""
    orders = list(itertools.permutations(range(count)))
    return [
        sum(worth(frozenset(o[: o.index(i) + 1])) - worth(frozenset(o[: o.index(i)])) for o in orders) / len(orders)
        for i in range(count)
    ]


def test_weights_are_those_of_shapley() -> None:
    """The weighted mixtures give what averaging over all orders gives, for any function of the mixtures."""
    start, end = (OperatingPoint({f"k{i}": level for i in range(5)}) for level in (0, 1))
    mixtures = Mixtures(start, end)
    values = np.random.default_rng(0).normal(size=32)
    table = dict(zip(mixtures.sets, values, strict=True))
    np.testing.assert_allclose(mixtures.weights @ values, shapley(table.__getitem__, 5), atol=1e-12)


def test_many_knobs_are_shared_out_along_drawn_orders() -> None:
    """Beyond the exact limit the shares still add up, are exact for factors, and need not all mixtures."""
    count = EXACT + 3
    start, end = (OperatingPoint({f"k{i:02}": level for i in range(count)}) for level in (0, 1))
    mixtures = Mixtures(start, end, seed=5)
    values = np.array([sum((i + 1.0) for i in moved) for moved in mixtures.sets])
    np.testing.assert_allclose(mixtures.weights @ values, np.arange(1.0, count + 1.0), atol=1e-9)
    assert len(mixtures.sets) < 2**count


def test_a_limit_that_holds_the_energy_up_binds() -> None:
    """Where a lower clock would save energy but breaks the limit, the limit binds; one far away does not."""
    found = explain(visited(board(), "mean<=13ms", "temperature<=90C"))
    mean, temperature = found.limits
    assert mean.binds
    assert mean.saving is not None
    assert mean.saving > 0.1
    assert not temperature.binds
    assert mean.slack == pytest.approx(mean.constraint.limit - mean.value)


def test_a_limit_with_room_that_binds_is_given_its_reason(capsys: pytest.CaptureFixture[str]) -> None:
    """Points have gaps between; and of limits with one answer the first, the last and the one asked for are listed."""
    shown = " ".join(printed(explain(visited(board(), "mean<=13ms")), capsys).split())
    assert "(11.1%) left; binds all the same, for better points lie beyond it: without it 24.2% less" in shown
    flat = explain(visited(board(), "mean<=30ms", visit=_steep))
    (ladder,) = flat.prices
    rows = [line for line in printed(flat, capsys).splitlines() if line.endswith(("as above", "the same"))]
    assert len({price.point for price in ladder}) == 2
    assert len(rows) == 3 < len(ladder) - 1


def test_ends_of_ranges_bind_where_no_limit_does() -> None:
    """Without a limit every clock is drawn to its lowest level, and one level further in costs energy."""
    found = explain(visited(board()))
    assert [(end.knob, end.highest, end.binds) for end in found.ends] == [
        ("gpu_max_hz", False, True),
        ("mem_hz", False, True),
    ]
    assert found.prices == ()


def test_nothing_binds_at_an_inner_optimum(capsys: pytest.CaptureFixture[str]) -> None:
    """An optimum inside the range with a far limit is said to be held by nothing."""
    space = SearchSpace.grid([Knob("gpu_max_hz", GPU_HZ)], {"gpu_max_hz": GPU_HZ[-1]})
    energies = dict(zip(GPU_HZ, (2.0, 1.0, 1.5, 2.5), strict=True))
    found = explain(visited(space, "mean<=1s", visit=lambda p: measured(0.01, energies[int(p["gpu_max_hz"])])))
    assert found.ends == ()
    assert not found.limits[0].binds
    assert "Nothing binds" in printed(found, capsys)


def test_prices_fall_as_the_limit_is_loosened() -> None:
    """The best energy never rises with the limit, points are as good as they say, and the last is without a limit."""
    (ladder,) = explain(visited(board(), "mean<=13ms")).prices
    energies = [price.value for price in ladder if price.value is not None]
    assert energies == sorted(energies, reverse=True)
    assert ladder[-1].constraint is None
    for price in ladder:
        assert price.point is not None
        assert price.measured
        assert price.value == pytest.approx(product(price.point).energy_j)
        limit = math.inf if price.constraint is None else price.constraint.limit
        true = {point: product(point) for point in board()}
        assert price.value == pytest.approx(min(m.energy_j for m in true.values() if m.latency.mean_s <= limit))


def test_the_present_limit_s_price_is_the_best_trial() -> None:
    """When all was visited, the row of the limit as it is names the study's best point, at no change."""
    done = visited(board(), "mean<=13ms")
    (ladder,) = explain(done).prices
    now = next(price for price in ladder if price.constraint == done.constraints[0])
    assert done.best is not None
    assert (now.point, now.change) == (done.best.point, 0.0)


def test_points_not_visited_are_called_predicted() -> None:
    """Where the models name a point nobody went to, it is no measurement, and near the truth on a smooth board."""
    ladders = explain(visited(board(), "mean<=14ms", stride=3)).prices
    guesses = [price for ladder in ladders for price in ladder if not price.measured and price.point is not None]
    assert guesses
    for price in guesses:
        assert price.point is not None
        assert price.std_fraction > 0
        assert price.value == pytest.approx(product(price.point).energy_j, rel=0.2)


@pytest.mark.parametrize(
    ("slo", "expected"),
    [
        ("p99<=25ms", 1e-3),
        ("p99<=1s", 0.05),
        ("mean<=2ms", 1e-4),
        ("temperature<=60C", 1.0),
        ("power<=20W", 1.0),
        ("throughput>=40/s", 2.0),
    ],
)
def test_the_step_suits_the_limit(slo: str, expected: float) -> None:
    """A millisecond where that is between a hundredth and a fifth of the limit, a degree, else five per cent."""
    assert step(Constraint.parse(slo)) == pytest.approx(expected)


def test_a_floor_is_loosened_downwards() -> None:
    """Of a throughput the smaller limit is the looser one."""
    (ladder,) = explain(visited(board(), "throughput>=80/s")).prices
    limits = [price.constraint.limit for price in ladder if price.constraint is not None]
    assert limits == sorted(limits, reverse=True)
    energies = [price.value for price in ladder if price.value is not None]
    assert energies == sorted(energies, reverse=True)


def test_a_study_without_a_feasible_trial_says_what_was_closest(capsys: pytest.CaptureFixture[str]) -> None:
    """Where no trial holds the limits, the closest is explained, and that other limits are not known to help."""
    found = explain(visited(board(), "p99<=1ms", "temperature<=90C"))
    assert not found.feasible
    assert found.hope is not None
    assert found.hope.excess > 1
    assert found.limits[0].slack < 0
    text = printed(found, capsys)
    assert "comes closest" in text
    assert "over" in text


def test_hope_is_a_point_that_may_hold() -> None:
    """If the tried points all break the limit but another should not, that one is named."""
    whole = visited(board(), "power<=100W")
    broken = [trial for trial in whole.trials if not whole.feasible(trial)]
    done = replace(whole, trials=tuple(replace(trial, number=number) for number, trial in enumerate(broken)))
    found = explain(done)
    assert found.hope is not None
    assert not found.hope.measured
    assert (product(found.hope.point).power_w or 0.0) < (product(board().default).power_w or 0.0)


@pytest.mark.parametrize(
    ("slo", "expected"),
    [
        (("throughput>=200/s",), r"still 4\d\.\d% short"),
        (("temperature<=25C",), r"still 6\.\d+ °C over"),
        (("p99<=1ms", "power<=20W"), r"still [\d.]+% over|still \d+ times the limit over"),
        (("throughput>=200/s", "power<=20W"), "still beyond a limit"),
    ],
)
def test_what_is_hoped_for_is_said_on_its_side_of_the_limit(
    slo: tuple[str, ...], expected: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """A floor is fallen short of, by a share of it; of a temperature nothing is a share."""
    found = explain(visited(board(), *slo, count=12))
    assert found.hope is not None
    found = replace(found, hope=replace(found.hope, measured=False))
    told = " ".join(printed(found, capsys).split())
    assert re.search(rf"hope .*: ({expected}) \(predicted\)", told), told


@pytest.mark.parametrize("count", [0, 1, 2, 5])
def test_too_few_trials_leave_nothing_to_explain(count: int, capsys: pytest.CaptureFixture[str]) -> None:
    """With a few completed trials there is one clear line, and a document that says so."""
    found = explain(visited(board(), "mean<=1.2x", count=count))
    assert f"not enough trials to explain anything: {count} completed" in printed(found, capsys)


@pytest.mark.slow
def test_figures_that_would_say_nothing_are_not_printed(capsys: pytest.CaptureFixture[str]) -> None:
    """Eight trials spread over a wide space: what the models hardly know has no percentage, and none is absurd."""
    words = ["--slo", "p99<=1.3x", "--method", "grid", "--trials", "8", "--no-presets", "--journal", "a.jsonl"]
    assert run(["tune", "-d", "sim:jetson-agx-orin", "-w", "efficientnet-b4", *words]) == 0
    capsys.readouterr()
    assert run(["explain", "a.jsonl"]) == 0
    text = capsys.readouterr().out
    assert not any(float(number) > 100 for number in re.findall(r"([\d.]+) ?%", text))
    assert "hardly known" in text


def test_effects_that_cancel_have_no_shares(capsys: pytest.CaptureFixture[str]) -> None:
    """Where two knobs undo each other's change, a share of what is left would be thousands of percent."""

    def visit(point: Mapping[str, Level]) -> Measurement:
        gpu, mem = point["gpu_max_hz"] == GPU_HZ[0], point["mem_hz"] == MEM_HZ[0]
        return measured(0.01 if gpu == mem else 0.05, 2.0 * (0.5 if gpu else 1.0) * (1.99 if mem else 1.0))

    found = explain(visited(board(), "mean<=20ms", visit=visit))
    assert {share.knob for share in found.effects[0].shares} == {"gpu_max_hz", "mem_hz"}
    assert all(share.fraction is None for share in found.effects[0].shares)
    assert "%" not in printed(found, capsys).partition("what each knob changed")[2].partition("as modelled")[0]


def test_limits_relative_to_a_default_that_failed_are_said_to_be_unknown(capsys: pytest.CaptureFixture[str]) -> None:
    """A study that cannot be judged is not judged."""
    space = board()
    done = visited(space, "mean<=1.2x", visit=lambda p: None if p == space.default else product(p), count=5)
    assert "never measured" in printed(explain(done), capsys)


def test_a_default_that_failed_is_predicted_only(capsys: pytest.CaptureFixture[str]) -> None:
    """Shares from a default that was never measured are the models' alone, and the saving is unknown."""
    space = board()
    found = explain(visited(space, "mean<=13ms", visit=lambda p: None if p == space.default else product(p)))
    assert all(effect.before is None for effect in found.effects)
    assert "unknown" in printed(found, capsys)


def test_a_default_that_is_best_has_no_shares(capsys: pytest.CaptureFixture[str]) -> None:
    """Where the default is the best trial, nothing is shared out and that is said."""
    found = explain(study("mean<=1s", energies=(1.0, *[2.0] * 6), latencies=(0.01, *[0.02] * 6)))
    assert found.effects == ()
    assert "the default point is the best that was tried" in printed(found, capsys)


def test_a_failed_point_is_never_named() -> None:
    """A point at which a trial failed is no answer to another limit."""

    def visit(point: Mapping[str, Level]) -> Measurement | None:
        return None if point["gpu_max_hz"] == GPU_HZ[0] and point["mem_hz"] == MEM_HZ[0] else product(point)

    (ladder,) = explain(visited(board(), "mean<=13ms", visit=visit)).prices
    assert all(visit(price.point) is not None for price in ladder if price.point is not None)


def test_a_point_that_broke_the_limit_early_is_neither_untried_nor_fine(capsys: pytest.CaptureFixture[str]) -> None:
    """Where a window was cut short, no limit as tight is said to hold there, and looser ones name it as it was seen."""
    tempting = min(board(), key=lambda point: product(point).energy_j)

    def visit(point: Mapping[str, Level]) -> Measurement:
        return replace(product(point), censored=point == tempting)

    found = explain(visited(board(), "mean<=17ms", visit=visit))
    (ladder,) = found.prices
    limit = found.limits[0].constraint.limit
    as_tight = [price for price in ladder if price.constraint is not None and price.constraint.limit <= limit]
    assert len(as_tight) > 1
    assert tempting not in {price.point for price in as_tight}
    text = printed(found, capsys)
    assert "not tried yet" not in text
    named = [price for price in ladder if price.point == tempting]
    assert named
    assert all(price.tried and not price.measured for price in named)
    assert "stopped early" in text


def test_a_point_whose_queue_grew_is_never_named() -> None:
    """What does not keep up with its load is no answer to another limit on a latency."""
    tempting = min(board(), key=lambda point: product(point).energy_j)

    def visit(point: Mapping[str, Level]) -> Measurement:
        return replace(product(point), backlog_per_s=3.0 if point == tempting else None)

    (ladder,) = explain(visited(board(), "mean<=17ms", visit=visit)).prices
    assert tempting not in {price.point for price in ladder}


def test_relative_energy_has_no_joules(capsys: pytest.CaptureFixture[str]) -> None:
    """Where only ratios mean something, no unit is printed, and a constant knob is only part of the point."""

    def visit(point: Mapping[str, Level]) -> Measurement:
        seen = product(point)
        return Measurement(seen.latency, seen.energy_j, seen.throughput_per_s, energy_kind=EnergyKind.RELATIVE)

    text = printed(explain(visited(board(Knob("fan_w", (7,))), "mean<=13ms", visit=visit)), capsys)
    assert "J" not in text
    assert [line.split()[0] for line in text.splitlines() if "fan" in line] == ["point"]


def test_nine_knobs_print_in_eighty_columns(capsys: pytest.CaptureFixture[str]) -> None:
    """As many knobs as any board has still fit, all of their mixtures evaluated, whether in the space or not."""
    names = ("cpu_cluster_0_max_hz", "cpu_cluster_1_max_hz", "gpu_min_hz", "gpu_max_hz", "mem_hz", "dla_max_hz")
    knobs = [*(Knob(name, (10**9, 2 * 10**9)) for name in names), Knob("batch_size", (1, 2)), Knob("threads", (1, 4))]
    knobs.append(Knob("power_limit_w", (10.0, 30.0)))
    rng = np.random.default_rng(1)
    low, high = ({knob.name: knob.levels[end] for knob in knobs} for end in (0, -1))
    drawn = [{knob.name: knob.levels[int(rng.integers(2))] for knob in knobs} for _ in range(20)]
    points = list(dict.fromkeys(map(OperatingPoint, [high, low, *drawn])))
    space = SearchSpace.of_points(points, high)
    done = visited(space, "mean<=1s", visit=lambda p: measured(0.01, 0.5 if p == OperatingPoint(low) else 1.0), count=9)
    done = done.with_trial(Trial(len(done.trials), OperatingPoint(low), measured(0.02, 0.3)))
    found = explain(done)
    assert found.outside[1] == 512
    assert "as modelled" in printed(found, capsys)


@pytest.mark.parametrize("name", sorted(path.name for path in SAMPLES.glob("journal-v*.jsonl")))
def test_every_kept_journal_is_explained(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    """A journal of any format, as it stands, gives a page and one JSON document."""
    assert run(["explain", str(SAMPLES / name)]) == 0
    shown = capsys.readouterr().out
    assert shown.strip()
    assert not [line for line in shown.splitlines() if line != line.rstrip()]
    assert run(["explain", str(SAMPLES / name), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["device"]


def test_an_unfinished_journal_is_explained_and_left_as_it_is(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A study in the middle of a trial can be read, by itself and while it is being written."""
    done, path = visited(board(), "mean<=13ms", count=10), tmp_path / "study.jsonl"
    with Journal.create(path, Study(done.problem, "grid", 0), {}) as kept:
        for trial in done.trials:
            kept.started(Trial(trial.number, trial.point))
            kept.completed(trial)
        kept.started(Trial(10, board()[0]))
        before = path.read_bytes()
        assert run(["explain", str(path), "--json"]) == 0
        assert path.read_bytes() == before
    document = json.loads(capsys.readouterr().out)
    assert document["completed"] == 10
    assert document["best"]["point"] == dict(done.best.point if done.best else {})


def test_what_is_no_journal_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A missing, empty or foreign file ends with one line and the exit code of a bad file."""
    (tmp_path / "empty.jsonl").write_bytes(b"")
    (tmp_path / "foreign.jsonl").write_text("hello\n")
    for name in ("none.jsonl", "empty.jsonl", "foreign.jsonl", "."):
        assert run(["explain", str(tmp_path / name)]) == 4
        assert capsys.readouterr().err.count("\n") == 1


def test_a_metric_nobody_measured_is_one_clear_error() -> None:
    """A limit on what the journal does not hold is said, not guessed."""
    done = visited(board(), "p90<=20ms", count=6)
    with pytest.raises(PolythrottleError, match="not measured"):
        explain(done)


@pytest.mark.parametrize("objective", list(Objective))
@pytest.mark.parametrize("slo", [(), ("p99<=14ms",), ("throughput>=70/s", "power<=150W")])
def test_every_objective_is_explained(
    objective: Objective, slo: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    """Shares, prices and savings are those of what was minimised, and its name is printed."""
    done = visited(board(), *slo)
    done = Study(replace(done.problem, objective=objective), "grid", 0, done.trials)
    found = explain(done)
    assert found.at == done.best
    assert done.saving_fraction is not None
    if found.effects:
        assert found.saving_fraction == pytest.approx(done.saving_fraction, abs=0.02)
        assert objective.words in printed(found, capsys)
    for ladder in found.prices:
        for price in ladder:
            assert price.point is None or price.value == pytest.approx(objective.of(product(price.point)))
