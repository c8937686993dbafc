"""Lays the tree of a board."""

import shutil
import uuid
from pathlib import Path

from polythrottle.domain.errors import StorageError, UnknownName
from polythrottle.testing.boards.tree import Layout, described, put_clocks, put_sensors, put_system
from polythrottle.testing.kernel.follow import follow
from polythrottle.testing.kernel.machine import Machine, Memory
from polythrottle.testing.kernel.modes import mode, switch


def plant(name: str, folder: Path | str, *, power_mode: int | None = None) -> Path:
    """Lay the tree of a board as it is after its first start.

    Args:
        name: One of `polythrottle.testing.BOARDS`.
        folder: Becomes ``/`` of the board; new or empty. What its kernel remembers lies in ``<folder>.kernel``.
        power_mode: Number of the nvpmodel mode it starts in; by default the one its file names.

    Returns:
        The folder.

    Raises:
        UnknownName: If there is no such board, or it has no such power mode.
        StorageError: If the folder cannot be laid, or holds something.
    """
    root = Path(folder)
    board = described(name)
    if power_mode is not None:
        chosen = power_mode
    else:
        chosen = int(board["nvpmodel"]["default"])
    if chosen not in (known := [mode["id"] for mode in board["nvpmodel"]["modes"]]):
        raise UnknownName("power mode", str(chosen), map(str, known))
    try:
        if root.exists() and any(root.iterdir()):
            raise StorageError(f"{root} is not empty; name a new folder for the tree")
        shutil.rmtree(Machine(root).beside, ignore_errors=True)  # of an earlier tree of that name
        _lay(root, name, Memory(board=name, refuses=board["kernel"].startswith("4.")), chosen)
    except (NotADirectoryError, PermissionError, FileExistsError) as err:
        raise StorageError(f"cannot lay a tree at {root}: {err.strerror}") from err
    return root


def reboot(root: Path | str, *, shift: int = 0) -> None:
    """Start a planted board again: everything written is forgotten but the power mode, and a new boot has its own id.

    Args:
        root: Of its tree.
        shift: Added to the numbers of its hwmon folders, which another boot may find in another order.

    Raises:
        StorageError: If the tree was not planted.
    """
    machine = Machine(Path(root))
    with machine.held():
        old = machine.memory
        chosen = int(mode(machine))
    if old.board is None:
        raise StorageError(f"{root} was not planted and cannot be started again")
    for each in machine.root.iterdir():
        shutil.rmtree(each)
    shutil.rmtree(machine.beside / "hidden", ignore_errors=True)
    fresh = Memory(board=old.board, refuses=old.refuses, load=old.load, shift=shift)
    fresh.boots = old.boots + 1
    fresh.writes = old.writes
    _lay(machine.root, old.board, fresh, chosen)


def _lay(root: Path, name: str, memory: Memory, chosen: int) -> None:
    board = described(name)
    layout = Layout()
    put_system(layout, board, str(uuid.uuid5(uuid.NAMESPACE_DNS, f"{name}/{memory.boots}")))
    put_clocks(layout, board)
    put_sensors(layout, board, memory.shift)
    root.mkdir(parents=True, exist_ok=True)
    layout.lay(root)
    machine = Machine(root)
    machine.beside.mkdir(exist_ok=True)
    machine.memory = memory
    switch(machine, str(chosen), starting=True)
    follow(machine)
    machine.remember()
