"""Which GPUs a name means: one, a list, a range, or all of them."""

import re
from collections.abc import Iterator, Mapping

from polythrottle.actuation.nvml_library import Library
from polythrottle.backends.nvml.common import spans
from polythrottle.backends.nvml.gpu import find, listed
from polythrottle.errors import DeviceError, InvalidInput, UnknownName

ALL = "all"
_RANGE = re.compile(r"(\d{1,6})-(\d{1,6})")


def means_several(name: str) -> bool:
    """Return whether a name is that of a group: ``all``, ``0-7``, ``0,2`` or UUIDs with commas between."""
    return name == ALL or "," in name or _RANGE.fullmatch(name) is not None


def chosen(library: Library, name: str) -> Mapping[str, str]:
    """Return the UUIDs of the GPUs a group's name means, each with what messages call it, such as ``GPU 3``.

    In the order of the UUIDs, for indexes move.

    Raises:
        InvalidInput: If the name is malformed, or names a GPU twice.
        UnknownName: If there is no such GPU.
        DeviceError: If there is no driver or no GPU, or one that is meant does not answer.
    """
    with library:
        known = listed(library)
        count = int(library.call("nvmlDeviceGetCount"))
    if not count:
        raise DeviceError("the NVIDIA driver is here, but it finds no GPU")
    indexes = {uuid: index for index, uuid in known.items()}
    named: dict[str, str] = {}
    for part in _parts(name, count):
        if part.isdecimal() and part not in known and int(part) < count:
            others = spans(sorted(map(int, known))) or "none"
            raise DeviceError(
                f"GPU {part} does not answer, as one that has fallen off the bus; those that do: {others}"
            )
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
    return tuple(chosen(library, name)) if means_several(name) else (find(library, name).uuid,)


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
            yield str(int(part)) if part.isdecimal() else part
            continue
        first, last = int(ends[1]), int(ends[2])
        if first > last:
            raise InvalidInput(f"nvml:{name[:80]} counts down; write {last}-{first}")
        yield from map(str, range(first, min(last, count) + 1))  # one past the last there is names it as unknown
