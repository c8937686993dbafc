"""Makes every system call of a steering program fail in turn, and looks whether the board is as it was found.

Nine sessions take a board of three or four controls (`benchmarks/syscall_sessions.py`). One of the calls of a session,
or two, drawn at random, fails with an error as the kernel gives them (`benchmarks/injecting.py`). Right after the
session has ended, before any repair, the board must be as found (or as applied); or the exit code is not 0, and each
control that is not is named, or back within seconds by the guard. A guard can tell nobody: what it leaves must be on
record::

    python benchmarks/syscall_faults.py                   # every call, every error; goes on where it stopped
    python benchmarks/syscall_faults.py --pairs 5000      # that many pairs instead, over all sessions
    python benchmarks/syscall_faults.py --sample 100      # as many of each session, drawn by --seed
    python benchmarks/syscall_faults.py --session guard
    python benchmarks/syscall_faults.py --write benchmarks/syscall_faults.md   # what was run so far, as a page

Each cell is a fork of a process that has everything imported, and takes 30 to 250 ms on one core. What was run is kept
with a digest of the code it is about, and counts for that code alone. Ends with 1 if any cell is broken.
"""

import argparse
import hashlib
import json
import os
import random
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from multiprocessing import current_process, get_context
from multiprocessing.pool import Pool
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))

from injecting import CALLS, Fault, available
from syscall_sessions import ERRORS, SESSIONS, Bench
from tqdm import tqdm

os.environ["OPENBLAS_NUM_THREADS"] = "1"  # forks of a process with threads are fragile
ROOT = Path(__file__).resolve().parent.parent
KEPT = ROOT / "benchmarks" / ".cache" / "syscall_faults.jsonl"
_BATCH = 100
Cell = tuple[str, tuple[Fault, ...]]
Result = tuple[Cell, int, str]
_bench: list[Bench] = []


def bench() -> Bench:
    """Return the bench of this process, one of `workers`."""
    return _bench[0]


def _begin(folder: str) -> None:
    # A session and who answers it run by turns: on one core neither waits for a busy machine to give it another.
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {cores[sum(current_process()._identity) % len(cores)]})
    _bench.append(Bench(Path(tempfile.mkdtemp(dir=folder))))


def calls_of(name: str) -> list[tuple[str, int]]:
    """Return every call of a session, with its number."""
    end, wrong = bench().run(SESSIONS[name], calls=CALLS)
    if wrong or bool(end.changed) != SESSIONS[name].leaves:
        raise RuntimeError(f"{name}, of which nothing was made to fail: {wrong or end.changed}; {end.said}")
    return end.calls


def tried_cell(cell: Cell) -> Result:
    """Try a cell, and return how many of its faults took place and what is wrong."""
    try:
        end, wrong = bench().run(SESSIONS[cell[0]], cell[1])
    except ChildProcessError as err:
        return cell, 0, str(err)
    return cell, end.met, wrong


def singles(name: str, calls: Iterable[tuple[str, int]]) -> list[tuple[Fault, ...]]:
    """Return every single fault of a session."""
    every = [Fault(*call, error) for call in calls for error in SESSIONS[name].errors]
    return [(each,) for each in every if (each.call, each.error) != ("flock", "EAGAIN")]  # says that another has it


def pairs(name: str, calls: Sequence[tuple[str, int]], many: int, chance: random.Random) -> list[tuple[Fault, ...]]:
    """Return distinct pairs of faults, each of two different calls in their order."""
    found: dict[tuple[Fault, ...], None] = {}
    while len(found) < many:
        first, second = sorted(chance.sample(range(len(calls)), 2))
        one = Fault(*calls[first], chance.choice(ERRORS))
        other = Fault(*calls[second], chance.choice(SESSIONS[name].errors))
        if ("flock", "EAGAIN") not in ((one.call, one.error), (other.call, other.error)):
            found[one, other] = None
    return list(found)


@cache
def digest() -> str:
    """Return a digest of the code that the cells are about: of sessions, oracle and injector too."""
    parts = ("actuation", "backends/cpu", "storage/journal")
    files = [path for part in parts for path in (ROOT / "polythrottle" / part).rglob("*.py")]
    files += [ROOT / "polythrottle" / name for name in ("tuning/tuner.py", "domain/clock.py")]
    files += [Path(__file__).with_name(name) for name in ("syscall_sessions.py", "injecting.py")]
    found = hashlib.sha256()
    for path in sorted(files):
        found.update(path.read_bytes())
    return found.hexdigest()[:16]


