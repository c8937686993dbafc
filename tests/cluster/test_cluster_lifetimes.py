"""The lifetimes a catalogue can name."""

from pathlib import Path

import pytest

from polythrottle.cluster.predict.lifetimes import LimitedLifetime, published_lifetime, table_lifetime
from polythrottle.domain.errors import InvalidInput
from polythrottle.domain.fleet.transient_machine import ConstantHazard

HEAD = "provider,gpu,zone,stressed,start,end,lifetime_s,reached_24h_cap\n"


def test_a_limit_ends_every_life() -> None:
    """Up to the limit a machine lives as it would, and never beyond."""
    limited = LimitedLifetime(ConstantHazard(0.01), 7200)
    assert limited.survival(7199) == pytest.approx(ConstantHazard(0.01).survival(7199))
    assert limited.survival(7200) == 0
    assert limited.quantile_s(0.5) == 7200
    assert limited.quantile_s(0.999) == pytest.approx(ConstantHazard(0.01).quantile_s(0.999))
    assert limited.hazard_per_s(7200) > limited.hazard_per_s(0)
    with pytest.raises(InvalidInput, match="above 0"):
        LimitedLifetime(ConstantHazard(1), 0)


def test_many_machines_of_a_table_outweigh_what_was_published(tmp_path: Path) -> None:
    """Two hundred machines of which half were lost in the first hour give about that, ended at 24 h."""
    rows = [f"gcp,K80,mars-1,0,2019-02-18T00:00:00,,{1800 if i % 2 else 86400},{(i + 1) % 2}\n" for i in range(200)]
    path = tmp_path / "lives.csv"
    path.write_text(HEAD + "".join(rows))
    lifetime, machines = table_lifetime(path, "k80", "mars")
    assert machines == 200
    assert lifetime.survival(3600) == pytest.approx(0.5, abs=0.12)
    assert lifetime.survival(24 * 3600) == 0


def test_machines_that_are_not_there_are_said(tmp_path: Path) -> None:
    """An unknown GPU or zone lists what the table has."""
    path = tmp_path / "lives.csv"
    path.write_text(HEAD + "gcp,K80,mars-1,0,2019-02-18T00:00:00,,1800,0\n")
    with pytest.raises(InvalidInput, match=r"no lifetimes of H100; it has K80 mars-1"):
        table_lifetime(path, "H100")
    with pytest.raises(InvalidInput, match="no lifetimes of K80 in venus"):
        table_lifetime(path, "K80", "venus")


def test_published_figures_differ_by_type_and_region() -> None:
    """Two in three V100 of us-central1 were lost in the first hour, none of the P100 of europe-west1."""
    assert published_lifetime("V100", "us-central1")[0].survival(3600) == pytest.approx(0.33, abs=0.02)
    assert published_lifetime("P100", "europe-west1")[0].survival(3600) > 0.98


def test_what_was_not_published_says_what_it_is_instead() -> None:
    """Another region gets the mean of its type, another GPU the mean of all."""
    assert published_lifetime("K80", "us-west1")[1] == "published by CM-DARE, 2019"
    assert published_lifetime("K80", "mars")[1].endswith("mean of all K80")
    lifetime, whose = published_lifetime("H100", "us-west1")
    assert whose.endswith("mean of other GPUs")
    assert 0 < lifetime.survival(3600) < 1


def test_recorded_lifetimes_are_read(transient: Path) -> None:
    """Both recorded tables give lifetimes that fall."""
    for name, gpu, zone in (("gcp_preemptible_lifetimes.csv", "K80", ""), ("aws_spot_lifetimes_2020.csv", "K80", "us")):
        lifetime, machines = table_lifetime(transient / name, gpu, zone)
        assert machines > 10
        assert 1 > lifetime.survival(3600) > lifetime.survival(6 * 3600) > 0


def test_a_day_ends_lives_only_where_the_table_shows_it(tmp_path: Path) -> None:
    """A column that never says 1 is no sign of a provider that stops machines after 24 h."""
    path = tmp_path / "lives.csv"
    path.write_text(HEAD + "gcp,K80,mars-1,0,2019-02-18T00:00:00Z,,1800,0\n")
    assert table_lifetime(path, "K80")[0].survival(25 * 3600) > 0
    path.write_text(path.read_text() + "gcp,K80,mars-1,0,2019-02-18T00:00:00,,86400,1\n")
    assert table_lifetime(path, "K80")[0].survival(25 * 3600) == 0
