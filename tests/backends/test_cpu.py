"""This machine's processor, on trees made up like sysfs and on the machine the tests run on."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from polythrottle.actuation import Limits, SysFiles
from polythrottle.backends.cpu import KNOB, CpuDevice
from polythrottle.backends.cpu.energy import BusyTime, RaplCounter, RaplCounters, busy_s
from polythrottle.domain.clock import VirtualClock
from polythrottle.domain.errors import DeviceError, InvalidInput, KnobRejected, UnknownName
from polythrottle.domain.measurement import EnergyKind
from polythrottle.domain.ports import Finding
from polythrottle.domain.space import OperatingPoint, SearchSpace
from polythrottle.testing import DeviceContract

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


def test_a_lower_limit_that_cannot_be_written_is_refused_by_itself(tree: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The upper one may still be set; where that may not be, neither may the lower."""
    from polythrottle.backends.cpu import cpufreq

    for refused, works in (("scaling_min_freq", (True, False)), ("scaling_max_freq", (False, False))):
        monkeypatch.setattr(
            cpufreq,
            "refusal",
            lambda root, paths, refused=refused: "no right" if any(path.name == refused for path in paths) else "",
        )
        found = {each.subject: each.works for each in device(tree).findings()}
        assert (found["cpu_max_hz"], found["cpu_min_hz"]) == works


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
    with pytest.raises(UnknownName, match="cpu_max_mhz"):
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
from polythrottle.domain.space import OperatingPoint
cpu = CpuDevice(root=sys.argv[1])
cpu._actuator._guarded = False  # it would restore before anyone looks
cpu.__enter__()
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
    folder = zone(tree, "0", "package-0", 0)
    rapl = RaplCounters(
        [RaplCounter.of("package-0", folder / "energy_uj", folder / "max_energy_range_uj")], "package-0"
    )
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
    burn = "import time\nwhile time.process_time() < 0.2: pass\nprint(flush=True); input()"
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


JOULE_UJ = 1_000_000
EPP_NAMES = "default performance balance_performance balance_power power"


@pytest.fixture
def intel(tmp_path: Path) -> Path:
    """A hybrid Intel laptop: performance and efficient cores, intel_pstate active, package, memory and platform."""
    root = tmp_path / "intel"
    for number, highest in ((0, 4_700_000), (8, 3_400_000)):
        folder = policy(root, number, 400_000, highest)
        put(folder / "scaling_driver", "intel_pstate")
        put(folder / "scaling_governor", "powersave")
        put(folder / "energy_performance_preference", "balance_performance")
        put(folder / "energy_performance_available_preferences", EPP_NAMES)
    zone(root, "0", "package-0", 10 * JOULE_UJ)
    zone(root, "0:0", "core", 4 * JOULE_UJ)
    zone(root, "0:1", "uncore", 1 * JOULE_UJ)
    zone(root, "0:2", "dram", 2 * JOULE_UJ)
    zone(root, "1", "psys", 30 * JOULE_UJ)
    mmio = root / "sys/class/powercap/intel-rapl-mmio:0"
    put(mmio / "name", "package-0")
    put(mmio / "max_energy_range_uj", RANGE_UJ)
    put(mmio / "energy_uj", 10 * JOULE_UJ)
    put(root / "proc/cpuinfo", "model name\t: Hybrid 1\nmicrocode\t: 0x42c\nflags\t\t: fpu vme\n")
    return root


@pytest.fixture
def amd(tmp_path: Path) -> Path:
    """An AMD server under amd_pstate with two sockets, whose zones carry Intel's name, as the kernel has it."""
    root = tmp_path / "amd"
    for number in (0, 1):
        put(policy(root, number, 1_500_000, 3_700_000) / "scaling_driver", "amd-pstate-epp")
        zone(root, str(number), f"package-{number}", 7 * JOULE_UJ)
        zone(root, f"{number}:0", "core", 1 * JOULE_UJ)
    put(root / "proc/cpuinfo", "model name\t: AMD EPYC Test\n")
    return root


