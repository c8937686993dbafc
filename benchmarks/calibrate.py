"""Fit the simulator to the published figures: python benchmarks/calibrate.py [--write], a few minutes.

Everything fitted to is in ``polythrottle/lab/reproduce/published.py``: figures 2 and 4 and the per-knob savings of
arXiv
2310.19991. The coefficients start from the values below, plausible for the hardware, and are drawn back to them by the
spreads beside them, since there are fewer figures than would pin down every one. Weighted least squares do the rest;
minima over points are softened, so that there is a slope to follow. Nothing is random: the same coefficients come out.
Without ``--write`` the lines for the TOML files are printed; with it they are written.
"""

import re
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cache, lru_cache
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import least_squares

from polythrottle.backends.simulated.engine import Engine
from polythrottle.backends.simulated.physics import static_w
from polythrottle.catalog import load_board, load_model
from polythrottle.catalog.boards import Board
from polythrottle.catalog.models import Model
from polythrottle.lab.reproduce.polythrottle_paper import SEARCHED
from polythrottle.lab.reproduce.published import B0, B4, B7, BERT, CELLS, EFFECTS, FRONTS, ORIN, TX2, model_name

Array = NDArray[np.float64]
ROOT = Path(__file__).resolve().parent.parent
BOARDS, NETWORKS, PRECISIONS = (ORIN, TX2), (B0, B4, B7, BERT), ("fp16", "fp32")
BATCHES = (1, 2, 4, 8, 16)
ROUNDS, STEPS = 12, 6

SOFT = 0.003
"""Points whose energy lies within about this fraction of the least share in a softened minimum."""
SAVING, ALONE, COUNT, FRONT, BATCH, DRAW = 0.012, 0.014, 0.9, 0.04, 0.06, 1.4
"""What counts as a difference of one: of a saving, of a knob's saving, of the log of a count of points near the best,
of the log of an energy and of a latency ratio on a front, and of a coefficient's log from its start, in spreads."""


@dataclass(frozen=True)
class Start:
    """Where a coefficient starts: its value, the spread of its log, and the least and most it may become."""

    value: float
    spread: float
    least: float
    most: float


def _by_board() -> Iterator[tuple[tuple[str, str], Start]]:
    """Yield the coefficients of the boards: on Orin, on TX2, spread, and perhaps limits."""
    table: dict[str, tuple[float, ...]] = {
        "gpu.power_w": (22.0, 8.5, 0.3),
        "gpu.floor": (0.4, 0.4, 0.4, 0.05, 0.85),
        "gpu.idle": (0.022, 0.022, 0.7),
        "gpu.voltage.knee": (0.65, 0.65, 0.15, 0.4, 0.9),
        "gpu.voltage.swing": (1.3, 1.3, 0.06, 1.05, 1.6),
        "gpu.launch_cycles": (3000.0, 8000.0, 0.5),
        "memory.achieved": (0.7, 0.6, 0.15, 0.3, 0.95),
        "memory.power_w": (4.5, 2.2, 0.25),
        "memory.exponent": (2.2, 2.2, 0.3, 1.0, 3.5),
        "memory.energy_j_per_byte": (1.5e-11, 4e-11, 0.6),
        "memory.spill": (0.003, 0.015, 0.8),
        "thermal.static_w": (9.5, 1.8, 0.12),
        "governor.rise_s": (0.15, 0.01, 0.8),
        "governor.fall_s": (0.005, 0.003, 1.2),
    }
    for path, (orin, tx2, spread, *limits) in table.items():
        for board, value in ((ORIN, orin), (TX2, tx2)):
            yield (board, path), Start(value, spread, *(limits or (value / 20, value * 20)))


