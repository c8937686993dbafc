"""The URIs of devices: taken apart, opened as the devices they mean, and several of them asked at once.

One that does not answer holds up none of the others.
"""

from __future__ import annotations

import os
import re
import shlex
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from queue import Empty, Queue
from typing import TYPE_CHECKING, Generic, TypeVar

from polythrottle.actuation.drivers.controls import is_named
from polythrottle.backends.probe import find_device
from polythrottle.domain.backports import removeprefix
from polythrottle.domain.clock import Clock, SystemClock, Thread
from polythrottle.domain.errors import BadFile, DeviceError, InvalidInput, PolythrottleError, UnknownName
from polythrottle.domain.ports import Device, Recorded
from polythrottle.domain.units import knob_name
from polythrottle.storage.untrusted import read_plain, shortened

if TYPE_CHECKING:
    from polythrottle.backends.simulated.node import SimulatedGroup


FORMS = (
    "sim:<board>[?seed=7&noise=0.02], sim:node[/0-3][?gpus=8xh100], replay:<table.csv[.gz]>, jetson, "
    "nvml:<index, UUID, 0-7, 0,2 or all>, cpu, auto, "
    "actuator:[<socket>][?device=<one of these>], "
    "ssh://[user@]host[:port][/<a device there>]; each with ?meter=<a meter>"
)
SCHEMES = ("auto", "cpu", "sim", "replay", "jetson", "nvml", "actuator", "ssh")
_FAR_FORMS = "over SSH it is jetson, nvml:<index, UUID, 0-7, 0,2 or all>, cpu or auto"
_HERE = ("auto", "cpu", "sim", "replay", "jetson", "nvml")
"""The schemes of what is on this machine, wherever a URI comes from."""


@dataclass(frozen=True)
class DeviceURI:
    """A device URI taken apart: ``sim:jetson-agx-orin?seed=7`` is scheme, name and options, and its meter's URI."""

    scheme: str
    name: str
    options: Mapping[str, str]
    meter: str = ""

    @classmethod
    def parse(cls, text: str) -> DeviceURI:
        """Return the parts of a device URI.

        Raises:
            InvalidInput: If an option is not of the form ``key=value`` or is given twice.
            UnknownName: If the scheme is not known.
        """
        own, meter = _apart(text)
        _check_one(own)
        body, _, query = own.partition("?")
        scheme, _, name = body.partition(":")
        if scheme not in SCHEMES:
            _check_board(own, body)
            raise UnknownName("device", text, SCHEMES, hint=f"(a device is one of {FORMS})", listed=False)
        options: dict[str, str] = {}
        for part in filter(None, query.split("&")):
            key, found, value = part.partition("=")
            if not (key and found and value) or key in options:
                raise InvalidInput(f"{part!r} in {text!r} is not an option; write for example ?seed=7&noise=0.02")
            options[key] = value
        return cls(scheme, name, options, meter)

    @property
    def several(self) -> bool:
        """Whether it names a group of GPUs: ``nvml:0-7``, ``nvml:0,2``, ``nvml:all``."""
        from polythrottle.backends.nvml import means_several

        return self.scheme == "nvml" and means_several(self.name)

    def only(self, *known: str) -> None:
        """Check that no option but the known ones is given.

        Raises:
            UnknownName: If another is.
        """
        for key in self.options:
            if key not in known:
                raise UnknownName(f"option of {self.scheme}:", key, known)

    def number(self, key: str, fallback: float) -> float:
        """Return a numeric option.

        Raises:
            InvalidInput: If it is not a number.
        """
        try:
            return float(self.options.get(key, fallback))
        except ValueError:
            raise InvalidInput(f"{key}={self.options[key]} is not a number") from None

    def count(self, key: str, fallback: int) -> int:
        """Return an option that is a whole number, not negative.

        Raises:
            InvalidInput: If it is not.
        """
        text = self.options.get(key, str(fallback))
        if not text.isdecimal():
            raise InvalidInput(f"{key}={text} is not a whole number of 0 or more")
        return int(text)


def _apart(text: str) -> tuple[str, str]:
    """Return a device's URI and its meter's; "" where it has none, so that a board needs no meters."""
    if "meter=" not in text:
        return text, ""
    from polythrottle.backends.meters import meter_apart

    return meter_apart(text)


def _check_one(text: str) -> None:
    """Refuse what means several devices where one is meant."""
    if text.startswith(_FILE):
        raise InvalidInput(
            f"{text} is a file of boards, which boards, tune, apply and restore take; name one device here"
        )
    several = _NEXT.split(text)
    if len(several) > 1:
        raise InvalidInput(f"{several[0]} and {several[1]} are two devices; name one here")


