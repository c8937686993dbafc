"""What is added up turn by turn: minutes, savings, budgets, and when to explore."""

import math
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from daemons import LADDER, TUNED

from polythrottle.daemon.commands import SetBudget
from polythrottle.daemon.control.events import PowerBudget, StudyOffered
from polythrottle.daemon.control.state import Phase, State
from polythrottle.daemon.energy_accounts import Accounts, Saving, midnight_s
from polythrottle.daemon.history_store import MINUTES_MOST, HistoryStore, Totals
from polythrottle.daemon.observation import ControlPeriod, RequestStats
from polythrottle.domain.errors import InvalidInput
from polythrottle.domain.measurement import EnergyKind, Interval, Latency, Measurement
from polythrottle.domain.profile import Profile
from polythrottle.domain.space import OperatingPoint

UP = State(phase=Phase.FOLLOWING, plan=TUNED.plan)
DEFAULT = Measurement(
    *(Latency(0.01, p99_s=0.02), 0.4, 100.0, 40.0),
    boundary="module",
    idle_power_w=20.0,
    intervals={"energy": Interval(0.392, 0.408)},
)


class Day:
    """Accounts on a wall clock that a test moves."""

    def __init__(self, folder: Path) -> None:
        self.wall_s = midnight_s(1_700_000_000.0) + 12 * 3600.0
        self.begun_s = self.wall_s
        self.record = HistoryStore(folder / "daemon.db", lambda: self.wall_s)
        self.accounts = Accounts(self.record, lambda: self.wall_s)

    def second(self, power_w: float | None = 10.0, rate: int = 20, state: State = UP) -> list[object]:
        """Let a second pass, and return what the controller is told."""
        self.wall_s += 1.0
        seen = RequestStats(rate, rate, 1 if rate else 0, 0, 0.05, 0.02)
        sight = ControlPeriod(self.wall_s - self.begun_s, 1.0, seen, None, power_w, power_w, power_w)
        return list(self.accounts.turn(sight, state))


@pytest.fixture
def day(tmp_path: Path) -> Iterator[Day]:
    """Return accounts at noon."""
    made = Day(tmp_path)
    yield made
    made.record.close()


def profile(default: Measurement | None = DEFAULT) -> Profile:
    """Return a profile whose default point draws 20 W idle and 0.2 J per request besides."""
    return Profile("jetson", "model.onnx", OperatingPoint({}), DEFAULT, default)


def test_saving_is_what_the_default_would_have_drawn_less_what_was(day: Day) -> None:
    """At 20 requests a second the default draws 24 W; ten seconds at 10 W save 140 J, with the profile's doubt."""
    day.accounts.follow(profile())
    for _ in range(10):
        day.second(power_w=10.0, rate=20)
    shown = day.accounts.shown_saving()
    assert shown.joules == pytest.approx(140.0)
    assert shown.requests == 200
    assert shown.low is not None
    assert shown.high is not None
    # Half of 2 % of the default's energy, and what windows differ by, twice 2 %: 240 J times 6 % and a little.
    assert shown.high - 140.0 == pytest.approx(140.0 - shown.low)
    assert 240 * 0.05 < shown.high - 140.0 < 240 * 0.07
    assert "measured energy" in shown.words


@pytest.mark.parametrize(
    ("default", "words"),
    [
        (None, "no profile with a measurement"),
        (replace(DEFAULT, idle_power_w=None), "lacks the idle power"),
        (replace(DEFAULT, energy_kind=EnergyKind.RELATIVE), "relative"),
    ],
)
def test_what_cannot_be_known_is_not_claimed(day: Day, default: Measurement | None, words: str) -> None:
    """Without the default's idle power or joules no saving is shown, and why."""
    day.accounts.follow(profile(default))
    day.second()
    shown = day.accounts.shown_saving()
    assert (shown.joules, shown.low, shown.high) == (None, None, None)
    assert words in shown.words


