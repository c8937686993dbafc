"""Descriptions of boards: what differs between them; the clock tables come from the catalogue."""

from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

from polythrottle.backports import tomllib
from polythrottle.catalog import Board, load_board
from polythrottle.errors import UnknownName

_FOLDER = Path(__file__).parent
UNMETERED: tuple[str, ...] = ("jetson-nano-2gb",)
"""Names of the boards without a power sensor: they can be planted and steered, and not measured."""
BOARDS: tuple[str, ...] = tuple(sorted({path.stem for path in _FOLDER.glob("*.toml")} - {*UNMETERED}))
"""Names of every other board that can be planted."""

_PARTS = frozenset({"gpu", "cpu", "emc", "chips", "thermal", "overcurrent", "nvpmodel"})
Described = Mapping[str, Any]


@cache
def described(name: str) -> Described:
    """Return the description of a board, with the tables it takes over from another.

    Raises:
        UnknownName: If there is no such board.
    """
    if name not in (known := (*BOARDS, *UNMETERED)):
        raise UnknownName("board to plant", name, known)
    board = tomllib.loads((_FOLDER / f"{name}.toml").read_text(encoding="utf-8"))
    inherited = described(board["extends"]) if "extends" in board else {}
    return {**inherited, **board}


def catalogued(board: Described) -> Board:
    """Return what the catalogue has on a board."""
    return _catalogued(board["device"])


@cache
def _catalogued(device: str) -> Board:
    return load_board(device)


def assumptions() -> Mapping[tuple[str, str], list[str]]:
    """Return what no public record shows of the boards: for each part and what is assumed of it, which boards.

    A part names its records as ``source``; what is assumed beside them it says after a semicolon.
    """
    found: dict[tuple[str, str], list[str]] = {}
    for name in (*BOARDS, *UNMETERED):
        own = tomllib.loads((_FOLDER / f"{name}.toml").read_text(encoding="utf-8"))
        for part in sorted(_PARTS & set(own)):
            for what in _assumed(own[part]):
                found.setdefault((part, what), []).append(name)
    return dict(sorted(found.items()))


def _assumed(part: Any) -> list[str]:
    tables = part if isinstance(part, list) else [part]
    texts = [str(table["source"]) for table in tables if "source" in table]
    if not texts:
        return ["all of it"] if tables else []
    clauses = [clause.strip() for text in texts for clause in text.split(";")]
    return [clause for clause in clauses if "assumed" in clause or "made up" in clause]


def cores(board: Described) -> list[int]:
    """Return the numbers of all CPU cores of a board, ascending."""
    return sorted(cpu for cluster in board["cpu"]["clusters"] for cpu in cluster)


def gpu_levels_hz(board: Described) -> tuple[int, ...]:
    """Return the GPU clocks of a board, ascending: its own table where it has one, else the catalogue's."""
    own = board["gpu"].get("levels_mhz")
    return tuple(round(level * 1e6) for level in own) if own else _levels(board, "gpu_max_hz")


def memory_levels_hz(board: Described) -> tuple[int, ...]:
    """Return the memory clocks of a board, ascending."""
    return _levels(board, "mem_hz")


def cpu_levels_khz(board: Described) -> tuple[int, ...]:
    """Return the CPU clocks of a board in kHz, ascending."""
    return tuple(level // 1000 for level in _levels(board, "cpu_max_hz"))


def _levels(board: Described, knob: str) -> tuple[int, ...]:
    return tuple(int(level) for level in catalogued(board).knob(knob).levels)
