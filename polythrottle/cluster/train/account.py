"""What a controller keeps of a job: its events on disk, one line each, and where it stands now."""

import fcntl
import json
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from polythrottle.cluster.train.membership import Happening
from polythrottle.errors import BadFile, StorageError

EVENTS, JOB = "events.jsonl", "job.json"
VERSION = 1
PRIOR_LOSSES, PRIOR_H = 0.5, 5.0


class Journal:
    """The events of a job, each flushed to disk before anybody acts on it; a torn last line is cut off on reopening.

    Args:
        folder: The job's folder.

    Raises:
        StorageError: If it cannot be written, or another process writes it.
        BadFile: If a line other than the last is none of ours.
    """

    def __init__(self, folder: Path) -> None:
        path = folder / EVENTS
        self.records = read_events(folder)
        try:
            folder.mkdir(parents=True, exist_ok=True)
            self._file = path.open("ab")
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            self._file.truncate(_whole(path))
        except BlockingIOError as err:
            self._file.close()
            raise StorageError(
                f"another controller works on the job in {folder}; stop it, or give another --job"
            ) from err
        except OSError as err:
            raise StorageError(f"{path} cannot be written: {err.strerror}") from err

    def append(self, record: Mapping[str, Any]) -> None:
        """Write one event.

        Raises:
            StorageError: If it cannot be written.
        """
        line = {"v": VERSION, **record}
        try:
            self._file.write(json.dumps(line, allow_nan=False).encode() + b"\n")
            self._file.flush()
            os.fsync(self._file.fileno())
        except OSError as err:
            raise StorageError(f"{self._file.name} cannot be written: {err.strerror}") from err
        self.records.append(line)

    def close(self) -> None:
        """Close the file."""
        self._file.close()


def read_events(folder: Path) -> list[dict[str, Any]]:
    """Return the events in a job's folder; a torn last line does not count.

    Raises:
        BadFile: If another line is none of ours, or the file cannot be read.
    """
    path = folder / EVENTS
    try:
        lines = path.read_bytes().split(b"\n")[:-1]
    except FileNotFoundError:
        return []
    except OSError as err:
        raise BadFile(f"{path} cannot be read: {err.strerror}") from err
    found: list[dict[str, Any]] = []
    for number, text in enumerate(lines, 1):
        try:
            line = json.loads(text)
            if line["v"] != VERSION:
                raise ValueError
        except (ValueError, KeyError, TypeError) as err:
            raise BadFile(f"{path} line {number} is no event of a job") from err
        found.append(line)
    return found


def _whole(path: Path) -> int:
    return path.read_bytes().rfind(b"\n") + 1


@dataclass
class Progress:
    """What the events and reports of a job add up to.

    Attributes:
        step: Newest step anybody reported, None before the first.
        epoch: Its epoch.
        checkpoints: Checkpoints that are safe in the store.
        newest: The newest of them as reported, None before the first.
        spooled: Whether the newest waits on a local disk because the store is away.
        counts: How often each thing happened, by its event's name.
        machine_s: Time that nodes were there, summed, in seconds.
        recoveries: From the last beat of a lost node to the next generation's first step, in seconds each.
    """

    step: int | None = None
    epoch: int | None = None
    checkpoints: int = 0
    newest: Mapping[str, Any] | None = None
    spooled: bool = False
    counts: dict[str, int] = field(default_factory=dict)
    machine_s: float = 0.0
    recoveries: list[float] = field(default_factory=list)
    _silent_since_s: float | None = None

    def take(self, record: Mapping[str, Any]) -> None:
        """Count one event."""
        name = str(record["event"])
        self.counts[name] = self.counts.get(name, 0) + 1
        if name == "checkpoint":
            self.checkpoints, self.newest, self.spooled = self.checkpoints + 1, record, False
        elif name == "spooled":
            self.spooled = True
        elif name == Happening.LOST and "beaten_s" in record and self._silent_since_s is None:
            self._silent_since_s = float(record["beaten_s"])
        elif name == "first step" and self._silent_since_s is not None:
            self.recoveries.append(float(record["at_s"]) - self._silent_since_s)
            self._silent_since_s = None

    def hazard_per_s(self, members: int, rate_per_h: float | None) -> tuple[float, str]:
        """Return the rate of losses of any member per second, and where it comes from.

        Args:
            members: How many nodes train.
            rate_per_h: Losses of one node per hour if they are known; otherwise they are estimated from this job's
                own, beside half a loss in five hours that stands for what is not known yet.
        """
        if rate_per_h is not None:
            return members * rate_per_h / 3600, "given"
        losses = self.counts.get(Happening.LOST, 0) + self.counts.get("notice", 0)
        rate = (losses + PRIOR_LOSSES) / (self.machine_s / 3600 + PRIOR_H)
        return members * rate / 3600, f"estimated from {losses} losses in {self.machine_s / 3600:.2g} machine hours"


def replayed(records: Iterable[Mapping[str, Any]]) -> Progress:
    """Return what events of a former controller add up to."""
    found = Progress()
    for record in records:
        found.take(record)
    return found
