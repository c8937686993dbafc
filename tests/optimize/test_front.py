"""Objectives other than energy, and the front of latency and energy: exact formulas, and near the truth soon."""

import json
import math
import re
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pytest
from builders import study as small
from hypothesis import given, settings
from hypothesis import strategies as st
from test_optimize import board, physical

from polythrottle.cli.commands import run
from polythrottle.domain.errors import BadFile, UnknownName
from polythrottle.domain.measurement import Latency, Measurement
from polythrottle.domain.problem import Constraint, Objective, Problem
from polythrottle.domain.profile import Profile
from polythrottle.domain.space import Level, OperatingPoint, SearchSpace
from polythrottle.domain.study import Study, Trial
from polythrottle.optimize import METHODS, make_optimizer
from polythrottle.storage.journal import Journal, read
from polythrottle.tuning.stopping import Rule

if TYPE_CHECKING:
    from torch import Tensor

FRONT = ((-1.0, 2.0), (0.0, 1.0), (0.5, 0.2), (0.6, 0.9), (3.0, -2.0))
REFERENCE = (1.0, 2.5)


@pytest.fixture(autouse=True, scope="module")
def _torch() -> None:
    """Load the model library, whose import uses deprecated parts of itself."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import botorch.acquisition.multi_objective.analytic
        import botorch.utils.testing  # noqa: F401


def asking(space: SearchSpace, objective: Objective, slo: Sequence[str] = (), method: str = "bayes") -> Study:
    """Return a study without trials that asks for an objective."""
    return Study(Problem(space, tuple(map(Constraint.parse, slo)), objective=objective), method)


def searched(study: Study, trials: int) -> Study:
    """Return a study of the made-up board after so many trials."""
    optimizer = make_optimizer(study.method)
    for number in range(trials):
        point = optimizer.suggest(study)
        assert point not in study.visited
        study = study.with_trial(Trial(number, point, physical(point)))
    return study


def area(values: Sequence[tuple[float, float]], reference: tuple[float, float], grid: int = 2000) -> float:
    """Return the area between values and a reference point by counting the cells of a grid."""
    low = (min(x for x, _ in values), min(y for _, y in values))
    sides = [low[k] + (reference[k] - low[k]) * (np.arange(grid) + 0.5) / grid for k in (0, 1)]
    covered = np.zeros((grid, grid), dtype=bool)
    for x, y in values:
        covered |= (sides[0][:, None] >= x) & (sides[1][None, :] >= y)
    return float(covered.mean() * (reference[0] - low[0]) * (reference[1] - low[1]))


def hypervolume(values: "Tensor", reference: "Tensor") -> float:
    """Return the area of the strips by which the acquisition adds up what a trial is expected to gain."""
    from polythrottle.optimize.acquisition_value import _strips

    edges, heights = _strips(values, reference)
    return float(((reference[1] - heights) * edges.diff())[1:].sum())


def test_the_hypervolume_is_the_area_below_the_front() -> None:
    """Strips add up to what counting cells gives; dominated values and those beyond the reference count nothing."""
    import torch

    inside = [value for value in FRONT if value[0] < REFERENCE[0]]
    found = hypervolume(torch.tensor(FRONT, dtype=torch.double), torch.tensor(REFERENCE, dtype=torch.double))
    assert found == pytest.approx(area(inside, REFERENCE), rel=2e-3)


@pytest.mark.parametrize("seen", [FRONT, FRONT[:1], ()])
@pytest.mark.parametrize("mean", [(-0.5, 0.5), (0.8, 2.2), (-3.0, -3.0), (0.3, -1.0)])
@pytest.mark.parametrize("std", [(0.05, 0.1), (1.0, 0.3)])
def test_expected_improvement_of_the_front_is_exact(
    seen: tuple[tuple[float, float], ...], mean: tuple[float, float], std: tuple[float, float]
) -> None:
    """The formula agrees with the mean over a hundred thousand draws of what each adds to the area."""
    import torch

    from polythrottle.optimize.acquisition_value import log_improvement

    rng = np.random.default_rng(0)
    drawn = np.array(mean) + np.array(std) * rng.standard_normal((100_000, 2))
    kept = [value for value in sorted(seen) if value[0] < REFERENCE[0] and value[1] < REFERENCE[1]]
    edges = [-math.inf, *(x for x, _ in kept), REFERENCE[0]]
    heights = np.minimum.accumulate([REFERENCE[1], *(y for _, y in kept)])
    gains = np.zeros(len(drawn))
    for low, high, height in zip(edges, edges[1:], heights, strict=False):
        gains += np.maximum(high - np.maximum(drawn[:, 0], low), 0) * np.maximum(height - drawn[:, 1], 0)
    values = torch.tensor(seen, dtype=torch.double).reshape(-1, 2)
    where, spread = (torch.tensor([one], dtype=torch.double) for one in (mean, std))
    found = float(log_improvement(where, spread, values, torch.tensor(REFERENCE, dtype=torch.double)).exp()[0])
    assert found == pytest.approx(float(gains.mean()), abs=5 * float(gains.std()) / math.sqrt(len(gains)) + 1e-12)


def test_expected_improvement_of_the_front_agrees_with_botorch() -> None:
    """The formula is BoTorch's analytic expected hypervolume improvement, which maximises."""
    import torch
    from botorch.acquisition.multi_objective.analytic import ExpectedHypervolumeImprovement
    from botorch.utils.multi_objective.box_decompositions import NondominatedPartitioning
    from botorch.utils.testing import MockModel, MockPosterior

    from polythrottle.optimize.acquisition_value import log_improvement

    values, reference = torch.tensor(FRONT, dtype=torch.double), torch.tensor(REFERENCE, dtype=torch.double)
    mean = torch.tensor([[-0.5, 0.5], [0.8, 2.2], [0.3, -1.0]], dtype=torch.double)
    std = torch.tensor([[0.3, 0.1], [0.5, 0.5], [0.1, 1.0]], dtype=torch.double)
    parts = NondominatedPartitioning(ref_point=-reference, Y=-values)
    model = MockModel(MockPosterior(mean=-mean.unsqueeze(1), variance=std.square().unsqueeze(1)))
    theirs = ExpectedHypervolumeImprovement(model, (-reference).tolist(), parts)(torch.zeros(3, 1, 1))
    torch.testing.assert_close(log_improvement(mean, std, values, reference).exp(), theirs, rtol=1e-6, atol=1e-9)


