"""What a fine-tuning job keeps in files: task, listing, ledger, checkpoints, served model."""

import gzip
import hashlib
import json
import math
from collections.abc import Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from trainer_jobs import counted_entries

from polythrottle.domain.errors import BadFile, InvalidInput, StorageError
from polythrottle.storage.atomic_file import replace_file
from polythrottle.training import checkpoints
from polythrottle.training.beside.trainer import job_folder, worker
from polythrottle.training.beside.trainer.driver import Task
from polythrottle.training.beside.trainer.job_folder import (
    Checkpoint,
    JobPosition,
    Listing,
    Sample,
    classes_of,
    next_position,
    put_json,
    read_progress,
    roll_back_model,
    swap_model,
)
from polythrottle.training.beside.trainer.worker import LedgerEntry


def listing(*names: str) -> Listing:
    """Return a listing of files of one size."""
    return Listing(tuple(Sample(name, name.rpartition("/")[0], 10, 1) for name in sorted(names)))


def laid(folder: Path, *names: str) -> Path:
    """Write small arrays below a folder."""
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        np.save(folder / name, np.zeros(2))
    return folder


def test_a_task_survives_its_document() -> None:
    """JSON and back is the same task."""
    task = Task("m.pt2", "data", "job", batch=4, latency_limit_s=0.1)
    assert Task.from_document(json.loads(json.dumps(task.document()))) == task


@pytest.mark.parametrize(
    "change",
    [
        {"batch": 0},
        {"batch": "8"},
        {"batch": True},
        {"batch": 1.5},
        {"epochs": 0},
        {"seed": -1},
        {"trained": "all"},
        {"device": "tpu"},
        {"held_out": 1.0},
        {"learning_rate": 0.0},
        {"learning_rate": float("inf")},
        {"slower": 0.5},
        {"latency_limit_s": -1.0},
        {"memory_bytes": 0},
        {"model": ""},
        {"data": None},
        {"colour": 1},
    ],
)
def test_a_malformed_task_is_refused(change: dict[str, Any]) -> None:
    """A value of another type or out of its range is named."""
    with pytest.raises(InvalidInput, match=next(iter(change))):
        Task.from_document({"model": "m", "data": "d", "folder": "f", **change})


@pytest.mark.parametrize("document", [None, [], {}, {"model": "m"}])
def test_half_a_task_is_refused(document: Any) -> None:
    """Model, data and folder are needed."""
    with pytest.raises(InvalidInput, match="missing"):
        Task.from_document(document)


def test_more_epochs_are_the_same_job() -> None:
    """What changes nothing that was done may differ on resuming; a batch may not."""
    task = Task("m", "d", "f")
    assert task.differences(replace(task, epochs=9, threads=2, served="s.pt2")) == ()
    assert task.differences(replace(task, batch=9)) == ("batch",)


def test_labels_come_from_folders(tmp_path: Path) -> None:
    """A sample's label is its folder; hidden files and other kinds are no samples."""
    laid(tmp_path, "cat/1.npy", "dog/2.npy", "dog/.3.npy")
    (tmp_path / "dog" / "notes.txt").write_text("")
    assert [(each.file, each.label) for each in Listing.scan(tmp_path).samples] == [
        ("cat/1.npy", "cat"),
        ("dog/2.npy", "dog"),
    ]


def test_labels_may_be_links(tmp_path: Path) -> None:
    """A folder that is a link counts, and one that leads in circles does not hang."""
    laid(tmp_path / "elsewhere", "1.npy")
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "cat").symlink_to(tmp_path / "elsewhere")
    (tmp_path / "elsewhere" / "round").symlink_to(tmp_path / "data")
    assert [each.file for each in Listing.scan(tmp_path / "data").samples] == ["cat/1.npy"]


@pytest.mark.parametrize("head", ["file,label\n", ""])
def test_labels_come_from_a_table(tmp_path: Path, head: str) -> None:
    """With or without a line above; what it does not name has no label."""
    laid(tmp_path, "1.npy", "2.npy")
    (tmp_path / "labels.csv").write_text(f"{head}1.npy,cat\n")
    assert [each.label for each in Listing.scan(tmp_path).samples] == ["cat", ""]