def grown(cpu: CpuDevice, *counters: tuple[Path, int]) -> float:
    """Return the joules a device counts while counters move on to new values."""
    start_j = cpu.read().energy_j
    for folder, energy_uj in counters:
        put(folder / "energy_uj", energy_uj)
    return cpu.read().energy_j - start_j


def finding(cpu: CpuDevice, subject: str) -> Finding:
    """Return what a device says about one subject."""
    return next(each for each in cpu.findings() if each.subject == subject)


def powercap(root: Path, name: str) -> Path:
    """Return a powercap zone of a tree."""
    return root / "sys/class/powercap" / name


def test_memory_is_added_to_the_package_and_what_is_inside_is_not(intel: Path) -> None:
    """Package and dram make the total; core, uncore, the platform and the second view of the package do not."""
    cpu = device(intel)
    moves = {"intel-rapl:0": 15, "intel-rapl:0:0": 8, "intel-rapl:0:1": 2, "intel-rapl:0:2": 5, "intel-rapl:1": 90}
    moves["intel-rapl-mmio:0"] = 15
    pairs = [(powercap(intel, name), value * JOULE_UJ) for name, value in moves.items()]
    assert grown(cpu, *pairs) == pytest.approx(5.0 + 3.0)
    assert cpu.boundary.startswith("RAPL package-0, dram-0: processor packages (core, uncore inside them) and memory")
    assert "psys holds the packages and is not added" in cpu.boundary
    assert "90.0 J" in finding(cpu, "psys").explanation


def test_memory_wraps_on_its_own(intel: Path) -> None:
    """Each counter starts over at its own range."""
    memory = powercap(intel, "intel-rapl:0:2")
    put(memory / "max_energy_range_uj", 4 * JOULE_UJ)
    assert grown(device(intel), (memory, 1 * JOULE_UJ)) == pytest.approx(3.0)


def test_memory_that_may_not_be_read_is_left_out_and_said(intel: Path) -> None:
    """The packages still count; the boundary tells what is missing."""
    (powercap(intel, "intel-rapl:0:2") / "energy_uj").unlink()
    cpu = device(intel)
    assert cpu.energy_kind is EnergyKind.MEASURED
    assert "dram is counted but not readable" in cpu.boundary
    assert "memory modules and board excluded" in cpu.boundary


def test_amd_sockets_are_summed_under_the_name_the_kernel_gives_them(amd: Path) -> None:
    """Zen processors appear as intel-rapl; both packages count, their cores do not."""
    cpu = device(amd)
    assert grown(cpu, (powercap(amd, "intel-rapl:0"), 9 * JOULE_UJ), (powercap(amd, "intel-rapl:1"), 8 * JOULE_UJ)) == 3
    assert cpu.identity == {"cpu": "AMD EPYC Test", "cpufreq": "amd-pstate-epp"}


def test_the_amd_driver_of_hwmon_counts_where_powercap_does_not(tmp_path: Path) -> None:
    """Sockets are summed, cores are not; a counter that starts over is an error, as nobody knows what it lost."""
    folder = tmp_path / "sys/class/hwmon/hwmon5"
    put(folder / "name", "amd_energy")
    for index, (label, energy_uj) in enumerate({"Ecore000": 5, "Esocket0": 40, "Esocket1": 50}.items(), 1):
        put(folder / f"energy{index}_label", label)
        put(folder / f"energy{index}_input", energy_uj * JOULE_UJ)
    cpu = device(tmp_path)
    start_j = cpu.read().energy_j
    put(folder / "energy2_input", 46 * JOULE_UJ)
    assert cpu.read().energy_j - start_j == pytest.approx(6.0)
    assert cpu.boundary.startswith("Esocket0, Esocket1: ")
    assert str(folder / "energy2_input") in cpu.files
    put(folder / "energy3_input", 1)
    with pytest.raises(DeviceError, match="started over"):
        cpu.read()


