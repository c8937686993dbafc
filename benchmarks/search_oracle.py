"""What a search of a recorded table could come to at best: python benchmarks/search_oracle.py.

Rows of a table were measured once each, so that each is off the surface they share by some luck. The oracle knows that
surface: of every row what all others of the table foretell, by the model `bayes` fits, and how far off such forecasts
are. Only the row itself is unknown until it is tried. It tries what is worth most by the rules of `bayes` and ends by
the rule of `tune`; a second one goes on in that order until it is within 2 % of the best row that holds. A search has
to find out the surface first. Prints a table in Markdown.
"""

import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache

import numpy as np
import torch
from numpy.typing import NDArray
from search import FACTORS, headline

from polythrottle.domain.study import ENOUGH
from polythrottle.lab import bench
from polythrottle.lab.bench.subjects import subject
from polythrottle.optimize import Options
from polythrottle.optimize.acquisition import log_expected_improvement, log_probability_below
from polythrottle.optimize.acquisition_value import AcquisitionValue
from polythrottle.optimize.bayes import best_rows, not_worth_it
from polythrottle.optimize.features import coordinates
from polythrottle.optimize.quantities import bound, names, table
from polythrottle.optimize.surrogate import basis, expected, fitted, trials_root
from polythrottle.tuning.stopping import WORTHLESS

CLOSE = 0.02
FITTED = 200
Array = NDArray[np.float64]


@dataclass(frozen=True, eq=False)
class Forecast:
    """What the other rows of a table foretell of each; logarithms.

    Args:
        latency: Mean latency, shape (rows,).
        energy: Energy per item, shape (rows,).
        latency_off: By how much that misses, a deviation.
        energy_off: Likewise.
    """

    latency: Array
    energy: Array
    latency_off: float
    energy_off: float


@dataclass(frozen=True)
class Outcome:
    """What the oracle came to on one table at one limit.

    Args:
        family: Where the table is from.
        regret: Of its answer.
        trials: How many it made.
        infeasible: Those of them that broke the limit.
        until_close: Trials that break the limit until it is within `CLOSE`, if it does not end before.
    """

    family: str
    regret: float
    trials: int
    infeasible: int
    until_close: int


@cache
def forecast(source: bench.Source) -> Forecast:
    """Return what the other rows foretell of each row of a table."""
    posed = subject(source, FACTORS[0])
    space = posed.problem.space
    quantities = names([bound(constraint) for constraint in posed.judge.constraints])
    values = table([posed.truth[point] for point in space], quantities)
    where = coordinates(space)
    values = values - expected(space.knobs, where, quantities)
    missed = off_the_others(np.hstack([where.unit, basis(space.knobs, where)]), where.unit.shape[1], values)
    latency = missed[:, quantities.index("mean")]
    energy = missed[:, :2].sum(axis=1)
    truth = table([posed.truth[point] for point in space], quantities)
    return Forecast(
        truth[:, quantities.index("mean")] - latency,
        truth[:, :2].sum(axis=1) - energy,
        float(np.sqrt(np.mean(latency**2))),
        float(np.sqrt(np.mean(energy**2))),
    )


def off_the_others(inputs: Array, columns: int, values: Array) -> Array:
    """Return by how much each row is off what all others foretell of it (Rasmussen & Williams 2006, eq. 5.12).

    Scales are fitted to `FITTED` rows at most, and all rows foretell.

    Args:
        inputs: Coordinates and basis functions of each row, shape (rows, inputs).
        columns: How many of them are coordinates.
        values: Less what physics expects, shape (rows, quantities).
    """
    everywhere = torch.from_numpy(inputs)
    targets = torch.from_numpy(values - values.mean(axis=0))
    some = np.random.default_rng(0).permutation(len(values))[:FITTED]
    model = fitted(everywhere[some], targets[some], columns, np.zeros_like(values[some]))
    with torch.no_grad():
        inverse = torch.cholesky_inverse(trials_root(model, everywhere, targets.shape[1]))
        weights = (inverse @ targets.T.unsqueeze(-1)).squeeze(-1)
        missed: Array = (weights / torch.diagonal(inverse, dim1=-2, dim2=-1)).T.numpy()
    return missed


