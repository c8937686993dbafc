"""A job on rented nodes, with a provider and an engine that do as the test says."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from simulated_provider import SimulatedProvider

from polythrottle.cli.cluster.rented_nodes import NodeSource
from polythrottle.cluster.rented_machines import SlurmProvider
from polythrottle.domain.clock import VirtualClock
from polythrottle.domain.errors import ClaimFailed, DeviceError, InvalidInput, UnknownName
from polythrottle.domain.fleet.transient_machine import Order, Rented, Stage
from polythrottle.training.elastic.engines import LaunchPlan
from polythrottle.training.elastic.nodes.rented_nodes import MOST_ORDERS, RentedNodes, Successions


class Engine:
    """A controller that ends at a given time of the clock."""

    def __init__(self, clock: VirtualClock, end_s: float, events: Mapping[float, dict[str, Any]] | None = None) -> None:
        self.clock, self.end_s, self.planned = clock, end_s, events or {}
        self.started: list[Sequence[str]] = []
        self.stopped = 0

    def start(self, members: Sequence[str]) -> None:
        """Note it."""
        self.started.append(members)

    def stop(self) -> None:
        """Note it."""
        self.stopped += 1

    def status(self) -> dict[str, Any]:
        """Return nothing."""
        return {}

    def events(self) -> list[dict[str, Any]]:
        """Return what is planned up to now."""
        return [event for at_s, event in sorted(self.planned.items()) if at_s <= self.clock.now()]

    def ended(self) -> int | None:
        """Return 0 when the time has come."""
        return 0 if self.clock.now() >= self.end_s else None


class Landlord:
    """A provider whose orders go through given stages, one at each look."""

    def __init__(self, *courses: Sequence[Stage | Exception]) -> None:
        self.courses = [list(course) for course in courses]
        self.released: list[str] = []
        self.requested = 0

    def request(self, order: Order) -> str:
        """Number the orders."""
        self.requested += 1
        return str(self.requested)

    def seen(self) -> Mapping[str, Rented]:
        """Move every order one stage on; the last stage stays, an order without a course runs."""
        found = {}
        for number in range(self.requested):
            course = self.courses[number] if number < len(self.courses) else [Stage.RUNNING]
            stage = course.pop(0) if len(course) > 1 else course[0]
            if isinstance(stage, Exception):
                raise stage
            found[str(number + 1)] = Rented(str(number + 1), stage, f"n{number + 1}")
        return found

    def release(self, ticket: str) -> None:
        """Note it."""
        self.released.append(ticket)


def test_what_is_lost_is_ordered_again_and_all_is_given_back() -> None:
    """Two orders; one is lost, a third takes its place; the two that run are released at the end."""
    clock, said = VirtualClock(), []
    engine, landlord = Engine(clock, 20), Landlord([Stage.RUNNING], [Stage.RUNNING, Stage.LOST])
    code = RentedNodes(engine, 2, clock=clock).run(lambda: landlord, lambda event: None, said.append, engine.ended)
    assert (code, landlord.requested, landlord.released, engine.stopped) == (0, 3, ["1", "3"], 1)
    assert "order 2 is lost on n2" in said


def test_an_order_that_waits_again_is_left_alone() -> None:
    """A requeued order comes back by itself."""
    clock = VirtualClock()
    engine, landlord = Engine(clock, 20), Landlord([Stage.RUNNING, Stage.WAITING, Stage.RUNNING])
    RentedNodes(engine, 1, clock=clock).run(lambda: landlord, lambda event: None, lambda line: None, engine.ended)
    assert landlord.requested == 1


def test_a_provider_that_is_away_for_a_while_stops_nothing() -> None:
    """It is said, and asked again."""
    clock, said = VirtualClock(), []
    engine = Engine(clock, 20)
    landlord = Landlord([Stage.RUNNING, DeviceError("no answer"), Stage.RUNNING])
    assert RentedNodes(engine, 1, clock=clock).run(lambda: landlord, lambda event: None, said.append, engine.ended) == 0
    assert any("no answer" in line and "goes on" in line for line in said)


def test_a_job_whose_nodes_never_train_is_given_up() -> None:
    """Orders that end before a step are not placed for ever, and nothing stays rented."""
    clock = VirtualClock()
    engine, landlord = Engine(clock, 10_000), Landlord(*[[Stage.ENDED]] * 50)
    with pytest.raises(ClaimFailed, match="before a step"):
        RentedNodes(engine, 1, clock=clock).run(lambda: landlord, lambda event: None, lambda line: None, engine.ended)
    assert landlord.requested == MOST_ORDERS + 1
    assert engine.stopped == 1


def test_steps_between_losses_are_progress() -> None:
    """As long as each generation trains, orders are placed as often as nodes are lost."""
    clock = VirtualClock()
    steps = {float(at_s): {"event": "first step", "at_s": at_s} for at_s in range(0, 60, 2)}
    engine, landlord = Engine(clock, 60, steps), Landlord(*[[Stage.RUNNING, Stage.LOST]] * 50)
    RentedNodes(engine, 1, clock=clock).run(lambda: landlord, lambda event: None, lambda line: None, engine.ended)
    assert landlord.requested > MOST_ORDERS + 1


def test_nodes_that_end_with_the_training_are_not_ordered_again() -> None:
    """After the job's end its orders end too."""
    clock = VirtualClock()
    engine = Engine(clock, 20, {3.0: {"event": "finished"}})
    landlord = Landlord([Stage.RUNNING, Stage.RUNNING, Stage.ENDED])
    RentedNodes(engine, 1, clock=clock).run(lambda: landlord, lambda event: None, lambda line: None, engine.ended)
    assert landlord.requested == 1


