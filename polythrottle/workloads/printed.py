"""Latencies that a command prints: a number with its unit on a line of its own, or a JSON object with ``latency_s``.

    12.5ms
    {"latency_s": 0.0125, "items": 4}

Any other line is passed over, so that a program may say what else it likes.
"""

import json
import math
import re
import sys
from dataclasses import dataclass, field
from decimal import Decimal
from typing import Any

from polythrottle.errors import InvalidInput, TrialError
from polythrottle.units import parse_quantity

FORMS = '12.5ms, or {"latency_s": 0.0125}, on a line of its own'
_QUANTITY = re.compile(r"([+-]?(?:\d+\.?\d*|\.\d+)(?:[eE][+-]?\d+)?)\s*(s|ms|us|µs|μs|min|h)")
_NUMBER = r"[+-]?(?:\d+(?:[.,]\d*)?|\.\d+)(?:[eE][+-]?\d+)?"
_TIME = rf"{_NUMBER}\s*(?:[mnuµμ]?s|[mnuµμ]?secs?|min|h|(?:milli|micro|nano)?seconds?)?"
_OBJECT = r'[\[{].*"[^"]*latency[^"]*"\s*:.*'
_NEAR = re.compile(
    rf"(?:[\w ]*latency\w*\s*[:=]?\s*)?{_TIME}|\d[\d.]*\s*[mnuµμ]?s|{_OBJECT}", re.IGNORECASE | re.DOTALL
)
_LONGEST_LINE, _LOOKED_AT, _SHOWN, _LEAST_S = 4096, 256, 60, 1e-9
_MOST, _MOST_ITEMS = 100_000, 1_000_000


@dataclass
class Printed:
    """What a run has printed so far.

    Args:
        latencies: Each in seconds, with its items where the line says them.
        near: The first line that looks like a latency and is in none of the forms, such as a number without a unit.
        step_s: The last decimal place that latencies have: what they were rounded to, or cut off at; inf if none were.
    """

    latencies: list[tuple[float, int | None]] = field(default_factory=list)
    near: str = ""
    step_s: float = math.inf
    _rest: bytes = b""
    _fault: str = ""

    def feed(self, chunk: bytes) -> None:
        """Take some more of standard output."""
        *lines, rest = (self._rest + chunk).split(b"\n")
        for line in lines:
            self._line(line)
        self._rest = rest if len(rest) <= _LONGEST_LINE else rest[:1] * (_LONGEST_LINE + 1)

    def end(self, elapsed_s: float) -> None:
        """Take note that the run has ended: what stands after the last line break is a line too.

        Args:
            elapsed_s: How long the run took.

        Raises:
            TrialError: If a line is a latency that cannot be.
        """
        self._line(self._rest)
        self._rest = b""
        longest_s = max((latency_s for latency_s, _ in self.latencies), default=0.0)
        if longest_s > elapsed_s and not self._fault:
            self._fault = f"a latency of {longest_s:.4g} s is more than the {elapsed_s:.4g} s the run took"
        if len(self.latencies) > _MOST:
            self._fault = f"more than {_MOST:,} latencies in a run are too many"
        if self._fault:
            raise TrialError(f"the command prints no latency that can be: {self._fault}; write {FORMS}")

    def _line(self, line: bytes) -> None:
        if len(line) > _LONGEST_LINE or len(self.latencies) > _MOST:
            return
        text = line.decode(errors="replace").strip()
        try:
            found = _latency(text)
        except InvalidInput as error:
            self._fault = self._fault or str(error)
            return
        if found is not None:
            self.latencies.append(found)
            self.step_s = min(self.step_s, _step_s(text, found[0]))
        elif not self.near and any(_NEAR.fullmatch(part.strip()) for part in text[:_LOOKED_AT].split("\r")):
            self.near = text if len(text) <= _SHOWN else f"{text[:_SHOWN]}…"


def _latency(text: str) -> tuple[float, int | None] | None:
    """Return the latency that a line says, and its items if it says them; None if it is some other line.

    Raises:
        InvalidInput: If it says a latency that is none.
    """
    if _QUANTITY.fullmatch(text):
        if len(text) > _SHOWN:
            raise InvalidInput(f"{text[:_SHOWN]!r}… has more digits than a time")
        return _possible(text, parse_quantity(text, "s"), None)
    if not (text.startswith("{") and '"latency_s"' in text):
        return None
    try:
        said: dict[str, Any] = json.loads(text)
    except (ValueError, RecursionError):
        raise InvalidInput(f"{text[:60]!r} is no JSON object") from None
    if "latency_s" not in said:
        return None
    return _possible(text, said.get("latency_s"), said.get("items"))


def _step_s(text: str, latency_s: float) -> float:
    """Return the last decimal place that a line shows of a latency, in seconds."""
    written = _QUANTITY.fullmatch(text)
    number, unit = written.groups() if written else (f"{latency_s:.12g}", "s")
    return parse_quantity(f"1e{Decimal(number).as_tuple().exponent}{unit}", "s")


def _possible(text: str, latency_s: Any, items: Any) -> tuple[float, int | None]:
    number = isinstance(latency_s, int | float) and not isinstance(latency_s, bool)
    if not (number and 0 < latency_s <= sys.float_info.max):
        raise InvalidInput(f"{text[:60]!r} is no time above zero")
    if latency_s < _LEAST_S:
        raise InvalidInput(f"{text[:60]!r} is less than a nanosecond")
    if items is not None and (type(items) is not int or not 0 < items <= _MOST_ITEMS):
        raise InvalidInput(f"{text[:60]!r} has items that are no whole number from 1 to {_MOST_ITEMS:,}")
    return float(latency_s), items
