"""What a trial at each point is worth, for energy, energy times delay, delay or a front of both.

Which visited point is the answer.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import NormalDist

import numpy as np
import torch
from botorch.exceptions.errors import ModelFittingError
from botorch.fit import fit_gpytorch_mll
from botorch.models import SingleTaskGP
from botorch.models.transforms.outcome import Standardize
from botorch.utils.probability.utils import log_erfcx, log_ndtr, log_phi
from botorch.utils.sampling import manual_seed
from gpytorch.kernels import MaternKernel, ScaleKernel
from gpytorch.mlls import ExactMarginalLogLikelihood
from numpy.typing import NDArray
from torch import Tensor

from polythrottle.domain.measurement import Measurement
from polythrottle.domain.problem import Constraint, Objective
from polythrottle.domain.study import Study, Trial, TrialState
from polythrottle.optimize.features import Array, Rows
from polythrottle.optimize.options import Ingredient, Options
from polythrottle.optimize.posterior import posterior_given, prior_mean, rows_of, running_rows, study_posterior
from polythrottle.optimize.quantities import DRAW, ENERGY, TIME, Bound, bound, doubts, names, table
from polythrottle.optimize.safety import ceiling, log_below
from polythrottle.optimize.surrogate import QuantityPosterior, one_thread

_FAR = -1e5
_LEAST = 1e-300
_BLOCK = 512
"""Points at a time: what a processor's cache holds of them and thirty strips."""


# Improvement and feasibility, both as logarithms, so that neither vanishes far away.


def log_expected_improvement(mean: Tensor, std: Tensor, best: float | Tensor) -> Tensor:
    """Return log E[max(best − y, 0)] for y ~ N(mean, std²) (Jones et al. 1998; LogEI of Ament et al. 2023, eq. 8).

    Args:
        mean: Shape (points,).
        std: Shape (points,), > 0.
        best: The value to improve on, or several, against which columns of `mean` and `std` stand: shape (values,).

    Returns:
        Finite logarithms, shape (points,), or (points, values).
    """
    return std.log() + log_standard_improvement((best - mean) / std)


def log_standard_improvement(z: Tensor) -> Tensor:
    """Return log(φ(z) + z Φ(z)) without cancellation at any z (Ament et al. 2023, eq. 9).

    Below −1 it is log φ(z) + log(1 − √(π/2) |z| erfcx(|z|/√2)), whose last term tends to −2 log |z|.
    """
    near = z.clamp_min(-1.0)
    below = z.clamp(_FAR, -1.0)
    far = z.clamp_max(-1.0)
    direct = (log_phi(near).exp() + near * log_ndtr(near).exp()).log()
    ratio = 0.5 * math.log(math.pi / 2.0) + (-below).log() + log_erfcx(-below / math.sqrt(2.0))
    tail = torch.where(z > _FAR, (-torch.expm1(ratio)).clamp_min(1e-12).log(), -2.0 * (-far).log())
    return torch.where(z > -1.0, direct, log_phi(z) + tail)


def log_probability_below(mean: Tensor, std: Tensor, limit: float) -> Tensor:
    """Return log P(y ≤ limit) for y ~ N(mean, std²), shape (points,) (Gardner et al. 2014, §3.2)."""
    return log_ndtr((limit - mean) / std)


# What a trial adds to a front of two quantities that are both to be small.


def front_of(values: Tensor) -> Tensor:
    """Return the rows that no other row beats in both columns, the first column ascending, shape (front, 2)."""
    kept: list[Tensor] = []
    for row in sorted(values, key=lambda row: (float(row[0]), float(row[1]))):
        if not kept or row[1] < kept[-1][1]:
            kept.append(row)
    if kept:
        return torch.stack(kept)
    return values.new_zeros((0, 2))


def log_improvement(mean: Tensor, std: Tensor, values: Tensor, reference: Tensor) -> Tensor:
    """Return the log of by how much a trial is expected to enlarge the area up to the reference.

    The quantities are independent normals a and b. Between two neighbours of the front, from edge aᵢ to aᵢ₊₁, the front
    has height bᵢ, and a trial adds width × height there: E[(aᵢ₊₁ − max(a, aᵢ))⁺] · E[(bᵢ − b)⁺]. Both are expected
    improvements or differences of such, so the sum over strips is exact (Yang et al. 2019, in the strips of Daulton et
    al. 2020), and in logarithms it does not vanish far away (Ament et al. 2023).

    Args:
        mean: Of both quantities at each point, shape (points, 2).
        std: Likewise, > 0.
        values: What was seen, shape (values, 2); it need not be a front.
        reference: What nothing worse than counts, shape (2,).

    Returns:
        Finite logarithms, shape (points,).
    """
    edges, heights = _strips(values, reference)
    blocks = zip(torch.split(mean, _BLOCK), torch.split(std, _BLOCK), strict=True)
    return torch.cat([_log_area(*block, edges, heights) for block in blocks])


