"""An external meter in place of a device's own sensors: its joules, or its watts integrated over time."""

import os
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from types import TracebackType
from typing import TypeVar

from typing_extensions import Self

from polythrottle.backends.meters.live_meter import LiveMeter
from polythrottle.backends.power_integrator import BackgroundSampler, PowerIntegrator, PowerReading
from polythrottle.domain.clock import Clock, SystemClock, VirtualClock
from polythrottle.domain.errors import DeviceError, InvalidInput, PolythrottleError
from polythrottle.domain.measurement import EnergyKind, Reading
from polythrottle.domain.ports import (
    Device,
    Discounting,
    EnergyMeter,
    Finding,
    Meter,
    Offer,
    Offering,
    PowerMeter,
    Recorded,
    Rewindable,
    Sampled,
    Sensor,
    findings_of,
)
from polythrottle.domain.space import OperatingPoint, SearchSpace
from polythrottle.domain.units import show
from polythrottle.storage.identity import identity_of

_USUAL_S = 0.05
_MOST_HZ = 100.0
_LEAST_DUTY = 0.01
T = TypeVar("T")


class MeterReader:
    """A meter as what measuring reads; satisfies ``Readable``, ``Sensing`` and ``Sampled``.

    Args:
        meter: Whose joules or watts.
        clock: Watts are integrated by it.

    Raises:
        InvalidInput: If it is no meter, or says nothing sensible of itself.
    """

    def __init__(self, meter: Meter, clock: Clock | None = None) -> None:
        if not isinstance(meter, EnergyMeter | PowerMeter):
            raise InvalidInput(
                f"{type(meter).__name__} is no meter: see polythrottle.domain.ports.EnergyMeter and PowerMeter"
            )
        if clock is not None:
            self.clock: Clock = clock
        else:
            self.clock = SystemClock()
        self._meter = meter
        self.title = type(meter).__name__
        self.uri = f"meter:{type(meter).__module__}.{type(meter).__qualname__}"
        self.boundary = meter.boundary
        if isinstance(meter, LiveMeter):
            self.title = self.uri = meter.uri
        self._integrated = PowerIntegrator(self._power, "", self.clock) if self._shows_power else None
        self._users = 0
        self._guard = threading.Lock()
        self._lookout: BackgroundSampler | None = None

    @property
    def energy_kind(self) -> EnergyKind:
        """How its joules come about; in virtual time they are simulated, whatever it is that shows the power."""
        live = isinstance(self._meter, LiveMeter) and isinstance(self.clock, VirtualClock)
        if live:
            return EnergyKind.SIMULATED
        return EnergyKind(self._meter.energy_kind)

    @property
    def sensor(self) -> Sensor:
        """What the meter says of itself."""
        if isinstance(self._meter, LiveMeter):
            return self._meter.sensor
        return _sensor(self._meter, self.title)

    @property
    def _shows_power(self) -> bool:
        """Whether its watts are integrated here; a live meter does that itself, but for time that is virtual."""
        if isinstance(self._meter, LiveMeter):
            return isinstance(self.clock, VirtualClock)
        return isinstance(self._meter, PowerMeter)

    def _power(self) -> PowerReading:
        assert isinstance(self._meter, PowerMeter)
        time_s, watts = self._asked(self._meter.power_w)
        return PowerReading(float(watts), round(time_s * 1e6))

    def _asked(self, read: Callable[[], T]) -> T:
        try:
            return read()
        except PolythrottleError:
            raise
        except Exception as err:  # somebody else's code, which may raise whatever it likes
            raise DeviceError(f"the meter {self.title} cannot be read: {type(err).__name__}: {err}") from err

    def total_j(self) -> float:
        """Return the joules so far.

        Raises:
            DeviceError: If the meter cannot be read.
        """
        if self._integrated is not None:
            return self._integrated.total_j()
        assert isinstance(self._meter, EnergyMeter)
        return float(self._asked(self._meter.energy_j))

    def read(self) -> Reading:
        """Return energy so far, now.

        Raises:
            DeviceError: If the meter cannot be read.
        """
        energy_j = self.total_j()
        return Reading(self.clock.now(), energy_j)

    @contextmanager
    def sampling(self) -> Iterator[None]:
        """Look at power in the background, as often as there is a new one; a meter that counts needs no looks.

        Raises:
            DeviceError: If a live meter does not answer.
        """
        if isinstance(self._meter, LiveMeter) and not isinstance(self.clock, VirtualClock):
            with self._meter.sampling():
                yield
            return
        with self._guard:
            self._users += 1
            if self._users == 1 and self._integrated is not None and not isinstance(self.clock, VirtualClock):
                hz = min(_MOST_HZ, 2 / (self.sensor.step_s or _USUAL_S))
                self._lookout = BackgroundSampler(self._integrated.look, 1.0 / hz, self.clock, "polythrottle-lookout")
                self._lookout.start()
        try:
            yield
        finally:
            with self._guard:
                self._users -= 1
                if self._users == 0 and self._lookout is not None:
                    self._lookout.stop()
                    self._lookout = None
                if self._users == 0 and isinstance(self._meter, LiveMeter):
                    self._meter.close()


