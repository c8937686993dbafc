"""Calibrating energy readings: what a self-test finds, and the factor against an external meter."""

import hashlib
import json
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest
from builders import FakeDevice

from polythrottle.backends.meters.file_meters import WallLog, read_wall
from polythrottle.cli.commands import run
from polythrottle.cli.inspect import CalibrationResult, _calibration_document, _print_calibration, _work
from polythrottle.domain.errors import BadFile, InvalidInput, TrialError
from polythrottle.domain.measurement import EnergyKind, Reading
from polythrottle.domain.ports import Sensor, usual_sensor
from polythrottle.metering.calibration import (
    SelfTest,
    calibration_path,
    passed_over,
    read_calibration,
    read_recording,
    recording_path,
    self_test,
    sensor_of,
    write_calibration,
    write_recording,
)
from polythrottle.metering.wall_calibration import WallFit, fit_wall


class Loaded(FakeDevice):
    """A device that idles at 5 W and works at 20 W, read through a counter of some step and a sensor of some lag."""

    uri = "fake"

    def __init__(self, step_s: float = 0.0, lag_s: float = 0.0) -> None:
        super().__init__()
        self.step_s, self.lag_s = step_s, lag_s
        self.total_j, self.shown_w, self.steps_j = 0.0, 5.0, [(0.0, 0.0)]

    def pass_time(self, duration_s: float, power_w: float) -> None:
        """Draw a power for a while."""
        keep = np.exp(-duration_s / self.lag_s) if self.lag_s else 0.0
        before_w, self.shown_w = self.shown_w, float(keep * self.shown_w + (1 - keep) * power_w)
        self.total_j += duration_s * ((before_w + self.shown_w) / 2 if self.lag_s else power_w)
        self.clock.sleep(duration_s)

    def work(self) -> None:
        """Work for five milliseconds."""
        self.pass_time(0.005, 20.0)

    def read(self) -> Reading:
        """Return the total as of the last step; a look takes a millisecond of idling or working."""
        self.pass_time(0.001, 20.0 if self.shown_w > 12 else 5.0)
        now_s = self.clock.now()
        if not self.step_s or now_s - self.steps_j[-1][0] >= self.step_s:
            self.steps_j.append((now_s, self.total_j))
        return Reading(now_s, self.steps_j[-1][1])


def examined(device: Loaded) -> Sensor:
    """Return what a self-test finds."""
    return self_test(device, device.work, 5.0).sensor


def test_the_step_of_a_counter_is_found() -> None:
    """One that moves every 100 ms is found to, within a look."""
    assert examined(Loaded(step_s=0.1)).step_s == pytest.approx(0.1, abs=0.01)


def test_power_with_and_without_work_is_told_apart() -> None:
    """Of a board that works at 20 W and else draws 5 W but for what it has just done, both are found in this order."""
    device = Loaded()
    tested = self_test(device, device.work, 5.0)
    assert 5.0 <= tested.idle_w < 8.0
    assert tested.loaded_w == pytest.approx(20.0, rel=0.05)


def test_a_reading_that_never_moves_cannot_be_calibrated() -> None:
    """A dead sensor says so."""
    with pytest.raises(TrialError, match="did not move"):
        self_test(FakeDevice(0.0), lambda: None, 1.0)


