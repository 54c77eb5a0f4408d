"""From the bytes of a call to the same bytes at the server behind: read, counted, admitted,
submitted.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

from starlette.responses import Response
from starlette.types import Receive, Scope

from kendall.policies import Request
from kendall.server.engines.base import EngineRequest, Sampling
from kendall.server.engines.proxied import PROMPT_START, ProxiedCall, ProxyingEngine
from kendall.server.gateway import Gateway
from kendall.server.http.api.checked_call import Arrival, check_prompt, check_sequences
from kendall.server.http.bodies import MOST_VALUES, parsed, read_body
from kendall.server.http.client_connection import while_connected
from kendall.server.http.headers import asked_id
from kendall.server.http.proxied.answer import ProxiedAnswer, raw
from kendall.server.http.proxied.endpoints import (
    Fields,
    ProxiedEndpoint,
    model_of,
    number,
    streams,
    whole,
)
from kendall.server.http.submitted import AnswerOptions
from kendall.server.openai_tools.endpoints import dialect_of, error_body
from kendall.server.runtime.errors import ApiError
from kendall.server.runtime.logs import log_prompt
from kendall.server.runtime.passed_headers import named_by, text_of
from kendall.server.supervision.deadlines import Timeouts, timeouts_of

NOT_PASSED = frozenset(
    {
        *("connection", "keep-alive", "proxy-authenticate", "proxy-authorization", "te"),
        *("proxy-connection", "trailer", "transfer-encoding", "upgrade", "expect", "host"),
        *("content-length", "content-type", "accept-encoding", "cookie", "x-request-id"),
        *("authorization", "x-api-key", "api-key"),  # the gateway's keys, not that server's
    }
)
FORWARDED_FOR = "x-forwarded-for"
JSON = "application/json"


class Timed(NamedTuple):
    """Time limits in the call's body, for `timeouts_of`."""

    request_timeout: float | None
    first_token_timeout: float | None


@dataclass(frozen=True, slots=True)
class Incoming:
    """A call as it came in."""

    endpoint: ProxiedEndpoint
    body: bytes
    fields: Fields
    prompt: bytes
    scope: Scope
    arrival: Arrival

    def timeouts(self, gateway: Gateway) -> Timeouts | None:
        """The least limits of headers, body and server. Raises ApiError 400."""
        own = Timed(
            number(self.fields, "request_timeout"), number(self.fields, "first_token_timeout")
        )
        return timeouts_of(self.arrival.headers, own, gateway.settings)

    def engine_request(
        self, gateway: Gateway, tokens: int, patience: float | None
    ) -> EngineRequest:
        """The request to queue, whose prompt has so many tokens, under the limits in force."""
        endpoint, arrival = self.endpoint, self.arrival
        limit = gateway.limits.max_output_tokens
        room = max(1, gateway.batcher.capabilities.max_model_len - tokens)
        own = endpoint.own_limit(self.fields) if endpoint.limits else 1
        asked = room if own is None else max(1, min(own, room))
        request = Request(
            id=f"{arrival.call_id}-0",
            arrived_at=arrival.at,
            prompt_tokens=tokens,
            max_output_tokens=asked if limit is None or not endpoint.limits else min(asked, limit),
            predicted_output_tokens=number(self.fields, "predicted_output_tokens"),
            priority=whole(self.fields, "priority") or 0,
            deadline=math.inf if patience is None else arrival.at + patience,
            flow=arrival.flow,
            sequences=endpoint.sequences(self.fields),
            reserved_tokens=arrival.reserved_tokens,
        )
        call = ProxiedCall(
            endpoint.path,
            self.body,
            passed_headers(self.scope, arrival.name),
            len(self.prompt),
            self.prompt[:PROMPT_START],
            model=model_of(self.fields),
            streams=streams(self.fields),
            under=self._under if endpoint.limits else None,
        )
        return EngineRequest(
            request,
            (),
            Sampling(max_tokens=request.max_output_tokens),
            client_request_id=arrival.own_id,
            received_at=arrival.received_at,
            retry=arrival.retry,
            caller=arrival.caller,
            call=call,
            trace=arrival.trace,
            asked_output_tokens=asked if endpoint.limits else None,
        )

    def _under(self, limit: int | None) -> tuple[bytes, int | None]:
        """Its body with the gateway's limit where that is the smaller one, and the most tokens of
        its answer.
        """
        own = self.endpoint.own_limit(self.fields)
        limits = [each for each in (own, limit) if each is not None]
        most = min(limits) * self.endpoint.sequences(self.fields) if limits else None
        return self.endpoint.clipped(self.body, self.fields, limit), most


