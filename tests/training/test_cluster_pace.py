"""How fast a node's workers are, and how its agent hears of it."""

from pathlib import Path

import pytest

from polythrottle.domain.errors import InvalidInput
from polythrottle.training.elastic.worker.process import (
    Pace,
    Tally,
    pace_of,
    read_pace,
    write_pace,
)

TALLY = Tally(10, 2.0, 0.5, 0.25)


def pace(generation: int = 1, tally: Tally = TALLY) -> Pace:
    """Return a worker's pace."""
    return Pace(generation, "Net-1234-b8", 8, 16, 90, tally, Tally(4, 0.8, 0.2, 0.1))


def test_tallies_add_up_and_are_taken_apart() -> None:
    """What has come since an earlier look is what was added; a counter that began anew gives nothing negative."""
    both = TALLY.plus(Tally(5, 1.0, 0.1, 0.0))
    assert both == Tally(15, 3.0, 0.6, 0.25)
    assert both.since(TALLY).steps == 5
    assert both.since(TALLY).peers_s == pytest.approx(0.1)
    assert TALLY.since(both) == Tally(0, 0.0, 0.0, 0.0)
    assert TALLY.own_s == 1.5


def test_a_pace_survives_its_file(tmp_path: Path) -> None:
    """What a worker writes its agent reads; before anything was written there is none."""
    assert read_pace(tmp_path) is None
    write_pace(tmp_path, 0, pace())
    assert read_pace(tmp_path) == pace()


def test_a_node_is_as_fast_as_its_slowest_worker_in_the_newest_generation(tmp_path: Path) -> None:
    """Files of a former generation's ranks and torn ones do not count."""
    slow = Tally(10, 2.0, 0.1, 0.0)
    write_pace(tmp_path, 0, pace(2))
    write_pace(tmp_path, 1, pace(2, slow))
    write_pace(tmp_path, 2, pace(1, Tally(1, 99.0)))
    (tmp_path / "3.json").write_text("{")
    (tmp_path / "4.json").write_text("[]")
    found = read_pace(tmp_path)
    assert found is not None
    assert (found.generation, found.tally) == (2, slow)


def test_a_folder_that_is_gone_stops_nobody(tmp_path: Path) -> None:
    """Training goes on without."""
    write_pace(tmp_path / "gone", 0, pace())
    assert read_pace(tmp_path / "gone") is None


@pytest.mark.parametrize(
    "wrong",
    [{"generation": "x"}, {"tally": {"steps": -1}}, {"tally": 3}, {"cold": {"step_s": float("nan")}}, {"share": None}],
)
def test_a_document_that_is_no_pace_is_refused(wrong: dict[str, object]) -> None:
    """With one line that says so."""
    assert pace_of(pace().document()) == pace()
    with pytest.raises(InvalidInput):
        pace_of(pace().document() | wrong)
