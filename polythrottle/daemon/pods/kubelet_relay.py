"""Hands a socket on to a group: ``python -m polythrottle.daemon.pods.kubelet_relay KUBELET_SOCKET SOCKET``.

The kubelet's socket lies in a folder that is root's alone (kubernetes/kubernetes, pkg/kubelet/util/util_unix.go), and
whoever reads there has to be root. So this process is, without any capability, and the daemon is not: it passes every
byte on of those who may connect to a socket of its own, members of the group it runs as. What the kubelet tells there
(the PodResources API) can be read and not changed.
"""

from __future__ import annotations

import argparse
import socket
import sys
import threading
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from polythrottle.actuation.server.unix_socket import check_folder, check_path, listen_at
from polythrottle.domain.errors import PolythrottleError

_BACKLOG = 8
_CONNECTIONS_MOST = 8
_PIECE_BYTES = 65536
_STACK_BYTES = 256 * 1024


def main(arguments: Sequence[str] | None = None) -> int:
    """Hand on until the process is ended; returns an exit code.

    Args:
        arguments: Of the command line; those of this process by default.
    """
    parser = argparse.ArgumentParser(
        prog="polythrottle.daemon.pods.kubelet_relay", description="Hand a socket on to a group."
    )
    parser.add_argument("source", type=Path, help="the socket of the kubelet")
    parser.add_argument("socket", type=Path, help="where to listen for members of this process's group")
    given = parser.parse_args(arguments)
    try:
        check_path(given.socket)
        # Where others may write, one of them could lay a socket there first and be taken for the kubelet.
        check_folder(given.socket)
        listener = listen_at(given.socket, _BACKLOG, lambda made: made.chmod(0o660))
    except PolythrottleError as error:
        sys.stderr.write(f"{parser.prog}: {error}\n")
        return error.exit_code
    except OSError as error:
        sys.stderr.write(f"{parser.prog}: cannot listen at {given.socket}: {error.strerror}\n")
        return 1
    threading.stack_size(_STACK_BYTES)
    hand_on(listener, given.source)
    return 0


def hand_on(listener: socket.socket, source: Path) -> None:
    """Connect each who comes with the source, until the listener is closed.

    Args:
        listener: Where they come.
        source: The socket they are connected with; whoever comes while nobody listens there is hung up on.
    """
    free = threading.BoundedSemaphore(_CONNECTIONS_MOST)
    while True:
        try:
            near, _ = listener.accept()
        except OSError:
            return
        if not free.acquire(blocking=False):
            near.close()
            continue
        threading.Thread(target=_connect, args=(near, source, free), daemon=True).start()


def _connect(near: socket.socket, source: Path, free: threading.BoundedSemaphore) -> None:
    try:
        with near, socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC) as far, suppress(OSError):
            far.connect(str(source))
            back = threading.Thread(target=_pass, args=(far, near), daemon=True)
            back.start()
            _pass(near, far)
            back.join()
    finally:
        free.release()


def _pass(source: socket.socket, sink: socket.socket) -> None:
    """Pass bytes on until either end hangs up, and hang up both."""
    with suppress(OSError):
        while piece := source.recv(_PIECE_BYTES):
            sink.sendall(piece)
    # Where one of a gRPC connection has ended, nothing more is to be said by the other.
    for each in (source, sink):
        with suppress(OSError):
            each.shutdown(socket.SHUT_RDWR)


if __name__ == "__main__":
    sys.exit(main())
