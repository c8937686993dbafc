"""Where requests are seen: reports, a log, a process, a server's metrics, or a simulation."""

from __future__ import annotations

import http.client
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from urllib.parse import SplitResult

# How servers are asked: one request to a connection, which is closed after its answer.


def connection_to(address: SplitResult, timeout_s: float) -> http.client.HTTPConnection:
    """Return a connection to be made to an address of ``http`` or ``https``; each of its steps may take so long."""
    kind = http.client.HTTPSConnection if address.scheme == "https" else http.client.HTTPConnection
    return kind(address.hostname or "", address.port, timeout=timeout_s)


@contextmanager
def answered(
    line: http.client.HTTPConnection, method: str, path: str, headers: Mapping[str, str], body: bytes | None = None
) -> Iterator[http.client.HTTPResponse]:
    """Ask, have the answer read in between, and close the connection.

    Raises:
        OSError: If nobody answers in time, in which the reading may end too.
        HTTPException: If the answer is no HTTP.
    """
    try:
        line.request(method, path, body, headers)
        yield line.getresponse()
    finally:
        line.close()
