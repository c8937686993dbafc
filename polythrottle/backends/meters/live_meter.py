"""A meter that is asked again and again in a thread of its own, so that whoever reads its joules never waits for it.

A source answers with watts, a running total of joules, or both, and may be slow, silent or wrong. What it said last is
kept here as a running total that never falls. One that says nothing for a while spoils the window, not the program.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Protocol, TypeVar

from polythrottle.domain.clock import Clock, SystemClock, Thread
from polythrottle.domain.errors import DeviceError, InvalidInput, PolythrottleError, TrialError
from polythrottle.domain.measurement import EnergyKind
from polythrottle.domain.ports import Sensor

_SILENT_S = 5.0
_SILENT_STEPS = 4.0
_FIRST_S = 15.0
"""A meter is silent after so many seconds, or steps, without an answer; the first one may take longer."""
_USUAL_S = 0.05
_SOONEST_S = 0.01
_LEAST_DUTY = 0.01
_MOST_W = 1e6
_SKEWED = 2.0
_SKEW_SPAN_S = 3.0
T = TypeVar("T")


@dataclass(frozen=True)
class Sample:
    """What a source said at one moment.

    Args:
        power_w: Watts; None if it did not say.
        energy_j: Running total of joules since an arbitrary start; None if it has none.
        time_s: When it was taken, by the source's own clock, where it says; only differences count.
    """

    power_w: float | None = None
    energy_j: float | None = None
    time_s: float | None = None


class Source(Protocol):
    """Where a meter's samples come from. All calls come from one thread at a time."""

    @property
    def boundary(self) -> str:
        """What its joules cover, and where they come from."""

    @property
    def sensor(self) -> Sensor:
        """What is known, or assumed, of how often it moves, averages and lags, and how it rounds."""

    @property
    def counts(self) -> bool:
        """Whether its running total is taken; else its watts are."""

    def sample(self) -> tuple[Sample, ...]:
        """Return what is new, in order; nothing if nothing is. Comes back within some seconds.

        Raises:
            DeviceError: If it cannot be had, or makes no sense.
        """

    def close(self) -> None:
        """Let go of what it holds; the next sample opens it again."""


def power_sensor(
    step_s: float = 0.0, average_s: float = 0.0, *, lag_s: float = 0.0, quantum_w: float = 0.0, source: str = ""
) -> Sensor:
    """Return the sensor of a meter that shows power; what lies between two looks is not seen unless it averages.

    Args:
        step_s: How often there is a new power; 0 if at every look.
        average_s: Over what time it is the mean.
        lag_s: Time constant with which it follows.
        quantum_w: What it is rounded to.
        source: Where that is from.
    """
    apart_s = step_s or _USUAL_S
    duty = min(1.0, max(_LEAST_DUTY, average_s / apart_s))
    return Sensor(
        step_s=step_s,
        average_s=average_s,
        lag_s=lag_s,
        duty=duty,
        period_s=apart_s,
        quantum_w=quantum_w,
        source=source,
    )


