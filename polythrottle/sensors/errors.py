"""Errors with a known distribution, and the 95 % interval of their sum.

Distributions are propagated by drawing from all of them (JCGM 101:2008, Supplement 1 to the Guide to the Expression of
Uncertainty in Measurement), because the sum is neither normal nor bounded: a counter's edges are triangular, what
varies is Student's, a rounding that nothing stirs is uniform. The draws are always the same ones.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    Draws = NDArray[np.float64]


_DRAWS, _SHARE, _HARMONICS = 40_000, 0.95, 6


class Error(Protocol):
    """Something that may be off by an amount of known distribution around 0."""

    def draw(self, slot: int) -> Draws:
        """Return draws, shape (draws,), independent of those of other slots."""


@dataclass(frozen=True)
class Student:
    """What varied within the window: an estimated deviation with few degrees of freedom."""

    deviation: float
    freedom: int

    def scaled(self, factor: float) -> Student:
        """Return it times a factor, above 0."""
        return Student(factor * self.deviation, self.freedom)

    def draw(self, slot: int) -> Draws:
        """Return draws."""
        return self.deviation * _student(self.freedom, slot)


@dataclass(frozen=True)
class Mixed:
    """What varied within the window, where several deviations are likely: one of them, each with its weight.

    Args:
        deviations: Of which one is true.
        weights: How likely each is, 1 together.
        freedom: Degrees of freedom each is known with.
    """

    deviations: tuple[float, ...]
    weights: tuple[float, ...]
    freedom: int

    def scaled(self, factor: float) -> Mixed:
        """Return it times a factor, above 0."""
        return Mixed(tuple(factor * each for each in self.deviations), self.weights, self.freedom)

    def draw(self, slot: int) -> Draws:
        """Return draws."""
        import numpy as np

        place = np.searchsorted(np.cumsum(self.weights)[:-1], _uniform(slot), side="right")
        return np.asarray(self.deviations)[place] * _student(self.freedom, slot)


@dataclass(frozen=True)
class Normal:
    """A known deviation."""

    deviation: float

    def draw(self, slot: int) -> Draws:
        """Return draws."""
        return self.deviation * _normal(slot)


@dataclass(frozen=True)
class Triangular:
    """The difference of two phases, each anywhere in a step: at most ``reach`` either way."""

    reach: float

    def draw(self, slot: int) -> Draws:
        """Return draws."""
        return self.reach * (_uniform(slot) - _uniform(slot + 100))


@dataclass(frozen=True)
class Bounded:
    """Anything up to ``reach`` either way."""

    reach: float

    def draw(self, slot: int) -> Draws:
        """Return draws."""
        return self.reach * (2 * _uniform(slot) - 1)


@dataclass(frozen=True)
class Rounded:
    """The mean of readings rounded to ``quantum``, stirred by noise of a deviation: a sawtooth it smooths.

    Without noise all readings are off alike, by anything up to half a quantum; noise of a third of a quantum all but
    removes that (Widrow and Kollar, Quantization Noise, 2008, chapter 5: the sawtooth's harmonics times the
    characteristic function of the noise).
    """

    quantum: float
    stirred: float

    def draw(self, slot: int) -> Draws:
        """Return draws."""
        import numpy as np

        phase, total = _uniform(slot), np.zeros(_DRAWS)
        if self.stirred < 0.02 * self.quantum:
            return self.quantum * (phase - 0.5)
        for k in range(1, _HARMONICS + 1):
            left = math.exp(-2 * (math.pi * k * self.stirred / self.quantum) ** 2)
            total += (-1) ** k * left / (math.pi * k) * np.sin(2 * math.pi * k * phase)
        return self.quantum * total


def half_width(errors: Sequence[Error]) -> float:
    """Return what the sum of independent errors stays within, either way, with 95 % probability; 0 without any."""
    import numpy as np

    if not errors:
        return 0.0
    total = sum((error.draw(slot) for slot, error in enumerate(errors)), np.zeros(_DRAWS))
    return float(np.quantile(np.abs(total), _SHARE))


@lru_cache(maxsize=32)
def _student(freedom: int, slot: int) -> Draws:
    import numpy as np

    return np.random.default_rng([freedom, slot, 0]).standard_t(freedom, _DRAWS)


@lru_cache(maxsize=32)
def _normal(slot: int) -> Draws:
    import numpy as np

    return np.random.default_rng([slot, 1]).standard_normal(_DRAWS)


@lru_cache(maxsize=32)
def _uniform(slot: int) -> Draws:
    import numpy as np

    return np.random.default_rng([slot, 2]).random(_DRAWS)
