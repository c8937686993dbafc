"""`polythrottle cluster plan`: which machines, how many, which market, which power cap, which checkpoint interval."""

import math
import re
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from polythrottle.cli.options import JsonOption, OptionGroup, check_seed, share, spread
from polythrottle.cli.output import answer, optional
from polythrottle.domain.errors import InvalidInput, SloUnmet
from polythrottle.storage.atomic_file import check_new

if TYPE_CHECKING:
    from polythrottle.cli.cluster.alternatives import Replays
    from polythrottle.cli.cluster.plan_output import PlanAnswer
    from polythrottle.cluster.catalogue import Catalogue
    from polythrottle.cluster.plan.pareto_front import Aim, Limits, Plan
    from polythrottle.domain.fleet.transient_machine import Market

_MONEY = re.compile(r"\s*\$?\s*(\d+(?:\.\d*)?|\.\d+)\s*(?:usd)?\s*", re.IGNORECASE)
_DAYS = re.compile(r"\s*(\d+(?:\.\d*)?|\.\d+)\s*d\s*")
_LONGEST_S = 100 * 365.25 * 86400


@dataclass(frozen=True)
class LimitOptions(OptionGroup):
    """What a plan has to keep to, and how surely."""

    deadline: Annotated[
        str | None, typer.Option("--deadline", metavar="TIME", help="From the order to the last step: 12h, 3d.")
    ] = None
    budget: Annotated[str | None, typer.Option("--budget", metavar="USD", help="What it may cost at most: 20usd.")] = (
        None
    )
    chance: Annotated[str, typer.Option("--chance", metavar="P", help="How likely the limits are to be kept.")] = "95%"
    draws: Annotated[int, typer.Option("--draws", metavar="N", help="Simulated outcomes per option.")] = 200
    seed: Annotated[int, typer.Option("--seed", metavar="N", help="Of the draws.")] = 0

    def limits(self) -> "Limits":
        """Return the limits these words mean.

        Raises:
            InvalidInput: If one means none.
        """
        from polythrottle.cluster.plan.pareto_front import Limits

        sure = share("--chance", self.chance)
        if sure is None or not 0 < sure <= 1:
            raise InvalidInput(f"--chance {self.chance!r} is above 0 and at most 100%; write for example 95%")
        _at_least("--draws", self.draws, 10)
        check_seed(self.seed)
        return Limits(
            optional(partial(time_s, "--deadline"), self.deadline) or math.inf,
            math.inf if self.budget is None else money_usd("--budget", self.budget),
            sure,
        )


@dataclass(frozen=True)
class AimOptions(OptionGroup):
    """What is to be small, and in which markets."""

    minimise: Annotated[str, typer.Option("--minimise", metavar="WHAT", help="energy, cost or time.")] = "cost"
    market: Annotated[str | None, typer.Option("--market", metavar="NAME", help="Only spot, or only on-demand.")] = None

    def aim(self) -> "Aim":
        """Return what is to be small.

        Raises:
            InvalidInput: If there is no such aim.
        """
        from polythrottle.cluster.plan.pareto_front import Aim

        # As a tuple: before Python 3.12 an enumeration raises TypeError if it is asked for a plain text.
        if self.minimise not in tuple(Aim):
            raise InvalidInput(f"--minimise takes {', '.join(Aim)}, not {self.minimise[:40]!r}")
        return Aim(self.minimise)

    def markets(self) -> "tuple[Market, ...]":
        """Return the markets that may be used.

        Raises:
            InvalidInput: If there is no such market.
        """
        from polythrottle.domain.fleet.transient_machine import Market

        if self.market is None:
            return tuple(Market)
        if self.market not in tuple(Market):
            raise InvalidInput(f"--market takes {' or '.join(Market)}, not {self.market[:40]!r}")
        return (Market(self.market),)