def _check_board(text: str, name: str) -> None:
    """Say how a board of the catalogue is written, where its bare name was given."""
    from polythrottle.catalog import names

    if name in names("devices"):
        raise UnknownName(
            "device", text, (), hint=f"(for the simulated board write sim:{text}; jetson is the real one)"
        )


def check_uri(text: str) -> None:
    """Refuse a malformed device URI, also one of a board over SSH, which nobody here opens; nobody is asked.

    Raises:
        InvalidInput: If it is malformed.
        UnknownName: If the scheme is not known.
    """
    uri = DeviceURI.parse(text)
    if uri.scheme == "ssh":
        from polythrottle.board.link import Place

        check_far(Place.parse(uri.name, uri.options).device)


def check_far(device: str) -> None:
    """Refuse a device of a board over SSH that is none anywhere, and say which there are; nobody is asked.

    Args:
        device: Its URI on the board; what ``auto`` means there if "".

    Raises:
        UnknownName: If its scheme is not known.
    """
    name = device.partition("?")[0]
    if name and name.partition(":")[0] not in SCHEMES:
        known = ("auto", "cpu", "jetson", "nvml")
        raise UnknownName("device", name, known, hint=f"({_FAR_FORMS})", listed=False)


def check_named(text: str, file: Path | str) -> None:
    """Refuse the device URI of a file that leads to something only the file names: whoever wrote it may be a stranger.

    This machine's own devices are there to be named by anybody. A tree of files that stands for a machine's own, a
    socket and another machine are not, unless the user names them; a tree that this process was told of has been named.

    Args:
        text: The device URI.
        file: Where it was read.

    Raises:
        InvalidInput: If it does; says how the user names it.
    """
    what = _led_to(text, _is_here)
    if not what:
        return
    raise InvalidInput(
        f"{file} would steer {what}, which nobody but that file has named; if that is meant, name it too: "
        f"--device {shlex.quote(text)}"
    )


def names_more_than_here(text: str) -> bool:
    """Say whether a device's URI leads to more than this machine's own devices: no file may name that alone."""
    return bool(_led_to(text, lambda tree: tree == "/"))


def _led_to(text: str, here: Callable[[str], bool]) -> str:
    """Return what a device's URI leads to besides this machine's own devices; "" if nothing.

    Args:
        text: The URI.
        here: Says whether a tree of files counts as this machine's own.
    """
    own, _ = _apart(text)
    body, _, query = own.partition("?")
    scheme, _, name = body.partition(":")
    trees = [part.partition("=")[2] for part in query.split("&") if part.startswith("root=")]
    if strange := next((tree for tree in trees if not here(tree)), None):
        return f"the files in {strange}"
    if scheme in SCHEMES and scheme not in _HERE and name:
        return f"what answers at {name}"
    return ""


def _is_here(text: str) -> bool:
    try:
        tree = Path(text).resolve()
    except (OSError, RuntimeError, ValueError):  # a loop of links, a name that no folder can have
        return False
    return tree == Path("/") or is_named(tree)


def open_device(
    text: str, knobs: Sequence[str] | None = None, accept: Callable[[Device], object] = lambda device: None
) -> Device:
    """Return the device a URI means; nothing on it is touched until it is entered.

    Args:
        text: One of `FORMS`; ``auto`` takes the real board, GPU or processor that is there, in that order. With
            ``meter=`` as its last option its joules are those of a meter (`polythrottle.backends.meters.FORMS`).
        knobs: Which knobs to search; the others stay at their default. All that the device searches by default if None.
        accept: Is called with the device before its meter is opened, which may be a program; raises if it will not do.

    Raises:
        InvalidInput: If the URI is malformed.
        UnknownName: If there is no such scheme, board, option or knob.
        BadFile: If the file it names is not what it should be.
        DeviceError: If the device is not there or cannot be steered.
    """
    uri = DeviceURI.parse(text)
    meter = uri.meter
    if meter and uri.scheme == "ssh":
        raise InvalidInput(f"{text}: a meter is read here, by another clock than the board's; leave it out over SSH")
    if uri.scheme == "auto":
        uri = DeviceURI.parse(find_device().uri)
    device = _OPENERS[uri.scheme](uri, None if knobs is None else [knob_name(name) for name in knobs])
    accept(device)
    if meter and isinstance(device, Recorded):
        raise InvalidInput(f"{device.uri} is a recorded table with joules of its own; leave the meter out")
    if meter:
        from polythrottle.backends.meters import metered, open_meter

        return metered(device, open_meter(meter))
    return device


