"""Faults that a test scripts: what goes wrong at which read or write; counted on disk, so across processes."""

import errno
import fnmatch
import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from polythrottle.errors import InvalidInput
from polythrottle.testing.kernel.machine import replace

_ACTS = ("round", "ignore", "vanish", "renumber", "foreign", "die_before", "die_after")


@dataclass(frozen=True)
class Fault:
    """Something that goes wrong.

    Args:
        act: The name of an error, such as ``EIO`` or ``EAGAIN``, which the call ends with and nothing happens;
            ``round``: the file takes the step below, or ``value``; ``ignore``: it keeps what it had, without an error;
            ``vanish``: the file is gone; ``renumber``: the folder ``path`` (a name in ``/sys/class/hwmon`` or
            ``/sys/class/devfreq``) is called ``value`` before the call; ``foreign``: after the call somebody else
            writes ``value`` to ``path``, by default to the same file; ``die_before`` and ``die_after``: SIGKILL to the
            calling process.
        nth: At which of the calls that match, from 1.
        on: Whether reads or writes are counted.
        match: Which keys are counted: a pattern of `fnmatch` over the whole key.
        times: How many calls in a row it happens to; 0 for all from then on.
        value: See ``act``.
        path: See ``act``.
    """

    act: str
    nth: int = 1
    on: Literal["read", "write"] = "write"
    match: str = "*"
    times: int = 1
    value: str | None = None
    path: str | None = None

    def __post_init__(self) -> None:
        if self.act not in _ACTS and not (self.act.startswith("E") and hasattr(errno, self.act)):
            raise InvalidInput(f"a fault acts as {', '.join(_ACTS)} or as an error such as EIO, not as {self.act!r}")
        if self.nth < 1 or self.times < 0 or self.on not in ("read", "write"):
            raise InvalidInput("a fault happens on read or write, from call 1 on, at least 0 times")
        if (self.act == "foreign" and self.value is None) or (
            self.act == "renumber" and (self.value is None or self.path is None)
        ):
            raise InvalidInput(f"{self.act} needs a value, renumber a path too")


class Script:
    """The faults of a tree and how often each has been passed.

    Args:
        folder: Where ``faults.json`` is; people may write it by hand: a list of the fields of `Fault`.
    """

    def __init__(self, folder: Path) -> None:
        self._file = folder / "faults.json"

    def add(self, faults: tuple[Fault, ...]) -> None:
        """Add faults to those that are there."""
        replace(self._file, json.dumps(self._load() + [asdict(fault) for fault in faults], indent=1))

    def clear(self) -> None:
        """Forget every fault."""
        self._file.unlink(missing_ok=True)

    def _load(self) -> list[dict[str, Any]]:
        return json.loads(self._file.read_text(encoding="utf-8")) if self._file.exists() else []

    def due(self, on: str, key: str) -> list[Fault]:
        """Count one call and return the faults that happen to it."""
        lines, due = self._load(), []
        passed = [line for line in lines if line.get("on", "write") == on]
        for line in passed:
            fault = Fault(**{name: value for name, value in line.items() if name != "passed"})
            if not fnmatch.fnmatchcase(key, fault.match):
                continue
            count = line["passed"] = line.get("passed", 0) + 1
            if count >= fault.nth and (fault.times == 0 or count < fault.nth + fault.times):
                due.append(fault)
        if passed:
            replace(self._file, json.dumps(lines, indent=1))
        return due
