"""What sharing a server's watts between services saves, on a simulated server of eight H100, replayed in virtual time.

    python benchmarks/node_power.py [--replays 30] [--minutes 5] [--halved 100] [--jobs 2] [--write FILE]

Everything here is simulated. Eight GPUs as `devices/h100.toml` describes them serve three models: two groups of two and
one of four, each group at equal clocks. Silicon differs: each GPU's power is drawn around the description's (standard
deviation 6 %) and its speed (1 %; a group waits for its slowest), and each batch takes a little more or less. Beside
the GPUs the server draws 300 W and 6 % of what they draw (fans and losses of its supplies), with noise, which a meter
of the whole tells a second late. A clock holds 0.1 s after it was set.

Requests come at the rates of the Azure LLM inference trace 2023 (code, and conversation from its beginning and from its
middle), second by second, scaled to each group and Poisson within the second; each replay begins elsewhere in the
traces. The ladders are made from what the description says, and know neither the silicon nor the traces.

default clocks      the highest, nobody heeds the budget: what the services would draw
even static caps    each GPU gets the same watts of the budget; a cap is the highest clock whose full load is within
projected caps      static caps by the load that is expected, as NVIDIA's Dynamo plans them: each group gets what its
                    95th percentile of the whole trace needs, all scaled to the budget
epoch balancing     caps as GEOPM's balancer moves them: each second 2 % of the watts go from the group with the most
                    time left to the one with the least
ours                the daemon's controllers and its split, as they are in `polythrottle daemon`
clairvoyant         each minute the rungs that break least, then draw least, known beforehand, without queues carried
                    over, and free to switch, of which no second is above the budget; it knows what silicon draws

The caps batch as the ladder's top rung does. A minute is broken for a service if more than 1 % of its requests that
arrived in it took longer than the limit.
"""

import argparse
import sys
from array import array
from bisect import bisect_right
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache, lru_cache
from multiprocessing import Pool
from pathlib import Path

import numpy as np
from following import Site, _idle_w
from numpy.typing import NDArray

from polythrottle.daemon.control.controller import hurried, step
from polythrottle.daemon.control.events import (
    Apply,
    Bounds,
    ControlPlan,
    Event,
    GoSafe,
    Observation,
    PowerShare,
    Target,
    WorkloadUp,
)
from polythrottle.daemon.control.power_sharing import HostPower, PowerSharing, ServiceState, cuts_first
from polythrottle.daemon.control.state import State
from polythrottle.domain.ladder import Ladder, PointPerformance
from polythrottle.storage.arrival_trace import recorded
from polythrottle.tuning.measured_ladder import ladder_of

TRACES = Path(__file__).resolve().parents[2] / "shared" / "data" / "llm"
_BASE_W, _SLOPE = 300.0, 0.06
_LAG_S = 0.1
_LATE = 0.01
BUDGET_W = 1500.0


@dataclass(frozen=True)
class Tenant:
    """A service on the server: its model, limit, GPUs, weight, and the trace that its load follows, from where on."""

    name: str
    model: str
    slo_s: float
    gpus: int
    weight: float
    trace: str
    peak: float
    offset: float = 0.0


TENANTS = (
    Tenant("photos", "efficientnet-b7", 0.25, 4, 2.0, "code", 0.85),
    Tenant("search", "bert-base-fp16", 0.10, 2, 1.0, "conv", 0.55),
    Tenant("labels", "efficientnet-b4", 0.10, 2, 1.0, "conv", 0.85, 0.5),
)


# The models on the board, as its description says, and their ladders.


@cache
def one_gpu(model: str) -> tuple[PointPerformance, ...]:
    """Return how one GPU answers back to back, at the top power limit, at every third clock."""
    device, workload = Site("h100", model, 1.0, 1.0, 1.0).opened()
    found = []
    clocks = device.space.knob("gpu_max_hz").levels
    kept = {*clocks[::3], clocks[-1]}
    for point in device.space:
        if point["power_limit_w"] != 400 or point["gpu_max_hz"] not in kept:
            continue
        idle_w = _idle_w(device, point)
        for batch in workload.space.knob("batch_size").levels:
            whole = point.moved({"batch_size": batch})
            found.append(PointPerformance.of(whole, replace(device.expected(workload, whole), idle_power_w=idle_w)))
    return tuple(found)


