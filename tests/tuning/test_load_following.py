import itertools
import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from polythrottle.backends.simulated import SimulatedDevice
from polythrottle.catalog import load_board, load_model
from polythrottle.daemon.control.events import Observation
from polythrottle.daemon.control.state import FollowingPolicy, RungPosition, Switching, follow, patience, pressed_by
from polythrottle.domain.arrivals import Arrivals, Poisson
from polythrottle.domain.clock import VirtualClock
from polythrottle.domain.errors import InvalidInput, SloUnmet
from polythrottle.domain.ladder import Ladder, PointPerformance, Rung
from polythrottle.domain.load.forecast import Forecast, ForecastWindows
from polythrottle.domain.measurement import EnergyKind, Latency, Measurement, Query
from polythrottle.domain.problem import Constraint, Problem
from polythrottle.domain.space import OperatingPoint, SearchSpace
from polythrottle.domain.study import Study, Trial
from polythrottle.metering.load import drive
from polythrottle.tuning.measured_ladder import (
    LadderOffer,
    batches,
    gatherings,
    ladder_of,
    ladder_of_study,
    late_share,
    simulate_queue,
    undominated,
)


def _service(
    interval_s: float = 0.1, batch: int = 1, idle_w: float = 10.0, extra_w: float = 10.0, mem: int = 1
) -> PointPerformance:
    point = OperatingPoint({"gpu_max_hz": round(1e9 / interval_s), "mem_hz": mem, "batch_size": batch})
    return PointPerformance(point, batch, interval_s, interval_s, interval_s, (idle_w + extra_w) * interval_s, idle_w)


def _ladder() -> Ladder:
    rows = ((1.0, 0.3, 5.0), (4.0, 0.1, 10.0), (20.0, 0.02, 20.0))
    rungs = (
        Rung(rate, _service(interval, idle_w=idle, extra_w=2 / interval), 0.0, idle + 2 * rate, 0.5)
        for rate, interval, idle in rows
    )
    return Ladder(0.7, tuple(rungs))


class _Server:
    """Takes the same time for each query."""

    uri, space = "server", SearchSpace.unit()

    def __init__(self, service: PointPerformance) -> None:
        self.clock, self.service = VirtualClock(), service

    def apply(self, point: OperatingPoint) -> None:
        """Take no knobs."""

    def query(self) -> Query:
        """Let the time of a batch pass."""
        self.clock.sleep(self.service.interval_s)
        return Query(self.service.latency_s, self.service.batch)

    def close(self) -> None:
        """Do nothing."""


def test_a_batch_is_gathered_for_parts_of_what_the_limit_leaves() -> None:
    """Of 0.9 of it, less the service: none, half, all but the batch before, all; one alone is never waited for."""
    service = replace(_service(0.02, batch=8), tail_s=0.03)
    assert gatherings(service, 0.2) == pytest.approx((0.0, 0.075, 0.13, 0.15))
    assert gatherings(replace(service, interval_s=0.16), 0.2) == pytest.approx((0.0, 0.075, 0.15))
    assert gatherings(service, 0.03) == gatherings(_service(0.02), 1.0) == (0.0,)


@pytest.mark.parametrize("batch", [1, 4])
def test_the_queue_is_the_one_that_loads_are_driven_through(batch: int) -> None:
    """Latencies are those of `drive` on a virtual clock, query by query, where every batch is filled."""
    service, arrivals, count = _service(0.1, batch), Poisson(8.0), 2000
    times_s = list(itertools.islice(arrivals.times(3), count))
    sent = batches(times_s, service, math.inf)
    ours = np.repeat(sent.starts_s, sent.sizes) + service.latency_s - np.array(times_s)
    server = _Server(service)
    with drive(server, arrivals, server.clock, 3, batch=batch) as load:
        theirs = [query.latency_s for query in itertools.islice(load, count)]
    assert ours == pytest.approx(theirs)


