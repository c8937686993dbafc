"""`polythrottle profile-model`: the description of a model that simulated boards serve, counted from the model."""

import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from polythrottle.cli.answers import answer, own_stdout
from polythrottle.cli.options import JsonOption
from polythrottle.errors import InvalidInput, StorageError

if TYPE_CHECKING:
    from polythrottle.profiling import Description

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
        Path | None, typer.Option("--out", metavar="FILE", help="The workload file to write (.toml).")
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Replace a file that is there.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Count what a model computes and moves, and describe it for simulated boards."""
    from polythrottle.catalog.profiles import replace_file
    from polythrottle.profiling import profile_model as profile

    path = out or _FOLDER / f"{_named(model)}.toml"
    _check(path, force)
    with own_stdout():
        found = profile(model, inputs=inputs or (), batch_size=batch, precision=precision)
    replace_file(path, found.text().encode())
    answer((found, path), as_json, _print, _document)


def _named(model: str) -> str:
    from polythrottle.setup import slug

    return slug(model.removesuffix(".pt"))


def _check(path: Path, force: bool) -> None:
    """Refuse a file that would not be found again, or would take the place of another, before anything is counted."""
    if path.suffix != ".toml":
        raise InvalidInput(f"{path} would not be found again: the name of a workload file ends in .toml")
    if path.is_dir() or (path.exists() and not force):
        raise StorageError(f"{path} is there already; name another file with --out, or replace it with --force")


def _document(answered: "tuple[Description, Path]") -> dict[str, Any]:
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


def _print(answered: "tuple[Description, Path]") -> None:
    from rich.console import Console

    from polythrottle.cli.texts import named_lines

    console, path = Console(highlight=False, markup=False), answered[1]
    console.print(f"workload     {path}", soft_wrap=True)
    console.print(named_lines(_lines(answered)))
    # Lines that are to be copied are not folded.
    typer.echo("tune it      polythrottle tune --device sim:jetson-agx-orin --slo 'p99<=1.2x' \\")
    typer.echo(f"             --workload {shlex.quote(str(path))}")


def _lines(answered: "tuple[Description, Path]") -> Iterator[tuple[str, str]]:
    found, document = answered[0], _document(answered)
    moved, unfused = document["traffic_bytes"] / 1e6, document["unfused_traffic_bytes"] / 1e6
    yield "model", str(found.document()["title"])
    yield "operations", f"{document['operations'] / 1e9:.4g} billion per item, a multiply-add counted as two"
    yield "parameters", f"{document['parameters']:,}; {document['weight_bytes'] / 1e6:.4g} MB read per query"
    yield "activations", f"{moved:.4g} MB moved per item; {unfused:.4g} MB if nothing were fused"
    yield "kernels", f"{document['kernels']:.0f}, writing {document['tensors']} tensors"
    if document["bytes_only"]:
        yield "bytes only", ", ".join(f"{name} {times}" for name, times in document["bytes_only"].items())
    yield "assumed", "efficiency, parallelism, handoff and memory; preprocessing is left at 0"
