"""How wrong predictions of step time are: on networks left out, as published, and beside CM-DARE's regressions."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from math import isnan
from statistics import fmean

import numpy as np

from polythrottle.cluster.predict.step_and_checkpoint_times import StepModel, fit_checkpoints, fit_steps
from polythrottle.cluster.recorded_tables import CheckpointRow, StepRow
from polythrottle.domain.errors import BadFile, InvalidInput
from polythrottle.domain.fleet.transient_machine import Network

# What step times are compared with: the regressions of CM-DARE (ICDCS 2020), as published.
#
# A straight line on operations, and support-vector regressions on operations scaled to [0, 1], radial (C = 100, ε =
# 0.01) and polynomial (degree 2, C = 100, ε = 0.01, coef0 = 1), gamma 1 over the number of features. The scale is
# that of the rows a model is fitted to, so that a network left out stays unseen. Support vectors take time with the
# cube of the rows: of more than ``MOST``, more than the papers had, so many are taken evenly.

Fit = Callable[[Sequence[StepRow]], Callable[[Network], float]]

_SVR: Mapping[str, Mapping[str, str | float]] = {
    "svr-rbf": {"kernel": "rbf", "C": 100, "epsilon": 0.01, "gamma": "auto"},
    "svr-poly": {"kernel": "poly", "degree": 2, "C": 100, "epsilon": 0.01, "coef0": 1, "gamma": "auto"},
}
MOST = 250
NAMES = ("linear-flops", *_SVR)
"""Every baseline, by the name it is scored under."""


def baseline(name: str) -> Fit:
    """Return what fits a baseline.

    Args:
        name: One of `NAMES`.

    Raises:
        InvalidInput: If it needs scikit-learn, which is not installed.
    """
    if name not in _SVR:
        return _line
    try:
        import sklearn.svm  # noqa: F401
    except ImportError:
        raise InvalidInput(f"{name} needs scikit-learn; install polythrottle[cluster]") from None
    return lambda rows: _vectors(rows, name)


def _line(rows: Sequence[StepRow]) -> Callable[[Network], float]:
    flops = np.array([row.network.flops for row in rows])
    scale = float(flops.max())
    matrix = np.column_stack([np.ones(len(rows)), flops / scale])
    coefficients = np.linalg.lstsq(matrix, np.array([row.step_s for row in rows]), rcond=None)[0]
    return lambda network: float(coefficients[0] + coefficients[1] * network.flops / scale)


def _vectors(rows: Sequence[StepRow], name: str) -> Callable[[Network], float]:
    from sklearn.svm import SVR

    rows = rows[:: -(-len(rows) // MOST)]
    flops = np.array([row.network.flops for row in rows])
    least = float(flops.min())
    span = float(np.ptp(flops)) or 1.0
    model = SVR(**_SVR[name]).fit(((flops - least) / span)[:, None], np.array([row.step_s for row in rows]))
    return lambda network: float(model.predict([[(network.flops - least) / span]])[0])


# How wrong predictions of step time are: on networks left out, and as published, on repeats of networks seen.

OURS = "polythrottle"
COVERAGE = 0.9
ALONE = 60
PARTS = 10
"""Up to how many networks each is left out alone; in how many parts those of larger tables are."""
_TEST_SHARE = 0.2
_FEW_SPLITS = 2
_MOST_REPEATS = 20
"""Repeats drawn of a network at most: the baselines' time grows with their square."""

Counted = Callable[[int, int], None]


@dataclass(frozen=True)
class PredictionRecord:
    """One prediction of one model.

    Attributes:
        gpu: GPU model; empty for a checkpoint.
        network: Name of the network.
        measured_s: Measured time of a step, or a checkpoint, in seconds, or None where it was not measured.
        predicted_s: Predicted time in seconds, or None where nothing can be said.
        model: Name of the model.
        low_s: Lower bound of the prediction interval in seconds, or None: baselines have none.
        high_s: Upper bound.
        why: Why nothing can be said.
    """

    gpu: str
    network: str
    measured_s: float | None
    predicted_s: float | None
    model: str
    low_s: float | None = None
    high_s: float | None = None
    why: str | None = None

    @property
    def error(self) -> float | None:
        """Return the relative error, a fraction, or None."""
        if self.measured_s is None or self.predicted_s is None:
            return None
        return self.predicted_s / self.measured_s - 1


