"""The record of originals: what every file held before the first write to it, safe on disk before that write.

One file per device, in JSON lines. The first names format version, device, boot and process; each further line is
``{"path", "original", "written"}``, appended and flushed before ``written`` goes to ``path``. The first original of a
path wins. A torn last line was never acted upon and counts for nothing. A record of another boot is void: the kernel
forgot what was written.
"""

import errno
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from polythrottle.errors import BadFile, StorageError

VERSION = 1
_NUMBERS = {"version", "pid"}


@dataclass
class Entry:
    """One file that was or is about to be written.

    Args:
        original: What it held when first met.
        written: Every value that may be in it because of us.
    """

    original: str
    written: set[str] = field(default_factory=set)


class Record:
    """The originals of one device on disk.

    Args:
        file: Where; its folder exists.
        device: Whose originals.
        boot_id: Of the running kernel.

    Raises:
        BadFile: If the file there is not such a record, or is of a newer format.
        StorageError: If it cannot be read.
    """

    def __init__(self, file: Path, device: str, boot_id: str) -> None:
        self._file, self._device, self._boot_id = file, device, boot_id
        self.entries: dict[str, Entry] = {}
        self._size = 0
        self._load()

    def _load(self) -> None:
        try:
            whole, _, _torn = self._file.read_bytes().rpartition(b"\n")
        except FileNotFoundError:
            return
        except OSError as err:
            raise StorageError(f"cannot read {self._file}: {err.strerror}") from err
        lines = [self._parsed(number, line) for number, line in enumerate(whole.splitlines(), 1)]
        if not lines or lines[0]["boot_id"] != self._boot_id:
            return
        self._size = len(whole) + 1
        for line in lines[1:]:
            self._remember(line["path"], line["original"], line["written"])

    def _parsed(self, number: int, text: bytes) -> Mapping[str, Any]:
        keys = {"path", "original", "written"} if number > 1 else {"version", "device", "boot_id", "pid"}
        try:
            line = json.loads(text)
        except ValueError:
            line = None
        line = line if isinstance(line, dict) else {}
        sound = set(line) == keys and all(isinstance(line[key], str) for key in keys - _NUMBERS)
        if not sound or line.get("version", VERSION) != VERSION:
            raise BadFile(
                f"{self._file} line {number} is not version {VERSION} of a record of originals; "
                "put back by hand what the file names, then delete it"
            )
        if line.get("device", self._device) != self._device:
            raise BadFile(f"{self._file} records the originals of {line['device']}, not of {self._device}")
        return line

    def _remember(self, path: str, original: str, written: str) -> None:
        self.entries.setdefault(path, Entry(original)).written.add(written)

    def note(self, path: str, original: str, written: str) -> None:
        """Put on disk that ``path`` may hold ``written`` from now on and, if new, held ``original`` before.

        Raises:
            StorageError: If it cannot be put there; nothing may be written to the device then.
        """
        known = self.entries.get(path)
        if known is not None and written in known.written:
            return
        head = {"version": VERSION, "device": self._device, "boot_id": self._boot_id, "pid": os.getpid()}
        line = {"path": path, "original": known.original if known else original, "written": written}
        lines = [line] if self._size else [head, line]
        self._append("".join(json.dumps(each) + "\n" for each in lines).encode())
        self._remember(path, original, written)

    def _append(self, data: bytes) -> None:
        try:
            handle = os.open(self._file, os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
            try:
                # Cuts a torn line, and the whole of a void record.
                os.ftruncate(handle, self._size)
                if os.pwrite(handle, data, self._size) != len(data):
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
                os.fsync(handle)
            finally:
                os.close(handle)
            sync_folder(self._file.parent)
        except OSError as err:
            raise StorageError(f"cannot save originals in {self._file}: {err.strerror}; nothing was changed") from err
        self._size += len(data)

    def remove(self) -> None:
        """Forget everything: the originals are back, or void.

        Raises:
            StorageError: If the file cannot be removed.
        """
        try:
            self._file.unlink(missing_ok=True)
            sync_folder(self._file.parent)
        except OSError as err:
            raise StorageError(f"cannot remove {self._file}: {err.strerror}") from err
        self.entries.clear()
        self._size = 0


def sync_folder(folder: Path) -> None:
    """Flush a folder, so that a file made or removed in it stays so after a power cut."""
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
