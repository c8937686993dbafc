"""What `polythrottle top` and `daemon status` write: a status, or that of a server of services, as lines of text."""

import math
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from itertools import zip_longest

from rich.table import Table
from rich.text import Text

from polythrottle.cli.output import formatted, optional, several, suffix
from polythrottle.cli.render.console import plain_console
from polythrottle.cli.render.text import named_lines
from polythrottle.daemon.status import (
    ExploringShown,
    GuardShown,
    Happened,
    NodeShown,
    SavedShown,
    ServiceShown,
    Status,
    StudyShown,
)
from polythrottle.domain.measurement import EnergyKind
from polythrottle.domain.space import OperatingPoint
from polythrottle.domain.units import show, show_level, show_name, show_number
from polythrottle.storage.cells import iso_time
from polythrottle.storage.untrusted import printable

GOOD = "#2f9e77"
WARN = "bold yellow"
BAD = "bold red"
DIM = "dim"
HERE = "bold cyan"
_BLOCKS = " ▁▂▃▄▅▆▇█"
_UNITS = {"p99": "s", "ttft p99": "s", "tpot p99": "s", "power": "W", "peak power": "W", "temperature": "°C"}


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
    if status.energy_kind in ("", EnergyKind.MEASURED):
        return ""
    return status.energy_kind


def power_words(status: Status) -> tuple[str, str]:
    """Return power, and what stands beside it."""
    beside = {"peak": status.peak_w, "budget": status.budget.limit_w}
    known = [f"{name} {watts(status, power_w)}" for name, power_w in beside.items() if power_w is not None]
    return watts(status, status.power_w), " · ".join(known)


def p99_words(status: Status) -> tuple[str, str]:
    """Return the p99, and its limit."""
    if status.limit_s is None:
        return show(status.p99_s, "s"), "no limit"
    if status.p99_s is not None and status.limit_s > 0:
        share = f", {status.p99_s / status.limit_s:.0%} of it"
    else:
        share = ""
    return show(status.p99_s, "s"), f"limit {show(status.limit_s, 's')}{share}"


def token_words(status: Status) -> str | None:
    """Return a language model's times to and per token, and its tokens a second; None of any other workload."""
    words = [
        *(
            f"{name} {show(value_s, 's')}"
            for name, value_s in (("ttft p99", status.ttft_p99_s), ("tpot p99", status.tpot_p99_s))
            if value_s is not None
        ),
        *(
            f"{per_s:,.0f}/s {what}"
            for what, per_s in (("in", status.tokens_in_per_s), ("out", status.tokens_out_per_s))
            if per_s is not None
        ),
    ]
    return "; ".join(words) or None


def load_words(status: Status) -> tuple[str, str]:
    """Return the load, and what the present point is good for."""
    words = [f"{formatted(status.waiting, unknown='–')} waiting"]
    if status.rung is not None:
        words.insert(0, f"up to {_rate(status.rung.rate_per_s)}")
    return _rate(status.rate_per_s), " · ".join(words)


def saved_words(status: Status) -> tuple[str, str]:
    """Return what was saved today, claimed only if its interval excludes zero, and the interval."""
    saved = status.saved
    if saved.joules is None:
        return "unknown", printable(saved.words)
    if saved.low is None or saved.high is None:
        return "not proven", " ".join(filter(None, (joules(status, saved.joules), kind(status), "without interval")))
    low = joules(status, saved.low)
    high = joules(status, saved.high)
    if low.split()[-1] == high.split()[-1]:  # the unit is said once
        low = low.split()[0]
    said = "not proven"
    if proven(saved):
        said = joules(status, saved.joules)
    return said, f"95 %: {low} to {high}{suffix(kind(status), ', {}')}"


def proven(saved: SavedShown) -> bool:
    """Return whether the interval of what was saved is known and excludes zero."""
    return saved.low is not None and saved.high is not None and (saved.low > 0 or saved.high < 0)