def logs(factor: float, constant_w: float, shift_s: float, noise_w: float = 0.1) -> tuple[list, list]:  # type: ignore[type-arg]
    """Return the readings of a device that idles and works by turns, and the log of a meter of 1 Hz."""
    times_s = np.arange(0.0, 60.0, 0.05)
    power_w = np.where((times_s // 10) % 2 == 0, 5.0, 20.0)
    total_j = np.concatenate([[0.0], np.cumsum(power_w[:-1] * 0.05)])
    at_s, rng = np.arange(0.0, 59.0), np.random.default_rng(0)
    wall_w = factor * np.interp(at_s, times_s, power_w) + constant_w + noise_w * rng.standard_normal(len(at_s))
    return list(zip(times_s, total_j, strict=True)), list(zip(at_s + shift_s, wall_w, strict=True))


@pytest.mark.parametrize("shift_s", [0.0, 1234.5, -7.0])
def test_a_wall_meter_gives_the_factor(shift_s: float) -> None:
    """Slope and constant are found whatever the meter's clock says, and the stated doubt covers the truth."""
    fit = fit_wall(*logs(1.16, 2.0, shift_s))
    assert abs(fit.factor / 1.16 - 1) < 0.05
    assert fit.constant_w == pytest.approx(2.0, abs=0.8)
    assert fit.shift_s == pytest.approx(shift_s, abs=1.0)
    assert fit.correlation > 0.95


def test_a_log_that_does_not_go_with_the_device_is_refused(tmp_path: Path) -> None:
    """Noise, too little of it, a column that is not there: one clear line each."""
    device, _ = logs(1.0, 0.0, 0.0)
    rng = np.random.default_rng(1)
    with pytest.raises(InvalidInput, match="does not go with"):
        fit_wall(device, [(float(t), float(w)) for t, w in zip(range(50), 10 + rng.random(50), strict=True)])
    with pytest.raises(InvalidInput, match="10 readings of both"):
        fit_wall(device, [(0.0, 1.0)])
    table = tmp_path / "meter.csv"
    table.write_text("time_s,amps\n0,1\n")
    with pytest.raises(BadFile, match="say which column"):
        read_wall(table)
    table.write_text("time_s,power_w\n0,1\n1,x\n")
    with pytest.raises(BadFile, match="it needs a number"):
        read_wall(table)
    table.write_text("time_s,power_w\n0,1\n1,2\n")
    assert read_wall(table) == WallLog("power_w", ((0.0, 1.0), (1.0, 2.0)))
    with pytest.raises(BadFile, match="no column 'watts'"):
        read_wall(table, "watts")


@pytest.mark.parametrize(
    ("unit", "line"),
    [
        (1000.0, r"a factor of 11\d\d cannot be right, only 0.2 to 5 can: .*watts \(not mW or kW\)"),
        (0.001, r"a factor of 0.0011\d+ cannot be right"),
        (0.0, r"did not move: it shows 0 W"),
        (-1.0, r"shows less than 0 W"),
    ],
)
def test_a_factor_that_cannot_be_is_refused(unit: float, line: str) -> None:
    """Milliwatts and kilowatts are the usual reasons."""
    device, meter = logs(1.16, 2.0, 3.0)
    with pytest.raises(InvalidInput, match=line):
        fit_wall(device, [(time_s, unit * power_w) for time_s, power_w in meter])


def test_a_meter_that_does_not_move_is_called_that() -> None:
    """No correlation is made up for it."""
    device, meter = logs(1.16, 2.0, 3.0)
    with pytest.raises(InvalidInput, match=r"the meter did not move: it shows 7.5 W all along"):
        fit_wall(device, [(time_s, 7.5) for time_s, _ in meter])
    steady = [(time_s, 5.0 * time_s) for time_s, _ in device]
    with pytest.raises(InvalidInput, match=r"does not go with|one of the two does not move"):
        fit_wall(steady, meter)


@pytest.mark.parametrize(
    ("seconds", "line"), [(30, "covers 29.0 s of the 60.0 s"), (11, "covers 10.0 s of the 60.0 s")]
)
def test_a_log_of_a_part_is_refused(seconds: int, line: str) -> None:
    """A factor comes from all of a self-test; how much is missing is said."""
    device, meter = logs(1.16, 2.0, 3.0)
    with pytest.raises(InvalidInput, match=rf"{line} of the self-test; let it record all of it, 80% at least"):
        fit_wall(device, meter[5 : 5 + seconds])


def test_a_log_that_began_late_is_refused() -> None:
    """Though it is long: it covers too little of the self-test."""
    device, meter = logs(1.16, 2.0, 0.0)
    late = [*meter[25:], *[(float(at_s), 2.0 + 1.16 * 5.0 + 0.01 * (at_s % 3)) for at_s in range(60, 120)]]
    with pytest.raises(InvalidInput, match=r"covers 3\d.\d s of the 60.0 s"):
        fit_wall(device, late)


def test_a_log_of_a_whole_day_is_searched_and_one_of_a_year_refused() -> None:
    """Where in it the self-test was is found; what would take hours is said at once."""
    device, meter = logs(1.16, 2.0, 4000.0)
    rng = np.random.default_rng(2)
    before = [(float(at_s), float(8 + rng.random())) for at_s in range(4000)]
    assert fit_wall(device, [*before, *meter]).factor == pytest.approx(1.16, rel=0.05)
    with pytest.raises(InvalidInput, match=r"8333.3 h long; cut it down to the time around the self-test"):
        fit_wall(device, [(float(at_s), float(at_s % 7)) for at_s in np.linspace(0, 3e7, 400_000)])


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("time_s,watts\n27061.420,5,3\n", r"line 2: '27061.420,5,3' has 3 fields, the header 2; write 2.5, not 2,5"),
        ("time_s,power_w,watts,watts\n1,2,3,4\n", "has 2 columns 'watts'; rename one"),
        ("time_s,watts\n1,2\n2,nan\n", r"line 3: watts is nan; it needs a number"),
        ("time_s;watts\n1,5;2\n", "line 2: time_s is '1,5'; it needs a number; write a decimal point, not a comma"),
        ("time_s,watts\n1\n", "line 2: watts is ''; it needs a number"),
        ("time_s,power_w\n1\n", "no column 'watts'"),
        ("", "has nothing"),
        ("time_s,power_w\n", "holds no rows"),
        ("\0\0\n\0\n", "no column|not a CSV"),
    ],
)
def test_a_table_of_another_form_is_one_line(tmp_path: Path, text: str, line: str) -> None:
    """Ragged, empty, or no text."""
    (tmp_path / "meter.csv").write_text(text)
    with pytest.raises(BadFile, match=line):
        read_wall(tmp_path / "meter.csv", "watts", "time_s")


