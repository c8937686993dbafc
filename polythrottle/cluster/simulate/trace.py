"""Recorded clusters: how many machines a provider kept running at each moment, read in place from a table."""

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from statistics import median

from polythrottle.errors import BadFile, InvalidInput
from polythrottle.tables import read

_TIME, _COUNT = "time_s", "n_nodes"
_SHORTEST_S = 60.0
_MOST = 100_000


@dataclass(frozen=True)
class Trace:
    """Machines that ran along time, as recorded.

    Attributes:
        name: Where it comes from, for people.
        times_s: Rising times of the changes from the beginning of the record, in seconds; the first is 0.
        counts: Machines from each of them on.
        ends_s: How long the record is, in seconds.
        assumed_s: How much of that its last row is only taken to last, in seconds; 0 where the record says it itself.
    """

    name: str
    times_s: tuple[float, ...]
    counts: tuple[int, ...]
    ends_s: float
    assumed_s: float = 0.0

    def __post_init__(self) -> None:
        if not self.times_s or len(self.times_s) != len(self.counts) or self.times_s[0] != 0:
            raise InvalidInput("a trace begins at 0 s and has a number of machines for each time")
        if any(a >= b for a, b in pairwise(self.times_s)) or self.ends_s <= self.times_s[-1]:
            raise InvalidInput("the times of a trace rise, and it ends after its last change")
        if min(self.counts) < 0 or not max(self.counts):
            raise InvalidInput("a trace has at least one machine at some time, and never fewer than none")

    @property
    def most(self) -> int:
        """Return the most machines that ran together."""
        return max(self.counts)

    @property
    def losses(self) -> int:
        """Return how many machines were taken away."""
        return sum(max(0, before - after) for before, after in pairwise(self.counts))

    @property
    def bursts(self) -> int:
        """Return at how many moments machines were taken away: what a job sees as one interruption each."""
        return sum(before > after for before, after in pairwise(self.counts))

    @property
    def machine_s(self) -> float:
        """Return the machine-seconds that were had."""
        spans = (b - a for a, b in pairwise((*self.times_s, self.ends_s)))
        return sum(count * span for count, span in zip(self.counts, spans, strict=True))


def read_trace(file: Path) -> Trace:
    """Return the trace in a table with the columns ``time_s`` and ``n_nodes`` (CSV, or CSV in gzip).

    Rows of the same time are one change. A machine-by-machine log that counts after each event is read the same way.
    A last row that repeats the number before it says when the record ends. One that changes it would last no time, and
    its losses would be none: it is taken to last as long as the middle one of the rows before it.

    Raises:
        BadFile: If the file cannot be read or is no such table; says which line is wrong.
    """
    seen: dict[float, int] = {}
    for cells in read(file, (_TIME, _COUNT)).rows():
        time_s, number = cells.number(_TIME, 0.0), cells.number(_COUNT, 0.0)
        if time_s < next(reversed(seen), time_s):
            raise cells.bad(_TIME, f"goes back to {time_s:g}; rows must be in the order of time")
        if number != int(number) or number > _MOST:
            raise cells.bad(_COUNT, f"is {number:g}; it needs a whole number of machines, at most {_MOST:,}")
        seen[time_s] = int(number)
    if len(seen) < 2:
        raise BadFile(f"{file} holds no trace: at least two different times are needed, found {len(seen)}")
    return _trace(file, seen)


def _trace(file: Path, seen: Mapping[float, int]) -> Trace:
    begins_s, last_s = min(seen), max(seen)
    if last_s - begins_s < _SHORTEST_S:
        raise BadFile(f"{file} holds no trace: it lasts {last_s - begins_s:g} s; at least {_SHORTEST_S:g} s are needed")
    kept: dict[float, int] = {}
    for time_s, count in seen.items():
        if not kept or count != next(reversed(kept.values())):
            kept[time_s - begins_s] = count
    length_s = last_s - begins_s
    assumed_s = median(b - a for a, b in pairwise(seen)) if length_s in kept else 0.0
    try:
        return Trace(file.name, tuple(kept), tuple(kept.values()), length_s + assumed_s, assumed_s)
    except InvalidInput as error:
        raise BadFile(f"{file} holds no trace: {error}") from error