@settings(max_examples=60, deadline=None)
@given(
    seen=st.lists(st.tuples(st.floats(-30, 30), st.floats(-30, 30)), max_size=12),
    mean=st.tuples(st.floats(-50, 50), st.floats(-50, 50)),
    std=st.tuples(st.floats(1e-5, 5), st.floats(1e-5, 5)),
)
def test_no_front_is_too_odd(
    seen: list[tuple[float, float]], mean: tuple[float, float], std: tuple[float, float]
) -> None:
    """Equal values, values beyond the reference, and points far from everything have finite logarithms."""
    import torch

    from polythrottle.optimize.acquisition_value import log_improvement

    values = torch.tensor(seen, dtype=torch.double).reshape(-1, 2)
    where, spread = (torch.tensor([one], dtype=torch.double) for one in (mean, std))
    reference = torch.tensor([31.0, 31.0], dtype=torch.double)
    assert torch.isfinite(log_improvement(where, spread, values, reference)).all()


@pytest.mark.parametrize("objective", list(Objective))
def test_an_objective_is_the_product_of_what_is_modelled(objective: Objective) -> None:
    """Energy is time × power per item; what is measured of a point multiplies out to its objective."""
    from polythrottle.optimize.acquisition_value import terms
    from polythrottle.optimize.quantities import table

    seen = physical(board().default)
    values = table([seen], terms(asking(board(), objective)))[0]
    if objective is Objective.PARETO:
        objective = Objective.ENERGY
    assert np.exp(values.sum()) == pytest.approx(objective.of(seen))


@pytest.mark.slow
@pytest.mark.parametrize("objective", [Objective.EDP, Objective.LATENCY])
@pytest.mark.parametrize("slo", [(), ("mean<=30ms",), ("p99<=15ms", "power<=20W")])
def test_other_objectives_are_minimised(objective: Objective, slo: tuple[str, ...]) -> None:
    """Within 20 of 240 points the best by energy × delay, or by delay, is found to 3 %."""
    done = searched(asking(board(), objective, slo), 20)
    assert done.best is not None
    least = min(objective.of(m) for m in map(physical, done.problem.space) if done.holds(m))
    assert objective.of(done.best.measurement or physical(done.best.point)) <= 1.03 * least


