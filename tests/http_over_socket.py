"""A client of the daemon's API at its socket, which knows nothing of the API."""

import http.client
import json
import socket
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any


class Line(http.client.HTTPConnection):
    """HTTP over a Unix socket."""

    def __init__(self, path: Path) -> None:
        super().__init__("localhost", timeout=60)
        self.path = path

    def connect(self) -> None:
        """Connect to the socket."""
        self.sock = socket.socket(socket.AF_UNIX)
        self.sock.settimeout(60)
        self.sock.connect(str(self.path))


def ask(path: Path, method: str, route: str, body: Any = None, **headers: str) -> tuple[int, Any, Mapping[str, str]]:
    """Return status, document and headers of an answer."""
    line = Line(path)
    data = body if isinstance(body, (bytes, type(None))) else json.dumps(body).encode()
    written = {} if data is None else {"content-type": "application/json"}
    with suppress(BrokenPipeError):  # it was closed before all was sent; what it said can still be read
        line.request(
            method, route, data, {**written, **{name.replace("_", "-"): text for name, text in headers.items()}}
        )
    answer = line.getresponse()
    text = answer.read()
    line.close()
    named = {name.lower(): value for name, value in answer.getheaders()}
    return answer.status, json.loads(text) if named["content-type"] == "application/json" else text, named
