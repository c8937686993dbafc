"""Jetson boards, on the trees of every family and behind a layer that behaves as their kernels do."""

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import date
from pathlib import Path

import pytest

from polythrottle.actuation.drivers.controls import SysFiles
from polythrottle.backends import find_device, open_device
from polythrottle.backends.jetson import JetsonDevice
from polythrottle.backends.jetson.memory_clock import rates_hz
from polythrottle.backends.probe import Tree, thinned
from polythrottle.domain.clock import VirtualClock
from polythrottle.domain.errors import DeviceError, InvalidInput, KnobRejected, PolythrottleError, UnknownName
from polythrottle.domain.ports import Finding
from polythrottle.domain.space import OperatingPoint
from polythrottle.testing import BOARDS, DeviceContract, FakeKernel, Fault, plant

ORIN, NANO, THOR = "jetson-agx-orin-jp6", "jetson-nano", "jetson-thor"
GPU, MEM, CPU, CORES, MODE = "gpu_max_hz", "mem_hz", "cpu_max_hz", "cpu_cores", "power_mode"
EMC = "sys/kernel/debug/bpmp/debug/clk/emc"


def device(root: Path, **options: object) -> JetsonDevice:
    """Return the device of a tree behind its kernel, in virtual time; a guard would not go through that kernel."""
    made = JetsonDevice(root=str(root), controls=FakeKernel(root), clock=VirtualClock(), **options)  # type: ignore[arg-type]
    made._actuator._guarded = False
    return made


def finding(board: JetsonDevice, subject: str) -> Finding:
    """Return what a board says about one subject."""
    return next(each for each in board.findings() if each.subject == subject)


def files(root: Path, pattern: str) -> list[Path]:
    """Return the files of a tree that match."""
    return sorted(root.glob(pattern))


def gpu_files(root: Path) -> Path:
    """Return the devfreq folder of an Orin's GPU."""
    return (root / "sys/class/devfreq/17000000.gpu").resolve()


def written(kernel: FakeKernel) -> list[tuple[str, str]]:
    """Return name and text of every write so far."""
    return [(write.key.rpartition("/")[2], write.text) for write in kernel.writes()]


@pytest.fixture
def orin(tmp_path: Path) -> Path:
    """A Jetson AGX Orin with JetPack 6."""
    return plant(ORIN, tmp_path / "board")


class TestContract(DeviceContract):
    """The contract of every device, on every family of boards."""

    @pytest.fixture(autouse=True, params=BOARDS)
    def _tree(self, request: pytest.FixtureRequest, tmp_path: Path) -> None:
        self.root = plant(request.param, tmp_path / "board")

    def make(self) -> JetsonDevice:
        """Return the board of the tree."""
        return device(self.root)


@pytest.mark.slow
@pytest.mark.parametrize("name", BOARDS)
def test_what_was_found_is_what_is_left(name: str, tmp_path: Path) -> None:
    """After first, last and preset points, every control of every board holds what it held before."""
    root = plant(name, tmp_path / "board")
    kernel = FakeKernel(root)
    before = kernel.snapshot()
    with device(root) as board:
        for point in (board.space[0], board.space[len(board.space) - 1], *board.presets.values(), board.space.default):
            board.apply(point)
            assert board.read().clocks_hz["gpu"] <= int(point[GPU])
    assert kernel.snapshot() == before


