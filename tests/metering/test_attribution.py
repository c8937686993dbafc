import asyncio
import math

import numpy as np
import pytest
from builders import FakeDevice, FakeWorkload

from polythrottle.backends.simulated import SimulatedDevice
from polythrottle.catalog import load_board, load_model
from polythrottle.domain.arrivals import CLOSED, Arrivals, Poisson
from polythrottle.domain.clock import SystemClock
from polythrottle.domain.measurement import Query, Reading, Window
from polythrottle.domain.ports import Sensor
from polythrottle.domain.space import OperatingPoint, SearchSpace
from polythrottle.metering.energy import Attribution, attribute, attributed
from polythrottle.metering.point_measurement import measure
from polythrottle.testing.ground_truth import IdleServer

RIG = OperatingPoint({})


def kept_of(rig: IdleServer, arrivals: Arrivals, window: Window, sensor: Sensor | None = None) -> Attribution:
    """Return a window of a rig, request by request."""
    kept: list[Attribution] = []
    measure(rig, rig, RIG, window, arrivals=arrivals, sensor=sensor, kept=kept.append)
    assert len(kept) == 1
    return kept[0]


def test_shares_and_idle_sum_to_the_meter_to_the_last_bit() -> None:
    """Whatever overlaps, and whether idle power is known or not: `math.fsum` of all is the energy read."""
    for seed in range(50):
        rng = np.random.default_rng(seed)
        queries = [
            Query(float(rng.uniform(0.001, 2.0)), int(rng.integers(1, 9)), float(rng.uniform(-1.0, 11.0)))
            for _ in range(int(rng.integers(0, 80)))
        ]
        times = np.sort(rng.uniform(0.0, 10.0, 30))
        readings = [
            Reading(t, e) for t, e in zip(times.tolist(), np.cumsum(rng.exponential(3.0, 30)).tolist(), strict=True)
        ]
        for idle_w in (None, 0.0, 2.0, 1e9):
            shares, idle = attribute(queries, readings, idle_w)
            assert min((*shares, idle)) >= 0
            assert math.fsum([*shares, idle]) == readings[-1].energy_j - readings[0].energy_j


def test_power_without_work_is_that_of_the_idle_device() -> None:
    """A request of a tenth of the time takes what the device drew beyond idling, and idling meanwhile."""
    query, readings = Query(1.0, 1, 2.0), [Reading(0.0, 0.0), Reading(10.0, 70.0)]
    for idle_w, own_j in ((None, 7.0), (4.0, 34.0), (9.0, 7.0)):
        shares, idle = attribute([query], readings, idle_w)
        assert (*shares, idle) == pytest.approx((own_j, 70.0 - own_j))


def test_a_request_that_waits_takes_nothing_before_it_is_sent() -> None:
    """Of two that were meant for the same moment, each is under way while the server has it."""
    pair = [Query(1.0, 1, 0.0, sent_s=0.0), Query(3.0, 1, 0.0, sent_s=1.0)]
    shares, idle = attribute(pair, [Reading(0.0, 0.0), Reading(4.0, 8.0)])
    assert (*shares, idle) == pytest.approx((2.0, 4.0, 2.0))


def test_readings_at_one_moment_lose_nothing() -> None:
    """A total that moves between two readings of the same time is shared all the same."""
    readings = [Reading(0.0, 0.0), Reading(1.0, 1.0), Reading(1.0, 3.0), Reading(2.0, 4.0)]
    shares, idle = attribute([Query(0.5, 1, 0.5)], readings)
    assert math.fsum([*shares, idle]) == 4.0


def test_a_request_at_the_edge_counts_as_far_as_it_lies_within() -> None:
    """What was over before or began after is left out; idle is shared by the items answered in time."""
    queries = [Query(1.0, 1, 3.0), Query(1.0, 1, 9.5), Query(2.0, 3, 9.0), Query(1.0, 1, 13.5), Query(1.0, 1, 15.0)]
    found = attributed(queries, [Reading(10.0, 0.0), Reading(14.0, 8.0)], factor=2.0)
    assert [(each.intended_s, each.within) for each in found.requests] == [(-1.0, 0.5), (-0.5, 0.5), (3.5, 0.5)]
    assert found.window_s == 4.0
    assert found.meter_j == 16.0
    assert found.idle_j == pytest.approx(10.0)
    assert [each.idle_share_j for each in found.requests] == pytest.approx([7.5, 2.5, 0.0])


@pytest.mark.parametrize("step_s", [0.0, 0.1])
def test_a_measured_window_gives_each_request_what_it_took(step_s: float) -> None:
    """Of a rig of known truth: 10 W while it waits, and 0.2 J a request besides, through a counter of steps too."""
    rig, service_s, rate_per_s = IdleServer(3, step_s=step_s), 0.01, 20.0
    found = kept_of(rig, Poisson(rate_per_s), Window(1000, 0.0, 1000, timeout_s=600.0, idle_s=2.0), Sensor(step_s))
    whole = [each.energy_j for each in found.requests if each.within == 1.0]
    assert len(whole) > 950
    assert np.mean(whole) == pytest.approx(0.2 + 10.0 * service_s, rel=0.03)
    assert found.idle_j == pytest.approx(
        10.0 * (found.window_s - sum(e.end_s - e.start_s for e in found.requests)), rel=0.01
    )
    assert found.meter_j == pytest.approx(rig.true_energy_j(rate_per_s) * rate_per_s * found.window_s, rel=0.05)
    shared = math.fsum(each.idle_share_j for each in found.requests)
    assert shared == pytest.approx(found.idle_j, rel=1e-9)


