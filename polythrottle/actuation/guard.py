"""The guard: a small process that restores a device when its writer dies, hangs, or is not confirmed in time.

Started by the writer as ``python -m polythrottle.actuation.guard FOLDER STEM BOOT_ID TOKEN PID``; with ``-HANDLE`` for
the process it holds the device itself, by the lock that is open there, for a profile applied by hand; once that is to
stand for good, or with ``-`` alone at once, the guard becomes its keeper (`polythrottle.actuation.reapply`). Standard
library only, but for what the device's own driver needs. On its standard input the writer tells it what goes on record,
so that it can restore where record and lease are damaged, deleted, or on a disk that has failed.
"""

from __future__ import annotations

import math
import os
import select
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from polythrottle.actuation.drivers.all_controls import SystemControls
from polythrottle.actuation.drivers.controls import read_recorded
from polythrottle.actuation.reapply import StateCopy, say_ready
from polythrottle.actuation.restore import take_over
from polythrottle.actuation.state.lease import LEASE_S, Fence, Lease, Stuck, boot_s
from polythrottle.actuation.state.record import FORGET, NOW, Record
from polythrottle.actuation.state.site import Site
from polythrottle.domain.errors import PolythrottleError, StorageError

_KEEPER = "polythrottle.actuation.reapply"
_LOOK_S = 0.25
_AGAIN_S = (0.1, 0.4, 1.5, 3.0, None)


class WriterPipe:
    """What the writer has told through a pipe.

    Args:
        handle: Of the pipe; None for what tells nothing.
    """

    def __init__(self, handle: int | None) -> None:
        self._handle = handle
        self._text = b""
        if handle is not None:
            os.set_blocking(handle, False)

    @property
    def handles(self) -> list[int]:
        """What to wait for; empty once the writer has closed it."""
        if self._handle is None:
            return []
        return [self._handle]

    def hear(self) -> None:
        """Take what has come."""
        try:
            while self._handle is not None:
                text = os.read(self._handle, 1 << 16)
                self._text += text
                if not text:
                    self._handle = None
        except BlockingIOError:
            pass
        except OSError:
            self._handle = None

    @property
    def at_once(self) -> bool:
        """Whether the writer leaves it to the guard to restore, now."""
        return self._text.endswith(NOW)

    def record(self, site: Site, boot_id: str) -> Record:
        """Return the record as it was told."""
        self.hear()
        text = self._text[: -len(NOW)] if self.at_once else self._text
        return Record(site.record, None, boot_id, text.rpartition(FORGET)[2])


def wait_for_end(
    site: Site, boot_id: str, token: int, ended: Callable[[float], bool], look: Callable[[], None] = lambda: None
) -> bool:
    """Wait until a lease ends by itself, and say whether the device is to be restored then.

    Args:
        site: Of the device.
        boot_id: Of the running kernel.
        token: Of the lease.
        ended: Waits at most so many seconds for the process that holds it, and says whether that has ended.
        look: Is called before each look at the lease.
    """
    fence = Fence(site.lease, boot_id)
    lease = Lease(token, boot_id, expires_s=boot_s() + LEASE_S)  # should it be lost before it is read
    while True:
        look()
        try:
            found = fence.read()
            if found.has_passed(token):
                return False
            if found.token == token:
                if found.kept or not found.holder:
                    return False
                lease = found
        except StorageError:
            pass  # what was read last stands
        left_s = _left_s(lease)
        if left_s <= 0:
            return True
        if ended(left_s):
            return True


def _left_s(lease: Lease) -> float:
    if lease.expires_s is None:
        return math.inf
    return lease.expires_s - boot_s()


def _never(wait_s: float) -> bool:
    time.sleep(min(wait_s, _LOOK_S))
    return False


def _end_of(pid: int, told: WriterPipe) -> Callable[[float], bool]:
    """Return what waits for the end of the process that started this one, or for it to say that it leaves."""

    def heard(wait_s: float, writer: list[int]) -> list[int]:
        ready = select.select([*writer, *told.handles], [], [], wait_s)[0]
        told.hear()
        return ready

    try:
        writer = os.pidfd_open(pid)  # novermin
    except ProcessLookupError:
        return lambda wait_s: True
    except (AttributeError, OSError):
        # Linux before 5.3, as JetPack 4 has it, and Pythons built for such: an orphan gets another parent.
        return lambda wait_s: (bool(heard(min(wait_s, _LOOK_S), [])) and told.at_once) or os.getppid() != pid
    return lambda wait_s: writer in heard(min(wait_s, _LOOK_S * 20), [writer]) or told.at_once


def _keep_open(site: Site, boot_id: str, controls: SystemControls) -> None:
    """Become a client of the drivers concerned: NVIDIA's may forget its locks when the last one leaves."""
    for key in Record(site.record, None, boot_id).entries:
        with suppress(PolythrottleError, OSError):
            read_recorded(controls, key)


def main(arguments: list[str]) -> None:
    """Watch over the lease that the arguments name."""
    folder, stem, boot_id, token, pid = arguments
    if pid == "-":  # it stands for good from the beginning
        _become_keeper(arguments)
    site = Site(Path(folder), stem)
    controls = SystemControls()
    told = WriterPipe(sys.stdin.fileno())
    told.hear()
    alone = pid.startswith("-")
    if alone:
        os.set_inheritable(int(pid[1:]), False)  # a keeper holds no lock: its lease says that the device is taken
        _keep_open(site, boot_id, controls)
        say_ready()
    look = StateCopy(site, boot_id, int(token), locked=True).look if alone else lambda: None
    if wait_for_end(site, boot_id, int(token), _never if alone else _end_of(int(pid), told), look):
        _restore(site, boot_id, int(token), controls, told)
    elif alone and Fence(site.lease, boot_id).read().kept:
        _become_keeper(arguments)


def _become_keeper(arguments: list[str]) -> None:
    """Go on as another program, which none of the drivers that are open go along to."""
    os.execv(sys.executable, [sys.executable, "-m", _KEEPER, *arguments[:4]])


def _restore(site: Site, boot_id: str, token: int, controls: SystemControls, told: WriterPipe) -> None:
    pauses = iter(_AGAIN_S)
    while True:
        try:
            outcome = take_over(site, boot_id, token, controls, told.record(site, boot_id))
            if outcome is None or not outcome.failed:
                return
        except Stuck:
            continue  # a writer that is stopped in the middle of a write: until it ends or wakes
        except PolythrottleError:
            pass
        pause_s = next(pauses)
        if pause_s is None:
            sys.exit(1)  # what is left stays on record: polythrottle restore says what and why
        time.sleep(pause_s)


if __name__ == "__main__":
    main(sys.argv[1:])
