"""From a checked call to its answer. Plain ASGI, for the two routes that carry answers."""

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

from kendall.server.admission.rejections import EARLY
from kendall.server.gateway import Gateway
from kendall.server.http.answer import GeneratedAnswer
from kendall.server.http.api.checked_call import check_call, is_retry
from kendall.server.http.api.newer_endpoints import Call
from kendall.server.http.api.schema import ChatRequest
from kendall.server.http.formats import ChatFormat, CompletionFormat
from kendall.server.http.headers import asked_id, stamped
from kendall.server.http.openai_tools.answer import VllmAnswer, VllmQueueStream
from kendall.server.http.openai_tools.engine_requests import vllm_requests_of
from kendall.server.http.queue_stream import QueueStream
from kendall.server.http.submitted import AnswerOptions
from kendall.server.openai_tools.endpoints import Dialect, error_body
from kendall.server.runtime.errors import ApiError
from kendall.server.security.early_answer import LEASE, RejectionResponse

log = logging.getLogger("kendall")


async def answer(
    gateway: Gateway, scope: Scope, receive: Receive, model: type[Call]
) -> GeneratedAnswer:
    """The call's answer, its sequences not yet submitted: one that speaks while it waits, where
    that was asked for. Raises ApiError.
    """
    checked = await check_call(gateway, scope, receive, model, vllm_requests_of)
    call, arrival, requests = checked.call, checked.arrival, checked.requests
    streaming = call.stream_options
    usage = streaming is not None and streaming.include_usage
    options = AnswerOptions(
        request_id=arrival.name,
        arrived_at=arrival.at,
        stream=call.stream,
        include_usage=usage,
        continuous_usage=usage and streaming is not None and streaming.continuous_usage_stats,
        n=call.n,
        failure=gateway.overload.rejections.failure,
        timeouts=checked.timeouts,
    )
    speaking: dict[str, Any] = {}
    interval, places = gateway.settings.overload.sse_keep_alive_interval, gateway.overload.places
    if call.stream and (interval or places is not None):
        speaking = {"places": places, "keep_alive": interval or math.inf}
    made: GeneratedAnswer
    if checked.by_vllm is not None:
        options.error_body = partial(error_body, checked.by_vllm.endpoint.dialect)
        of_vllm = VllmQueueStream if speaking else VllmAnswer
        made = of_vllm(
            gateway.batcher, requests, *checked.by_vllm.for_answer(), options, **speaking
        )
    else:
        form = (ChatFormat if isinstance(call, ChatRequest) else CompletionFormat)(
            arrival.call_id,
            int(time.time()),  # noqa: TID251 - a date, not a clock
            gateway.settings.served_model_name,  # the first one, as vLLM has it
            requests[0].sampling.logprobs,
            token_ids=call.return_token_ids,
        )
        made = (QueueStream if speaking else GeneratedAnswer)(
            gateway.batcher, requests, form, options, **speaking
        )
    made.timing = checked.timing
    return made


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
            response: Response
            if rejection is None:
                response = await answered(scope, receive)
            else:
                headers = scope["headers"]
                name, retry = asked_id(headers), is_retry(headers)
                call_id = overload.rejections.record_at_precheck(rejection, name, retry=retry)
                body = error_body(dialect, rejection)
                response = RejectionResponse(rejection, name or call_id, body)
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
