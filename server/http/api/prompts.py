"""From what a client sends to token ids: texts, token ids and conversations, cut to length where
it is asked for.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

from server.engines.base import Capabilities, InvalidPromptError, PromptReader, PromptTooLongError
from server.http.api.schema import (
    ChatMessage,
    ChatRequest,
    CompletionRequest,
    Generation,
    Templated,
)
from server.runtime.errors import ApiError
from server.runtime.wording import brief

MOST_PROMPTS = 1024  # of one call, as vLLM has it
MOST_PARTS = 8192  # of a conversation
MOST_AT_ONCE = 1 << 16  # characters of prompts before others have their turn
TEXT_PART = {"type", "text"}
PART_HINTS = {
    "cache_control",
    "prompt_cache_breakpoint",
}  # where a prefix may be reused: no answer depends on it
OTHER_PARTS = (
    "image_url",
    "input_image",
    "image_embeds",
    "input_audio",
    "audio_url",
    "video_url",
    "file",
    "refusal",
)


async def encode(
    engine: PromptReader, bounds: Capabilities, call: CompletionRequest | ChatRequest
) -> Sequence[Sequence[int]]:
    """One list of token ids a prompt. Raises ApiError 400, or 501 for parts that are not text."""
    try:
        if isinstance(call, ChatRequest):
            prompts: Sequence[Sequence[int]] = [await chat_tokens(engine, call.messages, call)]
        else:
            prompts = await _texts(engine, call, bounds.vocab_size)
    except InvalidPromptError as error:
        raise refused_prompt(
            error, "messages" if isinstance(call, ChatRequest) else "prompt"
        ) from None
    return (
        prompts
        if call.truncate_prompt_tokens is None
        else [_cut(call, bounds, prompt) for prompt in prompts]
    )


def refused_prompt(error: InvalidPromptError, param: str) -> ApiError:
    """What the client is told."""
    code = "context_length_exceeded" if isinstance(error, PromptTooLongError) else "invalid_prompt"
    return ApiError(400, code, str(error), param=param)


async def _texts(engine: PromptReader, call: CompletionRequest, vocabulary: int) -> list[list[int]]:
    asked = call.prompts()
    if not 0 < len(asked) <= MOST_PROMPTS:
        raise ApiError(
            400,
            "invalid_prompt",
            f"got a list of {len(asked)} prompts; expected 1 to {MOST_PROMPTS}",
            param="prompt",
        )
    prompts = [prompt for prompt in asked if isinstance(prompt, list)] or await _token_ids(
        engine, asked
    )
    for prompt in prompts:
        if not prompt:
            raise ApiError(
                400,
                "invalid_prompt",
                "got an empty prompt; expected at least one token",
                param="prompt",
            )
        if min(prompt) < 0 or max(prompt) >= vocabulary:
            raise ApiError(
                400,
                "invalid_prompt",
                f"got a token id outside the vocabulary of {vocabulary}",
                param="prompt",
            )
    return prompts


async def _token_ids(engine: PromptReader, prompts: Sequence[str | list[int]]) -> list[list[int]]:
    """Of each; others have their turn in between: an engine may tokenise short texts on the
    event loop.
    """
    found, characters = [], 0
    for prompt in prompts:
        if isinstance(prompt, list):
            found.append(prompt)
            continue
        found.append(await engine.encode(prompt))
        characters += len(prompt)
        if characters > MOST_AT_ONCE:
            characters = 0
            await asyncio.sleep(0)
    return found


async def chat_tokens(
    engine: PromptReader, messages: Sequence[ChatMessage], call: Templated
) -> list[int]:
    """Of a conversation. Raises ApiError, InvalidPromptError."""
    given = call.chat_template_kwargs or {}
    if "chat_template" in given:  # a program of the client's, run here
        raise ApiError(
            501,
            "unsupported",
            "got chat_template, which this gateway does not support; leave it out",
            param="chat_template_kwargs",
        )
    arguments = {"add_generation_prompt": call.add_generation_prompt} | given
    if call.continue_final_message:
        arguments["continue_final_message"] = True
    return await engine.encode_chat(conversation(messages), arguments)


def conversation(messages: Sequence[ChatMessage]) -> list[dict[str, Any]]:
    """The messages as chat templates take them. Raises ApiError for parts that are not text, or
    too many.
    """
    count = sum(len(message.content) for message in messages if isinstance(message.content, list))
    if count > MOST_PARTS:
        raise ApiError(
            400,
            "invalid_request",
            f"got messages of {count} parts; expected at most {MOST_PARTS} in all",
            param="messages",
        )
    for place, message in enumerate(messages):
        parts = message.content if isinstance(message.content, list) else []
        for number, part in enumerate(parts):
            where = f"messages[{place}].content[{number}]"
            if part.get("type") in OTHER_PARTS:
                raise ApiError(
                    501,
                    "unsupported",
                    f"{where}: only parts of type text are supported",
                    param=where,
                )
            if part.get("type") != "text" or not isinstance(part.get("text"), str):
                raise ApiError(
                    400, "invalid_request", f"{where}: expected type text and a text", param=where
                )
            if other := sorted(part.keys() - TEXT_PART - PART_HINTS):
                raise ApiError(
                    400,
                    "unknown_field",
                    f"{where}: got {brief(repr(other[0]))}; expected type and text alone",
                    param=where,
                )
    return [message.model_dump(exclude_none=True) for message in messages]


def _cut(call: Generation, bounds: Capabilities, prompt: Sequence[int]) -> Sequence[int]:
    """The newest tokens stay, unless the right side is to go."""
    most = call.truncate_prompt_tokens
    if most is None or most < 0:
        most = bounds.max_model_len - (call.client_limit() or 1)
    if most < 1:
        raise ApiError(
            400,
            "invalid_prompt",
            "truncate_prompt_tokens leaves nothing of the prompt; expected -1 or more than 0",
            param="prompt",
        )
    return prompt[:most] if call.truncation_side == "right" else prompt[-most:]
