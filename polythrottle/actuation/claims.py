"""One control, one record: the same file may be reached as two devices, such as a Jetson's processor and ``cpu``."""

import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress

from polythrottle.actuation.lease import Fence, wait_for_lock
from polythrottle.actuation.record import Record
from polythrottle.actuation.site import Site, opened
from polythrottle.errors import DeviceError, StorageError

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
            taken |= {_place(key): whose for key, entry in record.entries.items() if not entry.done}
    return taken


def _place(key: str) -> object:
    """Return what is the same for two names of one control: a file's device and inode."""
    scheme, _, root = key.partition(":")
    with suppress(OSError):
        if key.startswith("/"):
            found = os.stat(key)
            return found.st_dev, found.st_ino
        if root.startswith("/"):
            return scheme, os.path.realpath(root)
    return key
