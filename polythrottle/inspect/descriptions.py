"""Descriptions for the simulator: of a board that was met, as an entry of devices/, and of a model, as a file.

A board's knobs, levels and presets are its own. What nobody can read off a board, the coefficients of the simulator,
are those of the nearest board in devices/, scaled by the top clocks, and every one is marked as assumed. A model's
operations and bytes are counted from the model itself, every figure with its source.
"""

import dataclasses
import importlib.metadata
import math
import re
from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from statistics import geometric_mean
from typing import TYPE_CHECKING, Any

import tomli_w

from polythrottle.backends import open_device
from polythrottle.catalog import Board, Model, is_language_model, load_board, load_model, names
from polythrottle.domain.errors import InvalidInput, PolythrottleError
from polythrottle.domain.ports import Device
from polythrottle.domain.space import BATCH_SIZE, Level, SearchSpace
from polythrottle.domain.units import to_file
from polythrottle.storage.atomic_file import temporary_folder
from polythrottle.workloads import open_workload
from polythrottle.workloads.graph_operators import Counts, Graph, count

if TYPE_CHECKING:
    from polythrottle.workloads.torch_model import TorchWorkload


_KINDS = {"jetson": "jetson", "nvml": "card"}
_KNOBS = ("gpu_min_hz", "gpu_max_hz", "mem_hz", "cpu_max_hz", "power_limit_w")
_NEEDED = ("gpu_max_hz", "mem_hz")
_READ = "read from the board, within the limits it was found with"
_NO_KIND = "only Jetson boards and NVIDIA GPUs can be simulated; it opens as a tree"


@dataclass(frozen=True)
class ObservedKnob:
    """A knob as it was met.

    Args:
        levels: In SI.
        default: As found.
        search: Whether it is searched by default.
        every: How far the levels that are searched by default lie apart, counted from the highest.
        source: Where the levels come from.
    """

    levels: tuple[float, ...]
    default: float
    search: bool
    every: int = 1
    source: str = _READ


def simulated_board(device: Device, title: str) -> tuple[bytes, str]:
    """Return a board as a file of devices/, and in a sentence how it came about; empty and why, if there is none.

    Args:
        device: Not entered; nothing is written to it.
        title: What to call it.
    """
    kind = _KINDS.get(device.uri.partition(":")[0].partition("?")[0])
    if kind is None:
        return b"", _NO_KIND
    met = _met(device)
    # Its own entry where there is one: coefficients that were fitted to this board beat those of a neighbour.
    near = _own(device) or _nearest(kind, title, met)
    if near is None:
        return b"", "no board of its kind is in devices/"
    whole = {**{name: _borrowed(near, name) for name in _NEEDED if name not in met}, **met}
    entry = tomli_w.dumps(_entry(device, title, near, whole)).encode()
    if problem := _problem(entry):
        return b"", f"what was read does not make a board that can be simulated: {problem}"
    return entry, f"coefficients of {near.name}, scaled by the top clocks: assumed"


def _problem(entry: bytes) -> str:
    """Return why a file of devices/ cannot be simulated; empty if it can."""
    # Tried, not checked: what a board has to have is for the reader of devices/ to say.
    with temporary_folder() as folder:
        file = folder / "board.toml"
        file.write_bytes(entry)
        try:
            open_device(f"sim:{file}")
        except PolythrottleError as err:
            return " ".join(str(err).replace(f"{file}: ", "").split())
    return ""


def _met(device: Device) -> dict[str, ObservedKnob]:
    """Return the knobs that the simulator knows, each with all levels the board offers."""
    found = {}
    for name in _KNOBS:
        space = _space(device, (name,))
        if space:
            knob = next((knob for knob in space.knobs if knob.name == name), None)
        else:
            knob = None
        if knob:
            numbers = [level for level in knob.levels if not isinstance(level, str)]
        else:
            numbers = []
        default = space.default.get(name) if space else None
        if numbers and not isinstance(default, str) and default is not None:
            searched = name in device.space.names
            every = 1
            if searched:
                every = _every(numbers, default, device.space.knob(name).levels)
            found[name] = ObservedKnob(tuple(numbers), default, searched, every)
    return found


