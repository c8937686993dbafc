"""Files that somebody else has named: plain ones alone, up to a bound, without waiting for anybody."""

import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from polythrottle.actuation import Limits
from polythrottle.actuation.server.permits import Permits
from polythrottle.backends.meters.file_meters import CsvMeter, HwmonMeter
from polythrottle.catalog.documents import read_archive
from polythrottle.cli.daemon import _token
from polythrottle.cluster.notice_sources import FileSource
from polythrottle.cluster.plan.deadline import _of_json
from polythrottle.daemon.settings import read_settings
from polythrottle.daemon.web.access import Tcp
from polythrottle.domain.errors import BadFile
from polythrottle.metering.calibration import read_calibration, read_recording
from polythrottle.storage import tables
from polythrottle.storage.arrival_trace import recorded
from polythrottle.storage.documents import TomlTable
from polythrottle.storage.identity import content_digest
from polythrottle.storage.journal import read
from polythrottle.storage.journal.reader import heading, holds_study
from polythrottle.storage.untrusted import check_plain, parse_toml, read_plain
from polythrottle.workloads.onnx_model import check_weights
from polythrottle.workloads.services.openai import prompts_of


def test_a_plain_file_is_read_whole_up_to_its_bound(tmp_path: Path) -> None:
    """Also through a link; one byte more is refused."""
    path = tmp_path / "a"
    path.write_bytes(b"x" * 3_000_000)
    (tmp_path / "link").symlink_to("a")
    assert read_plain(tmp_path / "link", 3_000_000) == b"x" * 3_000_000
    for most, words in ((2_999_999, "larger than 3 MB"), (1000, "larger than 1 kB")):
        with pytest.raises(BadFile, match=words):
            read_plain(path, most)


def test_what_is_no_plain_file_is_not_waited_for(tmp_path: Path) -> None:
    """A pipe without a writer, a device without end, a folder, a link to itself, the kernel's own files."""
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "loop").symlink_to("loop")
    (tmp_path / "kernel").symlink_to("/proc/self/status")
    (tmp_path / "empty").touch()
    found = {
        "pipe": "no plain file",
        "loop": "symbolic link",
        "kernel": "the kernel.s own",
        "empty": "is empty",
        "none": "No such file",
        "": "a folder",
        "/dev/zero": "no plain file",
        "x\0y": "null",
    }
    for name, words in found.items():
        with pytest.raises(BadFile, match=words):
            read_plain(tmp_path / name, 1000)


@pytest.fixture
def impatient() -> Iterator[None]:
    """Break off what waits for ever: nothing here is waited for."""

    def late(*_: object) -> None:
        raise AssertionError("it waits")

    before = signal.signal(signal.SIGALRM, late)
    signal.alarm(30)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)


READERS: dict[str, Callable[[Path], object]] = {
    "journal": read,
    "heading": heading,
    "study": holds_study,
    "table": tables.read,
    "arrivals": recorded,
    "snapshot": read_archive,
    "model": content_digest,
    "onnx": check_weights,
    "prompts": lambda path: prompts_of(str(path)),
    "log": CsvMeter,
    "hwmon": HwmonMeter,
    "token": _token,
    "own token": lambda path: Tcp("127.0.0.1", 1, token_file=path).token(),
    "notice": lambda path: FileSource(path).poll(),
    "availability": lambda path: _of_json(path, 2),
    "calibration": read_calibration,
    "recording": read_recording,
}


@pytest.mark.usefixtures("impatient")
@pytest.mark.parametrize("reader", READERS.values(), ids=READERS)
def test_no_reader_of_a_file_that_was_named_waits(reader: Callable[[Path], object], tmp_path: Path) -> None:
    """Neither for who writes into a pipe, nor for the kernel's news, which lie in what calls itself a plain file."""
    (tmp_path / "pipe").mkdir()
    pipe = tmp_path / "pipe" / "power1_input"
    os.mkfifo(pipe)
    with pytest.raises(BadFile, match=r"no plain file|not a regular file|no file that"):
        reader(pipe)
    if reader is not HwmonMeter:  # whose names are not those
        with pytest.raises(BadFile, match=r"/proc/kmsg cannot be read: it is one of the kernel's own"):
            reader(Path("/proc/kmsg"))


def test_what_lies_on_disk_and_what_is_not_there_pass(tmp_path: Path) -> None:
    """Also what is empty or reached through /proc, and sysfs; what is not there is its reader's to tell."""
    (tmp_path / "a").touch()
    with open(tmp_path / "a") as file:
        check_plain(f"/proc/self/fd/{file.fileno()}")
    check_plain("/sys/devices/system/cpu/online")
    check_plain(tmp_path / "none")


@pytest.mark.parametrize(
    "text",
    [
        f"a{'.a' * 20_000} = 1",
        f"[a{'.a' * 20_000}]",
        f"a{' . a' * 20_000} = 1",
        f"""{'."b=c"' * 5000} = 1""".replace(".", "", 1),
        f"""{".'b,c'" * 5000} = 1""".replace(".", "", 1),
    ],
)
def test_a_key_of_thousands_of_parts_is_refused(text: str) -> None:
    """Python's reader would need gigabytes for one of 256 kB."""
    with pytest.raises(ValueError, match="more than 64 parts"):
        parse_toml(text.encode())


def test_a_byte_order_mark_is_no_part_of_a_document() -> None:
    """Editors on Windows begin a file with it."""
    assert parse_toml(b"\xef\xbb\xbfa = 1\r\n") == {"a": 1}


def test_dots_outside_of_keys_are_no_parts() -> None:
    """In numbers, texts and addresses there may be any number, and what has no end is gone through once."""
    words = "one. " * 100
    document = f'a = [{"0.5, " * 100}]\n# {", ".join([words[:90]] * 3)}\nb = "{words}"\nc.d.e = 1.5\n'
    assert parse_toml(document.encode()) == {"a": [0.5] * 100, "b": words, "c": {"d": {"e": 1.5}}}
    for endless in ('a = "' + '\\"' * 300_000 + "." * 65, "a" * 600_000 + "." * 65, "'" * 400_001 + "." * 65):
        with pytest.raises(ValueError, match=r"."):
            parse_toml(endless.encode())


def _limits(file: Path) -> object:
    return Limits.read(file)


def _board(file: Path) -> object:
    return TomlTable.of_file(file)


@pytest.mark.parametrize("reader", [_limits, _board, Permits.read, read_settings])
@pytest.mark.parametrize("what", ["a key of absurdly many parts", "a file of absurd size"])
def test_every_reader_of_toml_has_its_bounds(tmp_path: Path, reader: Callable[[Path], object], what: str) -> None:
    """Limits, permits, a simulated board's file and the daemon's settings: one line, and no memory to speak of."""
    file = tmp_path / "x.toml"
    file.write_text(".".join("a" * 5000) + " = 1\n")
    if what == "a file of absurd size":
        os.truncate(file, 1 << 40)
    file.chmod(0o600)
    with pytest.raises(BadFile, match="parts" if what.startswith("a key") else r"larger|large") as told:
        reader(file)
    assert "\n" not in str(told.value)
