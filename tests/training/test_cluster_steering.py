"""What a node's agent does beside training: its pace, its board, and what the controller asks for."""

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from actuators import bench

from polythrottle.domain.clock import VirtualClock
from polythrottle.domain.errors import StorageError, UnknownName
from polythrottle.domain.space import OperatingPoint
from polythrottle.storage.fleet_knowledge import CapObservation, Knowledge, NodeReport, keep, recall
from polythrottle.storage.object_store import Store
from polythrottle.storage.paths import ACTUATOR_SOCKET, socket_path
from polythrottle.training.elastic.nodes.power_cap_search import NewcomerStep
from polythrottle.training.elastic.nodes.power_controller import (
    AGAIN_S,
    AWAY_S,
    IDLE_S,
    STEPS,
    WATCHED,
    NextMove,
    PowerController,
    WindowProgress,
)
from polythrottle.training.elastic.worker.process import Pace, Tally, write_pace

GPU = "NVIDIA-A100-PCIe-40-GB-simulated"
LOOKS = (CapObservation(None, 0.1, 240.0, 3), CapObservation(200.0, 0.105, 200.0, 3))
CAP = [200.0, 1.05, 200.0]


class Site:
    """A node whose workers and controller are the test's, in virtual time.

    Args:
        folder: Of the test.
        boards: As on the command line.
        step_s: Of the workers, of which a fifth is spent waiting for others.
    """

    def __init__(
        self, folder: Path, boards: tuple[str, ...] | None = ("sim:a100?noise=0",), step_s: float = 0.1
    ) -> None:
        self.clock, self.told, self.store = VirtualClock(), [], Store(str(folder / "store"))
        (folder / "paces").mkdir()
        self.steering = PowerController("n1", boards, self.told.append, 1.0, self.clock, folder / "paces")
        self.steering.open()
        self.steering._store = str(folder / "store")
        self.step_s, self.tally, self.generation, self.network = step_s, Tally(), 1, "Net-1-b8"
        self.standing: dict[str, Any] = {"cap": None, "room": 0.0}

    def train(self, seconds: float, answered: bool = True) -> None:
        """Let the workers train, and the agent look twice a second; the controller answers."""
        for _ in range(round(seconds * 2)):
            steps = round(0.5 / self.step_s)
            self.clock.sleep(0.5)
            self.tally = self.tally.plus(Tally(steps, steps * self.step_s, steps * self.step_s / 5, 0.0))
            pace = Pace(self.generation, self.network, 8, 16, 100_000, self.tally)
            write_pace(self.steering.paces, 0, pace)
            self.steering.turn()
            learning = None if self.steering.steered is None else self.steering.steered.learning
            if learning is not None and learning._busy is not None:
                learning._busy.join()
            if answered:
                self.steering.heed(self.standing)

    @property
    def board(self) -> dict[str, Any]:
        """Return what the node says of its board."""
        return self.steering.words()["steering"]

    def held(self) -> OperatingPoint | None:
        """Return what is set on the board, None for nothing."""
        assert self.steering.steered is not None
        return self.steering.steered.steerable.board._applied  # type: ignore[attr-defined]


@pytest.fixture
def site(tmp_path: Path) -> Iterator[Callable[..., Site]]:
    """Make a site, and close it after the test."""
    made: list[Site] = []

    def of(*words: Any, **more: Any) -> Site:
        made.append(Site(tmp_path, *words, **more))
        return made[-1]

    yield of
    for each in made:
        each.steering.close()


def test_a_newcomer_verifies_what_the_fleet_knows_and_says_so(tmp_path: Path, site: Callable[..., Site]) -> None:
    """The store knows 200 W: calibrated, verified, held, and told with how it was measured; its own word is kept."""
    keep(Store(str(tmp_path / "store")), NodeReport("former", GPU, "Net-1-b8", LOOKS))
    here = site()
    here.standing["cap"] = CAP
    here.train(8.0)
    assert (here.board["verdict"], here.held()) == (
        str(NewcomerStep.VERIFYING),
        OperatingPoint({"power_limit_w": 200.0}),
    )
    here.train(8.0)
    said = here.board
    assert (said["verdict"], said["limit_w"], said["energy_kind"]) == ("kept", 200.0, "simulated")
    assert said["power_w"] == pytest.approx(190.0, rel=0.02)
    assert said["looks"][0][1] == pytest.approx(0.08)
    assert [row[0] for row in said["caps"]] == [None, 200.0]
    here.steering.close()
    assert here.held() is None
    known, notes = recall(here.store, GPU, "Net-1-b8")
    assert ([each.node for each in known.told], notes) == (["former", "n1"], ())


