"""The search of the PolyThrottle paper (arXiv 2310.19991, §3): the yardstick, kept as published.

Five random starts, then constrained expected improvement (Gardner et al. 2014): EI(x) · P[feasible](x) with ξ = 0.1, on
Gaussian processes of energy and latency. In two phases where a space has CPU knobs: first the GPU, memory and batch
knobs with the CPU at its default, then the CPU knobs at the best point found. What the paper leaves open is filled with
what is usual: Matérn-5/2 with one length scale per knob, fitted by maximum likelihood with BoTorch's defaults; ξ in
standard deviations of the energies seen; 15 trials for the first phase, the number the paper says it needs.
"""

import warnings
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from polythrottle.measurement import Measurement
from polythrottle.optimize.features import coordinates
from polythrottle.optimize.remaining import Rows, generator, remaining_rows
from polythrottle.space import OperatingPoint, SearchSpace
from polythrottle.study import Study, Trial

STARTS, FIRST_PHASE = 5, 15


class PaperSearch:
    """Constrained Bayesian optimisation as PolyThrottle published it.

    Args:
        phases: 2 to tune the CPU knobs apart, as published; 1 to search all knobs jointly.
    """

    def __init__(self, phases: int = 2) -> None:
        self._phases = phases

    def suggest(self, study: Study) -> OperatingPoint:
        """Return a random point five times, then the point of greatest constrained expected improvement.

        Raises:
            Exhausted: If every point has been tried.
        """
        space, rows = study.problem.space, remaining_rows(study)
        rows = _phase(study, rows) if self._phases == 2 else rows
        if len(study.completed) < STARTS:
            return space[int(generator(study).choice(rows))]
        return space[int(rows[np.argmax(_worth(study)[rows])])]


def _phase(study: Study, rows: Rows) -> Rows:
    """Return the rows of the present phase; all that are left once both phases are exhausted."""
    space = study.problem.space
    cpu = [name for name in space.names if name.startswith("cpu")]
    others = [name for name in space.names if name not in cpu]
    if not cpu or not others:
        return rows
    best = study.best.point if study.best is not None else space.default
    first = _keeping(space, rows, cpu, space.default)
    second = _keeping(space, rows, others, best)
    wanted = first if len(study.trials) < FIRST_PHASE and len(first) else second
    return wanted if len(wanted) else rows


def _keeping(space: SearchSpace, rows: Rows, names: Sequence[str], point: OperatingPoint) -> Rows:
    """Return those rows at which the named knobs have the levels they have at a point."""
    keep = np.ones(len(rows), dtype=bool)
    for name in names:
        column = space.names.index(name)
        keep &= space.rows[rows, column] == space.knobs[column].levels.index(point[name])
    return rows[keep]


def _worth(study: Study) -> NDArray[np.float64]:
    """Return EI × P(feasible) at every point, shape (points,)."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from polythrottle.optimize.paper_model import constrained_improvement  # loads torch

        space = study.problem.space
        seen = [trial for trial in study.completed if trial.measurement is not None]
        rows = np.array([space.index(trial.point) for trial in seen])
        slacks = np.array([[one.slack(m) for one in study.constraints] for m in _measured(seen)]).reshape(len(seen), -1)
        energies = np.array([study.problem.objective.of(m) for m in _measured(seen)])
        return constrained_improvement(coordinates(space).unit, rows, energies, slacks, study.seed)


def _measured(trials: Sequence[Trial]) -> list[Measurement]:
    return [trial.measurement for trial in trials if trial.measurement is not None]
