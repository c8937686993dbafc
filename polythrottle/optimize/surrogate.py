"""The model of what was measured: one Gaussian process per quantity around what physics expects.

Fitted on one thread.
"""

import math
from collections.abc import Iterator, Mapping, Sequence, Set
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import numpy as np
import torch
from botorch.models import SingleTaskGP
from botorch.utils.sampling import manual_seed
from gpytorch.constraints import GreaterThan
from gpytorch.kernels import Kernel, LinearKernel, MaternKernel, ScaleKernel
from gpytorch.likelihoods import GaussianLikelihood
from gpytorch.means import ZeroMean
from gpytorch.priors import LogNormalPrior
from linear_operator import LinearOperator
from linear_operator.operators import DiagLinearOperator
from linear_operator.utils.cholesky import psd_safe_cholesky
from numpy.linalg import LinAlgError
from scipy.linalg import cho_solve, cholesky
from scipy.optimize import minimize
from threadpoolctl import ThreadpoolController  # type: ignore[import-untyped]
from torch import Tensor

from polythrottle.domain.space import Knob
from polythrottle.optimize.features import Array, Coordinates, Rows
from polythrottle.optimize.options import Ingredient
from polythrottle.optimize.quantities import DRAW, ENERGY, TIME, usual

# How many threads the numerical libraries use while a suggestion is made: one.


@contextmanager
def one_thread() -> Iterator[None]:
    """Keep torch and the BLAS libraries on one thread.

    Sums come out in one order, and matrices this small lose far more by waiting for each other than they gain.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with _libraries().limit(limits=1):
            yield
    finally:
        torch.set_num_threads(threads)


@cache
def _libraries() -> ThreadpoolController:
    return ThreadpoolController()


# What physics says before anything is measured: how each kind of knob moves each quantity.
#
# Around the default point the logarithm of a quantity is taken as a sum over knobs of
#
# slope · x  +  bend · x² / (2 · span)  +  Σ hinge · width · softplus((x − knee) / width),
#
# x = log(level / default level),
#
# so that the elasticity is ``slope`` at the default, changes by ``bend`` over the knob's span, and by ``hinge`` at
# each knee: the logarithm of a roofline, t = a/f + c or t = a + c·batch, turns from one slope to another within a
# factor of about e. All have normal priors, which the Gaussian process integrates out exactly (Rasmussen & Williams
# 2006, §2.7). The means of slope and bend follow from such a roofline and from power over a flat-then-linear voltage
# curve, P = P0 + k f V(f)²; hinges have mean 0. A floor under a clock does nothing at its lowest level and more the
# higher it is.

_POWER = "power"
_NEUTRAL = (0.0, 0.0)
_MEANS: Mapping[str, Mapping[str, tuple[float, float]]] = {
    "clock": {"latency": (-0.3, 0.4), TIME: (-0.3, 0.4), _POWER: (0.4, 0.4)},
    "floor": {"latency": (0.0, -0.3), TIME: (0.0, -0.3), _POWER: (0.0, 0.3)},
    "limit": {"latency": (-0.2, 0.8), TIME: (-0.2, 0.8), _POWER: (0.5, -0.3)},
    "batch": {"latency": (0.4, 0.6), TIME: (-0.6, 0.6), _POWER: (0.2, -0.2)},
}
"""Prior mean of slope and bend by kind of knob and quantity; kinds and quantities that are absent have no direction."""
SLOPE_SD = 0.3
BEND_SD = 0.4
HINGE_SD = 0.3
"""Prior deviations of every slope, bend and hinge."""
_KNEES = (0.2, 0.5, 0.8)
_KNEE_WIDTH = 0.5
"""Where hinges sit, as shares of a knob's range, and how soft they are, in units of the logarithm."""


def basis(knobs: Sequence[Knob], where: Coordinates, without: Set[Ingredient] = frozenset()) -> Array:
    """Return the trend's basis functions, each times its coefficient's prior deviation, shape (points, functions).

    The first function is a constant; then, for the ordered knobs, slopes, bends and hinges.
    """
    ordered = np.array([knob.ordered for knob in knobs], dtype=bool)
    slope = where.offset[:, ordered]
    span = where.span[ordered]
    columns = [np.ones((len(slope), 1))]
    if Ingredient.TREND not in without:
        columns += [SLOPE_SD * slope, BEND_SD * slope**2 / (2.0 * span)]
    if not {Ingredient.TREND, Ingredient.HINGES} & without:
        columns += [HINGE_SD * _hinge(slope, slope.min(axis=0) + share * span) for share in _KNEES]
    return np.hstack(columns)


