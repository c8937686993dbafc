"""nvpmodel: reads its file of power modes and switches between them.

A clock off the table of its parameter ends on the nearest step: 670 MHz on 675.75 (iloudaros/LoudVA, an AGX Xavier),
640 on 614.4 and a CPU's 918 on 921.6 (a Nano's tables beside its nvpmodel.conf).
"""

import errno
import re
from collections.abc import Iterator
from dataclasses import dataclass, field

from polythrottle.domain.errors import KnobRejected
from polythrottle.testing.kernel.machine import Machine, refusal
from polythrottle.testing.kernel.memory_clock import force_cap
from polythrottle.testing.kernel.rules import force_limits, put_online, table

_CONF = "/etc/nvpmodel.conf"
_STATUS = "/var/lib/nvpmodel/status"
_HEADER = re.compile(r"< (PARAM|POWER_MODEL|PM_CONFIG) (.*) >")


@dataclass
class Modes:
    """Power modes as the file has them.

    Args:
        places: Where each argument of each parameter goes, such as ``("GPU", "MAX_FREQ")``.
        lines: For each mode, what it sets: parameter, argument and value, in order.
        names: The name of each mode.
    """

    places: dict[tuple[str, str], str] = field(default_factory=dict)
    lines: dict[int, list[tuple[str, str, str]]] = field(default_factory=dict)
    names: dict[int, str] = field(default_factory=dict)


def parsed(text: str) -> Modes:
    """Return the power modes a file describes."""
    modes = Modes()
    for kind, fields, lines in _blocks(text):
        if kind == "PARAM":
            modes.places |= {(fields["NAME"], line[0]): line[1] for line in lines}
        elif kind == "POWER_MODEL":
            modes.names[int(fields["ID"])] = fields["NAME"]
            modes.lines[int(fields["ID"])] = [(line[0], line[1], line[2]) for line in lines]
    return modes


def _blocks(text: str) -> Iterator[tuple[str, dict[str, str], list[list[str]]]]:
    block: tuple[str, dict[str, str], list[list[str]]] | None = None
    for line in text.splitlines():
        header = _HEADER.fullmatch(line)
        if header:
            if block:
                yield block
            block = (header[1], dict(each.split("=", 1) for each in header[2].split()), [])
        elif block and line.strip() and not line.startswith("#"):
            block[2].append(line.split())
    if block:
        yield block


def mode(machine: Machine) -> str:
    """Return the number of the present power mode, as text; where none is noted, that which the board starts in."""
    if not machine.has(_STATUS):
        head = re.search(r"PM_CONFIG DEFAULT=(\d+)", machine.read(machine.inside(_CONF)))
        if head is not None:
            return head[1]
    if not machine.place(_STATUS).is_file():  # a pipe would be waited for
        raise refusal(errno.EINVAL, _STATUS)
    found = re.search(r"pmode:(\d+)", machine.read(_STATUS))
    if found is None:
        raise refusal(errno.EINVAL, _STATUS)
    return str(int(found[1]))


def switch(machine: Machine, text: str, *, starting: bool = False) -> None:
    """Switch to a power mode, given by its number; ``starting`` is while the board boots.

    Raises:
        KnobRejected: If it needs a reboot because it changes which parts of the GPU have power.
        OSError: If there is no such mode.
    """
    modes = parsed(machine.read(machine.inside(_CONF)))
    number = next((each for each in modes.lines if text == str(each)), None)
    if number is None:
        raise refusal(errno.EINVAL, f"nvpmodel -m {text}")
    steps = [(_found(machine, modes, name, argument), value) for name, argument, value in modes.lines[number]]
    if not starting and any(_needs_reboot(machine, path, value) for path, value in steps):
        raise KnobRejected(f"power mode {text} takes a reboot, so it was not switched to")
    for path, value in steps:
        _set(machine, path, value)
    noted = "pmode:0"
    if machine.has(_STATUS):
        noted = machine.read(_STATUS)
    machine.place(_STATUS).touch()
    machine.put(_STATUS, re.sub(r"pmode:\d+", f"pmode:{number:04d}", noted))


def _found(machine: Machine, modes: Modes, name: str, argument: str) -> str:
    for key in (argument, f"{argument}_KNEXT"):
        place = modes.places.get((name, key))
        if place and machine.has(place):
            return place
    return modes.places[name, argument]


def _needs_reboot(machine: Machine, path: str, value: str) -> bool:
    return path.endswith("_pg_mask") and machine.read(path) != value


def _nearest(machine: Machine, path: str, value: str) -> str:
    wanted = int(value)
    if wanted > 0:
        return str(min(table(machine, path), key=lambda level: abs(level - wanted)))
    return value


def _set(machine: Machine, place: str, value: str) -> None:
    # A cluster whose cores this mode has just taken off has no clock to limit.
    if not machine.has(place):
        return
    path = machine.inside(place)
    if path.endswith("/online"):
        put_online(machine, path, value)
    elif path.endswith(("min_freq", "max_freq")):
        force_limits(machine, path, _nearest(machine, path, value))
    elif "_cap/" in path:
        force_cap(machine, path, value)
    else:
        machine.put(path, value)
