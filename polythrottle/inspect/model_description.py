"""From a model to the file that describes it for simulated boards, every figure with its source."""

import importlib.metadata
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from statistics import geometric_mean
from typing import TYPE_CHECKING, Any

import tomli_w

from polythrottle.catalog import Model, is_language_model, load_model, names
from polythrottle.domain.errors import InvalidInput
from polythrottle.domain.space import BATCH_SIZE
from polythrottle.workloads import open_workload
from polythrottle.workloads.computation_graph.operators import Counts, Graph, count

if TYPE_CHECKING:
    from polythrottle.workloads.torch_model import TorchWorkload

WIDTHS: Mapping[str, int] = {"fp32": 4, "fp16": 2, "int8": 1}
"""Bytes of one value by precision."""

_BATCH_SIZES = (1, 2, 4, 8, 16)
_RUNTIME_BYTES = 4e8
_PRECISIONS = {True: "fp16", False: "fp32"}
"""By whether numbers of two bytes occur."""
_SHOWN = 6


@dataclass(frozen=True)
class Description:
    """What a model computes and moves, as simulated boards need it.

    Args:
        uri: The model.
        graph: What it does in one query.
        batch_size: Items of that query.
        batch_sizes: Items per query to choose from.
        inputs: What one item is made of, for people.
        precision: One of `WIDTHS`.
        counted_by: What drew the graph, with its version.
    """

    uri: str
    graph: Graph
    batch_size: int
    batch_sizes: tuple[int, ...]
    inputs: str
    precision: str
    counted_by: str

    @cached_property
    def counts(self) -> Counts:
        """What one query computes and moves."""
        return count(self.graph, WIDTHS[self.precision])

    def figures(self) -> dict[str, Any]:
        """Return the figures of the file, in its order; per item unless the catalogue's `Model` says otherwise."""
        counts = self.counts
        items = self.batch_size
        usual = _usual(self.precision)
        held = self.graph.parameters * WIDTHS[self.precision]
        figures: dict[str, Any] = {
            "operations": counts.operations / items,
            "weight_bytes": counts.weight_bytes,
            "traffic_bytes": counts.traffic_bytes / items,
            "memory_bytes": _RUNTIME_BYTES + 1.5 * held,
            "memory_item_bytes": counts.peak_bytes / items,
            "parallelism": _rounded(usual, lambda model: model.parallelism),
            "kernels": float(counts.kernels),
            "preprocess_cycles": 0.0,
            "handoff_cycles": _rounded(usual, lambda model: model.handoff_cycles),
            "batch_sizes": list(self.batch_sizes),
        }
        if 1 not in self.batch_sizes:  # the usual default of a workload file
            figures["batch_default"] = self.batch_sizes[0]
        return figures

    def document(self) -> dict[str, Any]:
        """Return the whole file, as `polythrottle.catalog.load_model` reads it."""
        usual = _usual(self.precision)
        name = self.uri
        if "/" in name:
            name = Path(name).stem
        title = f"{name}, {self.inputs}, {self.precision.upper()}"
        figures = self.figures()
        return {
            "title": title,
            "precision": self.precision,
            **figures,
            "efficiency": {
                "vector": _rounded(usual, lambda model: model.efficiency.vector),
                "tensor": _rounded(usual, lambda model: model.efficiency.tensor),
                "source": _mean_of(usual),
            },
            "source": {name: text for name, text in self._sources(usual).items() if name in figures},
        }

    def text(self) -> str:
        """Return the file's text."""
        note = "# Made by polythrottle profile-model. What is assumed decides how far a simulated board can be trusted."
        return f"{note}\n\n{tomli_w.dumps(self.document())}"

    def _sources(self, usual: Sequence[Model]) -> dict[str, str]:
        width = WIDTHS[self.precision]
        counts = self.counts
        counted = f"counted by polythrottle profile-model in {self.uri} with {self.counted_by}"
        if len(self.batch_sizes) > 1:
            batch = "assumed: those of the shipped descriptions"
        else:
            batch = "fixed in the model"
        return {
            "operations": f"{counted}, {self.batch_size} to a query: multiply-adds of convolutions, matrix products "
            f"and attention, each as two operations; nothing else is counted{self._bytes_only()}",
            "weight_bytes": f"{counted}: constants at {width} bytes a value, once for every operator that reads them; "
            f"of {self.graph.parameters:,} parameters, rows looked up in a table count as traffic",
            "traffic_bytes": f"{counted}: {counts.activations:,} activations in {counts.tensors} tensors at {width} "
            f"bytes a value, written once and read by each operator that uses them; element-wise operators are fused "
            f"with the one before; without any fusion it would be {counts.unfused_bytes / self.batch_size:.4g}, an "
            "upper bound; caches are left out, which makes both more than a board moves",
            "memory_bytes": "assumed as in the shipped descriptions of EfficientNet: 0.4 GB for the runtime, and one "
            "and a half times the parameters",
            "memory_item_bytes": f"{counted}: the most activations held at once, with the same fusion",
            "parallelism": _mean_of(usual),
            "kernels": f"{counted}: operators left after that fusion",
            "preprocess_cycles": "left at 0, since a model does not tell its preprocessing; put in the CPU cycles per "
            "item of yours",
            "handoff_cycles": _mean_of(usual),
            "batch_sizes": batch,
            "batch_default": batch,
        }

    def _bytes_only(self) -> str:
        most = self.graph.bytes_only.most_common()
        shown = ", ".join(f"{name} {times}" for name, times in most[:_SHOWN])
        rest = ""
        if len(most) > _SHOWN:
            rest = f" and {len(most) - _SHOWN} more kinds"
        if most:
            return f", so that these move bytes only: element-wise operators, {shown}{rest}"
        return ""


