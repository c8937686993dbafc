"""What the daemon remembers over restarts: events, minutes, and a few values of its own, in one SQLite file.

Control never waits for it and never stops for it: what cannot be written is kept in memory, bounded, and written when
that is possible again; a file that is no database any more is set aside and a new one begun. With a write-ahead log a
killed daemon loses what was not noted yet, which is seconds.
"""

from __future__ import annotations

import contextlib
import json
import sqlite3
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, fields
from datetime import datetime
from pathlib import Path
from typing import Any

from polythrottle.daemon.observation import known_sum
from polythrottle.daemon.status import Happened
from polythrottle.domain.backports import paired
from polythrottle.storage.untrusted import printable

EVENTS_MOST = 10_000
MINUTES_MOST = 30 * 24 * 60
_WAITING_MOST = 20_000
_SHOWN = 1000
_PATIENCE_S = 0.2
_AGAIN_S = 10.0
_TIDY = 100
_MOST_BYTES = 64_000_000
_MOST_KEPT = 1000
_FORMAT = 2
_LAST = 1 << 31  # minutes from here on no calendar has
_UNNUMBERED = 1 << 53
"""From here on no event is numbered: it would take ages, and a page, whose numbers are all floats, would miscount."""
# By SQLite's words: sqlite3 tells its error codes from Python 3.11 on, and 3.10 is the floor.
_BROKEN = ("malformed", "not a database", "file is encrypted", "no such table", "no such column", "disk image")
_SCHEMA = """
CREATE TABLE IF NOT EXISTS events (number INTEGER PRIMARY KEY, at TEXT, kind TEXT, words TEXT);
CREATE TABLE IF NOT EXISTS minutes (
    minute INTEGER PRIMARY KEY, seconds REAL, joules REAL, requests INTEGER, failed INTEGER, violated INTEGER,
    p99_s REAL, limit_s REAL, saved_j REAL, saved_sd_j REAL, metered_s REAL);
CREATE TABLE IF NOT EXISTS kept (name TEXT PRIMARY KEY, value TEXT);
"""
# By number and not by time, for a clock that jumps ahead would take all that there is.
_TIDIED = "DELETE FROM minutes WHERE minute < (SELECT minute FROM minutes ORDER BY minute DESC LIMIT 1 OFFSET ?)"
_EVENT = "INSERT OR REPLACE INTO events VALUES (?, ?, ?, ?)"
_KEPT = "INSERT OR REPLACE INTO kept VALUES (?, ?)"
# A minute is written in parts, so that a kill loses seconds of it. In SQL a sum or max() of two is NULL where either
# is: coalesce() keeps the one that is known.
_MINUTE = """
INSERT INTO minutes VALUES (:minute, :seconds, :joules, :requests, :failed, :violated, :p99_s, :limit_s, :saved_j,
    :saved_sd_j, :metered_s)
ON CONFLICT (minute) DO UPDATE SET seconds = seconds + excluded.seconds,
    metered_s = metered_s + excluded.metered_s,
    joules = coalesce(joules + excluded.joules, joules, excluded.joules),
    requests = requests + excluded.requests, failed = failed + excluded.failed,
    violated = max(violated, excluded.violated),
    p99_s = max(coalesce(p99_s, excluded.p99_s), coalesce(excluded.p99_s, p99_s)),
    limit_s = coalesce(excluded.limit_s, limit_s),
    saved_j = coalesce(saved_j + excluded.saved_j, saved_j, excluded.saved_j),
    saved_sd_j = coalesce(saved_sd_j + excluded.saved_sd_j, saved_sd_j, excluded.saved_sd_j)
"""


