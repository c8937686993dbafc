"""Every control put back to its original, compared first, past errors, in an order the driver accepts.

The audit of all writes.
"""

from __future__ import annotations

import errno
import json
import os
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from polythrottle.actuation.drivers.controls import UNREADABLE, Controls, read_recorded
from polythrottle.actuation.limits import Limits
from polythrottle.actuation.state.lease import Lease, lost
from polythrottle.actuation.state.record import Entry, Record, is_plain, shown
from polythrottle.actuation.state.site import Site, contents
from polythrottle.domain.errors import (
    BadFile,
    DeviceError,
    KnobRejected,
    PermissionDenied,
    PolythrottleError,
    StorageError,
)
from polythrottle.storage.untrusted import printable

# Put every control back to its original, compared first, past errors, in an order the driver accepts.

_FORBIDDEN = (errno.EACCES, errno.EPERM, errno.EROFS)
_GONE = (errno.ENOENT, errno.ENODEV, errno.ENXIO)
_PASSING = (errno.EAGAIN, errno.EBUSY, errno.EINTR)
_PAUSES_S = (0.001, 0.01, 0.05)

T = TypeVar("T")


@dataclass(frozen=True)
class Difference:
    """A control that is not as it was found, and why it was left so."""

    key: str
    original: str
    found: str | None
    reason: str

    def __str__(self) -> str:
        found = shown(self.found) if self.found else "nothing readable"
        return printable(f"{self.key} holds {found}, was {shown(self.original)}: {self.reason}")


@dataclass(frozen=True)
class Outcome:
    """What restoring a device came to.

    Args:
        device: Which.
        restored: The controls that were written back.
        foreign: Those left alone because someone else changed them since.
        failed: Those that could not be put back; they stay on record.
        damage: Lines of the record that could not be read.
        unverified: Controls that took their original but cannot be read back, so that nobody can know.
        lapsed: What no longer held what was applied for good, and holds its original already.
    """

    device: str
    restored: tuple[str, ...] = ()
    foreign: tuple[Difference, ...] = ()
    failed: tuple[Difference, ...] = ()
    damage: tuple[str, ...] = ()
    unverified: tuple[str, ...] = ()
    lapsed: tuple[str, ...] = ()

    @property
    def clean(self) -> bool:
        """Whether everything is as it was found."""
        return not self.left

    @property
    def left(self) -> tuple[str, ...]:
        """What is not as it was found, each in a line."""
        return (*map(str, self.failed), *map(str, self.foreign), *self.damage)

    def with_more(self, other: Outcome) -> Outcome:
        """Return what this restoring and another of the same device came to together."""
        return Outcome(
            other.device,
            self.restored + other.restored,
            self.foreign + other.foreign,
            self.failed + other.failed,
            self.damage + other.damage,
            self.unverified + other.unverified,
            self.lapsed + other.lapsed,
        )


def translated(what: str, err: OSError) -> PolythrottleError:
    """Return what an error of the kernel is in our terms."""
    if err.errno in _FORBIDDEN:
        return PermissionDenied(f"{what}: {err.strerror}; run as root, or grant this user the file with a udev rule")
    if err.errno in _GONE:
        return DeviceError(f"{what}: {err.strerror}; the device or its driver is gone")
    return KnobRejected(f"{what}: {err.strerror}")


def patiently(what: str, call: Callable[[], T], pause: Callable[[float], None] = time.sleep) -> T:
    """Return what a call on a control returns, tried again a few times while the driver is busy.

    Raises:
        KnobRejected: If the value is refused.
        PermissionDenied: If this process may not.
        DeviceError: If the device is gone.
    """
    for pause_s in (*_PAUSES_S, None):
        try:
            return call()
        except OSError as err:
            if err.errno not in _PASSING or pause_s is None:
                raise translated(what, err) from err
            pause(pause_s)
        except ValueError as err:  # a name that no file can have
            raise KnobRejected(f"{what}: {err}") from err
    raise AssertionError("unreachable")


