"""Compare search methods on a recorded table: what does each find in ten trials, against the best row there is?

The table beside this file was recorded by ``polythrottle sweep`` on a real processor; its energy is estimated.
Run it from anywhere: ``python examples/replay_table.py``.
"""

from pathlib import Path

import polythrottle
from polythrottle.backends.replay import Table

TABLE = Path(__file__).with_name("cpu-convnet-sweep.csv")


def main() -> None:
    """Print the energy each method ends at, beside the best feasible row."""
    table = Table.read(TABLE)
    limit_s = 4 * table.fastest.latency.mean_s
    best_j = min(row.energy_j for row in table.measurements if row.latency.mean_s <= limit_s)
    print(f"{len(table.points)} rows, {table.measurements[0].energy_kind} energy; best feasible row {best_j:.4g} J")
    for method in ("bayes", "random", "grid"):
        result = polythrottle.tune(f"replay:{TABLE}", slo="mean<=4x", trials=6, method=method)
        if result.profile is None:
            print(f"{method}: {result.unmet}")
            continue
        found_j = result.profile.measurement.energy_j
        print(f"{method:6} {found_j:.4g} J, {found_j / best_j - 1:.1%} above the best, at {dict(result.profile.point)}")


if __name__ == "__main__":
    main()
