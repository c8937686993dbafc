"""CM-DARE's own models, as published."""

import sys

import pytest

from polythrottle.cluster.predict.accuracy import MOST, NAMES, baseline
from polythrottle.cluster.recorded_tables import StepRow
from polythrottle.domain.errors import InvalidInput
from polythrottle.domain.fleet.transient_machine import Network

ROWS = [StepRow("A", Network(f"n{i}", i * 1e9, 50, 0), 0.1 + 0.05 * i) for i in range(1, 9)]


@pytest.mark.parametrize("name", NAMES)
def test_a_line_is_learned_by_all(name: str) -> None:
    """On a straight table each comes near to a network in the middle."""
    fitted = baseline(name)([row for row in ROWS if row.network.name != "n4"])
    assert fitted(ROWS[3].network) == pytest.approx(0.3, rel=0.1)


@pytest.mark.parametrize("name", NAMES)
def test_one_network_is_enough_to_say_something(name: str) -> None:
    """A table of one row gives a number, not an error."""
    assert baseline(name)(ROWS[:1])(ROWS[0].network) == pytest.approx(ROWS[0].step_s, rel=0.2)


def test_what_is_missing_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without scikit-learn the message says what to install; the line needs none."""
    monkeypatch.setitem(sys.modules, "sklearn", None)
    monkeypatch.setitem(sys.modules, "sklearn.svm", None)
    with pytest.raises(InvalidInput, match=r"install polythrottle\[cluster\]"):
        baseline("svr-rbf")
    assert baseline("linear-flops")(ROWS)(ROWS[0].network) > 0


@pytest.mark.parametrize("name", NAMES)
def test_of_many_rows_some_are_enough(name: str) -> None:
    """A table of three times the rows that support vectors take gives nearly what a few of its rows give."""
    many = [StepRow("A", Network(f"n{i}", (1 + i / 100) * 1e9, 50, 0), 0.15 + 0.0005 * i) for i in range(3 * MOST)]
    few, all_of_them = baseline(name)(many[::6]), baseline(name)(many)
    assert all_of_them(many[301].network) == pytest.approx(few(many[301].network), rel=0.05)
    assert all_of_them(many[301].network) == pytest.approx(many[301].step_s, rel=0.05)