def filled(rows: Sequence[StepRow], others: Sequence[StepRow] = ()) -> tuple[StepRow, ...]:
    """Return rows whose missing numbers of tensors are those of the same network on another GPU, where one says."""
    known = {row.network.name: row.network.n_tensors for row in (*others, *rows) if not isnan(row.network.n_tensors)}
    return tuple(
        replace(row, network=replace(row.network, n_tensors=known[row.network.name]))
        if isnan(row.network.n_tensors) and row.network.name in known
        else row
        for row in rows
    )


def left_out(rows: Sequence[StepRow], counted: Counted = lambda done, total: None) -> list[PredictionRecord]:
    """Return what every model predicts for each network from the others; it is left out on every GPU type.

    Up to ``ALONE`` networks are left out one by one; of a larger table so many parts are left out in turn.

    Args:
        rows: The table.
        counted: Told of every network that is done, of how many.
    """
    rows = filled(rows)
    names = sorted({row.network.name for row in rows})
    parts = len(names) if len(names) <= ALONE else PARTS
    part = {name: index % parts for index, name in enumerate(names)}
    by_network: dict[tuple[str, str, str], PredictionRecord] = {}
    for index in range(parts):
        rest = [row for row in rows if part[row.network.name] != index]
        asked = [row for row in rows if part[row.network.name] == index]
        for record in _each_type(rest, asked):
            by_network[record.gpu, record.network, record.model] = record
        counted(index + 1, parts)
    return [by_network[row.gpu, row.network.name, model] for row in rows for model in (OURS, *NAMES)]


def unseen(
    rows: Sequence[StepRow], test: Sequence[StepRow], counted: Counted = lambda done, total: None
) -> list[PredictionRecord]:
    """Return what every model, fitted to one table, predicts for the networks of another.

    Raises:
        BadFile: If the tables have no GPU type in common.
    """
    types = sorted({row.gpu for row in test})
    if not (have := {row.gpu for row in rows}) & set(types):
        raise BadFile(f"nothing to predict {', '.join(types)} from: the table has {', '.join(sorted(have))} only")
    rows, test = filled(rows, test), filled(test, rows)
    counted(0, 1)
    records = _each_type(rows, test)
    counted(1, 1)
    return records


def _each_type(rows: Sequence[StepRow], asked: Sequence[StepRow]) -> list[PredictionRecord]:
    """Return what every model, fitted to rows, predicts for others, GPU type by GPU type."""
    names = {row.network.name for row in asked}
    elsewhere = [row for row in rows if row.network.name not in names]
    records: list[PredictionRecord] = []
    for gpu in sorted({row.gpu for row in asked}):
        mine = [row for row in rows if row.gpu == gpu]
        records += _predicted(mine, [row for row in asked if row.gpu == gpu], [r for r in elsewhere if r.gpu != gpu])
    return records


def _predicted(rows: Sequence[StepRow], asked: Sequence[StepRow], others: Sequence[StepRow]) -> list[PredictionRecord]:
    if not rows:
        why = f"no other network was measured on {asked[0].gpu}"
        return [_record(row, None, name, why=why) for row in asked for name in (OURS, *NAMES)]
    model = fit_steps(rows, others)
    records = [_ours(model, row) for row in asked]
    for name in NAMES:
        try:
            fitted = baseline(name)(rows)
        except InvalidInput as error:
            records += [_record(row, None, name, why=str(error)) for row in asked]
        else:
            records += [_record(row, fitted(row.network), name) for row in asked]
    return records


def _ours(model: StepModel, row: StepRow) -> PredictionRecord:
    predicted = model.predict(row.network, row.complete is False)
    low_s, high_s = predicted.interval_s(COVERAGE)
    return replace(_record(row, predicted.seconds, OURS), low_s=low_s, high_s=high_s)


def _record(row: StepRow, predicted_s: float | None, model: str, why: str | None = None) -> PredictionRecord:
    measured_s = None
    if not isnan(row.step_s):
        measured_s = row.step_s
    return PredictionRecord(row.gpu, row.network.name, measured_s, predicted_s, model, why=why)


