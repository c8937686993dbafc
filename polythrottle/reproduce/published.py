"""What the PolyThrottle paper reports (arXiv 2310.19991), as read off its text and, to about 0.1 unit, its figures."""

from dataclasses import dataclass

SOURCE = "arXiv 2310.19991"
ORIN, TX2 = "jetson-agx-orin", "jetson-tx2"
B0, B4, B7, BERT = "efficientnet-b0", "efficientnet-b4", "efficientnet-b7", "bert-base"


def model_name(network: str, precision: str) -> str:
    """Return the name in ``profiles/workloads/`` of a network in a precision."""
    return f"{network}-{precision}" if network == BERT or precision != "fp16" else network


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
