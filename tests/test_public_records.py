"""What public records of real boards show, fed to the program: each test names its record.

A record is a file or an output that somebody has published. Its figures are set in a stand-in's tree, or read as they
are; none was made here. "Notes" are files of public repositories that an index gave without their name.
"""

import json
import os
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from builders import quick

from polythrottle.actuation.drivers.all_controls import Nvpmodel
from polythrottle.backends import open_device
from polythrottle.backends.jetson import JetsonDevice
from polythrottle.backends.jetson.identity_and_throttling import BoardId
from polythrottle.backends.jetson.power_modes import PowerModes
from polythrottle.backends.jetson.power_rails import find_rails
from polythrottle.backends.nvml import NvmlDevice
from polythrottle.cli.commands import run
from polythrottle.domain.clock import VirtualClock
from polythrottle.domain.errors import DeviceError, KnobRejected
from polythrottle.domain.ports import Finding, findings_of
from polythrottle.domain.space import OperatingPoint
from polythrottle.inspect.board_record import record
from polythrottle.testing import FakeKernel, plant
from polythrottle.testing.nvml import MODELS, FakeNvml, compiler
from polythrottle.testing.nvml.models import GpuModel

GPU, CPU, MEM, CORES, MODE = "gpu_max_hz", "cpu_max_hz", "mem_hz", "cpu_cores", "power_mode"
KNOBS = (GPU, MEM, CPU)
AGX, XAVIER, NANO, TX2 = "jetson-agx-orin-jp6", "jetson-agx-xavier", "jetson-nano", "jetson-tx2"
CPUFREQ = "sys/devices/system/cpu/cpufreq"


def device(root: Path, *knobs: str) -> JetsonDevice:
    """Return a board in virtual time."""
    return JetsonDevice(root=str(root), clock=VirtualClock(), knobs=knobs or None)


def finding(board: JetsonDevice, subject: str) -> Finding:
    """Return the finding about a subject."""
    return next(each for each in board.findings() if each.subject == subject)


def write(root: Path, pattern: str, text: object) -> None:
    """Write a text into every file that matches, of which there is one or more."""
    files = list(root.glob(pattern))
    assert files, pattern
    for file in files:
        file.write_text(f"{text}\n")


def pinned(root: Path, gpu: str, gpu_hz: int, cpu_khz: int) -> None:
    """Set a tree to what jetson_clocks leaves: lowest limits as high as the highest, the memory's rate locked."""
    for side in ("min", "max", "cur"):
        write(root, f"sys/class/devfreq/{gpu}/{side}_freq", gpu_hz)
        write(root, f"{CPUFREQ}/policy*/scaling_{side}_freq", cpu_khz)
    write(root, "sys/kernel/debug/bpmp/debug/clk/emc/mrq_rate_locked", 1)


@pytest.mark.parametrize(
    ("mode", "held"),
    [
        # Lanner EAI-I233, L4T 36.4.3: notes of a benchmark, jetson_clocks --show in MODE_50W.
        ("MODE_50W", {GPU: 816_000_000, MEM: 3_199_000_000, CPU: 1_497_600_000}),
        # AGX Orin developer kit: notes of a thesis with jetson_clocks --show in MODE_30W, cores 0 to 7 online.
        ("MODE_30W", {GPU: 612_000_000, MEM: 3_199_000_000, CPU: 1_728_000_000}),
    ],
)
def test_modes_of_agx_orin_hold_what_boards_show(mode: str, held: Mapping[str, int], tmp_path: Path) -> None:
    """By NVIDIA's nvpmodel_p3701_0000.conf, and within one step without it, by the catalogue."""
    root = plant(AGX, tmp_path / "board")
    assert dict(device(root, *KNOBS).presets[mode]) == held
    (root / "etc/nvpmodel.conf").unlink()
    listed = device(root, *KNOBS).presets[mode.removeprefix("MODE_")]
    tables = {offer.knob.name: offer.knob.levels for offer in device(root, *KNOBS).offers()}
    for knob, level in held.items():
        assert abs(tables[knob].index(listed[knob]) - tables[knob].index(level)) <= 1


