"""What a Jetson board reads: rails and their joules, heat, over-current, and jetson-stats."""

import json
import os
import re
import shutil
import sys
import threading
import types
from collections.abc import Callable
from pathlib import Path

import pytest

from polythrottle.backends.jetson import JetsonDevice
from polythrottle.backends.jetson.power_rails import Sampler, find_rails, find_total
from polythrottle.backends.probe import Tree
from polythrottle.domain.clock import SystemClock, VirtualClock
from polythrottle.domain.errors import DeviceError, TrialError
from polythrottle.domain.measurement import EnergyKind, Query, Window
from polythrottle.domain.ports import Sensor
from polythrottle.domain.space import OperatingPoint, SearchSpace
from polythrottle.inspect.examination import sensor_findings
from polythrottle.metering.calibration import calibration_path, sensor_of, write_calibration
from polythrottle.metering.point_measurement import measure
from polythrottle.storage.journal.lines import measurement_from, measurement_line
from polythrottle.testing import BOARDS, FakeKernel, plant

ORIN, NANO, THOR = "jetson-agx-orin-jp6", "jetson-nano", "jetson-thor"


def device(root: Path, **options: object) -> JetsonDevice:
    """Return the device of a tree behind its kernel, in virtual time; a guard would not go through that kernel."""
    made = JetsonDevice(root=str(root), controls=FakeKernel(root), clock=VirtualClock(), **options)  # type: ignore[arg-type]
    made._actuator._guarded = False
    return made


def joules(board: JetsonDevice, seconds: float) -> float:
    """Return what a board uses in a time that passes at one power."""
    start_j = board.read().energy_j
    board.clock.sleep(seconds)
    return board.read().energy_j - start_j


def explained(board: JetsonDevice, subject: str) -> str:
    """Return what a board says about one subject."""
    return next(each.explanation for each in board.findings() if each.subject == subject)


def put(file: Path, text: object) -> None:
    """Change a file as the kernel does: in place."""
    file.write_text(f"{text}\n")


def chip(root: Path, address: str) -> Path:
    """Return the folder of a power sensor by its address on the bus."""
    return next((root / "sys/bus/i2c/devices" / address).resolve().glob("hwmon/hwmon*"))


@pytest.fixture
def orin(tmp_path: Path) -> Path:
    """A Jetson AGX Orin whose rails are 20 V × 1 A, 10 V × 0.5 A, 5 V × 2 A, and 7 W of memory beside the total."""
    root = plant(ORIN, tmp_path / "board")
    first, second = chip(root, "1-0040"), chip(root, "1-0041")
    for folder, channel, millivolt, milliamp in (
        (first, 1, 20_000, 1_000),
        (first, 2, 10_000, 500),
        (first, 3, 5_000, 2_000),
        (second, 2, 7_000, 1_000),
    ):
        put(folder / f"in{channel}_input", millivolt)
        put(folder / f"curr{channel}_input", milliamp)
    return root


@pytest.mark.parametrize("name", BOARDS)
def test_every_board_integrates_its_own_total(name: str, tmp_path: Path) -> None:
    """Power times time is energy, over the rails that the catalogue calls the total."""
    board = device(plant(name, tmp_path / "board"))
    one, ten = joules(board, 1.0), joules(board, 10.0)
    assert 1.0 < one < 200.0
    assert ten == pytest.approx(10 * one)
    assert board.boundary.endswith("; files of a tree, not a board")


def test_the_total_is_the_sum_of_its_rails_and_nothing_besides(orin: Path) -> None:
    """Millivolts times milliamperes of the three rails; unused channels and the sum of shunts do not count."""
    board = device(orin)
    assert joules(board, 2.0) == pytest.approx(2 * (20.0 + 5.0 + 10.0))
    assert board.boundary.startswith("VDD_GPU_SOC + VDD_CPU_CV + VIN_SYS_5V0 (")
    assert "besides there are VDDQ_VDD2_1V8AO" in explained(board, "energy")
    assert not any("NC" in rail.name or "sum" in rail.name for rail in find_rails(Tree(orin, FakeKernel(orin))))


