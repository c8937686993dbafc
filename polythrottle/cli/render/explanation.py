"""What ``polythrottle explain`` shows: people 80 columns, programs one document in SI units."""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from polythrottle.api.tuning_result import energy_kind, show_point
from polythrottle.cli.output import formatted, grid, optional
from polythrottle.cli.render.console import Unpadded, plain_console
from polythrottle.cli.render.documents import trial_document
from polythrottle.cli.render.text import named_lines
from polythrottle.domain.measurement import EnergyKind
from polythrottle.domain.metrics import unit_of
from polythrottle.domain.problem import Constraint
from polythrottle.domain.space import OperatingPoint
from polythrottle.domain.study import Study
from polythrottle.domain.units import show, show_excess, show_level, show_name
from polythrottle.optimize.explain import Effect, End, Explanation, Limit, Price, Share
from polythrottle.optimize.explain.explanation import step
from polythrottle.optimize.explain.modelled_study import EDP, ENERGY, goal, shown

_SIDES = {True: "highest", False: "lowest"}

# What ``polythrottle explain`` tells programs: one document in SI units.


def explain_document(found: Explanation) -> dict[str, Any]:
    """Return the JSON document of ``explain``."""
    study = found.study
    kind = energy_kind(found.study)
    answer: dict[str, Any] = {"best": None, "closest": None}
    if found.at is not None:
        answer["best" if found.feasible else "closest"] = _trial(found)
    return {
        "device": study.problem.device,
        "workload": study.problem.workload,
        "trials": len(study.trials),
        "completed": len(study.completed),
        "objective": {"name": str(study.problem.objective), "unit": study.problem.objective.unit},
        "nothing": found.nothing,
        **answer,
        "saving_fraction": study.saving_fraction if found.at else None,
        "predicted_saving_fraction": found.saving_fraction if found.feasible else None,
        "limits": [_limit(limit) for limit in found.limits],
        "ends": [_end(end) for end in found.ends],
        "effects": {effect.metric: _effect(effect) for effect in found.effects},
        "mixtures": {"evaluated": found.outside[1], "outside_space": found.outside[0]},
        "prices": [
            {"constraint": str(limit.constraint), "step": step(limit.constraint), "limits": [*map(_price, ladder)]}
            for limit, ladder in zip(found.limits, found.prices, strict=True)
        ],
        "accuracy": {
            one.metric: {"typical": one.typical, "rms": one.rms, "noise": one.noise} for one in found.accuracy
        },
        "hope": optional(_hope, found.hope),
        "energy_kind": optional(str, kind),
        "simulated": kind is EnergyKind.SIMULATED,
    }


def _trial(found: Explanation) -> dict[str, Any]:
    document = trial_document(found.study, found.at) or {}
    return {name: document[name] for name in ("number", "device", "point", "energy_j") if name in document}


def _hope(hope: Any) -> dict[str, Any]:
    return {"point": dict(hope.point), "excess": hope.excess, "measured": hope.measured}


def _limit(limit: Limit) -> dict[str, Any]:
    return {
        "constraint": str(limit.constraint),
        "metric": limit.constraint.metric,
        "limit": limit.constraint.limit,
        "value": limit.value,
        "slack": limit.slack,
        "slack_fraction": limit.slack_fraction,
        "noise": limit.noise,
        "binds": limit.binds,
        "saving_without": limit.saving,
        "sure_saving_without": limit.sure,
    }


def _end(end: End) -> dict[str, Any]:
    return {
        "knob": end.knob,
        "level": end.level,
        "end": _SIDES[end.highest],
        "levels": end.levels,
        "inward": end.inward,
        "inward_measured": end.measured,
    }


def _effect(effect: Effect) -> dict[str, Any]:
    return {
        "before": effect.before,
        "after": effect.after,
        "predicted_before": effect.predicted_before,
        "predicted_after": effect.predicted_after,
        "shares": [
            {
                "knob": share.knob,
                "before": share.before,
                "after": share.after,
                "change": share.change,
                "change_std": share.change_std,
                "fraction": share.fraction,
            }
            for share in effect.shares
        ],
    }


def _price(price: Price) -> dict[str, Any]:
    return {
        "limit": optional(attrgetter("limit"), price.constraint),
        "point": optional(dict, price.point),
        "value": price.value,
        "std_fraction": price.std_fraction,
        "measured": price.measured,
        "tried": price.tried,
        "vague": price.vague,
        "change": price.change,
    }


# What ``polythrottle explain`` shows people, in 80 columns.

_UNITS = {"s": "s", "w": "W", "c": "°C", "per_s": "/s", "per_j": "/J"}
_AT_ONCE = 2
_ROOM = 0.1
"""The share of a limit that can be left where it plainly binds; with more of it left, that takes a reason."""
_FAR = 20
_MANY = 10
_UNTRIED = 0.005
_NAMES = {ENERGY: "energy per item", EDP: "energy x delay"}


