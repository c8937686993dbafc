import errno
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from polythrottle.actuation import SysFiles, SystemControls
from polythrottle.backends.jetson.power_modes import nearest
from polythrottle.catalog import load_board
from polythrottle.domain.backports import tomllib
from polythrottle.domain.errors import DeviceError, InvalidInput, KnobRejected, StorageError, UnknownName
from polythrottle.testing import BOARDS, FakeKernel, Fault, plant, reboot
from polythrottle.testing.__main__ import main
from polythrottle.testing.boards import UNMETERED, assumptions
from polythrottle.testing.boards import described as planted_as
from polythrottle.testing.kernel.machine import Machine
from polythrottle.testing.kernel.rules import force_limits, memory_levels, memory_rate

DESCRIPTIONS = Path(sys.modules["polythrottle.testing.boards"].__file__ or "").parent
CLK, CPU = "sys/kernel/debug/bpmp/debug/clk", "sys/devices/system/cpu"
GPUS = (".gpu", ".gp10b", ".gv11b", ".ga10b", "gpu-gpc-0", "devfreq0")
Make = Callable[..., FakeKernel]


@pytest.fixture
def make(tmp_path: Path) -> Make:
    """Return a function that plants a board and returns its kernel."""

    def planted(name: str = "jetson-agx-orin-jp6", mode: int = 0) -> FakeKernel:
        return FakeKernel(plant(name, tmp_path / name, power_mode=mode))

    return planted


def described(name: str) -> dict[str, object]:
    """Return a description as its own file has it."""
    return tomllib.loads((DESCRIPTIONS / f"{name}.toml").read_text())


def gpu(kernel: FakeKernel) -> Path:
    """Return the folder of the GPU's limits."""
    for path in sorted((kernel.root / "sys/class/devfreq").iterdir()):
        if path.name.endswith(GPUS):
            return path
    raise AssertionError("no GPU")


def number(path: Path) -> int:
    """Return the number a file holds."""
    return int(path.read_text())


def refused(kernel: FakeKernel, path: Path | str, text: str) -> str:
    """Return the name of the error a write ends with, or ok."""
    try:
        kernel.write(str(path), text)
    except OSError as err:
        return errno.errorcode[err.errno or 0]
    return "ok"


def clocks(path: Path) -> list[int]:
    """Return the numbers of a table."""
    return sorted(map(int, path.read_text().split()))


# The boards


def test_every_family_is_there() -> None:
    """Each family in devices/ has a tree, but for TX2's siblings; AGX Orin one for each JetPack it has known."""
    devices = {path.stem for path in (DESCRIPTIONS.parents[2] / "devices").glob("jetson-*.toml")}
    trees = {str(described_device(name)) for name in (*BOARDS, *UNMETERED)}
    assert trees == devices - {"jetson-tx2i", "jetson-tx2-4gb"}
    assert {name for name in BOARDS if "agx-orin-jp" in name} == {f"jetson-agx-orin-jp{major}" for major in (5, 6, 7)}


@pytest.mark.parametrize("name", BOARDS)
def test_every_board_says_who_it_is(make: Make, name: str) -> None:
    """SoC last in compatible, a model, a release, a power mode, CPU policies and at least one decoy among devfreq."""
    root = make(name).root
    compatible = (root / "proc/device-tree/compatible").read_bytes().rstrip(b"\0").split(b"\0")
    assert compatible[-1].startswith(b"nvidia,tegra")
    assert (root / "proc/device-tree/model").read_bytes().endswith(b"\0")
    assert (root / "etc/nv_tegra_release").read_text().startswith("# R3")
    assert (root / "var/lib/nvpmodel/status").read_text().startswith("pmode:0000")
    assert (root / CPU / "cpufreq/policy0/scaling_max_freq").exists()
    assert len(list((root / "sys/class/devfreq").iterdir())) >= 2


@pytest.mark.parametrize("name", BOARDS)
def test_tables_are_those_of_the_catalogue_or_say_why_not(make: Make, name: str) -> None:
    """GPU, memory and CPU clocks are the levels in devices/; another table names its source."""
    kernel, board = make(name), load_board(str(described_device(name)))
    policy = kernel.root / CPU / "cpufreq/policy0/scaling_available_frequencies"
    tables = {
        "gpu": ("gpu_max_hz", clocks(gpu(kernel) / "available_frequencies")),
        "cpu": ("cpu_max_hz", [khz * 1000 for khz in clocks(policy)]),
        "emc": ("mem_hz", memory_levels(Machine(kernel.root))),
    }
    for part, (knob, table) in tables.items():
        own = planted_as(name)[part]
        if own.keys() & {"levels_mhz", "step_khz"}:
            assert own["source"]
            assert table != list(board.knob(knob).levels)
        else:
            assert table == list(board.knob(knob).levels)