def test_what_is_no_file_of_readings_is_one_line(tmp_path: Path) -> None:
    """Nothing that could never end is read; a mark some programs put first is no part of a name."""
    for path in (tmp_path, Path("/dev/zero")):
        with pytest.raises(BadFile, match="no file that a table can be read from"):
            read_wall(path)
    with pytest.raises(BadFile, match="there is no file"):
        read_wall(tmp_path / "none.csv")
    (tmp_path / "a.csv").write_bytes(b"\xef\xbb\xbftime_s,power_w\n0,1\n")
    assert read_wall(tmp_path / "a.csv").readings == ((0.0, 1.0),)


@pytest.mark.parametrize(
    ("beside", "power"),
    [
        ("power_factor,apparent_power_va,power_var", "power_w"),
        ("PowerFactor,Power (VA),Reactive Power", "Active Power (W)"),
        ("power_limit_w,power_setpoint,target_w", "input [W]"),
        ("set_power_w,pf,volts", "Watts"),
    ],
)
def test_other_columns_of_a_power_meter_are_not_its_power(tmp_path: Path, beside: str, power: str) -> None:
    """Volt-amperes, a factor or what was set go up with the load as well, and would give a factor all the same."""
    (tmp_path / "a.csv").write_text(f"time_s,{beside},{power}\n0,1,2,3,10\n1,1,2,3,20\n")
    assert read_wall(tmp_path / "a.csv") == WallLog(power, ((0.0, 10.0), (1.0, 20.0)))


@pytest.mark.parametrize(
    ("name", "first", "second"),
    [
        ("time_ms", "1000", "2000"),
        ("Time (us)", "1000000", "2000000"),
        ("epoch_ns", "1000000000", "2000000000"),
        ("Timestamp [msec]", "1000", "2000"),
        ("t_s", "1", "2"),
        ("time", "1", "2"),
    ],
)
def test_times_are_read_in_the_unit_their_column_names(tmp_path: Path, name: str, first: str, second: str) -> None:
    """In seconds without one; and a column that only begins like a time is none."""
    (tmp_path / "a.csv").write_text(f"timeout,{name},power_w\n7,{first},10\n7,{second},20\n")
    times_s, powers_w = zip(*read_wall(tmp_path / "a.csv").readings, strict=True)
    assert (times_s, powers_w) == (pytest.approx((1.0, 2.0)), (10.0, 20.0))


@pytest.mark.parametrize("parts", [1, 1_000, 1_000_000, 1_000_000_000])
def test_times_since_1970_tell_their_unit_themselves(tmp_path: Path, parts: int) -> None:
    """As seconds, milliseconds would be long after the year 5000."""
    rows = "".join(f"{(1_790_000_000 + second) * parts}\t{10 + second}\n" for second in range(3))
    (tmp_path / "a.tsv").write_text(f"timestamp\tpower_w\n{rows}")
    times_s = [time_s for time_s, _ in read_wall(tmp_path / "a.tsv").readings]
    assert times_s == pytest.approx([1_790_000_000, 1_790_000_001, 1_790_000_002], abs=1e-3, rel=0)


