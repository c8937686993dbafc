"""One unit for a whole axis or column: the prefix and the decimals that keep all of its values readable."""

import math
from collections.abc import Iterable
from dataclasses import dataclass
from statistics import median

_PREFIXES = ((1e3, "k"), (1.0, ""), (1e-3, "m"), (1e-6, "µ"), (1e-9, "n"))

_RAISED = str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹")


@dataclass(frozen=True)
class Scale:
    """How the values of one quantity are written together.

    Args:
        unit: With its prefix, or a power of ten; empty for a plain number.
        factor: What one of that unit is in SI.
        decimals: Digits after the point: four that say something in a typical value, two in the smallest.
    """

    unit: str
    factor: float
    decimals: int

    @classmethod
    def of(cls, values: Iterable[float | None], unit: str) -> "Scale":
        """Return the scale that suits positive values in an SI unit; unknown ones are passed over."""
        known = [value for value in values if value is not None] or [1.0]
        factor, prefix = _prefix(median(known), unit)
        decimals = max(3 - _power(median(known) / factor), 1 - _power(min(known) / factor))
        return cls(f"{prefix}{unit}", factor, min(max(decimals, 0), 6))

    def number(self, value: float | None) -> str:
        """Return a value without its unit; unknown gives ``–``."""
        return "–" if value is None else f"{value / self.factor:.{self.decimals}f}"

    def quantity(self, value: float | None) -> str:
        """Return a value with its unit; unknown gives ``–``."""
        return self.number(value) if value is None else f"{self.number(value)} {self.unit}".strip()

    def titled(self, name: str) -> str:
        """Return a title with the unit: ``energy (mJ)``."""
        return f"{name} ({self.unit})" if self.unit else name


def _prefix(typical: float, unit: str) -> tuple[float, str]:
    if not unit:
        power = 3 * (_power(typical) // 3)
        return (1.0, "") if -1 <= power / 3 <= 1 else (10.0**power, f"×10{str(power).translate(_RAISED)}")
    usable = [(factor, prefix) for factor, prefix in _PREFIXES if (unit, prefix) != ("s", "k")]
    return next(((factor, prefix) for factor, prefix in usable if typical >= factor), usable[-1])


def _power(value: float) -> int:
    return math.floor(math.log10(value))
