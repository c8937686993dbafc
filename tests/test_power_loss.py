"""A cut of the power at any moment of a session: whatever of its writes the disk has kept, what outlives it goes back.

What is written to the state folder is recorded with its flushes. For each moment every state is made that a file system
may leave behind: of each file what was flushed, and of what came later any part in any order, the last write torn;
of the folder's entries what was flushed, and any number of the later ones in their order. The kernel has forgotten the
clocks by then; a power mode stands (as ALICE, OSDI 2014, and CrashMonkey, OSDI 2018, try file systems and databases).
"""

import itertools
import os
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from polythrottle.actuation import Actuator, Control, Setting, restore_all
from polythrottle.domain.errors import PolythrottleError

pytestmark = pytest.mark.faults
MODE, CLOCK = "mode", "clock"
MOST_STATES = 60
"""Tried at each moment; drawn where there are more."""


class Board:
    """Two controls in memory, one of which outlives a reboot."""

    def __init__(self, held: Mapping[str, str], wrote: Callable[[str, str], None] = lambda key, text: None) -> None:
        self.held, self._wrote = dict(held), wrote

    def read(self, key: str) -> str:
        """Return what a control holds."""
        return self.held[key]

    def write(self, key: str, text: str) -> None:
        """Set a control."""
        self.held[key] = text
        self._wrote(key, text)


@dataclass
class File:
    """A file as the disk has it: what was written since it was made, and how much of that was flushed."""

    writes: list[Callable[[bytearray], None]] = field(default_factory=list)
    flushed: int = 0


@dataclass(frozen=True)
class Moment:
    """What a disk may hold at one moment.

    Args:
        entries: The folder's changes so far, each a function on its names, and how many were flushed.
        files: Each file's writes so far, and how many were flushed.
        mode: The power mode that holds.
    """

    entries: tuple[Sequence[Callable[[dict[str, int]], None]], int]
    files: Mapping[int, tuple[Sequence[Callable[[bytearray], None]], int]]
    mode: str

    def states(self, chance: random.Random) -> Iterator[dict[str, bytes]]:
        """Return the folders that a cut of the power may leave, by name and content."""
        changes, sure = self.entries
        for count in range(sure, len(changes) + 1):
            names: dict[str, int] = {}
            for change in changes[:count]:
                change(names)
            kept = {number: list(_parts(*self.files[number], chance)) for number in set(names.values())}
            every = list(itertools.islice(itertools.product(*kept.values()), 5000))
            for chosen in chance.sample(every, min(len(every), MOST_STATES)):
                contents = dict(zip(kept, chosen, strict=True))
                yield {name: contents[number] for name, number in names.items()}


