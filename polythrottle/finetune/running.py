"""Inference and fine-tuning side by side on a real device: requests as they come, the trainer when there is room."""

import itertools
import math
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, replace
from queue import Empty, SimpleQueue
from typing import Any

from polythrottle.arrivals import Arrivals
from polythrottle.daemon.forecast import Forecast
from polythrottle.errors import InvalidInput
from polythrottle.finetune.guard import Guard
from polythrottle.finetune.lane import Done, Lane
from polythrottle.finetune.options import Menu, Option
from polythrottle.finetune.planning import check_held
from polythrottle.finetune.rehearsing import again, predicted_beside, rehearse
from polythrottle.finetune.result import Result, Training
from polythrottle.finetune.scheduler import Decision, Moment, policy
from polythrottle.finetune.server import Server
from polythrottle.finetune.tending import Tended
from polythrottle.finetune.timings import Timings
from polythrottle.finetune.trainer.driver import Trainer
from polythrottle.ports import Device

GENTLE = ("interleave", "off-peak")
"""Policies that keep a limit: slices stop in the middle for requests, and shrink when latencies come near it."""
ALONE = "none"
"""In place of a policy: nothing is fine-tuned."""
_LOOK_S = 1.0
_FRESH_S = 0.25
"""So often what is expected of the device is made anew from the last times."""
_AGAIN = 2
_VALIDATED = 32
_TICK_S = 1e-3
"""So often a slice that is overdue is looked at while requests wait."""
_DAY_S = 24 * 3600.0


@dataclass(frozen=True)
class Terms:
    """What is to be kept to.

    Args:
        slo_s: The limit of each request from its arrival.
        arrivals: When they come; not a closed loop.
        policy: Who gets the device next; `ALONE` for inference alone.
        seconds: How long requests come; None until the job is done.
        seed: Of the arrivals.

    Raises:
        InvalidInput: If requests come in a closed loop, or a time is not positive.
        UnknownName: If there is no such policy.
    """

    slo_s: float
    arrivals: Arrivals
    policy: str = "interleave"
    seconds: float | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        if self.arrivals.closed:
            raise InvalidInput("requests must come by the clock: write for example poisson:30/s")
        if not 0 < self.slo_s < math.inf or (self.seconds is not None and not 0 < self.seconds < math.inf):
            raise InvalidInput("a limit and a length are above 0 s and finite")
        if self.policy != ALONE:
            policy(self.policy)

    @property
    def rate_per_s(self) -> float:
        """Requests per second in the long run."""
        assert self.arrivals.offered_per_s is not None
        return self.arrivals.offered_per_s


@dataclass(frozen=True)
class Progress:
    """How far a run has come.

    Args:
        passed_s: Since the first request could come.
        answered: Requests.
        late: Requests beyond their limit or never answered.
        samples: Trained in this run.
        epoch: That runs, from 0.
        state: What the trainer does: ``training``, ``saving``, ``paused``, ``starting``, ``finished`` or
            ``stopped``.
    """

    passed_s: float
    answered: int
    late: int
    samples: int
    epoch: int
    state: str


def run(
    device: Device,
    server: Server,
    trainer: Trainer,
    terms: Terms,
    told: Callable[[Progress], None] | None = None,
    rehearsed: Callable[[Option], None] | None = None,
) -> Result:
    """Return what came of serving requests and training in between; the trainer is ended afterwards.

    A run that is interrupted from the keyboard ends as if its time were up, and says so.

    Args:
        device: Not entered.
        server: What answers.
        trainer: Not started.
        terms: What is to be kept to.
        told: Called about once a second.
        rehearsed: Called with what is known of the device before the first request.

    Raises:
        SloUnmet: If inference alone does not hold the limit.
        InvalidInput: If the policy needs what cannot be told here.
        PolythrottleError: If the job cannot be opened, the device not be read, or the workload fails.
    """
    _check_end(terms)
    done: SimpleQueue[Done] = SimpleQueue()
    lanes = Lane("inference", done), Lane("trainer", done)
    tended = Tended(trainer, lanes[1])
    try:
        with device:
            hello = tended.open()
            timings = _rehearsed(device, server, tended, terms, lanes[0])
            beside = lanes[0].wait(lambda: predicted_beside(server, tended)) if terms.policy == "paper" else None
            if rehearsed is not None:
                rehearsed(timings.option())
            tended.count()
            before = device.read()
            loop = _Loop(server, tended, timings, terms, lanes[0], done, told, beside)
            loop.run()
            joules = device.read().energy_j - before.energy_j
        tended.settle()
        able = tended.finished and trainer.task.served and not (loop.interrupted or tended.stopped)
        judged = _judged(tended) if able else None
        title = f"{server.workload.uri} on {device.title}, {hello.trained_parameters:,} weights trained"
        return replace(
            loop.result(trainer.task.epochs, title),
            energy_j=joules,
            energy_kind=str(device.energy_kind),
            boundary=device.boundary,
            validation=judged,
        )
    finally:
        tended.close()
        for lane in lanes:
            lane.close()