def test_without_intervals_a_saving_has_none(day: Day) -> None:
    """A profile without intervals gives a figure that says so."""
    day.accounts.follow(profile(replace(DEFAULT, intervals={})))
    day.second()
    shown = day.accounts.shown_saving()
    assert shown.joules is not None
    assert (shown.low, shown.high) == (None, None)
    assert "without an interval" in shown.words


def test_nothing_is_saved_before_a_request() -> None:
    """Totals without requests show no figure."""
    shown = Saving.of(profile()).shown(Totals(5.0, 1.0), 0)
    assert (shown.joules, shown.words) == (None, "unknown: no request was answered yet")


@pytest.mark.parametrize(
    "away",
    [State(plan=None), replace(UP, phase=Phase.YIELDED), replace(UP, leased=False)],
    ids=["down", "yielded", "no"],
)
def test_nothing_is_saved_while_the_board_is_as_found(day: Day, away: State) -> None:
    """Released, given way with, or without the right to set it: those seconds are left out, their joules are not."""
    day.accounts.follow(profile())
    day.accounts.wished(SetBudget(battery_wh=1.0, last_s=3600.0))
    for _ in range(5):
        day.second(state=away)
    assert day.accounts.shown_saving().joules is None
    assert day.accounts.shown_saving().words.startswith("unknown: ")
    day.second()
    assert day.accounts.shown_saving().joules == pytest.approx(14.0)
    assert day.accounts.energy_j == pytest.approx(60.0)
    assert day.accounts.budget is not None
    assert day.accounts.budget.left_j() == pytest.approx(3600.0 - 60.0)


def test_joules_between_two_turns_are_of_the_budget_too(day: Day) -> None:
    """A look before the period's end begins the next one, so that what was drawn until then is counted there."""
    day.accounts.wished(SetBudget(battery_wh=1.0, last_s=3600.0))
    day.accounts.between(ControlPeriod(0.1, 0.1, RequestStats(2, 2, 0, 0, 0.05, 0.02), None, 30.0, 30.0, 3.0), UP)
    assert day.accounts.budget is not None
    assert day.accounts.budget.left_j() == pytest.approx(3600.0 - 3.0)


def test_unknown_power_is_no_saving(day: Day) -> None:
    """A second whose joules are unknown counts requests, and neither joules nor savings."""
    day.accounts.follow(profile())
    day.second(power_w=None)
    assert (day.accounts.energy_j, day.accounts.requests) == (None, 20)
    assert day.accounts.shown_saving().joules is None


def test_savings_begin_again_at_midnight(day: Day) -> None:
    """The day's figure counts from local midnight, over a restart of the daemon too."""
    day.accounts.follow(profile())
    for _ in range(120):
        day.second()
    day.accounts.close()
    day.record.flush()
    again = Accounts(day.record, lambda: day.wall_s)
    again.follow(profile())
    assert again.shown_saving().joules == pytest.approx(120 * 14.0)
    day.wall_s += 12 * 3600.0
    assert again.shown_saving().joules is None


def test_minutes_are_noted_as_they_end(day: Day) -> None:
    """Each minute has its joules, its requests, its p99 and whether that was above the limit."""
    for _ in range(180):
        day.second(power_w=12.0, rate=20)
        day.accounts.limited(0.04)
    day.record.flush()
    rows = day.record.history(10)
    assert rows[1]["power_w"] == pytest.approx(12.0)
    assert rows[1]["requests"] == pytest.approx(1200, abs=25)
    assert (rows[1]["p99_s"], rows[1]["violated"]) == (0.05, True)


def test_a_clock_set_back_loses_no_minute(day: Day) -> None:
    """After the wall clock is set back an hour, minutes are added to those that were there."""
    for _ in range(90):
        day.second()
    day.wall_s -= 60.0
    for _ in range(90):
        day.second()
    day.accounts.close()
    day.record.flush()
    assert sum(row["requests"] for row in day.record.history(100)) == 180 * 20


