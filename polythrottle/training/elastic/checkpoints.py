"""Checkpoints in a store: whole or not there, the newest valid one wins, written in two phases (CheckFreq, FAST'21)."""

import contextlib
import hashlib
import io
import json
import re
import shutil
import threading
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, BinaryIO

from polythrottle.domain.clock import Clock, SystemClock
from polythrottle.domain.errors import BadFile, PolythrottleError, StorageError
from polythrottle.storage.object_store import Store
from polythrottle.storage.untrusted import MALFORMED
from polythrottle.training.checkpoints import (
    HEAD_BYTES,
    KEPT,
    SUFFIX,
    check_state,
    newest_whole,
    read_head,
    write_sealed,
)

# Checkpoints in a store, one file each in the format of `polythrottle.training.checkpoints`; the newest whole one wins.
#
# Newest means of the latest generation, then of the latest step: a worker of a former generation that still writes
# loses. Before, a checkpoint was two files, the state and then a manifest with its checksum; those are still read.

FOLDER = "checkpoints"
_TWO_FILES = "polythrottle checkpoint"
_MANIFEST = ".json"
_STATE = ".pt"
_FOREIGN = "it is of another model"
_NAME = re.compile(rf"(g(\d{{6,}})-s(\d{{9,}}))({re.escape(_MANIFEST)}|{re.escape(SUFFIX)})")


@dataclass(frozen=True)
class Manifest:
    """What is known of a checkpoint without reading its state.

    Attributes:
        generation: The one that wrote it.
        step: Updates of the weights so far.
        epoch: The one that had begun.
        consumed: Samples of it that were done, over all workers.
        workers: How many there were.
        rule: What stays the same when their number changes.
        rate_factor: What the script's learning rate was multiplied by.
        model: Digest of the names and shapes of the model's tensors.
        bytes: Size of the state.
        sha256: Checksum of the state.
    """

    generation: int
    step: int
    epoch: int
    consumed: int
    workers: int
    rule: str
    rate_factor: float
    model: str
    bytes: int = 0
    sha256: str = ""

    @property
    def name(self) -> str:
        """Return its name without an ending; names sort as checkpoints do."""
        return f"g{self.generation:06d}-s{self.step:09d}"


@dataclass(frozen=True)
class Found:
    """The newest valid checkpoint: where it lies and what it holds."""

    store: Store
    manifest: Manifest
    data: bytes


@dataclass(frozen=True, order=True)
class _Entry:
    """A checkpoint by its name in a store; entries sort as checkpoints do."""

    generation: int
    step: int
    name: str
    two_files: bool

    @property
    def files(self) -> tuple[str, ...]:
        """Its files below the store, the one that makes it a checkpoint first."""
        if self.two_files:  # first what makes it a checkpoint
            return (f"{FOLDER}/{self.name}{_MANIFEST}", f"{FOLDER}/{self.name}{_STATE}")
        return (f"{FOLDER}/{self.name}{SUFFIX}",)


def model_digest(shapes: Mapping[str, tuple[int, ...]]) -> str:
    """Return a digest of the names and shapes of a model's tensors."""
    return hashlib.sha256(json.dumps(sorted(shapes.items())).encode()).hexdigest()[:16]


def write_state(path: Path, manifest: Manifest, write: Callable[[BinaryIO], object]) -> Manifest:
    """Write a checkpoint to a local file, and return its manifest with size and checksum.

    Args:
        path: Where to; a former file of the name is replaced.
        manifest: What is known of it.
        write: Writes the state to a file.

    Raises:
        StorageError: If it cannot be written.
    """
    fields = {name: value for name, value in asdict(manifest).items() if name not in ("bytes", "sha256")}
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.unlink(missing_ok=True)  # a store on the same disk may have the former one by a link
        head = write_sealed(path, fields, write)
    except (OSError, RuntimeError) as err:  # torch turns a full disk into a RuntimeError
        with contextlib.suppress(OSError):
            path.unlink(missing_ok=True)
        raise StorageError(f"a checkpoint cannot be saved to {path.parent}: {err}") from err
    return replace(manifest, bytes=head["bytes"], sha256=head["sha256"])


