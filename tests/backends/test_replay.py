import gzip
import statistics
from pathlib import Path

import pytest
from builders import ROWS

from polythrottle.backends.replay import RecordedWorkload, ReplayDevice, Table
from polythrottle.domain.errors import BadFile, InvalidInput, KnobRejected, TrialError
from polythrottle.domain.measurement import EnergyKind
from polythrottle.domain.ports import Device, Recorded, Rewindable
from polythrottle.testing import DeviceContract


def table(folder: Path, text: str = ROWS, name: str = "t.csv") -> Path:
    """Write a table and return its path."""
    path = folder / name
    path.write_bytes(gzip.compress(text.encode()) if name.endswith(".gz") else text.encode())
    return path


class TestReplayContract(DeviceContract):
    """A recorded table is a device like any other."""

    @pytest.fixture(autouse=True)
    def _written(self, tmp_path: Path) -> None:
        self.path = table(tmp_path)

    def make(self) -> Device:
        """Return a device on a small table."""
        return ReplayDevice(self.path)


@pytest.mark.parametrize("name", ["t.csv", "t.csv.gz"])
def test_the_space_is_exactly_the_rows(tmp_path: Path, name: str) -> None:
    """Compressed or not, each row is a point and nothing else is."""
    device = ReplayDevice(table(tmp_path, name=name))
    assert len(device.space) == 4
    assert isinstance(device, Recorded)
    assert isinstance(device, Rewindable)


def test_a_visit_returns_what_was_recorded(tmp_path: Path) -> None:
    """Latency, percentiles, power and energy are those of the row; an empty field stays unknown."""
    device = ReplayDevice(table(tmp_path))
    measured = device.recall(device.space.default.moved({"gpu_freq_hz": 600_000_000, "batch_size": 2}))
    assert (measured.latency.mean_s, measured.latency.p99_s) == (0.03, None)
    assert (measured.power_w, measured.energy_j, measured.throughput_per_s) == (5.5, 0.0825, 66.7)
    assert (measured.energy_kind, measured.boundary) == (EnergyKind.RECORDED, "as recorded in t.csv")


def test_the_default_is_the_stock_point(tmp_path: Path) -> None:
    """Clocks at the top, batch at the bottom."""
    assert dict(ReplayDevice(table(tmp_path)).space.default) == {"gpu_freq_hz": 1_200_000_000, "batch_size": 1}


def test_the_default_of_a_clock_offset_is_none(tmp_path: Path) -> None:
    """What is added to a clock is nearest 0 at the default, whichever rows there are; the clocks are at the top."""
    head = "gpu_offset_hz,gpu_max_hz,mem_offset_hz,latency_s,energy_j\n"
    rows = [(-100, 1800), (-100, 2100), (0, 1800), (0, 2100), (100, 1800), (100, 2100)]
    lines = [f"{gpu}000000,{top}000000,{mem},0.01,0.1" for gpu, top in rows for mem in (-500_000_000, 250_000_000)]
    default = ReplayDevice(table(tmp_path, head + "\n".join(lines))).space.default
    assert dict(default) == {"gpu_offset_hz": 0, "gpu_max_hz": 2_100_000_000, "mem_offset_hz": 250_000_000}


def test_relative_limits_multiply_the_fastest_row(tmp_path: Path) -> None:
    """The reference of a table is its fastest row."""
    assert ReplayDevice(table(tmp_path)).reference["mean"] == 0.01


@pytest.mark.slow
def test_noise_is_repeatable_and_small(tmp_path: Path) -> None:
    """The noise of a trial depends on seed, trial and point alone, and spreads as asked."""
    path = table(tmp_path)
    seen = []
    for number in range(200):
        one, two = ReplayDevice(path, noise=0.02, seed=3), ReplayDevice(path, noise=0.02, seed=3)
        two.recall(two.space[0])
        one.rewind(number)
        two.rewind(number)
        assert one.recall(one.space.default) == two.recall(two.space.default)
        assert one.recall(one.space.default).energy_kind is EnergyKind.SIMULATED
        seen.append(one.recall(one.space.default).latency.mean_s)
    assert statistics.stdev(seen) == pytest.approx(0.0002, rel=0.25)
    assert statistics.mean(seen) == pytest.approx(0.01, rel=0.01)


def test_what_is_added_to_a_clock_may_lie_below_zero(tmp_path: Path) -> None:
    """A sweep over clock offsets reads back."""
    text = "gpu_offset_hz,latency_s,energy_j\n-200000000,0.2,3\n0,0.1,4\n"
    assert ReplayDevice(table(tmp_path, text)).space.knob("gpu_offset_hz").levels == (-200_000_000, 0)


