from dataclasses import replace
from pathlib import Path

import pytest
from builders import measured, study

from polythrottle.backends import open_device
from polythrottle.backends.cpu import CpuDevice
from polythrottle.problem import Objective
from polythrottle.remarks import EVERY, beforehand, meanwhile, unsteered
from polythrottle.study import Study, Trial


def first(whole: Study, count: int) -> Study:
    """Return a study as it was after so many trials."""
    return replace(whole, trials=whole.trials[:count])


def test_a_default_that_breaks_the_slo_is_said_at_once_where_a_risk_is_asked() -> None:
    """After its trial alone, and only to who asked for a risk that cannot be kept."""
    whole = study("mean<=5ms", energies=(1.0, 2.0), latencies=(0.01, 0.01))
    (line,) = meanwhile(first(whole, 1), 0.05)
    assert "the default point breaks the SLO" in line
    assert "--risk 0.05 cannot be kept" in line
    assert not list(meanwhile(first(whole, 1), None))
    assert not list(meanwhile(whole, 0.05))


def test_a_default_that_holds_the_slo_needs_no_word() -> None:
    """Whatever the risk."""
    whole = study("mean<=5s", energies=(1.0,), latencies=(0.01,))
    assert not list(meanwhile(whole, 0.05))


def test_a_search_without_anything_feasible_says_so_every_ten_trials() -> None:
    """With the trial that is closest; not in between, and not once there is one."""
    whole = study("mean<=5ms", energies=(1.0,) * EVERY, latencies=(0.9, *[0.01] * (EVERY - 1)))
    (line,) = meanwhile(whole, None)
    assert line.startswith(f"nothing feasible yet after {EVERY} trials: trial 1 is closest, 100% over")
    assert not list(meanwhile(first(whole, EVERY - 1), None))
    held = study("mean<=5ms", energies=(1.0,) * EVERY, latencies=(0.001, *[0.01] * (EVERY - 1)))
    assert not list(meanwhile(held, None))


def test_nothing_is_said_of_a_trial_that_runs_or_failed() -> None:
    """It has shown nothing, and neither has no trial at all."""
    whole = study("mean<=5ms", energies=(1.0,) * EVERY, latencies=(0.01,) * EVERY)
    point = whole.problem.space[0]
    for last in (Trial(EVERY - 1, point), Trial(EVERY - 1, point, failure="it fell over")):
        assert not list(meanwhile(whole.with_trial(last), 0.1))
    assert not list(meanwhile(first(whole, 0), 0.1))


@pytest.mark.parametrize(("method", "said"), [("tpe", 1), ("gp", 1), ("paper", 1), ("bayes", 0), ("random", 0)])
def test_a_method_that_looks_for_one_goal_alone_says_so_of_a_front(method: str, said: int) -> None:
    """Asked for a front it still looks for the least energy; asked for energy there is nothing to say."""
    asked = study()
    front = Study(replace(asked.problem, objective=Objective.PARETO), method)
    assert len(list(beforehand(front))) == said
    assert not list(beforehand(Study(asked.problem, method)))


def test_a_default_that_is_measured_again_is_said_to_be() -> None:
    """With what it took before and now."""
    whole = study(energies=(10.0, 1.0), latencies=(0.1, 0.01))
    assert whole.doubtful
    again = whole.with_trial(Trial(2, whole.problem.space.default, measured(0.012, 1.2)))
    (line,) = meanwhile(again, None)
    assert "measured again" in line
    assert "mean 100 ms and 12 ms; the newer counts" in line
    assert not again.doubtful


def test_a_device_of_which_nothing_is_searched_says_why(tmp_path: Path) -> None:
    """A processor without clocks to set is tuned by its workload's knobs alone, and a line says so."""
    (line,) = unsteered(CpuDevice(root=str(tmp_path)))
    assert "no knob of" in line
    assert "polythrottle doctor" in line
    assert not list(unsteered(open_device("sim:jetson-nano")))
