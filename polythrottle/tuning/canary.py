"""A profile tried on a tenth of the boards first: whether it is worse than the board without it, proven board by board.

On each of them windows with the profile and with the default settings take turns, so that heat, load and what tells one
board from another fall on both. Energy per item with ÷ without, and each limited quantity ÷ its limit, are asked the
question of the sequential test with which the daemon takes a new profile over. Nothing is kept meanwhile: the board is
entered as for any measurement, and is as it was found when the turns end, however that happens.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from polythrottle.catalog.tuned_profiles import find_profile, read_profile
from polythrottle.domain.errors import InvalidInput, TrialError
from polythrottle.domain.measurement import Interval
from polythrottle.domain.metrics import why_untold
from polythrottle.domain.problem import Constraint
from polythrottle.metering.comparison import MOST_PAIRS, Comparison
from polythrottle.metering.sequential import RollbackTest
from polythrottle.tuning.profile_comparison import DEFAULT, compare_sides, limits_of
from polythrottle.tuning.setup import Setup

Told = Callable[[str], object]
HARM = 0.02
WRONGLY = 0.01
"""A profile that is worse by `HARM` passes on a board with this probability at most."""


@dataclass(frozen=True)
class CanaryTest:
    """What the turns on one board prove.

    Args:
        uri: The board.
        comparison: Its pairs, first without the profile, then with it.
        energy: Asks whether the profile takes more energy per item.
        limits: Asks of each limit of the profile whether it is broken.
    """

    uri: str
    comparison: Comparison
    energy: RollbackTest
    limits: Mapping[str, RollbackTest]

    @classmethod
    def of(cls, uri: str, comparison: Comparison, limits: Sequence[Constraint]) -> "CanaryTest":
        """Return what pairs prove.

        Raises:
            TrialError: If a limit is on something that was not measured.
        """
        energy = RollbackTest(HARM, WRONGLY)
        bounds = {str(limit): RollbackTest(HARM, WRONGLY) for limit in limits}
        for without, with_ in comparison.pairs:
            energy = energy.seen(with_.energy_j, without.energy_j)
            for limit in limits:
                value = with_.metric(limit.metric)
                if value is None:
                    raise TrialError(f"{limit.metric} is not measured here{why_untold(limit.metric)}")
                new, old = (limit.limit, value) if limit.at_least else (value, limit.limit)
                bounds[str(limit)] = bounds[str(limit)].seen(new, old)
        return cls(uri, comparison, energy, bounds)

    @property
    def worse(self) -> bool | None:
        """Whether the profile is worse here: in energy, or in that it breaks a limit; None while that is not known."""
        if self.behind:
            return True
        worse = [test.worse for test in (self.energy, *self.limits.values())]
        if any(worse):
            return True
        if None in worse:
            return None
        return False

    @property
    def behind(self) -> bool:
        """Whether the board does not serve what comes under the profile, in most of its windows."""
        late = sum(not with_.keeps_up for _, with_ in self.comparison.pairs)
        return late > 1 and 2 * late >= len(self.comparison.pairs)

    @property
    def broken(self) -> tuple[str, ...]:
        """The limits that are proven broken."""
        return tuple(name for name, test in self.limits.items() if test.worse)

    @property
    def open(self) -> tuple[str, ...]:
        """What is not known either way: ``energy``, or limits."""
        tests = {"energy": self.energy, **self.limits}
        return tuple(name for name, test in tests.items() if test.worse is None)

    @property
    def saving(self) -> Interval:
        """The share of the energy per item that the profile saves here, as a 95 % interval."""
        return self.comparison.saving


def canary_test(
    uri: str,
    profile: str,
    *,
    other_model: bool = False,
    most_pairs: int = MOST_PAIRS,
    told: Told = lambda line: None,
) -> CanaryTest:
    """Measure a profile and the default of a board in turns until it is known whether the profile is worse there.

    Args:
        uri: The board.
        profile: The profile's file or name.
        other_model: Whether to measure another model than the one it was tuned for.
        most_pairs: After how many pairs to give up.
        told: Called with what is run because the profile names it, before it is.

    Returns:
        The test, whose `CanaryTest.worse` is None where that many pairs do not tell.

    Raises:
        PolythrottleError: As `polythrottle.tuning.profile_comparison.compare_sides`.
    """
    limits = limits_of(profile, read_profile(find_profile(profile)))
    enough = partial(_enough, uri, limits)
    turns = compare_sides(
        (DEFAULT, profile), Setup(device=uri), most_pairs, told, other_model=other_model or None, enough=enough
    )
    *_, comparison = turns
    if comparison.recorded:
        raise InvalidInput(f"{uri} is a recorded table; there is nothing to try a profile on")
    return CanaryTest.of(uri, comparison, limits)


def _enough(uri: str, limits: Sequence[Constraint], comparison: Comparison) -> bool:
    return CanaryTest.of(uri, comparison, limits).worse is not None


def first_of(count: int, share: float) -> int:
    """Return how many of so many boards are a share of them: rounded down, but one at least, and never all.

    Args:
        count: Of boards, 2 or more.
        share: Such as 0.1.

    Raises:
        InvalidInput: If there is nothing to hold back, or the share is not between 0 and 1.
    """
    if not 0 < share < 1:
        raise InvalidInput(f"--canary is a share of the boards, such as 10%, not {100 * share:g} %")
    if count < 2:
        raise InvalidInput("--canary tries a profile on some boards before the others, but only one board is named")
    # In floating point 29 % of a hundred boards are 28.999999999999996.
    return max(1, math.floor(count * share + 1e-9))