def test_parts_of_an_input_rail_are_not_added_to_it(tmp_path: Path) -> None:
    """On a Nano the input is the total, in the milliwatts of its older driver."""
    root = plant(NANO, tmp_path / "board")
    for index, milliwatt in enumerate((5_000, 2_000, 1_000)):
        put(next(root.glob(f"sys/devices/**/iio:device0/in_power{index}_input")), milliwatt)
    assert joules(device(root), 3.0) == pytest.approx(15.0)


def test_thor_counts_microwatts_and_lets_a_rail_read_below_zero(tmp_path: Path) -> None:
    """The INA238 has the kit's input in µW; an idle GPU rail may read just below zero."""
    root = plant(THOR, tmp_path / "board")
    put(chip(root, "2-0044") / "power1_input", 42_500_000)
    put(chip(root, "2-0040") / "curr1_input", -3)
    board = device(root)
    assert joules(board, 2.0) == pytest.approx(85.0)
    assert board.boundary.startswith("VIN (whole kit, read by its INA238)")


def test_thor_on_a_carrier_without_the_kit_s_sensor_is_measured_by_its_module(tmp_path: Path) -> None:
    """Without the INA238 the module's own rails make up the total (jetson_stats PR 900; ThorFAN), and it says so."""
    root = plant(THOR, tmp_path / "board")
    shutil.rmtree(root / "sys/bus/i2c/drivers/ina238")
    (root / "sys/bus/i2c/devices/2-0044").unlink()
    folder = next(root.glob("sys/devices/**/2-0044"))
    for link in root.glob("sys/class/hwmon/*"):
        if link.resolve().is_relative_to(folder.resolve()):
            link.unlink()
    shutil.rmtree(folder)
    board = device(root)
    assert board.boundary.startswith("VDD_GPU + VDD_CPU_SOC_MSS + VIN_SYS_5V0 (rails of the module")
    assert "the sensor of VIN is missing" in board.boundary
    assert 1.0 < joules(board, 1.0) < 200.0


def test_a_total_below_zero_never_takes_energy_back(tmp_path: Path) -> None:
    """A sensor that is off by a little must not let the total fall."""
    root = plant(THOR, tmp_path / "board")
    put(chip(root, "2-0044") / "power1_input", -20_000)
    assert joules(device(root), 5.0) == 0.0


def test_a_change_of_power_is_integrated_by_the_trapezoid_rule(orin: Path) -> None:
    """From 35 W to 55 W in four seconds is 180 J."""
    board = device(orin)
    start_j = board.read().energy_j
    board.clock.sleep(4.0)
    put(chip(orin, "1-0040") / "curr1_input", 2_000)
    assert board.read().energy_j - start_j == pytest.approx(180.0)


def test_the_factor_for_the_wall_multiplies_and_is_said(orin: Path) -> None:
    """What the user calibrated is in the joules and in the boundary."""
    board = device(orin, factor=1.16)
    assert joules(board, 1.0) == pytest.approx(35.0 * 1.16)
    assert "; times 1.16 for the wall plug, as stated" in board.boundary


