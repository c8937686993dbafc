"""Requests as this machine tells of them: reported by the serving program, logged to a file.

Or only that its process runs.
"""

from __future__ import annotations

import math
import os
from bisect import bisect_left, insort
from collections import deque
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from polythrottle.daemon.control.events import Target
from polythrottle.daemon.observation import RequestStats, failed_of, known_sum

# How long requests took lately: a sliding window of latencies with its p99 and its mean.

WINDOW_S = 60.0
"""How far back is looked: an SLO is meant for minutes."""
LEAST = 20
"""Fewer requests than this say nothing of a p99."""
_MOST = 60_000


class LatencyWindow:
    """Latencies of the requests answered in the last `WINDOW_S`, bounded in number: the oldest go first.

    Args:
        window_s: How far back to look.
        most: How many requests to remember at most.
    """

    def __init__(self, window_s: float = WINDOW_S, most: int = _MOST) -> None:
        self._window_s = window_s
        self._most = most
        self._times: deque[tuple[float, float]] = deque()
        self._sorted: list[float] = []
        self._sum_s = 0.0
        self._begun_s: float | None = None
        self._now_s = -math.inf

    def __len__(self) -> int:
        return len(self._times)

    def add(self, at_s: float, latency_s: float) -> None:
        """Note a request.

        Args:
            at_s: When it was answered; not before any noted earlier.
            latency_s: How long it took.
        """
        if self._begun_s is None:
            self._begun_s = at_s
        self._now_s = max(self._now_s, at_s)
        self._times.append((at_s, latency_s))
        insort(self._sorted, latency_s)
        self._sum_s += latency_s
        if len(self._times) > self._most:
            self._forget()

    def until(self, now_s: float) -> None:
        """Forget what lies further back than the window."""
        self._now_s = max(self._now_s, now_s)
        while self._times and self._times[0][0] <= now_s - self._window_s:
            self._forget()

    def clear(self) -> None:
        """Forget everything."""
        self._times.clear()
        self._sorted.clear()
        self._sum_s = 0.0
        self._begun_s = None

    @property
    def p99_s(self) -> float | None:
        """The time 99 % of them stayed within; None of fewer than `LEAST`."""
        count = len(self._sorted)
        if count >= LEAST:
            return self._sorted[math.ceil(0.99 * count) - 1]
        return None

    @property
    def p99_least_s(self) -> float | None:
        """What the p99 of the whole window comes to if all that is yet to come until it is full takes no time.

        It is the p99 as soon as the window is full. Before that one in a hundred is a handful: three requests that a
        switch of clocks delayed make the p99 of four seconds, and none of a minute at the same rate.
        """
        count = len(self._sorted)
        if count < LEAST or self._begun_s is None:
            return None
        passed_s = self._now_s - self._begun_s
        full = count >= self._most or passed_s >= self._window_s
        if full:
            whole = count
        else:
            # All of them may have come at one moment.
            whole = int(min(self._most, count * self._window_s / max(passed_s, 1e-3)))
        beyond = whole - math.ceil(0.99 * whole)
        if beyond < count:
            return self._sorted[count - beyond - 1]
        return 0.0

    @property
    def mean_s(self) -> float | None:
        """Their mean; None of none."""
        if self._times:
            return self._sum_s / len(self._times)
        return None

    def _forget(self) -> None:
        _, latency_s = self._times.popleft()
        del self._sorted[bisect_left(self._sorted, latency_s)]
        # A sum of many additions and subtractions drifts; an empty window is exact again.
        self._sum_s = self._sum_s - latency_s if self._times else 0.0


# Requests as the serving program itself reports them.

REPORT_QUIET_S = 5.0
"""After so long without a report the workload is taken to be down."""


