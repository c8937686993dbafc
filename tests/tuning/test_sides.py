"""Comparing and checking from the command line: what is proven, what is not, and which exit code says so."""

import json
import math
import os
import re
import shutil
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
from builders import measured

from polythrottle.catalog.tuned_profiles import read_profile
from polythrottle.cli.commands import run
from polythrottle.cli.compare import _check_lines, _check_verdict
from polythrottle.domain.backports import tomllib
from polythrottle.domain.measurement import Interval, Measurement
from polythrottle.domain.problem import Constraint
from polythrottle.domain.space import OperatingPoint
from polythrottle.metering.comparison import ProfileCheck, check_windows
from polythrottle.tuning.profile_comparison import _widened
from polythrottle.tuning.setup import Setup
from polythrottle.workloads import open_workload

ROOT = Path(__file__).resolve().parents[2]
PROFILE = str(ROOT / "examples" / "orin-efficientnet-b4.toml")
TUNED = tomllib.loads(Path(PROFILE).read_text())
(LIMIT,) = TUNED["slo"]
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
    assert 0 < found["saving"]["low"] < TUNED["saving_fraction"] < found["saving"]["high"] < 1
    assert found["energy_kind"] == "simulated"


def test_both_sides_are_told_with_their_points(capsys: pytest.CaptureFixture[str]) -> None:
    """The default is that of device and workload, whatever a profile's saving was told against."""
    code, out, _ = said(capsys, "measure", "default", PROFILE, "--batch", "2,4", *SHORT)
    text = " ".join(out.split())
    assert (code, "A default: batch_size=2, gpu_max_mhz=1300.5" in text) == (0, True)
    assert f"B {PROFILE}: batch_size=2, gpu_max_mhz=1032.75" in text.replace("/ ", "/")
    found = json.loads(said(capsys, "measure", "default", PROFILE, "--json", *SHORT)[1])
    assert found["points"]["a"]["batch_size"] == 1
    assert found["points"]["b"]["batch_size"] == TUNED["point"]["batch_size"]


