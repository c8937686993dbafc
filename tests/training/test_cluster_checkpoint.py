"""Checkpoints: whole or not there, the newest valid one wins; two-phase writing."""

import hashlib
import io
import json
from collections.abc import Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from polythrottle.domain.clock import VirtualClock
from polythrottle.domain.errors import BadFile, StorageError
from polythrottle.storage.object_store import Store
from polythrottle.training.checkpoints import HEAD_BYTES
from polythrottle.training.elastic.checkpoints import (
    FOLDER,
    Manifest,
    WriteOutcome,
    Writer,
    commit,
    copied,
    loads,
    model_digest,
    newest,
    newest_generation,
    newest_manifest,
    size_of,
    write_state,
)

MODEL = model_digest({"weight": (3,)})


@pytest.fixture
def store(tmp_path: Path) -> Store:
    """Return an empty store on disk."""
    return Store(str(tmp_path / "store"))


def manifest(generation: int, step: int, model: str = MODEL) -> Manifest:
    """Return a manifest without size and checksum."""
    return Manifest(generation, step, 0, step * 10, 2, "fixed", 1.0, model)


def put(store: Store, tmp_path: Path, generation: int, step: int, model: str = MODEL, kept: int = 9) -> None:
    """Put a checkpoint whose state is its own step."""
    path = tmp_path / "state"
    state = {"step": torch.tensor(step)}
    commit(
        store, path, write_state(path, manifest(generation, step, model), lambda file: torch.save(state, file)), kept
    )


def put_two_files(store: Store, generation: int, step: int) -> None:
    """Put a checkpoint as it was written before: the state, and then a manifest with its checksum."""
    buffer = io.BytesIO()
    torch.save({"step": torch.tensor(step)}, buffer)
    data = buffer.getvalue()
    known = replace(manifest(generation, step), bytes=len(data), sha256=hashlib.sha256(data).hexdigest())
    document = {"format": "polythrottle checkpoint", "v": 1, **asdict(known)}
    store.write(f"{FOLDER}/{known.name}.pt", data)
    store.write(f"{FOLDER}/{known.name}.json", json.dumps(document).encode())


def found(store: Store, said: list[str]) -> tuple[int, int] | None:
    """Return generation and step of the newest checkpoint."""
    newest_ = newest((store,), MODEL, said.append)
    return None if newest_ is None else (newest_.manifest.generation, newest_.manifest.step)


def test_the_newest_generation_wins_then_the_newest_step(store: Store, tmp_path: Path) -> None:
    """A worker of a former generation that still writes loses, however far it got."""
    assert (found(store, []), newest_generation(store)) == (None, 0)
    for generation, step in ((1, 100), (2, 60), (2, 80), (1, 900)):
        put(store, tmp_path, generation, step)
    assert found(store, []) == (2, 80)
    assert newest_generation(store) == 2


@pytest.mark.parametrize("damage", ["cut", "flip", "head", "field", "nothing of the state"])
def test_a_torn_checkpoint_is_skipped_with_one_line(store: Store, tmp_path: Path, damage: str) -> None:
    """Whatever is torn, the one before counts; the checksum covers what it says of itself too."""
    put(store, tmp_path, 1, 10)
    put(store, tmp_path, 1, 20)
    path = tmp_path / "store" / FOLDER / "g000001-s000000020.checkpoint"
    data = path.read_bytes()
    path.unlink()  # the draft beside the store is the same file
    match damage:
        case "cut":
            path.write_bytes(data[:-9])
        case "flip":
            path.write_bytes(data[:-9] + b"\xff" + data[-8:])
        case "head":
            path.write_bytes(data[20:])
        case "field":
            path.write_bytes(data.replace(b'"workers": 2', b'"workers": 3'))
        case _:
            path.write_bytes(data[:HEAD_BYTES])
    said: list[str] = []
    assert found(store, said) == (1, 10)
    assert len(said) == 1
    assert "g000001-s000000020" in said[0]


