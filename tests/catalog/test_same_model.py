"""Which model a profile is for: known by its content, found where it lay, and never taken for another of its name."""

import os
import re
from dataclasses import replace
from pathlib import Path

import pytest
from builders import problem

import polythrottle
from polythrottle.api.tuning_result import find_study
from polythrottle.catalog.documents import catalogue_dir
from polythrottle.catalog.tuned_profiles import find_profile, read_profile
from polythrottle.cli.commands import run
from polythrottle.domain.errors import BadFile, UnknownName
from polythrottle.storage.journal import read
from polythrottle.tuning.setup import device_name, workload_name

SHORT = ("--queries", "60", "--seconds", "0.1", "--max-regress", "20%")
BOARD = "sim:jetson-nano"


@pytest.fixture
def two_models(tmp_path: Path) -> tuple[Path, Path]:
    """Return two folders, each with another model under one name."""
    text = (catalogue_dir("profiles/workloads") / "mobilenetv2.toml").read_text()
    for name, content in (("a", text), ("b", f"{text}\n# trained again\n")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "model.toml").write_text(content)
    return tmp_path / "a", tmp_path / "b"


def tuned(folder: Path, monkeypatch: pytest.MonkeyPatch, workload: str = "model.toml") -> Path:
    """Return the profile of a model tuned in its folder, by a relative name."""
    monkeypatch.chdir(folder)
    words = ("--method", "grid", "--trials", "2", "--no-presets", "--batch", "1,4", "--queries", "60")
    assert run(("tune", "-d", BOARD, "-w", workload, *words)) == 0
    return find_profile("sim-jetson-nano/model")


def test_models_of_one_name_have_profiles_and_studies_of_their_own(
    two_models: tuple[Path, Path], state_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Names stay readable and tell two contents apart; the short name means the newest."""
    first, second = (tuned(folder, monkeypatch) for folder in two_models)
    assert first != second
    assert first.is_file()
    assert {path.parent.name for path in (state_folder / "studies").rglob("*.jsonl")} == {
        path.name.partition("@")[0] for path in (first, second)
    }
    study = read(Path(str(read_profile(first).provenance["journal"])))
    assert first.name == f"{workload_name(study.problem)}@no-slo.toml"
    assert workload_name(study.problem) == f"model-{study.problem.content['model'][:8]}"
    os.utime(first, (first.stat().st_mtime, second.stat().st_mtime + 60))
    assert find_profile("sim-jetson-nano/model") == first
    assert find_profile(f"sim-jetson-nano/{second.name.partition('@')[0]}") == second
    with pytest.raises(UnknownName, match=r"model-[0-9a-f]{8}") as caught:
        find_profile("sim-jetson-nano/modell")
    assert "@" not in str(caught.value)


def test_two_trees_are_two_boards() -> None:
    """Each has profiles of its own, told from those of the machine's own board."""
    names = [device_name(replace(problem(), device=each)) for each in ("jetson", "jetson?root=/", "jetson?root=/a")]
    assert names[:2] == ["jetson", "jetson"]
    assert re.fullmatch("jetson-[0-9a-f]{8}", names[2])
    assert names[2] != device_name(replace(problem(), device="jetson?root=/b"))


TABLE = "gpu_freq_hz,latency_s,energy_j\n300000000,0.02,{}\n600000000,0.01,1.0\n"


@pytest.mark.parametrize(
    ("file", "uri", "short"),
    [("t.csv", "replay:{}", "replay-t/recorded"), ("board.toml", "sim:{}", "sim-board/resnet50")],
)
def test_tables_and_boards_of_one_name_have_profiles_and_studies_of_their_own(
    file: str, uri: str, short: str, tmp_path: Path, state_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In two folders, or recorded anew; the short name means the newest, and the long one either."""
    board = (catalogue_dir("devices") / "jetson-nano.toml").read_text()
    contents = (TABLE.format("0.5"), TABLE.format("0.6")) if file == "t.csv" else (board, f"{board}\n# another\n")
    served = () if file == "t.csv" else ("-w", "resnet50", "--no-presets", "--queries", "60")
    found = []
    for number, content in enumerate(contents):
        (tmp_path / str(number)).mkdir()
        (tmp_path / str(number) / file).write_text(content)
        monkeypatch.chdir(tmp_path / str(number))
        assert run(("tune", "-d", uri.format(file), "--method", "grid", "--trials", "2", *served)) == 0
        found.append(find_profile(short))
        os.utime(found[-1], (number, number))
    assert found[0] != found[1]
    assert find_profile(short) == found[1]
    for path in found:
        assert find_profile(f"{path.parent.name}/{short.partition('/')[2]}") == path
        assert read_profile(path).provenance["journal"] == str(find_study(f"{path.parent.name}/{path.stem}"))
    assert {path.parent.parent.name for path in (state_folder / "studies").rglob("*.jsonl")} == {
        path.parent.name for path in found
    }


def test_a_model_is_measured_where_it_lay_whatever_folder_one_is_in(
    two_models: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A relative name in a profile does not mean another file of that name here."""
    a, b = two_models
    profile = tuned(a, monkeypatch)
    monkeypatch.chdir(b)
    capsys.readouterr()
    assert run(("check", str(profile), *SHORT)) == 0
    assert str(a / "model.toml") in "".join(capsys.readouterr().out.split())
    assert run(("check", "sim-jetson-nano/model", "-w", str(a / "model.toml"), *SHORT)) == 0


@pytest.mark.slow
def test_another_model_is_refused_unless_it_is_asked_for(
    two_models: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """One line with both contents, whether the file was named, changed or has gone; a copy is the same model."""
    a, b = two_models
    profile = str(tuned(a, monkeypatch))
    monkeypatch.chdir(b)
    (a / "model.toml").rename(a / "copy.toml")
    capsys.readouterr()
    refused = [("check", profile), ("check", profile, "-w", "model.toml"), ("measure", "default", profile)]
    for words in refused:
        assert run((*words, *SHORT[:4])) == 4
        err = capsys.readouterr().err
        assert (err.count("\n"), "is another model than the profile was tuned for" in err) == (1, True)
        assert ("--other-model" in err) == (words[0] == "check")
    assert run(("check", profile, "--other-model", *SHORT)) == 0
    assert run(("check", profile, "-w", str(a / "copy.toml"), *SHORT)) == 0


def test_a_profile_of_a_model_that_has_changed_is_not_applied_unasked(
    two_models: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Where its file is here and has other content now; where it is served elsewhere, nothing can be said."""
    a, _ = two_models
    profile = tuned(a, monkeypatch)
    capsys.readouterr()
    assert run(("apply", str(profile))) == 0
    (a / "model.toml").write_text("# another\n")
    assert run(("apply", str(profile))) == 4
    assert "has changed since this profile was tuned" in capsys.readouterr().err
    with pytest.raises(BadFile, match="other_model=True"):
        polythrottle.apply(profile)
    assert run(("apply", str(profile), "--other-model")) == 0
    (a / "model.toml").unlink()
    assert run(("apply", str(profile))) == 0
