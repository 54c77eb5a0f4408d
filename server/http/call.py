"""From the bytes of a call to its answer: read, validated, admitted, submitted. Plain ASGI, for
the two routes that carry answers.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any

from starlette.requests import ClientDisconnect
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from server.admission.control import caller_of
from server.admission.rejections import EARLY
from server.admission.request_deadlines import RequestDeadlines
from server.engines.base import EngineRequest
from server.front.endpoints import Dialect, error_body
from server.gateway import Gateway
from server.http.answer import Answer
from server.http.api.engine_requests import Arrival, engine_requests_of
from server.http.api.limits import check_answer_size, check_fields, check_size
from server.http.api.schema import ChatRequest, CompletionRequest
from server.http.api.validation import read_body, validate
from server.http.arrival_timestamps import RECEIVED_AT
from server.http.bodies import parsed
from server.http.client_connection import while_connected
from server.http.formats import ChatFormat, CompletionFormat
from server.http.front.answer import FrontAnswer, FrontQueueStream
from server.http.front.fields import Call, NewerRequest, check_newer, endpoint_of
from server.http.front.making import Front, front_of
from server.http.headers import asked_id, flow_of, stamped
from server.http.queue_stream import QueueStream
from server.http.submitted import AnswerOptions
from server.live.arrivals_seen import is_retry
from server.runtime.errors import ApiError
from server.runtime.logs import log_prompt
from server.security.early_answer import LEASE, RejectionResponse
from server.supervision.deadlines import Timeouts, timeouts_of

log = logging.getLogger("kendall")
# how the name of every header begins that says how a call is to be served: one look in place of one
# for each
READ = b"x-"


async def answer(gateway: Gateway, scope: Scope, receive: Receive, model: type[Call]) -> Answer:
    """The call's answer, its sequences not yet submitted. Raises ApiError."""
    body = await read_body(receive, gateway.settings.security.max_body_bytes)
    timing = gateway.metrics.own_time.begin(gateway.now) if gateway.lifecycle.ready else None
    call = await parsed(body, lambda text: validate(text, model), gateway.context)
    sequences = check_size(gateway.settings.overload, call)
    if timing is not None:
        timing.end("parse")
    arrival = _arrival(gateway, scope, call)
    front = front_of(gateway, call, body)
    try:
        batcher = gateway.admit()
        deadlines, timeouts = _checked(gateway, call, arrival, len(body), front)
        if front is None:
            # `front_of` has taken the calls to the newer endpoints
            making = engine_requests_of(gateway, call, arrival, deadlines.patience)  # type: ignore[arg-type]
        else:
            making = front.requests(arrival, deadlines.patience)
        waits = front is not None or not call.formless
        waiting = while_connected(scope, receive, making) if waits else making
        requests = await (waiting if timeouts is None else timeouts.bound(waiting, arrival.at))
        gateway.rejected_prompts.check(requests)
        check_answer_size(requests, batcher.capabilities.max_model_len)
        if timing is not None:
            timing.end("prompt")
        gateway.arrivals.saw(arrival.received_at, batcher.epoch, retry=arrival.retry)
        gateway.overload.admit(requests, scope, deadlines)
    except BaseException as error:
        if front is not None:
            front.close()
        _broke_off(gateway, error, arrival, sequences)
        raise
    made = _answer_to(call, gateway, requests, arrival, timeouts, front=front)
    made.timing = timing
    return made


def _checked(
    gateway: Gateway, call: Call, arrival: Arrival, size: int, front: Front | None
) -> tuple[RequestDeadlines, Timeouts | None]:
    """What the call asks of its wait, once its fields are known to be served. Raises ApiError."""
    if isinstance(call, NewerRequest):
        check_newer(gateway.settings, call)
    else:
        check_fields(gateway.settings, call, size, frozenset() if front is None else front.beyond)
    if gateway.settings.logs.prompts:
        log_prompt(arrival.own_id or arrival.call_id, _prompt_of(call))
    deadlines = gateway.overload.deadlines_of(arrival.headers, call.patience, call.priority)
    return deadlines, timeouts_of(arrival.headers, call, gateway.settings)


def _arrival(gateway: Gateway, scope: Scope, call: Call) -> Arrival:
    at = gateway.now()
    headers = [header for header in scope["headers"] if header[0].startswith(READ)]
    caller, keys = caller_of(scope), len(gateway.settings.security.api_keys)
    call_id = gateway.call_ids.next(endpoint_of(type(call)).prefix)
    tracing = gateway.tracing
    return Arrival(
        call_id,
        asked_id(headers) or call.request_id,
        at,
        scope.get(RECEIVED_AT, at),
        is_retry(headers),
        caller,
        flow_of(headers, caller, keys),
        gateway.limits.reserved_tokens,
        headers,
        None if tracing is None else tracing.begin(scope["headers"], call_id, scope["path"], at),
    )


