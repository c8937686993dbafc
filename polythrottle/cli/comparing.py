"""Commands that compare: two sides measured in turns, and a profile held to its word."""

import contextlib
import math
from collections.abc import Callable, Iterator
from typing import Annotated, Any

import typer

from polythrottle.cli.answers import answer, own_stdout, say_which
from polythrottle.cli.options import JsonOption, OtherModelOption, SetupOptions, spread
from polythrottle.errors import ClaimFailed, InvalidInput

RequireOption = Annotated[bool, typer.Option("--require", help="Not proven is an error (exit code 9).")]


def run_comparison(names: list[str], setup: SetupOptions, require: bool, as_json: bool) -> None:
    """Measure two sides in turns, and say what is proven of them.

    Raises:
        ClaimFailed: If a saving is required and not proven.
        PolythrottleError: As `polythrottle.sides.compare_sides`.
    """
    from polythrottle.comparing.pairs import Verdict
    from polythrottle.sides import compare_sides

    for name in names:
        say_which(name)
    words = setup.setup(look=False)
    found = None
    with own_stdout(), _status() as say:
        for found in compare_sides(names, words):
            say(f"{len(found.pairs)} pairs: {_percent(found.saving)}")
    assert found is not None
    answer((names, found, words.precision), as_json, _print_comparison, _comparison_document)
    if require and found.verdict is not Verdict.SAVES:
        because = "".join(f"; {line}" for line in _behind(found))
        raise ClaimFailed(
            f"it is {found.verdict} that {names[1]} saves energy against {names[0]}{because}"
            if found.verdict is Verdict.NOT_PROVEN
            else f"{names[1]} costs energy against {names[0]}"
        )


@spread
def check(
    profile: Annotated[str, typer.Argument(metavar="PROFILE", help="A tuned profile, file or <device>/<workload>.")],
    setup: SetupOptions,
    max_regress: Annotated[
        str, typer.Option("--max-regress", metavar="3%", help="By how much energy per item may have grown.")
    ] = "3%",
    require: RequireOption = False,
    other_model: OtherModelOption = False,
    as_json: JsonOption = False,
) -> None:
    """Measure a profile's point again; exit code 9 if energy has grown or a limit no longer holds."""
    from polythrottle import api

    words, most = setup.setup(look=False), _share(max_regress)
    say_which(profile)
    with own_stdout(), _status() as say:
        found = api.check(
            profile,
            max_regress=most,
            setup=words,
            other_model=other_model,
            looked=lambda seen: say(f"{seen.windows} windows: {_times(seen.energy)}"),
        )
    answer((profile, found, words.precision), as_json, _print_check, _check_document)
    if found.regressed or found.broken:
        what = [
            *(["energy per item has grown"] if found.regressed else []),
            *(f"{each} is broken" for each in found.broken),
        ]
        raise ClaimFailed(f"{profile} does not keep its word: {' and '.join(what)}")
    if require and not found.sound:
        because = "".join(f"; {line}" for line in _unshown(found).values())
        raise ClaimFailed(f"it is not proven that {profile} keeps its word within {most:.3g}{because}")


@contextlib.contextmanager
def _status() -> Iterator[Callable[[str], object]]:
    """Yield what says on a terminal how far measuring has come."""
    from rich.console import Console

    console = Console(stderr=True)
    if not console.is_terminal:
        yield lambda text: None
        return
    with console.status("measuring") as status:
        yield status.update


def _share(text: str) -> float:
    number = text.strip().removesuffix("%")
    try:
        share = float(number) / (100.0 if text.strip().endswith("%") else 1.0)
    except ValueError:
        raise InvalidInput(f"{text!r} is not a share; write for example 3%") from None
    if not 0 <= share < math.inf:
        raise InvalidInput(f"{text!r} is not a share of zero or more; write for example 3%")
    if share >= 1:
        meant = number if share < 100 and not text.strip().endswith("%") else "3"
        raise InvalidInput(f"{text!r} would allow {100 * share:g} % more energy; write {meant}%")
    return share


