"""`/tokenize` and `/detokenize`, as vLLM has them: what the model sees of a text, and back."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Annotated, Any

from fastapi import FastAPI, Request
from pydantic import BaseModel, ConfigDict, Field

from kendall.server.engines.base import InvalidPromptError
from kendall.server.gateway import Gateway
from kendall.server.http.api.answers import Detokenized, Tokenized
from kendall.server.http.api.checked_call import chat_tokens, check_model, refused_prompt
from kendall.server.http.api.openapi import answers, body
from kendall.server.http.api.schema import (
    MOST_MESSAGES,
    ChatMessage,
    First,
    Flag,
    Templated,
    TokenId,
)
from kendall.server.http.api.validation import check_extra, parse
from kendall.server.http.unqueued import Unqueued
from kendall.server.runtime.errors import ApiError

MOST_AT_ONCE = 256  # tokens that become text, some 20 us each, before others have their turn


class TokenizeRequest(Templated):
    """A text or a conversation."""

    model_config = ConfigDict(extra="allow", strict=True)  # what is left over is refused by name
    model: str | None = None
    prompt: str | None = None
    messages: (
        Annotated[list[ChatMessage], Field(min_length=1, max_length=MOST_MESSAGES), First()] | None
    ) = None
    # where null: to a text, not to a conversation, whose template adds them
    add_special_tokens: bool | None = None
    return_token_strs: Flag = False


class DetokenizeRequest(BaseModel):
    """Token ids."""

    model_config = ConfigDict(extra="forbid", strict=True)
    model: str | None = None
    tokens: Annotated[list[TokenId], First()]


def add_tokenizing(app: FastAPI, gateway: Gateway, unqueued: Unqueued) -> None:
    """The two routes."""

    @app.post(
        "/tokenize",
        responses=answers(Tokenized, 400, 401, 404, 413, 429, 500, 501, 503),
        openapi_extra=body(TokenizeRequest),
    )
    async def tokenize(request: Request) -> dict[str, Any]:
        unqueued.admit(request.scope)
        call = await parse(
            request.receive,
            TokenizeRequest,
            gateway.settings.security.max_body_bytes,
            gateway.context,
        )
        _check_name(gateway, call.model)
        check_extra(gateway.settings, call, why="which /tokenize does not have")
        bound = gateway.batcher.capabilities.max_model_len  # raises before the engine is up
        async with unqueued.turn(request.scope):
            tokens = await _tokens(gateway, call)
            texts = await _texts(gateway, tokens) if call.return_token_strs else None
        return {"count": len(tokens), "max_model_len": bound, "tokens": tokens, "token_strs": texts}

    @app.post(
        "/detokenize",
        responses=answers(Detokenized, 400, 401, 404, 413, 429, 500, 503),
        openapi_extra=body(DetokenizeRequest),
    )
    async def detokenize(request: Request) -> dict[str, str]:
        unqueued.admit(request.scope)
        call = await parse(
            request.receive,
            DetokenizeRequest,
            gateway.settings.security.max_body_bytes,
            gateway.context,
        )
        _check_name(gateway, call.model)
        vocabulary = gateway.batcher.capabilities.vocab_size
        if max(call.tokens, default=0) >= vocabulary:
            raise ApiError(
                400,
                "invalid_prompt",
                f"got a token id outside the vocabulary; expected 0 to {vocabulary - 1}",
                param="tokens",
            )
        async with unqueued.turn(request.scope):
            return {"prompt": await gateway.tokenizer.decode(call.tokens)}


async def _texts(gateway: Gateway, tokens: Sequence[int]) -> list[str]:
    """The text of each token; other tasks run on the event loop in between."""
    texts = []
    for place, token in enumerate(tokens, 1):
        texts.append(await gateway.tokenizer.decode([token]))
        if place % MOST_AT_ONCE == 0:
            await asyncio.sleep(0)
    return texts


def _check_name(gateway: Gateway, name: str | None) -> None:
    if name is not None:
        check_model(gateway.settings, name)


async def _tokens(gateway: Gateway, call: TokenizeRequest) -> list[int]:
    if (call.prompt is None) == (call.messages is None):
        raise ApiError(400, "invalid_request", "expected either prompt or messages", param="prompt")
    try:
        if call.prompt is not None:
            for field in ("chat_template_kwargs", "continue_final_message"):
                if getattr(call, field):
                    raise ApiError(
                        400,
                        "invalid_request",
                        f"got {field} with a prompt; expected it with messages only",
                        param=field,
                    )
            return await gateway.tokenizer.encode(
                call.prompt, special_tokens=call.add_special_tokens is not False
            )
        if call.add_special_tokens:
            raise ApiError(
                501,
                "unsupported",
                "got add_special_tokens for a conversation; leave it out",
                param="add_special_tokens",
            )
        return await chat_tokens(gateway.tokenizer, call.messages or [], call)
    except InvalidPromptError as error:
        raise refused_prompt(error, "prompt" if call.messages is None else "messages") from None
