"""The tables of a report: the knobs to set, every trial, and what the study was."""

from collections.abc import Iterator, Mapping, Sequence

from polythrottle.measurement import Measurement
from polythrottle.report.digest import Digest
from polythrottle.report.headline import percent
from polythrottle.report.knobs import bare, titled
from polythrottle.report.markup import Html, joined, tag
from polythrottle.report.scale import Scale
from polythrottle.space import OperatingPoint
from polythrottle.study import Trial
from polythrottle.units import show, show_name, show_number

_STATISTICS = ("mean", "p50", "p95", "p99")
_KNOBS_MOST = 5
"""That have a column each."""


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
    """Every trial and preset: where, what was seen, whether the SLO holds, and what went wrong.

    A knob that stands at the same level in every row has no column. Where many differ, they share one.
    """

    def __init__(self, digest: Digest) -> None:
        self._digest, self._space = digest, digest.study.problem.space
        study = digest.study
        points = [trial.point for trial in study.trials] + [known.point for known in study.references]
        self._fixed = [name for name in self._space.names if len(points) > 1 and _alike(name, points)]
        self._knobs = [name for name in self._space.names if name not in self._fixed]
        self._together = len(self._knobs) > _KNOBS_MOST
        bounded = {bound.metric for bound in study.problem.constraints}
        self._shown = tuple(name for name in _STATISTICS if name in ("mean", "p99") or name in bounded)
        self._hidden = tuple(name for name in _STATISTICS if name not in self._shown)
        self._latency = Scale.of((seen.metric(name) for seen in digest.seen for name in _STATISTICS), "s")
        self._power = Scale.of((seen.power_w for seen in digest.seen), "W")
        self._energy = digest.energy_scale
        self._intervals = any(seen.intervals or seen.requests for seen in digest.seen)

    @property
    def more(self) -> tuple[str, ...]:
        """The columns that are hidden at first."""
        return (*self._hidden, *(("requests",) if self._intervals else ()))

    @property
    def note(self) -> str:
        """What all rows have in common; empty if nothing."""
        if not self._fixed:
            return ""
        trials, presets = self._digest.study.trials, self._digest.study.references
        point = trials[0].point if trials else presets[0].point
        levels = (f"{show_name(name)}={show_number(name, point[name])}" for name in self._fixed)
        return f"The same in every row: {', '.join(levels)}."

    def html(self) -> Html:
        """Return the table."""
        trials = tag("tbody", joined(map(self._trial, self._digest.study.trials)))
        return tag("table", tag("thead", self._head()), trials, *self._presets(), class_="trials")

    def _head(self) -> Html:
        knobs = [tag("th", "point")] if self._together else [_heading(_breakable(titled(name))) for name in self._knobs]
        return tag(
            "tr",
            tag("th", "trial"),
            *knobs,
            *(_heading(self._latency.titled(name)) for name in self._shown),
            *((_heading("p99 between"),) if self._intervals else ()),
            *(_heading(self._latency.titled(name), more=True) for name in self._hidden),
            _heading(self._power.titled("power")),
            _heading(self._energy.titled(self._digest.energy_name)),
            *((_heading("± 95 %"), _heading("requests", more=True)) if self._intervals else ()),
            tag("th", "SLO"),
        )

    def _trial(self, trial: Trial) -> Html:
        named = {mark.number: mark.name for mark in (self._digest.default, self._digest.best) if mark is not None}
        name = f"{trial.number} {named.get(trial.number, '')}".strip()
        return self._row(
            tag("td", name, data_value=str(trial.number)),
            trial.point,
            trial.measurement,
            self._outcome(trial),
            named.get(trial.number, ""),
        )

    def _presets(self) -> Iterator[Html]:
        rows = [
            self._row(
                tag("td", f"preset {known.name}"),
                known.point,
                known.measurement,
                self._verdict(known.measurement),
                "preset",
            )
            for known in self._digest.study.references
        ]
        if rows:
            yield tag("tbody", joined(rows))

    def _row(self, name: Html, point: OperatingPoint, seen: Measurement | None, outcome: str, kind: str) -> Html:
        return tag(
            "tr",
            name,
            *self._levels(point),
            *self._values(seen),
            tag("td", outcome, class_="outcome"),
            class_=kind,
        )

    def _levels(self, point: OperatingPoint) -> Iterator[Html]:
        if self._together:
            known = (name for name in self._knobs if name in point)
            yield tag(
                "td", ", ".join(f"{show_name(name)}={show_number(name, point[name])}" for name in known), class_="point"
            )
            return
        for name in self._knobs:
            yield _number(bare(name, point[name]) if name in point else "–")

    def _values(self, seen: Measurement | None) -> Iterator[Html]:
        for statistic in self._shown:
            yield _number(self._latency.number(seen.metric(statistic) if seen else None))
        if self._intervals:
            yield _number(self._ends(seen))
        for statistic in self._hidden:
            yield _number(self._latency.number(seen.metric(statistic) if seen else None), more=True)
        yield _number(self._power.number(seen.power_w if seen else None))
        yield _number(self._energy.number(seen.energy_j if seen else None))
        if self._intervals:
            yield _number(_half(seen))
            yield _number(f"{seen.requests:,}" if seen and seen.requests is not None else "–", more=True)

    def _ends(self, seen: Measurement | None) -> str:
        """Return between what the p99 is; an upper end that is not known is an ellipsis."""
        found = seen.intervals.get("p99") if seen else None
        if found is None:
            return "–"
        return f"{self._latency.number(found.low)} – {self._latency.number(found.high) if found.known else '…'}"

    def _outcome(self, trial: Trial) -> str:
        """Return whether the SLO holds at a trial, or why nobody knows."""
        if trial.failure is not None:
            return f"failed: {trial.failure}"
        if trial.measurement is None:
            return str(trial.state)
        early = ", stopped early" if trial.measurement.censored else ""
        return f"{self._verdict(trial.measurement)}{early}"

    def _verdict(self, seen: Measurement) -> str:
        verdict = self._digest.verdict(seen)
        if verdict is None or not self._digest.study.problem.constraints:
            return "–"
        return "holds" if verdict else f"over by {percent(self._digest.study.excess(seen))}"


def _alike(name: str, points: Sequence[OperatingPoint]) -> bool:
    """Return whether a knob is at the same level at all points; one that a point leaves open is not."""
    return all(name in point for point in points) and len({point[name] for point in points}) == 1


def _level(name: str, point: OperatingPoint, default: OperatingPoint) -> Html:
    text = show_number(name, point[name])
    return tag("td", text, class_="number" if point[name] == default[name] else "number moved")


def _half(seen: Measurement | None) -> str:
    """Return half the interval of energy as a share of it; unknown gives ``–``."""
    found = seen.intervals.get("energy") if seen else None
    return "–" if seen is None or found is None else f"{100 * found.half / seen.energy_j:.2g} %"


def _number(text: str, *, more: bool = False) -> Html:
    return tag("td", text, class_="number more" if more else "number")


def _breakable(name: str) -> Html:
    """Return a name that may go on in the next line after an underscore."""
    return joined(name.split("_"), Html("_<wbr>"))


def _heading(text: str, *, more: bool = False) -> Html:
    return tag("th", text, class_="number more" if more else "number")
