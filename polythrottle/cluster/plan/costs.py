"""What a job costs, and the power cap and the checkpoint interval that are chosen together for it.

A lower cap lengthens what a loss can undo. The ledger tells where the seconds, joules and dollars of a training job
went, and what came of a simulated job over several seeds.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import pairwise
from math import ceil, expm1, inf, isfinite
from statistics import mean, stdev
from typing import Any

from polythrottle.domain.backports import StrEnum
from polythrottle.domain.errors import InvalidInput
from polythrottle.domain.fleet.transient_machine import (
    HOUR_S,
    Cap,
    CheckpointCost,
    Lifetime,
    MachineType,
    daly_s,
    interval_s,
    lost_before,
    remaining_s,
)

# Where the seconds, joules and dollars of a training job went.


class Use(StrEnum):
    """What a machine was doing with its time."""

    USEFUL = "useful"  # steps that count
    CHECKPOINT = "checkpoint"  # training stopped to write one
    REDONE = "redone"  # steps lost with a machine and done again
    STARTUP = "startup"  # from the order to the first step
    WAITING = "waiting"  # at a barrier, for a slower machine or for a new generation
    OVERLAP = "overlap"  # a successor beside the machine it will replace
    EXPLORING = "exploring"  # trying clocks that may be worse


@dataclass(frozen=True)
class Spent:
    """Machine-seconds, joules and dollars."""

    machine_s: float = 0.0
    energy_j: float = 0.0
    usd: float = 0.0

    def __add__(self, other: "Spent") -> "Spent":
        return Spent(self.machine_s + other.machine_s, self.energy_j + other.energy_j, self.usd + other.usd)


@dataclass
class Ledger:
    """A job's account: every machine-second is written under exactly one use."""

    by_use: dict[Use, Spent] = field(default_factory=lambda: dict.fromkeys(Use, Spent()))

    def spend(self, use: Use, machine_s: float, power_w: float, usd_per_h: float) -> None:
        """Write down what machines used for a while.

        Args:
            use: What for.
            machine_s: How long, over all of them, in seconds, >= 0.
            power_w: Mean power of one machine, in watts.
            usd_per_h: Price of one machine per hour.

        Raises:
            InvalidInput: If the time is negative: it was written twice.
        """
        if machine_s < 0:
            raise InvalidInput(f"machines cannot spend {machine_s} s on {use}")
        more = Spent(machine_s, power_w * machine_s, usd_per_h * machine_s / 3600)
        self.by_use[use] = self.by_use[use] + more

    def move(self, source: Use, target: Use, share: float) -> None:
        """Move a share of one use to another, for example useful steps that a loss has undone.

        Raises:
            InvalidInput: If the share is not between 0 and 1.
        """
        if not 0 <= share <= 1:
            raise InvalidInput(f"a share is between 0 and 1, not {share}")
        had = self.by_use[source]
        moved = Spent(had.machine_s * share, had.energy_j * share, had.usd * share)
        self.by_use[source] = Spent(had.machine_s - moved.machine_s, had.energy_j - moved.energy_j, had.usd - moved.usd)
        self.by_use[target] = self.by_use[target] + moved

    @property
    def total(self) -> Spent:
        """Return the sum over all uses."""
        return sum(self.by_use.values(), Spent())

    def record(self) -> dict[str, dict[str, float]]:
        """Return the account as a document: use → machine_s, energy_j, usd."""
        return {
            str(use): {"machine_s": spent.machine_s, "energy_j": spent.energy_j, "usd": spent.usd}
            for use, spent in self.by_use.items()
        }


# What came of a simulated job, and of the same job under several seeds; everything here is simulated.

_STUDENT = (12.71, 4.30, 3.18, 2.78, 2.57, 2.45, 2.36, 2.31, 2.26)
"""95 % quantiles of Student's t for 1 to 9 degrees of freedom; 2.0 beyond."""


