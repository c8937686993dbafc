"""A device behind the actuator, as the tuner sees it: the same as the device itself."""

import os
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from actuators import GPU, MEM, Bench, bench

from polythrottle.actuation.client.connection import Line
from polythrottle.actuation.wire import LeaseOver
from polythrottle.backends import DeviceURI, open_device, remote
from polythrottle.backends.jetson import JetsonDevice
from polythrottle.backends.remote import RemoteDevice
from polythrottle.cli.commands import run
from polythrottle.domain.errors import DeviceError, KnobRejected, UnknownName
from polythrottle.domain.measurement import EnergyKind
from polythrottle.domain.ports import Device, Inspectable, Offering
from polythrottle.domain.space import OperatingPoint
from polythrottle.storage.identity import identity_of
from polythrottle.testing import DeviceContract, FakeKernel, Fault


@pytest.fixture
def board(tmp_path: Path) -> Iterator[Bench]:
    """An actuator in this process."""
    with bench(tmp_path) as found:
        yield found


def device(board: Bench, **words: Any) -> RemoteDevice:
    """Return the board behind it."""
    board.peer = None
    return RemoteDevice(board.path, **words)


class TestRemoteDevice(DeviceContract):
    """The contract of all devices, kept over the socket."""

    @pytest.fixture(autouse=True)
    def served(self, board: Bench) -> None:
        """Serve a board."""
        self.board = board

    def make(self) -> Device:
        """Return the board behind the actuator."""
        return device(self.board)


@pytest.mark.slow
def test_it_is_the_device_itself(board: Bench) -> None:
    """URI, title, identity, energy, presets, knobs and search space are those of the device."""
    here, there = JetsonDevice(root=str(board.root)), device(board)
    assert isinstance(there, Inspectable)
    assert isinstance(there, Offering)
    assert (there.uri, there.title, there.boundary) == (here.uri, here.title, here.boundary)
    assert there.energy_kind is here.energy_kind is EnergyKind.SIMULATED
    assert identity_of(there) == identity_of(here)
    assert there.presets == here.presets
    assert there.offers() == here.offers()
    assert there.space.fingerprint == here.space.fingerprint
    assert there.findings()[:-1] == here.findings()
    assert str(board.path) in there.findings()[-1].explanation
    named = device(board, knobs=(GPU, "cpu_max_hz"))
    assert named.space.fingerprint == JetsonDevice(root=str(board.root), knobs=(GPU, "cpu_max_hz")).space.fingerprint


