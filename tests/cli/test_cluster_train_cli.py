"""The words of ``cluster train`` and ``cluster status``, and what wrong ones get."""

import json
from pathlib import Path
from types import SimpleNamespace

import pytest

from polythrottle.cli.cluster.status import print_event, print_status
from polythrottle.cli.cluster.train import _outcome, _slurms_name
from polythrottle.cli.commands import run
from polythrottle.domain.errors import ClaimFailed
from polythrottle.training.elastic.events import EventLog
from polythrottle.training.elastic.job_control import ControllerOptions, job_folder, status_of


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
        *((["SCRIPT", f"--nodes={text}"], 2, "takes 1 to 10000 nodes") for text in ("0", "0:2", "3:2", "-1", "9" * 30)),
        (["SCRIPT", "--workers", "0"], 2, "--workers takes 1 to 1024"),
        (["SCRIPT", "--workers", "999999999"], 2, "--workers takes 1 to 1024"),
        (["SCRIPT", "--replace", "nan"], 2, "below 0 for never"),
        (["."], 2, "it is a folder"),
        (["SCRIPT", "--rule", "sqrt"], 2, "fixed or icac"),
        (["SCRIPT", "--overhead", "300%"], 2, "(0, 1]"),
        (["SCRIPT", "--overhead", "much"], 2, "share"),
        (["SCRIPT", "--losses", "-1"], 2, "at least 0"),
        (["SCRIPT", "--beat", "0"], 2, "beat"),
        (["SCRIPT", "--job", "../x"], 2, "name"),
        (["--serve", "127.0.0.1", "--job", "x"], 2, "HOST:PORT"),
        (["--serve", "127.0.0.1:0", "--join", "127.0.0.1:1"], 2, "exclude each other"),
        (["--serve", "127.0.0.1:0", "--job", "x", "--store", "nope://x"], 2, "cannot be opened"),
        (["--serve", "127.0.0.1:0", "--job", "x", "--token-file", "missing"], 4, "cannot be read"),
        (["--join", "127.0.0.1:1", "SCRIPT", "--notice", "gcp"], 3, "source of notices"),
        (["--join", "nowhere", "SCRIPT"], 2, "HOST:PORT"),
        (["--join", "127.0.0.1:1", "SCRIPT"], 2, "give --token-file"),
        (["SCRIPT", "--notice", "foo"], 3, "source of notices"),
        (["SCRIPT", "--notice", "aws:x"], 3, "source of notices"),
        (["SCRIPT", "--notice", "file"], 3, "source of notices"),
        (["SCRIPT", "--notice", "signal:XYZ"], 2, "signal:USR1"),
        (["SCRIPT", "--notice", "slurm", "--notice", "slurm"], 2, "once"),
        (["SCRIPT", "--on", "slurm", "--notice", "foo"], 3, "source of notices"),
        (["SCRIPT", "--successors", "200%"], 2, "--successors is for --on slurm"),
        (["SCRIPT", "--sbatch=--gres=gpu:1"], 2, "--sbatch is for --on slurm"),
        (["SCRIPT", "--on", "slurm", "--successors", "soon"], 2, "share"),
        (["SCRIPT", "--on", "slurm", "--successors", "100%"], 2, "below 100 %"),
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


