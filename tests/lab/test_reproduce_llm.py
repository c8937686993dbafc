"""Policies for language models on recorded requests: what each does, and that every request is accounted for."""

import json
from dataclasses import dataclass
from pathlib import Path

import pytest
from typer.testing import CliRunner

from polythrottle.cli.commands import app
from polythrottle.domain.errors import BadFile, InvalidInput
from polythrottle.lab.reproduce import language_models
from polythrottle.lab.reproduce.language_models import (
    Ahead,
    Bandit,
    Fixed,
    LowestSafe,
    Ours,
    Scene,
    TableAndLoop,
    recorded_calls,
)
from polythrottle.lab.reproduce.steered_server import Policy, ServerView, ttft_limit_s

SCENE = Scene("a100-sxm", "llama-3.1-8b")
CALLS = [(0.5 * number, 200 + 37 * (number % 20), 20 + 3 * (number % 9)) for number in range(60)]
POLICIES = (Fixed(1.41e9), Fixed(0.9e9), LowestSafe(), TableAndLoop(), Bandit(), Ours(), Ahead())


@pytest.mark.slow
@dataclass
class Late:
    """The lowest clock at first, and the highest from the second time it is asked."""

    delay_s: float
    period_s: float = 1e-3
    asked: int = 0

    def wish(self, view: ServerView) -> tuple[float, float]:
        """Return the clock."""
        if not self.asked:
            view.gpu_hz = view.clocks_hz[0]
        self.asked += 1
        return view.top_hz, float("inf")


@pytest.mark.parametrize("policy", POLICIES, ids=lambda policy: type(policy).__name__)
def test_every_policy_answers_every_request_with_all_its_tokens(policy: Policy) -> None:
    """Whatever the clock does, nobody's tokens are lost, and the joules are positive."""
    outcome = SCENE.serve(CALLS, policy)
    assert outcome.requests == 60
    assert outcome.tokens == sum(output for _, _, output in CALLS)
    assert outcome.energy_j > 30 * 80  # an idle engine's half minute
    assert 0 <= outcome.good <= 60


def test_a_policy_that_sees_ahead_saves_at_a_light_load_and_holds() -> None:
    """The clairvoyant draws less than the highest clock and keeps every request within its limits."""
    top, ahead = SCENE.serve(CALLS, Fixed(1.41e9)), SCENE.serve(CALLS, Ahead())
    assert ahead.energy_j < 0.9 * top.energy_j
    assert ahead.good == 60


def test_a_cap_lowers_the_power_of_prompts() -> None:
    """Under the lowest power limit the same requests take longer and fewer joules."""
    top, capped = SCENE.serve(CALLS, Fixed(1.41e9)), SCENE.serve(CALLS, Fixed(1.41e9, 200.0))
    assert capped.mean_s > top.mean_s
    assert capped.energy_j < top.energy_j


def test_long_prompts_have_more_time() -> None:
    """Beyond 4,096 tokens the first may take 2 s."""
    assert (ttft_limit_s(4096), ttft_limit_s(4097)) == (0.6, 2.0)


def test_a_trace_is_stretched_and_cut(tmp_path: Path) -> None:
    """So many minutes at a rate, and no request longer than the engine takes; one without tokens is refused."""
    trace = tmp_path / "a.csv"
    trace.write_text("arrival_s,prompt_tokens,output_tokens\n0,10,5\n1,90000,7\n2,30,5\n4,40,6\n")
    calls = recorded_calls(trace, 1.0, 0.1, 1000)
    assert [call[1:] for call in calls] == [(10, 5), (999, 1), (30, 5), (40, 6)]
    assert calls[1][0] == pytest.approx(10.0)
    trace.write_text("arrival_s\n0\n1\n")
    with pytest.raises(BadFile, match="has no columns prompt_tokens"):
        recorded_calls(trace, 1.0, 1.0, 1000)


def test_a_stretch_may_begin_later(tmp_path: Path) -> None:
    """Requests before it are left out, and time begins with it."""
    trace = tmp_path / "a.csv"
    trace.write_text("arrival_s,prompt_tokens,output_tokens\n" + "".join(f"{n},{n + 1},5\n" for n in range(241)))
    calls = recorded_calls(trace, 1.0, 1.0, 1000, 2.0)
    assert 59 <= len(calls) <= 61
    assert 0 <= calls[0][0] < 1
    assert calls[0][1] > 100


