"""A catalogue of several jobs that share machines: [machines.<name>] with ``most``, and one [[jobs]] table per job."""

from dataclasses import dataclass
from pathlib import Path

from polythrottle.catalog.entry import Entry
from polythrottle.cluster.catalogue import check_keys, machine_of, number, text, whole
from polythrottle.cluster.lifetime import HOUR_S
from polythrottle.cluster.machine import Market
from polythrottle.cluster.plan.sharing import Job, Kind
from polythrottle.errors import InvalidInput

_JOB = ("name", "steps", "steps_per_s", "workers", "deadline_h", "weight", "overhead", "source")


@dataclass(frozen=True)
class SharedCatalogue:
    """Jobs and the machines they share.

    Attributes:
        file: Where it was read.
        jobs: The jobs, in the order of the file.
        kinds: The machines.
    """

    file: Path
    jobs: tuple[Job, ...]
    kinds: tuple[Kind, ...]


def is_shared(file: Path) -> bool:
    """Return whether a file is a catalogue of several jobs.

    Raises:
        BadFile: If it cannot be read.
    """
    return "jobs" in Entry.of_file(file).values


def read_shared(file: Path, market: Market | None = None) -> SharedCatalogue:
    """Return the catalogue in a file.

    Args:
        file: TOML.
        market: Whose prices count; None for on-demand's where there are some, spot's otherwise.

    Raises:
        BadFile: If it cannot be read, or a key is wrong or missing.
    """
    top = Entry.of_file(file)
    check_keys(top, ("machines", "jobs", "source"))
    kinds = tuple(_kind(name, entry, market) for name, entry in top.each("machines"))
    jobs = tuple(_job(entry, {kind.name for kind in kinds}) for entry in top.listed("jobs"))
    return SharedCatalogue(file, jobs, kinds)


def _kind(name: str, entry: Entry, market: Market | None) -> Kind:
    machine, _ = machine_of(name, entry)
    wanted = market or (Market.ON_DEMAND if Market.ON_DEMAND in machine.usd_per_h else Market.SPOT)
    if wanted not in machine.usd_per_h:
        raise entry.wrong("usd_per_h", f"has no price of {wanted}")
    if "most" not in entry.values:
        raise entry.wrong("most", "is missing: say how many of them the jobs share")
    return Kind(name, whole(entry, "most", 1), machine.usd_per_h[wanted], machine.caps)


def _job(entry: Entry, kinds: set[str]) -> Job:
    check_keys(entry, _JOB)
    speeds = entry.within("steps_per_s")
    if unknown := sorted(set(speeds.values) - kinds):
        raise speeds.wrong(unknown[0], f"is no machine of this file: {', '.join(sorted(kinds))}")
    deadline_s = number(entry, "deadline_h", above=True) * HOUR_S if "deadline_h" in entry.values else None
    try:
        return Job(
            name=text(entry, "name"),
            steps=number(entry, "steps", above=True),
            steps_per_s={name: number(speeds, name, above=True) for name in speeds.values},
            workers=whole(entry, "workers", 1),
            deadline_s=deadline_s,
            weight=number(entry, "weight", 1.0, above=True),
            overhead=number(entry, "overhead", 0.0),
        )
    except InvalidInput as error:
        raise entry.wrong("", f"does not hold together: {error}") from error
