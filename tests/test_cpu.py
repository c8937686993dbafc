"""This machine's processor, on trees made up like sysfs and on the machine the tests run on."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from polythrottle.backends.cpu import KNOB, CpuDevice
from polythrottle.backends.cpu_energy import Rapl, busy_s
from polythrottle.clock import VirtualClock
from polythrottle.errors import DeviceError, InvalidInput, KnobRejected, UnknownName
from polythrottle.measurement import EnergyKind
from polythrottle.space import OperatingPoint, SearchSpace
from polythrottle.testing.contracts import DeviceContract

RANGE_UJ = 65_532_610_987


def put(path: Path, text: object) -> None:
    """Write a file the way sysfs shows it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"{text}\n")


def policy(root: Path, number: int, lowest: int, highest: int, table: str | None = None) -> Path:
    """Add a cpufreq policy, in kHz."""
    folder = root / f"sys/devices/system/cpu/cpufreq/policy{number}"
    put(folder / "scaling_min_freq", lowest)
    put(folder / "scaling_max_freq", highest)
    put(folder / "scaling_cur_freq", highest)
    if table:
        put(folder / "scaling_available_frequencies", table)
    return folder


def zone(root: Path, number: str, name: str, energy_uj: int) -> Path:
    """Add a powercap zone, in µJ."""
    folder = root / f"sys/class/powercap/intel-rapl:{number}"
    put(folder / "name", name)
    put(folder / "max_energy_range_uj", RANGE_UJ)
    put(folder / "energy_uj", energy_uj)
    return folder


def device(root: Path, **options: object) -> CpuDevice:
    """Return the device of a tree, in virtual time."""
    return CpuDevice(root=str(root), clock=VirtualClock(), **options)  # type: ignore[arg-type]


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """A machine with a clock table, two policies, one package and one sensor."""
    root = tmp_path / "tree"
    policy(root, 0, 800_000, 3_000_000, "3000000 2400000 1600000 800000")
    policy(root, 1, 800_000, 3_000_000, "3000000 2400000 1600000 800000")
    zone(root, "0", "package-0", 5_000_000)
    zone(root, "0:0", "core", 1_000_000)
    put(root / "sys/class/thermal/thermal_zone3/type", "x86_pkg_temp")
    put(root / "sys/class/thermal/thermal_zone3/temp", 48_500)
    put(root / "sys/class/thermal/thermal_zone4/type", "iwlwifi_1")
    put(root / "sys/class/thermal/thermal_zone4/temp", 90_000)
    put(root / "proc/cpuinfo", "processor\t: 0\nmodel name\t: Test Processor 9000\n")
    return root


class TestContractOnATree(DeviceContract):
    """The contract of every device, on a tree."""

    @pytest.fixture(autouse=True)
    def _tree(self, tree: Path) -> None:
        self.root = tree

    def make(self) -> CpuDevice:
        """Return the device of a tree with knob and counter."""
        return device(self.root)


class TestContractHere(DeviceContract):
    """The contract of every device, on this machine."""

    def make(self) -> CpuDevice:
        """Return this machine, its knobs left alone."""
        return CpuDevice(watts_per_core=10.0)


def maxima(root: Path) -> list[int]:
    """Return the limit of each policy in kHz."""
    files = sorted((root / "sys/devices/system/cpu/cpufreq").glob("policy*/scaling_max_freq"))
    return [int(file.read_text()) for file in files]


def test_the_clock_table_is_the_space(tree: Path) -> None:
    """Levels are the kernel's table in Hz; the default is the limit as found."""
    space = device(tree).space
    assert space.knob(KNOB).levels == (800_000_000, 1_600_000_000, 2_400_000_000, 3_000_000_000)
    assert dict(space.default) == {KNOB: 3_000_000_000}


def test_the_limit_goes_to_every_policy_and_comes_back(tree: Path) -> None:
    """Inside the context all policies hold the level, after it what was found."""
    with device(tree) as cpu:
        cpu.apply(OperatingPoint({KNOB: 1_600_000_000}))
        assert maxima(tree) == [1_600_000, 1_600_000]
        cpu.apply(OperatingPoint({}))
        assert maxima(tree) == [3_000_000, 3_000_000]
        cpu.apply(OperatingPoint({KNOB: 800_000_000}))
    assert maxima(tree) == [3_000_000, 3_000_000]


def test_unlike_cores_each_get_their_highest_clock_not_above_the_limit(tree: Path) -> None:
    """A cap between two tables is met by each policy with a frequency it has."""
    policy(tree, 1, 500_000, 2_000_000, "500000 1000000 2000000")
    with device(tree) as cpu:
        cpu.apply(OperatingPoint({KNOB: 1_600_000_000}))
        assert maxima(tree) == [1_600_000, 1_000_000]
        cpu.apply(OperatingPoint({KNOB: 500_000_000}))
        assert maxima(tree) == [800_000, 500_000]
    assert maxima(tree) == [3_000_000, 2_000_000]


