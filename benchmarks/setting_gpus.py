"""How long setting eight GPUs as one takes, beside the slowest of them alone: on the stand-in driver, in real time.

    python benchmarks/setting_gpus.py [--rounds 10]

Each GPU's lock takes as long to hold as a round draws for it within SETTLE_MS, and each call that sets something takes
SET_MS besides: both spans are assumed, for public ones of switching (arXiv 2502.20075) differ by card and clock. A
round applies a point to each GPU by itself, then to all as one. The bar is 1.3 times the slowest single one.

The first point after the GPUs were taken is timed by itself: with it a guard starts for each GPU, a tenth of a second
of processor each, and where there are fewer cores than GPUs those eight are what the GPUs wait for. Every later point,
which is what a search and a daemon set from then on, finds them there.

On a machine that others use, eight threads wait for a core more often than one. So another ratio has the slowest GPU's
time and all the processor time that the eight took, one after the other: what it is at most where nobody else computes.
"""

import argparse
import random
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from statistics import median

from polythrottle.actuation.drivers.nvml import NvmlControls
from polythrottle.backends.nvml import NvmlDevice, NvmlGroup
from polythrottle.domain.space import OperatingPoint
from polythrottle.testing.nvml import FakeNvml

GPUS, BAR = 8, 1.3
SETTLE_MS, SET_MS = (10, 250), (5, 15)
POINTS_HZ = tuple(mhz * 1_000_000 for mhz in (1200, 1500, 900, 1305))


class Slow(NvmlControls):
    """Controls whose every write takes a while, as a driver's does."""

    def __init__(self, seconds: float) -> None:
        super().__init__()
        self._seconds = seconds

    def write(self, key: str, text: str) -> None:
        """Wait, then write."""
        time.sleep(self._seconds)
        super().write(key, text)


def timed(work: Callable[[], object]) -> tuple[float, float]:
    """Return how long something takes, and how long of the processor, in seconds."""
    start_s, busy_s = time.perf_counter(), time.process_time()
    work()
    return time.perf_counter() - start_s, time.process_time() - busy_s


def at_rest() -> None:
    """Wait until no lock is on its way any more: a clock still at the level that was just left would count as set."""
    time.sleep(2 * SETTLE_MS[1] / 1000)


def set_in_turn(device: NvmlDevice | NvmlGroup) -> list[tuple[float, float]]:
    """Return how long each of the points takes that are set one after the other, and how long of the processor."""
    with device:
        spans = []
        for hz in POINTS_HZ:
            at_rest()
            spans.append(timed(lambda hz=hz: device.apply(OperatingPoint({"gpu_max_hz": hz}))))  # type: ignore[misc]
        return spans


def round_of(fake: FakeNvml, folder: Path, rng: random.Random) -> list[tuple[float, float, float]]:
    """Return for each point what the slowest GPU takes by itself, and what all take together, also of the processor."""
    for slot in range(GPUS):
        fake.set(slot, settle_us=round(1000 * rng.uniform(*SETTLE_MS)), load_permille=900)
    gpus = [NvmlDevice(str(slot), state=folder, controls=Slow(rng.uniform(*SET_MS) / 1000)) for slot in range(GPUS)]
    alone = [set_in_turn(gpu) for gpu in gpus]
    together = set_in_turn(NvmlGroup(gpus, state=folder))
    return [
        (max(spans[step][0] for spans in alone), *together[step])  # each GPU's processor time is its own affair
        for step in range(len(POINTS_HZ))
    ]


def main() -> None:
    """Print a line per point of each round, and the medians."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=10)
    rounds, rng = parser.parse_args().rounds, random.Random(8)
    ratios: dict[str, list[float]] = {"first": [], "later": []}
    undisturbed: dict[str, list[float]] = {"first": [], "later": []}
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        fake = stack.enter_context(FakeNvml(folder / "nvml", ["h100-sxm"] * GPUS))
        for number in range(rounds):
            for step, (slowest_s, together_s, busy_s) in enumerate(round_of(fake, folder / "state", rng)):
                which = "later" if step else "first"
                ratios[which].append(together_s / slowest_s)
                undisturbed[which].append((slowest_s + busy_s) / slowest_s)
                told = f"slowest alone {slowest_s:.3f} s, all as one {together_s:.3f} s ({busy_s:.3f} s of processor)"
                limit = f"undisturbed at most {undisturbed[which][-1]:.2f} x"
                print(f"round {number + 1}, {which}: {told}: {ratios[which][-1]:.2f} x, {limit}")
    for which, found in ratios.items():
        print(
            f"{which}: median {median(found):.2f} x, undisturbed at most {max(undisturbed[which]):.2f} x; bar {BAR} x"
        )


if __name__ == "__main__":
    main()
