"""Workloads: Python callables, torch modules and exports, ONNX files, TensorRT engines, services, commands."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from polythrottle.domain.errors import InvalidInput
from polythrottle.domain.ports import Target, Workload
from polythrottle.workloads.uris import ModelUri, is_script

_CALLABLE = re.compile(r"[^\W\d]\w*(?:\.[^\W\d]\w*)*:[^\W\d]\w*(?:\.[^\W\d]\w*)*")


def open_workload(
    uri: str,
    *,
    inputs: Sequence[str] = (),
    batch_sizes: Sequence[int] | None = None,
    threads: Sequence[int] | None = None,
    timeout_s: float = 60.0,
    target: Target | None = None,
) -> Workload:
    """Return the workload a URI means, ready to be queried at its default point.

    Args:
        uri: ``model.onnx``, ``model.pt2``, TorchScript's ``model.pt``, ``model.engine``, ``package.module:callable``,
            ``kserve://host:port/model``, ``kserve+grpc://host:port/model``, ``openai://host:port/model``,
            ``openai+https://host/model`` or ``cmd:<shell words>``.
        inputs: Shapes of one item's inputs, such as ``3x224x224`` or ``ids=128:int64``, where the model does not say.
        batch_sizes: Levels of the knob ``batch_size``; 1, 2, 4, 8, 16 by default.
        threads: Levels of the knob ``threads``; powers of two up to the number of processors, and that, by default.
        timeout_s: After how many seconds a query of a command or a service is given up.
        target: The GPU that is tuned, if one is: what can runs there.

    Raises:
        InvalidInput: If the URI has no known form, or what it names cannot be used so.
        UnknownName: If a Python module has no such callable, a service no such model, a model no such option; names the
            nearest.
        BadFile: If a model file is not one.
        DeviceError: If the package that would run it is not installed, or a service cannot be reached.
        TrialError: If a model fails while it is built, or a language model does not answer as it should.
    """
    given: dict[str, Any] = {"batch_sizes": batch_sizes, "threads": threads}
    if uri.startswith("cmd:"):
        from polythrottle.workloads.command import CommandWorkload

        return CommandWorkload(uri, **given, timeout_s=timeout_s, target=target)
    given["inputs"] = inputs
    if uri.startswith(("kserve://", "kserve+grpc://")):
        from polythrottle.workloads.services.kserve import KserveWorkload

        return KserveWorkload(uri, **given, timeout_s=timeout_s)
    if uri.startswith(("openai://", "openai+https://")):
        from polythrottle.workloads.services.openai import OpenaiWorkload

        return OpenaiWorkload(uri, **given, timeout_s=timeout_s)
    return _open_model(uri, given, timeout_s, target)


def _open_model(uri: str, given: Mapping[str, Any], timeout_s: float, target: Target | None) -> Workload:
    """Return the workload of a model that runs in this process; raises as `open_workload`."""
    model = ModelUri.parse(uri)
    name = model.name
    if name.lower().endswith(".onnx"):
        from polythrottle.workloads.onnx_model import OnnxWorkload

        return OnnxWorkload(uri, **given, target=target)
    if name.lower().endswith((".pt2", ".pt")):
        is_script(model)  # what is neither is refused before torch is imported
        from polythrottle.workloads.torch_model import open_export

        return open_export(uri, **given, target=target)
    if name.lower().endswith((".engine", ".plan")):
        from polythrottle.workloads.tensorrt_engine import open_engine

        return open_engine(uri, **given, timeout_s=timeout_s, target=target)
    if _CALLABLE.fullmatch(name):
        from polythrottle.workloads.python_callable import open_python

        return open_python(uri, **given, target=target)
    raise InvalidInput(
        f"{uri!r} is not a workload; write model.onnx, model.engine, model.pt2, package.module:callable, "
        "kserve://host:port/model, openai://host:port/model or cmd:<shell words>"
    )