def test_limits_found_are_never_crossed(tree: Path) -> None:
    """A cap or floor somebody set before bounds the levels."""
    for number in (0, 1):
        policy(tree, number, 1_600_000, 2_400_000)
    assert device(tree).space.knob(KNOB).levels == (1_600_000_000, 2_400_000_000)


def test_without_a_table_a_handful_of_steps_is_offered(tree: Path) -> None:
    """Drivers without a table get steps of whole 100 MHz between the limits found."""
    for number in (0, 1):
        policy(tree, number, 800_000, 3_050_000)
        (tree / f"sys/devices/system/cpu/cpufreq/policy{number}/scaling_available_frequencies").unlink()
    levels = device(tree).space.knob(KNOB).levels
    assert len(levels) == 6
    assert (levels[0], levels[-1]) == (800_000_000, 3_050_000_000)
    assert all(int(level) % 100_000_000 == 0 for level in levels[:-1])


def test_a_clock_that_cannot_be_written_is_no_knob(tree: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the right to write, there is nothing to tune."""
    monkeypatch.setattr(os, "access", lambda path, mode: mode != os.W_OK or "policy1" not in str(path))
    assert len(device(tree).space.names) == 0


def test_an_estimate_brings_no_clock_knob(tree: Path) -> None:
    """Busy time cannot tell what a lower clock saves, so the clock is not tuned on it, and the boundary says so."""
    cpu = device(tree, watts_per_core=7.5)
    assert cpu.space.fingerprint == SearchSpace.unit().fingerprint
    assert "clock left alone" in cpu.boundary
    asked = device(tree, watts_per_core=7.5, knobs=(KNOB,))
    assert len(asked.space) == 4
    assert "clock searched although the estimate does not see" in asked.boundary


def test_only_the_knobs_asked_for_move(tree: Path) -> None:
    """A knob that is not searched stays at its default; an unknown one is named."""
    assert len(device(tree, knobs=()).space) == 1
    assert len(device(tree, knobs=(KNOB,)).space) == 4
    with pytest.raises(UnknownName, match=KNOB):
        _ = device(tree, knobs=("cpu_max",)).space


def test_a_level_it_does_not_have_is_refused(tree: Path) -> None:
    """Off-table levels and foreign knobs are rejected before anything is written."""
    with device(tree) as cpu:
        for wrong in ({KNOB: 1_700_000_000}, {"gpu_max_hz": 1}):
            with pytest.raises(KnobRejected, match=KNOB):
                cpu.apply(OperatingPoint(wrong))
    assert maxima(tree) == [3_000_000, 3_000_000]


KILLED = """
import os, signal, sys
from polythrottle.backends.cpu import CpuDevice
from polythrottle.space import OperatingPoint
cpu = CpuDevice(root=sys.argv[1]).__enter__()
cpu.apply(OperatingPoint({"cpu_max_hz": 800000000}))
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_after_a_kill_space_and_limits_are_what_they_were(tree: Path) -> None:
    """The next start sees the same space as before the kill, and restores the limits on entering."""
    before = device(tree).space.fingerprint
    child = subprocess.run([sys.executable, "-c", KILLED, str(tree)], capture_output=True, check=False)
    assert child.returncode == -signal.SIGKILL
    assert maxima(tree) == [800_000, 800_000]
    cpu = device(tree)
    assert cpu.space.fingerprint == before
    with cpu:
        assert maxima(tree) == [3_000_000, 3_000_000]


def test_a_foreign_limit_is_left_and_named(tree: Path) -> None:
    """What another program set meanwhile stays, and the device tells."""
    with device(tree) as cpu:
        cpu.apply(OperatingPoint({KNOB: 800_000_000}))
        put(tree / "sys/devices/system/cpu/cpufreq/policy0/scaling_max_freq", 2_400_000)
    assert maxima(tree) == [2_400_000, 3_000_000]
    assert len(cpu.differences) == 1


def test_rapl_counts_packages_in_joules_across_a_wrap(tree: Path) -> None:
    """Packages are summed, their parts are not, and a counter that starts over loses nothing."""
    first, second = zone(tree, "0", "package-0", RANGE_UJ - 2_000_000), zone(tree, "1", "package-1", 7_000_000)
    zone(tree, "2", "psys", 1)
    cpu = device(tree)
    start_j = cpu.read().energy_j
    put(first / "energy_uj", 1_000_000)
    put(second / "energy_uj", 11_000_000)
    assert cpu.read().energy_j - start_j == pytest.approx(3.0 + 4.0)
    assert cpu.energy_kind is EnergyKind.MEASURED
    assert "package-0, package-1" in cpu.boundary


def test_rapl_is_sampled_several_times_within_the_shortest_wrap(tree: Path) -> None:
    """A 65 kJ counter at 500 W wraps after 131 s and is read at least every 33 s, in the background."""
    rapl = Rapl([zone(tree, "0", "package-0", 0)])
    assert rapl.period_s == pytest.approx(32.8, abs=0.1)
    rapl.start()
    rapl.stop()


def test_a_counter_that_vanishes_is_a_device_error(tree: Path) -> None:
    """Energy is never made up for a counter that cannot be read any more."""
    cpu = device(tree)
    (tree / "sys/class/powercap/intel-rapl:0/energy_uj").unlink()
    with pytest.raises(DeviceError, match="RAPL"):
        cpu.read()


def test_an_unreadable_counter_leads_to_an_estimate_that_says_why(tree: Path) -> None:
    """RAPL that is there but closed is named with the right it takes."""
    path = tree / "sys/class/powercap/intel-rapl:0/energy_uj"
    path.unlink()
    path.mkdir()  # root may read any file, but nobody a folder
    cpu = device(tree)
    assert cpu.energy_kind is EnergyKind.ESTIMATED
    assert "not readable" in cpu.boundary


def test_the_estimate_is_busy_time_times_the_stated_power(tmp_path: Path) -> None:
    """Joules follow the processor seconds of this process; idle power follows the clock."""
    busy, idle = device(tmp_path, watts_per_core=20.0), device(tmp_path, idle_w=3.0)
    start, start_s = busy.read(), busy_s()
    sum(range(2_000_000))
    assert busy.read().energy_j - start.energy_j == pytest.approx(20 * (busy_s() - start_s), rel=0.1)
    assert idle.boundary.startswith(
        "estimated: busy CPU time of this process and its children × 10 W per core (assumed)"
    )
    before = idle.read()
    idle.clock.sleep(100.0)
    assert idle.read().energy_j - before.energy_j == pytest.approx(300.0, abs=5.0)


def test_the_estimate_covers_living_and_finished_children() -> None:
    """A child's busy time counts while it runs and stays counted once it has ended."""
    start_s = busy_s()
    burn = "import time; print(sum(range(6_000_000)), flush=True); input()"
    with subprocess.Popen([sys.executable, "-c", burn], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
        assert child.stdout is not None
        child.stdout.readline()
        living_s = busy_s() - start_s
        child.communicate(b"\n")
    assert living_s > 0.03
    assert busy_s() - start_s >= living_s * 0.9


def test_temperature_is_the_hottest_sensor_of_the_processor(tree: Path) -> None:
    """Radios do not count, sensors that are off or absurd are unknown, and unknown is None."""
    assert device(tree).read().temperature_c == pytest.approx(48.5)
    put(tree / "sys/class/thermal/thermal_zone3/temp", -274_000)
    assert device(tree).read().temperature_c is None


def test_the_reading_tells_the_running_clock_and_throttling(tree: Path) -> None:
    """Clocks are Hz; a throttle counter that rose since the last reading marks this one."""
    counter = tree / "sys/devices/system/cpu/cpu0/thermal_throttle/package_throttle_count"
    put(counter, 4)
    cpu = device(tree)
    assert cpu.read().clocks_hz == {"cpu": 3_000_000_000}
    put(counter, 5)
    assert [cpu.read().throttled for _ in range(2)] == [True, False]


def test_a_bare_machine_has_no_knobs_and_unknown_temperature(tmp_path: Path) -> None:
    """Where nothing can be read, energy is estimated and the rest is unknown, never zero."""
    cpu = device(tmp_path)
    assert len(cpu.space) == 1
    with cpu:
        cpu.apply(OperatingPoint({}))
        reading = cpu.read()
    assert reading.temperature_c is None
    assert reading.clocks_hz == {}
    assert not (tmp_path / "state").exists()


def test_uri_and_title_name_it(tree: Path) -> None:
    """The URI opens the same device again; options at their default are left out."""
    assert CpuDevice.open().uri == "cpu"
    assert CpuDevice.open({"watts_per_core": "12.5", "idle_w": "0"}).uri == "cpu?watts_per_core=12.5"
    assert device(tree).title.startswith("Test Processor 9000, ")
    assert device(tree).uri == f"cpu?root={tree}"


@pytest.mark.parametrize(
    ("options", "kind", "says"),
    [
        ({"watts": "3"}, UnknownName, "did you mean watts_per_core"),
        ({"watts_per_core": "ten"}, InvalidInput, "not a number"),
        ({"watts_per_core": "0"}, InvalidInput, "above zero"),
        ({"watts_per_core": "nan"}, InvalidInput, "above zero"),
        ({"idle_w": "-1"}, InvalidInput, "zero or more"),
        ({"root": "/no/such/folder"}, InvalidInput, "no folder"),
    ],
)
def test_bad_options_are_said_in_one_line(options: dict[str, str], kind: type[Exception], says: str) -> None:
    """Unknown and malformed options say what would be right."""
    with pytest.raises(kind, match=says) as caught:
        CpuDevice.open(options)
    assert "\n" not in str(caught.value)


def test_a_tree_that_makes_no_sense_is_a_device_error(tree: Path) -> None:
    """Limits that are no numbers stop at opening, with the folder named."""
    put(tree / "sys/devices/system/cpu/cpufreq/policy0/scaling_max_freq", "<unknown>")
    with pytest.raises(DeviceError, match="cpufreq"):
        _ = device(tree).space
