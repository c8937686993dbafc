"""Notices that a machine is about to be taken away, and where they come from: a file, a signal, Slurm, Ray, a cloud.

Clouds tell of it at the metadata endpoint each machine has of its own: AWS, Google, Azure. These endpoints are
link-local. They are asked only where a source is named, never through a proxy, for at most a second altogether, and
not at all where ``POLYTHROTTLE_NO_METADATA`` is set. Time left is counted by the endpoint's own clock where its answer
is dated.
"""

import http.client
import json
import math
import os
import re
import signal
import socket
import subprocess
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timezone
from email.utils import parsedate_to_datetime
from pathlib import Path
from typing import Any, Protocol

from polythrottle.domain.backports import StrEnum
from polythrottle.domain.clock import Clock, SystemClock
from polythrottle.domain.errors import BadFile, DeviceError, InvalidInput
from polythrottle.storage.cells import iso_time
from polythrottle.storage.untrusted import check_plain

# A notice that a machine is about to be taken away, and what follows from it; pure.


class NoticeKind(StrEnum):
    """What a notice says."""

    PREEMPT = "preempt"  # the machine goes
    REBALANCE = "rebalance"  # the machine is more likely to go than others
    TIME_LIMIT = "time limit"  # the allocation ends


@dataclass(frozen=True)
class Notice:
    """What a source says of this node.

    Attributes:
        kind: What it says.
        left_s: Time left by the source's own clock, in seconds; None where it does not say.
        node: The node it is about; empty for the one that asked.
        source: Who says so.
    """

    kind: NoticeKind
    left_s: float | None = None
    node: str = ""
    source: str = ""


class NoticeSource(Protocol):
    """Something that can be asked whether this machine will be taken away.

    Attributes:
        name: What it is called.
        every_s: How often to ask, in seconds.
    """

    name: str
    every_s: float

    def poll(self) -> Notice | None:
        """Return what it says now, None for nothing.

        Raises:
            SourceAway: If it does not answer.
        """


def leave_in_s(notice: Notice, margin_s: float) -> float | None:
    """Return when a node should leave after a notice, in seconds from now; None if it should stay.

    It works until there is just time for a checkpoint and for the others to hear of it; where nobody says how long it
    has, it leaves at once.

    Args:
        notice: What was said.
        margin_s: Time for a checkpoint and for parting, in seconds.
    """
    if notice.kind is NoticeKind.REBALANCE:
        return None
    if notice.left_s is None:
        return 0.0
    return max(0.0, notice.left_s - margin_s)


# Notices from this machine itself: a file that appears, a signal that is sent.

RESERVED = {"SIGTERM", "SIGINT", "SIGHUP", "SIGQUIT", "SIGKILL", "SIGSTOP", "SIGCHLD"}


@dataclass
class FileSource:
    """A file that says so by being there: empty, a number of seconds left, or ``{"kind": …, "left_s": …}``."""

    path: Path
    name: str = "file"
    every_s: float = 1.0

    def poll(self) -> Notice | None:
        """Return what the file says.

        Raises:
            BadFile: If it says neither.
        """
        check_plain(self.path)
        try:
            text = self.path.read_text().strip()
        except FileNotFoundError:
            return None
        except (OSError, UnicodeDecodeError) as err:
            raise BadFile(f"the notice {self.path} cannot be read: {getattr(err, 'strerror', None) or err}") from err
        if not text:
            return Notice(NoticeKind.PREEMPT, source=self.name)
        return self._parsed(text)

    def _parsed(self, text: str) -> Notice:
        try:
            said = json.loads(text)
            if isinstance(said, dict):
                document = said
            else:
                document = {"left_s": said}
            left_s = document.get("left_s")
            left_s = None if left_s is None else float(left_s)
            if left_s is not None and not (math.isfinite(left_s) and left_s >= 0):
                raise ValueError
            return Notice(NoticeKind(document.get("kind", "preempt")), left_s, source=self.name)
        except (ValueError, TypeError, OverflowError, RecursionError) as err:
            raise BadFile(
                f'the notice {self.path} says {text[:40]!r}; write seconds left, or {{"kind": "preempt", "left_s": 30}}'
            ) from err


def signal_number(name: str) -> signal.Signals:
    """Return the signal that a name such as ``USR1`` means.

    Raises:
        InvalidInput: If there is no such signal, or it means something else already.
    """
    if name.upper().startswith("SIG"):
        full = name.upper()
    else:
        full = f"SIG{name.upper()}"
    number = signal.Signals.__members__.get(full)
    if number is None or full in RESERVED:
        raise InvalidInput(f"a notice can be signal:USR1 or signal:USR2, not {name[:20]!r}")
    return number


