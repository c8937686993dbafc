"""Drift against a profile's predictions, and two profiles in turns."""

import math
import random
import zlib
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from daemons import EPOCH_S, LADDER, TUNED, House

from polythrottle.daemon.control.drift_detector import MINUTE_S, Chart, Offsets, Quantity
from polythrottle.daemon.history_store import HistoryStore
from polythrottle.daemon.loop.command_handler import TURN_S, Contest
from polythrottle.daemon.loop.drift_monitor import DriftMonitor
from polythrottle.daemon.observation import ControlPeriod, RequestStats
from polythrottle.domain.ladder import Rung

RUNG = LADDER.rungs[1]
RATE_PER_S = 40.0
NOISE = 0.015


def sight(
    now_s: float,
    factor: float,
    rate_per_s: float = RATE_PER_S,
    mean_s: float = 0.03,
    length_s: float = MINUTE_S,
    rung: Rung = RUNG,
) -> ControlPeriod:
    """Return a time of load, a minute unless said, that drew so many times what a rung predicts."""
    joules = factor * rung.power_at(rate_per_s) * length_s
    seen = RequestStats(int(rate_per_s * length_s), int(rate_per_s * length_s), 0, 0, 0.05, mean_s)
    return ControlPeriod(now_s, length_s, seen, None, joules / length_s, None, joules)


def watching(folder: Path) -> DriftMonitor:
    """Return a watch over the ladder that has learnt nothing yet."""
    watch = DriftMonitor(HistoryStore(folder / "daemon.db", lambda: EPOCH_S))
    watch.over(LADDER)
    return watch


def minutes(watch: DriftMonitor, random_: random.Random, factor: float, count: int) -> int | None:
    """Return after how many minutes of load a drift was found; None if it was not."""
    for number in range(1, count + 1):
        mean_s = 0.03 * math.exp(random_.gauss(0, NOISE))
        seen = sight(60.0 * number, factor * math.exp(random_.gauss(0, NOISE)), mean_s=mean_s)
        if watch.seen(seen, 1, RUNG) is not None:
            return number
    return None


class Moving:
    """A load that changes its rung, each of which draws so many times what it predicts.

    Args:
        factors: By the rung's number.
        stay_s: How long it stays on each on average.
        seed: Of rungs and noise.
        rungs: How many of them it comes to.
    """

    def __init__(self, factors: tuple[float, ...], stay_s: float, seed: int, rungs: int = 3) -> None:
        self.rungs = rungs
        self._factors, self._stay_s, self._random = factors, stay_s, random.Random(seed)
        self._number, self._left_s, self._now_s = 0, 0.0, 0.0

    def go(
        self, watch: DriftMonitor, length_s: float, factor: Callable[[float], float] = lambda _: 1.0
    ) -> float | None:
        """Let a time pass; return after how long a drift was found, None if it was not.

        Args:
            watch: Is shown each second.
            length_s: How much time.
            factor: What joules count for, after some of it.
        """
        for second in range(round(length_s)):
            if self._left_s <= 0:
                self._number, self._left_s = (
                    self._random.randrange(self.rungs),
                    self._random.expovariate(1 / self._stay_s),
                )
            self._left_s, self._now_s = self._left_s - 1, self._now_s + 1
            rung = LADDER.rungs[self._number]
            noise = math.exp(self._random.gauss(0, NOISE * math.sqrt(MINUTE_S)))
            drawn = self._factors[self._number] * noise * factor(second)
            seen = sight(self._now_s, drawn, rung.rate_per_s, length_s=1.0, rung=rung)
            if watch.seen(seen, self._number, rung) is not None:
                return second + 1.0
        return None


@pytest.mark.parametrize("factor", [1.08, 1 / 1.08])
def test_a_drift_of_eight_percent_is_found_within_five_minutes(tmp_path: Path, factor: float) -> None:
    """After an hour, 8 % more or less energy raises an alarm within five minutes in every one of 20 cases."""
    for seed in range(20):
        watch, random_ = watching(tmp_path / str(seed)), random.Random(seed)
        assert minutes(watch, random_, 1.3, 60) is None
        found = minutes(watch, random_, 1.3 * factor, 5)
        assert found is not None
        assert "energy" in watch.words


@pytest.mark.parametrize("factor", [1.08, 1 / 1.08])
@pytest.mark.parametrize("stay_s", [7.0, 45.0])
def test_a_load_that_moves_hides_no_drift(tmp_path: Path, factor: float, stay_s: float) -> None:
    """Where the rung changes every few seconds, each off by a factor of its own, drift is found in five minutes."""
    for seed in range(5):
        watch, load = watching(tmp_path / str(seed)), Moving((0.9, 1.0, 1.15), stay_s, seed)
        assert load.go(watch, 3600.0) is None
        found = load.go(watch, 300.0, lambda _: factor)
        assert found is not None
        assert "energy" in watch.words