def _log_area(mean: Tensor, std: Tensor, edges: Tensor, heights: Tensor) -> Tensor:
    """Return the log of the area each point is expected to add to the strips, shape (points,)."""
    upto = log_expected_improvement(mean[:, :1], std[:, :1], edges[1:])
    below = torch.full_like(upto, -torch.inf)
    below[:, 1:] = upto[:, :-1]
    width = upto + (-torch.expm1(below - upto)).clamp_min(_LEAST).log()
    return torch.logsumexp(width + log_expected_improvement(mean[:, 1:], std[:, 1:], heights), dim=1)


def _strips(values: Tensor, reference: Tensor) -> tuple[Tensor, Tensor]:
    """Return the edges of the strips, the first at minus infinity, shape (strips + 1,), and their heights (strips,)."""
    inside = front_of(values[(values < reference).all(dim=1)])
    edges = torch.cat([values.new_tensor([-torch.inf]), inside[:, 0], reference[:1]])
    return edges, torch.cat([reference[1:], inside[:, 1]])


# What is to be improved on, as sums of modelled logarithms: energy, energy × delay, delay, or a front of both.

_MARGIN = 0.1
"""How far beyond the front's worst its reference point lies, as a share of its extent, so that its ends count too."""
_LEAST_EXTENT = 0.01
Normal = tuple[Tensor, Tensor]
"""Mean and variance at each point, shape (points,) each."""


def delay(study: Study) -> str | None:
    """Return which latency the objective needs a model of, beside energy; None for energy alone."""
    objective = study.problem.objective
    if objective is Objective.PARETO:
        return study.front_metric
    if objective is Objective.ENERGY:
        return None
    return "mean"


def terms(study: Study) -> tuple[str, ...]:
    """Return the quantities whose sum is the logarithm of the objective; of a front, that of energy."""
    objective = study.problem.objective
    if objective is Objective.LATENCY:
        return ("mean",)
    if objective is Objective.EDP:
        return (TIME, DRAW, "mean")
    return (TIME, DRAW)


def log_objective(study: Study, belief: QuantityPosterior, quantities: Sequence[str], energy: Normal) -> Normal:
    """Return mean and variance of the logarithm of what is minimised; of a front, that of energy.

    Args:
        study: Says what that is.
        belief: Of the quantities.
        quantities: Their names.
        energy: Mean and variance of log energy per item.
    """
    if study.problem.objective not in (Objective.EDP, Objective.LATENCY):
        return energy
    late = _of(belief, quantities, "mean")
    if study.problem.objective is Objective.LATENCY:
        return late
    return (energy[0] + late[0], energy[1] + late[1])


def log_gain(
    study: Study,
    belief: QuantityPosterior,
    quantities: Sequence[str],
    energy: Normal,
    held: Sequence[Measurement],
    bounds: Sequence[Bound],
    awaited: Rows,
) -> Tensor:
    """Return the log of what a trial is expected to improve, shape (points,).

    For one objective that is its logarithm; for a front it is the area below the front of log energy over log latency,
    per unit of the latter, so that both are shares of an energy.

    Args:
        study: Says what is minimised.
        belief: Of the quantities.
        quantities: Their names.
        energy: Mean and variance of log energy per item.
        held: What was seen at the trials that hold the limits, at least one.
        bounds: The limits; beyond one on the front's latency nothing counts.
        awaited: Rows of points that are being measured now and likely to hold the limits: to improve on what they are
            expected to be is what is left to the next trial.
    """
    objective = study.problem.objective
    if objective is not Objective.PARETO:
        mean, variance = log_objective(study, belief, quantities, energy)
        best = min((math.log(min(objective.of(one) for one in held)), *mean[awaited].tolist()))
        return log_expected_improvement(mean, variance.sqrt(), best)
    late = _of(belief, quantities, study.front_metric)
    mean = torch.stack([late[0], energy[0]], dim=1)
    std = torch.stack([late[1], energy[1]], dim=1).sqrt()
    parts = torch.from_numpy(table(held, (study.front_metric, TIME, DRAW)))
    seen = torch.cat([torch.stack([parts[:, 0], parts[:, 1] + parts[:, 2]], dim=1), mean[awaited]])
    limit = min((one.limit for one in bounds if one.quantity == study.front_metric), default=math.inf)
    reference, extent = _reference(mean, seen, limit)
    return log_improvement(mean, std, seen, reference) - extent[0].log()


