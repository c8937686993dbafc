"""Files that somebody else has named: plain ones alone, up to a bound, without waiting for anybody."""

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from polythrottle.actuation import Limits
from polythrottle.catalog.entry import Entry
from polythrottle.daemon.actuator.permits import Permits
from polythrottle.daemon.settings import read_settings
from polythrottle.errors import BadFile
from polythrottle.plainfile import contents, toml


def test_a_plain_file_is_read_whole_up_to_its_bound(tmp_path: Path) -> None:
    """Also through a link; one byte more is refused."""
    path = tmp_path / "a"
    path.write_bytes(b"x" * 3_000_000)
    (tmp_path / "link").symlink_to("a")
    assert contents(tmp_path / "link", 3_000_000) == b"x" * 3_000_000
    for most, words in ((2_999_999, "larger than 3 MB"), (1000, "larger than 1 kB")):
        with pytest.raises(BadFile, match=words):
            contents(path, most)


def test_what_is_no_plain_file_is_not_waited_for(tmp_path: Path) -> None:
    """A pipe without a writer, a device without end, a folder, a link to itself, the kernel's own files."""
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "loop").symlink_to("loop")
    (tmp_path / "kernel").symlink_to("/proc/self/status")
    (tmp_path / "empty").touch()
    found = {
        "pipe": "no plain file",
        "loop": "symbolic link",
        "kernel": "is empty",
        "empty": "is empty",
        "none": "No such file",
        "": "a folder",
        "/dev/zero": "no plain file",
        "x\0y": "null",
    }
    for name, words in found.items():
        with pytest.raises(BadFile, match=words):
            contents(tmp_path / name, 1000)


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
        toml(text.encode())


def test_dots_outside_of_keys_are_no_parts() -> None:
    """In numbers, texts and addresses there may be any number, and what has no end is gone through once."""
    words = "one. " * 100
    document = f'a = [{"0.5, " * 100}]\n# {", ".join([words[:90]] * 3)}\nb = "{words}"\nc.d.e = 1.5\n'
    assert toml(document.encode()) == {"a": [0.5] * 100, "b": words, "c": {"d": {"e": 1.5}}}
    for endless in ('a = "' + '\\"' * 300_000 + "." * 65, "a" * 600_000 + "." * 65, "'" * 400_001 + "." * 65):
        with pytest.raises(ValueError, match=r"."):
            toml(endless.encode())


def _limits(file: Path) -> object:
    return Limits.read(file)


def _board(file: Path) -> object:
    return Entry.of_file(file)


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
