"""The daemon behind the proxy, on recorded requests to a simulated language model, beside clocks that stay.

    python benchmarks/llm_daemon.py --data FOLDER [--minutes 10 --from 15] [--loads 0.5,0.9] [--board a100-sxm ...]

Everything but the GPU is real code at work: clients send each request over a socket to the proxy, which passes it on to
an OpenAI-compatible server; that one streams a token per step of the simulated engine. The daemon's control loop reads
the proxy's events and metrics and sets the board, whose clock changes 100 ms later, also within a step. One event loop
runs all of it in virtual time: it moves on to the next moment at which anything is to happen once every socket is idle.
What the code itself takes is therefore not in the times; `benchmarks/proxy.md` has what the proxy adds.

Times are those that clients see. Limits: TTFT p99 600 ms (2 s beyond 4,096 tokens), TPOT p99 100 ms. The daemon knows
the point it was tuned to (here the best fixed clock), the limits, and what the proxy tells: how many tokens a prompt
has is guessed by bytes, of which each request has 3.2 to 4.8 a token. How fast prompts are computed it learns.
"""

import argparse
import asyncio
import json
import math
import selectors
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from polythrottle.backends.simulated.engine import StepPhysics
from polythrottle.backends.simulated.language_model import BLOCK_TOKENS, TokenRequest, TokenServer
from polythrottle.catalog import load_board, load_language_model
from polythrottle.daemon.control.events import GPU_CLOCK, ControlPlan, Target
from polythrottle.daemon.energy_accounts import Accounts
from polythrottle.daemon.followed_profile import UNTOUCHED, FollowedProfile, bounds_of, token_limits
from polythrottle.daemon.history_store import HistoryStore
from polythrottle.daemon.loop.mailbox import Mailbox
from polythrottle.daemon.loop.runner import LoopComponents, Runner
from polythrottle.daemon.study_process import Studies
from polythrottle.daemon.traffic.engines import PROXY
from polythrottle.daemon.traffic.proxy_prompts import (
    METRICS_PATH,
    PROMPTS_PATH,
    BoardClocks,
    FirstTokens,
    ProxiedTraffic,
    news_of,
)
from polythrottle.daemon.traffic.server_metrics import Fetcher, Page, ScrapedTraffic
from polythrottle.daemon.trainer_monitor import TrainerMonitor
from polythrottle.domain.ladder import Ladder, PointPerformance, Rung
from polythrottle.domain.load.prompt_boost import PromptNews
from polythrottle.domain.measurement import EnergyKind, Reading
from polythrottle.domain.space import OperatingPoint
from polythrottle.lab.reproduce.language_models import (
    DELAY_S,
    Fixed,
    Outcome,
    Scene,
    capacity_per_s,
    outcome_of,
    recorded_calls,
)
from polythrottle.lab.reproduce.steered_server import BUDGET, LONG_PROMPT, LONG_TTFT_S, TPOT_S, TTFT_S
from polythrottle.proxy.in_flight_limiter import Proxy, ProxyOptions

TRACE = "azure_llm_2023_conv_first_half_hour.csv.gz"
SLO = (
    f"ttft_p99<={TTFT_S:g}s for prompts<={LONG_PROMPT}",
    f"ttft_p99<={LONG_TTFT_S:g}s for prompts>{LONG_PROMPT}",
    f"tpot_p99<={TPOT_S:g}s",
)
IN_FLIGHT = 256
TOKEN = b'data: {"choices":[{"index":0,"delta":{"content":"a "}}]}\n\n'
HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\nConnection: close\r\n\r\n"
BYTES = (3.2, 4.8)
LOOK_S, TURN_S, PAGE_S = 0.1, 1.0, 0.4


