"""Who says that a machine is about to be taken away: each source against what it documents."""

import contextlib
import json
import signal
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from polythrottle.cluster.notice_sources import (
    OFF,
    AwsSource,
    AzureSource,
    Endpoint,
    FileSource,
    GoogleSource,
    Notice,
    NoticeKind,
    RaySource,
    SignalSource,
    SlurmSource,
    SourceAway,
    leave_in_s,
    run_command,
    seconds_left,
    slurm_from_environment,
)
from polythrottle.cluster.rented_machines import NoticeWatch, source_from, watch_from
from polythrottle.domain.clock import VirtualClock
from polythrottle.domain.errors import BadFile, InvalidInput, UnknownName

DATED = "Sun, 22 Nov 2026 08:20:00 GMT"


@dataclass
class Stand:
    """A stand-in for a metadata endpoint: what it answers by verb and path, and what it was asked."""

    port: int = 0
    answers: dict[str, Callable[[dict[str, str]], tuple[int, str, dict[str, str]]]] = field(default_factory=dict)
    asked: list[str] = field(default_factory=list)

    @property
    def endpoint(self) -> Endpoint:
        """Return where it is."""
        return Endpoint("127.0.0.1", self.port)


@pytest.fixture
def stand() -> Iterator[Stand]:
    """Serve a stand-in on loopback."""
    found = Stand()

    class Handler(BaseHTTPRequestHandler):
        def answer(self) -> None:
            """Answer as the stand-in says."""
            found.asked.append(f"{self.command} {self.path}")
            headers = {key.lower(): value for key, value in self.headers.items()}
            make = found.answers.get(f"{self.command} {self.path}", lambda _: (404, "", {}))
            status, text, more = make(headers)
            self.send_response_only(status)
            for key, value in {"Date": DATED, "Content-Length": str(len(text)), **more}.items():
                self.send_header(key, value)
            with contextlib.suppress(OSError):  # who asked has given up
                self.end_headers()
                self.wfile.write(text.encode())

        def do_GET(self) -> None:
            """Answer."""
            self.answer()

        def do_PUT(self) -> None:
            """Answer."""
            self.answer()

        def log_message(self, format: str, *args: object) -> None:
            """Say nothing."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    found.port = server.server_address[1]
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    yield found
    server.shutdown()
    server.server_close()
    thread.join()


def aws(stand: Stand, action: str | None, rebalance: bool = False) -> AwsSource:
    """Let the stand-in speak IMDSv2 with short-lived tokens, and return the source."""
    tokens: list[str] = []

    def token(headers: dict[str, str]) -> tuple[int, str, dict[str, str]]:
        if not headers.get("x-aws-ec2-metadata-token-ttl-seconds", "").isdecimal():
            return 400, "", {}
        tokens.append(f"token-{len(tokens)}")
        return 200, tokens[-1], {}

    def guarded(text: str | None) -> Callable[[dict[str, str]], tuple[int, str, dict[str, str]]]:
        def answer(headers: dict[str, str]) -> tuple[int, str, dict[str, str]]:
            if not tokens or headers.get("x-aws-ec2-metadata-token") != tokens[-1]:
                return 401, "", {}
            return (404, "", {}) if text is None else (200, text, {})

        return answer

    stand.answers = {
        "PUT /latest/api/token": token,
        "GET /latest/meta-data/spot/instance-action": guarded(action),
        "GET /latest/meta-data/events/recommendations/rebalance": guarded('{"noticeTime": "x"}' if rebalance else None),
        "expire": lambda _: (tokens.append("another"), (0, "", {}))[1],
    }
    return AwsSource(stand.endpoint)


def test_aws_says_terminate_with_its_time(stand: Stand) -> None:
    """IMDSv2 with a token; the time left is counted from the answer's own date, not from this machine's clock."""
    source = aws(stand, '{"action": "terminate", "time": "2026-11-22T08:22:00Z"}')
    assert source.poll() == Notice(NoticeKind.PREEMPT, 120.0, source="aws")
    assert stand.asked == ["PUT /latest/api/token", "GET /latest/meta-data/spot/instance-action"]


def test_aws_renews_its_token_and_tells_nothing_from_a_recommendation(stand: Stand) -> None:
    """404 means nothing; an expired token is renewed once; a rebalance recommendation is its own kind."""
    source = aws(stand, None)
    assert source.poll() is None
    stand.answers["expire"]({})
    assert source.poll() is None
    assert stand.asked.count("PUT /latest/api/token") == 2
    assert aws(stand, None, rebalance=True).poll() == Notice(NoticeKind.REBALANCE, source="aws")


def google(stand: Stand, text: str, flavor: str = "Google") -> GoogleSource:
    """Let the stand-in speak as Compute Engine's metadata server, and return the source."""

    def preempted(headers: dict[str, str]) -> tuple[int, str, dict[str, str]]:
        return (200, text, {"Metadata-Flavor": flavor}) if headers.get("metadata-flavor") == "Google" else (403, "", {})

    stand.answers = {"GET /computeMetadata/v1/instance/preempted": preempted}
    return GoogleSource(stand.endpoint)


