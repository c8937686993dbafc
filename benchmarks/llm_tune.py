"""Whole searches over clock, power limit and requests in flight of a simulated language model, beside the truth.

``python benchmarks/llm_tune.py --seeds 10`` prints the table of ``llm_tune.md``. Each search is `polythrottle.tune` as
it comes, where it ends by itself. The truth is looked for on a board without noise, in a window of its own for each
point: every second clock, every limit, and the requests in flight that any search ended with, and those beside them.
"""

import argparse
import os
import tempfile
from collections.abc import Iterator, Mapping
from itertools import product

from polythrottle import measure, tune
from polythrottle.api.outcome import Tuning
from polythrottle.domain.measurement import Measurement
from polythrottle.domain.problem import Constraint
from polythrottle.domain.space import SearchSpace
from polythrottle.domain.study import Study

DEVICE, WORKLOAD = "sim:h100-sxm", "llama-3.1-8b"
SLO = ("ttft_p99<=600ms", "tpot_p99<=100ms")
LIMITS = tuple(map(Constraint.parse, SLO))
NEAR = 0.03


def holds(measurement: Measurement | None) -> bool:
    """Return whether limits were held."""
    return measurement is not None and all(limit.slack(measurement) >= 0 for limit in LIMITS)


def true(point: Mapping[str, int]) -> Measurement:
    """Return what a point does on a board without noise."""
    return measure(f"{DEVICE}?noise=0", WORKLOAD, point=point)[1]


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


def searched(seed: int) -> Tuning:
    """Return a search by default settings that knows of no other."""
    with tempfile.TemporaryDirectory() as folder:
        os.environ["POLYTHROTTLE_STATE_DIR"] = folder
        return tune(DEVICE, WORKLOAD, slo=SLO, seed=seed)


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=10)
    seeds = parser.parse_args().seeds
    found = []
    for seed in range(1, seeds + 1):
        tuning = searched(seed)
        trials = tuning.study.trials
        strayed = sum(not holds(trial.measurement) for trial in trials)
        found.append((seed, len(trials), strayed, answer(tuning.study)))
        print(f"seed {seed}: {len(trials)} trials, {strayed} infeasible, {found[-1][3]}", flush=True)
    points = list(candidates(tuning.study.problem.space, {point["concurrency"] for *_, point in found}))
    measured = [(true(point), point) for point in points]
    least_j, at = min(((one.energy_j, point) for one, point in measured if holds(one)), key=lambda pair: pair[0])
    print(f"truth: {least_j:.2f} J per request at {at}, of {len(points)} points")
    print("| seed | trials | infeasible | point | over the truth | holds |\n|---|---|---|---|---|---|")
    for seed, trials_, strayed, point in found:
        one = true(point)
        words = f"{point['gpu_max_hz'] // 10**6} MHz, {point['power_limit_w']} W, {point['concurrency']}"
        print(f"| {seed} | {trials_} | {strayed} | {words} | {one.energy_j / least_j - 1:+.1%} | {holds(one)} |")


if __name__ == "__main__":
    main()
