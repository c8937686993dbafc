"""Streams and jobs on simulated boards: the account adds up, policies differ as they should, plans are ranges."""

import itertools
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from polythrottle.backends.simulated.engine import Engine
from polythrottle.catalog import load_board, load_model
from polythrottle.domain.arrivals import Poisson, Uniform
from polythrottle.domain.errors import InvalidInput, SloUnmet, UnknownName
from polythrottle.domain.load.energy_ration import DailyLoad, LoadInterval
from polythrottle.lab.reproduce.scheduler import least_busy_s, most_samples
from polythrottle.training.beside.operating_options import FinetuningJob, Menu
from polythrottle.training.beside.progress_forecast import Plan, plan, until_s, warnings_before
from polythrottle.training.beside.scheduler import (
    Decision,
    Hours,
    MeanPowerLimit,
    Moment,
    OffPeak,
    Terms,
    alone,
    greedy,
    interleave,
    policy,
)
from polythrottle.training.beside.simulated_host import Host
from polythrottle.training.beside.simulated_run import Stream, simulate

_JOB = FinetuningJob(samples=64, batch=16, epochs=2, output=100, model="efficientnet-b7")
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


@pytest.mark.slow
def test_the_same_seed_gives_the_same_account(host: Host, menu: Menu) -> None:
    """Nothing depends on anything but what is given."""
    assert simulate(host, _stream(), interleave, menu) == simulate(host, _stream(), interleave, menu)
    assert simulate(host, _stream(), interleave, menu) != simulate(host, _stream(), interleave, menu, seed=1)


def test_everything_is_accounted_for(host: Host, menu: Menu) -> None:
    """Each request is answered or dropped, the job ends, and the stream is seen to its end."""
    for each in (greedy, interleave):
        found = simulate(host, _stream(), each, menu)
        assert len(found.latencies_s) + found.dropped == found.requests == len(_stream().times_s)
        assert found.late == found.dropped + sum(took_s > _SLO_S for took_s in found.latencies_s)
        assert found.done_s is not None
        assert found.span_s >= max(_LENGTH_S, found.done_s)
        assert sorted(found.arrived_s) == list(found.arrived_s)
        assert len(found.arrived_s) == len(found.latencies_s)
        assert sum(end_s - begin_s for begin_s, end_s in found.slices_s) <= found.done_s


@pytest.mark.slow
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


def _plan(menu: Menu, ahead: Sequence[LoadInterval] = (), **given: Any) -> Plan:
    night = DailyLoad().ahead(22 * 3600.0, until_s(22 * 3600.0, 6 * 3600.0), now_per_s=2.0)
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
    found = plan(menu, _JOB, [LoadInterval(3600.0, 1.0)], _SLO_S)
    assert (found.epochs.low, found.epochs.high) == (2.0, 2.0)
    assert 0 < found.done_s.low <= found.done_s.high < 60.0


def test_a_plan_agrees_with_the_simulation(host: Host, menu: Menu) -> None:
    """What a simulated stream gets done lies within the planned range."""
    times = itertools.takewhile(lambda at_s: at_s < 30.0, Uniform(4.0).times(0))
    found = simulate(host, Stream(tuple(times), 30.0, _SLO_S, 4.0), interleave, menu, endless=True)
    planned = plan(menu, replace(_JOB, epochs=1000), [LoadInterval(30.0, 4.0)], _SLO_S)
    assert planned.epochs.low <= found.samples / _JOB.samples <= planned.epochs.high


def test_off_peak_plans_less_when_it_is_busy(menu: Menu) -> None:
    """Nothing is planned for stretches that are not quiet."""
    busy, calm = [LoadInterval(3600.0, 10.0)], [LoadInterval(3600.0, 1.0)]
    quiet = OffPeak(share=0.2)
    assert _plan(menu, ahead=busy, policy="off-peak", quiet=quiet).epochs.high == 0
    assert _plan(menu, ahead=calm, policy="off-peak", quiet=quiet).epochs.low > 0


def test_a_power_is_kept_to_by_waiting(host: Host, menu: Menu) -> None:
    """The mean stays within it, the job is done later, and inference is as punctual as before."""
    stream, free = _stream(rate_per_s=4.0), simulate(host, _stream(rate_per_s=4.0), interleave, menu)
    free_w = free.energy_j / free.span_s
    idle = simulate(host, stream, alone, menu, endless=True)
    between_w = (free_w + idle.energy_j / idle.span_s) / 2
    kept = simulate(host, stream, interleave, menu, ration=MeanPowerLimit(between_w))
    assert kept.energy_j / kept.span_s <= between_w < free_w
    assert kept.done_s is not None
    assert free.done_s is not None
    assert kept.done_s > free.done_s
    assert kept.waited_s is not None
    assert kept.waited_s > 0 == kept.late
    assert free.waited_s is None


def test_a_plan_within_a_power_agrees_with_the_simulation(host: Host, menu: Menu) -> None:
    """What a simulated minute gets done within it lies within the planned range."""
    times = tuple(itertools.takewhile(lambda at_s: at_s < 60.0, Uniform(4.0).times(0)))
    stream = Stream(times, 60.0, _SLO_S, 4.0)
    found = simulate(host, stream, interleave, menu, endless=True, ration=MeanPowerLimit(20.0))
    planned = plan(menu, replace(_JOB, epochs=1000), [LoadInterval(60.0, 4.0)], _SLO_S, power_w=20.0)
    assert found.energy_j <= 60.0 * 20.0
    assert planned.epochs.low <= found.samples / _JOB.samples <= planned.epochs.high


