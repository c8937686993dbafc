"""Whether searches with an error budget ever overdraw it, and what share of the saving they find all the same.

    python benchmarks/error_budget.py [--runs 500] [--method random] [--budget 0.1%]
    PYTHONPATH=tests python benchmarks/error_budget.py --served [--runs 20] [--method random] [--budget 10]

Each run tunes a model on a simulated board for an SLO, once with the budget and once without. Overdrawn is judged by
what the model itself served, query by query in a log of its own, and not by what the search says of itself: of each
trial the requests over the limit beyond a hundredth of those sent, all trials added up. Method random tries whatever
there is, so that most trials break the limit: it shows the bound, in 0.3 s a run; bayes shows the saving, in 5 s a run.
Simulated.

With ``--served`` requests are real ones, to a network on MLServer (installed first, into .services), by batch and
number in flight, while energy is estimated from this machine's processor. Late is what took longer, as percentiles have
it, or had been under way for longer when it was given up.
"""

import argparse
import asyncio
import contextlib
import math
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from polythrottle.domain.error_budget import ErrorBudget
from polythrottle.domain.errors import TrialError
from polythrottle.domain.measurement import Query, Window
from polythrottle.domain.ports import Concurrent, Device, Workload
from polythrottle.domain.problem import Constraint, Problem
from polythrottle.domain.space import OperatingPoint, SearchSpace
from polythrottle.domain.study import Study
from polythrottle.optimize import Options, make_optimizer
from polythrottle.storage.journal import Journal
from polythrottle.tuning.setup import Setup
from polythrottle.tuning.stopping import Budget, Rule
from polythrottle.tuning.tuner import tune

BOARDS = ("jetson-agx-orin", "jetson-tx2", "jetson-xavier-nx", "a100", "jetson-orin-nx")
WORKLOADS = ("efficientnet-b4", "resnet50", "mobilenetv2", "bert-base-fp16")
MULTIPLES = (1.2, 1.5, 2.0)
"""Of the default point's p99: the limits."""
WINDOW = Window(30, 0.0, 1000, timeout_s=3600.0, precision=0.02)


class Logged:
    """A workload that keeps what each trial's queries took.

    Args:
        served: The workload.
    """

    def __init__(self, served: Workload) -> None:
        self._served = served
        self.uri = served.uri
        self.trials: list[list[float]] = []

    @property
    def space(self) -> SearchSpace:
        """The workload's."""
        return self._served.space

    def apply(self, point: OperatingPoint) -> None:
        """Begin a trial."""
        self.trials.append([])
        self._served.apply(point)

    def query(self) -> Query:
        """Serve one, and keep what it took."""
        query = self._served.query()
        self.trials[-1].append(query.latency_s)
        return query

    def close(self) -> None:
        """Close the workload."""
        self._served.close()

    @property
    def concurrency(self) -> int:
        """How many requests are under way at once; one where the workload has no way to send several."""
        return self._served.concurrency if isinstance(self._served, Concurrent) else 1

    async def send(self) -> Query:
        """Send one, and keep how long it took, or how long it had been under way when it was given up."""
        assert isinstance(self._served, Concurrent)
        trial, place, begun_s = self.trials[-1], len(self.trials[-1]), time.monotonic()
        trial.append(math.inf)
        try:
            query = await self._served.send()
        except asyncio.CancelledError:
            trial[place] = time.monotonic() - begun_s
            raise
        trial[place] = query.latency_s
        return query

    async def hang_up(self) -> None:
        """Release what was opened."""
        assert isinstance(self._served, Concurrent)
        await self._served.hang_up()

    def beyond(self, limit_s: float) -> float:
        """Return how many requests were late beyond a hundredth of each trial's."""
        return sum(max(0.0, sum(each > limit_s for each in trial) - 0.01 * len(trial)) for trial in self.trials)


@dataclass(frozen=True)
class Run:
    """What one search came to.

    Args:
        saving: Share of the default's energy; 0 without an answer.
        trials: Made.
        beyond: Late requests, as the workload itself logged them.
        most: How many there might be; None for any number.
    """

    saving: float
    trials: int
    beyond: float
    most: float | None


def search(board: str, workload: str, multiple: float, seed: int, method: str, budget: ErrorBudget | None) -> Run:
    """Return what one search comes to.

    Args:
        board: Its name in the catalogue; ``workload`` likewise.
        workload: What is served.
        multiple: The limit, as a multiple of the default's p99 in a search of its own.
        seed: Of noise and method.
        method: Who searches.
        budget: Of errors; None for none.
    """
    device, served = Setup(f"sim:{board}?seed={seed}", workload).open()
    limit = Constraint("p99", multiple * default_p99_s(board, workload))
    return searched(device, Logged(served), limit, seed, method, budget)


def searched(
    device: Device,
    logged: Logged,
    limit: Constraint,
    seed: int,
    method: str,
    budget: ErrorBudget | None,
    window: Window = WINDOW,
) -> Run:
    """Return what a search comes to of a device and a workload, for a limit on p99."""
    problem = Problem(device.space * logged.space, (limit,), device.uri, logged.uri, window=window)
    most = None if budget is None else budget.requests(problem, 30)
    with tempfile.TemporaryDirectory(prefix="polythrottle-") as folder:
        study = Study(problem, method, seed)
        with Journal.create(Path(folder) / "study.jsonl", study, {}) as journal:
            with contextlib.suppress(TrialError):
                for _ in tune(device, logged, make_optimizer(method, Options()), journal, Budget(), Rule(), most):
                    pass
            study = journal.study
    return Run(max(0.0, study.saving_fraction or 0.0), len(study.trials), logged.beyond(limit.limit), most)


