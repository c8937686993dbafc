"""A node's own GPU under a training job."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from actuators import bench

from polythrottle.actuation.client.board import ActuatorBoard, LocalBoard
from polythrottle.backends import open_device
from polythrottle.domain.clock import VirtualClock
from polythrottle.domain.errors import DeviceError, KnobRejected
from polythrottle.domain.fleet.transient_machine import KEPT, Cap, ConstantHazard
from polythrottle.domain.measurement import EnergyKind, Reading
from polythrottle.domain.space import OperatingPoint
from polythrottle.storage.fleet_knowledge import CapObservation, Knowledge, NodeReport
from polythrottle.training.elastic.nodes.power_cap_search import Exploring, NewcomerStep
from polythrottle.training.elastic.nodes.steered_node import CAP_KNOB, SteeredNode, Steps, window

KNOWN = Knowledge(
    "V100",
    "resnet50",
    (
        NodeReport(
            "a", "V100", "resnet50", (CapObservation(None, 1.0, 220.0, 3), CapObservation(200.0, 1.05, 184.0, 3))
        ),
    ),
)
CAP = KNOWN.caps()[1]


class Gpu:
    """A board whose steps take and draw what the fleet knows, times its own silicon; and which fails when told to."""

    uri, title, energy_kind, boundary = "gpu", "a GPU", EnergyKind.MEASURED, "board"

    def __init__(self, factor: float = 1.0, slowdown: float = 1.05) -> None:
        self.factor, self.slowdown = factor, slowdown
        self.limit_w: float | None = None
        self.taken = 0
        self.time_s = self.energy_j = 0.0
        self.fails: Exception | None = None
        self.refuses = False

    def trained(self, steps: int) -> None:
        """Let steps pass."""
        step_s = self.factor * (1.0 if self.limit_w is None else self.slowdown)
        self.time_s += step_s * steps
        self.energy_j += (220.0 if self.limit_w is None else 184.0) * step_s * steps

    def take(self) -> None:
        """Take or renew."""
        if self.fails:
            raise self.fails
        self.taken += 1

    def apply(self, point: OperatingPoint) -> None:
        """Set the limit."""
        if self.refuses:
            raise KnobRejected("power_limit_w 200 is not among the levels")
        self.limit_w = float(point[CAP_KNOB])

    def read(self) -> Reading:
        """Return the counters."""
        return Reading(self.time_s, self.energy_j, 50.0, {}, False)

    def verify(self) -> tuple[str, ...]:
        """Return nothing."""
        return ()

    def restore(self) -> None:
        """Put the limit back."""
        self.limit_w = None

    def release(self) -> tuple[str, ...]:
        """Put it back and let it go."""
        self.limit_w = None
        return ()

    def lend(self) -> tuple[str, dict[str, str]]:
        """Lend nothing."""
        raise AssertionError

    def take_back(self) -> None:
        """Take nothing back."""
        raise AssertionError


def trained(node: SteeredNode, gpu: Gpu, count: int) -> list[NewcomerStep]:
    """Train for so many windows and return what the node did after each."""
    found = []
    for _ in range(count):
        gpu.trained(10)
        found.append(node.stepped(10).next)
    return found


def test_a_newcomer_verifies_what_the_fleet_knows_and_keeps_it() -> None:
    """Calibrated in three windows, verified in three more after the change; then it holds the cap and the lease."""
    gpu = Gpu(1.1)
    node = SteeredNode("n", gpu, KNOWN, CAP, steps=10)
    found = trained(node, gpu, 9)
    assert found == [
        *(NewcomerStep.WARMING, NewcomerStep.WARMING, NewcomerStep.CALIBRATING, NewcomerStep.VERIFYING),
        *(NewcomerStep.VERIFYING, NewcomerStep.VERIFYING, NewcomerStep.VERIFYING, NewcomerStep.KEPT, NewcomerStep.KEPT),
    ]
    assert (gpu.limit_w, node.verdict.factor) == (200.0, pytest.approx(1.1))
    assert gpu.taken == 9
    assert [(look.limit_w, look.step_s) for look in node.told().looks] == [
        (None, pytest.approx(1.1)),
        (200.0, pytest.approx(1.1 * 1.05)),
    ]
    node.release()
    assert gpu.limit_w is None


def test_the_power_beside_a_cap_is_that_under_the_cap() -> None:
    """Unknown from the change to the end of the first window under it, when it is set and when it is taken back."""
    gpu = Gpu()
    node = SteeredNode("n", gpu, KNOWN, CAP, steps=10)
    seen = []
    for _ in range(8):
        trained(node, gpu, 1)
        seen.append((node.limit_w, node.power_w))
    default, capped = (None, pytest.approx(220.0)), (200.0, pytest.approx(184.0))
    assert seen == [(None, None), default, default, (200.0, None), capped, capped, capped, capped]
    node.want(None)
    trained(node, gpu, 1)
    assert (node.limit_w, node.power_w) == (None, None)
    trained(node, gpu, 1)
    assert node.power_w == pytest.approx(220.0)
    gpu.fails = DeviceError("gone")
    trained(node, gpu, 1)
    assert (node.limit_w, node.power_w) == (None, None)


def test_where_the_fleet_knows_nothing_a_node_learns_while_it_pays() -> None:
    """A machine that is kept looks at 200 W and stays there; one that lives for seconds is left at its default."""
    unknown = Knowledge("V100", "resnet50")
    for lifetime, last in ((KEPT, NewcomerStep.KEPT), (ConstantHazard(1000.0), NewcomerStep.UNKNOWN)):
        gpu = Gpu(slowdown=1.02)
        exploring = Exploring((200.0,), lifetime, 86400.0)
        node = SteeredNode("n", gpu, unknown, None, steps=10, exploring=exploring)
        found = trained(node, gpu, 12)
        assert found[-1] is last
        assert (NewcomerStep.EXPLORING in found) == (last is NewcomerStep.KEPT)
        assert gpu.limit_w == (200.0 if last is NewcomerStep.KEPT else None)
    assert SteeredNode("n", Gpu(), unknown).exploring is None


def test_a_node_on_which_the_cap_is_worse_goes_back() -> None:
    """It runs 15 % slower where the fleet has 5 %: default clocks, and the reason."""
    gpu = Gpu(slowdown=1.15)
    node = SteeredNode("n", gpu, KNOWN, CAP, steps=10)
    assert trained(node, gpu, 9)[-1] is NewcomerStep.REFUSED
    assert gpu.limit_w is None
    assert "the fleet has 1.050" in node.verdict.reason


def test_a_board_that_cannot_be_reached_does_not_stop_the_training() -> None:
    """It says why, forgets the window, and goes on when it is back."""
    gpu = Gpu()
    node = SteeredNode("n", gpu, KNOWN, CAP, steps=10)
    trained(node, gpu, 2)
    gpu.fails = DeviceError("the actuator cannot be reached")
    trained(node, gpu, 2)
    assert node.trouble == "the actuator cannot be reached"
    gpu.fails = None
    assert trained(node, gpu, 9)[-1] is NewcomerStep.KEPT
    assert node.trouble == ""


def test_a_limit_that_is_refused_leaves_the_default() -> None:
    """A level that this board does not have is not asked for again."""
    gpu = Gpu()
    gpu.refuses = True
    node = SteeredNode("n", gpu, KNOWN, CAP, steps=10)
    trained(node, gpu, 5)
    assert node.wanted is None
    assert gpu.limit_w is None
    assert trained(node, gpu, 1) == [NewcomerStep.UNKNOWN]


def test_a_new_generation_asks_for_another_cap() -> None:
    """Slack gone: the node goes back to its default with the next window."""
    gpu = Gpu()
    node = SteeredNode("n", gpu, KNOWN, CAP, steps=10)
    trained(node, gpu, 9)
    node.want(None)
    trained(node, gpu, 1)
    assert gpu.limit_w is None


def reading(time_s: float, energy_j: float) -> Reading:
    """Return a reading."""
    return Reading(time_s, energy_j, None, {}, False)


@pytest.mark.parametrize(
    ("after", "steps"), [(reading(1.0, 5.0), 3), (reading(2.0, 5.0), 0), (reading(2.0, 3.0), 3), (reading(2.0, 5.0), 3)]
)
def test_a_window_without_time_steps_or_joules_says_nothing(after: Reading, steps: int) -> None:
    """A counter that began anew is not a saving."""
    assert window(None, reading(1.0, 5.0), after, steps) is None


@contextmanager
def local() -> Iterator[LocalBoard]:
    """Hold a simulated V100 in this process."""
    clock = VirtualClock()
    board = LocalBoard(open_device("sim:v100"), clock)
    yield board
    board.release()


def test_a_simulated_v100_is_capped_and_put_back() -> None:
    """The cap holds on the device while the node is in the fleet."""
    with local() as board:
        node = SteeredNode("n", board, KNOWN, CAP, steps=1)
        board.take()
        node._hold(200.0)
        assert board._device.read().time_s >= 0
        assert board._applied == OperatingPoint({CAP_KNOB: 200.0})
        assert node.release() == ()
        assert board._applied is None


def test_through_an_actuator_the_lease_puts_the_board_back(tmp_path: Path) -> None:
    """The node's controller vanishes without a word: when its lease is over, the board is as found."""
    with bench(tmp_path) as served:
        before = served.held()
        board = ActuatorBoard(served.path, None, tmp_path / "token", VirtualClock())
        gpu = next(
            each
            for each in served.line().ask("describe", device=f"jetson?root={served.root}")["knobs"]
            if each["name"] == "gpu_max_hz"
        )
        board.take()
        board.apply(OperatingPoint({"gpu_max_hz": min(gpu["levels"])}))
        assert served.held() != before
        board._line.close()  # gone, without a release
        served.time.now_s += 60.0
        served.service.tick()
        assert served.held() == before


