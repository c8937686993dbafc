"""Before the first request: device, workload and trainer are opened, and batches and slices are measured."""

from __future__ import annotations

import math
import statistics
import time
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from queue import Queue
from typing import TYPE_CHECKING

from polythrottle.backends import DeviceURI, open_device
from polythrottle.backends.probe import find_device
from polythrottle.catalog import load_board, load_model, names
from polythrottle.domain.errors import InvalidInput
from polythrottle.domain.ladder import PointPerformance
from polythrottle.domain.ports import Device, Workload
from polythrottle.domain.space import BATCH_SIZE, OperatingPoint
from polythrottle.training.beside.corun_bench import UNKNOWN, CoRunProfile, MeasuredBench, Work, profile
from polythrottle.training.beside.corun_model import LEAST_RUNS, PaperModel
from polythrottle.training.beside.operating_options import FinetuningJob, Menu, Option, Slice
from polythrottle.training.beside.trainer.driver import Task, Trainer
from polythrottle.training.beside.trainer.supervisor import SupervisedTrainer, WorkerThread
from polythrottle.workloads import open_workload

if TYPE_CHECKING:
    from polythrottle.training.beside.simulated_run import SimulatedScene

# A workload that answers requests in batches.


class BatchedWorkload:
    """A workload, and the batches it is used with; all calls come from one thread.

    Args:
        workload: What answers.
        batches: Sizes of a batch, each a level of the workload's batch size; the smallest there is if empty.

    Raises:
        InvalidInput: If the workload cannot answer batches of such a size.
    """

    def __init__(self, workload: Workload, batches: Sequence[int] = ()) -> None:
        self.workload = workload
        self._now = 0
        able = self._able()
        self.batches = tuple(sorted(set(batches))) or (min(able),)
        if strange := sorted(set(self.batches) - able):
            raise InvalidInput(f"{workload.uri} answers batches of {', '.join(map(str, sorted(able)))}, not {strange}")

    def _able(self) -> set[int]:
        space = self.workload.space
        if BATCH_SIZE in space.names:
            return {int(level) for level in space.knob(BATCH_SIZE).levels}
        return {1}

    def size(self, requests: int) -> int:
        """Return the size of the batch that so many requests are answered in, which they may not fill."""
        return next((batch for batch in self.batches if batch >= requests), self.batches[-1])

    def answer(self, requests: int) -> None:
        """Answer requests in one batch.

        Raises:
            TrialError: If the workload fails.
        """
        batch = self.size(requests)
        # Some runtimes allocate anew for each size, which takes longer than a small batch.
        if batch != self._now:
            space = self.workload.space
            point = space.default
            if BATCH_SIZE in space.names:
                point = point.moved({BATCH_SIZE: batch})
            self.workload.apply(point)
            self._now = batch
        self.workload.query()


# What batches and slices have taken lately on a real device, and what may therefore be expected of the next.

_MEMORY = 200
"""So many of the last times are remembered of each size."""
_LOOSE = 1.2
"""A tail is at least so many times the mean while too few were seen for a 99th percentile."""
_SHARE = 0.99
_LATELY = 9
"""What most of so many last times exceed is believed at once: the machine has become slower."""


@dataclass
class _Sized:
    """The last times of one size, and joules where they were measured."""

    times_s: deque[float] = field(default_factory=lambda: deque(maxlen=_MEMORY))
    joules: float | None = None

    @property
    def mean_s(self) -> float:
        """What one takes on average, in seconds; of the last nine where the machine has become slower."""
        # A mean over 200 lags behind a machine that has just become slower; most of the last nine being slow is no
        # chance.
        lately = list(self.times_s)[-_LATELY:]
        return max(statistics.fmean(self.times_s), statistics.median_low(lately))

    @property
    def tail_s(self) -> float:
        """What all but one in a hundred stay below, in seconds; at least one must have been timed."""
        place = math.ceil(_SHARE * len(self.times_s)) - 1
        seen_s = sorted(self.times_s)[place]
        # The highest of a few is no 99th percentile: until there are enough, the mean with a margin is safer.
        if len(self.times_s) >= _MEMORY / 2:
            return seen_s
        return max(seen_s, _LOOSE * self.mean_s)


