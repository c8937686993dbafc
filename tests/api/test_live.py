from pathlib import Path

import pytest
from builders import study

from polythrottle.api.progress import LiveStudy, folded, resume_with
from polythrottle.domain.errors import StorageError
from polythrottle.domain.study import Study, Trial


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


def test_how_to_go_on_names_what_a_journal_elsewhere_may_not_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A profile in another folder and a tree of files: without them the command that is told would be refused."""
    monkeypatch.setenv("POLYTHROTTLE_STATE_DIR", str(tmp_path / "state"))
    journal = tmp_path / "here" / "j.jsonl"
    begun = f"resume with: polythrottle tune --resume {journal}"
    assert resume_with(journal, "auto", None) == begun
    assert resume_with(journal, "sim:jetson-nano", journal.with_name("p.toml")) == begun
    assert resume_with(journal, "jetson?root=/tree", tmp_path / "p.toml") == (
        f"{begun} --device 'jetson?root=/tree' --out {tmp_path / 'p.toml'}"
    )
    own = tmp_path / "state" / "j.jsonl"
    assert resume_with(own, "jetson?root=/tree", tmp_path / "p.toml").endswith(f"--resume {own}")


def test_a_full_disk_ends_with_how_to_go_on(capsys: pytest.CaptureFixture[str]) -> None:
    """Once there is room again; without a trial there is nothing to go on with."""
    whole = study("mean<=5ms", energies=(1.0,), latencies=(0.01,))
    full = StorageError("a.jsonl cannot be written: No space left on device")

    def ended(*changes: Study) -> None:
        with LiveStudy() as live:
            live.opened(whole, Path("a.jsonl"), 3)
            for change in changes:
                live.changed(change)
            raise full

    with pytest.raises(StorageError):
        ended()
    assert "resume with" not in capsys.readouterr().err
    with pytest.raises(StorageError):
        ended(whole)
    assert capsys.readouterr().err.endswith("resume with: polythrottle tune --resume a.jsonl\n")
