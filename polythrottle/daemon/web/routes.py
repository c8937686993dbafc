"""The API: one table of operations, from which its routes.

Its OpenAPI 3.1 document and the ASGI application are made.
"""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from http import HTTPStatus
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Mount, Route
from starlette.types import ASGIApp, Receive, Scope, Send

from polythrottle.daemon.commands import Confirm, HostStudy, Release, SetBudget, SetNodePower, StartStudy, Stop, Take
from polythrottle.daemon.status import Happened, NodeShown, Status, StudyShown, WorkloadShown
from polythrottle.daemon.web.access import Gate
from polythrottle.daemon.web.event_stream import KIND
from polythrottle.daemon.web.handlers import (
    PROFILE,
    Api,
    Does,
    apply,
    device,
    events,
    healthz,
    history,
    metrics,
    node_metrics,
    node_page,
    node_shown,
    page,
    profiles,
    report,
    shown,
    stop_study,
    study,
    study_events,
    wished,
)
from polythrottle.daemon.web.messages import (
    APPLY,
    BUDGET,
    EVENTS_QUERY,
    HISTORY_QUERY,
    HOST,
    LAST_EVENT,
    NODE_POWER,
    NOTHING,
    REFUSAL,
    RELEASE,
    REPORT,
    STUDY,
    Refusal,
    Schema,
    error_reply,
    json_reply,
    read_query,
    refused,
    schema_of,
    to_json,
)
from polythrottle.domain.errors import DeviceError, InvalidInput, PolythrottleError, UnknownName

# What can be asked over HTTP: one table, from which both the routes and the OpenAPI document are made.

_WORDS: Schema = {"type": "string", "description": "What has been done, for people."}


@dataclass(frozen=True)
class Operation:
    """One thing that can be asked.

    Args:
        method: Of HTTP.
        path: With ``{id}`` where a name stands.
        name: By which programs call it.
        words: What it is for.
        does: It.
        answer: Schema of its answer; None where that is no JSON.
        body: Schema of what is sent; None if nothing is.
        query: Schemas of the words after the question mark.
        kinds: What kinds of answer there are besides JSON.
        refuses: With which statuses, besides those that any request may meet.
    """

    method: str
    path: str
    name: str
    words: str
    does: Does
    answer: Schema | None = None
    body: Schema | None = None
    query: Mapping[str, Schema] = field(default_factory=dict)
    kinds: Sequence[str] = ()
    refuses: Sequence[int] = ()


def _listed(name: str, each: Schema) -> Schema:
    return _answered(**{name: {"type": "array", "items": each}})


def _answered(**properties: Schema) -> Schema:
    return {"type": "object", "properties": properties, "required": list(properties)}


def _done(**further: Schema) -> Schema:
    """Return the schema of what the control loop answers: at least its words."""
    return {"type": "object", "properties": {"words": _WORDS, **further}, "required": ["words"]}


_SECOND: Schema = _answered(
    t={"type": "number", "description": "Seconds since 1970."},
    **{
        name: {"type": ["number", "null"]}
        for name in ("power_w", "p99_s", "limit_s", "rate_per_s", "temperature_c", "rung")
    },
)
_DEVICE: Schema = {
    **_answered(
        uri={"type": "string"},
        title={"type": "string"},
        energy_kind={"type": "string"},
        boundary={"type": "string"},
        leased={"type": "boolean"},
        reachable={"type": "boolean"},
        point={"type": "object"},
        clocks_hz={"type": "object"},
    ),
    "description": "The device the daemon steers.",
}
_STARTED = {"id": {"type": ["string", "null"], "description": "The study's name."}}
_TARGET = {
    "batch": {"type": ["integer", "null"], "description": "Requests to put into a batch; null if it may stay."},
    "gather_s": {"type": ["number", "null"], "description": "How long a request may wait for others."},
}

