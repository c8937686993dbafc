"""Inference and fine-tuning side by side on a real device: requests as they come, the trainer when there is room."""

import itertools
import math
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, replace
from queue import Empty, SimpleQueue
from typing import Any

from polythrottle.daemon.forecast import Forecast
from polythrottle.errors import InvalidInput
from polythrottle.finetune.guard import Guard
from polythrottle.finetune.hours import wall_day_s
from polythrottle.finetune.lane import Done, Lane
from polythrottle.finetune.options import Menu
from polythrottle.finetune.planning import check_held, foretold
from polythrottle.finetune.rehearsing import again, predicted_beside, rehearse
from polythrottle.finetune.result import SLICES_MOST, Result, Training
from polythrottle.finetune.scheduler import Decision, Moment, policy, taken
from polythrottle.finetune.server import Server
from polythrottle.finetune.tending import SLICE, Tended
from polythrottle.finetune.terms import ALONE, GENTLE, Terms
from polythrottle.finetune.timings import Timings
from polythrottle.finetune.trainer.driver import Trainer
from polythrottle.finetune.weighing import Weighed
from polythrottle.ports import Device

_LOOK_S = 1.0
_FRESH_S = 0.25
"""So often what is expected of the device is made anew from the last times."""
_AGAIN = 2
_VALIDATED = 32
_TICK_S = 1e-3
"""So often a slice that is overdue is looked at while requests wait."""


@dataclass(frozen=True)
class Progress:
    """How far a run has come.

    Args:
        passed_s: Since the first request could come.
        answered: Requests.
        late: Requests beyond their limit or never answered.
        samples: Trained in this run.
        epoch: That runs, from 0.
        left: Samples of the job.
        state: What the trainer does: ``training``, ``saving``, ``paused``, ``starting``, ``finished`` or
            ``stopped``.
    """

    passed_s: float
    answered: int
    late: int
    samples: int
    epoch: int
    left: int
    state: str


