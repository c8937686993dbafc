"""How long a training step and a checkpoint of a network take, learned from a few other networks."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from math import exp, hypot, isnan, log, sqrt
from statistics import fmean

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import nnls
from scipy.stats import t as student

from polythrottle.cluster.recorded_tables import CheckpointRow, StepRow
from polythrottle.domain.errors import InvalidInput
from polythrottle.domain.fleet.transient_machine import Network

# How long a training step of a network takes on a GPU type, learned from a few other networks.
#
# A step is operations and small things: b × operations^p + c × tensors (+ a), per GPU type. Large networks use a GPU
# better than small ones, so p is below 1 on some; how far is not known beforehand. So a few such shapes are fitted,
# each with coefficients >= 0 on relative errors, and averaged by how well each predicted the networks left out of it
# one by one (pseudo Bayesian model averaging; Yao et al. 2018, doi 10.1214/17-BA1091, without its bootstrap). A
# constant is one more coefficient than small tables carry, so it has to earn its place. What a shape is worth on
# other GPU types of the table counts half: it is what a type with few networks goes by.

Floats = NDArray[np.float64]

_EXPONENTS = (1.0, 0.85, 0.7)
_RIDGE = 0.3
_SHRINK = 1.0
_EARN = 4.0
_ROUNDS = 8
_PARTS = 20
_FLOOR = 1e-6
_ELSEWHERE = 0.5
_FEWEST = 4
_USUAL = 0.1
_USUAL_ROWS = 2
_PER_E = float(np.std(_EXPONENTS))
"""Spread of the logarithm of a time per factor e beyond what was measured: as the exponents are apart."""
_FLOPS = 1e9
_TENSORS = 100.0


@dataclass(frozen=True)
class Shape:
    """One form of the law.

    Attributes:
        exponent: Of the operations.
        constant: Whether a step also takes a time that no network changes.
        campaign: Whether rows with holes, from another campaign of measurements, are a common factor apart.
        tensors: Whether tensors count; without, operations and a constant are all there is.
    """

    exponent: float
    constant: bool
    campaign: bool
    tensors: bool = True

    def terms(self, networks: Sequence[Network]) -> Floats:
        """Return what coefficients multiply, shape (networks, terms)."""
        columns = [np.array([network.flops / _FLOPS for network in networks]) ** self.exponent]
        if self.tensors:
            columns.append(np.array([network.n_tensors / _TENSORS for network in networks]))
        if self.constant:
            columns.append(np.ones(len(networks)))
        return np.column_stack(columns)


@dataclass(frozen=True)
class Law:
    """A shape with its coefficients.

    Attributes:
        shape: Its form.
        coefficients: Seconds per term, each >= 0.
        factor: What a row of the other campaign takes over one of this, > 0.
    """

    shape: Shape
    coefficients: tuple[float, ...]
    factor: float = 1.0

    def step_s(self, network: Network, apart: bool = False) -> float:
        """Return the time of a step in seconds."""
        time_s = float((self.shape.terms([network]) @ np.array(self.coefficients))[0])
        return time_s * (self.factor if apart else 1.0)


@dataclass(frozen=True)
class TimePrediction:
    """A time with its spread.

    Attributes:
        seconds: The most likely time, > 0.
        spread: Standard deviation of its logarithm, for a network never seen; about the relative error.
        degrees: Degrees of freedom the spread was estimated with.
    """

    seconds: float
    spread: float
    degrees: int

    def interval_s(self, coverage: float = 0.9) -> tuple[float, float]:
        """Return the bounds in seconds within which a measurement falls with a probability."""
        wide = float(student.ppf((1 + coverage) / 2, self.degrees)) * self.spread
        return self.seconds * float(np.exp(-wide)), self.seconds * float(np.exp(wide))


@dataclass(frozen=True)
class Known:
    """From where to where networks were measured.

    Attributes:
        flops: Least and most operations.
        tensors: Least and most tensors, or None where no network says.
    """

    flops: tuple[float, float]
    tensors: tuple[float, float] | None

    def away(self, network: Network) -> float:
        """Return how far beyond a network is, in factors of e; 0 within."""
        if self.tensors is None or isnan(network.n_tensors):
            tensors = 0.0
        else:
            tensors = _beyond(network.n_tensors, self.tensors)
        return hypot(_beyond(network.flops, self.flops), tensors)


def _beyond(value: float, span: tuple[float, float]) -> float:
    return max(0.0, log(span[0] / value), log(value / span[1]))


@dataclass(frozen=True)
class StepModel:
    """What predicts the steps of one GPU type.

    Attributes:
        gpu: GPU model.
        laws: Fitted laws with their weights, which sum to 1.
        plain: A law that needs no tensors, for networks whose number is not known; with its spread.
        spread: Standard deviation of the logarithmic error on networks left out.
        rows: How many networks it was fitted to.
        known: From where to where they are.
    """

    gpu: str
    laws: tuple[tuple[Law, float], ...]
    plain: tuple[Law, float]
    spread: float
    rows: int
    known: Known

    def predict(self, network: Network, apart: bool = False) -> TimePrediction:
        """Return the time of a step of a network never seen, the less sure the further it is from those measured.

        Args:
            network: What is trained.
            apart: Whether it will be measured like the rows with holes.
        """
        laws = self.laws
        spread = self.spread
        if isnan(network.n_tensors) or not laws:
            laws = ((self.plain[0], 1.0),)
            spread = self.plain[1]
        weights = [weight for _, weight in laws]
        logs = [log(max(law.step_s(network, apart), 1e-12)) for law, _ in laws]
        middle = float(np.average(logs, weights=weights))
        differ = float(np.average([(one - middle) ** 2 for one in logs], weights=weights))
        wide = sqrt(spread**2 + differ + (_PER_E * self.known.away(network)) ** 2)
        return TimePrediction(exp(middle), wide, max(1, self.rows - 2) + _USUAL_ROWS)

    @property
    def campaign(self) -> float:
        """Return what the other campaign's steps take over this one's, on the average of the laws; 1 if none."""
        return float(np.exp(sum(weight * log(law.factor) for law, weight in self.laws)))


def fit_steps(rows: Sequence[StepRow], others: Sequence[StepRow] = ()) -> StepModel:
    """Return a model of the steps of one GPU type.

    Args:
        rows: Measured steps on that type, of different networks.
        others: Measured steps on other types, from which the shape of the law is learned too; none of a network that
            is to be predicted.

    Raises:
        InvalidInput: If there are no rows, or of several types.
    """
    if len({row.gpu for row in rows}) != 1:
        raise InvalidInput("a model of steps needs measured rows, all of one GPU type")
    rows = sorted(rows, key=lambda row: (row.network.flops, row.network.name))  # in whatever order they came
    known = tuple(row for row in rows if not isnan(row.network.n_tensors))
    plain = min(
        ((law, _error(rows, law.shape)) for law in (_fitted(rows, Shape(p, p == 1, False, False)) for p in _EXPONENTS)),
        key=lambda pair: pair[1],
    )
    laws, spread = _averaged(known, others) if len(known) > 1 else ((), plain[1])
    flops = [row.network.flops for row in rows]
    tensors = [row.network.n_tensors for row in known]
    spans = Known((min(flops), max(flops)), (min(tensors), max(tensors)) if tensors else None)
    return StepModel(rows[0].gpu, laws, plain, spread, len(known) if laws else len(rows), spans)


@dataclass(frozen=True)
class _Tried:
    """How well shapes predict the rows left out of them.

    Attributes:
        errors: Logarithm of predicted over measured of each row, by shape.
        scores: Of each shape, in nats; less is better.
    """

    errors: Mapping[Shape, Floats] = field(default_factory=dict)
    scores: Mapping[Shape, float] = field(default_factory=dict)


@lru_cache(maxsize=256)
def _tried(rows: tuple[StepRow, ...]) -> _Tried:
    errors = {shape: np.array(_left_out(rows, shape)) for shape in _shapes(rows)}
    scores = {
        shape: log(float(np.mean(each**2)) + _FLOOR) * len(rows) / 2 + _EARN * shape.constant
        for shape, each in errors.items()
    }
    return _Tried(errors, scores)


def _averaged(rows: tuple[StepRow, ...], others: Sequence[StepRow]) -> tuple[tuple[tuple[Law, float], ...], float]:
    tried = _tried(rows)
    shapes = _shapes(rows)
    score = np.array([tried.scores[shape] for shape in shapes])
    for gpu in dict.fromkeys(row.gpu for row in others):
        score += _ELSEWHERE * _elsewhere(tuple(row for row in others if row.gpu == gpu), shapes)
    weights = np.exp(score.min() - score)
    weights /= weights.sum()
    errors = weights @ np.array([tried.errors[shape] for shape in shapes])
    # A tenth, what published models of step times are off, counts as much as two networks more.
    squares = float(np.sum(errors**2)) + _USUAL_ROWS * _USUAL**2
    spread = sqrt(squares / (max(1, len(rows) - 2) + _USUAL_ROWS))
    laws = tuple((_fitted(rows, shape), float(weight)) for shape, weight in zip(shapes, weights, strict=True))
    return tuple(pair for pair in laws if pair[1] > 1e-3), spread


def _elsewhere(rows: tuple[StepRow, ...], shapes: Sequence[Shape]) -> Floats:
    """Return the scores of shapes on another GPU type, the best 0; campaigns are a matter of each table's own."""
    known = (row for row in rows if not isnan(row.network.n_tensors))
    rows = tuple(sorted(known, key=lambda row: (row.network.flops, row.network.name)))
    if len(rows) < _FEWEST:
        return np.zeros(len(shapes))
    scores = _tried(rows).scores
    score = np.array([min(scores[one] for one in scores if _alike(one, shape)) for shape in shapes])
    return np.asarray(score - score.min())


