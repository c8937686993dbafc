"""Files that are replaced whole or not at all, and folders flushed to disk."""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import IO

from polythrottle.domain.errors import StorageError


def replace_file(path: Path, data: bytes | memoryview, *, mode: int | None = 0o644) -> None:
    """Write a file whole or not at all; its folders are made, and after a power cut it is the old one or the new one.

    Args:
        path: The file.
        data: Its new content.
        mode: Its permissions; None for what the umask leaves.

    Raises:
        StorageError: If it cannot be written; the old one stays.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with open_replacement(path, mode=mode) as file:
            file.write(data)
    except OSError as error:
        raise StorageError(f"{path} cannot be written: {error.strerror}") from error


def check_new(path: Path, option: str) -> None:
    """Refuse a file that is there already, or could not be written, before the work whose result it is to hold.

    Args:
        path: The file.
        option: Which names it.

    Raises:
        StorageError: If it is there, or its folder cannot be made or written.
    """
    if os.path.lexists(path):
        raise StorageError(f"{path} is there already; name another file with {option}")
    check_folder(path)


def check_folder(path: Path) -> None:
    """Refuse a file whose folder cannot be made or written, before the work whose result it is to hold.

    Raises:
        StorageError: If that is so.
    """
    try:
        folder = next(folder for folder in path.absolute().parents if os.path.lexists(folder))  # a link to nowhere too
        if not folder.is_dir() or not os.access(folder, os.W_OK | os.X_OK):
            raise StorageError(f"{path} cannot be written: {folder} is not a folder that can be written to")
        with tempfile.TemporaryFile(dir=folder):
            pass  # what rights alone do not tell: a folder of the kernel's, a file system that is read-only or full
    except OSError as error:
        raise StorageError(f"{path} cannot be written: {error.strerror}") from error


@contextlib.contextmanager
def open_replacement(path: Path, *, mode: int | None = 0o644) -> Iterator[IO[bytes]]:
    """Open a draft beside a file, which replaces it when the block ends and is deleted when the block raises.

    Args:
        path: The file; its folder must be there.
        mode: Its permissions; None for what the umask leaves.

    Raises:
        OSError: If it cannot be written; the old one stays.
    """
    draft = draft_path(path)
    # Never through a link that somebody has laid there: root writes into folders of others too.
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    with delete_unless_moved(draft):
        with os.fdopen(os.open(draft, flags, 0o666 if mode is None else mode), "wb") as file:
            if mode is not None:
                os.fchmod(file.fileno(), mode)  # whatever the umask is
            yield file
        move_durably(draft, path)


def draft_path(path: Path) -> Path:
    """Return an unused hidden name in the same folder, for a rename works within one file system only."""
    return path.with_name(f".{path.name}.{secrets.token_hex(4)}")


@contextlib.contextmanager
def delete_unless_moved(draft: Path) -> Iterator[None]:
    """Delete a draft that is still there when the block ends."""
    try:
        yield
    finally:
        with contextlib.suppress(OSError, ValueError):  # ValueError: a path with a null character
            draft.unlink(missing_ok=True)


def move_durably(draft: Path, path: Path) -> None:
    """Give a draft its name; a power cut leaves the old file or the new one.

    Raises:
        OSError: If it cannot be flushed or moved.
    """
    # Content before name: some file systems write the rename first, and a power cut would leave an empty file.
    with open(draft, "rb") as file:
        os.fsync(file.fileno())
    os.replace(draft, path)
    sync_folder(path.parent)


def sync_folder(folder: Path) -> None:
    """Flush a folder, so that a file made, renamed or removed in it stays so after a power cut.

    Raises:
        OSError: If it cannot be flushed.
    """
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(handle)
    except OSError as error:
        if error.errno != errno.EINVAL:  # some network file systems do not flush folders at all
            raise
    finally:
        os.close(handle)
