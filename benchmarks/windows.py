"""Windows that end when they know enough, against fixed ones of 1,000 requests: the same choice, for how many?

    python benchmarks/windows.py [--seeds 8] [--trials 20] [--workloads NAME …] [--json FILE]

On the simulated AGX Orin two things are compared. `listed`: the same points, the default and those a space-filling
sequence gives, are measured both ways, so that only the windows differ. `tuned`: whole studies of the search method, in
which each way goes its own course.

The fixed windows are those of arXiv 2310.19991, 1,000 requests whatever they show. What they would take if a window
that plainly breaks the SLO were cut short, as without --precision, is shown as well (`cut`). Simulated windows at one
point differ by 2 % in power and 1 % in time, however long they are, as real ones do. So two searches by fixed windows,
with other such noise, do not agree either: `again` is the second one, and how far it agrees with the first is as far as
anything can.

Each study has two answers: the point whose own window was best (`Study.best` of a study that chose none), and the one
the models expect to be (`optimize.answer`). True energies are those an endless window would measure.
"""

import argparse
import json
import tempfile
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import nullcontext
from dataclasses import asdict, dataclass, replace
from functools import lru_cache
from itertools import product
from pathlib import Path
from unittest.mock import patch

import numpy as np

from polythrottle.backends.simulated import SimulatedDevice
from polythrottle.catalog import load_board, load_model
from polythrottle.domain.measurement import Measurement, Window
from polythrottle.domain.ports import Optimizer
from polythrottle.domain.problem import Constraint, Problem
from polythrottle.domain.space import OperatingPoint
from polythrottle.domain.study import Study
from polythrottle.optimize import ConstrainedBayes, make_optimizer
from polythrottle.optimize.options import Options
from polythrottle.storage.journal import Journal
from polythrottle.tuning.stopping import Budget, Rule
from polythrottle.tuning.tuner import tune

FIXED = Window(1000, 0.0, 1000, timeout_s=3600.0)
ADAPTIVE = Window(30, 0.0, 1000, timeout_s=3600.0, precision=0.02)
WORKLOADS = ("efficientnet-b0", "efficientnet-b4", "bert-base-fp16", "resnet50")
SLO = ("p99<=1.3x",)
KNOBS = ("gpu_max_hz", "mem_hz")


WAYS = {"fixed": FIXED, "again": FIXED, "cut": FIXED, "adaptive": ADAPTIVE}
ANSWERS = ("window", "models")
OTHER_NOISE = 1000


@dataclass(frozen=True)
class Answer:
    """A point a study ended at.

    Args:
        point: Which.
        excess: By what fraction it needs more true energy than the best point whose true p99 holds; negative if less.
        holds: Whether its true p99 holds the true limit.
    """

    point: str
    excess: float
    holds: bool


@dataclass(frozen=True)
class Course:
    """One study.

    Args:
        how: ``listed`` or ``tuned``.
        workload: What is served.
        seed: Of board and method; of ``again`` the board has another.
        way: One of `WAYS`.
        requests: Per trial, warm-up and repeats included.
        window: The answer by the best window.
        models: The answer by the models.
    """

    how: str
    workload: str
    seed: int
    way: str
    requests: float
    window: Answer
    models: Answer


class Listed:
    """An optimiser that goes through a list of points, whatever it sees."""

    def __init__(self, points: tuple[OperatingPoint, ...]) -> None:
        self._points = points

    def suggest(self, study: Study) -> OperatingPoint:
        """Return the next point of the list."""
        return self._points[len(study.trials)]


def courses(job: tuple[str, str, int, int]) -> list[Course]:
    """Return what all ways came to, given how, workload, seed and number of trials."""
    how, workload, seed, trials = job
    found = []
    for way, window in WAYS.items():
        uncut = (
            patch("polythrottle.tuning.tuner._limits", lambda study, trial: ())
            if way in ("fixed", "again")
            else nullcontext()
        )
        with uncut:
            study = studied(how, workload, seed, trials, window, OTHER_NOISE if way == "again" else 0)
        models, luckiest = ConstrainedBayes().answer(study), replace(study, answer=None).best
        each = [_judged(workload, trial.point) for trial in (luckiest, models) if trial is not None]
        found.append(Course(how, workload, seed, way, _requests(study) / len(study.completed), *each))
    return found


def _judged(workload: str, point: OperatingPoint) -> Answer:
    truths = _truths(workload)
    default = next(iter(truths.values()))
    limit_s = 1.3 * default.latency.p99_s
    least_j = min(truth.energy_j for truth in truths.values() if truth.latency.p99_s <= limit_s)
    return Answer(str(point), truths[point].energy_j / least_j - 1, truths[point].latency.p99_s <= limit_s)


