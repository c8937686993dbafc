"""An external meter in place of a device's own sensors: its joules, or its watts integrated over time."""

import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from types import TracebackType
from typing import TypeVar

from typing_extensions import Self

from polythrottle.clock import Clock, SystemClock, VirtualClock
from polythrottle.errors import DeviceError, InvalidInput, PolythrottleError
from polythrottle.findings import Finding
from polythrottle.identity import identity_of
from polythrottle.measurement import EnergyKind, Reading
from polythrottle.ports import Device, EnergyMeter, Inspectable, Meter, PowerMeter, Recorded, Rewindable
from polythrottle.sensors import Sensor
from polythrottle.sensors.integration import Integrated, Power
from polythrottle.sensors.lookout import Lookout
from polythrottle.space import OperatingPoint, SearchSpace

_USUAL_S, _MOST_HZ, _LEAST_DUTY = 0.05, 100.0, 0.01
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
            raise InvalidInput(f"{type(meter).__name__} is no meter: see polythrottle.ports.EnergyMeter and PowerMeter")
        self.clock: Clock = clock if clock is not None else SystemClock()
        self._meter = meter
        self.title = type(meter).__name__
        self.uri = f"meter:{type(meter).__module__}.{type(meter).__qualname__}"
        self.energy_kind = EnergyKind(meter.energy_kind)
        self.boundary = meter.boundary
        self.sensor = _sensor(meter, self.title)
        self._integrated = Integrated(self._power, "", self.clock) if isinstance(meter, PowerMeter) else None
        self._users, self._guard = 0, threading.Lock()
        self._lookout: Lookout | None = None

    def _power(self) -> Power:
        assert isinstance(self._meter, PowerMeter)
        time_s, watts = self._asked(self._meter.power_w)
        return Power(float(watts), round(time_s * 1e6))

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
        """Look at power in the background, as often as there is a new one; a meter that counts needs no looks."""
        with self._guard:
            self._users += 1
            if self._users == 1 and self._integrated is not None and not isinstance(self.clock, VirtualClock):
                self._lookout = Lookout(self._integrated.look, min(_MOST_HZ, 2 / (self.sensor.step_s or _USUAL_S)))
                self._lookout.start()
        try:
            yield
        finally:
            with self._guard:
                self._users -= 1
                if self._users == 0 and self._lookout is not None:
                    self._lookout.stop()
                    self._lookout = None


def _sensor(meter: Meter, title: str) -> Sensor:
    """Return what a meter says of itself, as a sensor; of power, what lies between two looks is not seen."""
    step_s, average_s = float(meter.step_s), float(meter.average_s)
    if not isinstance(meter, PowerMeter):
        return Sensor(step_s=step_s, average_s=average_s, source=title, counts=True)
    apart_s = step_s or _USUAL_S
    duty = min(1.0, max(_LEAST_DUTY, average_s / apart_s))
    return Sensor(step_s=step_s, average_s=average_s, duty=duty, period_s=apart_s, source=title)


class Metered:
    """A device whose joules are those of an external meter; all else is its own.

    A device that cannot tell energy itself, which its readings fail for, is then known by the meter alone: neither its
    temperature nor its clocks.

    Args:
        device: What is steered.
        meter: Whose joules count.

    Raises:
        InvalidInput: If the device is a recorded table, or the meter is none.
    """

    def __init__(self, device: Device, meter: Meter) -> None:
        if isinstance(device, Recorded):
            raise InvalidInput(f"{device.uri} is a recorded table with joules of its own; leave the meter out")
        self.inner = device
        self.clock = device.clock
        self._reader = MeterReader(meter, device.clock)
        self._sampling = ExitStack()
        self._blind = False

    @property
    def uri(self) -> str:
        """The URI of the device."""
        return self.inner.uri

    @property
    def title(self) -> str:
        """The name people know the device by."""
        return self.inner.title

    @property
    def identity(self) -> Mapping[str, str]:
        """What hardware and firmware the device is."""
        return identity_of(self.inner)

    def findings(self) -> tuple[Finding, ...]:
        """Return what works on the device and what does not."""
        return self.inner.findings() if isinstance(self.inner, Inspectable) else ()

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
    def sensor(self) -> Sensor:
        """What the meter says of itself."""
        return self._reader.sensor

    @property
    def meter(self) -> str:
        """Which meter it is and what it covers, to know it again by."""
        return f"{self._reader.uri}, {self._reader.boundary}"

    def apply(self, point: OperatingPoint) -> None:
        """Set every knob of the point on the device; see `polythrottle.ports.Device`."""
        self.inner.apply(point)

    def read(self) -> Reading:
        """Return the meter's energy so far, and the rest as the device reads it, now."""
        seen = None if self._blind else self.inner.read()
        now = self._reader.read()
        return now if seen is None else replace(seen, time_s=now.time_s, energy_j=now.energy_j)

    def restore(self) -> None:
        """Restore the device to how it was found."""
        self.inner.restore()

    def __enter__(self) -> Self:
        self.inner.__enter__()
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
            self._sampling.close()
        finally:
            self.inner.__exit__(kind, error, trace)


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
    return RewindableMetered(device, meter) if isinstance(device, Rewindable) else Metered(device, meter)
