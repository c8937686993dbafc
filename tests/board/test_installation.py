"""A board's own actuator and daemon: installed by a stand-in for ``ssh``, started, updated, refused, removed."""

import errno
import fcntl
import hashlib
import io
import json
import os
import signal
import subprocess
import sys
import zipfile
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from boards_over_ssh import await_that, far_sides, held, lay_sudo, own_wheels, planted, stand_in
from old_python import PACKAGE, closure
from test_old_python import ENTRIES, LEFT_OUT

from polythrottle.actuation.client.connection import Line
from polythrottle.board import installation
from polythrottle.board.installation import packed_daemon, wheels_of
from polythrottle.board.link import SSH
from polythrottle.cli.commands import run
from polythrottle.cli.daemon_process import on_board
from polythrottle.daemon.client import Client
from polythrottle.domain.errors import BadFile, DeviceError, PolythrottleError

HOME = "opt/polythrottle"
BOARD = f"ssh://nano?python={sys.executable}"
PINS = Path(__file__).resolve().parents[2] / "packaging/board-requirements.txt"


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the folder that stands for a board's root, behind a stand-in for ssh; wheels take no network."""
    monkeypatch.setenv(SSH, stand_in(tmp_path))
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(installation, "wheels_of", lambda folder: own_wheels())
    folder = tmp_path / "root"
    folder.mkdir()
    return folder


def install(root: Path, *words: str, board: str = BOARD) -> int:
    """Install below a folder; returns the exit code."""
    return run(["daemon", "install", "--device", board, "--root", str(root), *words])


def uninstall(root: Path) -> int:
    """Remove it likewise."""
    return run(["daemon", "uninstall", "--device", BOARD, "--root", str(root)])


def tree(root: Path) -> list[str]:
    """Return everything below a folder."""
    return sorted(str(path.relative_to(root)) for path in root.rglob("*"))


def versions(root: Path) -> set[str]:
    """Return the folders of versions."""
    return {path.name for path in (root / HOME / "versions").iterdir()}


