"""From the bytes of a call to its answer: read, validated, admitted, submitted. Plain ASGI, for
the two routes that carry answers.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Awaitable, Callable

from starlette.requests import ClientDisconnect
from starlette.responses import JSONResponse, Response
from starlette.types import Receive, Scope, Send

from server.admission.control import caller_of
from server.admission.rejections import EARLY
from server.engines.base import EngineRequest
from server.errors import ApiError
from server.gateway import Gateway
from server.http.answer import Answer
from server.http.api.engine_requests import Arrival, engine_requests_of
from server.http.api.limits import check_fields, check_size
from server.http.api.schema import ChatRequest, CompletionRequest
from server.http.api.validation import read_body, validate
from server.http.arrival_timestamps import RECEIVED_AT
from server.http.bodies import AT_ONCE, MOST_VALUES, parsed
from server.http.client_connection import while_connected
from server.http.formats import ChatFormat, CompletionFormat
from server.http.headers import asked_id, flow_of, stamped
from server.http.queue_stream import QueueStream
from server.http.submitted import AnswerOptions
from server.live.arrivals_seen import is_retry
from server.queue.batcher import Batcher
from server.runtime.logs import log_prompt
from server.security.early_answer import RejectionResponse
from server.supervision.deadlines import Timeouts, timeouts_of

log = logging.getLogger("kendall")
# how the name of every header begins that says how a call is to be served: one look in place of one
# for each
READ = b"x-"


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
    sequences = check_size(gateway.settings.overload, call)
    if timing is not None:
        timing.end("parse")
    arrival = _arrival(gateway, scope, call)
    try:
        batcher = gateway.admit()
        check_fields(gateway.settings, call, len(body))
        if gateway.settings.logs.prompts:
            log_prompt(arrival.own_id or arrival.call_id, _prompt_of(call))
        deadlines = gateway.overload.deadlines_of(arrival.headers, call.patience, call.priority)
        timeouts = timeouts_of(arrival.headers, call, gateway.settings)
        making = engine_requests_of(gateway, call, arrival, deadlines.patience)
        waiting = making if call.formless else while_connected(scope, receive, making)
        requests = await (waiting if timeouts is None else timeouts.bound(waiting, arrival.at))
        gateway.rejected_prompts.check(requests)
    except ApiError as error:
        if error.code in EARLY:
            _record_unserved(gateway, error, arrival, sequences)
        raise
    if timing is not None:
        timing.end("prompt")
    gateway.arrivals.saw(arrival.received_at, batcher.epoch, retry=arrival.retry)
    gateway.overload.admit(requests, scope, deadlines)
    made = _answer_to(call, gateway, batcher, requests, arrival, timeouts=timeouts)
    made.timing = timing
    return made


def _arrival(gateway: Gateway, scope: Scope, call: CompletionRequest | ChatRequest) -> Arrival:
    at = gateway.now()
    headers = [header for header in scope["headers"] if header[0].startswith(READ)]
    caller, keys = caller_of(scope), len(gateway.settings.security.api_keys)
    return Arrival(
        gateway.call_ids.next("chatcmpl" if isinstance(call, ChatRequest) else "cmpl"),
        asked_id(headers) or call.request_id,
        at,
        scope.get(RECEIVED_AT, at),
        is_retry(headers),
        caller,
        flow_of(headers, caller, keys),
        headers,
    )


def _record_unserved(gateway: Gateway, error: ApiError, arrival: Arrival, sequences: int) -> None:
    gateway.overload.rejections.record_unserved(
        error,
        [f"{arrival.call_id}-{place}" for place in range(sequences)],
        arrival.own_id,
        arrived_at=arrival.at,
        received_at=arrival.received_at,
        retry=arrival.retry,
    )


def _answer_to(
    call: CompletionRequest | ChatRequest,
    gateway: Gateway,
    batcher: Batcher,
    requests: list[EngineRequest],
    arrival: Arrival,
    *,
    timeouts: Timeouts | None,
) -> Answer:
    """One that speaks while it waits, where that was asked for."""
    streaming = call.stream_options
    usage = streaming is not None and streaming.include_usage
    options = AnswerOptions(
        request_id=arrival.own_id or arrival.call_id,
        arrived_at=arrival.at,
        stream=call.stream,
        include_usage=usage,
        continuous_usage=usage and streaming is not None and streaming.continuous_usage_stats,
        n=call.n,
        client_limit=call.client_limit(),
        failure=gateway.overload.rejections.failure,
        timeouts=timeouts,
    )
    form = (ChatFormat if isinstance(call, ChatRequest) else CompletionFormat)(
        arrival.call_id,
        int(time.time()),  # noqa: TID251 - a date, not a clock
        gateway.settings.served_model_name,  # the first one, as vLLM has it
        requests[0].sampling.logprobs,
        token_ids=call.return_token_ids,
    )
    settings, places = gateway.settings.overload, gateway.overload.places
    if not call.stream or (places is None and not settings.sse_keep_alive_interval):
        return Answer(batcher, requests, form, options)
    keep_alive = settings.sse_keep_alive_interval or math.inf
    return QueueStream(batcher, requests, form, options, places=places, keep_alive=keep_alive)


def _prompt_of(call: CompletionRequest | ChatRequest) -> object:
    if isinstance(call, ChatRequest):
        return [message.model_dump(exclude_none=True) for message in call.messages]
    return call.prompt


def _rejected_at_precheck(gateway: Gateway, scope: Scope, error: ApiError) -> Response:
    headers = scope["headers"]
    own_id = asked_id(headers)
    call_id = gateway.overload.rejections.record_at_precheck(error, own_id, retry=is_retry(headers))
    return RejectionResponse(error, own_id or call_id)


def direct(
    gateway: Gateway, answered: Callable[[Scope, Receive], Awaitable[Response]]
) -> Callable[[Scope, Receive, Send], Awaitable[None]]:
    """A route as an ASGI application: errors in OpenAI's shape, a bug in one call answered
    with 500 and logged. `answered` makes the answer of one call.
    """

    async def call(scope: Scope, receive: Receive, send: Send) -> None:
        overload = gateway.overload
        try:
            rejection = overload.precheck(scope) if overload.bounded else None
            response: Response = (
                await answered(scope, receive)
                if rejection is None
                else _rejected_at_precheck(gateway, scope, rejection)
            )
        except ClientDisconnect:
            return  # it never arrived
        except ApiError as error:
            # the others are counted as rejections
            if error.status not in (429, 503) and error.code not in EARLY:
                gateway.metrics.calls.refused.labels(error.code).inc()
            cut = error.code == "body_too_large"  # before the body's end
            response = (
                RejectionResponse(error)
                if cut
                else JSONResponse(error.body(), error.status, error.headers())
            )
            send = stamped(scope, send)
        except Exception:
            log.exception("internal error before a request was queued")
            gateway.metrics.calls.refused.labels("internal_error").inc()
            failure = ApiError(
                500, "internal_error", "internal error of the gateway; its log has the details"
            )
            response = JSONResponse(failure.body(), failure.status)
            send = stamped(scope, send)
        await response(scope, receive, send)

    return call
