"""What the papers report: PolyThrottle (arXiv 2310.19991), and transient training (arXiv 1903.00045 and 2004.03072)."""

from collections.abc import Mapping
from dataclasses import dataclass

# What the PolyThrottle paper reports (arXiv 2310.19991), as read off its text and, to about 0.1 unit, its figures.

SOURCE = "arXiv 2310.19991"
ORIN = "jetson-agx-orin"
TX2 = "jetson-tx2"
B0 = "efficientnet-b0"
B4 = "efficientnet-b4"
B7 = "efficientnet-b7"
BERT = "bert-base"


def model_name(network: str, precision: str) -> str:
    """Return the name in ``profiles/workloads/`` of a network in a precision."""
    if network == BERT or precision != "fp16":
        return f"{network}-{precision}"
    return network


@dataclass(frozen=True)
class Cell:
    """One bar of figure 4: a search of GPU maximum and memory clock, with or without batch size.

    Args:
        board: Name in ``devices/``.
        network: One of the four.
        precision: ``fp16`` or ``fp32``.
        setting: ``A``: latency within 20 % of the best, which forces batch 1. ``B``: no limit, batches allowed.
        trials: Of the paper's search to within 5 % of the best feasible point.
        random: The same of random search, computed by the paper as points ÷ points within 5 %.
        saving: Fraction of the energy at default clocks.
    """

    board: str
    network: str
    precision: str
    setting: str
    trials: float
    random: float
    saving: float

    @property
    def model(self) -> str:
        """The name in ``profiles/workloads/``."""
        return model_name(self.network, self.precision)


_FIGURE_4 = (
    (B0, "fp16", (8.7, 17.3, 14.1), (7.8, 20.4, 10.3), (11.6, 32.5, 22.0), (12.3, 47.5, 20.9)),
    (B0, "fp32", (8.6, 17.3, 13.8), (7.6, 20.4, 10.6), (11.7, 32.5, 20.8), (12.3, 51.0, 18.2)),
    (B4, "fp16", (8.1, 13.0, 16.1), (8.2, 23.8, 14.8), (11.8, 37.0, 17.8), (12.8, 47.5, 19.0)),
    (B4, "fp32", (8.0, 13.0, 15.9), (8.1, 23.8, 14.3), (11.9, 43.5, 17.6), (12.9, 47.5, 18.9)),
    (B7, "fp16", (8.1, 13.0, 13.2), (8.1, 28.6, 17.5), (11.2, 32.5, 10.2), (12.4, 79.5, 20.4)),
    (B7, "fp32", (8.3, 13.0, 13.6), (8.2, 23.8, 17.2), (11.7, 32.5, 10.4), (12.1, 55.0, 19.8)),
    (BERT, "fp16", (9.7, 10.4, 13.3), (9.9, 23.8, 22.2), (12.9, 52.0, 21.8), (13.2, 119.0, 36.3)),
    (BERT, "fp32", (10.2, 10.4, 6.3), (9.8, 15.9, 23.8), (12.2, 52.0, 14.0), (13.9, 143.0, 36.7)),
)
_COLUMNS = ((ORIN, "A"), (TX2, "A"), (ORIN, "B"), (TX2, "B"))

CELLS: tuple[Cell, ...] = tuple(
    Cell(board, network, precision, setting, bars[0], bars[1], bars[2] / 100)
    for i, (board, setting) in enumerate(_COLUMNS)
    for network, precision, *columns in _FIGURE_4
    for bars in (columns[i],)
)
"""Figure 4: eight networks and precisions, two boards, two settings."""


@dataclass(frozen=True)
class Front:
    """The energy–latency points of one board and network in half precision, figure 2.

    Args:
        board: Name in ``devices/``.
        network: One of the four.
        points: Batch size, latency limit over the fastest point of all, and energy per query in joules. The first of
            each batch size is its fastest point. Only ratios mean something: the paper's figures disagree in units.
    """

    board: str
    network: str
    points: tuple[tuple[int, float, float], ...]


FRONTS: tuple[Front, ...] = (
    Front(
        ORIN,
        B7,
        (
            *((1, 1.0, 3.173), (1, 1.05, 2.742), (1, 1.1, 2.622), (1, 1.2, 2.613), (1, 1.5, 2.613)),
            *((2, 1.7, 2.324), (2, 1.8, 2.246), (2, 2.0, 2.200), (2, 2.2, 2.170)),
            *((4, 2.7, 2.068), (4, 2.8, 1.991), (4, 3.2, 1.972), (4, 3.8, 1.955)),
            *((8, 4.6, 2.018), (8, 4.8, 1.958), (8, 5.2, 1.895), (8, 6.0, 1.874), (8, 6.4, 1.845)),
        ),
    ),
    Front(
        TX2,
        B4,
        (
            *((1, 1.0, 0.857), (1, 1.05, 0.799), (1, 1.1, 0.767), (1, 1.2, 0.721), (1, 1.5, 0.675)),
            *((2, 1.7, 0.758), (2, 1.8, 0.680), (2, 1.9, 0.647), (2, 2.1, 0.618), (2, 2.4, 0.597)),
            *((4, 3.2, 0.690), (4, 3.4, 0.654), (4, 3.6, 0.613), (4, 3.8, 0.589), (4, 4.2, 0.570)),
            *((8, 6.0, 0.749), (8, 6.4, 0.677), (8, 6.8, 0.636), (8, 7.2, 0.614), (8, 7.6, 0.603)),
            (8, 8.0, 0.580),
        ),
    ),
)


@dataclass(frozen=True)
class Effect:
    """What one knob alone saves.

    Args:
        board: Name in ``devices/``.
        network: One of the four, in half precision; empty for preprocessing, which is that of every network.
        knob: Its name.
        level: Where it saves most, in Hz.
        saving: Fraction.
    """

    board: str
    network: str
    knob: str
    level: float
    saving: float


EFFECTS: tuple[Effect, ...] = (
    Effect(ORIN, B0, "gpu_min_hz", 1236e6, 0.476),
    Effect(ORIN, B4, "gpu_min_hz", 1033e6, 0.291),
    Effect(ORIN, B7, "gpu_min_hz", 1134e6, 0.088),
    Effect(ORIN, BERT, "gpu_min_hz", 217e6, 0.011),
    Effect(TX2, B0, "mem_hz", 1331e6, 0.149),
    Effect(TX2, B4, "mem_hz", 1331e6, 0.143),
    Effect(TX2, B7, "mem_hz", 1331e6, 0.120),
    Effect(TX2, BERT, "mem_hz", 1062e6, 0.254),
    Effect(ORIN, "", "cpu_max_hz", 900e6, 0.286),
    Effect(TX2, "", "cpu_max_hz", 1000e6, 0.294),
)
"""GPU minimum: all else at its default. Memory: at the best GPU clock. CPU: of the energy of preprocessing."""

# What the papers on transient training report: arXiv 1903.00045 (ICAC 2019) and arXiv 2004.03072 (ICDCS 2020).
#
# Figures are computed from the authors' published data (github.com/cake-lab/transient-deep-learning 87c6717,
# github.com/cake-lab/CM-DARE 263b7f1; both Apache-2.0), not copied from the tables here.

ICAC = "arXiv 1903.00045"
CM_DARE = "arXiv 2004.03072"
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


_K = "K80"
_P = "P100"
_V = "V100"


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

SPEED_UP = 7.70
SAVING = 0.629
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
