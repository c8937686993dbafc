"""How often a stated 95 % interval holds the truth: energy through sensors and at random arrivals, and percentiles.

    python benchmarks/coverage.py [--runs 400] [--queries 2000] [--first 0] [--only PART …] [--json FILE]
    python benchmarks/coverage.py --only averaged     # a Jetson's sensor, known and taken for one of the moment

Every run is one window of the meter itself on a rig whose truth is known (`polythrottle.testing.ground_truth`): of so
many queries, or (`early`) of 30 to 1,000, ended once energy is known to 2 %; their truth is the long run's. Beside it
stand naive readers: mean power at the window's looks x time / items with the textbook interval of that mean; at random
arrivals all joules / requests with the textbook interval of their number; order statistics that take queries as
independent.
"""

import argparse
import json
import math
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import chain
from pathlib import Path

import numpy as np

from polythrottle.domain.arrivals import Arrivals
from polythrottle.domain.errors import TrialError
from polythrottle.domain.measurement import Interval, Measurement, Window
from polythrottle.domain.ports import Sensor
from polythrottle.domain.space import OperatingPoint
from polythrottle.metering.intervals import SHARES
from polythrottle.metering.point_measurement import measure
from polythrottle.testing.ground_truth import METERS, SENSORS, IdleServer, Rig, Traffic

BAR = (0.93, 0.97)
TRAFFIC: Mapping[str, Traffic] = {
    "independent": Traffic(straggle=0.0),
    "stragglers 2 %, next also 60 %": Traffic(stay=0.6),
    "stragglers 2 %, next also 74 %": Traffic(),
    "stragglers 0.1 %, next also 74 %": Traffic(straggle=0.001),
}
OPEN: Mapping[str, tuple[str, float]] = {
    "Poisson 30/s, exact": ("poisson:30/s", 0.0),
    "Poisson 30/s, 100 ms steps": ("poisson:30/s", 0.1),
    "Poisson 70/s, exact": ("poisson:70/s", 0.0),
    "Poisson 70/s, 100 ms steps": ("poisson:70/s", 0.1),
    "20 cycles of bursts, exact": ("burst:30/s?peak=3&share=0.2&length={length}s", 0.0),
}
"""Arrivals before a server that takes 10 ms, and how its counter steps."""
CYCLES = 20
PRECISION, LEAST, MOST = 0.02, 30, 1000
"""Windows that end once energy is known to 2 %, as `tune` has them."""
SLOW = ("1 s average, 10 Hz", "lag 0.5 s, 10 Hz", "1 Hz")
"""Sensors that need longer than so many queries last."""
AVERAGED = "430 ms average, renewed so often"
MISTAKEN = "the same, taken for a moment's"
"""What the INA3221 of tegra194 and tegra234 does, and what comes of not knowing it."""
WANDERING: Mapping[str, Traffic] = {
    "power of queries independent": Traffic(held=0.0),
    "power wanders over 39 queries": Traffic(held=0.95),
    "power wanders over 199 queries": Traffic(held=0.99),
}
"""Beside those over 9 queries: the variance of a mean of n is that of n over so many independent ones."""
QUEUES: Mapping[str, int] = {"half busy": 50, "busy 7 of 10": 70, "busy 9 of 10": 90}
"""Poisson arrivals per second before a server that takes 10 ms."""
PARTS = ("energy", "meters", "early", "random", "percentiles", "queue")
_LONG_S = 0.008
"""The shortest usual query: so many of them last as long as the slowest sensor needs."""
ALONE = "averaged"
"""Part of `early`: the rows of the INA3221's averages by themselves."""
DRIFT = "drift of 2 %, 100 ms steps"