def _alike(one: Shape, other: Shape) -> bool:
    return (one.exponent, one.constant) == (other.exponent, other.constant)


def _shapes(rows: Sequence[StepRow]) -> list[Shape]:
    apart = sum(row.complete is False for row in rows)
    campaigns = [False]
    if 2 <= apart <= len(rows) - 2:
        campaigns.append(True)
    constants = [False]
    if len(rows) > 3:
        constants.append(True)
    return [Shape(p, constant, campaign) for constant in constants for p in _EXPONENTS for campaign in campaigns]


def _left_out(rows: Sequence[StepRow], shape: Shape) -> list[float]:
    """Return the logarithm of predicted over measured for each row, fitted on the others; many in parts."""
    parts = min(len(rows), _PARTS)
    laws = [_fitted([row for i, row in enumerate(rows) if i % parts != part], shape) for part in range(parts)]
    times_s = [laws[i % parts].step_s(row.network, row.complete is False) for i, row in enumerate(rows)]
    return [log(max(time_s, 1e-12) / row.step_s) for time_s, row in zip(times_s, rows, strict=True)]


def _error(rows: Sequence[StepRow], shape: Shape) -> float:
    """Return the standard deviation of errors on rows left out; wide where there are too few to leave one out."""
    if len(rows) < 3:
        return 0.5
    squares = sum(error**2 for error in _left_out(rows, shape)) + _USUAL_ROWS * _USUAL**2
    return sqrt(squares / (len(rows) - 2 + _USUAL_ROWS))


