"""Machines that are rented and can be taken away: types, power caps, lifetimes, orders.

The checkpoint interval that follows.
"""

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from math import ceil, exp, inf, log, sqrt
from typing import Protocol

from polythrottle.domain.backports import StrEnum
from polythrottle.domain.errors import InvalidInput

# Machines that can be rented: their GPUs, prices per market, and the power caps they can run under.


class Market(StrEnum):
    """How a machine is rented: the provider may take a spot machine away at any time."""

    SPOT = "spot"
    ON_DEMAND = "on-demand"


@dataclass(frozen=True)
class Cap:
    """One power limit a machine can train under, and what that costs and saves.

    Attributes:
        limit_w: Power limit of each GPU in watts, or None for the default.
        slowdown: Time of a step under this cap over its time at the default, > 0.
        power_w: Mean power of the whole machine while it trains, in watts.
    """

    limit_w: float | None
    slowdown: float
    power_w: float

    def __post_init__(self) -> None:
        if not (self.slowdown > 0 and self.power_w > 0 and (self.limit_w is None or self.limit_w > 0)):
            raise InvalidInput(f"a cap needs a positive limit, slowdown and power, not {self}")

    @property
    def energy(self) -> float:
        """Return the joules of a step over its seconds at the default: power × slowdown, in watts."""
        return self.power_w * self.slowdown


@dataclass(frozen=True)
class MachineType:
    """One kind of machine in a catalogue.

    Attributes:
        name: What it is called, for example ``gcp-k80``.
        gpu: Name of the GPU model, as in the tables of measurements.
        usd_per_h: Price in US dollars per hour, by market; a market that is missing is not offered.
        caps: What it can train under; the first is the default (``limit_w`` None or the highest).
        idle_w: Power while it waits: starting up, at a barrier, in watts.
        writing_w: Power while a checkpoint stops training, in watts.
        region: Where it stands; decides prices and lifetimes.
        gpus: GPUs in one machine.
    """

    name: str
    gpu: str
    usd_per_h: Mapping[Market, float]
    caps: tuple[Cap, ...]
    idle_w: float
    writing_w: float
    region: str = ""
    gpus: int = field(default=1)

    def __post_init__(self) -> None:
        if not self.caps:
            raise InvalidInput(f"machine {self.name!r} has no power cap, not even its default")
        if not all(price >= 0 for price in self.usd_per_h.values()):
            raise InvalidInput(f"machine {self.name!r} has a negative price")
        if self.idle_w < 0 or self.writing_w < 0 or self.gpus < 1:
            raise InvalidInput(f"machine {self.name!r} needs powers of at least 0 W and at least one GPU")

    @property
    def default(self) -> Cap:
        """Return the cap it runs under when nobody chooses."""
        return self.caps[0]


@dataclass(frozen=True)
class Network:
    """What predicts how long a training step of a network takes.

    Attributes:
        name: What it is called.
        flops: Floating-point operations of one training step's forward pass per sample, as the table counts them.
        n_tensors: Number of trainable tensors: how many small kernels and messages a step has.
        n_parameters: Trainable parameters.
        weight_mb: Size of the weights in a checkpoint, in MB, or None where unknown.
    """

    name: str
    flops: float
    n_tensors: float
    n_parameters: float
    weight_mb: float | None = None


# How long a machine that can be taken away is kept: the one port between lifetimes' models and who uses them.

HOUR_S = 3600.0
_CUTS = (0.5, 0.05, 1e-5)


class Lifetime(Protocol):
    """The age at which a machine is taken away, as a distribution."""

    def survival(self, age_s: float) -> float:
        """Return the probability that a machine is still there at an age in seconds: 1 at 0, never rising."""

    def hazard_per_s(self, age_s: float) -> float:
        """Return the rate per second at which machines of an age in seconds are taken away."""

    def quantile_s(self, survival: float) -> float:
        """Return the first age in seconds at which survival is no more than the one given; may be infinite."""