def _broke_off(gateway: Gateway, error: BaseException, arrival: Arrival, sequences: int) -> None:
    """It is not queued: its trace ends here, and its record is written where it has one."""
    if arrival.trace is not None:
        arrival.trace.refused(error, gateway.now())
    if not isinstance(error, ApiError) or error.code not in EARLY:
        return
    gateway.overload.rejections.record_unserved(
        error,
        [f"{arrival.call_id}-{place}" for place in range(sequences)],
        arrival.own_id,
        arrived_at=arrival.at,
        received_at=arrival.received_at,
        retry=arrival.retry,
    )


def _answer_to(
    call: Call,
    gateway: Gateway,
    requests: list[EngineRequest],
    arrival: Arrival,
    timeouts: Timeouts | None,
    *,
    front: Front | None,
) -> Answer:
    """One that speaks while it waits, where that was asked for."""
    options = _options_of(call, gateway, arrival, timeouts)
    speaking = _speaking(gateway) if call.stream else {}
    if front is not None:
        options.error_body = partial(error_body, front.endpoint.dialect)
        made = FrontQueueStream if speaking else FrontAnswer
        return made(gateway.batcher, requests, *front.for_answer(), options, **speaking)
    form = (ChatFormat if isinstance(call, ChatRequest) else CompletionFormat)(
        arrival.call_id,
        int(time.time()),  # noqa: TID251 - a date, not a clock
        gateway.settings.served_model_name,  # the first one, as vLLM has it
        requests[0].sampling.logprobs,
        token_ids=call.return_token_ids,
    )
    kind = QueueStream if speaking else Answer
    return kind(gateway.batcher, requests, form, options, **speaking)


def _speaking(gateway: Gateway) -> dict[str, Any]:
    """What a stream says while it waits; nothing where nobody asked for it."""
    interval, places = gateway.settings.overload.sse_keep_alive_interval, gateway.overload.places
    if places is None and not interval:
        return {}
    return {"places": places, "keep_alive": interval or math.inf}


def _options_of(
    call: Call, gateway: Gateway, arrival: Arrival, timeouts: Timeouts | None
) -> AnswerOptions:
    streaming = call.stream_options
    usage = streaming is not None and streaming.include_usage
    return AnswerOptions(
        request_id=arrival.own_id or arrival.call_id,
        arrived_at=arrival.at,
        stream=call.stream,
        include_usage=usage,
        continuous_usage=usage and streaming is not None and streaming.continuous_usage_stats,
        n=call.n,
        failure=gateway.overload.rejections.failure,
        timeouts=timeouts,
    )


def _prompt_of(call: Call) -> object:
    if isinstance(call, ChatRequest):
        return [message.model_dump(exclude_none=True) for message in call.messages]
    if isinstance(call, CompletionRequest):
        return call.prompt
    return call.model_extra


def _rejected_at_precheck(
    gateway: Gateway, scope: Scope, error: ApiError, dialect: Dialect
) -> Response:
    headers = scope["headers"]
    own_id = asked_id(headers)
    call_id = gateway.overload.rejections.record_at_precheck(error, own_id, retry=is_retry(headers))
    return RejectionResponse(error, own_id or call_id, error_body(dialect, error))


def direct(
    gateway: Gateway,
    answered: Callable[[Scope, Receive], Awaitable[Response]],
    dialect: Dialect = "openai",
) -> Callable[[Scope, Receive, Send], Awaitable[None]]:
    """A route as an ASGI application: errors in its endpoint's shape, a bug in one call answered
    with 500 and logged. `answered` makes the answer of one call.
    """

    async def call(scope: Scope, receive: Receive, send: Send) -> None:
        overload = gateway.overload
        try:
            rejection = overload.precheck(scope) if overload.bounded else None
            response: Response = (
                await answered(scope, receive)
                if rejection is None
                else _rejected_at_precheck(gateway, scope, rejection, dialect)
            )
            if (lease := scope.get(LEASE)) is not None:
                lease.end()  # what is left of the body is prompts
        except ClientDisconnect:
            return  # it never arrived
        except ApiError as error:
            response, send = _refused(gateway, error, dialect), stamped(scope, send)
        except Exception:
            log.exception("internal error before a request was queued")
            failure = ApiError(
                500, "internal_error", "internal error of the gateway; its log has the details"
            )
            response, send = _refused(gateway, failure, dialect), stamped(scope, send)
        await response(scope, receive, send)

    return call


def _refused(gateway: Gateway, error: ApiError, dialect: Dialect) -> Response:
    # the others are counted as rejections
    counted = error.status not in (429, 503) and error.code not in EARLY
    if counted or error.code in ("form_budget_exceeded", "too_many_bodies"):
        gateway.metrics.calls.refused.labels(error.code).inc()
    return RejectionResponse(error, body=error_body(dialect, error))
