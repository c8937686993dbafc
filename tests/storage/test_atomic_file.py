"""Files are replaced whole or not at all."""

import contextlib
import fcntl
import os
import stat
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from polythrottle.domain.errors import StorageError
from polythrottle.storage.atomic_file import open_replacement, replace_file, temporary_folder


@pytest.mark.parametrize(("mode", "expected"), [(0o600, 0o600), (0o644, 0o644), (None, 0o640)])
def test_a_replaced_file_has_the_permissions_asked_for(tmp_path: Path, mode: int | None, expected: int) -> None:
    """A mode holds whatever the umask is; without one the umask decides."""
    former = os.umask(0o027)
    try:
        replace_file(tmp_path / "made" / "file", b"content", mode=mode)
    finally:
        os.umask(former)
    assert stat.S_IMODE((tmp_path / "made" / "file").stat().st_mode) == expected


def test_a_draft_that_was_not_finished_is_gone_and_the_old_file_stays(tmp_path: Path) -> None:
    """An exception while writing leaves the folder as it was."""
    (tmp_path / "file").write_bytes(b"old")

    def interrupted() -> None:
        with open_replacement(tmp_path / "file") as file:
            file.write(b"half")
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == {"file": b"old"}


def test_a_file_is_flushed_before_it_is_renamed_and_its_folder_after(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So that a power cut leaves the old file or the new one, never an empty one."""
    calls: list[bool | str] = []
    real = os.replace
    monkeypatch.setattr(os, "fsync", lambda handle: calls.append(stat.S_ISDIR(os.fstat(handle).st_mode)))
    monkeypatch.setattr(os, "replace", lambda *paths: (calls.append("replace"), real(*paths)))
    replace_file(tmp_path / "file", b"new")
    assert calls == [False, "replace", True]


def test_what_cannot_be_written_is_an_error_of_storage(tmp_path: Path) -> None:
    """A file stands where a folder is needed."""
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(StorageError, match="cannot be written"):
        replace_file(tmp_path / "file" / "below", b"")


_HOLDS = """
import sys, time
from polythrottle.storage.atomic_file import temporary_folder
with temporary_folder() as folder:
    (folder / "socket").touch()
    print(folder, flush=True)
    time.sleep(600)
"""


def test_a_folder_of_a_killed_process_is_cleared_by_the_next(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Never one that is in use, nor what is not of this kind; at the end nothing is left."""
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(tempfile, "tempdir", None)
    (tmp_path / "polythrottle-board-x").mkdir()
    (tmp_path / "polythrottle-own-link").symlink_to(tmp_path / "polythrottle-board-x")
    with contextlib.ExitStack() as ends:
        folders = []
        for _ in range(2):
            process = ends.enter_context(subprocess.Popen([sys.executable, "-c", _HOLDS], stdout=subprocess.PIPE))
            ends.callback(process.kill)
            assert process.stdout is not None
            folders.append((process, Path(process.stdout.readline().decode().strip())))
        (killed, left), (_, used) = folders
        killed.kill()
        killed.wait()
        assert (left / "socket").exists()
        with temporary_folder() as folder, temporary_folder() as other:
            assert not left.exists()
            assert folder.stat().st_mode & 0o7777 == 0o700
            assert other.is_dir()
            assert (used / "socket").exists()
    with temporary_folder():
        pass
    assert sorted(each.name for each in tmp_path.iterdir()) == ["polythrottle-board-x", "polythrottle-own-link"]


def test_a_folder_that_was_cleared_before_it_was_locked_is_made_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever came between took it for one that was left; nothing was in it yet."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    locked: list[int] = []

    def lock(handle: int, how: int) -> None:
        if not locked:
            next(tmp_path.iterdir()).rmdir()
        locked.append(handle)

    monkeypatch.setattr(fcntl, "flock", lock)
    with temporary_folder() as folder:
        assert folder.is_dir()
    assert len(locked) == 2
