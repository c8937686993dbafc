"""The lease: who may write to a device, with which token, until when.

Which other device's record already has a control.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from polythrottle.actuation.drivers.controls import text_of
from polythrottle.actuation.state.record import Record, shown
from polythrottle.actuation.state.site import Site, contents, opened
from polythrottle.domain.errors import DeviceError, StorageError
from polythrottle.storage.untrusted import MALFORMED

# The lease: who may write to a device, with which token, until when.
#
# Two locks keep writers apart. The first is held by the writer for its life and dropped by the kernel when it dies.
# The second, on the lease file, is held for the moment of each write: whoever takes the lease over raises its token
# there, and a writer that comes late with the old token is refused (a fencing token). Time is the kernel's boot time,
# which counts suspend and does not jump.
#
# A writer keeps both files open for its life. It may then put its device back though file or folder are deleted, or
# the disk has become read-only, or no descriptor is left: as long as nobody else has taken the lease.

LEASE_S = 60.0
"""A writer that has not renewed its lease for this long is taken for dead or hung."""

PATIENCE_S = 35.0
"""How long a write may keep others waiting: longer than nvpmodel may take."""

_LONGEST_HOLDER = 100
_MOST_BYTES = 4096
_BEYOND = 1 << 53
_NUMBER = (int, float)
_FLAG = (bool,)
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


class Passed(DeviceError):
    """The lease has passed to another process, or was ended."""


class LeaseFileLost(StorageError):
    """The file of a lease was damaged or deleted: under that lease nothing more can be set."""


@dataclass(frozen=True)
class Lease:
    """Who may write to a device.

    Args:
        token: Rises with each change of hands.
        boot_id: The boot it is of; void in another.
        holder: Who, for people to read; "" when released.
        pid: The process that holds it.
        started: When that process was started, in the kernel's ticks since boot, for its number may be another's later;
            0 if that is not known.
        expires_s: On the boot clock; None is never.
        since: Wall time it was taken at, for people to read.
        applied: Whether a profile applied by hand holds it, which `restore` may end.
        kept: Whether it stands without a process, until a restore or a reboot.
        confirmed_s: How long it will stand once confirmed, in seconds; None is until a restore.
        dirty: Whether something may have been written, under it or those before, that is not back yet.
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
    started: int = 0

    @property
    def alive(self) -> bool:
        """Whether the process that holds it is there, and not a later one of its number."""
        started = start_of(self.pid)
        return bool(self.holder) and started is not None and self.started in (0, started)

    def has_passed(self, token: int) -> bool:
        """Say whether this stands in the place of an earlier lease, taken over or ended; not where that was damaged."""
        return self.token > token or (self.token != token and bool(self.holder))


def start_of(pid: int) -> int | None:
    """Return when a process was started, in the kernel's ticks since boot; None if it is not there or has ended.

    See proc_pid_stat(5), field 22. A container that is started again has the same process numbers again.
    """
    try:
        fields = text_of(f"/proc/{pid}/stat").rpartition(")")[2].split()
        if fields[0] not in ("Z", "X"):
            return int(fields[19])
        return None
    except (OSError, IndexError, ValueError):
        return None


