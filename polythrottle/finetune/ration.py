"""A mean power that both kinds of work are to stay within: fine-tuning waits while it has been exceeded."""

import math
from dataclasses import dataclass, replace

from polythrottle.errors import InvalidInput

_SPAN_S = 10.0
"""For so long at most power may be saved up or owed."""
_STOP, _GO = 0.1, 0.2
"""Shares of that: below the first fine-tuning waits, so that what runs until somebody looks again is saved already;
from the second on it goes on, so that it does not stop and go every second."""


@dataclass(frozen=True)
class Ration:
    """What may be drawn on average, and what was left of it lately.

    Inference is never held back: where it alone draws more, fine-tuning waits and the mean is above the ration. What
    was not drawn is kept for ten seconds' worth at most, what was drawn too much is owed for as much.

    Args:
        power_w: Mean of both kinds of work, everything the device draws included.
        spare_j: Left of what might have been drawn; negative where it was more.
        open: Whether fine-tuning may go on.

    Raises:
        InvalidInput: If the power is not positive and finite.
    """

    power_w: float
    spare_j: float = 0.0
    open: bool = False

    def __post_init__(self) -> None:
        if not 0 < self.power_w < math.inf:
            raise InvalidInput(f"a power is above 0 W and finite, not {self.power_w:g} W")

    def after(self, joules: float, duration_s: float) -> "Ration":
        """Return the ration after some time in which the device drew some energy."""
        most_j = self.power_w * _SPAN_S
        spare_j = min(most_j, max(-most_j, self.spare_j + self.power_w * duration_s - joules))
        return replace(self, spare_j=spare_j, open=spare_j >= (_STOP if self.open else _GO) * most_j)