@pytest.mark.slow
@pytest.mark.parametrize("slo", [(), ("p99<=60ms",)])
def test_the_front_is_found(slo: tuple[str, ...]) -> None:
    """Within 30 of 240 points the front covers 97 % of the area that the true front covers, in logarithms."""
    import torch

    done = searched(asking(board(), Objective.PARETO, slo), 30)
    true = [m for m in map(physical, done.problem.space) if done.holds(m)]
    found = [trial.measurement for trial in done.front if trial.measurement is not None]

    def logs(seen: Sequence[Measurement]) -> torch.Tensor:
        pairs = [(math.log(m.metric(done.front_metric) or 1.0), math.log(m.energy_j)) for m in seen]
        return torch.tensor(pairs, dtype=torch.double)

    reference = logs(true).max(dim=0).values
    assert hypervolume(logs(found), reference) >= 0.97 * hypervolume(logs(true), reference)


def test_the_front_holds_what_nothing_beats() -> None:
    """A front is the feasible trials that are not beaten in both, the fastest first; equals are named once."""
    done = small("mean<=50ms", energies=(4.0, 3.0, 3.5, 1.0, 3.0, 0.5), latencies=(0.01, 0.02, 0.03, 0.04, 0.02, 0.06))
    assert [trial.number for trial in done.front] == [0, 1, 3]


@pytest.mark.slow
@pytest.mark.parametrize("method", [name for name in METHODS if name != "preset"])
@pytest.mark.parametrize("objective", list(Objective))
def test_every_method_takes_every_objective(method: str, objective: Objective) -> None:
    """Whatever is minimised, every method visits new points and the study has a best by it."""
    done = searched(asking(board(), objective, ("mean<=40ms",), method), 7)
    assert done.best is not None
    assert done.best == min(
        (trial for trial in done.completed if done.feasible(trial)),
        key=lambda trial: objective.of(trial.measurement or physical(trial.point)),
    )


def test_the_saving_is_that_of_the_objective() -> None:
    """A study of latency saves latency, one of energy × delay their product."""
    done = small(energies=(4.0, 3.0), latencies=(0.02, 0.01))
    for objective, saving in ((Objective.LATENCY, 0.5), (Objective.EDP, 0.625), (Objective.PARETO, 0.25)):
        problem = Problem(done.problem.space, objective=objective)
        assert Study(problem, "grid", 0, done.trials).saving_fraction == pytest.approx(saving)


def test_an_objective_makes_another_problem_and_energy_the_same_as_ever() -> None:
    """The fingerprint tells objectives apart, but does not change for energy, which older journals do not name."""
    space = board()
    prints = [Problem(space, objective=objective).fingerprint for objective in Objective]
    assert len(set(prints)) == 4
    assert Problem(space).fingerprint == prints[0]


def test_the_journal_keeps_the_objective(tmp_path: Path) -> None:
    """A study read back minimises what it did; one that names none minimises energy; an unknown one is a bad file."""
    path = tmp_path / "study.jsonl"
    with Journal.create(path, asking(board(), Objective.EDP), {}):
        pass
    assert read(path).problem.objective is Objective.EDP
    line = json.loads(path.read_text())
    path.write_text(json.dumps({**line, "objective": "speed"}) + "\n")
    with pytest.raises(BadFile, match="line 1"):
        read(path)


def test_a_profile_says_what_was_minimised() -> None:
    """The evidence of a profile names the objective where it is not energy."""
    done = small(energies=(4.0, 3.0), latencies=(0.02, 0.01))
    asked = Study(Problem(done.problem.space, objective=Objective.EDP), "grid", 0, done.trials)
    assert Profile.of(asked, {}).provenance["objective"] == "edp"
    assert "objective" not in Profile.of(done, {}).provenance


def test_a_front_is_searched_to_the_end() -> None:
    """What another trial adds to a front is not compared with one number: a front ends with its budget."""
    done = searched(asking(board(), Objective.PARETO), 8)
    optimizer = make_optimizer("bayes")
    assert Rule().reason(done, optimizer.saving_left) is None  # type: ignore[attr-defined]


