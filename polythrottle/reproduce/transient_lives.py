"""How long machines are kept: published shares, recorded lives, and later ones predicted from earlier ones."""

from collections.abc import Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from statistics import fmean
from typing import Any

from polythrottle.cluster.lifetime import HOUR_S
from polythrottle.cluster.predict.bursts import bursts
from polythrottle.cluster.predict.curves import fit_curves
from polythrottle.cluster.predict.pooled import Series, pooled
from polythrottle.cluster.predict.prior import REVOCATIONS, prior
from polythrottle.cluster.predict.survival import kaplan_meier
from polythrottle.cluster.tables import LifetimeRow, lifetime_rows
from polythrottle.errors import InvalidInput

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
        estimate, widened = kaplan_meier(later), kaplan_meier(later, bursts(rows).effect)
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
