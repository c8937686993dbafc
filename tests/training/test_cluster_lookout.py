"""Whether a job that trains is slower than its nodes together should be, and why."""

from dataclasses import replace
from typing import Any

import pytest

from polythrottle.domain.errors import InvalidInput
from polythrottle.training.elastic.nodes.bottleneck import Cause, Remedy
from polythrottle.training.elastic.nodes.bottleneck_remedies import (
    LENGTH_S,
    BottleneckMonitor,
    MonitorTerms,
    ObservedNode,
    allowed_remedies,
)
from polythrottle.training.elastic.worker.process import Pace, Tally


class Job:
    """A job whose nodes' own steps are set by hand; in step, so that all wait for the slowest and then exchange.

    Args:
        terms: How it is watched.
        **work_s: Each node's own work a step, in seconds.
    """

    def __init__(self, terms: MonitorTerms | None = None, **work_s: float) -> None:
        self.lookout, self.work_s = BottleneckMonitor(terms or MonitorTerms(warm_up_s=0.0)), work_s
        self.exchange_s, self.data_s = 0.0, dict.fromkeys(work_s, 0.0)
        self.now_s, self.generation = 0.0, 0
        self.about: dict[str, dict[str, Any]] = {}
        self.cold = True
        self.form(*work_s)

    def form(self, *names: str) -> None:
        """Begin a generation of these nodes."""
        self.generation += 1
        self.paces = {name: Pace(self.generation, "Net-b8", 8, 16, 1000) for name in names}
        self.lookout.formed(self.generation, names, self.now_s)

    def train(self, windows: int, steps: int = 10) -> list[dict[str, Any]]:
        """Train for so many windows, and return the events."""
        found = []
        for _ in range(windows):
            self.now_s += LENGTH_S
            own_s = {name: self.work_s[name] + self.data_s[name] for name in self.paces}
            step_s = max(own_s.values()) + self.exchange_s
            for name, pace in self.paces.items():
                more = Tally(steps, steps * step_s, steps * (step_s - own_s[name]), steps * self.data_s[name])
                cold = pace.cold.plus(more) if self.cold else pace.cold
                self.paces[name] = replace(pace, tally=pace.tally.plus(more), cold=cold)
            assert self.lookout.due(self.now_s)
            members = [ObservedNode(name, pace, **self.about.get(name, {})) for name, pace in self.paces.items()]
            found += self.lookout.look(members, self.now_s)
        return found

    @property
    def causes(self) -> list[tuple[Cause, tuple[str, ...]]]:
        """Return what was found."""
        return [(each.cause, each.nodes) for each in self.lookout.findings]


def test_a_job_that_is_as_fast_as_its_nodes_has_no_bottleneck() -> None:
    """No verdict before three windows, then none is found and nothing is told."""
    job = Job(a=1.0, b=1.05)
    assert job.train(3) == []
    assert job.lookout.short.measured is None
    assert "2 of 3 windows" in job.lookout.short.reason
    assert job.train(4) == []
    assert job.lookout.short.short == pytest.approx(0.0, abs=1e-9)
    assert job.lookout.document()["found"] is False


def test_the_warm_up_says_nothing() -> None:
    """Half a minute of a slow beginning is passed over."""
    job = Job(MonitorTerms(), a=1.0)
    job.work_s["a"] = 9.0
    job.train(6)
    job.work_s["a"] = 1.0
    job.train(5)
    assert job.lookout.short.measured == pytest.approx(1.0)


def test_a_node_far_slower_than_its_like_is_named() -> None:
    """Of two that should be equal one takes half as long again: told once, and again when it is over."""
    job = Job(a=1.0, b=1.5)
    told = job.train(8)
    assert job.causes == [(Cause.STRAGGLER, ("b",))]
    assert [event["event"] for event in told] == ["bottleneck"]
    assert told[0]["short"] == pytest.approx(1 / 3)
    assert "1.5 s a step, 1 s expected" in told[0]["causes"][0]["words"]
    job.work_s["b"] = 1.0
    assert [event["event"] for event in job.train(8)] == ["no bottleneck"]
    assert job.causes == []


def test_a_node_that_becomes_slow_is_measured_against_itself() -> None:
    """It is alone of its type: what it took before counts, in the next generation too."""
    job = Job(a=1.0, b=1.08)
    job.train(6)
    job.form("a", "b")
    job.work_s["b"] = 1.3
    job.train(8)
    assert job.causes == [(Cause.STRAGGLER, ("b",))]


def test_silicon_and_caps_explain_a_slower_node() -> None:
    """Within 11 % of its type it is as good as its like; under a cap it may be as late as the cap makes it."""
    job = Job(a=1.0, b=1.1)
    job.train(8)
    assert job.causes == []
    job = Job(a=1.0, b=1.3)
    job.about["b"] = {"slowdown": 1.3}
    job.train(8)
    assert job.causes == []


def test_another_type_is_compared_with_its_own() -> None:
    """A slower type is no straggler; what the store knows of it is."""
    job = Job(a=1.0, b=1.5)
    job.about["b"] = {"gpu": "K80"}
    job.train(8)
    assert job.causes == []
    job.about["b"] = {"gpu": "K80", "known_s": 1.0}
    job.train(4)
    assert job.causes == [(Cause.STRAGGLER, ("b",))]


def test_a_board_that_slows_itself_down_is_told_from_a_straggler() -> None:
    """Its remedy is another."""
    job = Job(a=1.0, b=1.0)
    job.train(6)
    job.work_s["b"] = 1.3
    job.about["b"] = {"throttled": True}
    job.train(8)
    assert job.causes == [(Cause.THROTTLED, ("b",))]
    assert job.lookout.proposed[-1].remedy is Remedy.COOL


