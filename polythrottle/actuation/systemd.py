"""What systemd is told and keeps for a service: ready, alive, stopping.

The lease and record that outlive a crash.
"""

from __future__ import annotations

import os
import re
import socket
import struct
from collections.abc import Mapping, MutableMapping, Sequence
from contextlib import suppress

from polythrottle.actuation.drivers.controls import Controls
from polythrottle.actuation.restore import take_over
from polythrottle.actuation.state.lease import Fence
from polythrottle.actuation.state.record import FORGET, Record
from polythrottle.actuation.state.site import Site
from polythrottle.actuation.state.site import boot_id as running_boot_id
from polythrottle.domain.errors import DeviceError, StorageError

# What systemd keeps for a service that dies: its lease and a copy of its record, though their folder is deleted.
#
# A service may hand open files to its manager, which gives them back at the next start: FDSTORE in sd_notify(3),
# LISTEN_FDS in sd_listen_fds(3), FileDescriptorStoreMax= in systemd.service(5). The lease goes there as it is, open;
# the record as a file in memory, so that neither a deleted folder nor a failed disk takes it away. Without a manager
# nothing is kept.

_FIRST = 3  # SD_LISTEN_FDS_START
_MOST_BYTES = 16_000_000
_NAME = re.compile(r"([A-Za-z0-9._@-]{1,240})\.(jsonl|lease)")


def tell_manager(address: str, lines: Sequence[str], handle: int | None = None) -> None:
    """Send one message to the service manager; one that does not listen is no reason to stop working.

    Args:
        address: As ``$NOTIFY_SOCKET`` gives it; nothing is sent where that is empty.
        lines: Of the message, such as ``READY=1``.
        handle: A descriptor that goes along.
    """
    if not address:
        return
    place = f"\0{address[1:]}" if address.startswith("@") else address
    text = "\n".join(" ".join(line.split()) for line in lines).encode()
    with suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as way:
        way.setblocking(False)
        # Not socket.send_fds, which passes over the address (python/cpython, Lib/socket.py, 3.10 to 3.13).
        if handle is None:
            along = []
        else:
            along = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, struct.pack("i", handle))]
        way.sendmsg([text], along, 0, place)


class DescriptorStore:
    """The manager's copy of one writer's lease and record.

    Args:
        site: Of the device.
        environment: Where the manager left its address; that of this process by default.
    """

    def __init__(self, site: Site, environment: MutableMapping[str, str] | None = None) -> None:
        given = os.environ if environment is None else environment
        self._address = given.get("NOTIFY_SOCKET", "")
        self._record = site.record.name
        self._lease = site.lease.name
        self._handle: int | None = None
        self._begins = self._size = 0

    def begin(self, lease: int, token: int, known: bytes) -> None:
        """Hand lease and record to the manager, before anything is written under them.

        Args:
            lease: The open lease.
            token: Of the lease, which goes before the record: the lease itself may pass to another later.
            known: What is on record.
        """
        if not self._address or self._handle is not None:
            return
        with suppress(OSError, AttributeError):  # a kernel or a Python without files in memory
            self._handle = os.memfd_create(self._record, os.MFD_CLOEXEC)
            self._begins = os.pwrite(self._handle, f"{token}\n".encode(), 0)
            self._size = self._begins
            self.tell(known)
            for name, handle in ((self._record, self._handle), (self._lease, lease)):
                self._forget(name)
                tell_manager(self._address, ["FDSTORE=1", f"FDNAME={name}", "FDPOLL=0"], handle)

    def tell(self, text: bytes) -> None:
        """Add what is about to go on record."""
        if self._handle is None:
            return
        with suppress(OSError):
            if text == FORGET:
                os.ftruncate(self._handle, self._begins)
                self._size = self._begins
            else:
                self._size += os.pwrite(self._handle, text, self._size)

    def end(self, *, forget: bool) -> None:
        """Add nothing more; have the manager forget both where nothing stands changed."""
        if self._handle is None:
            return
        os.close(self._handle)
        self._handle = None
        if forget:
            for name in (self._record, self._lease):
                self._forget(name)

    def _forget(self, name: str) -> None:
        tell_manager(self._address, ["FDSTOREREMOVE=1", f"FDNAME={name}"])


