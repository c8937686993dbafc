"""Tuned profiles and their ladders as TOML files: profiles/tuned/<device>/<workload>@<SLO>.toml in the state folder."""

from __future__ import annotations

import contextlib
import glob
import itertools
import os
import re
from collections.abc import Iterable, Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any

import tomli_w

from polythrottle.catalog.documents import catalogue_dir
from polythrottle.domain.backports import removesuffix
from polythrottle.domain.errors import BadFile, InvalidInput, PolythrottleError, StorageError, UnknownName
from polythrottle.domain.ladder import Ladder, PointPerformance, Rung
from polythrottle.domain.measurement import EnergyKind, Interval, Latency, Measurement
from polythrottle.domain.metrics import is_metric, split_metric, unit_of
from polythrottle.domain.problem import Constraint, Objective, Problem
from polythrottle.domain.profile import Profile
from polythrottle.domain.space import BATCH_SIZE, Level, OperatingPoint
from polythrottle.domain.units import is_finite, to_file, to_si
from polythrottle.storage.atomic_file import check_folder, replace_file
from polythrottle.storage.identity import disagreement, identity_by_name
from polythrottle.storage.paths import state_dir
from polythrottle.storage.untrusted import MALFORMED, bounded, parse_toml, read_plain, said

# Points and ladders of points as tables of TOML: ``[point]`` and ``[ladder]`` of a tuned profile.

_MILLI = 1e3


def levels_of(point: OperatingPoint) -> dict[str, Level]:
    """Return a point's levels as files hold them: ``gpu_max_mhz``."""
    pairs = (to_file(name, level) if not isinstance(level, str) else (name, level) for name, level in point.items())
    return dict(pairs)


def point_of(levels: Mapping[str, Any]) -> OperatingPoint:
    """Return the point that levels of a file mean.

    Raises:
        ValueError: If one is neither a finite number nor a word, or a clock or a power below zero.
    """
    return OperatingPoint(dict(_level(name, level) for name, level in levels.items()))


def _level(name: str, level: Any) -> tuple[str, Level]:
    """Return one level in SI."""
    if isinstance(level, str):
        return name, level
    # Its very type: `isinstance` would take true and false for 1 and 0.
    if type(level) not in (int, float) or not is_finite(level):
        raise ValueError(f"{name} has no level {level!r}")
    if level < 0 and name.endswith(("hz", "_w")) and "_offset_" not in name:
        raise ValueError(f"{name} is {level!r}, and neither clocks nor powers are below 0")
    return to_si(name, level)


def ladder_table(ladder: Ladder) -> dict[str, Any]:
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


def ladder_from_table(table: Any, point: OperatingPoint) -> Ladder:
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
    batch_j = _number(table, "batch_j", where)
    idle_w = _number(table, "idle_w", where, least=0.0)
    batch = _batch(table, where)
    service = PointPerformance(_point(table, where, point), batch, interval_s, latency_s, tail_s, batch_j, idle_w)
    if int(service.point.get(BATCH_SIZE, service.batch)) != service.batch:
        raise BadFile(f"{where}.batch is {service.batch}, and its point says {service.point[BATCH_SIZE]}")
    rate_per_s, power_w = (_number(table, key, where) for key in ("rate_per_s", "power_w"))
    gather_s = _time_s(table, "gather_ms", where, least=0.0)
    p99_s = _time_s(table, "p99_ms", where)
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
    except ValueError as error:
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
    if type(value) not in (int, float) or not is_finite(value) or not (value > 0 if least is None else value >= 0):
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


# Tuned profiles as TOML files: ``profiles/tuned/<device>/<workload>@<SLO>.toml`` in the state folder.

TUNED = "profiles/tuned"
_DIGESTS = ("", "-" + "[0-9a-f]" * 8)
"""How a name may end: that of a model, table or board that is a file tells it from others of its name."""
_MOST_BYTES = 1_000_000
_NEWEST = 256
"""So many profiles are looked at when one is sought for a kind of hardware."""
_FIRST = "# Tuned by polythrottle."
_STATISTICS = ("mean", "p50", "p90", "p95", "p99", "std")


