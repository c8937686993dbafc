"""Sessions of steering programs, each run on a board of its own with chosen system calls failing, and judged.

For `benchmarks/syscall_faults.py`, which says which calls, and of which sessions.
"""

import argparse
import ctypes
import os
import shutil
import signal
import socket
import sys
import time
import traceback
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass
from itertools import count
from pathlib import Path

from injecting import KILL, Fault, Injector, install, mark

from polythrottle.actuation import Actuator, Control, Setting, guard, restore
from polythrottle.actuation.client.connection import Line
from polythrottle.actuation.server.main import main as actuator_main
from polythrottle.backends.cpu import CpuDevice
from polythrottle.domain.clock import VirtualClock
from polythrottle.domain.errors import PolythrottleError
from polythrottle.domain.measurement import Query, Reading, Window
from polythrottle.domain.problem import Constraint, Problem
from polythrottle.domain.space import OperatingPoint, SearchSpace
from polythrottle.domain.study import Study
from polythrottle.storage.journal import Journal
from polythrottle.tuning.stopping import Budget, Rule
from polythrottle.tuning.tuner import tune

ERRORS = ("EIO", "ENOSPC", "EROFS", "EMFILE", "ENOMEM", "EINTR", "EAGAIN")
_LONGEST_S, _BACK_S = 60.0, 30.0  # bounds on hangs: a busy machine takes seconds to start a guard
_SUBREAPER = 36  # prctl(2)


class Board:
    """Three controls, each a file, and a state folder; all of it below one folder.

    Args:
        folder: Which.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.said = folder / "said"
        self._found: dict[Path, str] = {}

    def lay(self) -> None:
        """Make it, as it is when nobody has touched it."""
        shutil.rmtree(self.folder, ignore_errors=True)
        self.folder.mkdir(parents=True)
        for path, text in self._files().items():
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
        self._found = self.held()

    def _files(self) -> Mapping[Path, str]:
        return {self.folder / name: "1" for name in ("gpu", "mem", "cpu")}

    def controls(self) -> Sequence[Path]:
        """Return the files that may be set."""
        return [self.folder / name for name in ("gpu", "mem", "cpu")]

    def held(self) -> dict[Path, str]:
        """Return what every control holds."""
        return {path: path.read_text().strip() for path in self.controls()}

    def changed(self) -> list[str]:
        """Return the controls that are not as found."""
        return [str(path) for path, text in self.held().items() if text != self._found[path]]

    def record(self) -> bytes:
        """Return what is on record."""
        return b"".join(each.read_bytes() for each in (self.folder / "state" / "originals").glob("*.jsonl"))

    def set_twice(self, actuator: Actuator) -> None:
        """Write every control twice."""
        keys = [str(path) for path in self.controls()]
        actuator.allow(*(Control(key, frozenset({"10", "20"})) for key in keys))
        for text in ("10", "20"):
            actuator.apply([Setting(key, text) for key in keys])


class Processor(Board):
    """A processor of two policies, as cpufreq and powercap show it (Documentation/admin-guide/pm/cpufreq.rst)."""

    @property
    def root(self) -> Path:
        """Where its ``sys`` hangs."""
        return self.folder / "tree"

    def _files(self) -> Mapping[Path, str]:
        files = {
            "class/powercap/intel-rapl:0/name": "package-0",
            "class/powercap/intel-rapl:0/max_energy_range_uj": "65532610987",
            "class/powercap/intel-rapl:0/energy_uj": "5000000",
        }
        for number in range(2):
            policy = f"devices/system/cpu/cpufreq/policy{number}"
            files |= {f"{policy}/scaling_{name}_freq": khz for name, khz in _POLICY.items()}
            files[f"{policy}/scaling_available_frequencies"] = "3000000 2400000 1600000 800000"
        return {self.root / "sys" / name: f"{text}\n" for name, text in files.items()}

    def controls(self) -> Sequence[Path]:
        """Return both policies' limits."""
        return sorted((self.root / "sys/devices/system/cpu/cpufreq").glob("policy*/scaling_m??_freq"))


_POLICY = {"min": "800000", "max": "3000000", "cur": "3000000"}


