"""What is added up turn by turn: minutes, joules saved against the default point, the budget.

The cost of exploring.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from datetime import datetime
from typing import Any, TypeVar

from polythrottle.daemon.budgets import Budget, Carbon, ExplorationAllowance, ExplorationLedger, quiet_per_s
from polythrottle.daemon.commands import SetBudget
from polythrottle.daemon.control.events import Event, PowerBudget, StudyOffered
from polythrottle.daemon.control.state import Phase, State
from polythrottle.daemon.history_store import HistoryStore, Minute, Totals
from polythrottle.daemon.observation import ControlPeriod, known_sum
from polythrottle.daemon.status import BudgetShown, ExploringShown, SavedShown
from polythrottle.domain.errors import BadFile, InvalidInput, PolythrottleError
from polythrottle.domain.ladder import Ladder, PointPerformance, Rung
from polythrottle.domain.load.energy_ration import DailyLoad
from polythrottle.domain.measurement import BETWEEN_WINDOWS, EnergyKind, Measurement
from polythrottle.domain.profile import Profile
from polythrottle.domain.space import OperatingPoint
from polythrottle.storage.identity import without_options
from polythrottle.storage.untrusted import MALFORMED, said, shortened

# What following a profile saves against the device's default point, at the same requests.

_SPREADS = 1.96


@dataclass(frozen=True)
class Saving:
    """The default point as it would have answered.

    Args:
        default: It, at any rate; None if the profile does not tell.
        doubt: Standard deviation of its predicted power, as a fraction; None if the profile has no interval for it.
        words: How the figure comes about, or why there is none.
    """

    default: Rung | None
    doubt: float | None
    words: str

    @classmethod
    def of(cls, profile: Profile | None) -> Saving:
        """Return what a profile tells of the default point."""
        if profile is None or profile.default is None:
            return cls(None, None, "unknown: there is no profile with a measurement of the default point")
        seen = profile.default
        if seen.energy_kind is EnergyKind.RELATIVE:
            return cls(None, None, "unknown: the profile's energy is relative, not in joules")
        try:
            service = PointPerformance.of(OperatingPoint({}), seen)
        except InvalidInput:
            return cls(None, None, "unknown: the profile lacks the idle power or the p99 of the default point")
        power_w = service.batch_j / service.interval_s
        rung = Rung(service.most_per_s, service, 0.0, power_w, service.tail_s)
        return cls(rung, _doubt(seen), f"against the default point at the same requests; {seen.energy_kind} energy")

    def in_turn(self, rate_per_s: float, joules: float, period_s: float) -> tuple[float, float | None] | None:
        """Return the joules saved in a time and their standard deviation; None if that is unknown.

        Args:
            rate_per_s: Requests per second in it.
            joules: Drawn in it.
            period_s: How long it was.
        """
        if self.default is None:
            return None
        default_j = self.default.power_at(rate_per_s) * period_s
        return default_j - joules, None if self.doubt is None else self.doubt * default_j

    def _unknown(self, requests: int) -> str:
        """Return why nothing is claimed."""
        if self.default is None:
            return self.words
        if not requests:
            return "unknown: no request was answered yet"
        return "unknown: while requests were answered, power or rate could not be read, or the board was not set"

    def shown(self, totals: Totals, requests: int) -> SavedShown:
        """Return what was saved as people see it; nothing while no request was answered."""
        saved_j = totals.saved_j
        sd_j = totals.saved_sd_j
        if saved_j is None or not requests:
            return SavedShown(requests=requests, words=self._unknown(requests))
        if sd_j is None:
            return SavedShown(saved_j, None, None, requests, f"{self.words}; without an interval")
        half_j = _SPREADS * sd_j
        return SavedShown(saved_j, saved_j - half_j, saved_j + half_j, requests, self.words)


def _doubt(seen: Measurement) -> float | None:
    interval = seen.intervals.get("energy")
    if interval is None or not interval.known:
        return None
    # Twice the variance between windows: one was the profile's, what is drawn now is another.
    return math.hypot(interval.half / _SPREADS / seen.energy_j, math.sqrt(2) * BETWEEN_WINDOWS)


def midnight_s(wall_s: float) -> float:
    """Return when the local day of a wall time began, both in seconds since the epoch."""
    # Without a zone in it, so that timestamp() takes the offset of that midnight: where summer time begins or ends it
    # is not that of now.
    day = datetime.fromtimestamp(wall_s).replace(hour=0, minute=0, second=0, microsecond=0)
    return day.timestamp()


# What is added up turn by turn: minutes, joules saved, the budget, and what exploring may cost.

_PART_S = 10.0
"""How long a part of a minute is, which is the most that a kill loses."""
_BUDGET = "budget"
_PATTERN = "pattern"
_LEDGER = "ledger"
_COUNTED = "counted"
_COUNTERS_MOST = 16
T = TypeVar("T")
_STUDY_S = 600.0
"""How long a study is taken to last while none has been seen."""


class Accounts:
    """Everything that is added up; what must outlive the daemon is kept in its record.

    Args:
        record: Where.
        wall: Wall time, seconds since the epoch.
        allowance: What exploring may cost.
    """

    def __init__(
        self, record: HistoryStore, wall: Callable[[], float], allowance: ExplorationAllowance | None = None
    ) -> None:
        self.energy_j: float | None = None
        self.requests: int | None = None
        self.failed: int | None = None
        self.budget: Budget | None = None
        self._saving = Saving.of(None)
        self._record = record
        self._wall = wall
        self._limit_w: float | None = None
        self._wish: dict[str, Any] | None = None
        self._wished_s = 0.0
        self._unread = False
        self._board = ""
        self._minute = Minute(int(wall() // 60))
        self._today = Totals()
        self._day_s = -1.0
        self._pattern = _restored(record.kept(_PATTERN), _pattern) or DailyLoad()
        rules = allowance or ExplorationAllowance()
        self._ledger = _restored(record.kept(_LEDGER), lambda kept: _ledger(kept, rules)) or ExplorationLedger(rules)
        self._counted_study, self._counted_by = _restored(record.kept(_LEDGER), _counts) or ("", {})
        self._study_s = _STUDY_S
        self._study_j = 0.0
        self._studied_s = 0.0
        self._studied_j = 0.0

    def late_left(self, requests: float) -> float:
        """Return how many requests a study that sends so many may make late; see `ExplorationLedger`."""
        return self._ledger.late_left(requests)

    @property
    def shown_exploring(self) -> ExploringShown:
        """What people see of the requests that studies have made late."""
        return self._ledger.shown

    def studied(self, study: str, by: str, sent: float, late: float) -> None:
        """Put down what a study has counted of its own requests so far; what it said before is not put down again.

        Args:
            study: Its name; of one study at a time it is known what was put down.
            by: Whose count it is: another host of the same study begins at none.
            sent: All it has sent; ``late`` of them beyond the SLO's own share.
            late: Likewise.
        """
        if study != self._counted_study:
            self._counted_study, self._counted_by = study, {}
        sent_before, late_before = self._counted_by.pop(by, (0.0, 0.0))
        # A count that goes back is one of a journal that was lost: it is put down from where it was.
        sent, late = max(sent, sent_before), max(late, late_before)
        while len(self._counted_by) >= _COUNTERS_MOST:
            self._counted_by.pop(next(iter(self._counted_by)))
        self._counted_by[by] = sent, late
        if (sent, late) != (sent_before, late_before):
            self._ledger = self._ledger.studied(sent - sent_before, late - late_before)
            # At once and with what was put down: a kill between the two would have it counted twice, or never.
            self._keep_ledger()

    def follow(self, profile: Profile | None) -> None:
        """Count what is saved from now on against the default point of a profile."""
        self._saving = Saving.of(profile)

    def wished(self, wish: SetBudget, carbon: Carbon | None = None) -> Budget | None:
        """Take a budget over, from now on; a wish of nothing lifts it.

        Args:
            wish: What was asked.
            carbon: What is in the file it names; None if it is yet to be read.

        Raises:
            InvalidInput: If it makes no sense.
            BadFile: If it names a file that cannot be used.
        """
        now_s = self._wall()
        self.budget = Budget.of(wish, now_s, midnight_s(now_s), carbon)
        self._wish = None if self.budget is None else asdict(wish)
        self._wished_s = now_s
        self._unread = False
        self._keep_budget()
        return self.budget

    def goes_on(self, wish: SetBudget) -> bool:
        """Return whether a wish is the budget that is followed already, and is not over: it is not begun anew then."""
        budget = self.budget
        if budget is None or self._wish != asdict(wish):
            return False
        return budget.supply is None or budget.supply.daily or self._wall() < budget.supply.end_s

    def resume_budget(self, board: str) -> str:
        """Go on with the budget the daemon before had, and with what it had spent of it.

        Args:
            board: URI of the board that is set now; a budget of another one is not followed, and forgotten.

        Returns:
            What people should know of it, in words; empty if it goes on as it was, or if there is none.
        """
        kept, self._board = self._record.kept(_BUDGET), _named(board)
        if not isinstance(kept, dict) or not isinstance(kept.get("wish"), dict):
            return ""
        other = kept.get("board")
        # What one board has spent says nothing of another's supply.
        if isinstance(other, str) and other and self._board not in ("", other):
            return f"the budget kept is one for {other}, and is not followed here; set another"
        try:
            return self._resume(kept, SetBudget(**kept["wish"]))
        # What another version has kept may be of another shape, and the time of day of a moment far off is unknown.
        except (*MALFORMED, PolythrottleError, OSError) as error:
            self._unread = True
            return f"the budget kept cannot be followed, and limits nothing: {said(error)}; set another"

    def _resume(self, kept: dict[str, Any], wish: SetBudget) -> str:
        """Go on with a budget, without its curve of carbon where that cannot be read; return what to say of it.

        Raises:
            PolythrottleError, TypeError, KeyError, ValueError, OverflowError, OSError: If nobody can have kept this.
        """
        at_s, spent_j = _amount(kept["at_s"]), _amount(kept.get("spent_j", 0.0))
        words = ""
        try:
            budget = Budget.of(wish, at_s, midnight_s(at_s))
        except BadFile as error:
            budget = Budget.of(replace(wish, carbon=None), at_s, midnight_s(at_s))
            words = f"the budget goes on, not shared out by carbon intensity until the daemon's next start: {error}"
        if budget is not None:
            self._wish = kept["wish"]
            self._wished_s = at_s
            self.budget = replace(budget, spent_j=spent_j)
        return words

    def outlook(self, ladder: Ladder, mean_per_s: float) -> BudgetShown | None:
        """Return the budget as it would be planned now; None if there is none. Nothing is changed.

        Args:
            ladder: Is followed.
            mean_per_s: Requests that come, for the half-hours of the day that were never seen.
        """
        if self.budget is None:
            return None
        now_s = self._wall()
        return self.budget.planned(now_s, self._since_midnight_s, self._pattern, mean_per_s, ladder).shown(now_s)

    def turn(self, sight: ControlPeriod, state: State) -> Iterator[Event]:
        """Add up one control period, and yield what the controller should know of it."""
        self._counted(sight, state)
        self._roll()
        # Nobody sends to a workload that is down: so the pattern learns in which half-hours the board idles.
        loaded = state.plan is not None
        if loaded:
            rate_per_s = sight.rate_per_s
        else:
            rate_per_s = 0.0
        if rate_per_s is not None and not sight.jumped:
            self._pattern = self._pattern.seen(self._since_midnight_s(self._wall()), rate_per_s, sight.period_s)
        if state.plan is not None and state.plan.ladder is not None:
            yield from self._rationed(state, state.plan.ladder)
        yield from self._explored(sight, state)

    def between(self, sight: ControlPeriod, state: State) -> None:
        """Add up a part of a control period that was looked at before its end."""
        self._counted(sight, state)

    def shown_saving(self) -> SavedShown:
        """Return what was saved since midnight, the minute under way included."""
        # The database is asked once a day: `_close_minute` adds what is over since then.
        day_s = midnight_s(self._wall())
        if day_s != self._day_s:
            self._day_s, self._today = day_s, self._record.totals(day_s)
        now = self._minute
        totals = Totals(
            known_sum(self._today.saved_j, now.saved_j),
            known_sum(self._today.saved_sd_j, now.saved_sd_j),
            self._today.joules + (now.joules or 0.0),
            self._today.requests + now.requests,
        )
        return self._saving.shown(totals, totals.requests)

    def shown_budget(self, rung: Rung | None) -> BudgetShown:
        """Return the budget as people see it, and what the SLO costs at a rung."""
        relief_w_per_s = None if rung is None else rung.relief_w_per_s
        if relief_w_per_s is None:
            shadow = None
        else:
            shadow = relief_w_per_s / 1e3
        if self.budget is None:
            return BudgetShown(shadow_w_per_ms=shadow)
        return self.budget.shown(self._wall(), shadow)

    def close(self) -> None:
        """Note the minute under way and what must outlive the daemon."""
        self._close_minute(self._minute)

    def _counted(self, sight: ControlPeriod, state: State) -> None:
        self._drawn(sight, state)
        seen = sight.seen
        minute = self._minute
        if sight.joules is not None:
            self.energy_j = (self.energy_j or 0.0) + sight.joules
        if seen is not None and seen.answered is not None:
            self.requests = (self.requests or 0) + seen.answered
            minute = replace(minute, requests=minute.requests + seen.answered)
        if seen is not None and seen.failed is not None:
            self.failed = (self.failed or 0) + seen.failed
            minute = replace(minute, failed=minute.failed + seen.failed)
        if sight.jumped:
            seconds = 0.0
        else:
            seconds = sight.period_s
        if seen is None or seen.p99_s is None:
            p99_s = minute.p99_s
        else:
            p99_s = seen.p99_s
        # The first reading after a gap tells the joules of the gap too, which belong to that much more time.
        metered_s = minute.metered_s + (0.0 if sight.joules is None else seconds + sight.unread_s)
        minute = replace(minute, seconds=minute.seconds + seconds, metered_s=metered_s, p99_s=p99_s)
        self._minute = replace(minute, joules=known_sum(minute.joules, sight.joules))
        # A board that is left alone, or that a trainer uses too, saves nothing by the profile.
        if sight.rate_per_s is not None and sight.own_j is not None and state.steers:
            self._saved(self._saving.in_turn(sight.rate_per_s, sight.own_j, sight.period_s))

    def _saved(self, saved: tuple[float, float | None] | None) -> None:
        if saved is not None:
            saved_j = known_sum(self._minute.saved_j, saved[0])
            sd_j = known_sum(self._minute.saved_sd_j, saved[1])
            self._minute = replace(self._minute, saved_j=saved_j, saved_sd_j=sd_j)

    def limited(self, limit_s: float | None) -> None:
        """Judge the minute under way by a limit on its p99."""
        p99_s = self._minute.p99_s
        violated = limit_s is not None and p99_s is not None and p99_s > limit_s
        self._minute = replace(self._minute, limit_s=limit_s, violated=violated)

    def _roll(self) -> None:
        """Begin a new minute, or the next part of one, where one is over; a wall clock set back begins one too."""
        number = int(self._wall() // 60)
        if number != self._minute.minute or self._minute.seconds >= _PART_S:
            over, self._minute = self._minute, Minute(number)
            self._close_minute(over)

    def _close_minute(self, over: Minute) -> None:
        if over.seconds > 0 or over.requests:  # what a clock that jumped saw end took no time, and ended all the same
            self._record.add(over)
            today = self._today
            self._today = Totals(
                known_sum(today.saved_j, over.saved_j),
                known_sum(today.saved_sd_j, over.saved_sd_j),
                today.joules + (over.joules or 0.0),
                today.requests + over.requests,
            )
        self._record.keep(_PATTERN, [list(slot) for slot in self._pattern.slots])
        self._keep_ledger()
        self._keep_budget()

    def _keep_ledger(self) -> None:
        ledger = asdict(self._ledger)
        counts = {"study": self._counted_study, "by": {by: list(each) for by, each in self._counted_by.items()}}
        self._record.keep(_LEDGER, {**{name: ledger[name] for name in (*_LASTING, *_ADDED)}, _COUNTED: counts})

    def _keep_budget(self) -> None:
        # What this version cannot read stays for one that can, until somebody wishes for another budget.
        if self._unread:
            return
        if self.budget is None:
            spent_j = 0.0
        else:
            spent_j = self.budget.spent_j
        known = {"wish": self._wish, "at_s": self._wished_s, "spent_j": spent_j}
        self._record.keep(_BUDGET, {**known, "board": self._board})

    def _drawn(self, sight: ControlPeriod, state: State) -> None:
        """Take what was drawn off the budget, whoever set the board: a battery gets empty while it is released too."""
        rate_per_s = sight.rate_per_s
        if self.budget is None or sight.joules is None:
            return
        # What a study, a safe point or a trainer draws says nothing of the ladder's predictions.
        if state.phase is Phase.FOLLOWING and sight.own_j is not None:
            rung = state.rung
        else:
            rung = None
        if rung is None or rate_per_s is None:
            predicted_j = None
        else:
            predicted_j = rung.power_at(rate_per_s) * sight.period_s
        self.budget = self.budget.drawn(sight.joules, predicted_j)

    def _rationed(self, state: State, ladder: Ladder) -> Iterator[Event]:
        budget = self.budget
        if budget is not None:
            mean_per_s = state.forecast.slow_per_s
            budget = budget.planned(self._wall(), self._since_midnight_s, self._pattern, mean_per_s, ladder)
        self.budget = budget
        limit_w = None if budget is None else budget.limit_w
        if limit_w != self._limit_w:
            self._limit_w = limit_w
            yield PowerBudget(limit_w)

    def _explored(self, sight: ControlPeriod, state: State) -> Iterator[Event]:
        if sight.jumped:
            return
        seen = sight.seen
        ladder = None if state.plan is None else state.plan.ladder
        # Without a ladder nothing tells what little load is: only none at all counts as idle.
        if ladder is None:
            quiet = 0.0
        else:
            quiet = quiet_per_s(ladder.rungs[0].rate_per_s)
        if seen is None:
            requests = 0
        else:
            requests = seen.arrived or 0
        # Which requests were late is known to nobody here: above the limit all of the period count as missed.
        over = bool(self._minute.violated)
        self._ledger = self._ledger.seen(
            sight.now_s, sight.period_s, sight.joules or 0.0, requests, requests if over else 0, state.study_runs, quiet
        )
        self._studied(sight, state.study_runs)
        if not state.study_wanted or state.study_runs:
            return
        since_s = self._since_midnight_s(self._wall())
        if self._ledger.offer(sight.now_s, since_s, self._pattern, self._study_s, self._study_j):
            yield StudyOffered()

    def _studied(self, sight: ControlPeriod, runs: bool) -> None:
        """Note how long a study takes and how much energy, for the next is taken to be like the last."""
        if runs:
            if not self._studied_s:  # what was seen beside the study before is none of this one's
                self._ledger = replace(self._ledger, beside_requests=0.0, beside_missed=0.0)
            self._studied_s += sight.period_s
            self._studied_j += sight.joules or 0.0
        elif self._studied_s:
            self._study_s = self._studied_s
            self._study_j = self._studied_j
            self._studied_s = self._studied_j = 0.0

    @staticmethod
    def _since_midnight_s(wall_s: float) -> float:
        return wall_s - midnight_s(wall_s)


# Not since when it is idle: that is a time of the loop's clock, which begins anywhere in another process.
_LASTING = ("all_j", "explored_j", "requests", "missed", "explored_s", "loaded_s")
_ADDED = ("sent", "late")
"""What ledgers of older versions do not have."""


def _named(board: str) -> str:
    """Return the part of a URI that tells boards apart; empty for that of an actuator whose board is not known yet."""
    body = without_options(board)
    if body.startswith("actuator:"):
        return ""
    return body


def _pattern(kept: Any) -> DailyLoad:
    return DailyLoad(tuple((_amount(rate), _amount(seconds)) for rate, seconds in kept))


def _ledger(kept: Any, allowance: ExplorationAllowance) -> ExplorationLedger:
    newer = {name: _amount(kept.get(name, 0.0)) for name in _ADDED}
    return ExplorationLedger(allowance, **{name: _amount(kept[name]) for name in _LASTING}, **newer)


def _counts(kept: Any) -> tuple[str, dict[str, tuple[float, float]]]:
    counted = kept[_COUNTED]
    by = {str(by): (_amount(sent), _amount(late)) for by, (sent, late) in dict(counted["by"]).items()}
    return str(counted["study"]), by


def _amount(kept: Any) -> float:
    """Return a figure that was kept.

    Raises:
        ValueError, OverflowError: If it is none, or below 0 or endless: to Python, NaN and Infinity are JSON.
    """
    if not isinstance(kept, (int, float)) or not 0 <= kept < math.inf:
        raise ValueError(f"{shortened(kept)} is no amount")
    return float(kept)


def _restored(kept: Any, read: Callable[[Any], T]) -> T | None:
    """Return what was kept; None if nothing was, or something that cannot be read any more."""
    try:
        if kept is None:
            return None
        return read(kept)
    except (*MALFORMED, PolythrottleError):
        return None
