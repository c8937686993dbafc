"""What stands beside a plan: mixes of machine types, and what rules would have done on recorded machines and prices."""

import re
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from polythrottle.cli.output import amount, optional, several
from polythrottle.domain.errors import InvalidInput, UnknownName
from polythrottle.storage.json_channel import finite

if TYPE_CHECKING:
    from polythrottle.cluster.catalogue import Catalogue
    from polythrottle.cluster.plan.deadline import Availability, RentalPolicy
    from polythrottle.cluster.plan.options import Mixed, Option, Part
    from polythrottle.cluster.plan.pareto_front import Plan
    from polythrottle.cluster.plan.spot_market import Journey
    from polythrottle.cluster.predict.completion import DrawnSpread

# Mixes of machine types beside a plan: words into machines, what comes of them as lines and as a document.

_PART = re.compile(r"\s*(\d{1,4})\s*[x×*]?\s+(.+?)(?:@(spot|on-demand))?\s*")
_SHOWN_J = 3.6e6


def mixes(catalogue: "Catalogue", texts: Sequence[str], draws: int, seed: int) -> "tuple[Mixed, ...]":
    """Return what mixes such as ``1 v100, 2 k80@on-demand`` come to.

    Args:
        catalogue: The job and the machines.
        texts: The mixes; a market that is not named is spot where there is a spot price.
        draws: Outcomes of each at most.
        seed: Of the draws.

    Raises:
        InvalidInput: If a text is no mix, or asks for more than there is.
        UnknownName: If the catalogue has no such machine.
    """
    from polythrottle.cluster.plan.options import mix

    asked = [[_part(catalogue, text) for text in whole.split(",")] for whole in texts]
    return tuple(mix(catalogue.work, catalogue.offers, parts, draws, seed) for parts in asked)


def _part(catalogue: "Catalogue", text: str) -> "Part":
    from polythrottle.cluster.plan.options import Part
    from polythrottle.domain.fleet.transient_machine import Market

    matched = _PART.fullmatch(text)
    if matched is None:
        raise InvalidInput(f"--mix {text.strip()[:60]!r} is no part of a mix; write for example '1 v100, 2 k80'")
    by_name = {offer.machine.name: offer for offer in catalogue.offers}
    if (name := matched[2]) not in by_name:
        raise UnknownName("machine", name, by_name)
    market = Market.ON_DEMAND
    if matched[3]:
        market = Market(matched[3])
    elif Market.SPOT in by_name[name].machine.usd_per_h:
        market = Market.SPOT
    return Part(by_name[name], market, int(matched[1]))


def mixed_lines(found: "Sequence[Mixed]") -> Iterator[tuple[str, str]]:
    """Yield the lines of mixes, each with its name."""
    for each in found:
        yield "mix", f"{_named(each)}: {_ends(each)}"


def _named(each: "Mixed") -> str:
    return " + ".join(f"{part.machines} × {part.offer.machine.name} {part.market}" for part in each.parts)


def _ends(each: "Mixed") -> str:
    ends = each.ends
    if ends.time_s is None or ends.usd is None or ends.energy_j is None:
        return "never ends, simulated"
    lost = ""
    if ends.finished != 1:
        lost = f"; {ends.finished:.0%} of the outcomes end"
    return (
        f"{amount(ends.time_s.mean / 3600)} h, {amount(ends.usd.mean)} usd, {amount(ends.energy_j.mean / _SHOWN_J)} kWh"
        f" (95% within {amount(ends.time_s.high / 3600)} h and {amount(ends.usd.high)} usd), simulated at default"
        f" caps; {amount(each.steps_per_s)} steps/s together, predicted{lost}"
    )


def mixed_document(found: "Sequence[Mixed]") -> dict[str, Any]:
    """Return the part of a document that mixes add."""
    if found:
        return {"mixes": [_record(each) for each in found]}
    return {}


