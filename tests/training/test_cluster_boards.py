"""A node's boards: how they are named, opened and taken together."""

from pathlib import Path

import pytest
from actuators import bench

from polythrottle.domain.clock import VirtualClock
from polythrottle.domain.errors import DeviceError, InvalidInput, UnknownName
from polythrottle.domain.space import OperatingPoint
from polythrottle.storage.paths import ACTUATOR_SOCKET, socket_path
from polythrottle.training.elastic.nodes.steered_node import (
    BoardGroup,
    BusyBoard,
    actuator_there,
    check_boards,
    open_boards,
)

CAPPED = OperatingPoint({"power_limit_w": 200})


def test_a_simulated_board_is_busy_and_feels_its_cap(tmp_path: Path) -> None:
    """Its power under 200 W is below 200 W and a fifth below that at its default; both are simulated."""
    clock = VirtualClock()
    found = open_boards(["sim:a100?noise=0"], clock, tmp_path, "a test")
    assert (found.gpu, found.limits_w) == ("NVIDIA-A100-PCIe-40-GB-simulated", (150.0, 175.0, 200.0, 225.0))
    assert found.board.energy_kind == "simulated"
    powers_w = []
    found.board.take()
    for point in (None, CAPPED):
        if point is not None:
            found.board.apply(point)
        before = found.board.read()
        clock.sleep(20.0)
        after = found.board.read()
        assert after.time_s - before.time_s == pytest.approx(20.0, abs=0.1)
        powers_w.append((after.energy_j - before.energy_j) / (after.time_s - before.time_s))
    assert powers_w == [pytest.approx(237.5, rel=0.01), pytest.approx(190.0, rel=0.01)]
    assert found.board.release() == ()


def test_several_boards_are_set_as_one_and_their_joules_add_up(tmp_path: Path) -> None:
    """Two alike draw twice as much; both are capped, and both are let go."""
    clock = VirtualClock()
    uris = ["sim:a100?noise=0", "sim:a100?seed=1&noise=0"]
    found, alone = open_boards(uris, clock, tmp_path, "a test"), open_boards(uris[:1], clock, tmp_path, "a test")
    assert (found.gpus, found.gpu) == (2, "2x-NVIDIA-A100-PCIe-40-GB-simulated")
    assert isinstance(found.board, BoardGroup)
    assert found.board.uri == ",".join(uris)
    found.board.take()
    found.board.apply(CAPPED)
    alone.board.take()
    alone.board.apply(CAPPED)
    before = found.board.read().energy_j, alone.board.read().energy_j
    clock.sleep(10.0)
    after = found.board.read().energy_j, alone.board.read().energy_j
    assert after[0] - before[0] == pytest.approx(2 * (after[1] - before[1]), rel=0.01)
    assert found.board.verify() == ()
    found.board.restore()
    assert found.board.release() == alone.board.release() == ()


class Stuck:
    """A board that cannot be let go."""

    def __init__(self) -> None:
        self.asked = 0

    def release(self) -> tuple[str, ...]:
        """Fail."""
        self.asked += 1
        raise DeviceError("gone")


def test_one_board_that_fails_does_not_keep_the_others() -> None:
    """All are let go; the failure is told afterwards."""
    boards = [Stuck(), Stuck()]
    with pytest.raises(DeviceError, match="gone"):
        BoardGroup(boards).release()  # type: ignore[arg-type]
    assert [board.asked for board in boards] == [1, 1]


def test_boards_of_different_limits_share_those_they_have_in_common(tmp_path: Path) -> None:
    """A V100 and an A100: what both can be set to."""
    found = open_boards(["sim:a100", "sim:v100"], VirtualClock(), tmp_path, "a test")
    assert found.limits_w == (150.0, 175.0, 200.0, 225.0)
    assert found.gpu.startswith("2x-")


def test_a_board_that_is_no_simulation_is_not_made_busy(tmp_path: Path) -> None:
    """This machine's processor has no power limit to set."""
    found = open_boards(["cpu?watts_per_core=10"], VirtualClock(), tmp_path, "a test")
    assert found.limits_w == ()
    assert not isinstance(found.board, BusyBoard)


@pytest.mark.parametrize(
    ("words", "error"),
    [
        (["sim:nothing"], UnknownName),
        (["bogus"], UnknownName),
        (["replay:table.csv"], InvalidInput),
        (["sim:a100", "sim:a100"], InvalidInput),
        (["sim:"], InvalidInput),
        (["nvml:0?hz"], InvalidInput),
    ],
)
def test_words_that_name_no_board_are_refused(words: list[str], error: type[Exception]) -> None:
    """One line, before anything starts; what only this machine can tell is not looked at."""
    check_boards(["auto", "nvml:0", "actuator:", "jetson", "cpu", "sim:a100"])
    with pytest.raises(error):
        check_boards(words)


def test_an_actuator_is_asked_before_anything_is_opened(tmp_path: Path) -> None:
    """What it serves is set through it, by name or by ``auto``; what it does not serve is opened here."""
    assert not actuator_there()
    with bench(tmp_path / "actuator", uris=("sim:a100",)) as served:
        path = socket_path(ACTUATOR_SOCKET)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.symlink_to(served.path)
        assert actuator_there()
        for text in ("auto", "sim:a100", f"actuator:{served.path}?device=sim:a100", "actuator:"):
            found = open_boards([text], VirtualClock(), tmp_path, "cluster node a")
            assert "through the actuator" in found.way
            assert found.limits_w == (150.0, 175.0, 200.0, 225.0)
            found.board.take()
            found.board.apply(CAPPED)
            assert served.service.holdings[0].terms.lease.holder.startswith("cluster node a")  # type: ignore[union-attr]
            assert found.board.release() == ()
        assert "through" not in open_boards(["sim:v100"], VirtualClock(), tmp_path, "a").way
    path.unlink()
    path.write_text("nobody listens here")
    assert not actuator_there()
