"""The log of every write: two lines each, one before it takes effect and one after; survives SIGKILL."""

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any


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
