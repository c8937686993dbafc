"""How soon a planted drift is found, how often one is found that is not there, and what becomes of it.

    python benchmarks/drift.py [--seeds 10] [--weeks 200] [--contests 400] [--jobs 2] [--write benchmarks/drift.md]

Three parts, all simulated.

The whole daemon: the control loop, its controller, accounts, record and watch are the real ones, on the simulated AGX
Orin that serves efficientnet-b7 at 700 ms along a ladder, with the noise of its windows drawn anew each minute and with
bursts of requests. For an hour of load nothing is planted, and a drift that is told then is false; then every joule the
board draws counts for 8 % more, or for 8 % less, which stands for a fan, a worn supply, another driver. Minutes are
counted from there to the event. The daemon then wants a study; no requests come for twelve minutes then, of which it
takes ten, and it finds the points as they are now, predictions included, as a process of its own would. What it has
found is compared in turns with the old profile as always. Repaired means: the comparison has come to its end, and in
the two hours after it the board draws as near to what the profile then followed predicts as it did before, within 3 %,
and no drift is told.

The watch alone: ten seconds at a time, of which minutes differ by chance by as much as is said, from learning on. Each
week begins with nothing known, so that what is learnt wrongly is among the false alarms. A week is one of load: time
without load gives no sample. Where the rung changes, it does so after two minutes on average, to any other of the
ladder, and each rung's prediction is off by a factor of its own, of 5 % by chance. The least mean delay is that of the
best test there is for a Gaussian walk whose spread and mean are known, with the false alarms that energy above, or
below, is allowed: (h - 1)/k where e^h is k times that time and k the information on the drift in a minute (Lorden,
Procedures for reacting to a change in distribution, Annals of Mathematical Statistics 42, 1971; Moustakides, 1986).

The comparison alone: a new profile in turns with the old one, as it is compared after a study, where a turn's energy
differs by chance by as much as is said, whichever profile is followed. In bursts of the whole daemon's kind turns were
seen to differ by 4.2 to 4.5 % from what is predicted for their load.
"""

import argparse
import math
import random
import statistics
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from itertools import count, product
from multiprocessing import Pool
from multiprocessing.pool import Pool as PoolType
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))

from soak.load import BATCH, BOARD, MODEL, SLO_S, ladder, opened, profile

from polythrottle.catalog.tuned_profiles import read_profile, write_profile
from polythrottle.daemon.control.drift_detector import MINUTE_S, SAMPLE_S, WEEK_S, Chart
from polythrottle.daemon.control.events import Bounds, ControlPlan
from polythrottle.daemon.energy_accounts import Accounts
from polythrottle.daemon.followed_profile import FollowedProfile, read_tuned, target_of
from polythrottle.daemon.history_store import HistoryStore
from polythrottle.daemon.loop.command_handler import TURN_S, Contest
from polythrottle.daemon.loop.drift_monitor import DriftMonitor
from polythrottle.daemon.loop.mailbox import Mailbox
from polythrottle.daemon.loop.runner import LoopComponents, Runner
from polythrottle.daemon.observation import ControlPeriod, RequestStats
from polythrottle.daemon.status import StudyShown
from polythrottle.daemon.study_process import StudyOutcome
from polythrottle.daemon.traffic.simulated import SimulatedBoard, SimulatedSite
from polythrottle.domain.arrivals import Burst
from polythrottle.domain.clock import VirtualClock
from polythrottle.domain.ladder import Ladder, PointPerformance, Rung
from polythrottle.domain.measurement import Reading

_DRIFT = 1.08
_CALM_S, _FIND_S, _CONTEST_S, _AFTER_S = 3600.0, 3600.0, 4 * 3600.0, 7200.0
_STUDY_S = 600.0
_WALL_S = 1_700_000_000.0
_LOAD = Burst(4.0, peak=2.5, share=0.1, length_s=20.0)
_WITHIN_S = 300.0
_CHANGE_S = 5.0
_SPREADS, _RUNG = (0.01, 0.02, 0.03), 8
_RUNGS_OFF, _STAY_S = 0.05, 120.0
_TURN_SPREADS, _DRAWN = (0.01, 0.03, 0.045), (1.0, 1.05, 0.95)


