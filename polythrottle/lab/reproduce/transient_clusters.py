"""Whole trainings, lost workers, scaling and bottlenecks of the papers on transient training, beside the models'."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import combinations
from pathlib import Path
from random import Random
from statistics import fmean
from typing import Any

from scipy.optimize import brentq

from polythrottle.cluster.predict.completion import (
    ClusterJob,
    ClusterMember,
    asynchronous,
    complete,
    think_s,
)
from polythrottle.cluster.recorded_tables import LifetimeRow, lifetime_rows
from polythrottle.domain.fleet.transient_machine import KEPT, Lifetime, Network
from polythrottle.lab.reproduce.cluster_tables import JobRow, job_rows, speed_rows
from polythrottle.lab.reproduce.published import (
    CONFIGURATIONS,
    IMPACTS,
    NETWORKS,
    SERVER_USD_PER_H,
    SINGLE_S,
    SPANNING,
    STEPS,
    USD_PER_H,
    Spanning,
)
from polythrottle.lab.reproduce.server_scaling import Curve, NetworkFit, curve_error, curves, fit_cost, fit_network
from polythrottle.lab.reproduce.transient_machines import kaplan_meier
from polythrottle.training.elastic.nodes.bottleneck import THRESHOLD, Shortfall

Curves = Mapping[Curve, Mapping[int, float]]
HALVES = {"odd": (1, 3, 5, 7), "even": (2, 4, 6, 8), "ends": (1, 2, 7, 8), "spread": (1, 4, 5, 8)}
"""Numbers of workers fitted to; the other four of each curve are predicted."""
_SPLITS = 40
_DRAWS = 400
_KINDS = {"k": "K80", "p": "P100", "v": "V100"}
_TRAINED = "res32"


@dataclass(frozen=True)
class Trainer:
    """What predicts ICAC's trainings: nothing of them but the times of single machines.

    Attributes:
        servers: ResNet-32 as fitted to CM-DARE's curves, other machines and another year.
        lives: How long ICAC's machines of each type were kept (February 2019), as observed.
    """

    servers: NetworkFit
    lives: Mapping[str, Lifetime]

    def speed(self, workers: Sequence[str], servers: int) -> float:
        """Return the speed of a cluster in steps per second, from its workers' alone.

        Args:
            workers: GPU type of each.
            servers: Parameter servers; 0 for a worker that is its own.
        """
        alone = [STEPS / SINGLE_S[gpu] for gpu in workers]
        if not servers:
            return sum(alone)
        thinks_s = [think_s(one, self.servers.services_s[1]) for one in alone]
        return asynchronous(thinks_s, self.servers.services_s[servers])

    def training(self, workers: Sequence[str], servers: int, transient: bool, lost: bool) -> tuple[float, float]:
        """Return the mean time of a training in seconds, and its mean cost; lost workers are not replaced.

        Args:
            workers: GPU type of each.
            servers: Parameter servers; 0 for a worker that is its own.
            transient: Whether the workers are paid as transient.
            lost: Whether they may be lost.
        """
        members = tuple(
            ClusterMember(self.lives.get(gpu, KEPT) if lost else KEPT, USD_PER_H[gpu, transient]) for gpu in workers
        )
        job = ClusterJob(
            STEPS,
            members,
            lambda there: self.speed([workers[index] for index in there], servers),
            servers * SERVER_USD_PER_H,
        )
        found = complete(job, _DRAWS)
        assert found.time_s is not None
        assert found.usd is not None
        return found.time_s.mean, found.usd.mean


def trainer(folder: Path) -> Trainer:
    """Return what predicts ICAC's trainings, from the tables in a folder.

    Raises:
        BadFile: If a table is missing or damaged.
    """
    measured = curves(speed_rows(folder / "training_speed_by_cluster_size_cmdare.csv"))
    lived: dict[str, list[LifetimeRow]] = {}
    for row in lifetime_rows(folder / "gcp_preemptible_lifetimes.csv"):
        lived.setdefault(row.gpu, []).append(row)
    servers = fit_network({key: some for key, some in measured.items() if key[2] == _TRAINED})
    return Trainer(servers, {gpu: kaplan_meier(rows).observed() for gpu, rows in lived.items()})


def table(some: Trainer) -> list[dict[str, Any]]:
    """Return ICAC's configurations: published and predicted time, cost, speed-up, and saving over one K80."""
    alone_usd = CONFIGURATIONS[0].usd
    ours_alone_usd = some.training(CONFIGURATIONS[0].workers, 0, False, False)[1]
    found = []
    for one in CONFIGURATIONS:
        lost = one.transient and len(one.workers) > 1
        time_s, usd = some.training(one.workers, one.servers, one.transient, lost)
        published = {"published_time_s": one.time_s, "published_usd": one.usd}
        ratios = {
            "published_speed_up": CONFIGURATIONS[0].time_s / one.time_s,
            "speed_up": SINGLE_S["K80"] / time_s,
            "published_saving": 1 - one.usd / alone_usd,
            "saving": 1 - usd / ours_alone_usd,
        }
        given = len(one.workers) == 1
        found.append({"name": one.name, "given": given, "time_s": time_s, "usd": usd, **published, **ratios})
    return found


