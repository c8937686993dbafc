"""That a device is being steered, told by the kernel alone, whatever becomes of the state folder.

A writer, its guard and its keeper share a read lock on one byte of a file of the kernel's that nobody can delete. Which
byte follows from state folder and device. The lock belongs to an open file that the guard inherits (open file
description locks, fcntl(2)), so that it lasts as long as any of them. It is a second net: where the kernel gives none,
steering goes on without.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import re
import struct
from collections.abc import Collection, Iterator
from contextlib import suppress
from pathlib import Path

from polythrottle.actuation.drivers.controls import text_of
from polythrottle.actuation.state.site import Site

_FILE = "/proc/sys/kernel/random/boot_id"
# Numbers of fcntl.h, the same on every machine that Linux runs on, which Python before 3.9 does not name.
_SETLK = getattr(fcntl, "F_OFD_SETLK", 37)
_GETLK = getattr(fcntl, "F_OFD_GETLK", 36)
_DEVICES = 1 << 20  # bytes that one folder has
_FLOCK = "hhqqi"  # struct flock: type, whence, start, length, process
_READ_LOCK = re.compile(r"OFDLCK\s+ADVISORY\s+READ\s+\S+\s+\S+\s+(\d+)\s")


def announce(site: Site) -> int | None:
    """Show from now on that this process steers a device; returns the handle that does, None where nothing can."""
    with suppress(OSError):
        handle = os.open(_FILE, os.O_RDONLY | os.O_CLOEXEC)
        try:
            fcntl.fcntl(handle, _SETLK, _lock(fcntl.F_RDLCK, _place(site.folder, site.stem), 1))
        except OSError:
            os.close(handle)
            raise
        return handle
    return None


def steering(site: Site) -> tuple[int, ...]:
    """Return the processes of this user or root that have announced a device."""
    place = _place(site.folder, site.stem)
    return _processes(set(_locked(place, place + 1)))


def stray(folder: Path, known: Collection[str]) -> tuple[int, ...]:
    """Return the processes that have announced devices of a state folder whose files it does not have.

    Args:
        folder: As in `Site`.
        known: The stems of those that it has.
    """
    begin = _place(folder)
    there = {_place(folder, stem) for stem in known}
    return _processes(set(_locked(begin, begin + _DEVICES)) - there)


def gone_from(folder: Path, processes: Collection[int]) -> str:
    """Name processes that steer a device of which a state folder has lost what it knew."""
    numbers = " and ".join(map(str, sorted(processes)))
    if len(processes) > 1:
        return f"processes {numbers}, whose lease is gone from {folder}; what was changed is put back once they end"
    return f"process {numbers}, whose lease is gone from {folder}; what was changed is put back once it ends"


def _place(folder: Path, stem: str | None = None) -> int:
    """Return the byte of a device, or the first of its folder."""
    begin = int.from_bytes(hashlib.sha256(os.fsencode(folder)).digest()[:5], "big") * _DEVICES
    if stem is None:
        return begin
    device = stem.rpartition("@")[0]  # the machine's identity may change meanwhile
    return begin + int.from_bytes(hashlib.sha256(os.fsencode(device)).digest()[:4], "big") % _DEVICES


def _lock(kind: int, start: int, length: int) -> bytes:
    return struct.pack(_FLOCK, kind, os.SEEK_SET, start, length, 0)


def _locked(begin: int, end: int) -> Iterator[int]:
    """Yield the bytes of a range that anybody has locked."""
    with suppress(OSError):
        handle = os.open(_FILE, os.O_RDONLY | os.O_CLOEXEC)
        try:
            while begin < end:
                found = fcntl.fcntl(handle, _GETLK, _lock(fcntl.F_WRLCK, begin, end - begin))
                kind, _, start, length, _ = struct.unpack(_FLOCK, found)
                if kind == fcntl.F_UNLCK or not length:
                    return  # or up to the end of the file, as nobody here locks it
                yield start
                begin = max(begin, start) + length
        finally:
            os.close(handle)


def _processes(places: Collection[int]) -> tuple[int, ...]:
    """Return the processes of this user or root that hold locks: anybody can lock what anybody can read."""
    if not places:
        return ()
    return tuple(sorted(int(each) for each in os.listdir("/proc") if each.isdecimal() and _holds(each, places)))


def _holds(pid: str, places: Collection[int]) -> bool:
    with suppress(OSError):  # it has ended, or cannot be looked into
        if os.stat(f"/proc/{pid}").st_uid not in (os.geteuid(), 0):
            return False
        for handle in os.listdir(f"/proc/{pid}/fd"):
            with suppress(OSError):
                if os.readlink(f"/proc/{pid}/fd/{handle}") == _FILE:
                    locks = _READ_LOCK.findall(text_of(f"/proc/{pid}/fdinfo/{handle}"))
                    if any(int(each) in places for each in locks):
                        return True
    return False
