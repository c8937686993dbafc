"""How latency follows from work, clocks and share: a roofline, what sharing adds, and what both miss.

Everything is positive, so coefficients and times are logarithms. For several sets of coefficients at once, one per
column, so that derivatives need one pass.
"""

from collections.abc import Sequence
from dataclasses import dataclass, fields

import numpy as np
from numpy.typing import NDArray
from typing_extensions import Self

from polythrottle.errors import InvalidInput
from polythrottle.finetune.corun import CoRun

Array = NDArray[np.float64]

FORM: dict[str, tuple[float, float]] = {
    "compute": (-0.7, 1.0),
    "unfilled": (-0.5, 1.0),
    "memory": (-1.2, 1.0),
    "launch": (-3.0, 1.0),
    "host": (-3.0, 1.0),
    "step_compute": (0.0, 0.7),
    "slicing": (-0.1, 0.5),
    "duty": (-3.0, 1.5),
    "contention": (-1.5, 1.0),
    "wait": (-3.0, 1.5),
    "hosting": (-1.0, 1.0),
    "governor": (-1.5, 1.0),
}
"""The logarithm of each coefficient before any co-run, and its standard deviation.

Times are relative to the geometric mean of the measured ones. The values say that compute, memory and host take half, a
third and a twentieth of it, each give or take a factor of e; they are assumed.
"""
_LINEAR, _SQUARE = 0.06, 0.03
"""How far what the form misses is believed to go over the range that was seen, in the logarithm of time; assumed."""
_ALONE, _ALONE_LINEAR = 0.1, 0.05
"""The same between a device that is alone, whose governor sees gaps, and one that always has work."""
_UNSHARED = 4
"""Of the coordinates, how many are not about sharing; they come first."""
_MOST_SHARE = 0.98
_NARROWEST = 0.3
_STEP = 1e-4
_TINY = 1e-9


@dataclass(frozen=True, eq=False)
class Columns:
    """Co-runs as columns, each of shape (runs,); relative to `Reference`, 1 in the middle."""

    operations: Array
    traffic: Array
    batch: Array
    step_operations: Array
    step_traffic: Array
    step_batch: Array
    gpu: Array
    memory: Array
    cpu: Array
    share: Array


