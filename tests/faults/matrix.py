"""Run every cell of the fault matrix on one board: ``python -m faults.matrix BOARD FOLDER [EVERY [FIRST]]``.

A cell is a fault at a step of a session that applies two points and a power mode and leaves. The session runs in a
child process; afterwards what is left is restored from the record, as the next process would. A cell holds if the board
is then as it was found, or every control that is not is named in what was reported. Prints one JSON line a cell.
"""

import errno
import json
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy  # noqa: F401  # before the forks: a third of a cell's time went into each child's own import

from faults.steps import AFTER_WRITE, RESTORING, Steps
from faults.worlds import World, made
from polythrottle.actuation import restore_all, standing
from polythrottle.actuation.restore import told
from polythrottle.actuation.state import lease, record
from polythrottle.actuation.state.site import Site, boot_id
from polythrottle.domain.errors import PolythrottleError

ERRORS = ("EIO", "EBUSY", "EAGAIN", "EINVAL")
MANGLINGS = ("corrupt", "truncated", "duplicated")
GUARDED = ("killed, guard left", "killed with its guard")
FAULTS = (
    *("killed", *GUARDED, "stopped", "disk full", "read-only state", "device lost", "foreign writer"),
    *("clock jump", "reboot", "re-enumerated", *MANGLINGS),
)
ON_WRITE = (*ERRORS, "rounded", "ignored")
"""Faults that change what a write does."""


@dataclass(frozen=True)
class Cell:
    """One fault at one step.

    Args:
        fault: Which.
        at: The step, from 0.
        stage: What kind of step it is.
    """

    fault: str
    at: int
    stage: str


class Session:
    """The child's side of a cell: a session with a fault in it.

    Args:
        world: The board.
        cell: The fault and where.
    """

    def __init__(self, world: World, cell: Cell) -> None:
        self._world, self._cell = world, cell
        self.said: list[str] = []
        self.blind: tuple[str, ...] = ()
        self.steps = Steps(world.controls(), cell.at, self._act)

    def run(self) -> None:
        """Run it through; what it reports is in ``said``."""
        self.steps.wire()
        signal.signal(signal.SIGTERM, _stop)
        device: Any = self._world.open(self.steps)
        self._actuators = [each._actuator for each in getattr(device, "members", [device])]
        for actuator in self._actuators:
            actuator._guarded = self._cell.fault in GUARDED
        try:
            with device:
                for point in self._world.points(device):
                    device.apply(point)
        except (PolythrottleError, KeyboardInterrupt) as err:
            self.said.append(str(err))
        self.said += map(str, device.differences)
        self.blind = tuple(key for actuator in self._actuators for key in actuator.unverified)

    def _act(self, key: str) -> None:
        fault = self._cell.fault
        acts: Mapping[str, Callable[[str], None]] = {
            "killed with its guard": lambda _: self._kill_guard(),
            "stopped": lambda _: os.kill(os.getpid(), signal.SIGTERM),
            "disk full": lambda _: _break_disk(errno.ENOSPC),
            "read-only state": lambda _: _break_disk(errno.EROFS),
            "device lost": lambda _: self._lose(),
            "re-enumerated": lambda _: self._world.renumber(),
            "foreign writer": self._meddle,
            "clock jump": lambda _: _jump(),
            "rounded": self._round,
            "ignored": self._ignore,
            **dict.fromkeys(ERRORS, self._refuse),
        }
        acts.get(fault, _die)(key)

    def _kill_guard(self) -> None:
        for actuator in self._actuators:
            if actuator._watch is not None:
                actuator._watch._guard.kill()
                actuator._watch._guard.wait()
        _die("")

    def _lose(self) -> None:
        self.steps.lost = True

    def _meddle(self, key: str) -> None:
        if self._world.held().get(key, "?") != "?":
            text = self._world.another(key)
            self._world.write_foreign(key, text)

    def _refuse(self, _: str) -> None:
        self._once(lambda key, text: _raise(getattr(errno, self._cell.fault), key))

    def _round(self, key: str) -> None:
        self._once(lambda key, text: self._world.another(key))

    def _ignore(self, _: str) -> None:
        self._once(lambda key, text: None)

    def _once(self, change: Callable[[str, str], str | None]) -> None:
        def once(key: str, text: str) -> str | None:
            self.steps.on_write = None
            return change(key, text)

        self.steps.on_write = once


def _die(_: str) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def _raise(code: int, key: str) -> None:
    raise OSError(code, os.strerror(code), key)


def _stop(*_: object) -> None:
    raise KeyboardInterrupt


def _jump() -> None:
    real = time.time
    time.time = lambda: real() + 864_000.0