@dataclass
class SignalSource:
    """A signal to this process, such as the one Slurm sends with ``--signal=B:USR1@60``; made in the main thread.

    Attributes:
        signal_name: ``USR1`` or ``USR2``, for example; SIGTERM needs no source, it always means to leave.

    Raises:
        InvalidInput: If there is no such signal, or it means something else already.
    """

    signal_name: str
    name: str = "signal"
    every_s: float = 0.2
    _sent: bool = field(default=False, init=False)

    def __post_init__(self) -> None:
        signal.signal(signal_number(self.signal_name), lambda *_: setattr(self, "_sent", True))

    def poll(self) -> Notice | None:
        """Return a notice once the signal has come."""
        if self._sent:
            return Notice(NoticeKind.PREEMPT, source=self.name)
        return None


# Notices from who gave the machine: Slurm by its own commands, Ray by its own state.

LEAD_S = 60.0
LIMIT_S = 5.0
_GOING = {"drained", "draining", "drng", "drain", "down", "fail", "failing", "maint", "reboot", "powering_down"}


class SourceAway(DeviceError):
    """A source of notices does not answer; it is asked again."""


def run_command(words: Sequence[str]) -> str:
    """Return what a command prints.

    Raises:
        SourceAway: If it cannot be run, fails, or takes too long.
    """
    try:
        done = subprocess.run(words, capture_output=True, text=True, timeout=LIMIT_S, check=True)
    except (OSError, subprocess.SubprocessError) as err:
        raise SourceAway(f"{words[0]} does not answer: {err}") from err
    return done.stdout


@dataclass
class SlurmSource:
    """Slurm: this job's time left and state, and this node's state.

    Attributes:
        job: Its number.
        node: This node's name in Slurm; empty where unknown.
        lead_s: With how much time left the end of the allocation is a notice, in seconds.
        run: Runs one of Slurm's commands.
    """

    job: str
    node: str = ""
    lead_s: float = LEAD_S
    run: Callable[[Sequence[str]], str] = run_command
    name: str = "slurm"
    every_s: float = 5.0

    def poll(self) -> Notice | None:
        """Return what Slurm says of this job and node.

        Raises:
            SourceAway: If it does not answer.
        """
        state, _, left = (
            self.run(["squeue", "--noheader", f"--jobs={self.job}", "--format=%T|%L"]).strip().partition("|")
        )
        if state in {"PREEMPTED", "COMPLETING", "STOPPED", "SUSPENDED", "REQUEUED", "SIGNALING"}:
            return Notice(NoticeKind.PREEMPT, source=self.name)
        if self.node and self._is_going():
            return Notice(NoticeKind.PREEMPT, source=self.name)
        left_s = seconds_left(left)
        if left_s is not None and left_s <= self.lead_s:
            return Notice(NoticeKind.TIME_LIMIT, left_s, source=self.name)
        return None

    def _is_going(self) -> bool:
        said = self.run(["sinfo", "--noheader", f"--nodes={self.node}", "--format=%T"])
        return bool(set(re.findall(r"[a-z_]+", said.lower())) & _GOING)


def slurm_from_environment(environment: Mapping[str, str]) -> SlurmSource:
    """Return the source of the Slurm job this process is in.

    Raises:
        InvalidInput: If it is in none.
    """
    job = environment.get("SLURM_JOB_ID", "")
    if not job.isdecimal():
        raise InvalidInput("the notice slurm works inside a Slurm job alone: SLURM_JOB_ID is not set")
    return SlurmSource(job, environment.get("SLURMD_NODENAME", ""))


def seconds_left(text: str) -> float | None:
    """Return the seconds in Slurm's ``[days-][hours:]minutes:seconds``; None where there is no limit."""
    matched = re.fullmatch(r"(?:(\d+)-)?(?:(\d+):)?(\d+):(\d+)", text.strip())
    if matched is None:
        return None
    days, hours, minutes, seconds = (int(part or 0) for part in matched.groups())
    return float(((days * 24 + hours) * 60 + minutes) * 60 + seconds)


@dataclass
class RaySource:
    """Ray: whether this node is being drained, and until when.

    Attributes:
        draining: Returns the draining nodes: identity → deadline in ms since 1970, 0 where there is none.
        node: This node's identity.
        now_ms: Returns the time Ray's deadlines count in, in ms.
    """

    draining: Callable[[], Mapping[str, int]]
    node: str
    now_ms: Callable[[], float]
    name: str = "ray"
    every_s: float = 1.0

    def poll(self) -> Notice | None:
        """Return what Ray says of this node.

        Raises:
            SourceAway: If it does not answer.
        """
        try:
            deadlines = self.draining()
        except Exception as err:  # Ray raises what it likes
            raise SourceAway(f"Ray does not answer: {err or type(err).__name__}") from err
        if self.node not in deadlines:
            return None
        deadline_ms = deadlines[self.node]
        left_s = None
        if deadline_ms:
            left_s = max(0.0, (deadline_ms - self.now_ms()) / 1000)
        return Notice(NoticeKind.PREEMPT, left_s, self.node, self.name)


