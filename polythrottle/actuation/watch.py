"""What keeps watch over a writer: its own heartbeat, and a guard process that restores should it die or hang."""

import os
import subprocess
import sys
import threading
from functools import partial
from pathlib import Path

from polythrottle.actuation.lease import LEASE_S, Fence, Stuck
from polythrottle.actuation.site import Site
from polythrottle.errors import DeviceError, PolythrottleError

_PACKAGE = Path(__file__).resolve().parent.parent.parent


class Watch:
    """The heartbeat of a writer's lease and the guard that listens to it, until stopped.

    Args:
        site: Of the device.
        fence: Its lease file.
        token: Of the lease.
        boot_id: Of the running kernel.

    Raises:
        DeviceError: If the guard cannot be started.
    """

    def __init__(self, site: Site, fence: Fence, token: int, boot_id: str) -> None:
        self._fence, self._token = fence, token
        self._ended = threading.Event()
        self._spawn = partial(_spawned, site, token, boot_id, str(os.getpid()))
        self._guard = self._spawn()
        self._beat = threading.Thread(target=self._renew, name="polythrottle-lease", daemon=True)
        try:
            self._beat.start()
        except RuntimeError as err:
            self._end_guard()
            raise DeviceError(
                f"cannot start the thread that keeps the lease: {err}; nothing is steered without"
            ) from err

    def _renew(self) -> None:
        while not self._ended.wait(LEASE_S / 4):
            try:
                self._fence.renew(self._token, LEASE_S)
                if self._guard.poll() is not None:
                    self._guard = self._spawn()  # somebody has ended it
            except Stuck:
                continue  # this process's own writer, perhaps
            except PolythrottleError:
                return  # the lease has passed on or cannot be kept; the next write meets it where somebody can act

    def forsake(self) -> None:
        """End the heartbeat and leave the guard behind."""
        self._ended.set()
        self._guard.returncode = 0  # it outlives this process, which is not to wait for it

    def stop(self) -> None:
        """End heartbeat and guard."""
        self._ended.set()
        self._beat.join()
        self._end_guard()

    def _end_guard(self) -> None:
        self._guard.kill()  # not terminated: a stopped one would never end
        self._guard.wait()


def start_guard(site: Site, token: int, boot_id: str, lock: int) -> int:
    """Start a guard that takes over a held lock and stays behind to revert when the lease ends; return its process.

    Args:
        site: Of the device.
        token: Of the lease it listens to.
        boot_id: Of the running kernel.
        lock: The handle that makes its holder the only writer.

    Raises:
        DeviceError: If it cannot be started.
    """
    guard = _spawned(site, token, boot_id, "-", lock)
    guard.returncode = 0  # it outlives this process, which is not to wait for it
    return guard.pid


def _spawned(site: Site, token: int, boot_id: str, pid: str, lock: int | None = None) -> "subprocess.Popen[bytes]":
    handles = () if lock is None else (lock,)
    where = os.pathsep.join(filter(None, (str(_PACKAGE), os.environ.get("PYTHONPATH"))))
    try:
        return subprocess.Popen(
            [
                *(sys.executable, "-m", "polythrottle.actuation.guard"),
                *(str(site.folder), site.stem, boot_id, str(token), pid),
            ],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            cwd="/",
            env={**os.environ, "PYTHONPATH": where},
            pass_fds=handles,
            start_new_session=True,  # a Ctrl-C on the terminal is for the writer
        )
    except OSError as err:
        raise DeviceError(f"cannot start the guard that would restore the device: {err.strerror}") from err
