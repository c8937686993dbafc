"""The simulated board's knobs as files, which the real `Actuator` sets with its record and lease on a real disk.

What may fail is what `World` says: writes to the board, the disk of the records, the descriptors of a process.
"""

import errno
import json
import os
import resource
import shutil
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any
from unittest import mock

from polythrottle.actuation import Actuator, Control, Setting
from polythrottle.actuation.drivers.controls import ROOTS_VARIABLE, SysFiles
from polythrottle.actuation.restore import take_over
from polythrottle.actuation.state.record import Record
from polythrottle.actuation.state.site import boot_id
from polythrottle.domain.errors import PolythrottleError
from polythrottle.domain.space import Level, OperatingPoint, SearchSpace
from polythrottle.storage.paths import state_dir

NAME = "soak board"


class Controls:
    """The knobs of the board, one file each.

    Args:
        folder: For the files.
        space: Of the board.
    """

    def __init__(self, folder: Path, space: SearchSpace) -> None:
        self._folder, self._space = folder, space
        self._levels: dict[str, dict[str, Level]] = {
            knob.name: {str(level): level for level in knob.levels} for knob in space.knobs
        }
        self.refusal: int | None = None
        """The kernel's error for every write; 0 where a write is taken and another level holds afterwards."""
        folder.mkdir(parents=True)
        self.write(space.default)

    @property
    def point(self) -> OperatingPoint:
        """What the files hold."""
        return OperatingPoint(
            {name: levels[(self._folder / name).read_text()] for name, levels in self._levels.items()}
        )

    def write(self, point: OperatingPoint) -> None:
        """Set the files past any record, as somebody else does or a driver that starts anew."""
        for name in self._levels:
            (self._folder / name).write_text(str(point[name]))

    def allowed(self) -> list[Control]:
        """Return what the actuator may write."""
        return [Control(str(self._folder / name), frozenset(levels)) for name, levels in self._levels.items()]

    def settings(self, point: OperatingPoint) -> list[Setting]:
        """Return what is to be written to set a point."""
        return [Setting(str(self._folder / name), str(point[name])) for name in self._levels]

    def name(self, key: str) -> str:
        """Return the knob of a control."""
        return Path(key).name

    @contextmanager
    def installed(self) -> Iterator[None]:
        """Let writes to the files be refused, whoever of us makes them."""
        usual = SysFiles.write

        def write(files: SysFiles, key: str, text: str) -> None:
            if self.refusal:
                raise OSError(self.refusal, os.strerror(self.refusal))
            usual(files, key, text if self.refusal is None else self._next(key, text))

        with (
            mock.patch.dict(os.environ, {ROOTS_VARIABLE: str(self._folder)}),
            mock.patch.object(SysFiles, "write", write),
        ):
            yield

    def _next(self, key: str, text: str) -> str:
        texts = list(self._levels[self.name(key)])
        return texts[texts.index(text) - 1]


class Guard:
    """What a guard does once its writer has died: puts the board back from what it was told, and tries until it can.

    Args:
        actuator: The writer.
    """

    def __init__(self, actuator: Actuator) -> None:
        record = actuator._record
        self._token, self._told = actuator._token, b"" if record is None else record.text
        self._site = actuator._site

    def is_done(self) -> bool:
        """Try, and return whether nothing is left to do."""
        told = Record(self._site.record, None, boot_id(), self._told)
        with suppress(PolythrottleError):
            outcome = take_over(self._site, boot_id(), self._token, told=told)
            return outcome is None or not outcome.failed
        return False


def died(actuator: Actuator) -> None:
    """Do what the kernel does with a writer that was killed: no lock is held, and its number is another's later on."""
    for handle in (actuator._lock, actuator._spare, actuator._presence):
        if handle is not None:
            os.close(handle)
    if actuator._fence is not None:
        actuator._fence.let_go()
    actuator._lock = actuator._spare = actuator._presence = actuator._fence = actuator._record = None
    lease = actuator._site.lease
    with suppress(FileNotFoundError, ValueError):
        line = json.loads(lease.read_text())
        lease.write_text(json.dumps({**line, "started": line["started"] + 1}))


