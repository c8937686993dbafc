"""Files of sysfs that answer EAGAIN, as those of a gated sensor do: one reader meets them everywhere, by descriptor."""

import re
from pathlib import Path

import pytest
from builders import FakeDevice, FakeWorkload

from polythrottle.actuation.drivers.controls import text_of
from polythrottle.backends.cpu.energy import RaplCounter, RaplCounters
from polythrottle.backends.jetson import JetsonDevice
from polythrottle.backends.meters import open_meter
from polythrottle.domain.clock import VirtualClock
from polythrottle.domain.errors import DeviceError, TrialError
from polythrottle.domain.measurement import Reading, Window
from polythrottle.domain.space import OperatingPoint
from polythrottle.inspect.examination import sensor_findings
from polythrottle.inspect.tree_files import collect
from polythrottle.metering.point_measurement import measure
from polythrottle.testing import FakeKernel, plant
from polythrottle.testing.kernel.machine import silence

PACKAGE = Path(__file__).resolve().parent.parent / "polythrottle"
PLAIN = {
    "backends/replay.py": "tables that were recorded",
    "actuation/limits.py": "the administrator's limits",
    "backends/meters/file_meters.py": "a user's log of a meter",
    "actuation/client/board.py": "the token of the daemon itself",
}
"""What reads files of a user, not of the kernel, in the parts that read the kernel's."""


def test_a_text_file_makes_a_type_error_of_it_and_a_descriptor_an_os_error(tmp_path: Path) -> None:
    """As CPython does on a real board, so that a reader that would fall there falls here."""
    file = tmp_path / "temp"
    file.write_text("45000\n")
    with silence(lambda path: path == str(file)):
        with pytest.raises(TypeError, match="NoneType"), open(file, encoding="utf-8") as bare:
            bare.read()
        with pytest.raises(BlockingIOError):
            text_of(file)
        assert (tmp_path / "other").write_text("1") == 1
    assert file.read_text() == "45000\n"


def test_only_one_reader_reads_the_kernels_files() -> None:
    """No text file is opened where sysfs is read; what reads a user's files is named here."""
    bare = re.compile(r"\.read_text\(|\.read_bytes\(|(?<!def )(?<![\w.])open\(|\.open\(\"r")
    for folder in ("actuation", "backends", "inspect"):
        for path in sorted((PACKAGE / folder).rglob("*.py")):
            if str(path.relative_to(PACKAGE)) not in PLAIN:
                assert not bare.search(path.read_text()), f"{path} reads past the one reader"


def test_a_meter_of_the_kernel_that_sleeps_is_one_clear_error(tmp_path: Path) -> None:
    """A power file that answers EAGAIN cannot be read now; it is not a fault of the program."""
    (tmp_path / "power1_input").write_text("8000000\n")
    meter = open_meter(f"hwmon:{tmp_path}")
    assert meter.power_w()[1] == 8.0
    with silence(lambda path: path.endswith("power1_input")), pytest.raises(TrialError, match="temporarily"):
        meter.power_w()


@pytest.mark.parametrize("board", ["jetson-orin-nano", "jetson-thor"])
def test_a_board_whose_sensors_sleep_is_examined_and_read(board: str, tmp_path: Path) -> None:
    """By whatever call: the device, doctor's look at its sensors, and the snapshot, which says what did not answer."""
    kernel = FakeKernel(plant(board, tmp_path / "b"))
    kernel.doze()
    with kernel.installed():
        device = JetsonDevice(root=str(kernel.root), clock=VirtualClock())
        device._actuator._guarded = False
        assert device.read().temperature_c is not None
        assert all(each.explanation for each in (*device.findings(), *sensor_findings(device)))
        zones = [str(path) for path in kernel.root.glob("sys/class/thermal/thermal_zone*/temp")]
        found = collect(kernel.root, zones)
    silent = {place for place, why in found.unread.items() if why == "Resource temporarily unavailable"}
    types = {kernel.root / place: (kernel.root / place).with_name("type").read_text().strip() for place in silent}
    assert {name for name in types.values() if name.startswith("gpu")} == {"gpu-thermal"}
    assert not any(name.startswith("tj") for name in types.values())


def test_a_junction_that_is_silent_for_a_moment_is_unknown_for_that_moment(tmp_path: Path) -> None:
    """A look now and then gives EAGAIN under load; doctor tells what the others said."""
    kernel = FakeKernel(plant("jetson-orin-nano", tmp_path / "b"))
    device = JetsonDevice(root=str(kernel.root), clock=VirtualClock())
    device._actuator._guarded = False
    zone = next(
        path.with_name("temp").resolve()
        for path in kernel.root.glob("sys/class/thermal/thermal_zone*/type")
        if path.read_text() == "tj-thermal\n"
    )
    with silence(lambda path: path == str(zone)):
        assert device.read().temperature_c is None
        assert not device.read().throttled
    looks = iter(range(1000))
    with silence(lambda path: path == str(zone) and next(looks) % 3 == 0):
        told = {each.subject: each.works for each in sensor_findings(device)}
    assert told["temperature reading"]


def test_a_counter_of_a_processor_that_does_not_answer_is_one_line(tmp_path: Path) -> None:
    """Not a type error out of a text file."""
    file = tmp_path / "energy_uj"
    file.write_text("100\n")
    counted = RaplCounters([RaplCounter.of("package-0", file)], "a test")
    with silence(lambda path: path == str(file)), pytest.raises(DeviceError, match="energy counter can no longer be"):
        counted.total_j()


class Silent(FakeDevice):
    """A device that cools by a degree a look and tells its temperature at every other one."""

    heat_c, looks = 60.0, 0

    def read(self) -> Reading:
        """Return a reading, cooler than the last."""
        self.looks, self.heat_c = self.looks + 1, self.heat_c - 1
        seen = super().read()
        told_c = self.heat_c if self.looks % 2 == 0 else None
        return Reading(seen.time_s, seen.energy_j, told_c)


def test_a_device_that_does_not_tell_its_temperature_for_a_moment_is_waited_for() -> None:
    """Cooling ends at the temperature that was asked for, not at the first look that tells nothing."""
    device = Silent()
    window = Window(10, 0.0, 20, warmup=0, cool_c=50.0)
    point = OperatingPoint({"gpu_max_hz": 800_000_000, "batch_size": 4})
    measured = measure(device, FakeWorkload(device), point, window)
    assert measured.temperature_c is not None
    assert measured.temperature_c <= 50.0
