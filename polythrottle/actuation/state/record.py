"""The record of originals: what every control held before the first write to it, safe on disk before that write.

One file per device, in JSON lines, each with a checksum. The first names format version, device, boot, process, and
what every control of the device held at that moment; each further line is one write to come: ``{"key", "original",
"written"}``, appended and flushed before ``written`` goes to ``key``, or one control put back: ``{"restored"}``. The
first original of a control wins. A torn last line was never acted upon and counts for nothing; any other bad line is
damage, which is named. A record of another boot is void, for the kernel forgot what was written, but for controls that
outlive a reboot. Where settings are to stand without their writer, ``{"kept": {key: [text, node, count]}}`` says what
each control is to hold, and at which start of its driver it was set; the last such line counts. A line whose texts are
longer than any control's, or hold what would steer a terminal, is damaged.
"""

from __future__ import annotations

import errno
import json
import os
import re
import zlib
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from polythrottle.actuation.drivers.controls import Control, Start
from polythrottle.actuation.state.site import contents
from polythrottle.domain.errors import StorageError
from polythrottle.storage.atomic_file import sync_folder
from polythrottle.storage.untrusted import MALFORMED, printable

VERSION = 2
FORGET = b"forget\n"
NOW = b"now\n"
"""What a guard is told besides lines: that nothing stands changed any more; that it is to restore at once."""
READY = b"."
"""What a guard that stays behind says once it watches."""

_MOST_SIGNS = 4096
"""In a text on record: as long as a path may be (PATH_MAX)."""
_MOST_CONTROLS = 4096
_MOST_LINES = 50_000  # 256 clock domains, both bounds of each, every one of some tens of steps: 20,000
_MOST_TOLD = 20
_SHOWN_SIGNS = 200
_STRANGE = re.compile(r"[\x00-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")
"""Control characters, what changes the direction of writing, and what is no character: none is in any control."""
_LINE = {"key": str, "original": str, "written": str}
_HEAD = {"version": int, "device": str, "boot_id": str, "pid": int, "originals": dict}


@dataclass
class Entry:
    """One control that was or is about to be written.

    Args:
        original: What it held when first met.
        written: Every value that may be in it because of us.
        neutral: As in `Control`; persistent and follows likewise.
        done: Whether it has been put back since the last write.
    """

    original: str
    written: set[str] = field(default_factory=set)
    neutral: str | None = None
    persistent: bool = False
    follows: tuple[str, str] | None = None
    done: bool = False


@dataclass(frozen=True)
class Kept:
    """What a control is to hold without its writer.

    Args:
        text: What was applied.
        start: Of the driver, when it was.
    """

    text: str
    start: Start


