"""One thread that looks for several devices: what one of them meets is nobody else's."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator

import pytest

from polythrottle.backends.power import BackgroundSampler
from polythrottle.domain.clock import SystemClock
from polythrottle.domain.errors import DeviceError

PATIENCE_S = 20.0
"""How long to wait for what must come; nothing is said of how soon it does."""


@pytest.fixture
def sampler(request: pytest.FixtureRequest) -> Iterator[Callable[[Callable[[], None]], BackgroundSampler]]:
    """Return what makes a sampler that shares its thread with the others of the test, and stop them afterwards."""
    made: list[BackgroundSampler] = []

    def make(look: Callable[[], None]) -> BackgroundSampler:
        found = BackgroundSampler(look, 0.002, SystemClock(), request.node.name, shared=True)
        made.append(found)
        found.start()
        return found

    yield make
    for each in made:
        each.stop()
    assert request.node.name not in {thread.name for thread in threading.enumerate()}


Make = Callable[[Callable[[], None]], BackgroundSampler]


def looked(again: threading.Event) -> bool:
    """Return whether there is a look from now on."""
    again.clear()
    return again.wait(PATIENCE_S)


def test_several_share_a_thread(sampler: Make, request: pytest.FixtureRequest) -> None:
    """All are looked at, by one."""
    first = threading.Event()
    second = threading.Event()
    sampler(first.set)
    sampler(second.set)
    assert looked(first)
    assert looked(second)
    assert [thread.name for thread in threading.enumerate()].count(request.node.name) == 1


def test_the_first_look_is_at_once_where_that_is_asked() -> None:
    """However soon the thread begins: its next look would be a period later, which here nobody lives to see."""
    for _ in range(20):
        first = threading.Event()
        alone = BackgroundSampler(first.set, 1e6, SystemClock(), "at once", at_once=True)
        alone.start()
        assert first.wait(PATIENCE_S)
        alone.stop()


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
@pytest.mark.parametrize("error", [DeviceError("gone"), ValueError("a fault of ours")])
def test_an_error_ends_the_looks_of_one_alone(sampler: Make, error: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    """The other GPUs' slowdowns go on being seen, and a fault that no driver has told is told."""
    told: list[object] = []
    monkeypatch.setattr(threading, "excepthook", lambda fault: told.append(fault.exc_value))
    met = threading.Event()
    other = threading.Event()

    def fail() -> None:
        met.set()
        raise error

    sampler(fail)
    sampler(other.set)
    assert met.wait(PATIENCE_S)
    met.clear()
    assert looked(other)
    assert looked(other)
    assert not met.is_set()
    assert told == ([] if isinstance(error, DeviceError) else [error])


def test_whose_driver_hangs_holds_up_nobody_else(sampler: Make) -> None:
    """A GPU that answers stops, and so is put back, while another that stops too does not answer."""
    hangs = threading.Event()
    released = threading.Event()

    def hang() -> None:
        hangs.set()
        released.wait()

    lost = sampler(hang)
    sound = sampler(lambda: None)
    assert hangs.wait(PATIENCE_S)
    waits = threading.Thread(target=lost.stop, daemon=True)
    leaves = threading.Thread(target=sound.stop, daemon=True)
    waits.start()
    waits.join(0.05)
    leaves.start()
    try:
        leaves.join(PATIENCE_S)
        assert not leaves.is_alive()
        assert waits.is_alive()
    finally:
        released.set()
        waits.join()
        leaves.join()


def test_a_fork_in_the_middle_of_a_look_can_stop_and_begin_anew(sampler: Make) -> None:
    """The child has the locks of a thread that it has not."""
    begun = threading.Event()
    released = threading.Event()
    looks = threading.Event()

    def look() -> None:
        looks.set()
        begun.set()
        released.wait()

    device = sampler(look)
    assert begun.wait(PATIENCE_S)
    child = os.fork()
    if child == 0:
        ends = threading.Timer(PATIENCE_S, os._exit, (3,))
        ends.daemon = True
        ends.start()
        released.set()
        device.stop()
        looks.clear()
        device.start()
        os._exit(0 if looks.wait(PATIENCE_S / 2) else 4)
    try:
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    finally:
        released.set()