def test_a_growth_too_small_for_one_window_is_said_to_stay_open(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """With what would be told; the windows end before the most, for more of them would not tell."""
    words = ("check", PROFILE, "-d", "sim:jetson-agx-orin?noise=0.002", "--max-regress", "2%")
    code, out, _ = said(capsys, *words)
    text = " ".join(out.split())
    assert (code, "the profile's own is of one window, and another may differ; --max-regress" in text) == (0, True)
    assert "does not keep" not in text
    found = json.loads(said(capsys, *words, "--json")[1])
    assert (found["regressed"], found["proven"], list(found["unknown"])) == (False, False, ["energy"])
    assert found["windows"] < 40


@pytest.mark.slow
def test_what_is_not_proven_is_an_error_only_if_required(capsys: pytest.CaptureFixture[str]) -> None:
    """MAXN is the default of this board; nothing is claimed of it."""
    words = ("measure", "default", "MAXN", "-d", "sim:jetson-agx-orin", "-w", "resnet50", *SHORT)
    code, out, _ = said(capsys, *words)
    assert code == 0
    assert "not proven" in out
    code, _, err = said(capsys, *words, "--require")
    assert code == 9
    assert "not proven" in err


@pytest.mark.slow
def test_a_profile_that_keeps_its_word_passes(capsys: pytest.CaptureFixture[str]) -> None:
    """Measured again the point takes what the profile says, and holds its limits."""
    code, out, _ = said(capsys, "check", PROFILE, "--max-regress", "6%")
    assert code == 0
    assert "keeps its word" in out


def test_a_regression_is_an_error(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """A profile that promises half the energy, or half the latency, is found out."""
    text = Path(PROFILE).read_text()
    halved = text
    for joules in (TUNED["measured"]["energy_j"], *TUNED["measured"]["energy_between_j"]):
        assert str(joules) in halved
        halved = halved.replace(str(joules), str(joules / 2), 1)
    (tmp_path / "bold.toml").write_text(halved)
    code, _, err = said(capsys, "check", str(tmp_path / "bold.toml"))
    assert (code, "energy per item has grown" in err) == (9, True)
    (tmp_path / "late.toml").write_text(text.replace(LIMIT, "p99<=5 ms", 1))
    code, _, err = said(capsys, "check", str(tmp_path / "late.toml"), *SHORT)
    assert (code, "p99<=5 ms is broken" in err) == (9, True)


def test_a_side_may_be_a_preset_in_any_spelling(capsys: pytest.CaptureFixture[str]) -> None:
    """Boards and the catalogue call one mode MODE_5W, 5W or 5w."""
    words = ("-d", "sim:jetson-nano", "-w", "resnet50", *SHORT)
    code, _, err = said(capsys, "measure", "maxn", "mode_5w", *words)
    assert code == 0, err


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
        (("check", PROFILE, "--arrivals", "poisson:10/s"), "tuned at arrivals closed, and promises nothing"),
        (("check", PROFILE, "-d", "sim:jetson-nano"), "this profile was tuned on"),
        (("check", PROFILE, "--workload", "resnet50"), "is for efficientnet-b4, not for resnet50; leave --workload"),
        (("check", "nosuch"), "unknown profile"),
        (("measure", "-d", "sim:jetson-nano?seed=-1", "-w", "resnet50"), "seed=-1 is not a whole number of 0 or more"),
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
    text, count = re.subn(
        r'^arrivals = ".*"$', f'arrivals = "{arrivals}"', Path(PROFILE).read_text(), flags=re.MULTILINE
    )
    assert count == 1
    (tmp_path / name).write_text(text)
    return os.fspath(tmp_path / name)


def test_a_profile_is_held_to_the_load_it_was_tuned_at(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """Another load is refused, no load is the profile's own, and documents name device, workload and load."""
    code, out, err = said(capsys, "check", tuned_at(tmp_path, "closed"), "--arrivals", "poisson:30/s")
    assert (code, out) == (2, "")
    assert "tuned at arrivals closed, and promises nothing at poisson:30/s; leave --arrivals out" in err
    silent = tuned_at(tmp_path, "closed")
    Path(silent).write_text(Path(silent).read_text().replace('arrivals = "closed"\n', ""))
    code, _, err = said(capsys, "check", silent, "--arrivals", "poisson:30/s")
    assert (code, "does not say at which load it was tuned; tune again, or leave --arrivals out" in err) == (2, True)
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


def test_one_window_of_many_that_fell_behind_breaks_no_rate() -> None:
    """A single one may be mistaken; of half of them nobody says that they keep up."""
    kept, behind = measured(), measured(backlog_per_s=1.0)
    for seen, keeps in (((kept,) * 7 + (behind,), True), ((kept, behind), False), ((behind,), False)):
        found = ProfileCheck(Interval(1.0, 1.0), {}, len(seen), 0.03, seen, arrivals="poisson:10/s")
        assert (found.broken == (), found.sound) == (keeps, keeps)


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


@pytest.mark.slow
def test_short_windows_do_not_prove_a_p99(capsys: pytest.CaptureFixture[str]) -> None:
    """Their own p99 has no upper end, so the limit is open, and it is said how many queries would do."""
    words = ("check", PROFILE, "--max-regress", "6%", *SHORT)
    code, out, err = said(capsys, *words, "--require")
    assert (code, "queries cannot show a p99; give --queries 1000" in " ".join(out.split())) == (9, True)
    assert "cannot show a p99" in err
    found = json.loads(said(capsys, *words, "--json")[1])
    assert (found["proven"], found["broken"], found["limits"][LIMIT]["high"]) == (False, [], None)
    assert list(found["unknown"]) == [LIMIT]
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
        (LIMIT, "p99<=1.2x", "a profile's limits are absolute"),
        (f'"{LIMIT}"', "3", "slo is not a list of texts"),
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


@pytest.mark.slow
def test_the_joules_are_said_to_be_of_their_kind(capsys: pytest.CaptureFixture[str]) -> None:
    """Text and document of both commands name kind and boundary."""
    for words in (("check", PROFILE, *SHORT), ("measure", "default", PROFILE, *SHORT)):
        assert "simulated: VDD_GPU_SOC" in said(capsys, *words)[1]
        found = json.loads(said(capsys, *words, "--json")[1])
        assert (found["energy_kind"], found["boundary"][:11]) == ("simulated", "VDD_GPU_SOC")


@pytest.mark.parametrize(
    ("p99_s", "high_s", "over"), [(0.02, math.inf, 4), (0.02, 0.021, 4), (0.011, 0.012, 0), (0.009, math.inf, 0)]
)
def test_calm_windows_prove_no_percentile_that_others_speak_against(p99_s: float, high_s: float, over: int) -> None:
    """Slow queries in clusters make every other window calm; those above the limit forbid the proof."""
    profile, limit = read_profile(Path(PROFILE)), Constraint.parse("p99<=10ms")

    def seen(p99_s: float, between: tuple[float, float]) -> Measurement:
        each = measured(intervals={"p99": Interval(*between)})
        return replace(each, latency=replace(each.latency, p99_s=p99_s))

    low_s = p99_s if over else 0.9 * p99_s
    looks = [seen(0.0006, (0.0005, 0.0007)), seen(p99_s, (low_s, high_s))] * 4
    found = check_windows(profile.measurement, (limit,), looks, 0.03)
    assert found.over == ({str(limit): over} if over else {})
    assert (found.limits[str(limit)].high == math.inf) == bool(over)
    assert list(found.short) == ([str(limit)] if over else [])
    assert not found.broken


def test_windows_that_all_break_a_limit_are_told_with_both_ends() -> None:
    """What is broken needs no note that it is not proven."""
    profile, limit = read_profile(Path(PROFILE)), Constraint.parse("p99<=1ms")
    late = measured(intervals={"p99": Interval(0.011, 0.013)})
    found = check_windows(profile.measurement, (limit,), [late] * 4, 0.03)
    assert found.broken == (str(limit),)
    assert found.limits[str(limit)].high == pytest.approx(12, rel=0.2)
    assert not found.over


def test_windows_that_speak_against_a_limit_are_counted(capsys: pytest.CaptureFixture[str]) -> None:
    """In the note, and the verdict does not say that nothing was found."""
    seen = (measured(),) * 4
    found = ProfileCheck(
        Interval(1.0, 1.0),
        {"p99<=10 ms": Interval(0.1, math.inf)},
        4,
        0.03,
        seen,
        short={"p99<=10 ms": Interval(0.1, 2.0)},
        over={"p99<=10 ms": 2},
    )
    lines = dict(_check_lines("p.toml", found))
    assert lines["note"].startswith("p99<=10 ms not proven: 2 of 4 windows saw more; give --queries ")
    assert lines["verdict"] == "not proven, some windows speak against it"
    assert not found.sound


def test_energy_that_nobody_vouches_for_proves_nothing(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """A profile without the interval of its energy is not taken for exact, and more windows would not help."""
    bare = re.sub(r"^energy_between_j = \[.*?\]\n", "", Path(PROFILE).read_text(), flags=re.M | re.S)
    (tmp_path / "bare.toml").write_text(bare)
    code, out, err = said(capsys, "check", str(tmp_path / "bare.toml"), "--max-regress", "6%", "--require")
    text = " ".join(out.split())
    assert (code, "the profile does not say how well its own is known" in text) == (9, True)
    assert "energy not proven" in err
    assert re.search(r"energy [01]\.\d+ times what the profile says", text)
    found = json.loads(said(capsys, "check", str(tmp_path / "bare.toml"), "--json")[1])
    assert (found["proven"], found["regressed"], found["windows"] < 40) == (False, False, True)
    assert "energy" in found["unknown"]


def test_levels_come_from_the_profile(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """Where nobody gives any; where somebody does and the profile's is not among them, --batch is named."""
    profile, words = os.fspath(tmp_path / "p.toml"), ("-d", "sim:jetson-agx-orin", "-w", "efficientnet-b4")
    text, _, _ = Path(PROFILE).read_text().partition("[ladder]")
    (tmp_path / "p.toml").write_text(re.sub(r"^batch_size = \d+$", "batch_size = 6", text, flags=re.M))
    assert tomllib.loads(Path(profile).read_text())["point"]["batch_size"] == 6
    code, out, err = said(capsys, "check", profile, *SHORT)
    assert code in (0, 9), err
    assert "windows" in out
    code, out, err = said(capsys, "measure", "default", profile, *SHORT)
    assert code == 0, err
    # How far it has come, and no word of complaint.
    assert [line.partition(":")[0] for line in err.splitlines()] == ["1 pair", "2 pairs", "4 pairs"]
    code, out, err = said(capsys, "measure", "default", profile, *words, "--batch", "3", *SHORT)
    assert (code, out) == (2, "")
    assert "name its level with --batch" in err


def test_a_knob_that_only_levels_bring_has_that_of_none_as_well() -> None:
    """A command without a placeholder runs as it is by default, and a profile's batch size besides."""
    profile = replace(
        read_profile(Path(PROFILE)),
        point=OperatingPoint({"batch_size": 6}),
        workload_knobs=("batch_size",),
    )
    workload = open_workload("cmd:true")
    assert _widened(Setup(), workload, [profile]).batch_sizes == (1, 6)
    assert _widened(Setup(batch_sizes=(3,)), workload, [profile]).batch_sizes == (3,)
    six = open_workload("cmd:true", batch_sizes=(3, 6))
    assert _widened(Setup(), six, [profile]).batch_sizes is None


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


@pytest.mark.parametrize(
    ("regressed", "broken", "sound", "over", "verdict"),
    [
        (True, False, False, True, "does not keep its word"),
        (False, True, False, False, "does not keep its word"),
        (False, False, True, False, "keeps its word"),
        (False, False, False, True, "not proven, some windows speak against it"),
        (False, False, False, False, "not proven, nothing found against it"),
    ],
)
def test_a_verdict_has_words(regressed: bool, broken: bool, sound: bool, over: bool, verdict: str) -> None:
    """Either fault is enough to say that a profile does not keep its word."""
    found = SimpleNamespace(regressed=regressed, broken=broken, sound=sound, over=over)
    assert _check_verdict(found) == verdict
