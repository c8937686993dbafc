"""Lease and record in systemd's hands, over its own protocol: what was left goes back though its folder is gone."""

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest
from actuators import BOARD, MEM, SERVE, until

from polythrottle.actuation import Actuator, Control, restore_all, standing
from polythrottle.actuation import systemd as program
from polythrottle.actuation.client.connection import Line
from polythrottle.actuation.state.lease import Fence
from polythrottle.actuation.state.site import Site
from polythrottle.actuation.systemd import handed_back, restore_handed_back
from polythrottle.testing import FakeKernel, plant

BOOT = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
HIGH = 200  # where descriptors are put in this process, which has others at 3


class Manager:
    """A service manager's socket, and the descriptors it was given, as systemd keeps them (sd_notify(3)).

    Args:
        path: Of the socket.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.way = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self.way.bind(os.fspath(path))
        self.way.setblocking(False)
        self.kept: dict[str, int] = {}
        self.told: list[str] = []

    def hear(self) -> list[str]:
        """Take what has come, and return all that was told so far."""
        while True:
            try:
                text, handles, _, _ = socket.recv_fds(self.way, 4096, 4)
            except BlockingIOError:
                return self.told
            self.told.append(text.decode())
            lines = dict(line.partition("=")[::2] for line in text.decode().splitlines())
            name = lines.get("FDNAME", "stored")
            if lines.get("FDSTORE") == "1":
                assert lines["FDPOLL"] == "0"
                assert name not in self.kept
                (self.kept[name],) = handles
            elif lines.get("FDSTOREREMOVE") == "1" and name in self.kept:
                os.close(self.kept.pop(name))

    def environment(self, first: int = HIGH) -> dict[str, str]:
        """Put what is kept at a row of descriptors, and return what the next start of the service is told of them."""
        for number, handle in enumerate(self.kept.values(), first):
            os.dup2(handle, number)
        names = ":".join(self.kept)
        count = str(len(self.kept))
        return {"LISTEN_PID": str(os.getpid()), "LISTEN_FDS": count, "LISTEN_FDNAMES": names, **self.address}

    @property
    def address(self) -> dict[str, str]:
        """What tells a service where the manager listens."""
        return {"NOTIFY_SOCKET": os.fspath(self.path)}

    def close(self) -> None:
        """End it."""
        self.way.close()
        for handle in self.kept.values():
            os.close(handle)


@pytest.fixture
def manager(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Manager]:
    """A service manager of this process and its children."""
    made = Manager(tmp_path / "notify")
    monkeypatch.setenv("NOTIFY_SOCKET", os.fspath(made.path))
    monkeypatch.setattr(program, "_FIRST", HIGH)
    yield made
    made.close()


@pytest.fixture
def knob(tmp_path: Path) -> Path:
    """A file that holds 1."""
    file = tmp_path / "knob"
    file.write_text("1\n")
    return file


def written(knob: Path) -> Actuator:
    """Return an actuator that has written 10."""
    actuator = Actuator("board", guarded=False).__enter__()
    actuator.allow(Control(str(knob), frozenset({"10", "20"})))
    actuator.write(str(knob), "10")
    return actuator


def test_lease_and_record_are_with_the_manager_while_something_stands_changed(knob: Path, manager: Manager) -> None:
    """Under their files' names, the record as it is on disk; forgotten once everything is back."""
    actuator = written(knob)
    site = Site.of("board")
    manager.hear()
    assert set(manager.kept) == {site.record.name, site.lease.name}
    actuator.write(str(knob), "20")
    lease = json.loads(os.pread(manager.kept[site.lease.name], 10_000, 0))
    copy = f"{lease['token']}\n".encode() + site.record.read_bytes()
    assert os.pread(manager.kept[site.record.name], 10_000, 0) == copy
    actuator.__exit__(None, None, None)
    manager.hear()
    assert manager.kept == {}


def abandoned(knob: Path, manager: Manager) -> Site:
    """Leave 10 in the file, as a writer does that was killed."""
    actuator = written(knob)
    manager.hear()
    assert actuator._lock is not None
    os.close(actuator._lock)
    return Site.of("board")


@pytest.mark.parametrize("wreck", ["nothing", "the folder", "the record", "the lease"])
def test_what_was_left_is_put_back_from_the_managers_copy(knob: Path, manager: Manager, wreck: str) -> None:
    """Though the folder, the record or the lease was deleted meanwhile; then the manager is to forget it."""
    site = abandoned(knob, manager)
    {
        "nothing": lambda: None,
        "the folder": lambda: shutil.rmtree(site.folder.parent),
        "the record": site.record.unlink,
        "the lease": site.lease.unlink,
    }[wreck]()
    assert restore_handed_back(manager.environment()) == []
    assert knob.read_text() == "1"
    manager.hear()
    assert manager.kept == {}
    assert standing() == ()


