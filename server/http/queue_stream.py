"""A stream that speaks while it waits: its headers leave before its dispatch, and SSE comments tell
where it stands.

    : queue {"queue_position":3,"predicted_wait_ms":1250.0}  at once, and each second
    : queue {"queueing_delay_ms":1311.5}                     at its dispatch
    : keep-alive                                             after `--sse-keep-alive-interval`
                                                             seconds without a byte

Clients ignore comments; proxies count them as bytes. Without `--queue-events` the headers wait for
the dispatch, or for the first keep-alive, whichever is sooner. Once they have left, only the stream
can report a failure.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
from collections.abc import Callable
from typing import Any

from starlette.types import Receive, Scope, Send

from kendall.server.admission.waits import Places
from kendall.server.http.answer import GeneratedAnswer
from kendall.server.http.formats import encode
from kendall.server.http.headers import early_headers
from kendall.server.http.submitted import STREAM_HEADERS

KEEP_ALIVE = b": keep-alive\n\n"


class QueueStream(GeneratedAnswer):
    """The answer to a streamed call under `--queue-events` or `--sse-keep-alive-interval`."""

    _send: Send

    def __init__(self, *call: Any, places: Places | None, keep_alive: float) -> None:
        super().__init__(*call)
        self._places = places
        self._keep_alive = keep_alive  # seconds; infinite: none
        self._news: bytes | None = None  # where it stands, not yet sent
        self._begun = False

    async def _write(self, scope: Scope, receive: Receive, send: Send) -> None:
        self._send = send
        with contextlib.suppress(ConnectionError):
            await self._wait()
            if self._gone:
                return
            if self.error and not self._begun:
                await self._write_error(scope, receive, send)
            elif self._begun:
                await self._write_events(send)
            else:
                await self._write_stream(send)

    async def _wait(self) -> None:
        """Wait until every sequence is dispatched, or none will be."""
        if self._places is None or not self.undispatched:
            await self._until(lambda: self.undispatched == 0)
            return
        last = self._choices[-1].sequence
        assert last is not None
        await self._begin()
        if last.wait_estimate is not None:
            self._on_place(*last.wait_estimate)
        self._places.listen(last.id, self._on_place)
        try:
            while self.undispatched and not (self._gone or self.error):
                await self._until(lambda: self._news or self.undispatched == 0)
                await self._say_news()
        finally:
            self._places.forget(last.id)
        if not (self._gone or self.error):
            await self._say(_comment(queueing_delay_ms=self._delays()[0]))

    async def _until(self, condition: Callable[[], object]) -> None:
        while not (condition() or self._gone or self.error):
            try:
                async with asyncio.timeout(
                    None if math.isinf(self._keep_alive) else self._keep_alive
                ):
                    await self._next_change()
            except TimeoutError:
                await self._begin()
                await self._say(KEEP_ALIVE)

    def _on_place(self, place: int, wait: float | None) -> None:
        known = (
            {} if wait is None or math.isinf(wait) else {"predicted_wait_ms": round(wait * 1e3, 3)}
        )
        self._news = _comment(queue_position=place, **known)
        self.wake()

    async def _begin(self) -> None:
        """The headers, without what is not known yet."""
        if not self._begun:
            self._begun = True
            headers = [
                *early_headers(self._options.request_id, self._choices[-1].sequence),
                *STREAM_HEADERS,
            ]
            await self._send({"type": "http.response.start", "status": 200, "headers": headers})

    async def _say_news(self) -> None:
        news, self._news = self._news, None
        if news is not None:
            await self._say(news)

    async def _say(self, comment: bytes) -> None:
        await self._send({"type": "http.response.body", "body": comment, "more_body": True})


def _comment(**fields: float) -> bytes:
    return b": queue " + encode(fields) + b"\n\n"
