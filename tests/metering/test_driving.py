import ast
import asyncio
import inspect
import itertools
import math
import random
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from builders import FakeDevice, FakeWorkload
from loopback import EchoWorkload, echo_server, straggling

from polythrottle.backends.cpu import CpuDevice
from polythrottle.backends.simulated import SimulatedDevice
from polythrottle.catalog import load_board, load_model
from polythrottle.domain.arrivals import CLOSED, Arrivals, Burst, Poisson, Trace, Uniform
from polythrottle.domain.clock import SystemClock, VirtualClock
from polythrottle.domain.errors import BadFile, DeviceError, InvalidInput, TrialError
from polythrottle.domain.measurement import Query, Window
from polythrottle.domain.ports import Concurrent, Discounting, Sensor
from polythrottle.domain.space import OperatingPoint, SearchSpace
from polythrottle.metering.load import Ledger, batch_of, drive
from polythrottle.metering.window import warm_up
from polythrottle.tuning.setup import Setup


class Server:
    """A single server on virtual time, which takes as long for each query as it is told."""

    uri = "server"
    space = SearchSpace.unit()

    def __init__(self, service_s: Callable[[], float], items: int = 1) -> None:
        self.clock = VirtualClock()
        self.service_s, self.items = service_s, items

    def apply(self, point: OperatingPoint) -> None:
        """Take no knobs."""

    def query(self) -> Query:
        """Let the time pass that a query takes."""
        service_s = self.service_s()
        self.clock.sleep(service_s)
        return Query(service_s, self.items)

    def close(self) -> None:
        """Do nothing."""


def _latencies(server: Server, arrivals: Arrivals, count: int, seed: int = 0, batch: int = 1) -> np.ndarray:
    with drive(server, arrivals, server.clock, seed, batch=batch) as load:
        return np.fromiter((query.latency_s for query in itertools.islice(load, count)), float, count)


def _interval(blocks: np.ndarray) -> tuple[float, float]:
    """Return the 95 % interval of a mean from the means of twenty blocks (Student's t, 19 degrees)."""
    half = 2.093 * blocks.std(ddof=1) / math.sqrt(len(blocks))
    return float(blocks.mean() - half), float(blocks.mean() + half)


def _blocks(values: np.ndarray, statistic: Callable[..., np.ndarray]) -> np.ndarray:
    return np.asarray(statistic(values.reshape(20, -1), axis=1))


def _p99(values: np.ndarray, axis: int) -> np.ndarray:
    return np.asarray(np.quantile(values, 0.99, axis=axis))


def _holds(expected: float, values: np.ndarray, statistic: Callable[..., np.ndarray]) -> bool:
    low, high = _interval(_blocks(values, statistic))
    return low <= expected <= high


SEEDS = range(8)
SERVICE_S, LOAD = 0.01, 0.7
COUNT = 60_000


def _seen(draw: Callable[[random.Random], float]) -> Iterator[np.ndarray]:
    """Yield latencies behind a queue with Poisson arrivals at seven tenths of what the server can do, once per seed."""
    for seed in SEEDS:
        chance = random.Random(seed)
        yield _latencies(Server(lambda chance=chance: draw(chance)), Poisson(LOAD / SERVICE_S), COUNT, seed)  # type: ignore[misc]


@pytest.mark.slow
def test_waiting_agrees_with_the_formulas_for_exponential_service() -> None:
    """M/M/1: the mean wait is load × service / (1 - load), and the time in the system is exponential.

    Kleinrock, Queueing Systems I (1975), section 3.2; its 99th percentile is ln(100) service / (1 - load).
    """
    mean_s, p99_s = LOAD * SERVICE_S / (1 - LOAD) + SERVICE_S, math.log(100) * SERVICE_S / (1 - LOAD)
    held = [
        (_holds(mean_s, seen, np.mean), _holds(p99_s, seen, _p99))
        for seen in _seen(lambda chance: chance.expovariate(1 / SERVICE_S))
    ]
    assert min(sum(column) for column in zip(*held, strict=True)) >= 7


def _crommelin(wait_s: float) -> float:
    """Return the chance to wait at most so long before a server of constant time (Crommelin 1932)."""
    rate_per_s = LOAD / SERVICE_S
    terms = (
        (rate_per_s * (k * SERVICE_S - wait_s)) ** k
        / math.factorial(k)
        * math.exp(-rate_per_s * (k * SERVICE_S - wait_s))
        for k in range(math.floor(wait_s / SERVICE_S) + 1)
    )
    return (1 - LOAD) * math.fsum(terms)


