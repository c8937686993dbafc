"""Makes every system call of a steering program fail in turn, and looks whether the board is as it was found.

Four programs take a board of three controls: a writer, which sets them twice and ends; ``apply``, which leaves them
set; ``restore``, which puts back what a dead writer has left; and the guard, which does so by itself. Each runs under
strace, which makes one of its calls (or two, drawn at random) fail with an error as the kernel gives them. Right after
it has ended, before any repair, the board must be as found (or as applied); or the exit code is not 0, and each control
that is not is named, or back within seconds by the guard. A guard can tell nobody: what it leaves must be on record::

    python benchmarks/syscall_faults.py                 # every call, every error; minutes
    python benchmarks/syscall_faults.py --sample 100    # as many of each program, drawn by --seed
    python benchmarks/syscall_faults.py --pairs 5000    # that many pairs instead
    python benchmarks/syscall_faults.py --program guard

Ends with 1 if any cell is broken.
"""

import argparse
import os
import random
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import count
from pathlib import Path

from tqdm import tqdm

KNOBS = ("gpu", "mem", "cpu")
CALLS = (
    *("openat", "read", "write", "pread64", "pwrite64", "fsync", "ftruncate", "unlink", "rename", "flock", "fcntl"),
    *("mmap", "clone", "clone3", "vfork", "pipe2", "readlink", "newfstatat", "socket"),
)
ERRORS = ("EIO", "ENOSPC", "EROFS", "EMFILE", "ENOMEM", "EINTR", "EAGAIN")
START = """
import argparse, os, signal, sys
from contextlib import suppress
from polythrottle.actuation import Actuator, Control, Setting, guard, restoring
from polythrottle.errors import PolythrottleError

def mark(name):
    with suppress(OSError):
        os.readlink(name)

def set_twice(board):
    board.allow(*(Control(key, frozenset({"10", "20"})) for key in keys))
    for text in ("10", "20"):
        board.apply([Setting(key, text) for key in keys])

keys = sys.argv[1:4]
argparse.ArgumentParser().add_argument("--all")  # reads its words in the user's language only once
"""
WRITER = """
mark("/begin")
try:
    with Actuator("board") as board:
        set_twice(board)
    if board.differences:
        sys.exit("; ".join(map(str, board.differences)))
except PolythrottleError as err:
    sys.stderr.write(f"error: {err}\\n")
    os._exit(err.exit_code)
mark("/end")
"""
APPLY = """
mark("/begin")
try:
    with Actuator("board") as board:
        set_twice(board)
        board.hand_over("a profile", None)
except PolythrottleError as err:
    sys.stderr.write(f"error: {err}\\n")
    os._exit(err.exit_code)
mark("/end")
"""
DEAD = """
board = Actuator("board", guarded=False).__enter__()
set_twice(board)
print(board._site.folder, board._site.stem, board._boot(), board._token, os.getpid(), flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""
RESTORE = """
mark("/begin")
code = restoring.main([])
mark("/end")
sys.exit(code)
"""
GUARD = """
mark("/begin")
guard.main(sys.argv[4:])
mark("/end")
"""
PROGRAMS = {"writer": WRITER, "apply": APPLY, "restore": RESTORE, "guard": GUARD}


@dataclass(frozen=True)
class Fault:
    """One system call that fails.

    Args:
        call: Its name.
        number: Which of them, counted from the start of the process.
        error: As which.
    """

    call: str
    number: int
    error: str

    def __str__(self) -> str:
        return f"{self.call} {self.number} {self.error}"

    @property
    def words(self) -> list[str]:
        """What makes strace do it."""
        return ["-e", f"inject={self.call}:error={self.error}:when={self.number}"]


class Bench:
    """A folder with a board and a state folder of its own.

    Args:
        folder: Which.
        program: Of `PROGRAMS`.
    """

    def __init__(self, folder: Path, program: str = "writer") -> None:
        self.folder, self.program = folder, program
        self.knobs = [folder / name for name in KNOBS]
        self._environment = {
            **os.environ,
            "POLYTHROTTLE_STATE_DIR": str(folder / "state"),
            "POLYTHROTTLE_ROOTS": str(folder),
            "PYTHONDONTWRITEBYTECODE": "1",
        }

    def run(self, words: Sequence[str]) -> tuple[int, str]:
        """Run the program under strace on a new board, and return its exit code and what it said."""
        shutil.rmtree(self.folder, ignore_errors=True)
        self.folder.mkdir(parents=True)
        for knob in self.knobs:
            knob.write_text("1")
        more, told = self._left() if self.program in ("restore", "guard") else ([], b"")
        command = self._python(PROGRAMS[self.program], *more)
        done = subprocess.run(
            ["strace", "-qq", *words, *command],
            check=False,
            input=told,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            env=self._environment,
            timeout=120,
        )
        return done.returncode, done.stdout.decode(errors="replace")

    def _python(self, code: str, *words: str) -> list[str]:
        return [sys.executable, "-c", START + code, *map(str, self.knobs), *words]

    def _left(self) -> tuple[list[str], bytes]:
        """Let a writer die, and return what its guard would be started with and told."""
        words = subprocess.run(self._python(DEAD), check=False, capture_output=True, env=self._environment).stdout
        return words.decode().split(), self._record()

    def _record(self) -> bytes:
        return b"".join(each.read_bytes() for each in (self.folder / "state" / "originals").glob("*.jsonl"))

    def changed(self) -> list[str]:
        """Return the controls that are not as they are to be."""
        return [str(knob) for knob in self.knobs if knob.read_text().strip() != "1"]

    def calls(self) -> list[tuple[str, int]]:
        """Return every call of the program, with its number since the process was started."""
        trace = self.folder.with_suffix(".trace")
        self.run(["-e", f"trace={','.join(CALLS)}", "-o", str(trace)])
        counted: Counter[str] = Counter()
        found, within = [], False
        for line in trace.read_text().splitlines():
            match = re.match(r"(\w+)\(", line)
            if match is None:
                continue
            counted[match[1]] += 1
            if '"/begin"' in line or '"/end"' in line:
                within = '"/begin"' in line
            elif within:
                found.append((match[1], counted[match[1]]))
        return found

    def broken(self, faults: Sequence[Fault]) -> str:
        """Return what is wrong after a run with faults; empty if the promise held."""
        merged: dict[str, list[Fault]] = {}
        for fault in faults:
            merged.setdefault(fault.call, []).append(fault)
        words = [word for each in merged.values() for word in each[0].words]  # strace takes one of a kind
        code, said = self.run(["-e", f"trace={','.join(merged)}", "-o", "/dev/null", *words])
        changed = self.changed()
        if not changed:
            return ""
        if self.program == "apply" and code == 0:
            kept = b'"kept": true' in b"".join(each.read_bytes() for each in self.folder.rglob("*.lease"))
            applied = kept and all(knob.read_text().strip() == "20" for knob in self.knobs)
            return "" if applied else f"code 0, and neither applied nor as found: {changed}"
        if self.program == "guard":
            unnamed = [each for each in changed if each.encode() not in self._record()]
            return f"changed, and not on record: {unnamed}" if unnamed else ""
        if code == 0:
            return f"code 0, and changed: {changed}"
        unnamed = [each for each in changed if each not in said]
        ends = time.monotonic() + 10
        while unnamed and time.monotonic() < ends:
            time.sleep(0.05)
            unnamed = [each for each in unnamed if each in self.changed()]
        return f"code {code}, changed and not named: {unnamed}; said {said[-300:]}" if unnamed else ""


def drawn(calls: Sequence[tuple[str, int]], sample: int | None, pairs: int, seed: int) -> Iterator[tuple[Fault, ...]]:
    """Return the cells that are tried."""
    every = [Fault(call, number, error) for call, number in calls for error in ERRORS]
    every = [each for each in every if (each.call, each.error) != ("flock", "EAGAIN")]  # says that another has it
    chance = random.Random(seed)
    if pairs:
        for _ in range(pairs):
            yield tuple(chance.sample(every, 2))
        return
    for each in every if sample is None else chance.sample(every, min(sample, len(every))):
        yield (each,)


def tried(
    program: str = "writer", sample: int | None = None, pairs: int = 0, seed: int = 0, jobs: int = 2
) -> tuple[int, list[str]]:
    """Try cells of a program, and return how many and what was broken."""
    with tempfile.TemporaryDirectory() as folder:
        numbers = count()
        cells = list(drawn(Bench(Path(folder) / "calls", program).calls(), sample, pairs, seed))

        def one(faults: tuple[Fault, ...]) -> str:
            bench = Bench(Path(folder) / str(next(numbers)), program)
            wrong = bench.broken(faults)
            shutil.rmtree(bench.folder, ignore_errors=True)
            return f"{program}: {' + '.join(map(str, faults))}: {wrong}" if wrong else ""

        with ThreadPoolExecutor(jobs) as pool:
            found = list(tqdm(pool.map(one, cells), program, len(cells), disable=None, unit="cell"))
    return len(cells), [each for each in found if each]


def main() -> int:
    """Run what the command line asks for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--program", choices=PROGRAMS, action="append", help="only this one; may be given again")
    parser.add_argument("--sample", type=int, help="try so many single faults of each; all if left out")
    parser.add_argument("--pairs", type=int, default=0, help="try so many random pairs instead, over all programs")
    parser.add_argument("--seed", type=int, default=0, help="of what is drawn")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="runs at once")
    given = parser.parse_args()
    programs = given.program or list(PROGRAMS)
    wrong = 0
    for program in programs:
        tries, broken = tried(program, given.sample, -(-given.pairs // len(programs)), given.seed, given.jobs)
        sys.stdout.write("".join(f"{line}\n" for line in broken))
        sys.stdout.write(f"{program}: {tries} cells, {len(broken)} broken\n")
        wrong += len(broken)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
