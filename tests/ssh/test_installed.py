"""A board's own daemon, installed behind a real ``sshd`` for CPython 3.8, PyPy and this Python; cut off, refused."""

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path

import pytest
from boards_over_ssh import await_that, children_of, far_sides, held, own_wheels, planted
from sshd import SSHD, listening

from polythrottle.board import installation
from polythrottle.board.installation import wheels_of
from polythrottle.board.link import SSH
from polythrottle.cli.commands import run
from polythrottle.domain.errors import DeviceError

OLD = sorted(Path("/root/.pyenv/versions").glob("3.8.*/bin/python3.8")) if os.access("/root", os.R_OK) else []
PYTHONS = [sys.executable, *map(str, OLD[-1:]), *filter(None, [shutil.which("pypy3")])]
TOO_OLD = sorted(Path("/root/.pyenv/versions").glob("3.6.*/bin/python3.6")) if os.access("/root", os.R_OK) else []
HOME = "opt/polythrottle"
pytestmark = [pytest.mark.ssh, pytest.mark.skipif(SSHD is None, reason="needs sshd (Debian: openssh-server)")]


@pytest.fixture(scope="module")
def daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, int]]:
    """Run an sshd of our own; yields the configuration of ssh and its process."""
    with listening(tmp_path_factory.mktemp("sshd")) as (config, _, pid):
        yield config, pid


@pytest.fixture(scope="module")
def fetched(tmp_path_factory: pytest.TempPathFactory) -> Path | None:
    """Return a folder with the pinned wheels; None where they cannot be fetched."""
    folder = tmp_path_factory.mktemp("fetched")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("POLYTHROTTLE_STATE_DIR", str(folder))
        with suppress(DeviceError):
            wheels_of()
            return folder / "wheels"
    return None


