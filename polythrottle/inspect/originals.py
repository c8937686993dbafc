"""What stands changed on this machine, and whether the place where originals are kept can be trusted."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from pathlib import Path

from polythrottle.actuation import Limits, Standing, standing
from polythrottle.actuation.drivers.controls import file_systems
from polythrottle.actuation.restore import lapsed
from polythrottle.actuation.state.site import machine
from polythrottle.domain.errors import PolythrottleError
from polythrottle.domain.ports import Finding
from polythrottle.storage.paths import state_dir
from polythrottle.storage.untrusted import printable

_RESTORE = "polythrottle restore"
_LEAST_BYTES = 1_000_000
ABOUT_RECORDS = frozenset({"originals", "state folder", "promise", "limits"})
"""Subjects of findings that are about the records as a whole; every other subject is a device that stands changed."""
_FORGETFUL = {"tmpfs", "ramfs"}
_REMOTE = {"nfs", "nfs4", "cifs", "smb3", "9p", "ceph", "fuse.sshfs"}


def record_findings() -> tuple[Finding, ...]:
    """Return what stands changed, by whom and until when, and whether the state folder is fit to keep it."""
    try:
        stands = tuple(_told(each) for each in standing())
    except PolythrottleError as err:
        stands = (Finding("originals", False, _line(err)),)
    return (*(stands or (Finding("originals", True, "nothing stands changed"),)), *_state(), _limits())


def _told(each: Standing) -> Finding:
    lease = each.lease
    count = f"{len(each.keys)} control{'s' * (len(each.keys) != 1)}"
    since = f" since {lease.since}" * bool(lease.since)
    # A planted board is restored only where it is named.
    restore = _RESTORE
    if " /" in each.device:
        restore = f"{_RESTORE} --device '{each.device}'"
    if each.damage:
        return Finding(each.device, False, f"the record of originals is damaged: {each.damage[0]}", restore)
    if lease.applied and lease.kept:
        return _kept(each, f"{lease.holder} stands{since} ({count})", f"{restore} gives it back")
    if lease.applied and each.expires_in_s is not None and each.expires_in_s > 0:
        told = f"{lease.holder} stands{since} ({count}) and reverts in {each.expires_in_s:.0f} s"
        return Finding(each.device, None, told, "polythrottle apply --confirm lets it stand")
    if lease.alive:
        return Finding(each.device, None, f"is being steered by {lease.holder}{since} ({count} changed)")
    by = "a process that is gone"
    if lease.holder:
        by = f"{lease.holder}, which is dead"
    return Finding(each.device, False, f"{count} changed by {by},{since or ' some time ago'}", restore)


def _kept(each: Standing, told: str, remedy: str) -> Finding:
    """Tell of what was applied for good: whether it still holds, and whether somebody keeps it."""
    if lapses := lapsed(each.device):
        return Finding(each.device, False, f"{told}, but {printable('; '.join(map(str, lapses)))}", remedy)
    if each.keys and not each.lease.alive:
        told += "; its keeper has died, so that nothing sets it anew should a driver or a GPU start anew"
    return Finding(each.device, None, told, remedy)


def _state() -> Iterator[Finding]:
    """Tell whether originals can be kept: the folder, or the nearest one above it that is there."""
    try:
        folder = state_dir()
        here = next(each for each in (folder, *folder.parents) if each.exists())
        found = here.stat()
        room = os.statvfs(here)
    except (PolythrottleError, OSError) as err:
        yield Finding("state folder", False, _line(err))
        return
    made = " (it will be made)" if here != folder else ""
    choose = "set POLYTHROTTLE_STATE_DIR to a folder of your own"
    if not stat.S_ISDIR(found.st_mode) or not os.access(here, os.W_OK | os.X_OK):
        yield Finding("state folder", False, f"{here} cannot be written", choose)
    elif found.st_mode & stat.S_IWOTH and not found.st_mode & stat.S_ISVTX:
        yield Finding("state folder", False, f"anyone may write in {here}", f"chmod o-w {here}, or {choose}")
    elif room.f_bavail * room.f_frsize < _LEAST_BYTES:
        yield Finding("state folder", False, f"the disk that holds {here} is full", "make room there")
    else:
        yield Finding("state folder", True, f"{folder}{made}")
        yield from _promises(here)


def _promises(folder: Path) -> Iterator[Finding]:
    """Tell which promise does not hold here because of where originals are kept, and why."""
    try:
        kind = file_systems().get(folder.stat().st_dev, "")
    except (OSError, ValueError):
        return
    move = "set POLYTHROTTLE_STATE_DIR to a folder on this machine's disk"
    if kind in _FORGETFUL:
        told = f"{folder} is on {kind}: what outlives a reboot (a power mode) is not put back after a power cut"
        yield Finding("promise", None, told, move)
    elif kind == "overlay":
        told = f"{folder} is a container's own: what is on record is lost with the container"
        yield Finding("promise", None, told, "mount a folder of the host's there, as docs/deploy.md shows")
    elif kind in _REMOTE:
        told = f"{folder} is on {kind}: two writers may not see each other's locks, and a server away stops steering"
        yield Finding("promise", None, told, move)
    if machine().startswith("boot-"):
        told = "/etc/machine-id says nothing, so that after a reboot nobody knows whose a power mode on record is"
        yield Finding("promise", None, told, "systemd-machine-id-setup makes one")


def _limits() -> Finding:
    try:
        bounds = Limits.read().bounds
    except PolythrottleError as err:
        return Finding("limits", False, _line(err))
    told = ", ".join(f"{kind} ({', '.join(table)})" for kind, table in bounds.items())
    if not told:
        return Finding("limits", True, "the administrator set none")
    return Finding("limits", True, f"the administrator's are kept: {told}")


def _line(err: Exception) -> str:
    return " ".join(str(err).split())
