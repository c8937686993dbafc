"""A server of services in the terminal: what it draws, what it may, and what each of its services gets of it."""

from collections.abc import Iterator

from rich.table import Table
from rich.text import Text

from polythrottle.cli.output import formatted, several
from polythrottle.cli.render.console import plain_console
from polythrottle.cli.render.text import named_lines
from polythrottle.daemon.status import NodeShown, ServiceShown
from polythrottle.domain.measurement import EnergyKind
from polythrottle.domain.units import show
from polythrottle.storage.untrusted import printable


def print_node(node: NodeShown) -> None:
    """Print all services of a server and the watts they share."""
    console = plain_console()
    console.print(Text(f"a server of {several(len(node.services), 'service')}", "bold"))
    console.print(named_lines([pair for pair in _lines(node) if pair[1]]))
    table = Table(box=None, pad_edge=False)
    for name in ("service", "phase", "load", "p99", "power", "may draw", "weight"):
        table.add_column(name, justify="left" if name in ("service", "phase") else "right", no_wrap=name == "service")
    for each in node.services:
        table.add_row(*_row(each))
    console.print(table)
    for fault in node.faults:
        console.print(Text(printable(fault)))
    for each in node.services:
        for fault in each.faults:
            console.print(Text(f"{each.name}: {printable(fault)}"))
    for pod in node.pods:
        if pod.refused:
            console.print(
                Text(f"{printable(f'{pod.namespace}/{pod.pod}')} is not looked after: {printable(pod.refused)}")
            )


def _lines(node: NodeShown) -> Iterator[tuple[str, str]]:
    kind = "" if node.energy_kind in ("", EnergyKind.MEASURED) else f" {node.energy_kind}"
    yield "power", f"{_watts(node.power_w)}{kind}"
    if node.limit_w is None:
        yield "limit", "none"
        return
    kept = "kept" if node.met else "cannot be promised: what its services may draw at most does not fit"
    yield "limit", f"{show(node.limit_w, 'W')}, {kept}"
    yield "rest", f"{_watts(node.rest_w)} counted for what the server draws besides its services' devices"
    if node.above:
        yield "above", f"{node.above} s since it was set, at most {node.above_most} s in a row"
    if node.buys_w is not None:
        yield "more", f"{show(node.buys_w, 'W')} more would buy {node.buys}"


def _row(each: ServiceShown) -> tuple[str, ...]:
    p99 = "–"
    if each.p99_s is not None:
        p99 = show(each.p99_s, "s") if each.limit_s is None else f"{show(each.p99_s, 's')} of {show(each.limit_s, 's')}"
    phase = f"{each.phase}, short" if each.short else each.phase
    share = "not bounded" if each.share_w is None else show(each.share_w, "W")
    load = formatted(each.rate_per_s, "{:.3g}/s", unknown="–")
    return (each.name, phase, load, p99, _watts(each.power_w), share, f"{each.weight:g}")


def _watts(power_w: float | None) -> str:
    if power_w is None:
        return "–"
    return show(power_w, "W")
