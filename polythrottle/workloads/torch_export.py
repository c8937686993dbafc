"""Exported torch models as workloads: ``model.pt2`` of torch.export and TorchScript's ``model.pt``."""

import zipfile
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from polythrottle.errors import BadFile, InvalidInput
from polythrottle.placement import Target
from polythrottle.workloads.call import guarded
from polythrottle.workloads.declared import Declared, Fed, batch_knobs, fed, made_up
from polythrottle.workloads.knobs import batch_knob
from polythrottle.workloads.model_uri import ModelUri
from polythrottle.workloads.tensors import parse_inputs
from polythrottle.workloads.torch_archive import load_export, load_script
from polythrottle.workloads.torch_module import DEVICES, MakeInputs, TorchWorkload, cuda_name

_ARCHIVED = ("/archive_format", "serialized_exported_program.json")


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
        DeviceError: If it is to be moved to a GPU, and torch has none.
        BadFile: If the file is missing, or holds no such model that loads here.
        InvalidInput: If shapes are missing or do not fit, or the model does not take a batch that was asked for.
    """
    model = ModelUri.parse(uri)
    model.only("an exported model", "device")
    path, names = model.name, _names(model.name)
    device = next(iter(model.chosen("device", DEVICES)), None)
    if device is None and target is not None and torch.cuda.is_available():
        device = "cuda"
    if any(name.endswith("/constants.pkl") for name in names):
        return TorchWorkload(
            *(uri, load_script(path)),
            inputs=inputs,
            batch_sizes=batch_sizes,
            threads=threads,
            device=device,
            target=target,
        )
    if not any(name.endswith(_ARCHIVED) for name in names):
        raise BadFile(
            f"{path} holds neither an archive of torch.export nor TorchScript; what torch.save writes, weights or a "
            "whole module, needs its code: give package.module:callable"
        )
    program = load_export(path)
    declared = tuple(_declared(program))
    tensors = fed(path, declared, parse_inputs(inputs))
    levels = _levels(path, program, declared, tensors, batch_sizes)
    make = _maker(program, tensors)
    exported = _Exported(_placed(path, program, device, target))
    return TorchWorkload(*(uri, exported), make=make, batch_sizes=levels, threads=threads, device=device, target=target)


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


def _names(uri: str) -> list[str]:
    """Return what is in the zip archive that torch writes either kind as."""
    try:
        with zipfile.ZipFile(uri) as archive:
            return archive.namelist()
    except OSError as err:
        raise BadFile(f"{uri} cannot be read: {err.strerror}") from err
    except zipfile.BadZipFile as err:
        raise BadFile(f"{uri} is no archive as torch writes them, or cut off") from err


class _Exported(torch.nn.Module):
    """The program of an archive, called with its inputs in a row; it is in the mode it was exported in."""

    def __init__(self, program: Any) -> None:
        super().__init__()
        self._graph, self._form = program.module(), program.call_spec.in_spec

    def train(self, mode: bool = True) -> "_Exported":
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


def _declared(program: Any) -> Iterator[Declared]:
    """Yield the tensors the program takes; a dimension that is not fixed by its symbol."""
    nodes = {node.name: node.meta.get("val") for node in program.graph.nodes if node.op == "placeholder"}
    for argument in _user_inputs(program):
        value = nodes.get(argument.name)
        if isinstance(value, torch.Tensor):
            shape = tuple(size if isinstance(size, int) else str(size) for size in value.shape)
            dtype = str(value.dtype)
            yield Declared(argument.name, shape, dtype.removeprefix("torch."), dtype)


def _maker(program: Any, tensors: Sequence[Fed]) -> MakeInputs:
    constants = [getattr(argument, "value", None) for argument in _user_inputs(program)]
    names = [argument.name for argument in _user_inputs(program)]

    def make(batch_size: int) -> Any:
        arrays = {name: torch.from_numpy(array) for name, array in made_up(tensors, batch_size).items()}
        return tuple(arrays.get(name, constant) for name, constant in zip(names, constants, strict=True))

    return make


def _levels(
    uri: str, program: Any, declared: Sequence[Declared], tensors: Sequence[Fed], levels: Sequence[int] | None
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
