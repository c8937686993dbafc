import csv
import sys
from pathlib import Path

import pandas as pd
import pytest
from builders import FakeDevice, FakeWorkload

from polythrottle import tune
from polythrottle.backends.replay import ReplayDevice
from polythrottle.domain.arrivals import Arrivals
from polythrottle.domain.errors import BadFile, InvalidInput, TrialError
from polythrottle.domain.measurement import EnergyKind, Query, Window
from polythrottle.domain.space import Knob, SearchSpace
from polythrottle.tuning.sweep import Swept, sweep


class Gathering(FakeWorkload):
    """A workload that takes 25 ms a query, whatever its batch, and draws less the smaller that is."""

    def query(self) -> Query:
        """Take 25 ms of virtual time."""
        self.device.power_w = float(self.batch)
        self.device.clock.sleep(0.025)
        return Query(0.025, self.batch)


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


@pytest.mark.slow
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


class Fixed(FakeDevice):
    """A device of one clock."""

    @property
    def space(self) -> SearchSpace:
        """Return one point."""
        return SearchSpace.grid((Knob("gpu_max_hz", (400_000_000,)),), {"gpu_max_hz": 400_000_000})


class Two(FakeWorkload):
    """A workload of two batch sizes that fails at both."""

    @property
    def space(self) -> SearchSpace:
        """Return two."""
        return SearchSpace.grid((Knob("batch_size", (1, 2)),), {"batch_size": 1})


def test_a_small_sweep_of_which_nothing_could_be_measured_says_why(tmp_path: Path) -> None:
    """Not that its table has no rows, though it has fewer points than a sweep tries before it gives up."""
    device = Fixed()
    with pytest.raises(TrialError, match="no point could be measured; the last: out of memory"):
        sweep(device, Two(device, TrialError("out of memory")), Window(10, 0.0), tmp_path / "v.csv")


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
    with pytest.raises(InvalidInput, match=r"\.csv or \.parquet"):
        run(tmp_path / "t.txt")
    (tmp_path / "t.parquet").write_bytes(b"buy milk")
    with pytest.raises(BadFile, match="holds no rows"):
        run(tmp_path / "t.parquet")
    pd.DataFrame({"a": [1]}).to_parquet(tmp_path / "u.parquet")
    with pytest.raises(BadFile, match=r"u\.parquet is not the beginning of this sweep"):
        run(tmp_path / "u.parquet")
    assert sorted(one.name for one in tmp_path.iterdir()) == ["t.csv", "t.parquet", "u.parquet"]


@pytest.mark.slow
def test_points_that_do_not_keep_up_are_marked_and_never_best(tmp_path: Path) -> None:
    """Of arrivals at 50/s three quarters serve; the table says by how much the queue grew, and tune leaves them out."""
    device, path = FakeDevice(), tmp_path / "t.csv"
    swept = sweep(
        device, Gathering(device), Window(queries=200, duration_s=0.0), path, arrivals=Arrivals.parse("uniform:50/s")
    )
    assert (swept.measured, swept.overloaded) == (12, 3)
    rows = list(csv.DictReader(path.read_text().splitlines()))
    assert {row["offered_per_s"] for row in rows} == {"50.0"}
    marked = [row for row in rows if row["backlog_per_s"]]
    assert {row["batch_size"] for row in marked} == {"1"}
    assert min(float(row["backlog_per_s"]) for row in marked) > 5
    replay = ReplayDevice(path)
    assert replay.reference["mean"] == min(float(row["latency_s"]) for row in rows if not row["backlog_per_s"])
    tuning = tune(f"replay:{path}", slo=["mean<=100s"], trials=12, early_stop=False)
    assert tuning.study.best is not None
    assert tuning.study.best.point["batch_size"] != 1
    again = sweep(
        device, Gathering(device), Window(queries=200, duration_s=0.0), path, arrivals=Arrivals.parse("uniform:50/s")
    )
    assert (again.measured, again.kept, again.overloaded) == (0, 12, 3)


def test_a_table_of_a_closed_loop_has_no_columns_for_what_was_offered(tmp_path: Path) -> None:
    """So a sweep that was begun by an earlier version goes on."""
    run(tmp_path / "t.csv")
    assert "backlog_per_s" not in (tmp_path / "t.csv").read_text()
    assert run(tmp_path / "t.csv").overloaded == 0


def test_a_sweep_is_a_frame_also_of_what_failed(tmp_path: Path) -> None:
    """Knobs are whole numbers, figures SI, and a point that failed has nothing but why."""
    frame = run(tmp_path / "t.csv", TrialError("out of memory"), after=150).to_dataframe()
    assert len(frame) == 12
    assert frame.batch_size.dtype == "int64"
    assert frame.energy_j.dtype == "float64"
    assert frame.failure.dropna().tolist() == ["out of memory"] * 2
    assert frame[frame.failure.notna()].energy_j.isna().all()


def test_a_sweep_into_parquet_is_the_same_table(tmp_path: Path) -> None:
    """It can be replayed, goes on where it was cut short, and is not measured again once it is whole."""
    pytest.importorskip("pyarrow")
    path = tmp_path / "t.parquet"
    with pytest.raises(KeyboardInterrupt):
        run(path, KeyboardInterrupt(), after=70)
    assert not path.exists()
    assert run(path).kept == 4
    run(tmp_path / "t.csv")
    one, two = (ReplayDevice(tmp_path / name).table for name in ("t.csv", "t.parquet"))
    assert one.points == two.points
    assert [seen.energy_j for seen in one.measurements] == pytest.approx([seen.energy_j for seen in two.measurements])
    assert run(path).measured == 0
    assert sorted(one.name for one in tmp_path.iterdir()) == ["t.csv", "t.parquet"]


def test_parquet_without_pyarrow_is_one_line_before_anything_is_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The line holds the command that installs it; the device is not touched."""
    monkeypatch.setitem(sys.modules, "pyarrow.parquet", None)
    device = FakeDevice()
    with pytest.raises(InvalidInput, match=r"pip install 'polythrottle\[parquet\]'"):
        sweep(device, FakeWorkload(device), Window(queries=10, duration_s=0.0), tmp_path / "t.parquet")
    assert device.log == []