def test_a_closed_counter_names_the_right_it_takes(intel: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What only root may read leads to an estimate, and to the remedies."""
    usual = os.open

    def closed(path: str | Path, flags: int, mode: int = 0o777, **options: int) -> int:
        if Path(path).name == "energy_uj":
            raise PermissionError(13, "Permission denied", str(path))
        return usual(path, flags, mode, **options)

    monkeypatch.setattr(os, "open", closed)
    cpu = device(intel)
    assert cpu.energy_kind is EnergyKind.ESTIMATED
    energy = finding(cpu, "energy")
    assert energy.works is False
    assert all(word in energy.remedy for word in ("CVE-2020-8694", "CAP_DAC_READ_SEARCH", "group polythrottle"))
    assert finding(cpu, "psys").works is False


def test_a_masked_powercap_is_told_from_a_missing_one(tmp_path: Path) -> None:
    """In a container the zones are listed but lead nowhere."""
    folder = tmp_path / "sys/class/powercap"
    folder.mkdir(parents=True)
    (folder / "intel-rapl:0").symlink_to("../../devices/virtual/powercap/intel-rapl/intel-rapl:0")
    energy = finding(device(tmp_path), "energy")
    assert "masked" in energy.explanation
    assert "cpu?root=" in energy.remedy


def test_a_virtual_machine_says_what_its_host_keeps(tmp_path: Path) -> None:
    """Without cpufreq and counters there is nothing to search, and each finding says why."""
    put(tmp_path / "proc/cpuinfo", "model name\t: Virtual\nflags\t\t: fpu hypervisor\n")
    cpu = device(tmp_path)
    assert len(cpu.space) == 1
    for subject in (KNOB, "energy"):
        assert finding(cpu, subject).works is False
        assert "virtual machine" in finding(cpu, subject).explanation
    with pytest.raises(DeviceError, match="cannot be searched here: this kernel offers no cpufreq"):
        _ = device(tmp_path, knobs=(KNOB,)).space


def test_the_preference_is_a_knob_of_names_when_it_is_named(intel: Path) -> None:
    """It goes to every policy and comes back; what a driver never reads back is no level."""
    assert device(intel).space.names == (KNOB,)
    with device(intel, knobs=("cpu_epp",)) as cpu:
        knob = cpu.space.knob("cpu_epp")
        assert knob.levels == ("balance_performance", "balance_power", "performance", "power")
        assert not knob.ordered
        assert cpu.space.default["cpu_epp"] == "balance_performance"
        cpu.apply(OperatingPoint({"cpu_epp": "power"}))
        assert preferences(intel) == ["power", "power"]
    assert preferences(intel) == ["balance_performance", "balance_performance"]


def preferences(root: Path) -> list[str]:
    """Return the preference of each policy."""
    files = sorted((root / "sys/devices/system/cpu/cpufreq").glob("policy*/energy_performance_preference"))
    return [file.read_text().strip() for file in files]


@pytest.mark.parametrize(
    ("name", "text", "says"),
    [
        ("scaling_governor", "performance", "governor performance takes no other"),
        ("energy_performance_preference", "power", "cores hold different preferences"),
        ("energy_performance_available_preferences", "default", "no preference to choose"),
    ],
)
def test_a_preference_that_cannot_be_set_says_why(intel: Path, name: str, text: str, says: str) -> None:
    """The governor is never changed to get at it."""
    put(intel / "sys/devices/system/cpu/cpufreq/policy8" / name, text)
    assert says in finding(device(intel), "cpu_epp").explanation
    with pytest.raises(DeviceError, match=says):
        _ = device(intel, knobs=("cpu_epp",)).space


class Strict(SysFiles):
    """Refuses a minimum above the maximum and a maximum below the minimum, as older kernels do."""

    def write(self, key: str, text: str) -> None:
        """Write, unless the two would cross."""
        folder, name = os.path.split(key)
        low, high = (int(self.read(f"{folder}/scaling_{side}_freq")) for side in ("min", "max"))
        if (name == "scaling_min_freq" and int(text) > high) or (name == "scaling_max_freq" and int(text) < low):
            raise OSError(22, "Invalid argument", key)
        super().write(key, text)


def test_minimum_and_maximum_move_without_crossing(tree: Path) -> None:
    """Up and down, every pair is reached on a kernel that refuses the wrong order, and all comes back."""
    cpu = device(tree, knobs=("cpu_min_hz", KNOB), controls=Strict())
    assert all(point["cpu_min_hz"] <= point[KNOB] for point in cpu.space)
    assert len(cpu.space) == 10
    before = limits_of(tree)
    with cpu:
        for low, high in ((8, 8), (30, 30), (16, 24), (24, 24), (8, 16), (30, 30)):
            cpu.apply(OperatingPoint({"cpu_min_hz": low * 10**8, KNOB: high * 10**8}))
            assert limits_of(tree) == [(low * 100_000, high * 100_000)] * 2
    assert limits_of(tree) == before


def limits_of(root: Path) -> list[tuple[int, int]]:
    """Return lower and upper limit of each policy in kHz."""
    folders = sorted((root / "sys/devices/system/cpu/cpufreq").glob("policy*"))
    return [
        (int((folder / "scaling_min_freq").read_text()), int((folder / "scaling_max_freq").read_text()))
        for folder in folders
    ]


def test_clusters_map_a_floor_to_clocks_of_their_own(intel: Path) -> None:
    """Each policy gets its lowest clock not below the floor, but never above its own cap."""
    policy(intel, 0, 400_000, 4_700_000, "4700000 3000000 400000")
    policy(intel, 8, 400_000, 3_400_000, "3400000 2000000 400000")
    with device(intel, knobs=("cpu_min_hz", KNOB)) as cpu:
        cpu.apply(OperatingPoint({"cpu_min_hz": 3_000_000_000, KNOB: 4_700_000_000}))
        assert limits_of(intel) == [(3_000_000, 4_700_000), (3_400_000, 3_400_000)]
        cpu.apply(OperatingPoint({"cpu_min_hz": 2_000_000_000, KNOB: 3_000_000_000}))
        assert limits_of(intel) == [(3_000_000, 3_000_000), (2_000_000, 2_000_000)]


def test_the_administrators_limits_cut_the_levels(tree: Path) -> None:
    """What the administrator excludes is no level; a cluster without an allowed clock is left alone."""
    limits = Limits({"cpu": {KNOB: (1_000_000_000, 2_500_000_000)}})
    assert device(tree, limits=limits).space.knob(KNOB).levels == (1_600_000_000, 2_400_000_000)
    policy(tree, 1, 500_000, 900_000, "500000 900000")
    with device(tree, limits=limits) as cpu:
        cpu.apply(OperatingPoint({KNOB: 1_600_000_000}))
        assert maxima(tree) == [1_600_000, 900_000]


def test_a_read_only_mount_is_told_from_a_missing_right(tree: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A container's sysfs is mounted read-only, which no permission changes."""
    monkeypatch.setattr(os, "access", lambda path, mode: mode != os.W_OK)
    assert "may not be written" in finding(device(tree), KNOB).explanation

    class ReadOnly:
        f_flag = os.ST_RDONLY

    monkeypatch.setattr(os, "statvfs", lambda path: ReadOnly)
    assert "mounted read-only, as sysfs is in a container" in finding(device(tree), KNOB).explanation


def test_every_file_it_reads_is_named(intel: Path) -> None:
    """The list holds what it writes and what it reads, each below the root."""
    files = device(intel).files
    assert all(file.startswith(str(intel)) for file in files)
    names = ("scaling_max_freq", "energy_performance_preference", "energy_uj", "cpuinfo", "scaling_governor")
    assert all(any(file.endswith(name) for file in files) for name in names)
    assert len(set(files)) == len(files)


def test_it_says_what_hardware_and_firmware_it_is(intel: Path) -> None:
    """Model, microcode and driver identify it."""
    assert device(intel).identity == {"cpu": "Hybrid 1", "microcode": "0x42c", "cpufreq": "intel_pstate"}


def test_an_estimate_never_falls_for_what_is_left_out() -> None:
    """What the sender took is known at once, what everyone took only in steps: it is owed until the next step."""
    source = BusyTime(10.0, 0.0, VirtualClock(), assumed=True, remark="", everyone=True)
    before_j = source.total_j()
    assert source.leave_out(1e6)
    assert source.total_j() == before_j
