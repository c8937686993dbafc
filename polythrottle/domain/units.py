"""Units: SI inside, what people write outside.

Inside, a name ends in its SI unit (``gpu_max_hz``). In files and on the command line the same knob may be written with
the unit engineers use (``gpu_max_mhz = 1300.5``), and a quantity carries its unit (``25ms``, ``20W``).
"""

from __future__ import annotations

import itertools
import math
import re
import sys
from collections.abc import Iterable, Sequence

from polythrottle.domain.errors import InvalidInput, UnknownName

_FACTORS: dict[str, dict[str, float]] = {
    # Two signs that look alike: the micro sign U+00B5 of keyboards, and the Greek letter U+03BC that NFKC makes of it.
    "s": {"s": 1.0, "ms": 1e-3, "us": 1e-6, "µs": 1e-6, "μs": 1e-6, "min": 60.0, "h": 3600.0},
    "w": {"W": 1.0, "mW": 1e-3, "kW": 1e3},
    "c": {"C": 1.0, "°C": 1.0},
    "per_s": {"/s": 1.0, "/min": 1 / 60, "/h": 1 / 3600},
    "per_j": {"/J": 1.0, "/kJ": 1e-3},
    "hz": {"Hz": 1.0, "kHz": 1e3, "MHz": 1e6, "GHz": 1e9},
}
_MANY = 10
_WHOLES = 9999.5
MOST_LEVEL = 1e18
"""Every level of a knob lies below, in whatever unit it is written."""
_LISTED = 8
_QUANTITY = re.compile(r"\s*([+-]?(?:\d+\.?\d*|\.\d+)(?:[eE][+-]?\d+)?)\s*(.*?)\s*")
_CLOCK = re.compile(r"(gpu|cpu|mem)(_max|_min|_freq)?|(gpu|mem)_offset")
_SUFFIX = re.compile(r"(.+)_(hz|khz|mhz|ghz|us)")
_SPANS = {"s": 1.0, "m": 60.0, "min": 60.0, "h": 3600.0, "d": 86_400.0, "w": 604_800.0}
_SPAN = re.compile(r"\s*(\d{1,12}\.?\d{0,12}|\.\d{1,12})\s*(s|min|m|h|d|w)\s*")


def is_finite(value: float) -> bool:
    """Return whether a number from outside can be reckoned with: unlike `math.isfinite` of an integer of any length."""
    return abs(value) <= sys.float_info.max


def parse_quantity(text: str, unit: str, *, other: str = "") -> float:
    """Return a written quantity such as ``25ms`` in its SI unit.

    Args:
        text: Number and unit, with or without a space.
        unit: What is measured: ``s``, ``w``, ``c``, ``per_s``, ``per_j`` or ``hz``.
        other: What else may be written there, for the message.

    Raises:
        InvalidInput: If the number or the unit is not one of those known; the message lists them.
    """
    match = _QUANTITY.fullmatch(text)
    known = _FACTORS[unit]
    if match is None or match[2] not in known:
        example = {"s": "25ms", "hz": "900MHz"}.get(unit, f"25{next(iter(known))}")
        raise InvalidInput(f"{text[:40]!r} is not a quantity in {', '.join(known)}; write for example {example}{other}")
    value = float(match[1]) * known[match[2]]
    if not math.isfinite(value):
        raise InvalidInput(f"{text[:40]!r} is not a finite quantity")
    return value


def to_si(key: str, value: float) -> tuple[str, int | float]:
    """Return knob name and level in SI for a file key: ``gpu_max_mhz, 1300.5`` gives ``gpu_max_hz, 1300500000``.

    Clocks are whole hertz; ``queue_delay_us`` is in microseconds.

    Raises:
        InvalidInput: If a clock or a delay is no number that one could be.
    """
    match = _SUFFIX.fullmatch(key)
    if match is None:
        return key, value
    if not -MOST_LEVEL < value < MOST_LEVEL:  # neither is NaN
        raise InvalidInput(f"{key} is no number that a clock or a delay could be")
    if match[2] == "us":
        return f"{match[1]}_s", value / 1e6
    factor = {"hz": 1, "khz": 1e3, "mhz": 1e6, "ghz": 1e9}[match[2]]
    # 2.01 MHz times a million is 2,009,999.9999999998 Hz in floating point.
    return f"{match[1]}_hz", round(value * factor)