@dataclass(frozen=True)
class Row:
    """How often intervals held.

    Args:
        what: Which quantity.
        where: Through which sensor, or of which traffic.
        covered: Share of the runs in which the interval held the truth.
        naive: The same of the naive reader.
        unknown: Share of the runs in which an end was not known.
        half: Median half width over the truth, of those with both ends.
        naive_half: The same of the naive reader.
    """

    what: str
    where: str
    covered: float
    naive: float
    unknown: float
    half: float
    naive_half: float

    @property
    def holds(self) -> bool:
        """Whether that is what 95 % should be."""
        return BAR[0] <= self.covered <= BAR[1]


def one(
    traffic: Traffic,
    name: str,
    seed: int,
    queries: int,
    precision: float | None = None,
    taken_for: Sensor | None = None,
) -> tuple[Rig, Measurement, Interval]:
    """Return a rig, what the meter says of a window on it, and what a naive reader says of its energy.

    Args:
        traffic: What its queries are like.
        name: Of its sensor.
        seed: Of everything.
        queries: How many a window has, or at most if there is a precision.
        precision: At which the window may end.
        taken_for: What the meter believes its sensor to be, if not what it is.
    """
    rng = np.random.default_rng([seed, 1, zlib.crc32(repr((traffic, name)).encode())])
    varied = replace(traffic, usual_s=rng.uniform(0.008, 0.014), power_w=rng.uniform(15.0, 30.0))
    if traffic.drift_per_s:
        varied = replace(varied, drift_per_s=traffic.drift_per_s / (queries * varied.usual_s))
    distortion = {**SENSORS, **METERS}[name]
    before = 20 + math.ceil(1.3 * distortion.sensor.settle_s / varied.usual_s)
    rig = Rig(varied, distortion, int(rng.integers(2**62)), 3 * (queries + before))
    least = queries if precision is None else LEAST
    window = Window(least, 0.0, queries, timeout_s=3600.0, precision=precision)
    measured = measure(rig, rig, OperatingPoint({}), window, sensor=taken_for or distortion.sensor)
    return rig, measured, naive_energy(rig, measured)


def naive_energy(rig: Rig, measured: Measurement) -> Interval:
    """Return mean power x time per item, with the textbook interval of a mean of independent readings."""
    end_s, window_s = rig.clock.now(), measured.window_s or 0.0
    apart_s = min(1.0, window_s / 10)
    readings = [rig.read_at(time_s) for time_s in np.arange(end_s - window_s, end_s, apart_s)]
    powers_w = np.diff(readings) / apart_s
    scale = 1 / measured.throughput_per_s
    half = 1.96 * powers_w.std(ddof=1) / math.sqrt(len(powers_w))
    return Interval(float(powers_w.mean() - half) * scale, float(powers_w.mean() + half) * scale)


def energies(runs: int, queries: int, first: int) -> Iterator[Row]:
    """Yield a row for each sensor."""
    cases = [
        *((name, name, Traffic()) for name in SENSORS),
        (DRIFT, "counter in 100 ms steps", Traffic(drift_per_s=0.02)),
    ]
    for label, name, traffic in cases:
        found = []
        for seed in range(first, first + runs):
            rig, measured, naive = one(traffic, name, seed, queries)
            end_s = rig.clock.now()
            truth = rig.true_energy_j(end_s - (measured.window_s or 0.0), end_s)
            found.append((truth, measured.intervals.get("energy", Interval(-math.inf, math.inf)), naive))
        yield row("energy", label, found)


def at_the_wall(runs: int, queries: int, first: int) -> Iterator[Row]:
    """Yield a row for each meter at the wall, of windows as long as it needs at least."""
    for name, distortion in METERS.items():
        found = []
        for seed in range(first, first + runs):
            enough = max(queries, math.ceil(1.2 * distortion.sensor.least_s / _LONG_S))
            rig, measured, naive = one(Traffic(), name, seed, enough)
            known = measured.intervals.get("energy", Interval(-math.inf, math.inf))
            found.append((rig.traffic.energy_j, known, naive))
        yield row("meters", name, found)


