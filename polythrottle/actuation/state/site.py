"""Where the record, the lease and the audit of one device lie, whether that place can be trusted.

Which boot this is.
"""

from __future__ import annotations

import json
import os
import re
import stat
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from polythrottle.actuation.drivers.controls import read_whole, text_of
from polythrottle.domain.errors import DeviceError, StorageError
from polythrottle.storage.paths import state_dir

# Which boot this is: the kernel forgets most of what was written when it starts anew.

_TRIES = 3  # without it nothing can be put back
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


def boot_id() -> str:
    """Return the identity of the running boot.

    Raises:
        DeviceError: If the kernel does not tell.
    """
    for left in reversed(range(_TRIES)):
        try:
            return text_of(_BOOT_ID)
        except OSError as err:
            if not left:
                raise DeviceError(f"cannot tell this boot from others: {_BOOT_ID}: {err.strerror}") from err
    raise AssertionError("unreachable")


# Where the record, the lease and the audit of one device lie, and whether that place can be trusted.

_MACHINE_ID = Path("/etc/machine-id")
_MOST_BYTES = 16_000_000
_SIGNS = 12  # of a machine's or boot's identity, in a file's name
_REMEDY = "set POLYTHROTTLE_STATE_DIR to a folder of your own"


@dataclass(frozen=True)
class Site:
    """The files that belong to one device.

    Args:
        folder: ``originals`` in the state folder.
        stem: What their names begin with: the device and the machine, for home folders are shared and boots are not.
            Never the host's name, which changes while a device stands changed.
    """

    folder: Path
    stem: str

    @classmethod
    def of(cls, device: str, state: Path | None = None) -> Site:
        """Return the site of a device: the one that something in this boot has begun, under whatever key, if any.

        Args:
            device: Its identity.
            state: Folder for the files; by default ``originals`` in `state_dir`.
        """
        folder = originals_folder(state)
        name = _plain(device)
        begun = []
        with suppress(OSError):
            stems = sorted({each.stem for each in folder.iterdir() if each.suffix in _KINDS})
            begun = [stem for stem in stems if stem.rpartition("@")[0] == name and _is_of_boot(folder, stem)]
        own = f"{name}@{machine()}"
        return cls(folder, own if own in begun or not begun else begun[0])

    @classmethod
    def all(cls, state: Path | None = None) -> tuple[Site, ...]:
        """Return the sites with a record, a lease or an audit: this machine's, and all others' of the running boot.

        Such is what a container with the same folder has left, or this machine before its identity was changed.

        Raises:
            StorageError: If the folder is there but cannot be trusted or read.
        """
        folder = originals_folder(state)
        try:
            if not folder.is_symlink() and not folder.exists():
                with suppress(FileNotFoundError):  # a link that leads round in circles is an error of its own
                    if not stat.S_ISDIR(os.stat(folder.parent).st_mode):
                        raise StorageError(f"{folder.parent} is no folder, so what stands changed cannot be known")
                return ()
            _trusted(folder, "give it back to root, or move it away")
            names = sorted(each.stem for each in folder.iterdir() if each.suffix in _KINDS)
        except OSError as err:
            raise StorageError(f"cannot read {folder}: {err.strerror}") from err
        stems = [stem for stem in dict.fromkeys(names) if stem.endswith(f"@{machine()}") or _is_of_boot(folder, stem)]
        return tuple(cls(folder, stem) for stem in stems)

    def is_of(self, device: str) -> bool:
        """Say whether the names of these files fit a device; those of others may too, for signs are left out."""
        return self.stem.rpartition("@")[0] == _plain(device)

    @property
    def record(self) -> Path:
        """The originals."""
        return self.folder / f"{self.stem}.jsonl"

    @property
    def left(self) -> Path:
        """A record of what was left to somebody else, until the next writer."""
        return self.folder / f"{self.stem}.left"

    @property
    def lease(self) -> Path:
        """Who may write, until when."""
        return self.folder / f"{self.stem}.lease"

    @property
    def lock(self) -> Path:
        """Held by the kernel for the writer's life."""
        return self.folder / f"{self.stem}.lock"

    @property
    def audit(self) -> Path:
        """Who wrote what, when."""
        return self.folder / f"{self.stem}.audit"

    def prepare(self) -> None:
        """Make the folder, and check that nobody else can write in it.

        Raises:
            StorageError: If it cannot be made, is a link, belongs to someone else, or others may write in it.
        """
        try:
            self.folder.parent.mkdir(parents=True, exist_ok=True)
            self.folder.mkdir(mode=0o700, exist_ok=True)
            _trusted(self.folder, _REMEDY)
        except OSError as err:
            raise StorageError(f"cannot keep originals in {self.folder}: {err.strerror}; {_REMEDY}") from err


