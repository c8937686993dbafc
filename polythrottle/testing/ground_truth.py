"""Sensors with a known truth: a device whose power is known at every instant, read through a sensor that distorts it.

For whoever wants to know whether an interval says what it claims: `Rig` serves queries whose mean latency, percentiles
and energy are known beforehand, and `SENSORS` are the ways in which real sensors fall short.
"""

from bisect import bisect_right
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import TracebackType

import numpy as np
from numpy.typing import NDArray
from typing_extensions import Self

from polythrottle.backends.meters.live_meter import power_sensor
from polythrottle.domain.clock import VirtualClock
from polythrottle.domain.measurement import EnergyKind, Query, Reading
from polythrottle.domain.ports import EXACT_SENSOR, Sensor
from polythrottle.domain.space import OperatingPoint, SearchSpace

Array = NDArray[np.float64]
_BUSY = 0.6
_HIGH = 2.0
"""The share of a query in which it draws more, and how much more than in the rest."""


@dataclass(frozen=True)
class Traffic:
    """What queries are like: lognormal, some of them stragglers that come in clusters, with power that varies slowly.

    Args:
        usual_s: Median of a query that does not straggle.
        spread: Deviation of its logarithm.
        straggle: Share of the queries that straggle.
        stay: Chance that the query after a straggler is one too.
        longer: By what a straggler takes longer at least, as a fraction; as much more comes on average.
        power_w: Mean power.
        wander: Deviation of the power of single queries, as a fraction.
        held: Its correlation from one query to the next.
        drift_per_s: By what fraction power rises in a second.
    """

    usual_s: float = 0.011
    spread: float = 0.02
    straggle: float = 0.02
    stay: float = 0.74
    longer: float = 0.1
    power_w: float = 20.0
    wander: float = 0.05
    held: float = 0.8
    drift_per_s: float = 0.0

    def latencies_s(self, rng: np.random.Generator, count: int) -> Array:
        """Return the latencies of queries in a row."""
        late = _clusters(rng, count, self.straggle, self.stay)
        longer = self.longer * (1 + rng.standard_exponential(count))
        return np.asarray(self.usual_s * np.exp(self.spread * rng.standard_normal(count)) * (1 + longer * late))

    @property
    def mean_s(self) -> float:
        """The mean latency of endlessly many."""
        return float(self.usual_s * np.exp(self.spread**2 / 2) * (1 + 2 * self.longer * self.straggle))

    @property
    def energy_j(self) -> float:
        """The mean energy of a query, without drift."""
        return self.power_w * self.mean_s


def _clusters(rng: np.random.Generator, count: int, share: float, stay: float) -> NDArray[np.bool_]:
    chance = rng.random(count).tolist()
    found = np.zeros(count, dtype=bool)
    enter = share * (1 - stay) / (1 - share)
    late = False
    for i, value in enumerate(chance):
        found[i] = late = value < (stay if late else enter)
    return found


@dataclass(frozen=True)
class TrueEnergy:
    """The true running total of a rig: exact at every instant.

    Args:
        time_s: Where power changes, rising, shape (changes,).
        total_j: The total there.
    """

    time_s: Array
    total_j: Array

    def at(self, time_s: Array) -> Array:
        """Return the true total at some times."""
        return np.asarray(np.interp(time_s, self.time_s, self.total_j))

    @property
    def end_s(self) -> float:
        """Until when it is known."""
        return float(self.time_s[-1])


Shown = tuple[Array, Array]
"""When the total a sensor shows changes, and to what."""


@dataclass(frozen=True)
class Distortion:
    """A way in which a sensor falls short.

    Args:
        shows: Returns what it shows of a course, from a random phase between 0 and 1 on; None if it shows the truth.
        sensor: What is known of it.
        straight: Whether the total grows between two changes, as where power is integrated by trapezoids.
    """

    shows: Callable[[TrueEnergy, float], Shown] | None = None
    sensor: Sensor = field(default_factory=Sensor)
    straight: bool = False


def stepping(step_s: float) -> Distortion:
    """Return a counter that moves now and then."""

    def shows(course: TrueEnergy, phase: float) -> Shown:
        at_s = np.arange(phase * step_s, course.end_s, step_s)
        return at_s, course.at(at_s)

    return Distortion(shows, Sensor(step_s=step_s))


def summed(parts: int, step_s: float) -> Distortion:
    """Return the sum of several counters that move now and then, each when it likes, as a group of GPUs has them."""

    def shows(course: TrueEnergy, phase: float) -> Shown:
        phases = np.random.default_rng(int(phase * 2**32)).random(parts)
        moves_s = [np.arange(each * step_s, course.end_s, step_s) for each in phases]
        gains_j = [np.diff(course.at(at_s), prepend=0.0) / parts for at_s in moves_s]
        at_s = np.concatenate(moves_s)
        gain_j = np.concatenate(gains_j)
        order = np.argsort(at_s)
        return at_s[order], np.cumsum(gain_j[order])

    return Distortion(shows, Sensor(step_s=step_s))


