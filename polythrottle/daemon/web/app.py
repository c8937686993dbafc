"""The ASGI application: routes, and what errors become."""

import functools
from collections.abc import Awaitable, Callable

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp

from polythrottle.daemon.web.answering import Api
from polythrottle.daemon.web.bodies import read_query
from polythrottle.daemon.web.document import document
from polythrottle.daemon.web.gate import Gate
from polythrottle.daemon.web.operations import OPERATIONS, Operation
from polythrottle.daemon.web.plain import to_json
from polythrottle.daemon.web.replies import Refusal, error_reply, json_reply, refused
from polythrottle.errors import InvalidInput, PolythrottleError, UnknownName


def build_app(api: Api) -> ASGIApp:
    """Return the application; every request's scope must hold who asks, as ``state["visitor"]``.

    Raises:
        BadFile: If the token of TCP cannot be read.
        PermissionDenied: If others could read it.
    """
    routes = [Route("/openapi.json", _document, methods=["GET"])]
    for path in dict.fromkeys(each.path for each in OPERATIONS):
        here = {each.method: each for each in OPERATIONS if each.path == path}
        routes.append(Route(path, _endpoint(api, here), methods=list(here)))
    app = Starlette(routes=routes, exception_handlers={HTTPException: _no_route, Exception: _fault})
    app.router.redirect_slashes = False
    return Gate(app, api.options.tcp)


def _endpoint(api: Api, here: dict[str, Operation]) -> Callable[[Request], Awaitable[Response]]:
    async def endpoint(request: Request) -> Response:
        operation = here.get("GET" if request.method == "HEAD" else request.method)
        assert operation is not None
        try:
            return await operation.does(api, request)
        except Refusal as refusal:
            return refusal.reply()
        except PolythrottleError as error:
            return error_reply(error)

    return endpoint


async def _document(request: Request) -> Response:
    try:
        read_query(request, {})
    except Refusal as refusal:
        return refusal.reply()
    return json_reply(_written())


@functools.cache
def _written() -> bytes:
    return to_json(document())


def _no_route(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    path = request.url.path[:80]
    if error.status_code == 405:
        words = f"{path} does not take {request.method}"
        return refused(405, InvalidInput.__name__, words, dict(error.headers or {}))
    words = f"there is no {path}; /openapi.json says what there is"
    return refused(error.status_code, UnknownName.__name__, words)


def _fault(request: Request, error: Exception) -> Response:
    """Answer what must not happen; it goes on to the log, with its traceback."""
    return refused(500, PolythrottleError.__name__, "the daemon met a fault of its own; its log tells more")
