import contextlib
import math
from contextlib import nullcontext
from dataclasses import replace

import numpy as np
import pytest
from builders import FakeDevice, FakeWorkload
from builders import measured as measured_with

from polythrottle.domain.errors import TrialError
from polythrottle.domain.measurement import Interval, Measurement, Query, Reading, Window, saving_interval
from polythrottle.domain.ports import Sensor
from polythrottle.domain.problem import Constraint
from polythrottle.domain.space import OperatingPoint
from polythrottle.metering.early_stopping import Goal
from polythrottle.metering.energy import EnergyEstimate, WindowSample, attribute, trajectory
from polythrottle.metering.observed_window import ObservedWindow, measurement_of, with_intervals
from polythrottle.metering.point_measurement import measure
from polythrottle.metering.validity import Disturbed, check_readings
from polythrottle.testing.ground_truth import METERS, SENSORS, Rig, SensorFault, Traffic

POINT, RIG = OperatingPoint({"gpu_max_hz": 800_000_000, "batch_size": 4}), OperatingPoint({})
RUNS = 40


def seen(name: str, seed: int, traffic: Traffic | None = None, queries: int = 1500) -> tuple[Rig, Measurement]:
    """Return a window of a rig through one of the sensors."""
    traffic = traffic or Traffic(usual_s=0.009 + 0.00005 * seed, power_w=17.0 + 0.13 * seed)
    distortion = SENSORS[name]
    rig = Rig(traffic, distortion, seed, 3 * queries + 60 + 3 * int(distortion.sensor.settle_s / traffic.usual_s))
    window = Window(queries, 0.0, queries, timeout_s=3600.0)
    return rig, measure(rig, rig, RIG, window, sensor=distortion.sensor)


@pytest.mark.slow
@pytest.mark.parametrize("name", SENSORS)
def test_energy_is_within_its_interval(name: str) -> None:
    """Through every sensor about 95 % of 40 windows hold the truth; the benchmark counts 400."""
    held = 0
    for seed in range(RUNS):
        rig, measured = seen(name, seed)
        held += rig.traffic.energy_j in measured.intervals["energy"]
    assert 0.85 <= held / RUNS <= 1.0


def test_a_counter_that_steps_is_read_at_its_steps() -> None:
    """Between two steps of 100 ms energy is known to the time between two looks, and no longer to a step."""
    _, stepped = seen("counter in 100 ms steps", 1, queries=300)
    step_share = 0.1 / (stepped.window_s or 0.0)
    assert stepped.intervals["energy"].half / stepped.energy_j < step_share


def test_a_window_too_short_for_its_sensor_is_made_longer() -> None:
    """Power that averages over a second needs twelve, however few queries were asked for."""
    rig = Rig(Traffic(), SENSORS["1 s average, 10 Hz"], 0, 6000)
    measured = measure(
        rig, rig, RIG, Window(10, 0.0, 5000, timeout_s=60.0), sensor=SENSORS["1 s average, 10 Hz"].sensor
    )
    assert 12.0 <= (measured.window_s or 0.0) < 13.0
    assert "energy" in measured.intervals


def test_a_window_that_ends_by_its_queries_has_been_looked_at() -> None:
    """A thousand queries are over long before a thousand seconds, and their energy has an interval all the same."""
    rig = Rig(Traffic(), SENSORS["exact"], 0, 3000)
    measured = measure(rig, rig, RIG, Window(100, 1000.0, 1000, timeout_s=2000.0))
    assert measured.latency.queries == 1000
    assert measured.intervals["energy"].half < 0.02 * measured.energy_j


@pytest.mark.slow
@pytest.mark.parametrize("name", METERS)
def test_intervals_of_meters_at_the_wall_hold_the_truth(name: str) -> None:
    """Asked twice in each period, of windows as long as they need: 22 of 24 at least (`benchmarks/coverage.py`)."""
    distortion = METERS[name]
    queries, held = math.ceil(1.2 * distortion.sensor.least_s / 0.011), 0
    for seed in range(24):
        rig = Rig(Traffic(), distortion, seed, 4 * queries)
        window = Window(queries, 0.0, queries, timeout_s=3600.0)
        measured = measure(rig, rig, RIG, window, sensor=distortion.sensor)
        held += rig.traffic.energy_j in measured.intervals["energy"]
    assert held >= 22


def test_a_window_shorter_than_a_step_is_no_number() -> None:
    """It says what the sensor's step is, and what to do."""
    looks = [WindowSample(Reading(time_s, 20 * time_s)) for time_s in (0.0, 10.0, 20.0)]
    with pytest.raises(TrialError, match="moves every 30 s; use a longer window"):
        check_readings(looks, Sensor(step_s=30.0), closed=True)