def test_a_uri_opens_it(board: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """With socket and device, whose own options follow it; without either it is this machine's and the only one."""
    inner = f"jetson?root={board.root}"
    uris = [f"actuator:{board.path}?device={inner}", f"actuator:{board.path}", f"actuator:{board.path}?token=x"]
    monkeypatch.setenv("POLYTHROTTLE_RUN_DIR", str(board.path.parent))
    (board.path.parent / "actuator.sock").symlink_to(board.path)
    for uri in (*uris, "actuator:"):
        found = open_device(uri)
        assert isinstance(found, RemoteDevice)
        assert found.uri == inner
    options = DeviceURI.parse(f"actuator:/s?device={inner}&hz=20&token=abc").options
    with pytest.raises(UnknownName, match="hz=20"):
        RemoteDevice.open(str(board.path), options)
    with pytest.raises(DeviceError, match="no actuator listens"):
        open_device("actuator:/nonexistent/a.sock")


@pytest.mark.slow
def test_entering_takes_the_board_and_leaving_gives_it_back(board: Bench) -> None:
    """Only entered can it be set; afterwards it is as found and free."""
    before, there = board.held(), device(board)
    low = OperatingPoint({MEM: there.space.knob(MEM).levels[0]})
    with pytest.raises(DeviceError, match="must be entered"):
        there.apply(low)
    with there:
        there.apply(low)
        assert board.held() != before
        assert there.altered() == ()
        with pytest.raises(DeviceError, match="is held by process"):
            device(board).__enter__()
        there.restore()
        assert board.held() == before
        there.apply(low)
        with pytest.raises(KnobRejected):
            there.apply(OperatingPoint({MEM: 1}))
    assert board.held() == before
    with there:
        pass
    assert there.left == ()


@pytest.mark.slow
def test_a_loan_is_entered_more_than_once(board: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """By the token in the environment; leaving puts the board back, and the loan lasts until it is taken back."""
    line = board.line()
    token = line.ask("take", device="", seconds=60)["token"]
    loan = line.ask("lend", token=token, seconds=1)["token"]
    monkeypatch.setenv("POLYTHROTTLE_TOKEN", loan)
    with device(board) as there:
        board.time.now_s += 50  # entering has renewed it
        there.apply(OperatingPoint({MEM: there.space.knob(MEM).levels[0]}))
    assert line.ask("renew", token=token, seconds=60)["lent"]
    with device(board):
        pass
    line.ask("take_back", token=token)
    line.ask("apply", token=token, point={})
    monkeypatch.setenv("POLYTHROTTLE_TOKEN", "stale")
    with pytest.raises(LeaseOver):
        device(board).__enter__()


def test_it_is_renewed_while_it_is_entered(board: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """By a thread, which says so when the lease is lost; then nothing is set any more and leaving is quiet."""
    monkeypatch.setattr(remote, "MOST_S", 0.04)
    asked, lost = threading.Semaphore(0), threading.Event()
    usual = Line.ask

    def ask(line: Line, verb: str, **fields: Any) -> dict[str, Any]:
        if verb == "renew":
            asked.release()
            if lost.is_set():
                raise LeaseOver("it was ended")
        return usual(line, verb, **fields)

    monkeypatch.setattr(Line, "ask", ask)
    with device(board) as there:
        assert [asked.acquire(timeout=30) for _ in range(3)] == [True] * 3
        lost.set()
        assert there._beat is not None
        there._beat.join(timeout=30)
        with pytest.raises(LeaseOver, match="has been lost: it was ended"):
            there.apply(OperatingPoint({}))


def test_too_many_writes_are_waited_out(board: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """The rate limit slows a study down and does not end it."""
    waits = []

    def sleep(seconds: float) -> None:
        waits.append(seconds)
        board.time.now_s += seconds

    monkeypatch.setattr("time.sleep", sleep)
    with device(board) as there:
        for _ in range(30):
            there.apply(OperatingPoint({}))
    assert waits
    assert max(waits) <= 0.11


@pytest.mark.slow
def test_what_is_left_changed_is_told(board: Bench) -> None:
    """What somebody else has set stays, and is named on leaving."""
    with device(board) as there:
        levels = there.space.knob(GPU).levels
        there.apply(OperatingPoint({GPU: levels[2]}))
        key = next(each.key for each in FakeKernel(board.root).writes() if each.key.endswith("/max_freq"))
        (board.root / key.removeprefix(str(board.root)).lstrip("/")).write_text(f"{levels[1]}\n")
        assert there.altered() == (GPU,)
    assert any("max_freq" in each for each in there.left)


def lowest(there: RemoteDevice) -> OperatingPoint:
    """Return a point that changes the memory's clock."""
    return OperatingPoint({MEM: there.space.knob(MEM).levels[0]})


@pytest.mark.slow
@pytest.mark.parametrize("idle_s", [0.0, 1000.0])
def test_what_cannot_be_put_back_is_an_error_on_leaving(board: Bench, idle_s: float) -> None:
    """As it is without an actuator in between, also where the lease had ended by itself."""
    before = board.held()
    there = device(board).__enter__()
    there.apply(lowest(there))
    FakeKernel(board.root).fail(Fault("EIO", match="*/mrq_rate_locked", times=0))
    board.time.now_s += idle_s
    with pytest.raises(DeviceError, match="mrq_rate_locked"):
        there.__exit__(None, None, None)
    FakeKernel(board.root).heal()
    board.time.now_s += 6
    board.line().ask("hello")
    assert board.held() == before


@pytest.mark.slow
def test_what_was_left_is_told_though_another_has_tried_to_take_the_board(board: Bench) -> None:
    """Who fails to enter because of what is left does not hide it from whoever left it."""
    there = device(board).__enter__()
    there.apply(lowest(there))
    FakeKernel(board.root).fail(Fault("EIO", match="*/mrq_rate_locked", times=0))
    board.time.now_s += 1000
    board.line().ask("hello")
    with pytest.raises(DeviceError):
        device(board).__enter__()
    with pytest.raises(DeviceError, match="mrq_rate_locked"):
        there.__exit__(None, None, None)
    FakeKernel(board.root).heal()


@pytest.mark.slow
def test_what_a_loan_that_ran_out_has_left_is_an_error_on_leaving(
    board: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The lender's lease has ended with it, and the study says what it left."""
    line = board.line()
    token = line.ask("take", device="", seconds=60)["token"]
    monkeypatch.setenv("POLYTHROTTLE_TOKEN", line.ask("lend", token=token, seconds=1)["token"])
    there = device(board).__enter__()
    there.apply(lowest(there))
    FakeKernel(board.root).fail(Fault("EIO", match="*/mrq_rate_locked", times=0))
    board.time.now_s += 59.5
    line.ask("renew", token=token, seconds=60)
    board.time.now_s += 1
    with pytest.raises(DeviceError, match="mrq_rate_locked"):
        there.__exit__(None, None, None)
    FakeKernel(board.root).heal()


@pytest.mark.slow
def test_what_an_actuator_that_hangs_up_may_have_left_is_named(board: Bench) -> None:
    """Nobody here knows then whether it was put back: the knobs that were set are in the error."""
    there = device(board).__enter__()
    there.apply(lowest(there))
    board.server.stop()
    board.path.unlink()
    there._idle()
    with pytest.raises(DeviceError, match=f"whether these were put back is not known here: {MEM}$"):
        there.__exit__(None, None, None)


def test_the_answer_to_an_interrupted_request_is_not_taken_for_that_to_the_next(board: Bench) -> None:
    """Over the same connection the device is put back, and the Ctrl-C stays one; half a request ends it."""
    before = board.held()
    there = device(board)
    line = there._line
    wait = line._own_answer

    def interrupted(*_: Any) -> Any:
        line._own_answer = wait  # type: ignore[method-assign]
        raise KeyboardInterrupt

    with there:
        there.apply(lowest(there))
        channel = line._channel
        assert channel is not None
        line._own_answer = interrupted  # type: ignore[method-assign, assignment]
        with pytest.raises(KeyboardInterrupt):
            there.read()
        assert line._channel is channel
    assert board.held() == before
    with there:
        there.read()
        channel = line._channel
        assert channel is not None
        channel.send_line = interrupted  # type: ignore[method-assign, assignment]
        with pytest.raises(KeyboardInterrupt):
            there.read()
        assert not line.connected
        assert there.read().energy_j >= 0


@pytest.mark.slow
def test_a_fork_sets_nothing(board: Bench) -> None:
    """The lease is that of the process which took it."""
    with device(board) as there:
        there.apply(lowest(there))
        held = board.held()
        child = os.fork()
        if not child:
            code = 1
            try:
                there.apply(OperatingPoint({}))
            except DeviceError as err:
                code = 0 if "which has forked this one" in str(err) else 2
            finally:
                os._exit(code)
        assert os.waitpid(child, 0)[1] == 0
        assert board.held() == held


@pytest.mark.slow
def test_a_device_that_is_gone_is_said(board: Bench) -> None:
    """The lease is over then, and so it stays until it is entered again."""
    with device(board) as there:
        FakeKernel(board.root).fail(Fault("ENODEV", match="*/rate", times=0))
        low = OperatingPoint({MEM: there.space.knob(MEM).levels[0]})
        with pytest.raises(DeviceError, match="the device or its driver is gone"):
            there.apply(low)
        FakeKernel(board.root).heal()
        with pytest.raises(LeaseOver):
            there.apply(low)


def test_an_answer_of_another_version_is_no_traceback(board: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """What lacks something says what."""
    there = device(board)
    there._about = {"presets": 7, "energy_kind": "odd", "knobs": [{}]}
    for name in ("uri", "title", "presets", "energy_kind", "identity"):
        with pytest.raises(DeviceError, match=f"of another version: its {name}"):
            getattr(there, name)
    with pytest.raises(DeviceError, match="of another version"):
        there.offers()
    monkeypatch.setattr(Line, "ask", lambda line, verb, **fields: {"joules": 1})
    with pytest.raises(DeviceError, match="of another version"):
        there.read()


@pytest.mark.slow
def test_it_is_measured_from_the_command_line(board: Bench, capsys: pytest.CaptureFixture[str]) -> None:
    """Polythrottle measure works through the actuator, at a point, and gives the board back."""
    before = board.held()
    uri = f"actuator:{board.path}?device=jetson?root={board.root}"
    words = ["measure", "--device", uri, "--workload", "cmd:true", "--queries", "5", "--seconds", "0.2", "--json"]
    assert run([*words, "--point", "mem_mhz=204"]) == 0, capsys.readouterr().err
    assert '"energy_j' in capsys.readouterr().out
    assert board.held() == before
