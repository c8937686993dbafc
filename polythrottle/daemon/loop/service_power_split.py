"""What services on one server share: each of them as the split of watts has to know it, and the watts themselves."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Protocol

from polythrottle.daemon.control.power_sharing import HostPower, PowerSharing, PowerSplit, ServiceState
from polythrottle.daemon.history_store import HistoryStore
from polythrottle.daemon.loop.mailbox import Mailbox
from polythrottle.daemon.loop.runner import Runner
from polythrottle.domain.errors import PolythrottleError

_POWER_S = 10.0
"""For how long the last power of a service is believed where its sensors are silent."""
_UNKNOWN_W = 1e3
"""Counted for a service's devices while nothing at all is known of what they draw at most."""


class WholeMeter(Protocol):
    """A meter of the whole server."""

    def power_w(self) -> tuple[float, float]:
        """Return when the newest power was seen, and watts.

        Raises:
            PolythrottleError: If it says nothing.
        """


@dataclass
class Member:
    """One of several services.

    Args:
        name: Its own.
        weight: What its SLO counts.
        runner: Its control loop; ``mailbox`` where that is met, ``record`` what it remembers.
        mailbox: Likewise.
        record: Likewise.
        most_w: What its devices draw at most while nobody bounds them; None takes what its profile tells.
        folder: Where its state is kept.
    """

    name: str
    weight: float
    runner: Runner
    mailbox: Mailbox
    record: HistoryStore
    most_w: float | None = None
    folder: Path = Path()
    failed: str = ""
    ended: bool = False
    power_w: float | None = None
    powered_s: float = -math.inf
    applies: tuple[int, int] = (-1, -1)
    heard: int = 0

    @property
    def bound_w(self) -> float:
        """What its devices draw at most while nobody bounds them."""
        if self.most_w is not None:
            return self.most_w
        tuned = self.runner.tuned
        if tuned is None or tuned.plan.ladder is None:
            return self.power_w or _UNKNOWN_W
        found = [rung.service.full_w for rung in tuned.plan.ladder.rungs]
        # Unbounded may mean put back: at its default a board may draw more than on any rung.
        default = None if tuned.profile is None else tuned.profile.default
        if default is not None:
            found.append(default.energy_j * default.throughput_per_s)
        return max(found)

    def seen(self, now_s: float) -> None:
        """Note what was drawn in the turn that has ended."""
        power_w = self.runner.sight.power_w
        if power_w is not None:
            self.power_w = power_w
            self.powered_s = now_s
        elif not 0 <= now_s - self.powered_s < _POWER_S:
            self.power_w = None

    def service(self) -> ServiceState:
        """Return it as the split has to know it."""
        sight = self.runner.sight
        state = self.runner.executor.state
        # Nobody sets its board any more: as without a lease it is counted with the most it can draw.
        if self.failed:
            state = replace(state, leased=False)
        return ServiceState(
            name=self.name,
            weight=self.weight,
            state=state,
            most_w=self.bound_w,
            power_w=self.power_w,
            rate_per_s=sight.rate_per_s,
            waiting=0 if sight.seen is None else sight.seen.waiting or 0,
            # What was set at the end of the turn before did not hold all of this one.
            whole=set(self.applies) == {self.runner.executor.applies},
        )


@dataclass
class SharedPower:
    """The watts that services share.

    Args:
        limit_w: Of the whole server; None for no limit.
        host: What it draws besides their devices.
        meter: Of the whole server; None if there is none.
    """

    limit_w: float | None = None
    host: HostPower = field(default_factory=HostPower)
    meter: WholeMeter | None = None
    sharing: PowerSharing = field(default_factory=PowerSharing)
    split: PowerSplit | None = None
    fault: str = ""
    whole_w: float | None = None
    above: int = 0
    above_run: int = 0
    above_most: int = 0

    def rest_w(self) -> float:
        """Return what is counted for what the server draws besides."""
        if self.limit_w is None or not self.host.known:
            return 0.0
        return self.host.besides_w(self.limit_w)

    def measured(self, boards_w: float | None) -> None:
        """Take in what the devices drew, and what the meter says of the whole."""
        self.fault = ""
        whole_w = None
        if self.meter is not None:
            try:
                whole_w = self.meter.power_w()[1]
            except PolythrottleError as error:
                self.fault = f"the server's meter: {error}"
        if whole_w is not None and boards_w is not None:
            self.host.seen(whole_w, boards_w)
        elif whole_w is None and boards_w is not None and self.host.known:
            base_w, slope = self.host.line
            whole_w = base_w + (1 + slope) * boards_w
        self.whole_w = whole_w
        self._judge()

    def _judge(self) -> None:
        if self.limit_w is not None and self.whole_w is not None and self.whole_w > self.limit_w:
            self.above += 1
            self.above_run += 1
            self.above_most = max(self.above_most, self.above_run)
        else:
            self.above_run = 0

    def changed(self, limit_w: float | None) -> None:
        """Take another limit over and count from now on."""
        self.limit_w = limit_w
        self.above = self.above_run = self.above_most = 0
        if limit_w is None:
            self.split = None