def _every(levels: Sequence[float], default: float, searched: Sequence[Level]) -> int:
    """Return how far the searched levels lie apart among all; 1 if they follow no such rule."""
    fits = (step for step in range(1, len(levels)) if {*levels[::-step], default} == set(searched))
    return next(fits, 1)


def _space(device: Device, knobs: Sequence[str]) -> SearchSpace | None:
    try:
        return open_device(device.uri, knobs).space
    except PolythrottleError:
        return None  # the knob is off on this board


def _borrowed(near: Board, name: str) -> ObservedKnob:
    knob = near.knob(name)
    return ObservedKnob(
        (knob.default,), knob.default, False, source=f"assumed to be the default of {near.name}: not offered here"
    )


def _own(device: Device) -> Board | None:
    """Return the entry of a board that says which of the catalogue's it is."""
    from polythrottle.backends.jetson import JetsonDevice

    own = None
    if isinstance(device, JetsonDevice):
        own = device.entry
    if own is not None and own.simulation:
        return own
    return None


def _nearest(kind: str, title: str, met: Mapping[str, ObservedKnob]) -> Board | None:
    boards = [board for board in map(load_board, names("devices")) if board.kind == kind and board.simulation]
    # Siblings share their tables (jetson-tx2, jetson-tx2-4gb): of those as near, the one that others are named after.
    return min(boards, key=lambda board: (_distance(board, title, met), len(board.name)), default=None)


def _distance(board: Board, title: str, met: Mapping[str, ObservedKnob]) -> float:
    """Return how unlike two boards are: by words of their names and levels not shared, and by their top levels."""
    theirs = {knob.name: knob.levels for knob in board.knobs}
    shared = [name for name in met if name in theirs]
    apart = [_unlike(set(met[name].levels), set(theirs[name])) for name in shared]
    apart += [abs(math.log(met[name].levels[-1] / theirs[name][-1])) for name in shared]
    return _unlike(_words(title), _words(board.title)) + sum(apart) / max(1, len(shared))


def _unlike(some: Set[object], others: Set[object]) -> float:
    """Return the share of what two sets do not have in common."""
    return 1.0 - len(some & others) / max(1, len(some | others))


def _words(title: str) -> set[str]:
    return set(re.sub(r"[^a-z0-9]+", " ", title.lower()).split()) - {"nvidia", "developer", "kit", "jetson"}


def _entry(device: Device, title: str, near: Board, knobs: Mapping[str, ObservedKnob]) -> Mapping[str, Any]:
    limit = knobs.get("power_limit_w")
    watts = f"assumed to be that of {near.name}"
    power_max_w = near.power_max_w
    if limit:
        watts = "read from the board"
        power_max_w = limit.levels[-1]
    return {
        "title": title,
        "kind": near.kind,
        "memory_bytes": near.memory_bytes,
        "power_max_w": power_max_w,
        "source": {"memory_bytes": f"assumed to be that of {near.name}", "power_max_w": watts},
        "knobs": dict(_knob(name, met) for name, met in knobs.items()),
        **_rules(device, knobs),
        "rails": dataclasses.asdict(near.rails),
        **_presets(device, knobs),
        "simulation": _coefficients(near, _scales(near, knobs)),
    }


def _knob(name: str, met: ObservedKnob) -> tuple[str, dict[str, Any]]:
    key = to_file(name, met.default)[0]
    levels = [to_file(name, level)[1] for level in met.levels]
    values = {"levels": levels, "default": to_file(name, met.default)[1], "search": met.search}
    if met.every > 1:
        values["search_every"] = met.every
    return key, {**values, "source": met.source}


