"""Studies as the daemon runs them: a child that ends, followed by its journal."""

import itertools
import json
import signal
import sys
from collections.abc import Callable, Mapping
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from time import monotonic, sleep

import pytest
from daemons import LADDER, TUNED, House

from polythrottle.catalog.tuned_profiles import write_profile
from polythrottle.daemon.commands import StartStudy, StopStudy
from polythrottle.daemon.energy_accounts import Accounts
from polythrottle.daemon.history_store import HistoryStore
from polythrottle.daemon.study_process import Studies, StudyOutcome
from polythrottle.domain.clock import SystemClock
from polythrottle.domain.errors import DeviceError, InvalidInput
from polythrottle.domain.ladder import Ladder
from polythrottle.domain.measurement import Latency, Measurement
from polythrottle.domain.profile import Profile

POINT = LADDER.rungs[2].service.point
SCRIPT = """
import json, os, shutil, signal, sys, time
words = sys.argv[1:]
of = {name: words[words.index(name) + 1] for name in ("--journal", "--out", "--device", "--trials")}
here = os.path.dirname(os.path.abspath(of["--journal"]))
json.dump({"words": words, "token": os.environ.get("POLYTHROTTLE_TOKEN"), "nice": os.nice(0)}, open(MARK, "w"))
with open(of["--journal"], "a") as file:
    def line(**fields):
        file.write(json.dumps({"v": 2, **fields}) + "\\n")
        file.flush()
    line(event="study", constraints=[{"metric": "p99", "limit": 0.1, "relative": False}])
    for number, (joules, p99) in enumerate([(2.0, 0.05), (0.5, 0.2), (1.0, 0.08)]):
        line(event="started", number=number, point={"gpu_max_hz": 10**9 + number})
        seen = {"energy_j": joules, "latency": {"p99_s": p99}}
        line(event="completed", number=number, measurement=seen, requests={"sent": 100, "late": {"p99": 3}})
    file.write('{"torn')
    file.flush()
    END
"""


class Lender:
    """Notes what was lent."""

    def __init__(self, error: Exception | None = None) -> None:
        self.error, self.lent, self.back = error, 0, 0

    def lend(self) -> tuple[str, Mapping[str, str]]:
        """Lend it."""
        if self.error is not None:
            raise self.error
        self.lent += 1
        return "sim:jetson-agx-orin", {"POLYTHROTTLE_TOKEN": "token"}

    def take_back(self) -> None:
        """Take it back."""
        self.back += 1


def profile(ladder: Ladder | None = LADDER) -> Profile:
    """Return a profile as a study finds it."""
    seen = Measurement(Latency(0.02, p99_s=0.05), 0.2, 200.0, 40.0, idle_power_w=20.0)
    made = Profile("sim:jetson-agx-orin", "model.onnx", POINT, seen, slo=("p99<=100 ms",), ladder=ladder)
    return replace(made, workload_knobs=("batch_size",))


_TUNED_HERE = replace(TUNED, profile=profile())


def program(folder: Path, end: str) -> tuple[str, ...]:
    """Return a stand-in for ``polythrottle`` that ends in some way."""
    text = SCRIPT.replace("MARK", repr(str(folder / "mark.json"))).replace("END", end)
    return (sys.executable, "-c", text)


def finds(folder: Path) -> tuple[str, ...]:
    """Return a stand-in that finds a profile."""
    write_profile(profile(), folder / "found.toml")
    return program(folder, f"shutil.copy({str(folder / 'found.toml')!r}, of['--out'])")


def until(true: Callable[[], object]) -> None:
    """Wait for another process."""
    ends = monotonic() + 60
    while not true():
        assert monotonic() < ends
        sleep(0.01)


@pytest.fixture
def lender() -> Lender:
    """Return somebody who lends."""
    return Lender()


def studies(
    folder: Path,
    lender: Lender,
    words: tuple[str, ...],
    late_left: Callable[[float], float] | None = None,
    studied: Callable[[str, str, float, float], object] = lambda *_: None,
) -> Studies:
    """Return studies of a model."""
    folder.mkdir(exist_ok=True)
    record = HistoryStore(folder / "daemon.db")
    return Studies(folder, lender, record, SystemClock(), words, late_left=late_left, studied=studied)


def ended(study: Studies) -> StudyOutcome:
    """Return how a study came out."""
    found: list[StudyOutcome] = []
    until(lambda: (how := study.poll()) is not None and (found.append(how) or True))
    return found[0]


