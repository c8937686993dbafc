import itertools
from collections.abc import Sequence

import pytest

from polythrottle.backends.simulated import SimulatedDevice
from polythrottle.catalog import load_board, load_model
from polythrottle.daemon.control.events import Target
from polythrottle.daemon.traffic.local_sources import LEAST, LatencyWindow
from polythrottle.daemon.traffic.simulated import SimulatedSite, open_site
from polythrottle.domain.arrivals import Poisson
from polythrottle.domain.clock import VirtualClock
from polythrottle.domain.errors import InvalidInput, KnobRejected, PolythrottleError
from polythrottle.domain.measurement import EnergyKind, Latency
from polythrottle.domain.space import OperatingPoint


def _site(times_s: Sequence[float], clock: VirtualClock, **rest: object) -> SimulatedSite:
    device = SimulatedDevice(load_board("jetson-agx-orin"), noise=0.0)
    workload = device.serve(load_model("efficientnet-b7"))
    return SimulatedSite(device, workload, times_s, clock, **rest)  # type: ignore[arg-type]


def test_every_request_is_seen_once_whatever_the_looks() -> None:
    """Arrivals and answers add up to the requests, whether one looks each tenth of a second or each seven seconds."""
    times_s = list(itertools.takewhile(lambda time_s: time_s < 120, Poisson(4.0).times(1)))
    for period_s in (0.1, 1.0, 7.0):
        clock, latencies_s = VirtualClock(50.0), []
        site = _site(times_s, clock, note=lambda _, taken_s, kept=latencies_s: kept.append(taken_s))
        arrived = answered = 0
        while (seen := site.traffic.look(clock.now())) is not None:
            arrived, answered = arrived + (seen.arrived or 0), answered + (seen.answered or 0)
            assert arrived - answered >= (seen.waiting or 0)
            clock.sleep(period_s)
        assert arrived == answered == len(times_s) == len(latencies_s)
        assert min(latencies_s) > 0.09


def test_time_and_energy_of_the_board_follow_the_clock() -> None:
    """However long nobody looks, the board's time catches up, at most a batch ahead; its joules are those of idling."""
    clock = VirtualClock(7.0)
    site = _site([], clock)
    clock.sleep(100.0)
    first = site.board.read()
    clock.sleep(100.0)
    reading = site.board.read()
    assert reading.time_s == pytest.approx(200.0)
    assert site.idle_s == pytest.approx(200.0)
    assert (reading.energy_j - first.energy_j) / 100 == pytest.approx(15.0, rel=0.1)
    assert site.board.energy_kind is EnergyKind.SIMULATED
    assert "simulated" in site.board.title


def test_a_batch_is_gathered_as_long_as_it_may_be() -> None:
    """Two requests 0.1 s apart share a batch if the first may wait for 0.2 s, and do not if it may not."""
    for gather_s, together in ((0.2, True), (0.0, False)):
        clock, taken_s = VirtualClock(), []
        site = _site([1.0, 1.05], clock, note=lambda at_s, took_s, kept=taken_s: kept.append(at_s + took_s))
        site.traffic.serve(Target(OperatingPoint({"batch_size": 2}), gather_s))
        clock.sleep(3.0)
        site.traffic.look(clock.now())
        assert (taken_s[0] == pytest.approx(taken_s[1])) is together


def test_setting_a_knob_takes_time_in_which_nothing_is_served() -> None:
    """A write of a clock takes 17 ms and its effect 5 ms more; the same point again takes none."""
    clock = VirtualClock()
    site = _site([], clock)
    point = site.device.space.default.moved({"gpu_max_hz": 828_750_000, "gpu_min_hz": 114_750_000})
    site.board.apply(point)
    once_s = site.device.clock.now()
    assert once_s >= 0.022
    site.board.apply(point)
    assert site.device.clock.now() == once_s
    site.board.restore()
    assert site.board.verify() == ()
    assert site.switches == 3


