"""A profile or a journal from a stranger steers, runs and writes nothing that its reader has not named or been told."""

import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from builders import measured, study

import polythrottle
from polythrottle.actuation.drivers import controls
from polythrottle.backends import check_named, open_device
from polythrottle.catalog.tuned_profiles import write_profile
from polythrottle.cli.commands import run
from polythrottle.daemon import startup
from polythrottle.daemon.settings import Settings
from polythrottle.domain.errors import BadFile, InvalidInput
from polythrottle.domain.problem import Problem
from polythrottle.domain.profile import Profile
from polythrottle.domain.space import Knob, OperatingPoint, SearchSpace
from polythrottle.domain.study import Study
from polythrottle.storage.identity import identity_of
from polythrottle.storage.journal import Journal, read
from polythrottle.testing import plant
from polythrottle.tuning.file_trust import accept_resumed, begun_on, check_begun_on
from polythrottle.tuning.plan import StudyPlan
from polythrottle.tuning.setup import Setup

PROGRAM = "from pathlib import Path\nPath('ran').touch()\ndef serve(): pass\n"


@pytest.fixture(autouse=True)
def stranger(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Name no tree of files, and lay a program that leaves a trace once it is imported."""
    monkeypatch.delenv("POLYTHROTTLE_ROOTS")
    monkeypatch.setattr(controls, "_trusted", set())
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "theirs", raising=False)
    Path("theirs.py").write_text(PROGRAM)
    Path("meter").write_text("#!/bin/sh\ntouch ran\nwhile sleep 0.02; do echo 5; done\n")
    Path("meter").chmod(0o755)


def a_profile(path: str, **changes: Any) -> None:
    """Write a profile of this processor that serves the program."""
    words: dict[str, Any] = {
        "device": "cpu",
        "workload": "theirs:serve",
        "point": OperatingPoint({}),
        "measurement": measured(),
        "identity": identity_of(open_device("cpu")),
        "workload_knobs": (),
    }
    write_profile(Profile(**{**words, **changes}), Path(path))


def a_journal(path: str, plan: StudyPlan) -> None:
    """Write the journal of a study that has just begun."""
    space = SearchSpace.grid((Knob("batch_size", (1,)),), {"batch_size": 1})
    with Journal.create(Path(path), Study(Problem(space, (), "cpu", "theirs:serve"), "grid", 0), plan.line()):
        pass


def test_a_tree_that_only_the_profile_names_is_not_steered(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Neither applied, measured nor followed; one line says how to name it, and named it is."""
    (tmp_path / "board").mkdir()
    uri = f"cpu?root={tmp_path / 'board'}"
    a_profile("p.toml", device=uri, identity={"model": "a Z80"})
    for words in (["apply", "p.toml", "--keep"], ["check", "p.toml"], ["measure", "default", "p.toml"]):
        assert run(words) == InvalidInput.exit_code
        error = capsys.readouterr().err
        assert f"p.toml would steer the files in {tmp_path / 'board'}, which nobody but that file has named" in error
        assert f"--device '{uri}'" in error
    with pytest.raises(InvalidInput, match="would steer the files"):
        startup._asked(Settings(profile="p.toml"))
    assert run(["apply", "p.toml", "--device", uri]) == BadFile.exit_code  # named, it is compared
    assert "this profile was tuned on" in capsys.readouterr().err
    Path("state/profiles").mkdir(parents=True)
    Path("p.toml").rename("state/profiles/p.toml")
    assert run(["apply", "state/profiles/p.toml"]) == BadFile.exit_code  # this user's own
    assert "this profile was tuned on" in capsys.readouterr().err


@pytest.mark.parametrize(
    "uri", ["cpu?root=elsewhere", "actuator:/tmp/theirs.sock?device=cpu", "jetson?hz=2&root=/tmp/."]
)
def test_what_is_elsewhere_is_the_users_to_name(uri: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder or a socket; not what this process was told of."""
    with pytest.raises(InvalidInput, match="which nobody but that file has named"):
        check_named(uri, "p.toml")
    monkeypatch.setenv("POLYTHROTTLE_ROOTS", f"{Path('elsewhere').absolute()}:/tmp")
    if "root=" in uri:
        check_named(uri, "p.toml")


def test_a_tree_with_a_name_that_none_can_have_is_refused_in_a_line() -> None:
    """NUL, which a file may hold, and a loop of links."""
    Path("loop").symlink_to("loop")
    for root in ("a\0b", "loop"):
        with pytest.raises(InvalidInput, match="which nobody but that file has named"):
            check_named(f"cpu?root={root}", "p.toml")


@pytest.mark.parametrize(
    "uri", ["cpu", "jetson?root=/", "cpu?root=/./", "nvml:0,1", "sim:a.toml", "replay:t.csv", "odd"]
)
def test_this_machines_own_devices_may_be_named_by_anybody(uri: str) -> None:
    """They are compared with what the file was made on; what is no device is said by who opens it."""
    check_named(uri, "p.toml")


@pytest.mark.parametrize("words", [["check", "p.toml"], ["measure", "default", "p.toml"]])
def test_on_other_hardware_nothing_of_a_profile_is_run(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    """Neither its workload nor its meter: the hardware is compared first, in one line."""
    a_profile("p.toml", device="cpu?meter=cmd:./meter", identity={"model": "a Z80"})
    assert run(words) == BadFile.exit_code
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert "this profile was tuned on model a Z80, and this is" in error
    assert not Path("ran").exists()


def test_what_a_profile_has_run_is_said_before_it_is(capsys: pytest.CaptureFixture[str]) -> None:
    """What cannot be imported was named before that was tried; what the user names is no news."""
    a_profile("p.toml", workload="nosuch\x1b:serve")
    assert run(["check", "p.toml"]) == InvalidInput.exit_code
    first, second = capsys.readouterr().err.splitlines()
    assert first == "polythrottle: running what p.toml names: nosuch :serve"
    assert "nosuch" in second
    a_profile("p.toml", workload="nosuch:serve")
    assert run(["check", "p.toml", "--workload", "nosuch:serve"]) == InvalidInput.exit_code
    assert "running what" not in capsys.readouterr().err
    a_profile("p.toml", workload=f"cmd:nosuch {'a ' * 300}the end")
    assert run(["check", "p.toml"]) == InvalidInput.exit_code
    assert "a a the end\n" in capsys.readouterr().err  # whole, however long it is
    heard: list[str] = []
    a_profile("p.toml", device="cpu?meter=nosuch:meter")
    with pytest.raises(polythrottle.domain.errors.PolythrottleError):
        polythrottle.check("p.toml", told=heard.append)
    assert heard == ["running what p.toml names: theirs:serve and the meter nosuch:meter"]


def test_what_a_journal_has_run_is_said_once_on_however_many_boards() -> None:
    """Each is looked at; the line is the same."""
    plan = StudyPlan(Setup("cpu", "theirs:serve"))
    heard: list[str] = []
    begun = replace(study(), problem=replace(study().problem, space=open_device("cpu").space))
    accept = accept_resumed(Path("a.jsonl"), begun, plan, "cpu,cpu", heard.append)
    for _ in range(2):
        accept(open_device("cpu"))
    assert heard == ["running what a.jsonl names: theirs:serve"]


def test_on_other_hardware_a_journal_is_not_resumed(capsys: pytest.CaptureFixture[str]) -> None:
    """By what it was begun on, and where an older one does not say by its knobs; nothing is run."""
    a_journal("a.jsonl", StudyPlan(Setup("cpu", "theirs:serve"), identity={"model": "a Z80"}))
    assert run(["tune", "--resume", "a.jsonl"]) == BadFile.exit_code
    assert "a.jsonl was begun on model a Z80, and this is" in capsys.readouterr().err
    assert not Path("ran").exists()


def test_a_journal_without_hardware_is_compared_by_its_knobs(tmp_path: Path) -> None:
    """As those of earlier versions are."""
    device = open_device(f"jetson?root={plant('jetson-agx-orin-jp6', tmp_path / 'board')}")
    plan = StudyPlan(Setup("jetson", "theirs:serve"))
    with pytest.raises(BadFile, match="has other levels of gpu_min_mhz, gpu_max_mhz"):
        check_begun_on(Path("a.jsonl"), study(), plan, device)
    begun = replace(study(), problem=replace(study().problem, space=device.space))
    check_begun_on(Path("a.jsonl"), begun, plan, device)


def test_a_journal_says_what_it_was_begun_on() -> None:
    """So that whoever resumes it elsewhere is told; a simulated board is known by its file."""
    plan = StudyPlan(Setup("cpu", "theirs:serve"))
    device = open_device("cpu")
    begun = begun_on(plan, device)
    assert begun.identity == identity_of(device) != {}
    assert StudyPlan.of(begun.line()) == begun
    assert begun_on(plan, open_device("sim:jetson-nano")) == plan
    with pytest.raises(BadFile, match="identity holds something else"):
        StudyPlan.of({**plan.line(), "identity": {"model": 3}})


def test_what_a_journal_has_run_or_steered_is_said_or_named(capsys: pytest.CaptureFixture[str]) -> None:
    """What cannot be imported was named before; a tree is refused until it is named."""
    a_journal("a.jsonl", StudyPlan(Setup("cpu", "nosuch:serve")))
    assert run(["tune", "--resume", "a.jsonl"]) == InvalidInput.exit_code
    assert "running what a.jsonl names: nosuch:serve" in capsys.readouterr().err
    a_journal("b.jsonl", StudyPlan(Setup("cpu?root=board", "nosuch:serve")))
    assert run(["tune", "--resume", "b.jsonl"]) == InvalidInput.exit_code
    assert "b.jsonl would steer the files in board" in capsys.readouterr().err
    assert run(["tune", "--resume", "b.jsonl", "--device", "cpu?root=board"]) == InvalidInput.exit_code
    assert "there is no folder" in capsys.readouterr().err


@pytest.mark.parametrize("words", [["explain"], ["report"], ["tune", "--resume"]])
def test_a_journal_whose_plan_is_none_is_refused_by_all(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    """With the file and the line, whoever reads it."""
    a_journal("a.jsonl", StudyPlan(Setup("cpu", "theirs:serve")))
    text = Path("a.jsonl").read_text()
    Path("a.jsonl").write_text(text.replace('"trials": 30', '"trials": -3'))
    assert Path("a.jsonl").read_text() != text
    assert run([*words, "a.jsonl"]) == BadFile.exit_code
    error = capsys.readouterr().err
    assert error.startswith("polythrottle: a.jsonl line 1: the journal's plan cannot be read: ")
    assert error.count("\n") == 1


def test_a_journal_has_no_file_written_far_from_it(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """Its profile goes beside it or where the user says; a journal of the state folder is the user's own."""
    far = tmp_path / "far" / "p.toml"
    plan = StudyPlan(Setup("cpu", "nosuch:serve"), out=far)
    a_journal("a.jsonl", plan)
    assert run(["tune", "--resume", "a.jsonl"]) == InvalidInput.exit_code
    assert f"a.jsonl would have its profile written to {far}" in " ".join(capsys.readouterr().err.split())
    assert run(["tune", "--resume", "a.jsonl", "--out", str(far)]) == InvalidInput.exit_code
    assert "nosuch" in capsys.readouterr().err
    a_journal("b.jsonl", replace(plan, out=tmp_path / "p.toml"))
    a_journal("state/studies/c.jsonl", plan)
    for own in ("b.jsonl", "state/studies/c.jsonl"):
        assert run(["tune", "--resume", own]) == InvalidInput.exit_code
        assert "would have its profile" not in capsys.readouterr().err
    assert read(Path("b.jsonl")).problem.device == "cpu"
