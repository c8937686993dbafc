"""What `polythrottle measure` does besides one window: two sides in turns, a profile checked, energy per request."""

import contextlib
import math
import os
import tempfile
from collections.abc import Callable, Iterator
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from polythrottle.cli.options import JsonOption, OtherModelOption, SetupOptions, share, spread
from polythrottle.cli.output import answer, complain, own_stdout, say_which, several, suffix
from polythrottle.domain.errors import ClaimFailed, InvalidInput, StorageError
from polythrottle.domain.units import show
from polythrottle.storage.json_channel import finite

if TYPE_CHECKING:
    from polythrottle.domain.measurement import Measurement
    from polythrottle.metering.energy import Attribution

# The table that `polythrottle measure --attribute` writes: what each request of a window took, and what nobody did.

AttributeOption = Annotated[
    Path | None,
    typer.Option("--attribute", metavar="FILE", help="Write each request's share of the joules to a table (.csv)."),
]
COLUMNS = ("request", "intended_s", "start_s", "end_s", "within", "items", "energy_j", "idle_share_j",
           "energy_kind", "boundary")  # fmt: skip
IDLE = "idle"


class RequestTable:
    """A table of the requests of one measurement: checked before it, written after it.

    Args:
        path: A ``.csv`` file; an older table of this kind is replaced.

    Raises:
        InvalidInput: If its name does not end in ``.csv``.
        StorageError: If something else is there, or its folder is none that can be written.
    """

    def __init__(self, path: Path) -> None:
        _check_replaceable(path)
        self._path, self._windows = path, list["Attribution"]()

    def keep(self, found: "Attribution") -> None:
        """Take the requests of the window."""
        self._windows.append(found)

    @property
    def _kept(self) -> "Attribution":
        return self._windows[-1]

    def written(self, measured: "Measurement") -> StorageError | None:
        """Write a row for each request in the order they were meant to be sent, the last for what nobody took.

        Returns:
            Why it could not be written; None if it was.
        """
        from polythrottle.storage.atomic_file import replace_file
        from polythrottle.storage.tables import csv_lines

        rows = [(*row, measured.energy_kind, measured.boundary) for row in _rows(self._kept)]
        try:
            replace_file(self._path, csv_lines([COLUMNS, *rows]))
        except StorageError as error:
            return error
        return None

    @property
    def document(self) -> dict[str, Any]:
        """What the JSON document of ``measure`` says of the table."""
        found = self._kept
        said = {"requests": len(found.requests), "meter_j": found.meter_j, "idle_j": found.idle_j}
        return {"attribution": {"table": str(self._path), **said}}

    def lines(self, measured: "Measurement") -> dict[str, str]:
        """Return what people are told of the table."""
        found = self._kept
        whole = [each.energy_j for each in found.requests if each.within == 1.0]
        each = _each_took(whole)
        joules = f"{show(found.idle_j, 'J')} of {show(found.meter_j, 'J')} {measured.energy_kind} went to nobody"
        return {"table": f"{self._path}: {len(found.requests):,} requests{each}; {joules}"}


def _each_took(energies_j: list[float]) -> str:
    if not energies_j:
        return ""
    return f" took {show(min(energies_j), 'J')} to {show(max(energies_j), 'J')} each"


def _check_replaceable(path: Path) -> None:
    if path.suffix != ".csv":
        raise InvalidInput(f"--attribute {path}: the table's name ends in .csv")
    folder = path.absolute().parent
    # Checked before the measurement, which may take long.
    if not folder.is_dir() or not os.access(folder, os.W_OK | os.X_OK):
        raise StorageError(f"{path} cannot be written: {folder} is not a folder that can be written")
    try:
        with tempfile.TemporaryFile(dir=folder):
            pass  # what rights alone do not tell: a folder of the kernel's, a file system that is read-only or full
        if path.exists() and not (path.is_file() and _begins_like_one(path)):
            raise StorageError(f"{path} is there already and no such table; name another file with --attribute")
    except OSError as error:
        raise StorageError(f"{path} cannot be written: {error.strerror}") from error


def _begins_like_one(path: Path) -> bool:
    header = ",".join(COLUMNS).encode()
    with path.open("rb") as file:
        return file.read(len(header)) in (header, b"")


def _rows(found: "Attribution") -> Iterator[tuple[object, ...]]:
    for number, each in enumerate(found.requests, start=1):
        times = (f"{time_s:.9f}" for time_s in (each.intended_s, each.start_s, each.end_s))
        # Nanoseconds: what a clock of Linux tells (clock_gettime(2)).
        # The joules with all their digits: shares add up to what the meter counted.
        yield number, *times, f"{each.within:.9g}", each.items, repr(each.energy_j), repr(each.idle_share_j)
    yield IDLE, "", f"{0.0:.9f}", f"{found.window_s:.9f}", "", "", repr(found.idle_j), ""


