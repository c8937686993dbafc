"""A plan, or shares of machines, as a table for people and as a document for programs."""

import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

from polythrottle.cli.cluster.alternatives import Replays, mixed_document, mixed_lines, replay_document, replay_lines
from polythrottle.cli.output import amount, formatted, optional, several
from polythrottle.storage.json_channel import finite

if TYPE_CHECKING:
    from polythrottle.cluster.catalogue import Catalogue
    from polythrottle.cluster.plan.job_shares import SharedCatalogue, Shares, SharingJob
    from polythrottle.cluster.plan.options import Mixed, Option
    from polythrottle.cluster.plan.pareto_front import Aim, Plan, Planned

# A plan as a table for people and as a document for programs.

_SHOWN = 14
_ALIKE = 1.005
PlanAnswer: TypeAlias = "tuple[Catalogue, Plan, Aim, Replays, tuple[Mixed, ...]]"
"""A catalogue, its plan, what was to be small, replays, and mixes of machine types."""


def print_plan(found: PlanAnswer) -> None:
    """Print the front and what is recommended in at most 80 columns."""
    from polythrottle.cli.render.console import narrow_console
    from polythrottle.cli.render.text import named_lines

    catalogue, plan, aim, extras, mixed = found
    console = narrow_console()
    console.print(catalogue.work.name, style="bold")
    console.print(_table(plan))
    console.print(named_lines([*_lines(plan, aim), *replay_lines(extras), *mixed_lines(mixed)]))


def _table(plan: "Plan") -> Any:
    from rich.table import Table

    table = Table(box=None, pad_edge=False, padding=(0, 1, 0, 0), collapse_padding=True)
    table.add_column("", no_wrap=True)
    table.add_column("machines", overflow="fold")
    for name in ("market", "cap", "interval", "hours", "usd", "kWh", "chance"):
        table.add_column(name, justify="right", no_wrap=True)
    marks = _marks(plan)
    for each in _some(plan):
        table.add_row(*_plan_row(each, marks.get(id(each), "")))
    return table


def _marks(plan: "Plan") -> dict[int, str]:
    """Return the marks of those that are best at something, by identity."""
    marks: dict[int, str] = {}
    for part, mark in ((plan.chosen or plan.nearest, "~" if plan.chosen is None else "*"), *_ends(plan)):
        marks[id(part)] = marks.get(id(part), "") + mark
    return marks


def _ends(plan: "Plan") -> "list[tuple[Planned, str]]":
    """Return the ends of the front: on the mean soonest, cheapest and of fewest joules, each with its mark."""
    return [(min(plan.front, key=lambda each: each.option.aims[part]), mark) for part, mark in enumerate("t$J")]


def _some(plan: "Plan") -> "list[Planned]":
    """Return the options to show: those that keep the limits first, and what they are compared with."""
    ends = [plan.chosen or plan.nearest, *(each for each, _ in _ends(plan)), plan.fastest, plan.cheapest]
    worth = [each for each in plan.front if not any(_beats(other, each) for other in plan.front)]
    able = [each for each in worth if each.feasible]
    rest = sorted((each for each in worth if not each.feasible), key=lambda each: each.excess)
    chosen = {id(each): each for each in [*ends, *_spread(able), *_spread(rest)][:_SHOWN]}
    return [each for each in plan.front if id(each) in chosen]


def _beats(one: "Planned", other: "Planned") -> bool:
    """Return whether one is cheaper and as good as another but for what nobody would pay for, as on demand often is."""
    (time_s, usd, energy_j), theirs = one.option.aims, other.option.aims
    # Half a per cent: differences that the estimate itself does not know.
    alike = time_s <= _ALIKE * theirs[0] and energy_j <= _ALIKE * theirs[2] and one.chance >= other.chance
    return alike and usd * _ALIKE < theirs[1]


def _spread(options: "list[Planned]") -> "list[Planned]":
    """Return at most a screenful of a list, evenly spread over it."""
    step = max(1, math.ceil(len(options) / _SHOWN))
    return options[::step]


def _plan_row(each: "Planned", mark: str) -> tuple[str, ...]:
    option = each.option
    cap_w = option.choice.cap.limit_w
    every_s = option.choice.interval_s
    return (
        mark,
        f"{option.machines} × {option.offer.machine.name}",
        str(option.market),
        formatted(cap_w, "{:g} W", "none"),
        "none" if every_s == math.inf else _span(every_s),
        amount(option.time_s / 3600),
        amount(option.spent.usd),
        amount(option.spent.energy_j / 3.6e6),
        f"{each.chance:.0%}",
    )


