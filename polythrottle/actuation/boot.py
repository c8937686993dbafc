"""Which boot this is: the kernel forgets most of what was written when it starts anew."""

from pathlib import Path

from polythrottle.errors import DeviceError

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


def boot_id() -> str:
    """Return the identity of the running boot.

    Raises:
        DeviceError: If the kernel does not tell.
    """
    try:
        return _BOOT_ID.read_text().strip()
    except OSError as err:
        raise DeviceError(f"cannot tell this boot from others: {_BOOT_ID}: {err.strerror}") from err
