"""What stands on record of a device, by its URI: the names it has there, restored and confirmed together."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

from polythrottle.actuation import restore as restoring
from polythrottle.actuation.drivers.controls import trust
from polythrottle.actuation.restore import Standing
from polythrottle.actuation.rollback import Outcome
from polythrottle.domain.errors import InvalidInput, PolythrottleError, UnknownName

_ON_RECORD = re.compile(r"(jetson|cpu|nvml)\b[^ ]*")


def on_record(device: str | None) -> Sequence[str | None]:
    """Return the names under which a device stands on record: as given, or what its URI stands under.

    Those of a group are the names of its GPUs that stand there; one name, which restoring then refuses, where none do.

    Args:
        device: None for everything.
    """
    if device is None or not _ON_RECORD.fullmatch(device):
        if device is None or not device.startswith("nvml "):
            return [device]
        return device.split(", ")
    body, _, query = device.partition("?")
    if body.partition(":")[0] == "nvml":
        return _gpus_on_record(body)
    roots = roots_of(query)
    if roots:
        return [f"{body} {Path(roots[0]).resolve()}"]
    return [body.replace(":", " ")]


def _gpus_on_record(body: str) -> Sequence[str]:
    # Where only files tell of a device, it is named as they are, and a UUID has no sign that they leave out.
    names = [re.sub("^nvml_", "nvml ", each) for each in restoring.concerned()]
    standing = [each for each in names if each.startswith("nvml ")]
    name = body.partition(":")[2]
    if name == "all":
        return standing or ["nvml all"]
    if re.fullmatch(r"\d*", name) and len(standing) == 1:
        return standing  # which GPU that is only its driver knows; one on record leaves no choice
    named = [f"nvml {uuid}" for uuid in uuids_of(name)]
    return [each for each in named if each in standing] or named[:1]


def uuids_of(name: str) -> Sequence[str]:
    """Return the UUIDs of the GPUs a name means, as the driver counts now; the name itself where it does not say."""
    from polythrottle.backends.nvml import uuids

    try:
        return uuids(name)
    except PolythrottleError:
        return (name or "0").split(",")


def trust_roots(device: str) -> None:
    """Let a planted board be restored that the user has named, by its URI or its name on record."""
    for root in _planted(device):
        trust(Path(root))


def check_roots(device: str, named: Sequence[str | None]) -> None:
    """Refuse a planted board that is not there, unless something stands on record for it, by one of the given names."""
    gone = [root for root in _planted(device) if not Path(root).is_dir()]
    if gone and not any(each in named for each in restoring.concerned()):
        raise InvalidInput(f"there is no folder {gone[0]!r} to look for a board in")


def _planted(device: str) -> Sequence[str]:
    """Return the folders of a planted board that its URI or its name on record says."""
    named = device.partition(" ")[2]
    roots = tuple(roots_of(device.partition("?")[2]))
    if named.startswith("/"):  # the name on record of a planted board: its kind, and the root of its tree
        return (named, *roots)
    return roots


def roots_of(query: str) -> list[str]:
    """Return the folders of planted boards that a URI's options name."""
    return [part[5:] for part in query.split("&") if part.startswith("root=")]


def confirmed(names: Sequence[str | None]) -> tuple[Standing, ...]:
    """Confirm what stands under each name, or of a group nothing: what was confirmed is put back if one cannot be."""
    stands: tuple[Standing, ...] = ()
    try:
        for name in names:
            stands = restoring.confirm(name)
    except PolythrottleError:
        if len(names) > 1:
            all_restored(names, force=False)
        raise
    return stands


def all_restored(names: Sequence[str | None], *, force: bool) -> tuple[Outcome, ...]:
    """Put back what stands under each name, past the errors of others; None is everything.

    Raises:
        PolythrottleError: If one of them could not be put back, after the others; says why, and what they left.
    """
    outcomes: list[Outcome] = []
    errors: list[PolythrottleError] = []
    for name in dict.fromkeys(names):
        try:
            outcomes += restoring.restore_all(device=name, force=force)
        except UnknownName:
            if len(names) == 1:
                raise  # of a group, the guard of this GPU was faster
        except PolythrottleError as err:
            errors.append(err)
    restoring.raise_all(errors, outcomes)
    return tuple(outcomes)
