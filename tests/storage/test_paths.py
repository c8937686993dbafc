"""Where state and sockets are kept, for root and for a user."""

import os
from pathlib import Path

import pytest

from polythrottle.domain.errors import StorageError
from polythrottle.storage import paths
from polythrottle.storage.paths import run_dir, socket_path, state_dir


@pytest.fixture(autouse=True)
def user(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Be a user with a home folder, who has chosen nothing, on a machine without a shared folder for sockets."""
    for name in ("POLYTHROTTLE_STATE_DIR", "POLYTHROTTLE_RUN_DIR", "XDG_STATE_HOME", "XDG_RUNTIME_DIR"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    monkeypatch.setattr(paths, "_SHARED", tmp_path / "shared")


def test_a_users_state_lies_in_the_xdg_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Below the home folder by default; a relative XDG path is ignored, and a chosen folder comes before all."""
    assert state_dir() == tmp_path / "home" / ".local" / "state" / "polythrottle"
    monkeypatch.setenv("XDG_STATE_HOME", "relative")
    assert state_dir() == tmp_path / "home" / ".local" / "state" / "polythrottle"
    monkeypatch.setenv("XDG_STATE_HOME", "/var/tmp/xdg")
    assert state_dir() == Path("/var/tmp/xdg/polythrottle")
    monkeypatch.setenv("POLYTHROTTLE_STATE_DIR", "here")
    assert state_dir() == tmp_path / "here"


def test_roots_state_and_sockets_are_the_machines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Even where the folder for sockets is not there yet."""
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    assert state_dir() == Path("/var/lib/polythrottle")
    assert run_dir() == tmp_path / "shared"
    monkeypatch.setenv("XDG_RUNTIME_DIR", "/run/user/0")
    assert run_dir() == tmp_path / "shared"


def test_a_users_sockets_lie_in_the_runtime_folder_or_with_the_state(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the shared folder only where that can be written; a relative runtime folder is ignored."""
    assert run_dir() == state_dir() / "run"
    monkeypatch.setenv("XDG_RUNTIME_DIR", "relative")
    assert run_dir() == state_dir() / "run"
    monkeypatch.setenv("XDG_RUNTIME_DIR", "/run/user/1000")
    assert run_dir() == Path("/run/user/1000/polythrottle")
    (tmp_path / "shared").mkdir()
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    assert run_dir() == Path("/run/user/1000/polythrottle")
    monkeypatch.setattr(os, "access", lambda path, mode: mode == os.W_OK | os.X_OK)
    assert run_dir() == tmp_path / "shared"
    monkeypatch.setenv("POLYTHROTTLE_RUN_DIR", "sockets")
    assert run_dir() == tmp_path / "sockets"


def test_the_machines_socket_is_met_where_a_user_has_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A user's own comes first, and a chosen folder is the only one that is looked into."""
    own = state_dir() / "run"
    assert socket_path("d.sock") == own / "d.sock"
    (tmp_path / "shared").mkdir()
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    (tmp_path / "shared" / "d.sock").touch()
    assert socket_path("d.sock") == tmp_path / "shared" / "d.sock"
    own.mkdir(parents=True)
    (own / "d.sock").touch()
    assert socket_path("d.sock") == own / "d.sock"
    monkeypatch.setenv("POLYTHROTTLE_RUN_DIR", str(tmp_path / "chosen"))
    assert socket_path("d.sock") == tmp_path / "chosen" / "d.sock"


def test_without_a_home_folder_it_says_what_to_set(monkeypatch: pytest.MonkeyPatch) -> None:
    """One line; with a chosen folder none is needed."""

    def homeless() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(Path, "home", homeless)
    with pytest.raises(StorageError, match="set POLYTHROTTLE_STATE_DIR"):
        state_dir()
    monkeypatch.setenv("POLYTHROTTLE_STATE_DIR", "/srv/state")
    assert run_dir() == Path("/srv/state/run")
