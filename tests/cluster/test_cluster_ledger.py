"""Where a job's joules went."""

import pytest

from polythrottle.cluster.plan.costs import Ledger, Spent, Use
from polythrottle.domain.errors import InvalidInput


def test_every_use_is_counted_once() -> None:
    """The total is the sum of what was written down."""
    ledger = Ledger()
    ledger.spend(Use.USEFUL, 4 * 3600, 300, 0.5)
    ledger.spend(Use.WAITING, 10, 50, 0.5)
    assert ledger.total == Spent(14_410, 4_320_500, pytest.approx(2.0 + 10 * 0.5 / 3600))


def test_lost_steps_move_and_nothing_vanishes() -> None:
    """What a loss undoes is redone, not gone."""
    ledger = Ledger()
    ledger.spend(Use.USEFUL, 100, 200, 1.0)
    before = ledger.total
    ledger.move(Use.USEFUL, Use.REDONE, 0.25)
    assert ledger.by_use[Use.REDONE].energy_j == 5_000
    assert ledger.total == before


def test_time_is_not_written_twice() -> None:
    """A negative duration, or a share beyond all, is an error."""
    with pytest.raises(InvalidInput):
        Ledger().spend(Use.USEFUL, -1, 1, 1)
    with pytest.raises(InvalidInput):
        Ledger().move(Use.USEFUL, Use.REDONE, 1.5)


def test_a_record_names_every_use() -> None:
    """Uses that cost nothing are there too."""
    assert set(Ledger().record()) == {str(use) for use in Use}
