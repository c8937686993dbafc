"""Makes co-runs on a device and says how well they let others be predicted, those that no fit has seen."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from typing_extensions import Self

from polythrottle.errors import InvalidInput
from polythrottle.finetune.corun import LEAST_RUNS, CoRun, Predictor, took_s
from polythrottle.finetune.interference import Interference, telling
from polythrottle.finetune.paper_predictor import PaperModel

UNCOUNTED = "operations could not be counted: items stand for them, and the paper's model cannot be fitted"
_LEAST_HELD_OUT = 4


class Bench(Protocol):
    """A device and a workload on which inference can be measured beside fine-tuning."""

    @property
    def title(self) -> str:
        """What runs where, for people; says so if it is simulated."""
        ...

    @property
    def simulated(self) -> bool:
        """Whether the times are computed."""
        ...

    @property
    def cases(self) -> Sequence[CoRun]:
        """What may be measured: co-runs without a measured latency."""
        ...

    def measure(self, case: CoRun) -> CoRun:
        """Return a case with the mean and the tail of a window of queries."""
        ...

    def request(self, case: CoRun) -> CoRun:
        """Return a case with the latency of one query."""
        ...


@dataclass(frozen=True)
class Error:
    """How far predictions of held-out co-runs lay off.

    Args:
        predictor: Whose.
        requests: Seen since the fit.
        mean: Mean absolute error of the mean latency, as a fraction of the measured one.
        tail: The same of the tail; None if there was none.
        within: Share of co-runs whose mean lay within twice the standard deviation that was stated.
    """

    predictor: str
    requests: int
    mean: float
    tail: float | None
    within: float

    @classmethod
    def of(cls, predictor: str, requests: int, model: Predictor, runs: Sequence[CoRun]) -> Self:
        """Return how far a model's predictions lie from measured co-runs."""
        told = [(model.predict(run), run, took_s(run)) for run in runs]
        off = [abs(each.mean_s / time_s - 1.0) for each, _, time_s in told]
        within = [abs(each.mean_s - time_s) <= 2.0 * each.std_s for each, _, time_s in told]
        tails = [
            abs(each.tail_s / run.tail_s - 1.0)
            for each, run, _ in told
            if each.tail_s is not None and run.tail_s is not None
        ]
        tail = float(np.mean(tails)) if tails else None
        return cls(predictor, requests, float(np.mean(off)), tail, float(np.mean(within)))


@dataclass(frozen=True, eq=False)
class Profiled:
    """What co-runs told.

    Args:
        title: What ran where.
        simulated: Whether the times are computed.
        runs: What the models were fitted from.
        held_out: What they were judged by.
        errors: The judgement, the paper's model first.
        model: Ours, after all that was seen.
        remarks: What a reader should know besides.
    """

    title: str
    simulated: bool
    runs: tuple[CoRun, ...]
    held_out: tuple[CoRun, ...]
    errors: tuple[Error, ...]
    model: Interference
    remarks: tuple[str, ...]

    def document(self) -> dict[str, Any]:
        """Return the same for ``--json``; errors are fractions, None where unknown."""
        return {
            "title": self.title,
            "simulated": self.simulated,
            "co_runs": len(self.runs),
            "held_out": len(self.held_out),
            "errors": [vars(error) for error in self.errors],
            "remarks": list(self.remarks),
        }

    def rows(self) -> list[tuple[str, ...]]:
        """Return the table for people, its head first."""
        head = ("predictor", "requests seen", "error of mean", "error of tail", "within 2 sd")
        return [head, *(_row(error) for error in self.errors)]


def _row(error: Error) -> tuple[str, ...]:
    tail = "not known" if error.tail is None else f"{error.tail:.1%}"
    return error.predictor, str(error.requests), f"{error.mean:.1%}", tail, f"{error.within:.0%}"


def profile(bench: Bench, fitted: int = LEAST_RUNS, held_out: int = 24, requests: int = 0, seed: int = 0) -> Profiled:
    """Measure co-runs, fit both models, judge them by other co-runs, and once more after some requests.

    Args:
        bench: What to measure on.
        fitted: Co-runs to fit from, each chosen for what it tells of the rest.
        held_out: Co-runs to judge by, at random among the rest.
        requests: Single requests to learn from afterwards, at random cases that are not held out.
        seed: Of the choice.

    Raises:
        InvalidInput: If fewer co-runs are asked for than a fit or a judgement needs, or than the bench has cases.
    """
    cases, rng = list(bench.cases), np.random.default_rng(seed)
    _check(len(cases), fitted, held_out, requests)
    first, runs = _telling_runs(bench, cases, fitted)
    others = [int(i) for i in rng.permutation([i for i in range(len(cases)) if i not in first])]
    judges = tuple(bench.measure(cases[i]) for i in others[:held_out])
    ours = Interference.fit(runs)
    errors = [Error.of("paper", 0, PaperModel.fit(runs), judges)] if ours.counted else []
    errors.append(Error.of("polythrottle", 0, ours, judges))
    open_cases = first + others[held_out:]
    for i in rng.integers(len(open_cases), size=requests):
        ours = ours.seen(bench.request(cases[open_cases[i]]))
    if requests:
        errors.append(Error.of("polythrottle", requests, ours, judges))
    remarks = () if ours.counted else (UNCOUNTED,)
    return Profiled(bench.title, bench.simulated, tuple(runs), judges, tuple(errors), ours, remarks)


def _telling_runs(bench: Bench, cases: Sequence[CoRun], count: int) -> tuple[list[int], list[CoRun]]:
    """Measure the cases that tell most, each chosen after the one before; return their places and what was measured."""
    places, runs = list[int](), list[CoRun]()
    while len(runs) < count:
        places.append(telling(cases, runs))
        runs.append(bench.measure(cases[places[-1]]))
    return places, runs


def _check(cases: int, fitted: int, held_out: int, requests: int) -> None:
    if requests < 0:
        raise InvalidInput(f"--requests is 0 or more, not {requests}")
    if fitted < LEAST_RUNS or held_out < _LEAST_HELD_OUT:
        raise InvalidInput(
            f"take at least {LEAST_RUNS} co-runs to fit and {_LEAST_HELD_OUT} to judge by, not {fitted} and {held_out}"
        )
    if fitted + held_out > cases:
        raise InvalidInput(
            f"{fitted} + {held_out} co-runs are asked for and there are {cases} different ones; "
            "ask for fewer, or allow more batches, shares or clocks"
        )
