"""What the papers on transient training report: arXiv 1903.00045 (ICAC 2019) and arXiv 2004.03072 (ICDCS 2020).

Figures are computed from the authors' published data (github.com/cake-lab/transient-deep-learning 87c6717,
github.com/cake-lab/CM-DARE 263b7f1; both Apache-2.0), not copied from the tables here.
"""

from collections.abc import Mapping
from dataclasses import dataclass

ICAC, CM_DARE = "arXiv 1903.00045", "arXiv 2004.03072"
STEPS = 64_000
"""Of every ICAC training: ResNet-32 on CIFAR-10, batch 128."""

SINGLE_S: Mapping[str, float] = {"K80": 14_081.0, "P100": 5_417.0, "V100": 4_436.0}
"""Time of those steps on one machine of a type, in seconds: the only times predictions start from."""

USD_PER_H: Mapping[tuple[str, bool], float] = {
    ("K80", False): 0.723,
    ("K80", True): 0.256,
    ("P100", True): 0.551,
    ("V100", True): 0.861,
}
"""Price of a worker by GPU type and whether it is transient."""
SERVER_USD_PER_H = 0.143


@dataclass(frozen=True)
class Configuration:
    """One cluster with what was published of it.

    Attributes:
        name: For people.
        workers: GPU type of each.
        time_s: Mean time of the training, in seconds.
        usd: Mean cost.
        transient: Whether the workers could be taken away.
        servers: Parameter servers; a single worker is its own.
    """

    name: str
    workers: tuple[str, ...]
    time_s: float
    usd: float
    transient: bool = True
    servers: int = 1


_K, _P, _V = "K80", "P100", "V100"


CONFIGURATIONS: tuple[Configuration, ...] = (
    Configuration("1 K80 on-demand", (_K,), 14_081, 2.83, False, 0),
    Configuration("2 K80 on-demand", (_K,) * 2, 7_172, 3.17, False),
    Configuration("4 K80 on-demand", (_K,) * 4, 3_581, 3.02, False),
    Configuration("8 K80 on-demand", (_K,) * 8, 1_830, 3.01, False),
    Configuration("2 K80", (_K,) * 2, 7_765, 1.41),
    Configuration("4 K80", (_K,) * 4, 3_765, 1.16),
    Configuration("8 K80", (_K,) * 8, 1_841, 1.11),
    Configuration("1 P100", (_P,), 5_417, 0.83, True, 0),
    Configuration("1 V100", (_V,), 4_436, 1.06, True, 0),
    Configuration("4 P100", (_P,) * 4, 1_694, 1.10),
    Configuration("4 V100", (_V,) * 4, 1_560, 1.55),
    Configuration("1 V100, 1 P100, 2 K80", (_V, _P, _K, _K), 2_001, 1.15),
    Configuration("1 V100, 2 P100, 1 K80", (_V, _P, _P, _K), 1_789, 1.17),
    Configuration("2 V100, 1 P100, 1 K80", (_V, _V, _P, _K), 1_760, 1.33),
)
"""ICAC 2019; means over 10 to 33 trainings, those that lost machines included."""

SPEED_UP, SAVING = 7.70, 0.629
"""Eight on-demand K80 over one; eight transient K80 against eight on-demand."""


@dataclass(frozen=True)
class Impact:
    """What losing workers costs: time over that of clusters that lost none.

    Attributes:
        workers: K80 in the cluster.
        lost: How many were lost.
        slowdown: Published, a fraction.
    """

    workers: int
    lost: int
    slowdown: float


IMPACTS = (Impact(2, 1, 0.62), Impact(4, 1, 0.155), Impact(4, 2, 0.49), Impact(8, 1, 0.05), Impact(8, 2, 0.07))


@dataclass(frozen=True)
class Spanning:
    """Four workers in two regions: time over that of four in one.

    Attributes:
        gpu: GPU type of the workers.
        away: How many stand in the other region.
        slowdown: Published, a fraction.
    """

    gpu: str
    away: int
    slowdown: float


SPANNING = (Spanning(_K, 2, 0.25), Spanning(_K, 1, 0.10), Spanning(_P, 2, 0.48), Spanning(_P, 1, 0.17))
"""Of each type the first tells how far its regions are apart; the other is predicted."""

PUBLISHED_ERRORS: Mapping[tuple[str, str], tuple[float, float]] = {
    ("K80", "svr-rbf"): (0.091, 0.125),
    ("K80", "svr-poly"): (0.100, 0.111),
    ("K80", "linear-flops"): (0.191, 0.251),
    ("P100", "svr-rbf"): (0.105, 0.150),
    ("P100", "svr-poly"): (0.138, 0.171),
    ("P100", "linear-flops"): (0.223, 0.290),
}
"""Mean errors of CM-DARE's models on its 20 networks: as published (repeats on both sides), and with whole networks
left out (computed from its data)."""

STARTUP_S: Mapping[tuple[str, bool], float] = {
    ("K80", True): 83.0,
    ("P100", True): 91.4,
    ("K80", False): 72.0,
    ("P100", False): 69.9,
}
"""Mean time of a machine's start, in seconds, by GPU type and whether it is transient; both regions."""

CHECKPOINT_ERRORS = (0.080, 0.054, 0.079, 0.196)
"""Mean error of checkpoint times: linear and SVR as published, the same with whole networks left out."""

NETWORKS: Mapping[str, tuple[float, float, float]] = {
    "res15": (0.631e9, 50, 693_818),
    "res32": (1.659e9, 104, 1.86e6),
    "shakesmall": (2.587e9, 216, 2_926_986),
    "shakebig": (22.865e9, 216, 26_204_362),
}
"""Operations, tensors and parameters of the networks of CM-DARE's scaling curves."""