@dataclass(frozen=True)
class Reference:
    """What the co-runs of a fit have in the middle; the rest is counted from there.

    Args:
        counted: Whether operations and bytes are known; where not, items stand for them.
        time_s: Geometric mean of the latencies.
        middle: Geometric mean of every column but batches and share, by name.
        reach: How far each coordinate of what the form misses went from 0, at least `_NARROWEST`.
    """

    counted: bool
    time_s: float
    middle: tuple[tuple[str, float], ...]
    reach: tuple[float, ...] = ()

    @classmethod
    def of(cls, runs: Sequence[CoRun], time_s: float = 1.0) -> Self:
        """Return the middle of co-runs, of whose latencies ``time_s`` is the geometric mean.

        Raises:
            InvalidInput: If the operations of some could be counted and of others not.
        """
        counted = {run.counted for run in runs}
        if len(counted) > 1:
            raise InvalidInput("operations were counted for some co-runs and not for others; give them for all or none")
        raw = _raw(runs, known := counted.pop())
        names = ("operations", "traffic", "gpu", "memory", "cpu")
        middle = {name: float(np.exp(np.log(getattr(raw, name)).mean())) for name in names}
        middle |= {"step_operations": middle["operations"], "step_traffic": middle["traffic"]}
        bare = cls(known, time_s, tuple(sorted(middle.items())))
        reach = np.maximum(np.abs(coordinates(bare.columns(runs))).max(axis=1), _NARROWEST)
        return cls(known, time_s, bare.middle, tuple(reach.tolist()))

    def columns(self, runs: Sequence[CoRun]) -> Columns:
        """Return co-runs relative to the middle.

        Raises:
            InvalidInput: If operations are not known that were known in the fit.
        """
        if self.counted and not all(run.counted for run in runs):
            raise InvalidInput(
                "these co-runs have no operations or bytes, but the model was fitted with them; fit it without"
            )
        raw, middle = _raw(runs, self.counted), dict(self.middle)
        return Columns(**{field.name: getattr(raw, field.name) / middle.get(field.name, 1.0) for field in fields(raw)})

    @property
    def prior(self) -> tuple[Array, Array]:
        """Mean and standard deviation of every coefficient, shape (coefficients,) each."""
        count = len(self.reach)
        alone = [_ALONE, *[_ALONE_LINEAR] * _UNSHARED]
        spreads = [*alone, *[_LINEAR] * (1 + count), *[_SQUARE] * (count * (count + 1) // 2)]
        form = np.array(list(FORM.values()))
        return np.concatenate([form[:, 0], np.zeros(len(spreads))]), np.concatenate([form[:, 1], spreads])


def _raw(runs: Sequence[CoRun], counted: bool) -> Columns:
    batch, step_batch = ([float(getattr(run, name)) for run in runs] for name in ("batch", "step_batch"))
    work = [
        (run.operations, run.traffic_bytes, run.step_operations, run.step_bytes)
        if counted
        else (run.batch, run.batch, run.step_batch, run.step_batch)
        for run in runs
    ]
    operations, traffic, step_operations, step_traffic = np.array(work, dtype=float).T
    clocks = np.array([(run.gpu_hz, run.memory_hz, run.cpu_hz, run.share) for run in runs]).T
    return Columns(operations, traffic, np.array(batch), step_operations, step_traffic, np.array(step_batch), *clocks)


def coordinates(columns: Columns) -> Array:
    """Return what the rest of the latency may follow, shape (coordinates, runs): logarithms, and the share."""
    step = np.log1p(columns.step_operations) * columns.share
    logs = [np.log(column) for column in (columns.operations, columns.gpu, columns.memory, columns.cpu)]
    return np.array([*logs, columns.share, step])


def rest_features(columns: Columns, reach: Sequence[float]) -> Array:
    """Return a quadratic in the coordinates, each from -1 to 1 over what was seen, shape (features, runs)."""
    z = coordinates(columns) / np.array(reach)[:, None]
    first, second = np.triu_indices(len(z))
    alone, constant = columns.share == 0, np.ones(z.shape[1])
    return np.vstack([alone, alone * z[:_UNSHARED], constant, z, z[first] * z[second]])


def step_time(theta: Array, columns: Columns) -> Array:
    """Return the relative time of a step that runs alone, shape (runs, sets)."""
    compute, unfilled, memory, offset = (np.exp(theta[i]) for i in (0, 1, 2, 5))
    operations, gpu = columns.step_operations[:, None], columns.gpu[:, None]
    idle = unfilled / np.maximum(columns.step_batch, 1.0)[:, None]
    computing = compute * offset * operations * (1.0 + idle) / gpu
    return np.asarray(np.hypot(computing, memory * columns.step_traffic[:, None] / columns.memory[:, None]))


def form(theta: Array, columns: Columns) -> Array:
    """Return the logarithm of the relative latency that the physical form gives, shape (runs, sets).

    alone = hypot(compute·operations·(1 + unfilled / batch) / gpu, memory·bytes / memory clock) + launch / cpu;
    added = duty·s + slicing·s / (1 - s); host = host·batch / cpu;
    latency = alone·(1 + added + contention·s·b·b_step) + host·(1 + hosting·added) + wait·s·step, where s is the share
    and b the share of time at which memory is the limit.

    Args:
        theta: Logarithms of the coefficients of `FORM`, shape (coefficients, sets).
        columns: The co-runs.
    """
    coefficients = np.exp(theta[: len(FORM)])
    compute, unfilled, memory, launch, host, _, slicing, duty, contention, wait, hosting, governor = coefficients
    own = {field.name: getattr(columns, field.name)[:, None] for field in fields(columns)}
    computing = compute * own["operations"] * (1.0 + unfilled / own["batch"]) / own["gpu"]
    computing = computing * (1.0 + governor * (own["share"] == 0))
    moving = memory * own["traffic"] / own["memory"]
    alone = np.hypot(computing, moving) + launch / own["cpu"]
    step, share = step_time(theta, columns), np.minimum(own["share"], _MOST_SHARE)
    stepping = memory * own["step_traffic"] / own["memory"] / np.maximum(step, _TINY)
    added = duty * share + slicing * share / (1.0 - share)
    served = alone * (1.0 + added + contention * share * moving / alone * stepping)
    hosted = host * own["batch"] / own["cpu"] * (1.0 + hosting * added)
    return np.asarray(np.log(served + hosted + wait * share * step))


def slopes(theta: Array, columns: Columns) -> tuple[Array, Array]:
    """Return the form's value, shape (runs,), and its derivatives, shape (runs, coefficients of the form)."""
    count = len(FORM)
    sets = theta[:count, None] + _STEP * np.hstack([np.zeros((count, 1)), np.eye(count), -np.eye(count)])
    values = form(sets, columns)
    return values[:, 0], (values[:, 1 : count + 1] - values[:, count + 1 :]) / (2 * _STEP)
