"""What a command found out, as a few lines for people."""

import math
import shlex
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from operator import attrgetter
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING

from rich.console import Console
from rich.table import Table
from rich.text import Text

from polythrottle.api.tuning_result import board_words, energy_kind, show_joules, show_point
from polythrottle.backends import names_more_than_here
from polythrottle.cli.output import called_as, grid, optional, several, suffix
from polythrottle.cli.render.console import Unpadded, plain_console
from polythrottle.domain.measurement import (
    MOST_QUERIES,
    BoardEnergy,
    EnergyKind,
    Interval,
    Measurement,
    saving_interval,
)
from polythrottle.domain.metrics import OF_CLASS, why_untold
from polythrottle.domain.problem import Constraint, Objective
from polythrottle.domain.space import OperatingPoint
from polythrottle.domain.study import RECORDED_ITEMS, WORTHWHILE, Cost, Study, Trial
from polythrottle.domain.units import show, show_excess, show_name, show_share, show_span
from polythrottle.storage.untrusted import printable
from polythrottle.tuning.remarks import passed_over
from polythrottle.tuning.stopping import is_conclusive

if TYPE_CHECKING:
    from polythrottle.api.tuning_result import Tuning
    from polythrottle.tuning.setup import Setup
    from polythrottle.tuning.sweep import Swept

_UNITS = {"s": "s", "w": "W", "c": "°C", "per_s": "/s", "per_j": "/J"}
_PAPER_REQUESTS = 1000
_WIDE = 99.5
_WHOLE = 9.95
_FINE = 0.0001
"""Percents: where a ± would be the whole value, where it is told in whole ones, and the least that is told."""
_HUNDRED = 99.5
_MANY = 9999.5
_PUNCTUAL_S = 10e-6
"""A sender that is later than this is not as good as on a virtual clock."""


def print_tuning(tuning: "Tuning") -> None:
    """Print the answer of a study in at most 80 columns, paths apart."""
    study = tuning.study
    console = plain_console()
    _print_grid(console, (study.where, study.problem.workload), _lines(tuning))
    if study.problem.objective is Objective.PARETO and study.judgeable:
        _print_front(console, study)
    written = {"profile": tuning.profile_path, "journal": tuning.journal_path, "report": tuning.report_path}
    for name, path in written.items():
        if path is not None:  # on a line of its own, unbroken, so that it can be copied
            console.print(Text.assemble((f"{name:<9}", "dim"), str(_near(path))), soft_wrap=True)
    if tuning.aside is not None and tuning.profile_path is not None:
        back = shlex.join(["mv", str(_near(tuning.aside)), str(_near(tuning.profile_path))])
        console.print(Text.assemble((f"{'go back':<9}", "dim"), back), soft_wrap=True)
    next_ = [["explain", str(_near(tuning.journal_path))]]
    device = study.problem.device
    if tuning.profile_path is not None and not device.startswith("replay:"):
        # Of a device elsewhere, such as a tree of files, `apply` takes no file's word for it.
        named = ["--device", device] if names_more_than_here(device) else []
        next_.insert(0, ["apply", str(_near(tuning.profile_path)), *named])
    words = "; ".join(shlex.join([*called_as(), *command]) for command in next_)
    console.print(Text.assemble((f"{'next':<9}", "dim"), words), soft_wrap=True)


def print_measurement(
    found: "tuple[Setup, OperatingPoint, Measurement]",
    limits: Sequence[Constraint] = (),
    besides: Mapping[str, str] = MappingProxyType({}),
) -> None:
    """Print one measurement in at most 80 columns, how it stands to limits, and lines that belong to it."""
    setup, point, measured = found
    lines = {
        "point": show_point(point),
        "latency": ", ".join(
            f"{name} {_with_interval(measured, name, 's')}" for name in ("mean", "p99") if measured.metric(name)
        ),
        **_tokens(measured),
        **{limit.metric: _stands(limit, measured) for limit in limits},
        **_goodput(measured),
        "energy": f"{_joules(measured)} per item, {show_boundary(measured)}",
        **_board(measured),
        "power": f"{_with_interval(measured, 'power', 'W')}, {_rate(measured.throughput_per_s)} items/s",
        **_unsure(measured),
        **_cuts(measured),
        **_idle(measured),
        **_load(setup, measured),
        **_window(measured),
        **besides,
    }
    _print_grid(plain_console(), (setup.device, setup.workload or ""), lines.items())