class WarpingSelector(selectors.EpollSelector):
    """Does not wait: with every socket idle it moves the loop's time on to where the next timer is due."""

    now_s = 0.0
    warps = False

    def select(self, timeout: float | None = None) -> list[Any]:
        """Return what is ready now; while `warps` is off, as any other selector does."""
        if timeout is None or timeout <= 0 or not self.warps:
            return super().select(timeout)
        ready = super().select(0)
        if not ready:
            self.now_s += timeout
        return ready


class VirtualLoop(asyncio.SelectorEventLoop):
    """An event loop in virtual time."""

    def __init__(self) -> None:
        self.selector = WarpingSelector()
        super().__init__(self.selector)
        self._clock_resolution = 1e-6

    def time(self) -> float:
        """Return the virtual time in seconds."""
        return self.selector.now_s


class Engine:
    """A simulated engine that steps in the loop's time, at a clock that may change within a step.

    Args:
        loop: Of everything.
        scene: Which model on which board.
        gpu_hz: The clock it begins with.
        delay_s: What a change of clock takes.
    """

    def __init__(self, loop: VirtualLoop, scene: Scene, gpu_hz: float, delay_s: float = DELAY_S) -> None:
        board, model = load_board(scene.board), load_language_model(scene.workload)
        model = replace(model, server=replace(model.server, max_batched_tokens=BUDGET))
        assert board.language is not None
        self.physics = StepPhysics(model, board.language, float(board.knob(GPU_CLOCK).levels[-1]))
        self.server = TokenServer(model, self.physics, model.blocks(board.memory_bytes, BLOCK_TOKENS), 1 << 20)
        self.gpu_hz = gpu_hz
        self.changes = 0
        self.start_s = model.server.start_s
        self._lowest_hz = board.language.lowest * self.physics._top_hz
        self._loop, self._delay_s, self._gpus = loop, delay_s, model.gpus
        self._cap_w = board.power_max_w
        self._energy_j = 0.0
        self._counted_s = loop.time()
        self._step: Any = None
        self._left = 0.0
        self._end: asyncio.TimerHandle | None = None
        self._streams: dict[int, tuple[TokenRequest, asyncio.Transport, list[int]]] = {}

    def ask(self, request: TokenRequest, transport: asyncio.Transport) -> None:
        """Take in a request once its time to reach the scheduler has come."""
        self._streams[id(request)] = (request, transport, [0])
        self._count()
        self.server.add(request)
        if self._step is None:
            self._begin()

    def wish(self, gpu_hz: float) -> None:
        """Have the clock changed."""
        self.changes += 1
        self._loop.call_later(self._delay_s, self._change, max(gpu_hz, self._lowest_hz))

    def energy_j(self) -> float:
        """Return the joules so far, of all GPUs."""
        self._count()
        return self._energy_j

    def _change(self, gpu_hz: float) -> None:
        self._count()
        self.gpu_hz = gpu_hz
        if self._step is not None:
            self._schedule()

    def _count(self) -> None:
        """Add what was drawn since the last time, and take what was computed off the step."""
        passed_s = self._loop.time() - self._counted_s
        self._counted_s += passed_s
        if self._step is None:
            self._energy_j += passed_s * self.physics.idle_w() * self._gpus
            return
        whole_s, power_w, _ = self.physics.run(self._step[0], self.gpu_hz, self._cap_w)
        self._left -= passed_s / whole_s
        self._energy_j += passed_s * power_w * self._gpus

    def _begin(self) -> None:
        self._step = (*self.server.plan(), self._loop.time())
        self._left = 1.0
        self._schedule()

    def _schedule(self) -> None:
        if self._end is not None:
            self._end.cancel()
        whole_s, _, _ = self.physics.run(self._step[0], self.gpu_hz, self._cap_w)
        self._end = self._loop.call_later(max(0.0, self._left) * whole_s, self._over)

    def _over(self) -> None:
        self._count()
        work, pieces, begin_s = self._step
        computing = {id(request) for request in self.server.prompts}
        decoding = [each for key, each in self._streams.items() if each[0].joined and key not in computing]
        step = self.server.advance(begin_s, work, pieces, (self._loop.time() - begin_s, 0.0, self.gpu_hz))
        self._step = None
        for _, transport, made in decoding:
            self._send(transport, made, 1)
        for request in step.started:
            _, transport, made = self._streams[id(request)]
            transport.write(HEAD)
            self._send(transport, made, 1)
        for request in step.finished:
            _, transport, made = self._streams.pop(id(request))
            self._send(transport, made, request.output_tokens - made[0])
            used = {"prompt_tokens": request.prompt_tokens, "completion_tokens": request.output_tokens}
            transport.write(_chunk(b"data: " + json.dumps({"choices": [], "usage": used}).encode() + b"\n\n"))
            transport.write(_chunk(b"data: [DONE]\n\n") + b"0\r\n\r\n")
            transport.close()
        if not self.server.idle:
            self._begin()

    @staticmethod
    def _send(transport: asyncio.Transport, made: list[int], count: int) -> None:
        for _ in range(count):
            transport.write(_chunk(TOKEN))
        made[0] += count


