"""Whether a profile's predictions still hold: a sample of energy and latency for every minute of load.

What a rung's prediction is off by from the beginning is learnt from its first samples, each of a minute on that rung,
and how much samples differ from the samples of all rungs. From then on the time on all rungs that are known makes up
samples together, so that a load that is followed up and down is asked for drift as often as one that stays.
"""

import math
import zlib
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from polythrottle.daemon.drift import SAMPLE_S, Baseline, Watch
from polythrottle.daemon.looking import Sight
from polythrottle.daemon.record import Record
from polythrottle.ladder import Ladder, Rung

_LEARNT = "watch"
_FIRST, _FIRST_HERE = 20, 5
"""How many samples a baseline is made of, and how many of each rung, before it is asked for drift: with ten the spread
must be taken for half as much again as with twenty, and a drift takes so much longer to be found."""
_REQUESTS = 20
_BUSY_MOST = 0.95
_UNKNOWN = Baseline(0.0, 1.0)
"""Of a quantity that was not seen often enough: no drift is found in it."""


@dataclass
class _Stay:
    """What was seen since the last sample, on one rung or on several."""

    seconds: float = 0.0
    joules: float = 0.0
    predicted_j: float = 0.0
    requests: int = 0
    rungs: set[int] = field(default_factory=set)


@dataclass
class _Learnt:
    """Logarithms of observed over predicted on a rung."""

    energies: list[float] = field(default_factory=list)
    latencies: list[float] = field(default_factory=list)

    @property
    def lists(self) -> list[list[float]]:
        return [list(self.energies), list(self.latencies)]


