"""Where a socket may lie."""

import os
import socket
import stat
from pathlib import Path

import pytest

from polythrottle.actuation.server import unix_socket
from polythrottle.actuation.server.unix_socket import check_folder, listen_at
from polythrottle.domain.errors import PermissionDenied


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
    monkeypatch.setattr(
        unix_socket, "_alone", lambda user, group: (user, group) == (os.geteuid(), folder.stat().st_gid)
    )
    check_folder(folder / "a.sock")
    monkeypatch.setattr(unix_socket, "_alone", lambda user, group: False)
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


def test_a_socket_that_is_there_listens_and_has_its_permissions(tmp_path: Path) -> None:
    """Until both are so nothing stands at its path; what stood there before is replaced, and nothing else is left."""
    path, seen = tmp_path / "a.sock", []

    def permit(made: Path) -> None:
        seen.append((made.is_socket(), stat.S_IMODE(made.stat().st_mode) & 0o077, path.exists()))
        with socket.socket(socket.AF_UNIX) as client:
            client.connect(str(made))
        made.chmod(0o660)

    for before in (False, True):
        with listen_at(path, 1, permit):
            assert seen.pop() == (True, 0, before)
            assert stat.S_IMODE(path.stat().st_mode) == 0o660
            assert os.listdir(tmp_path) == ["a.sock"]
            with socket.socket(socket.AF_UNIX) as client:
                client.connect(str(path))


def test_a_socket_that_cannot_be_permitted_leaves_nothing(tmp_path: Path) -> None:
    """The error passes, and nobody can connect."""

    def refuse(made: Path) -> None:
        raise PermissionError(f"{made.name} is not yours")

    with pytest.raises(PermissionError, match="not yours"):
        listen_at(tmp_path / "a.sock", 1, refuse)
    assert os.listdir(tmp_path) == []
