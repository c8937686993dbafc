"""Inference and fine-tuning side by side on a real device, within a latency limit and a mean power."""

from __future__ import annotations

import itertools
import math
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from queue import Queue
from typing import Any

from polythrottle.domain.errors import DeviceError, InvalidInput
from polythrottle.domain.ports import Device
from polythrottle.domain.space import OperatingPoint
from polythrottle.training.beside.operating_options import Menu, Option, Slice
from polythrottle.training.beside.preparation import (
    BatchedWorkload,
    Timings,
    predicted_beside,
    rehearse,
    remeasure_batches,
)
from polythrottle.training.beside.progress_forecast import check_held, warnings_before
from polythrottle.training.beside.scheduler import ALONE, GENTLE, MeanPowerLimit, Terms, policy, wall_day_s
from polythrottle.training.beside.serving_loop import LOOK_S, SLICES_MOST, AnsweredBatch, Result, ServingLoop, Training
from polythrottle.training.beside.trainer.driver import Trainer
from polythrottle.training.beside.trainer.supervisor import (
    SLICE,
    CompletedCall,
    SupervisedTrainer,
    WorkerThread,
    ended_calls,
)

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

    def after(self, latency_s: float, now_s: float) -> Guard:
        """Return the guard after one more answered request; in a pause, none counts: fine-tuning cannot be why."""
        # A request that came before the last change was slowed by what was aimed at then; counting it would punish
        # twice.
        if self.paused(now_s) or now_s - latency_s < self.since_s:
            return self
        near = latency_s > NEAR * self.slo_s
        moved = replace(
            self, seen=self.seen + 1, near=self.near + near, calm=self.calm + 1, stirred=self.stirred + near
        )
        # More than 2 of 200 near the limit and the 99th percentile is about to be; one or two are stragglers.
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

    def _careful(self, now_s: float) -> Guard:
        # Doubling, as congestion control does: whoever dares again too soon breaks the limit again and again.
        patience = min(2 * self.patience, _PATIENT * WINDOW)
        if self.place + 1 < len(AIMS):
            return self._changed(now_s, place=self.place + 1, patience=patience, shrunk=self.shrunk + 1)
        until_s = now_s + self.pause_s
        longer_s = min(_LONGEST_S, 2 * self.pause_s)
        pause = {"pause_s": longer_s, "until_s": until_s, "pauses": self.pauses + 1}
        # Counted from the pause's end: while nothing is fine-tuned, calm says nothing of what may be dared.
        return self._changed(until_s, patience=patience, **pause)

    def _daring(self, now_s: float) -> Guard:
        """Aim a step higher; at the limit already, forget some of the care."""
        patience = self.patience if self.place else max(WINDOW, self.patience // 2)
        return self._changed(now_s, place=max(0, self.place - 1), patience=patience, pause_s=_PAUSE_S)

    def _changed(self, since_s: float, **what: Any) -> Guard:
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
        # Unknown power may be too much: fine-tuning waits, inference goes on.
        except DeviceError:
            self._readable = False
            return
        passed_s = now.time_s - self._last.time_s
        if wanted and not was_open:
            self.waited_s += passed_s
        self._ration = self._ration.after(now.energy_j - self._last.energy_j, passed_s)
        self._last = now
        self._readable = True


# Inference and fine-tuning side by side on a real device: requests as they come, the trainer when there is room.

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
    server: BatchedWorkload,
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
    # One queue for both threads, so that a single wait sees whichever ends first.
    done: Queue[CompletedCall] = Queue()
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
            # Rehearsing has trained real steps already; they are kept, but are not of this run.
            tended.count()
            before = device.read()
            host = _LiveHost(device, server, tended, timings, terms, lanes[0], done, told, beside)
            title = f"{server.workload.uri} on {device.title}, {hello.trained_parameters:,} weights trained"
            loop = _serving_loop(host, terms, server.batches[-1])
            result = _served_beside(host, loop, terms, tended, title)
            joules = device.read().energy_j - before.energy_j
        # Only now, once energy is read: bringing a step to disk is no part of what serving and training drew.
        tended.settle()
        able = tended.finished and trainer.task.served and not (result.interrupted or tended.stopped)
        return replace(
            result,
            energy_j=joules,
            energy_kind=str(device.energy_kind),
            boundary=device.boundary,
            validation=_judged(tended) if able else None,
            notices=(*notes, *tended.notices),
        )
    finally:
        tended.close()
        for lane in lanes:
            lane.close()


def _check_end(terms: Terms) -> None:
    # No job ends it, so nothing would.
    if terms.policy == ALONE and terms.seconds is None:
        raise InvalidInput("inference alone has no end: say how long requests come, such as --seconds 60")
    terms.check_hours(wall_day_s(time.time()))


def _notes(timings: Timings, left: int, terms: Terms, noted: Callable[[str], None] | None) -> tuple[str, ...]:
    warnings = warnings_before(Menu((timings.option(),)), left, terms, wall_day_s(time.time()))
    if noted is not None:
        for each in warnings:
            noted(each)
    return warnings


def _judged(tended: SupervisedTrainer) -> dict[str, Any]:
    """Validate the new model, have it served if it may be, and return what was found; no requests come meanwhile."""
    # In parts, because the trainer answers in seconds and there may be thousands of held-out samples.
    while not (verdict := tended.ask(lambda trainer: trainer.ask("validate", samples=_VALIDATED))["result"]):
        pass
    document: dict[str, Any] = dict(verdict)
    served = None
    if document["holds"]:
        served = tended.ask(lambda trainer: trainer.ask("swap"))
    return {**document, "served": None if served is None else served["served"]}


def _rehearsed(
    device: Device, server: BatchedWorkload, tended: SupervisedTrainer, terms: Terms, lane: WorkerThread
) -> Timings:
    """Return what the device does, looked at once more where it seems too slow: something else may have run.

    Raises:
        SloUnmet: If inference alone does not hold the limit.
    """
    timings: Timings = lane.wait(lambda: rehearse(device, server, tended))
    # Something else may have run during the first look; a job is not refused for that.
    for _ in range(_AGAIN):
        if timings.option().in_time((), terms.rate_per_s, terms.slo_s, 0.0):
            break
        lane.wait(lambda: remeasure_batches(device, server, timings))
    check_held(Menu((timings.option(),)), terms.rate_per_s, terms.slo_s)
    return timings


class _LiveHost:
    """A real device, its workload's thread and its trainer's; satisfies the port `ServingHost`."""

    def __init__(
        self,
        device: Device,
        server: BatchedWorkload,
        tended: SupervisedTrainer,
        timings: Timings,
        terms: Terms,
        lane: WorkerThread,
        done: Queue[CompletedCall],
        told: Callable[[RunProgress], None] | None,
        beside: dict[int, float] | None,
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
        self._begin_s = time.monotonic()
        self._serving = False
        self._serves_until_s = 0.0
        self._fresh_s = -math.inf
        self._option = timings.option(shared_s=beside)
        if terms.ration is None:
            self._meter = None
        else:
            self._meter = MeteredPowerLimit(device, terms.ration)
        self.guard = Guard(terms.slo_s)
        self.slices_s: deque[tuple[float, float]] = deque(maxlen=SLICES_MOST)
        self.finished_s: float | None = None

    @property
    def now_s(self) -> float:
        return time.monotonic() - self._begin_s

    @property
    def option(self) -> Option:
        """What the last times say, made anew only now and then: it is asked for with every decision."""
        now_s = self.now_s
        # Percentiles of hundreds of times are sorted for it, which every decision cannot afford.
        if now_s >= self._fresh_s + _FRESH_S:
            most = None
            if self.guard.paused(now_s):
                most = 0
            self._option = self._timings.option(most, self._beside)
            self._fresh_s = now_s
        return self._option

    @property
    def left(self) -> int:
        if self._terms.policy == ALONE or (self._meter is not None and not self._meter.open):
            return 0
        return self._tended.left

    @property
    def serves_until_s(self) -> float | None:
        if self._serving:
            return max(self.now_s, self._serves_until_s)
        return None

    @property
    def training(self) -> bool:
        return self._tended.slicing and not self._tended.held

    @property
    def day_s(self) -> float:
        return wall_day_s(time.time())

    @property
    def aim_s(self) -> float:
        return self.guard.aim_s

    @property
    def done(self) -> bool:
        """Whether the loop may end: a job is not waited for where requests have an end of their own."""
        return self._terms.seconds is not None or self._tended.finished or bool(self._tended.stopped)

    @property
    def waited_s(self) -> float | None:
        """How long fine-tuning waited for power; None where any is allowed."""
        if self._meter is None:
            return None
        return self._meter.waited_s

    def trained(self) -> Training:
        """Return what was trained by now."""
        tended = self._tended
        return Training(
            samples=tended.samples,
            steps=tended.steps,
            epoch=tended.epoch,
            epochs=tended.epochs,
            finished=tended.finished,
            done_s=self.finished_s,
            loss=tended.loss,
            suspended=tended.suspended,
            restarts=tended.restarts,
            shrunk=self.guard.shrunk,
            pauses=self.guard.pauses,
            stopped=tended.stopped,
            waited_s=self.waited_s,
            exit_code=tended.exit_code,
        )

    def queued(self, ages_s: Sequence[float], demand_per_s: float | None) -> None:
        """Stop a slice that requests cannot wait for, and let it go on when they can."""
        tended = self._tended
        if not (self._gentle and tended.slicing):
            return
        paused = self.guard.paused(self.now_s)
        in_time = not tended.overdue() and self._option.in_time(
            ages_s, demand_per_s, self.guard.aim_s, tended.remaining_s()
        )
        free = not ages_s or in_time
        # Held until the batch is answered: a slice that goes on beside it would share the device with it.
        if tended.held and free and not paused and not self._serving:
            tended.release()
        elif not tended.held and (paused or not free):
            tended.hold()

    def move(self, point: OperatingPoint) -> float:
        """Refuse: policies of a real run are given no points to choose from."""
        raise InvalidInput(f"a run on a real device stays at its point, and is not moved to {point}")

    def train(self, piece: Slice) -> None:
        self._tended.begin(piece.samples, piece.tail_s)

    def serve(self, arrived_s: tuple[float, ...]) -> None:
        self._serving = True
        self._serves_until_s = self.now_s + self._option.serves(len(arrived_s)).latency_s
        self._lane.begin(arrived_s, lambda: self._server.answer(len(arrived_s)))

    def look(self, period_s: float, answered: int, late: int) -> float:
        """See whether the trainer hangs and what was drawn, and say how things stand."""
        tended = self._tended
        tended.check()
        if self._meter is not None:
            self._meter.look(bool(tended.left or tended.slicing))
        if self._told is not None:
            progress = RunProgress(
                passed_s=self.now_s,
                answered=answered,
                late=late,
                samples=tended.samples,
                epoch=tended.epoch,
                left=tended.left_of_job,
                state=self._state(),
            )
            self._told(progress)
        return LOOK_S

    def _state(self) -> str:
        tended = self._tended
        if tended.stopped:
            return "stopped"
        if tended.finished:
            return "finished"
        if tended.busy and not tended.slicing:
            return "starting" if tended.starting else "saving"
        return "training" if self.training else "paused"

    def wait(self, until_s: float, queued: bool) -> Sequence[AnsweredBatch]:
        """Wait until something is done, comes, or is to be looked at.

        Raises:
            TrialError: If the workload has failed.
        """
        ends = [until_s]
        if self._terms.seconds is not None and self.now_s < self._terms.seconds:
            ends.append(self._terms.seconds)
        if queued and self.training:
            # A slice that takes longer than its tail is stopped for them, and nothing else would wake the loop then.
            ends.append(self.now_s + max(_TICK_S, self._tended.remaining_s()))
        ended = ended_calls(self._done, min(ends) - self.now_s)
        return [answer for call in ended for answer in self._take(call)]

    def _take(self, done: CompletedCall) -> tuple[AnsweredBatch, ...]:
        if isinstance(done.what, tuple):
            return (self._answered(done),)
        if done.what == SLICE:
            self.slices_s.append((done.began_s - self._begin_s, done.ended_s - self._begin_s))
        if (sliced := self._tended.took(done)) is not None:
            self._timings.trained(sliced.samples, sliced.measured_s)
        self._tended.save()
        if self._tended.finished and self.finished_s is None:
            self.finished_s = self.now_s
        return ()

    def _answered(self, done: CompletedCall) -> AnsweredBatch:
        self._serving = False
        if done.error is not None:
            raise done.error
        answer = AnsweredBatch(done.what, done.ended_s - self._begin_s)
        self._timings.served(self._server.size(len(done.what)), done.took_s)
        if self._gentle:
            for arrived_s in answer.arrived_s:
                self.guard = self.guard.after(answer.ended_s - arrived_s, answer.ended_s)
        return answer


def _serving_loop(host: _LiveHost, terms: Terms, batch: int) -> ServingLoop:
    times_s = terms.arrivals.times(terms.seed)
    assert times_s is not None
    return ServingLoop(
        host,
        itertools.takewhile(lambda at_s: terms.seconds is None or at_s < terms.seconds, times_s),
        terms.slo_s,
        terms.rate_per_s,
        policy("greedy" if terms.policy == ALONE else terms.policy, terms.hours),
        ends_s=terms.seconds,
        batch=batch,
    )


def _served_beside(host: _LiveHost, loop: ServingLoop, terms: Terms, tended: SupervisedTrainer, title: str) -> Result:
    """Serve and train until the time is up or the job is done, and return what came of it, energy left out."""
    interrupted = False
    try:
        loop.run()
    except KeyboardInterrupt:
        interrupted = True
    span_s = host.now_s
    if tended.held:
        tended.release()
    return Result(
        title=title,
        simulated=False,
        policy=terms.policy,
        arrivals=str(terms.arrivals),
        slo_s=terms.slo_s,
        span_s=span_s,
        requests=loop.requests,
        late=loop.late,
        dropped=loop.dropped,
        latencies_s=tuple(loop.latencies_s),
        training=host.trained(),
        energy_j=None,
        energy_kind="",
        boundary="",
        interrupted=interrupted,
        hours=None if terms.hours is None else str(terms.hours),
        power_cap_w=terms.power_w,
        arrived_s=loop.arrived_s,
        slices_s=tuple(host.slices_s),
    )
