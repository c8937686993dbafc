"""The administrator's permits: who may read a device, who may set it, and which levels of which knobs.

``/etc/polythrottle/permits.toml``, which only root (or the actuator's own user) may write, grants what it names and
nothing else::

    [[permit]]
    group = "polythrottle"         # or user = "alice"
    devices = ["*"]                # URIs; * stands for anything; all if left out
    read = true                    # the default
    control = true                 # not the default
    knobs = { gpu_max_mhz = [306, 1300], power_mode = ["15W", "30W"], mem_mhz = true }   # all if left out

Without the file the user ``polythrottle``, as whom the daemon runs, may set everything within limits.toml, and the
group of that name may read. Root and the actuator's own user always may. What a knob was found at may always be set: it
is how the device is without anybody.
"""

from __future__ import annotations

import os
import typing
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, Tuple, Union

from polythrottle.actuation.limits import KNOBS, is_number
from polythrottle.actuation.server.unix_socket import Peer, group_id, user_id
from polythrottle.actuation.state.site import contents
from polythrottle.domain.errors import BadFile, StorageError
from polythrottle.domain.space import Level
from polythrottle.domain.units import to_file, to_si
from polythrottle.storage.untrusted import parse_toml

GROUP = USER = "polythrottle"
FILE = Path("/etc/polythrottle/permits.toml")
_KNOBS = (*KNOBS, "cpu_epp")
_KEYS = ("group", "user", "devices", "read", "control", "knobs")

Span = Union[Tuple[float, float], Tuple[str, ...]]
"""What a knob may be set to: from lowest to highest in SI, or one of some names; nothing given is anything."""
Spans = typing.Mapping[str, Span]


@dataclass(frozen=True)
class Permit:
    """One permit.

    Args:
        gid: The group it is for; None for none.
        uid: The user it is for; None for none.
        devices: Patterns of URIs.
        read: Whether they may read.
        control: Whether they may set.
        spans: The knobs they may set and how far; None for all.
    """

    gid: int | None
    uid: int | None = None
    devices: tuple[str, ...] = ("*",)
    read: bool = True
    control: bool = False
    spans: Spans | None = None

    def concerns(self, peer: Peer, names: Sequence[str]) -> bool:
        """Say whether it is for this peer and one of a device's names."""
        mine = (self.gid is not None and self.gid in peer.gids) or (self.uid is not None and self.uid == peer.uid)
        return mine and any(fnmatchcase(name, pattern) for name in names for pattern in self.devices)


@dataclass(frozen=True)
class Rights:
    """What one peer may do with one device.

    Args:
        read: Whether it may read.
        control: Whether it may set.
        spans: For each permit that lets it, the knobs and how far; a permit without such a list is None.
    """

    read: bool = False
    control: bool = False
    spans: tuple[Spans | None, ...] = ()

    def allow(self, point: Mapping[str, Level], default: Mapping[str, Level]) -> bool:
        """Say whether one of the permits lets all of a point be set.

        Args:
            point: Level by knob.
            default: What each was found at, which always is allowed.
        """
        moved = {name: level for name, level in point.items() if level != default.get(name)}
        return any(all(allowed(spans, *each) for each in moved.items()) for spans in self.spans)


def allowed(spans: Spans | None, name: str, level: Level) -> bool:
    """Say whether a permit's list lets a knob be set to a level."""
    if spans is None:
        return True
    if name not in spans:
        return False
    span = spans[name]
    if not span:
        return True
    if isinstance(level, str):
        return level in span
    low = span[0]
    high = span[-1]
    return not isinstance(low, str) and not isinstance(high, str) and low <= level <= high


