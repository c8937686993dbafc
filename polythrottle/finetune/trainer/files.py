"""Files that are whole or not there, whenever the power goes."""

import json
import math
from pathlib import Path
from typing import Any

from polythrottle.actuation.record import sync_folder
from polythrottle.catalog.profiles import replace_file
from polythrottle.errors import BadFile, StorageError


def put(path: Path, data: bytes) -> None:
    """Write a file whole or not at all, so that after a power cut it is the old one or the new one.

    Raises:
        StorageError: If it cannot be written; the old one stays.
    """
    replace_file(path, data)
    try:
        sync_folder(path.parent)
    except OSError as err:
        raise StorageError(f"{path.parent} cannot be flushed: {err.strerror}") from err


def put_json(path: Path, document: Any) -> None:
    """Write a JSON document as `put` does.

    Raises:
        StorageError: If it cannot be written.
    """
    put(path, json.dumps(document, allow_nan=False).encode() + b"\n")


def read_json(path: Path) -> Any:
    """Return a JSON document; None if there is no such file.

    Raises:
        BadFile: If it cannot be read, is none, or holds a number that is not finite.
    """
    try:
        return json.loads(path.read_bytes(), parse_float=_finite, parse_constant=_finite)
    except FileNotFoundError:
        return None
    except OSError as err:
        raise BadFile(f"{path} cannot be read: {err.strerror}") from err
    except (ValueError, RecursionError) as err:
        raise BadFile(f"{path} is damaged: {str(err)[:80]}") from err


def _finite(text: str) -> float:
    """Return a number.

    Raises:
        ValueError: If it is not finite: Python reads such numbers, but JSON has none.
    """
    if not math.isfinite(value := float(text)):
        raise ValueError(f"{text[:20]} is no number")
    return value


def swap(served: Path, data: bytes) -> Path | None:
    """Replace the served model, keeping the one before beside it; at any instant the served file is whole.

    Returns:
        The file kept; None if nothing was served before.

    Raises:
        StorageError: If it cannot be written; what was served still is.
    """
    kept = previous(served) if served.exists() else None
    if kept is not None:
        put(kept, _read(served))
    put(served, data)
    return kept


def roll_back(served: Path) -> None:
    """Serve the model before the last `swap` again.

    Raises:
        BadFile: If none was kept.
        StorageError: If it cannot be written; what was served still is.
    """
    kept = previous(served)
    if not kept.is_file():
        raise BadFile(f"there is nothing to go back to: {kept} does not exist")
    put(served, _read(kept))


def previous(served: Path) -> Path:
    """Return where the model before the served one is kept."""
    return served.with_name(f"{served.stem}.previous{served.suffix}")


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as err:
        raise StorageError(f"{path} cannot be read: {err.strerror}; nothing was changed") from err
