"""A service on this machine to drive: `python loopback.py` echoes, after a delay the request asks for."""

import asyncio
import random
import struct
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from polythrottle.domain.errors import TrialError
from polythrottle.domain.measurement import Query
from polythrottle.domain.space import OperatingPoint, SearchSpace

MESSAGE = struct.Struct("d")  # seconds until the echo


async def _echo(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    try:
        while True:
            message = await reader.readexactly(MESSAGE.size)
            (delay_s,) = MESSAGE.unpack(message)
            if delay_s > 0:
                await asyncio.sleep(delay_s)
            writer.write(message)
    except (asyncio.IncompleteReadError, ConnectionError):
        writer.close()


async def _serve() -> None:
    server = await asyncio.start_server(_echo, "127.0.0.1", 0)
    print(server.sockets[0].getsockname()[1], flush=True)
    await asyncio.get_running_loop().connect_read_pipe(asyncio.Protocol, sys.stdin)
    async with server:
        await server.serve_forever()


@contextmanager
def echo_server() -> Iterator[int]:
    """Run the server in a process of its own and yield its port."""
    words = [sys.executable, __file__]
    with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            yield int(process.stdout.readline())
        finally:
            process.kill()


class EchoWorkload:
    """The echo service as a workload, several queries under way at once over as many connections.

    Args:
        port: Of the server.
        delay_s: Says how long the server is to take with the next query.
        concurrency: How many a closed loop keeps under way.
    """

    uri = "echo"
    space = SearchSpace.unit()

    def __init__(self, port: int, delay_s: Callable[[], float] = lambda: 0.0, concurrency: int = 1) -> None:
        self.port, self.delay_s, self.concurrency = port, delay_s, concurrency
        self._idle: list[_Line] = []
        self._all: list[_Line] = []
        self.hung_up = 0

    def apply(self, point: OperatingPoint) -> None:
        """Take no knobs."""

    def query(self) -> Query:
        """Send one query in an event loop of its own."""
        return asyncio.run(self._once())

    async def _once(self) -> Query:
        try:
            return await self.send()
        finally:
            await self.hang_up()

    async def send(self) -> Query:
        """Send a message and wait for its echo."""
        start_s = time.perf_counter()
        line = self._idle.pop() if self._idle else await self._opened()
        await line.ask(MESSAGE.pack(self.delay_s()))
        self._idle.append(line)
        return Query(time.perf_counter() - start_s)

    async def _opened(self) -> "_Line":
        loop = asyncio.get_running_loop()
        return (await loop.create_connection(lambda: _Line(self._all), "127.0.0.1", self.port))[1]

    async def hang_up(self) -> None:
        """Close every connection."""
        self.hung_up += 1
        for line in self._all:
            line.transport.close()
        self._idle.clear()
        self._all.clear()
        await asyncio.sleep(0)

    def close(self) -> None:
        """Do nothing."""


class _Line(asyncio.Protocol):
    """One connection, one question at a time."""

    transport: asyncio.Transport
    answer: "asyncio.Future[None] | None" = None

    def __init__(self, all_lines: "list[_Line]") -> None:
        self.all = all_lines

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self.transport = transport
        self.all.append(self)

    def ask(self, message: bytes) -> "asyncio.Future[None]":
        self.answer = asyncio.get_running_loop().create_future()
        self.transport.write(message)
        return self.answer

    def data_received(self, data: bytes) -> None:
        if self.answer is not None and not self.answer.done():
            self.answer.set_result(None)

    def connection_lost(self, exc: Exception | None) -> None:
        if self.answer is not None and not self.answer.done():
            self.answer.set_exception(TrialError("the server has gone"))


def straggling(seed: int) -> Callable[[], float]:
    """Return delays of which one in twenty is far longer than the rest."""
    draw = random.Random(seed)
    return lambda: draw.uniform(0.06, 0.1) if draw.random() < 0.05 else draw.uniform(0.004, 0.008)


if __name__ == "__main__":
    asyncio.run(_serve())
