"""What keeps watch over a writer: its own heartbeat, and a guard process that restores should it die or hang.

The guard is told through a pipe what goes on record, and so knows it also when the disk has failed meanwhile.
"""

from __future__ import annotations

import fcntl
import os
import select
import subprocess
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path

from polythrottle.actuation.drivers.controls import ROOTS_VARIABLE, roots
from polythrottle.actuation.state.lease import LEASE_S, Fence, Passed, Stuck
from polythrottle.actuation.state.record import NOW, READY
from polythrottle.actuation.state.site import Site
from polythrottle.domain.clock import Thread
from polythrottle.domain.errors import DeviceError, PolythrottleError

_PIPE_BYTES = 1 << 20
_MOST_ENDED = 2
_PATIENCE_S = 30.0
_PACKAGE = Path(__file__).resolve().parent.parent.parent


class Watchdog:
    """The heartbeat of a writer's lease and the guard that listens to it, until stopped.

    Args:
        site: Of the device.
        fence: Its lease file.
        token: Of the lease.
        boot_id: Of the running kernel.
        known: Returns what is on record.
        presence: The handle by which the kernel tells that the device is steered; its guard has it too.

    Raises:
        DeviceError: If the guard cannot be started.
    """

    def __init__(
        self, site: Site, fence: Fence, token: int, boot_id: str, known: Callable[[], bytes], *, presence: int | None
    ) -> None:
        self._fence = fence
        self._token = token
        self._known = known
        self._ended = threading.Event()
        self._telling = threading.Lock()
        self.failure: PolythrottleError | None = None
        """Why the lease cannot be kept at the moment."""
        self._ended_itself = 0
        self._spawn = partial(_spawned, site, token, boot_id, str(os.getpid()), presence=presence)
        self._guard = self._spawn(known())
        self._beat = Thread(target=self._renew, name="polythrottle-lease", daemon=True)
        try:
            self._beat.start()
        except DeviceError as err:
            self._end_guard()
            raise DeviceError(f"{err}; it keeps the lease, and nothing is steered without") from err

    def _renew(self) -> None:
        while not self._ended.wait(LEASE_S / 4):
            try:
                self._fence.renew(self._token, LEASE_S)
                self._replace_guard()
                self.failure = None
            except Stuck:
                continue  # this process's own writer, perhaps
            except Passed:
                return  # the next write meets it where somebody can act
            except PolythrottleError as err:
                self.failure = err  # as the next write does this

    def check(self) -> None:
        """Start another guard where this one has ended, as before each write, and say why there can be none.

        Raises:
            PolythrottleError: If the lease cannot be kept, or no guard stays.
        """
        if self.failure is not None:
            raise self.failure
        self._replace_guard()

    def _replace_guard(self) -> None:
        """Start another guard where this one has been ended; not where they end by themselves, one after the other."""
        with self._telling:
            code = self._guard.poll()
            if code is None:
                return
            self._ended_itself = self._ended_itself + 1 if code > 0 else 0
            if self._ended_itself >= _MOST_ENDED:
                raise DeviceError(f"the guard that would restore the device does not stay (exit status {code})")
            _close(self._guard)
            self._guard = self._spawn(self._known())

    def tell(self, text: bytes) -> None:
        """Tell the guard what is about to go on record."""
        with self._telling:
            _tell(self._guard, text)

    def forsake(self) -> None:
        """End the heartbeat, and leave it to the guard to restore, now."""
        self._ended.set()
        self.tell(NOW)
        self._guard.returncode = 0  # it outlives this process, which is not to wait for it
        _close(self._guard)

    def disown(self) -> None:
        """Let go of a guard that belongs to the process which has forked this one."""
        self._guard.returncode = 0
        _close(self._guard)

    def rest(self) -> None:
        """End the heartbeat; the guard goes on."""
        self._ended.set()
        self._beat.join()

    def stop(self) -> None:
        """End heartbeat and guard."""
        self.rest()
        self._end_guard()

    def _end_guard(self) -> None:
        self._guard.kill()  # not terminated: a stopped one would never end
        self._guard.wait()
        _close(self._guard)


def start_guard(site: Site, token: int, boot_id: str, *, lock: int | None, known: bytes, presence: int | None) -> int:
    """Start a guard that stays behind to revert or keep what stands, and return its process.

    Args:
        site: Of the device.
        token: Of the lease it listens to.
        boot_id: Of the running kernel.
        lock: The handle that makes its holder the only writer; None for what stands by its lease alone.
        known: What is on record.
        presence: As in `Watchdog`.

    Raises:
        DeviceError: If it cannot be started.
    """
    pid = "-" if lock is None else f"-{lock}"
    guard = _spawned(site, token, boot_id, pid, known, lock=lock, presence=presence, answers=True)
    _close(guard)
    _await(guard)
    guard.returncode = 0  # it outlives this process, which is not to wait for it
    return guard.pid


def _await(guard: subprocess.Popen[bytes]) -> None:
    """Wait until a guard says that it watches.

    Raises:
        DeviceError: If it ends before that, or does not get there.
    """
    assert guard.stdout is not None
    with guard.stdout as answers:
        ready = bool(select.select([answers], [], [], _PATIENCE_S)[0]) and os.read(answers.fileno(), 1) == READY
    if not ready:
        guard.kill()
        raise DeviceError(f"the guard that would restore the device does not stay (exit status {guard.wait()})")


def _spawned(
    site: Site,
    token: int,
    boot_id: str,
    pid: str,
    known: bytes,
    *,
    presence: int | None,
    lock: int | None = None,
    answers: bool = False,
) -> subprocess.Popen[bytes]:
    handles = [each for each in (lock, presence) if each is not None]
    where = os.pathsep.join(filter(None, (str(_PACKAGE), os.environ.get("PYTHONPATH"))))
    words = ["-m", "polythrottle.actuation.guard", str(site.folder), site.stem, boot_id, str(token), pid]
    try:
        guard = subprocess.Popen(
            [sys.executable, *words],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE if answers else subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            cwd="/",
            env={**os.environ, "PYTHONPATH": where, ROOTS_VARIABLE: os.pathsep.join(map(str, roots()))},
            pass_fds=handles,
            start_new_session=True,  # a Ctrl-C on the terminal is for the writer
        )
    except OSError as err:
        raise DeviceError(f"cannot start the guard that would restore the device: {err.strerror}") from err
    assert guard.stdin is not None
    with suppress(OSError):  # the usual size does for most boards
        fcntl.fcntl(guard.stdin, getattr(fcntl, "F_SETPIPE_SZ", 1031), _PIPE_BYTES)
    os.set_blocking(guard.stdin.fileno(), False)  # a guard that is stopped does not hold up its writer
    _tell(guard, known)
    return guard


def _tell(guard: subprocess.Popen[bytes], text: bytes) -> None:
    """Tell a guard something, or nothing more at all where it does not listen: the disk has it too."""
    if guard.stdin is None or guard.stdin.closed or not text:
        return
    try:
        whole = os.write(guard.stdin.fileno(), text) == len(text)
    except OSError:
        whole = False
    if not whole:
        _close(guard)


def _close(guard: subprocess.Popen[bytes]) -> None:
    if guard.stdin is not None:
        with suppress(OSError):
            guard.stdin.close()