def grouped(service: PointPerformance, gpus: int) -> PointPerformance:
    """Return how several GPUs answer that work as one."""
    return replace(service, batch=gpus * service.batch, batch_j=gpus * service.batch_j, idle_w=gpus * service.idle_w)


@cache
def ladder(tenant: Tenant) -> Ladder:
    """Return the ladder of a tenant's group."""
    return ladder_of([grouped(each, tenant.gpus) for each in one_gpu(tenant.model)], tenant.slo_s)


def capped(tenant: Tenant, cap_w: float) -> Target:
    """Return the highest clock whose full load is within a cap, batched as the ladder's top rung is."""
    top = ladder(tenant).rungs[-1]
    batch = int(top.service.point["batch_size"])
    memory_hz = max(int(each.point["mem_hz"]) for each in one_gpu(tenant.model))
    points = [each for each in _at(tenant, batch) if each.point["mem_hz"] == memory_hz]
    within = [each for each in points if each.full_w <= cap_w] or [min(points, key=lambda each: each.full_w)]
    return Target(max(within, key=lambda each: each.most_per_s).point, top.gather_s)


@cache
def _at(tenant: Tenant, batch: int) -> tuple[PointPerformance, ...]:
    return tuple(grouped(each, tenant.gpus) for each in one_gpu(tenant.model) if each.point["batch_size"] == batch)


@cache
def _by_point(tenant: Tenant) -> dict[object, PointPerformance]:
    return {each.point: grouped(each, tenant.gpus) for each in one_gpu(tenant.model)}


# The server: silicon, requests, and what becomes of them.


@dataclass(frozen=True)
class Silicon:
    """A group's real power and time over what the description says, and the seed of its batches' noise."""

    power: float
    time: float
    seed: int


def silicon(tenant: Tenant, replay: int) -> Silicon:
    """Return a group of GPUs as they came from the factory."""
    number = TENANTS.index(tenant)
    random = np.random.default_rng([replay, number, 0x51])
    power = float(np.mean(random.normal(1.0, 0.06, tenant.gpus).clip(0.8, 1.2)))
    time = float(np.max(random.normal(1.0, 0.01, tenant.gpus)))
    return Silicon(power, time, 1000 * replay + number)


@cache
def _rates(trace: str) -> NDArray[np.float64]:
    times = recorded(TRACES / f"azure_llm_2023_{trace}_first_half_hour.csv.gz")
    counts = np.bincount(times.astype(int)).astype(np.float64)
    # A trace of a few requests a second is mostly chance; its rate is the mean over five seconds.
    return np.convolve(counts, np.ones(5) / 5, mode="same")


def rates(tenant: Tenant, replay: int, seconds: int) -> NDArray[np.float64]:
    """Return the mean rate of each second of a replay: the 99th percentile of the trace is the tenant's peak."""
    trace = _rates(tenant.trace)
    begin = int(len(trace) * ((tenant.offset + 0.6180339887 * replay) % 1.0))
    found = np.take(trace, np.arange(begin, begin + seconds), mode="wrap")
    return np.asarray(found * tenant.peak * ladder(tenant).rungs[-1].rate_per_s / np.quantile(trace, 0.99))


@lru_cache(maxsize=8)
def arrivals(tenant: Tenant, replay: int, seconds: int) -> "array[float]":
    """Return when requests come."""
    random = np.random.default_rng([replay, TENANTS.index(tenant), 0xA7])
    counts = random.poisson(rates(tenant, replay, seconds))
    times = np.sort(np.repeat(np.arange(seconds), counts) + random.random(counts.sum()))
    return array("d", times.tobytes())