def test_a_thousand_quick_queries_end_no_window_that_tells_nothing() -> None:
    """What averages over 430 ms needs five seconds for an interval, in which a small model answers thousands."""
    distortion = SENSORS["430 ms average, renewed so often"]
    rig = Rig(Traffic(usual_s=0.001), distortion, 0, 9000)
    measured = measure(rig, rig, RIG, Window(100, 0.0, 1000, timeout_s=60.0), sensor=distortion.sensor)
    assert measured.window_s == pytest.approx(distortion.sensor.least_s, abs=0.1)
    assert rig.traffic.energy_j in measured.intervals["energy"]


@pytest.mark.slow
def test_what_is_averaged_and_taken_for_a_moment_s_is_far_too_precise() -> None:
    """As of an INA3221: of 40 windows that end once precise, few hold the truth; where the mean is known, most do."""
    distortion, held = SENSORS["430 ms average, renewed so often"], {"moment": 0, "average": 0}
    window = Window(30, 0.0, 1000, timeout_s=3600.0, precision=0.02)
    for seed in range(40):
        for name, sensor in (("moment", Sensor()), ("average", distortion.sensor)):
            rig = Rig(Traffic(), distortion, seed, 3200)
            held[name] += rig.traffic.energy_j in measure(rig, rig, RIG, window, sensor=sensor).intervals["energy"]
    assert held["moment"] < 20
    assert held["average"] >= 35


def test_a_step_that_no_window_can_hold_is_said_at_once() -> None:
    """Nobody warms up for it, and what would do is named."""
    device = FakeDevice()
    window = Window(10, 0.0, 20, timeout_s=60.0)
    with pytest.raises(
        TrialError, match=r"moves every 100 s, and a window takes 60 s at most; .* or give --seconds 100"
    ):
        measure(device, FakeWorkload(device), POINT, window, sensor=Sensor(step_s=100.0))
    assert device.clock.now() == 0.0


def test_of_one_query_a_p99_is_known_from_below() -> None:
    """It lies below with 99 % probability, and below a median with half of that, which bounds nothing."""
    rig = Rig(Traffic(), SENSORS["exact"], 0, 30)
    found = measure(rig, rig, RIG, Window(1, 0.0, 1))
    assert found.intervals["p99"] == Interval(found.latency.p99_s or 0.0, math.inf)
    assert not {"p50", "mean", "energy"} & set(found.intervals)


def test_what_no_query_told_has_no_interval() -> None:
    """A limit on tokens where the window has none leaves them unknown, and nothing divides by them."""
    rig = Rig(Traffic(), SENSORS["exact"], 0, 3000)
    goal = Goal((Constraint.parse("tokens_per_j>=1/J"),))
    found = measure(rig, rig, RIG, Window(30, 0.0, 1000, precision=0.02), goal=goal)
    assert found.metric("tokens_per_j") is None
    assert "tokens_per_j" not in found.intervals


def test_power_that_drifts_is_repeated_and_then_refused() -> None:
    """A tenth over the window is a board that has not settled; three windows of it are enough."""
    with pytest.raises(TrialError, match=r"drifted by \+\d.*in 3 windows"):
        seen("exact", 2, Traffic(drift_per_s=0.02, wander=0.01))


class Stuck(FakeDevice):
    """A device whose energy stops after a second, or falls there."""

    def __init__(self, falls_j: float = 0.0) -> None:
        super().__init__(10.0)
        self.falls_j = falls_j

    def read(self) -> Reading:
        """Return the time, and an energy that is wrong after a second."""
        now = super().read()
        late = now.time_s > 1.0
        return replace(now, energy_j=10.0 - self.falls_j if late else now.energy_j) if late else now


@pytest.mark.parametrize(("falls_j", "told"), [(0.0, "stopped moving"), (4.0, "fell by")])
def test_a_sensor_that_breaks_within_the_window_spoils_it(falls_j: float, told: str) -> None:
    """One that stops or falls half way is never a number, though it did move before."""
    device = Stuck(falls_j)
    with pytest.raises(TrialError, match=told):
        measure(device, FakeWorkload(device), POINT, Window(queries=100, duration_s=2.0, warmup=0))


STEPS = SENSORS["counter in 100 ms steps"]
QUERIES = 600
BEGINS_S, LASTS_S = 0.1, QUERIES * Traffic().mean_s


