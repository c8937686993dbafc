"""How punctual the load generator is, and what it costs: `python benchmarks/load.py [--rounds 5] [--rates 2000]`.

A server in a process of its own echoes eight bytes; queries arrive by a Poisson process, 2,000 a second and more, sent
by one event loop in one thread. Printed per round: what was sent, how late 99 % of it was at most, the latency as the
load saw it, the processor time the generator took, and for how long its threads stood ready without being given a
processor: where that is more than a twentieth of the time, other programs are measured too, and the round says little.
On a machine that others use, `chrt -f 10` before the command keeps them away for the few seconds this takes.
"""

import argparse
import os
import sys
from pathlib import Path
from typing import NamedTuple

import numpy as np

from polythrottle.domain.arrivals import Poisson
from polythrottle.domain.clock import SystemClock
from polythrottle.metering.load import drive

sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))
from loopback import EchoWorkload, echo_server

_RATES_PER_S = (30, 500, 2000, 3000)
_BAR_S = 1e-3
_WAITED = 0.05


class Round(NamedTuple):
    """One round: rate sent, 99th percentile of lateness, latencies in seconds, and shares of a core."""

    sent_per_s: float
    late_p99_s: float
    p50_s: float
    p99_s: float
    cpu: float
    waited: float


def main() -> None:
    """Print a line per rate and round."""
    words = argparse.ArgumentParser(description=__doc__)
    words.add_argument("--rounds", type=int, default=5)
    words.add_argument("--seconds", type=float, default=3.0)
    words.add_argument("--rates", type=float, nargs="+", default=_RATES_PER_S, metavar="PER_S")
    given = words.parse_args()
    print("asked/s  sent/s  late p99   p50      p99      cpu     waited for a processor")
    with echo_server() as port:
        for rate_per_s in given.rates:
            rounds = [_round(port, rate_per_s, seed, given.seconds) for seed in range(given.rounds)]
            for one in rounds:
                print(f"{rate_per_s:7.0f}  {_row(one)}")
            print(_verdict(rate_per_s, rounds))


def _row(one: Round) -> str:
    times = "  ".join(f"{time_s * 1e6:5.0f}µs" for time_s in (one.late_p99_s, one.p50_s, one.p99_s))
    return f"{one.sent_per_s:6.0f}  {times}  {one.cpu:5.1%}  {one.waited:5.1%}"


def _verdict(rate_per_s: float, rounds: list[Round]) -> str:
    quiet = [one for one in rounds if one.waited <= _WAITED]
    if not quiet:
        return f"{rate_per_s:7.0f}  no quiet round: other programs held the processors"
    good = sum(one.late_p99_s < _BAR_S for one in quiet)
    return f"{rate_per_s:7.0f}  {good} of {len(quiet)} quiet rounds sent 99 % less than {_BAR_S * 1e3:g} ms late"


def _round(port: int, rate_per_s: float, seed: int, duration_s: float) -> Round:
    clock, latencies_s = SystemClock(), []
    with drive(EchoWorkload(port), Poisson(rate_per_s), clock, seed) as load:
        next(load)
        begin_s, before, first = clock.now(), _ready_s(), load.report
        for query in load:
            latencies_s.append(query.latency_s)
            if clock.now() - begin_s >= duration_s:
                break
        taken_s, report, waited_s = clock.now() - begin_s, load.report, _ready_s() - before
    p50_s, p99_s = np.quantile(latencies_s, [0.5, 0.99]).tolist()
    sent, cpu_s = report.sent - first.sent, report.cpu_s - first.cpu_s
    assert report.late_p99_s is not None
    return Round(sent / taken_s, report.late_p99_s, p50_s, p99_s, cpu_s / taken_s, waited_s / taken_s)


def _ready_s() -> float:
    """Return for how long threads of this process were ready without a processor (proc(5), schedstat), in seconds."""
    total_ns = 0
    for task in os.listdir("/proc/self/task"):
        total_ns += int(Path(f"/proc/self/task/{task}/schedstat").read_text().split()[1])
    return total_ns / 1e9


if __name__ == "__main__":
    main()
