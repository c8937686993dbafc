import re
from functools import partial
from pathlib import Path

import pytest

from polythrottle.api import search
from polythrottle.cli.commands import run

ROOT = Path(__file__).resolve().parent.parent
EXAMPLES = ROOT / "examples"
PROFILE = EXAMPLES / "orin-efficientnet-b4.toml"


def shown_in_the_readme() -> dict[str, str]:
    """Return what the README says the demo ends with, by the name in front of each line."""
    block = (ROOT / "README.md").read_text().partition("The demo ends with lines like these:")[2].split("```")[1]
    lines = [re.split(r" {2,}", line, maxsplit=1) for line in block.splitlines()[1:]]
    return dict(lines)


def printed(out: str) -> dict[str, str]:
    """Return what the demo printed, likewise; the terminal has to be wide."""
    lines = [re.split(r" {2,}", line.strip(), maxsplit=1) for line in out.splitlines()]
    return {line[0]: line[1] for line in lines if len(line) == 2}


def shape(text: str) -> str:
    """Return a line without its figures."""
    return re.sub(r"\d[\d.,]*", "N", text)


@pytest.mark.slow
def test_demo_writes_profile_and_journal_below_its_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The simulated board's answer and all it took lie in one folder."""
    monkeypatch.setenv("POLYTHROTTLE_STATE_DIR", "elsewhere")
    monkeypatch.setattr(search, "tune", partial(search.tune, trials=2, presets=False, method="grid"))
    assert run(["demo", "--folder", str(tmp_path)]) == 0
    assert "sim:jetson-agx-orin" in capsys.readouterr().out
    assert (tmp_path / "profile.toml").is_file()
    assert list(tmp_path.glob("studies/**/*.jsonl"))


@pytest.mark.slow
def test_the_readme_shows_lines_as_the_demo_prints_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its names and the shape of each line whatever the search found, and what does not hang on the search exactly."""
    monkeypatch.setenv("POLYTHROTTLE_STATE_DIR", "elsewhere")
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.setattr(
        search, "tune", partial(search.tune, trials=8, presets=False, method="random", priors=[PROFILE])
    )
    assert run(["demo", "--folder", str(tmp_path)]) == 0
    said, found = shown_in_the_readme(), printed(capsys.readouterr().out)
    assert list(said) == [name for name in found if name in said]
    assert said["default"] == found["default"]
    assert re.findall(r"of ([\d,]+) points", said["trials"]) == re.findall(r"of ([\d,]+) points", found["trials"])
    for name in ("default", "tuned", "saving", "point"):
        assert shape(said[name]) == shape(found[name])
    assert shape(found["not taken"]).startswith(shape(said["not taken"]).partition(";")[0])
    assert shape(found["trials"]).startswith(shape(said["trials"]).partition("(")[0])


@pytest.mark.slow
def test_the_readme_shows_what_the_demo_finds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The whole search: the same lines, its saving within two points of a hundred, in as many trials within three."""
    monkeypatch.setenv("POLYTHROTTLE_STATE_DIR", "elsewhere")
    monkeypatch.setenv("COLUMNS", "200")
    assert run(["demo", "--folder", str(tmp_path)]) == 0
    said, found = shown_in_the_readme(), printed(capsys.readouterr().out)
    assert set(said) <= set(found)
    assert shape(said["saving"]) == shape(found["saving"])
    saved, made = (
        [float(re.findall(r"[\d.]+", each[name])[0]) for each in (said, found)] for name in ("saving", "trials")
    )
    assert saved[0] == pytest.approx(saved[1], abs=2.0)
    assert made[0] == pytest.approx(made[1], abs=3.0)


def test_examples_are_written_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Every shipped file; one that is there stays as it is."""
    target = tmp_path / "tried"
    assert run(["examples", str(target)]) == 0
    shipped = {path.name for path in EXAMPLES.iterdir() if path.is_file()}
    assert {path.name for path in target.iterdir()} == shipped
    (target / "replay_table.py").write_text("mine")
    assert run(["examples", str(target)]) == 0
    assert (target / "replay_table.py").read_text() == "mine"
    assert f"{len(shipped)} that were there" in capsys.readouterr().out


def test_a_file_in_the_way_is_told_in_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Examples need a folder; a file is none."""
    (tmp_path / "examples").write_text("")
    assert run(["examples", str(tmp_path / "examples")]) == 8
    assert "is no folder" in capsys.readouterr().err
