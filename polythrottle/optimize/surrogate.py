"""The model of what was measured: one Gaussian process per quantity over the points of a space.

Each is a trend whose coefficients have normal priors (`trend`), a Matérn-5/2 process for what the trend leaves over,
and noise: what each window's own interval says, which is given, and what windows differ by besides, which is fitted.
Scales and length scales are fitted by maximum a posteriori with BoTorch; their priors have units, because
the quantities are logarithms: 0.1 is ten per cent.
"""

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from botorch.exceptions.errors import ModelFittingError
from botorch.fit import fit_gpytorch_mll
from botorch.models import SingleTaskGP
from botorch.utils.sampling import manual_seed
from gpytorch.constraints import GreaterThan
from gpytorch.kernels import Kernel, LinearKernel, MaternKernel, ScaleKernel
from gpytorch.likelihoods import GaussianLikelihood
from gpytorch.means import ZeroMean
from gpytorch.mlls import ExactMarginalLogLikelihood
from gpytorch.priors import LogNormalPrior
from linear_operator import LinearOperator
from linear_operator.operators import DiagLinearOperator
from linear_operator.utils.cholesky import psd_safe_cholesky
from torch import Tensor

from polythrottle.optimize.features import Array
from polythrottle.optimize.quantities import usual
from polythrottle.optimize.remaining import Rows

RESIDUAL_SD, RESIDUAL_SPREAD = 0.15, 0.7
"""Deviation of what the trend leaves over: mode, and spread of its logarithm, of the log-normal prior."""
NOISE_SD, NOISE_SPREAD = 0.01, 0.7
"""Deviation of one measurement besides its own doubt: likewise."""
LENGTH, LENGTH_SPREAD = 0.55, 0.6
"""Length scale in the unit cube: likewise; the mode times the root of the number of columns, as distances grow."""
_MAX_ITERATIONS = 40
_JITTER, _LEAST_VARIANCE = 1e-8, 1e-10
_BLOCK = 8192


@dataclass(frozen=True)
class Belief:
    """What is believed of each quantity at each point.

    Args:
        mean: Shape (points, quantities).
        variance: Of the quantity itself, shape (points, quantities), > 0.
        noise: Variance one more measurement adds, its own doubt as usual in the study, shape (quantities,).
        energy_mean: Of log energy per item, shape (points,), where it is modelled for itself.
        energy_variance: Likewise, > 0.
    """

    mean: Tensor
    variance: Tensor
    noise: Tensor
    energy_mean: Tensor | None = None
    energy_variance: Tensor | None = None

    @property
    def energy(self) -> tuple[Tensor, Tensor]:
        """Mean and variance of log energy per item, shape (points,) each: the sum of time and draw if nothing else."""
        if self.energy_mean is not None and self.energy_variance is not None:
            return self.energy_mean, self.energy_variance
        return self.mean[:, :2].sum(dim=1), self.variance[:, :2].sum(dim=1)


def believe(unit: Array, basis: Array, seen: Rows, values: Array, seed: int, doubt: Array) -> Belief:
    """Return the posterior at every point of a space.

    Args:
        unit: Coordinates for distances, shape (points, columns).
        basis: Basis functions of the trend, times their prior deviations, shape (points, functions).
        seen: Row number of each measured point, shape (trials,).
        values: What was measured, less the trend's prior mean, shape (trials, quantities).
        seed: Of any randomness in the fit.
        doubt: Variance of each value that its own window tells of, shape (trials, quantities).

    Raises:
        RuntimeError: If the covariance of the trials cannot be decomposed.
    """
    everywhere = torch.from_numpy(np.hstack([unit, basis]))
    level = values.mean(axis=0)
    targets = torch.from_numpy(values - level)
    with manual_seed(seed):
        model = fitted(everywhere[seen], targets, unit.shape[1], doubt)
        with torch.no_grad():
            mean, variance = _posterior(model, everywhere[seen], targets, everywhere)
    return Belief(mean + torch.from_numpy(level), variance, noise_ahead(model, doubt))


def noise_ahead(model: SingleTaskGP, doubt: Array) -> Tensor:
    """Return the variance one more measurement would add, shape (quantities,): fitted noise and the usual doubt."""
    noise: Tensor = model.likelihood.noise.detach().reshape(-1)
    return noise + torch.from_numpy(usual(doubt))


