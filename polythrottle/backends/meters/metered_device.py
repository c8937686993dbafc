"""A device with an external meter: its URI, and the meter in place of the device's own sensors.

A meter is told by a URI: ``shelly:192.168.1.5``, ``cmd:./watts``; here is where it stands in a device's. Its joules are
taken, or its watts integrated over time.
"""

from __future__ import annotations

import math
import os
import re
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import TypeVar

from typing_extensions import Self

from polythrottle.backends.meters.live_meter import LiveMeter, Source
from polythrottle.backends.power import BackgroundSampler, PowerIntegrator, PowerReading
from polythrottle.domain.clock import Clock, SystemClock, VirtualClock
from polythrottle.domain.errors import DeviceError, InvalidInput, PolythrottleError, UnknownName, reworded
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

FORMS = (
    "shelly:HOST, tasmota:HOST, redfish:HOST, ipmi:[HOST], snmp:HOST?oid=OID, hwmon:PATH, grace:module, cmd:PROGRAM, "
    "csv:FILE, each with ?step=S&average=S&lag=S"
)
_OWN = re.compile(r"[?&]meter=")
_TIMES = ("step", "average", "lag")
_READ = {"energy": True, "power": False}


def meter_apart(text: str) -> tuple[str, str]:
    """Return a device's URI without its meter, and the meter's, which comes last; "" if there is none.

    Raises:
        InvalidInput: If it is named and empty, or named twice.
    """
    own, *meters = _OWN.split(text.strip())
    if len(meters) > 1:
        raise InvalidInput(f"{text!r} names more than one meter; name one, as the last option")
    if meters and not meters[0].strip():
        raise InvalidInput(f"{text!r} names no meter; it is one of {FORMS}")
    return own, meters[0].strip() if meters else ""


def check_kind(text: str) -> None:
    """Refuse a meter's URI of a kind that there is not.

    Raises:
        UnknownName: If it is one.
    """
    if text.partition(":")[0] not in _KINDS:
        raise UnknownName("meter", text, _KINDS, hint=f"(a meter is one of {FORMS})")


def open_meter(text: str) -> LiveMeter:
    """Return the meter a URI means, once it has answered.

    Args:
        text: One of `FORMS`.

    Raises:
        InvalidInput: If the URI is malformed.
        UnknownName: If there is no such kind of meter, or no such option.
        BadFile: If a file it names is not what it should be.
        DeviceError: If it does not answer, or not with watts or joules.
    """
    check_kind(text)
    kind, _, rest = text.partition(":")
    name, options = _options(kind, rest)
    known = {word: _seconds(word, options.pop(word)) for word in _TIMES if word in options}
    if "step" in known and kind == "cmd":
        options["step"] = str(known["step"])
    make, allowed = _KINDS[kind]
    for key in options:
        if key not in (*allowed, "step"):
            raise UnknownName(f"option of {kind}:", key, (*allowed, *_TIMES))
    try:
        meter = LiveMeter(text, make(name, options), known)
    except DeviceError as err:
        raise reworded(err, f"the meter {text} cannot be read: {err}") from err
    meter.probe()
    return meter


def _options(kind: str, rest: str) -> tuple[str, dict[str, str]]:
    """Return name and options; a program's own words may hold a question mark."""
    if kind == "cmd":
        name, mark, query = rest.rpartition("?")
    else:
        name, mark, query = rest.partition("?")
    parts = [part.partition("=") for part in query.split("&") if part]
    if kind == "cmd" and not (mark and parts and all(key in _TIMES and value for key, _, value in parts)):
        return rest, {}
    found: dict[str, str] = {}
    for key, equals, value in parts:
        if not (key and equals and value) or key in found:
            raise InvalidInput(f"{key!r} in {kind}:{rest} is not an option of a meter; write for example ?step=1")
        found[key] = value
    return name, found


def _seconds(word: str, text: str) -> float:
    value = _number(word, text)
    if not 0 <= value <= 600:
        raise InvalidInput(f"{word}={text}: a meter's {word} is 0 to 600 seconds")
    return value


