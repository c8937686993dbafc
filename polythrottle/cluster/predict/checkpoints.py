"""How long a checkpoint takes: a fixed part, and parts for the weights and for the description of the network."""

from collections.abc import Sequence
from dataclasses import dataclass
from math import log, sqrt
from statistics import fmean

import numpy as np
from scipy.optimize import nnls

from polythrottle.cluster.machine import Network
from polythrottle.cluster.predict.steps import Predicted
from polythrottle.cluster.tables import CheckpointRow
from polythrottle.errors import InvalidInput

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

    def predict(self, weight_mb: float, graph_mb: float) -> Predicted:
        """Return the time for sizes in MB, with its spread."""
        seconds = self.fixed_s + self.weight_s * weight_mb + self.graph_s * graph_mb
        return Predicted(max(seconds, 1e-9), self.spread, max(1, self.networks - 3))

    def of(self, network: Network) -> Predicted:
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
    errors = [log(1 + error) for error in _singles(rows, local)] if len(names) > 3 else [0.3]
    spread = sqrt(sum(one * one for one in errors) / len(errors) * len(names) / max(1, len(names) - 3))
    return CheckpointModel(*_solved(rows, local), spread, len(names))


def left_out_errors(rows: Sequence[CheckpointRow], local: bool = False) -> dict[str, float]:
    """Return by network the relative error of its mean time when predicted from the other networks."""
    found = {}
    for name in dict.fromkeys(row.network for row in rows):
        fixed_s, weight_s, graph_s = _solved([row for row in rows if row.network != name], local)
        mine = [row for row in rows if row.network == name]
        guess_s = fixed_s + weight_s * mine[0].weight_mb + graph_s * mine[0].graph_mb
        found[name] = guess_s / fmean(_time_s(row, local) for row in mine) - 1
    return found


def repeat_error(rows: Sequence[CheckpointRow], local: bool = False) -> float:
    """Return the mean absolute relative error over all single checkpoints of networks left out, a fraction."""
    return fmean(map(abs, _singles(rows, local)))


def _singles(rows: Sequence[CheckpointRow], local: bool) -> list[float]:
    """Return the relative error of every single checkpoint, predicted from the other networks."""
    errors = []
    for name in dict.fromkeys(row.network for row in rows):
        parts = _solved([row for row in rows if row.network != name], local)
        for row in (row for row in rows if row.network == name):
            guess_s = parts[0] + parts[1] * row.weight_mb + parts[2] * row.graph_mb
            errors.append(max(guess_s, 1e-9) / _time_s(row, local) - 1)
    return errors


def _solved(rows: Sequence[CheckpointRow], local: bool) -> tuple[float, float, float]:
    times_s = np.array([_time_s(row, local) for row in rows])
    terms = np.array([(1.0, row.weight_mb, row.graph_mb) for row in rows])
    found = nnls(terms / times_s[:, None], np.ones(len(rows)))[0]
    return float(found[0]), float(found[1]), float(found[2])


def _time_s(row: CheckpointRow, local: bool) -> float:
    return row.local_s if local else row.remote_s