# Ray's draining nodes; the only module here that needs Ray.


def ray_source() -> RaySource:
    """Return the source for the Ray node this process runs on.

    Raises:
        InvalidInput: If Ray is not installed, or this process is on no Ray node.
    """
    try:
        import ray  # type: ignore[import-not-found,unused-ignore]
        from ray._private.state import state  # type: ignore[import-not-found,unused-ignore]
    except ImportError as err:
        raise InvalidInput("the notice ray needs Ray: pip install 'polythrottle[cluster]'") from err
    if not ray.is_initialized():
        raise InvalidInput("the notice ray works inside a Ray job alone: ray.init() has not been called")
    node = str(ray.get_runtime_context().get_node_id())
    return RaySource(state.get_draining_nodes, node, lambda: time.time() * 1000)


OFF = "POLYTHROTTLE_NO_METADATA"
ENDPOINT_LIMIT_S = 1.0
LARGEST_ANSWER = 1 << 16
LINK_LOCAL = "169.254.169.254"
GOOGLE_HOST = "metadata.google.internal"


@dataclass(frozen=True)
class MetadataAnswer:
    """What an endpoint answered."""

    status: int
    text: str
    headers: Mapping[str, str]

    @property
    def now(self) -> datetime:
        """Return the time there, or here where the answer is not dated."""
        try:
            said = parsedate_to_datetime(self.headers["date"])
        except (KeyError, ValueError):
            return datetime.now(timezone.utc)
        if said.tzinfo:
            return said
        return said.replace(tzinfo=timezone.utc)


@dataclass(frozen=True)
class Endpoint:
    """A metadata endpoint.

    Attributes:
        host: Where it is.
        port: On which port.
        clock: Counts the one second.

    Raises:
        InvalidInput: If endpoints are switched off.
    """

    host: str = LINK_LOCAL
    port: int = 80
    clock: Clock = field(default_factory=SystemClock)

    def __post_init__(self) -> None:
        if os.environ.get(OFF):
            raise InvalidInput(f"metadata endpoints are switched off here ({OFF}); leave out aws, google and azure")

    def ask(self, verb: str, path: str, headers: Mapping[str, str]) -> MetadataAnswer:
        """Return an answer within a second.

        Raises:
            SourceAway: If there is none.
        """
        until_s = self.clock.now() + ENDPOINT_LIMIT_S
        call = http.client.HTTPConnection(self.host, self.port, timeout=ENDPOINT_LIMIT_S)
        try:
            call.request(verb, path, headers=dict(headers))
            answer = call.getresponse()
            data = self._read(answer, call.sock, until_s)
            return MetadataAnswer(
                answer.status, data.decode(), {key.lower(): value for key, value in answer.getheaders()}
            )
        except (OSError, http.client.HTTPException, UnicodeDecodeError) as err:
            raise SourceAway(f"the metadata endpoint {self.host} does not answer: {err or type(err).__name__}") from err
        finally:
            call.close()

    def _read(self, answer: http.client.HTTPResponse, line: socket.socket | None, until_s: float) -> bytes:
        data = b""
        while not answer.isclosed():
            left_s = until_s - self.clock.now()
            if left_s <= 0 or len(data) > LARGEST_ANSWER:
                raise TimeoutError("it takes longer than a second, or says too much")
            if line is not None:
                line.settimeout(left_s)
            part = answer.read1(LARGEST_ANSWER)
            if not part:
                break
            data += part
        return data


@dataclass
class CloudSource(ABC):
    """A cloud's own notices, from the metadata endpoint of this machine.

    Attributes:
        endpoint: Where they are asked for.
        name: What the cloud is called.
        every_s: How often it is asked, in seconds.
    """

    endpoint: Endpoint = field(default_factory=Endpoint)
    name: str = ""
    every_s: float = 1.0
    _known: str = field(default="", init=False)  # what has to be asked for but once: a token, the machine's name

    @abstractmethod
    def poll(self) -> Notice | None:
        """Return what the cloud says of this machine.

        Raises:
            SourceAway: If it does not answer, or not as documented.
        """


