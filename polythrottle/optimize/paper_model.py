"""The models of `paper`: a Gaussian process for energy and one per constraint. Loads torch."""

import math

import numpy as np
import torch
from botorch.exceptions.errors import ModelFittingError
from botorch.fit import fit_gpytorch_mll
from botorch.models import SingleTaskGP
from botorch.models.transforms.outcome import Standardize
from botorch.utils.sampling import manual_seed
from gpytorch.kernels import MaternKernel, ScaleKernel
from gpytorch.mlls import ExactMarginalLogLikelihood
from numpy.typing import NDArray
from torch import Tensor

from polythrottle.optimize.acquisition_value import log_expected_improvement, log_probability_below
from polythrottle.optimize.features import Array
from polythrottle.optimize.surrogate import one_thread

XI = 0.1
_BLOCK = 4096


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
            mean, std = _posterior(everywhere, rows, slacks[:, column])
            worth = worth + log_probability_below(-mean, std, 0.0)
        feasible = (slacks >= 0).all(axis=1)
        if feasible.any():
            mean, std = _posterior(everywhere, rows, energies)
            incumbent = float(energies[feasible].min()) - XI * float(energies.std(ddof=1))
            worth = worth + log_expected_improvement(mean, std, incumbent)
    found: Array = worth.numpy()
    return found


def _posterior(everywhere: Tensor, rows: NDArray[np.intp], values: Array) -> tuple[Tensor, Tensor]:
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
        blocks = [model.posterior(block.unsqueeze(1)) for block in torch.split(everywhere, _BLOCK)]
    mean = torch.cat([block.mean.reshape(-1) for block in blocks])
    variance = torch.cat([block.variance.reshape(-1) for block in blocks])
    return mean, variance.clamp_min(1e-18).sqrt()