def test_what_ended_while_a_clock_jumped_is_counted(day: Day) -> None:
    """The turn that sees it lasts no time and may be all of a minute: its requests are on record all the same."""
    day.wall_s = midnight_s(day.wall_s) + 59.5
    seen, sight_s = RequestStats(37, 37, 0, 0, 0.05, 0.02), day.wall_s - day.begun_s
    list(day.accounts.turn(ControlPeriod(sight_s, 90.0, seen, None, None, None, None, jumped=True), UP))
    day.second()
    day.accounts.close()
    day.record.flush()
    assert sum(row["requests"] for row in day.record.history(MINUTES_MOST)) == 37 + 20


def test_a_power_budget_is_told_once(day: Day) -> None:
    """The controller learns of a limit when it changes."""
    day.accounts.wished(SetBudget(power_w=15.0))
    assert day.second() == [PowerBudget(15.0)]
    assert day.second() == []
    day.accounts.wished(SetBudget())
    assert day.second() == [PowerBudget(None)]


def test_a_battery_too_small_caps_power_and_says_the_nearest(day: Day) -> None:
    """What cannot be met is capped, and the words name what would do."""
    day.accounts.wished(SetBudget(battery_wh=5.0, last_s=9 * 3600.0))
    told = [event for _ in range(3) for event in day.second(power_w=20.0, rate=50)]
    assert any(isinstance(event, PowerBudget) and event.limit_w is not None for event in told)
    shown = day.accounts.shown_budget(None)
    assert shown.met is False
    assert "would hold it" in shown.words
    assert shown.left_j is not None
    assert shown.left_j < 5 * 3600


def test_a_budget_that_makes_no_sense_is_refused(day: Day) -> None:
    """The one there was goes on."""
    day.accounts.wished(SetBudget(power_w=15.0))
    with pytest.raises(InvalidInput):
        day.accounts.wished(SetBudget(battery_wh=80.0))
    assert day.accounts.budget is not None


def test_a_study_is_offered_after_idle_time_if_one_is_wanted(day: Day) -> None:
    """Ten minutes without requests offer a study once there is a wish for one; under load nothing does."""
    wanted = replace(UP, study_wanted="drift")
    assert not any(isinstance(event, StudyOffered) for _ in range(900) for event in day.second(state=wanted, rate=50))
    assert not any(isinstance(event, StudyOffered) for _ in range(900) for event in day.second(rate=0))
    assert any(isinstance(event, StudyOffered) for _ in range(900) for event in day.second(state=wanted, rate=0))


def test_values_that_cannot_be_read_any_more_begin_anew(tmp_path: Path) -> None:
    """Kept values of another shape are passed over, not an error."""
    record = HistoryStore(tmp_path / "daemon.db")
    for name in ("pattern", "ledger", "budget"):
        record.keep(name, {"x": "y"})
    accounts = Accounts(record, lambda: 0.0)
    assert accounts.resume_budget("jetson") == ""
    assert accounts.budget is None
    assert LADDER.rungs
    record.close()


@pytest.mark.parametrize("odd", [math.inf, math.nan, 10**400], ids=["infinite", "no number", "huge"])
def test_kept_figures_that_nothing_comes_to_begin_anew(day: Day, odd: float) -> None:
    """A rate without end would make every look in its half-hour fail, and such a day allow studies without end."""
    for name in ("pattern", "ledger"):
        day.record.keep(name, None)
    day.accounts.close()
    ledger = {**day.record.kept("ledger"), "requests": odd}
    day.record.keep("pattern", [[odd, 600.0]] * 48)
    day.record.keep("ledger", ledger)
    day.accounts = Accounts(day.record, lambda: day.wall_s)
    day.second()
    assert day.accounts.late_left(1000.0) == pytest.approx(1.02)


