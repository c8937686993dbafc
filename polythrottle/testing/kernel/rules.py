"""What the kernel does with a text that is written to a file."""

import errno
import re
from collections.abc import Callable

from polythrottle.testing.kernel.cores import put_online
from polythrottle.testing.kernel.limits import put_limit
from polythrottle.testing.kernel.machine import Machine, refusal
from polythrottle.testing.kernel.memory_clock import put_bpmp, put_cap, put_halt, put_override


def _put_governor(machine: Machine, path: str, text: str) -> None:
    folder, _, name = path.rpartition("/")
    known = f"{folder}/{name.replace('governor', 'available_governors')}"
    if text not in machine.read(known).split():
        raise refusal(errno.EINVAL, path)
    machine.put(path, text)


def _one_of(*texts: str) -> Callable[[Machine, str, str], None]:
    def put(machine: Machine, path: str, text: str) -> None:
        if text not in texts:
            raise refusal(errno.EINVAL, path)
        machine.put(path, text)

    return put


def _put_count(machine: Machine, path: str, text: str) -> None:
    if not text.isdecimal():
        raise refusal(errno.EINVAL, path)
    # It takes a write without a word and keeps what it held (schlafly1/camera-pipe1, start_thor.sh).
    if not path.endswith("/up_freq_margin"):
        machine.put(path, text)


def _put_mask(machine: Machine, path: str, text: str) -> None:
    if text != machine.read(path):
        raise refusal(errno.EBUSY, path)


_CPU = "/sys/devices/system/cpu"
_RULES: tuple[tuple[str, Callable[[Machine, str, str], None]], ...] = (
    (r".*/devfreq/[^/]+/(min|max)_freq", put_limit),
    (r".*/devfreq/[^/]+/governor", _put_governor),
    (r".*/devfreq/[^/]+/(polling_interval|nvhost_podgov/[a-z_]+)", _put_count),
    (rf"{_CPU}/cpufreq/policy\d+/scaling_(min|max)_freq", put_limit),
    (rf"{_CPU}/cpufreq/policy\d+/scaling_governor", _put_governor),
    (rf"{_CPU}/cpu\d+/online", put_online),
    (rf"{_CPU}/cpu\d+/cpuidle/state\d+/disable", _one_of("0", "1")),
    (r"/sys/kernel/debug/bpmp/debug/clk/[^/]+/[a-z_]+", put_bpmp),
    (r"/sys/kernel/debug/bpmp/debug/bwmgr/bwmgr_halt", put_halt),
    (r"/sys/kernel/debug/clk/override\.emc/[a-z_]+", put_override),
    (r"/sys/kernel/nvpmodel_(clk|emc)_cap/[a-z_]+", put_cap),
    (r".*/power/control", _one_of("on", "auto")),
    (r".*/(railgate_enable|enable_3d_scaling)", _one_of("0", "1")),
    (r".*/[ft][bp][pc]_pg_mask", _put_mask),
)


def obey(machine: Machine, path: str, text: str) -> None:
    """Do what the kernel does when ``text`` is written to ``path``, a path inside the tree without links.

    Raises:
        OSError: As the kernel would: no such file, read-only, out of range, out of order, busy.
    """
    if not machine.has(path):
        raise refusal(errno.ENOENT, path)
    for pattern, rule in _RULES:
        if re.fullmatch(pattern, path):
            rule(machine, path, text.strip())
            return
    raise refusal(errno.EACCES, path)