def _span(seconds: float) -> str:
    if seconds < 10:
        return f"{seconds:.2g} s"
    if seconds < 600:
        return f"{seconds:.0f} s"
    if seconds < 36_000:
        return f"{seconds / 60:.0f} min"
    if seconds < 360_000:
        return f"{seconds / 3600:.0f} h"
    return f"{amount(seconds / 86400)} d"


def _lines(plan: "Plan", aim: "Aim") -> Iterator[tuple[str, Any]]:
    from polythrottle.cluster.plan.spot_market import spot_or_not

    marked = plan.chosen or plan.nearest
    option = marked.option
    if plan.chosen is None:
        yield "infeasible", plan.missed()
    yield ("plan, *" if plan.chosen else "nearest, ~"), f"{_plan_row(marked, '')[1]}, {option.market}; least {aim}"
    yield "outlook", _outlook(marked)
    yield from (("cap", line) for line in _capped(option))
    yield from (("spot", line) for line in spot_or_not(option))
    known = option.offer.known
    yield "known", ", ".join(f"{name}: {how}" for name, how in known.items())
    yield (
        "hours, usd, kWh",
        "estimated means; t soonest, $ cheapest, J fewest joules; "
        + (f"{several(plan.considered, 'option')}, {len(plan.front):,} on the front looked at"),
    )


def _outlook(marked: "Planned") -> str:
    ends = f"{amount(marked.time_s / 3600)} h and {amount(marked.usd)} usd"
    if len(marked.outlook.outcomes) == 1:
        return f"{ends}; nothing here is left to chance: no machine is ever taken away"
    count = len(marked.outlook.outcomes)
    losses = marked.outlook.mean("losses")
    if marked.time_s == math.inf:
        kept = marked.outlook.chance()
        return f"only {kept:.0%} of {count} simulated outcomes end; machines lost, mean: {amount(losses)}"
    share = f"{marked.limits.chance:.0%} of {count} simulated outcomes"
    return f"{share} stay within {ends}; machines lost, mean: {amount(losses)}"


def _capped(option: "Option") -> Iterator[str]:
    """Yield what the cap does, against the default cap of the same machines."""
    from polythrottle.cluster.plan.options import options

    plain = options(option.work, option.offer, option.market, option.machines)[0]
    if plain.choice.cap == option.choice.cap:
        return
    saved = 1 - option.spent.energy_j / plain.spent.energy_j
    longer = option.time_s / plain.time_s - 1
    limit_w = option.choice.cap.limit_w
    default_w = plain.choice.cap.limit_w
    default = formatted(default_w, "{:g} W", "the default")
    yield f"{limit_w:g} W instead of {default}: {saved:.1%} fewer joules, {longer:.1%} longer, estimated"


def plan_document(found: PlanAnswer) -> dict[str, Any]:
    """Return the plan as a document; what has no end or no limit is null."""
    catalogue, plan, aim, extras, mixed = found
    marked = plan.nearest
    return {
        "work": catalogue.work.name,
        "steps": catalogue.work.steps,
        "minimise": str(aim),
        "deadline_s": finite(marked.limits.deadline_s),
        "budget_usd": finite(marked.limits.budget_usd),
        "chance_wanted": marked.limits.chance,
        "feasible": plan.chosen is not None,
        "reason": plan.missed() or None,
        "chosen": optional(_planned, plan.chosen),
        "nearest": _planned(plan.nearest),
        "front": [_planned(each) for each in plan.front],
        "options_considered": plan.considered,
        **replay_document(extras),
        **mixed_document(mixed),
    }


def draw(found: PlanAnswer, path: Path) -> None:
    """Draw the front of a plan.

    Raises:
        StorageError: If the file cannot be written.
    """
    from polythrottle.cli.render.figures import Way, write_front

    catalogue, plan = found[:2]
    ways = [
        Way(
            each.option.offer.machine.name,
            str(each.option.market),
            each.option.time_s / 3600,
            each.option.spent.usd,
            each.option.spent.energy_j / 3.6e6,
            each.feasible,
            each is plan.chosen,
        )
        for each in plan.front
    ]
    limits = plan.nearest.limits
    deadline_s = finite(limits.deadline_s)
    deadline_h = optional(_hours, deadline_s)
    write_front(ways, path, deadline_h, finite(limits.budget_usd), catalogue.work.name)


