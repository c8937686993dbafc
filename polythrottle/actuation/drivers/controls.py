"""Controls: the single places of a device that may be written, and the ways to reach them."""

from __future__ import annotations

import errno
import os
import stat
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from polythrottle.domain.errors import PermissionDenied

ROOTS_VARIABLE = "POLYTHROTTLE_ROOTS"
"""Environment variable that names trees which stand for a machine's own, with a colon between two."""

_trusted: set[Path] = set()

_O_PATH = getattr(os, "O_PATH", 0o10000000)  # which PyPy does not name (include/uapi/asm-generic/fcntl.h)
_MOST_BYTES = 16_000_000

UNREADABLE = "?"
"""What a control reads as where the driver takes a value but never says which one holds (locked clocks of NVML)."""


@dataclass(frozen=True)
class Start:
    """What tells one start of a driver or a device from the next.

    Args:
        node: A number that the kernel gives anew each time, such as a file's in sysfs; 0 if there is none.
        count: What only grows until the next start, such as the joules a GPU has counted; 0 if nothing is known.
    """

    node: int = 0
    count: int = 0

    def is_over(self, now: Start) -> bool:
        """Say whether there has been another start since, given what is so now."""
        return now.node != self.node or now.count < self.count


class Controls(Protocol):
    """How the controls of a device are read and written; both may raise OSError, or an error of ours."""

    def read(self, key: str) -> str:
        """Return what a control holds, without the newline the kernel adds; `UNREADABLE` where nobody can know."""

    def write(self, key: str, text: str) -> None:
        """Write to a control that exists."""


@dataclass(frozen=True)
class Control:
    """One place of a device that may be written, and what may ever be written there.

    Args:
        key: Where: an absolute path, ``nvpmodel:<root>`` or ``nvml:<uuid>/<what>``.
        allowed: The texts that may be written: the device's own table within the administrator's limits.
        neutral: What "nobody has touched it" is written as, where the driver cannot say what holds.
        persistent: Whether it survives a reboot and rewrites other controls, as a power mode does.
        follows: Another control and a text: while that one holds that text, the value here means nothing.
    """

    key: str
    allowed: frozenset[str]
    neutral: str | None = None
    persistent: bool = False
    follows: tuple[str, str] | None = None


@dataclass(frozen=True)
class Setting:
    """One write: ``text`` goes to the control ``key``."""

    key: str
    text: str


def span(low_key: str, high_key: str, low: int, high: int, live_high: int) -> tuple[Setting, Setting]:
    """Return the two writes that move a minimum and a maximum without their ever crossing.

    Going up the maximum moves first, going down the minimum: the kernel refuses the other order.

    Args:
        low_key: Control of the minimum.
        high_key: Control of the maximum.
        low: The new minimum.
        high: The new maximum, in the same unit.
        live_high: The maximum that holds now.
    """
    lower = Setting(low_key, str(low))
    upper = Setting(high_key, str(high))
    if low > live_high:
        return (upper, lower)
    return (lower, upper)


def trust(root: Path) -> None:
    """Let files below a tree be written to, which stands for a machine's own; only for what this process was told.

    Never for a root that a record names: whoever can write records could have root write to any file then.
    """
    if root.resolve() != Path("/"):  # there the kernel shows what it has
        _trusted.add(root.resolve())


def roots() -> tuple[Path, ...]:
    """Return the trees that may be written to besides what the kernel shows of its devices."""
    named = (Path(each).resolve() for each in os.environ.get(ROOTS_VARIABLE, "").split(os.pathsep) if each)
    return tuple(dict.fromkeys(each for each in (*named, *sorted(_trusted)) if each != Path("/")))


def is_named(tree: Path) -> bool:
    """Say whether a tree stands below one of those that may be written to."""
    return any(root == tree or root in tree.parents for root in roots())


def read_whole(handle: int) -> bytes:
    """Return all that an open file holds; that it has nothing ready yet is an error (EAGAIN), and not its end.

    Raises:
        OSError: If it cannot be read, or is longer than anything read here.
    """
    pieces = []
    left = _MOST_BYTES
    while piece := os.read(handle, 1 << 16):
        pieces.append(piece)
        left -= len(piece)
        if left < 0:
            raise OSError(errno.EFBIG, os.strerror(errno.EFBIG))
    return b"".join(pieces)


def text_of(path: str | Path) -> str:
    """Return what one of the kernel's files holds, without the newline it adds.

    Raises:
        OSError: If it cannot be read.
    """
    # Not blocking, for a pipe in the place of a file must not hang its reader.
    handle = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        return read_whole(handle).decode(errors="replace").strip()
    finally:
        os.close(handle)


def read_recorded(controls: Controls, key: str) -> str:
    """Return what a control on record holds; no other file is read, for whoever can write records may have named it.

    Raises:
        OSError: If it cannot be read, or an error of ours.
        PermissionDenied: If it is no control.
    """
    known = getattr(controls, "located", None)
    return controls.read(key if known is None else known(key))


