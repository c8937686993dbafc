"""Tuned profiles as TOML files: ``profiles/tuned/<device>/<workload>.toml``."""

import os
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import tomli_w

from polythrottle.catalog.ladders import ladder_of, levels_of, point_of, table_of
from polythrottle.catalog.places import catalogue_dir
from polythrottle.errors import BadFile, PolythrottleError, StorageError, UnknownName
from polythrottle.measurement import EnergyKind, Interval, Latency, Measurement
from polythrottle.profile import Profile

_FIRST = "# Tuned by polythrottle."
_STATISTICS = ("mean", "p50", "p90", "p95", "p99", "std")


def write_profile(profile: Profile, path: Path) -> None:
    """Write a profile whole or not at all; its folders are made.

    Raises:
        StorageError: If it cannot be written, or would replace something that is not a profile.
    """
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
        **({} if profile.ladder is None else {"ladder": table_of(profile.ladder)}),
    }
    kind = profile.measurement.energy_kind
    replace_file(path, f"{_FIRST} Energy is {kind}.\n{tomli_w.dumps(document)}".encode())


def read_profile(path: Path) -> Profile:
    """Return the profile in a file.

    Raises:
        BadFile: If there is no such file, or it is not a profile: names the key.
    """
    try:
        document = tomllib.loads(path.read_text(encoding="utf-8"))
        point = point_of(document["point"])
        if isinstance(batch := point.get("batch_size", 1), str) or batch < 1 or batch != int(batch):
            raise ValueError(f"point.batch_size is {batch!r}; it must be a whole number of at least 1")
        return Profile(
            device=_word(document["device"]),
            workload=_word(document["workload"]),
            point=point,
            measurement=_measurement(document["measured"]),
            default=_measurement(document["default"]) if "default" in document else None,
            slo=tuple(document["slo"]),
            provenance=document["provenance"],
            identity=_identity(document.get("identity", {})),
            workload_knobs=_names(document.get("workload_knobs")),
            ladder=ladder_of(document["ladder"], point) if "ladder" in document else None,
        )
    except OSError as error:
        raise BadFile(f"{path} cannot be read: {error.strerror}") from error
    except RecursionError as error:
        raise BadFile(f"{path} is not a profile: it is nested too deep") from error
    except KeyError as error:
        raise BadFile(f"{path} is not a profile: it lacks {error}") from error
    except (ValueError, TypeError, AttributeError, OverflowError, PolythrottleError) as error:
        raise BadFile(f"{path} is not a profile: {error}") from error


def find_profile(name: str) -> Path:
    """Return the file of a profile: a path, or ``<device>/<workload>`` below ``profiles/tuned``.

    Profiles of the working folder come before those of the catalogue.

    Raises:
        UnknownName: If there is none; names the nearest.
    """
    folders = (Path("profiles/tuned"), catalogue_dir("profiles/tuned"))
    tried = (Path(name), *(folder / f"{name.removesuffix('.toml')}.toml" for folder in folders))
    for path in tried:
        if path.is_file():
            return path
    known = {str(path.relative_to(folder))[:-5] for folder in folders for path in folder.glob("*/*.toml")}
    raise UnknownName("profile", name, known)


def _word(text: Any) -> str:
    if not isinstance(text, str):
        raise TypeError(f"{text!r} is not the name of a device or a workload")
    return text


def _identity(table: Mapping[str, Any]) -> dict[str, str]:
    if not all(isinstance(text, str) for text in table.values()):
        raise TypeError("its identity holds something else than text")
    return dict(table)


def _names(values: Any) -> tuple[str, ...] | None:
    if values is None:
        return None
    if not isinstance(values, list) or not all(isinstance(name, str) for name in values):
        raise TypeError("workload_knobs is not a list of names")
    return tuple(values)


def check_replaceable(path: Path) -> None:
    """Check that a profile can be written, and that this would lose nothing but an older profile.

    Raises:
        StorageError: If something else is there, or its folder cannot be written.
    """
    try:
        folder = next(folder for folder in path.absolute().parents if folder.exists())
        if not folder.is_dir() or not os.access(folder, os.W_OK | os.X_OK):
            raise StorageError(f"{path} cannot be written: {folder} is not a folder that can be written")
        if path.exists() and not (path.is_file() and path.read_bytes()[: len(_FIRST)] in (_FIRST.encode(), b"")):
            raise StorageError(f"{path} is there already and not a profile; name another file with --out")
    except OSError as error:
        raise StorageError(f"{path} cannot be written: {error.strerror}") from error


def replace_file(path: Path, data: bytes) -> None:
    """Write a file whole or not at all, through a temporary one beside it; its folders are made.

    Raises:
        StorageError: If it cannot be written.
    """
    import tempfile

    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, draft = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
        try:
            with os.fdopen(handle, "wb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
            os.chmod(draft, 0o644)
            os.replace(draft, path)
        except BaseException:
            os.unlink(draft)
            raise
    except OSError as error:
        raise StorageError(f"{path} cannot be written: {error.strerror}") from error


def _measured(measurement: Measurement) -> dict[str, Any]:
    times = {stat: getattr(measurement.latency, f"{stat}_s") for stat in _STATISTICS}
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
    }
    return {key: value for key, value in values.items() if value is not None}


def _ends(interval: Interval | None) -> list[float] | None:
    return None if interval is None or not interval.known else [interval.low, interval.high]


def _intervals(ends: Any) -> dict[str, Interval]:
    return {} if ends is None else {"energy": Interval(*map(float, ends))}


def _measurement(values: Mapping[str, Any]) -> Measurement:
    times = {f"{stat}_s": time / 1e3 for stat, time in values["latency_ms"].items()}
    return Measurement(
        Latency(**times, queries=values.get("queries")),
        values["energy_j"],
        values["throughput_per_s"],
        values.get("power_w"),
        EnergyKind(values["energy_kind"]),
        values.get("boundary", ""),
        values.get("temperature_c"),
        values.get("window_s"),
        intervals=_intervals(values.get("energy_between_j")),
        idle_power_w=values.get("idle_power_w"),
    )
