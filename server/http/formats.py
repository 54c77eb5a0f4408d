"""The bytes of answers: OpenAI's JSON and SSE chunks, each built once."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any

import msgspec

from kendall.server.engines.base import Token, TokenLogprob
from kendall.server.queue.sequence import SequenceState

encode = msgspec.json.encode
DONE = b"data: [DONE]\n\n"


def completion_logprobs(tokens: Sequence[Token], offset: int) -> dict[str, Any] | None:
    """The completions form: parallel lists."""
    if not tokens or tokens[0].logprobs is None:
        return None
    offsets = []
    for token in tokens:
        offsets.append(offset)
        offset += len(token.text)
    return {
        "text_offset": offsets,
        "token_logprobs": [_own(token).logprob for token in tokens],
        "tokens": [_own(token).token for token in tokens],
        "top_logprobs": [{item.token: item.logprob for item in _ranked(token)} for token in tokens],
    }


def chat_logprobs(tokens: Sequence[Token], top: int) -> dict[str, Any] | None:
    """The chat form: one object a token."""
    if not tokens or tokens[0].logprobs is None:
        return None
    return {
        "content": [
            _item(_own(token)) | {"top_logprobs": [_item(item) for item in _ranked(token)[:top]]}
            for token in tokens
        ]
    }


def _item(logprob: TokenLogprob) -> dict[str, Any]:
    return {
        "token": logprob.token,
        "logprob": logprob.logprob,
        "bytes": list(logprob.token.encode()),
    }


def _own(token: Token) -> TokenLogprob:
    assert token.logprobs is not None
    return token.logprobs[token.id]


def _ranked(token: Token) -> list[TokenLogprob]:
    return sorted((token.logprobs or {}).values(), key=lambda item: -item.logprob)


def with_usage(chunk: bytes, usage: Mapping[str, Any]) -> bytes:
    """A chunk with usage at its end."""
    return chunk.removesuffix(b"}\n\n") + b',"usage":' + encode(usage) + b"}\n\n"


def usage_of(
    sequences: Sequence[SequenceState], n: int, delays: tuple[float, float]
) -> dict[str, Any]:
    """Tokens and milliseconds of a call, whose prompts have `n` sequences each; `delays`: queueing
    delay and service.
    """
    prompt = sum([sequence.engine_request.request.prompt_tokens for sequence in sequences[::n]])
    output = sum([sequence.stop_detector.output_tokens for sequence in sequences])
    queue, service = delays
    return {
        "prompt_tokens": prompt,
        "completion_tokens": output,
        "total_tokens": prompt + output,
        "kendall": {
            "queueing_delay_ms": queue,
            "service_ms": service,
            "batch_size": sequences[0].batch_size,
        },
    }


class AnswerFormat(ABC):
    """How one call's answer looks; subclasses name the endpoint's own fields."""

    kind: str
    chunk_kind: str

    def __init__(
        self,
        call_id: str,
        created: int,
        model: str,
        top_logprobs: int | None,
        *,
        token_ids: bool = False,
    ) -> None:
        self.top_logprobs = top_logprobs
        self.token_ids = token_ids
        # a chunk for a token without text, too
        self.every_token = token_ids or top_logprobs is not None
        self._identity = {"id": call_id, "created": created, "model": model}
        self._plain: dict[
            int, bytes
        ] = {}  # by choice: what stands before the text of a chunk with nothing but text

    @cached_property
    def _head(self) -> bytes:
        """Fields of every chunk."""
        return (
            b"data: " + encode({**self._identity, "object": self.chunk_kind})[:-1] + b',"choices":['
        )

    @abstractmethod
    def first(self, index: int, prompt: Sequence[int] | None) -> bytes:
        """What opens a choice's stream; with the prompt's ids where they are asked for."""

    @abstractmethod
    def text(self, index: int, text: str, tokens: Sequence[Token], offset: int) -> bytes:
        """A chunk with more text."""

    @abstractmethod
    def finish(self, index: int, finish_reason: str, stop_reason: str | int | None) -> bytes:
        """The chunk that ends a choice."""

    def usage(self, usage: Mapping[str, Any]) -> bytes:
        """The chunk after the last choice, if asked for."""
        return self._head + b'],"usage":' + encode(usage) + b"}\n\n"

    @abstractmethod
    def logprobs(self, tokens: Sequence[Token], offset: int) -> dict[str, Any] | None:
        """Of some tokens of a choice, each value a list; `offset`: characters before them."""

    @abstractmethod
    def choice(
        self,
        index: int,
        text: str,
        logprobs: msgspec.Raw | None,
        finish_reason: str,
        stop_reason: str | int | None,
    ) -> dict[str, Any]:
        """A whole choice."""

    def _before_text(self, index: int, opening: bytes) -> bytes:
        before = self._plain[index] = b'%b{"index":%d,%b' % (self._head, index, opening)
        return before

    def _ids(self, tokens: Sequence[Token]) -> bytes:
        """The end of a text chunk's choice."""
        return (
            b',"token_ids":%b' % encode([token.id for token in tokens]) if self.token_ids else b""
        )

    def with_ids(
        self, choice: dict[str, Any], tokens: Sequence[Token], prompt: Sequence[int] | None
    ) -> dict[str, Any]:
        """A whole choice with token ids, where they are asked for."""
        return (
            choice
            if prompt is None
            else choice
            | {"token_ids": [token.id for token in tokens], "prompt_token_ids": list(prompt)}
        )

    def whole(self, choices: Sequence[bytes], usage: Mapping[str, Any]) -> bytes:
        """The whole answer, of encoded choices."""
        identity = encode({**self._identity, "object": self.kind})[:-1]
        parts = (identity, b',"choices":[', b",".join(choices), b'],"usage":', encode(usage), b"}")
        return b"".join(parts)


