"""How long transient machines are kept, recorded and predicted, and what recorded tables must hold to be compared."""

from collections.abc import Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from statistics import fmean
from typing import Any

from polythrottle.cluster.predict.lifetimes import REVOCATIONS, Series, pooled, prior
from polythrottle.cluster.recorded_tables import (
    CheckpointRow,
    LifetimeRow,
    StepRow,
    checkpoint_rows,
    lifetime_rows,
    step_rows,
)
from polythrottle.domain.errors import BadFile, InvalidInput
from polythrottle.domain.fleet.transient_machine import HOUR_S
from polythrottle.lab.reproduce.cluster_tables import SpeedRow, StartupRow, job_rows, speed_rows, startup_rows
from polythrottle.lab.reproduce.published import NETWORKS, STARTUP_S
from polythrottle.lab.reproduce.transient_machines import bursts, fit_curves, kaplan_meier

# How long machines are kept: published shares, recorded lives, and later ones predicted from earlier ones.

AGES_H = (1.0, 6.0, 12.0, 24.0)
_JUST_BEFORE_S = 1.0
_ONE_BATCH = timedelta(hours=3)
FILES = ("gcp_preemptible_lifetimes.csv", "aws_spot_lifetimes_2020.csv")


def shares(rows: Sequence[LifetimeRow]) -> list[dict[str, Any]]:
    """Return by GPU type and region the share lost within 24 h: published by CM-DARE, and recorded before by ICAC."""
    known = {(some.gpu, some.region): some.lost for some in REVOCATIONS}
    by_series = _by_series(rows)
    found: list[dict[str, Any]] = [_share(key, some, known) for key, some in by_series.items()]
    seen = {(one["gpu"], one["region"].rpartition("-")[0]) for one in found}
    for (gpu, region), lost in known.items():
        if (gpu, region) not in seen:
            found.append({"gpu": gpu, "region": region, "published": list(lost), "recorded": None, "machines": 0})
    return found


def _share(key: Series, rows: Sequence[LifetimeRow], known: Mapping[Series, Sequence[float]]) -> dict[str, Any]:
    gpu, zone = key
    estimate = kaplan_meier(rows)
    published = known.get((gpu, zone.rpartition("-")[0]))
    try:
        best = fit_curves(rows)[0].family
    except InvalidInput:
        best = None  # none was lost
    return {
        **{"gpu": gpu, "region": zone, "machines": len(rows), "family": best},
        "published": None if published is None else list(published),
        "recorded": [1 - estimate.survival(_age_s(hours)) for hours in AGES_H],
    }


def calibration(rows: Sequence[LifetimeRow]) -> list[dict[str, Any]]:
    """Return for each series how its later machines, left out, lived beside what the earlier ones and other series say.

    The later machines are those of the last batch that was started together, or else the later half.
    """
    found = []
    for (gpu, region), mine in _by_series(rows).items():
        later = _later(mine)
        if not later or len(later) == len(mine):
            continue
        rest = [row for row in rows if row not in later]
        lifetime = pooled(rest, prior).lifetime(gpu, region)
        estimate = kaplan_meier(later)
        widened = kaplan_meier(later, bursts(rows).effect)
        bands = [estimate.band(_age_s(hours)) for hours in AGES_H]
        guesses = [lifetime.survival(_age_s(hours)) for hours in AGES_H]
        wide = [widened.band(_age_s(hours)) for hours in AGES_H]
        found.append(
            {
                **{"gpu": gpu, "region": region, "machines": len(later), "earlier": len(mine) - len(later)},
                "predicted": guesses,
                "bands": [[band.low, band.survival, band.high] for band in bands],
                "inside": [band.holds(one) for band, one in zip(bands, guesses, strict=True)],
                "inside_for_bursts": [band.holds(one) for band, one in zip(wide, guesses, strict=True)],
            }
        )
    return found


def inside(found: Sequence[Mapping[str, Any]], key: str = "inside") -> float:
    """Return the share of predicted survivals inside their bands."""
    return fmean(one for series in found for one in series[key])


def lives(folder: Path) -> list[tuple[LifetimeRow, ...]]:
    """Return the recorded lives, a table each.

    Raises:
        BadFile: If a table is missing or damaged.
    """
    return [lifetime_rows(folder / name) for name in FILES]