class Rollback:
    """One restoring of one record.

    Args:
        record: What to put back.
        controls: How to reach the device.
        force: Whether to put back what someone else has changed too.
    """

    def __init__(self, record: Record, controls: Controls, *, force: bool = False) -> None:
        self._record = record
        self._controls = controls
        self._force = force
        self._limits = _limits()
        self._failed: dict[str, Difference] = {}
        self._foreign: dict[str, Difference] = {}
        self._restored: dict[str, None] = {}
        self._unverified: dict[str, None] = {}
        # A power mode rewrites the other controls, so that after one all of them are ours to put back.
        self._rewritten = any(entry.persistent for entry in record.entries.values())

    def run(self) -> Outcome:
        """Put everything back and return what came of it; again is the same as once."""
        for entry in self._record.entries.values():
            entry.done = entry.done and entry.neutral is not None  # what can be read is compared again
        # A control may only accept its original after another has its own (a minimum below a maximum).
        self._pass()
        progress = True
        while (self._failed or self._foreign) and progress:
            before = len(self._restored)
            self._pass()
            progress = len(self._restored) > before
        self._look_at_the_rest()
        return Outcome(
            self._record.device,
            tuple(key for key in self._restored if key not in self._failed),
            tuple(self._foreign.values()),
            tuple(self._failed.values()),
            self._record.damage,
            tuple(self._unverified),
        )

    def differences(self) -> tuple[Difference, ...]:
        """Return what does not hold its original, or cannot be read; nothing is written."""
        known = {key: entry for key, entry in self._record.entries.items() if not entry.done}
        if self._record.damage:  # what its lines said is known by the second copy alone
            known = {**{key: Entry(text) for key, text in self._record.originals.items()}, **known}
        return tuple(each for key, entry in known.items() if (each := self._difference(key, entry)) is not None)

    def _difference(self, key: str, entry: Entry) -> Difference | None:
        try:
            found = self._read(key)
            if found in (entry.original, UNREADABLE) or self._is_moot(entry):
                return None
            return Difference(key, entry.original, found, "changed by someone else since, left alone")
        except PermissionDenied:
            return None  # of a planted board that nobody has named here
        except (DeviceError, KnobRejected) as err:
            if key.startswith("/") and not key.startswith("/sys/") and not os.path.exists(key):
                return None  # of a tree of files that is gone
            return Difference(key, entry.original, None, str(err))

    def _pass(self) -> None:
        self._failed.clear()
        self._foreign.clear()
        for key, entry in self._ordered():
            self._one(key, entry)

    def _ordered(self) -> list[tuple[str, Entry]]:
        latest_first = list(reversed(self._record.entries.items()))
        return sorted(latest_first, key=lambda item: not item[1].persistent)

    def _one(self, key: str, entry: Entry) -> None:
        found = None
        try:
            if entry.done:
                return
            found = self._read(key)
            if found == entry.original or self._is_moot(entry):
                return
            if not self._is_ours(found, entry):
                reason = "changed by someone else since, left alone"
                self._foreign[key] = Difference(key, entry.original, found, reason)
                return
            if not self._force and (why := self._limits.refusal(key, entry.original, self._controls)):
                self._foreign[key] = Difference(key, entry.original, found, f"{why}: left alone")
                return
            self._write(key, entry, found)
        except (DeviceError, KnobRejected) as err:
            self._failed[key] = Difference(key, entry.original, found, str(err))

    def _is_ours(self, found: str, entry: Entry) -> bool:
        return self._force or self._rewritten or found == UNREADABLE or found in entry.written

    def _is_moot(self, entry: Entry) -> bool:
        """Say whether the value means nothing once the control it follows is back."""
        if entry.follows is None:
            return False
        key, free = entry.follows
        known = self._record.entries.get(key)
        return (known.original if known else self._record.originals.get(key, self._read(key))) == free

    def _write(self, key: str, entry: Entry, found: str) -> None:
        patiently(f"cannot write {entry.original} to {key}", lambda: self._controls.write(key, entry.original))
        self._restored[key] = None
        kept = self._read(key)
        if kept in (entry.original, UNREADABLE):
            if kept == UNREADABLE:
                self._unverified[key] = None
                entry.done = True
            self._record.mark_restored(key)
            return
        entry.written.add(kept)
        self._failed[key] = Difference(key, entry.original, kept, "the original was not accepted")

    def _read(self, key: str) -> str:
        return patiently(f"cannot read {key}", lambda: read_recorded(self._controls, key))

    def _look_at_the_rest(self) -> None:
        """Name what differs though no line says we wrote it; put it back where a mode switch rewrote it."""
        for key, original in self._record.originals.items():
            if key in self._record.entries:
                continue
            try:
                found = self._read(key)
            except (DeviceError, KnobRejected) as err:
                self._failed[key] = Difference(key, original, None, str(err))
                continue
            if found in (original, UNREADABLE):
                continue
            if self._rewritten or self._force:
                self._one(key, Entry(original, {found}))
            else:
                reason = "no line on record says who changed it, left alone; restore --force puts it back"
                self._foreign[key] = Difference(key, original, found, reason)