@pytest.mark.parametrize("damage", ["cut", "flip", "gone", "manifest"])
def test_a_torn_checkpoint_of_two_files_is_skipped_with_one_line(store: Store, tmp_path: Path, damage: str) -> None:
    """As they were written before; whatever is torn, the one before counts."""
    put_two_files(store, 1, 10)
    put_two_files(store, 1, 20)
    state, head = (tmp_path / "store" / FOLDER / f"g000001-s000000020.{end}" for end in ("pt", "json"))
    data = state.read_bytes()
    match damage:
        case "cut":
            state.write_bytes(data[:-9])
        case "flip":
            state.write_bytes(data[:-9] + b"\xff" + data[-8:])
        case "gone":
            state.unlink()
        case "manifest":
            head.write_bytes(head.read_bytes()[:-20])
    said: list[str] = []
    assert found(store, said) == (1, 10)
    assert len(said) == 1
    assert "g000001-s000000020" in said[0]


def test_a_state_without_its_manifest_is_no_checkpoint(store: Store) -> None:
    """A writer of two files that was killed between them has written nothing."""
    put_two_files(store, 1, 10)
    put_two_files(store, 1, 20)
    store.delete(f"{FOLDER}/g000001-s000000020.json")
    assert found(store, []) == (1, 10)


def test_checkpoints_of_another_model_stop_the_training_rather_than_be_overwritten(
    store: Store, tmp_path: Path
) -> None:
    """They are skipped where one of ours is beside them; alone they are an error that says what to do."""
    put(store, tmp_path, 3, 10, model="other")
    with pytest.raises(BadFile, match="another --store"):
        found(store, [])
    put(store, tmp_path, 1, 5)
    assert found(store, []) == (1, 5)


def test_foreign_files_do_not_count(store: Store, tmp_path: Path) -> None:
    """Other names are left alone, a manifest of another program is skipped."""
    put(store, tmp_path, 1, 5)
    store.write(f"{FOLDER}/readme.json", b"{}")
    store.write(f"{FOLDER}/g000009-s000000001.json", json.dumps({"format": "else", "v": 1}).encode())
    said: list[str] = []
    assert found(store, said) == (1, 5)
    assert "another program" in said[0]


def test_only_the_newest_few_stay(store: Store, tmp_path: Path) -> None:
    """Older ones are deleted once a newer one is whole."""
    for step in range(1, 6):
        put(store, tmp_path, 1, step, kept=2)
    assert store.names(FOLDER) == [f"g000001-s00000000{step}.checkpoint" for step in (4, 5)]


def test_checkpoints_of_both_layouts_stand_in_one_row(store: Store, tmp_path: Path) -> None:
    """A job that is taken up goes on from the old one, and both its files go once they are old."""
    put_two_files(store, 1, 10)
    assert (found(store, []), newest_generation(store)) == ((1, 10), 1)
    known = newest_manifest(store)
    assert known is not None
    assert known.step == 10
    for step in (20, 30):
        put(store, tmp_path, 1, step, kept=2)
    assert found(store, []) == (1, 30)
    assert store.names(FOLDER) == [f"g000001-s0000000{step}.checkpoint" for step in (20, 30)]


def test_the_newest_manifest_is_read_without_the_state(store: Store, tmp_path: Path) -> None:
    """Only the beginning of the file is asked for, however large the state is."""
    put(store, tmp_path, 1, 7)
    asked: list[int | None] = []

    class Watched(Store):
        """Notes how much is read."""

        def read(self, name: str, start: int = 0, end: int | None = None) -> bytes:
            """Read it."""
            asked.append(end)
            return super().read(name, start, end)

    known = newest_manifest(Watched(store.url))
    assert known is not None
    assert (known.step, asked) == (7, [HEAD_BYTES])


