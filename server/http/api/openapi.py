"""The OpenAPI document: what the routes that read their own bodies take, and every status they
answer with.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from fastapi import FastAPI
from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

from kendall.server.http.api.answers import Described, ErrorAnswer
from kendall.server.runtime.errors import MAX_RETRY_AFTER

STATUSES = {
    400: "The request is wrong; `param` names the field.",
    401: "The API key is missing or wrong.",
    403: (
        "An API key does not give access, calls are allowed from this machine only, or the call "
        "came from a page of another origin."
    ),
    404: "No such model or path.",
    409: "The engine is in use, or has no replicas, or the gateway is shutting down.",
    413: "The body is too large, or has too many values.",
    429: (
        "Overload: the queue is full, the patience ran out, an objective cannot be met, or the "
        "key exceeds its rate limit."
    ),
    500: "The gateway or the engine failed while handling this request.",
    501: "A field that this gateway or its engine does not support.",
    503: "No engine (starting, lost or shutting down), or overload with --overload-status 503.",
    504: (
        "A time limit of the request or of the gateway expired, or the engine produced no token "
        "for it."
    ),
}
ANSWERING = (400, 401, 404, 413, 429, 500, 501, 503, 504)  # of the routes that carry answers
_RETRY_AFTER = {
    "Retry-After": {
        "required": True,
        "schema": {"type": "integer", "minimum": 1, "maximum": MAX_RETRY_AFTER},
    }
}
_REF = "#/components/schemas/{model}"
_BODIES: list[type[BaseModel]] = []  # every model that `body` was asked for
_CLOSED = ("CompletionRequest", "ChatRequest")  # they keep what is left over to refuse it by name


def errors(*statuses: int, model: type[BaseModel] = ErrorAnswer) -> Described:
    """What FastAPI takes as `responses`, for these error statuses."""
    found: Described = {}
    for status in statuses:
        found[status] = {"model": model, "description": STATUSES[status]}
        if status in (429, 503):
            found[status]["headers"] = _RETRY_AFTER
    return found


def answers(model: type[BaseModel], *statuses: int, streams: bool = False) -> Described:
    """A 200 of this shape, and the errors."""
    good: dict[str, Any] = {"model": model}
    if streams:
        good["content"] = {"text/event-stream": {}}
    return {200: good} | errors(*statuses)


def body(model: type[BaseModel], parameters: Sequence[dict[str, Any]] = ()) -> dict[str, Any]:
    """What FastAPI takes as `openapi_extra` where the route itself reads a body of this model,
    and these parameters.
    """
    if model not in _BODIES:
        _BODIES.append(model)
    extra = {"parameters": list(parameters)} if parameters else {}
    return extra | {
        "requestBody": {
            "required": True,
            "content": {
                "application/json": {"schema": {"$ref": _REF.format(model=model.__name__)}}
            },
        }
    }


def fields(names: Iterable[str], required: Sequence[str]) -> dict[str, Any]:
    """The same for a body of which only the names of the fields are known here: vLLM has their
    types.
    """
    known: dict[str, Any] = {name: {} for name in sorted(names)}
    known["model"] = {"type": "string"}
    schema = {
        "type": "object",
        "required": list(required),
        "properties": known,
        "additionalProperties": False,
    }
    return {"requestBody": {"required": True, "content": {"application/json": {"schema": schema}}}}


def document(app: FastAPI, beyond: Mapping[Any, Iterable[str]]) -> None:
    """Let `/openapi.json` say all of it; made once, when it is first asked for. `beyond`: fields of
    these bodies that vLLM reads.
    """
    plain = app.openapi
    more = {model.__name__: names for model, names in beyond.items()}

    def described() -> dict[str, Any]:
        if app.openapi_schema is None:
            app.openapi_schema = _finished(plain(), more)
        return app.openapi_schema

    app.openapi = described  # type: ignore[method-assign]


def _finished(schema: dict[str, Any], beyond: Mapping[str, Iterable[str]]) -> dict[str, Any]:
    for methods in schema["paths"].values():
        for operation in methods.values():
            operation["responses"].pop("422", None)  # never sent: it is 400 here
    components = schema.setdefault("components", {}).setdefault("schemas", {})
    for unused in ("HTTPValidationError", "ValidationError"):
        components.pop(unused, None)
    _, made = models_json_schema([(model, "validation") for model in _BODIES], ref_template=_REF)
    components |= made.get("$defs", {})
    for name in _CLOSED:
        if name in components:  # where calls are passed on there are none
            components[name]["additionalProperties"] = False
            components[name]["properties"] |= {field: {} for field in sorted(beyond.get(name, ()))}
    return schema
