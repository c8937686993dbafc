"""What ``cluster predict`` prints of predictions beside measurements."""

from typing import Any

import pytest

from polythrottle.cli.cluster.commands import _show
from polythrottle.cluster.predict.accuracy import OURS


def record(model: str = OURS, measured_s: float | None = 0.1, predicted_s: float | None = 0.105, **given: Any) -> Any:
    """Return one prediction."""
    whole = {"gpu": "K80", "network": "res32", "low_s": 0.09, "high_s": 0.12, "why": ""}
    return {**whole, "model": model, "measured_s": measured_s, "predicted_s": predicted_s, **given}


def shown(capsys: pytest.CaptureFixture[str], *records: Any, **given: Any) -> list[str]:
    """Return the lines that are printed, in single spaces."""
    whole = {
        "mape": {"K80": {OURS: 0.05, "svr-rbf": None}},
        "mape_published_protocol": None,
        "covered": None,
        "notes": ["few networks"],
        "seen": [],
    }
    _show({"records": records, "protocol": "leave-one-network-out", **whole, **given})
    return [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()]


def test_our_predictions_stand_beside_what_was_measured(capsys: pytest.CaptureFixture[str]) -> None:
    """Those of rivals only count among the errors; what is unknown is blank."""
    lines = shown(
        capsys, record(), record("svr-rbf", network="rival"), record(network="huge", predicted_s=0.9),
        record(network="new", measured_s=None, low_s=None), record(network="none", predicted_s=None, why="no such GPU"),
    )  # fmt: skip
    assert "K80 res32 100 ms 105 ms +5.0 % 90 ms to 120 ms" in lines
    assert not any("rival" in line for line in lines)
    assert any(line.startswith("K80 huge 100 ms 900 ms ") for line in lines)
    assert "K80 new 105 ms" in lines
    assert "K80 none 100 ms 90 ms to 120 ms" in lines
    assert any("no such GPU" in line for line in lines)
    assert any(line.startswith("K80 leave-one-network-out 5.0 % unknown") for line in lines)
    assert any("from the other networks" in line for line in lines)
    assert not any("of the measurements lie within" in line for line in lines)


def test_a_second_table_and_a_leaking_protocol_are_called_so(capsys: pytest.CaptureFixture[str]) -> None:
    """What stands in both files was not unseen; the share within the interval is told where it is known."""
    lines = shown(
        capsys, record(), protocol="second file", covered=0.93, seen=["res32"],
        mape_published_protocol={"K80": {OURS: 0.03}},
    )  # fmt: skip
    assert any("from the other table" in line for line in lines)
    assert "93 % of the measurements lie within" in lines
    assert "in both files, so not unseen: res32" in lines
    assert "published (leaks) 3.0 % unknown" in lines