@dataclass(frozen=True)
class PlanJobOptions(OptionGroup):
    """What belongs to a single job: its machines, what energy costs, what becomes of its plan."""

    most: Annotated[int | None, typer.Option("--most", metavar="N", help="The most machines.")] = None
    usd_per_kwh: Annotated[
        float | None,
        typer.Option("--usd-per-kwh", metavar="P", help="Price of energy beside the rent; the catalogue's by default."),
    ] = None
    task: Annotated[
        Path | None, typer.Option("--task", metavar="FILE", help="Write the plan as a SkyPilot task (.yaml).")
    ] = None
    command: Annotated[
        str, typer.Option("--command", metavar="CMD", help="What each machine of the task executes.")
    ] = "python train.py"
    figure: Annotated[
        Path | None, typer.Option("--figure", metavar="FILE", help="Draw the front, as .png, .svg or .pdf.")
    ] = None

    def check(self) -> None:
        """Check what can be checked before anything is read.

        Raises:
            InvalidInput: If a number is out of range, or the figure's ending no format.
            StorageError: If no figure can be written there, or the task would take the place of another file.
        """
        if self.most is not None:
            _at_least("--most", self.most, 1)
        if self.usd_per_kwh is not None and not 0 <= self.usd_per_kwh <= 1000:
            raise InvalidInput(f"--usd-per-kwh {self.usd_per_kwh:g} is not a price from 0 to 1000 US dollars")
        if self.figure is not None:
            from polythrottle.cli.render.figures import check_figure

            check_figure(self.figure)
        if self.task is not None:
            check_new(self.task, "--task")

    def read(self, file: Path) -> "Catalogue":
        """Return a catalogue, with the price of energy that was given.

        Raises:
            BadFile: If it is not valid.
        """
        from polythrottle.cluster.catalogue import read_catalogue

        catalogue = read_catalogue(file)
        if self.usd_per_kwh is None:
            return catalogue
        return replace(catalogue, work=replace(catalogue.work, usd_per_kwh=self.usd_per_kwh))


@dataclass(frozen=True)
class ReplayOptions(OptionGroup):
    """What is simulated beside a plan."""

    trace: Annotated[
        Path | None, typer.Option("--trace", metavar="FILE", help="Replay deadline rules on recorded spot machines.")
    ] = None
    mix: Annotated[
        list[str] | None,
        typer.Option("--mix", metavar="'1 A, 2 B'", help="Also simulate a mix of machine types; repeats."),
    ] = None
    moves: Annotated[bool, typer.Option("--moves", help="Replay moving between the zones of price tables.")] = False
    dwell: Annotated[str, typer.Option("--dwell", metavar="TIME", help="With --moves: stay at least so long.")] = "24h"
    waits: Annotated[
        Path | None, typer.Option("--waits", metavar="FILE", help="Recorded waits: when to ask for a successor.")
    ] = None


@spread
def plan(
    catalogue: Annotated[
        Path, typer.Argument(metavar="CATALOGUE", help="TOML file: the work, machines, prices, lifetimes, caps.")
    ],
    limiting: LimitOptions,
    aiming: AimOptions,
    job: PlanJobOptions,
    replaying: ReplayOptions,
    as_json: JsonOption = False,
) -> None:
    """Choose machines, market, power cap and checkpoint interval for a job, or share machines among several jobs."""
    from polythrottle.cluster.plan.job_shares import is_shared

    limits = limiting.limits()
    markets = aiming.markets()
    aim = aiming.aim()
    job.check()
    if is_shared(catalogue):
        if any(group.given() for group in (limiting, job, replaying)):
            raise InvalidInput(
                f"{catalogue} holds several jobs, which take --minimise and --market only: each has its own"
                " deadline_h, and machines their most"
            )
        _share(catalogue, markets, aim, as_json)
        return
    if replaying.trace is not None and limiting.deadline is None:
        raise InvalidInput("--trace needs a --deadline: without one there is nothing to be late for")
    read = job.read(catalogue)
    from polythrottle.cli.cluster.alternatives import mixes

    made = _planned(read, job, markets, limits, aim, limiting)
    mixed = mixes(read, replaying.mix or (), limiting.draws, limiting.seed)
    _tell((read, made, aim, _replayed(read, made, replaying), mixed), job, as_json)


