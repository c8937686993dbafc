"""What happens in a job: as nodes and workers tell the controller, and as it keeps it on disk.

Of messages there is one type per verb, and every field is checked before anything acts on it. Events are one line each;
from them follows where the job stands now.
"""

import json
import math
from abc import abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from typing_extensions import Self

from polythrottle.domain.errors import BadFile, InvalidInput, StorageError
from polythrottle.domain.fleet.transient_machine import HOUR_S, LossRate
from polythrottle.storage.append_log import AppendLog, whole_lines
from polythrottle.storage.untrusted import MALFORMED
from polythrottle.training.elastic.membership import EventKind
from polythrottle.training.elastic.worker.process import Fault

_NAME_SIGNS = 80
_REASON_SIGNS = 200
"""Names and reasons are written to the job's events and shown, so that no more of them is kept than is of use."""
_SUCCESSION_TIMES = ("left_s", "wait_s", "overlap_s", "interruption_s")


class _Fields:
    """The fields of one request: each is of its type, or the request is refused by name."""

    def __init__(self, words: Mapping[str, Any]) -> None:
        self.words = words

    def text(self, name: str, most: int = _NAME_SIGNS, default: str | None = None) -> str:
        """Return a text, cut after ``most`` characters.

        Raises:
            InvalidInput: If it is missing and has no default, or is no text; so do the next five.
        """
        value = self.words.get(name, default)
        if not isinstance(value, str):
            raise _garbled(name, "a text")
        return value[:most]

    def count(self, name: str, default: int | None = None) -> int:
        """Return a whole number."""
        value = self.words.get(name, default)
        if type(value) is not int:  # JSON's true is no number, though Python's is
            raise _garbled(name, "a whole number")
        return value

    def seconds(self, name: str) -> float | None:
        """Return a finite time in seconds; None where it was left out."""
        value = self.words.get(name)
        if value is None:
            return None
        if type(value) not in (int, float) or not math.isfinite(value):
            raise _garbled(name, "a number of seconds")
        return float(value)

    def flag(self, name: str, default: bool | None = None) -> bool:
        """Return true or false."""
        value = self.words.get(name, default)
        if not isinstance(value, bool):
            raise _garbled(name, "true or false")
        return value

    def address(self) -> tuple[str, int]:
        """Return host and port of this node."""
        # It is handed to all other nodes to connect to, so that a bad one would stop the whole generation.
        match self.words.get("address"):
            case [str(host), int(port)] if 0 <= port < 65536:
                return host, port
        raise _garbled("address", "a host and a port")

    def records(self) -> tuple[Mapping[str, Any], ...]:
        """Return documents; none where they were left out."""
        value = self.words.get("records", [])
        if isinstance(value, list | tuple) and all(isinstance(each, dict) for each in value):
            return tuple(value)
        raise _garbled("records", "a list of documents")


def _garbled(name: str, expected: str) -> InvalidInput:
    return InvalidInput(f"the request lacks or garbles {name!r}: it must be {expected}")


class Message:
    """What one request says."""

    @classmethod
    def read(cls, words: Mapping[str, Any]) -> Self:
        """Return the message of a request.

        Raises:
            InvalidInput: If a field is missing or of another type.
        """
        return cls._of(_Fields(words))

    @classmethod
    @abstractmethod
    def _of(cls, fields: _Fields) -> Self: ...


@dataclass(frozen=True)
class Join(Message):
    """A node that comes.

    Attributes:
        node: Its name.
        address: Where its workers gather if it is the chief.
        generation: The newest it has been part of.
        process: Names its process, which tells a node that began again from one that was only silent.
    """

    node: str
    address: tuple[str, int]
    generation: int
    process: str

    @classmethod
    def _of(cls, fields: _Fields) -> Self:
        generation = fields.count("generation", 0)
        return cls(fields.text("node"), fields.address(), generation, fields.text("process", default=""))


@dataclass(frozen=True)
class Beat(Message):
    """A node's sign of life.

    Attributes:
        node: Its name.
        process: As in `Join`.
        measured: What it says of its pace and its boards, which the overseer checks.
    """

    node: str
    process: str
    measured: Mapping[str, Any]

    @classmethod
    def _of(cls, fields: _Fields) -> Self:
        return cls(fields.text("node"), fields.text("process", default=""), fields.words)


