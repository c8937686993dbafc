"""What a first run shows of all that is assumed: every stand-in board agrees, a doctored one does not."""

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from polythrottle.backends import open_device
from polythrottle.backends.nvml import NvmlDevice, NvmlGroup
from polythrottle.cli.commands import run
from polythrottle.inspect.board_record import Agreement, BoardRecord, CheckedAssumption, assumptions, record, record_of
from polythrottle.inspect.snapshot import take
from polythrottle.testing import BOARDS, FakeKernel, plant
from polythrottle.testing.boards import UNMETERED, described
from polythrottle.testing.boards import assumptions as of_stand_ins
from polythrottle.testing.nvml import MODELS, FakeNvml, compiler

DOCUMENT = Path(__file__).resolve().parents[2] / "docs/hardware.md"
needs_driver = pytest.mark.skipif(compiler() is None, reason="no C compiler to build the stand-in for NVIDIA's library")


def planted(board: str, folder: Path) -> Path:
    """Plant a board in the power mode that has most of its cores, and return its tree."""
    modes = described(board)["nvpmodel"]["modes"]
    return plant(board, folder / "tree", power_mode=max(modes, key=lambda mode: mode.get("cores", 0))["id"])


def recorded(root: Path) -> BoardRecord:
    """Return the record of a tree."""
    (found,) = record(f"jetson?root={root}")
    return found


def row(found: BoardRecord, part: str, assumed: str) -> CheckedAssumption:
    """Return the one row of an assumption."""
    (only,) = [each for each in found.rows if each.part == part and each.assumed.startswith(assumed)]
    return only


def test_everything_a_stand_in_assumes_is_looked_at() -> None:
    """Parts, words and boards are those the stand-ins themselves say they have no record of."""
    said = of_stand_ins()
    listed = {(each.part, each.assumed): list(each.boards) for each in assumptions() if each.look}
    assert {key: boards for key, boards in listed.items() if key in said} == said


def test_what_else_is_assumed_is_documented() -> None:
    """docs/hardware.md has a row for everything that is assumed besides the stand-in boards."""
    said = of_stand_ins()
    others = [each for each in assumptions() if (each.part, each.assumed) not in said]
    rows = [f"| {each.part} | {each.assumed} | {', '.join(each.boards) or 'all'} |" for each in others]
    assert "\n".join(rows) in DOCUMENT.read_text(encoding="utf-8"), "docs/hardware.md should hold:\n" + "\n".join(rows)


@pytest.mark.parametrize("board", [*BOARDS, *UNMETERED])
def test_every_stand_in_board_agrees_with_what_is_assumed_of_it(board: str, tmp_path: Path) -> None:
    """Nothing contradicts, everything that a look can show has shown, and nothing was written."""
    root = planted(board, tmp_path)
    kernel = FakeKernel(root)
    found = recorded(root)
    assert found.counts["contradicts"] == 0, found
    own = {key for key, boards in of_stand_ins().items() if board in boards}
    assert {(each.part, each.assumed) for each in found.rows if each.agreement is Agreement.AGREES} >= own
    assert not kernel.writes()


Doctoring = Callable[[Path], object]


def write(path: str, text: str) -> Doctoring:
    """Return what writes a text into every file of a tree that matches."""

    def written(root: Path) -> None:
        files = list(root.glob(path))
        assert files
        for file in files:
            file.write_text(f"{text}\n")

    return written


def remove(path: str) -> Doctoring:
    """Return what removes every folder of a tree that matches."""
    return lambda root: [each.unlink() if each.is_symlink() else shutil.rmtree(each) for each in root.glob(path)]


def swap(path: str, old: str, new: str) -> Doctoring:
    """Return what replaces a text in a file of a tree."""

    def swapped(root: Path) -> None:
        file = (root / path).resolve()
        file.write_text(file.read_text().replace(old, new))

    return swapped


CPUFREQ, RATES = "sys/devices/system/cpu/cpufreq", "sys/kernel/debug/bpmp/debug/emc"
ZONE, MODES, NANO = "sys/class/thermal/thermal_zone1", "etc/nvpmodel.conf", "sys/bus/iio/devices/iio:device0"
NX = "sys/class/devfreq/17000000.gpu"
DOCTORED = [
    ("jetson-nano", "chips", "voltages", write(f"{NANO}/in_voltage0_input", "12000"), "POM_5V_IN 12 V"),
    ("jetson-agx-xavier", "emc", "lock, list", remove(RATES), "rates nowhere known"),
    ("jetson-tx2", "emc", "the text", write(f"{RATES}/possible_rates", "204000 1866000"), "1866000"),
    (
        "jetson-tx2",
        "gpu",
        "the other devfreq",
        remove("sys/class/devfreq/15a80000.nvenc"),
        "15340000.vic",
    ),
    ("jetson-thor", "gpu", "the name of the file", swap(MODES, "MASK 15873", "MASK 64"), "all as MAXN"),
    ("jetson-orin-nx-super", "gpu", "that 1020", write(f"{NX}/available_frequencies", "306000000"), "306 MHz"),
    ("jetson-orin-nx", "overcurrent", "name, folder", write("sys/class/hwmon/hwmon4/name", "oc"), "oc in hwmon4"),
    (
        "jetson-orin-nano",
        "thermal",
        "temperatures",
        write(f"{ZONE}/trip_point_0_temp", "104500"),
        "passive 104.5 °C in gpu",
    ),
    ("jetson-agx-xavier", "thermal", "all of it", write(f"{ZONE}/type", "BCPU-therm"), "CPU-therm, BCPU-therm"),
    ("jetson-thor", "cpu", "pairs", write(f"{CPUFREQ}/policy0/related_cpus", "0"), "clusters 0, 2+3"),
]