def test_of_several_powers_none_is_taken(tmp_path: Path) -> None:
    """Two sockets of one strip: who records says which; without a time the option is named too."""
    (tmp_path / "a.csv").write_text("time_s,power_1_w,power_2_w\n0,1,2\n")
    with pytest.raises(
        BadFile, match=r"power_1_w, power_2_w may all be the power; say which column it is, with --colu"
    ):
        read_wall(tmp_path / "a.csv")
    assert read_wall(tmp_path / "a.csv", "power_2_w").readings == ((0.0, 2.0),)
    (tmp_path / "a.csv").write_text("when,power_w\n0,1\n")
    with pytest.raises(BadFile, match="the time with --time-column; it has when, power_w"):
        read_wall(tmp_path / "a.csv")


def test_a_calibration_is_kept_by_identity_and_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What was found is what the meter takes from then on; a file that is none says so."""
    monkeypatch.setenv("POLYTHROTTLE_STATE_DIR", str(tmp_path))
    device = Loaded()
    assert sensor_of(device) == Sensor(source="computed, so exact", counts=True)
    path, sensor = calibration_path(device), Sensor(step_s=0.02, factor=1.1, factor_sd=0.01, source="wall meter, a.csv")
    write_calibration(path, device, sensor)
    assert read_calibration(path) == sensor_of(device) == sensor
    write_recording(recording_path(path), [(0.0, 1.0), (1.0, 2.5)])
    assert read_recording(recording_path(path)) == ((0.0, 1.0), (1.0, 2.5))
    path.write_text('{"v": 9}')
    with pytest.raises(BadFile, match="another format"):
        sensor_of(device)
    path.write_text("nonsense")
    with pytest.raises(BadFile, match="is no calibration"):
        sensor_of(device)
    with pytest.raises(BadFile, match="no self-test"):
        read_recording(tmp_path / "none.csv")


@dataclass
class Estimating(FakeDevice):
    """A processor whose joules come about in one of several ways."""

    uri: str = "cpu"
    energy_kind: EnergyKind = EnergyKind.ESTIMATED

    def __post_init__(self) -> None:
        super().__init__()


def test_a_factor_is_for_the_joules_it_was_fitted_to(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Other watts per core, other programs counted, or joules that are measured: none of them takes it over."""
    monkeypatch.setenv("POLYTHROTTLE_STATE_DIR", str(tmp_path))
    fitted = Estimating("cpu?idle_w=4&watts_per_core=10")
    write_calibration(calibration_path(fitted), fitted, Sensor(factor=1.2, source="wall meter, a.csv"))
    assert sensor_of(Estimating("cpu?watts_per_core=10&idle_w=4")).factor == 1.2
    for other in (
        Estimating("cpu?idle_w=4&watts_per_core=20"),
        Estimating("cpu?busy=everyone&idle_w=4&watts_per_core=10"),
        Estimating("cpu"),
        Estimating("cpu?idle_w=4&watts_per_core=10", EnergyKind.MEASURED),
    ):
        assert sensor_of(other) == usual_sensor("cpu")
        assert list(passed_over(other)) == []


