"""What nodes and workers say to the controller: one JSON document there, one back, over HTTP.

Each request carries the job's token (``Authorization: Bearer``), which is compared in constant time: on loopback, too,
where every user of the machine can connect. It is kept in a file that only its owner can read; only the file's path is
handed on, for command lines can be seen by all.
"""

import contextlib
import hmac
import http.client
import ipaddress
import json
import os
import secrets
import socket
import stat
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from polythrottle.errors import BadFile, DeviceError, InvalidInput, StorageError

ADDRESS, TOKEN_FILE, NODE = "POLYTHROTTLE_CLUSTER", "POLYTHROTTLE_CLUSTER_TOKEN_FILE", "POLYTHROTTLE_CLUSTER_NODE"
GENERATION = "POLYTHROTTLE_CLUSTER_GENERATION"
LARGEST = 1 << 20
TOKEN = "token"
"""The file of a job's own token, in the job's folder."""
_LONGEST_TOKEN = 4096
REGROUP = 75
"""Exit code of a worker that stops for the next generation (EX_TEMPFAIL)."""


class ControllerAway(DeviceError):
    """The controller does not answer; who trains goes on and asks again."""


class WrongToken(InvalidInput):
    """The controller is another job's, or was begun with another token: to ask again is in vain."""


@dataclass(frozen=True)
class Line:
    """A way to the controller.

    Attributes:
        host: Where it listens.
        port: On which port.
        token: What lets in.
        timeout_s: When a request is given up, in seconds.
        token_file: Where the token stands, for those to whom the way is handed on.
    """

    host: str
    port: int
    token: str = field(default="", repr=False)
    timeout_s: float = 3.0
    token_file: Path | None = None

    @classmethod
    def through(cls, address: str, token_file: Path | None) -> "Line":
        """Return the way to the controller at an address, with the token in a file.

        Raises:
            InvalidInput: If the address is none.
            BadFile: If the token cannot be read.
        """
        host, port = parse_address(address)
        return cls(host, port, read_token(token_file), token_file=token_file.absolute() if token_file else None)

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
            ControllerAway: If nobody answers in time, or it has no time for this one.
            WrongToken: If the token is not its own.
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

    def environment(self) -> dict[str, str]:
        """Return the environment by which a worker finds the controller."""
        found = {ADDRESS: self.address}
        return found | ({TOKEN_FILE: str(self.token_file)} if self.token_file else {})


def _understood(status: int, data: bytes, address: str) -> dict[str, Any]:
    try:
        document = json.loads(data)
    except ValueError as err:
        raise ControllerAway(f"what answers at {address} is no polythrottle controller") from err
    if not isinstance(document, dict):
        raise ControllerAway(f"what answers at {address} is no polythrottle controller")
    if status == http.HTTPStatus.OK:
        return document
    reason = str(document.get("error", f"the controller at {address} answered {status}"))
    if status in {http.HTTPStatus.SERVICE_UNAVAILABLE, http.HTTPStatus.REQUEST_TIMEOUT}:
        raise ControllerAway(reason)
    raise WrongToken(reason) if status == http.HTTPStatus.UNAUTHORIZED else InvalidInput(reason)


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
        with open(path, "rb", opener=_without_waiting) as file:
            mode = os.fstat(file.fileno()).st_mode
            text = file.read(_LONGEST_TOKEN + 1).decode().strip() if stat.S_ISREG(mode) else ""
    except (OSError, UnicodeDecodeError) as err:
        raise BadFile(f"the token file {path} cannot be read: {getattr(err, 'strerror', None) or err}") from err
    if not stat.S_ISREG(mode) or len(text) > _LONGEST_TOKEN:
        raise BadFile(f"the token file {path} is no file of one line")
    if mode & 0o077:
        raise BadFile(f"the token file {path} can be read by others; chmod 600 it")
    if len(text) < 16 or not text.isascii() or not text.isprintable():
        raise BadFile(f"the token in {path} needs at least 16 plain characters")
    return text


def _without_waiting(path: str, flags: int) -> int:
    """Open a file; one that waits for a writer, such as a named pipe, does not hold this process up."""
    return os.open(path, flags | os.O_NONBLOCK)


def own_token(folder: Path) -> Path:
    """Return the file of a job's own token, made now if it is not there yet: a controller that is back keeps it.

    To be called by who holds the job. A token that somebody else has put there does not count.

    Args:
        folder: The job's folder, which must be there.

    Raises:
        BadFile: If what stands there is another user's.
        StorageError: If it cannot be written.
    """
    path, fresh = folder / TOKEN, folder / f".{TOKEN}.new"
    try:
        with contextlib.suppress(FileNotFoundError):
            if path.lstat().st_uid != os.geteuid():
                raise BadFile(f"{path} is another user's; remove it, or give another --job")
            return path
        fresh.unlink(missing_ok=True)
        with open(os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
            file.write(secrets.token_hex(24) + "\n")
            os.fsync(file.fileno())
        fresh.replace(path)
    except OSError as err:
        raise StorageError(f"the job's token cannot be written to {path}: {err.strerror}") from err
    return path


def admits(token: str, header: str | None) -> bool:
    """Return whether a request's ``Authorization`` header holds the token."""
    return hmac.compare_digest(f"Bearer {token}".encode(), (header or "").encode())


def line_from_environment() -> Line | None:
    """Return the way to the controller that an agent left in the environment, None outside an elastic job.

    Raises:
        InvalidInput: If the address there is none.
        BadFile: If the token's file cannot be read.
    """
    text = os.environ.get(ADDRESS)
    if not text:
        return None
    file = os.environ.get(TOKEN_FILE)
    return Line.through(text, Path(file) if file else None)