@dataclass(frozen=True)
class ConstantHazard:
    """A machine that is taken away at the same rate at every age; at rate 0 never.

    Attributes:
        rate_per_h: Losses per hour, >= 0.
    """

    rate_per_h: float

    def __post_init__(self) -> None:
        if not 0 <= self.rate_per_h < inf:
            raise InvalidInput(f"a rate of losses is at least 0 per hour, not {self.rate_per_h}")

    def survival(self, age_s: float) -> float:
        """Return exp(-rate × age)."""
        return exp(-self.rate_per_h * age_s / HOUR_S)

    def hazard_per_s(self, age_s: float) -> float:
        """Return the rate, whatever the age."""
        return self.rate_per_h / HOUR_S

    def quantile_s(self, survival: float) -> float:
        """Return the age at which survival has fallen to the one given."""
        if survival >= 1:
            return 0.0
        if self.rate_per_h and survival > 0:
            return -log(survival) / self.rate_per_h * HOUR_S
        return inf


KEPT = ConstantHazard(0.0)
"""The lifetime of an on-demand machine."""


@dataclass(frozen=True)
class ObservedLifetime:
    """A survival curve as observed, for example by Kaplan–Meier: straight between its corners, level after the last.

    Attributes:
        ages_s: Rising ages in seconds; the first is 0.
        survivals: Survival at each of them, never rising; the first is 1.
    """

    ages_s: tuple[float, ...]
    survivals: tuple[float, ...]

    def __post_init__(self) -> None:
        falls = all(a >= b >= 0 for a, b in zip(self.survivals, self.survivals[1:], strict=False))
        rises = all(a < b for a, b in zip(self.ages_s, self.ages_s[1:], strict=False))
        if len(self.ages_s) != len(self.survivals) or not self.ages_s or not (falls and rises):
            raise InvalidInput("a survival curve has rising ages and survivals that never rise")
        if self.ages_s[0] != 0 or self.survivals[0] != 1:
            raise InvalidInput("a survival curve starts at age 0 with survival 1")

    def survival(self, age_s: float) -> float:
        """Return the survival between the two corners around the age."""
        after = bisect_right(self.ages_s, age_s)
        if after == len(self.ages_s):
            return self.survivals[-1]
        t0, t1 = self.ages_s[after - 1 : after + 1]
        s0, s1 = self.survivals[after - 1 : after + 1]
        return s0 + (s1 - s0) * (age_s - t0) / (t1 - t0)

    def hazard_per_s(self, age_s: float) -> float:
        """Return the fall of survival around the age over survival there; infinite where nothing survives."""
        after = bisect_right(self.ages_s, age_s)
        if after == len(self.ages_s):
            return 0.0
        t0, t1 = self.ages_s[after - 1 : after + 1]
        s0, s1 = self.survivals[after - 1 : after + 1]
        alive = self.survival(age_s)
        if alive > 0:
            return (s0 - s1) / (t1 - t0) / alive
        return inf

    def quantile_s(self, survival: float) -> float:
        """Return the first age at which the curve is as low as the survival given, infinite if it never is."""
        pairs = zip(self.ages_s, self.survivals, strict=True)
        before: tuple[float, float] | None = None
        for age_s, alive in pairs:
            if alive <= survival:
                if before is None or before[1] == alive:
                    return age_s
                return before[0] + (age_s - before[0]) * (before[1] - survival) / (before[1] - alive)
            before = (age_s, alive)
        return inf