def _check_end(terms: Terms) -> None:
    if terms.policy == ALONE and terms.seconds is None:
        raise InvalidInput("inference alone has no end: say how long requests come, such as --seconds 60")


def _judged(tended: Tended) -> dict[str, Any]:
    """Validate the new model, have it served if it may be, and return what was found; no requests come meanwhile."""
    while not (verdict := tended.ask(lambda trainer: trainer.ask("validate", samples=_VALIDATED))["result"]):
        pass
    told: dict[str, Any] = dict(verdict)
    served = tended.ask(lambda trainer: trainer.ask("swap")) if told["holds"] else None
    return {**told, "served": None if served is None else served["served"]}


def _rehearsed(device: Device, server: Server, tended: Tended, terms: Terms, lane: Lane) -> Timings:
    """Return what the device does, looked at once more where it seems too slow: something else may have run.

    Raises:
        SloUnmet: If inference alone does not hold the limit.
    """
    timings: Timings = lane.wait(lambda: rehearse(device, server, tended))
    for _ in range(_AGAIN):
        if timings.option().in_time((), terms.rate_per_s, terms.slo_s, 0.0):
            break
        lane.wait(lambda: again(device, server, timings))
    check_held(Menu((timings.option(),)), terms.rate_per_s, terms.slo_s)
    return timings


