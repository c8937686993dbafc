"""Every reader of what strangers write, and documents that each takes, to be damaged: by tests, a million times over.

A reader returns a value or raises a `PolythrottleError`, whatever the bytes. A document of the corpus is damaged as
text or as the tree that it is; where lines carry a checksum it is made anew, so that what lies behind it is reached.
"""

import asyncio
import gzip
import json
import random
import zlib
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from starlette.requests import Request
from starlette.types import Message
from trainer_jobs import counted_entries

from polythrottle.actuation.audit import Audit
from polythrottle.actuation.limits import Limits
from polythrottle.actuation.server.permits import Permits
from polythrottle.actuation.server.request_handler import request_from
from polythrottle.actuation.state.lease import Lease
from polythrottle.actuation.state.record import Record
from polythrottle.actuation.wire import error_from, space_from
from polythrottle.catalog.boards import load_board
from polythrottle.catalog.documents import read_archive
from polythrottle.catalog.tuned_profiles import read_profile
from polythrottle.cluster.catalogue import read_catalogue
from polythrottle.cluster.plan.deadline import read_availability
from polythrottle.cluster.recorded_tables import read_trace
from polythrottle.daemon.settings import read_settings
from polythrottle.daemon.traffic.engines import named
from polythrottle.daemon.traffic.server_metrics import counts_of
from polythrottle.daemon.web import messages
from polythrottle.daemon.web.messages import Refusal
from polythrottle.domain.errors import PolythrottleError
from polythrottle.metering.calibration import read_calibration, read_recording
from polythrottle.storage import arrival_trace, tables
from polythrottle.storage.journal.reader import heading, read
from polythrottle.storage.json_channel import decode
from polythrottle.training.beside.trainer.worker import LEDGER
from polythrottle.training.elastic.events import read_events
from polythrottle.workloads.onnx_model import check_weights

ROOT = Path(__file__).resolve().parent.parent
CORPORA = ROOT / "tests/corpora"
"""A folder for each reader, of documents it takes and of those that once were too much for it."""
REFUSED = (PolythrottleError, Refusal)
_WORDS = (
    *(b"0", b"-1", b"1e999", b"NaN", b"Infinity", b"9" * 30, b"9" * 5_000, b"1.5", b"null", b"true", b'""', b"[]"),
    *(b"{}", b"[" * 3_000, b'{"a":' * 1_500, b"\0", b"\xff", b"\xe2\x80\xae", b"\n", b"\r", b'"', b"'", b"\\", b","),
    *(b"=", b"inf", b"nan", b"2020-01-01T00:00:00Z", b"../..", b"1" * 150_000, b"#", b";", b"\t", b"\\ud800"),
)
_VALUES: tuple[Any, ...] = (
    *(
        None,
        True,
        False,
        0,
        1,
        -1,
        1.5,
        -0.0,
        1e308,
        10**30,
        2**63,
        float("nan"),
        float("inf"),
        "",
        "x",
        "\0",
        "é",
        "1",
    ),
    *([], {}, [[]], [None], {"": None}, {"a": {"a": []}}, [1, "a"], "x" * 3_000, "\ud800", [0] * 300),
)


@dataclass(frozen=True)
class Parser:
    """A reader.

    Args:
        name: Also of its folder in the corpora.
        read: Takes a file.
        file: What the file is called.
        beside: Documents of the repository that it takes.
        sealed: Makes the checksums of its lines anew.
    """

    name: str
    read: Callable[[Path], object]
    file: str = "file"
    beside: tuple[str, ...] = ()
    sealed: Callable[[bytes], bytes] = bytes

    @property
    def seeds(self) -> list[bytes]:
        """Return its corpus."""
        return _seeds(self.name, self.beside)

    def feed(self, folder: Path, data: bytes) -> bool:
        """Return whether the reader takes bytes; whatever else than a refusal it raises is raised."""
        path = folder / self.file
        path.write_bytes(data)
        path.chmod(0o600)
        try:
            self.read(path)
        except REFUSED:
            return False
        return True

    def damaged(self, chance: random.Random) -> bytes:
        """Return a document of the corpus with something wrong in it."""
        data = chance.choice(self.seeds)
        for _ in range(chance.choice((1, 1, 2, 4))):
            data = _cut(data, chance) if chance.random() < 0.5 else _replaced(data, chance)
        return self.sealed(data) if chance.random() < 0.9 else data


@cache
def _seeds(name: str, beside: tuple[str, ...]) -> list[bytes]:
    folder = CORPORA / name
    kept = sorted(folder.iterdir()) if folder.is_dir() else []
    return [path.read_bytes() for path in (*kept, *(ROOT / each for each in beside))]


def _cut(data: bytes, chance: random.Random) -> bytes:
    """Return bytes with some of them left out, doubled, changed, or others put in."""
    begin = chance.randrange(len(data) + 1)
    end = min(len(data), begin + chance.choice((0, 1, 1, 2, 8, 64, 1024)))
    word = chance.choice(_WORDS) if chance.random() < 0.6 else chance.randbytes(chance.choice((1, 1, 4, 32)))
    part = chance.choice((b"", word, word, data[begin:end] * 2))
    return data[:begin] + part + data[end:]


