"""Moving a job to where a step costs least while prices change: no more than once a day, and only where it pays.

After "Dynamic pricing across clouds" (DISPA at VLDB 2020): one move a day catches most changes of spot prices. Energy
has a price of its own here, so that a machine that is cheap and hungry does not win by its rent alone.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from math import inf, isfinite

from polythrottle.cluster.lifetime import HOUR_S
from polythrottle.cluster.plan.offer import J_PER_KWH
from polythrottle.cluster.prices import History
from polythrottle.errors import InvalidInput

DAY_S = 24 * HOUR_S


@dataclass(frozen=True)
class Quote:
    """What one place offers now.

    Attributes:
        name: Machine type and zone.
        usd_per_h: Price now; None if there is none to be had.
        steps_per_s: How fast the job would go there.
        power_w: What it would draw there, in watts.
    """

    name: str
    usd_per_h: float | None
    steps_per_s: float
    power_w: float = 0.0

    def __post_init__(self) -> None:
        if not (self.steps_per_s > 0 and self.power_w >= 0 and (self.usd_per_h is None or self.usd_per_h >= 0)):
            raise InvalidInput(f"{self.name} needs a positive speed, and a price and a power of at least 0")

    def usd_per_s(self, usd_per_kwh: float) -> float:
        """Return what a second costs there, energy included; infinite where nothing is to be had."""
        if self.usd_per_h is None:
            return inf
        return self.usd_per_h / HOUR_S + self.power_w * usd_per_kwh / J_PER_KWH

    def usd_per_step(self, usd_per_kwh: float) -> float:
        """Return what a step costs there, energy included."""
        return self.usd_per_s(usd_per_kwh) / self.steps_per_s


@dataclass(frozen=True)
class Moving:
    """When a job moves.

    Attributes:
        usd_per_kwh: Price of energy.
        move_s: How long a move stops the job while the new machine is paid for, in seconds.
        dwell_s: How long it stays at least where it is, unless its machine is taken away, in seconds.
        horizon_s: How long a price is taken to hold when the saving is counted, in seconds.
    """

    usd_per_kwh: float = 0.0
    move_s: float = 180.0
    dwell_s: float = DAY_S
    horizon_s: float = DAY_S

    def __post_init__(self) -> None:
        parts = (self.usd_per_kwh, self.move_s, self.dwell_s)
        if not all(isfinite(part) and part >= 0 for part in parts) or not self.horizon_s > 0:
            raise InvalidInput("a price of energy and times are at least 0, and a horizon is above 0")


def where_next(
    quotes: Sequence[Quote], held: int | None, held_s: float, steps_left: float, moving: Moving
) -> int | None:
    """Return which quote to hold next: where it is, unless a move pays.

    Args:
        quotes: What every place offers now.
        held: Where the job is; None at the beginning or after its machine was taken away.
        held_s: How long it has been there, in seconds.
        steps_left: Steps until it is done.
        moving: When a job moves.

    Returns:
        An index into the quotes, or None where nothing is to be had at all.
    """
    costs = [quote.usd_per_step(moving.usd_per_kwh) for quote in quotes]
    best = min(range(len(quotes)), key=costs.__getitem__, default=None)
    if best is None or costs[best] == inf:
        return None
    if held is None or quotes[held].usd_per_h is None:
        return best
    if best == held or held_s < moving.dwell_s:
        return held
    steps = min(steps_left, quotes[held].steps_per_s * moving.horizon_s)
    saved = steps * (costs[held] - costs[best])
    return best if saved > moving.move_s * quotes[best].usd_per_s(moving.usd_per_kwh) else held


@dataclass(frozen=True)
class Place:
    """A place of a replay: its prices along time, and how the job goes there.

    Attributes:
        history: Its prices, recorded.
        steps_per_s: Speed of the job there.
        power_w: Its power there, in watts.
    """

    history: History
    steps_per_s: float
    power_w: float = 0.0

    def quote(self, time_s: float) -> Quote:
        """Return what it offers at a time in seconds since 1970."""
        return Quote(self.history.name, self.history.at(time_s), self.steps_per_s, self.power_w)


@dataclass
class Journey:
    """Where a job went in a replay, simulated on recorded prices; it is assumed to get a machine wherever there is one.

    Attributes:
        usd: What its machines cost.
        energy_j: What they drew, in joules.
        time_s: How long it took, in seconds.
        moves: How often it moved, the first place not counted.
        places: Names of the places in order.
        done: Steps done; fewer than asked for if the record ended before.
    """

    usd: float = 0.0
    energy_j: float = 0.0
    time_s: float = 0.0
    moves: int = 0
    places: list[str] = field(default_factory=list)
    done: float = 0.0

    def cost_usd(self, usd_per_kwh: float) -> float:
        """Return dollars with energy at a price."""
        return self.usd + self.energy_j * usd_per_kwh / J_PER_KWH


def travel(places: Sequence[Place], steps: float, begin_s: float, moving: Moving, look_s: float = HOUR_S) -> Journey:
    """Return how a job goes through recorded prices.

    Args:
        places: Where it may be.
        steps: Steps until it is done.
        begin_s: When it begins, in seconds since 1970.
        moving: When it moves; an infinite dwell keeps it in its first place.
        look_s: Time between looks at the prices, in seconds.

    Raises:
        InvalidInput: If no place has a price at the beginning.
    """
    journey, held, since_s, now_s, ready_s = Journey(), None, begin_s, begin_s, begin_s
    while journey.done < steps:
        quotes = [place.quote(now_s) for place in places]
        chosen = where_next(quotes, held, now_s - since_s, steps - journey.done, moving)
        if chosen is None:
            break
        if chosen != held:
            journey.moves += held is not None
            journey.places.append(quotes[chosen].name)
            held, since_s, ready_s = chosen, now_s, now_s + moving.move_s
        place = places[chosen]
        ends_s = max(now_s, ready_s) + (steps - journey.done) / place.steps_per_s
        until_s = min(now_s + look_s, ends_s)
        journey.usd += place.history.spent_usd(now_s, until_s)
        journey.energy_j += place.power_w * (until_s - now_s)
        journey.done = (
            steps if until_s == ends_s else journey.done + place.steps_per_s * max(0.0, until_s - max(now_s, ready_s))
        )
        now_s = until_s
    if not journey.places:
        raise InvalidInput("no place has a price at the beginning; begin within the record")
    journey.time_s = now_s - begin_s
    return journey


def stay(places: Sequence[Place], steps: float, begin_s: float, moving: Moving) -> Journey:
    """Return how the job would have gone if it had stayed where a step was cheapest at the beginning: the baseline."""
    return travel(places, steps, begin_s, Moving(moving.usd_per_kwh, moving.move_s, 1e15, moving.horizon_s))