def test_a_study_is_followed_and_ends_with_a_profile(tmp_path: Path, lender: Lender) -> None:
    """Trials are counted, the best is the cheapest that holds the limit, and the loan is given back."""
    study = studies(tmp_path, lender, finds(tmp_path))
    study.start("drift", _TUNED_HERE)
    assert study.runs
    how = ended(study)
    assert how.profile is not None
    assert how.profile.is_file()
    shown = study.shown
    assert shown is not None
    assert (shown.state, shown.trials, shown.of, shown.best_j) == ("ended", 3, 30, 1.0)
    assert shown.best == {"gpu_max_hz": 10**9 + 2}
    assert (lender.lent, lender.back, study.runs) == (1, 1, False)


def test_the_child_gets_what_it_needs(tmp_path: Path, lender: Lender) -> None:
    """It is told device, workload, SLO, the older profile and options, has the token, and stands back."""
    study = studies(tmp_path, lender, finds(tmp_path))
    study.ask(7, {"risk": "0.05"})
    study.start("asked", _TUNED_HERE)
    ended(study)
    told = json.loads((tmp_path / "mark.json").read_text())
    words = told["words"]
    assert words[:1] == ["tune"]
    pairs = dict(itertools.pairwise(words))
    assert (pairs["--device"], pairs["--workload"]) == ("sim:jetson-agx-orin", "model.onnx")
    assert (pairs["--slo"], pairs["--risk"], pairs["--trials"]) == ("p99<=100ms", "0.05", "7")
    assert pairs["--as-prior"] == "a.toml"
    assert told["token"] == "token"


def test_a_study_that_is_stopped_is_continued(tmp_path: Path, lender: Lender) -> None:
    """Stopped, its process is interrupted and the board taken back at once; the next goes on with its journal."""
    study = studies(tmp_path, lender, program(tmp_path, "time.sleep(600)"))
    study.start("drift", _TUNED_HERE)
    until((tmp_path / "mark.json").exists)
    journal = study.shown.journal if study.shown else ""
    until(lambda: Path(journal).exists())
    study.stop("the board is needed")
    assert (study.runs, lender.back) == (False, 1)
    assert study.shown is not None
    assert study.shown.state == "stopped"
    study.start("drift", _TUNED_HERE)
    assert study.shown.journal == journal
    study.close()


def test_a_study_that_does_not_end_is_killed(tmp_path: Path, lender: Lender) -> None:
    """A child that ignores the interruption is gone after the daemon has ended."""
    study = studies(tmp_path, lender, program(tmp_path, "signal.signal(2, signal.SIG_IGN); line(x=1); time.sleep(600)"))
    study.start("drift", _TUNED_HERE)
    assert study._child is not None
    process, journal = study._child.process, study._child.journal
    until(lambda: journal.exists() and '"x"' in journal.read_text())
    study.stop("over")
    assert study._stopping is not None
    study._stopping.kill_at_s = 0.0
    study.poll()
    assert process.returncode == -signal.SIGKILL


@pytest.mark.parametrize(
    ("end", "failed", "words"),
    [
        ("sys.exit(5)", False, "no point that was tried"),
        ("sys.stderr.write('polythrottle: the model is gone\\n'); sys.exit(6)", True, "the model is gone"),
        ("os.kill(os.getpid(), 9)", True, "it was ended by signal 9"),
        ("sys.stderr.write('a remark\\n'); sys.stderr.flush(); os.kill(os.getpid(), 9)", True, "ended by signal 9"),
        ("sys.exit(0)", False, "no point that was tried"),
    ],
)
def test_every_end_is_told(tmp_path: Path, lender: Lender, end: str, failed: bool, words: str) -> None:
    """A study that finds nothing, fails or is killed says so, and the board comes back."""
    study = studies(tmp_path, lender, program(tmp_path, end))
    study.start("drift", _TUNED_HERE)
    how = ended(study)
    assert (how.profile, how.failed) == (None, failed)
    assert words in how.words
    assert lender.back == 1


def test_a_study_after_one_that_ended_is_another(tmp_path: Path, lender: Lender) -> None:
    """A new question about the same workload gets a journal of its own."""
    study = studies(tmp_path, lender, finds(tmp_path))
    journals = set()
    for _ in range(2):
        study.start("drift", _TUNED_HERE)
        assert study.shown is not None
        journals.add(study.shown.journal)
        ended(study)
    assert len(journals) == 2


