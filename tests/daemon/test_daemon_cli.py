"""The daemon as people run it: real processes, on a simulated board and behind an actuator on a planted one."""

import io
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from dataclasses import replace
from pathlib import Path

import pytest
from actuators import BOARD, GPU, Process, until
from daemons import LADDER

from polythrottle.backends import open_device
from polythrottle.catalog.tuned_profiles import read_profile, write_profile
from polythrottle.cli import daemon_process
from polythrottle.cli.commands import run
from polythrottle.cli.daemon_process import EventPrinter, line_of
from polythrottle.cli.render.status import print_status
from polythrottle.daemon.client import Client, Gone
from polythrottle.daemon.followed_profile import changed
from polythrottle.daemon.loop.mailbox import stamp
from polythrottle.daemon.observation import RequestStats
from polythrottle.daemon.status import BudgetShown, ExploringShown, Happened, RungShown, SavedShown, Status
from polythrottle.daemon.web import own_page
from polythrottle.domain.arrivals import Arrivals, Day
from polythrottle.domain.errors import INTERRUPTED, DeviceError, InvalidInput, PolythrottleError, UnknownName
from polythrottle.domain.ladder import Ladder, Rung
from polythrottle.domain.measurement import EnergyKind, Interval, Latency, Measurement
from polythrottle.domain.profile import Profile
from polythrottle.domain.space import OperatingPoint
from polythrottle.storage.identity import identity_of
from polythrottle.testing import FakeKernel, plant

SEEN = RequestStats(30, 30, 0, 0, 0.02, 0.01)


def measured(joules: float, kind: EnergyKind) -> Measurement:
    """Return a measurement with all that a daemon can use."""
    latency = Latency(0.02, p99_s=0.05)
    ends = {"energy": Interval(0.99 * joules, 1.01 * joules)}
    return Measurement(latency, joules, 100.0, joules * 100, kind, "module", intervals=ends, idle_power_w=joules * 50)


def profile(device: str, points: tuple[OperatingPoint, ...], kind: EnergyKind = EnergyKind.MEASURED) -> Profile:
    """Return a profile whose ladder has these points."""
    rungs = tuple(
        Rung(each.rate_per_s, replace(each.service, point=point), 0.0, each.power_w, each.p99_s)
        for each, point in zip(LADDER.rungs, points, strict=False)
    )
    board = open_device(device)
    made = Profile(device, "resnet50", points[-1], measured(0.2, kind), measured(0.4, kind), ("p99<=100 ms",))
    known = {"workload_knobs": ("batch_size",), "identity": dict(identity_of(board)), "ladder": Ladder(0.1, rungs)}
    return replace(made, **known)  # type: ignore[arg-type]


class Daemon:
    """A daemon in a process of its own."""

    def __init__(self, folder: Path, *words: str) -> None:
        self.socket, self.log = folder / "daemon.sock", folder / "daemon.log"
        command = [sys.executable, "-m", "polythrottle", "daemon", "run", "--socket", str(self.socket), *words]
        environment = {**os.environ, "POLYTHROTTLE_STATE_DIR": str(folder / "daemon-state")}
        with self.log.open("a") as log:
            self.child = subprocess.Popen(command, stdout=log, stderr=log, env=environment)
        self.client = Client(self.socket)

    def status(self) -> Status | None:
        """Return what it shows; None while it does not answer."""
        with suppress(PolythrottleError):
            return self.client.status()
        return None

    def begun(self) -> "Daemon":
        """Wait until it turns."""
        until(lambda: self.child.poll() is not None or ((found := self.status()) is not None and found.turn > 0))
        assert self.child.poll() is None, self.log.read_text()
        return self

    def phase(self, *wanted: str) -> Status:
        """Wait until it is in one of some phases."""
        until(lambda: (found := self.status()) is not None and found.phase in wanted)
        found = self.status()
        assert found is not None
        return found

    def close(self) -> None:
        """Kill it if it still runs."""
        self.client.close()
        if self.child.poll() is None:
            self.child.kill()
        self.child.wait()


@pytest.fixture
def ends() -> Iterator[ExitStack]:
    """End whatever a test has started."""
    with ExitStack() as stack:
        yield stack


@pytest.fixture
def simulated(tmp_path: Path) -> Path:
    """Return the file of a profile for a simulated board."""
    points = tuple(
        OperatingPoint({GPU: hz, "gpu_min_hz": hz, "batch_size": 1})
        for hz in (624_750_000, 1_032_750_000, 1_300_500_000)
    )
    write_profile(profile("sim:jetson-agx-orin", points, EnergyKind.SIMULATED), tmp_path / "sim.toml")
    return tmp_path / "sim.toml"


