"""The lease: who may write to a device, with which token, until when.

Two locks keep writers apart. The first is held by the writer for its life and dropped by the kernel when it dies. The
second, on the lease file, is held for the moment of each write: whoever takes the lease over raises its token there,
and a writer that comes late with the old token is refused (a fencing token). Time is the kernel's boot time, which
counts suspend and does not jump.
"""

import errno
import fcntl
import json
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from polythrottle.actuation.site import contents, opened
from polythrottle.errors import DeviceError, StorageError

LEASE_S = 60.0
"""A writer that has not renewed its lease for this long is taken for dead or hung."""

PATIENCE_S = 35.0
"""How long a write may keep others waiting: longer than nvpmodel may take."""

_LONGEST_HOLDER = 100
_MOST_BYTES = 4096
_NUMBER, _FLAG = (int, float), (bool,)
_KINDS: dict[str, tuple[type, ...]] = {
    "token": (int,),
    "boot_id": (str,),
    "holder": (str,),
    "pid": (int,),
    "expires_s": (*_NUMBER, type(None)),
    "since": (str,),
    "applied": _FLAG,
    "kept": _FLAG,
    "confirmed_s": (*_NUMBER, type(None)),
    "dirty": _FLAG,
}


class Stuck(DeviceError):
    """Another process is in the middle of a write and does not come to its end."""


@dataclass(frozen=True)
class Lease:
    """Who may write to a device.

    Args:
        token: Rises with each change of hands.
        boot_id: The boot it is of; void in another.
        holder: Who, for people to read; "" when released.
        pid: The process that holds it.
        expires_s: On the boot clock; None is never.
        since: Wall time it was taken at, for people to read.
        applied: Whether a profile applied by hand holds it, which `restore` may end.
        kept: Whether it stands without a process, until a restore or a reboot.
        confirmed_s: How long it will stand once confirmed, in seconds; None is until a restore.
        dirty: Whether something may have been written under it that is not back yet.
    """

    token: int
    boot_id: str
    holder: str = ""
    pid: int = 0
    expires_s: float | None = None
    since: str = ""
    applied: bool = False
    kept: bool = False
    confirmed_s: float | None = None
    dirty: bool = False

    @property
    def alive(self) -> bool:
        """Whether the process that holds it is there."""
        try:
            state = Path(f"/proc/{self.pid}/stat").read_text(errors="replace").rpartition(")")[2].split()[0]
        except (OSError, IndexError):
            return False
        return bool(self.holder) and state not in ("Z", "X")