class Group:
    """A group of GPUs that serves: batches one after the other, at the point that holds when each is begun."""

    def __init__(self, tenant: Tenant, chips: Silicon, times_s: "array[float]", seconds: int) -> None:
        self.tenant = tenant
        self.joules = np.zeros(seconds + 5)
        self.latency_s = np.zeros(len(times_s))
        self.now_s = 0.0
        self.first = 0
        self.switches = 0
        self._chips = chips
        self._times_s = times_s
        self._free_s = 0.0
        self._random = np.random.default_rng(chips.seed)
        self._noise: list[float] = []
        self._service: PointPerformance | None = None
        self._target: Target | None = None
        self._next: deque[tuple[float, Target]] = deque()
        self.done: deque[tuple[float, int, int]] = deque()

    @property
    def waiting(self) -> int:
        """Requests that wait to be sent."""
        return bisect_right(self._times_s, self.now_s) - self.first

    def set(self, target: Target) -> None:
        """Set a point, which holds a little later."""
        self.switches += 1
        if self._service is None:
            self._hold(target)
        else:
            self._next.append((self.now_s + _LAG_S, target))

    def run(self, until_s: float) -> None:
        """Go on until a time."""
        while self.now_s < until_s:
            end_s = until_s
            if self._next:
                if self._next[0][0] <= self.now_s:
                    self._hold(self._next.popleft()[1])
                    continue
                end_s = min(until_s, self._next[0][0])
            self._serve(end_s)
            assert self._service is not None
            self._draw(self.now_s, end_s, self._service.idle_w * self._chips.power)
            self.now_s = end_s

    def power_w(self, second: int) -> float:
        """Return what was drawn in a second that is over."""
        return float(self.joules[second])

    def _hold(self, target: Target) -> None:
        self._target = target
        self._service = _by_point(self.tenant)[target.point]

    def _serve(self, end_s: float) -> None:
        """Begin the batches that begin until a time."""
        times_s = self._times_s
        service = self._service
        target = self._target
        assert service is not None
        assert target is not None
        while self.first < len(times_s):
            ready_s = times_s[self.first] + target.gather_s
            full = self.first + service.batch - 1
            if full < len(times_s):
                ready_s = min(ready_s, times_s[full])
            start_s = max(self._free_s, ready_s, self.now_s)
            if start_s >= end_s:
                return
            after = min(self.first + service.batch, bisect_right(times_s, start_s))
            factor = self._chips.time * self._drawn()
            self.latency_s[self.first : after] = (
                start_s + service.latency_s * factor - np.frombuffer(times_s)[self.first : after]
            )
            self.done.append((start_s + service.latency_s * factor, self.first, after))
            taken_s = service.interval_s * factor
            added_w = max(0.0, service.batch_j / service.interval_s - service.idle_w) * self._chips.power
            self._draw(start_s, start_s + taken_s, added_w)
            self._free_s = start_s + taken_s
            self.first = after

    def _draw(self, begin_s: float, end_s: float, power_w: float) -> None:
        while begin_s < end_s:
            second = int(begin_s)
            part_s = min(end_s, second + 1.0) - begin_s
            if second < len(self.joules):
                self.joules[second] += power_w * part_s
            begin_s = second + 1.0

    def _drawn(self) -> float:
        if not self._noise:
            self._noise = self._random.lognormal(0.0, 0.02, 4096).tolist()
        return self._noise.pop()

    def broken(self, minutes: int) -> NDArray[np.bool_]:
        """Return for each minute whether more than 1 % of the requests that came in it took too long."""
        times = np.frombuffer(self._times_s)
        # What was never answered is too late.
        late = np.where(np.arange(len(times)) < self.first, self.latency_s > self.tenant.slo_s, True)
        slots = np.minimum((times / 60).astype(int), minutes - 1)
        came = np.bincount(slots, minlength=minutes)
        return np.asarray(np.bincount(slots, late, minlength=minutes) > _LATE * came)


