"""The audit: who wrote what to a device, when, under which lease; appended, for people to read."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from polythrottle.actuation.rollback import Outcome
from polythrottle.actuation.state.lease import Lease, lost
from polythrottle.actuation.state.record import Entry, Record, is_plain
from polythrottle.actuation.state.site import Site, contents
from polythrottle.domain.errors import StorageError

_MOST_BYTES = 4_000_000
# Not blocking, for a pipe in the place of the file must not hang its writer.
_FLAGS = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC


class Audit:
    """The audit file of one device. It is evidence, not state: where it cannot be written, work goes on.

    Args:
        file: Where; at 4 MB it is put aside as ``.audit.1`` and begun anew.
        device: Whose.
        boot_id: Of the running kernel; stands in each line, for what another kernel wrote it has forgotten.
    """

    def __init__(self, file: Path, device: str, boot_id: str = "") -> None:
        self._file = file
        self._older = file.with_suffix(".audit.1")
        self._device = device
        self._boot_id = boot_id

    def intend(self, token: int, key: str, before: str, text: str) -> None:
        """Append one write to come: what the control holds, what will be written."""
        self._append({"event": "set", "token": token, "key": key, "before": before, "to": text})

    def found(self, token: int, key: str, before: str, found: str) -> None:
        """Append what was read back after a write."""
        self._append({"event": "found", "token": token, "key": key, "before": before, "to": found})

    def restored(self, token: int, outcome: Outcome) -> None:
        """Append what a restoring came to."""
        left = [str(each) for each in (*outcome.foreign, *outcome.failed)]
        failed = [each.key for each in outcome.failed]
        restored = list(outcome.restored)
        self._append({"event": "restore", "token": token, "restored": restored, "left": left, "failed": failed})

    def note(self, token: int, event: str) -> None:
        """Append something that happened to the lease."""
        self._append({"event": event, "token": token})

    def unsettled(self, lease: Lease) -> dict[str, Entry]:
        """Return what was written in this boot and may not be back, with what was there before, as this file tells.

        Under whichever lease: one that failed to restore has taken another's place.

        Args:
            lease: As it stands. One that is clean has nothing; one without a token was deleted or damaged, if there
                ever was one.
        """
        found: dict[str, Entry] = {}
        if not lease.dirty and lease.token:
            return found
        for line in self._of_boot(lease):
            failed = line.get("failed")
            if line.get("event") == "restore" and isinstance(failed, list):
                found = {key: entry for key, entry in found.items() if key in failed}
            _note(found, line)
        return found

    def settles(self, lease: Lease) -> bool:
        """Say whether the last that was told under a lease is that everything is back, though it still is dirty."""
        if not lease.dirty:
            return False
        told = [line for line in self._of_boot(lease) if line.get("token") == lease.token]
        last = told[-1] if told else {}
        return last.get("event") == "restore" and last.get("failed") == []

    def _of_boot(self, lease: Lease) -> Iterator[dict[str, Any]]:
        """Yield the lines of this boot; those of earlier versions, which name none, count under their own lease."""
        for line in (*_lines(self._older), *_lines(self._file)):
            known = line.get("boot_id")
            if known == self._boot_id or (known is None and line.get("token") == lease.token):
                yield line

    def _append(self, line: dict[str, Any]) -> None:
        lines = [line]
        with suppress(OSError):
            handle = os.open(self._file, _FLAGS, 0o600)
            try:
                if full := os.fstat(handle).st_size > _MOST_BYTES:  # what is put aside next has been told again by then
                    lines += self._carried(int(line["token"]))
                os.write(handle, "".join(map(self._text, lines)).encode())
                if full:
                    self._file.rename(self._older)
            finally:
                os.close(handle)

    def _text(self, line: dict[str, Any]) -> str:
        time_s = time.strftime("%Y-%m-%dT%H:%M:%S%z")
        head = {"time": time_s, "boot_id": self._boot_id, "device": self._device, "pid": os.getpid()}
        return json.dumps({**head, **line}) + "\n"

    def _carried(self, token: int) -> Iterator[dict[str, Any]]:
        """Yield lines that say all that may not be back, for lines before them to be forgotten."""
        for key, entry in self.unsettled(Lease(token, self._boot_id, dirty=True)).items():
            for text in sorted(entry.written):
                yield {"event": "carried", "token": token, "key": key, "before": entry.original, "to": text}

    @property
    def device(self) -> str | None:
        """Whose audit it is, as its last line of this boot says; None if none does."""
        names = [line["device"] for line in self._of_boot(Lease(0, self._boot_id)) if is_plain(line.get("device"))]
        return names[-1] if names else None


def known_besides(
    site: Site, record: Record, lease: Lease, audit: Audit
) -> tuple[Mapping[str, Entry], tuple[str, ...]]:
    """Return what the audit knows of controls that may not be back, and what nobody knows any more.

    Args:
        site: Of the device.
        record: What is on record.
        lease: Of whoever steered it last.
        audit: Of the device.
    """
    audited = audit.unsettled(lease)
    return audited, lost(site, record, lease, bool(audited) or audit.settles(lease))


def _lines(file: Path) -> Iterator[dict[str, Any]]:
    """Yield the lines of an audit that can be read."""
    text = b""
    with suppress(OSError, StorageError):
        text = contents(file) or b""
    for each in text.splitlines():
        with suppress(ValueError, RecursionError):
            line = json.loads(each)
            if isinstance(line, dict):
                yield line


def _note(found: dict[str, Entry], line: Mapping[str, Any]) -> None:
    """Add the write that a line of an audit tells of, if it does."""
    key, before, to = (line.get(name) for name in ("key", "before", "to"))
    if line.get("event") in ("set", "found", "carried") and all(map(is_plain, (key, before, to))):
        entry = found.setdefault(str(key), Entry(str(before)))
        entry.written.add(str(to))
        if line["event"] == "carried":  # the first line of all may be gone by now
            entry.original = str(before)