# Commands that compare: two sides measured in turns, and a profile held to its word.

RequireOption = Annotated[bool, typer.Option("--require", help="Not proven is an error (exit code 9).")]


def run_comparison(names: list[str], setup: SetupOptions, require: bool, as_json: bool) -> None:
    """Measure two sides in turns, and say what is proven of them.

    Raises:
        ClaimFailed: If a saving is required and not proven.
        PolythrottleError: As `polythrottle.tuning.profile_comparison.compare_sides`.
    """
    from polythrottle.metering.comparison import ComparisonVerdict
    from polythrottle.tuning.profile_comparison import compare_sides

    for name in names:
        say_which(name)
    # Each side may name a device of its own, so none is looked for here.
    words = setup.setup(look=False)
    found = None
    with own_stdout(), _status() as say:
        for found in compare_sides(names, words, told=complain):
            say(f"{several(len(found.pairs), 'pair')}: {_saving_words(found.saving)}")
    assert found is not None
    answer((names, found, words.precision), as_json, _print_comparison, _comparison_document)
    if require and found.verdict is not ComparisonVerdict.SAVES:
        if found.verdict is not ComparisonVerdict.NOT_PROVEN:
            raise ClaimFailed(f"{names[1]} costs energy against {names[0]}")
        because = "".join(f"; {line}" for line in _behind(found))
        raise ClaimFailed(f"it is {found.verdict} that {names[1]} saves energy against {names[0]}{because}")


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
    from polythrottle.api import search

    # The profile names its device, so none is looked for here.
    words = setup.setup(look=False)
    most = _growth(max_regress)
    say_which(profile)
    with own_stdout(), _status() as say:
        found = search.check(
            profile,
            max_regress=most,
            setup=words,
            other_model=other_model,
            told=complain,
            looked=lambda seen: say(f"{several(seen.windows, 'window')}: {_times(seen.energy)}"),
        )
    answer((profile, found, words.precision), as_json, _print_check, _check_document)
    if found.regressed or found.broken:
        what = [f"{each} is broken" for each in found.broken]
        if found.regressed:
            what.insert(0, "energy per item has grown")
        raise ClaimFailed(f"{profile} does not keep its word: {' and '.join(what)}")
    if require and not found.sound:
        because = "".join(f"; {line}" for line in _unshown(found).values())
        raise ClaimFailed(f"it is not proven that {profile} keeps its word within {most:.3g}{because}")


@contextlib.contextmanager
def _status() -> Iterator[Callable[[str], object]]:
    """Yield what says how far measuring has come: on a terminal in place, elsewhere ever more seldom in a line."""
    from rich.console import Console

    console = Console(stderr=True)
    if not console.is_terminal:
        calls = count(1)

        def say(text: str) -> None:
            # At the first, second, fourth, … look: a log of an hour's measuring has a dozen lines.
            number = next(calls)
            if number & (number - 1) == 0:
                typer.echo(text, err=True)

        yield say
        return
    with console.status("measuring") as status:
        yield status.update


def _growth(text: str) -> float:
    """Return the share by which energy may have grown; a number that was meant as per cent is not taken as wholes."""
    fraction = share("--max-regress", text, "3%") or 0.0
    if fraction < 0:
        raise InvalidInput(f"{text!r} is not a share of zero or more; write for example 3%")
    if fraction < 1:
        return fraction
    meant = "3"
    if fraction < 100 and not text.strip().endswith("%"):
        meant = text.strip()
    raise InvalidInput(f"{text!r} would allow {100 * fraction:g} % more energy; write {meant}%")


def _saving_words(saving: Any) -> str:
    if not math.isfinite(saving.low):
        return "nothing is known yet"
    if saving.low >= 0:
        return f"saves {100 * saving.low:.1f} to {100 * saving.high:.1f} %"
    if saving.high < 0:
        return f"costs {-100 * saving.high:.1f} to {-100 * saving.low:.1f} %"
    return f"takes between {-100 * saving.low:.1f} % more and {100 * saving.high:.1f} % less"


def _times(ratio: Any) -> str:
    if not math.isfinite(ratio.high):
        return "nothing is known yet"
    return f"{ratio.low:.3f} to {ratio.high:.3f} times"


def _print_comparison(value: Any) -> None:
    from polythrottle.cli.render.console import plain_console
    from polythrottle.cli.render.text import named_lines

    plain_console().print(named_lines(_comparison_lines(*value[:2])))


