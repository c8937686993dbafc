"""Which points of a GPU are searched: a few thousand of all it has, unless somebody names the knobs."""

from collections.abc import Mapping, Sequence
from itertools import product

from polythrottle.backends.nvml.dials import GPU_KNOB, MEM_KNOB, POWER_KNOB, PROFILE_KNOB, Dial, Dials
from polythrottle.errors import DeviceError, InvalidInput
from polythrottle.space import Knob, Level, SearchSpace
from polythrottle.units import unknown_knob

_MOST_CLOCKS = 50
_IDLE_SHARE = 0.25
"""Memory clocks below this share of the highest are states for idling: 810 of 10501 MHz, where 5001 can serve."""
_SAME_SHARE = 0.94
"""Memory clocks from this share of the highest on are one with it: under CUDA, GeForce and RTX cards run in performance
state P2, which holds memory a level below its highest, 10251 of 10501 MHz or 7601 of 8001."""


def space_of(dials: Dials, names: Sequence[str] | None, title: str, hint: str = "") -> SearchSpace:
    """Return the points to search.

    By default those of both clocks and of the power limit: every graphics clock if they are no more than 50 at a memory
    clock, else every second, third, … counted down from the highest; and the memory clocks that serve.

    Args:
        dials: The GPU's knobs.
        names: The knobs to search instead, with all their levels.
        title: The GPU's name, for messages.
        hint: What to say besides where a knob is off.

    Raises:
        UnknownName: If there is no such knob.
        DeviceError: If it is off; says why.
        InvalidInput: If one is named twice.
    """
    chosen = searched(dials, names, title, hint)
    space = _clocks(dials, [name for name in chosen if name in (GPU_KNOB, MEM_KNOB)], thin=names is None)
    for name in (POWER_KNOB, PROFILE_KNOB):
        if name in chosen:
            space = space * _single(dials.knobs[name])
    return space


def searched(dials: Dials, names: Sequence[str] | None, title: str, hint: str = "") -> list[str]:
    """Return the knobs that are searched; arguments and errors as those of `space_of`."""
    if names is not None:
        return _checked(dials, names, title, hint)
    return [name for name in (GPU_KNOB, MEM_KNOB, POWER_KNOB) if len(_levels(dials, name, thin=True)) > 1]


def _checked(dials: Dials, names: Sequence[str], title: str, hint: str) -> list[str]:
    if len(set(names)) != len(names):
        raise InvalidInput(f"a knob is named twice in {', '.join(names)}")
    for name in names:
        if name not in dials.knobs:
            raise unknown_knob(name, dials.knobs)
        if dials.knobs[name].off:
            raise DeviceError(f"{name} cannot be set on {title}: {dials.knobs[name].off}{hint}")
    return list(names)


def _single(dial: Dial) -> SearchSpace:
    knob = Knob(dial.name, tuple(dial.texts), label=dial.name == PROFILE_KNOB)
    return SearchSpace.grid([knob], {dial.name: dial.found})


def _clocks(dials: Dials, names: Sequence[str], *, thin: bool) -> SearchSpace:
    """Return the points of the clocks that are searched: only pairs the driver lists together."""
    if not names:
        return SearchSpace.unit()
    default = {name: dials.knobs[name].found for name in names}
    levels = [_levels(dials, name, thin=thin) for name in names]
    points = [dict(zip(names, each, strict=True)) for each in product(*levels)]
    return SearchSpace.of_points([point for point in points if _together(dials, point, thin=thin)], default)


def _together(dials: Dials, point: Mapping[str, Level], *, thin: bool) -> bool:
    if dials.refusal(point) is not None:
        return False
    memory = point.get(MEM_KNOB)
    return not (thin and isinstance(memory, int) and GPU_KNOB in point) or point[GPU_KNOB] in _kept(dials, memory)


def _levels(dials: Dials, name: str, *, thin: bool) -> list[Level]:
    dial = dials.knobs[name]
    if not thin or not dial.texts:
        return list(dial.texts)
    if name == MEM_KNOB:
        return [level for level in dial.texts if level == dial.found or _serves(float(level) / float(dial.found))]
    if name == GPU_KNOB:
        held = dials.knobs[MEM_KNOB].texts and _levels(dials, MEM_KNOB, thin=True)
        return sorted({clock for memory in held or [max(dials.clocks_hz)] for clock in _kept(dials, int(memory))})
    return list(dial.texts)


def _serves(share: float) -> bool:
    """Return whether a memory clock of this share of the highest is a state of its own to serve in."""
    return _IDLE_SHARE <= share < _SAME_SHARE


def _kept(dials: Dials, memory: int) -> Sequence[Level]:
    """Return the graphics clocks to search at one memory clock: evenly thinned, the highest always among them."""
    clocks = [clock for clock in dials.clocks_hz[memory] if clock in dials.knobs[GPU_KNOB].texts]
    every = -(-len(clocks) // _MOST_CLOCKS) or 1
    return clocks[::-1][::every]