def print_explanation(found: Explanation) -> None:
    """Print an explanation in at most 80 columns."""
    console = plain_console()
    problem = found.study.problem
    console.print(Text.assemble("\n", (found.study.where, "bold"), "  ", problem.workload), soft_wrap=True)
    if found.nothing is not None:
        console.print(Unpadded(Text(found.nothing)))
        return
    _section(console, None, (*_chosen(found), *_frame(found.study)))
    _section(console, "what holds it there", _holding(found))
    _print_effects(console, found)
    for limit, ladder in zip(found.limits, found.prices, strict=True):
        _print_prices(console, found, limit, ladder)
    _print_trust(console, found)


def _section(
    console: Console, title: str | None, lines: "Sequence[tuple[str, str]] | Iterator[tuple[str, str]]"
) -> None:
    if title is not None:
        console.print(f"\n{title}", style="bold")
    console.print(named_lines(lines))


def _chosen(found: Explanation) -> Iterator[tuple[str, str]]:
    study = found.study
    at = found.at
    assert at is not None
    made = f"trial {at.number} of {len(study.trials)}"
    if not found.feasible:
        yield "closest", f"{made} comes closest: no trial holds every limit"
        yield "point", show_point(at.point)
        yield from _hoped(found)
        return
    yield "tuned", made
    yield "point", show_point(at.point)
    saving = study.saving_fraction
    predicted = found.saving_fraction
    if saving is None:
        yield "saving", "unknown: the default point was not measured"
    elif predicted is None:
        yield "saving", "none: the default point is the best that was tried"
    else:
        yield (
            "saving",
            f"{saving:.1%} of the {_words(study)} ({energy_kind(study)}); as the models see it {predicted:.1%}",
        )


def _frame(study: Study) -> Iterator[tuple[str, str]]:
    if len(study.boards) > 1:
        yield "figures", "as the slowest board would have them, with the energy of the mean one"


def _hoped(found: Explanation) -> Iterator[tuple[str, str]]:
    if found.hope is None or found.hope.measured:
        return
    if found.hope.excess > 0:
        excess = f"still {_missed([limit.constraint for limit in found.limits], found.hope.excess)}"
    else:
        excess = "likelier than not within the limits"
    yield "hope", f"{show_point(found.hope.point)}: {excess} (predicted)"


def _missed(constraints: Sequence[Constraint], excess: float) -> str:
    """Return by how much a point is expected to miss the worst of its limits, and on which side.

    Args:
        constraints: All limits; which of them is the worst is not known.
        excess: By what fraction, as the models have it.
    """
    sides = {(constraint.beyond, constraint.unit == "c") for constraint in constraints}
    if len(sides) > 1:
        return "beyond a limit"
    ((beyond, degrees),) = sides
    if degrees:
        # The models know a temperature on a scale of its own, not as a logarithm.
        return f"{show(float(shown('temperature', math.log1p(excess))), '°C')} {beyond}"
    if beyond == "short":
        # Of what is there, by how much the limit is more: as a share of the limit it is less.
        excess = excess / (1.0 + excess)
    return f"{show_excess(excess, 1)} {beyond}"


def _holding(found: Explanation) -> Iterator[tuple[str, str]]:
    for limit in found.limits:
        yield limit.constraint.metric, _standing(limit, _words(found.study))
    for end in found.ends:
        yield show_name(end.knob), _at_end(end, _words(found.study))
    binding = [*(limit.binds for limit in found.limits), *(end.binds for end in found.ends)]
    if found.feasible and not any(binding):
        yield "", f"Nothing binds: neither a limit nor the end of a range holds the {_words(found.study)} up."


def _standing(limit: Limit, words: str) -> str:
    unit = _UNITS[limit.constraint.unit]
    left = "left" if limit.slack >= 0 else limit.constraint.beyond
    text = f"{show(limit.value, unit)}, limit {show(limit.constraint.limit, unit)}: "
    share = f" ({show_excess(abs(limit.slack_fraction), 1)})"
    # Of degrees Celsius nothing is a share.
    text += f"{show(abs(limit.slack), unit)}{share * (limit.constraint.unit != 'c')} {left}"
    if 0 < abs(limit.slack) < _FAR * limit.noise:
        text += f", {abs(limit.slack) / limit.noise:.1f} x the noise of a trial"
    if not limit.binds or limit.saving is None or limit.sure is None:
        return text + ("; does not bind" if limit.saving is not None else "")
    # A space has gaps: the best point within a limit can be far from it, and better ones far beyond.
    binds = "binds"
    if limit.slack_fraction > _ROOM:
        binds = "binds all the same, for better points lie beyond it"
    return f"{text}; {binds}: without it {_range(limit.sure, limit.saving)} less {words}"


