"""What a control loop is made of."""

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from polythrottle.clock import Clock
from polythrottle.daemon.accounts import Accounts
from polythrottle.daemon.desk import Desk
from polythrottle.daemon.finetuning import Finetuning
from polythrottle.daemon.guards import Bounds
from polythrottle.daemon.notify import Supervisor
from polythrottle.daemon.ports import Board, Traffic
from polythrottle.daemon.record import Record
from polythrottle.daemon.studying import Studies


def slept_s() -> float:
    """Return how long this machine has been asleep since it was started, in seconds."""
    return time.clock_gettime(time.CLOCK_BOOTTIME) - time.clock_gettime(time.CLOCK_MONOTONIC)


@dataclass(frozen=True)
class Parts:
    """What the control loop is made of.

    Args:
        clock: It goes by.
        board: It sets.
        traffic: It follows.
        desk: Where it meets those who ask.
        record: What it remembers.
        accounts: What it adds up.
        studies: Tune again.
        guards: Limits that go before those of profiles; ``slo`` constraints likewise.
        identity: Returns what the board is, to check profiles with; empty if it does not say.
        wall: Wall time, seconds since the epoch.
        slept_s: How long the machine has slept so far.
        supervisor: The service manager.
        version: Of polythrottle.
        finetuning: Looks for trainers beside the workload.
    """

    clock: Clock
    board: Board
    traffic: Traffic
    desk: Desk
    record: Record
    accounts: Accounts
    studies: Studies
    guards: Bounds = field(default_factory=Bounds)
    slo: tuple[str, ...] = ()
    identity: Callable[[], Mapping[str, str]] = dict
    wall: Callable[[], float] = time.time
    slept_s: Callable[[], float] = slept_s
    supervisor: Supervisor = field(default_factory=lambda: Supervisor({}))
    version: str = ""
    finetuning: Finetuning = field(default_factory=Finetuning)
