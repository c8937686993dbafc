"""A board behind a real ``sshd`` on loopback, in CPython and in PyPy: measured, killed, cut off, asleep, refused."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import pytest
from boards_over_ssh import await_that, children_of, desk, far_sides, held, planted
from fake_servers import FakeServer, kserve, model_over_grpc, openai, piece, usage
from fake_servers import listening as listening_service
from slow_line import SlowLine
from sshd import SSHD, listening

from polythrottle.backends import open_device
from polythrottle.board.link import SSH
from polythrottle.cli.commands import run
from polythrottle.domain.errors import DeviceError, PermissionDenied
from polythrottle.domain.measurement import Measurement
from polythrottle.domain.ports import Lasting
from polythrottle.metering.point_measurement import measure
from polythrottle.storage.boards_journal import boards_of
from polythrottle.testing import plant
from polythrottle.tuning.setup import Setup

PYTHONS = [sys.executable, *(found for name in ("pypy3",) if (found := shutil.which(name)))]
pytestmark = [pytest.mark.ssh, pytest.mark.skipif(SSHD is None, reason="needs sshd (Debian: openssh-server)")]


@dataclass(frozen=True)
class Site:
    """A board behind sshd.

    Args:
        root: Of its tree.
        python: In which the far side runs.
        sshd: The process that listens.
        folder: Where keys and configurations lie.
    """

    root: Path
    python: str
    sshd: int
    folder: Path

    @property
    def uri(self) -> str:
        """How it is reached."""
        return f"ssh://nano/jetson?root={self.root}&python={self.python}"


@pytest.fixture(scope="module")
def daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, int]]:
    """Run an sshd of our own on loopback, with keys made for it."""
    folder = tmp_path_factory.mktemp("sshd")
    with listening(folder) as (_, _, pid):
        yield folder, pid


@pytest.fixture(params=PYTHONS, ids=[Path(each).name for each in PYTHONS])
def site(
    daemon: tuple[Path, int], request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Site:
    """Return a board behind that sshd."""
    folder, pid = daemon
    monkeypatch.setenv(SSH, f"ssh -F {folder / 'ssh_config'}")
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    return Site(planted(tmp_path), request.param, pid, folder)


def sessions(site: Site) -> list[int]:
    """Return the processes of sshd that serve connections."""
    return [pid for pid in children_of(site.sshd) if b"sshd" in _words(pid)]


def _words(pid: int) -> bytes:
    """Return the words of a process; none of one that has ended meanwhile."""
    with suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    return b""


def test_a_search_measures_there_and_leaves_the_board_as_it_was(
    site: Site, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Tune over SSH, in either interpreter: every trial measured on the board, nothing changed and nothing left."""
    before = held(site.root)
    words = ["--knobs", "mem", "--slo", "p99<=60s", "--yes", "--trials", "2", "--seconds", "0.3", "--queries", "10"]
    out = ["--method", "grid", "--json", "--out", str(tmp_path / "out")]
    code = run(["tune", "--device", site.uri, "--workload", "cmd:sleep 0.02", *words, *out])
    said = capsys.readouterr()
    assert code == 0, said.err
    assert json.loads(said.out)["trials"]
    assert held(site.root) == before
    await_that(lambda: not far_sides(tmp_path), "the far side stays")
    assert not [*tmp_path.glob("polythrottle-board-*")]


def kserve_server() -> FakeServer:
    """Return a server of a model of pictures."""
    return kserve([{"name": "x", "datatype": "FP32", "shape": [-1, 3, 32, 32]}])


def language_server() -> FakeServer:
    """Return a server of a language model."""
    return openai(piece("a"), piece("b", "length"), usage(5), b"data: [DONE]\n\n")


@pytest.mark.parametrize(
    ("model", "made"),
    [("kserve://{}/m", kserve_server), ("openai://{}/org/m", language_server)],
    ids=["kserve", "openai"],
)
def test_a_service_is_asked_from_the_board(
    site: Site, tmp_path: Path, capsys: pytest.CaptureFixture[str], model: str, made: Callable[[], FakeServer]
) -> None:
    """Asked and timed there, several at once, in an interpreter without packages; nothing is changed, nothing left."""
    before = held(site.root)
    with listening_service(made()) as server:
        uri = f"{model.format(server.where)}?concurrency=3"
        code = run(["measure", "-d", site.uri, "-w", uri, "--seconds", "0.3", "--queries", "10", "--json"])
        said = capsys.readouterr()
        assert code == 0, said.err
        callers = {headers["User-Agent"] for *_, headers, _ in server.seen}
    assert json.loads(said.out)["queries"] >= 10
    assert callers == {"polythrottle"}
    assert held(site.root) == before
    await_that(lambda: not far_sides(tmp_path), "the far side stays")
    assert not [*tmp_path.glob("polythrottle-board-*")]