def _percent(saving: Any) -> str:
    if not math.isfinite(saving.low):
        return "nothing is known yet"
    if saving.low >= 0:
        return f"saves {100 * saving.low:.1f} to {100 * saving.high:.1f} %"
    return f"takes between {-100 * saving.low:.1f} % more and {100 * saving.high:.1f} % less"


def _times(ratio: Any) -> str:
    return "nothing is known yet" if not math.isfinite(ratio.high) else f"{ratio.low:.3f} to {ratio.high:.3f} times"


def _print_comparison(value: Any) -> None:
    from rich.console import Console

    from polythrottle.cli.texts import named_lines

    Console(highlight=False).print(named_lines(_comparison_lines(*value[:2])))


def _comparison_lines(names: list[str], found: Any) -> Iterator[tuple[str, str]]:
    from polythrottle.cli.texts import show_boundary, show_point

    yield "device", _served(found)
    # Which levels a name means does not follow from it: the default is that of device and workload, not of a profile.
    for side, name, point in zip("AB", names, found.points, strict=True):
        yield side, f"{name}: {show_point(point)}"
    for first, _ in found.pairs[-1:]:
        yield "joules", show_boundary(first)
    # Of a side that does not keep up, latency is how long one has looked.
    for name in ("energy", "mean", "p99") if all(found.keeps_up) else ("energy",):
        if (middle := found.middle(name)) is not None:
            item = " per item" if name == "energy" else ""
            yield name, f"B takes {middle:.3f} of A{item} ({_times(found.ratio(name))})"
    yield "pairs", _taken(found)
    for line in _behind(found):
        yield "load", line
    yield "verdict", _verdict(found)


def _served(found: Any) -> str:
    """Return what was measured under which load, as both documents name it."""
    return f"{found.device}  {found.workload}" + ("" if found.arrivals == "closed" else f"  at {found.arrivals}")


def _behind(found: Any) -> list[str]:
    sides = zip("AB", found.keeps_up, strict=True)
    return [f"{side} does not keep up: the queue grows" for side, keeps_up in sides if not keeps_up]


_LOOKED_UP = "1, looked up: a recorded table has no noise of its own, so there is nothing to prove"


def _taken(found: Any) -> str:
    if found.recorded:
        return _LOOKED_UP
    failed = f"; {found.failures} more told nothing" if found.failures else ""
    return f"{len(found.pairs)}, in turns{failed}"


def _verdict(found: Any) -> str:
    if not all(found.keeps_up):
        return "not proven: nothing is claimed of a side whose queue grows"
    if found.verdict == "saves":
        return f"B {_percent(found.saving)} of the energy per item, with 95 % confidence"
    if found.verdict == "costs":
        return f"B costs {-100 * found.saving.high:.1f} to {-100 * found.saving.low:.1f} % more energy per item"
    return f"not proven that either takes less energy: B {_percent(found.saving)}"


def _print_check(value: Any) -> None:
    from rich.console import Console

    from polythrottle.cli.texts import named_lines

    Console(highlight=False).print(named_lines(_check_lines(*value[:2])))


def _check_lines(name: str, found: Any) -> Iterator[tuple[str, str]]:
    from polythrottle.cli.texts import show_boundary

    yield "device", _served(found)
    yield "profile", name
    yield "joules", show_boundary(found.measured[-1])
    times = _times(found.energy) if found.sure and not found.recorded else f"{found.middle:.3f} times"
    yield "energy", f"{times} what the profile says, allowed {1 + found.most:.3f}"
    for limit, ratio in found.limits.items():
        yield "limit", f"{limit}: {_of_limit(ratio)}"
    for line in _unshown(found).values():
        yield "note", line
    yield "windows", _LOOKED_UP if found.recorded else str(found.windows)
    if found.regressed or found.broken:
        yield "verdict", "does not keep its word"
    else:
        against = "some windows speak against it" if found.over else "nothing found against it"
        yield "verdict", "keeps its word" if found.sound else f"not proven, {against}"


