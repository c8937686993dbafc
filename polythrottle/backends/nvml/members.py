"""The members of a group of GPUs: which GPUs a name means, and the knobs and levels that all of them take."""

from __future__ import annotations

import re
import typing
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from types import MappingProxyType

from polythrottle.actuation.drivers.nvml import Library
from polythrottle.backends.nvml.gpu import Gpu, find, refuse_mig, uuids_by_index
from polythrottle.backends.nvml.knobs import GPU_KNOB, MEM_KNOB, Dial, Dials
from polythrottle.domain.backports import removeprefix
from polythrottle.domain.errors import DeviceError, InvalidInput, UnknownName
from polythrottle.domain.space import Level
from polythrottle.domain.units import show_level

# What several GPUs have in common: the knobs and levels that all of them take, and those they do not share.

Labelled = typing.Mapping[str, Dials]
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
    if len(reasons) == count and len(set(reasons.values())) == 1:
        return reasons[next(iter(reasons))]
    return joined(reasons)


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
    if len(levels) > 1:
        return f"{first} to {last}, found at {found}"
    return first


def joined(texts: Mapping[str, str]) -> str:
    """Return what is said of each GPU in one line, those of which the same is said together.

    Args:
        texts: By what messages call a GPU, such as ``GPU 3``.
    """
    together: dict[str, list[str]] = {}
    for label, text in texts.items():
        together.setdefault(text, []).append(label)
    return "; ".join(f"{joined_labels(labels)}: {text}" for text, labels in together.items())


def joined_labels(labels: Sequence[str]) -> str:
    """Return GPUs in few words: ``GPU 0, GPU 1, GPU 2, GPU 5`` are ``GPU 0-2,5``."""
    numbers = [removeprefix(label, "GPU ") for label in labels]
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


# Which GPUs a name means: one, a list, a range, or all of them.

ALL = "all"
_DIGITS = 6
_RANGE = re.compile(rf"(\d{{1,{_DIGITS}}})-(\d{{1,{_DIGITS}}})")


def means_several(name: str) -> bool:
    """Return whether a name is that of a group: ``all``, ``0-7``, ``0,2`` or UUIDs with commas between."""
    return name == ALL or "," in name or _RANGE.fullmatch(name) is not None


def check_name(name: str) -> None:
    """Refuse a name that no GPU and no group can have, whatever the driver says.

    Raises:
        InvalidInput: If it is malformed.
    """
    for part in name.split(",") if name not in ("", ALL) else ():
        span = _RANGE.fullmatch(part)
        if span is not None and int(span[1]) > int(span[2]):
            raise _counts_down(name, span)
        if span is None and not (part.isdecimal() or part.startswith(("GPU-", "MIG-"))):
            raise InvalidInput(
                f"nvml:{name[:80]} names no GPU; write nvml:0, nvml:0-7, nvml:0,2, nvml:all, or a UUID: nvml:GPU-…"
            )


def _counts_down(name: str, span: re.Match[str]) -> InvalidInput:
    return InvalidInput(f"nvml:{name[:80]} counts down; write {int(span[2])}-{int(span[1])}")


def chosen(library: Library, name: str) -> Mapping[str, str]:
    """Return the UUIDs of the GPUs a group's name means, each with what messages call it, such as ``GPU 3``.

    In the order of the UUIDs, for indexes move.

    Raises:
        InvalidInput: If the name is malformed, or names a GPU twice.
        UnknownName: If there is no such GPU.
        DeviceError: If there is no driver or no GPU, or one that is meant does not answer.
    """
    with library:
        known = uuids_by_index(library)
        count = int(library.call("nvmlDeviceGetCount"))
    if not count:
        raise DeviceError("the NVIDIA driver is here, but it finds no GPU")
    indexes = {uuid: index for index, uuid in known.items()}
    named: dict[str, str] = {}
    parts = list(_parts(name, count))
    if lost := [int(each) for each in parts if each.isdecimal() and each not in known and int(each) < count]:
        gone = spans(sorted(set(lost)))
        others = spans(sorted(map(int, known))) or "none"
        raise DeviceError(f"GPU {gone} does not answer, as one that has fallen off the bus; those that do: {others}")
    for part in parts:
        uuid = known.get(part, part)
        if uuid not in indexes:
            raise UnknownName("GPU", part, known if part.isdecimal() else (*known, *indexes))
        if uuid in named:
            raise InvalidInput(f"nvml:{name[:80]} names GPU {indexes[uuid]} twice")
        named[uuid] = f"GPU {indexes[uuid]}"
    return dict(sorted(named.items()))