def test_the_list_of_memory_rates_is_where_and_as_records_have_it(make: Make) -> None:
    """Beside the clock's folder, in kHz with its unit at the end; on Thor a table with a rate a line (clocks.py)."""
    orin, thor = make("jetson-orin-nx").root, make("jetson-thor").root
    assert (orin / CLK).parent.joinpath("emc/possible_rates").read_text() == "204000 665600 2133000 3199000 (kHz)\n"
    assert not (orin / CLK / "emc/possible_rates").exists()
    assert [line.split()[1] for line in (thor / CLK / "emc/dvfs").read_text().splitlines()][-1] == "4266000000"


def test_thor_s_memory_is_held_only_while_its_bandwidth_manager_is_halted(make: Make) -> None:
    """The lock alone is not enough: state and halt are written beside it, as public sweeps of Thor do."""
    kernel = make("jetson-thor")
    emc, halt = kernel.root / CLK / "emc", kernel.root / CLK / "../bwmgr/bwmgr_halt"
    governed = number(emc / "rate")
    kernel.write(f"{emc}/mrq_rate_locked", "1")
    kernel.write(f"{emc}/rate", "665600000")
    assert number(emc / "rate") == governed
    kernel.write(f"{emc}/state", "1")
    kernel.write(str(halt), "1")
    kernel.write(f"{emc}/rate", "665600000")
    assert number(emc / "rate") == 665600000
    assert refused(kernel, halt, "yes") == "EINVAL"


def described_device(name: str) -> object:
    """Return the catalogue's name of a board, which a description may take over from another."""
    own = described(name)
    return own["device"] if "device" in own else described_device(str(own["extends"]))


MODES = {
    (name, int(mode["id"]), str(mode["name"]))
    for name in BOARDS
    if not name.endswith("nx-super")  # whose modes the catalogue does not have: its clocks end below them
    for mode in described(name).get("nvpmodel", {}).get("modes", ())  # type: ignore[attr-defined]
    if str(mode["name"]).removeprefix("MODE_") in load_board(str(planted_as(name)["device"])).presets
}


@pytest.mark.parametrize(("name", "number_", "title"), sorted(MODES))
def test_power_modes_end_on_the_presets_of_the_catalogue(make: Make, name: str, number_: int, title: str) -> None:
    """What nvpmodel leaves in the files is the preset of that name: its caps, rounded to the nearest step."""
    kernel = make(name, number_)
    board = load_board(str(described_device(name)))
    preset = board.presets[title.removeprefix("MODE_")]
    own = clocks(gpu(kernel) / "available_frequencies")
    assert number(gpu(kernel) / "max_freq") == min(own, key=lambda level: abs(level - int(preset["gpu_max_hz"])))
    held = number(kernel.root / CPU / "cpufreq/policy0/scaling_max_freq") * 1000
    assert nearest(board.knob("cpu_max_hz").levels, held) == preset["cpu_max_hz"]  # type: ignore[arg-type]
    new, old = (kernel.root / "sys/kernel" / each for each in ("nvpmodel_clk_cap/emc", "nvpmodel_emc_cap/emc_iso_cap"))
    levels = board.knob("mem_hz").levels
    cap = number(new if new.exists() else old) or int(levels[-1])
    assert nearest(levels, cap) == preset["mem_hz"]  # type: ignore[arg-type]


def test_what_no_record_shows_is_listed_as_assumed() -> None:
    """docs/hardware.md holds every part of every fake board that names no public record, or a record only in part."""
    told = (DESCRIPTIONS.parents[2] / "docs/hardware.md").read_text(encoding="utf-8")
    rows = [f"| {part} | {what} | {', '.join(boards)} |" for (part, what), boards in assumptions().items()]
    assert rows
    assert "\n".join(rows) in told, "docs/hardware.md should hold:\n" + "\n".join(rows)


def test_a_board_nobody_has_is_refused(tmp_path: Path) -> None:
    """An unknown name is answered with the known ones, a folder that holds something is left alone."""
    with pytest.raises(UnknownName, match="jetson-nano"):
        plant("jetson-nanoo", tmp_path / "tree")
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine/letter").touch()
    with pytest.raises(StorageError, match="not empty"):
        plant("jetson-nano", tmp_path / "mine")
    with pytest.raises(UnknownName, match="power mode"):
        plant("jetson-nano", tmp_path / "tree", power_mode=7)
    assert not (tmp_path / "tree").exists()
    with pytest.raises(DeviceError, match="no tree"):
        FakeKernel(tmp_path / "nowhere")


@pytest.mark.parametrize("name", BOARDS)
def test_links_stay_inside_the_tree(make: Make, name: str) -> None:
    """Every link leads somewhere, and nowhere else than into the tree, so that it can be moved."""
    root = make(name).root
    links = [path for path in root.rglob("*") if path.is_symlink()]
    assert links
    assert all(path.resolve(strict=True).is_relative_to(root) for path in links)
    assert not any(os.path.isabs(path.readlink()) for path in links)