def looking(duty: float, period_s: float) -> Distortion:
    """Return a counter of what a sensor sees that looks for a part of each period only."""

    def shows(course: TrueEnergy, phase: float) -> Shown:
        from_s = np.arange(phase * period_s, course.end_s - period_s, period_s)
        seen_j = (course.at(from_s + duty * period_s) - course.at(from_s)) / duty
        return from_s + period_s, np.cumsum(seen_j)

    return Distortion(shows, Sensor(step_s=period_s, duty=duty, period_s=period_s))


def polling(period_s: float, *, average_s: float = 0.001, lag_s: float = 0.0, quantum_w: float = 0.0) -> Distortion:
    """Return power readings added up, each for the time since the last.

    Args:
        period_s: Between two readings.
        average_s: What one averages over.
        lag_s: Time constant with which it follows.
        quantum_w: What it is rounded to.
    """

    def shows(course: TrueEnergy, phase: float) -> Shown:
        at_s = np.arange(phase * period_s, course.end_s, period_s)
        if lag_s:
            power_w = np.interp(at_s, *_followed(course, lag_s))
        else:
            power_w = (course.at(at_s) - course.at(at_s - average_s)) / average_s
        if quantum_w:
            power_w = quantum_w * np.round(power_w / quantum_w)
        return at_s, np.cumsum(power_w * period_s)

    averaged_s = average_s if average_s > 0.001 else 0.0
    return Distortion(shows, Sensor(period_s, average_s=averaged_s, lag_s=lag_s, quantum_w=quantum_w))


def averaging(period_s: float, read_s: float = 0.1) -> Distortion:
    """Return power readings integrated by trapezoids, each the mean over a period, renewed once a period.

    Args:
        period_s: What a value is the mean over, and for how long it stands.
        read_s: Between two readings of it.
    """

    def shows(course: TrueEnergy, phase: float) -> Shown:
        end_s = np.arange(phase * period_s, course.end_s, period_s)
        mean_w = (course.at(end_s) - course.at(end_s - period_s)) / period_s
        at_s = np.arange(0.0, course.end_s, read_s)
        power_w = mean_w[np.maximum(0, np.searchsorted(end_s, at_s, side="right") - 1)]
        return at_s, np.concatenate([[0.0], np.cumsum((power_w[1:] + power_w[:-1]) / 2 * read_s)])

    return Distortion(shows, Sensor(step_s=period_s, average_s=period_s), straight=True)


def asked(period_s: float, *, quantum_w: float = 0.0, quantum_j: float = 0.0) -> Distortion:
    """Return a meter that is asked twice in each of its periods, as `polythrottle.backends.meters.LiveMeter` asks one.

    Args:
        period_s: How often it is new: the mean of that time, or its counter.
        quantum_w: What its power is rounded to.
        quantum_j: Of one count; if it is above 0 its counter is taken, else its power is added up.
    """

    def shows(course: TrueEnergy, phase: float) -> Shown:
        renewed_s = np.arange(phase * period_s, course.end_s, period_s)
        asked_s = np.arange((0.37 + phase) % 1 * period_s / 2, course.end_s, period_s / 2)
        newest = np.maximum(0, np.searchsorted(renewed_s, asked_s, side="right") - 1)
        if quantum_j:
            return asked_s, (quantum_j * np.floor(course.at(renewed_s) / quantum_j))[newest]
        mean_w = (course.at(renewed_s) - course.at(renewed_s - period_s)) / period_s
        power_w = (quantum_w * np.round(mean_w / quantum_w) if quantum_w else mean_w)[newest]
        return asked_s, np.concatenate([[0.0], np.cumsum((power_w[1:] + power_w[:-1]) / 2 * np.diff(asked_s))])

    if quantum_j:
        return Distortion(shows, Sensor(step_s=period_s, quantum_j=quantum_j, counts=True))
    return Distortion(shows, power_sensor(period_s, period_s, quantum_w=quantum_w))


def _followed(course: TrueEnergy, lag_s: float) -> Shown:
    """Return what a sensor shows that follows the power with a lag, and when."""
    grid_s = np.arange(0.0, course.end_s, lag_s / 25)
    power_w = np.diff(course.at(grid_s)) / np.diff(grid_s)
    keep = np.exp(-1 / 25)
    shown = []
    now_w = float(power_w[0])
    for value in power_w.tolist():
        now_w = keep * now_w + (1 - keep) * value
        shown.append(now_w)
    return grid_s[1:], np.array(shown)