def test_a_table_is_no_script(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Whatever it is called, Python is to run it."""
    (tmp_path / "precious.csv").write_text("time_s,power_w\n1,2 W\n")
    assert run(["cluster", "train", "--job", "x", str(tmp_path / "precious.csv")]) == 4
    assert "precious.csv, line 2" in capfd.readouterr().err


@pytest.mark.slow
@pytest.mark.parametrize(
    ("text", "says"),
    [
        (b"import os\nprint(1\n", "script.py, line 2: "),
        (b"x = 1\n  y = 2\n", "script.py, line 2: unexpected indent"),
        (b"x = '\xff'\n", "script.py"),
        (b"x = 1\0\n", "null bytes"),
        (b"x = " + b"-" * 200_000 + b"1\n", "script.py"),
    ],
)
@pytest.mark.parametrize("words", [[], ["--on", "slurm"], ["--join", "127.0.0.1:1"]], ids=["here", "slurm", "node"])
def test_a_script_that_python_cannot_compile_is_refused_before_anything_starts(
    tmp_path: Path, text: bytes, says: str, words: list[str], capfd: pytest.CaptureFixture[str]
) -> None:
    """One line, with the script's own; it would fail three times on every node."""
    script = tmp_path / "script.py"
    script.write_bytes(text)
    assert run(["cluster", "train", "--job", "x", *words, str(script)]) == 4
    said = capfd.readouterr().err.strip()
    assert says in said
    assert "cannot be compiled" in said
    assert len(said.splitlines()) == 1
    assert not job_folder("x").exists()


def test_a_script_for_another_python_is_only_warned_of(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """The machines of SkyPilot have one of their own, which may know more; nothing of a script is executed here."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "script.py").write_text("print(1\n")
    words = ["--on", "skypilot", "--write", "task.yaml", "--store", "s3://b/job"]
    assert run(["cluster", "train", *words, "script.py"]) == 0
    assert "script.py, line 1" in capfd.readouterr().err
    assert (tmp_path / "task.yaml").exists()
    (tmp_path / "script.py").write_text("raise SystemExit('executed')\nx = '\\d'\n")
    assert run(["cluster", "train", *words, "script.py"]) == 0
    said = capfd.readouterr().err
    assert "executed" not in said
    assert "SyntaxWarning" not in said


def test_more_nodes_than_fit_into_memory_are_refused(
    script: str, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """They would take the machine down with them; how many fit is said."""
    monkeypatch.setattr("psutil.virtual_memory", lambda: SimpleNamespace(total=24 * 10**9))
    assert run(["cluster", "train", script, "--job", "x", "--nodes", "9999", "--workers", "2"]) == 2
    said = capfd.readouterr().err.strip()
    assert "9999 nodes on this machine need 6,499.4 GB before they train, and it has 24.0 GB: at most 36 fit" in said
    assert len(said.splitlines()) == 1
    assert not job_folder("x").exists()


def test_a_finished_job_is_not_begun_again(capfd: pytest.CaptureFixture[str]) -> None:
    """Its name is refused, with what to do."""
    journal = EventLog(job_folder("done"))
    journal.append({"event": "finished", "generation": 1, "at_s": 1.0})
    journal.close()
    assert run(["cluster", "train", "--serve", "127.0.0.1:0", "--job", "done"]) == 2
    assert "has finished" in capfd.readouterr().err


def written(name: str) -> Path:
    """Write the events of a job whose controller is gone, and return its folder."""
    journal = EventLog(job_folder(name))
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
    said = capfd.readouterr().err.strip()
    assert len(said.splitlines()) == 1
    assert words or "there is no job yet; start one with polythrottle cluster train" in said


def test_a_finished_job_has_no_members_any_more(capfd: pytest.CaptureFixture[str]) -> None:
    """Who made up its last generation is told apart from who trains now."""
    journal = EventLog(job_folder("job"))
    journal.append({"event": "formed", "generation": 1, "members": ["a", "b"], "chief": "a", "at_s": 0.5})
    journal.append({"event": "finished", "generation": 1, "node": "a", "at_s": 9.0})
    journal.close()
    assert run(["cluster", "status", "job", "--json"]) == 0
    found = json.loads(capfd.readouterr().out)
    assert (found["phase"], found["members"], found["chief"]) == ("finished", [], None)
    assert found["last_members"] == ["a", "b"]
    assert run(["cluster", "status", "job"]) == 0
    assert "none any more; the last were a, b" in capfd.readouterr().out


def test_what_went_wrong_and_what_was_done_ahead_is_shown(capfd: pytest.CaptureFixture[str]) -> None:
    """A worker's signal with its last words, restarts of the controller, successors with what they came to."""
    written("job")
    journal = EventLog(job_folder("job"))
    fault = {"node": "a", "reason": "SIGKILL ended a worker", "signal": "SIGKILL", "exit_code": None}
    journal.append({"event": "restarted", "generation": 2, "away_s": 3.0, "at_s": 20.0})
    journal.append({"event": "fault", "generation": 2, "said": ["loading", "x" * 200], "at_s": 21.0, **fault})
    journal.append({"event": "successor", "generation": 2, "order": "1", "successor": "2", "at_s": 22.0})
    done = {"order": "1", "successor": "2", "overlap_s": 2.5, "interruption_s": 0.0}
    journal.append({"event": "succession", "generation": 2, "at_s": 23.0, **done})
    journal.close()
    assert run(["cluster", "status", "job"]) == 0
    shown = capfd.readouterr().out
    assert max(map(len, shown.splitlines())) <= 80
    for text in ("1 of the controller", "a at 21 s, generation 2: SIGKILL ended a worker", "loading", "overlap 2.5 s"):
        assert text in shown


def test_each_order_of_slurms_is_a_node_of_its_own() -> None:
    """Two jobs on one machine, such as a successor beside its elder, have names of their own."""
    assert _slurms_name({"SLURMD_NODENAME": "n1", "SLURM_JOB_ID": "7"}) == "n1-7"
    assert _slurms_name({"SLURMD_NODENAME": "n1"}) == "n1"
    assert _slurms_name({}) == ""


@pytest.mark.parametrize("code", [0, -15])
def test_a_job_whose_controller_ended_before_it_was_over_has_not_come_to_its_end(code: int) -> None:
    """Even where the controller ends well, as one told to stop does: what is kept is said, and how it goes on."""
    written("job")
    job = ControllerOptions("job").as_job()
    with pytest.raises(ClaimFailed, match=r"was stopped.*checkpoint of step 9 is kept; go on from it with --job job"):
        _outcome(code, job)
    journal = EventLog(job.folder)
    journal.append({"event": "finished", "generation": 2, "node": "a", "at_s": 30.0})
    journal.close()
    assert _outcome(0, job)["phase"] == "finished"


def test_a_failed_jobs_last_line_has_its_reason_and_the_line_before_has_not(capfd: pytest.CaptureFixture[str]) -> None:
    """The reason, with the worker's own words, is said in full once."""
    written("job")
    record = {"event": "failed", "generation": 2, "reason": "three times; the last: ValueError: bad", "at_s": 30.0}
    journal = EventLog(job_folder("job"))
    journal.append(record)
    journal.close()
    print_event(record)
    said = capfd.readouterr().err
    assert "the job has failed" in said
    assert "ValueError" not in said
    with pytest.raises(ClaimFailed, match="ValueError: bad") as failed:
        _outcome(9, ControllerOptions("job").as_job())
    assert failed.value.exit_code == 9


def test_status_says_unknown_where_nobody_counted(capfd: pytest.CaptureFixture[str]) -> None:
    """A job without events, whose store cannot be asked."""
    folder = job_folder("job")
    folder.mkdir(parents=True)
    document = {"v": 1, "job": "job", "address": "127.0.0.1:1", "pid": 1, "store": "nope://x", "token_file": None}
    (folder / "job.json").write_text(json.dumps(document))
    assert run(["cluster", "status", "job"]) == 0
    shown = dict(line.split(maxsplit=1) for line in capfd.readouterr().out.splitlines() if line[0] != " ")
    assert (shown["generation"], shown["checkpoints"], shown["losses"]) == ("unknown",) * 3
    assert shown["newest"].startswith("unknown: the store 'nope://x' cannot be opened")


def test_status_names_who_was_lost_what_is_waited_for_and_what_was_taken_up(
    capfd: pytest.CaptureFixture[str],
) -> None:
    """A share of no time is unknown; what another training left in the store is told from this job's own work."""
    written("job")
    found = status_of(job_folder("job"))
    found |= {"members": [], "chief": None, "gone": {"a": "lost", "b": "left"}, "waits_for": 1, "phase": "regrouping"}
    found |= {"taken_up": {"step": 256}, "nothing_left": True}
    found["newest_checkpoint"]["share"] = None
    print_status(found)
    shown = " ".join(capfd.readouterr().out.split())
    assert "members none; a was lost; b left chief none" in shown
    assert "waits for 1 node" in shown
    assert "its share of the time is unknown" in shown
    assert "step 256 of a training that was in the store before; it was over, nothing was left to do" in shown


@pytest.mark.parametrize(("job", "name"), [("mine", "mine"), ("", "its-folder")])
def test_a_job_without_a_name_has_that_of_its_folder(job: str, name: str, tmp_path: Path) -> None:
    """One that was named keeps its own."""
    assert ControllerOptions(job=job, folder=tmp_path / "its-folder").as_job().name == name