class Timings:
    """The last times of every batch and slice; not for several threads at once.

    A slice of a size that was not seen is taken to lie between its neighbours.

    Args:
        point: That the device is at.
        sizes: Samples of the slices that may be asked for.
        idle_w: What the device draws without work.
    """

    def __init__(self, point: OperatingPoint, sizes: Iterable[int], idle_w: float) -> None:
        self._point = point
        self._idle_w = idle_w
        self.sizes = tuple(sorted(set(sizes)))
        self._batches: dict[int, _Sized] = {}
        self._slices: dict[int, _Sized] = {}

    def served(self, batch: int, took_s: float) -> None:
        """Take note of an answered batch."""
        self._batches.setdefault(batch, _Sized()).times_s.append(took_s)

    def forget(self, batch: int) -> None:
        """Forget what a batch has taken."""
        self._batches.pop(batch, None)

    def trained(self, samples: int, took_s: float) -> None:
        """Take note of a slice that is done."""
        self._slices.setdefault(samples, _Sized()).times_s.append(took_s)

    def drew(self, *, batch: int = 0, samples: int = 0, joules: float) -> None:
        """Take note of what a batch, or a slice, makes the device draw."""
        if batch:
            sized = self._batches[batch]
        else:
            sized = self._slices[samples]
        sized.joules = joules

    def option(self, most: int | None = None, shared_s: Mapping[int, float] | None = None) -> Option:
        """Return what may be expected of the device.

        Args:
            most: Samples of the largest slice that may be used; None for any.
            shared_s: By batch the latency predicted beside fine-tuning; None where nobody predicts.

        Raises:
            InvalidInput: If no batch was seen.
        """
        if not self._batches:
            raise InvalidInput("no batch was answered yet, so nothing is known of the next")
        services = tuple(self._service(batch) for batch in sorted(self._batches))
        if self._slices:
            sizes = [size for size in self.sizes if most is None or size <= most]
        else:
            sizes = []
        if shared_s:
            beside = tuple((shared_s or {}).get(each.batch, math.inf) for each in services)
        else:
            beside = ()
        return Option(self._point, services, tuple(map(self._slice, sizes)), beside)

    def _service(self, batch: int) -> PointPerformance:
        sized = self._batches[batch]
        if sized.joules is not None:
            joules = sized.joules
        else:
            joules = self._idle_w * sized.mean_s
        return PointPerformance(
            self._point, batch, sized.mean_s, sized.mean_s, sized.tail_s, max(joules, 1e-9), max(0.0, self._idle_w)
        )

    def _slice(self, samples: int) -> Slice:
        known = sorted(self._slices)
        mean_s = _between(samples, known, [self._slices[size].mean_s for size in known])
        tail_s = _between(samples, known, [self._slices[size].tail_s for size in known])
        drawn = [(size, joules) for size in known if (joules := self._slices[size].joules) is not None]
        joules = None
        if drawn:
            joules = _between(samples, [size for size, _ in drawn], [joules for _, joules in drawn])
        return Slice(samples, mean_s, max(mean_s, tail_s), joules)


def _between(at: float, places: Sequence[float], values: Sequence[float]) -> float:
    """Return the value at a place: on the line between its neighbours, in proportion beyond the last."""
    # Below the smallest, launches dominate: time does not shrink in proportion, so nothing is extrapolated down.
    if at <= places[0]:
        return values[0]
    for i in range(1, len(places)):
        if at <= places[i]:
            share = (at - places[i - 1]) / (places[i] - places[i - 1])
            return values[i - 1] + share * (values[i] - values[i - 1])
    return values[-1] * at / places[-1]


# From words to what is run: a real device with its workload and trainer, or a simulated board.

_NOISE = 0.02
_BATCH_MOST = 64
"""The largest batch of requests on simulated boards: what every smaller one takes is computed at each point."""


