"""The energy of any block of code: devices are looked at from its beginning to its end, and nothing on them is set.

Joules are the growth of a device's running total, and its ± is what the sensor may be off by in this very block: where
its steps fall, how it rounds, how well its factor is known. It says nothing of how another run of the block would
differ. A sensor that counts misses nothing between two looks; of one that samples, how much power varied over the block
shows what it may have missed, as in a window (`polythrottle.metering.energy`).
"""

import contextlib
import math
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import TracebackType

import numpy as np
from typing_extensions import Self

from polythrottle.domain.clock import Thread, VirtualClock
from polythrottle.domain.errors import InvalidInput, PolythrottleError
from polythrottle.domain.measurement import EnergyKind, Interval
from polythrottle.domain.ports import Discounting, Readable, Recorded, Sampled, Sensor
from polythrottle.domain.units import show
from polythrottle.metering.calibration import sensor_of
from polythrottle.metering.energy import (
    EnergyEstimate,
    Trajectory,
    exact_trajectory,
    observed_step_s,
    trajectory,
)
from polythrottle.metering.intervals import ErrorDistribution, Normal, Triangular, half_width
from polythrottle.metering.window import WindowSample

_UNKNOWN = Interval(0.0, math.inf)
_FEWEST_STEPS = 3.0
_ROUNDING = 0.01
_ASIDE = 0.1
_SHARE_OF_STEP = 8.0
_SHORTEST_S = 0.01
_USUAL_S = 0.05
_MOST_LOOKS = 1024
_WEAKEST = (EnergyKind.SIMULATED, EnergyKind.ESTIMATED, EnergyKind.RECORDED, EnergyKind.MEASURED)


@dataclass(frozen=True)
class Drawn:
    """What one device drew while a block ran.

    Args:
        device: Its URI.
        joules: How much; nan if that cannot be told.
        interval: What the joules are between with 95 % confidence, as far as the sensor is known; without an upper end
            if the block was too short to say. Of an estimate it is the error of reading the estimate alone.
        seconds: How long the block took, on the device's clock.
        kind: How the joules came about.
        boundary: What they cover.
        note: Why joules or interval are not known; empty if they are.
    """

    device: str
    joules: float
    interval: Interval
    seconds: float
    kind: EnergyKind
    boundary: str
    note: str = ""

    @property
    def watts(self) -> float:
        """Mean power in watts; nan if it cannot be told."""
        if self.seconds > 0:
            return self.joules / self.seconds
        return math.nan


class EnergyBlock:
    """A context manager that measures what devices draw while its block runs; it reads and sets nothing.

    Blocks may be nested and run in several threads. While one runs, a thread of its own reads its devices a few times a
    second. What was drawn is known once the block has ended, also if it ended with an error. A device that fails
    meanwhile does not disturb the block: its joules are nan, and `notes` says why.

    Simulated time passes only while a simulated board works or idles on its own clock: a block that serves nothing on
    it takes no time there, and its joules are nan.

    Args:
        open_sources: Returns what to look at; called on entering.
    """

    def __init__(self, open_sources: Callable[[], Sequence[Readable]]) -> None:
        self._open = open_sources
        self._watched: tuple[_Watched, ...] = ()
        self._drawn: tuple[Drawn, ...] | None = None
        self._stack = contextlib.ExitStack()

    def __enter__(self) -> Self:
        self._drawn = None
        self._watched = tuple(_Watched(source) for source in _checked(self._open()))
        with contextlib.ExitStack() as stack:
            for watched in self._watched:
                stack.enter_context(watched)
            for watched in self._watched:
                watched.begin()
            self._stack = stack.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            for watched in self._watched:
                watched.end()
            self._drawn = tuple(watched.drawn() for watched in self._watched)
        finally:
            self._stack.close()

    @property
    def parts(self) -> tuple[Drawn, ...]:
        """What each device drew, in the order in which they were named.

        Raises:
            InvalidInput: If the block has not ended, which holds for every property.
        """
        if self._drawn is None:
            raise InvalidInput("what a block drew is known once it has ended; read it after the with statement")
        return self._drawn

    @property
    def joules(self) -> float:
        """What all devices drew together; nan if that of one cannot be told."""
        return sum(part.joules for part in self.parts)

    @property
    def interval(self) -> Interval:
        """What those joules are between, with 95 % confidence."""
        found = [part.interval for part in self.parts]
        if not all(each.known for each in found):
            return Interval(sum(each.low for each in found), math.inf)
        if len(found) == 1:
            return found[0]
        middle = sum((each.low + each.high) / 2 for each in found)
        half = math.hypot(*(each.half for each in found))
        return Interval(max(0.0, middle - half), middle + half)

    @property
    def seconds(self) -> float:
        """How long the block took, on the devices' clock."""
        return max(part.seconds for part in self.parts)

    @property
    def watts(self) -> float:
        """Mean power of all devices together; nan if it cannot be told."""
        return sum(part.watts for part in self.parts)

    @property
    def kind(self) -> EnergyKind:
        """How the joules came about: of several devices, the weakest word."""
        kinds = {part.kind for part in self.parts}
        return next(kind for kind in _WEAKEST if kind in kinds)

    @property
    def boundary(self) -> str:
        """What the joules cover."""
        parts = self.parts
        if len(parts) == 1:
            return parts[0].boundary
        return "; ".join(f"{part.device}: {part.boundary}" for part in parts)

    @property
    def notes(self) -> tuple[str, ...]:
        """Why joules or intervals are not known, a line for each device of which they are not."""
        return tuple(part.note for part in self.parts if part.note)

    def __repr__(self) -> str:
        if self._drawn is None:
            return "<energy of a block that has not ended>"
        if self.kind is EnergyKind.MEASURED:
            kind = ""
        else:
            kind = f" {self.kind}"
        between = self.interval
        sure = ", not known how exactly"
        if between.known:  # a sensor that can only have missed something leaves its reading at one end
            aside = abs(self.joules - (between.low + between.high) / 2)
            ends = f", between {between.low:.4g} and {between.high:.4g} J"
            if aside <= _ASIDE * between.half:
                sure = f" ± {between.half:.2g} J"
            else:
                sure = ends
        if math.isnan(self.joules):
            told = "unknown"
        else:
            told = f"{self.joules:.4g} J{kind}{sure}, {self.watts:.4g} W"
        return f"<energy {told} in {show(self.seconds, 's')}{''.join(f'; {note}' for note in self.notes)}>"


