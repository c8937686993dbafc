"""How the simulator's cost grows with the fleet: `python benchmarks/cluster_simulate.py [--nodes 125 … 1000]`.

One job on the recorded group of V100 (several copies of the record, each from another moment), tuned, on one core.
Printed: processor time per fleet, and the exponent b of time = a·n^b·log n fitted over them: at most 1 is n log n.
"""

import argparse
import math
import time
from pathlib import Path

from polythrottle.cluster.conditions import RecordedSupply, SimulatedJob, TunedPolicy
from polythrottle.cluster.job_simulator import Scenario, simulate
from polythrottle.cluster.recorded_tables import read_trace
from polythrottle.domain.fleet.gpu_variability import Silicon
from polythrottle.domain.fleet.transient_machine import Cap, MachineType, Market

TRACE = Path(__file__).resolve().parents[2] / "shared/data/transient/gcp_spot_cluster_v100_us-east1-c.csv"
CAPS = (
    Cap(None, 1.0, 227.4),
    Cap(225.0, 1.023, 213.2),
    Cap(200.0, 1.061, 190.5),
    Cap(175.0, 1.104, 171.8),
    Cap(150.0, 1.215, 149.0),
)


def main() -> None:
    """Print a line per fleet, and the exponent."""
    words = argparse.ArgumentParser(description=__doc__)
    words.add_argument("--trace", type=Path, default=TRACE)
    words.add_argument("--nodes", type=int, nargs="+", default=[125, 250, 500, 1000])
    words.add_argument("--days", type=float, default=30.0)
    words.add_argument("--asynchronous", action="store_true")
    given = words.parse_args()
    trace = read_trace(given.trace)
    machine = MachineType("v100", "V100", {Market.SPOT: 0.861}, CAPS, 40.0, 48.0)
    took = {}
    for nodes in given.nodes:
        job = SimulatedJob(synchronous=not given.asynchronous)
        scenario = Scenario(job, machine, RecordedSupply(trace, nodes), TunedPolicy(), Silicon(0.22))
        before_s = time.process_time()
        found = simulate(scenario, 0, given.days * 86400)
        took[nodes] = time.process_time() - before_s
        print(
            f"{nodes:6} nodes, {given.days:g} days: {took[nodes]:6.2f} s;"
            f" {found.losses} losses, {found.generations} generations, {found.interruptions} interruptions"
        )
    if len(took) > 1:
        print(f"exponent b of a·n^b·log n: {_exponent(took):.2f}")


def _exponent(took: dict[int, float]) -> float:
    """Return the slope of log(time / log n) against log n, by least squares."""
    points = [(math.log(nodes), math.log(seconds / math.log(nodes))) for nodes, seconds in took.items()]
    x, y = (sum(each) / len(points) for each in zip(*points, strict=True))
    return float(sum((a - x) * (b - y) for a, b in points) / sum((a - x) ** 2 for a, _ in points))


if __name__ == "__main__":
    main()
