"""Points and ladders of points as tables of TOML: ``[point]`` and ``[ladder]`` of a tuned profile."""

import math
from collections.abc import Mapping
from typing import Any

from polythrottle.errors import BadFile
from polythrottle.ladder import Ladder, Rung, Service
from polythrottle.space import Level, OperatingPoint
from polythrottle.units import to_file, to_si

_BATCH = "batch_size"
_MILLI = 1e3


def levels_of(point: OperatingPoint) -> dict[str, Level]:
    """Return a point's levels as files hold them: ``gpu_max_mhz``."""
    pairs = (to_file(name, level) if not isinstance(level, str) else (name, level) for name, level in point.items())
    return dict(pairs)


def point_of(levels: Mapping[str, Any]) -> OperatingPoint:
    """Return the point that levels of a file mean.

    Raises:
        TypeError: If one is neither a finite number nor a word.
    """
    return OperatingPoint(dict(_level(name, level) for name, level in levels.items()))


def _level(name: str, level: Any) -> tuple[str, Level]:
    """Return one level in SI."""
    if isinstance(level, str):
        return name, level
    if type(level) not in (int, float) or not math.isfinite(level):
        raise TypeError(f"{name} has no level {level!r}")
    return to_si(name, level)


def table_of(ladder: Ladder) -> dict[str, Any]:
    """Return a ladder as a file holds it."""
    return {"slo_ms": _to_ms(ladder.slo_s), "rungs": [_rung_table(rung) for rung in ladder.rungs]}


def _rung_table(rung: Rung) -> dict[str, Any]:
    service = rung.service
    return {
        "rate_per_s": rung.rate_per_s,
        "gather_ms": _to_ms(rung.gather_s),
        "power_w": rung.power_w,
        "p99_ms": _to_ms(rung.p99_s),
        **({} if rung.relief_w_per_s is None else {"relief_w_per_ms": round(rung.relief_w_per_s / _MILLI, 9)}),
        "batch": service.batch,
        "interval_ms": _to_ms(service.interval_s),
        "latency_ms": _to_ms(service.latency_s),
        "tail_ms": _to_ms(service.tail_s),
        "batch_j": service.batch_j,
        "idle_w": service.idle_w,
        "point": levels_of(service.point),
    }


def ladder_of(table: Any, point: OperatingPoint) -> Ladder:
    """Return the ladder that a table of a file means.

    Args:
        table: With ``slo_ms`` and ``rungs``.
        point: Of the profile, whose knobs every rung sets.

    Raises:
        BadFile: If it is no ladder; names the key.
        InvalidInput: If its figures make none, such as rates that do not rise.
    """
    slo_s = _time_s(table, "slo_ms", "ladder")
    rungs = _value(table, "rungs", "ladder")
    if not isinstance(rungs, list):
        raise BadFile("ladder.rungs is not a list of tables")
    return Ladder(slo_s, tuple(_rung(rung, f"ladder.rungs[{number}]", point) for number, rung in enumerate(rungs)))


def _rung(table: Any, where: str, point: OperatingPoint) -> Rung:
    interval_s, latency_s, tail_s = (_time_s(table, key, where) for key in ("interval_ms", "latency_ms", "tail_ms"))
    batch_j, idle_w = _number(table, "batch_j", where), _number(table, "idle_w", where, least=0.0)
    batch = _batch(table, where)
    service = Service(_point(table, where, point), batch, interval_s, latency_s, tail_s, batch_j, idle_w)
    if int(service.point.get(_BATCH, service.batch)) != service.batch:
        raise BadFile(f"{where}.batch is {service.batch}, and its point says {service.point[_BATCH]}")
    rate_per_s, power_w = (_number(table, key, where) for key in ("rate_per_s", "power_w"))
    gather_s, p99_s = _time_s(table, "gather_ms", where, least=0.0), _time_s(table, "p99_ms", where)
    return Rung(rate_per_s, service, gather_s, power_w, p99_s, _relief_w_per_s(table, where))


def _relief_w_per_s(table: Mapping[str, Any], where: str) -> float | None:
    if "relief_w_per_ms" not in table:
        return None
    return round(_number(table, "relief_w_per_ms", where, least=0.0) * _MILLI, 6)


def _point(table: Any, where: str, like: OperatingPoint) -> OperatingPoint:
    levels = _value(table, "point", where)
    if not isinstance(levels, dict):
        raise BadFile(f"{where}.point is not a table of levels")
    try:
        point = point_of(levels)
    except TypeError as error:
        raise BadFile(f"{where}.point: {error}") from error
    if set(point) != set(like):
        raise BadFile(f"{where}.point sets {', '.join(point) or 'nothing'}, and the profile's {', '.join(like)}")
    return point


def _batch(table: Any, where: str) -> int:
    batch = _value(table, "batch", where)
    if type(batch) is not int or batch < 1:
        raise BadFile(f"{where}.batch is {batch!r}; it must be a whole number of at least 1")
    return batch


def _time_s(table: Any, key: str, where: str, least: float | None = None) -> float:
    return round(_number(table, key, where, least) / _MILLI, 9)


def _to_ms(time_s: float) -> float:
    """Return a time that is held to the nanosecond in milliseconds, so that `_time_s` gives it back exactly."""
    return round(time_s * _MILLI, 6)


def _number(table: Any, key: str, where: str, least: float | None = None) -> float:
    """Return a figure that is finite and positive, or not below the least."""
    value = _value(table, key, where)
    if type(value) not in (int, float) or not math.isfinite(value) or not (value > 0 if least is None else value >= 0):
        raise BadFile(
            f"{where}.{key} is {value!r}; it must be a number {'above' if least is None else 'of at least'} 0"
        )
    return float(value)


def _value(table: Any, key: str, where: str) -> Any:
    if not isinstance(table, dict):
        raise BadFile(f"{where} is not a table")
    if key not in table:
        raise BadFile(f"it lacks {where}.{key}")
    return table[key]