def _by_network() -> Iterator[tuple[tuple[str, str], Start]]:
    """Yield the coefficients of the networks; a ratio is that of single to half precision."""
    table: dict[str, tuple[float, ...]] = {
        "parallelism": (450.0, 600.0, 2200.0, 4500.0, 0.25),
        "handoff_cycles": (6e5, 1e6, 3e6, 4e4, 0.6),
        "traffic_bytes": (2.2e7, 2e8, 2.4e9, 1.2e8, 0.4),
        "traffic_bytes ratio": (2.0, 2.0, 2.0, 2.0, 0.15, 1.4, 2.8),
        "efficiency.vector": (0.5, 0.6, 0.55, 0.75, 0.25, 0.05, 0.9),
        "efficiency.tensor": (0.17, 0.12, 0.06, 0.3, 0.35, 0.02, 0.9),
        "efficiency.vector ratio": (1.0, 1.0, 1.0, 1.0, 0.2, 0.6, 1.6),
        "efficiency.tensor ratio": (1.0, 1.0, 1.0, 1.0, 0.2, 0.6, 1.6),
    }
    for path, row in table.items():
        values, (spread, *limits) = row[: len(NETWORKS)], row[len(NETWORKS) :]
        for network, value in zip(NETWORKS, values, strict=True):
            yield (network, path), Start(value, spread, *(limits or (value / 20, value * 20)))


STARTS: dict[tuple[str, str], Start] = {**dict(_by_board()), **dict(_by_network())}


def moved(record: Any, path: str, value: float) -> Any:
    """Return a nested dataclass with the field at a dotted path replaced."""
    head, _, rest = path.partition(".")
    return replace(record, **{head: moved(getattr(record, head), rest, value) if rest else value})


def cpu_voltage(board: Board) -> dict[str, float]:
    """Return the voltage curve of a board's CPU: energy per cycle goes with its square, and is flat below the knee."""
    one = next(one for one in EFFECTS if (one.board, one.knob) == (board.name, "cpu_max_hz"))
    levels = board.knob("cpu_max_hz").levels
    knee = min(levels, key=lambda level: abs(level - one.level)) / levels[-1]
    return {"simulation.cpu.voltage.knee": knee, "simulation.cpu.voltage.swing": (1.0 - one.saving) ** -0.5}


@cache
def _board(name: str) -> Board:
    """Return a board; what is solved for rather than fitted is put in."""
    board = load_board(name)
    for path, value in cpu_voltage(board).items():
        board = moved(board, path, value)
    return board


@cache
def _model(name: str) -> Model:
    return load_model(name)


@cache
def _grid(board: str) -> tuple[Mapping[str, Array], Array, tuple[int, int, int]]:
    """Return the levels and batch sizes of a board's searched space, and its shape (batches, GPU, memory)."""
    gpu, memory = (_board(board).knob(name).levels for name in SEARCHED)
    points = [{"gpu_max_hz": one, "mem_hz": other} for _ in BATCHES for one in gpu for other in memory]
    sizes = np.repeat(np.array(BATCHES, dtype=float), len(gpu) * len(memory))
    return Engine(_board(board)).columns(points), sizes, (len(BATCHES), len(gpu), len(memory))


@cache
def _minima(board: str) -> Mapping[str, Array]:
    engine = Engine(_board(board))
    return engine.columns([{"gpu_min_hz": level} for level in _board(board).knob("gpu_min_hz").levels])


def soft(logs: Array, late: Array | None = None) -> Array:
    """Return weights, summing to one, that pick the least of some logs.

    Args:
        logs: Of energy.
        late: Log of latency over the limit; what is above 0 is drawn out of the choice.
    """
    costs = logs if late is None else logs + 0.02 * (np.maximum(0.0, late) / 0.01) ** 2
    weights = np.exp(-(costs - costs.min()) / SOFT)
    return np.asarray(weights / weights.sum())


