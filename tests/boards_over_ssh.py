"""Boards for tests of SSH: a planted tree, a stand-in for ``ssh`` that runs the far side here, and a desk."""

import io
import os
import signal
import subprocess
import sys
import textwrap
import time
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import cache
from importlib.util import find_spec
from pathlib import Path

import pytest

from polythrottle.testing import plant

PATIENCE_S = 120.0
_GOVERNED = ("emc", "rate")
_DAEMON_IMPORTS = (
    *(
        "anyio",
        "click",
        "exceptiongroup",
        "h11",
        "idna",
        "prometheus_client",
        "sniffio",
        "starlette",
        "tomli",
        "tomli_w",
    ),
    *("typing_extensions", "uvicorn"),
)
_STAND_IN = """#!/bin/sh
{before}
for word; do :; done
cd "{home}" && exec sh -c "$word"
"""
_SUDO = """#!/bin/sh
# As sudo with env_reset and env_keep has it: another home, nothing of the caller's besides what is kept.
echo "$1 $2" >> "{folder}/sudo.log"
{before}
shift
exec env -i PATH="$PATH" HOME="{folder}" TMPDIR="$TMPDIR" POLYTHROTTLE_STATE_DIR="$POLYTHROTTLE_STATE_DIR" "$@"
"""
_DESK = """
import sys
from polythrottle.backends import open_device
device = open_device(sys.argv[1], ["mem_hz"])
with device:
    device.apply(device.space.default.moved({"mem_hz": device.space.knob("mem_hz").levels[0]}))
    print("set", flush=True)
    sys.stdin.readline()
"""


def stand_in(folder: Path, before: str = "") -> str:
    """Return a program in the place of ``ssh`` that runs here what ssh would have run there.

    Args:
        folder: Where to lay it.
        before: What it does first.
    """
    home = folder / "home"
    home.mkdir(exist_ok=True)
    path = folder / "stand-in-ssh"
    path.write_text(_STAND_IN.format(before=before, home=home))
    path.chmod(0o700)
    return str(path)


def planted(folder: Path) -> Path:
    """Return the tree of a Jetson."""
    return plant("jetson-agx-orin-jp6", folder / "board")


def held(root: Path) -> dict[str, str]:
    """Return what every small file of a tree holds.

    All but the memory's rate: unlocked, it is its governor's again, and a tree has none.
    """
    return {
        str(path.relative_to(root)): path.read_text(errors="replace").strip()
        for path in sorted(root.rglob("*"))
        if path.is_file() and not path.is_symlink() and path.stat().st_size < 10_000 and path.parts[-2:] != _GOVERNED
    }


def await_that(fact: Callable[[], bool], what: str) -> None:
    """Wait until something is so; fail where it does not come about in minutes."""
    ends_s = time.monotonic() + PATIENCE_S
    while not fact():
        assert time.monotonic() < ends_s, what
        time.sleep(0.05)


def children_of(pid: int) -> list[int]:
    """Return every descendant of a process."""
    parents: dict[int, int] = {}
    for entry in os.listdir("/proc"):
        if entry.isdigit():
            with suppress(OSError, IndexError):
                parents[int(entry)] = int(Path("/proc", entry, "stat").read_text().rpartition(")")[2].split()[1])
    found = [child for child, parent in parents.items() if parent == pid]
    return [*found, *(each for child in found for each in children_of(child))]


def far_sides(folder: Path) -> list[int]:
    """Return the processes that serve a board from what was carried there, whose environment names a test's folder."""
    mark = str(folder).encode()
    found = []
    for entry in os.listdir("/proc"):
        if not entry.isdigit():
            continue
        with suppress(OSError):
            words = Path("/proc", entry, "cmdline").read_bytes().split(b"\0")
            mine = mark in Path("/proc", entry, "environ").read_bytes()
            program = Path(os.readlink(f"/proc/{entry}/exe")).name
            started = any(word.startswith(b"import base64,zlib;exec") for word in words)
            if mine and started and program.startswith(("python", "pypy")):
                found.append(int(entry))
    return found


def lay_sudo(folder: Path, monkeypatch: pytest.MonkeyPatch, before: str = "") -> None:
    """Put a stand-in for ``sudo`` first on the path, which is the board's too.

    Args:
        folder: Where its log and its home are.
        monkeypatch: Changes the path.
        before: What it does first.
    """
    programs = folder / "programs"
    programs.mkdir()
    (programs / "sudo").write_text(_SUDO.format(folder=folder, before=before))
    (programs / "sudo").chmod(0o700)
    monkeypatch.setenv("PATH", f"{programs}:{os.environ['PATH']}")


@cache
def own_wheels() -> tuple[bytes, ...]:
    """Return what a daemon imports as it is installed here, in one zip, for boards in this very interpreter."""
    whole = io.BytesIO()
    with zipfile.ZipFile(whole, "w") as archive:
        for name in _DAEMON_IMPORTS:
            place = find_spec(name)
            if place is None or place.origin is None:  # an older Python needs it, or an older package
                continue
            file = Path(place.origin)
            for path in sorted(file.parent.rglob("*.py")) if file.stem == "__init__" else [file]:
                archive.write(path, path.relative_to(file.parents[file.stem == "__init__"]))
    return (whole.getvalue(),)


@contextmanager
def desk(uri: str) -> Iterator["subprocess.Popen[str]"]:
    """Run a desk in a process of its own that has set a board's memory clock, until its standard input ends."""
    child = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(_DESK), uri],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        assert child.stdout is not None
        assert child.stdout.readline().strip() == "set"
        yield child
    finally:
        with suppress(ProcessLookupError):
            os.killpg(child.pid, signal.SIGCONT)
            os.killpg(child.pid, signal.SIGKILL)
        child.wait()
        for stream in (child.stdin, child.stdout):
            assert stream is not None
            with suppress(OSError):
                stream.close()
