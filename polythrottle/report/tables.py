"""The tables of a report: the knobs to set, every trial, and what the study was."""

from collections.abc import Iterator, Mapping

from polythrottle.measurement import Measurement
from polythrottle.report.digest import Digest
from polythrottle.report.headline import percent
from polythrottle.report.knobs import bare, titled
from polythrottle.report.markup import Html, joined, tag
from polythrottle.report.scale import Scale
from polythrottle.space import OperatingPoint
from polythrottle.study import Trial
from polythrottle.units import show, show_level, show_name

_STATISTICS = ("mean", "p50", "p95", "p99")


def knob_table(digest: Digest) -> Html:
    """Return the level of every knob at the tuned point and at the default."""
    space = digest.study.problem.space
    points = {"tuned": digest.best.point} if digest.best is not None else {}
    points["default"] = space.default
    head = tag("tr", tag("th", "knob"), *(tag("th", title, class_="number") for title in points))
    rows = (
        tag(
            "tr",
            tag("th", show_name(name), scope="row"),
            *(_level(name, point, space.default) for point in points.values()),
        )
        for name in space.names
    )
    return tag("table", tag("thead", head), tag("tbody", joined(rows)), class_="knobs")


def about(digest: Digest, facts: Mapping[str, str]) -> Html:
    """Return what was tuned and how, and whatever else the caller knows."""
    problem, window = digest.study.problem, digest.study.problem.window
    least = f"at least {window.queries} queries and {show(window.duration_s, 's')}"
    known = {
        "device": problem.device,
        "workload": problem.workload,
        "SLO": ", ".join(map(str, problem.constraints)) or "none",
        "energy": digest.kind or "nothing was measured",
        "joules cover": digest.boundary or "not stated",
        "method": digest.study.method,
        "seed": str(digest.study.seed),
        "window": f"{least}, after {window.warmup} to warm up",
    }
    rows = (tag("div", tag("dt", name), tag("dd", text or "–")) for name, text in {**known, **facts}.items())
    return tag("dl", joined(rows), class_="about")


class TrialTable:
    """Every trial and preset: where, what was seen, whether the SLO holds, and what went wrong."""

    def __init__(self, digest: Digest) -> None:
        self._digest = digest
        self._knobs = digest.study.problem.space.names
        self._latency = Scale.of((seen.metric(name) for seen in digest.seen for name in _STATISTICS), "s")
        self._power = Scale.of((seen.power_w for seen in digest.seen), "W")
        self._energy = digest.energy_scale
        self._intervals = any(seen.intervals or seen.requests for seen in digest.seen)

    def html(self) -> Html:
        """Return the table."""
        trials = tag("tbody", joined(map(self._trial, self._digest.study.trials)))
        return tag("table", tag("thead", self._head()), trials, *self._presets(), class_="trials")

    def _head(self) -> Html:
        numbers = [
            *map(titled, self._knobs),
            *(self._latency.titled(name) for name in _STATISTICS),
            self._power.titled("power"),
            self._energy.titled(self._digest.energy_name),
            *(("± 95 %", "p99 between", "requests") if self._intervals else ()),
        ]
        return tag(
            "tr",
            tag("th", "trial"),
            *(tag("th", text, class_="number") for text in numbers),
            tag("th", "SLO"),
            tag("th", "state"),
        )

    def _trial(self, trial: Trial) -> Html:
        named = {mark.number: mark.name for mark in (self._digest.default, self._digest.best) if mark is not None}
        name = f"{trial.number} {named.get(trial.number, '')}".strip()
        early = ", stopped early" if trial.measurement is not None and trial.measurement.censored else ""
        state = f"{trial.state}{early}" if trial.failure is None else f"{trial.state}: {trial.failure}"
        return self._row(
            tag("td", name, data_value=str(trial.number)),
            trial.point,
            trial.measurement,
            state,
            named.get(trial.number, ""),
        )

    def _presets(self) -> Iterator[Html]:
        rows = [
            self._row(tag("td", known.name), known.point, known.measurement, "preset", "preset")
            for known in self._digest.study.references
        ]
        if rows:
            yield tag("tbody", joined(rows))

    def _row(self, name: Html, point: OperatingPoint, seen: Measurement | None, state: str, kind: str) -> Html:
        levels = (_number(bare(knob, point[knob]) if knob in point else "–") for knob in self._knobs)
        cells = (*self._values(seen), tag("td", self._verdict(seen)), tag("td", state, class_="state"))
        return tag("tr", name, *levels, *cells, class_=kind)

    def _values(self, seen: Measurement | None) -> Iterator[Html]:
        for statistic in _STATISTICS:
            yield _number(self._latency.number(seen.metric(statistic) if seen else None))
        yield _number(self._power.number(seen.power_w if seen else None))
        yield _number(self._energy.number(seen.energy_j if seen else None))
        if self._intervals:
            yield _number(_half(seen))
            yield _number(self._ends(seen))
            yield _number(f"{seen.requests:,}" if seen and seen.requests is not None else "–")

    def _ends(self, seen: Measurement | None) -> str:
        """Return between what the p99 is; an upper end that is not known is an ellipsis."""
        found = seen.intervals.get("p99") if seen else None
        if found is None:
            return "–"
        return f"{self._latency.number(found.low)} – {self._latency.number(found.high) if found.known else '…'}"

    def _verdict(self, seen: Measurement | None) -> str:
        verdict = None if seen is None else self._digest.verdict(seen)
        if seen is None or verdict is None or not self._digest.study.problem.constraints:
            return "–"
        return "holds" if verdict else f"over by {percent(self._digest.study.excess(seen))}"


def _level(name: str, point: OperatingPoint, default: OperatingPoint) -> Html:
    text = show_level(name, point[name])
    return tag("td", text, class_="number" if point[name] == default[name] else "number moved")


def _half(seen: Measurement | None) -> str:
    """Return half the interval of energy as a share of it; unknown gives ``–``."""
    found = seen.intervals.get("energy") if seen else None
    return "–" if seen is None or found is None else f"{100 * found.half / seen.energy_j:.2g} %"


def _number(text: str) -> Html:
    return tag("td", text, class_="number")
