import math
from dataclasses import replace

import pytest
from builders import Listed, study

from polythrottle.domain.errors import InvalidInput
from polythrottle.domain.measurement import Interval
from polythrottle.domain.study import Cost, Daring, Study, Trial
from polythrottle.domain.units import show_span, span_s
from polythrottle.tuning.stopping import Budget, Outlook, Rule, is_conclusive, with_most_left


def costly(trials: int, *constraints: str, energy_j: float = 1.0) -> Study:
    """Return a study whose trials took a second and ten joules each."""
    made = study(*constraints, energies=(energy_j,) * trials, latencies=(0.01,) * trials)
    return replace(made, trials=tuple(replace(trial, cost=Cost(1.0, 10.0)) for trial in made.trials))


@pytest.mark.parametrize(
    ("budget", "told"),
    [(Budget(), None), (Budget(6), None), (Budget(5), "5 trials made"), (Budget(1), "1 trial made"),
     (Budget(9, 5.0), "5 seconds used"), (Budget(9, 5.1), None), (Budget(9, None, 50.0), "50 J used"),
     (Budget(9, None, 51.0), None)],
)  # fmt: skip
def test_a_budget_is_used_when_it_is_reached(budget: Budget, told: str | None) -> None:
    """Five trials of a second and ten joules each; the budget that is used up first is named."""
    assert budget.used(costly(5)) == told


@pytest.mark.parametrize("bound", [0.0, -1.0, math.inf, math.nan])
def test_a_bound_is_positive_and_finite(bound: float) -> None:
    """Nothing else can be used up."""
    for made in (lambda: Budget(1, bound), lambda: Budget(1, None, bound), lambda: Rule(bound)):
        with pytest.raises(InvalidInput, match="above zero and finite"):
            made()


def test_after_ten_idle_trials_less_is_enough() -> None:
    """What would save 0.2 % is worth a trial, until ten in a row were no better than the best."""
    assert Rule().reason(costly(8), lambda _: 0.002) is None
    assert Rule().reason(costly(12), lambda _: 0.002) is not None


def test_next_to_nothing_is_not_worth_a_risk() -> None:
    """What would save 0.2 % ends a search at once where it is likely to break a limit, and 0.4 % does not."""
    for share, dares, ends in ((0.002, Daring.GAIN, True), (0.002, Daring.NOTHING, False), (0.004, Daring.ALL, False)):
        assert (Rule().reason(costly(8), lambda _, s=share: s, lambda _, d=dares: d) is not None) == ends  # type: ignore[misc]
    assert Rule(early=False).reason(costly(8), lambda _: 0.0, lambda _: Daring.ALL) is None
    assert Rule().reason(costly(5), lambda _: 0.0, lambda _: Daring.GAIN) is None
    assert not Outlook(Listed()).dares(costly(3))


def test_four_trials_are_enough_where_every_other_point_would_break_a_limit() -> None:
    """Two more would be made only to break it; but what would save 0.4 % is tried."""
    for trials, share, ends in ((3, 0.0, False), (4, 0.002, True), (4, 0.004, False), (5, 0.002, True)):
        assert (Rule().reason(costly(trials), lambda _, s=share: s, lambda _: Daring.ALL) is not None) == ends  # type: ignore[misc]


def test_what_is_only_kept_back_by_a_risk_is_not_called_nothing() -> None:
    """A search that ends says so instead, with a horizon or without; one that does not end is not asked."""
    words = "no point left is safe enough"
    assert Rule().reason(costly(8), lambda _: 0.0, held_back=lambda _: words) == words
    assert Rule(1.0).reason(costly(8), lambda _: 0.0, held_back=lambda _: words) == words
    assert Rule().reason(costly(8), lambda _: 0.4, held_back=lambda _: words) is None
    assert not Outlook(Listed()).held_back(costly(3))
    assert not is_conclusive(words)


def test_a_horizon_excludes_going_on_regardless() -> None:
    """Two wishes that contradict each other are refused."""
    with pytest.raises(InvalidInput, match=r"leave --horizon or --no-early-stop out"):
        Rule(1.0, early=False)


