"""Two profiles in turns: whether a new one is worse than the old one, seen on the same board under the same load."""

from dataclasses import dataclass

from polythrottle.daemon.drift import Rollback
from polythrottle.daemon.looking import Sight
from polythrottle.daemon.tuned import Tuned

TURN_S = 60.0
_SKIPPED_S = 5.0
"""What follows a change of profiles says little: sensors lag, queues empty."""
_PAIRS_MOST = 60
_TROUBLES_MOST = 2


@dataclass
class _Sum:
    joules: float = 0.0
    reference_j: float = 0.0
    seconds: float = 0.0


class Contest:
    """A sequential test on turns of a minute of load, whose energies are compared with what the old ladder predicts.

    Dividing by a prediction for the load of each turn takes the load out of the comparison; that the prediction may be
    wrong does not matter, for it is the same for both.

    Args:
        old: What was followed.
        new: What a study has found.
    """

    def __init__(self, old: Tuned, new: Tuned) -> None:
        self.old, self.new = old, new
        self.turn = new
        self.over: bool | None = None
        """Whether the new one is to be kept; None while that is not decided."""
        self.words = ""
        self._test = Rollback()
        self._sum = _Sum()
        self._first: float | None = None
        self._waited_s = 0.0
        self._pairs = self._troubles = 0
        self._troubled = False

    def seen(self, sight: Sight, trouble: bool) -> None:
        """Take one control period in.

        Args:
            sight: What was seen in it.
            trouble: Whether the new one has made a guard for the users' sake trip.
        """
        if trouble and not self._troubled:
            self._troubles += 1
        self._troubled = trouble
        if self._troubles >= _TROUBLES_MOST:
            self._decided(False, "the new profile is rolled back: under it a guard tripped twice")
            return
        self._added(sight)
        if self._sum.seconds >= TURN_S:
            self._turned()

    def _added(self, sight: Sight) -> None:
        rate_per_s, ladder = sight.rate_per_s, self.old.plan.ladder
        if not rate_per_s or sight.own_j is None or ladder is None:
            return
        if self._waited_s < _SKIPPED_S:
            self._waited_s += sight.period_s
            return
        rung = ladder.rungs[ladder.best(rate_per_s, rate_per_s)]
        self._sum.joules += sight.own_j
        self._sum.reference_j += rung.power_at(rate_per_s) * sight.period_s
        self._sum.seconds += sight.period_s

    def _turned(self) -> None:
        ratio, self._sum, self._waited_s = self._sum.joules / self._sum.reference_j, _Sum(), 0.0
        if self._first is None:
            self._first, self.turn = ratio, self.old
            return
        new, self._first, self.turn = self._first, None, self.new
        self._test = self._test.seen(new, ratio)
        self._pairs += 1
        if self._test.worse:
            self._decided(False, "the new profile is rolled back: it draws more than the old one at the same load")
        elif self._test.worse is False or self._pairs >= _PAIRS_MOST:
            self._decided(True, "the new profile is kept: it draws no more than the old one at the same load")

    def _decided(self, keeps: bool, words: str) -> None:
        self.over, self.words = keeps, words
