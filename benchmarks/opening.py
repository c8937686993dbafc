"""How long a board with long tables takes to open, and in how much memory: Thor with three knobs and its real tables.

    python benchmarks/opening.py

plants the tree of a Thor (170 GPU clocks, 284 CPU clocks), opens it as ``tune --knobs`` does, and prints points,
seconds (by the clock, and of the processor alone) and the highest resident memory of the process. The bar is 2 s and
300 MB for three knobs.
"""

import resource
import tempfile
import time
from pathlib import Path

from polythrottle.backends import open_device
from polythrottle.testing import plant

THREE = ("gpu_max_hz", "mem_hz", "cpu_max_hz")
FOUR = ("gpu_min_hz", *THREE)


def main() -> None:
    """Print a line per choice of knobs."""
    with tempfile.TemporaryDirectory() as folder:
        root = plant("jetson-thor", Path(folder) / "board", power_mode=0)
        for knobs in (THREE, ("gpu_min_hz", "gpu_max_hz", "cpu_max_hz"), FOUR):
            start_s, worked_s = time.perf_counter(), time.process_time()
            points = len(open_device(f"jetson?root={root}", knobs).space)
            seconds, worked_s = time.perf_counter() - start_s, time.process_time() - worked_s
            most_mb = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
            took = f"{seconds:.2f} s ({worked_s:.2f} s of the processor)"
            print(f"{'+'.join(knobs)}: {points:,} points, {took}, {most_mb:.0f} MB so far")


if __name__ == "__main__":
    main()