def handed_back(environment: MutableMapping[str, str] | None = None) -> dict[str, int]:
    """Return the descriptors that the manager has kept, by name; for this process alone, and only once."""
    given = os.environ if environment is None else environment
    pid, count, names = (given.pop(name, "") for name in ("LISTEN_PID", "LISTEN_FDS", "LISTEN_FDNAMES"))
    if pid != str(os.getpid()) or not count.isdecimal():
        return {}
    found = {}
    for handle, name in enumerate(names.split(":")[: int(count)], _FIRST):
        with suppress(OSError):
            os.set_inheritable(handle, False)
            found[name] = handle
    return found


def restore_handed_back(
    environment: MutableMapping[str, str] | None = None, controls: Controls | None = None
) -> list[str]:
    """Put back what the manager's copies say stands changed, and return what could not be put back.

    A copy whose lease has passed to another since, as to its guard, says nothing any more.

    Args:
        environment: Where the manager says what it gives back; that of this process by default.
        controls: How to reach the devices.
    """
    given = os.environ if environment is None else environment
    handles = handed_back(given)
    left: list[str] = []
    for name, handle in handles.items():
        match = _NAME.fullmatch(name)
        if match is None or match[2] != "jsonl":
            continue
        try:
            failed = _put_back(match[1], _held(handle), _held(handles.get(f"{match[1]}.lease")), controls)
        except (DeviceError, StorageError, OSError) as err:
            failed = [f"{match[1]}: {err}"]
        left += failed
        if not failed:
            for kind in ("jsonl", "lease"):
                tell_manager(given.get("NOTIFY_SOCKET", ""), ["FDSTOREREMOVE=1", f"FDNAME={match[1]}.{kind}"])
    for handle in handles.values():
        os.close(handle)
    return left


def _held(handle: int | None) -> bytes:
    if handle is None:
        return b""
    if os.fstat(handle).st_size > _MOST_BYTES:
        raise StorageError(f"what the service manager has kept is larger than {_MOST_BYTES / 1e6:g} MB")
    return os.pread(handle, _MOST_BYTES, 0)


def _put_back(stem: str, record: bytes, lease: bytes, controls: Controls | None) -> list[str]:
    boot = running_boot_id()
    site = Site(Site.of("actuator").folder, stem)
    fence = Fence(site.lease, boot)
    number, _, text = record.partition(b"\n")
    token = int(number) if number.isdigit() else 0
    told = Record(site.record, None, boot, text)
    if not told.entries or fence.parsed(lease).has_passed(token):
        return []
    with suppress(StorageError):  # without its folder the device is put back all the same
        site.prepare()
    outcome = take_over(site, boot, token, controls, told)
    if outcome is None:
        return []
    return [str(each) for each in outcome.failed]


# Tell the service manager that a process is ready, alive, or ending (sd_notify(3), systemd.service(5)).
#
# Without a service manager (no ``$NOTIFY_SOCKET``) nothing is sent and nothing is asked for.


class Supervisor:
    """The service manager of this process, if there is one.

    Args:
        environment: Where it left its address; that of this process by default.
    """

    def __init__(self, environment: Mapping[str, str] | None = None) -> None:
        given = os.environ if environment is None else environment
        self._address = given.get("NOTIFY_SOCKET", "")
        mine = given.get("WATCHDOG_PID", "") in ("", str(os.getpid()))
        usec = given.get("WATCHDOG_USEC", "")
        self._watchdog_s = int(usec) / 1e6 if mine and usec.isdecimal() and int(usec) > 0 else None

    @property
    def ping_s(self) -> float | None:
        """How often `alive` is to be called: a third of the time the manager waits; None if it does not."""
        if self._watchdog_s is None or not self._address:
            return None
        return self._watchdog_s / 3

    def ready(self, words: str = "") -> None:
        """Say that the process serves, and in a line for people what."""
        self._send("READY=1", *([f"STATUS={words}"] if words else []))

    def alive(self) -> None:
        """Say that the loop still turns; to be called from that loop alone."""
        self._send("WATCHDOG=1")

    def stopping(self) -> None:
        """Say that the process is about to end."""
        self._send("STOPPING=1")

    def _send(self, *lines: str) -> None:
        tell_manager(self._address, lines)