def test_joules_of_a_tree_are_simulated_and_those_of_a_kernel_measured(
    orin: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only where a kernel is mounted are the sensors more than files, as in a container that has the host's."""
    assert device(orin).energy_kind is EnergyKind.SIMULATED
    monkeypatch.setattr(os.path, "ismount", lambda path: str(path).endswith("/sys"))
    assert device(orin).energy_kind is EnergyKind.MEASURED
    assert device(orin).boundary.endswith("not seen)")


def test_sensors_that_move_are_found_again(orin: Path) -> None:
    """Another number, or a driver that was loaded anew, changes nothing."""
    kernel = FakeKernel(orin)
    board = device(orin)
    with board:
        board.read()
        kernel.renumber("/sys/class/hwmon/hwmon2", "hwmon7")
        folder = chip(orin, "1-0040")
        for file in list(folder.iterdir()):
            text = file.read_text()
            file.unlink()
            file.write_text(text)
        put(folder / "curr1_input", 3_000)
        board.read()
        assert joules(board, 1.0) == pytest.approx(75.0)


def test_a_missing_sensor_makes_energy_unknown_never_smaller(orin: Path) -> None:
    """Without one rail of the total there is no total: one line says which, and the knobs still work."""
    (chip(orin, "1-0040") / "in2_label").unlink()
    board = device(orin)
    with board:
        board.apply(board.space[0])
        with pytest.raises(DeviceError, match="VDD_CPU_CV is missing") as caught:
            board.read()
    assert "\n" not in str(caught.value)
    assert board.boundary.startswith("unknown: ")
    assert next(each.works for each in board.findings() if each.subject == "energy") is False


def test_a_sensor_that_vanishes_is_a_device_error(orin: Path) -> None:
    """Energy is never made up for a rail that cannot be read any more."""
    with device(orin) as board:
        board.read()
        (chip(orin, "1-0040") / "curr2_input").unlink()
        with pytest.raises(DeviceError, match="can no longer be read"):
            board.read()


def test_a_board_without_an_entry_takes_its_input_rail_else_the_sum() -> None:
    """Both say that what they leave out is not known."""
    assert find_total(("VDD_GPU", "VDD_IN"), None).names == ("VDD_IN",)
    assert find_total(("VDD_GPU", "VDD_SOC"), None).names == ("VDD_GPU", "VDD_SOC")
    assert "not known" in find_total(("VDD_GPU",), None).boundary
    assert find_total((), None).names == ()


def test_over_current_marks_readings_until_the_next_point(orin: Path) -> None:
    """An event within a window is still known by its end, and forgotten with the next point or after a minute."""
    kernel = FakeKernel(orin)
    with device(orin) as board:
        board.apply(board.space.default)
        assert not board.read().throttled
        kernel.throttle()
        assert [board.read().throttled for _ in range(2)] == [True, True]
        board.apply(board.space[0])
        assert not board.read().throttled
        kernel.throttle()
        assert board.read().throttled
        board.clock.sleep(61.0)
        assert not board.read().throttled


NORMAL = {"jetson-orin-nano": 3, "jetson-orin-nx": 3, "jetson-agx-orin-jp6": 3, "jetson-thor": 3}
MEANT = {
    ("jetson-xavier-nx", 3): "OC3 (mean current above its limit)",
    ("jetson-xavier-nx", 2): "OC2 (supply below 4.5 V)",
    ("jetson-agx-xavier", 1): "OC1 (current above its limit)",
    ("jetson-orin-nano", 1): "OC1 (supply voltage too low)",
    ("jetson-thor", 2): "OC2 (mean power above its limit)",
}


@pytest.mark.parametrize("name", NORMAL)
def test_what_is_normal_on_a_board_spoils_nothing_and_is_counted(name: str, tmp_path: Path) -> None:
    """OC3 of Orin and Thor, which Orin Nano and NX in the Super modes see up to 30 times a second, at rest too."""
    kernel = FakeKernel(plant(name, tmp_path / "b"))
    board = device(kernel.root)
    kernel.throttle(27_390, NORMAL[name])
    reading = board.read()
    assert (reading.throttled, reading.cause, reading.cuts) == (False, "", 27_390)
    assert "OC3 (power above its limit for a moment) is normal here" in explained(board, "temperature")
    kernel.throttle(1, 2)
    assert (board.read().throttled, board.read().cuts) == (True, 27_390)


@pytest.mark.parametrize(("name", "number"), MEANT)
def test_an_event_that_spoils_a_window_is_named_by_what_it_means_there(name: str, number: int, tmp_path: Path) -> None:
    """On Xavier all three do, and mean other things than on Orin (forums.developer.nvidia.com, topic 307919)."""
    kernel = FakeKernel(plant(name, tmp_path / "b"))
    board = device(kernel.root)
    assert board.read().cause == ""
    kernel.throttle(1, number)
    assert (board.read().throttled, board.read().cause) == (True, MEANT[name, number])


@pytest.mark.parametrize("name", ["jetson-xavier-nx", "jetson-agx-xavier"])
def test_xavier_counts_six_kinds_of_event_in_files_of_another_name(name: str, tmp_path: Path) -> None:
    """tegra-oc-event.c of NVIDIA's kernels 4.9 and 5.10, for tegra194: oc1_irq_cnt to oc6_irq_cnt in soctherm_oc."""
    kernel = FakeKernel(plant(name, tmp_path / "b"))
    assert not list(kernel.root.glob("sys/class/hwmon/*/oc*_event_cnt"))
    board = device(kernel.root)
    kernel.throttle(1, 5)
    assert (board.read().throttled, board.read().cause) == (True, "OC5")


def test_the_time_that_normal_cuts_take_is_told_where_the_firmware_tells_it(tmp_path: Path) -> None:
    """27,390 events of an Orin Nano Super in 3,605 s: 7.6 a second, 0.8 % of the time at half the clock."""
    kernel = FakeKernel(plant("jetson-orin-nano", tmp_path / "b"))
    kernel.throttle(27_390, 3)
    board = device(kernel.root)
    assert board.read().cut_s == pytest.approx(27_390 * 33_569 / 31.25e6)
    put(kernel.root / "proc/uptime", "3605.00 20000.00")
    assert "7.6 times a second since the start, for 0.82% of the time" in explained(board, "temperature")
    assert device(plant("jetson-thor", tmp_path / "thor")).read().cut_s is None


def test_a_window_tells_how_often_the_clocks_were_cut(tmp_path: Path) -> None:
    """And is none the worse for it: 30 events a second are a rate in the measurement, not three windows thrown away."""
    kernel = FakeKernel(plant("jetson-orin-nano", tmp_path / "b"))
    with device(kernel.root) as board:
        workload = Cutting(board, kernel)
        found = measure(board, workload, board.space.default, Window(100, 0.0, 1000, warmup=1))
    assert found.cuts_per_s == pytest.approx(10, rel=0.05)
    assert found.cut_share == pytest.approx(10 * 33_569 / 31.25e6, rel=0.05)
    assert measurement_from(json.loads(json.dumps(measurement_line(found)))) == found


LIFTED = {
    "jetson-orin-nano": ("gpu_max_hz", "sys/class/devfreq/17000000.gpu", "max_freq", "1020000000"),
    "jetson-agx-orin-jp6": ("cpu_max_hz", "sys/devices/system/cpu/cpufreq/policy0", "scaling_max_freq", "2201600"),
    "jetson-xavier-nx": ("mem_hz", "sys/kernel/debug/bpmp/debug/clk/emc", "mrq_rate_locked", "0"),
}


@pytest.mark.parametrize("name", LIFTED)
def test_a_limit_that_another_program_lifts_within_a_window_is_found(name: str, tmp_path: Path) -> None:
    """Also before the last query: that window counts for nothing, and the next one is at the point again."""
    kernel = FakeKernel(plant(name, tmp_path / "b"))
    knob, folder, file, text = LIFTED[name]
    key = f"{kernel.root}/{folder}/{file}"
    with device(kernel.root, knobs=(knob,)) as board:
        point = OperatingPoint({knob: min(int(level) for level in board.space.knobs[0].levels)})
        board.apply(point)
        before = kernel.read(key)
        assert board.read().overrun == ""
        for query in (12, 39):
            workload = Lifted(board, query, lambda: kernel.write(key, text))
            found = measure(board, workload, point, Window(30, 0.0, 30, warmup=10), sensor=Sensor())
            assert found.requests == 80
            assert kernel.read(key) == before


class Lifted:
    """A workload on virtual time that takes 0.1 s a query; before one of them something happens."""

    uri, space = "lifted", SearchSpace.unit()

    def __init__(self, board: JetsonDevice, before: int, happens: Callable[[], object]) -> None:
        self._board, self._before, self._happens, self._served = board, before, happens, 0

    def apply(self, point: OperatingPoint) -> None:
        """Do nothing."""

    def query(self) -> Query:
        """Take a tenth of a second."""
        if self._served == self._before:
            self._happens()
        self._served += 1
        self._board.clock.sleep(0.1)
        return Query(0.1)

    def close(self) -> None:
        """Do nothing."""


class Cutting:
    """A workload on virtual time that takes 0.1 s a query, with one over-current event in each."""

    uri, space = "cutting", SearchSpace.unit()

    def __init__(self, board: JetsonDevice, kernel: FakeKernel, number: int = 3) -> None:
        self._board, self._kernel, self._number = board, kernel, number

    def apply(self, point: OperatingPoint) -> None:
        """Do nothing."""

    def query(self) -> Query:
        """Take a tenth of a second."""
        self._board.clock.sleep(0.1)
        if self._number:
            self._kernel.throttle(1, self._number)
        return Query(0.1)

    def close(self) -> None:
        """Do nothing."""


@pytest.mark.slow
def test_a_window_that_an_event_spoils_says_which(tmp_path: Path) -> None:
    """OC1 of Orin is a supply that sags: no window beside it is valid, and the failure names it."""
    kernel = FakeKernel(plant("jetson-orin-nano", tmp_path / "b"))
    window = Window(30, 0.0, 1000, warmup=1)
    with (
        device(kernel.root) as board,
        pytest.raises(TrialError, match=r"throttled \(OC1 \(supply voltage too low\)\), so the window is not valid"),
    ):
        measure(board, Cutting(board, kernel, 1), board.space.default, window)


@pytest.mark.slow
def test_a_processor_far_below_the_clock_it_was_asked_for_is_named(tmp_path: Path) -> None:
    """A Thor that fell to a quarter of its clock at boot shows no events: only ``cpuinfo_cur_freq`` tells."""
    kernel = FakeKernel(plant("jetson-thor", tmp_path / "b"))
    board = device(kernel.root)
    kernel.hold_back(0.5)  # one look below, as within a normal event, is nothing
    assert not board.read().throttled
    kernel.hold_back(0.0)
    board.clock.sleep(0.5)
    assert not board.read().throttled
    kernel.hold_back(0.75)
    for _ in range(3):
        board.clock.sleep(0.5)
        reading = board.read()
    assert reading.throttled
    assert re.fullmatch(r"policy\d+ runs at \d+ MHz where its governor has asked for \d+ MHz", reading.cause)
    findings = {each.subject: each for each in sensor_findings(board)}
    assert findings["throttling"].works is False
    assert "where its governor has asked for" in findings["throttling"].explanation
    with board, pytest.raises(TrialError, match="where its governor has asked for"):
        measure(board, Cutting(board, kernel, 0), board.space.default, Window(30, 0.0, 1000, warmup=1))


def test_counters_that_move_are_found_again(orin: Path) -> None:
    """A renumbered folder neither hides an event nor makes one."""
    kernel = FakeKernel(orin)
    kernel.throttle(3)
    board = device(orin)
    kernel.renumber("/sys/class/hwmon/hwmon3", "hwmon8")
    assert not board.read().throttled
    kernel.throttle()
    assert board.read().throttled


def test_heat_beyond_the_kernel_s_trip_marks_the_reading(orin: Path) -> None:
    """The junction's zone is the one that is read: others may answer EAGAIN, and each retry costs time."""
    zones = {file.read_text().strip(): file.parent for file in orin.glob("sys/class/thermal/thermal_zone*/type")}
    put(zones["tj-thermal"] / "temp", 71_500)
    put(zones["cpu-thermal"] / "temp", 120_000)
    board = device(orin)
    reading = board.read()
    assert (reading.temperature_c, reading.throttled) == (71.5, False)
    put(zones["tj-thermal"] / "temp", 99_000)
    assert board.read().throttled


def test_a_sensor_that_is_off_is_unknown(orin: Path) -> None:
    """Absurd temperatures are None, never zero."""
    zones = {file.read_text().strip(): file.parent for file in orin.glob("sys/class/thermal/thermal_zone*/type")}
    put(zones["tj-thermal"] / "temp", -274_000)
    assert device(orin).read().temperature_c is None


class Constant:
    """A source of 10 W that says when it has been read often enough, and can fail."""

    def __init__(self, enough: int = 3) -> None:
        self.enough, self.reads, self.broken, self.closed = enough, 0, False, False
        self.reached = threading.Event()

    def power_w(self) -> float:
        """Return 10 W, or fail."""
        self.reads += 1
        if self.reads >= self.enough:
            self.reached.set()
        if self.broken:
            raise OSError("no answer")
        return 10.0

    def stale(self) -> bool:
        """Say no."""
        return False

    def renew(self) -> None:
        """Find nothing new."""

    def close(self) -> None:
        """Note that it is closed."""
        self.closed = True


def test_the_thread_samples_by_itself_and_tells_its_cost() -> None:
    """While it runs power is read without anybody asking, and the processor time that takes is counted."""
    source = Constant()
    sampler = Sampler(source, SystemClock(), hz=200.0)
    sampler.start()
    assert source.reached.wait(30.0)
    assert sampler.total_j() > 0
    sampler.stop()
    busy_s, samples = sampler.cost
    assert samples >= 2
    assert 0 < busy_s < 30.0
    assert source.closed


def test_the_thread_outlives_a_sensor_that_fails_for_a_moment() -> None:
    """A failed sample is made up for by the next; only a reading that fails tells."""
    source = Constant()
    source.broken = True
    sampler = Sampler(source, SystemClock(), hz=200.0)
    sampler.start()
    assert source.reached.wait(30.0)
    with pytest.raises(DeviceError, match="can no longer be read: no answer"):
        sampler.total_j()
    source.broken = False
    sampler.total_j()
    assert sampler.total_j() > 0
    sampler.stop()


class Hand:
    """A clock moved by hand that is not a virtual one, so that the thread runs."""

    now_s = 0.0

    def now(self) -> float:
        """Return the time."""
        return self.now_s

    def sleep(self, duration_s: float) -> None:
        """Move on."""
        self.now_s += duration_s


def test_a_window_with_a_hole_in_its_power_is_not_valid() -> None:
    """Where nothing was sampled for long the joules are not known: said once, then it goes on."""
    clock, source = Hand(), Constant(enough=1)
    sampler = Sampler(source, clock, hz=0.1)
    sampler.start()
    assert source.reached.wait(30.0)
    sampler.total_j()
    clock.sleep(1000.0)
    with pytest.raises(TrialError, match=r"not sampled for 1000\.0 s"):
        sampler.total_j()
    assert sampler.total_j() == pytest.approx(10_000.0)
    sampler.stop()


def jtop(power: object, *, starts: bool = True) -> types.ModuleType:
    """Return a stand-in for the module of jetson-stats."""
    module = types.ModuleType("jtop")

    class JtopException(Exception):
        pass

    class Session:
        def __init__(self, interval: float) -> None:
            self.power = power

        def start(self) -> None:
            if not starts:
                raise JtopException("The jtop.service is not active")

        def ok(self, *, spin: bool = False) -> bool:
            return spin

        def close(self) -> None:
            pass

    module.jtop, module.JtopException = Session, JtopException  # type: ignore[attr-defined]
    return module


@pytest.fixture
def user(monkeypatch: pytest.MonkeyPatch) -> None:
    """Run as somebody who is not root."""
    monkeypatch.setattr(os, "geteuid", lambda: 1000)


RAILS = {"VDD_GPU_SOC": 20_000, "VDD_CPU_CV": 5_000, "VIN_SYS_5V0": 10_000, "VDDQ_VDD2_1V8AO": 7_000}


@pytest.mark.usefixtures("user")
def test_jetson_stats_is_read_when_asked_for(orin: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its rails are added up by the catalogue's total, not by its own, which counts parts twice."""
    rails = {name: {"power": milliwatt, "online": True} for name, milliwatt in RAILS.items()}
    monkeypatch.setitem(sys.modules, "jtop", jtop({"rail": rails, "tot": {"power": 42_000}}))
    board = device(orin, reader="jtop")
    assert joules(board, 2.0) == pytest.approx(70.0)
    assert board.uri.startswith("jetson?reader=jtop&root=")
    assert board.boundary.endswith("; as jetson-stats last read it")


def test_jetson_stats_never_enters_a_privileged_process(orin: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """For root it is refused with the reason, and not even imported."""
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    monkeypatch.setitem(sys.modules, "jtop", None)
    with pytest.raises(DeviceError, match="refused for root: jetson-stats speaks pickle"):
        device(orin, reader="jtop")


@pytest.mark.usefixtures("user")
@pytest.mark.parametrize(
    ("module", "says"),
    [
        (None, r"pip install 'polythrottle\[jetson\]'"),
        (jtop({}, starts=False), "is jtop.service running"),
        (jtop({}), "no power by rail"),
        (jtop({"rail": {"VDD_GPU_SOC": {"power": None}, "VDD_CPU_CV": {}, "VIN_SYS_5V0": {}}}), "has no power"),
    ],
)
def test_a_jetson_stats_that_does_not_answer_is_one_line(
    module: types.ModuleType | None, says: str, orin: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not installed, not running, of another version, or without power: said at opening."""
    monkeypatch.setitem(sys.modules, "jtop", module)
    with pytest.raises(DeviceError, match=says) as caught:
        device(orin, reader="jtop")
    assert "\n" not in str(caught.value)


def test_jetson_stats_is_not_loaded_unless_asked_for(orin: Path) -> None:
    """The sensors are read directly by default."""
    joules(device(orin), 1.0)
    assert "jtop" not in sys.modules


NVPOWER = 0.43
"""Over what NVIDIA's nvpower.sh (BSD-3) has the INA3221 of tegra194 and tegra234 average, in seconds."""


@pytest.mark.parametrize(
    ("name", "over_s"),
    [
        ("jetson-orin-nano", NVPOWER),
        ("jetson-agx-orin-jp6", NVPOWER),
        ("jetson-xavier-nx", NVPOWER),
        ("jetson-tx2", 0.0),
    ],
)
def test_a_value_is_the_mean_over_what_its_chip_says(name: str, over_s: float, tmp_path: Path) -> None:
    """And stands for as long: warm-up lasts until both are over, and no window is too short for six of its batches."""
    board = device(plant(name, tmp_path / "b"))
    sensor = sensor_of(board)
    assert (sensor.step_s, sensor.average_s, sensor.settle_s) == (over_s, over_s, pytest.approx(2 * over_s))
    assert sensor.least_s == pytest.approx(12 * over_s)
    assert ("mean over 430 ms" in explained(board, "energy")) == bool(over_s)


def test_averaging_is_read_anew_and_goes_before_a_calibration(orin: Path) -> None:
    """For another program may set it at any time; what was calibrated of the rest stays."""
    board = device(orin)
    write_calibration(calibration_path(board), board, Sensor(factor=1.1, lag_s=0.5))
    assert (sensor_of(board).average_s, sensor_of(board).factor) == (NVPOWER, 1.1)
    for file in orin.glob("sys/class/hwmon/hwmon*/update_interval"):
        put(file, 860)
    assert sensor_of(board).step_s == 0.86
    for file in orin.glob("sys/class/hwmon/hwmon*/update_interval"):
        put(file, 2)  # far shorter than from one sample to the next
    assert sensor_of(board) == Sensor(factor=1.1, lag_s=0.5)
