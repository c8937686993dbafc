"""Pairs of limits, a minimum and a maximum, of devfreq and cpufreq.

Sources: Linux drivers/devfreq/devfreq.c and drivers/cpufreq/cpufreq.c. A devfreq limit off the table ends on the step
below (github.com/Qengineering/Jover issue 3 met a neighbour); of cpufreq, a minimum goes up and a maximum down.
"""

import errno
import re

from polythrottle.testing.kernel.machine import Machine, refusal

_PAIR = re.compile(r"(.*/)(scaling_)?(min|max)_freq")


def put_limit(machine: Machine, path: str, text: str) -> None:
    """Set one of two limits as the kernel would.

    Raises:
        OSError: If the text is no number, or the limits would cross on a kernel that refuses that.
    """
    level = _fitted(machine, path, _whole(path, text))
    low, high = _pair(path)
    _believe_files(machine, low, high)
    crossing = level > machine.number(high) if path == low else level < machine.number(low)
    if crossing and machine.memory.refuses:
        raise refusal(errno.EINVAL, path)
    machine.memory.wishes[path] = level
    _bring_together(machine, low, high)


def force_limits(machine: Machine, path: str, text: str) -> None:
    """Set one of two limits whatever the other is, moving that out of the way: what nvpmodel ends up with."""
    level = _fitted(machine, path, _whole(path, text))
    low, high = _pair(path)
    _believe_files(machine, low, high)
    machine.memory.wishes[path] = level
    if path == low and level > machine.number(high):
        machine.memory.wishes[high] = level
    if path == high and level < machine.number(low):
        machine.memory.wishes[low] = level
    _bring_together(machine, low, high)


def table(machine: Machine, path: str) -> list[int]:
    """Return the clocks the folder of a limit lists, ascending, in the unit of its files."""
    folder, scaling, _ = _parts(path)
    return machine.numbers(f"{folder}{scaling}available_frequencies")


def _believe_files(machine: Machine, low: str, high: str) -> None:
    """Forget wishes that the files contradict: a test has written to them without asking the kernel."""
    wishes = machine.memory.wishes
    least = machine.number(low)
    most = machine.number(high)
    if wishes.get(high) != most:
        wishes[high] = most
    if min(wishes.get(low, least), most) != least:
        wishes[low] = least


def _bring_together(machine: Machine, low: str, high: str) -> None:
    wishes = machine.memory.wishes
    most = wishes[high]
    machine.put(high, most)
    machine.put(low, min(wishes.get(low, machine.number(low)), most))


def _parts(path: str) -> tuple[str, str, str]:
    match = _PAIR.fullmatch(path)
    if match is None:
        raise refusal(errno.EACCES, path)
    return match[1], match[2] or "", match[3]


def _pair(path: str) -> tuple[str, str]:
    folder, scaling, _ = _parts(path)
    return f"{folder}{scaling}min_freq", f"{folder}{scaling}max_freq"


def _whole(path: str, text: str) -> int:
    try:
        return int(text)
    except ValueError:
        raise refusal(errno.EINVAL, path) from None


def _fitted(machine: Machine, path: str, wanted: int) -> int:
    """Return the step a wish ends on; 0 as a maximum and -1 mean no limit."""
    _, scaling, side = _parts(path)
    levels = table(machine, path)
    if not levels:
        raise refusal(errno.EINVAL, path)
    if wanted < 0 or (side == "max" and wanted == 0):
        if side == "max":
            return levels[-1]
        return levels[0]
    if scaling and side == "min":
        return next((level for level in levels if level >= wanted), levels[-1])
    return max((level for level in levels if level <= wanted), default=levels[0])
