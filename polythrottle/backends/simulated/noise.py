"""Noise of measurements: lognormal, with stragglers that come in clusters."""

import math
from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

_BLOCK = 256
_ENTER, _STAY = 0.008, 0.6
"""Chance that a query straggles after one that did not, and after one that did.

A miss follows a miss with up to 74 % on Orin at fixed clocks, arXiv 2606.16106; these values are assumed.
"""
_DELAY_LEAST, _DELAY_MEAN = 6.0, 4.0
"""A straggler takes longer by this many times the noise at least, and by an exponential of this mean more; assumed."""
_WINDOW_TIME = 0.5
"""Spread of a window's time over that of its power; assumed."""


class Noise:
    """One stream of noise: the factors of a window and of its queries, a function of seed and number only.

    Args:
        level: Standard deviation of the log of a query's time and of a window's power; 0 is silence.
        seed: Of all streams.
        number: Which stream.
    """

    def __init__(self, level: float, seed: int, number: int) -> None:
        self._level = level
        self._windows = np.random.default_rng([seed, number, 0])
        self._queries = np.random.default_rng([seed, number, 1])
        self._straggles = False

    def window(self) -> tuple[float, float]:
        """Return the factors on time and on power of the next window; both have mean 1."""
        time, power = self._windows.standard_normal(2).tolist()
        return _lognormal(time, self._level * _WINDOW_TIME), _lognormal(power, self._level)

    def queries(self) -> Iterator[float]:
        """Yield the factor on the time of one query after another."""
        while True:
            yield from self._block(_BLOCK).tolist()

    def _block(self, size: int) -> NDArray[np.float64]:
        jitter = np.exp(self._level * self._queries.standard_normal(size))
        chance = self._queries.random(size)
        delay = _DELAY_LEAST + _DELAY_MEAN * self._queries.standard_exponential(size)
        return np.asarray(jitter * (1.0 + self._level * delay * self._stragglers(chance)), dtype=np.float64)

    def _stragglers(self, chance: NDArray[np.float64]) -> NDArray[np.bool_]:
        found = np.zeros(len(chance), dtype=bool)
        for i, value in enumerate(chance.tolist()):
            self._straggles = value < (_STAY if self._straggles else _ENTER)
            found[i] = self._straggles
        return found


def _lognormal(normal: float, spread: float) -> float:
    return math.exp(spread * normal - spread * spread / 2)


def typical(level: float) -> NDArray[np.float64]:
    """Return a large sample of query factors at a noise level, from which statistics of the stream follow."""
    return Noise(level, 0, 0)._block(50_000) if level else np.ones(1)
