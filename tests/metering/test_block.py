"""The energy of any block of code: `polythrottle.energy`, and what an external meter says in a device's place."""

import math
import threading
import time
from pathlib import Path

import numpy as np
import pytest
from builders import ROWS, FakeDevice

import polythrottle
from polythrottle.backends.jetson import JetsonDevice
from polythrottle.backends.meters import MeterReader, metered
from polythrottle.domain.clock import Clock, SystemClock
from polythrottle.domain.errors import DeviceError, InvalidInput
from polythrottle.domain.measurement import EnergyKind, Interval, Reading
from polythrottle.domain.ports import EXACT_SENSOR, Sensor
from polythrottle.metering.energy import WindowSample
from polythrottle.metering.energy_block import Drawn, EnergyBlock, drawn
from polythrottle.testing import FakeKernel, plant
from polythrottle.testing.ground_truth import SENSORS, Rig, Traffic, TrueEnergy, averaging
from polythrottle.tuning.setup import Setup


class Real(FakeDevice):
    """A device on real time that draws 10 W, until it is told to fail."""

    uri, energy_kind = "mine", EnergyKind.MEASURED

    def __init__(self, sensor: Sensor = EXACT_SENSOR) -> None:
        super().__init__()
        self.clock: Clock = SystemClock()  # type: ignore[assignment]
        self.sensor = sensor
        self.failing = False
        self.reads = 0

    def read(self) -> Reading:
        """Return the time times 10 W, or fail."""
        self.reads += 1
        if self.failing:
            raise DeviceError("the wire is cut")
        return super().read()


class Plug:
    """A power meter that shows 20 W, anew every 20 ms."""

    energy_kind, boundary, step_s, average_s = "measured", "everything behind the plug", 0.02, 0.02

    def power_w(self) -> tuple[float, float]:
        """Return when it was shown, and 20 W."""
        return time.perf_counter() // 0.02 * 0.02, 20.0


def spin(seconds: float) -> None:
    """Be busy for so long."""
    end_s = time.perf_counter() + seconds
    while time.perf_counter() < end_s:
        pass


def looked(rig: Rig, sensor: Sensor, begin_s: float, span_s: float) -> tuple[tuple[float, Interval, str], float]:
    """Return what looks at a rig say of a block on it, and what it truly drew."""
    times_s = [float(each) for each in np.arange(begin_s, begin_s + span_s, 0.0125)]
    looks = [WindowSample(Reading(time_s, rig.read_at(time_s))) for time_s in times_s]
    true_j = rig._course.at(np.array([times_s[0], times_s[-1]]))
    return drawn(looks, sensor, EnergyKind.MEASURED), float(true_j[1] - true_j[0])


def test_a_simulated_board_draws_while_it_works_and_only_then() -> None:
    """Joules, seconds and watts are the board's own, exactly; without work no time passes, and that is said."""
    board, served = Setup("sim:jetson-agx-orin", "resnet50").open()
    with polythrottle.energy(board) as e:
        for _ in range(50):
            served.query()
    now = board.read()
    assert (e.joules, e.seconds, e.watts) == pytest.approx((now.energy_j, now.time_s, now.energy_j / now.time_s))
    assert (e.kind, e.boundary, e.notes) == (EnergyKind.SIMULATED, board.boundary, ())
    assert e.interval.half == 0
    assert repr(e).startswith(f"<energy {e.joules:.4g} J simulated ± 0 J")
    with polythrottle.energy("sim:jetson-agx-orin") as e:
        spin(0.001)
    assert math.isnan(e.joules)
    assert not e.interval.known
    assert "no simulated time passed" in e.notes[0]
    assert "unknown" in repr(e)


@pytest.mark.parametrize("name", ["counter in 100 ms steps", "25 of every 100 ms", "rounded to 1 W, 10 Hz"])
def test_the_interval_holds_what_the_block_drew(name: str) -> None:
    """Of blocks on sensors that step, sample and round, at least 95 % hold the truth, within a tenth of it or so."""
    found = [
        looked(Rig(Traffic(), SENSORS[name], seed, 1500), SENSORS[name].sensor, 5 + seed / 20, 4.0)
        for seed in range(20)
    ]
    assert sum(true_j in interval for (_, interval, _), true_j in found) >= 19
    assert all(interval.half < 0.25 * joules for (joules, interval, _), _ in found)


