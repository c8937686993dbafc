"""Comparing and checking from the command line: what is proven, what is not, and which exit code says so."""

import json
import os
import shutil
from pathlib import Path

import pytest

from polythrottle.cli.commands import run

ROOT = Path(__file__).resolve().parent.parent
PROFILE = str(ROOT / "examples" / "orin-efficientnet-b4.toml")
SHORT = ("--queries", "60", "--seconds", "0.1")


@pytest.fixture(autouse=True)
def at_the_root(monkeypatch: pytest.MonkeyPatch) -> None:
    """Stand in the project, as the README's reader does, with a narrow terminal."""
    monkeypatch.setenv("COLUMNS", "80")


def said(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str, str]:
    """Return exit code, output and complaint of a command."""
    code = run(words)
    out, err = capsys.readouterr()
    assert all(len(line) <= 80 for line in out.splitlines() if "--json" not in words), out
    return code, out, err


def test_a_profile_saves_against_the_default(capsys: pytest.CaptureFixture[str]) -> None:
    """Device and workload come from the profile, and the saving is told with its bounds."""
    code, out, _ = said(capsys, "measure", "default", PROFILE, "--require", "--json", *SHORT)
    found = json.loads(out)
    assert code == 0
    assert found["verdict"] == "saves"
    assert 0 < found["saving"]["low"] < 0.57 < found["saving"]["high"] < 1
    assert found["energy_kind"] == "simulated"


def test_what_is_not_proven_is_an_error_only_if_required(capsys: pytest.CaptureFixture[str]) -> None:
    """MAXN is the default of this board; nothing is claimed of it."""
    words = ("measure", "default", "MAXN", "-d", "sim:jetson-agx-orin", "-w", "resnet50", *SHORT)
    code, out, _ = said(capsys, *words)
    assert code == 0
    assert "not proven" in out
    code, _, err = said(capsys, *words, "--require")
    assert code == 9
    assert "not proven" in err


def test_a_profile_that_keeps_its_word_passes(capsys: pytest.CaptureFixture[str]) -> None:
    """Measured again the point takes what the profile says, and holds its limits."""
    code, out, _ = said(capsys, "check", PROFILE, "--max-regress", "6%")
    assert code == 0
    assert "keeps its word" in out


def test_a_regression_is_an_error(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """A profile that promises half the energy, or half the latency, is found out."""
    text = Path(PROFILE).read_text()
    energy = next(line for line in text.splitlines() if line.startswith("energy_j"))
    half = f"energy_j = {float(energy.split('=')[1]) / 2}"
    (tmp_path / "bold.toml").write_text(text.replace(energy, half, 1))
    code, _, err = said(capsys, "check", str(tmp_path / "bold.toml"))
    assert (code, "energy per item has grown" in err) == (9, True)
    (tmp_path / "late.toml").write_text(text.replace("p99<=15.48 ms", "p99<=5 ms", 1))
    code, _, err = said(capsys, "check", str(tmp_path / "late.toml"), *SHORT)
    assert (code, "p99<=5 ms is broken" in err) == (9, True)


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("measure", "default"), "two sides"),
        (("measure", "default", "nosuch", "-d", "sim:jetson-nano", "-w", "resnet50"), "unknown profile or preset"),
        (("measure", "default", "none/such.toml"), "unknown profile"),
        (("check", PROFILE, "--max-regress", "much"), "not a share"),
        (("check", PROFILE, "--max-regress", "-1%"), "not a share"),
        (("check", PROFILE, "-d", "sim:jetson-nano"), "this profile was tuned on"),
        (("check", PROFILE, "--workload", "resnet50"), "is for efficientnet-b4, not for resnet50; leave --workload"),
        (("check", "nosuch"), "unknown profile"),
    ],
)
def test_bad_words_are_one_line(capsys: pytest.CaptureFixture[str], words: tuple[str, ...], says: str) -> None:
    """Each mistake is one clear line."""
    code, out, err = said(capsys, *words)
    assert code not in (0, 1)
    assert says in err
    assert not out
    assert err.count("\n") == 1


def tuned_at(tmp_path: Path, arrivals: str, name: str = "at.toml") -> str:
    """Return the profile with the arrivals it was tuned at."""
    text = Path(PROFILE).read_text().replace("[provenance]", f'[provenance]\narrivals = "{arrivals}"')
    (tmp_path / name).write_text(text)
    return os.fspath(tmp_path / name)


def test_a_profile_is_held_to_the_load_it_was_tuned_at(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """Another load is refused, no load is the profile's own, and documents name device, workload and load."""
    code, out, err = said(capsys, "check", tuned_at(tmp_path, "closed"), "--arrivals", "poisson:30/s")
    assert (code, out) == (2, "")
    assert "tuned at arrivals closed, and promises nothing at poisson:30/s; leave --arrivals out" in err
    code, out, _ = said(capsys, "check", tuned_at(tmp_path, "poisson:10/s"), "--json", *SHORT)
    found = json.loads(out)
    assert found["workload"] == "efficientnet-b4"
    assert found["device"].startswith("sim:jetson-agx-orin")
    assert (found["arrivals"], found["tuned_at"], found["offered_per_s"]) == ("poisson:10/s", "poisson:10/s", 10.0)
    assert found["precision"] is None
    _, out, _ = said(capsys, "check", PROFILE, "--arrivals", "poisson:10/s", *SHORT)
    assert "does not say at which arrivals" in out


def test_sides_are_compared_at_the_load_of_the_profile(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """Both under the same; two profiles of different loads need to be told which."""
    slow, fast = (tuned_at(tmp_path, f"poisson:{rate}/s", f"{rate}.toml") for rate in (5, 10))
    _, out, _ = said(capsys, "measure", "default", slow, "--json", *SHORT)
    found = json.loads(out)
    assert (found["arrivals"], found["workload"], found["recorded"]) == ("poisson:5/s", "efficientnet-b4", False)
    code, _, err = said(capsys, "measure", slow, fast, *SHORT)
    assert code == 2
    assert "tuned at poisson:10/s and poisson:5/s; say which with --arrivals" in err


def test_a_load_that_is_not_kept_up_with_breaks_a_profile(capsys: pytest.CaptureFixture[str]) -> None:
    """However long its limit: latency grows for as long as one looks."""
    code, _, err = said(capsys, "check", PROFILE, "--arrivals", "poisson:5000/s", "--queries", "200")
    assert code == 9
    assert "the rate of poisson:5000/s is broken" in err


def test_a_table_is_said_to_have_no_noise(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """Nothing can be proven against what answers the same every time."""
    (tmp_path / "t.csv").write_text(
        "gpu_freq_hz,batch_size,latency_s,energy_j\n600000000,1,0.02,0.1\n1200000000,1,0.01,0.12\n"
    )
    shutil.copy(PROFILE, tmp_path / "p.toml")
    _, out, _ = said(capsys, "measure", "default", "default", "-d", f"replay:{tmp_path / 't.csv'}")
    assert "a table answers the same every time" in " ".join(out.split())


def test_a_corrupt_profile_is_named(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """A profile that is none is refused with its path."""
    shutil.copy(PROFILE, tmp_path / "p.toml")
    (tmp_path / "p.toml").write_text("device = 3")
    code, _, err = said(capsys, "check", os.fspath(tmp_path / "p.toml"))
    assert code == 4
    assert "p.toml" in err