def _fitted(rows: Sequence[StepRow], shape: Shape) -> Law:
    terms = shape.terms([row.network for row in rows])
    times_s = np.array([row.step_s for row in rows])
    apart = np.array([row.complete is False for row in rows], dtype=float)
    if not shape.campaign or not apart.any():
        return Law(shape, tuple(_step_coefficients(terms / times_s[:, None], shape.constant).tolist()))
    factor = 0.0
    for _ in range(_ROUNDS):
        scaled_s = times_s * np.exp(-factor * apart)
        coefficients = _step_coefficients(terms / scaled_s[:, None], shape.constant)
        gap = np.log(times_s / (terms @ coefficients))
        factor = float(apart @ gap / (apart.sum() + _SHRINK))
    return Law(shape, tuple(coefficients.tolist()), float(np.exp(factor)))


def _step_coefficients(shares: Floats, constant: bool) -> Floats:
    """Return coefficients >= 0 that bring the sum of terms over times nearest to 1.

    A weak ridge draws each term but the constant towards an equal part of the time, the constant towards 0: it decides
    only what the rows leave open, where they are few or alike.
    """
    count = shares.shape[1]
    parts = np.full(count, 1.0 / (count - constant) if count > constant else 1.0)
    if constant and count > 1:
        parts[-1] = 0.0
    scale = np.sqrt(_RIDGE * np.mean(shares**2, axis=0))
    matrix = np.vstack([shares, np.diag(scale)])
    wanted = np.concatenate([np.ones(len(shares)), np.sqrt(_RIDGE) * parts])
    small = np.asarray(
        np.linalg.qr(np.column_stack([matrix, wanted]), mode="r")
    )  # the same least squares in a few rows
    return np.asarray(nnls(small[:, :-1], small[:, -1])[0])


