"""Any command as a workload: one run is one query, or as many as the latencies that it prints."""

from __future__ import annotations

import json
import math
import os
import re
import select
import shlex
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from decimal import Decimal
from pathlib import Path
from typing import IO, Any

from polythrottle.domain.backports import removeprefix
from polythrottle.domain.errors import InvalidInput, TrialError, Unanswered
from polythrottle.domain.measurement import Query
from polythrottle.domain.ports import Placement, Target
from polythrottle.domain.space import BATCH_SIZE, OperatingPoint, SearchSpace
from polythrottle.domain.units import parse_quantity
from polythrottle.storage.atomic_file import temporary_folder
from polythrottle.workloads.inputs import THREADS, batch_knob, chosen, count, grid_of, threads_knob
from polythrottle.workloads.trtexec import (
    LONGEST_LINE,
    PROGRAM,
    RECONSTRUCTED,
    ExportedTimes,
    PrintedLines,
    Trtexec,
    TrtexecCommand,
    runs,
)

# Latencies that a command prints: a number with its unit on a line of its own, or a JSON object with ``latency_s``.
#
# 12.5ms {"latency_s": 0.0125, "items": 4}
#
# Any other line is passed over, so that a program may say what else it likes.

FORMS = '12.5ms, or {"latency_s": 0.0125}, on a line of its own'
_QUANTITY = re.compile(r"([+-]?(?:\d+\.?\d*|\.\d+)(?:[eE][+-]?\d+)?)\s*(s|ms|us|µs|μs|min|h)")
_NUMBER = r"[+-]?(?:\d+(?:[.,]\d*)?|\.\d+)(?:[eE][+-]?\d+)?"
_TIME = rf"{_NUMBER}\s*(?:[mnuµμ]?s|[mnuµμ]?secs?|min|h|(?:milli|micro|nano)?seconds?)?"
_OBJECT = r'[\[{].*"[^"]*latency[^"]*"\s*:.*'
_NEAR = re.compile(
    rf"(?:[\w ]*latency\w*\s*[:=]?\s*)?{_TIME}|\d[\d.]*\s*[mnuµμ]?s|{_OBJECT}", re.IGNORECASE | re.DOTALL
)
_LOOKED_AT = 256
_SHOWN = 60
_LEAST_S = 1e-9
_MOST = 100_000
_MOST_ITEMS = 1_000_000


@dataclass
class Printed(PrintedLines):
    """What a run has printed so far.

    Args:
        latencies: Each in seconds, with its items where the line says them.
        near: The first line that looks like a latency and is in none of the forms, such as a number without a unit.
        step_s: The last decimal place that latencies have: what they were rounded to, or cut off at; inf if none were.
    """

    latencies: list[tuple[float, int | None]] = field(default_factory=list)
    near: str = ""
    step_s: float = math.inf
    _fault: str = ""

    def end(self, elapsed_s: float) -> None:
        """Take note that the run has ended: what stands after the last line break is a line too.

        Args:
            elapsed_s: How long the run took.

        Raises:
            TrialError: If a line is a latency that cannot be.
        """
        self._line(self._rest)
        self._rest = b""
        longest_s = max((latency_s for latency_s, _ in self.latencies), default=0.0)
        if longest_s > elapsed_s and not self._fault:
            self._fault = f"a latency of {longest_s:.4g} s is more than the {elapsed_s:.4g} s the run took"
        if len(self.latencies) > _MOST:
            self._fault = f"more than {_MOST:,} latencies in a run are too many"
        if self._fault:
            raise TrialError(f"the command prints no latency that can be: {self._fault}; write {FORMS}")

    def _line(self, line: bytes) -> None:
        if len(line) > LONGEST_LINE or len(self.latencies) > _MOST:
            return
        text = line.decode(errors="replace").strip()
        try:
            found = _latency(text)
        except InvalidInput as error:
            self._fault = self._fault or str(error)
            return
        if found is not None:
            self.latencies.append(found)
            self.step_s = min(self.step_s, _step_s(text, found[0]))
        elif not self.near and any(_NEAR.fullmatch(part.strip()) for part in text[:_LOOKED_AT].split("\r")):
            if len(text) <= _SHOWN:
                self.near = text
            else:
                self.near = f"{text[:_SHOWN]}…"


def _latency(text: str) -> tuple[float, int | None] | None:
    """Return the latency that a line says, and its items if it says them; None if it is some other line.

    Raises:
        InvalidInput: If it says a latency that is none.
    """
    if _QUANTITY.fullmatch(text):
        if len(text) > _SHOWN:
            raise InvalidInput(f"{text[:_SHOWN]!r}… has more digits than a time")
        return _possible(text, parse_quantity(text, "s"), None)
    if not (text.startswith("{") and '"latency_s"' in text):
        return None
    try:
        said: dict[str, Any] = json.loads(text)
    except (ValueError, RecursionError):
        raise InvalidInput(f"{text[:60]!r} is no JSON object") from None
    if "latency_s" not in said:
        return None
    return _possible(text, said.get("latency_s"), said.get("items"))