@dataclass(frozen=True)
class Outcome:
    """What became of a replay: joules of the server, broken minutes (and by weight), seconds above the budget."""

    joules: float
    broken: int
    weighted: float
    above: int
    longest: int

    @classmethod
    def of(cls, whole_w: NDArray[np.float64], broken: Sequence[NDArray[np.bool_]], budget_w: float) -> "Outcome":
        """Return it from the server's watts by second, and each tenant's minutes."""
        over = whole_w > budget_w
        longest = run = 0
        for each in over:
            run = run + 1 if each else 0
            longest = max(longest, run)
        counts = [int(each.sum()) for each in broken]
        weighted = sum(tenant.weight * count for tenant, count in zip(TENANTS, counts, strict=True))
        return cls(float(whole_w.sum()), sum(counts), weighted, int(over.sum()), longest)


def host_w(boards_w: NDArray[np.float64], replay: int) -> NDArray[np.float64]:
    """Return what the server draws besides, by second."""
    random = np.random.default_rng([replay, 0x405])
    return np.asarray(_BASE_W + _SLOPE * boards_w + random.normal(0.0, 4.0, len(boards_w)))


@dataclass
class Server:
    """All groups, and what the whole draws."""

    groups: list[Group]
    replay: int
    seconds: int

    @classmethod
    def of(cls, replay: int, seconds: int) -> "Server":
        """Return a server at the beginning of a replay."""
        groups = [Group(each, silicon(each, replay), arrivals(each, replay, seconds), seconds) for each in TENANTS]
        return cls(groups, replay, seconds)

    def whole_w(self) -> NDArray[np.float64]:
        """Return the server's watts by second."""
        boards_w = np.sum([group.joules[: self.seconds] for group in self.groups], axis=0)
        return np.asarray(boards_w + host_w(boards_w, self.replay))

    def outcome(self, budget_w: float) -> Outcome:
        """Return what became of the replay."""
        minutes = self.seconds // 60
        return Outcome.of(self.whole_w(), [group.broken(minutes) for group in self.groups], budget_w)


# The policies.


def boards_w(budget_w: float) -> float:
    """Return what a budget leaves for the boards, as whoever plans caps knows it."""
    return (budget_w - _BASE_W) / (1 + _SLOPE)


def static(replay: int, seconds: int, caps_w: Sequence[float], budget_w: float) -> Outcome:
    """Return a replay under caps that stay."""
    server = Server.of(replay, seconds)
    for group, cap_w in zip(server.groups, caps_w, strict=True):
        group.set(capped(group.tenant, cap_w))
        group.run(float(seconds))
    return server.outcome(budget_w)


def even(budget_w: float) -> list[float]:
    """Return caps of equal watts for each GPU."""
    gpus = sum(each.gpus for each in TENANTS)
    return [boards_w(budget_w) * each.gpus / gpus for each in TENANTS]


def projected(budget_w: float) -> list[float]:
    """Return caps by the load that each group is expected to have."""
    needs_w = []
    for tenant in TENANTS:
        expected = rates(tenant, 0, len(_rates(tenant.trace)))
        points = sorted(_at(tenant, int(ladder(tenant).rungs[-1].service.point["batch_size"])), key=lambda s: s.full_w)
        enough = (each.full_w for each in points if 0.9 * each.most_per_s >= float(np.quantile(expected, 0.95)))
        needs_w.append(next(enough, points[-1].full_w))
    return [boards_w(budget_w) * need_w / sum(needs_w) for need_w in needs_w]


def balanced(replay: int, seconds: int, budget_w: float) -> Outcome:
    """Return a replay under caps that are moved to the group with the least time left."""
    server = Server.of(replay, seconds)
    caps_w = even(budget_w)
    set_: list[Target | None] = [None] * len(caps_w)
    for second in range(seconds):
        for number, group in enumerate(server.groups):
            target = capped(group.tenant, caps_w[number])
            if target != set_[number]:
                group.set(target)
                set_[number] = target
            group.run(second + 1.0)
        times = [_epoch(group, second) for group in server.groups]
        slow, quick = int(np.argmax(times)), int(np.argmin(times))
        floor_w = min(each.full_w for each in _at(TENANTS[quick], 1))
        moved_w = min(0.02 * boards_w(budget_w), max(0.0, caps_w[quick] - floor_w))
        if slow != quick:
            caps_w[slow] += moved_w
            caps_w[quick] -= moved_w
    return server.outcome(budget_w)