def _sensor(meter: Meter, title: str) -> Sensor:
    """Return what a meter says of itself, as a sensor; of power, what lies between two looks is not seen."""
    step_s = float(meter.step_s)
    average_s = float(meter.average_s)
    if not isinstance(meter, PowerMeter):
        return Sensor(step_s=step_s, average_s=average_s, source=title, counts=True)
    apart_s = step_s or _USUAL_S
    duty = min(1.0, max(_LEAST_DUTY, average_s / apart_s))
    return Sensor(step_s=step_s, average_s=average_s, duty=duty, period_s=apart_s, source=title)


class Metered:
    """A device whose joules are those of an external meter; all else is its own.

    Its own joules stand beside the meter's (`Reading.board_j`). A device that cannot tell energy itself, which its
    readings fail for, is then known by the meter alone: neither its temperature nor its clocks.

    Args:
        device: What is steered.
        meter: Whose joules count. One that a URI opens is part of the device's URI.

    Raises:
        InvalidInput: If the device is a recorded table, or the meter is none.
    """

    def __init__(self, device: Device, meter: Meter) -> None:
        if isinstance(device, Recorded):
            raise InvalidInput(f"{device.uri} is a recorded table with joules of its own; leave the meter out")
        self.inner = device
        self.clock = device.clock
        self._reader = MeterReader(meter, device.clock)
        self._live = meter.uri if isinstance(meter, LiveMeter) else ""
        self._sampling = ExitStack()
        self._blind = False
        self._process = 0

    @property
    def uri(self) -> str:
        """The URI of the device, and the meter's if that has one."""
        own = self.inner.uri
        if self._live:
            return f"{own}{'&' if '?' in own else '?'}meter={self._live}"
        return own

    @property
    def title(self) -> str:
        """The name people know the device by."""
        return self.inner.title

    @property
    def identity(self) -> Mapping[str, str]:
        """What hardware and firmware the device is."""
        return identity_of(self.inner)

    def findings(self) -> tuple[Finding, ...]:
        """Return what works on the device and what does not, and what is known of the meter."""
        own = findings_of(self.inner)
        return (*own, Finding("meter", True, f"{self._reader.uri}: {self.boundary}; {_told(self.averaging)}"))

    def offers(self) -> tuple[Offer, ...]:
        """Return every knob that works on the device, where it says so."""
        if isinstance(self.inner, Offering):
            return self.inner.offers()
        return ()

    def altered(self) -> tuple[str, ...]:
        """Return the knobs that no longer hold what was applied last, where the device can say that."""
        if isinstance(self.inner, Offering):
            return self.inner.altered()
        return ()

    @property
    def differences(self) -> tuple[object, ...]:
        """What the device left as somebody else had set it, where it can say that."""
        return tuple(getattr(self.inner, "differences", ()))

    @property
    def space(self) -> SearchSpace:
        """The points that may be applied, and the default among them."""
        return self.inner.space

    @property
    def presets(self) -> Mapping[str, OperatingPoint]:
        """The vendor's named points."""
        return self.inner.presets

    @property
    def energy_kind(self) -> EnergyKind:
        """How the meter's joules come about."""
        return self._reader.energy_kind

    @property
    def boundary(self) -> str:
        """What the meter's joules cover."""
        return self._reader.boundary

    @property
    def averaging(self) -> Sensor:
        """What the meter says of itself, until it is calibrated."""
        return self._reader.sensor

    @property
    def meter(self) -> str:
        """Which meter it is and what it covers, to know it again by."""
        return f"{self._reader.uri}, {self._reader.boundary}"

    def apply(self, point: OperatingPoint) -> None:
        """Set every knob of the point on the device; see `polythrottle.domain.ports.Device`."""
        self.inner.apply(point)

    def read(self) -> Reading:
        """Return the meter's energy so far, and the rest as the device reads it, now."""
        seen = None if self._blind else self.inner.read()
        now = self._reader.read()
        if seen is None:
            return now
        return replace(seen, time_s=now.time_s, energy_j=now.energy_j, board_j=seen.energy_j)

    @contextmanager
    def sampling(self) -> Iterator[None]:
        """Look at the meter, and at the device where it does so itself, without entering it."""
        with ExitStack() as both:
            if isinstance(self.inner, Sampled):
                both.enter_context(self.inner.sampling())
            both.enter_context(self._reader.sampling())
            yield

    def leave_out(self, busy_s: float) -> bool:
        """Leave processor time out of the device's own joules, where they are an estimate; the meter's have it."""
        if isinstance(self.inner, Discounting):
            self.inner.leave_out(busy_s)
        return False

    def restore(self) -> None:
        """Restore the device to how it was found."""
        self.inner.restore()

    def __enter__(self) -> Self:
        self.inner.__enter__()
        self._process = os.getpid()
        try:
            try:
                self.inner.read()
            except DeviceError:
                self._blind = True
            self._sampling.enter_context(self._reader.sampling())
        except BaseException as err:
            self.inner.__exit__(type(err), err, err.__traceback__)
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if self._process == os.getpid():  # else the meter is that of the process which has forked this one
                self._sampling.close()
        finally:
            self.inner.__exit__(kind, error, trace)