def _hinge(slope: Array, knee: Array) -> Array:
    """Return a function that is flat below a knee and rises with slope 1 above it, 0 at the default point."""
    rise = np.logaddexp(0.0, (slope - knee) / _KNEE_WIDTH) - np.logaddexp(0.0, -knee / _KNEE_WIDTH)
    return np.asarray(_KNEE_WIDTH * rise)


def expected(knobs: Sequence[Knob], where: Coordinates, quantities: Sequence[str]) -> Array:
    """Return the prior mean of each quantity at each point up to a constant, shape (points, quantities)."""
    means = np.array([[_mean(knob, name) for knob in knobs] for name in quantities]).reshape(len(quantities), -1, 2)
    bend = where.offset**2 / (2.0 * where.span)
    total: Array = where.offset @ means[:, :, 0].T + bend @ means[:, :, 1].T
    return total


def _mean(knob: Knob, quantity: str) -> tuple[float, float]:
    if quantity == ENERGY:
        time = _mean(knob, TIME)
        draw = _mean(knob, DRAW)
        return time[0] + draw[0], time[1] + draw[1]
    return _MEANS.get(_kind(knob), {}).get(_family(quantity), _NEUTRAL)


def _kind(knob: Knob) -> str:
    if knob.is_clock:
        if "_min_" in knob.name:
            return "floor"
        return "clock"
    if knob.name.endswith("_w"):
        return "limit"
    if "batch" in knob.name:
        return "batch"
    return "other"


def _family(quantity: str) -> str:
    if quantity in (DRAW, "power"):
        return _POWER
    if quantity in (TIME, "temperature"):
        return quantity
    return "latency"


# The model of what was measured: one Gaussian process per quantity over the points of a space.
#
# Each is a trend whose coefficients have normal priors (`trend`), a Matérn-5/2 process for what the trend leaves
# over, and noise: what each window's own interval says, which is given, and what windows differ by besides, which is
# fitted. Scales and length scales are fitted by maximum a posteriori; their priors have units, because
# the quantities are logarithms: 0.1 is ten per cent.

RESIDUAL_SD = 0.15
RESIDUAL_SPREAD = 0.7
"""Deviation of what the trend leaves over: mode, and spread of its logarithm, of the log-normal prior."""
NOISE_SD = 0.01
NOISE_SPREAD = 0.7
"""Deviation of one measurement besides its own doubt: likewise."""
WINDOW_SPREAD = 0.3
"""The spread of that where windows tell their doubt: what they leave out is a few per cent at most, so that trials
whose trend the process does not know yet must not pass for noise."""
LENGTH = 0.55
LENGTH_SPREAD = 0.6
"""Length scale in the unit cube: likewise; the mode times the root of the number of columns, as distances grow."""
_MAX_ITERATIONS = 40
_JITTER = 1e-8
_LEAST_VARIANCE = 1e-10
_LEAST_SCALE = 1e-7
_BLOCK = 8192


@dataclass(frozen=True)
class QuantityPosterior:
    """What is believed of each quantity at each point.

    Args:
        mean: Shape (points, quantities).
        variance: Of the quantity itself, shape (points, quantities), > 0.
        noise: Variance one more measurement adds, its own doubt as usual in the study, shape (quantities,).
        energy_mean: Of log energy per item, shape (points,), where it is modelled for itself.
        energy_variance: Likewise, > 0.
        left: The share of the variance that is left once trials that still run have ended, shape (points, quantities);
            None where none runs.
    """

    mean: Tensor
    variance: Tensor
    noise: Tensor
    energy_mean: Tensor | None = None
    energy_variance: Tensor | None = None
    left: Tensor | None = None

    @property
    def energy(self) -> tuple[Tensor, Tensor]:
        """Mean and variance of log energy per item, shape (points,) each: the sum of time and draw if nothing else."""
        if self.energy_mean is not None and self.energy_variance is not None:
            return self.energy_mean, self.energy_variance
        return self.mean[:, :2].sum(dim=1), self.variance[:, :2].sum(dim=1)

    def foreseen(self, left: Tensor | None) -> "QuantityPosterior":
        """Return what would be believed if the trials that still run ended as expected: as sure as that, no wiser.

        To condition a process on its own mean leaves the mean as it is (the kriging believer: Ginsbourger, Le Riche
        and Carraro 2010).

        Args:
            left: The share of the variance that is left then, as of a belief of the same quantities; None for all.
        """
        if left is None:
            return self
        energy = self.energy_variance
        if energy is not None:
            energy = energy * left[:, :2].mean(dim=1)
        return replace(self, variance=self.variance * left, energy_variance=energy, left=None)


