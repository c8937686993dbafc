"""The controller: what it answers, what it keeps, whom it lets in."""

import contextlib
import http.client
import json
import os
import stat
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from polythrottle.domain.clock import VirtualClock
from polythrottle.domain.errors import BadFile, InvalidInput, StorageError
from polythrottle.storage.object_store import Holding, Store
from polythrottle.storage.untrusted import is_loopback
from polythrottle.training.elastic.channel import (
    TOKEN_FILE,
    ControllerAway,
    ControllerChannel,
    WrongToken,
    line_from_environment,
    own_token,
    parse_address,
    read_token,
)
from polythrottle.training.elastic.controller import Controller, ControllerServer, Job, announce
from polythrottle.training.elastic.engines import job_line
from polythrottle.training.elastic.events import EVENTS, EventLog, JobProgress, read_events
from polythrottle.training.elastic.job_control import ControllerOptions, job_folder, node_counts, status_of, way_to
from polythrottle.training.elastic.membership import Phase, Rules

AT = ["127.0.0.1", 29500]
TOKEN = "a-token-of-plain-characters"


def a_job(folder: Path, **words: object) -> Job:
    """Return a job of one or two nodes."""
    return Job("job", folder, Rules(1, 2, last_call_s=0.0), f"file://{folder}/store", **words)  # type: ignore[arg-type]


@pytest.fixture
def opened() -> Iterator[Callable[..., Controller]]:
    """Open controllers, and close them after the test."""
    with contextlib.ExitStack() as stack:

        def opened(job: Job, clock: VirtualClock | None = None) -> Controller:
            held = Controller(job, clock or VirtualClock())
            stack.callback(held.close)
            return held

        yield opened


def test_nodes_gather_beat_and_are_lost(tmp_path: Path, opened: Callable[..., Controller]) -> None:
    """From joining to the loss of one, everything is in the events, with its generation."""
    clock = VirtualClock()
    held = opened(Job("job", tmp_path, Rules(1, 2), "memory://x"), clock)
    for name in "ab":
        held.answer("join", {"node": name, "address": AT})
        held.answer("ready", {"node": name, "address": AT})
    assert held.answer("beat", {"node": "b"})["rank"] == 1
    assert held.answer("beat", {"node": "c"})["known"] is False
    clock.sleep(2.0)
    held.answer("beat", {"node": "a"})
    clock.sleep(2.0)
    held.tick()
    standing = held.answer("beat", {"node": "a"})
    assert (standing["regroup"], standing["generation"]) == (True, 1)
    assert [line["event"] for line in read_events(tmp_path)] == ["joined", "joined", "formed", "lost"]
    assert all("generation" in line and "at_s" in line for line in read_events(tmp_path))


def test_a_loss_says_when_the_node_was_last_heard_of(tmp_path: Path, opened: Callable[..., Controller]) -> None:
    """So that what was lost with it is counted from there, not from when its silence was noticed."""
    clock = VirtualClock()
    held = opened(Job("job", tmp_path, Rules(1, 2), "memory://x"), clock)
    for name in "ab":
        held.answer("join", {"node": name, "address": AT})
        held.answer("ready", {"node": name, "address": AT})
    clock.sleep(1.5)
    held.answer("beat", {"node": "b"})
    for _ in range(3):
        clock.sleep(1.5)
        held.answer("beat", {"node": "a"})
        held.tick()
    (loss,) = (line for line in read_events(tmp_path) if line["event"] == "lost")
    assert (loss["node"], loss["beaten_s"]) == ("b", 1.5)


def test_a_controller_that_was_held_up_itself_takes_nobody_for_lost(
    tmp_path: Path, opened: Callable[..., Controller]
) -> None:
    """Time in which it could hear nobody does not count as their silence."""
    clock = VirtualClock()
    held = opened(a_job(tmp_path), clock)
    held.answer("join", {"node": "a", "address": AT})
    clock.sleep(30.0)
    held.excuse(30.0)
    held.tick()
    assert [line["event"] for line in read_events(tmp_path)] == ["joined"]