def _record(each: "Mixed") -> dict[str, Any]:

    ends = each.ends
    names = ("time_s", "usd", "energy_j", "losses")
    spreads = {name: _spread(getattr(ends, name)) for name in names}
    return {
        "machines": [
            {"machine": part.offer.machine.name, "market": str(part.market), "machines": part.machines}
            for part in each.parts
        ],
        "kind": "simulated",
        "steps_per_s_predicted": each.steps_per_s,
        "interval_s": finite(each.interval_s),
        **spreads,
        "finished": ends.finished,
        "reason": None if ends.time_s is not None else "no outcome ended",
    }


def _spread(spread: "DrawnSpread | None") -> dict[str, float] | None:
    if spread is None:
        return None
    return {"mean": spread.mean, "p5": spread.low, "p95": spread.high}


# What rules would have done on recorded machines and prices, as lines for people and as parts of a document.

_BEGINNINGS = 24
_LONGEST_S = 366 * 86400.0
_MOST_CHANGES = 100_000


@dataclass(frozen=True)
class Rule:
    """What one deadline rule did from several beginnings on a record, means.

    Attributes:
        name: Of the rule.
        usd: Mean cost.
        energy_j: Mean joules of what was rented.
        on_demand: Mean share of the paid time that was on demand.
        met: Share of beginnings from which the deadline was met.
    """

    name: str
    usd: float
    energy_j: float
    on_demand: float
    met: float


@dataclass(frozen=True)
class Replays:
    """Replays asked for beside a plan.

    Attributes:
        rules: What the deadline rules did, the one recommended first; the last is on-demand throughout.
        available: Share of the record's time with enough machines, None without a record.
        moved: How the job went moving between places.
        stayed: How it went staying in its first.
        usd_per_kwh: The price of energy they were compared at.
        succession: When to ask for the successor of a machine whose end is known, None where it was not asked.
        unruled: Why no deadline rule was replayed though it was asked for; empty otherwise.
    """

    rules: tuple[Rule, ...] = ()
    available: float | None = None
    moved: "Journey | None" = None
    stayed: "Journey | None" = None
    usd_per_kwh: float = 0.0
    succession: "Succession | None" = None
    unruled: str = ""


@dataclass(frozen=True)
class Succession:
    """When to ask for the successor of a machine whose end is known: a provider's limit, a wall time, a notice.

    Attributes:
        lead_s: How long before its end, in seconds.
        mean_s: Mean wait of those recorded, in seconds.
        count: How many were recorded.
        usd: What asking then is expected to cost in overlap and interruption.
        mean_usd: What asking at the mean wait would.
    """

    lead_s: float
    mean_s: float
    count: int
    usd: float
    mean_usd: float


def replays(
    catalogue: "Catalogue", plan: "Plan", trace: Path | None, dwell_s: float | None, waits: Path | None = None
) -> Replays:
    """Return what was asked for.

    Args:
        catalogue: What is on offer.
        plan: The plan; its chosen option, or the nearest, is replayed.
        trace: A record of spot machines for the deadline rules, or None.
        dwell_s: How long moving between places stays at least in one, in seconds; None for no such replay.
        waits: A table of waits for a machine, or None.

    Raises:
        BadFile: If the record is not valid.
        InvalidInput: If the job cannot be replayed: no price on both markets, no price table.
    """
    option = (plan.chosen or plan.nearest).option
    usd_per_kwh = catalogue.work.usd_per_kwh
    found = Replays(usd_per_kwh=usd_per_kwh, succession=optional(partial(_succession, option), waits))
    if trace is not None:
        found = _ruled(found, option, plan.nearest.limits.deadline_s, trace)
    if dwell_s is None:
        return found
    moved, stayed = _journeys(catalogue, option, usd_per_kwh, dwell_s)
    return replace(found, moved=moved, stayed=stayed)


