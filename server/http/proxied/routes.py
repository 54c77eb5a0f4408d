"""The routes of calls that are passed on. As the two that carry answers elsewhere, they are called
without FastAPI's layers; it has them for the OpenAPI document, and for other methods.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from functools import partial
from typing import Any

from fastapi import FastAPI, Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from kendall.server.gateway import Gateway
from kendall.server.http.api.openapi import ANSWERING, errors
from kendall.server.http.api.parameters import CALL_HEADERS
from kendall.server.http.call import direct
from kendall.server.http.proxied.call import answer, relayed
from kendall.server.http.proxied.endpoints import ENDPOINTS, RELAYED
from kendall.server.openai_tools.endpoints import dialect_of

ALSO_UNDER_OPENAI = ("/v1/completions", "/v1/chat/completions")  # KServe has them there
ABOUT = "Passed on to the server behind: its fields, its answer."
OBJECT: dict[str, Any] = {
    "parameters": CALL_HEADERS,
    "requestBody": {
        "required": True,
        "content": {"application/json": {"schema": {"type": "object"}}},
    },
}
Call = Callable[[Scope, Receive, Send], Awaitable[None]]


def add_proxied(app: FastAPI, gateway: Gateway) -> Mapping[str, Call]:
    """Add them; returns what calls them directly, by path."""
    makes: dict[str, Callable[[Scope, Receive], Awaitable[Response]]] = {
        path: partial(answer, gateway, endpoint) for path, endpoint in ENDPOINTS.items()
    }
    makes |= {path: partial(relayed, gateway, path) for path in RELAYED}
    for path, make in makes.items():
        app.add_api_route(
            path,
            partial(_called, make),
            methods=["POST"],
            name=path,
            description=ABOUT,
            response_class=Response,
            responses=errors(*ANSWERING),
            openapi_extra=OBJECT,
        )
    found = {path: direct(gateway, make, dialect_of(path)) for path, make in makes.items()}
    return found | {f"/openai{path}": found[path] for path in ALSO_UNDER_OPENAI}


async def _called(
    make: Callable[[Scope, Receive], Awaitable[Response]], request: Request
) -> Response:
    return await make(request.scope, request.receive)