def test_a_tree_of_unknown_origin_obeys_too(make: Make, tmp_path: Path) -> None:
    """A copy of a board's files is a board: limits and locks hold, only its rails stand still."""
    copied = tmp_path / "copied"
    shutil.copytree(make("jetson-tx2").root, copied, symlinks=True)
    kernel = FakeKernel(copied)
    still = rails(copied)
    kernel.write(f"{gpu(kernel)}/max_freq", "522750000")
    assert refused(kernel, gpu(kernel) / "min_freq", "624750000") == "EINVAL"
    kernel.work(0.0)
    assert (number(gpu(kernel) / "cur_freq"), rails(copied)) == (114750000, still)
    with pytest.raises(StorageError, match="not planted"):
        reboot(copied)


# GPU and CPU limits


def test_the_kernel_believes_its_files(make: Make) -> None:
    """A value put into a file behind its back counts, and is not undone by the next write."""
    kernel = make()
    low, high = gpu(kernel) / "min_freq", gpu(kernel) / "max_freq"
    kernel.write(str(high), "816000000")
    high.write_text("612000000\n")
    kernel.write(str(low), "408000000")
    assert (number(low), number(high)) == (408000000, 612000000)


def test_an_old_kernel_refuses_limits_that_cross(make: Make) -> None:
    """Before Linux 5.5 a minimum above the maximum, or a maximum below the minimum, is EINVAL and changes nothing."""
    kernel = make("jetson-tx2")
    low, high = gpu(kernel) / "min_freq", gpu(kernel) / "max_freq"
    kernel.write(str(high), "522750000")
    before = kernel.snapshot()
    assert refused(kernel, low, "624750000") == "EINVAL"
    assert kernel.snapshot() == before
    kernel.write(str(low), "522750000")
    assert refused(kernel, high, "420750000") == "EINVAL"
    kernel.write(str(high), "1300500000")
    kernel.write(str(low), "1300500000")
    assert (number(low), number(high)) == (1300500000, 1300500000)


def test_a_new_kernel_lets_the_minimum_give_way(make: Make) -> None:
    """Since Linux 5.5 limits that cross are taken without an error, and the minimum shows what holds."""
    kernel = make()
    low, high = gpu(kernel) / "min_freq", gpu(kernel) / "max_freq"
    kernel.write(str(high), "510000000")
    kernel.write(str(low), "816000000")
    assert (number(low), number(high)) == (510000000, 510000000)
    kernel.write(str(high), "1020000000")
    assert (number(low), number(high)) == (816000000, 1020000000)


@pytest.mark.parametrize("name", ["jetson-nano", "jetson-orin-nano", "jetson-thor"])
def test_a_clock_off_the_table_is_rounded_without_an_error(make: Make, name: str) -> None:
    """The GPU takes the step below, the lowest step below the table, the highest above it."""
    kernel = make(name)
    levels, high = clocks(gpu(kernel) / "available_frequencies"), gpu(kernel) / "max_freq"
    for asked, taken in ((levels[2] + 1, levels[2]), (levels[-1] * 2, levels[-1]), (levels[0], levels[0])):
        kernel.write(str(high), str(asked))
        assert number(high) == taken
    kernel.write(str(high), str(levels[0] - 1))
    assert number(high) == levels[0]
    assert refused(kernel, high, "fast") == "EINVAL"


def test_cpu_limits_round_towards_each_other(make: Make) -> None:
    """A CPU minimum off the table goes up, a maximum down, and a maximum below the minimum takes it along."""
    kernel = make()
    policy = kernel.root / CPU / "cpufreq/policy4"
    kernel.write(f"{policy}/scaling_min_freq", "800000")
    kernel.write(f"{policy}/scaling_max_freq", "1900000")
    assert (number(policy / "scaling_min_freq"), number(policy / "scaling_max_freq")) == (806400, 1881600)
    kernel.write(f"{policy}/scaling_max_freq", "576000")
    assert number(policy / "scaling_min_freq") == 576000
    assert number(kernel.root / CPU / "cpufreq/policy0/scaling_max_freq") == 2201600


def test_governors_come_from_their_list(make: Make) -> None:
    """A governor the file does not offer is EINVAL; performance runs at the maximum even without work."""
    kernel = make()
    kernel.work(0.0)
    assert number(gpu(kernel) / "cur_freq") == 306000000
    assert refused(kernel, gpu(kernel) / "governor", "turbo") == "EINVAL"
    kernel.write(f"{gpu(kernel)}/governor", "performance")
    assert number(gpu(kernel) / "cur_freq") == 1300500000
    assert refused(kernel, kernel.root / CPU / "cpufreq/policy0/scaling_governor", "nvhost_podgov") == "EINVAL"


