"""The ports: what a device, a workload, an optimiser and a meter must be able to do, and what some can do besides.

Anything that fits one of these protocols can be tuned, measured or asked; nothing needs to inherit from them.
"""

from collections.abc import Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from types import TracebackType
from typing import Protocol, runtime_checkable

from typing_extensions import Self

from polythrottle.clock import Clock
from polythrottle.findings import Finding
from polythrottle.measurement import EnergyKind, Measurement, Query, Reading
from polythrottle.placement import Placement
from polythrottle.sensors import Sensor
from polythrottle.space import Knob, Level, OperatingPoint, SearchSpace
from polythrottle.study import Study, Trial


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


Meter = EnergyMeter | PowerMeter
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
        """Return what one more trial is expected to take off the objective: of energy, joules per item.

        Pure as a suggestion is; 0 if nothing is left, inf if that is unknown.
        """


@runtime_checkable
class Wary(Protocol):
    """A search method that can say whether it is about to take a risk."""

    def dares(self, study: Study) -> bool:
        """Return whether the next point is likelier to break a limit than any risk it takes for a real gain.

        Pure as a suggestion is.
        """