class DriftingBoard(SimulatedBoard):
    """A simulated board each of whose joules counts for `factor`."""

    factor = 1.0
    _true_j = 0.0
    _shown_j = 0.0

    def read(self) -> Reading:
        """Return a reading whose energy has risen by so much more."""
        reading = super().read()
        self._shown_j += self.factor * (reading.energy_j - self._true_j)
        self._true_j = reading.energy_j
        return replace(reading, energy_j=self._shown_j)


class QuickStudies:
    """Finds within ten minutes of virtual time what holds now; takes the place of `polythrottle tune`.

    Args:
        board: Is studied.
        clock: Of the control loop.
        folder: Where the profile is laid.
        first: The profile whose ladder is measured anew.
    """

    costless = True

    def __init__(self, board: DriftingBoard, clock: VirtualClock, folder: Path, first: Path) -> None:
        self.shown: StudyShown | None = None
        self._board, self._clock, self._folder, self._first = board, clock, folder, first
        self._until_s = math.inf

    @property
    def runs(self) -> bool:
        """Whether one does."""
        return self.shown is not None and self.shown.state == "running"

    def start(self, reason: str, tuned: FollowedProfile | None) -> None:
        """Begin one."""
        self.shown = StudyShown("study-1", "running", words=reason)
        self._until_s = self._clock.now() + _STUDY_S

    def poll(self) -> StudyOutcome | None:
        """Return what it has found, once its time is over."""
        if not self.runs or self._clock.now() < self._until_s:
            return None
        self.stop("it has ended")
        file = self._folder / "found.toml"
        found = read_profile(self._first)
        assert found.ladder is not None
        write_profile(replace(found, ladder=_measured(found.ladder, self._board.factor)), file)
        return StudyOutcome(file, "the study has ended")

    def stop(self, reason: str) -> None:
        """End it."""
        if self.shown is not None:
            self.shown = replace(self.shown, state="ended", words=reason)

    def close(self) -> None:
        """Leave nothing behind."""


def _measured(rungs: Ladder, factor: float) -> Ladder:
    """Return a ladder as it is measured where every joule counts for so much."""

    def service(old: PointPerformance) -> PointPerformance:
        return replace(old, batch_j=factor * old.batch_j, idle_w=factor * old.idle_w)

    found = (replace(rung, service=service(rung.service), power_w=factor * rung.power_w) for rung in rungs.rungs)
    return replace(rungs, rungs=tuple(found))


@cache
def _profile(folder: str) -> Path:
    return profile(Path(folder) / "first.toml")


class House:
    """A daemon on a simulated board, in virtual time.

    Args:
        folder: For its record and its profiles.
        seed: Of requests and noise.
    """

    def __init__(self, folder: Path, seed: int) -> None:
        self.clock = VirtualClock()
        device, workload = opened(seed)
        batches = tuple(sorted({int(rung.service.point[BATCH]) for rung in ladder().rungs}))
        assert set(batches) <= set(workload.space.knob(BATCH).levels)
        self.quiet_s = (math.inf, math.inf)
        self.site = SimulatedSite(device, workload, self._arrivals(seed), self.clock, warming=True)
        self.board = DriftingBoard(self.site)
        self.desk = Mailbox()
        record = HistoryStore(folder / "daemon.db", self.wall)
        first = _profile(str(folder))
        studies: Any = QuickStudies(self.board, self.clock, folder, first)
        accounts = Accounts(record, self.wall)
        parts = LoopComponents(
            *(self.clock, self.board, self.site.traffic, self.desk, record, accounts, studies),
            wall=self.wall,
            slept_s=lambda: 0.0,
        )
        self.runner = Runner(parts, read_tuned(str(first), {}, Bounds()))

    def _arrivals(self, seed: int) -> Iterator[float]:
        """Yield when requests come; none while it is to be quiet."""
        for time_s in _LOAD.times(seed):
            from_s, to_s = self.quiet_s
            if not from_s <= time_s < to_s:
                yield time_s

    def wall(self) -> float:
        """Return wall time."""
        return _WALL_S + self.clock.now()

    def turn(self) -> None:
        """Turn once, and wait for the next."""
        self.runner.turn()
        self.runner._wait()

    def told(self, kind: str) -> list[str]:
        """Return the words of all events of a kind."""
        return [event.words for event in self.desk.events() if event.kind == kind]

    def until(self, length_s: float, kind: str, count: int) -> float | None:
        """Turn until there are so many events of a kind; return how long that took, None if it did not come to it."""
        began_s = self.clock.now()
        while (passed_s := self.clock.now() - began_s) < length_s:
            self.turn()
            if len(self.told(kind)) >= count:
                return passed_s
        return None

    def off(self, length_s: float) -> float:
        """Return what is drawn over what is predicted, on the whole, less one."""
        joules = predicted_j = 0.0
        end_s = self.clock.now() + length_s
        while self.clock.now() < end_s:
            state, before = self.runner.executor.state, self.board.read().energy_j
            self.turn()
            after, rate_per_s = self.board.read().energy_j, self.desk.status.rate_per_s
            if state.rung is None or rate_per_s is None or state.applied != self.runner.executor.state.applied:
                continue
            joules += after - before
            predicted_j += state.rung.power_at(rate_per_s)
        return joules / predicted_j - 1


