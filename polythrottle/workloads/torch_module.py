"""A torch module as a workload, in evaluation and inference mode."""

from collections.abc import Callable, Sequence
from typing import Any

import torch

from polythrottle.errors import DeviceError, InvalidInput, TrialError
from polythrottle.measurement import Query
from polythrottle.placement import Placement, Target
from polythrottle.space import OperatingPoint, SearchSpace
from polythrottle.workloads.call import guarded, timed
from polythrottle.workloads.knobs import BATCH_SIZE, THREADS, batch_knob, chosen, count, grid_of, threads_knob
from polythrottle.workloads.tensors import Input, parse_inputs, random_array

MakeInputs = Callable[[int], Any]
DEVICES = ("cuda", "cpu")
"""What the option ``device`` of a torch model may be."""
NO_CUDA = (
    "torch finds no CUDA here (torch.cuda.is_available()); install its CUDA build, on a Jetson NVIDIA's own for its "
    "JetPack"
)


class TorchWorkload:
    """One forward pass of a batch per query.

    It runs where its parameters are. On a GPU it is timed by CUDA's events on its stream, not by the host's clock.

    Args:
        uri: What opens it again.
        module: The module; where it has a method ``example_input(batch_size)``, that makes its inputs: one tensor, a
            tuple of positional or a dict of named ones.
        inputs: Shapes of one item's inputs; take precedence over ``example_input``.
        batch_sizes: Levels of ``batch_size``; usual ones by default.
        threads: Levels of ``threads``; usual ones by default.
        make: Makes the inputs of a batch, in place of all that.
        device: Where the module is moved, one of `DEVICES`; where its parameters are if None.
        target: The GPU that is tuned, if one is.

    Raises:
        InvalidInput: If nothing says what the inputs are.
        DeviceError: If it is to be moved to a GPU, and torch has none.
        TrialError: If ``example_input`` raises, or the module cannot be moved.
    """

    def __init__(
        self,
        uri: str,
        module: torch.nn.Module,
        *,
        inputs: Sequence[str] = (),
        batch_sizes: Sequence[int] | None = None,
        threads: Sequence[int] | None = None,
        make: MakeInputs | None = None,
        device: str | None = None,
        target: Target | None = None,
    ) -> None:
        self.uri = uri
        self.space: SearchSpace = grid_of([batch_knob(batch_sizes), threads_knob(threads)])
        self._found_threads = torch.get_num_threads()
        module = module.eval()
        self._module = module if device is None else moved(uri, module, device, target)
        held = [tensor.device for tensor in (*self._module.parameters(), *self._module.buffers())]
        self._device = held[0] if held else torch.device(cuda_name(target) if device == "cuda" else "cpu")
        self.placement: Placement | None = _placement(uri, self._device, device) if held or device else None
        self._make = make or (_made_up(parse_inputs(inputs)) if inputs else _example_of(uri, module))
        self.apply(self.space.default)

    @property
    def module(self) -> torch.nn.Module:
        """The module, in evaluation mode."""
        return self._module

    @property
    def example(self) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The inputs of a query at the point applied last, positional and named."""
        return self._arguments, self._named

    def apply(self, point: OperatingPoint) -> None:
        """Make inputs of the batch size and set torch's thread count.

        Raises:
            KnobRejected: If the point is not in the space.
            TrialError: If the inputs cannot be made.
        """
        wanted = chosen(self.space, point)
        with guarded("example_input raised"):
            self._arguments, self._named = _split(_moved(self._make(count(wanted, BATCH_SIZE)), self._device))
        torch.set_num_threads(count(wanted, THREADS))
        self._batch_size = count(wanted, BATCH_SIZE)

    def query(self) -> Query:
        """Run one forward pass and wait for it.

        Raises:
            TrialError: If the module raises.
        """
        if self._device.type != "cuda":
            return Query(timed("model raised", self._forward), self._batch_size)
        with guarded("model raised"), torch.cuda.device(self._device):
            start, end = _event(), _event()
            start.record()
            self._forward()
            end.record()
            end.synchronize()
            return Query(max(start.elapsed_time(end) / 1000, 1e-9), self._batch_size)

    def _forward(self) -> None:
        with torch.inference_mode():
            self._module(*self._arguments, **self._named)

    def close(self) -> None:
        """Put torch's thread count back."""
        torch.set_num_threads(self._found_threads)


def _event() -> Any:
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]


def cuda_name(target: Target | None) -> str:
    """Return torch's name for the GPU that is tuned; of its first one where none is."""
    return f"cuda:{0 if target is None else target.number}"


def moved(uri: str, module: torch.nn.Module, device: str, target: Target | None) -> torch.nn.Module:
    """Return a module on the processor or on the GPU that is tuned.

    Raises:
        DeviceError: If it is to be a GPU, and torch has none.
        TrialError: If it cannot be moved.
    """
    if device == "cuda" and not torch.cuda.is_available():
        raise DeviceError(f"{uri}: {NO_CUDA}")
    with guarded(f"{uri} cannot be moved to {device}:"):
        return module.to(cuda_name(target) if device == "cuda" else device)


def _placement(uri: str, found: torch.device, asked: str | None) -> Placement:
    if found.type == "cuda":
        return Placement("torch", found.index or 0, asked is not None)
    why = f"its parameters are on {found}"
    remedy = f"move it there: {uri.partition('?')[0]}?device=cuda" if torch.cuda.is_available() else NO_CUDA
    return Placement("torch", None, asked is not None, why, remedy, f"{uri.partition('?')[0]}?device=cpu")


def _example_of(uri: str, module: torch.nn.Module) -> MakeInputs:
    make: Any = getattr(module, "example_input", None)
    if not callable(make):
        raise InvalidInput(
            f"{uri}: what are its inputs? give their shape without the batch, such as --input 3x224x224, "
            "or give the module a method example_input(batch_size)"
        )
    found: MakeInputs = make
    return found


def _made_up(inputs: tuple[Input, ...]) -> MakeInputs:
    def make(batch_size: int) -> Any:
        arrays = [random_array((batch_size, *each.shape), each.dtype or "float32", i) for i, each in enumerate(inputs)]
        tensors = tuple(torch.from_numpy(array) for array in arrays)
        return dict(zip([each.name for each in inputs], tensors, strict=True)) if inputs[0].name else tensors

    return make


def _moved(value: Any, device: torch.device) -> Any:
    if isinstance(value, torch.Tensor):
        return value.to(device)
    if isinstance(value, dict):
        return {name: _moved(each, device) for name, each in value.items()}
    return tuple(_moved(each, device) for each in value) if isinstance(value, tuple) else value


def _split(value: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return positional and named arguments of a forward pass."""
    if value is None:
        raise TrialError("it returned nothing; return a tensor, a tuple or a dict of tensors")
    if isinstance(value, dict):
        return (), value
    return (value if isinstance(value, tuple) else (value,)), {}
