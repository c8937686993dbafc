"""How long one suggestion takes after thirty trials, at 2,000 and at 100,000 points: python benchmarks/suggest.py.

The budget is 0.5 s and 3 s on two cores. Both sizes are timed in one run, so that their ratio can be compared.
"""

import time
from contextlib import suppress
from dataclasses import replace

import numpy as np

from polythrottle.domain.errors import Exhausted
from polythrottle.domain.measurement import Latency, Measurement
from polythrottle.domain.problem import Constraint, Problem
from polythrottle.domain.space import Knob, SearchSpace
from polythrottle.domain.study import Study, Trial
from polythrottle.optimize import Options, make_optimizer


def study(levels: int) -> Study:
    """Return a study of thirty trials on a space of 8 × levels × (levels − 1) points, with two constraints."""
    knobs = (Knob("gpu_max_hz", tuple(range(1, levels + 1))), Knob("mem_hz", tuple(range(1, levels))))
    rest = (Knob("mode", (1, 2)), Knob("batch_size", (1, 2, 4, 8)))
    top = {"gpu_max_hz": levels, "mem_hz": levels - 1, "mode": 1, "batch_size": 1}
    space = SearchSpace.grid((*knobs, *rest), top)
    rng, found = np.random.default_rng(0), Study(Problem(space, (Constraint("p99", 1.0), Constraint("power", 20.0))))
    points = [space.default, *(space[int(row)] for row in rng.choice(len(space) // 2, 29, replace=False))]
    for number, point in enumerate(points):
        late_s, energy_j, power_w = np.exp(0.3 * rng.standard_normal(3)).tolist()
        seen = Measurement(Latency(late_s, p99_s=late_s), energy_j, 1.0 / late_s, 15.0 * power_w)
        found = found.with_trial(Trial(number, point, seen))
    return found


def times() -> dict[int, float]:
    """Return the seconds one suggestion takes, by the number of points; the import of torch apart."""
    make_optimizer("bayes").suggest(study(6))
    found = {}
    for levels in (16, 115):
        one = study(levels)
        start = time.perf_counter()
        make_optimizer("bayes").suggest(one)
        found[len(one.problem.space)] = time.perf_counter() - start
    return found


def careful_times() -> dict[int, float]:
    """Return the same at a risk, by a method that has suggested the trial before too, as in a search."""
    found = {}
    for levels in (16, 115):
        one = study(levels)
        method = make_optimizer("bayes", Options(risk=0.5))
        with suppress(Exhausted):  # luck alone made these trials, and has used the risk up
            method.suggest(replace(one, trials=one.trials[:-1]))
        start = time.perf_counter()
        with suppress(Exhausted):
            method.suggest(one)
        found[len(one.problem.space)] = time.perf_counter() - start
    return found


def main() -> None:
    """Time both sizes, free and at a risk."""
    for words, found in (("", times()), (" at a risk", careful_times())):
        for points, seconds in found.items():
            ratio = seconds / min(found.values())
            print(f"{points:7,} points{words}: {seconds:.2f} s, {ratio:.1f} × the smaller space")


if __name__ == "__main__":
    main()
