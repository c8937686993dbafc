"""Budgets: of power, of a battery, of a day's energy and of a grid's clean hours, and what exploring may cost a day."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path

from polythrottle.daemon.commands import SetBudget
from polythrottle.daemon.status import BudgetShown, ExploringShown
from polythrottle.domain.backports import pairwise
from polythrottle.domain.errors import BadFile, InvalidInput
from polythrottle.domain.ladder import Ladder
from polythrottle.domain.load.energy_ration import DAY_S, DailyLoad, LoadInterval, Ration, Supply, ration, weighted
from polythrottle.domain.measurement import Window
from polythrottle.domain.units import show
from polythrottle.storage.cells import Cells, iso_time
from polythrottle.storage.tables import lines
from polythrottle.storage.untrusted import read_plain

# When to explore: in idle time or on a share of the load, within a day's budget of joules and of broken limits.

_QUIET = 0.05
"""A load below this share of what the ladder's lowest rung answers counts as idle."""
STUDY_TRIALS = 30
"""Of a study that nobody has asked for otherwise."""
TRIAL_REQUESTS = Window().warmup + Window().most_queries
"""What a trial may send at most."""


@dataclass(frozen=True)
class ExplorationAllowance:
    """What exploring may cost per day.

    Args:
        joules: Share of the day's energy.
        violations: Share of the day's requests that may miss their limit for it.
        idle_s: How long it must have been idle before a study is offered.
        canary: Share of the time under load that may be spent exploring where the board is never idle; 0 is none.

    Raises:
        InvalidInput: If a share is not one.
    """

    joules: float = 0.02
    violations: float = 0.001
    idle_s: float = 120.0
    canary: float = 0.0

    def __post_init__(self) -> None:
        if not all(0 <= share <= 1 for share in (self.joules, self.violations, self.canary)) or not self.idle_s > 0:
            raise InvalidInput("what exploring may cost is given as shares between 0 and 1, and idle time above 0")


