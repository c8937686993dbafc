"""How long inference takes beside fine-tuning: a roofline, a learnt rest and a tail, fitted to few co-runs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from polythrottle.domain.errors import InvalidInput
from polythrottle.training.beside.corun_model import (
    LEAST_RUNS,
    CoRun,
    PaperModel,
    Prediction,
    Predictor,
    check_measured,
    intensity,
    took_s,
)

if TYPE_CHECKING:
    from typing_extensions import Self

# How latency follows from work, clocks and share: a roofline, what sharing adds, and what both miss.
#
# Everything is positive, so coefficients and times are logarithms. For several sets of coefficients at once, one per
# column, so that derivatives need one pass.

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
_LINEAR = 0.06
_SQUARE = 0.03
"""How far what the form misses is believed to go over the range that was seen, in the logarithm of time; assumed."""
_ALONE = 0.1
_ALONE_LINEAR = 0.05
"""The same between a device that is alone, whose governor sees gaps, and one that always has work."""
_UNSHARED = 4
"""Of the coordinates, how many are not about sharing; they come first."""
_MOST_SHARE = 0.98
_NARROWEST = 0.3
_SLOPE_STEP = 1e-4
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
        middle.update(step_operations=middle["operations"], step_traffic=middle["traffic"])
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
        raw = _raw(runs, self.counted)
        middle = dict(self.middle)
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
    """Return the inputs of `rest_features`, shape (coordinates, runs): logarithms of work and clocks, and the share."""
    step = np.log1p(columns.step_operations) * columns.share
    logs = [np.log(column) for column in (columns.operations, columns.gpu, columns.memory, columns.cpu)]
    return np.array([*logs, columns.share, step])


def rest_features(columns: Columns, reach: Sequence[float]) -> Array:
    """Return a quadratic in the coordinates, each from -1 to 1 over what was seen, shape (features, runs)."""
    z = coordinates(columns) / np.array(reach)[:, None]
    first, second = np.triu_indices(len(z))
    alone = columns.share == 0
    constant = np.ones(z.shape[1])
    return np.vstack([alone, alone * z[:_UNSHARED], constant, z, z[first] * z[second]])


def step_time(theta: Array, columns: Columns) -> Array:
    """Return the relative time of a step that runs alone, shape (runs, sets)."""
    compute, unfilled, memory, offset = (np.exp(theta[i]) for i in (0, 1, 2, 5))
    operations = columns.step_operations[:, None]
    gpu = columns.gpu[:, None]
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
    step = step_time(theta, columns)
    share = np.minimum(own["share"], _MOST_SHARE)
    stepping = memory * own["step_traffic"] / own["memory"] / np.maximum(step, _TINY)
    added = duty * share + slicing * share / (1.0 - share)
    served = alone * (1.0 + added + contention * share * moving / alone * stepping)
    hosted = host * own["batch"] / own["cpu"] * (1.0 + hosting * added)
    return np.asarray(np.log(served + hosted + wait * share * step))


def slopes(theta: Array, columns: Columns) -> tuple[Array, Array]:
    """Return the form's value, shape (runs,), and its derivatives, shape (runs, coefficients of the form)."""
    count = len(FORM)
    sets = theta[:count, None] + _SLOPE_STEP * np.hstack([np.zeros((count, 1)), np.eye(count), -np.eye(count)])
    values = form(sets, columns)
    return values[:, 0], (values[:, 1 : count + 1] - values[:, count + 1 :]) / (2 * _SLOPE_STEP)


# How far the tail of the latency lies above its mean, and how that grows with what runs beside.

TAIL = 0.99
"""The share of queries that stay within the tail."""
_QUANTILE = 2.326
"""Standard deviations to that share of a normal distribution."""
_CENTRE = np.array([0.1, 0.1, 0.0, 0.0, 0.0])
_WIDTH = np.array([0.1, 0.2, 0.1, 0.05, 0.1])
_TAIL_NOISE = 0.04
"""Of the logarithm of a window's tail over its mean: a percentile of some hundred queries; assumed."""
_TAIL_STEP = 0.05
_TAIL_KEPT = 0.99