@pytest.mark.slow
def test_waiting_agrees_with_the_formulas_for_constant_service() -> None:
    """M/D/1: the mean wait is half that of M/M/1, and its 99th percentile that of Crommelin's series."""
    low, high = 0.0, 0.2
    for _ in range(60):
        low, high = ((low + high) / 2, high) if _crommelin((low + high) / 2) < 0.99 else (low, (low + high) / 2)
    mean_s = LOAD * SERVICE_S / (1 - LOAD) / 2 + SERVICE_S
    held = [(_holds(mean_s, seen, np.mean), _holds(low + SERVICE_S, seen, _p99)) for seen in _seen(lambda _: SERVICE_S)]
    assert min(sum(column) for column in zip(*held, strict=True)) >= 7


def test_the_queue_is_exact_for_any_arrivals_and_service() -> None:
    """Every single latency is what Lindley's recursion makes of the same arrivals and service times."""
    for arrivals in (Uniform(80.0), Poisson(80.0), Burst(80.0)):
        chance, again = random.Random(5), random.Random(5)
        seen = _latencies(Server(lambda chance=chance: chance.uniform(0.001, 0.02)), arrivals, 5000, seed=3)  # type: ignore[misc]
        times = arrivals.times(3)
        assert times is not None
        free_s = 0.0
        for latency_s, time_s in zip(seen.tolist(), times, strict=False):
            free_s = max(free_s, time_s) + again.uniform(0.001, 0.02)
            assert latency_s == pytest.approx(free_s - time_s, abs=1e-9)


def test_a_pause_of_the_server_is_seen_by_all_that_would_have_come() -> None:
    """No coordinated omission: one second of standstill is a hundred late requests, where a closed loop sees one."""
    pauses = iter([0.001] * 500 + [1.0] + [0.001] * 499)
    opened = _latencies(Server(lambda: next(pauses)), Uniform(100.0), 1000)
    assert 95 < np.sum(opened > 0.05) < 112
    pauses = iter([0.001] * 500 + [1.0] + [0.001] * 499)
    assert np.sum(_latencies(Server(lambda: next(pauses)), CLOSED, 1000) > 0.05) == 1


def test_a_batch_goes_out_when_its_last_request_has_come() -> None:
    """Each request counts from its own start, its items are its own, and a query's are shared evenly."""
    server = Server(lambda: 0.01, items=8)
    with drive(server, Uniform(4.0), server.clock, 0, batch=4) as load:
        queries = list(itertools.islice(load, 8))
    assert [query.items for query in queries] == [2] * 8
    assert [query.latency_s for query in queries] == pytest.approx([0.76, 0.51, 0.26, 0.01] * 2)
    assert np.diff([query.start_s for query in queries]) == pytest.approx(0.25)
    assert load.report.sent == 2


def test_a_batch_that_is_not_what_was_sent_spoils_the_trial() -> None:
    """Three items for four requests belong to nobody."""
    server = Server(lambda: 0.01, items=3)
    with drive(server, Uniform(4.0), server.clock, 0, batch=4) as load, pytest.raises(TrialError, match="3 items"):
        next(load)


def test_the_batch_is_the_points_or_the_workloads_own() -> None:
    """A point may leave it out; what has no such knob answers one request at a time."""
    workload = FakeWorkload(FakeDevice())
    assert batch_of(workload, {"batch_size": 8, "gpu_max_hz": 1}) == 8
    assert batch_of(workload, {"gpu_max_hz": 1}) == 1
    assert batch_of(Server(lambda: 1.0), {}) == 1


def test_a_closed_loop_is_one_query_after_another() -> None:
    """Nothing waits, nothing is late, and every query says when it was sent."""
    device = FakeDevice()
    with drive(FakeWorkload(device), CLOSED, device.clock, 0) as load:
        queries = list(itertools.islice(load, 3))
    assert [query.start_s for query in queries] == pytest.approx([0.0, 0.01, 0.02])
    assert load.report.sent == 3
    assert load.report.late_p99_s is None
    assert load.report.cpu_s == 0.0


def test_nothing_is_sent_before_it_is_asked_for_or_after_the_end() -> None:
    """A load that nobody looks at costs nothing, and one that was closed is over."""
    server = Server(lambda: 0.01)
    load = drive(server, Poisson(50.0), server.clock, 0)
    assert server.clock.now() == 0.0
    next(load)
    load.close()
    assert list(load) == []
    assert load.report.sent == 1


