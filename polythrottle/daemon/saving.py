"""What following a profile saves against the device's default point, at the same requests."""

import math
from dataclasses import dataclass
from datetime import datetime

from polythrottle.daemon.record import Totals
from polythrottle.daemon.status import SavedShown
from polythrottle.errors import InvalidInput
from polythrottle.ladder import Rung, Service
from polythrottle.measurement import BETWEEN_WINDOWS, EnergyKind, Measurement
from polythrottle.profile import Profile
from polythrottle.space import OperatingPoint

_SPREADS = 1.96


@dataclass(frozen=True)
class Saving:
    """The default point as it would have answered.

    Args:
        default: It, at any rate; None if the profile does not tell.
        doubt: Standard deviation of its predicted power, as a fraction; None if the profile has no interval for it.
        words: How the figure comes about, or why there is none.
    """

    default: Rung | None
    doubt: float | None
    words: str

    @classmethod
    def of(cls, profile: Profile | None) -> "Saving":
        """Return what a profile tells of the default point."""
        if profile is None or profile.default is None:
            return cls(None, None, "unknown: there is no profile with a measurement of the default point")
        seen = profile.default
        if seen.energy_kind is EnergyKind.RELATIVE:
            return cls(None, None, "unknown: the profile's energy is relative, not in joules")
        try:
            service = Service.of(OperatingPoint({}), seen)
        except InvalidInput:
            return cls(None, None, "unknown: the profile lacks the idle power or the p99 of the default point")
        power_w = service.batch_j / service.interval_s
        rung = Rung(service.most_per_s, service, 0.0, power_w, service.tail_s)
        return cls(rung, _doubt(seen), f"against the default point at the same requests; {seen.energy_kind} energy")

    def in_turn(self, rate_per_s: float, joules: float, period_s: float) -> tuple[float, float | None] | None:
        """Return the joules saved in a time and their standard deviation; None if that is unknown.

        Args:
            rate_per_s: Requests per second in it.
            joules: Drawn in it.
            period_s: How long it was.
        """
        if self.default is None:
            return None
        default_j = self.default.power_at(rate_per_s) * period_s
        return default_j - joules, None if self.doubt is None else self.doubt * default_j

    def _unknown(self, requests: int) -> str:
        """Return why nothing is claimed."""
        if self.default is None:
            return self.words
        if not requests:
            return "unknown: no request was answered yet"
        return "unknown: while requests were answered, power or rate could not be read, or the board was not set"

    def shown(self, totals: Totals, requests: int) -> SavedShown:
        """Return what was saved as people see it; nothing while no request was answered."""
        saved_j, sd_j = totals.saved_j, totals.saved_sd_j
        if saved_j is None or not requests:
            return SavedShown(requests=requests, words=self._unknown(requests))
        if sd_j is None:
            return SavedShown(saved_j, None, None, requests, f"{self.words}; without an interval")
        half_j = _SPREADS * sd_j
        return SavedShown(saved_j, saved_j - half_j, saved_j + half_j, requests, self.words)


def _doubt(seen: Measurement) -> float | None:
    interval = seen.intervals.get("energy")
    if interval is None or not interval.known:
        return None
    return math.hypot(interval.half / _SPREADS / seen.energy_j, math.sqrt(2) * BETWEEN_WINDOWS)


def midnight_s(wall_s: float) -> float:
    """Return when the local day of a wall time began, both in seconds since the epoch."""
    day = datetime.fromtimestamp(wall_s).replace(hour=0, minute=0, second=0, microsecond=0)
    return day.timestamp()