@pytest.mark.slow
@pytest.mark.parametrize("name", BOARDS)
def test_only_what_the_board_lists_is_written(name: str, tmp_path: Path) -> None:
    """Every GPU clock that is ever written is in the board's own table, and lies within the limits found."""
    root = plant(name, tmp_path / "board")
    with device(root) as board:
        for index in range(0, len(board.space), max(1, len(board.space) // 7)):
            board.apply(board.space[index])
    keys = [write for write in FakeKernel(root).writes() if write.key.endswith(("/min_freq", "/max_freq"))]
    assert keys
    for write in keys:
        table = (Path(write.key).parent / "available_frequencies").read_text().split()
        assert write.text in table
        assert min(map(int, table)) <= int(write.text) <= int(board.space.default[GPU])


@pytest.mark.parametrize("name", BOARDS)
def test_every_board_says_what_it_is_and_what_works(name: str, tmp_path: Path) -> None:
    """Identity names chip and release, every knob searched by default works, and nothing is left unexplained."""
    board = device(plant(name, tmp_path / "board"))
    assert set(board.identity) == {"board", "soc", "l4t", "jetpack"}
    assert set(board.space.names) == {"gpu_min_hz", GPU, MEM}
    assert all(each.works or each.explanation for each in board.findings())
    assert (
        f"devices/{name.partition('-jp')[0].removesuffix('-carrier').removesuffix('-super')}.toml"
        in finding(board, "board").explanation
    )
    assert all(Path(file).is_relative_to(tmp_path) for file in board.files)


def test_levels_are_the_board_s_own_table_and_not_the_catalogue_s(orin: Path) -> None:
    """JetPack 6 lists 306, 408, … MHz, whatever the paper's board had."""
    board = device(orin)
    table = tuple(sorted(map(int, (gpu_files(orin) / "available_frequencies").read_text().split())))
    assert board.space.knob(GPU).levels == table
    assert dict(board.space.default) == {"gpu_min_hz": table[0], GPU: table[-1], MEM: 3_199_000_000}


def test_limits_found_are_never_crossed(orin: Path) -> None:
    """A cap or floor that somebody set before bounds every level."""
    (gpu_files(orin) / "max_freq").write_text("918000000\n")
    (gpu_files(orin) / "min_freq").write_text("510000000\n")
    levels = device(orin).space.knob(GPU).levels
    assert (levels[0], levels[-1]) == (510_000_000, 918_000_000)


def test_the_administrator_s_limits_bound_the_levels(orin: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What limits.toml says holds beside what was found."""
    file = orin.parent / "limits.toml"
    file.write_text("[jetson]\ngpu_max_mhz = { min = 600, max = 1000 }\nmem_mhz = { min = 2000 }\n")
    monkeypatch.setenv("POLYTHROTTLE_LIMITS", str(file))
    space = device(orin).space
    assert (space.knob(GPU).levels[0], space.knob(GPU).levels[-1]) == (612_000_000, 918_000_000)
    assert space.knob(MEM).levels == (2_133_000_000, 3_199_000_000)


def test_memory_beyond_the_administrator_s_limit_is_not_left_to_its_governor(
    orin: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The highest level allowed is locked, for the governor would go higher."""
    file = orin.parent / "limits.toml"
    file.write_text("[jetson]\nmem_mhz = { max = 2200 }\n")
    monkeypatch.setenv("POLYTHROTTLE_LIMITS", str(file))
    with device(orin) as board:
        board.apply(board.space.default)
        assert board.read().clocks_hz["mem"] == board.space.default[MEM] == 2_133_000_000
        assert (orin / EMC / "mrq_rate_locked").read_text().strip() == "1"


def test_limits_move_in_the_order_an_old_kernel_takes(tmp_path: Path) -> None:
    """A kernel that refuses a minimum above the maximum takes a pair going up and a pair going down."""
    root = plant(NANO, tmp_path / "board")
    with device(root, knobs=("gpu_min_hz", GPU)) as board:
        levels = board.space.knob(GPU).levels
        for level in (levels[1], levels[-1], levels[2], levels[0]):
            board.apply(OperatingPoint({"gpu_min_hz": level, GPU: level}))
            assert board.read().clocks_hz["gpu"] == level


def test_limits_pinned_by_somebody_are_no_knob(orin: Path) -> None:
    """Where jetson_clocks has made minimum and maximum equal there is nothing to choose, and it says so."""
    (gpu_files(orin) / "min_freq").write_text("1300500000\n")
    board = device(orin)
    assert GPU not in board.space.names
    assert "jetson_clocks --restore" in finding(board, GPU).remedy


def test_a_clock_the_driver_rounds_is_rejected(orin: Path) -> None:
    """What the driver kept instead is named, and put back at the end."""
    kernel = FakeKernel(orin)
    before = kernel.snapshot()
    kernel.fail(Fault("round", match="*/max_freq"))
    with device(orin) as board, pytest.raises(KnobRejected, match="but it holds"):
        board.apply(OperatingPoint({GPU: 918_000_000}))
    assert kernel.snapshot() == before


def test_a_clock_that_does_not_follow_is_rejected(orin: Path) -> None:
    """If the GPU still runs elsewhere after a second, the point was not applied; clocks are told in MHz."""
    board = JetsonDevice(root=str(orin), controls=SysFiles(), clock=VirtualClock())
    with board, pytest.raises(KnobRejected) as raised:
        board.apply(OperatingPoint({GPU: 408_000_000}))
    assert str(raised.value) == "the GPU runs at 1300.5 MHz, not between 306 MHz and 408 MHz, 1 s after it was set"


def test_cores_that_do_not_follow_are_told_in_mhz(orin: Path) -> None:
    """As every other clock that people read, though the kernel counts in kHz."""
    for now in orin.glob("sys/devices/system/cpu/cpufreq/policy*/scaling_cur_freq"):
        now.write_text("2201600\n")
    board = JetsonDevice(root=str(orin), controls=SysFiles(), clock=VirtualClock(), knobs=("cpu_max_hz",))
    with board, pytest.raises(KnobRejected, match=r"^policy0 runs at 2201\.6 MHz, above [\d.]+ MHz, 1 s after"):
        board.apply(OperatingPoint({"cpu_max_hz": board.space.knob("cpu_max_hz").levels[0]}))


@pytest.mark.parametrize(
    "wrong", [{GPU: 919_000_000}, {"power_limit_w": 10}, {"gpu_min_hz": 918_000_000, GPU: 510_000_000}]
)
def test_what_is_not_a_point_is_refused_before_anything_is_written(wrong: dict[str, int], orin: Path) -> None:
    """Off-table levels, foreign knobs and a minimum above the maximum never reach the board."""
    with device(orin) as board, pytest.raises(KnobRejected):
        board.apply(OperatingPoint(wrong))
    assert FakeKernel(orin).writes() == ()


def test_a_sleeping_gpu_is_held_awake_only_to_be_set(orin: Path) -> None:
    """Its files answer while it is held, and it may sleep again before anything is measured."""
    kernel = FakeKernel(orin)
    before = kernel.snapshot()
    board = device(orin)
    kernel.doze()
    with board:
        assert written(kernel) == [("railgate_enable", "0"), ("railgate_enable", "1")]
        board.apply(OperatingPoint({GPU: 510_000_000}))
        assert "gpu" not in board.read().clocks_hz
        kernel.doze(asleep=False)
        assert (gpu_files(orin) / "max_freq").read_text().strip() == "510000000"
        assert written(kernel)[2] == ("railgate_enable", "0")
        assert written(kernel)[-1] == ("railgate_enable", "1")
        sleeping = device(orin)
        kernel.doze()
        assert device(orin).space.names == (MEM,)
        assert "start what it serves first" in finding(device(orin), GPU).remedy
        assert sleeping.space.names == board.space.names
        kernel.doze(asleep=False)
    assert kernel.snapshot() == before


def test_memory_is_proven_to_go_up_again_before_it_is_lowered(orin: Path) -> None:
    """The first use locks, goes to one step below the highest, up, and to the level; the next goes there at once."""
    kernel = FakeKernel(orin)
    kernel.work(0.0)
    with device(orin, knobs=(MEM,)) as board:
        board.apply(OperatingPoint({MEM: 665_600_000}))
        rates = [("rate", "2133000000"), ("rate", "3199000000"), ("rate", "665600000")]
        assert written(kernel) == [("mrq_rate_locked", "1"), *rates]
        before = len(written(kernel))
        board.apply(OperatingPoint({MEM: 204_000_000}))
        assert written(kernel)[before:] == [("rate", "204000000")]


@pytest.mark.parametrize(
    ("text", "rates"),
    [
        ("204000 665600 2133000 (kHz)", (204_000_000, 665_600_000, 2_133_000_000)),
        ("204000000 1600000000", (204_000_000, 1_600_000_000)),
        ("40800 1866000", (40_800_000, 1_866_000_000)),
        ("204000000 2133000000 (Hz)", (204_000_000, 2_133_000_000)),
        ("vdd_core 3199000000 700000\nvdd_core 204000000 600000\n(end)", (204_000_000, 3_199_000_000)),
        ("204000 fast (kHz)", ()),
        ("(kHz)", ()),
        ("", ()),
    ],
)
def test_lists_of_memory_rates_are_understood_as_records_have_them(text: str, rates: tuple[int, ...]) -> None:
    """In kHz with the unit at the end (gemma4 POWER_MODE.md), bare, or a rate a line (sweeps on Orin and Thor)."""
    assert rates_hz(text) == rates


@pytest.mark.parametrize("name", [name for name in BOARDS if name.startswith(("jetson-agx", "jetson-orin", THOR))])
def test_memory_is_a_knob_wherever_the_firmware_has_its_clock(name: str, tmp_path: Path) -> None:
    """Found with the list where boards have it, and the lowest rate holds once applied."""
    root = plant(name, tmp_path / "board")
    before = FakeKernel(root).snapshot()
    with device(root) as board:
        lowest = board.space.knob(MEM).levels[0]
        board.apply(OperatingPoint({MEM: lowest}))
        assert board.read().clocks_hz["mem"] == lowest
    assert FakeKernel(root).snapshot() == before


def test_thor_s_bandwidth_manager_is_halted_while_its_memory_is_held(tmp_path: Path) -> None:
    """The files state and bwmgr_halt go to 1 beside the lock, and back to 0 with it."""
    root = plant(THOR, tmp_path / "board")
    with device(root, knobs=(MEM,)) as board:
        board.apply(OperatingPoint({MEM: 665_600_000}))
        head = [("mrq_rate_locked", "1"), ("state", "1"), ("bwmgr_halt", "1")]
        assert written(FakeKernel(root))[:3] == head
        board.apply(OperatingPoint({}))
        assert written(FakeKernel(root))[-3:] == [(name, "0") for name, _ in head]


def test_rates_of_a_voltage_table_that_cannot_be_locked_are_passed_over_in_the_proof(orin: Path) -> None:
    """The list falls back to clk/emc/dvfs_table; a rate the firmware drops spoils its own trial and not the knob."""
    (orin / EMC / "../../emc/possible_rates").unlink()
    lines = (
        f"vdd_core {rate} 600000" for rate in (204_000_000, 665_600_000, 2_133_000_000, 2_750_000_000, 3_199_000_000)
    )
    (orin / EMC / "dvfs_table").write_text("\n".join(lines) + "\n")
    kernel = FakeKernel(orin)
    kernel.work(0.0)
    kernel.fail(Fault("ignore", match=f"*{EMC}/rate"))
    with device(orin, knobs=(MEM,)) as board:
        assert "not all of whose rates can be locked" in finding(board, MEM).explanation
        board.apply(OperatingPoint({MEM: 665_600_000}))
        assert board.read().clocks_hz["mem"] == 665_600_000
    tried = [text for name, text in written(kernel) if name == "rate"]
    assert tried == ["2750000000", "2133000000", "3199000000", "665600000"]


def test_the_memory_s_default_leaves_it_to_its_governor(orin: Path) -> None:
    """At the highest level nothing is locked, so that the default is the board as it was found."""
    kernel = FakeKernel(orin)
    with device(orin) as board:
        board.apply(board.space.default)
        assert kernel.writes() == ()
        board.apply(OperatingPoint({MEM: 204_000_000}))
        board.apply(OperatingPoint({}))
        assert (orin / EMC / "mrq_rate_locked").read_text().strip() == "0"


def test_memory_that_does_not_go_up_again_is_off_for_good(orin: Path) -> None:
    """Where raising is ignored the knob says why, the lock is let go, and no second attempt is made."""
    kernel = FakeKernel(orin)
    kernel.fail(Fault("ignore", match=f"*{EMC}/rate", times=0))
    with device(orin) as board:
        with pytest.raises(KnobRejected, match="mem_hz is off"):
            board.apply(OperatingPoint({MEM: 204_000_000}))
        assert (orin / EMC / "mrq_rate_locked").read_text().strip() == "0"
        before = len(kernel.writes())
        with pytest.raises(KnobRejected, match="did not step down and up"):
            board.apply(OperatingPoint({MEM: 665_600_000}))
        assert len(kernel.writes()) == before
        assert finding(board, MEM).works is False
        board.apply(OperatingPoint({GPU: 510_000_000}))


def test_a_cap_on_memory_bounds_it_and_is_never_written(orin: Path) -> None:
    """Rates above the cap found are no levels; the cap, once lowered, could not be lifted."""
    (orin / "sys/kernel/nvpmodel_clk_cap/emc").write_text("2133000000\n")
    with device(orin) as board:
        assert board.space.knob(MEM).levels == (204_000_000, 665_600_000, 2_133_000_000)
        board.apply(OperatingPoint({MEM: 204_000_000}))
    assert not any("_cap/" in write.key for write in FakeKernel(orin).writes())


def test_a_memory_lock_of_somebody_else_is_not_broken(orin: Path) -> None:
    """The knob is off while another holds the rate."""
    (orin / EMC / "mrq_rate_locked").write_text("1\n")
    board = device(orin)
    assert MEM not in board.space.names
    assert "somebody else has locked" in finding(board, MEM).explanation


@pytest.mark.parametrize(
    ("lockdown", "says"), [("none [integrity] confidentiality", "secure boot"), ("", "no rate lock")]
)
def test_memory_behind_a_closed_debugfs_says_why(lockdown: str, says: str, orin: Path) -> None:
    """Kernel lockdown is told from a kernel without the lock."""
    shutil.rmtree(orin / "sys/kernel/debug/bpmp")
    (orin / "sys/kernel/security").mkdir(parents=True, exist_ok=True)
    (orin / "sys/kernel/security/lockdown").write_text(f"{lockdown}\n")
    board = device(orin)
    assert board.space.names == ("gpu_min_hz", GPU)
    assert says in finding(board, MEM).explanation
    with pytest.raises(DeviceError, match="mem_mhz is off on this board"):
        device(orin, knobs=(MEM,))


def test_what_a_user_may_not_see_is_off_and_not_an_error(orin: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without root debugfs is closed: memory is off with that reason, and the rest works."""
    whole = Path.stat

    def closed(self: Path, *, follow_symlinks: bool = True) -> os.stat_result:
        if f"{orin}/sys/kernel/debug/" in f"{self}":
            raise PermissionError(13, "Permission denied", str(self))
        return whole(self, follow_symlinks=follow_symlinks)

    monkeypatch.setattr(Path, "stat", closed)
    monkeypatch.setattr(Path, "resolve", lambda self, strict=False: closed(self) and Path(os.path.realpath(self)))
    board = device(orin)
    assert "closed to this user" in finding(board, MEM).explanation
    assert board.space.names == ("gpu_min_hz", GPU)
    assert board.files
    assert board.read().clocks_hz["gpu"]


def test_a_file_the_kernel_will_not_take_is_no_knob(orin: Path) -> None:
    """Without a write bit, or without the right, the knob is off and names the file."""
    (gpu_files(orin) / "max_freq").chmod(0o444)
    assert "read-only in this kernel" in finding(device(orin), GPU).explanation


def test_a_tree_cannot_reach_out_of_itself(orin: Path) -> None:
    """A link to a file elsewhere is not followed for writing."""
    outside = orin.parent / "outside"
    outside.write_text("2201600\n")
    for file in files(orin, "sys/devices/system/cpu/cpufreq/policy0/scaling_max_freq"):
        file.unlink()
        file.symlink_to(outside)
    assert "leads out of" in finding(device(orin), CPU).explanation


def test_each_cluster_gets_its_highest_clock_not_above_the_level(orin: Path) -> None:
    """One knob caps clusters with unlike tables."""
    policy = orin / "sys/devices/system/cpu/cpufreq/policy4"
    (policy / "scaling_available_frequencies").write_text("800000 1600000 2201600\n")
    with device(orin, knobs=(CPU,)) as board:
        board.apply(OperatingPoint({CPU: 1_344_000_000}))
        caps = [file.read_text().strip() for file in files(orin, "sys/devices/system/cpu/cpufreq/*/scaling_max_freq")]
        assert caps == ["1344000", "800000", "1344000"]


def test_cores_go_off_from_the_last_and_come_back(orin: Path) -> None:
    """The first core stays, a cluster without cores is not limited, and everything is online again at the end."""
    kernel = FakeKernel(orin)
    before = kernel.snapshot()
    assert CORES not in device(orin).space.names
    with device(orin, knobs=(CORES, CPU)) as board:
        for count in (4, 1, 6, 12):
            board.apply(OperatingPoint({CORES: count, CPU: 1_344_000_000}))
            switches = [orin / f"sys/devices/system/cpu/cpu{core}/online" for core in range(12)]
            assert sum(switch.read_text().strip() == "1" for switch in switches) == count
    assert kernel.snapshot() == before
    assert not any(write.key.endswith("cpu0/online") for write in kernel.writes())


KILLED = """
import os, signal, sys
from polythrottle.backends.jetson import JetsonDevice
from polythrottle.domain.clock import VirtualClock
from polythrottle.domain.space import OperatingPoint
from polythrottle.testing import FakeKernel
board = JetsonDevice(root=sys.argv[1], controls=FakeKernel(sys.argv[1]), clock=VirtualClock(), knobs=("cpu_cores",))
board._actuator._guarded = False
board.__enter__().apply(OperatingPoint({"cpu_cores": 2}))
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_clusters_that_a_killed_process_left_offline_are_limited_again(orin: Path) -> None:
    """Entering brings them back, and they are looked at anew: no cluster is forgotten."""
    child = subprocess.run([sys.executable, "-c", KILLED, str(orin)], capture_output=True, check=False)
    assert child.returncode == -signal.SIGKILL
    with device(orin, knobs=(CPU,)) as board:
        board.apply(OperatingPoint({CPU: 1_344_000_000}))
        caps = [file.read_text().strip() for file in files(orin, "sys/devices/system/cpu/cpufreq/*/scaling_max_freq")]
        assert caps == ["1344000"] * 3


def test_a_board_that_changes_while_it_is_looked_at_is_not_steered(orin: Path) -> None:
    """The space that was promised must be the space that is searched."""
    board = device(orin)
    (gpu_files(orin) / "max_freq").write_text("918000000\n")
    with pytest.raises(DeviceError, match="start again"), board:
        pass
    assert FakeKernel(orin).writes() == ()


def test_a_power_mode_is_switched_and_switched_back(orin: Path) -> None:
    """The knobs it rewrites follow it, and all of them are as found at the end."""
    kernel = FakeKernel(orin)
    before = kernel.snapshot()
    with device(orin, knobs=(MODE,)) as board:
        assert board.space.default[MODE] == "MAXN"
        board.apply(OperatingPoint({MODE: "MODE_50W"}))
        assert (gpu_files(orin) / "max_freq").read_text().strip() == "816000000"
        board.apply(OperatingPoint({MODE: "MAXN"}))
        assert (gpu_files(orin) / "max_freq").read_text().strip() == "1300500000"
        board.apply(OperatingPoint({MODE: "MODE_50W"}))
    assert kernel.snapshot() == before


def test_a_power_mode_bounds_the_knobs_searched_with_it(orin: Path) -> None:
    """No point has a clock above what its mode allows."""
    space = device(orin, knobs=(MODE, GPU)).space
    assert max(int(point[GPU]) for point in space if point[MODE] == "MODE_50W") == 816_000_000
    assert max(int(point[GPU]) for point in space if point[MODE] == "MAXN") == 1_300_500_000


def test_power_modes_that_need_a_reboot_or_raise_a_limit_are_not_offered(orin: Path, tmp_path: Path) -> None:
    """Which and why is in the findings."""
    told = finding(device(orin), MODE).explanation
    assert "15W (needs a reboot)" in told
    nano = plant("jetson-orin-nano", tmp_path / "nano")
    told = finding(device(nano), MODE).explanation
    assert "MAXN_SUPER (would raise gpu_max_hz above what was found)" in told


def test_a_small_mode_on_a_small_board_takes_cores_and_clocks(tmp_path: Path) -> None:
    """On a Nano, 5W takes two cores off; they are back afterwards."""
    root = plant(NANO, tmp_path / "board")
    kernel = FakeKernel(root)
    before = kernel.snapshot()
    with device(root, knobs=(MODE, CPU)) as board:
        board.apply(OperatingPoint({MODE: "5W", CPU: 614_400_000}))
        assert (root / "sys/devices/system/cpu/cpu3/online").read_text().strip() == "0"
        board.apply(OperatingPoint({}))
        assert (root / "sys/devices/system/cpu/cpu3/online").read_text().strip() == "1"
    assert kernel.snapshot() == before


def test_presets_are_the_board_s_power_modes_else_the_catalogue_s(orin: Path) -> None:
    """Without a readable nvpmodel.conf the catalogue's points are taken in the board's own steps."""
    own = device(orin).presets
    assert own["MODE_50W"][GPU] == 816_000_000
    (orin / "etc/nvpmodel.conf").unlink()
    other = device(orin).presets
    assert other["50W"][GPU] == 816_000_000
    assert "devices/jetson-agx-orin.toml" in finding(device(orin), "presets").explanation


@pytest.mark.parametrize(
    ("name", "mode", "held"),
    [
        ("jetson-agx-xavier", "MODE_15W", {GPU: 675_750_000}),
        ("jetson-agx-xavier", "MODE_10W", {GPU: 522_750_000}),
        (NANO, "5W", {GPU: 614_400_000, CPU: 921_600_000}),
    ],
)
@pytest.mark.parametrize("conf", [True, False])
def test_presets_are_what_boards_are_recorded_to_hold(
    name: str, mode: str, held: dict[str, int], conf: bool, tmp_path: Path
) -> None:
    """A mode's figure goes to the nearest level, not down: 670 MHz is 675.75 (LoudVA), 918 is 921.6 on a Nano."""
    root = plant(name, tmp_path / "board", power_mode=0)
    if not conf:
        (root / "etc/nvpmodel.conf").unlink()
    found = device(root, knobs=("gpu_min_hz", GPU, CPU)).presets
    point = found[mode if conf else mode.removeprefix("MODE_")]
    assert {knob: point[knob] for knob in held} == held


def test_a_mode_allows_the_level_that_its_figure_ends_on(tmp_path: Path) -> None:
    """A mode of 670 MHz can be searched together with 675.75 MHz, which it holds."""
    space = device(plant("jetson-agx-xavier", tmp_path / "board", power_mode=0), knobs=(MODE, GPU)).space
    assert max(int(point[GPU]) for point in space if point[MODE] == "MODE_15W") == 675_750_000


def test_a_mode_that_does_not_apply_is_rejected_though_it_is_noted(orin: Path) -> None:
    """A mode may be noted by nvpmodel, which ends well without having set a limit: limits are read back."""
    kernel = FakeKernel(orin)
    kernel.fail(Fault("ignore", match="nvpmodel:*"))
    with device(orin, knobs=(MODE,)) as board:
        status = orin / "var/lib/nvpmodel/status"
        board._actuator._controls.write = _noting(status, board._actuator._controls.write)  # type: ignore[method-assign]
        with pytest.raises(
            KnobRejected, match=r"nvpmodel says that it switched to MODE_50W, but .*max_freq holds 1300500000"
        ):
            board.apply(OperatingPoint({MODE: "MODE_50W"}))


def _noting(status: Path, write: Callable[[str, str], None]) -> Callable[[str, str], None]:
    """Return a writer that notes every power mode it is given."""

    def noted(key: str, text: str) -> None:
        write(key, text)
        if key.startswith("nvpmodel:"):
            status.write_text(f"pmode:{int(text):04d}\n")

    return noted


def test_links_of_a_copied_board_count_from_its_own_root(orin: Path) -> None:
    """/etc/nvpmodel.conf and /proc/device-tree are absolute links on a board, and so in a copy of one."""
    for name in ("etc/nvpmodel.conf", "proc/device-tree"):
        target = (orin / name).resolve().relative_to(orin.resolve())
        (orin / name).unlink()
        (orin / name).symlink_to(f"/{target}")
    board = JetsonDevice(root=str(orin), clock=VirtualClock())
    assert set(board.presets) == {"MAXN", "MODE_30W", "MODE_50W", "MODE_15W"}
    assert "devices/jetson-agx-orin.toml" in finding(board, "board").explanation


def test_links_that_lead_up_or_round_end_in_the_tree(tmp_path: Path) -> None:
    """Parents stop at the root, and a link to itself is no file."""
    (tmp_path / "etc").mkdir()
    (tmp_path / "etc/up").symlink_to("../../../../../../../../etc/passwd")
    (tmp_path / "etc/round").symlink_to("/etc/round")
    tree = Tree(tmp_path, SysFiles())
    assert tree.below("etc/up") == tmp_path.resolve() / "etc/passwd"
    assert tree.text(tree.below("etc/round")) is None
    assert tree.below("/etc/../..") == tmp_path.resolve()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("knobs", "points"),
    [((GPU, MEM, CPU), 6_000), (("gpu_min_hz", GPU, CPU), 20_000), (("gpu_min_hz", GPU, MEM, CPU), 100_000)],
)
def test_a_long_table_is_searched_in_part_and_can_be_applied_whole(
    knobs: tuple[str, ...], points: int, tmp_path: Path
) -> None:
    """Thor's 170 GPU and 284 CPU clocks make millions of points; 32 of each do, benchmarks/opening.py times it."""
    root = plant(THOR, tmp_path / "board", power_mode=0)
    board = device(root, knobs=knobs)
    gpu_table = (root / "sys/class/devfreq/gpu-gpc-0/available_frequencies").read_text().split()
    assert len(gpu_table) == 170
    assert len(board.space) <= points
    searched = board.space.knob(GPU).levels
    assert {54_000_000, 1_386_000_000, 1_530_000_000, 1_575_000_000} <= set(searched)
    assert len(searched) <= 36
    other = next(int(text) for text in gpu_table if int(text) not in searched)
    with board:
        board.apply(OperatingPoint({GPU: other}))
        assert board.read().clocks_hz["gpu"] == other


def test_a_table_of_few_levels_is_searched_whole(orin: Path) -> None:
    """Up to 32 levels nothing is left out."""
    assert device(orin, knobs=(CPU,)).space.knob(CPU).levels == device(orin)._knobs._known[CPU].levels
    assert thinned(range(32)) == tuple(range(32))
    assert thinned(range(33)) == (0, *range(2, 33, 2))
    assert thinned(range(65), {8}) == (0, 1, 4, 7, 8, *range(10, 65, 3))
    assert thinned(()) == ()


def test_a_board_nobody_knows_falls_back_to_what_probing_finds(orin: Path) -> None:
    """Knobs and rails are there, and the board says that it is not in the catalogue."""
    tree = (orin / "proc/device-tree").resolve()
    (tree / "model").write_text("Acme Edge Box\0")
    (tree / "compatible").write_text("acme,box\0nvidia,tegra234\0")
    board = device(orin)
    assert board.title.startswith("Acme Edge Box")
    assert set(board.space.names) == {"gpu_min_hz", GPU, MEM}
    assert "not in devices/" in finding(board, "board").explanation
    assert "not in devices/" in board.boundary


def test_a_module_on_a_strange_carrier_is_known_by_its_part_number(orin: Path) -> None:
    """What the device tree is compatible with names the module even if the model does not."""
    (orin / "proc/device-tree").resolve().joinpath("model").write_text("reComputer\0")
    assert "devices/jetson-agx-orin.toml" in finding(device(orin), "board").explanation


@pytest.mark.parametrize(
    ("board", "parts", "name"),
    [
        ("jetson-tx2", "nvidia,p2597-0000+p3489-0000\0nvidia,p3489-0000", "jetson-tx2i"),
        ("jetson-tx2", "nvidia,p2597-0000+p3489-0888\0nvidia,p3489-0888", "jetson-tx2-4gb"),
        ("jetson-tx2", "nvidia,p2597-0000+p3310-1000", "jetson-tx2"),
    ],
)
def test_siblings_are_told_by_their_part_numbers(board: str, parts: str, name: str, tmp_path: Path) -> None:
    """TX2i and TX2 4GB are p3489 (jetson_stats' table of modules); a model that names itself goes before."""
    root = plant(board, tmp_path / "board")
    (root / "proc/device-tree").resolve().joinpath("compatible").write_text(f"{parts}\0nvidia,tegra186\0")
    assert f"devices/{name}.toml" in finding(device(root), "board").explanation


@pytest.mark.parametrize(
    ("release", "jetpack"),
    [("36.4.7", "6.2.1"), ("36.4.3", "6.2"), ("36.4.0", "6.1 or 6.2"), ("36.5.0", "6.2.2"), ("36.3.0", "6")],
)
def test_the_jetpack_follows_from_the_release(release: str, jetpack: str, orin: Path) -> None:
    """L4T 36.4.7 is JetPack 6.2.1."""
    major, _, revision = release.partition(".")
    (orin / "etc/nv_tegra_release").write_text(f"# R{major} (release), REVISION: {revision}, GCID: 1, BOARD: generic\n")
    assert device(orin).identity["jetpack"] == jetpack


def test_a_board_without_a_sensor_is_steered_and_says_what_its_energy_needs(tmp_path: Path) -> None:
    """A Nano 2GB is known by its model; its knobs work, and reading it is an error of one line."""
    root = plant("jetson-nano-2gb", tmp_path / "board")
    board = device(root)
    assert "devices/jetson-nano-2gb.toml" in finding(board, "board").explanation
    assert "has no power sensor" in finding(board, "energy").explanation
    with board:
        board.apply(OperatingPoint({GPU: 614_400_000}))
        with pytest.raises(DeviceError, match="has no power sensor; measure its energy with a meter of your own"):
            board.read()


def test_a_machine_that_is_no_jetson_is_said_in_one_line(orin: Path, tmp_path: Path) -> None:
    """A tree without a Tegra, and a root that is no folder."""
    (orin / "proc/device-tree").resolve().joinpath("compatible").write_text("raspberrypi,4-model-b\0brcm,bcm2711\0")
    with pytest.raises(DeviceError, match="names no NVIDIA Tegra chip"):
        device(orin)
    with pytest.raises(InvalidInput, match="no folder"):
        JetsonDevice(root=str(tmp_path / "nowhere"))


GARBAGE = {
    "binary": b"\xff\xfe\x00\x01",
    "empty": b"",
    "words": b"<unknown>\n\nNC\n",
    "huge": b"9" * 5000,
    "negative": b"-1\n",
    "folder": None,
    "pipe": None,
    "absent": None,
}


@contextmanager
def spoilt(file: Path, kind: str) -> Iterator[None]:
    """Make of a file what a hostile or broken tree might hold in its place, for a while."""
    aside = file.with_name("aside")
    file.rename(aside)
    if kind == "folder":
        file.mkdir()
    elif kind == "pipe":
        os.mkfifo(file)
    elif kind != "absent":
        file.write_bytes(GARBAGE[kind] or b"")
    yield
    if kind == "folder":
        file.rmdir()
    aside.replace(file)


@pytest.mark.parametrize(
    "kind", [pytest.param(kind, marks=() if kind == "words" else pytest.mark.slow) for kind in GARBAGE]
)
def test_no_file_of_a_tree_can_break_it(kind: str, orin: Path) -> None:
    """Whatever one file holds, the board answers, or says in one line why it cannot; each day another third."""
    today = date.today().toordinal() % 3
    for file in sorted({Path(name).resolve() for name in device(orin).files})[today::3]:
        with spoilt(file, kind):
            try:
                board = device(orin)
                assert board.space.default in board.space
                assert board.findings()
                assert board.presets is not None
                board.read()
                said = ""
            except PolythrottleError as error:
                said = str(error)
            assert "\n" not in said, file


def test_uris_open_the_same_board_again(orin: Path) -> None:
    """Options at their default are left out, the others come back."""
    assert open_device(f"jetson?root={orin}").uri == f"jetson?root={orin}"
    assert open_device(f"jetson?root={orin}&hz=20&factor=1.16").uri == f"jetson?factor=1.16&hz=20&root={orin}"
    assert JetsonDevice(root=str(orin), hz=5).uri == f"jetson?hz=5&root={orin}"


@pytest.mark.parametrize(
    ("options", "kind", "says"),
    [
        ("hz=fast", InvalidInput, "not a number"),
        ("hz=0", InvalidInput, "hz must lie between"),
        ("hz=nan", InvalidInput, "hz must lie between"),
        ("factor=inf", InvalidInput, "factor must lie between"),
        ("factor=9", InvalidInput, "factor must lie between"),
        ("rate=10", UnknownName, "option of device jetson"),
        ("reader=tegrastats", UnknownName, "reader"),
    ],
)
def test_bad_options_are_said_in_one_line(options: str, kind: type[Exception], says: str, orin: Path) -> None:
    """Unknown and malformed options say what would be right."""
    with pytest.raises(kind, match=says) as caught:
        open_device(f"jetson?root={orin}&{options}")
    assert "\n" not in str(caught.value)


def test_knobs_that_do_not_go_together_or_are_unknown_are_refused(orin: Path) -> None:
    """A power mode and cores set the same thing; a knob no Jetson has is named with its neighbours."""
    with pytest.raises(InvalidInput, match="not both"):
        device(orin, knobs=(MODE, CORES))
    with pytest.raises(UnknownName, match="gpu_max_mhz"):
        device(orin, knobs=("gpu_max",))
    with pytest.raises(InvalidInput, match="takes no name"):
        open_device("jetson:orin")


def test_auto_takes_the_board(orin: Path, tmp_path: Path) -> None:
    """Where the device tree names a Tegra, the board is what auto means."""
    found = find_device(orin)
    assert found.uri == f"jetson?root={orin}"
    assert "Orin" in found.explanation
    assert find_device(tmp_path / "state").uri == "cpu"


def test_the_governors_parameters_are_told_and_left_alone(tmp_path: Path) -> None:
    """Thor's podgov: how often it looks, and its parameters as found; they are files of the board, and no controls."""
    device = JetsonDevice(root=str(plant("jetson-thor", tmp_path / "thor")))
    (told,) = [each.explanation for each in device.findings() if each.subject == "GPU governor"]
    assert told.startswith(
        "nvhost_podgov, looks every 10 ms, k 3, load_target 200, load_margin 100, up_freq_margin 100: it"
    )
    assert any(file.endswith("nvhost_podgov/k") for file in device.files)
    bare = JetsonDevice(root=str(plant("jetson-nano", tmp_path / "nano")))
    (told,) = [each.explanation for each in bare.findings() if each.subject == "GPU governor"]
    assert told.startswith("nvhost_podgov: it chooses")


def test_the_governors_parameters_are_knobs_where_they_are_named(tmp_path: Path) -> None:
    """Half to five times what was found, never by default; what is not kept costs a trial, and all is put back."""
    kernel = FakeKernel(plant("jetson-thor", tmp_path / "thor"))
    before = kernel.snapshot()
    with kernel.installed():
        usual = device(kernel.root)
        assert not [name for name in usual.space.names if name.startswith("podgov")]
        named = [offer for offer in usual.offers() if offer.knob.name.startswith("podgov")]
        assert [(offer.default, offer.searched) for offer in named][:2] == [(0.01, False), (3, False)]
        board = device(kernel.root, knobs=("podgov_poll_s", "podgov_k", "podgov_up_freq_margin"))
        assert board.space.knob("podgov_poll_s").levels == (0.005, 0.01, 0.02, 0.03, 0.05)
        assert board.space.knob("podgov_k").levels == (2, 3, 6, 9, 15)
        with board:
            board.apply(OperatingPoint({"podgov_poll_s": 0.05, "podgov_k": 9}))
            found = kernel.snapshot()
            assert {key.rpartition("/")[2]: found[key] for key in found if found[key] != before[key]} == {
                "polling_interval": "50",
                "k": "9",
            }
            with pytest.raises(KnobRejected, match="up_freq_margin"):
                board.apply(OperatingPoint({"podgov_up_freq_margin": 200}))
    assert kernel.snapshot() == before
    nano = device(plant(NANO, tmp_path / "nano"))
    assert not [offer for offer in nano.offers() if offer.knob.name.startswith("podgov")]
