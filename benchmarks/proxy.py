"""What `polythrottle proxy` adds to each token, and what it costs: `python benchmarks/proxy.py [--write FILE]`.

A server in a process of its own streams events of a vLLM-like length over server-sent events, each with the time when
it was written (CLOCK_MONOTONIC, one clock for all processes of a machine). A client in another process takes the time
when it arrived. Both are as small as can be, and the same requests go straight to the server and through the proxy, in
turn. Three shapes of load: tokens of all streams spread evenly in time; all streams at once every so often, as one
engine's step sends them; and one stream as fast as it goes.

On a machine that others use, `chrt -f 10` before the command keeps them away for the time this takes.
"""

import argparse
import asyncio
import os
import re
import resource
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import numpy as np
import psutil

_EVENT = (
    b'data: {"id":"chatcmpl-0123456789abcdef0123456789abcdef","object":"chat.completion.chunk","created":1795540773,'
    b'"model":"meta-llama/Llama-3.1-8B-Instruct","t":%020d,"choices":[{"index":0,"delta":{"content":" token"},'
    b'"logprobs":null,"finish_reason":null}]}\n\n'
)
_TIME = re.compile(rb'"t":(\d{20})')
_SPREAD, _STEPS = "spread", "steps"


class Shape(NamedTuple):
    """A load: so many streams, of so many tokens a second each, spread in time or all at once."""

    streams: int
    per_s: float
    kind: str = _SPREAD

    def __str__(self) -> str:
        """Return it for people."""
        how = "evenly" if self.kind == _SPREAD else "all at once"
        return f"{self.streams:,} × {self.per_s:g}/s, {how}"


SHAPES = (Shape(1, 50), Shape(64, 40), Shape(100, 50), Shape(1000, 5), Shape(64, 40, _STEPS), Shape(256, 20, _STEPS))


class Round(NamedTuple):
    """What one round showed: times of tokens in seconds, tokens, and the processor time of the proxy."""

    times_s: np.ndarray
    tokens: int
    lost: int
    cpu_s: float


# --- the server: `python benchmarks/proxy.py --serve` ------------------------------------------------------------