def test_what_is_no_control_cannot_be_written(make: Make) -> None:
    """Readings and tables are read-only, what is not there is ENOENT, what lies outside the tree is out of reach."""
    kernel = make()
    assert refused(kernel, gpu(kernel) / "cur_freq", "1") == "EACCES"
    assert refused(kernel, gpu(kernel) / "available_frequencies", "1") == "EACCES"
    assert refused(kernel, kernel.root / "sys/class/thermal/thermal_zone0/temp", "1") == "EACCES"
    assert refused(kernel, gpu(kernel) / "no_freq", "1") == "ENOENT"
    assert refused(kernel, kernel.root.parent / "elsewhere", "1") == "EACCES"
    assert refused(kernel, gpu(kernel) / "device/tpc_pg_mask", "252") == "EBUSY"


# Memory


def test_the_memory_clock_moves_only_while_it_is_locked(make: Make) -> None:
    """BPMP drops a rate without a lock and one off its table without an error; unlocking gives it to the governor."""
    kernel = make()
    emc = kernel.root / CLK / "emc"
    kernel.write(f"{emc}/rate", "665600000")
    assert number(emc / "rate") == 2133000000
    kernel.write(f"{emc}/mrq_rate_locked", "1")
    kernel.write(f"{emc}/rate", "665600000")
    assert number(emc / "rate") == 665600000
    kernel.write(f"{emc}/rate", "665600001")
    assert number(emc / "rate") == 665600000
    kernel.write(f"{emc}/mrq_rate_locked", "0")
    assert number(emc / "rate") == 2133000000
    assert refused(kernel, emc / "mrq_rate_locked", "yes") == "EINVAL"
    assert refused(kernel, emc / "max_rate", "1") == "EACCES"


def test_a_new_cap_can_be_lowered_but_not_lifted(make: Make) -> None:
    """The cap of nvpmodel_clk_cap goes down a step, bounds rate locks, and does not come up again."""
    kernel = make()
    cap, emc = kernel.root / "sys/kernel/nvpmodel_clk_cap/emc", kernel.root / CLK / "emc"
    kernel.write(str(cap), "2500000000")
    assert number(cap) == 2133000000
    kernel.write(str(cap), "3199000000")
    assert number(cap) == 2133000000
    kernel.write(f"{emc}/mrq_rate_locked", "1")
    kernel.write(f"{emc}/rate", "3199000000")
    assert number(emc / "rate") == 2133000000
    assert refused(kernel, cap, "none") == "EINVAL"


def test_an_old_cap_holds_whatever_was_written(make: Make) -> None:
    """emc_iso_cap goes up and down, 0 is none, and a number off the table stays as it is."""
    kernel = make("jetson-xavier-nx")
    cap = kernel.root / "sys/kernel/nvpmodel_emc_cap/emc_iso_cap"
    for text in ("1331200001", "1866000000", "0"):
        kernel.write(str(cap), text)
        assert kernel.read(str(cap)) == text


def test_a_memory_clock_that_no_file_shows_draws_nothing(make: Make) -> None:
    """Its part of the power goes with it; until then it is that of the board."""
    machine = Machine(make().root)
    assert memory_rate(machine) in memory_levels(machine)
    (machine.root / CLK / "emc/rate").unlink()
    assert repr(memory_rate(machine)) == "0"


def test_a_nano_overrides_its_memory_clock(make: Make) -> None:
    """override.emc: the rate asked for holds while the state is 1, and not a moment longer."""
    kernel = make("jetson-nano")
    emc = kernel.root / "sys/kernel/debug/clk/override.emc"
    governed = number(emc / "clk_rate")
    kernel.write(f"{emc}/clk_update_rate", "408000000")
    assert number(emc / "clk_rate") == governed
    kernel.write(f"{emc}/clk_state", "1")
    assert number(emc / "clk_rate") == 408000000
    kernel.write(f"{emc}/clk_update_rate", "408000001")
    assert number(emc / "clk_rate") == 408000000
    kernel.write(f"{emc}/clk_state", "0")
    assert number(emc / "clk_rate") == governed


def test_thor_shows_its_memory_as_devfreq_too(make: Make) -> None:
    """The class has bwmgr beside two GPU folders, and BPMP clocks tell what the GPU really runs at."""
    kernel = make("jetson-thor")
    assert {"bwmgr", "gpu-gpc-0", "gpu-nvd-0"} <= {path.name for path in (kernel.root / "sys/class/devfreq").iterdir()}
    kernel.write(f"{gpu(kernel)}/max_freq", "1053000000")
    assert number(kernel.root / CLK / "gpu_gpc1/rate") == 1053000000
    assert number(kernel.root / "sys/class/devfreq/gpu-nvd-0/max_freq") == 1575000000


# Cores and power modes


