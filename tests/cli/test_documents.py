"""What ``measure`` and ``tune`` print for programs: nothing that is unknown is left out, and each has a reason."""

import json
from typing import Any

import pytest
from builders import measured

from polythrottle.cli.commands import run
from polythrottle.cli.render.documents import measure_document
from polythrottle.domain.measurement import Interval
from polythrottle.domain.space import OperatingPoint
from polythrottle.tuning.setup import Setup

ORIN = ("-d", "sim:jetson-agx-orin", "-w", "resnet50")


def document(capsys: pytest.CaptureFixture[str], *words: str) -> dict[str, Any]:
    """Return the document of a command, and check that it is one."""
    assert run([*words, "--json"]) == 0
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


def test_a_measurement_names_its_load_and_the_precision_asked(capsys: pytest.CaptureFixture[str]) -> None:
    """Arrivals, what they offer beside what was served, and what the sender was like."""
    found = document(capsys, "measure", *ORIN, "--arrivals", "poisson:30/s", "--queries", "100", "--precision", "5%")
    assert (found["arrivals"], found["offered_per_s"], found["precision"]) == ("poisson:30/s", 30.0, 0.05)
    assert found["backlog_per_s"] is None
    assert found["throughput_per_s"] == pytest.approx(30, rel=0.4)
    assert found["late_p99_s"] is not None
    closed = document(capsys, "measure", *ORIN, "--queries", "60", "--seconds", "0.1")
    assert (closed["arrivals"], closed["offered_per_s"], closed["precision"]) == ("closed", None, None)


def test_what_is_unknown_is_null_with_a_reason() -> None:
    """Intervals of what was measured are there whether known or not; so are temperature and tokens."""
    bare = measure_document((Setup("sim:test", "model"), OperatingPoint({}), measured()))
    assert bare["intervals"] == dict.fromkeys(["energy", "mean", "p50", "p95", "p99", "power", "throughput"])
    assert (bare["temperature_c"], bare["ttft_p99"], bare["idle_power_w"]) == (None, None, None)
    assert set(bare["latency_s"]) == {"mean", "p50", "p90", "p95", "p99"}
    assert set(bare["unknown"]) == {"temperature_c", "idle_power_w", "intervals"}
    known = measured(temperature_c=40.0, idle_power_w=1.0, intervals={"energy": Interval(0.5, float("inf"))})
    whole = measure_document((Setup("sim:test", "model"), OperatingPoint({}), known))
    assert whole["intervals"]["energy"] == [0.5, None]
    assert whole["unknown"] == {}


@pytest.mark.slow
def test_a_search_names_its_load_and_the_precision_asked(capsys: pytest.CaptureFixture[str]) -> None:
    """In its own document, and for each trial what was offered and served."""
    words = ("--trials", "2", "--no-presets", "--precision", "5%", "--arrivals", "poisson:20/s")
    found = document(capsys, "tune", *ORIN, *words)
    assert (found["arrivals"], found["offered_per_s"], found["precision"]) == ("poisson:20/s", 20.0, 0.05)
    first = found["trials"][0]
    assert first["offered_per_s"] == 20.0
    assert first["throughput_per_s"] > 0
    assert first["intervals"]["energy"] is not None


def test_a_search_that_multiplies_a_growing_latency_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    """One line that names both rates and what to do."""
    assert run(["tune", *ORIN, "--slo", "p99<=1.2x", "--arrivals", "poisson:5000/s", "--no-presets"]) != 0
    shown = capsys.readouterr().err.strip().splitlines()[-1]
    assert "of 5000/s, so the queue grows and p99<=1.2x multiplies nothing; let fewer come" in shown


def test_a_device_settles_and_cools_as_asked(capsys: pytest.CaptureFixture[str]) -> None:
    """More queries go before the window, and a temperature that is never reached is one line."""
    usual = document(capsys, "measure", *ORIN, "--queries", "60")
    settled = document(capsys, "measure", *ORIN, "--queries", "60", "--settle", "3", "--cool", "60")
    assert settled["requests"] > usual["requests"] + 100
    assert run(["measure", *ORIN, "--cool", "5"]) != 0
    assert "does not cool down to 5.0 °C" in capsys.readouterr().err