def faulty(fault: SensorFault, name: str = "counter in 100 ms steps", seed: int = 0) -> tuple[Rig, Measurement]:
    """Return a window through a sensor that something goes wrong with."""
    rig = Rig(Traffic(), SENSORS[name], seed, 5000, fault)
    return rig, measure(rig, rig, RIG, Window(QUERIES, 0.0, QUERIES, timeout_s=3600.0), sensor=SENSORS[name].sensor)


@pytest.mark.parametrize("name", ["counter in 100 ms steps", "25 of every 100 ms", "rounded to 1 W, 10 Hz"])
@pytest.mark.parametrize("steps", [3, 4, 5])
def test_a_counter_that_stops_in_its_last_steps_spoils_the_window(name: str, steps: int) -> None:
    """The last three to five steps are enough to tell, and the reason says when it stopped."""
    with pytest.raises(TrialError, match=r"stopped moving 0\.\d+ s before the window ended; in the window after"):
        faulty(SensorFault(BEGINS_S + LASTS_S - 0.1 * steps, math.inf), name)


@pytest.mark.parametrize("name", ["exact", "counter in 100 ms steps", "rounded to 1 W, 10 Hz"])
@pytest.mark.parametrize(
    "fault",
    [
        SensorFault(3.0, 1.5),
        SensorFault(3.0, 1.5, lost=False),
        SensorFault(3.0, by_j=100.0),
        SensorFault(3.0, by_j=1e6),
        SensorFault(3.0, by_j=-10.0),
    ],
    ids=["lost", "caught up", "100 J", "1 MJ", "back"],
)
def test_a_reading_that_stands_still_jumps_or_falls_is_looked_at_again(name: str, fault: SensorFault) -> None:
    """The window is repeated, and what is reported is of one without the fault."""
    rig, measured = faulty(fault, name)
    assert measured.requests is not None
    assert measured.requests > 2 * QUERIES
    assert rig.traffic.energy_j in measured.intervals["energy"]


@pytest.mark.slow
@pytest.mark.parametrize("name", SENSORS)
def test_a_value_lies_in_its_interval_even_where_a_fault_is_too_small_to_see(name: str) -> None:
    """A lost step, a joule more or one less: the value is in the interval, and the truth in most of them."""
    held = []
    for seed in range(12):
        for fault in (
            SensorFault(BEGINS_S + LASTS_S - 0.1, math.inf),
            SensorFault(3.0, by_j=1.0),
            SensorFault(3.0, 0.1),
        ):
            with contextlib.suppress(TrialError):
                rig, measured = faulty(fault, name, seed)
                assert all(_value(measured, each) in interval for each, interval in measured.intervals.items())
                if "energy" in measured.intervals:
                    held.append(rig.traffic.energy_j in measured.intervals["energy"])
    assert not held or np.mean(held) > 0.8


def _value(measured: Measurement, name: str) -> float:
    value = measured.energy_j if name == "energy" else measured.metric(name)
    assert value is not None
    return value


def test_a_meter_whose_value_is_not_in_its_interval_is_not_believed() -> None:
    """Neither can be reported then."""
    _, measured = seen("exact", 3, queries=200)
    with pytest.raises(TrialError, match=r"energy is .* and its interval"):
        with_intervals(measured, {"energy": Interval(0.0, measured.energy_j / 2)})


class Backwards(FakeDevice):
    """A device whose clock is set back for one reading."""

    looks = 0

    def read(self) -> Reading:
        """Return the ninth look a second early."""
        self.looks += 1
        now = super().read()
        return replace(now, time_s=now.time_s - 1.0) if self.looks == 9 else now


def test_a_clock_that_jumps_back_spoils_the_window() -> None:
    """Time only goes forward."""
    device = Backwards()
    with pytest.raises(TrialError, match="clock went back"):
        measure(device, FakeWorkload(device), POINT, Window(queries=100, duration_s=2.0, warmup=0))


class Hiccup(FakeWorkload):
    """A workload that is held up for two seconds now and then."""

    def __init__(self, device: FakeDevice, at: tuple[int, ...]) -> None:
        super().__init__(device)
        self.at, self.count = at, 0

    def query(self) -> Query:
        """Serve as ever, after a while."""
        self.count += 1
        if self.count in self.at:
            self.device.clock.sleep(2.0)
        return super().query()


def test_a_window_that_was_held_up_is_repeated() -> None:
    """Nothing served for two seconds: something else ran. Once is repeated and counted, always is a failure."""
    device = FakeDevice()
    window = Window(queries=100, duration_s=0.0)
    measured = measure(device, Hiccup(device, (50,)), POINT, window)
    assert measured.requests == 2 * (100 + window.warmup)
    assert measured.latency.queries == 100
    with pytest.raises(TrialError, match=r"held it up \(and so in 3 windows\)"):
        measure(device, Hiccup(device, tuple(range(50, 1000, 50))), POINT, window)


