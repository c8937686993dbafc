"""Looks at a device whose driver takes its time: an H200's takes 3 to 30 ms, while the GPU is to be kept busy."""

import json
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from polythrottle.backends import open_device
from polythrottle.board.remote_workload import HostedWindow, Told
from polythrottle.board.work_host import DeskJudge, FarDevice, FarWindow, Outbox
from polythrottle.domain.clock import Clock, SystemClock, VirtualClock
from polythrottle.domain.errors import DeviceError, TrialError
from polythrottle.domain.measurement import Query, Reading, Window
from polythrottle.domain.ports import Sensor
from polythrottle.metering.calibration import self_test
from polythrottle.metering.window import Judge, WindowLog, observe

_STEPS = Sensor(step_s=0.004)


class Slow:
    """A device that answers the first reading late, and each other one only once a query was answered meanwhile."""

    def __init__(self, readings: int = 1000, queries: int = 300) -> None:
        self.clock: Clock = SystemClock()
        self.answer = threading.Condition()
        self.answered = 0
        self.queries = queries
        self.readings = 0
        self.most = readings
        self.alone = 0
        """Readings during which no query was answered."""

    def read(self) -> Reading:
        """Return the number of readings as joules."""
        self.readings += 1
        if self.readings > self.most:
            raise DeviceError("the GPU is gone")
        if self.readings == 1:
            self.clock.sleep(0.02)
        elif self.answered < self.queries:
            with self.answer:
                before = self.answered
                self.alone += not self.answer.wait_for(lambda: self.answered > before, timeout=10.0)
        return Reading(self.clock.now(), float(self.readings))

    def load(self) -> Iterator[Query]:
        """Yield queries of two items, each a millisecond long."""
        while True:
            self.clock.sleep(0.001)
            with self.answer:
                self.answered += 1
                self.answer.notify()
            yield Query(0.001, 2)


class Never(Judge):
    """Goes on to the end, which is 300 queries away."""

    least = 300

    def begin(self, seen: WindowLog) -> None:
        """Do nothing."""

    def due(self, queries: int) -> bool:
        """Return that it never is."""
        return False

    def reached(self, seen: WindowLog) -> bool:
        """Return that it is not."""
        return False

    def gives_up(self, seen: WindowLog) -> bool:
        """Return that it does not."""
        return False


def test_queries_go_on_while_a_slow_device_is_looked_at() -> None:
    """No look waits for itself; each counts whole queries, and the last is taken after the last answer."""
    device = Slow()
    seen = WindowLog(device, _STEPS)
    assert not observe(seen, device.load(), Window(300, 0.01, 300, timeout_s=20.0), Never())
    assert device.readings > 5
    assert not device.alone
    assert seen.looks[-1].queries == len(seen.queries)
    assert [look.items for look in seen.looks] == [2 * look.queries for look in seen.looks]
    assert [look.queries for look in seen.looks] == sorted(look.queries for look in seen.looks)


def test_a_device_that_is_lost_meanwhile_ends_the_window() -> None:
    """What a look beside the queries meets is not lost in its thread."""
    device = Slow(readings=4)
    with pytest.raises(DeviceError, match="the GPU is gone"):
        observe(WindowLog(device, _STEPS), device.load(), Window(1, 5.0, 10**6, timeout_s=20.0), Never())
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("polythrottle-look")]


class Quick(Slow):
    """A device that answers at once, in virtual time."""

    def __init__(self) -> None:
        super().__init__()
        self.clock = VirtualClock()

    def read(self) -> Reading:
        """Return the number of readings as joules."""
        self.readings += 1
        return Reading(self.clock.now(), float(self.readings))


class Costly(Never):
    """Takes a tenth of a second to say that a window does not know enough."""

    asked = 0

    def due(self, queries: int) -> bool:
        """Return that it always is."""
        return True

    def reached(self, seen: WindowLog) -> bool:
        """Return that it is not."""
        self.asked += 1
        seen.device.clock.sleep(0.1)
        return False


