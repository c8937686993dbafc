"""What nodes and workers say to the controller: one JSON document there, one back, over HTTP.

Loopback needs no token. Everywhere else each request carries one (``Authorization: Bearer``), which is compared in
constant time.
"""

import hmac
import http.client
import ipaddress
import json
import os
import socket
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from polythrottle.errors import BadFile, DeviceError, InvalidInput

ADDRESS, TOKEN_FILE, NODE = "POLYTHROTTLE_CLUSTER", "POLYTHROTTLE_CLUSTER_TOKEN_FILE", "POLYTHROTTLE_CLUSTER_NODE"
GENERATION = "POLYTHROTTLE_CLUSTER_GENERATION"
LARGEST = 1 << 20
REGROUP = 75
"""Exit code of a worker that stops for the next generation (EX_TEMPFAIL)."""


class ControllerAway(DeviceError):
    """The controller does not answer; who trains goes on and asks again."""


@dataclass(frozen=True)
class Line:
    """A way to the controller.

    Attributes:
        host: Where it listens.
        port: On which port.
        token: What lets in; empty on loopback.
        timeout_s: When a request is given up, in seconds.
    """

    host: str
    port: int
    token: str = ""
    timeout_s: float = 3.0

    @property
    def address(self) -> str:
        """Return host and port as one text."""
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"

    def ask(self, verb: str, **words: Any) -> dict[str, Any]:
        """Send one request and return the answer.

        Args:
            verb: What is asked: join, beat, ready, drain, leave, finish, report, notice, status.
            **words: What is said with it.

        Raises:
            ControllerAway: If nobody answers in time.
            InvalidInput: If it refuses the request; its own words.
        """
        body = json.dumps(words, allow_nan=False).encode()
        call = http.client.HTTPConnection(self.host, self.port, timeout=self.timeout_s)
        try:
            call.connect()
            call.sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            call.request("POST", f"/{verb}", body, self._headers())
            answer = call.getresponse()
            data = answer.read(LARGEST)
        except (OSError, http.client.HTTPException) as err:
            raise ControllerAway(f"no controller answers at {self.address}: {err or type(err).__name__}") from err
        finally:
            call.close()
        return _understood(answer.status, data, self.address)

    def _headers(self) -> Mapping[str, str]:
        head = {"Content-Type": "application/json"}
        return head | ({"Authorization": f"Bearer {self.token}"} if self.token else {})

    def environment(self, token_file: Path | None) -> dict[str, str]:
        """Return the environment by which a worker finds the controller."""
        found = {ADDRESS: self.address}
        return found | ({TOKEN_FILE: str(token_file)} if token_file else {})


def _understood(status: int, data: bytes, address: str) -> dict[str, Any]:
    try:
        document = json.loads(data)
    except ValueError as err:
        raise ControllerAway(f"what answers at {address} is no polythrottle controller") from err
    if not isinstance(document, dict):
        raise ControllerAway(f"what answers at {address} is no polythrottle controller")
    if status != http.HTTPStatus.OK:
        raise InvalidInput(str(document.get("error", f"the controller at {address} answered {status}")))
    return document


def parse_address(text: str, port: int | None = None) -> tuple[str, int]:
    """Return host and port of a text such as ``127.0.0.1:7070`` or ``[::1]:7070``.

    Raises:
        InvalidInput: If it is none.
    """
    host, colon, number = text.rpartition(":")
    if not colon and port is not None:
        host, number = text, str(port)
    host = host.removeprefix("[").removesuffix("]")
    if not host or not number.isdecimal() or len(number) > 5 or int(number) > 65535:
        raise InvalidInput(f"an address is written HOST:PORT, for example 127.0.0.1:7070, not {text[:60]!r}")
    return host, int(number)


def is_loopback(host: str) -> bool:
    """Return whether a host can be reached from its own machine alone."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def read_token(path: Path | None) -> str:
    """Return the token in a file; empty without a file.

    Raises:
        BadFile: If the file cannot be read, is empty, or others may read it.
    """
    if path is None:
        return ""
    try:
        mode, text = path.stat().st_mode, path.read_text().strip()
    except (OSError, UnicodeDecodeError) as err:
        raise BadFile(f"the token file {path} cannot be read: {getattr(err, 'strerror', None) or err}") from err
    if mode & 0o077:
        raise BadFile(f"the token file {path} can be read by others; chmod 600 it")
    if len(text) < 16 or not text.isascii() or not text.isprintable():
        raise BadFile(f"the token in {path} needs at least 16 plain characters")
    return text


def admits(token: str, header: str | None) -> bool:
    """Return whether a request's ``Authorization`` header holds the token; without a token everything does."""
    return not token or hmac.compare_digest(f"Bearer {token}".encode(), (header or "").encode())


def line_from_environment() -> Line | None:
    """Return the way to the controller that an agent left in the environment, None outside an elastic job.

    Raises:
        InvalidInput: If the address there is none.
        BadFile: If the token's file cannot be read.
    """
    text = os.environ.get(ADDRESS)
    if not text:
        return None
    host, port = parse_address(text)
    file = os.environ.get(TOKEN_FILE)
    return Line(host, port, read_token(Path(file) if file else None))
