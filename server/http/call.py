"""From the bytes of a call to its answer: read, validated, admitted, submitted. Plain ASGI, for
the two routes that carry answers.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Awaitable, Callable
from typing import Any

from starlette.requests import ClientDisconnect
from starlette.responses import JSONResponse, Response
from starlette.types import Receive, Scope, Send

from server.admission.control import caller_of
from server.admission.limits import check_sequences
from server.admission.rejections import EARLY
from server.errors import ApiError
from server.gateway import Gateway
from server.http.answer import Answer, AnswerOptions
from server.http.api.limits import check_form_size
from server.http.api.models import check_model
from server.http.api.schema import FORCED_FIELD, ChatRequest, CompletionRequest
from server.http.api.validation import check_extra, read_body, validate
from server.http.api.works import works_of
from server.http.bodies import AT_ONCE, MOST_VALUES, parsed
from server.http.formats import ChatFormat, CompletionFormat
from server.http.presence import while_present
from server.http.queue_stream import QueueStream
from server.http.receiving import RECEIVED_AT
from server.http.request_id import asked_id, stamped
from server.live.arrivals_seen import is_retry
from server.runtime.logs import log_prompt
from server.security.early_answer import Refusal
from server.supervision.deadlines import timeouts_of

log = logging.getLogger("kendall")
# how the name of every header begins that says how a call is to be served: one look in place of one
# for each
READ = b"x-"
MOST_BAD_WORD_CHARACTERS = 1 << 16  # of all sequences of a call: vLLM tokenises them for each


def _check(gateway: Gateway, call: CompletionRequest | ChatRequest, body_bytes: int) -> None:
    check_model(gateway.settings, call.model)
    if body_bytes > gateway.settings.security.max_form_bytes and not call.formless:
        check_form_size(call, gateway.settings.security.max_form_bytes)
    check_extra(gateway.settings, call, {"best_of": call.n, **call.harmless})
    if call.stream_options is not None and call.stream_options.include_obfuscation:
        field = "stream_options.include_obfuscation"
        raise ApiError(
            501,
            "unsupported",
            f"got {field}, which this gateway does not support; leave it out",
            param=field,
        )
    if call.kendall_forced_output_tokens is not None and not gateway.settings.allow_forced_lengths:
        raise ApiError(
            400,
            "forced_lengths_not_allowed",
            "forced lengths need `kendall serve --allow-forced-lengths`",
            param=FORCED_FIELD,
        )


def _check_size(gateway: Gateway, call: CompletionRequest | ChatRequest) -> int:
    """The number of sequences. Raises ApiError 400 before anything is built of them: more than
    are ever admitted.
    """
    prompts = 1 if isinstance(call, ChatRequest) else max(1, len(call.prompts()))
    sequences = prompts * call.n
    check_sequences(gateway.settings.overload, sequences, "prompt" if prompts > call.n else "n")
    if call.bad_words and sequences * sum(map(len, call.bad_words)) > MOST_BAD_WORD_CHARACTERS:
        message = (
            f"got bad_words for {sequences} sequences; expected at most "
            f"{MOST_BAD_WORD_CHARACTERS} characters over all of them"
        )
        raise ApiError(400, "invalid_request", message, param="bad_words")
    return sequences


def _most_values(gateway: Gateway) -> int:
    """Of a body: at least two contexts full of token ids."""
    return (
        max(MOST_VALUES, 2 * gateway.batcher.capabilities.max_model_len)
        if gateway.lifecycle.started
        else MOST_VALUES
    )


async def answer(
    gateway: Gateway,
    scope: Scope,
    receive: Receive,
    model: type[CompletionRequest] | type[ChatRequest],
) -> Answer:
    """The call's answer, its sequences not yet submitted. Raises ApiError."""
    body = await read_body(receive, gateway.settings.security.max_body_bytes)
    timing = gateway.metrics.own_time.begin(gateway.now) if gateway.lifecycle.ready else None
    if len(body) <= AT_ONCE:
        call = validate(body, model)
    else:
        call = await parsed(body, lambda text: validate(text, model), _most_values(gateway))
    sequences = _check_size(gateway, call)
    if timing is not None:
        timing.end("parse")
    arrived_at = gateway.now()
    chat = isinstance(call, ChatRequest)
    call_id = gateway.call_ids.next("chatcmpl" if chat else "cmpl")
    headers = [header for header in scope["headers"] if header[0].startswith(READ)]
    own_id = asked_id(headers) or call.request_id
    received_at = scope.get(RECEIVED_AT, arrived_at)
    retry = is_retry(headers)
    try:
        batcher = gateway.admit()
        _check(gateway, call, len(body))
        if gateway.settings.logs.prompts:
            log_prompt(own_id or call_id, _prompt_of(call))
        demand = gateway.overload.demand(headers, call.patience, call.priority)
        timeouts = timeouts_of(headers, call, gateway.settings)
        making = works_of(
            gateway,
            call,
            call_id,
            arrived_at,
            client_request_id=own_id,
            received_at=received_at,
            retry=retry,
            patience=demand.patience,
            caller=caller_of(scope),
        )
        waiting = making if call.formless else while_present(scope, receive, making)
        works = await (waiting if timeouts is None else timeouts.bound(waiting, arrived_at))
        gateway.refusals.check(works)
    except ApiError as error:
        if error.code in EARLY:
            ids = [f"{call_id}-{place}" for place in range(sequences)]
            gateway.overload.rejections.record_unserved(
                error, ids, own_id, arrived_at=arrived_at, received_at=received_at, retry=retry
            )
        raise
    if timing is not None:
        timing.end("prompt")
    gateway.arrivals.saw(received_at, batcher.epoch, retry=retry)
    gateway.overload.admit(works, scope, demand)
    options = AnswerOptions(
        request_id=own_id or call_id,
        arrived_at=arrived_at,
        stream=call.stream,
        include_usage=call.stream_options is not None and call.stream_options.include_usage,
        continuous_usage=call.stream_options is not None
        and call.stream_options.continuous_usage_stats,
        n=call.n,
        client_limit=call.client_limit(),
        loss=gateway.overload.rejections.loss,
        timeouts=timeouts,
    )
    form = ChatFormat if chat else CompletionFormat
    created = int(time.time())  # noqa: TID251 - a date, not a clock
    name = gateway.settings.served_model_name  # the first one, as vLLM has it
    shape = form(
        call_id, created, name, works[0].sampling.logprobs, token_ids=call.return_token_ids
    )
    made = _answer_of(gateway, batcher, works, shape, options, stream=call.stream)
    made.timing = timing
    return made


