"""The workers of one generation: short messages between them, and where the time of their steps goes."""

import os
import socket
from collections import deque
from collections.abc import Iterable, Iterator
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from polythrottle.domain.clock import Clock
from polythrottle.training.elastic.channel import is_loopback
from polythrottle.training.elastic.worker.progress_reporter import Tally

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
