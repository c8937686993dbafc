"""Whether machines that are ready are let in now, or with the next interruption, when all stand still anyway."""

from math import inf

from polythrottle.errors import InvalidInput


def admitted(ready: int, training: int, interruptions_per_s: float, pause_s: float) -> bool:
    """Return whether to form the group anew for machines that are ready.

    They work for the time until the next interruption, which would let them in for nothing; all stand still for the
    pause. So it pays where ready × time > (training + ready) × pause.

    Args:
        ready: Machines that could join.
        training: Machines that train now.
        interruptions_per_s: How often the group is formed anew anyway, per second.
        pause_s: How long all stand still for it, in seconds, the checkpoint before it included.

    Raises:
        InvalidInput: If a number is negative.
    """
    if min(ready, training, interruptions_per_s, pause_s) < 0:
        raise InvalidInput("machines, rates and pauses are at least 0")
    quiet_s = 1 / interruptions_per_s if interruptions_per_s else inf
    return ready > 0 and (training == 0 or ready * quiet_s > (training + ready) * pause_s)
