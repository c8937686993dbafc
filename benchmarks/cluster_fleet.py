"""What a tuned fleet saves on recorded traces and recorded power caps: `python benchmarks/cluster_fleet.py`.

All of it is simulated: machines come and go as recorded (a managed group of V100 on Google Cloud, p3 machines on AWS,
Bamboo's files), the caps are the power limits of Zeus (NSDI 2023) at the batch sizes nearest to Zeus's defaults, GPUs
of one type differ as in SC'22, and joules are those of the GPUs alone. Every policy meets the same machines. With
``--bound``, what could be saved at most in the same simulation stands beside it.
"""

import argparse
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from statistics import mean
from typing import NamedTuple

from polythrottle.backends.replay import Table
from polythrottle.cluster.conditions import (
    DefaultPolicy,
    DrawnSupply,
    FleetPolicy,
    IndependentPolicy,
    JointPolicy,
    RecordedSupply,
    SimulatedJob,
    TunedPolicy,
)
from polythrottle.cluster.job_simulator import Scenario, simulate
from polythrottle.cluster.plan.costs import SimulatedOutcome, Spread, against, spread
from polythrottle.cluster.recorded_tables import Trace, caps_of_table, finer, read_trace
from polythrottle.domain.fleet.gpu_variability import Silicon
from polythrottle.domain.fleet.transient_machine import Cap, ConstantHazard, MachineType, Market
from polythrottle.lab.lone_node import Lone, lived

DATA = Path(__file__).resolve().parents[2] / "shared" / "data"
TRACES = {"gcp": ("gcp_spot_cluster_v100_us-east1-c.csv", 64), "aws": ("aws_spot_cluster_p3.csv", 32)}
IDLE_W = {"v100": 40.0, "p100": 30.0, "a40": 30.0}
BATCHES = {"imagenet": 256, "cifar100": 1024, "movielens": 1024, "sentiment140": 128, "squad": 32}
CAP_STEP_W = 0.25
"""Between caps on the straight lines between recorded ones; NVML sets power limits in milliwatts."""
JOINT_STEP_W = 5.0
"""The same for one cap for all with its interval, which is tried cap by cap and gains nothing from a finer step."""
LONGER = 0.03
BOUND_SEEDS = 2
IDLERS = ("ncf",)
"""Loads that leave their GPU waiting for data: their caps save nothing, whoever chooses them."""


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
    words.add_argument("--seeds", type=int, default=8)
    words.add_argument("--spreads", type=float, nargs="+", default=[0.08, 0.22])
    words.add_argument("--traces", nargs="+", default=list(TRACES), choices=list(TRACES))
    words.add_argument("--gpus", nargs="+", default=list(IDLE_W), choices=list(IDLE_W))
    words.add_argument("--bound", action="store_true", help="what silicon and losses known beforehand would save")
    words.add_argument("--lives", type=int, default=1000, help="nodes of half an hour per workload")
    given = words.parse_args()
    workloads = [each for each in _workloads(given.data / "replay") if each.gpu in given.gpus]
    for trace_name in given.traces:
        file, places = TRACES[trace_name]
        trace = read_trace(given.data / "transient" / file)
        for apart in given.spreads:
            _fleet(workloads, trace, places, apart, given.seeds)
            if given.bound:
                _bounds(workloads, trace, places, apart, min(given.seeds, BOUND_SEEDS))
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