def search(source: bench.Source, slo: str) -> Outcome:
    """Return what the oracle comes to on a table at a limit."""
    posed = subject(source, slo)
    space = posed.problem.space
    known = forecast(source)
    truth = [posed.truth[point] for point in space]
    holds = [posed.judge.holds(one) for one in truth]
    limit = bound(posed.judge.constraints[0]).limit
    feasible = log_probability_below(torch.from_numpy(known.latency), torch.tensor(known.latency_off), limit).numpy()
    tried = [space.index(space.default)]
    answer: tuple[float, int, int] | None = None
    while True:
        best = min((truth[row].energy_j for row in tried if holds[row]), default=None)
        regret = np.inf if best is None else best / posed.best_j - 1.0
        left = np.setdiff1d(np.arange(len(space)), tried)
        infeasible = sum(not holds[row] for row in tried)
        worth = value(known, feasible, best)
        ends = best is not None and len(tried) >= ENOUGH and (not len(left) or over(worth, left))
        if answer is None and ends:
            answer = (float(regret), len(tried), infeasible)
        if answer is not None and regret <= CLOSE:
            return Outcome(source.name.partition("__")[0], *answer, close(tried, holds, truth, posed.best_j))
        settled = len(tried) >= ENOUGH
        tried.append(int(best_rows(worth, left, Options(), settled=settled)[0]))


def over(worth: AcquisitionValue, left: NDArray[np.intp]) -> bool:
    """Return whether the rule of `tune` ends a search here."""
    return bool(np.exp(worth.total[left].max()) < WORTHLESS) or not_worth_it(worth, left)


def close(tried: Sequence[int], holds: Sequence[bool], truth: Sequence[object], best_j: float) -> int:
    """Return how many of the trials broke the limit before the first that is within `CLOSE`."""
    broke = 0
    for row in tried:
        if holds[row] and truth[row].energy_j <= best_j * (1.0 + CLOSE):  # type: ignore[attr-defined]
            break
        broke += not holds[row]
    return broke


def value(known: Forecast, feasible: Array, best: float | None) -> AcquisitionValue:
    """Return what trying each row is worth to who knows what the others foretell of it."""
    sure = np.zeros(len(feasible))
    if best is None:
        return AcquisitionValue(-known.energy, feasible, sure, improving=False, assured=feasible)
    deviation = torch.full((len(feasible),), known.energy_off, dtype=torch.double)
    gain = log_expected_improvement(torch.from_numpy(known.energy), deviation, float(np.log(best))).numpy()
    return AcquisitionValue(gain, feasible, sure, improving=True, assured=feasible)


def lines(outcomes: Sequence[Outcome]) -> Iterator[str]:
    """Yield the lines of the table."""
    yield "| tables | runs | within 2 % | within 5 % | trials | infeasible | infeasible until within 2 %: mean; 95 % |"
    yield "| --- | --- | --- | --- | --- | --- | --- |"
    for family in (*dict.fromkeys(one.family for one in outcomes), "all"):
        some = [one for one in outcomes if family in (one.family, "all")]
        mean = statistics.fmean
        shares = " | ".join(f"{mean(one.regret <= most for one in some):.0%}" for most in (CLOSE, 0.05))
        counts = f"{mean(one.trials for one in some):.1f} | {mean(one.infeasible for one in some):.1f}"
        until = [one.until_close for one in some]
        yield f"| {family} | {len(some)} | {shares} | {counts} | {mean(until):.1f}; {np.quantile(until, 0.95):.0f} |"


def main() -> None:
    """Print what the oracle comes to on the headline tables."""
    sources = headline()
    outcomes = [search(source, slo) for source in sources for slo in FACTORS]
    off = [forecast(source).latency_off for source in sources]
    print("\n".join(lines(outcomes)))
    median = np.median(off)
    print(f"\nOther rows foretell a row's latency to {min(off):.1%} to {max(off):.1%}, {median:.1%} in the median.")


if __name__ == "__main__":
    main()