def _of(belief: QuantityPosterior, quantities: Sequence[str], name: str) -> Normal:
    k = list(quantities).index(name)
    return belief.mean[:, k], belief.variance[:, k]


def _reference(mean: Tensor, seen: Tensor, limit: float) -> tuple[Tensor, Tensor]:
    """Return a point worse than the whole front, as seen and as foretold, and the front's extent; shape (2,) each.

    The front reaches from the fastest point to the one of least energy: the worst of these two in each quantity, but
    no latency beyond its limit.
    """
    ends = torch.cat([seen, mean[mean.argmin(dim=0)]])
    worst = ends.max(dim=0).values
    best = ends.min(dim=0).values
    reference = worst + _MARGIN * (worst - best).clamp_min(_LEAST_EXTENT)
    reference = torch.minimum(reference, reference.new_tensor([limit, math.inf]))
    return reference, (reference - best).clamp_min(_LEAST_EXTENT)


# What a trial at each point of a space is worth, given what a study has seen.
#
# Loads torch; `bayes` imports it when a suggestion needs a model.

WIDER = 1.5
"""Models of few trials are surer than they should be: deviations are this much wider where a limit must not break."""
SURE = 0.85
"""How probably a point must hold every limit to be the answer where windows differ by chance."""
_SURER = 0.01
_SAVES = 0.9
"""A point less sure to hold than the default by `_SURER` is the answer only if it saves with this chance."""
_REMOTE = 0.0005
"""A point counts towards what may be left at most if it holds every limit and saves as much with this chance.

Of one point it is far below one in twenty, for there are many points, and models of few trials are surer than they
should be: at this chance, which was chosen by them, the bound held at 57 of 60 ends on the recorded tables, 58 of 60
with history, and 12 of 12 on simulated boards (``benchmarks/search.md``).
"""
_HALVINGS = 40
_LEAST_STEP = 1e-6
"""What a belief moves by at least, so that what is known exactly divides nothing by zero."""
_FAILED = 0.3
"""What stands for a failure where the models' scales are those of logarithms: a third."""


@dataclass(frozen=True, eq=False)
class AcquisitionValue:
    """What a trial at each point promises; logarithms, shape (points,) each.

    Args:
        gain: Expected improvement of the log objective, of a front per unit of log latency; while no feasible point is
            known, less the log objective.
        feasible: Probability that it holds every limit, model's doubt and noise counted.
        sound: Probability that it does not fail.
        improving: Whether there is a feasible trial to improve on.
        assured: As ``feasible``; where a risk is given, as `log_assured` has it.
        accepted: Probability that its trial makes it a point that may be the answer: as ``feasible`` where figures do
            not differ by chance, else at most as `log_accepted` has it.
    """

    gain: Array
    feasible: Array
    sound: Array
    improving: bool
    assured: Array
    accepted: Array

    @property
    def sure(self) -> NDArray[np.bool_]:
        """Whether each point may be the answer where windows differ by chance, shape (points,)."""
        return self.feasible >= math.log(SURE)

    @property
    def total(self) -> Array:
        """Gain, if it is accepted and does not fail."""
        return self.gain + self.accepted + self.sound