def run(
    device: Device,
    server: Server,
    trainer: Trainer,
    terms: Terms,
    told: Callable[[Progress], None] | None = None,
    noted: Callable[[str], None] | None = None,
) -> Result:
    """Return what came of serving requests and training in between; the trainer is ended afterwards.

    A run that is interrupted from the keyboard ends as if its time were up, and says so.

    Args:
        device: Not entered.
        server: What answers.
        trainer: Not started.
        terms: What is to be kept to.
        told: Called about once a second.
        noted: Called with what should be known before the first request.

    Raises:
        SloUnmet: If inference alone does not hold the limit.
        InvalidInput: If the policy needs what cannot be told here, or hours or power let nothing be fine-tuned.
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
            notes = _notes(timings, tended.left_of_job, terms, noted)
            tended.count()
            before = device.read()
            loop = _Loop(device, server, tended, timings, terms, lanes[0], done, told, beside)
            loop.run()
            joules = device.read().energy_j - before.energy_j
        tended.settle()
        able = tended.finished and trainer.task.served and not (loop.interrupted or tended.stopped)
        judged = _judged(tended) if able else None
        title = f"{server.workload.uri} on {device.title}, {hello.trained_parameters:,} weights trained"
        found = replace(loop.result(trainer.task.epochs, title), energy_j=joules, validation=judged)
        notes = (*notes, *tended.notices)
        return replace(found, energy_kind=str(device.energy_kind), boundary=device.boundary, notices=notes)
    finally:
        tended.close()
        for lane in lanes:
            lane.close()


def _check_end(terms: Terms) -> None:
    if terms.policy == ALONE and terms.seconds is None:
        raise InvalidInput("inference alone has no end: say how long requests come, such as --seconds 60")
    terms.check_hours(wall_day_s(time.time()))


def _notes(timings: Timings, left: int, terms: Terms, noted: Callable[[str], None] | None) -> tuple[str, ...]:
    found = foretold(Menu((timings.option(),)), left, terms, wall_day_s(time.time()))
    if noted is not None:
        for each in found:
            noted(each)
    return found


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
        device: Device,
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
        self._policy = policy("greedy" if self._alone else terms.policy, terms.hours)
        times = terms.arrivals.times(terms.seed)
        assert times is not None
        self._begin_s = time.monotonic()
        until_s = math.inf if terms.seconds is None else terms.seconds
        self._ahead = itertools.takewhile(lambda at_s: at_s < until_s, times)
        self._next_s = next(self._ahead, math.inf)
        self._waiting, self._serving = deque[float](), False
        self._serves_until_s = 0.0
        self._latencies: list[float] = []
        self._arrivals: list[float] = []
        self._slices = deque[tuple[float, float]](maxlen=SLICES_MOST)
        self._late = self._dropped = self._seen = self._requests = 0
        self._forecast = Forecast().seen(0.0, terms.rate_per_s, _LOOK_S)
        self._look_s, self._fresh_s = _LOOK_S, -math.inf
        self._guard = Guard(terms.slo_s)
        self._meter = None if terms.ration is None else Weighed(device, terms.ration)
        self._option = timings.option(shared_s=beside)
        self._finished_s: float | None = None
        self._span_s = 0.0
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
        self._span_s = self._now_s
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
        if self._meter is not None:
            self._meter.look(bool(self._tended.left or self._tended.slicing))
        if self._told is not None:
            tended = self._tended
            done = tended.samples, tended.epoch, tended.left_of_job, self._state()
            self._told(Progress(now_s, len(self._latencies), self._late, *done))

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
        spent_s, paused = tended.remaining_s(), self._guard.paused(self._now_s)
        free = not self._waiting or (not tended.overdue() and self._option.in_time(*self._queue(), spent_s))
        if tended.held and free and not paused and not self._serving:
            tended.release()
        elif not tended.held and (paused or not free):
            tended.hold()

    def _queue(self) -> tuple[tuple[float, ...], float | None, float]:
        now_s = self._now_s
        ages_s = tuple(max(0.0, now_s - each) for each in self._waiting)
        return ages_s, self._forecast.demand_per_s, self._guard.aim_s

    def _moment(self) -> Moment:
        self._refresh()
        (ages_s, demand_per_s, aim_s), now_s = self._queue(), self._now_s
        able = not self._alone and (self._meter is None or self._meter.open)
        return Moment(
            now_s,
            ages_s,
            self._option,
            self._terms.slo_s,
            self._tended.left if able else 0,
            demand_per_s,
            max(now_s, self._serves_until_s) if self._serving else None,
            self._tended.slicing and not self._tended.held,
            self._server.batches[-1],
            day_s=wall_day_s(time.time()),
            mean_per_s=self._forecast.slow_per_s,
            aim_s=aim_s,
        )

    def _refresh(self) -> None:
        now_s = self._now_s
        if now_s >= self._fresh_s + _FRESH_S:
            most = 0 if self._guard.paused(now_s) else None
            self._option, self._fresh_s = self._timings.option(most, self._beside), now_s

    def _do(self, decision: Decision) -> None:
        for _ in range(decision.drop):
            self._waiting.popleft()
            self._late, self._dropped = self._late + 1, self._dropped + 1
        if decision.run is not None:
            self._tended.begin(decision.run.samples, decision.run.tail_s)
        if decision.batch:
            arrived = taken(self._waiting, decision)
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
        if done.what == SLICE:
            self._slices.append((done.began_s - self._begin_s, done.ended_s - self._begin_s))
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
            self._arrivals.append(arrived_s)
            self._late += took_s > self._terms.slo_s
            if self._gentle:
                self._guard = self._guard.after(took_s, ended_s)

    def result(self, epochs: int, title: str) -> Result:
        """Return what came of it, energy left out."""
        tended, terms = self._tended, self._terms
        training = Training(
            *(tended.samples, tended.steps, tended.epoch, epochs, tended.finished, self._finished_s, tended.loss),
            *(tended.suspended, tended.restarts, self._guard.shrunk, self._guard.pauses, tended.stopped),
            None if self._meter is None else self._meter.waited_s,
            tended.exit_code,
        )
        counts = self._requests, self._late, self._dropped, tuple(self._latencies), training
        ran = (title, False, terms.policy, str(terms.arrivals), terms.slo_s, self._span_s)
        hours = None if terms.hours is None else str(terms.hours)
        told = Result(*ran, *counts, None, "", "", interrupted=self.interrupted)
        told = replace(told, arrived_s=self._arrivals, slices_s=tuple(self._slices))
        return replace(told, hours=hours, power_cap_w=terms.power_w)