def test_a_clock_takes_effect_within_a_step() -> None:
    """A prompt's step of a tenth of a second, begun at a low clock, is shorter the sooner a high one comes."""
    waits_s = [SCENE.serve([(0.0, 1000, 2)], Late(delay_s)).ttft_p99_s for delay_s in (0.0, 0.05, 0.1, 10.0)]
    assert waits_s == sorted(waits_s)
    assert waits_s[1] < waits_s[2] < waits_s[3]


def test_ours_saves_more_than_the_fixed_clock_that_is_as_seldom_late() -> None:
    """On even requests it draws less than every fixed clock under which no more are late."""
    ours, top = SCENE.serve(CALLS, Ours()), SCENE.serve(CALLS, Fixed(1.41e9))
    assert ours.good >= top.good
    assert ours.energy_j < 0.85 * top.energy_j


def test_a_missing_trace_and_strange_minutes_are_one_line(tmp_path: Path) -> None:
    """Nothing is computed before the folder is seen to hold the traces."""
    runner = CliRunner()
    for words in (
        ["--data", str(tmp_path)],
        ["--data", str(tmp_path), "--minutes", "0"],
        ["--data", ".", "--from", "-1"],
    ):
        result = runner.invoke(app, ["reproduce", "llm", *words, "--json"])
        assert result.exit_code != 0
        assert "Traceback" not in result.output


@pytest.mark.slow
def test_the_command_prints_one_document(tmp_path: Path) -> None:
    """Every policy of every scene, simulated and called so."""
    rows = "".join(f"{0.4 * number},{100 + number % 50},{10 + number % 7}\n" for number in range(400))
    for name in ("conv", "code"):
        (tmp_path / f"azure_llm_2023_{name}_first_half_hour.csv.gz").write_bytes(_gzipped(rows))
    result = CliRunner().invoke(
        app, ["reproduce", "llm", "--data", str(tmp_path), "--minutes", "0.5", "--quick", "--json"]
    )
    found = json.loads(result.stdout)
    assert found["simulated"] is True
    assert len(found["scenes"]) == 4
    assert [row["policy"] for row in found["scenes"][0]["policies"]][-2:] == ["ours", "clairvoyant"]


@pytest.mark.slow
def test_a_stretch_without_requests_of_one_trace_loses_nothing_of_the_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its scenes say so; where no trace has any, that is one line."""
    monkeypatch.setattr(
        language_models, "compared", lambda scene, calls: {"default": scene.serve(calls, Fixed(1.41e9))}
    )
    steady = "".join(f"{0.4 * number},{100 + number % 50},{10 + number % 7}\n" for number in range(5000))
    burst = "".join(f"{time_s},100,10\n" for time_s in (*range(99), 40_000))
    rows = {"conv": steady, "code": burst}
    for name, text in rows.items():
        (tmp_path / f"azure_llm_2023_{name}_first_half_hour.csv.gz").write_bytes(_gzipped(text))
    words = ["reproduce", "llm", "--data", str(tmp_path), "--minutes", "0.5", "--from", "0.5", "--quick"]
    result = CliRunner().invoke(app, words)
    assert result.exit_code == 0, result.output
    assert result.stdout.count("no requests come in that stretch") == 2
    assert result.stdout.count("minutes held") == 2
    # At 9 times the rate the burst would be over before the first minute ends; nothing is said of more.
    assert "capacity was not reached" in " ".join(result.stdout.split())
    (tmp_path / "azure_llm_2023_conv_first_half_hour.csv.gz").write_bytes(_gzipped(burst))
    result = CliRunner().invoke(app, words)
    assert isinstance(result.exception, InvalidInput)
    assert "no requests come in these minutes of any trace" in str(result.exception)


def _gzipped(rows: str) -> bytes:
    import gzip

    return gzip.compress(("arrival_s,prompt_tokens,output_tokens\n" + rows).encode())