@dataclass(frozen=True)
class SensorFault:
    """Something that goes wrong with a sensor once, at a moment.

    Args:
        at_s: When.
        still_s: For how long the total stands still from then on; inf if it never moves again.
        lost: Whether the energy of that time is lost, or there at once afterwards.
        by_j: By how much the total jumps at that moment; negative if it falls.
    """

    at_s: float
    still_s: float = 0.0
    lost: bool = True
    by_j: float = 0.0

    def shown(self, total: Callable[[float], float], time_s: float) -> float:
        """Return what the sensor shows at a time.

        Args:
            total: Returns what it would show without the fault.
            time_s: When it is looked at.
        """
        if time_s < self.at_s:
            return total(time_s)
        end_s = self.at_s + self.still_s
        if time_s < end_s:
            return total(self.at_s) + self.by_j
        lost_j = 0.0
        if self.still_s and self.lost:
            lost_j = total(end_s) - total(self.at_s)
        return total(time_s) - lost_j + self.by_j


SENSORS: Mapping[str, Distortion] = {
    "exact": Distortion(sensor=EXACT_SENSOR),
    "counter in 100 ms steps": stepping(0.1),
    "eight counters in 100 ms steps": summed(8, 0.1),
    "25 of every 100 ms": looking(0.25, 0.1),
    "rounded to 1 W, 10 Hz": polling(0.1, average_s=0.1, quantum_w=1.0),
    "1 s average, 10 Hz": polling(0.1, average_s=1.0),
    "lag 0.5 s, 10 Hz": polling(0.1, lag_s=0.5),
    "1 Hz": polling(1.0),
    "430 ms average, renewed so often": averaging(0.43),
}
"""Ways in which real sensors fall short, by name."""
METERS: Mapping[str, Distortion] = {
    "plug: mean of each second, 0.1 W": asked(1.0, quantum_w=0.1),
    "plug: mean of each second, 1 W": asked(1.0, quantum_w=1.0),
    "plug: counter of 3.6 J, each second": asked(1.0, quantum_j=3.6),
    "controller: mean of 5 s, 1 W": asked(5.0, quantum_w=1.0),
}
"""Meters at the wall, asked twice in each of their periods, by name."""


