"""When to ask for a successor: overlap against interruption under the wait's distribution."""

from pathlib import Path
from random import Random

import pytest

from polythrottle.domain.errors import BadFile, InvalidInput
from polythrottle.training.elastic.nodes.rented_nodes import (
    Stakes,
    WaitModel,
    Waits,
    expected_usd,
    lead_s,
    read_waits,
    stakes_of,
    submit_now,
)

WAITS = Waits.of([random * 10 for random in range(1, 101)])  # 10 … 1000 s
EVEN, PATIENT, URGENT = Stakes(1, 1), Stakes(4, 1), Stakes(1, 9)


@pytest.mark.parametrize(("stakes", "share"), [(EVEN, 0.5), (PATIENT, 0.2), (URGENT, 0.9)])
def test_the_best_lead_is_the_newsvendors_quantile_and_costs_least(stakes: Stakes, share: float) -> None:
    """No other lead has a smaller expected cost, and its chance to be late is the ratio of costs."""
    best_s = lead_s(WAITS, stakes)
    assert best_s == WAITS.quantile_s(share)
    costs = {ahead: expected_usd(ahead, WAITS, stakes) for ahead in range(0, 1200, 10)}
    assert expected_usd(best_s, WAITS, stakes) == pytest.approx(min(costs.values()))


def test_it_is_asked_as_soon_as_the_lead_is_reached() -> None:
    """Just before the lead it waits, at the lead it asks, and after the end it always asks."""
    best_s = lead_s(WAITS, URGENT)
    assert not submit_now(best_s + 20, WAITS, URGENT)
    assert submit_now(best_s - 1, WAITS, URGENT)
    assert submit_now(-5, WAITS, PATIENT)


def test_the_costs_ratio_beats_the_mean_where_waits_scatter() -> None:
    """Mirage's plain rule asks at the mean wait, which costs more than the quantile where being late is dear."""
    assert expected_usd(lead_s(WAITS, URGENT), WAITS, URGENT) < 0.6 * expected_usd(WAITS.mean_s, WAITS, URGENT)


def test_energy_makes_overlap_dearer() -> None:
    """A successor that draws power while it waits is asked for later."""
    free, priced = (stakes_of(0.9, 300, price, machines=2) for price in (0.0, 3.0))
    assert lead_s(WAITS, priced) < lead_s(WAITS, free)
    assert stakes_of(1.0, 0, 0, machines=4).tolerable == pytest.approx(0.2)
    assert stakes_of(1.0, 0, 0, progress_usd_per_h=1.0).tolerable == pytest.approx(0.5)


def test_waits_are_regressed_on_what_is_seen_of_the_queue() -> None:
    """A model of waits that grow with the jobs ahead tells a long queue from a short one, with its spread."""
    random = Random(1)
    seen = [(float(random.randrange(1, 200)), float(random.randrange(1, 8))) for _ in range(200)]
    waited = [30 * ahead * random.lognormvariate(0, 0.3) for ahead, _ in seen]
    model = WaitModel.fit(seen, waited)
    short, long = model.waits((5, 2)), model.waits((150, 2))
    assert short.mean_s == pytest.approx(150, rel=0.3)
    assert long.mean_s == pytest.approx(4500, rel=0.3)
    assert long.quantile_s(0.9) / long.quantile_s(0.1) == pytest.approx(2.15, rel=0.3)


def test_waits_are_read_from_a_table(tmp_path: Path) -> None:
    """Rows of the GPU are taken where there are some; a table without waits is a bad file."""
    path = tmp_path / "waits.csv"
    path.write_text("gpu,total_s\nK80,80\nP100,100\nK80,90\n")
    assert read_waits(path, "k80").times_s == (80, 90)
    assert read_waits(path, "H100").times_s == (80, 90, 100)
    path.write_text("wait_s\n5\n3\n")
    assert read_waits(path).times_s == (3, 5)
    path.write_text("hours\n5\n")
    with pytest.raises(BadFile, match="no column wait_s or total_s"):
        read_waits(path)
    path.write_text("wait_s\nlong\n")
    with pytest.raises(BadFile, match="line 2: wait_s"):
        read_waits(path)


def test_what_cannot_be_is_refused() -> None:
    """Too few orders, uneven features, negative waits and stakes of nothing say so."""
    with pytest.raises(InvalidInput, match="three orders"):
        WaitModel.fit([(1.0,)], [1.0])
    with pytest.raises(InvalidInput, match="same features"):
        WaitModel.fit([(1.0,), (1.0, 2.0), (3.0,)], [1.0, 2.0, 3.0])
    with pytest.raises(InvalidInput, match="at least 0"):
        WaitModel.fit([(1.0,), (2.0,), (3.0,)], [1.0, -2.0, 3.0])
    with pytest.raises(InvalidInput, match="takes 1 features"):
        WaitModel.fit([(1.0,), (2.0,), (3.0,)], [1.0, 2.0, 3.0]).waits((1.0, 2.0))
    with pytest.raises(InvalidInput, match="not both nothing"):
        Stakes(0, 0)
    with pytest.raises(InvalidInput, match="at least one time"):
        Waits(())
