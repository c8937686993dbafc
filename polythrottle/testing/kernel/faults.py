"""Faults of a fake kernel: what goes wrong at which access, files that answer EAGAIN.

Folders that get another name.
"""

import builtins
import errno
import fnmatch
import io
import json
import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal
from unittest import mock

from polythrottle.domain.errors import InvalidInput
from polythrottle.testing.kernel.machine import Machine, refusal, replace

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
