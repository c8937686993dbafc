"""The hour of the day in the danger to machines: a provider wants them back when its other customers work.

Indirect standardisation: losses seen in each hour over those that the machines' ages there lead one to expect, drawn
towards 1 and smoothed with the hours beside.
"""

from collections.abc import Callable, Iterable, Sequence
from datetime import timedelta

from polythrottle.cluster.lifetime import HOUR_S
from polythrottle.cluster.predict.pooled import Pieces
from polythrottle.cluster.tables import LifetimeRow
from polythrottle.errors import InvalidInput

HOURS = 24
_DRAWN = 2.0
_BESIDE = 0.5
_PART_S = 600.0


def factors(rows: Iterable[LifetimeRow], expected: Callable[[str, str], Pieces]) -> tuple[float, ...]:
    """Return by how much each hour of the day (of the record's clock) multiplies the danger.

    Args:
        rows: Machines, lost or not.
        expected: The danger by age to a machine of a GPU type in a region, at no hour in particular.

    Returns:
        24 factors, 1 on average of what was watched; all 1 where nothing was.
    """
    lost, foreseen = [0.0] * HOURS, [0.0] * HOURS
    for row in rows:
        curve = expected(row.gpu, row.region)
        for part in range(int(row.age_s // _PART_S) + 1):
            at_s = part * _PART_S
            span_s = min(_PART_S, row.age_s - at_s)
            foreseen[(row.start + timedelta(seconds=at_s)).hour] += curve.hazard_per_s(at_s) * span_s
        if row.lost:
            lost[(row.start + timedelta(seconds=row.age_s)).hour] += 1
    scale = sum(lost) / sum(foreseen) if sum(lost) and sum(foreseen) else 1.0
    return tuple(_factor(lost, [scale * one for one in foreseen], hour) for hour in range(HOURS))


def _factor(lost: Sequence[float], foreseen: Sequence[float], hour: int) -> float:
    beside = ((hour - 1) % HOURS, _BESIDE), (hour, 1.0), ((hour + 1) % HOURS, _BESIDE)
    return (sum(w * lost[h] for h, w in beside) + _DRAWN) / (sum(w * foreseen[h] for h, w in beside) + _DRAWN)


def started_at(curve: Pieces, by_hour: Sequence[float], hour: float, days: int = 2) -> Pieces:
    """Return the survival of a machine that starts at an hour of the day.

    Args:
        curve: The danger by age at no hour in particular.
        by_hour: 24 factors.
        hour: When it starts, in hours since midnight, in [0, 24).
        days: For how many days hours are told apart; later the danger is that of the age alone.

    Raises:
        InvalidInput: If there are not 24 factors, or the hour is none.
    """
    if len(by_hour) != HOURS or not 0 <= hour < HOURS:
        raise InvalidInput(f"a day has {HOURS} hours, from 0 on; not {len(by_hour)} factors and hour {hour}")
    first_s = (int(hour) + 1 - hour) * HOUR_S
    turns = {first_s + index * HOUR_S for index in range(days * HOURS)}
    edges = sorted({0.0, *turns, *curve.edges_s})
    end_s = max(turns)
    rates = [curve.hazard_per_s(at_s) * (_at(by_hour, hour, at_s) if at_s < end_s else 1.0) for at_s in edges]
    return Pieces(tuple(edges), tuple(rates))


def _at(by_hour: Sequence[float], hour: float, age_s: float) -> float:
    return by_hour[int(hour + age_s / HOUR_S + 1e-9) % HOURS]
