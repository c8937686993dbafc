"""One processor in virtual time that serves and fine-tunes while other processes slow it down without notice.

What `polythrottle.training.beside.live_run` does with threads and signals is done here event by event: a slice is
stopped where
it is when requests cannot wait for it, what took how long is what the next decision goes by, and latencies teach the
guard, if there is one.
"""

import itertools
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from polythrottle.domain.arrivals import Poisson
from polythrottle.domain.space import OperatingPoint
from polythrottle.training.beside.live_run import Guard
from polythrottle.training.beside.operating_options import Option
from polythrottle.training.beside.preparation import Timings
from polythrottle.training.beside.scheduler import Decision, Moment, Policy, taken

QUERY_S, SAMPLE_S, STEP = 0.01, 0.004, 32
SLO_S, RATE_PER_S = 0.1, 45.0
_SIZES = (1, 2, 4, 8, 16, 32)


@dataclass
class Seen:
    """What came of it."""

    requests: int = 0
    late: int = 0
    samples: int = 0


@dataclass
class _Slice:
    samples: int
    left_s: float
    tail_s: float
    ran_s: float = 0.0


class LoadedMachine:
    """See the module.

    Args:
        policy: Who gets the processor next.
        slower: How many times as long everything takes at a time.
        guarded: Whether latencies teach a guard.
        seed: Of the requests and of what they take.
    """

    def __init__(self, policy: Policy, slower: Callable[[float], float], guarded: bool = True, seed: int = 0) -> None:
        self._policy, self._slower, self._guarded = policy, slower, guarded
        self._random = np.random.default_rng(seed)
        self._times = Poisson(RATE_PER_S).times(seed)
        self._waiting, self._slice = deque[float](), None
        self.guard, self.seen, self.now_s, self._left = Guard(SLO_S), Seen(), 0.0, STEP
        self._timings, self._fresh_s = Timings(OperatingPoint({"threads": 1}), _SIZES, 1.0), 0.0
        for _ in range(20):
            self._timings.served(1, QUERY_S)
            for size in _SIZES:
                self._timings.trained(size, size * SAMPLE_S)

    _slice: _Slice | None
    _option: Option

    def run(self, seconds: float) -> Seen:
        """Return what came of so many seconds of requests."""
        for next_s in itertools.takewhile(lambda at_s: at_s < seconds, self._times):
            self._until(next_s)
            self._waiting.append(next_s)
            self.seen.requests += 1
        while self._waiting:
            self._until(self.now_s + SLO_S)
        return self.seen

    def _until(self, end_s: float) -> None:
        """Do one thing after another until a time, which what runs last may exceed."""
        while self.now_s < end_s:
            if self._slice is not None and not self._must_stop():
                self._train(self._slice, end_s)
                continue
            decision = self._policy(self._moment())
            if decision.batch:
                self._serve(decision)
            elif decision.run is not None and self._slice is None:
                took_s = decision.run.samples * SAMPLE_S * self._stretch()
                self._slice = _Slice(decision.run.samples, took_s, decision.run.tail_s)
            else:
                self.now_s = end_s

    def _must_stop(self) -> bool:
        if self.guard.paused(self.now_s):
            return True
        assert self._slice is not None
        spare_s = self._slice.tail_s - self._slice.ran_s
        moment = self._moment()
        able = moment.option.in_time(moment.ages_s, RATE_PER_S, self.guard.aim_s, max(0.0, spare_s))
        return bool(self._waiting) and (spare_s < 0 or not able)

    def _train(self, piece: _Slice, end_s: float) -> None:
        """Go on with a slice until it ends, something comes, or a tick has passed while requests wait."""
        passed_s = min(piece.left_s, max(1e-9, end_s - self.now_s), 1e-3 if self._waiting else 1.0)
        piece.left_s, piece.ran_s, self.now_s = piece.left_s - passed_s, piece.ran_s + passed_s, self.now_s + passed_s
        if piece.left_s <= 1e-9:
            self._timings.trained(piece.samples, piece.ran_s)
            self.seen.samples += piece.samples
            self._left = self._left - piece.samples or STEP
            self._slice = None

    def _serve(self, decision: Decision) -> None:
        took_s = QUERY_S * self._stretch()
        (arrived_s,) = taken(self._waiting, decision)
        self.now_s += took_s
        self._timings.served(1, took_s)
        latency_s = self.now_s - arrived_s
        self.seen.late += latency_s > SLO_S
        if self._guarded:
            self.guard = self.guard.after(latency_s, self.now_s)

    def _known(self) -> Option:
        """Return what may be expected, made anew a few times a second."""
        if self.now_s >= self._fresh_s:
            self._option = self._timings.option(0 if self.guard.paused(self.now_s) else None)
            self._fresh_s = self.now_s + 0.25
        return self._option

    def _stretch(self) -> float:
        return self._slower(self.now_s) * float(np.exp(self._random.normal(0.0, 0.05)))

    def _moment(self) -> Moment:
        option = self._known()
        ages_s = tuple(max(0.0, self.now_s - each) for each in self._waiting)
        left = 0 if self._slice is not None else self._left
        aim_s = self.guard.aim_s
        return Moment(self.now_s, ages_s, option, SLO_S, left, RATE_PER_S, aim_s=aim_s)