def boot_s() -> float:
    """Return the seconds since boot, suspend included."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


def wait_for_lock(handle: int, patience_s: float, stuck: Callable[[], str], failed: str) -> None:
    """Lock an open file once whoever has it locked lets go.

    Args:
        handle: Of the file.
        patience_s: How long to wait, in seconds.
        stuck: Returns what to say where that was not long enough.
        failed: What to say where it cannot be locked, before the reason.

    Raises:
        Stuck: If the other does not let go.
        StorageError: If the file cannot be locked.
    """
    ends = time.monotonic() + patience_s
    while True:
        try:
            return fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() > ends:
                raise Stuck(stuck()) from None
            time.sleep(0.002)
        except OSError as err:
            raise StorageError(f"{failed}: {err.strerror}") from err


def _locker(handle: int) -> int | None:
    """Return the process that has an open file locked, as the kernel tells it (proc_locks(5)); None where it does not.

    That need not be the lease's holder: whoever restores, confirms or keeps locks it too.
    """
    inode = str(os.fstat(handle).st_ino)
    with suppress(OSError, ValueError):
        for line in text_of("/proc/locks").splitlines():
            fields = line.split()
            if fields[1:2] == ["FLOCK"] and len(fields) > 5 and fields[5].rpartition(":")[2] == inode:
                return int(fields[4]) or None  # 0 is a process of another container
    return None


class Fence:
    """The lease file of one device.

    Args:
        file: Where; its folder exists.
        boot_id: Of the running kernel.
    """

    def __init__(self, file: Path, boot_id: str) -> None:
        self._file = file
        self._boot_id = boot_id
        self._kept: int | None = None
        self._turn = threading.Lock()  # a lock of the kernel does not keep threads apart that share its handle

    def keep(self) -> None:
        """Hold the file open until `let_go`: neither its deletion nor a lack of descriptors takes it away then.

        Raises:
            StorageError: If it cannot be used.
        """
        self._kept = self._opened()

    def let_go(self) -> None:
        """Hold the file open no longer."""
        if self._kept is not None:
            os.close(self._kept)
            self._kept = None

    @property
    def handle(self) -> int | None:
        """The file, while it is held open."""
        return self._kept

    def _opened(self) -> int:
        try:
            return opened(self._file)
        except OSError as err:
            raise StorageError(f"cannot use {self._file}: {err.strerror}") from err

    @contextmanager
    def closed(self, token: int | None = None, *, ending: bool = False) -> Iterator[Lease]:
        """Keep every other writer out for as long as the context lasts.

        Args:
            token: The caller's; it is checked that its lease still stands. Any if None.
            ending: Whether the caller only puts back what it has changed: then a lease that was damaged or deleted, or
                cannot be read, stands for as long as nobody else has taken it.

        Raises:
            Stuck: If another keeps it closed for longer than `PATIENCE_S`.
            Passed: If the lease has passed to another.
            StorageError: If the lease file cannot be used.
        """
        with self._locked(ending) as handle:
            lease = self._checked(handle, token, ending)
            yield lease

    @contextmanager
    def _locked(self, ending: bool = False) -> Iterator[int]:
        if not self._turn.acquire(timeout=PATIENCE_S):
            raise Stuck(f"this process stands in the middle of a write to what {self._file.name} is of")
        try:
            handle = self._kept if self._kept is not None else self._opened()
            try:
                try:
                    self._lock(handle)
                except StorageError:
                    if not ending:
                        raise
                try:
                    yield handle
                finally:
                    with suppress(OSError):  # the caller's own error, if any, says more
                        fcntl.flock(handle, fcntl.LOCK_UN)
            finally:
                if handle != self._kept:
                    os.close(handle)
        finally:
            self._turn.release()

    def _checked(self, handle: int, token: int | None, ending: bool) -> Lease:
        try:
            lease = self.parsed(os.pread(handle, _MOST_BYTES, 0))
        except OSError as err:
            if not ending:
                raise StorageError(f"cannot read {self._file}: {err.strerror}") from err
            lease = Lease(0, self._boot_id)
        if token is None:
            return lease
        self._refuse_if_passed(lease, token)
        if lease.token == token and not (lease.holder or ending):
            raise Passed(f"the lease to write (token {token}) is no longer valid: it was ended")
        what = "damaged" if lease.token != token else ""
        if self._kept is not None and not self._is_in_place(handle):
            self._refuse_if_taken(token)
            what = "deleted"
        if what and not ending:
            told = "while the device was steered; nothing more is set, and the device is put back"
            raise LeaseFileLost(f"{self._file} was {what} {told}")
        return lease

    def _refuse_if_passed(self, lease: Lease, token: int) -> None:
        if lease.has_passed(token):
            if lease.holder:
                by = f" {lease.holder} has taken it over"
            else:
                by = " it was ended and the device restored"
            raise Passed(f"the lease to write (token {token}) is no longer valid:{by}")

    def _is_in_place(self, handle: int) -> bool:
        try:
            there = os.stat(self._file)
            own = os.fstat(handle)
        except FileNotFoundError:
            return False
        except OSError:
            return True  # nobody can tell; the token on the handle stands
        return (there.st_dev, there.st_ino) == (own.st_dev, own.st_ino)

    def _refuse_if_taken(self, token: int) -> None:
        """Refuse where another has begun anew in the place of a lease that was deleted."""
        try:
            other = self.read()
        except StorageError:
            return
        if other.holder:
            raise Passed(f"the lease to write (token {token}) is no longer valid: {other.holder} has begun a new one")

    def _lock(self, handle: int) -> None:
        def who() -> str:
            lease = self.parsed(os.pread(handle, _MOST_BYTES, 0))
            pid = _locker(handle)
            holder = f"{lease.holder or 'another process'} (pid {lease.pid})"
            if pid not in (None, lease.pid):
                holder = f"process {pid}"
            return f"{holder} stands in the middle of a write; end that process, then try again"

        wait_for_lock(handle, PATIENCE_S, who, f"cannot lock {self._file}")

    def read(self) -> Lease:
        """Return the lease as it stands; one of another boot, or none, is one without a holder.

        Raises:
            StorageError: If the lease file cannot be read or trusted.
        """
        try:
            return self.parsed((contents(self._file) or b"")[:_MOST_BYTES])
        except OSError as err:
            raise StorageError(f"cannot read {self._file}: {err.strerror}") from err

    def parsed(self, text: bytes) -> Lease:
        """Return the lease that a text holds; one without a holder if it holds none, or one of another boot."""
        try:
            line = json.loads(text)
            if not all(type(line[name]) in kinds and _sound(line[name]) for name, kinds in _KINDS.items()):
                return Lease(0, self._boot_id)
            started = line.get("started", 0)
            lease = Lease(**{name: line[name] for name in _KINDS}, started=started if type(started) is int else 0)
            lease = replace(lease, holder=one_line(lease.holder), since=one_line(lease.since))
        except MALFORMED:
            return Lease(0, self._boot_id)
        if lease.boot_id == self._boot_id:
            return lease
        return Lease(lease.token, self._boot_id)

    def take(self, holder: str, seconds: float | None, *, dirty: bool = False) -> int:
        """Take the lease, whoever had it, and return its new token.

        Args:
            holder: Who takes it.
            seconds: How long it lasts unless renewed; None is for good.
            dirty: As in `Lease`: what those before have left goes over to whoever takes it.
        """
        with self._locked() as handle:
            lease = self._checked(handle, None, False)
            pid = os.getpid()
            expires_s = None if seconds is None else boot_s() + seconds
            since = start_of(pid) or 0
            taken = Lease(lease.token + 1, self._boot_id, holder, pid, expires_s, _wall(), dirty=dirty, started=since)
            self._write(handle, taken)
        return taken.token

    def renew(self, token: int, seconds: float) -> None:
        """Put the end of a lease off to ``seconds`` from now.

        Raises:
            Passed: If it has passed to another.
            StorageError: If it cannot be written.
        """
        self.change(token, expires_s=boot_s() + seconds)

    def change(self, token: int, **changes: object) -> None:
        """Change a lease that still has this token.

        Raises:
            Passed: If it has passed to another.
            StorageError: If it cannot be written.
        """
        with self._locked() as handle:
            self._write(handle, replace(self._checked(handle, token, False), **changes))  # type: ignore[arg-type]

    def change_closed(self, lease: Lease, **changes: object) -> None:
        """Change a lease from within `closed`, by whoever keeps the file open.

        Raises:
            StorageError: If it cannot be written.
        """
        assert self._kept is not None, "the lease file is not kept open"
        self._write(self._kept, replace(lease, **changes))  # type: ignore[arg-type]

    def release(self, token: int, *, settled: bool) -> None:
        """Give a lease up, if it still is this one.

        Args:
            token: The caller's.
            settled: Whether nothing is left to put back; else the lease stays dirty without a holder.
        """
        with self._locked() as handle:
            lease = self._checked(handle, None, False)
            if lease.token == token:
                self._write(handle, Lease(token, self._boot_id, dirty=lease.dirty and not settled))

    def _write(self, handle: int, lease: Lease) -> None:
        # In place: the lock is on this very file. In one call, a shorter text filled up with blanks, so that neither a
        # kill nor a reader meets half of it. A torn text reads as no lease, and no lease lets nobody write.
        try:
            data = json.dumps(asdict(lease)).encode()
            size = os.fstat(handle).st_size
            if os.pwrite(handle, data.ljust(min(size, _MOST_BYTES)), 0) < len(data):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            if size > _MOST_BYTES:
                os.ftruncate(handle, _MOST_BYTES)
        except OSError as err:
            raise StorageError(f"cannot write {self._file}: {err.strerror}; nothing was changed") from err


def _sound(value: object) -> bool:
    """Say whether a number is one that a clock or a counter can have; neither NaN nor more than a float holds."""
    return not isinstance(value, (int, float)) or 0 <= value < _BEYOND


def one_line(holder: str) -> str:
    """Return who holds a device as others are to read it: one short line without control characters."""
    line = "".join(each for each in " ".join(holder.split()) if each.isprintable())
    if len(line) <= _LONGEST_HOLDER:
        return line
    return f"{line[: _LONGEST_HOLDER - 1]}…"


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
    except OSError as err:
        os.close(handle)
        raise StorageError(f"cannot lock {path}: {err.strerror}") from err
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


def lost(site: Site, record: Record, lease: Lease, audited: bool) -> tuple[str, ...]:
    """Say that a device was steered and that both files which knew its originals are gone; nothing otherwise.

    Args:
        site: Of the device.
        record: What is on record.
        lease: Of whoever steered it.
        audited: Whether the audit tells of a write that may not be back.
    """
    if record.entries or record.text or record.void:
        return ()
    if not lease.token and (cut := [shown(str(each)) for each in (site.record, site.audit) if _is_cut(each)]):
        return (f"{' and '.join(cut)} cut short and the lease gone: what was told last may still be changed",)
    if audited:
        return ()
    if not lease.dirty and not _all_emptied(site, lease):
        return ()
    gone = shown(f"{site.record} and what {site.audit.name} told are gone")
    return (f"{gone}, though the device was steered: what it held before cannot be known; a reboot forgets most",)


def _all_emptied(site: Site, lease: Lease) -> bool:
    """Say whether there is a record without a line beside no lease, which comes before it, and no audit."""
    return not lease.token and site.record.exists() and not (site.audit.exists() and site.audit.stat().st_size)


def _is_cut(file: Path) -> bool:
    """Say whether the last line of a file is not whole."""
    with suppress(OSError, StorageError):
        return not (contents(file) or b"\n").endswith(b"\n")
    return False


# One control, one record: the same file may be reached as two devices, such as a Jetson's processor and ``cpu``.

_PATIENCE_S = 10.0
_STUCK = "another process stands where it notes originals; end it, then try again"


@contextmanager
def claimed(site: Site, keys: Iterable[str], boot_id: str) -> Iterator[Callable[[str], bool]]:
    """Keep other devices' writers from putting controls on their records meanwhile; yields what tells those they have.

    Args:
        site: Of the device whose record is to name them.
        keys: Of the controls.
        boot_id: Of the running kernel.

    Raises:
        DeviceError: If one stands on another device's record: its value is no original; says whose.
        StorageError: If the lock cannot be used.
    """
    try:
        handle = opened(site.folder / "claims")
    except OSError as err:
        raise StorageError(f"cannot use {site.folder / 'claims'}: {err.strerror}") from err
    try:
        wait_for_lock(handle, _PATIENCE_S, lambda: _STUCK, "cannot lock out who steers other devices")
        taken = _taken(site, boot_id)
        for key in keys:
            if whose := taken.get(_place(key)):
                raise DeviceError(f"{key} is steered by {whose}; wait for it, or run polythrottle restore")
        yield lambda key: _place(key) in taken
    finally:
        os.close(handle)


def _taken(site: Site, boot_id: str) -> dict[object, str]:
    """Return the places of controls that stand on other devices' records, and whose they are."""
    taken: dict[object, str] = {}
    for other in Site.all(site.folder):
        if other.stem == site.stem:
            continue
        with suppress(StorageError):  # a record that cannot be trusted claims nothing; restoring names it
            record = Record(other.record, None, boot_id)
            holder = Fence(other.lease, boot_id).read().holder
            whose = f"{holder}, as {record.device}" if holder else f"the record of {record.device}"
            taken.update({_place(key): whose for key, entry in record.entries.items() if not entry.done})
    return taken


def _place(key: str) -> object:
    """Return what is the same for two names of one control: a file's device and inode."""
    scheme, _, root = key.partition(":")
    with suppress(OSError, ValueError):
        if key.startswith("/"):
            found = os.stat(key)
            return found.st_dev, found.st_ino
        if root.startswith("/"):
            return scheme, os.path.realpath(root)
    return key
