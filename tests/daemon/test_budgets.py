import math
import os
from pathlib import Path

import pytest

from polythrottle.daemon.budgets import Budget, Carbon
from polythrottle.daemon.commands import SetBudget
from polythrottle.domain.errors import BadFile, InvalidInput
from polythrottle.domain.ladder import Ladder, PointPerformance, Rung
from polythrottle.domain.load.energy_ration import DAY_S, DailyLoad
from polythrottle.domain.space import OperatingPoint


def _ladder() -> Ladder:
    rungs = []
    for rate, interval_s, idle_w in ((1.0, 0.3, 5.0), (4.0, 0.1, 10.0), (20.0, 0.02, 20.0)):
        point = OperatingPoint({"gpu_max_hz": round(1e9 / interval_s), "batch_size": 1})
        service = PointPerformance(point, 1, interval_s, interval_s, interval_s, idle_w * interval_s + 2.0, idle_w)
        rungs.append(Rung(rate, service, 0.0, idle_w + 2.0 * rate, 0.5))
    return Ladder(0.7, tuple(rungs))


def _day(time_s: float) -> float:
    return time_s % DAY_S


def _budget(wish: SetBudget, now_s: float = 0.0) -> Budget:
    found = Budget.of(wish, now_s, now_s - now_s % DAY_S)
    assert found is not None
    return found


def _lived(budget: Budget, hours: float, rate: float, real: float = 1.0) -> tuple[Budget, float]:
    """Return the budget after hours at a rate, minute by minute, and the joules drawn; the device draws ``real``."""
    ladder, joules = _ladder(), 0.0
    for minute in range(round(hours * 60)):
        budget = budget.planned(60.0 * minute, _day, DailyLoad(), rate, ladder)
        rung = ladder.rungs[ladder.best(rate, rate)]
        predicted_w = rung.power_at(rate) if budget.limit_w is None else min(rung.power_at(rate), budget.limit_w)
        used_j = 60.0 * predicted_w * real
        joules += used_j
        budget = budget.drawn(used_j, 60.0 * predicted_w)
    return budget, joules


def test_a_battery_lasts_as_long_as_it_must() -> None:
    """Nine hours on 250 Wh, where the SLO would take 360, at a device that draws 8 % more than predicted."""
    budget, joules = _lived(_budget(SetBudget(battery_wh=250.0, last_s=9 * 3600.0)), 9.0, 10.0, real=1.08)
    assert joules / 3600 == pytest.approx(250.0, rel=0.01)
    assert joules / 3600 <= 250.0
    assert budget.factor == pytest.approx(1.08, abs=0.01)


def test_a_battery_with_enough_limits_nothing() -> None:
    """There is no cap, and the words say what is left and what is expected."""
    budget, _ = _lived(_budget(SetBudget(battery_wh=400.0, last_s=9 * 3600.0)), 1.0, 10.0)
    assert budget.limit_w is None
    shown = budget.shown(3600.0)
    assert shown.met is True
    assert "left for 8 h 00 min" in shown.words


@pytest.mark.slow
def test_watt_hours_a_day_begin_anew_at_midnight() -> None:
    """Two days keep to twice the ration."""
    _, joules = _lived(_budget(SetBudget(wh_per_day=500.0)), 48.0, 10.0)
    assert joules / 3600 == pytest.approx(1000.0, rel=0.02)


def test_what_cannot_be_met_is_said_with_the_nearest_that_can() -> None:
    """The shown budget is not met and names energy and time that would do."""
    budget = _budget(SetBudget(battery_wh=80.0, last_s=9 * 3600.0)).planned(0.0, _day, DailyLoad(), 10.0, _ladder())
    shown = budget.shown(0.0)
    assert shown.met is False
    assert "360 Wh would hold it for 9 h 00 min, or 80 Wh for 2 h 00 min" in shown.words
    assert shown.words.startswith("80 Wh to last 9 h: ")


def test_power_goes_beside_energy() -> None:
    """The lower of both limits holds."""
    budget = _budget(SetBudget(power_w=10.0, battery_wh=400.0, last_s=9 * 3600.0))
    assert budget.planned(0.0, _day, DailyLoad(), 10.0, _ladder()).limit_w == 10.0
    assert Budget.of(SetBudget(), 0.0, 0.0) is None


def test_a_battery_that_is_over_limits_nothing_and_says_so() -> None:
    """After its time nobody knows what is left."""
    budget = _budget(SetBudget(battery_wh=80.0, last_s=3600.0)).planned(7200.0, _day, DailyLoad(), 1.0, _ladder())
    assert budget.limit_w is None
    assert "over" in budget.shown(7200.0).words


def test_a_clock_set_back_plans_anew() -> None:
    """Wall time that jumps neither stops planning nor makes more energy."""
    budget = _budget(SetBudget(battery_wh=250.0, last_s=9 * 3600.0), now_s=1e6)
    for now_s in (1e6, 1e6 + 60.0, 1e6 - 7200.0, 1e6 + 120.0):
        budget = budget.planned(now_s, _day, DailyLoad(), 10.0, _ladder())
        assert budget.limit_w is not None
        assert budget.limit_w < 40.0


