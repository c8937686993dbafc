"""Budgets people have: so many watts, a battery that must last, watt-hours a day, and the clean hours of a grid."""

import math
from bisect import bisect_right
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path

from polythrottle.cells import Cells, iso_time
from polythrottle.daemon.horizon import DAY_S, Pattern, Ration, Stretch, Supply, ration, weighted
from polythrottle.daemon.status import BudgetShown
from polythrottle.daemon.wishes import SetBudget
from polythrottle.errors import BadFile, InvalidInput
from polythrottle.ladder import Ladder
from polythrottle.plainfile import contents
from polythrottle.tables import lines
from polythrottle.units import show

_AGAIN_S = 60.0
"""How often a ration is planned anew."""
_TRUSTED = (0.5, 2.0)
"""Between these what is drawn over what was predicted is believed; beyond them something else is wrong."""
_LEARNING = 0.1
LEAST_W, MOST_W = 1e-3, 1e6
LEAST_WH, MOST_WH = 1e-3, 1e9
LEAST_S, MOST_S = 1.0, 366 * DAY_S
"""Between these lies what boards draw, batteries hold and people plan for."""
_MOST_BYTES = 4_000_000
"""Of a table of intensities; a year of quarter-hours takes 2 MB, in 35,040 rows."""
_MOST_ROWS = 200_000


@dataclass(frozen=True)
class Carbon:
    """Carbon intensity along time.

    Args:
        times_s: Seconds since the epoch, rising; each value holds until the next time, the last for as long as the one
            before.
        values: In g/kWh, above 0.
    """

    times_s: tuple[float, ...]
    values: tuple[float, ...]

    @classmethod
    def read(cls, path: Path) -> "Carbon":
        """Return the intensities in a CSV file with the columns ``time`` (ISO 8601 or epoch seconds) and ``g_per_kwh``.

        Raises:
            BadFile: If it cannot be read, or is no such table; names the line.
        """
        contents(path, _MOST_BYTES)  # that it is a plain file, and no larger
        found = [_intensity(cells) for cells in lines(path, ("time", "g_per_kwh"), most_rows=_MOST_ROWS)]
        if len(found) < 2 or any(after[0] <= before[0] for before, after in pairwise(found)):
            raise BadFile(f"{path} needs two rows at least, with times that rise")
        return cls(tuple(time_s for time_s, _ in found), tuple(value for _, value in found))

    def at(self, now_s: float) -> float | None:
        """Return the intensity at a moment, in g/kWh; None outside the table."""
        end_s = 2 * self.times_s[-1] - self.times_s[-2]
        if not self.times_s[0] <= now_s < end_s:
            return None
        return self.values[bisect_right(self.times_s, now_s) - 1]


def _intensity(cells: Cells) -> tuple[float, float]:
    text = cells.cells["time"].strip()
    try:
        moment_s = float(text)
    except ValueError:
        try:
            moment_s = iso_time(text).timestamp()
        except (ValueError, OverflowError):
            raise cells.bad("time", f"is {text[:40]!r}; it needs an ISO 8601 time or seconds since 1970") from None
    if not math.isfinite(moment_s):
        raise cells.bad("time", f"is {text[:40]!r}; it needs a finite time")
    return moment_s, cells.number("g_per_kwh")


