"""Two-phase writing (CheckFreq, FAST'21): a copy in memory while training waits, and the write beside training.

A store that is away costs no training: the checkpoint waits on a local disk, and is put as soon as the store is back.
"""

import contextlib
import os
import shutil
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from polythrottle.clock import Clock, SystemClock
from polythrottle.cluster.store import Store
from polythrottle.cluster.train.checkpoint import FOLDER, Manifest, commit, seal
from polythrottle.errors import PolythrottleError, StorageError

AGAIN_S = 5.0


@dataclass(frozen=True)
class Written:
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

    def __init__(self, store: Store, spool: Path, ended: Callable[[Written], None], clock: Clock | None = None) -> None:
        self._store, self._spool, self._ended, self._clock = store, spool, ended, clock or SystemClock()
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

    def _begin(self, work: Callable[[], Written]) -> None:
        self.wait(None)
        self._thread = threading.Thread(target=lambda: self._ended(work()), daemon=True)
        self._thread.start()

    def _persisted(self, manifest: Manifest) -> Written:
        start_s = self._clock.now()
        path = self._spool / FOLDER / f"{manifest.name}.pt"
        try:
            sealed = self._saved(path, manifest)
        except PolythrottleError as err:
            return Written(manifest, self._clock.now() - start_s, failure=str(err))
        return self._put(path, sealed, start_s)

    def _saved(self, path: Path, manifest: Manifest) -> Manifest:
        import torch

        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            torch.save(self._copy, path)
            with path.open("rb") as file:
                os.fsync(file.fileno())
        except (OSError, RuntimeError) as err:  # torch turns a full disk into a RuntimeError
            with contextlib.suppress(OSError):
                path.unlink(missing_ok=True)
            raise StorageError(f"a checkpoint cannot be saved to {path.parent}: {err}") from err
        return seal(path, manifest)

    def _put(self, path: Path, manifest: Manifest, start_s: float) -> Written:
        self._tried_s = self._clock.now()
        try:
            commit(self._store, path, manifest)
        except StorageError as err:
            self._keep(path, manifest)
            return Written(manifest, self._clock.now() - start_s, spooled=str(err))
        self._waiting = None
        shutil.rmtree(self._spool / FOLDER, ignore_errors=True)
        return Written(manifest, self._clock.now() - start_s)

    def _keep(self, path: Path, manifest: Manifest) -> None:
        """Make the spooled file a checkpoint of its own, so that this node finds it again after a restart."""
        self._waiting = (path, manifest)
        try:
            commit(Store(str(self._spool)), path, manifest, kept=1)
        except StorageError:
            return


def copied(value: Any, former: Any) -> Any:
    """Return a copy of a state in main memory; tensors go into the former copy's memory where they fit."""
    import torch

    if isinstance(value, torch.Tensor):
        source = value.detach()
        fits = isinstance(former, torch.Tensor) and former.shape == source.shape and former.dtype == source.dtype
        return former.copy_(source) if fits else source.to("cpu", copy=True)
    if isinstance(value, Mapping):
        kept = former if isinstance(former, Mapping) else {}
        return {key: copied(each, kept.get(key)) for key, each in value.items()}
    if isinstance(value, list | tuple):
        olds = former if isinstance(former, list | tuple) and len(former) == len(value) else [None] * len(value)
        return type(value)(copied(each, old) for each, old in zip(value, olds, strict=True))
    return value


def shaped(value: Any) -> Any:
    """Return a state with shapes and types in place of its tensors."""
    import torch

    if isinstance(value, torch.Tensor):
        return value.detach().to("meta")
    if isinstance(value, Mapping):
        return {key: shaped(each) for key, each in value.items()}
    return type(value)(shaped(each) for each in value) if isinstance(value, list | tuple) else value


def filled(value: Any) -> Any:
    """Return a state of zeros for the shapes that `shaped` returns; writing them is what takes the memory."""
    import torch

    if isinstance(value, torch.Tensor):
        return torch.zeros(value.shape, dtype=value.dtype).fill_(0)
    if isinstance(value, Mapping):
        return {key: filled(each) for key, each in value.items()}
    return type(value)(filled(each) for each in value) if isinstance(value, list | tuple) else value


def size_of(value: Any) -> int:
    """Return the bytes of a state's tensors."""
    import torch

    if isinstance(value, torch.Tensor):
        return value.numel() * value.element_size()
    if isinstance(value, Mapping):
        return sum(size_of(each) for each in value.values())
    return sum(size_of(each) for each in value) if isinstance(value, list | tuple) else 0