class Kept:
    """What was tried of this code, on disk.

    Args:
        path: Of the file; None keeps nothing.
    """

    def __init__(self, path: Path | None) -> None:
        self._path, self.results = path, dict[Cell, tuple[int, str]]()
        if path is not None and path.exists():
            for text in path.read_text().splitlines():
                line = json.loads(text)
                if line["digest"] == digest():
                    cell = line["session"], tuple(Fault(*each) for each in line["faults"])
                    self.results[cell] = line["met"], line["wrong"]

    def add(self, result: Result) -> None:
        """Keep one more."""
        (name, faults), met, wrong = result
        self.results[name, faults] = met, wrong
        if self._path is None:
            return
        self._path.parent.mkdir(exist_ok=True)
        told = [[each.call, each.number, each.error] for each in faults]
        line = {"digest": digest(), "session": name, "faults": told, "met": met, "wrong": wrong}
        with self._path.open("a") as file:
            file.write(json.dumps(line) + "\n")


@contextmanager
def workers(jobs: int) -> Iterator[Pool]:
    """Start processes that `calls_of` and `tried_cell` may be done in, for these end every child of their process."""
    fast = Path("/dev/shm")  # flushing to memory takes no time, and is still done
    with (
        tempfile.TemporaryDirectory(dir=fast if os.access(fast, os.W_OK) else None) as folder,
        get_context("spawn").Pool(jobs, _begin, (folder,)) as pool,
    ):
        yield pool
        pool.close()  # to end workers that are at work may hang (Pool.terminate)
        pool.join()


def tried(
    names: Sequence[str],
    sample: int | None = None,
    many_pairs: int = 0,
    seed: int = 0,
    jobs: int = 2,
    kept: Path | None = None,
    minutes: float | None = None,
) -> dict[Cell, tuple[int, str]]:
    """Try cells of sessions.

    Args:
        names: Of the sessions.
        sample: So many single faults of each; all if None, and none at all if there are pairs.
        many_pairs: So many pairs of each.
        seed: Of what is drawn.
        jobs: How many processes to do it with.
        kept: File with what was tried before, which is not tried again.
        minutes: When to stop.

    Returns:
        For each cell, how many of its faults took place, and what was wrong; empty if nothing was.
    """
    known, ends_s = Kept(kept), None if minutes is None else time.monotonic() + 60 * minutes
    with workers(jobs) as pool:
        recorded = dict(zip(names, pool.map(calls_of, names, 1), strict=True))
        if sample is not None or many_pairs:
            # What waiting on a busy machine adds once is seldom met again: nothing is drawn from that.
            again = dict(zip(names, map(set, pool.map(calls_of, names, 1)), strict=True))
            recorded = {name: [call for call in recorded[name] if call in again[name]] for name in names}
        asked = [cell for name in names for cell in _drawn(name, recorded[name], sample, many_pairs, seed)]
        todo = [cell for cell in asked if cell not in known.results]
        random.Random(seed).shuffle(todo)  # whenever it is stopped, what was tried is a fair sample
        shown = tqdm(total=len(todo), desc="cells", disable=None)
        while todo and (ends_s is None or time.monotonic() < ends_s):
            for result in pool.imap_unordered(tried_cell, todo[:_BATCH], 4):
                known.add(result)
                shown.update()
            del todo[:_BATCH]
    return {cell: known.results[cell] for cell in asked if cell in known.results}


def _drawn(
    name: str, calls: Sequence[tuple[str, int]], sample: int | None, many_pairs: int, seed: int
) -> Iterator[Cell]:
    chance = random.Random(f"{seed} {name}")
    if many_pairs:
        chosen = pairs(name, calls, many_pairs, chance)
    else:
        chosen = singles(name, calls)
        chosen = chosen if sample is None else chance.sample(chosen, min(sample, len(chosen)))
    return ((name, faults) for faults in chosen)


def page(found: dict[Cell, tuple[int, str]], names: Sequence[str]) -> str:
    """Return what was tried, as a page."""
    with workers(1) as pool:
        recorded = dict(zip(names, pool.map(calls_of, names, 1), strict=True))
    rows = []
    for name in names:
        single, pair = ([found[cell] for cell in found if cell[0] == name and len(cell[1]) == many] for many in (1, 2))
        figures = (
            *(len(recorded[name]), len(singles(name, recorded[name])), len(single), _broken(single)),
            *(len(pair), sum(met == 2 for met, _ in pair), _broken(pair)),
        )
        rows.append((f"{name}: {SESSIONS[name].told}", *figures))
    total = ("in all", *(sum(row[at] for row in rows) for at in range(1, 8)))
    lines = [f"| {' | '.join(str(each) if isinstance(each, str) else f'{each:,}' for each in row)} |" for row in rows]
    lines.append(f"| {' | '.join(str(each) if isinstance(each, str) else f'**{each:,}**' for each in total)} |")
    return _PAGE.format(date=time.strftime("%Y-%m-%d"), digest=digest(), rows="\n".join(lines))