@dataclass(frozen=True)
class Ready(Message):
    """A node that can begin a generation.

    Attributes:
        node: Its name.
        address: As in `Join`.
        failed: Whether its workers failed in the generation before.
    """

    node: str
    address: tuple[str, int]
    failed: bool

    @classmethod
    def _of(cls, fields: _Fields) -> Self:
        return cls(fields.text("node"), fields.address(), fields.flag("failed", False))


@dataclass(frozen=True)
class Departure(Message):
    """A node that will leave, or leaves."""

    node: str
    reason: str

    @classmethod
    def _of(cls, fields: _Fields) -> Self:
        return cls(fields.text("node"), fields.text("reason", _REASON_SIGNS))


@dataclass(frozen=True)
class Finish(Message):
    """A node whose workers have trained to the end."""

    node: str
    generation: int

    @classmethod
    def _of(cls, fields: _Fields) -> Self:
        return cls(fields.text("node"), fields.count("generation"))


@dataclass(frozen=True)
class NoticeMessage(Message):
    """A notice that a node's machine is about to be taken away.

    Attributes:
        node: Its name.
        kind: What the notice says.
        left_s: Time left, in seconds; None where nobody says.
        source: Who says so.
    """

    node: str
    kind: str
    left_s: float | None
    source: str

    @classmethod
    def _of(cls, fields: _Fields) -> Self:
        source = fields.text("source", default="")
        return cls(fields.text("node"), fields.text("kind", 40), fields.seconds("left_s"), source)


@dataclass(frozen=True)
class WorkerFault(Message):
    """How a worker of a node failed."""

    node: str
    fault: Fault

    @classmethod
    def _of(cls, fields: _Fields) -> Self:
        node = fields.text("node")
        try:
            return cls(node, Fault.from_document(fields.words))
        except (ValueError, TypeError) as err:
            raise _garbled("exit_code", "how a worker ended") from err


@dataclass(frozen=True)
class SuccessionStep(Message):
    """What who rents the nodes says of a successor.

    Attributes:
        done: Whether it has taken over; else it was asked for.
        order: The order it takes over from.
        successor: Its own order.
        times: Times of the succession in seconds, by name, those that are known.
    """

    done: bool
    order: str
    successor: str
    times: Mapping[str, float]

    @classmethod
    def _of(cls, fields: _Fields) -> Self:
        times = {name: fields.seconds(name) for name in _SUCCESSION_TIMES}
        # Milliseconds are finer than any of these is known, and the log is read by people.
        known = {name: round(value, 3) for name, value in times.items() if value is not None}
        return cls(fields.flag("done"), fields.text("order"), fields.text("successor"), known)


@dataclass(frozen=True)
class Report(Message):
    """What a worker reports.

    Attributes:
        generation: The one it is of.
        records: Events for the job's log.
        at: The step it has done and its epoch; None before its first.
    """

    generation: int
    records: tuple[Mapping[str, Any], ...]
    at: tuple[int, int] | None

    @classmethod
    def _of(cls, fields: _Fields) -> Self:
        at = None
        if fields.words.get("step") is not None:
            at = (fields.count("step"), fields.count("epoch"))
        return cls(fields.count("generation"), fields.records(), at)


EVENTS = "events.jsonl"
JOB = "job.json"
FAULT = "fault"
RESTARTED = "restarted"
SUCCESSOR = "successor"
SUCCESSION = "succession"
"""Events of the controller's own: a worker's failure, its own return, a successor that was asked for or took over."""
FIRST_STEP = "first step"
UNHEARD = "unheard"
"""Marks the loss of a node of which a controller that began again has not heard: it says nothing of when or why."""
VERSION = 1
PRIOR = LossRate(losses=0.5, exposure_s=5 * HOUR_S)
"""What is believed of a node before its job has lost any: so little that the first losses outweigh it."""


class EventLog:
    """The events of a job, each flushed to disk before anybody acts on it; a torn last line is cut off on reopening.

    Raises:
        StorageError: If it cannot be written, or another process writes it.
        BadFile: If a line other than the last was not written here.
    """

    def __init__(self, folder: Path) -> None:
        busy = f"another controller works on the job in {folder}; stop it, or give another --job"
        self._log = AppendLog(folder / EVENTS, busy=busy)
        try:
            self.records = read_events(folder)
            # Only once all other lines are known to be ours: a file of somebody else must stay as it is.
            self._log.cut_torn_line()
        except (BadFile, StorageError):
            self._log.close()
            raise

    def append(self, record: Mapping[str, Any]) -> None:
        """Write one event.

        Raises:
            StorageError: If it cannot be written.
        """
        line = {"v": VERSION, **record}
        self._log.append(json.dumps(line, allow_nan=False).encode())
        self.records.append(line)

    def close(self) -> None:
        """Close the file."""
        self._log.close()


