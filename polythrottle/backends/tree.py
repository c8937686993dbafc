"""The files of a board, below a root: read so that nothing they hold can hurt, found by what they say of themselves."""

import os
import re
import stat
from collections.abc import Iterable
from pathlib import Path

from polythrottle.actuation.controls import Controls
from polythrottle.errors import PolythrottleError

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
        return int(text) if text is not None and _NUMBER.fullmatch(text) else None

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
        at, parts, hops = self.root, list(reversed(Path(place).parts)), 0
        while parts:
            part = parts.pop()
            if part in ("/", ".."):
                at = self.root if part == "/" or at == self.root else at.parent
                continue
            try:
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
            return path.resolve(strict=True).is_relative_to(self.root)
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
    return [int(part) if part.isdigit() else part for part in re.split(r"(\d+)", str(path))]