@dataclass(frozen=True)
class Budget:
    """A budget as it is spent; a plain value.

    Args:
        power_w: The most mean power; None if only energy is limited.
        supply: The energy; None if only power is limited.
        carbon: Intensities; None if they do not matter.
        spent_j: Of the supply, so far.
        factor: What is really drawn over what the ladder predicts, as seen so far.
        ration: As planned last; None before.
        planned_s: When that was, wall time.
    """

    power_w: float | None = None
    supply: Supply | None = None
    carbon: Carbon | None = None
    spent_j: float = 0.0
    factor: float = 1.0
    ration: Ration | None = None
    planned_s: float = field(default=-math.inf)

    @classmethod
    def of(cls, wish: SetBudget, now_s: float, midnight_s: float, carbon: Carbon | None = None) -> "Budget | None":
        """Return the budget somebody wishes; None if it lifts all limits.

        Args:
            wish: What was asked.
            now_s: Wall time, seconds since the epoch.
            midnight_s: When the local day began.
            carbon: What is in the file of intensities; None if it is yet to be read.

        Raises:
            InvalidInput: As `check_wish` does.
            BadFile: If the file of intensities is none.
        """
        check_wish(wish)
        if carbon is None and wish.carbon is not None:
            carbon = Carbon.read(Path(wish.carbon))
        supply = _supply(wish, now_s, midnight_s)
        if wish.power_w is None and supply is None:
            return None
        return cls(wish.power_w, supply, carbon)

    @property
    def words(self) -> str:
        """What was asked, for people."""
        parts = [] if self.power_w is None else [f"at most {show(self.power_w, 'W')}"]
        if self.supply is not None:
            wh, hours = self.supply.joules / 3600, (self.supply.end_s - self.supply.begin_s) / 3600
            parts.append(f"{wh:g} Wh a day" if self.supply.daily else f"{wh:g} Wh to last {hours:g} h")
        if self.carbon is not None:
            parts.append("shared out by carbon intensity")
        return ", ".join(parts)

    def drawn(self, joules: float, predicted_j: float | None) -> "Budget":
        """Return the budget after energy was drawn.

        Args:
            joules: What was, not negative.
            predicted_j: What the ladder had predicted for the same time; None if it did not.
        """
        factor = self.factor
        if predicted_j and joules > 0:
            low, high = _TRUSTED
            seen = min(high, max(low, joules / predicted_j))
            factor += _LEARNING * (seen - factor)
        return replace(self, spent_j=self.spent_j + max(0.0, joules), factor=factor)

    def left_j(self) -> float | None:
        """Return what is left of the supply; None if none is limited."""
        return None if self.supply is None else max(0.0, self.supply.joules - self.spent_j)

    def planned(
        self, now_s: float, since_midnight_s: Callable[[float], float], pattern: Pattern, rate_per_s: float, on: Ladder
    ) -> "Budget":
        """Return the budget with a ration for now; the old one for as long as it is fresh.

        Args:
            now_s: Wall time. A time before the supply's, as of a clock set back, counts as its beginning.
            since_midnight_s: Returns the seconds since local midnight of a wall time.
            pattern: What the day is expected to bring.
            rate_per_s: What comes now.
            on: The ladder that is followed.
        """
        if self.supply is None or 0 <= now_s - self.planned_s < _AGAIN_S:
            return self
        supply = self.supply.at(now_s)
        fresh = replace(self, supply=supply, spent_j=self.spent_j if supply == self.supply else 0.0, planned_s=now_s)
        length_s = supply.end_s - max(now_s, supply.begin_s)
        if length_s <= 0:
            return replace(fresh, ration=None)
        ahead = pattern.ahead(since_midnight_s(now_s), min(length_s, 7 * DAY_S), rate_per_s)
        left_j = (fresh.left_j() or 0.0) * min(1.0, 7 * DAY_S / length_s)
        return replace(fresh, ration=ration(on, self._weighted(ahead, now_s), left_j, self.factor))

    def _weighted(self, ahead: tuple[Stretch, ...], now_s: float) -> tuple[Stretch, ...]:
        """Return the stretches with the intensities that are known; unknown ones are the mean of the others."""
        if self.carbon is None:
            return ahead
        found, moment_s = [], now_s
        for part in ahead:
            found.append(self.carbon.at(moment_s + part.length_s / 2))
            moment_s += part.length_s
        known = [value for value in found if value is not None]
        if not known:
            return ahead
        mean = sum(known) / len(known)
        return weighted(ahead, [mean if value is None else value for value in found])

    @property
    def limit_w(self) -> float | None:
        """The most mean power at present; None if there is no such limit."""
        limits = [self.power_w, None if self.ration is None else self.ration.limit_w]
        return min((limit for limit in limits if limit is not None), default=None)

    def shown(self, now_s: float, shadow_w_per_ms: float | None = None) -> BudgetShown:
        """Return the budget as people see it.

        Args:
            now_s: Wall time.
            shadow_w_per_ms: What a millisecond more of p99 would save; None if unknown.
        """
        left_j, words, met = self.left_j(), self.words, None
        if self.ration is not None and self.supply is not None and left_j is not None:
            words += f": {self.ration.words(left_j, max(0.0, self.supply.end_s - now_s))}"
            met = self.ration.met
        elif self.supply is not None and now_s >= self.supply.end_s:
            words += ": over; nothing is limited any more"
        return BudgetShown(words, self.limit_w, left_j, shadow_w_per_ms, met)


def check_wish(wish: SetBudget) -> None:
    """Check that what is wished goes together, whatever the board; the file of intensities is not looked at.

    Raises:
        InvalidInput: If a figure is none that a board or a battery can have, or a battery comes without the time it
            must last, or with a ration a day, or intensities without energy to share out.
    """
    _check_amount("power", wish.power_w, (LEAST_W, MOST_W), ("1 mW", "1 MW"))
    _check_amount("battery", wish.battery_wh, (LEAST_WH, MOST_WH), ("1 mWh", "1 GWh"))
    _check_amount("last", wish.last_s, (LEAST_S, MOST_S), ("1 s", "366 days"))
    _check_amount("wh-per-day", wish.wh_per_day, (LEAST_WH, MOST_WH), ("1 mWh", "1 GWh"))
    if (wish.battery_wh is None) != (wish.last_s is None):
        raise InvalidInput("a battery and the time it must last go together: --battery 80Wh --last 9h")
    if wish.battery_wh is not None and wish.wh_per_day is not None:
        raise InvalidInput("give either a battery or watt-hours a day")
    if wish.carbon is not None and wish.battery_wh is None and wish.wh_per_day is None:
        raise InvalidInput("carbon shares out energy over the day: give --wh-per-day or --battery with it")


def _check_amount(name: str, value: float | None, ends: tuple[float, float], shown: tuple[str, str]) -> None:
    if value is None or ends[0] <= value <= ends[1]:
        return
    if not 0 < value < math.inf:
        raise InvalidInput(f"--{name} must be above 0, not {value:g}")
    raise InvalidInput(f"--{name} must be {f'at least {shown[0]}' if value < ends[0] else f'at most {shown[1]}'}")


def check_power(power_w: float, ladder: Ladder) -> None:
    """Refuse a limit below what the board is predicted to draw on every rung without a single request.

    Args:
        power_w: The limit.
        ladder: What is followed. Of one that lacks idle powers nothing can be said.

    Raises:
        InvalidInput: If it cannot be kept; says from where on it can.
    """
    idle_w = [rung.service.idle_w for rung in ladder.rungs if rung.service.idle_w < rung.power_w]
    if idle_w and power_w < min(idle_w):
        raise InvalidInput(
            f"at most {show(power_w, 'W')} cannot be kept: without any request the profile's lowest point draws "
            f"{show(min(idle_w), 'W')}; give more than that, or a profile with lower points"
        )


def _supply(wish: SetBudget, now_s: float, midnight_s: float) -> Supply | None:
    if wish.battery_wh is not None and wish.last_s is not None:
        return Supply(wish.battery_wh * 3600, now_s, now_s + wish.last_s)
    if wish.wh_per_day is not None:
        return Supply(wish.wh_per_day * 3600, midnight_s, midnight_s + DAY_S, daily=True)
    return None