def _limits() -> Limits:
    """Return the administrator's limits; none where nobody can tell what they are, for then nothing is set but here."""
    try:
        return Limits.read()
    except BadFile:
        return Limits()


def put_back(record: Record, controls: Controls, *, force: bool = False) -> Outcome:
    """Put every control of a record back, and forget the record where nothing failed.

    Args:
        record: The originals.
        controls: How to reach the device.
        force: Whether to put back what someone else has changed since too.

    Raises:
        StorageError: If everything is back but the record cannot be removed.
    """
    outcome = Rollback(record, controls, force=force).run()
    if not outcome.failed:
        try:
            record.remove(left={each.key: each.original for each in outcome.foreign})
        except StorageError as err:
            raise StorageError("; ".join([str(err), *map(str, outcome.foreign)])) from err
    return outcome


# The audit: who wrote what to a device, when, under which lease; appended, for people to read.

_MOST_BYTES = 4_000_000
# Not blocking, for a pipe in the place of the file must not hang its writer.
_FLAGS = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC


class Audit:
    """The audit file of one device. It is evidence, not state: where it cannot be written, work goes on.

    Args:
        file: Where; at 4 MB it is put aside as ``.audit.1`` and begun anew.
        device: Whose.
        boot_id: Of the running kernel; stands in each line, for what another kernel wrote it has forgotten.
    """

    def __init__(self, file: Path, device: str, boot_id: str = "") -> None:
        self._file = file
        self._older = file.with_suffix(".audit.1")
        self._device = device
        self._boot_id = boot_id

    def intend(self, token: int, key: str, before: str, text: str) -> None:
        """Append one write to come: what the control holds, what will be written."""
        self._append({"event": "set", "token": token, "key": key, "before": before, "to": text})

    def found(self, token: int, key: str, before: str, found: str) -> None:
        """Append what was read back after a write."""
        self._append({"event": "found", "token": token, "key": key, "before": before, "to": found})

    def restored(self, token: int, outcome: Outcome) -> None:
        """Append what a restoring came to."""
        left = [str(each) for each in (*outcome.foreign, *outcome.failed)]
        failed = [each.key for each in outcome.failed]
        restored = list(outcome.restored)
        self._append({"event": "restore", "token": token, "restored": restored, "left": left, "failed": failed})

    def note(self, token: int, event: str) -> None:
        """Append something that happened to the lease."""
        self._append({"event": event, "token": token})

    def unsettled(self, lease: Lease) -> dict[str, Entry]:
        """Return what was written in this boot and may not be back, with what was there before, as this file tells.

        Under whichever lease: one that failed to restore has taken another's place.

        Args:
            lease: As it stands. One that is clean has nothing; one without a token was deleted or damaged, if there
                ever was one.
        """
        found: dict[str, Entry] = {}
        if not lease.dirty and lease.token:
            return found
        for line in self._of_boot(lease):
            failed = line.get("failed")
            if line.get("event") == "restore" and isinstance(failed, list):
                found = {key: entry for key, entry in found.items() if key in failed}
            _note(found, line)
        return found

    def settles(self, lease: Lease) -> bool:
        """Say whether the last that was told under a lease is that everything is back, though it still is dirty."""
        if not lease.dirty:
            return False
        told = [line for line in self._of_boot(lease) if line.get("token") == lease.token]
        last = told[-1] if told else {}
        return last.get("event") == "restore" and last.get("failed") == []

    def _of_boot(self, lease: Lease) -> Iterator[dict[str, Any]]:
        """Yield the lines of this boot; those of earlier versions, which name none, count under their own lease."""
        for line in (*_lines(self._older), *_lines(self._file)):
            known = line.get("boot_id")
            if known == self._boot_id or (known is None and line.get("token") == lease.token):
                yield line

    def _append(self, line: dict[str, Any]) -> None:
        lines = [line]
        with suppress(OSError):
            handle = os.open(self._file, _FLAGS, 0o600)
            try:
                if full := os.fstat(handle).st_size > _MOST_BYTES:  # what is put aside next has been told again by then
                    lines += self._carried(int(line["token"]))
                os.write(handle, "".join(map(self._text, lines)).encode())
                if full:
                    self._file.rename(self._older)
            finally:
                os.close(handle)

    def _text(self, line: dict[str, Any]) -> str:
        time_s = time.strftime("%Y-%m-%dT%H:%M:%S%z")
        head = {"time": time_s, "boot_id": self._boot_id, "device": self._device, "pid": os.getpid()}
        return json.dumps({**head, **line}) + "\n"

    def _carried(self, token: int) -> Iterator[dict[str, Any]]:
        """Yield lines that say all that may not be back, for lines before them to be forgotten."""
        for key, entry in self.unsettled(Lease(token, self._boot_id, dirty=True)).items():
            for text in sorted(entry.written):
                yield {"event": "carried", "token": token, "key": key, "before": entry.original, "to": text}

    @property
    def device(self) -> str | None:
        """Whose audit it is, as its last line of this boot says; None if none does."""
        names = [line["device"] for line in self._of_boot(Lease(0, self._boot_id)) if is_plain(line.get("device"))]
        return names[-1] if names else None


