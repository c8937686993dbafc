"""`polythrottle snapshot`: a board in a file that a bug report can carry, and back from it."""

import itertools
from pathlib import Path
from typing import Annotated, Any

import typer

from polythrottle.cli.answers import answer
from polythrottle.cli.options import JsonOption
from polythrottle.errors import InvalidInput, StorageError

_SHOWN = 5


def snapshot(
    device: Annotated[
        str | None, typer.Option("--device", "-d", metavar="URI", help="jetson, nvml:0, cpu, or auto.")
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
    names = (Path(f"board{'' if number == 1 else f'-{number}'}.tar.gz") for number in itertools.count(1))
    return next(path for path in names if not path.exists())


def _taken(device: str, out: Path) -> dict[str, Any]:
    from polythrottle.backends import find_device, open_device
    from polythrottle.snapshot import take

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
    from polythrottle.snapshot import opened_by, unpack

    uri = opened_by(archive, unpack(archive, folder))
    return {"folder": str(folder), "device": uri}


def _print_unpacked(found: dict[str, Any]) -> None:
    typer.echo(f"tree      {found['folder']}")
    typer.echo(
        f"open it   --device '{found['device']}'" if found["device"] else "it opens with sim: only, not as a tree"
    )
