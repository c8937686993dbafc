"""What the daemon remembers: over restarts, through kills, full disks and damage."""

import multiprocessing
import os
import signal
import sqlite3
import time
from pathlib import Path

import pytest

from polythrottle.daemon.history_store import EVENTS_MOST, HistoryStore, Minute

EPOCH_S = 1_700_000_000.0


def record_at(folder: Path, wall_s: float = EPOCH_S) -> HistoryStore:
    """Return a record whose wall clock stands."""
    return HistoryStore(folder / "daemon.db", lambda: wall_s)


def test_events_keep_their_numbers_over_a_restart(tmp_path: Path) -> None:
    """A second record goes on counting and knows what the first was told."""
    first = record_at(tmp_path)
    assert [first.tell("phase", "one").number, first.tell("guard", "two").number] == [1, 2]
    first.close()
    second = record_at(tmp_path)
    assert [event.words for event in second.recent] == ["one", "two"]
    assert second.tell("phase", "three").number == 3
    second.close()


def test_values_are_kept(tmp_path: Path) -> None:
    """What was kept under a name is there again, and None is a value."""
    first = record_at(tmp_path)
    first.keep("profile", {"chosen": "a.toml"})
    first.keep("released", None)
    first.close()
    second = record_at(tmp_path)
    assert (second.kept("profile"), second.kept("released"), second.kept("x")) == ({"chosen": "a.toml"}, None, None)
    second.close()