@one_thread()
def acquisition_value(study: Study, constraints: Sequence[Constraint], options: Options) -> AcquisitionValue:
    """Return what a trial at each point is worth.

    While no feasible point is known there is nothing to improve on, and feasibility leads.

    Args:
        study: What has been seen.
        constraints: What must hold, with absolute limits.
        options: Earlier studies to learn from, and which ingredients to leave out.

    Raises:
        InvalidInput: If a constraint is on a quantity that is not measured here.
    """
    held = _held(study, constraints)
    bounds = [bound(constraint) for constraint in constraints]
    quantities = modelled(bounds, delay(study), options)
    sound = _log_sound(study, options)
    belief = study_posterior(study, quantities, options)
    if belief is None:
        gain = -prior_mean(study, terms(study), options).sum(dim=1)
        unknown = np.zeros(len(gain))
        return AcquisitionValue(
            _array(gain), unknown, _array(sound), improving=False, assured=unknown, accepted=unknown
        )
    feasible = log_feasible(belief, quantities, bounds)
    energy = log_energy(belief, options)
    trusted = _trusted(study, held, feasible)
    if trusted:
        gain = log_gain(study, belief, quantities, energy, trusted, bounds, _awaited(study, feasible))
    else:
        gain = -log_objective(study, belief, quantities, energy)[0]
    if options.risk is None:
        assured = feasible
    else:
        assured = log_assured(study, belief, quantities, bounds)
    if study.by_chance:
        accepted = torch.minimum(feasible, log_accepted(belief, quantities, bounds))
    else:
        accepted = feasible
    return AcquisitionValue(
        _array(gain),
        _array(feasible),
        _array(sound),
        improving=bool(trusted),
        assured=_array(assured),
        accepted=_array(accepted),
    )


def modelled(bounds: Sequence[Bound], delay: str | None, options: Options) -> tuple[str, ...]:
    """Return every quantity to model; without keeping time and draw apart, energy for itself is the last."""
    found = tuple(dict.fromkeys((*names(bounds), *(() if delay is None else (delay,)))))
    if Ingredient.APART not in options.without:
        return found
    return (*found, ENERGY)


def log_energy(belief: QuantityPosterior, options: Options) -> tuple[Tensor, Tensor]:
    """Return mean and variance of log energy per item, shape (points,) each."""
    if Ingredient.APART not in options.without:
        return belief.energy
    return (belief.mean[:, -1], belief.variance[:, -1])


def _array(worth: Tensor) -> Array:
    return np.asarray(worth.numpy(), dtype=float)


def _held(study: Study, constraints: Sequence[Constraint]) -> list[Trial]:
    """Return the trials that hold the constraints."""
    seen = [(trial, trial.measurement) for trial in study.completed if trial.measurement is not None]
    return [t for t, m in seen if min((constraint.slack(m) for constraint in constraints), default=0.0) >= 0.0]


def _trusted(study: Study, held: list[Trial], log_hold: Tensor) -> list[Measurement]:
    """Return what was seen at those of the trials that hold whose point may be the answer; at all if there is none.

    A window that held its limits by luck is nothing to improve on.
    """
    here = [trial for trial in held if trial.point in study.problem.space]
    if study.by_chance:
        chances = log_hold[torch.from_numpy(rows_of(study, here))].tolist()
        held = [trial for trial, chance in zip(here, chances, strict=True) if chance >= math.log(SURE)] or held
    return [trial.measurement for trial in held if trial.measurement is not None]


def _awaited(study: Study, feasible: Tensor) -> Rows:
    """Return the rows that are being measured now and hold every limit more likely than not."""
    rows = running_rows(study)
    kept: Rows = rows[feasible.numpy()[rows] >= math.log(0.5)]
    return kept


def log_feasible(
    belief: QuantityPosterior, quantities: tuple[str, ...], bounds: Sequence[Bound], wider: float = 1.0
) -> Tensor:
    """Return the log probability that a trial holds every bound, shape (points,), quantities taken as independent."""
    total = torch.zeros(len(belief.mean), dtype=torch.double)
    for one in bounds:
        k = quantities.index(one.quantity)
        std = wider * (belief.variance[:, k] + belief.noise[k]).sqrt()
        total = total + log_probability_below(belief.mean[:, k], std, one.limit)
    return total


def log_accepted(belief: QuantityPosterior, quantities: tuple[str, ...], bounds: Sequence[Bound]) -> Tensor:
    """Return the log probability that after one more window the models are `SURE` of a point, shape (points,).

    With variance v of what is believed and n of a window, v n / (v + n) is left afterwards, and the mean moves by a
    normal of variance v² / (v + n): the knowledge gradient's step (Frazier, Powell and Dayanik, SIAM J. Control and
    Optimization 47, 2008). Where windows are too vague to tell on which side of a limit a point lies, the next one will
    not make it the answer, however likely its own percentile is to fall below.
    """
    needed = NormalDist().inv_cdf(SURE)
    total = torch.zeros(len(belief.mean), dtype=torch.double)
    for one in bounds:
        k = quantities.index(one.quantity)
        variance = belief.variance[:, k]
        noise = belief.noise[k]
        left = variance * noise / (variance + noise)
        step = (variance / (variance + noise).sqrt()).clamp_min(_LEAST_STEP)
        total = total + log_probability_below(belief.mean[:, k] + needed * (left + noise).sqrt(), step, one.limit)
    return total


