"""What the controller is told, and what it says is to be done: plain values."""

from dataclasses import dataclass

from polythrottle.daemon.guards import Bounds, Observed, Trip
from polythrottle.ladder import Ladder
from polythrottle.space import OperatingPoint


@dataclass(frozen=True)
class Target:
    """What is to hold: a point, and how long the server may keep a request waiting for others, in seconds."""

    point: OperatingPoint
    gather_s: float = 0.0


@dataclass(frozen=True)
class Plan:
    """What is known about a workload.

    Args:
        ladder: Its points along load; None if its model has none that is valid, so that it stays at the safe point.
        safe: Where latency and errors are surely all right, such as the device's default.
        cool: Where power and heat surely are.
        bounds: What the guards hold.
    """

    ladder: Ladder | None
    safe: Target
    cool: Target
    bounds: Bounds


@dataclass(frozen=True)
class WorkloadUp:
    """A workload has started, or has been replaced by another."""

    plan: Plan


@dataclass(frozen=True)
class WorkloadDown:
    """The workload has ended."""


@dataclass(frozen=True)
class PowerBudget:
    """The most mean power from now on, in watts; None if there is no such limit."""

    limit_w: float | None


@dataclass(frozen=True)
class Suspend:
    """The machine goes to sleep."""


@dataclass(frozen=True)
class Resume:
    """The machine is awake again."""


@dataclass(frozen=True)
class DriverReload:
    """The driver was loaded anew, so that nothing may hold any more."""


@dataclass(frozen=True)
class ForeignWrite:
    """Somebody else has changed what this daemon set."""

    now_s: float
    knobs: tuple[str, ...]


@dataclass(frozen=True)
class Reclaim:
    """A person wants the daemon to set the board again after it gave way."""


@dataclass(frozen=True)
class ModelChanged:
    """The served model is another one, with a ladder of its own or none."""

    ladder: Ladder | None


@dataclass(frozen=True)
class Replanned:
    """The same workload is to be followed by another profile: what is known of its load stays known."""

    plan: Plan


@dataclass(frozen=True)
class DriftFound:
    """The profile's predictions no longer hold."""

    words: str


@dataclass(frozen=True)
class StudyOffered:
    """There is time, energy and room for violations to explore."""


@dataclass(frozen=True)
class StudyAsked:
    """Somebody wants a study now, whatever else says that there is time."""

    words: str


@dataclass(frozen=True)
class StudyEnded:
    """A study has ended, with a better ladder or none."""

    ladder: Ladder | None


@dataclass(frozen=True)
class Finetuned:
    """A trainer beside the workload has begun or ceased to work; ``runs`` is whether it does, ``words`` say it."""

    runs: bool
    words: str


@dataclass(frozen=True)
class Refused:
    """What was to be applied could not be: the device refused it, or is not there."""

    words: str


@dataclass(frozen=True)
class LeaseLost:
    """The right to write is gone; whoever keeps it has restored the board or does so. ``words`` say what happened."""

    words: str = "the right to set the board is lost"


@dataclass(frozen=True)
class LeaseGained:
    """The right to write is there again."""


Event = (
    WorkloadUp
    | WorkloadDown
    | Observed
    | PowerBudget
    | Suspend
    | Resume
    | DriverReload
    | ForeignWrite
    | Reclaim
    | ModelChanged
    | Replanned
    | DriftFound
    | StudyOffered
    | StudyAsked
    | StudyEnded
    | Finetuned
    | Refused
    | LeaseLost
    | LeaseGained
)


@dataclass(frozen=True)
class Apply:
    """Set a point of the ladder."""

    target: Target
    reason: str


@dataclass(frozen=True)
class GoSafe:
    """Set the safe or the cool point, before anything else is done."""

    target: Target
    reason: str


@dataclass(frozen=True)
class Restore:
    """Put everything back to how it was found."""

    reason: str


@dataclass(frozen=True)
class Verify:
    """Find the device again and read back what holds, before anything is written."""

    reason: str


@dataclass(frozen=True)
class StartStudy:
    """Let a study continue from its journal; it sets the board until it ends."""

    reason: str


@dataclass(frozen=True)
class StopStudy:
    """End the study at once; its journal keeps what it knows."""

    reason: str


@dataclass(frozen=True)
class Raise:
    """Tell people.

    Args:
        kind: One word for machines.
        words: For people.
        trips: The guards that tripped, if that is what happened.
    """

    kind: str
    words: str
    trips: tuple[Trip, ...] = ()


Action = Apply | GoSafe | Restore | Verify | StartStudy | StopStudy | Raise