def test_the_exchange_is_named_where_every_node_alone_is_well() -> None:
    """A fifth of each step goes into it: the network, and never a parameter server, which this job has not."""
    job = Job(a=1.0, b=1.0)
    job.exchange_s = 0.25
    job.train(8)
    assert job.causes == [(Cause.NETWORK, ())]
    assert {each.remedy for each in job.lookout.proposed} == {Remedy.BATCH, Remedy.FEWER}
    assert job.lookout.short.short == pytest.approx(0.2)


def test_waiting_for_samples_is_input_and_two_epochs_tell_why() -> None:
    """In the first epoch nobody can say; later, fetching is over and what is left is preparing."""
    job = Job(a=1.0, b=1.0)
    job.data_s["a"] = 0.5
    job.train(8)
    assert job.causes == [(Cause.INPUT, ("a",))]
    assert "33% of its own time; a second epoch will tell" in job.lookout.findings[0].words
    job.cold = False
    job.data_s["a"] = 0.25
    job.train(8)
    assert job.causes == [(Cause.INPUT, ("a",))]
    assert "20% of its time for preparation, 17% for fetching" in job.lookout.findings[0].words
    job.data_s["a"] = 0.01
    job.train(8)
    assert job.causes == []


def test_the_threshold_decides() -> None:
    """A tenth short is a bottleneck at 6.7 %, and none at 15 %."""
    for threshold, found in ((0.067, True), (0.15, False)):
        job = Job(MonitorTerms(threshold, 0.0), a=1.0)
        job.exchange_s = 1 / 9
        job.train(8)
        assert job.lookout.short.found is found


def test_nothing_is_said_while_a_member_says_nothing_or_hardly_steps() -> None:
    """A verdict is of the whole group, over steps enough."""
    job = Job(a=1.0, b=1.0)
    job.train(2)
    missing = job.paces.pop("b")
    job.train(3)
    job.paces["b"] = missing
    job.train(1)
    assert len(job.lookout._windows) <= 2
    job = Job(a=1.0)
    job.train(9, steps=0)
    assert job.lookout.short.measured is None


def dropped(after_s: float) -> tuple[Job, Any]:
    """Return a job that tried to do without its slow node, and what came of it."""
    job = Job(MonitorTerms(warm_up_s=0.0, allowed=(Remedy.DROP,)), a=1.0, b=1.0, c=3.0)
    job.train(8)
    proposal = job.lookout.dropping(True)
    assert proposal is not None
    assert proposal.finding.nodes == ("c",)
    job.lookout.begin(proposal, 16)
    assert job.lookout.dropping(True) is None
    job.form("a", "b")
    job.work_s = {"a": after_s, "b": after_s}
    assert job.lookout.result(16) is None
    job.train(6)
    return job, job.lookout.result(16)


def test_a_remedy_is_kept_only_if_it_was_measured_to_help() -> None:
    """Without the slow node thrice as fast: kept. No faster: taken back, and not tried again."""
    job, tried = dropped(1.0)
    assert (tried.kept, tried.gain) == (True, pytest.approx(2.0))
    job, tried = dropped(3.0)
    assert tried.kept is False
    assert job.lookout.document()["tried"][0]["kept"] is False
    job.form("a", "b", "c")
    job.work_s = {"a": 1.0, "b": 1.0, "c": 3.0}
    job.train(8)
    assert job.causes == [(Cause.STRAGGLER, ("c",))]
    assert job.lookout.dropping(True) is None


def test_nothing_is_dropped_without_leave() -> None:
    """Neither where it is not allowed, nor where the group may not shrink."""
    job = Job(a=1.0, b=1.0, c=3.0)
    job.train(8)
    assert job.lookout.dropping(True) is None
    job = Job(MonitorTerms(warm_up_s=0.0, allowed=(Remedy.DROP,)), a=1.0, b=1.0, c=3.0)
    job.train(8)
    assert job.lookout.dropping(False) is None


def test_a_trial_that_others_disturb_is_given_up() -> None:
    """A node that joined meanwhile makes the comparison worthless."""
    job = Job(MonitorTerms(warm_up_s=0.0, allowed=(Remedy.DROP,)), a=1.0, b=1.0, c=3.0)
    job.train(8)
    proposal = job.lookout.dropping(True)
    assert proposal is not None
    job.lookout.begin(proposal, 16)
    assert job.lookout.spoilt() is None
    job.work_s["d"], job.data_s["d"] = 1.0, 0.0
    job.form("a", "b", "d")
    assert job.lookout.spoilt() == proposal
    assert job.lookout.result(16) is None


def test_words_for_remedies_and_terms_are_checked() -> None:
    """Only what can be done here may be allowed."""
    assert allowed_remedies(["drop"]) == (Remedy.DROP,)
    with pytest.raises(InvalidInput, match="only proposed"):
        allowed_remedies(["replace"])
    for wrong in (0.0, 1.0, float("nan")):
        with pytest.raises(InvalidInput, match="share"):
            MonitorTerms(threshold=wrong)


def test_what_many_nodes_have_is_one_finding() -> None:
    """A fleet that waits for its samples is not told node by node; three are."""
    for count in (3, 6):
        job = Job(**{f"n{number}": 1.0 for number in range(count)})
        job.data_s = dict.fromkeys(job.work_s, 0.5)
        job.train(8)
        assert [cause for cause, _ in job.causes] == [Cause.INPUT] * (3 if count == 3 else 1)
    assert job.causes[0][1] == tuple(f"n{number}" for number in range(6))
    assert "5 more nodes likewise" in job.lookout.findings[0].words
