"""Whole searches over clock, power limit and requests in flight of a simulated language model, beside the truth.

``python benchmarks/llm_tune.py --seeds 10`` prints the table of ``llm_tune.md``. Each search is `polythrottle.tune` as
it comes, where it ends by itself. The truth is looked for on a board without noise, among every second clock, every
limit, and the requests in flight that any search ended with, and those beside them: a short window of each tells its
energy, and from the least on long ones tell whether a point holds, until one does.
"""

import argparse
import os
import tempfile
from collections.abc import Iterator, Mapping
from itertools import product

from polythrottle import Setup, measure, tune
from polythrottle.api.tuning_result import Tuning
from polythrottle.domain.measurement import Measurement, Window
from polythrottle.domain.problem import Constraint
from polythrottle.domain.space import SearchSpace
from polythrottle.domain.study import Study

DEVICE, WORKLOAD = "sim:h100-sxm", "llama-3.1-8b"
SLO = ("ttft_p99<=600ms", "tpot_p99<=100ms")
LIMITS = tuple(map(Constraint.parse, SLO))
SHORT, LONG = 1000, 20_000
"""Requests of a window that tells a point's energy, and of one that tells its p99."""


def holds(measurement: Measurement | None) -> bool:
    """Return whether limits were held."""
    return measurement is not None and all(limit.slack(measurement) >= 0 for limit in LIMITS)


def true(point: Mapping[str, int], requests: int = LONG) -> Measurement:
    """Return what a point does on a board without noise."""
    window = Window(requests, 0.0, requests, timeout_s=1e6)
    return measure(f"{DEVICE}?noise=0", WORKLOAD, point=point, window=window)[1]


def may_hold(measurement: Measurement) -> bool:
    """Return whether limits may have been held, by the lower ends of intervals."""
    lows = [(measurement.intervals.get(limit.metric), limit.limit) for limit in LIMITS]
    return all(interval is None or interval.low <= limit for interval, limit in lows)


def truth(points: list[dict[str, int]]) -> tuple[float, dict[str, int]]:
    """Return the energy per request of the best point that holds the limits, and that point."""
    short = [(true(point, SHORT), point) for point in points]
    for _, point in sorted((one for one in short if may_hold(one[0])), key=lambda one: one[0].energy_j):
        if holds(measured := true(point)):
            return measured.energy_j, point
    raise SystemExit("no point holds the limits")


def candidates(space: SearchSpace, chosen: set[int]) -> Iterator[dict[str, int]]:
    """Yield the points among which the truth is looked for."""
    levels = {knob.name: [int(level) for level in knob.levels] for knob in space.knobs}
    counts = levels["concurrency"]
    places = {counts.index(count) + step for count in chosen for step in (-1, 0, 1)}
    near = [counts[place] for place in sorted(places) if 0 <= place < len(counts)]
    clocks_hz = levels["gpu_max_hz"]
    for gpu_hz, power_w, count in product(clocks_hz[len(clocks_hz) // 4 :: 2], levels["power_limit_w"], near):
        yield {"gpu_max_hz": gpu_hz, "power_limit_w": power_w, "concurrency": count}


def answer(study: Study) -> dict[str, int]:
    """Return the point that a search ended with; the default where none holds."""
    chosen = study.best or study.trials[0]
    return {name: int(level) for name, level in chosen.point.items()}


def searched(seed: int, queries: int | None = None) -> Tuning:
    """Return a search that knows of no other, by default settings but for the queries of its windows, if given."""
    setup = Setup(DEVICE, WORKLOAD, queries=queries)
    with tempfile.TemporaryDirectory() as folder:
        os.environ["POLYTHROTTLE_STATE_DIR"] = folder
        return tune(DEVICE, WORKLOAD, slo=SLO, seed=seed, setup=setup)


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=10)
    parser.add_argument("--queries", type=int, help="of each window; as they come if left out")
    asked = parser.parse_args()
    found = []
    for seed in range(1, asked.seeds + 1):
        tuning = searched(seed, asked.queries)
        trials = tuning.study.trials
        strayed = sum(not holds(trial.measurement) for trial in trials)
        found.append((seed, len(trials), strayed, answer(tuning.study)))
        print(f"seed {seed}: {len(trials)} trials, {strayed} infeasible, {found[-1][3]}", flush=True)
    points = list(candidates(tuning.study.problem.space, {point["concurrency"] for *_, point in found}))
    least_j, at = truth(points)
    print(f"truth: {least_j:.2f} J per request at {at}, of {len(points)} points")
    print("| seed | trials | infeasible | point | over the truth | holds |\n|---|---|---|---|---|---|")
    for seed, trials_, strayed, point in found:
        one = true(point)
        words = f"{point['gpu_max_hz'] // 10**6} MHz, {point['power_limit_w']} W, {point['concurrency']}"
        print(f"| {seed} | {trials_} | {strayed} | {words} | {one.energy_j / least_j - 1:+.1%} | {holds(one)} |")


if __name__ == "__main__":
    main()