def test_a_node_behind_an_actuator_is_told_what_its_board_does_not_have(tmp_path: Path) -> None:
    """A Jetson has no power limit: the node stays at its default, and training goes on."""
    with bench(tmp_path) as served:
        board = ActuatorBoard(served.path, None, tmp_path / "token", VirtualClock())
        node = SteeredNode("n", board, KNOWN, Cap(200.0, 1.05, 184.0), steps=1)
        board.take()
        node._hold(200.0)
        assert node.verdict.next is NewcomerStep.REFUSED
        assert CAP_KNOB in node.verdict.reason
        node.release()


def test_steps_with_their_own_time_leave_waiting_for_others_out() -> None:
    """Half of each second is waited: the step took 0.5 s, and power × time is still what a step costs."""
    found = window(None, reading(1.0, 5.0), reading(3.0, 405.0), Steps(2, 2.0, 1.0))
    assert found is not None
    assert (found.step_s, found.power_w, found.steps) == (0.5, 400.0, 2)
    assert found.step_s * found.power_w == 400.0 / 2
    assert window(None, reading(1.0, 5.0), reading(3.0, 405.0), Steps(2, 2.0, 0.0)) is None


def test_a_node_that_rests_is_as_found_and_takes_up_where_it_was() -> None:
    """The window that was begun is forgotten; what was learnt is not, and the same cap is set again."""
    gpu = Gpu()
    node = SteeredNode("n", gpu, KNOWN, CAP, steps=10)
    trained(node, gpu, 9)
    assert node.limit_w == 200.0
    known = len(node.windows)
    node.rest()
    assert (gpu.limit_w, node.limit_w, len(node.windows)) == (None, None, known)
    assert trained(node, gpu, 2)[-1] is NewcomerStep.KEPT
    assert gpu.limit_w == 200.0