def to_file(name: str, level: float) -> tuple[str, int | float]:
    """Return the file key and value of a knob level: ``gpu_max_hz, 1300500000`` gives ``gpu_max_mhz, 1300.5``."""
    if name.endswith("_s"):
        return f"{name[:-2]}_us", round(level * 1e6)
    if not name.endswith("_hz"):
        return name, level
    # Six decimal places hold a clock to the hertz, which is as fine as levels are.
    mega = round(level / 1e6, 6)
    return f"{name[:-3]}_mhz", int(mega) if mega == int(mega) else mega


def show_level(name: str, level: float | str) -> str:
    """Return one level as people write it: ``gpu_max_hz, 1300500000`` gives ``1300.5 MHz``."""
    if isinstance(level, str):
        return level
    if name.endswith("_hz"):
        return f"{level / 1e6:.10g} MHz"
    if name.endswith("_s"):
        return show(float(level), "s")
    if name.endswith("_w"):
        return f"{level:.10g} W"
    return f"{level:.10g}"


def show_number(name: str, level: float | str) -> str:
    """Return one level without its unit, in that of `show_name`: ``gpu_max_hz, 1300500000`` gives ``1300.5``."""
    if isinstance(level, str):
        return level
    return f"{to_file(name, level)[1]:.10g}"


def show_name(name: str) -> str:
    """Return a knob name as people write it, in the unit of engineers: ``gpu_max_hz`` gives ``gpu_max_mhz``."""
    return to_file(name, 0)[0]


def knob_name(text: str) -> str:
    """Return a knob's name in SI for any spelling: ``gpu max``, ``gpu_max_mhz`` and ``gpu_max_hz`` are one knob."""
    return to_si(spelled(text), 1)[0]


def unknown_knob(name: str, known: Iterable[str]) -> UnknownName:
    """Return the error that says that there is no such knob, all names as people write them."""
    option = {"batch_size": "--batch", "threads": "--threads"}.get(name)
    hint = f"({option} says which there may be)" if option else ""
    return UnknownName("knob", show_name(name), map(show_name, known), hint=hint)


def no_level(name: str, level: float | str, levels: Sequence[float | str], instead: str = "") -> str:
    """Return that a knob has no such level, and what it has, as people write them.

    Args:
        name: Of the knob, in SI.
        level: What was asked for, by whomever.
        levels: Those it has, in their order.
        instead: What to say of them, where all or the ends are not what helps.
    """
    asked = str(level)
    if not isinstance(level, str) and abs(level) < MOST_LEVEL:
        asked = show_level(name, level)
    if not instead and len(levels) <= _LISTED:
        instead = f"it has {', '.join(show_level(name, each) for each in levels)}"
    if not instead:
        instead = f"its {len(levels)} levels go from {show_level(name, levels[0])} to {show_level(name, levels[-1])}"
    return f"{show_name(name)} has no level {asked[:40]}; {instead}"


def meant(text: str, names: Iterable[str], *, begun: bool = False) -> str | None:
    """Return the one of a device's own names that a text can only mean; None if there is none, or more than one.

    Makers spell their power modes as they like: what one release calls ``50W`` another calls ``MODE_50W``. So neither
    case nor the word "mode" nor what stands between words counts. A name that is spelled exactly goes before all.

    Args:
        text: What a person wrote.
        names: Those there are.
        begun: Whether the first words of a name will do: ``maxn`` for ``MAXN_SUPER`` where no other begins so.
    """
    known = tuple(names)
    if text in known:
        return text
    wanted = "".join(_words(text))
    whole = [name for name in known if wanted == "".join(_words(name))]
    first = [name for name in known if begun and wanted in itertools.accumulate(_words(name))]
    found = whole or first
    if wanted and len(found) == 1:
        return found[0]
    return None


