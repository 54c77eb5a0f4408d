"""vLLM's serving objects for one life of the engine, built by vLLM itself on a bare state: its own
application would add routes that know nothing of the gateway's keys.
"""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Any

from pydantic import ValidationError
from starlette.datastructures import State

from kendall.server.engines.base import Token
from kendall.server.engines.vllm.core import (
    NO_CHAT_TEMPLATE,
    PROMPT_ERRORS,
    lacks_template,
    speaker,
)
from kendall.server.engines.vllm.reader import first_line
from kendall.server.openai_tools import vllm_imports
from kendall.server.openai_tools.call import AskedSequence, SequencePart
from kendall.server.openai_tools.endpoints import ApiEndpoint
from kendall.server.openai_tools.proxy import EngineProxy
from kendall.server.runtime.errors import ApiError
from kendall.server.runtime.wording import place_of
from kendall.server.settings import Settings

vllm_imports.EngineClient.register(EngineProxy)
# a tool call that a limit cut short is no fault of the server's: they log a traceback for each
logging.getLogger("vllm.tool_parsers").setLevel(logging.CRITICAL)
MODELS = {
    "chat": vllm_imports.ChatCompletionRequest,
    "completions": vllm_imports.CompletionRequest,
    "responses": vllm_imports.ResponsesRequest,
    "messages": vllm_imports.AnthropicMessagesRequest,
    "count_tokens": vllm_imports.AnthropicCountTokensRequest,
}
WAYS = {  # on which object, by which method
    "chat": ("openai_serving_chat", "create_chat_completion"),
    "completions": ("openai_serving_completion", "create_completion"),
    "responses": ("openai_serving_responses", "create_responses"),
    "messages": ("anthropic_serving_messages", "create_messages"),
    "count_tokens": ("anthropic_serving_messages", "count_tokens"),
}
CODES = {404: "not_found", 501: "unsupported"}
TOO_LONG = frozenset(
    {"input_text", "input_tokens", "max_tokens", "max_completion_tokens", "max_output_tokens"}
)
STATUSES = frozenset({400, 404, 501})  # that vLLM's words explain to a client
NOT_RENDERED = (
    "the model's chat template cannot render these messages: check their fields, and those of the "
    "tools"
)