OPERATIONS: tuple[Operation, ...] = (
    Operation("GET", "/", "page", "The page.", page, kinds=("text/html",)),
    Operation("GET", "/metrics", "metrics", "Figures for Prometheus.", metrics, kinds=("text/plain",)),
    Operation(
        method="GET",
        path="/healthz",
        name="healthz",
        words="Whether the control loop turned within the last 5 s.",
        does=healthz,
        answer=_done(turn={"type": "integer"}),
        refuses=(503,),
    ),
    Operation(
        method="GET",
        path="/v1/status",
        name="status",
        words="What the last turn of the control loop saw.",
        does=shown(lambda api: api.shelf.status_json),
        answer=schema_of(Status),
    ),
    Operation(
        method="GET",
        path="/v1/devices",
        name="devices",
        words="The device that is steered.",
        does=shown(lambda api: {"devices": device(api.shelf.status)}),
        answer=_listed("devices", _DEVICE),
    ),
    Operation(
        method="GET",
        path="/v1/workloads",
        name="workloads",
        words="The workload that is served.",
        does=shown(lambda api: {"workloads": [each for each in (api.shelf.status.workload,) if each is not None]}),
        answer=_listed("workloads", schema_of(WorkloadShown)),
    ),
    Operation(
        method="GET",
        path="/v1/profiles",
        name="profiles",
        words="The profiles that can be applied.",
        does=profiles,
        answer=_listed("profiles", PROFILE),
    ),
    Operation(
        method="POST",
        path="/v1/apply",
        name="apply",
        words="Follow the load with another profile; rolled back unless confirmed in time.",
        does=apply,
        answer=_done(),
        body=APPLY,
        refuses=(404, 409, 503, 507),
    ),
    Operation(
        method="POST",
        path="/v1/confirm",
        name="confirm",
        words="Keep the profile applied last.",
        does=wished(NOTHING, lambda _: Confirm()),
        answer=_done(),
        body=NOTHING,
        refuses=(409, 503, 507),
    ),
    Operation(
        method="POST",
        path="/v1/release",
        name="release",
        words="Put the board back and leave it alone.",
        does=wished(RELEASE, lambda sent: Release(**sent)),
        answer=_done(clean={"type": "boolean", "description": "Whether the board is as it was found."}),
        body=RELEASE,
        refuses=(409, 503),
    ),
    Operation(
        method="POST",
        path="/v1/take",
        name="take",
        words="Set the board again.",
        does=wished(NOTHING, lambda _: Take()),
        answer=_done(),
        body=NOTHING,
        refuses=(409, 503),
    ),
    Operation(
        method="PUT",
        path="/v1/budget",
        name="budget",
        words="Draw no more than this; nothing lifts the limit.",
        does=wished(BUDGET, lambda sent: SetBudget(**sent)),
        answer=_done(),
        body=BUDGET,
        refuses=(404, 409, 503),
    ),
    Operation(
        method="GET",
        path="/v1/studies",
        name="studies",
        words="The studies since the daemon began, newest first.",
        does=shown(lambda api: {"studies": api.shelf.studies}),
        answer=_listed("studies", schema_of(StudyShown)),
    ),
    Operation(
        method="POST",
        path="/v1/studies",
        name="startStudy",
        words="Tune again, from the journal of the study before if there is one.",
        does=wished(STUDY, lambda sent: StartStudy(**sent)),
        answer=_done(**_STARTED),
        body=STUDY,
        refuses=(404, 409, 503, 507),
    ),
    Operation(
        method="GET",
        path="/v1/studies/{id}",
        name="study",
        words="One study.",
        does=study,
        answer=schema_of(StudyShown),
        refuses=(404,),
    ),
    Operation(
        method="DELETE",
        path="/v1/studies/{id}",
        name="stopStudy",
        words="End a study; its journal keeps what it knows.",
        does=stop_study,
        answer=_done(),
        refuses=(404, 409, 503),
    ),
    Operation(
        method="GET",
        path="/v1/studies/{id}/events",
        name="followStudy",
        words="A study each time it gets on, until it ends.",
        does=study_events,
        kinds=(KIND,),
        refuses=(404, 503),
    ),
    Operation(
        method="POST",
        path="/v1/study-host",
        name="hostStudy",
        words="Claim the study that is due, say how far it is, or give back what it has found; at least every 10 s.",
        does=wished(HOST, lambda sent: HostStudy(**sent)),
        answer=_done(state={"enum": ["none", "waiting", "lent", "ended"]}, claim={"type": "string"}),
        body=HOST,
        refuses=(409, 503, 507),
    ),
    Operation(
        method="GET",
        path="/v1/history",
        name="history",
        words="What is kept of the last minutes, oldest first.",
        does=history,
        answer=_listed("minutes", {"type": "object"}),
        query=HISTORY_QUERY,
    ),
    Operation(
        method="GET",
        path="/v1/seconds",
        name="seconds",
        words="What was seen in each of the last 600 seconds.",
        does=shown(lambda api: {"seconds": api.shelf.seconds}),
        answer=_listed("seconds", _SECOND),
    ),
    Operation(
        method="GET",
        path="/v1/events",
        name="events",
        words="Events after a number; followed with Accept: text/event-stream.",
        does=events,
        answer=_listed("events", schema_of(Happened)),
        query=EVENTS_QUERY,
        kinds=(KIND,),
        refuses=(503,),
    ),
    Operation(
        method="POST",
        path="/v1/report",
        name="report",
        words="What a serving program saw; the answer says how to batch.",
        does=report,
        answer=_done(**_TARGET),
        body=REPORT,
        refuses=(409, 503),
    ),
    Operation(
        method="POST",
        path="/v1/stop",
        name="stop",
        words="End the daemon; the board is given back.",
        does=wished(NOTHING, lambda _: Stop()),
        answer=_done(),
        body=NOTHING,
        refuses=(409, 503),
    ),
)