class Record:
    """The originals of one device on disk.

    Args:
        file: Where; its folder exists.
        device: Whose originals; if None, as the file says.
        boot_id: Of the running kernel.
        told: What the file held, where another process has told it; else it is read.

    Raises:
        StorageError: If it cannot be read.
    """

    def __init__(self, file: Path, device: str | None, boot_id: str, told: bytes | None = None) -> None:
        self._file = file
        self._boot_id = boot_id
        self._text = b""
        self.listener: Callable[[bytes], None] = lambda text: None
        """Is told each line that goes on disk, before it does."""
        self.device = device if device is not None else named_by(file.stem)
        self._named = device is not None
        self.entries: dict[str, Entry] = {}
        self.originals: Mapping[str, str] = {}
        self.kept: Mapping[str, Kept] = {}
        self.damage: tuple[str, ...] = ()
        self.void = False
        self._load(self._stored() if told is None else told)

    def _stored(self) -> bytes:
        try:
            return contents(self._file) or b""
        except OSError as err:
            raise StorageError(f"cannot read {self._file}: {err.strerror}") from err

    def _load(self, text: bytes) -> None:
        whole, _, _torn = text.rpartition(b"\n")
        if not whole:
            return
        lines = (whole[:-1] if whole.endswith(b"\n") else whole).split(b"\n", _MOST_LINES)
        head = _parsed(lines[0])
        damaged = []
        boot_id = self._boot_id
        if _is_head(head) and (not self._named or head["device"] == self.device):
            boot_id = head["boot_id"]
            self.device = head["device"]
            self.originals = head["originals"]
        else:
            damaged.append(f"line 1 is not the head of a record of {shown(self.device)}, version {VERSION}")
        for number, line in enumerate(lines[1:_MOST_LINES], 2):
            if not self._remember(_parsed(line)):
                damaged.append(f"line {number} is damaged; what it named may still be changed")
        if len(lines) > _MOST_LINES:
            damaged.append(f"has more than {_MOST_LINES} lines; what the others named may still be changed")
        more = [f"and {len(damaged) - _MOST_TOLD} more"] if len(damaged) > _MOST_TOLD else []
        file = shown(str(self._file))
        self.damage = tuple(f"{file} {what}" for what in [*damaged[:_MOST_TOLD], *more])
        self._text = whole + b"\n"
        if boot_id != self._boot_id:
            self._forget_volatile()

    def _forget_volatile(self) -> None:
        self.entries = {key: entry for key, entry in self.entries.items() if entry.persistent}
        self.originals = {}
        self.kept = {}
        self.damage = self.damage if self.entries else ()
        self._text = self._text if self.entries else b""
        self.void = not self.entries

    @property
    def text(self) -> bytes:
        """What is on disk, or should be."""
        return self._text

    def _remember(self, line: Mapping[str, Any]) -> bool:
        """Take in what a line says; False if it is damaged."""
        if set(line) == {"restored"} and isinstance(line["restored"], str) and line["restored"] in self.entries:
            self.entries[line["restored"]].done = True
        elif set(line) == {"kept"} and (kept := _kept(line["kept"])) is not None:
            self.kept = kept
        elif _fits(line, _LINE) and _sound(line) and self._has_room(line["key"]):
            follows = line.get("follows")
            control = Control(
                line["key"],
                frozenset(),
                line.get("neutral"),
                line.get("persistent", False),
                tuple(follows) if follows else None,
            )
            self._note(control, line["original"], line["written"])
        else:
            return False
        return True

    def _has_room(self, key: str) -> bool:
        return key in self.entries or len(self.entries) < _MOST_CONTROLS

    def _note(self, control: Control, original: str, written: str) -> None:
        entry = self.entries.setdefault(
            control.key, Entry(original, set(), control.neutral, control.persistent, control.follows)
        )
        entry.written.add(written)
        entry.done = False

    def note(self, writes: Iterable[tuple[Control, str, str]], found: Mapping[str, str] | None = None) -> None:
        """Put on disk which controls may hold which values from now on, in one flush.

        Args:
            writes: Control, what it held before, what is about to be written.
            found: What every control of the device holds; kept with the first note.

        Raises:
            StorageError: If it cannot be put there; nothing may be written to the device then.
        """
        new = [each for each in writes if self._is_news(each[0], each[2])]
        if not new:
            return
        self._refuse_what_cannot_be_read_back(new)
        if not self._text:
            plain = {key: text for key, text in (found or {}).items() if is_plain(key) and is_plain(text)}
            self.originals = dict(list(plain.items())[:_MOST_CONTROLS])
        firsts = [(control, self._first(control.key, before), written) for control, before, written in new]
        self._append([*([] if self._text else [self._head()]), *(_line(*each) for each in firsts)], flush=True)
        for each in firsts:
            self._note(*each)

    def _refuse_what_cannot_be_read_back(self, writes: Iterable[tuple[Control, str, str]]) -> None:
        for control, *texts in writes:
            strange = next((each for each in (self.device, control.key, *texts) if not is_plain(each)), None)
            if strange is not None or not self._has_room(control.key):
                if strange is None:
                    what = "too many controls"
                else:
                    what = f"no plain text: {shown(strange)}"
                raise StorageError(f"cannot save originals in {self._file}: {what}; nothing was changed")

    def _is_news(self, control: Control, written: str) -> bool:
        known = self.entries.get(control.key)
        return known is None or known.done or written not in known.written

    def _first(self, key: str, before: str) -> str:
        known = self.entries.get(key)
        if known:
            return known.original
        return self.originals.get(key, before)

    def _head(self) -> dict[str, Any]:
        return {
            "version": VERSION,
            "device": self.device,
            "boot_id": self._boot_id,
            "pid": os.getpid(),
            "originals": dict(self.originals),
        }

    def keep(self, kept: Mapping[str, Kept]) -> None:
        """Put on disk what controls on record are to hold without their writer.

        Raises:
            StorageError: If it cannot be put there.
        """
        if kept:
            told = {key: [each.text, each.start.node, each.start.count] for key, each in kept.items()}
            self._append([{"kept": told}], flush=True)
        self.kept = dict(kept)

    def adopt(self, entries: Mapping[str, Entry]) -> None:
        """Add what is known from elsewhere of controls that this record has lost, on disk too where that can be."""
        lost = {key: entry for key, entry in entries.items() if key not in self.entries}
        lost = dict(list(lost.items())[: max(_MOST_CONTROLS - len(self.entries), 0)])
        for key, entry in lost.items():
            entry.original = self.originals.get(key, entry.original)
            self.entries[key] = entry
        if not lost or self.damage:
            return  # a damaged file is evidence, and is put aside as it is
        lines = [
            _line(Control(key, frozenset(), entry.neutral, entry.persistent, entry.follows), entry.original, written)
            for key, entry in lost.items()
            for written in sorted(entry.written)
        ]
        with suppress(StorageError):  # what is in memory is put back all the same
            self._append([*([] if self._text else [self._head()]), *lines], flush=True)

    def mark_restored(self, key: str) -> None:
        """Note that a control is back; it matters only to a process that takes over, so that it need not be flushed."""
        if key not in self.entries:
            return
        try:
            self._append([{"restored": key}], flush=False)
        except StorageError:
            return  # the control is compared again then, which does no harm

    def _append(self, lines: Iterable[Mapping[str, Any]], *, flush: bool) -> None:
        data = b"".join(_sealed(line) for line in lines)
        self.listener(data)
        try:
            handle = os.open(self._file, os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, 0o600)
            try:
                # Cuts a torn line, and the whole of a void record; makes good what somebody else has cut or deleted.
                new = not self._text or os.fstat(handle).st_size < len(self._text)
                at, text = (0, self._text + data) if new else (len(self._text), data)
                os.ftruncate(handle, at)
                if os.pwrite(handle, text, at) != len(text):
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
                if flush:
                    os.fsync(handle)
            finally:
                os.close(handle)
            if flush and new:
                sync_folder(self._file.parent)
        except OSError as err:
            raise StorageError(f"cannot save originals in {self._file}: {err.strerror}; nothing was changed") from err
        self._text += data

    def remove(self, *, left: Mapping[str, str] | None = None) -> None:
        """Forget everything: the originals are back, or void. A damaged record is put aside instead.

        Args:
            left: The originals of what was left to somebody else: then it is put aside too, should they want it back,
                for its second copy of the originals knows what a damaged line said. What was put aside before stays.

        Raises:
            StorageError: If the file cannot be removed.
        """
        if left:
            self._set_apart(left)
        try:
            if left or self.damage:
                self._file.rename(self._file.with_suffix(".left" if left else ".damaged"))
            else:
                self._file.unlink()
            with suppress(OSError):  # one that comes back after a power cut is of another boot, and compared again
                sync_folder(self._file.parent)
        except FileNotFoundError:
            pass  # somebody has deleted it, or its folder
        except OSError as err:
            raise StorageError(f"cannot remove {self._file}: {err.strerror}") from err
        self.listener(FORGET)
        self.entries.clear()
        self.originals = {}
        self.kept = {}
        self.damage = ()
        self._text = b""
        self.void = False

    def _set_apart(self, left: Mapping[str, str]) -> None:
        """Say on disk what is left, and nothing else, so that it can be told of until the next writer."""
        lines: list[Mapping[str, Any]] = [
            {"restored": key} for key, entry in self.entries.items() if key not in left and not entry.done
        ]
        before = Record(self._file.with_suffix(".left"), None, self._boot_id)
        known = {key: entry for key, entry in before.entries.items() if key not in self.entries and not entry.done}
        for key, original in left.items():
            if key not in self.entries:
                known[key] = Entry(original, {original})
        lines += [
            _line(Control(key, frozenset(), entry.neutral, entry.persistent, entry.follows), entry.original, text)
            for key, entry in known.items()
            for text in sorted(entry.written)
        ]
        with suppress(StorageError):  # it is named now
            self._append(lines, flush=False)