@dataclass(frozen=True)
class SimulatedOutcome:
    """One simulated job.

    Attributes:
        policy: Under which policy.
        seed: Of the machines and their silicon.
        time_s: How long it took, or how long it was watched.
        finished: Whether all of its work was done.
        work: What was done and kept, in seconds of one machine in the middle at its default clock.
        ledger: Where machine-seconds, joules and dollars went.
        generations: How often a group was formed.
        interruptions: How often a loss stopped the group.
        losses: Machines taken away, training or not.
        machines: Mean number of machines that were there.
        beside: What was drawn and paid beside the workers: servers, and energy where the rent does not include it.
    """

    policy: str
    seed: int
    time_s: float
    finished: bool
    work: float
    ledger: Ledger
    generations: int
    interruptions: int
    losses: int
    machines: float
    beside: Spent = field(default_factory=Spent)

    @property
    def energy_j(self) -> float:
        """Return all joules."""
        return self.ledger.total.energy_j + self.beside.energy_j

    @property
    def usd(self) -> float:
        """Return all dollars."""
        return self.ledger.total.usd + self.beside.usd

    def record(self) -> dict[str, Any]:
        """Return it as a document."""
        return {
            "policy": self.policy,
            "seed": self.seed,
            "time_s": self.time_s,
            "finished": self.finished,
            "work_machine_s": self.work,
            "energy_j": self.energy_j,
            "usd": self.usd,
            "machines": self.machines,
            "generations": self.generations,
            "interruptions": self.interruptions,
            "losses": self.losses,
            "ledger": self.ledger.record(),
            "beside": asdict(self.beside),
        }


@dataclass(frozen=True)
class Spread:
    """A figure over several seeds.

    Attributes:
        mean: Its mean.
        low: Lower end of the 95 % interval of the mean; None from a single seed.
        high: Upper end.
    """

    mean: float
    low: float | None
    high: float | None


def spread(values: Sequence[float]) -> Spread:
    """Return mean and 95 % interval (Student) of figures of independent seeds.

    Raises:
        InvalidInput: If there is none.
    """
    if not values:
        raise InvalidInput("a spread needs at least one figure")
    middle = mean(values)
    if len(values) < 2:
        return Spread(middle, None, None)
    freedom = len(values) - 1
    half = (_STUDENT[freedom - 1] if freedom <= len(_STUDENT) else 2.0) * stdev(values) / len(values) ** 0.5
    return Spread(middle, middle - half, middle + half)


def against(
    outcomes: Sequence[SimulatedOutcome],
    baseline: Sequence[SimulatedOutcome],
    figure: Callable[[SimulatedOutcome], float],
) -> Spread:
    """Return how much less of a figure there is per work than in a baseline with the same seeds, as a fraction.

    Raises:
        InvalidInput: If the seeds are not the same.
    """
    if [each.seed for each in outcomes] != [each.seed for each in baseline]:
        raise InvalidInput("outcomes are compared seed by seed; these have different seeds")
    pairs = zip(outcomes, baseline, strict=True)
    return spread([1 - (figure(ours) / ours.work) / (figure(theirs) / theirs.work) for ours, theirs in pairs])


_GRID = 40
"""Intervals tried between the shortest allowed and the longest useful one, by equal factors."""
_AT_ONCE = 1.0
"""Losses per second of a machine that is not there any more: no rate, but more than any job stands."""
_NEVER = 1e-12
"""Losses per second, one in thirty thousand years, that are taken for none."""
_HOPELESS = 50.0
"""A segment that expects more losses than e to this power never ends."""


@dataclass(frozen=True)
class Weights:
    """What a joule, a dollar and a second of the whole job weigh against each other.

    Attributes:
        per_j: Of a joule.
        per_usd: Of a dollar.
        per_s: Of a second until the job is done.
    """

    per_j: float = 0.0
    per_usd: float = 0.0
    per_s: float = 0.0

    def __post_init__(self) -> None:
        parts = (self.per_j, self.per_usd, self.per_s)
        if not all(isfinite(part) and part >= 0 for part in parts) or not any(parts):
            raise InvalidInput(f"weights are at least 0 and not all 0, not {parts}")


ENERGY = Weights(per_j=1.0)
COST = Weights(per_usd=1.0)
TIME = Weights(per_s=1.0)