def present_start(controls: Controls, key: str) -> Start:
    """Return what tells the present start of a control's driver from the next; nothing where that cannot be told.

    Raises:
        OSError: If the control cannot be reached, or an error of ours.
    """
    known = getattr(controls, "start", None)
    return Start() if known is None else known(key)


_FACTORY = {
    "scaling_max_freq": ("cpuinfo_max_freq", max),
    "scaling_min_freq": ("cpuinfo_min_freq", min),
    "max_freq": ("available_frequencies", max),
    "min_freq": ("available_frequencies", min),
}
"""The file beside a control that says what its driver begins with.

Kernel documentation: admin-guide/pm/cpufreq.rst, ABI/testing/sysfs-class-devfreq.
"""


def factory(controls: Controls, key: str) -> str | None:
    """Return what a driver itself begins with, before anybody has set anything; None where nobody says.

    Raises:
        OSError: If it cannot be read, or an error of ours.
    """
    if (known := getattr(controls, "factory", None)) is not None and not key.startswith("/"):
        text: str | None = known(key)
        return text
    place, _, name = key.rpartition("/")
    beside, end = _FACTORY.get(name, ("", max))
    if beside:
        numbers = [int(each) for each in read_recorded(controls, f"{place}/{beside}").split() if each.isdecimal()]
    else:
        numbers = []
    if numbers:
        return str(end(numbers))
    return None


class SysFiles:
    """The files themselves, as the kernel shows them; no other file is ever written to."""

    def __init__(self) -> None:
        self._kernel_s: dict[int, bool] = {}

    def read(self, key: str) -> str:
        """Return what a file holds, without the newline the kernel adds.

        Raises:
            PermissionDenied: If it is a device node: some have no end, and opening alone starts a watchdog's clock. Or
                if it has no absolute path: what that is depends on the working folder.
        """
        if not key.startswith("/"):
            raise PermissionDenied(f"{key} is no control of a device, so it is not read")
        kind = os.stat(key).st_mode
        if stat.S_ISCHR(kind) or stat.S_ISBLK(kind):
            raise PermissionDenied(f"{key} is no control of a device, so it is not read")
        return text_of(key)

    def located(self, key: str) -> str:
        """Return where a control on record lies, by a path that nobody but the kernel can lead elsewhere meanwhile.

        Raises:
            OSError: If it is not there.
            PermissionDenied: If the kernel shows no device there, and no tree that was named holds it.
        """
        if not key.startswith("/"):
            return key  # no file
        handle = os.open(key, _O_PATH | os.O_CLOEXEC)  # opens nothing: no driver hears of it
        try:
            self._check(key, handle)
            return os.readlink(f"/proc/self/fd/{handle}") if self._is_kernel_s(handle) else key
        finally:
            os.close(handle)

    def start(self, key: str) -> Start:
        """Return the file's number: a driver loaded anew makes its files anew (fs/kernfs/inode.c, kernfs_get_inode)."""
        return Start(node=os.stat(key).st_ino)

    def write(self, key: str, text: str) -> None:
        """Write to a file in one system call; never creates it.

        Raises:
            PermissionDenied: If the kernel shows no device there, and no tree that was named holds it.
        """
        handle = os.open(key, os.O_WRONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        try:
            self._check(key, handle)
            written = os.write(handle, text.encode())
            if not self._is_kernel_s(handle):
                os.ftruncate(handle, written)  # afterwards: a file that took nothing keeps what it held
        finally:
            os.close(handle)

    def _check(self, key: str, handle: int) -> None:
        place = Path(os.readlink(f"/proc/self/fd/{handle}"))
        if self._is_kernel_s(handle):
            if not _FORBIDDEN.intersection(place.parts):
                return
        elif is_named(place):
            return
        raise PermissionDenied(
            f"{key} is no control of a device, so nothing is written there, nor read; should it belong to a planted "
            "board, name that board: polythrottle restore --device 'jetson?root=FOLDER'"
        )

    def _is_kernel_s(self, handle: int) -> bool:
        """Say whether a file lies where the kernel shows its devices: in sysfs or debugfs."""
        number = os.fstat(handle).st_dev
        if number not in self._kernel_s:  # asked once: later there may be no descriptor left to ask with
            self._kernel_s[number] = file_systems().get(number) in _KINDS
        return self._kernel_s[number]


_KINDS = {"sysfs", "debugfs"}  # not procfs: no clock or limit lies there, but /proc/sys/kernel/core_pattern does
_FORBIDDEN = {
    "uevent_helper",
    "firmware",
    "module",
    "provoke-crash",
    "bind",
    "unbind",
    "new_id",
    "remove_id",
    "reset",
} | {"driver_override", "remove", "rescan", "delete", "authorized", "sriov_numvfs"}
"""Parts of paths in sysfs and debugfs at or below which nothing is ever tuned, and much can be broken or taken away."""


def file_systems() -> dict[int, str]:
    """Return the kind of each mounted file system by its device number (proc_pid_mountinfo(5))."""
    found = {}
    for line in text_of("/proc/self/mountinfo").splitlines():
        fields = line.split(" ")
        major, _, minor = fields[2].partition(":")
        found[os.makedev(int(major), int(minor))] = fields[fields.index("-") + 1]
    return found
