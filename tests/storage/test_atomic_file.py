"""Files are replaced whole or not at all."""

import os
import stat
from pathlib import Path

import pytest

from polythrottle.domain.errors import StorageError
from polythrottle.storage.atomic_file import open_replacement, replace_file


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
