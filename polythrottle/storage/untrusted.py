"""What comes from outside: texts made safe to show, and plain files read without waiting and up to a bound."""

from __future__ import annotations

import contextlib
import json
import os
import re
import stat
from collections.abc import Iterator
from pathlib import Path
from types import MappingProxyType
from typing import Any

from polythrottle.domain.backports import tomllib
from polythrottle.domain.errors import BadFile, PolythrottleError

# Texts from outside as they may be shown: without what steers a terminal, forges a line of a log or reverses words.

_CODES = (*range(0x80, 0xA0), 0x61C, 0x200E, 0x200F, *range(0x2028, 0x202F), *range(0x2066, 0x206A))
NEVER_SHOWN = MappingProxyType(dict.fromkeys(_CODES, "\N{REPLACEMENT CHARACTER}"))
"""For `str.translate`: the second set of control characters (ISO 6429), separators of lines, and what changes the
direction of writing (Unicode Standard Annex 9), none of which this program ever has a reason to print."""

_ECHOED = 40
MALFORMED = (AttributeError, LookupError, OverflowError, RecursionError, TypeError, ValueError)
"""What taking a document apart raises where it is not what it should be: parts that lack or are of another type,
numbers beyond any bound, and nesting without end."""


def printable(text: str) -> str:
    """Return a text in one line, with a blank for each character that cannot be printed.

    A byte of a file name that is no UTF-8 is written out in hexadecimal: without it the name would be another.
    """
    if text.isprintable():
        return text
    return "".join(each if each.isprintable() else _escaped(each) for each in text)


def _escaped(character: str) -> str:
    """Return what stands for a character that cannot be printed."""
    # Python reads such a byte as the surrogate of the same last eight bits (PEP 383).
    byte = ord(character) - 0xDC00
    if 0x80 <= byte <= 0xFF:
        return f"\\x{byte:02x}"
    return " "


def last_line(output: bytes | str, most: int = 300) -> str:
    """Return the last line with words in it of what a program has printed, as it may be shown; "" if there is none."""
    if isinstance(output, bytes):
        output = output.decode(errors="replace")
    lines = (printable(line).strip() for line in reversed(output.splitlines()))
    return next((line[:most] for line in lines if line), "")


def shortened(value: object) -> str:
    """Return a value as it is echoed to whoever has written it: its beginning, however long it is."""
    try:
        text = repr(value)
    except ValueError:  # Python writes no integer of thousands of digits
        return "a number of thousands of digits"
    return bounded(text, _ECHOED)


def bounded(words: str, most: int = 400) -> str:
    """Return words that quote what somebody else has written, cut off where they are longer than anybody reads."""
    if len(words) <= most:
        return words
    return f"{words[:most]}…"


def is_address(text: str) -> bool:
    """Return whether a host is written as an address, of which no name server is asked."""
    # Here, for the actuator, which holds little memory, loads this module and is told of no hosts.
    import ipaddress

    try:
        ipaddress.ip_address(text)
    except ValueError:
        return False
    return True


def is_loopback(host: str) -> bool:
    """Return whether a host can only be reached from this machine; a name but localhost is taken to lead elsewhere."""
    import ipaddress

    if is_address(host):
        return ipaddress.ip_address(host).is_loopback
    return host.lower().rstrip(".") == "localhost"


def said(error: Exception) -> str:
    """Return what a reader of a file has met there, in words that are of the file and not of Python.

    Args:
        error: What it raised; its own words stand in a ValueError or an error of this program's.
    """
    if isinstance(error, KeyError):
        return f"it lacks {error}"
    if isinstance(error, json.JSONDecodeError):
        return "it is not JSON"
    if isinstance(error, UnicodeDecodeError):
        return "it is not text in UTF-8"
    if isinstance(error, RecursionError):
        return "it is nested too deep"
    if isinstance(error, OverflowError):
        return "it has a number too large to reckon with"
    if isinstance(error, (TypeError, AttributeError)):
        return "a value in it is of another kind than belongs there"
    return str(error)


# Plain files that somebody else has named: opened without waiting for anybody, and read up to a bound.

_BLOCK = 1 << 20
_MOST_DOTS = 64
_TOKEN = re.compile(rb"\"(?:[^\"\\\n]|\\.)*\"?|'[^'\n]*'?|[\w-]+|\.|[ \t]+|[^.]", re.DOTALL)
_IN_KEYS = b"\"'-_ \t"
_KERNELS = ("/proc", "/sys/kernel/tracing", "/sys/kernel/debug/tracing")
"""Where files that are plain to the eye are the kernel's own, and some of them answer when there is news."""


