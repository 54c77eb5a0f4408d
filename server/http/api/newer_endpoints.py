"""Which calls are answered by vLLM's serving objects, and the fields that they may have."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from pydantic_core import to_json
from starlette.responses import Response

from kendall.server.admission.limits_in_force import Tokens
from kendall.server.http.api.answers import ErrorAnswer, MessagesErrorAnswer
from kendall.server.http.api.openapi import ANSWERING, errors, fields
from kendall.server.http.api.parameters import CALL_HEADERS
from kendall.server.http.api.schema import ChatRequest, CompletionRequest, Generation
from kendall.server.http.api.unserved import UNSERVED
from kendall.server.openai_tools.endpoints import CHAT, MESSAGES, RESPONSES, ApiEndpoint
from kendall.server.openai_tools.serving_objects import ServingObjects
from kendall.server.runtime.errors import ApiError

# of the two endpoints that the gateway answers itself: where one of these says something, vLLM does
BEYOND: dict[type[Generation], frozenset[str]] = {
    ChatRequest: frozenset(
        {
            *("tools", "tool_choice", "parallel_tool_calls"),
            *("reasoning_effort", "include_reasoning", "thinking_token_budget"),
            *("echo", "prompt_logprobs", "documents", "add_special_tokens"),
            "return_tokens_as_token_ids",
        }
    ),
    CompletionRequest: frozenset(
        {
            *("echo", "suffix", "prompt_logprobs", "add_special_tokens"),
            "return_tokens_as_token_ids",
        }
    ),
}
FORCED = "kendall_forced_output_tokens"  # with --allow-forced-lengths, for measurements
OWN = frozenset(  # fields of Kendall's, on every endpoint
    {
        *("patience", "request_timeout", "first_token_timeout", "priority"),
        *("predicted_output_tokens", "request_id", FORCED),
    }
)
MOST_TOOLS, MOST_TOOL_BYTES = 1024, 1 << 20  # of a call
TOOL_TYPES = frozenset({"function", "custom", "namespace"})  # others are run by a server


class NewerRequest(Generation):
    """A call to an endpoint that only vLLM's serving objects answer: what the gateway itself reads
    of it. The rest is looked at by vLLM.
    """

    required: ClassVar[tuple[str, ...]] = ("model", "messages")
    served: ClassVar[frozenset[str]]
    # each with the values that ask for nothing
    unserved: ClassVar[Mapping[str, tuple[Any, ...]]]

    @property
    def formless(self) -> bool:
        """Its tools may be a form."""
        return False

    @property
    def wanted_logprobs(self) -> int | None:
        """vLLM says."""
        return None


class ResponsesRequest(NewerRequest):
    """`POST /v1/responses`."""

    endpoint: ClassVar[ApiEndpoint] = RESPONSES
    required: ClassVar[tuple[str, ...]] = ("model", "input")
    served: ClassVar[frozenset[str]] = frozenset(
        {
            *("model", "input", "instructions", "stream", "store", "include", "metadata", "user"),
            *("max_output_tokens", "temperature", "top_p", "top_logprobs", "text", "truncation"),
            *("tools", "tool_choice", "parallel_tool_calls", "reasoning", "include_reasoning"),
            *("previous_response_id", "prompt_cache_key"),
            *("top_k", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty"),
            *("seed", "stop", "stop_token_ids", "ignore_eos", "logit_bias", "skip_special_tokens"),
            *("include_stop_str_in_output", "structured_outputs", "chat_template_kwargs"),
            *("cache_salt", "session_id"),
        }
    )
    unserved: ClassVar[Mapping[str, tuple[Any, ...]]] = {
        "background": (False,),
        "context_management": (),
        "conversation": (),
        "enable_response_messages": (False,),
        "max_tool_calls": (),
        "previous_input_messages": (),
        "prompt": (),
        "service_tier": ("auto", "default"),
        "stream_options": (),
    }
    max_output_tokens: Tokens | None = None
    previous_response_id: str | None = None

    @property
    def client_limit(self) -> int | None:
        """Under OpenAI's newest name."""
        return self.max_output_tokens


class MessagesRequest(NewerRequest):
    """`POST /v1/messages`."""

    endpoint: ClassVar[ApiEndpoint] = MESSAGES
    required: ClassVar[tuple[str, ...]] = ("model", "messages", "max_tokens")
    served: ClassVar[frozenset[str]] = frozenset(
        {
            *("model", "messages", "system", "max_tokens", "stream", "metadata", "stop_sequences"),
            *("temperature", "top_k", "top_p", "tools", "tool_choice", "thinking"),
            *("output_config", "cache_salt", "chat_template_kwargs"),
        }
    )
    unserved: ClassVar[Mapping[str, tuple[Any, ...]]] = {
        "container": (),
        "context_management": (),
        "inference_geo": (),
        "mcp_servers": ([],),
        "service_tier": ("auto", "standard_only"),
        "speed": ("standard",),
    }


Call = CompletionRequest | ChatRequest | NewerRequest


def described(model: type[NewerRequest], *, streams: bool = True) -> dict[str, Any]:
    """FastAPI's arguments for its route, which `/openapi.json` shows."""
    media: dict[str, Any] = {"application/json": {"schema": {"type": "object"}}}
    if streams:
        media["text/event-stream"] = {}
    shape = MessagesErrorAnswer if model.endpoint.dialect == "anthropic" else ErrorAnswer
    asked = fields((model.served | OWN) - {FORCED}, model.required) | {"parameters": CALL_HEADERS}
    good = {200: {"description": "As vLLM answers.", "content": media}}
    return {
        "name": model.endpoint.name,
        "description": "Answered by vLLM's serving objects: its fields, its answer.",
        "response_class": Response,
        "responses": good | errors(*ANSWERING, model=shape),
        "openapi_extra": asked,
    }


def served_by_vllm(objects: ServingObjects, call: Call) -> ApiEndpoint | None:
    """The endpoint of vLLM that answers it; None where the gateway itself does."""
    if isinstance(call, NewerRequest):
        return call.endpoint
    extra = call.model_extra or {}
    for name in BEYOND[type(call)].intersection(extra):
        harmless = [
            None,
            *UNSERVED[name],
            *([call.harmless[name]] if name in call.harmless else ()),
        ]
        value = extra[name]
        if not any(type(value) is type(other) and value == other for other in harmless):
            return call.endpoint
    if not isinstance(call, ChatRequest):
        return None
    parts = objects.takes_parts and any(
        part.get("type") != "text"
        for message in call.messages
        if isinstance(message.content, list)
        for part in message.content
    )
    return CHAT if objects.every_chat or parts else None


def check_tools(tools: Any) -> None:
    """Raises ApiError: 501 for a tool that a server would have to run, 400 for too many."""
    if isinstance(tools, list) and tools:
        size = len(to_json(tools)) if len(tools) <= MOST_TOOLS else 0
        got = f"{len(tools)} tools" if not size else f"tools of {size} bytes"
        if not size or size > MOST_TOOL_BYTES:
            message = (
                f"got {got}; expected at most {MOST_TOOLS} tools of {MOST_TOOL_BYTES} bytes "
                "together: leave out those that this call does not need"
            )
            raise ApiError(400, "invalid_request", message, param="tools")
    for place, tool in enumerate(tools if isinstance(tools, list) else ()):
        kind = tool.get("type") if isinstance(tool, dict) else None
        if isinstance(kind, str) and kind not in TOOL_TYPES:
            where = f"tools[{place}].type"
            raise ApiError(
                501,
                "unsupported",
                f"{where}: got {kind}, which this gateway does not run; expected function",
                param=where,
            )
