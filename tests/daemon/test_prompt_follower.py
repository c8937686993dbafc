"""The daemon behind the proxy: which clock it sets while prompts wait, and what it does when nobody tells of them."""

import asyncio
import http.client
import json
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from queue import Queue
from urllib.parse import urlsplit

import numpy as np
import pytest
from builders import measured
from daemons import FakeBoard, House, rung
from fake_servers import FakeServer, Handler, event, listening, piece, stream, usage

from polythrottle.catalog.tuned_profiles import write_profile
from polythrottle.cli.render.status import guard_words
from polythrottle.daemon.control.controller import step
from polythrottle.daemon.control.events import (
    GPU_CLOCK,
    Bounds,
    ClockWanted,
    ControlPlan,
    Guard,
    Observation,
    PowerBudget,
    PowerShare,
    Target,
    WorkloadUp,
    tripped,
)
from polythrottle.daemon.control.state import Phase, State
from polythrottle.daemon.followed_profile import FollowedProfile, bounds_of, token_limits
from polythrottle.daemon.loop.mailbox import Mailbox, guards_of
from polythrottle.daemon.settings import Settings
from polythrottle.daemon.startup import build
from polythrottle.daemon.traffic.proxy_prompts import (
    BoardClocks,
    HeldShare,
    InFlightBound,
    PromptFollower,
    PromptStream,
)
from polythrottle.daemon.traffic.sources import open_traffic
from polythrottle.domain.clock import VirtualClock, WakingClock
from polythrottle.domain.errors import DeviceError, PolythrottleError
from polythrottle.domain.ladder import Ladder
from polythrottle.domain.load.prompt_boost import PromptNews
from polythrottle.domain.profile import Profile
from polythrottle.domain.space import IN_FLIGHT, OperatingPoint
from polythrottle.proxy.in_flight_limiter import Proxy, ProxyOptions

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))

MHZ = 10**6
PATIENCE_S = 20.0
EVENT = {"at_s": 1.0, "arrived": 0, "begun": 0, "firsts": 0, "prompts": [], "waiting": 0, "sent": 0, "streams": 0}
EVENT |= {"made": 0}
CLOCKS = BoardClocks(tuple(mhz * MHZ for mhz in range(100, 1001, 50)), {"power_limit_w": 400})
SLO = ("ttft_p99<=600ms", "tpot_p99<=100ms")
BOUNDS = Bounds(ttft_s=0.6, tpot_s=0.1)
LADDER = Ladder(60.0, (rung(20, 600, 10.0),))
POINT = LADDER.rungs[0].service.point
PLAN = ControlPlan(LADDER, Target(POINT), Target(POINT), BOUNDS, token_limits(SLO, BOUNDS))


@dataclass
class Told:
    """What a proxy tells, as the test says."""

    news: PromptNews | None = field(default_factory=lambda: PromptNews(0.0))

    def prompts(self) -> PromptNews | None:
        """Return it."""
        return self.news

    def on_news(self, ring: Callable[[], None]) -> None:
        """Do nothing."""


def up(plan: ControlPlan = PLAN) -> State:
    """Return a controller that follows a plan."""
    return step(State(), WorkloadUp(plan))[0]