def _parts(writes: Sequence[Callable[[bytearray], None]], sure: int, chance: random.Random) -> Iterator[bytes]:
    """Return what may be left of a file: all that was flushed, and any of the rest; the last of it torn too."""
    later = range(sure, len(writes))
    chosen: list[tuple[int, ...]]
    if len(later) <= 4:
        chosen = [each for count in range(len(later) + 1) for each in itertools.combinations(later, count)]
    else:
        chosen = [tuple(later[:count]) for count in range(len(later) + 1)]
        chosen += [tuple(each for each in later if chance.random() < 0.5) for _ in range(10)]
    for some in chosen:
        data = bytearray()
        for number in (*range(sure), *some):
            before = bytes(data)
            writes[number](data)
        yield bytes(data)
        if some and len(data) > len(before):
            yield bytes(data[: len(before) + (len(data) - len(before)) // 2])


class Disk:
    """Records what is done to a folder, and the moments between.

    Args:
        folder: Which.
        monkeypatch: Takes the recorder away again.
    """

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.folder = folder
        self.moments: list[Moment] = []
        self._files: dict[int, File] = {}
        self._names: dict[str, int] = {}
        self._entries: list[Callable[[dict[str, int]], None]] = []
        self._flushed = 0
        self._handles: dict[int, int | None] = {}
        self._mode = "0"
        for name in ("open", "pwrite", "write", "ftruncate", "fsync", "close"):
            monkeypatch.setattr(os, name, self._recorded(getattr(os, name), getattr(self, f"_{name}")))
        monkeypatch.setattr(Path, "unlink", self._recorded(Path.unlink, self._unlink))
        monkeypatch.setattr(Path, "rename", self._recorded(Path.rename, self._rename))

    def _recorded(self, call: Callable[..., Any], note: Callable[..., None]) -> Callable[..., Any]:
        def recorded(*given: Any, **options: Any) -> Any:
            done = call(*given, **options)
            note(done, *given)
            return done

        return recorded

    def set(self, key: str, text: str) -> None:
        """Note that a control was written."""
        if key == MODE:
            self._mode = text
        self._moment()

    def _moment(self) -> None:
        files = {number: (tuple(file.writes), file.flushed) for number, file in self._files.items()}
        self.moments.append(Moment((tuple(self._entries), self._flushed), files, self._mode))

    def _change(self, change: Callable[[dict[str, int]], None]) -> None:
        change(self._names)
        self._entries.append(change)
        self._moment()

    def _open(self, handle: int, path: Any, flags: int, *_: Any) -> None:
        if Path(path) == self.folder:
            self._handles[handle] = None
        elif Path(path).parent == self.folder:
            name = Path(path).name
            if name not in self._names:
                number = len(self._files)
                self._files[number] = File()
                self._change(lambda names: names.__setitem__(name, number))
            self._handles[handle] = self._names[name]

    def _close(self, done: None, handle: int) -> None:
        self._handles.pop(handle, None)

    def _note(self, handle: int, write: Callable[[bytearray], None]) -> None:
        number = self._handles.get(handle)
        if number is not None:
            self._files[number].writes.append(write)
            self._moment()

    def _pwrite(self, done: int, handle: int, data: bytes, at: int) -> None:
        def write(file: bytearray) -> None:
            file.extend(b"\0" * (at - len(file)))
            file[at : at + len(data)] = data

        self._note(handle, write)

    def _write(self, done: int, handle: int, data: bytes) -> None:
        self._note(handle, lambda file: file.extend(data))

    def _ftruncate(self, done: None, handle: int, size: int) -> None:
        def cut(file: bytearray) -> None:
            del file[size:]
            file.extend(b"\0" * (size - len(file)))

        self._note(handle, cut)

    def _fsync(self, done: None, handle: int) -> None:
        number = self._handles.get(handle, -1)
        if number is None:
            self._flushed = len(self._entries)
        elif number in self._files:
            self._files[number].flushed = len(self._files[number].writes)
        self._moment()

    def _unlink(self, done: None, path: Path, *_: Any) -> None:
        if path.parent == self.folder and path.name in self._names:
            self._change(lambda names: names.pop(path.name, None) and None)

    def _rename(self, done: Any, path: Path, target: Any) -> None:
        if path.parent == self.folder:
            name, other = path.name, Path(target).name
            self._change(lambda names: names.__setitem__(other, names.pop(name)) if name in names else None)


@pytest.fixture
def moments(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[Moment]:
    """Return the moments of a session that switches a power mode, sets a clock, restores, and does so again."""
    folder = tmp_path / "originals"
    folder.mkdir(mode=0o700)
    with monkeypatch.context() as patched:
        disk = Disk(folder, patched)
        board = Actuator(
            "board", state=folder, controls=Board({MODE: "0", CLOCK: "1"}, disk.set), boot_id="one", guarded=False
        )
        levels = frozenset({"2", "3", "10", "20"})
        board.allow(Control(MODE, levels, persistent=True), Control(CLOCK, levels))
        with board:
            for mode, clock in (("2", "10"), ("3", "20")):
                board.apply([Setting(MODE, mode), Setting(CLOCK, clock)])
                board.restore()
            board.apply([Setting(CLOCK, "10"), Setting(MODE, "2")])
    return disk.moments


def test_after_any_cut_of_the_power_what_outlives_it_goes_back_or_is_named(
    moments: list[Moment], tmp_path: Path
) -> None:
    """By the first restore in the next boot."""
    chance, tried, seen = random.Random(0), 0, set()
    for moment in moments:
        for state in moment.states(chance):
            key = (moment.mode, tuple(sorted(state.items())))
            if key in seen:
                continue
            seen.add(key)
            tried += 1
            folder = tmp_path / f"cut{tried}"
            folder.mkdir(mode=0o700)
            for name, data in state.items():
                (folder / name).write_bytes(data)
                (folder / name).chmod(0o600)
            board = Board({MODE: moment.mode, CLOCK: "1"})
            try:
                told = [
                    str(each) for done in restore_all(folder, controls=board, boot_id="two") for each in done.failed
                ]
            except PolythrottleError as err:
                told = [str(err)]
            assert board.held[MODE] == "0" or told, (state, moment.mode)
            assert board.held[CLOCK] == "1"
    assert tried > 200
    assert {moment.mode for moment in moments} == {"0", "2", "3"}
