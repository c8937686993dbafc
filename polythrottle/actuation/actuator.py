"""Write to a device so that every value can be put back, whatever dies in between."""

import errno
import fcntl
import os
import platform
import re
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Protocol, Self

from polythrottle.actuation.record import Entry, Record
from polythrottle.errors import DeviceError, KnobRejected, PermissionDenied, StorageError
from polythrottle.state import state_dir

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
_FORBIDDEN = (errno.EACCES, errno.EPERM, errno.EROFS)
_GONE = (errno.ENOENT, errno.ENODEV, errno.ENXIO)


class Files(Protocol):
    """How the files of a device are read and written; both may raise any OSError."""

    def read(self, path: str) -> str:
        """Return what a file holds, without the newline the kernel adds."""

    def write(self, path: str, text: str) -> None:
        """Write to a file that exists."""


class SysFiles:
    """The files themselves, as the kernel shows them."""

    def read(self, path: str) -> str:
        """Return what a file holds, without the newline the kernel adds."""
        return Path(path).read_text().strip()

    def write(self, path: str, text: str) -> None:
        """Write to a file in one system call; never creates it."""
        handle = os.open(path, os.O_WRONLY | os.O_TRUNC | os.O_CLOEXEC)
        try:
            os.write(handle, text.encode())
        finally:
            os.close(handle)


@dataclass(frozen=True)
class Difference:
    """A file that is not as it was found, and why it was left so."""

    path: str
    original: str
    found: str | None
    reason: str

    def __str__(self) -> str:
        return f"{self.path} holds {self.found or 'nothing readable'}, was {self.original}: {self.reason}"


class Actuator:
    """The only writer of one device: saves originals first, writes, reads back, restores.

    A context manager. Entering makes this process the device's only writer and first puts back what a process that died
    left changed; leaving restores everything.

    Args:
        device: Identity of the device, the same at each start.
        state: Folder for the record of originals; by default ``originals`` in `state_dir`.
        files: How to reach the device's files.
        boot_id: Of the running kernel; read from it by default.
    """

    def __init__(
        self, device: str, *, state: Path | None = None, files: Files | None = None, boot_id: str | None = None
    ) -> None:
        self.device = device
        self.differences: tuple[Difference, ...] = ()
        self._state = state
        self._files = files if files is not None else SysFiles()
        self._boot_id = boot_id
        self._lock: int | None = None
        self._record: Record | None = None

    def _path(self, suffix: str) -> Path:
        folder = self._state if self._state is not None else state_dir() / "originals"
        # The machine is part of the name: home folders are shared, boots are not.
        return folder / re.sub(r"[^A-Za-z0-9.@-]+", "_", f"{self.device}@{platform.node()}{suffix}")

    def _load(self) -> Record:
        boot_id = self._boot_id if self._boot_id is not None else _boot_id()
        return Record(self._path(".jsonl"), self.device, boot_id)

    def original(self, path: str) -> str:
        """Return what a file held before anyone tuned it: as recorded if a record stands, else as it is now.

        Raises:
            DeviceError: If it cannot be read.
        """
        record = self._record or self._load()
        known = record.entries.get(path)
        return known.original if known else self._read(path)

    def __enter__(self) -> Self:
        self._lock = self._locked()
        try:
            self._record = self._load()
            self.restore()
        except BaseException:
            self._release()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            self.restore()
        finally:
            self._release()

    def _locked(self) -> int:
        path = self._path(".lock")
        try:
            path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        except OSError as err:
            raise StorageError(
                f"cannot keep originals in {path.parent}: {err.strerror}; "
                "set POLYTHROTTLE_STATE_DIR to a folder that can be written"
            ) from err
        try:
            # The kernel drops the lock when its holder dies, however it dies.
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = os.pread(handle, 32, 0).decode(errors="replace").strip()
            os.close(handle)
            raise DeviceError(f"{self.device} is being steered by process {holder}; wait for it or stop it") from None
        os.ftruncate(handle, 0)
        os.pwrite(handle, f"{os.getpid()}\n".encode(), 0)
        return handle

    def _release(self) -> None:
        self._record = None
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    def write(self, path: str, text: str) -> None:
        """Set a file to a value, its original safe on disk before, and read it back.

        Raises:
            KnobRejected: If the kernel refuses, rounds or ignores the value.
            PermissionDenied: If this process may not write it.
            DeviceError: If the file is gone, or the device was not entered.
            StorageError: If the original cannot be saved; nothing is written then.
        """
        if self._record is None:
            raise DeviceError(f"{self.device} must be entered (with device: …) before it is steered")
        before = self._read(path)
        if before == text:
            return
        self._record.note(path, before, text)
        self._put(path, text)
        kept = self._read(path)
        if kept != text:
            self._record.note(path, before, kept)
            raise KnobRejected(f"{path}: wrote {text}, but it holds {kept}")

    def restore(self) -> None:
        """Put every file back to its original, last written first; again is the same as once.

        A file that holds a value this record does not know was changed by someone else: it is left alone and added to
        ``differences``. What cannot be put back stays on record for the next time.

        Raises:
            DeviceError: If a file could not be put back; names each.
        """
        if self._record is None:
            return
        failed: dict[str, Difference] = {}
        foreign: dict[str, Difference] = {}
        # Twice: a file may only accept its original after another has its own (a minimum below a maximum).
        for _ in range(2):
            failed.clear()
            for path, entry in reversed(self._record.entries.items()):
                self._put_back(path, entry, failed, foreign)
        self.differences += tuple(each for path, each in foreign.items() if path not in failed)
        if failed:
            raise DeviceError(f"{self.device} is not restored; {'; '.join(map(str, failed.values()))}")
        self._record.remove()

    def _put_back(self, path: str, entry: Entry, failed: dict[str, Difference], foreign: dict[str, Difference]) -> None:
        found = None
        try:
            found = self._read(path)
            if found == entry.original:
                return
            if found not in entry.written:
                foreign[path] = Difference(path, entry.original, found, "changed by someone else since, left alone")
                return
            self._put(path, entry.original)
            found = self._read(path)
            if found != entry.original:
                entry.written.add(found)
                failed[path] = Difference(path, entry.original, found, "the original was not accepted")
        except (DeviceError, KnobRejected) as err:
            failed[path] = Difference(path, entry.original, found, str(err))

    def _read(self, path: str) -> str:
        try:
            return self._files.read(path)
        except OSError as err:
            raise _translated(f"cannot read {path}", err) from err

    def _put(self, path: str, text: str) -> None:
        try:
            self._files.write(path, text)
        except OSError as err:
            raise _translated(f"cannot write {text} to {path}", err) from err


def _translated(what: str, err: OSError) -> DeviceError | KnobRejected:
    if err.errno in _FORBIDDEN:
        return PermissionDenied(f"{what}: {err.strerror}; run as root, or grant this user the file with a udev rule")
    if err.errno in _GONE:
        return DeviceError(f"{what}: {err.strerror}; the device or its driver is gone")
    return KnobRejected(f"{what}: {err.strerror}")


def _boot_id() -> str:
    try:
        return _BOOT_ID.read_text().strip()
    except OSError as err:
        raise DeviceError(f"cannot tell this boot from others: {_BOOT_ID}: {err.strerror}") from err