def _simulated(uri: DeviceURI, knobs: Sequence[str] | None) -> Device:
    # Every kind of device is imported only where it is named: whoever names another need not load it.
    from polythrottle.backends.simulated import SimulatedDevice
    from polythrottle.catalog import load_board, names

    if not uri.name:
        raise InvalidInput("sim: needs the name of a board; polythrottle devices lists them")
    board, group = simulated_boards(uri)
    if uri.name not in names("devices") and Path(uri.name).is_dir():
        raise InvalidInput(
            f"{uri.name} is a folder; a simulated board is one of those that polythrottle devices lists, or a file: a "
            "board's .toml, or an archive that polythrottle snapshot makes"
        )
    if "knobs" in uri.options:
        named = [knob_name(name) for name in uri.options["knobs"].split(",")]
        if len(set(named)) < len(named):
            raise InvalidInput(f"knobs={uri.options['knobs']} names one twice; name each once")
    else:
        named = None
    searched = knobs if knobs is not None else named
    return SimulatedDevice(load_board(board), uri.count("seed", 0), uri.number("noise", 0.02), searched, group=group)


def simulated_boards(uri: DeviceURI) -> tuple[str, SimulatedGroup]:
    """Return the description of a simulated board that a URI means, and of how many it is.

    Raises:
        InvalidInput: If it is malformed.
        UnknownName: If it has an option, or means a GPU, that there is not.
    """
    from polythrottle.backends.simulated.node import ALONE, SimulatedNode, is_node

    if not is_node(uri.name):
        uri.only("seed", "noise", "knobs")
        return uri.name, ALONE
    uri.only("gpus", "seed", "noise", "knobs")
    node = SimulatedNode.parse(uri.options, uri.count("seed", 0))
    return node.group(uri.name, [f"gpus={uri.options['gpus']}"] if "gpus" in uri.options else [])


def _replay(uri: DeviceURI, knobs: Sequence[str] | None) -> Device:
    from polythrottle.backends.replay import ReplayDevice

    uri.only("seed", "noise")
    if not uri.name:
        raise InvalidInput("replay: needs the path of a table, for example replay:examples/cpu-convnet-sweep.csv")
    noise = uri.number("noise", 0.0)
    seed = uri.count("seed", 0)
    return ReplayDevice(Path(uri.name), noise=noise, seed=seed, knobs=knobs)


def _cpu(uri: DeviceURI, knobs: Sequence[str] | None) -> Device:
    from polythrottle.backends.cpu import CpuDevice

    if uri.name:
        raise InvalidInput(f"cpu is this machine's processor and takes no name, such as {uri.name!r}")
    return CpuDevice.open(uri.options, knobs)


def _jetson(uri: DeviceURI, knobs: Sequence[str] | None) -> Device:
    from polythrottle.backends.jetson import JetsonDevice

    if uri.name:
        raise InvalidInput(f"jetson is the board this runs on and takes no name, such as {uri.name!r}")
    return JetsonDevice.open(uri.options, knobs)


def _nvml(uri: DeviceURI, knobs: Sequence[str] | None) -> Device:
    from polythrottle.backends.nvml import open_nvml

    return open_nvml(uri.name, uri.options, knobs)


def _actuator(uri: DeviceURI, knobs: Sequence[str] | None) -> Device:
    from polythrottle.backends.remote import RemoteDevice

    return RemoteDevice.open(uri.name, uri.options, knobs)


def _ssh(uri: DeviceURI, knobs: Sequence[str] | None) -> Device:
    from polythrottle.backends.ssh import SshDevice
    from polythrottle.board.link import Place

    check_far(Place.parse(uri.name, uri.options).device)
    return SshDevice.of(uri.name, uri.options, knobs)


_OPENERS: Mapping[str, Callable[[DeviceURI, Sequence[str] | None], Device]] = {
    "sim": _simulated,
    "replay": _replay,
    "jetson": _jetson,
    "nvml": _nvml,
    "cpu": _cpu,
    "actuator": _actuator,
    "ssh": _ssh,
}


Found = TypeVar("Found")

MOST_AT_ONCE = 256
"""So many are asked at the same time: each has a thread, and over SSH a process."""
_POLL_S = 0.2
_NEXT = re.compile(rf",(?=(?:{'|'.join(SCHEMES)})(?:[:?,]|$))")


