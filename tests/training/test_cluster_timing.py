"""Where a worker's time goes."""

import os
import socket
from collections.abc import Iterator

import pytest
import torch

from polythrottle.domain.clock import VirtualClock
from polythrottle.training.elastic.worker.group import Group, StepTimer
from polythrottle.training.elastic.worker.process import Tally


def step(timer: StepTimer, clock: VirtualClock, model: torch.nn.Module, exchange_s: float) -> None:
    """Train a step whose exchange takes so long."""
    model(torch.ones(1, 2)).sum().backward()
    clock.sleep(exchange_s)
    timer.exchanged()


def timed(alone: bool = False) -> tuple[StepTimer, VirtualClock, torch.nn.Module]:
    """Return a timer of a small model."""
    clock, model = VirtualClock(), torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 1))
    return StepTimer(model, clock, alone), clock, model


def test_the_exchange_is_what_backward_takes_after_the_last_gradient() -> None:
    """Two steps of 1 s, of which 0.25 s each were spent waiting for others."""
    timer, clock, model = timed()
    for _ in range(2):
        step(timer, clock, model, 0.25)
        timer.stepped(1.0, cold=False)
    assert timer.tally == Tally(2, 2.0, 0.5, 0.0)
    assert timer.tally.own_s == 1.5


def test_a_worker_alone_waits_for_nobody() -> None:
    """However long it takes after its gradients."""
    timer, clock, model = timed(alone=True)
    step(timer, clock, model, 0.25)
    timer.stepped(1.0, cold=False)
    assert timer.tally.peers_s == 0.0


def test_waiting_for_samples_is_timed_by_itself() -> None:
    """What loading takes counts to the step it is for, the time in which the script works does not."""
    timer, clock, _ = timed()

    def loading() -> Iterator[int]:
        for number in range(2):
            clock.sleep(0.1)
            yield number

    for number in timer.loaded(loading()):
        clock.sleep(0.4)
        timer.stepped(0.5, cold=number == 0)
    assert (timer.tally.steps, timer.tally.data_s) == (2, pytest.approx(0.2))
    assert (timer.cold.steps, timer.cold.data_s) == (1, pytest.approx(0.1))


def test_waiting_is_never_longer_than_the_step() -> None:
    """A step's own time is not negative, whatever the events of a GPU say and when."""
    timer, clock, model = timed()
    step(timer, clock, model, 5.0)
    timer.stepped(1.0, cold=False)
    assert timer.tally.own_s == 0.0


def test_a_model_without_parameters_to_train_is_timed_too() -> None:
    """There is no gradient to wait for."""
    timer = StepTimer(torch.nn.ReLU(), VirtualClock(), alone=False)
    timer.exchanged()
    timer.stepped(1.0, cold=True)
    assert timer.tally == timer.cold == Tally(1, 1.0, 0.0, 0.0)


class Event:
    """A moment on a GPU's stream that is reached when the test says so."""

    def __init__(self, at_s: float) -> None:
        self.at_s, self.reached = at_s, False

    def query(self) -> bool:
        """Return whether it is reached."""
        return self.reached

    def elapsed_time(self, later: "Event") -> float:
        """Return the milliseconds to another, as torch does."""
        return (later.at_s - self.at_s) * 1e3


def test_on_a_gpu_the_exchange_is_counted_once_it_is_over(monkeypatch: pytest.MonkeyPatch) -> None:
    """The host runs ahead: a step's exchange is told by the stream, one or more steps later, and nobody waits."""
    timer, _, _ = timed()
    events = [Event(at_s) for at_s in (1.0, 1.25, 2.0, 2.5)]
    coming = iter(events)
    monkeypatch.setattr("polythrottle.training.elastic.worker.group._recorded", lambda: next(coming))
    for _ in range(2):
        timer._done_cuda(torch.zeros(1))
        timer.exchanged()
        timer.stepped(1.0, cold=False)
    assert timer.tally.peers_s == 0.0
    events[1].reached = True
    timer.stepped(1.0, cold=False)
    assert timer.tally.peers_s == pytest.approx(0.25)
    events[3].reached = True
    timer.stepped(1.0, cold=False)
    assert timer.tally == Tally(4, 4.0, 0.75, 0.0)


def test_workers_meet_at_the_chiefs_address(monkeypatch: pytest.MonkeyPatch) -> None:
    """One that is told of no chief trains alone; one that is wraps its model, and parts in the end."""
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT", "GLOO_SOCKET_IFNAME"):
        monkeypatch.delenv(name, raising=False)
    model = torch.nn.Linear(2, 1)
    alone = Group(model)
    alone.open()
    assert (alone.rank, alone.size) == (0, 1)
    assert alone.wrapped() is model
    assert alone.highest([3, 1]) == [3, 1]
    assert alone.shared(b"abc", 0) == b"abc"
    assert alone.shared(None, 0) == b""
    alone.close(together=True)
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    for name, word in (("RANK", "0"), ("WORLD_SIZE", "1"), ("MASTER_ADDR", "127.0.0.1"), ("MASTER_PORT", str(port))):
        monkeypatch.setenv(name, word)
    chief = Group(model)
    chief.open()
    try:
        assert torch.distributed.get_backend() == "gloo"
        assert os.environ["GLOO_SOCKET_IFNAME"] == "lo"
        monkeypatch.setattr(torch.nn.parallel, "DistributedDataParallel", lambda given, device_ids: (given, device_ids))
        assert chief.wrapped() == (model, None)
        chief.close(together=False)
        assert torch.distributed.is_initialized()
    finally:
        chief.close(together=True)
    assert not torch.distributed.is_initialized()
