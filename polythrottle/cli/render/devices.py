"""What `polythrottle devices` shows: the devices that can be tuned here, and one of them in full."""

from typing import Any

from rich.table import Table
from rich.text import Text

from polythrottle.api.tuning_result import show_point
from polythrottle.backends import find_device, open_device
from polythrottle.catalog import is_language_model, load_board, load_language_model, load_model, names
from polythrottle.cli.output import grid
from polythrottle.cli.render.console import Unpadded, plain_console
from polythrottle.domain.errors import PolythrottleError
from polythrottle.domain.space import Knob
from polythrottle.domain.units import show_name, show_number
from polythrottle.inspect.examination import groups, real_devices
from polythrottle.inspect.machine import System


def listing() -> dict[str, Any]:
    """Return every device of this machine and of the catalogue, and every model simulated boards can serve."""
    found = find_device()
    real = real_devices(System())
    others = [uri for uri in (*real, *groups(real)) if uri != found.uri]
    here = [{"uri": uri, "title": _title(uri), "simulated": False} for uri in (found.uri, *others)]
    here[0]["note"] = found.explanation
    boards = [load_board(name) for name in names("devices")]
    simulated = [
        {"uri": f"sim:{board.name}", "title": board.title, "simulated": True, "points": len(board.space())}
        for board in boards
        if board.simulation is not None
    ]
    models = [
        load_language_model(name) if is_language_model(name) else load_model(name)
        for name in names("profiles/workloads")
    ]
    return {
        "devices": [*here, *simulated],
        "workloads": [{"name": model.name, "title": model.title, "precision": model.precision} for model in models],
    }


def _title(uri: str) -> str:
    try:
        return open_device(uri).title
    except PolythrottleError as err:
        # One device that fails is no reason to list none.
        return f"cannot be opened: {' '.join(str(err).split())}"


def print_listing(found: dict[str, Any]) -> None:
    """Print the listing in 80 columns."""
    console = plain_console()
    here = [device for device in found["devices"] if not device["simulated"]]
    boards = [device for device in found["devices"] if device["simulated"]]
    for device in here:
        console.print(Text.assemble((device["uri"], "bold"), "  ", device["title"]))
    console.print(f"  auto: {here[0]['note']}\n", style="dim")
    simulated = grid("", ("simulated board", "", "points"), 2, after=2, folded=(1, 2))
    for board in boards:
        simulated.add_row(board["uri"], board["title"], f"{board['points']:,}")
    console.print(Unpadded(simulated))
    console.print()
    workloads = grid("", ("workload for simulated boards", "", ""), 3, after=2, folded=(1, 2))
    for model in found["workloads"]:
        workloads.add_row(model["name"], model["title"], model["precision"])
    console.print(Unpadded(workloads))
    told = "\npolythrottle devices URI shows one device with its knobs and presets, doctor if it works."
    console.print(told, style="dim")


def details(uri: str) -> dict[str, Any]:
    """Return one device: its knobs with their levels, its default point, its presets, what its joules cover.

    Raises:
        PolythrottleError: If it cannot be opened.
    """
    device = open_device(uri)
    return {
        "uri": device.uri,
        "title": device.title,
        "points": len(device.space),
        "knobs": {knob.name: list(knob.levels) for knob in device.space.knobs},
        "default": dict(device.space.default),
        "presets": {name: dict(point) for name, point in device.presets.items()},
        "boundary": device.boundary,
        "energy_kind": str(device.energy_kind),
    }


def print_details(device: dict[str, Any]) -> None:
    """Print one device in 80 columns."""
    console = plain_console()
    console.print(Text.assemble((device["uri"], "bold"), "  ", device["title"]))
    table = Table.grid(padding=(0, 2))
    table.add_column(style="dim", no_wrap=True)
    table.add_column(overflow="fold")
    table.add_row("points", f"{device['points']:,}, times those of the workload")
    for name, levels in device["knobs"].items():
        table.add_row(show_name(name), _levels(Knob(name, tuple(levels))))
    table.add_row("default", show_point(device["default"]))
    for name, point in device["presets"].items():
        table.add_row(f"preset {name}", show_point(point))
    kind = f"{device['energy_kind']}: "
    table.add_row("energy", f"{kind}{device['boundary'].removeprefix(kind)}")
    console.print(Unpadded(table))


def _levels(knob: Knob) -> str:
    shown = [show_number(knob.name, level) for level in knob.levels]
    if len(shown) <= 16:
        return ", ".join(shown)
    return f"{shown[0]} … {shown[-1]} ({len(shown)} levels)"
