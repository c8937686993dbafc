"""A plan as a table for people and as a document for programs."""

import math
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

from polythrottle.cli.cluster_mixed import mixed_document, mixed_lines
from polythrottle.cli.cluster_replayed import Replays, replay_document, replay_lines
from polythrottle.cli.grids import amount, several

if TYPE_CHECKING:
    from polythrottle.cluster.catalogue import Catalogue
    from polythrottle.cluster.plan.front import Aim, Plan, Planned
    from polythrottle.cluster.plan.mixing import Mixed
    from polythrottle.cluster.plan.offer import Option

_SHOWN, _ALIKE = 14, 1.005
Told: TypeAlias = "tuple[Catalogue, Plan, Aim, Replays, tuple[Mixed, ...]]"
"""A catalogue, its plan, what was to be small, replays, and mixes of machine types."""


def printed(found: Told) -> None:
    """Print the front and what is recommended in at most 80 columns."""
    from rich.console import Console

    from polythrottle.cli.texts import named_lines

    catalogue, plan, aim, extras, mixed = found
    console = Console(highlight=False, markup=False, width=min(80, Console().width))
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
        table.add_row(*_row(each, marks.get(id(each), "")))
    return table


def _marks(plan: "Plan") -> dict[int, str]:
    """Return the marks of those that are best at something, by identity."""
    found: dict[int, str] = {}
    for part, mark in ((plan.chosen or plan.nearest, "~" if plan.chosen is None else "*"), *_ends(plan)):
        found[id(part)] = found.get(id(part), "") + mark
    return found


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
    alike = time_s <= _ALIKE * theirs[0] and energy_j <= _ALIKE * theirs[2] and one.chance >= other.chance
    return alike and usd * _ALIKE < theirs[1]


def _spread(options: "list[Planned]") -> "list[Planned]":
    """Return at most a screenful of a list, evenly spread over it."""
    step = max(1, math.ceil(len(options) / _SHOWN))
    return options[::step]


def _row(each: "Planned", mark: str) -> tuple[str, ...]:
    option = each.option
    cap_w, every_s = option.choice.cap.limit_w, option.choice.interval_s
    return (
        mark,
        f"{option.machines} × {option.offer.machine.name}",
        str(option.market),
        "none" if cap_w is None else f"{cap_w:g} W",
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
    return f"{seconds / 3600:.0f} h" if seconds < 360_000 else f"{amount(seconds / 86400)} d"


def _lines(plan: "Plan", aim: "Aim") -> Iterator[tuple[str, Any]]:
    from polythrottle.cluster.plan.stragglers import spot_or_not

    marked = plan.chosen or plan.nearest
    option = marked.option
    if plan.chosen is None:
        yield "infeasible", plan.missed()
    yield ("plan, *" if plan.chosen else "nearest, ~"), f"{_row(marked, '')[1]}, {option.market}; least {aim}"
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
    count, losses = len(marked.outlook.outcomes), marked.outlook.mean("losses")
    if marked.time_s == math.inf:
        kept = marked.outlook.chance()
        return f"only {kept:.0%} of {count} simulated outcomes end; machines lost, mean: {amount(losses)}"
    share = f"{marked.limits.chance:.0%} of {count} simulated outcomes"
    return f"{share} stay within {ends}; machines lost, mean: {amount(losses)}"


def _capped(option: "Option") -> Iterator[str]:
    """Yield what the cap does, against the default cap of the same machines."""
    from polythrottle.cluster.plan.offer import options

    plain = options(option.work, option.offer, option.market, option.machines)[0]
    if plain.choice.cap == option.choice.cap:
        return
    saved, longer = 1 - option.spent.energy_j / plain.spent.energy_j, option.time_s / plain.time_s - 1
    limit_w, default_w = option.choice.cap.limit_w, plain.choice.cap.limit_w
    default = "the default" if default_w is None else f"{default_w:g} W"
    yield f"{limit_w:g} W instead of {default}: {saved:.1%} fewer joules, {longer:.1%} longer, estimated"


def document(found: Told) -> dict[str, Any]:
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
        "chosen": None if plan.chosen is None else _planned(plan.chosen),
        "nearest": _planned(plan.nearest),
        "front": [_planned(each) for each in plan.front],
        "options_considered": plan.considered,
        **replay_document(extras),
        **mixed_document(mixed),
    }


def draw(found: Told, path: Path) -> None:
    """Draw the front of a plan.

    Raises:
        StorageError: If the file cannot be written.
    """
    from polythrottle.report.front import Way, write_front

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
    deadline_h = None if deadline_s is None else deadline_s / 3600
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


def finite(value: float) -> float | None:
    """Return a number, or None where it has no end."""
    return value if math.isfinite(value) else None
