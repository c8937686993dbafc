"""The guard of a latency limit: fine-tuning in smaller slices when measured latencies come near it, then in none."""

from dataclasses import dataclass, replace

from polythrottle.errors import InvalidInput

NEAR = 0.9
"""A latency beyond this share of the limit is near it."""
WINDOW = 200
"""So many requests are looked at together."""
_SHARE = 0.01
_PAUSE_S, _LONGEST_S = 5.0, 300.0


@dataclass(frozen=True)
class Guard:
    """What may be fine-tuned after the latencies seen so far.

    Once more than 1 % of a window is near the limit, slices are halved; where they cannot be halved any more, there is
    a pause, each twice as long as the last. A whole window without any doubles slices again.

    Args:
        slo_s: The limit.
        sizes: Samples of the slices there are, ascending; at least one.
        place: Of the largest slice that may be used, among the sizes.
        seen: Requests of this window.
        near: Of those, near the limit.
        pause_s: How long the next pause is.
        until_s: When the last pause ends.
        shrunk: How often slices were made smaller.
        pauses: How often fine-tuning was paused.

    Raises:
        InvalidInput: If the limit is not above 0 s, or there are no sizes.
    """

    slo_s: float
    sizes: tuple[int, ...]
    place: int = -1
    seen: int = 0
    near: int = 0
    pause_s: float = _PAUSE_S
    until_s: float = 0.0
    shrunk: int = 0
    pauses: int = 0

    def __post_init__(self) -> None:
        if not self.slo_s > 0 or not self.sizes:
            raise InvalidInput("a guard needs a limit above 0 s and sizes of slices")
        if self.place < 0:
            object.__setattr__(self, "place", len(self.sizes) - 1)

    def most(self, now_s: float) -> int:
        """Return the samples of the largest slice that may be started now; 0 in a pause."""
        return 0 if now_s < self.until_s else self.sizes[self.place]

    def after(self, latency_s: float, now_s: float) -> "Guard":
        """Return the guard after one more answered request; in a pause, none counts: fine-tuning cannot be why."""
        if now_s < self.until_s:
            return self
        moved = replace(self, seen=self.seen + 1, near=self.near + (latency_s > NEAR * self.slo_s))
        if moved.near > _SHARE * WINDOW:
            return moved._tightened(now_s)
        if moved.seen < WINDOW:
            return moved
        return moved._eased() if not moved.near else replace(moved, seen=0, near=0)

    def _tightened(self, now_s: float) -> "Guard":
        if self.place:
            half = max(i for i in range(self.place) if 2 * self.sizes[i] <= self.sizes[self.place] or i == 0)
            return replace(self, place=half, seen=0, near=0, shrunk=self.shrunk + 1)
        longer_s = min(_LONGEST_S, 2 * self.pause_s)
        paused = replace(self, until_s=now_s + self.pause_s, pause_s=longer_s, pauses=self.pauses + 1)
        return replace(paused, seen=0, near=0)

    def _eased(self) -> "Guard":
        fits = [i for i, size in enumerate(self.sizes) if size <= 2 * self.sizes[self.place]]
        return replace(self, place=max(fits), seen=0, near=0, pause_s=_PAUSE_S)