def _line(control: Control, original: str, written: str) -> dict[str, Any]:
    line: dict[str, Any] = {"key": control.key, "original": original, "written": written}
    if control.neutral is not None:
        line["neutral"] = control.neutral
    if control.persistent:
        line["persistent"] = True
    if control.follows is not None:
        line["follows"] = list(control.follows)
    return line


def _text(line: Mapping[str, Any]) -> str:
    return json.dumps(line, sort_keys=True)


def _sealed(line: Mapping[str, Any]) -> bytes:
    return (json.dumps({**line, "crc": zlib.crc32(_text(line).encode())}) + "\n").encode()


def _parsed(text: bytes) -> dict[str, Any]:
    """Return a line without its checksum; an empty one if it is not whole."""
    if not text.startswith(b"{"):
        return {}
    try:
        line = json.loads(text)
        crc = line.pop("crc")
        return line if crc == zlib.crc32(_text(line).encode()) else {}
    except MALFORMED:
        return {}


def is_plain(text: object) -> bool:
    """Say whether something is a text that a record may hold: no longer than any control's, of plain characters."""
    return isinstance(text, str) and len(text) <= _MOST_SIGNS and not _STRANGE.search(text)


def shown(text: str) -> str:
    """Return a text that anybody may have written as it may be printed: one line, not too long."""
    return printable(text if len(text) <= _SHOWN_SIGNS else f"{text[:_SHOWN_SIGNS]}…")


