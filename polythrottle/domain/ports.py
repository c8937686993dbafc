"""What a device, workload, optimiser and meter must be able to do, and what they tell: sensor, placement, findings."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, fields
from functools import cached_property
from types import TracebackType
from typing import TYPE_CHECKING, Protocol, Union, runtime_checkable

from polythrottle.domain.clock import Clock
from polythrottle.domain.errors import InvalidInput
from polythrottle.domain.measurement import EnergyKind, Measurement, Query, Reading
from polythrottle.domain.space import Knob, Level, OperatingPoint, SearchSpace
from polythrottle.domain.study import Daring, Study, Trial

if TYPE_CHECKING:
    from typing_extensions import Self

# What an inspection found: one line per subject, and what can be done about it.


@dataclass(frozen=True)
class Finding:
    """One thing that was looked at.

    Attributes:
        subject: What was looked at, in a few words: `gpu_max_hz`, `energy`, `secure boot`.
        works: True if it does, False if it does not, None where that cannot be known.
        explanation: What was seen, or why it does not work, in one line without a full stop.
        remedy: What the reader can do about it, in one line; empty where there is nothing to do.

    Raises:
        ValueError: If the subject or the explanation is empty or has more than one line.
    """

    subject: str
    works: bool | None
    explanation: str
    remedy: str = ""

    def __post_init__(self) -> None:
        for text in (self.subject, self.explanation):
            if not text.strip():
                raise ValueError("a finding needs a subject and an explanation")
        if any("\n" in text for text in (self.subject, self.explanation, self.remedy)):
            raise ValueError(f"a finding about {self.subject!r} is one line each")


# What a workload's work runs on, so that what is tuned is what runs.


def _first() -> int:
    return 0


@dataclass(frozen=True)
class Target:
    """The GPU that is tuned, as workloads need to know it.

    Args:
        title: The name people know it by.
        uuids: Of it or its group, as NVML spells them; empty where there is no choice, as on a Jetson.
        find: Returns its number in CUDA's order of this process; asked late, as a user's code may set what is visible.
        place: Of the first of them on the bus, as NVML writes it.
    """

    title: str
    uuids: tuple[str, ...] = ()
    find: Callable[[], int] = field(default=_first, compare=False)
    place: str = ""

    @cached_property
    def number(self) -> int:
        """Its number in CUDA's order of this process.

        Raises:
            DeviceError: If CUDA does not show it to this process.
        """
        return self.find()


@dataclass(frozen=True)
class Placement:
    """What a workload's work runs on.

    Args:
        by: What runs it: ``ONNX Runtime with CUDA``.
        gpu: The GPU's number in CUDA's order; None if it is the processor.
        asked: Whether somebody chose it.
        why: Why it is the processor, where nobody chose it.
        remedy: How to have it on the GPU.
        stay: How to have it on the processor all the same.
    """

    by: str
    gpu: int | None = None
    asked: bool = False
    why: str = ""
    remedy: str = ""
    stay: str = ""

    def __str__(self) -> str:
        return f"{'the processor' if self.gpu is None else 'the GPU'}, by {self.by}"


# A sensor, as far as it matters for joules: how often it moves, what it averages, what it misses, how it rounds.

_BATCH_LAGS = 4.0
_BATCH_STEPS = 2.0
LEAST_BATCHES = 6
_SETTLED = 5.0  # so many time constants on, an exponential lag shows less than 1 % of what was


@dataclass(frozen=True)
class Sensor:
    """What is known of an energy or power sensor; 0 is "does not".

    Args:
        step_s: How often the total moves: the period of a counter or of the polling behind it; of power that stands
            for a while, how often there is a new one.
        average_s: The time one power reading averages over.
        lag_s: Time constant with which readings follow the power.
        duty: The share of time it looks at all, as 0.25 where it sees 25 of every 100 ms.
        period_s: How often such a look begins.
        quantum_w: Step of one power reading.
        quantum_j: Step of the total.
        factor: What its joules are multiplied by to be those of a reference meter.
        factor_sd: How far that factor may be off, as a fraction: one standard deviation.
        source: Where all this is from; goes into the boundary if there is a factor.
        counts: Whether it is known to miss nothing between two looks, as a counter does; one that samples power does.

    Raises:
        InvalidInput: If a figure is negative or not finite, or the duty is no share.
    """

    step_s: float = 0.0
    average_s: float = 0.0
    lag_s: float = 0.0
    duty: float = 1.0
    period_s: float = 0.0
    quantum_w: float = 0.0
    quantum_j: float = 0.0
    factor: float = 1.0
    factor_sd: float = 0.0
    source: str = ""
    counts: bool = False

    def __post_init__(self) -> None:
        figures = [getattr(self, each.name) for each in fields(self) if each.name not in ("source", "counts")]
        if not all(math.isfinite(figure) and figure >= 0 for figure in figures):
            raise InvalidInput("a sensor's figures must be finite and not negative")
        if not 0 < self.duty <= 1 or self.factor == 0:
            raise InvalidInput("a sensor looks for a share of the time between 0 and 1, and its factor is above 0")

    @property
    def memory_s(self) -> float:
        """How long a reading remembers."""
        return self.lag_s + self.average_s / 2

    @property
    def late_s(self) -> float:
        """How long ago what a reading shows was drawn: its memory, and of an average the time for which it stands."""
        return self.memory_s + (self.step_s / 2 if self.average_s else 0.0)

    @property
    def smoothed_s(self) -> float:
        """By how much shorter a time seems whose noise is seen through that memory.

        The integral of white noise over a time b varies as b - lag after an exponential lag, if b is several lags, and
        as b - average / 3 after a moving average, also straight where that is renewed once in its own time.
        """
        return self.lag_s + self.average_s / 3

    @property
    def batch_s(self) -> float:
        """The shortest time whose energy says something by itself: neighbours share neither steps nor memory."""
        looks_s = self.period_s if self.duty < 1 else 0.0
        return max(_BATCH_STEPS * self.step_s, _BATCH_LAGS * self.memory_s, _BATCH_STEPS * looks_s)

    @property
    def least_s(self) -> float:
        """The shortest window from which an interval can be made."""
        return LEAST_BATCHES * self.batch_s

    @property
    def settle_s(self) -> float:
        """How long after a change readings still show what was before."""
        return _SETTLED * self.lag_s + self.average_s + self.step_s

    @property
    def note(self) -> str:
        """What the boundary of its joules must say besides: the factor, if there is one."""
        if self.factor == 1.0:
            return ""
        return f"times {self.factor:.4g} ({self.source or 'calibrated'})"


EXACT_SENSOR = Sensor(source="computed, so exact", counts=True)
_USUAL = {
    "nvml": Sensor(
        step_s=0.1, duty=0.25, period_s=0.1, quantum_j=0.001, source="as on A100 and H100: arXiv 2312.02741, SC 2024"
    ),
    "jetson": Sensor(step_s=0.0, quantum_w=0.04, source="INA3221: 40 uV across 5 mOhm at 5 V"),
    "cpu": Sensor(
        step_s=0.001, quantum_j=6.1e-5, source="RAPL: 1 ms, 2^-14 J (Intel SDM, volume 3B, 14.10)", counts=True
    ),
    "sim": EXACT_SENSOR,
}


def usual_sensor(uri: str) -> Sensor:
    """Return what is usual for devices of a kind, for those that nobody has calibrated.

    Args:
        uri: Of the device; one of a kind that is not known has an exact sensor, for want of anything better.
    """
    return _USUAL.get(uri.partition("?")[0].partition(":")[0], EXACT_SENSOR)


# The ports: what a device, a workload, an optimiser and a meter must be able to do, and what some can do besides.
#
# Anything that fits one of these protocols can be tuned, measured or asked; nothing needs to inherit from them.


class Readable(Protocol):
    """What can tell a running total of joules: a device, or an external meter."""

    @property
    def uri(self) -> str:
        """Which it is."""

    @property
    def title(self) -> str:
        """The name people know it by."""

    @property
    def clock(self) -> Clock:
        """What its readings go by."""

    @property
    def energy_kind(self) -> EnergyKind:
        """How its joules come about."""

    @property
    def boundary(self) -> str:
        """What its joules cover."""

    def read(self) -> Reading:
        """Return energy so far, now."""


class Device(Protocol):
    """A board, a GPU or a processor whose knobs can be set and whose energy can be read.

    Entering it as a context manager saves the original state before anything is written; leaving restores it.
    """

    @property
    def uri(self) -> str:
        """The URI that opens this device again."""

    @property
    def title(self) -> str:
        """The name people know it by."""

    @property
    def space(self) -> SearchSpace:
        """The points that may be applied, and the default among them."""

    @property
    def clock(self) -> Clock:
        """The clock all waiting and all readings of this device go by."""

    @property
    def energy_kind(self) -> EnergyKind:
        """How its joules come about."""

    @property
    def boundary(self) -> str:
        """Which rails, devices or processes its joules cover."""

    @property
    def presets(self) -> Mapping[str, OperatingPoint]:
        """The vendor's named points, such as nvpmodel modes; they may set knobs the space holds still."""

    def apply(self, point: OperatingPoint) -> None:
        """Set every knob of ``point``, read it back, and wait until it has taken effect; others go to their default.

        Raises:
            KnobRejected: If a level is refused or not kept.
            DeviceError: If the device cannot be steered.
        """

    def read(self) -> Reading:
        """Return energy so far, temperature and clocks, now."""

    def restore(self) -> None:
        """Set everything back to how it was found."""

    def __enter__(self) -> Self: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...


