"""The actuator as a process: begun, stopped, killed and begun again, and what it weighs."""

import json
import os
import re
import signal
import socket
import stat
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from actuators import BOARD, MEM, Process, running, until

from polythrottle.actuation.client.connection import Line
from polythrottle.actuation.server.main import main
from polythrottle.backends.served_devices import why_missing
from polythrottle.domain.errors import DeviceError
from polythrottle.testing import FakeKernel, Fault, plant

HEAVY = (
    "numpy",
    "torch",
    "pandas",
    "asyncio",
    "starlette",
    "uvicorn",
    "typer",
    "rich",
    "matplotlib",
    "pynvml",
    "ctypes",
)
MOST_BYTES = 40_000_000


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A planted board."""
    return plant(BOARD, tmp_path / "b")


@pytest.fixture
def started(root: Path, tmp_path: Path) -> Iterator[list[Process]]:
    """A list for actuators, which are ended with the test."""
    made: list[Process] = []
    yield made
    for each in made:
        if each.child.poll() is None:
            each.end(signal.SIGKILL)
        else:
            each.child.communicate()


def start(started: list[Process], root: Path, *words: str) -> Process:
    """Start an actuator."""
    started.append(Process(root, root.parent / "s" / "a.sock", *words))
    assert started[-1].child.poll() is None, started[-1].child.communicate()
    return started[-1]


def hold(line: Line, seconds: float = 60) -> str:
    """Take the board, set its memory clock, and return the token."""
    token: str = line.ask("take", device="", seconds=seconds)["token"]
    levels = next(each["levels"] for each in line.ask("describe", device="")["knobs"] if each["name"] == MEM)
    line.ask("apply", token=token, point={MEM: levels[0]})
    line.close()
    return token


@pytest.mark.slow
def test_told_to_stop_it_puts_everything_back(started: list[Process], root: Path) -> None:
    """SIGTERM in the middle of a lease ends with 0, the board as found and no socket left."""
    before = FakeKernel(root).snapshot()
    actuator = start(started, root)
    assert stat.S_IMODE(actuator.path.stat().st_mode) == 0o660
    hold(actuator.line())
    assert FakeKernel(root).snapshot() != before
    assert actuator.end() == (0, "")
    assert FakeKernel(root).snapshot() == before
    assert not actuator.path.exists()


@pytest.mark.slow
@pytest.mark.parametrize("heals", [True, False], ids=["in the end it takes it", "it never does"])
def test_told_to_stop_it_tries_once_more_what_it_owes(started: list[Process], root: Path, heals: bool) -> None:
    """A control that refused its original at the end of a lease is tried again, and if it is left, named aloud."""
    before = FakeKernel(root).snapshot()
    actuator = start(started, root)
    token = hold(actuator.line())
    FakeKernel(root).fail(Fault("EIO", match="*/mrq_rate_locked", times=0))
    line = actuator.line()
    assert line.ask("release", token=token)["left"]
    line.close()
    if heals:
        FakeKernel(root).heal()
    code, told = actuator.end()
    if heals:
        assert (code, told) == (0, "")
        assert FakeKernel(root).snapshot() == before
        return
    (said,) = told.splitlines()
    assert code == DeviceError.exit_code
    assert "not as it was found" in said
    assert "mrq_rate_locked holds 1, was 0" in said


@pytest.mark.slow
def test_told_to_stop_it_tries_once_more_what_it_was_left(started: list[Process], root: Path) -> None:
    """What a killed one left, and a control refused at the start, is put back at the end, or ends with its code."""
    first = start(started, root)
    hold(first.line())
    (watcher,) = psutil.Process(first.child.pid).children()
    watcher.kill()
    first.end(signal.SIGKILL)
    FakeKernel(root).fail(Fault("EIO", match="*/mrq_rate_locked", times=0))
    code, told = start(started, root).end()
    assert code == DeviceError.exit_code
    assert [each.partition(": ")[2].partition(": ")[0] for each in told.splitlines()] == [
        "left from before",
        "not as it was found",
    ]
    assert all("mrq_rate_locked holds 1, was 0" in each for each in told.splitlines())


@pytest.mark.slow
@pytest.mark.parametrize("guard", [True, False], ids=["alone", "with its guard"])
def test_killed_and_begun_again_the_board_is_as_found(started: list[Process], root: Path, guard: bool) -> None:
    """By the guard at once, or without one by the next actuator, before it answers; the old token is unknown then."""
    before = FakeKernel(root).snapshot()
    actuator = start(started, root)
    token = hold(actuator.line())
    (watcher,) = psutil.Process(actuator.child.pid).children()
    if not guard:
        watcher.kill()
    actuator.end(signal.SIGKILL)
    if guard:
        until(lambda: FakeKernel(root).snapshot() == before)
    else:
        assert FakeKernel(root).snapshot() != before
    line = start(started, root).line()
    assert FakeKernel(root).snapshot() == before
    again = line.ask("take", device="", seconds=60, token=token)
    assert (again["resumed"], again["point"]) == (False, {})
    line.close()


CLIENT = """
import os, signal, sys
from polythrottle.actuation.client.connection import Line
line = Line(sys.argv[1])
token = line.ask("take", device="", seconds=1.5)["token"]
line.ask("apply", token=token, point={"mem_hz": int(sys.argv[2])})
print("set", flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.slow
def test_when_the_client_is_killed_its_lease_runs_out(started: list[Process], root: Path) -> None:
    """The board comes back without anybody's asking, and the next one may take it."""
    before = FakeKernel(root).snapshot()
    actuator = start(started, root)
    command = [sys.executable, "-c", CLIENT, str(actuator.path), "204000000"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (-signal.SIGKILL, "set\n"), done.stderr
    assert FakeKernel(root).snapshot() != before
    until(lambda: FakeKernel(root).snapshot() == before)
    line = actuator.line()
    assert line.ask("take", device="", seconds=1)["token"]
    line.close()


@pytest.mark.slow
def test_a_client_that_is_started_again_keeps_the_point(started: list[Process], root: Path) -> None:
    """Its connection may be gone; with its token in time everything goes on."""
    actuator = start(started, root)
    token = hold(actuator.line())
    held = FakeKernel(root).snapshot()
    line = actuator.line()
    again = line.ask("take", device="", seconds=60, token=token)
    assert again["resumed"]
    assert FakeKernel(root).snapshot() == held
    line.close()


def test_the_service_manager_is_told(started: list[Process], root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ready once it answers, then alive from its loop, and that it stops."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as manager:
        manager.bind(os.fspath(root.parent / "n"))
        manager.settimeout(30)
        monkeypatch.setenv("NOTIFY_SOCKET", str(root.parent / "n"))
        monkeypatch.setenv("WATCHDOG_USEC", "300000")
        actuator = start(started, root)
        assert manager.recv(1000).startswith(b"READY=1\nSTATUS=serves jetson")
        assert [manager.recv(1000) for _ in range(3)] == [b"WATCHDOG=1"] * 3
        actuator.child.terminate()
        while (told := manager.recv(1000)) == b"WATCHDOG=1":
            pass
        assert told == b"STOPPING=1"
        actuator.end()


@pytest.mark.slow
def test_there_is_one_actuator_a_socket(started: list[Process], root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A second one is refused; the socket of one that was killed is taken over."""
    actuator = start(started, root)
    words = ["--socket", str(actuator.path), "--device", f"jetson?root={root}"]
    assert main(words) == 6
    assert "another actuator listens" in capsys.readouterr().err
    actuator.end(signal.SIGKILL)
    assert actuator.path.exists()
    start(started, root).line().close()


@pytest.mark.parametrize(
    ("words", "code", "says"),
    [
        (["--device", "replay:x.csv"], 2, "cannot be served"),
        (["--device", "toaster"], 3, "unknown device"),
        (["--device", "sim:nope"], 3, "unknown device 'nope'"),
        (["--device", "jetson?root=/nope"], 2, "there is no folder '/nope'"),
        (["--permits", "/nonexistent/permits.toml"], 4, "there is no"),
        (["--socket", "/tmp/" + "x" * 200], 2, "too long for a socket"),
        (["--socket", "/proc/x/a.sock"], 8, "cannot make a socket"),
    ],
)
def test_what_it_cannot_begin_with_is_said_in_a_line(
    words: list[str], code: int, says: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """With the exit code of the error's class."""
    usual = {"--socket": str(tmp_path / "a.sock"), "--device": "sim:jetson-nano"}
    given = {**usual, words[0]: words[1]}
    assert main([text for pair in given.items() for text in pair]) == code
    told = capsys.readouterr().err
    assert says in told
    assert told.count("\n") == 1


def test_a_device_that_may_yet_come_is_waited_for_aloud(started: list[Process], tmp_path: Path) -> None:
    """Without its driver a device is no reason to end, and is told of in one line; with it there is nothing to tell."""
    empty = tmp_path / "empty"
    empty.mkdir()
    started.append(Process(empty, tmp_path / "s" / "a.sock"))
    code, told = started[-1].end()
    (line,) = told.splitlines()
    assert code == 0
    assert f"jetson?root={empty} is not there yet, and is waited for: there is no Jetson in" in line
    assert why_missing(f"jetson?root={plant(BOARD, tmp_path / 'c')}") == ""


def test_a_file_in_the_sockets_place_is_left_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """It is no socket, so it is somebody's."""
    (tmp_path / "a.sock").write_text("mine")
    assert main(["--socket", str(tmp_path / "a.sock"), "--device", "sim:jetson-nano"]) == 2
    assert "is no socket" in capsys.readouterr().err
    assert (tmp_path / "a.sock").read_text() == "mine"


def resident(pid: int) -> int:
    """Return the resident memory of a process in bytes."""
    return int(psutil.Process(pid).memory_info().rss)


@pytest.mark.slow
def test_it_is_small_and_loads_nothing_it_does_not_need(root: Path, tmp_path: Path) -> None:
    """After every kind of request neither it nor its guard has NumPy, an event loop, or a client of a driver in it."""
    path, log = tmp_path / "a.sock", tmp_path / "log"
    command = [sys.executable, "-X", "importtime", "-m", "polythrottle.actuation.server", "--socket", str(path)]
    with log.open("wb") as told, running([*command, "--device", f"jetson?root={root}"], stderr=told) as child:
        until(path.exists)
        line = Line(path)
        token = hold(line)
        assert line.ask("space", device="")["size"] > 1
        for _ in range(50):
            line.ask("read", device="")
            line.ask("renew", token=token, seconds=60)
        line.ask("verify", token=token)
        weighed = {each: resident(each) for each in (child.pid, psutil.Process(child.pid).children()[0].pid)}
        maps = "".join(Path(f"/proc/{each}/maps").read_text() for each in weighed)
        line.ask("release", token=token)
        line.close()
        child.terminate()
        assert child.wait(timeout=60) == 0
    assert max(weighed.values()) < MOST_BYTES, weighed
    assert not [name for name in HEAVY if f"/{name}" in maps]
    loaded = {text.split("|")[-1].strip() for text in log.read_text().splitlines() if text.startswith("import time:")}
    assert {"polythrottle.actuation.server.server", "polythrottle.backends.jetson.device"} <= loaded
    assert not loaded & set(HEAVY)


STEPS = ("*/mrq_rate_locked", "*/rate")


@pytest.mark.faults
@pytest.mark.parametrize("act", ["die_before", "die_after"])
@pytest.mark.parametrize("nth", range(1, 6))
@pytest.mark.parametrize("match", STEPS)
def test_killed_at_any_write_it_leaves_the_board_as_found(
    started: list[Process], root: Path, match: str, nth: int, act: str
) -> None:
    """Before or after each write of applying and of putting back, the guard or the next actuator makes it good."""
    before = FakeKernel(root).snapshot()
    actuator = start(started, root)
    FakeKernel(root).fail(Fault(act, nth=nth, match=match))
    code = (
        "import sys\nfrom polythrottle.actuation.client.connection import Line\nline = Line(sys.argv[1])\n"
        "token = line.ask('take', device='', seconds=60)['token']\n"
        "for rate in (204000000, 2133000000):\n    line.ask('apply', token=token, point={'mem_hz': rate})\n"
        "line.ask('release', token=token)\n"
    )
    subprocess.run([sys.executable, "-c", code, str(actuator.path)], capture_output=True, check=False)
    FakeKernel(root).heal()
    if actuator.child.poll() is not None:
        start(started, root)
    until(lambda: FakeKernel(root).snapshot() == before)


@pytest.mark.slow
def test_what_it_says_is_for_people(started: list[Process], root: Path, state_folder: Path) -> None:
    """What an earlier one left and cannot be put back is said at the start, and it serves all the same."""
    actuator = start(started, root)
    hold(actuator.line())
    (watcher,) = psutil.Process(actuator.child.pid).children()
    watcher.kill()
    actuator.end(signal.SIGKILL)
    record = next((state_folder / "originals").glob("jetson*.jsonl"))
    lines = record.read_text().splitlines()
    record.write_text("\n".join([lines[0], json.dumps({"key": "x"}), *lines[1:]]) + "\n")
    again = start(started, root)
    again.line().close()
    _, told = again.end()
    assert re.match(r"polythrottle actuator: left from before: .*line 2", told), told
