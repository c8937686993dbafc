"""What ``measure`` prints for people, from measurements alone."""

from dataclasses import replace

import pytest
from builders import measured

from polythrottle.cli.texts import print_measurement, show_boundary
from polythrottle.measurement import EnergyKind, Interval, Measurement
from polythrottle.setup import Setup
from polythrottle.space import OperatingPoint


def printed(capsys: pytest.CaptureFixture[str], found: Measurement, arrivals: str | None = None) -> str:
    """Return what is printed of a measurement, its lines joined; none is wider than a terminal."""
    print_measurement((Setup("sim:test", "model", arrivals=arrivals), OperatingPoint({}), found))
    out = capsys.readouterr().out
    assert all(len(line) <= 80 for line in out.splitlines())
    return " ".join(out.split())


@pytest.fixture(autouse=True)
def narrow(monkeypatch: pytest.MonkeyPatch) -> None:
    """Stand before a terminal of 80 columns."""
    monkeypatch.setenv("COLUMNS", "80")


def test_how_joules_came_about_is_said_once() -> None:
    """A boundary that begins with the word does not make it twice."""
    estimated = replace(measured(), energy_kind=EnergyKind.ESTIMATED)
    assert show_boundary(replace(estimated, boundary="estimated: 8 W a core")) == "estimated: 8 W a core"
    assert show_boundary(replace(estimated, boundary="the package")) == "estimated: the package"
    assert show_boundary(replace(estimated, boundary="")) == "estimated"


def test_tokens_are_printed_where_they_are_known(capsys: pytest.CaptureFixture[str]) -> None:
    """Times to the first token and per token, and tokens per joule with what kind of joules; else no such line."""
    extras = {"ttft_p50": 0.1, "ttft_p99": 0.2, "tpot_p50": 0.01, "tpot_p99": 0.02, "tokens_per_j": 12.5}
    known = {"tokens_per_j": Interval(12.0, 13.0), "ttft_p50": Interval(0.09, 0.11)}
    out = printed(capsys, measured(extras=extras, intervals=known))
    assert "ttft p50 100 ms ± 10 %, p99 200 ms" in out
    assert "tpot p50 10 ms, p99 20 ms" in out
    assert "tokens 12.5 per joule ± 4 %, simulated" in out
    assert not {"ttft", "tpot", "tokens"} & set(printed(capsys, measured()).split())


def test_offered_stands_beside_served(capsys: pytest.CaptureFixture[str]) -> None:
    """With the arrivals, that the queue grows if it does, and what the sender was like where that is known."""
    out = printed(capsys, measured(offered_per_s=90.0, late_p99_s=1e-6), "poisson:90/s")
    assert "load poisson:90/s: 90/s offered, 100/s served window" not in out
    assert "load poisson:90/s: 90/s offered, 100/s served" in out
    assert "grows" not in out
    assert "sent within" not in out
    behind = measured(offered_per_s=200.0, backlog_per_s=100.0, late_p99_s=2e-3, sender_s=0.5)
    behind = replace(behind, intervals={"p99": Interval(0.011, float("inf"))})
    out = printed(capsys, behind, "poisson:200/s")
    assert "200/s offered, 100/s served; the queue grows" in out
    assert "99 % sent within 2 ms of their moment; the sender took 500 ms of processor time" in out
    assert "p99 12 ms (at least 11 ms; it grows)" in out
    assert "load" not in printed(capsys, measured()).split()


def test_idle_power_above_the_window_is_said_to_split_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    """With how much it was."""
    out = printed(capsys, measured(idle_power_w=120.0))
    assert "cannot be told apart: idle power, 120 W, was not below that of the window" in out


def test_a_recorded_load_is_said_to_be_one(capsys: pytest.CaptureFixture[str]) -> None:
    """Nobody gave arrivals to a table that was swept under some."""
    assert "load as recorded: 60/s offered, 100/s served" in printed(capsys, measured(offered_per_s=60.0))


def test_energy_without_an_interval_says_why(capsys: pytest.CaptureFixture[str]) -> None:
    """A window that was too short for its meter, and how many queries to ask for; a table was never looked at."""
    short = replace(measured(), window_s=0.25, latency=replace(measured().latency, queries=500))
    assert "no ± 250 ms are too short for the meter to tell it; give --queries 2000" in printed(capsys, short)
    known = replace(short, intervals={"energy": Interval(short.energy_j * 0.9, short.energy_j * 1.1)})
    assert "too short" not in printed(capsys, known)
    assert "too short" not in printed(capsys, replace(short, window_s=None))