def _epoch(group: Group, second: int) -> float:
    """Return the mean time of a second's requests over the limit."""
    ended = _ended(group, second + 1.0)
    if not len(ended):
        return group.waiting / 1e3
    return float(ended.mean()) / group.tenant.slo_s


def _ended(group: Group, until_s: float) -> NDArray[np.float64]:
    parts = []
    while group.done and group.done[0][0] <= until_s:
        _, first, after = group.done.popleft()
        parts.append(group.latency_s[first:after])
    return np.concatenate(parts) if parts else np.zeros(0)


class Follower:
    """A service's controller in the daemon, on a group."""

    def __init__(self, group: Group) -> None:
        steps = ladder(group.tenant)
        top = Target(steps.rungs[-1].service.point, steps.rungs[-1].gather_s)
        cool = steps.rungs[steps.coolest]
        plan = ControlPlan(steps, top, Target(cool.service.point, cool.gather_s), Bounds(p99_s=group.tenant.slo_s))
        self.group = group
        self.state = State(share_w=0.0)
        self.lost = False
        self._arrived = 0
        self._last_s = 0.0
        self._worst_s = 0.0
        self._lately: deque[NDArray[np.float64]] = deque(maxlen=60)
        self._second: list[NDArray[np.float64]] = []
        self.do(WorkloadUp(plan))

    def do(self, event: Event) -> None:
        """Tell the controller, and set what it says."""
        self.state, actions = step(self.state, event)
        for action in actions:
            if isinstance(action, Apply | GoSafe):
                self.group.set(action.target)

    def look(self, now_s: float, power_w: float | None) -> float | None:
        """Look, at the end of a second or before if requests pile up; return the rate that was seen."""
        ended = _ended(self.group, now_s)
        if len(ended):
            self._second.append(ended)
            self._worst_s = max(self._worst_s, float(ended.max()))
        waiting = self.group.waiting
        if power_w is None and not hurried(self.state, waiting):
            return None
        arrived = self.group.first + waiting
        period_s = now_s - self._last_s
        rate_per_s = (arrived - self._arrived) / period_s
        self._arrived = arrived
        self._last_s = now_s
        p99_s = None
        if power_w is not None:
            self._lately.append(np.concatenate(self._second) if self._second else np.zeros(0))
            self._second = []
            recent = np.concatenate(self._lately)
            if len(recent):
                p99_s = float(np.partition(recent, int(0.99 * (len(recent) - 1)))[int(0.99 * (len(recent) - 1))])
        worst_s, self._worst_s = self._worst_s or None, 0.0
        least_s = p99_s if now_s >= 60 else None
        self.do(Observation(now_s, period_s, rate_per_s, waiting, p99_s, power_w, worst_s=worst_s, p99_least_s=least_s))
        return rate_per_s


