"""Mixes of machine types beside a plan: words into machines, what comes of them as lines and as a document."""

import re
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from polythrottle.cli.grids import amount
from polythrottle.errors import InvalidInput, UnknownName

if TYPE_CHECKING:
    from polythrottle.cluster.catalogue import Catalogue
    from polythrottle.cluster.plan.mixing import Mixed, Part
    from polythrottle.cluster.predict.completion import Spread

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
    from polythrottle.cluster.plan.mixing import mix

    asked = [[_part(catalogue, text) for text in whole.split(",")] for whole in texts]
    return tuple(mix(catalogue.work, catalogue.offers, parts, draws, seed) for parts in asked)


def _part(catalogue: "Catalogue", text: str) -> "Part":
    from polythrottle.cluster.machine import Market
    from polythrottle.cluster.plan.mixing import Part

    found = _PART.fullmatch(text)
    if found is None:
        raise InvalidInput(f"--mix {text.strip()[:60]!r} is no part of a mix; write for example '1 v100, 2 k80'")
    by_name = {offer.machine.name: offer for offer in catalogue.offers}
    if (name := found[2]) not in by_name:
        raise UnknownName("machine", name, by_name)
    spot = Market.SPOT in by_name[name].machine.usd_per_h
    market = Market(found[3]) if found[3] else Market.SPOT if spot else Market.ON_DEMAND
    return Part(by_name[name], market, int(found[1]))


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
    lost = "" if ends.finished == 1 else f"; {ends.finished:.0%} of the outcomes end"
    return (
        f"{amount(ends.time_s.mean / 3600)} h, {amount(ends.usd.mean)} usd, {amount(ends.energy_j.mean / _SHOWN_J)} kWh"
        f" (95% within {amount(ends.time_s.high / 3600)} h and {amount(ends.usd.high)} usd), simulated at default"
        f" caps; {amount(each.steps_per_s)} steps/s together, predicted{lost}"
    )


def mixed_document(found: "Sequence[Mixed]") -> dict[str, Any]:
    """Return the part of a document that mixes add."""
    return {"mixes": [_record(each) for each in found]} if found else {}


def _record(each: "Mixed") -> dict[str, Any]:
    from math import isfinite

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
        "interval_s": each.interval_s if isfinite(each.interval_s) else None,
        **spreads,
        "finished": ends.finished,
        "reason": None if ends.time_s is not None else "no outcome ended",
    }


def _spread(spread: "Spread | None") -> dict[str, float] | None:
    return None if spread is None else {"mean": spread.mean, "p5": spread.low, "p95": spread.high}