def _board(measured: Measurement) -> dict[str, str]:
    """Return what the device's own sensors said beside a meter, where there was one."""
    if (own := measured.board) is None:
        return {}
    between = _between(own.energy_j, own.interval, "J")
    return {"board": f"{show(own.energy_j, 'J')}{between} per item, {show_boundary(own)}"}


def show_boundary(measured: Measurement | BoardEnergy) -> str:
    """Return how the joules came about and what they cover, the first once."""
    if measured.energy_kind is EnergyKind.RECORDED and measured.boundary:
        return measured.boundary
    kind = f"{measured.energy_kind}: "
    if measured.boundary:
        return f"{kind}{measured.boundary.removeprefix(kind)}"
    return str(measured.energy_kind)


def _tokens(measured: Measurement) -> dict[str, str]:
    """Return times to the first token and per token, and tokens per joule, where they are known."""
    found = {}
    for name in ("ttft", "tpot"):
        tails = [tail for tail in ("p50", "p99") if measured.metric(f"{name}_{tail}") is not None]
        found[name] = ", ".join(f"{tail} {_with_interval(measured, f'{name}_{tail}', 's')}" for tail in tails)
    # Where only ratios of joules mean something, tokens per joule mean nothing.
    if (each := measured.metric("tokens_per_j")) is not None and measured.energy_kind is not EnergyKind.RELATIVE:
        interval = measured.intervals.get("tokens_per_j")
        between = ""
        if interval is not None and interval.known:
            between = _between(each, interval, "")
        mean = f"mean {show(measured.latency.mean_s, 's')} end to end"
        found["tokens"] = f"{each:.4g} per joule{between}, {measured.energy_kind}; {mean}"
    return {name: text for name, text in found.items() if text}


def _goodput(measured: Measurement) -> dict[str, str]:
    """Return how many requests held every limit of theirs, of all and of each class, where that was counted."""
    if (seen := measured.goodput) is None:
        return {}
    parts = [f"{show_share(seen.share)} of {seen.requests:,} held every limit of theirs", f"{_rate(seen.per_s)} good/s"]
    if seen.energy_j is not None and measured.energy_kind is not EnergyKind.RELATIVE:
        parts.append(f"{show(seen.energy_j, 'J')} per good one, {measured.energy_kind}")
    lines = {"goodput": ", ".join(parts)}
    for prompts, (requests, good) in seen.classes.items():
        name = f"{OF_CLASS}{prompts}"
        times = [f"{each} p99 {show(measured.metric(f'{each}_p99{name}'), 's')}" for each in ("ttft", "tpot")]
        held = "none came"
        if requests:
            held = f"{show_share(good / requests)} of {requests:,}"
        mean = f"mean {show(measured.metric(f'mean{name}'), 's')} end to end"
        lines[prompts] = ", ".join([held, *times, mean] if requests else [held])
    return lines


def _stands(limit: Constraint, measured: Measurement) -> str:
    """Return a metric beside its absolute limit, and whether it holds."""
    value = measured.metric(limit.metric)
    if value is None:
        return f"not measured{why_untold(limit.metric)}, limit {limit.show(limit.limit)}"
    broken = ""
    if limit.slack(measured) < 0 or measured.censored or not measured.keeps_up:
        broken = "  broken"
    return f"{limit.show(value)}, limit {limit.show(limit.limit)}{broken}"


def _rate(rate_per_s: float) -> str:
    """Return a rate in plain figures, however many come."""
    if rate_per_s >= _MANY:
        return f"{rate_per_s:,.0f}"
    return f"{rate_per_s:.4g}"


