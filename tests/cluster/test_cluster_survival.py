"""Kaplan and Meier's estimate and its band."""

from datetime import datetime

import pytest

from polythrottle.cluster.recorded_tables import LifetimeRow
from polythrottle.domain.errors import InvalidInput
from polythrottle.lab.reproduce.transient_machines import kaplan_meier

START = datetime(2019, 2, 18)


def machine(age_s: float, lost: bool = True) -> LifetimeRow:
    """Return a machine that was lost, or last seen, at an age."""
    return LifetimeRow("GPU", "here", START, age_s, age_s if lost else None)


def test_the_textbook_example() -> None:
    """Freireich's 21 patients (1963): survival .807 after 7 weeks, .448 after 23; Greenwood's errors .0869, .1346."""
    lost = [6, 6, 6, 7, 10, 13, 16, 22, 23]
    kept = [6, 9, 10, 11, 17, 19, 20, 25, 32, 32, 34, 35]
    found = kaplan_meier([*map(machine, lost), *(machine(age, False) for age in kept)])
    assert found.survival(7) == pytest.approx(0.807, abs=5e-4)
    assert found.survival(23) == pytest.approx(0.448, abs=5e-4)
    assert (found.survivals[1] ** 2 * found.sums[1]) ** 0.5 == pytest.approx(0.0869, abs=5e-4)
    assert (found.survivals[-1] ** 2 * found.sums[-1]) ** 0.5 == pytest.approx(0.1346, abs=5e-4)
    band = found.band(7)
    assert band.low == pytest.approx(0.563, abs=2e-3)
    assert band.high == pytest.approx(0.923, abs=2e-3)


def test_a_band_is_there_where_nothing_or_everything_was_lost() -> None:
    """Eight machines kept: survival may still be as low as 0.63; eight lost: as high as 0.37."""
    kept = kaplan_meier([machine(10, False)] * 8).band(5)
    assert (kept.survival, kept.high) == (1, 1)
    assert kept.low == pytest.approx(0.025 ** (1 / 8))
    gone = kaplan_meier([machine(10)] * 8).band(20)
    assert (gone.survival, gone.low) == (0, 0)
    assert gone.high == pytest.approx(1 - 0.025 ** (1 / 8))
    assert gone.holds(0.3)
    assert not gone.holds(0.5)


def test_bursts_widen_the_band() -> None:
    """Machines lost two by two say as much as half of them."""
    rows = [machine(1), machine(2), machine(3), machine(4, False)]
    narrow, wide = kaplan_meier(rows).band(2.5), kaplan_meier(rows, 2.0).band(2.5)
    assert wide.low < narrow.low < narrow.high < wide.high
    assert kaplan_meier([machine(9, False)] * 8, 2.0).band(5).low == pytest.approx(0.025 ** (1 / 4))


def test_the_estimate_can_be_planned_with() -> None:
    """It is a lifetime that starts at 1 and reaches the estimate at its corners."""
    found = kaplan_meier([machine(100), machine(200), machine(300, False), machine(300, False)])
    life = found.observed()
    assert life.survival(0) == 1
    assert life.survival(200) == pytest.approx(found.survival(200)) == pytest.approx(0.5)
    assert kaplan_meier([machine(0), machine(5)]).observed().survival(0) == 1
    assert kaplan_meier([machine(5, False)]).observed().survival(99) == 1


def test_nothing_watched_is_no_estimate() -> None:
    """It needs a machine."""
    with pytest.raises(InvalidInput, match="at least one machine"):
        kaplan_meier([])
