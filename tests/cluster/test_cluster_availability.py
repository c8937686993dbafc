"""When spot could be had, from two formats of records."""

import json
from pathlib import Path

import pytest

from polythrottle.cluster.plan.deadline import read_availability
from polythrottle.domain.errors import BadFile


def test_a_recorded_cluster_says_when_enough_were_there(tmp_path: Path) -> None:
    """Three machines were there for the first of three hours, one for all."""
    path = tmp_path / "trace.csv"
    path.write_text("time_s,n_nodes\n0,3\n3600,2\n7200,1\n10800,1\n")
    assert read_availability(path, 3).share == pytest.approx(1 / 3)
    assert read_availability(path, 1).share == 1


def test_a_trace_of_skypilots_is_read(tmp_path: Path) -> None:
    """Gaps of 600 s with 0, 1, 1, 0 are half a time with spot."""
    path = tmp_path / "trace.json"
    path.write_text(json.dumps({"metadata": {"gap_seconds": 600}, "data": [0, 1, 1, 0]}))
    found = read_availability(path)
    assert found.share == 0.5
    assert [found.at(time_s) for time_s in (0, 600, 1799, 1800)] == [False, True, True, False]


@pytest.mark.parametrize(
    "text",
    [
        *(
            '{"metadata": {"gap_seconds": 600}, "data": [1, 0.5]}',
            '{"metadata": {"gap_seconds": 600}, "data": [1, -1]}',
        ),
        *(
            '{"metadata": {"gap_seconds": 9e8}, "data": [1, 0, 1, 0, 1]}',
            '{"metadata": {"gap_seconds": 1}, "data": ["1"]}',
        ),
        "",
        "[]",
        '{"data": [1]}',
        '{"metadata": {"gap_seconds": 0}, "data": [1]}',
        '{"metadata": 3, "data": "ab"}',
    ],
)
def test_other_json_is_refused(tmp_path: Path, text: str) -> None:
    """Whatever else a JSON file holds is a bad file, said in one line."""
    path = tmp_path / "trace.json"
    path.write_text(text)
    with pytest.raises(BadFile, match="no trace of availability"):
        read_availability(path)
    with pytest.raises(BadFile, match="cannot read"):
        read_availability(tmp_path / "absent.json")


def test_a_record_of_ages_is_refused(tmp_path: Path) -> None:
    """A table that lasts more than a century is no record of a cluster."""
    path = tmp_path / "trace.csv"
    path.write_text("time_s,n_nodes\n0,1\n1e20,2\n")
    with pytest.raises(BadFile, match="more than a century"):
        read_availability(path)
