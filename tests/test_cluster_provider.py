"""A provider that rents out nothing."""

import pytest

from polythrottle.clock import VirtualClock
from polythrottle.cluster.lifetime import Steady
from polythrottle.cluster.machine import Market
from polythrottle.cluster.provision.provider import Order, Stage
from polythrottle.cluster.provision.simulated import SimulatedProvider
from polythrottle.errors import InvalidInput


def test_an_order_waits_runs_and_is_lost() -> None:
    """After its start-up it has a node; once its life is over it is lost, and stays so."""
    clock = VirtualClock()
    provider = SimulatedProvider(clock, Steady(1.0), startup_s=90.0)
    ticket = provider.request(Order("v100"))
    assert provider.seen()[ticket].stage is Stage.WAITING
    clock.sleep(91.0)
    assert (provider.seen()[ticket].stage, provider.seen()[ticket].node) == (Stage.RUNNING, "v100-simulated-1")
    clock.sleep(1e6)
    assert (provider.seen()[ticket].stage, provider.seen()[ticket].times_lost) == (Stage.LOST, 1)
    provider.release(ticket)
    assert provider.seen()[ticket].stage is Stage.LOST


def test_on_demand_machines_are_kept_until_they_are_given_back() -> None:
    """However long; giving back twice is giving back once."""
    clock = VirtualClock()
    provider = SimulatedProvider(clock, Steady(100.0), startup_s=0.0)
    ticket = provider.request(Order(market=Market.ON_DEMAND))
    clock.sleep(1e7)
    assert provider.seen()[ticket].stage is Stage.RUNNING
    provider.release(ticket)
    provider.release(ticket)
    assert provider.seen()[ticket].stage is Stage.ENDED
    provider.release("no such order")


def test_who_has_no_machine_left_lets_orders_wait() -> None:
    """The third order of two machines begins to start when one is given back; a withdrawn one never does."""
    clock = VirtualClock()
    provider = SimulatedProvider(clock, startup_s=10.0, most=2)
    first, _, third, fourth = (provider.request(Order()) for _ in range(4))
    clock.sleep(20.0)
    assert provider.seen()[third].reason == "the provider has no machine left"
    provider.release(fourth)
    provider.release(first)
    assert provider.seen()[third].reason == "starting"
    clock.sleep(10.0)
    assert provider.seen()[third].stage is Stage.RUNNING
    assert fourth not in provider.seen()


def test_the_same_seed_takes_the_same_machines() -> None:
    """Another seed takes others."""

    def left(seed: int) -> list[Stage]:
        clock = VirtualClock()
        provider = SimulatedProvider(clock, Steady(1.0), seed=seed)
        for _ in range(20):
            provider.request(Order())
        clock.sleep(3600.0)
        return [each.stage for each in provider.seen().values()]

    assert left(1) == left(1) != left(2)


def test_a_provider_has_machines() -> None:
    """None at all, or a start-up before the order, is no provider."""
    with pytest.raises(InvalidInput):
        SimulatedProvider(VirtualClock(), most=0)
    with pytest.raises(InvalidInput):
        SimulatedProvider(VirtualClock(), startup_s=-1.0)
