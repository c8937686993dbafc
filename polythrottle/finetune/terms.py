"""What serving and fine-tuning side by side is to keep to: limit, requests, policy, time, hours and power."""

from dataclasses import dataclass

from polythrottle.arrivals import Arrivals
from polythrottle.errors import InvalidInput
from polythrottle.finetune.hours import Hours
from polythrottle.finetune.ration import Ration
from polythrottle.finetune.scheduler import policy

GENTLE = ("interleave", "off-peak")
"""Policies that keep a limit: slices stop in the middle for requests, and less is dared when latencies come near it."""
ALONE = "none"
"""In place of a policy: nothing is fine-tuned."""
LONGEST_S = 10 * 365.25 * 86400.0
"""Nothing is run or planned for longer than ten years."""


@dataclass(frozen=True)
class Terms:
    """What is to be kept to.

    Args:
        slo_s: The limit of each request from its arrival.
        arrivals: When they come; not a closed loop.
        policy: Who gets the device next; `ALONE` for inference alone.
        seconds: How long requests come; None until the job is done.
        seed: Of the arrivals.
        hours: At which the policy ``off-peak`` fine-tunes; None to go by the load.
        power_w: Mean power of both kinds of work at most, for which fine-tuning waits; None for any.
        day_s: Time of day at which a simulated run begins, since midnight; a real one goes by the clock.

    Raises:
        InvalidInput: If requests come in a closed loop, a time or power is not positive, a time is longer than
            `LONGEST_S`, hours are given to another policy than ``off-peak``, or nothing is fine-tuned that a power
            could hold back.
        UnknownName: If there is no such policy.
    """

    slo_s: float
    arrivals: Arrivals
    policy: str = "interleave"
    seconds: float | None = None
    seed: int = 0
    hours: Hours | None = None
    power_w: float | None = None
    day_s: float = 0.0

    def __post_init__(self) -> None:
        if self.arrivals.closed:
            raise InvalidInput("requests must come by the clock: write for example poisson:30/s")
        if not all(0 < each_s <= LONGEST_S for each_s in (self.slo_s, self.seconds) if each_s is not None):
            raise InvalidInput("a limit and a length are above 0 s, and ten years (3.16e8 s) at most")
        if self.policy != ALONE:
            policy(self.policy, self.hours)
        elif self.hours is not None or self.power_w is not None:
            raise InvalidInput("inference alone fine-tunes nothing that hours or a power could hold back")
        if self.power_w is not None:
            Ration(self.power_w)

    @property
    def rate_per_s(self) -> float:
        """Requests per second in the long run."""
        assert self.arrivals.offered_per_s is not None
        return self.arrivals.offered_per_s

    @property
    def ration(self) -> Ration | None:
        """The power that is to be kept to; None if any may be drawn."""
        return None if self.power_w is None else Ration(self.power_w)

    def check_hours(self, day_s: float) -> None:
        """Check that a run that begins at a time of day lasts until its hours begin.

        Raises:
            InvalidInput: If it ends before.
        """
        if self.hours is None or self.seconds is None:
            return
        if not self.hours.within_s(day_s, self.seconds):
            raise InvalidInput(
                f"nothing would be fine-tuned: {self.hours} begins in {self.hours.wait(day_s)}, "
                "after this has ended; let it go on for longer, or take other hours"
            )
