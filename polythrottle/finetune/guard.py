"""The guard of a latency limit: fine-tuning aims below it when measured latencies come near it, then stops a while."""

from dataclasses import dataclass, replace
from typing import Any

from polythrottle.errors import InvalidInput

NEAR = 0.9
"""A latency beyond this share of the limit is near it."""
WINDOW = 200
"""So many requests are looked at together."""
AIMS = (1.0, 0.75, 0.5, 0.35, 0.25)
"""Shares of the limit that may be aimed at; after the last comes a pause."""
_MOST_NEAR = 2
"""So many of a window may be near the limit."""
_CALM = 0.0025
"""It is calm while no more than this share of the requests is near the limit."""
_PATIENT = 16
"""For so many windows at most it must have been calm before more is dared."""
_PAUSE_S, _LONGEST_S = 5.0, 300.0


@dataclass(frozen=True)
class Guard:
    """What fine-tuning may aim at after the latencies seen so far.

    Predictions say when a slice must end so that requests are in time. Where they are too bright, because something
    else runs on the machine, requests come near the limit: once more than two of a window do, less is aimed at, and
    where that is the least already, there is a pause, each twice as long as the last. What had come before such a
    change says nothing of it and is not counted. After it had to be careful, the guard waits twice as long as the last
    time until it dares more again: as many requests, calm all the while.

    Args:
        slo_s: The limit.
        place: Of what is aimed at, in `AIMS`.
        seen: Requests of this window.
        near: Of those, near the limit.
        calm: Requests since the last change.
        stirred: Of those, near the limit.
        patience: For how many requests it must be calm before more is dared.
        since_s: When the last change was.
        pause_s: How long the next pause is.
        until_s: When the last pause ends.
        shrunk: How often less was aimed at.
        pauses: How often fine-tuning was paused.

    Raises:
        InvalidInput: If the limit is not above 0 s.
    """

    slo_s: float
    place: int = 0
    seen: int = 0
    near: int = 0
    calm: int = 0
    stirred: int = 0
    patience: int = WINDOW
    since_s: float = 0.0
    pause_s: float = _PAUSE_S
    until_s: float = 0.0
    shrunk: int = 0
    pauses: int = 0

    def __post_init__(self) -> None:
        if not self.slo_s > 0:
            raise InvalidInput("a guard needs a limit above 0 s")

    @property
    def aim_s(self) -> float:
        """The latency that fine-tuning may plan with, at most the limit."""
        return AIMS[self.place] * self.slo_s

    def paused(self, now_s: float) -> bool:
        """Return whether nothing is to be fine-tuned now."""
        return now_s < self.until_s

    def after(self, latency_s: float, now_s: float) -> "Guard":
        """Return the guard after one more answered request; in a pause, none counts: fine-tuning cannot be why."""
        if self.paused(now_s) or now_s - latency_s < self.since_s:
            return self
        near = latency_s > NEAR * self.slo_s
        moved = replace(
            self, seen=self.seen + 1, near=self.near + near, calm=self.calm + 1, stirred=self.stirred + near
        )
        if moved.near > _MOST_NEAR:
            return moved._careful(now_s)
        if moved.seen >= WINDOW:
            moved = replace(moved, seen=0, near=0)
        return moved._daring(now_s) if moved._is_calm(now_s) else moved

    def _is_calm(self, now_s: float) -> bool:
        """Return whether it was calm for long enough, in requests or, where few come, in time."""
        enough = self.calm >= self.patience or now_s - self.since_s >= _LONGEST_S
        return enough and self.stirred <= _CALM * self.calm

    def _careful(self, now_s: float) -> "Guard":
        patience = min(2 * self.patience, _PATIENT * WINDOW)
        if self.place + 1 < len(AIMS):
            return self._changed(now_s, place=self.place + 1, patience=patience, shrunk=self.shrunk + 1)
        until_s, longer_s = now_s + self.pause_s, min(_LONGEST_S, 2 * self.pause_s)
        told = {"pause_s": longer_s, "until_s": until_s, "pauses": self.pauses + 1}
        return self._changed(until_s, patience=patience, **told)

    def _daring(self, now_s: float) -> "Guard":
        """Aim a step higher; at the limit already, forget some of the care."""
        patience = self.patience if self.place else max(WINDOW, self.patience // 2)
        return self._changed(now_s, place=max(0, self.place - 1), patience=patience, pause_s=_PAUSE_S)

    def _changed(self, since_s: float, **what: Any) -> "Guard":
        return replace(self, seen=0, near=0, calm=0, stirred=0, since_s=since_s, **what)