def test_google_says_preempted_thirty_seconds_before(stand: Stand) -> None:
    """The header goes both ways: what answers without it is not the metadata server."""
    assert google(stand, "FALSE").poll() is None
    assert google(stand, "TRUE").poll() == Notice(NoticeKind.PREEMPT, 30.0, source="google")
    with pytest.raises(SourceAway, match="not Google's"):
        google(stand, "TRUE", flavor="else").poll()
    with pytest.raises(SourceAway, match="not Google's"):
        google(stand, "<html>").poll()


def azure(stand: Stand, events: object) -> AzureSource:
    """Let the stand-in speak scheduled events, and return the source."""

    def guarded(text: str) -> Callable[[dict[str, str]], tuple[int, str, dict[str, str]]]:
        return lambda headers: (200, text, {}) if headers.get("metadata") == "true" else (400, "", {})

    document = json.dumps({"DocumentIncarnation": 1, "Events": events})
    stand.answers = {
        "GET /metadata/instance/compute/name?api-version=2021-02-01&format=text": guarded("vm1"),
        "GET /metadata/scheduledevents?api-version=2020-07-01": guarded(document),
    }
    return AzureSource(stand.endpoint)


def event(kind: str = "Preempt", machine: str = "vm1") -> dict[str, object]:
    """Return a scheduled event as Azure documents it."""
    times = {"NotBefore": "Sun, 22 Nov 2026 08:20:30 GMT", "EventStatus": "Scheduled"}
    return {"EventId": "1", "EventType": kind, "ResourceType": "VirtualMachine", "Resources": [machine], **times}


def test_azure_says_preempt_for_this_machine_alone(stand: Stand) -> None:
    """Other machines' events and harmless kinds are none of ours; a cancelled one is gone at the next poll."""
    assert azure(stand, [event()]).poll() == Notice(NoticeKind.PREEMPT, 30.0, source="azure")
    assert azure(stand, []).poll() is None
    assert azure(stand, [event("Freeze"), event(machine="vm2")]).poll() is None
    assert azure(stand, "nonsense").poll() is None


@pytest.mark.parametrize("make", [aws, google, azure])
def test_an_endpoint_that_answers_otherwise_is_one_line(
    stand: Stand, make: Callable[[Stand, str], AwsSource | GoogleSource | AzureSource]
) -> None:
    """Server errors and other content never look like a notice, nor like none."""
    source = make(stand, "")
    stand.answers = {path: lambda _: (500, "no", {}) for path in stand.answers}
    with pytest.raises(SourceAway):
        source.poll()


def test_an_endpoint_has_one_second_altogether(stand: Stand) -> None:
    """One that trickles its answer is given up as well as one that says nothing."""

    def slow(_: dict[str, str]) -> tuple[int, str, dict[str, str]]:
        time.sleep(1.3)
        return 200, "late", {}

    stand.answers = {"GET /x": slow}
    with pytest.raises(SourceAway, match="does not answer"):
        stand.endpoint.ask("GET", "/x", {})
    with pytest.raises(SourceAway, match="does not answer"):
        Endpoint("127.0.0.1", 1).ask("GET", "/x", {})


def test_the_hard_switch_keeps_every_endpoint_unasked(monkeypatch: pytest.MonkeyPatch) -> None:
    """With it set, naming a cloud is an error before anything is sent."""
    monkeypatch.setenv(OFF, "1")
    for name in ("aws", "google", "azure"):
        with pytest.raises(InvalidInput, match="switched off"):
            source_from(name)


def test_a_file_says_so_by_being_there(tmp_path: Path) -> None:
    """Empty, seconds, or a document; anything else is an error that shows how."""
    source = FileSource(tmp_path / "notice")
    assert source.poll() is None
    for text, notice in {
        "": Notice(NoticeKind.PREEMPT, None, source="file"),
        "30\n": Notice(NoticeKind.PREEMPT, 30.0, source="file"),
        '{"kind": "rebalance"}': Notice(NoticeKind.REBALANCE, None, source="file"),
        '{"left_s": 5}': Notice(NoticeKind.PREEMPT, 5.0, source="file"),
    }.items():
        source.path.write_text(text)
        assert source.poll() == notice
    for text in ("soon", "-1", "NaN", '{"kind": "else"}', '{"left_s": []}', "[" * 9000, "9" * 400):
        source.path.write_text(text)
        with pytest.raises(BadFile, match="write seconds left"):
            source.poll()


def test_a_signal_is_a_notice_once_it_was_sent() -> None:
    """USR2, for example; signals that mean something else are refused."""
    former = signal.getsignal(signal.SIGUSR2)
    try:
        source = SignalSource("usr2")
        assert source.poll() is None
        signal.raise_signal(signal.SIGUSR2)
        assert source.poll() == Notice(NoticeKind.PREEMPT, source="signal")
    finally:
        signal.signal(signal.SIGUSR2, former)
    for name in ("TERM", "KILL", "nonsense", ""):
        with pytest.raises(InvalidInput, match="USR1"):
            SignalSource(name)


