"""Policies for language models on recorded requests: what each does, and that every request is accounted for."""

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from polythrottle.cli.commands import app
from polythrottle.domain.errors import BadFile
from polythrottle.lab.reproduce.language_models import (
    Ahead,
    Bandit,
    Fixed,
    LowestSafe,
    Ours,
    Policy,
    Scene,
    TableAndLoop,
    recorded_calls,
    ttft_limit_s,
)

SCENE = Scene("a100-sxm", "llama-3.1-8b")
CALLS = [(0.5 * number, 200 + 37 * (number % 20), 20 + 3 * (number % 9)) for number in range(60)]
POLICIES = (Fixed(1.41e9), Fixed(0.9e9), LowestSafe(), TableAndLoop(), Bandit(), Ours(), Ahead())


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


def test_a_missing_trace_and_strange_minutes_are_one_line(tmp_path: Path) -> None:
    """Nothing is computed before the folder is seen to hold the traces."""
    runner = CliRunner()
    for words in (["--data", str(tmp_path)], ["--data", str(tmp_path), "--minutes", "0"]):
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


def _gzipped(rows: str) -> bytes:
    import gzip

    return gzip.compress(("arrival_s,prompt_tokens,output_tokens\n" + rows).encode())
