"""One call at a server: sent, its answer handed on as it comes and as fast as the client takes it,
ended by exactly one word.

Until a byte of the answer went on, another server may answer. So the head of a stream waits for its
first line (for its end, where the server's last streams broke off), and a whole answer is held up
to HELD bytes; a larger one flows. What is held can be judged: an error status that may be this
server's alone, an answer that is none, one of another model or larger than its call can have, go
back to the queue.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Callable, Iterable
from typing import Protocol

import aiohttp

from kendall.policies import Request
from kendall.server.engines.base import FailureCode
from kendall.server.engines.http.answers import GENERATING, UpstreamAnswer, fits
from kendall.server.engines.http.stream import ResponseSink
from kendall.server.engines.http.upstream import LOST, Upstream, reason_of, status_of
from kendall.server.engines.proxied import Cause, ProxiedCall, Refused
from kendall.server.runtime.clock import clock_of
from kendall.server.runtime.passed_headers import named_by

log = logging.getLogger("kendall.engine")
EVENTS = "text/event-stream"
BUSY = (429, 502, 503, 504)  # another server may answer, and this one in a while
OF_THE_CONNECTION = frozenset(
    {
        *("connection", "keep-alive", "proxy-authenticate", "proxy-connection", "te", "trailer"),
        *("transfer-encoding", "upgrade"),
        *("content-length", "date", "server", "x-request-id"),  # of this answer, not of that one
    }
)
# what a server tells browsers of its own origin, which is not the gateway's
OF_ITS_ORIGIN = frozenset(
    {
        *("location", "set-cookie", "set-cookie2", "refresh", "clear-site-data", "alt-svc"),
        *("strict-transport-security", "public-key-pins", "www-authenticate"),
    }
)
CORS = ("access-control-", "cross-origin-")  # how the names of such headers begin
PAUSE = 1.0  # seconds that a busy server gets no work, where it asks for nothing else
HELD = 4 << 20  # bytes of an answer that are held before any of it goes on
MOST_HELD = 64 << 20  # of all answers together: beyond, they flow
MOST_ERROR = 1 << 20  # of an answer with an error status
AT_ONCE = 256 << 10  # that are parsed on the event loop
TAIL = 64 << 10  # that are searched for the usage of an answer that flowed
# bytes that an answer may have: of each token, with 20 alternatives and their log probabilities; of
# each sequence, as a vector of 8,192 numbers; beside them
PER_TOKEN, PER_SEQUENCE, BESIDE = 4 << 10, 256 << 10, 1 << 20
STALLED: FailureCode = "sequence_stalled"


class ExchangeCallbacks(Protocol):
    """Calls of an exchange to its engine."""

    held: int  # bytes of all its exchanges

    @property
    def context(self) -> int:
        """Tokens that a server's context holds."""

    def elsewhere(self, upstream: Upstream) -> bool:
        """Whether another server takes work."""

    def refused(self, upstream: Upstream, status: int) -> bool:
        """It answered with this status; whether another server is to be asked too."""

    def heard(
        self, call: ProxiedCall, answer: UpstreamAnswer, upstream: Upstream, seconds: float
    ) -> None:
        """An answer is whole; it took so long."""

    def breaks_off(self, upstream: Upstream) -> bool:
        """Whether its streams are better held until their end: others are there to answer."""

    def failed(self, upstream: Upstream) -> None:
        """An answer that had begun broke off."""

    def too_long(self, exchange: UpstreamExchange, silent: float) -> bool:
        """Whether nothing of it may come for so many seconds."""


class UnusableError(Exception):
    """An answer that no client can use; `answer` as it came, where it is whole."""

    def __init__(self, reason: str, answer: Refused | None = None) -> None:
        super().__init__(reason)
        self.answer = answer


