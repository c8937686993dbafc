"""Probing: which real device this machine has, the files of a board read safely, and what was found about each knob."""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Container, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from polythrottle.actuation.drivers.controls import Controls, text_of
from polythrottle.actuation.limits import Limits
from polythrottle.domain.errors import PolythrottleError
from polythrottle.domain.ports import Finding
from polythrottle.domain.space import Level
from polythrottle.domain.units import show_level

# Which real device this machine has: a Jetson board, an NVIDIA GPU, or its processor.


@dataclass(frozen=True)
class DetectedDevice:
    """The device that ``auto`` means here.

    Args:
        uri: What opens it.
        explanation: Why this one, in a sentence.
    """

    uri: str
    explanation: str


def find_device(root: Path = Path("/")) -> DetectedDevice:
    """Return the device ``auto`` means: the first of board, GPU and processor that this version can steer.

    Args:
        root: Where ``/proc`` hangs; another folder in tests.
    """
    if name := _jetson(root):
        return DetectedDevice("jetson" if root == Path("/") else f"jetson?root={root}", f"{name} is here")
    if gpus := _nvidia(root):
        return DetectedDevice("nvml:0", gpus)
    return DetectedDevice("cpu", "no Jetson board and no NVIDIA GPU here; taking the processor")


def _jetson(root: Path) -> str | None:
    compatible = _text(root / "proc/device-tree/compatible")
    if "nvidia,tegra" in compatible:
        return _text(root / "proc/device-tree/model").strip("\0\n ") or "a Jetson"
    return None


def _nvidia(root: Path) -> str | None:
    """Return which GPUs the driver's own files name, in a sentence; None if there is none."""
    files = sorted((root / "proc/driver/nvidia/gpus").glob("*/information"))
    lines = [line for file in files for line in _text(file).splitlines() if line.startswith("Model:")]
    named = [line.partition(":")[2].strip() for line in lines]
    if not named:
        return None
    if len(named) > 1:
        others = f", the first of {len(named)} GPUs; nvml:1 and so on name the others, nvml:all all as one"
    else:
        others = ""
    return f"an {named[0]} is here{others}"


def _text(path: Path) -> str:
    try:
        return text_of(path)
    except OSError:
        return ""


# The files of a board, below a root: read so that nothing they hold can hurt, found by what they say of themselves.

_MOST_BYTES = 4_000_000  # the largest of these files, dpkg's status, is a tenth of it
_MOST_LINKS = 40  # as the kernel's own limit (path_resolution(7))
_NUMBER = re.compile(r"[+-]?\d{1,18}")


class Tree:
    """The files of a board.

    A file that is absent, asleep, forbidden, no plain file or no text is unknown, and unknown is None.

    Args:
        root: Where ``sys``, ``proc``, ``etc`` and ``var`` hang.
        controls: How single files are read.
    """

    def __init__(self, root: Path, controls: Controls) -> None:
        self.root = root.resolve()
        self._controls = controls

    def text(self, path: Path) -> str | None:
        """Return what a file holds, without surrounding blanks and zero bytes, or None."""
        try:
            found = path.stat()
            if not stat.S_ISREG(found.st_mode) or found.st_size > _MOST_BYTES:
                return None
            return self._controls.read(str(path)).strip(" \n\t\0")
        except (OSError, ValueError, PolythrottleError):
            return None

    def number(self, path: Path) -> int | None:
        """Return the whole number a file holds, or None."""
        text = self.text(path)
        if text is not None and _NUMBER.fullmatch(text):
            return int(text)
        return None

    def numbers(self, path: Path) -> tuple[int, ...]:
        """Return the positive whole numbers a file lists, ascending; empty if one of its words is no number."""
        words = (self.text(path) or "").split()
        if not all(_NUMBER.fullmatch(word) for word in words):
            return ()
        return tuple(sorted({int(word) for word in words if int(word) > 0}))

    def found(self, *patterns: str) -> list[Path]:
        """Return the files and folders below the root that match, each real place once, in the order of their numbers.

        A link that leads out of the tree is not followed: what a tree elsewhere holds must not reach this machine.
        """
        places: dict[Path, None] = {}
        for pattern in patterns:
            for path in sorted(self._matches(pattern), key=_by_number):
                if self.holds(path):
                    places[path.resolve()] = None
        return list(places)

    def _matches(self, pattern: str) -> Iterable[Path]:
        try:
            return list(self.root.glob(pattern))
        except (OSError, ValueError, RuntimeError):
            return []

    def below(self, place: str) -> Path:
        """Return where a path of the board lies in this tree: links count from its root, as they do on the board.

        ``/etc/nvpmodel.conf`` and ``/proc/device-tree`` are absolute links on a board, and a copy of one has them so.
        """
        at = self.root
        parts = list(reversed(Path(place).parts))
        hops = 0
        while parts:
            part = parts.pop()
            if part in ("/", ".."):
                if part == "/" or at == self.root:
                    at = self.root
                else:
                    at = at.parent
                continue
            try:
                # Links that lead in a circle would never end.
                target = os.readlink(at / part) if hops < _MOST_LINKS else ""
            except (OSError, ValueError):
                target = ""
            hops += 1 if target else 0
            at = at if target else at / part
            parts.extend(reversed(Path(target).parts if target else ()))
        return at

    def there(self, path: Path) -> bool:
        """Say whether there is a file or folder that this process can see; a closed folder hides what is in it."""
        try:
            return path.exists()
        except OSError:
            return False

    def holds(self, path: Path) -> bool:
        """Say whether a path really lies in this tree, links followed."""
        try:
            found = path.resolve(strict=True)
            return self.root == found or self.root in found.parents
        except (OSError, RuntimeError):
            return False

    def refusal(self, *paths: Path) -> str | None:
        """Return why one of these files may not be written by this process, or None if all may."""
        for path in paths:
            if not self.there(path):
                return f"there is no {path} that this user can see"
            if not self.holds(path):
                return f"{path} leads out of {self.root}"
            if not path.is_file():
                return f"{path} is no plain file"
            # Root may open anything for writing, but a file without a write bit has no store function in its driver.
            if not path.stat().st_mode & 0o222:
                return f"{path} is read-only in this kernel"
            if not os.access(path, os.W_OK):
                return f"{path} may not be written by this user"
        return None


