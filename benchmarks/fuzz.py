"""Damaged documents by the million: none may crash a reader, hold it for over 2 s, take over 256 MB or run code.

    python benchmarks/fuzz.py --inputs 1000000          all of it, on every core: about an hour on two
    python benchmarks/fuzz.py --inputs 20000 --seed 7   a share

Every 10,000 inputs have a process of their own, so that what it grows by is theirs. A reader is stopped after 10 s of
processor time for one input, and counted with the seed of that input. Programs and libraries that Python would start or
load are listened for (audit hooks).
"""

import argparse
import os
import random
import resource
import signal
import sys
import tempfile
import time
import traceback
from multiprocessing import get_context
from pathlib import Path
from types import FrameType
from typing import NamedTuple

sys.path[:0] = [str(Path(__file__).resolve().parent.parent / folder) for folder in ("", "tests")]

from parsers import PARSERS  # noqa: E402

LONGEST_S, MOST_MB = 2.0, 256.0
_RUNS = ("os.system", "os.exec", "os.posix_spawn", "subprocess.Popen", "pty.spawn", "ctypes.dlopen")
_PART, _STOPPED_S, _LONGEST_S = 10_000, 10.0, 3600.0


class Found(NamedTuple):
    """What some inputs came to.

    Args:
        name: Of the reader.
        inputs: How many.
        taken: How many it took.
        longest_s: Of processor time for one.
        grown_mb: By how much the process grew over what it takes with its libraries and one document.
        ran: Events that run code.
        crashes: Seeds and what was raised.
    """

    name: str
    inputs: int
    taken: int
    longest_s: float
    grown_mb: float
    ran: tuple[str, ...]
    crashes: tuple[str, ...]


def fuzzed(name: str, first: int, inputs: int) -> Found:
    """Give damaged documents to a reader."""
    parser = next(each for each in PARSERS if each.name == name)
    ran: list[str] = []
    crashes: list[str] = []
    taken, longest_s = 0, 0.0
    with tempfile.TemporaryDirectory(dir="/dev/shm" if Path("/dev/shm").is_dir() else None) as folder:
        for seed in parser.seeds:  # the libraries are loaded
            parser.feed(Path(folder), parser.sealed(seed))
        sys.addaudithook(lambda event, _: ran.append(event) if event in _RUNS else None)
        signal.signal(signal.SIGPROF, _stop)
        before_mb = _peak_mb()
        for number in range(first, first + inputs):
            data = parser.damaged(random.Random(number))
            began_s = time.process_time()
            signal.setitimer(signal.ITIMER_PROF, _STOPPED_S)
            try:
                taken += parser.feed(Path(folder), data)
            except BaseException as err:
                last = traceback.extract_tb(err.__traceback__)[-1]
                crashes.append(
                    f"{name} {number}: {type(err).__name__} at {Path(last.filename).name}:{last.lineno}: {err}"[:300]
                )
            longest_s = max(longest_s, time.process_time() - began_s)
        signal.setitimer(signal.ITIMER_PROF, 0.0)
    return Found(name, inputs, taken, longest_s, _peak_mb() - before_mb, tuple(ran), tuple(crashes))


def _stop(number: int, frame: FrameType | None) -> None:
    raise TimeoutError(f"stopped after {_STOPPED_S:g} s")


def _peak_mb() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1000


def main() -> int:
    """Print a line for each reader, and what went wrong; return 1 if anything did."""
    options = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    options.add_argument("--inputs", type=int, default=20_000, help="over all readers")
    options.add_argument("--seed", type=int, default=0, help="of the first document of each")
    options.add_argument("--only", help="one reader")
    options.add_argument("--workers", type=int, default=os.cpu_count())
    given = options.parse_args()
    names = [parser.name for parser in PARSERS if given.only in (None, parser.name)]
    share = -(-given.inputs // len(names))
    parts = [(name, given.seed + at, min(_PART, share - at)) for at in range(0, share, _PART) for name in names]
    found: list[Found] = []
    with get_context("spawn").Pool(given.workers, maxtasksperchild=1) as pool:
        waiting = [pool.apply_async(fuzzed, part) for part in parts]
        for part, each in zip(parts, waiting, strict=True):
            try:
                found.append(each.get(_LONGEST_S))  # one that was killed never answers
                print(f"{sum(one.inputs for one in found):,} of {given.inputs:,}", *found[-1].crashes, file=sys.stderr)
            except Exception as err:
                found.append(Found(part[0], part[2], 0, 0.0, 0.0, (), (f"{part}: {type(err).__name__} {err}",)))
    return _told(names, found)


def _told(names: list[str], found: list[Found]) -> int:
    print("| reader | inputs | taken | longest | grown | crashes |\n|---|--:|--:|--:|--:|--:|")
    for name in names:
        own = [each for each in found if each.name == name]
        figures = sum(each.inputs for each in own), sum(each.taken for each in own)
        longest_s, grown_mb = max(each.longest_s for each in own), max(each.grown_mb for each in own)
        crashes = sum(len(each.crashes) for each in own)
        print(f"| {name} | {figures[0]:,} | {figures[1]:,} | {longest_s:.3f} s | {grown_mb:.0f} MB | {crashes} |")
    wrong = [text for each in found for text in each.crashes]
    wrong += [f"{each.name}: {event} was raised" for each in found for event in each.ran]
    wrong += [f"{each.name}: one took {each.longest_s:.1f} s" for each in found if each.longest_s > LONGEST_S]
    wrong += [f"{each.name}: grew by {each.grown_mb:.0f} MB" for each in found if each.grown_mb > MOST_MB]
    print(f"\n{sum(each.inputs for each in found):,} inputs, {len(wrong)} of them or their readers wrong")
    print(*wrong[:40], sep="\n")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
