"""Whether a profile's predictions still hold, asked for energy after every ten seconds of load.

Latency is asked after every minute on one rung, for it is seen as the mean of a minute. Time on all rungs makes up
samples of energy together, so that a load that is followed up and down is asked for drift as often as one that stays;
what each rung's prediction is off by is learnt from its own time.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from polythrottle.daemon.control.drift_detector import (
    MINUTE_S,
    SAMPLE_S,
    Chart,
    Offsets,
    Quantity,
    ResidualSpread,
    words_of,
)
from polythrottle.daemon.history_store import HistoryStore
from polythrottle.daemon.observation import ControlPeriod
from polythrottle.domain.errors import PolythrottleError
from polythrottle.domain.ladder import Ladder, Rung
from polythrottle.storage.untrusted import MALFORMED

_LEARNT = "watch"
_REQUESTS_PER_S = 1 / 3
"""A load below it tells nothing: that much is idle time."""
_BUSY_MOST = 0.95
_GAP_S = 1.5
"""Time that was not seen and is longer than this parts what came before it from what comes after."""
_OFF_MOST = 100.0
"""No prediction is off by a factor of e to this."""
_ENERGY = Quantity(Offsets(0.1))
_LATENCY = Quantity(Offsets(0.5), Chart(sample_s=MINUTE_S))
"""Predicted latencies leave out more of what differs from rung to rung than predicted energies do; both assumed."""


@dataclass
class _Stay:
    """What was seen on one rung and is not learnt from yet."""

    seconds: float = 0.0
    joules: float = 0.0
    predicted_j: float = 0.0

    def add(self, seconds: float, joules: float, predicted_j: float) -> None:
        self.seconds += seconds
        self.joules += joules
        self.predicted_j += predicted_j


@dataclass
class _Sample:
    """What was seen since the last sample of energy, on one rung or on several.

    Args:
        seconds: Of load.
        requests: That came.
        joules: Drawn.
        expected_j: Predicted, times what the predictions are known to be off by.
        unsure_j: By how much that may be off, a standard deviation, taken to be the same for all of it.
        stays: By the rung's number.
    """

    seconds: float = 0.0
    requests: int = 0
    joules: float = 0.0
    expected_j: float = 0.0
    unsure_j: float = 0.0
    stays: dict[int, _Stay] = field(default_factory=dict)

    @property
    def loaded(self) -> bool:
        return self.requests >= self.seconds * _REQUESTS_PER_S and self.joules > 0 and self.expected_j > 0


@dataclass
class _Here:
    """The time on the rung that is held since the last sample of latency."""

    number: int = -1
    seconds: float = 0.0
    requests: int = 0
    at_s: float = 0.0


class DriftMonitor:
    """The watch over one profile at a time; what it has learnt outlives the daemon.

    Args:
        record: Where it is kept.
    """

    def __init__(self, record: HistoryStore) -> None:
        self.words = ""
        self._record = record
        self._key = 0
        self._energy = _ENERGY
        self._latency = _LATENCY
        self._begin()

    def over(self, ladder: Ladder | None) -> None:
        """Watch the predictions of a ladder from now on; nothing has drifted then."""
        if ladder is None:
            key = 0
        else:
            # Not hash(): that of a text differs from process to process, and the key must outlive this one.
            key = zlib.crc32(repr(ladder).encode())
        self._begin()
        if key == self._key:
            return
        self._key = key
        self.words = ""
        self._energy, self._latency = _restored(self._record.kept(_LEARNT), key) or (_ENERGY, _LATENCY)

    def again(self) -> None:
        """Forget the drift that was found, so that the next one is."""
        self.words = ""
        self._energy, self._latency = self._energy.again(), self._latency.again()

    def anew(self) -> None:
        """Forget what was learnt too: what a profile predicts is to be learnt from what is seen from now on."""
        self.words = ""
        self._energy = _ENERGY
        self._latency = _LATENCY
        self._begin()
        # At once and not with the next minute: a restart meanwhile would bring back what is to be forgotten.
        self._record.keep(_LEARNT, None)

    def _begin(self) -> None:
        self._sample, self._here = _Sample(), _Here()
        self._stays: dict[int, _Stay] = {}
        self._unkept_s = 0.0

    def seen(self, sight: ControlPeriod, number: int, rung: Rung) -> str | None:
        """Take one control period in, through all of which a rung was held.

        Args:
            sight: What was seen.
            number: The rung's.
            rung: The rung.

        Returns:
            What has drifted, once, when it is found; None otherwise.
        """
        seen = sight.seen
        rate_per_s = sight.rate_per_s
        # A drift is told once: what it was found by must not teach the offsets, or it would be explained away.
        if self.words or rate_per_s is None or sight.own_j is None or seen is None:
            return None  # nothing is learnt from what has drifted
        self._added(sight, number, sight.own_j, rung.power_at(rate_per_s) * sight.period_s)
        timed = self._timed(sight, number, rung)
        sampled = self._sampled()
        if not (timed or sampled):
            return None
        self._kept()
        self.words = words_of(self._energy, self._latency) or ""
        return self.words or None

    def _added(self, sight: ControlPeriod, number: int, joules: float, predicted_j: float) -> None:
        """Add a period to the sample of energy under way."""
        sample = self._sample
        seconds = sight.period_s
        offset, unsure = self._energy.at(number)
        expected_j = math.exp(offset) * predicted_j
        sample.seconds += seconds
        sample.requests += 0 if sight.seen is None else sight.seen.arrived or 0
        sample.joules += joules
        sample.expected_j += expected_j
        sample.unsure_j += math.sqrt(unsure) * expected_j
        sample.stays.setdefault(number, _Stay()).add(seconds, joules, predicted_j)

    def _sampled(self) -> bool:
        """Ask a sample of energy, if there is a whole one, and learn from it; return whether that was done."""
        sample = self._sample
        if sample.seconds < SAMPLE_S:
            return False
        self._sample = _Sample()
        if not sample.loaded:
            return False
        unsure = (sample.unsure_j / sample.expected_j) ** 2
        self._energy = self._energy.seen(math.log(sample.joules / sample.expected_j), sample.seconds, unsure)
        for number, stay in sample.stays.items():
            self._learn(number, stay)
        self._unkept_s += sample.seconds
        return True

    def _learn(self, number: int, more: _Stay) -> None:
        """Learn from the time on a rung, once there is enough of it for a residual."""
        stay = self._stays.setdefault(number, _Stay())
        stay.add(more.seconds, more.joules, more.predicted_j)
        if stay.seconds < SAMPLE_S:
            return
        del self._stays[number]
        if stay.joules > 0 and stay.predicted_j > 0:
            self._energy = self._energy.learnt(number, stay.seconds, math.log(stay.joules / stay.predicted_j))

    def _timed(self, sight: ControlPeriod, number: int, rung: Rung) -> bool:
        """Ask the mean latency, once the last minute, which it is of, was spent on one rung; return whether it was."""
        here = self._here
        seen = sight.seen
        if number != here.number or sight.now_s - here.at_s > sight.period_s + _GAP_S:
            here = self._here = _Here(number)
        here.seconds = here.seconds + sight.period_s
        here.at_s = sight.now_s
        here.requests += 0 if seen is None else seen.arrived or 0
        if here.seconds < MINUTE_S:
            return False
        self._here = _Here(number, at_s=here.at_s)
        rate_per_s = here.requests / here.seconds
        if seen is None or not seen.mean_s or rate_per_s < _REQUESTS_PER_S:
            return False
        residual = math.log(seen.mean_s / _latency_s(rung, rate_per_s))
        offset, unsure = self._latency.at(number)
        self._latency = self._latency.seen(residual - offset, here.seconds, unsure)
        self._latency = self._latency.learnt(number, here.seconds, residual)
        return True

    def _kept(self) -> None:
        """Keep what was learnt, about once a minute."""
        if self._unkept_s >= MINUTE_S:
            self._unkept_s = 0.0
            self._record.keep(
                _LEARNT, {"key": self._key, "energy": _told(self._energy), "latency": _told(self._latency)}
            )


def _latency_s(rung: Rung, rate_per_s: float) -> float:
    """Return the mean latency a rung is expected to show: gathering, queueing behind other batches, being answered.

    Batches that wait for the device are taken to arrive at random and to take equally long (M/D/1).
    """
    service = rung.service
    filled = min(float(service.batch), 1 + rate_per_s * rung.gather_s)
    gathering_s = min(rung.gather_s, (filled - 1) / rate_per_s) / 2
    # At full load the queue of the formula has no end.
    busy = min(_BUSY_MOST, rate_per_s / filled * service.interval_s)
    return gathering_s + busy / (2 * (1 - busy)) * service.interval_s + service.latency_s


def _told(quantity: Quantity) -> dict[str, Any]:
    """Return what is kept of a quantity."""
    rungs = {str(number): list(each) for number, each in quantity.offsets.learnt.items()}
    return {"rungs": rungs, "spread": [quantity.spread.minutes, quantity.spread.squares]}


def _restored(kept: Any, key: int) -> tuple[Quantity, Quantity] | None:
    """Return what was kept of energy and latency; None if it is of another ladder, or cannot be read any more."""
    if not isinstance(kept, Mapping) or kept.get("key") != key:
        return None
    try:
        return _learnt(_ENERGY, kept["energy"]), _learnt(_LATENCY, kept["latency"])
    except (*MALFORMED, PolythrottleError):
        return None


def _learnt(fresh: Quantity, kept: Any) -> Quantity:
    """Return a quantity with what was kept of it.

    Raises:
        ValueError: If a figure is out of its range.
    """
    rungs = {int(number): (float(each[0]), float(each[1])) for number, each in kept["rungs"].items()}
    spread = ResidualSpread(float(kept["spread"][0]), float(kept["spread"][1]))
    figures = (spread.minutes, spread.squares, *(minutes for minutes, _ in rungs.values()))
    means = (mean for _, mean in rungs.values())
    if not all(0 <= figure < math.inf for figure in figures) or not all(abs(mean) < _OFF_MOST for mean in means):
        raise ValueError("what was learnt is out of range")
    offsets = replace(fresh.offsets, learnt=rungs)
    return replace(fresh, offsets=offsets, spread=spread, chart=replace(fresh.chart, spread=spread.value))