async def answer(
    gateway: Gateway, endpoint: ProxiedEndpoint, scope: Scope, receive: Receive
) -> ProxiedAnswer:
    """The call's answer, not yet submitted. Raises ApiError."""
    timing = gateway.metrics.own_time.begin(gateway.now) if gateway.lifecycle.ready else None
    given = await read_body(receive, gateway.settings.security.max_body_bytes)
    context = gateway.batcher.capabilities.max_model_len if gateway.lifecycle.started else 0
    body, fields, asked, prompt = await parsed(given, endpoint.parts, max(MOST_VALUES, 2 * context))
    several = endpoint.several[0][0] if endpoint.several else "n"
    check_sequences(gateway.settings.overload, asked, several)
    arrival = Arrival.of(gateway, scope, "call", endpoint.path)
    if gateway.settings.logs.prompts:
        log_prompt(arrival.name, prompt.decode(errors="replace"))
    if timing is not None:
        timing.end("parse")
    incoming = Incoming(endpoint, body, fields, prompt, scope, arrival)
    try:
        batcher = gateway.admit()
        priority = whole(fields, "priority") or 0
        deadlines = gateway.overload.deadlines_of(
            arrival.headers, number(fields, "patience"), priority
        )
        timeouts = incoming.timeouts(gateway)
        tokens = proxying_engine(gateway).known_prompt_tokens(fields, prompt)
        if tokens is None:  # a server, or a tokenizer, is to say it
            asking = proxying_engine(gateway).prompt_tokens(endpoint.path, fields, prompt)
            counting = while_connected(scope, receive, asking)
            tokens = await (counting if timeouts is None else timeouts.bound(counting, arrival.at))
        check_prompt(tokens, gateway.settings.security.max_prompt_tokens)
        if timing is not None:
            timing.end("prompt")
        engine_request = incoming.engine_request(gateway, tokens, deadlines.patience)
        if gateway.length_predictor is not None:
            (engine_request,) = await gateway.length_predictor.predicted([engine_request])
        gateway.arrivals.saw(arrival.received_at, batcher.epoch, retry=arrival.retry)
        gateway.overload.admit([engine_request], scope, deadlines)
    except BaseException as error:
        arrival.broke_off(gateway, error, 1)
        raise
    options = AnswerOptions(
        request_id=arrival.name,
        arrived_at=arrival.at,
        stream=False,
        include_usage=False,
        continuous_usage=False,
        n=1,
        failure=gateway.overload.rejections.failure,
        timeouts=timeouts,
        error_body=partial(error_body, dialect_of(endpoint.path)),
    )
    made = ProxiedAnswer(batcher, engine_request, options)
    made.timing = timing
    return made


async def relayed(gateway: Gateway, path: str, scope: Scope, receive: Receive) -> Response:
    """The answer to a call that needs no engine. Raises ApiError."""
    body = await read_body(receive, gateway.settings.security.max_body_bytes)
    engine = proxying_engine(gateway)
    gateway.admit()
    name = asked_id(scope["headers"]) or gateway.call_ids.next("call")
    call = ProxiedCall(path, body, passed_headers(scope, name))
    try:
        said = await while_connected(scope, receive, engine.relay(call))
    except OSError:
        raise ApiError(
            503, "engine_unavailable", "the server behind does not answer", retry_after=1
        ) from None
    answer = Response(said.body, said.status)
    own = (b"x-request-id", name.encode()), (b"content-length", b"%d" % len(said.body))
    answer.raw_headers = [*raw(said.headers), *own]
    return answer


def proxying_engine(gateway: Gateway) -> ProxyingEngine:
    """Its engine. Raises TypeError where that is another one."""
    engine = gateway.proxying
    if engine is None:
        got = type(gateway.engine).__name__
        raise TypeError(f"got {got}; expected an engine that passes calls on")
    return engine


def passed_headers(scope: Scope, name: str) -> tuple[tuple[str, str], ...]:
    """Headers for the server behind: the client's own, the call's id, the client's address."""
    given = [(key.decode("latin-1"), text_of(value)) for key, value in scope["headers"]]
    dropped = NOT_PASSED | named_by(given) | {FORWARDED_FOR}
    kept = [header for header in given if header[0] not in dropped]
    before = [value for key, value in given if key == FORWARDED_FOR]
    if (client := scope.get("client")) is not None:
        before.append(client[0])
    forwarded = [(FORWARDED_FOR, ", ".join(before))] if before else []
    return (*kept, *forwarded, ("content-type", JSON), ("x-request-id", name))
