"""``polythrottle cluster simulate``: a catalogue's job on machines that come and go, in virtual time."""

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from polythrottle.cli.answers import answer
from polythrottle.cli.grids import amount, several
from polythrottle.cli.options import JsonOption, share
from polythrottle.errors import InvalidInput

if TYPE_CHECKING:
    from rich.table import Table

    from polythrottle.cluster.plan.offer import Work
    from polythrottle.cluster.simulate.comparing import Compared
    from polythrottle.cluster.simulate.outcome import Spread

_MOST_NODES, _MOST_DAYS, _MOST_SEEDS = 10_000, 366.0, 100


def simulate(
    catalogue: Annotated[
        Path, typer.Option("--catalogue", metavar="FILE", help="TOML file: the work, machines, prices, caps.")
    ],
    machine: Annotated[
        str | None, typer.Option("--machine", metavar="NAME", help="Of the catalogue; its first by default.")
    ] = None,
    trace: Annotated[
        Path | None,
        typer.Option("--trace", metavar="FILE", help="Recorded cluster: CSV with time_s and n_nodes."),
    ] = None,
    nodes: Annotated[int, typer.Option("--nodes", metavar="N", help="Places in the fleet.")] = 8,
    days: Annotated[float, typer.Option("--days", metavar="D", help="Stop looking after so many days.")] = 30.0,
    endless: Annotated[
        bool, typer.Option("--endless", help="Train on to --days, whatever the work of the catalogue.")
    ] = False,
    seed: Annotated[int, typer.Option("--seed", metavar="N", help="The first seed, of machines and silicon.")] = 0,
    seeds: Annotated[int, typer.Option("--seeds", metavar="N", help="How many; the spread is over them.")] = 3,
    policies: Annotated[
        str,
        typer.Option("--policies", metavar="A,B", help="default, apart, joint, tuned; the first is the baseline."),
    ] = "default,apart,joint,tuned",
    longer: Annotated[
        str, typer.Option("--longer", metavar="3%", help="How much longer the job may take than at default clocks.")
    ] = "3%",
    spread: Annotated[
        str, typer.Option("--spread", metavar="8%", help="From the fastest to the slowest GPU of the type.")
    ] = "8%",
    notice: Annotated[
        float | None,
        typer.Option("--notice", metavar="S", help="Every machine is told of its loss so many seconds before."),
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Simulate a job on machines that can be taken away: time, cost, joules, and where they went. All simulated."""
    from polythrottle.cli.live import LiveSweep
    from polythrottle.cluster.catalogue import read_catalogue
    from polythrottle.cluster.simulate.comparing import asked_of, compare
    from polythrottle.cluster.simulate.trace import read_trace

    _within("--nodes", nodes, 1, _MOST_NODES)
    _within("--days", days, 0.001, _MOST_DAYS)
    _within("--seeds", seeds, 1, _MOST_SEEDS)
    if notice is not None:
        _within("--notice", notice, 0, 3600)
    asked = asked_of(
        read_catalogue(catalogue),
        machine,
        trace=None if trace is None else read_trace(trace),
        machines=nodes,
        horizon_s=days * 86400,
        seeds=tuple(range(seed, seed + seeds)),
        spread=_share("--spread", spread),
        longer=_share("--longer", longer),
        notice_s=notice,
        endless=endless,
    )
    names = tuple(dict.fromkeys(name.strip() for name in policies.split(",") if name.strip()))
    if not names:
        raise InvalidInput("--policies takes names such as default,tuned")
    with LiveSweep("simulating") as live:
        compared = compare(asked, names, live.counted)
    answer(compared, as_json, _printed, lambda value: value.record())


def _within(option: str, value: float, least: float, most: float) -> None:
    if not least <= value <= most:
        raise InvalidInput(f"{option} is from {least:g} to {most:g}, not {value:g}")


def _share(option: str, text: str) -> float:
    found = share(option, text) or 0.0
    if not 0 <= found < 1:
        raise InvalidInput(f"{option} {text!r} is at least 0% and below 100%; write for example 3%")
    return found


def _printed(compared: "Compared") -> None:
    from rich.console import Console

    asked = compared.asked
    console = Console(highlight=False, markup=False, width=min(80, Console().width))
    source = "drawn lifetimes" if asked.trace is None else f"trace {asked.trace.name}"
    console.print(f"Simulated: {asked.work.name}, {asked.machines} × {asked.offer.machine.name},")
    console.print(f"{source}, {several(len(asked.seeds), 'seed')}, GPUs {asked.spread:.0%} apart.")
    console.print("Joules follow from the powers in the catalogue; ± is the 95 % interval over seeds.")
    if asked.trace is not None and asked.trace.assumed_s:
        console.print(f"The trace's last row is taken to last {asked.trace.assumed_s:.4g} s, as its middle row does.")
    for line in _beside(asked.work):
        console.print(line)
    console.print()
    console.print(_totals(compared))
    console.print()
    console.print(_uses(compared))
    unfinished = [name for name, outcomes in compared.outcomes.items() if not all(each.finished for each in outcomes)]
    if unfinished and not asked.endless:
        console.print(
            f"Not done within {asked.horizon_s / 86400:g} days: {', '.join(unfinished)};"
            " savings are per work that was done."
        )


def _beside(work: "Work") -> Iterator[str]:
    """Yield what is counted beside the workers, a line each."""
    server = work.server
    if server.all_w or server.all_usd_per_s:
        rent = f"{server.all_w:g} W and {server.all_usd_per_s * 3600:.3g} usd/h"
        yield f"Cost and energy count the server too, {rent}; shares are the workers'."
    if work.usd_per_kwh:
        yield f"Cost counts energy at {work.usd_per_kwh:g} usd/kWh beside the rent."


def _totals(compared: "Compared") -> "Table":
    from rich.table import Table

    first = next(iter(compared.outcomes))
    table = Table(box=None, padding=(0, 1), header_style="dim")
    for heading in ("policy", "time", "cost", "energy", f"joules saved\nagainst {first}", f"longer than\n{first}"):
        table.add_column(heading, justify="left" if heading == "policy" else "right")
    for name in compared.outcomes:
        hours = compared.mean(name, lambda outcome: outcome.time_s / 3600).mean
        usd = compared.mean(name, lambda outcome: outcome.usd).mean
        joules = compared.mean(name, lambda outcome: outcome.energy_j).mean
        table.add_row(
            name,
            f"{amount(hours)} h",
            f"${amount(usd)}",
            f"{amount(joules / 3.6e6)} kWh",
            _change(compared.saved(name, lambda outcome: outcome.energy_j), 1),
            _change(compared.saved(name, lambda outcome: outcome.time_s), -1),
        )
    return table


def _change(found: "Spread | None", sign: int) -> str:
    if found is None:
        return "nothing done"
    half = "" if found.low is None or found.high is None else f" ± {(found.high - found.low) / 2:.1%}"
    return f"{sign * found.mean + 0.0:.1%}{half}"


def _uses(compared: "Compared") -> "Table":
    """Return where machine time and joules went, in per cent of each policy's own."""
    from rich.table import Table

    from polythrottle.cluster.ledger import Use

    table = Table(box=None, padding=(0, 1), header_style="dim")
    table.add_column("share of\ntime | joules")
    for name in compared.outcomes:
        table.add_column(name, justify="right")
    for use in Use:
        cells = [_used(compared, name, use) for name in compared.outcomes]
        if any(cells):
            table.add_row(str(use), *cells)
    return table


def _used(compared: "Compared", name: str, use: object) -> str:
    from polythrottle.cluster.ledger import Use

    outcomes = compared.outcomes[name]
    spent = [outcome.ledger.by_use[Use(use)] for outcome in outcomes]
    totals = [outcome.ledger.total for outcome in outcomes]
    whole_s, whole_j = sum(each.machine_s for each in totals), sum(each.energy_j for each in totals)
    used_s, used_j = sum(each.machine_s for each in spent), sum(each.energy_j for each in spent)
    return f"{used_s / whole_s:.1%} | {used_j / whole_j:.1%}" if used_s and whole_j else ""
