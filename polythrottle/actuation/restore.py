"""Put back what stands changed, from the records alone: no daemon, no network, no device object.

Also a program of its own, ``polythrottle-restore``, for a service's stop-post command and for the unit at boot.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeVar

from polythrottle.actuation.argument_parser import OneLineParser
from polythrottle.actuation.audit import Audit, known_besides
from polythrottle.actuation.drivers.all_controls import SystemControls
from polythrottle.actuation.drivers.controls import Controls
from polythrottle.actuation.reapply import Lapse, lapses
from polythrottle.actuation.rollback import Outcome, Rollback, put_back
from polythrottle.actuation.state.lease import Fence, Lease, boot_s, hold
from polythrottle.actuation.state.presence import gone_from, steering, stray
from polythrottle.actuation.state.record import Entry, Record, named_by, shown
from polythrottle.actuation.state.site import Site, originals_folder
from polythrottle.actuation.state.site import boot_id as running_boot_id
from polythrottle.domain.errors import DeviceError, PolythrottleError, StorageError, UnknownName
from polythrottle.storage.untrusted import printable

_WAIT_S = 2.0
_PAUSES_S = (0.05, 0.2)
_MOST_NAMED = 20
_NAMELESS = "a device"

T = TypeVar("T")


@dataclass(frozen=True)
class Standing:
    """What stands between a device and its originals.

    Args:
        device: Which.
        keys: The controls on record.
        lease: Who holds it; without a holder if nobody does.
        damage: What could not be read: lines of the record, or all of it.
    """

    device: str
    keys: tuple[str, ...]
    lease: Lease
    damage: tuple[str, ...] = ()

    @property
    def expires_in_s(self) -> float | None:
        """How long the lease lasts yet, in seconds; None if it has no end or there is none."""
        if self.lease.expires_s is None:
            return None
        return self.lease.expires_s - boot_s()


def standing(state: Path | None = None, boot_id: str | None = None) -> tuple[Standing, ...]:
    """Return every device of this machine that is held or has originals on record, or whose record cannot be read.

    Raises:
        StorageError: If the folder of records cannot be trusted or read.
    """
    boot = boot_id if boot_id is not None else running_boot_id()
    known = [each for site in Site.all(state) if (each := _standing(site, boot)) is not None]
    return (*known, *_strayed(state, boot))


def concerned(state: Path | None = None, boot_id: str | None = None) -> tuple[str, ...]:
    """Return the devices of which a restore would have something to do or to say, as far as their files name them.

    Raises:
        StorageError: If the folder of records cannot be trusted or read.
    """
    boot = boot_id if boot_id is not None else running_boot_id()
    names = [name for site in Site.all(state) if (name := _standing_name(site, boot)) is not None]
    return tuple(dict.fromkeys(names))


def _strayed(state: Path | None, boot: str) -> tuple[Standing, ...]:
    """Return what stands of devices that living processes steer, while the folder has lost all that it knew of them."""
    folder = originals_folder(state)
    processes = stray(folder, [site.stem for site in Site.all(state) if not _has_lost_its_lease(site, boot)])
    if not processes:
        return ()
    lease = Lease(0, boot, f"process {processes[0]}", processes[0])
    return (Standing(_NAMELESS, (), lease, (f"it is steered by {shown(gone_from(folder, processes))}",)),)


def _staying(state: Path | None, boot: str) -> tuple[Standing, ...]:
    """Return what has strayed, but not a guard that is about to go once its device is back."""
    ends = time.monotonic() + _WAIT_S
    while (found := _strayed(state, boot)) and time.monotonic() < ends:
        time.sleep(0.05)
    return found


def _has_lost_its_lease(site: Site, boot: str) -> bool:
    with suppress(StorageError):  # one that cannot be read is told of by itself
        return not Fence(site.lease, boot).read().token
    return False


def _standing(site: Site, boot: str) -> Standing | None:
    """Return what stands of one device; None if nothing does."""
    try:
        record = _record_of(site, boot)
        lease = Fence(site.lease, boot).read()
    except StorageError as err:  # the others are listed all the same
        return Standing(_device_of(site), (), Lease(0, boot), (shown(str(err)),))
    if _stands(site, record, lease, boot):
        audited, gone = _audited(site, record, lease, boot)
        keys = tuple(dict.fromkeys([*record.entries, *audited]))
        return Standing(record.device, keys, lease, record.damage + gone)
    return None


def lapsed(device: str, state: Path | None = None, controls: Controls | None = None) -> tuple[Lapse, ...]:
    """Return the controls of a device that no longer hold what was applied to it for good.

    Args:
        device: By its name on record.
        state: Folder of the records; by default ``originals`` in `state_dir`.
        controls: How to reach the device.

    Raises:
        StorageError: If the folder of records cannot be trusted or read.
    """
    boot = running_boot_id()
    reached = controls if controls is not None else SystemControls(stays=False)
    found: list[Lapse] = []
    for site in Site.all(state):
        with suppress(StorageError):  # one that cannot be read is nobody's by name; `standing` tells of it
            record = _record_of(site, boot)
            found += lapses(record, reached) if record.device == device else ()
    return tuple(found)


def _stands(site: Site, record: Record, lease: Lease, boot: str) -> bool:
    """Say whether there is something to put back, or somebody who holds the device."""
    if record.text or lease.kept or lease.alive:  # one that is cut short after its head has a copy of all originals
        return True
    audited, gone = _audited(site, record, lease, boot)
    return bool(audited or gone)


def _audited(site: Site, record: Record, lease: Lease, boot: str) -> tuple[Mapping[str, Entry], tuple[str, ...]]:
    return known_besides(site, record, lease, Audit(site.audit, record.device, boot))


def take_over(
    site: Site, boot_id: str, token: int, controls: Controls | None = None, told: Record | None = None
) -> Outcome | None:
    """Restore a device whose lease has ended by itself; None if another has done or is doing so.

    Args:
        site: Of the device.
        boot_id: Of the running kernel.
        token: Of the ended lease.
        controls: How to reach the device.
        told: What is on record, as the writer has told; it stands where the record or the lease is damaged or deleted,
            or their disk has failed.

    Raises:
        DeviceError: If something could not be put back.
        StorageError: If record or lease cannot be used.
    """
    fence = Fence(site.lease, boot_id)
    try:
        if fence.read().has_passed(token):
            return None
        return _restored(site, fence, boot_id, controls, force=False, told=told)
    except StorageError:
        if told is None:
            raise
        outcome = Rollback(told, controls if controls is not None else SystemControls()).run()
        Audit(site.audit, told.device, boot_id).restored(token, outcome)
        return outcome


def _restored(
    site: Site, fence: Fence, boot_id: str, controls: Controls | None, *, force: bool, told: Record | None = None
) -> Outcome:
    before = fence.read()
    # A lease that was deleted tells nothing: until all is back the audit counts.
    token = fence.take(f"restoring (process {os.getpid()})", None, dirty=before.dirty or not before.token)
    settled = False
    try:
        with fence.closed(token, ending=True):
            record = _record_of(site, boot_id)
            if told is not None:
                record.adopt(told.entries)
            audited, gone = _audited(site, record, before, boot_id)
            record.adopt(audited)
            reached = controls if controls is not None else SystemControls()
            lapsed = [each for each in lapses(record, reached) if before.kept and each.undone(record)]
            outcome = replace(put_back(record, reached, force=force), lapsed=tuple(map(str, lapsed)))
            outcome = replace(outcome, damage=outcome.damage + gone)
            if force and site.left.exists():
                outcome = outcome.with_more(put_back(Record(site.left, None, boot_id), reached, force=True))
            settled = not outcome.failed
    finally:
        with suppress(StorageError):  # what was to say comes first; the next to take it does so whatever it says
            fence.release(token, settled=settled)
    Audit(site.audit, record.device, boot_id).restored(token, outcome)
    return outcome


def left_behind(
    state: Path | None = None, controls: Controls | None = None, boot_id: str | None = None
) -> tuple[Outcome, ...]:
    """Return, by device, what restorings before have left to somebody else and still is not as it was found.

    It is told until the next writer, for whom that is what it finds; ``restore_all`` with force puts it back.

    Args:
        state: Folder of the records; by default ``originals`` in `state_dir`.
        controls: How to reach the devices.
        boot_id: Of the running kernel.

    Raises:
        StorageError: If the folder of records cannot be trusted or read.
    """
    boot = boot_id if boot_id is not None else running_boot_id()
    reached = controls if controls is not None else SystemControls(stays=False)
    found = []
    for site in Site.all(state):
        try:
            left = _left_behind(site, reached, boot)
        except StorageError as err:
            left = Outcome(_device_of(site), damage=(shown(str(err)),))
        found += [] if left is None else [left]
    return tuple(found)


def _left_behind(site: Site, controls: Controls, boot: str) -> Outcome | None:
    if not site.left.exists():
        return None
    record = Record(site.left, None, boot)
    left = Rollback(record, controls).differences()
    if left or (record.damage and not record.originals):  # else all that it could have named is as it was found
        return Outcome(record.device, foreign=left, damage=record.damage)
    return None


def restore_all(
    state: Path | None = None,
    *,
    device: str | None = None,
    force: bool = False,
    controls: Controls | None = None,
    boot_id: str | None = None,
) -> tuple[Outcome, ...]:
    """Restore every device that stands changed and that nobody alive is steering.

    Args:
        state: Folder of the records; by default ``originals`` in `state_dir`.
        device: Only this one.
        force: Whether to end a living writer's lease, and to put back what someone else has changed since.
        controls: How to reach the devices.
        boot_id: Of the running kernel.

    What was left as it was found is named too where an error is raised.

    Raises:
        DeviceError: If one is being steered by a living process and force is not given; the others are restored first.
        StorageError: If the folder of records or one of them cannot be trusted or read; the others are restored first.
        UnknownName: If nothing stands for the device named.
    """
    boot = boot_id if boot_id is not None else running_boot_id()
    outcomes: list[Outcome] = []
    errors: list[PolythrottleError] = []
    for site in _patiently(lambda: _chosen(state, device, boot, force)):
        try:
            outcomes += _site_restored(site, boot, controls, force=force)
        except PolythrottleError as err:
            errors.append(err)
        except Exception as err:  # whatever is wrong with one device, the others are put back
            errors.append(StorageError(f"{_device_of(site)} is not restored: {shown(str(err)) or type(err).__name__}"))
    if device is None:
        errors += [DeviceError(f"{each.device} is not restored: {each.damage[0]}") for each in _staying(state, boot)]
    raise_all(errors, outcomes)
    return tuple(outcomes)


def raise_all(errors: Sequence[PolythrottleError], outcomes: Sequence[Outcome]) -> None:
    """Raise what went wrong with some devices as one, with what is left on others, which nobody else would tell.

    Raises:
        StorageError: If one of the errors is one, for then nobody can tell what stands changed.
        DeviceError: If there are others.
    """
    if not errors:
        return
    left = [f"{each.device}: left {line}" for each in outcomes for line in each.left]
    if len(errors) == 1 and not left:
        raise errors[0]
    unsaid = any(isinstance(err, StorageError) for err in errors)
    raise (StorageError if unsaid else DeviceError)("; ".join([*map(str, errors), *left]))


def _patiently(call: Callable[[], T]) -> T:
    """Return what a call returns, tried again where a disk was busy, or a signal came."""
    for pause_s in _PAUSES_S:
        try:
            return call()
        except StorageError:
            time.sleep(pause_s)
    return call()


def _site_restored(site: Site, boot: str, controls: Controls | None, *, force: bool) -> tuple[Outcome, ...]:
    """Restore one device, and tell what was left to somebody else there, now or before."""
    fence = Fence(site.lease, boot)
    try:
        return _patiently(lambda: _restored_once(site, fence, boot, controls, force=force))
    except DeviceError as err:
        raise DeviceError(f"{err}{_on_record(site, boot) if _ended(fence) else ''}") from err
    except StorageError as err:
        raise StorageError(f"{err}{_on_record(site, boot)}") from err


def _restored_once(
    site: Site, fence: Fence, boot: str, controls: Controls | None, *, force: bool
) -> tuple[Outcome, ...]:
    outcomes: tuple[Outcome, ...] = ()
    if force or _stands(site, _record_of(site, boot), fence.read(), boot):
        if not force:
            _refuse_if_held(site, fence)
        applied = fence.read().applied
        outcomes = (_restored(site, fence, boot, controls, force=force),)
        if applied:
            _await_guard(site)
    if any(each.foreign for each in outcomes):
        return outcomes
    try:
        left = _left_behind(site, controls if controls is not None else SystemControls(stays=False), boot)
    except StorageError as err:
        if not outcomes:
            raise
        left = Outcome(outcomes[0].device, damage=(shown(str(err)),))  # what was found comes first
    if left is None:
        return outcomes
    return (outcomes[0].with_more(left) if outcomes else left,)


def _ended(fence: Fence) -> bool:
    """Return whether nobody steers a device, as after a first try that failed, whatever still keeps its lock."""
    with suppress(StorageError):
        return not fence.read().alive
    return False


def _on_record(site: Site, boot: str) -> str:
    """Name the controls that a restoring which failed may have left changed, as far as the record can be read."""
    keys: dict[str, None] = {}
    with suppress(StorageError):
        keys.update(dict.fromkeys(_record_of(site, boot).entries))
    with suppress(StorageError):
        keys.update(dict.fromkeys(Audit(site.audit, "", boot).unsettled(Fence(site.lease, boot).read())))
    more = f" and {len(keys) - _MOST_NAMED} more" if len(keys) > _MOST_NAMED else ""
    if keys:
        return f"; on record, and perhaps still changed: {', '.join(list(keys)[:_MOST_NAMED])}{more}"
    return ""


def _chosen(state: Path | None, device: str | None, boot: str, force: bool) -> list[Site]:
    """Return the sites that stand changed: all, or every one that says it is of this device."""
    named = [(site, name) for site in Site.all(state) if (name := _standing_name(site, boot)) is not None]
    if device is None:
        return [site for site, _ in named]
    # Where no record names a device, its files do in part.
    chosen = [site for site, name in named if name == device or (name == _device_of(site) and site.is_of(device))]
    if chosen:
        return [site for site in chosen if force or not _is_untouched(site, boot)]
    if not remembered(device, state):
        raise UnknownName("device on record", device, dict.fromkeys(name for _, name in named))
    return []


def _is_untouched(site: Site, boot: str) -> bool:
    """Say whether a living writer has entered a device and changed nothing yet."""
    with suppress(StorageError):
        lease = Fence(site.lease, boot).read()
        changed = lease.dirty or lease.applied or Record(site.record, None, boot).text or site.left.exists()
        return lease.alive and not changed
    return False


def remembered(device: str, state: Path | None = None) -> bool:
    """Return whether a device of this name was ever entered here, whatever stands of it now.

    Args:
        device: By its name on record.
        state: Folder of the records.
    """
    own = Site.of(device, state)
    return any(file.exists() for file in (own.record, own.lease, own.lock))


def _standing_name(site: Site, boot: str) -> str | None:
    """Return the device of a site that stands changed, or was left so to somebody else; None if it is neither."""
    try:
        record = _record_of(site, boot)
        lease = Fence(site.lease, boot).read()
        if _stands(site, record, lease, boot):
            if record.entries:
                return record.device
            return _device_of(site)
        if site.left.exists():
            return Record(site.left, None, boot).device
        return None
    except StorageError:
        return _device_of(site)  # met again by whoever restores it, after the others


def _device_of(site: Site) -> str:
    """Return a device as its audit names it, for its record may be gone; else in part, as the names of its files do."""
    with suppress(DeviceError):
        told = Audit(site.audit, "", running_boot_id()).device
        if told is not None and site.is_of(told):
            return told
    return named_by(site.stem)


def _record_of(site: Site, boot: str) -> Record:
    record = Record(site.record, None, boot)
    if not record.text:
        record.device = _device_of(site)
    return record


def _refuse_if_held(site: Site, fence: Fence) -> None:
    """Refuse where a living writer has not run out; a profile applied by hand is there to be ended."""
    ends = time.monotonic() + _WAIT_S
    while True:
        lease = fence.read()
        if lease.applied:
            return
        if not lease.token and (processes := steering(site)):  # a guard that lives knows more than what is left here
            if time.monotonic() < ends:
                time.sleep(0.05)
                continue
            raise DeviceError(f"{_device_of(site)} is being steered by {gone_from(site.folder, processes)}")
        try:
            os.close(hold(site.lock, _device_of(site), f"restoring (process {os.getpid()})"))
            return
        except DeviceError:
            if lease.expires_s is not None and lease.expires_s < boot_s():
                return
            # They go soon: another that restores; a guard whose lease was ended and which has not seen it yet; one that
            # was about to be started, and holds the lock of a writer that was killed until it is begun.
            passing = lease.holder.startswith("restoring") or not lease.alive
            if passing and time.monotonic() < ends:
                time.sleep(0.05)
                continue
            raise


def _await_guard(site: Site) -> None:
    """Wait for the guard of an ended lease to go, so that the next writer is not refused on its account."""
    ends = time.monotonic() + _WAIT_S
    while time.monotonic() < ends:
        try:
            os.close(hold(site.lock, _device_of(site), f"restoring (process {os.getpid()})"))
            return
        except DeviceError:
            time.sleep(0.02)
        except StorageError:
            return  # the next writer is told


def confirm(device: str | None = None, state: Path | None = None) -> tuple[Standing, ...]:
    """Let profiles that were applied by hand stand: for the time they were applied for, else until a restore.

    Returns:
        What stands now.

    Raises:
        DeviceError: If nothing waits to be confirmed, or the guard that would revert it is gone.
        StorageError: If a lease or a record cannot be read, and nothing that can be waits to be confirmed.
    """
    boot = running_boot_id()
    confirmed = []
    unread: list[StorageError] = []
    for site in Site.all(state):
        fence = Fence(site.lease, boot)
        try:
            lease = fence.read()
            meant = device in (None, _device_of(site), _record_of(site, boot).device)
        except StorageError as err:
            unread.append(err)
            continue
        # A profile that changed nothing left no record: then it is known by its files, as in `_chosen`.
        meant = meant or (device is not None and site.stem == Site.of(device, state).stem)
        if not lease.applied or lease.kept or not meant:
            continue
        # What was applied for a time stays so, also if it is confirmed twice.
        if not lease.alive:
            raise DeviceError(f"what was to revert {lease.holder} has died; polythrottle restore puts it back")
        ends = None if lease.confirmed_s is None else boot_s() + lease.confirmed_s
        fence.change(lease.token, kept=ends is None, expires_s=ends)
        confirmed.append(site)
    if unread and not confirmed:
        raise unread[0]
    if not confirmed:
        raise DeviceError("nothing waits to be confirmed: it has reverted already, or nothing was applied")
    return tuple(each for each in standing(state) if each.lease.applied)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run ``polythrottle-restore``; returns 0 if all is as found, 6 if something is left, 8 if nobody can tell."""
    parser = OneLineParser(prog="polythrottle-restore", description="Put back every clock and limit.")
    parser.add_argument("--boot", action="store_true", help="at boot: nobody can be steering yet")
    parser.add_argument("--force", action="store_true", help="end a living writer's lease; undo others' changes too")
    given = parser.parse_args(arguments)
    try:
        outcomes = restore_all(force=given.force)
    except PolythrottleError as err:
        sys.stderr.write(f"polythrottle-restore: {err}\n")
        if isinstance(err, StorageError):
            return 8
        return 6
    clean = all(outcome.clean for outcome in outcomes)
    text = "".join(f"{line}\n" for outcome in outcomes for line in told(outcome))
    try:
        sys.stdout.write(_encodable(text))
        sys.stdout.flush()
    except (OSError, AttributeError):  # nobody reads it, a full disk, or none at all
        if sys.stdout is not None:
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # Python must not try again at exit
        if not clean:
            sys.stderr.write(text)
    if clean:
        return 0
    return 6


def _encodable(text: str) -> str:
    """Return a text as standard output takes it: what an old locale has no sign for is spelled out."""
    encoding = sys.stdout.encoding or "utf-8"
    return text.encode(encoding, "backslashreplace").decode(encoding)


def told(outcome: Outcome) -> list[str]:
    """Return what a restoring came to, in lines."""
    left = outcome.left
    head = f"{outcome.device}: {len(outcome.restored)} put back" + (f", {len(left)} left" if left else "")
    blind = [f"{key} took its original, which the driver lets nobody read back" for key in outcome.unverified]
    return [printable(line) for line in (head, *(f"  {each}" for each in [*left, *blind, *outcome.lapsed]))]


if __name__ == "__main__":
    sys.exit(main())
