"""What an answer says of itself: its tokens, its end, its usage. Read beside the bytes, which go on
as they are.

    /v1/completions, /v1/chat/completions  a frame is a token of each choice in it; usage where the
                                           client asked for it (`stream_options.include_usage`)
    /v1/responses                          a `...delta` event is a token; the last one has the usage
    /v1/messages                           a `content_block_delta` is a token; `message_delta` has
                                           the usage
    others                                 usage, where there is one

Counted tokens are as right as one token a frame is: a server that is quicker than its reader puts
several into one. Usage, where it comes and can be true, replaces them, and an answer that ended at
its limit has that many.
"""

from __future__ import annotations

import json
import math
from typing import Annotated, Any

import msgspec

from kendall.server.engines.proxied import Answered

MOST = 10_000_000  # tokens of a call: a count beyond every context is none
MOST_LINE = 4 << 20  # bytes of a line of a stream that is read; a longer one only passes
LENGTH = {"max_tokens": "length", "max_output_tokens": "length"}  # other words for it
DONE = b"[DONE]"
LAST = ("message_stop", "response.completed", "response.incomplete", "response.failed")
FIELDS = (b"data:", b"event:", b"id:", b"retry:", b":", b"\r", b"\xef\xbb\xbf")  # of a stream


class _UpstreamDelta(msgspec.Struct):
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


class _UpstreamChoice(msgspec.Struct):
    finish_reason: str | None = None
    text: str | None = None
    delta: _UpstreamDelta | None = None

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
    usage: Any = None
    status: str | None = None
    incomplete_details: _Why | None = None
    model: Any = None


class _Message(msgspec.Struct):
    usage: Any = None
    model: Any = None


class _Frame(msgspec.Struct):
    """An event, or a whole answer, of any of the routes."""

    choices: list[_UpstreamChoice] = []
    usage: Any = None
    type: str | None = None
    status: str | None = None
    incomplete_details: _Why | None = None
    stop_reason: str | None = None
    delta: Any = None
    response: _Response | None = None
    message: _Message | str | None = None
    error: Any = None
    model: Any = None


_decoder = msgspec.json.Decoder(_Frame)


class _Text(msgspec.Struct):
    text: str | None


class _Said(msgspec.Struct):
    message: dict[str, msgspec.Raw]


class _Completion(msgspec.Struct):
    choices: Annotated[list[_Text], msgspec.Meta(min_length=1)]


class _Chat(msgspec.Struct):
    choices: Annotated[list[_Said], msgspec.Meta(min_length=1)]


class _Anthropic(msgspec.Struct):
    content: list[msgspec.Raw]


class _Output(msgspec.Struct):
    output: list[msgspec.Raw]


# what a whole answer of a route cannot do without
_WHOLE: dict[str, msgspec.json.Decoder[Any]] = {
    "/v1/completions": msgspec.json.Decoder(_Completion),
    "/v1/chat/completions": msgspec.json.Decoder(_Chat),
    "/v1/messages": msgspec.json.Decoder(_Anthropic),
    "/v1/responses": msgspec.json.Decoder(_Output),
}
GENERATING = frozenset(_WHOLE)  # routes whose answers are events where a client asks for them


def fits(path: str, body: bytes) -> bool:
    """Whether a whole answer of one of the GENERATING routes has what its clients read. May be
    called in a thread.
    """
    try:
        _WHOLE[path].decode(body)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return False
    return True


