"""What `polythrottle top` writes: a status as lines of text, for a screen or for none."""

import math
from collections.abc import Iterator, Sequence
from itertools import zip_longest

from rich.text import Text

from polythrottle.cells import iso_time
from polythrottle.daemon.status import GuardShown, Happened, SavedShown, Status, StudyShown
from polythrottle.measurement import EnergyKind
from polythrottle.printable import printable
from polythrottle.units import show, show_level, show_name, show_number

GOOD, WARN, BAD, DIM, HERE = "#2f9e77", "bold yellow", "bold red", "dim", "bold cyan"
_BLOCKS = " ▁▂▃▄▅▆▇█"
_UNITS = {"p99": "s", "power": "W", "peak power": "W", "temperature": "°C"}


def clock_time(at: str) -> str:
    """Return the time of day here of an ISO 8601 time; the text itself if it is none."""
    try:
        return iso_time(at).astimezone().strftime("%H:%M:%S")
    except ValueError:
        return printable(at)


def watts(status: Status, value: float | None) -> str:
    """Return a power as people read it; of relative energy only ratios mean something, so it has no unit."""
    return _energy(status, value, "W")


def joules(status: Status, value: float | None) -> str:
    """Return an energy likewise."""
    return _energy(status, value, "J")


def kind(status: Status) -> str:
    """Return how the joules come about unless they are measured."""
    return "" if status.energy_kind in ("", EnergyKind.MEASURED) else status.energy_kind


def power_words(status: Status) -> tuple[str, str]:
    """Return power, and what stands beside it."""
    budget = status.budget.limit_w
    beside = [f"peak {watts(status, status.peak_w)}"] if status.peak_w is not None else []
    beside += [f"budget {watts(status, budget)}"] if budget is not None else []
    return watts(status, status.power_w), " · ".join(beside)


def p99_words(status: Status) -> tuple[str, str]:
    """Return the p99, and its limit."""
    if status.limit_s is None:
        return show(status.p99_s, "s"), "no limit"
    share = f", {status.p99_s / status.limit_s:.0%} of it" if status.p99_s is not None and status.limit_s > 0 else ""
    return show(status.p99_s, "s"), f"limit {show(status.limit_s, 's')}{share}"


def load_words(status: Status) -> tuple[str, str]:
    """Return the load, and what the present point is good for."""
    waiting = "–" if status.waiting is None else str(status.waiting)
    most = [] if status.rung is None else [f"up to {_rate(status.rung.rate_per_s)}"]
    return _rate(status.rate_per_s), " · ".join((*most, f"{waiting} waiting"))


def saved_words(status: Status) -> tuple[str, str]:
    """Return what was saved today, claimed only if its interval excludes zero, and the interval."""
    saved = status.saved
    if saved.joules is None:
        return "unknown", printable(saved.words)
    if saved.low is None or saved.high is None:
        return "not proven", " ".join(filter(None, (joules(status, saved.joules), kind(status), "without interval")))
    low, high = joules(status, saved.low), joules(status, saved.high)
    same = low.split()[-1] == high.split()[-1]
    ends = f"95 %: {low.split()[0] if same else low} to {high}"
    said = joules(status, saved.joules) if proven(saved) else "not proven"
    return said, f"{ends}, {kind(status)}" if kind(status) else ends


def proven(saved: SavedShown) -> bool:
    """Return whether the interval of what was saved is known and excludes zero."""
    return saved.low is not None and saved.high is not None and (saved.low > 0 or saved.high < 0)


def study_words(status: Status) -> str:
    """Return where a study is."""
    study: StudyShown | None = status.study
    if study is None:
        return "none has run"
    best = "" if study.best_j is None else f", best {joules(status, study.best_j)} {kind(status)}".rstrip()
    return printable(f"{study.state}, {study.trials} of at most {study.of} trials{best}")


def finetuning_words(status: Status) -> str:
    """Return what fine-tuning runs beside the workload; empty if there is none."""
    job = status.finetuning
    if job is None:
        return ""
    of = "" if job.samples_of is None else f" of {job.samples_of:,}"
    within = f"epoch {job.epochs_done + 1} of {job.epochs}, {job.samples:,}{of} done"
    epochs = f"all {job.epochs} epochs" if job.epochs_done >= job.epochs else within
    rate = "" if job.rate_per_s is None else f" at {_rate(job.rate_per_s)}"
    return printable(f"{job.state} since {clock_time(job.since)}: {epochs}{rate}; {job.folder}")


def guard_words(guard: GuardShown) -> str:
    """Return what a guard sees and allows."""
    if guard.name == "throttling":
        return "throttling unknown" if guard.value is None else "throttles" if guard.value else "no throttling"
    unit = _UNITS.get(guard.name)
    if guard.name == "errors":
        seen, limit = ("–" if each is None else f"{each:.2%}" for each in (guard.value, guard.limit))
    else:
        seen, limit = (show(each, unit) if unit else _plain(each) for each in (guard.value, guard.limit))
    return f"{printable(guard.name)} {seen} of {limit}"


def troubles(status: Status) -> Iterator[str]:
    """Yield what does not work, in words."""
    if not status.reachable:
        yield "the device does not answer"
    if status.budget.met is False:
        yield printable(f"the budget cannot be met: {status.budget.words}")
    if status.drift:
        yield printable(f"drift: {status.drift}")
    yield from map(printable, status.faults)


