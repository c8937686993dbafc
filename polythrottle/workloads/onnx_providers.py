"""What ONNX Runtime runs a graph with: TensorRT, then CUDA, where they are there and a GPU is tuned.

That a provider is registered does not mean that it runs anything: operators it does not have go to the processor. Which
one ran where is read from ONNX Runtime's own profile of a query (onnxruntime.ai, "Profiling Tools": events of category
Node name their provider).
"""

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from polythrottle.errors import DeviceError
from polythrottle.placement import Placement, Target

PROVIDERS: Mapping[str, str] = {
    "tensorrt": "TensorrtExecutionProvider",
    "cuda": "CUDAExecutionProvider",
    "cpu": "CPUExecutionProvider",
}
"""Execution providers by the names the option ``providers`` has for them, in the order they are taken."""
_SHORT = {name: short for short, name in PROVIDERS.items()}
_NAMED = {"tensorrt": "TensorRT", "cuda": "CUDA", "cpu": "CPU"}
_INSTALL = "install ONNX Runtime's GPU build (onnxruntime-gpu; on a Jetson NVIDIA's own for its JetPack)"


@dataclass(frozen=True)
class Wanted:
    """The providers a session is to have.

    Args:
        names: As ONNX Runtime calls them, the first the most wanted; the processor is the last.
        asked: Whether somebody chose them.
        number: Of the GPU, in CUDA's order.
        lacking: Why there is none for a GPU, where a GPU is tuned.
    """

    names: tuple[str, ...]
    asked: bool = False
    number: int = 0
    lacking: str = ""

    @property
    def gpu(self) -> bool:
        """Whether one of them is for a GPU."""
        return self.names != (PROVIDERS["cpu"],)

    @property
    def options(self) -> list[Any]:
        """As ``InferenceSession`` takes them."""
        given = {"device_id": str(self.number)}
        return [name if name == PROVIDERS["cpu"] else (name, given) for name in self.names]


def wanted(uri: str, chosen: Sequence[str], available: Sequence[str], target: Target | None) -> Wanted:
    """Return the providers of a session.

    Args:
        uri: Of the model, for messages.
        chosen: Short names somebody gave; empty where nobody did.
        available: What this ONNX Runtime is built with.
        target: The GPU that is tuned, if one is.

    Raises:
        DeviceError: If a provider that was chosen is not there.
    """
    number = 0 if target is None else target.number
    if chosen:
        missing = next((name for name in chosen if PROVIDERS[name] not in available), None)
        if missing is not None:
            here = ", ".join(_SHORT[name] for name in available if name in _SHORT)
            raise DeviceError(f"{uri}: this ONNX Runtime has no {_NAMED[missing]} provider (it has {here}); {_INSTALL}")
        names = dict.fromkeys((*(PROVIDERS[name] for name in chosen), PROVIDERS["cpu"]))
        return Wanted(tuple(names), asked=True, number=number)
    if target is None:
        return Wanted((PROVIDERS["cpu"],))
    names = dict.fromkeys(name for name in PROVIDERS.values() if name in available)
    lacking = "" if len(names) > 1 else "this ONNX Runtime has no provider for NVIDIA GPUs"
    return Wanted(tuple(names), number=number, lacking=lacking)


@dataclass(frozen=True)
class Ran:
    """Which provider ran how many operators of a query.

    Args:
        operators: Their count by the provider's short name; what a provider has fused counts as one.
    """

    operators: Mapping[str, int] = field(default_factory=dict)

    @classmethod
    def read(cls, path: Path) -> "Ran":
        """Return what a profile of ONNX Runtime tells; nothing if it cannot be understood."""
        try:
            events = json.loads(path.read_text(encoding="utf-8", errors="replace"))
            providers = [
                event["args"]["provider"]
                for event in events
                if event.get("cat") == "Node" and str(event.get("name", "")).endswith("_kernel_time")
            ]
        except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
            return cls()
        return cls(Counter(_SHORT.get(str(name), str(name)) for name in providers))

    @property
    def words(self) -> str:
        """The counts, in words."""
        return ", ".join(f"{count} by {_NAMED.get(name, name)}" for name, count in self.operators.items())


def placement(uri: str, sought: Wanted, registered: Sequence[str], ran: Ran) -> Placement:
    """Return what a session runs on.

    Args:
        uri: Of the model, for messages.
        sought: What it was to have.
        registered: What it has, as the session tells.
        ran: Which operators ran where, if that is known.
    """
    short = [_SHORT[name] for name in registered if name in _SHORT and name != PROVIDERS["cpu"]]
    used = [name for name in short if ran.operators.get(name)] if ran.operators else short
    if used:
        by = " and ".join(_NAMED[name] for name in used)
        return Placement(f"ONNX Runtime with {by}", gpu=sought.number, asked=sought.asked)
    why, remedy = sought.lacking, _INSTALL
    if not why and short:
        idle = " and ".join(_NAMED[name] for name in short)
        why = f"all its operators went there, as {idle} has none of them ({ran.words})"
        remedy = "export it with operators that run on the GPU"
    elif not why:
        tried = " and ".join(_NAMED[_SHORT[name]] for name in sought.names[:-1])
        why = f"{tried} did not start"
        remedy = "see that CUDA, cuDNN and TensorRT are of the versions this ONNX Runtime is built for"
    asked = sought.asked and not sought.gpu
    return Placement("ONNX Runtime", None, asked, why, remedy, f"{uri}?providers=cpu")
