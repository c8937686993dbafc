"""The one format of a checkpoint: a line of JSON that says where training stands, then what only the trainer reads.

The line is read without the rest and without torch: the daemon at rest and a controller ask where a job stands. A
checksum covers both, and the newest whole checkpoint counts. A file is written whole or not at all, by whoever stores
it; what tells a whole one from a torn one all the same is the checksum.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, BinaryIO, TypeVar

from polythrottle.domain.errors import BadFile, StorageError
from polythrottle.storage.untrusted import MALFORMED

FORMAT = 1
KEPT = 2
"""How many stay: the newest, and the one before for when the newest turns out to be damaged."""
SUFFIX = ".checkpoint"
HEAD_BYTES = 4096
"""Room for the line; where the state is too large to be held twice, it always begins here."""
_BLOCK_BYTES = 1 << 20
Name = TypeVar("Name")
Whole = TypeVar("Whole")


def sealed(fields: Mapping[str, Any], state: bytes) -> bytes:
    """Return a checkpoint whose state is held in memory.

    Args:
        fields: Where training stands, as JSON holds it.
        state: What the trainer reads.
    """
    head = {"v": FORMAT, **fields, "bytes": len(state)}
    digest = _digest(head)
    digest.update(state)
    return _line(head, digest.hexdigest()) + b"\n" + state


def write_sealed(path: Path, fields: Mapping[str, Any], write: Callable[[BinaryIO], object]) -> dict[str, Any]:
    """Write a checkpoint whose state is too large to be held a second time; it is on disk when this returns.

    Args:
        path: Where to; a draft, for until this returns it is not whole.
        fields: Where training stands, as JSON holds it.
        write: Writes the state to a file, from where the file stands on.

    Returns:
        The line with size and checksum.

    Raises:
        OSError: If it cannot be written.
        StorageError: If the line is longer than its room.
    """
    with path.open("w+b") as file:
        file.seek(HEAD_BYTES)
        write(file)
        head = {"v": FORMAT, **fields, "bytes": file.seek(0, os.SEEK_END) - HEAD_BYTES}
        # The checksum stands before what it covers, so that a reader needs the beginning alone: hence a second pass.
        digest = _digest(head)
        file.seek(HEAD_BYTES)
        while block := file.read(_BLOCK_BYTES):
            digest.update(block)
        line = _line(head, digest.hexdigest())
        if len(line) >= HEAD_BYTES:
            raise StorageError(f"{path}: where training stands takes {len(line)} bytes, more than {HEAD_BYTES}")
        file.seek(0)
        file.write(line.ljust(HEAD_BYTES - 1) + b"\n")
        file.flush()
        os.fsync(file.fileno())
    return {**head, "sha256": digest.hexdigest()}


def read_head(data: bytes) -> dict[str, Any]:
    """Return the first line of a checkpoint, given its beginning; whether the state is whole is not asked.

    Raises:
        BadFile: If it is not whole, or of another format.
    """
    try:
        head = json.loads(data[:HEAD_BYTES].partition(b"\n")[0])
        if head["v"] != FORMAT:
            raise BadFile("it is of another version")
        return {**head}
    except MALFORMED as err:
        raise BadFile("its first line is torn or none of ours") from err


def fields_of(head: Mapping[str, Any]) -> dict[str, Any]:
    """Return where training stands, from a checkpoint's first line."""
    return {name: value for name, value in head.items() if name not in ("v", "bytes", "sha256")}


def check_state(head: Mapping[str, Any], state: bytes | memoryview) -> None:
    """Check a state against its checkpoint's first line.

    Raises:
        BadFile: If either is damaged.
    """
    digest = _digest({name: value for name, value in head.items() if name != "sha256"})
    digest.update(state)
    if head.get("sha256") != digest.hexdigest():
        raise BadFile("it is torn: its checksum differs")


def newest_whole(
    names: Iterable[Name], read: Callable[[Name], Whole]
) -> tuple[Whole | None, list[tuple[Name, BadFile]]]:
    """Return the newest checkpoint that is whole, None if there is none, and those before it with what is wrong.

    Args:
        names: Of the checkpoints, newest first.
        read: Returns one, or raises BadFile.
    """
    damaged: list[tuple[Name, BadFile]] = []
    for name in names:
        try:
            return read(name), damaged
        except BadFile as err:
            damaged.append((name, err))
    return None, damaged


def _digest(head: Mapping[str, Any]) -> hashlib._Hash:
    return hashlib.sha256(json.dumps(head).encode() + b"\n")


def _line(head: Mapping[str, Any], checksum: str) -> bytes:
    return json.dumps({**head, "sha256": checksum}, allow_nan=False).encode()
