"""Whether this process may set anything on a GPU, judged without trying."""

import os
import re
from pathlib import Path

from polythrottle.actuation.controls import text_of

_SYS_ADMIN = 21  # include/uapi/linux/capability.h


def may_set(status: Path = Path("/proc/self/status")) -> bool:
    """Return whether this process has CAP_SYS_ADMIN, which NVIDIA's driver asks for before it sets anything.

    In a user namespace of its own a process can have it and still be refused.

    Args:
        status: Where the kernel lists the capabilities of this process; if it does not, root is taken to have them all.
    """
    try:
        match = re.search(r"^CapEff:\s*([0-9a-fA-F]+)$", text_of(status), re.MULTILINE)
    except OSError:
        match = None
    return bool(int(match[1], 16) >> _SYS_ADMIN & 1) if match else os.geteuid() == 0