def _succession(option: "Option", path: Path) -> Succession:
    from polythrottle.training.elastic.nodes.rented_nodes import expected_usd, lead_s, read_waits, stakes_of

    waits = read_waits(path, option.offer.machine.gpu)
    if not option.usd_per_h:
        raise InvalidInput(
            f"--waits needs a price of {option.offer.machine.name} above 0: it weighs early against late"
        )
    # A place that stands empty loses the progress its rent would have bought; the others go on.
    stakes = stakes_of(option.usd_per_h, option.offer.machine.idle_w, option.work.usd_per_kwh)
    ahead_s = lead_s(waits, stakes)
    costs = (expected_usd(at_s, waits, stakes) for at_s in (ahead_s, waits.mean_s))
    return Succession(ahead_s, waits.mean_s, len(waits.times_s), *costs)


def _ruled(found: Replays, option: "Option", deadline_s: float, trace: Path) -> Replays:
    """Return replays with those of the deadline rules, or with why there are none."""
    from polythrottle.cluster.plan.deadline import read_availability
    from polythrottle.domain.fleet.transient_machine import Market

    if set(option.offer.machine.usd_per_h) != set(Market):
        raise InvalidInput(f"--trace needs a spot and an on-demand price of {option.offer.machine.name}")
    record = read_availability(trace, option.machines)
    work_s = option.work.steps * option.offer.together_s(option.machines) * option.choice.cap.slowdown
    needed_s = work_s + option.offer.startup_s
    if deadline_s < needed_s:
        why = f"its work and a start take {needed_s / 3600:.4g} h, the deadline is {deadline_s / 3600:.4g} h"
    elif deadline_s > _LONGEST_S:
        why = f"a deadline of at most {_LONGEST_S / 86400:g} days can be replayed, not {deadline_s / 86400:.4g}"
    elif len(record.times_s) * deadline_s / record.ends_s > _MOST_CHANGES:
        why = f"the record changes every {record.ends_s / len(record.times_s):.3g} s, too often for so long a deadline"
    else:
        return replace(found, rules=_rules(option, deadline_s, work_s, record), available=record.share)
    return replace(found, available=record.share, unruled=why)


def _rules(option: "Option", deadline_s: float, work_s: float, record: "Availability") -> tuple[Rule, ...]:
    from polythrottle.api.progress import LiveSweep
    from polythrottle.cluster.plan.deadline import greedy, policy_for, replay, uniform_progress
    from polythrottle.domain.fleet.transient_machine import Market

    prices = dict(option.offer.machine.usd_per_h)
    delay_s = option.offer.startup_s
    # All over the record, for what one beginning meets is luck.
    begins = [record.ends_s * index / _BEGINNINGS for index in range(_BEGINNINGS)]

    def tried(name: str, policy: "RentalPolicy", before: int) -> Rule:
        done = []
        for index, begin_s in enumerate(begins, 1):
            done.append(replay(policy, record, work_s, deadline_s, delay_s, begin_s))
            live.counted(before * _BEGINNINGS + index, 3 * _BEGINNINGS)
        held_s = sum(sum(each.held_s.values()) for each in done)
        return Rule(
            name,
            sum(each.usd(prices) for each in done) * option.machines / len(done),
            sum(each.energy_j(option.choice.cap.power_w) for each in done) * option.machines / len(done),
            sum(each.held_s[Market.ON_DEMAND] for each in done) / held_s,
            sum(each.met for each in done) / len(done),
        )

    known: dict[str, RentalPolicy] = {"uniform progress": uniform_progress, "greedy": greedy}
    best = policy_for(work_s, deadline_s, record.share)
    ordered = sorted(known.items(), key=lambda each: each[1] is not best)
    with LiveSweep("replaying deadline rules") as live:
        every = [*ordered, ("on-demand", lambda seen: Market.ON_DEMAND)]
        return tuple(tried(name, policy, before) for before, (name, policy) in enumerate(every))


