"""Where a job keeps what must outlive every machine, and who may write there."""

import os
from pathlib import Path

import pytest

from polythrottle.domain.clock import VirtualClock
from polythrottle.domain.errors import BadFile, InvalidInput, StorageError
from polythrottle.storage.object_store import CLAIM, ClaimedElsewhere, Holding, Store, read_claim


@pytest.fixture(params=["file", "memory"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Store:
    """Return an empty store, on disk and in memory."""
    return Store(f"file://{tmp_path}/store" if request.param == "file" else f"memory://{tmp_path.name}-{id(request)}")


def test_what_is_written_is_read_listed_and_deleted(store: Store, tmp_path: Path) -> None:
    """Bytes and files come back as they were; a second write replaces the first."""
    (tmp_path / "source").write_bytes(b"state")
    store.put("a/x.pt", tmp_path / "source")
    store.write("a/x.json", b"old")
    store.write("a/x.json", b"new")
    assert (store.read("a/x.pt"), store.read("a/x.json")) == (b"state", b"new")
    assert store.names("a") == ["x.json", "x.pt"]
    store.delete("a/x.pt")
    store.delete("a/x.pt")
    assert store.names("a") == ["x.json"]
    assert (tmp_path / "source").read_bytes() == b"state"


def test_nothing_there_is_told_from_a_store_that_is_away(store: Store) -> None:
    """A missing file is FileNotFoundError, a missing folder has no names."""
    assert store.names("nothing") == []
    with pytest.raises(FileNotFoundError):
        store.read("nothing")


def test_a_store_that_cannot_be_written_is_one_line(tmp_path: Path) -> None:
    """A file where the folder should be, for example; nothing half-written stays behind."""
    (tmp_path / "store").write_text("")
    with pytest.raises(StorageError, match="cannot be written"):
        Store(str(tmp_path / "store")).write("x", b"1")
    whole = Store(str(tmp_path / "other"))
    whole.write("x", b"1")
    assert os.listdir(tmp_path / "other") == ["x"]


def test_a_url_that_nothing_opens_is_refused() -> None:
    """An unknown protocol, and one whose package is not installed."""
    with pytest.raises(InvalidInput, match="cannot be opened"):
        Store("nope://x")


def test_a_second_controller_is_refused_while_the_first_lives(store: Store) -> None:
    """It watches the first's claim rise, and says who that is."""
    first = Holding(store, VirtualClock())
    first.take()

    class Living(VirtualClock):
        def sleep(self, duration_s: float) -> None:
            super().sleep(duration_s)
            assert first.renew()

    with pytest.raises(ClaimedElsewhere, match=f"process {os.getpid()}"):
        Holding(store, Living()).take()
    assert first.renew()


def test_a_controller_that_was_killed_is_followed_by_another(store: Store) -> None:
    """A claim that does not rise for three beats is dead; its owner notices if it was not."""
    first, second = Holding(store, VirtualClock()), Holding(store, VirtualClock())
    first.take()
    second.take()
    assert not first.renew()
    assert first.lost_to is not None


def test_a_claim_that_was_let_go_keeps_nobody_waiting(store: Store) -> None:
    """The next controller takes the store at once."""
    first, clock = Holding(store, VirtualClock()), VirtualClock()
    first.take()
    first.release()
    assert read_claim(store) is None
    Holding(store, clock).take()
    assert clock.now() < 2.0


def test_a_foreign_claim_is_not_overwritten(store: Store) -> None:
    """A file of that name which is none stops the controller."""
    store.write(CLAIM, b"[]")
    with pytest.raises(BadFile, match="no claim"):
        Holding(store, VirtualClock()).take()
