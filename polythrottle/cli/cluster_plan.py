"""`polythrottle cluster plan`: which machines, how many, which market, which power cap, which checkpoint interval."""

import math
import re
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from polythrottle.cli.answers import answer
from polythrottle.cli.options import JsonOption, share
from polythrottle.errors import InvalidInput, SloUnmet

if TYPE_CHECKING:
    from polythrottle.cluster.machine import Market
    from polythrottle.cluster.plan.front import Aim, Limits

_MONEY = re.compile(r"\s*\$?\s*(\d+(?:\.\d*)?|\.\d+)\s*(?:usd)?\s*", re.IGNORECASE)
_DAYS = re.compile(r"\s*(\d+(?:\.\d*)?|\.\d+)\s*d\s*")


def plan(
    catalogue: Annotated[
        Path, typer.Argument(metavar="CATALOGUE", help="TOML file: the work, machines, prices, lifetimes, caps.")
    ],
    deadline: Annotated[
        str | None, typer.Option("--deadline", metavar="TIME", help="From the order to the last step: 12h, 3d.")
    ] = None,
    budget: Annotated[
        str | None, typer.Option("--budget", metavar="USD", help="What it may cost at most: 20usd.")
    ] = None,
    minimise: Annotated[
        str, typer.Option("--minimise", metavar="WHAT", help="energy, cost or time; cost by default.")
    ] = "cost",
    chance: Annotated[
        str, typer.Option("--chance", metavar="P", help="How likely the limits are to be kept; 95% by default.")
    ] = "95%",
    market: Annotated[
        str | None, typer.Option("--market", metavar="NAME", help="Only spot, or only on-demand.")
    ] = None,
    most: Annotated[int | None, typer.Option("--most", metavar="N", help="The most machines.")] = None,
    draws: Annotated[int, typer.Option("--draws", metavar="N", help="Simulated outcomes per option.")] = 200,
    seed: Annotated[int, typer.Option("--seed", metavar="N", help="Of the draws.")] = 0,
    task: Annotated[
        Path | None, typer.Option("--task", metavar="FILE", help="Write the plan as a SkyPilot task (.yaml).")
    ] = None,
    command: Annotated[
        str, typer.Option("--command", metavar="CMD", help="What each machine of the task executes.")
    ] = "python train.py",
    trace: Annotated[
        Path | None, typer.Option("--trace", metavar="FILE", help="Replay deadline rules on recorded spot machines.")
    ] = None,
    moves: Annotated[bool, typer.Option("--moves", help="Replay moving between the zones of price tables.")] = False,
    waits: Annotated[
        Path | None, typer.Option("--waits", metavar="FILE", help="Recorded waits: when to ask for a successor.")
    ] = None,
    usd_per_kwh: Annotated[
        float | None,
        typer.Option("--usd-per-kwh", metavar="P", help="Price of energy beside the rent; the catalogue's by default."),
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Choose machines, market, power cap and checkpoint interval for a job, or share machines among several jobs."""
    from polythrottle.cluster.shared import is_shared

    limits, markets = _limits(deadline, budget, chance), _markets(market)
    _at_least("--draws", draws, 10)
    if most is not None:
        _at_least("--most", most, 1)
    aim = _aim(minimise)
    if usd_per_kwh is not None and not 0 <= usd_per_kwh <= 1000:
        raise InvalidInput(f"--usd-per-kwh {usd_per_kwh:g} is not a price from 0 to 1000 US dollars")
    if is_shared(catalogue):
        if any((deadline, budget, most, task, trace, moves, waits, usd_per_kwh)):
            raise InvalidInput(f"{catalogue} holds several jobs: each has its own deadline_h, and machines their most")
        _share(catalogue, markets, aim, as_json)
        return
    from polythrottle.catalog.profiles import replace_file
    from polythrottle.cli.cluster_planned import document, printed
    from polythrottle.cli.cluster_replayed import replays
    from polythrottle.cli.live import LiveSweep
    from polythrottle.cluster.catalogue import read_catalogue
    from polythrottle.cluster.plan.front import every_option
    from polythrottle.cluster.plan.front import plan as find
    from polythrottle.cluster.provision.skypilot import task_text

    if trace is not None and deadline is None:
        raise InvalidInput("--trace needs a --deadline: without one there is nothing to be late for")
    read = read_catalogue(catalogue)
    if usd_per_kwh is not None:
        read = replace(read, work=replace(read.work, usd_per_kwh=usd_per_kwh))
    found = every_option(read.work, read.offers, markets, most, aim)
    with LiveSweep("drawing outcomes") as live:
        made = find(found, limits, aim, seed, draws, live.counted)
    extras = replays(read, made, trace, moves, waits)
    text = None if task is None or made.chosen is None else task_text(made.chosen.option, command)
    answer((read, made, aim, extras), as_json, printed, document)
    if made.chosen is None:
        raise SloUnmet(made.missed())
    if task is not None and text is not None:
        replace_file(task, text.encode())
        typer.echo(f"task  {task}", err=True)


def _share(catalogue: Path, markets: "tuple[Market, ...]", aim: "Aim", as_json: bool) -> None:
    """Share the machines of a catalogue among its jobs, and say which of them fall short."""
    from polythrottle.cli.cluster_shares import document, missed, printed
    from polythrottle.cluster.plan.sharing import Aim as For
    from polythrottle.cluster.plan.sharing import share as share_out
    from polythrottle.cluster.shared import read_shared

    read = read_shared(catalogue, markets[0] if len(markets) == 1 else None)
    found = share_out(read.jobs, read.kinds, For.FAIR if aim == "time" else For(aim))
    answer((read, found, aim), as_json, printed, document)
    if not found.feasible:
        raise SloUnmet(missed(read.jobs, found))


def _limits(deadline: str | None, budget: str | None, chance: str) -> "Limits":
    from polythrottle.cluster.plan.front import Limits

    sure = share("--chance", chance)
    if sure is None or not 0 < sure <= 1:
        raise InvalidInput(f"--chance {chance!r} is above 0 and at most 100%; write for example 95%")
    return Limits(
        math.inf if deadline is None else time_s("--deadline", deadline),
        math.inf if budget is None else money_usd("--budget", budget),
        sure,
    )


def time_s(option: str, text: str) -> float:
    """Return the seconds a text such as ``12h``, ``90min`` or ``3d`` means.

    Raises:
        InvalidInput: If it means no time above zero.
    """
    from polythrottle.units import parse_quantity

    days = _DAYS.fullmatch(text)
    try:
        found = float(days[1]) * 86400 if days else parse_quantity(text, "s")
    except InvalidInput:
        found = 0.0
    if not 0 < found < math.inf:
        raise InvalidInput(f"{option} {text[:40]!r} is not a time above 0 in s, min, h or d; write for example 12h")
    return found


def money_usd(option: str, text: str) -> float:
    """Return the dollars a text such as ``20usd``, ``$20`` or ``20`` means.

    Raises:
        InvalidInput: If it means no amount above zero.
    """
    found = _MONEY.fullmatch(text)
    if found is None or not 0 < float(found[1]) < math.inf:
        raise InvalidInput(f"{option} {text[:40]!r} is not an amount above 0 in US dollars; write for example 20usd")
    return float(found[1])


def _markets(name: str | None) -> "tuple[Market, ...]":
    from polythrottle.cluster.machine import Market

    if name is None:
        return tuple(Market)
    if name not in tuple(Market):
        raise InvalidInput(f"--market takes {' or '.join(Market)}, not {name[:40]!r}")
    return (Market(name),)


def _aim(name: str) -> "Aim":
    from polythrottle.cluster.plan.front import Aim

    if name not in tuple(Aim):
        raise InvalidInput(f"--minimise takes {', '.join(Aim)}, not {name[:40]!r}")
    return Aim(name)


def _at_least(option: str, value: int, least: int) -> None:
    if not least <= value <= 100_000:
        raise InvalidInput(f"{option} {value} is not a number from {least} to 100,000")