@runtime_checkable
class Recorded(Protocol):
    """A device whose measurements were made earlier, so that a visit looks one up instead of running a window."""

    def recall(self, point: OperatingPoint) -> Measurement:
        """Return the measurement recorded at a point."""


@runtime_checkable
class Rewindable(Protocol):
    """A device without hardware that can start every trial from the same state, so that a resumed study is exact."""

    def rewind(self, number: int) -> None:
        """Put the state and the noise to where trial ``number`` starts, whatever went before."""


@runtime_checkable
class Inspectable(Protocol):
    """A device that can say what it is and which of its parts work here, without writing anything."""

    @property
    def identity(self) -> Mapping[str, str]:
        """What hardware and firmware it is: board, chip, driver, …; what is not known is left out."""

    def findings(self) -> tuple[Finding, ...]:
        """Return what works and what does not, with the reason: each knob, the energy, the temperature."""


def findings_of(device: Device) -> tuple[Finding, ...]:
    """Return what works on a device and what does not; nothing of one that cannot say."""
    if isinstance(device, Inspectable):
        return device.findings()
    return ()


@dataclass(frozen=True)
class Offer:
    """A knob that works on a device.

    Args:
        knob: Its name and every level it may be set to.
        default: The level that leaves the device as it was found.
        searched: Whether it is searched, of the knobs this device was opened with.
    """

    knob: Knob
    default: Level
    searched: bool