def log_assured(
    study: Study, belief: QuantityPosterior, quantities: tuple[str, ...], bounds: Sequence[Bound]
) -> Tensor:
    """Return as `log_feasible`, with the doubt widened by `WIDER`, of what lies below a `ceiling`, shape (points,)."""
    trials = [trial for trial in study.completed if trial.point in study.problem.space]
    measurements = [trial.measurement for trial in trials if trial.measurement]
    seen = rows_of(study, trials)
    total = torch.zeros(len(belief.mean), dtype=torch.double)
    for one in bounds:
        k = quantities.index(one.quantity)
        values = table(measurements, (one.quantity,))[:, 0]
        doubt = np.maximum(doubts(measurements, (one.quantity,))[:, 0], float(belief.noise[k]))
        told = [place for place, value in enumerate(values) if math.isfinite(value)]
        kept = [measurements[place] for place in told]
        above = ceiling(study, seen[told], values[told], doubt[told], kept, one.quantity)
        std = WIDER * (belief.variance[:, k] + belief.noise[k]).sqrt()
        total = total + log_below(belief.mean[:, k], std, one.limit, above)
    return total


def _log_sound(study: Study, options: Options) -> Tensor:
    """Return the log probability that a trial does not fail, shape (points,); 0 while none has failed.

    Failing is regressed on like any other quantity, from 0 for a trial that was measured to `_FAILED` for one that
    failed, and a point is sound below half of that (least-squares classification, Rasmussen & Williams 2006, §6.5).
    """
    ended = [
        trial
        for trial in study.trials
        if trial.state is not TrialState.RUNNING and trial.absent is None and trial.point in study.problem.space
    ]
    outcome = np.array([[_FAILED * (trial.state is TrialState.FAILED)] for trial in ended])
    if outcome.any():
        belief = posterior_given(study, rows_of(study, ended), outcome, options)
    else:
        belief = None
    if belief is None:
        return torch.zeros(len(study.problem.space), dtype=torch.double)
    return log_probability_below(belief.mean[:, 0], belief.variance[:, 0].sqrt(), _FAILED / 2.0)


# Which of the points that were visited is the answer, as the models have it.
#
# The least of many figures that differ by chance is too low, and rarely that of the best point (the optimizer's
# curse: Smith & Winkler, Management Science 52, 2006). The models know every window, how far each is to be trusted,
# and what its neighbours saw, so that what they expect at a point has less of its own window's luck.


@one_thread()
def best_visited(study: Study, options: Options) -> Trial | None:
    """Return the trial whose point the models expect to be best of those that held every limit.

    A point of which they are not `SURE` that it truly holds, although its own window did, is none unless all are so:
    then it is the one that holds most probably. The default is it where it holds more surely and windows leave open
    whether another saves anything. Of a front it is the point of least energy.

    Args:
        study: What has been seen; every limit has an absolute value.
        options: Earlier studies to learn from, and which ingredients to leave out.

    Raises:
        InvalidInput: If a relative limit has nothing to multiply.
    """
    held = [trial for trial in study.completed if study.feasible(trial) and trial.point in study.problem.space]
    bounds = [bound(constraint) for constraint in study.constraints]
    quantities = modelled(bounds, delay(study), options)
    belief = study_posterior(study, quantities, options)
    if belief is None or not held:
        return study.best
    # Of several windows at one point the longest speaks for it.
    held.sort(key=lambda trial: -(trial.measurement.latency.queries or 0) if trial.measurement else 0)
    rows = torch.from_numpy(rows_of(study, held))
    log_hold = log_feasible(belief, quantities, bounds)[rows]
    mean, variance = (each[rows] for each in log_objective(study, belief, quantities, log_energy(belief, options)))
    sure = log_hold >= math.log(SURE)
    best = int(torch.where(sure, mean, math.inf).argmin() if sure.any() else log_hold.argmax())
    for place in [k for k, one in enumerate(held) if one.point == study.problem.space.default][:1]:
        std = (variance[place] + variance[best]).sqrt().clamp_min(_LEAST)
        saves = torch.special.ndtr((mean[place] - mean[best]) / std)
        if saves < _SAVES and log_hold[place].exp() - log_hold[best].exp() > _SURER:
            return held[place]
    return held[best]