def _chunk(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)


class ServerConnection(asyncio.Protocol):
    """One request to the simulated server, which says by ``user`` how many tokens its prompt has."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._data = b""
        self._transport: Any = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Begin."""
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        """Take in the request."""
        self._data += data
        head, found, body = self._data.partition(b"\r\n\r\n")
        if not found:
            return
        lines = dict(line.lower().split(b": ", 1) for line in head.split(b"\r\n")[1:])
        if len(body) < int(lines[b"content-length"]):
            return
        asked = json.loads(body)
        loop = asyncio.get_running_loop()
        ready_s = loop.time() + self._engine.start_s
        request = TokenRequest(loop.time(), int(asked["user"]), asked["max_tokens"], ready_s=ready_s)
        loop.call_at(ready_s, self._engine.ask, request, self._transport)


class ClientConnection(asyncio.Protocol):
    """One request of one client, and when its first and last token came."""

    def __init__(self, seen: TokenRequest, body: bytes, done: asyncio.Future[None]) -> None:
        self._seen, self._body, self._done = seen, body, done

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Send it."""
        assert isinstance(transport, asyncio.Transport)
        head = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\nContent-Length: %d\r\n\r\n"
        transport.write(head % len(self._body) + self._body)

    def data_received(self, data: bytes) -> None:
        """Take note of tokens."""
        tokens = data.count(b'"content"')
        if tokens:
            self._seen.last_s = asyncio.get_running_loop().time()
            self._seen.made += tokens
            if self._seen.first_s is None:
                self._seen.first_s = self._seen.last_s

    def connection_lost(self, exc: Exception | None) -> None:
        """End."""
        self._done.set_result(None)


# The daemon on the same loop: its control loop, a board that is the engine's, and the proxy's events and metrics.


class LoopClock:
    """The loop's time as the control loop's clock; nobody sleeps on it."""

    def __init__(self, loop: VirtualLoop) -> None:
        self.now = loop.time

    def sleep(self, duration_s: float) -> None:
        """Do nothing."""


class SteeredBoard:
    """The engine's GPU; satisfies the port ``Board``."""

    uri, title, energy_kind, boundary = "sim:steered", "a simulated GPU", EnergyKind.SIMULATED, "all GPUs"

    def __init__(self, engine: Engine, clock: LoopClock) -> None:
        self._engine, self._clock = engine, clock
        self._hz = engine.gpu_hz

    def take(self) -> None:
        """Do nothing."""

    def apply(self, point: OperatingPoint) -> None:
        """Set the clock; the highest where the point has none."""
        self._set(float(point.get(GPU_CLOCK, self._engine.physics._top_hz)))

    def _set(self, gpu_hz: float) -> None:
        if gpu_hz != self._hz:
            self._hz = gpu_hz
            self._engine.wish(gpu_hz)

    def read(self) -> Reading:
        """Return the joules so far."""
        return Reading(self._clock.now(), self._engine.energy_j(), 50.0, {"gpu": int(self._engine.gpu_hz)})

    def verify(self) -> tuple[str, ...]:
        """Return nothing."""
        return ()

    def restore(self) -> None:
        """Set the highest clock."""
        self._set(self._engine.physics._top_hz)

    def release(self) -> tuple[str, ...]:
        """Likewise."""
        self.restore()
        return ()

    def lend(self) -> tuple[str, dict[str, str]]:
        """Lend nothing."""
        return self.uri, {}

    def take_back(self) -> None:
        """Do nothing."""