def write_profile(profile: Profile, path: Path) -> None:
    """Write a profile whole or not at all; its folders are made.

    Raises:
        StorageError: If it cannot be written, or would replace something that is not a profile.
    """
    # Again, though callers have checked before the search: hours have passed since.
    check_replaceable(path)
    document = {
        "device": profile.device,
        "workload": profile.workload,
        "slo": list(profile.slo),
        **({} if profile.saving_fraction is None else {"saving_fraction": round(profile.saving_fraction, 6)}),
        "point": levels_of(profile.point),
        **({} if profile.workload_knobs is None else {"workload_knobs": list(profile.workload_knobs)}),
        "measured": _measured(profile.measurement),
        **({} if profile.default is None else {"default": _measured(profile.default)}),
        "provenance": dict(profile.provenance),
        **({"identity": dict(profile.identity)} if profile.identity else {}),
        **({} if profile.ladder is None else {"ladder": ladder_table(profile.ladder)}),
    }
    kind = profile.measurement.energy_kind
    replace_file(path, f"{_FIRST} Energy is {kind}.\n{tomli_w.dumps(document)}".encode())


def set_aside(path: Path) -> Path:
    """Keep a copy of a profile beside it that no name finds, and that replaces no other: ``p.toml.bak``; return where.

    Raises:
        StorageError: If it cannot be written.
    """
    names = (f"{path.name}.bak{number if number > 1 else ''}" for number in itertools.count(1))
    copy = next(each for each in map(path.with_name, names) if not os.path.lexists(each))
    # A copy and no link or move: at every moment there is a profile, and file systems of boards' cards have no links.
    replace_file(copy, read_plain(path, _MOST_BYTES))
    return copy


def read_profile(path: Path) -> Profile:
    """Return the profile in a file.

    Raises:
        BadFile: If there is no such file, it is no plain one of at most 1 MB, or not a profile: names the key.
    """
    data = read_plain(path, _MOST_BYTES)
    try:
        document = parse_toml(data)
        _figure(document, "saving_fraction")  # follows from the measurements; wrong in a file that somebody has edited
        point = point_of(_table(document["point"], "point"))
        if isinstance(batch := point.get(BATCH_SIZE, 1), str) or batch < 1 or batch != int(batch):
            raise ValueError(f"point.batch_size is {batch!r}; it must be a whole number of at least 1")
        return Profile(
            device=_word(document["device"], "device"),
            workload=_word(document["workload"], "workload"),
            point=point,
            measurement=_measurement(document["measured"]),
            default=_measurement(document["default"]) if "default" in document else None,
            slo=_slo(document["slo"]),
            provenance=_provenance(document["provenance"]),
            identity=_identity(document.get("identity", {})),
            workload_knobs=_names(document.get("workload_knobs"), "workload_knobs"),
            ladder=ladder_from_table(document["ladder"], point) if "ladder" in document else None,
        )
    except (*MALFORMED, PolythrottleError) as error:
        raise BadFile(f"{path} is not a profile: {said(error)}") from error


def tuned_path(device: str, workload: str, problem: Problem) -> Path:
    """Return where the profile of a problem goes unless another file is named: in the state folder, one for each SLO.

    Args:
        device: Its short name.
        workload: Its short name.
        problem: What was asked.

    Raises:
        StorageError: If the user has no home folder.
    """
    return state_dir() / TUNED / device / f"{workload}@{_question(problem.constraints, problem.objective)}.toml"


