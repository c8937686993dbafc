"""Every figure of the papers on transient training as one record."""

import json
from pathlib import Path
from typing import Any

import pytest

from polythrottle.cli.commands import run
from polythrottle.lab.reproduce.transient import records

KINDS = {"predicted", "fitted", "given", "derived", "recorded"}


@pytest.fixture(scope="module")
def found(transient: Path) -> list[dict[str, Any]]:
    """Return the records of the published tables."""
    from polythrottle.lab.reproduce.transient import document

    return records(document(transient))


@pytest.mark.slow
def test_each_record_says_whose_and_how_it_is_known(found: list[dict[str, Any]]) -> None:
    """Paper, figure, of what, unit and kind are there; an unknown figure has a reason, a known one none."""
    for one in found:
        assert set(one) == {"paper", "figure", "of", "unit", "published", "ours", "kind", "reason"}
        assert all(one[name] for name in ("paper", "figure", "of", "unit"))
        assert one["kind"] in KINDS
        assert (one["reason"] is not None) == (one["published"] is None or one["ours"] is None)


@pytest.mark.slow
def test_what_was_fitted_to_is_not_called_predicted(found: list[dict[str, Any]]) -> None:
    """Of each curve the odd numbers of workers were fitted to; single machines' times were taken over."""
    speeds = {one["of"]: one["kind"] for one in found if one["figure"] == "cluster speed"}
    assert speeds["3 K80, 1 PS, res32"] == "fitted"
    assert speeds["4 K80, 1 PS, res32"] == "predicted"
    times = {one["of"]: one["kind"] for one in found if one["figure"] == "table: time_s"}
    assert times["1 K80 on-demand"] == "given"
    assert times["8 K80"] == "predicted"


@pytest.mark.slow
def test_the_command_prints_them(transient: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The document of ``reproduce transient --json`` holds them beside its parts, and ICAC's saving among them."""
    assert run(["reproduce", "transient", "--data", str(transient), "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    (saving,) = (one for one in document["records"] if one["figure"] == "saving")
    assert (saving["published"], saving["ours"]) == (0.629, pytest.approx(0.629, rel=0.03))
    assert document["kind"] == "predicted"
