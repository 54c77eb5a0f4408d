"""The way back of what was sent to a server: the bytes of a passed call, or the tokens of a request
of the gateway's own (a calibration), which is a completion there.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import Protocol, cast

from kendall.server.engines.base import FailureCode, Token, TokenStream
from kendall.server.engines.http.own_calls import OwnCall, OwnForm
from kendall.server.engines.proxied import Answered, Cause, ProxiedListener, Refused
from kendall.server.runtime.wording import brief

NO_TOKEN = -1  # id of a token whose id the server does not tell
UNREAD = (400, 422)  # of a server that does not take a field, or a prompt of token ids


class ResponseSink(Protocol):
    """Where an exchange hands its answer on; see ProxiedListener."""

    def head(self, headers: Sequence[tuple[str, str]], *, streamed: bool) -> None: ...
    def more(self, data: bytes, tokens: int) -> Awaitable[None] | None: ...
    def answered(self, end: Answered) -> None: ...
    def refused(self, answer: Refused) -> None: ...
    def returned(
        self,
        reason: str,
        answer: Refused | None = None,
        code: FailureCode = "engine_unavailable",
        *,
        cause: Cause = "failed",
    ) -> None: ...
    def lost(self, reason: str, code: FailureCode = "engine_unavailable") -> None:
        """The answer broke off."""


class PassedStream(TokenStream):
    """Bytes in place of tokens."""

    __slots__ = ()

    @property
    def _passed(self) -> ProxiedListener | None:
        return cast("ProxiedListener | None", self.listener)

    def head(self, headers: Sequence[tuple[str, str]], *, streamed: bool) -> None:
        """See ProxiedListener."""
        if (listener := self._passed) is not None:
            listener.on_head(headers, streamed=streamed)

    def more(self, data: bytes, tokens: int) -> Awaitable[None] | None:
        """See ProxiedListener."""
        listener = self._passed
        return None if listener is None else listener.on_bytes(data, tokens)

    def answered(self, end: Answered) -> None:
        """See ProxiedListener."""
        if (listener := self._passed) is not None:
            listener.on_answered(end)

    def refused(self, answer: Refused) -> None:
        """See ProxiedListener."""
        if (listener := self._passed) is not None:
            listener.on_refused(answer)

    def returned(
        self,
        reason: str,
        answer: Refused | None = None,
        code: FailureCode = "engine_unavailable",
        *,
        cause: Cause = "failed",
    ) -> None:
        """See ProxiedListener."""
        if (listener := self._passed) is not None:
            listener.on_returned(reason, answer, code, cause=cause)

    def lost(self, reason: str, code: FailureCode = "engine_unavailable") -> None:
        """The answer broke off."""
        self.fail(reason, code)


class CountedStream(TokenStream):
    """Tokens without ids and texts, as many as were asked for; the last one ends the sequence.

    `resend` sends the call in words, where the server takes no token ids or no `ignore_eos`.
    """

    __slots__ = ("_call", "_counted", "_form", "_made", "_refusal", "_resend")

    _call: OwnCall  # in service

    def __init__(
        self, request_id: str, form: OwnForm, resend: Callable[[CountedStream], object]
    ) -> None:
        super().__init__(request_id)
        self._form, self._resend = form, resend
        self._counted = self._made = 0  # of its answer; handed on
        self._refusal: str | None = None  # of the call over token ids

    def sent(self, call: OwnCall) -> None:
        """What is asked; nothing has come of what was sent before."""
        self._call = call

    def head(self, headers: Sequence[tuple[str, str]], *, streamed: bool) -> None:
        """Nothing to do."""

    def more(self, data: bytes, tokens: int) -> None:
        """All but the last one: whether they are as many as wanted is known at the end."""
        del data
        self._counted += tokens
        self._push(min(tokens, self._call.wanted - 1 - self._made))

    def answered(self, end: Answered) -> None:
        """The rest, and the last one. Fails where the server made another number."""
        made = self._counted if end.output_tokens is None else end.output_tokens
        if made != self._call.wanted:
            self.fail(
                f"got an answer of {made} tokens; expected {self._call.wanted}: "
                f"{self._call.remedy}",
                "engine_error",
            )
            return
        self._form.answered(self._call, end.prompt_tokens, self._refusal)
        self._push(self._call.wanted - 1 - self._made)
        self.push((Token(NO_TOKEN, "", ends=True),))

    def refused(self, answer: Refused) -> None:
        """Sent again, in words, or failed."""
        said = f"{answer.status}: {brief(answer.body.decode(errors='replace'))}"
        if answer.status in UNREAD and self._call.words is None:
            self._refusal = said
            self._resend(self)
            return
        before = "" if self._refusal is None else f" (to token ids with ignore_eos {self._refusal})"
        self.fail(f"the server answered {said}{before}", "engine_error")

    def returned(
        self,
        reason: str,
        answer: Refused | None = None,
        code: FailureCode = "engine_unavailable",
        *,
        cause: Cause = "failed",
    ) -> None:
        """It fails: who measures asks again."""
        del answer, cause
        self.fail(reason, code)

    def lost(self, reason: str, code: FailureCode = "engine_unavailable") -> None:
        """The answer broke off."""
        self.fail(reason, code)

    def _push(self, tokens: int) -> None:
        if tokens > 0:
            self._made += tokens
            self.push((Token(NO_TOKEN, ""),) * tokens)
