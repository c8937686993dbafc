"""A tree on disk and what its kernel remembers besides; shared by every process that uses the tree."""

import errno
import fcntl
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path

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

    @contextmanager
    def held(self) -> Iterator[None]:
        """Keep other processes and threads out; the kernel drops the lock of a process that dies."""
        self.beside.mkdir(exist_ok=True)
        handle = os.open(self.beside / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(handle, fcntl.LOCK_EX)
            self.recall()
            yield
        finally:
            os.close(handle)

    def recall(self) -> None:
        """Read what the kernel remembers."""
        try:
            self.memory = Memory(**json.loads((self.beside / "memory.json").read_text(encoding="utf-8")))
        except FileNotFoundError:
            old = self.has("/proc/sys/kernel/osrelease") and self.read("/proc/sys/kernel/osrelease").startswith("4.")
            self.memory = Memory(refuses=bool(old))

    def remember(self) -> None:
        """Write what the kernel remembers."""
        replace(self.beside / "memory.json", json.dumps(asdict(self.memory)))

    def real(self, path: str) -> str:
        """Return where a path leads, seen from inside the tree.

        Raises:
            OSError: If it leads out of the tree.
        """
        leads = os.path.realpath(path)
        if not leads.startswith(f"{self.root}/"):
            raise refusal(errno.EACCES, path)
        return leads.removeprefix(str(self.root))

    def inside(self, path: str) -> str:
        """Return where a path of the board, such as ``/sys/class/hwmon``, leads inside the tree."""
        return self.real(f"{self.root}{path}")

    def has(self, path: str) -> bool:
        """Return whether the board has a file or folder."""
        return self.place(path).exists()

    def place(self, path: str) -> Path:
        """Return where a path of the board is on this machine."""
        return self.root / path.lstrip("/")

    def read(self, path: str) -> str:
        """Return what a file of the board holds, without whitespace around it."""
        with _open(self.place(path), encoding="utf-8", errors="replace") as file:
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
        handle = os.open(self.place(path), os.O_RDWR | os.O_CLOEXEC)
        try:
            data = f"{value}\n".encode()
            os.pwrite(handle, data.ljust(os.fstat(handle).st_size, b"\n"), 0)
            os.ftruncate(handle, len(data))
        finally:
            os.close(handle)

    def names(self, folder: str) -> list[str]:
        """Return the names in a folder of the board, sorted; none if there is no such folder."""
        place = self.place(folder)
        if place.is_dir():
            return sorted(os.listdir(place))
        return []


def replace(file: Path, text: str) -> None:
    """Replace a file at once: a process that dies leaves the old one or the new one."""
    fresh = file.with_name(f"{file.name}.{os.getpid()}")
    fresh.write_text(text, encoding="utf-8")
    fresh.replace(file)
