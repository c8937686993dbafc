"""How a job may turn out: seeded draws of its losses, walked through with the same rules as the expectations."""

import heapq
from dataclasses import dataclass, field
from math import ceil, inf, sqrt
from random import Random
from statistics import NormalDist

from polythrottle.cluster.ledger import Use
from polythrottle.cluster.lifetime import HOUR_S
from polythrottle.cluster.plan.offer import Option, terms_of

_EVENTS = 20_000
"""Losses, or machines that join, walked through for one option; a job with many takes fewer draws, for its spread is
small."""
_FEWEST = 30
_MANY = 2_000
"""With more losses than this in one job their number is taken for normal, and none is walked through."""
_GIVEN_UP = 100 * _MANY
_FOREVER_S = 1e12


@dataclass(frozen=True)
class Outcome:
    """How a job turned out once, simulated.

    Attributes:
        time_s: From the order to the last step, in seconds.
        usd: What it cost.
        energy_j: Joules, servers included.
        losses: Machines taken away.
    """

    time_s: float
    usd: float
    energy_j: float
    losses: int


@dataclass(frozen=True)
class Outlook:
    """How a job may turn out, simulated.

    Attributes:
        outcomes: One per draw; a single one where nothing is left to chance.
    """

    outcomes: tuple[Outcome, ...]

    def chance(self, deadline_s: float = inf, usd: float = inf) -> float:
        """Return the share of draws that end, by a deadline in seconds and within a budget in dollars."""
        ended = [each for each in self.outcomes if each.time_s < inf]
        kept = sum(each.time_s <= deadline_s and each.usd <= usd for each in ended)
        return kept / len(self.outcomes)

    def quantile(self, what: str, share: float) -> float:
        """Return the value that a share of draws does not exceed.

        Args:
            what: ``time_s``, ``usd``, ``energy_j`` or ``losses``.
            share: In (0, 1].
        """
        values = sorted(getattr(each, what) for each in self.outcomes)
        return float(values[min(len(values), max(1, ceil(share * len(values) - 1e-9))) - 1])

    def mean(self, what: str) -> float:
        """Return the mean of ``time_s``, ``usd``, ``energy_j`` or ``losses``."""
        return float(sum(getattr(each, what) for each in self.outcomes) / len(self.outcomes))

    def error(self, what: str) -> float:
        """Return the standard error of that mean."""
        mean, count = self.mean(what), len(self.outcomes)
        spread = sum((getattr(each, what) - mean) ** 2 for each in self.outcomes)
        return sqrt(spread / max(1, count - 1) / count)


def outlook(option: Option, seed: int = 0, draws: int = 200, patience: float = 20.0) -> Outlook:
    """Return how an option may turn out.

    Args:
        option: Machines, market, cap and interval.
        seed: Of the draws: the same seed gives the same answer.
        draws: How many at most.
        patience: A draw is given up, as never ending, after so many times the expected time.
    """
    if option.choice.time_s == inf:
        return Outlook((Outcome(inf, inf, inf, 0),))
    if option.lifetime.survival(_FOREVER_S) == 1:
        return Outlook((_Walk(option, Random(seed), inf).outcome(),))
    losses = expected_losses(option)
    if losses > _MANY:
        return _settled(option, losses)
    count = max(_FEWEST, min(draws, int(_EVENTS / max(1.0, losses, option.machines))))
    random, limit_s = Random(seed), patience * option.time_s
    return Outlook(tuple(_Walk(option, random, limit_s).outcome() for _ in range(count)))


def expected_losses(option: Option) -> float:
    """Return how many machines the job is expected to lose, estimated."""
    hazard = terms_of(option.work, option.offer, option.market, option.machines).exposure.hazard_per_s
    return hazard * option.work.steps * option.choice.time_s


def _settled(option: Option, losses: float) -> Outlook:
    """Return the outlook of a job with very many losses: what is lost with them is normal, by the central limit."""
    useful = option.choice.parts[Use.USEFUL].machine_s / option.choice.spent.machine_s
    spread = (1 - useful) * sqrt(2 / losses)  # the work a loss undoes is about uniform, the time between exponential
    normal = NormalDist(1.0, max(spread, 1e-9))
    factors = [normal.inv_cdf((index + 0.5) / 99) for index in range(99)]
    time_s, usd, energy_j = option.aims
    return Outlook(tuple(Outcome(time_s * by, usd * by, energy_j * by, round(losses * by)) for by in factors))


