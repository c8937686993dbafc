"""When to explore: in idle time or on a share of the load, within a day's budget of joules and of broken limits."""

import math
from dataclasses import dataclass, field, replace

from polythrottle.daemon.horizon import DAY_S, Pattern
from polythrottle.errors import InvalidInput

_QUIET = 0.05
"""A load below this share of what the ladder's lowest rung answers counts as idle."""


@dataclass(frozen=True)
class Allowance:
    """What exploring may cost per day.

    Args:
        joules: Share of the day's energy.
        violations: Share of the day's requests that may miss their limit for it.
        idle_s: How long it must have been idle before a study is offered.
        canary: Share of the time under load that may be spent exploring where the board is never idle; 0 is none.

    Raises:
        InvalidInput: If a share is not one.
    """

    joules: float = 0.02
    violations: float = 0.001
    idle_s: float = 120.0
    canary: float = 0.0

    def __post_init__(self) -> None:
        if not all(0 <= share <= 1 for share in (self.joules, self.violations, self.canary)) or not self.idle_s > 0:
            raise InvalidInput("what exploring may cost is given as shares between 0 and 1, and idle time above 0")


@dataclass(frozen=True)
class Ledger:
    """What was spent on exploring over the last day or so, and what there was in all; forgets exponentially.

    Args:
        allowance: What may be.
        all_j: Energy; ``explored_j`` of it in studies.
        requests: Requests; ``missed`` of them over the limit while exploring.
        explored_s: Time under load in studies; ``loaded_s`` all time under load.
        idle_since_s: Since when there is hardly any load; None if there is.
        quiet_per_s: The rate below which it counts as idle.
    """

    allowance: Allowance = field(default_factory=Allowance)
    all_j: float = 0.0
    explored_j: float = 0.0
    requests: float = 0.0
    missed: float = 0.0
    explored_s: float = 0.0
    loaded_s: float = 0.0
    idle_since_s: float | None = None
    quiet_per_s: float = 0.0

    def seen(
        self,
        now_s: float,
        period_s: float,
        joules: float,
        requests: int,
        missed: int,
        studying: bool,
        quiet_per_s: float,
    ) -> "Ledger":
        """Return the ledger after one more look.

        Args:
            now_s: On a monotonic clock.
            period_s: Since the look before.
            joules: Drawn since; not negative.
            requests: That came since; ``missed`` of them over the limit.
            missed: Likewise.
            studying: Whether a study has set the board since.
            quiet_per_s: The rate below which it is idle.
        """
        kept, period_s = math.exp(-max(0.0, period_s) / DAY_S), max(0.0, period_s)
        rate = requests / period_s if period_s > 0 else 0.0
        idle = rate <= quiet_per_s
        since_s = self.idle_since_s if self.idle_since_s is not None and self.idle_since_s <= now_s else now_s
        return replace(
            self,
            all_j=kept * self.all_j + joules,
            explored_j=kept * self.explored_j + joules * studying,
            requests=kept * self.requests + requests,
            missed=kept * self.missed + missed * studying,
            explored_s=kept * self.explored_s + period_s * (studying and not idle),
            loaded_s=kept * self.loaded_s + period_s * (not idle),
            idle_since_s=since_s if idle else None,
            quiet_per_s=quiet_per_s,
        )

    def may_explore(self, study_j: float) -> str | None:
        """Return what forbids a study that takes so much energy; None if nothing does.

        Args:
            study_j: Expected, such as what the one before took; 0 if unknown.
        """
        if self.explored_j + study_j > self.allowance.joules * (self.all_j + study_j) and self.explored_j > 0:
            return f"studies have used their {self.allowance.joules:.1%} of the day's energy"
        if self.missed > 0 and self.missed >= self.allowance.violations * self.requests:
            return f"studies have used up their {self.allowance.violations:.2%} of requests over the limit"
        return None

    def offer(self, now_s: float, since_midnight_s: float, pattern: Pattern, study_s: float, study_j: float) -> bool:
        """Return whether a study may begin now.

        It may while the board is idle and the day's pattern promises so for as long as a study takes; or, where a share
        of the load may be explored on, while that share is not used up.

        Args:
            now_s: On the clock of `seen`.
            since_midnight_s: Wall time of day.
            pattern: What the day brings.
            study_s: How long a study takes.
            study_j: How much energy.
        """
        if self.may_explore(study_j) is not None:
            return False
        if self.idle_since_s is not None:
            idle_s = now_s - self.idle_since_s
            ahead = pattern.ahead(since_midnight_s, study_s, 0.0)
            # Idle for longer than a study takes: the pattern is wrong today.
            promised = idle_s >= study_s or all(part.rate_per_s <= self.quiet_per_s for part in ahead)
            return idle_s >= self.allowance.idle_s and promised
        return self.allowance.canary > 0 and self.explored_s + study_s <= self.allowance.canary * self.loaded_s


def quiet_per_s(lowest_per_s: float) -> float:
    """Return the rate below which a board counts as idle.

    Args:
        lowest_per_s: What the ladder's lowest rung answers.
    """
    return _QUIET * lowest_per_s
