"""The append-only log: what a crash or a full disk leaves of it."""

import os
from pathlib import Path

import pytest

from polythrottle.domain.errors import StorageError
from polythrottle.storage.append_log import AppendLog, whole_lines


def test_a_torn_line_is_cut_off_and_the_next_one_is_whole(tmp_path: Path) -> None:
    """What a crash left of a line was never acted upon."""
    path = tmp_path / "folder" / "log"
    with AppendLog(path) as log:
        log.append(b"one")
    path.write_bytes(path.read_bytes() + b"tor")
    with AppendLog(path, create=False) as log:
        log.cut_torn_line()
        log.append(b"two")
    assert whole_lines(path.read_bytes()) == [b"one", b"two"]


def test_a_file_of_nothing_but_a_torn_line_is_empty(tmp_path: Path) -> None:
    """Its first line was cut short."""
    path = tmp_path / "log"
    path.write_bytes(b"tor")
    with AppendLog(path) as log:
        log.cut_torn_line()
    assert path.read_bytes() == b""


def test_a_full_disk_leaves_the_file_as_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Half a line is cut off again, and the next append works."""
    path = tmp_path / "log"
    write = os.write

    def full(handle: int, data: bytes) -> int:
        if len(data) > 2:
            return write(handle, data[:2])
        raise OSError(28, "No space left on device")

    with AppendLog(path) as log:
        log.append(b"one")
        with monkeypatch.context() as patch:
            patch.setattr(os, "write", full)
            with pytest.raises(StorageError, match="No space left on device; what it held so far is kept"):
                log.append(b"two")
        assert path.read_bytes() == b"one\n"
        log.append(b"two")
    assert path.read_bytes() == b"one\ntwo\n"


def test_of_an_empty_file_nothing_is_said_to_be_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A disk that was full from the start leaves nothing to go on with."""

    def full(handle: int, data: bytes) -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "write", full)
    with AppendLog(tmp_path / "log") as log, pytest.raises(StorageError, match=r"No space left on device$"):
        log.append(b"one")
    (tmp_path / "file").touch()
    with pytest.raises(StorageError, match=r"cannot be written: Not a directory$|cannot be written: File exists$"):
        AppendLog(tmp_path / "file" / "log")


def test_a_second_writer_is_refused(tmp_path: Path) -> None:
    """The lock lasts until the first one closes, and closing twice does nothing."""
    first = AppendLog(tmp_path / "log", busy="it is in use")
    with pytest.raises(StorageError, match="it is in use"):
        AppendLog(tmp_path / "log", busy="it is in use")
    first.close()
    first.close()
    AppendLog(tmp_path / "log", busy="it is in use").close()


def test_a_log_that_is_not_there_is_not_made_where_it_must_exist(tmp_path: Path) -> None:
    """Reopening what is gone is an error, not an empty file."""
    with pytest.raises(StorageError, match="cannot be written"):
        AppendLog(tmp_path / "log", create=False)
    assert not (tmp_path / "log").exists()
