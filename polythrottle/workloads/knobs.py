"""The two knobs a workload on a processor can have, batch size and threads, and their levels."""

import os
from collections.abc import Sequence

from polythrottle.errors import InvalidInput, KnobRejected
from polythrottle.space import Knob, OperatingPoint, SearchSpace

BATCH_SIZE = "batch_size"
THREADS = "threads"
_BATCH_SIZES = (1, 2, 4, 8, 16)
_MOST, _MOST_THREADS = 1_000_000, 64


def batch_knob(levels: Sequence[int] | None) -> Knob:
    """Return the knob for items per query.

    Raises:
        InvalidInput: If a level is below one or repeated, or there is none.
    """
    return _counts(BATCH_SIZE, _BATCH_SIZES if levels is None else levels)


def threads_knob(levels: Sequence[int] | None) -> Knob:
    """Return the knob for threads that share one query.

    Raises:
        InvalidInput: If a level is below one or repeated, there is none, or one is so high that it only costs memory.
    """
    most = max(_MOST_THREADS, 4 * processors())
    if levels is not None and max(levels, default=0) > most:
        raise InvalidInput(f"{max(levels)} threads are too many for {processors()} processors; use at most {most}")
    return _counts(THREADS, _powers_up_to(processors()) if levels is None else levels)


def processors() -> int:
    """Return how many processors this process may run on."""
    return len(os.sched_getaffinity(0))


def _powers_up_to(count: int) -> tuple[int, ...]:
    return tuple(sorted({2**power for power in range(count.bit_length())} | {count}))


def _counts(name: str, levels: Sequence[int]) -> Knob:
    for level in levels:
        if not 1 <= level <= _MOST:
            raise InvalidInput(f"{name} must be at least 1 and at most {_MOST:,}, not {level}")
    return Knob(name, tuple(levels))


def grid_of(knobs: Sequence[Knob]) -> SearchSpace:
    """Return the space of these knobs, its default what runs untuned: the smallest batch, the most threads."""
    default = {knob.name: knob.levels[-1 if knob.name == THREADS else 0] for knob in knobs}
    for knob in knobs:
        if knob.name == THREADS and processors() in knob.levels:
            default[THREADS] = processors()
    return SearchSpace.grid(knobs, default)


def chosen(space: SearchSpace, point: OperatingPoint) -> OperatingPoint:
    """Return ``point`` with the default's level for every knob it leaves out.

    Raises:
        KnobRejected: If that is not a point of the space.
    """
    wanted = space.default.moved(point)
    if wanted not in space:
        known = ", ".join(f"{knob.name} in {list(knob.levels)}" for knob in space.knobs) or "no knobs"
        raise KnobRejected(f"the workload cannot run with {dict(point)}; it has {known}")
    return wanted


def count(point: OperatingPoint, name: str) -> int:
    """Return the level of a count in a point, 1 if the point has no such knob."""
    return int(point.get(name, 1))