def test_a_broken_meter_does_not_move_the_plan_far() -> None:
    """What is drawn over what was predicted is believed within a factor of two."""
    budget = _budget(SetBudget(battery_wh=250.0, last_s=9 * 3600.0))
    for _ in range(200):
        budget = budget.drawn(1e9, 1.0)
    assert budget.factor <= 2.0


@pytest.mark.parametrize(
    ("wish", "words"),
    [
        (SetBudget(power_w=0.0), "power must be above 0"),
        (SetBudget(power_w=math.nan), "power must be above 0"),
        (SetBudget(battery_wh=80.0), "go together"),
        (SetBudget(last_s=80.0), "go together"),
        (SetBudget(battery_wh=80.0, last_s=60.0, wh_per_day=3.0), "either a battery or"),
        (SetBudget(wh_per_day=math.inf), "wh-per-day must be above 0"),
        (SetBudget(power_w=1e-300), "--power must be at least 1 mW"),
        (SetBudget(battery_wh=1.0, last_s=9000 * 86400.0), "--last must be at most 366 days"),
        (SetBudget(carbon="/nope"), "carbon shares out energy"),
    ],
)
def test_a_budget_that_makes_no_sense_is_refused(wish: SetBudget, words: str) -> None:
    """In one clear line."""
    with pytest.raises(InvalidInput, match=words):
        Budget.of(wish, 0.0, 0.0)


def _table(folder: Path, text: str) -> Path:
    path = folder / "carbon.csv"
    path.write_text(text)
    return path


def test_carbon_moves_energy_into_the_clean_hours(tmp_path: Path) -> None:
    """With the same ration less is drawn in dirty hours, and the ration is kept."""
    rows = "".join(f"{3600 * hour},{100 if hour < 12 else 400}\n" for hour in range(25))
    path = _table(tmp_path, f"time,g_per_kwh\n{rows}")
    budget, used = _budget(SetBudget(wh_per_day=700.0, carbon=str(path))), []
    for hour in range(24):
        budget = budget.planned(3600.0 * hour, _day, DailyLoad(), 10.0, _ladder())
        used.append(3600.0 * (40.0 if budget.limit_w is None else min(40.0, budget.limit_w)))
        budget = budget.drawn(used[-1], used[-1])
    assert sum(used[:12]) > 1.3 * sum(used[12:])
    assert sum(used) / 3600 == pytest.approx(700.0, rel=0.02)


def test_carbon_reads_wall_times_and_knows_where_it_ends(tmp_path: Path) -> None:
    """ISO 8601 with a zone; outside the table nothing is known."""
    path = _table(tmp_path, "time,g_per_kwh\n1970-01-01T00:00:00+00:00,300\n1970-01-01T01:00:00+00:00,200\n")
    carbon = Carbon.read(path)
    assert [carbon.at(time_s) for time_s in (-1.0, 0.0, 3599.0, 3600.0, 7199.0, 7200.0)] == [
        *(None, 300.0, 300.0, 200.0, 200.0, None)
    ]


@pytest.mark.parametrize(
    "text",
    [
        "",
        "time,grams\n0,1\n1,2\n",
        "time,g_per_kwh\n0,1\n",
        "time,g_per_kwh\n1,1\n0,2\n",
        "time,g_per_kwh\n0,0\n1,2\n",
        "time,g_per_kwh\n0,nan\n1,2\n",
        "time,g_per_kwh\nnoon,1\n1,2\n",
        "time,g_per_kwh\n0,1,2\n1,2\n",
        "time,g_per_kwh\ninf,1\n1,2\n",
    ],
)
def test_a_table_that_is_none_is_refused(tmp_path: Path, text: str) -> None:
    """The error names the file."""
    with pytest.raises(BadFile, match=r"carbon\.csv"):
        Carbon.read(_table(tmp_path, text))


def test_carbon_without_energy_to_share_out_is_refused(tmp_path: Path) -> None:
    """A cap on power alone has nothing to move."""
    path = _table(tmp_path, "time,g_per_kwh\n0,1\n1,2\n")
    with pytest.raises(InvalidInput, match="carbon shares out energy"):
        Budget.of(SetBudget(power_w=10.0, carbon=str(path)), 0.0, 0.0)
    with pytest.raises(BadFile, match="cannot be read: No such file"):
        Budget.of(SetBudget(wh_per_day=10.0, carbon=str(tmp_path / "none.csv")), 0.0, 0.0)


def test_what_is_no_file_is_not_waited_for(tmp_path: Path) -> None:
    """A device without end or a pipe without a writer would hold up the control loop for ever."""
    os.mkfifo(tmp_path / "pipe")
    for path in (Path("/dev/zero"), tmp_path / "pipe", tmp_path, Path("x\0y")):
        with pytest.raises(BadFile):
            Carbon.read(path)
