"""What each real device says may be set on it and what holds: the same as its search space, without computing one."""

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from polythrottle.backends import open_device
from polythrottle.backends.cpu import CpuDevice
from polythrottle.backends.jetson import JetsonDevice
from polythrottle.backends.nvml import NvmlDevice
from polythrottle.domain.ports import Device, Offering
from polythrottle.domain.space import OperatingPoint
from polythrottle.testing import FakeKernel, plant
from polythrottle.testing.nvml import FakeNvml, compiler

GPU, MEM, CPU = "gpu_max_hz", "mem_hz", "cpu_max_hz"


@pytest.fixture
def jetson(tmp_path: Path) -> Iterator[Path]:
    """A planted board behind its kernel."""
    root = plant("jetson-agx-orin-jp6", tmp_path / "b")
    with FakeKernel(root).installed():
        yield root


@pytest.fixture
def processor(tmp_path: Path) -> Path:
    """A processor's tree with two policies."""
    for number in (0, 1):
        folder = tmp_path / f"sys/devices/system/cpu/cpufreq/policy{number}"
        folder.mkdir(parents=True)
        files = {"scaling_min_freq": 800_000, "scaling_max_freq": 3_000_000, "scaling_cur_freq": 800_000}
        for name, khz in files.items():
            (folder / name).write_text(f"{khz}\n")
    zone = tmp_path / "sys/class/powercap/intel-rapl:0"
    zone.mkdir(parents=True)
    for name, text in (("name", "package-0"), ("energy_uj", "1000"), ("max_energy_range_uj", "262143328850")):
        (zone / name).write_text(f"{text}\n")
    return tmp_path


def agrees(device: Device) -> None:
    """Check that what is offered is what is searched."""
    assert isinstance(device, Offering)
    offers = {each.knob.name: each for each in device.offers()}
    assert {name for name, each in offers.items() if each.searched} == set(device.space.names)
    for knob in device.space.knobs:
        assert set(knob.levels) <= set(offers[knob.name].knob.levels)
        assert offers[knob.name].default == device.space.default[knob.name]
        assert offers[knob.name].knob.label == knob.label


@pytest.mark.parametrize("knobs", [None, (), (GPU,), (GPU, CPU, MEM), ("power_mode",)])
def test_a_jetson_offers_what_it_searches(jetson: Path, knobs: tuple[str, ...] | None) -> None:
    """And besides every knob that works."""
    device = JetsonDevice(root=str(jetson), knobs=knobs)
    agrees(device)
    assert {each.knob.name for each in device.offers()} >= {GPU, MEM, CPU, "cpu_cores", "power_mode"}


def test_a_processor_offers_what_it_searches(processor: Path) -> None:
    """Where energy is measured that is the limit of its clock; where it is estimated nothing, unless it is named."""
    agrees(CpuDevice(root=str(processor)))
    agrees(CpuDevice(root=str(processor), knobs=(CPU,)))
    blind = CpuDevice(root=str(processor), watts_per_core=5.0)
    agrees(blind)
    assert {each.knob.name for each in blind.offers()} >= {CPU, "cpu_min_hz"}


def test_a_simulated_board_offers_what_it_searches() -> None:
    """And nobody else sets it."""
    device = open_device("sim:jetson-nano")
    agrees(device)
    assert isinstance(device, Offering)
    assert device.altered() == ()


@pytest.mark.skipif(compiler() is None, reason="no C compiler, so the stand-in NVIDIA driver cannot be built")
def test_a_gpu_offers_what_it_searches_and_tells_what_was_changed(tmp_path: Path) -> None:
    """The power limit can be read back; of a locked clock nobody can tell."""
    with FakeNvml(tmp_path / "nvml", ("a100",), frozen=True):
        agrees(NvmlDevice(privileged=True))
        with NvmlDevice(privileged=True) as device:
            space = device.space
            device.apply(space[0])
            assert device.altered() == ()
            other = NvmlDevice(privileged=True)
            key = next(key for key in device._actuator._wrote if "power" in key)
            other._actuator._controls.write(key, "200000")
            assert device.altered() == ("power_limit_w",)


@pytest.mark.parametrize(
    ("point", "pattern", "text", "names"),
    [
        ({GPU: 510_000_000}, "sys/**/17000000.gpu/max_freq", "612000000", (GPU,)),
        ({"gpu_min_hz": 408_000_000}, "sys/**/17000000.gpu/min_freq", "306000000", ("gpu_min_hz",)),
        ({CPU: 729_600_000}, "sys/**/policy0/scaling_max_freq", "2201600", (CPU,)),
        ({"cpu_cores": 4}, "sys/**/cpu7/online", "1", ("cpu_cores",)),
        ({MEM: 665_600_000}, "sys/kernel/debug/bpmp/debug/clk/emc/rate", "204000000", (MEM,)),
    ],
)
def test_what_somebody_else_wrote_to_a_jetson_is_named_by_its_knob(
    jetson: Path, point: dict[str, int], pattern: str, text: str, names: tuple[str, ...]
) -> None:
    """Each control is told by the knob that writes it, and nothing is said of what was put back."""
    with JetsonDevice(root=str(jetson)) as device:
        device.apply(OperatingPoint(point))
        assert device.altered() == ()
        FakeKernel(jetson).write(str(next(iter(sorted(jetson.glob(pattern))))), text)
        assert device.altered() == names
        device.restore()
        assert device.altered() == ()


def test_after_a_switch_of_mode_its_own_writes_are_not_taken_for_somebody_elses(jetson: Path) -> None:
    """A power mode rewrites the other controls; the GPU that was kept awake for it does not count either."""
    with JetsonDevice(root=str(jetson), knobs=(GPU, "power_mode")) as device:
        for mode in ("MODE_50W", "MAXN", "MODE_50W"):
            device.apply(OperatingPoint({GPU: device.space.knob(GPU).levels[0], "power_mode": mode}))
            assert device.altered() == ()
        FakeKernel(jetson).write(f"nvpmodel:{jetson}", "0")
        assert "power_mode" in device.altered()


def test_what_somebody_else_wrote_to_a_processor_is_named_by_its_knob(processor: Path) -> None:
    """Upper and lower limit apart."""
    with CpuDevice(root=str(processor), knobs=(CPU, "cpu_min_hz")) as device:
        device.apply(OperatingPoint({CPU: device.space.knob(CPU).levels[1], "cpu_min_hz": 800_000_000}))
        assert device.altered() == ()
        (processor / "sys/devices/system/cpu/cpufreq/policy1/scaling_max_freq").write_text("900000\n")
        assert device.altered() == (CPU,)


LIGHT = """
import sys
from polythrottle.backends import open_device
from polythrottle.domain.space import OperatingPoint
with open_device(sys.argv[1]) as device:
    lowest = {each.knob.name: each.knob.levels[0] for each in device.offers()}
    device.apply(OperatingPoint({sys.argv[2]: lowest[sys.argv[2]]}))
    device.altered(), device.read(), device.findings(), device.presets
print([name for name in ("numpy", "torch", "pandas") if name in sys.modules])
"""


@pytest.mark.parametrize(("scheme", "knob"), [("jetson", MEM), ("cpu", CPU)])
def test_a_device_is_set_without_numpy(scheme: str, knob: str, jetson: Path, processor: Path) -> None:
    """Listing, setting, reading and checking load none of what a search needs."""
    uri = f"{scheme}?root={jetson if scheme == 'jetson' else processor}"
    done = subprocess.run([sys.executable, "-c", LIGHT, uri, knob], capture_output=True, text=True, check=False)
    assert done.stdout.strip() == "[]", done.stderr