@dataclass(frozen=True)
class Found:
    """What became of one seed.

    Args:
        factor: What was planted.
        seed: Of the run.
        false: Drifts told before.
        delay_s: Until it was told; None if it was not.
        decided_s: Until the comparison was over; None if it was not within four hours.
        kept: Whether the new profile is the one that is followed.
        off: What is drawn over what the profile predicts after that, by that of the hour before, less one.
        again: Drifts told in those two hours.
    """

    factor: float
    seed: int
    false: int
    delay_s: float | None
    decided_s: float | None = None
    kept: bool = False
    off: float = math.nan
    again: int = 0

    @property
    def repaired(self) -> bool:
        """Whether what is predicted is drawn, and no drift is told any more."""
        return self.decided_s is not None and abs(self.off) < 0.03 and self.again == 0


def planted(asked: tuple[float, int]) -> Found:
    """Return what becomes of a drift in one run of the daemon."""
    factor, seed = asked
    with tempfile.TemporaryDirectory() as folder:
        house = House(Path(folder), seed)
        calm = house.off(_CALM_S)
        false = len(house.told("drift"))
        house.board.factor = factor
        delay_s = house.until(_FIND_S, "drift", false + 1)
        if delay_s is None:
            return Found(factor, seed, false, None)
        now_s = house.clock.now()
        house.quiet_s = (now_s, now_s + 1.2 * _STUDY_S)
        before = len(house.told("study"))
        # It begins, ends, is compared, and is decided on: four events at least, of which the last says what is kept.
        decided_s = house.until(_CONTEST_S, "study", before + 4)
        if decided_s is None:
            return Found(factor, seed, false, delay_s)
        told = len(house.told("drift"))
        off = (1 + house.off(_AFTER_S)) / (1 + calm) - 1
        tuned = house.runner.selector.tuned
        kept = tuned is not None and tuned.name.endswith("found.toml")
        return Found(factor, seed, false, delay_s, decided_s, kept, off, len(house.told("drift")) - told)


@dataclass(frozen=True)
class Alone:
    """What the watch alone is asked.

    Args:
        spread: By how much minutes differ.
        moves: Whether the rung changes, each with a prediction that is off by a factor of its own.
        factor: What is planted.
        seed: Of the chances.
    """

    spread: float
    moves: bool
    factor: float
    seed: int


def watched(asked: Alone) -> tuple[int, float | None]:
    """Return the false alarms in a week of load, and how long a drift planted after it takes to be found."""
    random_ = random.Random(repr(asked))
    off = [random_.gauss(0, _RUNGS_OFF) for _ in ladder().rungs]
    with tempfile.TemporaryDirectory() as folder:
        watch = DriftMonitor(HistoryStore(Path(folder) / "daemon.db", lambda: _WALL_S))
        watch.over(ladder())
        load, false = _load(asked, random_, off), 0
        for _ in range(round(WEEK_S / SAMPLE_S)):
            if watch.seen(*next(load)(1.0)):
                false += 1
                watch.again()
        watch.again()
        for number in range(round(_FIND_S / SAMPLE_S)):
            if watch.seen(*next(load)(asked.factor)):
                return false, (number + 1) * SAMPLE_S
    return false, None


