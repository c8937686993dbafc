"""A study as a frame and as a notebook shows it."""

from dataclasses import replace

import pandas as pd
import pytest
from builders import measured, problem, study

from polythrottle.domain.measurement import EnergyKind, Interval
from polythrottle.domain.profile import Profile
from polythrottle.domain.study import Cost, Study, Trial

SOME = study("p99<=20ms", energies=(2.0, 1.5, 1.0, 0.8), latencies=(0.01, 0.012, 0.015, 0.02))


def test_boards_that_search_together_do_so_at_once() -> None:
    """The time of the search is that of the board that worked longest; its joules are those of all."""
    space = problem().space
    trials = tuple(
        Trial(number, space.default, measured(1.0), cost=Cost(duration_s, 5.0), board=board)
        for number, (board, duration_s) in enumerate((("a", 30.0), ("b", 20.0), ("b", 25.0)))
    )
    told = Study(problem(), trials=trials)
    assert (told.duration_s, told.cost) == (45.0, Cost(75.0, 15.0))
    assert told.boards == ("a", "b")
    alone = replace(told, trials=tuple(replace(trial, board="") for trial in trials))
    assert (alone.duration_s, alone.boards, alone.where) == (75.0, (), told.problem.device)


@pytest.mark.parametrize(
    ("boards", "brief"),
    [
        ("ssh://nano1/o10.onnx ssh://nano2/o10.onnx", ["nano1", "nano2"]),
        ("ssh://nano1 ssh://me@nano2:2222", ["nano1", "me@nano2:2222"]),
        ("ssh://nano1/a ssh://nano1/a/b", ["a", "a/b"]),
        ("sim:orin?seed=1 sim:orin?seed=11", ["seed=1", "seed=11"]),
        ("sim:orin?seed=1&x=2 sim:orin?seed=2&x=2", ["seed=1", "seed=2"]),
        ("sim:orin sim:orin?seed=2", ["sim:orin", "sim:orin?seed=2"]),
    ],
)
def test_a_board_is_named_briefly_by_what_tells_it_from_the_others(boards: str, brief: list[str]) -> None:
    """Neither by what all begin with nor by what all end with; one that is not among them by its whole URI."""
    asks = replace(problem(), content={"boards": boards})
    assert [asks.brief(board) for board in boards.split()] == brief
    assert asks.brief("ssh://other") == "ssh://other"


@pytest.mark.parametrize(("device", "virtual"), [("sim:jetson-nano", True), ("ssh://nano1/sim:jetson-nano", False)])
def test_seconds_are_called_simulated_only_if_the_clock_is(device: str, virtual: bool) -> None:
    """A simulated board elsewhere takes the time of this machine, whatever its joules are."""
    asks = replace(problem(), device=device)
    simulated = replace(measured(1.0), energy_kind=EnergyKind.SIMULATED)
    assert Study(asks, trials=(Trial(0, asks.space.default, simulated),)).virtual is virtual


def test_a_frame_has_a_row_for_each_trial() -> None:
    """Knobs, state, feasibility, the best, the front and SI figures are columns."""
    frame = SOME.to_dataframe()
    assert frame["trial"].tolist() == [0, 1, 2, 3]
    assert frame["gpu_max_hz"].dtype == frame["batch_size"].dtype == "int64"
    assert frame["feasible"].tolist() == [True, True, True, False]
    assert frame["is_best"].tolist() == [False, False, True, False]
    assert frame["on_front"].tolist() == [True, True, True, False]
    assert frame.loc[2, ["latency_s", "energy_j", "energy_kind"]].tolist() == [0.015, 1.0, "simulated"]
    assert frame[frame.feasible].energy_j.min() == 1.0


