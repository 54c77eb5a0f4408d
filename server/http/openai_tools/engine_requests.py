"""From a call to the sequences that vLLM asks for: parsed and rendered by its serving objects, then
admitted and queued as any other.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any

from pydantic_core import from_json

from kendall.server.engines.base import EngineRequest
from kendall.server.gateway import Gateway
from kendall.server.http.api.checked_call import (
    Arrival,
    check_form_size,
    conversation,
    room_of,
    with_sampling_checked,
)
from kendall.server.http.api.newer_endpoints import (
    BEYOND,
    OWN,
    Call,
    NewerRequest,
    check_tools,
    served_by_vllm,
)
from kendall.server.http.api.schema import ChatRequest
from kendall.server.http.bodies import AT_ONCE
from kendall.server.openai_tools.apart import Apart
from kendall.server.openai_tools.call import VllmCall
from kendall.server.openai_tools.endpoints import ApiEndpoint, Dialect
from kendall.server.openai_tools.sampling import sampling_of
from kendall.server.openai_tools.serving_objects import ServingObjects
from kendall.server.runtime.errors import ApiError

REASONING = ("reasoning_ended", "reasoning_parser_kwargs")  # arguments of the engine's own call
RENDERED = ("multimodal",)  # prompts that are more than their token ids
GUIDED = ("guided_json", "guided_regex", "guided_choice", "guided_grammar")
# a call beyond either is rendered in a thread: 30 ms of the event loop
LARGE_BYTES, LARGE_OBJECTS = 1 << 14, 64


class VllmRequests:
    """One call that vLLM's serving objects answer. `close` ends it, wherever it is."""

    def __init__(self, gateway: Gateway, call: Call, endpoint: ApiEndpoint, body: bytes) -> None:
        self.endpoint = endpoint
        self.call: VllmCall | None = None
        self.beyond = BEYOND.get(type(call), frozenset())  # fields that are served here
        self._gateway = gateway
        self._asked = call
        self._body = body

    def close(self) -> None:
        """vLLM is asked for nothing more."""
        if self.call is not None:
            self.call.close()

    def for_answer(self) -> tuple[VllmCall, Dialect]:
        """The call that writes the answer, and the dialect of its errors."""
        assert self.call is not None
        return self.call, self.endpoint.dialect

    async def requests(self, arrival: Arrival, patience: float | None) -> list[EngineRequest]:
        """Its sequences. Raises ApiError where vLLM or a limit refuses it."""
        gateway, call = self._gateway, self._asked
        if isinstance(call, ChatRequest) and not _objects(gateway).takes_parts:
            conversation(call.messages)
        large = len(self._body) > AT_ONCE  # it is known to be JSON of a bounded number of values
        sent = await asyncio.to_thread(from_json, self._body) if large else from_json(self._body)
        # vLLM puts the prefixes of the two older endpoints before an id by itself
        prefix, _, digits = arrival.call_id.partition("-")
        name = digits if self.endpoint.dialect == "openai" else f"{prefix}_{digits}"
        body = _body_for_vllm(call, sent) | {"request_id": name}
        apart = apart_of(_objects(gateway), self.endpoint, self._body, arrival.caller)
        await gateway.supervisor.across_restarts(lambda: self._reach(body, apart))
        assert self.call is not None
        plain = (await _objects(gateway).serving()).plain
        bounds, limit = gateway.batcher.capabilities, gateway.limits.max_output_tokens
        requests: list[EngineRequest] = []
        for asked in self.call.asked:
            kind = asked.prompt["type"]
            if kind not in ("token", *RENDERED):
                raise ApiError(501, "unsupported", "got a prompt without token ids; expected text")
            ids: list[int] = asked.prompt["prompt_token_ids"]
            room, own = room_of(gateway, bounds, len(ids)), asked.params.max_tokens
            most = room if own is None else min(own, room)
            given = {name: asked.arguments.get(name) for name in REASONING}
            reasoning = {name: value for name, value in given.items() if value is not None}
            requests += arrival.choices(
                call,
                ids,
                sampling_of(asked.params, plain, most if limit is None else min(most, limit)),
                n=asked.params.n,
                first=len(requests),
                asked=most,
                patience=patience,
                rendered=asked.prompt if kind in RENDERED else None,
                engine_arguments=reasoning or None,
            )
        if not requests:
            raise ApiError(500, "internal_error", "vLLM asked for no sequence of this call")
        largest = gateway.settings.security.max_form_bytes
        check_form_size(requests[0].sampling.structured, largest, "tools")
        return await with_sampling_checked(gateway, requests, call, arrival, patience)

    async def _reach(self, body: Mapping[str, Any], apart: Apart | None) -> None:
        self.close()
        self.call = VllmCall(await _objects(self._gateway).serving(), self.endpoint, body)
        await self.call.reach(apart)


def apart_of(
    objects: ServingObjects, endpoint: ApiEndpoint, body: bytes, caller: str
) -> Apart | None:
    """Where a call is rendered that would hold the event loop; None where it is small. Prompts of
    completions are tokenised in threads of vLLM's own, and several are read at once.
    """
    small = len(body) <= LARGE_BYTES and body.count(b"{") <= LARGE_OBJECTS
    return None if small or endpoint.name == "completions" else Apart(objects.large_calls, caller)


def vllm_requests_of(gateway: Gateway, call: Call, body: bytes) -> VllmRequests | None:
    """None where the gateway answers itself."""
    endpoint = served_by_vllm(_objects(gateway), call)
    return None if endpoint is None else VllmRequests(gateway, call, endpoint, body)


def _objects(gateway: Gateway) -> ServingObjects:
    assert gateway.serving_objects is not None
    return gateway.serving_objects


def _body_for_vllm(call: Call, body: dict[str, Any]) -> dict[str, Any]:
    """What the client sent, without the fields that are Kendall's and those that say nothing.
    Raises ApiError 501 for a tool that a server would run.
    """
    check_tools(body.get("tools"))
    kept = {
        name: value
        for name, value in body.items()
        if value is not None and name not in OWN and name not in GUIDED
    }
    if not kept.get("tools"):  # vLLM refuses an empty list
        kept.pop("tools", None)
        if kept.get("tool_choice") in ("none", "auto"):
            del kept["tool_choice"]
    form = None if isinstance(call, NewerRequest) else call.form()
    if form is not None and call.form_field() in GUIDED:
        kept["structured_outputs"] = {form.kind: form.value, **form.options}
    return kept
