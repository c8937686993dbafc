"""A tree on disk, what its kernel remembers besides, and what is done to it: faults, and the log of every write.

All of it is shared by every process that uses the tree. Faults say what goes wrong at which access, which files answer
EAGAIN, and which folders get another name. The log has two lines for each write, one before it takes effect and one
after; it survives SIGKILL.
"""

import builtins
import errno
import fcntl
import fnmatch
import io
import json
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal
from unittest import mock

from polythrottle.domain.errors import InvalidInput

_open = open  # as it is now: what stands between other readers and the tree is not for the kernel itself


def refusal(number: int, path: str) -> OSError:
    """Return the error a system call ends with."""
    return OSError(number, os.strerror(number), path)


@dataclass
class Memory:
    """What the kernel knows and no file shows.

    Args:
        board: Name of the board that was planted; None for a tree of unknown origin, whose rails then stand still.
        load: Share of time the processors are busy, 0 to 1.
        held_back: By what share processors run slower than their governors ask; 0 if they do not.
        asleep: Whether the GPU is powered down whenever nothing keeps it awake.
        refuses: Whether limits that cross are refused (Linux before 5.5) or the lower one gives way (since then,
            limits are wishes that the kernel brings together: "PM / devfreq: Use PM QoS for sysfs min/max_freq").
        wishes: The limits that were asked for, by file; those that hold are in the files.
        boots: How often the board has been started.
        writes: How many writes have reached it.
        shift: What the last start added to the numbers of hwmon folders.
    """

    board: str | None = None
    load: float = 1.0
    held_back: float = 0.0
    asleep: bool = False
    refuses: bool = False
    wishes: dict[str, int] = field(default_factory=dict)
    boots: int = 1
    writes: int = 0
    shift: int = 0


class Machine:
    """One tree.

    Args:
        root: Where ``/`` of the board is.
    """

    def __init__(self, root: Path) -> None:
        self.root = Path(os.path.realpath(root))
        self.beside = self.root.with_name(f"{self.root.name}.kernel")
        self.memory = Memory()
        # A session reads thousands of files, and to join paths as text takes a tenth of what it takes as `Path`.
        self._root_text = str(self.root)
        self._memory_file = f"{self.beside}/memory.json"
        self._lock_file = f"{self.beside}/lock"

    @contextmanager
    def held(self) -> Iterator[None]:
        """Keep other processes and threads out; the kernel drops the lock of a process that dies."""
        flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC
        try:
            handle = os.open(self._lock_file, flags, 0o600)
        except FileNotFoundError:
            self.beside.mkdir(exist_ok=True)
            handle = os.open(self._lock_file, flags, 0o600)
        try:
            fcntl.flock(handle, fcntl.LOCK_EX)
            self.recall()
            yield
        finally:
            os.close(handle)

    def recall(self) -> None:
        """Read what the kernel remembers."""
        try:
            with _open(self._memory_file, encoding="utf-8") as file:
                self.memory = Memory(**json.load(file))
        except FileNotFoundError:
            old = self.has("/proc/sys/kernel/osrelease") and self.read("/proc/sys/kernel/osrelease").startswith("4.")
            self.memory = Memory(refuses=bool(old))

    def remember(self) -> None:
        """Write what the kernel remembers."""
        replace(self._memory_file, json.dumps(vars(self.memory)))

    def real(self, path: str) -> str:
        """Return where a path leads, seen from inside the tree.

        Raises:
            OSError: If it leads out of the tree.
        """
        leads = os.path.realpath(path)
        if not leads.startswith(f"{self._root_text}/"):
            raise refusal(errno.EACCES, path)
        return leads.removeprefix(self._root_text)

    def inside(self, path: str) -> str:
        """Return where a path of the board, such as ``/sys/class/hwmon``, leads inside the tree."""
        return self.real(f"{self._root_text}{path}")

    def has(self, path: str) -> bool:
        """Return whether the board has a file or folder."""
        return os.path.exists(self._named(path))

    def place(self, path: str) -> Path:
        """Return where a path of the board is on this machine."""
        return Path(self._named(path))

    def _named(self, path: str) -> str:
        return f"{self._root_text}/{path.lstrip('/')}"

    def read(self, path: str) -> str:
        """Return what a file of the board holds, without whitespace around it."""
        with _open(self._named(path), encoding="utf-8", errors="replace") as file:
            return file.read().strip("\n\0 ")

    def number(self, path: str) -> int:
        """Return the number a file of the board holds."""
        return int(self.read(path))

    def numbers(self, path: str) -> list[int]:
        """Return the numbers a file of the board holds, ascending; none if there is no such file."""
        if self.has(path):
            return sorted(map(int, self.read(path).split()))
        return []

    def put(self, path: str, value: object) -> None:
        """Change a file of the board in place, so that who holds it open sees it, and never a torn value."""
        handle = os.open(self._named(path), os.O_RDWR | os.O_CLOEXEC)
        try:
            data = f"{value}\n".encode()
            os.pwrite(handle, data.ljust(os.fstat(handle).st_size, b"\n"), 0)
            os.ftruncate(handle, len(data))
        finally:
            os.close(handle)

    def names(self, folder: str) -> list[str]:
        """Return the names in a folder of the board, sorted; none if there is no such folder."""
        place = self._named(folder)
        if os.path.isdir(place):
            return sorted(os.listdir(place))
        return []


