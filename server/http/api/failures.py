"""Every failure of a route in OpenAI's shape, or the endpoint's own: its errors, unknown paths and
methods, bad parameters, bugs.
"""

from __future__ import annotations

import logging

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.responses import JSONResponse, Response
from starlette.routing import Match
from starlette.types import Scope

from kendall.server.openai_tools.endpoints import dialect_of, error_body
from kendall.server.runtime.errors import ApiError
from kendall.server.runtime.wording import brief
from kendall.server.security.early_answer import RejectionResponse

log = logging.getLogger("kendall")
_CODES = {404: "not_found", 405: "method_not_allowed"}


def add_failures(app: FastAPI) -> None:
    """Handlers for all of them."""

    @app.exception_handler(ApiError)
    async def api_error(request: Request, error: ApiError) -> JSONResponse:
        return in_words_of(request.url.path, RejectionResponse(error))

    @app.exception_handler(HTTPException)
    async def http_error(request: Request, error: HTTPException) -> JSONResponse:
        code = _CODES.get(error.status_code, "error")
        path = request.url.path
        message = f"{request.method} {brief(path)}: {error.detail}"
        page = in_words_of(path, RejectionResponse(ApiError(error.status_code, code, message)))
        if error.status_code == 405:
            page.headers["allow"] = ", ".join(sorted(_methods(app, request.scope)))
        return page

    @app.exception_handler(RequestValidationError)
    async def bad_parameter(_: Request, error: RequestValidationError) -> JSONResponse:
        first = error.errors()[0]
        name = ".".join(str(part) for part in first["loc"][1:])
        return _page(ApiError(400, "invalid_request", f"{name}: {first['msg']}", param=name))

    @app.exception_handler(ClientDisconnect)
    async def gone(_: Request, __: ClientDisconnect) -> Response:
        return Response(status_code=400)  # nobody reads it

    @app.exception_handler(Exception)
    async def bug(request: Request, error: Exception) -> JSONResponse:
        log.error("%s %s failed", request.method, request.url.path, exc_info=error)
        return _page(
            ApiError(
                500, "internal_error", "internal error of the gateway; its log has the details"
            )
        )


def in_words_of(path: str, rejection: RejectionResponse) -> RejectionResponse:
    """The same in the shape of the endpoint at this path, which the call has not reached."""
    dialect, error = dialect_of(path), rejection.error
    if dialect == "openai":
        return rejection
    return RejectionResponse(error, body=error_body(dialect, error))


def _page(error: ApiError) -> JSONResponse:
    return JSONResponse(error.body(), error.status, error.headers())


def _methods(app: FastAPI, scope: Scope) -> set[str]:
    """What the path can be asked with, over all its routes: Starlette names those of the first
    alone.
    """
    found: set[str] = set()
    for route in app.routes:
        if route.matches(scope)[0] is not Match.NONE:
            found |= getattr(route, "methods", None) or set()
    return found