def _of_limit(ratio: Any) -> str:
    if ratio.low > 0 and not math.isfinite(ratio.high):
        return f"at {ratio.low:.3f} times the limit or above"
    return "nothing is known yet" if not math.isfinite(ratio.high) else f"at {_times(ratio)} the limit"


def _unshown(found: Any) -> dict[str, str]:
    """Return what these windows cannot prove, energy or limits, each with why and what would do."""
    if found.recorded:
        return {}
    queries = max((look.latency.queries or 0 for look in found.measured), default=0)
    cannot, longer = f"windows of {queries} queries cannot show a", 1000 if queries < 500 else 4 * queries
    unsure = {"energy": f"energy not proven: {_unsure(found)}"} if found.spent or not found.sure else {}
    short = {
        limit: f"{limit} not proven: "
        + (f"{over} of {found.windows} windows saw more" if over else f"{cannot} {limit.partition('<')[0]}")
        + f"; give --queries {longer}"
        for limit in found.short
        if limit not in found.broken
        for over in (found.over.get(limit, 0),)
    }
    return {**unsure, **short}


def _unsure(found: Any) -> str:
    """Return why energy stays open, however long one measures."""
    if not found.sure:
        return "the profile does not say how well its own is known"
    high, low = math.ceil(100 * (found.energy.high - 1)), 100 * found.most
    allow = f"; --max-regress {high}% could be" if low < high < 100 else ""
    return f"the profile's own is of one window, and another may differ{allow}"


def _bounds(interval: Any) -> dict[str, float | None]:
    return {side: value if math.isfinite(value := getattr(interval, side)) else None for side in ("low", "high")}


def _where(found: Any) -> dict[str, Any]:
    from polythrottle.arrivals import Arrivals

    offered_per_s = Arrivals.parse(found.arrivals).offered_per_s
    return {
        "device": found.device,
        "workload": found.workload,
        "arrivals": found.arrivals,
        "offered_per_s": offered_per_s,
    }


def _joules(measured: Any) -> dict[str, str | None]:
    """Return how joules came about and what they cover; null for what nobody says."""
    if measured is None:
        return {"energy_kind": None, "boundary": None}
    return {"energy_kind": str(measured.energy_kind), "boundary": measured.boundary or None}


def _comparison_document(value: Any) -> dict[str, Any]:
    names, found, precision = value
    return {
        **_where(found),
        "precision": precision,
        "recorded": found.recorded,
        "a": names[0],
        "b": names[1],
        "points": {side: dict(point) for side, point in zip("ab", found.points, strict=True)},
        "keeps_up": dict(zip("ab", found.keeps_up, strict=True)),
        "pairs": [[a.energy_j, b.energy_j] for a, b in found.pairs],
        "failures": found.failures,
        "saving": _bounds(found.saving),
        "energy_ratio": found.middle(),
        "latency_ratio": {
            name: {"ratio": found.middle(name), **_bounds(found.ratio(name))} for name in ("mean", "p99")
        },
        "verdict": str(found.verdict),
        **_joules(found.pairs[-1][0] if found.pairs else None),
    }


def _check_document(value: Any) -> dict[str, Any]:
    name, found, precision = value
    return {
        **_where(found),
        "precision": precision,
        "tuned_at": found.tuned_at,
        "recorded": found.recorded,
        **_joules(found.measured[-1]),
        "profile": name,
        "energy_ratio": _bounds(found.energy),
        "limits": {limit: _bounds(ratio) for limit, ratio in found.limits.items()},
        "max_regress": found.most,
        "windows": found.windows,
        "regressed": found.regressed,
        "broken": list(found.broken),
        "proven": found.sound,
        "unknown": _unshown(found),
    }
