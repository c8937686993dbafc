"""Co-runs measured on a device, and how far predictions lie off those that no fit has seen."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import product
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from polythrottle.domain.errors import InvalidInput, TrialError
from polythrottle.domain.measurement import Latency
from polythrottle.domain.ports import Workload
from polythrottle.domain.space import BATCH_SIZE
from polythrottle.training.beside.corun_model import LEAST_RUNS, CoRun, PaperModel, Predictor, intensity, took_s
from polythrottle.training.beside.interference import Interference, most_informative

if TYPE_CHECKING:
    from typing_extensions import Self

# Co-runs for real: queries of a workload while a trainer works in turns, in another process.

SHARES = (0.125, 0.25, 0.5, 0.75)
"""Shares of the time at which the trainer works in the cases; inference alone is one more."""
_QUERIES = 50
_LEAST_S = 1.0
_MOST_S = 30.0
"""A window has so many queries, and lasts so long that the trainer has had several turns."""
_WARMUP = 3
_SOON_S = 60.0


@dataclass(frozen=True)
class Work:
    """What one item of a query or one sample of a step asks.

    Args:
        operations: A multiply-add counted as two; None if they cannot be counted.
        moved_bytes: None if they cannot be counted.
        element_bytes: Of one number.
    """

    operations: float | None
    moved_bytes: float | None
    element_bytes: int = 4

    def of(self, items: int) -> tuple[float | None, float | None, float | None]:
        """Return operations, bytes and intensity of so many items."""
        if self.operations is None or self.moved_bytes is None:
            if not items:
                return (0.0, 0.0, 0.0)
            return (None, None, None)
        operations = self.operations * items
        moved = self.moved_bytes * items
        return operations, moved, intensity(operations, moved, self.element_bytes)


UNKNOWN = Work(None, None)


class MeasuredBench:
    """A workload and a trainer on this machine; satisfies `Bench`.

    The trainer takes turns: after each slice it rests so long that it works for its share of the time.

    Args:
        title: What runs where, for people.
        workload: What serves.
        train: Has so many samples trained and returns the seconds that took; called in one other thread at a time.
        slices: Samples of a slice to choose from.
        item: What an item of a query asks.
        sample: What a sample of a slice asks.
    """

    simulated = False

    def __init__(
        self,
        title: str,
        workload: Workload,
        train: Callable[[int], float],
        slices: Sequence[int],
        item: Work = UNKNOWN,
        sample: Work = UNKNOWN,
    ) -> None:
        self._title = title
        self._workload = workload
        self._train = train
        self._slices = tuple(slices)
        self._item = item
        self._sample = sample

    @property
    def title(self) -> str:
        """What runs where, for people."""
        return self._title

    @cached_property
    def cases(self) -> Sequence[CoRun]:
        """Every batch alone and beside every slice at every share; the clocks stay as they are."""
        names = self._workload.space.names
        if BATCH_SIZE in names:
            batches = [int(level) for level in self._workload.space.knob(BATCH_SIZE).levels]
        else:
            batches = [1]
        alone = [self.case(batch, 0, 0.0) for batch in batches]
        return tuple(alone + [self.case(*each) for each in product(batches, self._slices, SHARES)])

    def case(self, batch: int, samples: int, share: float) -> CoRun:
        """Return a co-run without its latency.

        Args:
            batch: Items of a query.
            samples: Of a slice; 0 alone.
            share: Of the time at which the trainer works, 0 to 1.
        """
        operations, moved, own = self._item.of(batch)
        step_operations, step_moved, step = self._sample.of(samples)
        return CoRun(
            operations=operations,
            traffic_bytes=moved,
            batch=batch,
            step_operations=step_operations,
            step_bytes=step_moved,
            step_batch=samples,
            gpu_hz=1.0,
            memory_hz=1.0,
            cpu_hz=1.0,
            share=share,
            intensity=own,
            step_intensity=step,
        )

    def measure(self, case: CoRun) -> CoRun:
        """Return a case with the mean and the tail of a window of queries.

        Raises:
            TrialError: If the workload or the trainer fails.
        """
        with self._beside(case):
            times_s = list(self._answered())
        latency = Latency.of(times_s)
        return replace(case, latency_s=latency.mean_s, tail_s=latency.p99_s)

    def request(self, case: CoRun) -> CoRun:
        """Return a case with the latency of one query.

        Raises:
            TrialError: If the workload or the trainer fails.
        """
        with self._beside(case):
            return replace(case, latency_s=self._workload.query().latency_s)

    def _answered(self) -> Iterator[float]:
        start_s = time.monotonic()
        count = 0
        while (passed_s := time.monotonic() - start_s) < _LEAST_S or count < _QUERIES:
            if count and passed_s > _MOST_S:
                return
            yield self._workload.query().latency_s
            count += 1

    @contextmanager
    def _beside(self, case: CoRun) -> Iterator[None]:
        """Set the batch, and have the trainer take turns meanwhile."""
        if BATCH_SIZE in self._workload.space.names:
            self._workload.apply(self._workload.space.default.moved({BATCH_SIZE: case.batch}))
        for _ in range(_WARMUP):
            self._workload.query()
        if not case.share:
            yield
            return
        turns = _Turns(self._train, case.step_batch, case.share)
        turns.begin()
        try:
            yield
        finally:
            turns.end()
        turns.check()


class _Turns:
    """A thread in which a trainer works and rests."""

    def __init__(self, train: Callable[[int], float], samples: int, share: float) -> None:
        self._train = train
        self._samples = samples
        self._share = share
        self._enough = threading.Event()
        self._ready = threading.Event()
        self._failure: BaseException | None = None
        self._thread = threading.Thread(target=self._work, daemon=True)

    def begin(self) -> None:
        """Start, and wait until the trainer has done its first slice.

        Raises:
            TrialError: If it does not.
        """
        self._thread.start()
        if not self._ready.wait(_SOON_S):
            self._enough.set()
            raise TrialError(f"the trainer has not done a slice of {self._samples} samples within {_SOON_S:g} s")
        self.check()

    def end(self) -> None:
        """Let the slice that runs come to its end, and stop."""
        self._enough.set()
        self._thread.join(_SOON_S)

    def check(self) -> None:
        """Raise what the trainer failed with, if it did, or TrialError if it still hangs."""
        if self._failure is not None:
            raise self._failure
        if self._enough.is_set() and self._thread.is_alive():
            raise TrialError(f"the trainer hangs in a slice of {self._samples} samples; start it anew")

    def _work(self) -> None:
        try:
            while not self._enough.is_set():
                took_s = self._train(self._samples)
                self._ready.set()
                self._enough.wait(took_s * (1.0 - self._share) / self._share)
        except BaseException as err:
            self._failure = err
            self._ready.set()


# Makes co-runs on a device and says how well they let others be predicted, those that no fit has seen.

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
class PredictionError:
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
        predictions = [(model.predict(run), run, took_s(run)) for run in runs]
        off = [abs(each.mean_s / time_s - 1.0) for each, _, time_s in predictions]
        within = [abs(each.mean_s - time_s) <= 2.0 * each.std_s for each, _, time_s in predictions]
        tails = [
            abs(each.tail_s / run.tail_s - 1.0)
            for each, run, _ in predictions
            if each.tail_s is not None and run.tail_s is not None
        ]
        tail = None
        if tails:
            tail = float(np.mean(tails))
        return cls(predictor, requests, float(np.mean(off)), tail, float(np.mean(within)))


@dataclass(frozen=True, eq=False)
class CoRunProfile:
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
    errors: tuple[PredictionError, ...]
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


def _row(error: PredictionError) -> tuple[str, ...]:
    tail = "not known"
    if error.tail is not None:
        tail = f"{error.tail:.1%}"
    return error.predictor, str(error.requests), f"{error.mean:.1%}", tail, f"{error.within:.0%}"


def profile(
    bench: Bench, fitted: int = LEAST_RUNS, held_out: int = 24, requests: int = 0, seed: int = 0
) -> CoRunProfile:
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
    cases = list(bench.cases)
    rng = np.random.default_rng(seed)
    _check(len(cases), fitted, held_out, requests)
    first, runs = _telling_runs(bench, cases, fitted)
    others = [int(i) for i in rng.permutation([i for i in range(len(cases)) if i not in first])]
    judges = tuple(bench.measure(cases[i]) for i in others[:held_out])
    ours = Interference.fit(runs)
    if ours.counted:
        errors = [PredictionError.of("paper", 0, PaperModel.fit(runs), judges)]
    else:
        errors = []
    errors.append(PredictionError.of("polythrottle", 0, ours, judges))
    open_cases = first + others[held_out:]
    for i in rng.integers(len(open_cases), size=requests):
        ours = ours.seen(bench.request(cases[open_cases[i]]))
    if requests:
        errors.append(PredictionError.of("polythrottle", requests, ours, judges))
    remarks = () if ours.counted else (UNCOUNTED,)
    return CoRunProfile(bench.title, bench.simulated, tuple(runs), judges, tuple(errors), ours, remarks)


def _telling_runs(bench: Bench, cases: Sequence[CoRun], count: int) -> tuple[list[int], list[CoRun]]:
    """Measure the cases that tell most, each chosen after the one before; return their places and what was measured."""
    places: list[int] = []
    runs: list[CoRun] = []
    while len(runs) < count:
        places.append(most_informative(cases, runs))
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