@pytest.mark.parametrize(("before_w", "within_w"), [(5, 50), (50, 5)])
def test_what_an_average_shows_of_before_the_block_is_in_the_interval(before_w: float, within_w: float) -> None:
    """Power jumps as the block begins: a mean over 430 ms that stands as long shows that much of the time before."""
    distortion = averaging(0.43)
    assert distortion.shows is not None
    course = TrueEnergy(np.array([0.0, 5.0, 20.0]), np.array([0.0, 5.0 * before_w, 5.0 * before_w + 15.0 * within_w]))
    times_s = np.arange(5.0, 14.0, 0.05)
    for phase in np.linspace(0, 0.99, 12):
        totals_j = np.interp(times_s, *distortion.shows(course, float(phase)))
        looks = [WindowSample(Reading(float(t), float(j))) for t, j in zip(times_s, totals_j, strict=True)]
        _, interval, why = drawn(looks, distortion.sensor, EnergyKind.MEASURED)
        assert within_w * (times_s[-1] - times_s[0]) in interval
        assert interval.known
        assert why == ""


@pytest.mark.parametrize(("before_w", "within_w"), [(5, 50), (50, 5)])
def test_what_a_step_holds_of_the_time_before_the_block_is_in_the_interval(before_w: float, within_w: float) -> None:
    """Power jumps as the block begins, amid a step of the counter: the truth is in the interval all the same."""
    for phase_s in np.linspace(0, 0.099, 12):
        shown_s = np.floor((np.linspace(5, 5.4, 33) - phase_s) / 0.1) * 0.1 + phase_s
        totals_j = before_w * np.minimum(shown_s, 5) + within_w * np.maximum(0, shown_s - 5)
        looks = [
            WindowSample(Reading(float(t), float(j))) for t, j in zip(np.linspace(5, 5.4, 33), totals_j, strict=True)
        ]
        _, interval, why = drawn(looks, Sensor(step_s=0.1, counts=True), EnergyKind.MEASURED)
        assert within_w * 0.4 in interval
        assert interval.known
        assert why == ""


def test_a_block_shorter_than_the_sensor_moves_is_not_known() -> None:
    """Below a step nothing is said, at a few steps the ± is wide, and of a slow sensor there is no upper end."""
    sensor = SENSORS["counter in 100 ms steps"].sensor
    rig = Rig(Traffic(), SENSORS["counter in 100 ms steps"], 0, 1500)
    (joules, interval, why), _ = looked(rig, sensor, 5.0, 0.05)
    assert math.isnan(joules)
    assert interval == Interval(0.0, math.inf)
    assert "100 ms" in why
    counting = Sensor(step_s=0.1, counts=True)
    (joules, interval, why), true_j = looked(rig, counting, 5.0, 0.2)
    assert 0 < interval.low < true_j
    assert interval.high == math.inf
    (joules, interval, why), true_j = looked(rig, counting, 5.0, 0.4)
    assert true_j in interval
    assert interval.half > 0.2 * joules
    (joules, interval, why), _ = looked(rig, Sensor(step_s=0.1, duty=0.25, period_s=0.1), 5.0, 0.5)
    assert joules > 0
    assert interval == Interval(0.0, math.inf)
    assert "from 1.2 s on" in why


def test_a_total_that_falls_or_stands_still_tells_nothing() -> None:
    """A reset counter and a frozen one give no joules instead of wrong ones; an estimate may well be 0."""
    still = [WindowSample(Reading(time_s, 5.0)) for time_s in (0.0, 1.0, 2.0)]
    fell = [WindowSample(Reading(0.0, 5.0)), WindowSample(Reading(1.0, 6.0)), WindowSample(Reading(2.0, 1.0))]
    assert "did not move" in drawn(still, EXACT_SENSOR, EnergyKind.MEASURED)[2]
    assert "fell" in drawn(fell, EXACT_SENSOR, EnergyKind.MEASURED)[2]
    assert drawn(still, Sensor(step_s=0.001, counts=True), EnergyKind.ESTIMATED) == (0.0, Interval(0.0, 0.0), "")


