"""What planning on transient machines is worth, on recorded caps, lifetimes, machines and prices; prints tables.

Run ``python benchmarks/cluster_plan.py FOLDER`` with the folder that holds the recorded tables in ``replay`` and
``transient``; the tables are kept in ``benchmarks/cluster_plan.md``. All outcomes are simulated or estimated.
"""

import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from math import exp, inf
from pathlib import Path
from random import Random
from statistics import fmean, median

from polythrottle.backends.replay import Table
from polythrottle.cluster.plan.costs import Choice, Exposure, Terms, apart, expect, joint, reference_s
from polythrottle.cluster.plan.deadline import (
    Availability,
    RentalPolicy,
    greedy,
    read_availability,
    replay,
    uniform_progress,
)
from polythrottle.cluster.plan.job_shares import Aim, Kind, SharingJob, share
from polythrottle.cluster.plan.options import Offer, Work, options
from polythrottle.cluster.plan.pareto_front import Limits, every_option, outlook, plan
from polythrottle.cluster.plan.spot_market import DAY_S, Moving, PricedPlace, judge, stay, travel
from polythrottle.cluster.predict.lifetimes import published_lifetime, table_lifetime
from polythrottle.cluster.recorded_tables import caps_of_table, finer, read_histories
from polythrottle.domain.fleet.transient_machine import CheckpointCost, ConstantHazard, Lifetime, MachineType, Market
from polythrottle.training.elastic.nodes.rented_nodes import Stakes, Waits, expected_usd, lead_s, read_waits

CAPS = {
    "V100 ResNet-50": ("zeus-power-profile__nvidia-v100__resnet50-train.csv", None),
    "V100 ShuffleNetV2": ("zeus-power-profile__nvidia-v100__shufflenetv2-train.csv", None),
    "A40 ResNet-50": ("zeus-power-profile__nvidia-a40__resnet50-train.csv", None),
    "A40 BERT": ("zeus-nsdi23__nvidia-a40__squad-bert-base-uncased-train.csv", 32),
    "P100 ResNet-50": ("zeus-nsdi23__nvidia-p100__imagenet-resnet50-train.csv", 128),
    "V100 BERT": ("zeus-nsdi23__nvidia-v100__squad-bert-base-uncased-train.csv", 32),
}
PRICES = {Market.SPOT: 0.86, Market.ON_DEMAND: 2.43}
RATES = (0.0, 0.02, 0.1, 0.3)
MACHINES = (1, 4, 16)
STALLS = (3.8, 30.0)


def machine(folder: Path, name: str, step_w: float | None = None) -> MachineType:
    """Return a machine with recorded caps, or with those between them too."""
    table, batch = CAPS[name]
    caps = caps_of_table(folder / "replay" / table, batch)
    return MachineType(
        name, name.partition(" ")[0], PRICES, finer(caps, step_w) if step_w else caps, idle_w=45, writing_w=80
    )


def chosen(terms: Terms) -> tuple[Choice, Choice, Choice]:
    """Return default clocks with the best interval, cap and interval chosen apart, and chosen together."""
    return expect(terms, terms.machine.default, reference_s(terms)), apart(terms), joint(terms)


def joules(folder: Path) -> Iterator[str]:
    """Yield how many joules caps and intervals save, chosen apart and together, at most 3 % longer."""
    yield "| caps | grid | apart | together | gain, median | gain, most | longer, most |"
    yield "| --- | --- | --- | --- | --- | --- | --- |"
    for name in CAPS:
        for step_w in (None, 5.0):
            kind = machine(folder, name, step_w)
            found = []
            for rate in RATES:
                for machines in MACHINES:
                    for stall_s in STALLS:
                        exposure = Exposure(machines, rate * machines / 3600, 8, 170)
                        plain, two, one = chosen(Terms(kind, 0.86, exposure, CheckpointCost(stall_s, stall_s), 0.2))
                        base_j = plain.spent.energy_j
                        found.append(
                            (
                                1 - two.spent.energy_j / base_j,
                                1 - one.spent.energy_j / base_j,
                                one.time_s / plain.time_s,
                            )
                        )
            gains = [both - alone for alone, both, _ in found]
            yield (
                f"| {name} | {'recorded' if step_w is None else '5 W'} | {median(a for a, _, _ in found):.1%}"
                f" | {median(b for _, b, _ in found):.1%} | {100 * median(gains):.1f} points"
                f" | {100 * max(gains):.1f} points | {max(t for *_, t in found) - 1:+.1%} |"
            )