def beside(some: Trainer, rows: Sequence[JobRow]) -> list[dict[str, Any]]:
    """Return the recorded trainings with one and two parameter servers beside the predicted ones, by cluster."""
    by_name: dict[str, list[JobRow]] = {}
    for row in rows:
        by_name.setdefault(row.cluster, []).append(row)
    found = []
    for name, mine in by_name.items():
        if (parts := re.fullmatch(r"([12])ps(\d+)([kpv])", name)) is None:
            continue
        workers = (_KINDS[parts[3]],) * int(parts[2])
        servers = int(parts[1])
        time_s, usd = some.training(workers, servers, True, False)
        means = {
            "published_time_s": fmean(row.duration_s for row in mine),
            "published_usd": fmean(row.usd for row in mine),
        }
        found.append({"name": f"{len(workers)} {workers[0]}, {servers} PS", "time_s": time_s, "usd": usd, **means})
    return found


def recorded_trainings(folder: Path) -> tuple[JobRow, ...]:
    """Return the recorded trainings.

    Raises:
        BadFile: If the table is missing or damaged.
    """
    return job_rows(folder / "gcp_transient_training_runs.csv")


def headline(some: Trainer) -> dict[str, float]:
    """Return the speed-up of eight on-demand K80 over one, and the saving of eight transient ones against those."""
    alone_s, _ = some.training(("K80",), 0, False, False)
    lasting_s, lasting_usd = some.training(("K80",) * 8, 1, False, False)
    _, transient_usd = some.training(("K80",) * 8, 1, True, True)
    return {"speed_up": alone_s / lasting_s, "saving": 1 - transient_usd / lasting_usd}


def impacts(some: Trainer) -> list[dict[str, Any]]:
    """Return what losing workers costs, if they are lost at the ages at which ICAC's machines were, while it trains."""
    found = []
    for one in IMPACTS:
        random = Random(0)
        speeds = [some.speed(("K80",) * left, 1) for left in range(one.workers, one.workers - one.lost - 1, -1)]
        times_s = [_shrinking_s(speeds, _losses_s(some.lives["K80"], speeds, random)) for _ in range(_DRAWS)]
        slowdown = fmean(times_s) * speeds[0] / STEPS - 1
        found.append({"workers": one.workers, "lost": one.lost, "published": one.slowdown, "slowdown": slowdown})
    return found


def _losses_s(life: Lifetime, speeds: Sequence[float], random: Random) -> list[float]:
    """Return ages of loss within the time of an undisturbed training, rising."""
    lost = 1 - life.survival(STEPS / speeds[0])
    return sorted(life.quantile_s(1 - lost * random.random()) for _ in speeds[1:])


def _shrinking_s(speeds: Sequence[float], losses_s: Sequence[float]) -> float:
    """Return the time of a training whose speed falls at each loss."""
    now_s = 0.0
    left = float(STEPS)
    for speed, loss_s in zip(speeds, losses_s, strict=False):
        if left <= speed * (loss_s - now_s):
            return now_s + left / speed
        left -= speed * (loss_s - now_s)
        now_s = loss_s
    return now_s + left / speeds[-1]


def regions(some: Trainer) -> list[dict[str, Any]]:
    """Return what one worker in another region costs, from the distance that explains what two there cost."""
    found = []
    for two, one in zip(SPANNING[::2], SPANNING[1::2], strict=True):
        distance_s = float(brentq(partial(_spanning_gap, some, two), 0.0, 1.0))
        ours = _spanning(some, one, distance_s)
        away = {"gpu": one.gpu, "away": one.away, "round_trip_s": distance_s}
        found.append({**away, "published": one.slowdown, "slowdown": ours})
    return found


