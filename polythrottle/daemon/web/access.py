"""Who may use the API: where it is served, the roles of users, and the check that each request passes first."""

from __future__ import annotations

import hmac
import os
import re
import socket
import ssl
import typing
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from pathlib import Path
from typing import Any
from urllib.parse import quote

from starlette.types import ASGIApp, Receive, Scope, Send

from polythrottle.actuation.server.unix_socket import group_id, peer_of
from polythrottle.daemon.loop.mailbox import Mailbox
from polythrottle.daemon.status import NodeShown
from polythrottle.daemon.web.messages import Refusal
from polythrottle.domain.backports import removeprefix, removesuffix
from polythrottle.domain.errors import BadFile, InvalidInput, PermissionDenied, StorageError
from polythrottle.storage.untrusted import check_plain, is_address, is_loopback

# What whoever is at the other end of a connection may do.


class Role(IntEnum):
    """What somebody may do; each may what those before it may."""

    NOTHING = 0
    READ = 1
    CONTROL = 2


@dataclass(frozen=True)
class Visitor:
    """Somebody connected.

    Args:
        role: What they may do.
        trusted: Whether they are root or the daemon's own user, for whom there is always room.
        tcp: Whether they came over TCP, where role and room depend on what each request shows.
    """

    role: Role
    trusted: bool = False
    tcp: bool = False


@dataclass(frozen=True)
class AccessControl:
    """Tells what users may do from their groups.

    Args:
        readers: Numbers of the groups that may look.
        writers: Numbers of the groups that may look and change.
    """

    readers: frozenset[int] = frozenset()
    writers: frozenset[int] = frozenset()

    @classmethod
    def of(cls, readers: tuple[str, ...], writers: tuple[str, ...]) -> AccessControl:
        """Return one for groups by name or number.

        Raises:
            InvalidInput: If there is no such group.
        """
        return cls(frozenset(map(_number, readers)), frozenset(map(_number, writers)))

    @property
    def groups(self) -> frozenset[int]:
        """All of them."""
        return self.readers | self.writers

    def admitted(self, connection: socket.socket) -> Visitor:
        """Return who is at the other end of a Unix socket."""
        peer = peer_of(connection)
        return self.judged(peer.uid, peer.gids)

    def judged(self, uid: int, groups: frozenset[int]) -> Visitor:
        """Return what a user with these groups may do."""
        if uid in (0, os.geteuid()):
            return Visitor(Role.CONTROL, trusted=True)
        if groups & self.writers:
            return Visitor(Role.CONTROL)
        return Visitor(Role.READ if groups & self.readers else Role.NOTHING)


def _number(group: str) -> int:
    if group.isascii() and group.isdecimal():
        return int(group)
    if (found := group_id(group)) is None:
        raise InvalidInput(f"there is no group {group!r} to let in; make it with: groupadd --system {group}")
    return found


# How the API is served: where, to whom, with what; checked before anything listens.

_TOKEN_LEAST = 16
_TOKEN_MOST = 4096

History = typing.Callable[[int], typing.Sequence[typing.Mapping[str, Any]]]
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
        option: By which the user has named it.
        for_all: Whether every user of this machine may look, so that neither TLS nor a token is needed on loopback.

    Raises:
        InvalidInput: If there is no port, half of what TLS needs, or too little protection for where it listens.
    """

    host: str
    port: int
    certificate: Path | None = None
    key: Path | None = None
    token_file: Path | None = None
    names: tuple[str, ...] = ()
    option: str = "--tcp"
    for_all: bool = False

    def __post_init__(self) -> None:
        if not self.host or not 0 <= self.port < 65536:
            raise InvalidInput(f"{self.option} takes HOST:PORT such as 127.0.0.1:8080, not {self.host}:{self.port}")
        if (self.certificate is None) != (self.key is None):
            raise InvalidInput("TLS needs both --tls-cert and --tls-key")
        if self.certificate is None and self.token_file is None and not self.for_all:
            raise InvalidInput(
                f"{self.option} needs TLS (--tls-cert and --tls-key) or --token-file: it would be open to all"
            )
        if not is_loopback(self.host) and (self.certificate is None or self.token_file is None):
            raise InvalidInput(f"{self.host} can be reached from elsewhere: it needs both TLS and --token-file")

    @classmethod
    def parse(
        cls,
        text: str,
        certificate: Path | None = None,
        key: Path | None = None,
        token_file: Path | None = None,
        *,
        option: str = "--tcp",
        for_all: bool = False,
    ) -> Tcp:
        """Return what ``HOST:PORT`` means; an IPv6 address stands in brackets.

        Raises:
            InvalidInput: If it is none, or too little protects it.
        """
        host, _, port = text.rpartition(":")
        if port.isdecimal() and port.isascii() and len(port) < 6:
            number = int(port)
        else:
            raise InvalidInput(f"{option} takes HOST:PORT such as 127.0.0.1:8080, not {text[:60]!r}")
        bare = removesuffix(removeprefix(host, "["), "]")
        if ":" in bare and bare == host:
            raise InvalidInput(f"{option} {text}: an IPv6 address stands in brackets, such as [::1]:8080")
        return cls(bare, number, certificate, key, token_file, option=option, for_all=for_all)

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
        if self.host in ("0.0.0.0", "::"):
            host = socket.gethostname()
        else:
            host = self.host
        shown = f"[{host}]" if ":" in host else host
        scheme = "http" if self.certificate is None else "https"
        known = self.token() if token else None
        # Behind the #, which no browser sends: the token stays out of logs and of Referer.
        behind = "" if known is None else f"#token={quote(known, safe='')}"
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
        check_plain(self.token_file)
        try:
            with self.token_file.open("rb") as file:
                # Of the file that is open: at its path there may be another by now.
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
        # Made anew and never opened: a file that somebody has laid there could be theirs to read, a link lead
        # elsewhere.
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
        services: Where each of several services is met, by name; empty where there is one alone.
        node: Returns what is shown of them together; None where there is one alone.
    """

    socket: Path
    readers: tuple[str, ...] = ()
    writers: tuple[str, ...] = ()
    tcp: Tcp | None = None
    history: History = no_history
    state: Path | None = None
    services: Mapping[str, ServiceDoor] = field(default_factory=dict)
    node: Callable[[], NodeShown] | None = None


