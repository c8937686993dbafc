"""The board as the control loop sees it: behind an actuator on a planted Jetson, and opened in this process."""

import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from actuators import BOARD, GPU, Bench, Process, bench

from polythrottle.actuation.client.board import LEASE_S, ActuatorBoard, LocalBoard, SeparateLender
from polythrottle.actuation.client.connection import Line
from polythrottle.backends import open_device
from polythrottle.backends.served_devices import ContinuousReadings
from polythrottle.domain.clock import SystemClock, VirtualClock
from polythrottle.domain.errors import DeviceError, InvalidInput, KnobRejected, PolythrottleError
from polythrottle.domain.measurement import EnergyKind, Reading
from polythrottle.domain.space import OperatingPoint
from polythrottle.testing import FakeKernel, Fault, plant


@pytest.fixture
def served(tmp_path: Path) -> Iterator[Bench]:
    """Serve a planted Jetson."""
    with bench(tmp_path) as found:
        yield found


BOARDS_MADE: list[ActuatorBoard] = []


@pytest.fixture(autouse=True)
def hung_up() -> Iterator[None]:
    """Hang up for boards that were not released."""
    yield
    while BOARDS_MADE:
        BOARDS_MADE.pop()._line.close()


def board_at(served: Bench, folder: Path, clock: VirtualClock | None = None) -> ActuatorBoard:
    """Return a board of the actuator."""
    BOARDS_MADE.append(ActuatorBoard(served.path, None, folder / "lease.token", clock or VirtualClock()))
    return BOARDS_MADE[-1]


def found(served: Bench) -> list[int]:
    """Return the levels of the GPU clock."""
    told = served.line().ask("describe", device=f"jetson?root={served.root}")
    return list(next(each for each in told["knobs"] if each["name"] == GPU)["levels"])


def low(served: Bench) -> OperatingPoint:
    """Return a point with the lowest GPU clock."""
    return OperatingPoint({GPU: min(found(served))})


def test_an_applied_point_is_put_back_on_release(served: Bench, tmp_path: Path) -> None:
    """What was applied holds, reads back, and is as found after the release; the token is gone then."""
    board, before = board_at(served, tmp_path), served.held()
    board.take()
    board.apply(low(served))
    assert served.held() != before
    assert board.verify() == ()
    assert board.read().energy_j >= 0
    board.release()
    assert served.held() == before
    assert not (tmp_path / "lease.token").exists()


def test_what_a_release_leaves_is_said(served: Bench, tmp_path: Path) -> None:
    """A control that somebody else has set is named by the release, by a second one too, until it is taken again."""
    board = board_at(served, tmp_path)
    board.take()
    board.apply(low(served))
    key = next(key for key in served.held() if "gpu" in key and key.endswith("/max_freq"))
    other = next(hz for hz in sorted(found(served), reverse=True)[1:] if str(hz) != served.held()[key])
    Path(f"{served.root}{key}").write_text(f"{other}\n")
    (left,) = board.release()
    assert f"{key} holds {other}" in left
    assert board.release() == (left,)


def test_an_actuator_that_does_not_answer_a_release_is_not_passed_over(served: Bench, tmp_path: Path) -> None:
    """A release that failed leaves it unknown whether the board was restored, the second time too."""
    board = board_at(served, tmp_path)
    board.take()
    board._line.close()
    board._line = Line(tmp_path / "none.sock", 1.0)
    with pytest.raises(DeviceError):
        board.release()
    assert board.release() == ("whether the board was restored is not known",)


def test_restore_keeps_the_lease(served: Bench, tmp_path: Path) -> None:
    """After a restore the board is as found and can be set again without asking anew."""
    board, before = board_at(served, tmp_path), served.held()
    board.take()
    board.apply(low(served))
    board.restore()
    assert served.held() == before
    board.apply(low(served))
    assert served.held() != before
    board.release()


def test_a_daemon_started_again_goes_on_with_its_lease(served: Bench, tmp_path: Path) -> None:
    """With the token in its file a second board has what holds, and the first one's right is void."""
    first = board_at(served, tmp_path)
    first.take()
    first.apply(low(served))
    held = served.held()
    assert (tmp_path / "lease.token").stat().st_mode & 0o777 == 0o600
    second = board_at(served, tmp_path)
    second.take()
    assert served.held() == held
    with pytest.raises(DeviceError):
        first.apply(low(served))
    second.release()


def test_a_lease_of_another_is_not_taken(served: Bench, tmp_path: Path) -> None:
    """While another holds the board, taking it fails and says who has it."""
    first = board_at(served, tmp_path / "first")
    first.take()
    with pytest.raises(DeviceError, match="the daemon"):
        board_at(served, tmp_path / "second").take()
    first.release()


