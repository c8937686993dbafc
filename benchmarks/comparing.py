"""How often a saving is claimed where there is none: python benchmarks/comparing.py [--runs 200].

Each run compares a point of a simulated board with itself, in turns, looked at after every pair; the bar is 5 %. Beside
it how soon real savings of the same board are found, and what a naive reader would have claimed: one window each, the
smaller energy wins if the two windows' own 95 % intervals do not overlap.
"""

import argparse
import statistics
import sys

from polythrottle.domain.measurement import Window
from polythrottle.domain.space import OperatingPoint
from polythrottle.metering.comparison import Comparison, ComparisonVerdict, compare
from polythrottle.tuning.setup import Setup

PAIRS, WINDOW = 12, Window(60, 0.1, 60)
POINTS = {
    "itself": {},
    "a memory step less": {"mem_hz": 2_133_000_000},
    "its tuned point": {
        "gpu_max_hz": 1_032_750_000,
        "gpu_min_hz": 1_032_750_000,
        "mem_hz": 2_133_000_000,
        "batch_size": 2,
    },
}


def main() -> None:
    """Print one line for each side that the default is compared with."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--runs", type=int, default=200)
    runs = parser.parse_args().runs
    sys.stdout.write(
        f"{runs} runs, at most {PAIRS} pairs of {WINDOW.queries} queries, simulated Orin, EfficientNet-B4\n"
    )
    for name, levels in POINTS.items():
        found = [_run(levels, seed) for seed in range(runs if not levels else max(10, runs // 10))]
        claims = sum(each.verdict is not ComparisonVerdict.NOT_PROVEN for each in found)
        naive = sum(_naive(each) for each in found)
        pairs = statistics.median(len(each.pairs) for each in found)
        middle = statistics.median(each.middle() or 0.0 for each in found)
        sys.stdout.write(
            f"default against {name:<19} energy × {middle:.3f}: claimed in {claims} of {len(found)} "
            f"after {pairs:g} pairs; naive reader in {naive}\n"
        )


def _run(levels: dict[str, int], seed: int) -> Comparison:
    device, workload = Setup(f"sim:jetson-agx-orin?seed={seed}", "efficientnet-b4").open()
    default = OperatingPoint({**device.space.default, **workload.space.default})
    with device:
        return list(compare(device, workload, (default, default.moved(levels)), WINDOW, seed=seed, most_pairs=PAIRS))[
            -1
        ]


def _naive(found: Comparison) -> bool:
    a, b = (side.intervals["energy"] for side in found.pairs[0])
    return a.high < b.low or b.high < a.low


if __name__ == "__main__":
    main()