def boot_s() -> float:
    """Return the seconds since boot, suspend included."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


class Fence:
    """The lease file of one device.

    Args:
        file: Where; its folder exists.
        boot_id: Of the running kernel.
    """

    def __init__(self, file: Path, boot_id: str) -> None:
        self._file, self._boot_id = file, boot_id

    @contextmanager
    def closed(self, token: int | None = None) -> Iterator[Lease]:
        """Keep every other writer out for as long as the context lasts.

        Args:
            token: The caller's; it is checked that its lease still stands. Any if None.

        Raises:
            Stuck: If another keeps it closed for longer than `PATIENCE_S`.
            DeviceError: If the lease has passed to another.
            StorageError: If the lease file cannot be used.
        """
        try:
            handle = opened(self._file)
        except OSError as err:
            raise StorageError(f"cannot use {self._file}: {err.strerror}") from err
        try:
            self._lock(handle)
            lease = self._parsed(os.pread(handle, _MOST_BYTES, 0))
            if token is not None and lease.token != token:
                by = f" {lease.holder} has taken it over" if lease.holder else " it was ended and the device restored"
                raise DeviceError(f"the lease to write (token {token}) is no longer valid:{by}")
            yield lease
        finally:
            os.close(handle)

    def _lock(self, handle: int) -> None:
        ends = time.monotonic() + PATIENCE_S
        while True:
            try:
                return fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                if time.monotonic() > ends:
                    lease = self._parsed(os.pread(handle, _MOST_BYTES, 0))
                    who = f"{lease.holder or 'another process'} (pid {lease.pid})"
                    raise Stuck(f"{who} stands in the middle of a write; end that process, then try again") from None
                time.sleep(0.002)

    def read(self) -> Lease:
        """Return the lease as it stands; one of another boot, or none, is one without a holder.

        Raises:
            StorageError: If the lease file cannot be read or trusted.
        """
        try:
            return self._parsed(contents(self._file) or b"")
        except OSError as err:
            raise StorageError(f"cannot read {self._file}: {err.strerror}") from err

    def _parsed(self, text: bytes) -> Lease:
        try:
            line = json.loads(text)
            if not all(type(line[name]) in kinds for name, kinds in _KINDS.items()):
                return Lease(0, self._boot_id)
            lease = Lease(**{name: line[name] for name in _KINDS})
        except (ValueError, TypeError, KeyError, RecursionError):
            return Lease(0, self._boot_id)
        return lease if lease.boot_id == self._boot_id else Lease(lease.token, self._boot_id)

    def take(self, holder: str, seconds: float | None) -> int:
        """Take the lease, whoever had it, and return its new token.

        Args:
            holder: Who takes it.
            seconds: How long it lasts unless renewed; None is for good.
        """
        with self.closed() as lease:
            expires_s = None if seconds is None else boot_s() + seconds
            taken = Lease(lease.token + 1, self._boot_id, holder, os.getpid(), expires_s, _wall())
            self._write(taken)
        return taken.token

    def renew(self, token: int, seconds: float) -> None:
        """Put the end of a lease off to ``seconds`` from now.

        Raises:
            DeviceError: If it has passed to another.
        """
        self.change(token, expires_s=boot_s() + seconds)

    def change(self, token: int, **changes: object) -> None:
        """Change a lease that still has this token.

        Raises:
            DeviceError: If it has passed to another.
        """
        with self.closed(token) as lease:
            self._write(replace(lease, **changes))  # type: ignore[arg-type]

    def release(self, token: int) -> None:
        """Give a lease up, if it still is this one."""
        with self.closed() as lease:
            if lease.token == token:
                self._write(Lease(token, self._boot_id))

    def _write(self, lease: Lease) -> None:
        # In place: the lock is on this very file. In one call, a shorter text filled up with blanks, so that neither a
        # kill nor a reader meets half of it. A torn text reads as no lease, and no lease lets nobody write.
        try:
            handle = os.open(self._file, os.O_WRONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
            try:
                data = json.dumps(asdict(lease)).encode()
                size = os.fstat(handle).st_size
                if os.pwrite(handle, data.ljust(min(size, _MOST_BYTES)), 0) < len(data):
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
                if size > _MOST_BYTES:
                    os.ftruncate(handle, _MOST_BYTES)
            finally:
                os.close(handle)
        except OSError as err:
            raise StorageError(f"cannot write {self._file}: {err.strerror}; nothing was changed") from err


def one_line(holder: str) -> str:
    """Return who holds a device as others are to read it: one short line without control characters."""
    line = "".join(each for each in " ".join(holder.split()) if each.isprintable())
    return line if len(line) <= _LONGEST_HOLDER else f"{line[: _LONGEST_HOLDER - 1]}…"


def _wall() -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%S%z")


def hold(path: Path, device: str, holder: str) -> int:
    """Make this process the only writer of a device for its life, and return the handle that keeps it so.

    Raises:
        DeviceError: If there is another; names it.
        StorageError: If the lock file cannot be used.
    """
    try:
        handle = opened(path)
    except OSError as err:
        raise StorageError(f"cannot keep originals in {path.parent}: {err.strerror}") from err
    try:
        # The kernel drops the lock when its holder dies, however it dies.
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        other = os.pread(handle, 256, 0).decode(errors="replace").strip()
        os.close(handle)
        raise DeviceError(f"{device} is being steered by {other}; wait for it or stop it") from None
    try:
        name_holder(handle, holder)
    except StorageError:
        os.close(handle)
        raise
    return handle


def name_holder(handle: int, holder: str) -> None:
    """Write into a held lock who holds it.

    Raises:
        StorageError: If it cannot be written.
    """
    try:
        os.ftruncate(handle, 0)
        os.pwrite(handle, f"{holder}\n".encode(), 0)
    except OSError as err:
        raise StorageError(f"cannot note who steers the device: {err.strerror}") from err
