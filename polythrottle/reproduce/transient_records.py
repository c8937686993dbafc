"""The figures of `reproduce.transient` one by one: what a paper says, what comes out here, and how ours is known."""

from collections.abc import Iterator, Mapping, Sequence
from itertools import chain
from typing import Any

from polythrottle.reproduce.transient_clusters import HALVES
from polythrottle.reproduce.transient_lives import AGES_H
from polythrottle.reproduce.transient_published import CM_DARE, ICAC

Found = Mapping[str, Any]
Record = dict[str, Any]

_NO_PAIR = "the paper's data have no such figure"
_NOT_RECORDED = "no recorded machine is of that type and region"
_DERIVED = "the paper gives the speeds this follows from, not this figure"
_NOT_REPEATED = "the table has no repeats to split as the paper did"


def records(found: Found) -> list[Record]:
    """Return every figure of a document as one record: paper, figure, of what, unit, published, ours, kind, reason.

    The kind says how ours is known: ``predicted``, ``fitted`` (the published figure was fitted to), ``given`` (taken
    over), ``derived`` (computed from the published measurements) or ``recorded``. Where published or ours is None, the
    reason says why.

    Args:
        found: What `transient.document` returns.
    """
    parts = (_table, _beside, _headline, _shares_lost, _spans, _scaling, _bottlenecks, _lives, _later, _starts, _errors)
    return list(chain.from_iterable(part(found) for part in parts))


def _record(
    paper: str, figure: str, of: str, unit: str, published: Any, ours: Any, kind: str = "predicted", reason: str = ""
) -> Record:
    lacks = published is None or ours is None
    return {
        **{"paper": paper, "figure": figure, "of": of, "unit": unit, "published": published, "ours": ours},
        **{"kind": kind, "reason": (reason or _NO_PAIR) if lacks else None},
    }


def _table(found: Found) -> Iterator[Record]:
    for one in found["icac"]["table"]:
        for name, unit in (("time_s", "s"), ("usd", "usd"), ("speed_up", "times one K80"), ("saving", "fraction")):
            kind = "given" if one["given"] and name in ("time_s", "speed_up") else "predicted"
            yield _record(ICAC, f"table: {name}", one["name"], unit, one[f"published_{name}"], one[name], kind)


def _beside(found: Found) -> Iterator[Record]:
    for one in found["icac"]["beside"]:
        for name, unit in (("time_s", "s"), ("usd", "usd")):
            yield _record(ICAC, f"recorded runs: {name}", one["name"], unit, one[f"published_{name}"], one[name])


def _headline(found: Found) -> Iterator[Record]:
    ours, theirs = found["icac"]["headline"], found["icac"]["published_headline"]
    yield _record(ICAC, "speed-up", "8 on-demand K80 over 1", "times", theirs["speed_up"], ours["speed_up"])
    yield _record(ICAC, "saving", "8 transient K80 over 8 on-demand", "fraction", theirs["saving"], ours["saving"])


def _shares_lost(found: Found) -> Iterator[Record]:
    for one in found["icac"]["revocation_impact"]:
        of = f"{one['lost']} of {one['workers']} K80 lost"
        yield _record(ICAC, "time added by lost workers", of, "fraction", one["published"], one["slowdown"])


def _spans(found: Found) -> Iterator[Record]:
    for one in found["icac"]["regions"]:
        of = f"{one['away']} of 4 {one['gpu']} in another region"
        yield _record(ICAC, "time added by distance", of, "fraction", one["published"], one["slowdown"])


def _scaling(found: Found) -> Iterator[Record]:
    for curve in found["scaling"]["curves"]:
        for one in curve["speeds"]:
            kind = "fitted" if one["workers"] in HALVES["odd"] else "predicted"
            of = f"{one['workers']} {curve['gpu']}, {curve['servers']} PS, {curve['network']}"
            yield _record(CM_DARE, "cluster speed", of, "steps/s", one["measured"], one["predicted"], kind)


def _bottlenecks(found: Found) -> Iterator[Record]:
    for one in found["bottlenecks"]["curves"]:
        of = f"{one['gpu']}, {one['servers']} PS, {one['network']}"
        yield _record(CM_DARE, "short of linear", of, "fraction", None, one["short_at_most"], "derived", _DERIVED)


def _lives(found: Found) -> Iterator[Record]:
    for one in found["lifetimes"]["shares"]:
        pairs = zip(AGES_H, _each(one["published"]), _each(one["recorded"]), strict=True)
        for hours, published, recorded in pairs:
            of = f"{one['gpu']} in {one['region']} within {hours:g} h"
            why = _NOT_RECORDED if recorded is None else _NO_PAIR
            yield _record(CM_DARE, "share of machines lost", of, "fraction", published, recorded, "recorded", why)


def _later(found: Found) -> Iterator[Record]:
    for one in found["lifetimes"]["later"]:
        for hours, guess, (_, seen, _) in zip(AGES_H, one["predicted"], one["bands"], strict=True):
            of = f"{one['gpu']} in {one['region']} at {hours:g} h"
            yield _record("recorded lives", "survival of later machines", of, "fraction", seen, guess)


def _starts(found: Found) -> Iterator[Record]:
    for one in found["startup"]:
        of = f"{'transient' if one['transient'] else 'on-demand'} {one['gpu']}"
        ours, theirs = one["machine_s"], one["published_machine_s"]
        yield _record(CM_DARE, "start-up of a machine", of, "s", theirs, ours, "recorded")


def _errors(found: Found) -> Iterator[Record]:
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
    return [None] * len(AGES_H) if shares is None else shares