def test_a_cluster_without_cores_has_no_clock(make: Make) -> None:
    """The first core stays; a policy's folder goes with its last core and comes back with its limits."""
    kernel = make()
    policy = kernel.root / CPU / "cpufreq/policy8"
    assert refused(kernel, kernel.root / CPU / "cpu0/online", "0") == "EBUSY"
    kernel.write(f"{policy}/scaling_max_freq", "1344000")
    before = kernel.snapshot()
    for cpu in (8, 9, 10, 11):
        kernel.write(f"{kernel.root / CPU}/cpu{cpu}/online", "0")
    assert not policy.exists()
    assert not (kernel.root / CPU / "cpu8/cpufreq").is_symlink()
    assert (kernel.root / CPU / "online").read_text() == "0-7\n"
    assert (kernel.root / CPU / "offline").read_text() == "8-11\n"
    kernel.write(f"{kernel.root / CPU}/cpu9/online", "1")
    assert number(policy / "scaling_max_freq") == 1344000
    assert (policy / "affected_cpus").read_text() == "9\n"
    for cpu in (8, 10, 11):
        kernel.write(f"{kernel.root / CPU}/cpu{cpu}/online", "1")
    assert kernel.snapshot() == before


def test_a_power_mode_rewrites_caps_and_its_status(make: Make) -> None:
    """Switching sets GPU, CPU and memory caps, notes itself, and going back lifts them; 7W, with its cores, reboots."""
    kernel = make("jetson-orin-nano", 2)
    mode, before = f"nvpmodel:{kernel.root}", kernel.snapshot()
    assert kernel.read(mode) == "2"
    kernel.write(mode, "0")
    assert (kernel.root / "var/lib/nvpmodel/status").read_text() == "pmode:0000\n"
    assert number(gpu(kernel) / "max_freq") == 612000000
    assert number(kernel.root / "sys/kernel/nvpmodel_clk_cap/emc") == 2133000000
    kernel.write(mode, "2")
    with pytest.raises(KnobRejected, match="takes a reboot"):
        kernel.write(mode, "3")
    assert kernel.snapshot() == before
    assert refused(kernel, mode, "9") == "EINVAL"
    assert refused(kernel, f"nvpmodel:{kernel.root}/etc", "1") == "ENOENT"


def test_a_mode_moves_one_limit_out_of_the_way_of_the_other(make: Make) -> None:
    """Only where they would cross: what nvpmodel ends up with, whatever it writes first."""
    kernel = make()
    machine, low, high = (
        Machine(kernel.root),
        *(f"/{gpu(kernel).relative_to(kernel.root)}/{end}_freq" for end in ("min", "max")),
    )
    force_limits(machine, low, "408000000")
    assert (machine.number(low), machine.number(high)) == (408000000, 1300500000)
    force_limits(machine, high, "306000000")
    assert (machine.number(low), machine.number(high)) == (306000000, 306000000)
    force_limits(machine, low, "612000000")
    assert (machine.number(low), machine.number(high)) == (612000000, 612000000)


def test_a_mode_that_powers_down_a_part_of_the_gpu_needs_a_reboot(make: Make) -> None:
    """Such a mode is refused and changes nothing; the board can start in it."""
    kernel = make("jetson-orin-nx", 2)
    before = kernel.snapshot()
    with pytest.raises(KnobRejected, match="reboot"):
        kernel.write(f"nvpmodel:{kernel.root}", "3")
    assert kernel.snapshot() == before
    assert kernel.writes()[-1].outcome == "refused"


def test_a_reboot_forgets_everything_but_the_power_mode(make: Make) -> None:
    """Limits are those of the mode again, the boot has its own id, and hwmon folders may have moved."""
    kernel = make("jetson-agx-orin-jp5", 3)
    before, boot = kernel.snapshot(), (kernel.root / "proc/sys/kernel/random/boot_id").read_text()
    kernel.write(f"{gpu(kernel)}/max_freq", "216750000")
    kernel.write(f"{kernel.root / CLK}/emc/mrq_rate_locked", "1")
    kernel.write(f"{kernel.root / CPU}/cpu11/online", "0")
    kernel.write(str(kernel.root / "sys/kernel/nvpmodel_clk_cap/emc"), "204000000")
    reboot(kernel.root, shift=1)
    assert kernel.snapshot() == before
    assert (kernel.root / "proc/sys/kernel/random/boot_id").read_text() != boot
    assert (kernel.root / "sys/class/hwmon/hwmon6/name").read_text() == "soctherm_oc\n"
    assert len(kernel.writes()) == 4


# Sensors


