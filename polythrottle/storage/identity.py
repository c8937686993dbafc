"""Which hardware and firmware a device is, and whether two are the same kind; which content a file has."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from pathlib import Path

from polythrottle.domain.errors import BadFile
from polythrottle.domain.ports import Inspectable, Readable
from polythrottle.storage.untrusted import check_plain

INDIVIDUAL = frozenset({"uuid", "serial", "pci", "bus", "index"})
"""What tells one piece of hardware from another of its kind; a profile is for the kind."""

_ALL = "all"
_GPUS_MOST = 1024


def without_options(uri: str) -> str:
    """Return a device's URI without its options: a simulated board with another seed is still that board."""
    return uri.partition("?")[0]


def named_hardware(uri: str) -> frozenset[str]:
    """Return the pieces of hardware that a URI names; none for a simulated board, of which each user has its own.

    The GPUs of the simulated server are numbered as NVML's are: there is one such server. ``all`` is each of its kind.
    """
    scheme, _, rest = without_options(uri).partition(":")
    kind = "GPU"
    if scheme == "sim":
        server, _, rest = rest.partition("/")
        if server != "node":
            return frozenset()
        kind = "simulated GPU"
        rest = rest or _ALL
    elif scheme != "nvml":
        return frozenset({without_options(uri)})
    parts: set[str] = set()
    for part in (rest or "0").split(","):
        first, dash, last = part.strip().partition("-")
        # Bounded, for a span that is mistyped would be counted out here.
        if dash and first.isdecimal() and last.isdecimal() and int(last) - int(first) < _GPUS_MOST:
            parts.update(map(str, range(int(first), int(last) + 1)))
        else:
            parts.add(part.strip())
    return frozenset(each if each.startswith("GPU-") else f"{kind} {each}" for each in parts)


def same_hardware(one: str, other: str) -> frozenset[str]:
    """Return the pieces of hardware that two URIs both name, as far as names tell: one piece at least if any is both.

    What ``nvml:0`` and ``nvml:GPU-…`` are is known to the driver alone.
    """
    first = named_hardware(one)
    second = named_hardware(other)
    both = first & second
    for some, every in ((first, second), (second, first)):
        for each in every:
            kind, _, which = each.rpartition(" ")
            if which == _ALL:
                both |= {part for part in some if part.startswith(kind)}
    return both


def identity_by_name(uri: str) -> Mapping[str, str]:
    """Return the identity of a device that has no hardware to be known by: its URI without options."""
    return {"board": without_options(uri)}


def identity_of(device: Readable) -> Mapping[str, str]:
    """Return what a device is: what it says of itself, else its URI without options."""
    if isinstance(device, Inspectable):
        return {name: text for name, text in device.identity.items() if text}
    return identity_by_name(device.uri)


def content_digest(path: Path) -> str:
    """Return a digest of a file's bytes, by which a model is known again.

    Raises:
        BadFile: If it cannot be read.
    """
    check_plain(path)
    try:
        return hashlib.sha256(path.read_bytes()).hexdigest()[:16]
    except OSError as error:
        raise BadFile(f"{path} cannot be read: {error.strerror}") from error


def disagreement(tuned: Mapping[str, str], here: Mapping[str, str]) -> str | None:
    """Return in which hardware or firmware two identities differ, both named; None if they are of one kind.

    Individuals of a kind do not differ. What only one of them knows does not count, but something must be known to
    both.

    Args:
        tuned: Of what a profile was tuned on.
        here: Of the device at hand.
    """
    shared = [name for name in tuned if name in here and name not in INDIVIDUAL]
    if not shared:
        return f"{_named(tuned)}, and this is {_named(here)}"
    other = [name for name in shared if tuned[name] != here[name]]
    if not other:
        return None
    was, now = ({name: which[name] for name in other} for which in (tuned, here))
    return f"{_named(was)}, and this is {_named(now)}"


def _named(identity: Mapping[str, str]) -> str:
    known = [f"{name} {text}" for name, text in identity.items() if name not in INDIVIDUAL]
    return ", ".join(known) or "unknown hardware"