@one_thread()
def most_left(study: Study, answer: Trial, options: Options) -> float:
    """Return which share of the answer's objective a better point may save at most, as far as the models can tell.

    It is the most that any one point saves and holds every limit with a chance of `_REMOTE`. Points that were tried
    count only where their windows differ by chance; what is on record is known.

    Args:
        study: What has been seen; every limit has an absolute value.
        answer: A completed trial of it.
        options: Earlier studies to learn from, and which ingredients to leave out.

    Returns:
        From 0 to 1; NaN if the models say nothing.
    """
    bounds = [bound(constraint) for constraint in study.constraints]
    quantities = modelled(bounds, delay(study), options)
    belief = study_posterior(study, quantities, options)
    if belief is None:
        return math.nan
    # What a user's own risk forbids to try is known as little as it is where a limit must not break.
    wider = 1.0 if options.risk is None else WIDER
    mean, variance = log_objective(study, belief, quantities, log_energy(belief, options))
    holds = torch.ones_like(mean)
    for one in bounds:
        k = quantities.index(one.quantity)
        std = wider * belief.variance[:, k].sqrt().clamp_min(_LEAST)
        holds = holds * torch.special.ndtr((one.limit - belief.mean[:, k]) / std)
    (place,) = rows_of(study, [answer]).tolist()
    best = mean[place]
    if not study.by_chance:
        tried = [trial for trial in study.completed if trial.point in study.problem.space]
        holds[torch.from_numpy(rows_of(study, tried))] = 0.0
    std = wider * variance.sqrt().clamp_min(_LEAST)
    # By halving: the chance that some point saves more falls with what is to be saved.
    low, high = 0.0, 1.0
    for _ in range(_HALVINGS):
        share = (low + high) / 2.0
        chance = holds * torch.special.ndtr((best + math.log1p(-share) - mean) / std)
        if float(chance.max()) >= _REMOTE:
            low = share
        else:
            high = share
    return low


# The published method (arXiv 2310.19991) has models of its own: a Gaussian process for energy and one per constraint.

XI = 0.1
_PAPER_BLOCK = 4096


@one_thread()
def constrained_improvement(unit: Array, rows: NDArray[np.intp], energies: Array, slacks: Array, seed: int) -> Array:
    """Return log(EI · P[feasible]) at every point of a space, shape (points,).

    Args:
        unit: Coordinates of every point, shape (points, columns).
        rows: Row number of each trial, shape (trials,).
        energies: In joules, shape (trials,).
        slacks: Of each constraint, >= 0 feasible, shape (trials, constraints).
        seed: For the fits' restarts.
    """
    everywhere = torch.from_numpy(unit)
    with manual_seed(seed):
        worth = torch.zeros(len(unit), dtype=torch.double)
        for column in range(slacks.shape[1]):
            mean, std = _paper_posterior(everywhere, rows, slacks[:, column])
            worth = worth + log_probability_below(-mean, std, 0.0)
        feasible = (slacks >= 0).all(axis=1)
        if feasible.any():
            mean, std = _paper_posterior(everywhere, rows, energies)
            incumbent = float(energies[feasible].min()) - XI * float(energies.std(ddof=1))
            worth = worth + log_expected_improvement(mean, std, incumbent)
    found: Array = worth.numpy()
    return found


def _paper_posterior(everywhere: Tensor, rows: NDArray[np.intp], values: Array) -> tuple[Tensor, Tensor]:
    """Return posterior mean and standard deviation at every point, shape (points,) each."""
    columns = everywhere.shape[1]
    targets = torch.from_numpy(values).unsqueeze(-1)
    if math.isclose(float(targets.std()), 0.0):
        return targets.mean().expand(len(everywhere)), torch.full((len(everywhere),), 1e-6, dtype=torch.double)
    model = SingleTaskGP(
        everywhere[rows],
        targets,
        covar_module=ScaleKernel(MaternKernel(nu=2.5, ard_num_dims=columns)),
        outcome_transform=Standardize(1),
    )
    try:
        fit_gpytorch_mll(ExactMarginalLogLikelihood(model.likelihood, model))
    except (ModelFittingError, RuntimeError):
        model.eval()
    with torch.no_grad():
        blocks = [model.posterior(block.unsqueeze(1)) for block in torch.split(everywhere, _PAPER_BLOCK)]
    mean = torch.cat([block.mean.reshape(-1) for block in blocks])
    variance = torch.cat([block.variance.reshape(-1) for block in blocks])
    return mean, variance.clamp_min(1e-18).sqrt()
