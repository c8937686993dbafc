"""Which samples each step has seen: a file that is only ever added to.

A step that was lost with the power or a killed process is done again and has two lines; the later one counts, and only
up to the step of the checkpoint one goes on from.
"""

import json
import os
import zlib
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from polythrottle.actuation.record import sync_folder
from polythrottle.errors import BadFile, StorageError

NAME = "ledger.jsonl"


@dataclass(frozen=True)
class Entry:
    """One step.

    Args:
        step: Its number, from 1.
        epoch: From 0.
        listing: Digest of the listing that the rows are of.
        seen: Rows that were trained on.
        left_out: Rows whose file could not be read.
    """

    step: int
    epoch: int
    listing: str
    seen: tuple[int, ...]
    left_out: tuple[int, ...] = ()


def append(folder: Path, entry: Entry) -> None:
    """Add a step, on disk before this returns; a torn line before it is closed.

    Raises:
        StorageError: If it cannot be written; what was there stays.
    """
    path, line = folder / NAME, _sealed(asdict(entry))
    try:
        handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
        try:
            size = os.fstat(handle).st_size
            torn = size > 0 and os.pread(handle, 1, size - 1) != b"\n"
            _written(handle, b"\n" + line if torn else line, size)
        finally:
            os.close(handle)
        if not size:
            sync_folder(folder)
    except OSError as err:
        raise StorageError(f"{path} cannot be written: {err.strerror}; what it held is kept") from err


def counted(folder: Path, step: int) -> Mapping[int, Sequence[Entry]]:
    """Return the steps that count, by epoch.

    Args:
        folder: Of the job.
        step: The last step of the checkpoint.

    Raises:
        BadFile: If the ledger cannot be read, or lacks one of those steps.
    """
    path = folder / NAME
    try:
        lines = path.read_bytes().split(b"\n") if path.exists() else []
    except OSError as err:
        raise BadFile(f"{path} cannot be read: {err.strerror}") from err
    last = {entry.step: entry for entry in map(_parsed, lines) if entry is not None and entry.step <= step}
    lacking = sorted(set(range(1, step + 1)) - set(last))
    if lacking:
        raise BadFile(f"{path} lacks step {lacking[0]}, though a checkpoint counts it")
    epochs: dict[int, list[Entry]] = defaultdict(list)
    for number in sorted(last):
        epochs[last[number].epoch].append(last[number])
    return epochs


def _written(handle: int, data: bytes, size: int) -> None:
    try:
        while data:
            data = data[os.write(handle, data) :]
        os.fsync(handle)
    except OSError:
        os.ftruncate(handle, size)
        raise


def _sealed(line: Mapping[str, Any]) -> bytes:
    return json.dumps({**line, "crc": zlib.crc32(json.dumps(line).encode())}).encode() + b"\n"


def _parsed(text: bytes) -> Entry | None:
    """Return the entry of a line; None if it is torn."""
    try:
        line = json.loads(text)
        crc = line.pop("crc")
        if crc != zlib.crc32(json.dumps(line).encode()):
            return None
        entry = Entry(**{**line, "seen": tuple(line["seen"]), "left_out": tuple(line["left_out"])})
        return entry if type(entry.step) is int and type(entry.epoch) is int else None
    except (ValueError, AttributeError, KeyError, TypeError, RecursionError):
        return None