class LiveMeter:
    """A source as the ports ``EnergyMeter``, ``PowerMeter``, ``Sensing`` and ``Sampled``.

    Within `sampling` a thread asks the source and reading costs nothing; outside it every reading asks, and waits for
    the answer, as is right where time is virtual.

    Args:
        uri: What opens it again, such as ``shelly:192.168.1.5``.
        source: Which is asked.
        known: Replaces what the source says of its sensor: ``step``, ``average`` and ``lag`` in seconds.
    """

    energy_kind = EnergyKind.MEASURED

    def __init__(self, uri: str, source: Source, known: dict[str, float] | None = None) -> None:
        self.uri = uri
        self._source = source
        self.clock: Clock = SystemClock()
        self._known = {f"{name}_s": value for name, value in (known or {}).items()}
        self._guard = threading.Lock()
        # One call of the source at a time; the guard above is never held while a meter is waited for.
        self._turn = threading.Lock()
        self._users = 0
        self._counts_s = 0.0
        self._thread: Thread | None = None
        self._ended = threading.Event()
        self._first = threading.Event()
        self._forget()

    def _forget(self) -> None:
        self._total_j = 0.0
        self._moved_s = -math.inf
        self._last: Sample | None = None
        self._last_s = 0.0
        self._span_s = [0.0, 0.0]
        self._failure = ""
        self._fault = ""

    @property
    def boundary(self) -> str:
        """What its joules cover, and which meter it is."""
        return self._source.boundary

    @property
    def counts(self) -> bool:
        """Whether joules are the meter's own running total; else its watts are integrated."""
        return self._source.counts

    @property
    def sensor(self) -> Sensor:
        """What is known or assumed of it; the boundary of a factor does not apply."""
        sensor = self._source.sensor
        if self._counts_s > sensor.step_s:  # how long one count of its total lasts
            sensor = replace(sensor, step_s=self._counts_s)
        if not self._known:
            return sensor
        step_s, average_s, lag_s = (self._known.get(f"{name}_s", getattr(sensor, f"{name}_s")) for name in _WORDS)
        if sensor.counts:
            return replace(sensor, step_s=step_s, average_s=average_s, lag_s=lag_s)
        told = power_sensor(step_s, average_s, lag_s=lag_s, quantum_w=sensor.quantum_w, source=sensor.source)
        return replace(told, quantum_j=sensor.quantum_j)

    @property
    def step_s(self) -> float:
        """How often it moves, in seconds."""
        return self.sensor.step_s

    @property
    def average_s(self) -> float:
        """Over what time a power is the mean, in seconds."""
        return self.sensor.average_s

    @property
    def patience_s(self) -> float:
        """How long it may say nothing, in seconds."""
        return max(_SILENT_S, _SILENT_STEPS * self.sensor.step_s)

    def energy_j(self) -> float:
        """Return the joules so far.

        Raises:
            TrialError: If the meter has been silent, or its counter fell; says so once more only if it happens again.
            DeviceError: Outside `sampling`, if it has never answered.
        """
        self._see_that_it_lives()
        with self._guard:
            return self._total_j

    def power_w(self) -> tuple[float, float]:
        """Return when the newest power was seen, and watts.

        Raises:
            InvalidInput: If the meter shows no power.
            TrialError: If it has been silent.
            DeviceError: Outside `sampling`, if it has never answered.
        """
        self._see_that_it_lives()
        with self._guard:
            if self._last is None:
                raise TrialError(f"the meter {self.uri} has said nothing yet")
            if self._last.power_w is None:
                raise InvalidInput(f"the meter {self.uri} counts joules and shows no power")
            return self._last_s, self._last.power_w

    def _see_that_it_lives(self) -> None:
        if self._thread is None:
            self._ask_now()
        with self._guard:
            fault = self._fault
            self._fault = ""
            silent_s = self.clock.now() - self._moved_s
            failure = self._failure
        if fault:
            raise TrialError(fault)
        if silent_s > self.patience_s:
            why = f": {failure}" if failure else ""
            raise TrialError(f"the meter {self.uri} has said nothing for {silent_s:.0f} s{why}")

    def probe(self) -> None:
        """See that the source can be read; what follows a log has nothing to say yet.

        Raises:
            DeviceError: If it cannot, or says what is neither watts nor joules.
        """
        self._ask_now()
        sensor = self._source.sensor
        last = self._last
        if sensor.counts and last is not None and last.power_w:
            self._counts_s = sensor.quantum_j / last.power_w
        self._source.close()
        self._forget()

    def _ask_now(self) -> None:
        """Ask the source in this thread's time, but not for longer than a first answer may take."""
        found = _within(_FIRST_S, self._asked, f"the meter {self.uri}")
        if found is not None:
            kind = DeviceError if self._last is None else TrialError  # one that answered before may answer again
            raise kind(f"the meter {self.uri} cannot be read: {found}")

    def _asked(self) -> str | None:
        """Ask once and take what comes; return what went wrong, None if nothing did."""
        with self._turn:
            begin_s = self.clock.now()
            try:
                samples = self._source.sample()
                for sample in samples:
                    # The meter looked at some moment between the question and its answer: the middle errs least.
                    self._take(sample, (begin_s + self.clock.now()) / 2)
            except PolythrottleError as err:
                self._source.close()
                with self._guard:
                    self._failure = str(err)
                return str(err)
            return None

    def _take(self, sample: Sample, seen_s: float) -> None:
        """Add a sample to the total.

        Raises:
            DeviceError: If it makes no sense.
        """
        _see_that_it_can_be(sample)
        with self._guard:
            last = self._last
            self._last = sample
            gone_s = seen_s - self._last_s
            self._last_s = self._moved_s = seen_s
            self._failure = ""
            if last is not None:
                self._total_j += self._gained_j(last, sample, gone_s)
        self._first.set()

    def _gained_j(self, last: Sample, now: Sample, gone_s: float) -> float:
        if self._source.counts:
            if last.energy_j is None or now.energy_j is None:
                return 0.0
            if now.energy_j < last.energy_j:
                self._fault = (
                    f"the counter of the meter {self.uri} fell from {last.energy_j:.6g} J to {now.energy_j:.6g} J: it "
                    f"was reset or started again, so the window tells nothing"
                )
                return 0.0
            return now.energy_j - last.energy_j
        if last.power_w is None or now.power_w is None:
            return 0.0
        if last.time_s is not None and now.time_s is not None:
            gone_s = self._own_s(last.time_s, now.time_s, gone_s)
        return (last.power_w + now.power_w) / 2 * gone_s

    def _own_s(self, last_s: float, now_s: float, gone_s: float) -> float:
        """Return how much time passed by the meter's own clock, if that goes about as fast as ours."""
        if now_s <= last_s:
            self._fault = f"the clock of the meter {self.uri} went back by {last_s - now_s:.3g} s"
            return 0.0
        own_s, real_s = self._span_s
        self._span_s = [own_s + now_s - last_s, real_s + gone_s]
        own_s, real_s = self._span_s
        if real_s > _SKEW_SPAN_S and not 1 / _SKEWED < own_s / real_s < _SKEWED:
            self._fault = (
                f"the times of the meter {self.uri} went on by {own_s:.3g} s in {real_s:.3g} s; name their unit in the "
                f"column's name, such as time_ms"
            )
        return now_s - last_s

    @contextmanager
    def sampling(self) -> Iterator[None]:
        """Ask the source in a thread of its own, from its first answer on.

        Raises:
            DeviceError: If the first answer does not come.
        """
        with self._guard:
            self._users += 1
            first = self._users == 1
        try:
            if first:
                self._start()
            yield
        finally:
            with self._guard:
                self._users -= 1
                last = self._users == 0
            if last:
                self._stop()

    def close(self) -> None:
        """Let go of what reading outside `sampling` has opened."""
        with self._turn:
            self._source.close()

    def _start(self) -> None:
        self._forget()
        self._ended.clear()
        self._first.clear()
        thread = Thread(target=self._run, name="polythrottle-meter", daemon=True)
        thread.start()
        self._thread = thread
        self._first.wait(_FIRST_S)
        if self._last is None:
            why = self._failure or f"it said nothing in {_FIRST_S:g} s"
            self._stop()
            raise DeviceError(f"the meter {self.uri} cannot be read: {why}")

    def _stop(self) -> None:
        self._ended.set()
        thread = self._thread
        self._thread = None
        if thread is not None:
            # A meter that hangs is not waited for any longer.
            thread.join(_SILENT_S)
        self._source.close()

    def _run(self) -> None:
        # Twice for each new value of the sensor, so that none goes by unseen.
        apart_s = max(_SOONEST_S, (self.sensor.step_s or _USUAL_S) / 2)
        due_s = self.clock.now()
        while not self._ended.is_set():
            failed = self._asked()
            if failed is not None and self._last is None:
                break  # whoever waits for the first answer hears why at once
            # After a slow answer nothing is made up for: asking at once, many times, would tell nothing more.
            due_s = max(due_s + apart_s, self.clock.now())
            self._ended.wait(due_s - self.clock.now())
        self._first.set()


