"""What the control loop needs from the outside: a board it may set, and the requests that are served."""

from dataclasses import dataclass
from typing import Protocol

from polythrottle.daemon.signals import Target
from polythrottle.measurement import EnergyKind, Reading
from polythrottle.space import OperatingPoint


@dataclass(frozen=True)
class Seen:
    """What was seen of a workload's requests since the look before; what is not known is None.

    Args:
        arrived: Requests that came; None where only the workload itself can be seen.
        answered: Of them or of earlier ones, how many ended since; ``failed`` of those, without an answer.
        waiting: Requests that wait to be sent, now.
        p99_s: Of the requests answered lately, over as long a time as the SLO is meant for.
        mean_s: Likewise.
        worst_s: The longest of those answered since the look before.
        model: A name for the contents of the served model; another one means that it was changed. Empty if unknown.
        p99_least_s: What the p99 of that whole time comes to at least, while it has not passed yet: what the guard goes
            by. None where only the p99 is known.
    """

    arrived: int | None = 0
    answered: int | None = None
    failed: int | None = None
    waiting: int | None = None
    p99_s: float | None = None
    mean_s: float | None = None
    model: str = ""
    worst_s: float | None = None
    p99_least_s: float | None = None


def failed_of(first: Seen, second: Seen) -> int | None:
    """Return how many requests failed of those that two looks saw end; None unless both know, for it is of both."""
    known = [each for each in (first, second) if each.answered is not None]
    if any(each.failed is None for each in known):
        return None
    failed = [each.failed for each in (first, second) if each.failed is not None]
    return sum(failed) if failed else None


class Traffic(Protocol):
    """Where the daemon learns of requests, and where it says how they are to be batched."""

    @property
    def uri(self) -> str:
        """The text that opens it again."""

    def look(self, now_s: float) -> Seen | None:
        """Return what was seen since the look before; None while the workload is not up. Never blocks over 0.2 s.

        Args:
            now_s: When, on the clock of the control loop.
        """

    @property
    def note(self) -> str:
        """What a user should know of how requests are seen now, such as what went wrong; empty if nothing."""

    def serve(self, target: Target) -> None:
        """Tell the server the batch and the time to gather of a point, where it can be told.

        Raises:
            TrialError: If the server refuses.
        """

    def close(self) -> None:
        """Release what it holds."""


class Board(Protocol):
    """The device as the control loop sees it: through the actuator, or for a simulation directly."""

    @property
    def uri(self) -> str:
        """The device's URI."""

    @property
    def title(self) -> str:
        """The name people know it by."""

    @property
    def energy_kind(self) -> EnergyKind:
        """How its joules come about."""

    @property
    def boundary(self) -> str:
        """What its joules cover."""

    def take(self) -> None:
        """Take the right to set it, or renew it; to be called at least every `LEASE_S` / 3.

        Raises:
            DeviceError: If it cannot be had: another holds it, or the actuator cannot be reached.
        """

    def apply(self, point: OperatingPoint) -> None:
        """Set the device's knobs of a point; others go to their default.

        Raises:
            KnobRejected: If a level is refused or not kept.
            DeviceError: If the right to set it is gone, or the device.
        """

    def read(self) -> Reading:
        """Return energy so far, temperature and clocks, now.

        Raises:
            DeviceError: If they cannot be read.
        """

    def verify(self) -> tuple[str, ...]:
        """Return the knobs that no longer hold what was applied last, as after somebody else wrote.

        Raises:
            DeviceError: If that cannot be told.
        """

    def restore(self) -> None:
        """Put everything back to how it was found, and keep the right to set it."""

    def release(self) -> tuple[str, ...]:
        """Put everything back and give the right to set it up; return what may not be as found, in words."""
