"""How long a step takes: laws with few coefficients, from few networks."""

from math import nan

import numpy as np
import pytest

from polythrottle.cluster.predict.step_and_checkpoint_times import fit_steps
from polythrottle.cluster.recorded_tables import StepRow
from polythrottle.domain.errors import InvalidInput
from polythrottle.domain.fleet.transient_machine import Network


def row(name: str, flops: float, tensors: float, step_s: float, complete: bool = True) -> StepRow:
    """Return a measured step."""
    return StepRow("GPU", Network(name, flops, tensors, 1e6), step_s, complete=complete)


def lawful(count: int, constant_s: float = 0.0, noise: float = 0.0, seed: int = 1) -> list[StepRow]:
    """Return steps that follow a + b × operations + c × tensors, with noise."""
    rng = np.random.default_rng(seed)
    networks = [(10 ** rng.uniform(8.5, 10.3), rng.uniform(40, 330)) for _ in range(count)]
    return [
        row(f"net{i}", flops, tensors, (constant_s + 6e-11 * flops + 9e-4 * tensors) * np.exp(rng.normal(0, noise)))
        for i, (flops, tensors) in enumerate(networks)
    ]


@pytest.mark.parametrize(("count", "constant_s", "most"), [(15, 0.0, 0.03), (15, 0.05, 0.06), (6, 0.0, 0.1)])
def test_a_lawful_table_is_learned(count: int, constant_s: float, most: float) -> None:
    """Networks never seen are predicted well, with or without a constant, from many or few."""
    rows = lawful(count + 10, constant_s, 0.01)
    model = fit_steps(rows[:count])
    errors = [abs(model.predict(one.network).seconds / one.step_s - 1) for one in rows[count:]]
    assert np.mean(errors) < most


@pytest.mark.parametrize("count", [1, 2, 3, 4])
def test_few_networks_still_give_a_positive_time(count: int) -> None:
    """Whatever little is known, the prediction is positive, its interval around it."""
    predicted = fit_steps(lawful(count)).predict(Network("new", 5e9, 120, 1e6))
    low, high = predicted.interval_s()
    assert 0 < low <= predicted.seconds <= high


def test_predictions_never_turn_negative() -> None:
    """A network far smaller than any seen takes a little time, never less than none."""
    rows = [row("a", 1e9, 50, 0.9), row("b", 2e9, 300, 1.0), row("c", 2e10, 60, 1.1), row("d", 3e10, 200, 0.8)]
    assert fit_steps(rows).predict(Network("tiny", 1e5, 1, 10)).seconds > 0


def test_a_network_whose_tensors_are_unknown_is_predicted_from_operations() -> None:
    """It can be, more loosely."""
    rows = lawful(10)
    model = fit_steps(rows)
    without = model.predict(Network("new", 5e9, nan, 1e6))
    assert without.spread > model.predict(Network("new", 5e9, 100, 1e6)).spread
    assert 0.1 < without.seconds / 0.4 < 10
    blind = [StepRow("GPU", Network(one.network.name, one.network.flops, nan, 0), one.step_s) for one in rows]
    assert fit_steps(blind).predict(rows[0].network).seconds > 0


def test_another_campaign_is_a_factor_apart() -> None:
    """Rows with holes that are all a fifth faster are seen as that, and do not bend the law for the others."""
    rows = lawful(14, noise=0.01)
    apart = [row(one.network.name, one.network.flops, one.network.n_tensors, 0.8 * one.step_s, False) for one in rows]
    model = fit_steps([*rows[:8], *apart[8:12]])
    assert model.campaign == pytest.approx(0.85, abs=0.06)
    assert model.predict(rows[13].network).seconds == pytest.approx(rows[13].step_s, rel=0.06)
    assert model.predict(rows[13].network, apart=True).seconds < 0.95 * rows[13].step_s


def test_intervals_hold_what_they_promise() -> None:
    """Of many new networks about nine in ten lie in their interval."""
    inside = []
    for seed in range(12):
        rows = lawful(22, noise=0.05, seed=seed)
        model = fit_steps(rows[:12])
        bounds = [model.predict(one.network).interval_s() for one in rows[12:]]
        inside += [low <= one.step_s <= high for one, (low, high) in zip(rows[12:], bounds, strict=True)]
    assert 0.8 <= np.mean(inside) <= 1.0


def test_a_model_is_of_one_type() -> None:
    """No rows, or rows of two types, make no model."""
    with pytest.raises(InvalidInput):
        fit_steps([])
    with pytest.raises(InvalidInput):
        fit_steps([*lawful(2), StepRow("other", Network("x", 1e9, 10, 0), 1.0)])


def test_a_constant_has_to_earn_its_place() -> None:
    """Where no step takes one, laws with a constant weigh little; where every step does, they weigh most."""

    def weight(rows: list[StepRow]) -> float:
        return sum(weight for law, weight in fit_steps(rows).laws if law.shape.constant)

    assert np.mean([weight(lawful(10, 0.0, 0.08, seed)) for seed in range(5)]) < 0.2
    assert weight(lawful(14, 0.2, 0.005)) > 0.9


def test_far_from_what_was_measured_the_interval_is_wider() -> None:
    """A hundred times as large as any network, or as small, it is several times as wide as among them."""
    model = fit_steps(lawful(14, noise=0.03))

    def width(flops: float, tensors: float) -> float:
        low, high = model.predict(Network("new", flops, tensors, 0)).interval_s()
        return high / low

    inside = width(3e9, 150)
    far = [width(3e9 * 10**power, 150) for power in (1.0, 1.5, 2.0, 3.0)]
    assert inside < 1.3 < far[1]
    assert far == sorted(far)
    assert far[-1] > 3 * inside
    assert width(1e6, 150) > 3 * inside
    assert width(3e9, 5000) > 1.5 * inside
    assert fit_steps(lawful(14, noise=0.03)).predict(Network("new", 1e13, nan, 0)).spread > 0.5


def test_a_type_with_few_networks_learns_the_shape_from_the_others() -> None:
    """With operations^0.85 on two types, four networks of one and the shape learned on the other predict better."""

    def table(gpu: str, scale: float, seed: int) -> list[StepRow]:
        rng = np.random.default_rng(seed)
        return [
            StepRow(gpu, one.network, scale * (1e-9 * one.network.flops**0.85 + 2e-4 * one.network.n_tensors) * noise)
            for one, noise in zip(lawful(24, seed=seed), np.exp(rng.normal(0, 0.03, 24)), strict=True)
        ]

    def error(seed: int, others: list[StepRow]) -> float:
        rows = table("new", 0.3, seed)
        model = fit_steps(rows[:4], others)
        return float(np.mean([abs(model.predict(one.network).seconds / one.step_s - 1) for one in rows[4:]]))

    alone = [error(seed, []) for seed in range(12)]
    helped = [error(seed, table("old", 1.0, 100 + seed)) for seed in range(12)]
    assert np.mean(helped) < 0.95 * np.mean(alone)


def test_the_order_of_rows_does_not_matter() -> None:
    """The same networks in another order give the same prediction."""
    rows = lawful(9, noise=0.05)
    new = Network("new", 4e9, 130, 0)
    first, second = (fit_steps(some).predict(new) for some in (rows, rows[::-1]))
    assert first.seconds == pytest.approx(second.seconds, rel=1e-9)
    assert first.spread == pytest.approx(second.spread, rel=1e-9)
