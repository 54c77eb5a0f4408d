"""One call at a server: sent, its answer handed on as it comes, ended by exactly one word."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping
from typing import Protocol

import aiohttp

from server.engines.http.answers import Answer
from server.engines.http.stream import WayBack
from server.engines.http.upstream import LOST, Upstream, reason_of, status_of
from server.engines.passing import PassedCall, Refused

log = logging.getLogger("kendall.engine")
EVENTS = "text/event-stream"
BUSY = (429, 502, 503, 504)  # another server may answer
OF_THE_CONNECTION = frozenset(
    {
        *("connection", "keep-alive", "proxy-authenticate", "proxy-connection", "te", "trailer"),
        *("transfer-encoding", "upgrade"),
        *("content-length", "date", "server", "x-request-id"),  # of this answer, not of that one
    }
)
PAUSE = 1.0  # seconds that a busy server gets no work, where it asks for nothing else


class Around(Protocol):
    """What an exchange asks of the engine."""

    def elsewhere(self, upstream: Upstream) -> bool:
        """Whether another server takes work."""

    def heard(self, call: PassedCall, answer: Answer, upstream: Upstream) -> None:
        """An answer is whole."""


class Exchange:
    """A call and its server. `on_over` is called once, when the server has nothing more to do for
    it.
    """

    def __init__(
        self,
        engine: Around,
        upstream: Upstream,
        call: PassedCall,
        back: WayBack,
        on_over: Callable[[Exchange], None],
    ) -> None:
        self.upstream, self._call = upstream, call
        self._engine, self._back, self._on_over = engine, back, on_over
        self._begun = False  # a part of the answer was handed on
        self._over = False
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

    async def _run(self) -> None:
        upstream, call = self.upstream, self._call
        try:
            async with upstream.post(call.path, call.body, dict(call.headers)) as response:
                await self._read(response)
        except LOST as error:
            await self._broke_off(reason_of(error))

    async def _broke_off(self, reason: str) -> None:
        """Once it is known whether the server is there: else the call would go back to it."""
        upstream = self.upstream
        log.warning("%s (%s): a call broke off: %s", upstream.name, upstream.url, reason)
        upstream.lose(reason)
        if not self._begun:
            await asyncio.shield(upstream.look())
        if not self._over:
            self._say_lost(f"{upstream.name} was lost ({reason})")

    async def _read(self, response: aiohttp.ClientResponse) -> None:
        self.upstream.hear()
        status = status_of(response)
        if status != 200:
            await self._refused(status, response)
            return
        answer = Answer()
        kind = response.headers.get("Content-Type", "")
        if kind.partition(";")[0].strip().lower() == EVENTS:
            await self._stream(response, answer)
        else:
            body = await response.read()
            answer.whole(body)
            self._begin(response, streamed=False)
            self._back.more(body, 0)
        self._over = True
        if answer.error:
            self._back.refused(Refused(status, (), b""))
            return
        self._engine.heard(self._call, answer, self.upstream)
        self._back.answered(answer.end)

    async def _stream(self, response: aiohttp.ClientResponse, answer: Answer) -> None:
        """Its head waits for the first event: until then another server may answer."""
        async for data in response.content.iter_any():
            if not self._begun:
                self._begin(response, streamed=True)
            self.upstream.hear()
            self._back.more(data, answer.feed(data))
        if not self._begun:  # a stream without an event
            self._begin(response, streamed=True)

    def _begin(self, response: aiohttp.ClientResponse, *, streamed: bool) -> None:
        self._begun = True
        self._back.head(kept(response.headers), streamed=streamed)

    async def _refused(self, status: int, response: aiohttp.ClientResponse) -> None:
        upstream = self.upstream
        answer = Refused(status, kept(response.headers), await response.read())
        self._over = True
        if status in BUSY and self._engine.elsewhere(upstream):
            reason = f"{upstream.name} answers {status}"
            upstream.trip(_pause(response.headers.get("Retry-After")), f"it answers {status}")
            self._back.returned(reason, answer)
            return
        if status >= 500:
            upstream.look()
        self._back.refused(answer)

    def _say_lost(self, reason: str) -> None:
        self._over = True
        if self._begun:
            self._back.lost(reason)
        else:
            self._back.returned(reason)

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._on_over(self)
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("internal error while a call was passed on", exc_info=error)
            if not self._over:
                self._say_lost("internal error of the gateway")


def kept(headers: Mapping[str, str]) -> tuple[tuple[str, str], ...]:
    """Those of an answer that go on to the client."""
    return tuple(
        (name.lower(), value)
        for name, value in headers.items()
        if name.lower() not in OF_THE_CONNECTION
    )


def _pause(retry_after: str | None) -> float:
    try:
        return float(retry_after or PAUSE)
    except ValueError:  # a date
        return PAUSE
