"""What batches and slices have taken lately on a real device, and what may therefore be expected of the next."""

import math
import statistics
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from polythrottle.errors import InvalidInput
from polythrottle.finetune.job import Slice
from polythrottle.finetune.options import Option
from polythrottle.ladder import Service
from polythrottle.space import OperatingPoint

_MEMORY = 200
"""So many of the last times are remembered of each size."""
_LOOSE = 1.2
"""A tail is at least so many times the mean while too few were seen for a 99th percentile."""
_SHARE = 0.99
_LATELY = 9
"""What most of so many last times exceed is believed at once: the machine has become slower."""


@dataclass
class _Sized:
    """The last times of one size, and joules where they were measured."""

    times_s: deque[float] = field(default_factory=lambda: deque(maxlen=_MEMORY))
    joules: float | None = None

    @property
    def mean_s(self) -> float:
        lately = list(self.times_s)[-_LATELY:]
        return max(statistics.fmean(self.times_s), statistics.median_low(lately))

    @property
    def tail_s(self) -> float:
        place = math.ceil(_SHARE * len(self.times_s)) - 1
        seen_s = sorted(self.times_s)[place]
        return seen_s if len(self.times_s) >= _MEMORY / 2 else max(seen_s, _LOOSE * self.mean_s)


class Timings:
    """The last times of every batch and slice; not for several threads at once.

    A slice of a size that was not seen is taken to lie between its neighbours.

    Args:
        point: That the device is at.
        sizes: Samples of the slices that may be asked for.
        idle_w: What the device draws without work.
    """

    def __init__(self, point: OperatingPoint, sizes: Iterable[int], idle_w: float) -> None:
        self._point, self._idle_w = point, idle_w
        self.sizes = tuple(sorted(set(sizes)))
        self._batches: dict[int, _Sized] = {}
        self._slices: dict[int, _Sized] = {}

    def served(self, batch: int, took_s: float) -> None:
        """Take note of an answered batch."""
        self._batches.setdefault(batch, _Sized()).times_s.append(took_s)

    def forget(self, batch: int) -> None:
        """Forget what a batch has taken."""
        self._batches.pop(batch, None)

    def trained(self, samples: int, took_s: float) -> None:
        """Take note of a slice that is done."""
        self._slices.setdefault(samples, _Sized()).times_s.append(took_s)

    def drew(self, *, batch: int = 0, samples: int = 0, joules: float) -> None:
        """Take note of what a batch, or a slice, makes the device draw."""
        found = self._batches[batch] if batch else self._slices[samples]
        found.joules = joules

    def option(self, most: int | None = None, shared_s: Mapping[int, float] | None = None) -> Option:
        """Return what may be expected of the device.

        Args:
            most: Samples of the largest slice that may be used; None for any.
            shared_s: By batch the latency predicted beside fine-tuning; None where nobody predicts.

        Raises:
            InvalidInput: If no batch was seen.
        """
        if not self._batches:
            raise InvalidInput("no batch was answered yet, so nothing is known of the next")
        services = tuple(self._service(batch) for batch in sorted(self._batches))
        sizes = [size for size in self.sizes if most is None or size <= most] if self._slices else []
        beside = tuple((shared_s or {}).get(each.batch, math.inf) for each in services) if shared_s else ()
        return Option(self._point, services, tuple(map(self._slice, sizes)), beside)

    def _service(self, batch: int) -> Service:
        seen = self._batches[batch]
        joules = seen.joules if seen.joules is not None else self._idle_w * seen.mean_s
        return Service(
            self._point, batch, seen.mean_s, seen.mean_s, seen.tail_s, max(joules, 1e-9), max(0.0, self._idle_w)
        )

    def _slice(self, samples: int) -> Slice:
        known = sorted(self._slices)
        mean_s = _between(samples, known, [self._slices[size].mean_s for size in known])
        tail_s = _between(samples, known, [self._slices[size].tail_s for size in known])
        drawn = [(size, joules) for size in known if (joules := self._slices[size].joules) is not None]
        joules = _between(samples, *map(list, zip(*drawn, strict=True))) if drawn else None
        return Slice(samples, mean_s, max(mean_s, tail_s), joules)


def _between(at: float, places: Sequence[float], values: Sequence[float]) -> float:
    """Return the value at a place: on the line between its neighbours, in proportion beyond the last."""
    if at <= places[0]:
        return values[0]
    for i in range(1, len(places)):
        if at <= places[i]:
            share = (at - places[i - 1]) / (places[i] - places[i - 1])
            return values[i - 1] + share * (values[i] - values[i - 1])
    return values[-1] * at / places[-1]