def _range(low: float, high: float) -> str:
    if f"{low:.0%}" == f"{high:.0%}":
        return f"{high:.1%}"
    return f"{low:.0%} to {high:.0%}"


def _share(fraction: float) -> str:
    if fraction < _MANY:
        return f"{fraction:.1%}"
    return "many times"


def _at_end(end: End, words: str) -> str:
    text = f"{show_level(end.knob, end.level)}, the {_SIDES[end.highest]} of {end.levels} levels"
    if end.inward is None:
        return text
    change = f"{_share(abs(end.inward))} {'more' if end.inward >= 0 else 'less'} {words}"
    how = "measured" if end.measured else "predicted"
    return f"{text}: {'binds; ' * end.binds}one level further in {change} ({how})"


def _print_effects(console: Console, found: Explanation) -> None:
    """Print what each knob changed: the objective and the first bounded metric side by side, any others below."""
    goal = "tuned" if found.feasible else "closest"
    for start in range(0, len(found.effects), _AT_ONCE):
        columns = [Column.of(found.study, effect) for effect in found.effects[start : start + _AT_ONCE]]
        console.print(f"\nwhat each knob changed, from default to {goal}", style="bold")
        table = _table("knob", "from", "to", *(name for column in columns for name in column.headings))
        for share in columns[0].effect.shares:
            levels = (show_level(share.knob, share.before), show_level(share.knob, share.after))
            table.add_row(
                show_name(share.knob), *levels, *(cell for column in columns for cell in column.of_knob(share))
            )
        for name, measured in (("as modelled", False), ("as measured", True)):
            cells = [cell for column in columns for cell in column.whole(measured)]
            table.add_row(name, "", "", *cells, style="dim")
        console.print(Unpadded(table))


@dataclass(frozen=True)
class Column:
    """One metric's column: its unit and digits, the same for all of its cells; the objective has its shares beside it.

    Args:
        effect: What is shown.
        unit: With prefix; empty for energies of which only ratios mean something.
        factor: What one of that unit is in SI.
        decimals: Digits after the point.
        shared: Whether the shares are shown beside it.
    """

    effect: Effect
    unit: str
    factor: float
    decimals: int
    shared: bool

    @classmethod
    def of(cls, study: Study, effect: Effect) -> "Column":
        """Return the column of an effect, with three digits in its greatest change."""
        # One unit for a column: cells with units of their own cannot be compared at a glance.
        changes = (abs(share.change) for share in effect.shares)
        # Never zero, whose logarithm is asked for below.
        greatest = max(*changes, abs(effect.predicted_after - effect.predicted_before), 1e-12)
        number, _, unit = show(greatest, _unit(study, effect.metric)).partition(" ")
        digits = 2 - math.floor(math.log10(float(number)))
        return cls(
            effect,
            unit,
            greatest / float(number),
            min(max(digits, 0), 6),
            effect.metric == goal(study.problem.objective),
        )

    @property
    def headings(self) -> tuple[str, ...]:
        """The names of its columns."""
        name = _NAMES.get(self.effect.metric, self.effect.metric)
        titled = f"{name} ({self.unit})" if self.unit else name
        if self.shared:
            return ("share", titled)
        return (titled,)

    def of_knob(self, knob: Share) -> tuple[str, ...]:
        """Return the cells of the knob that another share is of."""
        share = next(share for share in self.effect.shares if share.knob == knob.knob)
        change = f"{self._signed(share.change)} ± {share.change_std / self.factor:.{self.decimals}f}"
        part = formatted(optional(lambda fraction: round(100 * fraction), share.fraction), "{}%", "–")
        if self.shared:
            return (part, change)
        return (change,)

    def whole(self, measured: bool) -> tuple[str, ...]:
        """Return the cells of the whole change, as measured or as modelled."""
        effect = self.effect
        change = "–"
        if not measured:
            change = self._signed(effect.predicted_after - effect.predicted_before)
        elif effect.before is not None and effect.after is not None:
            change = self._signed(effect.after - effect.before)
        if self.shared:
            return ("" if measured else "100%", change)
        return (change,)

    def _signed(self, value: float) -> str:
        return f"{value / self.factor:+.{self.decimals}f}"


def _unit(study: Study, metric: str) -> str:
    if metric in (ENERGY, EDP):
        unit = "J" if metric == ENERGY else "J·s"
        if energy_kind(study) is EnergyKind.RELATIVE:
            return ""
        return unit
    return _UNITS[unit_of(metric)]


def _objective(study: Study, value: float) -> str:
    return _three(value, _unit(study, goal(study.problem.objective)))


def _words(study: Study) -> str:
    return study.problem.objective.words


def _three(value: float, unit: str) -> str:
    """Return a value to three digits with the prefix that keeps it readable."""
    return show(float(f"{value:.3g}"), unit).strip()