@dataclass
class AwsSource(CloudSource):
    """AWS EC2 Spot: the interruption notice (two minutes before) and the rebalance recommendation, by IMDSv2."""

    name: str = "aws"
    every_s: float = 5.0

    def poll(self) -> Notice | None:
        """Return what EC2 says of this instance.

        Raises:
            SourceAway: If it does not answer, or not as documented.
        """
        going = self._get("/latest/meta-data/spot/instance-action")
        if going is not None:
            document = _document(going, self.name)
            return Notice(NoticeKind.PREEMPT, _left_s(str(document.get("time", "")), going), source=self.name)
        if self._get("/latest/meta-data/events/recommendations/rebalance") is not None:
            return Notice(NoticeKind.REBALANCE, source=self.name)
        return None

    def _get(self, path: str) -> MetadataAnswer | None:
        """Return an answer, None for nothing there; a token that has expired is renewed once."""
        for _ in range(2):
            if not self._known:
                self._known = self._token()
            answer = self.endpoint.ask("GET", path, {"X-aws-ec2-metadata-token": self._known})
            if answer.status != http.HTTPStatus.UNAUTHORIZED:
                break
            self._known = ""
        if answer.status == http.HTTPStatus.NOT_FOUND:
            return None
        return _found(answer, self.name)

    def _token(self) -> str:
        wanted = {"X-aws-ec2-metadata-token-ttl-seconds": "21600", "Content-Length": "0"}
        return _found(self.endpoint.ask("PUT", "/latest/api/token", wanted), self.name).text


@dataclass
class GoogleSource(CloudSource):
    """Google Compute Engine Spot: ``instance/preempted``; the machine is off 30 seconds after it says so."""

    endpoint: Endpoint = field(default_factory=lambda: Endpoint(GOOGLE_HOST))
    name: str = "google"
    lead_s: float = 30.0

    def poll(self) -> Notice | None:
        """Return what Compute Engine says of this instance.

        Raises:
            SourceAway: If it does not answer, or not as documented.
        """
        path = "/computeMetadata/v1/instance/preempted"
        answer = _found(self.endpoint.ask("GET", path, {"Metadata-Flavor": "Google"}), self.name)
        if answer.headers.get("metadata-flavor") != "Google" or answer.text.strip() not in {"TRUE", "FALSE"}:
            raise SourceAway(f"what answers at {self.endpoint.host} is not Google's metadata server")
        if answer.text.strip() == "FALSE":
            return None
        return Notice(NoticeKind.PREEMPT, self.lead_s, source=self.name)


@dataclass
class AzureSource(CloudSource):
    """Azure Spot: scheduled events of this machine, at least 30 seconds before."""

    name: str = "azure"

    def poll(self) -> Notice | None:
        """Return what Azure has scheduled for this machine.

        Raises:
            SourceAway: If it does not answer, or not as documented.
        """
        if not self._known:
            compute = "/metadata/instance/compute/name?api-version=2021-02-01&format=text"
            self._known = _found(self.endpoint.ask("GET", compute, {"Metadata": "true"}), self.name).text.strip()
        path = "/metadata/scheduledevents?api-version=2020-07-01"
        answer = _found(self.endpoint.ask("GET", path, {"Metadata": "true"}), self.name)
        events = _document(answer, self.name).get("Events", [])
        if isinstance(events, list):
            mine = [event for event in events if self._is_mine(event)]
        else:
            mine = []
        lefts = [_left_s(str(event.get("NotBefore", "")), answer) for event in mine]
        if not mine:
            return None
        known = [left_s for left_s in lefts if left_s is not None]
        return Notice(NoticeKind.PREEMPT, min(known, default=None), source=self.name)

    def _is_mine(self, event: Any) -> bool:
        if not isinstance(event, dict) or event.get("EventType") not in {"Preempt", "Terminate"}:
            return False
        return self._known in event.get("Resources", [self._known])


CLOUDS: Mapping[str, Callable[[], CloudSource]] = {
    "aws": AwsSource,
    "google": GoogleSource,
    "azure": AzureSource,
}


def _found(answer: MetadataAnswer, name: str) -> MetadataAnswer:
    if answer.status != http.HTTPStatus.OK:
        raise SourceAway(f"the metadata endpoint of {name} answers {answer.status}")
    return answer


def _document(answer: MetadataAnswer, name: str) -> dict[str, Any]:
    try:
        document = json.loads(answer.text)
    except (ValueError, RecursionError) as err:
        raise SourceAway(f"the metadata endpoint of {name} does not answer in JSON") from err
    if not isinstance(document, dict):
        raise SourceAway(f"the metadata endpoint of {name} does not answer with a document")
    return document


def _left_s(text: str, answer: MetadataAnswer) -> float | None:
    """Return the seconds from an answer's own time to a time in it, ISO 8601 or RFC 1123; None if it is neither."""
    for parse in (iso_time, parsedate_to_datetime):
        try:
            at = parse(text)
        except (ValueError, TypeError, IndexError):
            continue
        return max(0.0, ((at if at.tzinfo else at.replace(tzinfo=timezone.utc)) - answer.now).total_seconds())
    return None
