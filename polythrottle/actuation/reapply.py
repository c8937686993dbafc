"""The keeper: what was applied for good is set again once its driver or device has restarted.

As ``python -m polythrottle.actuation.reapply``.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Collection
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from polythrottle.actuation.audit import Audit
from polythrottle.actuation.drivers.all_controls import SystemControls
from polythrottle.actuation.drivers.controls import UNREADABLE, Controls, Start, present_start, read_recorded
from polythrottle.actuation.limits import Limits
from polythrottle.actuation.rollback import patiently
from polythrottle.actuation.state.lease import Fence, Lease, hold
from polythrottle.actuation.state.record import READY, Kept, Record, shown
from polythrottle.actuation.state.site import Site, contents
from polythrottle.domain.errors import BadFile, DeviceError, KnobRejected, PolythrottleError, StorageError
from polythrottle.storage.untrusted import printable

# The record and the lease of what stands applied, as its guard or keeper saw them last: deleted, they are laid anew.
#
# Else the next writer would take what was applied for the original, and a restore would say that nothing stands
# changed.


class StateCopy:
    """What is on disk of one lease that stands without its writer.

    Args:
        site: Of the device.
        boot_id: Of the running kernel.
        token: Of the lease.
        locked: Whether whoever looks is the device's only writer, and is to stay so.
    """

    def __init__(self, site: Site, boot_id: str, token: int, *, locked: bool) -> None:
        self._site = site
        self._boot_id = boot_id
        self._token = token
        self._locked = locked
        self._lease = b""
        self._record = b""

    def look(self) -> None:
        """Take a copy while the lease stands; lay it anew where its file is gone. What fails is tried at the next."""
        with suppress(OSError, PolythrottleError):
            text = contents(self._site.lease)
            if text is None:
                self._lay()
            elif self._parsed(text).token == self._token and self._parsed(text).holder:
                record = contents(self._site.record) or self._record
                self._lease = text  # only once both were read: the copies belong together
                self._record = record

    def _parsed(self, text: bytes) -> Lease:
        return Fence(self._site.lease, self._boot_id).parsed(text)

    def _lay(self) -> None:
        known = Record(self._site.record, None, self._boot_id, self._record)
        # Where the controls went with the folder, as in a test, there is nothing to be put back.
        if not self._lease or not any(os.path.exists(key) or not key.startswith("/") for key in known.entries):
            return
        self._site.prepare()
        if self._locked:
            lock = hold(self._site.lock, known.device, self._parsed(self._lease).holder)
            os.set_inheritable(lock, False)  # for as long as this process lives
        for file, text in ((self._site.record, self._record), (self._site.lease, self._lease)):
            new = file.with_name(f"{file.name}.{os.getpid()}")
            new.unlink(missing_ok=True)  # one that was killed here, or a link that somebody has planted
            handle = os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
            with os.fdopen(handle, "wb") as copy:
                copy.write(text)
            with suppress(FileExistsError):  # somebody has begun anew meanwhile
                os.link(new, file)
            new.unlink()


# What was applied for good stays true without the daemon: set anew once its driver, or its device, has started anew.
#
# The guard of a profile that was confirmed, or applied with ``--keep``, becomes its keeper: ``python -m
# polythrottle.actuation.reapply FOLDER STEM BOOT_ID TOKEN``. Every half minute it looks at what is on record as kept.
# A control that has lost its setting is set again only where its driver or its GPU has started anew since, and it
# holds what it held before anybody tuned it, or cannot be read: any other value is somebody's, and newer. The keeper
# ends with its lease. Between its looks it is no client of a driver, so that a GPU can sleep and be reset.

LOOK_S = 30.0
"""How often a keeper looks at the device."""

_LEASE_S = 0.5  # how often at its lease, which a restore ends


@dataclass(frozen=True)
class Lapse:
    """A control that no longer holds what was applied for good.

    Args:
        key: Which.
        applied: What it is to hold.
        found: What it holds; None if it cannot be reached.
        anew: Whether its driver or device has started anew since, and nobody has set it after that.
    """

    key: str
    applied: str
    found: str | None
    anew: bool = False

    def undone(self, record: Record) -> bool:
        """Say whether there is nothing to put back any more, so that nobody else would tell of it."""
        return self.found in (UNREADABLE, record.entries[self.key].original)

    def __str__(self) -> str:
        key = printable(self.key)
        applied = shown(self.applied)
        if self.found is None:
            return f"{key} cannot be reached, was set to {applied}"
        if self.anew:
            why = "its driver or device has started anew"
        else:
            why = "changed by someone else since"
        found = "may hold something else" if self.found == UNREADABLE else f"holds {shown(self.found)}"
        return f"{key} {found}, was set to {applied}: {why}"


def lapses(record: Record, controls: Controls) -> tuple[Lapse, ...]:
    """Return the controls that no longer hold what was applied for good.

    Args:
        record: Of the device; nothing is kept there while a writer has it.
        controls: How to reach it.
    """
    return tuple(lapse for key, kept in record.kept.items() if (lapse := _lapse(record, controls, key, kept)))


def _lapse(record: Record, controls: Controls, key: str, kept: Kept) -> Lapse | None:
    entry = record.entries.get(key)
    if entry is None:
        return None
    try:
        if entry.follows is not None and _read(controls, entry.follows[0]) == entry.follows[1]:
            return None
        found = _read(controls, key)
        if found == kept.text:
            return None
        anew = kept.start.is_over(_start(controls, key))
    except (DeviceError, KnobRejected):
        return Lapse(key, kept.text, None)
    if found == UNREADABLE:
        if anew:
            return Lapse(key, kept.text, found, anew=True)
        return None
    return Lapse(key, kept.text, found, anew=anew and found == entry.original)


def _read(controls: Controls, key: str) -> str:
    return patiently(f"cannot read {key}", lambda: read_recorded(controls, key))


def _start(controls: Controls, key: str) -> Start:
    return patiently(f"cannot look at {key}", lambda: present_start(controls, key))


class Keeper:
    """Sets anew what a start of its driver or device has undone, for as long as its lease is kept.

    Args:
        site: Of the device.
        boot_id: Of the running kernel.
        token: Of the lease.
        controls: How to reach the device; by default a client of its drivers only while it looks.
    """

    def __init__(self, site: Site, boot_id: str, token: int, controls: Controls | None = None) -> None:
        self._site = site
        self._boot_id = boot_id
        self._token = token
        self._fence = Fence(site.lease, boot_id)
        self._controls: Controls = controls if controls is not None else SystemControls(stays=False)
        self._seen: dict[str, Kept] = {}
        self._copy = StateCopy(site, boot_id, token, locked=False)

    @property
    def keeps(self) -> bool:
        """Whether the lease still stands, so that there is something to keep."""
        self._copy.look()
        try:
            lease = self._fence.read()
        except StorageError:
            return True  # a disk that is busy: nothing is written without the lease
        return lease.token == self._token and lease.kept

    def look(self) -> tuple[str, ...]:
        """Set anew what has lapsed and is nobody else's, and return which controls were.

        Raises:
            PolythrottleError: If the lease has passed to another, or state or device cannot be used at the moment.
        """
        with self._fence.closed(self._token):
            record = Record(self._site.record, None, self._boot_id)
            record.kept = {key: self._latest(key, kept) for key, kept in record.kept.items()}
            done = self._set_anew(record)
            if done:
                record.keep(record.kept)
            return done

    def _latest(self, key: str, kept: Kept) -> Kept:
        """Return what is kept, at the start as it was seen last: what is counted grows until the next one."""
        seen = self._seen.get(key)
        if seen is not None and not kept.start.is_over(seen.start):
            return seen
        return kept

    def _set_anew(self, record: Record) -> tuple[str, ...]:
        done: dict[str, None] = {}
        progress = True
        while progress:  # a control may take its value only after another has (a minimum below a maximum)
            lapsed = {each.key: each for each in lapses(record, self._controls)}
            progress = False
            for key in [key for key, each in lapsed.items() if each.anew and key not in done]:
                with suppress(BadFile, DeviceError, KnobRejected):
                    self._set(record, lapsed[key])
                    done[key] = None
                    progress = True
        self._note_starts(record, lapses(record, self._controls))
        return tuple(done)

    def _set(self, record: Record, lapse: Lapse) -> None:
        key = lapse.key
        text = lapse.applied
        audit = Audit(self._site.audit, record.device, self._boot_id)
        if why := Limits.read().refusal(key, text, self._controls):
            raise KnobRejected(f"{key} is not set to {text}, {why}")
        before = lapse.found or ""
        audit.intend(self._token, key, before, text)
        patiently(f"cannot write {text} to {key}", lambda: self._controls.write(key, text))
        kept = _read(self._controls, key)
        audit.found(self._token, key, before, kept)
        if kept not in (text, UNREADABLE):
            raise KnobRejected(f"{key}: wrote {text}, but it holds {kept}")
        record.kept = {**record.kept, key: Kept(text, _start(self._controls, key))}

    def _note_starts(self, record: Record, lapsed: Collection[Lapse]) -> None:
        lost = {each.key for each in lapsed}
        for key, kept in record.kept.items():
            with suppress(DeviceError, KnobRejected):
                if key not in lost:
                    self._seen[key] = Kept(kept.text, _start(self._controls, key))


def say_ready() -> None:
    """Tell whoever has started this process that it watches from now on; it may be heard by nobody."""
    with suppress(OSError):
        os.write(1, READY)
    with suppress(OSError):
        nobody = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nobody, 1)
        os.close(nobody)


def main(arguments: list[str]) -> None:
    """Keep what the lease that the arguments name is of."""
    folder, stem, boot_id, token = arguments
    keeper = Keeper(Site(Path(folder), stem), boot_id, int(token))
    looked_s = time.monotonic()
    say_ready()
    while keeper.keeps:
        if time.monotonic() - looked_s >= LOOK_S:
            with suppress(PolythrottleError):  # it is looked at again; doctor says what does not hold
                keeper.look()
            looked_s = time.monotonic()
        time.sleep(_LEASE_S)


if __name__ == "__main__":
    main(sys.argv[1:])