class LoopPages(Fetcher):
    """The proxy's page of metrics as it was fetched last."""

    def __init__(self) -> None:
        self.text: str | None = None
        self._number = 0

    def page(self, patience_s: float) -> Page:
        """Return it."""
        self._number += 1
        return Page(self._number, self.text)

    def close(self) -> None:
        """Do nothing."""


class LoopStream:
    """The proxy's events as they come on the loop."""

    why = ""
    connected = 1

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.news: PromptNews | None = None
        self._loop = loop
        self._firsts = FirstTokens()

    def heard(self, data: bytes) -> None:
        """Take in an event."""
        before, self.news = self.news, news_of(data, self._loop.time())
        self._firsts.heard(before, self.news)

    def firsts(self) -> tuple[tuple[float, float], ...]:
        """Return how long prompts waited lately."""
        return self._firsts.lately(self._loop.time())

    def prompts(self) -> PromptNews | None:
        """Return the last."""
        return self.news

    def on_news(self, ring: Any) -> None:
        """Do nothing: `follow` looks at each."""

    def close(self) -> None:
        """Do nothing."""


class Daemon:
    """The control loop, turned by the event loop.

    Args:
        loop: Of everything.
        engine: That it steers.
        clocks_hz: Of the board.
        tuned_hz: The clock of its profile.
        folder: For its memory.
    """

    def __init__(
        self, loop: VirtualLoop, engine: Engine, clocks_hz: Sequence[float], tuned_hz: float, folder: Path
    ) -> None:
        clock = LoopClock(loop)
        self.board = SteeredBoard(engine, clock)
        self.pages, self.stream = LoopPages(), LoopStream(loop)
        scraped = ScrapedTraffic(self.pages, (PROXY,), "", "proxy:")
        wall = lambda: 1.7e9 + loop.time()  # noqa: E731
        record = HistoryStore(folder / "daemon.db", wall)
        parts = LoopComponents(
            clock,
            self.board,
            ProxiedTraffic(scraped, self.stream, "proxy:"),  # type: ignore[arg-type]
            Mailbox(),
            record,
            Accounts(record, wall),
            Studies(folder, self.board, record, clock, ("false",)),
            wall=wall,
            slept_s=lambda: 0.0,
            finetuning=TrainerMonitor((folder / "finetune",), wall),
            clocks=lambda: BoardClocks(tuple(int(each) for each in clocks_hz), {}),
        )
        self.runner = Runner(parts, followed(tuned_hz))
        self._loop = loop
        self._due_s = 0.0

    async def follow(self, port: int) -> None:
        """Read the proxy's events and look at each at once."""
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(f"GET {PROMPTS_PATH} HTTP/1.1\r\nHost: localhost\r\n\r\n".encode())
        with closing(writer):
            while line := await reader.readline():
                if line.startswith(b"data:"):
                    self.stream.heard(line[5:])
                    self.runner.hurry(self._due_s)

    async def fetch(self, port: int) -> None:
        """Fetch the proxy's metrics again and again."""
        while True:
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            with closing(writer):
                writer.write(f"GET {METRICS_PATH} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n".encode())
                self.pages.text = (await reader.read()).partition(b"\r\n\r\n")[2].decode()
            await asyncio.sleep(PAGE_S)

    async def turn(self) -> None:
        """Turn each second, and look in between."""
        while True:
            self._due_s = self._loop.time() + TURN_S
            self.runner.turn()
            for _ in range(round(TURN_S / LOOK_S) - 1):
                await asyncio.sleep(LOOK_S)
                self.runner.hurry(self._due_s)
            await asyncio.sleep(self._due_s - self._loop.time())