_KINDS = (".jsonl", ".lease", ".left", ".audit")  # the audit may be all that is left of the others


def originals_folder(state: Path | None = None) -> Path:
    """Return the folder of all these files; by default ``originals`` in `state_dir`."""
    if state is not None:
        return state
    return state_dir() / "originals"


def machine() -> str:
    """Return what tells this machine from others with the same home folder, at every boot: a part of its machine-id.

    Where there is none yet, as in some containers, the boot's identity stands for it (machine-id(5)).

    Raises:
        DeviceError: If the kernel does not tell its boot's identity either.
    """
    with suppress(OSError):
        text = text_of(_MACHINE_ID)
        if re.fullmatch(r"[0-9a-f]{32}", text) and text.strip("0"):
            return text[:_SIGNS]
    return f"boot-{boot_id()[:_SIGNS]}"


def _plain(device: str) -> str:
    return re.sub(r"[^A-Za-z0-9.@-]+", "_", device)


def _is_of_boot(folder: Path, stem: str) -> bool:
    """Say whether a record, a lease or an audit of the running boot has this name."""
    with suppress(DeviceError):
        boot = boot_id()
        if any(_boot_of(folder / f"{stem}{kind}") == boot for kind in (".lease", ".jsonl", ".left")):
            return True
        with suppress(OSError, StorageError):
            return boot.encode() in (contents(folder / f"{stem}.audit") or b"")
    return False


def _boot_of(file: Path) -> str:
    """Return the boot that the first line of a file names; empty where it names none."""
    with suppress(OSError, ValueError, StorageError, RecursionError):
        first = (contents(file) or b"").partition(b"\n")[0]
        told = json.loads(first)
        if isinstance(told, dict):
            return str(told.get("boot_id", ""))
    return ""


def _trusted(folder: Path, remedy: str) -> None:
    found = folder.lstat()
    if not stat.S_ISDIR(found.st_mode):
        raise StorageError(f"{folder} is not a folder of its own but a link or a file; {remedy}")
    if found.st_uid not in (os.geteuid(), 0):
        raise StorageError(f"{folder} belongs to user {found.st_uid}; {remedy}")
    if found.st_mode & 0o022:
        raise StorageError(f"others may write in {folder} (mode {stat.S_IMODE(found.st_mode):o}); run chmod go-w on it")
    above = folder.parent.stat()
    if above.st_mode & 0o002 and not above.st_mode & stat.S_ISVTX:
        raise StorageError(f"anyone may write in {folder.parent}; run chmod o-w on it, or {remedy}")


def contents(path: Path) -> bytes | None:
    """Return what one of the files holds, None if it is not there.

    Raises:
        OSError: If it cannot be read.
        StorageError: If it is not a plain file that only this user or root may write, or larger than any of them gets.
    """
    try:
        handle = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except FileNotFoundError:
        return None
    try:
        _refuse_if_strange(path, handle)
        if os.fstat(handle).st_size > _MOST_BYTES:
            raise StorageError(f"{path} is larger than {_MOST_BYTES // 1_000_000} MB, which nothing here writes")
        return read_whole(handle)
    finally:
        os.close(handle)


def opened(path: Path) -> int:
    """Open one of the files for reading and writing, made if need be.

    Raises:
        OSError: If it cannot be opened.
        StorageError: If it is not a plain file that only this user or root may write.
    """
    handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, 0o600)
    try:
        _refuse_if_strange(path, handle)
    except StorageError:
        os.close(handle)
        raise
    return handle


def _refuse_if_strange(path: Path, handle: int) -> None:
    found = os.fstat(handle)
    if not stat.S_ISREG(found.st_mode) or found.st_uid not in (os.geteuid(), 0) or found.st_mode & 0o022:
        raise StorageError(f"{path} is not a plain file that only this user may write; move it away")
