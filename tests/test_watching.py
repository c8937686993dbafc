"""Drift against a profile's predictions, and two profiles in turns."""

import math
import random
from dataclasses import replace
from pathlib import Path

import pytest
from daemons import EPOCH_S, LADDER, TUNED, House

from polythrottle.daemon.contest import TURN_S, Contest
from polythrottle.daemon.drift import SAMPLE_S
from polythrottle.daemon.looking import Sight
from polythrottle.daemon.ports import Seen
from polythrottle.daemon.record import Record
from polythrottle.daemon.watching import Watching

RUNG = LADDER.rungs[1]
RATE_PER_S = 40.0
NOISE = 0.015


def sight(now_s: float, factor: float, rate_per_s: float = RATE_PER_S, mean_s: float = 0.03) -> Sight:
    """Return a minute of load that drew so many times what the rung predicts."""
    joules = factor * RUNG.power_at(rate_per_s) * SAMPLE_S
    seen = Seen(int(rate_per_s * SAMPLE_S), int(rate_per_s * SAMPLE_S), 0, 0, 0.05, mean_s)
    return Sight(now_s, SAMPLE_S, seen, None, joules / SAMPLE_S, None, joules)


def watching(folder: Path) -> Watching:
    """Return a watch over the ladder that has learnt nothing yet."""
    watch = Watching(Record(folder / "daemon.db", lambda: EPOCH_S))
    watch.over(LADDER)
    return watch


def minutes(watch: Watching, random_: random.Random, factor: float, count: int) -> int | None:
    """Return after how many minutes of load a drift was found; None if it was not."""
    for number in range(1, count + 1):
        mean_s = 0.03 * math.exp(random_.gauss(0, NOISE))
        seen = sight(60.0 * number, factor * math.exp(random_.gauss(0, NOISE)), mean_s=mean_s)
        if watch.seen(seen, 1, RUNG) is not None:
            return number
    return None


@pytest.mark.parametrize("factor", [1.08, 1 / 1.08])
def test_a_drift_of_eight_percent_is_found_within_five_minutes(tmp_path: Path, factor: float) -> None:
    """After its baseline is learnt, 8 % more or less energy raises an alarm within five minutes on average."""
    delays = []
    for seed in range(20):
        watch, random_ = watching(tmp_path / str(seed)), random.Random(seed)
        assert minutes(watch, random_, 1.3, 60) is None
        found = minutes(watch, random_, 1.3 * factor, 60)
        assert found is not None
        delays.append(found)
        assert "energy" in watch.words
    assert sum(delays) / len(delays) <= 5.0


def test_what_a_prediction_is_off_by_from_the_beginning_is_no_drift(tmp_path: Path) -> None:
    """Two weeks of load with a profile that is wrong by a constant factor raise about one false alarm at most."""
    alarms = 0
    for seed in range(4):
        watch, random_ = watching(tmp_path / str(seed)), random.Random(100 + seed)
        found = minutes(watch, random_, 0.7, 7 * 24 * 60)
        alarms += found is not None
    assert alarms <= 3


def test_a_slower_answer_is_a_drift_too(tmp_path: Path) -> None:
    """Latency that rises by 30 % at the same energy is found."""
    watch, random_ = watching(tmp_path), random.Random(1)
    for number in range(30):
        watch.seen(sight(60.0 * number, 1.0, mean_s=0.03 * math.exp(random_.gauss(0, NOISE))), 1, RUNG)
    found = None
    for number in range(20):
        found = found or watch.seen(sight(60.0 * number, 1.0, mean_s=0.039), 1, RUNG)
    assert found is not None
    assert "latency" in found


def test_what_was_learnt_survives_a_restart(tmp_path: Path) -> None:
    """A watch over the same ladder goes on from its baseline; one over another begins anew."""
    record = Record(tmp_path / "daemon.db", lambda: EPOCH_S)
    first, random_ = Watching(record), random.Random(3)
    first.over(LADDER)
    minutes(first, random_, 1.0, 25)
    record.close()
    again = Record(tmp_path / "daemon.db", lambda: EPOCH_S)
    second = Watching(again)
    second.over(LADDER)
    assert minutes(second, random_, 1.1, 10) is not None
    other = Watching(again)
    other.over(replace(LADDER, slo_s=0.2))
    assert minutes(other, random_, 1.1, 10) is None
    again.close()


def test_without_load_nothing_is_learnt(tmp_path: Path) -> None:
    """Idle minutes, unknown joules and unknown rates are no samples."""
    watch = watching(tmp_path)
    for number in range(30):
        assert watch.seen(sight(60.0 * number, 1.0, rate_per_s=0.0), 1, RUNG) is None
        assert watch.seen(replace(sight(60.0 * number, 1.0), joules=None), 1, RUNG) is None
    assert watch._learnt == {}


def contested(new: float, old: float, seed: int = 0, trouble: bool = False) -> tuple[bool | None, int]:
    """Return how a contest between profiles that draw so many times the prediction ends, and after how many turns."""
    contest, random_ = Contest(TUNED, replace(TUNED, name="b.toml")), random.Random(seed)
    for number in range(200 * 65):
        factor = (new if contest.turn is contest.new else old) * math.exp(random_.gauss(0, 0.02 * math.sqrt(60)) / 60)
        power_w = factor * LADDER.rungs[LADDER.best(RATE_PER_S, RATE_PER_S)].power_at(RATE_PER_S)
        seen = Sight(float(number), 1.0, Seen(int(RATE_PER_S)), None, power_w, None, power_w)
        contest.seen(seen, trouble and contest.turn is contest.new and number % 130 == 10)
        if contest.over is not None:
            return contest.over, int(number // (TURN_S + 5))
    return None, 200


def test_a_worse_profile_is_rolled_back() -> None:
    """One that draws 6 % more at the same load loses; one that draws 6 % less is kept."""
    assert contested(1.06, 1.0)[0] is False
    assert contested(0.94, 1.0)[0] is True


def test_one_that_is_as_good_is_kept() -> None:
    """Without a difference the new one is kept in nearly all contests."""
    assert sum(contested(1.0, 1.0, seed)[0] is True for seed in range(20)) >= 18


def test_one_that_breaks_the_limit_twice_is_rolled_back() -> None:
    """Whatever it saves, a profile under which a guard trips twice goes."""
    assert contested(1.0, 1.0, trouble=True)[0] is False


def test_nothing_is_compared_without_load() -> None:
    """Idle time decides nothing and changes no sides."""
    contest = Contest(TUNED, replace(TUNED, name="b.toml"))
    for number in range(1000):
        contest.seen(Sight(float(number), 1.0, Seen(0), None, 10.0, None, 10.0), False)
    assert contest.over is None
    assert contest.turn is contest.new


def test_the_loop_asks_for_a_study_when_energy_drifts(tmp_path: Path) -> None:
    """A board that draws 8 % more than it did is noticed by the loop itself, within minutes of load."""
    house = House(tmp_path / "daemon")
    house.traffic.rate_per_s = RATE_PER_S
    house.turns(20)
    predicted_w = LADDER.rungs[1].power_at(RATE_PER_S)
    house.board.power_w = predicted_w
    house.turns(20 * 60)
    assert house.words("drift") == []
    house.board.power_w = 1.08 * predicted_w
    house.turns(6 * 60)
    assert len(house.words("drift")) == 1
    assert "energy" in house.desk.status.drift
    assert house.runner.acting.state.study_wanted or house.words("study")