def _checked(sources: Sequence[Readable]) -> Sequence[Readable]:
    """Return sources whose joules may be added up.

    Raises:
        InvalidInput: If there is none, one has no joules, or their clocks do not go together.
    """
    if not sources:
        raise InvalidInput("say what to measure, such as polythrottle.energy('nvml:0')")
    for source in sources:
        if isinstance(source, Recorded):
            raise InvalidInput(f"{source.uri} is a recorded table; the energy of a block needs a device that is here")
        if source.energy_kind is EnergyKind.RELATIVE:
            raise InvalidInput(f"the energy of {source.title} is only relative, so a block has no joules there")
    if len({isinstance(source.clock, VirtualClock) for source in sources}) > 1:
        raise InvalidInput(
            "simulated and real time do not go together: measure simulated boards in a block of their own"
        )
    return sources


class _Watched:
    """A source while a block runs: looked at in the background where time is real, and at both ends."""

    def __init__(self, source: Readable) -> None:
        self._source = source
        self._sensor = sensor_of(source)
        self._looks: list[WindowSample] = []
        self._failure = ""
        self._ended = threading.Event()
        self._thread: Thread | None = None
        self._sampling = contextlib.ExitStack()
        step_s = self._sensor.step_s / _SHARE_OF_STEP
        if step_s:
            self._apart_s = max(_SHORTEST_S, step_s)
        else:
            self._apart_s = _USUAL_S

    def __enter__(self) -> Self:
        virtual = isinstance(self._source.clock, VirtualClock)
        if isinstance(self._source, Sampled) and not virtual:
            self._sampling.enter_context(self._source.sampling())
        try:
            self._source.read()  # the first opens what the others find open
        except BaseException:
            self._sampling.close()
            raise
        return self

    def begin(self) -> None:
        """Look, and go on looking where time is real."""
        self._look()
        if not isinstance(self._source.clock, VirtualClock):
            self._thread = Thread(target=self._watch, name="polythrottle-energy", daemon=True)
            self._thread.start()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop()
        self._sampling.close()

    def _stop(self) -> None:
        self._ended.set()
        if self._thread is not None:
            self._thread.join()
            self._thread = None

    def _look(self) -> None:
        self._looks.append(WindowSample(self._source.read()))

    def _watch(self) -> None:
        own_s = 0.0
        while not self._ended.wait(self._apart_s):
            try:
                self._look()
            except PolythrottleError as err:
                self._failure = str(err)
                return
            if isinstance(self._source, Discounting):  # what looking takes is not the block's
                busy_s = time.thread_time()
                self._source.leave_out(busy_s - own_s)
                own_s = busy_s
            if len(self._looks) > _MOST_LOOKS:
                self._looks = self._looks[::2]
                self._apart_s *= 2

    def end(self) -> None:
        """Look for the last time."""
        self._stop()
        try:
            self._look()
        except PolythrottleError as err:
            self._failure = self._failure or str(err)

    def drawn(self) -> Drawn:
        """Return what was drawn from the first look to the last."""
        source = self._source
        looks = self._looks
        seconds = looks[-1].reading.time_s - looks[0].reading.time_s
        if self._failure:
            found = (math.nan, _UNKNOWN, self._failure)
        else:
            found = drawn(looks, self._sensor, source.energy_kind)
        boundary = "; ".join(filter(None, (source.boundary, self._sensor.note)))
        note = f"{source.title}: {found[2]}" if found[2] else ""
        return Drawn(source.uri, found[0], found[1], seconds, source.energy_kind, boundary, note)


