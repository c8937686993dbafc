"""The papers on transient training beside the models."""

import json
from pathlib import Path

import pytest

from polythrottle.cli.commands import run
from polythrottle.domain.errors import BadFile
from polythrottle.lab.reproduce.published import CONFIGURATIONS, SERVER_USD_PER_H, USD_PER_H
from polythrottle.lab.reproduce.transient import document, find_tables
from polythrottle.lab.reproduce.transient_clusters import (
    beside,
    headline,
    impacts,
    off,
    recorded_trainings,
    regions,
    table,
    trainer,
)


def test_published_costs_are_prices_times_hours() -> None:
    """Every published cost follows from prices and its time; less only where lost machines were not paid to the end."""
    for one in CONFIGURATIONS:
        price = sum(USD_PER_H[gpu, one.transient] for gpu in one.workers) + one.servers * SERVER_USD_PER_H
        paid = one.usd / (price * one.time_s / 3600)
        assert 0.99 <= paid <= 1.02 or (one.transient and len(one.workers) > 1 and 0.94 <= paid < 1)


def test_icacs_clusters_are_predicted_from_single_machines(transient: Path) -> None:
    """Time and cost within 10 % for all, within 5 % for three quarters; 7.7 times and 62.9 % within 3 %."""
    some = trainer(transient)
    errors = [max(abs(off(one, "time_s")), abs(off(one, "usd"))) for one in table(some) if not one["given"]]
    assert len(errors) == 11
    assert max(errors) <= 0.10
    assert sum(error <= 0.05 for error in errors) >= 0.75 * len(errors)
    found = headline(some)
    assert found["speed_up"] == pytest.approx(7.70, rel=0.03)
    assert found["saving"] == pytest.approx(0.629, rel=0.03)
    assert max(abs(off(one, "time_s")) for one in beside(some, recorded_trainings(transient))) <= 0.10


def test_losing_one_of_few_costs_most(transient: Path) -> None:
    """As published: most for one of two, least for one of eight; within 10 points of each figure."""
    found = impacts(trainer(transient))
    assert all(one["slowdown"] == pytest.approx(one["published"], abs=0.1) for one in found)
    assert found[0]["slowdown"] == max(one["slowdown"] for one in found)


def test_two_workers_elsewhere_tell_what_one_costs(transient: Path) -> None:
    """A round trip such as between regions, fitted to two of four away, gives one of four within 5 points."""
    for found in regions(trainer(transient)):
        assert 0.03 < found["round_trip_s"] < 0.3
        assert found["slowdown"] == pytest.approx(found["published"], abs=0.05)


@pytest.mark.slow
def test_the_document_holds_its_bars(transient: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Every bar holds, every part is there, and people get it in 80 columns."""
    told: list[tuple[int, int]] = []
    found = document(transient, lambda done, total: told.append((done, total)))
    json.dumps(found, allow_nan=False)
    assert told[-1] == (7, 7)
    assert [bar["what"] for bar in found["bars"] if not bar["holds"]] == []
    assert len(found["bars"]) == 10
    flagged = {(one["gpu"], one["servers"], one["network"]): one for one in found["bottlenecks"]["curves"]}
    assert flagged["K80", 1, "res32"]["flagged"] == []
    assert flagged["P100", 1, "res32"]["flagged"] == [4, 5, 6, 7, 8]
    assert flagged["P100", 1, "res32"]["another_server"] > 0.6
    assert flagged["P100", 1, "shakebig"]["another_server"] < 0.05
    assert run(["reproduce", "transient", "--data", str(transient)]) == 0
    shown = capsys.readouterr().out
    assert max(map(len, shown.splitlines())) <= 80
    assert "does not hold" not in shown


def test_without_tables_it_says_where_they_come_from(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """One line and exit code 4; tables beside the working folder are found."""
    assert run(["reproduce", "transient", "--data", str(tmp_path)]) == 4
    told = capsys.readouterr().err
    assert told.count("\n") == 1
    assert "github.com/cake-lab/CM-DARE" in told
    with pytest.raises(BadFile, match="are not here; give --data"):
        find_tables(None)
    (tmp_path / "data" / "transient").mkdir(parents=True)
    (tmp_path / "data" / "transient" / "training_speed_by_network_cmdare.csv").touch()
    assert find_tables(None) == tmp_path / "data" / "transient"


def test_a_missing_table_is_named(tmp_path: Path) -> None:
    """Where one of several is not there, the message names it."""
    with pytest.raises(BadFile, match="training_speed_by_cluster_size"):
        document(tmp_path)
