"""Files that are replaced whole or not at all, folders flushed to disk, and temporary ones that outlive nobody."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import secrets
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import IO

from polythrottle.domain.errors import StorageError

# Not what older versions and far sides call theirs, which hold no lock on them.
_TEMPORARY = "polythrottle-own-"


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


def is_locked(path: Path) -> bool:
    """Return whether a living process has locked a file; False where it may not be opened."""
    try:
        with path.open("rb") as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        return False
    return False


@contextlib.contextmanager
def temporary_folder() -> Iterator[Path]:
    """Make a folder that is removed at the end; where this process is killed, by the next one that makes one.

    Raises:
        OSError: If none can be made.
    """
    folder, handle = owned_folder()
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        os.close(handle)


def owned_folder() -> tuple[Path, int]:
    """Return a new temporary folder, and the handle by which it is in use until that is closed or the process ends.

    Those of this user whose processes were killed are removed.

    Raises:
        OSError: If none can be made.
    """
    for each in Path(tempfile.gettempdir()).glob(f"{_TEMPORARY}*"):
        _clear(each)
    while True:
        folder = Path(tempfile.mkdtemp(prefix=_TEMPORARY))
        # Another process may have taken it for one that was left, before it was locked: then it is made again.
        with contextlib.suppress(FileNotFoundError):
            handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            # Where folders cannot be locked, as over NFS, nobody removes one either.
            with contextlib.suppress(OSError):
                fcntl.flock(handle, fcntl.LOCK_EX)
            if folder.exists():
                return folder, handle
            os.close(handle)


def _clear(folder: Path) -> None:
    """Remove a folder of this user's that no living process has locked: the kernel drops a lock with its process."""
    with contextlib.suppress(OSError):
        # Anybody may put a folder, or a link, of such a name where everybody's temporary files are.
        if folder.lstat().st_uid != os.geteuid():
            return
        handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(folder, ignore_errors=True)
        finally:
            os.close(handle)