def test_arrivals_that_cannot_be_read_are_told_before_anything_is_sent() -> None:
    """A missing trace is an error of the words, not of a trial."""
    server = Server(lambda: 0.01)
    with pytest.raises(BadFile, match="no file"):
        drive(server, Trace(1.0, "nowhere.csv"), server.clock, 0)


def test_requests_that_take_longer_than_a_window_spoil_the_trial() -> None:
    """Nobody waits for hours for the first batch to fill."""
    server = Server(lambda: 0.01, items=32)
    load = drive(server, Uniform(0.001), server.clock, 0, batch=32, timeout_s=3600)
    with load, pytest.raises(TrialError, match="32 requests take"):
        next(load)
    assert server.clock.now() == 0.0


def test_a_clock_that_goes_back_spoils_the_trial() -> None:
    """Time that is not monotonic is never a latency."""

    class Back(VirtualClock):
        def __init__(self, server: Server) -> None:
            super().__init__(100.0)
            self.server = server

        def now(self) -> float:
            return super().now() - 50 * (self.server.clock.now() > 0.01)

    server = Server(lambda: 0.02)
    with drive(server, Uniform(4.0), Back(server), 0) as load, pytest.raises(TrialError, match="went back"):
        next(load)


def test_only_monotonic_time_is_read() -> None:
    """No module here asks for the time of day, which jumps."""
    called = {
        node.attr
        for node in ast.walk(ast.parse(Path(inspect.getfile(drive)).read_text()))
        if isinstance(node, ast.Attribute)
        and isinstance(node.value, ast.Name)
        and node.value.id in ("time", "datetime")
    }
    assert called == {"thread_time"}


# Idle energy of simulated boards


def _board(arrivals: Arrivals, count: int = 400) -> tuple[float, float, float]:
    """Return joules and seconds per request, and the 99th percentile of latency, of a served board without noise."""
    device = SimulatedDevice(load_board("jetson-agx-orin"), noise=0.0)
    workload = device.serve(load_model("efficientnet-b0"))
    with device, drive(workload, arrivals, device.clock, 0) as load:
        start = device.read()
        seen = [query.latency_s for query in itertools.islice(load, count)]
        end = device.read()
    return (end.energy_j - start.energy_j) / count, (end.time_s - start.time_s) / count, float(np.quantile(seen, 0.99))


def test_a_board_that_waits_draws_idle_power() -> None:
    """At a low rate the energy of a request is its own and that of the wait for it, in proportion to the wait."""
    some, more, most = (_board(Uniform(rate)) for rate in (2.0, 1.0, 0.5))
    first_w = (more[0] - some[0]) / (more[1] - some[1])
    device = SimulatedDevice(load_board("jetson-agx-orin"), noise=0.0)
    before = device.read()
    device.clock.sleep(100.0)
    idle_w = (device.read().energy_j - before.energy_j) / 100.0
    assert first_w == pytest.approx(idle_w, rel=0.05)
    assert (most[0] - more[0]) / (most[1] - more[1]) == pytest.approx(idle_w, rel=0.05)
    assert _board(CLOSED)[0] < some[0] / 5


def test_a_board_near_its_limit_makes_requests_queue() -> None:
    """Latency rises with the rate, and energy per request falls towards that of serving back to back."""
    most_per_s = 1 / _board(CLOSED)[1]
    energies, _, latencies = zip(*(_board(Poisson(share * most_per_s)) for share in (0.2, 0.5, 0.8)), strict=True)
    assert list(latencies) == sorted(latencies)
    assert latencies[2] > 1.5 * latencies[0]
    assert list(energies) == sorted(energies, reverse=True)
    assert energies[2] > _board(CLOSED)[0]


def test_a_board_that_cannot_keep_up_answers_what_it_can() -> None:
    """Beyond its limit, requests come back at the pace of the board, each later than the one before."""
    closed = _board(CLOSED)
    over = _board(Uniform(2 / closed[1]))
    assert over[1] == pytest.approx(closed[1], rel=0.02)
    assert over[2] > 100 * closed[2]


def test_a_driven_board_follows_from_its_seeds() -> None:
    """The same arrivals on the same board give the same figures to the last bit."""
    assert _board(Burst(30.0)) == _board(Burst(30.0))