@pytest.mark.slow
def test_waiting_is_that_of_the_formula() -> None:
    """Half loaded, one server of constant service waits half a service on average (Pollaczek and Khinchine)."""
    service = _service(0.1)
    gaps = np.random.default_rng(0).standard_exponential(200_000) / 5.0
    times_s = np.cumsum(gaps).tolist()
    waits = np.array(batches(times_s, service, 0.0).starts_s) - times_s
    assert np.mean(waits) == pytest.approx(0.05, rel=0.03)
    assert simulate_queue(times_s, service, 0.0).power_w == pytest.approx(10 + 0.5 * 10, rel=0.01)


@given(
    st.lists(st.floats(0.0, 5.0), min_size=1, max_size=60),
    st.integers(1, 8),
    st.sampled_from([0.0, 0.05, 1.0]),
)
def test_every_request_is_answered_once_and_none_early(gaps: list[float], batch: int, gather_s: float) -> None:
    """Batches cover the requests in order, start when their last is there, and never overlap or wait too long."""
    times_s, service = np.cumsum(gaps).tolist(), _service(0.1, batch)
    free_s, first = -math.inf, 0
    for size, start_s in zip(*batches(times_s, service, gather_s), strict=True):
        assert 1 <= size <= batch
        assert start_s >= max(free_s, times_s[first + size - 1])
        assert start_s <= max(free_s, times_s[first] + gather_s) + 1e-9
        free_s, first = start_s + service.interval_s, first + size
    assert first == len(times_s)


@pytest.mark.parametrize("share", [0.5, 0.99, 0.9987])
def test_a_queue_says_what_so_many_requests_stay_within(share: float) -> None:
    """Each waits for its batch and is served, all as unlucky as one in a hundred batches."""
    times_s = np.cumsum(np.random.default_rng(1).standard_exponential(1000) / 20.0).tolist()
    service = replace(_service(0.1, 4), tail_s=0.13)
    queue = simulate_queue(times_s, service, 0.05)
    sent = batches(times_s, service, 0.05)
    taken_s = [
        start_s - time_s + 0.13 for start_s, time_s in zip(np.repeat(sent.starts_s, sent.sizes), times_s, strict=True)
    ]
    assert queue.within_s(share) == pytest.approx(np.quantile(taken_s, share, method="inverted_cdf"))
    assert queue.p99_s > 0.2


def test_a_service_needs_idle_power_and_p99() -> None:
    """Without either nothing is made up; one line says what is missing."""
    point = OperatingPoint({"batch_size": 2})
    seen = Measurement(Latency(0.1, p99_s=0.12), 1.0, 20.0, 20.0, idle_power_w=8.0)
    service = PointPerformance.of(point, seen)
    assert (service.batch, service.interval_s, service.batch_j, service.most_per_s) == (2, 0.1, 2.0, 20.0)
    assert service.marginal_j == pytest.approx(0.6)
    with pytest.raises(InvalidInput, match="idle power"):
        PointPerformance.of(point, replace(seen, idle_power_w=None))
    with pytest.raises(InvalidInput, match="p99"):
        PointPerformance.of(point, replace(seen, latency=Latency(0.1)))
    with pytest.raises(InvalidInput, match="batch of"):
        replace(service, interval_s=math.nan)


def test_dominated_points_are_left_out() -> None:
    """A point slower and hungrier than another of its batch is no rung."""
    fast, slow = _service(0.1), _service(0.2, idle_w=12.0, extra_w=20.0)
    assert undominated([slow, fast]) == [fast]
    assert len(undominated([slow, _service(0.1, batch=2)])) == 2


