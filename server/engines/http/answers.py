"""What an answer says of itself: its tokens, its end, its usage. Read beside the bytes, which go on
as they are.

    /v1/completions, /v1/chat/completions  a frame is a token of each choice in it; usage where the
                                           client asked for it (`stream_options.include_usage`)
    /v1/responses                          a `...delta` event is a token; the last one has the usage
    /v1/messages                           a `content_block_delta` is a token; `message_delta` has
                                           the usage
    others                                 usage, where there is one

Counted tokens are as right as one token a frame is: a server that is quicker than its reader puts
several into one. Usage, where it comes, replaces them, and an answer that ended at its limit has
that many.
"""

from __future__ import annotations

from typing import Any

import msgspec

from server.engines.passing import Answered

MOST = 10_000_000  # tokens of a call: a count beyond every context is none
LENGTH = {"max_tokens": "length", "max_output_tokens": "length"}  # other words for it


class _Details(msgspec.Struct):
    cached_tokens: int | None = None


class _Usage(msgspec.Struct):
    prompt_tokens_details: _Details | None = None
    input_tokens_details: _Details | None = None  # of /v1/responses
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    input_tokens: int | None = None
    output_tokens: int | None = None

    @property
    def cached(self) -> int:
        details = self.prompt_tokens_details or self.input_tokens_details
        return 0 if details is None else details.cached_tokens or 0


class _Delta(msgspec.Struct):
    role: Any = None
    content: Any = None
    reasoning: Any = None
    reasoning_content: Any = None
    tool_calls: Any = None
    refusal: Any = None
    stop_reason: str | None = None  # of /v1/messages

    @property
    def said(self) -> bool:
        return bool(
            self.content
            or self.reasoning
            or self.reasoning_content
            or self.tool_calls
            or self.refusal
        )


class _Choice(msgspec.Struct):
    finish_reason: str | None = None
    text: str | None = None
    delta: _Delta | None = None

    @property
    def tokens(self) -> int:
        """The opening frame of a chat holds none, nor a last one that only says `length`."""
        delta = self.delta
        if delta is None:
            return 1 if self.text or self.finish_reason != "length" else 0
        if delta.said:
            return 1
        return 0 if delta.role is not None or self.finish_reason == "length" else 1


class _Why(msgspec.Struct):
    reason: str | None = None


class _Response(msgspec.Struct):
    usage: _Usage | None = None
    status: str | None = None
    incomplete_details: _Why | None = None


class _Message(msgspec.Struct):
    usage: _Usage | None = None


class _Frame(msgspec.Struct):
    """An event, or a whole answer, of any of the routes."""

    choices: list[_Choice] = []
    usage: _Usage | None = None
    type: str | None = None
    status: str | None = None
    incomplete_details: _Why | None = None
    stop_reason: str | None = None
    delta: Any = None
    response: _Response | None = None
    message: _Message | str | None = None
    error: Any = None


_decoder = msgspec.json.Decoder(_Frame)


def _read(data: bytes) -> _Frame | None:
    try:
        return _decoder.decode(data)
    except (msgspec.MsgspecError, UnicodeDecodeError):
        return None


class Answer:
    """What is known of one answer so far."""

    def __init__(self) -> None:
        self.tokens = 0  # counted
        self.error = False  # the server reported one in the answer itself
        self._output: int | None = None
        self._prompt: int | None = None
        self._cached = 0
        self._reason: str | None = None
        self._rest = b""  # the beginning of a line

    def feed(self, data: bytes) -> int:
        """Bytes of a stream of events; returns the tokens in those that are whole."""
        lines = (self._rest + data).split(b"\n")
        self._rest = lines.pop()
        before = self.tokens
        for line in lines:
            if line.startswith(b"data:") and (frame := _read(line[5:])) is not None:
                self._take(frame)
                self.tokens += _tokens(frame)
        return self.tokens - before

    def whole(self, body: bytes) -> None:
        """The body of an answer that is no stream."""
        frame = _read(body)
        if frame is not None:
            self._take(frame)
            if self._output is None and self._prompt is not None:
                self._output = 0  # embeddings and scores: nothing was generated

    @property
    def has_usage(self) -> bool:
        """Whether the server counted the tokens itself."""
        return self._output is not None

    @property
    def end(self) -> Answered:
        """How it ended."""
        reason = self._reason or "stop"
        return Answered(LENGTH.get(reason, reason), self._output, self._prompt, self._cached)

    def _take(self, frame: _Frame) -> None:
        told = frame.response or frame
        self.error |= frame.error is not None or frame.type == "error" or told.status == "failed"
        for part in (frame, frame.response, frame.message):
            if part is not None and not isinstance(part, str) and part.usage is not None:
                self._count(part.usage)
        self._end(_reason(frame))

    def _count(self, usage: _Usage) -> None:
        prompt = usage.input_tokens if usage.prompt_tokens is None else usage.prompt_tokens
        output = usage.output_tokens if usage.completion_tokens is None else usage.completion_tokens
        if max(prompt or 0, output or 0) > MOST:
            return
        self._prompt = self._prompt if prompt is None else prompt
        self._output = self._output if output is None else output
        self._cached = min(max(self._cached, usage.cached), self._prompt or 0)

    def _end(self, reason: str | None) -> None:
        """Of several choices, one that was cut says more than one that ended."""
        if reason is not None and self._reason not in ("length", *LENGTH):
            self._reason = reason


def _tokens(frame: _Frame) -> int:
    if frame.choices:
        return sum(choice.tokens for choice in frame.choices)
    kind = frame.type or ""
    return int(
        kind == "content_block_delta" or (kind.startswith("response.") and kind.endswith(".delta"))
    )


def _reason(frame: _Frame) -> str | None:
    """As the route says it."""
    reasons = [choice.finish_reason for choice in frame.choices if choice.finish_reason]
    if reasons:
        return next((reason for reason in reasons if reason == "length"), reasons[-1])
    if frame.stop_reason is not None:
        return frame.stop_reason
    if isinstance(frame.delta, dict) and isinstance(frame.delta.get("stop_reason"), str):
        return str(frame.delta["stop_reason"])
    told = frame.response or frame
    if told.incomplete_details is not None and told.incomplete_details.reason is not None:
        return told.incomplete_details.reason
    return "stop" if told.status == "completed" else None