def test_where_the_fleet_knows_nothing_a_node_with_room_looks(site: Callable[..., Site]) -> None:
    """It walks down while that pays, and then waits for the plan; a node without room does not look at all."""
    here = site()
    here.train(20.0)
    assert here.board["verdict"] == "unknown"
    here.standing["room"] = 0.5
    here.train(30.0)
    assert {row[0] for row in here.board["looks"]} >= {None, 225.0, 200.0}
    here.train(40.0)
    here.standing["cap"] = [None, 1.0, 240.0]
    here.train(5.0)
    assert (here.board["verdict"], here.held()) == ("default", None)


def test_without_its_controller_a_node_goes_back_to_its_default(tmp_path: Path, site: Callable[..., Site]) -> None:
    """What was planned is right only for the group it was planned for; when the controller is back, so is the cap."""
    keep(Store(str(tmp_path / "store")), NodeReport("former", GPU, "Net-1-b8", LOOKS))
    here = site()
    here.standing["cap"] = CAP
    here.train(16.0)
    assert here.held() is not None
    here.train(AWAY_S + 1.0, answered=False)
    assert here.held() is None
    here.train(4.0)
    assert here.held() is not None


def test_another_share_of_a_step_is_measured_anew(tmp_path: Path, site: Callable[..., Site]) -> None:
    """A group of another size gives each worker other samples: what was seen before is of another network."""
    keep(Store(str(tmp_path / "store")), NodeReport("former", GPU, "Net-1-b8", LOOKS))
    here = site()
    here.standing["cap"] = CAP
    here.train(16.0)
    here.generation, here.network, here.tally = 2, "Net-1-b16", Tally()
    here.train(1.0)
    assert here.held() is None
    assert (here.board["verdict"], here.board["looks"], here.board["caps"]) == ("warming", [], [])


def test_a_generation_of_the_same_share_goes_on(tmp_path: Path, site: Callable[..., Site]) -> None:
    """Counters that began anew are no negative steps, and what was verified is not verified again."""
    keep(Store(str(tmp_path / "store")), NodeReport("former", GPU, "Net-1-b8", LOOKS))
    here = site()
    here.standing["cap"] = CAP
    here.train(16.0)
    here.generation, here.tally = 2, Tally()
    here.train(3.0)
    assert (here.board["verdict"], here.held()) == ("kept", OperatingPoint({"power_limit_w": 200.0}))


def test_a_node_without_a_board_says_its_pace_alone(site: Callable[..., Site]) -> None:
    """Nothing was named, and no actuator runs here; ``off`` is the same."""
    here = site(None)
    assert here.steering.words() == {}
    here.train(2.0)
    assert set(here.steering.words()) == {"pace"}
    assert here.steering.words()["pace"]["tally"]["steps"] == 20


def test_a_board_that_is_not_there_is_trouble_and_training_goes_on(tmp_path: Path, site: Callable[..., Site]) -> None:
    """It is said once, and shown."""
    here = site((f"jetson?root={tmp_path}",))
    here.train(2.0)
    assert here.board["trouble"]
    assert len(here.told) == 1
    assert "training goes on" in here.told[0]


def test_a_board_without_power_limits_is_watched(site: Callable[..., Site]) -> None:
    """A Jetson has none: its power is shown, and nothing is set."""
    here = site(("sim:jetson-agx-orin?noise=0",))
    here.train(8.0)
    assert "only watched" in here.told[0]
    assert (here.board["verdict"], here.held()) == (WATCHED, None)
    assert here.board["power_w"] > 0


def test_words_that_are_no_board_are_refused(tmp_path: Path) -> None:
    """Before anything is trained."""
    with pytest.raises(UnknownName):
        Site(tmp_path, ("sim:nothing",))


def test_an_actuator_of_this_machine_is_used_unasked_and_its_lease_puts_the_board_back(tmp_path: Path) -> None:
    """The agent is gone without a word: when the lease is over, the board is as found."""
    with bench(tmp_path / "actuator", uris=("sim:a100?noise=0",)) as served:
        path = socket_path(ACTUATOR_SOCKET)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.symlink_to(served.path)
        keep(Store(str(tmp_path / "store")), NodeReport("former", GPU, "Net-1-b8", LOOKS))
        here = Site(tmp_path, None)
        here.standing["cap"] = CAP
        here.train(8.0)
        assert "through the actuator" in here.told[0]
        (holding,) = served.service.holdings
        assert here.board["limit_w"] == 200.0
        assert holding.terms.lease is not None
        assert holding.terms.lease.holder.startswith("cluster node n1")
        served.time.now_s += 60.0
        served.service.tick()
        assert holding.terms.lease is None
        here.train(6.0)
        assert holding.terms.lease is not None
        here.steering.close()
        assert holding.terms.lease is None


