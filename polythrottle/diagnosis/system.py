"""The files of a machine below a root, read so that nothing they hold can hurt."""

import os
from pathlib import Path

_MOST_BYTES = 200_000


class System:
    """The files of a machine; what cannot be read is unknown, and unknown is None.

    Args:
        root: Where ``proc``, ``sys``, ``etc`` and ``usr`` hang.
    """

    def __init__(self, root: Path = Path("/")) -> None:
        self.root = root.absolute()

    def text(self, path: str | Path) -> str | None:
        """Return the beginning of a file, or None: never waits, as on a pipe."""
        data = self.data(path)
        return None if data is None else data.decode(errors="replace").strip()

    def data(self, path: str | Path) -> bytes | None:
        """Return the first bytes of a file, or None."""
        try:
            handle = os.open(self.root / path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        except (OSError, ValueError):
            return None
        try:
            return os.read(handle, _MOST_BYTES)
        except OSError:
            return None
        finally:
            os.close(handle)

    def found(self, pattern: str) -> list[Path]:
        """Return what matches a pattern below the root, sorted."""
        try:
            return sorted(self.root.glob(pattern))
        except OSError:
            return []

    def mounts(self) -> dict[str, tuple[str, frozenset[str]]]:
        """Return by mount point what kind of file system is there, and its options; the topmost where several are."""
        rows = [line.split() for line in (self.text("proc/self/mounts") or "").splitlines()]
        return {row[1]: (row[2], frozenset(row[3].split(","))) for row in rows if len(row) >= 4}
