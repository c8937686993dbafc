"""What a search method may be told beside the study itself."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from polythrottle.errors import InvalidInput
from polythrottle.space import OperatingPoint
from polythrottle.study import Study


@dataclass(frozen=True)
class Options:
    """What a search method may be told beside the study itself; a method takes what it can use.

    Args:
        history: Earlier studies to learn from, of other workloads, other devices, or both.
        risk: Highest chance of breaking a limit a trial may have while a feasible point is known, above 0 and at
            most 1; None leaves it to the method.
        presets: The vendor's named points.

    Raises:
        InvalidInput: If the risk is out of range.
    """

    history: Sequence[Study] = field(default=())
    risk: float | None = None
    presets: Sequence[OperatingPoint] = field(default=())

    def __post_init__(self) -> None:
        if self.risk is not None and not 0.0 < self.risk <= 1.0:
            raise InvalidInput(f"a risk is a chance above 0 and at most 1, not {self.risk:g}")
