"""Streams and jobs on simulated boards: the account adds up, policies differ as they should, plans are ranges."""

import itertools
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from polythrottle.arrivals import Poisson, Uniform
from polythrottle.backends.simulated.engine import Engine
from polythrottle.catalog import load_board, load_model
from polythrottle.daemon.horizon import Pattern, Stretch
from polythrottle.errors import InvalidInput, SloUnmet, UnknownName
from polythrottle.finetune.host import Host
from polythrottle.finetune.job import Job
from polythrottle.finetune.options import Menu
from polythrottle.finetune.planning import Plan, plan, until_s
from polythrottle.finetune.scheduler import Decision, Moment, OffPeak, alone, greedy, interleave
from polythrottle.finetune.simulating import Stream, least_busy_s, most_samples, simulate

_JOB = Job(samples=64, batch=16, epochs=2, output=100, model="efficientnet-b7")
_LENGTH_S, _RATE, _SLO_S = 10.0, 6.0, 0.7


@pytest.fixture(scope="module")
def host() -> Host:
    """Return an AGX Orin that serves and fine-tunes EfficientNet-B7."""
    return Host(Engine(load_board("jetson-agx-orin")), load_model("efficientnet-b7"), _JOB)


@pytest.fixture(scope="module")
def menu(host: Host) -> Menu:
    """Return its points."""
    return host.menu()


def _stream(seed: int = 0, rate_per_s: float = _RATE) -> Stream:
    times = itertools.takewhile(lambda at_s: at_s < _LENGTH_S, Poisson(rate_per_s).times(seed))
    return Stream(tuple(times), _LENGTH_S, _SLO_S, rate_per_s)


def test_the_same_seed_gives_the_same_account(host: Host, menu: Menu) -> None:
    """Nothing depends on anything but what is given."""
    assert simulate(host, _stream(), interleave, menu) == simulate(host, _stream(), interleave, menu)
    assert simulate(host, _stream(), interleave, menu) != simulate(host, _stream(), interleave, menu, seed=1)


def test_everything_is_accounted_for(host: Host, menu: Menu) -> None:
    """Each request is answered or dropped, the job ends, and the stream is seen to its end."""
    for policy in (greedy, interleave):
        found = simulate(host, _stream(), policy, menu)
        assert len(found.latencies_s) + found.dropped == found.requests == len(_stream().times_s)
        assert found.late == found.dropped + sum(each > _SLO_S for each in found.latencies_s)
        assert found.done_s is not None
        assert found.span_s >= max(_LENGTH_S, found.done_s)


def test_interleaving_breaks_fewer_limits_than_sharing_for_less_energy(host: Host, menu: Menu) -> None:
    """On a loaded board it breaks none, while sharing breaks many, and the same work takes less."""
    seeds = range(3)
    kept = [simulate(host, _stream(seed, 8.0), interleave, menu, seed) for seed in seeds]
    shared = [simulate(host, _stream(seed, 8.0), greedy, menu, seed, choose=False) for seed in seeds]
    assert sum(each.late for each in kept) <= 0.01 * sum(each.requests for each in kept)
    assert sum(each.late for each in shared) > 0.05 * sum(each.requests for each in shared)
    assert sum(each.energy_j for each in kept) < sum(each.energy_j for each in shared)


def test_inference_alone_draws_what_idle_and_busy_draw(host: Host, menu: Menu) -> None:
    """Without requests a board idles; its energy is that of idling, at the temperature it cools to."""
    nothing = Stream((), _LENGTH_S, _SLO_S, 0.0)
    found = simulate(host, nothing, alone, menu, endless=True)
    idle_w = menu.options[0].services[0].idle_w
    assert found.energy_j / _LENGTH_S == pytest.approx(idle_w, rel=0.03)
    assert (found.samples, found.done_s, found.violation_rate) == (0, None, 0.0)


def test_no_schedule_does_more_than_the_bound(host: Host, menu: Menu) -> None:
    """What interleaving fine-tunes at the default point stays below what is possible, and is most of it."""
    stay = Menu(menu.options[:1])
    found = simulate(host, _stream(rate_per_s=3.0), interleave, stay, endless=True)
    most = most_samples(_stream(rate_per_s=3.0), stay.options[0])
    assert 0.7 * most <= found.samples <= most
    assert found.samples <= found.room


def test_full_batches_take_the_least_time(menu: Menu) -> None:
    """Requests that come together are answered together; far apart, one by one."""
    option = menu.options[0]
    together = Stream((1.0, 1.0), _LENGTH_S, _SLO_S, 1.0)
    apart = Stream((1.0, 5.0), _LENGTH_S, _SLO_S, 1.0)
    assert least_busy_s(together, option) == option.services[1].interval_s
    assert least_busy_s(apart, option) == 2 * option.services[0].interval_s