def fit_posterior(
    unit: Array,
    basis: Array,
    seen: Rows,
    values: Array,
    seed: int,
    doubt: Array,
    running: Rows | None = None,
) -> QuantityPosterior:
    """Return the posterior at every point of a space.

    Args:
        unit: Coordinates for distances, shape (points, columns).
        basis: Basis functions of the trend, times their prior deviations, shape (points, functions).
        seen: Row number of each measured point, shape (trials,).
        values: What was measured, less the trend's prior mean, shape (trials, quantities).
        seed: Of any randomness in the fit.
        doubt: Variance of each value that its own window tells of, shape (trials, quantities).
        running: Row number of each point that is being measured now; none if None.

    Raises:
        RuntimeError: If the covariance of the trials cannot be decomposed.
    """
    everywhere = torch.from_numpy(np.hstack([unit, basis]))
    level = values.mean(axis=0)
    targets = torch.from_numpy(values - level)
    with manual_seed(seed):
        model = fitted(everywhere[seen], targets, unit.shape[1], doubt)
        with torch.no_grad():
            root = trials_root(model, everywhere[seen], values.shape[1])
            mean, variance = posterior_at(model, everywhere, everywhere[seen], targets, root)
            left = None
            if running is not None and len(running):
                left = _once_ended(model, everywhere, (seen, running), doubt) / variance
    return QuantityPosterior(mean + torch.from_numpy(level), variance, noise_ahead(model, doubt), left=left)


def _once_ended(model: SingleTaskGP, everywhere: Tensor, rows: tuple[Rows, Rows], doubt: Array) -> Tensor:
    """Return the variance at every point once what runs has ended too, shape (points, quantities).

    Args:
        model: The process, fitted to what has ended.
        everywhere: Inputs of every point, shape (points, inputs).
        rows: Row numbers of the trials that have ended, and of those that run.
        doubt: As in `fit_posterior`.
    """
    seen, running = rows
    inputs = everywhere[np.concatenate([seen, running])]
    quantities = doubt.shape[1]
    ended = noise_of(model, quantities, len(seen))
    ahead = noise_ahead(model, doubt).reshape(quantities, 1).expand(quantities, len(running))
    noise = torch.cat([ended, ahead], dim=1) + _JITTER
    root = psd_safe_cholesky(prior_covariance(model, inputs, inputs) + torch.diag_embed(noise))
    targets = inputs.new_zeros((len(inputs), quantities))
    return posterior_at(model, everywhere, inputs, targets, root)[1]


def noise_ahead(model: SingleTaskGP, doubt: Array) -> Tensor:
    """Return the variance one more measurement would add, shape (quantities,): fitted noise and the usual doubt."""
    noise: Tensor = model.likelihood.noise.detach().reshape(-1)
    return noise + torch.from_numpy(usual(doubt))


def fitted(inputs: Tensor, targets: Tensor, columns: int, doubt: Array) -> SingleTaskGP:
    """Return the process fitted to the trials; with the prior's own scales where a fit does not succeed.

    Args:
        inputs: Coordinates and basis functions of each trial's point, shape (trials, columns + functions).
        targets: What was measured, centred, shape (trials, quantities).
        columns: How many of the inputs are coordinates.
        doubt: As in `fit_posterior`.
    """
    model = _process(inputs, targets, columns, doubt)
    residual = model.covar_module.kernels[1]
    raw = (model.likelihood.noise_covar.raw_noise, residual.raw_outputscale, residual.base_kernel.raw_lengthscale)
    start = torch.cat([each.detach().reshape(targets.shape[1], -1) for each in raw], dim=1).numpy()
    density = _Density(inputs.numpy(), columns, bool(doubt.any()))
    found = [density.mode(*each) for each in zip(targets.numpy().T, doubt.T, start, strict=True)]
    scales = torch.from_numpy(np.stack(found))
    with torch.no_grad():
        for each, column in zip(raw, (slice(0, 1), slice(1, 2), slice(2, None)), strict=True):
            each.copy_(scales[:, column].reshape(each.shape))
    model.eval()
    return model


