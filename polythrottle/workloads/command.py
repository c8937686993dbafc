"""Any command as a workload: one run is one query, or as many as it prints latencies of."""

import os
import re
import select
import shlex
import shutil
import signal
import subprocess
import tempfile
import threading
import time
from collections import deque
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import IO

from polythrottle.errors import InvalidInput, TrialError, Unanswered
from polythrottle.measurement import Query
from polythrottle.placement import Placement, Target
from polythrottle.space import OperatingPoint, SearchSpace
from polythrottle.workloads.knobs import BATCH_SIZE, THREADS, batch_knob, chosen, count, grid_of, threads_knob
from polythrottle.workloads.printed import FORMS, Printed
from polythrottle.workloads.trtexec import PROGRAM, RECONSTRUCTED, Times, Trtexec, Words, runs

_NAMES = (BATCH_SIZE, THREADS)
_PLACE = re.compile(r"(?<![${])\{([A-Za-z_]+)\}(?!\})")
"""What may be meant to be filled in; ``${NAME}`` is for a shell."""
_DOUBLED = re.compile(r"\{\{([A-Za-z_]+)\}\}")
_TAIL = 4096
_PIPE = 1 << 20  # no pipe of an ordinary user holds more (/proc/sys/fs/pipe-max-size)
_LONGEST_LINE = 200


class CommandWorkload:
    """A command that answers one query of a batch each time it is run.

    It gets the batch size and the number of threads where its words say ``{batch_size}`` and ``{threads}``, and as
    ``POLYTHROTTLE_BATCH_SIZE`` and ``POLYTHROTTLE_THREADS``; each knob exists if its placeholder does or its levels are
    given. Any other word in braces is refused; braces that are meant are doubled, ``{{word}}``. No shell is involved,
    standard input is empty, and whatever the command leaves running is killed at its end.

    A command that measures itself prints a latency a line (`polythrottle.workloads.printed`): each is then a query of
    a batch, and the run is all of them. What else it prints is dropped, and where it prints none a run is one query.
    TensorRT's trtexec is understood (`polythrottle.workloads.trtexec`): it is made to write the latency of each query
    to a file with ``--exportTimes``, unless its words name one; behind another program its percentiles are read.

    Args:
        uri: ``cmd:`` and the shell words.
        batch_sizes: Levels of ``batch_size``.
        threads: Levels of ``threads``.
        timeout_s: When a run is given up, in seconds.
        target: The GPU that is tuned; of several, the command sees that one alone, by ``CUDA_VISIBLE_DEVICES``, unless
            that is set already.

    Raises:
        InvalidInput: If the words are malformed, one in braces is not known, or there is no such program.
    """

    def __init__(
        self,
        uri: str,
        *,
        batch_sizes: Sequence[int] | None = None,
        threads: Sequence[int] | None = None,
        timeout_s: float = 60.0,
        target: Target | None = None,
    ) -> None:
        if not 0 < timeout_s < threading.TIMEOUT_MAX:
            raise InvalidInput(f"the timeout of a command must be above zero, not {timeout_s:g} s")
        self.uri, self._timeout_s = uri, timeout_s
        self._shown = {"CUDA_VISIBLE_DEVICES": ",".join(target.uuids)} if target is not None and target.uuids else {}
        self._left: deque[Query] = deque()
        self._told = Trtexec()
        self._prints: bool | None = None
        self._near = ""
        self._words = _split(uri)
        self._trtexec = Words(self._words) if runs(self._words) else None
        self.placement = None if self._trtexec is None else Placement(PROGRAM, 0 if target is None else target.number)
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
        self._left.clear()
        self._point = chosen(self.space, point)
        self._command = [_filled(word, self._point) for word in self._words]
        named = {f"POLYTHROTTLE_{name.upper()}": str(level) for name, level in self._point.items()}
        self._environment = {**self._shown, **os.environ, **named}

    def query(self) -> Query:
        """Run the command once, to its end, or return the next of the queries that the last run printed.

        Raises:
            TrialError: If it cannot be started, fails, does not end in time, or prints latencies that cannot be.
        """
        if not self._left:
            self._left.extend(self._run())
        return self._left.popleft()

    def _run(self) -> list[Query]:
        """Return the queries of a run."""
        if self._trtexec is None:
            return self._queries(None)
        with tempfile.TemporaryDirectory(prefix="polythrottle-") as folder:
            return self._queries(self._trtexec.times(Path(folder)))

    def _queries(self, times: Times | None) -> list[Query]:
        start_s = time.perf_counter()
        run = _Run([*self._command, *(times.added if times else ())], self._environment)
        failure = run.wait(self._timeout_s)
        elapsed_s = run.ended_s - start_s
        if failure:
            raise Unanswered(failure) if run.timed_out else TrialError(failure)
        run.printed.end(elapsed_s)
        run.trtexec.end(elapsed_s, times.written if times else None)
        teller = run.printed if run.printed.latencies else run.trtexec
        if times is not None and not teller.latencies:
            raise TrialError(f"{self._words[0]} told no latency; does it run the engine (no --skipInference)?")
        self._check_as_before(bool(teller.latencies))
        self._near, self._told = "" if teller.latencies else run.printed.near, run.trtexec
        told, size = teller.latencies or [(elapsed_s, None)], count(self._point, BATCH_SIZE)
        step_s = teller.step_s if teller.latencies else 0.0
        return [
            Query(latency_s, items or size, more=number < len(told), step_s=step_s)
            for number, (latency_s, items) in enumerate(told, start=1)
        ]

    def _check_as_before(self, prints: bool) -> None:
        if self._prints is not None and prints is not self._prints:
            before, now = ("printed latencies", "none") if self._prints else ("printed no latencies", "some")
            raise TrialError(f"{self._words[0]} {before} in the run before, and {now} in this; write {FORMS}")
        self._prints = prints

    @property
    def notes(self) -> tuple[str, ...]:
        """What latencies and joules are of, once a run has shown it."""
        if self._trtexec is not None and self._prints:
            return self._trtexec.notes(self._told)
        if self._prints and self._told.reconstructed:
            return (RECONSTRUCTED, "joules are of whole runs, start and end included")
        if self._prints:
            return ("latencies are those the command prints; joules are of its whole runs, start and end included",)
        if self._near:
            return (
                f"the command prints {self._near!r}, which has not the form of a latency, so latency is of whole runs; "
                f"if it is one, write {FORMS}",
            )
        return ()

    def close(self) -> None:
        """Do nothing: every run has ended."""


