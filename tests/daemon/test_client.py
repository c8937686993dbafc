"""The daemon from a program."""

import inspect
import json
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from itertools import islice
from pathlib import Path

import pytest
from scripted import FIRST, Script, daemon, until

from polythrottle.daemon.client import Client, Gone, default_socket
from polythrottle.daemon.commands import (
    ApplyProfile,
    Confirm,
    Release,
    Report,
    SetBudget,
    StartStudy,
    Stop,
    StopStudy,
    Take,
)
from polythrottle.daemon.observation import RequestStats
from polythrottle.daemon.status import Happened, Status, StudyShown
from polythrottle.daemon.web import handlers
from polythrottle.domain.errors import (
    BadFile,
    DeviceError,
    InvalidInput,
    KnobRejected,
    PermissionDenied,
    PolythrottleError,
    SloUnmet,
    UnknownName,
)


@pytest.fixture
def where(tmp_path: Path) -> Path:
    """Return where the daemon listens."""
    return tmp_path / "d.sock"


@pytest.fixture
def script(where: Path) -> Iterator[Script]:
    """Return a scripted control loop whose API is served."""
    with daemon(where) as (script, _):
        yield script


@contextmanager
def answering(path: Path, data: bytes) -> Iterator[None]:
    """Answer one connection with these bytes."""
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(str(path))
        listening.listen()

        def serve() -> None:
            line, _ = listening.accept()
            with line:
                line.recv(65536)
                line.sendall(data)

        thread = threading.Thread(target=serve)
        thread.start()
        yield
        thread.join()


def test_a_status_comes_as_the_value_it_was(script: Script, where: Path) -> None:
    """With its parts as values too; what was not finite is None."""
    found = Client(where).status()
    assert isinstance(found, Status)
    assert (found.workload, found.rung, found.ladder, found.guards) == (
        FIRST.workload,
        FIRST.rung,
        FIRST.ladder,
        FIRST.guards,
    )
    assert (found.power_w, dict(found.point)) == (None, dict(FIRST.point))


def test_every_wish_can_be_told(script: Script, where: Path, tmp_path: Path) -> None:
    """Each method hands in its wish; a file is named by its whole path, for the daemon works elsewhere."""
    client = Client(where)
    client.apply("sim/bert", None)
    client.confirm()
    client.release("by hand")
    client.take()
    client.budget(power_w=10)
    client.budget(battery_wh=80, last_s=3600)
    client.budget()
    assert client.start_study(5, {"risk": "0.05"})["id"] == "s1"
    client.stop_study("s1")
    assert client.report(RequestStats(3, model="m"))["batch"] == 4
    client.stop()
    assert script.wishes == [
        ApplyProfile("sim/bert", None),
        Confirm(),
        Release("by hand"),
        Take(),
        SetBudget(power_w=10),
        SetBudget(battery_wh=80, last_s=3600),
        SetBudget(),
        StartStudy(5, {"risk": "0.05"}),
        StopStudy("s1"),
        Report(RequestStats(3, model="m")),
        Stop(),
    ]
    Path("here.toml").touch()
    with pytest.raises(UnknownName):
        client.apply("here.toml")
    assert script.wishes[-1] == ApplyProfile(str(tmp_path / "here.toml"), 60.0)


def test_what_is_kept_can_be_read(script: Script, where: Path) -> None:
    """Events, seconds, history, profiles, studies."""
    script.tell("a", "b", "c")
    client = Client(where)
    client.start_study(3)
    assert [each.words for each in client.events(after=1, limit=1)] == ["b"]
    assert client.events()[0] == Happened(1, FIRST.at, "phase", "a")
    assert client.seconds()[-1]["rung"] == 0
    assert (client.history(), client.profiles()) == ([], [])
    assert client.studies() == (client.study("s1"),) == (StudyShown("s1", "ended", 3, 3),)


@pytest.mark.parametrize(
    "error",
    [SloUnmet("the nearest is 12 W"), BadFile("torn"), KnobRejected("no"), PermissionDenied("p"), DeviceError("gone")],
)
def test_errors_come_as_the_class_they_were(script: Script, where: Path, error: PolythrottleError) -> None:
    """With their words."""
    script.refuses = error
    with pytest.raises(type(error), match=str(error)) as met:
        Client(where).take()
    assert type(met.value) is type(error)