# How long a checkpoint takes: a fixed part, and parts for the weights and for the description of the network.

_GRAPH_MB = (0.19, 0.0164)
_MB_PER_PARAMETER = 7.65e-6


@dataclass(frozen=True)
class CheckpointModel:
    """Time of a checkpoint of a network.

    Attributes:
        fixed_s: Whatever the network, in seconds.
        weight_s: Per MB of weights.
        graph_s: Per MB of the description: the number of tensors decides it.
        spread: Standard deviation of the logarithmic error on networks left out.
        networks: How many it was fitted to.
    """

    fixed_s: float
    weight_s: float
    graph_s: float
    spread: float
    networks: int

    def predict(self, weight_mb: float, graph_mb: float) -> TimePrediction:
        """Return the time for sizes in MB, with its spread."""
        seconds = self.fixed_s + self.weight_s * weight_mb + self.graph_s * graph_mb
        return TimePrediction(max(seconds, 1e-9), self.spread, max(1, self.networks - 3))

    def of(self, network: Network) -> TimePrediction:
        """Return the time for a network; sizes that are not known follow from its parameters and tensors."""
        weight_mb = network.weight_mb or _MB_PER_PARAMETER * network.n_parameters
        return self.predict(weight_mb, _GRAPH_MB[0] + _GRAPH_MB[1] * network.n_tensors)


def fit_checkpoints(rows: Sequence[CheckpointRow], local: bool = False) -> CheckpointModel:
    """Return a model of checkpoints, coefficients >= 0, on relative errors.

    Args:
        rows: Measured checkpoints.
        local: Whether of the write to the machine's own disk; else of the write to object storage with it.

    Raises:
        InvalidInput: If there are no rows.
    """
    if not rows:
        raise InvalidInput("a model of checkpoints needs measured ones")
    names = {row.network for row in rows}
    if len(names) > 3:
        errors = [log(1 + error) for error in _singles(rows, local)]
    else:
        errors = [0.3]
    spread = sqrt(sum(one * one for one in errors) / len(errors) * len(names) / max(1, len(names) - 3))
    return CheckpointModel(*_checkpoint_coefficients(rows, local), spread, len(names))


def left_out_errors(rows: Sequence[CheckpointRow], local: bool = False) -> dict[str, float]:
    """Return by network the relative error of its mean time when predicted from the other networks."""
    errors = {}
    for name in dict.fromkeys(row.network for row in rows):
        fixed_s, weight_s, graph_s = _checkpoint_coefficients([row for row in rows if row.network != name], local)
        mine = [row for row in rows if row.network == name]
        guess_s = fixed_s + weight_s * mine[0].weight_mb + graph_s * mine[0].graph_mb
        errors[name] = guess_s / fmean(_time_s(row, local) for row in mine) - 1
    return errors


def repeat_error(rows: Sequence[CheckpointRow], local: bool = False) -> float:
    """Return the mean absolute relative error over all single checkpoints of networks left out, a fraction."""
    return fmean(map(abs, _singles(rows, local)))


def _singles(rows: Sequence[CheckpointRow], local: bool) -> list[float]:
    """Return the relative error of every single checkpoint, predicted from the other networks."""
    errors = []
    for name in dict.fromkeys(row.network for row in rows):
        parts = _checkpoint_coefficients([row for row in rows if row.network != name], local)
        for row in (row for row in rows if row.network == name):
            guess_s = parts[0] + parts[1] * row.weight_mb + parts[2] * row.graph_mb
            errors.append(max(guess_s, 1e-9) / _time_s(row, local) - 1)
    return errors


def _checkpoint_coefficients(rows: Sequence[CheckpointRow], local: bool) -> tuple[float, float, float]:
    times_s = np.array([_time_s(row, local) for row in rows])
    terms = np.array([(1.0, row.weight_mb, row.graph_mb) for row in rows])
    coefficients = nnls(terms / times_s[:, None], np.ones(len(rows)))[0]
    return float(coefficients[0]), float(coefficients[1]), float(coefficients[2])


def _time_s(row: CheckpointRow, local: bool) -> float:
    if local:
        return row.local_s
    return row.remote_s