class UpstreamExchange:
    """A call and its server. `on_over` is called once, when the server has nothing more to do for
    it.
    """

    def __init__(
        self,
        engine: ExchangeCallbacks,
        upstream: Upstream,
        call: ProxiedCall,
        request: Request,
        *,
        back: ResponseSink,
        on_over: Callable[[UpstreamExchange], None],
    ) -> None:
        self.upstream, self.call, self.request = upstream, call, request
        self.begun = False  # a part of the answer was handed on
        self.flows = False  # an event came
        self.streams = call.streams  # events, as far as is known
        self._engine, self._back, self._on_over = engine, back, on_over
        self._over = False
        self._held = 0
        self._now = clock_of(asyncio.get_running_loop())
        self._began_at = self._moved_at = self._now()
        self._waits = False  # for the client
        self._most = request.sequences * (
            PER_TOKEN * (request.prompt_tokens + request.max_output_tokens) + PER_SEQUENCE
        )
        self._task = asyncio.create_task(self._run())
        self._task.add_done_callback(self._ended)

    def cancel(self) -> None:
        """The answer is not wanted any more; nothing is said of it."""
        if not self._over:
            self._over = True
            self._task.cancel()

    def lose(self, reason: str) -> None:
        """Its server is gone."""
        if not self._over:
            self._say_lost(reason)
            self._task.cancel()

    def look(self) -> None:
        """Whether it has been silent for too long; while the client does not read it may be."""
        still = self._now() - self._moved_at
        if self._over or self._waits or not self._engine.too_long(self, still):
            return
        upstream, what = self.upstream, "event" if self.flows else "answer"
        reason = f"{upstream.name} sent no {what} for {still:.0f} s"
        log.warning("%s (%s): a call is given up: %s", upstream.name, upstream.url, reason)
        upstream.last_fault = reason
        if self.begun:
            self._engine.failed(upstream)
        if self._engine.elsewhere(upstream):
            self._say_lost(reason, STALLED)
        else:  # it would wait for the same server once more
            self._over = True
            self._back.lost(reason, STALLED)
        self._task.cancel()

    async def _run(self) -> None:
        upstream, call = self.upstream, self.call
        try:
            async with upstream.post(call.path, call.body, call.headers) as response:
                upstream.hear()
                if status_of(response) < 400:
                    await self._read(response)
                else:
                    await self._refused(response)
        except LOST as error:
            await self._broke_off(reason_of(error))
        except UnusableError as error:
            self._unusable(error)

    async def _broke_off(self, reason: str) -> None:
        """Once it is known whether the server is there: else the call would go back to it."""
        upstream = self.upstream
        log.warning("%s (%s): a call broke off: %s", upstream.name, upstream.url, reason)
        upstream.lose(reason)
        if not self.begun:
            await asyncio.shield(upstream.look())
        elif not self._over:
            self._engine.failed(upstream)
        if not self._over:
            self._say_lost(f"{upstream.name} was lost ({reason})")

    def _unusable(self, error: UnusableError) -> None:
        upstream = self.upstream
        reason = f"{upstream.name} {error}"
        log.warning("%s (%s): an answer is of no use: it %s", upstream.name, upstream.url, error)
        if self._over:
            return
        if self.begun:
            self._engine.failed(upstream)
            self._say_lost(reason)
        elif error.answer is not None and not self._engine.elsewhere(upstream):
            self._over = True
            self._back.refused(error.answer)
        else:
            self._over = True
            self._back.returned(reason, error.answer)

    # a good status

    async def _read(self, response: aiohttp.ClientResponse) -> None:
        if response.status != 200:  # no answer of these routes has another good one
            raise UnusableError(f"answers {response.status}")
        request, context = self.request, self._engine.context
        answer = UpstreamAnswer(
            request.sequences * request.max_output_tokens, request.sequences * context
        )
        kind = kind_of(response)
        encoded = response.headers.get("Content-Encoding", "identity").strip().lower()
        if encoded != "identity":  # nothing of it can be read, and no encoding was asked for
            raise UnusableError(f"answered in the encoding {encoded:.20}")
        if kind == EVENTS:
            self.streams = True
            await self._stream(response, answer)
        else:
            self.streams = False
            await self._whole(response, answer)
        if self._over:
            return
        self._over = True
        if answer.error:  # the client has read it
            self._back.refused(Refused(200, (), b""))
            return
        self._engine.heard(self.call, answer, self.upstream, self._now() - self._began_at)
        self._back.answered(answer.end)

    async def _stream(self, response: aiohttp.ClientResponse, answer: UpstreamAnswer) -> None:
        """Held until its first line, or its end where the server's streams break off."""
        held, tokens, lines = bytearray(), 0, False
        try:
            async for data in response.content.iter_any():
                self.upstream.hear()
                made = self._feed(answer, data)
                if self.begun:
                    await self._hand_on(data, made)
                    continue
                held += data
                tokens, lines = tokens + made, lines or b"\n" in data
                self._hold(len(data))
                empty = answer.ended and not answer.events
                if self._waits_on(held, lines=lines and not empty):
                    continue
                await self._judge(response, answer, held)
                await self._begin_with(response, held, tokens)
            answer.close()
            if not answer.events:
                raise UnusableError("sent a stream without an event")
            if not (answer.ended or answer.error):
                raise UnusableError("ended a stream without finish_reason and without [DONE]")
            if not self.begun:
                await self._judge(response, answer, held)
                await self._begin_with(response, held, tokens)
        finally:
            self._hold(-self._held)

    def _feed(self, answer: UpstreamAnswer, data: bytes) -> int:
        """The tokens in it."""
        events = answer.events
        made = answer.feed(data)
        self._check_size(answer.size)
        if answer.events > events:
            self._moved_at, self.flows = self._now(), True
        return made

    def _waits_on(self, held: bytearray, *, lines: bool) -> bool:
        """Whether none of what is held of a stream goes on yet."""
        waits = not lines or self._engine.breaks_off(self.upstream)
        return waits and len(held) <= HELD and self._engine.held <= MOST_HELD

    async def _begin_with(
        self, response: aiohttp.ClientResponse, held: bytearray, tokens: int
    ) -> None:
        if not self._over:
            self._begin(response, streamed=True)
            self._hold(-self._held)
            await self._hand_on(bytes(held), tokens)

    async def _judge(
        self, response: aiohttp.ClientResponse, answer: UpstreamAnswer, held: bytearray
    ) -> None:
        """What has come of a stream, before any of it goes on."""
        if not answer.readable:
            raise UnusableError("sent something else than events")
        if answer.error and self._engine.elsewhere(self.upstream):
            fault = "reported an error in its answer"
            raise UnusableError(fault, Refused(200, kept(response.raw_headers), bytes(held)))
        await self._see_model(answer)

    async def _whole(self, response: aiohttp.ClientResponse, answer: UpstreamAnswer) -> None:
        """Held until its end, or until it is too large for that: then it flows."""
        body, size, tail = bytearray(), 0, b""
        try:
            async for data in response.content.iter_any():
                self.upstream.hear()
                size += len(data)
                self._check_size(size)
                if self.begun:
                    tail = (tail + data)[-TAIL:]
                    await self._hand_on(data, 0)
                    continue
                body += data
                self._hold(len(data))
                if len(body) > HELD or self._engine.held > MOST_HELD:
                    self._begin(response, streamed=True)
                    tail = bytes(body[-TAIL:])
                    await self._hand_on(bytes(body), 0)
                    body.clear()
                    self._hold(-self._held)
            if self.begun:
                answer.passed(size, tail)
            else:
                await self._hand_on_whole(response, answer, bytes(body))
        finally:
            self._hold(-self._held)

    async def _hand_on_whole(
        self, response: aiohttp.ClientResponse, answer: UpstreamAnswer, body: bytes
    ) -> None:
        if len(body) <= AT_ONCE:
            fault = self._fault_of(response, answer, body)
        else:
            fault = await asyncio.to_thread(self._fault_of, response, answer, body)
        if fault or answer.error:
            refused = Refused(200, kept(response.raw_headers), body, fault)
            raise UnusableError(fault or "reported an error in its answer", refused)
        await self._see_model(answer)
        if not self._over:
            self._begin(response, streamed=False)
            self._back.more(body, 0)

    def _fault_of(
        self, response: aiohttp.ClientResponse, answer: UpstreamAnswer, body: bytes
    ) -> str:
        """What is wrong with a whole answer that reports no error; reads it."""
        answer.whole(body)
        kind = kind_of(response)
        if not answer.readable and (not kind or "json" in kind or kind.startswith("text")):
            return "answered with something else than JSON"
        if answer.error or self.call.path not in GENERATING:
            return ""
        if self.call.streams:
            return "answered with something else than events"
        return "" if fits(self.call.path, body) else "answered without what an answer has"

    async def _see_model(self, answer: UpstreamAnswer) -> None:
        """One that says of itself that it has another model than before is asked for its models,
        and lost where they are others.
        """
        if self.upstream.has_other_model(self.call.model, answer.model):
            await asyncio.shield(self.upstream.look())

    def _begin(self, response: aiohttp.ClientResponse, *, streamed: bool) -> None:
        self.begun = True
        self._back.head(kept(response.raw_headers), streamed=streamed)

    async def _hand_on(self, data: bytes, tokens: int) -> None:
        """No more is read of the server than the client takes."""
        if (taken := self._back.more(data, tokens)) is not None:
            since, self._waits = self._now(), True
            await taken
            waited, self._waits = self._now() - since, False
            self._moved_at += waited
            self._began_at += waited
        elif not self.streams:
            self._moved_at = self._now()

    def _check_size(self, size: int) -> None:
        if size > self._most + BESIDE:
            most = (self._most + BESIDE) >> 20
            raise UnusableError(f"answered with more than {most} MiB, beyond what was asked for")

    def _hold(self, size: int) -> None:
        self._held += size
        self._engine.held += size

    # another status

    async def _refused(self, response: aiohttp.ClientResponse) -> None:
        upstream, status, body = self.upstream, response.status, bytearray()
        async for data in response.content.iter_any():
            body += data
            if len(body) > MOST_ERROR:
                raise UnusableError(f"answered {status} with more than {MOST_ERROR >> 20} MiB")
        answer = Refused(status, kept(response.raw_headers), bytes(body))
        reason = f"{upstream.name} answers {status}"
        elsewhere = self._engine.refused(upstream, status)
        if self._over:
            return
        self._over = True
        if status in BUSY and self._engine.elsewhere(upstream):
            asked = response.headers.get("Retry-After")
            upstream.trip(pause_of(asked), f"it answers {status}")
            self._back.returned(reason, answer, cause="failed" if asked is None else "busy")
            return
        if status >= 500:
            upstream.look()
        if elsewhere:
            self._back.returned(reason, answer)
        else:
            self._back.refused(answer)

    def _say_lost(self, reason: str, code: FailureCode = "engine_unavailable") -> None:
        self._over = True
        if self.begun:
            self._back.lost(reason, code)
        else:
            cause: Cause = "gone" if self.upstream.breaker.lost else "failed"
            self._back.returned(reason, None, code, cause=cause)

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._on_over(self)
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("internal error while a call was passed on", exc_info=error)
            self._say_lost("internal error of the gateway")  # no effect where it was answered


def kind_of(response: aiohttp.ClientResponse) -> str:
    """Its media type; empty where it says none."""
    return response.headers.get("Content-Type", "").partition(";")[0].strip().lower()


def kept(headers: Iterable[tuple[bytes, bytes]]) -> tuple[tuple[str, str], ...]:
    """Those of an answer that go on to the client, byte by byte: as Latin-1, which has all."""
    pairs = [(name.decode("latin-1").lower(), value.decode("latin-1")) for name, value in headers]
    dropped = OF_THE_CONNECTION | OF_ITS_ORIGIN | named_by(pairs)
    return tuple(
        (name, value) for name, value in pairs if name not in dropped and not name.startswith(CORS)
    )


def pause_of(retry_after: str | None) -> float:
    """Seconds that a busy server asks for."""
    try:
        seconds = float(retry_after or PAUSE)
    except ValueError:  # a date
        return PAUSE
    return seconds if 0 <= seconds < math.inf else PAUSE