def _load(setup: "Setup", measured: Measurement) -> dict[str, str]:
    """Return what was offered beside what was served, and what the sender itself was like."""
    said = []
    if measured.offered_per_s is not None:
        grows = "; the queue grows" * bool(measured.backlog_per_s)
        served = f"{_rate(measured.offered_per_s)}/s offered, {_rate(measured.throughput_per_s)}/s served"
        said.append(f"{setup.arrivals or 'as recorded'}: {served}{grows}")
    if measured.late_p99_s is not None and measured.late_p99_s > _PUNCTUAL_S:
        said.append(f"99 % sent within {show(measured.late_p99_s, 's')} of their moment")
    if measured.sender_s is not None:
        said.append(f"the sender took {show(measured.sender_s, 's')} of processor time")
    if said:
        return {"load": "; ".join(said)}
    return {}


def _unsure(measured: Measurement) -> dict[str, str]:
    """Return why a window's energy has no ±, and what would give it one; nothing where it has, or was looked up."""
    queries = measured.latency.queries
    # Recorded tables have no window: their figures are looked up, and no query more would help.
    if "energy" in measured.intervals or measured.window_s is None or queries is None:
        return {}
    longer = f"--queries {min(MOST_QUERIES, max(1000, 4 * queries))}"
    return {"no ±": f"{show(measured.window_s, 's')} are too short for the meter to tell it; give {longer}"}


def _cuts(measured: Measurement) -> dict[str, str]:
    """Return how often the device cut its clocks for a moment, where it did."""
    if not measured.cuts_per_s:
        return {}
    if measured.cut_share is None:
        share = ""
    else:
        share = f", for about {measured.cut_share:.2%} of the time"
    return {"clock cuts": f"{measured.cuts_per_s:.2g} a second{share}: brief over-current events, normal on this board"}


def _idle(measured: Measurement) -> dict[str, str]:
    """Return what an item's energy is made of, where idle power is known."""
    if measured.idle_power_w is None or measured.energy_kind is EnergyKind.RELATIVE:
        return {}
    if measured.idle_j is None:
        above = f"idle power, {show(measured.idle_power_w, 'W')}, was not below that of the window"
        return {"per item": f"its own and idle energy cannot be told apart: {above}"}
    parts = f"{show(measured.marginal_j, 'J')} of its own and {show(measured.idle_j, 'J')} of"
    return {"per item": f"{parts} {show(measured.idle_power_w, 'W')} idle power"}


def _window(measured: Measurement) -> dict[str, str]:
    """Return how long was looked, where that is known."""
    if measured.requests is None or measured.window_s is None:
        return {}
    return {"window": f"{show(measured.window_s, 's')}; {measured.requests:,} requests in all; ± are 95 % intervals"}


def _with_interval(measured: Measurement, metric: str, unit: str) -> str:
    """Return a metric with its ±, or with the ends that are known."""
    value = measured.energy_j if metric == "energy" else measured.metric(metric)
    interval = measured.intervals.get(metric)
    if value is None or interval is None:
        return show(value, unit)
    if not interval.known:
        why = {True: "too few queries for more", False: "it grows"}[measured.keeps_up]
        least = ""
        if 0 < interval.low < math.inf:
            least = f"at least {show(interval.low, unit)}; "
        return f"{show(value, unit)} ({least}{why})"
    return f"{show(value, unit)}{_between(value, interval, unit)}"


def _between(value: float, interval: Interval | None, unit: str) -> str:
    """Return the ± of a value in percent; from 100 % on both ends, for then it says nothing of them."""
    if interval is None:
        return ""
    percent = 100 * interval.half / value
    if percent >= _WIDE:
        return f" ({show(interval.low, unit).strip()} to {show(interval.high, unit).strip()})"
    if percent >= _WHOLE:
        return f" ± {percent:.0f} %"
    if percent >= _FINE:
        return f" ± {percent:.2g} %"
    if percent == 0:
        return " ± 0 %"
    return f" ± less than {_FINE:g} %"


