"""A fine-tuning job in slices, and the operating points for it and inference: what each can do and costs."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from operator import itemgetter
from typing import NamedTuple

from polythrottle.domain.errors import InvalidInput
from polythrottle.domain.ladder import PointPerformance
from polythrottle.domain.space import OperatingPoint

# A fine-tuning job, and the slices in which it is done.


@dataclass(frozen=True)
class FinetuningJob:
    """What is to be fine-tuned: a head on a frozen backbone, over some data, for some epochs.

    Args:
        samples: Of the data; each is used once per epoch.
        batch: Samples of one optimiser step; the last step of an epoch takes what is left.
        epochs: How often the data is gone through.
        output: Dimension of the head's output.
        model: Name of the backbone.

    Raises:
        InvalidInput: If one of the counts is not at least 1.
    """

    samples: int
    batch: int
    epochs: int
    output: int
    model: str

    def __post_init__(self) -> None:
        for name in ("samples", "batch", "epochs", "output"):
            if getattr(self, name) < 1:
                raise InvalidInput(f"a fine-tuning job needs at least 1 for its {name}, not {getattr(self, name)}")

    @property
    def steps_per_epoch(self) -> int:
        """Optimiser steps that go through the data once."""
        return -(-self.samples // self.batch)

    @property
    def steps(self) -> int:
        """Optimiser steps of the whole job."""
        return self.steps_per_epoch * self.epochs

    @property
    def work(self) -> int:
        """Samples of the whole job."""
        return self.samples * self.epochs

    def step_samples(self, step: int) -> int:
        """Return how many samples an optimiser step takes, steps of the whole job counted from 0."""
        return min(self.batch, self.samples - step % self.steps_per_epoch * self.batch)


@dataclass(frozen=True)
class Slice:
    """A part of a step between two points where it may be pre-empted, run while nothing else runs.

    Args:
        samples: Of the step's batch.
        alone_s: How long it takes on average.
        tail_s: The time that 99 % of such slices stay within.
        joules: Everything the device draws meanwhile; None where unknown.

    Raises:
        InvalidInput: If there is no sample, a time is not positive and finite, or the tail is shorter than the mean.
    """

    samples: int
    alone_s: float
    tail_s: float
    joules: float | None = None

    def __post_init__(self) -> None:
        if self.samples < 1 or not 0 < self.alone_s <= self.tail_s < math.inf:
            raise InvalidInput(
                f"a slice of {self.samples} samples cannot take {self.alone_s:g} s on average "
                f"and {self.tail_s:g} s at the 99th percentile"
            )


# What a device can do at a few operating points, and which of them costs least for both kinds of work together.

MARGIN = 0.95
"""The share of the limit that a prediction may take: a request may meet stragglers."""
_FULL = 0.9
"""The share of its time that inference may need at most at a point that is chosen."""
_NEAR = 1.03
"""A device stays where it is as long as nothing is cheaper by more than this factor."""
_BRISK = 0.9
"""Fine-tuning should get at least this share done of what there would be room for without choosing points."""
_CUT = 0.1
"""The share of its pace that fine-tuning loses beside a device's full load, to slices that requests cut short."""
_NEAREST = 0.9
"""Where no point is as brisk, those are that come so near to the briskest."""
_LOOK = 64
"""So many batches ahead a queue is followed until it is taken to grow without end."""
_SIGMAS = 1.0
"""By how many standard deviations of a Poisson count more requests may come than expected."""
_ALIKE = 1.01
"""Latencies within this factor of each other are taken for the same."""
_STEP = 1.15
"""Rates are told apart by steps of this factor, so that the point does not follow every wiggle of a forecast."""