class _Run:
    """One process and the group it leads."""

    def __init__(self, command: Sequence[str], environment: Mapping[str, str]) -> None:
        self._name = command[0]
        self._tail, self.printed, self.trtexec = b"", Printed(), Trtexec()
        self._over = threading.Event()
        self.timed_out = False
        self.ended_s = 0.0
        try:
            self._process = subprocess.Popen(
                command,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                start_new_session=True,  # its own group, to be killed as one; and Ctrl-C is ours to handle
            )
        except OSError as err:
            raise TrialError(f"{self._name} cannot be started: {err.strerror}") from err

    def wait(self, timeout_s: float) -> str | None:
        """Wait for the end and return what went wrong, if anything did."""
        drain = threading.Thread(target=self._drain, daemon=True)
        alarm = threading.Timer(timeout_s, self._give_up)
        alarm.daemon = True  # whoever is interrupted before it is called off does not wait for it
        drain.start()
        try:
            alarm.start()
            # Until it is reaped its number, and that of its group, cannot be given to another process.
            os.waitid(os.P_PID, self._process.pid, os.WEXITED | os.WNOWAIT)
            self.ended_s = time.perf_counter()
        finally:
            alarm.cancel()
            if alarm.ident is not None:
                alarm.join()
            self._kill_group()
            code = self._process.wait()
            self._over.set()
            drain.join()
            for stream in self._streams:
                stream.close()
        if self.timed_out:
            return f"{self._name} did not end within {timeout_s:g} s and was killed"
        return self._fault(code)

    @property
    def _streams(self) -> tuple[IO[bytes], IO[bytes]]:
        assert self._process.stdout is not None
        assert self._process.stderr is not None
        return self._process.stdout, self._process.stderr

    def _give_up(self) -> None:
        self.timed_out = True
        self._kill_group()

    def _kill_group(self) -> None:
        # All may be gone, or those left may have changed user.
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signal.SIGKILL)

    def _drain(self) -> None:
        """Take latencies, and keep the end of standard error; all must be read, or the command would block."""
        stdout, stderr = (stream.fileno() for stream in self._streams)
        left, over = [stdout, stderr], False
        while left and not over:
            # One look after the end suffices; somebody who left the group may hold the other end open for ever.
            over = self._over.is_set()
            for handle in select.select(left, [], [], 0 if over else 0.05)[0]:
                chunk = os.read(handle, _PIPE)
                if not chunk:
                    left.remove(handle)
                elif handle == stdout:
                    self.printed.feed(chunk)
                    self.trtexec.feed(chunk)
                else:
                    self._tail = (self._tail + chunk)[-_TAIL:]

    def _fault(self, code: int) -> str | None:
        if code == 0:
            return None
        lines = [line.strip() for line in self._tail.decode(errors="replace").splitlines() if line.strip()]
        errors = [line for line in lines if "] [E] " in line] or lines  # TensorRT may warn after its last error
        said = "".join(char for char in errors[-1] if char.isprintable())[:_LONGEST_LINE] if errors else ""
        how = f"exited with code {code}" if code > 0 else f"was killed by {signal.Signals(-code).name}"
        return f"{self._name} {how}{f': {said}' if said else ''}"


def _split(uri: str) -> list[str]:
    try:
        words = shlex.split(uri.removeprefix("cmd:"))
    except ValueError as err:
        raise InvalidInput(f"{uri!r} is not a command: {str(err).lower()}") from None
    if not words:
        raise InvalidInput(f"{uri!r} names no command; write for example cmd:./serve --batch {{batch_size}}")
    if unknown := next((match[0] for word in words for match in _PLACE.finditer(word) if match[1] not in _NAMES), None):
        names = " and ".join(f"{{{name}}}" for name in _NAMES)
        raise InvalidInput(
            f"{unknown} is not filled in: the words are {names}; write {{{unknown}}} if braces are meant"
        )
    return words


def _filled(word: str, point: OperatingPoint) -> str:
    for name, level in point.items():
        word = word.replace(f"{{{name}}}", str(level))
    return _DOUBLED.sub(r"{\1}", word)
