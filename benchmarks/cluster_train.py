"""What surviving costs: recovery from a killed node, the share of checkpoints, samples over random kills and joins.

    python benchmarks/cluster_train.py [--kills 5] [--seconds 150] [--changes 30] [--write benchmarks/cluster_train.md]

Everything is measured on this machine with real processes: a controller, a TorchElastic agent for each node, and their
workers. Recovery: SIGKILL of all processes of one of two nodes to the first step that the other finishes, one clock.
Share: what checkpoints of a model of 116 MB (349 MB with Adam's state) cost training, as the trainer itself accounts
for it (stalls, and steps that are slower beside a write), with the profiled interval and a rate of losses so high that
only the budget bounds it. Samples: random kills and joins.
"""

import argparse
import contextlib
import os
import random
import statistics
import sys
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))

from cluster.ledgers import counted, steps, undone_s

from polythrottle.domain.clock import SystemClock
from polythrottle.training.elastic.engines import LaunchPlan, Torchrun
from polythrottle.training.elastic.job_control import LocalJob

SCRIPT = Path(__file__).parent.parent / "tests" / "cluster" / "elastic_script.py"
LARGE = Path(__file__).parent.parent / "tests" / "cluster" / "large_script.py"
EVERY_S = 2.0
CLOCK = SystemClock()


def _job(folder: Path, nodes: int, script: Path, words: list[str], serving: list[str]) -> Torchrun:
    names = ["--serve", "127.0.0.1:0", "--nodes", f"1:{nodes}", "--job", "bench"]
    return Torchrun(LaunchPlan(folder / "job", script, words, [*names, *serving]))


def recovery(number: int) -> float:
    """Return the seconds from the SIGKILL of one of two nodes to the first step of the other."""
    found: dict[str, float] = {}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "ledger").mkdir()
        words = [str(folder / "ledger"), "4000", "10", "1", "0.1"]
        job = _job(folder, 2, SCRIPT, words, ["--every", str(EVERY_S)])

        def told(event: Mapping[str, Any]) -> None:
            if event["event"] == "checkpoint" and "killed" not in found:
                found["killed"] = CLOCK.now()
                job.kill(("n1", "n2")[number % 2])
            elif event["event"] == "first step" and event["workers"] == 1:
                (folder / "ledger" / "hurry").touch()

        LocalJob(job, ["n1", "n2"], None).run(told, lambda: job.exit_code)
        done = steps(folder / "ledger")
        last = max(done)
        second = sorted(done[last])[1]  # the second begins when the first is done
        return done[last][second].at_s - 0.1 - found["killed"]


def share(seconds: float) -> list[Mapping[str, Any]]:
    """Return the checkpoints of a large model's training, as recorded."""
    seen: list[Mapping[str, Any]] = []
    with tempfile.TemporaryDirectory() as name:
        job = _job(Path(name), 1, LARGE, [str(seconds)], ["--losses", "3600"])
        LocalJob(job, ["n1"], None).run(seen.append, lambda: job.exit_code)
    return [event for event in seen if event["event"] == "checkpoint"]


def samples(changes: int) -> dict[str, float]:
    """Return what random kills and joins came to."""
    rng, seen, due = random.Random(0), [], {"s": float("inf")}
    with tempfile.TemporaryDirectory() as name:
        ledger = Path(name) / "ledger"
        ledger.mkdir()
        words = [str(ledger), "1200", "10", "3", "0.1"]
        job = _job(Path(name), 3, SCRIPT, words, ["--every", str(EVERY_S)])

        def count() -> int:
            return sum(event["event"] in {"lost", "joined"} for event in seen) - 3

        def told(event: Mapping[str, Any]) -> None:
            seen.append(event)
            if event["event"] == "first step":
                due["s"] = CLOCK.now() + rng.uniform(0.2, 4.0)

        def ended() -> int | None:
            if count() >= changes:
                (ledger / "hurry").touch()
            elif CLOCK.now() >= due["s"]:
                due["s"] = float("inf")
                with contextlib.suppress(KeyError):
                    job.kill(rng.choice([e for e in seen if e["event"] == "formed"][-1]["members"]))
            return job.exit_code

        LocalJob(job, ["n1", "n2", "n3"], 1.0).run(told, ended)
        return _samples(ledger, seen, count())


def _samples(ledger: Path, seen: list[Mapping[str, Any]], changes: int) -> dict[str, float]:
    done = steps(ledger)
    kept = counted(done)
    wrong = 0
    for epoch in range(3):
        found = sorted(sample for step in kept if step.epoch == epoch for sample in step.samples)
        wrong += len(set(range(1200)) ^ set(found)) + len(found) - len(set(found))
    generations = [event["generation"] for event in seen if event["event"] == "formed"]
    return {"changes": changes, "generations": max(generations), "wrong": wrong, "undone_s": max(undone_s(done))}


def page(
    recoveries: list[float], written: list[Mapping[str, Any]], kept: dict[str, float], command: str
) -> Iterator[str]:
    """Yield the paragraphs of the report."""
    load = " ".join(f"{each:.1f}" for each in os.getloadavg())
    yield "# Training that survives"
    yield f"`{command}`, all measured, {os.cpu_count()} cores shared with other work (load averages then {load})."
    yield "| figure | measured | bar |\n| --- | --- | --- |\n" + "\n".join(_rows(recoveries, written, kept))


def _range(values: list[float]) -> str:
    return f"{statistics.median(values):.2f} ({min(values):.2f} to {max(values):.2f})" if values else "none"


def _rows(recoveries: list[float], written: list[Mapping[str, Any]], kept: dict[str, float]) -> Iterator[str]:
    times = ", ".join(f"{each:.1f}" for each in sorted(recoveries))
    middle_s = statistics.median(recoveries)
    yield f"| SIGKILL of a node → first step at the new size | median {middle_s:.1f} s ({times}) | ≤ 10 s |"
    regular = [event for event in written if "forced" not in event]
    yield f"| share of training time, stall and slower steps | {written[-1]['share']:.2%} at the end | ≤ 3.5 % |"
    stalls, writes = (_range([event[key] for event in regular]) for key in ("stall_s", "persist_s"))
    size = written[0]["bytes"] / 1e6
    yield f"| its {len(regular)} checkpoints of {size:.0f} MB: stall / write, s | {stalls} / {writes} | |"
    yield f"| random kills and joins | {kept['changes']:.0f}, {kept['generations']:.0f} generations | 30 |"
    yield f"| samples missed or seen twice in an epoch | {kept['wrong']:.0f} of 3,600 | 0 |"
    yield f"| most work undone by a loss | {kept['undone_s']:.1f} s, checkpoints every {EVERY_S:g} s | one interval |"


def main() -> None:
    """Measure, and print or write the report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=150.0)
    parser.add_argument("--changes", type=int, default=30)
    parser.add_argument("--write", type=Path)
    given = parser.parse_args()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    written = share(given.seconds)
    recoveries = [recovery(number) for number in range(given.kills)]
    command = f"python benchmarks/cluster_train.py --kills {given.kills} --seconds {given.seconds:g}"
    text = "\n\n".join(page(recoveries, written, samples(given.changes), command)) + "\n"
    if given.write:
        given.write.write_text(text)
    else:
        sys.stdout.write(text)


if __name__ == "__main__":
    main()