def test_what_a_study_says_twice_is_put_down_once(day: Day) -> None:
    """Each says how much it was so far: also after a restart, from another host, and with a count that goes back."""
    for _ in range(2):
        day.accounts.studied("study-1", "desk", 1000.0, 3.0)
    assert (day.accounts.shown_exploring.requests, day.accounts.shown_exploring.late) == (1000.0, 3.0)
    day.accounts = Accounts(day.record, lambda: day.wall_s)  # without an end: as it was killed
    for late in (3.0, 2.0, 5.0):
        day.accounts.studied("study-1", "desk", 1000.0, late)
    assert day.accounts.shown_exploring.late == 5.0
    day.accounts.studied("study-1", "other", 100.0, 1.0)
    day.accounts.studied("study-1", "desk", 1000.0, 5.0)
    assert day.accounts.shown_exploring.late == 6.0
    day.accounts.studied("study-2", "desk", 10.0, 1.0)
    shown = day.accounts.shown_exploring
    assert (shown.requests, shown.late) == (1110.0, 7.0)
    assert shown.late_left == pytest.approx(0.001 * (1110 + 30 * 1005) - 7)
    assert day.accounts.late_left(1000.0) == 0.0


def test_a_ledger_of_an_older_version_goes_on(day: Day) -> None:
    """It holds nothing that studies have counted, and an older one reads what this one keeps."""
    day.second()
    day.accounts.close()
    kept = day.record.kept("ledger")
    day.record.keep("ledger", {name: kept[name] for name in kept if name not in ("sent", "late", "counted")})
    again = Accounts(day.record, lambda: day.wall_s)
    assert (again.shown_exploring.requests, again.shown_exploring.late) == (20.0, 0.0)
    day.record.keep("ledger", {**kept, "counted": {"study": "study-1", "by": [1]}})
    assert Accounts(day.record, lambda: day.wall_s).shown_exploring.requests == 20.0


def test_many_hosts_of_one_study_take_no_more_room(day: Day) -> None:
    """Of so many it is known what was put down; who was not heard of for longest begins at none."""
    for number in range(40):
        day.accounts.studied("study-1", f"desk-{number}", 10.0, 1.0)
    assert len(day.record.kept("ledger")["counted"]["by"]) == 16
    assert day.accounts.shown_exploring.late == 40.0


def test_the_same_battery_asked_for_again_is_gone_on_with(day: Day) -> None:
    """A daemon that is started again with the same words does not fill it up; one that is over is begun anew."""
    battery = SetBudget(battery_wh=80.0, last_s=3600.0)
    assert not day.accounts.goes_on(battery)
    day.accounts.wished(battery)
    assert day.accounts.goes_on(battery)
    assert not day.accounts.goes_on(replace(battery, battery_wh=70.0))
    day.wall_s += 3601.0
    assert not day.accounts.goes_on(battery)
    day.accounts.wished(SetBudget(power_w=15.0))
    assert day.accounts.goes_on(SetBudget(power_w=15.0))


ODD = {"spent_j": "x"}, {"spent_j": math.nan}, {"spent_j": -1.0}, {"at_s": math.inf}, {"at_s": 1e18}, {"at_s": 10**400}


@pytest.mark.parametrize(
    "odd", [*ODD, {"wish": {"power_w": "x"}}, {"wish": {"carbon": 7}}, {"wish": {"volts": 12}}], ids=str
)
def test_a_kept_budget_that_cannot_be_read_is_told_of_and_left_as_it_is(day: Day, odd: dict[str, Any]) -> None:
    """It does not end the daemon, nothing is limited, and the wish stays on disk until another one is made."""
    day.accounts.wished(SetBudget(power_w=15.0))
    kept = {**day.record.kept("budget"), **odd}
    day.record.keep("budget", kept)
    again = Accounts(day.record, lambda: day.wall_s)
    assert "cannot be followed" in again.resume_budget("jetson")
    assert again.budget is None
    again.close()
    assert day.record.kept("budget") == kept
    again.wished(SetBudget())
    assert day.record.kept("budget")["wish"] is None