def _fleet(workloads: list[Workload], trace: Trace, places: int, apart: float, seeds: int) -> None:
    print(f"\n{trace.name}, {places} places, GPUs {apart:.0%} apart, {trace.ends_s / 3600:.1f} h, {seeds} seeds")
    print(f"{'workload':40} {'apart':>15} {'joint':>15} {'tuned':>15} {'default, 600 s':>15}")
    found: dict[Workload, dict[str, list[SimulatedOutcome]]] = {}
    for each in workloads:
        found[each] = {policy.name: _outcomes(each, trace, places, apart, seeds, policy) for policy in _policies()}
        row = {name: _figures(outcomes, found[each]["default"]) for name, outcomes in found[each].items()}
        print(f"{each.gpu:5} {each.name[:27]:27} {each.batch:6} {_cells(row)}", flush=True)
    for what, some in _groups(workloads).items():
        print(f"{what:40} {_cells({name: _mean(found, some, name) for name in found[some[0]]})}")
        saved = {name: _over_seeds(found, some, name) for name in ("apart", "joint", "tuned")}
        print("    95 % over seeds: " + ", ".join(f"{name} {_interval(one)}" for name, one in saved.items()))
    ours, theirs = (_mean(found, workloads, name) for name in ("tuned", "default, 600 s"))
    saved_j, longer = 1 - (1 - ours[0]) / (1 - theirs[0]), (1 + ours[1]) / (1 + theirs[1]) - 1
    print("joules saved per work against default clocks with Daly's interval, and how much longer")
    print(f"tuned against default clocks and a fixed interval of 600 s: {saved_j:.1%} saved, {longer:+.1%} longer")


def _groups(workloads: list[Workload]) -> dict[str, list[Workload]]:
    """Return the loads of each type and of all, those that do not load their GPU only with the last."""
    loading = _loading(workloads)
    types = {f"{gpu}, that load it": [one for one in loading if one.gpu == gpu] for gpu in IDLE_W}
    found = {**types, f"all {len(loading)} that load their GPU": loading, f"all {len(workloads)}": workloads}
    return {what: some for what, some in found.items() if some}


def _loading(workloads: list[Workload]) -> list[Workload]:
    return [each for each in workloads if not any(word in each.name for word in IDLERS)]


def _mean(
    found: dict[Workload, dict[str, list[SimulatedOutcome]]], some: list[Workload], name: str
) -> tuple[float, float]:
    figures = [_figures(found[each][name], found[each]["default"]) for each in some]
    return mean(saved for saved, _ in figures), mean(longer for _, longer in figures)


def _over_seeds(found: dict[Workload, dict[str, list[SimulatedOutcome]]], some: list[Workload], name: str) -> Spread:
    """Return what is saved on the mean of loads, with its interval over seeds."""
    pairs = [zip(found[each][name], found[each]["default"], strict=True) for each in some]
    return spread([mean(_figures([ours], [theirs])[0] for ours, theirs in seed) for seed in zip(*pairs, strict=True)])


def _interval(one: Spread) -> str:
    return f"{one.mean:.1%}" if one.low is None or one.high is None else f"{one.low:.1%} to {one.high:.1%}"


def _bounds(workloads: list[Workload], trace: Trace, places: int, apart: float, seeds: int) -> None:
    print(f"at most, with the 3 % used up, {seeds} seeds: silicon known at once; and every loss foreseen too")
    rows = []
    for each in _loading(workloads):
        scenario = _scenario(each, trace, places, apart, DefaultPolicy())
        known = replace(scenario, noise=0.0, job=replace(scenario.job, verify_s=0.0))
        foreseen = replace(known, job=replace(known.job, noticed=1.0))
        default = [simulate(known, seed, trace.ends_s) for seed in range(seeds)]
        rows.append([_at_most(one, default, trace.ends_s) for one in (known, foreseen)])
        cells = " ".join(f"{one:7.1%}" for one in rows[-1])
        print(f"{each.gpu:5} {each.name[:27]:27} {each.batch:6} {cells}", flush=True)
    print(f"{'mean':40} " + " ".join(f"{mean(row[column] for row in rows):7.1%}" for column in range(2)))


