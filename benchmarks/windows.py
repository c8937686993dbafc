"""Windows that end when they know enough, against fixed ones of 1,000 requests: the same choice, for how many?

    python benchmarks/windows.py [--seeds 5] [--trials 20] [--workloads NAME …] [--json FILE]

On the simulated AGX Orin two things are compared. `listed`: the same points, the default and those a space-filling
sequence gives, are measured both ways, so that only the windows differ. `tuned`: whole studies of the search method, in
which each way goes its own course; there the choices are compared by their true energy too, for a surface that is flat
at its bottom has many points as good.

The fixed windows are those of arXiv 2310.19991, 1,000 requests whatever they show. What they would take if a window
that plainly breaks the SLO were cut short, as without --precision, is shown as well.
"""

import argparse
import json
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from unittest.mock import patch

import numpy as np

from polythrottle.backends.simulated import SimulatedDevice
from polythrottle.catalog import load_board, load_model
from polythrottle.journal import Journal
from polythrottle.measurement import Measurement, Window
from polythrottle.optimize import make_optimizer
from polythrottle.optimize.options import Options
from polythrottle.ports import Optimizer
from polythrottle.problem import Constraint, Problem
from polythrottle.space import OperatingPoint
from polythrottle.stopping import Budget, Rule
from polythrottle.study import Study
from polythrottle.tuner import tune

FIXED = Window(1000, 0.0, 1000, timeout_s=3600.0)
ADAPTIVE = Window(30, 0.0, 1000, timeout_s=3600.0, precision=0.02)
WORKLOADS = ("efficientnet-b0", "efficientnet-b4", "bert-base-fp16", "resnet50")
SLO = ("p99<=1.3x",)
KNOBS = ("gpu_max_hz", "mem_hz")


@dataclass(frozen=True)
class Pair:
    """One problem, both ways.

    Args:
        how: ``listed`` or ``tuned``.
        workload: What is served.
        seed: Of board and method.
        same: Whether both chose the same point.
        regret: By what fraction the adaptive choice needs more true energy than the fixed one; negative if less.
        fixed: Requests per trial of fixed windows; ``cut`` if some are cut short; ``adaptive`` of the others.
        holds: Whether the true p99 of the adaptive choice holds the true limit; ``fixed_holds`` of the other.
    """

    how: str
    workload: str
    seed: int
    same: bool
    regret: float
    fixed: float
    cut: float
    adaptive: float
    holds: bool
    fixed_holds: bool


class Listed:
    """An optimiser that goes through a list of points, whatever it sees."""

    def __init__(self, points: tuple[OperatingPoint, ...]) -> None:
        self._points = points

    def suggest(self, study: Study) -> OperatingPoint:
        """Return the next point of the list."""
        return self._points[len(study.trials)]


def pair(how: str, workload: str, seed: int, trials: int) -> Pair:
    """Return what both ways came to."""
    with patch("polythrottle.tuner._limits", lambda study, trial: ()):  # nothing is cut short
        fixed = studied(how, workload, seed, trials, FIXED)
    cut, adaptive = (studied(how, workload, seed, trials, window) for window in (FIXED, ADAPTIVE))
    device, served = _board(workload, seed)
    truths = [device.expected(served, study.best.point) if study.best else None for study in (fixed, adaptive)]
    limit_s = 1.3 * (device.expected(served, fixed.problem.space.default).latency.p99_s or 0.0)
    regret = truths[1].energy_j / truths[0].energy_j - 1 if truths[0] and truths[1] else float("nan")
    same = bool(fixed.best and adaptive.best and fixed.best.point == adaptive.best.point)
    holds = [truth is not None and (truth.latency.p99_s or 0.0) <= limit_s for truth in truths]
    each = [_requests(study) / len(study.completed) for study in (fixed, cut, adaptive)]
    return Pair(how, workload, seed, same, regret, *each, holds[1], holds[0])


def studied(how: str, workload: str, seed: int, trials: int, window: Window) -> Study:
    """Return a study made with one kind of window."""
    device, served = _board(workload, seed)
    space = device.space * served.space
    problem = Problem(space, tuple(map(Constraint.parse, SLO)), device.uri, workload, window=window)
    method: Optimizer = make_optimizer("bayes", Options()) if how == "tuned" else Listed(_spread(problem, seed, trials))
    started = Study(problem, how, seed)
    with (
        tempfile.TemporaryDirectory() as folder,
        Journal.create(Path(folder) / "study.jsonl", started, {}) as journal,
    ):
        for _ in tune(device, served, method, journal, Budget(trials), Rule(early=False)):
            pass
        return journal.study


def _board(workload: str, seed: int):
    device = SimulatedDevice(load_board("jetson-agx-orin"), seed=seed, knobs=KNOBS)
    return device, device.serve(load_model(workload))


def _spread(problem: Problem, seed: int, trials: int) -> tuple[OperatingPoint, ...]:
    """Return the default, and other points drawn without repeats."""
    order = np.random.default_rng(seed).permutation(len(problem.space)).tolist()
    others = [problem.space[i] for i in order if problem.space[i] != problem.space.default]
    return (problem.space.default, *others[: trials - 1])


def _requests(study: Study) -> int:
    seen: list[Measurement] = [trial.measurement for trial in study.completed if trial.measurement]
    return sum(measurement.requests or 0 for measurement in seen)


def main(say: Callable[[str], None] = print) -> None:
    """Print both ways beside each other."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--trials", type=int, default=20)
    parser.add_argument("--workloads", nargs="+", default=WORKLOADS)
    parser.add_argument("--how", nargs="+", default=("listed", "tuned"))
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    say(f"simulated AGX Orin, {given.trials} trials, {', '.join(SLO)}; requests per trial, warm-up included")
    pairs = []
    for each in _pairs(given):
        pairs.append(each)
        say(
            f"{each.how:7} {each.workload:16} seed {each.seed}  "
            f"{each.fixed:5.0f} (cut short {each.cut:4.0f}) -> {each.adaptive:4.0f} "
            f"({each.adaptive / each.fixed:4.0%})  {'same point' if each.same else f'{each.regret:+.2%} true energy'}"
            f"{'' if each.holds == each.fixed_holds else f'  holds {each.fixed_holds} -> {each.holds}'}"
        )
    for how in given.how:
        found = [each for each in pairs if each.how == how]
        ratio = float(np.mean([each.adaptive / each.fixed for each in found]))
        worst = max(abs(each.regret) for each in found)
        say(f"{how}: {ratio:.0%} of the requests; {sum(e.same for e in found)} of {len(found)} choices the same; "
            f"true energy of the others within {worst:.2%}")  # fmt: skip
    if given.json:
        given.json.write_text(json.dumps([vars(each) for each in pairs], indent=1) + "\n")


def _pairs(given: argparse.Namespace) -> Iterator[Pair]:
    for how in given.how:
        for workload in given.workloads:
            for seed in range(given.seeds):
                yield pair(how, workload, seed, given.trials)


if __name__ == "__main__":
    main()