@dataclass(frozen=True, eq=False)
class Tail:
    """The logarithm of tail over mean: linear in the share and in the sizes of query and step, Bayesian.

    Args:
        mean: Coefficients, shape (features,).
        precision: Inverse of their covariance.
        raised: What single requests have added since: they lay above the tail more often than they should.
    """

    mean: Array
    precision: Array
    raised: float = 0.0

    @classmethod
    def fit(cls, runs: Sequence[CoRun]) -> Self | None:
        """Return what measured co-runs tell of tails; None if none does."""
        posterior = cls(_CENTRE, np.diag(1.0 / _WIDTH**2))
        known = [run for run in runs if run.tail_s is not None]
        for run in known:
            posterior = posterior._window(run, kept=1.0)
        if known:
            return posterior
        return None

    def ratio(self, run: CoRun) -> float:
        """Return the tail over the mean, at least 1."""
        return float(np.exp(max(0.0, float(_features(run) @ self.mean) + self.raised)))

    def spread(self, run: CoRun) -> float:
        """Return the standard deviation of the logarithm of single requests that would give this tail."""
        return float(np.log(self.ratio(run))) / _QUANTILE

    def seen(self, run: CoRun, mean_s: float) -> Self:
        """Return the same after one more window, or one request of which ``mean_s`` seconds were expected.

        A request moves the quantile up by 99 parts if it lies above, down by one if below, which comes to rest where
        one in a hundred lies above (Robbins and Monro, Ann. Math. Statist. 22, 1951).
        """
        if run.tail_s is not None:
            return self._window(run, _TAIL_KEPT)
        above = took_s(run) > mean_s * self.ratio(run)
        moved = (
            _TAIL_STEP
            * max(self.spread(run), _TAIL_NOISE / _QUANTILE)
            * ((TAIL if above else 0.0) - (1.0 - TAIL) * (not above))
        )
        return replace(self, raised=self.raised + moved)

    def _window(self, run: CoRun, kept: float) -> Self:
        assert run.tail_s is not None
        x = _features(run)
        ratio = float(np.log(run.tail_s / took_s(run)))
        precision = kept * self.precision + (1.0 - kept) * np.diag(1.0 / _WIDTH**2) + np.outer(x, x) / _TAIL_NOISE**2
        off = ratio - float(x @ self.mean) - self.raised
        return replace(self, mean=self.mean + np.linalg.solve(precision, x) * off / _TAIL_NOISE**2, precision=precision)


def _features(run: CoRun) -> Array:
    share = run.share
    size = float(np.log2(run.batch))
    step = float(np.log2(max(run.step_batch, 1)))
    return np.array([1.0, share, share * (step - size), size / 4.0, share * share])


# Predicts how long inference takes beside fine-tuning: fitted from few co-runs, unsure by what it says, and learning.
#
# The logarithm of the latency is a physical form (`form`) plus a small quadratic for what the form
# misses. Both have a prior, so that eight co-runs suffice, and both are moved by every request that is seen
# afterwards.

_STARTS: tuple[dict[str, float], ...] = ({}, {"compute": -2.0}, {"memory": -2.0}, {"compute": -1.5, "launch": 1.5})
_ITERATIONS = 40
_NOISE = 0.03
_NOISE_RUNS = 4.0
"""Noise of a measured mean before any co-run, as a fraction, and how many co-runs that belief is worth; assumed."""
_KEPT = 0.995
"""What is known counts this much after each request: a memory of 200."""
_AVERAGED = 0.1
_SURPRISED = 0.8
"""Weight of one request in the running surprise, and the surprise, in standard deviations, that means a drift.

Without drift it spreads by sqrt(0.1 / 1.9) = 0.23, so that one in a thousand requests is taken for a drift.
"""
_FARTHEST = 4.0
"""A request that lies more standard deviations off moves the model no more than this: it may be a straggler."""


