"""Tuned profiles as TOML files: ``profiles/tuned/<device>/<workload>@<SLO>.toml`` in the state folder."""

import contextlib
import glob
import os
import re
import tempfile
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import tomli_w

from polythrottle.catalog.ladders import ladder_of, levels_of, point_of, table_of
from polythrottle.catalog.places import catalogue_dir
from polythrottle.errors import BadFile, PolythrottleError, StorageError, UnknownName
from polythrottle.measurement import EnergyKind, Interval, Latency, Measurement
from polythrottle.plainfile import contents, toml
from polythrottle.problem import Constraint, Objective, Problem
from polythrottle.profile import Profile
from polythrottle.state import state_dir

TUNED = "profiles/tuned"
DIGEST = "[0-9a-f]" * 8
"""How a file's name ends that tells one model from another of its name, as a pattern of paths."""
_MOST_BYTES = 1_000_000
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
        BadFile: If there is no such file, it is no plain one of at most 1 MB, or not a profile: names the key.
    """
    data = contents(path, _MOST_BYTES)
    try:
        document = toml(data)
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
    except UnicodeDecodeError as error:
        raise BadFile(f"{path} is not a profile: it is not text in UTF-8") from error
    except RecursionError as error:
        raise BadFile(f"{path} is not a profile: it is nested too deep") from error
    except KeyError as error:
        raise BadFile(f"{path} is not a profile: it lacks {error}") from error
    except (ValueError, TypeError, AttributeError, OverflowError, PolythrottleError) as error:
        raise BadFile(f"{path} is not a profile: {error}") from error


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
        BadFile: If it is a folder.
    """
    path = Path(name)
    if path.is_file():
        return path
    if found := named_profiles(name):
        return found[0]
    folders = _folders()
    known = {path.relative_to(folder).as_posix()[:-5] for folder in folders for path in folder.glob("*/*.toml")}
    if "@" not in name:
        known = {each.partition("@")[0] for each in known}
    if path.is_dir():
        raise BadFile(f"{name} is a folder; name a profile's file, or <device>/<workload>{_some(known)}")
    if not known:
        raise UnknownName("profile", name, (), hint="(there is no such file either; polythrottle tune makes profiles)")
    raise UnknownName("profile", name, known, hint="(a profile is its file, or <device>/<workload>)")


def named_profiles(name: str) -> tuple[Path, ...]:
    """Return the profiles that a name such as ``<device>/<workload>`` means, the newest first.

    They lie in the state folder, in ``profiles/tuned`` of the working folder, or in the catalogue, which comes last.
    One SLO of several is named behind an @, as in ``sim-jetson-nano/resnet50@p99<=25ms``. Of a model that is a file the
    name may leave the digest out: ``cpu/model`` for ``cpu/model-1c9f0a77``.

    Args:
        name: Of device and workload, and the SLO where it matters.
    """
    base, _, slo = name.removesuffix(".toml").partition("@")
    base = re.sub(r"^(sim|nvml|replay):", r"\1-", base)
    if not re.fullmatch(r"[^/]+/[^/]+", base) or base.startswith("."):
        return ()
    *own, shipped = _folders()
    asked = [f"@{glob.escape(_slug(slo))}.toml"] if slo else [".toml", "@*.toml"]
    endings = [f"{digest}{each}" for digest in ("", f"-{DIGEST}") for each in asked]
    patterns = [f"{glob.escape(base)}{which}" for which in endings]
    mine = {path for folder in own for pattern in patterns for path in folder.glob(pattern) if path.is_file()}
    newest = sorted(mine, key=lambda path: (path.stat().st_mtime_ns, str(path)), reverse=True)
    return (*newest, *(path for pattern in patterns for path in sorted(shipped.glob(pattern))))


def _folders() -> list[Path]:
    """Return where profiles are found by name; the catalogue last."""
    own = [Path(TUNED), catalogue_dir(TUNED)]
    with contextlib.suppress(StorageError):  # without a home folder there is none of one's own
        own.insert(0, state_dir() / TUNED)
    return own


def _some(known: Iterable[str]) -> str:
    some = sorted(known)[:3]
    return f" such as {', '.join(some)}" if some else ""


def _question(constraints: Iterable[Constraint], objective: Objective) -> str:
    """Return what was asked, as part of a file's name: ``p99-25ms+power-20W``."""
    asked = sorted(_limit(constraint) for constraint in constraints) or ["no-slo"]
    return "+".join(([] if objective is Objective.ENERGY else [str(objective)]) + asked)


def _limit(constraint: Constraint) -> str:
    if constraint.relative:
        return f"{constraint.metric}-{constraint.limit:.10g}x"
    factor, unit = {"s": (1e3, "ms"), "w": (1.0, "W"), "c": (1.0, "C"), "per_s": (1.0, "-per-s")}.get(
        constraint.unit, (1.0, "-per-J")
    )
    return f"{constraint.metric}-{constraint.limit * factor:.10g}{unit}"


def _slug(slo: str) -> str:
    """Return how files name an SLO that was written as one, such as ``p99<=25ms``; anything else as it is."""
    try:
        return _question([Constraint.parse(each) for each in re.split(r"[+,]", slo)], Objective.ENERGY)
    except PolythrottleError:
        return slo


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
        with tempfile.TemporaryFile(dir=folder):
            pass  # what rights alone do not tell: a folder of the kernel's, a file system that is read-only or full
        if path.exists() and not (path.is_file() and path.read_bytes()[: len(_FIRST)] in (_FIRST.encode(), b"")):
            raise StorageError(f"{path} is there already and not a profile; name another file with --out")
    except OSError as error:
        raise StorageError(f"{path} cannot be written: {error.strerror}") from error


def replace_file(path: Path, data: bytes) -> None:
    """Write a file whole or not at all, through a temporary one beside it; its folders are made.

    Raises:
        StorageError: If it cannot be written.
    """
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
