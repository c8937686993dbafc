"""Speaking HTTP to a service: what can go wrong on the way becomes one line."""

import asyncio
import errno
import json
import os
import ssl
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from typing import Any

import aiohttp

from polythrottle.domain.errors import TrialError
from polythrottle.workloads.foreign_calls import one_line

# Servers drop connections that were idle for a few seconds; one about to be dropped must not be used again.
_IDLE_S = 1.0
_BUFFER = 1 << 20
_OK = 200
MOST_BYTES = 1 << 24
"""How long an answer may be that holds no tensors."""


@dataclass(frozen=True)
class Answer:
    """A whole answer.

    Args:
        status: Of HTTP.
        body: Of it.
        headers: Names without regard to case.
    """

    status: int
    body: bytes
    headers: Mapping[str, str]

    @property
    def document(self) -> Any:
        """The JSON in it; None if it is something else."""
        try:
            return json.loads(self.body)
        except (ValueError, RecursionError):
            return None


class Web:
    """Connections to one service over HTTP, for the running event loop; no proxy is used and no redirect followed.

    Args:
        where: Host and port, for people.
        root: What every path is appended to.
        headers: Sent with every request.
    """

    def __init__(self, where: str, root: str, headers: Mapping[str, str]) -> None:
        self.where = where
        self._root = root
        self._session = aiohttp.ClientSession(
            # Without a limit of its own, which is 100: beyond it queries would wait here and seem slow there.
            connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=_IDLE_S),
            # Whoever asks sets the time limit; answers are compared as they were sent, not unpacked at our cost.
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=None),
            headers={"Accept-Encoding": "identity", **headers},
            read_bufsize=_BUFFER,
            auto_decompress=False,
        )

    async def fetch(
        self,
        method: str,
        path: str,
        body: bytes | None = None,
        headers: Mapping[str, str] | None = None,
        most_bytes: int = MOST_BYTES,
    ) -> Answer:
        """Return the whole answer, whatever its status.

        Raises:
            ConnectionError: If nobody answers.
            TrialError: If the answer is cut off, no HTTP, or larger than ``most_bytes``.
        """
        async with self.asked(method, path, body, headers) as answer:
            return await self.whole(answer, most_bytes)

    async def whole(self, answer: aiohttp.ClientResponse, most_bytes: int = MOST_BYTES) -> Answer:
        """Return an answer that was asked for, once all of it is here.

        Raises:
            TrialError: If it is larger than ``most_bytes``.
        """
        pieces = []
        size = 0
        most_bytes = most_bytes if answer.status == _OK else MOST_BYTES
        async for piece in answer.content.iter_any():
            pieces.append(piece)
            size += len(piece)
            if size > most_bytes:
                raise TrialError(f"{self.where} answers with more than {most_bytes >> 20:,} MiB; it was not read on")
        return Answer(answer.status, b"".join(pieces), answer.headers)

    @asynccontextmanager
    async def asked(
        self, method: str, path: str, body: bytes | None = None, headers: Mapping[str, str] | None = None
    ) -> AsyncIterator[aiohttp.ClientResponse]:
        """Return the context in which an answer can be read piece by piece.

        Raises:
            ConnectionError: If nobody answers.
            TrialError: If the answer is cut off or no HTTP.
        """
        with troubles(self.where):
            url = self._root + path
            async with self._session.request(method, url, data=body, headers=headers, allow_redirects=False) as answer:
                self._see_that_it_is_plain(answer)
                yield answer

    def _see_that_it_is_plain(self, answer: aiohttp.ClientResponse) -> None:
        packed = answer.headers.get("Content-Encoding", "identity")
        if packed.lower() != "identity":
            raise TrialError(f"{self.where} packs its answers ({packed[:20]}), which it was asked not to")
        if answer.status // 100 == 3:
            there = "".join(filter(str.isprintable, answer.headers.get("Location", "nowhere")))[:200]
            raise TrialError(f"{self.where} sends on to {there}, which is not followed; write the right address")

    async def close(self) -> None:
        """Close the connections."""
        await self._session.close()
        await asyncio.sleep(0)  # the sockets are closed in the loop's next turn


@contextmanager
def troubles(where: str) -> Iterator[None]:
    """Turn what the HTTP library raises into one line each.

    Raises:
        ConnectionError: If nobody answers.
        TrialError: If the answer is cut off or no HTTP.
    """
    try:
        yield
    except aiohttp.ClientConnectorError as err:
        raise ConnectionRefusedError(f"nothing answers at {where} ({_reason(err)})") from err
    except aiohttp.ClientPayloadError as err:
        raise TrialError(f"the answer of {where} was cut off") from err
    except (aiohttp.ServerDisconnectedError, aiohttp.ClientOSError) as err:
        raise ConnectionResetError(f"{where} closed the connection instead of answering") from err
    except aiohttp.ClientResponseError as err:
        raise TrialError(f"{where} does not answer in proper HTTP") from err
    except (aiohttp.ClientError, ValueError) as err:
        raise TrialError(f"{where} does not answer in proper HTTP: {one_line(err)}") from err


def _reason(err: aiohttp.ClientConnectorError) -> str:
    cause = getattr(err, "os_error", err)
    if isinstance(cause, ssl.SSLError):
        return f"TLS: {cause.reason or one_line(cause)}".replace("_", " ").lower()
    code = cause.errno or 0
    if code in errno.errorcode:
        return os.strerror(code).lower()
    return str(err.strerror or one_line(err))
