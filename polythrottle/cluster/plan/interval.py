"""How often to write a checkpoint: Young and Daly in seconds, money or joules, never faster than a write can end."""

from dataclasses import dataclass
from math import ceil, inf, sqrt

from polythrottle.errors import InvalidInput


def young_s(cost_s: float, hazard_per_s: float) -> float:
    """Return Young's interval √(2 C M) between checkpoints, in seconds; infinite where nothing is ever lost.

    Args:
        cost_s: How long a checkpoint stops training, in seconds.
        hazard_per_s: Losses of any machine of the job per second (1/M).
    """
    _check(cost_s, hazard_per_s)
    return sqrt(2 * cost_s / hazard_per_s) if hazard_per_s else inf


def daly_s(cost_s: float, hazard_per_s: float) -> float:
    """Return Daly's higher-order interval, in seconds (doi 10.1016/j.future.2004.11.016, equation 37).

    Args:
        cost_s: How long a checkpoint stops training, in seconds.
        hazard_per_s: Losses of any machine of the job per second (1/M).
    """
    _check(cost_s, hazard_per_s)
    if not hazard_per_s:
        return inf
    between_s = 1 / hazard_per_s
    if cost_s >= 2 * between_s:
        return between_s
    part = cost_s / (2 * between_s)
    return sqrt(2 * cost_s * between_s) * (1 + sqrt(part) / 3 + part / 9) - cost_s


@dataclass(frozen=True)
class CheckpointCost:
    """What one checkpoint costs a job.

    Attributes:
        stall_s: How long training stands still for it (the snapshot), in seconds.
        persist_s: How long the write goes on beside training, in seconds; the next may not begin before.
        weight: What a second of standing still costs over a second of training: 1 in time and money, the ratio of
            powers in joules (0.35 where a GPU is nearly idle while writing).
    """

    stall_s: float
    persist_s: float = 0.0
    weight: float = 1.0


def interval_s(cost: CheckpointCost, hazard_per_s: float, step_s: float, overhead: float = 0.035) -> float:
    """Return the interval between checkpoints: Daly's, but no shorter than three bounds, in whole steps.

    The bounds: one step; a write must end before the next begins (CheckFreq, FAST'21); the stalls stay within their
    share of the time.

    Args:
        cost: What one checkpoint costs.
        hazard_per_s: Losses of any machine of the job per second, at the machines' present ages.
        step_s: Time of a training step, in seconds.
        overhead: Largest share of time that stalls may take, in (0, 1].

    Returns:
        A whole number of steps, in seconds; infinite where nothing is ever lost.

    Raises:
        InvalidInput: If a time is negative, the step not positive or the overhead outside (0, 1].
    """
    if step_s <= 0 or not 0 < overhead <= 1:
        raise InvalidInput(f"a step takes time and an overhead is in (0, 1], not {step_s} s and {overhead}")
    best_s = daly_s(cost.stall_s * cost.weight, hazard_per_s)
    if best_s == inf:
        return inf
    within_s = cost.stall_s * (1 / overhead - 1)
    return ceil(max(best_s, step_s, cost.persist_s, within_s) / step_s - 1e-9) * step_s


def _check(cost_s: float, hazard_per_s: float) -> None:
    if cost_s < 0 or hazard_per_s < 0:
        raise InvalidInput(f"costs and hazards are at least 0, not {cost_s} s and {hazard_per_s} /s")