def _break_disk(code: int) -> None:
    class Disk:
        def __getattr__(self, name: str) -> Any:
            return getattr(os, name)

        def pwrite(self, *_: object) -> int:
            raise OSError(code, os.strerror(code))

        def ftruncate(self, *_: object) -> None:
            raise OSError(code, os.strerror(code))

    record.os = lease.os = Disk()  # type: ignore[attr-defined]


def run_cell(world: World, cell: Cell) -> dict[str, Any]:
    """Return a cell with what came of it."""
    world.fresh()
    original = dict(world.held())
    said = _in_a_child(world, cell)
    if cell.fault == "killed, guard left":
        _await_guard()
    after = boot_id()
    if cell.fault == "reboot":
        original.update(_rebooted(world, original))
        after = "another-boot"
    _mangle(cell.fault)
    said += _restore(world, after)
    held = world.held()
    changed = sorted(key for key in original if held.get(key) != original[key])
    unnamed = [key for key in changed if key not in said]
    holds = not unnamed and "TRACEBACK" not in said
    return {**cell.__dict__, "board": world.name, "holds": holds, "changed": changed, "unnamed": unnamed, "said": said}


def _in_a_child(world: World, cell: Cell) -> str:
    out, into = os.pipe()
    child = os.fork()
    if not child:
        os.close(out)
        code = 1
        try:
            session = Session(world, cell)
            session.run()
            os.write(into, "\n".join([*session.said, *session.blind]).encode()[:60000])
            code = 0
        finally:
            if code:
                import traceback

                os.write(into, f"TRACEBACK {traceback.format_exc()}".encode()[:60000])
            os._exit(code)
    os.close(into)
    with os.fdopen(out) as pipe:
        said = pipe.read()
    os.waitpid(child, 0)
    return said


def _await_guard() -> None:
    """Wait for the guard to restore, which it must do by itself."""
    ends = time.monotonic() + 20
    while standing() and time.monotonic() < ends:
        time.sleep(0.01)
    assert not standing(), "the guard did not restore"


def _rebooted(world: World, original: Mapping[str, str]) -> dict[str, str]:
    """Start the board again and return what it would hold had nobody touched it before."""
    world.reboot()
    now = world.held()
    modes = [key for key in original if key.startswith("nvpmodel:") and now[key] != original[key]]
    # Where the mode was changed, its return brings the caps with it; the tree of an untouched board says which.
    return {} if modes else dict(now)


def _restore(world: World, boot: str) -> str:
    try:
        outcomes = restore_all(controls=world.controls(), boot_id=boot)
    except PolythrottleError as err:
        return f"\n{err}"
    return "\n".join(line for outcome in outcomes for line in ["", *told(outcome)])


def _mangle(fault: str) -> None:
    for site in Site.all():
        if fault not in MANGLINGS or not site.record.exists():
            continue
        lines = site.record.read_bytes().splitlines(keepends=True)
        if not lines:  # several GPUs are set at once: one was about to begin its record as another met the fault
            continue
        middle = len(lines) // 2
        if fault == "corrupt":
            lines[middle] = lines[middle].replace(b'"', b"'", 3)
        elif fault == "truncated":
            lines = lines[:middle]
        else:
            lines = [*lines, *lines[1:]]
        site.record.write_bytes(b"".join(lines))


def cells(world: World, every: int, first: int = 0) -> Iterator[Cell]:
    """Yield every cell: each fault at each step of an undisturbed session, or at each ``every``-th.

    Each fault begins a step later than the one before it, so that together they meet every step.
    """
    stages = _dry_stages(world)
    for number, fault in enumerate((*FAULTS, *ON_WRITE)):
        for at in range((first + number) % every, len(stages), every):
            if fault in FAULTS or stages[at] in (AFTER_WRITE, RESTORING) or at < every:
                yield Cell(fault, at, stages[at])


def _dry_stages(world: World) -> list[str]:
    """Return the stages of an undisturbed session, counted in a child."""
    world.fresh()
    out, into = os.pipe()
    child = os.fork()
    if not child:
        try:
            session = Session(world, Cell("none", -1, ""))
            session.run()
            os.write(into, json.dumps([session.steps.stages, session.said]).encode())
        finally:
            os._exit(0)
    os.close(into)
    with os.fdopen(out) as pipe:
        stages, said = json.loads(pipe.read())
    os.waitpid(child, 0)
    assert not said, said
    return list(stages)


def main(name: str, folder: str, every: str = "1", first: str = "0") -> None:
    """Run the matrix of one board."""
    world = made(name, Path(folder))
    for cell in cells(world, int(every), int(first)):
        sys.stdout.write(json.dumps(run_cell(world, cell)) + "\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
