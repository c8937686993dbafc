"""What a node knows of its fleet, beside training."""

import threading
from pathlib import Path

from polythrottle.cluster.fleet.knowledge import Look, Told, keep, recall
from polythrottle.cluster.store import Store
from polythrottle.cluster.train.learning import AGAIN_S, Learning
from polythrottle.errors import StorageError

LOOKS = (Look(None, 1.0, 300.0, 3), Look(200.0, 1.1, 220.0, 3))


def settled(learning: Learning) -> Learning:
    """Wait for what goes on beside."""
    if learning._busy is not None:
        learning._busy.join()
    return learning


def test_what_others_know_is_read_and_its_own_left_apart(tmp_path: Path) -> None:
    """A node that comes again does not confirm itself."""
    store = Store(str(tmp_path))
    keep(store, Told("a", "V100", "net", LOOKS))
    keep(store, Told("b", "V100", "net", LOOKS))
    found = Learning(lambda: store, "a", "V100", "net")
    assert found.asked is False
    found.look()
    settled(found)
    assert [each.node for each in found.fleet.told] == ["b"]
    assert found.own == Told("a", "V100", "net", LOOKS)
    assert found.asked is True


def test_what_it_says_is_kept_once(tmp_path: Path) -> None:
    """The same again is not written again, a drift now and then, another cap at once; the end writes the last."""
    store, opened = Store(str(tmp_path)), []
    found = Learning(lambda: opened.append(1) or store, "a", "V100", "net")
    found.say(Told("a", "V100", "net", ()), 0.0)
    assert opened == []
    found.say(Told("a", "V100", "net", LOOKS[:1]), 0.0)
    settled(found)
    found.say(Told("a", "V100", "net", (Look(None, 1.1, 300.0, 4),)), AGAIN_S / 2)
    assert len(opened) == 1
    found.say(Told("a", "V100", "net", LOOKS), AGAIN_S / 2)
    settled(found)
    found.close(Told("a", "V100", "net", LOOKS))
    assert len(opened) == 2
    found.say(Told("a", "V100", "net", (*LOOKS[:1], Look(200.0, 1.2, 220.0, 4))), 2 * AGAIN_S)
    settled(found)
    assert len(opened) == 3
    found.close(Told("a", "V100", "net", LOOKS))
    assert recall(store, "V100", "net")[0].told == (Told("a", "V100", "net", LOOKS),)


def test_a_store_that_is_away_is_trouble_and_no_more() -> None:
    """Nobody is stopped; once it is back it is asked again."""

    def away() -> Store:
        raise StorageError("the store is away")

    found = Learning(away, "a", "V100", "net")
    found.look()
    settled(found)
    assert (found.trouble, found.asked) == ("the store is away", False)


def test_a_store_that_hangs_keeps_nobody_waiting(tmp_path: Path) -> None:
    """While one look is under way another is not begun, and the end waits a little only."""
    store, ended, begun = Store(str(tmp_path)), threading.Event(), []

    def slow() -> Store:
        begun.append(1)
        ended.wait(30)
        return store

    found = Learning(slow, "a", "V100", "net")
    found.look()
    found.say(Told("a", "V100", "net", LOOKS), 0.0)
    found.close(Told("a", "V100", "net", LOOKS), patience_s=0.05)
    assert begun == [1]
    ended.set()
    settled(found)