class _Answering(asyncio.Protocol):
    """Streams as the query of the path says: tokens, per_s, kind."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport
        self._asked = b""
        self._left = 0

    def data_received(self, data: bytes) -> None:
        self._asked += data
        head, found, body = self._asked.partition(b"\r\n\r\n")
        length = re.search(rb"content-length: (\d+)", head, re.I)
        if not found or (length and len(body) < int(length[1])):
            return
        words = dict(each.split(b"=") for each in body.split(b"&"))
        self._left = int(words[b"tokens"])
        self._period_s = float(words[b"period_s"])
        first_s = float(words[b"first_s"])
        self._transport.write(
            b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n"
            b"Connection: close\r\n\r\n"
        )
        loop = asyncio.get_running_loop()
        self._due_s = max(first_s, loop.time())
        loop.call_at(self._due_s, self._next, loop)

    def _next(self, loop: asyncio.AbstractEventLoop) -> None:
        if self._transport.is_closing():
            return
        event = _EVENT % time.monotonic_ns()
        self._left -= 1
        last = b"0\r\n\r\n" if not self._left else b""
        self._transport.write(b"%x\r\n%s\r\n%s" % (len(event), event, last))
        if last:
            self._transport.close()
            return
        self._due_s += self._period_s
        if self._period_s:
            loop.call_at(self._due_s, self._next, loop)
        else:
            loop.call_soon(self._next, loop)


async def _serve() -> None:
    loop = asyncio.get_running_loop()
    server = await loop.create_server(_Answering, "127.0.0.1", 0, backlog=2048)
    print(server.sockets[0].getsockname()[1], flush=True)
    await server.serve_forever()


# --- the client --------------------------------------------------------------------------------------------


class _Asking(asyncio.Protocol):
    def __init__(self, body: bytes, found: list[int], over: "asyncio.Future[None]") -> None:
        self._body = body
        self._found = found
        self._over = over
        self._rest = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        transport.write(  # type: ignore[attr-defined]
            b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nConnection: close\r\nContent-Length: %d\r\n\r\n%s"
            % (len(self._body), self._body)
        )

    def data_received(self, data: bytes) -> None:
        now = time.monotonic_ns()
        *events, self._rest = (self._rest + data).split(b"\n\n")
        for event in events:
            self._found.extend(now - int(each) for each in _TIME.findall(event))

    def connection_lost(self, error: Exception | None) -> None:
        if not self._over.done():
            self._over.set_result(None)


async def _asked(port: int, shape: Shape, tokens: int) -> tuple[list[int], int]:
    loop = asyncio.get_running_loop()
    begin_s = loop.time() + 0.5 + shape.streams / 1000
    found: list[int] = []
    ends = []
    period_s = 1 / shape.per_s if shape.per_s else 0.0
    for number in range(shape.streams):
        # Golden-ratio steps lay any number of streams evenly over a period.
        phase = (number * 0.6180339887) % 1 if shape.kind == _SPREAD else 0.0
        body = b"tokens=%d&period_s=%.9f&first_s=%.9f" % (tokens, period_s, begin_s + phase * period_s)
        over = loop.create_future()
        await loop.create_connection(lambda body=body, over=over: _Asking(body, found, over), "127.0.0.1", port)
        ends.append(over)
    await asyncio.gather(*ends)
    return found, shape.streams * tokens - len(found)


def _round(port: int, shape: Shape, tokens: int, proxy: "psutil.Process | None") -> Round:
    before_s = sum(proxy.cpu_times()[:2]) if proxy is not None else 0.0
    found, lost = asyncio.run(_asked(port, shape, tokens))
    cpu_s = sum(proxy.cpu_times()[:2]) - before_s if proxy is not None else 0.0
    return Round(np.array(found) / 1e9, len(found), lost, cpu_s)


# --- the comparison --------------------------------------------------------------------------------------------


def main() -> None:
    """Print a row per shape, and write them if asked to."""
    words = argparse.ArgumentParser(description=__doc__)
    words.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    words.add_argument("--seconds", type=float, default=4.0)
    words.add_argument("--rounds", type=int, default=3)
    words.add_argument("--write", type=Path, metavar="FILE", help="add the table to this file")
    given = words.parse_args()
    with suppress(ValueError, OSError):  # two files for each stream
        hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    if given.serve:
        asyncio.run(_serve())
        return
    server = subprocess.Popen([sys.executable, __file__, "--serve"], stdout=subprocess.PIPE, text=True)
    assert server.stdout is not None
    port = int(server.stdout.readline())
    command = [sys.executable, "-m", "polythrottle", "proxy", f"http://127.0.0.1:{port}"]
    proxy = subprocess.Popen(
        [*command, "--listen", "127.0.0.1:0", "--in-flight", "4096", "--queue", "4096"],
        stderr=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        text=True,
    )
    assert proxy.stderr is not None
    through = int(proxy.stderr.readline().split()[1].rpartition(":")[2])
    try:
        rows = _rows(port, through, psutil.Process(proxy.pid), given.rounds, given.seconds)
    finally:
        for each in (proxy, server):
            each.terminate()
            each.wait(60)
    if given.write:
        before = ""
        if given.write.exists():
            before = given.write.read_text().partition("| streams")[0]
        given.write.write_text(before + "\n".join(rows) + "\n")


def _rows(port: int, through: int, proxy: psutil.Process, rounds: int, seconds: float) -> list[str]:
    rows = [
        "| streams × tokens/s | direct p50 | p99 | through p50 | p99 | added p50 | p99 | tokens/s per core | lost |",
        "| --- | --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    print("\n".join(rows), flush=True)
    for shape in (*SHAPES, Shape(1, 0)):
        tokens = max(2, round(seconds * shape.per_s)) if shape.per_s else 50_000
        straight: list[Round] = []
        passed: list[Round] = []
        for _ in range(rounds):
            straight.append(_round(port, shape, tokens, None))
            passed.append(_round(through, shape, tokens, proxy))
        rows.append(_row(shape, straight, passed))
        print(rows[-1], flush=True)
    return rows


def _row(shape: Shape, straight: Sequence[Round], passed: Sequence[Round]) -> str:
    direct = np.concatenate([each.times_s for each in straight])
    proxied = np.concatenate([each.times_s for each in passed])
    ends = [np.percentile(times, share) * 1e3 for times in (direct, proxied) for share in (50, 99)]
    per_core = sum(each.tokens for each in passed) / max(1e-3, sum(each.cpu_s for each in passed))
    lost = sum(each.lost for each in (*straight, *passed))
    if not shape.per_s:  # a queue that is never empty has no delay of its own
        return f"| one, as fast as it goes | | | | | | | {per_core:,.0f} | {lost} |"
    added = f"{ends[2] - ends[0]:.2f} ms | {ends[3] - ends[1]:.2f} ms"
    times = " | ".join(f"{each:.2f} ms" for each in ends)
    return f"| {shape} | {times} | {added} | {per_core:,.0f} | {lost} |"


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    main()