def test_by_the_hour_nothing_is_trained_outside(host: Host, menu: Menu) -> None:
    """A minute before ten nothing begins; when the night ends before the job does, it goes on the next evening."""
    night, stream = policy("off-peak", Hours.parse("22:00-06:00")), _stream(rate_per_s=2.0)
    before = simulate(host, stream, night, menu, day_s=22 * 3600.0 - 60.0)
    assert before.samples == 0
    assert before.done_s is not None
    assert 60.0 <= before.done_s < 130.0
    brief = policy("off-peak", Hours.parse("22:00-22:01"))
    long = replace(host, job=replace(_JOB, epochs=30))
    resumed = simulate(long, stream, brief, long.menu(), day_s=22 * 3600.0 + 50.0)
    assert resumed.done_s is not None
    assert resumed.done_s > 23 * 3600.0


def test_a_plan_by_the_hour_counts_these_hours_alone(menu: Menu) -> None:
    """Across midnight, from within, and not at all where the horizon ends before they begin."""
    quiet, day = OffPeak(hours=Hours.parse("22:00-06:00")), [LoadInterval(24 * 3600.0, 2.0)]
    night = _plan(menu, ahead=[LoadInterval(8 * 3600.0, 2.0)])
    whole = _plan(menu, ahead=day, policy="off-peak", quiet=quiet, day_s=12 * 3600.0)
    assert whole.epochs.low == pytest.approx(night.epochs.low)
    assert whole.done_s.low == float("inf")
    rest = _plan(menu, ahead=day, policy="off-peak", quiet=quiet, day_s=2 * 3600.0)
    assert rest.epochs.high == pytest.approx(whole.epochs.high)
    small = plan(menu, _JOB, day, _SLO_S, "off-peak", quiet=quiet, day_s=12 * 3600.0)
    assert small.done_s.low > 10 * 3600.0
    with pytest.raises(InvalidInput, match="none of the hours"):
        _plan(menu, ahead=[LoadInterval(3600.0, 2.0)], policy="off-peak", quiet=quiet, day_s=12 * 3600.0)


def test_a_run_says_beforehand_what_its_hours_have_room_for(menu: Menu) -> None:
    """And that inference alone leaves no power; without an end or hours there is nothing to say."""
    terms = Terms(_SLO_S, Poisson(2.0), "off-peak", 3600.0, hours=Hours.parse("22:00-22:30"))
    (said,) = warnings_before(menu, 10**9, terms, 22 * 3600.0)
    assert "22:00-22:30 have room for about" in said
    assert "1,000,000,000" in said
    assert warnings_before(menu, 10, terms, 22 * 3600.0) == ()
    assert warnings_before(menu, 10, terms, 21.5 * 3600.0) == ("fine-tuning begins in 0 h 30 min",)
    assert warnings_before(menu, 10**9, replace(terms, seconds=None), 22 * 3600.0) == ()
    with pytest.raises(InvalidInput, match="inference alone draws"):
        warnings_before(menu, 10, replace(terms, power_w=5.0), 22 * 3600.0)


def test_a_plan_below_what_inference_draws_is_refused(menu: Menu) -> None:
    """As a run is; where it leaves a little, inference may turn out to draw more than that, which is a range."""
    calm = [LoadInterval(3600.0, 2.0)]
    with pytest.raises(InvalidInput, match="inference alone draws"):
        _plan(menu, ahead=calm, power_w=1.0)
    found = plan(menu, replace(_JOB, epochs=10_000), calm, _SLO_S)
    alone_w = (found.joules.high - found.added_j.high) / 3600.0 / 1.1
    near = _plan(menu, ahead=calm, power_w=1.01 * alone_w)
    assert near.epochs.low == 0 < near.epochs.high
    assert near.joules.low < alone_w * 3600.0 < near.joules.high


def test_near_the_power_of_inference_a_plan_holds_what_the_simulation_does(host: Host, menu: Menu) -> None:
    """Samples and joules of a simulated minute lie within the range."""
    times = tuple(itertools.takewhile(lambda at_s: at_s < 60.0, Uniform(4.0).times(0)))
    stream, stretch = Stream(times, 60.0, _SLO_S, 4.0), [LoadInterval(60.0, 4.0)]
    service = menu.ranked(4.0, _SLO_S, False)[0].gathered(4.0, _SLO_S)
    alone_w = service.idle_w + 4.0 / service.batch * (service.batch_j - service.interval_s * service.idle_w)
    cap_w = 1.002 * alone_w
    found = simulate(host, stream, interleave, menu, endless=True, ration=MeanPowerLimit(cap_w))
    near = plan(menu, replace(_JOB, epochs=1000), stretch, _SLO_S, power_w=cap_w)
    assert near.epochs.low <= found.samples / _JOB.samples <= near.epochs.high
    assert near.joules.low <= found.energy_j <= near.joules.high


def test_what_cannot_be_planned_is_said(menu: Menu) -> None:
    """A limit inference alone cannot hold, policies that share, unknown ones, and an empty horizon are refused."""
    with pytest.raises(SloUnmet, match="inference alone does not hold"):
        plan(menu, _JOB, [LoadInterval(60.0, 500.0)], _SLO_S)
    with pytest.raises(SloUnmet, match="99th percentile"):
        plan(menu, _JOB, [LoadInterval(60.0, 1.0)], 0.01)
    with pytest.raises(InvalidInput, match="shares the device"):
        plan(menu, _JOB, [LoadInterval(60.0, 1.0)], _SLO_S, policy="greedy")
    with pytest.raises(UnknownName, match="off-peak"):
        plan(menu, _JOB, [LoadInterval(60.0, 1.0)], _SLO_S, policy="offpeak")
    with pytest.raises(InvalidInput, match="horizon"):
        plan(menu, _JOB, [], _SLO_S)
    with pytest.raises(InvalidInput, match="time of day"):
        until_s(-1.0, 5.0)