def test_a_manifest_says_that_energy_is_relative(tmp_path: Path) -> None:
    """A table whose unit of energy is unknown says so from then on."""
    (tmp_path / "manifest.json").write_text('{"tables": [{"file": "t.csv", "energy_scale": "relative"}]}')
    assert ReplayDevice(table(tmp_path)).energy_kind is EnergyKind.RELATIVE


def test_energy_is_called_measured_only_where_a_table_or_its_manifest_says_so(tmp_path: Path) -> None:
    """Of any other table it is known that it says so, and no more."""
    assert ReplayDevice(table(tmp_path)).energy_kind is EnergyKind.RECORDED
    (tmp_path / "manifest.json").write_text('{"tables": [{"file": "t.csv", "source": "Zeus", "device": "an A40"}]}')
    published = ReplayDevice(table(tmp_path))
    assert (published.energy_kind, published.boundary) == (EnergyKind.MEASURED, "as recorded by Zeus on an A40")
    said = "f,latency_s,energy_j,energy_kind\n1,0.2,3,measured\n2,0.1,4,measured\n"
    assert ReplayDevice(table(tmp_path, said, "own.csv")).energy_kind is EnergyKind.MEASURED


@pytest.mark.parametrize(
    ("text", "energies_j", "how"),
    [
        ("f,latency_s,power_w\n1,0.2,10\n2,0.1,30\n", (2.0, 3.0), "power_w * latency_s (closed"),
        ("batch_size,latency_s,power_w\n1,0.2,10\n4,0.4,20\n", (2.0, 2.0), "power_w * latency_s / batch_size (closed"),
        ("f,latency_s,power_w,throughput_per_s\n1,0.2,10,20\n2,0.1,30,\n", (0.5, 3.0), "power_w / throughput_per_s"),
    ],
)
def test_power_stands_for_energy_where_none_was_recorded(
    text: str, energies_j: tuple[float, ...], how: str, tmp_path: Path
) -> None:
    """An item's energy is power over throughput: in a closed loop power times latency. It is called estimated."""
    device = ReplayDevice(table(tmp_path, text))
    assert [each.energy_j for each in device.table.measurements] == pytest.approx(energies_j)
    assert (device.energy_kind, device.boundary) == (
        EnergyKind.ESTIMATED,
        "power over throughput, as recorded in t.csv",
    )
    (remark,) = device.table.remarks
    assert remark.startswith(f"t.csv has no energy_j: energy per item is {how}")
    assert not ReplayDevice(table(tmp_path)).table.remarks


def test_a_table_carries_its_own_kind_of_energy(tmp_path: Path) -> None:
    """What was swept on a simulator or estimated stays so called when it is replayed."""
    text = "threads,latency_s,energy_j,energy_kind\n1,0.2,3,estimated\n2,0.1,4,estimated\n"
    assert ReplayDevice(table(tmp_path, text)).energy_kind is EnergyKind.ESTIMATED


def test_unknown_notes_behind_the_measurements_are_left_out(tmp_path: Path) -> None:
    """Columns that are neither knob nor measurement do not disturb."""
    text = "f,latency_s,energy_j,core_mask,remark\n1,0.2,3,15,slow\n2,0.1,4,15,fast\n"
    assert ReplayDevice(table(tmp_path, text)).space.names == ("f",)