@pytest.mark.slow
def test_a_ladder_climbs_to_faster_points() -> None:
    """Each rung holds the SLO with a margin at its rate, rates rise, and power rises with them."""
    services = [
        _service(interval, batch, 8 + 1 / interval, 1 / interval) for interval in (0.05, 0.1, 0.2) for batch in (1, 2)
    ]
    ladder = ladder_of(services, 0.6)
    assert all(rung.p99_s <= 0.9 * 0.6 for rung in ladder.rungs)
    assert [rung.power_w for rung in ladder.rungs] == sorted(rung.power_w for rung in ladder.rungs)
    assert ladder.rungs[0].service.interval_s > ladder.rungs[-1].service.interval_s
    assert ladder.rungs[ladder.coolest] == ladder.rungs[0]


@pytest.mark.slow
def test_padded_batches_cost_more_at_low_rates() -> None:
    """A rung of large batches is predicted to draw what its queue draws at a quarter of its rate, within 5 %."""
    service = _service(0.2, batch=4, idle_w=10.0, extra_w=30.0)
    ladder = ladder_of([service], 1.0)
    rung = ladder.rungs[-1]
    times_s = np.cumsum(np.random.default_rng(0).standard_exponential(5000) * 4 / rung.rate_per_s).tolist()
    assert rung.power_at(rung.rate_per_s) == pytest.approx(rung.power_w)
    assert rung.power_at(rung.rate_per_s / 4) == pytest.approx(
        simulate_queue(times_s, service, rung.gather_s).power_w, rel=0.05
    )


def test_a_slo_nobody_holds_is_said() -> None:
    """No ladder without a point that holds it, in one line."""
    with pytest.raises(SloUnmet, match="no point holds p99<=50ms"):
        ladder_of([_service(0.1)], 0.05)
    with pytest.raises(InvalidInput, match="rising rates"):
        Ladder(1.0, ())


def test_a_refused_ladder_names_the_lowest_rate_tried() -> None:
    """Points that hold a limit once requests are rare enough are not said to hold it at no rate."""
    # At a 64th of its rate more than one request of a hundred finds another before it; at a 1,000th none does.
    service = _service(0.1)
    with pytest.raises(SloUnmet) as caught:
        ladder_of([service], 0.115)
    assert str(caught.value) == "no point holds p99<=115ms at 0.16 requests/s, the lowest rate tried"
    rare = np.cumsum(np.random.default_rng(0).standard_exponential(4000)) / (service.most_per_s / 1000)
    assert simulate_queue(rare.tolist(), service, 0.0).p99_s <= 0.9 * 0.115


@pytest.mark.slow
def test_a_study_makes_a_ladder() -> None:
    """The points a study measured become rungs, those cut short left out."""
    points = [OperatingPoint({"batch_size": batch}) for batch in (1, 2, 4)]
    space = SearchSpace.of_points(points, points[0])
    seen = Measurement(Latency(0.1, p99_s=0.12), 1.0, 10.0, 10.0, idle_power_w=8.0)
    measured = (seen, replace(seen, throughput_per_s=20.0), replace(seen, throughput_per_s=40.0, censored=True))
    trials = tuple(
        Trial(number, point, each) for number, (point, each) in enumerate(zip(points, measured, strict=True))
    )
    study = Study(Problem(space, (), "sim:jetson-agx-orin", "efficientnet-b7"), trials=trials)
    ladder = ladder_of_study(study, 1.0)
    assert {rung.service.batch for rung in ladder.rungs} <= {1, 2}
    assert ladder.rungs[-1].rate_per_s > 10


def _studied(*slo: str, arrivals: str = "closed", **seen: object) -> Study:
    points = [OperatingPoint({"batch_size": batch}) for batch in (1, 2)]
    measured = Measurement(Latency(0.1, p99_s=0.12), 1.0, 10.0, 10.0, idle_power_w=8.0)
    trials = tuple(Trial(number, point, replace(measured, **seen)) for number, point in enumerate(points))  # type: ignore[arg-type]
    limits = tuple(Constraint.parse(text) for text in slo)
    space = SearchSpace.of_points(points, points[0])
    return Study(Problem(space, limits, arrivals=Arrivals.parse(arrivals)), trials=trials)