def _broken(results: Sequence[tuple[int, str]]) -> int:
    return sum(bool(wrong) for _, wrong in results)


_PAGE = """# Every system call of a session fails in turn

Written by `python benchmarks/syscall_faults.py --write benchmarks/syscall_faults.md` on {date}, from what was tried of
the code with the digest {digest}: `python benchmarks/syscall_faults.py` for the single faults and `--pairs 5000` for
the pairs. Both go on where they stopped, and take what is left in a random order, so that a part is a fair sample.
Neither is through yet where "tried" is well below "cells there are", or the pairs are fewer than 5,000; a session's
calls are counted anew for the page, and differ by some from one time to another, as threads wait for each other.

| session | calls | cells there are | tried | broken | pairs tried | of these both met | broken |
|---|--:|--:|--:|--:|--:|--:|--:|
{rows}

A cell is one call that fails with one of EIO, ENOSPC, EROFS, EMFILE, ENOMEM, EINTR and EAGAIN (but flock with EAGAIN,
which says that another has it); of the session `killed` one call at which the writer is killed. A pair is two different
calls, each with an error of its own; all pairs are different. The second is often not met, because the first has ended
the session or led it another way; a pair counts all the same, and the table says how many met both.

Broken is: the board is not as found (or, after `apply`, as applied), and the exit code is 0 or a control that is
changed is not named, looked at right after the end and before any repair; a control that is not named may yet come back
within thirty seconds by the guard. A guard, whom nobody hears, must leave what it cannot put back on record. A session
that does not end within a minute is broken too.

Which calls fail: those of the process that holds the board (the tuning loop, the writer, the actuator, `restore`, the
guard), all its threads, from before it opens the board until it has said what came of it. What is not made to fail, and
why: importing Python's modules, which is over before anything is touched; a search method's computing (the study's
points come from a list), the report and the profile, which are made after the device was given back; `close`, `munmap`
and `wait4`, for the kernel frees what they are given in any case; `futex`, whose errors end a process by libc's hand;
the time, which is read without a call; a write of which half is done; and a guard's own start, between the fork and its
first line: one that dies there is one that was killed, which `tests/test_fault_matrix.py` does.
"""


def main() -> int:
    """Run what the command line asks for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--session", choices=SESSIONS, action="append", help="only this one; may be given again")
    parser.add_argument("--sample", type=int, help="try so many single faults of each; all if left out")
    parser.add_argument("--pairs", type=int, default=0, help="try so many random pairs instead, over all sessions")
    parser.add_argument("--seed", type=int, default=0, help="of what is drawn")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="processes at once")
    parser.add_argument("--minutes", type=float, help="stop after so many; what was tried is kept")
    parser.add_argument("--again", action="store_true", help="try also what was tried before, and keep nothing")
    parser.add_argument("--write", type=Path, metavar="FILE", help="try nothing; write what was tried so far as a page")
    given = parser.parse_args()
    if not available():
        sys.exit("needs libseccomp 2.5 or newer (libseccomp.so.2)")
    names = given.session or list(SESSIONS)
    if given.write:
        given.write.write_text(page(Kept(KEPT).results, names))
        return 0
    found = tried(
        names,
        given.sample,
        -(-given.pairs // len(names)),
        given.seed,
        given.jobs,
        None if given.again else KEPT,
        given.minutes,
    )
    for (name, faults), (_, wrong) in found.items():
        if wrong:
            sys.stdout.write(f"{name}: {' + '.join(map(str, faults))}: {wrong}\n")
    for name in names:
        own = [each for (whose, _), each in found.items() if whose == name]
        broken = sum(bool(wrong) for _, wrong in own)
        sys.stdout.write(f"{name}: {len(own)} cells, {sum(met > 0 for met, _ in own)} met, {broken} broken\n")
    return 1 if any(wrong for _, wrong in found.values()) else 0


if __name__ == "__main__":
    sys.exit(main())