class Permits:
    """All permits.

    Args:
        every: As the administrator gave them.
        own: The user of this process, who may do everything, as root may.
    """

    def __init__(self, every: Sequence[Permit], own: int | None = None) -> None:
        self._every = tuple(every)
        self._own = os.geteuid() if own is None else own

    @classmethod
    def read(cls, path: Path | None = None) -> Permits:
        """Return the administrator's permits; the usual ones if there is no such file.

        Args:
            path: Of the file, which must be there then; `FILE` if None.

        Raises:
            BadFile: If it cannot be read, trusted or understood: then nobody is served.
        """
        file = FILE if path is None else path
        try:
            text = contents(file)
            if text is None and path is not None:
                raise BadFile(f"cannot read the permits: there is no {file}")
            tables = None if text is None else parse_toml(text)
        except (OSError, ValueError, RecursionError, StorageError) as err:
            raise BadFile(f"cannot read the permits: {file}: {err}") from err
        if tables is None:
            return cls([Permit(group_id(GROUP)), Permit(None, user_id(USER), control=True)])
        listed = tables.get("permit")
        if set(tables) != {"permit"} or not isinstance(listed, list):
            raise BadFile(f"{file}: permits are written as [[permit]] tables and nothing else")
        return cls([_permit(f"{file}: permit {number}", table) for number, table in enumerate(listed, 1)])

    def knows(self, peer: Peer) -> bool:
        """Say whether a peer may do anything at all."""
        mine = (each for each in self._every if (each.gid in peer.gids) or (each.uid == peer.uid))
        return self._all(peer) or any(each.read or each.control for each in mine)

    def rights(self, peer: Peer, names: Sequence[str]) -> Rights:
        """Return what a peer may do with a device.

        Args:
            peer: Who asks.
            names: The URIs by which the device is known.
        """
        if self._all(peer):
            return Rights(True, True, (None,))
        mine = [each for each in self._every if each.concerns(peer, names)]
        control = [each for each in mine if each.control]
        return Rights(any(each.read for each in mine), bool(control), tuple(each.spans for each in control))

    def _all(self, peer: Peer) -> bool:
        return peer.uid in (0, self._own)


def _permit(where: str, table: Any) -> Permit:
    if not isinstance(table, dict) or not set(table) <= set(_KEYS):
        odd = ", ".join(sorted(set(table) - set(_KEYS))) if isinstance(table, dict) else "no table"
        raise BadFile(f"{where}: has {odd}; a permit has {', '.join(_KEYS)}")
    if ("group" in table) == ("user" in table):
        raise BadFile(f"{where}: is for one group or one user; write group or user")
    gid = _of(where, table, "group")
    uid = _of(where, table, "user")
    devices = table.get("devices", ["*"])
    if not isinstance(devices, list) or not all(isinstance(each, str) for each in devices):
        raise BadFile(f'{where}: devices must be a list of URIs, such as ["jetson"] or ["*"]')
    flags = {name: table.get(name, usual) for name, usual in (("read", True), ("control", False))}
    for name, flag in flags.items():
        if not isinstance(flag, bool):
            raise BadFile(f"{where}: {name} must be true or false")
    return Permit(gid, uid, tuple(devices), spans=_spans(where, table.get("knobs")), **flags)


def _of(where: str, table: Mapping[str, Any], kind: str) -> int | None:
    if kind not in table:
        return None
    name = table[kind]
    if not isinstance(name, str) or not name:
        raise BadFile(f"{where}: {kind} must be a name")
    found = group_id(name) if kind == "group" else user_id(name)
    if found is None:
        raise BadFile(f"{where}: there is no {kind} {name!r} on this machine")
    return found


def _spans(where: str, table: Any) -> Spans | None:
    if table is None:
        return None
    if not isinstance(table, dict):
        raise BadFile(f"{where}: knobs must be a table, such as {{ gpu_max_mhz = [306, 1300] }}")
    return dict(_span(where, key, value) for key, value in table.items())


def _span(where: str, key: str, value: Any) -> tuple[str, Span]:
    name = to_si(key, 0)[0]
    if name not in _KNOBS:
        raise BadFile(f"{where}: {key} is no knob; known: {', '.join(to_file(knob, 0)[0] for knob in _KNOBS)}")
    if value is True:
        return name, ()
    if isinstance(value, list) and value and all(isinstance(each, str) for each in value):
        return name, tuple(value)
    if isinstance(value, list) and len(value) == 2 and all(is_number(each) for each in value):
        low, high = (float(to_si(key, each)[1]) for each in value)
        if low <= high:
            return name, (low, high)
    raise BadFile(f"{where}: {key} must be [lowest, highest], a list of names, or true")
