"""Co-runs for real: queries of a workload while a trainer works in turns, in another process."""

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import product

from polythrottle.errors import TrialError
from polythrottle.finetune.corun import CoRun, intensity
from polythrottle.measurement import Latency
from polythrottle.ports import Workload

SHARES = (0.125, 0.25, 0.5, 0.75)
"""Shares of the time at which the trainer works in the cases; inference alone is one more."""
_BATCH = "batch_size"
_QUERIES, _LEAST_S, _MOST_S = 50, 1.0, 30.0
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
            return (0.0, 0.0, 0.0) if not items else (None, None, None)
        operations, moved = self.operations * items, self.moved_bytes * items
        return operations, moved, intensity(operations, moved, self.element_bytes)


UNKNOWN = Work(None, None)


class MeasuredBench:
    """A workload and a trainer on this machine; satisfies `coruns.Bench`.

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
        self._title, self._workload, self._train = title, workload, train
        self._slices, self._item, self._sample = tuple(slices), item, sample

    @property
    def title(self) -> str:
        """What runs where, for people."""
        return self._title

    @cached_property
    def cases(self) -> Sequence[CoRun]:
        """Every batch alone and beside every slice at every share; the clocks stay as they are."""
        names = self._workload.space.names
        batches = [int(level) for level in self._workload.space.knob(_BATCH).levels] if _BATCH in names else [1]
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
        told = Latency.of(times_s)
        return replace(case, latency_s=told.mean_s, tail_s=told.p99_s)

    def request(self, case: CoRun) -> CoRun:
        """Return a case with the latency of one query.

        Raises:
            TrialError: If the workload or the trainer fails.
        """
        with self._beside(case):
            return replace(case, latency_s=self._workload.query().latency_s)

    def _answered(self) -> Iterator[float]:
        start_s, count = time.monotonic(), 0
        while (passed_s := time.monotonic() - start_s) < _LEAST_S or count < _QUERIES:
            if count and passed_s > _MOST_S:
                return
            yield self._workload.query().latency_s
            count += 1

    @contextmanager
    def _beside(self, case: CoRun) -> Iterator[None]:
        """Set the batch, and have the trainer take turns meanwhile."""
        if _BATCH in self._workload.space.names:
            self._workload.apply(self._workload.space.default.moved({_BATCH: case.batch}))
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
        self._train, self._samples, self._share = train, samples, share
        self._enough, self._ready = threading.Event(), threading.Event()
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