@pytest.mark.slow
def test_a_simulated_board_follows_simulated_requests(
    tmp_path: Path, simulated: Path, ends: ExitStack, capfd: pytest.CaptureFixture[str]
) -> None:
    """Run, look, ask and end: what the first page of the manual says works, without root and without systemd."""
    daemon = Daemon(tmp_path, "--profile", str(simulated), "--traffic", "sim:poisson:20/s")
    ends.callback(daemon.close)
    status = daemon.begun().phase("following", "safe")
    assert status.energy_kind == "simulated"
    until(lambda: (found := daemon.status()) is not None and found.power_w and found.saved.joules is not None)
    assert run(["daemon", "status", "--socket", str(daemon.socket)]) == 0
    capfd.readouterr()
    assert run(["daemon", "stop", "--socket", str(daemon.socket)]) == 0
    assert capfd.readouterr().out == "the daemon has ended; the board is as it was found\n"
    assert daemon.child.wait(timeout=60) == 0
    log = daemon.log.read_text()
    assert "Traceback" not in log
    assert "the daemon has ended; the board is as it was found" in log
    assert not daemon.socket.exists()


def test_a_loop_that_hangs_is_seen_in_the_status(capsys: pytest.CaptureFixture[str]) -> None:
    """A status of long ago says first for how long the loop has not turned; a fresh one, or one without time, not."""
    print_status(Status(at=stamp(time.time() - 60), title="a board", rate_per_s=3.0))
    first, *rest = capsys.readouterr().out.splitlines()
    assert first in ("the control loop has not turned for 60 s", "the control loop has not turned for 61 s")
    assert any("3/s, – waiting" in line for line in rest)
    itself = "the control loop has not turned for 59 s; what is shown is as old"
    print_status(Status(at=stamp(time.time() - 60), title="a board", faults=("the disk is full", itself)))
    first, *rest = capsys.readouterr().out.splitlines()
    assert (first, sum("has not turned" in line for line in rest)) == (itself, 0)
    for at in (stamp(time.time() + 60), ""):
        print_status(Status(at=at, title="a board", rate_per_s=3.0, waiting=0))
        out = capsys.readouterr().out
        assert "has not turned" not in out
        assert "3/s, 0 waiting" in out


def test_status_says_what_studies_have_made_late(capsys: pytest.CaptureFixture[str]) -> None:
    """Only once something was."""
    print_status(Status(exploring=ExploringShown(12_000.0, 3.0, 9.0)))
    assert "3 of the last day's 12,000 requests, for studies; 9 more may be" in " ".join(
        capsys.readouterr().out.split()
    )
    print_status(Status())
    assert "for studies" not in capsys.readouterr().out


def test_a_line_of_status_ends_with_a_whole_part_and_begins_with_what_is_wrong() -> None:
    """Whatever the width no figure is cut in two, and a fault is never what is left out."""
    shown = Status(
        phase="following",
        energy_kind="simulated",
        power_w=123.456,
        rate_per_s=1234.0,
        p99_s=0.0523,
        limit_s=0.06,
        rung=RungShown(13, 17, 40.0, 12.0, 0.02),
        saved=SavedShown(123456.0, 1.0, 2.0, 9),
        faults=("the disk is full",),
    )
    whole = line_of(shown, 1000)
    assert whole.startswith("FAULT  following  ")
    assert "rung 14/17  saved " in whole
    parts = whole.split("  ")
    for width in range(20, 120):
        line = line_of(shown, width)
        assert len(line) <= max(width, len(parts[0]))
        assert line.split("  ") == parts[: len(line.split("  "))]
    assert len(line_of(shown)) <= 79


@pytest.mark.slow
def test_status_is_a_document_for_programs(
    tmp_path: Path, simulated: Path, ends: ExitStack, capfd: pytest.CaptureFixture[str]
) -> None:
    """``--json`` prints what the API says."""
    daemon = Daemon(tmp_path, "--profile", str(simulated), "--traffic", "sim:poisson:20/s")
    ends.callback(daemon.close)
    daemon.begun()
    assert run(["daemon", "status", "--json", "--socket", str(daemon.socket)]) == 0
    document = json.loads(capfd.readouterr().out)
    assert document["device"] == "sim:jetson-agx-orin"
    assert document["workload"]["profile"] == str(simulated)


