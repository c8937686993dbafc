"""Requests of a trial watched one by one: none is sent that could overdraw an error budget."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from polythrottle.domain.backports import paired
from polythrottle.domain.error_budget import NOTHING_SPENT, LateRequests, late_share
from polythrottle.domain.errors import InvalidInput
from polythrottle.domain.measurement import Query
from polythrottle.domain.problem import Constraint

if TYPE_CHECKING:
    from typing_extensions import Self

CUT = "cut short to keep the error budget"
"""How the failure of a trial begins that was cut before it told anything."""
_SHARE_OF_LEFT = 1 / 3
"""What a trial may spend of what is left, so that one bad point does not end a search."""
_ROOM = 2
"""It may spend at least as much as it takes to show something: what is under way, and so many more."""
_TIMES = {"ttft": ("first_s", 1), "tpot": ("per_token_s", 2)}
"""Where a request tells its time, and how many tokens an answer has at least that should."""
_BETS = (0.5, 0.1, 0.03)
_SURE = 1e6
"""By what odds the requests must speak against a point: if it held its limit, and requests were independent, one trial
in so many would be cut wrongly, however often one looks (Ville's inequality for a mean of likelihood ratios; the
alternatives are `_BETS`, each a share of late requests)."""
_PARTING_S = 0.05
_DUST = 1e-9
"""Of rounding, in requests."""
_LONGEST_S = 30.0


class RequestWatch:
    """Watches the requests of one trial: each counts as late from before it is sent until it is known not to be.

    Whoever sends asks `permits` first and tells `landed` after, both in one thread. Where requests are sent on another
    machine, one that is made `there` from an `order` watches them, and what it tells is heard here.

    Args:
        limits: Absolute; those on percentiles of requests count.
        spent: What trials before this have spent.
        most: How many requests may be late beyond the SLO's own share, all trials together.
        under_way: How many requests are under way at once, at least.
        least: After how many answers the requests may speak against the point: those of a warm-up, and some more, for
            nothing is learnt of a trial without a window.
    """

    def __init__(
        self, limits: Sequence[Constraint], spent: LateRequests, most: float, *, under_way: int = 1, least: int = 0
    ) -> None:
        self._limits = {one.metric: one.limit for one in limits if late_share(one.metric) is not None}
        self._shares = {metric: late_share(metric) or 0.0 for metric in self._limits}
        left = max(0.0, most - spent.most_beyond())
        self.allowance = min(left, max(_SHARE_OF_LEFT * left, under_way + max(_ROOM, least)))
        self.last = self.allowance >= left
        self._under_way = under_way
        self._least = least
        self._sent = 0
        self._flying = 0
        self._late = dict.fromkeys(self._limits, 0)
        self._bets = {metric: [bet for bet in _BETS if bet > share] for metric, share in self._shares.items()}
        self._odds = {metric: [1.0] * len(bets) for metric, bets in self._bets.items()}
        self._away = False
        self.cut = ""

    @classmethod
    def there(cls, order: Mapping[str, Any]) -> Self:
        """Return what watches, on the machine that sends, the requests of an `order`."""
        limits = [Constraint(metric, limit) for metric, limit in order["limits"].items()]
        watch = cls(limits, NOTHING_SPENT, 0.0, under_way=order["under_way"], least=order["least"])
        watch.allowance = order["allowance"]
        return watch

    def order(self) -> dict[str, Any]:
        """Have the requests watched elsewhere: return what `there` needs, as JSON has it.

        From now on all that the trial may spend counts as spent, until `hear` is told of the end.
        """
        self._away = True
        return {
            "limits": self._limits,
            "allowance": self.allowance,
            "under_way": self._under_way,
            "least": self._least,
        }

    @property
    def state(self) -> dict[str, Any]:
        """What was seen so far, as JSON has it."""
        return {"sent": self._sent, "flying": self._flying, "late": {**self._late}, "cut": self.cut}

    def hear(self, state: Mapping[str, Any], *, ended: bool) -> None:
        """Take over what the watch elsewhere has seen.

        Args:
            state: Of that one.
            ended: Whether that is all: nothing is sent there any more.
        """
        self._sent = int(state["sent"])
        self._flying = int(state["flying"])
        self._late = {metric: int(state["late"][metric]) for metric in self._limits}
        self.cut = str(state["cut"])
        self._away = not ended

    @property
    def affordable(self) -> bool:
        """Whether what is left allows as many requests as are under way at once, all of them late."""
        return self._worst(self._under_way) <= self.allowance + _DUST

    @property
    def shortage(self) -> str:
        """What is left, in words, where that does not suffice."""
        return f"{self.allowance:.3g} more requests may be late, and {self._under_way} are under way at once"

    @property
    def patience_s(self) -> float:
        """After what time a request that is under way is known to be late, when nothing more is sent."""
        if any("_" in metric for metric in self._limits):
            return _LONGEST_S  # when an answer is whole says nothing of when its first token came
        return min(_LONGEST_S, max(self._limits.values()) + _PARTING_S)

    def permits(self, count: int) -> bool:
        """Return whether so many requests may be sent now; after the first refusal none may be any more."""
        if self.cut:
            return False
        if self._worst(count) > self.allowance + _DUST:
            self.cut = f"{CUT}: {self._words}, {self._flying} under way"
            return False
        self._sent += count
        self._flying += count
        return True

    def landed(self, query: Query) -> None:
        """Take note of a request that was answered.

        Raises:
            InvalidInput: If what answered it answers several, which were all sent before anybody could ask.
        """
        if query.more:
            raise InvalidInput(
                "a command that prints several latencies a run sends its requests itself, so no error budget can "
                "bound them; have it answer one a run, or leave --error-budget out"
            )
        self._flying -= 1
        for metric, limit in self._limits.items():
            late = _is_late(query, metric, limit)
            self._late[metric] += late
            share = self._shares[metric]
            self._odds[metric] = [
                odds * (bet / share if late else (1 - bet) / (1 - share))
                for odds, bet in paired(self._odds[metric], self._bets[metric])
            ]
            sure = sum(self._odds[metric]) >= _SURE * len(_BETS) and self._sent - self._flying >= self._least
            if sure and not self.cut:
                self.cut = f"{CUT}: {self._words}"

    @property
    def broken(self) -> bool:
        """Whether more requests were late so far than a limit allows of so many."""
        return any(late > self._shares[metric] * self._sent for metric, late in self._late.items())

    @property
    def spent(self) -> LateRequests:
        """What this trial has spent: what is not known to be in time is late, and all of it where nobody tells."""
        if self._away:
            return LateRequests(forfeited=self.allowance)
        return LateRequests.of_trial(self._sent, {metric: late + self._flying for metric, late in self._late.items()})

    def _worst(self, count: int) -> float:
        """Return how many requests would be late beyond a limit's share if all that is not known were late."""
        sent = self._sent + count
        worst = max((late - self._shares[metric] * sent for metric, late in self._late.items()), default=-math.inf)
        return worst + self._flying + count

    @property
    def _words(self) -> str:
        late = ", ".join(f"{late} over {metric}" for metric, late in self._late.items())
        return f"{late} of {self._sent} requests"


def _is_late(query: Query, metric: str, limit: float) -> bool:
    """Return whether a request was over a limit; one that does not tell its time, and should, counts as late."""
    name, apart, _ = metric.partition("_")
    if not apart:
        return query.latency_s > limit
    field, owed = _TIMES[name]
    value: float | None = getattr(query, field)
    if value is None:
        return (query.tokens or 0) >= owed
    return value > limit