def study_words(status: Status) -> str:
    """Return where a study is."""
    study: StudyShown | None = status.study
    if study is None:
        return "none has run"
    if study.best_j is None:
        best = ""
    else:
        best = f", best {joules(status, study.best_j)} {kind(status)}".rstrip()
    return printable(f"{study.state}, {study.trials} of at most {study.of} trials{best}")


def finetuning_words(status: Status) -> str:
    """Return what fine-tuning runs beside the workload; empty if there is none."""
    job = status.finetuning
    if job is None:
        return ""
    of = formatted(job.samples_of, " of {:,}")
    epochs = f"epoch {job.epochs_done + 1} of {job.epochs}, {job.samples:,}{of} done"
    if job.epochs_done >= job.epochs:
        epochs = f"all {job.epochs} epochs"
    rate = formatted(optional(_rate, job.rate_per_s), " at {}")
    return printable(f"{job.state} since {clock_time(job.since)}: {epochs}{rate}; {job.folder}")


def guard_words(guard: GuardShown) -> str:
    """Return what a guard sees and allows."""
    if guard.name == "throttling":
        if guard.value is None:
            return "throttling unknown"
        if guard.value:
            return "throttles"
        return "no throttling"
    return f"{printable(guard.name)} {_guarded(guard.name, guard.value)} of {_guarded(guard.name, guard.limit)}"


def _guarded(name: str, value: float | None) -> str:
    """Return a figure that a guard looks at, in its unit."""
    if name == "errors":
        return formatted(value, "{:.2%}", "–")
    unit = _UNITS.get(name.partition(" for ")[0])
    if unit is not None:
        return show(value, unit)
    return formatted(value, "{:.4g}", "–")


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
    here = -1
    if status.rung is not None:
        here = status.rung.number
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
    heat = formatted(status.temperature_c, "{:.1f} °C", "–")
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
            style = {True: BAD, False: WARN}[guard.tripped]
            line.append(f"{guard_words(guard)}{', tripped' * guard.tripped}  ", style)
        else:
            calm.append(guard)
    for heading, names in (
        ("ok", [each.name for each in calm if None not in (each.value, each.limit)]),
        ("unknown", [each.name for each in calm if each.value is None and each.limit is not None]),
        ("no limit", [each.name for each in calm if each.limit is None]),
    ):
        if names:
            line.append(f"{heading}: {', '.join(map(printable, names))}  ", DIM)
    if status.guards:
        return line
    return Text("no guard is set", DIM)


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
    # New values come in on the right, as on a paper strip.
    shown = [None] * max(0, width - len(values)) + list(values[-width:])
    steps = [0 if each is None else _eighths(each, top, height) for each in shown]
    return ["".join(_BLOCKS[max(0, min(8, each - 8 * line))] for each in steps) for line in reversed(range(height))]


def _eighths(value: float, top: float, height: int) -> int:
    share = 0.0
    if top > 0 and math.isfinite(value):
        share = value / top
    least = int(value > 0)  # little is shown as little, not as nothing
    return max(least, min(8 * height, round(8 * height * share)))


def status_lines(status: Status) -> Iterator[tuple[str, str]]:
    """Yield a status by name and words, as where there is no screen."""
    served = status.workload
    yield "phase", printable(f"{status.phase}{suffix(status.reason, ': {}')}")
    if served is not None:
        slo = ", ".join(served.slo) or "no SLO"
        yield "workload", printable(f"{served.name}, {'up' if served.up else 'down'}; {slo}; {served.traffic}")
        yield "profile", printable(served.profile or "none")
    if (told := token_words(status)) is not None:
        yield "tokens", told
    pairs = {"power": power_words, "p99": p99_words, "load": load_words, "saved": saved_words}
    for name, words in pairs.items():
        yield name, "; ".join(filter(None, (*words(status), kind(status) * (name == "power"))))
    levels = (
        f"{show_name(printable(name))}={printable(show_number(name, level))}" for name, level in status.point.items()
    )
    yield "set", ", ".join(levels) or "as found"
    runs = [f"{printable(name)} {show_level('_hz', hertz)}" for name, hertz in status.clocks_hz.items()]
    yield "measured", " · ".join((*runs, show(status.temperature_c, "°C")))
    if status.rung is not None:
        yield "point", f"{status.rung.number + 1} of {status.rung.of}, for up to {_rate(status.rung.rate_per_s)}"
    tripped = ", ".join(guard_words(guard) for guard in status.guards if guard.tripped)
    yield "guards", suffix(tripped, "tripped: {}") or f"{len(status.guards)} ok"
    yield "budget", printable(status.budget.words) or "none"
    yield "study", study_words(status)
    if status.finetuning is not None:
        yield "training", finetuning_words(status)
    yield from (("warning", words) for words in troubles(status))


