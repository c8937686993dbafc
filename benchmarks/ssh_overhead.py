"""What a trial takes over SSH besides its window: round trips, and time besides them.

    PYTHONPATH=tests:tests/ssh python benchmarks/ssh_overhead.py [--trials 3] [--delays 0 100]

A board (a planted tree) behind a real sshd on loopback, reached by a relay that delays each segment. The same random
trials are made on the board itself and over SSH at each delay; a trial lasts from the end of the one before to its own.
Its window runs on the board, whatever the delay. So what a trial takes longer at a longer delay, as a share of the
delay there and back, is how many round trips it waits for besides its window; and what it takes longer than on the
board itself where there is no delay is the time besides them. Medians; the first trial is left out. Also told is what
is asked in a trial, most often of which a poll during the window.
"""

import argparse
import os
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from statistics import median

from boards_over_ssh import planted
from slow_line import SlowLine
from sshd import SSHD, listening

from polythrottle.backends.ssh import SshBoard
from polythrottle.board.link import SSH
from polythrottle.domain.measurement import Window
from polythrottle.domain.problem import Constraint, Problem
from polythrottle.domain.study import Study, TrialState
from polythrottle.optimize import make_optimizer
from polythrottle.storage.journal import Journal
from polythrottle.tuning.setup import Setup
from polythrottle.tuning.stopping import Budget, Rule
from polythrottle.tuning.tuner import tune

WINDOW = Window(queries=40, duration_s=1.0, warmup=5)


@dataclass(frozen=True)
class Trials:
    """What trials took.

    Args:
        trial_s: From the end of the one before to its own, median.
        asked: How many requests of each kind a trial made, mean.
    """

    trial_s: float
    asked: Mapping[str, float]


def trials_on(device: str, count: int) -> Trials:
    """Return what trials take on a device."""
    asked: Counter[str] = Counter()
    counting = False
    whole = SshBoard.ask

    def counted(board: SshBoard, verb: str, **fields: object) -> dict[str, object]:
        orders = fields.get("message", {})
        said = [str(order["do"]) for order in orders["say"]] if isinstance(orders, dict) and orders else []
        if counting:
            asked[f"{verb} {'+'.join(said)}".strip()] += 1
        return whole(board, verb, **fields)

    SshBoard.ask = counted  # type: ignore[method-assign, assignment]
    words = Setup(device=device, workload="cmd:sleep 0.01", knobs=("mem_hz",))
    board, served = words.open()
    with tempfile.TemporaryDirectory() as name, words.closing(served):
        space = board.space * served.space
        problem = Problem(space, (Constraint.parse("p99<=60s"),), board.uri, served.uri, {}, WINDOW)
        ends_s = []
        with Journal.create(Path(name) / "study.jsonl", Study(problem, "random", 0), {}) as journal:
            for study in tune(board, served, make_optimizer("random"), journal, Budget(count + 1), Rule(early=False)):
                if study.trials[-1].state is TrialState.RUNNING:
                    continue
                assert study.trials[-1].measurement is not None, study.trials[-1].failure
                ends_s.append(time.monotonic())
                counting = len(ends_s) <= count
    SshBoard.ask = whole  # type: ignore[method-assign]
    took = [after - before for before, after in pairwise(ends_s)]
    return Trials(median(took), {kind: times / len(took) for kind, times in asked.items()})


def page(near: Trials, far: Mapping[float, Trials]) -> str:
    """Return the table, and the figures that are asked for."""
    delays = sorted(far)
    rows = [
        f"| {1000 * delay:.0f} ms | {1000 * (far[delay].trial_s - near.trial_s):.0f} ms "
        f"| {', '.join(f'{kind} {times:.1f}' for kind, times in sorted(far[delay].asked.items()))} |"
        for delay in delays
    ]
    least, most = delays[0], delays[-1]
    trips = (far[most].trial_s - far[least].trial_s) / (2 * (most - least))
    besides_s = far[least].trial_s - near.trial_s - 2 * least * trips
    return "\n".join(
        [
            "| delay each way | a trial takes longer than on the board by | requests of a trial |",
            "|---|---|---|",
            *rows,
            "",
            f"A trial on the board itself takes {1000 * near.trial_s:.0f} ms. Over SSH it waits for {trips:.1f} round "
            f"trips besides its window, and takes {1000 * besides_s:.0f} ms besides them.",
        ]
    )


def measured(count: int, delays_s: Sequence[float]) -> str:
    """Return the page's table, from boards behind an sshd of our own."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for kind in ("STATE", "RUN"):  # of this machine nothing is to be left changed or on record
            os.environ[f"POLYTHROTTLE_{kind}_DIR"] = str(folder / kind.lower())
        root = planted(folder)
        near = trials_on(f"jetson?root={root}", count)
        far = {}
        with listening(folder) as (config, port, _):
            for delay_s in delays_s:
                line = SlowLine(port, delay_s=delay_s)
                os.environ[SSH] = f"ssh -F {config} -o Port={line.port} -o HostKeyAlias=nano"
                far[delay_s] = trials_on(f"ssh://nano/jetson?root={root}&python={sys.executable}", count)
                line.close()
    return page(near, far)


def main() -> None:
    """Print the table, or write it as a page."""
    words = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    words.add_argument("--trials", type=int, default=3)
    words.add_argument("--delays", type=float, nargs="+", default=[0.0, 100.0], help="each way, in ms")
    words.add_argument("--out", type=Path, default=None)
    asked = words.parse_args()
    if SSHD is None:
        raise SystemExit("needs sshd (Debian: openssh-server)")
    text = measured(asked.trials, [delay / 1000 for delay in asked.delays])
    print(text)
    if asked.out is not None:
        about = " ".join((__doc__ or "").split("\n\n", 2)[2].split())
        asked.out.write_text(f"# What a trial over SSH takes besides its window\n\n{about}\n\n{text}\n")


if __name__ == "__main__":
    main()
