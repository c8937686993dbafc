"""A Unix socket: the folder it may lie in, listening there with its permissions.

Who is at the other end of a connection.
"""

from __future__ import annotations

import grp
import os
import pwd
import socket
import stat
import struct
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from polythrottle.domain.errors import InvalidInput, PermissionDenied, StorageError

PATH_MOST = 107
"""Bytes in the path of a Unix socket (unix(7), sun_path)."""

# Who is at the other end of a connection, as the kernel tells it (unix(7), SO_PEERCRED and SO_PEERGROUPS).

_PEERCRED = getattr(socket, "SO_PEERCRED", 17)  # which PyPy does not name
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
    pid, uid, gid = _CREDENTIALS.unpack(way.getsockopt(socket.SOL_SOCKET, _PEERCRED, _CREDENTIALS.size))
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


# Where a socket may lie: in a folder in which nobody else could put one of theirs, and there only once it listens.


def check_path(path: Path) -> None:
    """Refuse a path at which no socket can be made, whatever its folder; nothing is touched.

    Raises:
        InvalidInput: If it is too long.
        StorageError: If something else is there.
    """
    if len(os.fsencode(path)) > PATH_MOST:
        raise InvalidInput(f"the path of a socket has at most {PATH_MOST} bytes: {path}")
    with suppress(OSError):  # not there, or not to be looked at, which whoever makes it says better
        if not stat.S_ISSOCK(path.lstat().st_mode):
            raise StorageError(f"{path} is there already and no socket; name another place with --socket")


def check_folder(path: Path) -> None:
    """Refuse the place of a socket where somebody else could listen first, and be taken for this process.

    Args:
        path: Of the socket. Its folder must be there, belong to this user or root, and be closed to what others write;
            a sticky bit, as on /tmp, closes it only to what they take away. A folder above it may be sticky.

    Raises:
        PermissionDenied: If others may write there; says which folder.
    """
    folder = path.parent.resolve()
    for each in (folder, *folder.parents):
        about = each.stat()
        theirs = each == folder and about.st_uid not in (0, os.geteuid())
        sticky = each != folder and about.st_mode & stat.S_ISVTX
        if theirs or (_open_to_others(about) and not sticky):
            raise PermissionDenied(
                f"{each} is open to others, who could listen at {path} first; name a socket in a folder that only this "
                "user may write to"
            )


def listen_at(path: Path, backlog: int, permit: Callable[[Path], None]) -> socket.socket:
    """Return a Unix socket that listens; it appears at its path at once with its permissions and listening.

    Who waits for the path may therefore connect as soon as it is there.

    Args:
        path: Of the socket; a socket there is replaced.
        backlog: Connections that may wait.
        permit: Gives the path owner and mode; until then only this user may connect.

    Raises:
        OSError: If it cannot be made.
    """
    made = path.with_name(path.name[:-1] + "~")  # no longer than the path, which has few bytes to spare
    listening = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
    try:
        made.unlink(missing_ok=True)
        usual = os.umask(0o177)
        try:
            listening.bind(os.fspath(made))
        finally:
            os.umask(usual)
        listening.listen(backlog)
        permit(made)
        made.replace(path)
    except BaseException:
        listening.close()
        with suppress(OSError):
            made.unlink(missing_ok=True)
        raise
    return listening


def _open_to_others(about: os.stat_result) -> bool:
    """Return whether anybody but the owner may write; a group of nobody else, as many a user has, is no other."""
    if about.st_mode & stat.S_IWOTH:
        return True
    return bool(about.st_mode & stat.S_IWGRP) and not _alone(about.st_uid, about.st_gid)


def _alone(user: int, group: int) -> bool:
    try:
        owner = pwd.getpwuid(user)
        members = grp.getgrgid(group)
    except KeyError:
        return False
    return owner.pw_gid == group and members.gr_name == owner.pw_name and not set(members.gr_mem) - {owner.pw_name}
