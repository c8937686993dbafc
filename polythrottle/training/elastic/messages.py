"""What nodes and workers say to the controller: one type per verb, every field checked before anything acts on it."""

import math
from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from typing_extensions import Self

from polythrottle.domain.errors import InvalidInput
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
