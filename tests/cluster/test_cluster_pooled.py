"""Survival of machines of which few were seen."""

from datetime import datetime, timedelta
from math import inf
from pathlib import Path

import pytest

from polythrottle.cluster.predict.lifetimes import EDGES_S, Pieces, Pool, pooled, prior, spans_s, tally
from polythrottle.cluster.recorded_tables import LifetimeRow
from polythrottle.domain.errors import InvalidInput
from polythrottle.domain.fleet.transient_machine import HOUR_S
from polythrottle.lab.reproduce.transient_lifetimes import calibration, inside, lives

START = datetime(2019, 2, 18)
DAY_S = 24 * HOUR_S


def machine(age_h: float, lost: bool = True, region: str = "here", gpu: str = "GPU", day: float = 0) -> LifetimeRow:
    """Return a machine."""
    age_s = age_h * HOUR_S
    return LifetimeRow(gpu, region, START + timedelta(days=day), age_s, age_s if lost else None)


def flat(gpu: str, region: str) -> Pieces:
    """Return a danger of 5 % per hour for any machine."""
    return Pieces(EDGES_S, (0.05 / HOUR_S,) * len(EDGES_S))


def test_pieces_are_consistent() -> None:
    """Survival falls from 1, quantiles undo it across spans, also those without danger."""
    life = Pieces((0.0, 10.0, 20.0), (0.1, 0.0, 0.05))
    assert life.survival(0) == 1
    assert life.survival(10) == life.survival(20) == pytest.approx(0.3679, abs=1e-4)
    for age in (3.0, 9.0, 25.0, 80.0):
        assert life.quantile_s(life.survival(age)) == pytest.approx(age)
    assert life.hazard_per_s(15) == 0
    assert Pieces((0.0,), (0.0,)).quantile_s(0.5) == inf
    assert life.quantile_s(0) == inf
    assert life.quantile_s(1) == 0


@pytest.mark.parametrize(
    "made", [((), ()), ((1.0,), (0.1,)), ((0.0, 0.0), (0.1, 0.1)), ((0.0,), (-0.1,)), ((0.0,), (0.1, 0.1))]
)
def test_impossible_pieces_are_refused(made: tuple[tuple[float, ...], tuple[float, ...]]) -> None:
    """Spans begin at 0 and rise; rates are at least 0; there is one for each."""
    with pytest.raises(InvalidInput):
        Pieces(*made)


def test_a_life_is_cut_into_its_spans() -> None:
    """Its seconds add up, and its loss is counted in the span it fell in."""
    assert sum(spans_s(8 * HOUR_S)) == 8 * HOUR_S
    assert tally(machine(8)).losses == (0, 0, 0, 1, 0, 0)
    assert sum(tally(machine(8, lost=False)).losses) == 0
    assert sum(tally(machine(40)).watched_s) == 40 * HOUR_S


def test_with_nothing_seen_the_prior_holds() -> None:
    """A type and region never seen live as was published."""
    assert Pool(flat).lifetime("GPU", "here").survival(DAY_S) == pytest.approx(flat("", "").survival(DAY_S), rel=0.01)


def test_much_seen_outweighs_the_prior() -> None:
    """Of 200 machines that all lived a day almost nothing of the prior's danger is left; of 3, most."""
    many, few = (pooled([machine(24, lost=False)] * count, flat).lifetime("GPU", "here") for count in (200, 3))
    assert many.survival(DAY_S) > 0.95
    assert few.survival(DAY_S) < 0.7


def test_a_new_region_borrows_from_its_type() -> None:
    """Where all others of the type die young, a new one is in more danger than by the prior, but less than they."""
    pool = pooled([machine(0.5)] * 50, flat)
    here, new, other = (pool.lifetime(*key) for key in (("GPU", "here"), ("GPU", "new"), ("other", "here")))
    assert here.survival(HOUR_S) < new.survival(HOUR_S) < other.survival(HOUR_S)


def test_what_was_seen_fades() -> None:
    """Losses of months ago are forgotten: survivors of today decide."""
    old, new = [machine(0.5)] * 20, [machine(24, lost=False, day=90)] * 20
    faded, kept = (pooled([*old, *new], flat, half_s).lifetime("GPU", "here") for half_s in (7 * DAY_S, 1e12))
    assert faded.survival(HOUR_S) > 0.9
    assert kept.survival(HOUR_S) < 0.6


def test_machines_can_be_added_one_by_one() -> None:
    """The pool does not care in what form; time never goes back for it."""
    rows = [machine(3, day=0), machine(24, lost=False, day=1), machine(7, day=2)]
    pool = Pool(flat)
    for row in rows:
        pool = pool.seen(row, row.start.timestamp())
    assert pool == pooled(reversed(rows), flat)
    assert pool.seen(rows[0], 0.0).at_s == pool.at_s


def test_published_curves_pass_through_their_figures() -> None:
    """K80 in us-west1: 4 % lost within an hour, 23 % within a day; a zone is in its region; else the type's mean."""
    life = prior("K80", "us-west1-b")
    assert 1 - life.survival(HOUR_S) == pytest.approx(0.04, abs=1e-6)
    assert 1 - life.survival(DAY_S) == pytest.approx(0.23, abs=1e-6)
    means = prior("V100", "elsewhere").survival(DAY_S)
    assert means == pytest.approx(1 - (0.67 + 0.73 + 0.43 + 0.47) / 4, abs=1e-6)
    assert 0.4 < prior("unheard of").survival(DAY_S) < 0.55


def test_later_lives_are_predicted_from_earlier_ones(transient: Path) -> None:
    """Nine in ten survivals at 1, 6, 12 and 24 h of later machines lie in their bands, for Google and for Amazon."""
    for rows in lives(transient):
        found = calibration(rows)
        assert len(found) >= 3
        assert inside(found) >= 0.9