@dataclass
class _Walk:
    """One draw: machines are lost and replaced; work is done, written down and undone."""

    option: Option
    random: Random
    limit_s: float
    now_s: float = 0.0
    resume_s: float = 0.0
    done: float = 0.0
    secured: float = 0.0
    phase_s: float = 0.0
    energy_j: float = 0.0
    losses: int = 0
    events: list[tuple[float, bool]] = field(default_factory=list)

    def outcome(self) -> Outcome:
        for _ in range(self.option.machines):
            self._rent(0.0)
        alive = 0
        while (ends_s := self._ends(alive)) > (self.events[0][0] if self.events else inf):
            if self.now_s > self.limit_s or self.losses > _GIVEN_UP:
                ends_s = inf
                break
            at_s, joins = heapq.heappop(self.events)
            self._train(at_s, alive)
            alive += 1 if joins else -1
            if not joins:
                self._lose(at_s)
        if ends_s < inf:
            self._train(ends_s, alive)
        return self._written(ends_s)

    def _written(self, ends_s: float) -> Outcome:
        option, server = self.option, self.option.work.server
        rent_usd = ends_s * (option.machines * option.usd_per_h / HOUR_S + server.all_usd_per_s)
        energy_j = self.energy_j + ends_s * server.all_w
        return Outcome(ends_s, rent_usd + energy_j * option.work.usd_per_j, energy_j, self.losses)

    def _rent(self, at_s: float) -> None:
        """Order a machine: its life begins now; one that is lost before its first step is ordered again."""
        startup_s = self.option.offer.startup_s
        while (
            lost_s := self.option.lifetime.quantile_s(1 - self.random.random())
        ) < startup_s and at_s <= self.limit_s:
            at_s, self.losses = at_s + lost_s, self.losses + 1
        heapq.heappush(self.events, (at_s + startup_s, True))
        if lost_s < inf:
            heapq.heappush(self.events, (at_s + max(lost_s, startup_s), False))

    def _lose(self, at_s: float) -> None:
        work = self.option.work
        self.losses += 1
        if work.undoes:
            if self.random.random() < work.noticed:
                self.secured = self.done
                self.resume_s = max(self.resume_s, at_s) + work.cost.stall_s
            self.done, self.phase_s = self.secured, 0.0
            self.resume_s = max(self.resume_s, at_s + work.restart_s)
        self._rent(at_s)

    def _step_s(self, alive: int) -> float:
        return self.option.offer.together_s(alive) * self.option.choice.cap.slowdown

    def _cycle_s(self) -> tuple[float, float]:
        """Return the training time between checkpoints, and how long one stops it."""
        every_s = self.option.choice.interval_s
        return (every_s, self.option.work.cost.stall_s) if every_s < inf else (1e18, 0.0)

    def _ends(self, alive: int) -> float:
        """Return when the last step would end if nothing happened any more."""
        if alive <= 0:
            return inf
        every_s, stall_s = self._cycle_s()
        target_s = min(self.phase_s, every_s) + (self.option.work.steps - self.done) * self._step_s(alive)
        full = max(0, ceil(target_s / every_s - 1e-9) - 1)
        return max(self.now_s, self.resume_s) + full * (every_s + stall_s) + target_s - full * every_s - self.phase_s

    def _train(self, until_s: float, alive: int) -> None:
        """Go on until a moment, in seconds, with so many machines."""
        begin_s = min(max(self.now_s, self.resume_s), max(until_s, self.now_s))
        span_s = max(0.0, until_s - begin_s) if alive > 0 else 0.0
        every_s, stall_s = self._cycle_s()
        full, rest_s = divmod(self.phase_s + span_s, every_s + stall_s)
        had_s = min(self.phase_s, every_s)
        trained_s = full * every_s + min(rest_s, every_s) - had_s
        if full and alive > 0:
            self.secured = self.done + (full * every_s - had_s) / self._step_s(alive)
        if alive > 0:
            self.done += trained_s / self._step_s(alive)
        self.phase_s = rest_s
        self._burn(until_s, alive, trained_s, span_s - trained_s)
        self.now_s = max(self.now_s, until_s)

    def _burn(self, until_s: float, alive: int, trained_s: float, written_s: float) -> None:
        machine, whole_s = self.option.offer.machine, max(0.0, until_s - self.now_s)
        waited_s = max(0.0, whole_s - trained_s - written_s)
        power = alive * (self.option.choice.cap.power_w * trained_s + machine.writing_w * written_s)
        idle_s = alive * waited_s + (self.option.machines - alive) * whole_s
        self.energy_j += power + machine.idle_w * idle_s