@dataclass(frozen=True)
class Exposure:
    """How often a job of several machines loses one, and what it does then.

    Attributes:
        machines: How many train together, >= 1.
        hazard_per_s: Losses of any of them per second.
        restart_s: How long all stand still after a loss until the rest train again, in seconds.
        replace_s: How long until a newcomer trains in the lost one's place; the rest train meanwhile, in seconds.
        noticed: Share of losses announced early enough to write a checkpoint first, in [0, 1].
        undoes: Whether a loss undoes the work since the last checkpoint: so in synchronous training; where a
            parameter server keeps the model, others go on and nothing is undone.
    """

    machines: int
    hazard_per_s: float
    restart_s: float = 0.0
    replace_s: float = 0.0
    noticed: float = 0.0
    undoes: bool = True

    def __post_init__(self) -> None:
        if self.machines < 1 or not 0 <= self.noticed <= 1:
            raise InvalidInput(f"a job has at least one machine and a share of notices in [0, 1], not {self}")
        if not all(0 <= part < inf for part in (self.hazard_per_s, self.restart_s, self.replace_s)):
            raise InvalidInput(f"losses and times after them are at least 0 and finite, not {self}")

    @property
    def undoing_per_s(self) -> float:
        """Return the losses per second that undo work."""
        rate = 0.0
        if self.undoes:
            rate = self.hazard_per_s * (1 - self.noticed)
        if rate > _NEVER:
            return rate
        return 0.0

    @property
    def warned_per_s(self) -> float:
        """Return the losses per second before which a checkpoint is written out of turn."""
        if self.undoes:
            return self.hazard_per_s * self.noticed
        return 0.0


@dataclass(frozen=True)
class Choice:
    """A power cap and a checkpoint interval, and what a step is expected to cost under them, estimated.

    Attributes:
        cap: The power cap.
        interval_s: Training time between checkpoints, in seconds; infinite where none is worth its stall.
        time_s: Time of a useful step of the job with all that goes with it, in seconds.
        parts: Machine-seconds, joules and dollars of a useful step, by use.
    """

    cap: Cap
    interval_s: float
    time_s: float
    parts: Mapping[Use, Spent]

    @property
    def spent(self) -> Spent:
        """Return machine-seconds, joules and dollars of a useful step, all machines together."""
        return sum(self.parts.values(), Spent())

    def value(self, weights: Weights) -> float:
        """Return the weighted sum of joules, dollars and seconds of a useful step; less is better."""
        spent = self.spent
        if self.time_s == inf:
            return inf
        return weights.per_j * spent.energy_j + weights.per_usd * spent.usd + weights.per_s * self.time_s


@dataclass(frozen=True)
class Terms:
    """What does not change while cap and interval are chosen.

    Attributes:
        machine: The type of all the job's machines.
        usd_per_h: Price of one of them.
        exposure: How often one is lost, and what then.
        cost: What one checkpoint costs in time; its power is the machine's ``writing_w``, its weight is not used.
        step_s: Time of a step of the job at the default cap, in seconds.
        overhead: Largest share of training time that stalls may take where the interval is chosen alone, in (0, 1].
    """

    machine: MachineType
    usd_per_h: float
    exposure: Exposure
    cost: CheckpointCost
    step_s: float
    overhead: float = 0.035

    def __post_init__(self) -> None:
        if not (self.step_s > 0 and self.usd_per_h >= 0 and 0 < self.overhead <= 1):
            raise InvalidInput("a step takes time, a price is at least 0 and an overhead is in (0, 1]")


def losses_per_s(lifetimes: Sequence[tuple[Lifetime, float]], span_s: float) -> float:
    """Return the mean rate per second at which machines will be lost over a span: losses over time spent there.

    The hazard at one age says little where it is steep (a newborn's) or unknown (a flat piece of an observed curve).

    Args:
        lifetimes: Each machine's distribution and age in seconds.
        span_s: How far to look, in seconds, > 0.
    """
    rate = 0.0
    for lifetime, age_s in lifetimes:
        kept_s = remaining_s(lifetime, age_s, span_s)
        rate += min(_AT_ONCE, lost_before(lifetime, age_s, span_s) / kept_s if kept_s > 0 else inf)
    return rate