class _Density:
    """The posterior density of a process's scales, with its gradient written out (Rasmussen & Williams 2006, eq. 5.9).

    BoTorch's, of the same model, goes through some hundred small tensor operations and their derivatives at each step,
    which with a dozen trials took most of a suggestion's time.

    Args:
        inputs: As in `fitted`.
        columns: Likewise.
        told: Whether windows tell their doubt.
    """

    def __init__(self, inputs: Array, columns: int, told: bool) -> None:
        where = inputs[:, :columns]
        trend = inputs[:, columns:]
        self._trend = trend @ trend.T
        self._apart = ((where[:, np.newaxis] - where[np.newaxis]) ** 2).reshape(-1, columns).T.copy()
        priors = (_noise_prior(told), _scale_prior(), *[_length_prior(columns)] * columns)
        self._centre = np.array([float(prior.loc) for prior in priors])
        self._spread = np.array([float(prior.scale) for prior in priors])

    def mode(self, target: Array, doubt: Array, start: Array) -> Array:
        """Return where the density of a quantity's scales is highest, in the model's own logarithms.

        Where the covariance cannot be decomposed on the way, the best before that; at worst the start.

        Args:
            target: What was measured, centred, shape (trials,).
            doubt: The known variance of each, shape (trials,).
            start: Where to begin: of noise, residual and length scales, shape (2 + columns,).
        """
        options = {"maxiter": _MAX_ITERATIONS}
        with np.errstate(all="ignore"):
            found = minimize(self._loss, start, (target, doubt), method="L-BFGS-B", jac=True, options=options)
        return np.asarray(found.x)

    def _loss(self, raw: Array, target: Array, doubt: Array) -> tuple[float, Array]:
        """Return minus the logarithm of the density over the number of trials, and its gradient."""
        count = len(target)
        above = np.exp(raw)
        values = above + _LEAST_SCALE
        noise = values[0]
        scale = values[1]
        weights = 5.0 / values[2:] ** 2
        far = np.sqrt(weights @ self._apart).reshape(count, count)
        decay = np.exp(-far)
        residual = (1.0 + far + far**2 / 3.0) * decay
        covariance = self._trend + scale * residual
        covariance[np.diag_indices(count)] += noise + doubt
        try:
            root = cholesky(covariance, lower=True, check_finite=False)
        except LinAlgError:
            return math.nan, np.full(len(raw), math.nan)
        inverse = cho_solve((root, True), np.eye(count), check_finite=False)
        pulls = inverse @ target
        logs = np.log(values)
        off = (logs - self._centre) / self._spread
        loss = 0.5 * target @ pulls + np.log(root.diagonal()).sum() + 0.5 * count * math.log(2.0 * math.pi)
        loss += (logs + np.log(self._spread) + 0.5 * math.log(2.0 * math.pi) + 0.5 * off**2).sum()
        by_covariance = 0.5 * (inverse - np.outer(pulls, pulls))
        by_distance = by_covariance * (1.0 + far) * decay
        slopes = np.empty_like(raw)
        slopes[0] = noise * np.trace(by_covariance)
        slopes[1] = scale * np.vdot(by_covariance, residual)
        slopes[2:] = scale / 3.0 * weights * (self._apart @ by_distance.ravel())
        slopes += 1.0 + off / self._spread
        return float(loss) / count, slopes * above / values / count


class _Noise(GaussianLikelihood):  # type: ignore[misc]  # gpytorch has no types
    """Normal noise of which a part is known, so that only the rest is fitted.

    Args:
        doubt: The known part, shape (trials, quantities).
        batch: Shape of the quantities: empty for one.
    """

    def __init__(self, doubt: Array, batch: torch.Size) -> None:
        prior = _noise_prior(bool(doubt.any()))
        super().__init__(noise_prior=prior, noise_constraint=_positive(NOISE_SD**2), batch_shape=batch)
        self._known = torch.from_numpy(doubt).T.reshape(*batch, -1) if doubt.any() else None

    def _shaped_noise_covar(self, base_shape: torch.Size, *params: Any, **rest: Any) -> Tensor | LinearOperator:
        fitted = super()._shaped_noise_covar(base_shape, *params, **rest)
        if self._known is None:
            return fitted
        return fitted + DiagLinearOperator(self._known)


