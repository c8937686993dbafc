"""What a node knows of its fleet, beside training."""

import threading
from pathlib import Path

from polythrottle.domain.errors import StorageError
from polythrottle.storage.fleet_knowledge import CapObservation, NodeReport, keep, recall
from polythrottle.storage.object_store import Store
from polythrottle.training.elastic.nodes.power_controller import AGAIN_S, FleetKnowledge

LOOKS = (CapObservation(None, 1.0, 300.0, 3), CapObservation(200.0, 1.1, 220.0, 3))


def settled(learning: FleetKnowledge) -> FleetKnowledge:
    """Wait for what goes on beside."""
    if learning._busy is not None:
        learning._busy.join()
    return learning


def test_what_others_know_is_read_and_its_own_left_apart(tmp_path: Path) -> None:
    """A node that comes again does not confirm itself."""
    store = Store(str(tmp_path))
    keep(store, NodeReport("a", "V100", "net", LOOKS))
    keep(store, NodeReport("b", "V100", "net", LOOKS))
    found = FleetKnowledge(lambda: store, "a", "V100", "net")
    assert found.view.asked is False
    found.look()
    settled(found)
    assert [each.node for each in found.view.fleet.told] == ["b"]
    assert found.view.asked is True


def test_what_it_says_is_kept_once(tmp_path: Path) -> None:
    """The same again is not written again, a drift now and then, another cap at once; the end writes the last."""
    store, opened = Store(str(tmp_path)), []
    found = FleetKnowledge(lambda: opened.append(1) or store, "a", "V100", "net")
    found.say(NodeReport("a", "V100", "net", ()), 0.0)
    assert opened == []
    found.say(NodeReport("a", "V100", "net", LOOKS[:1]), 0.0)
    settled(found)
    found.say(NodeReport("a", "V100", "net", (CapObservation(None, 1.1, 300.0, 4),)), AGAIN_S / 2)
    assert len(opened) == 1
    found.say(NodeReport("a", "V100", "net", LOOKS), AGAIN_S / 2)
    settled(found)
    found.close(NodeReport("a", "V100", "net", LOOKS))
    assert len(opened) == 2
    found.say(NodeReport("a", "V100", "net", (*LOOKS[:1], CapObservation(200.0, 1.2, 220.0, 4))), 2 * AGAIN_S)
    settled(found)
    assert len(opened) == 3
    found.close(NodeReport("a", "V100", "net", LOOKS))
    assert recall(store, "V100", "net")[0].told == (NodeReport("a", "V100", "net", LOOKS),)


def test_a_store_that_is_away_is_trouble_and_no_more() -> None:
    """Nobody is stopped; once it is back it is asked again."""

    def away() -> Store:
        raise StorageError("the store is away")

    found = FleetKnowledge(away, "a", "V100", "net")
    found.look()
    settled(found)
    assert (found.trouble, found.view.asked) == ("the store is away", False)


def test_a_store_that_hangs_keeps_nobody_waiting(tmp_path: Path) -> None:
    """While one look is under way another is not begun, and the end waits a little only."""
    store, ended, begun = Store(str(tmp_path)), threading.Event(), []

    def slow() -> Store:
        begun.append(1)
        ended.wait(30)
        return store

    found = FleetKnowledge(slow, "a", "V100", "net")
    found.look()
    found.say(NodeReport("a", "V100", "net", LOOKS), 0.0)
    found.close(NodeReport("a", "V100", "net", LOOKS), patience_s=0.05)
    assert begun == [1]
    ended.set()
    settled(found)
