"""Where a socket may lie."""

import os
from pathlib import Path

import pytest

from polythrottle.daemon import sockets
from polythrottle.daemon.sockets import check_folder
from polythrottle.errors import PermissionDenied


def test_a_folder_of_ones_own_is_fine(tmp_path: Path) -> None:
    """One that only its owner may write to is no objection, below a sticky one such as /tmp neither."""
    above = tmp_path / "above"
    above.mkdir()
    above.chmod(0o1777)
    (above / "own").mkdir(mode=0o755)
    check_folder(above / "own" / "a.sock")


@pytest.mark.parametrize("mode", [0o777, 0o1777, 0o757])
def test_a_folder_others_write_to_is_refused(tmp_path: Path, mode: int) -> None:
    """Sticky or not: somebody else could listen there first."""
    folder = tmp_path / "open"
    folder.mkdir()
    folder.chmod(mode)
    with pytest.raises(PermissionDenied, match="open to others"):
        check_folder(folder / "a.sock")


def test_a_folder_above_that_others_write_to_is_refused(tmp_path: Path) -> None:
    """They could put another folder in the place of the one below."""
    (tmp_path / "above" / "own").mkdir(parents=True)
    (tmp_path / "above").chmod(0o777)
    with pytest.raises(PermissionDenied, match=r"above is open to others, who could listen at .*a\.sock first"):
        check_folder(tmp_path / "above" / "own" / "a.sock")


def test_a_group_of_others_is_refused_and_one_of_nobody_else_is_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A folder its group may write to is closed only where the group is its owner's alone."""
    folder = tmp_path / "shared"
    folder.mkdir()
    folder.chmod(0o1770)
    monkeypatch.setattr(sockets, "_alone", lambda user, group: (user, group) == (os.geteuid(), folder.stat().st_gid))
    check_folder(folder / "a.sock")
    monkeypatch.setattr(sockets, "_alone", lambda user, group: False)
    with pytest.raises(PermissionDenied, match="shared is open to others"):
        check_folder(folder / "a.sock")


@pytest.mark.skipif(os.geteuid() != 0, reason="giving a folder away takes root")
def test_a_folder_of_somebody_else_is_refused(tmp_path: Path) -> None:
    """Its owner could put another socket there."""
    folder = tmp_path / "theirs"
    folder.mkdir()
    os.chown(folder, 54321, 54321)
    with pytest.raises(PermissionDenied, match="theirs is open to others"):
        check_folder(folder / "a.sock")


def test_a_way_there_by_a_link_is_looked_through(tmp_path: Path) -> None:
    """What counts is the folder in which the socket really is."""
    (tmp_path / "open").mkdir()
    (tmp_path / "open").chmod(0o777)
    (tmp_path / "link").symlink_to(tmp_path / "open")
    with pytest.raises(PermissionDenied, match="open is open to others"):
        check_folder(tmp_path / "link" / "a.sock")