def read_events(folder: Path) -> list[dict[str, Any]]:
    """Return the events in a job's folder; a torn last line does not count.

    Raises:
        BadFile: If another line was not written here, or the file cannot be read.
    """
    path = folder / EVENTS
    try:
        lines = whole_lines(path.read_bytes())
    except FileNotFoundError:
        return []
    except OSError as err:
        raise BadFile(f"{path} cannot be read: {err.strerror}") from err
    records: list[dict[str, Any]] = []
    for number, text in enumerate(lines, 1):
        try:
            line = json.loads(text)
            if line["v"] != VERSION:
                raise ValueError
        except MALFORMED as err:
            raise BadFile(f"{path} line {number} is no event of a job") from err
        records.append(line)
    return records


def keeper(folder: Path) -> int | None:
    """Return the process that last said it is the controller of the job in a folder, None if none did."""
    try:
        return int(json.loads((folder / JOB).read_bytes())["pid"])
    except (OSError, ValueError, KeyError, TypeError):
        return None


@dataclass(frozen=True)
class Origin:
    """Where a controller's own clock begins in the time of the job, which goes on over restarts.

    Attributes:
        at_s: Time of the job when this controller began, in seconds.
        restarted: Whether there was a controller before.
        away_s: How long none kept the job, by the machine's calendar, in seconds; None where that cannot be known.
    """

    at_s: float = 0.0
    restarted: bool = False
    away_s: float | None = None


def origin_of(records: Sequence[Mapping[str, Any]], unix_s: float) -> Origin:
    """Return where the time of a job goes on.

    A calendar that was set back, or a record without a date, leaves the time away unknown: the job's time then goes on
    where it stood.

    Args:
        records: The job's events so far.
        unix_s: Now, in seconds since 1970.
    """
    if not records:
        return Origin()
    at_s = max(float(record.get("at_s", 0.0)) for record in records)
    dated_s = records[-1].get("unix_s")
    away_s = None
    if dated_s is not None and unix_s >= float(dated_s):
        away_s = unix_s - float(dated_s)
    return Origin(at_s + (away_s or 0.0), True, away_s)


@dataclass
class Successions:
    """What asking for successors ahead of time has come to.

    Attributes:
        asked: Successors that were asked for before the end of their predecessors.
        done: Those of them that have taken over.
        overlap_s: Time in which predecessor and successor were both there, in seconds: paid for twice.
        interruption_s: Time in which neither was there, in seconds: a place that stood empty.
    """

    asked: int = 0
    done: int = 0
    overlap_s: float = 0.0
    interruption_s: float = 0.0

    def take(self, record: Mapping[str, Any]) -> None:
        """Count one event."""
        self.asked += record["event"] == SUCCESSOR
        self.done += record["event"] == SUCCESSION
        self.overlap_s += float(record.get("overlap_s", 0.0))
        self.interruption_s += float(record.get("interruption_s", 0.0))

    def document(self) -> dict[str, Any]:
        """Return them as a document."""
        times = {"overlap_s": round(self.overlap_s, 1), "interruption_s": round(self.interruption_s, 1)}
        return {"asked": self.asked, "done": self.done, **times}