@dataclass(frozen=True)
class Option:
    """How a device does both kinds of work at one operating point.

    Args:
        point: Levels of its knobs, batch size left out.
        services: Inference, by rising batch; at least one.
        slices: Fine-tuning, by rising number of samples.
        shared_s: For each service the latency predicted while fine-tuning runs beside it; empty where nobody predicts.

    Raises:
        InvalidInput: If there is no service, or something is out of order.
    """

    point: OperatingPoint
    services: tuple[PointPerformance, ...]
    slices: tuple[Slice, ...]
    shared_s: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        batches = [each.batch for each in self.services]
        sizes = [each.samples for each in self.slices]
        if not batches or batches != sorted(set(batches)) or sizes != sorted(set(sizes)):
            raise InvalidInput("an option needs services by rising batch, and slices by rising size")
        if self.shared_s and len(self.shared_s) != len(batches):
            raise InvalidInput("an option needs a shared latency for each service, or none")

    def serves(self, requests: int) -> PointPerformance:
        """Return the service of the largest batch that so many requests fill; the smallest if none is."""
        return next((each for each in reversed(self.services) if each.batch <= requests), self.services[0])

    def widest(self, slo_s: float) -> PointPerformance:
        """Return the service of the largest batch that a request can wait for and still be answered in time."""
        # A request may have just missed a batch: it waits for that one, then for its own.
        able = [each for each in self.services if each.interval_s + each.tail_s <= MARGIN * slo_s]
        if able:
            return able[-1]
        return self.services[0]

    def fits(self, spare_s: float, left: int) -> Slice | None:
        """Return the largest slice whose tail stays within a time, of at most so many samples; None if none does."""
        able = (each for each in reversed(self.slices) if each.samples <= left and each.tail_s <= spare_s)
        return next(able, None)

    def in_time(self, ages_s: Sequence[float], rate_per_s: float | None, slo_s: float, spent_s: float) -> bool:
        """Return whether all requests, waiting or expected, are in time if nothing is served for a while.

        The next request is expected at once, and further ones as early as one standard deviation of a Poisson count
        lets them be. The queue is followed batch by batch until it is empty; each batch may take its tail, and those
        before it their mean.

        Args:
            ages_s: How long each request has waited, oldest first.
            rate_per_s: Of the requests to come; None if unknown, and then one comes at once.
            slo_s: The limit of each from its arrival.
            spent_s: For how long nothing is served.
        """
        most = self.widest(slo_s).batch
        limit_s = MARGIN * slo_s
        at_s = spent_s
        first = 0
        for _ in range(_LOOK):
            if first >= len(ages_s) and _comes_s(ages_s, rate_per_s, first) > at_s:
                return True
            after = first + 1
            while after < first + most and _comes_s(ages_s, rate_per_s, after) <= at_s:
                after += 1
            service = self.serves(after - first)
            if at_s + service.tail_s > _comes_s(ages_s, rate_per_s, first) + limit_s:
                return False
            first = first + min(after - first, service.batch)
            at_s = at_s + service.interval_s
        return False

    def gap(self, rate_per_s: float, slo_s: float) -> Slice | None:
        """Return the largest slice that may start while no request waits; None if none may."""
        return next((each for each in reversed(self.slices) if self.in_time((), rate_per_s, slo_s, each.tail_s)), None)

    def pace(self, rate_per_s: float, slo_s: float) -> float:
        """Return the samples that are fine-tuned per second beside requests at a rate; 0 where nothing may start."""
        piece = self.gap(rate_per_s, slo_s)
        service = self.gathered(rate_per_s, slo_s)
        if piece is None:
            return 0.0
        return max(0.0, 1 - rate_per_s * service.interval_s / service.batch) * piece.samples / piece.alone_s

    def gathered(self, rate_per_s: float, slo_s: float) -> PointPerformance:
        """Return the service of the batch that gathers while the oldest request can wait."""
        widest = self.widest(slo_s)
        spare_s = max(0.0, MARGIN * slo_s - widest.tail_s)
        return self.serves(int(min(widest.batch, 1 + rate_per_s * spare_s)))

    @property
    def sample_s(self) -> float:
        """The least time per sample of fine-tuning; infinite if nothing can be fine-tuned."""
        return min((each.alone_s / each.samples for each in self.slices), default=math.inf)


def _comes_s(ages_s: Sequence[float], rate_per_s: float | None, number: int) -> float:
    """Return how long from now a request arrives at the earliest: negative for one that waits."""
    if number < len(ages_s):
        return -ages_s[number]
    ahead = number - len(ages_s)
    if ahead == 0:
        return 0.0
    # The mean m at which m + √m requests are as many as `ahead`: before it, so many are unlikely.
    mean = (math.sqrt(_SIGMAS**2 / 4 + ahead) - _SIGMAS / 2) ** 2
    if rate_per_s:
        return mean / rate_per_s
    return math.inf


class _Place(NamedTuple):
    """What an option costs, and how it gets on: the lower the tier, the better."""

    tier: int
    cost: float
    option: Option


def _holds(place: _Place, ages_s: Sequence[float], rate_per_s: float, slo_s: float) -> bool:
    return place.option.in_time(ages_s, rate_per_s, slo_s, 0.0)