def test_an_unknown_name_keeps_its_words(script: Script, where: Path) -> None:
    """Though its class makes its message itself."""
    with pytest.raises(UnknownName, match=r"unknown profile 'sim/resnet51'; did you mean sim/resnet50"):
        Client(where).apply("sim/resnet51")


def test_a_body_the_daemon_refuses_is_an_error_of_input(script: Script, where: Path) -> None:
    """Even where more was sent than it reads."""
    with pytest.raises(InvalidInput, match="has no field workload"):
        Client(where).start_study(5, {"workload": "cmd:sh"})
    with pytest.raises(InvalidInput, match="64 KiB"):
        Client(where).release("x" * 2_000_000)


def test_a_profile_no_file_can_be_named_like_is_one_line(where: Path) -> None:
    """A name too long for any file is an error of input, shown in part, before a daemon is asked."""
    with pytest.raises(InvalidInput, match="name too long") as caught:
        Client(where).apply("x" * 300)
    assert len(str(caught.value)) < 200


def test_a_profile_that_is_no_name_is_one_line(where: Path) -> None:
    """Nothing at all, for instance, is refused before anybody is asked."""
    with pytest.raises(InvalidInput, match="None is no profile; name a file"):
        Client(where).apply(None)  # type: ignore[arg-type]


def test_no_daemon_is_one_line(where: Path) -> None:
    """Whether there was never one or it has died."""
    with pytest.raises(DeviceError, match=r"no daemon runs at .*; start one: polythrottle daemon run"):
        Client(where).status()
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(str(where))
    with pytest.raises(DeviceError, match="no daemon runs at"):
        Client(where).status()
    with pytest.raises(DeviceError, match="no daemon runs at"):
        Client(url="http://127.0.0.1:1").status()


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"SSH-2.0-x\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n[]",
        b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\n{}",
        b"HTTP/1.1 200 OK\r\nContent-Length: 3\r\n\r\nxyz",
        b"HTTP/1.1 200 OK\r\nContent-Length: 13\r\n\r\n" + b'{"rung":{}}  ',
        b"HTTP/1.1 500 Oops\r\nContent-Length: 2\r\n\r\n{}",
        b"HTTP/1.1 500 Oops\r\nContent-Length: 29\r\n\r\n" + b'{"error":{"kind":"Iterable"}}',
    ],
)
def test_another_program_at_the_socket_is_one_line(where: Path, data: bytes) -> None:
    """Whatever it says."""
    with answering(where, data), pytest.raises(DeviceError, match="daemon"):
        Client(where).status()


