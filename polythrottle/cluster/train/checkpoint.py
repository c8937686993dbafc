"""Checkpoints in a store: whole or not there, told apart by a checksum; the newest valid one wins.

First the state is put, then a manifest with its size and checksum: without the manifest there is no checkpoint. Newest
means of the latest generation, then of the latest step: a worker of a former generation that still writes loses.
"""

import contextlib
import hashlib
import io
import json
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from polythrottle.cluster.store import Store
from polythrottle.errors import BadFile, StorageError

FORMAT = "polythrottle checkpoint"
VERSION = 1
FOLDER = "checkpoints"
KEPT = 2
_BLOCK = 1 << 20
_NAME = re.compile(r"g(\d{6,})-s(\d{9,})\.json")


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


def model_digest(shapes: Mapping[str, tuple[int, ...]]) -> str:
    """Return a digest of the names and shapes of a model's tensors."""
    return hashlib.sha256(json.dumps(sorted(shapes.items())).encode()).hexdigest()[:16]


def seal(path: Path, manifest: Manifest) -> Manifest:
    """Return a manifest with the size and checksum of a state's file.

    Raises:
        StorageError: If it cannot be read.
    """
    try:
        with path.open("rb") as file:
            digest = hashlib.sha256()
            while block := file.read(_BLOCK):
                digest.update(block)
            size = file.tell()
    except OSError as err:
        raise StorageError(f"{path} cannot be read: {err.strerror}") from err
    return Manifest(**asdict(manifest) | {"bytes": size, "sha256": digest.hexdigest()})


def commit(store: Store, source: Path, manifest: Manifest, kept: int = KEPT) -> None:
    """Put a checkpoint into a store, then drop all but the newest few.

    Args:
        store: Where to.
        source: File of the state.
        manifest: Its sealed manifest.
        kept: How many stay.

    Raises:
        StorageError: If it cannot be written; what is there stays valid.
    """
    store.put(f"{FOLDER}/{manifest.name}.pt", source)
    document = {"format": FORMAT, "v": VERSION, **asdict(manifest)}
    store.write(f"{FOLDER}/{manifest.name}.json", json.dumps(document).encode())
    for name in _names(store)[kept:]:
        store.delete(f"{FOLDER}/{name}.json")
        store.delete(f"{FOLDER}/{name}.pt")


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
    foreign = ""
    for name, store in sorted(((name, at) for at in stores for name in _names(at)), key=_rank, reverse=True):
        try:
            manifest = _manifest(store, name)
            if manifest.model != model:
                foreign = name
                told(f"skipping checkpoint {name}: it is of another model")
                continue
            return Found(store, manifest, _state(store, manifest))
        except (BadFile, FileNotFoundError) as err:
            told(f"skipping checkpoint {name}: {err if isinstance(err, BadFile) else 'its state is missing'}")
    if foreign:
        raise BadFile(f"{stores[0].url} holds checkpoints of another model; give this job another --store")
    return None


def newest_manifest(store: Store) -> Manifest | None:
    """Return what is known of the newest checkpoint in a store without reading its state, None if there is none.

    Raises:
        StorageError: If the store cannot be reached.
    """
    files = store.names(FOLDER)
    for name in _newest_first(files):
        with contextlib.suppress(BadFile, FileNotFoundError):
            if f"{name}.pt" in files:
                return _manifest(store, name)
    return None


def newest_generation(store: Store) -> int:
    """Return the newest generation that left a checkpoint in a store, whole or not; 0 without any.

    Raises:
        StorageError: If the store cannot be reached.
    """
    names = _names(store)
    return _rank((names[0], store))[0] if names else 0


def load_state(found: Found) -> dict[str, Any]:
    """Return the state of a checkpoint; tensors and plain values only, no code.

    Raises:
        BadFile: If it is none, checksum or not.
    """
    return loads(found.data)


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


def _rank(found: tuple[str, Store]) -> tuple[int, int]:
    matched = _NAME.fullmatch(f"{found[0]}.json")
    return (int(matched[1]), int(matched[2])) if matched else (-1, -1)


def _names(store: Store) -> list[str]:
    """Return the names of a store's checkpoints, newest first; other files do not count."""
    return list(_newest_first(store.names(FOLDER)))


def _newest_first(files: list[str]) -> Iterator[str]:
    found = [(int(matched[1]), int(matched[2]), file) for file in files if (matched := _NAME.fullmatch(file))]
    return (file.removesuffix(".json") for _, _, file in sorted(found, reverse=True))


def _manifest(store: Store, name: str) -> Manifest:
    try:
        document = json.loads(store.read(f"{FOLDER}/{name}.json"))
        if document.pop("format") != FORMAT or document.pop("v") != VERSION:
            raise BadFile("it is of another program or version")
        manifest = Manifest(**document)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as err:
        raise BadFile("its manifest is torn or none of ours") from err
    if manifest.name != name:
        raise BadFile("its manifest is that of another checkpoint")
    return manifest


def _state(store: Store, manifest: Manifest) -> bytes:
    data = store.read(f"{FOLDER}/{manifest.name}.pt")
    if len(data) != manifest.bytes or hashlib.sha256(data).hexdigest() != manifest.sha256:
        raise BadFile("its state is torn: size or checksum differ")
    return data