@pytest.mark.slow
@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 0), (signal.SIGINT, 130), (signal.SIGHUP, 0)])
def test_signals_end_it_in_order(tmp_path: Path, simulated: Path, ends: ExitStack, number: int, code: int) -> None:
    """A signal ends it after the turn, also if a second one comes, with the code shells expect."""
    daemon = Daemon(tmp_path, "--profile", str(simulated), "--traffic", "sim:poisson:20/s")
    ends.callback(daemon.close)
    daemon.begun()
    daemon.child.send_signal(number)
    daemon.child.send_signal(number)
    assert daemon.child.wait(timeout=60) == code
    assert "the board is as it was found" in daemon.log.read_text()


@pytest.mark.slow
def test_there_is_one_daemon_per_state_folder(tmp_path: Path, simulated: Path, ends: ExitStack) -> None:
    """A second one with the same state ends with one line that says what to do."""
    words = ("--profile", str(simulated), "--traffic", "sim:poisson:20/s")
    first = Daemon(tmp_path, *words)
    ends.callback(first.close)
    first.begun()
    second = Daemon(tmp_path, *words)
    ends.callback(second.close)
    assert second.child.wait(timeout=60) == DeviceError.exit_code
    assert "another daemon keeps its state" in second.log.read_text()
    assert first.status() is not None


@pytest.mark.slow
@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        (["--profile", "none.toml"], 3, "unknown profile"),
        (["--profile", "PROFILE", "--device", "sim:jetson-nano", "--traffic", "sim:poisson:1/s"], 4, "was tuned on"),
        (["--profile", "PROFILE", "--traffic", "sim:closed"], 2, "rate"),
        (["--profile", "PROFILE", "--traffic", "wire:tap"], 3, "unknown traffic"),
        (["--profile", "PROFILE", "--device", "jetson", "--traffic", "sim:poisson:1/s"], 2, "simulated board"),
        (["--profile", "PROFILE", "--power", "10 sheep"], 2, "sheep"),
        (["--profile", "PROFILE", "--battery", "80Wh"], 2, "--last"),
        (["--profile", "PROFILE", "--tcp", "0.0.0.0:1", "--token-file", "x"], 2, "TLS"),
        (["--profile", "PROFILE", "--token-file", "x"], 2, "--tcp"),
        (["--profile", "PROFILE", "--no-actuator", "--actuator", "x"], 2, "exclude"),
        (["--config", "none.toml"], 4, "cannot be read"),
    ],
)
def test_what_cannot_be_is_one_line(
    tmp_path: Path, simulated: Path, ends: ExitStack, words: list[str], code: int, said: str
) -> None:
    """Every mistake ends with its own exit code and one line, before anything is set."""
    daemon = Daemon(tmp_path, *[str(simulated) if word == "PROFILE" else word for word in words])
    ends.callback(daemon.close)
    assert daemon.child.wait(timeout=60) == code
    (line,) = daemon.log.read_text().splitlines()
    assert said in line


