"""Two hours of the daemon in virtual time with a fault a minute; the whole day is benchmarks/soak.py."""

import os
from pathlib import Path

import pytest

from soak import faults
from soak.day import Day, Report
from soak.faults import Hit, drawn

pytestmark = pytest.mark.soak
SEED = int(os.environ.get("POLYTHROTTLE_SOAK_SEED", "0"))


def lived(folder: Path, hours: float, hits: list[Hit], seed: int = SEED) -> Report:
    """Return what a time came to."""
    print(f"seed {seed}")
    return Day(folder, seed, hours, hits).run()


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> Report:
    """Two hours with all kinds of faults."""
    return lived(tmp_path_factory.mktemp("soak"), 2.0, drawn(SEED, 2.0))


def test_nothing_is_lost_and_the_board_is_as_found(report: Report) -> None:
    """No turn raises; events, requests and joules on the disk are what the world knows; every level is as found."""
    assert report.broken == []
    assert report.told["stop"] == 1
    assert report.starts == 1 + sum(hit.kind in (faults.DAEMON, faults.BOTH) for hit in report.hits)


def test_a_killed_daemon_loses_the_minute_under_way_at_most(report: Report) -> None:
    """Unless the disk was full before; and what was lost is little of all."""
    usual = [each for each in report.lost if not each.full]
    assert usual
    assert max(each.seconds for each in usual) <= 62
    assert all(each.requests >= 0 for each in report.lost)
    assert report.written > 0.85 * report.ended


def test_p99_holds_outside_fault_windows(report: Report) -> None:
    """In every minute without a fault near, and in nine of ten of the others."""
    held, count = report.held(report.clean)
    assert count >= 3
    assert held == count
    touched = report.minutes()
    assert report.held(touched)[0] >= 0.9 * len(touched)


def test_energy_is_counted_where_it_can_be_known(report: Report) -> None:
    """Never more than was drawn, and most of it."""
    assert 0.65 * report.true_j <= report.written_j <= report.true_j


def test_memory_stays_flat(report: Report) -> None:
    """Between the first hour and the last, with some fifteen daemons begun and killed."""
    grown_bytes, grown = report.grown
    assert grown_bytes < 8e6
    assert grown < 5000


@pytest.mark.parametrize("kind", list(faults.SPANS_S))
def test_one_kind_of_fault_after_another(kind: str, tmp_path: Path) -> None:
    """Each alone, ten times in twenty minutes, leaves nothing broken."""
    report = lived(tmp_path, 1 / 3, drawn(SEED + 1, 1 / 3, (kind,), per_hour=30.0))
    assert report.broken == []
    assert len(report.hits) == 10


def test_a_day_without_faults_loses_nothing(tmp_path: Path) -> None:
    """Every request and all but the first second's joules are on the disk, and every minute holds."""
    report = lived(tmp_path, 0.5, [])
    assert report.broken == []
    assert report.told == {"start": 1, "phase": 1, "stop": 1}
    assert report.ended - report.written <= 8
    assert report.written_j >= 0.99 * report.true_j
    assert report.held(report.clean)[0] == len(report.p99_s)