@dataclass(frozen=True)
class ExplorationLedger:
    """What was spent on exploring over the last day or so, and what there was in all; forgets exponentially.

    Args:
        allowance: What may be.
        all_j: Energy; ``explored_j`` of it in studies.
        requests: Requests; ``missed`` of them over the limit while exploring.
        sent: Requests that studies have sent and that are not among ``requests``.
        late: Requests that studies themselves have counted as late beyond the SLO's own share, not among ``missed``.
        beside_requests: That came while the study runs and it has not counted yet; ``beside_missed`` of them over the
            limit.
        explored_s: Time under load in studies; ``loaded_s`` all time under load.
        idle_since_s: Since when there is hardly any load; None if there is.
        quiet_per_s: The rate below which it counts as idle.
    """

    allowance: ExplorationAllowance = field(default_factory=ExplorationAllowance)
    all_j: float = 0.0
    explored_j: float = 0.0
    requests: float = 0.0
    missed: float = 0.0
    sent: float = 0.0
    late: float = 0.0
    beside_requests: float = 0.0
    beside_missed: float = 0.0
    explored_s: float = 0.0
    loaded_s: float = 0.0
    idle_since_s: float | None = None
    quiet_per_s: float = 0.0

    def seen(
        self,
        now_s: float,
        period_s: float,
        joules: float,
        requests: int,
        missed: int,
        studying: bool,
        quiet_per_s: float,
    ) -> ExplorationLedger:
        """Return the ledger after one more look.

        Args:
            now_s: On a monotonic clock.
            period_s: Since the look before.
            joules: Drawn since; not negative.
            requests: That came since; ``missed`` of them over the limit.
            missed: Likewise.
            studying: Whether a study has set the board since.
            quiet_per_s: The rate below which it is idle.
        """
        kept = math.exp(-max(0.0, period_s) / DAY_S)
        period_s = max(0.0, period_s)
        rate = 0.0
        if period_s > 0:
            rate = requests / period_s
        idle = rate <= quiet_per_s
        # A time yet to come is of a clock that was set back, and promises no idle time.
        if self.idle_since_s is not None and self.idle_since_s <= now_s:
            since_s = self.idle_since_s
        else:
            since_s = now_s
        return replace(
            self,
            all_j=kept * self.all_j + joules,
            explored_j=kept * self.explored_j + joules * studying,
            requests=kept * self.requests + requests,
            missed=kept * self.missed + missed * studying,
            sent=kept * self.sent,
            late=kept * self.late,
            beside_requests=self.beside_requests + requests * studying,
            beside_missed=self.beside_missed + missed * studying,
            explored_s=kept * self.explored_s + period_s * (studying and not idle),
            loaded_s=kept * self.loaded_s + period_s * (not idle),
            idle_since_s=since_s if idle else None,
            quiet_per_s=quiet_per_s,
        )

    def studied(self, sent: float, late: float) -> ExplorationLedger:
        """Return the ledger after a study has counted requests of its own.

        What is served may have been seen to get the same ones: of both counts the larger is put down, once.

        Args:
            sent: Since it said so last; ``late`` of them beyond the SLO's own share.
            late: Likewise.
        """
        return replace(
            self,
            sent=self.sent + max(0.0, sent - self.beside_requests),
            late=self.late + max(0.0, late - self.beside_missed),
            beside_requests=0.0,
            beside_missed=0.0,
        )

    def may_explore(self, study_j: float) -> str | None:
        """Return what forbids a study that takes so much energy; None if nothing does.

        Args:
            study_j: Expected, such as what the one before took; 0 if unknown.
        """
        # The first study passes whatever it takes: of a ledger that has just begun it would be more than any share.
        if self.explored_j + study_j > self.allowance.joules * (self.all_j + study_j) and self.explored_j > 0:
            return f"studies have used their {self.allowance.joules:.1%} of the day's energy"
        over = self.missed > 0 and self.missed >= self.allowance.violations * self.requests
        # Where nobody else sends anything, a study's own requests are all of the day's: they are counted in ahead, or
        # a single late one would forbid studies for ever.
        if over or (self.late > 0 and self.late_left(STUDY_TRIALS * TRIAL_REQUESTS) <= 0):
            return f"studies have used up their {self.allowance.violations:.2%} of requests over the limit"
        return None

    def late_left(self, requests: float) -> float:
        """Return how many requests a study may make late: what the day's share of them leaves.

        Args:
            requests: That it may send itself; they are of the day's too.
        """
        most = self.allowance.violations * (self.requests + self.sent + requests)
        return max(0.0, most - self.missed - self.late)

    @property
    def shown(self) -> ExploringShown:
        """What people see of the requests that studies have made late."""
        left = self.late_left(STUDY_TRIALS * TRIAL_REQUESTS)
        return ExploringShown(self.requests + self.sent, self.missed + self.late, left)

    def offer(self, now_s: float, since_midnight_s: float, pattern: DailyLoad, study_s: float, study_j: float) -> bool:
        """Return whether a study may begin now.

        It may while the board is idle and the day's pattern promises so for as long as a study takes; or, where a share
        of the load may be explored on, while that share is not used up.

        Args:
            now_s: On the clock of `seen`.
            since_midnight_s: Wall time of day.
            pattern: What the day brings.
            study_s: How long a study takes.
            study_j: How much energy.
        """
        if self.may_explore(study_j) is not None:
            return False
        if self.idle_since_s is not None:
            idle_s = now_s - self.idle_since_s
            ahead = pattern.ahead(since_midnight_s, study_s, 0.0)
            # Idle for longer than a study takes: the pattern is wrong today.
            promised = idle_s >= study_s or all(part.rate_per_s <= self.quiet_per_s for part in ahead)
            return idle_s >= self.allowance.idle_s and promised
        return self.allowance.canary > 0 and self.explored_s + study_s <= self.allowance.canary * self.loaded_s