@dataclass(frozen=True)
class ServingPlace:
    """A device and what it serves, in the words a user gave.

    Args:
        device: Its URI.
        workload: The workload's; a name in the catalogue on simulated boards.
        batches: Sizes of a batch of requests; of single requests if empty, up to 8 on simulated boards.
        threads: Of inference; as many as there are processors if None.
        inputs: Shapes of a model that does not say them.
    """

    device: str
    workload: str
    batches: tuple[int, ...] = ()
    threads: int | None = None
    inputs: tuple[str, ...] = ()

    @property
    def simulated(self) -> bool:
        """Whether the board is computed."""
        return self.device.strip().startswith("sim:")

    @property
    def noise(self) -> float:
        """Of a simulated board."""
        return DeviceURI.parse(self.device).number("noise", _NOISE)

    @property
    def seed(self) -> int:
        """Of a simulated board."""
        return DeviceURI.parse(self.device).count("seed", 0)

    def scene(self, job: FinetuningJob) -> SimulatedScene:
        """Return the simulated board with both kinds of work.

        Raises:
            PolythrottleError: If there is no such board or model, or words make no sense there.
        """
        # Only here: what runs on a real board, also over SSH, needs no simulation.
        from polythrottle.training.beside.simulated_run import SimulatedScene

        uri = DeviceURI.parse(self.device)
        uri.only("seed", "noise")
        if uri.meter:
            raise InvalidInput("a simulated board that fine-tunes has joules of its own; leave ?meter= out")
        if not uri.name:
            raise InvalidInput("sim: needs the name of a board; polythrottle devices lists them")
        if self.threads or self.inputs:
            raise InvalidInput("a simulated board has no --input and no --threads; they belong to real models")
        most = max(self.batches, default=8)
        if most > _BATCH_MOST:
            raise InvalidInput(f"a simulated board answers batches of {_BATCH_MOST} requests at most, not {most}")
        if not 0 <= self.noise < 1:
            raise InvalidInput(f"a simulation needs 0 <= noise < 1, not noise={self.noise:g}")
        return SimulatedScene.of(load_board(uri.name), load_model(self.workload), job, self.noise, most)

    def check_model(self) -> None:
        """Check that what is served is a model, as a real device needs.

        Raises:
            InvalidInput: If it is a description in the catalogue.
        """
        if self.workload in names("profiles/workloads"):
            raise InvalidInput(f"{self.workload} describes a model for simulated boards; a real device needs the model")

    def open(self) -> tuple[Device, BatchedWorkload]:
        """Return the real device, not entered, and what answers on it.

        Raises:
            PolythrottleError: If either cannot be opened; says why and what would do.
        """
        if self.device.strip() == "auto":
            uri = find_device().uri
        else:
            uri = self.device.strip()
        if uri.startswith("replay:"):
            raise InvalidInput("a replay table cannot fine-tune; take sim:<board> or a real device")
        # The model and its trainer would run here, while the joules are the board's; `far_run` has all of it run there.
        if uri.startswith("ssh:"):
            raise InvalidInput("over SSH the board itself serves and trains, as finetune run, plan and profile have it")
        self.check_model()
        if self.threads is None:
            threads: Sequence[int] | None = None
        else:
            threads = (self.threads,)
        batches = self.batches or None
        workload = open_workload(self.workload, inputs=self.inputs, batch_sizes=batches, threads=threads)
        return open_device(uri), BatchedWorkload(workload, self.batches)


# Before the first request: what batches and slices take on a real device, each alone, and beside each other.

_IDLE_S = 0.3
_WARM = 5
_QUERIES = 20
_LEAST_S = 1.0
_MOST_S = 10.0
_SLICES = 3
_ALL = 1.0
"""The share of its time that a trainer works whom nobody holds back."""


def rehearse(device: Device, server: BatchedWorkload, tended: SupervisedTrainer) -> Timings:
    """Return what batches and slices take, each measured a few times alone, and what they make the device draw.

    Slices really train; a short job may come to its end here.

    Args:
        device: Entered.
        server: Not used by anybody else meanwhile.
        tended: Open.

    Raises:
        TrialError: If the workload or the trainer fails.
        DeviceError: If the device cannot be read.
    """
    begun = device.read()
    time.sleep(_IDLE_S)
    ended = device.read()
    idle_w = max(0.0, ended.energy_j - begun.energy_j) / max(1e-9, ended.time_s - begun.time_s)
    timings = Timings(OperatingPoint(device.space.default), sizes_of(tended), idle_w)
    for batch in server.batches:
        _batches(device, server, timings, batch)
    for size in _telling(timings.sizes):
        _slices(device, tended, timings, size)
    return timings


def remeasure_batches(device: Device, server: BatchedWorkload, timings: Timings) -> None:
    """Measure batches anew and forget what they took before.

    Raises:
        TrialError: If the workload fails.
        DeviceError: If the device cannot be read.
    """
    for batch in server.batches:
        timings.forget(batch)
        _batches(device, server, timings, batch)