def uris_in(text: str) -> tuple[str, ...]:
    """Return the device URIs of a text in which commas stand between them: ``ssh://nano1,ssh://nano2``.

    A comma belongs to a URI where no scheme follows it, as in ``nvml:0,2``.

    Raises:
        InvalidInput: If one is there twice, or none follows a comma.
    """
    found = tuple(_NEXT.split(text))
    if empty := [each for each in found if each.endswith(",")]:
        raise InvalidInput(f"{empty[0]} ends with a comma; a device's URI follows each comma")
    check_distinct(found)
    return found


def check_distinct(uris: Sequence[str]) -> None:
    """Refuse a device that is named twice: two threads would steer one board.

    Raises:
        InvalidInput: If one is.
    """
    twice = next((uri for number, uri in enumerate(uris) if uri in uris[:number]), None)
    if twice is not None:
        raise InvalidInput(f"{twice} is named twice")


# Files of boards: one URI a line, in groups whose names stand in brackets, as in Ansible's inventories.

_FILE = "@"
_FILE_MOST_BYTES = 1_000_000
_BOARDS_MOST = 10_000
_NEXT_OR_FILE = re.compile(rf",(?={_FILE})|{_NEXT.pattern}")
_GROUP = re.compile(r"\[\s*([\w.-]{1,64})\s*\]")
_COMMENT = re.compile(r"(^|\s)#.*")


@dataclass(frozen=True)
class NamedBoard:
    """A board that a user names.

    Args:
        uri: Its device URI.
        group: The group of a file that it stands in; empty for none.
    """

    uri: str
    group: str = ""


def boards_named(text: str) -> tuple[NamedBoard, ...]:
    """Return the boards of a text in which commas stand between URIs, and between files of them.

    ``@fleet.txt`` is every board of a file, ``@fleet.txt:kitchen`` those of its section ``[kitchen]``. This is for what
    a user says: nothing that a journal or a profile names is read as a file of boards.

    Raises:
        InvalidInput: If a board is there twice, or none follows a comma.
        BadFile: If a file cannot be read, or a line of it is no board; names the line.
        UnknownName: If a file has no such group.
    """
    boards: list[NamedBoard] = []
    for part in _NEXT_OR_FILE.split(text):
        if part.startswith(_FILE):
            boards.extend(_boards_of(part[len(_FILE) :]))
        else:
            boards.extend(NamedBoard(uri) for uri in uris_in(part))
    check_distinct([each.uri for each in boards])
    return tuple(boards)


def with_files_read(text: str) -> str:
    """Return what a user names with the boards of each file in its place; a text without a file as it is.

    Raises:
        InvalidInput: As `boards_named`.
        BadFile: Likewise.
        UnknownName: Likewise.
    """
    if text.startswith(_FILE) or f",{_FILE}" in text:
        return ",".join(each.uri for each in boards_named(text))
    return text


def _boards_of(name: str) -> Sequence[NamedBoard]:
    """Return the boards of a file, or of one of its groups, whose name stands behind the last colon."""
    group = ""
    # A file's own name may have a colon; where there is such a file, it is meant.
    if ":" in name and not os.path.lexists(name):
        name, _, group = name.rpartition(":")
    if not name:
        raise InvalidInput("@ stands before the name of a file of boards, as in @fleet.txt or @fleet.txt:kitchen")
    groups = _groups_in(Path(name))
    if group and group not in groups:
        raise UnknownName(f"group of {name}:", group, filter(None, groups))
    boards = [board for each, members in groups.items() if group in ("", each) for board in members]
    if not boards:
        raise BadFile(f"{name} names no board there; write the URI of one on each line, such as ssh://nano1")
    return boards


def _groups_in(path: Path) -> Mapping[str, Sequence[NamedBoard]]:
    """Return the boards of a file by group; those above any group have the empty name."""
    groups: dict[str, list[NamedBoard]] = {}
    lines: dict[str, int] = {}
    group = ""
    for number, line in enumerate(_text_of(path).split("\n"), 1):
        words = _COMMENT.sub("", line).strip()
        try:
            if words.startswith("["):
                group = _group_name(words)
                groups.setdefault(group, [])
            elif words:
                _check_line(words, lines)
                lines[words] = number
                groups.setdefault(group, []).append(NamedBoard(words, group))
        except PolythrottleError as error:
            raise BadFile(f"{path}, line {number}: {error}") from error
    return groups