def _print_prices(console: Console, found: Explanation, limit: Limit, ladder: Sequence[Price]) -> None:
    """Print what other limits would buy; in one line if nothing."""
    console.print(f"\nwhat another limit than {limit.constraint} would buy", style="bold")
    if all(price.point is None for price in ladder):
        console.print("Nothing: no point is likelier than not to hold the other limits.")
        return
    if len({price.point for price in ladder}) == 1:
        console.print("Nothing: the best point stays the same, even without a limit.")
        return
    table = _table("limit", goal(found.study.problem.objective), "change", "", "point, where it differs")
    table.columns[-1].justify = "left"
    above = None
    for price, after in zip(ladder, [*ladder[1:], None], strict=True):
        # Of limits with one answer the first and the last are shown, and the limit as it is.
        same = after is not None and above == price.point == after.point and price.constraint != limit.constraint
        if not same:
            table.add_row(*_price_cells(found, price, above))
        above = price.point
    console.print(Unpadded(table))
    console.print(_marginal(found, limit, ladder))


def _price_cells(found: Explanation, price: Price, above: OperatingPoint | None) -> tuple[str, ...]:
    label = _plain(price)
    if price.point is None or price.value is None:
        return label, "–", "", "", "none likelier than not to hold it"
    how = _known_by(price)
    where = _difference(found, price.point)
    if price.point == above:
        where = "as above"
    if price.vague:
        return label, "–", "", how, where
    return label, _objective(found.study, price.value), formatted(price.change, "{:+.1%}"), how, where


def _known_by(price: Price) -> str:
    if price.measured:
        return "measured"
    if price.tried:
        return "stopped early"
    if price.vague:
        return "hardly known"
    return f"predicted ±{price.std_fraction:.0%}"


def _plain(price: Price) -> str:
    if price.constraint is None:
        return "none"
    return _three(price.constraint.limit, _UNITS[price.constraint.unit])


def _difference(found: Explanation, other: OperatingPoint) -> str:
    at: Mapping[str, object] = {}
    if found.at is not None:
        at = found.at.point
    moved = {name: level for name, level in other.items() if at.get(name) != level}
    if moved:
        return show_point(moved)
    return "the same"


def _marginal(found: Explanation, limit: Limit, ladder: Sequence[Price]) -> str:
    """Return what one step more buys, in one sentence."""
    constraint = limit.constraint
    small = step(limit.constraint)
    direction, sign = {True: ("less", -1), False: ("more", 1)}[constraint.at_least]
    wanted = constraint.limit + sign * small
    now = next((one for one in ladder if one.constraint == constraint), None)
    # Computed in another way than the limits of the ladder, so equal but for rounding.
    more = next((one for one in ladder if one.constraint and abs(one.constraint.limit - wanted) < 1e-9 * wanted), None)
    unit = _UNITS[constraint.unit]
    words = f"{_three(small, unit)} {direction}"
    if now is None or more is None or now.value is None or more.value is None:
        return f"What {words} would buy is not known: no point is likelier than not to hold the limits."
    if now.vague or more.vague:
        return f"What {words} would buy cannot be told: the models hardly know these points; try more of them."
    saved = now.value - more.value
    how = "predicted"
    if more.tried:
        how = "stopped early"
    if more.measured:
        how = "measured"
    if saved > 0:
        amount = f"{_objective(found.study, saved)} ({saved / now.value:.1%}; {how})"
    else:
        amount = "nothing"
    text = f"{words} would save {amount}."
    if not now.tried and _left(found, now) >= _UNTRIED:
        text += f" A point not tried yet may save {_left(found, now):.1%} under the limit as it is (predicted)."
    return text


def _left(found: Explanation, now: Price) -> float:
    """Return what share of the chosen point's objective the models promise elsewhere under the same limits."""
    if found.at is None or found.at.measurement is None or not found.feasible or now.value is None:
        return 0.0
    return 1.0 - now.value / found.study.problem.objective.of(found.at.measurement)


def _print_trust(console: Console, found: Explanation) -> None:
    console.print("\nhow far the models can be trusted", style="bold")
    table = _table("a trial foretold from all others", "typical miss", "rms", "noise of a trial")
    for one in found.accuracy:
        table.add_row(one.metric, *(_error(one.metric, value) for value in (one.typical, one.rms, one.noise)))
    console.print(Unpadded(table))
    outside, count = found.outside
    if outside and found.effects:
        console.print(f"{outside} of the {count} mixtures that make the shares are outside the space: modelled only.")


def _error(metric: str, value: float) -> str:
    if metric == "temperature":
        return f"{value:.2g} °C"
    if value < 1:
        return f"{100 * value:.2g} %"
    return "over 100 %"


def _table(*headings: str) -> Table:
    return grid("", headings, 1, after=2, folded=range(len(headings)))