NODE_OPERATIONS: tuple[Operation, ...] = (
    Operation("GET", "/", "page", "The page of all services.", node_page, kinds=("text/html",)),
    Operation("GET", "/metrics", "metrics", "Figures for Prometheus, by service.", node_metrics, kinds=("text/plain",)),
    Operation(
        method="GET",
        path="/v1/node",
        name="node",
        words="All services, and the watts they share. Each has an API of its own below /services/NAME.",
        does=node_shown,
        answer=schema_of(NodeShown),
    ),
    Operation(
        method="PUT",
        path="/v1/node/power",
        name="nodePower",
        words="Have the whole server draw no more than this; null lifts the limit.",
        does=wished(NODE_POWER, lambda sent: SetNodePower(**sent)),
        answer=_done(),
        body=NODE_POWER,
        refuses=(409, 503),
    ),
)
"""What a daemon with several services answers besides, or in place of what one with one service does."""
_REPLACED = ("page", "metrics")

# The OpenAPI 3.1 document of the API, made from the same table as its routes.

VERSION = "1.0.0"
_ALWAYS = (400, 401, 403, 421, 422, 431)
_WITH_BODY = (413, 415)
_ABOUT = (
    "What the polythrottle daemon shows and does. Answers only ever gain fields; unknown fields are refused. "
    "Without a token, a client over TCP may look and change nothing."
)


def document(operations: Sequence[Operation] = OPERATIONS) -> dict[str, Any]:
    """Return the OpenAPI document.

    Args:
        operations: Of a daemon with one service, if nothing else is said.
    """
    paths: dict[str, dict[str, Any]] = {}
    for each in operations:
        paths.setdefault(each.path, {})[each.method.lower()] = _operation(each)
    paths["/openapi.json"] = {"get": _itself()}
    return {
        "openapi": "3.1.0",
        "info": {"title": "polythrottle daemon", "version": VERSION, "description": _ABOUT},
        "paths": paths,
        "components": {
            "schemas": {"Refusal": REFUSAL},
            "securitySchemes": {"token": {"type": "http", "scheme": "bearer"}},
        },
        # Or nothing: over the Unix socket the kernel says who asks.
        "security": [{"token": []}, {}],
    }


def _operation(each: Operation) -> dict[str, Any]:
    described: dict[str, Any] = {
        "operationId": each.name,
        "summary": each.words,
        "responses": {"200": _answer(each), **_refusals(each)},
    }
    parameters = [_parameter("query", name, schema) for name, schema in each.query.items()]
    if "{id}" in each.path:
        parameters.append(_parameter("path", "id", {"type": "string", "minLength": 1, "maxLength": 128}))
    if KIND in each.kinds:
        parameters.append(_parameter("header", "Last-Event-ID", LAST_EVENT))
    if parameters:
        described["parameters"] = parameters
    if each.body is not None:
        described["requestBody"] = {"required": True, "content": {"application/json": {"schema": each.body}}}
    return described


def _answer(each: Operation) -> dict[str, Any]:
    content: dict[str, Any] = {kind: {"schema": {"type": "string"}} for kind in each.kinds}
    if each.answer is not None:
        content["application/json"] = {"schema": each.answer}
    return {"description": each.words, "content": content}


def _refusals(each: Operation) -> dict[str, Any]:
    codes = {*_ALWAYS, *each.refuses, *(_WITH_BODY if each.body is not None else ())}
    return {str(code): _refusal(code) for code in sorted(codes)}


