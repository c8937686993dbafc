"""Before the first request: what batches and slices take on a real device, each alone, and beside each other."""

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from queue import SimpleQueue

from polythrottle.errors import InvalidInput
from polythrottle.finetune.corun import LEAST_RUNS
from polythrottle.finetune.coruns import Profiled, profile
from polythrottle.finetune.job import Job
from polythrottle.finetune.lane import Lane
from polythrottle.finetune.measured_coruns import UNKNOWN, MeasuredBench, Work
from polythrottle.finetune.options import Menu
from polythrottle.finetune.paper_predictor import PaperModel
from polythrottle.finetune.server import Server
from polythrottle.finetune.tending import Tended
from polythrottle.finetune.timings import Timings
from polythrottle.finetune.trainer.driver import Trainer
from polythrottle.finetune.trainer.task import Task
from polythrottle.ports import Device
from polythrottle.space import OperatingPoint

_IDLE_S = 0.3
_WARM, _QUERIES, _LEAST_S, _MOST_S = 5, 20, 1.0, 10.0
_SLICES = 3
_ALL = 1.0
"""The share of its time that a trainer works whom nobody holds back."""


def rehearse(device: Device, server: Server, tended: Tended) -> Timings:
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


def again(device: Device, server: Server, timings: Timings) -> None:
    """Measure batches anew and forget what they took before.

    Raises:
        TrialError: If the workload fails.
        DeviceError: If the device cannot be read.
    """
    for batch in server.batches:
        timings.forget(batch)
        _batches(device, server, timings, batch)


def sizes_of(tended: Tended) -> tuple[int, ...]:
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


def _batches(device: Device, server: Server, timings: Timings, batch: int) -> None:
    for _ in range(_WARM):
        server.answer(batch)
    before, count, begin_s = device.read(), 0, time.monotonic()
    while (passed_s := time.monotonic() - begin_s) < _LEAST_S or (count < _QUERIES and passed_s < _MOST_S):
        began_s = time.monotonic()
        server.answer(batch)
        timings.served(batch, time.monotonic() - began_s)
        count += 1
    timings.drew(batch=batch, joules=(device.read().energy_j - before.energy_j) / count)


def _slices(device: Device, tended: Tended, timings: Timings, size: int) -> None:
    seen = 0
    for number in range(_SLICES + 1):
        if not tended.left:
            return
        before = device.read()
        done = tended.practise(size)
        if number and done.samples == size:
            timings.trained(size, done.measured_s)
            timings.drew(samples=size, joules=device.read().energy_j - before.energy_j)
            seen += 1
    if not seen and tended.left:
        timings.trained(done.samples, done.measured_s)


def bench_of(title: str, server: Server, tended: Tended) -> MeasuredBench:
    """Return a bench on which co-runs of a workload and an open trainer can be measured."""
    hello = tended.hello
    assert hello is not None
    sample = Work(hello.operations, hello.traffic_bytes) if hello.operations else UNKNOWN
    item = sample if tended.model == server.workload.uri else UNKNOWN
    sizes = _telling(sizes_of(tended))
    return MeasuredBench(
        title, server.workload, lambda size: tended.practise(size).measured_s, sizes, item=item, sample=sample
    )


def predicted_beside(server: Server, tended: Tended) -> Mapping[int, float]:
    """Return by batch how long the paper's model says that it takes beside a whole step, fitted to a few co-runs.

    Raises:
        InvalidInput: If operations cannot be counted, or the job has too few sizes of slices to tell.
        TrialError: If the workload or the trainer fails.
    """
    bench, sizes = bench_of("", server, tended), sizes_of(tended)
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


def known(device: Device, server: Server, trainer: Trainer, task: Task) -> tuple[Menu, Job]:
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
        job = Job(tended.hello.samples, task.batch, task.epochs, tended.hello.output, task.model)
        return Menu((option,)), job


def profiled(device: Device, server: Server, trainer: Trainer, held_out: int, requests: int) -> Profiled:
    """Return what co-runs on a real device tell; see `coruns.profile`.

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
def _opened(device: Device, trainer: Trainer) -> Iterator[Tended]:
    lane = Lane("trainer", SimpleQueue())
    tended = Tended(trainer, lane)
    try:
        with device:
            tended.open()
            yield tended
    finally:
        tended.close()
        lane.close()