def test_minutes_add_up(tmp_path: Path) -> None:
    """Totals are the sums of minutes; a minute noted twice is one."""
    record = record_at(tmp_path)
    minute = int(EPOCH_S // 60)
    record.add(Minute(minute - 1, 60.0, 600.0, 30, 0, False, 0.05, 0.1, 90.0, 9.0, 60.0))
    record.add(Minute(minute, 30.0, 300.0, 10, 1, True, 0.2, 0.1, 40.0, 4.0, 30.0))
    record.add(Minute(minute, 20.0, 200.0, 5, 0, False, 0.06, 0.1, 10.0, 1.0, 20.0))
    record.flush()
    totals = record.totals(EPOCH_S - 300)
    assert (totals.saved_j, totals.saved_sd_j, totals.joules, totals.requests) == (140.0, 14.0, 1100.0, 45)
    first, second = record.history(10)
    assert (first["power_w"], first["violated"]) == (10.0, False)
    assert (second["seconds"], second["requests"], second["p99_s"], second["violated"]) == (50.0, 15, 0.2, True)
    record.close()


def test_unknown_joules_stay_unknown(tmp_path: Path) -> None:
    """A minute without readings has no joules, no power and no saving, not 0."""
    record = record_at(tmp_path)
    record.add(Minute(int(EPOCH_S // 60), 60.0, None, 3))
    record.flush()
    (row,) = record.history(5)
    assert (row["joules"], row["power_w"], row["saved_j"]) == (None, None, None)
    assert record.totals(0.0).saved_j is None
    record.close()


def test_only_so_many_events_are_kept(tmp_path: Path) -> None:
    """Of more events than are kept the oldest go."""
    record = record_at(tmp_path)
    for number in range(EVENTS_MOST + 200):
        record.tell("phase", str(number))
        if number % 1000 == 0:
            record.flush()
    record.close()
    with sqlite3.connect(tmp_path / "daemon.db") as database:
        count = database.execute("SELECT count(*), max(number) FROM events").fetchone()
    database.close()
    assert count[0] <= EVENTS_MOST + 100
    assert count[1] == EVENTS_MOST + 200


@pytest.mark.parametrize("damage", [b"no database at all" * 100, b"SQLite format 3\0" + b"\xff" * 5000])
def test_a_damaged_file_is_set_aside(tmp_path: Path, damage: bytes) -> None:
    """A file that is no database is renamed, a new one begun, and it is said once."""
    (tmp_path / "daemon.db").write_bytes(damage)
    record = record_at(tmp_path)
    record.tell("phase", "goes on")
    record.flush()
    assert record.fault == ""
    record.close()
    (words,) = record.losses()
    assert "set aside" in words
    assert record.losses() == []
    (aside,) = tmp_path.glob("daemon.broken-*")
    assert aside.read_bytes() == damage
    again = record_at(tmp_path)
    assert [event.words for event in again.recent][-1] == "goes on"
    again.close()


class _Malformed:
    """A database that has broken while it was open."""

    def __enter__(self) -> None:
        raise sqlite3.DatabaseError("database disk image is malformed")

    def __exit__(self, *error: object) -> None:
        return

    def close(self) -> None:
        """Do nothing."""


def test_damage_met_while_writing_is_set_aside_too(tmp_path: Path) -> None:
    """A database that breaks under way is replaced; what was kept in memory goes into the new one."""
    record = record_at(tmp_path)
    record.keep("released", "maintenance")
    record.flush()
    record.close()
    broken = record_at(tmp_path)
    assert broken._database is not None
    broken._database.close()
    broken._database = _Malformed()  # type: ignore[assignment]
    for _ in range(3):
        broken.tell("phase", "more")
        broken.flush()
    assert broken.fault == ""
    broken.close()
    assert len(list(tmp_path.glob("daemon.broken-*"))) == 1
    again = record_at(tmp_path)
    assert again.kept("released") == "maintenance"
    again.close()


def test_a_folder_that_cannot_be_written_is_a_fault_and_no_end(tmp_path: Path) -> None:
    """Events go on in memory; once the folder can be written, they are on disk."""
    blocked = tmp_path / "blocked"
    blocked.write_text("a file where a folder should be")
    wall = [EPOCH_S]
    record = HistoryStore(blocked / "daemon.db", lambda: wall[0])
    assert record.tell("phase", "kept in memory").number == 1
    record.flush()
    assert "kept in memory" in record.fault
    assert record.history(5) == []
    blocked.unlink()
    wall[0] += 60.0
    record.flush()
    assert record.fault == ""
    record.close()
    again = HistoryStore(blocked / "daemon.db", lambda: wall[0])
    assert [event.words for event in again.recent] == ["kept in memory"]
    again.close()


def test_a_full_disk_is_a_fault_until_there_is_room(tmp_path: Path) -> None:
    """What cannot be written waits, and is written when there is room again."""
    wall = [EPOCH_S]
    record = HistoryStore(tmp_path / "daemon.db", lambda: wall[0])
    assert record._database is not None
    pages = record._database.execute("PRAGMA page_count").fetchone()[0]
    record._database.execute(f"PRAGMA max_page_count = {pages}")
    record.tell("phase", "x" * 100_000)
    record.flush()
    assert "full" in record.fault
    record.tell("phase", "later")
    record.flush()
    wall[0] += 60.0
    record.flush()
    assert record.fault == ""
    record.close()
    again = record_at(tmp_path)
    assert [event.words[:5] for event in again.recent] == ["xxxxx", "later"]
    again.close()


def test_what_waits_is_bounded(tmp_path: Path) -> None:
    """A disk that stays full does not fill the memory."""
    blocked = tmp_path / "blocked"
    blocked.write_text("")
    record = record_at(blocked)
    for number in range(30_000):
        record.tell("phase", str(number))
    assert len(record._waiting) == 20_000
    assert len(record.recent) == 1000
    record.close()


def _writes(folder: str) -> None:
    record = HistoryStore(Path(folder) / "daemon.db")
    for number in range(10**9):
        record.tell("phase", str(number))
        record.flush()


def test_a_kill_loses_nothing_that_was_flushed(tmp_path: Path) -> None:
    """After SIGKILL in the midst of writing, the events are there without a gap."""
    writer = multiprocessing.get_context("spawn").Process(target=_writes, args=(str(tmp_path),))
    writer.start()
    until_s = time.monotonic() + 60
    while time.monotonic() < until_s and not _count(tmp_path) > 50:
        time.sleep(0.01)
    assert writer.pid is not None
    os.kill(writer.pid, signal.SIGKILL)
    writer.join()
    seen = _count(tmp_path)
    record = record_at(tmp_path)
    numbers = [event.number for event in record.recent]
    assert numbers[-1] >= seen > 50
    assert numbers == list(range(numbers[0], numbers[0] + len(numbers)))
    record.close()


def _count(folder: Path) -> int:
    if not (folder / "daemon.db").exists():
        return 0
    database = sqlite3.connect(folder / "daemon.db", timeout=5)
    try:
        return int(database.execute("SELECT coalesce(max(number), 0) FROM events").fetchone()[0])
    except sqlite3.OperationalError:
        return 0
    finally:
        database.close()


def test_parts_of_a_minute_are_one_minute_in_memory_too(tmp_path: Path) -> None:
    """History is the same whether the file can be read or not; power is over the seconds that were metered."""
    record = record_at(tmp_path)
    minute = int(EPOCH_S // 60)
    record.add(Minute(minute, 10.0, 100.0, 4, 0, False, 0.05, 0.1, 9.0, 1.0, 10.0))
    record.add(Minute(minute, 10.0, None, 3, 1, True, 0.2, 0.1))
    record.flush()
    on_disk = record.history(5)
    assert [(row["seconds"], row["joules"], row["power_w"], row["requests"]) for row in on_disk] == [(20, 100, 10, 7)]
    record.close()
    (tmp_path / "daemon.db").rename(tmp_path / "away.db")
    assert record.history(5) == on_disk


def test_numbers_go_on_where_the_file_can_only_be_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a disk so full that not even the log's index finds room nothing that was kept is begun anew."""
    first = record_at(tmp_path)
    first.tell("phase", "one")
    first.keep("released", "asked for")
    first.close()

    def full(database: sqlite3.Connection) -> None:
        raise sqlite3.OperationalError("disk I/O error")

    monkeypatch.setattr(HistoryStore, "_begin", staticmethod(full))
    second = record_at(tmp_path)
    assert second.fault
    assert second.kept("released") == "asked for"
    assert second.tell("phase", "two").number == 2
    monkeypatch.undo()
    second.close()
    assert [event.words for event in record_at(tmp_path).recent] == ["one", "two"]


def test_the_day_goes_on_after_a_restart(tmp_path: Path) -> None:
    """What was counted before is there at once, also while something waits to be written."""
    first = record_at(tmp_path)
    first.add(Minute(int(EPOCH_S // 60), 10.0, 100.0, 4, saved_j=9.0, saved_sd_j=1.0, metered_s=10.0))
    first.close()
    second = record_at(tmp_path)
    second.tell("start", "again")
    assert second.totals(EPOCH_S - 300).saved_j == 9.0
    second.close()


def test_odd_values_in_the_file_are_no_power(tmp_path: Path) -> None:
    """A minute whose joules are text has no power; the others are shown."""
    record = record_at(tmp_path)
    record.add(Minute(int(EPOCH_S // 60), 10.0, 100.0, 4, metered_s=10.0))
    record.close()
    with sqlite3.connect(tmp_path / "daemon.db") as database:
        database.execute("UPDATE minutes SET joules = 'many'")
    database.close()
    again = record_at(tmp_path)
    assert [row["power_w"] for row in again.history(5)] == [None]
    again.close()


def test_a_clock_that_jumps_ahead_takes_no_history(tmp_path: Path) -> None:
    """Minutes are dropped by their number: one of next year leaves those of today."""
    record = record_at(tmp_path)
    for number in range(300):
        record.add(Minute(number, 60.0, 1.0))
    record.add(Minute(600_000, 60.0, 1.0))
    record.flush()
    assert record.totals(0.0).joules == 301.0
    record.close()


def test_only_so_many_minutes_are_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The oldest go first, once there are more than are kept."""
    monkeypatch.setattr("polythrottle.daemon.history_store.MINUTES_MOST", 250)
    record = record_at(tmp_path)
    for number in range(1, 401):
        record.add(Minute(number, 60.0, 1.0))
    record.flush()
    assert record.totals(0.0).joules == 250.0
    assert record.totals(60.0 * 151).joules == 250.0
    record.close()


ENDLESS = "WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n) SELECT i AS number, '' AS at, '' AS kind"
WORDED = "DROP TABLE events; CREATE TABLE events (number TEXT, at TEXT, kind TEXT, words TEXT);"


@pytest.mark.parametrize(
    ("script", "told"),
    [
        (f"DROP TABLE events; CREATE VIEW events AS {ENDLESS}, '' AS words FROM n", "is no table"),
        ("CREATE TRIGGER t AFTER INSERT ON events BEGIN SELECT 1; END", "is no table"),
        (f"INSERT INTO kept VALUES ('x', '{'[' * 100_000}')", "recursion"),
        ("INSERT INTO kept VALUES ('x', NULL)", "Expecting value"),
        ("INSERT INTO events VALUES (1, 'now', 'kind', x'00')", "not made of texts"),
        (f"{WORDED} INSERT INTO events VALUES ('one', 'now', 'kind', 'words')", "not numbered"),
        (f"INSERT INTO events VALUES ({2**63 - 1}, 'now', 'kind', 'words')", "not numbered"),
    ],
    ids=[
        "a view without end",
        "a trigger",
        "nested too deep",
        "nothing",
        "bytes",
        "a word as number",
        "the last number",
    ],
)
def test_a_database_that_means_harm_is_set_aside(tmp_path: Path, script: str, told: str) -> None:
    """It neither hangs nor ends the daemon, which begins a new one and says so."""
    record_at(tmp_path).close()
    with sqlite3.connect(tmp_path / "daemon.db") as database:
        database.executescript(script)
    database.close()
    record = record_at(tmp_path)
    (words,) = record.losses()
    assert "set aside" in words
    assert told in words
    assert record.tell("phase", "goes on").words == "goes on"
    record.close()


def test_a_database_of_absurd_size_is_set_aside_unread(tmp_path: Path) -> None:
    """A single text of it could take all memory."""
    record_at(tmp_path).close()
    os.truncate(tmp_path / "daemon.db", 1 << 40)
    record = record_at(tmp_path)
    assert "larger than 64 MB" in record.losses()[0]
    record.close()


def test_a_minute_that_no_calendar_has_is_not_shown(tmp_path: Path) -> None:
    """One far beyond the end of time is passed over."""
    record = record_at(tmp_path)
    record.add(Minute(int(EPOCH_S // 60)))
    record.add(Minute(10**18))
    record.flush()
    assert len(record.history(10)) == 1
    record.close()