def test_silence_makes_pieces_last_as_long_as_the_physics_say(host: Host) -> None:
    """Without noise a lone request takes what its piece takes."""
    quiet = replace(host, noise=0.0)
    menu = Menu((quiet.option(quiet.default),))
    found = simulate(quiet, Stream((1.0,), _LENGTH_S, _SLO_S, 0.1), alone, menu, endless=True)
    piece = quiet.serving(quiet.default, 1, 10.0, beside=False)
    assert found.latencies_s == pytest.approx((piece.work_s + piece.lag_s,))


def test_a_policy_that_never_rests_is_refused(host: Host, menu: Menu) -> None:
    """One that moves between two points for ever is found out."""

    def restless(moment: Moment) -> Decision:
        first, second = menu.options[:2]
        other = second if moment.option is first else first
        return Decision("again", point=other.point)

    with pytest.raises(InvalidInput, match="never comes to rest"):
        simulate(host, _stream(), restless, menu)


def test_a_stream_out_of_order_is_refused() -> None:
    """So is a request after the end, and a limit of nothing."""
    for times_s, slo_s in (((2.0, 1.0), 1.0), ((11.0,), 1.0), ((1.0,), 0.0)):
        with pytest.raises(InvalidInput):
            Stream(times_s, _LENGTH_S, slo_s, 1.0)


def _plan(menu: Menu, ahead: Sequence[Stretch] = (), **given: Any) -> Plan:
    night = Pattern().ahead(22 * 3600.0, until_s(22 * 3600.0, 6 * 3600.0), now_per_s=2.0)
    return plan(menu, replace(_JOB, epochs=10_000), ahead or night, _SLO_S, **given)


def test_a_plan_is_a_range_that_power_narrows(menu: Menu) -> None:
    """Eight hours have room for many epochs; 20 W for fewer than any power, and idle power for none."""
    free, capped, least = _plan(menu), _plan(menu, power_w=20.0), _plan(menu, power_w=15.0)
    assert 0 < free.epochs.low < free.epochs.high
    assert 0 < capped.epochs.high <= free.epochs.high * 1.5
    assert least.epochs.high < capped.epochs.high
    assert capped.joules.high <= 20.0 * 8 * 3600 * 1.001
    assert 0 == free.late.low < free.late.high < 0.02 * free.requests.high
    assert 0 < free.added_j.low <= free.added_j.high < free.joules.high


def test_a_small_job_is_done_before_the_end(menu: Menu) -> None:
    """It says from when to when, and counts no more than the job has."""
    found = plan(menu, _JOB, [Stretch(3600.0, 1.0)], _SLO_S)
    assert (found.epochs.low, found.epochs.high) == (2.0, 2.0)
    assert 0 < found.done_s.low <= found.done_s.high < 60.0


def test_a_plan_agrees_with_the_simulation(host: Host, menu: Menu) -> None:
    """What a simulated stream gets done lies within the planned range."""
    times = itertools.takewhile(lambda at_s: at_s < 30.0, Uniform(4.0).times(0))
    found = simulate(host, Stream(tuple(times), 30.0, _SLO_S, 4.0), interleave, menu, endless=True)
    planned = plan(menu, replace(_JOB, epochs=1000), [Stretch(30.0, 4.0)], _SLO_S)
    assert planned.epochs.low <= found.samples / _JOB.samples <= planned.epochs.high


def test_off_peak_plans_less_when_it_is_busy(menu: Menu) -> None:
    """Nothing is planned for stretches that are not quiet."""
    busy, calm = [Stretch(3600.0, 10.0)], [Stretch(3600.0, 1.0)]
    quiet = OffPeak(share=0.2)
    assert _plan(menu, ahead=busy, policy="off-peak", quiet=quiet).epochs.high == 0
    assert _plan(menu, ahead=calm, policy="off-peak", quiet=quiet).epochs.low > 0


def test_what_cannot_be_planned_is_said(menu: Menu) -> None:
    """A limit inference alone cannot hold, policies that share, unknown ones, and an empty horizon are refused."""
    with pytest.raises(SloUnmet, match="inference alone does not hold"):
        plan(menu, _JOB, [Stretch(60.0, 500.0)], _SLO_S)
    with pytest.raises(SloUnmet, match="99th percentile"):
        plan(menu, _JOB, [Stretch(60.0, 1.0)], 0.01)
    with pytest.raises(InvalidInput, match="shares the device"):
        plan(menu, _JOB, [Stretch(60.0, 1.0)], _SLO_S, policy="greedy")
    with pytest.raises(UnknownName, match="off-peak"):
        plan(menu, _JOB, [Stretch(60.0, 1.0)], _SLO_S, policy="offpeak")
    with pytest.raises(InvalidInput, match="horizon"):
        plan(menu, _JOB, [], _SLO_S)
    with pytest.raises(InvalidInput, match="time of day"):
        until_s(-1.0, 5.0)
