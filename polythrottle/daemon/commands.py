"""What people and programs may ask of the daemon: plain values, answered by the control loop between two turns."""

from __future__ import annotations

import typing
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Union

from polythrottle.daemon.observation import RequestStats


@dataclass(frozen=True)
class ApplyProfile:
    """Follow the load with another profile of the workload; the one before comes back unless it is confirmed.

    Args:
        profile: Path, or ``<device>/<workload>``, with ``@<SLO>`` where there are several.
        within_s: When it is rolled back unless confirmed; None keeps it.
    """

    profile: str
    within_s: float | None = 60.0


@dataclass(frozen=True)
class Confirm:
    """Keep the profile applied last."""


@dataclass(frozen=True)
class Release:
    """Put the board back and leave it alone until `Take`."""

    reason: str = "asked for"


@dataclass(frozen=True)
class Take:
    """Set the board again after `Release`, or after the daemon gave way to somebody else."""


@dataclass(frozen=True)
class SetBudget:
    """Draw no more than this from now on; all None lifts the limit.

    Args:
        power_w: Most mean power.
        battery_wh: What there is; ``last_s`` how long it must last.
        wh_per_day: Most energy a day.
        carbon: CSV file of carbon intensity along time, to move work and slack along it.
    """

    power_w: float | None = None
    battery_wh: float | None = None
    last_s: float | None = None
    wh_per_day: float | None = None
    carbon: str | None = None


@dataclass(frozen=True)
class SetNodePower:
    """Have a server of services draw no more than this from now on; None lifts the limit.

    Args:
        power_w: Most power of the whole server over a second.
        within_s: By when it must hold; told of as a fault if it does not. None asks for nothing but the next second.
    """

    power_w: float | None = None
    within_s: float | None = None


@dataclass(frozen=True)
class StartStudy:
    """Tune again, from the journal of the study before if there is one.

    Args:
        trials: At most.
        options: Further words of ``polythrottle tune``, by name: ``{"risk": "0.05"}``.
    """

    trials: int = 30
    options: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class StopStudy:
    """End the study that runs; its journal keeps what it knows."""

    id: str = ""


@dataclass(frozen=True)
class HostStudy:
    """Claim the study that is due for another machine, say how far that is with it, or give back what it has found.

    Args:
        host: Who asks, for people.
        claim: What the answer to the first call named; empty to claim.
        trials: Made so far.
        best_j: Energy of the best point so far, joules.
        late: Requests that were late so far beyond the SLO's own share; None where none are counted.
        sent: Requests that were sent so far; 0 where the host does not say.
        bound: How many may be late, as the study was begun with; empty for as many as it was lent with.
        leaves: Whether the host gives the claim up: another may go on with the study.
        ended: Whether the study has ended.
        failed: Whether something went wrong with it, so that it is not made again; ``words`` say what.
        profile: What was found, as the text of its file; empty for none.
    """

    host: str
    claim: str = ""
    trials: int = 0
    best_j: float | None = None
    late: float | None = None
    sent: int = 0
    bound: str = ""
    leaves: bool = False
    ended: bool = False
    failed: bool = False
    words: str = ""
    profile: str = ""


@dataclass(frozen=True)
class Report:
    """What a serving program says of its own requests (see ``traffic=report``)."""

    seen: RequestStats


@dataclass(frozen=True)
class Stop:
    """End the daemon: board restored, study stopped."""


Command = Union[
    ApplyProfile, Confirm, Release, Take, SetBudget, SetNodePower, StartStudy, StopStudy, HostStudy, Report, Stop
]
Answer = typing.Mapping[str, Any]
"""What the control loop says when it has done what was wished; at least ``{"words": ...}``."""
