"""Write to a device so that every value can be put back, whatever dies in between."""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING

from polythrottle.actuation.audit import Audit, known_besides
from polythrottle.actuation.drivers.all_controls import SystemControls
from polythrottle.actuation.drivers.controls import UNREADABLE, Control, Controls, Setting, present_start
from polythrottle.actuation.limits import Limits
from polythrottle.actuation.rollback import Difference, Outcome, patiently, put_back
from polythrottle.actuation.state.lease import (
    LEASE_S,
    Fence,
    Passed,
    Stuck,
    boot_s,
    claimed,
    hold,
    name_holder,
    one_line,
    start_of,
)
from polythrottle.actuation.state.presence import announce, gone_from, steering
from polythrottle.actuation.state.record import Kept, Record
from polythrottle.actuation.state.site import Site
from polythrottle.actuation.state.site import boot_id as running_boot_id
from polythrottle.actuation.systemd import DescriptorStore
from polythrottle.actuation.watchdog import Watchdog, start_guard
from polythrottle.domain.errors import BadFile, DeviceError, KnobRejected, PolythrottleError, StorageError, note_left

if TYPE_CHECKING:
    from typing_extensions import Self


_entered: weakref.WeakSet[Actuator] = weakref.WeakSet()
_for_whom: ContextVar[str] = ContextVar("_for_whom", default="")


@contextmanager
def acting_for(holder: str) -> Iterator[None]:
    """Have devices that are opened meanwhile be steered in somebody's name, which others are told.

    Args:
        holder: Who it is, for people; "" for this process.
    """
    token = _for_whom.set(holder)
    try:
        yield
    finally:
        _for_whom.reset(token)


def _leave_all_to_parent() -> None:
    """Let go, in a child that was just forked, of what is its parent's: else locks outlive those who took them."""
    for each in list(_entered):
        each._leave_to_parent()
    _entered.clear()


os.register_at_fork(after_in_child=_leave_all_to_parent)