def rails(root: Path) -> dict[str, float]:
    """Return power by label in W, as a careful reader finds it."""
    found = {}
    for label in sorted(root.glob("sys/bus/iio/devices/*/rail_name_*")):
        index = label.name.rpartition("_")[2]
        found[label.read_text().strip()] = number(label.parent / f"in_power{index}_input") / 1e3
    for label in sorted(root.glob("sys/class/hwmon/*/in[1-6]_label")):
        index = label.name[2]
        volt, amp = (number(label.parent / f"{kind}{index}_input") / 1e3 for kind in ("in", "curr"))
        found[label.read_text().strip()] = volt * amp
    for chip in sorted(root.glob("sys/class/hwmon/*/power1_input")):
        found["VIN"] = number(chip) / 1e6
    return found


@pytest.mark.parametrize("name", BOARDS)
def test_power_follows_the_clocks(make: Make, name: str) -> None:
    """Every rail of the catalogue is there; a lower GPU clock lowers the total, and so does a pause."""
    kernel, board = make(name), load_board(str(described_device(name)))

    def total() -> float:
        found = rails(kernel.root)
        carrier = name == "jetson-thor-carrier"
        assert {*board.rails.names} - ({"VIN"} if carrier else set()) <= set(found)
        return sum(found[each] for each in (board.rails.otherwise if carrier else board.rails.total))

    full = total()
    assert 0.1 * board.power_max_w < full < 1.5 * board.power_max_w
    kernel.write(f"{gpu(kernel)}/max_freq", str(clocks(gpu(kernel) / "available_frequencies")[0]))
    slow = total()
    assert slow < full
    kernel.work(0.0)
    assert total() < slow


def test_there_are_rails_that_must_not_be_counted(make: Make) -> None:
    """AGX Orin has channels called NC and a sum of shunt voltages, TX2 rails of the carrier, Thor one below zero."""
    orin, tx2, thor = make(), make("jetson-tx2"), make("jetson-thor")
    assert rails(orin.root)["NC"] == 0
    assert list(orin.root.glob("sys/class/hwmon/*/in7_label"))
    assert {"VDD_MUX", "VDD_4V0_WIFI"} <= set(rails(tx2.root))
    thor.work(0.0)
    assert -0.1 < rails(thor.root)["VDD_GPU"] < 0
    assert (tx2.root / "sys/bus/i2c/drivers/ina3221x/0-0041/iio:device1/rail_name_0").read_text() == "VDD_IN\n"


def test_some_zones_never_answer(make: Make) -> None:
    """A cv zone gives EAGAIN, an empty file to who reads it bare; others tell millidegrees that rise with power."""
    kernel = make()
    zones = {(path / "type").read_text().strip(): path / "temp" for path in kernel.root.glob("sys/class/thermal/*")}
    with pytest.raises(BlockingIOError):
        kernel.read(str(zones["cv0-thermal"]))
    assert zones["cv0-thermal"].read_text() == ""
    hot = int(kernel.read(str(zones["tj-thermal"])))
    kernel.work(0.0)
    assert 25_000 < int(kernel.read(str(zones["tj-thermal"]))) < hot < 120_000


@pytest.mark.parametrize(("name", "switch"), [("jetson-orin-nano", "railgate_enable"), ("jetson-thor", "power")])
def test_a_sleeping_gpu_does_not_answer(make: Make, name: str, switch: str) -> None:
    """Its clocks and its zone give EAGAIN until its stay-awake switch is set."""
    kernel = make(name)
    kernel.doze()
    zone = next(path for path in kernel.root.glob("sys/class/thermal/*") if "gpu" in (path / "type").read_text())
    for path in (gpu(kernel) / "cur_freq", zone / "temp"):
        with pytest.raises(BlockingIOError):
            kernel.read(str(path))
    if switch == "power":
        kernel.write(str((gpu(kernel) / "device").resolve().parent / "power/control"), "on")
    else:
        kernel.write(f"{gpu(kernel)}/device/{switch}", "0")
    assert int(kernel.read(f"{gpu(kernel)}/cur_freq")) > 0
    assert int(kernel.read(f"{zone}/temp")) > 0


def test_over_current_is_counted(make: Make) -> None:
    """The counters are cumulative; a board without them says so."""
    kernel = make("jetson-agx-orin-jp7")
    counter = next(iter(kernel.root.glob("sys/class/hwmon/*/oc3_event_cnt")))
    kernel.throttle(3, 3)
    kernel.throttle(1, 3)
    kernel.throttle()
    assert number(counter) == 4
    assert number(counter.with_name("oc1_event_cnt")) == 1
    assert (counter.parent / "name").read_text() == "soctherm_oc\n"
    with pytest.raises(DeviceError, match="counts no"):
        make("jetson-tx2").throttle()


# Faults


@pytest.mark.parametrize("name", ["EAGAIN", "EBUSY", "EIO", "EINVAL", "ENOSPC", "ENODEV"])
def test_a_call_fails_where_it_is_told_to(make: Make, name: str) -> None:
    """The second write that matches ends with the error and changes nothing; those around it work."""
    kernel = make()
    low, high = gpu(kernel) / "min_freq", gpu(kernel) / "max_freq"
    kernel.fail(Fault(name, nth=2, match="*/max_freq"))
    outcomes = [refused(kernel, path, text) for path, text in ((high, "816000000"), (low, "408000000"))]
    outcomes += [refused(kernel, high, text) for text in ("510000000", "612000000")]
    assert outcomes == ["ok", "ok", name, "ok"]
    assert [each.outcome for each in kernel.writes()] == outcomes
    assert kernel.writes()[2].after == "816000000"