class CompletionFormat(AnswerFormat):
    """`/v1/completions`."""

    kind = chunk_kind = "text_completion"

    def first(self, index: int, prompt: Sequence[int] | None) -> bytes:
        """Nothing, unless the prompt is to be returned."""
        if prompt is None:
            return b""
        choice = {
            "index": index,
            "text": "",
            "logprobs": None,
            "finish_reason": None,
            "prompt_token_ids": list(prompt),
        }
        return b"%b%b]}\n\n" % (self._head, encode(choice))

    def text(self, index: int, text: str, tokens: Sequence[Token], offset: int) -> bytes:
        """A text chunk."""
        if not self.every_token:
            before = self._plain.get(index) or self._before_text(index, b'"text":')
            return (
                before
                + encode(text)
                + b',"logprobs":null,"finish_reason":null,"stop_reason":null}]}\n\n'
            )
        logprobs = (
            encode(completion_logprobs(tokens, offset))
            if self.top_logprobs is not None
            else b"null"
        )
        return (
            b'%b{"index":%d,"text":%b,"logprobs":%b,"finish_reason":null,"stop_reason":null%b}]}\n\n'
            % (
                self._head,
                index,
                encode(text),
                logprobs,
                self._ids(tokens),
            )
        )

    def finish(self, index: int, finish_reason: str, stop_reason: str | int | None) -> bytes:
        """An empty text with the reason."""
        return (
            b'%b{"index":%d,"text":"","logprobs":null,"finish_reason":%b,"stop_reason":%b}]}\n\n'
            % (
                self._head,
                index,
                encode(finish_reason),
                encode(stop_reason),
            )
        )

    def logprobs(self, tokens: Sequence[Token], offset: int) -> dict[str, Any] | None:
        """Parallel lists."""
        return completion_logprobs(tokens, offset)

    def choice(
        self,
        index: int,
        text: str,
        logprobs: msgspec.Raw | None,
        finish_reason: str,
        stop_reason: str | int | None,
    ) -> dict[str, Any]:
        """A whole choice."""
        return {
            "index": index,
            "text": text,
            "logprobs": logprobs,
            "finish_reason": finish_reason,
            "stop_reason": stop_reason,
        }


class ChatFormat(AnswerFormat):
    """`/v1/chat/completions`."""

    kind = "chat.completion"
    chunk_kind = "chat.completion.chunk"

    def first(self, index: int, prompt: Sequence[int] | None) -> bytes:
        """The role."""
        ids = b"" if prompt is None else b',"prompt_token_ids":%b' % encode(list(prompt))
        return (
            b'%b{"index":%d,"delta":{"role":"assistant","content":""},"logprobs":null,"finish_reason":null%b}]}\n\n'
            % (
                self._head,
                index,
                ids,
            )
        )

    def text(self, index: int, text: str, tokens: Sequence[Token], offset: int) -> bytes:
        """A content delta."""
        del offset
        if not self.every_token:
            before = self._plain.get(index) or self._before_text(index, b'"delta":{"content":')
            return before + encode(text) + b'},"logprobs":null,"finish_reason":null}]}\n\n'
        logprobs = (
            encode(chat_logprobs(tokens, self.top_logprobs))
            if self.top_logprobs is not None
            else b"null"
        )
        return (
            b'%b{"index":%d,"delta":{"content":%b},"logprobs":%b,"finish_reason":null%b}]}\n\n'
            % (
                self._head,
                index,
                encode(text),
                logprobs,
                self._ids(tokens),
            )
        )

    def finish(self, index: int, finish_reason: str, stop_reason: str | int | None) -> bytes:
        """An empty delta with the reason."""
        return (
            b'%b{"index":%d,"delta":{},"logprobs":null,"finish_reason":%b,"stop_reason":%b}]}\n\n'
            % (
                self._head,
                index,
                encode(finish_reason),
                encode(stop_reason),
            )
        )

    def logprobs(self, tokens: Sequence[Token], offset: int) -> dict[str, Any] | None:
        """One object a token."""
        del offset
        return None if self.top_logprobs is None else chat_logprobs(tokens, self.top_logprobs)

    def choice(
        self,
        index: int,
        text: str,
        logprobs: msgspec.Raw | None,
        finish_reason: str,
        stop_reason: str | int | None,
    ) -> dict[str, Any]:
        """A whole choice."""
        message = {"role": "assistant", "content": text, "refusal": None}
        return {
            "index": index,
            "message": message,
            "logprobs": logprobs,
            "finish_reason": finish_reason,
            "stop_reason": stop_reason,
        }
