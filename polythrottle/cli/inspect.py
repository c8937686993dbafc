"""`polythrottle doctor`, `snapshot`, `profile-model` and `calibrate`.

What is here, and how far its readings can be trusted.
"""

import contextlib
import itertools
import math
import shlex
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from operator import attrgetter
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from polythrottle.cli.options import JsonOption
from polythrottle.cli.output import answer, complain, optional, own_stdout, suffix
from polythrottle.domain.errors import DeviceError, InvalidInput, StorageError

if TYPE_CHECKING:
    from polythrottle.domain.ports import Device, Finding, Sensor
    from polythrottle.inspect.board_record import BoardRecord
    from polythrottle.inspect.descriptions import Description
    from polythrottle.inspect.examination import Examination
    from polythrottle.metering.calibration import SelfTest
    from polythrottle.metering.wall_calibration import WallFit

# `polythrottle doctor`: what works here, what does not and why, who else steers the clocks.

_MARKS = {True: ("ok", "green"), False: ("no", "bold red"), None: ("?", "yellow")}


def doctor(
    device: Annotated[
        str | None, typer.Option("--device", "-d", metavar="URI", help="One device; every real one by default.")
    ] = None,
    assumed: Annotated[
        bool, typer.Option("--record", help="What this board or GPU shows of everything assumed of its kind.")
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """Say what works here and what does not, why, and who else steers the clocks; writes and runs nothing."""
    from polythrottle.backends.device_uri import own_words
    from polythrottle.inspect.board_record import document, record
    from polythrottle.inspect.examination import examine

    if assumed:
        answer(record(device), as_json, _print_records, document)
    else:
        found = examine(device)
        answer(found, as_json, _print_examination, _examination_document)
        # Whoever names a device wants to know whether it is there; without a name there is none to miss.
        for one in found.devices:
            if device is not None and not one.title:
                why = one.findings[0].explanation
                named = why if one.uri in why else f"{one.uri}: {own_words(one.uri, why)}"
                raise typer.Exit(complain(named, DeviceError.exit_code))


def _examination_document(found: "Examination") -> dict[str, Any]:
    return {**asdict(found), "faults": len(found.faults)}


def _print_examination(found: "Examination") -> None:
    from rich.text import Text

    from polythrottle.cli.render.console import plain_console

    console = plain_console()
    for one in found.devices:
        console.print(Text.assemble((one.uri, "bold"), "  ", one.title), soft_wrap=True)
        _table(console, one.findings)
    parts = {"machine": found.machine, "other programs": found.others, "records": found.records}
    for heading, findings in parts.items():
        if findings:
            console.print(Text(heading, "bold"))
            _table(console, findings)
    console.print(_faults(len(found.faults)))


def _faults(count: int) -> str:
    if not count:
        return "nothing is wrong here"
    if count == 1:
        return "1 thing does not work"
    return f"{count} things do not work"


def _print_records(found: "Sequence[BoardRecord]") -> None:
    from rich.table import Table
    from rich.text import Text

    from polythrottle.cli.render.console import Unpadded, plain_console

    console = plain_console()
    for each in found:
        told = ", ".join(f"{name} {text}" for name, text in each.identity.items())
        console.print(Text.assemble((each.title, "bold"), "  ", told), soft_wrap=True)
        table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False)
        for name, style in (("assumption", "dim"), ("what this board shows", ""), ("", "bold")):
            table.add_column(name, style=style, overflow="fold")
        others = [row for row in each.rows if not row.here]
        for row in each.rows:
            if row.here:
                table.add_row(f"{row.part}: {row.assumed}", row.shows, row.agreement.value)
        console.print(Unpadded(table))
        beside = suffix(len(others), "; {} more are about others, which --json lists")
        console.print(f"{each.counts['agrees']} agree, {each.counts['contradicts']} contradict{beside}", soft_wrap=True)
    console.print("to send it with what the board's files hold: polythrottle snapshot")


def _table(console: Any, findings: "Sequence[Finding]") -> None:
    from rich.table import Table
    from rich.text import Text

    from polythrottle.domain.units import show_name

    grid = Table.grid(padding=(0, 2))
    grid.add_column(no_wrap=True, width=2)
    grid.add_column(style="dim", overflow="fold", max_width=20)
    grid.add_column(overflow="fold")
    for each in findings:
        mark, style = _MARKS[each.works]
        grid.add_row(Text(mark, style), show_name(each.subject), each.explanation)
        if each.remedy:
            grid.add_row("", "", Text(f"→ {each.remedy}", "italic"))
    from polythrottle.cli.render.console import Unpadded

    console.print(Unpadded(grid))


# `polythrottle snapshot`: a board in a file that a bug report can carry, and back from it.

_SHOWN = 5


def snapshot(
    device: Annotated[
        str | None,
        typer.Option("--device", "-d", metavar="URI", help="jetson, nvml:0, cpu, auto, or a Jetson at ssh://HOST."),
    ] = None,
    out: Annotated[
        Path | None, typer.Option("--out", metavar="FILE", help="The archive to write; board.tar.gz, then board-2, …")
    ] = None,
    unpack: Annotated[
        Path | None, typer.Option("--unpack", metavar="FILE", help="Lay an archive as a tree, below --out FOLDER.")
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Write what a bug report needs of this board, scrubbed, to a file that opens as a tree or with sim:."""
    if unpack is not None:
        if device is not None or out is None:
            raise InvalidInput("--unpack takes --out FOLDER and no --device")
        answer(_unpacked(unpack, out), as_json, _print_unpacked)
    else:
        answer(_taken(device or "auto", free_name(out)), as_json, _print_taken)


def free_name(out: Path | None) -> Path:
    """Return a name that no earlier snapshot has: the given one, or the first that is free."""
    if out is not None:
        if out.exists():
            raise StorageError(f"{out} is there already; name another file with --out")
        return out
    names = itertools.chain(["board"], (f"board-{number}" for number in itertools.count(2)))
    return next(path for name in names if not (path := Path(f"{name}.tar.gz")).exists())


def _taken(device: str, out: Path) -> dict[str, Any]:
    from polythrottle.backends import find_device, open_device
    from polythrottle.inspect.snapshot import take

    if device == "auto":
        found = find_device()
        device = found.uri
        typer.echo(f"device {found.uri}: {found.explanation}", err=True)
    taken = take(open_device(device))
    size = taken.write(out)
    return {
        "archive": str(out),
        "title": taken.title,
        "size_bytes": size,
        "files": len(taken.members),
        "unread": dict(taken.unread),
        "opens_as_simulated": taken.opens_as_board,
        "simulation": taken.simulation,
    }


def _print_taken(found: dict[str, Any]) -> None:
    typer.echo(f"snapshot  {found['archive']}")
    typer.echo(f"board     {found['title']}: {found['files']} files, {found['size_bytes'] / 1000:.1f} kB")
    unread = list(found["unread"].items())
    for path, reason in unread[:_SHOWN]:
        typer.echo(f"left out  {path}: {reason}")
    if len(unread) > _SHOWN:
        typer.echo(f"left out  {len(unread) - _SHOWN} more; snapshot.json in it lists all")
    if found["opens_as_simulated"]:
        typer.echo(f"simulate  --device sim:{found['archive']}")
    typer.echo(f"          {found['simulation']}")
    typer.echo("Serial numbers, UUIDs, MACs and names are taken out; look before you send it.")


def _unpacked(archive: Path, folder: Path) -> dict[str, Any]:
    from polythrottle.inspect.snapshot import opened_by, unpack

    uri = opened_by(archive, unpack(archive, folder))
    return {"folder": str(folder), "device": uri}


def _print_unpacked(found: dict[str, Any]) -> None:
    typer.echo(f"tree      {found['folder']}")
    typer.echo(suffix(found["device"], "open it   --device '{}'") or "it opens with sim: only, not as a tree")


# `polythrottle profile-model`: the description of a model that simulated boards serve, counted from the model.

_FOLDER = Path("profiles/workloads")


def profile_model(
    model: Annotated[str, typer.Argument(metavar="MODEL", help="model.onnx, model.pt2 or package.module:callable.")],
    inputs: Annotated[
        list[str] | None,
        typer.Option("--input", metavar="SHAPE", help="Shape of a model input without its batch: 3x224x224; repeats."),
    ] = None,
    batch: Annotated[
        int | None, typer.Option("--batch", metavar="N", help="Items in the query that is counted; 1.")
    ] = None,
    precision: Annotated[
        str | None, typer.Option("--precision", metavar="NAME", help="fp32, fp16 or int8; the model's own.")
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option("--out", metavar="FILE", help="The workload file to write; profiles/workloads/<model>.toml."),
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Replace a file that is there.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Count what a model computes and moves, and describe it for simulated boards."""
    from polythrottle.inspect.descriptions import profile_model as profile
    from polythrottle.storage.atomic_file import replace_file

    path = out or _FOLDER / f"{_named(model)}.toml"
    _check(path, force)
    with own_stdout():
        found = profile(model, inputs=inputs or (), batch_size=batch, precision=precision)
    replace_file(path, found.text().encode())
    answer((found, path), as_json, _print_description, _description_document)


def _named(model: str) -> str:
    from polythrottle.tuning.setup import slug

    return slug(model.removesuffix(".pt"))


def _check(path: Path, force: bool) -> None:
    """Refuse a file that would not be found again, or would take the place of another, before anything is counted."""
    if path.suffix != ".toml":
        raise InvalidInput(f"{path} would not be found again: the name of a workload file ends in .toml")
    if path.is_dir() or (path.exists() and not force):
        raise StorageError(f"{path} is there already; name another file with --out, or replace it with --force")


def _description_document(answered: "tuple[Description, Path]") -> dict[str, Any]:
    found, path = answered
    counts = found.counts
    return {
        "model": found.uri,
        "workload": str(path),
        "precision": found.precision,
        "counted_batch": found.batch_size,
        "counted_by": found.counted_by,
        "parameters": found.graph.parameters,
        **found.figures(),
        "unfused_traffic_bytes": counts.unfused_bytes / found.batch_size,
        "activations": counts.activations / found.batch_size,
        "tensors": counts.tensors,
        "bytes_only": dict(found.graph.bytes_only.most_common()),
    }


def _print_description(answered: "tuple[Description, Path]") -> None:
    from polythrottle.cli.render.console import plain_console
    from polythrottle.cli.render.text import named_lines

    console = plain_console()
    path = answered[1]
    console.print(f"workload     {path}", soft_wrap=True)
    console.print(named_lines(_description_lines(answered)))
    # Lines that are to be copied are not folded.
    typer.echo("tune it      polythrottle tune --device sim:jetson-agx-orin --slo 'p99<=1.2x' \\")
    typer.echo(f"             --workload {shlex.quote(str(path))}")


def _description_lines(answered: "tuple[Description, Path]") -> Iterator[tuple[str, str]]:
    found = answered[0]
    document = _description_document(answered)
    moved = document["traffic_bytes"] / 1e6
    unfused = document["unfused_traffic_bytes"] / 1e6
    yield "model", str(found.document()["title"])
    yield "operations", f"{document['operations'] / 1e9:.4g} billion per item, a multiply-add counted as two"
    yield "parameters", f"{document['parameters']:,}; {document['weight_bytes'] / 1e6:.4g} MB read per query"
    yield "activations", f"{moved:.4g} MB moved per item; {unfused:.4g} MB if nothing were fused"
    yield "kernels", f"{document['kernels']:.0f}, writing {document['tensors']} tensors"
    if document["bytes_only"]:
        yield "bytes only", ", ".join(f"{name} {times}" for name, times in document["bytes_only"].items())
    yield "assumed", "efficiency, parallelism, handoff and memory; preprocessing is left at 0"


# `polythrottle calibrate`: how a device's energy reading behaves, and its factor against an external meter.

_SIZE = 256


@dataclass(frozen=True)
class CalibrationResult:
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
    if device is None or device == "auto":
        device = _found()
    board = open_device(device)
    if DeviceURI.parse(board.uri).several:
        raise InvalidInput(f"{board.title} have a sensor each: calibrate one of them, such as --device nvml:0")
    if wall is None:
        done = _tested(board, workload, seconds)
    else:
        done = _compared(board, wall, column, time_column)
    answer(done, as_json, _print_calibration, _calibration_document)


def _intended(seconds: float) -> dict[str, Any]:
    """Return what a calibration of the device found here would do."""
    from polythrottle.backends import open_device
    from polythrottle.metering.calibration import calibration_path

    board = open_device(_found())
    load = ""
    if not board.uri.startswith("cpu"):
        load = " --workload model.onnx"
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


def _tested(board: "Device", workload: str | None, seconds: float) -> CalibrationResult:
    from polythrottle.domain.clock import VirtualClock
    from polythrottle.metering.calibration import (
        calibration_path,
        recording_path,
        self_test,
        write_calibration,
        write_recording,
    )

    # A simulated sensor behaves as it was written to; there is nothing to find out.
    if isinstance(board.clock, VirtualClock):
        raise InvalidInput(f"{board.title} has no sensor to calibrate")
    with contextlib.ExitStack() as open_things:
        work = _work(board, workload, open_things)
        open_things.enter_context(board)
        open_things.enter_context(own_stdout())
        found = self_test(board, work, seconds)
    path = calibration_path(board)
    write_recording(recording_path(path), found.readings)
    write_calibration(path, board, found.sensor)
    return CalibrationResult(board.uri, found.sensor, path, tested=found)


def _work(board: "Device", workload: str | None, open_things: contextlib.ExitStack) -> Callable[[], object]:
    """Return what loads the device for a moment."""
    if workload is not None:
        from polythrottle.tuning.setup import target_of
        from polythrottle.workloads import open_workload

        served = open_things.enter_context(contextlib.closing(open_workload(workload, target=target_of(board))))
        served.apply(served.space.default)
        return served.query
    if not board.uri.startswith("cpu"):
        raise InvalidInput(f"say what loads {board.title}: --workload model.onnx, package.module:callable, …")
    import numpy as np

    # A product of matrices that fit the caches keeps a core at its highest power for as long as it is asked.
    matrix = np.full((_SIZE, _SIZE), 0.5)
    return lambda: matrix @ matrix


def _compared(board: "Device", wall: Path, column: str | None, time_column: str | None) -> CalibrationResult:
    from polythrottle.backends.meters.file_meters import read_wall
    from polythrottle.metering.calibration import (
        calibration_path,
        read_recording,
        recording_path,
        sensor_of,
        write_calibration,
    )
    from polythrottle.metering.wall_calibration import fit_wall

    path = calibration_path(board)
    known = sensor_of(board)
    log = read_wall(wall, column, time_column)
    fit = fit_wall(read_recording(recording_path(path)), log.readings, known.memory_s)
    sensor = fit.applied(known, f"{wall.name}, column {log.column}")
    write_calibration(path, board, sensor)
    return CalibrationResult(board.uri, sensor, path, fit=fit)


def _calibration_document(done: CalibrationResult) -> dict[str, Any]:
    tested = done.tested
    return {
        "device": done.device,
        "sensor": asdict(done.sensor),
        "calibration": str(done.path),
        "idle_power_w": optional(attrgetter("idle_w"), tested),
        "loaded_power_w": optional(attrgetter("loaded_w"), tested),
        "rise_s": optional(attrgetter("rise_s"), tested),
        "fall_s": optional(attrgetter("fall_s"), tested),
        "wall": optional(asdict, done.fit),
    }


_LITTLE = 1.2


def _print_calibration(done: CalibrationResult) -> None:
    from polythrottle.cli.render.console import plain_console
    from polythrottle.cli.render.text import named_lines

    console = plain_console()
    console.print(done.device, style="bold", soft_wrap=True)
    console.print(named_lines(_calibration_lines(done)))
    console.print(f"kept in  {done.path}", soft_wrap=True)


def _clock(shift_s: float) -> str:
    return f"{abs(shift_s):.1f} s {'ahead' if shift_s > 0 else 'behind'}"


def _calibration_lines(done: CalibrationResult) -> list[tuple[str, Any]]:
    from polythrottle.domain.units import show

    sensor = done.sensor
    tested = done.tested
    fit = done.fit
    lines: list[tuple[str, Any]] = []
    if tested is not None:
        lines += [
            ("moves", _seconds(sensor.step_s, "every {}", "whenever it is read")),
            ("follows", _seconds(sensor.lag_s, "within {}", "at once, as far as can be seen")),
            ("idle", show(tested.idle_w, "W")),
            ("loaded", show(tested.loaded_w, "W")),
        ]
        if tested.loaded_w < _LITTLE * tested.idle_w:
            lines.append(("", "the load adds too little to tell how readings follow; name a heavier one (--workload)"))
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
    return [*lines, ("windows", _seconds(sensor.least_s, "of {} at least", "of any length"))]


def _seconds(time_s: float | None, form: str, none: str) -> str:
    """Return a time in words, and other words where it is zero or not known."""
    from polythrottle.domain.units import show

    if not time_s:
        return none
    return form.format(show(time_s, "s"))