def records() -> Path:
    """Return the folder of records and leases."""
    return state_dir() / "originals"


def damage(draw: float) -> None:
    """Change a byte in a line of each record, as a failing disk does."""
    for file in sorted(records().glob("*.jsonl")):
        text = bytearray(file.read_bytes())
        if text:
            text[int(draw * (len(text) - 1))] ^= 0x55
            file.write_bytes(text)


def lose_lease(draw: float, token: Path) -> None:
    """Empty or delete the leases, or the file in which the daemon keeps what proves its own."""
    if draw < 1 / 3:
        token.unlink(missing_ok=True)
        return
    for file in sorted(records().glob("*.lease")):
        if draw < 2 / 3:
            os.truncate(file, 0)
        else:
            file.unlink()


def lose_records() -> None:
    """Delete the folder of records and leases."""
    shutil.rmtree(records(), ignore_errors=True)


@contextmanager
def starved() -> Iterator[None]:
    """Leave this process no descriptor that it has not got already."""
    usual, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    free = os.open("/dev/null", os.O_RDONLY)
    os.close(free)
    resource.setrlimit(resource.RLIMIT_NOFILE, (free, most))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (usual, most))


@contextmanager
def fed(usual: int) -> Iterator[None]:
    """Give this process descriptors again for a while, in which another one runs."""
    now, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (usual, most))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (now, most))


class Disk:
    """The disk of records, leases and tokens: it may be full, or turned read-only as ext4 does on an error.

    Args:
        folder: Of all that lies on it.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = str(folder)
        self.full = self.readonly = False

    @contextmanager
    def installed(self) -> Iterator[None]:
        """Let the calls that write fail."""
        usual: dict[str, Callable[..., Any]] = {name: getattr(os, name) for name in (*_OF_HANDLES, *_OF_PATHS, "open")}

        def opening(path: Any, flags: int, *words: Any, **options: Any) -> int:
            makes = flags & os.O_CREAT and (self.readonly or not os.path.lexists(path))
            if (self.readonly and flags & (os.O_WRONLY | os.O_RDWR)) or makes:
                self._check(path)
            return int(usual["open"](path, flags, *words, **options))

        def of_handle(name: str) -> Callable[..., Any]:
            def call(handle: int, *words: Any) -> Any:
                grows = name == "write" or (name == "pwrite" and len(words[0]) + words[1] > os.fstat(handle).st_size)
                if self.readonly or (self.full and grows):
                    self._check(os.readlink(f"/proc/self/fd/{handle}"))
                return usual[name](handle, *words)

            return call

        def of_path(name: str) -> Callable[..., Any]:
            def call(path: Any, *words: Any, **options: Any) -> Any:
                if self.readonly or (self.full and name == "mkdir"):
                    self._check(path)
                return usual[name](path, *words, **options)

            return call

        patches = {name: of_handle(name) for name in _OF_HANDLES} | {name: of_path(name) for name in _OF_PATHS}
        with ExitStack() as stack:
            for name, patch in {**patches, "open": opening}.items():
                stack.enter_context(mock.patch.object(os, name, patch))
            yield

    @contextmanager
    def sound(self) -> Iterator[None]:
        """Take everything for a while: what happens then is no process's doing."""
        was, self.full, self.readonly = (self.full, self.readonly), False, False
        try:
            yield
        finally:
            self.full, self.readonly = was

    def _check(self, path: Any) -> None:
        if (self.readonly or self.full) and str(os.fsdecode(path)).startswith(self._folder):
            number = errno.EROFS if self.readonly else errno.ENOSPC
            raise OSError(number, os.strerror(number))


_OF_HANDLES = ("write", "pwrite", "ftruncate")
_OF_PATHS = ("unlink", "rename", "replace", "mkdir", "rmdir")
