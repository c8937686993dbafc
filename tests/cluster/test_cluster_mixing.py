"""Several machine types in one job."""

from math import inf

import pytest
from planning_builders import offer, work

from polythrottle.cluster.plan.options import Part, mix, options, service_s
from polythrottle.cluster.predict.completion import asynchronous
from polythrottle.domain.errors import InvalidInput
from polythrottle.domain.fleet.transient_machine import ConstantHazard, Market


def parts(*counts: int, market: Market = Market.SPOT, rate_per_h: float = 0.0, **more: object) -> list[Part]:
    """Return like machines as parts of a mix."""
    return [Part(offer(ConstantHazard(rate_per_h), **more), market, count) for count in counts]


def test_a_mix_of_one_type_is_that_type() -> None:
    """On machines that are never lost, time, dollars and joules are those of the plan's own option."""
    some = parts(3, market=Market.ON_DEMAND)
    found = mix(work(), [some[0].offer], some)
    plain = options(work(), some[0].offer, Market.ON_DEMAND, 3)[0]
    assert found.ends.time_s is not None
    assert found.ends.usd is not None
    assert found.ends.energy_j is not None
    means = (found.ends.time_s.mean, found.ends.usd.mean, found.ends.energy_j.mean)
    assert means == pytest.approx(plain.aims, rel=1e-6)
    assert found.interval_s == inf


@pytest.mark.parametrize("undoes", [True, False])
def test_losses_cost_a_mix_what_they_cost_a_plan(undoes: bool) -> None:
    """With losses the means are within 5 % of the plan's estimates."""
    some = parts(4, rate_per_h=0.2)
    found = mix(work(undoes=undoes), [some[0].offer], some, draws=400)
    plain = options(work(undoes=undoes), some[0].offer, Market.SPOT, 4)[0]
    for spread, expected in zip((found.ends.time_s, found.ends.usd, found.ends.energy_j), plain.aims, strict=True):
        assert spread is not None
        assert spread.low <= spread.mean <= spread.high
        assert spread.mean == pytest.approx(expected, rel=0.05)


def test_in_step_all_wait_for_the_slowest() -> None:
    """A slow machine makes three fast ones as slow as itself; without a barrier it adds its own speed."""
    fast, slow = offer(step_s=0.1), offer(step_s=0.4)
    mixed = [Part(fast, Market.SPOT, 3), Part(slow, Market.SPOT, 1)]
    assert mix(work(undoes=True), [fast, slow], mixed).steps_per_s == pytest.approx(4 / 0.4)
    assert mix(work(undoes=False), [fast, slow], mixed).steps_per_s == pytest.approx(3 / 0.1 + 1 / 0.4)


def test_the_servers_time_is_found_in_the_speedups() -> None:
    """Speed-ups computed with a service of 20 ms give it back; even ones give none."""
    served_s, step_s = 0.02, 0.1
    curve = tuple(asynchronous([step_s - served_s] * n, served_s) * step_s for n in range(1, 9))
    assert service_s([offer(step_s=step_s, speedups=curve)]) == pytest.approx(served_s, rel=0.02)
    assert service_s([offer(step_s=step_s)]) == 0


def test_what_cannot_be_mixed_is_said() -> None:
    """More than is offered, a market without a price, nothing at all, and losses without end."""
    with pytest.raises(InvalidInput, match="a mix takes 1 to"):
        parts(10_000)
    with pytest.raises(InvalidInput, match="at least one machine"):
        mix(work(), [], [])
    some = parts(2, rate_per_h=1e5)
    with pytest.raises(InvalidInput, match="is not simulated"):
        mix(work(), [some[0].offer], some)