def _load(
    asked: Alone, random_: random.Random, off: Sequence[float]
) -> Iterator[Callable[[float], tuple[ControlPeriod, int, Rung]]]:
    """Yield samples of energy, each as a function of what its joules count for; minutes have a latency of their own."""
    rungs, number, left_s, mean_s = ladder().rungs, _RUNG, 0.0, 0.0
    spread = asked.spread * math.sqrt(MINUTE_S / SAMPLE_S)
    for step in count():
        if step % round(MINUTE_S / SAMPLE_S) == 0:
            mean_s = math.exp(random_.gauss(0, asked.spread))
        if asked.moves and left_s <= 0:
            number, left_s = random_.randrange(len(rungs)), random_.expovariate(1 / _STAY_S)
        left_s -= SAMPLE_S
        rung, noise = rungs[number], off[number] + random_.gauss(0, spread)
        requests = max(4, round(rung.rate_per_s * SAMPLE_S))
        joules = rung.power_at(requests / SAMPLE_S) * SAMPLE_S * math.exp(noise)
        seen = RequestStats(requests, requests, 0, 0, rung.p99_s, rung.service.latency_s * mean_s)
        sight = ControlPeriod(SAMPLE_S * step, SAMPLE_S, seen, None)
        yield partial(_drawn, sight, joules, number, rung)


def _drawn(
    sight: ControlPeriod, joules: float, number: int, rung: Rung, factor: float
) -> tuple[ControlPeriod, int, Rung]:
    return replace(sight, joules=factor * joules), number, rung


def compared(asked: tuple[float, float, int]) -> tuple[bool, float]:
    """Return whether a new profile is kept, and after how long that is decided.

    Args:
        asked: By how much turns differ, what the new one draws over the old one, and the seed.
    """
    spread, factor, seed = asked
    random_ = random.Random(f"compared {spread} {factor} {seed}")
    rungs = ladder()
    rate_per_s = rungs.rungs[8].rate_per_s
    predicted_w = rungs.rungs[rungs.best(rate_per_s, rate_per_s)].power_at(rate_per_s)
    safe = target_of(rungs.rungs[-1])
    old = FollowedProfile("old", ControlPlan(rungs, safe, safe, Bounds()), "")
    contest, now_s = Contest(old, replace(old, name="new")), 0.0
    while contest.over is None:
        drawn = (factor if contest.turn is contest.new else 1.0) * math.exp(random_.gauss(0, spread))
        for length_s in (_CHANGE_S, TURN_S):
            now_s += length_s
            joules = drawn * predicted_w * length_s
            contest.seen(
                ControlPeriod(now_s, length_s, RequestStats(round(rate_per_s * length_s)), None, None, None, joules),
                False,
            )
    return contest.over, now_s


def _compared(contests: int, pool: PoolType) -> Iterator[str]:
    yield f"\n## The comparison alone\n\n{contests} comparisons each.\n"
    yield "| turns differ by | the new one draws | rolled back | decided after, mean | rolled back after, mean |"
    yield "| --- | --- | --- | --- | --- |"
    for spread in _TURN_SPREADS:
        for factor in _DRAWN:
            rows = pool.map(compared, [(spread, factor, seed) for seed in range(contests)], 16)
            back = [took_s for kept, took_s in rows if not kept]
            after = f"{statistics.mean(back) / 60:.0f} min" if back else "–"
            decided = f"{statistics.mean(took_s for _, took_s in rows) / 60:.0f} min"
            yield f"| {spread:.1%} | {factor - 1:+.0%} | {len(back) / len(rows):.1%} | {decided} | {after} |"


def _delays(found: Sequence[float | None]) -> str:
    known = sorted(each for each in found if each is not None)
    if not known:
        return "never"
    high_s = known[math.ceil(0.9 * len(known)) - 1]
    within = sum(each <= _WITHIN_S for each in known) / len(found)
    return f"{statistics.mean(known) / 60:.1f} min | {high_s / 60:.1f} min | {known[-1] / 60:.1f} min | {within:.0%}"


