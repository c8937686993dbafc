"""The desk's side of studies that daemons have made elsewhere, with a daemon and a search that are stand-ins."""

import _thread
import json
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import pytest

from polythrottle import tune
from polythrottle.actuation.client.connection import TOKEN
from polythrottle.api import study_host
from polythrottle.api.study_host import HostNews, StudyHost, StudyHosts, progress
from polythrottle.catalog.tuned_profiles import read_profile, write_profile
from polythrottle.domain.errors import DeviceError, InvalidInput, PermissionDenied, TrialError
from polythrottle.domain.measurement import Latency, Measurement
from polythrottle.domain.profile import Profile
from polythrottle.domain.space import OperatingPoint
from polythrottle.storage import journal

PROFILE = Profile(
    "ssh://orin/jetson", "cmd:true", OperatingPoint({"gpu_freq_hz": 9e8}), Measurement(Latency(0.02), 0.2, 200.0, 40.0)
)
LENT: Mapping[str, Any] = {
    "state": "lent",
    "words": "somebody asked for it",
    "id": "study-3",
    "key": "0123abcd",
    "device": "actuator:/run/a.sock?device=jetson",
    "environment": {TOKEN: "feed", "LD_PRELOAD": "/evil.so"},
    "workload": "cmd:true",
    "slo": ["p99<=10s"],
    "trials": 4,
    "options": {"seed": "3"},
    "prior": "",
}


class Daemon:
    """A daemon that lends its board to whoever claims the study, once.

    Args:
        lent: What it says of it.
        refuse: Is called with what is said to it, and may raise.
    """

    def __init__(self, lent: Mapping[str, Any] = LENT, refuse: Callable[[Mapping[str, Any]], object] = dict) -> None:
        self.heard: list[Mapping[str, Any]] = []
        self._lent = lent
        self._refuse = refuse

    def host_study(self, host: str, claim: str = "", **said: Any) -> Mapping[str, Any]:
        """Answer as `HostedStudies.host` does."""
        self.heard.append(said)
        self._refuse(said)
        if not claim:
            return {"state": "waiting", "claim": "c", "words": "somebody asked for it"}
        if said.get("ended"):
            return {"state": "ended", "claim": "", "words": ""}
        return self._lent

    @property
    def last(self) -> Mapping[str, Any]:
        """What was said to it last."""
        return self.heard[-1]


@pytest.fixture
def state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return where journals are kept, and look often."""
    monkeypatch.setenv("POLYTHROTTLE_STATE_DIR", str(tmp_path / "state"))
    monkeypatch.setattr(study_host, "_LOOK_S", 0.02)
    return tmp_path / "state"


def serve(
    daemon: Daemon, monkeypatch: pytest.MonkeyPatch, search: str, tmp_path: Path, board: str = "ssh://orin"
) -> list[HostNews]:
    """Make one study for a daemon, with a program as the search; return what was told."""

    @contextmanager
    def reached(*_: object) -> Iterator[Daemon]:
        yield daemon

    monkeypatch.setattr(study_host, "daemon_of_board", reached)
    monkeypatch.setattr(study_host, "Client", reached)
    script = tmp_path / "search.py"
    script.write_text(f"import os, sys\nwords = sys.argv[1:]\n{search}")
    news: list[HostNews] = []

    def told(each: HostNews) -> bool:
        news.append(each)
        return True

    StudyHost(board, told, program=(sys.executable, str(script))).serve(once=True)
    return news


def test_a_study_is_searched_on_the_board_and_given_back(
    state: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its device is the board's own; of the environment it is told, only the loan's token counts."""
    write_profile(PROFILE, tmp_path / "found.toml")
    search = f"""
import json, shutil
open({str(tmp_path / "seen")!r}, "w").write(json.dumps([words, dict(os.environ)]))
shutil.copy({str(tmp_path / "found.toml")!r}, words[words.index("--out") + 1])
"""
    daemon = Daemon()
    news = serve(daemon, monkeypatch, search, tmp_path)
    words, environment = json.loads((tmp_path / "seen").read_text())
    assert words[:5] == ["tune", "--device", "ssh://orin/actuator:/run/a.sock?device=jetson", "--workload", "cmd:true"]
    assert "--seed 3 --trials 4" in " ".join(words)
    assert words[words.index("--journal") + 1].startswith(str(state))
    assert (environment[TOKEN], environment.get("LD_PRELOAD")) == ("feed", os.environ.get("LD_PRELOAD"))
    (tmp_path / "back.toml").write_text(daemon.last["profile"])
    assert read_profile(tmp_path / "back.toml").device == "jetson"
    assert [each.kind for each in news] == ["claimed", "lent", "ended"]


