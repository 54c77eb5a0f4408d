"""The routes that queue nothing: the tokens of a conversation as vLLM renders it, and what a model
that generates text does not do.
"""

from __future__ import annotations

from typing import ClassVar

from fastapi import FastAPI, Request, Response

from kendall.server.admission.control import caller_of
from kendall.server.gateway import Gateway
from kendall.server.http.api.checked_call import check_newer, not_served
from kendall.server.http.api.newer_endpoints import MessagesRequest, check_tools, described
from kendall.server.http.api.openapi import errors
from kendall.server.http.api.validation import validate
from kendall.server.http.bodies import parsed, read_body
from kendall.server.http.client_connection import while_connected
from kendall.server.http.openai_tools.engine_requests import apart_of
from kendall.server.http.unqueued import Unqueued
from kendall.server.openai_tools.call import VllmCall
from kendall.server.openai_tools.endpoints import COUNT_TOKENS, ApiEndpoint, error_body
from kendall.server.runtime.errors import ApiError
from kendall.server.security.early_answer import RejectionResponse


class CountTokensRequest(MessagesRequest):
    """`POST /v1/messages/count_tokens`."""

    endpoint: ClassVar[ApiEndpoint] = COUNT_TOKENS
    required: ClassVar[tuple[str, ...]] = ("model", "messages")
    served: ClassVar[frozenset[str]] = frozenset(
        {
            *("model", "messages", "system", "tools", "tool_choice", "thinking", "output_config"),
            "chat_template_kwargs",
        }
    )


def add_others(app: FastAPI, gateway: Gateway, unqueued: Unqueued) -> None:
    """The two routes."""

    @app.post("/v1/embeddings", responses=errors(401, 404, 413))
    async def embeddings() -> None:
        raise ApiError(
            404,
            "not_found",
            f"got /v1/embeddings, but {gateway.settings.served_model_name} generates text; "
            "expected a call to an embedding model, which this gateway does not serve",
        )

    @app.post(COUNT_TOKENS.path, **described(CountTokensRequest, streams=False))
    async def count_tokens(request: Request) -> Response:
        try:
            unqueued.admit(request.scope)
            most = gateway.settings.security.max_body_bytes
            body = await read_body(request.receive, most)
            call = await parsed(
                body, lambda text: validate(text, CountTokensRequest), gateway.context
            )
            check_newer(gateway.settings, call)
            check_tools((call.model_extra or {}).get("tools"))
            gateway.admit()
            caller = caller_of(request.scope)
            async with unqueued.turn(request.scope):
                counting = gateway.supervisor.across_restarts(
                    lambda: _counted(gateway, call, body, caller)
                )
                answer = await while_connected(request.scope, request.receive, counting)
        except ApiError as error:
            told = error_body(COUNT_TOKENS.dialect, error)
            return RejectionResponse(error, body=told)
        return Response(answer, media_type="application/json")


async def _counted(gateway: Gateway, call: CountTokensRequest, sent: bytes, caller: str) -> bytes:
    objects = gateway.serving_objects
    if objects is None:
        raise not_served(COUNT_TOKENS)
    body = call.model_dump(exclude_unset=True)
    counting = VllmCall(await objects.serving(), COUNT_TOKENS, body)
    try:
        await counting.reach(apart_of(objects, COUNT_TOKENS, sent, caller))
        assert counting.whole is not None
        return counting.whole
    finally:
        counting.close()