def commit(store: Store, source: Path, manifest: Manifest, kept: int = KEPT) -> None:
    """Put a checkpoint into a store, then drop all but the newest few.

    Raises:
        StorageError: If it cannot be written; what is there stays valid.
    """
    # The new one first, then the old ones go: a kill in between leaves one too many, never none.
    store.put(f"{FOLDER}/{manifest.name}{SUFFIX}", source)
    for entry in _entries(store.names(FOLDER))[kept:]:
        for name in entry.files:
            store.delete(name)


def newest(stores: tuple[Store, ...], model: str, told: Callable[[str], None]) -> Found | None:
    """Return the newest valid checkpoint of a model, None if there is none at all.

    Args:
        stores: Where to look; of two alike the first counts.
        model: Digest of the model's tensors.
        told: Takes one line for each checkpoint that is skipped.

    Raises:
        StorageError: If a store cannot be reached: training must not begin anew where it only cannot see.
        BadFile: If there are checkpoints, but all that are whole are of another model.
    """
    # A local disk may hold a newer one than the store that was away when it was written.
    candidates = [(entry, store) for store in stores for entry in _entries(store.names(FOLDER))]
    candidates.sort(key=lambda each: each[0], reverse=True)
    found, skipped = newest_whole(candidates, lambda each: _whole(*each, model))
    for (entry, _), reason in skipped:
        told(f"skipping checkpoint {entry.name}: {reason}")
    if found is None and any(str(reason) == _FOREIGN for _, reason in skipped):
        raise BadFile(f"{stores[0].url} holds checkpoints of another model; give this job another --store")
    return found


def newest_manifest(store: Store) -> Manifest | None:
    """Return what is known of the newest checkpoint in a store without reading its state, None if there is none.

    Raises:
        StorageError: If the store cannot be reached.
    """
    files = store.names(FOLDER)
    entries = [entry for entry in _entries(files) if not entry.two_files or f"{entry.name}{_STATE}" in files]
    return newest_whole(entries, lambda entry: _manifest(store, entry))[0]


def newest_generation(store: Store) -> int:
    """Return the newest generation that left a checkpoint in a store, whole or not; 0 without any.

    Raises:
        StorageError: If the store cannot be reached.
    """
    # By names alone: a controller that takes over must not reuse a number, even of a checkpoint that is torn.
    return max((entry.generation for entry in _entries(store.names(FOLDER))), default=0)


def loads(data: bytes | memoryview) -> dict[str, Any]:
    """Return the state in the bytes of a checkpoint.

    Raises:
        BadFile: If there is none.
    """
    import torch

    try:
        state = torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)
    except Exception as err:  # unpickling raises what it likes
        raise BadFile(f"the checkpoint cannot be loaded: {err or type(err).__name__}") from err
    if not isinstance(state, dict):
        raise BadFile("the checkpoint holds no state")
    return state


def _entries(files: Iterable[str]) -> list[_Entry]:
    """Return the checkpoints among a store's files, newest first; other files do not count."""
    matches = [matched for file in files if (matched := _NAME.fullmatch(file))]
    return sorted((_Entry(int(it[2]), int(it[3]), it[1], it[4] == _MANIFEST) for it in matches), reverse=True)


def _whole(entry: _Entry, store: Store, model: str) -> Found:
    """Return a checkpoint with its state.

    Raises:
        BadFile: If it is not whole, or of another model.
        StorageError: If the store cannot be reached.
    """
    head = _head(store, entry)
    manifest = _manifest_of(head, entry)
    if manifest.model != model:
        raise BadFile(_FOREIGN)
    try:
        if not entry.two_files:
            state = store.read(entry.files[0], HEAD_BYTES)
            check_state(head, state)
            return Found(store, manifest, state)
        state = store.read(entry.files[1])
    except FileNotFoundError as err:
        raise BadFile("its state is missing") from err
    if len(state) != manifest.bytes or hashlib.sha256(state).hexdigest() != manifest.sha256:
        raise BadFile("its state is torn: size or checksum differ")
    return Found(store, manifest, state)