def named_by(stem: str) -> str:
    """Return a device as far as the names of its files tell it."""
    return shown(stem.rpartition("@")[0]).strip() or "a device without a name"


def _is_head(line: Mapping[str, Any]) -> bool:
    if not _fits(line, _HEAD) or line["version"] != VERSION or len(line["originals"]) > _MOST_CONTROLS:
        return False
    texts = (line["device"], line["boot_id"], *line["originals"], *line["originals"].values())
    return bool(line["device"].strip()) and all(map(is_plain, texts))


def _fits(line: Mapping[str, Any], form: Mapping[str, type]) -> bool:
    return all(isinstance(line.get(key), kind) for key, kind in form.items())


def _sound(line: Mapping[str, Any]) -> bool:
    """Return whether what a line may leave out is what it should be."""
    follows = line.get("follows") or ["", ""]
    if not isinstance(follows, list) or len(follows) != 2 or not isinstance(line.get("persistent", False), bool):
        return False
    return all(map(is_plain, (line["key"], line["original"], line["written"], line.get("neutral", ""), *follows)))


def _kept(told: Any) -> dict[str, Kept] | None:
    """Return what controls are to hold as a line says it; None if it is damaged."""
    if not isinstance(told, dict):
        return None
    kept = {}
    for key, each in told.items():
        if not isinstance(each, list) or [type(part) for part in each] != [str, int, int] or not is_plain(each[0]):
            return None
        kept[key] = Kept(each[0], Start(each[1], each[2]))
    return kept
