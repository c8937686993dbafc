"""Who is at the other end of a Unix socket, and what they may do."""

import grp
import os
import pwd
import socket
import struct
from dataclasses import dataclass
from enum import IntEnum

from polythrottle.errors import InvalidInput

_PEERGROUPS = 59
"""SO_PEERGROUPS of Linux 4.13 (include/uapi/asm-generic/socket.h), which Python does not name."""
_CREDENTIALS = struct.Struct("3i")


class Role(IntEnum):
    """What somebody may do; each may what those before it may."""

    NOTHING = 0
    READ = 1
    CONTROL = 2


@dataclass(frozen=True)
class Peer:
    """Somebody connected.

    Args:
        role: What they may do.
        trusted: Whether they are root or the daemon's own user, for whom there is always room.
        tcp: Whether they came over TCP, where role and room depend on what each request shows.
    """

    role: Role
    trusted: bool = False
    tcp: bool = False


@dataclass(frozen=True)
class Doorkeeper:
    """Tells what users may do from their groups.

    Args:
        readers: Numbers of the groups that may look.
        writers: Numbers of the groups that may look and change.
    """

    readers: frozenset[int] = frozenset()
    writers: frozenset[int] = frozenset()

    @classmethod
    def of(cls, readers: tuple[str, ...], writers: tuple[str, ...]) -> "Doorkeeper":
        """Return one for groups by name or number.

        Raises:
            InvalidInput: If there is no such group.
        """
        return cls(frozenset(map(_number, readers)), frozenset(map(_number, writers)))

    @property
    def groups(self) -> frozenset[int]:
        """All of them."""
        return self.readers | self.writers

    def admitted(self, connection: socket.socket) -> Peer:
        """Return who is at the other end of a Unix socket."""
        _, uid, gid = _CREDENTIALS.unpack(
            connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
        )
        return self.judged(uid, frozenset((gid, *_further(connection, uid, gid))))

    def judged(self, uid: int, groups: frozenset[int]) -> Peer:
        """Return what a user with these groups may do."""
        if uid in (0, os.geteuid()):
            return Peer(Role.CONTROL, trusted=True)
        if groups & self.writers:
            return Peer(Role.CONTROL)
        return Peer(Role.READ if groups & self.readers else Role.NOTHING)


def _further(connection: socket.socket, uid: int, gid: int) -> tuple[int, ...]:
    """Return the further groups the peer had when it connected, as far as 1024 bytes hold them, Python's most.

    Where they are more, or the kernel is older, those the user is in now.
    """
    try:
        data = connection.getsockopt(socket.SOL_SOCKET, _PEERGROUPS, 1024)
    except OSError:
        return _listed(uid, gid)
    return struct.unpack(f"{len(data) // 4}I", data)


def _listed(uid: int, gid: int) -> tuple[int, ...]:
    try:
        return tuple(os.getgrouplist(pwd.getpwuid(uid).pw_name, gid))
    except KeyError:
        return ()


def _number(group: str) -> int:
    if group.isascii() and group.isdecimal():
        return int(group)
    try:
        return grp.getgrnam(group).gr_gid
    except KeyError:
        raise InvalidInput(f"there is no group {group!r} to let in; make it with: groupadd --system {group}") from None