def drawn(looks: Sequence[WindowSample], sensor: Sensor, kind: EnergyKind) -> tuple[float, Interval, str]:
    """Return the joules from the first look to the last, their 95 % interval, and why they are not known, if so.

    Args:
        looks: At least two, in order.
        sensor: What the energy was read with.
        kind: How its joules come about.
    """
    seen = exact_trajectory(looks)
    step_s = observed_step_s(sensor, seen)
    if why := _unknown(seen, sensor, step_s, kind):
        return math.nan, _UNKNOWN, why
    joules = float(seen.energy_j[-1] - seen.energy_j[0]) * sensor.factor
    late_s = max(step_s, sensor.late_s)
    half_j = _half_j(looks, joules, sensor)
    low_j, high_j = (float(each) * sensor.factor for each in _edges_j(seen, step_s, sensor.late_s))
    if math.isinf(half_j):
        low_j = 0.0
    else:
        low_j = max(0.0, joules - math.hypot(low_j, half_j))
    if math.isinf(half_j) or seen.window_s < _FEWEST_STEPS * late_s * (1 - _ROUNDING):
        least = show(max(_FEWEST_STEPS * late_s, 0.0 if sensor.counts else sensor.least_s), "s")
        why = f"the block took {show(seen.window_s, 's')}; from {least} on this sensor tells how far it may be off"
        return joules, Interval(low_j, math.inf), why
    return joules, Interval(low_j, joules + math.hypot(high_j, half_j)), ""


def _unknown(seen: Trajectory, sensor: Sensor, step_s: float, kind: EnergyKind) -> str:
    """Return why nothing is known of the joules; empty if something is."""
    if not (np.all(np.isfinite(seen.energy_j)) and np.all(np.diff(seen.energy_j) >= 0)):
        return "the energy reading fell, or was no number"
    if seen.window_s <= 0:
        if kind is EnergyKind.SIMULATED:
            return "no simulated time passed: nothing was served on this board in the block"
        return "the block took no time that its clock could tell"
    if seen.window_s < (least_s := max(step_s, sensor.late_s)):
        told = f"its energy reading moves or remembers for {show(least_s, 's')}"
        return f"the block took {show(seen.window_s, 's')}, and {told}, so nothing is known of so short a time"
    if seen.energy_j[-1] == seen.energy_j[0] and kind is EnergyKind.MEASURED:
        return f"the energy reading did not move in {show(seen.window_s, 's')}"
    return ""


def _edges_j(seen: Trajectory, step_s: float, late_s: float) -> tuple[float, float]:
    """Return how many joules at most were drawn before the block but shown in it, and drawn in it but not shown.

    The first step that is seen holds whatever was drawn before the block, which may have been at any power. What is
    missing at the end was drawn within a step, at no more than the highest power seen.
    """
    gains_j = np.diff(seen.energy_j)
    apart_s = np.maximum(np.diff(seen.time_s), max(step_s, _SHORTEST_S))
    peak_w = float(np.max(gains_j / apart_s))
    first_j = 0.0
    if step_s:
        first_j = float(gains_j[np.flatnonzero(gains_j > 0)[:1]].sum())
    return first_j + late_s * peak_w, (step_s + late_s) * peak_w


def _half_j(looks: Sequence[WindowSample], joules: float, sensor: Sensor) -> float:
    """Return how far the sensor may be off between the edges, 95 % of the time; inf if that cannot be told."""
    if sensor.counts:
        if sensor.quantum_j:
            errors: list[ErrorDistribution] = [Triangular(sensor.quantum_j)]
        else:
            errors = []
        return half_width([*errors, *([Normal(sensor.factor_sd * joules)] if sensor.factor_sd else [])])
    seen = trajectory(looks, sensor)
    power = None
    if len(seen.time_s) > 1:
        power = EnergyEstimate(seen, sensor).power
    took_s = looks[-1].reading.time_s - looks[0].reading.time_s
    if power is None or not power.known:
        return math.inf
    return power.half * took_s
