"""Which boot this is: the kernel forgets most of what was written when it starts anew."""

from pathlib import Path

from polythrottle.actuation.controls import text_of
from polythrottle.errors import DeviceError

_TRIES = 3  # without it nothing can be put back
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


def boot_id() -> str:
    """Return the identity of the running boot.

    Raises:
        DeviceError: If the kernel does not tell.
    """
    for left in reversed(range(_TRIES)):
        try:
            return text_of(_BOOT_ID)
        except OSError as err:
            if not left:
                raise DeviceError(f"cannot tell this boot from others: {_BOOT_ID}: {err.strerror}") from err
    raise AssertionError("unreachable")