@runtime_checkable
class Offering(Protocol):
    """A device that can say what may be set on it and what holds, without computing its search space."""

    def offers(self) -> tuple[Offer, ...]:
        """Return every knob that works here."""

    def altered(self) -> tuple[str, ...]:
        """Return the knobs that no longer hold what was applied last; those nobody can read are left out.

        Raises:
            DeviceError: If the device is gone.
        """


@runtime_checkable
class Sampled(Protocol):
    """A device that looks at its sensors in the background while it is entered."""

    def sampling(self) -> AbstractContextManager[None]:
        """Return a context in which it looks as when entered without becoming its writer, to see what that costs."""


@runtime_checkable
class Sensing(Protocol):
    """A device that says itself what its energy is read with; of others it is what was calibrated, or is usual."""

    @property
    def sensor(self) -> Sensor:
        """How often it moves, what it averages and misses, how it rounds."""


@runtime_checkable
class Averaging(Protocol):
    """A device whose files say how its sensor averages: that holds now, whatever was calibrated of the rest."""

    @property
    def averaging(self) -> Sensor:
        """What is known of its sensor without a calibration."""


@runtime_checkable
class EnergyMeter(Protocol):
    """An external meter that counts joules, to be used in place of a device's own sensors."""

    @property
    def energy_kind(self) -> EnergyKind:
        """How its joules come about."""

    @property
    def boundary(self) -> str:
        """What they cover."""

    @property
    def step_s(self) -> float:
        """How often the total moves, in seconds; 0 if it is new at every look."""

    @property
    def average_s(self) -> float:
        """Over what time it averages, in seconds; 0 if it does not."""

    def energy_j(self) -> float:
        """Return the running total in joules since an arbitrary start; never falls. Called from any thread."""


@runtime_checkable
class PowerMeter(Protocol):
    """An external meter that shows power, which is integrated over time."""

    @property
    def energy_kind(self) -> EnergyKind:
        """How its joules come about."""

    @property
    def boundary(self) -> str:
        """What they cover."""

    @property
    def step_s(self) -> float:
        """How often it shows a new power, in seconds; 0 if at every look."""

    @property
    def average_s(self) -> float:
        """Over what time a power is the mean, in seconds; 0 if it is of a moment."""

    def power_w(self) -> tuple[float, float]:
        """Return the newest reading: when it was taken, in seconds of the meter's own clock, and watts.

        A reading with the time of the one before is the same one. Called from a thread of its own.
        """


