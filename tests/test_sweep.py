from pathlib import Path

import pytest
from builders import FakeDevice, FakeWorkload

from polythrottle.backends.replay import ReplayDevice
from polythrottle.errors import BadFile, InvalidInput, TrialError
from polythrottle.measurement import EnergyKind, Window
from polythrottle.sweep import Swept, sweep


def run(path: Path, error: BaseException | None = None, after: int = 0) -> Swept:
    """Sweep the twelve points of a test device."""
    device = FakeDevice()
    return sweep(device, FakeWorkload(device, error, after), Window(queries=10, duration_s=0.0), path)


def test_a_sweep_is_a_replay_table(tmp_path: Path) -> None:
    """Every point is measured once, and the table serves as a device that says how its joules came about."""
    swept = run(tmp_path / "t.csv")
    assert (swept.points, swept.measured, swept.kept, swept.failed) == (12, 12, 0, ())
    replay = ReplayDevice(tmp_path / "t.csv")
    assert len(replay.space) == 12
    assert replay.energy_kind is EnergyKind.SIMULATED
    assert replay.boundary == "a test"
    assert replay.recall(replay.space.default).energy_j == pytest.approx(0.1)


def test_a_sweep_that_was_cut_short_goes_on(tmp_path: Path) -> None:
    """Rows that are there are kept, a torn one is measured again, and the table ends the same."""
    run(tmp_path / "whole.csv")
    whole = (tmp_path / "whole.csv").read_bytes()
    path = tmp_path / "t.csv"
    with pytest.raises(KeyboardInterrupt):
        run(path, KeyboardInterrupt(), after=70)
    path.write_bytes(path.read_bytes()[:-9])
    swept = run(path)
    assert swept.kept == 3
    assert path.read_bytes().splitlines()[0] == whole.splitlines()[0]
    assert len(ReplayDevice(path).space) == 12


def test_points_that_fail_are_left_out_and_named(tmp_path: Path) -> None:
    """One failure does not end a sweep; only failures do."""
    swept = run(tmp_path / "t.csv", TrialError("out of memory"), after=150)
    assert swept.measured == 10
    assert {failure for _, failure in swept.failed} == {"out of memory"}
    with pytest.raises(TrialError, match="first 3 points"):
        run(tmp_path / "u.csv", TrialError("no"))


def test_another_sweep_is_not_continued(tmp_path: Path) -> None:
    """The same knobs on another workload, device or window are another table."""
    run(tmp_path / "t.csv")
    before = (tmp_path / "t.csv").read_bytes()
    device = FakeDevice()
    other = FakeWorkload(device)
    other.uri = "another model"
    with pytest.raises(BadFile, match="its workload is model, not another model"):
        sweep(device, other, Window(queries=10, duration_s=0.0), tmp_path / "t.csv")
    with pytest.raises(BadFile, match="its window"):
        sweep(device, FakeWorkload(device), Window(queries=11, duration_s=0.0), tmp_path / "t.csv")
    assert (tmp_path / "t.csv").read_bytes() == before


def test_another_table_is_never_overwritten(tmp_path: Path) -> None:
    """A file with other columns, or that is no table, stays as it is."""
    path = tmp_path / "t.csv"
    for text in ("a,b\n1,2\n", "buy milk"):
        path.write_text(text)
        with pytest.raises(BadFile, match="not the beginning of this sweep"):
            run(path)
        assert path.read_text() == text
    with pytest.raises(InvalidInput, match=r"\.csv"):
        run(tmp_path / "t.txt")