def test_a_lease_that_ran_out_is_noticed_and_can_be_taken_again(served: Bench, tmp_path: Path) -> None:
    """A lease nobody renewed in time is over: the board is as found, and the next take gets another."""
    clock, before = VirtualClock(), served.held()
    board = board_at(served, tmp_path, clock)
    board.take()
    board.apply(low(served))
    served.time.now_s += LEASE_S + 1
    clock.sleep(LEASE_S + 1)
    with pytest.raises(DeviceError):
        board.take()
    assert served.held() == before
    board.take()
    board.apply(low(served))
    board.release()


def test_what_a_lease_that_ran_out_has_left_is_said_at_the_end(served: Bench, tmp_path: Path) -> None:
    """The actuator could not put it back when nobody renewed: the release names it, though the lease is over."""
    clock = VirtualClock()
    board = board_at(served, tmp_path, clock)
    board.take()
    board.apply(low(served))
    FakeKernel(served.root).fail(Fault("EIO", match="*/max_freq", times=0))
    served.time.now_s += LEASE_S + 1
    clock.sleep(LEASE_S + 1)
    with pytest.raises(DeviceError):
        board.take()
    (left,) = board.release()
    assert "max_freq" in left
    FakeKernel(served.root).heal()


def test_a_lease_is_renewed_before_it_is_over(served: Bench, tmp_path: Path) -> None:
    """Taking it each second keeps it for as long as one does."""
    clock = VirtualClock()
    board = board_at(served, tmp_path, clock)
    board.take()
    board.apply(low(served))
    held = served.held()
    for _ in range(60):
        served.time.now_s += 1.0
        clock.sleep(1.0)
        board.take()
    assert served.held() == held
    board.release()


def test_a_level_the_board_has_not_is_rejected(served: Bench, tmp_path: Path) -> None:
    """An unknown level is a rejected knob, and nothing is written."""
    board, before = board_at(served, tmp_path), served.held()
    board.take()
    with pytest.raises((KnobRejected, PolythrottleError)):
        board.apply(OperatingPoint({GPU: 123}))
    assert served.held() == before
    board.release()


def test_another_writer_is_named_by_its_knob(served: Bench, tmp_path: Path) -> None:
    """Verify names the knob that no longer holds what was applied."""
    board = board_at(served, tmp_path)
    board.take()
    board.apply(low(served))
    key = next(key for key in served.held() if "gpu" in key and key.endswith("/max_freq"))
    Path(f"{served.root}{key}").write_text(f"{max(found(served))}\n")
    assert GPU in board.verify()
    board.release()


def test_a_loan_keeps_the_daemon_from_writing(served: Bench, tmp_path: Path) -> None:
    """While a study has the board the daemon cannot set it; taken back, it is as found and can be set."""
    board, before = board_at(served, tmp_path), served.held()
    board.take()
    uri, environment = board.lend()
    assert uri.startswith(f"actuator:{served.path}?device=jetson")
    assert environment["POLYTHROTTLE_TOKEN"]
    with pytest.raises(DeviceError):
        board.apply(low(served))
    board.take_back()
    assert served.held() == before
    board.apply(low(served))
    board.release()


def test_what_the_board_is_comes_from_the_actuator(served: Bench, tmp_path: Path) -> None:
    """Title, URI and identity are those of the device behind it; unknown before it answers."""
    board = board_at(served, tmp_path)
    assert board.uri.startswith("actuator:")
    assert "soc" in board.identity() or board.identity()
    assert board.uri == f"jetson?root={served.root}"
    assert board.title


def test_without_an_actuator_every_verb_is_an_error(tmp_path: Path) -> None:
    """Where nothing listens taking and reading fail in words, and releasing what was never had does not."""
    board = ActuatorBoard(tmp_path / "none.sock", "jetson", tmp_path / "t", VirtualClock())
    for verb in (board.take, board.read, board.verify):
        with pytest.raises(DeviceError):
            verb()
    assert board.identity() == {}
    board.release()


def test_a_token_that_others_could_have_written_is_not_used(tmp_path: Path) -> None:
    """A token file with loose rights counts for nothing."""
    file = tmp_path / "lease.token"
    file.write_text("secret")
    file.chmod(0o644)
    assert ActuatorBoard(tmp_path / "none.sock", None, file, VirtualClock())._token == ""