def slurm(job: str, node: str = "idle") -> SlurmSource:
    """Return a source whose Slurm says so of the job and of the node."""
    said = {"squeue": job, "sinfo": node}
    return SlurmSource("7", "n1", run=lambda words: said[words[0]])


def test_slurm_says_preempted_draining_or_nearly_over() -> None:
    """By the job's state, the node's state, and the time that is left."""
    assert slurm("RUNNING|1:00:00").poll() is None
    assert slurm("RUNNING|UNLIMITED").poll() is None
    assert slurm("RUNNING|0:45").poll() == Notice(NoticeKind.TIME_LIMIT, 45.0, source="slurm")
    assert slurm("PREEMPTED|1:00:00").poll() == Notice(NoticeKind.PREEMPT, source="slurm")
    assert slurm("RUNNING|1:00:00", "draining*").poll() == Notice(NoticeKind.PREEMPT, source="slurm")


def test_slurm_is_asked_inside_a_job_alone() -> None:
    """Its own environment says which; times are read as it writes them."""
    assert slurm_from_environment({"SLURM_JOB_ID": "12", "SLURMD_NODENAME": "n1"}).node == "n1"
    with pytest.raises(InvalidInput, match="SLURM_JOB_ID"):
        slurm_from_environment({})
    assert (seconds_left("2-03:04:05"), seconds_left("0:25"), seconds_left("NOT_SET")) == (183845.0, 25.0, None)
    with pytest.raises(SourceAway, match="does not answer"):
        run_command(["/nonexistent/squeue"])


def test_ray_says_which_nodes_are_drained_and_until_when() -> None:
    """A deadline of 0 is none; errors of Ray are one line."""
    draining: dict[str, int] = {}
    source = RaySource(lambda: draining, "me", lambda: 1000.0)
    assert source.poll() is None
    draining |= {"other": 5000}
    assert source.poll() is None
    draining |= {"me": 31000}
    assert source.poll() == Notice(NoticeKind.PREEMPT, 30.0, "me", "ray")
    draining["me"] = 0
    assert source.poll() == Notice(NoticeKind.PREEMPT, None, "me", "ray")

    def broken() -> dict[str, int]:
        raise RuntimeError("no cluster")

    with pytest.raises(SourceAway, match="no cluster"):
        RaySource(broken, "me", lambda: 0.0).poll()


def test_a_node_works_until_there_is_just_time_to_part() -> None:
    """At once where nobody says how long it has; not at all for a recommendation."""
    assert leave_in_s(Notice(NoticeKind.PREEMPT, 120.0), 15.0) == 105.0
    assert leave_in_s(Notice(NoticeKind.PREEMPT, 5.0), 15.0) == 0.0
    assert leave_in_s(Notice(NoticeKind.PREEMPT), 15.0) == 0.0
    assert leave_in_s(Notice(NoticeKind.REBALANCE), 15.0) is None


@dataclass
class Told:
    """Keeps what a controller would be told."""

    said: list[dict[str, object]] = field(default_factory=list)

    def say(self, verb: str, **words: object) -> None:
        """Keep it."""
        self.said.append({"verb": verb, **words})


def test_a_watch_tells_once_and_leaves_in_time(tmp_path: Path) -> None:
    """The controller hears of a notice when it appears; the node goes 15 s before the end."""
    clock, told, lines = VirtualClock(), Told(), []
    watch = NoticeWatch([FileSource(tmp_path / "notice")], lines.append, clock=clock)
    assert watch.look(told) == ""
    (tmp_path / "notice").write_text("30")
    for _ in range(14):
        clock.sleep(1.0)
        assert watch.look(told) == ""
    clock.sleep(2.0)
    assert watch.look(told) == "notice of file: preempt"
    assert told.said == [{"verb": "notice", "kind": "preempt", "left_s": 30.0, "source": "file"}]


def test_a_source_that_is_away_is_said_once_and_asked_again(tmp_path: Path) -> None:
    """Training goes on without it; a notice that comes later is seen."""
    clock, told, lines = VirtualClock(), Told(), []
    watch = NoticeWatch([FileSource(tmp_path / "notice")], lines.append, clock=clock)
    (tmp_path / "notice").write_text("nonsense")
    for _ in range(5):
        assert watch.look(told) == ""
        clock.sleep(2.0)
    assert len(lines) == 1
    (tmp_path / "notice").write_text("")
    assert watch.look(told) == "notice of file: preempt"


def test_sources_are_named_as_documented(tmp_path: Path) -> None:
    """A name that is none offers the near ones; none at all is no watch."""
    assert isinstance(source_from(f"file:{tmp_path}"), FileSource)
    assert isinstance(source_from("aws"), AwsSource)
    assert watch_from([], [].append) is None
    for text in ("awss", "file:", "google:x", ""):
        with pytest.raises(UnknownName, match="source of notices"):
            source_from(text)
    with pytest.raises(InvalidInput, match="once"):
        watch_from(["aws", "aws"], [].append)