def sizes_of(tended: SupervisedTrainer) -> tuple[int, ...]:
    """Return the samples of slices: powers of two and halfway between, whole steps, and the last step of an epoch."""
    assert tended.hello is not None
    whole = min(tended.batch, tended.hello.samples)
    last = tended.hello.samples % whole or whole
    powers = [2**power for power in range(whole.bit_length())]
    parts = {*powers, *(power + power // 2 for power in powers)}
    return tuple(sorted({size for size in parts if size < whole} | {whole, last}))


def _telling(sizes: tuple[int, ...]) -> tuple[int, ...]:
    """Return the sizes between which the rest is taken to lie: the least, some in the middle, the largest."""
    return tuple(sorted({sizes[0], sizes[len(sizes) // 3], sizes[2 * len(sizes) // 3], sizes[-1]}))


def _batches(device: Device, server: BatchedWorkload, timings: Timings, batch: int) -> None:
    # The first calls compile kernels and grow memory pools.
    for _ in range(_WARM):
        server.answer(batch)
    before = device.read()
    count = 0
    begin_s = time.monotonic()
    # A second at least, since boards renew their counters only some times a second; ten at most, for slow models.
    while (passed_s := time.monotonic() - begin_s) < _LEAST_S or (count < _QUERIES and passed_s < _MOST_S):
        began_s = time.monotonic()
        server.answer(batch)
        timings.served(batch, time.monotonic() - began_s)
        count += 1
    timings.drew(batch=batch, joules=(device.read().energy_j - before.energy_j) / count)


def _slices(device: Device, tended: SupervisedTrainer, timings: Timings, size: int) -> None:
    counted = 0
    # One more than is counted: the first of a size allocates.
    for number in range(_SLICES + 1):
        if not tended.left:
            return
        before = device.read()
        done = tended.practise(size)
        if number and done.samples == size:
            timings.trained(size, done.measured_s)
            timings.drew(samples=size, joules=device.read().energy_j - before.energy_j)
            counted += 1
    if not counted and tended.left:
        timings.trained(done.samples, done.measured_s)


def bench_of(title: str, server: BatchedWorkload, tended: SupervisedTrainer) -> MeasuredBench:
    """Return a bench on which co-runs of a workload and an open trainer can be measured."""
    hello = tended.hello
    assert hello is not None
    if hello.operations:
        sample = Work(hello.operations, hello.traffic_bytes)
    else:
        sample = UNKNOWN
    if tended.model == server.workload.uri:
        item = sample
    else:
        item = UNKNOWN
    sizes = _telling(sizes_of(tended))
    return MeasuredBench(
        title, server.workload, lambda size: tended.practise(size).measured_s, sizes, item=item, sample=sample
    )


def predicted_beside(server: BatchedWorkload, tended: SupervisedTrainer) -> Mapping[int, float]:
    """Return by batch how long the paper's model says that it takes beside a whole step, fitted to a few co-runs.

    Raises:
        InvalidInput: If operations cannot be counted, or the job has too few sizes of slices to tell.
        TrialError: If the workload or the trainer fails.
    """
    bench = bench_of("", server, tended)
    sizes = sizes_of(tended)
    pairs = [(batch, size) for size in reversed(sizes) for batch in server.batches]
    cases = [bench.case(batch, size, _ALL) for batch, size in pairs]
    if None in (cases[0].operations, cases[0].step_operations):
        raise InvalidInput(
            "the paper's policy needs the operations of inference and of fine-tuning, and they cannot be counted here: "
            "serve the model that is trained, or take another policy"
        )
    runs = [bench.measure(cases[i % len(cases)]) for i in range(max(LEAST_RUNS, len(server.batches)))]
    fitted = PaperModel.fit(runs)
    return {batch: fitted.predict(bench.case(batch, sizes[-1], _ALL)).mean_s for batch in server.batches}


def known(device: Device, server: BatchedWorkload, trainer: Trainer, task: Task) -> tuple[Menu, FinetuningJob]:
    """Return what a real device can do where it stands, measured, and the job as its data make it.

    Args:
        device: Not entered.
        server: What answers.
        trainer: Not started; it is ended afterwards.
        task: What it trains.

    Raises:
        PolythrottleError: If the job cannot be opened, or the workload or the trainer fails.
    """
    with _opened(device, trainer) as tended:
        option = rehearse(device, server, tended).option()
        assert tended.hello is not None
        job = FinetuningJob(tended.hello.samples, task.batch, task.epochs, tended.hello.output, task.model)
        return Menu((option,)), job


def profiled(device: Device, server: BatchedWorkload, trainer: Trainer, held_out: int, requests: int) -> CoRunProfile:
    """Return what co-runs on a real device tell; see `corun_bench.profile`.

    Args:
        device: Not entered.
        server: What answers.
        trainer: Not started, with a job that is long enough; it is ended afterwards.
        held_out: Co-runs to judge by.
        requests: Single requests to learn from afterwards.

    Raises:
        InvalidInput: If there are fewer different co-runs than are asked for.
        PolythrottleError: If the job cannot be opened, or the workload or the trainer fails.
    """
    with _opened(device, trainer) as tended:
        title = f"{server.workload.uri} on {device.title}"
        return profile(bench_of(title, server, tended), held_out=held_out, requests=requests)


@contextmanager
def _opened(device: Device, trainer: Trainer) -> Iterator[SupervisedTrainer]:
    lane = WorkerThread("trainer", Queue())
    tended = SupervisedTrainer(trainer, lane)
    try:
        with device:
            tended.open()
            yield tended
    finally:
        tended.close()
        lane.close()
