"""Fine-tuning beside inference on two cores of this machine: `python benchmarks/finetuning_cpu.py --write FILE.md`.

A convolutional network answers single requests that come at random (Poisson) while its head is trained on made-up
pictures by the real trainer, in a process of its own. Every policy gets as long as every other. Nothing is simulated.
Run it with ``taskset -c 0,1`` on a machine that has little else to do; the file says what else it had.
"""

import argparse
import os
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from polythrottle.backends import open_device
from polythrottle.domain.arrivals import Poisson
from polythrottle.domain.errors import SloUnmet
from polythrottle.training.beside.live_run import run
from polythrottle.training.beside.preparation import BatchedWorkload
from polythrottle.training.beside.scheduler import Terms
from polythrottle.training.beside.serving_loop import Result
from polythrottle.training.beside.trainer.driver import Task, Trainer
from polythrottle.workloads import open_workload

SIDE, CLASSES = 160, 4
POLICIES = ("none", "greedy", "paper", "interleave")
BATCH, SERVING_THREADS, TRAINING_THREADS = 32, 1, 2
LOOK_S, BUSY, ALLOWED = 4.0, 0.5, 10.0
_NAMES = {"none": "inference alone"}


def model() -> nn.Module:
    """Return a network whose filters stay as they are and whose head is trained."""
    torch.manual_seed(0)
    first = nn.Conv2d(3, 32, 5, stride=2, padding=2), nn.ReLU()
    more = nn.Conv2d(32, 64, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(64, 128, 3, padding=1), nn.ReLU()
    return nn.Sequential(*first, *more, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(128, CLASSES))


def write_data(folder: Path, each: int = 40) -> None:
    """Write pictures whose stripes tell their class."""
    random = np.random.default_rng(0)
    for number in range(each * CLASSES):
        label = number % CLASSES
        stripes = np.sin(np.arange(SIDE) * (label + 1) / 4 + random.uniform(0, 6))
        picture = np.broadcast_to(stripes, (3, SIDE, SIDE)) + random.normal(0, 1, (3, SIDE, SIDE))
        (folder / str(label)).mkdir(parents=True, exist_ok=True)
        np.save(folder / str(label) / f"{number:04}.npy", picture.astype(np.float32))


def measured(policy: str, seconds: float, rate_per_s: float, slo_s: float, folder: Path) -> Result:
    """Return what came of one policy.

    Raises:
        PolythrottleError: If the trainer cannot be started or the workload fails.
    """
    name = f"{Path(__file__).stem}:model"
    task = Task(name, str(folder / "data"), str(folder / policy), batch=BATCH, epochs=100_000, threads=TRAINING_THREADS)
    server = BatchedWorkload(open_workload(name, inputs=(f"3x{SIDE}x{SIDE}",), threads=[SERVING_THREADS]))
    terms = Terms(slo_s, Poisson(rate_per_s), policy, seconds)
    return run(open_device("cpu"), server, Trainer(task), terms)


def alone_s() -> float:
    """Return how long a request takes by itself on average, measured for a few seconds."""
    served = open_workload(f"{Path(__file__).stem}:model", inputs=(f"3x{SIDE}x{SIDE}",), threads=[SERVING_THREADS])
    begin_s, count = time.monotonic(), 0
    while time.monotonic() - begin_s < LOOK_S:
        served.query()
        count += 1
    return (time.monotonic() - begin_s) / count


def lines(found: list[tuple[Result, str]], rate_per_s: float, seconds: float) -> Iterator[str]:
    """Yield the report in Markdown."""
    slo_s = found[0][0].slo_s
    yield "# Fine-tuning beside inference, measured on two cores\n"
    yield (
        f"`taskset -c 0,1 python benchmarks/finetuning_cpu.py --rate {rate_per_s:g} --slo-ms {1e3 * slo_s:g} "
        f"--seconds {seconds:g}`: everything is measured, energy is estimated from busy time.\n"
    )
    yield f"Poisson arrivals at {rate_per_s:g}/s, p99 within {1e3 * slo_s:g} ms; {found[0][0].title}.\n"
    yield "| policy | requests | late % (95 %) | p50 ms | p95 ms | p99 ms (95 %) | limit | samples | held back | load |"
    yield "| --- | --- | --- | --- | --- | --- | --- | --- | --- | --- |"
    for one, load in found:
        yield f"| {' | '.join(_cells(one, load))} |"
    yield (
        "\nlate: beyond the limit, or given up; p50 to p99: of answered requests; limit: whether at most 1 % were "
        "late; samples: fine-tuned in whole steps; held back: slices stopped for requests, slices made smaller, "
        "pauses; load: of the whole machine (average of a minute) before and after, of "
        f"{os.cpu_count()} processors."
    )


def _cells(one: Result, load: str) -> Iterator[str]:
    times, late = one.percentiles(), one.late_interval
    assert late is not None
    assert one.late_share is not None
    yield _NAMES.get(one.policy, one.policy)
    yield str(one.requests)
    yield f"{100 * one.late_share:.2f} ({100 * late.low:.2f} to {100 * late.high:.2f})"
    yield from (f"{1e3 * times[name][0]:.1f}" for name in ("p50", "p95"))
    value, interval = times["p99"]
    ends = "" if interval is None else f" ({1e3 * interval.low:.1f} to {1e3 * interval.high:.1f})"
    yield f"{1e3 * value:.1f}{ends}"
    yield "held" if one.held else "broken"
    yield str(one.training.samples)
    yield f"{one.training.suspended}, {one.training.shrunk}, {one.training.pauses}"
    yield load


def main() -> None:
    """Run it."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=180.0, help="per policy")
    parser.add_argument("--rate", type=float, help="requests per second; inference alone is busy half of the time")
    parser.add_argument("--slo-ms", type=float, help="limit of a request; 10 times what one takes by itself")
    parser.add_argument("--policies", default=",".join(POLICIES), help="in this order")
    parser.add_argument("--write", type=Path, help="a Markdown file instead of standard output")
    given: Any = parser.parse_args()
    sys.path.insert(0, str(Path(__file__).parent))
    found, each_s = [], alone_s()
    rate_per_s, slo_ms = given.rate or round(BUSY / each_s, 1), given.slo_ms or round(1e3 * ALLOWED * each_s)
    with tempfile.TemporaryDirectory() as name:
        write_data(Path(name) / "data")
        for policy in given.policies.split(","):
            before = os.getloadavg()[0]
            try:
                one = measured(policy, given.seconds, rate_per_s, slo_ms / 1e3, Path(name))
            except SloUnmet as error:
                sys.exit(f"{policy}: {error}")
            found.append((one, f"{before:.1f}, {os.getloadavg()[0]:.1f}"))
            sys.stderr.write(f"{policy}: {' '.join(_cells(*found[-1]))} {one.training}\n")
    text = "\n".join(lines(found, rate_per_s, given.seconds)) + "\n"
    if given.write is None:
        sys.stdout.write(text)
    else:
        given.write.write_text(text)


if __name__ == "__main__":
    main()