def _spanning_gap(some: Trainer, one: Spanning, distance_s: float) -> float:
    return _spanning(some, one, distance_s) - one.slowdown


def _spanning(some: Trainer, one: Spanning, distance_s: float) -> float:
    """Return the slowdown of four workers of a type of which some are a round trip away from the server."""
    service_s = some.servers.services_s[1]
    near_s, far_s = (think_s(STEPS / SINGLE_S[one.gpu], service_s, away_s) for away_s in (0.0, distance_s))
    together = asynchronous([near_s] * 4, service_s)
    return together / asynchronous([near_s] * (4 - one.away) + [far_s] * one.away, service_s) - 1


def scaling(measured: Curves) -> dict[str, Any]:
    """Return how well CM-DARE's curves are predicted: half the points of each, and half of the curves, from the rest.

    Args:
        measured: Speeds in steps per second by curve and number of workers.
    """
    return {
        "points": {name: _points(measured, workers) for name, workers in HALVES.items()},
        **_whole(measured),
        "curves": _each(measured),
    }


def _by_network(measured: Curves) -> list[dict[Curve, Mapping[int, float]]]:
    names = dict.fromkeys(network for _, _, network in measured)
    return [{curve: some for curve, some in measured.items() if curve[2] == name} for name in names]


def _points(measured: Curves, fitted: Sequence[int]) -> float:
    errors = []
    for mine in _by_network(measured):
        fit = fit_network({key: {n: v for n, v in some.items() if n in fitted} for key, some in mine.items()})
        errors += [
            abs(fit.speed((gpu,) * n, servers) / speed - 1)
            for (gpu, servers, _), some in mine.items()
            for n, speed in some.items()
            if n not in fitted
        ]
    return fmean(errors)


def _whole(measured: Curves) -> dict[str, Any]:
    known = {key: some for key, some in measured.items() if key[2] in NETWORKS}
    halves = list(combinations(known, len(known) // 2))
    Random(0).shuffle(halves)
    errors = []
    for half in halves[:_SPLITS]:
        cost = fit_cost({key: known[key] for key in half}, networks())
        errors.append(fmean(curve_error(cost, key, known[key], networks()) for key in known if key not in half))
    return {"whole_curves": fmean(errors), "whole_curves_worst": max(errors), "splits": len(errors)}


def networks() -> dict[str, Network]:
    """Return the networks of CM-DARE's curves."""
    return {name: Network(name, *figures) for name, figures in NETWORKS.items()}


def _each(measured: Curves) -> list[dict[str, Any]]:
    """Return every curve beside the one fitted to its odd numbers of workers."""
    found = []
    for mine in _by_network(measured):
        fit = fit_network({key: {n: v for n, v in some.items() if n in HALVES["odd"]} for key, some in mine.items()})
        for (gpu, servers, name), some in mine.items():
            guess = {n: fit.speed((gpu,) * n, servers) for n in some}
            rows = [{"workers": n, "measured": one, "predicted": guess[n]} for n, one in some.items()]
            found.append({"gpu": gpu, "servers": servers, "network": name, "speeds": rows})
    return found


def bottlenecks(measured: Curves, threshold: float = THRESHOLD) -> list[dict[str, Any]]:
    """Return for each curve from how many workers on it falls short of the sum of single ones, and what a server adds.

    Args:
        measured: Speeds in steps per second by curve and number of workers.
        threshold: Share by which it may fall short.
    """
    found = []
    for (gpu, servers, name), some in measured.items():
        short = {n: Shortfall(0, one, sum((some[1],) * n), threshold) for n, one in some.items()}
        flagged = [n for n, one in short.items() if one.found]
        more = measured.get((gpu, servers + 1, name))
        most = max(some)
        found.append(
            {
                **{"gpu": gpu, "servers": servers, "network": name, "flagged": flagged},
                "short_at_most": short[most].short,
                "another_server": None if more is None or most not in more else more[most] / some[most] - 1,
            }
        )
    return found


def off(one: Mapping[str, Any], figure: str) -> float:
    """Return by which share a predicted figure of a configuration is off the published one."""
    return float(one[figure] / one[f"published_{figure}"] - 1)
