"""A board's own actuator and daemon: what they are made of, how they are installed over SSH, and removed again.

They are in ``/opt/polythrottle`` there: a folder per version in ``versions``, ``current`` that leads to the one in use,
and ``bin`` with the programs that systemd's units start. A version is made whole beside its name, tried, and renamed;
only then does ``current`` lead to it. So an installation that was cut off changes nothing, and the next one clears away
what it left.
"""

from __future__ import annotations

import compileall
import fcntl
import hashlib
import io
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from importlib.metadata import version as version_of
from pathlib import Path
from typing import Any

from polythrottle.actuation.wire import error_line
from polythrottle.board.carried import Carried, answer_once, content_of, sources, zipped
from polythrottle.board.link import Place, ask
from polythrottle.catalog.documents import packaging_dir
from polythrottle.domain.errors import (
    BadFile,
    DeviceError,
    InvalidInput,
    PermissionDenied,
    PolythrottleError,
    StorageError,
)
from polythrottle.storage.atomic_file import replace_file
from polythrottle.storage.paths import state_dir
from polythrottle.storage.untrusted import check_plain, last_line

_STAYING = {
    "actuation/**": "*",
    "backends": "__init__ device_uri power probe remote served_devices",
    "backends/cpu": "*",
    "backends/jetson": "*",
    "backends/meters": "*",
    "backends/nvml": "*",
    "board": "__init__ carried link installation",
    "catalog": "*",
    "cli": "__init__ daemon_process",
    "daemon": "[!cs]* commands settings startup status study_process",
    "daemon/control": "*",
    "daemon/loop": "*",
    "daemon/traffic": "[!s]* server_metrics sources",
    "daemon/web": "__init__ [aehmprs]*",
    "daemon/web/page": "*.*",
    "domain": "*",
    "domain/load": "*",
    "metering": "__init__ sequential",
    "storage": "__init__ atomic_file cells documents identity json_channel paths space_codec tables untrusted",
    "training": "__init__ checkpoints",
    "training/beside": "__init__",
    "training/beside/trainer": "__init__ driver job_folder",
    "tuning": "__init__ apply file_trust",
}
_UNITS = ("install-units", "polythrottle.*", "*.rules", "limits.toml", "permits.toml", "systemd/*")
_MAIN = '''\
"""Other commands than ``daemon run`` are for the desk."""

import sys

from polythrottle.cli.daemon_process import on_board

sys.exit(on_board())
'''


def packed_daemon(wheels: Iterable[bytes]) -> Carried:
    """Return actuator, restorer, daemon, systemd's units and the packages that they need.

    Args:
        wheels: Of those packages; pure Python.

    Raises:
        DeviceError: If a file of it cannot be read here.
        StorageError: If this installation lacks the units.
    """
    files = {name: path for name, path in sources(_STAYING) if "__pycache__" not in name}
    packaging = packaging_dir()
    for path in sorted(each for pattern in _UNITS for each in packaging.glob(pattern)):
        files[f"polythrottle/packaging/{path.relative_to(packaging).as_posix()}"] = path
    content = content_of(files)
    content["polythrottle/__main__.py"] = _MAIN.encode()
    # By which daemon and actuator know their version, as after an installation by pip.
    version = version_of("polythrottle")
    metadata = f"Metadata-Version: 2.1\nName: polythrottle\nVersion: {version}\n"
    content[f"polythrottle-{version}.dist-info/METADATA"] = metadata.encode()
    for wheel in wheels:
        with zipfile.ZipFile(io.BytesIO(wheel)) as archive:
            content.update({name: archive.read(name) for name in archive.namelist() if not name.endswith("/")})
    return Carried(zipped(content), __name__)


# The packages a board's daemon needs, as wheels that are pinned by their hashes.

_PIN = re.compile(r"([a-z0-9-]+)==(\S+) --hash=sha256:([0-9a-f]{64})")
_OLDEST = ("--python-version=3.8", "--implementation=py", "--abi=none", "--platform=any")
_PIP = ("--no-deps", "--only-binary=:all:", *_OLDEST)
_FETCH_S = 300.0