def test_requests_of_one_batch_share_it_evenly() -> None:
    """Those that waited for others to come are not charged for that, and their order is that of their moments."""
    device = FakeDevice(power_w=10.0)
    kept: list[Attribution] = []
    point = OperatingPoint({"gpu_max_hz": 800_000_000, "batch_size": 4})
    workload, window = FakeWorkload(device), Window(40, 0.0, 40, timeout_s=60.0)
    measure(device, workload, point, window, arrivals=Poisson(20.0), kept=kept.append)
    whole = [each for each in kept[0].requests if each.within == 1.0]
    assert [each.energy_j for each in whole] == pytest.approx([0.1] * len(whole))
    assert all(each.start_s >= each.intended_s for each in whole)
    assert kept[0].idle_j == pytest.approx(kept[0].meter_j - 0.1 * len(whole), abs=0.4)
    moments = [each.intended_s for each in kept[0].requests]
    assert moments == sorted(moments)


def test_a_batch_is_whole_where_the_window_ends_within_it() -> None:
    """A window of six requests in batches of four has eight in its table: all that were served in it."""
    device = FakeDevice()
    kept: list[Attribution] = []
    point = OperatingPoint({"gpu_max_hz": 800_000_000, "batch_size": 4})
    window = Window(6, 0.0, 6, warmup=4, timeout_s=60.0)
    measure(device, FakeWorkload(device), point, window, arrivals=Poisson(20.0), kept=kept.append)
    assert len(kept[0].requests) == 8


def test_the_measurement_is_the_same_with_and_without_a_table() -> None:
    """Keeping requests changes no figure of the window itself."""
    board, model = load_board("jetson-agx-orin"), load_model("resnet50")

    def seen(arrivals: Arrivals, kept: list[Attribution] | None) -> tuple[float, float]:
        device = SimulatedDevice(board)
        workload = device.serve(model)
        point, window = device.space.default.moved({}), Window(200, 0.0, 200, timeout_s=600.0)
        point = OperatingPoint({**point, **workload.space.default})
        found = measure(device, workload, point, window, arrivals=arrivals, kept=None if kept is None else kept.append)
        return found.energy_j, found.latency.mean_s

    for arrivals in (CLOSED, Poisson(20.0)):
        kept: list[Attribution] = []
        assert seen(arrivals, None) == seen(arrivals, kept)
        assert len(kept[0].requests) >= 199


class Sleeping:
    """A service that is several queries at once on real time, and a device that draws 10 W."""

    uri, title, boundary = "sleeping", "a sleeping service", "a test"
    space = SearchSpace.unit()
    energy_kind = FakeDevice.energy_kind

    def __init__(self, concurrency: int) -> None:
        self.clock, self.concurrency, self._sent = SystemClock(), concurrency, 0

    def apply(self, point: OperatingPoint) -> None:
        """Take no knobs."""

    def read(self) -> Reading:
        """Return 10 W times the time."""
        return Reading(now_s := self.clock.now(), 10.0 * now_s)

    def query(self) -> Query:
        """Not used: queries overlap."""
        raise AssertionError

    async def send(self) -> Query:
        """Take two milliseconds, and a second once, ninety queries from the start."""
        started_s = self.clock.now()
        self._sent += 1
        await asyncio.sleep(1.0 if self._sent == 90 else 0.002)
        return Query(self.clock.now() - started_s)

    async def hang_up(self) -> None:
        """Do nothing."""


@pytest.mark.parametrize(("arrivals", "concurrency"), [(CLOSED, 4), (Poisson(300.0), 1)])
def test_requests_under_way_at_the_end_are_waited_for(arrivals: Arrivals, concurrency: int) -> None:
    """All that overlapped the window are in its table, answered after its end or not, and sum to its meter."""
    service, kept = Sleeping(concurrency), list[Attribution]()
    window = Window(100, 0.0, 100, timeout_s=60.0)
    measure(service, service, RIG, window, arrivals=arrivals, kept=kept.append)  # type: ignore[arg-type]
    found = kept[0]
    assert found.meter_j == pytest.approx(10.0 * found.window_s)
    assert all(each.start_s < found.window_s and each.end_s > 0 for each in found.requests)
    # The longest, and not the only long one: a busy machine holds up others too.
    slow = max(found.requests, key=lambda each: each.end_s - each.start_s)
    assert slow.end_s - slow.start_s >= 1.0
    assert slow.end_s > found.window_s
    assert 0 < slow.within < 1
    assert slow.idle_share_j == 0
