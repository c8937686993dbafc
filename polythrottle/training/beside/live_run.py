"""Inference and fine-tuning side by side on a real device, within a latency limit and a mean power."""

import itertools
import math
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, replace
from queue import Empty, SimpleQueue
from typing import Any

from polythrottle.domain.errors import DeviceError, InvalidInput
from polythrottle.domain.load.forecast import Forecast
from polythrottle.domain.ports import Device
from polythrottle.training.beside.options import Menu
from polythrottle.training.beside.plan import check_held, warnings_before
from polythrottle.training.beside.preparation import Server, Timings, predicted_beside, rehearse, remeasure_batches
from polythrottle.training.beside.result import SLICES_MOST, Result, Training
from polythrottle.training.beside.scheduler import (
    ALONE,
    GENTLE,
    Decision,
    MeanPowerLimit,
    Moment,
    Terms,
    policy,
    taken,
    wall_day_s,
)
from polythrottle.training.beside.trainer.driver import Trainer
from polythrottle.training.beside.trainer.supervisor import SLICE, CompletedCall, SupervisedTrainer, WorkerThread

# The guard of a latency limit: fine-tuning aims below it when measured latencies come near it, then stops a while.

NEAR = 0.9
"""A latency beyond this share of the limit is near it."""
WINDOW = 200
"""So many requests are looked at together."""
AIMS = (1.0, 0.75, 0.5, 0.35, 0.25)
"""Shares of the limit that may be aimed at; after the last comes a pause."""
_MOST_NEAR = 2
"""So many of a window may be near the limit."""
_CALM = 0.0025
"""It is calm while no more than this share of the requests is near the limit."""
_PATIENT = 16
"""For so many windows at most it must have been calm before more is dared."""
_PAUSE_S = 5.0
_LONGEST_S = 300.0