def wheels_of(folder: Path | None = None) -> tuple[bytes, ...]:
    """Return the wheels that a board's daemon needs, each with the pinned hash.

    Args:
        folder: Where they are; None for `state_dir`, into which pip fetches those that it lacks.

    Raises:
        BadFile: If the folder lacks one, or has another than the pinned one.
        DeviceError: If they cannot be fetched.
        StorageError: If they cannot be kept.
    """
    requirements = packaging_dir() / "board-requirements.txt"
    pins = {match[3]: f"{match[1]} {match[2]}" for match in _PIN.finditer(requirements.read_text(encoding="utf-8"))}
    where = state_dir() / "wheels" if folder is None else folder
    wheels = _by_hash(where)
    lacking = [name for digest, name in pins.items() if digest not in wheels]
    if lacking and folder is not None:
        command = shlex.join(_download(requirements, folder))
        raise BadFile(f"{folder} has no wheel with the pinned hash of {', '.join(lacking)}; to fetch them: {command}")
    if lacking:
        _fetch(requirements, where)
        wheels = _by_hash(where)
        lacking = [name for digest, name in pins.items() if digest not in wheels]
    if lacking:
        raise DeviceError(f"pip has fetched no wheel with the pinned hash of {', '.join(lacking)}")
    return tuple(wheels[digest] for digest in pins)


def _by_hash(folder: Path) -> dict[str, bytes]:
    """Return the wheels in a folder by the SHA-256 of what is in them."""
    wheels = {}
    for path in sorted(folder.glob("*.whl")):
        check_plain(path)
        try:
            data = path.read_bytes()
        except OSError as err:
            raise BadFile(f"{path} cannot be read: {err.strerror}") from err
        wheels[hashlib.sha256(data).hexdigest()] = data
    return wheels


def _download(requirements: Path, folder: Path) -> list[str]:
    """Return the words that have pip fetch the wheels."""
    return ["pip", "download", *_PIP, "--require-hashes", "-r", str(requirements), "-d", str(folder)]