def test_a_model_is_asked_over_grpc_and_its_late_requests_are_bounded(
    site: Site, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """By the tritonclient of the interpreter there, which the site's own lacks; the bound is held where it is asked."""
    before = held(site.root)
    device = f"ssh://nano/jetson?root={site.root}&python={sys.executable}"
    words = ["--slo", "p99<=9s", "--yes", "--error-budget", "20", "--trials", "2", "--seconds", "0.1", "--queries", "9"]
    files = ["--journal", str(tmp_path / "study.jsonl"), "--out", str(tmp_path / "out"), "--no-presets", "--json"]
    with model_over_grpc() as where:
        code = run(["tune", "-d", device, "-w", f"kserve+grpc://{where}/m", *words, *files, "--method", "random"])
    said = capsys.readouterr()
    assert code == 0, said.err
    account = json.loads(said.out)["error_budget"]
    assert (account["sent"] >= 18, account["forfeited"]) == (True, 0)
    assert held(site.root) == before
    await_that(lambda: not far_sides(tmp_path), "the far side stays")


def test_boards_that_search_together_are_measured_at_once_and_put_back(
    site: Site, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Each behind a connection of its own: every trial names its board, nothing changed and nothing left on either."""
    other = plant("jetson-agx-orin-jp6", tmp_path / "other")
    for serial in other.rglob("serial-number"):
        serial.write_bytes(b"1422000000002\0")
    before = held(site.root), held(other)
    uris = [site.uri, site.uri.replace(str(site.root), str(other))]
    words = ["--knobs", "mem", "--slo", "p99<=60s", "--yes", "--trials", "5", "--seconds", "0.3", "--queries", "10"]
    files = ["--journal", str(tmp_path / "study.jsonl"), "--out", str(tmp_path / "out")]
    device = ",".join(uris)
    code = run(["tune", "-d", device, "-w", "cmd:sleep 0.02", *words, *files, "--method", "grid", "--json"])
    said = capsys.readouterr()
    assert code == 0, said.err
    assert [board["device"] for board in json.loads(said.out)["boards"]] == sorted(uris)
    assert set(boards_of(tmp_path / "study.jsonl").values()) == set(uris)
    assert (held(site.root), held(other)) == before
    await_that(lambda: not far_sides(tmp_path), "a far side stays")


def test_an_interrupted_search_puts_every_board_back(site: Site, tmp_path: Path) -> None:
    """Ctrl-C, which a terminal sends to ssh as well, while a trial runs on each board: all are as they were found."""
    other = plant("jetson-agx-orin-jp6", tmp_path / "other")
    for serial in other.rglob("serial-number"):
        serial.write_bytes(b"1422000000002\0")
    roots = (site.root, other)
    before = [held(root) for root in roots]
    uris = [site.uri.replace(str(site.root), str(root)) for root in roots]
    journal = tmp_path / "study.jsonl"
    words = ["-d", ",".join(uris), "-w", "cmd:sleep 0.02", "--knobs", "mem", "--slo", "p99<=60s", "--yes"]
    size = ["--method", "random", "--trials", "8", "--seconds", "5", "--queries", "200", "--journal", str(journal)]
    child = subprocess.Popen(
        [sys.executable, "-m", "polythrottle", "tune", *words, *size],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        await_that(
            lambda: all(held(root) != was for root, was in zip(roots, before, strict=True)) or child.poll() is not None,
            "no trial runs on every board",
        )
        assert child.poll() is None
        os.killpg(child.pid, signal.SIGINT)
        said = child.communicate(timeout=60.0)[1]
    finally:
        with suppress(ProcessLookupError):
            os.killpg(child.pid, signal.SIGKILL)
        child.communicate()
    assert child.returncode == 130, said
    assert "Traceback" not in said
    assert [held(root) for root in roots] == before
    await_that(lambda: not far_sides(tmp_path), "a far side stays")


@pytest.mark.parametrize("victim", ["far side", "its session", "ssh", "desk"])
def test_whoever_is_killed_the_board_is_put_back(site: Site, tmp_path: Path, victim: str) -> None:
    """SIGKILL of the far side, of sshd's session, of ssh or of the desk: the board is as it was found."""
    before = held(site.root)
    with desk(site.uri) as child:
        assert held(site.root) != before
        victims = {
            "far side": lambda: far_sides(tmp_path),
            "its session": lambda: sessions(site),
            "ssh": lambda: [pid for pid in children_of(child.pid) if pid != child.pid],
            "desk": lambda: [child.pid],
        }[victim]()
        assert victims
        for pid in victims:
            os.kill(pid, signal.SIGKILL)
        await_that(lambda: held(site.root) == before, "the board stays changed")
    await_that(lambda: not far_sides(tmp_path), "the far side stays")


def test_a_connection_that_is_lost_while_it_is_measured_is_no_alarm(site: Site, tmp_path: Path) -> None:
    """The desk asks anew what has become of the board, and waits for it to be put back: one line tells of the loss."""
    before = held(site.root)
    words = ["-d", site.uri, "-w", "cmd:sleep 0.02", "--point", "mem_mhz=204", "--seconds", "60", "--queries", "5000"]
    child = subprocess.Popen(
        [sys.executable, "-m", "polythrottle", "measure", *words],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )
    await_that(lambda: held(site.root) != before or child.poll() is not None, "nothing is set")
    lost = far_sides(tmp_path)
    for pid in lost:
        os.kill(pid, signal.SIGSTOP)  # a slow board
    for pid in sessions(site):
        os.kill(pid, signal.SIGKILL)
    await_that(lambda: len(far_sides(tmp_path)) > len(lost), "the desk does not ask anew")
    time.sleep(1.0)
    for pid in lost:
        os.kill(pid, signal.SIGCONT)
    said = child.communicate(timeout=90.0)[1]
    assert child.returncode == DeviceError.exit_code, said
    assert "was lost" in said
    assert "not known here" not in said
    assert "not everything is as it was found" not in said
    assert held(site.root) == before


def test_a_desk_that_sleeps_gives_the_board_back(site: Site, tmp_path: Path) -> None:
    """A suspended desk renews no lease: within its minute the board is as it was found, though nothing was closed."""
    before = held(site.root)
    with desk(site.uri) as child:
        os.killpg(child.pid, signal.SIGSTOP)
        assert held(site.root) != before
        await_that(lambda: held(site.root) == before, "the board stays changed")
    await_that(lambda: not far_sides(tmp_path), "the far side stays")


def test_two_desks_at_one_board_are_told_of_each_other(site: Site) -> None:
    """The second one is refused in a line that names who steers it."""
    with desk(site.uri):
        second = open_device(site.uri, ["mem_hz"])
        with pytest.raises(DeviceError, match="is being steered by"):
            second.__enter__()
        second.board.close()  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("host", "kind", "says"),
    [
        ("stranger", PermissionDenied, "lets nobody in with these keys: .*Permission denied"),
        ("unknown", DeviceError, "cannot be reached: Host key verification failed"),
        ("nowhere.invalid", DeviceError, "cannot be reached: .*resolve"),
    ],
)
def test_who_is_not_let_in_is_told_why(site: Site, host: str, kind: type[DeviceError], says: str) -> None:
    """A refused key, an unknown host key and an unknown name are one line each, and the board is untouched."""
    before = held(site.root)
    with pytest.raises(kind, match=says) as caught:
        open_device(f"ssh://{host}/jetson?root={site.root}")
    assert "\n" not in str(caught.value)
    assert held(site.root) == before


@pytest.fixture
def line(daemon: tuple[Path, int], monkeypatch: pytest.MonkeyPatch, site: Site) -> Iterator[SlowLine]:
    """Return a line to the board that takes 200 ms each way and loses a twentieth; ``ssh://nano`` goes by it."""
    folder, _ = daemon
    config = (folder / "ssh_config").read_text()
    port = int(config.partition("Port ")[2].split()[0])
    slow = SlowLine(port, delay_s=0.2, loss=0.05)
    monkeypatch.setenv(SSH, f"ssh -F {folder / 'ssh_config'} -o Port={slow.port} -o HostKeyAlias=nano")
    yield slow
    slow.close()


def measured_on(device: str) -> Measurement:
    """Return what serving takes on a device: queries of a hundredth of a second."""
    words = Setup(device=device, workload="cmd:sleep 0.01", knobs=("mem_hz",), queries=50, seconds=1.0)
    board, workload = words.open()
    with words.closing(workload), board:
        return measure(board, workload, (board.space * workload.space).default, words.window(board))


def test_no_figure_holds_the_network(site: Site, line: SlowLine) -> None:
    """Over 200 ms each way with a twentieth lost, latency and power are those that are measured on the board itself."""
    far = measured_on(site.uri)
    near = measured_on(f"jetson?root={site.root}")
    assert line.lost > 0
    assert line.passed[0] > 100_000
    assert far.power_w == pytest.approx(near.power_w, rel=0.02)
    # A single query that held a way of the line would be 200 ms longer; how busy the machine is, is far less.
    assert far.latency.mean_s == pytest.approx(near.latency.mean_s, abs=0.1)


def test_a_line_that_is_cut_gives_the_board_back(site: Site, line: SlowLine, tmp_path: Path) -> None:
    """Both ends see it: one line at the desk, the board as it was found, nothing of ours left."""
    before = held(site.root)
    device = open_device(site.uri, ["mem_hz"])

    def cut_while_set() -> None:
        with device:
            device.apply(device.space.default.moved({"mem_hz": device.space.knob("mem_hz").levels[0]}))
            assert held(site.root) != before
            line.cut()
            device.read()

    with pytest.raises(DeviceError) as caught:
        cut_while_set()
    assert "\n" not in str(caught.value)
    await_that(lambda: held(site.root) == before, "the board stays changed")
    await_that(lambda: not far_sides(tmp_path), "the far side stays")


def test_what_is_handed_over_stands_without_a_connection_and_is_restored(
    site: Site, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """What was left in place stands under a guard on the board after the desk has gone; restore gives it back."""
    before = held(site.root)
    device = open_device(site.uri, ["mem_hz"])
    assert isinstance(device, Lasting)
    with device:
        device.apply(device.space.default.moved({"mem_hz": device.space.knob("mem_hz").levels[0]}))
        device.hand_over("profile of a test", 3600.0)
    await_that(lambda: not far_sides(tmp_path), "the far side stays")
    assert held(site.root) != before
    assert run(["apply", "--confirm", "--device", site.uri]) == 0
    assert "stands until polythrottle restore" in capsys.readouterr().out
    assert run(["restore", "--device", site.uri, "--json"]) == 0
    assert held(site.root) == before
    assert json.loads(capsys.readouterr().out)


def test_a_daemon_of_a_board_is_asked_from_the_desk(
    site: Site, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its status, a look of top, a budget and its end; where none listens, or nobody is let in, one line."""
    for kind in ("RUN", "STATE"):
        monkeypatch.setenv(f"POLYTHROTTLE_{kind}_DIR", str(tmp_path / kind.lower()))
    board = f"ssh://nano?python={site.python}"
    words = ["daemon", "run", "--device", "sim:jetson-agx-orin", "--traffic", "report"]
    with (tmp_path / "daemon.log").open("w") as log:
        child = subprocess.Popen([sys.executable, "-m", "polythrottle", *words], stdout=log, stderr=log)
        try:
            await_that(lambda: run(["daemon", "status"]) == 0, "the daemon did not begin")
            capsys.readouterr()
            assert run(["daemon", "status", "--json", "--device", board]) == 0
            assert json.loads(capsys.readouterr().out)["device"] == "sim:jetson-agx-orin"
            assert run(["top", "--device", board]) == 0
            assert "Jetson AGX Orin" in capsys.readouterr().out
            assert run(["daemon", "budget", "--power", "20W", "--device", board]) == 0
            follows = [sys.executable, "-m", "polythrottle", "daemon", "status", "--follow", "--device", board]
            with subprocess.Popen(follows, stdout=subprocess.PIPE) as killed:
                assert killed.stdout is not None
                killed.stdout.readline()
                killed.kill()
            await_that(lambda: not sessions(site), "a connection outlives who asked")
            assert run(["daemon", "stop", "--device", board]) == 0
            assert "ssh://nano" not in capsys.readouterr().err
            assert child.wait(60) == 0
        finally:
            child.kill()
            child.wait()
    for device, says in {
        board: "no daemon listens on ssh://nano, at ",
        f"ssh://stranger?python={site.python}": "ssh://stranger lets nobody in with these keys",
        site.uri: "name the board alone, ssh://nano",
        "sim:jetson-agx-orin": "is no board over SSH",
    }.items():
        assert run(["top", "--device", device]) != 0
        assert says in capsys.readouterr().err
    await_that(lambda: not sessions(site), "a connection stays")