@pytest.mark.slow
def test_a_study_offers_a_ladder_or_says_why_not() -> None:
    """An absolute or relative limit on the p99, back-to-back queries, joules and idle power are what it takes."""
    assert LadderOffer.of(_studied("p99<=1s")).ladder is not None
    relative = LadderOffer.of(_studied("p99<=5x")).ladder
    assert relative is not None
    assert relative.slo_s == pytest.approx(0.6)
    for offer, why in (
        (LadderOffer.of(_studied("mean<=1s")), "limit on the p99"),
        (LadderOffer.of(_studied("p99<=1s", arrivals="poisson:3/s")), "back to back"),
        (LadderOffer.of(_studied("p99<=1s", energy_kind=EnergyKind.RELATIVE)), "only relative"),
        (LadderOffer.of(_studied("p99<=1s", idle_power_w=None)), "idle power"),
        (LadderOffer.of(_studied("p99<=1s", latency=Latency(0.1))), "p99 of each point"),
        (LadderOffer.of(_studied("p99<=100ms")), "no point holds"),
        (LadderOffer.of(_studied("p99<=1s", censored=True)), "no point holds"),
    ):
        assert offer.ladder is None
        assert why in offer.why
        assert "\n" not in offer.why


def test_points_that_break_the_power_limit_are_no_rungs() -> None:
    """A limit on power or heat goes for every rung."""
    assert LadderOffer.of(_studied("p99<=1s", "power<=9W")).ladder is None
    assert LadderOffer.of(_studied("p99<=1s", "power<=11W")).ladder is not None