def test_a_daemon_that_does_not_answer_is_given_up(where: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """After the time that was given; one with too many at its door sooner, however long that is."""
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(str(where))
        listening.listen(0)
        with pytest.raises(DeviceError, match="does not answer"):
            Client(where, timeout_s=0.05).status()
        waiting = []
        status = 0
        while not status:
            waiting.append(socket.socket(socket.AF_UNIX))
            waiting[-1].setblocking(False)
            status = waiting[-1].connect_ex(str(where))
        monkeypatch.setattr("polythrottle.daemon.client._AT_THE_DOOR_S", 0.05)
        with pytest.raises(DeviceError, match="is busy: too many wait at its door"):
            Client(where, timeout_s=600.0).status()
        for each in waiting:
            each.close()


def test_a_socket_of_somebody_else_is_a_matter_of_rights(script: Script, where: Path) -> None:
    """The group to join is spoken of."""
    where.chmod(0)
    code = (
        "import os, sys; from pathlib import Path; from polythrottle.daemon.client import Client\n"
        "if os.geteuid() == 0: os.setgid(65534); os.setuid(65534)\n"
        "try: Client(Path(sys.argv[1])).status()\n"
        "except Exception as error: print(type(error).__name__, error)"
    )
    done = subprocess.run([sys.executable, "-c", code, str(where)], capture_output=True, text=True, check=True)
    assert done.stdout.startswith("PermissionDenied ")
    assert "join the group" in done.stdout


def test_following_shows_statuses_and_events(script: Script, where: Path) -> None:
    """From the number that was known."""
    script.tell("a", "b")
    with Client(where) as client:
        found = list(islice(client.follow(after=1), 2))
    assert {type(each) for each in found} == {Status, Happened}
    assert [each.number for each in found if isinstance(each, Happened)] == [2]


def test_following_goes_on_when_the_daemon_comes_back(where: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It says that it is gone, and takes the events up where it was."""
    monkeypatch.setattr("polythrottle.daemon.client._AGAIN_S", 0.01)
    client = Client(where)
    following = client.follow(after=0)
    with daemon(where) as (script, _):
        script.tell("a")
        first = next(each for each in following if isinstance(each, Happened))
    gone = next(each for each in following if isinstance(each, Gone))
    with daemon(where) as (script, _):
        script.tell("a", "b")
        second = next(each for each in following if isinstance(each, Happened))
        client.close()
        following.close()
    assert (first.number, second.number) == (1, 2)
    assert str(where) in gone.words


def test_following_begins_with_what_happens_next(script: Script, where: Path) -> None:
    """Where no number is given, the past is left out."""
    script.tell("a", "b")
    with Client(where) as client:
        following = client.follow()
        until(lambda: isinstance(next(following), Status))
        script.tell("c")
        assert next(each for each in following if isinstance(each, Happened)).number == 3
        following.close()


def test_following_waits_for_the_first_daemon(where: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """None is there yet, which is said."""
    monkeypatch.setattr("polythrottle.daemon.client._AGAIN_S", 0.01)
    client = Client(where)
    following = client.follow()
    assert isinstance(next(following), Gone)
    with daemon(where):
        assert isinstance(next(each for each in following if not isinstance(each, Gone)), Status)
        following.close()
    client.close()


def test_closing_ends_a_follower_in_another_thread(script: Script, where: Path) -> None:
    """At once, and without an error."""
    client, began, found = Client(where), threading.Event(), []

    def follow() -> None:
        for each in client.follow():
            found.append(each)
            began.set()

    thread = threading.Thread(target=follow)
    thread.start()
    began.wait()
    client.close()
    thread.join(10)
    assert not thread.is_alive()
    assert all(isinstance(each, Status) for each in found)


def test_a_study_is_followed_to_its_end(script: Script, where: Path) -> None:
    """Each state it is in, once."""
    script.show(study=StudyShown("s 1", "running", 1, 3))
    client = Client(where)
    until(client.studies)
    found = []
    for each in client.follow_study("s 1"):
        found.append(each.trials)
        if each.state == "running":
            script.show(study=replace(each, state="ended", trials=3))
    assert found == [1, 3]


def test_a_newer_daemon_is_understood(where: Path) -> None:
    """Fields this version does not know are passed over, those that are missing have their default."""
    document = {"turn": 3, "device": "sim:x", "new": {"a": 1}, "study": {"id": "a", "state": "running", "mood": 1}}
    text = json.dumps(document).encode()
    with answering(where, b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%s" % (len(text), text)):
        assert Client(where).status() == Status(turn=3, device="sim:x", study=StudyShown("a", "running"))


@pytest.mark.parametrize("url", ["127.0.0.1:80", "ftp://x", "http://", "http://x:y", "http://x/path", "http://[x"])
def test_an_address_that_is_none_is_refused(url: str) -> None:
    """With an example of one."""
    with pytest.raises(InvalidInput, match="not the address of a daemon"):
        Client(url=url)


def test_a_daemon_is_named_once(where: Path, tmp_path: Path) -> None:
    """By its socket or by a URL; and what is no certificate is said to be none."""
    with pytest.raises(InvalidInput, match="not both"):
        Client(where, url="http://localhost:80")
    (tmp_path / "cert").write_text("no")
    with pytest.raises(BadFile, match="not a certificate"):
        Client(url="https://localhost:80", authority=tmp_path / "cert")


def test_the_default_socket_is_in_the_run_folder(tmp_path: Path) -> None:
    """Where the daemon of the same user listens by default."""
    assert default_socket() == tmp_path / "run" / "daemon" / "daemon.sock"
    assert Client().where == str(default_socket())


def test_the_client_needs_the_standard_library_only() -> None:
    """Neither NumPy nor anything the daemon serves with is loaded."""
    code = (
        "import sys, polythrottle; polythrottle.Client\n"
        "print([m for m in ('numpy', 'starlette', 'uvicorn', 'h11', 'rich', 'torch') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_the_client_waits_longer_than_the_api_ever_does() -> None:
    """To apply a profile the API waits three times: for the name, for the file and for the control loop."""
    assert inspect.signature(Client).parameters["timeout_s"].default > 3 * handlers._PATIENCE_S
