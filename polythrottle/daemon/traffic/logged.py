"""Requests as any server can log them: a file to which one line is added per request, ``time_s latency_s [ok]``."""

import math
import os
from contextlib import suppress
from pathlib import Path

from polythrottle.daemon.ports import Seen
from polythrottle.daemon.signals import Target
from polythrottle.daemon.traffic.lately import Lately

QUIET_S = 600.0
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

    def __init__(self, path: Path, quiet_s: float = QUIET_S, uri: str = "") -> None:
        self._path, self._quiet_s, self._uri = path, quiet_s, uri or f"log:{path}"
        self._file: int | None = None
        self._torn = b""
        self._lately = Lately()
        self._heard_s: float | None = None
        self._there_s: float | None = None
        self._met = self._away = False
        self.note = ""

    @property
    def uri(self) -> str:
        """The text that opens it again."""
        return self._uri

    def look(self, now_s: float) -> Seen | None:
        """Return what was logged since the look before; None if there was no file, or nothing in it, for too long."""
        requests = [request for line in self._lines() if (request := self._request(line)) is not None]
        for latency_s, _ in requests:
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
        return Seen(*counts, None, lately.p99_s, lately.mean_s, worst_s=worst_s, p99_least_s=lately.p99_least_s)

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
            added = self._ended(added + self._added()) if before else added
            self.close()
            self._file, self._away = fresh, False
            added += self._added()
        *whole, self._torn = (self._torn + added).split(b"\n")
        if len(self._torn) > _LINE_BYTES:
            self._torn = b""
        return whole

    def _ended(self, added: bytes) -> bytes:
        """Return what was read of a file that is left, its last line ended."""
        return added if not added and not self._torn else added + b"\n"

    def _added(self) -> bytes:
        if self._file is None and not self._open(at_end=not self._met):
            return b""
        assert self._file is not None
        try:
            size = os.fstat(self._file).st_size
            here = os.lseek(self._file, 0, os.SEEK_CUR)
            if size < here:  # cut off in place, as by copytruncate
                here, self._torn = os.lseek(self._file, 0, os.SEEK_SET), b""
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
        self._met, self.note = True, ""
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
            now, own = os.stat(self._path), os.fstat(self._file)
        except OSError:
            return True
        return (now.st_dev, now.st_ino) != (own.st_dev, own.st_ino)

    def _request(self, line: bytes) -> tuple[float, bool] | None:
        """Return latency and success of a line; None, and a note, if it is none."""
        words = line.decode("utf-8", "replace").split()
        if not words or words[0].startswith("#"):
            return None
        try:
            time_s, latency_s = float(words[0]), float(words[1])
            good = _is_good(words[2] if len(words) > 2 else "")
        except (ValueError, IndexError):
            good, time_s, latency_s = None, math.nan, math.nan
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
    return int(low) < 400 if low.isdecimal() and len(low) == 3 else None