@pytest.mark.parametrize(
    "text",
    [
        b"\xef\xbb\xbffile,label\r\n1.npy,cat\r\n",
        b"\xef\xbb\xbf1.npy,cat\n",
        b"file;label\n1.npy;cat\n",
        b"file\tlabel\n\n 1.npy\tcat \n",
        gzip.compress(b"file,label\n1.npy,cat\n", mtime=0),
    ],
    ids=["mark", "mark alone", "semicolons", "tabs", "packed"],
)
def test_labels_are_read_as_every_table_is(tmp_path: Path, text: bytes) -> None:
    """A spreadsheet's mark at the beginning is no part of a name, and a header says what stands between cells."""
    laid(tmp_path, "1.npy", "2.npy")
    (tmp_path / "labels.csv").write_bytes(text)
    assert [each.label for each in Listing.scan(tmp_path).samples] == ["cat", ""]


@pytest.mark.parametrize(
    ("text", "why"),
    [
        (b"1.npy," + b"x" * 1_000_001, "line of more than 1,000,000 characters"),
        (b"1.npy,\xff\n", "not a CSV file in UTF-8"),
        (b'1.npy,"cat\n2.npy,dog\n', "not a CSV file, or is damaged"),
        (b"1.npy,cat\n" * 12, "more than 11 rows"),
    ],
)
def test_labels_are_bounded_as_every_table_is(
    tmp_path: Path, text: bytes, why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No line without end, no file without end, no quote that takes the rest for one label."""
    monkeypatch.setattr(job_folder, "_MOST_LABELS", 11)
    (tmp_path / "labels.csv").write_bytes(text)
    with pytest.raises(BadFile, match=why):
        Listing.scan(tmp_path)


def test_a_bad_table_is_named(tmp_path: Path) -> None:
    """A row that is not a file and its label is shown."""
    (tmp_path / "labels.csv").write_text("1.npy;cat\n")
    with pytest.raises(BadFile, match=r"1\.npy;cat"):
        Listing.scan(tmp_path)


def test_a_missing_data_folder_is_named(tmp_path: Path) -> None:
    """The message says which folder."""
    with pytest.raises(BadFile, match="nowhere"):
        Listing.scan(tmp_path / "nowhere")


@given(st.sets(st.text("abc", min_size=1, max_size=4), min_size=2), st.floats(0.01, 0.99), st.integers(0, 9))
def test_split_and_order_lose_nothing(names: set[str], share: float, epoch: int) -> None:
    """Each sample is trained on or held out, and an epoch's order has each one to train on once."""
    files_ = listing(*names)
    train, held = files_.split(share)
    assert sorted(train + held) == list(range(len(names)))
    assert train
    assert held
    assert sorted(files_.order(train, 7, epoch)) == train


def test_the_order_is_fixed_for_ever() -> None:
    """Seed and epoch decide the order, whichever machine or library."""
    files_ = listing(*(f"{number}.npy" for number in range(8)))
    assert files_.order(range(8), 0, 0) == [4, 5, 0, 6, 7, 2, 3, 1]
    assert files_.order(range(8), 0, 1) != files_.order(range(8), 0, 0)


def test_a_held_out_sample_stays_held_out() -> None:
    """New files do not move old ones from one side to the other."""
    names = [f"{number}.npy" for number in range(200)]
    few, many = listing(*names[:100]), listing(*names)
    before = {few.samples[row].file for row in few.split(0.2)[1]}
    after = {many.samples[row].file for row in many.split(0.2)[1]}
    assert before == after & set(names[:100])


def test_changes_are_told_apart() -> None:
    """New, gone and changed files are counted and named."""
    now = Listing((Sample("b", "", 11, 1), Sample("c", "", 10, 1)))
    assert listing("a", "b").differences(now) == "1 new: c; 1 gone: a; 1 changed: b"


def test_a_listing_comes_back_by_its_digest(tmp_path: Path) -> None:
    """And a damaged one does not."""
    files_ = listing("x/a.npy", "y/b.npy")
    files_.save(tmp_path)
    assert Listing.load(tmp_path, files_.digest) == files_
    (tmp_path / f"listing-{files_.digest}.json").write_text("[]")
    with pytest.raises(BadFile, match="damaged"):
        Listing.load(tmp_path, files_.digest)


@pytest.mark.parametrize(
    ("labels", "output", "classes"),
    [
        ("ba", 2, {"a": 0, "b": 1}),
        ("31", 10, {"1": 1, "3": 3}),
        ("31", 2, {"1": 0, "3": 1}),
    ],
)
def test_numbers_are_classes_where_the_model_has_them(labels: str, output: int, classes: dict[str, int]) -> None:
    """Other labels are numbered in the order of their names."""
    assert classes_of(labels, output) == classes


def test_a_step_done_again_counts_once(tmp_path: Path) -> None:
    """The later line of a step counts, and none after the checkpoint's step."""
    for entry in (
        LedgerEntry(1, 0, "d", (0, 1)),
        LedgerEntry(2, 0, "d", (2,)),
        LedgerEntry(2, 0, "d", (2, 3)),
        LedgerEntry(3, 1, "d", (0,)),
    ):
        worker.append_entry(tmp_path, entry)
    assert {epoch: [entry.seen for entry in entries] for epoch, entries in counted_entries(tmp_path, 2).items()} == {
        0: [(0, 1), (2, 3)]
    }


def test_a_torn_line_does_no_harm(tmp_path: Path) -> None:
    """Wherever a line was cut off, it is passed over and the next one is whole."""
    worker.append_entry(tmp_path, LedgerEntry(1, 0, "d", (0, 1)))
    path = tmp_path / worker.LEDGER
    whole = path.read_bytes()
    for cut in range(len(whole) + 1):
        path.write_bytes(whole[:cut])
        worker.append_entry(tmp_path, LedgerEntry(1, 0, "d", (5,)))
        assert counted_entries(tmp_path, 1)[0][0].seen == (5,)


def test_a_step_that_is_missing_is_told(tmp_path: Path) -> None:
    """A checkpoint that counts a step nobody noted is an error, not a silent gap."""
    worker.append_entry(tmp_path, LedgerEntry(2, 0, "d", (0,)))
    with pytest.raises(BadFile, match="step 1"):
        counted_entries(tmp_path, 2)


def test_two_checkpoints_are_kept(tmp_path: Path) -> None:
    """The newest counts."""
    for step in range(1, 6):
        job_folder.write_checkpoint(tmp_path, Checkpoint(JobPosition(step), b"learnt"))
    assert sorted(path.stem for path in tmp_path.glob("*.checkpoint")) == ["000000004", "000000005"]
    assert job_folder.newest_checkpoint(tmp_path) == (Checkpoint(JobPosition(5), b"learnt"), ())


def test_a_damaged_checkpoint_is_passed_over(tmp_path: Path) -> None:
    """Cut off or changed anywhere, the one before it counts and the damage is named; if none is whole, that is said."""
    for step in (1, 2):
        job_folder.write_checkpoint(tmp_path, Checkpoint(JobPosition(step), b"learnt" * 3))
    path = tmp_path / "000000002.checkpoint"
    whole = path.read_bytes()
    flipped = (bytes([*whole[:at], whole[at] ^ 1, *whole[at + 1 :]]) for at in range(len(whole)))
    for data in (*(whole[:cut] for cut in range(len(whole))), *flipped):
        path.write_bytes(data)
        found, damaged = job_folder.newest_checkpoint(tmp_path)
        assert found is not None
        assert (found.place.step, damaged) == (1, (path.name,))
    (tmp_path / "000000001.checkpoint").write_bytes(b"")
    with pytest.raises(BadFile, match="no checkpoint"):
        job_folder.newest_checkpoint(tmp_path)


@pytest.mark.parametrize(
    "odd",
    [
        *({"epoch": "two"}, {"step": 1.5}, {"position": -1}, {"listing": 3}, {"mood": 1}),
        *(
            {"written_s": 1e300},
            {"written_s": "now"},
            {"loss": "a"},
            {"loss": ""},
            {"loss": math.nan},
            {"loss": 10**400},
        ),
    ],
)
def test_a_checkpoint_whose_first_line_is_none_of_ours_is_damaged(tmp_path: Path, odd: Mapping[str, object]) -> None:
    """Though its checksum is right: whoever asks where the job stands gets a line with the file and why."""
    head = {"v": checkpoints.FORMAT, **asdict(JobPosition(3)), **odd, "bytes": 6}
    digest = hashlib.sha256(json.dumps(head).encode() + b"\n" + b"learnt").hexdigest()
    line = json.dumps({**head, "sha256": digest}).encode()
    (tmp_path / "000000003.checkpoint").write_bytes(line + b"\nlearnt")
    with pytest.raises(BadFile, match=r"000000003\.checkpoint: it does not say where a job stands"):
        job_folder.newest_checkpoint(tmp_path)
    assert job_folder.newest_place(tmp_path) is None


def test_a_checkpoint_of_another_version_is_said_to_be(tmp_path: Path) -> None:
    """Its job is not lost: the version that wrote it goes on with it."""
    line = checkpoints.sealed(asdict(JobPosition(3)), b"learnt").replace(b'"v": 1', b'"v": 9')
    (tmp_path / "000000003.checkpoint").write_bytes(line)
    with pytest.raises(BadFile, match=r"000000003\.checkpoint: it is of another version"):
        job_folder.newest_checkpoint(tmp_path)


def test_the_last_step_of_an_epoch_begins_the_next() -> None:
    """Position goes back to 0 and no listing holds any more."""
    place = next_position(JobPosition(4, 1, 8, "d"), 8, 20, "d")
    assert place == JobPosition(5, 1, 16, "d")
    assert next_position(place, 4, 20, "d") == JobPosition(6, 2, 0, "")


def full(path: Path, data: bytes) -> None:
    """Stand in for a disk without room."""
    raise StorageError(f"{path} cannot be written: No space left on device")


def test_a_full_disk_keeps_the_older_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The error says so, and what was there still counts."""
    job_folder.write_checkpoint(tmp_path, Checkpoint(JobPosition(1), b"learnt"))
    monkeypatch.setattr(job_folder, "replace_file", full)
    with pytest.raises(StorageError, match="No space left"):
        job_folder.write_checkpoint(tmp_path, Checkpoint(JobPosition(2), b"learnt"))
    assert job_folder.newest_checkpoint(tmp_path)[0] == Checkpoint(JobPosition(1), b"learnt")


def test_swapping_keeps_what_was_served(tmp_path: Path) -> None:
    """Going back serves it again; without one there is nothing to go back to."""
    served = tmp_path / "model.pt2"
    assert swap_model(served, b"first") is None
    with pytest.raises(BadFile, match="nothing to go back to"):
        roll_back_model(served)
    assert swap_model(served, b"second") == tmp_path / "model.previous.pt2"
    assert served.read_bytes() == b"second"
    roll_back_model(served)
    assert served.read_bytes() == b"first"


def test_a_full_disk_leaves_the_served_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What was served before is served still."""
    served = tmp_path / "model.pt2"
    served.write_bytes(b"first")
    monkeypatch.setattr(job_folder, "replace_file", full)
    with pytest.raises(StorageError):
        swap_model(served, b"second")
    assert served.read_bytes() == b"first"


def test_a_file_is_never_half_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It takes its place in one move: until that, the old one stands, and a failed one leaves nothing behind."""
    replace_file(tmp_path / "file", b"old")

    def no_move(*_: Any) -> None:
        assert (tmp_path / "file").read_bytes() == b"old"
        raise OSError(5, "Input/output error")

    monkeypatch.setattr("os.replace", no_move)
    with pytest.raises(StorageError, match="Input/output"):
        replace_file(tmp_path / "file", b"new")
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == {"file": b"old"}


def test_a_folder_without_a_job_is_told(tmp_path: Path) -> None:
    """And so is a damaged one."""
    with pytest.raises(BadFile, match="no fine-tuning job"):
        read_progress(tmp_path)
    put_json(tmp_path / "task.json", {"task": {}, "classes": {}})
    with pytest.raises(BadFile, match="damaged"):
        read_progress(tmp_path)


def test_progress_is_read_without_torch(tmp_path: Path) -> None:
    """Task, place and what was counted come from the folder alone."""
    task = Task("m.pt2", "d", str(tmp_path), epochs=2)
    put_json(tmp_path / "task.json", {"task": task.document(), "classes": {"a": 0}, "shape": [2]})
    found = listing(*(f"a/{number}.npy" for number in range(10)))
    found.save(tmp_path)
    job_folder.write_checkpoint(tmp_path, Checkpoint(JobPosition(3, 1, 4, found.digest, 0.5), b""))
    progress = read_progress(tmp_path)
    assert (progress.task, progress.place.step, progress.samples) == (task, 3, len(found.split(0.1)[0]))
    assert (progress.finished, progress.runs, progress.validation) == (False, False, None)