class Story:
    """A follower whose rate is known, and the proxy behind it; 10,000 tokens a second."""

    def __init__(self) -> None:
        self.told = Told()
        self.follower = PromptFollower(self.told, lambda: CLOCKS)
        self.state = up()
        self.now_s = 0.0
        self.arrived = self.begun = self.firsts = 0
        self.wanted: list[int | None] = []
        self.tell()
        for _ in range(30):  # two seconds of prompts at the highest clock
            self.prompt(1000, 0.1)

    def tell(self, *prompts: tuple[float, float]) -> ClockWanted | None:
        """Tell of prompts without a first token, and have the follower look."""
        waiting = len(prompts)
        self.told.news = PromptNews(self.now_s, self.arrived, self.begun, self.firsts, prompts, waiting, waiting)
        return self.look()

    def look(self) -> ClockWanted | None:
        """Have the follower look, and its wish carried out."""
        wanted = self.follower.look(self.now_s, self.state)
        if wanted is not None:
            self.wanted.append(None if wanted.gpu_hz is None else wanted.gpu_hz // MHZ)
            self.state, _ = step(self.state, wanted)
        return wanted

    def prompt(self, tokens: int, long_s: float) -> None:
        """Let a prompt come, and its first token after a time; the next second begins."""
        self.arrived += tokens
        self.tell((tokens, self.now_s))
        self.now_s += long_s
        self.begun += tokens
        self.firsts += 1
        self.tell()
        self.now_s += 1.0


def test_a_waiting_prompt_raises_the_clock_at_once_and_without_one_it_falls_to_the_floor() -> None:
    """Within the look that tells of it; lowered at most every 0.2 s, and never by a trifle."""
    story = Story()
    story.now_s += 100.0
    story.tell()
    floor = story.wanted[-1]
    assert floor is not None
    assert floor < 600, "between prompts it stands below the tuned clock"
    story.arrived += 1600
    raised = story.tell((1600.0, story.now_s))
    assert raised is not None
    assert story.state.applied is not None
    per_s = story.follower.demand.rate.per_s
    assert per_s is not None
    assert story.wanted[-1] is not None
    needed = 1600 / per_s / (0.3 * 0.6) * 1000
    assert floor < needed <= story.wanted[-1] < needed + 50, "in 0.3 of 600 ms"
    assert story.state.applied.point[GPU_CLOCK] == story.wanted[-1] * MHZ
    story.now_s += 0.1
    story.begun, story.firsts = story.begun + 1600, story.firsts + 1
    assert story.tell() is None, "too soon after the last change"
    story.now_s += 0.15
    assert story.look() is not None
    assert story.wanted[-1] is not None
    assert story.wanted[-1] < 600
    trifle = len(story.wanted)
    story.now_s += 2.0
    story.tell()
    assert len(story.wanted) == trifle, "the load fades by less than a step is worth"


def test_with_nobody_to_tell_of_prompts_the_tuned_clock_holds() -> None:
    """The proxy is gone: what was wanted for its prompts is wanted no longer."""
    story = Story()
    story.told.news = None
    wanted = story.look()
    assert wanted is not None
    assert wanted.gpu_hz is None
    assert story.state.applied == Target(POINT)


def test_where_the_power_is_bounded_no_clock_above_the_tuned_one_is_set() -> None:
    """By a budget, a share or a guard; lower ones may be, and the tuned power limit stays."""
    raised = ClockWanted(1000 * MHZ, {"power_limit_w": 400}, "2 prompts wait")
    lowered = ClockWanted(300 * MHZ, {"power_limit_w": 400}, "0 prompts wait")
    free, _ = step(up(), raised)
    assert free.applied == Target(POINT.moved({GPU_CLOCK: 1000 * MHZ, "power_limit_w": 400}))
    guarded = replace(PLAN, bounds=replace(BOUNDS, power_w=15.0))
    for bounded in (step(up(), PowerBudget(15.0))[0], step(up(), PowerShare(50.0))[0], up(guarded)):
        assert step(bounded, raised)[0].applied == Target(POINT)
        assert step(bounded, lowered)[0].applied == Target(POINT.moved({GPU_CLOCK: 300 * MHZ}))


def test_a_lowest_clock_is_never_above_the_highest() -> None:
    """Where a point holds both, both are moved."""
    pair = OperatingPoint({GPU_CLOCK: 600 * MHZ, "gpu_min_hz": 500 * MHZ})
    assert ClockWanted(300 * MHZ).moved(pair, bounded=False)["gpu_min_hz"] == 300 * MHZ
    assert ClockWanted(900 * MHZ).moved(pair, bounded=False)["gpu_min_hz"] == 500 * MHZ


def test_a_guard_goes_before_prompts() -> None:
    """At the safe point no clock is set for them, and once it is left the last one is."""
    state = replace(up(), phase=Phase.DOWN, plan=None)
    assert step(state, ClockWanted(1000 * MHZ))[0].applied != Target(POINT.moved({GPU_CLOCK: 1000 * MHZ}))


@pytest.mark.parametrize(
    ("plan", "fault"),
    [
        (replace(PLAN, tokens=token_limits((), Bounds())), ""),
        (replace(PLAN, ladder=None), ""),
        (
            replace(
                PLAN,
                ladder=Ladder(
                    1.0,
                    (
                        replace(
                            LADDER.rungs[0],
                            service=replace(LADDER.rungs[0].service, point=OperatingPoint({"power_limit_w": 300})),
                        ),
                    ),
                ),
            ),
            "the profile does not set gpu_max_hz",
        ),
    ],
)
def test_what_cannot_be_followed_by_prompts_is_left_as_it_is(plan: ControlPlan, fault: str) -> None:
    """Nobody promised a first token, no ladder, or a point without a clock, which is said."""
    follower = PromptFollower(Told(PromptNews(0.0, 500, prompts=((500.0, 0.0),), waiting=1, sent=1)), lambda: CLOCKS)
    assert follower.look(0.0, up(plan)) is None
    assert fault in follower.fault
    assert bool(fault) is bool(follower.fault)


def test_a_board_that_does_not_say_its_clocks_is_asked_again_later() -> None:
    """The fault is shown until it does; it is not asked at every prompt."""
    asked: list[float] = []

    def clocks() -> BoardClocks:
        asked.append(now_s)
        if len(asked) < 2:
            raise DeviceError("the actuator cannot be reached")
        return CLOCKS

    told = Told(PromptNews(0.0, 500, prompts=((500.0, 0.0),), waiting=1, sent=1))
    follower = PromptFollower(told, clocks)
    for now_s in (0.0, 1.0, 9.0):
        assert follower.look(now_s, up()) is None
        assert "cannot be reached" in follower.fault
    now_s = 10.5
    wanted = follower.look(now_s, up())
    assert wanted is not None
    assert (wanted.gpu_hz, follower.fault, asked) == (1000 * MHZ, "", [0.0, 10.5])


def test_what_held_is_what_was_set_a_moment_before() -> None:
    """A change takes effect after a tenth of a second."""
    held = HeldShare()
    held.set(10.0, 0.5)
    held.set(11.0, 1.0)
    assert held.mean(10.0, 10.2) == pytest.approx(0.75)
    assert held.mean(10.5, 11.05) == pytest.approx(0.5)
    assert held.mean(11.0, 11.2) == pytest.approx(0.75)
    assert held.mean(12.0, 13.0) == 1.0


def test_the_loop_sets_the_clock_between_turns_and_no_drift_is_found_meanwhile(tmp_path: Path) -> None:
    """A prompt is answered for within the wait for the next turn; the rung's joules are not what is drawn then."""
    tuned = FollowedProfile("a.toml", PLAN, "openai://localhost:1/m", SLO)
    house = House(tmp_path, tuned)
    told = Told()
    house.runner._prompts = PromptFollower(told, lambda: CLOCKS)
    board: FakeBoard = house.board
    house.turns(2)
    assert board.applied is not None
    assert board.applied[GPU_CLOCK] == 600 * MHZ
    told.news = PromptNews(house.clock.now(), 500, prompts=((500.0, house.clock.now()),), waiting=1, sent=1)
    house.runner.hurry(house.clock.now() + 0.01)
    assert board.applied[GPU_CLOCK] == 1000 * MHZ
    assert "prompts wait" in house.runner.executor.reason
    house.turns(1)
    assert house.desk.status.reason.startswith("1 prompts wait")


@contextmanager
def proxied(server: FakeServer) -> Iterator[str]:
    """Run the proxy in front of a server, in a thread of its own; yields its address."""
    ready, over = Queue[tuple[asyncio.AbstractEventLoop, str]](), asyncio.Event()

    async def serve() -> None:
        proxy = Proxy(ProxyOptions(f"http://{server.where}", "127.0.0.1:0", 4, 4, grace_s=0.0))
        await proxy.open()
        ready.put((asyncio.get_running_loop(), f"http://{proxy.where}"))
        await over.wait()
        await proxy.close()

    thread = threading.Thread(target=lambda: asyncio.run(serve()))
    thread.start()
    loop, address = ready.get(timeout=PATIENCE_S)
    try:
        yield address
    finally:
        loop.call_soon_threadsafe(over.set)
        thread.join()


def until(holds: Callable[[], bool]) -> None:
    """Wait for something; a bound on hangs alone."""
    deadline_s = time.monotonic() + PATIENCE_S
    while not holds():
        assert time.monotonic() < deadline_s, "it did not come to be"
        time.sleep(0.01)


def test_a_daemon_as_it_is_started_hears_of_a_prompt_and_sets_its_board(tmp_path: Path) -> None:
    """Its settings say ``proxy:``; the highest clock holds until the first token, the tuned one or less after it."""
    begin = threading.Event()

    def slowly(handler: Handler, body: bytes) -> None:
        begin.wait(PATIENCE_S)
        stream(handler, piece("a"), piece("b"), usage(2), b"data: [DONE]\n\n")

    point = OperatingPoint({GPU_CLOCK: 1185 * MHZ, "power_limit_w": 300})
    tuned = OperatingPoint({**point, IN_FLIGHT: 2})
    seen = measured(latency_s=4.0, energy_j=200.0)
    profile = tmp_path / "a100.toml"
    made = Profile("sim:a100-sxm", "llama-3.1-8b", tuned, seen, slo=SLO, workload_knobs=(IN_FLIGHT,))
    write_profile(made, profile)
    server, clock, desk = FakeServer(), WakingClock(), Mailbox()
    server.answers = {("POST", "/v1/completions"): slowly}
    with listening(server), proxied(server) as address:
        settings = Settings(profile=str(profile), traffic=f"proxy:{address}")
        runner, _ = build(settings, clock, desk, folder=tmp_path / "state")
        thread = threading.Thread(target=runner.run)
        thread.start()

        def set_to() -> OperatingPoint:
            applied = runner.executor.state.applied
            return OperatingPoint({}) if applied is None else applied.point

        try:
            until(lambda: set_to() == tuned and bound_at(address) == 2)
            connection = http.client.HTTPConnection(urlsplit(address).netloc)
            connection.request("POST", "/v1/completions", b'{"stream": true, "prompt": "%s"}' % (b"a" * 4000))
            until(lambda: set_to() == OperatingPoint({**tuned, GPU_CLOCK: 1410 * MHZ, "power_limit_w": 400}))
            assert bound_at(address) == 2
            begin.set()
            assert b"[DONE]" in connection.getresponse().read()
            until(lambda: int(set_to().get(GPU_CLOCK, 1410 * MHZ)) <= 1185 * MHZ)
            connection.close()
        finally:
            runner.stop()
            clock.wake()
            thread.join()
            clock.close()
        assert bound_at(address) == 4, "the bound on the requests in flight is as it was found"


def bound_at(address: str, limit: int | None = None) -> int:
    """Return the proxy's bound on the requests in flight, after setting one if it is given."""
    connection = http.client.HTTPConnection(urlsplit(address).netloc, timeout=PATIENCE_S)
    body = None if limit is None else json.dumps({"limit": limit})
    connection.request("GET" if limit is None else "PUT", "/polythrottle/in_flight", body)
    found = json.loads(connection.getresponse().read())
    connection.close()
    return int(found["limit"])


def test_the_proxys_bound_follows_the_point_and_is_left_to_whoever_sets_it_by_hand() -> None:
    """It is told of each change once; one started anew is told again, and one that holds all back is left so."""
    with listening(FakeServer()) as server, proxied(server) as address, proxied(server) as other:
        bound = InFlightBound(urlsplit(address))
        bound.look(0.0, proxy=1)
        assert bound_at(address) == 4, "no point has asked for any"
        bound.want(2)
        bound.look(0.1, proxy=1)
        until(lambda: bound_at(address) == 2)
        bound_at(address, 3)
        bound.look(60.0, proxy=1)
        bound.want(None)
        bound.look(60.1, proxy=1)
        bound.close()
        assert bound_at(address) == 3, "a person has set it since"
        bound = InFlightBound(urlsplit(other))
        bound_at(other, 0)
        bound.want(2)
        bound.look(0.0, proxy=1)
        until(lambda: "holds all requests back" in bound.why)
        assert bound_at(other) == 0
        bound_at(other, 4)
        bound.look(5.0, proxy=1)
        assert bound_at(other) == 4, "it is not asked again so soon"
        bound.look(10.0, proxy=1)
        until(lambda: bound_at(other) == 2 and not bound.why)
        bound_at(other, 8)
        bound.look(20.0, proxy=2)
        until(lambda: bound_at(other) == 2)
        bound.close()
        assert bound_at(other) == 8, "as the one that was started anew had it"


def test_how_long_each_prompt_waited_is_known_once_however_often_it_is_told() -> None:
    """What came before the daemon listened is not counted, and a proxy that begins anew is no old one."""
    clock = VirtualClock()
    server, told = FakeServer(), Queue[bytes]()

    def follow(handler: Handler, body: bytes) -> None:
        handler.raw(told.get(timeout=PATIENCE_S), length=-1)
        while (line := told.get(timeout=PATIENCE_S)) != b"over":
            handler.wfile.write(line)

    server.answers = {("GET", "/polythrottle/prompts"): follow}
    with listening(server):
        stream = PromptStream(urlsplit(f"http://{server.where}"), clock)
        for firsts, lately in (
            (3, [[9, 0.9]]),
            (3, [[9, 0.9]]),
            (5, [[9, 0.9], [100, 0.1], [700, 0.7]]),
            (1, [[5, 0.5]]),
        ):
            told.put(event({**EVENT, "firsts": firsts, "lately": lately}))
        told.put(event({**EVENT, "firsts": 2, "lately": [[5, 0.5], [6, 0.6]], "waiting": 7}))
        until(lambda: (news := stream.prompts()) is not None and news.waiting == 7)
        assert stream.firsts() == ((100, 0.1), (700, 0.7), (6, 0.6))
        clock.sleep(61)
        assert stream.firsts() == ()
        told.put(b"over")
        stream.close()


def test_a_limit_for_some_lengths_of_prompts_is_guarded_and_not_by_chance_alone() -> None:
    """One late prompt of fifty is no reason yet, nor are any of another length; five are."""
    limits = ("ttft_p99<=600ms for prompts<=4096", "ttft_p99<=2s for prompts>4096", "tpot_p99<=100ms")
    bounds = bounds_of(limits)
    in_time = ((4096.0, 0.6),) * 50 + ((4097.0, 1.9),) * 5
    for late, trips in ((0, False), (1, False), (4, False), (5, True)):
        seen = Observation(0.0, firsts=(*in_time, *((500.0, 0.61),) * late))
        words = [trip.words for trip in tripped(bounds, seen)]
        assert words == ["5 of 55 first tokens came later than 600 ms for prompts<=4096"] * trips
        short, long = (each for each in guards_of(bounds, seen) if each.name.startswith("ttft p99 for"))
        assert (short.name, short.limit, short.tripped) == ("ttft p99 for prompts<=4096", 0.6, trips)
        assert short.value == pytest.approx(0.61 if late else 0.6)
        assert (long.value, long.tripped) == (None, False), "five are too few for a p99"
    assert "ttft p99 for prompts<=4096 610 ms of 600 ms" in guard_words(short)
    everybody = Observation(0.0, firsts=((10.0, 3.0),) * 4000)
    assert [trip.guard for trip in tripped(bounds, everybody)] == [Guard.TTFT]


def test_a_proxy_that_is_gone_or_refuses_the_bound_is_named_and_asked_again() -> None:
    """Neither stops anybody."""
    server = FakeServer()
    server.answers = {("GET", "/polythrottle/in_flight"): lambda handler, _: handler.raw(b"only from here", 403)}
    with listening(server):
        bound = InFlightBound(urlsplit(f"http://{server.where}"))
        bound.want(2)
        bound.look(0.0, proxy=1)
        until(lambda: "it answers 403: only from here" in bound.why)
        server.answers = {("GET", "/polythrottle/in_flight"): lambda handler, _: handler.raw(b"[4]")}
        bound.look(10.0, proxy=1)
        until(lambda: "it answers [4]" in bound.why)
    bound.look(20.0, proxy=1)
    until(lambda: "refused" in bound.why)
    bound.close()


@pytest.mark.parametrize("body", [b"[" * 4000, b'{"limit": 4, "limit": 4}', b'{"limit": 4, "other": 1e999}'])
def test_a_proxy_that_answers_no_document_is_named_and_asked_again(body: bytes) -> None:
    """Nested deep, a key twice, a number without end: each is told, and the thread that asks does not die of it."""
    server = FakeServer()
    server.answers = {("GET", "/polythrottle/in_flight"): lambda handler, _: handler.raw(body)}
    with listening(server):
        bound = InFlightBound(urlsplit(f"http://{server.where}"))
        bound.want(2)
        bound.look(0.0, proxy=1)
        until(lambda: f"it answers {body[:20].decode()}" in bound.why and bound._due)
        bound.close()


@pytest.mark.parametrize(
    ("lines", "why"),
    [
        (b"data: {}\n\n", "it tells of no prompts"),
        (b"data: [1, 2\n\n", "it tells of no prompts"),
        (b"data: " + b"[" * 60_000 + b"\n\n", "it tells of no prompts"),
        (event({**EVENT, "made": float("nan")}), "not finite, or a count is negative"),
        (event({**EVENT, "waiting": -1}), "not finite, or a count is negative"),
        (event({**EVENT, "lately": [[float("inf"), 0.0]]}), "not finite, or a count is negative"),
        (event({**EVENT, "lately": [7]}), "it tells of no prompts"),
        (b"data: [1]\n\n", "it tells of no prompts"),
        (event({**EVENT, "prompts": [[1e999, 0.0]]}), "not finite, or a count is negative"),
        (b"", "it has ended the connection"),
    ],
)
def test_events_that_are_none_are_a_note_and_no_prompts(lines: bytes, why: str) -> None:
    """Whatever comes, nothing is followed and the reason is shown."""
    server = FakeServer()
    server.answers = {("GET", "/polythrottle/prompts"): lambda handler, _: handler.raw(lines, length=-1)}
    with listening(server):
        told = PromptStream(urlsplit(f"http://{server.where}"))
        try:
            until(lambda: bool(told.why))
            assert why in told.why
            assert told.prompts() is None
        finally:
            told.close()


def test_events_are_read_again_once_the_proxy_is_back() -> None:
    """A server that is no proxy is said to answer 404."""
    server, rung_ = FakeServer(), threading.Event()

    def events(handler: Handler, body: bytes) -> None:
        handler.raw(b": hello\n\n" + event({**EVENT, "prompts": [[700, 0.25]], "waiting": 1}), length=-1)
        server.over.wait(PATIENCE_S)

    with listening(server):
        told = PromptStream(urlsplit(f"http://{server.where}"))
        told.on_news(rung_.set)
        try:
            until(lambda: "404" in told.why)
            server.answers = {("GET", "/polythrottle/prompts"): events}
            until(lambda: told.prompts() is not None)
            news = told.prompts()
            assert news is not None
            (tokens, came_s), *_ = news.prompts
            assert (tokens, came_s) == (700.0, pytest.approx(news.heard_s - 0.25))
            assert (told.why, rung_.is_set()) == ("", True)
        finally:
            server.over.set()
            told.close()


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("proxy:", "lacks"),
        ("proxy:127.0.0.1:8001", "no address"),
        ("proxy:http://127.0.0.1:8001/v1", "has a path"),
        ("proxy:http://127.0.0.1:8001?model=a", "known: request_tokens"),
        ("prox:http://127.0.0.1:8001", "did you mean proxy"),
    ],
)
def test_a_proxy_that_is_none_says_so(text: str, says: str) -> None:
    """One line each."""
    with pytest.raises(PolythrottleError, match=says) as caught:
        open_traffic(text)
    assert "\n" not in str(caught.value)


def test_behind_the_real_proxy_the_daemon_saves_more_than_the_best_fixed_clock_and_holds() -> None:
    """Simulated engine and GPU, real sockets, in virtual time: half a minute of requests of many lengths."""
    from llm_daemon import served

    from polythrottle.lab.reproduce.language_models import Scene

    random = np.random.default_rng(5)
    times_s = np.cumsum(random.exponential(1 / 1.8, 60))
    lengths = np.exp(random.normal(-0.32, 0.8, (60, 2))) * (1155, 60)
    calls = [
        (float(at_s), int(min(3000, 1 + prompt)), int(2 + output))
        for at_s, (prompt, output) in zip(times_s, lengths, strict=True)
    ]
    scene = Scene("a100-sxm", "llama-3.1-8b")
    top, fixed = (served(scene, calls, hz).outcome for hz in (1410e6, 1185e6))
    ours = served(scene, calls, 1185e6, follows=True).outcome
    assert ours.good >= fixed.good - 1
    assert ours.energy_j < 0.93 * fixed.energy_j < 0.86 * top.energy_j