@pytest.mark.parametrize("kept", [{"name": "x5"}, {"name": "../../x-1", "done": False}, {"name": 5}, {}, []])
def test_a_name_that_is_none_of_ours_is_no_study_to_go_on_with(tmp_path: Path, lender: Lender, kept: object) -> None:
    """Whatever the daemon's memory holds under it, the first study begins."""
    with closing(HistoryStore(tmp_path / "daemon.db")) as record:
        record.keep("study", kept)
    study = studies(tmp_path, lender, finds(tmp_path))
    study.start("drift", _TUNED_HERE)
    assert study.shown is not None
    assert Path(study.shown.journal).name == "study-1.jsonl"
    ended(study)


def test_what_cannot_be_lent_is_not_studied(tmp_path: Path) -> None:
    """A board that cannot be lent is an error, and no process runs."""
    study = studies(tmp_path, Lender(DeviceError("it is gone")), finds(tmp_path))
    with pytest.raises(DeviceError, match="it is gone"):
        study.start("drift", _TUNED_HERE)
    assert not study.runs


def test_a_program_that_is_not_there_gives_the_board_back(tmp_path: Path, lender: Lender) -> None:
    """A study that cannot be started is an error of the device, and the loan is ended."""
    study = studies(tmp_path, lender, (str(tmp_path / "none"),))
    with pytest.raises(DeviceError, match="no study could be started"):
        study.start("drift", _TUNED_HERE)
    assert (study.runs, lender.back) == (False, 1)


@pytest.mark.parametrize(
    "options",
    [{"journal": "x"}, {"out": "/etc/passwd"}, {"--risk": "1"}, {"risk": "--out"}, {"a b": "c"}, {"slo": "x"}],
)
def test_options_that_are_the_daemons_are_refused(tmp_path: Path, lender: Lender, options: dict[str, str]) -> None:
    """Nobody can make a study write somewhere else, or slip in a word."""
    with pytest.raises(InvalidInput):
        studies(tmp_path, lender, finds(tmp_path)).ask(5, options)


@pytest.mark.slow
def test_the_loop_compares_what_a_study_finds_with_what_it_had(tmp_path: Path) -> None:
    """A study asked for runs, its profile is followed in turns with the old one, and kept as it draws no more."""
    house = House(tmp_path / "daemon", program=finds(tmp_path))
    house.turns(5)
    asked = house.desk.hand_in(StartStudy(5))
    house.runner.answer()
    assert asked.result(timeout=0)["id"] == "study-1"
    assert house.desk.status.phase == "studying"
    assert house.board.done[-1] == "lend"
    until(lambda: house.turns(1) or not house.studies.runs)
    house.turns(2)
    assert house.desk.status.phase == "following"
    assert any("compared in turns" in words for words in house.words("study"))
    for _ in range(100):
        if len(house.words("study")) < 4:
            house.turns(60)
    assert any("is kept" in words for words in house.words("study"))
    assert house.desk.status.workload is not None
    assert house.desk.status.workload.profile is not None
    assert house.desk.status.workload.profile.endswith("study-1.toml")


def test_a_study_asked_for_can_be_stopped(tmp_path: Path) -> None:
    """Stopping it sets the board again."""
    house = House(tmp_path / "daemon", program=program(tmp_path, "time.sleep(600)"))
    house.turns(5)
    house.desk.hand_in(StartStudy(5))
    house.turns(2)
    assert house.desk.status.phase == "studying"
    house.desk.hand_in(StopStudy())
    house.turns(2)
    assert house.desk.status.phase == "following"
    assert house.board.applied is not None
    house.studies.close()


def test_a_guard_ends_a_study_at_once(tmp_path: Path) -> None:
    """Heat during a study ends it and leads to the cool point in the same turn."""
    house = House(tmp_path / "daemon", program=program(tmp_path, "time.sleep(600)"))
    house.turns(5)
    house.desk.hand_in(StartStudy(5))
    house.turns(2)
    house.board.temperature_c = 99.0
    house.turns(1)
    assert house.desk.status.phase == "safe"
    assert house.board.applied == LADDER.rungs[0].service.point
    assert not house.studies.runs
    house.studies.close()


def test_a_study_may_make_late_what_the_day_leaves(tmp_path: Path, lender: Lender) -> None:
    """Its error budget is of the day's requests and its own, and what it has spent of it is shown."""
    asked: list[float] = []

    def left(requests: float) -> float:
        asked.append(requests)
        return 12.5

    study = studies(tmp_path, lender, program(tmp_path, "time.sleep(600)"), left)
    study.ask(7, {})
    study.start("drift", _TUNED_HERE)
    until(lambda: study.poll() or (study.shown is not None and study.shown.trials == 3))
    assert study.shown is not None
    assert study.shown.words == "drift; 6 of 12.50 requests late beyond the SLO's own share"
    study.close()
    words = json.loads((tmp_path / "mark.json").read_text())["words"]
    assert words[words.index("--error-budget") + 1] == "12.50"
    assert asked == [7 * 1005]


