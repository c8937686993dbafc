import contextlib
from pathlib import Path

import pytest
from builders import FakeDevice, FakeWorkload, Listed

from polythrottle.errors import TrialError
from polythrottle.journal import Journal, is_finished, read
from polythrottle.problem import Constraint, Problem
from polythrottle.study import Study, TrialState
from polythrottle.tuner import FAILURES_IN_A_ROW, compare, tune


def journal(path: Path, device: FakeDevice, workload: FakeWorkload) -> Journal:
    """Start or continue the journal of a study of a test device."""
    if path.exists():
        return Journal.reopen(path)
    problem = Problem(device.space * workload.space, (Constraint("mean", 2.5, True),), device.uri, workload.uri)
    return Journal.create(path, Study(problem, "listed"), {})


def run(path: Path, device: FakeDevice, workload: FakeWorkload, trials: int) -> list[Study]:
    """Tune and return every study that was shown on the way."""
    with (
        journal(path, device, workload) as kept,
        contextlib.closing(tune(device, workload, Listed(), kept, trials)) as loop,
    ):
        return list(loop)


def test_a_trial_is_journalled_before_the_device_is_touched(tmp_path: Path) -> None:
    """Whoever looks sees the trial running first, and done after."""
    device = FakeDevice()
    seen = run(tmp_path / "a.jsonl", device, FakeWorkload(device), 3)
    assert [study.trials[-1].state for study in seen] == [TrialState.RUNNING, TrialState.COMPLETED] * 3
    assert device.log[0] == "enter"
    assert device.log[-1] == "restore"


def test_an_exhausted_space_ends_the_study(tmp_path: Path) -> None:
    """Twelve points give twelve trials, however many were asked for."""
    device = FakeDevice()
    study = run(tmp_path / "a.jsonl", device, FakeWorkload(device), 99)[-1]
    assert len(study.trials) == 12
    assert is_finished(tmp_path / "a.jsonl")


@pytest.mark.parametrize("error", [KeyboardInterrupt(), MemoryError(), TrialError("no")])
def test_the_device_is_restored_however_the_loop_ends(tmp_path: Path, error: BaseException) -> None:
    """Interrupts, crashes and failures all give the device back."""
    device = FakeDevice()
    with pytest.raises(type(error)):
        run(tmp_path / "a.jsonl", device, FakeWorkload(device, error), 30)
    assert device.log[-1] == "restore"


def test_a_study_left_early_goes_on(tmp_path: Path) -> None:
    """A loop that is abandoned restores the device, and its study ends like one that was not abandoned."""
    device, path, other = FakeDevice(), tmp_path / "a.jsonl", FakeDevice()
    with journal(path, device, FakeWorkload(device)) as kept:
        loop = tune(device, FakeWorkload(device), Listed(), kept, 6)
        for _ in range(5):
            next(loop)
        loop.close()
    assert device.log[-1] == "restore"
    resumed = run(path, device, FakeWorkload(device), 6)[-1]
    whole = run(tmp_path / "b.jsonl", other, FakeWorkload(other), 6)[-1]
    assert [trial.point for trial in resumed.trials] == [trial.point for trial in whole.trials]


def test_a_default_that_cannot_be_measured_ends_the_study(tmp_path: Path) -> None:
    """Nothing to compare with: the reason is said at once."""
    device = FakeDevice()
    with pytest.raises(TrialError, match=r"default point cannot be measured: exit code 3"):
        run(tmp_path / "a.jsonl", device, FakeWorkload(device, TrialError("exit code 3")), 30)
    assert read(tmp_path / "a.jsonl").trials[0].failure == "exit code 3"


def test_failures_are_trials_until_there_are_too_many(tmp_path: Path) -> None:
    """One failure is a result; five in a row are a fault."""
    device = FakeDevice()
    first = 5 + 200  # warm-up and window of the default point
    with pytest.raises(TrialError, match=f"{FAILURES_IN_A_ROW} trials in a row failed"):
        run(tmp_path / "a.jsonl", device, FakeWorkload(device, TrialError("out of memory"), after=first), 30)
    trials = read(tmp_path / "a.jsonl").trials
    assert [trial.state for trial in trials] == [TrialState.COMPLETED] + [TrialState.FAILED] * FAILURES_IN_A_ROW


def test_presets_are_measured_once_for_comparison(tmp_path: Path) -> None:
    """They are no trials, and a resumed study does not measure them again."""
    device, path = FakeDevice(), tmp_path / "a.jsonl"
    run(path, device, FakeWorkload(device), 2)
    for expected in (1, 0):
        with journal(path, device, FakeWorkload(device)) as kept:
            assert len(list(compare(device, FakeWorkload(device), kept))) == expected
    study = read(path)
    assert [reference.name for reference in study.references] == ["low"]
    assert len(study.trials) == 2