def _by_series(rows: Sequence[LifetimeRow]) -> dict[Series, list[LifetimeRow]]:
    found: dict[Series, list[LifetimeRow]] = {}
    for row in rows:
        found.setdefault((row.gpu, row.region), []).append(row)
    return found


def _later(rows: Sequence[LifetimeRow]) -> list[LifetimeRow]:
    starts = sorted(row.start for row in rows)
    batch = [row for row in rows if row.start > starts[-1] - _ONE_BATCH]
    if 0.3 * len(rows) <= len(batch) <= 0.7 * len(rows):
        return batch
    return [row for row in rows if row.start >= starts[len(starts) // 2]]


def _age_s(hours: float) -> float:
    return hours * HOUR_S - _JUST_BEFORE_S


# What tables of transient training must hold so that the papers' figures can be set beside the models'.

_WORKERS = range(1, 9)
_TRAINED = ("K80", 1, "res32")
_FEWEST = 2


def check_tables(folder: Path) -> None:
    """Check that every table is there and holds what the papers' figures are made of.

    Args:
        folder: Where the tables are.

    Raises:
        BadFile: If one is missing, damaged or holds too little; says which, and what it needs.
    """
    steps = folder / "training_speed_by_network_cmdare.csv"
    checkpoints = folder / "gcp_checkpoint_times_cmdare.csv"
    speeds = folder / "training_speed_by_cluster_size_cmdare.csv"
    starts = folder / "gcp_startup_times_cmdare.csv"
    job_rows(folder / "gcp_transient_training_runs.csv")
    for path, lack in (
        (steps, _steps_lack(step_rows(steps))),
        (speeds, _speeds_lack(speed_rows(speeds))),
        (checkpoints, _checkpoints_lack(checkpoint_rows(checkpoints))),
        (starts, _starts_lack(startup_rows(starts))),
        *((folder / name, _lives_lack(lifetime_rows(folder / name))) for name in FILES[1:]),
        (folder / FILES[0], _lives_lack(lifetime_rows(folder / FILES[0]), "K80")),
    ):
        if lack:
            raise BadFile(f"{path} cannot be set beside the papers: {lack}")


def _steps_lack(rows: Sequence[StepRow]) -> str:
    for gpu in dict.fromkeys(row.gpu for row in rows):
        if sum(row.gpu == gpu for row in rows) < _FEWEST:
            return f"it has one network only on {gpu}; a network is predicted from the others on its type"
    return ""


def _speeds_lack(rows: Sequence[SpeedRow]) -> str:
    found: dict[tuple[str, int, str], set[int]] = {}
    for row in rows:
        found.setdefault((row.gpu, row.servers, row.network), set()).add(row.workers)
    for (gpu, servers, network), workers in found.items():
        if absent := [str(count) for count in _WORKERS if count not in workers]:
            where = f"{network} on {gpu} with {servers} parameter server{'s' * (servers > 1)}"
            return f"the curve of {where} has no speed with {', '.join(absent)} workers; each needs 1 to 8"
    if _TRAINED not in found:
        return "it has no curve of res32 on K80 with one parameter server"
    if sum(network in NETWORKS for _, _, network in found) < _FEWEST:
        return f"it needs at least two curves of {', '.join(NETWORKS)}"
    return ""


def _checkpoints_lack(rows: Sequence[CheckpointRow]) -> str:
    if len({row.network for row in rows}) < _FEWEST:
        return "it has one network only; a checkpoint is predicted from those of others"
    return ""


def _starts_lack(rows: Sequence[StartupRow]) -> str:
    for gpu, transient in STARTUP_S:
        if not any((row.gpu, row.transient) == (gpu, transient) for row in rows):
            return f"it has no start of {'a preemptible' if transient else 'an on-demand'} {gpu}"
    return ""


def _lives_lack(rows: Sequence[LifetimeRow], gpu: str = "") -> str:
    if gpu and not any(row.gpu == gpu for row in rows):
        return f"it has no {gpu}, whose lives ICAC's clusters are predicted from"
    starts: dict[tuple[str, str], set[object]] = {}
    for row in rows:
        starts.setdefault((row.gpu, row.region), set()).add(row.start)
    if all(len(some) < _FEWEST for some in starts.values()):
        return "no type and region has machines started at two times; later ones are predicted from earlier ones"
    return ""