def find_profile(name: str) -> Path:
    """Return the file of a profile: a path, or one of those that `named_profiles` finds, the newest of them.

    Raises:
        UnknownName: If there is none; names the nearest.
        BadFile: If it is a folder, or no plain file, or nobody can tell, as in a folder of somebody else.
        InvalidInput: If the name is empty.
    """
    if not name.strip():
        raise InvalidInput("the profile's name is empty; name its file, or <device>/<workload>")
    path = Path(name)
    try:
        if path.is_file():
            return path
    except OSError as error:
        raise BadFile(f"{bounded(name)} cannot be read: {error.strerror}") from error
    if paths := named_profiles(name):
        return paths[0]
    folders = _folders()
    known = {path.relative_to(folder).as_posix()[:-5] for folder in folders for path in folder.glob("*/*.toml")}
    if "@" not in name:
        known = {each.partition("@")[0] for each in known}
    if path.is_dir():
        raise BadFile(f"{name} is a folder; name a profile's file, or <device>/<workload>{_some(known)}")
    if path.exists():
        raise BadFile(f"{name} is no plain file; name a profile's file, or <device>/<workload>{_some(known)}")
    if not known:
        raise UnknownName("profile", name, (), hint="(there is no such file either; polythrottle tune makes profiles)")
    raise UnknownName("profile", name, known, hint="(a profile is its file, or <device>/<workload>)")


def named_profiles(name: str) -> tuple[Path, ...]:
    """Return the profiles that a name such as ``<device>/<workload>`` means, the newest first.

    They lie in the state folder, in ``profiles/tuned`` of the working folder, or in the catalogue, which comes last.
    One SLO of several is named behind an @, as in ``sim-jetson-nano/resnet50@p99<=25ms``. Of a model, table or board
    that is a file the name may leave the digest out: ``cpu/model`` for ``cpu/model-1c9f0a77``.

    Args:
        name: Of device and workload, and the SLO where it matters.
    """
    base, _, slo = removesuffix(name, ".toml").partition("@")
    # `../x` has one slash too, and would lead out of the folders of profiles.
    if not re.fullmatch(r"[^/]+/[^/]+", base) or base.startswith("."):
        return ()
    *own, shipped = _folders()
    if slo:
        asked = [f"@{glob.escape(_slug(slo))}.toml"]
    else:
        asked = [".toml", "@*.toml"]
    patterns = [f"{each}{which}" for each in named_patterns(base) for which in asked]
    mine = {path for folder in own for pattern in patterns for path in folder.glob(pattern) if path.is_file()}
    # The name decides where a copy or a checkout gave several files one time.
    newest = sorted(mine, key=lambda path: (path.stat().st_mtime_ns, str(path)), reverse=True)
    return (*newest, *(path for pattern in patterns for path in sorted(shipped.glob(pattern))))


def newest_for(identity: Mapping[str, str]) -> tuple[str, Profile] | None:
    """Return the newest tuned profile for a kind of hardware and firmware, with its name; None if there is none.

    Those of the state folder and of ``profiles/tuned`` in the working folder come before those of the catalogue. What
    cannot be read is passed over.

    Args:
        identity: Of the kind.
    """
    *own, shipped = _folders()
    mine = [(path, folder) for folder in own for path in folder.glob("*/*.toml")]
    newest = sorted(mine, key=lambda each: (_written_ns(each[0]), str(each[0])), reverse=True)[:_NEWEST]
    for path, folder in (*newest, *((path, shipped) for path in sorted(shipped.glob("*/*.toml")))):
        profile = _read_once(path, _written_ns(path))
        if profile is not None and _is_for(profile, identity):
            return removesuffix(path.relative_to(folder).as_posix(), ".toml"), profile
    return None


def _is_for(profile: Profile, identity: Mapping[str, str]) -> bool:
    # A simulated board has no hardware to be known by: its URI is its identity.
    return disagreement(profile.identity or identity_by_name(profile.device), identity) is None


@lru_cache(maxsize=_NEWEST)
def _read_once(path: Path, written_ns: int) -> Profile | None:
    """Return a profile, read again when it was written again; None if it is none."""
    try:
        return read_profile(path)
    except BadFile:
        return None


def _written_ns(path: Path) -> int:
    try:
        return path.stat().st_mtime_ns
    except OSError:  # gone since it was listed
        return 0


