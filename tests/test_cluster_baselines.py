"""CM-DARE's own models, as published."""

import sys

import pytest

from polythrottle.cluster.machine import Network
from polythrottle.cluster.predict.baselines import NAMES, baseline
from polythrottle.cluster.tables import StepRow
from polythrottle.errors import InvalidInput

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