def fitted(inputs: Tensor, targets: Tensor, columns: int, doubt: Array) -> SingleTaskGP:
    """Return the process fitted to the trials; with the prior's own scales if no fit succeeds.

    Args:
        inputs: Coordinates and basis functions of each trial's point, shape (trials, columns + functions).
        targets: What was measured, centred, shape (trials, quantities).
        columns: How many of the inputs are coordinates.
        doubt: As in `believe`.
    """
    model = _process(inputs, targets, columns, doubt)
    start = {name: value.clone() for name, value in model.state_dict().items()}
    try:
        fit_gpytorch_mll(
            ExactMarginalLogLikelihood(model.likelihood, model),
            optimizer_kwargs={"options": {"maxiter": _MAX_ITERATIONS}},
            max_attempts=1,
            warning_handler=lambda _: True,
        )
    except (ModelFittingError, RuntimeError):
        model.load_state_dict(start)
    model.eval()
    return model


class _Noise(GaussianLikelihood):  # type: ignore[misc]  # gpytorch has no types
    """Normal noise of which a part is known, so that only the rest is fitted.

    Args:
        doubt: The known part, shape (trials, quantities).
        batch: Shape of the quantities: empty for one.
    """

    def __init__(self, doubt: Array, batch: torch.Size) -> None:
        prior = _log_normal(NOISE_SD**2, 2 * NOISE_SPREAD)
        super().__init__(noise_prior=prior, noise_constraint=_positive(NOISE_SD**2), batch_shape=batch)
        self._known = torch.from_numpy(doubt).T.reshape(*batch, -1) if doubt.any() else None

    def _shaped_noise_covar(self, base_shape: torch.Size, *params: Any, **rest: Any) -> Tensor | LinearOperator:
        fitted = super()._shaped_noise_covar(base_shape, *params, **rest)
        return fitted if self._known is None else fitted + DiagLinearOperator(self._known)


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
        lengthscale_prior=_log_normal(LENGTH * math.sqrt(columns), LENGTH_SPREAD),
        lengthscale_constraint=_positive(LENGTH * math.sqrt(columns)),
    )
    residual = ScaleKernel(
        matern,
        batch_shape=batch,
        outputscale_prior=_log_normal(RESIDUAL_SD**2, 2 * RESIDUAL_SPREAD),
        outputscale_constraint=_positive(RESIDUAL_SD**2),
    )
    return trend + residual


def noise_of(model: SingleTaskGP, quantities: int, trials: int) -> Tensor:
    """Return the variance of each trial's noise, fitted and known, shape (quantities, trials)."""
    batch = [quantities] if quantities > 1 else []
    found: Tensor = model.likelihood._shaped_noise_covar(torch.Size([*batch, trials])).diagonal(dim1=-1, dim2=-2)
    return found.reshape(quantities, trials)


def _positive(start: float) -> GreaterThan:
    return GreaterThan(1e-7, transform=torch.exp, inv_transform=torch.log, initial_value=start)


def _log_normal(mode: float, spread: float) -> LogNormalPrior:
    """Return the prior whose most probable value is ``mode``, so that a fit without data stays there."""
    return LogNormalPrior(math.log(mode) + spread**2, spread)


def _posterior(model: SingleTaskGP, seen: Tensor, targets: Tensor, everywhere: Tensor) -> tuple[Tensor, Tensor]:
    """Return mean and variance at all points, shape (points, quantities) each (Rasmussen & Williams 2006, eq. 2.25-26).

    Written out because the library's own posterior builds the joint covariance of all points. Blocks keep the memory
    of 100,000 points small.
    """
    kernel, count = model.covar_module, targets.shape[1]
    gram = kernel(seen).to_dense().reshape(count, len(seen), len(seen))
    root = psd_safe_cholesky(gram + torch.diag_embed(noise_of(model, count, len(seen)) + _JITTER))
    white = torch.linalg.solve_triangular(root, targets.T.unsqueeze(-1), upper=False)
    means, variances = [], []
    for block in torch.split(everywhere, _BLOCK):
        cross = kernel(seen, block).to_dense().reshape(count, len(seen), len(block))
        half = torch.linalg.solve_triangular(root, cross, upper=False)
        prior = kernel(block, diag=True).reshape(count, len(block))
        means.append((half * white).sum(dim=1))
        variances.append((prior - half.square().sum(dim=1)).clamp_min(_LEAST_VARIANCE))
    return torch.cat(means, dim=1).T, torch.cat(variances, dim=1).T