_WORDS = ("step", "average", "lag")


def _see_that_it_can_be(sample: Sample) -> None:
    """Raise DeviceError if a sample is no watts or joules of anything."""
    for value, unit in ((sample.power_w, "W"), (sample.energy_j, "J")):
        if value is not None and not math.isfinite(value):
            raise DeviceError(f"it says {value} {unit}, which is no number")
    if sample.power_w is not None and sample.power_w < 0:
        raise DeviceError(f"it says {sample.power_w:g} W; see whether its clamp or plug is the wrong way round")
    if sample.power_w is not None and sample.power_w > _MOST_W:
        raise DeviceError(f"it says {sample.power_w:g} W, which cannot be; see which unit it counts in")
    if sample.energy_j is not None and sample.energy_j < 0:
        raise DeviceError(f"its counter says {sample.energy_j:g} J, less than nothing")


def _within(seconds: float, work: Callable[[], T], who: str) -> T:
    """Return what some work returns, in a thread that is left alone if it takes too long.

    Raises:
        DeviceError: If it does.
    """
    found: list[T] = []
    thread = Thread(target=lambda: found.append(work()), name="polythrottle-meter-once", daemon=True)
    thread.start()
    thread.join(seconds)
    if not found:
        raise DeviceError(f"{who} did not answer in {seconds:g} s")
    return found[0]