def agreement(folder: Path) -> Iterator[str]:
    """Yield how far draws are from expectations."""
    kind = machine(folder, "V100 ResNet-50")
    lives: dict[str, Lifetime] = {
        "steady, 0.1/h": ConstantHazard(0.1),
        "steady, 1/h": ConstantHazard(1.0),
        "CM-DARE, K80 us-west1": published_lifetime("K80", "us-west1")[0],
        "CM-DARE, V100 us-west1": published_lifetime("V100", "us-west1")[0],
        "recorded, AWS K80 us-east-1c": table_lifetime(
            folder / "transient" / "aws_spot_lifetimes_2020.csv", "K80", "us-east-1c"
        )[0],
    }
    yield "| lifetime | machines | losses | time | joules | draws' own error |"
    yield "| --- | --- | --- | --- | --- | --- |"
    for name, lifetime in lives.items():
        for machines in (1, 8):
            work = Work("job", 72_000 * machines, CheckpointCost(3.8, 3.8), 8)
            offer = Offer(kind, 0.2, tuple(float(n) for n in range(1, 9)), 170, lifetime)
            option = options(work, offer, Market.SPOT, machines)[1]
            drawn = outlook(option, seed=1, draws=400)
            yield (
                f"| {name} | {machines} | {drawn.mean('losses'):.1f} | {drawn.mean('time_s') / option.time_s - 1:+.1%}"
                f" | {drawn.mean('energy_j') / option.spent.energy_j - 1:+.1%}"
                f" | ±{drawn.error('time_s') / option.time_s:.1%} |"
            )


def drawn_record(share: float, up_h: float, seed: int, days: int = 45) -> Availability:
    """Return a record of spells with a heavy tail, as those recorded have."""
    random, now_s, there = Random(seed), 0.0, False
    times_s, flags = [], []
    while now_s < days * DAY_S:
        times_s.append(now_s)
        flags.append(there)
        mean_s = 3600 * (up_h if there else up_h * (1 - share) / share)
        now_s += max(600.0, random.lognormvariate(0, 1.6) * mean_s / exp(1.28))
        there = not there
    return Availability(tuple(times_s), tuple(flags), days * DAY_S)


def deadlines(folder: Path) -> Iterator[str]:
    """Yield what the deadline rules cost, against pure on-demand; spot costs 0.3 of it."""
    prices = {Market.SPOT: 0.3, Market.ON_DEMAND: 1.0}

    def cost(policy: RentalPolicy, records: list[Availability], work_h: float, slack: float) -> tuple[float, int]:
        done = [
            replay(policy, record, work_h * 3600, work_h * 3600 * slack, 720, record.ends_s * begin / 12)
            for record in records
            for begin in range(12)
        ]
        return fmean(each.usd(prices) for each in done) / work_h, sum(not each.met for each in done)

    yield "| record | spot there | slack | greedy | Uniform Progress | missed |"
    yield "| --- | --- | --- | --- | --- | --- |"
    drawn = {f"drawn, {share}": [drawn_record(share, up_h, seed) for seed in range(4)] for share, up_h in SPELLS}
    recorded = {
        f"{name.split('_')[0]}, {machines} machines": [read_availability(folder / "transient" / name, machines)]
        for name, machines in RECORDS
    }
    for name, records in {**drawn, **recorded}.items():
        work_h = 48.0 if name.startswith("drawn") else 8.0
        for slack in (1.25, 1.5, 2.0):
            found = [cost(policy, records, work_h, slack) for policy in (greedy, uniform_progress)]
            share = fmean(record.share for record in records)
            yield (
                f"| {name} | {share:.0%} | {slack} | {found[0][0]:.2f} | {found[1][0]:.2f}"
                f" | {found[0][1] + found[1][1]} |"
            )