def test_blocks_nest_run_in_threads_and_add_devices_up() -> None:
    """Each block has its own looks, an outer one holds what inner ones drew, and two devices draw twice as much."""
    device, inner = Real(), polythrottle.energy("cpu")
    found: list[polythrottle.EnergyBlock] = []

    def work() -> None:
        with polythrottle.energy(device) as e:
            spin(0.02)
        found.append(e)

    threads = [threading.Thread(target=work) for _ in range(3)]
    with polythrottle.energy(device, Real()) as outer:
        for thread in threads:
            thread.start()
        with inner:
            spin(0.02)
        for thread in threads:
            thread.join()
    assert [round(each.watts) for each in found] == [10, 10, 10]
    assert round(outer.watts) == 20
    assert outer.joules > max(each.joules for each in found)
    assert outer.boundary == "mine: a test; mine: a test"
    assert inner.kind in (EnergyKind.ESTIMATED, EnergyKind.MEASURED)
    assert device.log == []  # nothing was entered, set or restored
    with polythrottle.energy("cpu", device) as both:
        spin(0.01)
    assert both.kind is inner.kind


def test_what_cannot_be_measured_is_refused_on_entering() -> None:
    """One line each: a table, a relative device, mixed times, no device, one that fails; what was begun is ended."""
    relative, failing = Real(), Real()
    relative.energy_kind, failing.failing = EnergyKind.RELATIVE, True
    cases = {
        "recorded": ("replay:t.csv", InvalidInput),
        "only relative": (relative, InvalidInput),
        "the wire is cut": (failing, DeviceError),
        "is no device and no meter": (object(), InvalidInput),
    }
    Path("t.csv").write_text(ROWS)
    for words, (source, error) in cases.items():
        with pytest.raises(error, match=words), polythrottle.energy(source):  # type: ignore[arg-type]
            pytest.fail("it was entered")
    with pytest.raises(InvalidInput, match="do not go together"), polythrottle.energy(FakeDevice(), Real()):
        pytest.fail("it was entered")
    assert not [each for each in threading.enumerate() if each.name == "polythrottle-energy"]


def test_a_device_named_twice_is_refused_for_its_joules_would_count_twice() -> None:
    """On entering, by name."""
    with pytest.raises(InvalidInput, match="cpu is named twice"), polythrottle.energy("cpu", "cpu"):
        pass


def test_an_interval_at_whose_end_the_joules_are_is_shown_by_its_ends() -> None:
    """An estimate of busy time can have missed some and added none: ± around it would say otherwise."""
    block = EnergyBlock(list)
    ends = {(0.0, 3.4): "between 0 and 3.4 J", (3.0, 3.8): "± 0.4 J"}
    for (low, high), words in ends.items():
        block._drawn = (Drawn("cpu", 3.4, Interval(low, high), 0.5, EnergyKind.ESTIMATED, "all cores"),)
        assert words in repr(block)


def test_nothing_is_told_before_the_end_and_an_error_in_the_block_keeps_the_joules() -> None:
    """The block's own error goes through; a device that fails meanwhile makes its joules unknown, no more."""
    device = Real()
    with polythrottle.energy(device) as e:
        with pytest.raises(InvalidInput, match="once it has ended"):
            _ = e.joules
        assert "not ended" in repr(e)
        spin(0.001)
    e = polythrottle.energy(device)
    with pytest.raises(ZeroDivisionError), e:
        print(spin(0.02), 1 / 0)
    assert e.watts == pytest.approx(10, rel=0.01)
    with polythrottle.energy(device) as e:
        device.failing = True
    assert math.isnan(e.joules)
    assert e.notes == ("a test device: the wire is cut",)
    (part,) = e.parts
    assert (part.device, part.interval, part.note) == ("mine", Interval(0, math.inf), e.notes[0])


