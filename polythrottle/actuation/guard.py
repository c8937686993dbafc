"""The guard: a small process that restores a device when its writer dies, hangs, or is not confirmed in time.

Started by the writer as ``python -m polythrottle.actuation.guard FOLDER STEM BOOT_ID TOKEN PID``; with ``-`` for the
process it holds the device itself, for a profile applied by hand. Standard library only, but for what the device's own
driver needs.
"""

import math
import os
import select
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from polythrottle.actuation.lease import Fence, Lease, Stuck, boot_s
from polythrottle.actuation.record import Record
from polythrottle.actuation.restoring import take_over
from polythrottle.actuation.site import Site
from polythrottle.actuation.system import SystemControls
from polythrottle.errors import PolythrottleError

_LOOK_S = 0.25


def watch(site: Site, boot_id: str, token: int, ended: Callable[[float], bool]) -> bool:
    """Wait until a lease ends by itself, and say whether the device is to be restored then.

    Args:
        site: Of the device.
        boot_id: Of the running kernel.
        token: Of the lease.
        ended: Waits at most so many seconds for the process that holds it, and says whether that has ended.
    """
    fence = Fence(site.lease, boot_id)
    while True:
        lease = fence.read()
        if lease.token != token or lease.kept or not lease.holder:
            return False
        left_s = _left_s(lease)
        if left_s <= 0:
            return True
        if ended(left_s):
            return True


def _left_s(lease: Lease) -> float:
    return math.inf if lease.expires_s is None else lease.expires_s - boot_s()


def _never(wait_s: float) -> bool:
    time.sleep(min(wait_s, _LOOK_S))
    return False


def _end_of(pid: int) -> Callable[[float], bool]:
    """Return what waits for the end of the process that started this one."""
    try:
        writer = os.pidfd_open(pid)
    except ProcessLookupError:
        return lambda wait_s: True
    except (AttributeError, OSError):
        # Linux before 5.3, as JetPack 4 has it, and Pythons built for such: an orphan gets another parent.
        return lambda wait_s: _never(wait_s) or os.getppid() != pid
    return lambda wait_s: bool(select.select([writer], [], [], min(wait_s, _LOOK_S * 20))[0])


def _keep_open(site: Site, boot_id: str, controls: SystemControls) -> None:
    """Become a client of the drivers concerned: NVIDIA's may forget its locks when the last one leaves."""
    for key in Record(site.record, None, boot_id).entries:
        with suppress(PolythrottleError, OSError):
            controls.read(key)


def main(arguments: list[str]) -> None:
    """Watch over the lease that the arguments name."""
    folder, stem, boot_id, token, pid = arguments
    site, controls = Site(Path(folder), stem), SystemControls()
    if pid == "-":
        _keep_open(site, boot_id, controls)
    if watch(site, boot_id, int(token), _never if pid == "-" else _end_of(int(pid))):
        _restore(site, boot_id, int(token), controls)


def _restore(site: Site, boot_id: str, token: int, controls: SystemControls) -> None:
    while True:
        try:
            take_over(site, boot_id, token, controls)
        except Stuck:
            continue  # a writer that is stopped in the middle of a write: until it ends or wakes
        except PolythrottleError:
            sys.exit(1)  # what is left stays on record: polythrottle restore says what and why
        return


if __name__ == "__main__":
    main(sys.argv[1:])
