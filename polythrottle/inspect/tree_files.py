"""Reads the files of a board's tree: only plain ones inside it, none too large, and says what could not be read."""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

MOST_FILE_BYTES = 8_000_000
MOST_BYTES = 16_000_000
MOST_FILES = 4_000
_MOST_LINKS = 1_500
_BLOCK = 65_536
_LINKS = ("sys/class/*/*", "sys/bus/*/devices/*", "sys/bus/*/drivers/*/*", "sys/devices/system/cpu/cpu*/cpufreq")
# What tells a folder from others of its kind: backends find sensors by it, whatever their number.
_NAMES = ("name", "type", "label", "*_label", "rail_name_*", "of_node/name", "device/of_node/name")
_CLOSED = ("sys/kernel/debug", "sys/class/powercap", "sys/devices/virtual/powercap")
_DPKG = "var/lib/dpkg/status"
_PARAGRAPH = re.compile(rb"^Package: nvidia-l4t-core\n(?:.+\n?)*", re.MULTILINE)


@dataclass(frozen=True)
class Kept:
    """One file as it was read."""

    content: bytes
    mode: int


@dataclass
class Collection:
    """What a tree holds.

    Args:
        files: By path below the root.
        links: Where links inside the tree lead: both paths below the root.
        unread: Why a file that was asked for is not here, by path below the root.
    """

    files: dict[str, Kept] = field(default_factory=dict)
    links: dict[str, str] = field(default_factory=dict)
    unread: dict[str, str] = field(default_factory=dict)


def collect(root: Path, paths: Iterable[str]) -> Collection:
    """Return the files of a tree and the links that lead to them.

    Args:
        root: Of the tree; nothing outside is read.
        paths: What to read, absolute and below the root; what is not there is passed over.
    """
    root = root.resolve()
    found = Collection()
    for path in dict.fromkeys(paths):
        _add(root, Path(path), found)
    for name in _CLOSED:
        if (root / name).is_dir() and not os.access(root / name, os.R_OK | os.X_OK):
            found.unread[name] = "this user may not look into the folder"
    for folder in sorted({str(Path(file).parent) for file in found.files if file.startswith("sys/")}):
        for pattern in _NAMES:
            for companion in sorted((root / folder).glob(pattern)):
                _add(root, companion, found)
    _add_links(root, found)
    return found


def _add(root: Path, path: Path, found: Collection) -> None:
    asked = _below(root, path)
    if asked is None:
        found.unread[path.name] = "it does not lie in the tree"
        return
    try:
        real = path.resolve(strict=True)
        place = _below(root, real)
        if place is None:
            found.unread[asked] = "it leads out of the tree"
            return
        _note_links(root, path, found)
        if place not in found.files:
            found.files[place] = _read(real, place, found)
    except (FileNotFoundError, NotADirectoryError):
        return
    except (OSError, RuntimeError, ValueError) as err:
        found.unread[asked] = str(getattr(err, "strerror", None) or err)


def _read(real: Path, place: str, found: Collection) -> Kept:
    # A pipe that nobody writes to would hold up the open, a link put there meanwhile would lead out.
    handle = os.open(real, os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        status = os.fstat(handle)
        if not stat.S_ISREG(status.st_mode):
            raise ValueError("it is not a plain file")
        content = b"".join(_blocks(handle))
    finally:
        os.close(handle)
    if place == _DPKG:
        content = b"".join(match[0] for match in _PARAGRAPH.finditer(content))
    held = sum(len(kept.content) for kept in found.files.values())
    if len(found.files) >= MOST_FILES or held + len(content) > MOST_BYTES:
        raise ValueError("the snapshot is full")
    return Kept(content, stat.S_IMODE(status.st_mode))


def _blocks(handle: int) -> Iterator[bytes]:
    total = 0
    while block := os.read(handle, _BLOCK):
        total += len(block)
        if total > MOST_FILE_BYTES:
            raise ValueError(f"it is larger than {MOST_FILE_BYTES // 1_000_000} MB")
        yield block


def _note_links(root: Path, path: Path, found: Collection) -> None:
    """Note every link on the way to a path, as the path below the root that it really leads to."""
    way = root
    for part in path.relative_to(root).parts:
        way = way / part
        if way.is_symlink():
            _note(root, way, found)
            way = way.resolve()


def _note(root: Path, link: Path, found: Collection) -> None:
    name = _below(root, link)
    target = _below(root, link.resolve())
    if name and target and name != target and len(found.links) < _MOST_LINKS:
        found.links[name] = target


def _add_links(root: Path, found: Collection) -> None:
    """Note the links of classes and buses that lead to a folder something was read in."""
    folders = {str(parent) for file in found.files for parent in Path(file).parents}
    for pattern in _LINKS:
        for link in sorted(root.glob(pattern)):
            try:
                if link.is_symlink() and _below(root, link.resolve(strict=True)) in folders - {".", ""}:
                    _note(root, link, found)
            except (OSError, RuntimeError):
                continue


def _below(root: Path, path: Path) -> str | None:
    try:
        return str(path.relative_to(root))
    except ValueError:
        return None