def _refusal(code: int) -> dict[str, Any]:
    schema = {"$ref": "#/components/schemas/Refusal"}
    return {"description": HTTPStatus(code).phrase, "content": {"application/json": {"schema": schema}}}


def _parameter(place: str, name: str, schema: Schema) -> dict[str, Any]:
    return {"in": place, "name": name, "required": place == "path", "schema": schema}


def _itself() -> dict[str, Any]:
    return {
        "operationId": "openapi",
        "summary": "This document.",
        "responses": {
            "200": {"description": "This document.", "content": {"application/json": {"schema": {"type": "object"}}}},
            **{str(code): _refusal(code) for code in _ALWAYS},
        },
    }


# The ASGI application: routes, and what errors become.


def build_app(api: Api, services: Mapping[str, Api] | None = None) -> ASGIApp:
    """Return the application; every request's scope must hold who asks, as ``state["visitor"]``.

    Args:
        api: Of the daemon.
        services: Of each of several services, below ``/services/NAME``; None where there is one alone.

    Raises:
        BadFile: If the token of TCP cannot be read.
        PermissionDenied: If others could read it.
    """
    if services is None:
        return Gate(_served(_routes(api, OPERATIONS)), api.options.tcp)
    own = (*(each for each in OPERATIONS if each.name not in _REPLACED), *NODE_OPERATIONS)
    several = Mount(f"{_SERVICES}{{name}}", _Services(services))
    return Gate(_served([*_routes(api, own), several]), api.options.tcp, partial(_is_page, services))


_SERVICES = "/services/"


def _is_page(services: Mapping[str, Api], path: str) -> bool:
    """Return whether a path is that of the page of a service there is."""
    return path.startswith(_SERVICES) and path.endswith("/") and path[len(_SERVICES) : -1] in services


class _Services:
    """An ASGI application that hands requests on to the service they name, of those there are at the moment.

    Args:
        services: Their APIs, by name.
    """

    def __init__(self, services: Mapping[str, Api]) -> None:
        self._services = services
        self._apps: dict[str, tuple[Api, ASGIApp]] = {}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request below a service's name."""
        name = str(scope["path_params"]["name"])
        api = self._services.get(name)
        if api is None:
            error = UnknownName("service", name[:80], self._services)
            await refused(404, UnknownName.__name__, str(error))(scope, receive, send)
            return
        known = self._apps.get(name)
        if known is None or known[0] is not api:
            self._apps = {each: app for each, app in self._apps.items() if each in self._services}
            known = self._apps[name] = api, _served(_routes(api, OPERATIONS))
        await known[1](scope, receive, send)


def _routes(api: Api, operations: Sequence[Operation]) -> list[BaseRoute]:
    routes: list[BaseRoute] = [Route("/openapi.json", _described(operations), methods=["GET"])]
    for path in dict.fromkeys(each.path for each in operations):
        here = {each.method: each for each in operations if each.path == path}
        routes.append(Route(path, _endpoint(api, here), methods=list(here)))
    return routes


def _served(routes: Sequence[BaseRoute]) -> Starlette:
    app = Starlette(routes=routes, exception_handlers={HTTPException: _no_route, Exception: _fault})
    app.router.redirect_slashes = False
    return app


def _endpoint(api: Api, here: dict[str, Operation]) -> Callable[[Request], Awaitable[Response]]:
    async def endpoint(request: Request) -> Response:
        # Starlette lets HEAD in wherever GET is.
        operation = here.get("GET" if request.method == "HEAD" else request.method)
        assert operation is not None
        try:
            return await operation.does(api, request)
        except Refusal as refusal:
            return refusal.reply()
        except PolythrottleError as error:
            return error_reply(error)
        except asyncio.CancelledError:
            if not api.shelf.closing:
                raise
            # Cut off because the server ends, which is no fault of the daemon's that its log should tell of.
            return error_reply(DeviceError("the daemon ends and takes no more requests"))

    return endpoint


def _described(operations: Sequence[Operation]) -> Callable[[Request], Awaitable[Response]]:
    @functools.lru_cache(maxsize=None)
    def written() -> bytes:
        return to_json(document(operations))

    async def described(request: Request) -> Response:
        try:
            read_query(request, {})
        except Refusal as refusal:
            return refusal.reply()
        return json_reply(written())

    return described


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