@dataclass(frozen=True)
class Block:
    """One board, network and precision, with the coefficients that matter to it: what is computed at once."""

    board: str
    network: str
    precision: str
    of_board: tuple[tuple[str, float], ...]
    of_network: tuple[tuple[str, float], ...]

    def logs(self, levels: Mapping[str, Array], sizes: Array) -> tuple[Array, Array]:
        """Return the logs of energy per item and of latency."""
        board, model = _board(self.board), _model(model_name(self.network, self.precision))
        for path, value in self.of_board:
            board = moved(board, f"simulation.{path}", value)
        for path, value in self.of_network:
            model = moved(model, path, value)
        engine = Engine(board)
        cycle, heat_c = engine.settled(model, sizes, levels)
        energy_j = (cycle.dynamic_j + static_w(engine.simulation.thermal, heat_c) * cycle.interval_s) / sizes
        return np.log(energy_j), np.log(cycle.latency_s)


def _near(logs: Array, best: float, late: Array) -> float:
    """Return the softened count of points within 5 % of the best."""
    inside = 1.0 / (1.0 + np.exp((logs - best - np.log(1.05)) / 0.006))
    return float((inside * np.exp(-0.5 * (np.maximum(0.0, late) / 0.01) ** 2)).sum())


@lru_cache(maxsize=256)
def residuals(block: Block) -> tuple[float, ...]:
    """Return how far a block is from what is published, each difference in units of what counts as one."""
    levels, sizes, shape = _grid(block.board)
    energy, latency = block.logs(levels, sizes)
    grid, late = energy.reshape(shape), latency - latency.min() - np.log(1.2)
    defaults = np.repeat(grid[:, -1, -1], shape[1] * shape[2])
    single = sizes == 1
    found = {}
    for setting, some, over in (("A", single, late[single]), ("B", sizes > 0, np.full_like(late, -1.0))):
        weights = soft(energy[some], over)
        saving = 1.0 - np.exp(weights @ (energy[some] - defaults[some]))
        found[setting] = (saving, _near(energy[some], float(weights @ energy[some]), over), int(some.sum()))
    rows = []
    for cell in CELLS:
        if (cell.board, cell.network, cell.precision) == (block.board, block.network, block.precision):
            saving, near, points = found[cell.setting]
            rows += [(saving - cell.saving) / SAVING, np.log(near / (points / cell.random)) / COUNT]
    if block.precision == "fp16":
        rows += [*_alone(block, grid[0]), *_front(block, grid, latency.reshape(shape))]
    return tuple(map(float, rows))


def _alone(block: Block, energy: Array) -> Iterator[float]:
    """Yield what single knobs save less what is published; ``energy`` has shape (GPU, memory), at batch 1."""
    for one in EFFECTS:
        if (one.board, one.network) != (block.board, block.network):
            continue
        if one.knob == "gpu_min_hz":
            levels = _minima(block.board)
            along, _ = block.logs(levels, np.ones(len(levels["gpu_min_hz"])))
            gain = soft(along) @ along - along[0]
        else:
            gain = sum(
                weight * float(soft(row) @ row - row[-1])
                for weight, row in zip(soft(energy.ravel()).reshape(energy.shape).sum(axis=1), energy, strict=True)
            )
        yield (1.0 - np.exp(gain) - one.saving) / ALONE


def _front(block: Block, energy: Array, latency: Array) -> Iterator[float]:
    """Yield the log ratios of energies and shortest latencies to those of a front; shape (batches, GPU, memory)."""
    for one in FRONTS:
        if (one.board, one.network) != (block.board, block.network):
            continue
        first: dict[int, float] = {}
        for batch, limit, energy_j in one.points:
            i, start = BATCHES.index(batch), batch not in first
            logs, late = energy[i].ravel(), latency[i].ravel() - latency[i].min()
            slack = np.log(limit / first.setdefault(batch, limit))
            ratio = soft(logs, late - slack) @ logs - energy[0, -1, -1]
            yield (ratio - np.log(energy_j / one.points[0][2])) / FRONT
            if start:
                yield (latency[i].min() - latency.min() - np.log(limit)) / BATCH


