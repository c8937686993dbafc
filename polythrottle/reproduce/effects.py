"""What single knobs save, and the front of energy against latency."""

from dataclasses import dataclass

import numpy as np

from polythrottle.backends.simulated.power import core_w
from polythrottle.catalog import load_board
from polythrottle.reproduce.landscape import SEARCHED, Landscape, landscape
from polythrottle.reproduce.published import Effect, Front, model_name

_TIE = 1e-3


@dataclass(frozen=True)
class Found:
    """Where a knob saves most, in Hz, and what fraction."""

    level: float
    saving: float


def effect(published: Effect) -> Found:
    """Return what a knob alone saves in simulation, as the paper defines it for that knob; at batch 1."""
    if published.knob == "cpu_max_hz":
        return _preprocessing(published.board)
    model = model_name(published.network, "fp16")
    if published.knob == "gpu_min_hz":
        return _along(landscape(published.board, model, (published.knob,)), published.knob)
    return _along(landscape(published.board, model, SEARCHED), published.knob)


def _along(scape: Landscape, knob: str) -> Found:
    """Return the saving between the best point at batch 1 and the same point with one knob at its default."""
    row = scape.best(scape.batch == 1)
    point = scape.space[row]
    default = scape.space.index(point.moved({knob: scape.space.default[knob]}))
    return Found(float(point[knob]), 1.0 - float(scape.energy_j[row] / scape.energy_j[default]))


def _preprocessing(board_name: str) -> Found:
    """Return the CPU clock at which a core spends least on a cycle of preprocessing, the highest of equals.

    A core's energy per cycle goes with its voltage squared, which falls no further below the knee of its curve.
    """
    board = load_board(board_name)
    assert board.simulation is not None
    levels = np.array(board.knob("cpu_max_hz").levels, dtype=float)
    cycle_j = core_w(board.simulation.cpu, levels) / levels
    best = int(np.flatnonzero(cycle_j <= cycle_j.min() * (1.0 + _TIE))[-1])
    return Found(float(levels[best]), 1.0 - float(cycle_j[best] / cycle_j[-1]))


@dataclass(frozen=True)
class FrontPoint:
    """One point of figure 2, published and simulated.

    Args:
        batch: Batch size.
        published_latency: Over that of the fastest point.
        published_energy: Per query, over that of the fastest point.
        latency: The same in simulation.
        energy: The same in simulation.
    """

    batch: int
    published_latency: float
    published_energy: float
    latency: float
    energy: float


def front(published: Front) -> list[FrontPoint]:
    """Return the points of a front: the least energy within each published multiple of the batch's shortest latency."""
    scape = landscape(published.board, model_name(published.network, "fp16"), SEARCHED)
    start = scape.default_at(1)
    first: dict[int, float] = {}
    found = []
    for batch, latency, energy in published.points:
        slack = latency / first.setdefault(batch, latency)
        mine = scape.batch == batch
        row = scape.best(mine & (scape.latency_s <= slack * scape.latency_s[mine].min() * (1.0 + 1e-9)))
        found.append(
            FrontPoint(
                batch,
                latency,
                energy / published.points[0][2],
                float(scape.latency_s[row] / scape.latency_s.min()),
                float(scape.energy_j[row] / scape.energy_j[start]),
            )
        )
    return found