def _replaced(data: bytes, chance: random.Random) -> bytes:
    """Return JSON lines with a value somewhere replaced, left out or under another key; as it is if there are none."""
    lines = data.split(b"\n")
    place = chance.randrange(len(lines))
    try:
        document = json.loads(lines[place])
    except (ValueError, RecursionError):
        return _cut(data, chance)
    places = list(_places(document))
    if not places:
        return _cut(data, chance)
    outer, key = chance.choice(places)
    if chance.random() < 0.2:
        del outer[key]
    else:
        outer[key] = chance.choice(_VALUES)
    lines[place] = json.dumps(document).encode()
    return b"\n".join(lines)


def _places(value: Any) -> Iterator[tuple[Any, Any]]:
    keys = value.keys() if isinstance(value, dict) else range(len(value)) if isinstance(value, list) else ()
    for key in keys:
        yield value, key
        yield from _places(value[key])


def _sealed_lines(first: bool) -> Callable[[bytes], bytes]:
    def sealed(data: bytes) -> bytes:
        return b"\n".join(_sealed_line(line, first) for line in data.split(b"\n"))

    return sealed


def _sealed_line(line: bytes, first: bool) -> bytes:
    """Return a line of a record or a ledger with the checksum it should have."""
    try:
        document = json.loads(line)
        document.pop("crc", None)
        crc = zlib.crc32(json.dumps(document, sort_keys=first).encode())
        return json.dumps({**document, "crc": crc}).encode()
    except (ValueError, AttributeError, TypeError, RecursionError):
        return line


def _gzipped(data: bytes) -> bytes:
    return gzip.compress(data, 1, mtime=0)


def _journal(path: Path) -> object:
    with suppress(PolythrottleError):
        heading(path)
    return read(path)


def _record(path: Path) -> object:
    Audit(path, "jetson", "boot").unsettled(Lease(1, "boot", dirty=True))
    return Record(path, None, "boot").entries


def _message(path: Path) -> object:
    """Read a line as the actuator and as its client do."""
    message = decode(path.read_bytes())
    error_from(message.get("error"))
    with suppress(PolythrottleError):
        space_from(message.get("space", message))
    return request_from(message)


def _metrics(path: Path) -> object:
    text = path.read_bytes().decode(errors="replace")
    return counts_of(text, [named("served_seconds")])


def _body(path: Path) -> object:
    data = path.read_bytes()
    parts: list[Message] = [{"type": "http.request", "body": data, "more_body": False}]

    async def receive() -> Message:
        return parts.pop() if parts else {"type": "http.disconnect"}

    scope = {"type": "http", "method": "POST", "path": "/", "headers": [(b"content-type", b"application/json")]}
    return _loop().run_until_complete(_bodies(scope, receive))


async def _bodies(scope: dict[str, Any], receive: Any) -> None:
    schema = {
        "type": "object",
        "properties": {key: {} for key in ("for_s", "power_w", "point", "profile")},
        "required": [],
        "additionalProperties": False,
    }
    await messages.read_body(Request(scope, receive), schema)


@cache
def _loop() -> asyncio.AbstractEventLoop:
    return asyncio.new_event_loop()


PARSERS: tuple[Parser, ...] = (
    Parser("profile", read_profile, "p.toml", ("examples/orin-efficientnet-b4.toml",)),
    Parser(
        "journal", _journal, "j.jsonl",
        ("tests/data/journal-v1.jsonl", "tests/data/journal-v2.jsonl", "tests/data/journal-v2-intervals.jsonl"),
    ),
    Parser("record", _record, "jetson@boot", (), _sealed_lines(True)),
    Parser("ledger", lambda path: counted_entries(path.parent, 3), LEDGER, (), _sealed_lines(False)),
    Parser("board", lambda path: load_board(str(path)).space(), "b.toml", ("devices/jetson-nano.toml",)),
    Parser("table", lambda path: tables.read(path).typed(), "t.csv"),
    Parser("arrivals", arrival_trace.recorded, "t.csv"),
    Parser("trace", read_trace, "t.csv"),
    Parser("availability", read_availability, "t.json"),
    Parser("settings", read_settings, "daemon.toml"),
    Parser("permits", Permits.read, "permits.toml"),
    Parser("limits", Limits.read, "limits.toml", ("packaging/limits.toml",)),
    Parser("calibration", read_calibration, "c.json", ("tests/data/calibration-1.json",)),
    Parser("recording", read_recording, "r.csv"),
    Parser("archive", read_archive, "b.tar.gz", (), _gzipped),
    Parser("catalogue", read_catalogue, "c.toml", ("examples/cluster-gcp-2019.toml",)),
    Parser("events", lambda path: read_events(path.parent), "events.jsonl"),
    Parser("onnx", check_weights, "m.onnx"),
    Parser("actuator", _message, "line"),
    Parser("metrics", _metrics, "metrics"),
    Parser("body", _body, "body.json"),
)  # fmt: skip
