"""The papers on transient training beside the models of cluster/predict, as one document and figure by figure."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict
from itertools import chain
from pathlib import Path
from statistics import fmean
from typing import Any

from polythrottle.cluster.predict.accuracy import OURS, covered, leaking, left_out, mape
from polythrottle.cluster.predict.step_and_checkpoint_times import left_out_errors, repeat_error
from polythrottle.cluster.recorded_tables import checkpoint_rows, step_rows
from polythrottle.domain.errors import BadFile
from polythrottle.domain.fleet.transient_machine import Network
from polythrottle.lab.reproduce.cluster_tables import speed_rows, startup_rows
from polythrottle.lab.reproduce.polythrottle_paper import Bar
from polythrottle.lab.reproduce.published import (
    CHECKPOINT_ERRORS,
    CM_DARE,
    ICAC,
    NETWORKS,
    PUBLISHED_ERRORS,
    SAVING,
    SPEED_UP,
    STARTUP_S,
)
from polythrottle.lab.reproduce.server_scaling import curves
from polythrottle.lab.reproduce.transient_clusters import (
    HALVES,
    beside,
    bottlenecks,
    headline,
    impacts,
    off,
    recorded_trainings,
    regions,
    scaling,
    table,
    trainer,
)
from polythrottle.lab.reproduce.transient_lifetimes import AGES_H, calibration, inside, lives, shares
from polythrottle.lab.reproduce.transient_machines import framework_s, startup
from polythrottle.training.elastic.nodes.bottleneck import THRESHOLD

# The papers on transient training (arXiv 1903.00045, 2004.03072) beside the models of `cluster/predict`.
#
# Published: the papers' data. Ours: predicted, from other machines, other networks or earlier lives than what it
# stands beside; each part says from what.

_STEPS = "training_speed_by_network_cmdare.csv"
_SPEEDS = "training_speed_by_cluster_size_cmdare.csv"
_CHECKPOINTS = "gcp_checkpoint_times_cmdare.csv"
_STARTUPS = "gcp_startup_times_cmdare.csv"
SOURCES = "github.com/cake-lab/CM-DARE and github.com/cake-lab/transient-deep-learning"

NOTES = (
    "7.7 times is eight on-demand K80 against one; 62.9 % is eight transient K80 against eight on-demand ones.",
    "Predicted trainings start from the times of single machines, ICAC's prices, ResNet-32's curves of CM-DARE (other "
    "machines, another year) and the lives of ICAC's machines; no time of a cluster of ICAC's is used. Only the knee "
    "of the speed model was chosen in view of both papers' clusters.",
    "CM-DARE's published errors leak: repeats of every network are on both sides of its split. Ours under that "
    "protocol draw the repeats from the table's means and deviations.",
    "On P100 a few networks were measured in another campaign, 10 to 16 % faster; rows with holes mark them. The model "
    "estimates that factor from the other such rows. Without it the error on P100 is 8.2 %.",
    "The band of a survival counts machines as independent; they are lost in bursts, which makes the true band wider.",
)


def find_tables(given: Path | None) -> Path:
    """Return the folder with the tables: the one given, or data/transient here or in a folder beside this one.

    Raises:
        BadFile: If it is not there: says where the data come from.
    """
    here = Path.cwd()
    if given:
        places = [given]
    else:
        places = [here, here / "data/transient", *sorted(here.parent.glob("*/data/transient"))]
    for place in places:
        if (place / _STEPS).is_file():
            return place
    if given:
        where = f"{given} holds no {_STEPS}"
    else:
        where = "the tables of transient training are not here"
    raise BadFile(f"{where}; give --data FOLDER with CSV tables made from {SOURCES}")


def document(folder: Path, counted: Callable[[int, int], None] = lambda done, total: None) -> dict[str, Any]:
    """Return everything the papers report that the models can say something about, side by side.

    Args:
        folder: Where the tables are.
        counted: Told of every part that is done, of how many.

    Raises:
        BadFile: If a table is missing or damaged.
    """
    parts = {
        "icac": _icac,
        "scaling": lambda folder: scaling(curves(speed_rows(folder / _SPEEDS))),
        "bottlenecks": _bottlenecks,
        "lifetimes": _lifetimes,
        "checkpoints": _checkpoints,
        "startup": _startup,
        "steps": _steps,
    }
    found: dict[str, Any] = {"sources": [ICAC, CM_DARE], "kind": "predicted", "notes": list(NOTES)}
    for index, (name, make) in enumerate(parts.items()):
        found[name] = make(folder)
        counted(index + 1, len(parts))
    return {**found, "bars": [asdict(bar) for bar in bars(found)]}


def _icac(folder: Path) -> dict[str, Any]:
    some = trainer(folder)
    return {
        "table": table(some),
        "beside": beside(some, recorded_trainings(folder)),
        "headline": headline(some),
        "published_headline": {"speed_up": SPEED_UP, "saving": SAVING},
        "revocation_impact": impacts(some),
        "regions": regions(some),
    }


def _bottlenecks(folder: Path) -> dict[str, Any]:
    return {"threshold": THRESHOLD, "curves": bottlenecks(curves(speed_rows(folder / _SPEEDS)))}


def _lifetimes(folder: Path) -> dict[str, Any]:
    tables = lives(folder)
    later = [one for rows in tables for one in calibration(rows)]
    return {
        "shares": shares(tables[0]),
        "later": later,
        "inside": inside(later),
        "inside_for_bursts": inside(later, "inside_for_bursts"),
    }


def _checkpoints(folder: Path) -> dict[str, Any]:
    rows = checkpoint_rows(folder / _CHECKPOINTS)
    errors = left_out_errors(rows)
    linear, svr, honest_linear, honest_svr = CHECKPOINT_ERRORS
    return {
        "networks": [{"network": name, "off": error} for name, error in errors.items()],
        "mape": fmean(map(abs, errors.values())),
        "mape_of_single": repeat_error(rows),
        "mape_local": fmean(map(abs, left_out_errors(rows, local=True).values())),
        "published": {"linear": linear, "svr-rbf": svr},
        "published_left_out": {"linear": honest_linear, "svr-rbf": honest_svr},
    }


def _startup(folder: Path) -> list[dict[str, Any]]:
    rows = startup_rows(folder / _STARTUPS)
    tensors = Network("res32", *NETWORKS["res32"]).n_tensors
    found = []
    for (gpu, transient), published_s in STARTUP_S.items():
        one = startup(rows, gpu, transient, tensors)
        names = ("provisioning_s", "staging_s", "booting_s", "framework_s")
        phases = dict(zip(names, one.phases_s, strict=True))
        totals = {"machine_s": one.machine_s, "total_s": one.total_s, "warm_s": framework_s(tensors, warm=True)}
        kind = {"gpu": gpu, "transient": transient, "published_machine_s": published_s, "machines": one.machines}
        found.append({**kind, **phases, **totals, "spread_s": one.spread_s})
    return found


def _steps(folder: Path) -> dict[str, Any]:
    rows = step_rows(folder / _STEPS)
    records = left_out(rows)
    return {
        "mape": mape(records),
        "mape_published_protocol": leaking(rows),
        "covered": covered(records),
        "published": [
            {"gpu": gpu, "model": model, "published": pair[0], "left_out": pair[1]}
            for (gpu, model), pair in PUBLISHED_ERRORS.items()
        ],
    }


def bars(found: Mapping[str, Any]) -> list[Bar]:
    """Return what should hold of a document, and whether it does."""
    asked = [one for one in found["icac"]["table"] if not one["given"]]
    errors = [max(abs(off(one, "time_s")), abs(off(one, "usd"))) for one in asked]
    near = fmean(error <= 0.05 for error in errors)
    worst = max(errors)
    head = found["icac"]["headline"]
    points = found["scaling"]["points"]
    halves = fmean(points.values())
    return [
        *(_below(f"step time on {gpu}, network left out", found["steps"]["mape"][gpu][OURS], most)
          for gpu, most in (("K80", 0.05), ("P100", 0.07)) if gpu in found["steps"]["mape"]),
        _below("checkpoint time, network left out", found["checkpoints"]["mape_of_single"], 0.08),
        Bar("time and cost of ICAC's clusters within 10 %", f"{100 * worst:.1f} % off at most", worst <= 0.1),
        Bar("of these, three quarters within 5 %", f"{100 * near:.0f} % are", near >= 0.75),
        _near("speed-up of eight K80 within 3 % of 7.7", head["speed_up"], SPEED_UP, f"{head['speed_up']:.2f}"),
        _near("saving within 3 % of 62.9 %", head["saving"], SAVING, f"{100 * head['saving']:.1f} %"),
        _below("scaling, half of each curve fitted", halves, 0.06),
        _below("scaling, half of the curves fitted", found["scaling"]["whole_curves"], 0.06),
        Bar("later survivals inside 90 % of the bands", f"{100 * found['lifetimes']['inside']:.0f} % are",
            found["lifetimes"]["inside"] >= 0.9),
    ]  # fmt: skip


def _below(what: str, error: float, most: float) -> Bar:
    return Bar(f"{what} <= {100 * most:.0f} %", f"{100 * error:.1f} %", error <= most)


def _near(what: str, ours: float, published: float, shown: str) -> Bar:
    return Bar(what, shown, abs(ours / published - 1) <= 0.03)


# The figures of `reproduce.transient` one by one: what a paper says, what comes out here, and how ours is known.

Found = Mapping[str, Any]
FigureRecord = dict[str, Any]

_NO_PAIR = "the paper's data have no such figure"
_NOT_RECORDED = "no recorded machine is of that type and region"
_DERIVED = "the paper gives the speeds this follows from, not this figure"
_NOT_REPEATED = "the table has no repeats to split as the paper did"


def records(found: Found) -> list[FigureRecord]:
    """Return every figure of a document as one record: paper, figure, of what, unit, published, ours, kind, reason.

    The kind says how ours is known: ``predicted``, ``fitted`` (the published figure was fitted to), ``given`` (taken
    over), ``derived`` (computed from the published measurements) or ``recorded``. Where published or ours is None, the
    reason says why.

    Args:
        found: What `transient.document` returns.
    """
    parts = (
        _table,
        _beside,
        _headline,
        _shares_lost,
        _spans,
        _scaling,
        _bottleneck_records,
        _lives,
        _later,
        _starts,
        _errors,
    )
    return list(chain.from_iterable(part(found) for part in parts))


def _record(
    paper: str, figure: str, of: str, unit: str, published: Any, ours: Any, kind: str = "predicted", reason: str = ""
) -> FigureRecord:
    lacks = published is None or ours is None
    return {
        **{"paper": paper, "figure": figure, "of": of, "unit": unit, "published": published, "ours": ours},
        **{"kind": kind, "reason": (reason or _NO_PAIR) if lacks else None},
    }


def _table(found: Found) -> Iterator[FigureRecord]:
    for one in found["icac"]["table"]:
        for name, unit in (("time_s", "s"), ("usd", "usd"), ("speed_up", "times one K80"), ("saving", "fraction")):
            kind = "given" if one["given"] and name in ("time_s", "speed_up") else "predicted"
            yield _record(ICAC, f"table: {name}", one["name"], unit, one[f"published_{name}"], one[name], kind)


def _beside(found: Found) -> Iterator[FigureRecord]:
    for one in found["icac"]["beside"]:
        for name, unit in (("time_s", "s"), ("usd", "usd")):
            yield _record(ICAC, f"recorded runs: {name}", one["name"], unit, one[f"published_{name}"], one[name])


def _headline(found: Found) -> Iterator[FigureRecord]:
    ours = found["icac"]["headline"]
    theirs = found["icac"]["published_headline"]
    yield _record(ICAC, "speed-up", "8 on-demand K80 over 1", "times", theirs["speed_up"], ours["speed_up"])
    yield _record(ICAC, "saving", "8 transient K80 over 8 on-demand", "fraction", theirs["saving"], ours["saving"])


def _shares_lost(found: Found) -> Iterator[FigureRecord]:
    for one in found["icac"]["revocation_impact"]:
        of = f"{one['lost']} of {one['workers']} K80 lost"
        yield _record(ICAC, "time added by lost workers", of, "fraction", one["published"], one["slowdown"])


def _spans(found: Found) -> Iterator[FigureRecord]:
    for one in found["icac"]["regions"]:
        of = f"{one['away']} of 4 {one['gpu']} in another region"
        yield _record(ICAC, "time added by distance", of, "fraction", one["published"], one["slowdown"])


def _scaling(found: Found) -> Iterator[FigureRecord]:
    for curve in found["scaling"]["curves"]:
        for one in curve["speeds"]:
            kind = "fitted" if one["workers"] in HALVES["odd"] else "predicted"
            of = f"{one['workers']} {curve['gpu']}, {curve['servers']} PS, {curve['network']}"
            yield _record(CM_DARE, "cluster speed", of, "steps/s", one["measured"], one["predicted"], kind)


def _bottleneck_records(found: Found) -> Iterator[FigureRecord]:
    for one in found["bottlenecks"]["curves"]:
        of = f"{one['gpu']}, {one['servers']} PS, {one['network']}"
        yield _record(CM_DARE, "short of linear", of, "fraction", None, one["short_at_most"], "derived", _DERIVED)


def _lives(found: Found) -> Iterator[FigureRecord]:
    for one in found["lifetimes"]["shares"]:
        pairs = zip(AGES_H, _each(one["published"]), _each(one["recorded"]), strict=True)
        for hours, published, recorded in pairs:
            of = f"{one['gpu']} in {one['region']} within {hours:g} h"
            why = _NOT_RECORDED if recorded is None else _NO_PAIR
            yield _record(CM_DARE, "share of machines lost", of, "fraction", published, recorded, "recorded", why)


def _later(found: Found) -> Iterator[FigureRecord]:
    for one in found["lifetimes"]["later"]:
        for hours, guess, (_, seen, _) in zip(AGES_H, one["predicted"], one["bands"], strict=True):
            of = f"{one['gpu']} in {one['region']} at {hours:g} h"
            yield _record("recorded lives", "survival of later machines", of, "fraction", seen, guess)


def _starts(found: Found) -> Iterator[FigureRecord]:
    for one in found["startup"]:
        of = f"{'transient' if one['transient'] else 'on-demand'} {one['gpu']}"
        ours = one["machine_s"]
        theirs = one["published_machine_s"]
        yield _record(CM_DARE, "start-up of a machine", of, "s", theirs, ours, "recorded")


def _errors(found: Found) -> Iterator[FigureRecord]:
    for one in found["steps"]["published"]:
        leaks = (found["steps"]["mape_published_protocol"] or {}).get(one["gpu"], {}).get(one["model"])
        ours = found["steps"]["mape"].get(one["gpu"], {}).get(one["model"])
        of = f"{one['model']} on {one['gpu']}"
        for protocol, theirs, mine in (("published", one["published"], leaks), ("left out", one["left_out"], ours)):
            figure = f"step time, mean error, {protocol} protocol"
            yield _record(CM_DARE, figure, of, "fraction", theirs, mine, reason=_NOT_REPEATED)
    checks = found["checkpoints"]
    for model, theirs in checks["published_left_out"].items():
        figure = "checkpoint time, mean error, left out protocol"
        of = f"{model} beside polythrottle's"
        yield _record(CM_DARE, figure, of, "fraction", theirs, checks["mape_of_single"])


def _each(shares: Sequence[float] | None) -> Sequence[float | None]:
    if shares is None:
        return [None] * len(AGES_H)
    return shares