@lru_cache
def _truths(workload: str) -> dict[OperatingPoint, Measurement]:
    """Return what is true at every point; the default is the first."""
    device, served = _board(workload, 0)
    space = device.space * served.space
    points = [space.default, *(point for point in space if point != space.default)]
    return dict(zip(points, device.expected_all(served, points), strict=True))


def studied(how: str, workload: str, seed: int, trials: int, window: Window, noise: int = 0) -> Study:
    """Return a study made with one kind of window; ``noise`` is added to the seed of the board alone."""
    device, served = _board(workload, seed + noise)
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


@dataclass(frozen=True)
class Agreement:
    """How far one way agrees with fixed windows, by one kind of answer, over all problems and seeds.

    Args:
        share: Of the requests of fixed windows.
        same: How many of ``count`` answers are the same point.
        count: How many pairs there are.
        mean: Of the true energy of its answers over that of the others, less 1, where both truly hold the limit;
            ``half`` is its 95 % interval's.
        half: Likewise.
        low: The least of them; ``high`` the most.
        high: Likewise.
        near: Share of those whose true energy is within 1 % of the other's.
        excess: Mean of the true energy over that of the best point whose true p99 holds, less 1, where it holds.
        broken: How many answers truly break the limit.
    """

    share: float
    same: int
    count: int
    mean: float
    half: float
    low: float
    high: float
    near: float
    excess: float
    broken: int


def agreement(found: Sequence[Course], way: str, answer: str) -> Agreement:
    """Return how far a way agrees with fixed windows."""
    keyed = {(course.workload, course.seed, course.way): course for course in found}
    both = [(keyed[w, s, "fixed"], course) for (w, s, its), course in keyed.items() if its == way]
    pairs = [(getattr(one, answer), getattr(other, answer)) for one, other in both]
    holding = [(one, other) for one, other in pairs if one.holds and other.holds]
    ratios = np.array([(1 + other.excess) / (1 + one.excess) - 1 for one, other in holding])
    held = [other.excess for _, other in pairs if other.holds]
    return Agreement(
        share=float(np.mean([other.requests / one.requests for one, other in both])),
        same=sum(one.point == other.point for one, other in pairs),
        count=len(pairs),
        mean=float(ratios.mean()),
        half=float(1.96 * ratios.std(ddof=1) / len(ratios) ** 0.5) if len(ratios) > 1 else float("nan"),
        low=float(ratios.min()),
        high=float(ratios.max()),
        near=float(np.mean(np.abs(ratios) <= 0.01)),
        excess=float(np.mean(held)) if held else float("nan"),
        broken=len(pairs) - len(held),
    )


def lines(found: Sequence[Course]) -> Iterator[str]:
    """Yield the tables of the page."""
    yield "| points | answer by | windows | requests | same point | true energy | within 1 % | over best | broken |"
    yield "|---|---|---|---|---|---|---|---|---|"
    for how, answer, way in product(dict.fromkeys(course.how for course in found), ANSWERS, WAYS):
        one = agreement([course for course in found if course.how == how], way, answer)
        against = ("–", "–", "–") if way == "fixed" else (
            f"{one.same} of {one.count}",
            f"{one.mean:+.2%} ± {one.half:.2%} ({one.low:+.1%} to {one.high:+.1%})",
            f"{one.near:.0%}",
        )  # fmt: skip
        cells = (how, answer, way, f"{one.share:.0%}", *against, f"{one.excess:+.2%}", f"{one.broken} of {one.count}")
        yield f"| {' | '.join(cells)} |"


def main(say: Callable[[str], None] = print) -> None:
    """Print how far the ways agree."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=8)
    parser.add_argument("--trials", type=int, default=20)
    parser.add_argument("--workloads", nargs="+", default=WORKLOADS)
    parser.add_argument("--how", nargs="+", default=("listed", "tuned"))
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    say(f"simulated AGX Orin, {given.trials} trials, {', '.join(SLO)}; requests per trial, warm-up included")
    found: list[Course] = []
    jobs = list(product(given.how, given.workloads, range(given.seeds), [given.trials]))
    with ProcessPoolExecutor(given.jobs) as pool:
        for ways in pool.map(courses, jobs):
            found += ways
            say("  ".join([f"{ways[0].how:7} {ways[0].workload:16} seed {ways[0].seed}", *map(_brief, ways)]))
    for line in lines(found):
        say(line)
    if given.json:
        given.json.write_text(json.dumps([asdict(each) for each in found], indent=1) + "\n")


def _brief(course: Course) -> str:
    return f"{course.way} {course.requests:.0f}: {course.window.excess:+.1%}, {course.models.excess:+.1%}"


if __name__ == "__main__":
    main()
