"""The words and tables of a report: the saving it claims, the knobs to set, every trial, and what the study was."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace

from polythrottle.domain.measurement import EnergyKind, Measurement
from polythrottle.domain.metrics import OF_CLASS, split_metric, unit_of
from polythrottle.domain.problem import Constraint, Objective
from polythrottle.domain.space import OperatingPoint
from polythrottle.domain.study import CAUTIONS, RECORDED_ITEMS, WORTHWHILE, Trial, TrialState
from polythrottle.domain.units import show, show_name, show_number, show_percent, show_share, show_span
from polythrottle.report.digest import Digest, Scale
from polythrottle.report.figure_style import Html, joined, tag
from polythrottle.report.figures import bare, titled

# What a report says first: the saving and what it rests on.

_NO_INTERVAL = "The saving compares two single trials; its interval is not known."
_SHOWN_UNITS = {"s": "s", "w": "W", "c": "°C", "per_s": "/s", "per_j": "/J"}


def headline(digest: Digest) -> Html:
    """Return the claim, the two energies it compares, the cautions it needs, and the figures beside it."""
    return tag(
        "section",
        tag("p", claim(digest), class_="claim"),
        _energies(digest),
        *_cautions(digest),
        tag("dl", joined(_stats(digest)), class_="stats"),
        class_="headline",
    )


def claim(digest: Digest) -> str:
    """Return in one sentence what the study found."""
    saving = digest.saving_fraction
    goal = digest.objective_name
    if not digest.measured:
        return "No trial was completed"
    if digest.best is None:
        judged = digest.closest is not None
        if judged:
            return "No point that was tried holds the SLO"
        return "The SLO could not be judged"
    if saving is None:
        return f"{_energy(digest, digest.best.measurement)} {digest.energy_name} at the tuned point"
    if digest.default_is_best:
        alone = len(digest.measured) == 1
        if alone:
            return "Only the default was measured"
        return "Nothing that was tried beats the default"
    if not saving:
        return f"The same {goal} as the default"
    words = f"{percent(abs(saving))} {'less' if saving > 0 else 'more'} {goal} than the default"
    # As in the text: what may be chance alone, or has no interval that says it is not, is no claim.
    between = digest.study.saving
    if between is None or between.low <= 0 <= between.high:
        return f"Not proven: {words}"
    return words


def percent(fraction: float) -> str:
    """Return a fraction as people read it: ``0.314`` gives ``31.4 %``."""
    return show_percent(fraction, ".3g" if fraction < 1 else ".0f")


def _value(metric: str, value: float | None) -> str:
    """Return one of `METRICS` with its unit; unknown gives ``–``."""
    return show(value, _SHOWN_UNITS[unit_of(metric)])


def _title(metric: str) -> str:
    """Return what a metric is called: ``p99 latency``, ``power``."""
    if unit_of(metric) != "s":
        return metric
    name, prompts = split_metric(metric)
    if prompts is not None:
        return f"{name} latency, {prompts}"
    return f"{name} latency"


def _kinds(digest: Digest) -> list[EnergyKind]:
    return sorted({measurement.energy_kind for measurement in digest.measurements})


def _energies(digest: Digest) -> Html:
    if not digest.measured:
        return joined(())
    between = "; "
    if digest.saving_fraction is not None:
        between = " → "
    return tag("p", f"{digest.energy_name.capitalize()}: {between.join(_energy_parts(digest))}", class_="energies")


def _energy_parts(digest: Digest) -> Iterator[str]:
    default = digest.default
    best = digest.best
    closest = digest.closest
    if default is None:
        yield "not measured at the default"
    else:
        broken = ""
        if default.verdict is False:
            broken = ", which breaks the SLO"
        yield f"{_energy(digest, default.measurement)} at the default{broken}"
    if best is not None and not digest.default_is_best:
        yield f"{_energy(digest, best.measurement)} tuned"
    if best is None and closest is not None:
        trial, measurement = closest
        yield f"{_energy(digest, measurement)} in trial {trial.number}, which comes closest to holding it"


def _cautions(digest: Digest) -> Iterator[Html]:
    words = [CAUTIONS[kind] for kind in _kinds(digest) if kind in CAUTIONS]
    if digest.saving_fraction and not digest.default_is_best:
        words.append(_interval(digest))
    if digest.default_will_do:
        words.append(f"Nothing is gained: the default is within {percent(WORTHWHILE)} of the best found.")
    return (tag("p", text, class_="caution") for text in words)


def _interval(digest: Digest) -> str:
    """Return between what the saving is, and whether that proves one."""
    saving = digest.study.saving
    if saving is None:
        return _NO_INTERVAL
    between = f"between {100 * saving.low:.3g} % and {100 * saving.high:.3g} % with 95 % confidence"
    if saving.low <= 0 <= saving.high:
        return f"The saving is not proven: it is {between}."
    return f"The saving is {between}, two single trials compared."


def _energy(digest: Digest, measurement: Measurement) -> str:
    return digest.energy_scale.quantity(measurement.energy_j)


def _stats(digest: Digest) -> Iterable[Html]:
    for bound in digest.constraints or ():
        yield _slo(digest, bound)
    for bound in digest.study.problem.constraints if digest.constraints is None else ():
        yield _stat(_title(bound.metric), "–", f"SLO {bound}; what it multiplies was not measured")
    if digest.best is not None:
        yield from _of_tokens(digest.best.measurement)
    if not digest.study.problem.constraints:
        yield _stat("SLO", "none", "every point is allowed")
    if digest.study.problem.objective is not Objective.ENERGY:
        yield _stat("objective", str(digest.study.problem.objective), digest.study.problem.objective.words)
    count = len(digest.study.trials)
    size = len(digest.study.problem.space)
    yield _stat("trials", f"{count:,}", f"in a space of {size:,} point{'s' * (size > 1)}")
    over = _worst(digest)
    unknown = ""
    if digest.unjudged:
        unknown = f", {digest.unjudged:,} not judged"
    yield _stat("broke the SLO", f"{len(digest.broken):,}", f"infeasible trials{over}{unknown}")
    yield from _effort(digest)
    for state in (TrialState.FAILED, TrialState.RUNNING):
        if others := len(digest.in_state(state)):
            yield _stat(str(state), f"{others:,}", f"trial{'s' * (others > 1)} without a measurement")


def _of_tokens(measurement: Measurement) -> Iterator[Html]:
    """Yield, of a language model, tokens per joule beside how long answers took, and how many held their limits."""
    tokens_per_j = measurement.metric("tokens_per_j")
    if tokens_per_j is not None and measurement.energy_kind is not EnergyKind.RELATIVE:
        mean = show(measurement.latency.mean_s, "s")
        yield _stat(
            "tokens per joule, tuned", f"{tokens_per_j:.4g}", f"{measurement.energy_kind}; mean {mean} end to end"
        )
    if (goodput := measurement.goodput) is not None:
        each = ""
        if goodput.energy_j is not None and measurement.energy_kind is not EnergyKind.RELATIVE:
            each = f"; {show(goodput.energy_j, 'J')} per good request, {measurement.energy_kind}"
        held = f"of {goodput.requests:,} requests held every limit of theirs, {goodput.per_s:.4g} a second{each}"
        yield _stat("goodput, tuned", show_share(goodput.share), held)
        for prompts, (requests, good) in goodput.classes.items():
            if requests:
                mean = show(measurement.metric(f"mean{OF_CLASS}{prompts}"), "s")
                note = f"of {requests:,} requests; mean {mean} end to end"
                yield _stat(f"goodput, {prompts}", show_share(good / requests), note)


def _effort(digest: Digest) -> Iterator[Html]:
    """Yield what the search and the presets took, and how many trials it did not have to see to their end."""
    if early := len(digest.study.stopped_early):
        yield _stat("stopped early", f"{early:,}", f"trial{'s' * (early > 1)} that plainly broke the SLO")
    searched = replace(digest.study.cost, duration_s=digest.study.duration_s)
    for name, cost in (("search", searched), ("presets", digest.study.presets_cost)):
        if not cost.duration_s:
            continue
        if digest.study.problem.recorded:
            counted = f"; {RECORDED_ITEMS:,} items a trial, as recorded"
        else:
            counted = ""
        energy = ""
        if digest.energy_unit:
            energy = f"and {show(cost.energy_j, 'J')}, {digest.kind}"
        if len(boards := digest.study.boards) > 1:
            counted += f"; {len(boards)} boards at once"
        yield _stat(name, show_span(cost.duration_s), f"{energy}{counted}".lstrip("; ") or "on the device's clock")


def _slo(digest: Digest, bound: Constraint) -> Html:
    limit = f"SLO: {'at least' if bound.at_least else 'at most'} {_value(bound.metric, bound.limit)}"
    if digest.best is not None:
        return _held(f"{_title(bound.metric)}, tuned", bound, digest.best.measurement, limit)
    if digest.closest is not None:
        return _held(f"{_title(bound.metric)}, closest trial", bound, digest.closest[1], limit)
    return _stat(_title(bound.metric), "–", limit)


def _held(name: str, bound: Constraint, measurement: Measurement, limit: str) -> Html:
    return _stat(name, _value(bound.metric, measurement.metric(bound.metric)), f"{limit}; {_room(bound, measurement)}")


def _room(bound: Constraint, measurement: Measurement) -> str:
    if bound.excess(measurement):
        return f"broken by {_excess(bound, measurement)}"
    if bound.unit == "c":
        return f"{_value(bound.metric, bound.slack(measurement))} to spare"
    return f"{percent(bound.slack(measurement) / bound.limit)} to spare"


def _worst(digest: Digest) -> str:
    """Return by how much the SLO was broken at worst and in all, to follow how often it was."""
    worst = max(digest.broken, key=digest.study.excess, default=None)
    if worst is None or (limit := digest.study.most_broken(worst)) is None:
        return ""
    together = ""
    # Shares of a limit add up; degrees over one say nothing in sum.
    if all(bound.unit != "c" for bound in digest.study.problem.constraints):
        together = f", together {percent(digest.total_excess)}"
    return f", worst by {_excess(limit, worst)}{together}"


def _excess(bound: Constraint, measurement: Measurement) -> str:
    """Return by how much a limit is broken: its share, or degrees, of which nothing is a share."""
    if bound.unit == "c":
        return bound.show_excess(measurement)
    return percent(bound.excess(measurement))


def _stat(name: str, value: str, note: str) -> Html:
    return tag("div", tag("dt", name), tag("dd", value, class_="value"), tag("dd", note, class_="note"))


# The tables of a report: the knobs to set, every trial, and what the study was.

_STATISTICS = ("mean", "p50", "p95", "p99")
_KNOBS_MOST = 5
"""That have a column each."""


def knob_table(digest: Digest) -> Html:
    """Return the level of every knob at the tuned point and at the default."""
    space = digest.study.problem.space
    if digest.best is not None:
        points = {"tuned": digest.best.point}
    else:
        points = {}
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
    problem = digest.study.problem
    window = digest.study.problem.window
    least = f"at least {window.queries} queries and {show(window.duration_s, 's')}"
    known = {
        "device": digest.study.where,
        "workload": problem.workload,
        "SLO": ", ".join(map(str, problem.constraints)) or "none",
        "energy": digest.kind or "nothing was measured",
        "joules cover": digest.boundary or "not stated",
        **({"read beside": digest.beside} if digest.beside else {}),
        "method": digest.study.method,
        "seed": str(digest.study.seed),
        "window": f"{least}, after {window.warmup} to warm up",
    }
    return rows({**known, **facts})


def rows(lines: Mapping[str, str]) -> Html:
    """Return lines of text, each with its name in front."""
    each = (tag("div", tag("dt", name), tag("dd", text or "–")) for name, text in lines.items())
    return tag("dl", joined(each), class_="about")


class TrialTable:
    """Every trial and preset: where, what was seen, whether the SLO holds, and what went wrong.

    A knob that stands at the same level in every row has no column. Where many differ, they share one.
    """

    def __init__(self, digest: Digest) -> None:
        self._digest = digest
        self._space = digest.study.problem.space
        study = digest.study
        points = [trial.point for trial in study.trials] + [known.point for known in study.references]
        self._boards = bool(study.boards)
        self._fixed = [name for name in self._space.names if len(points) > 1 and _alike(name, points)]
        self._knobs = [name for name in self._space.names if name not in self._fixed]
        self._together = len(self._knobs) > _KNOBS_MOST
        bounded = {bound.metric for bound in study.problem.constraints}
        self._shown = tuple(name for name in _STATISTICS if name in ("mean", "p99") or name in bounded)
        self._hidden = tuple(name for name in _STATISTICS if name not in self._shown)
        self._latency = Scale.of(
            (measurement.metric(name) for measurement in digest.measurements for name in _STATISTICS), "s"
        )
        self._power = Scale.of((measurement.power_w for measurement in digest.measurements), "W")
        self._energy = digest.energy_scale
        self._intervals = any(measurement.intervals or measurement.requests for measurement in digest.measurements)

    @property
    def more(self) -> tuple[str, ...]:
        """The columns that are hidden at first."""
        return (*self._hidden, *(("requests",) if self._intervals else ()))

    @property
    def note(self) -> str:
        """What all rows have in common; empty if nothing."""
        if not self._fixed:
            return ""
        trials = self._digest.study.trials
        presets = self._digest.study.references
        if trials:
            point = trials[0].point
        else:
            point = presets[0].point
        levels = (f"{show_name(name)}={show_number(name, point[name])}" for name in self._fixed)
        return f"The same in every row: {', '.join(levels)}."

    def html(self) -> Html:
        """Return the table."""
        trials = tag("tbody", joined(map(self._trial, self._digest.study.trials)))
        return tag("table", tag("thead", self._head()), trials, *self._presets(), class_="trials")

    def _head(self) -> Html:
        if self._together:
            knobs = [tag("th", "point")]
        else:
            knobs = [_heading(_breakable(titled(name))) for name in self._knobs]
        return tag(
            "tr",
            tag("th", "trial"),
            *((tag("th", "board"),) if self._boards else ()),
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
            [tag("td", name, data_value=str(trial.number)), *self._board(trial.board)],
            trial.point,
            trial.measurement,
            self._outcome(trial),
            named.get(trial.number, ""),
        )

    def _presets(self) -> Iterator[Html]:
        rows = [
            self._row(
                [tag("td", f"preset {known.name}"), *self._board("")],
                known.point,
                known.measurement,
                self._verdict(known.measurement),
                "preset",
            )
            for known in self._digest.study.references
        ]
        if rows:
            yield tag("tbody", joined(rows))

    def _board(self, uri: str) -> Iterator[Html]:
        """Yield which of several boards made a trial, in what tells it from the others; nothing where there is one."""
        if self._boards:
            yield tag("td", self._digest.study.problem.brief(uri), title=uri)

    def _row(
        self, names: Iterable[Html], point: OperatingPoint, measurement: Measurement | None, outcome: str, kind: str
    ) -> Html:
        return tag(
            "tr",
            *names,
            *self._levels(point),
            *self._values(measurement),
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

    def _values(self, measurement: Measurement | None) -> Iterator[Html]:
        metrics: dict[str, float | None] = dict.fromkeys((*self._shown, *self._hidden))
        power_w = None
        energy_j = None
        requests = None
        if measurement is not None:
            metrics = {statistic: measurement.metric(statistic) for statistic in metrics}
            power_w = measurement.power_w
            energy_j = measurement.energy_j
            requests = measurement.requests
        for statistic in self._shown:
            yield _number(self._latency.number(metrics[statistic]))
        if self._intervals:
            yield _number(self._ends(measurement))
        for statistic in self._hidden:
            yield _number(self._latency.number(metrics[statistic]), more=True)
        yield _number(self._power.number(power_w))
        yield _number(self._energy.number(energy_j))
        if self._intervals:
            yield _number(_half(measurement))
            yield _number("–" if requests is None else f"{requests:,}", more=True)

    def _ends(self, measurement: Measurement | None) -> str:
        """Return between what the p99 is; an upper end that is not known is an ellipsis."""
        if measurement is None or (interval := measurement.intervals.get("p99")) is None:
            return "–"
        high = "…"
        if interval.known:
            high = self._latency.number(interval.high)
        return f"{self._latency.number(interval.low)} – {high}"

    def _outcome(self, trial: Trial) -> str:
        """Return whether the SLO holds at a trial, or why nobody knows."""
        if trial.failure is not None:
            return f"failed: {trial.failure}"
        if trial.measurement is None:
            return str(trial.state)
        early = ""
        if trial.measurement.censored:
            early = ", stopped early"
        return f"{self._verdict(trial.measurement)}{early}"

    def _verdict(self, measurement: Measurement) -> str:
        verdict = self._digest.verdict(measurement)
        if verdict is None or not self._digest.study.problem.constraints:
            return "–"
        if verdict:
            return "holds"
        limit = self._digest.study.most_broken(measurement)
        if limit is None:
            return f"over by {percent(0.0)}"
        return f"{limit.beyond} by {_excess(limit, measurement)}"


def _alike(name: str, points: Sequence[OperatingPoint]) -> bool:
    """Return whether a knob is at the same level at all points; one that a point leaves open is not."""
    return all(name in point for point in points) and len({point[name] for point in points}) == 1


def _level(name: str, point: OperatingPoint, default: OperatingPoint) -> Html:
    moved = point[name] != default[name]
    return tag("td", show_number(name, point[name]), class_="number" + " moved" * moved)


def _half(measurement: Measurement | None) -> str:
    """Return half the interval of energy as a share of it; unknown gives ``–``."""
    if measurement is None or (interval := measurement.intervals.get("energy")) is None:
        return "–"
    return f"{100 * interval.half / measurement.energy_j:.2g} %"


def _number(text: str, *, more: bool = False) -> Html:
    return tag("td", text, class_="number" + " more" * more)


def _breakable(name: str) -> Html:
    """Return a name that may go on in the next line after an underscore."""
    return joined(name.split("_"), Html("_<wbr>"))


def _heading(text: str, *, more: bool = False) -> Html:
    return tag("th", text, class_="number" + " more" * more)
