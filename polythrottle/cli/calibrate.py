"""`polythrottle calibrate`: how a device's energy reading behaves, and its factor against an external meter."""

import contextlib
import math
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from polythrottle.cli.answers import answer, own_stdout
from polythrottle.cli.options import JsonOption
from polythrottle.errors import InvalidInput

if TYPE_CHECKING:
    from polythrottle.meter.self_test import SelfTest
    from polythrottle.meter.wall import WallFit
    from polythrottle.ports import Device
    from polythrottle.sensors import Sensor

_SIZE = 256


@dataclass(frozen=True)
class Calibrated:
    """What a calibration came to: of one device, a self-test or a comparison with a meter, and where it is kept."""

    device: str
    sensor: "Sensor"
    path: Path
    tested: "SelfTest | None" = None
    fit: "WallFit | None" = None


def calibrate(
    device: Annotated[
        str | None,
        typer.Option("--device", "-d", metavar="URI", help="Which, or auto; without it, say what would be done."),
    ] = None,
    workload: Annotated[
        str | None, typer.Option("--workload", "-w", metavar="URI", help="What loads it; the processor needs none.")
    ] = None,
    wall: Annotated[
        Path | None,
        typer.Option("--wall", metavar="FILE", help="An external meter's CSV log, recorded during the last self-test."),
    ] = None,
    column: Annotated[str | None, typer.Option("--column", metavar="NAME", help="Its column of watts.")] = None,
    time_column: Annotated[str | None, typer.Option("--time-column", metavar="NAME", help="Of seconds.")] = None,
    seconds: Annotated[float, typer.Option("--seconds", metavar="S", help="Length of each of five phases.")] = 10.0,
    as_json: JsonOption = False,
) -> None:
    """Find out how a device's energy reading behaves, or with --wall its factor against an external meter."""
    if not (math.isfinite(seconds) and 1.0 <= seconds <= 600.0):
        raise InvalidInput(f"--seconds {seconds:g}: a phase takes 1 to 600 s")
    if wall is None and (column or time_column):
        raise InvalidInput("--column and --time-column belong to --wall")
    from polythrottle.backends import DeviceURI, open_device

    if device is None and workload is None and wall is None:
        answer(_intended(seconds), as_json, _print_intended)
        return
    board = open_device(device if device not in (None, "auto") else _found())
    if DeviceURI.parse(board.uri).several:
        raise InvalidInput(f"{board.title} have a sensor each: calibrate one of them, such as --device nvml:0")
    done = _tested(board, workload, seconds) if wall is None else _compared(board, wall, column, time_column)
    answer(done, as_json, _print, _document)


def _intended(seconds: float) -> dict[str, Any]:
    """Return what a calibration of the device found here would do."""
    from polythrottle.backends import open_device
    from polythrottle.meter.calibration import calibration_path

    board = open_device(_found())
    load = "" if board.uri.startswith("cpu") else " --workload model.onnx"
    return {
        "device": board.uri,
        "title": board.title,
        "duration_s": 5 * seconds,
        "calibration": str(calibration_path(board)),
        "command": f"polythrottle calibrate --device {board.uri}{load}",
    }


def _print_intended(found: dict[str, Any]) -> None:
    typer.echo(
        f"calibrate loads {found['title']} with rests between, {found['duration_s']:g} s in all,\n"
        "to see how its energy reading behaves: how often it moves, how late it follows.\n"
        "No clock and no limit is set. Every later measurement here uses what it finds,\n"
        f"which is kept in {found['calibration']}\n\n  {found['command']}"
    )


def _found() -> str:
    from polythrottle.backends import find_device

    return find_device().uri


def _tested(board: "Device", workload: str | None, seconds: float) -> Calibrated:
    from polythrottle.meter.calibration import calibration_path, recording_path, write_calibration, write_recording
    from polythrottle.meter.self_test import self_test

    if board.uri.startswith(("sim:", "replay:")):
        raise InvalidInput(f"{board.title} has no sensor to calibrate")
    with contextlib.ExitStack() as open_things:
        work = _work(board, workload, open_things)
        open_things.enter_context(board)
        open_things.enter_context(own_stdout())
        found = self_test(board, work, seconds)
    path = calibration_path(board)
    write_recording(recording_path(path), found.readings)
    write_calibration(path, board, found.sensor)
    return Calibrated(board.uri, found.sensor, path, tested=found)