def quiet_per_s(lowest_per_s: float) -> float:
    """Return the rate below which a board counts as idle.

    Args:
        lowest_per_s: What the ladder's lowest rung answers.
    """
    return _QUIET * lowest_per_s


# Budgets people have: so many watts, a battery that must last, watt-hours a day, and the clean hours of a grid.

_AGAIN_S = 60.0
"""How often a ration is planned anew."""
_TRUSTED = (0.5, 2.0)
"""Between these what is drawn over what was predicted is believed; beyond them something else is wrong."""
_LEARNING = 0.1
LEAST_W = 1e-3
MOST_W = 1e6
LEAST_WH = 1e-3
MOST_WH = 1e9
LEAST_S = 1.0
MOST_S = 366 * DAY_S
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
    def read(cls, path: Path) -> Carbon:
        """Return the intensities in a CSV file with the columns ``time`` (ISO 8601 or epoch seconds) and ``g_per_kwh``.

        Raises:
            BadFile: If it cannot be read, or is no such table; names the line.
        """
        read_plain(path, _MOST_BYTES)  # that it is a plain file, and no larger
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
    # float() takes nan and inf, among which nothing rises.
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
    def of(cls, wish: SetBudget, now_s: float, midnight_s: float, carbon: Carbon | None = None) -> Budget | None:
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
        if self.power_w is None:
            parts = []
        else:
            parts = [f"at most {show(self.power_w, 'W')}"]
        if self.supply is not None:
            wh = self.supply.joules / 3600
            hours = (self.supply.end_s - self.supply.begin_s) / 3600
            parts.append(f"{wh:g} Wh a day" if self.supply.daily else f"{wh:g} Wh to last {hours:g} h")
        if self.carbon is not None:
            parts.append("shared out by carbon intensity")
        return ", ".join(parts)

    def drawn(self, joules: float, predicted_j: float | None) -> Budget:
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
        if self.supply is None:
            return None
        return max(0.0, self.supply.joules - self.spent_j)

    def planned(
        self,
        now_s: float,
        since_midnight_s: Callable[[float], float],
        pattern: DailyLoad,
        rate_per_s: float,
        on: Ladder,
    ) -> Budget:
        """Return the budget with a ration for now; the old one for as long as it is fresh.

        Args:
            now_s: Wall time. A time before the supply's, as of a clock set back, counts as its beginning.
            since_midnight_s: Returns the seconds since local midnight of a wall time.
            pattern: What the day is expected to bring.
            rate_per_s: What comes now.
            on: The ladder that is followed.
        """
        # At least 0, for after a clock was set back by hours the old ration would hold for as long.
        if self.supply is None or 0 <= now_s - self.planned_s < _AGAIN_S:
            return self
        supply = self.supply.at(now_s)
        # Each day has its own ration: what the day before left or overdrew is not carried over.
        fresh = replace(self, supply=supply, spent_j=self.spent_j if supply == self.supply else 0.0, planned_s=now_s)
        length_s = supply.end_s - max(now_s, supply.begin_s)
        if length_s <= 0:
            return replace(fresh, ration=None)
        # A year would be 17,568 half-hours, planned anew each minute: a week stands for it, with its share of what is
        # left.
        ahead = pattern.ahead(since_midnight_s(now_s), min(length_s, 7 * DAY_S), rate_per_s)
        left_j = (fresh.left_j() or 0.0) * min(1.0, 7 * DAY_S / length_s)
        return replace(fresh, ration=ration(on, self._weighted(ahead, now_s), left_j, self.factor))

    def _weighted(self, ahead: tuple[LoadInterval, ...], now_s: float) -> tuple[LoadInterval, ...]:
        """Return the stretches with the intensities that are known; unknown ones are the mean of the others."""
        if self.carbon is None:
            return ahead
        found = []
        moment_s = now_s
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
        left_j = self.left_j()
        words = self.words
        met = None
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
    # `followed_profile.single` puts the full power where no idle power was measured: that bounds nothing.
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