def replace(file: Path | str, text: str) -> None:
    """Replace a file at once: a process that dies leaves the old one or the new one."""
    fresh = f"{file}.{os.getpid()}"
    with _open(fresh, "w", encoding="utf-8") as handle:
        handle.write(text)
    os.replace(fresh, file)


@dataclass(frozen=True)
class Write:
    """One write that reached the kernel.

    Args:
        key: Where to, as the caller named it.
        text: What was written.
        before: What the file held; None if it could not be read.
        after: What it held then; None if it could not be read, or the process died in between.
        outcome: ``ok``, the name of the error such as ``EINVAL``, ``refused`` by nvpmodel, or ``died``.
        by: ``us``, or ``foreign`` for a writer that a fault played.
        pid: Process that wrote.
    """

    key: str
    text: str
    before: str | None
    after: str | None
    outcome: str
    by: str
    pid: int


class WriteLog:
    """The file of it.

    Args:
        file: Where.
    """

    def __init__(self, file: Path) -> None:
        self.file = file

    def begin(self, number: int, key: str, text: str, before: str | None, by: str) -> None:
        """Note a write that is about to happen."""
        head = {"write": number, "pid": os.getpid(), "by": by}
        self._append({**head, "key": key, "text": text, "before": before})

    def end(self, number: int, outcome: str, after: str | None) -> None:
        """Note what became of it."""
        self._append({"write": number, "outcome": outcome, "after": after})

    def _append(self, line: Mapping[str, object]) -> None:
        handle = os.open(self.file, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            os.write(handle, f"{json.dumps(line)}\n".encode())
        finally:
            os.close(handle)

    def writes(self) -> tuple[Write, ...]:
        """Return every write so far, in order."""
        begun: dict[int, dict[str, Any]] = {}
        text = ""
        if self.file.exists():
            text = self.file.read_text(encoding="utf-8")
        for line in map(json.loads, text.splitlines()):
            begun.setdefault(line["write"], {"outcome": "died", "after": None}).update(line)
        return tuple(Write(**{key: line[key] for key in Write.__dataclass_fields__}) for line in begun.values())


# Faults that a test scripts: what goes wrong at which read or write; counted on disk, so across processes.

_ACTS = ("round", "ignore", "vanish", "renumber", "foreign", "die_before", "die_after")


@dataclass(frozen=True)
class Fault:
    """Something that goes wrong.

    Args:
        act: The name of an error, such as ``EIO`` or ``EAGAIN``, which the call ends with and nothing happens;
            ``round``: the file takes the step below, or ``value``; ``ignore``: it keeps what it had, without an error;
            ``vanish``: the file is gone; ``renumber``: the folder ``path`` (a name in ``/sys/class/hwmon`` or
            ``/sys/class/devfreq``) is called ``value`` before the call; ``foreign``: after the call somebody else
            writes ``value`` to ``path``, by default to the same file; ``die_before`` and ``die_after``: SIGKILL to the
            calling process.
        nth: At which of the calls that match, from 1.
        on: Whether reads or writes are counted.
        match: Which keys are counted: a pattern of `fnmatch` over the whole key.
        times: How many calls in a row it happens to; 0 for all from then on.
        value: See ``act``.
        path: See ``act``.
    """

    act: str
    nth: int = 1
    on: Literal["read", "write"] = "write"
    match: str = "*"
    times: int = 1
    value: str | None = None
    path: str | None = None

    def __post_init__(self) -> None:
        if self.act not in _ACTS and not (self.act.startswith("E") and hasattr(errno, self.act)):
            raise InvalidInput(f"a fault acts as {', '.join(_ACTS)} or as an error such as EIO, not as {self.act!r}")
        if self.nth < 1 or self.times < 0 or self.on not in ("read", "write"):
            raise InvalidInput("a fault happens on read or write, from call 1 on, at least 0 times")
        if (self.act == "foreign" and self.value is None) or (
            self.act == "renumber" and (self.value is None or self.path is None)
        ):
            raise InvalidInput(f"{self.act} needs a value, renumber a path too")


class Script:
    """The faults of a tree and how often each has been passed.

    Args:
        folder: Where ``faults.json`` is; people may write it by hand: a list of the fields of `Fault`.
    """

    def __init__(self, folder: Path) -> None:
        self._file = folder / "faults.json"

    def add(self, faults: tuple[Fault, ...]) -> None:
        """Add faults to those that are there."""
        replace(self._file, json.dumps(self._load() + [asdict(fault) for fault in faults], indent=1))

    def clear(self) -> None:
        """Forget every fault."""
        self._file.unlink(missing_ok=True)

    def _load(self) -> list[dict[str, Any]]:
        return json.loads(self._file.read_text(encoding="utf-8")) if self._file.exists() else []

    def due(self, on: str, key: str) -> list[Fault]:
        """Count one call and return the faults that happen to it."""
        lines = self._load()
        due = []
        passed = [line for line in lines if line.get("on", "write") == on]
        for line in passed:
            fault = Fault(**{name: value for name, value in line.items() if name != "passed"})
            if not fnmatch.fnmatchcase(key, fault.match):
                continue
            count = line["passed"] = line.get("passed", 0) + 1
            if count >= fault.nth and (fault.times == 0 or count < fault.nth + fault.times):
                due.append(fault)
        if passed:
            replace(self._file, json.dumps(lines, indent=1))
        return due


# Files that answer EAGAIN, as those of a gated sensor do: to every reader in this process, as the kernel would.
#
# The thermal zones of a sensor that is powered down answer so, and others now and then under load (swsususu/ThorFAN,
# README; seen on Orin too). ``read(2)`` ends with EAGAIN; CPython's own files take that for "nothing yet" and hand
# None on, of which text files make ``TypeError: can't concat NoneType to bytes``.

Silent = Callable[[str], bool]


@contextmanager
def silence(silent: Silent) -> Iterator[None]:
    """Let reads of some files end with EAGAIN: by descriptor, and as CPython's files pass it on.

    Args:
        silent: Says of a path, links followed, whether it answers so now; asked at every read.
    """
    with ExitStack() as stack:
        for name in ("read", "pread"):
            stack.enter_context(mock.patch.object(os, name, _refusing(getattr(os, name), silent)))
        opened = _opening(io.open, silent)
        stack.enter_context(mock.patch.object(io, "open", opened))
        stack.enter_context(mock.patch.object(builtins, "open", opened))
        yield


def _refusing(usual: Callable[..., bytes], silent: Silent) -> Callable[..., bytes]:
    def read(handle: int, *rest: int) -> bytes:
        try:
            path = os.readlink(f"/proc/self/fd/{handle}")
        except OSError:  # the descriptor is closed, or there is no /proc: the usual call says so
            return usual(handle, *rest)
        if silent(path):
            raise BlockingIOError(errno.EAGAIN, os.strerror(errno.EAGAIN))
        return usual(handle, *rest)

    return read


class _Gated(io.RawIOBase):
    """A file whose reads end with EAGAIN, as CPython's own (`io.FileIO`) hands that on."""

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> None:
        return None


def _opening(usual: Callable[..., Any], silent: Silent) -> Callable[..., Any]:
    def opened(file: Any, mode: str = "r", *rest: Any, **options: Any) -> Any:
        path = ""
        if isinstance(file, str | os.PathLike):
            path = os.path.realpath(os.fspath(file))
        if not path or set(mode) & set("wax+") or not os.path.isfile(path) or not silent(path):
            return usual(file, mode, *rest, **options)
        buffer = io.BufferedReader(_Gated())
        if "b" in mode:
            return buffer
        return io.TextIOWrapper(buffer, encoding="utf-8")

    return opened


# Folders that get another name between two boots, or two reads.


def renumber(machine: Machine, path: str, name: str) -> None:
    """Rename the folder that a link in ``/sys/class`` leads to, and the links to it.

    Args:
        machine: Whose tree.
        path: The link, such as ``/sys/class/hwmon/hwmon3``.
        name: What it is called then; another folder of that name takes the old one's place.

    Raises:
        OSError: If there is no such link.
    """
    folder, _, old = path.rpartition("/")
    if not machine.has(path):
        raise refusal(errno.ENOENT, path)
    if machine.has(f"{folder}/{name}"):
        _move(machine, folder, name, f"{name}-moving")
        _move(machine, folder, old, name)
        _move(machine, folder, f"{name}-moving", old)
    else:
        _move(machine, folder, old, name)


def _move(machine: Machine, folder: str, old: str, name: str) -> None:
    link = machine.place(f"{folder}/{old}")
    real = machine.place(machine.inside(f"{folder}/{old}"))
    target = str(link.readlink())
    real.rename(real.with_name(name))
    link.unlink()
    machine.place(f"{folder}/{name}").symlink_to(f"{target.rpartition('/')[0]}/{name}")
    short = real.parent.parent / "devfreq_dev"
    if short.is_symlink():
        short.unlink()
        short.symlink_to(f"devfreq/{name}")
