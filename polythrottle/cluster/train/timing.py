"""Where a worker's time goes: waiting for samples, its own work, waiting for the others; two clock readings a step.

A step's own work ends when the last of its gradients is there. What backward still takes then is the exchange: the time
until the slowest worker has come, and the network's. On a GPU the host runs ahead, so that events on the stream tell.
"""

from collections import deque
from collections.abc import Iterable, Iterator
from typing import Any, TypeVar

import torch

from polythrottle.clock import Clock
from polythrottle.cluster.train.pace import Tally

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
                found = next(coming)
            except StopIteration:
                return
            self._data_s += self._clock.now() - asked_s
            yield found

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
        self._cold = _added(self._cold, step) if cold else self._cold

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