def _energy(status: Status, value: float | None, unit: str) -> str:
    if value is None or not math.isfinite(value):
        return "–"
    # Three digits: what the sensors of boards resolve, and a line that does not tremble.
    short = float(f"{value:.3g}")
    if status.energy_kind == EnergyKind.RELATIVE:
        return f"{short:g} rel."
    return show(short, unit)


def _rate(value: float | None) -> str:
    return formatted(value, "{:.3g}/s", "–")


def _cell(name: str, value: str) -> str:
    return f"{name:<9.9} {value:>8.8}"


def _knob_cell(name: str, value: str) -> str:
    return f"{name:<13.13} {value:>5.5}"


def _number(name: str, level: float | str) -> str:
    if name.endswith("_hz") and not isinstance(level, str):
        return f"{level / 1e6:.0f}"
    return printable(show_number(name, level))


def _short(name: str, level: float | str) -> str:
    if name.endswith("_hz") and not isinstance(level, str):
        return f"{level / 1e6:.0f} MHz"
    return _level(name, level)


def _level(name: str, level: float | str) -> str:
    return printable(show_level(name, level))


# A server of services in the terminal: what it draws, what it may, and what each of its services gets of it.


def print_node(node: NodeShown) -> None:
    """Print all services of a server and the watts they share."""
    console = plain_console()
    console.print(Text(f"a server of {several(len(node.services), 'service')}", "bold"))
    console.print(named_lines([pair for pair in _node_lines(node) if pair[1]]))
    table = Table(box=None, pad_edge=False)
    for name in ("service", "phase", "load", "p99", "power", "may draw", "weight"):
        table.add_column(name, justify="left" if name in ("service", "phase") else "right", no_wrap=name == "service")
    for each in node.services:
        table.add_row(*_service_row(each))
    console.print(table)
    for fault in node.faults:
        console.print(Text(printable(fault)))
    for each in node.services:
        for fault in each.faults:
            console.print(Text(f"{each.name}: {printable(fault)}"))
    for pod in node.pods:
        if pod.refused:
            console.print(
                Text(f"{printable(f'{pod.namespace}/{pod.pod}')} is not looked after: {printable(pod.refused)}")
            )


def _node_lines(node: NodeShown) -> Iterator[tuple[str, str]]:
    if node.energy_kind in ("", EnergyKind.MEASURED):
        kind = ""
    else:
        kind = f" {node.energy_kind}"
    yield "power", f"{_watts_or_dash(node.power_w)}{kind}"
    if node.limit_w is None:
        yield "limit", "none"
        return
    yield "limit", f"{show(node.limit_w, 'W')}, {_kept_words(node)}"
    if node.services:
        yield "rest", f"{_watts_or_dash(node.rest_w)} counted for what the server draws besides its services' devices"
    if node.above:
        yield "above", f"{node.above} s since it was set, at most {node.above_most} s in a row"
    if node.buys_w is not None:
        yield "more", f"{show(node.buys_w, 'W')} more would buy {node.buys}"


def _kept_words(node: NodeShown) -> str:
    """Return whether a limit is kept."""
    if not node.services:
        return "but nothing is steered: there is no service now"
    if node.met is None:
        return "but whether it is kept is not known"
    if node.met:
        return "kept"
    return "cannot be promised: what its services may draw at most does not fit"