@pytest.mark.parametrize("mode", ["50W", pytest.param("MODE_50W", marks=pytest.mark.slow), "mode 50w"])
def test_a_preset_is_named_as_the_board_or_as_people_name_it(
    mode: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Boards say MODE_50W (NVIDIA's file, jetson_clocks --show), datasheets and the catalogue 50W: both are it."""
    root = quick(plant(AGX, tmp_path / "board", power_mode=0))
    with FakeKernel(root).installed():
        words = ["measure", "--device", f"jetson?root={root}", "--workload", "cmd:true", "--queries", "2", "--seconds"]
        assert run([*words, "0", "--preset", mode, "--json"]) == 0, capsys.readouterr().err
        assert json.loads(capsys.readouterr().out)["point"]["gpu_max_hz"] == 816_000_000
        # As a level of the knob it is the same word.
        point = ["--knobs", "power_mode", "--point", f"power_mode={mode}", "--json"]
        assert run([*words, "0", *point]) == 0, capsys.readouterr().err
        assert json.loads(capsys.readouterr().out)["point"]["power_mode"] == "MODE_50W"


def test_an_agx_orin_on_another_makers_carrier_is_known(tmp_path: Path) -> None:
    """Lanner EAI-I233, which its device tree is called: the module's number says what it is."""
    root = plant(AGX, tmp_path / "board")
    write(root, "proc/device-tree/model", "Lanner EAI-I233")
    write(root, "proc/device-tree/compatible", "lanner,eai-i233\0nvidia,p3701-0005\0nvidia,tegra234")
    board = device(root)
    assert board.entry is not None
    assert board.entry.name == "jetson-agx-orin"
    assert board.space.names


def test_a_module_is_what_its_number_says_and_not_what_its_tree_is_called(tmp_path: Path) -> None:
    """System information of an Orin Nano, L4T 36.4.4: its tree is called Orin NX; six cores, GPU up to 624.75 MHz."""
    root = plant("jetson-orin-nano", tmp_path / "board", power_mode=2)
    write(root, "proc/device-tree/model", "NVIDIA Jetson Orin NX Engineering Reference Developer Kit")
    write(root, "sys/class/devfreq/17000000.gpu/available_frequencies", "306000000 408000000 510000000 624750000")
    write(root, "sys/class/devfreq/17000000.gpu/max_freq", 624_750_000)
    board = device(root)
    assert board.entry is not None
    assert board.entry.name == "jetson-orin-nano"
    assert board.presets["MAXN_SUPER"][GPU] == 624_750_000


def test_a_board_under_jetson_clocks_says_how_to_free_it(tmp_path: Path) -> None:
    """The same AGX Orin after jetson_clocks: 612 to 612 MHz, 1728 to 1728, FreqOverride=1; it is measured still."""
    root = plant(AGX, tmp_path / "board", power_mode=2)
    pinned(root, "17000000.gpu", 612_000_000, 1_728_000)
    board = device(root)
    for knob in KNOBS:
        found = finding(board, knob)
        assert not found.works
        assert "jetson_clocks --restore" in found.remedy
    assert "1728 MHz" in finding(board, CPU).explanation
    with board:
        before = board.read()
        board.clock.sleep(1.0)
        assert board.read().energy_j > before.energy_j


def test_a_thor_under_jetson_clocks_is_the_same(tmp_path: Path) -> None:
    """A Thor kit in MAXN (guide to large models on it): gpu-gpc-0 1575 MHz, CPU 2601, EMC 4266 with FreqOverride=1."""
    root = plant("jetson-thor", tmp_path / "board", power_mode=0)
    pinned(root, "gpu-gpc-0", 1_575_000_000, 2_601_000)
    board = device(root)
    assert not any(finding(board, knob).works for knob in KNOBS)
    assert all("jetson_clocks --restore" in finding(board, knob).remedy for knob in KNOBS)


def test_a_mode_that_leaves_a_processor_no_choice_says_so(tmp_path: Path) -> None:
    """AGX Xavier in its 15W: least and most are 1200000 kHz (nvpmodel_t194.conf, LineageOS galen), held as 1190.4."""
    root = plant(XAVIER, tmp_path / "board")
    found = finding(device(root), CPU)
    assert not found.works
    assert "equal" in found.explanation
    assert "another power mode" in found.remedy
    assert finding(device(root), MEM).works


def test_the_nano_in_5w_is_as_jetson_stats_has_it(tmp_path: Path) -> None:
    """jetson_clocks --show in jetson_stats: two cores, 921.6 to 921.6 MHz, GPU 76.8 to 614.4 MHz, FreqOverride=0."""
    root = plant(NANO, tmp_path / "board", power_mode=1)
    for side in ("min", "max"):
        write(root, f"{CPUFREQ}/policy0/scaling_{side}_freq", 921_600)
    board = device(root)
    assert finding(board, GPU).explanation.startswith("8 levels, 76.8 MHz to 614.4 MHz")
    assert not finding(board, CPU).works
    assert "614.4" in finding(board, "range").explanation


def test_the_first_core_counts_though_the_file_does_not_list_it(tmp_path: Path) -> None:
    """nvpmodel_t186.conf (LineageOS quill; a blog of 2017) names cores 1 to 5: MAXN has six online, MAXQ four."""
    root = plant(TX2, tmp_path / "board")
    file = PowerModes.parse((root / "etc/nvpmodel.conf").read_text())
    assert {mode.name: file.cores(mode) for mode in file.modes}["MAXN"] == 6
    assert {mode.name: file.cores(mode) for mode in file.modes}["MAXQ"] == 4
    board = device(root, MODE, GPU)
    assert {point[MODE] for point in board.space} == {"MAXN", "MAXQ", "MAXP_CORE_ALL", "MAXP_CORE_ARM"}


def test_a_mode_for_cores_that_a_board_lacks_is_not_offered(tmp_path: Path) -> None:
    """Orin NX 8 GB, six cores, 25W (notes on an Ouster OS1, CTI Hadron): MAXN ends with NVPM ERROR cpu6/online."""
    root = plant("jetson-orin-nx", tmp_path / "board", power_mode=3)
    conf = root / "etc/nvpmodel/nvpmodel_p3767_0000.conf"
    before, mode, after = conf.read_text().partition("< POWER_MODEL ID=3")
    conf.write_text(before + mode + after.replace("CPU_ONLINE CORE_6 1\n", "").replace("CPU_ONLINE CORE_7 1\n", ""))
    assert "MAXN allows" in finding(device(root), "range").explanation
    for core in ("cpu6", "cpu7"):
        shutil.rmtree(root / "sys/devices/system/cpu" / core)
    board = device(root)
    told = finding(board, MODE)
    assert "MAXN (switches on cpu6 and cpu7, which this board does not have)" in f"{told.explanation} {told.remedy}"
    assert not any("MAXN" in each.explanation for each in board.findings() if each.subject == "range")
    assert board.presets["25W"][CPU] == 1_497_600_000


def test_a_mode_that_gates_parts_of_the_gpu_is_not_offered_on_orin_nano(tmp_path: Path) -> None:
    """A study on an Orin Nano Super: 7W prints "Reboot required", 15W, 25W and MAXN switch live; its mask is 252."""
    root = plant("jetson-orin-nano", tmp_path / "board", power_mode=2)
    assert "7W (needs a reboot)" in finding(device(root), MODE).explanation
    assert {point[MODE] for point in device(root, MODE).space} == {"15W", "25W", "MAXN_SUPER"}


def test_thors_two_lower_modes_need_a_reboot_by_the_mask_of_their_gpu(tmp_path: Path) -> None:
    """A characterization of an AGX Thor: mask 64 in MAXN and 120W, 15873 in 90W and 70W, of 12 cores each."""
    root = plant("jetson-thor", tmp_path / "board", power_mode=0)
    told = finding(device(root), MODE).explanation
    assert "90W (needs a reboot), 70W (needs a reboot)" in told
    assert {point[MODE] for point in device(root, MODE).space} == {"120W", "MAXN"}
    file = PowerModes.parse((root / "etc/nvpmodel.conf").read_text())
    assert [file.cores(mode) for mode in file.modes] == [14, 14, 12, 12]


@pytest.mark.parametrize(
    "said",
    [
        "NVPM WARN: Reboot required for changing to this power mode: 2\n"
        "NVPM WARN: DO YOU WANT TO REBOOT NOW? enter YES/yes to confirm:\n"
        "NVPM ERROR: bad input!\nNVPM ERROR: optMask is 1, no request for power mode",
        "NVPM WARN: Golden image context is already created\n"
        "NVPM WARN: Reboot required for changing to this power mode: 1\n"
        "NVPM WARN: DO YOU WANT TO REBOOT NOW? enter YES/yes to confirm:",
    ],
)
def test_what_nvpmodel_says_before_a_reboot_is_one_line(said: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Words of an AGX Thor and of an AGX Orin that nobody answers: nothing was switched, whatever the exit status."""
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    for status in (0, 255):
        with pytest.raises(KnobRejected, match=r"power mode 2 takes a reboot, so it was not switched to$"):
            Nvpmodel(lambda words, status=status: (status, said)).write("nvpmodel:/", "2")


CURRENT = """
< PARAM TYPE=CLOCK NAME=CPU_DENVER_0 >
MAX_FREQ /sys/devices/system/cpu/cpu0/cpufreq/scaling_max_freq
< PARAM TYPE=CLOCK NAME=GPU >
MAX_FREQ /sys/devices/17000000.gv11b/devfreq/17000000.gv11b/max_freq
< PARAM TYPE=CLOCK NAME=EMC >
MAX_FREQ /sys/kernel/nvpmodel_emc_cap/emc_iso_cap
< PARAM TYPE=HWMON NAME=VDDIN_OC_LIMIT >
WARN /sys/devices/platform/c250000.i2c/i2c-7/7-0040/hwmon curr1_max
CRIT /sys/devices/platform/c250000.i2c/i2c-7/7-0040/hwmon curr1_crit
< POWER_MODEL ID=2 NAME=MODE_15W_6CORE >
CPU_DENVER_0 MAX_FREQ 1420800
GPU MAX_FREQ 1109250000
EMC MAX_FREQ 1600000000
VDDIN_OC_LIMIT WARN 3000
VDDIN_OC_LIMIT CRIT 5000
< POWER_MODEL ID=4 NAME=MODE_10W_4CORE >
CPU_DENVER_0 MAX_FREQ 1190400
GPU MAX_FREQ 803250000
EMC MAX_FREQ 1600000000
VDDIN_OC_LIMIT WARN 3000
VDDIN_OC_LIMIT CRIT 5000
< POWER_MODEL ID=8 NAME=MODE_20W_6CORE >
CPU_DENVER_0 MAX_FREQ 1420800
GPU MAX_FREQ 1109250000
EMC MAX_FREQ 1866000000
VDDIN_OC_LIMIT WARN 4000
VDDIN_OC_LIMIT CRIT 5000
< PM_CONFIG DEFAULT=5 >
"""
"""The words of a Xavier NX's file of 2022 (dev10110/gatekeeper-exp-xavier, nvpmodel.conf), three of its nine modes."""


@pytest.mark.parametrize(
    ("present", "offered", "said"),
    [
        (8, {"MODE_10W_4CORE", "MODE_15W_6CORE", "MODE_20W_6CORE"}, ""),
        (2, {"MODE_10W_4CORE", "MODE_15W_6CORE"}, "raise"),
    ],
)
def test_a_current_limit_takes_no_reboot_and_is_not_raised(
    present: int, offered: set[str], said: str, tmp_path: Path
) -> None:
    """dev10110/gatekeeper-exp-xavier: 20W sets another limit of VDD_IN's current; from 15W that would raise it."""
    root = plant("jetson-xavier-nx", tmp_path / "board")
    (root / "etc/nvpmodel/nvpmodel_t194_p3668.conf").write_text(CURRENT)
    write(root, "var/lib/nvpmodel/status", f"pmode:{present:04d}")
    write(root, "sys/kernel/nvpmodel_emc_cap/emc_iso_cap", 1_866_000_000 if present == 8 else 1_600_000_000)
    found = finding(device(root), MODE)
    assert found.works
    assert {point[MODE] for point in device(root, MODE).space} == offered
    assert ("would raise VDDIN_OC_LIMIT WARN above what was found" in found.explanation) == bool(said)
    assert "reboot" not in found.explanation


def test_a_board_that_was_never_switched_is_in_the_mode_it_starts_in(tmp_path: Path) -> None:
    """A freshly flashed Orin Nano Super has no status file (a public test of a script for modes): DEFAULT counts."""
    root = plant("jetson-orin-nano", tmp_path / "board")
    told = finding(device(root), "range")
    (root / "var/lib/nvpmodel/status").unlink()
    assert finding(device(root), "range") == told
    assert told.explanation.startswith("in 25W the GPU stops at 918 MHz and the CPU stops at 1344 MHz; MAXN_SUPER")
    root = plant("jetson-orin-nano", tmp_path / "free", power_mode=2)
    conf = root / "etc/nvpmodel/nvpmodel_p3767_0003_super.conf"
    conf.write_text(conf.read_text().replace("DEFAULT=1", "DEFAULT=2"))
    (root / "var/lib/nvpmodel/status").unlink()
    kernel = FakeKernel(root)
    before = kernel.snapshot()
    with kernel.installed(), device(root, MODE) as board:
        board.apply(OperatingPoint({MODE: "15W"}))
        assert kernel.snapshot() != before
    assert kernel.snapshot() == before


def test_the_note_of_a_mode_may_have_a_second_line(tmp_path: Path) -> None:
    """pmode:0001 above fmode:fanmode_quiet (the same test, of a board with a mode of its fan)."""
    file = tmp_path / "var/lib/nvpmodel/status"
    file.parent.mkdir(parents=True)
    file.write_text("pmode:0001\nfmode:fanmode_quiet\n")
    assert Nvpmodel().read(f"nvpmodel:{tmp_path}") == "1"


OLD = """
# MAXN is the NONE power model to release all constraints
< POWER_MODEL ID=0 NAME=MAXN >
/sys/devices/system/cpu/cpu1/online 1
/sys/devices/17000000.gp10b/devfreq/17000000.gp10b/max_freq 1300500000
< POWER_MODEL ID=1 NAME=MAXQ >
/sys/devices/system/cpu/cpu1/online 0
/sys/devices/17000000.gp10b/devfreq/17000000.gp10b/max_freq 850000000
< PM_CONFIG DEFAULT=3 >
"""
"""The form of a TX2's file in July 2017 (hoony9x's notes on NVPModel), before parameters had names."""


def test_modes_in_a_form_that_is_not_read_are_not_taken_for_modes_without_limits(tmp_path: Path) -> None:
    """hoony9x's notes of 2017: presets come from the catalogue then, and none of them is a MAXQ without a limit."""
    root = plant(TX2, tmp_path / "board")
    (root / "etc/nvpmodel/nvpmodel_t186.conf").write_text(OLD)
    board = device(root)
    assert "names no mode" in finding(board, MODE).explanation
    assert "devices/jetson-tx2.toml" in finding(board, "presets").explanation
    assert board.presets["MAXQ"][GPU] == 854_250_000


def test_a_channel_without_a_label_is_no_rail(tmp_path: Path) -> None:
    """jetson_orin's tests, after an AGX Orin on L4T 39.2.0: one channel of the second INA3221 has no label."""
    root = plant("jetson-agx-orin-jp7", tmp_path / "board")
    before = finding(device(root), "energy").explanation
    for label in root.glob("sys/class/hwmon/hwmon*/in1_label"):
        if label.read_text().strip() == "NC":
            label.unlink()
    assert finding(device(root), "energy").explanation == before
    assert "VDDQ_VDD2_1V8AO" in before


@pytest.mark.parametrize(
    ("first", "release", "jetpack"),
    [
        # Environment log of an AGX Orin; tests of jetson_thor, after a Thor kit; system information of an Orin Nano.
        ("# R39 (release), REVISION: 2.0, GCID: 45755727, BOARD: generic, EABI: aarch64", "39.2.0", "7.2"),
        ("# R38 (release), REVISION: 2.2, GCID: 42205042, BOARD: generic, EABI: aarch64", "38.2.2", "7.0 or 7.1"),
        ("# R36 (release), REVISION: 4.4, GCID: 41062509, BOARD: generic, EABI: aarch64", "36.4.4", "6.2.1"),
    ],
)
def test_releases_are_read_as_boards_write_them(first: str, release: str, jetpack: str, tmp_path: Path) -> None:
    """The first line counts; KERNEL_VARIANT: oot and TARGET_USERSPACE_LIB_DIR follow it."""
    root = plant(AGX, tmp_path / "board")
    more = "# KERNEL_VARIANT: oot\nTARGET_USERSPACE_LIB_DIR=nvidia\n"
    (root / "etc/nv_tegra_release").write_text(f"{first}, DATE: Mon Jun  1 09:28:48 PM UTC 2026\n{more}")
    board = BoardId.read(device(root)._tree)
    assert (board.release, board.jetpack) == (release, jetpack)


def test_a_thor_without_a_label_of_its_ina238_is_measured_all_the_same(tmp_path: Path) -> None:
    """jetson_thor's tests: hwmon4 is ina238, label VIN, power1_input 20986000; without its label it is VIN too."""
    root = plant("jetson-thor", tmp_path / "board")
    chip = next(
        each.parent for each in root.glob("sys/class/hwmon/hwmon*/name") if each.read_text().strip() == "ina238"
    )
    write(root, f"{chip.relative_to(root)}/power1_input", 20_986_000)
    told = finding(device(root), "energy").explanation
    assert told.startswith("VIN (")
    (chip / "label").unlink()
    assert finding(device(root), "energy").explanation == told
    sampler = device(root)._sampler
    assert sampler is not None
    assert sampler._power_w() == pytest.approx(20.986)


def test_a_sensor_without_a_label_that_is_no_ina238_is_not_the_input_of_the_kit(tmp_path: Path) -> None:
    """A carrier may have an INA226 of its own anywhere (lm-sensors names it by its driver): it is one rail more."""
    root = plant("jetson-thor-carrier", tmp_path / "board")
    own = root / "sys/class/hwmon/hwmon9"
    own.mkdir()
    (own / "name").write_text("ina226\n")
    (own / "power1_input").write_text("3300000\n")
    assert "ina226" in {rail.name for rail in find_rails(device(root)._tree)}
    assert not finding(device(root), "energy").explanation.startswith("VIN")


def test_memory_rates_are_the_names_of_its_timing_tables_where_nothing_lists_them(tmp_path: Path) -> None:
    """As public programs for an Orin Nano and an AGX Xavier take them: kHz, below bpmp/debug/emc/tables/regular."""
    root = plant("jetson-orin-nano", tmp_path / "board")
    rates = root / "sys/kernel/debug/bpmp/debug/emc"
    (rates / "possible_rates").unlink()
    for khz in (204_000, 2_133_000, 3_199_000):
        (rates / f"tables/regular/{khz}").mkdir(parents=True)
    knob = device(root, "mem_hz").space.knob("mem_hz")
    assert knob.levels == (204_000_000, 2_133_000_000, 3_199_000_000)


def test_a_card_that_takes_more_than_it_begins_with_is_never_given_more(tmp_path: Path) -> None:
    """nvidia-smi -q of an RTX 4090: limits of 150 to 600 W, 450 by default, which is the top of what is searched."""
    if compiler() is None:
        pytest.skip("no C compiler to build the stand-in for NVIDIA's library with")
    with FakeNvml(tmp_path / "nvml", ["rtx4090"]) as fake:
        levels = open_device("nvml:0").space.knob("power_limit_w").levels
        assert (levels[0], levels[-1]) == (150, 450)
        (found,) = record("nvml:0")
        assert found.counts["contradicts"] == 0
        assert not fake.log()


def test_a_limit_that_the_module_holds_lower_is_said(tmp_path: Path) -> None:
    """nvidia-smi -q of a GH200, driver 550.127.05: 900 W requested, 700 enforced; limits between are not offered."""
    if compiler() is None:
        pytest.skip("no C compiler to build the stand-in for NVIDIA's library with")
    with FakeNvml(tmp_path / "nvml", ["gh200"]) as fake:
        fake.set(0, outer_limit_mw=700_000)
        gpu = open_device("nvml:0")
        levels = gpu.space.knob("power_limit_w").levels
        assert [level for level in levels if float(level) > 700] == [900]
        assert any("700 W are enforced from outside" in each.explanation for each in findings_of(gpu))


def table(first_mhz: float, last_mhz: float, step_mhz: float = 15) -> tuple[int, ...]:
    """Return clocks as a driver lists them, in whole megahertz, descending: 3090, 3082, 3075 in steps of 7.5."""
    return tuple(int(last_mhz - step_mhz * place) for place in range(round((last_mhz - first_mhz) / step_mhz) + 1))


def card(like: str, name: str, limits_w: tuple[int, int, int], memories: Mapping[int, tuple[int, ...]]) -> GpuModel:
    """Return a card of a record: lowest, usual and highest limit, and the clocks it lists; the rest of one like it."""
    lowest, usual, highest = (watts * 1000 for watts in limits_w)
    limits = {"limit_min_mw": lowest, "limit_default_mw": usual, "limit_max_mw": highest}
    return replace(MODELS[like], name=name, clocks_mhz=tuple(memories.items()), **limits)


AMPERE = table(210, 2100)
TWELVES = tuple(round(1721 - place * (1721 - 139) / 125) for place in range(126))
ADA = table(210, 3105)
BLACKWELL = table(180, 3090, 7.5)
THREE_PLUS_IDLE = {"architecture": 7, "compute_major": 8, "compute_minor": 6}


@pytest.mark.parametrize(
    ("gpu", "found_w", "clocks", "memories", "limits_w"),
    [
        # nvidia-smi -q -x in the tests of influxdata/telegraf (plugins/inputs/nvidia_smi/testdata), by file.
        pytest.param(  # rtx-3090-v12.xml: driver 525.147.05, limited to 200 W by its owner, 350 by default
            replace(
                card(
                    "rtx4090",
                    "NVIDIA GeForce RTX 3090",
                    (100, 350, 375),
                    {**dict.fromkeys((9751, 9501, 5001, 810), AMPERE), 405: table(210, 420)},
                ),
                compute_memory_mhz=9501,
                **THREE_PLUS_IDLE,
            ),
            200,
            (210, 2100),
            (5001, 9751),
            (100, 200),
            id="rtx-3090",
        ),
        pytest.param(  # rtx-3080-v12.xml: driver 536.40, 336 W asked for where 320 are usual
            replace(
                card(
                    "rtx4090",
                    "NVIDIA GeForce RTX 3080",
                    (100, 320, 336),
                    {**dict.fromkeys((9501, 9251, 5001, 810), AMPERE), 405: table(210, 420)},
                ),
                compute_memory_mhz=9251,
                **THREE_PLUS_IDLE,
            ),
            336,
            (210, 2100),
            (5001, 9501),
            (100, 336),
            id="rtx-3080",
        ),
        pytest.param(  # rtx-4000-sff-ada-v13.xml: driver 595.84, a card of 70 W
            replace(
                card(
                    "rtx4090",
                    "NVIDIA RTX 4000 SFF Ada Generation",
                    (30, 70, 70),
                    {**dict.fromkeys((7001, 6801, 5001, 810), ADA), 405: table(210, 405)},
                ),
                compute_memory_mhz=6801,
            ),
            70,
            (225, 3105),
            (5001, 7001),
            (30, 70),
            id="rtx-4000-sff-ada",
        ),
        pytest.param(  # pro-6000-maxq-blackwell-v13.xml: driver 590.44.01; its middle memory clock was not looked up
            replace(
                card(
                    "rtx5090",
                    "NVIDIA RTX PRO 6000 Blackwell Max-Q Workstation Edition",
                    (250, 300, 325),
                    {**dict.fromkeys((14001, 13365, 7001, 810), BLACKWELL), 405: table(180, 885, 7.5)},
                ),
                compute_memory_mhz=13365,
            ),
            300,
            (210, 3090),
            (7001, 14001),
            (250, 300),
            id="rtx-pro-6000-max-q",
        ),
        pytest.param(  # a10g.xml: driver 515.105.01; memory of 6251 MHz, and of 405 to rest
            card("a40", "NVIDIA A10G", (100, 300, 300), {6251: table(210, 1710), 405: table(210, 420)}),
            300,
            (225, 1710),
            (),
            (100, 300),
            id="a10g",
        ),
        pytest.param(  # tesla-t4.xml: driver 515.105.01; Turing's memory cannot be locked, and runs at 5000 of 5001 MHz
            replace(
                card("v100", "Tesla T4", (60, 70, 70), {5001: table(300, 1590), 405: table(300, 645)}),
                architecture=6,
                compute_minor=5,
            ),
            70,
            (300, 1590),
            (),
            (60, 70),
            id="t4",
        ),
        pytest.param(  # quadro-p2000-v12.xml: driver 525.125.06; Pascal locks nothing, and its limit is 75 to 75 W
            replace(
                card("v100", "Quadro P2000", (75, 75, 75), dict.fromkeys((3504, 810), TWELVES)),
                architecture=4,
                compute_major=6,
                compute_minor=1,
                has_gpu_lock=0,
                has_energy=0,
            ),
            75,
            (),
            (),
            (),
            id="p2000",
        ),
        pytest.param(  # gtx-1660-ti.xml: driver 418.43; supported clocks N/A, limits all the same
            replace(
                card("laptop", "GeForce GTX 1660 Ti", (70, 130, 130), {4001: table(300, 2145)}),
                architecture=6,
                has_power_limit=1,
                has_energy=1,
            ),
            130,
            (),
            (),
            (70, 130),
            id="gtx-1660-ti",
        ),
    ],
)
def test_cards_as_nvidia_smi_shows_them(
    gpu: GpuModel, found_w: int, clocks: Sequence[int], memories: Sequence[int], limits_w: Sequence[int], tmp_path: Path
) -> None:
    """First and last of each knob are those of the record; what the driver does not have is off, and nothing written.

    Memory that idles (405, 810 MHz) and the level under the highest, in which CUDA runs, are not searched.
    """
    if compiler() is None:
        pytest.skip("no C compiler to build the stand-in for NVIDIA's library with")
    with FakeNvml(tmp_path / "nvml", [gpu]) as fake:
        fake.set(0, power_limit_mw=found_w * 1000, load_permille=500)
        device = NvmlDevice("0", clock=fake.clock())
        expected = {"gpu_max_hz": clocks, "mem_hz": memories, "power_limit_w": limits_w}
        knobs = {knob.name: (knob.levels[0], knob.levels[-1]) for knob in device.space.knobs}
        unit = {"gpu_max_hz": 10**6, "mem_hz": 10**6, "power_limit_w": 1}
        assert knobs == {name: tuple(end * unit[name] for end in ends) for name, ends in expected.items() if ends}
        before = fake.snapshot()
        with device:
            device.apply(device.space.default)
            first = device.read()
            device.clock.sleep(0.3)
            assert device.read().energy_j >= first.energy_j
        assert all(each.explanation for each in findings_of(device))
        assert fake.snapshot() == before
        assert not fake.log()


def test_a_gpu_whose_mig_is_on_is_refused_with_the_way_out(tmp_path: Path) -> None:
    """a100-sxm4-v12.xml (influxdata/telegraf): four instances on an A100-SXM4-80GB, limits of 100 to 500 W."""
    if compiler() is None:
        pytest.skip("no C compiler to build the stand-in for NVIDIA's library with")
    gpu = card("a100-mig", "NVIDIA A100-SXM4-80GB", (100, 500, 500), {1593: table(210, 1410)})
    with (
        FakeNvml(tmp_path / "nvml", [gpu]),
        pytest.raises(DeviceError, match=r"split by MIG.*nvidia-smi -i GPU-.* -mig 0"),
    ):
        open_device("nvml:0")