def expect(terms: Terms, cap: Cap, every_s: float) -> Choice:
    """Return what a useful step is expected to cost under a cap and an interval between checkpoints.

    A segment of τ seconds and its checkpoint of C seconds is repeated from its start whenever a loss undoes it: with
    losses at rate Λ it takes (exp(Λ(τ + C)) − 1)/Λ seconds (Daly 2006, doi 10.1016/j.future.2004.11.016), of which all
    beyond τ + C is redone. To first order this is the P·s·[1 + C/τ + Λ(τ/2 + R)] of Young.

    Args:
        terms: What is given.
        cap: The power cap.
        every_s: Training time between checkpoints, in seconds; infinite for none.
    """
    exposure = terms.exposure
    stall_s = terms.cost.stall_s
    train_s = every_s
    if every_s == inf:
        # any length will do: each step costs the same
        train_s = max(HOUR_S, terms.step_s)
        stall_s = 0.0
    around = exposure.undoing_per_s * (train_s + stall_s)
    if around > _HOPELESS or (exposure.undoing_per_s and every_s == inf):
        return Choice(cap, every_s, inf, {Use.REDONE: Spent(inf, inf, inf)})
    if around:
        wall_s = expm1(around) / exposure.undoing_per_s
    else:
        wall_s = train_s + stall_s
    losses = exposure.hazard_per_s * wall_s
    times_s = {
        Use.USEFUL: train_s,
        Use.CHECKPOINT: stall_s + exposure.warned_per_s * wall_s * terms.cost.stall_s,
        Use.REDONE: max(0.0, wall_s - train_s - stall_s),
        Use.WAITING: losses * exposure.restart_s,
        Use.STARTUP: losses * exposure.replace_s / exposure.machines,
    }
    steps = train_s / (terms.step_s * cap.slowdown)
    parts = {use: _spent(terms, cap, use, span_s / steps) for use, span_s in times_s.items()}
    return Choice(cap, every_s, sum(times_s.values()) / steps, parts)


def joint(terms: Terms, weights: Weights = ENERGY, longer: float = 0.03) -> Choice:
    """Return the cap and the interval that together cost least, no more than so much longer than the fastest.

    The budget for stalls does not bind here: what a stall costs and what it saves are both counted. A write still ends
    before the next begins.

    Args:
        terms: What is given.
        weights: What counts.
        longer: By how much a useful step may take longer, losses and checkpoints included, than at the default cap
            with the interval that is best for time; infinite for no limit.

    Returns:
        The best on a grid of every cap and forty intervals; never worse than `apart` where that keeps the limit.

    Raises:
        InvalidInput: If ``longer`` is negative.
    """
    if not longer >= 0:
        raise InvalidInput(f"a job may take longer by at least 0, not {longer}")
    choices = [expect(terms, cap, every_s) for cap in terms.machine.caps for every_s in intervals(terms, cap)]
    fastest = min(choice.time_s for choice in choices if choice.cap == terms.machine.default)
    allowed = [choice for choice in choices if choice.time_s <= fastest * (1 + longer) * (1 + 1e-12)]
    return min(allowed, key=lambda choice: (choice.value(weights), choice.time_s), default=choices[0])


@dataclass(frozen=True)
class Blend:
    """Two caps by turns and a checkpoint interval.

    Attributes:
        first: One cap.
        second: The other, or the same.
        share: Of the steps, those under the second, in [0, 1].
        choice: The interval, the cap that both amount to, and what a step is expected to cost.
    """

    first: Cap
    second: Cap
    share: float
    choice: Choice


def blended(terms: Terms, weights: Weights = ENERGY, longer: float = 0.03, every_s: float | None = None) -> Blend:
    """Return the caps, by turns, and the interval that together cost least in the time allowed: exactly.

    For a given interval time and joules of a step are linear in the shares of steps under each cap, so that a linear
    programme with one constraint, time, is to be solved: its optimum is one cap, or two by turns that use the time up.
    It lies on the lower convex hull of the caps' times and joules, whatever the interval.

    Args:
        terms: What is given.
        weights: What counts.
        longer: By how much a useful step may take longer, losses and checkpoints included, than at the default cap
            with Daly's interval (`reference_s`); infinite for no limit.
        every_s: The interval, where it is given, in seconds.

    Raises:
        InvalidInput: If ``longer`` is negative.
    """
    if not longer >= 0:
        raise InvalidInput(f"a job may take longer by at least 0, not {longer}")
    default = terms.machine.default
    plain = expect(terms, default, reference_s(terms))
    hull = frontier(terms.machine.caps)

    def best(times_s: Iterable[float]) -> Blend:
        blends = [Blend(default, default, 0.0, plain)]
        for one_s in times_s:
            most = plain.time_s * (1 + longer) * default.slowdown / expect(terms, default, one_s).time_s
            least = inf
            for first, second, share in _downfrom(hull, most):
                blends.append(Blend(first, second, share, expect(terms, _mean(first, second, share), one_s)))
                if blends[-1].choice.value(weights) > least:  # the hull is convex: faster ones cost more still
                    break
                least = blends[-1].choice.value(weights)
        return min(blends, key=lambda each: (each.choice.value(weights), each.choice.time_s))

    if every_s is not None:
        return best((every_s,))
    rough_s = best(intervals(terms, default)).choice.interval_s
    return best(_about(rough_s, terms.step_s * default.slowdown))


