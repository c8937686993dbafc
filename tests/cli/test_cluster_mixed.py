"""``polythrottle cluster plan --mix``: several machine types in one job beside a plan."""

import json
from pathlib import Path

import pytest

from polythrottle.cli.commands import run

EXAMPLE = str(Path(__file__).resolve().parents[2] / "examples" / "cluster-gcp-2019.toml")
MIX = "1 v100-us-west1, 1 p100-europe-west1, 2 k80-us-west1"


def test_icacs_mixed_clusters_come_out_as_measured(capsys: pytest.CaptureFixture[str]) -> None:
    """64,000 steps of ResNet-32 on three mixed clusters took 2,001, 1,789 and 1,760 s: within 10 % of each speed."""
    measured = {
        MIX: 64_000 / 2001,
        "1 v100-us-west1, 2 p100-europe-west1, 1 k80-us-west1": 64_000 / 1789,
        "2 v100-us-west1, 1 p100-europe-west1, 1 k80-us-west1": 64_000 / 1760,
    }
    words = [word for text in measured for word in ("--mix", text)]
    assert run(["cluster", "plan", EXAMPLE, *words, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)["mixes"]
    for each, speed in zip(found, measured.values(), strict=True):
        assert each["kind"] == "simulated"
        assert each["steps_per_s_predicted"] == pytest.approx(speed, rel=0.1)
        assert each["time_s"]["p5"] <= each["time_s"]["mean"] <= each["time_s"]["p95"]
        assert each["reason"] is None


def test_people_get_lines_of_80_columns(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Each mix has its machines with their markets, what it takes, and how that is known."""
    monkeypatch.setenv("COLUMNS", "80")
    assert run(["cluster", "plan", EXAMPLE, "--mix", "2x k80-us-west1@on-demand, 1 v100-us-west1"]) == 0
    out = capsys.readouterr().out
    assert max(map(len, out.splitlines())) <= 80
    said = " ".join(out.split())
    assert "2 × k80-us-west1 on-demand + 1 × v100-us-west1 spot:" in said
    assert "simulated at default caps" in said


@pytest.mark.parametrize(
    ("text", "code", "said"),
    [
        ("", 2, "is no part of a mix; write for example"),
        ("two k80-us-west1", 2, "is no part of a mix"),
        ("1 k80-us-west1,", 2, "is no part of a mix"),
        ("1 k80", 3, "unknown machine 'k80'; did you mean k80-us-west1"),
        ("9 k80-us-west1", 2, "a mix takes 1 to 8 of k80-us-west1"),
        ("0 k80-us-west1", 2, "a mix takes 1 to 8 of k80-us-west1"),
    ],
)
def test_what_is_no_mix_is_one_line(capsys: pytest.CaptureFixture[str], text: str, code: int, said: str) -> None:
    """The line says what was expected, and nothing is printed before it."""
    assert run(["cluster", "plan", EXAMPLE, "--mix", text]) == code
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.count("\n") == 1
    assert said in captured.err
