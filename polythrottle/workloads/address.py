"""Where a service listens and which of its models is meant: the URIs of services, taken apart."""

import ipaddress
import socket
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from urllib.parse import SplitResult, parse_qsl, unquote, urlsplit

import psutil

from polythrottle.errors import InvalidInput, UnknownName

_MOST = 1_000_000
_PORTS = {"openai+https": 443}


@dataclass(frozen=True)
class Address:
    """One model of one service.

    Args:
        uri: As it was written.
        scheme: How it is spoken to, such as ``kserve+grpc``.
        host: Name or number of the machine.
        port: Where the service listens.
        model: As the service calls it; may hold slashes.
        options: What was written after the question mark.
    """

    uri: str
    scheme: str
    host: str
    port: int
    model: str
    options: Mapping[str, str] = field(default_factory=dict, hash=False)

    @classmethod
    def parse(cls, uri: str, options: Iterable[str]) -> "Address":
        """Return the address a URI such as ``kserve://host:8000/model?concurrency=4`` means.

        Args:
            uri: With one of the schemes of services.
            options: Names that may follow the question mark.

        Raises:
            InvalidInput: If host, port or model is missing, or there is a password.
            UnknownName: If an option is none of those.
        """
        parts = _split(uri)
        scheme = uri.partition("://")[0].lower()
        form = f"{scheme}://host:port/model"
        if parts.username is not None or parts.password is not None:
            raise InvalidInput(f"leave name and password out of the URI ({form}); a key goes into $OPENAI_API_KEY")
        port, model = _port(parts, scheme), unquote(parts.path.removeprefix("/"))
        if not parts.hostname or not port or not model or parts.fragment:
            raise InvalidInput(f"{uri!r} is not a service; write {form}")
        return cls(uri, scheme, parts.hostname, port, model, _options(uri, parts.query, tuple(options)))

    @property
    def where(self) -> str:
        """Host and port, as people write them."""
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"

    @property
    def here(self) -> bool:
        """Whether the service listens on this machine; False also if nobody knows that host."""
        try:
            found = {str(entry[4][0]) for entry in socket.getaddrinfo(self.host, self.port)}
        except OSError:
            return False
        own = {address.address for addresses in psutil.net_if_addrs().values() for address in addresses}
        return any(ipaddress.ip_address(each.partition("%")[0]).is_loopback or each in own for each in found)

    def count(self, name: str, default: int) -> int:
        """Return the whole number above zero that an option holds.

        Raises:
            InvalidInput: If it holds something else.
        """
        levels = self.counts(name, least=1)
        if levels is not None and len(levels) > 1:
            raise InvalidInput(f"{name}={self.options[name]} in {self.uri}: give one number")
        return levels[0] if levels else default

    def counts(self, name: str, *, least: int) -> tuple[int, ...] | None:
        """Return the whole numbers that an option lists, sorted; None if it was not given.

        Raises:
            InvalidInput: If it lists something else, or a number below ``least``.
        """
        if name not in self.options:
            return None
        words = self.options[name].split(",")
        numbers = sorted({int(word) for word in words if word.isdecimal() and len(word) < 8})
        if not all(word.isdecimal() for word in words) or not least <= min(numbers, default=-1) <= numbers[-1] <= _MOST:
            raise InvalidInput(f"{name}={self.options[name]} in {self.uri}: write whole numbers from {least} such as 4")
        return tuple(numbers)

    def choice(self, name: str, known: tuple[str, ...]) -> str:
        """Return the word that an option holds, the first known one if it was not given.

        Raises:
            UnknownName: If the word is not known.
        """
        word = self.options.get(name, known[0])
        if word not in known:
            raise UnknownName(name, word, known)
        return word

    def seconds(self, name: str, default: float) -> float:
        """Return the time above zero that an option holds.

        Raises:
            InvalidInput: If it holds something else.
        """
        try:
            value = float(self.options.get(name, default))
        except ValueError:
            value = 0.0
        if not 0 < value <= _MOST:
            raise InvalidInput(f"{name}={self.options[name]} in {self.uri}: write a number of seconds such as 10")
        return value


def _split(uri: str) -> SplitResult:
    try:
        return urlsplit(uri)
    except ValueError as err:
        raise InvalidInput(f"{uri!r} is not a service: {err}") from None


def _port(parts: SplitResult, scheme: str) -> int | None:
    try:
        return parts.port or _PORTS.get(scheme)
    except ValueError:
        return None


def _options(uri: str, query: str, known: tuple[str, ...]) -> dict[str, str]:
    pairs = parse_qsl(query, keep_blank_values=True)
    for name, _ in pairs:
        if name not in known:
            raise UnknownName("option of a service", name, known)
    if len(dict(pairs)) != len(pairs):
        raise InvalidInput(f"an option is given twice in {uri}")
    return dict(pairs)