def _manifest(store: Store, entry: _Entry) -> Manifest:
    return _manifest_of(_head(store, entry), entry)


def _manifest_of(head: Mapping[str, Any], entry: _Entry) -> Manifest:
    try:
        manifest = Manifest(**{name: value for name, value in head.items() if name != "v"})
        named = manifest.name
    except (ValueError, TypeError) as err:
        raise BadFile("its manifest is torn or none of ours") from err
    # A copy under another name would be sorted by what it is not.
    if named != entry.name:
        raise BadFile("its manifest is that of another checkpoint")
    return manifest


def _head(store: Store, entry: _Entry) -> dict[str, Any]:
    """Return what a checkpoint says of itself.

    Raises:
        BadFile: If it is torn, or gone meanwhile.
        StorageError: If the store cannot be reached.
    """
    try:
        if not entry.two_files:
            return read_head(store.read(entry.files[0], 0, HEAD_BYTES))
        head = json.loads(store.read(entry.files[0]))
        if head.pop("format") != _TWO_FILES or head["v"] != 1:
            raise BadFile("it is of another program or version")
        return {**head}
    except FileNotFoundError as err:
        raise BadFile("it is gone") from err
    except MALFORMED as err:
        raise BadFile("its manifest is torn or none of ours") from err


# Two-phase writing (CheckFreq, FAST'21): a copy in memory while training waits, and the write beside training.
#
# A store that is away costs no training: the checkpoint waits on a local disk, and is put as soon as the store is
# back.

AGAIN_S = 5.0


@dataclass(frozen=True)
class WriteOutcome:
    """How one write ended.

    Attributes:
        manifest: What was written, sealed; as it was asked for if not even a local disk took it.
        persist_s: How long it took, in seconds.
        spooled: Why it waits on a local disk; empty if it is safe in the store.
        failure: Why it is nowhere; empty if it is somewhere.
    """

    manifest: Manifest
    persist_s: float
    spooled: str = ""
    failure: str = ""


