"""Hours of the day, such as from 22:00 to 06:00, on the clock of the place where a device stands."""

import math
import re
import time
from collections.abc import Iterator
from dataclasses import dataclass

from polythrottle.daemon.horizon import DAY_S, Stretch
from polythrottle.errors import InvalidInput

_TIME = re.compile(r"(\d{1,2}):([0-5]\d)", re.ASCII)


def day_time_s(text: str) -> float:
    """Return a time of day such as ``06:00`` in seconds since midnight; 24:00 is the end of the day.

    Raises:
        InvalidInput: If it is none.
    """
    found = _TIME.fullmatch(text.strip())
    at_s = 3600.0 * int(found[1]) + 60.0 * int(found[2]) if found else -1.0
    if not 0 <= at_s <= DAY_S:
        raise InvalidInput(f"a time of day is written like 06:00, not {text[:20]!r}")
    return at_s


def wall_day_s(wall_s: float) -> float:
    """Return the time of day where this machine stands, in seconds since midnight.

    Args:
        wall_s: As `time.time` gives it.
    """
    now = time.localtime(wall_s)
    return 3600.0 * now.tm_hour + 60.0 * now.tm_min + min(59, now.tm_sec) + wall_s % 1


@dataclass(frozen=True)
class Hours:
    """From one time of the day until another, which may be the next morning.

    Args:
        begin_s: In seconds since midnight.
        end_s: Likewise.

    Raises:
        InvalidInput: If one is not of a day, or nothing lies between them.
    """

    begin_s: float
    end_s: float

    def __post_init__(self) -> None:
        if not (0 <= self.begin_s <= DAY_S and 0 <= self.end_s <= DAY_S):
            raise InvalidInput("hours go from one time of the day to another, between 00:00 and 24:00")
        if self.begin_s % DAY_S == self.end_s % DAY_S and (self.begin_s, self.end_s) != (0.0, DAY_S):
            raise InvalidInput(f"nothing lies between {_written(self.begin_s)} and {_written(self.end_s)}")

    @classmethod
    def parse(cls, text: str) -> "Hours":
        """Return the hours that a text such as ``22:00-06:00`` means.

        Raises:
            InvalidInput: If it means none.
        """
        begin, dash, end = text.partition("-")
        if not dash:
            raise InvalidInput(f"hours are written like 22:00-06:00, not {text[:20]!r}")
        return cls(day_time_s(begin), day_time_s(end))

    def __contains__(self, day_s: float) -> bool:
        """Return whether a time of day lies between them."""
        if self.begin_s < self.end_s:
            return self.begin_s <= day_s < self.end_s
        return day_s >= self.begin_s or day_s < self.end_s

    def __str__(self) -> str:
        return f"{_written(self.begin_s)}-{_written(self.end_s)}"

    @property
    def length_s(self) -> float:
        """How long they are, in a day."""
        return (self.end_s - self.begin_s) % DAY_S or DAY_S

    def opens_s(self, day_s: float) -> float:
        """Return how long it is from a time of day until they begin; 0 within them."""
        return 0.0 if day_s in self else (self.begin_s - day_s) % DAY_S

    def wait(self, day_s: float) -> str:
        """Return how long it is from a time of day until they begin, for people."""
        hours, minutes = divmod(math.ceil(self.opens_s(day_s) / 60), 60)
        return f"{hours} h {minutes:02} min"

    def cut(self, ahead: Stretch, day_s: float) -> Iterator[tuple[Stretch, bool]]:
        """Yield the parts of a stretch that begins at a time of day, and whether each lies within these hours."""
        left_s = ahead.length_s
        while left_s > 0:
            within = day_s in self
            until_s = ((self.end_s if within else self.begin_s) - day_s) % DAY_S or DAY_S
            part_s = min(left_s, until_s)
            yield Stretch(part_s, ahead.rate_per_s, ahead.weight), within
            left_s, day_s = left_s - part_s, (day_s + part_s) % DAY_S

    def within_s(self, day_s: float, length_s: float) -> float:
        """Return how much of a time that begins at a time of day lies between them."""
        return sum(part.length_s for part, within in self.cut(Stretch(length_s, 0.0), day_s) if within)


def _written(at_s: float) -> str:
    return f"{int(at_s // 3600):02}:{int(at_s % 3600 // 60):02}"
