"""Learning: gradients gathered slice by slice, and one move of the weights when a step is whole."""

import io
import math

import torch

from polythrottle.errors import BadFile, TrialError
from polythrottle.finetune.trainer.network import Network
from polythrottle.workloads.torch_archive import load_tensors

_SIGNS = ("can't allocate memory", "out of memory", "bad_alloc")


class Learner:
    """Trains what a network leaves free.

    Gradients of summed losses add up over slices and are divided by the samples of the whole step, so that a step means
    the same whatever its slices.

    Args:
        network: Whose free weights move.
        learning_rate: Of Adam.
    """

    def __init__(self, network: Network, learning_rate: float) -> None:
        self.network = network
        self._free = list(network.free.values())
        self._optimizer = torch.optim.Adam(self._free, lr=learning_rate)
        self.forget()

    def forget(self) -> None:
        """Drop what was gathered for a step."""
        self._gathered = [torch.zeros_like(weight) for weight in self._free]
        self._loss, self._samples = 0.0, 0

    def gather(self, inputs: torch.Tensor, classes: torch.Tensor) -> None:
        """Add the gradients of a slice; nothing is added if it fails.

        Args:
            inputs: Shape (samples, …).
            classes: Shape (samples,).

        Raises:
            TrialError: If the loss is not finite.
        """
        loss = torch.nn.functional.cross_entropy(self.network(inputs).float(), classes, reduction="sum")
        gradients = torch.autograd.grad(loss, self._free)
        value = loss.item()
        if not math.isfinite(value):
            raise _diverged("the loss", value)
        for total, gradient in zip(self._gathered, gradients, strict=True):
            total.add_(gradient)
        self._loss += value
        self._samples += len(classes)

    def move(self) -> float | None:
        """Move the weights by what was gathered, and return the mean loss; None if nothing was.

        Raises:
            TrialError: If a weight is not finite any more.
        """
        if not self._samples:
            return None
        for weight, total in zip(self._free, self._gathered, strict=True):
            weight.grad = total / self._samples
        self._optimizer.step()
        if not all(bool(torch.isfinite(weight).all()) for weight in self._free):
            raise _diverged("a weight", math.nan)
        loss = self._loss / self._samples
        self.forget()
        return loss

    def learnt(self) -> bytes:
        """Return all that a resumed learner needs."""
        file = io.BytesIO()
        free = {name: weight.detach() for name, weight in self.network.free.items()}
        state = {"free": free, "optimizer": self._optimizer.state_dict(), "random": torch.get_rng_state()}
        torch.save(state, file)
        return file.getvalue()

    def resume(self, learnt: bytes) -> None:
        """Go on from what another learner had learnt.

        Raises:
            BadFile: If that does not fit this network.
        """
        try:
            state = load_tensors(learnt)
            with torch.no_grad():
                for name, weight in self.network.free.items():
                    weight.copy_(state["free"][name])
            self._optimizer.load_state_dict(state["optimizer"])
            torch.set_rng_state(state["random"])
        except (RuntimeError, KeyError, ValueError, TypeError) as err:
            raise BadFile("the checkpoint does not fit the model the job began with; begin a new job") from err
        self.forget()


def out_of_memory(err: BaseException) -> bool:
    """Return whether an error says that memory has run out."""
    told = isinstance(err, RuntimeError) and any(sign in str(err) for sign in _SIGNS)
    return told or isinstance(err, MemoryError | torch.OutOfMemoryError)


def _diverged(what: str, value: float) -> TrialError:
    return TrialError(
        f"{what} is {value}: training has diverged and stops at its last good checkpoint; lower the learning rate or "
        "look for bad samples, and begin a new job"
    )