def _work(board: "Device", workload: str | None, open_things: contextlib.ExitStack) -> Callable[[], object]:
    """Return what loads the device for a moment."""
    if workload is not None:
        from polythrottle.targets import target_of
        from polythrottle.workloads import open_workload

        served = open_things.enter_context(contextlib.closing(open_workload(workload, target=target_of(board))))
        served.apply(served.space.default)
        return served.query
    if not board.uri.startswith("cpu"):
        raise InvalidInput(f"say what loads {board.title}: --workload model.onnx, package.module:callable, …")
    import numpy as np

    matrix = np.full((_SIZE, _SIZE), 0.5)
    return lambda: matrix @ matrix


def _compared(board: "Device", wall: Path, column: str | None, time_column: str | None) -> Calibrated:
    from polythrottle.meter.calibration import (
        calibration_path,
        read_recording,
        recording_path,
        sensor_of,
        write_calibration,
    )
    from polythrottle.meter.wall import fit_wall
    from polythrottle.meter.wall_log import read_wall

    path, known = calibration_path(board), sensor_of(board)
    log = read_wall(wall, column, time_column)
    fit = fit_wall(read_recording(recording_path(path)), log.readings, known.memory_s)
    sensor = fit.applied(known, f"{wall.name}, column {log.column}")
    write_calibration(path, board, sensor)
    return Calibrated(board.uri, sensor, path, fit=fit)


def _document(done: Calibrated) -> dict[str, Any]:
    tested, fit = done.tested, done.fit
    return {
        "device": done.device,
        "sensor": asdict(done.sensor),
        "calibration": str(done.path),
        "idle_power_w": tested.idle_w if tested else None,
        "loaded_power_w": tested.loaded_w if tested else None,
        "rise_s": tested.rise_s if tested else None,
        "fall_s": tested.fall_s if tested else None,
        "wall": asdict(fit) if fit else None,
    }


def _print(done: Calibrated) -> None:
    from rich.console import Console

    from polythrottle.cli.texts import named_lines

    console = Console(highlight=False, markup=False)
    console.print(done.device, style="bold", soft_wrap=True)
    console.print(named_lines(_lines(done)))
    console.print(f"kept in  {done.path}", soft_wrap=True)


def _clock(shift_s: float) -> str:
    return f"{abs(shift_s):.1f} s {'ahead' if shift_s > 0 else 'behind'}"


def _lines(done: Calibrated) -> list[tuple[str, Any]]:
    from polythrottle.units import show

    sensor, tested, fit = done.sensor, done.tested, done.fit
    lines: list[tuple[str, Any]] = []
    if tested is not None:
        lines += [
            ("moves", f"every {show(sensor.step_s, 's')}" if sensor.step_s else "whenever it is read"),
            ("follows", f"within {show(sensor.lag_s, 's')}" if sensor.lag_s else "at once, as far as can be seen"),
            ("idle", show(tested.idle_w, "W")),
            ("loaded", show(tested.loaded_w, "W")),
        ]
    if fit is not None:
        lines += [
            ("factor", f"{fit.factor:.4f} ± {fit.factor * fit.half:.2g} (95 %), applied from now on"),
            ("from", sensor.source),
            ("for", "this device with these options and this kind of energy alone"),
            ("besides", f"{fit.constant_w:.3g} W that the sensor does not see, whatever the load; not applied"),
            ("residual", f"{show(fit.residual_w, 'W')} over {fit.pairs} powers, correlation {fit.correlation:.3f}"),
            (
                "meter",
                f"follows within {show(fit.lag_s, 's')}, which is allowed for; its clock is {_clock(fit.shift_s)}",
            ),
        ]
    return [*lines, ("windows", f"of {show(sensor.least_s, 's')} at least" if sensor.least_s else "of any length")]