def _service_row(each: ServiceShown) -> tuple[str, ...]:
    p99 = "–"
    if each.p99_s is not None:
        if each.limit_s is None:
            p99 = show(each.p99_s, "s")
        else:
            p99 = f"{show(each.p99_s, 's')} of {show(each.limit_s, 's')}"
    phase = f"{each.phase}, short" if each.short else each.phase
    if each.share_w is None:
        share = "not bounded"
    else:
        share = show(each.share_w, "W")
    load = formatted(each.rate_per_s, "{:.3g}/s", unknown="–")
    return (each.name, phase, load, p99, _watts_or_dash(each.power_w), share, f"{each.weight:g}")


def _watts_or_dash(power_w: float | None) -> str:
    if power_w is None:
        return "–"
    return show(power_w, "W")


# `daemon status`: one service, in lines.

_HUNG_S = 5.0
_STANDS = "the control loop has not turned"


def print_status(status: Status) -> None:
    """Print what a daemon does now."""
    console = plain_console()
    # The daemon says so itself, where it can still answer; what it was when it published, its time tells.
    told = [fault for fault in status.faults if fault.startswith(_STANDS)]
    for hung in told or [_hung(status.at)]:
        if hung:
            console.print(Text(hung, "bold"))
    console.print(Text(status.title or status.device, "bold"))
    console.print(named_lines([pair for pair in _present_lines(status) if pair[1] and pair[1] not in told]))


def _hung(at: str) -> str:
    """Say for how long the status is old already, where that is longer than a turn can take; "" if it is not."""
    with suppress(ValueError):
        # Wall clock on both sides: the daemon may run on another machine, whose monotonic clock is its own.
        age_s = time.time() - iso_time(at).timestamp()
        if age_s > _HUNG_S:
            return f"{_STANDS} for {age_s:.0f} s"
        return ""
    return ""


def _present_lines(status: Status) -> Iterator[tuple[str, str]]:
    from polythrottle.api.tuning_result import show_point

    yield "phase", f"{status.phase}: {status.reason}"
    if status.workload is not None:
        up = "up" if status.workload.up else "down"
        yield "workload", f"{status.workload.uri} ({up}), requests seen through {status.workload.traffic}"
        yield "profile", status.workload.profile or "none: it was never tuned"
        yield "SLO", ", ".join(status.workload.slo)
    if status.point:
        yield "set", show_point(OperatingPoint(status.point))
    else:
        yield "set", "as found"
    if status.rung is not None:
        yield (
            "point",
            f"{status.rung.number + 1} of {status.rung.of} of the ladder, for up to {status.rung.rate_per_s:.3g}/s",
        )
    waiting = formatted(status.waiting, unknown="–")
    yield "requests", formatted(status.rate_per_s, f"{{:.3g}}/s, {waiting} waiting")
    if status.p99_s is not None:
        yield "p99", f"{show(status.p99_s, 's')} (limit {show(status.limit_s, 's')})"
    if (tokens := token_words(status)) is not None:
        yield "tokens", tokens
    if status.power_w is not None:
        yield "power", f"{show(status.power_w, 'W')} ({status.energy_kind})"
    yield "temperature", formatted(status.temperature_c, "{:.1f} °C")
    yield "saved", _saved_words(status.saved)
    yield "budget", status.budget.words
    if status.study is not None:
        yield "study", f"{status.study.id} {status.study.state}: {status.study.words}"
    if status.exploring.late > 0:
        yield "late", exploring_words(status.exploring)
    yield "training", finetuning_words(status)
    yield "drift", status.drift
    for fault in status.faults:
        yield "fault", fault


def exploring_words(exploring: ExploringShown) -> str:
    """Return how many requests studies have made late, and how many more they may."""
    left = formatted(exploring.late_left, "{:.3g}")
    return (
        f"{exploring.late:,.3g} of the last day's {exploring.requests:,.0f} requests, for studies; {left} more may be"
    )


def _saved_words(saved: SavedShown) -> str:
    if saved.joules is None:
        return str(saved.words)
    if saved.low is None:
        ends = ""
    else:
        ends = f" ({show(saved.low, 'J')} to {show(saved.high, 'J')})"
    return f"{show(saved.joules, 'J')}{ends} today, {saved.words}"