def remaining_s(lifetime: Lifetime, age_s: float, horizon_s: float, parts: int = 200) -> float:
    """Return how long a machine of an age is expected to be kept, counted up to a horizon.

    Args:
        lifetime: Its distribution.
        age_s: Its age in seconds.
        horizon_s: The longest stay that counts, in seconds: the rest of the job.
        parts: Trapezoids of the integral.

    Returns:
        The integral of P(alive at age + t | alive at age) over t from 0 to the horizon, in seconds.
    """
    alive = lifetime.survival(age_s)
    if alive <= 0 or horizon_s <= 0:
        return 0.0
    # A short life would fall between two corners of a long horizon: cut where half, few and hardly any are left.
    falls_s = (max(0.0, lifetime.quantile_s(alive * share) - age_s) for share in _CUTS)
    cuts_s = sorted({0.0, *(min(horizon_s, fall_s) for fall_s in falls_s)})
    return (
        sum(_kept_s(lifetime, age_s, begin_s, end_s, parts // len(_CUTS)) for begin_s, end_s in pairwise(cuts_s))
        / alive
    )


def _kept_s(lifetime: Lifetime, age_s: float, begin_s: float, end_s: float, parts: int) -> float:
    step_s = (end_s - begin_s) / parts
    later = [lifetime.survival(age_s + begin_s + step_s * index) for index in range(parts + 1)]
    return step_s * (sum(later) - (later[0] + later[-1]) / 2)


def lost_before(lifetime: Lifetime, age_s: float, span_s: float) -> float:
    """Return the probability that a machine of an age is taken away within a span, both in seconds."""
    alive = lifetime.survival(age_s)
    if alive <= 0:
        return 1.0
    return 1 - lifetime.survival(age_s + span_s) / alive


def next_loss_s(lifetime: Lifetime, age_s: float, uniform: float) -> float:
    """Return the age in seconds at which a machine of an age is taken away, for a uniform number in (0, 1]."""
    return max(age_s, lifetime.quantile_s(uniform * lifetime.survival(age_s)))


# How often machines are lost, learnt from losses in a time of exposure.


@dataclass(frozen=True)
class LossRate:
    """A rate of losses as counts make it likely: the mean of a gamma distribution, which a Poisson count leaves behind.

    What is believed before anything was counted is a rate too: a few losses in some time. The longer that time, the
    more it takes to change the belief.

    Attributes:
        losses: Losses, >= 0; those of a belief, or counted with forgetting, need not be whole.
        exposure_s: The time in which they happened, in seconds, > 0: of machines if losses of one machine are counted,
            of the job if its interruptions are.
    """

    losses: float
    exposure_s: float

    def __post_init__(self) -> None:
        if self.losses < 0 or self.exposure_s <= 0:
            raise InvalidInput("a rate of losses comes from at least 0 losses in a time above 0")

    @property
    def per_s(self) -> float:
        """Return the losses to expect per second of exposure."""
        return self.losses / self.exposure_s

    def updated(self, losses: float, exposure_s: float) -> "LossRate":
        """Return the rate after so many losses more in so much more time, in seconds."""
        return LossRate(self.losses + losses, self.exposure_s + exposure_s)


# How often to write a checkpoint: Young and Daly in seconds, money or joules, never faster than a write can end.


def daly_s(cost_s: float, hazard_per_s: float) -> float:
    """Return Daly's higher-order interval, in seconds (doi 10.1016/j.future.2004.11.016, equation 37).

    Args:
        cost_s: How long a checkpoint stops training, in seconds.
        hazard_per_s: Losses of any machine of the job per second (1/M).
    """
    _check(cost_s, hazard_per_s)
    if not hazard_per_s:
        return inf
    between_s = 1 / hazard_per_s
    if cost_s >= 2 * between_s:
        return between_s
    part = cost_s / (2 * between_s)
    return sqrt(2 * cost_s * between_s) * (1 + sqrt(part) / 3 + part / 9) - cost_s


@dataclass(frozen=True)
class CheckpointCost:
    """What one checkpoint costs a job.

    Attributes:
        stall_s: How long training stands still for it (the snapshot), in seconds.
        persist_s: How long the write goes on beside training, in seconds; the next may not begin before.
        weight: What a second of standing still costs over a second of training: 1 in time and money, the ratio of
            powers in joules (0.35 where a GPU is nearly idle while writing).
    """

    stall_s: float
    persist_s: float = 0.0
    weight: float = 1.0


def interval_s(cost: CheckpointCost, hazard_per_s: float, step_s: float, overhead: float = 0.035) -> float:
    """Return the interval between checkpoints: Daly's, but no shorter than three bounds, in whole steps.

    The bounds: one step; a write must end before the next begins (CheckFreq, FAST'21); the stalls stay within their
    share of the time.

    Args:
        cost: What one checkpoint costs.
        hazard_per_s: Losses of any machine of the job per second, at the machines' present ages.
        step_s: Time of a training step, in seconds.
        overhead: Largest share of time that stalls may take, in (0, 1].

    Returns:
        A whole number of steps, in seconds; infinite where nothing is ever lost.

    Raises:
        InvalidInput: If a time is negative, the step not positive or the overhead outside (0, 1].
    """
    if step_s <= 0 or not 0 < overhead <= 1:
        raise InvalidInput(f"a step takes time and an overhead is in (0, 1], not {step_s} s and {overhead}")
    # In joules Young's interval is sqrt(2 C M P_checkpoint / P_run): the ratio of powers goes with the cost.
    best_s = daly_s(cost.stall_s * cost.weight, hazard_per_s)
    if best_s == inf:
        return inf
    # From stall / (stall + interval) <= overhead.
    within_s = cost.stall_s * (1 / overhead - 1)
    # The margin keeps a whole number of steps from becoming one more by rounding.
    return ceil(max(best_s, step_s, cost.persist_s, within_s) / step_s - 1e-9) * step_s


def _check(cost_s: float, hazard_per_s: float) -> None:
    if cost_s < 0 or hazard_per_s < 0:
        raise InvalidInput(f"costs and hazards are at least 0, not {cost_s} s and {hazard_per_s} /s")


# The port to whoever rents out machines: ask for one, see what became of it, give it back.


class Stage(StrEnum):
    """What became of an order."""

    WAITING = "waiting"  # asked for, not there yet
    RUNNING = "running"  # there, and doing its work
    LOST = "lost"  # taken away, and not coming back by itself
    ENDED = "ended"  # finished its work, or given back


@dataclass(frozen=True)
class Order:
    """One machine that is asked for.

    Attributes:
        machine: Name of a type in the catalogue; a provider may read it as a partition or an accelerator.
        market: Whether it may be taken away.
        region: Where it should stand; empty for anywhere.
    """

    machine: str = ""
    market: Market = Market.SPOT
    region: str = ""


@dataclass(frozen=True)
class Rented:
    """An order and what is known of it.

    Attributes:
        ticket: The provider's name for the order.
        stage: What became of it.
        node: Name of the machine, empty while there is none.
        times_lost: How often a machine was taken from this order; a requeued one waits again with one more.
        reason: What the provider says about the stage, empty if nothing.
        left_s: Time until the provider ends it by a limit of its own, in seconds; None without one.
    """

    ticket: str
    stage: Stage
    node: str = ""
    times_lost: int = 0
    reason: str = ""
    left_s: float | None = None


class Provider(Protocol):
    """Rents out machines."""

    def request(self, order: Order) -> str:
        """Ask for one machine and return the ticket of the order.

        Raises:
            DeviceError: If the provider cannot be reached or refuses the order; says what it said.
        """

    def seen(self) -> Mapping[str, Rented]:
        """Return every order by its ticket, as the provider sees it now.

        Raises:
            DeviceError: If the provider cannot be reached.
        """

    def crowd(self) -> Sequence[float]:
        """Return what is seen of the queue before an order: everybody's orders that wait, and machines that are free.

        Raises:
            DeviceError: If the provider cannot be reached.
        """

    def dismiss(self, ticket: str) -> None:
        """Tell a machine's work to end in order, as if its time were over; nothing happens if it has ended.

        Raises:
            DeviceError: If the provider cannot be reached.
        """

    def release(self, ticket: str) -> None:
        """Give a machine back, or withdraw its order; nothing happens if that was done before.

        Raises:
            DeviceError: If the provider cannot be reached.
        """
