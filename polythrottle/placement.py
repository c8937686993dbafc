"""What a workload's work runs on, so that what is tuned is what runs."""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property


def _first() -> int:
    return 0


@dataclass(frozen=True)
class Target:
    """The GPU that is tuned, as workloads need to know it.

    Args:
        title: The name people know it by.
        uuids: Of it or its group, as NVML spells them; empty where there is no choice, as on a Jetson.
        find: Returns its number in CUDA's order of this process. It is asked late: the first call fixes what
            ``CUDA_VISIBLE_DEVICES`` says, which a user's own code may set when it is imported.
    """

    title: str
    uuids: tuple[str, ...] = ()
    find: Callable[[], int] = field(default=_first, compare=False)

    @cached_property
    def number(self) -> int:
        """Its number in CUDA's order of this process.

        Raises:
            DeviceError: If CUDA does not show it to this process.
        """
        return self.find()


@dataclass(frozen=True)
class Placement:
    """What a workload's work runs on.

    Args:
        by: What runs it: ``ONNX Runtime with CUDA``.
        gpu: The GPU's number in CUDA's order; None if it is the processor.
        asked: Whether somebody chose it.
        why: Why it is the processor, where nobody chose it.
        remedy: How to have it on the GPU.
        stay: How to have it on the processor all the same.
    """

    by: str
    gpu: int | None = None
    asked: bool = False
    why: str = ""
    remedy: str = ""
    stay: str = ""

    def __str__(self) -> str:
        return f"{'the processor' if self.gpu is None else 'the GPU'}, by {self.by}"