def test_a_worker_hears_to_stop_and_whether_the_others_are_gone(
    tmp_path: Path, opened: Callable[..., Controller]
) -> None:
    """A report of a former generation is told to stop; one of the present when a member is silent."""
    clock = VirtualClock()
    held = opened(Job("job", tmp_path, Rules(1, 2, last_call_s=0.0), "memory://x"), clock)
    held.answer("join", {"node": "a", "address": AT})
    held.answer("ready", {"node": "a", "address": AT})
    report = {"node": "a", "rank": 0, "generation": 1, "step": 7, "epoch": 0, "records": []}
    answer = held.answer("report", report)
    assert (answer["stop"], answer["broken"]) == (False, False)
    assert held.status()["step"] == 7
    assert held.answer("report", {**report, "generation": 0})["stop"] is True
    clock.sleep(4.0)
    answer = held.answer("report", report)
    answer = held.answer("report", report)
    assert (answer["stop"], answer["broken"]) == (True, True)


def test_a_worker_whose_node_goes_may_write_its_last_checkpoint_before_the_successor_begins(
    tmp_path: Path, opened: Callable[..., Controller]
) -> None:
    """It is told to stop, not that the others are gone, however long it writes; only then has the successor a rank."""
    clock = VirtualClock()
    held = opened(Job("job", tmp_path, Rules(1, 1, missed=100), "memory://x"), clock)
    for name in ("old", "heir"):
        held.answer("join", {"node": name, "address": AT})
        held.answer("ready", {"node": name, "address": AT})
    report = {"node": "old", "rank": 0, "generation": 1, "step": 189, "epoch": 0}
    held.answer("report", report)
    held.answer("drain", {"node": "old", "reason": "SIGTERM was sent to it"})
    for step in (190, 191, 192):
        clock.sleep(5.0)
        told = held.answer("report", report | {"step": step})
        assert (told["stop"], told["broken"]) == (True, False)
        assert held.answer("beat", {"node": "heir"})["rank"] is None
    held.answer("leave", {"node": "old", "reason": "SIGTERM was sent to it"})
    standing = held.answer("beat", {"node": "heir"})
    assert (standing["rank"], standing["generation"], held.progress.step) == (0, 2, 192)


def test_a_notice_asks_for_a_checkpoint_of_all(tmp_path: Path, opened: Callable[..., Controller]) -> None:
    """Workers see the number of wanted checkpoints rise; the notice is counted."""
    held = opened(a_job(tmp_path), VirtualClock())
    report = {"node": "a", "rank": 0, "generation": 0, "records": []}
    before = held.answer("report", report)["checkpoints"]
    held.answer("notice", {"node": "a", "kind": "preempt", "left_s": 30.0, "source": "file"})
    assert held.answer("report", report)["checkpoints"] == before + 1
    assert held.status()["notices"] == 1


def test_a_recovery_is_from_the_last_beat_to_the_first_step(tmp_path: Path) -> None:
    """The figure comes from the controller's own clock."""
    seen = JobProgress()
    seen.take({"event": "lost", "at_s": 10.0, "beaten_s": 6.5})
    seen.take({"event": "first step", "at_s": 13.0, "step": 4})
    assert seen.recoveries == [6.5]


def test_the_hazard_is_the_given_one_or_estimated_with_its_evidence(tmp_path: Path) -> None:
    """Losses per machine hour, beside half a loss in five hours for what is not known."""
    seen = JobProgress(machine_s=5 * 3600.0)
    seen.take({"event": "lost", "at_s": 1.0})
    assert seen.hazard_per_s(2, 0.5) == (1 / 3600, "given")
    hazard_per_s, source = seen.hazard_per_s(2, None)
    assert hazard_per_s == pytest.approx(2 * 1.5 / 10 / 3600)
    assert "estimated from 1 losses" in source