_KNOWN: dict[tuple[str, str], float] = {}


def default_p99_s(board: str, workload: str) -> float:
    """Return the p99 of a board's default point, remembered."""
    from polythrottle.metering.point_measurement import measure

    if (board, workload) not in _KNOWN:
        device, served = Setup(f"sim:{board}?seed=0", workload).open()
        with device:
            point = (device.space * served.space).default
            p99_s = measure(device, served, point, Window(1000, 0.0, 1000, timeout_s=3600.0)).latency.p99_s
        assert p99_s is not None
        _KNOWN[board, workload] = p99_s
    return _KNOWN[board, workload]


def cases(runs: int) -> Iterator[tuple[str, str, float, int]]:
    """Yield board, workload, multiple and seed of each run."""
    every = [(board, workload, multiple) for multiple in MULTIPLES for board in BOARDS for workload in WORKLOADS]
    for number in range(runs):
        # A stride that shares no factor with their number, so that few runs are of all kinds too.
        yield (*every[number * 7 % len(every)], number // len(every))


NETWORK = """
import numpy as np
from mlserver import MLModel
from mlserver.codecs import NumpyCodec
from mlserver.types import InferenceResponse


class Network(MLModel):
    async def load(self):
        draw = np.random.default_rng(0)
        self._layers = [draw.standard_normal((1024, 1024)).astype(np.float32) / 32 for _ in range(4)]
        return True

    async def predict(self, payload):
        x = NumpyCodec.decode_input(payload.inputs[0])
        for layer in self._layers:
            x = np.tanh(x @ layer)
        return InferenceResponse(model_name=self.name, outputs=[NumpyCodec.encode_output("y", x)])
"""
SERVED = Window(30, 0.0, 300, timeout_s=60.0, precision=0.02)


@contextlib.contextmanager
def network() -> Iterator[str]:
    """Serve a network of four layers on MLServer; yield its URI."""
    from services.servers import install, mlserver

    with (
        tempfile.TemporaryDirectory(prefix="polythrottle-") as folder,
        mlserver(install(), Path(folder), NETWORK, "Network", {"net": 1024}) as server,
    ):
        yield f"kserve://127.0.0.1:{server.http}/net?concurrency=1,2,4,8"


def served_searches(method: str, budget: ErrorBudget, runs: int) -> tuple[list[Run], list[Run]]:
    """Return what searches without and with a budget come to on a served network, in turns."""
    from polythrottle.metering.point_measurement import measure

    free: list[Run] = []
    kept: list[Run] = []
    with network() as uri:
        setup = Setup("cpu?watts_per_core=4", uri, batch_sizes=(1, 2, 4, 8, 16, 32))
        for number in range(runs):
            multiple = MULTIPLES[number % len(MULTIPLES)]
            device, served = setup.open()
            with device, contextlib.closing(served):
                default = measure(device, served, (device.space * served.space).default, SERVED)
            assert default.latency.p99_s is not None
            limit = Constraint("p99", multiple * default.latency.p99_s)
            for found, most in ((free, None), (kept, budget)):
                device, served = setup.open()
                with contextlib.closing(served):
                    found.append(searched(device, Logged(served), limit, number, method, most, SERVED))
            print(f"{number}: p99<={1000 * limit.limit:.1f}ms: {free[-1]}, {kept[-1]}", file=sys.stderr)
    return free, kept


def simulated_searches(method: str, budget: ErrorBudget, runs: int) -> tuple[list[Run], list[Run]]:
    """Return what simulated searches without and with a budget come to."""
    asked = list(cases(runs))
    return [search(*case, method, None) for case in asked], [search(*case, method, budget) for case in asked]


def main() -> None:
    """Print how many searches overdrew, and the share of the saving."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, help="500; 20 with --served")
    parser.add_argument("--method", default="random")
    parser.add_argument("--budget", help="0.1%%; 10 requests with --served")
    parser.add_argument("--served", action="store_true", help="send real requests, to a network on MLServer")
    asked = parser.parse_args()
    budget = ErrorBudget.parse(asked.budget or ("10" if asked.served else "0.1%"))
    searches = served_searches if asked.served else simulated_searches
    report(asked.method, budget, *searches(asked.method, budget, asked.runs or (20 if asked.served else 500)))


def report(method: str, budget: ErrorBudget, free: Sequence[Run], kept: Sequence[Run]) -> None:
    """Print what searches without and with a budget came to."""
    overdrawn = sum(run.most is not None and run.beyond > run.most + 1e-6 for run in kept)
    print(f"{method}, --error-budget {budget}: {overdrawn} of {len(kept)} searches overdrawn; at most "
          f"{max(run.beyond for run in kept):.2f} late of {kept[0].most:.2f} allowed")  # fmt: skip
    mean = statistics.fmean
    for name, runs in (("without", free), ("with", kept)):
        late = statistics.median(run.beyond for run in runs)
        print(f"  {name:8} saving {mean(run.saving for run in runs):6.1%}, {mean(run.trials for run in runs):.1f} "
              f"trials, {late:.1f} late in the median, {max(run.beyond for run in runs):.0f} at most")  # fmt: skip
    both = mean(run.saving for run in kept) / mean(run.saving for run in free)
    worse = mean(with_.saving < 0.95 * without.saving for with_, without in zip(kept, free, strict=True))
    print(f"  {both:.1%} of the saving; in {worse:.1%} of the searches less than 95 % of it")


if __name__ == "__main__":
    main()