def test_requests_before_the_first_point_was_set_are_not_held_against_it() -> None:
    """They are counted, but nobody learns how long they took; all later ones are seen, after later writes too."""
    site = _site([0.01 * number for number in range(1, 5)] + [3.0, 6.0], clock := VirtualClock(), warming=True)
    clock.sleep(0.02)
    assert site.traffic.look(clock.now()) is not None
    point = site.device.space.default.moved({"gpu_max_hz": 828_750_000, "gpu_min_hz": 114_750_000})
    site.board.apply(point)
    first = site.traffic.look(clock.now())
    assert first is not None
    assert (first.answered, first.worst_s, first.mean_s, first.waiting) == (0, None, None, 0)
    clock.sleep(2.0)
    quiet = site.traffic.look(clock.now())
    assert quiet is not None
    assert (quiet.answered, quiet.mean_s) == (0, None)
    clock.sleep(2.0)
    site.board.restore()
    later = site.traffic.look(clock.now())
    assert later is not None
    assert (later.arrived, later.answered) == (1, 1)
    assert later.worst_s is not None


def test_a_refused_level_changes_nothing() -> None:
    """A knob or batch that is not there is refused, and what held goes on holding."""
    site = _site([0.5], clock := VirtualClock())
    with pytest.raises(KnobRejected):
        site.board.apply(OperatingPoint({"gpu_max_hz": 1}))
    with pytest.raises(KnobRejected):
        site.traffic.serve(Target(OperatingPoint({"batch_size": 3})))
    clock.sleep(2.0)
    seen = site.traffic.look(clock.now())
    assert seen is not None
    assert seen.answered == 1


def test_senders_give_up_and_count_as_failed() -> None:
    """A queue beyond all capacity stays bounded: who waited too long has failed, which is seen."""
    site = _site([0.02 * number for number in range(2000)], clock := VirtualClock(), patience_s=2.0)
    failed = 0
    for _ in range(40):
        clock.sleep(1.0)
        seen = site.traffic.look(clock.now())
        assert seen is not None
        failed += seen.failed or 0
        assert (seen.waiting or 0) <= 2.5 * 50
    assert failed > 1000


def test_the_workload_is_down_after_the_last_request() -> None:
    """Requests that end let the workload end; before that it is up, also while nothing comes."""
    site = _site([5.0], clock := VirtualClock())
    assert site.traffic.look(clock.now()) is not None
    clock.sleep(10.0)
    last = site.traffic.look(clock.now())
    assert last is not None
    assert (last.arrived, last.answered, last.failed) == (1, 1, 0)
    assert site.traffic.look(clock.now()) is None


def test_the_same_seed_gives_the_same_load() -> None:
    """Two sites of one text see the same requests take as long."""
    means = []
    for _ in range(2):
        clock = VirtualClock()
        site = open_site("sim:poisson:5/s", "sim:jetson-agx-orin", "efficientnet-b7", clock)
        clock.sleep(30.0)
        seen = site.traffic.look(clock.now())
        assert seen is not None
        means.append(seen.mean_s)
        assert site.traffic.uri == "sim:poisson:5/s"
    assert means[0] == means[1]


@pytest.mark.parametrize(
    ("text", "device", "workload", "says"),
    [
        ("sim:closed", "sim:jetson-agx-orin", "efficientnet-b7", "need a rate"),
        ("sim:poison:3/s", "sim:jetson-agx-orin", "efficientnet-b7", "did you mean poisson"),
        ("sim:poisson:3", "sim:jetson-agx-orin", "efficientnet-b7", "not a rate"),
        ("sim:trace:none.csv@3/s", "sim:jetson-agx-orin", "efficientnet-b7", "no file"),
        ("sim:poisson:3/s", "sim:jetson-orin", "efficientnet-b7", "unknown"),
        ("sim:poisson:3/s", "sim:jetson-agx-orin", "efficientnet-b9", "unknown"),
    ],
)
def test_a_site_that_cannot_be_opened_says_why(text: str, device: str, workload: str, says: str) -> None:
    """Each mistake is one line."""
    with pytest.raises(PolythrottleError, match=says):
        list(itertools.islice(open_site(text, device, workload, VirtualClock())._coming, 1))


