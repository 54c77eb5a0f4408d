"""From the bytes of a call to its answer: read, validated, admitted, submitted. Plain ASGI, for the two routes that carry answers."""

from __future__ import annotations

import logging
import re
import time
from collections.abc import Awaitable, Callable
from typing import TypeVar

from pydantic import BaseModel, ValidationError
from starlette.requests import ClientDisconnect
from starlette.responses import JSONResponse, Response
from starlette.types import Receive, Scope, Send

from server.answer import Answer, AnswerOptions
from server.arrivals_seen import is_retry
from server.errors import ApiError
from server.formats import ChatFormat, CompletionFormat
from server.gateway import Gateway
from server.receiving import RECEIVED_AT
from server.schema import FORCED_FIELD, ChatRequest, CompletionRequest

log = logging.getLogger("kendall")
MAX_BODY = 16 << 20  # bytes
REQUEST_ID = re.compile(r"[\w.:-]{1,128}")
_Model = TypeVar("_Model", bound=BaseModel)


async def read_body(receive: Receive) -> bytes:
    """The whole body. Raises ApiError 413, or ClientDisconnect."""
    body = bytearray()
    more = True
    while more:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ClientDisconnect
        body += message.get("body", b"")
        if len(body) > MAX_BODY:
            raise ApiError(413, "body_too_large", f"got a body of more than {MAX_BODY} bytes; expected less")
        more = message.get("more_body", False)
    return bytes(body)


def validate(body: bytes, model: type[_Model]) -> _Model:
    """The body as `model`. Raises ApiError 400 (never 422), naming the field."""
    try:
        return model.model_validate_json(body)
    except ValidationError as error:
        first = error.errors(include_url=False, include_context=False)[0]
        where = ".".join(str(part) for part in first["loc"])
        got = f"; got {first['input']!r:.80}" if where and first["type"] != "missing" else ""
        code = "invalid_json" if first["type"] == "json_invalid" else "invalid_request"
        raise ApiError(400, code, f"{where + ': ' if where else ''}{first['msg']}{got}", param=where or None) from None


def _check(gateway: Gateway, call: CompletionRequest | ChatRequest) -> None:
    if call.model != gateway.settings.served_model_name:
        raise ApiError(
            404, "model_not_found", f"got model {call.model!r}; this gateway serves {gateway.settings.served_model_name!r}", param="model"
        )
    if unsupported := call.unsupported():
        raise ApiError(501, "unsupported", f"{unsupported[0]} is not served by this gateway; leave it out", param=unsupported[0])
    if call.kendall_forced_output_tokens is not None and not gateway.settings.allow_forced_lengths:
        raise ApiError(400, "forced_lengths_not_allowed", "forced lengths need `kendall serve --allow-forced-lengths`", param=FORCED_FIELD)


async def answer(gateway: Gateway, scope: Scope, receive: Receive, model: type[CompletionRequest] | type[ChatRequest]) -> Answer:
    """The call's answer, its sequences not yet submitted. Raises ApiError."""
    body = await read_body(receive)
    timing = gateway.begin_timing()
    call = validate(body, model)
    if timing is not None:
        timing.end("parse")
    arrived_at = gateway.now()
    batcher = gateway.admit()
    _check(gateway, call)
    chat = isinstance(call, ChatRequest)
    call_id = gateway.next_call_id("chatcmpl" if chat else "cmpl")
    asked_id = _asked_id(scope)
    received_at = scope.get(RECEIVED_AT, arrived_at)
    retry = is_retry(scope["headers"])
    works = await gateway.works(call, call_id, arrived_at, asked_id, received_at, retry=retry)
    if timing is not None:
        timing.end("prompt")
    gateway.arrivals.saw(received_at, batcher.epoch, retry=retry)
    options = AnswerOptions(
        request_id=asked_id or call_id,
        stream=call.stream,
        include_usage=call.stream_options is not None and call.stream_options.include_usage,
        n=call.n,
        client_limit=call.client_limit(),
    )
    form = ChatFormat if chat else CompletionFormat
    created = int(time.time())  # noqa: TID251 - a date, not a clock
    made = Answer(batcher, works, form(call_id, created, call.model, works[0].sampling.logprobs), options)
    made.timing = timing
    return made


def _asked_id(scope: Scope) -> str | None:
    asked = next((value.decode("latin-1") for name, value in scope["headers"] if name == b"x-request-id"), "")
    return asked if REQUEST_ID.fullmatch(asked) else None


def direct(gateway: Gateway, model: type[CompletionRequest] | type[ChatRequest]) -> Callable[[Scope, Receive, Send], Awaitable[None]]:
    """The route as an ASGI application: errors in OpenAI's shape, a bug in one call answered with 500 and logged."""

    async def call(scope: Scope, receive: Receive, send: Send) -> None:
        try:
            response: Response = await answer(gateway, scope, receive, model)
        except ClientDisconnect:
            return  # it never arrived
        except ApiError as error:
            response = JSONResponse(error.body(), error.status, error.headers())
        except Exception:
            log.exception("a call failed before it was queued")
            failure = ApiError(500, "internal_error", "the gateway failed; its log says why")
            response = JSONResponse(failure.body(), failure.status)
        await response(scope, receive, send)

    return call
