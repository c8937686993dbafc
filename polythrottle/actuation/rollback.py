"""Every control put back to its original, compared first, past errors, in an order the driver accepts."""

from __future__ import annotations

import errno
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

from polythrottle.actuation.drivers.controls import UNREADABLE, Controls, read_recorded
from polythrottle.actuation.limits import Limits
from polythrottle.actuation.state.record import Entry, Record, shown
from polythrottle.domain.errors import (
    BadFile,
    DeviceError,
    KnobRejected,
    PermissionDenied,
    PolythrottleError,
    StorageError,
)
from polythrottle.storage.untrusted import printable

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
