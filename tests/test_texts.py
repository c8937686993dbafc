"""What ``measure`` prints for people, from measurements alone."""

import math
from dataclasses import replace
from pathlib import Path

import pytest
from builders import measured, study

from polythrottle.api.outcome import Tuning
from polythrottle.cli.render.documents import tune_document
from polythrottle.cli.render.text import _about, print_measurement, print_tuning, show_boundary
from polythrottle.domain.measurement import EnergyKind, Interval, Measurement
from polythrottle.domain.space import OperatingPoint
from polythrottle.tuning.setup import Setup


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


@pytest.mark.parametrize(
    ("half", "told"),
    [
        (0.999, "10 ms (10 µs to 19.99 ms)"),
        (1.0, "10 ms (0 s to 20 ms)"),
        (0.99, "10 ms ± 99 %"),
        (0.0996, "10 ms ± 10 %"),
        (0.0123, "10 ms ± 1.2 %"),
        (1e-9, "10 ms ± less than 0.0001 %"),
        (0.0, "10 ms ± 0 %"),
    ],
)
def test_an_interval_is_told_in_plain_figures(capsys: pytest.CaptureFixture[str], half: float, told: str) -> None:
    """In percent as people write it; one as wide as the value by its ends, of latency and of tokens per joule."""
    low, high = 0.01 * (1 - half), 0.01 * (1 + half)
    found = measured(intervals={"mean": Interval(low, high)})
    assert told in printed(capsys, found)
    tokens = {"tokens_per_j": Interval(1000 * low, 1000 * high)}
    out = printed(capsys, measured(extras={"tokens_per_j": 10.0}, intervals=tokens))
    assert "e-" not in out
    assert "e+" not in out


def test_many_items_a_second_are_told_in_plain_figures(capsys: pytest.CaptureFixture[str]) -> None:
    """Not as 1.58e+04."""
    out = printed(capsys, replace(measured(), throughput_per_s=15_803.2, offered_per_s=1234.56), "poisson:1235/s")
    assert "15,803 items/s" in out
    assert "1235/s offered, 15,803/s served" in out


def test_an_end_that_says_nothing_is_left_out(capsys: pytest.CaptureFixture[str]) -> None:
    """Every latency is at least 0 s."""
    assert "p99 12 ms (too few queries for more)" in printed(capsys, measured(intervals={"p99": Interval(0, math.inf)}))


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


def test_a_saving_within_the_noise_is_said_to_be_none(capsys: pytest.CaptureFixture[str]) -> None:
    """In plain words, with the command that tells default and profile apart, and where the profile went."""
    found = study(energies=(2.0, 1.98), latencies=(0.01, 0.01))
    trials = tuple(
        replace(
            trial, measurement=replace(seen, intervals={"energy": Interval(seen.energy_j - 0.01, seen.energy_j + 0.01)})
        )
        for trial in found.trials
        if (seen := trial.measurement) is not None
    )
    tuning = Tuning(replace(found, trials=trials), None, None, Path("p.toml"), Path("j.jsonl"), None, "all")
    print_tuning(tuning)
    text = " ".join(capsys.readouterr().out.split())
    assert "no saving found beyond the noise: the default may do as well as the profile" in text
    assert "polythrottle measure default p.toml" in text
    assert "profile p.toml" in text
    print_tuning(replace(tuning, study=study(energies=(2.0, 1.0), latencies=(0.01, 0.01))))
    assert "beyond the noise" not in capsys.readouterr().out
    print_tuning(replace(tuning, study=study(energies=(2.0, 3.0), latencies=(0.01, 0.01))))
    assert "saving none: the default is the best that was tried, and stays" in " ".join(capsys.readouterr().out.split())
    assert tune_document(tuning)["within_noise"] is True


def test_the_rates_of_a_ladder_are_told_in_plain_figures() -> None:
    """In two, or whole ones where there are more."""
    assert [_about(rate_per_s) for rate_per_s in (0.0512, 7.63, 99.0, 120.4, 12_345.6)] == [
        *("0.051", "7.6", "99", "120", "12,346"),
    ]