def _comparison_lines(names: list[str], found: Any) -> Iterator[tuple[str, str]]:
    from polythrottle.api.tuning_result import show_point
    from polythrottle.cli.render.text import show_boundary

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
    line = f"{found.device}  {found.workload}"
    if found.arrivals == "closed":
        return line
    return f"{line}  at {found.arrivals}"


def _behind(found: Any) -> list[str]:
    # With a growing queue latency says how long was looked, and energy per item which items were left.
    sides = zip("AB", found.keeps_up, strict=True)
    return [f"{side} does not keep up: the queue grows" for side, keeps_up in sides if not keeps_up]


_LOOKED_UP = "1, looked up: a recorded table has no noise of its own, so there is nothing to prove"


def _taken(found: Any) -> str:
    if found.recorded:
        return _LOOKED_UP
    failed = suffix(found.failures, "; {} more told nothing")
    return f"{len(found.pairs)}, in turns{failed}"


def _verdict(found: Any) -> str:
    if not all(found.keeps_up):
        return "not proven: nothing is claimed of a side whose queue grows"
    if found.verdict == "saves":
        return f"B {_saving_words(found.saving)} of the energy per item, with 95 % confidence"
    if found.verdict == "costs":
        return f"B costs {-100 * found.saving.high:.1f} to {-100 * found.saving.low:.1f} % more energy per item"
    return f"not proven that either takes less energy: B {_saving_words(found.saving)}"


def _print_check(value: Any) -> None:
    from polythrottle.cli.render.console import plain_console
    from polythrottle.cli.render.text import named_lines

    plain_console().print(named_lines(_check_lines(*value[:2])))


def _check_lines(name: str, found: Any) -> Iterator[tuple[str, str]]:
    from polythrottle.cli.render.text import show_boundary

    yield "device", _served(found)
    yield "profile", name
    yield "joules", show_boundary(found.measured[-1])
    if found.sure and not found.recorded:
        times = _times(found.energy)
    else:
        times = f"{found.middle:.3f} times"
    yield "energy", f"{times} what the profile says, allowed {1 + found.most:.3f}"
    for limit, ratio in found.limits.items():
        yield "limit", f"{limit}: {_of_limit(ratio)}"
    for line in _unshown(found).values():
        yield "note", line
    yield "windows", _LOOKED_UP if found.recorded else str(found.windows)
    yield "verdict", _check_verdict(found)


def _check_verdict(found: Any) -> str:
    if found.regressed or found.broken:
        return "does not keep its word"
    if found.sound:
        return "keeps its word"
    if found.over:
        return "not proven, some windows speak against it"
    return "not proven, nothing found against it"


def _of_limit(ratio: Any) -> str:
    if ratio.low > 0 and not math.isfinite(ratio.high):
        return f"at {ratio.low:.3f} times the limit or above"
    if not math.isfinite(ratio.high):
        return "nothing is known yet"
    return f"at {_times(ratio)} the limit"


def _unshown(found: Any) -> dict[str, str]:
    """Return what these windows cannot prove, energy or limits, each with why and what would do."""
    if found.recorded:
        return {}
    # A p99 of few queries rests on one or two of them: more queries would show it, more windows would not.
    queries = max((look.latency.queries or 0 for look in found.measured), default=0)
    cannot = f"windows of {queries} queries cannot show a"
    longer = 1000 if queries < 500 else 4 * queries
    if found.spent or not found.sure:
        unsure = {"energy": f"energy not proven: {_unsure(found)}"}
    else:
        unsure = {}
    for limit in found.short:
        if limit not in found.broken:
            # Windows that saw more than the limit say so; where none did, there were too few queries to see any.
            more = suffix(found.over.get(limit), f"{{}} of {found.windows} windows saw more")
            why = more or f"{cannot} {limit.partition('<')[0]}"
            unsure[limit] = f"{limit} not proven: {why}; give --queries {longer}"
    return unsure


def _unsure(found: Any) -> str:
    """Return why energy stays open, however long one measures."""
    if not found.sure:
        return "the profile does not say how well its own is known"
    high = math.ceil(100 * (found.energy.high - 1))
    low = 100 * found.most
    allow = ""
    if low < high < 100:
        allow = f"; --max-regress {high}% could be"
    return f"the profile's own is of one window, and another may differ{allow}"


def _bounds(interval: Any) -> dict[str, float | None]:
    return {"low": finite(interval.low), "high": finite(interval.high)}


def _where(found: Any) -> dict[str, Any]:
    from polythrottle.domain.arrivals import Arrivals

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
        **_joules(next((first for first, _ in found.pairs[-1:]), None)),
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