def print_sweep(swept: "Swept") -> None:
    """Print where the table is and how much of it is new."""
    console = plain_console()
    kept = suffix(swept.kept, ", {} kept from before")
    failed = suffix(len(swept.failed), ", {} failed")
    made = several(swept.measured, "point")
    console.print(f"{made} measured{kept}{failed} ({swept.energy_kind} energy)", soft_wrap=True)
    for point, failure in swept.failed[:5]:
        console.print(f"  failed: {show_point(point)}: {failure}", soft_wrap=True, markup=False)
    if swept.overloaded:
        console.print(
            f"{swept.overloaded} of {swept.points} did not serve what came: column backlog_per_s says by how much the\n"
            "queue grew, their latencies are of their window only, and none of them holds a limit",
            soft_wrap=True,
        )
    console.print(f"table  {swept.path}", soft_wrap=True, markup=False)


def show_energy(measurement: Measurement) -> str:
    """Return energy per item and how it came about; without a unit where only ratios mean something."""
    return f"{_joules(measurement)}{_label(measurement)}"


def _label(measurement: Measurement) -> str:
    kind = measurement.energy_kind
    if kind is EnergyKind.MEASURED:
        return ""
    return f" {kind}"


def _joules(measurement: Measurement) -> str:
    if measurement.energy_kind is EnergyKind.RELATIVE:
        return show_joules(measurement)
    return _with_interval(measurement, "energy", "J")


def _lines(tuning: "Tuning") -> "Iterator[tuple[str, str | Text]]":
    study = tuning.study
    best = tuning.study.best
    default = tuning.study.default
    if default is not None and default.measurement is not None:
        broken = "  breaks the SLO" if not study.feasible(default) else ""
        yield "default", f"{show_energy(default.measurement)} per item, {_latencies(default.measurement)}{broken}"
    if best is not None and best.measurement is not None:
        yield "tuned", f"{show_energy(best.measurement)} per item, {_latencies(best.measurement)}"
        yield from _beside(best.measurement)
        yield from _gain(tuning, best.measurement)
        yield "point", show_point(best.point)
        yield from _held(study, best.measurement)
        yield from _of_tokens(default, best.measurement)
    yield from (
        ("board", f"{printable(uri)}: {words}") for uri, words in board_words(tuning.boards, tuning.study).items()
    )
    if tuning.profile is not None:
        yield "ladder", _ladder(tuning)
    yield "trials", _trials(study)
    if tuning.ended is not None:
        yield "ended", tuning.ended
    if (cost := _cost(study, replace(study.cost, duration_s=study.duration_s))) is not None:
        yield "search", cost
    if (cost := _cost(study, study.presets_cost)) is not None:
        yield "presets", f"{cost}, beside the search"
    if tuning.errors is not None:
        yield "late", tuning.errors.words
    yield from _older(tuning)
    yield from _presets(study)


def _gain(tuning: "Tuning", best: Measurement) -> "Iterator[tuple[str, str | Text]]":
    """Yield what the best point saves, and how sure that is."""
    study = tuning.study
    objective = study.problem.objective
    yield "saving", _saving(study)
    yield from passed_over(study)
    if objective is Objective.EDP:
        yield str(objective), f"{show(objective.of(best), objective.unit)} per item"
    if study.within_noise:
        yield "", Text(_within_noise(tuning), "yellow")
    elif study.default_will_do:
        yield "", _no_gain(tuning)


def _no_gain(tuning: "Tuning") -> str:
    """Return that the default is as good as what was found, and with which knobs; others may still gain something."""
    knobs = [show_name(knob.name) for knob in tuning.study.problem.space.knobs if len(knob.levels) > 1]
    if not knobs:
        return "nothing to search: no knob has more than one level"
    gained = "nothing gained so far"
    if is_conclusive(tuning.ended):
        gained = f"nothing is to be gained with {', '.join(knobs)}"
    return f"{gained}: the default is within {WORTHWHILE:.0%} of the best found"


def _older(tuning: "Tuning") -> "Iterator[tuple[str, str]]":
    """Yield what became of a profile that was there before."""
    if tuning.older is None:
        return
    if tuning.kept:
        yield "kept", f"{tuning.older}; --force replaces it"
    elif tuning.aside is not None:
        yield "replaced", f"{tuning.older}, so it is kept as {tuning.aside.name}"
    else:
        yield "replaced", tuning.older


