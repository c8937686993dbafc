"""Torch models as workloads: modules, and exported files of torch.export and TorchScript."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from importlib import import_module
from typing import Any, Callable

import torch

from polythrottle.domain.backports import paired, removeprefix
from polythrottle.domain.errors import DeviceError, InvalidInput, TrialError
from polythrottle.domain.measurement import Query
from polythrottle.domain.ports import Placement, Target
from polythrottle.domain.space import BATCH_SIZE, OperatingPoint, SearchSpace
from polythrottle.workloads.foreign_calls import guarded, timed
from polythrottle.workloads.inputs import (
    THREADS,
    DeclaredInput,
    FedInput,
    Input,
    batch_knob,
    batch_knobs,
    chosen,
    count,
    fed,
    grid_of,
    parse_inputs,
    random_array,
    random_inputs,
    threads_knob,
)
from polythrottle.workloads.torch_archive import load_export, load_script
from polythrottle.workloads.uris import ModelUri, is_script

# A torch module as a workload, in evaluation and inference mode.

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
        # Torch's thread count is the process's, and with it that of whatever else the user's program runs.
        self._found_threads = torch.get_num_threads()
        module = module.eval()
        if device is None:
            self._module = module
        else:
            self._module = moved(uri, module, device, target)
        held = [tensor.device for tensor in (*self._module.parameters(), *self._module.buffers())]
        if held:
            self._device = held[0]
        else:
            self._device = torch.device(cuda_name(target) if device == "cuda" else "cpu")
        if held or device:
            self.placement: Placement | None = _placement(uri, self._device, device)
        else:
            self.placement = None
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
            start = _event()
            end = _event()
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
    if torch.cuda.is_available():
        remedy = f"move it there: {uri.partition('?')[0]}?device=cuda"
    else:
        remedy = NO_CUDA
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
    _need_numpy()

    def make(batch_size: int) -> Any:
        arrays = [random_array((batch_size, *each.shape), each.dtype or "float32", i) for i, each in enumerate(inputs)]
        tensors = tuple(torch.from_numpy(array) for array in arrays)
        if inputs[0].name:
            return dict(paired([each.name for each in inputs], tensors))
        return tensors

    return make


def _need_numpy() -> None:
    """Import NumPy, of which inputs are made and without which torch can be installed.

    Raises:
        ImportError: If it is not there; later that would be taken for a fault of the model.
    """
    import_module("numpy")


def _moved(value: Any, device: torch.device) -> Any:
    if isinstance(value, torch.Tensor):
        return value.to(device)
    if isinstance(value, dict):
        return {name: _moved(each, device) for name, each in value.items()}
    if isinstance(value, tuple):
        return tuple(_moved(each, device) for each in value)
    return value


def _split(value: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return positional and named arguments of a forward pass."""
    if value is None:
        raise TrialError("it returned nothing; return a tensor, a tuple or a dict of tensors")
    if isinstance(value, dict):
        return (), value
    return (value if isinstance(value, tuple) else (value,)), {}


# Exported torch models as workloads: ``model.pt2`` of torch.export and TorchScript's ``model.pt``.


def open_export(
    uri: str,
    *,
    inputs: Sequence[str] = (),
    batch_sizes: Sequence[int] | None = None,
    threads: Sequence[int] | None = None,
    target: Target | None = None,
) -> TorchWorkload:
    """Return the workload that an exported file holds.

    A ``.pt2`` archive says itself what its inputs are and which batches it takes; TorchScript does not. Where a GPU is
    tuned and torch has CUDA the model is moved there.

    Args:
        uri: Path of the file; ``?device=cuda`` or ``?device=cpu`` chooses where it runs.
        inputs: Shapes of one item's inputs, where the file does not say.
        batch_sizes: Levels of ``batch_size``; those of the usual ones that the file takes by default.
        threads: Levels of ``threads``; usual ones by default.
        target: The GPU that is tuned, if one is.

    Raises:
        UnknownName: If there is no such option or device.
        DeviceError: If it is to be moved to a GPU, and torch has none, or the file needs a newer torch.
        BadFile: If the file is missing, or holds no such model that loads here.
        InvalidInput: If shapes are missing or do not fit, or the model does not take a batch that was asked for.
    """
    model = ModelUri.parse(uri)
    path = model.name
    script = is_script(model)
    device = next(iter(model.chosen("device", DEVICES)), None)
    if device is None and target is not None and torch.cuda.is_available():
        device = "cuda"
    if script:
        return TorchWorkload(
            uri,
            load_script(path),
            inputs=inputs,
            batch_sizes=batch_sizes,
            threads=threads,
            device=device,
            target=target,
        )
    program = load_export(path)
    declared = tuple(_declared(program))
    tensors = fed(path, declared, parse_inputs(inputs))
    levels = _levels(path, program, declared, tensors, batch_sizes)
    make = _maker(program, tensors)
    exported = _Exported(_placed(path, program, device, target))
    return TorchWorkload(uri, exported, make=make, batch_sizes=levels, threads=threads, device=device, target=target)


