"""What a fleet knows, and what a newcomer does with it."""

import json

import pytest

from polythrottle.domain.errors import InvalidInput
from polythrottle.storage.fleet_knowledge import CapObservation, Knowledge, NodeReport, keep, recall, stored
from polythrottle.storage.object_store import Store
from polythrottle.training.elastic.nodes.power_cap_search import NewcomerStep, StepWindow, judged, told


def node(name: str, factor: float = 1.0, slowdown: float = 1.05) -> NodeReport:
    """Return what a node of a speed says: the default at 220 W and 200 W of it at 184 W."""
    return NodeReport(
        name,
        "V100",
        "resnet50",
        (CapObservation(None, factor, 220.0, 3), CapObservation(200.0, factor * slowdown, 184.0, 3)),
    )


KNOWN = Knowledge("V100", "resnet50", (node("a"), node("b", 1.04), node("c", 0.97)))
CAP = KNOWN.caps()[1]


def windows(step_s: float, count: int, limit_w: float | None = None, power_w: float = 220.0) -> list[StepWindow]:
    """Return some equal windows."""
    return [StepWindow(limit_w, step_s, power_w)] * count


def test_slowdowns_are_free_of_silicon() -> None:
    """Nodes of three speeds agree on what a cap does."""
    assert [(cap.limit_w, round(cap.slowdown, 6), cap.power_w) for cap in KNOWN.caps()] == [
        (None, 1.0, 220.0),
        (200.0, 1.05, 184.0),
    ]
    assert KNOWN.factors() == {"a": 1.0, "b": 1.04, "c": 0.97}
    assert KNOWN.doubt(200.0) == 0.02
    assert KNOWN.doubt(100.0) == float("inf")


def test_one_liar_moves_nothing() -> None:
    """A node that says a cap costs nothing is outvoted, and one that claims double speed is flagged."""
    liar = NodeReport("z", "V100", "resnet50", (CapObservation(None, 0.5, 220.0), CapObservation(200.0, 0.25, 20.0)))
    fleet = Knowledge("V100", "resnet50", (*KNOWN.told, node("d", 1.01), liar))
    assert fleet.caps()[1].slowdown == pytest.approx(1.05)
    assert list(fleet.flagged()) == ["z"]


def test_what_is_kept_is_recalled() -> None:
    """From any URL; a node's second word replaces its first."""
    store = Store("memory://fleet-recalled")
    for each in KNOWN.told:
        keep(store, each)
    keep(store, node("b", 1.05))
    found, notes = recall(store, "V100", "resnet50")
    assert found.factors()["b"] == 1.05
    assert len(found.told) == 3
    assert notes == ()
    assert stored(store) == (("V100", "resnet50"),)
    assert recall(store, "K80", "resnet50") == (Knowledge("K80", "resnet50"), ())


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"{",
        b"[]",
        b'{"version": 2, "looks": []}',
        json.dumps({"version": 1, "node": "x", "gpu": "K80", "network": "resnet50", "looks": []}).encode(),
        json.dumps(
            {
                "version": 1,
                "node": "x",
                "gpu": "V100",
                "network": "resnet50",
                "looks": [{"limit_w": None, "step_s": -1, "power_w": 1, "windows": 1}],
            }
        ).encode(),
    ],
)
def test_a_torn_or_foreign_file_is_named_and_left_out(data: bytes) -> None:
    """The rest of the knowledge is used."""
    store = Store("memory://fleet-torn")
    keep(store, node("a"))
    store.write("knowledge/V100/resnet50/bad.json", data)
    found, notes = recall(store, "V100", "resnet50")
    assert [each.node for each in found.told] == ["a"]
    assert len(notes) == 1
    assert "bad.json" in notes[0]


@pytest.mark.parametrize("name", ["", "../x", "a/b", "-rf", "x" * 101, "a\nb"])
def test_names_that_leave_the_folder_are_refused(name: str) -> None:
    """A node's name is a file's name and nothing else."""
    with pytest.raises(InvalidInput, match="cannot be the name"):
        keep(Store("memory://fleet-names"), NodeReport(name, "V100", "resnet50", ()))


def test_a_cold_cache_says_nothing() -> None:
    """While windows still get faster, nothing is calibrated; then three that agree are."""
    cold = [StepWindow(None, step_s, 150.0) for step_s in (3.0, 2.0, 1.4, 1.1)]
    assert judged(cold, KNOWN, CAP).next is NewcomerStep.WARMING
    assert judged([*cold, *windows(1.0, 2)], KNOWN, CAP).next is NewcomerStep.CALIBRATING
    found = judged([*cold, *windows(1.0, 3)], KNOWN, CAP)
    assert (found.next, found.cap, found.factor) == (NewcomerStep.VERIFYING, CAP, 1.0)


def test_a_node_that_never_settles_is_taken_as_it_is() -> None:
    """After forty windows patience ends, and it is judged by the last three."""
    restless = [StepWindow(None, 1.0 + 0.2 * (index % 2), 220.0) for index in range(40)]
    assert judged(restless[:39], KNOWN, CAP).next is NewcomerStep.WARMING
    assert judged(restless, KNOWN, CAP).next is NewcomerStep.VERIFYING


def test_a_cap_that_does_here_what_it_does_elsewhere_is_kept() -> None:
    """On slow silicon too, for what counts is against its own default; the cap is the node's own figure then."""
    found = judged([*windows(1.2, 3), *windows(1.2 * 1.06, 3, 200.0, 183.0)], KNOWN, CAP)
    assert (found.next, found.factor) == (NewcomerStep.KEPT, 1.2)
    assert (found.cap.limit_w, found.cap.power_w) == (200.0, 183.0)
    assert found.cap.slowdown == pytest.approx(1.06)


@pytest.mark.parametrize(
    ("slowdown", "power_w", "words"), [(1.09, 180.0, "the fleet has 1.050"), (1.06, 215.0, "joules of its default")]
)
def test_a_cap_that_does_not_is_refused(slowdown: float, power_w: float, words: str) -> None:
    """Slower than the fleet says, or no fewer joules: the node goes back to its default and says why."""
    found = judged([*windows(1.0, 3), *windows(slowdown, 3, 200.0, power_w)], KNOWN, CAP)
    assert (found.next, found.cap.limit_w) == (NewcomerStep.REFUSED, None)
    assert words in found.reason


def test_a_fleet_that_knows_nothing_leaves_the_default() -> None:
    """Without a cap worth having a newcomer is calibrated and no more."""
    found = judged(windows(1.0, 3), Knowledge("V100", "resnet50"), None)
    assert (found.next, found.factor) == (NewcomerStep.UNKNOWN, None)


def test_a_newcomer_tells_the_fleet_what_it_saw() -> None:
    """Its warm-up left out, and no limit with too few windows."""
    seen = [*windows(2.0, 1), *windows(1.0, 4), *windows(1.05, 3, 200.0, 184.0), *windows(1.2, 1, 150.0)]
    said = told("n", KNOWN, seen)
    assert [(look.limit_w, look.step_s, look.windows) for look in said.looks] == [(None, 1.0, 4), (200.0, 1.05, 3)]


@pytest.mark.parametrize(("step_s", "power_w"), [(0.0, 1.0), (1.0, -1.0), (float("nan"), 1.0), (1.0, float("inf"))])
def test_a_look_has_numbers(step_s: float, power_w: float) -> None:
    """Nothing, less than nothing and no number are refused."""
    with pytest.raises(InvalidInput):
        CapObservation(None, step_s, power_w)