@pytest.mark.parametrize(("board", "part", "assumed", "doctored", "shows"), DOCTORED)
def test_a_board_that_is_otherwise_contradicts(
    board: str, part: str, assumed: str, doctored: Doctoring, shows: str, tmp_path: Path
) -> None:
    """The row says so, shows what the board holds, and names what was expected beside what was assumed."""
    root = planted(board, tmp_path)
    expected = row(recorded(root), part, assumed).shows
    doctored(root)
    found = row(recorded(root), part, assumed)
    assert found.agreement is Agreement.CONTRADICTS
    assert shows in found.shows
    assert found.assumed.endswith(f": {expected}")


def test_a_volt_more_or_less_is_the_same_rail(tmp_path: Path) -> None:
    """A supply of 19 V that reads 19.7 V agrees."""
    root = planted("jetson-tx2", tmp_path)
    write("sys/bus/iio/devices/iio:device1/in_voltage*_input", "19700")(root)
    assert row(recorded(root), "chips", "voltages").agreement is Agreement.AGREES


def test_what_cannot_be_seen_says_why(tmp_path: Path) -> None:
    """Cores that are offline, a closed debugfs, another board, and what no reading shows."""
    root = plant("jetson-agx-xavier", tmp_path / "tree")
    shutil.rmtree(root / "sys/kernel/debug")
    found = recorded(root)
    assert "run as root" in row(found, "emc", "lock, list").shows
    assert row(found, "cpu", "pairs of cores").shows == "assumed of jetson-thor"
    assert row(found, "cpu", "cpuinfo_cur_freq").shows == "no reading can show it"
    assert {each.agreement for each in found.rows if not each.here} == {Agreement.UNSEEN}


def test_the_command_prints_a_table_and_a_document(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """People get the rows of their board, programs all; neither names a serial number."""
    device = f"jetson?root={planted('jetson-thor', tmp_path)}"
    assert run(["doctor", "--record", "--device", device]) == 0
    told = capsys.readouterr().out
    assert "agrees" in told
    assert "about others, which --json lists" in told
    assert run(["doctor", "--record", "--device", device, "--json"]) == 0
    text = capsys.readouterr().out
    (found,) = json.loads(text)["records"]
    assert found["counts"]["contradicts"] == 0
    assert {"part", "assumed", "shows", "agreement", "here"} == set(found["rows"][0])
    assert "1420000000000" not in told + text


@pytest.mark.slow
def test_a_snapshot_carries_it(tmp_path: Path) -> None:
    """So that one file is all there is to send."""
    taken = take(open_device(f"jetson?root={planted('jetson-nano', tmp_path)}"))
    (found,) = json.loads(taken.members["record.json"].content)["records"]
    assert found["identity"]["soc"] == "tegra210"
    assert {each["agreement"] for each in found["rows"]} == {"agrees", "not seen here"}


@pytest.mark.parametrize(
    ("device", "code", "complaint"),
    [
        ("sim:jetson-nano", 2, "cannot be recorded: a record is of a Jetson board"),
        ("cpu", 2, "cannot be recorded"),
        ("jetson?root=/nowhere", 2, "no folder"),
        ("gpu:0", 3, "unknown device"),
        ("nvml:0", 6, "NVIDIA driver"),
        (None, 6, "there is no Jetson board and no NVIDIA GPU here to record"),
    ],
)
def test_what_cannot_be_recorded_is_one_line(
    device: str | None, code: int, complaint: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """On standard error, with the exit code of its kind, and nothing on standard output."""
    monkeypatch.setattr("polythrottle.inspect.board_record.real_devices", lambda system: ("cpu",))
    assert run(["doctor", "--record", *(["--device", device] if device else [])]) == code
    out, err = capsys.readouterr()
    assert out == ""
    assert complaint in err
    assert err.count("\n") == 1


@needs_driver
@pytest.mark.parametrize("model", [name for name in MODELS if name != "a100-mig"])
def test_every_stand_in_gpu_agrees_with_what_is_assumed_of_it(model: str, tmp_path: Path) -> None:
    """Nothing contradicts, nothing is set, and no UUID is told."""
    with FakeNvml(tmp_path / "nvml", [model], frozen=True) as fake:
        fake.set(0, load_permille=500)
        (found,) = record_of(NvmlDevice("0", clock=fake.clock()))
        assert not fake.log()
        assert fake.uuid(0) not in repr(found)
    assert found.counts["contradicts"] == 0, found
    assert found.counts["agrees"] >= 2


@needs_driver
def test_a_gpu_that_is_otherwise_contradicts(tmp_path: Path) -> None:
    """Of a group each GPU has its record; one that is not what its name says is told with what was expected."""
    odd = replace(MODELS["h100"], name=MODELS["b200"].name, period_us=250_000)
    with FakeNvml(tmp_path / "nvml", [odd, odd], frozen=True) as fake:
        one, other = record_of(NvmlGroup([NvmlDevice(name, clock=fake.clock()) for name in "01"]))
    assert one.rows == other.rows
    step = row(one, "GPU energy", "the counter moves")
    assert (step.agreement, step.shows) == (Agreement.CONTRADICTS, "every 250 ms")
    clocks = row(one, "GPU clocks", "clocks and power limits")
    assert clocks.shows == "memory 2619, 1593 MHz, graphics 345 to 1785 MHz; limits of 200 to 400 W"
    assert clocks.assumed.endswith(": memory 3996 MHz, graphics 120 to 1965 MHz; limits of 200 to 1000 W")
    assert clocks.agreement is Agreement.CONTRADICTS