@pytest.mark.slow
def test_a_rung_of_a_simulated_board_keeps_its_word() -> None:
    """On the simulated AGX Orin, a rung at its rate holds the SLO, and power is within 4 % of the prediction."""
    device = SimulatedDevice(load_board("jetson-agx-orin"))
    workload = device.serve(load_model("efficientnet-b7"))
    found = []
    for clock_hz in (420_750_000, 726_750_000, 1_032_750_000):
        point = device.space.default.moved({"gpu_min_hz": clock_hz, "gpu_max_hz": clock_hz, "mem_hz": 2_133_000_000})
        device.apply(point)
        before_j = device.read().energy_j
        device.clock.sleep(5.0)
        idle_w = (device.read().energy_j - before_j) / 5.0
        whole = point.moved({"batch_size": 1})
        found.append(PointPerformance.of(whole, replace(device.expected(workload, whole), idle_power_w=idle_w)))
    ladder = ladder_of(found, 0.7)
    rung = ladder.rungs[len(ladder.rungs) // 2]
    device.rewind(1)
    device.apply(rung.service.point.only(device.space.names))
    with drive(workload, Poisson(rung.rate_per_s), device.clock, 1) as load:
        begin_s = device.clock.now()
        latencies_s = [query.latency_s for query in itertools.islice(load, 3000)]
    assert np.quantile(latencies_s, 0.99) <= 0.7
    assert device.read().energy_j / (device.clock.now() - begin_s) == pytest.approx(rung.power_w, rel=0.06)


def test_a_switch_costs_what_its_knobs_cost() -> None:
    """Each knob that changes is written, each domain takes effect; a batch alone costs nothing."""
    switching, before = Switching(), OperatingPoint({"gpu_min_hz": 1, "gpu_max_hz": 1, "mem_hz": 1, "batch_size": 1})
    assert switching.delay_s(before, before.moved({"batch_size": 8})) == 0
    assert switching.delay_s(before, before.moved({"mem_hz": 2})) == pytest.approx(0.025)
    assert switching.delay_s(before, before.moved({"gpu_min_hz": 2, "gpu_max_hz": 2})) == pytest.approx(0.039)


def test_a_forecast_follows_and_forgets() -> None:
    """A rise shows at once, is remembered for a while, and is then forgotten; what is kept is bounded."""
    forecast = Forecast(ForecastWindows(fast_s=1.0, memory_s=5.0, share=1.0))
    assert forecast.demand_per_s is None
    for second in range(1, 100):
        forecast = forecast.seen(float(second), 20.0 if second == 50 else 2.0, 1.0)
        if second == 50:
            assert forecast.demand_per_s == pytest.approx(20 - 18 * math.exp(-1))
        if second == 53:
            assert forecast.demand_per_s == pytest.approx(20 - 18 * math.exp(-1))
    assert forecast.demand_per_s == pytest.approx(2.0, abs=0.01)
    assert len(forecast.recent) <= 6
    assert forecast.seen(1.0, 2.0, 1.0).recent == ((1.0, pytest.approx(2.0)),)
    assert forecast.raised(9.0).demand_per_s == 9.0
    assert forecast.raised(1.0) == forecast
    assert Forecast().raised(9.0) == Forecast()
    with pytest.raises(InvalidInput, match="positive times"):
        ForecastWindows(fast_s=0.0)


def _footing_after(
    rates: list[float], manner: FollowingPolicy | None = None, waiting: int = 0, budget_w: float | None = None
) -> list[int]:
    footing, forecast, taken = RungPosition(0), Forecast(ForecastWindows(fast_s=0.1, slow_s=1.0, memory_s=0.5)), []
    for second, rate in enumerate(rates):
        forecast = forecast.seen(float(second), rate, 1.0)
        footing = follow(_ladder(), footing, forecast, float(second), waiting, budget_w, manner)
        taken.append(footing.rung)
    return taken


def test_one_goes_up_at_once_and_down_after_a_while() -> None:
    """A rise is followed in the same look, a fall after the dwell."""
    taken = _footing_after([0.5, 3.0, 0.5, 0.5, 0.5, 0.5, 0.5], FollowingPolicy(dwell_s=3.0))
    assert taken == [0, 1, 1, 1, 1, 0, 0]


@pytest.mark.slow
def test_a_day_costs_less_than_the_rung_that_holds_its_peak() -> None:
    """With the manner that boards are run with, a day is over a tenth cheaper, and each look has its load."""
    ladder, footing, forecast = _ladder(), RungPosition(2), Forecast(ForecastWindows())
    chance, followed_j, top_j, short = np.random.default_rng(0), 0.0, 0.0, 0
    for second in range(4 * 3600):
        rate = float(chance.poisson(4.0 * (1 - math.cos(2 * math.pi * second / (4 * 3600)))))
        forecast = forecast.seen(float(second), rate, 1.0)
        footing = follow(ladder, footing, forecast, float(second), 0)
        short += (forecast.fast_per_s or 0.0) > ladder.rungs[footing.rung].rate_per_s
        followed_j += ladder.rungs[footing.rung].power_at(rate)
        top_j += ladder.rungs[2].power_at(rate)
    assert followed_j < 0.9 * top_j
    assert short == 0


def test_a_short_dip_moves_nothing() -> None:
    """A load that returns within the dwell leaves the rung alone."""
    assert _footing_after([3.0, 0.5, 0.5, 3.0, 0.5, 0.5, 3.0], FollowingPolicy(dwell_s=3.0)) == [1] * 7


def test_nobody_goes_down_while_the_load_rises() -> None:
    """After the dwell one still stays where the last look brought certainly more than the looks before."""
    rising = Forecast(fast_per_s=0.5, slow_per_s=0.5, recent=((9.0, 0.5),), quick_per_s=0.2)
    assert not rising.rises
    stood = RungPosition(1, low_since_s=0.0)
    assert follow(_ladder(), stood, rising, 10.0, 0).rung == 0
    risen = replace(rising, fast_per_s=0.3, quick_per_s=0.9)
    assert risen.rises
    assert follow(_ladder(), stood, risen, 10.0, 0) == stood
    assert not Forecast().rises


def test_fewer_requests_may_wait_in_a_lull() -> None:
    """Half of what a rung clears within its SLO under a steady load, a fifth between peaks, and more than a batch."""
    ladder = _ladder()
    assert [patience(ladder, rung) for rung in ladder.rungs] == [2, 4, 18]
    assert [patience(ladder, rung, lull=True) for rung in ladder.rungs] == [2, 2, 7]
    batched = replace(ladder.rungs[0], service=replace(ladder.rungs[0].service, batch=8))
    assert patience(ladder, batched, lull=True) > 8
    assert Forecast(fast_per_s=9.0, slow_per_s=2.0, peak_per_s=9.0).lull
    assert not Forecast(fast_per_s=9.0, slow_per_s=3.5, peak_per_s=9.0).lull


def test_a_load_at_the_edge_does_not_flutter() -> None:
    """Rates that move 5 % around a rung's limit cause one switch, not many."""
    rates = [1.0 + 0.05 * (-1) ** second for second in range(40)]
    taken = _footing_after(rates, FollowingPolicy(dwell_s=0.0))
    assert sum(before != after for before, after in itertools.pairwise(taken)) <= 1


def test_requests_that_wait_raise_the_demand() -> None:
    """A queue is worked off by a higher rung even where the rate alone asks for none."""
    assert _footing_after([0.5])[-1] == 0
    assert _footing_after([0.5], waiting=30)[-1] == 2


def test_a_switch_that_does_not_pay_is_not_made() -> None:
    """Where a switch takes more than a dwell saves, one stays."""
    dear = FollowingPolicy(dwell_s=1.0, switching=Switching(write_s=10.0))
    assert _footing_after([3.0, 0.1, 0.1, 0.1, 0.1], dear) == [1] * 5


def test_a_budget_goes_before_the_load() -> None:
    """The highest rung within the budget is taken; if none is, the one that draws least."""
    assert _footing_after([15.0])[-1] == 2
    assert _footing_after([15.0], budget_w=40.0)[-1] == 1
    assert _footing_after([15.0], budget_w=1.0)[-1] == 0


def test_late_requests_press_and_time_relieves() -> None:
    """Each look with a late request is a step, up to the most; time takes them back; no limit, no pressure."""
    manner, pressure = FollowingPolicy(relief_s=60.0), 0.0
    for _ in range(10):
        pressure = pressed_by(pressure, 0.2, Observation(0.0, worst_s=0.3), False, manner)
    assert pressure == manner.press_most
    calm = Observation(0.0, 30.0, worst_s=0.1)
    assert pressed_by(pressure, 0.2, calm, False, manner) == pytest.approx(pressure - 0.5)
    assert pressed_by(0.2, 0.2, Observation(0.0, 60.0), False, manner) == 0.0
    assert pressed_by(1.0, None, Observation(0.0, worst_s=9.0), False, manner) == 1.0
    assert pressed_by(1.0, 0.2, Observation(0.0, p99_s=0.195), False, manner) == 2.0


def test_a_steady_load_far_from_its_limit_is_taken_for_lower() -> None:
    """Pressure falls below zero step by step, stops as the p99 draws near, and is gone at once with a late request."""
    manner, pressure, far = (
        FollowingPolicy(relax_s=60.0, relax_most=2.0),
        0.0,
        Observation(0.0, 30.0, p99_s=0.1, worst_s=0.1),
    )
    for _ in range(10):
        pressure = pressed_by(pressure, 0.2, far, True, manner)
    assert pressure == -2.0
    assert pressed_by(-1.0, 0.2, replace(far, p99_s=0.17), True, manner) == -1.0
    for seen, steady in ((replace(far, p99_s=0.19), True), (far, False), (replace(far, p99_s=None), True)):
        assert pressed_by(-1.0, 0.2, seen, steady, manner) == 0.0
    assert pressed_by(-2.0, 0.2, replace(far, worst_s=0.3), True, manner) == 1.0


def test_a_load_is_steady_without_a_peak() -> None:
    """A rate that stays is steady; one that was four times as high a minute ago is not."""
    forecast = Forecast()
    assert not forecast.steady
    for second in range(60):
        forecast = forecast.seen(float(second), 5.0, 1.0)
    assert forecast.steady
    for second in range(60, 70):
        forecast = forecast.seen(float(second), 20.0, 1.0)
    for second in range(70, 130):
        forecast = forecast.seen(float(second), 5.0, 1.0)
    assert not forecast.steady


def test_a_share_of_the_recent_peak_is_kept_ready() -> None:
    """With a reserve one does not go below what the share of the last minutes' peak asks for; the peak fades."""
    rates = [15.0, *[0.5] * 30]
    assert _footing_after(rates, FollowingPolicy(dwell_s=1.0, reserve=0.0))[-1] == 0
    assert _footing_after(rates, FollowingPolicy(dwell_s=1.0, reserve=0.2))[-1] == 1
    forecast = Forecast().seen(0.0, 10.0, 1.0)
    for second in range(1, 601):
        forecast = forecast.seen(float(second), 0.0, 1.0)
    assert forecast.peak_per_s == pytest.approx(10 * math.exp(-1), rel=0.01)
    assert forecast.seen(700.0, None, 1.0) == forecast


@given(st.floats(0.1, 20_000.0))
def test_so_few_late_requests_hold_nearly_every_minute(requests: float) -> None:
    """In 99 % of minutes no more are late than the p99 allows, and hardly fewer could be asked for."""
    share, allowed = late_share(requests), int(0.01 * requests)
    assert 0 < share < 0.01
    drawn = np.random.default_rng(0).poisson(share * max(1.0, requests), 20_000)
    assert 0.985 <= np.mean(drawn <= allowed) <= 0.995


@pytest.mark.slow
def test_nearly_every_minute_is_planned_for() -> None:
    """At a low rate a rung keeps the slowest of a minute within the SLO, not 99 % of an hour."""
    services = [_service(interval_s, idle_w=10 - interval_s) for interval_s in (0.05, 0.1, 0.2, 0.3)]
    low = ladder_of(services, 0.7).rungs[0]
    assert low.rate_per_s < 1
    times_s = (np.cumsum(np.random.default_rng(5).standard_exponential(60_000)) / low.rate_per_s).tolist()
    queue = simulate_queue(times_s, low.service, low.gather_s)
    assert queue.within_s(1 - late_share(60 * low.rate_per_s)) <= 0.7


def test_nothing_known_is_the_top() -> None:
    """Before anything was seen of a load, the top rung is taken."""
    assert follow(_ladder(), RungPosition(0), Forecast(), 0.0, 0).rung == 2


@pytest.mark.slow
def test_a_rung_says_what_its_slo_costs() -> None:
    """The watts that a second more of p99 would save: much where only it forbids the cheaper point, nothing without."""
    fast, slow = _service(0.02, idle_w=20.0), _service(0.1, idle_w=10.0)
    slos_s = [0.11 + 0.02 * number for number in range(40)]
    longer_s = next(slo_s for slo_s in slos_s if ladder_of([fast, slow], slo_s).rungs[0].service == slow)
    strict, lax = ladder_of([fast, slow], longer_s - 0.02), ladder_of([fast, slow], 1.1 * (longer_s - 0.02))
    saved_w = strict.rungs[0].power_w - lax.rungs[0].power_w
    assert strict.rungs[0].relief_w_per_s == pytest.approx(saved_w / (0.1 * strict.slo_s))
    assert saved_w > 5.0
    assert all(rung.relief_w_per_s == 0.0 for rung in ladder_of([fast], 0.3).rungs)