def test_requests_are_made_up_for_simulated_boards_only(tmp_path: object) -> None:
    """A recorded table serves no requests."""
    with pytest.raises(InvalidInput, match="simulated board"):
        open_site("sim:poisson:3/s", "cpu", "efficientnet-b7", VirtualClock())


def test_batches_beside_those_of_the_workload_can_be_asked_for() -> None:
    """A profile tuned with another batch can be followed."""
    site = open_site("sim:poisson:3/s", "sim:jetson-agx-orin", "efficientnet-b7", VirtualClock(), batches=(3,))
    site.traffic.serve(Target(OperatingPoint({"batch_size": 3})))


def test_lately_is_the_latency_of_the_last_minute() -> None:
    """The window's p99 is that of `Latency` on what lies in it, and unknown of fewer than twenty requests."""
    lately, latencies_s = LatencyWindow(60.0), [0.01 * (1 + 7 * number % 100) for number in range(500)]
    for number, latency_s in enumerate(latencies_s):
        lately.add(float(number), latency_s)
        lately.until(float(number))
    kept = Latency.of(latencies_s[-60:])
    assert (lately.p99_s, len(lately)) == (kept.p99_s, 60)
    assert lately.mean_s == pytest.approx(kept.mean_s)
    lately.until(float(len(latencies_s) + 60 - LEAST))
    assert lately.p99_s is None
    lately.until(1e6)
    assert lately.mean_s is None


def test_a_few_late_requests_at_the_start_are_no_p99_of_a_minute() -> None:
    """Before the window is full no more of its p99 is certain than the late ones make of all of it."""
    lately = LatencyWindow(60.0)
    for number in range(120):  # four seconds of 30/s, in which a switch delays five
        lately.add(number / 30, 0.2 if number in range(100, 105) else 0.03)
    assert (lately.p99_s, lately.p99_least_s) == (0.2, 0.03)
    for number in range(120, 150):
        lately.add(number / 30, 0.2)
    assert lately.p99_least_s == 0.2, "more are late than one in a hundred of a minute's"
    for number in range(150, 3600):
        lately.add(number / 30, 0.001 * (number % 97))
        lately.until(number / 30)
    assert lately.p99_least_s == lately.p99_s
    lately.clear()
    assert lately.p99_least_s is None
    for _ in range(LEAST):
        lately.add(200.0, 0.2)
    assert (lately.p99_s, lately.p99_least_s) == (0.2, 0.0), "of an instant nothing is certain"


@pytest.mark.parametrize("count", [LEAST, LEAST + 1, 99, 101, 250])
def test_what_a_p99_comes_to_at_least_is_known_at_any_moment(count: int) -> None:
    """However much of the window has passed, it is one of the latencies or nothing, and never above the p99."""
    lately = LatencyWindow(60.0)
    for number in range(count):
        lately.add(0.01 * number, 0.001 * (number + 1))
    for tenths in range(30, 590):
        lately.until(tenths / 10 + 0.037)
        assert 0.0 <= lately.p99_least_s <= lately.p99_s


def test_lately_is_bounded() -> None:
    """At most so many requests are remembered, the newest."""
    lately = LatencyWindow(60.0, most=50)
    for number in range(1000):
        lately.add(0.0, float(number + 1))
    assert len(lately) == 50
    assert lately.p99_s == 1000.0
    lately.clear()
    assert (len(lately), lately.mean_s) == (0, None)


def test_requests_while_the_board_is_released_are_not_held_against_the_next_point() -> None:
    """From a release on until the next point is set nothing is promised, as before the first one."""
    site = _site([0.5 * number for number in range(1, 30)], clock := VirtualClock(), warming=True)
    point = site.device.space.default.moved({"gpu_max_hz": 828_750_000, "gpu_min_hz": 114_750_000})
    site.board.apply(point)
    clock.sleep(3.0)
    before = site.traffic.look(clock.now())
    assert before is not None
    assert before.mean_s is not None
    site.board.release()
    clock.sleep(3.0)
    site.traffic.look(clock.now())
    site.board.apply(point)
    after = site.traffic.look(clock.now())
    assert after is not None
    assert (after.mean_s, after.worst_s) == (None, None)