@dataclass
class Ours:
    """The daemon's split over its controllers."""

    server: Server
    budget_w: float
    host: HostPower
    sharing: PowerSharing

    @classmethod
    def of(cls, replay: int, seconds: int, budget_w: float) -> "Ours":
        """Return it at the beginning of a replay, when of the host nothing is known but what was said."""
        return cls(Server.of(replay, seconds), budget_w, HostPower(), PowerSharing())

    def run(self, budget_at: "dict[int, float] | None" = None) -> Outcome:
        """Go through the replay.

        Args:
            budget_at: Budgets from seconds on.
        """
        followers = [Follower(group) for group in self.server.groups]
        self._split(followers, [None] * len(followers), [None] * len(followers), [True] * len(followers))
        now = before = [each.group.switches for each in followers]
        random = np.random.default_rng([self.server.replay, 0x3E7])
        for second in range(self.server.seconds):
            self.budget_w = (budget_at or {}).get(second, self.budget_w)
            if second in (budget_at or {}):
                self._split(followers, [None] * len(followers), [None] * len(followers), [True] * len(followers))
            for tenth in range(1, 10):
                for each in followers:
                    each.group.run(second + tenth / 10)
                    each.look(second + tenth / 10, None)
            for each in followers:
                each.group.run(second + 1.0)
            powers = [each.group.power_w(second) for each in followers]
            rates_per_s = [each.look(second + 1.0, power_w) for each, power_w in zip(followers, powers, strict=True)]
            whole_w = _BASE_W + (1 + _SLOPE) * sum(powers) + float(random.normal(0.0, 4.0))
            self.host.seen(whole_w, sum(powers))
            # A clock that was set at the end of the second before did not hold all of this one.
            whole = [
                one == each.group.switches == other for one, other, each in zip(before, now, followers, strict=True)
            ]
            self._split(followers, powers, rates_per_s, whole)
            before = now
            now = [each.group.switches for each in followers]
        return self.server.outcome(self.budget_w)

    def _split(
        self,
        followers: Sequence[Follower],
        powers: Sequence[float | None],
        rates_per_s: Sequence[float | None],
        whole: Sequence[bool],
    ) -> None:
        services = [
            ServiceState(
                name=each.group.tenant.name,
                weight=each.group.tenant.weight,
                state=each.state,
                most_w=400.0 * each.group.tenant.gpus,
                power_w=power_w,
                rate_per_s=rate_per_s,
                waiting=each.group.waiting,
                whole=kept,
            )
            for each, power_w, rate_per_s, kept in zip(followers, powers, rates_per_s, whole, strict=True)
        ]
        if powers[0] is not None:
            self.sharing.seen(services, 1.0)
        rest_w = self.host.besides_w(self.budget_w) if self.host.known else _BASE_W * 1.3
        split = self.sharing.split(self.budget_w, rest_w, services)
        by_name = {each.group.tenant.name: each for each in followers}
        for share in cuts_first(split, {name: each.state for name, each in by_name.items()}):
            by_name[share.name].do(PowerShare(share.limit_w))


def clairvoyant(replay: int, seconds: int, budget_w: float) -> Outcome:
    """Return the best of each minute, known beforehand."""
    minutes = seconds // 60
    tables = []
    for tenant in TENANTS:
        rows = []
        for rung in ladder(tenant).rungs:
            group = Group(tenant, silicon(tenant, replay), arrivals(tenant, replay, seconds), seconds)
            group.set(Target(rung.service.point, rung.gather_s))
            group.run(float(seconds))
            rows.append((group.joules[:seconds].reshape(minutes, 60), group.broken(minutes)))
        tables.append(rows)
    whole_w = np.zeros((minutes, 60))
    broken = [np.zeros(minutes, dtype=bool) for _ in TENANTS]
    host = host_w(np.zeros(seconds), replay).reshape(minutes, 60)
    for minute in range(minutes):
        whole_w[minute], rungs = _best_minute(tables, host[minute], minute, budget_w)
        for number, rung in enumerate(rungs):
            broken[number][minute] = tables[number][rung][1][minute]
    return Outcome.of(whole_w.ravel(), broken, budget_w)


def _best_minute(
    tables: Sequence[Sequence[tuple[NDArray[np.float64], NDArray[np.bool_]]]],
    host: NDArray[np.float64],
    minute: int,
    budget_w: float,
) -> tuple[NDArray[np.float64], tuple[int, ...]]:
    """Return a minute's watts and rungs: of those within the budget what breaks least, then draws least."""
    drawn = [np.array([joules[minute] for joules, _ in rows]) for rows in tables]
    broken = [
        tenant.weight * np.array([float(missed[minute]) for _, missed in rows])
        for tenant, rows in zip(TENANTS, tables, strict=True)
    ]
    boards = drawn[0][:, None, None] + drawn[1][None, :, None] + drawn[2][None, None, :]
    weights = broken[0][:, None, None] + broken[1][None, :, None] + broken[2][None, None, :]
    whole = host + (1 + _SLOPE) * boards
    peaks_w = whole.max(axis=-1)
    within = peaks_w <= budget_w
    if within.any():
        # Weights are whole; joules of a minute on one server are far below a hundred million.
        cost = np.where(within, 1e9 * weights + whole.sum(axis=-1), np.inf)
    else:
        cost = peaks_w
    rungs = np.unravel_index(int(cost.argmin()), cost.shape)
    return whole[rungs], tuple(map(int, rungs))