def frontier(caps: Sequence[Cap]) -> tuple[Cap, ...]:
    """Return the caps that no turns of two others beat: the lower convex hull of their times and joules.

    Args:
        caps: In any order.
    """
    hull: list[Cap] = []
    for cap in sorted(caps, key=lambda cap: (cap.slowdown, cap.energy)):
        if hull and cap.energy >= hull[-1].energy:
            continue
        while len(hull) > 1 and _slope(hull[-2], hull[-1]) >= _slope(hull[-2], cap):
            hull.pop()
        hull.append(cap)
    return tuple(hull)


def _about(every_s: float, step_s: float) -> Iterator[float]:
    """Yield an interval and some up to an eighth off it, in whole steps."""
    if every_s == inf:
        yield every_s
        return
    for part in range(-4, 5):
        yield max(1, round(every_s * (1 + part / 32) / step_s)) * step_s


def _slope(fast: Cap, slow: Cap) -> float:
    return (slow.energy - fast.energy) / (slow.slowdown - fast.slowdown)


def _downfrom(hull: Sequence[Cap], most: float) -> Iterator[tuple[Cap, Cap, float]]:
    """Yield the two caps of a hull whose turns come to just a slowdown, then every faster cap, the slowest first."""
    for fast, slow in pairwise(hull):
        if fast.slowdown < most < slow.slowdown:
            yield fast, slow, (most - fast.slowdown) / (slow.slowdown - fast.slowdown)
    for cap in reversed(hull):
        if cap.slowdown <= most:
            yield cap, cap, 0.0


def _mean(first: Cap, second: Cap, share: float) -> Cap:
    """Return the cap that two by turns amount to."""
    slowdown = first.slowdown + share * (second.slowdown - first.slowdown)
    return Cap(None, slowdown, (first.energy + share * (second.energy - first.energy)) / slowdown)


def apart(terms: Terms, weights: Weights = ENERGY, longer: float = 0.03) -> Choice:
    """Return the same two chosen one after the other, the baseline: a cap as if nothing were lost, Daly's interval.

    The cap is the one whose step without losses costs least and is no more than so much longer than the default's;
    the interval is the optimum in seconds at the default cap.

    Args:
        terms: What is given.
        weights: What counts.
        longer: By how much a step without losses may take longer than at the default cap.
    """
    machine = terms.machine
    exposure = terms.exposure
    calm = Terms(machine, terms.usd_per_h, Exposure(exposure.machines, 0.0), CheckpointCost(0.0), terms.step_s)
    steps = [expect(calm, cap, inf) for cap in machine.caps if cap.slowdown <= machine.default.slowdown * (1 + longer)]
    cap = min(steps, key=lambda choice: choice.value(weights)).cap
    return expect(terms, cap, reference_s(terms))


def reference_s(terms: Terms) -> float:
    """Return the interval that is best for time at the default cap, in seconds, by Daly within CheckFreq's bounds."""
    plain = CheckpointCost(terms.cost.stall_s, terms.cost.persist_s)
    return interval_s(plain, terms.exposure.undoing_per_s, terms.step_s, terms.overhead)


def intervals(terms: Terms, cap: Cap) -> Iterator[float]:
    """Yield the intervals worth trying under a cap, in whole steps."""
    yield reference_s(terms)
    hazard_per_s = terms.exposure.undoing_per_s
    step_s = terms.step_s * cap.slowdown
    if not hazard_per_s:
        return
    shortest_s = max(step_s, terms.cost.persist_s, terms.cost.stall_s)
    longest_s = max(4 * daly_s(max(terms.cost.stall_s, step_s / 2), hazard_per_s), 2 * shortest_s)
    factor = (longest_s / shortest_s) ** (1 / (_GRID - 1))
    for index in range(_GRID):
        yield ceil(shortest_s * factor**index / step_s - 1e-9) * step_s


def _spent(terms: Terms, cap: Cap, use: Use, span_s: float) -> Spent:
    machine = terms.machine
    machines = terms.exposure.machines
    power_w = {Use.CHECKPOINT: machine.writing_w, Use.WAITING: machine.idle_w, Use.STARTUP: machine.idle_w}
    machine_s = span_s * machines
    return Spent(machine_s, power_w.get(use, cap.power_w) * machine_s, terms.usd_per_h * machine_s / HOUR_S)
