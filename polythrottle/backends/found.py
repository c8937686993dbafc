"""Which real device this machine has: a Jetson board, an NVIDIA GPU, or its processor."""

from dataclasses import dataclass
from pathlib import Path


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
    for name in (_jetson(root), _nvidia(root)):
        if name:
            return Found("cpu", f"{name} is here, but this version cannot steer it yet; taking the processor")
    return Found("cpu", "no Jetson board and no NVIDIA GPU here; taking the processor")


def _jetson(root: Path) -> str | None:
    compatible = _text(root / "proc/device-tree/compatible")
    return _text(root / "proc/device-tree/model").strip("\0\n ") or "a Jetson" if "nvidia,tegra" in compatible else None


def _nvidia(root: Path) -> str | None:
    for file in sorted((root / "proc/driver/nvidia/gpus").glob("*/information")):
        for line in _text(file).splitlines():
            if line.startswith("Model:"):
                return f"an {line.partition(':')[2].strip()}"
    return None


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