def _planned(each: "Planned") -> dict[str, Any]:
    option = each.option
    return {
        "machine": option.offer.machine.name,
        "gpu": option.offer.machine.gpu,
        "market": str(option.market),
        "machines": option.machines,
        "cap_w": option.choice.cap.limit_w,
        "interval_s": finite(option.choice.interval_s),
        "usd_per_h": option.usd_per_h,
        "expected": {
            "time_s": finite(option.time_s),
            "cost_usd": finite(option.spent.usd),
            "energy_j": finite(option.spent.energy_j),
            "kind": "estimated",
        },
        "outlook": {
            "draws": len(each.outlook.outcomes),
            "time_s": finite(each.time_s),
            "cost_usd": finite(each.usd),
            "energy_j": finite(each.outlook.quantile("energy_j", each.limits.chance)),
            "losses": finite(each.outlook.mean("losses")),
            "chance": each.chance,
            "kind": "simulated",
            "reason": _endless(each),
        },
        "per_step": {
            str(use): {"energy_j": spent.energy_j, "usd": spent.usd} for use, spent in option.choice.parts.items()
        },
        "known": dict(option.offer.known),
    }


def _endless(each: "Planned") -> str | None:
    """Return why there is no time, cost and energy within which the job ends as surely as asked for."""
    if each.time_s < math.inf:
        return None
    return f"only {each.outlook.chance():.0%} of the simulated outcomes end"


# Shares of machines as a table for people and as a document for programs.

_NOUNS = {"time": "the fairest shares of time", "cost": "fewest dollars", "energy": "fewest joules"}


def print_shares(found: "tuple[SharedCatalogue, Shares, Aim]") -> None:
    """Print who gets what in at most 80 columns."""
    from rich.table import Table

    from polythrottle.cli.render.console import Unpadded, plain_console
    from polythrottle.cli.render.text import named_lines

    catalogue, shares, aim = found
    console = plain_console()
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    table.add_column("job", overflow="fold")
    for name in ("steps/s", "done in", "deadline"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("shares of time", overflow="fold")
    for job in catalogue.jobs:
        table.add_row(*_share_row(job, shares))

    console.print(Unpadded(table))
    lines = [
        ("chosen", f"for {_NOUNS[str(aim)]}; estimated from the speeds given"),
        ("rates", f"{shares.usd_per_h:.4g} usd/h and {shares.power_w:.4g} W on average, of machines in use"),
    ]
    if shares.short:
        lines.append(("infeasible", missed(catalogue.jobs, shares)))
    console.print(named_lines(lines))


def _share_row(job: "SharingJob", shares: "Shares") -> tuple[str, ...]:
    takes_s = _takes_s(job, shares)
    parts = [
        f"{share:.0%} {kind}{formatted(limit_w, ' at {:g} W')}"
        for (kind, limit_w), share in shares.time[job.name].items()
    ]
    return (
        job.name,
        f"{shares.steps_per_s[job.name]:.4g}",
        formatted(optional(_hours, takes_s), "{:.4g} h", "never"),
        formatted(optional(_hours, job.deadline_s), "{:.4g} h", "none"),
        ", ".join(parts) or "none",
    )


def _takes_s(job: "SharingJob", shares: "Shares") -> float | None:
    """Return how long a job takes; None if it gets no machine."""
    speed = shares.steps_per_s[job.name]
    if speed > 0:
        return job.steps / speed
    return None


def _hours(time_s: float) -> float:
    return time_s / 3600


def missed(jobs: "Sequence[SharingJob]", shares: "Shares") -> str:
    """Return which jobs fall short of their deadlines and by how much, as a sentence."""
    late = {job.name: job.deadline_s for job in jobs if job.deadline_s is not None}
    parts = [f"{name} by {short:.1%} of its steps in {late[name] / 3600:.4g} h" for name, short in shares.short.items()]
    return f"not every job can meet its deadline; short at least: {', '.join(parts)}"


def shares_document(found: "tuple[SharedCatalogue, Shares, Aim]") -> dict[str, Any]:
    """Return the shares as a document."""
    catalogue, shares, aim = found
    return {
        "minimise": str(aim),
        "feasible": shares.feasible,
        "kind": "estimated",
        "usd_per_h": shares.usd_per_h,
        "power_w": shares.power_w,
        "jobs": [
            {
                "job": job.name,
                "steps_per_s": shares.steps_per_s[job.name],
                "time_s": _takes_s(job, shares),
                "deadline_s": job.deadline_s,
                "short": shares.short.get(job.name, 0.0),
                "shares": [
                    {"machine": kind, "cap_w": limit_w, "share": share}
                    for (kind, limit_w), share in shares.time[job.name].items()
                ],
            }
            for job in catalogue.jobs
        ],
    }