class VllmServing:
    """See `server.openai_tools.call.Serving`."""

    def __init__(self, state: State, proxy: EngineProxy) -> None:
        self._state = state
        self._tokenizer = proxy.renderer.tokenizer
        self._error_response = type(state.openai_serving_chat.create_error_response(""))
        self.plain = vllm_imports.SamplingParams()

    @classmethod
    async def build(cls, client: Any, settings: Settings) -> VllmServing:
        """Build them for the engine of this client. Raises KeyError for an unknown parser."""
        state, proxy = State(), EngineProxy(client, vllm_imports.EngineDeadError)
        await vllm_imports.init_app_state(proxy, state, _arguments(client, settings), ("generate",))
        return cls(state, proxy)

    def fields(self, endpoint: ApiEndpoint) -> frozenset[str]:
        """Names that vLLM's model of the body has."""
        fields = MODELS[endpoint.name].model_fields
        return frozenset(field.alias or name for name, field in fields.items())

    def request(self, endpoint: ApiEndpoint, body: Mapping[str, Any]) -> Any:
        """See `Serving`."""
        known = self.fields(endpoint)
        own = {name: value for name, value in body.items() if name in known}
        try:
            return MODELS[endpoint.name].model_validate(own)
        except ValidationError as error:
            first = error.errors(include_url=False, include_context=False)[0]
            where = place_of(first["loc"], body, missing=first["type"] == "missing")
            said = first["msg"].removeprefix("Value error, ")
            raise ApiError(
                400, "invalid_request", f"{where}: {said}" if where else said, param=where or None
            ) from None
        except PROMPT_ERRORS as error:
            raise self.refusal(error, early=True) from None

    async def create(self, endpoint: ApiEndpoint, request: Any) -> bytes | AsyncIterator[str]:
        """See `Serving`."""
        name, way = WAYS[endpoint.name]
        made = await getattr(getattr(self._state, name), way)(request, None)
        if isinstance(made, self._error_response):
            raise _refused(made.error)
        if hasattr(made, "__aiter__"):
            return _events(made) if endpoint.name == "responses" else made
        answer: str = made.model_dump_json(
            by_alias=endpoint.name == "responses", exclude_none=endpoint.dialect == "anthropic"
        )
        return answer.encode()

    def output(self, asked: AskedSequence, parts: Sequence[SequencePart]) -> Any:
        """See `Serving`."""
        logprobs = [part.prompt_logprobs for part in parts if part.prompt_logprobs is not None]
        return vllm_imports.RequestOutput(
            request_id=asked.request_id,
            prompt=asked.prompt.get("prompt"),
            prompt_token_ids=asked.prompt["prompt_token_ids"],
            prompt_logprobs=self._named(logprobs[0]) if logprobs else None,
            outputs=[
                vllm_imports.CompletionOutput(
                    index=part.index,
                    text=part.text,
                    token_ids=[token.id for token in part.tokens],
                    cumulative_logprob=None,
                    logprobs=_logprobs(part.tokens) if asked.params.logprobs is not None else None,
                    finish_reason=part.finish_reason,
                    stop_reason=part.stop_reason,
                )
                for part in parts
            ],
            finished=asked.whole,
        )

    def refusal(self, error: Exception, *, early: bool) -> ApiError:
        """See `Serving`. Templates and renderers raise what Python raises."""
        if isinstance(error, ApiError):
            return error
        if early and lacks_template(error):
            return ApiError(400, "invalid_prompt", NO_CHAT_TEMPLATE, param="messages")
        if early and isinstance(error, PROMPT_ERRORS) and speaker(error) is None:
            return ApiError(400, "invalid_prompt", NOT_RENDERED, param="messages")
        said = self._state.openai_serving_chat.create_error_response(error).error
        if early and int(said.code) in STATUSES:
            said.message = first_line(speaker(error) or error)
        return _refused(said)

    def _named(self, positions: Sequence[Any]) -> list[Any]:
        """The prompt's log probabilities with the texts of their tokens."""
        texts: dict[int, str] = {}
        for position in positions:
            for number, entry in (position or {}).items():
                if number not in texts:
                    texts[number] = str(self._tokenizer.decode([number]))
                entry.decoded_token = texts[number]
        return list(positions)


def _arguments(client: Any, settings: Settings) -> Any:
    """Arguments as `vllm serve` would get them."""
    parser = vllm_imports.make_arg_parser(vllm_imports.FlexibleArgumentParser())
    arguments = parser.parse_args(["--model", str(client.model_config.model)])
    names = [settings.served_model_name, *settings.served_model_aliases]
    arguments.served_model_name = [*names, *settings.own_names]
    arguments.enable_auto_tool_choice = settings.enable_auto_tool_choice
    arguments.tool_call_parser = settings.tool_call_parser
    # else `required` and a named tool allow any JSON as the arguments of a tool that is not strict
    arguments.tool_strict_level = "parameter"
    # only the engine's configuration fills it
    arguments.structured_outputs_config = client.vllm_config.structured_outputs_config
    arguments.fingerprint_mode = "none"  # it tells version and configuration
    return arguments


def _refused(said: Any) -> ApiError:
    status = int(said.code)
    if status >= 500 and status != 501:
        return ApiError(500, "internal_error", "vLLM's API server failed; its log has the details")
    status = status if status in STATUSES else 400
    code = CODES.get(status, "invalid_request")
    if said.param in TOO_LONG and "context" in said.message:
        code = "context_length_exceeded"
    return ApiError(status, code, said.message, param=said.param)


async def _events(made: AsyncIterator[Any]) -> AsyncIterator[str]:
    async for event in made:
        data = event.model_dump_json(by_alias=True)
        yield f"event: {getattr(event, 'type', 'unknown')}\ndata: {data}\n\n"


def _logprobs(tokens: Sequence[Token]) -> list[dict[int, Any]]:
    return [
        {
            number: vllm_imports.Logprob(entry.logprob, entry.rank, entry.token)
            for number, entry in (token.logprobs or {}).items()
        }
        for token in tokens
    ]