def _beside(measured: Measurement) -> "Iterator[tuple[str, str]]":
    """Yield what a meter covers, and what the device's own sensors said beside it, where there was a meter."""
    if measured.board is not None:
        yield "joules", show_boundary(measured)
        yield from _board(measured).items()


def _within_noise(tuning: "Tuning") -> str:
    """Return that the default may do as well, and what tells: both sides in turns."""
    path = tuning.profile_path
    file = "PROFILE"
    if path is not None and not tuning.kept:
        file = shlex.quote(str(_near(path)))
    return (
        "no saving found beyond the noise: the default may do as well as the profile; "
        f"to tell them apart: polythrottle measure default {file}"
    )


def _ladder(tuning: "Tuning") -> str:
    """Return along which loads the profile has points, or why it has none."""
    ladder = optional(attrgetter("ladder"), tuning.profile)
    if ladder is None:
        return f"none: {tuning.unladdered}"
    # Rungs are sorted by the load they carry.
    low, high = (_about(ladder.rungs[end].rate_per_s) for end in (0, -1))
    if len(ladder.rungs) == 1:
        return f"1 rung, up to {high}/s"
    return f"{len(ladder.rungs)} rungs, {low}/s to {high}/s"


def _about(rate_per_s: float) -> str:
    """Return a rate in two figures or whole ones."""
    if rate_per_s < _HUNDRED:
        return f"{rate_per_s:.2g}"
    return f"{rate_per_s:,.0f}"


def _cost(study: Study, cost: Cost) -> str | None:
    """Return what the trials of a study or its presets took, and how those joules came about; None if nothing did."""
    kind = energy_kind(study)
    if kind is None or not cost.duration_s:
        return None
    if kind is EnergyKind.RELATIVE:
        energy = ""
    else:
        energy = f"{show(cost.energy_j, 'J')} {kind}, "
    told = " simulated" if study.virtual else ""
    together = f" on {len(study.boards)} boards at once" if len(study.boards) > 1 else ""
    if study.problem.recorded:
        counted = f" as recorded, taking {RECORDED_ITEMS:,} items a trial"
    else:
        counted = ""
    return f"{energy}{show_span(cost.duration_s)}{told}{together}{counted}"


def _near(path: Path) -> Path:
    """Return a path as seen from the working folder if it lies below, else as it is."""
    if path.is_relative_to(Path.cwd()):
        return path.relative_to(Path.cwd())
    return path


def _print_grid(console: Console, heading: tuple[str, str], lines: "Iterable[tuple[str, str | Text]]") -> None:
    console.print(Text.assemble("\n", (heading[0], "bold"), "  ", heading[1]), soft_wrap=True)
    console.print(named_lines(lines))


def named_lines(lines: "Iterable[tuple[str, str | Text]]") -> Unpadded:
    """Return lines of text, each with its name in front."""
    table = Table.grid(padding=(0, 2))
    table.add_column(style="dim", no_wrap=True)
    table.add_column(overflow="fold")
    for name, text in lines:
        table.add_row(name, text)
    return Unpadded(table)


def _saving(study: Study) -> Text:
    saving = study.saving_fraction
    kind = energy_kind(study)
    if saving is None:
        return Text("unknown: the default point was not measured")
    if study.best is not None and study.best.point == study.problem.space.default:
        return Text("none: the default is the best that was tried, and stays", "yellow")
    style = "bold green" if saving > 0 else "yellow"
    words = study.problem.objective.words
    if (interval := study.saving) is None:
        return Text.assemble(("not proven", "yellow"), f": {saving:.1%} of the {words} ({kind}; no interval known)")
    said = f"95 %: {interval.low:.1%} to {interval.high:.1%}"
    if interval.low <= 0 <= interval.high:
        return Text.assemble(("not proven", "yellow"), f": {saving:.1%} of the {words} ({kind}; {said})")
    return Text.assemble((f"{saving:.1%}", style), f" of the {words} ({kind}; {said})")