def test_what_was_not_seen_is_unknown_in_a_frame() -> None:
    """A failed trial has no figures and no verdict, its cost and why it failed are there."""
    failed = Trial(4, SOME.trials[3].point, failure="too hot", cost=Cost(3.0, 40.0))
    row = SOME.with_trial(failed).to_dataframe().iloc[-1]
    assert (row.state, row.failure, row.cost_s, row.cost_j) == ("failed", "too hot", 3.0, 40.0)
    assert row.feasible is pd.NA
    assert pd.isna(row.energy_j)


def test_intervals_are_columns() -> None:
    """The ends of an interval stand under the metric's name, the unit last."""
    seen = measured(intervals={"energy": Interval(0.9, 1.1), "p99": Interval(0.01, 0.02)})
    one = Study(problem(), trials=(replace(SOME.trials[0], measurement=seen),)).to_dataframe().iloc[0]
    assert (one.energy_low_j, one.energy_high_j) == (0.9, 1.1)
    assert (one.latency_p99_low_s, one.latency_p99_high_s) == (0.01, 0.02)


@pytest.mark.parametrize("slo", ["p99<=1.2x", "ttft_p99<=1s"])
def test_a_limit_nobody_can_judge_leaves_the_frame_open(slo: str) -> None:
    """Where a limit multiplies or bounds what was not measured, no trial is feasible and none is not."""
    begun = replace(SOME, problem=problem(slo), trials=(replace(SOME.trials[1], number=0),))
    frame = begun.to_dataframe()
    assert frame.feasible.isna().all()
    assert not frame.is_best.any()
    assert "none known to hold it" in repr(begun)


def test_a_study_without_trials_is_an_empty_frame() -> None:
    """All columns are there, so that frames of several studies go together."""
    empty = study().to_dataframe()
    assert len(empty) == 0
    assert list(empty.columns) == list(study(energies=(1.0,), latencies=(0.1,)).to_dataframe().columns)


def test_a_study_says_its_answer_in_a_line() -> None:
    """The SLO, how many trials, energy with its kind and the saving."""
    assert repr(SOME) == (
        "<Study of model on sim:test, p99<=20 ms: 4 trials, best 1 J per item, simulated, "
        "50.0 % less energy per item than the default>"
    )


def test_a_notebook_shows_the_answer_and_calls_simulated_simulated() -> None:
    """The card names point, saving, SLO and trials, escapes what it is given, and says that nothing was measured."""
    card = replace(SOME, problem=replace(SOME.problem, workload="<b>"))._repr_html_()
    for text in ("&lt;b&gt;", "batch_size=2", "50.0 % less", "p99&lt;=20 ms (tuned: 18 ms)", "1 broke the SLO",
                 "No device was measured"):  # fmt: skip
        assert text in card


def test_a_saving_says_whether_it_is_proven() -> None:
    """The interval is given; one that holds zero proves nothing."""
    ends = {"energy": Interval(1.99, 2.01)}
    near = {"energy": Interval(1.97, 1.99)}
    trials = (
        replace(SOME.trials[0], measurement=measured(0.01, 2.0, intervals=ends)),
        replace(SOME.trials[1], measurement=measured(0.01, 1.98, intervals=near)),
    )
    assert "not proven" in Study(problem(), trials=trials)._repr_html_()
    assert Study(problem(), trials=trials).within_noise
    assert not Study(problem("mean<=5ms"), trials=trials).within_noise
    better = replace(trials[1], measurement=measured(0.01, 1.0, intervals={"energy": Interval(0.99, 1.01)}))
    assert not Study(problem(), trials=(trials[0], better)).within_noise


def test_a_profile_says_what_it_holds() -> None:
    """Its line and its card name the point, the energy and the saving."""
    profile = Profile.of(SOME, {"date": "2026-01-02"})
    assert "gpu_max_mhz=400" in repr(profile)
    assert "4 by grid, 2026-01-02" in profile._repr_html_()
    relative = replace(profile, measurement=replace(profile.measurement, energy_kind=EnergyKind.RELATIVE))
    assert "Only ratios" in relative._repr_html_()