class ReportedTraffic:
    """What the serving program says of its own requests; satisfies the port ``Traffic``.

    Reports since the last look are folded into one: counts are added, the slowest counts, the rest is as said last.
    Requests that came are spread over the looks until the next report, as fast as they came since the report before.

    Args:
        quiet_s: How long nothing may be reported before the workload is taken to be down.
        uri: The text that opens it again.
    """

    def __init__(self, quiet_s: float = REPORT_QUIET_S, uri: str = "report") -> None:
        self._quiet_s = quiet_s
        self._uri = uri
        self._news: RequestStats | None = None
        self._known: RequestStats | None = None
        self._heard_s = 0.0
        self._told = _Spread()
        self.note = ""

    @property
    def uri(self) -> str:
        """The text that opens it again."""
        return self._uri

    def report(self, seen: RequestStats, now_s: float) -> None:
        """Take in a report.

        Args:
            seen: Since the report before.
            now_s: On the clock of the control loop.
        """
        if self._news is None:
            self._news = seen
        else:
            self._news = folded(self._news, seen)
        self._heard_s = now_s

    def look(self, now_s: float) -> RequestStats | None:
        """Return what was reported since the look before; None while nothing was for too long."""
        if self._news is not None:
            self._known = self._news
            self._news = None
            self._told.add(self._known.arrived, self._heard_s)
            return replace(self._known, arrived=self._told.look(now_s))
        if self._known is None or now_s - self._heard_s > self._quiet_s:
            self._known, self._told = None, _Spread()
            return None
        return replace(self._known, arrived=self._told.look(now_s), answered=None, failed=None, worst_s=None)

    def serve(self, target: Target) -> None:
        """Do nothing: the answer to each report says what is to hold."""

    def close(self) -> None:
        """Release nothing; there is nothing."""


class _Spread:
    """Requests told of at once, over the looks until the next report; each is counted once."""

    def __init__(self) -> None:
        self._left: int | None = None
        self._heard_s: float | None = None
        self._looked_s = 0.0
        self._span_s = 0.0
        self._per_s = math.inf
        self._due = 0.0

    def add(self, arrived: int | None, heard_s: float) -> None:
        """Take in how many came until the last report."""
        self._left = known_sum(self._left, arrived)
        if self._heard_s is None:
            self._span_s = 0.0
        else:
            self._span_s = heard_s - self._heard_s
        self._heard_s = heard_s
        if self._span_s > 0:
            self._per_s = (self._left or 0) / self._span_s
        else:
            self._per_s = math.inf

    def look(self, now_s: float) -> int | None:
        """Return how many are to be counted since the look before; None while a report is yet to come."""
        passed_s = now_s - self._looked_s
        self._looked_s = now_s
        if self._left is None or self._heard_s is None:
            return None
        if self._left == 0:
            self._due = 0.0
            # The next report may be on its way: until it is overdue nothing is known, and 0 would be a load that has
            # gone.
            if 0 < now_s - self._heard_s < 2 * self._span_s:
                return None
            return 0
        come: float = self._left
        if self._per_s != math.inf:
            come = self._per_s * max(0.0, passed_s)
        self._due = min(self._left, self._due + come)
        counted = int(self._due + 1e-9)  # however the sum was rounded
        self._left, self._due = self._left - counted, self._due - counted
        return counted


def folded(first: RequestStats, second: RequestStats) -> RequestStats:
    """Return two reports as one: counts added, the slowest kept, the rest as said last."""
    return RequestStats(
        known_sum(first.arrived, second.arrived),
        known_sum(first.answered, second.answered),
        failed_of(first, second),
        first.waiting if second.waiting is None else second.waiting,
        _most(first.p99_s, second.p99_s),
        first.mean_s if second.mean_s is None else second.mean_s,
        second.model or first.model,
        _most(first.worst_s, second.worst_s),
    )


def _most(first: float | None, second: float | None) -> float | None:
    return max((value for value in (first, second) if value is not None), default=None)


# Requests as any server can log them: a file to which one line is added per request, ``time_s latency_s [ok]``.

LOG_QUIET_S = 600.0
"""After so long without a request the workload is taken to be down."""
_MISSING_S = 5.0
"""For so long there may be no file, as between the two steps of rotating it; what comes meanwhile is unknown, not 0."""
_MOST_BYTES = 1 << 20
"""Read at one look; what is more is left out, so that no look takes long."""
_LINE_BYTES = 4096
_GOOD = frozenset({"", "ok", "1", "true", "200"})
_BAD = frozenset({"error", "failed", "fail", "0", "false", "timeout"})


