"""Reading a streamed answer: bytes in, instants and token counts out. No I/O, no clock.

One event is one chunk of server-sent events. JSON is decoded only where something is to be learnt
from it: the first chunk, the one with a finish reason, the usage. All others are token chunks, and
only their instant counts.
"""

from __future__ import annotations

from typing import Any

import msgspec

from kendall.queueing.measurement.record import shown

MAX_EVENT_BYTES = 1 << 20
NO_FINISH = (b'"finish_reason":null', b'"finish_reason": null')


class StreamError(Exception):
    """The answer is not a stream of completion chunks, or says that it failed."""


class _ChunkDelta(msgspec.Struct):
    role: str | None = None
    content: str | None = None


class _ChunkChoice(msgspec.Struct):
    text: str | None = None
    delta: _ChunkDelta | None = None
    finish_reason: str | None = None

    def brings_token(self) -> bool:
        """Whether this first chunk is a token: a chat's opening one only names the role."""
        if self.delta is None:
            return self.text is not None
        return bool(self.delta.content) or self.delta.role is None

    def brings_text(self) -> bool:
        return bool(self.text or (self.delta and self.delta.content))


class _Timing(msgspec.Struct):
    """The gateway's own fields of the usage."""

    queueing_delay_ms: float | None = None
    service_ms: float | None = None
    batch_size: int | None = None


class _PromptDetails(msgspec.Struct):
    cached_tokens: int | None = None


class _Usage(msgspec.Struct):
    prompt_tokens: int | None = None
    prompt_tokens_details: _PromptDetails | None = None
    completion_tokens: int | None = None
    kendall: _Timing | None = None


class _Chunk(msgspec.Struct):
    choices: list[_ChunkChoice] = []
    usage: _Usage | None = None
    error: Any = None


_decode = msgspec.json.Decoder(_Chunk).decode


class StreamedAnswer:
    """An answer read from a stream: feed it bytes with the instant at which they came.

    `token_times` keeps the instant of every chunk that brings a token; tokens that came together
    share it.
    """

    def __init__(self, *, token_times: bool = False) -> None:
        self.token_at: list[float] | None = [] if token_times else None
        self.first_token_at: float | None = None
        self.last_token_at: float | None = None
        self.finish_reason: str | None = None
        self.prompt_tokens: int | None = None
        self.cached_tokens: int | None = None
        self.output_tokens: int | None = None
        self.queueing_delay: float | None = None
        self.service_time: float | None = None
        self.batch_size: int | None = None
        self.texts: list[str] | None = None  # pieces of the answer, where they are kept
        self.token_chunks = 0
        self.done = False  # [DONE] seen
        self._rest = b""

    @property
    def complete(self) -> bool:
        return self.done or self.finish_reason is not None

    def feed(self, data: bytes, now: float) -> None:
        """More bytes. Raises StreamError; bytes behind `[DONE]` are ignored."""
        buffer = self._rest + data
        if b"\r" in buffer:
            buffer = buffer.replace(b"\r\n", b"\n")
        *events, self._rest = buffer.split(b"\n\n")
        if len(self._rest) > MAX_EVENT_BYTES:
            raise StreamError(
                f"got {len(self._rest)} bytes without the end of an event; expected server-sent "
                "events"
            )
        for event in events:
            if event.startswith(b"data:"):
                self._chunk(event[5:].strip(), now)
            elif event.strip() and not event.startswith((b":", b"event:", b"id:", b"retry:")):
                raise StreamError(f"got {shown(event)}; expected a line that begins with 'data:'")

    def _chunk(self, payload: bytes, now: float) -> None:
        if payload == b"[DONE]":
            self.done = True
        elif (
            self.token_chunks
            and self.texts is None
            and any(mark in payload for mark in NO_FINISH)
            and payload.startswith(b"{")
            and payload.endswith(b"}")
        ):
            self._token(now)
        else:
            self._read(payload, now)

    def _token(self, now: float) -> None:
        self.token_chunks += 1
        self.last_token_at = now
        if self.token_at is not None:
            self.token_at.append(now)

    def _read(self, payload: bytes, now: float) -> None:
        try:
            chunk = _decode(payload)
        except msgspec.MsgspecError as error:
            raise StreamError(
                f"got {shown(payload)}; expected a completion chunk ({error})"
            ) from None
        if chunk.error is not None:
            raise StreamError(error_text(chunk.error))
        for choice in chunk.choices:
            self._choice(choice, now)
        if chunk.usage is not None:
            self._usage(chunk.usage)

    def _choice(self, choice: _ChunkChoice, now: float) -> None:
        self.finish_reason = choice.finish_reason or self.finish_reason
        if self.texts is not None:
            text = choice.text if choice.delta is None else choice.delta.content
            self.texts.append(text or "")
        first = self.token_chunks == 0 and choice.brings_token()
        # a padded batch's answer ends with an empty chunk, long after its last token
        if first or choice.brings_text() or (self.token_chunks and choice.finish_reason is None):
            self.first_token_at = now if self.first_token_at is None else self.first_token_at
            self._token(now)

    def _usage(self, usage: _Usage) -> None:
        self.prompt_tokens = usage.prompt_tokens
        if usage.prompt_tokens_details is not None:
            self.cached_tokens = usage.prompt_tokens_details.cached_tokens
        self.output_tokens = usage.completion_tokens
        if usage.kendall is not None:
            self.batch_size = usage.kendall.batch_size
            self.queueing_delay = _seconds(usage.kendall.queueing_delay_ms)
            self.service_time = _seconds(usage.kendall.service_ms)


def _seconds(milliseconds: float | None) -> float | None:
    return None if milliseconds is None else milliseconds / 1e3


class _ErrorBody(msgspec.Struct):
    error: Any = None


def read_error(body: bytes) -> tuple[str | None, str]:
    """Code and text of an error answer, whatever its form."""
    try:
        error = msgspec.json.decode(body, type=_ErrorBody).error
    except msgspec.MsgspecError:
        error = None
    if isinstance(error, dict):
        code = error.get("code")
        return (code if isinstance(code, str) else None), error_text(error)
    if error is not None:
        return None, error_text(error)
    return None, " ".join(body[:200].decode(errors="replace").split())  # a page, too, on one line


def error_text(error: object) -> str:
    """One line from an OpenAI-style error object or anything else."""
    if isinstance(error, dict):
        parts = [str(error[key]) for key in ("code", "message") if error.get(key) is not None]
        return ": ".join(parts) or str(error)
    return str(error)
