"""What came of a run: shares and percentiles with intervals, unknown told as unknown."""

import json

import pytest

from polythrottle.training.beside.serving_loop import Result, Training, wilson

_TRAINING = Training(samples=64, steps=2, epoch=0, epochs=3, finished=False)


def _result(latencies_s: tuple[float, ...], late: int = 0, dropped: int = 0) -> Result:
    requests = len(latencies_s) + dropped
    ran = ("a on b", False, "interleave", "poisson:8/s", 0.1, 10.0)
    return Result(*ran, requests, late, dropped, latencies_s, _TRAINING, None, "measured", "all rails")


def test_dropped_requests_count_as_late() -> None:
    """A policy that gives requests up does not hold the limit because those it answered were fast."""
    fast = _result((0.01,) * 90, late=10, dropped=10)
    assert fast.late_share == pytest.approx(0.1)
    assert fast.held is False
    assert _result((0.01,) * 100, late=1).held is True


def test_what_is_unknown_is_null_and_never_zero() -> None:
    """Without requests there are neither shares nor percentiles, without joules no energy; it is JSON all the same."""
    found = json.loads(json.dumps(_result(()).document(), allow_nan=False))
    assert (found["late_share"], found["slo_held"], found["energy_j"]) == (None, None, None)
    assert found["latency_s"] == {"mean": None}
    few = _result((0.01, 0.02, 0.03)).document()["latency_s"]
    assert few["p99"] == 0.03
    assert few["p99_interval"][1] is None


def test_the_interval_of_a_share_holds_it_and_narrows() -> None:
    """It never leaves 0..1, and ten times the cases make it narrower (Wilson's table: 0 of 10 gives 0 to 27.8 %)."""
    none = wilson(0, 10)
    assert [wilson(0, cases).low for cases in range(1, 300)] == [0.0] * 299
    assert [wilson(cases, cases).high for cases in range(1, 300)] == [1.0] * 299
    assert none.high == pytest.approx(0.2775, abs=1e-3)
    assert 0.1 in wilson(10, 100)
    assert wilson(100, 1000).half < wilson(10, 100).half
