"""What goes wrong in a day, when and for how long: all of it from one seed."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

DAEMON, ACTUATOR, BOTH = "daemon killed", "actuator killed", "both killed"
BLIND, REFUSING, FOREIGN, FULL = "sensors lost", "board refuses", "somebody else writes", "disk full"
WALL, SUSPEND, STALL = "wall clock jumps", "machine sleeps", "daemon stands still"
READONLY, STARVED, RESET = "disk turns read-only", "no descriptors left", "board's driver starts anew"
LEASE, RECORD, FOLDER = "lease or token lost", "record damaged", "folder of records deleted"
SPANS_S: dict[str, tuple[float, float]] = {
    DAEMON: (1, 20),
    ACTUATOR: (1, 20),
    BOTH: (1, 20),
    BLIND: (5, 60),
    REFUSING: (5, 60),
    FOREIGN: (1, 30),
    FULL: (10, 120),
    WALL: (0, 0),
    SUSPEND: (5, 3600),
    STALL: (2, 40),
    READONLY: (10, 120),
    STARVED: (5, 60),
    RESET: (0, 0),
    LEASE: (0, 0),
    RECORD: (0, 0),
    FOLDER: (0, 0),
}
"""How long each lasts, drawn evenly between; a machine that sleeps does so in no time of its own."""


@dataclass(frozen=True)
class Hit:
    """A fault.

    Args:
        at_s: When it begins, on the world's clock.
        kind: Which.
        span_s: How long it lasts.
        draw: A number between 0 and 1 that decides what is left open.
    """

    at_s: float
    kind: str
    span_s: float
    draw: float

    @property
    def until_s(self) -> float:
        """When it is over, on the world's clock, in which nothing passes while the machine sleeps."""
        return self.at_s + (0.0 if self.kind in (SUSPEND, WALL) else self.span_s)


def drawn(seed: int, hours: float, kinds: Sequence[str] = tuple(SPANS_S), per_hour: float = 60.0) -> list[Hit]:
    """Return the faults of a day: as many as are asked for, at times drawn evenly, each kind as likely as another."""
    random = np.random.default_rng([seed, 0xFA17])
    times = sorted(random.uniform(0, hours * 3600, round(hours * per_hour)).tolist())
    hits = []
    for at_s in times:
        kind = kinds[int(random.integers(len(kinds)))]
        hits.append(Hit(at_s, kind, float(random.uniform(*SPANS_S[kind])), float(random.random())))
    return hits