Meter = Union[EnergyMeter, PowerMeter]  # not `|`: evaluated on import, also by the Python 3.8 of a board
"""An external meter: joules or watts, what they cover, how often it moves, and what it averages over."""


@runtime_checkable
class Lasting(Protocol):
    """A device whose settings can outlive the process that made them."""

    def hand_over(self, holder: str, seconds: float | None, confirmed_s: float | None = None) -> str:
        """Leave the settings in place under a guard that restores them unless they are confirmed.

        Args:
            holder: What holds the device from now on, for people to read, such as the profile's name.
            seconds: When to restore; None is at the next restore or reboot, without a guard.
            confirmed_s: How long they stand once confirmed, in seconds; None is until a restore.

        Returns:
            The name under which the device stands on record.

        Raises:
            DeviceError: If the device was not entered.
        """


@runtime_checkable
class Workload(Protocol):
    """A served model: it answers queries, each a batch of items."""

    @property
    def uri(self) -> str:
        """The URI that opens this workload again."""

    @property
    def space(self) -> SearchSpace:
        """The workload's own knobs, such as batch size and threads; `SearchSpace.unit` if it has none."""

    def apply(self, point: OperatingPoint) -> None:
        """Set the workload's knobs.

        Raises:
            KnobRejected: If the model cannot run so.
        """

    def query(self) -> Query:
        """Issue one query, wait for its answer, and return how long it took.

        Raises:
            TrialError: If the answer is an error or does not come in time.
        """

    def close(self) -> None:
        """Release what the workload holds."""


@runtime_checkable
class Concurrent(Protocol):
    """A workload that can have several queries under way at once, such as a service somewhere else."""

    @property
    def concurrency(self) -> int:
        """How many queries a closed loop keeps under way; above 1 also how many an open loop has at most."""

    async def send(self) -> Query:
        """Issue one query as ``query`` does, letting others go on meanwhile; all calls come in one event loop.

        Its latency counts from the call. It may be cancelled.

        Raises:
            TrialError: If the answer is an error or does not come in time.
        """

    async def hang_up(self) -> None:
        """Release what ``send`` opened in the event loop it was called in, which ends now; it may open it again."""


@runtime_checkable
class Noting(Protocol):
    """A workload that knows something about its figures which a user should read with them."""

    @property
    def notes(self) -> tuple[str, ...]:
        """What that is, a line each."""


@runtime_checkable
class Placed(Protocol):
    """A workload that knows what its work runs on."""

    @property
    def placement(self) -> Placement | None:
        """What that is; None if it cannot be known, as of a module without parameters."""


@runtime_checkable
class Discounting(Protocol):
    """A device whose joules may be an estimate from busy processors, so that some of them can be left out."""

    def leave_out(self, busy_s: float) -> bool:
        """Leave processor time of this process that was not the workload's out of the energy.

        Args:
            busy_s: Processor seconds spent, and not left out yet, since energy was read last.

        Returns:
            Whether that was done; where joules are counted by the hardware, nothing can be left out.
        """


class Optimizer(Protocol):
    """A search method."""

    def suggest(self, study: Study) -> OperatingPoint:
        """Return the next point to try: pure, so the same study always gets the same answer.

        Raises:
            Exhausted: If every point has been tried.
        """


@runtime_checkable
class Chooser(Protocol):
    """A search method that can say which of the points visited is the answer, where figures differ by chance."""

    def answer(self, study: Study) -> Trial | None:
        """Return the trial whose point is the answer; None if no trial holds every limit. Pure as a suggestion is."""


@runtime_checkable
class Forecaster(Protocol):
    """A search method that can say what going on would be worth."""

    def saving_left(self, study: Study) -> float:
        """Return what one more trial is expected to save of the objective; 0 if nothing is left, inf if unknown."""


@runtime_checkable
class Wary(Protocol):
    """A search method that can say whether it is about to take a risk."""

    def dares(self, study: Study) -> Daring:
        """Return what is likely to break a limit of what is left; pure as a suggestion is."""


@runtime_checkable
class RiskBound(Protocol):
    """A search method that can say what the risk that a user allows keeps it from."""

    def held_back(self, study: Study) -> str:
        """Return in words that this risk keeps it from points that may save something; empty if not."""