class Session:
    """What a program does with a board: here a writer, which sets it twice and ends."""

    name = "writer"
    told = "sets three controls twice, and ends"
    board: type[Board] = Board
    errors: Sequence[str] = ERRORS
    leaves = False
    """Whether the board is to be changed right after it, where nothing fails."""
    heeds: Sequence[str] = ()
    """Calls that `heed` is to be told of, in any case."""

    def prepare(self, board: Board) -> None:
        """Do what goes before, in a process of its own, which ends then."""

    def become(self, board: Board) -> None:
        """Do what goes before in the process whose calls fail; may go on in a child of it."""

    def act(self, board: Board) -> int:
        """Do what is looked at, and return the exit code."""
        with Actuator("board") as actuator:
            board.set_twice(actuator)
        return _complain("; ".join(map(str, actuator.differences)))

    def meanwhile(self, board: Board, pid: int) -> None:
        """Do what another process does at the same time, and end."""

    def heed(self, call: str, parent: int) -> None:
        """Be told of each call while it waits, and of the process that was forked."""

    def wrong(self, board: Board, end: "End") -> str:
        """Return what is wrong after the end; empty if the promise holds."""
        changed = board.changed()
        if not changed:
            return ""
        if end.code == 0:
            return f"code 0, and changed: {changed}"
        unnamed = [each for each in changed if each not in end.said]
        if not unnamed or end.wait(lambda: not any(each in board.changed() for each in unnamed)):
            return ""
        return f"code {end.code}, changed and not named: {unnamed}; said {end.said[-300:]}"


class Apply(Session):
    """Leaves what it has set."""

    name = "apply"
    leaves = True
    told = "leaves them set until a restore (`apply --keep`)"
    seconds: float | None = None

    def act(self, board: Board) -> int:
        """Set the board and hand it over."""
        with Actuator("board") as actuator:
            board.set_twice(actuator)
            actuator.hand_over("a profile", self.seconds)
        return 0

    def wrong(self, board: Board, end: "End") -> str:
        """With code 0 it is applied, in whole and on the lease."""
        changed = board.changed()
        if not changed or end.code:
            return super().wrong(board, end)
        kept = b'"kept": true' in b"".join(each.read_bytes() for each in board.folder.rglob("*.lease"))
        applied = kept and set(board.held().values()) == {"20"}
        return "" if applied else f"code 0, and neither applied nor as found: {changed}"


class ApplyFor(Apply):
    """Leaves what it has set for a time."""

    name = "apply for a time"
    told = "leaves them set for 0.15 s with a guard (`apply --for`)"
    seconds = 0.15

    def wrong(self, board: Board, end: "End") -> str:
        """With code 0 it is applied in whole, and reverts by itself."""
        held = board.held()
        if end.code or not board.changed():
            return Session.wrong(self, board, end)
        if end.wait(lambda: not board.changed()):
            return ""
        return f"code 0, and {held} does not revert: {board.changed()}"


class Restore(Session):
    """Puts back what a dead writer has left."""

    name = "restore"
    told = "puts back what a writer has left that died with its guard"

    def prepare(self, board: Board) -> None:
        """Die without restoring."""
        board.set_twice(Actuator("board", guarded=False).__enter__())

    def act(self, board: Board) -> int:
        """Restore."""
        return restore.main([])


class EndApplied(Restore):
    """Ends a profile that was applied for a time."""

    name = "restore applied"
    told = "ends what `apply --for 1h` has left, guard and all"

    def prepare(self, board: Board) -> None:
        """Apply for an hour."""
        with Actuator("board") as actuator:
            board.set_twice(actuator)
            actuator.hand_over("a profile", 3600.0)


class Guard(Session):
    """Takes over when its writer is killed."""

    name = "guard"
    told = "takes over when its writer is killed"
    heeds = ("select", "pselect6", "poll", "ppoll")

    def become(self, board: Board) -> None:
        """Be the writer, and its guard in a child: the writer is killed once the guard waits for that."""
        actuator = Actuator("board", guarded=False).__enter__()
        board.set_twice(actuator)
        ear, mouth = os.pipe()
        site = actuator._site
        self._words = [str(site.folder), site.stem, actuator._boot(), str(actuator._token), str(os.getpid())]
        os.write(mouth, board.record())
        if os.fork():
            _pause()
        os.dup2(ear, 0)
        sys.stdin = open(0, closefd=False)  # noqa: SIM115  a worker of a pool has another
        for handle in {int(each) for each in os.listdir("/proc/self/fd")} - {0, 1, 2, self.way}:
            with suppress(OSError):
                os.close(handle)  # the writer's, whose lock would outlive it

    way = -1

    def act(self, board: Board) -> int:
        """Guard."""
        guard.main(self._words)
        return 0

    def heed(self, call: str, parent: int) -> None:
        """Kill the writer while its guard waits."""
        if call in self.heeds:
            with suppress(ProcessLookupError):
                os.kill(parent, signal.SIGKILL)

    def wrong(self, board: Board, end: "End") -> str:
        """It can tell nobody: what is left must be on record."""
        unrecorded = [each for each in board.changed() if each.encode() not in board.record()]
        return f"changed, and not on record: {unrecorded}" if unrecorded else ""