def known_besides(
    site: Site, record: Record, lease: Lease, audit: Audit
) -> tuple[Mapping[str, Entry], tuple[str, ...]]:
    """Return what the audit knows of controls that may not be back, and what nobody knows any more.

    Args:
        site: Of the device.
        record: What is on record.
        lease: Of whoever steered it last.
        audit: Of the device.
    """
    audited = audit.unsettled(lease)
    return audited, lost(site, record, lease, bool(audited) or audit.settles(lease))


def _lines(file: Path) -> Iterator[dict[str, Any]]:
    """Yield the lines of an audit that can be read."""
    text = b""
    with suppress(OSError, StorageError):
        text = contents(file) or b""
    for each in text.splitlines():
        with suppress(ValueError, RecursionError):
            line = json.loads(each)
            if isinstance(line, dict):
                yield line


def _note(found: dict[str, Entry], line: Mapping[str, Any]) -> None:
    """Add the write that a line of an audit tells of, if it does."""
    key, before, to = (line.get(name) for name in ("key", "before", "to"))
    if line.get("event") in ("set", "found", "carried") and all(map(is_plain, (key, before, to))):
        entry = found.setdefault(str(key), Entry(str(before)))
        entry.written.add(str(to))
        if line["event"] == "carried":  # the first line of all may be gone by now
            entry.original = str(before)