@pytest.fixture(scope="module")
def unpacked(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with what is installed on a board."""
    folder = tmp_path_factory.mktemp("carried")
    zipfile.ZipFile(io.BytesIO(packed_daemon(own_wheels()).whole)).extractall(folder)
    return folder


def test_what_is_installed_is_what_actuator_and_daemon_may_import(unpacked: Path) -> None:
    """All of it, and the guard and the installer besides; `test_old_python` holds it to Python 3.8."""
    imported = {str(path.relative_to(PACKAGE)) for path in closure(ENTRIES, LEFT_OUT).values()}
    besides = {
        "__main__.py",
        "actuation/guard.py",
        *(f"board/{each}.py" for each in ("__init__", "carried", "link", "installation")),
    }
    ours = unpacked / "polythrottle"
    assert {str(path.relative_to(ours)) for path in ours.rglob("*.py")} == {*imported, *besides}


def test_what_is_installed_needs_nothing_besides(unpacked: Path) -> None:
    """Every module of it can be imported without the packages of the Python that runs it."""
    names = [
        ".".join(path.relative_to(unpacked).with_suffix("").parts).removesuffix(".__init__")
        for path in sorted((unpacked / "polythrottle").rglob("*.py"))
        if path.stem != "__main__"
    ]
    begin = f"import sys, importlib; sys.path.insert(0, {str(unpacked)!r})"
    code = f"{begin}\nfor name in {names!r}: importlib.import_module(name)"
    done = subprocess.run([sys.executable, "-ISc", code], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert len(names) > 120


@pytest.mark.slow
def test_it_is_installed_started_updated_and_removed(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Actuator and daemon start from there and answer; a newer one takes over; nothing is left, the board as it was."""
    board = planted(tmp_path)
    before = held(board)
    assert install(root, "--json") == 0
    first = json.loads(capsys.readouterr().out)
    assert first["python"] == ".".join(map(str, sys.version_info[:3]))
    assert (root / HOME / "current").resolve().name == first["version"]
    unit = (root / "usr/lib/systemd/system/polythrottle.service").read_text()
    assert "ExecStart=/opt/polythrottle/bin/polythrottle daemon run" in unit
    programs = root / HOME / "bin"
    sockets = [tmp_path / "actuator.sock", tmp_path / "daemon.sock"]
    device = f"jetson?root={board}"
    asked = ["--device", device, "--actuator", str(sockets[0]), "--socket", str(sockets[1]), "--traffic", "report"]
    with (tmp_path / "log").open("w") as log:
        words = [programs / "polythrottle-actuator", "--socket", str(sockets[0]), "--device", device]
        actuator = subprocess.Popen(words, stderr=log)
        line = Line(sockets[0], 30.0)
        await_that(lambda: answers(lambda: line.ask("hello")), "the actuator does not answer")
        line.close()
        words = [programs / "polythrottle", "daemon", "run", "--workload", "resnet50", *asked]
        daemon = subprocess.Popen(words, stderr=log)
    client = Client(sockets[1])
    await_that(lambda: answers(client.status), "the daemon does not answer")
    assert f"/versions/{first['version']}/" in Path(f"/proc/{daemon.pid}/cmdline").read_text()
    client.close()

    newer = (*own_wheels(), wheel())
    monkeypatch.setattr(installation, "wheels_of", lambda folder: newer)
    assert install(root, "--json") == 0
    second = json.loads(capsys.readouterr().out)
    assert (root / HOME / "current").resolve().name == second["version"]
    assert versions(root) == {first["version"], second["version"]}, "the older one still runs"
    assert uninstall(root) == 0
    assert "the board was put back" in capsys.readouterr().out
    assert (daemon.wait(), actuator.wait()) == (0, 0)
    assert "the board is as it was found" in (tmp_path / "log").read_text()
    assert tree(root) == []
    assert held(board) == before
    assert not [*tmp_path.glob("polythrottle-board-*")]


def answers(ask: Callable[[], Any]) -> bool:
    """Return whether somebody answers."""
    try:
        ask()
    except PolythrottleError:
        return False
    return True


def wheel(name: str = "newer") -> bytes:
    """Return a wheel with one module."""
    whole = io.BytesIO()
    with zipfile.ZipFile(whole, "w") as archive:
        archive.writestr(f"{name}.py", "")
    return whole.getvalue()


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leave out what an installation spends seconds on: to compile, and to import it all once."""
    monkeypatch.setattr(installation.compileall, "compile_dir", lambda *given, **named: True)
    monkeypatch.setattr(installation, "_TRIAL", "pass")


def ask(root: Path, unpacked: Path, verb: str = "install", settings: str | None = None) -> Mapping[str, Any]:
    """Have this process do what a board is asked for."""
    umask = os.umask(0o022)
    try:
        request = {"verb": verb, "root": str(root), "version": "1", "settings": settings}
        return installation._answer(unpacked, request)
    finally:
        os.umask(umask)


@pytest.mark.usefixtures("quick")
def test_settings_that_the_desk_wrote_are_its_to_replace_and_remove(tmp_path: Path, unpacked: Path) -> None:
    """Those that somebody on the board has changed stay, and are named."""
    path = tmp_path / "etc/polythrottle/daemon.toml"
    assert "error" not in ask(tmp_path, unpacked, settings='device = "jetson"\n')
    assert "error" not in ask(tmp_path, unpacked, settings='device = "cpu"\n')
    assert path.read_text() == 'device = "cpu"\n'
    path.write_text("# mine\n")
    refused = ask(tmp_path, unpacked, settings='device = "jetson"\n')
    assert "daemon.toml was written there; move it away" in refused["error"]["words"]
    assert path.read_text() == "# mine\n"
    assert ask(tmp_path, unpacked, "uninstall")["kept"] == [str(path)]
    assert tree(tmp_path) == ["etc", "etc/polythrottle", "etc/polythrottle/daemon.toml"]


@pytest.mark.usefixtures("quick")
def test_folders_that_were_there_stay(tmp_path: Path, unpacked: Path) -> None:
    """Only what was made is removed: an empty folder of the board's own is still there afterwards."""
    (tmp_path / "opt").mkdir()
    (tmp_path / "usr/lib/udev").mkdir(parents=True)
    before = tree(tmp_path)
    assert "error" not in ask(tmp_path, unpacked)
    assert "error" not in ask(tmp_path, unpacked), "once more does no harm"
    ask(tmp_path, unpacked, "uninstall")
    assert tree(tmp_path) == before


@pytest.mark.usefixtures("quick")
def test_what_was_cut_off_is_not_used_and_is_cleared_away(tmp_path: Path, unpacked: Path) -> None:
    """Half a version has another name; the next installation removes it, and so does the removal of all."""
    half = tmp_path / HOME / "versions/1-abc.partial/lib"
    half.mkdir(parents=True)
    (half / "x.py").write_text("")
    assert "error" not in ask(tmp_path, unpacked)
    assert not any(name.endswith(".partial") for name in versions(tmp_path))
    half.mkdir(parents=True)
    ask(tmp_path, unpacked, "uninstall")
    assert not (tmp_path / HOME).exists()


@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize("step", ["mkdir", "replace", "symlink_to"])
def test_a_disk_that_is_full_changes_nothing(
    tmp_path: Path, unpacked: Path, monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    """One line, whichever step meets it, and everything is as before, an older installation too."""

    def full(*given: Any, **named: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device", "x")

    for older in (False, True):
        if older:
            assert "error" not in ask(tmp_path, unpacked)
        before = tree(tmp_path)
        current = os.path.realpath(tmp_path / HOME / "current")
        with monkeypatch.context() as patch:
            patch.setattr(installation.sys, "version", f"another Python {older}")
            patch.setattr(installation.os if step == "replace" else Path, step, full)
            assert "No space left on device" in ask(tmp_path, unpacked)["error"]["words"]
        assert os.path.realpath(tmp_path / HOME / "current") == current
        if not older or step == "mkdir":
            assert tree(tmp_path) == before


@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize(
    ("prepare", "says"),
    [
        (lambda root: (root / HOME / "bin").mkdir(parents=True), "of another installation, such as pip's"),
        (
            lambda root: unit(root, "ExecStart=/usr/lib/polythrottle/bin/polythrottle daemon run\n"),
            "starts /usr/lib/polythrottle/bin/polythrottle, of another installation",
        ),
    ],
)
def test_another_installation_is_not_written_over(
    tmp_path: Path, unpacked: Path, prepare: Callable[[Path], None], says: str
) -> None:
    """One that pip or a package has made is named and left as it is."""
    prepare(tmp_path)
    before = tree(tmp_path)
    assert says in ask(tmp_path, unpacked)["error"]["words"]
    assert tree(tmp_path) == before


def unit(root: Path, text: str) -> None:
    """Lay a unit of the daemon."""
    folder = root / "usr/lib/systemd/system"
    folder.mkdir(parents=True)
    (folder / "polythrottle.service").write_text(text)


def test_the_board_itself_takes_root_and_systemd(unpacked: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Who is not root is told of --sudo; where no systemd runs, nothing is written below /."""
    isdir = os.path.isdir
    monkeypatch.setattr(installation.os.path, "isdir", lambda path: path != "/run/systemd/system" and isdir(path))
    monkeypatch.setattr(installation.os, "geteuid", lambda: 0)
    assert "no systemd runs there" in ask(Path("/"), unpacked)["error"]["words"]
    monkeypatch.setattr(installation.os, "geteuid", lambda: 1000)
    for verb in ("install", "uninstall"):
        refused = ask(Path("/"), unpacked, verb)["error"]
        assert refused["kind"] == "PermissionDenied"
        assert "add --sudo" in refused["words"]


def test_a_second_desk_is_told_to_wait(tmp_path: Path, unpacked: Path) -> None:
    """One installation at a time, so that an interrupted one that goes on is not disturbed."""
    descriptor = os.open(tmp_path, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        assert "another installation is under way there" in ask(tmp_path, unpacked)["error"]["words"]
    finally:
        os.close(descriptor)
    assert tree(tmp_path) == []


def test_a_folder_that_cannot_be_made_is_named(tmp_path: Path, unpacked: Path) -> None:
    """By the first reason there is, and not by what is missing afterwards."""
    (tmp_path / "opt").write_text("a file")
    assert ask(tmp_path, unpacked)["error"]["words"] == f"{tmp_path / HOME / 'versions'}: Not a directory"
    assert tree(tmp_path) == ["opt"]


_SYSTEMD = """#!/bin/sh
echo "${{0##*/}} $*" >> {log}
case "$*" in
"is-active polythrottle.service") echo {state} ;;
is-active*) echo active ;;
"{fails}") echo "Unit is masked." >&2; exit 1 ;;
esac
"""


@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize("settings", [None, 'device = "jetson"\n'])
def test_units_are_put_in_force_and_taken_out(
    tmp_path: Path, unpacked: Path, monkeypatch: pytest.MonkeyPatch, settings: str | None
) -> None:
    """The actuator begins anew while no daemon runs; a daemon begins where it has settings; what fails is told."""
    programs = tmp_path / "programs"
    programs.mkdir()
    log = tmp_path / "log"
    for name in ("systemctl", "systemd-sysusers", "systemd-tmpfiles", "udevadm"):
        text = _SYSTEMD.format(log=log, state="inactive", fails="enable polythrottle.service")
        (programs / name).write_text(text)
        (programs / name).chmod(0o700)
    monkeypatch.setenv("PATH", f"{programs}:{os.environ['PATH']}")
    monkeypatch.setattr(installation.BoardRoot, "steers", True)
    isdir = os.path.isdir
    monkeypatch.setattr(installation.os.path, "isdir", lambda path: path == "/run/systemd/system" or isdir(path))
    monkeypatch.setattr(installation.os, "geteuid", lambda: 0)
    root = tmp_path / "root"
    answer = ask(root, unpacked, settings=settings)
    lines = [line for line in log.read_text().splitlines() if not line.startswith(("udevadm", "systemctl is-active"))]
    restore, actuator, daemon = (f"polythrottle{each}.service" for each in ("-restore", "-actuator", ""))
    begun = [f"systemctl enable {daemon}", f"systemctl restart {daemon}"]
    assert lines == [
        "systemd-sysusers polythrottle.conf",
        "systemd-tmpfiles --create polythrottle.conf",
        "systemctl daemon-reload",
        f"systemctl stop {daemon}",
        f"systemctl enable {restore} {actuator}",
        f"systemctl start {restore}",
        f"systemctl restart {actuator}",
        *(begun if settings is not None else []),
    ]
    assert answer["units"] == {restore: "active", actuator: "active", daemon: "inactive"}
    assert answer["faults"] == ([f"{begun[0]}: Unit is masked."] if settings is not None else [])
    log.write_text("")
    assert "error" not in ask(root, unpacked, "uninstall")
    stopped = [f"systemctl disable --now {each}" for each in (daemon, actuator, restore)]
    assert log.read_text().splitlines() == [*stopped, "systemctl daemon-reload"]
    assert tree(root) == []


@pytest.mark.usefixtures("quick")
def test_a_python_that_cannot_run_it_is_named(tmp_path: Path, unpacked: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is tried before anything leads to it."""
    monkeypatch.setattr(installation, "_TRIAL", "raise SystemExit('no module named _ssl')")
    assert f"{sys.executable} cannot run it: no module named _ssl" in ask(tmp_path, unpacked)["error"]["words"]
    assert tree(tmp_path) == []


@pytest.mark.usefixtures("quick")
def test_a_board_that_cannot_be_put_back_keeps_its_restorer(tmp_path: Path, unpacked: Path) -> None:
    """Nothing is removed then, for it would still be needed."""
    ask(tmp_path, unpacked)
    restorer = tmp_path / HOME / "current/bin/polythrottle-restore"
    restorer.write_text("#!/bin/sh\necho it is held by process 7 >&2\nexit 6\n")
    answer = ask(tmp_path, unpacked, "uninstall")
    assert "nothing was removed: it is held by process 7" in answer["error"]["words"]
    assert restorer.exists()


@pytest.mark.slow
def test_sudo_is_asked_once(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """One connection and one sudo, which may not ask for a password, do all of it."""
    lay_sudo(tmp_path, monkeypatch)
    assert install(root, "--sudo") == 0
    assert "nothing was started; its programs are in" in capsys.readouterr().out
    assert (tmp_path / "sudo.log").read_text().splitlines() == [f"-n {sys.executable}"]


def test_nothing_to_remove_is_said(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """With the folder that was looked for."""
    assert uninstall(root) == 2
    assert f"there is nothing to remove: daemon install --device has made no {root / HOME}" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("board", "before", "code", "says"),
    [
        ("ssh://nano?python=/no/python", "", 6, "there is no /no/python on ssh://nano"),
        (BOARD, "echo ssh: Could not resolve hostname nano >&2; exit 255", 6, "cannot be reached: ssh: Could not res"),
        (BOARD, "kill -9 $$", 6, "and said nothing"),
        (f"{BOARD}&sudo=yes", "echo sudo: a password is required >&2; exit 1", 6, "allow sudo without a password"),
        (BOARD, "export TMPDIR=/dev/null TMP=/dev/null TEMP=/dev/null; ulimit -f 64", 6, "cannot unpack in"),
    ],
)
def test_a_board_that_cannot_take_it_is_one_line(
    *,
    root: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    board: str,
    before: str,
    code: int,
    says: str,
) -> None:
    """No Python, no way there, a password that sudo wants, no room to unpack: and nothing is there afterwards."""
    monkeypatch.setenv(SSH, stand_in(tmp_path, before))
    assert install(root, board=board) == code
    said = capsys.readouterr().err
    assert says in said
    assert "Traceback" not in said
    assert tree(root) == []


def test_python_3_6_is_too_old(root: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """It is told its version, before anything is sent."""
    old = tmp_path / "old-python"
    told = "import sys; sys.version_info = (3, 6, 9); exec(sys.argv.pop(1))"
    old.write_text(f'#!/bin/sh\nshift\nexec {sys.executable} -c "{told}" "$@"\n')
    old.chmod(0o700)
    assert install(root, board=f"ssh://nano?python={old}") == 6
    assert "is Python 3.6, and 3.8 is the oldest that will do" in capsys.readouterr().err
    assert tree(root) == []


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--device", "jetson"], "'jetson' is no board over SSH, such as ssh://orin"),
        (["--device", "ssh://nano/jetson"], "name the board alone, ssh://nano"),
        (["--device", BOARD, "--root", "here"], "on a board a folder is named from its root"),
        (["--sudo"], "--sudo, --settings and --wheels are for a board"),
        (["--device", BOARD, "--settings", "pods.toml"], "[kubernetes] is for a daemon in a cluster"),
        (["--device", BOARD, "--settings", "none.toml"], "none.toml"),
    ],
)
def test_what_makes_no_sense_is_refused_here(
    root: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], words: list[str], says: str
) -> None:
    """Before any board is asked."""
    (tmp_path / "pods.toml").write_text("[kubernetes]\n[node]\npower = '1kW'\nrest = '100W'\n")
    assert run(["daemon", "install", *words]) in (2, 4)
    said = capsys.readouterr().err
    assert says in said
    assert said.count("\n") == 1
    assert tree(root) == []


