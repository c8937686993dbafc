"""The processor's own energy counters (RAPL), and the thread that reads them before they wrap."""

import math
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from polythrottle.actuation.controls import text_of
from polythrottle.errors import DeviceError
from polythrottle.measurement import EnergyKind
from polythrottle.threads import Thread

_MOST_W = 500.0  # above what one package draws for long; bounds how soon its counter can wrap


@dataclass
class Counter:
    """One counter of microjoules.

    Args:
        name: Such as ``package-0`` or ``dram``.
        path: The file to read.
        range_uj: Where it starts again at 0; None if only a reload of its driver makes it do so.
        last_uj: What it said last.
        total_uj: What it has counted since it was made.
    """

    name: str
    path: Path
    range_uj: int | None
    last_uj: int
    total_uj: int = 0

    @classmethod
    def of(cls, name: str, path: Path, range_file: Path | None = None) -> "Counter":
        """Return the counter in a file, beginning now.

        Args:
            name: What it counts.
            path: The file to read.
            range_file: Holds where it starts again at 0.

        Raises:
            OSError: If a file is not readable.
            ValueError: If one holds no number, or the range is not above zero.
        """
        range_uj = None if range_file is None else int(text_of(range_file))
        if range_uj is not None and range_uj <= 0:
            raise ValueError(f"{range_file} says {range_uj}")
        return cls(name, path, range_uj, int(text_of(path)))

    def update(self) -> None:
        """Read it and add what it has grown by, across a wrap.

        Raises:
            OSError: If it is no longer readable.
            ValueError: If it holds no number.
            DeviceError: If it has started over and nobody knows what was lost.
        """
        now_uj = int(text_of(self.path))
        grown_uj = now_uj - self.last_uj
        self.last_uj = now_uj
        if grown_uj < 0 and self.range_uj is None:
            raise DeviceError(f"{self.path} has started over: its driver was reloaded, and what it had counted is lost")
        self.total_uj += grown_uj if grown_uj >= 0 or self.range_uj is None else grown_uj + self.range_uj


class Counted:
    """The sum of some counters.

    Args:
        counters: At least one; none inside another.
        boundary: What they cover.
    """

    kind = EnergyKind.MEASURED

    def __init__(self, counters: Sequence[Counter], boundary: str) -> None:
        self._counters = counters
        self.boundary = boundary
        self._guard = threading.Lock()
        self._ended = threading.Event()
        self._sampler: Thread | None = None
        self._users = 0

    @property
    def period_s(self) -> float:
        """How often the counters are read at least, in seconds: several times within the shortest wrap."""
        wraps_s = [counter.range_uj * 1e-6 / _MOST_W for counter in self._counters if counter.range_uj]
        return min(60.0, max(0.1, min(wraps_s) / 4)) if wraps_s else math.inf

    def total_j(self) -> float:
        """Return the joules of all counters since this source was made.

        Raises:
            DeviceError: If a counter has become unreadable or has started over.
        """
        try:
            with self._guard:
                for counter in self._counters:
                    counter.update()
                return sum(counter.total_uj for counter in self._counters) * 1e-6
        except (OSError, ValueError) as err:
            raise DeviceError(f"the RAPL energy counter can no longer be read: {err}") from err

    def start(self) -> None:
        """Read the counters in the background, so that no wrap is missed, until `stop` was called as often."""
        with self._guard:
            self._users += 1
        if math.isinf(self.period_s) or self._users > 1:
            return
        self._ended.clear()
        self._sampler = Thread(target=self._sample, name="polythrottle-rapl", daemon=True)
        self._sampler.start()

    def leave_out(self, busy_s: float) -> bool:
        """Do nothing and say so: counters know nothing of who was busy."""
        return False

    def stop(self) -> None:
        """Stop reading in the background, unless somebody else has started it too."""
        with self._guard:
            self._users = max(0, self._users - 1)
        if self._users:
            return
        self._ended.set()
        if self._sampler is not None:
            self._sampler.join()
            self._sampler = None

    def _sample(self) -> None:
        while not self._ended.wait(self.period_s):
            try:
                self.total_j()
            except DeviceError:
                return  # the next reading meets the same error where somebody can act on it
