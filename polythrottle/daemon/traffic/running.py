"""Whether a program runs: all that can be seen of a workload that says nothing of its requests."""

import os
from pathlib import Path

from polythrottle.daemon.ports import Seen
from polythrottle.daemon.signals import Target

_SEARCH_S = 5.0
"""Going through all processes takes milliseconds, so that it is done this seldom."""
_COMM = 15
"""To which length the kernel keeps a process's name (TASK_COMM_LEN less the final zero)."""


class RunningTraffic:
    """A process by its name or its pid file, and nothing of its requests; satisfies the port ``Traffic``.

    Rate and latency are unknown, so that the daemon keeps the point for the highest load while the process runs.

    Args:
        name: Of the program, as ``ps`` shows it, of its executable or of the script it runs; with a slash in it, the
            path of a file that holds its pid.
        proc: Where the kernel tells of processes.
    """

    def __init__(self, name: str, proc: Path = Path("/proc")) -> None:
        self._name, self._proc = name, proc
        self._found: tuple[int, str] | None = None
        self._searched_s: float | None = None
        self.note = ""

    @property
    def uri(self) -> str:
        """The text that opens it again."""
        return f"process:{self._name}"

    def look(self, now_s: float) -> Seen | None:
        """Return that the workload is up, of whose requests nothing is known; None while it is not."""
        if self._found is not None and self._born(self._found[0]) == self._found[1]:
            return Seen(arrived=None)
        self._found = None
        if self._searched_s is None or not 0 <= now_s - self._searched_s < _SEARCH_S:
            self._searched_s = now_s
            self._found = self._noted() if "/" in self._name else self._searched()
        return None if self._found is None else Seen(arrived=None)

    def serve(self, target: Target) -> None:
        """Do nothing: the program cannot be told."""

    def close(self) -> None:
        """Release nothing; there is nothing."""

    def _noted(self) -> tuple[int, str] | None:
        """Return the process whose pid is in the file, if it runs."""
        try:
            word = Path(self._name).read_text(encoding="ascii")[:32].strip()
        except (OSError, ValueError):
            return None
        if not word.isdecimal() or (born := self._born(int(word))) is None:
            return None
        return int(word), born

    def _searched(self) -> tuple[int, str] | None:
        """Return the oldest process of that name."""
        try:
            numbers = sorted(int(name) for name in os.listdir(self._proc) if name.isdecimal())
        except OSError:
            return None
        for number in numbers:
            if number != os.getpid() and self._is_named(number) and (born := self._born(number)) is not None:
                return number, born
        return None

    def _is_named(self, number: int) -> bool:
        folder = self._proc / str(number)
        try:
            comm = (folder / "comm").read_bytes().rstrip(b"\n")
            words = (folder / "cmdline").read_bytes().split(b"\0")[:2]
        except OSError:
            return False
        name = self._name.encode()
        return comm == name[:_COMM] or name in (word.rpartition(b"/")[2] for word in words)

    def _born(self, number: int) -> str | None:
        """Return when a process was started, which tells it from a later one of the same number; None if it has ended.

        Field 22 of ``/proc/<pid>/stat``, counted after the name in brackets, which may hold anything (proc(5)).
        """
        try:
            fields = (self._proc / str(number) / "stat").read_text().rpartition(")")[2].split()
        except (OSError, ValueError):
            return None
        return fields[19] if len(fields) > 19 and fields[0] not in ("Z", "X") else None