@dataclass(frozen=True, eq=False)
class Menu:
    """The options to choose from; the first is what one is when nobody chooses.

    Args:
        options: At least one.

    Raises:
        InvalidInput: If there is none.
    """

    options: tuple[Option, ...]
    _orders: dict[tuple[int, float, bool], tuple[_Place, ...]] = field(default_factory=dict, repr=False)

    def __post_init__(self) -> None:
        if not self.options:
            raise InvalidInput("a menu needs at least one option")

    def best(
        self,
        ages_s: Sequence[float],
        demand_per_s: float,
        mean_per_s: float,
        slo_s: float,
        training: bool,
        now: Option | None = None,
    ) -> Option:
        """Return the option that costs least per unit of useful work, of those at which no request would be late.

        A unit of useful work is what the first option does in a second, of either kind. Options at which fine-tuning
        gets most of that done which the first has room for beside full batches go before those at which it is slower
        (where none does, those that come near the briskest), and those at which it finds no room come last. If requests
        would be late at all of them, it is the fastest.

        Args:
            ages_s: How long each request has waited, oldest first.
            demand_per_s: Requests per second to be prepared for.
            mean_per_s: Requests per second on average, for which costs are counted.
            slo_s: The limit of each from its arrival.
            training: Whether there is fine-tuning to do.
            now: Where the device is; it stays there if that is among the cheapest.
        """
        able = (each for each in self._order(mean_per_s, slo_s, training) if _holds(each, ages_s, demand_per_s, slo_s))
        best = next(able, None)
        if best is None:
            return self.fastest
        same = (each for each in able if each.option == now and each.tier == best.tier)
        stays = next((each for each in same if each.cost <= _NEAR * best.cost), best)
        return stays.option

    def ranked(self, rate_per_s: float, slo_s: float, training: bool) -> tuple[Option, ...]:
        """Return the options that hold the limit at about a rate, cheapest first; see `best`."""
        return tuple(each.option for each in self._order(rate_per_s, slo_s, training))

    def _order(self, rate_per_s: float, slo_s: float, training: bool) -> tuple[_Place, ...]:
        # The order is costly and changes slowly; a forecast wiggles with every request.
        step = round(math.log(max(rate_per_s, 1e-6), _STEP))
        key = (step, slo_s, training)
        if key not in self._orders:
            self._orders[key] = tuple(self._placed(_STEP**step, slo_s, training))
        return self._orders[key]

    def _placed(self, rate_per_s: float, slo_s: float, training: bool) -> list[_Place]:
        first = self.options[0]
        every = self.options
        request_s = min(each.interval_s / each.batch for each in first.services)
        tiers: list[tuple[Sequence[Option], float | None]] = [(every, None)]
        if training:
            # By joules alone the slowest clocks win, at which the job would take days; so pace decides first.
            paces = {each.point: each.pace(rate_per_s, slo_s) for each in every}
            least = min(self._brisk(rate_per_s, slo_s), _NEAREST * max(paces.values()))
            brisk = [each for each in every if paces[each.point] >= least]
            tiers = [(brisk, first.sample_s), (every, first.sample_s), *tiers]
        places: dict[OperatingPoint, _Place] = {}
        for tier, (options, sample_s) in enumerate(tiers):
            costs = [(unit_j(each, rate_per_s, slo_s, request_s, sample_s), each) for each in options]
            for cost, each in sorted(costs, key=itemgetter(0)):
                if cost < math.inf:
                    places.setdefault(each.point, _Place(tier, cost, each))
        return list(places.values())

    def _brisk(self, rate_per_s: float, slo_s: float) -> float:
        """Return the pace at which most is done of what fits beside requests at the first option, in full batches."""
        first = self.options[0]
        service = first.gathered(rate_per_s, slo_s)
        busy = min(1.0, rate_per_s * service.interval_s / service.batch)
        return _BRISK * (1 - busy) / (1 - _CUT * busy) / first.sample_s

    @cached_property
    def fastest(self) -> Option:
        """The option that answers a single request soonest, the cheaper of those within a trifle."""
        least_s = min(each.services[0].latency_s for each in self.options)
        # Above some clock memory is the limit: higher ones burn power for less than a percent.
        near = [each for each in self.options if each.services[0].latency_s <= _ALIKE * least_s]
        return min(near, key=lambda option: option.services[-1].batch_j)


def unit_j(option: Option, rate_per_s: float, slo_s: float, request_s: float, sample_s: float | None) -> float:
    """Return the joules a unit of useful work costs at an option; infinite if it does not hold the limit.

    Inference takes ``ρ = λ · interval / n`` of the time, with ``n`` the requests that gather while the oldest can wait;
    fine-tuning takes the rest, in the largest slices that may start while no request waits.
    ``J = (ρ·P + (1 - ρ)·P′) / (λ·c + (1 - ρ)·c′/t′)``
    with powers ``P`` and times ``t′`` per sample here, and ``c``, ``c′`` what a request and a sample take at reference.

    Args:
        option: Which.
        rate_per_s: Requests per second, λ.
        slo_s: The limit of each from its arrival.
        request_s: What a request takes at reference, c.
        sample_s: What a sample of fine-tuning takes at reference, c′; None where there is none to do.
    """
    service = option.gathered(rate_per_s, slo_s)
    if service.tail_s > MARGIN * slo_s:
        return math.inf
    busy = rate_per_s * service.interval_s / service.batch
    if busy > _FULL:
        return math.inf
    served_w = busy * service.batch_j / service.interval_s
    useful = rate_per_s * request_s
    if sample_s is None:
        return (served_w + (1 - busy) * service.idle_w) / useful
    piece = option.gap(rate_per_s, slo_s)
    if piece is None or piece.joules is None:
        return math.inf
    trained_w = (1 - busy) * piece.joules / piece.alone_s
    return (served_w + trained_w) / (useful + (1 - busy) * sample_s * piece.samples / piece.alone_s)