SPELLS = ((0.17, 1.0), (0.47, 2.0), (0.59, 2.0), (0.76, 5.0), (0.9, 10.0))
RECORDS = (
    ("gcp_spot_cluster_v100_us-east1-c.csv", 80),
    ("aws_spot_cluster_p3.csv", 20),
    ("aws_spot_cluster_p3.csv", 30),
)


def moves(folder: Path) -> Iterator[str]:
    """Yield what moving between zones and types saves on recorded prices."""
    speeds = {"p2.xlarge": (0.62, 120.0), "p3.2xlarge": (4.39, 227.0)}
    paths = sorted((folder / "transient").glob("aws_spot_price_*"))
    yield "| places | energy, usd/kWh | staying | one move a day | each hour | moves |"
    yield "| --- | --- | --- | --- | --- | --- |"
    for kinds in (("p2.xlarge",), ("p3.2xlarge",), ("p2.xlarge", "p3.2xlarge")):
        places = []
        for path in paths:
            found = [history for history in read_histories(path) if history.name.split()[1] in kinds]
            places += [PricedPlace(history, *speeds[history.name.split()[1]]) for history in found]
        begin_s = max(place.history.times_s[0] for place in places)
        for price in (0.0, 0.3):
            steps = 20 * DAY_S * max(place.steps_per_s for place in places)
            starts = [begin_s + day * DAY_S for day in range(5, 65, 10)]
            stays = [stay(places, steps, start_s, Moving(price)).cost_usd(price) for start_s in starts]
            days = [travel(places, steps, start_s, Moving(price)) for start_s in starts]
            hours = [travel(places, steps, start_s, Moving(price, dwell_s=0)) for start_s in starts]
            base = sum(stays)
            yield (
                f"| {', '.join(kinds)} ({len(places)}) | {price} | 1"
                f" | {sum(each.cost_usd(price) for each in days) / base:.4f}"
                f" | {sum(each.cost_usd(price) for each in hours) / base:.4f}"
                f" | {fmean(each.moves for each in days):.1f} / {fmean(each.moves for each in hours):.1f} |"
            )


def spot(folder: Path) -> Iterator[str]:
    """Yield where spot stops paying: one V100 at 0.354 of its price on demand."""
    kind = machine(folder, "V100 ResNet-50")
    yield "| machines | losses of each per hour | time | cost | joules | would pay below |"
    yield "| --- | --- | --- | --- | --- | --- |"
    for machines in (1, 8, 32):
        for rate in (0.02, 0.1, 1.0):
            work = Work("job", 72_000 * machines, CheckpointCost(3.8, 3.8), 8)
            offer = Offer(kind, 0.2, tuple(float(n) for n in range(1, 33)), 170, ConstantHazard(rate))
            found = judge(options(work, offer, Market.SPOT, machines)[0])
            if found is not None:
                yield (
                    f"| {machines} | {rate} | {found.slowdown:.3f} | {found.cost_ratio:.3f} | {found.energy_ratio:.3f}"
                    f" | {found.break_even_per_h:.3g}/h |"
                )


def successors(folder: Path) -> Iterator[str]:
    """Yield what asking at the newsvendor's quantile saves over asking at the mean wait (Mirage's plain rule)."""
    random = Random(0)
    table = folder / "transient" / "gcp_startup_times_cmdare.csv"
    known = {f"recorded, {gpu}": read_waits(table, gpu) for gpu in ("K80", "P100", "V100")}
    for sigma in (0.3, 1.0, 2.0):
        known[f"drawn, σ of log {sigma}"] = Waits.of([600 * random.lognormvariate(0, sigma) for _ in range(2000)])
    yield "| waits | late : early | mean wait | quantile | saved |"
    yield "| --- | --- | --- | --- | --- |"
    for name, waits in known.items():
        for late in (0.25, 1.0, 8.0):
            stakes = Stakes(1.0, late)
            mean, best = expected_usd(waits.mean_s, waits, stakes), expected_usd(lead_s(waits, stakes), waits, stakes)
            yield f"| {name} | {late} : 1 | {mean:.1f} | {best:.1f} | {1 - best / mean:.0%} |"