class Writer:
    """Writes the checkpoints of one worker, one at a time.

    Args:
        store: Where they belong.
        spool: A folder on a local disk, of this node alone.
        ended: Told how each write ended, from its thread.
        clock: Times writes.
    """

    def __init__(
        self, store: Store, spool: Path, ended: Callable[[WriteOutcome], None], clock: Clock | None = None
    ) -> None:
        self._store = store
        self._spool = spool
        self._ended = ended
        self._clock = clock or SystemClock()
        self._copy: Any = None
        self._thread: threading.Thread | None = None
        self._waiting: tuple[Path, Manifest] | None = None
        self._tried_s = self._clock.now()

    @property
    def busy(self) -> bool:
        """Return whether a write goes on."""
        return self._thread is not None and self._thread.is_alive()

    @property
    def behind(self) -> bool:
        """Return whether a checkpoint waits for the store."""
        return self._waiting is not None

    def prepare(self, state: Mapping[str, Any]) -> None:
        """Begin to take the memory for copies of a state, beside training, so that the first copy need not wait."""
        # Only shapes go into the thread: training changes the tensors meanwhile.
        shapes = shaped(state)

        def take() -> None:
            self._copy = filled(shapes)

        self.wait(None)
        self._thread = threading.Thread(target=take, daemon=True)
        self._thread.start()

    def snapshot(self, state: Mapping[str, Any]) -> float:
        """Copy a state into memory, into the former copy's place, and return how long it took, in seconds."""
        self.wait(None)
        start_s = self._clock.now()
        # Into the former copy, whose pages are there already: new ones cost a page fault each while training waits.
        self._copy = copied(state, self._copy)
        return self._clock.now() - start_s

    def persist(self, manifest: Manifest) -> None:
        """Begin to write the copy."""
        self._begin(lambda: self._persisted(manifest))

    def retry(self) -> None:
        """Begin to put the checkpoint that waits, if the last attempt is some time ago."""
        if self._waiting is not None and not self.busy and self._clock.now() - self._tried_s >= AGAIN_S:
            path, manifest = self._waiting
            self._begin(lambda: self._put(path, manifest, self._clock.now()))

    def wait(self, limit_s: float | None) -> bool:
        """Wait for a write to end, at most so many seconds, and return whether it has."""
        if self._thread is not None:
            self._thread.join(limit_s)
        return not self.busy

    def _begin(self, work: Callable[[], WriteOutcome]) -> None:
        self.wait(None)
        self._thread = threading.Thread(target=lambda: self._ended(work()), daemon=True)
        self._thread.start()

    def _persisted(self, manifest: Manifest) -> WriteOutcome:
        start_s = self._clock.now()
        path = self._spool / FOLDER / f"{manifest.name}{SUFFIX}"
        try:
            sealed = write_state(path, manifest, self._save)
        except PolythrottleError as err:
            return WriteOutcome(manifest, self._clock.now() - start_s, failure=str(err))
        return self._put(path, sealed, start_s)

    def _save(self, file: BinaryIO) -> None:
        import torch

        torch.save(self._copy, file)

    def _put(self, path: Path, manifest: Manifest, start_s: float) -> WriteOutcome:
        self._tried_s = self._clock.now()
        try:
            commit(self._store, path, manifest)
        except StorageError as err:
            self._keep(path, manifest)
            return WriteOutcome(manifest, self._clock.now() - start_s, spooled=str(err))
        self._waiting = None
        # What the store has is not needed here, and local disks are small.
        shutil.rmtree(self._spool / FOLDER, ignore_errors=True)
        return WriteOutcome(manifest, self._clock.now() - start_s)

    def _keep(self, path: Path, manifest: Manifest) -> None:
        """Make the spooled file a checkpoint of its own, so that this node finds it again after a restart."""
        self._waiting = (path, manifest)
        try:
            # Only the newest is worth its space on a local disk.
            commit(Store(str(self._spool)), path, manifest, kept=1)
        except StorageError:
            return


def copied(value: Any, former: Any) -> Any:
    """Return a copy of a state in main memory; tensors go into the former copy's memory where they fit."""
    import torch

    if isinstance(value, torch.Tensor):
        source = value.detach()
        fits = isinstance(former, torch.Tensor) and former.shape == source.shape and former.dtype == source.dtype
        if fits:
            return former.copy_(source)
        return source.to("cpu", copy=True)
    if isinstance(value, Mapping):
        kept = former if isinstance(former, Mapping) else {}
        return {key: copied(each, kept.get(key)) for key, each in value.items()}
    if isinstance(value, list | tuple):
        if isinstance(former, list | tuple) and len(former) == len(value):
            olds = former
        else:
            olds = [None] * len(value)
        return type(value)(copied(each, old) for each, old in zip(value, olds, strict=True))
    return value


def shaped(value: Any) -> Any:
    """Return a state with shapes and types in place of its tensors."""
    import torch

    if isinstance(value, torch.Tensor):
        return value.detach().to("meta")
    if isinstance(value, Mapping):
        return {key: shaped(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(shaped(each) for each in value)
    return value


def filled(value: Any) -> Any:
    """Return a state of zeros for the shapes that `shaped` returns; writing them is what takes the memory."""
    import torch

    if isinstance(value, torch.Tensor):
        return torch.zeros(value.shape, dtype=value.dtype).fill_(0)
    if isinstance(value, Mapping):
        return {key: filled(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(filled(each) for each in value)
    return value


def size_of(value: Any) -> int:
    """Return the bytes of a state's tensors."""
    import torch

    if isinstance(value, torch.Tensor):
        return value.numel() * value.element_size()
    if isinstance(value, Mapping):
        return sum(size_of(each) for each in value.values())
    if isinstance(value, list | tuple):
        return sum(size_of(each) for each in value)
    return 0