def _journeys(
    catalogue: "Catalogue", option: "Option", usd_per_kwh: float, dwell_s: float
) -> "tuple[Journey, Journey]":
    from polythrottle.cluster.plan.spot_market import Moving, stay, travel

    places = catalogue.places(option.machines)
    if not places:
        raise InvalidInput("--moves needs a catalogue whose spot prices are tables: usd_per_h.spot = { table = … }")
    # From when on every place has a price; before that a comparison would favour those on record.
    begin_s = max(place.history.times_s[0] for place in places)
    moving = Moving(usd_per_kwh, move_s=option.offer.startup_s, dwell_s=dwell_s)
    return travel(places, option.work.steps, begin_s, moving), stay(places, option.work.steps, begin_s, moving)


def replay_lines(found: Replays) -> Iterator[tuple[str, str]]:
    """Yield the lines of replays, each with its name."""
    if found.rules:
        names = ", ".join(f"{rule.name} {rule.usd:.4g} usd ({rule.on_demand:.0%} on demand)" for rule in found.rules)
        late = [f"{rule.name} misses the deadline in {1 - rule.met:.0%}" for rule in found.rules if rule.met < 1]
        yield "deadline", f"simulated on the trace, enough spot {found.available:.0%} of the time: {names}"
        yield "", f"rule: {found.rules[0].name}; {'; '.join(late) or 'the deadline is always met'}"
    if found.unruled:
        yield "deadline", f"no rule was replayed: {found.unruled}"
    if found.moved is not None and found.stayed is not None:
        yield "moves", _moves_line(found.moved, found.stayed, found.usd_per_kwh)
    if found.succession is not None:
        yield "successor", _successor_line(found.succession)


def _moves_line(moved: "Journey", stayed: "Journey", usd_per_kwh: float) -> str:
    moved_usd = moved.cost_usd(usd_per_kwh)
    stayed_usd = stayed.cost_usd(usd_per_kwh)
    saved = "nothing to save"
    if stayed_usd:
        saved = f"{1 - moved_usd / stayed_usd:+.2%} saved"
    ends = ""
    if moved.done != stayed.done:
        ends = "; the record ends before the work does"
    return (
        f"{moved_usd:.4g} usd with {several(moved.moves, 'move')} against {stayed_usd:.4g} usd staying: {saved},"
        f" simulated on recorded prices{ends}"
    )


def _successor_line(found: Succession) -> str:
    mean = f"{found.mean_usd:.3g} at the mean of {found.count} recorded waits, {found.mean_s:.4g} s"
    return (
        f"ask {found.lead_s:.4g} s before a machine's known end (limit, wall time, notice):"
        f" {found.usd:.3g} usd of overlap and gap each time, {mean}; estimated"
    )


def replay_document(found: Replays) -> dict[str, Any]:
    """Return the parts of a document that replays add."""
    parts: dict[str, Any] = {}
    if found.succession is not None:
        parts["successor"] = {**asdict(found.succession), "kind": "estimated"}
    if found.unruled:
        parts["deadline_rules"] = None
        parts["deadline_rules_reason"] = found.unruled
    if found.rules:
        parts["deadline_rules"] = _rules_document(found)
    if found.moved is not None and found.stayed is not None:
        parts["moves"] = {
            "kind": "simulated",
            "usd_per_kwh": found.usd_per_kwh,
            "moved": _journey_document(found.moved),
            "stayed": _journey_document(found.stayed),
        }
    return parts


def _rules_document(found: Replays) -> dict[str, Any]:
    return {
        "kind": "simulated",
        "available": found.available,
        "recommended": found.rules[0].name,
        "rules": [
            {
                "rule": rule.name,
                "cost_usd": rule.usd,
                "energy_j": rule.energy_j,
                "on_demand_share": rule.on_demand,
                "met_share": rule.met,
            }
            for rule in found.rules
        ],
    }


def _journey_document(journey: "Journey") -> dict[str, Any]:
    return {
        "cost_usd": journey.usd,
        "energy_j": journey.energy_j,
        "time_s": journey.time_s,
        "moves": journey.moves,
        "places": journey.places,
        "steps": journey.done,
    }
