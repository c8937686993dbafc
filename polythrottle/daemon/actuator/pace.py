"""How often something may be done: a token bucket."""

_LEAST_S = 0.001  # nobody can wait for less, and rounding must not refuse who has waited


class Pace:
    """So much a second, and some at once.

    Args:
        per_s: How often a second in the long run.
        burst: How often at once.
    """

    def __init__(self, per_s: float, burst: int) -> None:
        self._per_s, self._burst = per_s, burst
        self._left, self._at_s = float(burst), 0.0

    def wait_s(self, now_s: float) -> float:
        """Count one and return 0; if that is one too many, count none and return in how many seconds it is not.

        Args:
            now_s: On a clock that never goes back.
        """
        self._left = min(self._burst, self._left + (now_s - self._at_s) * self._per_s)
        self._at_s = now_s
        if self._left < 1:
            return max(_LEAST_S, (1 - self._left) / self._per_s)
        self._left -= 1
        return 0.0