BAD = {
    "empty": ("", "has nothing"),
    "header only": ("f,latency_s,energy_j\n", "no rows"),
    "no energy": ("f,latency_s\n1,2\n", "energy_j"),
    "no power": ("f,latency_s,power_w\n1,2,\n", "line 2, column power_w: the field is empty"),
    "none of them": ("a,b\n1,2\n", "has no column latency_s, energy_j; it needs latency_s, energy_j"),
    "no latency": ("f,energy_j\n1,2\n", "latency_s"),
    "no knob": ("latency_s,energy_j\n1,2\n", "knob"),
    "ragged short": ("f,latency_s,energy_j\n1,2\n", "line 2"),
    "ragged long": ("f,latency_s,energy_j\n1,2,3,4\n", "line 2"),
    "text": ("f,latency_s,energy_j\n1,fast,3\n", "line 2, column latency_s"),
    "nan": ("f,latency_s,energy_j\n1,1,3\n2,nan,3\n", "line 3, column latency_s"),
    "inf": ("f,latency_s,energy_j\n1,inf,3\n", "column latency_s"),
    "negative": ("f,latency_s,energy_j\n1,1,-3\n", "column energy_j"),
    "zero": ("f,latency_s,energy_j\n1,1,0\n", "column energy_j"),
    "missing": ("f,latency_s,energy_j\n1,1,\n", "column energy_j"),
    "duplicate": ("f,latency_s,energy_j\n1,1,1\n1,2,2\n", "line 3.*line 2"),
    "duplicate as float": ("f,latency_s,energy_j\n1,1,1\n1.0,2,2\n", "line 3.*line 2"),
    "level nan": ("f,latency_s,energy_j\nnan,1,1\n", "column f"),
    "level empty": ("f,latency_s,energy_j\n,1,1\n", "column f"),
    "repeated column": ("f,f,latency_s,energy_j\n1,1,1,1\n", "repeats"),
    "beyond all size": ("f,latency_s,energy_j\n1,5e-324,1\n", "size"),
    "column without name": ("f,,latency_s,energy_j\n1,1,1,1\n", "no name"),
    "mixed kinds": ("f,latency_s,energy_j,energy_kind\n1,1,1,measured\n2,1,1,estimated\n", "mixes"),
    "kind": ("f,latency_s,energy_j,energy_kind\n1,1,1,guessed\n", "energy_kind"),
    "mixed levels": ("f,latency_s,energy_j\n1,1,1\nfast,1,1\n", "mixes"),
    "clock in MHz": (
        "gpu_max_hz,latency_s,energy_j\n1300,1,1\n",
        "line 2, column gpu_max_hz: 1300 is no clock in Hz, .*; 1300 MHz are 1300000000",
    ),
    "no clock": ("gpu_max_hz,latency_s,energy_j\n1e9,1,1\n0,1,1\n", "line 3, column gpu_max_hz: 0 is no clock in Hz"),
    "negative clock": ("mem_hz,latency_s,energy_j\n-5e8,1,1\n", "line 2, column mem_hz: -5e8 is no clock in Hz"),
    "open quote": ('f,latency_s,energy_j\n"1,1,1\n', "CSV"),
}


@pytest.mark.parametrize("name", BAD)
def test_a_bad_table_is_one_clear_error(tmp_path: Path, name: str) -> None:
    """The line and the column are named, on one line."""
    text, expected = BAD[name]
    with pytest.raises(BadFile, match=expected) as caught:
        ReplayDevice(table(tmp_path, text))
    assert "\n" not in str(caught.value)
    assert "t.csv" in str(caught.value)


NO_TABLES = [
    ("t.csv", b"\xff\xfe\x00"),
    ("t.csv", b"a\x00b,\x00\n"),
    ("t.csv.gz", b"not gzip"),
    ("t.csv.gz", gzip.compress(ROWS.encode(), mtime=0)[:60]),
]


@pytest.mark.parametrize(("name", "data"), NO_TABLES)
def test_a_file_that_is_no_table_is_one_clear_error(tmp_path: Path, name: str, data: bytes) -> None:
    """Binary files and cut archives are refused."""
    (tmp_path / name).write_bytes(data)
    with pytest.raises(BadFile):
        ReplayDevice(tmp_path / name)


def test_a_missing_table_is_one_clear_error(tmp_path: Path) -> None:
    """No file, a folder: said so."""
    with pytest.raises(BadFile, match="does not exist"):
        ReplayDevice(tmp_path / "none.csv")
    with pytest.raises(BadFile, match="no file that a table"):
        ReplayDevice(tmp_path)


def test_points_that_were_not_recorded_are_refused(tmp_path: Path) -> None:
    """A table answers for its rows only."""
    device = ReplayDevice(table(tmp_path))
    with pytest.raises(KnobRejected, match="not recorded"):
        device.recall(device.space.default.moved({"batch_size": 3}))


def test_noise_outside_its_range_is_refused(tmp_path: Path) -> None:
    """Noise is a fraction."""
    with pytest.raises(InvalidInput, match="noise"):
        ReplayDevice(table(tmp_path), noise=-0.1)


def test_a_recorded_workload_is_not_served_again() -> None:
    """Only whole measurements are recorded."""
    with pytest.raises(TrialError):
        RecordedWorkload().query()


@pytest.mark.slow
def test_every_published_table_is_read(tables: Path) -> None:
    """All measured tables have rows, a stock point, and a kind of energy that the manifest confirms."""
    paths = sorted(tables.glob("*.csv"))
    assert len(paths) > 100
    for path in paths:
        device = ReplayDevice(path)
        assert len(device.space) == len(Table.read(path).measurements) > 1
        assert (device.energy_kind is EnergyKind.RELATIVE) == path.name.startswith("flexibo")