def _whole(found: Sequence[Found]) -> Iterator[str]:
    yield f"## The whole daemon\n\n{BOARD}, {MODEL}, p99 ≤ {SLO_S * 1e3:g} ms, {len(found)} runs.\n"
    yield "| planted | runs | found after, mean | 90 % of runs | longest | within 5 min | repaired | new profile kept |"
    yield "| --- | --- | --- | --- | --- | --- | --- | --- |"
    for factor in sorted({each.factor for each in found}):
        mine = [each for each in found if each.factor == factor]
        told = f"{factor - 1:+.0%} | {len(mine)} | {_delays([each.delay_s for each in mine])}"
        repaired, kept = sum(each.repaired for each in mine), sum(each.kept for each in mine)
        yield f"| {told} | {repaired} of {len(mine)} | {kept} of {len(mine)} |"
    hours = len(found) * _CALM_S / 3600 + sum(_AFTER_S / 3600 for each in found if each.decided_s is not None)
    false = sum(each.false + each.again for each in found)
    decided = [each.decided_s for each in found if each.decided_s is not None]
    yield f"\nFalse alarms before and after: {false} in {hours:.0f} h of load."
    if decided:
        yield f"From the alarm to the end of the comparison: {statistics.mean(decided) / 60:.0f} min on average."
    for each in found:
        if not each.repaired:
            off = f"off by {each.off:+.1%}, {each.again} more told"
            words = "not decided" if each.decided_s is None else off
            yield f"Not repaired: {each.factor - 1:+.0%}, seed {each.seed}: {words}."


_HEADINGS = (
    *("minutes differ by", "rung", "false alarms a week", "planted", "found after, mean", "90 %", "longest"),
    *("within 5 min", "least mean"),
)


def _alone(weeks: int, pool: PoolType) -> Iterator[str]:
    yield f"\n## The watch alone\n\n{weeks} weeks of load for each noise, half of them followed by each drift.\n"
    yield f"| {' | '.join(_HEADINGS)} |\n|{' --- |' * len(_HEADINGS)}"
    for spread, moves in product(_SPREADS, (False, True)):
        factors = (_DRIFT, 1 / _DRIFT)
        asked = [[Alone(spread, moves, factor, seed) for seed in range(weeks // 2)] for factor in factors]
        rows = [pool.map(watched, each, 1) for each in asked]
        false = f"{statistics.mean(told for each in rows for told, _ in each):.2f}"
        for factor, each in zip(factors, rows, strict=True):
            found = _delays([delay for _, delay in each])
            told = f"{spread:.0%} | {'changes' if moves else 'stays'} | {false} | {factor - 1:+.0%}"
            yield f"| {told} | {found} | {_least_s(spread) / 60:.1f} min |"


def _least_s(spread: float) -> float:
    """Return the least mean delay at which energy above alone raises its share of one false alarm a week."""
    per_s = math.log(_DRIFT) ** 2 / 2 / spread**2 / MINUTE_S
    return (math.log(per_s * 2 * Chart().false_alarm_s) - 1) / per_s


def report(seeds: int, weeks: int, contests: int, jobs: int) -> Iterator[str]:
    """Yield the lines of the report."""
    factors = (_DRIFT, 1 / _DRIFT)
    with Pool(jobs) as pool:
        yield from _whole(pool.map(planted, [(factor, seed) for factor in factors for seed in range(seeds)], 1))
        yield from _alone(weeks, pool)
        yield from _compared(contests, pool)


def main() -> None:
    """Print the report, and write it where asked."""
    words = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    words.add_argument("--seeds", type=int, default=10)
    words.add_argument("--weeks", type=int, default=200)
    words.add_argument("--contests", type=int, default=400)
    words.add_argument("--jobs", type=int, default=2)
    words.add_argument("--write", type=Path, metavar="FILE")
    given = words.parse_args()
    lines = []
    for line in report(given.seeds, given.weeks, given.contests, given.jobs):
        print(line, flush=True)
        lines.append(line)
    if given.write:
        command = f"`python {' '.join(sys.argv)}`; simulated. How, stands in that file."
        given.write.write_text(f"# Drift\n\n{command}\n\n" + "\n".join(lines).rstrip() + "\n")


if __name__ == "__main__":
    main()
