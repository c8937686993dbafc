"""What step times are compared with: the regressions of CM-DARE (ICDCS 2020), as published.

A straight line on operations, and support-vector regressions on operations scaled to [0, 1], radial (C = 100,
ε = 0.01) and polynomial (degree 2, C = 100, ε = 0.01, coef0 = 1), gamma 1 over the number of features. The scale is
that of the rows a model is fitted to, so that a network left out stays unseen. Support vectors take time with the cube
of the rows: of more than ``MOST``, more than the papers had, so many are taken evenly.
"""

from collections.abc import Callable, Mapping, Sequence

import numpy as np

from polythrottle.cluster.machine import Network
from polythrottle.cluster.tables import StepRow
from polythrottle.errors import InvalidInput

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
    found = np.linalg.lstsq(matrix, np.array([row.step_s for row in rows]), rcond=None)[0]
    return lambda network: float(found[0] + found[1] * network.flops / scale)


def _vectors(rows: Sequence[StepRow], name: str) -> Callable[[Network], float]:
    from sklearn.svm import SVR

    rows = rows[:: -(-len(rows) // MOST)]
    flops = np.array([row.network.flops for row in rows])
    least, span = float(flops.min()), float(np.ptp(flops)) or 1.0
    model = SVR(**_SVR[name]).fit(((flops - least) / span)[:, None], np.array([row.step_s for row in rows]))
    return lambda network: float(model.predict([[(network.flops - least) / span]])[0])