@dataclass(frozen=True)
class Minute:
    """What a minute of wall time came to.

    Args:
        minute: Since the epoch.
        seconds: Of it that were seen.
        joules: Drawn in ``metered_s`` of those; None if the sensors said nothing.
        requests: That were answered; ``failed`` of them.
        violated: Whether its p99 was above the limit.
        p99_s: Of its requests; None if there were too few.
        limit_s: Its limit.
        saved_j: Joules saved against the default point; None if unknown.
        saved_sd_j: Its standard deviation. It is that of what the profile says of the default, the same in each
            minute, so that those of several minutes add up.
        metered_s: Of the seconds with a reading of the sensors.
    """

    minute: int
    seconds: float = 0.0
    joules: float | None = None
    requests: int = 0
    failed: int = 0
    violated: bool = False
    p99_s: float | None = None
    limit_s: float | None = None
    saved_j: float | None = None
    saved_sd_j: float | None = None
    metered_s: float = 0.0

    def plus(self, part: Minute) -> Minute:
        """Return the minute with a part of it added, as the database does."""
        return Minute(
            self.minute,
            self.seconds + part.seconds,
            known_sum(self.joules, part.joules),
            self.requests + part.requests,
            self.failed + part.failed,
            self.violated or part.violated,
            max((each for each in (self.p99_s, part.p99_s) if each is not None), default=None),
            self.limit_s if part.limit_s is None else part.limit_s,
            known_sum(self.saved_j, part.saved_j),
            known_sum(self.saved_sd_j, part.saved_sd_j),
            self.metered_s + part.metered_s,
        )


@dataclass(frozen=True)
class Totals:
    """Minutes added up: joules saved with their standard deviation (None if unknown), joules drawn, requests."""

    saved_j: float | None = None
    saved_sd_j: float | None = None
    joules: float = 0.0
    requests: int = 0