@pytest.mark.parametrize("case", ["asked", "relative", "unseen", "uncounted"])
def test_a_study_has_no_error_budget_where_none_can_be_kept(tmp_path: Path, lender: Lender, case: str) -> None:
    """Somebody said another, the limit is a multiple, requests are sent elsewhere, or nobody counts the day's."""
    study = studies(tmp_path, lender, finds(tmp_path), late_left=None if case == "uncounted" else lambda _: 12.5)
    study.ask(7, {"error_budget": "3"} if case == "asked" else {})
    tuned = replace(_TUNED_HERE, slo=("p99<=1.2x",)) if case == "relative" else _TUNED_HERE
    study.start("drift", replace(tuned, workload="cmd:serve") if case == "unseen" else tuned)
    ended(study)
    words = json.loads((tmp_path / "mark.json").read_text())["words"]
    assert words.count("--error-budget") == (case == "asked")
    assert "12.50" not in words


RUNNING = 'file.write("\\n"); line(event="started", number=3, point={}, reserved=4.5)\n    '


def test_what_a_study_has_made_late_is_put_down(tmp_path: Path, lender: Lender) -> None:
    """Of three trials 6 beyond the SLO's share; what is not understood, as a torn line, adds nothing."""
    told: list[tuple[str, str, float, float]] = []
    study = studies(tmp_path, lender, finds(tmp_path), lambda _: 12.5, lambda *said: told.append(said))
    study.start("drift", _TUNED_HERE)
    ended(study)
    assert told[-1] == ("study-1", "", 300.0, pytest.approx(6.0))


@pytest.mark.parametrize("ends", ["stopped", "killed"])
def test_a_trial_whose_end_nobody_saw_is_put_down_with_all_it_was_given(
    tmp_path: Path, lender: Lender, ends: str
) -> None:
    """As the study itself counts it when it goes on; a trial that was interrupted in order says what it took."""
    interrupted = 'line(event="interrupted", number=3, requests={"sent": 50, "late": {"p99": 2}})'
    wait = f"signal.signal(signal.SIGINT, lambda *_: sys.exit({interrupted} or 3)); time.sleep(600)"
    words = program(tmp_path, RUNNING + (wait if ends == "stopped" else "os.kill(os.getpid(), signal.SIGKILL)"))
    told: list[tuple[str, str, float, float]] = []
    study = studies(tmp_path, lender, words, lambda _: 12.5, lambda *said: told.append(said))
    study.start("drift", _TUNED_HERE)
    if ends == "stopped":
        until(lambda: study.poll() or (study._child is not None and study._child.reserved == 4.5))
        study.close()
        assert told[-1] == ("study-1", "", 350.0, pytest.approx(7.5))
    else:
        assert ended(study).failed
        assert told[-1] == ("study-1", "", 300.0, pytest.approx(10.5))


def test_a_study_that_goes_on_says_all_it_has_made_late_again(tmp_path: Path, lender: Lender) -> None:
    """Under the same name, so that the account knows what of it is new."""
    accounts = Accounts(HistoryStore(tmp_path / "daemon.db"), lambda: 0.0)
    study = studies(tmp_path, lender, program(tmp_path, "time.sleep(600)"), lambda _: 12.5, accounts.studied)
    study.start("drift", _TUNED_HERE)
    until(lambda: study.poll() or accounts.shown_exploring.late == pytest.approx(6.0))
    study.close()
    again = Accounts(HistoryStore(tmp_path / "daemon.db"), lambda: 0.0)
    told: list[tuple[str, str, float, float]] = []

    def put_down(study: str, by: str, sent: float, late: float) -> None:
        told.append((study, by, sent, late))
        again.studied(study, by, sent, late)

    study = studies(tmp_path, lender, program(tmp_path, "sys.exit(5)"), lambda _: 12.5, put_down)
    study.start("drift", _TUNED_HERE)
    ended(study)
    assert told[-1][0] == "study-1"
    assert told[-1][2:] == (600.0, pytest.approx(12.0))
    assert again.shown_exploring.late == pytest.approx(12.0)


def test_a_study_of_a_simulated_board_costs_nobody_anything(tmp_path: Path, lender: Lender) -> None:
    """What it has made late is no user's."""
    told: list[object] = []
    lender.costless = True  # type: ignore[attr-defined]
    study = studies(tmp_path, lender, finds(tmp_path), lambda _: 12.5, lambda *said: told.append(said))
    study.start("drift", _TUNED_HERE)
    ended(study)
    assert told == []
