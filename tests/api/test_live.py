from pathlib import Path

import pytest
from builders import study

from polythrottle.api.progress import LiveStudy, folded
from polythrottle.domain.study import Trial


def test_a_long_line_is_folded_between_words() -> None:
    """What follows is indented; a word that is longer than the line, such as a path, stays whole."""
    path = "/" + "x" * 50
    text = folded(f"one two three {path} four", 20)
    assert text.splitlines() == ["one two three", f"    {path}", "    four"]
    assert folded("short", 20) == "short"


def test_a_trial_is_folded_between_its_knobs(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A level stays beside its knob, in no more columns than there are."""
    monkeypatch.setenv("COLUMNS", "40")
    whole = study("mean<=5ms", energies=(1.0,), latencies=(0.01,))
    with LiveStudy() as live:
        live.opened(whole, Path("a.jsonl"), 3)
        live.changed(whole)
    lines = capsys.readouterr().err.splitlines()
    assert max(map(len, lines)) <= 40
    assert any("gpu_max_mhz=1200" in line for line in lines)
    assert "breaks the SLO" in " ".join(" ".join(lines).split())


def test_a_failed_trial_says_why(capsys: pytest.CaptureFixture[str]) -> None:
    """On the line of its number."""
    whole = study("mean<=5ms", energies=(1.0,), latencies=(0.01,))
    failed = whole.with_trial(Trial(1, whole.problem.space[0], failure="it fell over"))
    with LiveStudy() as live:
        live.changed(failed)
    assert capsys.readouterr().err.startswith("trial 1: failed: it fell over")