@dataclass(frozen=True, eq=False)
class Interference:
    """Mean and tail of the latency beside fine-tuning, as probabilities; every change makes a new one.

    Args:
        reference: What co-runs are counted from.
        mean: Coefficients of the form and of the rest, shape (coefficients,).
        precision: How well they are known: the inverse of their covariance.
        variance: Of the logarithm of a measured mean around the truth.
        tail: How far the tail lies above the mean; None if no co-run told of tails.
        surprise: Running mean of how far requests lay off, in standard deviations.
    """

    reference: Reference
    mean: Array
    precision: Array
    variance: float
    tail: Tail | None
    surprise: float = 0.0

    @classmethod
    def fit(cls, runs: Sequence[CoRun]) -> Self:
        """Return the model after measured co-runs: the most probable coefficients, Gaussian around them (Laplace).

        Raises:
            InvalidInput: If there are fewer than eight, one was not measured, or operations are known for some only.
        """
        check_measured(runs, LEAST_RUNS)
        reference = Reference.of(runs, _middle_s(runs))
        return cls(reference, *_after(reference, runs), Tail.fit(runs))

    @property
    def counted(self) -> bool:
        """Whether operations and bytes were known; where not, items stand for them."""
        return self.reference.counted

    def predict(self, run: CoRun) -> Prediction:
        """Return what is expected of a co-run.

        Raises:
            InvalidInput: If the model was fitted with operations and this run has none.
        """
        value, gradient = _linear(self.reference, self.mean, self.reference.columns([run]))
        doubt = float(gradient[0] @ np.linalg.solve(self.precision, gradient[0]))
        mean_s = self.reference.time_s * float(np.exp(value[0]))
        tail_s = None
        if self.tail is not None:
            tail_s = mean_s * self.tail.ratio(run)
        return Prediction(mean_s, mean_s * float(np.sqrt(doubt + self.variance)), tail_s)

    def seen(self, run: CoRun) -> Self:
        """Return the model after one more measured co-run, or after one request, which has no tail of its own.

        Recursive least squares on the linearised logarithm. What is known fades towards the prior's width, slowly, and
        quickly while requests keep lying off on one side (Fortescue, Kershenbaum and Ydstie, Automatica 17, 1981).

        Raises:
            InvalidInput: If it was not measured, or the model was fitted with operations and this run has none.
        """
        value, gradient = _linear(self.reference, self.mean, self.reference.columns([run]))
        slope = gradient[0]
        off = float(np.log(took_s(run) / self.reference.time_s)) - float(value[0])
        noise = self.variance + (self.tail.spread(run) ** 2 if self.tail and run.tail_s is None else 0.0)
        scale = float(np.sqrt(noise + slope @ np.linalg.solve(self.precision, slope)))
        bounded = float(np.clip(off / scale, -_FARTHEST, _FARTHEST))
        surprise = (1.0 - _AVERAGED) * self.surprise + _AVERAGED * bounded
        kept = _KEPT * min(1.0, _SURPRISED / max(abs(surprise), 1e-9))
        precision = kept * self.precision + (1.0 - kept) * np.diag(1.0 / self.reference.prior[1] ** 2)
        precision += np.outer(slope, slope) / noise
        mean = self.mean + np.linalg.solve(precision, slope) * bounded * scale / noise
        tail = self.tail and self.tail.seen(run, self.predict(run).mean_s)
        return replace(self, mean=mean, precision=precision, tail=tail, surprise=surprise)


def most_informative(cases: Sequence[CoRun], runs: Sequence[CoRun]) -> int:
    """Return the place of the case whose measurement tells most of all the others.

    It takes away as much as one can of the variance that is left over all cases, with the model linearised at what is
    most probable so far (Bayesian A-optimality: Chaloner and Verdinelli, Statist. Sci. 10, 1995).

    Args:
        cases: To choose from.
        runs: Measured so far; may be none.

    Raises:
        InvalidInput: If operations are known for some only.
    """
    reference = Reference.of(cases, _middle_s(runs) if runs else 1.0)
    mean, precision, variance = _after(reference, runs)
    gradient = _linear(reference, mean, reference.columns(cases))[1]
    doubt = gradient @ np.linalg.solve(precision, gradient.T)
    return int(np.argmax(np.sum(doubt**2, axis=0) / (np.diag(doubt) + variance)))