def _print_front(console: Console, study: Study) -> None:
    """Print the trials that no other feasible one beats in both latency and energy, the fastest first."""
    kind = energy_kind(study)
    metric = study.front_metric
    default = study.default
    if not study.front:
        console.print("no front: no point that was tried holds the SLO", style="bold")
        return
    console.print(f"front of {metric} latency and energy per item ({kind})", style="bold")
    table = grid("", ("trial", metric, "energy", "saving", "point"), 0, after=2, folded=(4,))
    table.columns[-1].justify = "left"
    for trial in study.front:
        if (seen := trial.measurement) is None:
            continue
        before = optional(attrgetter("measurement"), default)
        cells = (str(trial.number), show(seen.metric(metric), "s"), show_joules(seen), _saved(seen, before))
        table.add_row(*cells, show_point(trial.point))
    console.print(Unpadded(table))


def _saved(seen: Measurement, before: Measurement | None) -> str:
    """Return which share of the default's energy a point saves, with its 95 % interval where it has one."""
    # By identity: it is the default's own row, where another trial may show equal figures.
    if before is None or seen is before:
        return "–"
    known = saving_interval(seen, before)
    saved = f"{1 - seen.energy_j / before.energy_j:.1%}"
    if known is None:
        return saved
    return f"{saved} ({100 * known.low:.0f} to {100 * known.high:.0f})"


def _held(study: Study, measurement: Measurement) -> Iterator[tuple[str, str]]:
    for asked, constraint in zip(study.problem.constraints, study.constraints, strict=True):
        unit = _UNITS[constraint.unit]
        relative = f" ({asked})" * asked.relative
        yield (
            constraint.metric,
            f"{show(measurement.metric(constraint.metric), unit)}, limit {show(constraint.limit, unit)}{relative}",
        )


def _of_tokens(default: Trial | None, tuned: Measurement) -> Iterator[tuple[str, str]]:
    """Yield, of a language model, tokens per joule and goodput at the tuned point, and what the default had."""
    before: Measurement | None = optional(attrgetter("measurement"), default)
    if (told := _tokens(tuned).get("tokens")) is not None:
        was = ""
        if before is not None and (was_per_j := before.metric("tokens_per_j")) is not None:
            was = f" (default {was_per_j:.4g}, mean {show(before.latency.mean_s, 's')})"
        yield "tokens", told + was
    for name, told in _goodput(tuned).items():
        was = ""
        if name == "goodput" and before is not None and before.goodput is not None:
            was = f" (default {show_share(before.goodput.share)})"
        yield name, told + was


def _trials(study: Study) -> str:
    made = len(study.trials)
    infeasible = study.infeasible
    failed = made - len(study.completed)
    text = f"{made:,} of {several(len(study.problem.space), 'point')}, {len(infeasible):,} infeasible{_excess(study)}"
    text += suffix(len(study.stopped_early), ", {} stopped early")
    text += suffix(failed, ", {} failed")
    if study.requests is None or not study.completed:
        return text
    each = study.requests / len(study.completed)
    return f"{text}; {each:,.0f} requests each (the paper: {_PAPER_REQUESTS:,})"


def _excess(study: Study) -> str:
    """Return by how much limits were broken, at worst and in all; nothing where none was."""
    broken = [trial.measurement for trial in study.infeasible if trial.measurement is not None]
    worst = max(broken, key=study.excess, default=None)
    if worst is None or (limit := study.most_broken(worst)) is None:
        return ""
    together = ""
    # Shares of a limit add up; degrees over one say nothing in sum.
    if all(each.unit != "c" for each in study.constraints):
        together = f", together {show_excess(study.total_excess)}"
    return f" (worst {limit.show_excess(worst)} {limit.beyond}{together})"


def _presets(study: Study) -> Iterator[tuple[str, str]]:
    for preset in study.references:
        misses = ""
        if not study.holds(preset.measurement):
            misses = "  misses the SLO"
        yield (
            f"preset {preset.name}",
            f"{show_joules(preset.measurement)}{_label(preset.measurement)}, {_latencies(preset.measurement)}{misses}",
        )


def _latencies(measurement: Measurement) -> str:
    named = {name: measurement.metric(name) for name in ("mean", "p99")}
    return ", ".join(f"{name} {show(value, 's')}" for name, value in named.items() if value is not None)
