"""How long a machine takes to come."""

import pytest

from polythrottle.domain.errors import InvalidInput
from polythrottle.lab.reproduce.cluster_tables import StartupRow
from polythrottle.lab.reproduce.transient_machines import framework_s, startup

ROWS = [
    StartupRow("K80", "east", True, (1, 40, 38)),
    StartupRow("K80", "east", True, (1, 42, 38)),
    StartupRow("K80", "west", True, (2, 50, 40)),
    StartupRow("P100", "east", True, (2, 60, 41)),
    StartupRow("K80", "east", False, (2, 30, 39)),
]


def test_phases_are_means_of_starts_alike() -> None:
    """Of the type and market, in the region if there are any there."""
    east = startup(ROWS, "K80", True, 50, region="east")
    assert east.phases_s[:3] == (1, 41, 38)
    assert east.machine_s == 80
    assert startup(ROWS, "K80", True, 50, region="moon").machines == 3
    assert startup(ROWS, "K80", False, 50).machine_s == 71
    assert east.total_s == pytest.approx(80 + 75.6, abs=0.1)


def test_a_type_never_started_is_taken_for_the_others() -> None:
    """And says so: it names no type."""
    found = startup(ROWS, "V100", True, 50)
    assert (found.machines, found.gpu) == (4, "")
    assert found.spread_s > 5


def test_a_warm_start_is_the_framework_alone() -> None:
    """CM-DARE: ResNet-32 starts in 19 s warm, 79 s cold; Shake-Shake small in 29 and 89 s."""
    assert startup([], "K80", True, 104, warm=True).total_s == framework_s(104, warm=True)
    assert framework_s(104, warm=True) == pytest.approx(19.0, rel=0.05)
    assert framework_s(104) == pytest.approx(78.7, rel=0.03)
    assert framework_s(216, warm=True) == pytest.approx(29.4, rel=0.03)
    assert framework_s(216) == pytest.approx(89.1, rel=0.03)


def test_a_market_without_starts_is_unknown() -> None:
    """It is not taken for the other market."""
    with pytest.raises(InvalidInput, match="no start of a lasting machine"):
        startup(ROWS[:2], "K80", False, 50)
