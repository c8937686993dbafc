"""Exported torch models as workloads: ``model.pt2`` of torch.export and TorchScript's ``model.pt``."""

import zipfile
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from polythrottle.errors import BadFile, InvalidInput
from polythrottle.workloads.declared import Declared, Fed, batch_knobs, fed, made_up
from polythrottle.workloads.knobs import batch_knob
from polythrottle.workloads.tensors import parse_inputs
from polythrottle.workloads.torch_archive import load_export, load_script
from polythrottle.workloads.torch_module import MakeInputs, TorchWorkload

_ARCHIVED = ("/archive_format", "serialized_exported_program.json")


def open_export(
    uri: str,
    *,
    inputs: Sequence[str] = (),
    batch_sizes: Sequence[int] | None = None,
    threads: Sequence[int] | None = None,
) -> TorchWorkload:
    """Return the workload that an exported file holds.

    A ``.pt2`` archive says itself what its inputs are and which batches it takes; TorchScript does not.

    Args:
        uri: Path of the file.
        inputs: Shapes of one item's inputs, where the file does not say.
        batch_sizes: Levels of ``batch_size``; those of the usual ones that the file takes by default.
        threads: Levels of ``threads``; usual ones by default.

    Raises:
        BadFile: If the file is missing, or holds no such model that loads here.
        InvalidInput: If shapes are missing or do not fit, or the model does not take a batch that was asked for.
    """
    names = _names(uri)
    if any(name.endswith("/constants.pkl") for name in names):
        return TorchWorkload(uri, load_script(uri), inputs=inputs, batch_sizes=batch_sizes, threads=threads)
    if not any(name.endswith(_ARCHIVED) for name in names):
        raise BadFile(
            f"{uri} holds neither an archive of torch.export nor TorchScript; what torch.save writes, weights or a "
            "whole module, needs its code: give package.module:callable"
        )
    program = load_export(uri)
    declared = tuple(_declared(program))
    tensors = fed(uri, declared, parse_inputs(inputs))
    levels = _levels(uri, program, declared, tensors, batch_sizes)
    make = _maker(program, tensors)
    return TorchWorkload(uri, _Exported(program), make=make, batch_sizes=levels, threads=threads)


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