@pytest.mark.parametrize(
    ("verb", "words"),
    [
        ("nonsense", {}),
        ("__class__", {}),
        ("join", {}),
        ("join", {"node": "a", "address": 7}),
        ("join", {"node": "a", "address": ["host"]}),
        ("beat", {"node": 7}),
        ("ready", {"node": "a", "address": AT, "failed": 1}),
        ("_standing", {"name": "a"}),
        ("close", {}),
        ("finish", {"node": "a", "generation": True}),
        ("succession", {"done": True, "order": "1", "successor": "2", "left_s": "soon"}),
        ("report", {"generation": "x"}),
        ("report", {"generation": 0, "records": [{"event": "a"}, {"event": "lost"}]}),
        ("report", {"generation": 0, "records": [{"event": "a", "loss": float("nan")}]}),
        ("report", {"generation": 0, "records": 7}),
        ("report", {"generation": 0, "step": 1}),
        ("report", {"generation": 0, "records": [{"event": "lost"}]}),
        ("report", {"generation": 0, "records": [{"event": "restarted"}]}),
        ("fault", {"node": "a", "exit_code": "x"}),
        ("fault", {"exit_code": 1}),
        ("notice", {"node": "a", "kind": "preempt", "left_s": float("inf")}),
    ],
)
def test_a_request_that_is_none_is_refused_in_one_line(
    tmp_path: Path, opened: Callable[..., Controller], verb: str, words: dict[str, object]
) -> None:
    """Nothing of it is kept."""
    held = opened(a_job(tmp_path))
    with pytest.raises(InvalidInput):
        held.answer(verb, words)
    assert read_events(tmp_path) == []


def test_events_survive_a_kill_and_a_torn_line(tmp_path: Path) -> None:
    """A half-written last line is cut off; any other bad line is an error with its number."""
    held = EventLog(tmp_path)
    held.append({"event": "one"})
    held.close()
    with (tmp_path / EVENTS).open("a") as file:
        file.write('{"v": 1, "event": "tor')
    held = EventLog(tmp_path)
    held.append({"event": "two"})
    held.close()
    assert [line["event"] for line in read_events(tmp_path)] == ["one", "two"]
    (tmp_path / EVENTS).write_text("nonsense\n")
    with pytest.raises(BadFile, match="line 1"):
        read_events(tmp_path)


def test_two_controllers_of_one_job_are_refused(tmp_path: Path, opened: Callable[..., Controller]) -> None:
    """The second one says what to do, whatever store it was given."""
    opened(a_job(tmp_path))
    with pytest.raises(StorageError, match="another controller"):
        opened(a_job(tmp_path))


@pytest.fixture
def served(tmp_path: Path) -> Iterator[tuple[ControllerServer, threading.Thread]]:
    """Serve a controller with a token on loopback."""
    job = a_job(tmp_path / "job")
    serving = ControllerServer(Controller(job), "127.0.0.1", 0, TOKEN, Holding(Store(job.store), VirtualClock()))
    serving.open()
    thread = threading.Thread(target=serving.run)
    thread.start()
    yield serving, thread
    serving.stop()
    thread.join(20.0)
    assert not thread.is_alive()


def test_only_who_has_the_token_is_answered(served: tuple[ControllerServer, threading.Thread]) -> None:
    """Without it, or with another, a request is refused in words."""
    line = served[0].line
    assert line.ask("status")["phase"] == "gathering"
    for token in ("", TOKEN + "x"):
        for verb in ("status", "finish", "nonsense"):
            with pytest.raises(WrongToken, match="token"):
                ControllerChannel(line.host, line.port, token).ask(verb, node="a", generation=0)


