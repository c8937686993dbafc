"""What a controller does beside membership."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from polythrottle.domain.clock import VirtualClock
from polythrottle.domain.errors import InvalidInput
from polythrottle.training.elastic.controller import Controller, Job
from polythrottle.training.elastic.membership import Phase, Rules
from polythrottle.training.elastic.nodes.bottleneck import Remedy
from polythrottle.training.elastic.nodes.bottleneck_remedies import LENGTH_S, MonitorTerms
from polythrottle.training.elastic.nodes.overseer import Watched
from polythrottle.training.elastic.worker.process import Pace, Tally

CAPS = [[None, 1.0, 300.0], [200.0, 1.1, 215.0]]


class Group:
    """A controller whose nodes are the test's.

    Args:
        folder: Of the job.
        watched: How it is watched.
        **own_s: Each node's own step, in seconds.
    """

    def __init__(self, folder: Path, watched: Watched, **own_s: float) -> None:
        self.clock, self.own_s = VirtualClock(), own_s
        job = Job("job", folder, Rules(1, 8, 1.0), f"file://{folder}/store", 0.5, watched=watched)
        self.controller = Controller(job, self.clock)
        self.tallies = {name: Tally() for name in own_s}
        self.boards: dict[str, dict[str, Any]] = {name: {} for name in own_s}
        self.events: list[dict[str, Any]] = self.controller._journal.records
        for name in own_s:
            self.controller.answer("join", {"node": name, "address": ["127.0.0.1", 1]})
        self.gather()

    def gather(self) -> None:
        """Let all nodes that wait be grouped anew."""
        for name in self.own_s:
            self.controller.answer("ready", {"node": name, "address": ["127.0.0.1", 1]})
        self.clock.sleep(1.0)
        self.beat()
        self.clock.sleep(1.0)
        self.beat()
        self.clock.sleep(1.0)
        self.beat()
        self.clock.sleep(0.5)
        self.controller.tick()
        self.tallies = {name: Tally() for name in self.own_s}

    def beat(self) -> dict[str, dict[str, Any]]:
        """Let every node beat, and return what each is answered."""
        held = self.controller.membership
        found = {}
        for name, tally in self.tallies.items():
            pace = Pace(held.generation, "Net-b8", 8, 16, 1000, tally).document()
            looks = [[None, self.own_s[name], 300.0, 3]]
            board = {
                "gpu": "V100",
                "looks": looks,
                "caps": CAPS,
                "limits": [200],
                "verdict": "kept",
                **self.boards[name],
            }
            found[name] = self.controller.answer("beat", {"node": name, "pace": pace, "steering": board})
        return found

    def train(self, seconds: int) -> None:
        """Train, all in step."""
        members = self.controller.membership.members
        step_s = max(self.own_s[name] for name in members)
        self.controller.membership.stepped(self.controller.membership.generation)
        for _ in range(seconds):
            self.clock.sleep(1.0)
            for name in members:
                waited_s = step_s - self.own_s[name]
                self.tallies[name] = self.tallies[name].plus(Tally(1, step_s, waited_s))
            self.beat()

    def told(self, name: str) -> list[dict[str, Any]]:
        """Return the events of a name."""
        return [event for event in self.events if event["event"] == name]


@pytest.fixture
def group(tmp_path: Path) -> Iterator[Callable[..., Group]]:
    """Make a group, and close its controller after the test."""
    made: list[Group] = []

    def of(watched: Watched | None = None, **own_s: float) -> Group:
        made.append(Group(tmp_path / "job", watched or Watched(terms=MonitorTerms(warm_up_s=0.0)), **own_s))
        return made[-1]

    yield of
    for each in made:
        each.controller.close()


def test_nodes_hear_their_caps_with_the_answer_to_a_beat(group: Callable[..., Group]) -> None:
    """The faster gets the cap that just meets the slower; the rate of losses is told for what a look may cost."""
    held = group(a=0.8, b=1.0)
    held.train(2)
    answers = held.beat()
    assert (answers["a"]["cap"][0], answers["b"]["cap"][0]) == (200.0, None)
    assert answers["a"]["losses_per_h"] == pytest.approx(0.5)
    assert answers["a"]["generation"] == 1


def test_status_shows_paces_boards_and_the_jobs_speed(group: Callable[..., Group]) -> None:
    """Every node's steps and board, the verdict on the whole, and unknown where nobody has measured."""
    held = group(a=0.8, b=1.0)
    held.boards["a"] = {"limit_w": 200.0, "power_w": 190.0, "energy_kind": "simulated", "trouble": "none to speak of"}
    found = held.controller.status()
    assert found["speed"]["measured_steps_per_s"] is None
    held.train(40)
    found = held.controller.status()
    rows = {node["node"]: node for node in found["nodes"]}
    assert (rows["a"]["step_s"], rows["a"]["own_s"]) == (1.0, pytest.approx(0.8))
    assert rows["a"]["steering"]["limit_w"] == 200.0
    assert rows["a"]["steering"]["trouble"] == "none to speak of"
    assert rows["b"]["steering"]["planned_w"] is None
    assert found["speed"]["measured_steps_per_s"] == pytest.approx(1.0)