@pytest.mark.parametrize(("name", "metric"), [("per_token_s", "tpot_p99"), ("first_s", "ttft_p99")])
def test_times_that_too_many_answers_do_not_tell_are_unknown(name: str, metric: str) -> None:
    """One in a hundred may be missing; of more, the slow ones may be. Answers with no second token owe no time."""
    whole, single = Query(2.0, first_s=1.0, tokens=5), Query(1.0, first_s=1.0, tokens=1)
    mute = replace(whole, first_s=None)
    for missing, told in ((0, True), (1, True), (2, False), (100, False)):
        window = ObservedWindow(FakeDevice(), Sensor())
        window.queries = [mute] * missing + [whole] * (100 - missing) + [single] * (name == "per_token_s")
        assert len(window.values(name)) == (100 - missing if told else 0)
        assert len(window.values("latency_s")) == len(window.queries)
    window.looks = [WindowSample(Reading(at_s, at_s), 0, 0, 0) for at_s in (0.0, 1.0)]
    assert window.interval(metric) is None


def test_a_request_that_does_not_tell_is_not_good_and_too_many_leave_goodput_unknown() -> None:
    """Answers of one token have no time between tokens to break; of gaps as many may be long as the limit says."""
    limits = tuple(map(Constraint.parse, ("tpot_p99<=1s", "ttft_p99<=2s for prompts>9")))
    good = Query(2.0, first_s=1.0, tokens=5, prompt_tokens=5)
    single = replace(good, first_s=2.0, tokens=1)
    late, slow = replace(good, latency_s=4.0, first_s=3.0, prompt_tokens=10), replace(good, latency_s=9.0)
    mute, lengthless = replace(good, lumped=True), replace(good, prompt_tokens=None)

    def counted(*queries: Query, limits: tuple[Constraint, ...] = limits) -> tuple[int, int] | None:
        window = ObservedWindow(FakeDevice(), Sensor(), goal=Goal(judged=limits))
        window.looks = [WindowSample(Reading(at_s, at_s), 0, 0, 0) for at_s in (0.0, 1.0)]
        for query in queries:
            window.take(query)
        window.look()
        window.looks[-1] = replace(window.looks[-1], reading=Reading(2.0, 2.0))
        found = measurement_of(window, censored=True).goodput
        return None if found is None else (found.requests, found.good)

    assert counted(*[good] * 97, single, late, slow) == (100, 98)
    assert counted(*[good] * 99, mute) == counted(*[good] * 99, lengthless) == (100, 99)
    assert counted(*[good] * 98, mute, lengthless) is None
    assert counted(*[slow] * 98, mute, replace(lengthless, latency_s=9.0)) == (100, 0)
    gaps = (replace(good, gaps_s=(0.1,) * 99 + (5.0,)), replace(good, gaps_s=(0.1,) * 9 + (5.0,)), single)
    assert counted(*gaps, limits=(Constraint.parse("itl_p99<=1s"),)) == (3, 2)
    for nothing in ((), (Constraint.parse("mean<=1s"),), (Constraint.parse("ttft_p50<=1s"),)):
        assert counted(good, good, limits=nothing) is None
    assert counted(replace(good, tokens=None), limits=(Constraint.parse("p99<=9s"),)) is None


def test_idle_power_is_measured_apart() -> None:
    """What an item costs is its own energy and its share of what would have been drawn anyway."""

    class Working(FakeDevice):
        """Draws 4 W, and 6 W more while it serves."""

        busy_s = 0.0

        def read(self) -> Reading:
            return replace(super().read(), energy_j=4.0 * self.clock.now() + 6.0 * self.busy_s)

    class Served(FakeWorkload):
        def query(self) -> Query:
            self.device.busy_s += 0.01 * self.batch  # type: ignore[attr-defined]
            return super().query()

    device = Working()
    measured = measure(device, Served(device), POINT, Window(idle_s=2.0))
    assert measured.idle_power_w == pytest.approx(4.0)
    assert measured.energy_j == pytest.approx(0.1)
    assert measured.idle_j == pytest.approx(0.04)
    assert measured.marginal_j == pytest.approx(0.06)
    assert measure(device, Served(device), POINT, Window()).idle_power_w is None


def test_idle_power_above_that_of_the_window_splits_nothing() -> None:
    """Somebody else worked while the device should have idled: shares are unknown, not all or none."""
    assert measured_with(idle_power_w=99.9).idle_j == pytest.approx(0.999)
    for above_w in (100.0, 250.0):
        assert measured_with(idle_power_w=above_w).idle_j is None
        assert measured_with(idle_power_w=above_w).marginal_j is None