def _number(word: str, text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not math.isfinite(value):
        raise InvalidInput(f"{word}={text} is not a number")
    return value


def _channel(options: Mapping[str, str]) -> int | None:
    """Return the channel asked for; None if nobody said."""
    text = options.get("channel")
    if text is None:
        return None
    if not (text.isdecimal() and len(text) < 3):
        raise InvalidInput(f"channel={text} is not a channel, which are 0, 1, …")
    return int(text)


def _reads(options: Mapping[str, str]) -> bool | None:
    """Return whether joules are asked for; None if nobody said."""
    text = options.get("read")
    if text is not None and text not in _READ:
        raise InvalidInput(f"read={text}: a meter is read for its power or its energy")
    if text is None:
        return None
    return _READ[text]


def _shelly(name: str, options: Mapping[str, str]) -> Source:
    from polythrottle.backends.meters.http_meters import MeterHost, Shelly

    return Shelly(MeterHost(name), _channel(options), energy=_reads(options))


def _tasmota(name: str, options: Mapping[str, str]) -> Source:
    from polythrottle.backends.meters.http_meters import MeterHost as Web
    from polythrottle.backends.meters.http_meters import Tasmota

    return Tasmota(Web(name), energy=bool(_reads(options)))


def _redfish(name: str, options: Mapping[str, str]) -> Source:
    from polythrottle.backends.meters.http_meters import MeterHost as Web
    from polythrottle.backends.meters.http_meters import Redfish, certificates

    if (verify := options.get("verify", "yes")) not in ("yes", "no"):
        raise InvalidInput(f"verify={verify}: certificates are looked at (yes) or not (no)")
    web = Web(name, "https", certificates(verify == "yes", options.get("ca", "")))
    return Redfish(web, options.get("chassis", ""), energy=bool(_reads(options)))


def _ipmi(name: str, options: Mapping[str, str]) -> Source:
    from polythrottle.backends.meters.program_meters import Ipmi

    return Ipmi(name, options.get("user", ""))


def _snmp(name: str, options: Mapping[str, str]) -> Source:
    from polythrottle.backends.meters.program_meters import Snmp

    scale = _number("scale", options.get("scale", "1"))
    if scale <= 0:
        raise InvalidInput(f"scale={options['scale']}: a unit is more than 0 W")
    return Snmp(name, options.get("oid", ""), scale, options.get("community", ""), energy=bool(_reads(options)))


def _hwmon(name: str, options: Mapping[str, str]) -> Source:
    from polythrottle.backends.meters.file_meters import HwmonMeter

    if not name:
        raise InvalidInput("hwmon: needs a path, such as hwmon:/sys/class/hwmon/hwmon3/power1_input")
    return HwmonMeter(Path(name))


def _grace(name: str, options: Mapping[str, str]) -> Source:
    from polythrottle.backends.meters.file_meters import GraceMeter

    text = options.get("socket")
    if text is not None and not (text.isdecimal() and len(text) < 3):
        raise InvalidInput(f"socket={text} is not a socket, which are 0, 1, …")
    return GraceMeter(name or "module", None if text is None else int(text))


def _cmd(name: str, options: Mapping[str, str]) -> Source:
    from polythrottle.backends.meters.program_meters import ProgramMeter

    return ProgramMeter(name, float(options["step"]) if "step" in options else None)


def _csv(name: str, options: Mapping[str, str]) -> Source:
    from polythrottle.backends.meters.file_meters import CsvMeter

    if not name:
        raise InvalidInput("csv: needs a file, such as csv:meter.csv")
    return CsvMeter(Path(name), options.get("column"), options.get("time"))


_KINDS: Mapping[str, tuple[Callable[[str, Mapping[str, str]], Source], tuple[str, ...]]] = {
    "shelly": (_shelly, ("channel", "read")),
    "tasmota": (_tasmota, ("read",)),
    "redfish": (_redfish, ("chassis", "read", "verify", "ca")),
    "ipmi": (_ipmi, ("user",)),
    "snmp": (_snmp, ("oid", "scale", "community", "read")),
    "hwmon": (_hwmon, ()),
    "grace": (_grace, ("socket",)),
    "cmd": (_cmd, ()),
    "csv": (_csv, ("column", "time")),
}


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
        if not isinstance(meter, (EnergyMeter, PowerMeter)):
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
            # Contexts may overlap: the first starts the looking, the last one to end stops it.
            self._users += 1
            if self._users == 1 and self._integrated is not None and not isinstance(self.clock, VirtualClock):
                # Twice for each new value of the sensor, so that none goes by unseen.
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
        # The meter last: the reading's moment is that of its energy.
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


# A class of its own: whether a device is `Rewindable` is told by its having the method.
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