def test_a_flat_objective_ends_early_and_says_which() -> None:
    """Where no point has less latency the search for it ends, and names what it searched for."""

    def flat(_: Mapping[str, Level]) -> Measurement:
        return Measurement(Latency(0.01), 1.0, 100.0)

    study, optimizer = asking(board(), Objective.LATENCY), make_optimizer("bayes")
    for number in range(10):
        point: OperatingPoint = optimizer.suggest(study)
        study = study.with_trial(Trial(number, point, flat(point)))
    reason = Rule().reason(study, optimizer.saving_left)  # type: ignore[attr-defined]
    assert reason is None or "mean latency" in reason


def test_an_unknown_objective_names_the_nearest() -> None:
    """A misspelt objective says what was probably meant."""
    with pytest.raises(UnknownName, match="latency"):
        Objective.parse("latencies")


def tuned(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    """Return what ``tune`` prints for a simulated board and these words."""
    board_words = ("--device", "sim:jetson-tx2?noise=0.01", "--workload", "efficientnet-b0", "--no-presets")
    assert run(["tune", *board_words, "--trials", "6", *words]) == 0
    return capsys.readouterr().out


@pytest.mark.slow
def test_tune_prints_the_front(capsys: pytest.CaptureFixture[str]) -> None:
    """With --pareto every point of the front is listed, in 80 columns, and the document holds it."""
    text = tuned(capsys, "--pareto", "--slo", "p99<=5x")
    heading, _, rows = text.partition("front of p99 latency")
    assert heading
    assert rows
    assert max(map(len, rows.split("profile")[0].splitlines())) <= 80
    document = json.loads(tuned(capsys, "--pareto", "--slo", "p99<=5x", "--fresh", "--json"))
    assert document["objective"] == "pareto"
    times = [trial["latency_s"]["p99"] for trial in document["front"]]
    energies = [trial["energy_j"] for trial in document["front"]]
    assert (times, energies) == (sorted(times), sorted(energies, reverse=True))
    assert document["best"] == document["front"][-1]
    _check_intervals(rows.split("profile")[0])


def _check_intervals(rows: str) -> None:
    """Check that each saving lies inside the interval printed beside it."""
    found = re.findall(r"(-?[\d.]+)% \((-?\d+) to (-?\d+)\)", rows)
    assert found
    for middle, low, high in found:
        assert float(low) - 0.5 <= float(middle) <= float(high) + 0.5
        assert int(low) < int(high)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "words"), [("edp", "energy-delay product"), ("latency", "mean latency")])
def test_tune_says_what_it_minimised(name: str, words: str, capsys: pytest.CaptureFixture[str]) -> None:
    """The saving is called by what it is a saving of, and a study of another objective is another study."""
    assert f"of the {words}" in tuned(capsys, "--objective", name)
    assert "of the energy per item" in tuned(capsys)


@pytest.mark.parametrize(
    "words",
    [
        ["--objective", "edp", "--pareto"],
        ["--objective", "speed"],
        ["--objective", "edp", "--horizon", "30d"],
        ["--pareto", "--horizon", "30d"],
        ["--resume", "study.jsonl", "--pareto"],
        ["--resume", "study.jsonl", "--objective", "edp"],
    ],
)
def test_words_that_do_not_go_together_are_one_line(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    """A contradiction or an unknown objective ends before anything is tried, with one line."""
    board_words = [] if "--resume" in words else ["--device", "sim:jetson-tx2", "--workload", "efficientnet-b0"]
    assert run(["tune", *board_words, *words]) in (2, 3)
    assert capsys.readouterr().err.count("\n") == 1


def test_a_journal_of_another_objective_is_not_continued(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The message names the objective, and no difference that there is not."""
    path = str(tmp_path / "study.jsonl")
    tuned(capsys, "--objective", "edp", "--journal", path)
    words = ["--device", "sim:jetson-tx2?noise=0.01", "--workload", "efficientnet-b0", "--journal", path]
    assert run(["tune", *words]) == 4
    said = capsys.readouterr().err
    assert "its objective is edp, not energy" in said
    assert "space" not in said