def _rules(device: Device, knobs: Mapping[str, ObservedKnob]) -> dict[str, Any]:
    rules: dict[str, Any] = {}
    if {"gpu_min_hz", "gpu_max_hz"} <= set(knobs):
        rules["ordered"] = [{"low": "gpu_min_mhz", "high": "gpu_max_mhz"}]
    pairs = None
    if len(knobs["mem_hz"].levels) > 1:
        pairs = _space(device, _NEEDED)
    if dependent := _dependent(pairs, knobs["gpu_max_hz"].levels[-1]) if pairs else []:
        rules["dependent"] = dependent
    return rules


def _dependent(pairs: SearchSpace, top_hz: float) -> list[dict[str, Any]]:
    """Return the memory clocks at which the GPU goes less high than it can."""
    highest: dict[float, float] = {}
    for point in pairs:
        memory_hz = float(point["mem_hz"])
        gpu_hz = float(point["gpu_max_hz"])
        highest[memory_hz] = max(gpu_hz, highest.get(memory_hz, 0.0))
    return [
        {
            **{"knob": "mem_mhz", "level": to_file("mem_hz", memory_hz)[1], "limited": "gpu_max_mhz"},
            **{"most": to_file("gpu_max_hz", most_hz)[1], "source": _READ},
        }
        for memory_hz, most_hz in sorted(highest.items())
        if most_hz < top_hz
    ]


def _presets(device: Device, knobs: Mapping[str, ObservedKnob]) -> dict[str, Any]:
    found = {}
    for name, point in device.presets.items():
        levels = {knob: level for knob, level in point.items() if _has(knobs, knob, level)}
        low = knobs["gpu_min_hz"].default if "gpu_min_hz" in knobs else 0
        if levels and low <= float(levels.get("gpu_max_hz", math.inf)):
            found[name] = {**dict(to_file(knob, float(level)) for knob, level in levels.items()), "source": _READ}
    if found:
        return {"presets": found}
    return {}


def _has(knobs: Mapping[str, ObservedKnob], name: str, level: Level) -> bool:
    return name in knobs and level in knobs[name].levels


@dataclass(frozen=True)
class _Scales:
    gpu: float
    memory: float
    cpu: float


def _scales(near: Board, knobs: Mapping[str, ObservedKnob]) -> _Scales:
    """Return the top clocks over those of the nearest board."""
    tops = {knob.name: float(knob.levels[-1]) for knob in near.knobs}

    def scale(name: str) -> float:
        if name in knobs and name in tops:
            return knobs[name].levels[-1] / tops[name]
        return 1.0

    return _Scales(scale("gpu_max_hz"), scale("mem_hz"), scale("cpu_max_hz"))


def _coefficients(near: Board, scales: _Scales) -> dict[str, Any]:
    assert near.simulation is not None
    tables = dataclasses.asdict(near.simulation)
    scaled = {
        ("gpu", "power_w"): scales.gpu,
        ("memory", "bandwidth_bytes_per_s"): scales.memory,
        ("memory", "power_w"): scales.memory,
        ("cpu", "clock_hz"): scales.cpu,
        ("cpu", "core_w"): scales.cpu,
    }
    for (table, key), scale in scaled.items():
        value = tables[table][key] * scale
        if key == "clock_hz":
            tables[table][key] = round(value)
        else:
            tables[table][key] = float(f"{value:.6g}")
    return _sourced(tables, f"assumed: that of {near.name}, powers, bandwidth and CPU clock scaled by the top clocks")


def _sourced(tables: Mapping[str, Any], source: str) -> dict[str, Any]:
    found: dict[str, Any] = {
        key: _sourced(value, source) if isinstance(value, dict) else value for key, value in tables.items()
    }
    figures = any(isinstance(value, int | float) for value in tables.values())
    if figures:
        return {**found, "source": source}
    return found


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
    from polythrottle.workloads.onnx_graph import trace_onnx

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
    from polythrottle.workloads.torch_graph import trace_torch

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
