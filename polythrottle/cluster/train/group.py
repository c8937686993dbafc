"""The workers of one generation and what they say to each other, whatever the model's device."""

import os
import socket
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from polythrottle.cluster.train.wire import is_loopback

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
        host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
        if is_loopback(host):
            os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        backend = "nccl" if next(self._model.parameters()).is_cuda else "gloo"
        wait = timedelta(seconds=TIMEOUT_S)
        dist.init_process_group(
            backend, store=self._store(host, port), rank=self.rank, world_size=self.size, timeout=wait
        )
        self._control = dist.new_group(backend="gloo", timeout=wait) if backend == "nccl" else None

    def _store(self, host: str, port: int) -> Any:
        """Return the store at which they meet; the chief's listens on its own address alone, not on all."""
        wait = timedelta(seconds=TIMEOUT_S)
        if self.rank:
            return TCPStore(host, port, self.size, is_master=False, timeout=wait)
        listening = socket.create_server((host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET)
        return TCPStore(
            host, port, self.size, is_master=True, timeout=wait, master_listen_fd=listening.detach(), use_libuv=False
        )

    def wrapped(self) -> torch.nn.Module:
        """Return the model as all of them train it."""
        if not self._many:
            return self._model
        device = next(self._model.parameters()).device
        ids = [device.index] if device.type == "cuda" else None
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
        size = self.highest([len(data or b"")])[0]
        whole = torch.frombuffer(bytearray(data or bytes(size)), dtype=torch.uint8)
        dist.broadcast(whole, src=root, group=self._control)
        return whole.numpy().tobytes()

    def close(self, together: bool) -> None:
        """Part; a group that is broken is only dropped, for parting in order would wait for who is gone."""
        if self._many and together and dist.is_initialized():
            dist.destroy_process_group()
