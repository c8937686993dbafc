"""Plain files that somebody else has named: opened without waiting for anybody, and read up to a bound."""

import os
import re
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from polythrottle.backports import tomllib
from polythrottle.errors import BadFile

_BLOCK = 1 << 20
_MOST_DOTS = 64
_TOKEN = re.compile(rb"\"(?:[^\"\\\n]|\\.)*\"?|'[^'\n]*'?|[\w-]+|\.|[ \t]+|[^.]", re.DOTALL)
_IN_KEYS = b"\"'-_ \t"


def blocks(path: Path, most_bytes: int) -> Iterator[bytes]:
    """Yield what is in a plain file, in pieces.

    A pipe, a device and the kernel's own files, which can make whoever reads wait for ever, are refused.

    Args:
        path: The file, or a link to it.
        most_bytes: A larger one is refused.

    Raises:
        BadFile: If it cannot be read, is no plain file, is empty or too large.
    """
    try:
        # A link is followed once: what is put into its place afterwards is not.
        handle = os.open(os.path.realpath(path), os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC)
    except (OSError, ValueError) as error:
        raise _unreadable(path, error) from error
    try:
        seen = os.fstat(handle)
        if not stat.S_ISREG(seen.st_mode):
            kind = "a folder" if stat.S_ISDIR(seen.st_mode) else "no plain file"
            raise BadFile(f"{path} cannot be read: it is {kind}")
        if seen.st_size == 0:  # as those of /proc say, however much they hold
            raise BadFile(f"{path} cannot be read: it is empty")
        total = 0
        while block := os.read(handle, min(_BLOCK, most_bytes + 1 - total)):
            total += len(block)
            if max(total, seen.st_size) > most_bytes:
                raise BadFile(f"{path} cannot be read: it is larger than {_amount(most_bytes)}")
            yield block
    except OSError as error:
        raise _unreadable(path, error) from error
    finally:
        os.close(handle)


def contents(path: Path, most_bytes: int) -> bytes:
    """Return what is in a plain file.

    Raises:
        BadFile: As `blocks`.
    """
    return b"".join(blocks(path, most_bytes))


def toml(data: bytes) -> dict[str, Any]:
    """Return the document in a file of TOML that somebody else has written.

    Raises:
        ValueError: If it is no TOML, no text in UTF-8, or has a key of absurdly many parts.
        RecursionError: If it is nested too deep.
    """
    # Python's reader keeps every beginning of a dotted key: a line of 256 kB would take more memory than there is.
    if data.count(b".") > _MOST_DOTS and _dots(data) > _MOST_DOTS:
        raise ValueError(f"it has a key of more than {_MOST_DOTS} parts")
    return tomllib.loads(data.decode())


def toml_of(path: Path, most_bytes: int) -> dict[str, Any]:
    """Return the document in a plain file of TOML; an empty one says nothing.

    Raises:
        BadFile: As `blocks`.
        ValueError: As `toml`.
        RecursionError: Likewise.
    """
    return {} if path.is_file() and path.stat().st_size == 0 else toml(contents(path, most_bytes))


def _dots(data: bytes) -> int:
    """Return how many dots a key may have at most: those with nothing but words, texts and blanks between them."""
    most = found = 0
    for match in _TOKEN.finditer(data):
        token = match[0]
        if token == b".":
            found += 1
            most = max(most, found)
        elif not (token[:1].isalnum() or token[:1] in _IN_KEYS):
            found = 0
    return most


def _unreadable(path: Path, error: OSError | ValueError) -> BadFile:
    return BadFile(f"{path} cannot be read: {getattr(error, 'strerror', None) or error}")


def _amount(size: int) -> str:
    return f"{size / 1e6:g} MB" if size >= 1_000_000 else f"{size / 1e3:g} kB"