def uuids(name: str) -> tuple[str, ...]:
    """Return the UUIDs of the GPUs a name means at this moment, of one GPU too.

    Raises:
        PolythrottleError: As `chosen` and `find` do.
    """
    library = Library()
    if means_several(name):
        return tuple(chosen(library, name))
    return (find(library, name).uuid,)


@dataclass(frozen=True)
class NamedGpus:
    """Which GPUs a name means at this moment, whether they answer or not.

    Args:
        uuids: Of those that are known: the driver numbers them, or the name has them.
        answering: Of every GPU that answers.
        silent: Whether one is meant by its number that does not answer, so that nobody knows which it is.
    """

    uuids: tuple[str, ...]
    answering: frozenset[str]
    silent: bool

    @classmethod
    def of(cls, name: str) -> NamedGpus:
        """Return what a name means; no name is the only GPU.

        Raises:
            InvalidInput: If it is malformed, or there are several and none is named.
            DeviceError: If there is no driver.
        """
        library = Library()
        with library:
            known = uuids_by_index(library)
            count = int(library.call("nvmlDeviceGetCount"))
        if not name and count != 1:
            raise InvalidInput(f"there are {count} GPUs; say which, such as nvml:0")
        parts = list(_parts(name or "0", count))
        unknown = [part for part in parts if part.isdecimal() and part not in known]
        return cls(
            tuple(dict.fromkeys(known.get(part, part) for part in parts if part not in unknown)),
            frozenset(known.values()),
            any(int(part) < count for part in unknown),
        )


def part(name: str, group: str) -> tuple[str, ...]:
    """Return the UUIDs of some GPUs of a group, in order, whether or not the others of it answer now.

    Args:
        name: Of those GPUs, or of one; "" is the only one there is.
        group: Name of the group.

    Returns:
        Nothing if one of them is not in it.

    Raises:
        InvalidInput: If the name is malformed, or names a GPU twice.
        DeviceError: If there is no driver, or one of them is split by MIG or does not answer.
    """
    library = Library()
    with library:
        known = uuids_by_index(library)
        if not name and len(known) != 1:
            return ()
        count = int(library.call("nvmlDeviceGetCount"))
        inside = [known.get(each, each) for each in _parts(group, count)]
        lost = [each for each in inside if each not in known.values()]
        named = [known.get(each, each) for each in _parts(name or next(iter(known)), count)]
        for each in named:
            if each in lost or (lost and each.startswith("GPU-") and each not in known.values()):
                # Which UUID a GPU has that does not answer nobody can tell.
                others = joined_labels([f"GPU {number}" if number.isdecimal() else number for number in lost])
                raise DeviceError(f"nvml:{name[:80]} does not answer now, or is no GPU here; what does not: {others}")
        if not set(named) <= set(inside):
            return ()
        for each in named:
            if named.count(each) > 1:
                index = next(number for number, uuid in known.items() if uuid == each)
                raise InvalidInput(f"nvml:{name[:80]} names GPU {index} twice")
            refuse_mig(Gpu(library, each))
    return tuple(sorted(named))


def usable(group: str) -> str:
    """Return the numbers of those GPUs of a group that answer and are not split by MIG, as a URI names them.

    Raises:
        InvalidInput: If the name is malformed.
        DeviceError: If there is no driver.
    """
    library = Library()
    numbers = []
    with library:
        known = uuids_by_index(library)
        inside = {known.get(each, each) for each in _parts(group, int(library.call("nvmlDeviceGetCount")))}
        for number, uuid in known.items():
            with suppress(DeviceError):
                if uuid in inside:
                    refuse_mig(Gpu(library, uuid))
                    numbers.append(int(number))
    return spans(sorted(numbers))


def _parts(name: str, count: int) -> Iterator[str]:
    """Yield every index and UUID of a name."""
    if name == ALL:
        yield from map(str, range(count))
        return
    for part in name.split(","):
        ends = _RANGE.fullmatch(part)
        if ends is None:
            if not part:
                raise InvalidInput(f"nvml:{name[:80]} names no group of GPUs; write nvml:0-7, nvml:0,2 or nvml:all")
            if part.isdecimal() and len(part) > _DIGITS:
                raise InvalidInput(f"nvml:{name[:80]} names a GPU by a number of {len(part)} digits")
            yield str(int(part)) if part.isdecimal() else part
            continue
        first = int(ends[1])
        last = int(ends[2])
        if first > last:
            raise _counts_down(name, ends)
        yield from map(str, range(first, min(last, count) + 1))  # one past the last there is names it as unknown
