"""The actuator as a process: its socket, its signals, its beginning and its end."""

from __future__ import annotations

import argparse
import fcntl
import os
import signal
import socket
import stat
import sys
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from polythrottle.actuation.argument_parser import OneLineParser, named_path
from polythrottle.actuation.server.permits import GROUP, Permits
from polythrottle.actuation.server.request_handler import Service
from polythrottle.actuation.server.server import Server
from polythrottle.actuation.server.unix_socket import PATH_MOST, check_folder, group_id, listen_at
from polythrottle.actuation.state.site import Site, opened
from polythrottle.actuation.systemd import Supervisor
from polythrottle.backends import find_device
from polythrottle.backends.served_devices import given_uri, served_uri, usable_part, why_missing
from polythrottle.domain.errors import DeviceError, InvalidInput, PolythrottleError, StorageError
from polythrottle.storage.paths import ACTUATOR_SOCKET, run_dir
from polythrottle.storage.untrusted import printable

_BACKLOG = 64


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the actuator until SIGTERM or SIGINT; returns an exit code.

    Args:
        arguments: Of the command line; those of this process by default.
    """
    given = _parser().parse_args(arguments)
    try:
        return _run(given.socket, given.device, given.permits)
    except PolythrottleError as err:
        _say(str(err))
        return err.exit_code


def _parser() -> argparse.ArgumentParser:
    parser = OneLineParser(
        prog="polythrottle daemon actuator", description="Set a device for those whom the administrator permits."
    )
    parser.add_argument("--socket", type=named_path, help="where to listen; actuator.sock in the run folder by default")
    parser.add_argument("--device", action="append", metavar="URI", help="what to serve; the board or GPU found here")
    parser.add_argument("--permits", type=named_path, metavar="FILE", help="instead of /etc/polythrottle/permits.toml")
    return parser


def _run(path: Path | None, devices: Sequence[str] | None, permits_file: Path | None) -> int:
    uris = [served_uri(each) for each in devices or [find_device().uri]]
    permits = Permits.read(permits_file)
    absent = {uri: why for uri in uris if (why := why_missing(uri))}
    with listening(path if path is not None else run_dir() / ACTUATOR_SOCKET) as listener:
        service = Service(uris, permits)
        supervisor = Supervisor()
        for text in service.start():
            _say(f"left from before: {text}")
        for uri, why in absent.items():
            meanwhile = usable_part(uri)
            served = f"; served meanwhile, each by itself: {meanwhile}" if meanwhile else ""
            _say(f"{given_uri(uri)} is not there yet, and is waited for: {why}{served}")
        server = Server(listener, service, supervisor)
        _heed(server)
        supervisor.ready(f"serves {', '.join(uris)}")
        try:
            server.run()
        finally:
            supervisor.stopping()
            left = service.close()
            for text in left:
                _say(f"not as it was found: {text}")
            server.close()
    if left:
        return DeviceError.exit_code
    return 0


def _heed(server: Server) -> None:
    def stop(number: int, frame: object) -> None:
        server.stop()

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, stop)
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    signal.signal(signal.SIGPIPE, signal.SIG_IGN)
    signal.set_wakeup_fd(server.waker, warn_on_full_buffer=False)


def _say(text: str) -> None:
    with suppress(OSError):
        sys.stderr.write(f"polythrottle actuator: {printable(text)}\n")
        sys.stderr.flush()


@contextmanager
def listening(path: Path) -> Iterator[socket.socket]:
    """Listen on a socket that the group ``polythrottle`` may connect to; it is gone afterwards.

    Args:
        path: Where; a socket that nobody listens on any more is replaced.

    Raises:
        InvalidInput: If the path is too long for a socket, or something else is there.
        DeviceError: If another actuator listens there.
        StorageError: If the socket cannot be made.
        PermissionDenied: If others may write to its folder.
    """
    if len(os.fsencode(path)) > PATH_MOST:
        raise InvalidInput(f"{path} is too long for a socket, which may have {PATH_MOST} bytes")
    group = group_id(GROUP) if os.geteuid() == 0 else None
    try:
        path.parent.mkdir(mode=0o755, parents=True, exist_ok=True)
        check_folder(path)
        site = Site.of(f"actuator {zlib.crc32(os.fsencode(path.absolute())):08x}")
        site.prepare()
        lock = opened(site.lock)
    except OSError as err:
        raise StorageError(f"cannot make a socket in {path.parent}: {err.strerror}") from err
    try:
        _only(lock, path)
        with _bound(path, group) as listener:
            yield listener
            path.unlink(missing_ok=True)
    finally:
        os.close(lock)


def _only(lock: int, path: Path) -> None:
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise DeviceError(f"another actuator listens on {path}; stop it first") from None
    with suppress(FileNotFoundError):
        if not stat.S_ISSOCK(path.lstat().st_mode):
            raise InvalidInput(f"{path} is no socket; name another place")
        path.unlink()


def _bound(path: Path, group: int | None) -> socket.socket:
    def permit(made: Path) -> None:
        try:
            if group is not None and made.stat().st_gid != group:
                os.chown(made, 0, group)
            os.chmod(made, 0o660)
        except OSError as err:
            raise StorageError(f"cannot give the socket {path} to its group: {err.strerror}") from err

    try:
        return listen_at(path, _BACKLOG, permit)
    except OSError as err:
        raise StorageError(f"cannot make the socket {path}: {err.strerror}") from err
