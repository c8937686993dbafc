"""What a tuned fleet saves on recorded traces and recorded power caps: `python benchmarks/cluster_fleet.py`.

All of it is simulated: machines come and go as recorded (a managed group of V100 on Google Cloud, p3 machines on AWS,
Bamboo's files), the caps are the power limits of Zeus (NSDI 2023) at the batch sizes nearest to Zeus's defaults, GPUs
of one type differ as in SC'22, and joules are those of the GPUs alone. Every policy meets the same machines.
"""

import argparse
from collections.abc import Iterator
from pathlib import Path
from statistics import mean
from typing import NamedTuple

from polythrottle.backends.replay import Table
from polythrottle.cluster.fleet.policy import Apart, Default, Joint, Policy, Tuned
from polythrottle.cluster.fleet.silicon import Silicon
from polythrottle.cluster.lifetime import Steady
from polythrottle.cluster.machine import Cap, MachineType, Market
from polythrottle.cluster.power import caps_of_table, finer
from polythrottle.cluster.simulate.job import Job
from polythrottle.cluster.simulate.lone import Lone, lived
from polythrottle.cluster.simulate.outcome import Outcome, against
from polythrottle.cluster.simulate.supply import Fitted, Recorded
from polythrottle.cluster.simulate.trace import Trace, read_trace
from polythrottle.cluster.simulate.training import Scenario, simulate

DATA = Path(__file__).resolve().parents[2] / "shared" / "data"
TRACES = {"gcp": ("gcp_spot_cluster_v100_us-east1-c.csv", 64), "aws": ("aws_spot_cluster_p3.csv", 32)}
IDLE_W = {"v100": 40.0, "p100": 30.0, "a40": 30.0}
BATCHES = {"imagenet": 256, "cifar100": 1024, "movielens": 1024, "sentiment140": 128, "squad": 32}
CAP_STEP_W = 5.0


class Workload(NamedTuple):
    """A recorded table at one batch size."""

    name: str
    gpu: str
    batch: int
    caps: tuple[Cap, ...]


def main() -> None:
    """Print a line per workload, trace and spread, and the means."""
    words = argparse.ArgumentParser(description=__doc__)
    words.add_argument("--data", type=Path, default=DATA, help="folder with replay/ and transient/")
    words.add_argument("--seeds", type=int, default=3)
    words.add_argument("--spreads", type=float, nargs="+", default=[0.08, 0.22])
    words.add_argument("--traces", nargs="+", default=list(TRACES), choices=list(TRACES))
    words.add_argument("--gpus", nargs="+", default=list(IDLE_W), choices=list(IDLE_W))
    words.add_argument("--lives", type=int, default=1000, help="nodes of half an hour per workload")
    given = words.parse_args()
    workloads = [each for each in _workloads(given.data / "replay") if each.gpu in given.gpus]
    for trace_name in given.traces:
        file, places = TRACES[trace_name]
        trace = read_trace(given.data / "transient" / file)
        for spread in given.spreads:
            _fleet(workloads, trace, places, spread, given.seeds)
    if given.lives:
        _short(workloads)
        _lone(workloads, given.lives)


def _workloads(folder: Path) -> Iterator[Workload]:
    for path in sorted(folder.glob("zeus-nsdi23__*.csv")):
        _, device, name = path.stem.split("__")
        sizes = sorted({int(point["batch_size"]) for point in Table.read(path).points})
        wanted = next(size for key, size in BATCHES.items() if name.startswith(key))
        batch = min(sizes, key=lambda size: abs(size - wanted))
        yield Workload(name.removesuffix("-train"), device.removeprefix("nvidia-"), batch, caps_of_table(path, batch))