class Watching:
    """The watch over one profile at a time; what it has learnt outlives the daemon.

    Args:
        record: Where it is kept.
    """

    def __init__(self, record: Record) -> None:
        self.words = ""
        self._record = record
        self._key = 0
        self._learnt: dict[int, _Learnt] = {}
        self._stays: dict[int, _Stay] = {}
        self._known = _Stay()
        self._watch: Watch | None = None
        self._timed = False
        self._here, self._here_s = -1, 0.0

    def over(self, ladder: Ladder | None) -> None:
        """Watch the predictions of a ladder from now on; nothing has drifted then."""
        key = 0 if ladder is None else zlib.crc32(repr(ladder).encode())
        self._stays, self._known, self._here, self._here_s = {}, _Stay(), -1, 0.0
        if key == self._key:
            return
        self._key, self.words = key, ""
        self._learnt = _restored(self._record.kept(_LEARNT), key)
        self._fresh()

    def again(self) -> None:
        """Forget the drift that was found, so that the next one is."""
        self.words = ""
        self._fresh()

    def anew(self) -> None:
        """Forget what was learnt too: what a profile predicts is to be learnt from what is seen from now on."""
        self._learnt, self._stays, self._known = {}, {}, _Stay()
        self.again()

    def _fresh(self) -> None:
        self._watch, self._timed = None, False
        self._begin()

    def seen(self, sight: Sight, number: int, rung: Rung) -> str | None:
        """Take one control period in, through all of which a rung was held.

        Args:
            sight: What was seen.
            number: The rung's.
            rung: The rung.

        Returns:
            What has drifted, once, when it is found; None otherwise.
        """
        self._here_s = sight.period_s + (self._here_s if number == self._here else 0.0)
        self._here = number
        rate_per_s, seen = sight.rate_per_s, sight.seen
        if not rate_per_s or sight.own_j is None or seen is None:
            return None
        stay, off = self._stay(number)
        stay.seconds += sight.period_s
        stay.joules += sight.own_j
        stay.predicted_j += math.exp(off) * rung.power_at(rate_per_s) * sight.period_s
        stay.requests += seen.arrived or 0
        stay.rungs.add(number)
        if stay.seconds < SAMPLE_S:
            return None
        if stay is self._known:
            self._known = _Stay()
        else:
            del self._stays[number]
        if stay.requests < _REQUESTS or stay.predicted_j <= 0 or stay.joules <= 0:
            return None
        return self._sampled(number, stay, self._slower(stay, seen.mean_s, rung))

    def _stay(self, number: int) -> tuple[_Stay, float]:
        """Return the sample that time on a rung is a part of, and the logarithm of what that is known to be off by."""
        learnt = self._learnt.get(number)
        if self._watch is None or learnt is None or len(learnt.energies) < _FIRST_HERE:
            return self._stays.setdefault(number, _Stay()), 0.0
        return self._known, _mean(learnt.energies)

    def _slower(self, stay: _Stay, mean_s: float | None, rung: Rung) -> float | None:
        """Return the mean latency over the predicted; None unless the last minute, which it is of, was spent there."""
        if not mean_s or self._here_s < SAMPLE_S or len(stay.rungs) > 1:
            return None
        return mean_s / _latency_s(rung, stay.requests / stay.seconds)

    def _sampled(self, number: int, stay: _Stay, latency: float | None) -> str | None:
        """Learn from a sample, or ask it for drift.

        Args:
            number: Of the rung it ended on.
            stay: What it is made of.
            latency: Observed over predicted; None if there is none.
        """
        learnt, energy = self._learnt.setdefault(number, _Learnt()), stay.joules / stay.predicted_j
        known = self._watch is not None and len(learnt.energies) >= _FIRST_HERE
        if not known:
            learnt.energies.append(math.log(energy))
        asked_s = None if latency is None else self._learn(learnt.latencies, latency, self._timed)
        if not known or (latency is not None and asked_s is None):
            self._record.keep(
                _LEARNT, {"key": self._key, "rungs": {str(n): each.lists for n, each in self._learnt.items()}}
            )
            self._begin()
        if self._watch is None:
            return None
        self._watch = self._watch.seen(energy if known else math.nan, 1.0, asked_s or math.nan, 1.0)
        if self.words or (words := self._watch.words) is None:
            return None
        self.words = words
        return words

    @staticmethod
    def _learn(learnt: list[float], ratio: float, known: bool) -> float | None:
        """Return a ratio over what it is on average, or learn from it and return None.

        Args:
            learnt: Logarithms of ratios at the same rung.
            ratio: Observed over predicted.
            known: Whether there is a baseline, to which a rung adds its own mean alone.
        """
        if known and len(learnt) >= _FIRST_HERE:
            return ratio / math.exp(_mean(learnt))
        learnt.append(math.log(ratio))
        return None

    def _begin(self) -> None:
        """Make the baselines of what was learnt, once there is enough of each."""
        energies = _about_means([each.energies for each in self._learnt.values()])
        latencies = _about_means([each.latencies for each in self._learnt.values()])
        if self._watch is None and len(energies) >= _FIRST:
            self._watch = Watch.over(Baseline.of(energies), _UNKNOWN)
        if self._watch is not None and not self._timed and len(latencies) >= _FIRST:
            self._timed = True
            self._watch = replace(self._watch, latency=Watch.over(_UNKNOWN, Baseline.of(latencies)).latency)


def _about_means(rungs: list[list[float]]) -> list[float]:
    return [each - _mean(rung) for rung in rungs if len(rung) > 1 for each in rung]


def _mean(values: list[float]) -> float:
    return math.fsum(values) / len(values)


def _latency_s(rung: Rung, rate_per_s: float) -> float:
    """Return the mean latency a rung is expected to show: gathering, queueing behind other batches, being answered.

    Batches that wait for the device are taken to arrive at random and to take equally long (M/D/1).
    """
    service = rung.service
    filled = min(float(service.batch), 1 + rate_per_s * rung.gather_s)
    gathering_s = min(rung.gather_s, (filled - 1) / rate_per_s) / 2
    busy = min(_BUSY_MOST, rate_per_s / filled * service.interval_s)
    return gathering_s + busy / (2 * (1 - busy)) * service.interval_s + service.latency_s


def _restored(kept: Any, key: int) -> dict[int, _Learnt]:
    if not isinstance(kept, Mapping) or kept.get("key") != key:
        return {}
    try:
        found = kept["rungs"].items()
        return {int(n): _Learnt([float(e) for e in lists[0]], [float(s) for s in lists[1]]) for n, lists in found}
    except (TypeError, ValueError, KeyError, AttributeError, IndexError):
        return {}
