"""What the workers of one generation do together: short messages, the time of their steps, and their checkpoints.

Kept of checkpoints is when a worker writes the next one, what writing costs, and where the newest one is.
"""

import math
import os
import socket
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from datetime import timedelta
from math import inf
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from polythrottle.domain.clock import Clock, SystemClock
from polythrottle.domain.errors import InvalidInput, StorageError
from polythrottle.domain.fleet.transient_machine import CheckpointCost, interval_s
from polythrottle.storage.object_store import Store
from polythrottle.storage.paths import state_dir
from polythrottle.storage.untrusted import is_loopback
from polythrottle.training.elastic.checkpoints import (
    Found,
    Manifest,
    WriteOutcome,
    Writer,
    model_digest,
    newest,
    size_of,
)
from polythrottle.training.elastic.worker.process import Reporter, Tally

# The workers of one generation and what they say to each other, whatever the model's device.

TIMEOUT_S = 60.0


class Group:
    """The workers that train together: their number, this one's rank, and short messages between them.

    Without the environment that an engine sets it is a group of one, so that a script runs as it is, too.

    Args:
        model: Decides the backend: NCCL for a model on NVIDIA GPUs, gloo otherwise.
    """

    def __init__(self, model: torch.nn.Module) -> None:
        self.rank = int(os.environ.get("RANK", "0"))
        self.size = int(os.environ.get("WORLD_SIZE", "1"))
        self.local_rank = int(os.environ.get("LOCAL_RANK", "0"))
        self._many = "MASTER_ADDR" in os.environ
        self._model = model
        self._control: Any = None

    def open(self) -> None:
        """Meet the others.

        Raises:
            RuntimeError: As torch does, if they do not come.
        """
        if not self._many:
            return
        host = os.environ["MASTER_ADDR"]
        port = int(os.environ["MASTER_PORT"])
        if is_loopback(host):
            # gloo picks an interface by the host's name, which in containers often resolves to an address that is not
            # there.
            os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        backend = "gloo"
        if next(self._model.parameters()).is_cuda:
            backend = "nccl"
        wait = timedelta(seconds=TIMEOUT_S)
        dist.init_process_group(
            backend, store=self._store(host, port), rank=self.rank, world_size=self.size, timeout=wait
        )
        if backend == "nccl":
            # Short messages lie in main memory, which NCCL cannot send.
            self._control = dist.new_group(backend="gloo", timeout=wait)
        else:
            self._control = None

    def _store(self, host: str, port: int) -> Any:
        """Return the store at which they meet; the chief's listens on its own address alone, not on all."""
        wait = timedelta(seconds=TIMEOUT_S)
        if self.rank:
            return TCPStore(host, port, self.size, is_master=False, timeout=wait)
        # torch would listen on every address of the machine, open to whoever reaches it.
        listening = socket.create_server((host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET)
        return TCPStore(
            host, port, self.size, is_master=True, timeout=wait, master_listen_fd=listening.detach(), use_libuv=False
        )

    def wrapped(self) -> torch.nn.Module:
        """Return the model as all of them train it."""
        if not self._many:
            return self._model
        device = next(self._model.parameters()).device
        ids = None
        if device.type == "cuda":
            ids = [device.index]
        return torch.nn.parallel.DistributedDataParallel(self._model, device_ids=ids)

    def highest(self, values: list[int]) -> list[int]:
        """Return, for each number, the highest of any worker."""
        if self.size == 1:
            return values
        whole = torch.tensor(values, dtype=torch.int64)
        dist.all_reduce(whole, op=dist.ReduceOp.MAX, group=self._control)
        return [int(each) for each in whole]

    def barrier(self) -> None:
        """Wait for all."""
        self.highest([0])

    def shared(self, data: bytes | None, root: int) -> bytes:
        """Return the bytes that one worker has to all of them."""
        if self.size == 1:
            return data or b""
        # Only the root knows how much is coming, and receivers have to bring the room.
        size = self.highest([len(data or b"")])[0]
        whole = torch.frombuffer(bytearray(data or bytes(size)), dtype=torch.uint8)
        dist.broadcast(whole, src=root, group=self._control)
        return whole.numpy().tobytes()

    def close(self, together: bool) -> None:
        """Part; a group that is broken is only dropped, for parting in order would wait for who is gone."""
        if self._many and together and dist.is_initialized():
            dist.destroy_process_group()


# Where a worker's time goes: waiting for samples, its own work, waiting for the others; two clock readings a step.
#
# A step's own work ends when the last of its gradients is there. What backward still takes then is the exchange: the
# time until the slowest worker has come, and the network's. On a GPU the host runs ahead, so that events on the
# stream tell.

_MOST_PENDING = 64
Item = TypeVar("Item")
_Sums = tuple[int, float, float, float]


class StepTimer:
    """Times the parts of a worker's steps.

    Gradients come in the reverse order of the parameters, so that the first one's comes last.

    Args:
        model: Without what wraps it for training together.
        clock: Of the worker.
        alone: Whether there is nobody to wait for.
    """

    def __init__(self, model: torch.nn.Module, clock: Clock, alone: bool) -> None:
        self._clock = clock
        self._sums = self._cold = (0, 0.0, 0.0, 0.0)
        self._data_s = self._peers_s = 0.0
        self._ready_s: float | None = None
        self._ready: Any = None
        self._pending: deque[tuple[Any, Any]] = deque(maxlen=_MOST_PENDING)
        # Its gradient is the last to come, since backward goes from the end of the model to its beginning.
        first = next((each for each in model.parameters() if each.requires_grad), None)
        if first is not None and not alone:
            done = self._done_cuda if first.is_cuda else self._done
            first.register_post_accumulate_grad_hook(done)  # type: ignore[no-untyped-call]

    def loaded(self, samples: Iterable[Item]) -> Iterator[Item]:
        """Yield samples, and time how long each was waited for."""
        coming = iter(samples)
        while True:
            asked_s = self._clock.now()
            try:
                batch = next(coming)
            except StopIteration:
                return
            self._data_s += self._clock.now() - asked_s
            yield batch

    def exchanged(self) -> None:
        """Note that a step's gradients are those of all workers."""
        if self._ready_s is not None:
            self._peers_s += self._clock.now() - self._ready_s
            self._ready_s = None
        elif self._ready is not None:
            self._pending.append((self._ready, _recorded()))
            self._ready = None

    def stepped(self, duration_s: float, cold: bool) -> None:
        """Count a step.

        Args:
            duration_s: How long it took.
            cold: Whether its samples were seen for the first time by this process.
        """
        self._collect()
        step = (1, duration_s, min(self._peers_s, duration_s), self._data_s)
        self._data_s = self._peers_s = 0.0
        # Replaced whole, for another thread reads them; and plain, for this is on the way of every step.
        self._sums = _added(self._sums, step)
        if cold:
            self._cold = _added(self._cold, step)

    @property
    def tally(self) -> Tally:
        """Return the times of all steps."""
        return Tally(*self._sums)

    @property
    def cold(self) -> Tally:
        """Return the times of those whose samples were seen for the first time."""
        return Tally(*self._cold)

    def _collect(self) -> None:
        """Take the times of those steps that the GPU has done; nobody waits for it."""
        while self._pending and self._pending[0][1].query():
            ready, exchanged = self._pending.popleft()
            self._peers_s += ready.elapsed_time(exchanged) / 1e3

    def _done(self, parameter: torch.Tensor) -> None:
        self._ready_s = self._clock.now()

    def _done_cuda(self, parameter: torch.Tensor) -> None:
        self._ready = _recorded()


def _added(sums: _Sums, step: _Sums) -> _Sums:
    return (sums[0] + step[0], sums[1] + step[1], sums[2] + step[2], sums[3] + step[3])


def _recorded() -> Any:
    event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
    event.record()
    return event


# When the next checkpoint is due: profiled as CheckFreq does (FAST'21), spaced as Daly says, within a budget; pure.

COPY_BYTES_PER_S = 5e8
WRITE_BYTES_PER_S = 1e8
DRAG = 0.25
"""What is assumed of memory, store and slower steps beside a write until a first checkpoint has been measured."""
LONGEST_S = 1800.0
_FRESH = 0.3


@dataclass(frozen=True)
class Cadence:
    """What is known of a training's steps and checkpoints, and the budget.

    Attributes:
        step_s: Time of a step with no write beside it, in seconds; 0 before the first.
        stall_s: How long a checkpoint stops training, in seconds.
        persist_s: How long its write goes on, in seconds.
        drag_s: How much later training is after a write beside it than without, in seconds.
        spent_s: What checkpoints have cost training so far, in seconds.
        trained_s: How long training has gone on, in seconds.
        measured: Checkpoints whose cost was measured; with none it is assumed from the size.
        overhead: Largest share of the time that checkpoints may take.
    """

    step_s: float = 0.0
    stall_s: float = 0.0
    persist_s: float = 0.0
    drag_s: float = 0.0
    spent_s: float = 0.0
    trained_s: float = 0.0
    measured: int = 0
    overhead: float = 0.035

    def __post_init__(self) -> None:
        if not 0 < self.overhead <= 1:
            raise InvalidInput(f"the overhead of checkpoints is a share in (0, 1], not {self.overhead}")

    @property
    def cost_s(self) -> float:
        """Return what a checkpoint costs training, in seconds."""
        return self.stall_s + self.drag_s

    @property
    def share(self) -> float | None:
        """Return the share of the time that checkpoints have cost so far; None before anything was trained."""
        if self.trained_s > self.spent_s:
            return self.spent_s / self.trained_s
        return None

    def stepped(self, duration_s: float, writing: bool) -> "Cadence":
        """Return what is known after one more step, in seconds; one beside a write is compared with one that is not."""
        trained_s = self.trained_s + duration_s
        if writing and self.step_s:
            late_s = duration_s - self.step_s  # signed, so that scatter cancels out
            return replace(self, trained_s=trained_s, spent_s=max(0.0, self.spent_s + late_s))
        if not self.step_s:
            step_s = duration_s
        else:
            step_s = self.step_s + _FRESH * (duration_s - self.step_s)
        return replace(self, trained_s=trained_s, step_s=step_s)

    def stalled(self, stall_s: float) -> "Cadence":
        """Return what is known after a snapshot that took so many seconds."""
        if not self.measured:
            known_s = stall_s
        else:
            known_s = self.stall_s + _FRESH * (stall_s - self.stall_s)
        return replace(self, stall_s=known_s, spent_s=self.spent_s + stall_s, trained_s=self.trained_s + stall_s)

    def written(self, persist_s: float, drag_s: float) -> "Cadence":
        """Return what is known after a write that took so long and delayed training by so much, in seconds."""
        fresh = 1.0
        if self.measured:
            fresh = _FRESH
        return replace(
            self,
            persist_s=self.persist_s + fresh * (persist_s - self.persist_s),
            drag_s=self.drag_s + fresh * (drag_s - self.drag_s),
            measured=self.measured + 1,
        )

    def interval_s(self, hazard_per_s: float) -> float:
        """Return the time between checkpoints in seconds, at most half an hour, for a rate of losses of any member."""
        if not self.step_s:
            return inf
        cost = CheckpointCost(self.cost_s, self.persist_s)
        return min(LONGEST_S, interval_s(cost, hazard_per_s, self.step_s, self.overhead))

    def is_due(self, since_s: float, hazard_per_s: float) -> bool:
        """Return whether a checkpoint is due.

        Args:
            since_s: Training time since the last, in seconds.
            hazard_per_s: Losses of any member per second.
        """
        within = self.spent_s + self.cost_s <= self.overhead * (self.trained_s + self.cost_s)
        return within and since_s >= self.interval_s(hazard_per_s)


def assumed(state_bytes: int, overhead: float) -> Cadence:
    """Return what is assumed before a first checkpoint, from the size of the state in bytes."""
    persist_s = state_bytes / WRITE_BYTES_PER_S
    return Cadence(
        stall_s=state_bytes / COPY_BYTES_PER_S, persist_s=persist_s, drag_s=DRAG * persist_s, overhead=overhead
    )


# A worker's care for checkpoints: when to write one, what it cost, where the newest is.

PATIENCE_S = 60.0


class CheckpointKeeper:
    """Writes the checkpoints of the chief, and finds the newest for all.

    Args:
        url: Of the store.
        node: Name of this node, which has a spool of its own for when the store is away.
        overhead: Largest share of the time that checkpoints may take.
        every_s: A fixed time between checkpoints in seconds; None for a profiled one.
        reporter: Hears of every checkpoint, and knows the present hazard.
        say: Takes lines for people.
        clock: Times steps and writes.

    Raises:
        InvalidInput: If nothing opens the store's URL.
    """

    def __init__(
        self,
        url: str,
        node: str,
        overhead: float,
        every_s: float | None,
        reporter: Reporter,
        say: Callable[[str], None],
        clock: Clock | None = None,
    ) -> None:
        self._store = Store(url)
        place = model_digest({url: ()})
        spool = state_dir() / "spool" / (node or "alone") / place
        spools = sorted(each for each in (state_dir() / "spool").glob(f"*/{place}") if each != spool)
        self._spools = tuple(Store(str(each)) for each in (spool, *spools))
        self._clock = clock or SystemClock()
        self._writer = Writer(self._store, spool, self._ended, self._clock)
        self._overhead = overhead
        self._every_s = every_s
        self._reporter = reporter
        self._say = say
        self._cadence = Cadence(overhead=overhead)
        self._written: WriteOutcome | None = None
        self._drag_from_s: float | None = None
        self._stall_s = 0.0
        self._forced = ""
        self._since_s = self._clock.now()

    def find(self, model: str, chief: bool) -> Found | None:
        """Return the newest valid checkpoint that this worker can see, None if there is none.

        Args:
            model: Digest of the model's tensors.
            chief: Whether to look into the store; others look only into what waits on their own machine's disk, under
                whatever name a node had there.

        Raises:
            StorageError: If the store stays away.
            BadFile: If all whole checkpoints are of another model.
        """
        begun_s = self._clock.now()
        pause_s = 0.5
        while True:
            try:
                return newest((self._store, *self._spools) if chief else self._spools, model, self._say)
            except StorageError as err:
                if self._clock.now() - begun_s > PATIENCE_S:
                    raise
                self._say(f"{err}; trying again")
                self._clock.sleep(pause_s)
                pause_s = min(8.0, pause_s * 2)

    def begin(self, state: Mapping[str, Any], chief: bool) -> None:
        """Begin to count, once a first step has made the optimiser's state whole.

        Args:
            state: What checkpoints will hold.
            chief: Whether this worker writes them: it takes the memory for copies now, beside training.
        """
        self._cadence = assumed(size_of(state), self._overhead)
        self._since_s = self._clock.now()
        if chief:
            self._writer.prepare(state)

    def stepped(self, duration_s: float) -> None:
        """Note a step that took so many seconds."""
        self._cadence = self._cadence.stepped(duration_s, self._writer.busy)

    def keep_up(self, state: Callable[[], Mapping[str, Any]], manifest: Callable[[], Manifest]) -> None:
        """Begin a checkpoint if one is due; note what the last one cost; try again to put one that waits."""
        if self._writer.busy:
            return
        if self._drag_from_s is not None and self._written is not None:
            drag_s = max(0.0, self._cadence.spent_s - self._drag_from_s)
            self._cadence = self._cadence.written(self._written.persist_s, drag_s)
            self._drag_from_s = None
        if self._is_due():
            self.write(state(), manifest())
        else:
            self._writer.retry()

    def write(self, state: Mapping[str, Any], manifest: Manifest, forced: str = "", wait: bool = False) -> None:
        """Copy a state and begin to write it.

        Args:
            state: What is written.
            manifest: What is known of it.
            forced: Why it is written now though it may not be due.
            wait: Whether to wait until it is written.
        """
        stall_s = self._writer.snapshot(state)
        self._cadence = self._cadence.stalled(stall_s)
        self._drag_from_s = self._cadence.spent_s
        self._since_s = self._clock.now()
        self._written = None
        self._stall_s = stall_s
        self._forced = forced
        self._writer.persist(manifest)
        if wait:
            self._writer.wait(None)

    def end(self, limit_s: float) -> None:
        """Let a write that goes on end, for at most so many seconds."""
        self._writer.wait(limit_s)

    def _is_due(self) -> bool:
        since_s = self._clock.now() - self._since_s
        if self._every_s is not None:
            return since_s >= self._every_s
        return self._cadence.is_due(since_s, self._reporter.hazard_per_s)

    def _ended(self, written: WriteOutcome) -> None:
        """Note how a write ended; called from its thread."""
        self._written = written
        manifest = written.manifest
        record: dict[str, Any] = {"step": manifest.step, "epoch": manifest.epoch, "name": manifest.name}
        if written.failure or written.spooled:
            reason = written.failure or written.spooled
            event = "spooled"
            if written.failure:
                event = "not written"
            self._say(f"checkpoint {manifest.name} is {event}: {reason}; training goes on")
            self._reporter.note({"event": event, **record, "reason": reason[:300]})
            return
        record |= {"bytes": manifest.bytes, "stall_s": round(self._stall_s, 4)}
        share = self._cadence.share
        record |= {"persist_s": round(written.persist_s, 4), "share": None if share is None else round(share, 5)}
        record["interval_s"] = self._interval_s()
        self._reporter.note({"event": "checkpoint", **record, **({"forced": self._forced} if self._forced else {})})

    def _interval_s(self) -> float | None:
        interval_s = self._every_s
        if interval_s is None:
            interval_s = self._cadence.interval_s(self._reporter.hazard_per_s)
        if math.isfinite(interval_s):
            return round(interval_s, 3)
        return None