def _words(name: str) -> list[str]:
    return [word for word in re.findall(r"[^\W_]+", name.casefold()) if word != "mode"]


def spelled(name: str) -> str:
    """Return a knob name as it is written in files: ``gpu max`` and ``GPU-max`` give ``gpu_max_mhz``.

    Names that are none of the clocks, limits and delays that boards have are returned as they are.
    """
    plain = re.sub(r"[\s-]+", "_", name.strip())
    if _CLOCK.fullmatch(plain.lower()):
        return f"{plain.lower()}_mhz"
    ending = {"power_limit": "_w", "queue_delay": "_us"}.get(plain.lower())
    if ending is not None:
        return plain.lower() + ending
    known = re.match(r"(.+)_(?:[kmg]?hz|w|us)$", plain.lower())
    if known and spelled(known[1]) != known[1]:
        return plain.lower()
    return plain


def show(value: float | None, unit: str) -> str:
    """Return a value with the prefix that keeps it readable: ``0.0253, "s"`` gives ``25.3 ms``; unknown gives ``–``."""
    if value is None:
        return "–"
    if unit not in ("s", "J", "J·s", "W") or value == 0 or not math.isfinite(value):
        return f"{value:.4g} {unit}"
    for factor, prefix in ((1e3, "k"), (1.0, ""), (1e-3, "m"), (1e-6, "µ")):
        # What four digits round up to the next prefix is written with it: 1 s, not 1000 ms. Nobody says kiloseconds.
        if abs(value) >= factor * 0.9995 and not (unit == "s" and prefix == "k"):
            return f"{value / factor:.4g} {prefix}{unit}"
    return f"{value * 1e9:.4g} n{unit}"


def show_count(count: float) -> str:
    """Return how many, parts of one where they tell: ``31.16``, ``1,234``, ``12,000``."""
    if count < _WHOLES:
        return f"{count:,.4g}"
    return f"{count:,.0f}"


def show_excess(fraction: float, decimals: int = 0) -> str:
    """Return a share of a limit as people write it: ``0.31`` gives ``31%``, ``76`` gives ``76 times the limit``.

    Args:
        fraction: Of the limit, not negative.
        decimals: Of a percentage.
    """
    if fraction < _MANY:
        return f"{fraction:.{decimals}%}"
    return f"{fraction:,.0f} times the limit"


def show_share(share: float) -> str:
    """Return a share in percent that is 100 % only where it is whole: ``0.99996`` gives ``99.99 %``."""
    # Without the margin 0.57, whose product is 5,699.999999999999, would be shown as 56.99 %.
    return f"{math.floor(1e4 * share + 1e-9) / 100:.4g} %"


def show_percent(fraction: float, form: str = ".1f") -> str:
    """Return a fraction as people read it: ``0.314`` gives ``31.4 %``."""
    return f"{100 * fraction:{form}} %"


def span_s(text: str) -> float:
    """Return a span of time such as ``30d``, ``12h``, ``90m`` or ``2w`` in seconds.

    Raises:
        InvalidInput: If it is not one.
    """
    match = _SPAN.fullmatch(text)
    if match is None or float(match[1]) == 0:
        raise InvalidInput(f"{text[:40]!r} is not a span of time; write for example 30d, 12h, 90m or 2w")
    return float(match[1]) * _SPANS[match[2]]


def show_span(duration_s: float) -> str:
    """Return a span of time as people write it: ``2592000`` gives ``30 days``."""
    word = next((word for word in ("day", "hour", "minute") if duration_s >= _SPANS[word[0]]), "second")
    count = f"{duration_s / _SPANS[word[0]]:.3g}"
    return f"{count} {word}{'s' * (count != '1')}"