class UpstreamAnswer:
    """What is known of one answer so far. It is not believed to have more tokens than `most`, nor
    its prompt more than `most_prompt`.
    """

    def __init__(self, most: int = MOST, most_prompt: int = MOST) -> None:
        self.tokens = 0  # counted
        self.events = 0  # with data that can be read
        self.size = 0  # bytes
        self.error = False  # the server reported one in the answer itself
        self.ended = False  # it said that it is over
        self.readable = True  # as far as it came
        self.model: str | None = None  # that made it, as it says
        self.unbelieved: Any = None  # what it says instead of its tokens
        self._most, self._most_prompt = most, most_prompt
        self._output: int | None = None
        self._prompt: int | None = None
        self._cached = 0
        self._reason: str | None = None
        self._line = bytearray()  # the beginning of one
        self._skips = False  # the rest of a line that is too long

    def feed(self, data: bytes) -> int:
        """Bytes of a stream of events; returns the tokens in those that are whole."""
        self.size += len(data)
        before = self.tokens
        first, *others = data.split(b"\n")
        self._extend(first)
        if others:
            self._read_line(b"" if self._skips else bytes(self._line))
            for line in others[:-1]:
                if line:
                    self._read_line(line)
            self._line.clear()
            self._skips = False
            if rest := others[-1]:
                self._extend(rest)
        return self.tokens - before

    def close(self) -> None:
        """The stream is over: its last line may have no end."""
        self._read_line(bytes(self._line))
        self._line.clear()

    def whole(self, body: bytes) -> None:
        """The body of an answer that is no stream. May be called in a thread."""
        self.size = len(body)
        frame = self._read(body)
        if frame is not None:
            self._take(frame)
            if self._output is None and self._prompt is not None and self.unbelieved is None:
                self._output = 0  # embeddings and scores: nothing was generated

    def passed(self, size: int, tail: bytes) -> None:
        """The end of an answer that is no stream and was too large to be kept: servers write usage
        last.
        """
        self.size = size
        text = tail[tail.rfind(b'"usage"') :].decode(errors="replace").partition(":")[2]
        try:
            usage, _ = json.JSONDecoder().raw_decode(text.lstrip())
        except (ValueError, RecursionError):
            return
        self._count(usage)

    @property
    def has_usage(self) -> bool:
        """Whether the server counted the tokens itself."""
        return self._output is not None

    @property
    def end(self) -> Answered:
        """How it ended."""
        reason = self._reason or "stop"
        return Answered(LENGTH.get(reason, reason), self._output, self._prompt, self._cached)

    def _extend(self, part: bytes) -> None:
        """Keep a bounded part of a line that does not end."""
        if self._skips or len(self._line) + len(part) > MOST_LINE:
            self._skips = True
            self._line.clear()
        else:
            self._line += part

    def _read_line(self, line: bytes) -> None:
        if not line.startswith(b"data:"):
            self.readable &= not line or line.startswith(FIELDS)
            return
        data = line[5:].strip()
        if data == DONE:
            self.ended = True
        elif (frame := self._read(data)) is not None:
            self.events += 1
            self._take(frame)
            self.tokens += _tokens(frame)

    def _read(self, data: bytes) -> _Frame | None:
        try:
            return _decoder.decode(data)
        except msgspec.ValidationError:  # JSON of another shape
            if data.lstrip()[:1] == b"{":
                return _Frame()
            self.readable = False
            return None
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
            self.readable = False
            return None

    def _take(self, frame: _Frame) -> None:
        told = frame.response or frame
        self.error |= frame.error is not None or frame.type == "error" or told.status == "failed"
        for part in (frame, frame.response, frame.message):
            if part is not None and not isinstance(part, str):
                if part.usage is not None:
                    self._count(part.usage)
                if self.model is None and isinstance(part.model, str):
                    self.model = part.model
        if (reason := _reason(frame)) is not None:
            self._end(reason)
            self.ended = True
        elif frame.type in LAST:
            self.ended = True

    def _count(self, usage: Any) -> None:
        """What cannot be true is not believed: each token has a byte at least, or is within the
        limit.
        """
        if not isinstance(usage, dict):
            return
        prompt = _whole(usage, "input_tokens", "prompt_tokens")
        output = _whole(usage, "output_tokens", "completion_tokens")
        if prompt is not None and prompt <= min(self._most_prompt, MOST):
            self._prompt = prompt
        if output is not None and output <= min(max(self._most, self.size), MOST):
            self._output = output
        elif (given := usage.get("completion_tokens", usage.get("output_tokens"))) is not None:
            self.unbelieved = given
        details = usage.get("prompt_tokens_details") or usage.get("input_tokens_details")
        cached = _whole(details, "cached_tokens") if isinstance(details, dict) else None
        self._cached = min(max(self._cached, cached or 0), self._prompt or 0)

    def _end(self, reason: str) -> None:
        """A choice that was cut says more than another that ended."""
        if self._reason not in ("length", *LENGTH):
            self._reason = reason


def _whole(values: dict[str, Any], *names: str) -> int | None:
    """The last of these that is a whole number from 0 on."""
    found = [values[name] for name in names if name in values]
    counts = [int(value) for value in found if isinstance(value, int | float) and _is_count(value)]
    return counts[-1] if counts else None


def _is_count(value: float) -> bool:
    return not isinstance(value, bool) and 0 <= value < math.inf and value == int(value)


def _tokens(frame: _Frame) -> int:
    if frame.choices:
        return sum(choice.tokens for choice in frame.choices)
    kind = frame.type or ""
    return int(
        kind == "content_block_delta" or (kind.startswith("response.") and kind.endswith(".delta"))
    )


def _reason(frame: _Frame) -> str | None:
    """The finish reason in the route's own word."""
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
