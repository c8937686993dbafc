"""Which real device this machine has: a Jetson board, an NVIDIA GPU, or its processor."""

from dataclasses import dataclass
from pathlib import Path

from polythrottle.actuation.controls import text_of


@dataclass(frozen=True)
class Found:
    """The device that ``auto`` means here.

    Args:
        uri: What opens it.
        explanation: Why this one, in a sentence.
    """

    uri: str
    explanation: str


def find_device(root: Path = Path("/")) -> Found:
    """Return the device ``auto`` means: the first of board, GPU and processor that this version can steer.

    Args:
        root: Where ``/proc`` hangs; another folder in tests.
    """
    if name := _jetson(root):
        return Found("jetson" if root == Path("/") else f"jetson?root={root}", f"{name} is here")
    if gpus := _nvidia(root):
        return Found("nvml:0", gpus)
    return Found("cpu", "no Jetson board and no NVIDIA GPU here; taking the processor")


def _jetson(root: Path) -> str | None:
    compatible = _text(root / "proc/device-tree/compatible")
    return _text(root / "proc/device-tree/model").strip("\0\n ") or "a Jetson" if "nvidia,tegra" in compatible else None


def _nvidia(root: Path) -> str | None:
    """Return which GPUs the driver's own files name, in a sentence; None if there is none."""
    files = sorted((root / "proc/driver/nvidia/gpus").glob("*/information"))
    lines = [line for file in files for line in _text(file).splitlines() if line.startswith("Model:")]
    named = [line.partition(":")[2].strip() for line in lines]
    if not named:
        return None
    others = (
        f", the first of {len(named)} GPUs; nvml:1 and so on name the others, nvml:all all as one"
        if len(named) > 1
        else ""
    )
    return f"an {named[0]} is here{others}"


def _text(path: Path) -> str:
    try:
        return text_of(path)
    except OSError:
        return ""
