"""How far a worse profile gets: rollouts of worse profiles to simulated boards, a tenth of which try them first.

    python benchmarks/canary.py [ROLLOUTS] [BOARDS]

Profiles are points of a simulated Jetson AGX Orin that serves EfficientNet-B4, picked by what they truly do without
noise: half of them take 2 to 15 % more energy per item than the default, the others break their limit on p99 by 2 to
15 % while they save energy. As many better ones, which save 2 to 15 % within their limit, show what passes. Every
board has a noise of its own. Prints one line of JSON.
"""

import json
import random
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import median

from polythrottle.api.many_boards import Rollout, apply_to_all
from polythrottle.catalog.tuned_profiles import read_profile, write_profile
from polythrottle.domain.space import OperatingPoint
from polythrottle.metering.point_measurement import measure
from polythrottle.tuning.setup import Setup

TUNED = Path(__file__).resolve().parent.parent / "examples/orin-efficientnet-b4.toml"
KNOBS = ("gpu_max_mhz", "gpu_min_mhz", "mem_mhz")
LEAST, MOST = 0.02, 0.15
NEVER = "p99<=10s"


class Truth:
    """What points of the simulated board really do: energy without noise, percentiles as the median of long windows."""

    def __init__(self) -> None:
        self._quiet = Setup(device="sim:jetson-agx-orin?noise=0", workload="efficientnet-b4", knobs=KNOBS, queries=20)
        self._noisy = replace(self._quiet, device="sim:jetson-agx-orin?seed=999983", queries=1000)

    def growths(self) -> list[tuple[OperatingPoint, float]]:
        """Return every point with a batch of up to two, and the share by which its energy exceeds the default's."""
        device, workload = self._quiet.open()
        space = device.space * workload.space
        window = self._quiet.window(device)
        with device:
            default_j = measure(device, workload, space.default, window).energy_j
            points = [point for point in space if int(point["batch_size"]) <= 2]
            return [(each, measure(device, workload, each, window).energy_j / default_j - 1) for each in points]

    def p99_s(self, point: OperatingPoint) -> float:
        """Return the median of the p99 of nine windows of 1,000 queries."""
        device, workload = self._noisy.open()
        window = self._noisy.window(device)
        with device:
            found = [measure(device, workload, point, window, seed=number).latency.p99_s for number in range(9)]
        return median(each for each in found if each is not None)


def picked(rollouts: int) -> Iterator[tuple[str, OperatingPoint, str]]:
    """Yield what kind of profile each rollout is of, its point and its limit."""
    truth = Truth()
    draw = random.Random(0)
    grown = truth.growths()
    costly = [point for point, share in grown if LEAST <= share <= MOST]
    saving = [point for point, share in grown if -MOST <= share <= -LEAST]
    for number in range(rollouts):
        if number % 2:
            yield "costs", draw.choice(costly), NEVER
        else:
            point = draw.choice(saving)
            yield "late", point, f"p99<={1000 * truth.p99_s(point) / (1 + draw.uniform(LEAST, MOST)):.4f}ms"
    for _ in range(rollouts):
        point = draw.choice(saving)
        yield "better", point, f"p99<={1000 * truth.p99_s(point) * (1 + draw.uniform(LEAST, MOST)):.4f}ms"


def rolled_out(point: OperatingPoint, slo: str, boards: Sequence[str], folder: Path) -> Rollout:
    """Apply a profile of a point to boards, a tenth first."""
    write_profile(replace(read_profile(TUNED), point=point, slo=(slo,), ladder=None), folder / "p.toml")
    return apply_to_all(folder / "p.toml", boards, canary=0.1)


def main(rollouts: int, count: int) -> None:
    """Run the rollouts and print how many boards each kind of profile got to."""
    found: dict[str, dict[str, int]] = {}
    with tempfile.TemporaryDirectory() as folder:
        for number, (kind, point, slo) in enumerate(picked(rollouts)):
            boards = [f"sim:jetson-agx-orin?seed={number * count + board}" for board in range(count)]
            rollout = rolled_out(point, slo, boards, Path(folder))
            tried = {test.uri for test in rollout.tests}
            got = tried | {each.uri for each in rollout.outcomes if each.applied is not None}
            row = found.setdefault(kind, {"rollouts": 0, "within_the_first_tenth": 0, "most_boards": 0, "pairs": 0})
            row["rollouts"] += 1
            row["within_the_first_tenth"] += len(got) <= count // 10
            row["most_boards"] = max(row["most_boards"], len(got))
            row["pairs"] += sum(len(test.comparison.pairs) for test in rollout.tests)
            print(number, kind, len(got), rollout.refused, file=sys.stderr)
    print(json.dumps({"simulated": True, "boards": count, **found}))


if __name__ == "__main__":
    given = [int(word) for word in sys.argv[1:]]
    main(*(*given, *(100, 20)[len(given) :]))