class Actuator:
    """The only writer of one device: saves originals first, writes, reads back, restores.

    A context manager. Entering makes this process the device's only writer and first puts back what a process that died
    left changed; leaving restores everything. Nothing is ever written but what `allow` has named.

    Args:
        device: Identity of the device, the same at each start.
        state: Folder for the record of originals; by default ``originals`` in `state_dir`.
        controls: How to reach the device.
        boot_id: Of the running kernel; read from it by default.
        guarded: Whether a process of its own restores the device should this one die or hang.
        holder: Who writes, for others to read; by default whom `acting_for` names, or this process.
    """

    def __init__(
        self,
        device: str,
        *,
        state: Path | None = None,
        controls: Controls | None = None,
        boot_id: str | None = None,
        guarded: bool = True,
        holder: str = "",
    ) -> None:
        self.device = device
        self.differences: tuple[Difference, ...] = ()
        self.unverified: tuple[str, ...] = ()
        self._site = Site.of(device, state)
        self._controls: Controls = controls if controls is not None else SystemControls()
        self._boot_id = boot_id
        self._guarded = guarded
        self._holder = one_line(holder or _for_whom.get()) or f"process {os.getpid()}"
        self._allowed: dict[str, Control] = {}
        self._lock: int | None = None
        self._spare: int | None = None
        self._presence: int | None = None
        self._process = 0
        self._leaving = False
        self._record: Record | None = None
        self._fence: Fence | None = None
        self._token = 0
        self._dirty = False
        self._wrote: dict[str, str] = {}
        self._watch: Watchdog | None = None
        self._audit = Audit(self._site.audit, device)
        self._store = DescriptorStore(self._site)

    def allow(self, *controls: Control) -> None:
        """Name controls that may be written, and what may be written there; all else is refused."""
        for control in controls:
            self._allowed[control.key] = control

    def original(self, key: str) -> str:
        """Return what a control held before anyone tuned it: as recorded if a record stands, else as it is now.

        Raises:
            DeviceError: If it cannot be read.
            StorageError: If a record stands and cannot be read.
        """
        record = self._record or Record(self._site.record, self.device, self._boot())
        entry = record.entries.get(key)
        if entry is not None:
            return entry.original
        # A power mode that was switched has rewritten controls which no line names.
        switched = any(each.persistent for each in record.entries.values())
        if switched and key in record.originals:
            return record.originals[key]
        return self.live(key)

    def live(self, key: str) -> str:
        """Return what a control holds now; `UNREADABLE` where nobody can know.

        Raises:
            DeviceError: If it cannot be read.
        """
        return patiently(f"cannot read {key}", lambda: self._controls.read(key))

    def altered(self) -> tuple[str, ...]:
        """Return the controls that no longer hold what was written last; those nobody can read are left out.

        Raises:
            DeviceError: If none of them can be reached any more.
        """
        changed = []
        lost = []
        for key, text in self._wrote.items():
            follows = self._allowed[key].follows
            try:
                if follows is not None and self.live(follows[0]) == follows[1]:
                    continue
                if self.live(key) not in (text, UNREADABLE):
                    changed.append(key)
            except DeviceError as err:
                lost.append(err)  # the clock of a core that is offline has no file
        if lost and len(lost) == len(self._wrote):
            raise lost[0]
        return tuple(changed)

    def _boot(self) -> str:
        if self._boot_id is not None:
            return self._boot_id
        return running_boot_id()

    def __enter__(self) -> Self:
        self._site.prepare()
        self._process = os.getpid()
        self._leaving = False
        self._audit = Audit(self._site.audit, self.device, self._boot())
        self._lock = hold(self._site.lock, self.device, self._holder)
        try:
            with suppress(OSError):
                self._spare = os.open("/dev/null", os.O_RDONLY | os.O_CLOEXEC)
            _entered.add(self)
            self._fence = Fence(self._site.lease, self._boot())
            self._refuse_if_steered(self._fence)
            self._presence = announce(self._site)
            self._fence.keep()
            self._take_up(self._fence)
            self.restore()
        except BaseException:
            self._release()
            raise
        return self

    def _refuse_if_steered(self, fence: Fence) -> None:
        """Refuse where another still steers the device, whose lease was lost: what holds is no original."""
        if not fence.read().token and (processes := steering(self._site)):
            raise DeviceError(f"{self.device} is being steered by {gone_from(self._site.folder, processes)}")

    def _take_up(self, fence: Fence) -> None:
        """Take the lease, and what a writer that died has left on record."""
        left = fence.read()
        if left.kept:
            raise DeviceError(f"{self.device} is held by {left.holder}; polythrottle restore gives it back")
        record = Record(self._site.record, self.device, self._boot())
        if record.damage:
            raise BadFile(f"{record.damage[0]}; run polythrottle restore, which puts back what it can")
        audited, gone = known_besides(self._site, record, left, self._audit)
        if gone:  # what holds now would be taken for the originals
            raise BadFile(f"{gone[0]}; run polythrottle restore, after which what holds then counts as found")
        record.adopt(audited)
        try:
            self._site.left.unlink(missing_ok=True)
        except OSError as err:
            raise StorageError(f"cannot remove {self._site.left}: {err.strerror}; move it away") from err
        self._dirty = bool(record.entries)
        # It has no end: until something is written nobody has to put anything back.
        self._token = fence.take(self._holder, None, dirty=self._dirty)
        self._record = record

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._process != os.getpid():
            return  # it was left to the process that entered as soon as this one was forked
        self._leaving = True
        self._free_spare()
        try:
            self.restore()
        except (StorageError, Stuck):
            self._leave_to_guard()
            raise
        except PolythrottleError:
            if _starved():
                self._leave_to_guard()
            raise  # what is left stays on record
        except BaseException:
            self._leave_to_guard()  # a second Ctrl-C, in the middle of restoring
            raise
        finally:
            self._release()

    def _free_spare(self) -> None:
        """Leave a descriptor to restoring, should the process have used up all others."""
        if self._spare is not None:
            os.close(self._spare)
            self._spare = None

    def _leave_to_guard(self) -> None:
        """Keep the lease and its guard, which restores what is left: it knows the record too."""
        if self._watch is not None and self._fence is not None:
            self._watch.forsake()
            self._fence.let_go()
            self._watch = None
            self._fence = None

    def _leave_to_parent(self) -> None:
        """Close what a fork has copied: device, lease and guard are those of the process that entered."""
        if self._watch is not None:
            self._watch.disown()
            self._watch = None
        self._close()

    def _close(self) -> None:
        """Close all that keeps the device, and end nothing by it."""
        self._record = None
        self._free_spare()
        if self._fence is not None:
            self._fence.let_go()
            self._fence = None
        self._let_others_in()

    def _release(self) -> None:
        taken = self._record is not None
        left = self._record is not None and bool(self._record.entries)
        self._record = None
        self._store.end(forget=not left)
        if self._watch is not None:
            self._watch.stop()
            self._watch = None
        if self._fence is not None:
            with suppress(StorageError, Stuck):  # it runs out by itself
                if taken:
                    self._fence.release(self._token, settled=not self._dirty)
        self._close()

    def _let_others_in(self) -> None:
        for handle in (self._presence, self._lock):
            if handle is not None:
                os.close(handle)
        self._presence = None
        self._lock = None
        _entered.discard(self)

    def write(self, key: str, text: str) -> None:
        """Set one control; as `apply` does."""
        self.apply((Setting(key, text),))

    def apply(self, settings: Sequence[Setting]) -> None:
        """Set controls in the order given, their originals safe on disk before the first, each read back.

        Raises:
            KnobRejected: If a value may not be written, or the driver refuses, rounds or ignores it.
            PermissionDenied: If this process may not write it.
            DeviceError: If the device is gone, was not entered, or another has taken over.
            StorageError: If the originals cannot be saved or the lease cannot be kept; nothing is written then.
        """
        if self._process not in (0, os.getpid()):
            raise DeviceError(f"{self.device} is steered by process {self._process}, which has forked this one")
        if self._record is None or self._fence is None:
            raise DeviceError(f"{self.device} must be entered (with device: …) before it is steered")
        if self._watch is not None:
            self._watch.check()
        for setting in settings:
            self._check(setting)
        with self._fence.closed(self._token) as found:
            if self._leaving:  # another thread has put everything back since this one was asked
                raise DeviceError(f"{self.device} is being left, by another thread; nothing more is set")
            lease = found
            held = {setting.key: self.live(setting.key) for setting in settings}
            moved = _needed(settings, held)
            self._expect(settings)
            if not moved:
                return
            if self._guarded and self._watch is None:  # the guard and the heartbeat begin with the first record
                lease = replace(found, expires_s=boot_s() + LEASE_S)
                self._fence.change_closed(lease)
            self._save(self._record, moved, held)
            if not self._dirty:  # not before the originals are safe: a writer that dies there has changed nothing
                self._fence.change_closed(lease, dirty=True)
                self._dirty = True
            for setting in moved:
                self._put(self._record, setting, held[setting.key])
                held[setting.key] = setting.text

    def _expect(self, settings: Sequence[Setting]) -> None:
        """Note what the controls are to hold from now on."""
        if any(self._allowed[each.key].persistent for each in settings if self._wrote.get(each.key) != each.text):
            self._wrote.clear()  # a power mode that is switched rewrites the others
        self._wrote.update({each.key: each.text for each in settings})

    def _before(self, key: str, held: str) -> str:
        """Return what a control held, as the text that puts it back."""
        neutral = self._allowed[key].neutral
        if neutral is not None and held == UNREADABLE:
            return neutral
        return held

    def _check(self, setting: Setting) -> None:
        control = self._allowed.get(setting.key)
        if control is None:
            raise KnobRejected(f"{setting.key} is not a control of {self.device}; nothing was written")
        if setting.text not in control.allowed and setting.text != control.neutral:
            raise KnobRejected(f"{setting.text} is not among the values {setting.key} may take; nothing was written")

    def _save(self, record: Record, moved: Sequence[Setting], held: dict[str, str]) -> None:
        writes = [
            (self._allowed[setting.key], self._before(setting.key, held[setting.key]), setting.text)
            for setting in moved
        ]
        if self._guarded and self._watch is None and self._fence is not None:
            self._watch = Watchdog(
                self._site, self._fence, self._token, self._boot(), lambda: record.text, presence=self._presence
            )
        if self._fence is not None and self._fence.handle is not None:
            self._store.begin(self._fence.handle, self._token, record.text)
        record.listener = self._tell
        new = [setting.key for setting in moved if setting.key not in record.entries]
        self._refuse_if_stuck({key: held[key] for key in new})
        if not new:
            record.note(writes)
            return
        with claimed(self._site, new, self._boot()) as elsewhere:
            record.note(writes, {} if record.entries else self._everything(held, elsewhere))

    def _refuse_if_stuck(self, held: dict[str, str]) -> None:
        """Refuse to change what the administrator's limits would not let be put back."""
        limits = Limits.read() if held else Limits()
        for key, text in held.items():
            if why := limits.refusal(key, text, self._controls):
                raise KnobRejected(f"{key} holds {text}, {why}, so that it could not be put back; bring it within them")

    def _tell(self, text: bytes) -> None:
        """Tell those who know the record too, before it goes on disk."""
        self._store.tell(text)
        if self._watch is not None:
            self._watch.tell(text)

    def _everything(self, held: dict[str, str], elsewhere: Callable[[str], bool]) -> dict[str, str]:
        """Return what every control holds that can be read: a second copy, should a line be damaged.

        What another device's writer has changed is no original, and is left out.
        """
        found = {}
        for key, control in self._allowed.items():
            with suppress(DeviceError, KnobRejected):
                if control.follows is None and not elsewhere(key):
                    found[key] = self._before(key, held[key] if key in held else self.live(key))
        return found

    def _put(self, record: Record, setting: Setting, before: str) -> None:
        key = setting.key
        text = setting.text
        self._audit.intend(self._token, key, self._before(key, before), text)
        patiently(f"cannot write {text} to {key}", lambda: self._controls.write(key, text))
        kept = self.live(key)
        self._audit.found(self._token, key, self._before(key, before), kept)
        if kept not in (text, UNREADABLE):
            record.note([(self._allowed[key], before, kept)])
            raise KnobRejected(f"{key}: wrote {text}, but it holds {kept}")

    def restore(self) -> None:
        """Put every control back to its original, last written first; again is the same as once.

        A control that holds a value this record does not know was changed by someone else: it is left alone and added
        to ``differences``. What cannot be put back stays on record for the next time.

        Raises:
            DeviceError: If a control could not be put back; names each.
            PermissionDenied: If that is for want of rights.
        """
        if self._record is None or self._fence is None:
            return
        self._wrote.clear()
        if self._record.void:
            self._record.remove()
        if not self._record.entries:
            return
        try:
            with self._fence.closed(self._token, ending=True):
                outcome = put_back(self._record, self._controls)
        except Passed as err:
            raise Passed(f"{err}{self._still_set(self._record)}") from err
        self._account_for(outcome)
        self._dirty = False
        with suppress(StorageError, Passed):  # everything is back, and would be found so
            self._fence.change(self._token, dirty=False)

    def _still_set(self, record: Record) -> str:
        """Name the controls that hold what was written here, where another is to put them back, or nobody is."""
        held = []
        for key, entry in record.entries.items():
            with suppress(DeviceError):
                if self.live(key) in entry.written - {entry.original}:
                    held.append(key)
        if held:
            return f"; still as set here: {', '.join(held)}"
        return ""

    def _account_for(self, outcome: Outcome) -> None:
        self._audit.restored(self._token, outcome)
        self.differences += outcome.foreign
        note_left(self.device, outcome.foreign)
        self.unverified = outcome.unverified
        if outcome.failed:
            raise DeviceError(f"{self.device} is not restored; {'; '.join(map(str, outcome.failed))}")

    def hand_over(self, holder: str, seconds: float | None, confirmed_s: float | None = None) -> None:
        """Leave the settings in place and end this actuator; a guard reverts them unless they are confirmed.

        Those that are to stand for good it keeps: what a driver that starts anew forgets is set again.

        Args:
            holder: What holds the device from now on, such as the profile's name.
            seconds: When to revert; None is at the next restore or reboot.
            confirmed_s: How long they stand once confirmed, in seconds; None is until a restore.

        Raises:
            DeviceError: If the device was not entered, or no guard can be started.
            StorageError: If what is to stand cannot be noted.
        """
        if self._record is None or self._fence is None or self._lock is None:
            raise DeviceError(f"{self.device} must be entered before it is handed over")
        if self._watch is not None:
            self._watch.rest()  # its guard goes on: until the next one has begun it reverts, should this process die
        holder = one_line(holder)
        name_holder(self._lock, holder)
        self._leaving = True
        with self._fence.closed(self._token):
            self._record.keep(self._to_stand(self._record))
        expires_s = None if seconds is None else boot_s() + LEASE_S
        self._fence.change(
            self._token, holder=holder, applied=True, kept=seconds is None, expires_s=expires_s, pid=0, started=0
        )
        begun: dict[str, object] = {}
        if seconds is not None or self._record.kept:
            lock = None if seconds is None else self._lock  # for good it stands by its lease alone
            pid = start_guard(
                self._site, self._token, self._boot(), lock=lock, known=self._record.text, presence=self._presence
            )
            begun = {"pid": pid, "started": start_of(pid) or 0, "confirmed_s": confirmed_s}
        if self._watch is not None:
            self._watch.stop()
            self._watch = None
        expires_s = None if seconds is None else boot_s() + seconds
        self._fence.change(self._token, expires_s=expires_s, **begun)
        self._close()

    def _to_stand(self, record: Record) -> dict[str, Kept]:
        """Return what the controls that were changed are to hold, and since which start of their driver."""
        return {
            key: Kept(text, patiently(f"cannot look at {key}", partial(present_start, self._controls, key)))
            for key, text in self._wrote.items()
            if key in record.entries
        }


class ActuatedDevice:
    """What every device has that writes through an actuator; its own one is `_actuator`."""

    _actuator: Actuator

    @property
    def differences(self) -> tuple[Difference, ...]:
        """What was left changed on restoring because someone else had set it since."""
        return self._actuator.differences

    def hand_over(self, holder: str, seconds: float | None, confirmed_s: float | None = None) -> str:
        """Leave the settings in place under a guard; see `polythrottle.domain.ports.Lasting`.

        Raises:
            DeviceError: If the device was not entered.
        """
        self._actuator.hand_over(holder, seconds, confirmed_s)
        return self._actuator.device


def _starved() -> bool:
    """Say whether this process can open nothing more."""
    try:
        os.close(os.open("/dev/null", os.O_RDONLY | os.O_CLOEXEC))
    except OSError:
        return True
    return False


def _needed(settings: Sequence[Setting], held: dict[str, str]) -> list[Setting]:
    """Return the writes that change something, given what holds before the first."""
    now = dict(held)
    moved = []
    for setting in settings:
        if now[setting.key] != setting.text:
            moved.append(setting)
            now[setting.key] = setting.text
    return moved