def test_a_calibration_that_does_not_say_of_which_joules_is_passed_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One of an earlier version is not used, which is said with what to do until there is a new one."""
    monkeypatch.setenv("POLYTHROTTLE_STATE_DIR", str(tmp_path))
    device = Estimating("cpu?watts_per_core=10")
    earlier = (
        tmp_path / "calibrations" / f"{hashlib.sha256(json.dumps({'board': 'cpu'}).encode()).hexdigest()[:16]}.json"
    )
    earlier.parent.mkdir()
    earlier.write_text((Path(__file__).parents[1] / "data" / "calibration-1.json").read_text())
    assert sensor_of(device) == usual_sensor("cpu")
    (line,) = passed_over(device)
    assert "does not say" in line
    assert "run polythrottle calibrate --device 'cpu?watts_per_core=10' again" in line
    write_calibration(calibration_path(device), device, Sensor(factor=1.1))
    assert list(passed_over(device)) == []


@pytest.mark.slow
def test_calibrate_finds_keeps_and_tells(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The command tests the processor's estimate, keeps it, and asks for a test before a comparison."""
    monkeypatch.setenv("POLYTHROTTLE_STATE_DIR", str(tmp_path))
    meter = tmp_path / "meter.csv"
    meter.write_text("time_s,power_w\n" + "".join(f"{t},{10 + t % 2}\n" for t in range(20)))
    assert run(["calibrate", "--device", "cpu", "--wall", str(meter)]) != 0
    assert "no self-test" in capsys.readouterr().err
    assert run(["calibrate", "--device", "sim:jetson-nano"]) != 0
    assert "no sensor to calibrate" in capsys.readouterr().err
    assert run(["calibrate", "--device", "cpu", "--seconds", "0.1"]) != 0
    assert "1 to 600 s" in capsys.readouterr().err
    assert run(["calibrate", "--device", "cpu", "--seconds", "1", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    # Which of the two is more depends on what else the machine does meanwhile.
    assert min(found["loaded_power_w"], found["idle_power_w"]) > 0
    (tmp_path / "short.csv").write_text("time_s,power_w\n" + "".join(f"{t / 10},{10 + t % 2}\n" for t in range(20)))
    assert run(["calibrate", "--device", "cpu", "--wall", str(tmp_path / "short.csv")]) == 2
    assert "covers 1.9 s of the " in capsys.readouterr().err
    assert Path(found["calibration"]).exists()


def test_what_a_calibration_found_is_told_in_words(capsys: pytest.CaptureFixture[str]) -> None:
    """How often the reading moves and how late it follows, or the factor with its interval; and where it is kept."""
    sensor = Sensor(step_s=0.1, lag_s=0.5, source="wall.csv, column watts")
    tested = SelfTest(sensor, idle_w=5.0, loaded_w=25.0, rise_s=0.4, fall_s=None, readings=())
    _print_calibration(CalibrationResult("jetson", sensor, Path("kept.json"), tested=tested))
    shown = " ".join(capsys.readouterr().out.split())
    assert "moves every 100 ms" in shown
    assert "follows within 500 ms" in shown
    assert "idle 5 W loaded 25 W" in shown
    assert "windows of " in shown
    assert shown.endswith("kept in kept.json")
    exact = Sensor()
    still = SelfTest(exact, idle_w=5.0, loaded_w=25.0, rise_s=None, fall_s=None, readings=())
    _print_calibration(CalibrationResult("jetson", exact, Path("kept.json"), tested=still))
    shown = " ".join(capsys.readouterr().out.split())
    assert "moves whenever it is read follows at once, as far as can be seen" in shown
    assert "windows of any length" in shown
    fit = WallFit(1.1, 0.01, 3.456, 0.5, shift_s=-2.0, lag_s=0.5, pairs=40, correlation=0.987)
    for shift_s, told in ((-2.0, "2.0 s behind"), (2.0, "2.0 s ahead")):
        _print_calibration(CalibrationResult("jetson", sensor, Path("k.json"), fit=replace(fit, shift_s=shift_s)))
        shown = " ".join(capsys.readouterr().out.split())
        assert f"factor 1.1000 ± {1.1 * fit.half:.2g} (95 %), applied from now on from wall.csv, column watts" in shown
        assert "besides 3.46 W that the sensor does not see" in shown
        assert "500 mW over 40 powers, correlation 0.987" in shown
        assert f"its clock is {told}" in shown
        assert "idle" not in shown
    document = _calibration_document(CalibrationResult("jetson", sensor, Path("k.json"), tested=tested))
    assert (document["idle_power_w"], document["loaded_power_w"], document["rise_s"]) == (5.0, 25.0, 0.4)
    assert (document["fall_s"], document["wall"], document["sensor"]["lag_s"]) == (None, None, 0.5)
    document = _calibration_document(CalibrationResult("jetson", sensor, Path("k.json"), fit=fit))
    assert (document["idle_power_w"], document["wall"]["factor"]) == (None, 1.1)


def test_words_of_a_calibration_that_cannot_be_are_refused_first(capsys: pytest.CaptureFixture[str]) -> None:
    """A phase that is too short or long, columns without a log, a device that nothing loads, and a simulated one."""
    for words, told in (
        ("--seconds 0.5", "a phase takes 1 to 600 s"),
        ("--seconds 601", "a phase takes 1 to 600 s"),
        ("--column watts", "belong to --wall"),
        ("--time-column t", "belong to --wall"),
        ("-d sim:v100", "has no sensor to calibrate"),
    ):
        assert run(["calibrate", *words.split()]) == InvalidInput.exit_code
        assert told in capsys.readouterr().err
    with pytest.raises(InvalidInput, match="say what loads"):
        _work(FakeDevice(), None, ExitStack())