def _step_s(text: str, latency_s: float) -> float:
    """Return the last decimal place that a line shows of a latency, in seconds."""
    written = _QUANTITY.fullmatch(text)
    number, unit = written.groups() if written else (f"{latency_s:.12g}", "s")
    return parse_quantity(f"1e{Decimal(number).as_tuple().exponent}{unit}", "s")


def _possible(text: str, latency_s: Any, items: Any) -> tuple[float, int | None]:
    number = isinstance(latency_s, (int, float)) and not isinstance(latency_s, bool)
    if not (number and 0 < latency_s <= sys.float_info.max):
        raise InvalidInput(f"{text[:60]!r} is no time above zero")
    if latency_s < _LEAST_S:
        raise InvalidInput(f"{text[:60]!r} is less than a nanosecond")
    if items is not None and (type(items) is not int or not 0 < items <= _MOST_ITEMS):
        raise InvalidInput(f"{text[:60]!r} has items that are no whole number from 1 to {_MOST_ITEMS:,}")
    return float(latency_s), items


# Any command as a workload: one run is one query, or as many as it prints latencies of.

_NAMES = (BATCH_SIZE, THREADS)
_PLACE = re.compile(r"(?<![${])\{([A-Za-z_]+)\}(?!\})")
"""What may be meant to be filled in; ``${NAME}`` is for a shell."""
_DOUBLED = re.compile(r"\{\{([A-Za-z_]+)\}\}")
_TAIL = 4096
_PIPE = 1 << 20  # no pipe of an ordinary user holds more (/proc/sys/fs/pipe-max-size)
_LONGEST_SHOWN_LINE = 200


class CommandWorkload:
    """A command that answers one query of a batch each time it is run.

    It gets the batch size and the number of threads where its words say ``{batch_size}`` and ``{threads}``, and as
    ``POLYTHROTTLE_BATCH_SIZE`` and ``POLYTHROTTLE_THREADS``; each knob exists if its placeholder does or its levels are
    given. Any other word in braces is refused; braces that are meant are doubled, ``{{word}}``. No shell is involved,
    standard input is empty, and whatever the command leaves running is killed at its end.

    A command that measures itself prints a latency a line (`polythrottle.workloads.command`): each is then a query of
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
        self.uri = uri
        self._timeout_s = timeout_s
        if target is not None and target.uuids:
            self._shown = {"CUDA_VISIBLE_DEVICES": ",".join(target.uuids)}
        else:
            self._shown = {}
        self._left: deque[Query] = deque()
        self._told = Trtexec()
        self._prints: bool | None = None
        self._near = ""
        self._words = _split(uri)
        self._trtexec = TrtexecCommand(self._words) if runs(self._words) else None
        if self._trtexec is None:
            self.placement = None
        else:
            self.placement = Placement(PROGRAM, 0 if target is None else target.number)
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
        # In this order: which GPUs it sees the user may have set, and what its knobs are is ours to say.
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
        with temporary_folder() as folder:
            return self._queries(self._trtexec.times(folder))

    def _queries(self, times: ExportedTimes | None) -> list[Query]:
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
        self._near = "" if teller.latencies else run.printed.near
        self._told = run.trtexec
        told = teller.latencies or [(elapsed_s, None)]
        size = count(self._point, BATCH_SIZE)
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
        self._tail = b""
        self.printed = Printed()
        self.trtexec = Trtexec()
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
            _await_end(self._process.pid)
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
        left = [stdout, stderr]
        over = False
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
        if errors:
            said = "".join(char for char in errors[-1] if char.isprintable())[:_LONGEST_SHOWN_LINE]
        else:
            said = ""
        if code > 0:
            how = f"exited with code {code}"
        else:
            how = f"was killed by {signal.Signals(-code).name}"
        return f"{self._name} {how}{f': {said}' if said else ''}"


def _await_end(pid: int) -> None:
    """Wait until a child has ended, without reaping it."""
    if hasattr(os, "waitid"):
        os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
        return
    while True:  # PyPy has no waitid: the state in proc_pid_stat(5) says it too, a quarter of a millisecond late
        if Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()[0] in "ZX":
            return
        time.sleep(0.25e-3)


def _split(uri: str) -> list[str]:
    try:
        words = shlex.split(removeprefix(uri, "cmd:"))
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