def checkpoints(rows: Sequence[CheckpointRow], test: Sequence[CheckpointRow] | None = None) -> list[PredictionRecord]:
    """Return what is predicted for every single checkpoint from those of the other networks, or of another table.

    Args:
        rows: The table.
        test: The other one; None leaves each network of the first out in turn.
    """
    records = []
    for row in rows if test is None else test:
        others = [other for other in rows if test is not None or other.network != row.network]
        if not others:
            records.append(
                PredictionRecord("", row.network, row.remote_s, None, OURS, why="no other network was measured")
            )
            continue
        predicted = _checkpoint_model(tuple(others)).predict(row.weight_mb, row.graph_mb)
        low_s, high_s = predicted.interval_s(COVERAGE)
        records.append(PredictionRecord("", row.network, row.remote_s, predicted.seconds, OURS, low_s, high_s))
    return records


_checkpoint_model = lru_cache(maxsize=4)(fit_checkpoints)


def mape(records: Sequence[PredictionRecord]) -> dict[str, dict[str, float | None]]:
    """Return the mean absolute relative error by GPU and model, a fraction; None where there is none to average."""
    found: dict[str, dict[str, float | None]] = {}
    for gpu in dict.fromkeys(record.gpu for record in records):
        for name in dict.fromkeys(record.model for record in records):
            errors = [
                abs(record.error)
                for record in records
                if (record.gpu, record.model) == (gpu, name) and record.error is not None
            ]
            if errors:
                found.setdefault(gpu, {})[name] = fmean(errors)
            else:
                found.setdefault(gpu, {})[name] = None
    return found


def covered(records: Sequence[PredictionRecord]) -> float | None:
    """Return the share of measurements within their prediction intervals, or None without any."""
    inside = [
        one.low_s <= one.measured_s <= one.high_s
        for one in records
        if one.low_s is not None and one.high_s is not None and one.measured_s is not None
    ]
    if inside:
        return fmean(inside)
    return None


def leaking(rows: Sequence[StepRow], splits: int = 10, seed: int = 0) -> dict[str, dict[str, float]] | None:
    """Return the errors under the published protocol: repeats of every network on both sides of a random split.

    The tables give mean and deviation of the repeats, so the repeats are drawn from them; four of five are fitted to.

    Returns:
        GPU → model → mean absolute relative error, a fraction; None where the table lacks deviations or repeats.
    """
    if any(row.std_s is None or not row.repeats for row in rows):
        return None
    rng = np.random.default_rng(seed)
    errors: dict[str, dict[str, float]] = {}
    if len(rows) > ALONE:
        splits = min(splits, _FEW_SPLITS)
    for gpu in dict.fromkeys(row.gpu for row in rows):
        mine = [row for row in filled(rows) if row.gpu == gpu]
        scores = [_split(_repeats(mine, rng), rng) for _ in range(splits)]
        errors[gpu] = {name: fmean(score[name] for score in scores) for name in scores[0]}
    return errors


def _repeats(rows: Sequence[StepRow], rng: np.random.Generator) -> list[StepRow]:
    counts = [min(row.repeats or 1, _MOST_REPEATS) for row in rows]
    pairs = zip(rows, counts, strict=True)
    drawn = [(row, float(one)) for row, count in pairs for one in rng.normal(row.step_s, row.std_s or 0.0, count)]
    return [replace(row, step_s=max(time_s, row.step_s / 10)) for row, time_s in drawn]


def _split(rows: Sequence[StepRow], rng: np.random.Generator) -> Mapping[str, float]:
    order = rng.permutation(len(rows))
    cut = max(1, round(_TEST_SHARE * len(rows)))
    test = [rows[i] for i in order[:cut]]
    rest = [rows[i] for i in order[cut:]]
    scores = {}
    for name in NAMES:
        try:
            fitted = baseline(name)(rest)
        except InvalidInput:
            continue
        scores[name] = _off(lambda row, fitted=fitted: fitted(row.network), test)  # type: ignore[misc]
    model = _means(rest)
    scores[OURS] = _off(lambda row: model.predict(row.network, row.complete is False).seconds, test)
    return scores


def _off(predicted: Callable[[StepRow], float], test: Sequence[StepRow]) -> float:
    """Return the mean error on repeats, each network predicted once."""
    once = {row.network.name: predicted(row) for row in {row.network.name: row for row in test}.values()}
    return fmean(abs(once[row.network.name] / row.step_s - 1) for row in test)


def _means(rows: Sequence[StepRow]) -> StepModel:
    by_name: dict[str, list[StepRow]] = {}
    for row in rows:
        by_name.setdefault(row.network.name, []).append(row)
    return fit_steps([replace(some[0], step_s=fmean(one.step_s for one in some)) for some in by_name.values()])