def _prompt_of(call: CompletionRequest | ChatRequest) -> object:
    if isinstance(call, ChatRequest):
        return [message.model_dump(exclude_none=True) for message in call.messages]
    return call.prompt


def _answer_of(gateway: Gateway, *parts: Any, stream: bool) -> Answer:
    """One that speaks while it waits, where that was asked for."""
    settings, places = gateway.settings.overload, gateway.overload.places
    if not stream or (places is None and not settings.sse_keep_alive_interval):
        return Answer(*parts)
    keep_alive = settings.sse_keep_alive_interval or math.inf
    return QueueStream(*parts, places=places, keep_alive=keep_alive)


def _rejected_at_door(gateway: Gateway, scope: Scope, error: ApiError) -> Response:
    headers = scope["headers"]
    own_id = asked_id(headers)
    call_id = gateway.overload.rejections.record_at_door(error, own_id, retry=is_retry(headers))
    return Refusal(error, own_id or call_id)


def direct(
    gateway: Gateway, model: type[CompletionRequest] | type[ChatRequest]
) -> Callable[[Scope, Receive, Send], Awaitable[None]]:
    """The route as an ASGI application: errors in OpenAI's shape, a bug in one call answered
    with 500 and logged.
    """

    async def call(scope: Scope, receive: Receive, send: Send) -> None:
        overload = gateway.overload
        try:
            refused = overload.door(scope) if overload.guarded else None
            response: Response = (
                await answer(gateway, scope, receive, model)
                if refused is None
                else _rejected_at_door(gateway, scope, refused)
            )
        except ClientDisconnect:
            return  # it never arrived
        except ApiError as error:
            if (
                error.status not in (429, 503) and error.code not in EARLY
            ):  # those are counted as rejections
                gateway.metrics.refused.labels(error.code).inc()
            cut = error.code == "body_too_large"  # before the body's end
            response = (
                Refusal(error) if cut else JSONResponse(error.body(), error.status, error.headers())
            )
            send = stamped(scope, send)
        except Exception:
            log.exception("internal error before a request was queued")
            gateway.metrics.refused.labels("internal_error").inc()
            failure = ApiError(
                500, "internal_error", "internal error of the gateway; its log has the details"
            )
            response = JSONResponse(failure.body(), failure.status)
            send = stamped(scope, send)
        await response(scope, receive, send)

    return call
