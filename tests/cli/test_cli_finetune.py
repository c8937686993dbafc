"""`polythrottle finetune`: on simulated boards and on this CPU, and whatever a stranger may type."""

import json
import re
import shlex
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace

import pytest
from trainer_jobs import data_folder, exported

from polythrottle.cli.commands import run
from polythrottle.cli.render.finetune import LiveRun, _capped, show_time
from polythrottle.domain.arrivals import Poisson
from polythrottle.storage.paths import state_dir
from polythrottle.training.beside.live_run import RunProgress
from polythrottle.training.beside.scheduler import Terms
from polythrottle.training.beside.serving_loop import Result, Training

_SIM = ("-d", "sim:jetson-tx2", "-w", "efficientnet-b0", "--slo", "p99<=500ms", "--rate", "4/s")
_NIGHT = ("--policy", "off-peak", "--between", "22:00-06:00")
_JOB = ("--samples", "64", "--train-batch", "16", "--output", "10")


def _out(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    assert run(["finetune", *words]) == 0, capsys.readouterr().err
    return capsys.readouterr().out


@pytest.mark.parametrize("policy", ["interleave", "greedy", "paper", "off-peak", "none"])
def test_a_simulated_run_says_that_it_is_one(capsys: pytest.CaptureFixture[str], policy: str) -> None:
    """Every policy gives requests, percentiles, samples and joules, in 80 columns and as JSON, all called simulated."""
    shown = _out(capsys, "run", *_SIM, *_JOB, "--policy", policy, "--seconds", "5")
    assert "simulated" in shown
    assert max(map(len, shown.splitlines())) <= 80
    told = json.loads(_out(capsys, "run", *_SIM, *_JOB, "--policy", policy, "--seconds", "5", "--json"))
    assert (told["simulated"], told["policy"], told["energy_kind"]) == (True, policy, "simulated")
    assert told["requests"] == told["answered"] + told["dropped"] > 0
    assert told["training"]["samples"] == (0 if policy == "none" else 64)
    assert told["energy_j"] > 0


@pytest.mark.slow
def test_a_power_is_told_with_what_it_cost(capsys: pytest.CaptureFixture[str]) -> None:
    """The mean is below it, how long fine-tuning waited is said, and more power makes it wait less."""
    shown = _out(capsys, "run", *_SIM, *_JOB, "--power", "3.5W", "--seconds", "60")
    assert re.search(r"power +3\.5 W on average at most: kept; fine-tuning waited \d", shown)
    assert max(map(len, shown.splitlines())) <= 80
    words = ("run", *_SIM, *_JOB, "--seconds", "60", "--epochs", "4", "--json")
    tight, loose = (json.loads(_out(capsys, *words, "--power", power)) for power in ("3.5W", "50W"))
    assert (tight["power_cap_w"], loose["power_cap_w"]) == (3.5, 50.0)
    assert tight["mean_power_w"] <= 3.5
    assert tight["training"]["waited_s"] > loose["training"]["waited_s"]
    assert json.loads(_out(capsys, *words))["training"]["waited_s"] is None


@pytest.mark.slow
def test_by_the_hour_a_night_is_planned_and_run(capsys: pytest.CaptureFixture[str]) -> None:
    """A simulated board is told when it begins; a plan says how much of its time the hours are."""
    words = (*_SIM, *_JOB, *_NIGHT, "--begin", "21:59")
    shown = _out(capsys, "run", *words, "--seconds", "90", "--figure", "night.svg")
    assert "off-peak" in Path("night.svg").read_text()
    assert "off-peak at 22:00-06:00" in shown
    told = json.loads(_out(capsys, "run", *words, "--seconds", "90", "--json"))
    assert told["hours"] == "22:00-06:00"
    assert 60.0 < told["training"]["done_s"] < 90.0
    planned = _out(capsys, "plan", *words, "--hours", "24", "--epochs", "1000000")
    assert re.search(r"hours +22:00-06:00, 8 h 00 min of this time", planned)
    assert "not within this time" in planned
    assert max(map(len, planned.splitlines())) <= 80
    document = json.loads(_out(capsys, "plan", *words, "--by", "06:00", "--json"))
    assert (document["hours"], document["length_s"]) == ("22:00-06:00", 8 * 3600.0 + 60.0)
    assert document["within_hours_s"] == 8 * 3600.0


@pytest.mark.slow
def test_a_plan_and_a_run_begin_at_the_same_time_of_day(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Who does not say when a simulated board begins gets the clock's time for both, from which --by is measured."""
    monkeypatch.setattr("polythrottle.training.beside.scheduler.wall_day_s", lambda wall_s: 11 * 3600.0 + 600.0)
    words = (*_SIM, *_JOB, "--policy", "off-peak", "--between", "11:12-11:14", "--by", "11:15", "--json")
    planned, done = (json.loads(_out(capsys, name, *words)) for name in ("plan", "run"))
    assert (planned["length_s"], planned["within_hours_s"]) == (300.0, 120.0)
    assert planned["done_s"][0] <= done["training"]["done_s"] <= planned["done_s"][1]
    assert 300.0 <= done["span_s"] < 302.0


def test_energy_is_called_what_it_is(capsys: pytest.CaptureFixture[str]) -> None:
    """In a plan as in a run, for people and as JSON."""
    words = ("plan", *_SIM, *_JOB, "--hours", "1")
    assert re.search(r"energy .* added\s+\(simulated\)", _out(capsys, *words), re.DOTALL)
    assert json.loads(_out(capsys, *words, "--json"))["energy_kind"] == "simulated"


def test_an_interrupted_simulation_says_that_nothing_is_kept(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As Ctrl-C and a termination do, in one line, with the shells' exit code."""

    def interrupted(*given: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("polythrottle.training.beside.simulated_run.run_simulated", interrupted)
    assert run(["finetune", "run", *_SIM]) == 130
    told = capsys.readouterr()
    assert "nothing is kept" in told.err
    assert (told.err.count("\n"), told.out) == (1, "")


def test_the_same_words_give_the_same_simulated_run(capsys: pytest.CaptureFixture[str]) -> None:
    """Another seed gives other requests."""
    runs = [_out(capsys, "run", *_SIM, *_JOB, "--seconds", "5", "--json", "--seed", seed) for seed in ("1", "1", "2")]
    assert runs[0] == runs[1] != runs[2]


def test_a_plan_is_ranges(capsys: pytest.CaptureFixture[str]) -> None:
    """How many epochs by a time within a power, and what that costs; more hours, more epochs."""
    words = ("plan", *_SIM, *_JOB, "--epochs", "1000000", "--power", "6W")
    few, many = (json.loads(_out(capsys, *words, "--hours", hours, "--json")) for hours in ("1", "2"))
    assert few["simulated"] is True
    assert 0 < few["epochs"][0] < few["epochs"][1]
    assert many["epochs"][0] > few["epochs"][0]
    assert few["done_s"] == [None, None]
    shown = _out(capsys, *words, "--by", "06:00")
    assert "not within this time" in shown
    assert max(map(len, shown.splitlines())) <= 80


@pytest.mark.slow
def test_a_profile_shows_the_papers_model_beside_ours(capsys: pytest.CaptureFixture[str]) -> None:
    """Errors of held-out co-runs, before and after requests."""
    words = ("profile", "-d", "sim:jetson-agx-orin", "-w", "efficientnet-b4", *_JOB, "--requests", "20")
    shown = _out(capsys, *words)
    assert re.search(r"paper +0", shown)
    assert re.search(r"polythrottle +20", shown)
    assert max(map(len, shown.splitlines())) <= 80
    told = json.loads(_out(capsys, *words, "--json"))
    assert [each["predictor"] for each in told["errors"]] == ["paper", "polythrottle", "polythrottle"]


@pytest.fixture
def real(tmp_path: Path) -> list[str]:
    """Return the words for a tiny model on this CPU."""
    data_folder(tmp_path / "data")
    exported(tmp_path / "tiny.pt2")
    place = ["-d", "cpu", "-w", "tiny.pt2", "--threads", "1", "--slo", "p99<=5s", "--rate", "50/s"]
    return [*place, "--data", "data", "--job", "job", "--train-batch", "8"]


@pytest.mark.slow
def test_a_real_job_is_done_seen_and_planned(real: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    """On this CPU a job is planned, trained to its end beside requests, and its state read from its folder."""
    planned = json.loads(_out(capsys, "plan", *real, "--epochs", "12", "--hours", "1", "--json"))
    assert planned["simulated"] is False
    assert planned["epochs"] == [12.0, 12.0]
    assert planned["energy_kind"] in ("estimated", "measured")
    told = json.loads(_out(capsys, "run", *real, "--epochs", "12", "--json"))
    assert [each.resolve() for each in (state_dir() / "finetune").iterdir()] == [Path("job").resolve()]
    assert told["training"]["finished"] is True
    assert told["energy_kind"] in ("estimated", "measured")
    stands = json.loads(_out(capsys, "status", "job", "--json"))
    assert (stands["finished"], stands["running"], stands["epoch"]) == (True, False, 12)
    shown = _out(capsys, "status", "job")
    assert "finished" in shown
    assert max(map(len, shown.splitlines())) <= 80
    for damage in ('{"x": NaN, "holds": true}', '{"accuracy": NaN}', "[]", '{"accuracy": 1e999, "samples": 4}'):
        Path("job/validation.json").write_text(damage)
        for words in (("status", "job"), ("status", "job", "--json")):
            assert run(["finetune", *words]) == 4
            told = capsys.readouterr()
            assert "validation.json is damaged" in told.err
            assert (told.err.count("\n"), told.out) == (1, "")


@pytest.mark.slow
def test_fine_tuning_that_fails_is_the_exit_code(
    real: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """After what was found, which says that inference went on: 8 for a full disk."""
    training = Training(8, 1, 0, 12, False, stopped="No space left on device", exit_code=8)
    ran = ("tiny on cpu", False, "interleave", "poisson:50/s", 5.0, 1.0)
    found = Result(*ran, 1, 0, 0, (0.1,), training, 1.0, "estimated", "this machine")
    monkeypatch.setattr("polythrottle.training.beside.live_run.run", lambda *given: found)
    assert run(["finetune", "run", *real]) == 8
    told = capsys.readouterr()
    assert "fine-tuning, not inference: No space left on device" in told.out
    assert run(["finetune", "run", *real, "--json"]) == 8
    assert json.loads(capsys.readouterr().out)["training"]["exit_code"] == 8


def test_the_live_line_counts_no_epoch_beyond_the_last(capsys: pytest.CaptureFixture[str]) -> None:
    """Of 40 epochs there is none that is the 41st: the job is finished."""
    live = LiveRun(Terms(1.0, Poisson(1.0), seconds=100.0))
    live.told(RunProgress(20.0, 5, 0, 320, 39, 8, "training"))
    live.told(RunProgress(40.0, 9, 0, 328, 40, 0, "finished"))
    first, last = capsys.readouterr().err.splitlines()
    assert first.endswith("epoch 40, training")
    assert last.endswith("328 trained, finished")


@pytest.mark.slow
def test_the_run_on_a_cpu_that_the_page_shows_works(tmp_path: Path) -> None:
    """As printed, but with fewer epochs, and a limit that a busy machine holds too."""
    root = Path(__file__).resolve().parents[2]
    (tmp_path / "examples").symlink_to(root / "examples")
    text = (root / "docs" / "finetuning.md").read_text().replace("\\\n", " ")
    found = re.search(r"```bash\n(python examples/finetune.py)\n(polythrottle finetune run -d cpu .*)\n```", text)
    assert found is not None
    first, second = (shlex.split(line) for line in found.groups())
    changed = [{"30": "2", "p99<=100ms": "p99<=5s"}.get(word, word) for word in second[1:]]
    assert changed != second[1:]
    for command in ([sys.executable, *first[1:]], [sys.executable, "-m", "polythrottle", *changed]):
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
    assert "finished" in done.stdout
    assert max(map(len, (done.stdout + done.stderr).splitlines())) <= 80


@pytest.mark.slow
def test_a_real_profile_leaves_no_job_behind(
    real: list[str], capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """Co-runs are made with a job of their own; where there are too few different ones it says so."""
    place = [*real[:6], "--data", "data", "--train-batch", "8"]
    assert run(["finetune", "profile", *place, "--held-out", "400"]) == 2
    assert "ask for fewer" in capsys.readouterr().err
    assert sorted(path.name for path in tmp_path.iterdir()) == ["data", "tiny.pt2"]


_CASES: list[tuple[Sequence[str], int, str]] = [
    (("run",), 2, "--workload"),
    (("run", "-w", "m:f", "-d", "cpu"), 2, "--slo"),
    (("run", "-w", "m:f", "-d", "cpu", "--slo", "p99<=1s"), 2, "--rate 8/s"),
    (("run", *_SIM, "--arrivals", "uniform:1/s"), 2, "only one of the two"),
    (("run", *_SIM[:6], "--arrivals", "closed"), 2, "by the clock"),
    (("run", *_SIM, "--policy", "gready"), 3, "greedy"),
    (("run", *_SIM, "--data", "x"), 2, "trains no real model"),
    (("run", *_SIM, "--samples", "0"), 2, "at least 1"),
    (("run", *_SIM, "--seconds", "0"), 2, "above zero"),
    (("run", *_SIM, "--seconds", "nan"), 2, "above zero"),
    (("run", *_SIM, "--seconds", "5", "--by", "06:00"), 2, "leave one out"),
    (("run", *_SIM, "--by", "6 o'clock"), 2, "06:00"),
    (("run", *_SIM, "--by", "24:30"), 2, "06:00"),
    (("run", *_SIM, "--seed", "-1"), 2, "0 or more"),
    (("run", *_SIM, "--threads", "2"), 2, "no --input and no --threads"),
    (("run", *_SIM, "--batch", "0"), 2, "above zero"),
    (("run", "-d", "sim:nonesuch", *_SIM[2:]), 3, "nonesuch"),
    (("run", "-d", "sim:jetson-tx2?noise=2", *_SIM[2:]), 2, "noise"),
    (("run", "-d", "sim:jetson-tx2", "-w", "nonesuch", *_SIM[4:]), 3, "nonesuch"),
    (("run", *_SIM[:4], "--slo", "mean<=1s", "--rate", "4/s"), 2, "p99"),
    (("run", *_SIM[:4], "--slo", "p99<=1.2x", "--rate", "4/s"), 2, "p99"),
    (("run", *_SIM[:4], "--slo", "p99<=1ms", "--rate", "4/s"), 5, "inference alone does not hold 1 ms"),
    (("run", *_SIM[:6], "--rate", "4000/s"), 5, "inference alone"),
    (("run", *_SIM[:6], "--rate", "4"), 2, "/s"),
    (("run", "-d", "replay:x.csv", *_SIM[2:], "--data", "d", "--job", "j"), 2, "cannot fine-tune"),
    (("run", "-d", "ssh://orin/cpu", "-w", "m.onnx", *_SIM[4:], "--data", "d", "--job", "j"), 2, "served over SSH"),
    (("profile", "-d", "ssh://orin/cpu?meter=cmd:x", "-w", "m:f", "--data", "d"), 2, "leave it out over SSH"),
    (("run", "-d", "ssh://orin/jetsn", "-w", "m:f", *_SIM[4:], "--data", "d", "--job", "j"), 3, "did you mean jetson?"),
    (("profile", "-d", "ssh://orin/unknown", "-w", "m:f", "--data", "d"), 3, "over SSH it is jetson, nvml:"),
    (("status", "j", "-d", "ssh://orin/unknown"), 3, "over SSH it is jetson, nvml:"),
    (("status", "job", "-d", "cpu"), 2, "--device names a board over SSH"),
    (("status", "job", "-d", "ssh:nano"), 2, "names no board"),
    (("run", "-d", "cpu", *_SIM[2:], "--data", "d", "--job", "j"), 2, "simulated boards"),
    (("run", "-d", "cpu", "-w", "m:f", *_SIM[4:]), 2, "--data FOLDER"),
    (("run", "-d", "cpu", "-w", "m:f", *_SIM[4:], "--data", "d", "--job", "j", "--epochs", "0"), 2, "epochs"),
    (("run", "-d", "cpu", "-w", "m:f", *_SIM[4:], "--data", "d", "--job", "j", "--threads", "0"), 2, "--threads"),
    (("plan", *_SIM), 2, "--by 06:00"),
    (("plan", *_SIM, "--hours", "8", "--power", "20"), 2, "W"),
    (("plan", *_SIM, "--hours", "8", "--power", "0W"), 2, "above 0"),
    (("plan", *_SIM, "--hours", "-8"), 2, "above 0"),
    (("plan", *_SIM, "--hours", "8", "--policy", "greedy"), 2, "cannot be planned"),
    (("run", *_SIM, "--between", "22:00-06:00"), 2, "goes by no hours"),
    (("run", *_SIM, *_NIGHT[:2], "--between", "22:00"), 2, "like 22:00-06:00"),
    (("run", *_SIM, *_NIGHT[:2], "--between", "22:00-22:00"), 2, "nothing lies between"),
    (("run", *_SIM, *_NIGHT, "--begin", "noon"), 2, "like 06:00"),
    (("run", "-d", "cpu", "-w", "m:f", *_SIM[4:], "--begin", "12:00"), 2, "goes by the clock"),
    (("run", *_SIM, "--policy", "none", "--power", "20W"), 2, "inference alone"),
    (("run", *_SIM, "--figure", "run.bmp"), 2, ".png"),
    (("run", *_SIM, "--figure", "nowhere/run.png"), 8, "no folder"),
    (("run", *_SIM, "--power", "1W"), 2, "inference alone draws"),
    (("run", *_SIM, "--power", "0W"), 2, "above 0 W"),
    (("run", *_SIM, "--power", "lots"), 2, "lots"),
    (("plan", *_SIM, *_NIGHT, "--hours", "1", "--begin", "12:00"), 2, "none of the hours"),
    (("run", *_SIM, *_NIGHT, "--seconds", "60", "--begin", "12:00"), 2, "22:00-06:00 begins in 10 h 00 min"),
    (("run", *_SIM, *_NIGHT, "--begin", "12:00"), 2, "22:00-06:00 begins in 10 h 00 min"),
    (("plan", *_SIM, "--hours", "1", "--power", "1W"), 2, "inference alone draws"),
    (("run", *_SIM, "--batch", "4096"), 2, "batches of 64 requests at most"),
    (("profile", *_SIM[:4], "--batch", "1000"), 2, "batches of 64 requests at most"),
    (("profile", *_SIM[:4], "--requests", "1000000000"), 2, "100,000 at most"),
    (("plan", *_SIM, "--hours", "1e300"), 2, "87660 (ten years) at most"),
    (("plan", *_SIM, "--hours", "1e308"), 2, "87660 (ten years) at most"),
    (("plan", *_SIM, "--hours", "nan"), 2, "87660 (ten years) at most"),
    (("run", *_SIM, "--seconds", "1e300"), 2, "ten years"),
    (("run", *_SIM, "--seconds", "2e6"), 2, "seconds are too many to simulate"),
    (("run", *_SIM, "--seconds", "9e5"), 2, "requests are too many to simulate"),
    (("run", *_SIM, "--epochs", "1000000000"), 2, "slices of fine-tuning are too many"),
    (("run", *_SIM, "--output", "9" * 400), 2, "1,000,000,000 at most"),
    (("run", *_SIM, "--learning-rate", "nan"), 2, "--learning-rate must be above 0"),
    (("profile", *_SIM[:4], "--held-out", "1"), 2, "at least"),
    (("profile", *_SIM[:4], "--requests", "-1"), 2, "--requests is 0 or more"),
    (("status", "nowhere"), 4, "holds no fine-tuning job"),
]


@pytest.mark.slow
@pytest.mark.parametrize(("words", "code", "says"), _CASES, ids=[" ".join(each[0])[:70] for each in _CASES])
def test_bad_words_get_one_clear_line(
    words: Sequence[str], code: int, says: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """With the exit code of their kind, and nothing on standard output."""
    assert run(["finetune", *words]) == code
    told = capsys.readouterr()
    assert says in told.err
    assert told.err.count("\n") == 1
    assert told.out == ""
    assert "m" not in sys.modules


@pytest.mark.slow
def test_data_that_cannot_be_used_are_told(real: list[str], capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """No folder, or a folder without samples: one line with the trainer's reason."""
    (tmp_path / "empty").mkdir()
    for folder, code, says in (("nowhere", 4, "cannot be read"), ("empty", 2, "holds no samples")):
        words = [folder if word == "data" else word for word in real]
        assert run(["finetune", "run", *words]) == code
        told = capsys.readouterr().err
        assert says in told
        assert told.count("\n") == 1


@pytest.mark.parametrize(("drawn_w", "word"), [(9.9, "kept"), (10.0, "kept"), (10.1, "exceeded"), (None, "exceeded")])
def test_a_bound_on_power_is_said_to_be_kept_only_where_it_was(drawn_w: float | None, word: str) -> None:
    """An unknown mean is no mean below the bound."""
    found = SimpleNamespace(mean_power_w=drawn_w, training=SimpleNamespace(waited_s=2.0))
    assert _capped(found, 10.0).startswith(f"10 W on average at most: {word}")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("seconds", "shown"),
    [(45, "45 s"), (119, "119 s"), (120, "2 min"), (3540, "59 min"), (3600, "1 h 00 min"), (28860, "8 h 01 min")],
)
def test_a_length_of_time_is_shown_in_the_unit_people_say_it_in(seconds: float, shown: str) -> None:
    """Seconds below two minutes, minutes below an hour, hours and minutes beyond."""
    assert show_time(seconds) == shown
