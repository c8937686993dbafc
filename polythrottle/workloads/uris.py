"""URIs of workloads taken apart: a model in a file or in Python code, or a model of a service at an address."""

from __future__ import annotations

import ipaddress
import socket
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import SplitResult, parse_qsl, unquote, urlsplit

from polythrottle.domain.backports import removeprefix
from polythrottle.domain.errors import BadFile, InvalidInput, UnknownName
from polythrottle.storage.untrusted import check_plain

# A model's URI: a file or a place in Python code, and options behind a question mark.


@dataclass(frozen=True)
class ModelUri:
    """A model's URI taken apart: ``model.onnx?providers=cpu`` is a path and one option.

    Args:
        name: The path, or ``package.module:callable``.
        options: What follows the question mark.
    """

    name: str
    options: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def parse(cls, text: str) -> ModelUri:
        """Return the parts of a URI; a file whose name has a question mark in it is a file.

        Raises:
            InvalidInput: If an option is not of the form ``key=value`` or is given twice.
        """
        name, _, query = text.partition("?")
        if not query or Path(text).exists():
            return cls(text if Path(text).exists() else name)
        options: dict[str, str] = {}
        for part in query.split("&"):
            key, _, value = part.partition("=")
            if not (key and value) or key in options:
                raise InvalidInput(f"{part!r} in {text!r} is not an option; write for example {name}?providers=cpu")
            options[key] = value
        return cls(name, options)

    def only(self, kind: str, *known: str) -> None:
        """Check that no option but the known ones is given.

        Raises:
            UnknownName: If another is.
        """
        for key in self.options:
            if key not in known:
                raise UnknownName(f"option of {kind}", key, known)

    def chosen(self, key: str, known: Sequence[str]) -> tuple[str, ...]:
        """Return the values of an option, separated by commas; none if it is not given.

        Raises:
            UnknownName: If one is not known.
            InvalidInput: If one is given twice.
        """
        values = tuple(each.strip().lower() for each in self.options.get(key, "").split(",") if each.strip())
        for value in values:
            if value not in known:
                raise UnknownName(f"{key} of {self.name}", value, known)
        if len(set(values)) < len(values):
            raise InvalidInput(f"{key}={self.options[key]} names one twice")
        return values


# What torch exported, told apart before torch is imported: that takes seconds, and a wrong name should not.

_SCRIPT = "/constants.pkl"
_ARCHIVED = ("/archive_format", "serialized_exported_program.json")


def is_script(model: ModelUri) -> bool:
    """Return whether an exported model of torch is TorchScript; else it is an archive of torch.export.

    Args:
        model: Whose name is the file's path.

    Raises:
        UnknownName: If it has an option that no exported model has.
        BadFile: If the file is missing, or neither.
    """
    model.only("an exported model", "device")
    names = _names(model.name)
    if any(name.endswith(_SCRIPT) for name in names):
        return True
    if any(name.endswith(_ARCHIVED) for name in names):
        return False
    raise BadFile(
        f"{model.name} holds neither an archive of torch.export nor TorchScript; what torch.save writes, weights or a "
        "whole module, needs its code: give package.module:callable"
    )


def _names(path: str) -> list[str]:
    """Return what is in the zip archive that torch writes either kind as."""
    import zipfile  # with three compressors, which no other URI needs

    check_plain(path)
    try:
        with zipfile.ZipFile(path) as archive:
            return archive.namelist()
    except OSError as err:
        raise BadFile(f"{path} cannot be read: {err.strerror}") from err
    except zipfile.BadZipFile as err:
        raise BadFile(f"{path} is no archive as torch writes them, or cut off") from err


# Where a service listens and which of its models is meant: the URIs of services, taken apart.

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
    def parse(cls, uri: str, options: Iterable[str]) -> Address:
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
        port = _port(parts, scheme)
        model = unquote(removeprefix(parts.path, "/"))
        if not parts.hostname or not port or not model or parts.fragment:
            raise InvalidInput(f"{uri!r} is not a service; write {form}")
        return cls(uri, scheme, parts.hostname, port, model, _options(uri, parts.query, tuple(options)))

    @property
    def where(self) -> str:
        """Host and port, as people write them."""
        if ":" in self.host:
            return f"[{self.host}]:{self.port}"
        return f"{self.host}:{self.port}"

    @property
    def here(self) -> bool:
        """Whether the service listens on this machine; False also if nobody knows that host."""
        try:
            return any(_is_own(family, address) for family, *_, address in socket.getaddrinfo(self.host, self.port))
        except OSError:
            return False

    def count(self, name: str, default: int) -> int:
        """Return the whole number above zero that an option holds.

        Raises:
            InvalidInput: If it holds something else.
        """
        levels = self.counts(name, least=1)
        if levels is not None and len(levels) > 1:
            raise InvalidInput(f"{name}={self.options[name]} in {self.uri}: give one number")
        if levels:
            return levels[0]
        return default

    def counts(self, name: str, *, least: int) -> tuple[int, ...] | None:
        """Return the whole numbers that an option lists, sorted; None if it was not given.

        Raises:
            InvalidInput: If it lists something else, or a number below ``least`` or above a million.
        """
        if name not in self.options:
            return None
        words = self.options[name].split(",")
        # By their length first: to read a number of thousands of digits takes Python long, or raises.
        readable = all(word.isdecimal() and len(word) <= len(str(_MOST)) for word in words)
        numbers = sorted({int(word) for word in words}) if readable else []
        if not numbers or numbers[0] < least or numbers[-1] > _MOST:
            wanted = f"whole numbers from {least} to {_MOST} such as 4"
            raise InvalidInput(f"{name}={self.options[name]} in {self.uri}: write {wanted}")
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


def _is_own(family: int, address: tuple[Any, ...]) -> bool:
    """Return whether an address is one of this machine's; nothing is sent there."""
    if ipaddress.ip_address(str(address[0]).partition("%")[0]).is_loopback:
        return True
    with socket.socket(family, socket.SOCK_DGRAM) as way, suppress(OSError):
        # For the sender's address the kernel takes this one where it is its own, and another where it is not.
        way.connect(address)
        return bool(way.getsockname()[0] == address[0])
    return False


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