def test_idle_power_is_unknown_where_the_reading_stops_meanwhile() -> None:
    """A total that stands still or jumps while nothing works says nothing of idling."""
    for fault in (SensorFault(8.0, math.inf), SensorFault(8.0, by_j=500.0)):
        rig = Rig(Traffic(), STEPS, 0, 5000, fault)
        window = Window(QUERIES, 0.0, QUERIES, timeout_s=3600.0, idle_s=3.0)
        assert measure(rig, rig, RIG, window, sensor=STEPS.sensor).idle_power_w is None


def test_a_device_is_cooled_before_its_window() -> None:
    """It stands idle until it is as cool as asked, and a board that never is fails with its temperature."""

    class Warm(FakeDevice):
        def read(self) -> Reading:
            return replace(super().read(), temperature_c=70.0 - 0.5 * self.clock.now())

    device = Warm()
    measured = measure(device, FakeWorkload(device), POINT, Window(cool_c=50.0))
    assert (measured.temperature_c or 99.0) <= 50.0
    with pytest.raises(TrialError, match=r"at 40\.0 °C and does not cool down to 30\.0 °C"):
        measure(other := FakeDevice(), FakeWorkload(other), POINT, Window(cool_c=30.0))


def test_requests_that_overlap_share_the_meter_exactly() -> None:
    """Whatever overlaps, all shares and what was idle sum to the energy read, and more items take more."""
    rng = np.random.default_rng(4)
    queries = [
        Query(float(rng.uniform(0.1, 2.0)), int(rng.integers(1, 9)), float(rng.uniform(0.0, 9.0))) for _ in range(60)
    ]
    readings = [Reading(t, 12.0 * t + 3.0 * np.sin(t)) for t in np.linspace(0.0, 12.0, 40).tolist()]
    shares, idle = attribute(queries, readings)
    assert sum(shares) + idle == pytest.approx(readings[-1].energy_j - readings[0].energy_j, rel=1e-12)
    pair = attribute([Query(1.0, 3, 0.0), Query(1.0, 1, 0.0)], [Reading(0.0, 0.0), Reading(2.0, 8.0)])
    assert pair[0] == pytest.approx((3.0, 1.0))
    assert pair[1] == pytest.approx(4.0)


def test_a_saving_needs_intervals_and_is_proven_by_them() -> None:
    """Twenty per cent with tight intervals excludes zero; two per cent does not; without intervals nothing is known."""
    _, measured = seen("exact", 3)
    bare = replace(measured, intervals={})
    assert saving_interval(bare, measured) is None
    small, large = (saving_interval(_less(measured, share), measured) for share in (0.02, 0.2))
    assert small is not None
    assert 0.0 in small
    assert large is not None
    assert 0.1 < large.low < large.high < 0.3


def _less(measured: Measurement, share: float) -> Measurement:
    factor = 1 - share
    energy: Interval = measured.intervals["energy"].scaled(factor)
    return replace(measured, energy_j=measured.energy_j * factor, intervals={**measured.intervals, "energy": energy})


def test_two_looks_at_the_same_moment_do_not_hide_what_stirs_the_rounding() -> None:
    """Nor divide by nothing: what power varies by between the others stirs readings of 1 W all the same."""
    rng, looks = np.random.default_rng(0), []
    for place, energy_j in enumerate(np.cumsum(20 + 3 * rng.standard_normal(40)).tolist()):
        looks += [WindowSample(Reading(float(place), energy_j), place)] * (2 if place == 20 else 1)
    once = EnergyEstimate(
        trajectory([each for place, each in enumerate(looks) if place != 21], Sensor()), Sensor(quantum_w=1.0)
    )
    twice = EnergyEstimate(trajectory(looks, Sensor()), Sensor(quantum_w=1.0))
    assert twice._stirred_w() == once._stirred_w() > 2


@pytest.mark.parametrize(("between_s", "told"), [(0.001, False), (0.02, True)])
def test_power_of_an_instant_may_be_uneven(between_s: float, told: bool) -> None:
    """Who had the processor for a millisecond makes it so; what lasts longer than that is a jump."""
    joules = [0.0, 0.1, 0.2, 0.3, 1.3, 1.4, 1.5, 1.6, 1.7, 1.8, 1.9, 2.0]
    looks = [WindowSample(Reading(number * between_s, total_j)) for number, total_j in enumerate(joules)]
    with pytest.raises(Disturbed, match="jumped by 1 J") if told else nullcontext():
        check_readings(looks, Sensor(), closed=True)