@pytest.mark.parametrize(
    ("made", "left_j", "stops"),
    [
        (6, 0.00029, True),
        (6, 0.0, True),
        (5, 0.0, False),
        (6, 0.0003, False),
        (6, math.inf, False),
        (6, math.nan, False),
    ],
)
def test_next_to_nothing_is_less_than_three_parts_in_ten_thousand(made: int, left_j: float, stops: bool) -> None:
    """Of one joule per item, from the sixth trial on; what is unknown stops nothing."""
    assert (Rule().reason(costly(made), lambda _: left_j) is not None) == stops
    assert Rule(early=False).reason(costly(made), lambda _: left_j) is None


@pytest.mark.parametrize(("left_j", "stops"), [(0.0009, True), (0.001, False)])
def test_where_windows_differ_by_chance_a_tenth_of_a_percent_is_next_to_nothing(left_j: float, stops: bool) -> None:
    """Of one joule per item: no window could show less."""
    recorded = costly(6)
    around = {"energy": Interval(0.98, 1.02)}
    trials = [replace(each, measurement=replace(each.measurement, intervals=around)) for each in recorded.completed
              if each.measurement is not None]  # fmt: skip
    assert (Rule().reason(replace(recorded, trials=tuple(trials)), lambda _: left_j) is not None) == stops


def test_next_to_nothing_once_is_not_enough() -> None:
    """The trial before must have looked as hopeless."""
    assert Rule().reason(costly(7), lambda study: 0.0 if len(study.trials) == 7 else 1.0) is None


def test_nothing_ends_while_nothing_is_feasible() -> None:
    """A search that has no answer yet goes on, unless none can be had, and so does one that cannot judge."""
    assert Rule().reason(costly(8, "mean<=9ms"), lambda _: 0.0) is None
    assert Rule(early=False).reason(costly(8, "mean<=1ms"), lambda _: 0.0) is None
    assert Rule().reason(replace(costly(8, "mean<=2x"), trials=()), lambda _: 0.0) is None


def test_a_horizon_weighs_saving_against_cost() -> None:
    """At 100 items a second, 1 mJ saved an item repays 10 J in 100 s, and not a moment sooner."""
    for horizon_s, stops in ((101.0, False), (99.0, True)):
        assert (Rule(horizon_s).reason(costly(2), lambda _: 0.001) is not None) == stops
    unknown = replace(costly(2), trials=study(energies=(1.0,), latencies=(0.01,)).trials)
    assert Rule(99.0).reason(unknown, lambda _: 0.001) is None
    assert "within 1.5 minutes one more trial would save 90 % of its cost" in (
        Rule(90.0).reason(costly(2), lambda _: 0.001) or ""
    )


def test_a_method_that_foresees_nothing_is_not_asked() -> None:
    """What is left is unknown then."""
    assert Outlook(Listed()).saving_left(costly(3)) == math.inf


def test_spans_are_written_with_their_unit() -> None:
    """Seconds to weeks; m is for minutes."""
    spans = {"30d": 2_592_000.0, "12h": 43_200.0, "90m": 5400.0, "2w": 1_209_600.0, " 1.5 h ": 5400.0, "10 s": 10.0}
    assert {text: span_s(text) for text in spans} == spans
    assert [show_span(value) for value in (2_592_000, 5400, 60, 0.5)] == [
        "30 days",
        "1.5 hours",
        "1 minute",
        "0.5 seconds",
    ]
    for text in ("30", "d", "-1d", "0d", "1y", "1e9d", "", "9" * 500 + "d", "inf d"):
        with pytest.raises(InvalidInput, match="30d, 12h, 90m or 2w"):
            span_s(text)


@pytest.mark.parametrize(
    ("share", "trials", "ending"),
    [
        (0.0, 4, "30 J used; at most 1 % is left to save, likely less"),
        (0.0301, 11, "30 J used; at most 4 % is left to save, likely less"),
        (math.nan, 11, "30 J used"),
        (0.3, 3, "30 J used"),
        (0.3, 12, "30 J used"),
    ],
)
def test_what_is_left_at_most_is_said_rounded_up(share: float, trials: int, ending: str) -> None:
    """Where the method knows, a few trials were made, and something is left to try; a grid does not know."""

    class Surveying(Listed):
        def most_left(self, study: Study, answer: Trial) -> float:
            return share

    whole = costly(trials)
    assert with_most_left("30 J used", Surveying(), whole, whole.best) == ending
    assert with_most_left("30 J used", Surveying(), whole, None) == "30 J used"
    assert with_most_left("30 J used", Listed(), whole, whole.best) == "30 J used"