def test_a_copy_of_what_has_gone_back_since_says_nothing(knob: Path, manager: Manager) -> None:
    """Once a guard or a restore has had the lease, a value that was ours is somebody else's now."""
    abandoned(knob, manager)
    restore_all()
    knob.write_text("10")
    assert restore_handed_back(manager.environment()) == []
    assert knob.read_text() == "10"
    manager.hear()
    assert manager.kept == {}


def test_what_cannot_be_put_back_stays_with_the_manager(knob: Path, manager: Manager) -> None:
    """It is named, and tried again at the next start."""
    site = abandoned(knob, manager)
    shutil.rmtree(site.folder.parent)
    knob.rename(knob.with_name("away"))
    (left,) = restore_handed_back(manager.environment())
    assert str(knob) in left
    knob.with_name("away").rename(knob)
    manager.hear()
    assert set(manager.kept) == {site.record.name, site.lease.name}
    assert restore_handed_back(manager.environment()) == []
    assert knob.read_text() == "1"


@pytest.mark.parametrize(
    "change",
    [
        lambda given: {**given, "LISTEN_PID": "1"},
        lambda given: {**given, "LISTEN_FDS": "x"},
        lambda given: {**given, "LISTEN_FDNAMES": "unknown:stored"},
        lambda given: {**given, "LISTEN_FDNAMES": "..%2Fboard.jsonl:../board.lease"},
        lambda given: {},
    ],
)
def test_what_is_not_for_this_process_is_left(
    knob: Path, manager: Manager, change: Callable[[dict[str, str]], dict[str, str]]
) -> None:
    """Another process's, no number, names that are none of ours."""
    abandoned(knob, manager)
    assert restore_handed_back(change(manager.environment())) == []
    assert knob.read_text() == "10"
    restore_all()


def test_descriptors_are_taken_once_and_do_not_go_to_children(knob: Path, manager: Manager) -> None:
    """The variables are gone afterwards, and the descriptors close where another program is started."""
    abandoned(knob, manager)
    given = manager.environment()
    found = handed_back(given)
    assert len(found) == 2
    assert not any(os.get_inheritable(each) for each in found.values())
    assert handed_back(given) == {}
    restore_all()


def test_a_copy_that_is_too_large_is_named(manager: Manager, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is not read."""
    monkeypatch.setattr(program, "_MOST_BYTES", 1000)
    manager.kept["board@x.jsonl"] = os.memfd_create("x")
    os.ftruncate(manager.kept["board@x.jsonl"], 1001)
    (left,) = restore_handed_back(manager.environment())
    assert "larger than" in left


def test_without_a_manager_nothing_is_kept(knob: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No file in memory is made."""
    monkeypatch.delenv("NOTIFY_SOCKET", raising=False)
    actuator = written(knob)
    assert actuator._store._handle is None
    actuator.__exit__(None, None, None)
    assert Fence(Site.of("board").lease, BOOT).read().holder == ""


GIVEN = """
import os, sys
first, *handles = map(int, sys.argv.pop(1).split(","))
for number, handle in enumerate(handles, first):
    os.dup2(handle, number)
os.environ["LISTEN_PID"] = str(os.getpid())
"""


@pytest.mark.slow
def test_an_actuator_killed_with_its_guard_and_its_folder_is_made_good_by_the_next(
    tmp_path: Path, manager: Manager, state_folder: Path
) -> None:
    """The next one has the board as it was found before it is ready."""
    root, path = plant(BOARD, tmp_path / "b"), tmp_path / "s" / "a.sock"
    before = FakeKernel(root).snapshot()
    words = [str(root), "--socket", str(path), "--device", f"jetson?root={root}"]
    first = subprocess.Popen([sys.executable, "-c", SERVE, *words])
    second = None
    try:
        until(lambda: any("READY=1" in each for each in manager.hear()))
        line = Line(path)
        token = line.ask("take", device="", seconds=60)["token"]
        levels = next(each["levels"] for each in line.ask("describe", device="")["knobs"] if each["name"] == MEM)
        line.ask("apply", token=token, point={MEM: levels[0]})
        line.close()
        (guard,) = psutil.Process(first.pid).children()
        guard.kill()
        first.kill()
        first.wait()
        psutil.wait_procs([guard])
        shutil.rmtree(state_folder)
        manager.hear()
        assert FakeKernel(root).snapshot() != before
        handles = list(manager.kept.values())
        given = ",".join(map(str, [3, *handles]))
        names = {"LISTEN_FDS": str(len(handles)), "LISTEN_FDNAMES": ":".join(manager.kept)}
        manager.told.clear()
        second = subprocess.Popen(
            [sys.executable, "-c", GIVEN + SERVE, given, *words], pass_fds=handles, env={**os.environ, **names}
        )
        until(lambda: any("READY=1" in each for each in manager.hear()))
        assert FakeKernel(root).snapshot() == before
        assert manager.kept == {}
        second.send_signal(signal.SIGTERM)
        assert second.wait() == 0
    finally:
        for child in (first, second):
            if child is not None:
                child.kill()
                child.wait()
