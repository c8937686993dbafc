"""How long setting eight GPUs as one takes, beside the slowest of them alone: on the stand-in driver, in real time.

    python benchmarks/setting_gpus.py [--rounds 10]

Each GPU's lock takes as long to hold as a round draws for it within SETTLE_MS, and each call that sets something takes
SET_MS besides: both spans are assumed, for public ones of switching (arXiv 2502.20075) differ by card and clock. A
round applies a point to each GPU by itself, then to all as one. The bar is 1.3 times the slowest single one.

On a machine that others use, eight threads wait for a core more often than one. So a second ratio has the slowest GPU's
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
MHZ = 1_000_000


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


def round_of(fake: FakeNvml, folder: Path, rng: random.Random) -> tuple[float, float, float]:
    """Return what the slowest GPU takes by itself, and what all take together of time and of the processor."""
    for slot in range(GPUS):
        fake.set(slot, settle_us=round(1000 * rng.uniform(*SETTLE_MS)), load_permille=900)
    gpus = [NvmlDevice(str(slot), state=folder, controls=Slow(rng.uniform(*SET_MS) / 1000)) for slot in range(GPUS)]
    alone = []
    for gpu in gpus:
        with gpu:
            alone.append(timed(lambda gpu=gpu: gpu.apply(OperatingPoint({"gpu_max_hz": 1200 * MHZ}))))  # type: ignore[misc]
    with NvmlGroup(gpus, state=folder) as group:
        together = timed(lambda: group.apply(OperatingPoint({"gpu_max_hz": 1200 * MHZ})))
    return max(seconds for seconds, _ in alone), *together


def main() -> None:
    """Print a line per round and their median."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=10)
    rounds, rng = parser.parse_args().rounds, random.Random(8)
    ratios, undisturbed = [], []
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        fake = stack.enter_context(FakeNvml(folder / "nvml", ["h100-sxm"] * GPUS))
        for number in range(rounds):
            slowest_s, together_s, busy_s = round_of(fake, folder / "state", rng)
            ratios.append(together_s / slowest_s)
            told = f"slowest alone {slowest_s:.3f} s, all as one {together_s:.3f} s ({busy_s:.3f} s of processor)"
            undisturbed.append((slowest_s + busy_s) / slowest_s)
            print(f"round {number + 1}: {told}: {ratios[-1]:.2f} x, undisturbed at most {undisturbed[-1]:.2f} x")
    print(f"median {median(ratios):.2f} x, undisturbed at most {max(undisturbed):.2f} x; bar {BAR} x")


if __name__ == "__main__":
    main()
