"""An append-only file of lines: each is on disk before anybody acts on it, and a torn last one is cut off."""

from __future__ import annotations

import contextlib
import fcntl
import io
import os
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING

from polythrottle.domain.errors import StorageError
from polythrottle.storage.atomic_file import sync_folder

if TYPE_CHECKING:
    from typing_extensions import Self


class AppendLog:
    """An append-only file that is open for writing.

    A line that a crash or a full disk cut short was never acted upon, so it counts for nothing. Its owner cuts it off
    when it opens the file: with `cut_torn_line`, or with `cut` where it first checks that the file is its own.

    Args:
        path: The file.
        create: Whether to make it, and its folders, if it is not there.
        busy: What to say if another process has it open; None for a file whose writers are kept apart by other means.

    Raises:
        StorageError: If it cannot be opened, or another process writes it.
    """

    def __init__(self, path: Path, *, create: bool = True, busy: str | None = None) -> None:
        self.path = path
        flags = os.O_RDWR | os.O_APPEND | os.O_CLOEXEC
        try:
            if create:
                path.parent.mkdir(parents=True, exist_ok=True)
                flags |= os.O_CREAT
            self._handle = os.open(path, flags, 0o666)  # what the umask leaves, as `open` does
            self._file = io.FileIO(self._handle, "r+")  # closes once, however often it is asked to
        except OSError as err:
            raise self._unwritable(err) from err
        if busy is not None:
            self._lock(busy)

    def content(self) -> bytes:
        """Return all that the file holds.

        Raises:
            StorageError: If it cannot be read.
        """
        try:
            return self.path.read_bytes()
        except OSError as err:
            raise StorageError(f"{self.path} cannot be read: {err.strerror}") from err

    def cut(self, size: int) -> None:
        """Keep only the first bytes.

        Raises:
            StorageError: If it cannot be cut.
        """
        try:
            os.ftruncate(self._handle, size)
        except OSError as err:
            raise self._unwritable(err) from err

    def cut_torn_line(self) -> None:
        """Cut off what follows the last whole line.

        Raises:
            StorageError: If it cannot be cut.
        """
        size = os.fstat(self._handle).st_size
        # A look at the last byte spares reading a long file before every line.
        if size and os.pread(self._handle, 1, size - 1) != b"\n":
            self.cut(whole_bytes(self.content()))

    def append(self, line: bytes) -> None:
        """Add a line, on disk before this returns.

        Args:
            line: Without its newline.

        Raises:
            StorageError: If it cannot be written; the file is then as it was.
        """
        size = os.fstat(self._handle).st_size
        data = line + b"\n"
        try:
            while data:
                # A file system that is nearly full, or a signal, lets it take a part only.
                data = data[os.write(self._handle, data) :]
            os.fsync(self._handle)
            # The file itself is new, and its name survives a power cut only with its folder (fsync(2)).
            if not size:
                sync_folder(self.path.parent)
        except OSError as err:
            self._forget(size)
            raise self._unwritable(err) from err

    def close(self) -> None:
        """Close the file, which gives up its lock; a second time nothing happens.

        Raises:
            StorageError: If the file system only now says that it could not write.
        """
        try:
            self._file.close()
        except OSError as err:
            raise self._unwritable(err) from err

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _lock(self, busy: str) -> None:
        try:
            # Not fcntl's record locks, which are lost when the file is opened and closed once more, as `content` does.
            fcntl.flock(self._handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            self._file.close()
            raise StorageError(busy) from None
        except OSError as err:
            self._file.close()
            raise self._unwritable(err) from err

    def _forget(self, size: int) -> None:
        """Cut a half-written line off again; if even that fails, the next opening does it."""
        try:
            os.ftruncate(self._handle, size)
        except OSError:
            return

    def _unwritable(self, err: OSError) -> StorageError:
        kept = ""
        # Of a file that was just made, or could not even be, nobody would know what is meant.
        with contextlib.suppress(OSError):
            kept = "; what it held so far is kept" * (self.path.stat().st_size > 0)
        return StorageError(f"{self.path} cannot be written: {err.strerror}{kept}")


def whole_bytes(data: bytes) -> int:
    """Return how many bytes of a log's content there are without a torn last line."""
    return data.rfind(b"\n") + 1


def whole_lines(data: bytes) -> list[bytes]:
    """Return the lines of a log's content without a torn last one."""
    return data.split(b"\n")[:-1]