@pytest.fixture
def root(daemon: tuple[Path, int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the folder that stands for a board's root behind that sshd."""
    monkeypatch.setenv(SSH, f"ssh -F {daemon[0]}")
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    folder = tmp_path / "root"
    folder.mkdir()
    return folder


@pytest.fixture
def own(monkeypatch: pytest.MonkeyPatch) -> None:
    """Install for this Python, with what is installed here, which takes no network."""
    monkeypatch.setattr(installation, "wheels_of", lambda folder: own_wheels())


def board(python: str = sys.executable) -> str:
    """Return how the board is reached."""
    return f"ssh://nano?python={python}"


@contextmanager
def started(root: Path, tree: Path, log: Path) -> Iterator[list[int]]:
    """Run actuator and daemon from where they were installed; yields their processes."""
    programs = root / HOME / "bin"
    device = f"jetson?root={tree}"
    socket = str(log.with_name("actuator.sock"))
    with log.open("w") as file:
        first = [programs / "polythrottle-actuator", "--socket", socket, "--device", device]
        actuator = subprocess.Popen(first, stderr=file)
        try:
            await_that(Path(socket).exists, "the actuator does not begin")
            words = ["--actuator", socket, "--device", device, "--workload", "resnet50", "--traffic", "report"]
            second = subprocess.Popen([programs / "polythrottle", "daemon", "run", *words], stderr=file)
            try:
                yield [actuator.pid, second.pid]
            finally:
                second.terminate()
                second.wait()
        finally:
            actuator.terminate()
            actuator.wait()


@pytest.mark.parametrize("python", PYTHONS, ids=[Path(each).name for each in PYTHONS])
def test_what_is_installed_starts_answers_over_ssh_is_updated_and_removed(
    *,
    root: Path,
    tmp_path: Path,
    fetched: Path | None,
    python: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """In each interpreter, with the pinned wheels; nothing is left of it, and the board is as it was."""
    if fetched is None:
        pytest.skip("needs the packages of packaging/board-requirements.txt, which pip cannot fetch here")
    for kind in ("RUN", "STATE"):
        monkeypatch.setenv(f"POLYTHROTTLE_{kind}_DIR", str(tmp_path / kind.lower()))
    tree = planted(tmp_path)
    before = held(tree)
    words = ["--device", board(python), "--root", str(root), "--json"]
    assert run(["daemon", "install", *words, "--wheels", str(fetched)]) == 0
    version = json.loads(capsys.readouterr().out)["version"]
    with started(root, tree, tmp_path / "log") as pids:
        status = ["daemon", "status", "--json", "--device", board(python)]
        await_that(lambda: run(status) == 0, "the daemon does not answer")
        capsys.readouterr()
        assert run(status) == 0
        assert json.loads(capsys.readouterr().out)["device"] == f"jetson?root={tree}"
        assert Path(os.readlink(f"/proc/{pids[1]}/exe")) == Path(python).resolve()
        # An older version is what another polythrottle installed.
        monkeypatch.setattr(installation, "version_of", lambda name: "99.0")
        assert run(["daemon", "install", *words, "--wheels", str(fetched)]) == 0
        updated = json.loads(capsys.readouterr().out)["version"]
        assert updated.startswith("99.0-")
        assert {path.name for path in (root / HOME / "versions").iterdir()} == {version, updated}
        assert run(["daemon", "uninstall", *words]) == 0
        assert json.loads(capsys.readouterr().out) == {"removed": str(root / HOME), "kept": []}
    assert "the board is as it was found" in (tmp_path / "log").read_text()
    assert [*root.iterdir()] == []
    assert held(tree) == before
    assert not [*tmp_path.glob("polythrottle-board-*")]


@pytest.mark.usefixtures("own")
def test_a_line_that_is_cut_in_the_middle_leaves_the_older_version_or_the_newer_one(
    *, daemon: tuple[Path, int], root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Never half of one: what leads to it does so once it is whole. The same command again ends well."""
    words = ["daemon", "install", "--device", board(), "--root", str(root)]
    assert run(words) == 0
    older, desk = _begun(root, words)
    for pid in children_of(daemon[1]):
        with suppress(OSError):
            if b"sshd" in Path(f"/proc/{pid}/cmdline").read_bytes():
                os.kill(pid, signal.SIGKILL)
    _, said = desk.communicate(timeout=60)
    assert desk.returncode == 6
    assert said.count("\n") == 1
    assert "did not say that it was done" in said
    await_that(lambda: not far_sides(tmp_path), "the far side stays")
    current = root / HOME / "current"
    assert os.readlink(current) == older or (current / "bin/polythrottle").is_file()
    assert not [*root.glob(f"{HOME}/versions/*.partial")]
    monkeypatch.setattr(installation, "version_of", lambda name: "99.0")
    assert run(words) == 0
    assert os.readlink(current).startswith("versions/99.0-")
    assert run(["daemon", "uninstall", *words[2:]]) == 0
    assert [*root.iterdir()] == []


_DESK = f"""
import sys
sys.path.insert(0, {str(Path(__file__).resolve().parent.parent)!r})
from boards_over_ssh import own_wheels
from polythrottle.board import installation
from polythrottle.cli.commands import run
installation.wheels_of = lambda folder: own_wheels()
installation.version_of = lambda name: "99.0"
sys.exit(run(sys.argv[1:]))
"""


def _is_begun(root: Path, desk: "subprocess.Popen[str]") -> bool:
    return desk.poll() is not None or any(root.glob(f"{HOME}/versions/*.partial/lib"))


def _begun(root: Path, words: list[str]) -> "tuple[str, subprocess.Popen[str]]":
    """Return what is installed, and a desk that installs another; it may be over before anybody has looked."""
    while True:
        older = os.readlink(root / HOME / "current")
        desk = subprocess.Popen([sys.executable, "-c", _DESK, *words], stderr=subprocess.PIPE, text=True)
        await_that(partial(_is_begun, root, desk), "it was not begun")
        if desk.poll() is None:
            return older, desk
        _, said = desk.communicate()
        assert desk.returncode == 0, said


@pytest.mark.usefixtures("own")
def test_a_full_disk_is_one_line_and_leaves_what_was_there(
    root: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A small file system, with nothing on it, and with an older version."""
    opt = root / "opt"
    opt.mkdir()
    words = ["daemon", "install", "--device", board(), "--root", str(root)]
    for size in ("1m", "24m"):
        done = subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size}", "none", str(opt)], check=False)
        if done.returncode != 0:
            pytest.skip("needs the right to mount")
        try:
            if size != "1m":
                assert run(words) == 0
                monkeypatch.setattr(installation, "version_of", lambda name: "99.0")
            before = sorted(opt.rglob("*"))
            capsys.readouterr()
            assert run(words) == 8
            said = capsys.readouterr().err
            assert "No space left on device" in said or "is there room on the disk?" in said
            assert said.count("\n") == 1
            assert sorted(opt.rglob("*")) == before
            assert [path.name for path in root.iterdir()] == ["opt"] or size != "1m"
        finally:
            subprocess.run(["umount", str(opt)], check=True)


@pytest.mark.usefixtures("own")
@pytest.mark.parametrize(
    ("device", "says"),
    [
        ("ssh://unknown", "ssh://unknown cannot be reached"),
        ("ssh://stranger", "ssh://stranger lets nobody in with these keys"),
        ("ssh://nano?python=/no/such/python", "there is no /no/such/python on ssh://nano"),
        *((f"ssh://nano?python={each}", "is Python 3.6, and 3.8 is the oldest that will do") for each in TOO_OLD[-1:]),
    ],
)
def test_a_board_that_cannot_be_used_is_one_line(
    root: Path, capsys: pytest.CaptureFixture[str], device: str, says: str
) -> None:
    """A host key nobody knows, keys it does not let in, no Python and one that is too old: nothing is written."""
    assert run(["daemon", "install", "--device", device, "--root", str(root)]) in (5, 6)
    said = capsys.readouterr().err
    assert says in said
    assert said.count("\n") == 1
    assert [*root.iterdir()] == []