@pytest.mark.parametrize(
    ("headers", "body", "status"),
    [
        ({"Origin": "http://page", "Content-Type": "application/json"}, b"{}", 403),
        ({"Content-Type": "text/plain"}, b"{}", 403),
        ({"Content-Type": "application/json"}, b"not json", 400),
        ({"Content-Type": "application/json"}, b"[1]", 400),
        ({"Content-Type": "application/json"}, b"[" * 100_000, 400),
        ({"Content-Type": "application/json", "Content-Length": "99999999"}, b"", 413),
    ],
)
def test_what_is_no_nodes_request_is_refused(
    served: tuple[ControllerServer, threading.Thread], headers: dict[str, str], body: bytes, status: int
) -> None:
    """A browser's, and anything that is not one JSON document of a sane size."""
    call = http.client.HTTPConnection("127.0.0.1", served[0].line.port, timeout=60)
    call.request("POST", "/status", body, {"Authorization": f"Bearer {TOKEN}", **headers})
    answer = call.getresponse()
    assert answer.status == status
    assert "error" in json.loads(answer.read())
    call.close()


@pytest.mark.parametrize("host", ["0.0.0.0", "127.0.0.1"])
def test_no_controller_is_without_a_token(tmp_path: Path, opened: Callable[..., Controller], host: str) -> None:
    """On loopback neither, where every user of the machine can connect."""
    with pytest.raises(InvalidInput, match="token"):
        ControllerServer(opened(a_job(tmp_path)), host, 0, "", Holding(Store("memory://s")))


def test_a_late_finish_of_an_older_generation_ends_nothing(tmp_path: Path, opened: Callable[..., Controller]) -> None:
    """Who finishes names its generation; what the newest has still to do is not done."""
    clock = VirtualClock()
    held = opened(a_job(tmp_path), clock)
    for name in "ab":
        held.answer("join", {"node": name, "address": AT})
        held.answer("ready", {"node": name, "address": AT})
    held.answer("ready", {"node": "b", "address": AT})
    held.answer("ready", {"node": "a", "address": AT})
    assert held.status()["generation"] == 2
    for words in ({"node": "a", "generation": 1}, {"node": "a"}, {"node": "a", "generation": 1e999}):
        with pytest.raises(InvalidInput, match=r"generation|garbles"):
            held.answer("finish", words)
        assert held.status()["phase"] != str(Phase.FINISHED)
    held.answer("finish", {"node": "a", "generation": 2})
    assert held.status()["phase"] == str(Phase.FINISHED)


def test_a_token_file_is_private_and_long_enough(tmp_path: Path) -> None:
    """One that others may read, is short or is missing is an error that says what to do."""
    path = tmp_path / "token"
    with pytest.raises(BadFile, match="cannot be read"):
        read_token(path)
    path.write_text(TOKEN + "\n")
    path.chmod(0o644)
    with pytest.raises(BadFile, match="chmod 600"):
        read_token(path)
    path.chmod(0o600)
    assert read_token(path) == TOKEN
    os.mkfifo(tmp_path / "pipe", 0o600)
    path.write_bytes(b"t" * 10_000)
    for other in (tmp_path / "pipe", path):
        with pytest.raises(BadFile, match="no file of one line"):
            read_token(other)
    path.write_text("short")
    with pytest.raises(BadFile, match="16"):
        read_token(path)
    assert read_token(None) == ""


def test_a_jobs_own_token_is_its_users_alone_and_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A controller that is back takes the same; workers read it from its file; another user's file does not count."""
    former = os.umask(0)
    try:
        path = own_token(tmp_path)
    finally:
        os.umask(former)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    token = read_token(path)
    assert (len(token), own_token(tmp_path), read_token(path)) == (48, path, token)
    assert sorted(tmp_path.iterdir()) == [path]
    line = ControllerChannel.through("127.0.0.1:7", path)
    for name, value in line.environment().items():
        monkeypatch.setenv(name, value)
    assert line_from_environment() == line
    assert token not in f"{line} {line.environment()}"
    assert line.environment()[TOKEN_FILE] == str(path)
    monkeypatch.setattr(os, "geteuid", lambda: path.stat().st_uid + 1)
    with pytest.raises(BadFile, match="another user's"):
        own_token(tmp_path)


