"""From a call to the sequences that it asks for: prompts tokenised, limits applied, one per
prompt and choice.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

from msgspec import Struct
from msgspec.structs import replace

from policies import Request
from server.engines.base import Capabilities, EngineRequest, Sampling
from server.gateway import Gateway
from server.http.api.limits import check_prompt
from server.http.api.prompts import encode
from server.http.api.sampling import check_sampling, sampling_of
from server.http.api.schema import ChatRequest, CompletionRequest, Generation
from server.runtime.errors import ApiError

if TYPE_CHECKING:
    from server.telemetry.tracing import CallTrace


class Arrival(Struct, frozen=True):
    """One call as it came in, before anything is made of it."""

    call_id: str
    own_id: str | None  # the caller's name for it
    at: float  # validated: time limits and delays count from here
    received_at: float  # its last byte
    retry: bool
    caller: str
    flow: str  # whom its service counts to
    reserved_tokens: int  # of each answer, for which memory is kept free
    headers: Sequence[tuple[bytes, bytes]]  # that say how it is to be served
    trace: CallTrace | None = None  # where calls are traced


async def engine_requests_of(
    gateway: Gateway,
    call: CompletionRequest | ChatRequest,
    arrival: Arrival,
    patience: float | None,
) -> list[EngineRequest]:
    """Raises ApiError: a prompt or a limit beyond what is served, a form that the engine
    refuses.
    """
    bounds = gateway.batcher.capabilities
    prompts = await encode(gateway.tokenizer, bounds, call)
    deadline = math.inf if patience is None else arrival.at + patience
    requests: list[EngineRequest] = []
    shared: Sampling | None = None  # by the sequences of one limit: its lists may be long
    for prompt in prompts:
        asked = _asked(gateway, bounds, call, len(prompt))
        limit = _least(gateway.limits.max_output_tokens, asked)
        if shared is None:
            shared = sampling_of(call, limit, call.seed, bounds.sampling)
        elif limit != shared.max_tokens:
            shared = replace(shared, max_tokens=limit)
        requests += _choices(
            call, arrival, prompt, shared, deadline, asked=asked, first=len(requests)
        )
    checked = await check_sampling(
        gateway.tokenizer, requests[0].sampling, call, arrival.caller
    )  # the others differ in limit and seed only
    if checked is requests[0].sampling:
        return requests
    return [
        with_form(engine_request, checked, gateway.now(), patience) for engine_request in requests
    ]


def _choices(
    call: CompletionRequest | ChatRequest,
    arrival: Arrival,
    prompt: Sequence[int],
    shared: Sampling,
    deadline: float,
    *,
    asked: int,
    first: int,
) -> list[EngineRequest]:
    """The sequences of one prompt; `asked`: tokens without the gateway's limit; `first`: how many
    the call has before them.
    """
    requests, seed = [], call.seed
    for choice in range(call.n):
        request = Request(
            id=f"{arrival.call_id}-{first + choice}",
            arrived_at=arrival.at,
            prompt_tokens=len(prompt),
            max_output_tokens=shared.max_tokens,
            predicted_output_tokens=call.predicted_output_tokens,
            priority=call.priority,
            deadline=deadline,
            flow=arrival.flow,
            reserved_tokens=arrival.reserved_tokens,
        )
        sampling = shared if seed is None or not choice else replace(shared, seed=seed + choice)
        requests.append(
            EngineRequest(
                request,
                prompt,
                sampling,
                call.kendall_forced_output_tokens,
                (),
                arrival.own_id,
                arrival.received_at,
                arrival.retry,
                call.cache_salt,
                arrival.caller,
                trace=arrival.trace,
                asked_output_tokens=asked,
            )
        )
    return requests


def with_form(
    engine_request: EngineRequest, checked: Sampling, now: float, patience: float | None
) -> EngineRequest:
    """It arrives when its form is compiled: that is a part of its validation, not of its wait."""
    request = engine_request.request._replace(
        arrived_at=now,
        deadline=math.inf if patience is None else now + patience,
    )
    return replace(
        engine_request,
        request=request,
        sampling=replace(engine_request.sampling, structured=checked.structured),
    )


def room_of(gateway: Gateway, bounds: Capabilities, prompt_tokens: int) -> int:
    """Tokens that the context has left behind a prompt. Raises ApiError 400."""
    if prompt_tokens > (longest := bounds.longest_prompt):
        raise ApiError(
            400,
            "context_length_exceeded",
            (f"got a prompt of {prompt_tokens} tokens; expected at most {longest}: shorten it"),
            param="prompt",
        )
    check_prompt(prompt_tokens, gateway.settings.security.max_prompt_tokens)
    return bounds.largest_context - prompt_tokens


def _asked(gateway: Gateway, bounds: Capabilities, call: Generation, prompt_tokens: int) -> int:
    """The client's own limit, or what the context has left. Raises ApiError 400."""
    room = room_of(gateway, bounds, prompt_tokens)
    own = call.client_limit()
    if own is not None and own > room:
        raise ApiError(
            400,
            "context_length_exceeded",
            f"got max_tokens={own} with a prompt of {prompt_tokens} tokens; "
            f"expected at most {room}, the model's context is "
            f"{bounds.max_model_len}",
            param="max_tokens",
        )
    return _least(own, room)


def _least(limit: int | None, bound: int) -> int:
    return bound if limit is None or limit > bound else limit