@dataclass
class JobProgress:
    """What the events and reports of a job add up to.

    Attributes:
        step: Newest step anybody reported, None before the first.
        epoch: Its epoch.
        checkpoints: Checkpoints that are safe in the store.
        newest: The newest of them as reported, None before the first.
        spooled: Whether the newest waits on a local disk because the store is away.
        counts: How often each thing happened, by its event's name.
        machine_s: Time that nodes were there while a controller saw them, summed, in seconds.
        recoveries: From the last beat of a lost node to the next generation's first step, in seconds each; one during
            which the controller itself was away is not measured.
        joined_s: When each node that is there joined, in the job's time, in seconds.
        fault: The newest failure of a worker, None without one.
        successions: What asking for successors has come to.
        taken_up: Where this job began if the store held a training that its events know nothing of, None if it did not.
        dismissed: How many nodes left because the job was over.
    """

    step: int | None = None
    epoch: int | None = None
    checkpoints: int = 0
    newest: Mapping[str, Any] | None = None
    spooled: bool = False
    counts: dict[str, int] = field(default_factory=dict)
    machine_s: float = 0.0
    recoveries: list[float] = field(default_factory=list)
    joined_s: dict[str, float] = field(default_factory=dict)
    fault: Mapping[str, Any] | None = None
    successions: Successions = field(default_factory=Successions)
    taken_up: Mapping[str, Any] | None = None
    dismissed: int = 0
    _over: bool = False
    _silent_since_s: float | None = None
    _until_s: float = 0.0

    @property
    def losses(self) -> int:
        """Return how many nodes were lost while a controller kept the job."""
        return self.counts.get(EventKind.LOST, 0) - self.counts.get(UNHEARD, 0)

    @property
    def departures(self) -> int:
        """Return how many nodes left a job that went on, or were gone when a controller began again."""
        return self.counts.get(EventKind.LEFT, 0) + self.counts.get(UNHEARD, 0) - self.dismissed

    @property
    def idle(self) -> bool:
        """Return whether the job is over without a step: what it took up had been trained to its end."""
        return self.taken_up is not None and EventKind.FINISHED in self.counts and FIRST_STEP not in self.counts

    def until(self, at_s: float) -> None:
        """Count the time of the nodes that are there, up to a time of the job in seconds."""
        self.machine_s += max(0.0, at_s - self._until_s) * len(self.joined_s)
        self._until_s = at_s

    def take(self, record: Mapping[str, Any]) -> None:
        """Count one event."""
        name = str(record["event"])
        at_s = float(record.get("at_s", self._until_s))
        self.counts[name] = self.counts.get(name, 0) + 1
        if name in (EventKind.FINISHED, EventKind.FAILED, RESTARTED):
            self._over = name != RESTARTED
        self._take_time(name, at_s, record)
        if name == "checkpoint":
            self.checkpoints = self.checkpoints + 1
            self.newest = record
            self.spooled = False
        elif name == "spooled":
            self.spooled = True
        elif name == FAULT:
            self.fault = record
        elif name in (SUCCESSOR, SUCCESSION):
            self.successions.take(record)
        elif name == "resumed" and not {FIRST_STEP, "checkpoint"} & self.counts.keys():
            self.taken_up = record

    def _take_time(self, name: str, at_s: float, record: Mapping[str, Any]) -> None:
        if name == RESTARTED:  # nobody saw what nodes did meanwhile
            self._until_s = at_s
            self._silent_since_s = None
        self.until(at_s)
        if name == EventKind.JOINED:
            self.joined_s.setdefault(str(record.get("node")), at_s)
        elif name in (EventKind.LOST, EventKind.LEFT):
            self.joined_s.pop(str(record.get("node")), None)
            self._take_loss(name, record)
        elif name == FIRST_STEP and self._silent_since_s is not None:
            if at_s >= self._silent_since_s:
                self.recoveries += [at_s - self._silent_since_s]
            self._silent_since_s = None

    def _take_loss(self, name: str, record: Mapping[str, Any]) -> None:
        if name == EventKind.LEFT:
            self.dismissed += self._over
        elif record.get(UNHEARD):
            self.counts[UNHEARD] = self.counts.get(UNHEARD, 0) + 1
        elif name == EventKind.LOST and "beaten_s" in record and self._silent_since_s is None:
            self._silent_since_s = float(record["beaten_s"])

    def hazard_per_s(self, members: int, rate_per_h: float | None) -> tuple[float, str]:
        """Return the rate of losses of any member per second, and where it comes from.

        Args:
            members: How many nodes train.
            rate_per_h: Losses of one node per hour if they are known; otherwise they are estimated from this job's
                own, beside half a loss in five hours that stands for what is not known yet.
        """
        if rate_per_h is not None:
            return members * rate_per_h / HOUR_S, "given"
        # A notice counts though its node left in order: the machine was taken away all the same.
        losses = self.losses + self.counts.get("notice", 0)
        # Per node, and nothing is forgotten: a real job has few losses, and its group grows and shrinks.
        rate = PRIOR.updated(losses, self.machine_s)
        evidence = f"estimated from {losses} losses in {self.machine_s / HOUR_S:.2g} machine hours"
        return members * rate.per_s, evidence


def replayed(records: Iterable[Mapping[str, Any]]) -> JobProgress:
    """Return what events of a former controller add up to."""
    progress = JobProgress()
    for record in records:
        progress.take(record)
    return progress
