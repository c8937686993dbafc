"""The words of ``cluster train`` and ``cluster status``, and what wrong ones get."""

import json
from pathlib import Path

import pytest

from polythrottle.cli.commands import run
from polythrottle.cluster.train.account import Journal
from polythrottle.cluster.train.running import job_folder


@pytest.fixture
def script(tmp_path: Path) -> str:
    """Return a script that is never run."""
    path = tmp_path / "script.py"
    path.write_text("")
    return str(path)


@pytest.mark.parametrize(
    ("words", "code", "text"),
    [
        ([], 2, "give a training script"),
        (["nothing.py"], 2, "there is no script"),
        (["SCRIPT", "--engine", "torchrn"], 3, "did you mean torchrun"),
        (["SCRIPT", "--nodes", "two"], 2, "least:most"),
        (["SCRIPT", "--nodes", "0"], 2, "least"),
        (["SCRIPT", "--rule", "sqrt"], 2, "fixed or icac"),
        (["SCRIPT", "--overhead", "300%"], 2, "(0, 1]"),
        (["SCRIPT", "--overhead", "much"], 2, "share"),
        (["SCRIPT", "--losses", "-1"], 2, "at least 0"),
        (["SCRIPT", "--beat", "0"], 2, "beat"),
        (["SCRIPT", "--job", "../x"], 2, "name"),
        (["--serve", "0.0.0.0:0", "--job", "x"], 2, "--token-file"),
        (["--serve", "127.0.0.1", "--job", "x"], 2, "HOST:PORT"),
        (["--serve", "127.0.0.1:0", "--join", "127.0.0.1:1"], 2, "exclude each other"),
        (["--serve", "127.0.0.1:0", "--job", "x", "--store", "nope://x"], 2, "cannot be opened"),
        (["--serve", "127.0.0.1:0", "--job", "x", "--token-file", "missing"], 4, "cannot be read"),
        (["--join", "127.0.0.1:1", "SCRIPT", "--notice", "gcp"], 3, "source of notices"),
        (["--join", "nowhere", "SCRIPT"], 2, "HOST:PORT"),
    ],
)
def test_wrong_words_are_one_line_and_the_code_of_their_class(
    words: list[str], code: int, text: str, script: str, capfd: pytest.CaptureFixture[str]
) -> None:
    """Nothing is started."""
    assert run(["cluster", "train", *(script if word == "SCRIPT" else word for word in words)]) == code
    said = capfd.readouterr().err.strip()
    assert text in said
    assert len(said.splitlines()) == 1


def test_a_finished_job_is_not_begun_again(capfd: pytest.CaptureFixture[str]) -> None:
    """Its name is refused, with what to do."""
    journal = Journal(job_folder("done"))
    journal.append({"event": "finished", "generation": 1, "at_s": 1.0})
    journal.close()
    assert run(["cluster", "train", "--serve", "127.0.0.1:0", "--job", "done"]) == 2
    assert "has finished" in capfd.readouterr().err


def written(name: str) -> Path:
    """Write the events of a job whose controller is gone, and return its folder."""
    journal = Journal(job_folder(name))
    for record in (
        {"event": "formed", "generation": 1, "members": ["a", "b"], "chief": "a", "at_s": 0.5},
        {"event": "first step", "generation": 1, "step": 1, "workers": 2, "at_s": 2.0},
        {"event": "lost", "generation": 1, "node": "b", "reason": "silent", "beaten_s": 3.0, "at_s": 6.0},
        {"event": "formed", "generation": 2, "members": ["a"], "chief": "a", "at_s": 6.5},
        {"event": "checkpoint", "generation": 2, "step": 9, "bytes": 10**8, "stall_s": 0.1, "share": 0.01, "at_s": 9.0},
        {"event": "first step", "generation": 2, "step": 5, "workers": 1, "at_s": 9.5},
    ):
        journal.append(record)
    journal.close()
    return job_folder(name)


def test_status_shows_generation_members_step_checkpoints_and_losses(capfd: pytest.CaptureFixture[str]) -> None:
    """The newest job if none is named; every figure says how it is known; 80 columns at most."""
    written("job")
    assert run(["cluster", "status", "--json"]) == 0
    found = json.loads(capfd.readouterr().out)
    assert (found["generation"], found["members"], found["step"], found["losses"]) == (2, ["a"], 9, 1)
    assert (found["phase"], found["recoveries_s"]) == ("unknown", [6.5])
    assert run(["cluster", "status", "job"]) == 0
    shown = capfd.readouterr().out.splitlines()
    assert max(map(len, shown)) <= 80
    assert any("100 MB" in line for line in shown)
    assert any("measured" in line for line in shown)


@pytest.mark.parametrize(("words", "code"), [([], 3), (["nothing"], 4), (["./nothing"], 4)])
def test_status_of_no_job_is_one_line(words: list[str], code: int, capfd: pytest.CaptureFixture[str]) -> None:
    """None at all, or none of the name."""
    assert run(["cluster", "status", *words]) == code
    assert len(capfd.readouterr().err.strip().splitlines()) == 1