def _told(sensor: Sensor) -> str:
    """Return what is known of a meter, for people."""
    parts = [f"new every {show(sensor.step_s, 's')}" if sensor.step_s else "new at every look"]
    if sensor.quantum_j:
        parts.append(f"counts {show(sensor.quantum_j, 'J')}")
    if sensor.quantum_w:
        parts.append(f"shows steps of {show(sensor.quantum_w, 'W')}")
    if sensor.average_s:
        parts.append(f"a mean over {show(sensor.average_s, 's')}")
    parts.append(f"lags {show(sensor.lag_s, 's')}" if sensor.lag_s else "its lag is not known")
    if sensor.least_s:
        least = f"windows of {show(sensor.least_s, 's')} at least"
    else:
        least = "windows of any length"
    return f"{', '.join(parts)} ({sensor.source or 'as it says'}); {least}"


def unmetered(device: Device) -> Device:
    """Return the device behind a meter; the device itself if it has none."""
    if isinstance(device, Metered):
        return device.inner
    return device


class RewindableMetered(Metered):
    """A `Metered` device without hardware, which can start every trial from the same state."""

    def rewind(self, number: int) -> None:
        """Put the device's state to where a trial starts."""
        assert isinstance(self.inner, Rewindable)
        self.inner.rewind(number)


def metered(device: Device, meter: Meter | None) -> Device:
    """Return a device that reads its energy with a meter; the device itself if there is none.

    Raises:
        InvalidInput: As `Metered`.
    """
    if meter is None:
        return device
    if isinstance(device, Rewindable):
        return RewindableMetered(device, meter)
    return Metered(device, meter)