def test_a_fault_can_stay_and_be_healed(make: Make) -> None:
    """times=0 holds from then on, for reads too, until it is healed."""
    kernel = make()
    kernel.fail(Fault("EIO", nth=2, on="read", times=0))
    assert kernel.read(f"{gpu(kernel)}/max_freq")
    for _ in range(3):
        with pytest.raises(OSError, match="Input/output"):
            kernel.read(f"{gpu(kernel)}/max_freq")
    kernel.heal()
    assert kernel.read(f"{gpu(kernel)}/max_freq")


def test_values_are_rounded_or_ignored_where_told(make: Make) -> None:
    """Act round takes the step below or a given text, ignore keeps what was there; neither is an error."""
    kernel = make()
    high = gpu(kernel) / "max_freq"
    kernel.fail(Fault("round"), Fault("round", nth=2, value="408000000"), Fault("ignore", nth=3))
    held = []
    for text in ("816000000", "816000000", "1020000000", "1020000000"):
        kernel.write(str(high), text)
        held.append(number(high))
    assert held == [714000000, 408000000, 408000000, 1020000000]


def test_files_vanish_and_folders_are_renumbered(make: Make) -> None:
    """A file is gone at a given read; an hwmon folder has another name from a given read on."""
    kernel = make()
    kernel.fail(Fault("vanish", on="read", match="*/min_freq"))
    with pytest.raises(FileNotFoundError):
        kernel.read(f"{gpu(kernel)}/min_freq")
    kernel.fail(Fault("renumber", on="read", path="/sys/class/hwmon/hwmon2", value="hwmon8"))
    with pytest.raises(FileNotFoundError):
        kernel.read(f"{kernel.root}/sys/class/hwmon/hwmon2/in1_label")
    assert kernel.read(f"{kernel.root}/sys/class/hwmon/hwmon8/in1_label") == "VDD_GPU_SOC"
    kernel.work(0.1)
    kernel.renumber("/sys/class/hwmon/hwmon8", "hwmon1")
    assert kernel.read(f"{kernel.root}/sys/class/hwmon/hwmon1/in1_label") == "VDD_GPU_SOC"
    assert kernel.read(f"{kernel.root}/sys/class/hwmon/hwmon8/in2_label") == "VDDQ_VDD2_1V8AO"
    kernel.renumber(f"/sys/class/devfreq/{gpu(kernel).name}", "devfreq0")
    assert gpu(kernel).name == "devfreq0"
    assert (gpu(kernel) / "device/devfreq_dev/cur_freq").exists()
    assert not [path for path in kernel.root.rglob("*") if path.is_symlink() and not path.exists()]


def test_somebody_else_writes(make: Make) -> None:
    """After a given write the file, or another one, holds what a foreign writer put there; the log tells them apart."""
    kernel = make()
    high, cpu = gpu(kernel) / "max_freq", "/sys/devices/system/cpu/cpufreq/policy0/scaling_max_freq"
    kernel.fail(Fault("foreign", value="306000000"), Fault("foreign", nth=2, path=cpu, value="1344000"))
    kernel.write(str(high), "816000000")
    assert number(high) == 306000000
    kernel.write(str(high), "510000000")
    assert number(kernel.root / cpu[1:]) == 1344000
    assert [each.by for each in kernel.writes()] == ["us", "foreign", "us", "foreign"]


def test_a_fault_that_means_nothing_is_refused() -> None:
    """An act that does not exist, a call before the first, a foreign writer with nothing to write."""
    for wrong in ({"act": "explode"}, {"act": "EIO", "nth": 0}, {"act": "foreign"}, {"act": "renumber", "value": "x"}):
        with pytest.raises(InvalidInput):
            Fault(**wrong)


CHILD = """
import sys
from polythrottle.actuation.drivers.controls import SysFiles
from polythrottle.testing import FakeKernel
root, path = sys.argv[1:]
with FakeKernel(root).installed():
    for text in ("816000000", "510000000", "408000000"):
        SysFiles().write(path, text)
"""