class _Loop:
    """The requests, the batch and the slice that are under way, and what came of those before."""

    def __init__(
        self,
        server: Server,
        tended: Tended,
        timings: Timings,
        terms: Terms,
        lane: Lane,
        done: "SimpleQueue[Done]",
        told: Callable[[Progress], None] | None,
        beside: "dict[int, float] | None",
    ) -> None:
        self._server, self._tended, self._timings, self._terms = server, tended, timings, terms
        self._lane, self._done, self._told, self._beside = lane, done, told, beside
        self._gentle, self._alone = terms.policy in GENTLE, terms.policy == ALONE
        self._policy = policy("greedy" if self._alone else terms.policy)
        times = terms.arrivals.times(terms.seed)
        assert times is not None
        self._begin_s = time.monotonic()
        until_s = math.inf if terms.seconds is None else terms.seconds
        self._ahead = itertools.takewhile(lambda at_s: at_s < until_s, times)
        self._next_s = next(self._ahead, math.inf)
        self._waiting, self._serving = deque[float](), False
        self._serves_until_s = 0.0
        self._latencies: list[float] = []
        self._late = self._dropped = self._seen = self._requests = 0
        self._forecast = Forecast().seen(0.0, terms.rate_per_s, _LOOK_S)
        self._look_s, self._fresh_s = _LOOK_S, -math.inf
        self._guard = Guard(terms.slo_s, timings.sizes)
        self._option = timings.option(shared_s=beside)
        self._finished_s: float | None = None
        self.interrupted = False

    def run(self) -> None:
        """Serve until the time is up and all requests are answered, or until the job is done."""
        try:
            while not self._over():
                self._arrived()
                until_s = self._ask()
                self._wait(until_s)
        except KeyboardInterrupt:
            self.interrupted = True
        if self._tended.held:
            self._tended.release()

    @property
    def _now_s(self) -> float:
        return time.monotonic() - self._begin_s

    def _over(self) -> bool:
        ended = self._terms.seconds is None and (self._tended.finished or bool(self._tended.stopped))
        if ended:
            self._next_s = math.inf
        return math.isinf(self._next_s) and not self._waiting and not self._serving and self._past()

    def _past(self) -> bool:
        return self._terms.seconds is None or self._now_s >= self._terms.seconds

    def _arrived(self) -> None:
        now_s = self._now_s
        while self._next_s <= now_s:
            self._waiting.append(self._next_s)
            self._requests, self._seen = self._requests + 1, self._seen + 1
            self._next_s = next(self._ahead, math.inf)
        if now_s >= self._look_s:
            self._look(now_s)

    def _look(self, now_s: float) -> None:
        """Once a second tell the forecast what came, see whether the trainer hangs, and say how things stand."""
        period_s = now_s - self._look_s + _LOOK_S
        self._forecast = self._forecast.seen(now_s, self._seen / period_s, period_s)
        self._seen, self._look_s = 0, now_s + _LOOK_S
        self._tended.check()
        if self._told is not None:
            tended = self._tended
            self._told(Progress(now_s, len(self._latencies), self._late, tended.samples, tended.epoch, self._state()))

    def _state(self) -> str:
        if self._tended.stopped or self._tended.finished:
            return "stopped" if self._tended.stopped else "finished"
        if self._tended.busy and not self._tended.slicing:
            return "starting" if self._tended.starting else "saving"
        return "training" if self._tended.slicing and not self._tended.held else "paused"

    def _ask(self) -> float | None:
        """Do what the policy says until it says nothing; return when it wants to be asked again at the latest."""
        self._stop_or_go()
        while not (decision := self._policy(self._moment())).idle:
            self._do(decision)
        return decision.until_s

    def _stop_or_go(self) -> None:
        """Stop a slice that requests cannot wait for, and let it go on when they can."""
        tended = self._tended
        if not (self._gentle and tended.slicing):
            return
        spent_s = tended.remaining_s()
        free = not self._waiting or (not tended.overdue() and self._option.in_time(*self._queue(), spent_s))
        if tended.held and free and not self._serving:
            tended.release()
        elif not tended.held and not free:
            tended.hold()

    def _queue(self) -> tuple[tuple[float, ...], float | None, float]:
        now_s = self._now_s
        ages_s = tuple(max(0.0, now_s - each) for each in self._waiting)
        return ages_s, self._forecast.demand_per_s, self._terms.slo_s

    def _moment(self) -> Moment:
        self._refresh()
        (ages_s, demand_per_s, slo_s), now_s = self._queue(), self._now_s
        return Moment(
            now_s,
            ages_s,
            self._option,
            slo_s,
            0 if self._alone else self._tended.left,
            demand_per_s,
            max(now_s, self._serves_until_s) if self._serving else None,
            self._tended.slicing and not self._tended.held,
            self._server.batches[-1],
            day_s=(time.time() - time.timezone) % _DAY_S,
            mean_per_s=self._forecast.slow_per_s,
        )

    def _refresh(self) -> None:
        now_s = self._now_s
        if now_s >= self._fresh_s + _FRESH_S:
            most = self._guard.most(now_s) if self._gentle else None
            self._option, self._fresh_s = self._timings.option(most, self._beside), now_s

    def _do(self, decision: Decision) -> None:
        for _ in range(decision.drop):
            self._waiting.popleft()
            self._late, self._dropped = self._late + 1, self._dropped + 1
        if decision.run is not None:
            self._tended.begin(decision.run.samples, decision.run.tail_s)
        if decision.batch:
            arrived = tuple(self._waiting.popleft() for _ in range(decision.batch))
            self._serving = True
            self._serves_until_s = self._now_s + self._option.serves(len(arrived)).latency_s
            self._lane.begin(arrived, lambda: self._server.answer(len(arrived)))

    def _wait(self, until_s: float | None) -> None:
        """Wait until something is done, comes, or is to be looked at."""
        ends = [self._next_s, self._look_s, math.inf if until_s is None else until_s]
        ends += [] if self._terms.seconds is None or self._past() else [self._terms.seconds]
        if self._waiting and self._tended.slicing and not self._tended.held:
            ends.append(self._now_s + max(_TICK_S, self._tended.remaining_s()))
        try:
            self._take(self._done.get(timeout=max(1e-6, min(ends) - self._now_s)))
            while True:
                self._take(self._done.get_nowait())
        except Empty:
            return

    def _take(self, done: Done) -> None:
        if isinstance(done.what, tuple):
            self._answered(done)
            return
        if (sliced := self._tended.took(done)) is not None:
            self._timings.trained(sliced.samples, sliced.measured_s)
        self._tended.save()
        if self._tended.finished and self._finished_s is None:
            self._finished_s = self._now_s

    def _answered(self, done: Done) -> None:
        """Take note of an answered batch.

        Raises:
            TrialError: If the workload has failed.
        """
        self._serving = False
        if done.error is not None:
            raise done.error
        self._timings.served(self._server.size(len(done.what)), done.took_s)
        ended_s = done.ended_s - self._begin_s
        for arrived_s in done.what:
            took_s = ended_s - arrived_s
            self._latencies.append(took_s)
            self._late += took_s > self._terms.slo_s
            if self._gentle:
                self._guard = self._guard.after(took_s, ended_s)

    def result(self, epochs: int, title: str) -> Result:
        """Return what came of it, energy left out."""
        tended, terms = self._tended, self._terms
        training = Training(
            *(tended.samples, tended.steps, tended.epoch, epochs, tended.finished, self._finished_s, tended.loss),
            *(tended.suspended, tended.restarts, self._guard.shrunk, self._guard.pauses, tended.stopped),
        )
        counts = self._requests, self._late, self._dropped, tuple(self._latencies), training
        ran = (title, False, terms.policy, str(terms.arrivals), terms.slo_s, self._now_s)
        return Result(*ran, *counts, None, "", "", tuple(tended.notices), self.interrupted)