def profile_model(
    uri: str, *, inputs: Sequence[str] = (), batch_size: int | None = None, precision: str | None = None
) -> Description:
    """Return what a model computes and moves.

    Args:
        uri: ``model.onnx``, which is read, or a torch module or export, which is run once on made-up inputs.
        inputs: Shapes of one item's inputs, such as ``3x224x224``, where the model does not say.
        batch_size: Items in the query that is counted, figures per item being its share; the fewest there can be by
            default.
        precision: One of `WIDTHS`; that of the model itself by default.

    Raises:
        InvalidInput: If it is not such a model, its shapes are missing or not fixed, it is quantised, or it computes
            nothing that can be counted.
        UnknownName: If a Python module has no such callable, or there is no such input.
        BadFile: If a file is not what its name says.
        DeviceError: If the package that reads it is not installed.
        TrialError: If it fails on its inputs.
    """
    if precision is not None and precision not in WIDTHS:
        raise InvalidInput(f"precision must be {', '.join(WIDTHS)}, not {precision!r}")
    if re.match(r"(?:cmd:)|[\w+]+://", uri) or uri.endswith(".toml"):
        raise InvalidInput(
            f"{uri} cannot be looked into; give model.onnx, model.pt2, model.pt or package.module:callable"
        )
    if uri.lower().endswith(".onnx"):
        describe = _of_onnx
    else:
        describe = _of_torch
    description = describe(uri, inputs, batch_size, precision)
    if description.counts.operations <= 0 or description.counts.traffic_bytes <= 0:
        raise InvalidInput(f"{uri} computes nothing that can be counted{description._bytes_only()}")
    return description


def _of_onnx(uri: str, inputs: Sequence[str], batch_size: int | None, precision: str | None) -> Description:
    from polythrottle.workloads.computation_graph.onnx_file import trace_onnx

    graph, given, items = trace_onnx(uri, inputs, batch_size)
    half = any(each.dtype == "float16" for each in given)
    batch_sizes: tuple[int, ...] = (items,)
    if any(None in each.shape for each in given):  # a graph whose batch is not fixed
        batch_sizes = _BATCH_SIZES
    return Description(
        uri,
        graph,
        items,
        batch_sizes,
        " and ".join(_shape(each.shape[1:]) for each in given),
        precision or _PRECISIONS[half],
        f"onnx {importlib.metadata.version('onnx')}",
    )


def _of_torch(uri: str, inputs: Sequence[str], batch_size: int | None, precision: str | None) -> Description:
    from polythrottle.workloads.computation_graph.torch_module import trace_torch

    served = _served(uri, inputs, None)
    levels = tuple(int(level) for level in served.space.knob(BATCH_SIZE).levels)
    chosen = served
    if batch_size is not None:
        chosen = _served(uri, inputs, (batch_size,))
    arguments, named = chosen.example
    return Description(
        uri,
        trace_torch(uri, chosen.module, arguments, named),
        batch_size or levels[0],
        levels,
        " and ".join(_shape(each.shape[1:]) for each in (*arguments, *named.values()) if hasattr(each, "shape")),
        precision or _PRECISIONS[any(each.element_size() == 2 for each in chosen.module.parameters())],
        f"torch {importlib.metadata.version('torch')}",
    )


def _served(uri: str, inputs: Sequence[str], batch_sizes: tuple[int, ...] | None) -> "TorchWorkload":
    """Return a torch module as it would be served, with inputs of the smallest of the batch sizes."""
    workload = open_workload(uri, inputs=inputs, batch_sizes=batch_sizes, threads=[1])
    workload.close()
    from polythrottle.workloads.torch_model import TorchWorkload

    if isinstance(workload, TorchWorkload):
        return workload
    raise InvalidInput(
        f"{uri} is not a torch module, nor a function that makes one without arguments; what it computes "
        "cannot be counted"
    )


def _shape(shape: Sequence[int | None]) -> str:
    return " × ".join(str(size) for size in shape) or "one number"


def _usual(precision: str) -> list[Model]:
    """Return the shipped descriptions of a precision; those in half precision for one that none is in."""
    shipped = [load_model(name) for name in names("profiles/workloads") if not is_language_model(name)]
    return [model for model in shipped if model.precision == precision] or [
        model for model in shipped if model.precision == "fp16"
    ]


def _rounded(models: Sequence[Model], figure: Callable[[Model], float]) -> float:
    return float(f"{geometric_mean(map(figure, models)):.3g}")


def _mean_of(models: Sequence[Model]) -> str:
    kind = models[0].precision.upper()
    return f"assumed: the geometric mean of the {len(models)} descriptions in {kind} that polythrottle ships"