@pytest.mark.parametrize(("act", "held", "outcomes"), [
    ("die_before", 816000000, ["ok", "died"]),
    ("die_after", 510000000, ["ok", "ok"]),
])  # fmt: skip
def test_a_process_dies_at_a_given_write(make: Make, act: str, held: int, outcomes: list[str]) -> None:
    """SIGKILL before the second write leaves the first value, after it the second; the log has both either way."""
    kernel = make()
    high = gpu(kernel) / "max_freq"
    kernel.fail(Fault(act, nth=2))
    done = subprocess.run([sys.executable, "-c", CHILD, str(kernel.root), str(high)], check=False)
    assert done.returncode == -signal.SIGKILL
    assert number(high) == held
    assert [each.outcome for each in kernel.writes()] == outcomes
    assert all(each.pid != os.getpid() for each in kernel.writes())
    kernel.write(str(high), "1020000000")
    assert kernel.writes()[-1].outcome == "ok"


@pytest.mark.slow
def test_a_process_dies_at_a_given_read(make: Make) -> None:
    """SIGKILL at a read, counted over processes: the first child lives, the second does not."""
    kernel = make()
    code = "import sys; from polythrottle.testing import FakeKernel; FakeKernel(sys.argv[1]).read(sys.argv[2])"
    kernel.fail(Fault("die_after", nth=2, on="read"))
    command = [sys.executable, "-c", code, str(kernel.root), f"{gpu(kernel)}/max_freq"]
    codes = [subprocess.run(command, check=False).returncode for _ in range(2)]
    assert codes == [0, -signal.SIGKILL]


# In a process


def test_installed_takes_the_place_of_the_files_of_its_tree_alone(make: Make, tmp_path: Path) -> None:
    """Paths and the power mode of the tree go through the kernel, others do not, and afterwards none does."""
    kernel = make("jetson-tx2")
    other = tmp_path / "other"
    other.write_text("1")
    low = str(gpu(kernel) / "min_freq")
    with kernel.installed():
        SystemControls().write(str(gpu(kernel) / "max_freq"), "522750000")
        with pytest.raises(OSError, match="Invalid argument"):
            SysFiles().write(low, "624750000")
        assert SystemControls().read(f"nvpmodel:{kernel.root}") == "0"
        SystemControls().write(f"nvpmodel:{kernel.root}", "1")
        SystemControls().write(str(other), "2")
    assert SystemControls().read(str(other)) == "2"
    assert len(kernel.writes()) == 3
    SysFiles().write(low, "624750000")
    assert len(kernel.writes()) == 3


def test_a_snapshot_leaves_out_what_moves_by_itself(make: Make) -> None:
    """Load changes clocks, power and heat, but no control; a write changes exactly the control it goes to."""
    kernel = make()
    before = kernel.snapshot()
    kernel.work(0.0)
    assert kernel.snapshot() == before
    kernel.write(f"{gpu(kernel)}/max_freq", "816000000")
    changed = {path for path, text in kernel.snapshot().items() if before[path] != text}
    assert changed == {"/sys/devices/platform/bus@0/17000000.gpu/devfreq/17000000.gpu/max_freq"}


def test_the_command_line_plants_a_tree_and_runs_on_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Planting prints the folder, run hands its words to polythrottle, and mistakes are one line."""
    tree = tmp_path / "tree"
    assert main(["plant", "jetson-nano", str(tree)]) == 0
    assert capsys.readouterr().out == f"{tree}\n"
    assert main(["plant", "jetson-nano", str(tree)]) == StorageError.exit_code
    assert "not empty" in capsys.readouterr().err
    assert main(["run", str(tree), "devices"]) == 0
    assert "jetson-nano" in capsys.readouterr().out
    assert main(["run", str(tmp_path / "none"), "devices"]) == DeviceError.exit_code


@pytest.mark.slow
@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    name=st.sampled_from(["jetson-nano", "jetson-agx-orin-jp6"]),
    steps=st.lists(st.tuples(st.integers(0, 2), st.integers(-1, 3_000_000_000)), max_size=12),
)
def test_whatever_is_written_limits_are_steps_in_order(
    tmp_path_factory: pytest.TempPathFactory, name: str, steps: list[tuple[int, int]]
) -> None:
    """After any writes, taken or not, minimum ≤ clock ≤ maximum, all three from the table."""
    kernel = FakeKernel(plant(name, tmp_path_factory.mktemp("tree")))
    folder = gpu(kernel)
    levels = clocks(folder / "available_frequencies")
    for which, value in steps:
        refused(kernel, folder / ("min_freq", "max_freq", "cur_freq")[which], str(value))
    low, now, high = (number(folder / each) for each in ("min_freq", "cur_freq", "max_freq"))
    assert low <= now <= high
    assert {low, now, high} <= set(levels)


@pytest.mark.parametrize(("board", "old"), [("jetson-nano", True), ("jetson-agx-orin-jp6", False)])
def test_a_kernel_of_version_4_refuses_as_such_do(make: Make, board: str, old: bool) -> None:
    """What JetPack 4 has refuses a value that later kernels round, from the first look on."""
    machine = Machine(make(board).root)
    (machine.beside / "memory.json").unlink(missing_ok=True)
    machine.recall()
    assert machine.memory.refuses == old
