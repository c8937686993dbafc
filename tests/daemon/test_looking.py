"""One look at traffic and board, and the clock that is waited on."""

import threading
from dataclasses import dataclass, field

import pytest

from polythrottle.daemon.observation import Observer, RequestStats, failed_of
from polythrottle.domain.clock import VirtualClock, WakingClock
from polythrottle.domain.errors import DeviceError, PolythrottleError
from polythrottle.domain.measurement import Reading


@dataclass
class Script:
    """A board and its traffic that answer from a list."""

    seen: list[RequestStats | None] = field(default_factory=list)
    readings: list[Reading] = field(default_factory=list)
    uri: str = "script"

    def look(self, now_s: float) -> RequestStats | None:
        """Return the next."""
        return self.seen.pop(0) if self.seen else None

    def read(self) -> Reading:
        """Return the next."""
        return self.readings.pop(0)


def looking(script: Script, peaks: bool = False) -> Observer:
    """Return eyes on a script."""
    return Observer(script, script, 0.0, peaks)  # type: ignore[arg-type]


def test_looks_in_between_are_added_up() -> None:
    """Counts of all looks since the last turn are one sum; the rest is as seen last, the worst as the worst."""
    script = Script(
        [RequestStats(3, 2, 0, 5, 0.1, worst_s=0.3), RequestStats(4, 1, 1, 2, 0.2, worst_s=0.1)], [Reading(1.0, 5.0)]
    )
    eyes = looking(script)
    assert eyes.peek(0.5) == 5
    sight = eyes.look(1.0)
    assert sight.seen == RequestStats(7, 3, 1, 2, 0.2, worst_s=0.3)
    assert sight.rate_per_s == pytest.approx(7.0)
    assert sight.errors == pytest.approx(1 / 3)


@dataclass
class Silent(Script):
    """Traffic that is counted at first, and cannot be seen from then on."""

    error: PolythrottleError | None = None

    def look(self, now_s: float) -> RequestStats | None:
        """Return the next; once there is none fail, where that is asked for."""
        if not self.seen and self.error is not None:
            raise self.error
        return super().look(now_s)


@pytest.mark.parametrize("error", [None, DeviceError("the log is gone")], ids=["down", "fails"])
def test_requests_that_were_counted_outlast_a_look_that_sees_none(error: PolythrottleError | None) -> None:
    """They came in the period; how many wait is unknown then, and the period after knows of no workload."""
    readings = [Reading(at_s, 5.0) for at_s in (1.0, 2.0)]
    eyes = looking(Silent([RequestStats(3, 2, 1, 5), RequestStats(1, 1, 0, 4)], readings, error=error))
    assert [eyes.peek(at_s) for at_s in (0.3, 0.6, 0.9)] == [5, 4, 0]
    seen = eyes.look(1.0).seen
    assert seen is not None
    assert (seen.arrived, seen.answered, seen.failed) == (4, 3, 1)
    assert ("traffic" in eyes.faults) is (error is not None)
    assert eyes.look(2.0).seen is None


@pytest.mark.parametrize(
    ("first", "second", "failed"),
    [
        (RequestStats(1, 4, 1), RequestStats(1, 2, 1), 2),
        (RequestStats(1, 4, 1), RequestStats(1), 1),
        (RequestStats(1, 4), RequestStats(1, 2, 1), None),
        (RequestStats(1, 4, 1), RequestStats(1, 2), None),
        (RequestStats(1), RequestStats(1), None),
    ],
)
def test_failures_are_of_the_same_looks_as_what_ended(
    first: RequestStats, second: RequestStats, failed: int | None
) -> None:
    """Where one look does not know how many of its requests failed, nobody knows it of both."""
    assert failed_of(first, second) == failed


def test_a_rate_over_an_instant_is_unknown() -> None:
    """Three requests in two milliseconds are no 1500 a second; in a tenth of a second they count."""
    eyes = looking(Script([RequestStats(3), RequestStats(3)], [Reading(1.0, 5.0), Reading(2.0, 6.0)]))
    assert eyes.look(0.002).rate_per_s is None
    assert eyes.look(0.102).rate_per_s == pytest.approx(30.0)


