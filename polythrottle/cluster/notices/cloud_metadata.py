"""Notices of clouds, from the metadata endpoint each machine has of its own: AWS, Google, Azure.

The endpoints are link-local. They are asked only where a source is named, never through a proxy, for at most a second
altogether, and not at all where ``POLYTHROTTLE_NO_METADATA`` is set. Time left is counted by the endpoint's own clock
where its answer is dated.
"""

import http.client
import json
import os
import socket
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import datetime, timezone
from email.utils import parsedate_to_datetime
from typing import Any

from polythrottle.cluster.notices.sources import Notice, NoticeKind, SourceAway
from polythrottle.domain.clock import Clock, SystemClock
from polythrottle.domain.errors import InvalidInput
from polythrottle.storage.cells import iso_time

OFF = "POLYTHROTTLE_NO_METADATA"
LIMIT_S = 1.0
LARGEST = 1 << 16
LINK_LOCAL = "169.254.169.254"
GOOGLE_HOST = "metadata.google.internal"


@dataclass(frozen=True)
class Answer:
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

    def ask(self, verb: str, path: str, headers: Mapping[str, str]) -> Answer:
        """Return an answer within a second.

        Raises:
            SourceAway: If there is none.
        """
        until_s = self.clock.now() + LIMIT_S
        call = http.client.HTTPConnection(self.host, self.port, timeout=LIMIT_S)
        try:
            call.request(verb, path, headers=dict(headers))
            answer = call.getresponse()
            data = self._read(answer, call.sock, until_s)
            return Answer(answer.status, data.decode(), {key.lower(): value for key, value in answer.getheaders()})
        except (OSError, http.client.HTTPException, UnicodeDecodeError) as err:
            raise SourceAway(f"the metadata endpoint {self.host} does not answer: {err or type(err).__name__}") from err
        finally:
            call.close()

    def _read(self, answer: http.client.HTTPResponse, line: socket.socket | None, until_s: float) -> bytes:
        data = b""
        while not answer.isclosed():
            left_s = until_s - self.clock.now()
            if left_s <= 0 or len(data) > LARGEST:
                raise TimeoutError("it takes longer than a second, or says too much")
            if line is not None:
                line.settimeout(left_s)
            part = answer.read1(LARGEST)
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

    def _get(self, path: str) -> Answer | None:
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


def _found(answer: Answer, name: str) -> Answer:
    if answer.status != http.HTTPStatus.OK:
        raise SourceAway(f"the metadata endpoint of {name} answers {answer.status}")
    return answer


def _document(answer: Answer, name: str) -> dict[str, Any]:
    try:
        document = json.loads(answer.text)
    except (ValueError, RecursionError) as err:
        raise SourceAway(f"the metadata endpoint of {name} does not answer in JSON") from err
    if not isinstance(document, dict):
        raise SourceAway(f"the metadata endpoint of {name} does not answer with a document")
    return document


def _left_s(text: str, answer: Answer) -> float | None:
    """Return the seconds from an answer's own time to a time in it, ISO 8601 or RFC 1123; None if it is neither."""
    for parse in (iso_time, parsedate_to_datetime):
        try:
            at = parse(text)
        except (ValueError, TypeError, IndexError):
            continue
        return max(0.0, ((at if at.tzinfo else at.replace(tzinfo=timezone.utc)) - answer.now).total_seconds())
    return None
