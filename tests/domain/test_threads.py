"""Threads whose start fails rather than hangs."""

import threading

import pytest

from polythrottle.domain import clock
from polythrottle.domain.clock import Thread
from polythrottle.domain.errors import DeviceError


def test_a_thread_runs_and_is_joined() -> None:
    """As Python's own."""
    ran = threading.Event()
    thread = Thread(target=ran.set)
    thread.start()
    thread.join()
    assert ran.is_set()


def test_a_thread_that_dies_before_its_first_sign_of_life_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """As one does that has no memory for its first call; Python's own waits for good."""
    monkeypatch.setattr(clock, "_PATIENCE_S", 0.01)
    monkeypatch.setattr(Thread, "_bootstrap", lambda self: None)
    # Python lists it for good, so its name is none that other tests look for.
    thread = Thread(target=print, name="stillborn")
    with pytest.raises(DeviceError, match="cannot start the thread stillborn: no memory"):
        thread.start()
    thread.join()