def test_a_long_window_does_not_cost_the_lease() -> None:
    """It is renewed between; where that fails, that is trouble and the window says nothing."""
    gpu = Gpu()
    node = SteeredNode("n", gpu, KNOWN, CAP, steps=10)
    node.renew()
    assert gpu.taken == 0
    trained(node, gpu, 1)
    node.renew()
    assert gpu.taken == 2
    gpu.fails = DeviceError("the lease is over")
    node.renew()
    assert (node.trouble, node.limit_w) == ("the lease is over", None)


def test_a_node_whose_cap_is_planned_does_not_hold_its_own_best_look() -> None:
    """It has looked at 200 W, and waits at its default for what the group needs."""
    gpu = Gpu(slowdown=1.02)
    exploring = Exploring((200.0,), KEPT, 86400.0)
    node = SteeredNode("n", gpu, Knowledge("V100", "resnet50"), None, steps=10, exploring=exploring, paced=True)
    found = trained(node, gpu, 12)
    assert (NewcomerStep.EXPLORING in found, NewcomerStep.KEPT in found, gpu.limit_w) == (True, False, None)
    node.want(Cap(None, 1.0, 220.0))
    assert trained(node, gpu, 1) == [NewcomerStep.DEFAULT]


def test_a_node_that_trains_for_weeks_keeps_its_newest_windows() -> None:
    """No more than an hour's worth of each limit; what was verified stays verified."""
    gpu = Gpu()
    node = SteeredNode("n", gpu, KNOWN, CAP, steps=10)
    assert trained(node, gpu, 400)[-1] is NewcomerStep.KEPT
    assert len([each for each in node.windows if each.limit_w == 200.0]) == 60
    assert len(node.windows) < 70