def early(runs: int, first: int, only: Sequence[str] = ()) -> Iterator[Row]:
    """Yield a row for each sensor and for each way in which power wanders, of windows that end when they may.

    Args:
        runs: How many windows a row is of.
        first: The first seed.
        only: The rows wanted; all if empty.
    """
    cases: list[tuple[str, str, Traffic, Sensor | None]] = [
        *((name, name, Traffic(), None) for name in SENSORS if name not in SLOW),
        (MISTAKEN, AVERAGED, Traffic(), Sensor()),
        *((label, "exact", traffic, None) for label, traffic in WANDERING.items()),
    ]
    for label, name, traffic, taken_for in (case for case in cases if not only or case[0] in only):
        found = []
        for seed in range(first, first + runs):
            try:
                rig, measured, naive = one(traffic, name, seed, MOST, PRECISION, taken_for)
            except TrialError:  # power drifted by more than 5 % in all three windows
                continue
            known = measured.intervals.get("energy", Interval(-math.inf, math.inf))
            found.append((rig.traffic.energy_j, known, naive))
        yield row("early", label, found)


def at_random(runs: int, queries: int, first: int) -> Iterator[Row]:
    """Yield a row for each kind of random arrivals."""
    for label, (text, step_s) in OPEN.items():
        # Mean cycles are as long as lets a window see so many of them.
        arrivals, found = Arrivals.parse(text.format(length=0.2 * queries / 30 / CYCLES)), []
        rate_per_s = arrivals.offered_per_s or math.nan
        for number in range(first, first + runs):
            seed = int(np.random.default_rng([number, 1, zlib.crc32(label.encode())]).integers(2**31))
            rig = IdleServer(seed, step_s=step_s)
            window, sensor = Window(queries, 0.0, queries, timeout_s=3600.0), Sensor(step_s=step_s)
            measured = measure(rig, rig, OperatingPoint({}), window, arrivals=arrivals, seed=seed, sensor=sensor)
            interval = measured.intervals.get("energy", Interval(-math.inf, math.inf))
            found.append((rig.true_energy_j(rate_per_s), interval, counted(rig, measured, queries)))
        yield row("energy", label, found)


def counted(rig: IdleServer, measured: Measurement, queries: int) -> Interval:
    """Return a window's joules over its requests, with the textbook interval of their number: 1 / its square root."""
    end_s = rig.clock.now()
    value = (rig.total_j(end_s) - rig.total_j(end_s - (measured.window_s or 0.0))) / queries
    half = 1.96 * value / math.sqrt(queries)
    return Interval(value - half, value + half)


def percentiles(runs: int, queries: int, first: int) -> Iterator[Row]:
    """Yield a row for each percentile of each traffic."""
    for label, traffic in TRAFFIC.items():
        truths, found = truth_of(traffic), {name: [] for name in ("p50", "p95", "p99")}
        for seed in range(first, first + runs):
            rig, measured, _ = one(traffic, "exact", seed, queries)
            for name, rows in found.items():
                truth = truths[name] * rig.traffic.usual_s
                rows.append((truth, measured.intervals[name], independent(rig, name, queries)))
        yield from (row(name, label, rows) for name, rows in found.items())


def queued(runs: int, queries: int, first: int) -> Iterator[Row]:
    """Yield a row for each percentile before a server that is busy so much; naive is the bare figure."""
    for label, rate_per_s in QUEUES.items():
        arrivals, truths = Arrivals.parse(f"poisson:{rate_per_s}/s"), waits(rate_per_s)
        found: dict[str, list[tuple[float, Interval, Interval]]] = {name: [] for name in truths}
        for number in range(first, first + runs):
            seed = int(np.random.default_rng([number, 1, zlib.crc32(label.encode())]).integers(2**31))
            rig, window = IdleServer(seed), Window(queries, 0.0, queries, timeout_s=3600.0)
            measured = measure(rig, rig, OperatingPoint({}), window, arrivals=arrivals, seed=seed, sensor=Sensor())
            for name, rows in found.items():
                bare = measured.metric(name) or math.nan
                rows.append((truths[name], measured.intervals[name], Interval(bare, bare)))
        yield from (row(name, label, rows) for name, rows in found.items())