def _fetch(requirements: Path, folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    except OSError as err:
        raise StorageError(f"{folder} cannot be made: {err.strerror}") from err
    words = [sys.executable, "-m", *_download(requirements, folder), "--disable-pip-version-check", "--no-input"]
    try:
        done = subprocess.run(words, capture_output=True, text=True, timeout=_FETCH_S, check=False)
    except subprocess.TimeoutExpired:
        why = f"pip was not done within {_FETCH_S:g} s"
    else:
        if done.returncode == 0:
            return
        lines = [line for line in done.stderr.splitlines() if line.startswith("ERROR:")]
        why = last_line("\n".join(lines) or done.stderr) or "it said nothing"
    elsewhere = shlex.join(_download(requirements, Path("wheels")))
    raise DeviceError(f"a board's packages cannot be fetched: {why}; elsewhere: {elsewhere}; then add --wheels wheels")


# At the desk: ask a board to install or to remove them.

_ENDS_WITHIN_S = 30.0


def install(place: Place, *, root: Path, settings: str | None, wheels: Sequence[bytes]) -> dict[str, Any]:
    """Install actuator, restorer and daemon on a board, in place of an older version; start what can be started.

    Args:
        place: The board.
        root: Below which folder there; ``/`` for the board itself, which takes root's rights.
        settings: Text of ``/etc/polythrottle/daemon.toml``; None to leave it.
        wheels: What `wheels_of` returns.

    Returns:
        ``version`` that is installed, ``python`` it runs in, ``folder`` it is in, ``units`` and the state of each, and
        ``faults`` in words.

    Raises:
        PolythrottleError: If it cannot be installed; says why.
    """
    carried = packed_daemon(wheels)
    digest = hashlib.sha256(carried.whole).hexdigest()[:10]
    version = f"{version_of('polythrottle')}-{digest}"
    return ask(place, carried, {"verb": "install", "root": str(root), "settings": settings, "version": version})


def uninstall(place: Place, *, root: Path) -> dict[str, Any]:
    """Put a board back and remove what `install` has installed there.

    Args:
        place: The board.
        root: Below which folder it was installed.

    Returns:
        ``removed``, the folder it was in, and ``kept``, what stays because `install` did not make it.

    Raises:
        PolythrottleError: If that cannot be, such as where something cannot be put back; then nothing is removed.
    """
    return ask(place, packed_daemon(()), {"verb": "uninstall", "root": str(root)})


# On the board: this very module, carried there, does what the desk asks for.

_HOME = "opt/polythrottle"
_BIN = "/opt/polythrottle/bin"
_SETTINGS = "etc/polythrottle/daemon.toml"
_RECORD = "installed.json"
_RUN = """import sys, os
sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), "lib"))
from importlib import import_module
module, name = sys.argv.pop(1).split(":")
try:
    sys.exit(getattr(import_module(module), name)())
except ModuleNotFoundError as err:
    sys.exit("polythrottle: %s is not on this board, which has actuator and daemon alone" % err.name)
"""
# The path goes through no link from here on, so that a process keeps the version it began with.
_PROGRAM = """#!/bin/sh
home=$(dirname "$(dirname "$(readlink -f "$0")")")
export PYTHONPATH="$home/lib" PYTHONDONTWRITEBYTECODE=1 PYTHONNOUSERSITE=1
exec {python} "$home/run.py" {entry} "$@"
"""
_PROGRAMS = {
    "polythrottle": (("-OO",), "polythrottle.cli.daemon_process:on_board"),
    "polythrottle-actuator": ((), "polythrottle.actuation.server.main:main"),
    "polythrottle-restore": ((), "polythrottle.actuation.restore:main"),
}
_TRIAL = "import polythrottle.cli.daemon_process, polythrottle.daemon.web.server, polythrottle.actuation.server.main"
_STARTED = ("polythrottle-restore.service", "polythrottle-actuator.service", "polythrottle.service")


def main(mark: str, folder: str, device: str) -> int:
    """Do on this board what the desk asks for in one line, and answer in one; returns an exit code.

    Args:
        mark: What begins the line that says that this listens.
        folder: Where this was unpacked; it is removed at the end.
        device: Of no use here.
    """
    return answer_once(mark, folder, lambda request: _answer(Path(folder), request))


def _answer(carried: Path, request: Mapping[str, Any]) -> dict[str, Any]:
    board = BoardRoot(Path(request["root"]))
    try:
        board.check()
        if request["verb"] == "install":
            board.root.mkdir(parents=True, exist_ok=True)
        elif not board.versions.is_dir():
            raise InvalidInput(f"there is nothing to remove: daemon install --device has made no {board.home}")
        with _alone(board):
            if request["verb"] == "install":
                return _installed(board, carried, request)
            return _uninstalled(board)
    except PolythrottleError as err:
        return {"error": error_line(err)}
    except OSError as err:
        return {"error": error_line(StorageError(f"{err.filename or board.home}: {err.strerror}"))}


@contextmanager
def _alone(board: BoardRoot) -> Iterator[None]:
    """Hold a board against a second desk, and a first one whose line was cut and which goes on here."""
    held = os.open(board.root, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
    except BlockingIOError:
        raise DeviceError("another installation is under way there; do it again when that has ended") from None
    finally:
        os.close(held)


@dataclass(frozen=True)
class BoardRoot:
    """Where it is installed on a board.

    Args:
        root: ``/``, or the folder that stands for it.
    """

    root: Path

    @property
    def home(self) -> Path:
        """The folder of all versions."""
        return self.root / _HOME

    @property
    def versions(self) -> Path:
        """A folder each."""
        return self.home / "versions"

    @property
    def current(self) -> Path:
        """What leads to the one in use."""
        return self.home / "current"

    @property
    def steers(self) -> bool:
        """Whether systemd is to be told of it."""
        return self.root == Path("/")

    def check(self) -> None:
        """Check that this user may install it and nobody else has.

        Raises:
            PermissionDenied: If it takes root's rights.
            DeviceError: If there is no systemd, or another installation.
        """
        if self.steers and os.geteuid() != 0:
            raise PermissionDenied(
                "this takes root's rights there: add --sudo, log in as root, or name a folder with --root"
            )
        if self.steers and not os.path.isdir("/run/systemd/system"):
            raise DeviceError("no systemd runs there to start it; --root FOLDER installs it without")
        if self.home.is_dir() and any(self.home.iterdir()) and not self.versions.is_dir():
            raise DeviceError(f"{self.home} is of another installation, such as pip's; remove that first")
        for folder in ("usr/lib", "lib", "etc"):
            unit = self.root / folder / "systemd/system/polythrottle.service"
            with suppress(OSError):
                started = re.search(r"^ExecStart=(\S+)", unit.read_text(errors="replace"), re.MULTILINE)
                if started is not None and not started[1].startswith(f"{_BIN}/"):
                    raise DeviceError(f"{unit} starts {started[1]}, of another installation, which is to go first")


@dataclass(frozen=True)
class Installed:
    """What was installed, as is kept beside it, so that it can be removed.

    Args:
        files: Besides the folder of all versions, relative to the root.
        folders: That were made for it, likewise.
        settings: SHA-256 of the settings that the desk has written; "" if it has written none.
    """

    files: tuple[str, ...] = ()
    folders: tuple[str, ...] = ()
    settings: str = ""

    @classmethod
    def of(cls, board: BoardRoot) -> Installed:
        """Return what is installed; nothing where nothing is."""
        try:
            document = json.loads((board.home / _RECORD).read_bytes())
            return cls(tuple(document["files"]), tuple(document["folders"]), document["settings"])
        except (OSError, ValueError, KeyError, TypeError):
            return cls()

    def keep(self, board: BoardRoot) -> None:
        """Write it down."""
        replace_file(board.home / _RECORD, json.dumps(vars(self)).encode())


def _installed(board: BoardRoot, carried: Path, request: Mapping[str, Any]) -> dict[str, Any]:
    """Install a version, have the programs lead to it, and start them."""
    os.umask(0o022)
    # Another Python there needs other compiled files, so it is another version.
    python = hashlib.sha256(f"{sys.executable} {sys.version}".encode()).hexdigest()[:6]
    fresh = board.versions / f"{request['version']}-{python}"
    units = _units(carried)
    before = Installed.of(board)
    folders = {*before.folders, *_lacking(board, [*units, _SETTINGS, f"{_HOME}/versions"])}
    digest = before.settings
    if request["settings"] is not None:
        settings = request["settings"].encode()
        _check_settings(board, settings, before)
        digest = hashlib.sha256(settings).hexdigest()
    now = Installed(tuple({*units, *before.files}), tuple(sorted(folders)), digest)
    try:
        board.versions.mkdir(parents=True, exist_ok=True)
        # First of all, so that even what is cut off here can be removed.
        replace(now, settings=before.settings).keep(board)
        _lay_version(board, carried, fresh)
        for name, data in units.items():
            replace_file(board.root / name, data)
        if request["settings"] is not None:
            replace_file(board.root / _SETTINGS, settings)
            now.keep(board)
        _lead(board.current, f"versions/{fresh.name}")
        _lead(board.home / "bin", "current/bin")
    except BaseException:
        if not os.path.lexists(board.current):  # nothing was there before, and nothing is there afterwards
            with suppress(OSError):  # such as of what could not be made in the first place
                _remove(board, now)
        raise
    for name in {*before.files} - {*units}:
        with suppress(FileNotFoundError):
            (board.root / name).unlink()
    states: dict[str, str] = {}
    faults: list[str] = []
    if board.steers:
        states, faults = _started(board)
    for old in board.versions.iterdir():
        # Who still runs from an older one goes on to its end; the next installation removes it.
        if old.name != fresh.name and not _users(old):
            shutil.rmtree(old, ignore_errors=True)
    kind = ".".join(map(str, sys.version_info[:3]))
    return {"version": fresh.name, "python": kind, "folder": str(board.home), "units": states, "faults": faults}


def _check_settings(board: BoardRoot, settings: bytes, before: Installed) -> None:
    """Refuse to write over settings that somebody there has written or changed."""
    with suppress(FileNotFoundError):
        present = (board.root / _SETTINGS).read_bytes()
        if present != settings and hashlib.sha256(present).hexdigest() != before.settings:
            raise InvalidInput(f"{board.root / _SETTINGS} was written there; move it away, or leave --settings out")


def _lay_version(board: BoardRoot, carried: Path, fresh: Path) -> None:
    """Make the folder of a version whole, and try whether this Python can run it, before it has its name."""
    for partial in board.versions.glob("*.partial"):  # of one that was cut off
        shutil.rmtree(partial)
    if fresh.is_dir():
        return
    partial = fresh.with_name(f"{fresh.name}.partial")
    try:
        partial.mkdir()
        if why := _ran("cp", "-R", str(carried), str(partial / "lib")):
            raise StorageError(f"{board.home} cannot be written: {why}")
        (partial / "run.py").write_text(_RUN)
        (partial / "bin").mkdir()
        for name, (level, entry) in _PROGRAMS.items():
            words = shlex.join([sys.executable, "-ISB", *level])
            (partial / "bin" / name).write_text(_PROGRAM.format(python=words, entry=entry))
            (partial / "bin" / name).chmod(0o755)
        # The units may write nowhere near it. The daemon runs without docstrings, which is 2.
        if not all(compileall.compile_dir(str(partial / "lib"), quiet=2, optimize=level) for level in (0, 2)):
            raise StorageError(f"{partial}: not all of it can be compiled; is there room on the disk?")
        words = f"import sys; sys.path.insert(0, {str(partial / 'lib')!r}); {_TRIAL}"
        if why := _ran(sys.executable, "-ISBc", words):
            raise DeviceError(f"{sys.executable} cannot run it: {why}")
        os.sync()  # a board may lose its power at any time: first what is in the folder, then its name
        os.replace(partial, fresh)
    except OSError as err:
        raise StorageError(f"{board.home} cannot be written: {err.strerror}") from err
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _lacking(board: BoardRoot, names: Iterable[str]) -> set[str]:
    """Return the folders that are not there yet and that files need, relative to the root."""
    folders = {str(folder) for name in names for folder in Path(name).parents if folder.name}
    return {name for name in folders if not (board.root / name).is_dir()}


def _lead(link: Path, to: str) -> None:
    """Have a link lead somewhere, from one moment to the next."""
    new = link.with_name(f".{link.name}.new")
    with suppress(FileNotFoundError):
        new.unlink()
    new.symlink_to(to)
    os.replace(new, link)


def _units(carried: Path) -> dict[str, bytes]:
    """Return systemd's units and what goes with them, by their paths below the root."""
    with tempfile.TemporaryDirectory() as folder:
        script = carried / "polythrottle/packaging/install-units"
        if why := _ran("env", f"DESTDIR={folder}", f"BINDIR={_BIN}", "sh", str(script)):
            raise StorageError(f"the units cannot be made: {why}")
        paths = [path for path in sorted(Path(folder).rglob("*")) if path.is_file()]
        return {str(path.relative_to(folder)): path.read_bytes() for path in paths}


def _ran(*words: str) -> str:
    """Run a command; returns why it failed, or ""."""
    try:
        done = subprocess.run(words, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False)
    except OSError as err:
        return f"{words[0]}: {err.strerror}"
    if done.returncode == 0:
        return ""
    return last_line(done.stderr) or "it said nothing"


def _started(board: BoardRoot) -> tuple[dict[str, str], list[str]]:
    """Put what was installed in force; returns the state of each unit, and what has failed."""
    restore, actuator, daemon = _STARTED
    steps = [
        ("systemd-sysusers", "polythrottle.conf"),
        ("systemd-tmpfiles", "--create", "polythrottle.conf"),
        ("systemctl", "daemon-reload"),
        # First of all, so that it gives the board back before the actuator it asks is another.
        ("systemctl", "stop", daemon),
        ("systemctl", "enable", restore, actuator),
        ("systemctl", "start", restore),
        ("systemctl", "restart", actuator),
    ]
    if os.path.exists("/run/udev/control"):
        matches = ("--subsystem-match=powercap", "--subsystem-match=hwmon")
        steps[2:2] = [("udevadm", "control", "--reload"), ("udevadm", "trigger", *matches)]
    if (board.root / _SETTINGS).is_file():
        steps += [("systemctl", "enable", daemon), ("systemctl", "restart", daemon)]
    faults = [f"{shlex.join(step)}: {why}" for step in steps if (why := _ran(*step))]
    states = {}
    for unit in _STARTED:
        done = subprocess.run(["systemctl", "is-active", unit], capture_output=True, text=True, check=False)
        states[unit] = done.stdout.strip() or "unknown"
    return states, faults


def _users(folder: Path, program: str = "") -> list[int]:
    """Return the processes that run a program, or any, from a folder: their words or their path of modules name it."""
    mark = f"{folder.resolve()}/".encode()
    users = []
    for entry in filter(str.isdigit, os.listdir("/proc")):
        with suppress(OSError):
            texts = [Path("/proc", entry, name).read_bytes() for name in ("cmdline", "environ")]
            if int(entry) != os.getpid() and program.encode() in texts[0] and any(mark in text for text in texts):
                users.append(int(entry))
    return users


def _uninstalled(board: BoardRoot) -> dict[str, Any]:
    """Put the board back and remove what was installed."""
    if board.steers:
        for unit in reversed(_STARTED):
            _ran("systemctl", "disable", "--now", unit)
    _end(board)
    restorer = board.home / "bin" / "polythrottle-restore"
    if restorer.exists() and (why := _ran(str(restorer))):
        raise DeviceError(f"the board could not be put back, and nothing was removed: {why}")
    kept = _remove(board, Installed.of(board))
    if board.steers:
        _ran("systemctl", "daemon-reload")
        kept += ["/var/lib/polythrottle", "/var/lib/polythrottle-daemon"]
    return {"removed": str(board.home), "kept": [each for each in kept if os.path.lexists(each)]}


def _remove(board: BoardRoot, installed: Installed) -> list[str]:
    """Remove what was installed; returns settings that stay, for somebody there has written them."""
    kept = []
    settings = board.root / _SETTINGS
    with suppress(OSError):
        if hashlib.sha256(settings.read_bytes()).hexdigest() == installed.settings:
            settings.unlink()
        else:
            kept.append(str(settings))
    for name in installed.files:
        with suppress(FileNotFoundError):
            (board.root / name).unlink()
    shutil.rmtree(board.home)
    for name in sorted(installed.folders, key=len, reverse=True):
        with suppress(OSError):  # it is gone, or others have put something into it
            (board.root / name).rmdir()
    return kept


def _end(board: BoardRoot) -> None:
    """End what runs from there, the daemon first: it gives the board back through the actuator."""
    for program in (_PROGRAMS["polythrottle"][1], ""):
        for pid in _users(board.home, program):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGTERM)
        ends_s = time.monotonic() + _ENDS_WITHIN_S
        while pids := _users(board.home, program):
            if time.monotonic() > ends_s:
                raise DeviceError(f"processes {pids} run from {board.home} and do not end; nothing was removed")
            time.sleep(0.1)