class Coarse(VirtualClock):
    """A clock that takes no smaller steps than two seconds: hours pass faster."""

    def sleep(self, duration_s: float) -> None:
        """Move on by two seconds at least."""
        super().sleep(max(2.0, duration_s))


class Joining(Engine):
    """A controller whose job's nodes join as soon as the simulated provider has started them."""

    def __init__(self, clock: VirtualClock, end_s: float, provider: SimulatedProvider) -> None:
        super().__init__(clock, end_s)
        self._provider, self._told, self._written = provider, set[str](), list[dict[str, Any]]()

    def events(self) -> list[dict[str, Any]]:
        """Return who has joined, each at a first step."""
        for rented in self._provider.seen().values():
            if rented.stage is Stage.RUNNING and rented.node not in self._told:
                self._told.add(rented.node)
                self._written += [{"event": "joined", "node": rented.node}, {"event": "first step"}]
        return self._written


def spent(late: float | None, seed: int) -> tuple[float, float, list[Mapping[str, Any]]]:
    """Return machine-seconds short of two and beyond two, over 8 hours of orders of an hour, and what was noted."""
    clock, noted = Coarse(), list[Mapping[str, Any]]()
    provider = SimulatedProvider(clock, startup_s=300.0, scatter=0.5, limit_s=3600.0, seed=seed)
    engine, follow = Joining(clock, 8 * 3600.0, provider), None if late is None else Successions(late)
    times_s, last_s = {"short": 0.0, "beyond": 0.0}, 0.0

    def ended() -> int | None:
        nonlocal last_s
        there = sum(rented.stage is Stage.RUNNING for rented in provider.seen().values())
        span_s, last_s = clock.now() - last_s, clock.now()
        if clock.now() > 1800:  # the first orders have no predecessors
            times_s["short"] += span_s * max(0, 2 - there)
            times_s["beyond"] += span_s * max(0, there - 2)
        return engine.ended()

    rented = RentedNodes(engine, 2, clock=clock, successions=follow, note=noted.append)
    assert rented.run(lambda: provider, lambda event: None, lambda line: None, ended) == 0
    assert engine.stopped == 1
    return times_s["short"], times_s["beyond"], noted


@pytest.mark.slow
@pytest.mark.parametrize("seed", [1, 2])
def test_successors_shorten_interruptions_for_a_little_overlap(seed: int) -> None:
    """Simulated: orders that end after an hour are followed in time; asking sooner costs overlap and saves waiting."""
    without_s, nothing_s, _ = spent(None, seed)
    even_s, beside_s, noted = spent(0.5, seed)
    urgent_s, more_s, _ = spent(0.05, seed)
    assert nothing_s == 0
    assert even_s < 0.5 * without_s
    assert urgent_s < even_s
    assert beside_s < 0.1 * without_s, "a predecessor goes as soon as its successor has joined"
    assert more_s < 0.1 * without_s
    done = [each for each in noted if each["done"]]
    assert len(done) >= 10
    assert sum(each["interruption_s"] for each in done) == pytest.approx(even_s, rel=0.2, abs=60)
    assert sum(each["overlap_s"] for each in done) == pytest.approx(beside_s, abs=4 * len(done))
    assert {each["order"] for each in done} <= {each["order"] for each in noted if not each["done"]}


def test_where_nodes_come_from_is_checked_first() -> None:
    """A place nobody knows and a word that is no option are refused before anything is started."""
    with pytest.raises(UnknownName, match="slurm"):
        NodeSource("moon", "127.0.0.1:0", None, ())
    for sbatch, place in ((["rm -rf /"], "slurm"), ([], "slurm:--wrap=x")):
        with pytest.raises(InvalidInput, match="--sbatch"):
            NodeSource(place, "127.0.0.1:0", None, sbatch)


def test_each_slurm_job_joins_the_controller(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its command names the controller's address, the token's file, the script and the script's words."""
    (tmp_path / "bin").mkdir()
    sbatch = tmp_path / "bin" / "sbatch"
    sbatch.touch(mode=0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}/bin")
    token = tmp_path / "token"
    token.write_text("t" * 40)
    token.chmod(0o600)
    (tmp_path / "job.json").write_text(json.dumps({"address": "10.0.0.1:99", "token_file": str(token)}))
    where = NodeSource("slurm:spot", "10.0.0.1:99", token, ("--gres=gpu:1",))
    provider = where.provider(LaunchPlan(tmp_path, Path("/x/train.py"), ["a b"], (), ["--workers", "2"]))
    assert isinstance(provider, SlurmProvider)
    joining = ["--join", "10.0.0.1:99", "--token-file", str(token), "--workers", "2", "/x/train.py", "--", "a b"]
    assert list(provider.command)[5:] == joining
    assert (provider.partition, provider.more) == ("spot", ("--gres=gpu:1",))
    assert where.serving == ["--serve", "10.0.0.1:99", "--token-file", str(token)]
    alone = NodeSource("slurm", "127.0.0.1:0", None, ())
    assert alone.serving == ["--serve", "127.0.0.1:0"]
    again = alone.provider(LaunchPlan(tmp_path, Path("/x/train.py")))
    assert isinstance(again, SlurmProvider)
    assert list(again.command)[5:9] == ["--join", "10.0.0.1:99", "--token-file", str(token)], "the controller's own"