def test_a_cap_that_holds_is_told_once(group: Callable[..., Group]) -> None:
    """Not with every beat, not for those that are only looked at, and again when it ends."""
    held = group(a=0.8, b=1.0)
    held.boards["a"] = {"limit_w": 225.0, "verdict": "exploring"}
    held.train(3)
    assert held.told("cap") == []
    held.boards["a"] = {"limit_w": 200.0, "reason": "fewer joules"}
    held.train(3)
    held.boards["a"] = {}
    held.train(3)
    assert [(event["node"], event["limit_w"]) for event in held.told("cap")] == [("a", 200.0), ("a", None)]


def test_a_bottleneck_is_an_event_with_its_cause_and_its_remedy(group: Callable[..., Group]) -> None:
    """One of two takes twice as long: named, once; only proposed, for nobody allowed more."""
    held = group(a=1.0, b=2.0)
    held.train(int(LENGTH_S) * 8)
    (event,) = held.told("bottleneck")
    assert (event["causes"][0]["cause"], event["causes"][0]["nodes"]) == ("straggler", ["b"])
    assert event["proposals"][0]["remedy"] == "replace the node"
    assert event["generation"] == 1
    assert held.told("remedy tried") == []
    assert held.controller.status()["speed"]["found"] is True


def tried(group: Callable[..., Group], after_s: float) -> Group:
    """Return a job of three that may do without its slow node, once that was verified."""
    watched = Watched(terms=MonitorTerms(warm_up_s=0.0, allowed=(Remedy.DROP,)))
    held = group(watched, a=1.0, b=1.0, c=4.0)
    held.train(int(LENGTH_S) * 10)
    assert held.told("remedy tried")[0]["nodes"] == ["c"]
    assert held.controller.membership.phase is Phase.REGROUPING
    held.own_s |= {"a": after_s, "b": after_s}
    held.gather()
    assert held.controller.membership.members == ("a", "b")
    held.train(int(LENGTH_S) * 8)
    return held


def test_a_node_is_dropped_where_that_is_allowed_and_helps(group: Callable[..., Group]) -> None:
    """Four times as fast without it: kept, and it stays out."""
    held = tried(group, 1.0)
    (event,) = held.told("remedy kept")
    assert event["gain_measured"] == pytest.approx(3.0)
    held.gather()
    assert held.controller.membership.members == ("a", "b")


def test_a_node_that_was_dropped_for_nothing_comes_back(group: Callable[..., Group]) -> None:
    """No faster without it: taken back, and it trains again."""
    held = tried(group, 4.0)
    (event,) = held.told("remedy taken back")
    assert event["kept"] is False
    assert held.controller.membership.phase is Phase.REGROUPING
    held.gather()
    assert set(held.controller.membership.members) == {"a", "b", "c"}


def test_a_trial_that_another_loss_disturbs_is_taken_back(group: Callable[..., Group]) -> None:
    """Nothing can be compared any more: the dropped node is let in again."""
    watched = Watched(terms=MonitorTerms(warm_up_s=0.0, allowed=(Remedy.DROP,)))
    held = group(watched, a=1.0, b=1.0, c=4.0)
    held.train(int(LENGTH_S) * 10)
    held.controller.answer("leave", {"node": "b", "reason": "a signal"})
    del held.tallies["b"], held.own_s["b"]
    held.gather()
    assert held.controller.membership.members == ("a",)
    held.train(int(LENGTH_S) + 2)
    assert held.told("remedy taken back")[0]["reason"] == "the group has changed"
    held.gather()
    assert set(held.controller.membership.members) == {"a", "c"}


def test_what_a_node_says_of_itself_cannot_stop_the_controller(group: Callable[..., Group]) -> None:
    """Nonsense is refused with one line; the node is there all the same, and others go on."""
    held = group(a=1.0, b=1.0)
    for wrong in ({"pace": 1}, {"steering": []}, {"pace": {"generation": float("inf")}}):
        with pytest.raises(InvalidInput):
            held.controller.answer("beat", {"node": "a", **wrong})
    held.train(10)
    assert held.controller.membership.members == ("a", "b")


def test_longer_is_a_share() -> None:
    """At least nothing, and below all."""
    for wrong in (-0.1, 1.0, float("nan")):
        with pytest.raises(InvalidInput):
            Watched(wrong)