def test_nodes_that_stand_out_are_told(tmp_path: Path, site: Callable[..., Site]) -> None:
    """Beyond three deviations of its type, slower."""
    for number in range(5):
        look = CapObservation(None, 0.05 + number / 2000, 240.0, 3)
        keep(Store(str(tmp_path / "store")), NodeReport(f"f{number}", GPU, "Net-1-b8", (look,)))
    here = site()
    here.train(8.0)
    assert here.board["factor"] == pytest.approx(0.08 / 0.051)
    assert here.board["flagged"] > 3
    assert here.steering.steered is not None
    assert isinstance(here.steering.steered.node.knowledge, Knowledge)  # type: ignore[union-attr]


def test_a_node_whose_workers_have_stopped_is_left_at_its_default(tmp_path: Path, site: Callable[..., Site]) -> None:
    """It waits outside the group: its board is as found, and its power is not told as if it trained."""
    keep(Store(str(tmp_path / "store")), NodeReport("former", GPU, "Net-1-b8", LOOKS))
    here = site()
    here.standing["cap"] = CAP
    here.train(16.0)
    assert here.held() is not None
    here.clock.sleep(IDLE_S + 1.0)
    here.steering.heed(here.standing)
    here.steering.turn()
    assert (here.held(), here.board["limit_w"], here.board["power_w"]) == (None, None, None)
    here.train(4.0)
    assert here.held() is not None


@pytest.mark.parametrize("cap", [[1], "x", [None, "x", 1.0], [200.0, -1.0, 1.0], 7])
def test_an_answer_that_makes_no_sense_asks_for_nothing(cap: object, site: Callable[..., Site]) -> None:
    """A controller of another version stops no node and sets nothing."""
    here = site()
    here.standing = {"cap": cap, "room": None}
    here.train(8.0)
    assert (here.held(), here.board["verdict"]) == (None, "unknown")


def test_what_is_no_number_is_said_as_unknown(site: Callable[..., Site]) -> None:
    """A sensor that reads nothing does not keep the node from beating."""
    here = site()
    here.train(8.0)
    assert here.steering.steered is not None
    assert here.steering.steered.node is not None
    here.steering.steered.node.power_w = float("nan")
    here.steering.turn()
    assert here.board["power_w"] is None
    json.dumps(here.steering.words(), allow_nan=False)


def test_a_store_that_was_away_is_asked_again(site: Callable[..., Site]) -> None:
    """A node does not look for itself before it knows what the fleet knows; trouble is shown and ends."""
    here = site()
    away = [True]

    def opened(url: str) -> Store:
        if away:
            raise StorageError("the store is away")
        return here.store

    here.steering._opened = opened
    here.standing["room"] = 0.5
    here.train(10.0)
    assert (here.board["trouble"], here.board["verdict"]) == ("the store is away", "unknown")
    away.clear()
    here.train(AGAIN_S + 2.0)
    assert here.board["trouble"] is None
    assert len(here.board["looks"]) > 1


def pace_after(steps: int, generation: int = 1) -> Pace:
    """Return the pace of a worker that has done so many steps of 0.1 s."""
    return Pace(generation, "Net-1-b8", 8, 16, 100, Tally(steps, steps / 10, 0.0, 0.0))


def test_what_follows_a_look_is_decided_from_values_alone() -> None:
    """Steps and time end a window, an away controller or idle workers end the cap, a new generation begins anew."""
    first = WindowProgress(0.0, 0.0).after(pace_after(5), 1.0)
    assert (first.renewed, first.done, first.move(1.0, 1.0, 5.0)) == (True, Tally(), NextMove.CONTINUE)
    later = first.after(pace_after(5 + STEPS), 6.0)
    assert (later.renewed, later.done.steps, later.move(6.0, 6.0, 5.0)) == (False, STEPS, NextMove.JUDGE)
    assert later.move(6.0, 6.0, 7.0) is NextMove.CONTINUE
    assert later.move(6.0 + AWAY_S + 1.0, 6.0, 5.0) is NextMove.REST
    assert later.after(pace_after(5 + STEPS), 99.0).move(99.0, 99.0, 5.0) is NextMove.REST
    assert later.judged(6.0).move(6.0, 6.0, 5.0) is NextMove.CONTINUE
    assert later.after(pace_after(1, generation=2), 7.0).done == Tally()


def test_a_look_that_comes_after_the_end_sets_nothing(tmp_path: Path, site: Callable[..., Site]) -> None:
    """The thread that looks may wake once more while the node leaves: the board stays as it was found."""
    keep(Store(str(tmp_path / "store")), NodeReport("former", GPU, "Net-1-b8", LOOKS))
    here = site()
    here.standing["cap"] = CAP
    here.train(16.0)
    assert here.held() is not None
    here.steering.close()
    here.steering.paces.mkdir(exist_ok=True)
    here.train(16.0)
    assert here.held() is None