def _at_most(scenario: Scenario, default: list[SimulatedOutcome], horizon_s: float) -> float:
    """Return what is saved in just the time allowed, which is found by trying."""
    allowed, low, high = LONGER, 0.0, 0.25
    saved = 0.0
    for _ in range(6):
        outcomes = [simulate(replace(scenario, policy=TunedPolicy(allowed)), one.seed, horizon_s) for one in default]
        saved, longer = _figures(outcomes, default)
        low, high = (allowed, high) if longer < LONGER else (low, allowed)
        allowed = min(high, max(low, allowed + LONGER - longer))
    return saved


def _policies() -> tuple[FleetPolicy, ...]:
    return DefaultPolicy(), IndependentPolicy(), JointPolicy(), TunedPolicy(), DefaultPolicy(600.0, "default, 600 s")


def _outcomes(
    each: Workload, trace: Trace, places: int, apart: float, seeds: int, policy: FleetPolicy
) -> list[SimulatedOutcome]:
    scenario = _scenario(each, trace, places, apart, policy)
    return [simulate(scenario, seed, trace.ends_s) for seed in range(seeds)]


def _scenario(each: Workload, trace: Trace, places: int, apart: float, policy: FleetPolicy) -> Scenario:
    machine = _machine(each, JOINT_STEP_W if isinstance(policy, JointPolicy) else CAP_STEP_W)
    return Scenario(SimulatedJob(), machine, RecordedSupply(trace, places), policy, Silicon(apart))


def _machine(each: Workload, step_w: float = CAP_STEP_W) -> MachineType:
    idle_w, caps = IDLE_W[each.gpu], finer(each.caps, step_w)
    return MachineType(each.gpu, each.gpu, {Market.SPOT: 1.0}, caps, idle_w, 1.2 * idle_w)


def _figures(found: list[SimulatedOutcome], default: list[SimulatedOutcome]) -> tuple[float, float]:
    saved = against(found, default, lambda outcome: outcome.energy_j).mean
    return saved, -against(found, default, lambda outcome: outcome.time_s).mean


def _cells(row: dict[str, tuple[float, float]]) -> str:
    return " ".join(f"{f'{saved:.1%} {longer:+.1%}':>15}" for name, (saved, longer) in row.items() if name != "default")


def _short(workloads: list[Workload]) -> None:
    print("\nsixteen places in step, each machine kept for half an hour on average: tuned against default, 3 seeds")
    rows = []
    for each in workloads:
        machine, supply = _machine(each), DrawnSupply(16, ConstantHazard(2.0))
        outcomes = [
            [
                simulate(
                    Scenario(SimulatedJob(), machine, supply, policy, Silicon(), lifetime=ConstantHazard(2.0)),
                    seed,
                    86400.0,
                )
                for seed in range(3)
            ]
            for policy in (DefaultPolicy(), TunedPolicy())
        ]
        rows.append(_figures(outcomes[1], outcomes[0]))
        print(f"{each.gpu:5} {each.name[:27]:27} saved {rows[-1][0]:6.2%}, {rows[-1][1]:+.2%} longer", flush=True)
    print(f"all: saved {mean(row[0] for row in rows):.2%}, {mean(row[1] for row in rows):+.2%} longer")


def _lone(workloads: list[Workload], lives: int) -> None:
    print(f"\na node that knows nothing and lives half an hour on average, alone, {lives} lives per workload")
    total_j = spent_j = 0.0
    for each in workloads:
        found = [lived(Lone(each.caps, ConstantHazard(2.0)), seed) for seed in range(lives)]
        default_j, took_j = sum(one.default_j for one in found), sum(one.spent_j for one in found)
        total_j, spent_j = total_j + default_j, spent_j + took_j
        longer = sum(one.lost_s for one in found) / sum(one.work_s for one in found)
        looks = mean(len(one.looks) for one in found)
        saved = 1 - took_j / default_j
        print(f"{each.gpu:5} {each.name[:27]:27} saved {saved:6.2%}, {longer:+.2%} longer, {looks:.1f} looks")
    print(f"all: saved {1 - spent_j / total_j:.2%}")


if __name__ == "__main__":
    main()