def _planned(
    read: "Catalogue",
    job: PlanJobOptions,
    markets: "tuple[Market, ...]",
    limits: "Limits",
    aim: "Aim",
    limiting: LimitOptions,
) -> "Plan":
    from polythrottle.api.progress import LiveSweep
    from polythrottle.cluster.plan.pareto_front import every_option
    from polythrottle.cluster.plan.pareto_front import plan as find

    with LiveSweep("comparing options") as live:
        options = every_option(read.work, read.offers, markets, job.most, aim, live.counted)
    with LiveSweep("drawing outcomes") as live:
        return find(options, limits, aim, limiting.seed, limiting.draws, live.counted)


def _replayed(read: "Catalogue", made: "Plan", replaying: ReplayOptions) -> "Replays":
    from polythrottle.cli.cluster.alternatives import replays

    dwell_s: float | None = time_s("--dwell", replaying.dwell)  # what it says is checked even where it does not count
    if not replaying.moves:
        dwell_s = None
    return replays(read, made, replaying.trace, dwell_s, replaying.waits)


def _tell(told: "PlanAnswer", job: PlanJobOptions, as_json: bool) -> None:
    """Print a plan with what was simulated beside it, draw it, and write its task."""
    from polythrottle.cli.cluster.plan_output import draw, plan_document, print_plan
    from polythrottle.cluster.rented_machines import task_text
    from polythrottle.storage.atomic_file import replace_file

    made = told[1]
    if job.task is None or made.chosen is None:
        text = None
    else:
        text = task_text(made.chosen.option, job.command)
    answer(told, as_json, print_plan, plan_document)
    if job.figure is not None:
        draw(told, job.figure)
    # After the answer, which shows the nearest plan and by what it misses.
    if made.chosen is None:
        raise SloUnmet(made.missed())
    if job.task is not None and text is not None:
        replace_file(job.task, text.encode())
        typer.echo(f"task  {job.task}", err=True)


def _share(catalogue: Path, markets: "tuple[Market, ...]", aim: "Aim", as_json: bool) -> None:
    """Share the machines of a catalogue among its jobs, and say which of them fall short."""
    from polythrottle.cli.cluster.plan_output import missed, print_shares, shares_document
    from polythrottle.cluster.plan.job_shares import Aim as For
    from polythrottle.cluster.plan.job_shares import read_shared
    from polythrottle.cluster.plan.job_shares import share as share_out

    read = read_shared(catalogue, markets[0] if len(markets) == 1 else None)
    shares = share_out(read.jobs, read.kinds, For.FAIR if aim == "time" else For(aim))
    answer((read, shares, aim), as_json, print_shares, shares_document)
    if not shares.feasible:
        raise SloUnmet(missed(read.jobs, shares))


def time_s(option: str, text: str) -> float:
    """Return the seconds a text such as ``12h``, ``90min`` or ``3d`` means.

    Raises:
        InvalidInput: If it means no time above zero, or more than a century.
    """
    from polythrottle.domain.units import parse_quantity

    days = _DAYS.fullmatch(text)
    try:
        if days:
            seconds = float(days[1]) * 86400
        else:
            seconds = parse_quantity(text, "s")
    except InvalidInput:
        seconds = 0.0
    if not 0 < seconds < math.inf:
        raise InvalidInput(f"{option} {text[:40]!r} is not a time above 0 in s, min, h or d; write for example 12h")
    if seconds > _LONGEST_S:
        raise InvalidInput(f"{option} {text[:40]!r} is longer than a century; leave it out where there is no limit")
    return seconds


def money_usd(option: str, text: str) -> float:
    """Return the dollars a text such as ``20usd``, ``$20`` or ``20`` means.

    Raises:
        InvalidInput: If it means no amount above zero.
    """
    matched = _MONEY.fullmatch(text)
    if matched is None or not 0 < float(matched[1]) < math.inf:
        raise InvalidInput(f"{option} {text[:40]!r} is not an amount above 0 in US dollars; write for example 20usd")
    return float(matched[1])


def _at_least(option: str, value: int, least: int) -> None:
    if not least <= value <= 100_000:
        raise InvalidInput(f"{option} {value} is not a number from {least} to 100,000")