def test_the_demo_follows_its_profile_through_a_day(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """One command opens the page; its profile fits its board, and the day leads up and down the ladder."""
    monkeypatch.setenv("POLYTHROTTLE_STATE_DIR", str(tmp_path))
    monkeypatch.setenv("POLYTHROTTLE_RUN_DIR", str(tmp_path / "run"))
    asked: list[dict[str, str]] = []
    monkeypatch.setattr(daemon_process, "exec_daemon", asked.append)
    assert run(["daemon", "demo", "--day", "2min"]) == 0
    (words,) = asked
    assert os.environ["POLYTHROTTLE_STATE_DIR"] == str(tmp_path / "demo")
    settings = daemon_process.settings_of(words)
    assert (settings.page, settings.socket) == (True, tmp_path / "run" / "daemon" / "daemon.sock")
    assert "simulated" in capsys.readouterr().err
    made = read_profile(Path(words["profile"]))
    assert changed(made) == ""
    assert made.ladder is not None
    day = Arrivals.parse(words["traffic"].removeprefix("sim:"))
    assert isinstance(day, Day)
    rates = [day.rate_at(hour * 5.0) for hour in range(24)]
    assert 1.8 * max(rates) < made.ladder.rungs[-1].rate_per_s
    held = [[rung for rung in made.ladder.rungs if rung.rate_per_s >= rate] for rate in rates]
    cheapest = {
        min((each.power_at(rate), each.rate_per_s) for each in up)[1] for up, rate in zip(held, rates, strict=True)
    }
    assert len(cheapest) > 3
    assert run(["daemon", "demo", "--day", "1s"]) == 2


def test_the_token_is_shown_in_a_terminal_alone(tmp_path: Path) -> None:
    """Where lines go to a log, they say where the token is, not what it is."""
    page = own_page(tmp_path / "page.token")
    token = (page.token() or b"").decode()
    shown, logged = ("\n".join(daemon_process.addresses(tmp_path, page, 8080, terminal)) for terminal in (True, False))
    assert f"http://127.0.0.1:8080/#token={token}" in shown
    assert token not in logged
    assert str(tmp_path / "page.token") in logged
    assert list(daemon_process.addresses(tmp_path, None, None, True)) == [f"API      {tmp_path}"]


def test_without_a_daemon_the_commands_say_so(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Looking at or ending what does not run is an error of the device, in one line."""
    for command in ("status", "stop"):
        assert run(["daemon", command, "--socket", str(tmp_path / "none.sock")]) == DeviceError.exit_code
        assert "no daemon runs" in capfd.readouterr().err


@pytest.mark.slow
def test_what_was_lost_by_a_kill_is_less_than_a_minute(tmp_path: Path, simulated: Path, ends: ExitStack) -> None:
    """A daemon killed without warning leaves no socket in the way, and the next one knows its events."""
    words = ("--profile", str(simulated), "--traffic", "sim:poisson:20/s")
    first = Daemon(tmp_path, *words)
    ends.callback(first.close)
    first.begun().phase("following", "safe")
    first.child.kill()
    first.child.wait()
    second = Daemon(tmp_path, *words)
    ends.callback(second.close)
    second.begun()
    assert [event.kind for event in second.client.events() if event.kind == "start"] == ["start", "start"]


class Pair:
    """An actuator on a planted board, and a daemon behind it that follows what is reported to it."""

    def __init__(self, folder: Path, ends: ExitStack) -> None:
        self.root, self.ends, self.folder = plant(BOARD, folder / "b"), ends, folder
        self.found = FakeKernel(self.root).snapshot()
        self.actuator = self.started()
        device = open_device(f"jetson?root={self.root}")
        levels = device.space.knob(GPU).levels
        points = tuple(device.space.default.moved({GPU: hz, "batch_size": 1}) for hz in (levels[0], levels[1]))
        write_profile(profile(f"jetson?root={self.root}", points), folder / "p.toml")
        (folder / "daemon.toml").write_text('lease = 3\ntraffic = "report?quiet=10min"\n')
        words = ("--config", str(folder / "daemon.toml"), "--profile", str(folder / "p.toml"))
        self.words = (*words, "--actuator", str(folder / "a.sock"))
        self.daemon = self.begun()

    def started(self) -> Process:
        """Start an actuator."""
        process = Process(self.root, self.folder / "a.sock")
        self.ends.callback(lambda: process.child.poll() is None and process.end())
        return process

    def begun(self) -> Daemon:
        """Start a daemon, and tell it of requests."""
        daemon = Daemon(self.folder, *self.words)
        self.ends.callback(daemon.close)
        daemon.begun().client.report(SEEN)
        daemon.phase("following", "safe")
        return daemon

    @property
    def is_set(self) -> bool:
        """Whether the board is otherwise than it was found."""
        return FakeKernel(self.root).snapshot() != self.found


@pytest.fixture
def pair(tmp_path: Path, ends: ExitStack) -> Pair:
    """Return a daemon that has set a planted board."""
    made = Pair(tmp_path, ends)
    until(lambda: made.is_set)
    return made


@pytest.mark.slow
def test_a_study_sets_the_board_through_the_actuator(pair: Pair, tmp_path: Path) -> None:
    """Under a loan of the daemon's lease a real study runs, and what it finds is followed in turns with what was."""
    pair.daemon.child.terminate()
    pair.daemon.child.wait()
    file = tmp_path / "p.toml"
    file.write_text(file.read_text().replace('workload = "resnet50"', 'workload = "cmd:true"'))
    pair.daemon = pair.begun()
    client = pair.daemon.client
    client.start_study(2, {"method": "random", "seconds": "0.1", "queries": "2"})
    until(lambda: client.status().study and client.status().study.state != "running", 500.0)  # it is nice to others
    assert client.status().study.state == "ended"  # type: ignore[union-attr]
    assert any("compared in turns" in event.words for event in client.events())
    until(lambda: pair.is_set)


@pytest.mark.slow
def test_a_killed_daemon_leaves_the_board_as_found(pair: Pair) -> None:
    """Once its lease is over the actuator restores the board, which no daemon asked it to."""
    pair.daemon.child.kill()
    until(lambda: not pair.is_set)
    assert pair.actuator.child.poll() is None


@pytest.mark.slow
def test_a_killed_actuator_is_said_and_found_again(pair: Pair) -> None:
    """The daemon shows that it cannot set the board, goes on, and sets it when there is an actuator again."""
    pair.actuator.end(signal.SIGKILL)
    until(lambda: (found := pair.daemon.status()) is not None and not found.leased and found.faults)
    assert pair.daemon.child.poll() is None
    pair.started()
    until(lambda: (found := pair.daemon.status()) is not None and found.leased and pair.is_set)
    kinds = [event.kind for event in pair.daemon.client.events()]
    assert "lease" in kinds


@pytest.mark.slow
def test_a_stopped_daemon_restores_at_once(pair: Pair) -> None:
    """Ending it in order puts the board back before it ends, whatever its lease."""
    pair.daemon.child.terminate()
    assert pair.daemon.child.wait(timeout=60) == 0
    assert not pair.is_set


@pytest.mark.slow
def test_a_daemon_started_again_in_time_keeps_the_point(pair: Pair) -> None:
    """A killed daemon whose successor comes within the lease loses nothing: it goes on with the old lease."""
    pair.daemon.child.kill()
    pair.daemon.child.wait()
    pair.daemon = pair.begun()
    until(lambda: (found := pair.daemon.status()) is not None and found.leased and pair.is_set)


@pytest.mark.slow
def test_a_profile_for_another_firmware_is_refused(pair: Pair, tmp_path: Path) -> None:
    """A profile that was tuned under another release is not followed, and the one before goes on."""
    text = (tmp_path / "p.toml").read_text()
    assert "[identity]" in text
    head, _, tail = text.partition("[identity]\n")
    mine, gap, rest = tail.partition("\n\n")
    other = "\n".join(f'{line.partition(" = ")[0]} = "other"' for line in mine.splitlines())
    (tmp_path / "other.toml").write_text(f"{head}[identity]\n{other}{gap}{rest}")
    with pytest.raises(PolythrottleError, match="was tuned on"):
        pair.daemon.client.apply(tmp_path / "other.toml")
    assert pair.is_set


def test_installing_without_root_names_the_command(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """Who may not install is told what to run."""
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    assert run(["daemon", "install"]) == 0
    assert "sudo BINDIR=" in capfd.readouterr().out


def test_installing_below_a_folder_lays_the_units(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """With another root nothing outside it is touched."""
    assert run(["daemon", "install", "--root", str(tmp_path / "root"), "--json"]) == 0
    assert json.loads(capfd.readouterr().out)["installed"]
    assert list((tmp_path / "root").rglob("*.service"))


@pytest.mark.slow
def test_a_budget_is_set_shown_and_lifted(
    tmp_path: Path, simulated: Path, ends: ExitStack, capfd: pytest.CaptureFixture[str]
) -> None:
    """On a running daemon, in words and as a document; one that no point can keep is refused."""
    daemon = Daemon(tmp_path, "--profile", str(simulated), "--traffic", "sim:poisson:20/s", "--power", "30W")
    ends.callback(daemon.close)
    daemon.begun()

    def told(*words: str) -> tuple[int, str, str]:
        code = run(["daemon", "budget", "--socket", str(daemon.socket), *words])
        return code, *capfd.readouterr()

    assert told() == (0, "at most 30 W\n", "")
    assert told("--power", "25W") == (0, "budget: at most 25 W\n", "")
    code, _, error = told("--power", "1W")
    assert code == 2
    assert "cannot be kept" in error
    assert json.loads(told("--json")[1])["limit_w"] == 25.0
    assert told("--no-budget") == (0, "no budget limits the power\n", "")
    assert told() == (0, "no budget limits the power\n", "")


@pytest.mark.slow
def test_what_happens_before_the_first_turn_is_on_the_terminal(
    tmp_path: Path, simulated: Path, ends: ExitStack
) -> None:
    """A profile that is not followed because its board has changed, and a battery too small, are said at the start."""
    text = simulated.read_text()
    assert "[provenance]\n" in text
    simulated.write_text(text.replace("[provenance]\n", '[provenance]\ncontent = "board=0123456789abcdef"\n'))
    words = ("--traffic", "sim:poisson:20/s")
    other = Daemon(tmp_path, "--profile", str(simulated), *words)
    ends.callback(other.close)
    other.begun()
    found = other.client.status()
    assert any("is not followed: this profile was tuned with another board" in each for each in found.faults)
    assert "was tuned with another board" in other.log.read_text()
    with pytest.raises(PolythrottleError, match="was tuned with another board"):
        other.client.apply(simulated)
    other.client.stop()
    assert other.child.wait(timeout=60) == 0
    simulated.write_text(text)
    small = Daemon(tmp_path, "--profile", str(simulated), *words, "--battery", "1Wh", "--last", "9h")
    ends.callback(small.close)
    small.begun()
    until(lambda: "would hold it for 9 h 00 min" in small.log.read_text())


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--battery", "80Wh"], "--battery 80Wh --last 9h"),
        (["--last", "9h"], "--battery 80Wh --last 9h"),
        (["--carbon", "/nope"], "give --wh-per-day or --battery with it"),
        (["--battery", "1Wh", "--last", "9000d"], "--last must be at most 366 days"),
        (["--power", "1e-300W"], "--power must be at least 1 mW"),
    ],
)
def test_a_budget_that_is_none_is_refused_in_words_of_its_options(
    tmp_path: Path, words: list[str], says: str, capfd: pytest.CaptureFixture[str]
) -> None:
    """Whether a daemon runs or not, and at its start likewise."""
    for command in (["budget", "--socket", str(tmp_path / "none.sock")], ["run", "--profile", "x"]):
        assert run(["daemon", *command, *words]) == 2
        assert says in capfd.readouterr().err


@pytest.mark.slow
def test_a_power_no_point_can_keep_ends_the_start(tmp_path: Path, simulated: Path, ends: ExitStack) -> None:
    """In one line, and nothing is set."""
    daemon = Daemon(tmp_path, "--profile", str(simulated), "--traffic", "sim:poisson:20/s", "--power", "1W")
    ends.callback(daemon.close)
    assert daemon.child.wait(timeout=60) == 2
    (line,) = daemon.log.read_text().splitlines()
    assert "at most 1 W cannot be kept" in line


class Answering:
    """A client of a daemon that answers what it is scripted to."""

    where = "/run/daemon.sock"

    def __init__(self) -> None:
        self.asked: list[tuple[str, object]] = []
        self.news: list[object] = []
        self.gone: PolythrottleError | None = DeviceError("nobody listens")
        self.shown = Status(device="sim:v100", budget=BudgetShown())

    def __call__(self, *words: object, **given: object) -> "Answering":
        """Be opened."""
        self.asked.append(("open", (*words, *given.values())))
        return self

    def __enter__(self) -> "Answering":
        return self

    def __exit__(self, *words: object) -> None:
        self.asked.append(("close", None))

    def status(self) -> Status:
        """Return what it shows; it is away once it was told to stop."""
        if ("stop", None) in self.asked and self.gone is not None:
            raise self.gone
        return self.shown

    def events(self, after: int = 0) -> list[Happened]:
        """Return what has happened."""
        return [Happened(4, "2026-01-01T10:00:00+00:00", "start", "began")]

    def follow(self, after: int | None = None) -> Iterator[object]:
        """Yield what is new."""
        self.asked.append(("follow", after))
        yield from self.news

    def stop(self) -> None:
        """Be told to end."""
        self.asked.append(("stop", None))

    def budget(self, **words: object) -> dict[str, object]:
        """Take a budget."""
        self.asked.append(("budget", {name: word for name, word in words.items() if word is not None}))
        return {"words": "the budget is taken"}

    def node_power(self, power_w: float | None, within_s: float | None) -> dict[str, object]:
        """Take a server's limit, where it is one."""
        self.asked.append(("node_power", (power_w, within_s)))
        if power_w == 1.0:
            raise UnknownName("path", "/v1/node", [])
        return {"words": "the server takes it"}


@pytest.fixture
def answering(monkeypatch: pytest.MonkeyPatch) -> Answering:
    """Return the client that commands meet."""
    client = Answering()
    monkeypatch.setattr("polythrottle.daemon.client.Client", client)
    return client


def test_stopping_tells_the_daemons_last_words(answering: Answering, capsys: pytest.CaptureFixture[str]) -> None:
    """They are listened for from the last event on; without any, it says where to look."""
    answering.news = [
        Happened(5, "2026-01-01T10:00:00+00:00", "phase", "safe"),
        Happened(6, "2026-01-01T10:00:00+00:00", "stop", "the board is as it was found"),
    ]
    assert run(["daemon", "stop", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == {
        "stopped": "/run/daemon.sock", "words": "the board is as it was found", "clean": True
    }  # fmt: skip
    assert ("follow", 4) in answering.asked
    answering.asked.clear()
    answering.news = [Gone("it does not answer")]
    assert run(["daemon", "stop"]) == 0
    assert capsys.readouterr().out == "the daemon has ended; what became of the board, its log says\n"


def test_stopping_says_what_may_differ_line_by_line(answering: Answering, capsys: pytest.CaptureFixture[str]) -> None:
    """With the exit code of a restoring that has left something."""
    words = "the daemon has ended; a board may not be as it was found: chat: gpu holds 5, was 9; search: it is gone"
    answering.news = [Happened(6, "2026-01-01T10:00:00+00:00", "stop", words)]
    assert run(["daemon", "stop"]) == DeviceError.exit_code
    assert capsys.readouterr().out.splitlines() == [
        "the daemon has ended; a board may not be as it was found:",
        "  chat: gpu holds 5, was 9",
        "  search: it is gone",
    ]
    answering.asked.clear()
    assert run(["daemon", "stop", "--json"]) == DeviceError.exit_code
    document = json.loads(capsys.readouterr().out)
    assert (document["words"], document["clean"]) == (words, False)


def test_a_daemon_that_does_not_end_is_said(
    answering: Answering, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that answers still, if only with an error, has not ended."""
    answering.gone = InvalidInput("no")
    answering.news = [Gone("away")]
    assert run(["daemon", "stop"]) == DeviceError.exit_code
    assert "was told to end and has not within" in capsys.readouterr().err
    answering.asked.clear()
    answering.gone = None
    monkeypatch.setattr("polythrottle.cli.daemon._WAIT_S", 0.0)
    assert run(["daemon", "stop"]) == DeviceError.exit_code
    assert "has not within 0 s" in capsys.readouterr().err


def test_a_budget_is_shown_taken_or_sent_to_the_server(
    answering: Answering, capsys: pytest.CaptureFixture[str]
) -> None:
    """Without words it is shown; a time to keep it within is a server's alone."""
    assert run(["daemon", "budget"]) == 0
    assert capsys.readouterr().out == "no budget limits the power\n"
    answering.shown = replace(answering.shown, budget=BudgetShown("80 Wh, to last 9 h", limit_w=8.9))
    assert run(["daemon", "budget"]) == 0
    assert capsys.readouterr().out == "80 Wh, to last 9 h\n"
    assert run(["daemon", "budget", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["limit_w"] == 8.9
    assert run(["daemon", "budget", "--power", "20W"]) == 0
    assert capsys.readouterr().out == "the budget is taken\n"
    assert ("budget", {"power_w": 20.0}) in answering.asked
    assert run(["daemon", "budget", "--power", "500W", "--within", "5s"]) == 0
    assert capsys.readouterr().out == "the server takes it\n"
    assert ("node_power", (500.0, 5.0)) in answering.asked
    assert run(["daemon", "budget", "--power", "1W", "--within", "5s"]) == InvalidInput.exit_code
    assert "--within is of a server of services" in capsys.readouterr().err


def test_following_prints_a_line_for_each_second_and_event(
    answering: Answering, capsys: pytest.CaptureFixture[str]
) -> None:
    """One who does not answer is told of once, on standard error; each is a document with --json."""
    at = "2026-01-01T10:20:30+00:00"
    answering.news = [
        Status(at=at, phase="following", title="a board", rate_per_s=3.0),
        Happened(6, at, "phase", "safe now"),
        Gone("it does not answer"),
        Gone("it does not answer"),
        Happened(7, at, "start", "began"),
    ]
    assert run(["daemon", "status", "--follow"]) == 0
    shown = capsys.readouterr()
    first, *others = shown.out.splitlines()
    assert first.startswith("10:20:30 ")
    assert "3/s" in first
    assert others == ["10:20:30 phase: safe now", "10:20:30 start: began"]
    assert shown.err.splitlines() == ["it does not answer; trying again"]
    assert run(["daemon", "status", "--follow", "--json"]) == 0
    shown = capsys.readouterr()
    documents = [json.loads(line) for line in shown.out.splitlines()]
    assert [next(iter(each)) for each in documents] == ["status", "event", "event"]
    assert documents[0]["status"]["rate_per_s"] == 3.0
    assert documents[1]["event"]["words"] == "safe now"
    assert json.loads(shown.err.splitlines()[0]) == {"gone": "it does not answer"}
    assert run(["daemon", "status", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["device"] == "sim:v100"


def test_what_was_saved_today_has_its_interval(capsys: pytest.CaptureFixture[str]) -> None:
    """Joules with the ends of their interval where it is known; words alone where nothing is."""
    for saved, told in (
        (
            SavedShown(words="since midnight", joules=1500.0, low=1000.0, high=2000.0),
            "1.5 kJ (1 kJ to 2 kJ) today, since midnight",
        ),
        (SavedShown(words="since midnight", joules=1500.0), "1.5 kJ today, since midnight"),
        (SavedShown(words="not known yet"), "saved not known yet"),
    ):
        print_status(
            Status(title="a board", saved=saved, p99_s=0.02, limit_s=0.025, power_w=20.0, energy_kind="measured")
        )
        shown = " ".join(capsys.readouterr().out.split())
        assert told in shown
        assert "p99 20 ms (limit 25 ms)" in shown
        assert "power 20 W (measured)" in shown


class Desk:
    """What the control loop shows: events and a status."""

    def __init__(self, *events: Happened) -> None:
        self.shown = list(events)
        self.status = Status(at="2026-01-01T10:20:30+00:00", phase="following", rate_per_s=3.0)
        self.ring: Callable[[], None] | None = None

    def events(self, after: int = 0) -> list[Happened]:
        """Return those after one."""
        return [each for each in self.shown if each.number > after]

    def listen(self, ring: Callable[[], None]) -> Callable[[], None]:
        """Ring when there is something."""
        self.ring = ring
        return lambda: setattr(self, "ring", None)


class Screen(io.StringIO):
    """What was written, to a terminal or not."""

    def __init__(self, terminal: bool) -> None:
        super().__init__()
        self.terminal = terminal

    def isatty(self) -> bool:
        """Return whether it is one."""
        return self.terminal


@pytest.mark.parametrize("terminal", [False, True])
def test_events_since_the_start_are_written_line_by_line(terminal: bool) -> None:
    """Those of an earlier daemon are not repeated; in a terminal a last line says what goes on."""
    at = "2026-01-01T10:20:30+00:00"
    desk = Desk(Happened(3, at, "fault", "long ago"), Happened(4, at, "start", "began"))
    out = Screen(terminal)
    printer = EventPrinter(desk, out)  # type: ignore[arg-type]
    desk.shown.append(Happened(5, at, "phase", "safe\x1b[2J"))
    assert desk.ring is not None
    desk.ring()
    until(lambda: "safe" in out.getvalue())
    printer.close()
    assert desk.ring is None
    text = out.getvalue()
    assert "10:20:30 phase    safe" in text
    assert "\x1b[2J" not in text
    assert "long ago" not in text
    assert ("3/s" in text) == terminal
    assert text.startswith("\r\x1b[K" if terminal else "10:20:30 ")


def test_a_program_that_cannot_begin_says_why(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """One line and the exit code of its class; a limit within a time is of the whole server and of power alone."""
    monkeypatch.setattr(daemon_process.sys, "argv", ["", json.dumps({"battery": "80"})])
    assert daemon_process.main() == InvalidInput.exit_code
    assert capsys.readouterr().err.count("\n") == 1
    wish = daemon_process.budget_of({"power": "1.6kW"})
    assert daemon_process.node_limit(wish, "5s", None) == (1600.0, 5.0)
    for words, service, told in (
        ({"power": "1kW"}, "a", "leave --service out"),
        ({}, None, "goes with --power alone"),
        ({"battery": "80Wh", "last": "9h"}, None, "goes with --power alone"),
    ):
        with pytest.raises(InvalidInput, match=told):
            daemon_process.node_limit(daemon_process.budget_of(words), "5s", service)


def test_an_interrupt_while_it_begins_is_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Also before the new program has read a line of its own: the signal waits until it can be told of."""
    blocked: list[set[int]] = []

    def become(*_: object) -> None:
        blocked.append(set(signal.pthread_sigmask(signal.SIG_BLOCK, ())))
        raise OSError(2, "No such file")

    monkeypatch.setattr(daemon_process.os, "execv", become)
    with pytest.raises(DeviceError, match="cannot be started"):
        daemon_process.exec_daemon({"workload": "resnet50", "device": "cpu"})
    assert signal.SIGINT in blocked[0]
    assert signal.SIGINT not in signal.pthread_sigmask(signal.SIG_BLOCK, ())
    monkeypatch.setattr(daemon_process.sys, "argv", ["", "{}"])
    monkeypatch.setattr(daemon_process, "_served", lambda settings: signal.raise_signal(signal.SIGINT))
    assert daemon_process.main() == INTERRUPTED
    assert capsys.readouterr().err == "polythrottle: interrupted\n"
    # As exec_daemon leaves it to the program: blocked, and one has come already.
    program = (
        "import os, signal, sys; signal.pthread_sigmask(signal.SIG_BLOCK, [2]); os.kill(os.getpid(), 2); "
        "os.execv(sys.executable, [sys.executable, '-m', 'polythrottle.cli.daemon_process', '{}'])"
    )
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert (ended.returncode, ended.stderr) == (INTERRUPTED, "polythrottle: interrupted\n")