@cache
def waits(rate_per_s: float) -> Mapping[str, float]:
    """Return the percentiles of latency before `Waiting`, from ten million requests (Lindley's recursion)."""
    rng = np.random.default_rng(13)
    service_s = 0.01 * np.exp(0.1 * rng.standard_normal(10_000_000))
    walk = np.concatenate([[0.0], np.cumsum(service_s[:-1] - rng.exponential(1 / rate_per_s, len(service_s) - 1))])
    latencies_s = walk - np.minimum.accumulate(walk) + service_s
    return {name: float(np.quantile(latencies_s, SHARES[name])) for name in ("p50", "p95", "p99")}


@cache
def truth_of(traffic: Traffic) -> Mapping[str, float]:
    """Return the percentiles of endless traffic, of a usual query of 1 s: from four million queries."""
    rng, endless = np.random.default_rng(12), replace(traffic, usual_s=1.0)
    times = np.concatenate([endless.latencies_s(rng, 400_000) for _ in range(10)])
    return {name: float(np.quantile(times, share)) for name, share in SHARES.items()}


def independent(rig: Rig, name: str, queries: int) -> Interval:
    """Return the order statistics that would bound a percentile if queries were independent (normal approximation)."""
    times, share = np.sort(rig.latencies_s(queries)), SHARES[name]
    reach = 1.96 * math.sqrt(queries * share * (1 - share))
    low, high = (int(np.clip(round(queries * share + sign * reach), 0, queries - 1)) for sign in (-1, 1))
    return Interval(float(times[low]), float(times[high]))


def row(what: str, where: str, found: list[tuple[float, Interval, Interval]]) -> Row:
    """Return how often intervals held: of the meter, and of the naive reader."""
    known = [interval.half / truth for truth, interval, _ in found if interval.known]
    return Row(
        what,
        where,
        float(np.mean([truth in interval for truth, interval, _ in found])),
        float(np.mean([truth in naive for truth, _, naive in found])),
        1 - len(known) / len(found),
        float(np.median(known)) if known else math.inf,
        float(np.median([naive.half / truth for truth, _, naive in found])),
    )


def main(say: Callable[[str], None] = print) -> None:
    """Print coverage beside that of the naive readers."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=400)
    parser.add_argument("--queries", type=int, default=2000)
    parser.add_argument("--first", type=int, default=0, help="first seed")
    parser.add_argument("--only", nargs="+", default=PARTS, choices=(*PARTS, ALONE), help="some of it")
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    say(f"{given.runs} runs of {given.queries} queries; how often 95 % intervals hold; bar {BAR[0]:.0%}-{BAR[1]:.0%}")
    say(f"{'':7} {'':34} {'covered':>8} {'± med.':>8} {'unknown':>8}   naive: {'covered':>8} {'± med.':>8}")
    rows = []
    asked = (given.runs, given.queries, given.first)
    parts = {
        "energy": energies(*asked),
        "meters": at_the_wall(*asked),
        "early": early(given.runs, given.first),
        ALONE: early(given.runs, given.first, (AVERAGED, MISTAKEN)),
        "random": at_random(*asked),
        "percentiles": percentiles(*asked),
        "queue": queued(*asked),
    }
    for each in chain(*(rows for part, rows in parts.items() if part in given.only)):
        rows.append(each)
        say(
            f"{each.what:7} {each.where:34} {each.covered:8.2%} {each.half:8.2%} {each.unknown:8.1%}   "
            f"{'':6} {each.naive:8.2%} {each.naive_half:8.2%}{'' if each.holds else '   outside'}"
        )
    if given.json:
        given.json.write_text(json.dumps([vars(each) for each in rows], indent=1) + "\n")


if __name__ == "__main__":
    main()
