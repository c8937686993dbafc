"""`polythrottle cluster predict`: step times of networks never seen, from a table of others."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from polythrottle.cli.answers import answer
from polythrottle.cli.options import JsonOption

if TYPE_CHECKING:
    from polythrottle.cluster.predict.scoring import Record
    from polythrottle.cluster.tables import StepRow

_MANY = 10.0


def predict(
    table: Annotated[
        Path, typer.Option("--table", metavar="FILE", help="Measured steps: gpu, network, flops, step_time_s, …")
    ],
    test: Annotated[
        Path | None,
        typer.Option("--test", metavar="FILE", help="Networks to predict; without, each of the table in turn."),
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Predict the time of a training step of networks never seen, and score it beside CM-DARE's models.

    Every network is predicted from others only: left out in turn (leave-one-network-out), or in a second file. Tables
    of checkpoint times (model, weight_mb, meta_mb, local_write_s, remote_write_s) are predicted in the same way.
    """
    from polythrottle.cluster.tables import is_of_checkpoints

    answer(_checkpoints(table, test) if is_of_checkpoints(table) else _steps(table, test), as_json, _show)


def _steps(table: Path, test: Path | None) -> dict[str, Any]:
    from polythrottle.cli.live import LiveSweep
    from polythrottle.cluster.predict.scoring import leaking, left_out, unseen
    from polythrottle.cluster.tables import step_rows

    rows = step_rows(table)
    asked = None if test is None else step_rows(test, measured=False)
    with LiveSweep("predicting") as live:
        records = left_out(rows, live.counted) if asked is None else unseen(rows, asked, live.counted)
    names = {(row.gpu, row.network.name) for row in rows}
    seen = {row.network.name for row in asked or () if (row.gpu, row.network.name) in names}
    about = {"mape_published_protocol": leaking(rows) if asked is None else None, "notes": _lacking(rows, asked or ())}
    return _document(records, test, seen) | about


def _lacking(rows: "Sequence[StepRow]", asked: "Sequence[StepRow]") -> list[str]:
    """Return a line on what a table without numbers of tensors costs."""
    from math import isnan

    from polythrottle.cluster.predict.scoring import filled

    networks = {row.network.name: row.network for row in (*filled(rows, asked), *filled(asked, rows))}
    lacking = sum(isnan(network.n_tensors) for network in networks.values())
    if not lacking:
        return []
    return [
        f"n_tensors is not known of {lacking} of {len(networks)} networks: what a step spends on each tensor is left "
        "out there, and predictions are coarser (on CM-DARE's table off by 13 % in the mean instead of 4 to 6 %)"
    ]


def _checkpoints(table: Path, test: Path | None) -> dict[str, Any]:
    from polythrottle.cluster.predict.scoring import checkpoints
    from polythrottle.cluster.tables import checkpoint_rows

    rows = checkpoint_rows(table)
    asked = None if test is None else checkpoint_rows(test)
    seen = {row.network for row in asked or ()} & {row.network for row in rows}
    return _document(checkpoints(rows, asked), test, seen) | {"mape_published_protocol": None, "notes": []}


def _document(records: "list[Record]", test: Path | None, seen: set[str]) -> dict[str, Any]:
    from dataclasses import asdict

    from polythrottle.cluster.predict.scoring import COVERAGE, covered, mape

    return {
        "records": [asdict(record) for record in records],
        "mape": mape(records),
        "protocol": "leave-one-network-out" if test is None else "second file",
        "seen": sorted(seen),
        "interval": COVERAGE,
        "covered": covered(records),
    }


def _show(found: dict[str, Any]) -> None:
    """Print the errors, and our predictions, in 80 columns."""
    from rich.console import Console
    from rich.table import Table

    from polythrottle.cluster.predict.scoring import OURS

    console = Console(highlight=False, markup=False, width=80)
    grid = Table(box=None, padding=(0, 1), header_style="dim")
    for heading in ("gpu", "network"):
        grid.add_column(heading, overflow="fold")
    for heading in ("measured", "predicted", "off", "90 % within"):
        grid.add_column(heading, justify="right", no_wrap=True)
    for one in found["records"]:
        if one["model"] == OURS:
            grid.add_row(one["gpu"], one["network"], *_cells(one))
    from polythrottle.cli.unpadded import Unpadded

    console.print(Unpadded(grid))
    _errors(console, found)
    how = "from the other networks" if found["protocol"] == "leave-one-network-out" else "from the other table"
    console.print(f"predicted: {how}; within: the prediction's own interval", style="dim")
    if found["covered"] is not None:
        console.print(f"{100 * found['covered']:.0f} % of the measurements lie within", style="dim")
    for why in dict.fromkeys(one["why"] for one in found["records"] if one["why"]):
        console.print(f"not predicted: {why}", style="yellow")
    for note in found["notes"]:
        console.print(note, style="yellow")
    if found["seen"]:
        console.print(f"in both files, so not unseen: {', '.join(found['seen'])}", style="yellow")


def _errors(console: Any, found: dict[str, Any]) -> None:
    from rich.table import Table

    grid = Table(box=None, padding=(0, 1), header_style="dim", title="\nMean error", title_justify="left")
    models = list(dict.fromkeys(name for some in found["mape"].values() for name in some))
    grid.add_column("gpu", overflow="fold")
    grid.add_column("protocol", no_wrap=True)
    for heading in models:
        grid.add_column(heading, justify="right", no_wrap=True)
    for gpu, errors in found["mape"].items():
        grid.add_row(gpu, found["protocol"], *(_percent(errors[name]) for name in models))
        if found["mape_published_protocol"]:
            shown = found["mape_published_protocol"][gpu]
            grid.add_row("", "published (leaks)", *(_percent(shown.get(name)) for name in models))
    from polythrottle.cli.unpadded import Unpadded

    console.print(Unpadded(grid))


def _cells(one: dict[str, Any]) -> tuple[str, ...]:
    from polythrottle.units import show

    measured, predicted = one["measured_s"], one["predicted_s"]
    off = "" if measured is None or predicted is None else _off(predicted / measured)
    within = "" if one["low_s"] is None else f"{show(one['low_s'], 's')} to {show(one['high_s'], 's')}"
    return (*("" if value is None else show(value, "s") for value in (measured, predicted)), off, within)


def _off(ratio: float) -> str:
    """Return by how much a ratio is off 1, in per cent, or as a factor where that says more."""
    return f"{100 * (ratio - 1):+.1f} %" if ratio < _MANY else f"{ratio:.3g} ×"


def _percent(share: float | None) -> str:
    if share is None:
        return "unknown"
    return f"{100 * share:.1f} %" if share < _MANY else f"{100 * share:.3g} %"