def named_patterns(name: str) -> list[str]:
    """Return patterns of paths for a name such as ``<device>/<workload>``, whose digests may be left out.

    Args:
        name: With one slash; the device's scheme may end in a colon or a hyphen.
    """
    device, workload = (glob.escape(re.sub(r"^(sim|nvml|replay):", r"\1-", part)) for part in name.split("/"))
    return [f"{device}{one}/{workload}{other}" for one in _DIGESTS for other in _DIGESTS]


def _folders() -> list[Path]:
    """Return where profiles are found by name; the catalogue last."""
    own = [Path(TUNED), catalogue_dir(TUNED)]
    with contextlib.suppress(StorageError):  # without a home folder there is none of one's own
        own.insert(0, state_dir() / TUNED)
    return own


def _some(known: Iterable[str]) -> str:
    some = sorted(known)[:3]
    if some:
        return f" such as {', '.join(some)}"
    return ""


def _question(constraints: Iterable[Constraint], objective: Objective) -> str:
    """Return what was asked, as part of a file's name: ``p99-25ms+power-20W``."""
    asked = sorted(_limit(constraint) for constraint in constraints) or ["no-slo"]
    return "+".join(([] if objective is Objective.ENERGY else [str(objective)]) + asked)


def _limit(constraint: Constraint) -> str:
    name, prompts = split_metric(constraint.metric)
    if prompts is not None:
        ends = (f"over-{prompts.above}" if prompts.above else "", "" if prompts.most is None else f"to-{prompts.most}")
        name = "-".join(filter(None, (name, "prompts", *ends)))
    if constraint.relative:
        return f"{name}-{constraint.limit:.10g}x"
    factor, unit = {"s": (1e3, "ms"), "w": (1.0, "W"), "c": (1.0, "C"), "per_s": (1.0, "-per-s")}.get(
        constraint.unit, (1.0, "-per-J")
    )
    return f"{name}-{constraint.limit * factor:.10g}{unit}"


def _slug(slo: str) -> str:
    """Return how files name an SLO that was written as one, such as ``p99<=25ms``; anything else as it is."""
    try:
        return _question([Constraint.parse(each) for each in re.split(r"[+,]", slo)], Objective.ENERGY)
    except PolythrottleError:
        return slo


def _word(text: Any, name: str) -> str:
    if not isinstance(text, str) or not text.strip():
        raise ValueError(f"{name} is {text!r}, and a name was expected")
    return text


def _slo(values: Any) -> tuple[str, ...]:
    """Return the limits of a profile, each of which can be parsed."""
    limits = _names(values, "slo") or ()
    for limit in limits:
        Constraint.parse(limit)
    return limits


def _provenance(values: Any) -> dict[str, Any]:
    """Return where a profile comes from: counts are whole numbers, all else is text."""
    for name, value in _table(values, "provenance").items():
        counted = name in ("seed", "trials")
        if type(value) is not (int if counted else str):
            raise ValueError(f"provenance.{name} is {value!r}, not {'a whole number' if counted else 'a text'}")
    return dict(values)


def _identity(table: Mapping[str, Any]) -> dict[str, str]:
    if not all(isinstance(text, str) for text in _table(table, "identity").values()):
        raise ValueError("its identity holds something else than text")
    return dict(table)


def _table(values: Any, name: str) -> dict[str, Any]:
    if not isinstance(values, dict):
        raise ValueError(f"{name} is not a table")
    return values


def _names(values: Any, name: str) -> tuple[str, ...] | None:
    if values is None:
        return None
    if not isinstance(values, list) or not all(isinstance(each, str) for each in values):
        raise ValueError(f"{name} is not a list of texts")
    return tuple(values)


def check_replaceable(path: Path) -> None:
    """Check that a profile can be written, and that this would lose nothing but an older profile.

    Raises:
        StorageError: If something else is there, or its folder cannot be written.
    """
    check_folder(path)
    try:
        if path.exists() and not (path.is_file() and path.read_bytes()[: len(_FIRST)] in (_FIRST.encode(), b"")):
            raise StorageError(f"{path} is there already and not a profile; name another file with --out")
    except OSError as error:
        raise StorageError(f"{path} cannot be written: {error.strerror}") from error