def test_who_joins_finds_the_token_of_a_job_of_his_own(tmp_path: Path) -> None:
    """The newest at the address; one of another address is not tried."""
    address = "127.0.0.1:7071"
    for name in ("other", "job"):
        folder = job_folder(name)
        folder.mkdir(parents=True)
        host, port = parse_address(address if name == "job" else "127.0.0.1:7072")
        announce(Job(name, folder, Rules(), "memory://x"), ControllerChannel(host, port), own_token(folder))
    assert way_to(address, None).token == read_token(job_folder("job") / "token")
    with pytest.raises(InvalidInput, match="--token-file"):
        way_to("127.0.0.1:7073", None)


def test_status_comes_from_the_controller_or_from_the_events(
    served: tuple[ControllerServer, threading.Thread], tmp_path: Path
) -> None:
    """A job whose controller is gone still says what it knows, and that it does not know the rest."""
    serving, thread = served
    token = tmp_path / "token"
    token.write_text(TOKEN)
    token.chmod(0o600)
    job = serving.controller.job
    announce(job, serving.line, token)
    serving.line.ask("join", node="a", address=AT)
    assert status_of(job.folder)["source"] == "the controller"
    assert [node["node"] for node in job_line(job.folder).ask("status")["nodes"]] == ["a"]
    serving.stop()
    thread.join(20.0)
    found = status_of(job.folder)
    assert (found["phase"], found["step"], found["source"]) == ("unknown", None, "the job's events")
    with pytest.raises(BadFile, match="no folder of a cluster job"):
        status_of(tmp_path / "nothing")


def test_nobody_there_is_told_from_a_refusal() -> None:
    """Who trains goes on without a controller, and asks again."""
    with pytest.raises(ControllerAway, match="no controller answers"):
        ControllerChannel("127.0.0.1", 1, timeout_s=1.0).ask("status")


def test_a_controller_elsewhere_numbers_on_after_the_checkpoints(
    tmp_path: Path, opened: Callable[..., Controller]
) -> None:
    """Without the job's folder it would begin at 1, and its checkpoints would be older than those that are there."""
    held = opened(a_job(tmp_path), VirtualClock())
    held.begin(7)
    held.answer("join", {"node": "a", "address": AT})
    held.answer("ready", {"node": "a", "address": AT})
    assert held.answer("beat", {"node": "a"})["generation"] == 8
    held.close()
    again = opened(a_job(tmp_path), VirtualClock())
    again.begin(8)
    assert (again.membership.generation, again.membership.members) == (8, ("a",)), "whom it knows trains on"


def test_a_workers_failure_is_kept_and_named_when_the_job_fails(
    tmp_path: Path, opened: Callable[..., Controller]
) -> None:
    """With its code and last words; a job that is given up for another reason does not blame it."""
    held = opened(a_job(tmp_path), VirtualClock())
    for _ in range(3):
        held.answer("join", {"node": "a", "address": AT}) if not held.membership.nodes else None
        held.answer("ready", {"node": "a", "address": AT, "failed": held.membership.generation > 0})
        held.answer("fault", {"node": "a", "exit_code": 1, "said": ["ValueError: bad"]})
    held.answer("ready", {"node": "a", "address": AT, "failed": True})
    found = held.status()
    assert found["phase"] == "failed"
    assert found["reason"].endswith("the last, on a: a worker ended with code 1: ValueError: bad")
    assert "ValueError" not in held.answer("beat", {"node": "a"})["reason"], "each node would say it again"
    assert (found["members"], found["last_members"], found["chief"]) == ([], ["a"], None)
    assert (found["faults"], found["newest_fault"]["said"]) == (3, ["ValueError: bad"])
    other = opened(a_job(tmp_path / "other"), VirtualClock())
    other.answer("fault", {"node": "a", "exit_code": 1})
    other.give_up("the store was taken")
    assert other.status()["reason"] == "the store was taken"