def _text_of(path: Path) -> str:
    data = read_plain(path, _FILE_MOST_BYTES)
    try:
        return data.decode("utf-8-sig")  # editors on Windows begin a file with a byte order mark
    except UnicodeDecodeError as error:
        number = data.count(b"\n", 0, error.start) + 1
        raise BadFile(f"{path}, line {number}: not text in UTF-8") from error


def _group_name(words: str) -> str:
    match = _GROUP.fullmatch(words)
    if match is None:
        raise InvalidInput(f"{shortened(words)} is no group; write its name in brackets, such as [kitchen]")
    return match[1]


def _check_line(words: str, lines: Mapping[str, int]) -> None:
    """Refuse a line that is not the URI of one board, or of one that another line names."""
    if words in lines:
        raise InvalidInput(f"{shortened(words)} stands in line {lines[words]} already")
    if len(lines) == _BOARDS_MOST:
        raise InvalidInput(f"more than {_BOARDS_MOST:,} boards are too many for one file")
    if words.split() != [words] or len(_NEXT.split(words)) > 1:
        raise InvalidInput(f"{shortened(words)} is more than one URI; write each on a line of its own")
    if words.partition(":")[0].partition("?")[0] not in SCHEMES or not words.isprintable():
        raise InvalidInput(f"{shortened(words)} is no board's URI; write for example ssh://nano1")
    # A meter may be a program, which would run because a file names it.
    if _apart(words)[1]:
        raise InvalidInput(f"{shortened(words)} has a meter; name a board with a meter on the command line")
    check_uri(words)


@dataclass(frozen=True)
class Answer(Generic[Found]):
    """What one device answered.

    Args:
        uri: The device.
        found: The answer; None if there was none.
        error: Why there was none.
    """

    uri: str
    found: Found | None = None
    error: PolythrottleError | None = None

    @property
    def words(self) -> str:
        """The error's, for where the device is named before them; "" where there is none."""
        return own_words(self.uri, self.error or "")


def own_words(uri: str, error: object) -> str:
    """Return an error's words for where its device is named before them: one of a board over SSH begins with that."""
    board = re.match("ssh://[^/?]*", uri)
    return str(error) if board is None else removeprefix(str(error), f"{board[0]}: ")


def at_once(
    uris: Sequence[str],
    ask: Callable[[str], Found],
    within_s: float,
    clock: Clock | None = None,
    over: Callable[[], str] = lambda: "",
) -> Iterator[Answer[Found]]:
    """Ask devices something, each in a thread of its own, and yield the answers as they come.

    Args:
        uris: Which, each once.
        ask: Asks one of them; the errors of the package it raises are answers.
        within_s: How long one may take, from when it is asked. What has not answered until then is given up: its thread
            ends with the process at the latest, and what it holds over SSH is restored there then.
        clock: By which that is told.
        over: Says why nobody who has not answered is waited for any longer, nor asked; "" while they are.

    Raises:
        DeviceError: If there are no more threads.
    """
    clock = clock or SystemClock()
    # No SimpleQueue: a wait that begins late may not end (`ended_calls` in training/beside/trainer/supervisor.py).
    answers: Queue[tuple[str, Found | None, BaseException | None]] = Queue()
    waiting = deque(uris)
    asked_s: dict[str, float] = {}

    def run(uri: str) -> None:
        try:
            answers.put((uri, ask(uri), None))
        except BaseException as error:  # raised again below, in the thread of whoever asked
            answers.put((uri, None, error))

    while waiting or asked_s:
        while waiting and len(asked_s) < MOST_AT_ONCE:
            uri = waiting.popleft()
            asked_s[uri] = clock.now()
            Thread(target=run, args=(uri,), name=f"polythrottle-{uri}", daemon=True).start()
        try:
            uri, found, error = answers.get(timeout=_POLL_S)
        except Empty:  # all that has been answered is told
            if why := over():
                yield from (Answer(late, error=DeviceError(why)) for late in (*asked_s, *waiting))
                return
        else:
            if asked_s.pop(uri, None) is not None:  # else it has been given up
                yield _answer(uri, found, error)
        for late in [each for each, since_s in asked_s.items() if clock.now() - since_s > within_s]:
            del asked_s[late]
            yield Answer(late, error=DeviceError(f"no answer within {within_s:g} s"))


def _answer(uri: str, found: Found | None, error: BaseException | None) -> Answer[Found]:
    if error is None or isinstance(error, PolythrottleError):
        return Answer(uri, found, error)
    raise error