class Killed(Session):
    """Is killed in the middle, and its guard takes over."""

    name = "killed"
    told = "the writer, killed (SIGKILL) at that call: its guard takes over"
    errors = (KILL,)

    def wrong(self, board: Board, end: "End") -> str:
        """The guard puts everything back."""
        if not board.changed():
            return ""
        if end.code == 0 or end.wait(lambda: not board.changed()):
            return "" if end.code else f"code 0, and changed: {board.changed()}"
        return f"killed, and not put back: {board.changed()}"


class Tune(Session):
    """A short study."""

    name = "tune"
    told = "the tuning loop: three trials in virtual time, each journalled, none by torch"
    board = Processor

    def act(self, board: Board) -> int:
        """Tune."""
        assert isinstance(board, Processor)
        device = _Metered(root=str(board.root), clock=VirtualClock(), knobs=("cpu_max_hz", "cpu_min_hz"))
        served, space = _Served(device), device.space
        window = Window(queries=2, duration_s=0.1, warmup=1, most_queries=2)
        study = Study(Problem(space, (Constraint("mean", 2.5, True),), device.uri, served.uri, window=window), "listed")
        with (
            Journal.create(board.folder / "state" / "studies" / "study.jsonl", study, {}) as journal,
            closing(tune(device, served, _Listed(), journal, Budget(3), Rule(early=False))) as loop,
        ):
            for _ in loop:
                pass
        return _complain("; ".join(map(str, device.differences)))


class _Metered(CpuDevice):
    """A processor whose energy follows the virtual time, which its files cannot."""

    def read(self) -> Reading:
        """Return a reading with 10 W in it."""
        found = super().read()
        return Reading(found.time_s, 10.0 * found.time_s, found.temperature_c, found.clocks_hz, found.throttled)


class _Served:
    """A workload that takes 10 ms of virtual time."""

    uri, space = "model", SearchSpace.unit()

    def __init__(self, device: CpuDevice) -> None:
        self._clock = device.clock

    def apply(self, point: OperatingPoint) -> None:
        """Take a point without knobs."""

    def query(self) -> Query:
        """Serve one item."""
        self._clock.sleep(0.01)
        return Query(0.01, 1)

    def close(self) -> None:
        """Do nothing."""


class _Listed:
    """Tries one point after another, the default first."""

    def suggest(self, study: Study) -> OperatingPoint:
        """Return the first that was not tried."""
        return next(point for point in study.problem.space if point not in study.visited)


class Served(Session):
    """The actuator, a client of which sets the board and goes."""

    name = "actuator"
    told = "the actuator: a client takes the board, sets it twice, reads and goes; then SIGTERM"
    board = Processor

    def act(self, board: Board) -> int:
        """Serve until told to stop."""
        assert isinstance(board, Processor)
        return actuator_main(["--socket", str(board.folder / "s" / "a"), "--device", f"cpu?root={board.root}"])

    def meanwhile(self, board: Board, pid: int) -> None:
        """Be the client, then tell the actuator to stop."""
        line = Line(board.folder / "s" / "a", patience_s=5.0)
        try:
            _answered(line, pid)
            token = line.ask("take", device="", seconds=60)["token"]
            for hz in (1_600_000_000, 2_400_000_000):
                line.ask("apply", token=token, point={"cpu_max_hz": hz, "cpu_min_hz": hz})
            line.ask("read", device="")
        except PolythrottleError:
            pass  # what it was refused is of no concern here
        finally:
            line.close()
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGTERM)


def _answered(line: Line, pid: int) -> None:
    while True:
        try:
            line.ask("hello")
            return
        except PolythrottleError:
            if not Path(f"/proc/{pid}/fd").exists():
                raise
            time.sleep(0.002)


SESSIONS: Mapping[str, Session] = {
    each.name: each
    for each in (Session(), Apply(), ApplyFor(), Restore(), EndApplied(), Guard(), Killed(), Tune(), Served())
}


def _complain(left: str) -> int:
    """Say what is left, as the command line does, and return the exit code."""
    if left:
        sys.stderr.write(f"{left}\n")
    return 1 if left else 0


def _pause() -> None:
    while True:
        signal.pause()


@dataclass
class End:
    """How a session ended.

    Args:
        code: Its exit code; minus the signal that it was killed by; None if it had to be ended.
        said: What it wrote to standard output and error.
        calls: What it called, in order, with numbers.
        met: How many of the faults took place.
        changed: The controls that were not as found right after.
        wait: Waits until something is so, while whoever is left goes on, and says whether it came to be in time.
    """

    code: int | None
    said: str
    calls: list[tuple[str, int]]
    met: int
    changed: list[str]
    wait: Callable[[Callable[[], bool]], bool]