def _fleet(workloads: list[Workload], trace: Trace, places: int, spread: float, seeds: int) -> None:
    print(f"\n{trace.name}, {places} places, GPUs {spread:.0%} apart, {trace.ends_s / 3600:.1f} h, {seeds} seeds")
    print(f"{'workload':40} {'apart':>15} {'joint':>15} {'tuned':>15} {'default, 600 s':>15}")
    rows = []
    for each in workloads:
        outcomes = {policy.name: _outcomes(each, trace, places, spread, seeds, policy) for policy in _policies()}
        rows.append({name: _figures(found, outcomes["default"]) for name, found in outcomes.items()})
        print(f"{each.gpu:5} {each.name[:27]:27} {each.batch:6} {_cells(rows[-1])}", flush=True)
    middle = {name: (mean(row[name][0] for row in rows), mean(row[name][1] for row in rows)) for name in rows[0]}
    print(f"{'mean of all':40} {_cells(middle)}")
    ours, theirs = middle["tuned"], middle["default, 600 s"]
    saved, longer = 1 - (1 - ours[0]) / (1 - theirs[0]), (1 + ours[1]) / (1 + theirs[1]) - 1
    print("joules saved per work against default clocks with Daly's interval, and how much longer")
    print(f"tuned against default clocks and a fixed interval of 600 s: {saved:.1%} saved, {longer:+.1%} longer")


def _policies() -> tuple[Policy, ...]:
    return Default(), Apart(), Joint(), Tuned(), Default(600.0, "default, 600 s")


def _outcomes(each: Workload, trace: Trace, places: int, spread: float, seeds: int, policy: Policy) -> list[Outcome]:
    idle_w = IDLE_W[each.gpu]
    machine = MachineType(each.gpu, each.gpu, {Market.SPOT: 1.0}, finer(each.caps, CAP_STEP_W), idle_w, 1.2 * idle_w)
    scenario = Scenario(Job(), machine, Recorded(trace, places), policy, Silicon(spread))
    return [simulate(scenario, seed, trace.ends_s) for seed in range(seeds)]


def _figures(found: list[Outcome], default: list[Outcome]) -> tuple[float, float]:
    saved = against(found, default, lambda outcome: outcome.energy_j).mean
    return saved, -against(found, default, lambda outcome: outcome.time_s).mean


def _cells(row: dict[str, tuple[float, float]]) -> str:
    return " ".join(f"{f'{saved:.1%} {longer:+.1%}':>15}" for name, (saved, longer) in row.items() if name != "default")


def _short(workloads: list[Workload]) -> None:
    print("\nsixteen places in step, each machine kept for half an hour on average: tuned against default, 3 seeds")
    rows = []
    for each in workloads:
        idle_w = IDLE_W[each.gpu]
        caps = finer(each.caps, CAP_STEP_W)
        machine = MachineType(each.gpu, each.gpu, {Market.SPOT: 1.0}, caps, idle_w, 1.2 * idle_w)
        supply = Fitted(16, Steady(2.0))
        outcomes = [
            [
                simulate(Scenario(Job(), machine, supply, policy, Silicon(), lifetime=Steady(2.0)), seed, 86400.0)
                for seed in range(3)
            ]
            for policy in (Default(), Tuned())
        ]
        rows.append(_figures(outcomes[1], outcomes[0]))
        print(f"{each.gpu:5} {each.name[:27]:27} saved {rows[-1][0]:6.2%}, {rows[-1][1]:+.2%} longer", flush=True)
    print(f"all: saved {mean(row[0] for row in rows):.2%}, {mean(row[1] for row in rows):+.2%} longer")


def _lone(workloads: list[Workload], lives: int) -> None:
    print(f"\na node that knows nothing and lives half an hour on average, alone, {lives} lives per workload")
    total_j = spent_j = 0.0
    for each in workloads:
        found = [lived(Lone(each.caps, Steady(2.0)), seed) for seed in range(lives)]
        default_j, took_j = sum(one.default_j for one in found), sum(one.spent_j for one in found)
        total_j, spent_j = total_j + default_j, spent_j + took_j
        longer = sum(one.lost_s for one in found) / sum(one.work_s for one in found)
        looks = mean(len(one.looks) for one in found)
        saved = 1 - took_j / default_j
        print(f"{each.gpu:5} {each.name[:27]:27} saved {saved:6.2%}, {longer:+.2%} longer, {looks:.1f} looks")
    print(f"all: saved {1 - spent_j / total_j:.2%}")


if __name__ == "__main__":
    main()