def sharing(folder: Path) -> Iterator[str]:
    """Yield what sharing machines by each job's own speeds is worth, against an equal share of every kind."""
    tables = {gpu: folder / "replay" / f"zeus-nsdi23__nvidia-{gpu}__{{}}-train.csv" for gpu in ("a40", "p100", "v100")}
    kinds = [
        Kind(gpu, 1, 0.0, caps_of_table(Path(str(table).format("imagenet-resnet50")), 128))
        for gpu, table in tables.items()
    ]
    jobs = []
    for network, batch in SHARING.items():
        speeds = {gpu: steps_per_s(Path(str(table).format(network)), batch) for gpu, table in tables.items()}
        equal = sum(speeds.values()) / len(SHARING)
        jobs.append(SharingJob(network, equal * DAY_S, speeds, deadline_s=DAY_S))
    fair = share(jobs, kinds)
    yield "| job | steps/s on " + ", ".join(gpu.upper() for gpu in tables) + " | equal share | fair | more |"
    yield "| --- | --- | --- | --- | --- |"
    for job in jobs:
        equal = job.steps / DAY_S
        listed = ", ".join(f"{speed:.3g}" for speed in job.steps_per_s.values())
        most = fair.steps_per_s[job.name]
        yield f"| {job.name} | {listed} | {equal:.3g} | {most:.3g} | {most / equal - 1:+.0%} |"
    equal_w = sum(kind.caps[0].power_w for kind in kinds)
    default = share(jobs, [replace(kind, caps=kind.caps[:1]) for kind in kinds], Aim.ENERGY)
    capped = share(jobs, kinds, Aim.ENERGY)
    yield ""
    yield (
        f"The steps of equal shares with the fewest joules: {1 - default.power_w / equal_w:.0%} less at default power, "
        f"{1 - capped.power_w / equal_w:.0%} less with caps ({equal_w:.0f}, {default.power_w:.0f} and "
        f"{capped.power_w:.0f} W)."
    )


SHARING = {
    "cifar100-shufflenetv2": 1024,
    "imagenet-resnet50": 128,
    "movielens-1m-ncf": 16384,
    "sentiment140-bert-base-uncased": 64,
    "squad-bert-base-uncased": 24,
}
"""Networks of Zeus's tables, at the largest batch size near its default that all three GPU types have."""


def steps_per_s(table: Path, batch: int) -> float:
    """Return the steps per second that a table records for a batch size at the highest power limit."""
    read = Table.read(table)
    rows = {
        float(point["power_limit_w"]): measured.latency.mean_s
        for point, measured in zip(read.points, read.measurements, strict=True)
        if point["batch_size"] == batch
    }
    return 1 / (rows[max(rows)] or inf)


def speed(folder: Path) -> Iterator[str]:
    """Yield how much processor time a plan takes."""
    kind = machine(folder, "V100 ResNet-50", 5.0)
    work = Work("job", 72_000 * 24, CheckpointCost(3.8, 3.8), 8)
    offers = [
        Offer(kind, 0.2, tuple(float(n) for n in range(1, 25)), 170, ConstantHazard(rate)) for rate in (0.02, 0.1, 0.3)
    ]
    begin_s = time.process_time()
    found = every_option(work, offers)
    middle_s = time.process_time()
    made = plan(found, Limits(deadline_s=inf))
    end_s = time.process_time()
    yield (
        f"{len(found)} options in {middle_s - begin_s:.2f} s; outlooks of {len(made.front)} of them, 200 draws each,"
        f" in {end_s - middle_s:.2f} s of processor time."
    )


def main() -> None:
    """Print every table."""
    folder = Path(sys.argv[1])
    parts = {
        "Joules, cap and interval chosen apart and together": joules(folder),
        "Draws against expectations": agreement(folder),
        "Spot or not": spot(folder),
        "Deadline rules": deadlines(folder),
        "Moves": moves(folder),
        "Several jobs": sharing(folder),
        "Successors": successors(folder),
        "Time of a plan": speed(folder),
    }
    for title, lines in parts.items():
        print(f"## {title}\n")
        print("\n".join(lines), end="\n\n", flush=True)


if __name__ == "__main__":
    main()