# The line is cut.


@pytest.mark.slow
@pytest.mark.usefixtures("root")
def test_whoever_is_killed_the_next_installation_is_whole(
    root: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A far side that is killed in the middle has changed nothing that leads anywhere; the next one mends it."""
    child = _begun(root)
    for pid in far_sides(tmp_path):
        os.kill(pid, signal.SIGKILL)
    _, said = child.communicate(timeout=60)
    assert child.returncode == 6
    assert "did not say that it was done" in said
    assert not os.path.lexists(root / HOME / "current")
    assert install(root) == 0
    capsys.readouterr()
    assert [name for name in versions(root) if name.endswith(".partial")] == []
    assert uninstall(root) == 0
    assert tree(root) == []


_DESK = f"""
import sys
sys.path.insert(0, {str(Path(__file__).resolve().parent.parent)!r})
from boards_over_ssh import own_wheels
from polythrottle.board import installation
from polythrottle.cli.commands import run
installation.wheels_of = lambda folder: own_wheels()
sys.exit(run(["daemon", "install", "--device", sys.argv[1], "--root", sys.argv[2]]))
"""


def _is_begun(root: Path, child: "subprocess.Popen[str]") -> bool:
    return child.poll() is not None or any(root.glob(f"{HOME}/versions/*.partial/lib"))


def _begun(root: Path) -> "subprocess.Popen[str]":
    """Return a desk whose installation is under way; on a busy machine it may be over before anybody has looked."""
    while True:
        child = subprocess.Popen([sys.executable, "-c", _DESK, BOARD, str(root)], stderr=subprocess.PIPE, text=True)
        await_that(partial(_is_begun, root, child), "it was not begun")
        if child.poll() is None:
            return child
        _, said = child.communicate()
        assert child.returncode == 0, said
        assert uninstall(root) == 0


# The wheels.


def test_every_package_is_pinned_once() -> None:
    """Each line that is no remark has a version and a hash, and is what is looked for."""
    lines = [line for line in PINS.read_text().splitlines() if not line.startswith("#")]
    assert all(installation._PIN.fullmatch(line) for line in lines)
    assert len({line.partition("==")[0] for line in lines}) == len(lines) == 11


@pytest.fixture
def pinned(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> bytes:
    """Return a wheel that is the only one a daemon needs here."""
    data = wheel("small")
    packaging = tmp_path / "packaging"
    packaging.mkdir()
    digest = hashlib.sha256(data).hexdigest()
    (packaging / "board-requirements.txt").write_text(f"small==1.0 --hash=sha256:{digest}\n")
    monkeypatch.setattr(installation, "packaging_dir", lambda: packaging)
    return data


def test_wheels_are_known_by_their_hash(pinned: bytes, tmp_path: Path) -> None:
    """Whatever they are called; one with other contents, or none, is named with the command that fetches it."""
    folder = tmp_path / "wheels"
    with pytest.raises(BadFile, match=r"has no wheel with the pinned hash of small 1\.0; to fetch them: pip download"):
        wheels_of(folder)
    folder.mkdir()
    (folder / "small-1.0-py3-none-any.whl").write_bytes(b"other")
    with pytest.raises(BadFile, match="has no wheel with the pinned hash of small"):
        wheels_of(folder)
    (folder / "x.whl").write_bytes(pinned)
    assert wheels_of(folder) == (pinned,)
    os.mkfifo(folder / "pipe.whl")
    with pytest.raises(BadFile, match="no plain file"):
        wheels_of(folder)


_PIP = """
import os, sys
folder = sys.argv[sys.argv.index("-d") + 1]
{does}
"""


@pytest.mark.parametrize(
    ("does", "says"),
    [
        (
            "sys.exit('Traceback of something\\nERROR: No matching distribution found for small==1.0\\nGot x')",
            "No matc",
        ),
        ("open(folder + '/small.whl', 'w').write('other')", "no wheel with the pinned hash of small 1.0"),
    ],
)
def test_packages_that_cannot_be_fetched_are_one_line(
    pinned: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, does: str, says: str
) -> None:
    """Without a network, or from an index that has other contents under that name."""
    lay_pip(tmp_path, monkeypatch, does)
    with pytest.raises(DeviceError, match=says) as caught:
        wheels_of()
    assert "\n" not in str(caught.value)


def test_packages_are_fetched_once(pinned: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """They are kept in the state folder."""
    lay_pip(tmp_path, monkeypatch, f"open(folder + '/small.whl', 'wb').write({pinned!r})")
    assert wheels_of() == (pinned,)
    lay_pip(tmp_path, monkeypatch, "sys.exit('asked again')")
    assert wheels_of() == (pinned,)


def lay_pip(folder: Path, monkeypatch: pytest.MonkeyPatch, does: str) -> None:
    """Put a program in the place of pip."""
    (folder / "pip.py").write_text(_PIP.format(does=does))
    monkeypatch.setenv("PYTHONPATH", str(folder))


@pytest.mark.parametrize("words", [[], ["restore"], ["daemon", "stop"]])
def test_a_board_has_the_daemon_alone(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    """Whatever else is asked for there is for the desk, and is told so."""
    assert on_board(words) == 2
    said = capsys.readouterr().err
    assert "this board has 'daemon run' alone" in said
    assert said.count("\n") == 1