@dataclass(frozen=True)
class ServiceDoor:
    """Where one of several services is met: its mailbox, what is kept of its last minutes, and its folder."""

    desk: Mailbox
    history: History
    state: Path


def _no_password() -> str:
    """Answer OpenSSL when it asks for a password, which else it would ask for on the terminal."""
    raise ValueError("the key has a password, which nobody is there to type")


# Who may pass: rights, and names of this machine; before anything of a request is read.

_HOST = re.compile(r"(\[(?P<bracketed>[0-9a-f:.]+)\]|(?P<name>[^\[\]:]*))(:[0-9]*)?")
HEAD_BYTES_MOST = 16 * 1024
_LOOKS = ("GET", "HEAD", "OPTIONS")
_OPEN = ("/",)


class Gate:
    """An ASGI application around another that lets through who may.

    A Unix socket's peers are known by their credentials. Over TCP the token is asked for where there is one, but for
    the page, which tells nothing by itself and asks for the token; without one, TCP may only look, for any user of the
    machine could come that way.

    Args:
        app: What is behind.
        tcp: What was agreed on for TCP; None if nothing listens there.
        is_page: Tells whether a path is that of a page besides that at the root.
    """

    def __init__(self, app: ASGIApp, tcp: Tcp | None, is_page: Callable[[str], bool] = lambda path: False) -> None:
        self._app = app
        self._is_page = is_page
        self._token = tcp.token() if tcp is not None else None
        own = socket.gethostname().lower()
        called: tuple[str, ...] = ()
        if tcp is not None:
            called = (tcp.host.lower(), *map(str.lower, tcp.names))
        self._names = {"localhost", own, f"{own}.local", *called}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request, or hand it on."""
        if scope["type"] != "http":
            return
        try:
            self._enter(scope)
        except Refusal as refusal:
            reply = refusal.reply()
            reply.headers["connection"] = "close"  # the body, if there is one, is not read
            await reply(scope, receive, send)
        else:
            await self._app(scope, receive, send)

    def _enter(self, scope: Scope) -> None:
        """Refuse a request that may not pass.

        Raises:
            Refusal: If it may not.
        """
        _check_size(scope)
        visitor: Visitor = scope["state"]["visitor"]
        # Reversed, so that the first of two counts, as it does in Starlette, which reads them after this.
        headers = {str(name, "latin-1"): str(value, "latin-1") for name, value in reversed(scope["headers"])}
        role = visitor.role
        if visitor.tcp:
            self._check_name(headers)
            if scope["path"] in _OPEN or self._is_page(scope["path"]):
                role = Role.READ
            else:
                role = self._shown(headers)
        _check_role(role, scope["method"])

    def _check_name(self, headers: Mapping[str, str]) -> None:
        """Refuse a name that is not this machine's, which a foreign page could have been given (DNS rebinding)."""
        host = headers.get("host", "").lower()
        match = _HOST.fullmatch(host)
        name = ""
        if match is not None:
            name = match["bracketed"] or match["name"]
        # An address cannot be rebound.
        if name not in self._names and not is_address(name):
            raise Refusal(421, InvalidInput, f"this machine is not called {host[:60]!r}; ask it by its address")

    def _shown(self, headers: Mapping[str, str]) -> Role:
        if self._token is None:
            return Role.READ
        scheme, _, shown = headers.get("authorization", "").partition(" ")
        if scheme.lower() != "bearer" or not shown:
            words = "show the token: Authorization: Bearer …, or open /#token=… in a browser"
            raise Refusal(401, PermissionDenied, words, www_authenticate="Bearer")
        if not self._knows(shown.strip()):
            raise Refusal(401, PermissionDenied, "that is not the token", www_authenticate="Bearer")
        return Role.CONTROL

    def _knows(self, shown: str) -> bool:
        return self._token is not None and hmac.compare_digest(shown.encode("utf-8", "replace"), self._token)


def _check_size(scope: Scope) -> None:
    """Refuse a head that came in one piece, which h11 takes at any size."""
    lines = sum(len(name) + len(value) + 4 for name, value in scope["headers"])
    if lines + len(scope["raw_path"]) + len(scope["query_string"]) > HEAD_BYTES_MOST:
        raise Refusal(431, InvalidInput, f"the head of the request is larger than {HEAD_BYTES_MOST // 1024} KiB")


def _check_role(role: Role, method: str) -> None:
    if role is Role.NOTHING:
        raise Refusal(403, PermissionDenied, "this user is in no group the daemon lets in; ask who runs it")
    if role is Role.READ and method not in _LOOKS:
        raise Refusal(403, PermissionDenied, "you may look but change nothing; ask who runs it")
