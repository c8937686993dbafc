"""Who is at the other end of a connection, as the kernel tells it (unix(7), SO_PEERCRED and SO_PEERGROUPS)."""

import grp
import os
import pwd
import socket
import struct
from dataclasses import dataclass

_CREDENTIALS = struct.Struct("3i")
_PEERGROUPS = 59  # SO_PEERGROUPS: Linux 4.13, include/uapi/asm-generic/socket.h; Python does not name it
_MOST_BYTES = 1024  # socket.getsockopt refuses to ask for more (CPython, Modules/socketmodule.c)


@dataclass(frozen=True)
class Peer:
    """A process that has connected.

    Args:
        pid: Its number, for people.
        uid: Of its user, when it connected.
        gids: Every group it was a member of then.
    """

    pid: int
    uid: int
    gids: frozenset[int] = frozenset()

    @property
    def name(self) -> str:
        """The user's name, or the number where there is none."""
        try:
            return pwd.getpwuid(self.uid).pw_name
        except KeyError:
            return str(self.uid)

    def __str__(self) -> str:
        return f"{self.name} (process {self.pid})"


def peer_of(way: socket.socket) -> Peer:
    """Return who is at the other end of a connection.

    Raises:
        OSError: If the kernel does not tell.
    """
    pid, uid, gid = _CREDENTIALS.unpack(way.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size))
    return Peer(pid, uid, frozenset({gid, *_groups(way, uid, gid)}))


def _groups(way: socket.socket, uid: int, gid: int) -> list[int]:
    """Return the groups the process was in when it connected, those that systemd gave it alone among them.

    Of a process in more than 256 groups, and on kernels before 4.13, as JetPack 4 has them, those of its user.
    """
    try:
        found = way.getsockopt(socket.SOL_SOCKET, _PEERGROUPS, _MOST_BYTES)
        return [group for (group,) in struct.iter_unpack("I", found)]
    except OSError:
        pass
    try:
        return os.getgrouplist(pwd.getpwuid(uid).pw_name, gid)
    except (KeyError, OSError):
        return []


def group_id(name: str) -> int | None:
    """Return the number of a group, None if there is none of that name."""
    try:
        return grp.getgrnam(name).gr_gid
    except KeyError:
        return None


def user_id(name: str) -> int | None:
    """Return the number of a user, None if there is none of that name."""
    try:
        return pwd.getpwnam(name).pw_uid
    except KeyError:
        return None