def test_a_calibrated_factor_is_in_joules_interval_and_boundary() -> None:
    """Joules are those of a reference meter, as far off as the factor may be, and say so."""
    with polythrottle.energy(Real(Sensor(factor=1.2, factor_sd=0.05, source="wall meter", counts=True))) as e:
        spin(0.02)
    assert e.watts == pytest.approx(12, rel=0.01)
    assert e.interval.half == pytest.approx(1.96 * 0.05 * e.joules, rel=0.05)
    assert e.boundary == "a test; times 1.2 (wall meter)"
    unsure = Sensor(factor_sd=0.05, counts=True)
    with polythrottle.energy(Real(unsure), Real(unsure)) as both:
        spin(0.02)
    # A busy machine may let some time pass between the begin of one and that of the other.
    assert both.interval.half == pytest.approx(math.hypot(*(part.interval.half for part in both.parts)), rel=0.01)


def test_what_looking_takes_is_left_out_of_an_estimate() -> None:
    """The thread that looks is not the block: a device that can leave processor time out is told of it."""
    told, device = threading.Event(), Real()
    device.leave_out = lambda busy_s: told.set() or busy_s > 0  # type: ignore[attr-defined]
    with polythrottle.energy(device):
        assert told.wait(30)


def test_looks_stay_few_however_long_a_block_lasts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Once there are many, every second one is dropped and they come half as often."""
    monkeypatch.setattr("polythrottle.metering.energy_block._MOST_LOOKS", 4)
    device, told = Real(Sensor(step_s=0.001, counts=True)), threading.Event()
    with polythrottle.energy(device) as e:
        watched = e._watched[0]
        first_s, end_s = watched._apart_s, time.monotonic() + 30.0
        while watched._apart_s < 4 * first_s and time.monotonic() < end_s:
            assert not told.wait(0.02)
    assert len(watched._looks) <= 7
    assert watched._apart_s >= 4 * first_s


def test_a_jetson_is_read_and_nothing_on_it_is_written(tmp_path: Path) -> None:
    """Its sampler runs while any block is open, and ends with the last one."""
    root = plant("jetson-tx2", tmp_path / "board")  # whose sensors do not average: 50 ms tell something there
    kernel = FakeKernel(root)
    board = JetsonDevice(root=str(root), controls=kernel, hz=200.0)
    with polythrottle.energy(board) as outer:
        with polythrottle.energy(board) as inner:
            spin(0.05)
        assert board._sampler is not None
        assert board._sampler._background.running
        spin(0.05)
    assert not board._sampler._background.running
    assert outer.joules > inner.joules > 0
    assert outer.boundary == board.boundary
    assert kernel.writes() == ()


def test_a_power_meter_is_integrated_and_stands_in_for_a_device() -> None:
    """By itself in a block, and as the joules of a device that is tuned; its own errors are one line."""
    with polythrottle.energy(Plug()) as e:
        spin(0.3)
    assert e.watts == pytest.approx(20, rel=0.15)
    assert (e.kind, e.boundary) == (EnergyKind.MEASURED, "everything behind the plug")
    board = metered(Real(), Plug())
    with board:
        start = board.read()
        spin(0.05)
        end = board.read()
    assert (end.energy_j - start.energy_j) / (end.time_s - start.time_s) == pytest.approx(20, rel=0.1)
    assert end.temperature_c == 40.0
    assert MeterReader(Plug()).sensor == Sensor(0.02, average_s=0.02, duty=1.0, period_s=0.02, source="Plug")
    plug = Plug()
    plug.average_s = 0.005
    assert MeterReader(plug).sensor.duty == 0.25
    plug.power_w = lambda: 1 / 0  # type: ignore[assignment,return-value]
    with pytest.raises(DeviceError, match="the meter Plug cannot be read: ZeroDivisionError"):
        MeterReader(plug).read()
    with pytest.raises(InvalidInput, match="no meter"):
        MeterReader(object())  # type: ignore[arg-type]


def test_a_device_without_sensors_of_its_own_is_read_by_the_meter_alone() -> None:
    """Its temperature and clocks are not known then; what it does is its own."""
    device = Real()
    device.failing = True
    board = metered(device, Plug())
    with board:
        board.apply(device.space[0])
        assert board.read().temperature_c is None
    assert device.log == ["enter", "apply 400000000", "restore"]
    assert metered(device, None) is device