def _measured(measurement: Measurement) -> dict[str, Any]:
    times = {stat: getattr(measurement.latency, f"{stat}_s") for stat in _STATISTICS}
    extras = measurement.extras
    values = {
        "energy_j": measurement.energy_j,
        "energy_between_j": _ends(measurement.intervals.get("energy")),
        "energy_kind": str(measurement.energy_kind),
        "boundary": measurement.boundary,
        "power_w": measurement.power_w,
        "idle_power_w": measurement.idle_power_w,
        "throughput_per_s": measurement.throughput_per_s,
        "temperature_c": measurement.temperature_c,
        "window_s": measurement.window_s,
        "queries": measurement.latency.queries,
        "latency_ms": {stat: round(time * 1e3, 6) for stat, time in times.items() if time is not None},
        "extra_ms": {name: round(value * 1e3, 6) for name, value in extras.items() if unit_of(name) == "s"},
        "tokens_per_j": extras.get("tokens_per_j"),
    }
    # TOML has no null.
    return {key: value for key, value in values.items() if value not in (None, {})}


def _ends(interval: Interval | None) -> list[float] | None:
    if interval is None or not interval.known:
        return None
    return [interval.low, interval.high]


def _intervals(ends: Any) -> dict[str, Interval]:
    if ends is None:
        return {}
    if not isinstance(ends, list) or len(ends) != 2 or not all(type(end) in (int, float) for end in ends):
        raise ValueError(f"energy_between_j is {ends!r:.40}, not two numbers")
    return {"energy": Interval(*map(float, ends))}


def _measurement(values: Any) -> Measurement:
    """Return the measurement that a table of a profile holds."""
    values = _table(values, "a measurement")
    latency = _table(values["latency_ms"], "latency_ms")
    if strange := sorted(set(latency) - set(_STATISTICS)):
        raise ValueError(f"{strange[0]!r} is no statistic of a latency; they are {', '.join(_STATISTICS)}")
    times = {f"{stat}_s": _needed(latency, stat) / 1e3 for stat in latency if stat != "mean"}
    kind = values["energy_kind"]
    # As a list: before Python 3.12 an enumeration raises TypeError if it is asked for a plain text.
    if kind not in list(EnergyKind):
        raise ValueError(f"energy_kind is one of {', '.join(EnergyKind)}, not {kind!r:.40}")
    queries = values.get("queries")
    if queries is not None and type(queries) is not int:
        raise ValueError(f"queries is {queries!r:.40}, not a whole number")
    return Measurement(
        Latency(_needed(latency, "mean") / 1e3, queries=queries, **times),
        _needed(values, "energy_j"),
        _needed(values, "throughput_per_s"),
        _figure(values, "power_w"),
        EnergyKind(kind),
        str(values.get("boundary", "")),
        _figure(values, "temperature_c"),
        _figure(values, "window_s"),
        intervals=_intervals(values.get("energy_between_j")),
        idle_power_w=_figure(values, "idle_power_w"),
        extras=_extras(values),
    )


def _extras(values: Mapping[str, Any]) -> dict[str, float]:
    """Return what only some workloads have: times of tokens and of classes of requests, tokens per joule."""
    times = _table(values.get("extra_ms", {}), "extra_ms")
    if strange := sorted(name for name in times if not is_metric(name) or unit_of(name) != "s"):
        raise ValueError(f"{strange[0]!r} in extra_ms is no time")
    extras = {name: _needed(times, name) / 1e3 for name in times}
    if (tokens_per_j := _figure(values, "tokens_per_j")) is not None:
        extras["tokens_per_j"] = tokens_per_j
    return extras


def _needed(table: Mapping[str, Any], name: str) -> float:
    """Return a figure that must be there."""
    if (value := _figure(table, name)) is None:
        raise KeyError(name)
    return value


def _figure(table: Mapping[str, Any], name: str) -> float | None:
    """Return a figure of a table; None if it is not there."""
    value = table.get(name)
    if value is not None and (type(value) not in (int, float) or not is_finite(value)):
        raise ValueError(f"{name} is {value!r:.40}, not a finite number")
    return value