def followed(tuned_hz: float) -> FollowedProfile:
    """Return the profile of a clock that was tuned; what it answers and draws there is of no consequence here."""
    point = OperatingPoint({GPU_CLOCK: int(tuned_hz)})
    service = PointPerformance(point, 1, 0.01, 1.0, 2.0, 1.0, 80.0)
    ladder = Ladder(60.0, (Rung(70.0, service, 0.0, 90.0, 2.0),))
    bounds = bounds_of(SLO)
    plan = ControlPlan(ladder, UNTOUCHED, Target(point), bounds, token_limits(SLO, bounds))
    return FollowedProfile("tuned.toml", plan, "openai://simulated", SLO)


@dataclass(frozen=True)
class Run:
    """What came of the requests, how often the clock was set, and what the daemon thinks of prompts' speed."""

    outcome: Outcome
    changes: int = 0
    per_s: float | None = None


async def asked(loop: VirtualLoop, calls: Sequence[tuple[float, int, int]], port: int) -> list[TokenRequest]:
    """Send each request at its time, and return what its client saw once all are answered; times from the first on."""
    begin_s = loop.time()
    random = np.random.default_rng(23)
    waits, seen = [], []
    for time_s, prompt, output in calls:
        await asyncio.sleep(max(0.0, begin_s + time_s - loop.time()))
        request = TokenRequest(loop.time(), prompt, output)
        text = "x" * round(prompt * random.uniform(*BYTES))
        words = {"prompt": text, "max_tokens": output, "user": str(prompt), "stream": True}
        done: asyncio.Future[None] = loop.create_future()
        client = ClientConnection(request, json.dumps(words).encode(), done)
        await loop.create_connection(partial(_same, client), "127.0.0.1", port)
        seen.append(request)
        waits.append(done)
    await asyncio.gather(*waits)
    for request in seen:
        assert request.made == request.output_tokens, "an answer lacks tokens"
        request.arrival_s -= begin_s
        request.first_s = (request.first_s or 0.0) - begin_s
        request.last_s -= begin_s
    return seen


def _same(client: ClientConnection) -> ClientConnection:
    return client


async def _served(
    loop: VirtualLoop, scene: Scene, calls: Sequence[tuple[float, int, int]], gpu_hz: float, follows: bool
) -> Run:
    clocks_hz = scene.clocks_hz()
    engine = Engine(loop, scene, clocks_hz[-1] if follows else gpu_hz)
    listener = await loop.create_server(lambda: ServerConnection(engine), "127.0.0.1", 0)
    proxy = Proxy(
        ProxyOptions(f"http://127.0.0.1:{listener.sockets[0].getsockname()[1]}", "127.0.0.1:0", IN_FLIGHT, 4096)
    )
    await proxy.open()
    await proxy._server._look_up()  # in a thread of its own, which virtual time would not wait for
    loop.selector.warps = True
    tasks: list[asyncio.Task[None]] = []
    with tempfile.TemporaryDirectory() as folder:
        daemon = None
        if follows:
            daemon = Daemon(loop, engine, clocks_hz, gpu_hz, Path(folder))
            tasks = [loop.create_task(work) for work in (daemon.follow(proxy.port), daemon.fetch(proxy.port))]
            await asyncio.sleep(0.1)
            tasks.append(loop.create_task(daemon.turn()))
        begin_j = engine.energy_j()
        seen = await asked(loop, calls, proxy.port)
        outcome = outcome_of(seen, engine.energy_j() - begin_j, 0.0)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        per_s = None
        if daemon is not None and daemon.runner._prompts is not None:
            per_s = daemon.runner._prompts.demand.rate.per_s
            daemon.runner.end()
    listener.close()
    await proxy.close()
    for _ in range(3):  # closed transports are let go in the loop's next turns
        await asyncio.sleep(0)
    return Run(outcome, engine.changes, per_s)