@pytest.mark.slow
@pytest.mark.parametrize("factor", [0.75, 1.25])
def test_a_rung_never_held_before_is_no_drift(tmp_path: Path, factor: float) -> None:
    """A rung that is off by a quarter more than the others raises no alarm when the load first gets there."""
    for seed in range(5):
        watch, load = watching(tmp_path / str(seed)), Moving((1.0, 1.0, factor), 60.0, seed, rungs=2)
        assert load.go(watch, 7200.0) is None
        load.rungs = 3
        assert load.go(watch, 3600.0) is None
        assert watch._energy.at(2)[0] == pytest.approx(math.log(factor), abs=0.02)


@pytest.mark.slow
def test_a_board_that_warms_up_is_no_drift(tmp_path: Path) -> None:
    """One that draws 6 % more at first, and less as it cools within minutes, raises no alarm in four hours."""
    for seed in range(5):
        watch, load = watching(tmp_path / str(seed)), Moving((1.0, 1.0, 1.0), 45.0, seed)
        assert load.go(watch, 4 * 3600.0, lambda second: 1 + 0.06 * math.exp(-second / 90)) is None


def test_a_sensor_that_stumbles_is_no_drift(tmp_path: Path) -> None:
    """A second that reads a hundred times too much raises no alarm, and does not become what is expected."""
    watch, load = watching(tmp_path), Moving((1.0, 1.0, 1.0), 45.0, 1)
    assert load.go(watch, 7200.0) is None
    before = watch._energy.offsets.learnt
    assert load.go(watch, 900.0, lambda second: 100.0 if second == 0 else 1.0) is None
    for number, (_, mean) in watch._energy.offsets.learnt.items():
        assert mean == pytest.approx(before[number][1], abs=0.01)


@pytest.mark.slow
def test_what_a_prediction_is_off_by_from_the_beginning_is_no_drift(tmp_path: Path) -> None:
    """Four weeks of load with a profile that is wrong by a constant factor raise a false alarm in three at most."""
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
    for number in range(30, 35):
        found = found or watch.seen(sight(60.0 * number, 1.0, mean_s=0.039), 1, RUNG)
    assert found is not None
    assert "latency" in found


