"""What ``measure`` prints for people, from measurements alone."""

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from builders import measured, study

from polythrottle.api.tuning_result import Tuning
from polythrottle.cli.render import documents
from polythrottle.cli.render import text as texts
from polythrottle.cli.render.documents import tune_document
from polythrottle.cli.render.text import _about, print_measurement, print_tuning, show_boundary
from polythrottle.domain.measurement import EnergyKind, Goodput, Interval, Latency, Measurement
from polythrottle.domain.problem import Constraint
from polythrottle.domain.space import OperatingPoint
from polythrottle.tuning.setup import Setup
from polythrottle.tuning.sweep import Swept


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


def window(energy_j: float = 2.0, kind: EnergyKind = EnergyKind.SIMULATED, **given: Any) -> Measurement:
    """Return a measurement of queries of 10 ms."""
    return Measurement(Latency(0.01, p99_s=0.02), energy_j, 100.0, 200.0, kind, "a test", **given)


def test_goodput_is_told_of_all_and_of_each_class() -> None:
    """How many requests held their limits, joules per good one where they are joules, and the times of a class."""
    times = {f"{name}_p99 for prompts<=2048": 0.2 for name in ("ttft", "tpot")} | {"mean for prompts<=2048": 1.5}
    goodput = Goodput(1200, 900, 12.5, 40.0, {"prompts<=2048": (1000, 800), "prompts>2048": (0, 0)})
    told = texts._goodput(window(goodput=goodput, extras=times))
    assert told["goodput"] == "75 % of 1,200 held every limit of theirs, 12.5 good/s, 40 J per good one, simulated"
    assert told["prompts<=2048"] == "80 % of 1,000, ttft p99 200 ms, tpot p99 200 ms, mean 1.5 s end to end"
    assert told["prompts>2048"] == "none came"
    assert texts._goodput(window()) == {}
    assert (
        "per good one" not in texts._goodput(window(kind=EnergyKind.RELATIVE, goodput=goodput, extras=times))["goodput"]
    )
    document = documents._goodput(goodput)
    assert (document["good"], document["share"], document["good_per_s"], document["energy_per_good_j"]) == (
        900, 0.75, 12.5, 40.0
    )  # fmt: skip
    classes = documents._classes(window(goodput=goodput, extras=times))
    assert classes["prompts<=2048"] == {
        "ttft_p99_s": 0.2,
        "tpot_p99_s": 0.2,
        "mean_s": 1.5,
        "requests": 1000,
        "good": 800,
    }
    assert classes["prompts>2048"] == {"requests": 0, "good": 0}


def test_a_limit_stands_beside_what_was_measured() -> None:
    """It is broken beyond it, or where the queue grew; what was not measured neither holds nor breaks."""
    limit = Constraint.parse("p99<=25ms")
    assert texts._stands(limit, window()) == "20 ms, limit 25 ms"
    assert documents._limit(limit, window())["holds"] is True
    assert texts._stands(Constraint.parse("p99<=15ms"), window()).endswith("limit 15 ms  broken")
    assert documents._limit(Constraint.parse("p99<=15ms"), window())["holds"] is False
    assert texts._stands(limit, window(backlog_per_s=3.0)).endswith("broken")
    assert documents._limit(limit, window(backlog_per_s=3.0))["holds"] is False
    ttft = Constraint.parse("ttft_p99<=1s")
    assert texts._stands(ttft, window()).startswith("not measured")
    assert documents._limit(ttft, window()) == {
        "text": str(ttft), "metric": "ttft_p99", "limit": 1.0, "value": None, "holds": None
    }  # fmt: skip


def test_cuts_energy_and_savings_are_told_with_their_kind() -> None:
    """Simulated joules are called so; what a point saves stands with its interval where there is one."""
    assert texts._cuts(window()) == {}
    assert texts._cuts(window(cuts_per_s=2.0))["clock cuts"].startswith("2 a second: brief over-current events")
    assert (
        "2 a second, for about 1.50% of the time:" in texts._cuts(window(cuts_per_s=2.0, cut_share=0.015))["clock cuts"]
    )
    assert texts.show_energy(window()) == "2 J simulated"
    assert texts.show_energy(window(kind=EnergyKind.MEASURED)) == "2 J"
    before = window()
    assert texts._saved(before, before) == "–"
    assert texts._saved(before, None) == "–"
    assert texts._saved(window(1.5), before) == "25.0%"
    sure, default = (window(each, intervals={"energy": Interval(each - 0.01, each + 0.01)}) for each in (1.5, 2.0))
    saving = texts.saving_interval(sure, default)
    assert saving is not None
    assert texts._saved(sure, default) == f"25.0% ({100 * saving.low:.0f} to {100 * saving.high:.0f})"


def test_a_sweep_says_what_is_new_and_what_failed(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """What was kept from before and what failed are told where there are any, at most five failures by name."""
    whole = Swept(tmp_path / "t.csv", 10, 10, 0, (), EnergyKind.SIMULATED)
    texts.print_sweep(whole)
    shown = capsys.readouterr().out
    assert shown.splitlines()[0] == "10 points measured (simulated energy)"
    assert f"table  {tmp_path / 't.csv'}" in shown
    assert "did not serve" not in shown
    failed = tuple((OperatingPoint({"batch_size": size}), "out of memory") for size in range(1, 8))
    part = Swept(tmp_path / "t.csv", 20, 3, 10, failed, EnergyKind.MEASURED, overloaded=2)
    texts.print_sweep(part)
    shown = capsys.readouterr().out
    assert shown.splitlines()[0] == "3 points measured, 10 kept from before, 7 failed (measured energy)"
    assert shown.count("failed: batch_size=") == 5
    assert "2 of 20 did not serve what came" in shown
    document = documents.sweep_document(part)
    assert document["failed"][0] == {"point": {"batch_size": 1}, "failure": "out of memory"}
    assert (document["measured"], document["kept"], document["overloaded"], document["simulated"]) == (3, 10, 2, False)
    assert documents.sweep_document(whole)["simulated"] is True