@pytest.mark.slow
def test_an_actuator_that_was_killed_is_found_again(tmp_path: Path) -> None:
    """A new actuator process restores what a killed one left; the lease is void, and the board can be taken anew."""
    root = plant(BOARD, tmp_path / "b")
    before = FakeKernel(root).snapshot()
    process = Process(root, tmp_path / "a.sock")
    board = ActuatorBoard(tmp_path / "a.sock", None, tmp_path / "t", SystemClock())
    BOARDS_MADE.append(board)
    board.take()
    told = board._line.ask("describe", device=board.uri)
    point = OperatingPoint({GPU: min(next(each for each in told["knobs"] if each["name"] == GPU)["levels"])})
    board.apply(point)
    assert FakeKernel(root).snapshot() != before
    process.end(signal.SIGKILL)
    with pytest.raises(DeviceError):
        board.read()
    process = Process(root, tmp_path / "a.sock")
    assert FakeKernel(root).snapshot() == before
    with pytest.raises(DeviceError):
        board.apply(point)
    board.take()
    board.apply(point)
    board.release()
    assert FakeKernel(root).snapshot() == before
    assert process.end()[0] == 0


def test_a_local_board_enters_sets_and_restores() -> None:
    """A device opened here is set once taken, not before, and left as it was found."""
    board = LocalBoard(open_device("sim:jetson-agx-orin"), VirtualClock())
    point = OperatingPoint({GPU: 624_750_000, "gpu_min_hz": 624_750_000})
    with pytest.raises(DeviceError, match="not held"):
        board.apply(point)
    board.take()
    board.take()
    board.apply(point)
    assert board.read().clocks_hz["gpu"] == 624_750_000
    assert board.verify() == ()
    assert board.energy_kind is EnergyKind.SIMULATED
    board.release()
    assert board.read().clocks_hz["gpu"] != 624_750_000


def test_what_somebody_else_has_set_is_said_of_a_local_board_that_was_set() -> None:
    """Not before anything was applied, and not after it was left, for then nothing is claimed."""
    device = open_device("sim:jetson-agx-orin")
    device.altered = lambda: (GPU,)  # type: ignore[attr-defined]
    board = LocalBoard(device, VirtualClock())
    board.take()
    assert board.verify() == ()
    board.apply(OperatingPoint({}))
    assert board.verify() == (GPU,)
    board.release()
    assert board.verify() == ()


def test_simulated_time_follows_the_loop() -> None:
    """A simulated board draws energy while the clock of the control loop moves."""
    clock = VirtualClock()
    board = LocalBoard(open_device("sim:jetson-agx-orin?noise=0"), clock)
    board.take()
    before = board.read()
    clock.sleep(10.0)
    after = board.read()
    assert after.time_s - before.time_s == pytest.approx(10.0)
    assert after.energy_j > before.energy_j


def test_a_recorded_table_is_no_board(tmp_path: Path) -> None:
    """There is nothing to set on a table."""
    table = Path(__file__).parents[2] / "examples" / "cpu-convnet-sweep.csv"
    with pytest.raises(InvalidInput, match="recorded table"):
        LocalBoard(open_device(f"replay:{table}"), VirtualClock())


def test_a_local_board_is_lent_by_leaving_it() -> None:
    """A study of a device opened here opens it itself, which needs it to be left."""
    board = LocalBoard(open_device("sim:jetson-agx-orin"), VirtualClock())
    board.take()
    assert board.lend() == ("sim:jetson-agx-orin", {})
    board.take_back()
    board.apply(OperatingPoint({}))
    assert SeparateLender("sim:x").lend() == ("sim:x", {})


def test_a_local_counter_that_falls_began_anew() -> None:
    """It is counted while the device is held, and not over a loan, after which the counter is another."""
    clock = VirtualClock()
    board = LocalBoard(open_device("sim:jetson-agx-orin"), clock)
    board.take()
    joules = iter([50.0, 60.0, 1.0, 2.0, 0.5])
    board._device.read = lambda: Reading(clock.now(), next(joules))  # type: ignore[method-assign]
    assert [(board.read(), board.anew)[1] for _ in range(4)] == [0, 0, 1, 1]
    board.release()
    board.take()
    assert (board.read().energy_j, board.anew) == (0.5, 1)
    board.release()


def test_the_actuator_tells_of_a_counter_that_began_anew() -> None:
    """Its own total never falls, so that it says how often the device's did."""
    device = open_device("sim:jetson-agx-orin")
    meter = ContinuousReadings()
    joules = iter([50.0, 60.0, 1.0, 3.0])
    device.read = lambda: Reading(0.0, next(joules))  # type: ignore[method-assign]
    found = [meter.read(device) for _ in range(4)]
    assert [each["anew"] for each in found] == [0, 0, 1, 1]
    assert [each["energy_j"] for each in found] == [0.0, 10.0, 10.0, 12.0]


def test_a_token_that_cannot_be_kept_holds_nobody_up(served: Bench, tmp_path: Path) -> None:
    """A file stands where its folder is needed: the board is taken and set; only a daemon started again begins anew."""
    (tmp_path / "no folder").write_text("")
    board, before = board_at(served, tmp_path / "no folder"), served.held()
    board.take()
    board.apply(low(served))
    assert served.held() != before
    board.release()
