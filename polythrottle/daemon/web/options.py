"""How the API is served: where, to whom, with what; checked before anything listens."""

import ipaddress
import os
import socket
import ssl
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import quote

from polythrottle.errors import BadFile, InvalidInput, PermissionDenied, StorageError

_TOKEN_LEAST, _TOKEN_MOST = 16, 4096

History = Callable[[int], Sequence[Mapping[str, Any]]]
"""From a number of minutes to what is kept of them, oldest first; called from a thread of its own."""


def no_history(minutes: int) -> Sequence[Mapping[str, Any]]:
    """Return nothing: the history of a daemon that keeps none."""
    return ()


@dataclass(frozen=True)
class Tcp:
    """Where to listen besides the Unix socket.

    Args:
        host: Name or address.
        port: 0 for any that is free.
        certificate: In PEM, for TLS; ``key`` its private key.
        key: In PEM.
        token_file: Holds what a client must know, on one line; nobody else may read it.
        names: Further names a client may call this machine by.

    Raises:
        InvalidInput: If there is no port, half of what TLS needs, or too little protection for where it listens.
    """

    host: str
    port: int
    certificate: Path | None = None
    key: Path | None = None
    token_file: Path | None = None
    names: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if not self.host or not 0 <= self.port < 65536:
            raise InvalidInput(f"--tcp takes HOST:PORT such as 127.0.0.1:8080, not {self.host}:{self.port}")
        if (self.certificate is None) != (self.key is None):
            raise InvalidInput("TLS needs both --tls-cert and --tls-key")
        if self.certificate is None and self.token_file is None:
            raise InvalidInput("--tcp needs TLS (--tls-cert and --tls-key) or --token-file: it would be open to all")
        if not is_loopback(self.host) and (self.certificate is None or self.token_file is None):
            raise InvalidInput(f"{self.host} can be reached from elsewhere: it needs both TLS and --token-file")

    @classmethod
    def parse(
        cls, text: str, certificate: Path | None = None, key: Path | None = None, token_file: Path | None = None
    ) -> "Tcp":
        """Return what ``HOST:PORT`` means; an IPv6 address stands in brackets.

        Raises:
            InvalidInput: If it is none, or too little protects it.
        """
        host, _, port = text.rpartition(":")
        number = int(port) if port.isdecimal() and port.isascii() and len(port) < 6 else -1
        bare = host.removeprefix("[").removesuffix("]")
        if ":" in bare and bare == host:
            raise InvalidInput(f"--tcp {text}: an IPv6 address stands in brackets, such as [::1]:8080")
        return cls(bare, number, certificate, key, token_file)

    def address(self, port: int, token: bool = False) -> str:
        """Return the address of the page for a browser.

        Args:
            port: That is listened on.
            token: Whether to put the token in. It then stands behind the ``#``, which no browser sends to anybody, and
                which the page takes out of the address bar as it opens. It is for the eyes of whoever started the
                daemon, never for a log.

        Raises:
            PolythrottleError: If the token cannot be read.
        """
        host = socket.gethostname() if self.host in ("0.0.0.0", "::") else self.host
        shown = f"[{host}]" if ":" in host else host
        scheme = "http" if self.certificate is None else "https"
        known = self.token() if token else None
        behind = "" if known is None else f"#token={quote(known.decode('ascii'), safe='')}"
        return f"{scheme}://{shown}:{port}/{behind}"

    def secured(self) -> ssl.SSLContext | None:
        """Return what TLS needs; None without TLS.

        Raises:
            BadFile: If certificate or key cannot be used.
        """
        if self.certificate is None or self.key is None:
            return None
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        try:
            context.load_cert_chain(self.certificate, self.key, password=_no_password)
        except (OSError, ValueError) as error:
            raise BadFile(f"{self.certificate} and {self.key} are no certificate and its key: {error}") from error
        return context

    def token(self) -> bytes | None:
        """Return what a client must know; None if nothing.

        Raises:
            BadFile: If the file holds none, or one that could be guessed.
            PermissionDenied: If others may read it.
        """
        if self.token_file is None:
            return None
        try:
            with self.token_file.open("rb") as file:
                kept = os.fstat(file.fileno())
                text = file.read(_TOKEN_MOST + 1).strip()
        except OSError as error:
            raise BadFile(f"the token cannot be read: {self.token_file}: {error.strerror}") from error
        if kept.st_mode & 0o077 or kept.st_uid not in (0, os.geteuid()):
            raise PermissionDenied(f"others may read or own {self.token_file}; make it yours alone: chmod 600")
        if not _TOKEN_LEAST <= len(text) <= _TOKEN_MOST or not all(33 <= each <= 126 for each in text):
            raise BadFile(
                f"{self.token_file} holds no token: one word of {_TOKEN_LEAST} letters at least; "
                "make one with: openssl rand -hex 24"
            )
        return text


def own_page(token_file: Path) -> Tcp:
    """Return where a page for this user alone is served: a free port of this machine, with a token made up now.

    Args:
        token_file: Where the token is kept; a former one is replaced.

    Raises:
        StorageError: If the token cannot be written.
    """
    import secrets

    try:
        token_file.unlink(missing_ok=True)
        handle = os.open(token_file, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        with os.fdopen(handle, "w", encoding="ascii") as file:
            file.write(f"{secrets.token_urlsafe(24)}\n")
    except OSError as error:
        raise StorageError(f"no token can be kept in {token_file}: {error.strerror}; see --no-page") from error
    return Tcp("127.0.0.1", 0, token_file=token_file)


@dataclass(frozen=True)
class WebOptions:
    """How the API is served.

    Args:
        socket: Path of the Unix socket.
        readers: Groups whose members may look; root and the daemon's own user may do everything anyway.
        writers: Groups whose members may look and change.
        tcp: Where else to listen; None is nowhere.
        history: What is kept of the last minutes.
        state: Folder whose ``profiles/tuned`` is listed besides the catalogue's; None for none.
    """

    socket: Path
    readers: tuple[str, ...] = ()
    writers: tuple[str, ...] = ()
    tcp: Tcp | None = None
    history: History = no_history
    state: Path | None = None


def is_loopback(host: str) -> bool:
    """Return whether a host can only be reached from this machine; a name but localhost is taken to lead elsewhere."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host.lower().rstrip(".") == "localhost"


def _no_password() -> str:
    """Answer OpenSSL when it asks for a password, which else it would ask for on the terminal."""
    raise ValueError("the key has a password, which nobody is there to type")