def served(scene: Scene, calls: Sequence[tuple[float, int, int]], gpu_hz: float, follows: bool = False) -> Run:
    """Return what comes of requests at a clock that stays, or with the daemon, tuned to it."""
    loop = VirtualLoop()
    asyncio.set_event_loop(loop)
    try:
        return loop.run_until_complete(_served(loop, scene, calls, gpu_hz, follows))
    finally:
        asyncio.set_event_loop(None)
        loop.close()


def best_fixed_hz(scene: Scene, calls: Sequence[tuple[float, int, int]], every: int) -> float:
    """Return the clock that holds most minutes for least energy if it stays, by the simulation without sockets."""
    clocks_hz = scene.clocks_hz()
    tried = {gpu_hz: scene.serve(calls, Fixed(gpu_hz)) for gpu_hz in (*clocks_hz[len(clocks_hz) // 4 :: every],)}
    tried[clocks_hz[-1]] = scene.serve(calls, Fixed(clocks_hz[-1]))
    return min(tried, key=lambda gpu_hz: (-tried[gpu_hz].held, tried[gpu_hz].energy_j))


def rows(scene: Scene, calls: Sequence[tuple[float, int, int]], every: int) -> Iterator[str]:
    """Yield the rows of a table: the highest clock, the best that stays, the daemon."""
    best_hz = best_fixed_hz(scene, calls, every)
    top = served(scene, calls, scene.clocks_hz()[-1]).outcome
    daemon = served(scene, calls, best_hz, follows=True)
    shown = {
        "highest clock": top,
        f"best fixed clock, {best_hz / 1e6:.0f} MHz": served(scene, calls, best_hz).outcome,
        "the daemon, tuned to that": daemon.outcome,
    }
    for name, one in shown.items():
        saved = 1 - one.energy_j / top.energy_j
        yield (
            f"| {name} | {saved:.1%} | {one.requests - one.good} | {one.held:.0%} | {1e3 * one.ttft_p99_s:.0f} ms | "
            f"{1e3 * one.tpot_p99_s:.0f} ms | {one.mean_s:.2f} s |"
        )
    yield f"\n{daemon.changes} changes of clock; prompts computed {daemon.per_s or math.nan:,.0f} tokens/s as learnt"


def main() -> None:
    """Print the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--board", default="a100-sxm")
    parser.add_argument("--workload", default="llama-3.1-8b")
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--from", dest="begin", type=float, default=15.0)
    parser.add_argument("--loads", default="0.5,0.9")
    parser.add_argument("--capacity", type=float, default=None, help="requests a second, where it is known")
    parser.add_argument("--every", type=int, default=2, help="of the searched clocks, each so many-th is tried")
    told = parser.parse_args()
    scene = Scene(told.board, told.workload)
    capacity = told.capacity or capacity_per_s(scene, told.data / TRACE, told.minutes, told.begin)[0]
    longest = load_language_model(told.workload).lengths.longest
    for load in map(float, told.loads.split(",")):
        calls = recorded_calls(told.data / TRACE, told.minutes, load * capacity, longest, told.begin)
        print(f"\n{told.workload} on {told.board}, {load:g} of {capacity:.2f}/s, {len(calls)} requests\n")
        print("| | joules saved | late | minutes held | TTFT p99 | TPOT p99 | mean end to end |")
        print("|---|---|---|---|---|---|---|")
        for row in rows(scene, calls, told.every):
            print(row, flush=True)


if __name__ == "__main__":
    main()
