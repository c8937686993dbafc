"""What several GPUs have in common: the knobs and levels that all of them take, and those they do not share."""

from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType

from polythrottle.backends.nvml.dials import GPU_KNOB, MEM_KNOB, Dial, Dials
from polythrottle.space import Level
from polythrottle.units import show_level

Labelled = Mapping[str, Dials]
"""The dials of each GPU, by what messages call it."""


def common(every: Labelled) -> Dials:
    """Return the knobs that all GPUs have, each with the levels that all of them take.

    A knob's default is the one level all were found at; where they were found at different ones, the highest that is
    above none of them, which lowers the others.

    Args:
        every: Of one GPU at least.
    """
    clocks_hz = _shared_clocks(list(every.values()))
    first = next(iter(every.values()))
    knobs = {name: _shared(name, every, clocks_hz) for name in first.knobs}
    return Dials(MappingProxyType(knobs), clocks_hz)


def _shared_clocks(every: Sequence[Dials]) -> dict[int, tuple[int, ...]]:
    """Return the graphics clocks that all have at each memory clock all have.

    Where no memory clock can be set on all of them each stays at its own, and what counts is the table of that.
    """
    settable = [each.knobs[MEM_KNOB].texts for each in every]
    memories = [level for level in settable[0] if all(level in texts for texts in settable)]
    tables = {int(memory): [each.clocks_hz[int(memory)] for each in every] for memory in memories}
    if not tables:
        if not all(each.clocks_hz for each in every):
            return {}
        tops = [each.clocks_hz[max(each.clocks_hz)] for each in every]
        tables = {max(every[0].clocks_hz): tops}
    shared = {memory: tuple(sorted(set(rows[0]).intersection(*rows[1:]))) for memory, rows in tables.items()}
    return {memory: clocks for memory, clocks in shared.items() if clocks}


def _shared(name: str, every: Labelled, clocks_hz: Mapping[int, Sequence[int]]) -> Dial:
    dials = {label: each.knobs[name] for label, each in every.items()}
    first = next(iter(dials.values()))
    lacking = {label: dial.off for label, dial in dials.items() if dial.off}
    if lacking:
        return Dial(name, first.what, off=_told(lacking, len(every)))
    levels = [level for level in first.texts if all(level in dial.texts for dial in dials.values())]
    if name == MEM_KNOB:
        levels = [level for level in levels if level in clocks_hz]
    default = _default(name, levels, dials.values(), clocks_hz)
    if default is None:
        return Dial(name, first.what, off="these GPUs have no level of it in common, or were found at different ones")
    return Dial(name, first.what, {level: first.texts[level] for level in levels}, default)


def _default(
    name: str, levels: Sequence[Level], dials: Iterable[Dial], clocks_hz: Mapping[int, Sequence[int]]
) -> Level | None:
    found = {dial.found for dial in dials}
    if len(found) == 1 and found <= set(levels):
        return next(iter(found))
    if any(isinstance(level, str) for level in (*levels, *found)):
        return None
    numbers = [level for level in levels if not isinstance(level, str)]
    if name == GPU_KNOB:
        numbers = [level for level in numbers if clocks_hz and level in clocks_hz[max(clocks_hz)]]
    least = min(level for level in found if not isinstance(level, str))
    return max((level for level in numbers if level <= least), default=None)


def _told(reasons: Mapping[str, str], count: int) -> str:
    return (
        reasons[next(iter(reasons))] if len(reasons) == count and len(set(reasons.values())) == 1 else joined(reasons)
    )


def differing(name: str, every: Labelled) -> str:
    """Return which GPUs have which levels of a knob, in words; empty if all have the same and were found alike."""
    dials = {label: each.knobs[name] for label, each in every.items()}
    if len({(tuple(dial.texts), dial.default) for dial in dials.values()}) == 1:
        return ""
    return joined({label: _span(dial) for label, dial in dials.items()})


def _span(dial: Dial) -> str:
    levels = list(dial.texts)
    if not levels:
        return "none"
    first, last, found = (show_level(dial.name, level) for level in (levels[0], levels[-1], dial.found))
    return f"{first} to {last}, found at {found}" if len(levels) > 1 else first


def joined(texts: Mapping[str, str]) -> str:
    """Return what is said of each GPU in one line, those of which the same is said together.

    Args:
        texts: By what messages call a GPU, such as ``GPU 3``.
    """
    together: dict[str, list[str]] = {}
    for label, text in texts.items():
        together.setdefault(text, []).append(label)
    return "; ".join(f"{listed(labels)}: {text}" for text, labels in together.items())


def listed(labels: Sequence[str]) -> str:
    """Return GPUs in few words: ``GPU 0, GPU 1, GPU 2, GPU 5`` are ``GPU 0-2,5``."""
    numbers = [label.removeprefix("GPU ") for label in labels]
    if not all(number.isdecimal() for number in numbers):
        return ", ".join(labels)
    return f"GPU {spans(sorted(map(int, numbers)))}"


def spans(numbers: Sequence[int]) -> str:
    """Return ascending numbers as a URI names them: 0, 1, 2, 5 are ``0-2,5``."""
    parts: list[list[int]] = []
    for number in numbers:
        if parts and number == parts[-1][-1] + 1:
            parts[-1].append(number)
        else:
            parts.append([number])
    return ",".join(str(part[0]) if len(part) == 1 else f"{part[0]}-{part[-1]}" for part in parts)
