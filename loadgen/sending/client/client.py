"""One request over HTTP: sent, streamed, and written down as one record with one outcome.

Nothing is retried, nothing times out by itself, and the number of connections has no limit:
whatever the client held back would be missing from the delay.
"""

from __future__ import annotations

import asyncio
import re
import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from kendall.loadgen.measures.failures import HUNG_UP
from kendall.loadgen.sending.client.stream import StreamedAnswer, StreamError, read_error
from kendall.loadgen.sending.client.target import Target
from kendall.loadgen.sending.client.wire import Address, SenderConnection
from kendall.queueing.measurement.record import Outcome, Record

STREAM = "text/event-stream"
CUT_SHORT = "the run ended before the answer did"


def address_of(target: Target) -> Address:
    """Where the requests go, and their headers."""
    headers = {
        "content-type": "application/json",
        "accept": STREAM,
        "accept-encoding": "identity",
        "user-agent": "kendall",
    }
    if target.api_key:
        headers["authorization"] = f"Bearer {target.api_key}"
    return Address(target.url, headers | dict(target.headers))


@dataclass(slots=True, kw_only=True, eq=False)
class LoadExchange:
    """One request on its way: what is known of it before, during and after. A
    `loadgen.sending.client.wire.Receiver`.
    """

    request_id: str
    intended_at: float
    message: bytes  # of the whole request
    prompt_tokens: int
    max_output_tokens: int
    predicted_output_tokens: float | None = None
    flow: str | None = None
    model: str | None = None  # of several
    turn: int | None = None  # in its conversation, from 1; the answer's text is then kept
    sender_id: int | None = None
    token_times: bool = False
    hang_up_after: float | None = None  # seconds after sending
    hang_up_tokens: int | None = None  # received
    ended: Callable[[LoadExchange], None] = lambda _: None  # called once, when the outcome is known
    held_until: float | None = None
    sent_at: float | None = None
    first_byte_at: float | None = None
    ended_at: float | None = None
    queueing_delay: float | None = None
    service_time: float | None = None
    outcome: Outcome = "cancelled"  # until something else is known
    error: str | None = "the run ended before it was sent"
    _connection: SenderConnection | None = None
    _timer: asyncio.TimerHandle | None = None
    _over: bool = False
    _status: int = 0
    _content_type: str = ""
    _location: str | None = None  # of a redirect
    _refusal: bytes = b""  # body of an answer that is none
    _answer: StreamedAnswer = field(default_factory=StreamedAnswer)

    def begin(self, now: float) -> None:
        """It leaves now: its bytes, or the call for a connection that will carry them."""
        self.sent_at, self.error = now, CUT_SHORT
        if self.token_times:
            self._answer.token_at = []
        if self.turn is not None:
            self._answer.texts = []
        if self.hang_up_after is not None:
            loop = asyncio.get_running_loop()
            self._timer = loop.call_at(now + self.hang_up_after, self.hang_up)

    def send(self, connection: SenderConnection) -> None:
        """Write it; the answer comes back to this object."""
        if self._over:  # its client hung up before there was a connection
            connection.abort()
            return
        self._connection = connection
        connection.send(self.message, self)

    @property
    def text(self) -> str:
        """What the answer says, where it is kept."""
        return "".join(self._answer.texts or ())

    def cancel(self) -> None:
        """The run ends; the outcome stays what it was, cancelled."""
        self._abort()
        self._end(None)

    def hang_up(self) -> None:
        """The client leaves: the server sees its connection close."""
        self._abort()
        self.outcome, self.error = "cancelled", HUNG_UP
        self._end(asyncio.get_running_loop().time())

    def _abort(self) -> None:
        if self._connection is not None:
            self._connection.abort()

    def on_head(self, status: int, headers: Mapping[str, str], now: float) -> None:
        self._status, self.first_byte_at = status, now
        self._content_type = headers.get("content-type", "").lower()
        self._location = headers.get("location") if 300 <= status < 400 else None
        self.queueing_delay, self.service_time = (
            timing(headers, "queue"),
            timing(headers, "service"),
        )

    def on_data(self, data: bytes, now: float) -> None:
        if self._status != 200:
            self._refusal += data
            return
        try:
            self._answer.feed(data, now)
        except StreamError as error:
            said = (
                self._broken_off()
                if self._content_type and not self._content_type.startswith(STREAM)
                else str(error)
            )
            self._abort()
            self.on_lost(said, now)
            return
        tokens, answer = self.hang_up_tokens, self._answer
        if tokens is not None and answer.token_chunks >= tokens and not answer.complete:
            self.hang_up()

    def on_end(self, now: float) -> None:
        self.outcome, self.error = self._verdict()
        self._end(now)

    def on_lost(self, reason: str, now: float) -> None:
        self.outcome, self.error = "failed", reason
        self._end(now)

    def _verdict(self) -> tuple[Outcome, str | None]:
        if self._status != 200:
            code, text = read_error(self._refusal)
            if self._location is not None:
                text = f"redirects to {self._location}; redirects are not followed"
            lost: Outcome = "abandoned" if code == "queue_timeout" else "rejected"
            return lost if self._status in (
                429,
                503,
            ) else "failed", f"{self._status} {text}".rstrip()
        if not self._answer.complete:
            return "failed", self._broken_off()
        if self._answer.finish_reason in ("abort", "error"):
            return (
                "failed",
                f"the server ended the answer with finish_reason {self._answer.finish_reason!r}",
            )
        return "completed", None

    def _broken_off(self) -> str:
        kind = self._content_type.partition(";")[0].strip()
        if kind and kind != STREAM:
            return (
                f"got an answer of content type {kind}; expected {STREAM}, the stream of an "
                "OpenAI-compatible API: check the URL"
            )
        return "the stream broke off before its end"

    def _end(self, now: float | None) -> None:
        if self._over:
            return
        self._over, self.ended_at, self._connection = True, now, None
        if self._timer is not None:
            self._timer.cancel()
        self.ended(self)

    @property
    def counted(self) -> bool:
        """Whether the server has counted the tokens of the answer."""
        return self._answer.output_tokens is not None

    def record(self) -> Record:
        """The record of the request as it is now."""
        answer, done = self._answer, self.outcome == "completed"
        return Record(
            request_id=self.request_id,
            outcome=self.outcome,
            batch_size=answer.batch_size,
            intended_at=self.intended_at,
            held_until=self.held_until,
            sent_at=self.sent_at,
            first_byte_at=self.first_byte_at,
            first_token_at=answer.first_token_at,
            last_token_at=answer.last_token_at,
            token_at=answer.token_at,
            released_at=self.ended_at,
            queueing_delay=self.queueing_delay
            if answer.queueing_delay is None
            else answer.queueing_delay,
            service_time=self.service_time if answer.service_time is None else answer.service_time,
            sojourn_time=self.ended_at - self.intended_at
            if done and self.ended_at is not None
            else None,
            prompt_tokens=self.prompt_tokens
            if answer.prompt_tokens is None
            else answer.prompt_tokens,
            cached_tokens=answer.cached_tokens,
            output_tokens=answer.token_chunks
            if answer.output_tokens is None
            else answer.output_tokens,
            max_output_tokens=self.max_output_tokens,
            predicted_output_tokens=self.predicted_output_tokens,
            sender_id=self.sender_id,
            model=self.model,
            flow=self.flow,
            turn=self.turn,
            finish_reason=answer.finish_reason,
            error=self.error,
        )


_SERVER_TIMING = {
    part: re.compile(rf"(?:^|,)\s*{part}\s*;[^,]*dur=([0-9.eE+-]+)")
    for part in ("queue", "service")
}


def timing(headers: Mapping[str, str], part: str) -> float | None:
    """Seconds that the server says it took for a part, queue or service; None where it says
    nothing.
    """
    text = headers.get("x-kendall-queueing-delay-ms") if part == "queue" else None
    if text is None and (match := _SERVER_TIMING[part].search(headers.get("server-timing", ""))):
        text = match[1]
    try:
        return None if text is None else float(text) / 1e3
    except ValueError:
        return None


def run_prefix() -> str:
    """A name for a run that no other has: two runs of one seed must not share request ids."""
    return f"load-{uuid.uuid4().hex[:8]}"
