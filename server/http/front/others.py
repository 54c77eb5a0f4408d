"""The routes that queue nothing: the tokens of a conversation as vLLM renders it, and what a model
that generates text does not do.
"""

from __future__ import annotations

from typing import ClassVar

from fastapi import FastAPI, Request, Response
from starlette.responses import JSONResponse

from server.front.call import FrontCall
from server.front.endpoints import COUNT_TOKENS, Endpoint, error_body
from server.gateway import Gateway
from server.http.api.openapi import errors
from server.http.api.validation import parse
from server.http.front.fields import MessagesRequest, check_newer, described
from server.http.front.making import no_desk
from server.runtime.errors import ApiError


class CountTokensRequest(MessagesRequest):
    """`POST /v1/messages/count_tokens`."""

    endpoint: ClassVar[Endpoint] = COUNT_TOKENS
    required: ClassVar[tuple[str, ...]] = ("model", "messages")
    served: ClassVar[frozenset[str]] = frozenset(
        {
            *("model", "messages", "system", "tools", "tool_choice", "thinking", "output_config"),
            "chat_template_kwargs",
        }
    )


def add_others(app: FastAPI, gateway: Gateway) -> None:
    """The two routes."""

    @app.post("/v1/embeddings", responses=errors(401, 413, 501))
    async def embeddings() -> None:
        raise ApiError(
            501,
            "unsupported",
            f"got /v1/embeddings, but {gateway.settings.served_model_name} generates text; "
            "expected a call to an embedding model, which this gateway does not serve",
        )

    @app.post(COUNT_TOKENS.path, **described(CountTokensRequest, streams=False))
    async def count_tokens(request: Request) -> Response:
        try:
            most = gateway.settings.security.max_body_bytes
            call = await parse(request.receive, CountTokensRequest, most)
            check_newer(gateway.settings, call)
            gateway.admit()
            answer = await gateway.supervisor.across_restarts(lambda: _counted(gateway, call))
        except ApiError as error:
            body = error_body(COUNT_TOKENS.dialect, error)
            return JSONResponse(body, error.status, error.headers())
        return Response(answer, media_type="application/json")


async def _counted(gateway: Gateway, call: CountTokensRequest) -> bytes:
    if gateway.desk is None:
        raise no_desk(COUNT_TOKENS)
    body = call.model_dump(exclude_unset=True)
    counting = FrontCall(await gateway.desk.serving(), COUNT_TOKENS, body)
    try:
        await counting.reach()
        assert counting.whole is not None
        return counting.whole
    finally:
        counting.close()
