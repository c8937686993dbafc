"""What probing a board found about one knob: its levels, or why it is off."""

from collections.abc import Container, Iterable, Sequence
from dataclasses import dataclass

from polythrottle.actuation.limits import Limits
from polythrottle.findings import Finding
from polythrottle.space import Level
from polythrottle.units import show_level

KIND = "jetson"
MOST_SEARCHED = 32
"""Levels of one knob that are searched; all of them may be applied."""


@dataclass(frozen=True)
class Capability:
    """One knob as it was found on this board.

    Args:
        name: The knob, in SI.
        levels: Every level that may be applied, ascending; empty if the knob is off.
        default: The level that leaves the board as it was found.
        reason: Why it is off, or what there is to know about its levels.
        remedy: What the reader can do about it.
    """

    name: str
    levels: tuple[Level, ...] = ()
    default: Level = ""
    reason: str = ""
    remedy: str = ""

    @property
    def works(self) -> bool:
        """Whether the knob can be set."""
        return bool(self.levels)

    @property
    def finding(self) -> Finding:
        """The knob in one line."""
        if not self.works:
            return Finding(self.name, False, self.reason, self.remedy)
        first, last = (show_level(self.name, level) for level in (self.levels[0], self.levels[-1]))
        span = f"{len(self.levels)} levels, {first} to {last}"
        return Finding(self.name, True, f"{span}; {self.reason}" if self.reason else span, self.remedy)


def within(name: str, table: Iterable[int], low: int, high: int, limits: Limits) -> tuple[int, ...]:
    """Return the levels of a table between the limits found on the board and within the administrator's.

    Args:
        name: The knob.
        table: What the driver offers, in the knob's SI unit.
        low: The lower limit that was found, in the same unit.
        high: The upper limit that was found.
        limits: The administrator's.
    """
    return limits.within(KIND, name, sorted({level for level in table if low <= level <= high}))


def thinned(levels: Sequence[Level], kept: Container[Level] = ()) -> tuple[Level, ...]:
    """Return the levels of a knob to search: all up to 32, else every second, third, … counted down from the highest.

    The lowest stays, and so do those in ``kept``. Thor's 284 clocks of the CPU beside 170 of the GPU are 16 million
    points; 32 of each lie 3 % of the highest apart, which is finer than a study can tell apart.

    Args:
        levels: Ascending.
        kept: Levels that stay whatever else does, such as those of the vendor's power modes.
    """
    every = -(-len(levels) // MOST_SEARCHED)
    chosen = {*levels[::-1][:: every or 1], *levels[:1]}
    return tuple(level for level in levels if level in chosen or level in kept)


def off(names: Iterable[str], reason: str, remedy: str = "") -> tuple[Capability, ...]:
    """Return knobs that are off for one reason."""
    line = " ".join(reason.split())
    return tuple(Capability(name, reason=line, remedy=remedy) for name in names)
