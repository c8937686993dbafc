"""What is taken for known before anything is measured: published figures, each with its source.

CM-DARE (ICDCS 2020, arXiv 2004.03072; data of github.com/cake-lab/CM-DARE, 263b7f1, Apache-2.0): revocations of
Google's preemptible machines within 24 h, 156 K80, 120 P100, 120 V100; start of the framework on new and old machines.
"""

from dataclasses import dataclass
from math import log

from polythrottle.cluster.lifetime import HOUR_S
from polythrottle.cluster.predict.pooled import EDGES_S, Pieces

SOURCE = "CM-DARE (arXiv 2004.03072)"


@dataclass(frozen=True)
class Revocations:
    """Shares of machines lost by an age, for one GPU type and region.

    Attributes:
        gpu: GPU model.
        region: Where they stood.
        lost: Share lost within 1, 6 and 12 h, and before 24 h.
        later: Share of those alive at 3 h that were lost later.
    """

    gpu: str
    region: str
    lost: tuple[float, float, float, float]
    later: float


REVOCATIONS = (
    Revocations("K80", "us-central1", (0.10, 0.17, 0.27, 0.56), 0.49),
    Revocations("K80", "us-west1", (0.04, 0.17, 0.19, 0.23), 0.10),
    Revocations("K80", "europe-west1", (0.40, 0.47, 0.53, 0.67), 0.38),
    Revocations("K80", "us-east1", (0.47, 0.47, 0.47, 0.47), 0.00),
    Revocations("P100", "us-east1", (0.20, 0.63, 0.67, 0.70), 0.18),
    Revocations("P100", "us-central1", (0.27, 0.33, 0.47, 0.53), 0.30),
    Revocations("P100", "us-west1", (0.17, 0.43, 0.53, 0.67), 0.52),
    Revocations("P100", "europe-west1", (0.00, 0.17, 0.23, 0.27), 0.15),
    Revocations("V100", "us-central1", (0.67, 0.67, 0.67, 0.67), 0.00),
    Revocations("V100", "us-west1", (0.30, 0.73, 0.73, 0.73), 0.43),
    Revocations("V100", "europe-west4", (0.07, 0.20, 0.23, 0.43), 0.32),
    Revocations("V100", "asia-east1", (0.23, 0.47, 0.47, 0.47), 0.16),
)

FRAMEWORK_S = {True: (10.2, 0.0895), False: (71.1, 0.0895)}
"""Warm (a process starts again) or cold (a new machine): seconds to the first step, and seconds per tensor; a line
through ResNet-15, ResNet-32, Shake-Shake small, big: 75.6, 78.7, 89.1, 90.8 s cold; 14.8, 19.0, 29.4, 30.6 s warm."""

STOP_S = {"stop": 55.0, "delete": 20.0}
"""Until a machine given back is stopped, and then gone, within a region."""


def curve(some: Revocations) -> Pieces:
    """Return a published row as a curve with a constant danger within each span of age."""
    alive_3h = (1 - some.lost[3]) / (1 - some.later)
    kept = (1.0, 1 - some.lost[0], min(1 - some.lost[0], alive_3h), *(1 - share for share in some.lost[1:]))
    return _through(kept)


def prior(gpu: str = "", region: str = "") -> Pieces:
    """Return the published curve of a GPU type and region, else the mean of the type's, else of all.

    Args:
        gpu: GPU model.
        region: A region or a zone in it.
    """
    of_type = [some for some in REVOCATIONS if some.gpu == gpu] or list(REVOCATIONS)
    here = [some for some in of_type if some.gpu == gpu and region.startswith(some.region)]
    curves = [curve(some) for some in here or of_type]
    return _through([sum(one.survival(age_s) for one in curves) / len(curves) for age_s in EDGES_S])


def _through(kept: "tuple[float, ...] | list[float]") -> Pieces:
    """Return the curve that has survivals at the edges of the spans, and goes on as in the last."""
    floor = 0.005
    held = [max(floor, one) for one in kept]
    pairs = zip(held, held[1:], EDGES_S, EDGES_S[1:], strict=False)
    rates = [max(0.0, log(a / b)) / (end - start) for a, b, start, end in pairs]
    return Pieces(EDGES_S, (*rates, rates[-1] if rates[-1] > 0 else 0.01 / HOUR_S))