POLICIES = ("default clocks", "even static caps", "projected caps", "epoch balancing", "ours", "clairvoyant")


def replayed(replay: int, seconds: int, budget_w: float) -> dict[str, Outcome]:
    """Return what every policy makes of a replay."""
    tops_w = [1e9] * len(TENANTS)
    return {
        "default clocks": static(replay, seconds, tops_w, budget_w),
        "even static caps": static(replay, seconds, even(budget_w), budget_w),
        "projected caps": static(replay, seconds, projected(budget_w), budget_w),
        "epoch balancing": balanced(replay, seconds, budget_w),
        "ours": Ours.of(replay, seconds, budget_w).run(),
        "clairvoyant": clairvoyant(replay, seconds, budget_w),
    }


def _replayed(words: tuple[int, int, float]) -> dict[str, Outcome]:
    return replayed(*words)


def halved(replay: int) -> tuple[bool, float, float]:
    """Return whether a budget that is halved in the middle of 90 s held, and how many watts were ever too many."""
    at = 30 + replay % 30
    full_w = 2 * 1250.0
    ours = Ours.of(replay, 90, full_w)
    ours.run({at: full_w / 2})
    after_w = ours.server.whole_w()[at + 1 :]
    return bool((after_w <= full_w / 2).all()), float((after_w - full_w / 2).max()), float(after_w.mean())


def lines(outcomes: Sequence[dict[str, Outcome]], seconds: int) -> Iterator[str]:
    """Yield the table."""
    minutes = seconds // 60 * len(TENANTS) * len(outcomes)
    yield ("| | mean W | against even caps | GPUs alone | broken minutes | by weight | seconds above | longest |")
    yield "| --- | --- | --- | --- | --- | --- | --- | --- |"
    means_w = {name: sum(each[name].joules for each in outcomes) / seconds / len(outcomes) for name in POLICIES}
    even_w = means_w["even static caps"]
    for name in POLICIES:
        rows = [each[name] for each in outcomes]
        # The host's noise has no mean, so that its line tells what the GPUs drew.
        alone = boards_w(means_w[name]) / boards_w(even_w) - 1
        yield (
            f"| {name} | {means_w[name]:.0f} | {means_w[name] / even_w - 1:+.1%} | {alone:+.1%} | "
            f"{sum(row.broken for row in rows)} of {minutes} | {sum(row.weighted for row in rows):.0f} | "
            f"{sum(row.above for row in rows)} of {seconds * len(rows)} | {max(row.longest for row in rows)} s |"
        )


def main() -> None:
    """Print the tables."""
    words = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    words.add_argument("--replays", type=int, default=30)
    words.add_argument("--first", type=int, default=0)
    words.add_argument("--minutes", type=int, default=5)
    words.add_argument("--halved", type=int, default=100)
    words.add_argument("--budget", type=float, default=BUDGET_W)
    words.add_argument("--jobs", type=int, default=1)
    words.add_argument("--write", type=Path)
    given = words.parse_args()
    for tenant in TENANTS:
        top = ladder(tenant).rungs[-1]
        sys.stderr.write(f"{tenant.name}: up to {top.rate_per_s:.0f}/s at {top.service.full_w:.0f} W\n")
    seconds = 60 * given.minutes
    with Pool(given.jobs) as pool:
        jobs = [(given.first + replay, seconds, given.budget) for replay in range(given.replays)]
        outcomes = list(pool.imap(_replayed, jobs))
        cuts = list(pool.imap(halved, range(given.halved)))
    found = [*lines(outcomes, seconds)] if outcomes else []
    if cuts:
        held = sum(each[0] for each in cuts)
        found.append("")
        found.append(
            f"A budget of 2.5 kW halved within a second: held from the next second on in {held} of {len(cuts)}; "
            f"at most {max(each[1] for each in cuts):+.0f} W from it."
        )
    sys.stdout.write("\n".join(found) + "\n")
    if given.write is not None:
        given.write.write_text("\n".join(found) + "\n")


if __name__ == "__main__":
    main()
