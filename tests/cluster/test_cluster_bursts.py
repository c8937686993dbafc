"""Machines that are lost together."""

from datetime import datetime, timedelta
from pathlib import Path

import pytest

from polythrottle.cluster.recorded_tables import LifetimeRow, lifetime_rows
from polythrottle.lab.reproduce.transient_machines import bursts

START = datetime(2019, 2, 18)


def machine(age_s: float, lost: bool = True, region: str = "here", start_s: float = 0.0) -> LifetimeRow:
    """Return a machine."""
    return LifetimeRow("GPU", region, START + timedelta(seconds=start_s), age_s, age_s if lost else None)


def test_losses_close_together_are_one_burst() -> None:
    """Three within two minutes of each other are; one far away is alone, and so is one of another region."""
    rows = [machine(7200), machine(7290), machine(7300), machine(9000), machine(7200, region="there")]
    found = bursts([*rows, machine(36_000, lost=False)])
    assert (found.losses, found.together) == (5, 3)
    assert found.effect == pytest.approx((9 + 1 + 1) / 5)
    assert found.share == pytest.approx(3 / 5)


def test_it_is_the_moment_that_counts_not_the_age() -> None:
    """Machines of different ages lost at the same moment are a burst; of the same age at different moments not."""
    assert bursts([machine(7200), machine(3600, start_s=3600)]).together == 2
    assert bursts([machine(3600), machine(3600, start_s=3600)]).together == 0


def test_without_losses_there_are_no_bursts() -> None:
    """Nothing is divided by nothing."""
    found = bursts([machine(3600, lost=False)])
    assert (found.losses, found.shocks_per_h, found.share, found.effect) == (0, 0, 0, 1)
    assert bursts([]).effect == 1


def test_half_of_googles_losses_came_in_bursts(transient: Path) -> None:
    """16 of 32 in February 2019; none of Amazon's, which were watched one at a time."""
    assert bursts(lifetime_rows(transient / "gcp_preemptible_lifetimes.csv")).together == 16
    assert bursts(lifetime_rows(transient / "aws_spot_lifetimes_2020.csv")).together == 0
