"""The OpenAPI 3.1 document of the API, made from the same table as its routes."""

from http import HTTPStatus
from typing import Any

from polythrottle.daemon.web.bodies import LAST_EVENT
from polythrottle.daemon.web.operations import OPERATIONS, Operation
from polythrottle.daemon.web.plain import Schema
from polythrottle.daemon.web.replies import REFUSAL
from polythrottle.daemon.web.stream import KIND

VERSION = "1.0.0"
_ALWAYS = (400, 401, 403, 421, 422, 431)
_WITH_BODY = (413, 415)
_ABOUT = (
    "What the polythrottle daemon shows and does. Answers only ever gain fields; unknown fields are refused. "
    "Without a token, a client over TCP may look and change nothing."
)


def document() -> dict[str, Any]:
    """Return the OpenAPI document."""
    paths: dict[str, dict[str, Any]] = {}
    for each in OPERATIONS:
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
