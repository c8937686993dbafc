"""The sockets the API listens at: made, permitted, and taken away."""

import os
import socket
import stat
from contextlib import suppress
from pathlib import Path

from polythrottle.daemon.sockets import check_folder, listen_at
from polythrottle.daemon.web.options import Tcp
from polythrottle.errors import DeviceError, InvalidInput, StorageError

BACKLOG = 128
_PATH_MOST = 107
"""Bytes in the path of a Unix socket (unix(7))."""


def unix_socket(path: Path, groups: frozenset[int]) -> socket.socket:
    """Return a listening socket that those may open who may be let in; who they are is looked at again.

    Raises:
        InvalidInput: If its path is too long.
        DeviceError: If another daemon answers there.
        StorageError: If it cannot be made, or something else is there.
        PermissionDenied: If others may write to its folder.
    """
    if len(os.fsencode(path)) > _PATH_MOST:
        raise InvalidInput(f"the path of a socket has at most {_PATH_MOST} bytes: {path}")
    try:
        path.parent.mkdir(mode=0o755, parents=True, exist_ok=True)
        check_folder(path)
        _clear(path)
        listening = listen_at(path, BACKLOG, lambda made: _permit(made, groups))
    except OSError as error:
        raise StorageError(f"the socket {path} cannot be made: {error.strerror or error}") from error
    listening.setblocking(False)
    return listening


def _clear(path: Path) -> None:
    """Take away the socket of a daemon that has died; a living one's stays."""
    try:
        if not stat.S_ISSOCK(path.lstat().st_mode):
            raise StorageError(f"{path} is there already and no socket; name another place with --socket")
    except FileNotFoundError:
        return
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.settimeout(2.0)
        try:
            probe.connect(str(path))
        except (ConnectionRefusedError, FileNotFoundError):
            path.unlink(missing_ok=True)
            return
        except (TimeoutError, BlockingIOError):
            pass
    raise DeviceError(f"another daemon answers at {path}; end it with polythrottle daemon stop, or name another socket")


def _permit(path: Path, groups: frozenset[int]) -> None:
    """Let the groups open the socket: one through its own bits, several only through everybody's."""
    if not groups:
        return
    if len(groups) == 1:
        with suppress(PermissionError):
            os.chown(path, -1, next(iter(groups)))
            path.chmod(0o660)
            return
    path.chmod(0o666)


def tcp_socket(tcp: Tcp) -> socket.socket:
    """Return a listening socket.

    Raises:
        InvalidInput: If there is no such host, or it cannot be listened on there.
    """
    try:
        found = socket.getaddrinfo(tcp.host, tcp.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except (socket.gaierror, UnicodeError) as error:
        raise InvalidInput(f"--tcp {tcp.host}: {error}") from error
    family, kind, protocol, _, address = found[0]
    listening = socket.socket(family, kind, protocol)
    try:
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listening.setblocking(False)
        listening.bind(address)
        listening.listen(BACKLOG)
    except OSError as error:
        listening.close()
        raise InvalidInput(f"--tcp {tcp.host}:{tcp.port} cannot be listened on: {error.strerror}") from error
    return listening


def remove(path: Path, inode: int) -> None:
    """Take the socket's file away unless another daemon has put its own there."""
    with suppress(OSError):
        if path.lstat().st_ino == inode:
            path.unlink()