def rung_lines(status: Status, most: int) -> list[Text]:
    """Return the ladder, at most so many rungs, the present one marked and among them."""
    here = -1 if status.rung is None else status.rung.number
    first = max(0, min(here - most // 2, len(status.ladder) - most))
    lines = []
    for number, rung in enumerate(status.ladder[first : first + most], first):
        cells = (_rate(rung.rate_per_s), watts(status, rung.power_w), show(rung.p99_s, "s"))
        mark, style = ("▶", HERE) if number == here else (" ", "")
        lines.append(Text(f"{mark} {cells[0]:>9} {cells[1]:>9} {cells[2]:>9}", style))
    return lines


def knob_lines(status: Status) -> list[Text]:
    """Return what is set, beside what runs."""
    levels = [_knob_cell(show_name(printable(name)), _number(name, level)) for name, level in status.point.items()]
    heat = "–" if status.temperature_c is None else f"{status.temperature_c:.1f} °C"
    slow = {None: "unknown", True: "yes", False: "no"}[status.throttled]
    runs = [_cell(printable(name), _short("_hz", hertz)) for name, hertz in status.clocks_hz.items()]
    both = zip_longest(
        levels or [f"{'as found':<19}"], [_cell("hottest", heat), *runs, _cell("throttled", slow)], fillvalue=""
    )
    return [Text(f"{left:<19}  {right}") for left, right in both]


def guards_line(status: Status) -> Text:
    """Return the guards: those that trip or are above their limit with what they see, the others by name."""
    line = Text()
    calm = []
    for guard in status.guards:
        above = guard.value is not None and guard.limit is not None and guard.value > guard.limit
        if guard.tripped or above:
            line.append(f"{guard_words(guard)}{', tripped' if guard.tripped else ''}  ", BAD if guard.tripped else WARN)
        else:
            calm.append(guard)
    for heading, names in (
        ("ok", [each.name for each in calm if None not in (each.value, each.limit)]),
        ("unknown", [each.name for each in calm if each.value is None and each.limit is not None]),
        ("no limit", [each.name for each in calm if each.limit is None]),
    ):
        if names:
            line.append(f"{heading}: {', '.join(map(printable, names))}  ", DIM)
    return line if status.guards else Text("no guard is set", DIM)


def event_line(event: Happened) -> Text:
    """Return an event."""
    bad = event.kind in ("guard", "fault", "refused")
    return Text.assemble(
        (clock_time(event.at), DIM),
        " ",
        (f"{printable(event.kind):<8.8}", BAD if bad else DIM),
        " ",
        printable(event.words),
    )


def spark(values: Sequence[float | None], width: int, height: int, top: float) -> list[str]:
    """Return a bar chart from 0 to ``top`` of the last values, one column each; an unknown value is left blank.

    Args:
        values: Oldest first.
        width: Columns.
        height: Lines.
        top: What fills a column.
    """
    shown = [None] * max(0, width - len(values)) + list(values[-width:])
    steps = [0 if each is None else _eighths(each, top, height) for each in shown]
    return ["".join(_BLOCKS[max(0, min(8, each - 8 * line))] for each in steps) for line in reversed(range(height))]


def _eighths(value: float, top: float, height: int) -> int:
    share = value / top if top > 0 and math.isfinite(value) else 0.0
    return max(1 if value > 0 else 0, min(8 * height, round(8 * height * share)))


def status_lines(status: Status) -> Iterator[tuple[str, str]]:
    """Yield a status by name and words, as where there is no screen."""
    served = status.workload
    yield "phase", printable(f"{status.phase}: {status.reason}" if status.reason else status.phase)
    if served is not None:
        slo = ", ".join(served.slo) or "no SLO"
        yield "workload", printable(f"{served.name}, {'up' if served.up else 'down'}; {slo}; {served.traffic}")
        yield "profile", printable(served.profile or "none")
    pairs = {"power": power_words, "p99": p99_words, "load": load_words, "saved": saved_words}
    for name, words in pairs.items():
        yield name, "; ".join(filter(None, (*words(status), kind(status) if name == "power" else "")))
    levels = (
        f"{show_name(printable(name))}={printable(show_number(name, level))}" for name, level in status.point.items()
    )
    yield "set", ", ".join(levels) or "as found"
    runs = [f"{printable(name)} {show_level('_hz', hertz)}" for name, hertz in status.clocks_hz.items()]
    yield "measured", " · ".join((*runs, show(status.temperature_c, "°C")))
    if status.rung is not None:
        yield "point", f"{status.rung.number + 1} of {status.rung.of}, for up to {_rate(status.rung.rate_per_s)}"
    tripped = ", ".join(guard_words(guard) for guard in status.guards if guard.tripped)
    yield "guards", f"tripped: {tripped}" if tripped else f"{len(status.guards)} ok"
    yield "budget", printable(status.budget.words) or "none"
    yield "study", study_words(status)
    if status.finetuning is not None:
        yield "training", finetuning_words(status)
    yield from (("warning", words) for words in troubles(status))


def _energy(status: Status, value: float | None, unit: str) -> str:
    if value is None or not math.isfinite(value):
        return "–"
    short = float(f"{value:.3g}")
    return f"{short:g} rel." if status.energy_kind == EnergyKind.RELATIVE else show(short, unit)


def _rate(value: float | None) -> str:
    return "–" if value is None else f"{value:.3g}/s"


def _plain(value: float | None) -> str:
    return "–" if value is None else f"{value:.4g}"


def _cell(name: str, value: str) -> str:
    return f"{name:<9.9} {value:>8.8}"


def _knob_cell(name: str, value: str) -> str:
    return f"{name:<13.13} {value:>5.5}"


def _number(name: str, level: float | str) -> str:
    whole = name.endswith("_hz") and not isinstance(level, str)
    return printable(f"{float(level) / 1e6:.0f}" if whole else show_number(name, level))


def _short(name: str, level: float | str) -> str:
    return f"{level / 1e6:.0f} MHz" if name.endswith("_hz") and not isinstance(level, str) else _level(name, level)


def _level(name: str, level: float | str) -> str:
    return printable(show_level(name, level))
