"""Why a job is slower than its parts."""

from pathlib import Path

import pytest

from polythrottle.domain.errors import InvalidInput
from polythrottle.lab.reproduce.cluster_tables import speed_rows
from polythrottle.training.elastic.nodes.bottleneck import (
    THRESHOLD,
    Cause,
    Ingest,
    NodeMeasurement,
    Remedy,
    Shortfall,
    SpeedWindow,
    causes,
    proposals,
    shortfall,
)

SLOW = Shortfall(1, 80.0, 100.0)
WELL = tuple(NodeMeasurement(name, 1.0, 1.0) for name in "abcde")


def windows(*speeds: float, generation: int = 1) -> list[SpeedWindow]:
    """Return warm windows of these speeds."""
    return [SpeedWindow(generation, 30.0 + 10 * index, speed) for index, speed in enumerate(speeds)]


def test_the_threshold_is_that_of_the_paper() -> None:
    """Short by 6.7 % is no bottleneck, by 6.8 % it is; another threshold decides otherwise."""
    assert not shortfall(windows(93.3, 93.3, 93.3), 100.0).found
    assert shortfall(windows(93.2, 93.2, 93.2), 100.0).found
    assert not shortfall(windows(93.2, 93.2, 93.2), 100.0, threshold=0.1).found


def test_warm_up_and_earlier_generations_say_nothing() -> None:
    """A slow first half minute, and the speed of a larger group, are passed over; too little is no verdict."""
    before = windows(200.0, 200.0, 200.0)
    cold = [SpeedWindow(2, 5.0, 10.0), SpeedWindow(2, 29.0, 10.0)]
    found = shortfall([*before, *cold, *windows(99.0, 98.0, generation=2)], 100.0)
    assert (found.measured, found.found, found.short) == (None, False, None)
    assert "2 of 3 windows" in found.reason
    found = shortfall([*before, *cold, *windows(99.0, 98.0, 97.0, generation=2)], 100.0)
    assert (found.generation, found.measured) == (2, 98.0)
    assert shortfall([], 1.0).reason == "nothing was measured yet"


def test_a_job_that_is_well_has_no_cause() -> None:
    """Even with a throttled straggler in it: nobody is blamed for nothing."""
    assert causes(Shortfall(1, 98.0, 100.0), (*WELL, NodeMeasurement("f", 2.0, 1.0, throttled=True))) == ()
    assert causes(Shortfall(1, None, 100.0), WELL) == ()


@pytest.mark.parametrize(
    ("node", "cause"),
    [
        (NodeMeasurement("f", 1.3, 1.0), Cause.STRAGGLER),
        (NodeMeasurement("f", 1.3, 1.0, throttled=True), Cause.THROTTLED),
        (NodeMeasurement("f", 1.0, 1.0, ingest=Ingest(100, 60, 50)), Cause.INPUT),
        (NodeMeasurement("f", 1.0, 1.0), Cause.NETWORK),
        (NodeMeasurement("f", 1.0), Cause.UNKNOWN),
    ],
)
def test_each_cause_is_named(node: NodeMeasurement, cause: Cause) -> None:
    """By the one node that differs; with everybody well it is what they share, and unknown where that is not known."""
    found = causes(SLOW, (*WELL, node))
    assert [finding.cause for finding in found] == [cause]
    assert found[0].nodes == (() if cause in (Cause.NETWORK, Cause.UNKNOWN) else ("f",))


def test_silicon_and_caps_are_no_stragglers() -> None:
    """A node that is as slow as its calibration and its cap say is not blamed."""
    assert [each.cause for each in causes(SLOW, (*WELL, NodeMeasurement("f", 1.3, 1.3)))] == [Cause.NETWORK]


def test_stalls_follow_from_three_rates() -> None:
    """From synthetic to cached the preparation, from cached to cold the fetching."""
    ingest = Ingest(1000.0, 800.0, 200.0)
    assert (ingest.preparing, ingest.fetching) == (pytest.approx(0.2), pytest.approx(0.75))
    with pytest.raises(InvalidInput):
        Ingest(0.0, 1.0, 1.0)


def test_dropping_a_straggler_is_proposed_only_where_it_helps() -> None:
    """Of six in step, one 30 % slow: five are faster. One that is 10 % slow does more than it costs."""
    nodes = (*WELL, NodeMeasurement("f", 1.3, 1.0))
    proposed = proposals(causes(SLOW, nodes), nodes)
    assert [each.remedy for each in proposed] == [Remedy.REPLACE, Remedy.DROP]
    assert proposed[1].gain == pytest.approx(5 / (6 / 1.3) - 1)
    nodes = (*WELL, NodeMeasurement("f", 1.1, 1.0))
    assert [each.remedy for each in proposals(causes(SLOW, nodes), nodes)] == [Remedy.REPLACE]


def test_on_recorded_clusters_the_threshold_flags_what_the_server_limits(transient: Path) -> None:
    """CM-DARE's files: on K80 the small networks never and the large one at seven; on P100 every one from five on."""
    rows = speed_rows(transient / "training_speed_by_cluster_size_cmdare.csv")
    speeds = {(row.gpu, row.servers, row.network, row.workers): row.steps_per_s for row in rows}
    networks = {row.network for row in rows}

    def found(gpu: str, servers: int, network: str, workers: int) -> bool:
        expected = speeds[gpu, servers, network, 1] * workers
        measured = speeds[gpu, servers, network, workers]
        return shortfall(windows(measured, measured, measured), expected, THRESHOLD).found

    for network in ("res32", "shakesmall"):
        assert not any(found("K80", 1, network, workers) for workers in range(2, 9))
    assert [found("K80", 1, "shakebig", workers) for workers in (6, 7, 8)] == [False, True, True]
    assert all(found("P100", 1, network, workers) for network in networks for workers in range(5, 9))


def test_of_few_nodes_each_is_compared_with_what_it_should_do() -> None:
    """Two have no middle: the one that is late by its own measure is named, and nobody where that is not known."""
    slow, well = NodeMeasurement("b", 1.3, 1.0), NodeMeasurement("a", 1.0, 1.0)
    assert [(each.cause, each.nodes) for each in causes(SLOW, (well, slow))] == [(Cause.STRAGGLER, ("b",))]
    assert "1.3 s a step, 1 s expected" in causes(SLOW, (well, slow))[0].words
    assert [each.cause for each in causes(SLOW, (well, NodeMeasurement("b", 1.3)))] == [Cause.UNKNOWN]


def test_no_parameter_server_is_blamed() -> None:
    """Nodes train in step: what all share is the exchange between them."""
    (finding,) = causes(SLOW, WELL)
    assert finding.cause is Cause.NETWORK
    assert "server" not in finding.words
    found = {each.remedy for each in proposals([finding], WELL)}
    assert found == {Remedy.BATCH, Remedy.FEWER}


def test_waiting_without_rates_is_told_without_a_reason() -> None:
    """A share of the time is known, its reason is not yet."""
    (finding,) = causes(SLOW, (*WELL, NodeMeasurement("f", 1.0, 1.0, waiting=0.4)))
    assert (finding.cause, finding.nodes) == (Cause.INPUT, ("f",))
    assert "40%" in finding.words
    assert causes(SLOW, (*WELL, NodeMeasurement("f", 1.0, 1.0, waiting=0.01)))[0].cause is Cause.NETWORK