def _process(inputs: Tensor, targets: Tensor, columns: int, doubt: Array) -> SingleTaskGP:
    count = targets.shape[1]
    batch = torch.Size([count] if count > 1 else [])
    return SingleTaskGP(
        inputs,
        targets,
        likelihood=_Noise(doubt, batch),
        covar_module=_kernel(columns, inputs.shape[1], batch),
        mean_module=ZeroMean(batch_shape=batch),
        outcome_transform=None,
    ).double()


def _kernel(columns: int, width: int, batch: torch.Size) -> Kernel:
    trend = LinearKernel(active_dims=tuple(range(columns, width)), batch_shape=batch)
    trend.variance = 1.0
    trend.requires_grad_(False)
    matern = MaternKernel(
        nu=2.5,
        ard_num_dims=columns,
        active_dims=tuple(range(columns)),
        batch_shape=batch,
        lengthscale_prior=_length_prior(columns),
        lengthscale_constraint=_positive(LENGTH * math.sqrt(columns)),
    )
    residual = ScaleKernel(
        matern,
        batch_shape=batch,
        outputscale_prior=_scale_prior(),
        outputscale_constraint=_positive(RESIDUAL_SD**2),
    )
    return trend + residual


def noise_of(model: SingleTaskGP, quantities: int, trials: int) -> Tensor:
    """Return the variance of each trial's noise, fitted and known, shape (quantities, trials)."""
    batch = [quantities] if quantities > 1 else []
    found: Tensor = model.likelihood._shaped_noise_covar(torch.Size([*batch, trials])).diagonal(dim1=-1, dim2=-2)
    return found.reshape(quantities, trials)


def _positive(start: float) -> GreaterThan:
    return GreaterThan(_LEAST_SCALE, transform=torch.exp, inv_transform=torch.log, initial_value=start)


def _noise_prior(told: bool) -> LogNormalPrior:
    if told:
        spread = WINDOW_SPREAD
    else:
        spread = NOISE_SPREAD
    return _log_normal(NOISE_SD**2, 2 * spread)


def _scale_prior() -> LogNormalPrior:
    return _log_normal(RESIDUAL_SD**2, 2 * RESIDUAL_SPREAD)


def _length_prior(columns: int) -> LogNormalPrior:
    return _log_normal(LENGTH * math.sqrt(columns), LENGTH_SPREAD)


def _log_normal(mode: float, spread: float) -> LogNormalPrior:
    """Return the prior whose most probable value is ``mode``, so that a fit without data stays there."""
    return LogNormalPrior(math.log(mode) + spread**2, spread)


def prior_covariance(model: SingleTaskGP, one: Tensor, other: Tensor) -> Tensor:
    """Return the prior covariance between two lists of points, shape (quantities, one, other)."""
    found: Tensor = model.covar_module(one, other).to_dense().reshape(-1, len(one), len(other))
    return found


def trials_root(model: SingleTaskGP, seen: Tensor, quantities: int) -> Tensor:
    """Return the Cholesky factor of the trials' covariance with their noise, shape (quantities, trials, trials)."""
    noise = noise_of(model, quantities, len(seen)) + _JITTER
    root: Tensor = psd_safe_cholesky(prior_covariance(model, seen, seen) + torch.diag_embed(noise))
    return root


def posterior_at(
    model: SingleTaskGP, points: Tensor, seen: Tensor, targets: Tensor, root: Tensor
) -> tuple[Tensor, Tensor]:
    """Return mean and variance at points, shape (points, quantities) each (Rasmussen & Williams 2006, eq. 2.25-26).

    Written out because the library's own posterior builds the joint covariance of all points. Blocks keep the memory
    of 100,000 points small.

    Args:
        model: The process.
        points: Inputs of the points, shape (points, inputs).
        seen: Inputs of the trials, shape (trials, inputs).
        targets: What was measured, centred, shape (trials, quantities).
        root: The Cholesky factor of the trials' covariance, as of `trials_root`.
    """
    white = torch.linalg.solve_triangular(root, targets.T.unsqueeze(-1), upper=False)
    means = []
    variances = []
    for block in torch.split(points, _BLOCK):
        half = torch.linalg.solve_triangular(root, prior_covariance(model, seen, block), upper=False)
        prior = model.covar_module(block, diag=True).reshape(-1, len(block))
        means.append((half * white).sum(dim=1))
        variances.append((prior - half.square().sum(dim=1)).clamp_min(_LEAST_VARIANCE))
    return torch.cat(means, dim=1).T, torch.cat(variances, dim=1).T