class Bench:
    """Runs sessions, each in a fork of this process; ends whatever they leave behind.

    For a process of its own: all children of it are taken for a session's.

    Args:
        folder: For boards, each in a folder of its own.
    """

    def __init__(self, folder: Path) -> None:
        self._folder, self._numbers = folder, count()
        ctypes.CDLL(None).prctl(_SUBREAPER, 1, 0, 0, 0)  # orphans of a session become children of this process

    def run(self, session: Session, faults: Sequence[Fault] = (), calls: Sequence[str] = ()) -> tuple[End, str]:
        """Run a session on a new board.

        Args:
            session: Which.
            faults: What fails.
            calls: Which calls to report; those of the faults if empty.

        Returns:
            How it ended, and what is wrong then; empty if nothing is.
        """
        board = session.board(self._folder / str(next(self._numbers)))
        board.lay()
        try:
            if type(session).prepare is not Session.prepare:
                _forked(lambda: _prepared(session, board))
            return self._ran(session, board, faults, {*(calls or (each.call for each in faults)), *session.heeds})
        finally:
            _end_all()
            shutil.rmtree(board.folder, ignore_errors=True)

    def _ran(self, session: Session, board: Board, faults: Sequence[Fault], calls: Sequence[str]) -> tuple[End, str]:
        own, theirs = socket.socketpair()
        with own:
            first = _fork(lambda: _child(session, board, calls, theirs))
            theirs.close()
            injector = Injector(own, faults, lambda call, number: session.heed(call, first))
        pid = injector.pid
        if type(session).meanwhile is not Session.meanwhile:
            _fork(lambda: session.meanwhile(board, pid))
        ended = os.pidfd_open(pid)
        try:
            over = injector.serve(lambda: _has_ended(pid), _LONGEST_S, ended=ended)
        finally:
            os.close(ended)
        code = _code_of(pid) if over and pid == first else None
        end = End(
            code,
            board.said.read_text(errors="replace"),
            injector.calls,
            len(injector.met),
            board.changed(),
            lambda true: injector.serve(true, _BACK_S),
        )
        try:
            return end, session.wrong(board, end) if over else f"did not end in {_LONGEST_S:g} s"
        finally:
            _end_all()
            injector.close()


def _fork(act: Callable[[], object]) -> int:
    pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        code = int(act() or 0)  # type: ignore[call-overload]
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(code)


def _forked(act: Callable[[], object]) -> None:
    """Do something in a child, and wait for its end."""
    if code := os.waitstatus_to_exitcode(os.waitpid(_fork(act), 0)[1]):
        raise ChildProcessError(f"what goes before a session ended with {code}")


def _at_home(board: Board) -> None:
    os.environ |= {"POLYTHROTTLE_STATE_DIR": str(board.folder / "state"), "POLYTHROTTLE_ROOTS": str(board.folder)}


def _prepared(session: Session, board: Board) -> None:
    _at_home(board)
    session.prepare(board)


def _child(session: Session, board: Board, calls: Collection[str], way: socket.socket) -> int:
    """Be the session; returns its exit code, as Python ends with it."""
    _at_home(board)
    said = os.open(board.said, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    for handle, name in ((1, "stdout"), (2, "stderr")):
        os.dup2(said, handle)
        setattr(sys, name, open(handle, "w", buffering=1, closefd=False, encoding="utf-8"))  # noqa: SIM115
    os.close(said)
    argparse.ArgumentParser().add_argument("--all")  # reads its words in the user's language only once
    if isinstance(session, Guard):
        session.way = way.fileno()
    session.become(board)
    install(calls, way)
    mark()
    try:
        code = session.act(board)
    except PolythrottleError as err:
        code = err.exit_code
        sys.stderr.write(f"error: {err}\n")
    except SystemExit as err:
        code = err.code if isinstance(err.code, int) else 1
    except BaseException:
        traceback.print_exc()
        code = 1
    mark()
    return code


def _has_ended(pid: int) -> bool:
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return True
    return fields[0] in ("Z", "X")


def _code_of(pid: int) -> int:
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def _end_all() -> None:
    """End what a session has left: every process below this one."""
    while left := _below(os.getpid()):
        for pid in left:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        with suppress(ChildProcessError):
            while os.waitpid(-1, 0):
                pass


def _below(pid: int) -> list[int]:
    try:
        found = [int(each) for each in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    except FileNotFoundError:
        return []
    return [each for child in found for each in (*_below(child), child)]