def test_a_mean_latency_counts_for_a_minute_on_one_rung(tmp_path: Path) -> None:
    """A minute in which the rung changed, or of which a part was not seen, is no sample of latency."""
    watch = watching(tmp_path)
    for second in range(300):
        watch.seen(sight(float(second), 1.0, length_s=1.0), second // 50 % 2, RUNG)
    for second in range(0, 6000, 50):
        watch.seen(sight(1000.0 + second, 1.0, length_s=1.0), 1, RUNG)
    assert watch._latency == Quantity(Offsets(0.5), Chart(sample_s=MINUTE_S))
    for second in range(60):
        watch.seen(sight(10_000.0 + second, 1.0, length_s=1.0), 1, RUNG)
    assert list(watch._latency.offsets.learnt) == [1]


def test_what_was_learnt_survives_a_restart(tmp_path: Path) -> None:
    """A watch over the same ladder goes on from what it knew; one over another begins anew."""
    record = HistoryStore(tmp_path / "daemon.db", lambda: EPOCH_S)
    first, random_ = DriftMonitor(record), random.Random(3)
    first.over(LADDER)
    minutes(first, random_, 1.0, 25)
    record.close()
    again = HistoryStore(tmp_path / "daemon.db", lambda: EPOCH_S)
    second = DriftMonitor(again)
    second.over(LADDER)
    assert second._energy.offsets == first._energy.offsets
    assert second._latency.spread == first._latency.spread
    assert minutes(second, random_, 1.1, 10) is not None
    other = DriftMonitor(again)
    other.over(replace(LADDER, slo_s=0.2))
    assert minutes(other, random_, 1.1, 10) is None
    again.close()


def test_what_is_to_be_forgotten_stays_forgotten(tmp_path: Path) -> None:
    """A watch that was told to learn anew does so after a restart too, however soon that comes."""
    record = HistoryStore(tmp_path / "daemon.db", lambda: EPOCH_S)
    watch = DriftMonitor(record)
    watch.over(LADDER)
    minutes(watch, random.Random(5), 1.0, 30)
    watch.anew()
    record.close()
    again = DriftMonitor(HistoryStore(tmp_path / "daemon.db", lambda: EPOCH_S))
    again.over(LADDER)
    assert again._energy.offsets.learnt == {}


_RUNGS = {"1": [30.0, 0.1]}


@pytest.mark.parametrize(
    "kept",
    [
        {"rungs": {"1": [[0.1] * 30, [0.2] * 30]}},  # what versions up to 0.1 kept
        {"energy": {"rungs": _RUNGS, "spread": [30.0, 0.01]}},
        {"energy": {"rungs": _RUNGS}, "latency": {}},
        {"energy": {"rungs": {"1": [30.0, math.nan]}, "spread": [1, 1]}, "latency": {"rungs": {}, "spread": [0, 0]}},
        {"energy": {"rungs": _RUNGS, "spread": [30.0, -1.0]}, "latency": {"rungs": {}, "spread": [0, 0]}},
        {"energy": {"rungs": {"a": []}, "spread": "none"}, "latency": 3},
        {"energy": {"rungs": {"1": [30.0, 1e300]}, "spread": [1, 1]}, "latency": {"rungs": {}, "spread": [0, 0]}},
        {"energy": {"rungs": {}, "spread": [1, 1e308]}, "latency": {"rungs": {}, "spread": [0, 0]}},
        {"energy": [], "latency": None},
    ],
)
def test_what_cannot_be_read_any_more_is_forgotten(tmp_path: Path, kept: dict[str, object]) -> None:
    """What an earlier version kept, or what is broken, makes the watch begin anew and go on."""
    record = HistoryStore(tmp_path / "daemon.db", lambda: EPOCH_S)
    record.keep("watch", {"key": zlib.crc32(repr(LADDER).encode()), **kept})
    watch = DriftMonitor(record)
    watch.over(LADDER)
    assert watch._energy.offsets.learnt == {}
    assert minutes(watch, random.Random(1), 1.0, 30) is None
    assert watch._energy.spread.known


def test_what_has_drifted_is_not_learnt(tmp_path: Path) -> None:
    """From the alarm until it is asked to look again, the watch neither tells nor learns."""
    watch, random_ = watching(tmp_path), random.Random(4)
    minutes(watch, random_, 1.0, 60)
    assert minutes(watch, random_, 1.1, 20) is not None
    known = watch._energy.offsets
    assert minutes(watch, random_, 1.1, 100) is None
    assert watch._energy.offsets == known
    watch.again()
    assert watch.words == ""
    assert minutes(watch, random_, 1.1, 5) is not None
    watch.anew()
    assert minutes(watch, random_, 1.1, 100) is None


def test_without_load_nothing_is_learnt(tmp_path: Path) -> None:
    """Idle minutes, unknown joules and unknown rates are no samples."""
    watch = watching(tmp_path)
    for number in range(30):
        assert watch.seen(sight(60.0 * number, 1.0, rate_per_s=0.0), 1, RUNG) is None
        assert watch.seen(replace(sight(60.0 * number, 1.0), joules=None), 1, RUNG) is None
        assert watch.seen(replace(sight(60.0 * number, 1.0), seen=None), 1, RUNG) is None
    assert watch._energy == Quantity(Offsets(0.1))
    assert watch._latency.offsets.learnt == {}


def contested(new: float, old: float, seed: int = 0, trouble: bool = False) -> tuple[bool | None, int]:
    """Return how a contest between profiles that draw so many times the prediction ends, and after how many turns."""
    contest, random_ = Contest(TUNED, replace(TUNED, name="b.toml")), random.Random(seed)
    for number in range(200 * 65):
        factor = (new if contest.turn is contest.new else old) * math.exp(random_.gauss(0, 0.02 * math.sqrt(60)) / 60)
        power_w = factor * LADDER.rungs[LADDER.best(RATE_PER_S, RATE_PER_S)].power_at(RATE_PER_S)
        seen = ControlPeriod(float(number), 1.0, RequestStats(int(RATE_PER_S)), None, power_w, None, power_w)
        contest.seen(seen, trouble and contest.turn is contest.new and number % 130 == 10)
        if contest.over is not None:
            return contest.over, int(number // (TURN_S + 5))
    return None, 200


def test_a_worse_profile_is_rolled_back() -> None:
    """One that draws 6 % more at the same load loses; one that draws 6 % less is kept."""
    assert contested(1.06, 1.0)[0] is False
    assert contested(0.94, 1.0)[0] is True


@pytest.mark.slow
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
        contest.seen(ControlPeriod(float(number), 1.0, RequestStats(0), None, 10.0, None, 10.0), False)
    assert contest.over is None
    assert contest.turn is contest.new


@pytest.mark.slow
def test_the_loop_asks_for_a_study_when_energy_drifts(tmp_path: Path) -> None:
    """A board that draws 8 % more than it did is noticed by the loop itself, within five minutes of load."""
    house = House(tmp_path / "daemon")
    house.traffic.rate_per_s = RATE_PER_S
    house.turns(20)
    predicted_w = LADDER.rungs[1].power_at(RATE_PER_S)
    house.board.power_w = predicted_w
    house.turns(20 * 60)
    assert house.words("drift") == []
    house.board.power_w = 1.08 * predicted_w
    house.turns(5 * 60)
    assert len(house.words("drift")) == 1
    assert "energy" in house.desk.status.drift
    assert house.runner.executor.state.study_wanted or house.words("study")
