import json
from pathlib import Path

import numpy as np
import pytest
from builders import FakeDevice

from polythrottle.cli.commands import run
from polythrottle.errors import BadFile, InvalidInput, TrialError
from polythrottle.measurement import Reading
from polythrottle.meter.calibration import (
    calibration_path,
    read_calibration,
    read_recording,
    recording_path,
    sensor_of,
    write_calibration,
    write_recording,
)
from polythrottle.meter.self_test import self_test
from polythrottle.meter.wall import fit_wall, read_wall
from polythrottle.sensors import Sensor


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
    with pytest.raises(BadFile, match="not a number"):
        read_wall(table)
    table.write_text("time_s,power_w\n0,1\n1,2\n")
    assert read_wall(table) == ((0.0, 1.0), (1.0, 2.0))
    with pytest.raises(BadFile, match="no column 'watts'"):
        read_wall(table, "watts")


def test_a_calibration_is_kept_by_identity_and_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What was found is what the meter takes from then on; a file that is none says so."""
    monkeypatch.setenv("POLYTHROTTLE_STATE_DIR", str(tmp_path))
    device = Loaded()
    assert sensor_of(device) == Sensor(source="computed, so exact")
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
    assert found["loaded_power_w"] > found["idle_power_w"] > 0
    assert Path(found["calibration"]).exists()
