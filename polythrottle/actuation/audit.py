"""The audit: who wrote what to a device, when, under which lease; appended, for people to read."""

import json
import os
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from polythrottle.actuation.putting_back import Outcome
from polythrottle.actuation.record import Entry
from polythrottle.actuation.site import contents
from polythrottle.errors import StorageError

_MOST_BYTES = 4_000_000
# Not blocking, for a pipe in the place of the file must not hang its writer.
_FLAGS = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC


class Audit:
    """The audit file of one device. It is evidence, not state: where it cannot be written, work goes on.

    Args:
        file: Where; at 4 MB it is put aside as ``.audit.1`` and begun anew.
        device: Whose.
    """

    def __init__(self, file: Path, device: str) -> None:
        self._file, self._device = file, device

    def intend(self, token: int, key: str, before: str, text: str) -> None:
        """Append one write to come: what the control holds, what will be written."""
        self._append({"event": "set", "token": token, "key": key, "before": before, "to": text})

    def found(self, token: int, key: str, before: str, found: str) -> None:
        """Append what was read back after a write."""
        self._append({"event": "found", "token": token, "key": key, "before": before, "to": found})

    def restored(self, token: int, outcome: Outcome) -> None:
        """Append what a restoring came to."""
        left = [str(each) for each in (*outcome.foreign, *outcome.failed)]
        self._append({"event": "restore", "token": token, "restored": list(outcome.restored), "left": left})

    def note(self, token: int, event: str) -> None:
        """Append something that happened to the lease."""
        self._append({"event": event, "token": token})

    def entries(self, token: int) -> dict[str, Entry]:
        """Return what was written under a lease and what was there before, as far as this file tells."""
        found: dict[str, Entry] = {}
        with suppress(OSError, StorageError):
            for text in (contents(self._file) or b"").splitlines():
                with suppress(ValueError, KeyError, TypeError, RecursionError):
                    line = json.loads(text)
                    if line["event"] in ("set", "found") and line["token"] == token:
                        found.setdefault(line["key"], Entry(line["before"])).written.add(line["to"])
        return found

    def _append(self, line: dict[str, Any]) -> None:
        text = json.dumps({"time": time.strftime("%Y-%m-%dT%H:%M:%S%z"), "pid": os.getpid(), **line}) + "\n"
        with suppress(OSError):
            handle = os.open(self._file, _FLAGS, 0o600)
            try:
                if os.fstat(handle).st_size > _MOST_BYTES:
                    self._file.rename(self._file.with_suffix(".audit.1"))
                os.write(handle, text.encode())
            finally:
                os.close(handle)