def check_plain(path: str | os.PathLike[str]) -> None:
    """Refuse what a user has named and may keep its reader waiting for ever: pipes, devices, the kernel's own files.

    Whatever opens a file by its name calls this first. What is not there, or forbidden, is left to who opens it.

    Raises:
        BadFile: If it is no plain file.
    """
    try:
        status = os.stat(path)
    # A name that holds a null character is a ValueError.
    except (OSError, ValueError):
        return
    if why := _strange(status):
        raise BadFile(f"{os.fspath(path)} cannot be read: it is {why}")


def _strange(status: os.stat_result) -> str:
    """Return what else than a plain file something is; empty if it is one."""
    if not stat.S_ISREG(status.st_mode):
        if stat.S_ISDIR(status.st_mode):
            return "a folder"
        return "no plain file"
    # /proc/kmsg calls itself a plain file and waits for news; a folder that nothing is mounted on is its parent's.
    if status.st_dev in _devices(*_KERNELS) - _devices("/", "/sys", "/sys/kernel/debug"):
        return "one of the kernel's own, no plain file"
    return ""


def _devices(*folders: str) -> set[int]:
    numbers = set()
    for folder in folders:
        with contextlib.suppress(OSError):
            numbers.add(os.stat(folder).st_dev)
    return numbers


def read_blocks(path: Path, most_bytes: int) -> Iterator[bytes]:
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
        # Without waiting, for a pipe opens only once somebody writes to it; what it is, is looked at below.
        handle = os.open(os.path.realpath(path), os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC)
    except (OSError, ValueError) as error:
        raise _unreadable(path, error) from error
    try:
        # Of what is open: under the name something else may lie by now.
        status = os.fstat(handle)
        if why := _strange(status):
            raise BadFile(f"{path} cannot be read: it is {why}")
        if status.st_size == 0:
            raise BadFile(f"{path} cannot be read: it is empty")
        total = 0
        while block := os.read(handle, min(_BLOCK, most_bytes + 1 - total)):
            total += len(block)
            # Its size refuses it at once; what is counted, a file that grows while it is read.
            if max(total, status.st_size) > most_bytes:
                raise BadFile(f"{path} cannot be read: it is larger than {_amount(most_bytes)}")
            yield block
    except OSError as error:
        raise _unreadable(path, error) from error
    finally:
        os.close(handle)


def read_plain(path: Path, most_bytes: int) -> bytes:
    """Return what is in a plain file.

    Raises:
        BadFile: As `read_blocks`.
    """
    return b"".join(read_blocks(path, most_bytes))


def parse_toml(data: bytes) -> dict[str, Any]:
    """Return the document in a file of TOML that somebody else has written.

    Raises:
        ValueError: If it is no TOML, no text in UTF-8, nested too deep, or has a key of absurdly many parts.
    """
    # Python's reader keeps every beginning of a dotted key: a line of 256 kB would take more memory than there is.
    if data.count(b".") > _MOST_DOTS and _dots(data) > _MOST_DOTS:
        raise ValueError(f"it has a key of more than {_MOST_DOTS} parts")
    try:
        return tomllib.loads(data.decode("utf-8-sig"))  # editors on Windows begin a file with a byte order mark
    except RecursionError as error:
        raise ValueError("it is nested too deep") from error


def read_toml(path: Path, most_bytes: int) -> dict[str, Any]:
    """Return the document in a plain file of TOML; an empty one says nothing.

    Raises:
        BadFile: As `read_blocks`.
        ValueError: As `parse_toml`.
    """
    if path.is_file() and path.stat().st_size == 0:
        return {}
    return parse_toml(read_plain(path, most_bytes))


def _dots(data: bytes) -> int:
    """Return how many dots a key may have at most: those with nothing but words, texts and blanks between them."""
    most = dots = 0
    for match in _TOKEN.finditer(data):
        token = match[0]
        if token == b".":
            dots += 1
            most = max(most, dots)
        elif not (token[:1].isalnum() or token[:1] in _IN_KEYS):
            dots = 0
    return most


def _unreadable(path: Path, error: OSError | ValueError) -> BadFile:
    return BadFile(f"{path} cannot be read: {getattr(error, 'strerror', None) or error}")


def own_error(error: PolythrottleError | OSError) -> PolythrottleError:
    """Return an error of this program's: a file that a user has named and that cannot be looked for is a bad one."""
    if isinstance(error, OSError):
        return BadFile(f"{bounded(str(error.filename or 'a file'))} cannot be used: {error.strerror or error}")
    return error


def _amount(size: int) -> str:
    if size >= 1_000_000:
        return f"{size / 1e6:g} MB"
    return f"{size / 1e3:g} kB"


def members_of(value: Any) -> dict[str, Any]:
    """Return a JSON object's members; none of anything else."""
    if isinstance(value, dict):
        return value
    return {}


def entries_of(value: Any) -> list[Any]:
    """Return a JSON array's entries; none of anything else."""
    if isinstance(value, list):
        return value
    return []
