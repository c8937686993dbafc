"""How often `check` claims that energy has grown, on boards where it has or has not, and how often its interval holds.

    python benchmarks/checking.py [--seeds 100] [--board jetson-agx-orin] [--noise 0.02]

For every seed a window of the default point is the profile; up to 40 are then measured and looked at after each,
as `polythrottle check` does. A growth is put on what is measured now. Simulated; about 2 s a seed.
"""

import argparse
from collections.abc import Sequence
from dataclasses import dataclass, replace

from polythrottle.domain.measurement import Measurement, Window
from polythrottle.domain.ports import Rewindable
from polythrottle.metering.comparison import MOST_PAIRS, ProfileCheck, check_windows
from polythrottle.metering.point_measurement import measure
from polythrottle.tuning.setup import Setup

AGAIN = 2_000_000
CASES = ((0.0, 0.0), (0.0, 0.03), (0.08, 0.0), (0.08, 0.03), (0.10, 0.03), (0.15, 0.03))


@dataclass
class Count:
    """What came of one case over all seeds."""

    claims: int = 0
    holds: int = 0
    windows: int = 0

    def take(self, found: ProfileCheck, growth: float) -> None:
        """Add the end of one check."""
        self.claims += found.regressed
        self.holds += found.energy.low <= 1 + growth <= found.energy.high
        self.windows += found.windows


def windows(device_uri: str, workload: str) -> tuple[Measurement, list[Measurement]]:
    """Return a profile's window and those measured of the same point later."""
    device, served = Setup(device_uri, workload).open()
    assert isinstance(device, Rewindable)
    point, window = (device.space * served.space).default, Window(queries=1000)
    with device:
        device.rewind(0)
        then = measure(device, served, point, window)
        looks = []
        for number in range(MOST_PAIRS):
            device.rewind(AGAIN + number)
            looks.append(measure(device, served, point, window, seed=number))
    return then, looks


def check(then: Measurement, looks: Sequence[Measurement], growth: float, most: float) -> ProfileCheck:
    """Return what a check of a board that has changed by a growth ends with."""
    grown = [replace(look, energy_j=look.energy_j * (1 + growth), intervals={}) for look in looks]
    for count in range(1, len(grown) + 1):
        found = check_windows(then, (), grown[:count], most)
        if found.settled:
            break
    return found


def main() -> None:
    """Print one line a case."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=100)
    parser.add_argument("--board", default="jetson-agx-orin")
    parser.add_argument("--workload", default="resnet50")
    parser.add_argument("--noise", type=float, default=0.02)
    words = parser.parse_args()
    counts = {case: Count() for case in CASES}
    for seed in range(words.seeds):
        then, looks = windows(f"sim:{words.board}?seed={seed}&noise={words.noise:g}", words.workload)
        for (growth, most), count in counts.items():
            count.take(check(then, looks, growth, most), growth)
    print(f"{words.seeds} seeds of sim:{words.board}, {words.workload}, noise {words.noise:g} (simulated)")
    print("grown  allowed  claimed  interval holds  windows")
    for (growth, most), count in counts.items():
        claims, holds = (f"{each / words.seeds:.0%}" for each in (count.claims, count.holds))
        print(f"{growth:5.0%}  {most:7.0%}  {claims:>7}  {holds:>14}  {count.windows / words.seeds:7.1f}")


if __name__ == "__main__":
    main()
