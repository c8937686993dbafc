"""How much a trial is worth: improvement and feasibility, both as logarithms, so that neither vanishes far away."""

import math

import torch
from botorch.utils.probability.utils import log_erfcx, log_ndtr, log_phi
from torch import Tensor

_FAR = -1e5


def log_expected_improvement(mean: Tensor, std: Tensor, best: float) -> Tensor:
    """Return log E[max(best − y, 0)] for y ~ N(mean, std²) (Jones et al. 1998; LogEI of Ament et al. 2023, eq. 8).

    Args:
        mean: Shape (points,).
        std: Shape (points,), > 0.
        best: The value to improve on.

    Returns:
        Finite logarithms, shape (points,).
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
