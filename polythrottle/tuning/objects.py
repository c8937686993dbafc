"""Devices, workloads, search methods and meters given as objects: what they must have, and what they are known by."""

import hashlib
import re
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import CellType, CodeType
from typing import Any, TypeAlias

from polythrottle.domain.errors import InvalidInput
from polythrottle.domain.ports import Device, EnergyMeter, Meter, Optimizer, PowerMeter, Workload

_ADDRESS = re.compile(r" at 0x[0-9a-fA-F]+")
Served: TypeAlias = Workload | Callable[..., object]
"""What can be served: a workload, a function whose every call is one query, or a torch module."""


@dataclass(frozen=True)
class GivenObjects:
    """What was given as an object in place of what a name opens; a journal cannot keep it.

    Args:
        device: In place of the device URI's.
        workload: In place of the workload URI's.
        meter: In place of the device's own sensors.
    """

    device: Device | None = None
    workload: Served | None = None
    meter: Meter | None = None

    @classmethod
    def of(cls, device: object, workload: object, meter: object) -> "GivenObjects":
        """Return those of some values that are no names.

        Raises:
            InvalidInput: If one of them is not what it should be; says what it lacks.
        """
        return cls(
            device=None if isinstance(device, str) else checked_device(device),
            workload=None if workload is None or isinstance(workload, str) else _checked_workload(workload),
            meter=None if meter is None else _checked_meter(meter),
        )

    @property
    def fleeting(self) -> tuple[str, ...]:
        """Which of them nobody can open again by a name."""
        gone = {
            "device": self.device is not None,
            "workload": self.workload is not None and not reopens(self.workload),
            "meter": self.meter is not None,
        }
        return tuple(name for name, given in gone.items() if given)

    def content(self) -> Mapping[str, str]:
        """Return what is known of them beyond their names, so that others of the same name make another problem."""
        content: dict[str, str] = {}
        if self.workload is not None and not isinstance(self.workload, Workload) and not reopens(self.workload):
            content["code"] = _digest(self.workload)
        if self.meter is not None:
            content["meter"] = f"{type_name(self.meter)}, {self.meter.boundary}"
        return content


def type_name(value: object) -> str:
    """Return module and name of a value's type: ``__main__:MyBoard``."""
    return f"{type(value).__module__}:{type(value).__qualname__}"


def name_of(workload: Served) -> str:
    """Return what a workload is known by: its URI, or the name of the function or of the type."""
    if isinstance(workload, Workload):
        return str(workload.uri)
    named = getattr(workload, "__qualname__", None)
    if named:
        return f"{workload.__module__}:{named}"
    return type_name(workload)


def reopens(workload: Served) -> bool:
    """Return whether ``package.module:callable`` opens this very function."""
    if isinstance(workload, Workload):
        return False
    module, _, path = name_of(workload).partition(":")
    value: Any = None
    # The main module of whoever resumes is another one.
    if module != "__main__":
        value = sys.modules.get(module)
    for name in path.split("."):
        value = getattr(value, name, None)
    return value is workload


def checked_device(device: object) -> Device:
    """Return a device.

    Raises:
        InvalidInput: If it is none; says what it lacks.
    """
    _see_that_it_has(device, Device, "a device", "write a URI such as 'sim:jetson-agx-orin', or give an object")
    return device  # type: ignore[return-value]


def checked_optimizer(method: object) -> Optimizer:
    """Return a search method.

    Raises:
        InvalidInput: If it is none.
    """
    _see_that_it_has(method, Optimizer, "a search method", "write a name such as 'bayes', or give an object")
    return method  # type: ignore[return-value]


def _checked_workload(workload: object) -> Served:
    if isinstance(workload, Workload) or callable(workload):
        return workload
    advice = "write a URI such as 'model.onnx', or give a function, a torch module or an object"
    _see_that_it_has(workload, Workload, "a workload", advice)
    raise AssertionError


def _checked_meter(meter: object) -> Meter:
    if isinstance(meter, EnergyMeter | PowerMeter):
        return meter
    raise InvalidInput(f"{_called(meter)} is not a meter; see polythrottle.domain.ports.EnergyMeter and PowerMeter")


def _see_that_it_has(value: object, port: type, what: str, advice: str) -> None:
    missing = [name for name in vars(port) if not name.startswith("_") and not hasattr(value, name)]
    # A class has all methods of its objects, and can do nothing with them.
    if missing or isinstance(value, type):
        if isinstance(value, type):
            lacks = "is a class, not an object of it"
        else:
            lacks = f"has no {', '.join(missing)}"
        raise InvalidInput(
            f"{_called(value)} is not {what}: it {lacks}; {advice} as polythrottle.domain.ports.{port.__name__}"
        )


def _called(value: object) -> str:
    if isinstance(value, type):
        return value.__name__
    return type(value).__name__


def _digest(workload: Callable[..., object]) -> str:
    """Return a digest of what a workload does, as far as it shows.

    Of a function its code and what it was made with; of a torch module how it shows itself; of others the type.
    """
    code = getattr(workload, "__code__", None)
    # Not imported: whoever gives a torch module has loaded it, and nobody else should wait for it.
    torch = sys.modules.get("torch")
    if isinstance(code, CodeType):
        text = "\n".join([*_code_lines(code), *_bound_lines(workload)])
    elif torch is not None and isinstance(workload, torch.nn.Module):
        # A layer may show a function it was given, and where it lies in memory is another place in every process.
        text = _ADDRESS.sub("", str(workload))
    else:
        text = type_name(workload)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _code_lines(code: CodeType) -> list[str]:
    inner = [line for each in code.co_consts if isinstance(each, CodeType) for line in _code_lines(each)]
    plain = [_constant(each) for each in code.co_consts if not isinstance(each, CodeType)]
    # Neither file nor line numbers: a function that was moved is still the same.
    return [code.co_code.hex(), *plain, *code.co_names, *inner]


def _bound_lines(function: object) -> list[str]:
    """Return what a function was made with beside its code; nothing where that is nothing, as before it counted."""
    lines = [f"default {_bound(each)}" for each in getattr(function, "__defaults__", None) or ()]
    named = getattr(function, "__kwdefaults__", None) or {}
    lines += [f"default {name}={_bound(each)}" for name, each in sorted(named.items())]
    return lines + [f"enclosed {_bound(each)}" for each in map(_contents, getattr(function, "__closure__", None) or ())]


def _contents(cell: CellType) -> object:
    try:
        return cell.cell_contents
    except ValueError:  # not assigned yet
        return None


def _bound(value: object) -> str:
    # Only what shows itself alike in every process: a model or a list that the function fills says its type.
    if value is None or isinstance(value, bool | int | float | complex | str | bytes):
        return repr(value)
    if isinstance(value, tuple):
        return f"({', '.join(map(_bound, value))})"
    return type_name(value)


def _constant(value: object) -> str:
    # Texts hash otherwise in every process, so the order of `x in {"a", "b"}` would make another function of it. Python
    # makes no constant of a set within another constant.
    if isinstance(value, frozenset):
        return f"frozenset({{{', '.join(sorted(map(repr, value)))}}})"
    return repr(value)