def _blocks(values: Mapping[tuple[str, str], float]) -> Iterator[Block]:
    for board in BOARDS:
        of_board = tuple((path, value) for (name, path), value in values.items() if name == board)
        unit = "vector" if board == ORIN else "tensor"
        for network in NETWORKS:
            for precision in PRECISIONS:
                own = of_network(values, network, precision)
                yield Block(board, network, precision, of_board, tuple((p, v) for p, v in own if unit not in p))


def of_network(values: Mapping[tuple[str, str], float], network: str, precision: str) -> list[tuple[str, float]]:
    """Return the coefficients of a network in a precision, by dotted path."""
    own = {path: value for (name, path), value in values.items() if name == network}
    factor = {path: own.get(f"{path} ratio", 1.0) if precision == "fp32" else 1.0 for path in own}
    shares = {path: min(0.95, value * factor[path]) for path, value in own.items() if path.startswith("efficiency")}
    return [(path, shares.get(path, value * factor[path])) for path, value in own.items() if "ratio" not in path]


def fit() -> dict[tuple[str, str], float]:
    """Return the coefficients that least squares end at."""
    keys = list(STARTS)
    start = np.log([STARTS[key].value for key in keys])
    spread = np.array([STARTS[key].spread for key in keys])
    limits = np.log([[STARTS[key].least for key in keys], [STARTS[key].most for key in keys]])

    def differences(logs: Array) -> Array:
        values = dict(zip(keys, np.exp(logs).tolist(), strict=True))
        rows = [row for block in _blocks(values) for row in residuals(block)]
        return np.array([*rows, *(logs - start) / spread / DRAW])

    logs = start
    for number in range(ROUNDS):  # each starts with a fresh trust region
        done = least_squares(differences, logs, bounds=limits, diff_step=1e-4, x_scale=spread, max_nfev=STEPS)
        logs = done.x
        print(f"round {number + 1} of {ROUNDS}: sum of squares {2 * done.cost:.1f}", file=sys.stderr, flush=True)
    return dict(zip(keys, np.exp(logs).tolist(), strict=True))


def files(values: Mapping[tuple[str, str], float]) -> dict[Path, dict[str, float]]:
    """Return the figures of each TOML file, by dotted key."""
    found = {
        ROOT / "devices" / f"{board}.toml": {
            **{f"simulation.{path}": value for (name, path), value in values.items() if name == board},
            **cpu_voltage(load_board(board)),
        }
        for board in BOARDS
    }
    for network in NETWORKS:
        for precision in PRECISIONS:
            path = ROOT / "profiles" / "workloads" / f"{model_name(network, precision)}.toml"
            found[path] = dict(of_network(values, network, precision))
    return found


def written(text: str, figures: Mapping[str, float]) -> str:
    """Return a TOML file's text with some figures replaced, each at four digits.

    Raises:
        KeyError: If the file has no such key.
    """
    left, table, lines = dict(figures), "", []
    for line in text.splitlines():
        table = match[1] if (match := re.fullmatch(r"\[([^\[\]]+)\]", line)) else table
        key = line.partition(" = ")[0]
        dotted = f"{table}.{key}" if table else key
        lines.append(f"{key} = {left.pop(dotted):#.4g}".removesuffix(".") if dotted in left else line)
    if left:
        raise KeyError(*left)
    return "\n".join(lines) + "\n"


def main() -> None:
    """Fit, and print or write the figures; `polythrottle reproduce polythrottle` then shows what they amount to."""
    for path, figures in files(fit()).items():
        if "--write" in sys.argv[1:]:
            path.write_text(written(path.read_text(), figures))
            continue
        print(f"# {path.relative_to(ROOT)}")
        for key, value in figures.items():
            print(f"{key} = {value:#.4g}".removesuffix("."))


if __name__ == "__main__":
    main()