class HistoryStore:
    """Events, minutes and kept values.

    Args:
        file: The database; its folder is made.
        wall: Wall time, seconds since the epoch.
    """

    def __init__(self, file: Path, wall: Callable[[], float] = time.time) -> None:
        self.fault = ""
        self._file = file
        self._wall = wall
        self._waiting: deque[tuple[str, Any]] = deque(maxlen=_WAITING_MOST)
        self._values: dict[str, Any] = {}
        self._recent: deque[Happened] = deque(maxlen=_SHOWN)
        self._lately: deque[Minute] = deque(maxlen=24 * 60)
        self._database: sqlite3.Connection | None = None
        self._failed_s = -_AGAIN_S
        self._number = 0
        self._losses: list[str] = []
        self._open()

    @property
    def recent(self) -> tuple[Happened, ...]:
        """The last thousand events, oldest first."""
        return tuple(self._recent)

    def tell(self, kind: str, words: str) -> Happened:
        """Note an event and return it with its number, which rises over restarts too."""
        self._number += 1
        at = datetime.fromtimestamp(self._wall()).astimezone().isoformat(timespec="milliseconds")
        event = Happened(self._number, at, kind, printable(words))
        self._recent.append(event)
        self._write(_EVENT, (event.number, event.at, event.kind, event.words))
        if event.number % _TIDY == 0:
            self._write("DELETE FROM events WHERE number <= ?", (event.number - EVENTS_MOST,))
        return event

    def add(self, minute: Minute) -> None:
        """Note a minute, or a part of one: what was noted for the same one before is added to it."""
        whole = minute
        if self._lately and self._lately[-1].minute == minute.minute:
            whole = self._lately.pop().plus(minute)
        self._lately.append(whole)
        self._write(_MINUTE, asdict(minute))
        if minute.minute % _TIDY == 0:
            self._write(_TIDIED, (MINUTES_MOST - 1,))

    def keep(self, name: str, value: Any) -> None:
        """Keep a value, which JSON can hold, under a name."""
        if self._values.get(name) != value:
            self._values[name] = value
            self._write(_KEPT, (name, json.dumps(value)))

    def kept(self, name: str) -> Any:
        """Return the value kept under a name; None if there is none."""
        return self._values.get(name)

    def totals(self, since_s: float) -> Totals:
        """Return the minutes from a wall time on, added up; those in memory if the database cannot be read."""
        first = int(since_s // 60)
        query = "SELECT sum(saved_j), sum(saved_sd_j), sum(joules), sum(requests) FROM minutes WHERE minute >= ?"
        rows = self._asked(query, (first,))
        if rows:
            saved_j, sd_j, joules, requests = rows[0]
            return Totals(saved_j, sd_j, joules or 0.0, requests or 0)
        minutes = [each for each in self._lately if each.minute >= first]
        known = [each for each in minutes if each.saved_j is not None]
        return Totals(
            sum(each.saved_j or 0.0 for each in known) if known else None,
            sum(each.saved_sd_j or 0.0 for each in known) if known else None,
            sum(each.joules or 0.0 for each in minutes),
            sum(each.requests for each in minutes),
        )

    def history(self, minutes: int) -> list[dict[str, Any]]:
        """Return the last minutes, oldest first; may be called from any thread.

        Args:
            minutes: How many to look back, at most `MINUTES_MOST`.
        """
        first = int(self._wall() // 60) - min(max(0, minutes), MINUTES_MOST)
        names = [field.name for field in fields(Minute)]
        try:
            # A connection of its own, for any thread may ask and the control loop waits for none; as_uri() escapes a ?
            # or # in the folder's name, which would begin the options.
            source = f"{self._file.absolute().as_uri()}?mode=ro"
            with contextlib.closing(sqlite3.connect(source, uri=True, timeout=1)) as database:
                query = f"SELECT {', '.join(names)} FROM minutes WHERE minute > ? AND minute < ? ORDER BY minute"
                rows = database.execute(query, (first, _LAST)).fetchall()
        except sqlite3.Error:
            rows = [tuple(asdict(each).values()) for each in tuple(self._lately) if each.minute > first]
        return [_shown(dict(paired(names, row))) for row in rows]

    def flush(self) -> None:
        """Write what waits, unless that has failed a moment ago; to be called each turn."""
        # By abs(), for wall time may be set back by years.
        if self._waiting and abs(self._wall() - self._failed_s) >= _AGAIN_S:
            self._flush()

    def losses(self) -> list[str]:
        """Return once what was damaged and set aside, for the control loop to tell: also where it is listened to."""
        losses = self._losses
        self._losses = []
        return losses

    def close(self) -> None:
        """Write what waits and close the file."""
        if self._waiting:
            self._flush()
        if self._database is not None:
            with contextlib.suppress(sqlite3.Error):
                self._database.close()
        self._database = None

    def _write(self, statement: str, values: Sequence[Any] | dict[str, Any]) -> None:
        self._waiting.append((statement, values))

    def _flush(self) -> None:
        try:
            if self._database is None:
                self._open()
            if self._database is None:
                return
            # One transaction: parts of minutes are added up, and one that was in before the error would count twice.
            with self._database:
                for statement, values in self._waiting:
                    self._database.execute(statement, values)
        except sqlite3.Error as error:
            self._fail(error)
        else:
            self._waiting.clear()
            self.fault = ""

    def _asked(self, query: str, values: Sequence[Any]) -> list[Any]:
        if self._waiting:
            self._flush()
        # What still waits is missing in the file, and not in memory: the caller takes that.
        if self._database is None or self._waiting:
            return []
        try:
            return self._database.execute(query, values).fetchall()
        except sqlite3.Error as error:
            self._fail(error)
            return []

    def _open(self) -> None:
        try:
            self._file.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            self._refuse_if_huge()
            # Another program may lock the file: a turn waits a fifth of a second for it, not the five of Python's
            # default.
            self._database = sqlite3.connect(self._file, timeout=_PATIENCE_S, check_same_thread=False)
            self._begin(self._database)
            self._load(self._database)
        except (sqlite3.Error, OSError, ValueError, RecursionError) as error:
            self._fail(error)
        if self._database is None and not self._recent:
            self._look()

    def _look(self) -> None:
        """Read what is there without a single write, as on a disk so full that the log's index finds no room."""
        with contextlib.suppress(sqlite3.Error, OSError, ValueError, RecursionError):
            self._refuse_if_huge()
            # Immutable, or even a reader lays the log's index beside the file (sqlite.org/wal.html, read-only
            # databases).
            source = f"{self._file.absolute().as_uri()}?mode=ro&immutable=1"
            with contextlib.closing(sqlite3.connect(source, uri=True)) as database:
                self._load(database)

    def _refuse_if_huge(self) -> None:
        """Refuse a file larger than all that is ever kept there: a single text of it could take all memory."""
        with contextlib.suppress(FileNotFoundError):
            if self._file.stat().st_size > _MOST_BYTES:
                raise ValueError(f"it is larger than {_MOST_BYTES // 1_000_000} MB, which nothing here writes")

    @staticmethod
    def _begin(database: sqlite3.Connection) -> None:
        database.execute("PRAGMA journal_mode = WAL")
        # Beside a log this flushes at checkpoints alone: a power cut costs the last seconds, never the file
        # (sqlite.org/pragma.html#pragma_synchronous).
        database.execute("PRAGMA synchronous = NORMAL")
        version = database.execute("PRAGMA user_version").fetchone()[0]
        if version not in (0, _FORMAT):
            raise ValueError(f"it is of format {version}, which this version does not know")
        if version == _FORMAT:  # nothing is to be written, so that what is there can be read from a full disk too
            return
        with database:
            database.executescript(_SCHEMA)
            database.execute(f"PRAGMA user_version = {_FORMAT}")

    def _load(self, database: sqlite3.Connection) -> None:
        # A view or a trigger in the place of a table could keep whoever asks it busy for ever.
        strange = "SELECT name FROM sqlite_master WHERE type NOT IN ('table', 'index') LIMIT 1"
        if other := database.execute(strange).fetchone():
            raise ValueError(f"it holds {str(other[0])[:40]!r}, which is no table")
        newest = f"SELECT number, at, kind, words FROM events ORDER BY number DESC LIMIT {_SHOWN}"
        found = [Happened(*row) for row in database.execute(newest)]
        if not all(isinstance(text, str) for each in found for text in (each.at, each.kind, each.words)):
            raise ValueError("an event in it is not made of texts")
        if not all(isinstance(each.number, int) and 0 < each.number < _UNNUMBERED for each in found):
            raise ValueError("an event in it is not numbered as events are")
        kept = database.execute(f"SELECT name, value FROM kept LIMIT {_MOST_KEPT}")
        stored = {str(name): json.loads(str(value)) for name, value in kept}
        top = max((event.number for event in found), default=0)
        # Opened anew under way, memory knows more than the file: its events and values go before.
        if top and not self._recent:
            self._recent.extend(reversed(found))
            self._number = top
        self._values = {**stored, **self._values}

    def _fail(self, error: Exception) -> None:
        """Say what does not work; set a file aside that is no database any more."""
        self._failed_s = self._wall()
        if self._database is not None:
            with contextlib.suppress(sqlite3.Error):
                self._database.close()
        self._database = None
        broken = isinstance(error, (ValueError, RecursionError)) or any(text in str(error) for text in _BROKEN)
        if not broken:
            self.fault = f"{self._file} cannot be written: {error}; events and history are kept in memory"
            return
        aside = self._file.with_suffix(f".broken-{int(self._wall())}")
        try:
            self._file.rename(aside)
            # Left there, the old log would be taken for that of the new file (sqlite.org/howtocorrupt.html).
            for tail in ("-wal", "-shm"):
                Path(f"{self._file}{tail}").unlink(missing_ok=True)
        except OSError as refused:
            self.fault = f"{self._file} is damaged and cannot be set aside: {refused.strerror}"
            return
        self._failed_s = -_AGAIN_S
        self._losses.append(f"the daemon's memory was damaged ({error}) and is set aside as {aside.name}")
        # `keep` writes what has changed only, and the new file knows nothing yet.
        for name, value in self._values.items():
            self._write(_KEPT, (name, json.dumps(value)))


def _shown(row: dict[str, Any]) -> dict[str, Any]:
    """Return a minute for people and programs: with its wall time and its mean power."""
    at = datetime.fromtimestamp(row["minute"] * 60).astimezone().isoformat(timespec="minutes")
    metered_s = row["metered_s"]
    joules = row["joules"]
    known = isinstance(joules, (int, float)) and isinstance(metered_s, (int, float)) and metered_s > 0
    power_w = None
    if known:
        power_w = joules / metered_s
    return {"at": at, **row, "violated": bool(row["violated"]), "power_w": power_w}