def test_a_costly_question_is_asked_seldom() -> None:
    """A device that idles while its window is judged would be measured idling: for a fiftieth of the time at most."""
    device, judge = Quick(), Costly()
    seen = WindowLog(device, _STEPS)
    observe(seen, device.load(), Window(300, 0.01, 30_000, timeout_s=100.0, precision=0.02), judge)
    assert seen.elapsed_s == pytest.approx(30.0, abs=2.0)
    assert 4 <= judge.asked <= 7


class Late:
    """A device whose driver takes three milliseconds for an answer."""

    uri = "late"

    def __init__(self) -> None:
        self.clock = SystemClock()
        self.worked = 0
        self.readings = 0
        self.overlapped = 0
        """Readings during which work was done."""

    def read(self) -> Reading:
        """Return the number of readings as joules."""
        before = self.worked
        self.clock.sleep(0.003)
        self.overlapped += self.worked > before
        self.readings += 1
        return Reading(self.clock.now(), float(self.readings))

    def work(self) -> None:
        """Work for a tenth of a millisecond."""
        self.clock.sleep(0.0001)
        self.worked += 1


def test_a_self_test_loads_a_device_whose_readings_take_long(monkeypatch: pytest.MonkeyPatch) -> None:
    """Work goes on while the driver answers; what waited for each answer would be measured idling."""
    monkeypatch.setattr("polythrottle.metering.calibration.uncalibrated", lambda device: Sensor())
    device: Any = Late()
    tested = self_test(device, device.work, 0.3)
    assert device.overlapped > 5
    assert len(tested.readings) > 20
    times = [time_s for time_s, _ in tested.readings]
    assert times == sorted(times)


def test_work_that_fails_ends_a_self_test_at_once() -> None:
    """Also while the device is looked at beside it."""
    device: Any = Late()

    def work() -> None:
        raise TrialError("the model raised")

    with pytest.raises(TrialError, match="the model raised"):
        self_test(device, work, 0.3)
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("ThreadPool")]


class Far(FarDevice):
    """A device on a board, whose driver takes long for an answer."""

    def __init__(self) -> None:
        self.clock = SystemClock()
        self.raw = {}
        self.readings = 0

    def read(self) -> Reading:
        """Return the number of readings as joules."""
        self.clock.sleep(0.005)
        self.readings += 1
        self.raw = {
            "time_s": self.clock.now(),
            "energy_j": float(self.readings),
            "temperature_c": None,
            "clocks_hz": {},
            "throttled": False,
        }
        return Reading(self.raw["time_s"], self.raw["energy_j"])


def test_a_desk_is_told_of_looks_that_were_taken_beside_the_queries() -> None:
    """In the order in which they came, with as many queries before each as had been answered there."""
    outbox, device, window = Outbox(), Far(), Window(300, 0.01, 300, timeout_s=20.0)
    there = FarWindow(device, _STEPS, outbox, True)
    observe(there, Slow().load(), window, DeskJudge(window, 300, threading.Event()))
    outbox.tell(["over", {}])
    events = json.loads(json.dumps(outbox.take(0.0)))
    while more := outbox.take(0.0):
        events += json.loads(json.dumps(more))
    told = Told(lambda message: {"events": [events.pop(0) for _ in range(min(7, len(events)))]})
    board: Any = open_device("sim:jetson-nano")
    seen = HostedWindow(board, _STEPS, told=told)
    assert not observe(seen, seen.load(), window, Never())
    assert len(seen.queries) == 300
    assert len(seen.looks) == len(there.looks) == device.readings
    assert [look.reading.energy_j for look in seen.looks] == [look.reading.energy_j for look in there.looks]
    assert all(abs(ours.queries - look.queries) <= 1 for ours, look in zip(seen.looks, there.looks, strict=True))
    assert there.looks[3].queries > there.looks[2].queries + 1  # several were answered while it looked
