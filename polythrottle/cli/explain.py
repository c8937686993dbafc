"""What ``polythrottle explain`` shows people, in 80 columns."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from rich.console import Console
from rich.table import Table
from rich.text import Text

from polythrottle.cli.documents import energy_kind
from polythrottle.cli.texts import named_lines, show_point
from polythrottle.cli.unpadded import Unpadded
from polythrottle.explanation import Effect, End, Explanation, Limit, Price, Share
from polythrottle.explanation.evidence import EDP, ENERGY, goal
from polythrottle.explanation.prices import step
from polythrottle.measurement import METRICS, EnergyKind
from polythrottle.space import OperatingPoint
from polythrottle.study import Study
from polythrottle.units import show, show_excess, show_level, show_name

_UNITS = {"s": "s", "w": "W", "c": "°C", "per_s": "/s", "per_j": "/J"}
_AT_ONCE, _FAR, _MANY = 2, 20, 10
_UNTRIED = 0.005
_NAMES = {ENERGY: "energy per item", EDP: "energy x delay"}


def print_explanation(found: Explanation) -> None:
    """Print an explanation in at most 80 columns."""
    console, problem = Console(highlight=False, markup=False), found.study.problem
    console.print(Text.assemble("\n", (problem.device, "bold"), "  ", problem.workload), soft_wrap=True)
    if found.nothing is not None:
        console.print(found.nothing)
        return
    _section(console, None, _chosen(found))
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
    study, at = found.study, found.at
    assert at is not None
    made = f"trial {at.number} of {len(study.trials)}"
    if not found.feasible:
        yield "closest", f"{made} comes closest: no trial holds every limit"
        yield "point", show_point(at.point)
        yield from _hoped(found)
        return
    yield "tuned", made
    yield "point", show_point(at.point)
    saving, predicted = study.saving_fraction, found.saving_fraction
    if saving is None:
        yield "saving", "unknown: the default point was not measured"
    elif predicted is None:
        yield "saving", "none: the default point is the best that was tried"
    else:
        yield (
            "saving",
            f"{saving:.1%} of the {_words(study)} ({energy_kind(study)}); as the models see it {predicted:.1%}",
        )


def _hoped(found: Explanation) -> Iterator[tuple[str, str]]:
    if found.hope is None or found.hope.measured:
        return
    excess = f"still {found.hope.excess:.0%} over" if found.hope.excess > 0 else "likelier than not within the limits"
    yield "hope", f"{show_point(found.hope.point)}: {excess} (predicted)"


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
    left = "left" if limit.slack >= 0 else "over"
    text = f"{show(limit.value, unit)}, limit {show(limit.constraint.limit, unit)}: "
    text += f"{show(abs(limit.slack), unit)} ({show_excess(abs(limit.slack_fraction), 1)}) {left}"
    if 0 < abs(limit.slack) < _FAR * limit.noise:
        text += f", {abs(limit.slack) / limit.noise:.1f} x the noise of a trial"
    if not limit.binds or limit.saving is None or limit.sure is None:
        return text + ("" if limit.saving is None else "; does not bind")
    return f"{text}; binds: without it {_range(limit.sure, limit.saving)} less {words}"


def _range(low: float, high: float) -> str:
    return f"{high:.1%}" if f"{low:.0%}" == f"{high:.0%}" else f"{low:.0%} to {high:.0%}"


def _share(fraction: float) -> str:
    return f"{fraction:.1%}" if fraction < _MANY else "many times"


def _at_end(end: End, words: str) -> str:
    side = "highest" if end.highest else "lowest"
    text = f"{show_level(end.knob, end.level)}, the {side} of {end.levels} levels"
    if end.inward is None:
        return text
    change = f"{_share(abs(end.inward))} {'more' if end.inward >= 0 else 'less'} {words}"
    how = "measured" if end.measured else "predicted"
    return f"{text}: {'binds; ' if end.binds else ''}one level further in {change} ({how})"


def _print_effects(console: Console, found: Explanation) -> None:
    """Print what each knob changed: the objective and the first bounded metric side by side, any others below."""
    goal = "tuned" if found.feasible else "closest"
    for start in range(0, len(found.effects), _AT_ONCE):
        columns = [Column.of(found.study, effect) for effect in found.effects[start : start + _AT_ONCE]]
        console.print(f"\nwhat each knob changed, from default to {goal}", style="bold")
        table = _table(("knob", "from", "to", *(name for column in columns for name in column.headings)), left=1)
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
        changes = (abs(share.change) for share in effect.shares)
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
        return ("share", titled) if self.shared else (titled,)

    def of_knob(self, knob: Share) -> tuple[str, ...]:
        """Return the cells of the knob that another share is of."""
        share = next(share for share in self.effect.shares if share.knob == knob.knob)
        change = f"{self._signed(share.change)} ± {share.change_std / self.factor:.{self.decimals}f}"
        part = "–" if share.fraction is None else f"{round(100 * share.fraction)}%"
        return (part, change) if self.shared else (change,)

    def whole(self, measured: bool) -> tuple[str, ...]:
        """Return the cells of the whole change, as measured or as modelled."""
        effect, change = self.effect, "–"
        if not measured:
            change = self._signed(effect.predicted_after - effect.predicted_before)
        elif effect.before is not None and effect.after is not None:
            change = self._signed(effect.after - effect.before)
        return ("" if measured else "100%", change) if self.shared else (change,)

    def _signed(self, value: float) -> str:
        return f"{value / self.factor:+.{self.decimals}f}"


def _unit(study: Study, metric: str) -> str:
    if metric in (ENERGY, EDP):
        unit = "J" if metric == ENERGY else "J·s"
        return "" if energy_kind(study) is EnergyKind.RELATIVE else unit
    return _UNITS[METRICS[metric]]


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
    table, above = (
        _table(("limit", goal(found.study.problem.objective), "change", "", "point, where it differs"), left=1),
        None,
    )
    for price in ladder:
        table.add_row(*_price_cells(found, price, above))
        above = price.point
    console.print(Unpadded(table))
    console.print(_marginal(found, limit, ladder))


def _price_cells(found: Explanation, price: Price, above: OperatingPoint | None) -> tuple[str, ...]:
    label = "none" if price.constraint is None else _plain(price)
    if price.point is None or price.value is None:
        return label, "–", "", "", "none likelier than not to hold it"
    how = _known_by(price)
    change = "" if price.change is None or price.vague else f"{price.change:+.1%}"
    where = "as above" if price.point == above else _difference(found, price.point)
    return label, "–" if price.vague else _objective(found.study, price.value), change, how, where


def _known_by(price: Price) -> str:
    if price.measured:
        return "measured"
    if price.tried:
        return "stopped early"
    return "hardly known" if price.vague else f"predicted ±{price.std_fraction:.0%}"


def _plain(price: Price) -> str:
    assert price.constraint is not None
    return _three(price.constraint.limit, _UNITS[price.constraint.unit])


def _difference(found: Explanation, other: OperatingPoint) -> str:
    at = found.at.point if found.at is not None else OperatingPoint({})
    moved = {name: level for name, level in other.items() if at.get(name) != level}
    return show_point(moved) if moved else "the same"


def _marginal(found: Explanation, limit: Limit, ladder: Sequence[Price]) -> str:
    """Return what one step more buys, in one sentence."""
    constraint, small = limit.constraint, step(limit.constraint)
    wanted = constraint.limit - small if constraint.at_least else constraint.limit + small
    now = next((one for one in ladder if one.constraint == constraint), None)
    more = next((one for one in ladder if one.constraint and abs(one.constraint.limit - wanted) < 1e-9 * wanted), None)
    unit = _UNITS[constraint.unit]
    words = f"{_three(small, unit)} {'less' if constraint.at_least else 'more'}"
    if now is None or more is None or now.value is None or more.value is None:
        return f"What {words} would buy is not known: no point is likelier than not to hold the limits."
    if now.vague or more.vague:
        return f"What {words} would buy cannot be told: the models hardly know these points; try more of them."
    saved = now.value - more.value
    how = "measured" if more.measured else "stopped early" if more.tried else "predicted"
    amount = f"{_objective(found.study, saved)} ({saved / now.value:.1%}; {how})" if saved > 0 else "nothing"
    text = f"{words} would save {amount}."
    if not now.tried and _left(found, now) >= _UNTRIED:
        text += f" A point not tried yet may save {_left(found, now):.1%} under the limit as it is (predicted)."
    return text


def _left(found: Explanation, now: Price) -> float:
    """Return what share of the chosen point's objective the models promise elsewhere under the same limits."""
    seen = found.at.measurement if found.at is not None and found.feasible else None
    return 0.0 if seen is None or now.value is None else 1.0 - now.value / found.study.problem.objective.of(seen)


def _print_trust(console: Console, found: Explanation) -> None:
    console.print("\nhow far the models can be trusted", style="bold")
    table = _table(("a trial foretold from all others", "typical miss", "rms", "noise of a trial"), left=1)
    for one in found.accuracy:
        table.add_row(one.metric, *(_error(one.metric, value) for value in (one.typical, one.rms, one.noise)))
    console.print(Unpadded(table))
    outside, count = found.outside
    if outside and found.effects:
        console.print(f"{outside} of the {count} mixtures that make the shares are outside the space: modelled only.")


def _error(metric: str, value: float) -> str:
    if metric == "temperature":
        return f"{value:.2g} °C"
    return f"{100 * value:.2g} %" if value < 1 else "over 100 %"


def _table(headings: Sequence[str], left: int) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim")
    for column, name in enumerate(headings):
        aligned = column < left or name.startswith("point")
        table.add_column(name, justify="left" if aligned else "right", overflow="fold")
    return table
