"""``polythrottle cluster fleet``: what the nodes of a fleet have learnt, which of them stand out, and their slack."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from polythrottle.cli.answers import answer
from polythrottle.cli.grids import several
from polythrottle.cli.options import JsonOption, share
from polythrottle.errors import InvalidInput

if TYPE_CHECKING:
    from rich.console import Console

    from polythrottle.cluster.fleet.view import FleetShown


def fleet(
    store: Annotated[str, typer.Option("--store", metavar="URL", help="The job's store: a folder or any fsspec URL.")],
    gpu: Annotated[str, typer.Option("--gpu", metavar="NAME", help="Only this GPU model.")] = "",
    network: Annotated[str, typer.Option("--network", metavar="NAME", help="Only this network.")] = "",
    longer: Annotated[
        str, typer.Option("--longer", metavar="3%", help="How much later than the slowest node all may be.")
    ] = "0%",
    learn: Annotated[
        Path | None,
        typer.Option("--learn", metavar="TABLE", help="First keep a sweep over power limits as what a node says."),
    ] = None,
    node: Annotated[str, typer.Option("--node", metavar="NAME", help="With --learn: the node.")] = "",
    batch: Annotated[
        int | None, typer.Option("--batch", metavar="N", help="With --learn: which batch size of the table.")
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Show what a fleet knows: caps and what they do, nodes and their silicon, who stands out, and slack."""
    from polythrottle.cluster.fleet.view import fleets, shown
    from polythrottle.cluster.fleet.view import learn as keep_table
    from polythrottle.cluster.store import Store

    later = share("--longer", longer) or 0.0
    if not 0 <= later < 1:
        raise InvalidInput(f"--longer {longer!r} is at least 0% and below 100%; write for example 3%")
    if not store.strip():
        raise InvalidInput("--store is empty; name a folder or a URL such as gs://bucket/job")
    opened = Store(store)
    if learn is not None:
        if not (node and gpu and network):
            raise InvalidInput("--learn needs --node, --gpu and --network, to say whose knowledge it is and of what")
        keep_table(opened, learn, node, gpu, network, batch)
    known, notes = fleets(opened, gpu, network)
    found = [shown(each, later) for each in known]
    for note in notes:
        typer.echo(f"note: {note}", err=True)
    answer(found, as_json, lambda value: _printed(value, store), lambda value: [each.record() for each in value])


def _printed(found: "list[FleetShown]", store: str) -> None:
    from rich.console import Console
    from rich.text import Text

    console = Console(highlight=False, markup=False, width=min(80, Console().width))
    if not found:
        console.print(f"Nothing is known in {store} yet: nodes tell what they see while they train.")
    for each in found:
        heading = (f"{each.network} on {each.gpu}", "bold")
        console.print(Text.assemble(heading, f", measured by {several(len(each.nodes), 'node')}"))
        if each.caps:
            _caps(console, each)
        _nodes(console, each)
        if each.caps:
            console.print("Power is a step's joules over its own time: waiting for others counts in.")
        if each.saving is not None:
            console.print(
                f"In step, {each.longer:.0%} later than the slowest: {each.saving:.1%} fewer joules (estimated;"
                " waiting at the barrier counted as free)."
            )


def _caps(console: "Console", each: "FleetShown") -> None:
    from rich.table import Table

    table = Table(box=None, padding=(0, 1), header_style="dim")
    for heading in ("limit", "step time", "power", "joules", "nodes"):
        table.add_column(heading, justify="right")
    default = each.caps[0]
    for cap, count in zip(each.caps, each.seen, strict=True):
        limit = "default" if cap.limit_w is None else f"{cap.limit_w:g} W"
        joules = cap.energy / default.energy - 1
        table.add_row(limit, f"{cap.slowdown:.3f} ×", f"{cap.power_w:.1f} W", f"{joules:+.1%}", str(count))
    from polythrottle.cli.unpadded import Unpadded

    console.print(Unpadded(table))


def _nodes(console: "Console", each: "FleetShown") -> None:
    from rich.table import Table

    table = Table(box=None, padding=(0, 1), header_style="dim")
    for heading in ("node", "silicon", "with slack", ""):
        table.add_column(heading, justify="left" if heading in ("node", "") else "right", overflow="fold")
    for node in each.nodes:
        factor = "unknown" if node.factor is None else f"{node.factor:.3f} ×"
        cap = "" if node.cap is None else "default" if node.cap.limit_w is None else f"{node.cap.limit_w:g} W"
        mark = "" if node.mads is None else f"stands out: {abs(node.mads):.0f} deviations {_side(node.mads)}"
        table.add_row(node.name, factor, cap, mark)
    from polythrottle.cli.unpadded import Unpadded

    console.print(Unpadded(table))


def _side(mads: float) -> str:
    return "slower" if mads > 0 else "faster"
