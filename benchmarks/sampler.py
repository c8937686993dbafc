"""What the power sampler of a Jetson board costs: python benchmarks/sampler.py [seconds] [root].

The budget is 0.5 % of a core at 10 samples a second. Without a root every board that polythrottle.testing can plant is
sampled in a folder in memory, where reading a sensor takes no time: that is the sampler's own part. On a board, give
``/``: the sensors' bus then adds what it adds. The processor time is that of the sampling thread alone.
"""

import sys
import tempfile
import time
from pathlib import Path

from polythrottle.actuation.drivers.controls import SysFiles
from polythrottle.backends.jetson.identity_and_throttling import BoardId
from polythrottle.backends.jetson.power_rails import RailSensors, Sampler, find_rails, find_total
from polythrottle.backends.probe import Tree
from polythrottle.domain.clock import SystemClock
from polythrottle.testing import BOARDS, plant

HZ, BUDGET = 10.0, 0.005


def cost(root: Path, seconds: float) -> tuple[str, float, float]:
    """Return how many rails are read, the share of a core that takes, and the processor seconds of one sample."""
    tree = Tree(root, SysFiles())
    names = find_total([rail.name for rail in find_rails(tree)], BoardId.read(tree).entry).names
    rails = RailSensors(tree, names)
    rails.renew()
    sampler = Sampler(rails, SystemClock(), HZ)
    start_s = time.perf_counter()
    sampler.start()
    time.sleep(seconds)
    sampler.stop()
    busy_s, samples = sampler.cost
    return f"{len(names)} rails", busy_s / (time.perf_counter() - start_s), busy_s / samples


def main() -> None:
    """Sample each board, and print what it took."""
    seconds = float(sys.argv[1]) if len(sys.argv) > 1 else 5.0
    with tempfile.TemporaryDirectory(dir="/dev/shm" if Path("/dev/shm").is_dir() else None) as folder:
        roots = [Path(sys.argv[2])] if len(sys.argv) > 2 else [plant(name, Path(folder) / name) for name in BOARDS]
        for root in roots:
            rails, share, sample_s = cost(root, seconds)
            verdict = "within" if share <= BUDGET else "over"
            took = f"{sample_s * 1e6:4.0f} µs a sample, {share:.3%} of a core"
            print(f"{root.name or '/':24} {rails}: {took}, {verdict} {BUDGET:.1%}")


if __name__ == "__main__":
    main()