@pytest.mark.parametrize(
    ("board", "changed", "words"),
    [
        ("ssh://orin", {"device": "sim:jetson-nano"}, "its board is simulated: run the study host on that machine"),
        ("ssh://orin", {"device": "jetson,ssh://other"}, "lends more than a board of its own"),
        ("ssh://orin", {"device": "jetson?meter=cmd:reboot"}, "lends more than a board of its own"),
        ("", {"device": "--help"}, "of another version"),
        ("", {"workload": "-x"}, "of another version"),
        ("", {"workload": 3}, "of another version"),
        ("", {"slo": None}, "of another version"),
        ("", {"trials": "many"}, "of another version"),
        ("", {"trials": 10_001}, "that no daemon asks for"),
        ("", {"id": "../../x"}, "that no daemon asks for"),
        ("", {"key": "../x"}, "that no daemon asks for"),
        ("", {"options": {"journal": "/etc/passwd"}}, "that no daemon asks for"),
        ("", {"options": {"seed": "3 --out x"}}, "that no daemon asks for"),
        ("", {"environment": 7}, "of another version"),
        ("", {"prior": "\ud800"}, "of another version"),
        ("", {"error_budget": 7}, "of another version"),
        ("", {"error_budget": "7 --out x"}, "that no daemon asks for"),
    ],
)
def test_a_study_that_no_daemon_asks_for_is_refused(
    board: str, changed: Mapping[str, Any], words: str, state: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before anything runs; the daemon is told that it failed."""
    daemon = Daemon({**LENT, **changed})
    search = f"open({str(tmp_path / 'seen')!r}, 'w')"
    with pytest.raises(InvalidInput, match=words):
        serve(daemon, monkeypatch, search, tmp_path, board)
    assert daemon.last["failed"]
    assert not (tmp_path / "seen").exists()


@pytest.mark.parametrize("begun", ["", "7.25", "9"])
def test_what_may_be_late_is_bounded_as_the_daemon_says(
    begun: str, state: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A study that goes on has what it was begun with; what was spent is told of the bound that was lent."""
    folder = state / "studies" / "hosted" / "ssh-orin"
    search = f"""
import json
open({str(tmp_path / "seen")!r}, "w").write(json.dumps(words))
open(words[words.index("--journal") + 1], "ab").write(b"")
sys.exit(5)
"""
    journal_path = folder / "study-3-0123abcd.jsonl"
    if begun:
        folder.mkdir(parents=True)
        words = {"slo": "p99<=45ms", "method": "random", "trials": 3, "journal": journal_path, "error_budget": begun}
        tune("sim:jetson-orin-nano", "resnet50", presets=False, out=tmp_path / "p.toml", **words)
    daemon = Daemon({**LENT, "error_budget": "7.25"})
    serve(daemon, monkeypatch, search, tmp_path)
    words = json.loads((tmp_path / "seen").read_text())
    assert words[words.index("--error-budget") + 1] == (begun or "7.25")
    assert ("late" in daemon.last) == (begun == "7.25")
    if begun == "7.25":
        assert daemon.last["late"] == journal.late_requests(journal_path).most_beyond()


@pytest.mark.parametrize("lent", ["", "7.25"])
def test_a_daemon_that_counts_is_told_of_all_that_was_sent(
    lent: str, state: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By whatever bound the study was begun with: that of an earlier loan, or one that somebody asked for."""
    folder = state / "studies" / "hosted" / "ssh-orin"
    folder.mkdir(parents=True)
    kept = folder / "study-3-0123abcd.jsonl"
    words = {"slo": "p99<=45ms", "method": "random", "trials": 3, "journal": kept, "error_budget": "9"}
    tune("sim:jetson-orin-nano", "resnet50", presets=False, out=tmp_path / "p.toml", **words)
    daemon = Daemon({**LENT, "error_budget": lent, "counted": True})
    serve(daemon, monkeypatch, "sys.exit(5)", tmp_path)
    spent = journal.late_requests(kept)
    told = {name: daemon.last[name] for name in ("late", "sent", "bound")}
    assert told == {"late": spent.most_beyond(), "sent": spent.sent, "bound": "9"}
    assert spent.sent > 0


def test_a_daemon_that_bounds_nothing_is_told_of_no_account(
    state: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As one of an older version, which knows no such word."""
    search = f"import json; open({str(tmp_path / 'seen')!r}, 'w').write(json.dumps(words)); sys.exit(5)"
    daemon = Daemon()
    serve(daemon, monkeypatch, search, tmp_path)
    assert "--error-budget" not in json.loads((tmp_path / "seen").read_text())
    assert not any("late" in said for said in daemon.heard)


@pytest.mark.parametrize(
    ("search", "said"),
    [
        ("sys.exit('polythrottle: p99 is no unit')", {"failed": True, "words": "p99 is no unit"}),
        ("sys.exit(6)", {"failed": True, "words": "exit code 6"}),
        ("sys.exit(5)", {"words": "no point that was tried is to be followed"}),
    ],
)
def test_how_a_study_ends_is_told(
    search: str, said: Mapping[str, Any], state: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the last line of what it printed where it failed."""
    daemon = Daemon()
    ends = nullcontext()
    if "failed" in said:
        ends = pytest.raises(TrialError, match=f"study-3: {said['words']}")  # type: ignore[assignment]
    with ends:
        serve(daemon, monkeypatch, search, tmp_path)
    assert daemon.last == {"ended": True, **said}


def test_a_claim_that_is_over_ends_the_search(state: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Interrupted, so that it puts the board back; the host goes on, and makes the study when it is due again."""
    over = iter([True])

    def refuse(said: Mapping[str, Any]) -> None:
        if (tmp_path / "begun").exists() and "trials" in said and next(over, False):
            raise InvalidInput("this claim is over: the board was taken back; claim the study again")

    search = f"""
import pathlib, time
mark = pathlib.Path({str(tmp_path / "begun")!r})
if mark.exists():
    sys.exit(5)
try:
    mark.touch()
    time.sleep(60)
except KeyboardInterrupt:
    pathlib.Path({str(tmp_path / "put back")!r}).touch()
"""
    news = serve(Daemon(refuse=refuse), monkeypatch, search, tmp_path)
    assert (tmp_path / "put back").exists()
    assert [each.kind for each in news] == ["claimed", "lent", "failed", "claimed", "lent", "ended"]


def test_a_host_that_is_ended_leaves(state: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By a Ctrl-C: the search is interrupted before the daemon is told, so that it has put the board back."""
    daemon = Daemon()

    @contextmanager
    def reached(*_: object) -> Iterator[Daemon]:
        yield daemon

    monkeypatch.setattr(study_host, "daemon_of_board", reached)
    script = tmp_path / "polythrottle.py"
    script.write_text("import time\nprint(flush=True)\ntime.sleep(60)")
    monkeypatch.setattr(StudyHost.__init__, "__defaults__", (None, (sys.executable, str(script))))
    hosts = StudyHosts(["ssh://orin"], lambda news: True, None, once=False)
    ends_s = time.monotonic() + 30
    while not any("trials" in said for said in daemon.heard) and time.monotonic() < ends_s:
        time.sleep(0.01)
    threading.Timer(0.2, _thread.interrupt_main).start()
    with pytest.raises(KeyboardInterrupt):
        hosts.wait()
    hosts.stop()
    assert daemon.last == {"leaves": True}
    assert hosts.failures == {}


def test_a_board_that_is_away_is_waited_for(state: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It says so once; a daemon that lets this user not in ends the host."""
    errors = iter([DeviceError("no way"), DeviceError("no way"), PermissionDenied("not you")])

    def away(*_: object) -> Any:
        raise next(errors)

    monkeypatch.setattr(study_host, "daemon_of_board", away)
    news: list[HostNews] = []
    hosts = StudyHosts(["ssh://orin"], lambda each: news.append(each) is None, None, once=False)
    hosts.wait()
    assert [(each.kind, each.words) for each in news] == [("away", "no way")]
    assert str(hosts.failures["ssh://orin"]) == "not you"


def test_for_once_a_board_that_is_away_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody waits for it."""

    def away(*_: object) -> Any:
        raise DeviceError("no way")

    monkeypatch.setattr(study_host, "daemon_of_board", away)
    hosts = StudyHosts(["ssh://orin"], lambda each: True, None, once=True)
    hosts.wait()
    assert str(hosts.failures["ssh://orin"]) == "no way"


def test_a_host_that_nobody_reads_leaves(state: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As where its output went into a pipe that has ended."""
    daemon = Daemon()

    @contextmanager
    def reached(*_: object) -> Iterator[Daemon]:
        yield daemon

    monkeypatch.setattr(study_host, "daemon_of_board", reached)
    hosts = StudyHosts(["ssh://orin"], lambda each: False, None, once=False)
    hosts.wait()
    assert daemon.last == {"leaves": True}


def test_how_far_a_journal_is(tmp_path: Path) -> None:
    """Trials that have ended, and the least energy of those that hold the limit, which is not the least of all."""
    path = tmp_path / "journal.jsonl"
    assert progress(path) == (0, None)
    words = {"slo": "p99<=45ms", "method": "random", "trials": 8, "journal": path, "out": tmp_path / "p.toml"}
    tune("sim:jetson-orin-nano", "resnet50", presets=False, **words)
    study = journal.read(path)
    energies_j = [trial.measurement.energy_j for trial in study.completed if trial.measurement is not None]
    assert study.best is not None
    assert study.best.measurement is not None
    assert progress(path) == (len(study.trials), study.best.measurement.energy_j)
    assert min(energies_j) < study.best.measurement.energy_j
    path.write_text("{torn")
    assert progress(path) == (0, None)