class LoggedTraffic:
    """The end of a growing file; satisfies the port ``Traffic``.

    It begins at the file's end, follows a file that is cut off or replaced, as by logrotate, and waits for the rest of
    a line that is not complete. One that was deleted is read on, for whoever has it open may go on writing to it. A
    request counts when its line is read: as arrived, and as answered unless its third word is ``error``, ``failed``,
    ``timeout``, ``false`` or ``0``, or a number of HTTP from 400 on.

    Args:
        path: Of the file.
        quiet_s: How long no request may come before the workload is taken to be down.
        uri: The text that opens it again.
    """

    def __init__(self, path: Path, quiet_s: float = LOG_QUIET_S, uri: str = "") -> None:
        self._path = path
        self._quiet_s = quiet_s
        self._uri = uri or f"log:{path}"
        self._file: int | None = None
        self._torn = b""
        self._lately = LatencyWindow()
        self._heard_s: float | None = None
        self._there_s: float | None = None
        self._met = self._away = False
        self.note = ""

    @property
    def uri(self) -> str:
        """The text that opens it again."""
        return self._uri

    def look(self, now_s: float) -> RequestStats | None:
        """Return what was logged since the look before; None if there was no file, or nothing in it, for too long."""
        requests = [request for line in self._lines() if (request := self._request(line)) is not None]
        for latency_s, _ in requests:
            # By when it was read: the times in a log are of a clock that nobody here knows.
            self._lately.add(now_s, latency_s)
        self._lately.until(now_s)
        unread = not requests and (self._file is None or self._away)
        if not unread:
            self._there_s = now_s
        if requests or (self._heard_s is None and self._file is not None):
            self._heard_s = now_s
        if not _since(self._there_s, now_s, _MISSING_S) or not _since(self._heard_s, now_s, self._quiet_s):
            return None
        failed = sum(not good for _, good in requests)
        came = None if unread else len(requests)
        worst_s = max((latency_s for latency_s, _ in requests), default=None)
        lately = self._lately
        counts = came, came, None if unread else failed
        return RequestStats(*counts, None, lately.p99_s, lately.mean_s, worst_s=worst_s, p99_least_s=lately.p99_least_s)

    def serve(self, target: Target) -> None:
        """Do nothing: the server cannot be told through a log."""

    def close(self) -> None:
        """Close the file."""
        if self._file is not None:
            os.close(self._file)
            self._file = None

    def _lines(self) -> list[bytes]:
        """Return the whole lines that were added."""
        added = self._added()
        before, self._away = self._away, self._gone()
        if self._away and not before:
            added = self._ended(added + self._added())  # its last line, for a new file begins with one of its own
        if self._away and (fresh := self._opened()) is not None:
            if before:
                added = self._ended(added + self._added())
            self.close()
            self._file = fresh
            self._away = False
            added += self._added()
        *whole, self._torn = (self._torn + added).split(b"\n")
        if len(self._torn) > _LINE_BYTES:
            self._torn = b""
        return whole

    def _ended(self, added: bytes) -> bytes:
        """Return what was read of a file that is left, its last line ended."""
        if not added and not self._torn:
            return added
        return added + b"\n"

    def _added(self) -> bytes:
        if self._file is None and not self._open(at_end=not self._met):
            return b""
        assert self._file is not None
        try:
            size = os.fstat(self._file).st_size
            here = os.lseek(self._file, 0, os.SEEK_CUR)
            if size < here:  # cut off in place, as by copytruncate
                here = os.lseek(self._file, 0, os.SEEK_SET)
                self._torn = b""
            if size - here > _MOST_BYTES:
                self.note = f"{self._path} grows faster than it is read; some requests are left out"
                os.lseek(self._file, size - _MOST_BYTES, os.SEEK_SET)
                self._torn = b"#"  # makes a comment of the torn line that is begun with
            return os.read(self._file, _MOST_BYTES)
        except OSError as error:
            self._unread(error)
            self.close()
            self._met = False  # it was read in part: the next time from its end
            return b""

    def _open(self, at_end: bool) -> bool:
        self._file = self._opened(at_end)
        return self._file is not None

    def _opened(self, at_end: bool = False) -> int | None:
        try:
            # A FIFO nobody writes to must not hold up the control loop.
            file = os.open(self._path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        except OSError as error:
            self._unread(error)
            self._met = True  # a file that comes later is new, and read from its beginning
            return None
        if at_end:
            with suppress(OSError):  # a FIFO has no end
                os.lseek(file, 0, os.SEEK_END)
        self._met = True
        self.note = ""
        return file

    def _unread(self, error: OSError) -> None:
        self.note = (
            f"{self._path} cannot be read: {error.strerror}; what comes is unknown, and after {_MISSING_S:g} s without "
            "it the workload is taken to be down"
        )

    def _gone(self) -> bool:
        """Return whether another file, or none, is at the path now."""
        if self._file is None:
            return False
        try:
            now = os.stat(self._path)
            own = os.fstat(self._file)
        except OSError:
            return True
        return (now.st_dev, now.st_ino) != (own.st_dev, own.st_ino)

    def _request(self, line: bytes) -> tuple[float, bool] | None:
        """Return latency and success of a line; None, and a note, if it is none."""
        words = line.decode("utf-8", "replace").split()
        if not words or words[0].startswith("#"):
            return None
        try:
            time_s = float(words[0])
            latency_s = float(words[1])
            good = _is_good(words[2] if len(words) > 2 else "")
        except (ValueError, IndexError):
            good = None
            time_s = math.nan
            latency_s = math.nan
        if good is None or not math.isfinite(time_s) or not 0 <= latency_s < math.inf:
            self.note = f"{self._path}: a line is not 'time_s latency_s [ok]': {line[:40]!r}"
            return None
        return latency_s, good


def _since(then_s: float | None, now_s: float, most_s: float) -> bool:
    """Return whether something was so at most so long ago."""
    return then_s is not None and now_s - then_s <= most_s


def _is_good(word: str) -> bool | None:
    """Return whether a third word says that a request was answered; None if it is no such word."""
    low = word.lower()
    if low in _GOOD or low in _BAD:
        return low in _GOOD
    if low.isdecimal() and len(low) == 3:
        return int(low) < 400
    return None


# Whether a program runs: all that can be seen of a workload that says nothing of its requests.

_SEARCH_S = 5.0
"""Going through all processes takes milliseconds, so that it is done this seldom."""
_COMM = 15
"""To which length the kernel keeps a process's name (TASK_COMM_LEN less the final zero)."""


class ProcessTraffic:
    """A process by its name or its pid file, and nothing of its requests; satisfies the port ``Traffic``.

    Rate and latency are unknown, so that the daemon keeps the point for the highest load while the process runs.

    Args:
        name: Of the program, as ``ps`` shows it, of its executable or of the script it runs; with a slash in it, the
            path of a file that holds its pid.
        proc: Where the kernel tells of processes.
    """

    def __init__(self, name: str, proc: Path = Path("/proc")) -> None:
        self._name = name
        self._proc = proc
        self._found: tuple[int, str] | None = None
        self._searched_s: float | None = None
        self.note = ""

    @property
    def uri(self) -> str:
        """The text that opens it again."""
        return f"process:{self._name}"

    def look(self, now_s: float) -> RequestStats | None:
        """Return that the workload is up, of whose requests nothing is known; None while it is not."""
        if self._found is not None and self._born(self._found[0]) == self._found[1]:
            return RequestStats(arrived=None)
        self._found = None
        if self._searched_s is None or not 0 <= now_s - self._searched_s < _SEARCH_S:
            self._searched_s = now_s
            if "/" in self._name:
                self._found = self._noted()
            else:
                self._found = self._searched()
        if self._found is None:
            return None
        return RequestStats(arrived=None)

    def serve(self, target: Target) -> None:
        """Do nothing: the program cannot be told."""

    def close(self) -> None:
        """Release nothing; there is nothing."""

    def _noted(self) -> tuple[int, str] | None:
        """Return the process whose pid is in the file, if it runs."""
        try:
            word = Path(self._name).read_text(encoding="ascii")[:32].strip()
        except (OSError, ValueError):
            return None
        if not word.isdecimal() or (born := self._born(int(word))) is None:
            return None
        return int(word), born

    def _searched(self) -> tuple[int, str] | None:
        """Return the oldest process of that name."""
        try:
            numbers = sorted(int(name) for name in os.listdir(self._proc) if name.isdecimal())
        except OSError:
            return None
        for number in numbers:
            if number != os.getpid() and self._is_named(number) and (born := self._born(number)) is not None:
                return number, born
        return None

    def _is_named(self, number: int) -> bool:
        folder = self._proc / str(number)
        try:
            comm = (folder / "comm").read_bytes().rstrip(b"\n")
            words = (folder / "cmdline").read_bytes().split(b"\0")[:2]
        except OSError:
            return False
        name = self._name.encode()
        return comm == name[:_COMM] or name in (word.rpartition(b"/")[2] for word in words)

    def _born(self, number: int) -> str | None:
        """Return when a process was started, which tells it from a later one of the same number; None if it has ended.

        Field 22 of ``/proc/<pid>/stat``, counted after the name in brackets, which may hold anything (proc(5)).
        """
        try:
            fields = (self._proc / str(number) / "stat").read_text().rpartition(")")[2].split()
        except (OSError, ValueError):
            return None
        # A zombie has ended, and stays listed until its parent asks.
        if len(fields) > 19 and fields[0] not in ("Z", "X"):
            return fields[19]
        return None
