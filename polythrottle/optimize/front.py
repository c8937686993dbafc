"""What a trial adds to a front of two quantities that are both to be small.

Loads torch.
"""

import torch
from torch import Tensor

from polythrottle.optimize.acquisition import log_standard_improvement

_LEAST = 1e-300
_BLOCK = 512
"""Points at a time: what a processor's cache holds of them and thirty strips."""


def front_of(values: Tensor) -> Tensor:
    """Return the rows that no other row beats in both columns, the first column ascending, shape (front, 2)."""
    kept: list[Tensor] = []
    for row in sorted(values, key=lambda row: (float(row[0]), float(row[1]))):
        if not kept or row[1] < kept[-1][1]:
            kept.append(row)
    return torch.stack(kept) if kept else values.new_zeros((0, 2))


def hypervolume(values: Tensor, reference: Tensor) -> float:
    """Return the area between some values and a reference point that is worse in both, overlaps counted once.

    Args:
        values: Shape (values, 2).
        reference: Shape (2,); values beyond it count nothing.
    """
    edges, heights = _strips(values, reference)
    return float(((reference[1] - heights) * edges.diff())[1:].sum())


def log_improvement(mean: Tensor, std: Tensor, values: Tensor, reference: Tensor) -> Tensor:
    """Return the log of by how much a trial is expected to enlarge the area `hypervolume` measures.

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
    upto = _log_improvement(edges[1:], mean[:, :1], std[:, :1])
    below = torch.full_like(upto, -torch.inf)
    below[:, 1:] = upto[:, :-1]
    width = upto + (-torch.expm1(below - upto)).clamp_min(_LEAST).log()
    return torch.logsumexp(width + _log_improvement(heights, mean[:, 1:], std[:, 1:]), dim=1)


def _strips(values: Tensor, reference: Tensor) -> tuple[Tensor, Tensor]:
    """Return the edges of the strips, the first at minus infinity, shape (strips + 1,), and their heights (strips,)."""
    inside = front_of(values[(values < reference).all(dim=1)])
    edges = torch.cat([values.new_tensor([-torch.inf]), inside[:, 0], reference[:1]])
    return edges, torch.cat([reference[1:], inside[:, 1]])


def _log_improvement(best: Tensor, mean: Tensor, std: Tensor) -> Tensor:
    """Return log E[(best − y)⁺] for y ~ N(mean, std²) of every point (rows) against every best (columns)."""
    return std.log() + log_standard_improvement((best - mean) / std)
