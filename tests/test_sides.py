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
        (("check", PROFILE, "--max-regress", "3"), "would allow 300 % more energy; write 3%"),
        (("check", PROFILE, "--max-regress", "150%"), "would allow 150 % more energy; write 3%"),
        (("check", PROFILE, "--arrivals", "poisson:10/s"), "tune again, or leave --arrivals out"),
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


def test_sides_are_compared_at_the_load_of_the_profile(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """Both under the same; two profiles of different loads need to be told which."""
    slow, fast = (tuned_at(tmp_path, f"poisson:{rate}/s", f"{rate}.toml") for rate in (5, 10))
    _, out, _ = said(capsys, "measure", "default", slow, "--json", *SHORT)
    found = json.loads(out)
    assert (found["arrivals"], found["workload"], found["recorded"]) == ("poisson:5/s", "efficientnet-b4", False)
    code, _, err = said(capsys, "measure", slow, fast, *SHORT)
    assert code == 2
    assert "tuned at poisson:10/s and poisson:5/s; say which with --arrivals" in err


def test_a_load_that_is_not_kept_up_with_breaks_a_profile(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """However long its limit: latency grows for as long as one looks."""
    code, _, err = said(capsys, "check", tuned_at(tmp_path, "poisson:5000/s"), "--queries", "200")
    assert code == 9
    assert "the rate of poisson:5000/s is broken" in err


def test_a_side_that_does_not_keep_up_proves_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    """The default serves 96 items a second and the profile 220; at 150 nothing is claimed, though it took less."""
    words = ("measure", "default", PROFILE, "--arrivals", "poisson:150/s", "--queries", "500")
    code, out, _ = said(capsys, *words)
    assert (code, "A does not keep up: the queue grows" in out, "p99" in out) == (0, True, False)
    code, out, err = said(capsys, *words, "--json", "--require")
    found = json.loads(out)
    assert (code, "A does not keep up" in err) == (9, True)
    assert found["keeps_up"] == {"a": False, "b": True}
    assert (found["verdict"], found["saving"]["low"]) == ("not proven", None)


def test_short_windows_do_not_prove_a_p99(capsys: pytest.CaptureFixture[str]) -> None:
    """Their own p99 has no upper end, so the limit is open, and it is said how many queries would do."""
    words = ("check", PROFILE, "--max-regress", "6%", *SHORT)
    code, out, err = said(capsys, *words, "--require")
    assert (code, "queries cannot show a p99; give --queries 1000" in " ".join(out.split())) == (9, True)
    assert "cannot show a p99" in err
    found = json.loads(said(capsys, *words, "--json")[1])
    assert (found["proven"], found["broken"], found["limits"]["p99<=15.48 ms"]["high"]) == (False, [], None)
    assert list(found["unknown"]) == ["p99<=15.48 ms"]
    assert found["windows"] < 40
    found = json.loads(said(capsys, "check", PROFILE, "--max-regress", "6%", "--json")[1])
    assert (found["proven"], found["unknown"]) == (True, {})


def changed(tmp_path: Path, before: str, after: str) -> str:
    """Return the profile with another text in it."""
    text = Path(PROFILE).read_text()
    assert before in text
    (tmp_path / "changed.toml").write_text(text.replace(before, after))
    return os.fspath(tmp_path / "changed.toml")


@pytest.mark.parametrize(
    ("before", "after", "says"),
    [
        ("p99<=15.48 ms", "p99<=1.2x", "a profile's limits are absolute"),
        ('"p99<=15.48 ms"', "3", "holds a limit that is none"),
        ('energy_kind = "simulated"', 'energy_kind = "measured"', "are measured and those here simulated"),
        ("VIN_SYS_5V0", "VIN_SYS_5V0 × 1.1", "which do not compare; tune again here"),
        ('boundary = "VDD', 'note = "VDD', "cover nothing that is stated, and those here VDD_GPU_SOC"),
    ],
)
def test_what_does_not_compare_is_refused(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, before: str, after: str, says: str
) -> None:
    """Limits that are multiples, and joules of another kind or boundary, are each one line."""
    code, out, err = said(capsys, "check", changed(tmp_path, before, after), *SHORT)
    assert (code, out, err.count("\n")) == (4, "", 1)
    assert says in err


def test_the_joules_are_said_to_be_of_their_kind(capsys: pytest.CaptureFixture[str]) -> None:
    """Text and document of both commands name kind and boundary."""
    for words in (("check", PROFILE, *SHORT), ("measure", "default", PROFILE, *SHORT)):
        assert "simulated: VDD_GPU_SOC" in said(capsys, *words)[1]
        found = json.loads(said(capsys, *words, "--json")[1])
        assert (found["energy_kind"], found["boundary"][:11]) == ("simulated", "VDD_GPU_SOC")


def table(tmp_path: Path) -> str:
    """Return the URI of a small recorded table."""
    (tmp_path / "t.csv").write_text(
        "gpu_freq_hz,batch_size,latency_s,energy_j\n600000000,1,0.02,0.1\n1200000000,1,0.01,0.12\n"
    )
    return f"replay:{tmp_path / 't.csv'}"


def test_a_table_is_said_to_have_no_noise(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """Nothing can be proven against what answers the same every time."""
    _, out, _ = said(capsys, "measure", "default", "default", "-d", table(tmp_path))
    assert "a recorded table has no noise of its own, so there is nothing to prove" in " ".join(out.split())


def test_a_profile_of_a_table_is_looked_up_once(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """It takes what it says, nothing is proven by it, and noise put on its joules makes them other joules."""
    uri, profile = table(tmp_path), os.fspath(tmp_path / "p.toml")
    assert run(("tune", "-d", uri, "--out", profile, "--journal", os.fspath(tmp_path / "j.jsonl"))) == 0
    capsys.readouterr()
    code, out, _ = said(capsys, "check", profile)
    text = " ".join(out.split())
    assert (code, "1.000 times what the profile says" in text) == (0, True)
    assert "1, looked up: a recorded table has no noise of its own" in text
    code, _, err = said(capsys, "check", profile, "--require")
    assert (code, "not proven" in err) == (9, True)
    code, _, err = said(capsys, "check", profile, "-d", f"{uri}?noise=0.2")
    assert code == 4
    assert "which do not compare" in err


def test_a_profile_of_a_board_is_not_told_to_leave_out_what_was_not_given(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """On a table it is refused for its point, or for its load, and not for a workload that nobody named."""
    code, _, err = said(capsys, "check", PROFILE, "-d", f"{table(tmp_path)}?noise=0.2")
    assert (code, "--workload" in err, "does not take the point" in err) == (2, False, True)
    code, _, err = said(capsys, "check", tuned_at(tmp_path, "poisson:10/s"), "-d", table(tmp_path))
    assert (code, "a load that a recorded table cannot show" in err) == (2, True)


def test_a_corrupt_profile_is_named(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """A profile that is none is refused with its path."""
    shutil.copy(PROFILE, tmp_path / "p.toml")
    (tmp_path / "p.toml").write_text("device = 3")
    code, _, err = said(capsys, "check", os.fspath(tmp_path / "p.toml"))
    assert code == 4
    assert "p.toml" in err