def _placed(path: str, program: Any, device: str | None, target: Target | None) -> Any:
    """Return a program whose constants and operators are for a device too, where torch can rewrite them.

    Raises:
        TrialError: If it cannot.
    """
    rewrite = getattr(getattr(torch.export, "passes", None), "move_to_device_pass", None)
    if device is None or rewrite is None or (device == "cuda" and not torch.cuda.is_available()):
        return program
    with guarded(f"{path} cannot be moved to {device}:"):
        return rewrite(program, cuda_name(target) if device == "cuda" else device)


class _Exported(torch.nn.Module):
    """The program of an archive, called with its inputs in a row; it is in the mode it was exported in."""

    def __init__(self, program: Any) -> None:
        super().__init__()
        self._graph = program.module()
        self._form = program.call_spec.in_spec

    def train(self, mode: bool = True) -> _Exported:
        """Do nothing: the mode is part of what was exported."""
        del mode
        return self

    def forward(self, *leaves: Any) -> Any:
        """Run the program."""
        arguments, named = torch.utils._pytree.tree_unflatten(leaves, self._form)
        return self._graph(*arguments, **named)


def _user_inputs(program: Any) -> list[Any]:
    kind = torch.export.graph_signature.InputKind.USER_INPUT
    return [spec.arg for spec in program.graph_signature.input_specs if spec.kind is kind]


def _declared(program: Any) -> Iterator[DeclaredInput]:
    """Yield the tensors the program takes; a dimension that is not fixed by its symbol."""
    nodes = {node.name: node.meta.get("val") for node in program.graph.nodes if node.op == "placeholder"}
    for argument in _user_inputs(program):
        value = nodes.get(argument.name)
        if isinstance(value, torch.Tensor):
            shape = tuple(size if isinstance(size, int) else str(size) for size in value.shape)
            dtype = str(value.dtype)
            yield DeclaredInput(argument.name, shape, removeprefix(dtype, "torch."), dtype)


def _maker(program: Any, tensors: Sequence[FedInput]) -> MakeInputs:
    _need_numpy()
    constants = [getattr(argument, "value", None) for argument in _user_inputs(program)]
    names = [argument.name for argument in _user_inputs(program)]

    def make(batch_size: int) -> Any:
        arrays = {name: torch.from_numpy(array) for name, array in random_inputs(tensors, batch_size).items()}
        return tuple(arrays.get(name, constant) for name, constant in paired(names, constants))

    return make


def _levels(
    uri: str, program: Any, declared: Sequence[DeclaredInput], tensors: Sequence[FedInput], levels: Sequence[int] | None
) -> tuple[int, ...]:
    """Return the batch sizes that were asked for, or by default the usual ones, if the program takes them."""
    knobs = batch_knobs(uri, tensors, levels)
    symbols = {each.shape[0] for each in declared if each.shape and isinstance(each.shape[0], str)}
    least, most = _limits(program, symbols)
    sizes = [int(size) for size in (knobs or [batch_knob([1])])[0].levels]
    if levels is None and symbols:
        return tuple(size for size in sizes if least <= size <= most) or (max(1, int(least)),)
    if not least <= min(sizes) <= max(sizes) <= most:
        raise InvalidInput(f"{uri} is exported for batches from {least:.0f} to {most:.0f}; leave others out")
    return tuple(sizes)


def _limits(program: Any, symbols: set[Any]) -> tuple[float, float]:
    """Return the smallest and the largest batch the program takes."""
    found = [bound for symbol, bound in program.range_constraints.items() if str(symbol) in symbols]
    least = max((float(bound.lower) for bound in found), default=1.0)
    return max(least, 1.0), min((float(bound.upper) for bound in found), default=float("inf"))