def test_a_governor_lets_the_clock_go_as_far_as_a_wait_is_long() -> None:
    """The longer a board with the stock governor has waited, the longer the next query takes, up to a bound."""
    device = SimulatedDevice(load_board("jetson-agx-orin"), noise=0.0)
    workload = device.serve(load_model("efficientnet-b0"))
    times = []
    for wait_s in (1e-6, 2e-3, 5e-3, 20e-3, 1.0, 100.0):
        workload.query()
        device.clock.sleep(wait_s)
        times.append(workload.query().latency_s)
    assert times == sorted(times)
    assert times[0] < times[3]
    assert times[4] == pytest.approx(times[5], rel=1e-6)


def test_what_the_sender_took_is_left_out_of_an_estimate(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Joules from busy time lose the sender's share; joules that were counted keep it, and that is said."""
    busy_s = iter([0.0, 1.0, 3.0])
    monkeypatch.setattr("polythrottle.backends.cpu.energy.busy_s", lambda: next(busy_s))
    device = CpuDevice(watts_per_core=10.0, clock=VirtualClock(), state=tmp_path)
    assert isinstance(device, Discounting)
    assert device.read().energy_j == pytest.approx(10.0)
    assert device.leave_out(0.5)
    assert device.read().energy_j == pytest.approx(25.0)
    assert not isinstance(FakeDevice(), Discounting)


# Real time


def test_the_echo_service_is_a_concurrent_workload() -> None:
    """What the tests drive is what the port asks for."""
    assert isinstance(EchoWorkload(0), Concurrent)
    assert not isinstance(Server(lambda: 1.0), Concurrent)


@pytest.fixture(scope="module")
def port() -> Iterator[int]:
    """Run the echo service."""
    with echo_server() as port:
        yield port


def _threads() -> list[str]:
    return [thread.name for thread in threading.enumerate() if "polythrottle" in thread.name]


def test_an_estimate_for_a_service_counts_every_program(port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Somebody else's server is no child of this process; what is must be its own or its children's."""
    monkeypatch.setattr(Setup, "_serve", lambda self, device: EchoWorkload(port))
    device, _ = Setup("cpu?watts_per_core=10", "echo").open()
    assert device.uri == "cpu?busy=everyone&watts_per_core=10"
    assert "every program on these processors" in device.boundary
    assert Setup(device.uri, "echo").open()[0].uri == device.uri
    before_j = device.read().energy_j
    begin_s = time.thread_time()
    while time.thread_time() - begin_s < 0.2:
        pass
    assert device.read().energy_j - before_j >= 0.1 * 10
    monkeypatch.setattr(Setup, "_serve", lambda self, device: Server(lambda: 1.0))
    plain = Setup("cpu?watts_per_core=10", "echo").open()[0]
    assert plain.uri == "cpu?watts_per_core=10"
    assert "this process and its children" in plain.boundary
    with pytest.raises(InvalidInput, match="busy=everyone"):
        Setup("cpu?busy=me", "echo").open()


def test_a_load_tells_the_device_what_it_took_itself(port: int) -> None:
    """By the time a query is there, the processor time of the sender up to then is left out, once."""

    class Telling:
        left_out_s = 0.0

        def leave_out(self, busy_s: float) -> bool:
            self.left_out_s += busy_s
            return True

    for arrivals in (CLOSED, Poisson(300.0)):
        device = Telling()
        with drive(EchoWorkload(port), arrivals, SystemClock(), 0, device=device) as load:
            list(itertools.islice(load, 20))
        assert 0 < device.left_out_s <= load.report.cpu_s


def test_an_open_loop_sends_in_time_and_counts_from_then(port: int) -> None:
    """Requests are a steady gap apart on the device's clock, whatever the answers take; the sender is then gone."""
    workload = EchoWorkload(port, lambda: 0.03)
    with drive(workload, Uniform(100.0), SystemClock(), 0) as load:
        queries = list(itertools.islice(load, 40))
    starts = sorted(query.start_s or 0.0 for query in queries)
    assert np.diff(starts) == pytest.approx(0.01, abs=1e-9)
    assert min(query.latency_s for query in queries) >= 0.03
    assert load.report.sent >= 40
    assert load.report.late_p99_s is not None
    assert 0 < load.report.cpu_s < 60
    assert workload.hung_up == 1
    assert not _threads()


def test_a_closed_loop_keeps_as_many_under_way_as_it_is_told(port: int) -> None:
    """Four queries of 50 ms overlap, so that sixteen take about as long as four would."""
    with drive(EchoWorkload(port, lambda: 0.05, concurrency=4), CLOSED, SystemClock(), 0) as load:
        queries = list(itertools.islice(load, 16))
    spans = [(query.start_s or 0.0, (query.start_s or 0.0) + query.latency_s) for query in queries]
    assert max(sum(start <= moment < end for start, end in spans) for moment, _ in spans) == 4
    assert load.report.late_p99_s is None


class FirstWave(Server):
    """A service whose first queries take long, as prompts do that come all at once; the others do not.

    They end once twice as many have been sent, and the first of all once it is let go.
    """

    def __init__(self, concurrency: int) -> None:
        super().__init__(lambda: 0.0)
        self.concurrency, self.sent = concurrency, 0
        self.waiting: set[int] = set()
        self.let_go = threading.Event()

    async def send(self) -> Query:
        """Wait if this is one of the first, but for the second: somebody has to make the others go on."""
        number = self.sent
        self.sent += 1
        if number < self.concurrency and number != 1:
            self.waiting.add(number)
            while self.sent < 2 * self.concurrency or not (number or self.let_go.is_set()):
                await asyncio.sleep(0.001)
            self.waiting.discard(number)
        await asyncio.sleep(0.01)
        return Query(1.0 if number < self.concurrency else 0.002)

    async def hang_up(self) -> None:
        """Do nothing."""


_WARM = Window(1, 0.0, 1, timeout_s=60.0)


def test_what_a_closed_loop_sends_in_its_first_moment_is_not_measured() -> None:
    """A window would have seen eight queries of a second; from then on there is nothing to leave out."""
    service = FirstWave(8)
    service.let_go.set()
    with drive(service, CLOSED, SystemClock(), 0) as load:
        served = warm_up(load, SystemClock(), _WARM, Sensor())
        assert not service.waiting
        assert max(query.latency_s for query in itertools.islice(load, 40)) < 1.0
        assert served >= 16
        assert warm_up(load, SystemClock(), _WARM, Sensor()) == _WARM.warmup


def test_a_warm_up_waits_for_its_slowest_query_so_long_and_no_longer() -> None:
    """The first query is never answered: a window begins once each place was answered four times on average."""
    service = FirstWave(8)
    with drive(service, CLOSED, SystemClock(), 0) as load:
        assert warm_up(load, SystemClock(), _WARM, Sensor()) == 32
        assert service.waiting == {0}


def test_what_finds_no_place_waits_and_counts_from_when_it_was_meant_to_be_sent(port: int) -> None:
    """Two places of 50 ms serve 40 a second; of 400 a second the hundredth has waited for two seconds."""
    with drive(EchoWorkload(port, lambda: 0.05, concurrency=2), Uniform(400.0), SystemClock(), 0) as load:
        queries = list(itertools.islice(load, 40))
    latencies = np.array([query.latency_s for query in queries])
    assert latencies[-1] > 0.8
    spans = [(start := (query.start_s or 0.0) + query.latency_s - 0.05, start + 0.05) for query in queries]
    assert max(sum(start + 0.01 <= moment < end for start, end in spans) for moment, _ in spans) <= 3


def test_a_single_server_in_real_time_queues_too() -> None:
    """A plain workload runs in the thread that asks; what comes meanwhile waits."""

    class Slow(Server):
        def query(self) -> Query:
            start_s = time.perf_counter()
            while time.perf_counter() - start_s < 0.004:
                pass
            return Query(time.perf_counter() - start_s)

    with drive(Slow(lambda: 0.0), Uniform(500.0), SystemClock(), 0) as load:
        latencies = [query.latency_s for query in itertools.islice(load, 30)]
    assert latencies[-1] > 29 * 0.002
    assert load.report.cpu_s < 0.01


def test_the_interpreter_is_shared_in_shorter_turns_while_a_load_is_on(port: int) -> None:
    """What the asking thread computes does not hold the sender up; afterwards all is as it was."""
    before_s = sys.getswitchinterval()
    with drive(EchoWorkload(port), Poisson(500.0), SystemClock(), 0) as load:
        next(load)
        assert sys.getswitchinterval() == pytest.approx(1e-4)
    assert sys.getswitchinterval() == before_s


def test_a_failing_query_ends_the_load(port: int) -> None:
    """The words of whoever failed reach whoever asks, connections are closed, and the thread is gone."""

    class Failing(EchoWorkload):
        left = 5

        async def send(self) -> Query:
            self.left -= 1
            if self.left < 0:
                raise DeviceError("the server is down")
            return await super().send()

    for arrivals, concurrency in ((Poisson(500.0), 1), (CLOSED, 3)):
        workload = Failing(port, concurrency=concurrency)
        with drive(workload, arrivals, SystemClock(), 0) as load, pytest.raises(DeviceError, match="is down"):
            list(load)
        assert workload.hung_up == 1
        assert not _threads()


def test_a_server_that_does_not_answer_is_not_waited_for_for_ever(port: int) -> None:
    """The time a window may take bounds the wait; what is under way is given up."""
    workload = EchoWorkload(port, lambda: 3600.0)
    load = drive(workload, Poisson(100.0), SystemClock(), 0, timeout_s=0.2)
    with load, pytest.raises(TrialError, match=r"no query was answered in 0\.2 s"):
        next(load)
    assert not _threads()


def test_a_query_that_waits_for_nothing_cannot_hold_the_load() -> None:
    """A send that never lets go is still stopped at the end."""

    class Instant(EchoWorkload):
        async def send(self) -> Query:
            return Query(1e-6)

    for arrivals in (CLOSED, Poisson(1e5)):
        with drive(Instant(0, concurrency=2), arrivals, SystemClock(), 0) as load:
            assert len(list(itertools.islice(load, 100))) == 100
        assert not _threads()


def test_latenesses_are_kept_in_steps_of_a_twentieth() -> None:
    """The 99th percentile is at most 5 % above the true one, never below, and little is kept for any number."""
    ledger, chance = Ledger(), random.Random(0)
    late = [chance.lognormvariate(-9, 1.5) for _ in range(20_000)]
    for value in (0.0, -1e-9, *late):
        ledger.note(value)
    p99 = float(np.quantile(late, 0.99, method="inverted_cdf"))
    assert ledger.report.late_p99_s is not None
    assert 0.999 * p99 <= ledger.report.late_p99_s <= 1.051 * p99
    assert len(ledger._late) < 400


# A second opinion


def _reference(port: int, rate_per_s: float, count: int, delay_s: Callable[[], float]) -> np.ndarray:
    """Return latencies by another program: a schedule made beforehand, and a thread with its own socket per request.

    As wrk2 does, each latency counts from the schedule (Tene, wrk2, README, "Coordinated Omission").
    """
    import socket

    from loopback import MESSAGE

    chance = np.random.default_rng(11)
    due_s = time.perf_counter() + 0.2 + np.cumsum(chance.exponential(1 / rate_per_s, count))
    delays = [delay_s() for _ in range(count)]
    found = np.full(count, np.nan)
    take = iter(range(count))
    lock = threading.Lock()

    def work() -> None:
        with socket.create_connection(("127.0.0.1", port)) as line:
            while True:
                with lock:
                    mine = next(take, None)
                if mine is None:
                    return
                time.sleep(max(0.0, due_s[mine] - time.perf_counter()))
                line.sendall(MESSAGE.pack(delays[mine]))
                line.recv(MESSAGE.size, socket.MSG_WAITALL)
                found[mine] = time.perf_counter() - due_s[mine]

    crew = [threading.Thread(target=work) for _ in range(24)]
    for one in crew:
        one.start()
    for one in crew:
        one.join()
    return found


def _percentile_interval(latencies: np.ndarray, share: float) -> tuple[float, float]:
    """Return the 95 % interval of a percentile by order statistics (normal approximation to the binomial)."""
    ordered, count = np.sort(latencies), len(latencies)
    spread = 1.96 * math.sqrt(count * share * (1 - share))
    low, high = math.floor(count * share - spread), math.ceil(count * share + spread)
    return float(ordered[max(0, low)]), float(ordered[min(count - 1, high)])


@pytest.mark.slow
def test_a_second_program_sees_the_same_percentiles(port: int) -> None:
    """Threads with a schedule made beforehand and this event loop agree on the p99 of a service with stragglers."""
    rate_per_s, count = 250.0, 750
    with drive(EchoWorkload(port, straggling(1)), Poisson(rate_per_s), SystemClock(), 7) as load:
        mine = np.array([query.latency_s for query in itertools.islice(load, count)])
    theirs = _reference(port, rate_per_s, count, straggling(2))
    (low, high), (least, most) = _percentile_interval(mine, 0.99), _percentile_interval(theirs, 0.99)
    assert low <= most
    assert least <= high
    assert float(np.quantile(mine, 0.99)) > 0.06
