"""Prices along time: each holds until the next, and nothing is known outside the record."""

from pathlib import Path

import pytest

from polythrottle.cluster.recorded_tables import History, read_histories
from polythrottle.domain.errors import BadFile, InvalidInput

HEAD = "timestamp,zone,instance_type,product,price_usd_per_h\n"
ROWS = (
    "2020-01-01T00:00:00.000Z,east-1a,p3,Linux/UNIX,1.0\n"
    "2020-01-01T02:00:00.000Z,east-1a,p3,Linux/UNIX,3.0\n"
    "2020-01-01T01:00:00.000Z,east-1b,p3,Linux/UNIX,2.0\n"
    "2020-01-01T00:00:00.000Z,east-1a,p3,Windows,9.0\n"
    "2020-01-01T04:00:00.000Z,west-2a,p2,Linux/UNIX,0.5\n"
)


def table(folder: Path, text: str = HEAD + ROWS) -> Path:
    """Return a table of prices."""
    path = folder / "prices.csv"
    path.write_text(text)
    return path


def test_a_price_holds_until_the_next_and_to_the_end_of_the_record(tmp_path: Path) -> None:
    """Costs are integrals of the steps; the last price holds until the newest row of any zone."""
    history = read_histories(table(tmp_path), "p3", "east-1a")[0]
    begin_s = history.times_s[0]
    assert (history.at(begin_s + 1800), history.at(begin_s + 7200), history.at(begin_s - 1)) == (1.0, 3.0, None)
    assert history.spent_usd(begin_s + 3600, begin_s + 3 * 3600) == pytest.approx(1 + 3)
    assert history.mean_usd_per_h == pytest.approx((2 * 1 + 2 * 3) / 4)
    assert history.at(begin_s + 4 * 3600 + 1) is None
    assert history.times(3).mean_usd_per_h == pytest.approx(6)


def test_zones_and_products_are_told_apart(tmp_path: Path) -> None:
    """Linux is taken where it is sold, and Windows only when asked for."""
    found = read_histories(table(tmp_path), "p3")
    assert [history.name for history in found] == ["east-1a p3", "east-1b p3"]
    assert read_histories(table(tmp_path), "p3", product="Windows")[0].usd_per_h == (9.0,)


def test_daily_prices_by_region_are_read_too(tmp_path: Path) -> None:
    """The other recorded format has dates and regions."""
    path = table(tmp_path, "date,region,instance_type,price_usd_per_h\n2020-02-24,us,NC6,0.2\n2020-02-25,us,NC6,0.4\n")
    assert read_histories(path, "NC6")[0].mean_usd_per_h == pytest.approx((24 * 0.2 + 0.4) / 25)


def test_what_is_not_there_is_said(tmp_path: Path) -> None:
    """An unknown type or zone lists what the table has; a wrong table is a bad file."""
    with pytest.raises(InvalidInput, match="no prices of p9; it has p2, p3"):
        read_histories(table(tmp_path), "p9")
    with pytest.raises(InvalidInput, match="it has east-1a, east-1b"):
        read_histories(table(tmp_path), "p3", "north")
    with pytest.raises(BadFile, match=r"line 2.*price_usd_per_h"):
        read_histories(table(tmp_path, HEAD + "2020-01-01T00:00:00,e,p3,L,cheap\n"))
    with pytest.raises(BadFile, match=r"line 2.*timestamp"):
        read_histories(table(tmp_path, HEAD + "yesterday,e,p3,L,1\n"))
    with pytest.raises(BadFile, match="no column"):
        read_histories(table(tmp_path, "a,b\n1,2\n"))
    with pytest.raises(InvalidInput, match="rise"):
        History("x", (1.0, 1.0), (1.0, 2.0), 3.0)


def test_recorded_prices_are_read(transient: Path) -> None:
    """The four recorded tables of Amazon's hold 62 histories, Microsoft's some more."""
    count = sum(len(read_histories(path)) for path in transient.glob("aws_spot_price_*"))
    assert count == 62
    assert len(read_histories(transient / "azure_spot_price.csv")) > 5


def test_a_table_with_other_names_lists_all_it_needs(tmp_path: Path) -> None:
    """Every column that is needed is named at once, with those that were found."""
    path = table(tmp_path, "Timestamp,AvailabilityZone,SpotPrice\n2020-01-01T00:00:00Z,a,1\n")
    with pytest.raises(
        BadFile, match=r"no column timestamp, zone, instance_type, product, price_usd_per_h.* SpotPrice"
    ):
        read_histories(path)