def _by_number(path: Path) -> list[int | str]:
    # So that zone 10 comes after zone 9.
    return [int(part) if part.isdigit() else part for part in re.split(r"(\d+)", str(path))]


# What probing a board found about one knob: its levels, or why it is off.

KIND = "jetson"
MOST_SEARCHED = 32
"""Levels of one knob that are searched; all of them may be applied."""


@dataclass(frozen=True)
class Capability:
    """One knob as it was found on this board.

    Args:
        name: The knob, in SI.
        levels: Every level that may be applied, ascending; empty if the knob is off.
        default: The level that leaves the board as it was found.
        reason: Why it is off, or what there is to know about its levels.
        remedy: What the reader can do about it.
    """

    name: str
    levels: tuple[Level, ...] = ()
    default: Level = ""
    reason: str = ""
    remedy: str = ""

    @property
    def works(self) -> bool:
        """Whether the knob can be set."""
        return bool(self.levels)

    @property
    def finding(self) -> Finding:
        """The knob in one line."""
        if not self.works:
            return Finding(self.name, False, self.reason, self.remedy)
        first, last = (show_level(self.name, level) for level in (self.levels[0], self.levels[-1]))
        span = f"{len(self.levels)} levels, {first} to {last}"
        return Finding(self.name, True, f"{span}; {self.reason}" if self.reason else span, self.remedy)


def within(name: str, table: Iterable[int], low: int, high: int, limits: Limits) -> tuple[int, ...]:
    """Return the levels of a table between the limits found on the board and within the administrator's.

    Args:
        name: The knob.
        table: What the driver offers, in the knob's SI unit.
        low: The lower limit that was found, in the same unit.
        high: The upper limit that was found.
        limits: The administrator's.
    """
    return limits.within(KIND, name, sorted({level for level in table if low <= level <= high}))


def thinned(levels: Sequence[Level], kept: Container[Level] = ()) -> tuple[Level, ...]:
    """Return the levels of a knob to search: all up to 32, else every second, third, … counted down from the highest.

    The lowest stays, and so do those in ``kept``. Thor's 284 clocks of the CPU beside 170 of the GPU are 16 million
    points; 32 of each lie 3 % of the highest apart, which is finer than a study can tell apart.

    Args:
        levels: Ascending.
        kept: Levels that stay whatever else does, such as those of the vendor's power modes.
    """
    every = -(-len(levels) // MOST_SEARCHED)
    chosen = {*levels[::-1][:: every or 1], *levels[:1]}
    return tuple(level for level in levels if level in chosen or level in kept)


def unavailable(names: Iterable[str], reason: str, remedy: str = "") -> tuple[Capability, ...]:
    """Return knobs that are off for one reason."""
    line = " ".join(reason.split())
    return tuple(Capability(name, reason=line, remedy=remedy) for name in names)