def _middle_s(runs: Sequence[CoRun]) -> float:
    return float(np.exp(np.mean(np.log([took_s(run) for run in runs]))))


def _after(reference: Reference, runs: Sequence[CoRun]) -> tuple[Array, Array, float]:
    """Return the most probable coefficients after measured co-runs, their precision, and the variance of the noise."""
    if not runs:
        centre, spread = reference.prior
        return centre, np.diag(1.0 / spread**2), _NOISE**2
    logs = np.log(np.array([took_s(run) for run in runs]) / reference.time_s)
    return _most_probable(reference, reference.columns(runs), logs)


def _linear(reference: Reference, mean: Array, columns: Columns) -> tuple[Array, Array]:
    """Return the logarithm of the relative latency, shape (runs,), and its derivatives, (runs, coefficients)."""
    value, physical = slopes(mean, columns)
    rest = rest_features(columns, reference.reach).T
    return value + rest @ mean[len(FORM) :], np.hstack([physical, rest])


def _most_probable(reference: Reference, columns: Columns, logs: Array) -> tuple[Array, Array, float]:
    """Return the best coefficients from several starts, their precision, and the variance of the noise."""
    variance = _NOISE**2
    starts = [_started(reference, shift) for shift in _STARTS]
    for _ in range(3):
        starts = [_climbed(reference, columns, logs, start, variance) for start in starts]
        mean = min(starts, key=lambda start: _cost(reference, columns, logs, start, variance))
        precision, missed, free = _known(reference, columns, logs, mean, variance)
        variance = (_NOISE_RUNS * _NOISE**2 + missed) / (_NOISE_RUNS + free)
    return mean, precision, variance


def _started(reference: Reference, shift: dict[str, float]) -> Array:
    mean: Array = reference.prior[0].copy()
    for name, by in shift.items():
        mean[list(FORM).index(name)] += by
    return mean


def _known(
    reference: Reference, columns: Columns, logs: Array, mean: Array, variance: float
) -> tuple[Array, float, float]:
    """Return the precision of the coefficients, the squares they miss, and the co-runs left free to tell of noise."""
    value, gradient = _linear(reference, mean, columns)
    precision = gradient.T @ gradient / variance + np.diag(1.0 / reference.prior[1] ** 2)
    used = float(np.trace(gradient @ np.linalg.solve(precision, gradient.T))) / variance
    return precision, float(np.sum((logs - value) ** 2)), len(logs) - used


def _cost(reference: Reference, columns: Columns, logs: Array, mean: Array, variance: float) -> float:
    centre, spread = reference.prior
    value, _ = _linear(reference, mean, columns)
    return float(np.sum((logs - value) ** 2) / variance + np.sum(((mean - centre) / spread) ** 2))


def _climbed(reference: Reference, columns: Columns, logs: Array, mean: Array, variance: float) -> Array:
    """Return coefficients after Levenberg and Marquardt's steps towards the most probable ones."""
    centre, spread = reference.prior
    damping = 1e-2
    cost = _cost(reference, columns, logs, mean, variance)
    for _ in range(_ITERATIONS):
        value, gradient = _linear(reference, mean, columns)
        hessian = gradient.T @ gradient / variance + np.diag(1.0 / spread**2)
        downhill = gradient.T @ (logs - value) / variance - (mean - centre) / spread**2
        step = np.linalg.solve(hessian + damping * np.diag(np.diag(hessian)), downhill)
        tried = _cost(reference, columns, logs, mean + step, variance)
        if tried < cost:
            mean = mean + step
            damping = damping / 10
            if cost - tried < 1e-4:
                break
            cost = tried
        else:
            damping *= 10
    return mean


__all__ = ["CoRun", "Interference", "PaperModel", "Prediction", "Predictor", "intensity"]