def test_a_state_is_loaded_without_running_code(store: Store, tmp_path: Path) -> None:
    """Tensors and plain values come back; a pickled object is refused in one line."""
    put(store, tmp_path, 1, 7)
    here = newest((store,), MODEL, [].append)
    assert here is not None
    assert int(loads(here.data)["step"]) == 7
    path = tmp_path / "evil"
    commit(store, path, write_state(path, manifest(2, 1), lambda file: torch.save({"x": Path("/")}, file)))
    evil = newest((store,), MODEL, [].append)
    assert evil is not None
    with pytest.raises(BadFile, match="cannot be loaded"):
        loads(evil.data)


class Away(Store):
    """A store that cannot be written for a while."""

    away = True

    def put(self, name: str, source: Path) -> None:
        """Put a file, unless the store is away."""
        if self.away:
            raise StorageError("the store is away")
        super().put(name, source)


def writer(store: Store, tmp_path: Path, ended: list[WriteOutcome], clock: VirtualClock | None = None) -> Writer:
    """Return a writer with a spool of its own."""
    return Writer(store, tmp_path / "spool", ended.append, clock or VirtualClock())


def state(value: float) -> Mapping[str, Any]:
    """Return a state as a model and an optimiser have it."""
    return {"model": {"weight": torch.full((3,), value)}, "optimiser": {"groups": [{"lr": 0.1}]}, "step": 3}


def test_what_is_written_is_the_copy_not_what_training_made_of_it(store: Store, tmp_path: Path) -> None:
    """Weights that change while the write goes on do not reach the checkpoint."""
    ended: list[WriteOutcome] = []
    live, writes = state(1.0), writer(store, tmp_path, ended)
    writes.snapshot(live)
    live["model"]["weight"].fill_(2.0)
    writes.persist(manifest(1, 3))
    assert writes.wait(20.0)
    here = newest((store,), MODEL, [].append)
    assert here is not None
    assert loads(here.data)["model"]["weight"].tolist() == [1.0, 1.0, 1.0]
    assert [each.spooled + each.failure for each in ended] == [""]
    assert not (tmp_path / "spool" / FOLDER).exists()


def test_a_store_that_is_away_costs_nothing_and_is_put_to_later(tmp_path: Path) -> None:
    """The checkpoint waits on a local disk, is found there after a restart, and is put when the store is back."""
    ended: list[WriteOutcome] = []
    clock, away = VirtualClock(), Away(str(tmp_path / "store"))
    writes = writer(away, tmp_path, ended, clock)
    writes.snapshot(state(1.0))
    writes.persist(manifest(1, 3))
    assert writes.wait(20.0)
    assert writes.behind
    assert "away" in ended[0].spooled
    assert found(Store(str(tmp_path / "spool")), []) == (1, 3)
    away.away = False
    writes.retry()
    assert len(ended) == 1  # not so soon
    clock.sleep(10.0)
    writes.retry()
    assert writes.wait(20.0)
    assert not writes.behind
    assert found(away, []) == (1, 3)


def test_not_even_a_local_disk_costs_only_that_checkpoint(store: Store, tmp_path: Path) -> None:
    """A spool that cannot be written is said, and the next checkpoint is tried all the same."""
    ended: list[WriteOutcome] = []
    writes = writer(store, tmp_path, ended)
    (tmp_path / "spool").write_text("a file")
    writes.snapshot(state(1.0))
    writes.persist(manifest(1, 3))
    assert writes.wait(20.0)
    assert "cannot be saved" in ended[0].failure
    (tmp_path / "spool").unlink()
    writes.persist(manifest(1, 4))
    assert writes.wait(20.0)
    assert found(store, []) == (1, 4)


def test_a_copy_goes_into_the_memory_of_the_former_one() -> None:
    """The second snapshot allocates nothing where shapes are the same."""
    first = copied(state(1.0), None)
    second = copied(state(2.0), first)
    assert second["model"]["weight"].data_ptr() == first["model"]["weight"].data_ptr()
    assert second["model"]["weight"].tolist() == [2.0, 2.0, 2.0]
    assert size_of(state(0.0)) == 12