class Rig:
    """A device and its only workload, whose truth is known; satisfies the ports ``Device`` and ``Workload``.

    Args:
        traffic: What its queries are like.
        distortion: How its sensor falls short.
        seed: Of the queries and of the sensor's phase.
        count: How many queries it can serve.
        fault: What goes wrong with its sensor, if anything.
    """

    uri = "rig"
    title = "a rig of known truth"
    energy_kind = EnergyKind.SIMULATED
    boundary = "the rig"
    presets: Mapping[str, OperatingPoint] = {}

    def __init__(
        self, traffic: Traffic, distortion: Distortion, seed: int, count: int = 3000, fault: SensorFault | None = None
    ) -> None:
        rng = np.random.default_rng(seed)
        self.clock = VirtualClock()
        self.traffic = traffic
        self.fault = fault
        self._latencies_s = traffic.latencies_s(rng, count)
        self._ends_s = np.cumsum(self._latencies_s)
        self._course = self._drawn(rng)
        shown = None
        if distortion.shows:
            shown = distortion.shows(self._course, float(rng.random()))
        self._shown = shown
        self._straight = distortion.straight
        self._served = 0

    def _drawn(self, rng: np.random.Generator) -> TrueEnergy:
        starts_s = self._ends_s - self._latencies_s
        wander = _wander(rng, len(starts_s), self.traffic.held)
        warmer = 1 + self.traffic.drift_per_s * (starts_s + self._latencies_s / 2)
        query_j = self.traffic.power_w * self._latencies_s * (1 + self.traffic.wander * wander) * warmer
        high = _BUSY * _HIGH / (_BUSY * _HIGH + 1 - _BUSY)
        time_s = np.column_stack([starts_s + _BUSY * self._latencies_s, self._ends_s]).ravel()
        gain_j = np.column_stack([high * query_j, (1 - high) * query_j]).ravel()
        return TrueEnergy(np.concatenate([[0.0], time_s]), np.concatenate([[0.0], np.cumsum(gain_j)]))

    @property
    def space(self) -> SearchSpace:
        """One point, without knobs."""
        return SearchSpace.grid((), {})

    def apply(self, point: OperatingPoint) -> None:
        """Do nothing; there is nothing to set."""

    def read(self) -> Reading:
        """Return what the sensor shows now."""
        return Reading(self.clock.now(), self.read_at(self.clock.now()))

    def read_at(self, time_s: float) -> float:
        """Return the total the sensor shows at a time, in joules."""
        if self.fault is None:
            return self._total_j(time_s)
        return self.fault.shown(self._total_j, time_s)

    def _total_j(self, time_s: float) -> float:
        if self._shown is None:
            return float(self._course.at(np.array(time_s)))
        at_s, total_j = self._shown
        if self._straight:
            return float(np.interp(time_s, at_s, total_j))
        place = int(np.searchsorted(at_s, time_s, side="right")) - 1
        if place < 0:
            return 0.0
        return float(total_j[place])

    def latencies_s(self, queries: int) -> Array:
        """Return the latencies of the last queries that were served."""
        return self._latencies_s[self._served - queries : self._served]

    def query(self) -> Query:
        """Serve the next query."""
        self.clock.sleep(float(self._ends_s[self._served]) - self.clock.now())
        latency_s = float(self._latencies_s[self._served])
        self._served += 1
        return Query(latency_s)

    def true_energy_j(self, from_s: float, until_s: float) -> float:
        """Return the mean energy of a query between two times: of endlessly many rigs of this kind."""
        return self.traffic.energy_j * (1 + self.traffic.drift_per_s * (from_s + until_s) / 2)

    def restore(self) -> None:
        """Do nothing."""

    def close(self) -> None:
        """Do nothing."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...


def _wander(rng: np.random.Generator, count: int, held: float) -> Array:
    """Return an autoregressive series of mean 0 and deviation 1."""
    fresh = rng.standard_normal(count).tolist()
    now = float(rng.standard_normal())
    found = []
    for value in fresh:
        now = held * now + np.sqrt(1 - held * held) * value
        found.append(now)
    return np.array(found)


class IdleServer:
    """A device that waits for requests, and its only workload; satisfies the ports ``Device`` and ``Workload``.

    Its sensor is exact, or moves in steps; it idles at a power, and a request takes an energy besides that varies.

    Args:
        seed: Of the requests.
        service_s: Median time a request takes, lognormal.
        spread: Deviation of its logarithm.
        idle_w: Power without work.
        request_j: What a request takes besides, on average.
        wander: Deviation of that, as a fraction, correlated from one to the next by 0.8.
        step_s: How often the total moves; 0 if at every look.
    """

    uri = "rig"
    title = "a rig of known truth"
    energy_kind = EnergyKind.SIMULATED
    boundary = "the rig"
    presets: Mapping[str, OperatingPoint] = {}

    def __init__(
        self,
        seed: int,
        *,
        service_s: float = 0.01,
        spread: float = 0.1,
        idle_w: float = 10.0,
        request_j: float = 0.2,
        wander: float = 0.05,
        step_s: float = 0.0,
    ) -> None:
        self.clock = VirtualClock()
        self._rng = np.random.default_rng(seed)
        self._step_s = step_s
        self._service_s = service_s
        self._spread = spread
        self._idle_w = idle_w
        self._request_j = request_j
        self._deviation = wander
        self._state = float(self._rng.standard_normal())
        self._times_s = [0.0]
        self._totals_j = [0.0]

    @property
    def space(self) -> SearchSpace:
        """One point, without knobs."""
        return SearchSpace.grid((), {})

    def apply(self, point: OperatingPoint) -> None:
        """Do nothing; there is nothing to set."""

    def query(self) -> Query:
        """Serve a request."""
        start_s = self.clock.now()
        latency_s = self._service_s * float(np.exp(self._spread * self._rng.standard_normal()))
        self._state = 0.8 * self._state + 0.6 * float(self._rng.standard_normal())
        self.clock.sleep(latency_s)
        spent_j = self._request_j * (1 + self._deviation * self._state)
        self._times_s += [start_s, self.clock.now()]
        self._totals_j += [self._totals_j[-1], self._totals_j[-1] + spent_j]
        return Query(latency_s)

    def read(self) -> Reading:
        """Return what the sensor shows now."""
        now_s = self.clock.now()
        if not self._step_s:
            seen_s = now_s
        else:
            seen_s = self._step_s * float(np.floor(now_s / self._step_s))
        return Reading(now_s, self.total_j(seen_s))

    def total_j(self, time_s: float) -> float:
        """Return the true total at a time that is over."""
        place = bisect_right(self._times_s, time_s)
        near = slice(max(0, place - 1), place + 1)
        return self._idle_w * time_s + float(np.interp(time_s, self._times_s[near], self._totals_j[near]))

    def true_energy_j(self, rate_per_s: float) -> float:
        """Return the mean energy of a request in the long run, where they come at a rate that can be served."""
        return self._idle_w / rate_per_s + self._request_j

    def restore(self) -> None:
        """Do nothing."""

    def close(self) -> None:
        """Do nothing."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...