def test_successors_are_told_to_the_controller(tmp_path: Path, opened: Callable[..., Controller]) -> None:
    """Who rents nodes says whom it asked for; status shows what it came to."""
    held = opened(a_job(tmp_path), VirtualClock())
    held.answer("succession", {"done": False, "order": "1", "successor": "2", "left_s": 60.0})
    held.answer("succession", {"done": True, "order": "1", "successor": "2", "overlap_s": 2.5, "interruption_s": 0.0})
    assert held.status()["successors"] == {"asked": 1, "done": 1, "overlap_s": 2.5, "interruption_s": 0.0}
    with pytest.raises(InvalidInput):
        held.answer("succession", {"done": True, "order": "1"})


def test_a_job_is_given_up_with_its_reason(tmp_path: Path, opened: Callable[..., Controller]) -> None:
    """Nodes hear that it has failed, and why."""
    held = opened(a_job(tmp_path), VirtualClock())
    held.give_up("another controller took the store")
    assert held.status()["phase"] == str(Phase.FAILED)
    assert "took the store" in held.answer("beat", {"node": "a"})["reason"]


@pytest.mark.parametrize(("text", "address"), [("127.0.0.1:70", ("127.0.0.1", 70)), ("[::1]:7070", ("::1", 7070))])
def test_an_address_is_host_and_port(text: str, address: tuple[str, int]) -> None:
    """IPv6 addresses stand in brackets."""
    assert parse_address(text) == address
    assert is_loopback(address[0])
    assert not is_loopback("10.0.0.1")


@pytest.mark.parametrize("text", ["", "host", "host:", ":70", "host:x", "host:99999", "h:1:"])
def test_what_is_no_address_is_refused(text: str) -> None:
    """With an example."""
    with pytest.raises(InvalidInput, match="HOST:PORT"):
        parse_address(text)


def test_nodes_and_jobs_are_named_as_they_can_be(tmp_path: Path) -> None:
    """Counts are a number or least:most; a name can be a folder's."""
    assert (node_counts("4"), node_counts("2:4")) == ((1, 4), (2, 4))
    with pytest.raises(InvalidInput, match="least:most"):
        node_counts("two")
    with pytest.raises(InvalidInput, match="name"):
        job_folder("../elsewhere")
    with pytest.raises(InvalidInput, match="least"):
        ControllerOptions("x", "3:2").as_job()
    with pytest.raises(InvalidInput, match="share"):
        ControllerOptions("x", overhead=2.0).as_job()


def test_a_lost_node_is_neither_member_nor_chief_and_nobodys_speed_is_shown(
    tmp_path: Path, opened: Callable[..., Controller]
) -> None:
    """Status says who was lost and for how many nodes the job waits; a former generation's speed is not this one's."""
    clock = VirtualClock()
    held = opened(Job("job", tmp_path, Rules(2, 2), f"file://{tmp_path}/store"), clock)
    assert held.status()["waits_for"] == 2
    for name in "ab":
        held.answer("join", {"node": name, "address": AT})
    for name in "ab":
        held.answer("ready", {"node": name, "address": AT})
    held._overseer.document = lambda: {"measured_steps_per_s": 9.0, "reason": None, "tried": []}  # type: ignore[method-assign]
    found = held.status()
    assert (found["members"], found["chief"], found["waits_for"]) == (["a", "b"], "a", 0)
    assert found["speed"]["measured_steps_per_s"] == 9.0
    clock.sleep(2.0)
    held.answer("beat", {"node": "b"})
    clock.sleep(2.0)
    held.tick()
    found = held.status()
    assert (found["phase"], found["members"], found["chief"], found["gone"]) == (
        "regrouping",
        ["b"],
        None,
        {"a": "lost"},
    )
    assert (found["waits_for"], found["speed"]["measured_steps_per_s"]) == (1, None)
    assert "no generation trains" in found["speed"]["reason"]
    clock.sleep(4.0)
    held.tick()
    found = held.status()
    assert (found["members"], found["gone"], found["waits_for"]) == ([], {"a": "lost", "b": "lost"}, 2)