def test_power_is_energy_over_the_boards_own_time() -> None:
    """A board whose clock runs apart from the loop's is believed about its own time."""
    script = Script([RequestStats(), RequestStats()], [Reading(100.0, 50.0), Reading(102.0, 74.0)])
    eyes = looking(script)
    assert eyes.look(1.0).power_w is None
    sight = eyes.look(2.0)
    assert (sight.power_w, sight.joules) == (12.0, 24.0)


def test_a_counter_that_begins_anew_is_unknown_not_negative() -> None:
    """After the energy counter has fallen, one period's power is unknown."""
    script = Script([], [Reading(1.0, 50.0), Reading(2.0, 1.0), Reading(3.0, 11.0)])
    eyes = looking(script)
    eyes.look(1.0)
    assert eyes.look(2.0).power_w is None
    assert eyes.look(3.0).power_w == 10.0


def test_the_highest_part_of_a_period_is_its_peak() -> None:
    """With a guard on peaks the board is read at each peek, and the highest mean between two readings counts."""
    script = Script([], [Reading(0.1, 1.0), Reading(0.2, 4.0), Reading(0.3, 5.0)])
    eyes = looking(script, peaks=True)
    eyes.peek(0.1)
    eyes.peek(0.2)
    assert eyes.look(0.3).peak_w == pytest.approx(30.0)


@pytest.mark.parametrize("now_s", [3600.0, -5.0])
def test_a_period_of_a_clock_that_jumped_means_nothing(now_s: float) -> None:
    """Neither rate nor power is made of it."""
    sight = looking(Script([RequestStats(5)], [Reading(now_s, 5.0)])).look(now_s)
    assert sight.jumped
    assert (sight.rate_per_s, sight.power_w) == (None, None)


def test_a_sleep_ends_when_somebody_wakes_it() -> None:
    """An hour's sleep ends at once; what woke before it began counts too."""
    clock = WakingClock()
    begun_s = clock.now()
    threading.Timer(0.05, clock.wake).start()
    clock.sleep(3600.0)
    clock.wake()
    clock.sleep(3600.0)
    assert clock.now() - begun_s < 600.0
    clock.sleep(0.0)
    clock.close()


def test_a_virtual_clock_will_do() -> None:
    """The loop needs nothing of a clock but what any has."""
    clock = VirtualClock()
    assert looking(Script([], [Reading(1.0, 0.0)])).look(clock.now() + 1.0).seen is None


@dataclass
class Failing(Script):
    """A board some of whose readings fail."""

    def read(self) -> Reading:
        """Return the next; one at a time below zero fails."""
        reading = super().read()
        if reading.time_s < 0:
            raise DeviceError("the sensor does not answer")
        return reading


def test_joules_of_a_failed_reading_come_with_the_next() -> None:
    """None is lost, the time they cover is said, and they are not taken for those of the last period alone."""
    failed = Reading(-1.0, 0.0)
    eyes = looking(Failing([], [Reading(1.0, 50.0), failed, failed, Reading(4.0, 86.0), Reading(5.0, 98.0)]))
    eyes.look(1.0)
    assert [eyes.look(at_s).joules for at_s in (2.0, 3.0)] == [None, None]
    assert "sensors" in eyes.faults
    bridged = eyes.look(4.0)
    assert (bridged.joules, bridged.unread_s, bridged.power_w, bridged.own_j) == (36.0, 2.0, 12.0, None)
    after = eyes.look(5.0)
    assert (after.joules, after.unread_s, after.own_j) == (12.0, 0.0, 12.0)


def test_a_clock_that_jumps_while_nothing_can_be_read_bridges_nothing() -> None:
    """How long the time was is not known then, so that nothing is said of its joules."""
    failed = Reading(-1.0, 0.0)
    eyes = looking(Failing([], [Reading(1.0, 50.0), failed, Reading(3.0, 70.0)]))
    eyes.look(1.0)
    assert eyes.look(3600.0).jumped
    assert eyes.look(3601.0).joules is None


def test_a_counter_that_began_anew_is_told_once() -> None:
    """A board that counts how often that was lets the loop know in the look in which it rose."""
    board = Counting([], [Reading(float(at_s), 10.0) for at_s in range(3)])
    eyes = looking(board)
    assert not eyes.look(1.0).anew
    board.anew = 1
    assert eyes.look(2.0).anew
    assert not eyes.look(3.0).anew


@dataclass
class Counting(Script):
    """A board that counts how often its counter began anew."""

    anew: int = 0
