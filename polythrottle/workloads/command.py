"""Any command as a workload: one run is one query."""

import os
import select
import shlex
import shutil
import signal
import subprocess
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import IO

from polythrottle.errors import InvalidInput, TrialError
from polythrottle.measurement import Query
from polythrottle.space import OperatingPoint, SearchSpace
from polythrottle.workloads.knobs import BATCH_SIZE, THREADS, batch_knob, chosen, count, grid_of, threads_knob

_TAIL = 4096
_PIPE = 1 << 20  # no pipe of an ordinary user holds more (/proc/sys/fs/pipe-max-size)
_LONGEST_LINE = 200


class CommandWorkload:
    """A command that answers one query of a batch each time it is run.

    It gets the batch size and the number of threads where its words say ``{batch_size}`` and ``{threads}``, and as
    ``POLYTHROTTLE_BATCH_SIZE`` and ``POLYTHROTTLE_THREADS``; each knob exists if its placeholder does or its levels are
    given. No shell is involved. Standard input is empty, standard output is dropped, and whatever the command leaves
    running is killed when it ends.

    Args:
        uri: ``cmd:`` and the shell words.
        batch_sizes: Levels of ``batch_size``.
        threads: Levels of ``threads``.
        timeout_s: When a run is given up, in seconds.

    Raises:
        InvalidInput: If the words are malformed or there is no such program.
    """

    def __init__(
        self,
        uri: str,
        *,
        batch_sizes: Sequence[int] | None = None,
        threads: Sequence[int] | None = None,
        timeout_s: float = 60.0,
    ) -> None:
        if not 0 < timeout_s < threading.TIMEOUT_MAX:
            raise InvalidInput(f"the timeout of a command must be above zero, not {timeout_s:g} s")
        self.uri, self._timeout_s = uri, timeout_s
        self._words = _split(uri)
        knobs = []
        if batch_sizes is not None or self._mentions(BATCH_SIZE):
            knobs.append(batch_knob(batch_sizes))
        if threads is not None or self._mentions(THREADS):
            knobs.append(threads_knob(threads))
        self.space: SearchSpace = grid_of(knobs)
        self.apply(self.space.default)
        if shutil.which(self._command[0]) is None:
            raise InvalidInput(f"{self._command[0]!r} is not a program that can be run here; check the path or PATH")

    def _mentions(self, name: str) -> bool:
        return any(f"{{{name}}}" in word for word in self._words)

    def apply(self, point: OperatingPoint) -> None:
        """Set words and environment of the runs to come.

        Raises:
            KnobRejected: If the point is not in the space.
        """
        self._point = chosen(self.space, point)
        self._command = [_filled(word, self._point) for word in self._words]
        named = {f"POLYTHROTTLE_{name.upper()}": str(level) for name, level in self._point.items()}
        self._environment = {**os.environ, **named}

    def query(self) -> Query:
        """Run the command once, to its end.

        Raises:
            TrialError: If it cannot be started, fails, or does not end in time.
        """
        start_s = time.perf_counter()
        run = _Run(self._command, self._environment)
        failure = run.wait(self._timeout_s)
        latency_s = run.ended_s - start_s
        if failure:
            raise TrialError(failure)
        return Query(latency_s, count(self._point, BATCH_SIZE))

    def close(self) -> None:
        """Do nothing: every run has ended."""


class _Run:
    """One process and the group it leads."""

    def __init__(self, command: Sequence[str], environment: Mapping[str, str]) -> None:
        self._name = command[0]
        self._tail = b""
        self._over = threading.Event()
        self._timed_out = False
        self.ended_s = 0.0
        try:
            self._process = subprocess.Popen(
                command,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                start_new_session=True,  # its own group, to be killed as one; and Ctrl-C is ours to handle
            )
        except OSError as err:
            raise TrialError(f"{self._name} cannot be started: {err.strerror}") from err

    def wait(self, timeout_s: float) -> str | None:
        """Wait for the end and return what went wrong, if anything did."""
        drain = threading.Thread(target=self._drain, daemon=True)
        alarm = threading.Timer(timeout_s, self._give_up)
        drain.start()
        alarm.start()
        try:
            # Until it is reaped its number, and that of its group, cannot be given to another process.
            os.waitid(os.P_PID, self._process.pid, os.WEXITED | os.WNOWAIT)
            self.ended_s = time.perf_counter()
        finally:
            alarm.cancel()
            alarm.join()
            self._kill_group()
            code = self._process.wait()
            self._over.set()
            drain.join()
            self._stderr.close()
        if self._timed_out:
            return f"{self._name} did not end within {timeout_s:g} s and was killed"
        return self._fault(code)

    @property
    def _stderr(self) -> IO[bytes]:
        assert self._process.stderr is not None
        return self._process.stderr

    def _give_up(self) -> None:
        self._timed_out = True
        self._kill_group()

    def _kill_group(self) -> None:
        # All may be gone, or those left may have changed user.
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signal.SIGKILL)

    def _drain(self) -> None:
        """Keep the end of standard error; all of it must be read, or the command would block."""
        handle = self._stderr.fileno()
        ended = over = False
        while not ended and not over:
            # One look after the end suffices; somebody who left the group may hold the other end open for ever.
            over = self._over.is_set()
            ready, _, _ = select.select([handle], [], [], 0 if over else 0.05)
            chunk = os.read(handle, _PIPE) if ready else b""
            self._tail = (self._tail + chunk)[-_TAIL:]
            ended = bool(ready) and not chunk

    def _fault(self, code: int) -> str | None:
        if code == 0:
            return None
        lines = [line.strip() for line in self._tail.decode(errors="replace").splitlines() if line.strip()]
        said = "".join(char for char in lines[-1] if char.isprintable())[:_LONGEST_LINE] if lines else ""
        how = f"exited with code {code}" if code > 0 else f"was killed by {signal.Signals(-code).name}"
        return f"{self._name} {how}{f': {said}' if said else ''}"


def _split(uri: str) -> list[str]:
    try:
        words = shlex.split(uri.removeprefix("cmd:"))
    except ValueError as err:
        raise InvalidInput(f"{uri!r} is not a command: {str(err).lower()}") from None
    if not words:
        raise InvalidInput(f"{uri!r} names no command; write for example cmd:./serve --batch {{batch_size}}")
    return words


def _filled(word: str, point: OperatingPoint) -> str:
    for name, level in point.items():
        word = word.replace(f"{{{name}}}", str(level))
    return word