@dataclass(frozen=True)
class Guard:
    """What fine-tuning may aim at after the latencies seen so far.

    Predictions say when a slice must end so that requests are in time. Where they are too bright, because something
    else runs on the machine, requests come near the limit: once more than two of a window do, less is aimed at, and
    where that is the least already, there is a pause, each twice as long as the last. What had come before such a
    change says nothing of it and is not counted. After it had to be careful, the guard waits twice as long as the last
    time until it dares more again: as many requests, calm all the while.

    Args:
        slo_s: The limit.
        place: Of what is aimed at, in `AIMS`.
        seen: Requests of this window.
        near: Of those, near the limit.
        calm: Requests since the last change.
        stirred: Of those, near the limit.
        patience: For how many requests it must be calm before more is dared.
        since_s: When the last change was.
        pause_s: How long the next pause is.
        until_s: When the last pause ends.
        shrunk: How often less was aimed at.
        pauses: How often fine-tuning was paused.

    Raises:
        InvalidInput: If the limit is not above 0 s.
    """

    slo_s: float
    place: int = 0
    seen: int = 0
    near: int = 0
    calm: int = 0
    stirred: int = 0
    patience: int = WINDOW
    since_s: float = 0.0
    pause_s: float = _PAUSE_S
    until_s: float = 0.0
    shrunk: int = 0
    pauses: int = 0

    def __post_init__(self) -> None:
        if not self.slo_s > 0:
            raise InvalidInput("a guard needs a limit above 0 s")

    @property
    def aim_s(self) -> float:
        """The latency that fine-tuning may plan with, at most the limit."""
        return AIMS[self.place] * self.slo_s

    def paused(self, now_s: float) -> bool:
        """Return whether nothing is to be fine-tuned now."""
        return now_s < self.until_s

    def after(self, latency_s: float, now_s: float) -> "Guard":
        """Return the guard after one more answered request; in a pause, none counts: fine-tuning cannot be why."""
        if self.paused(now_s) or now_s - latency_s < self.since_s:
            return self
        near = latency_s > NEAR * self.slo_s
        moved = replace(
            self, seen=self.seen + 1, near=self.near + near, calm=self.calm + 1, stirred=self.stirred + near
        )
        if moved.near > _MOST_NEAR:
            return moved._careful(now_s)
        if moved.seen >= WINDOW:
            moved = replace(moved, seen=0, near=0)
        if moved._is_calm(now_s):
            return moved._daring(now_s)
        return moved

    def _is_calm(self, now_s: float) -> bool:
        """Return whether it was calm for long enough, in requests or, where few come, in time."""
        enough = self.calm >= self.patience or now_s - self.since_s >= _LONGEST_S
        return enough and self.stirred <= _CALM * self.calm

    def _careful(self, now_s: float) -> "Guard":
        patience = min(2 * self.patience, _PATIENT * WINDOW)
        if self.place + 1 < len(AIMS):
            return self._changed(now_s, place=self.place + 1, patience=patience, shrunk=self.shrunk + 1)
        until_s = now_s + self.pause_s
        longer_s = min(_LONGEST_S, 2 * self.pause_s)
        told = {"pause_s": longer_s, "until_s": until_s, "pauses": self.pauses + 1}
        return self._changed(until_s, patience=patience, **told)

    def _daring(self, now_s: float) -> "Guard":
        """Aim a step higher; at the limit already, forget some of the care."""
        patience = self.patience if self.place else max(WINDOW, self.patience // 2)
        return self._changed(now_s, place=max(0, self.place - 1), patience=patience, pause_s=_PAUSE_S)

    def _changed(self, since_s: float, **what: Any) -> "Guard":
        return replace(self, seen=0, near=0, calm=0, stirred=0, since_s=since_s, **what)


# Whether a device has drawn more than it may, by its own meter.


class MeteredPowerLimit:
    """A ration of power and the device it is for; looked at about once a second, from one thread.

    Args:
        device: Entered.
        ration: What it may draw.

    Attributes:
        waited_s: How long fine-tuning had to wait although there was something to do.

    Raises:
        DeviceError: If the device cannot be read.
    """

    def __init__(self, device: Device, ration: MeanPowerLimit) -> None:
        self._device = device
        self._ration = ration
        self._last = device.read()
        self._readable = True
        self.waited_s = 0.0

    @property
    def open(self) -> bool:
        """Whether fine-tuning may go on; not while the device cannot be read."""
        return self._ration.open and self._readable

    def look(self, wanted: bool) -> None:
        """See what was drawn since the last look.

        Args:
            wanted: Whether there is something to fine-tune.
        """
        was_open = self.open
        try:
            now = self._device.read()
        except DeviceError:
            self._readable = False
            return
        passed_s = now.time_s - self._last.time_s
        self.waited_s += passed_s if wanted and not was_open else 0.0
        self._ration = self._ration.after(now.energy_j - self._last.energy_j, passed_s)
        self._last = now
        self._readable = True


# Inference and fine-tuning side by side on a real device: requests as they come, the trainer when there is room.

_LOOK_S = 1.0
_FRESH_S = 0.25
"""So often what is expected of the device is made anew from the last times."""
_AGAIN = 2
_VALIDATED = 32
_TICK_S = 1e-3
"""So often a slice that is overdue is looked at while requests wait."""


@dataclass(frozen=True)
class RunProgress:
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
    told: Callable[[RunProgress], None] | None = None,
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
    done: SimpleQueue[CompletedCall] = SimpleQueue()
    lanes = WorkerThread("inference", done), WorkerThread("trainer", done)
    tended = SupervisedTrainer(trainer, lanes[1])
    try:
        with device:
            hello = tended.open()
            timings = _rehearsed(device, server, tended, terms, lanes[0])
            if terms.policy == "paper":
                beside = lanes[0].wait(lambda: predicted_beside(server, tended))
            else:
                beside = None
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
    found = warnings_before(Menu((timings.option(),)), left, terms, wall_day_s(time.time()))
    if noted is not None:
        for each in found:
            noted(each)
    return found


def _judged(tended: SupervisedTrainer) -> dict[str, Any]:
    """Validate the new model, have it served if it may be, and return what was found; no requests come meanwhile."""
    while not (verdict := tended.ask(lambda trainer: trainer.ask("validate", samples=_VALIDATED))["result"]):
        pass
    told: dict[str, Any] = dict(verdict)
    served = tended.ask(lambda trainer: trainer.ask("swap")) if told["holds"] else None
    return {**told, "served": None if served is None else served["served"]}


def _rehearsed(device: Device, server: Server, tended: SupervisedTrainer, terms: Terms, lane: WorkerThread) -> Timings:
    """Return what the device does, looked at once more where it seems too slow: something else may have run.

    Raises:
        SloUnmet: If inference alone does not hold the limit.
    """
    timings: Timings = lane.wait(lambda: rehearse(device, server, tended))
    for _ in range(_AGAIN):
        if timings.option().in_time((), terms.rate_per_s, terms.slo_s, 0.0):
            break
        lane.wait(lambda: remeasure_batches(device, server, timings))
    check_held(Menu((timings.option(),)), terms.rate_per_s, terms.slo_s)
    return timings


class _Loop:
    """The requests, the batch and the slice that are under way, and what came of those before."""

    def __init__(
        self,
        device: Device,
        server: Server,
        tended: SupervisedTrainer,
        timings: Timings,
        terms: Terms,
        lane: WorkerThread,
        done: "SimpleQueue[CompletedCall]",
        told: Callable[[RunProgress], None] | None,
        beside: "dict[int, float] | None",
    ) -> None:
        self._server = server
        self._tended = tended
        self._timings = timings
        self._terms = terms
        self._lane = lane
        self._done = done
        self._told = told
        self._beside = beside
        self._gentle = terms.policy in GENTLE
        self._alone = terms.policy == ALONE
        self._policy = policy("greedy" if self._alone else terms.policy, terms.hours)
        times = terms.arrivals.times(terms.seed)
        assert times is not None
        self._begin_s = time.monotonic()
        until_s = math.inf if terms.seconds is None else terms.seconds
        self._ahead = itertools.takewhile(lambda at_s: at_s < until_s, times)
        self._next_s = next(self._ahead, math.inf)
        self._waiting = deque[float]()
        self._serving = False
        self._serves_until_s = 0.0
        self._latencies: list[float] = []
        self._arrivals: list[float] = []
        self._slices = deque[tuple[float, float]](maxlen=SLICES_MOST)
        self._late = self._dropped = self._seen = self._requests = 0
        self._forecast = Forecast().seen(0.0, terms.rate_per_s, _LOOK_S)
        self._look_s = _LOOK_S
        self._fresh_s = -math.inf
        self._guard = Guard(terms.slo_s)
        self._meter = None if terms.ration is None else MeteredPowerLimit(device, terms.ration)
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
            self._requests += 1
            self._seen += 1
            self._next_s = next(self._ahead, math.inf)
        if now_s >= self._look_s:
            self._look(now_s)

    def _look(self, now_s: float) -> None:
        """Once a second tell the forecast what came, see whether the trainer hangs, and say how things stand."""
        period_s = now_s - self._look_s + _LOOK_S
        self._forecast = self._forecast.seen(now_s, self._seen / period_s, period_s)
        self._seen = 0
        self._look_s = now_s + _LOOK_S
        self._tended.check()
        if self._meter is not None:
            self._meter.look(bool(self._tended.left or self._tended.slicing))
        if self._told is not None:
            tended = self._tended
            done = tended.samples, tended.epoch, tended.left_of_job, self._state()
            self._told(RunProgress(now_s, len(self._latencies), self._late, *done))

    def _state(self) -> str:
        if self._tended.stopped or self._tended.finished:
            if self._tended.stopped:
                return "stopped"
            return "finished"
        if self._tended.busy and not self._tended.slicing:
            if self._tended.starting:
                return "starting"
            return "saving"
        if self._tended.slicing and not self._tended.held:
            return "training"
        return "paused"

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
        paused = self._guard.paused(self._now_s)
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
        ages_s, demand_per_s, aim_s = self._queue()
        now_s = self._now_s
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
            self._option = self._timings.option(most, self._beside)
            self._fresh_s = now_s

    def _do(self, decision: Decision) -> None:
        for _ in range(decision.drop):
            self._waiting.popleft()
            self._late += 1
            self._dropped += 1
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

    def _take(self, done: CompletedCall) -> None:
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

    def _answered(self, done: CompletedCall) -> None:
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
        tended = self._tended
        terms = self._terms
        training = Training(
            samples=tended.samples,
            steps=tended.steps,
            epoch=tended.epoch,
            epochs=epochs,
            finished=tended.finished,
            done_s=self._finished_s,
            loss=tended.loss,
            suspended=tended.suspended,
            restarts=tended.restarts,
            shrunk=self._guard.shrunk,
            pauses=self._guard.pauses,
            stopped=tended.stopped,
            waited_s=None if self._meter is None else self._meter.waited_s,
            exit_code=tended.exit_code,
        )
        counts = self._requests, self._late, self._dropped, tuple(self._latencies), training
        ran = (title, False, terms.policy, str(terms.arrivals), terms.slo_s, self._span_s)
        hours = None if terms.hours is None else str(terms.hours)
        told = Result(*ran, *counts, None, "", "", interrupted=self.interrupted)
        told = replace(told, arrived_s=self._arrivals, slices_s=tuple(self._slices))
        return replace(told, hours=hours, power_cap_w=terms.power_w)
