"""How wrong predictions of step time are, and that nothing leaks into them."""

from dataclasses import replace
from math import isnan, nan
from pathlib import Path

import pytest

from polythrottle.cluster.predict import accuracy
from polythrottle.cluster.predict.accuracy import (
    NAMES,
    OURS,
    PredictionRecord,
    baseline,
    covered,
    filled,
    leaking,
    left_out,
    mape,
    unseen,
)
from polythrottle.cluster.recorded_tables import StepRow, step_rows
from polythrottle.domain.errors import BadFile, InvalidInput
from polythrottle.domain.fleet.transient_machine import Network


def table(gpu: str = "A", scale: float = 1.0) -> list[StepRow]:
    """Return steps of eight networks that follow a law."""
    sizes = [(1e9 * 2**i, 40 + 30 * (i * 5 % 8)) for i in range(8)]
    return [
        StepRow(gpu, Network(f"n{i}", flops, tensors, 0), scale * (6e-11 * flops + 9e-4 * tensors), 1e-3, 5)
        for i, (flops, tensors) in enumerate(sizes)
    ]


def test_a_left_out_network_is_not_looked_at() -> None:
    """Its own measurement does not change what is predicted for it, by any model."""
    rows = table()
    spoilt = [replace(rows[0], step_s=50 * rows[0].step_s), *rows[1:]]
    for one, other in zip(left_out(rows), left_out(spoilt), strict=True):
        if one.network == "n0":
            assert one.predicted_s == pytest.approx(other.predicted_s)


def test_a_network_is_left_out_on_every_type() -> None:
    """What it takes on another type does not change what is predicted for it either."""
    rows = [*table("A"), *table("B", 0.4)]
    spoilt = [replace(one, step_s=50 * one.step_s) if one.network.name == "n3" else one for one in rows]
    for one, other in zip(left_out(rows), left_out(spoilt), strict=True):
        if one.network == "n3":
            assert one.predicted_s == pytest.approx(other.predicted_s)


def test_of_a_large_table_parts_are_left_out_in_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each network is predicted once, in the order of the table, and never from itself."""
    monkeypatch.setattr(accuracy, "ALONE", 4)
    monkeypatch.setattr(accuracy, "PARTS", 3)
    rows = [*table("A"), *table("B", 0.4)]
    spoilt = [replace(one, step_s=50 * one.step_s) if one.network.name == "n3" else one for one in rows]
    found = left_out(rows)
    names = [(one.gpu, one.network) for one in found if one.model == OURS]
    assert names == [(row.gpu, row.network.name) for row in rows]
    for one, other in zip(found, left_out(spoilt), strict=True):
        if one.network == "n3":
            assert one.predicted_s == pytest.approx(other.predicted_s)
    counts: list[tuple[int, int]] = []
    left_out(rows, lambda done, total: counts.append((done, total)))
    assert counts == [(1, 3), (2, 3), (3, 3)]


def test_every_model_is_scored_for_every_type() -> None:
    """Ours beside the line and both support-vector regressions; ours is far the best on a lawful table."""
    errors = mape(left_out([*table("A"), *table("B", 0.4)]))
    assert set(errors) == {"A", "B"}
    for models in errors.values():
        assert set(models) == {OURS, *NAMES}
        assert (models[OURS] or 1) < 0.1
        assert min(models[name] or 0 for name in NAMES) > 0.1


def test_a_lone_network_is_unknown_with_a_reason() -> None:
    """With nothing else to learn from there is no prediction, not 0, and the error is unknown."""
    records = left_out(table()[:1])
    assert all(one.predicted_s is None and one.why for one in records)
    assert mape(records) == {"A": dict.fromkeys((OURS, *NAMES))}
    assert covered(records) is None


def test_a_type_that_was_never_measured_is_unknown_with_a_reason() -> None:
    """Its records say so, the others are predicted; if no type is known, that is an error."""
    records = unseen(table("A"), [*table("A")[:1], *table("new")[:1]])
    reasons = {one.gpu: one.why for one in records if one.model == OURS}
    assert reasons["A"] is None
    assert "no other network was measured on new" in str(reasons["new"])
    with pytest.raises(BadFile, match="the table has A only"):
        unseen(table("A"), table("new"))


def test_tensors_are_those_of_the_network_on_another_type() -> None:
    """A hole is filled from the same network elsewhere, never from another one."""
    holes = [replace(one, network=replace(one.network, n_tensors=nan)) for one in table("B")]
    assert [one.network.n_tensors for one in filled(holes, table("A"))] == [one.network.n_tensors for one in table()]
    assert all(isnan(one.network.n_tensors) for one in filled(holes))


def test_the_published_protocol_leaks() -> None:
    """With repeats on both sides every model looks better than on networks left out."""
    rows = table()
    honest, leaked = mape(left_out(rows))["A"], leaking(rows)
    assert leaked is not None
    assert all(leaked["A"][name] < (honest[name] or 0) for name in ("svr-rbf", "svr-poly"))
    assert leaking([replace(rows[0], std_s=None)]) is None


def test_without_scikit_learn_its_models_are_unknown(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ours and the line need none; the others say what to install."""

    def missing(name: str) -> object:
        if name.startswith("svr"):
            raise InvalidInput(f"{name} needs scikit-learn; install polythrottle[cluster]")
        return baseline(name)

    monkeypatch.setattr(accuracy, "baseline", missing)
    records = left_out(table())
    assert all((one.predicted_s is None) == one.model.startswith("svr") for one in records)
    assert "install polythrottle[cluster]" in str(next(one.why for one in records if one.model == "svr-rbf"))
    assert set((leaking(table()) or {})["A"]) == {OURS, "linear-flops"}


def test_errors_are_relative() -> None:
    """Of the measured time; none without a measurement."""
    assert PredictionRecord("A", "n", 2.0, 3.0, OURS).error == pytest.approx(0.5)
    assert PredictionRecord("A", "n", None, 3.0, OURS).error is None


@pytest.mark.slow
def test_networks_never_seen_are_within_the_bars(transient: Path) -> None:
    """On CM-DARE's networks left out in turn: at most 5 % on K80, 7 % on P100, and better than its own models."""
    records = left_out(step_rows(transient / "training_speed_by_network_cmdare.csv"))
    errors = mape(records)
    for gpu, most in (("K80", 0.05), ("P100", 0.07)):
        ours = errors[gpu][OURS]
        assert ours is not None
        assert ours <= most
        assert all(ours < (errors[gpu][name] or 0) for name in NAMES)
    assert 0.8 <= (covered(records) or 0) <= 1
