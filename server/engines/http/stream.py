"""The way back of what was sent to a server: the bytes of a passed call, or the tokens of a request
of the gateway's own (a calibration), which is a completion over token ids there.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, cast

import msgspec

from server.engines.base import EngineRequest, Token, TokenStream
from server.engines.passing import Answered, PassedCall, PassedListener, Refused
from server.runtime.wording import brief

COMPLETIONS = "/v1/completions"
NO_TOKEN = -1  # id of a token whose id the server does not tell


class WayBack(Protocol):
    """What an exchange says of its answer; see PassedListener."""

    def head(self, headers: Sequence[tuple[str, str]], *, streamed: bool) -> None: ...
    def more(self, data: bytes, tokens: int) -> None: ...
    def answered(self, end: Answered) -> None: ...
    def refused(self, answer: Refused) -> None: ...
    def returned(self, reason: str, answer: Refused | None = None) -> None: ...
    def lost(self, reason: str) -> None:
        """The answer broke off."""


class PassedStream(TokenStream):
    """Bytes in place of tokens."""

    __slots__ = ()

    @property
    def _passed(self) -> PassedListener | None:
        return cast("PassedListener | None", self.listener)

    def head(self, headers: Sequence[tuple[str, str]], *, streamed: bool) -> None:
        """See PassedListener."""
        if (listener := self._passed) is not None:
            listener.on_head(headers, streamed=streamed)

    def more(self, data: bytes, tokens: int) -> None:
        """See PassedListener."""
        if (listener := self._passed) is not None:
            listener.on_bytes(data, tokens)

    def answered(self, end: Answered) -> None:
        """See PassedListener."""
        if (listener := self._passed) is not None:
            listener.on_answered(end)

    def refused(self, answer: Refused) -> None:
        """See PassedListener."""
        if (listener := self._passed) is not None:
            listener.on_refused(answer)

    def returned(self, reason: str, answer: Refused | None = None) -> None:
        """See PassedListener."""
        if (listener := self._passed) is not None:
            listener.on_returned(reason, answer)

    def lost(self, reason: str) -> None:
        """The answer broke off."""
        self.fail(reason)


class CountedStream(TokenStream):
    """Tokens without ids and texts, as many as `wanted`; the last one ends the sequence."""

    __slots__ = ("_counted", "_made", "_wanted")

    def __init__(self, request_id: str, wanted: int) -> None:
        super().__init__(request_id)
        self._counted = self._made = 0  # of its answer; handed on
        self._wanted = wanted

    def head(self, headers: Sequence[tuple[str, str]], *, streamed: bool) -> None:
        """Nothing to do."""

    def more(self, data: bytes, tokens: int) -> None:
        """All but the last one: whether they are as many as wanted is known at the end."""
        del data
        self._counted += tokens
        self._push(min(tokens, self._wanted - 1 - self._made))

    def answered(self, end: Answered) -> None:
        """The rest, and the last one. Fails where the server made another number."""
        made = self._counted if end.output_tokens is None else end.output_tokens
        if made != self._wanted:
            self.fail(
                f"got an answer of {made} tokens; expected {self._wanted}: the server must "
                "honour ignore_eos and max_tokens",
                "engine_error",
            )
            return
        self._push(self._wanted - 1 - self._made)
        self.push((Token(NO_TOKEN, "", ends=True),))

    def refused(self, answer: Refused) -> None:
        """It fails."""
        said = brief(answer.body.decode(errors="replace"))
        self.fail(f"the server answered {answer.status}: {said}", "engine_error")

    def returned(self, reason: str, answer: Refused | None = None) -> None:
        """It fails: who measures asks again."""
        del answer
        self.fail(reason)

    def lost(self, reason: str) -> None:
        """The answer broke off."""
        self.fail(reason)

    def _push(self, tokens: int) -> None:
        if tokens > 0:
            self._made += tokens
            self.push((Token(NO_TOKEN, ""),) * tokens)


def own_call(model: str, engine_request: EngineRequest, wanted: int) -> PassedCall:
    """A request of the gateway's own as a call: greedy, of exactly `wanted` tokens."""
    body = {
        "model": model,
        "prompt": list(engine_request.prompt_token_ids),
        "max_tokens": wanted,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    headers = (("content-type", "application/json"),)
    return PassedCall(COMPLETIONS, msgspec.json.encode(body), headers)


def wanted_tokens(engine_request: EngineRequest) -> int:
    """Of the gateway's own request: as forced, else its limit."""
    forced = engine_request.forced_output_tokens
    return engine_request.sampling.max_tokens if forced is None else forced
