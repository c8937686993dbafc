"""Who may pass: rights, and names of this machine; before anything of a request is read."""

import hmac
import ipaddress
import re
import socket
from collections.abc import Mapping

from starlette.types import ASGIApp, Receive, Scope, Send

from polythrottle.daemon.web.options import Tcp
from polythrottle.daemon.web.replies import Refusal
from polythrottle.daemon.web.rights import Role, Visitor
from polythrottle.errors import InvalidInput, PermissionDenied

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
    """

    def __init__(self, app: ASGIApp, tcp: Tcp | None) -> None:
        self._app = app
        self._token = tcp.token() if tcp is not None else None
        own = socket.gethostname().lower()
        called = () if tcp is None else (tcp.host.lower(), *map(str.lower, tcp.names))
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
        headers = {name.decode("latin-1"): value.decode("latin-1") for name, value in reversed(scope["headers"])}
        role = visitor.role
        if visitor.tcp:
            self._check_name(headers)
            role = Role.READ if scope["path"] in _OPEN else self._shown(headers)
        _check_role(role, scope["method"])

    def _check_name(self, headers: Mapping[str, str]) -> None:
        """Refuse a name that is not this machine's, which a foreign page could have been given (DNS rebinding)."""
        host = headers.get("host", "").lower()
        found = _HOST.fullmatch(host)
        name = found["bracketed"] or found["name"] if found is not None else ""
        if name not in self._names and not _is_address(name):
            raise Refusal(421, InvalidInput, f"this daemon is not called {host[:60]!r}; ask it by its address")

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
        raise Refusal(403, PermissionDenied, "you may look but change nothing; ask who runs the daemon")


def _is_address(name: str) -> bool:
    """Return whether a name is an address, which cannot be rebound."""
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True
