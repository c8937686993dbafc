"""A job on rented nodes, with a provider and an engine that do as the test says."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from polythrottle.cli.cluster_rented import Where
from polythrottle.clock import VirtualClock
from polythrottle.cluster.provision.provider import Order, Rented, Stage
from polythrottle.cluster.provision.slurm import SlurmProvider
from polythrottle.cluster.train.rented import MOST_ORDERS, RentedNodes
from polythrottle.cluster.train.torchrun import Plan
from polythrottle.errors import ClaimFailed, DeviceError, InvalidInput, UnknownName


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


def test_where_nodes_come_from_is_checked_first() -> None:
    """A place nobody knows and a word that is no option are refused before anything is started."""
    with pytest.raises(UnknownName, match="slurm"):
        Where("moon", "127.0.0.1:0", None, ())
    for sbatch, place in ((["rm -rf /"], "slurm"), ([], "slurm:--wrap=x")):
        with pytest.raises(InvalidInput, match="--sbatch"):
            Where(place, "127.0.0.1:0", None, sbatch)


def test_each_slurm_job_joins_the_controller(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its command names the controller's address, the token's file, the script and the script's words."""
    (tmp_path / "bin").mkdir()
    sbatch = tmp_path / "bin" / "sbatch"
    sbatch.touch(mode=0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}/bin")
    token = tmp_path / "token"
    token.write_text("t" * 40)
    token.chmod(0o600)
    (tmp_path / "job.json").write_text(json.dumps({"address": "10.0.0.1:99", "token_file": None}))
    where = Where("slurm:spot", "10.0.0.1:99", token, ("--gres=gpu:1",))
    provider = where.provider(Plan(tmp_path, Path("/x/train.py"), ["a b"], (), ["--workers", "2"]))
    assert isinstance(provider, SlurmProvider)
    joining = ["--join", "10.0.0.1:99", "--token-file", str(token), "--workers", "2", "/x/train.py", "--", "a b"]
    assert list(provider.command)[5:] == joining
    assert (provider.partition, provider.more) == ("spot", ("--gres=gpu:1",))
    assert where.serving == ["--serve", "10.0.0.1:99", "--token-file", str(token)]
