"""One server behind the gateway: its connections, its probes, and whether it is given work."""

from __future__ import annotations

import asyncio
import logging
import math
import os
import ssl
from collections.abc import Awaitable, Callable, Iterable
from typing import Any

import aiohttp
from multidict import CIMultiDict

from kendall.server.engines.http.breaker import Breaker
from kendall.server.engines.http.standing import ServerStanding
from kendall.server.runtime.clock import clock_of
from kendall.server.runtime.passed_headers import written
from kendall.server.runtime.wording import brief

log = logging.getLogger("kendall.engine")
LOST = (aiohttp.ClientError, OSError, TimeoutError, ValueError)  # of a request that failed
CONNECT = 5.0  # seconds for a connection
PROBE = 5.0  # seconds for the answer to a probe
SILENT = "it has not answered yet"
LARGEST = 8 << 20  # bytes of what it says of itself
MOST_MODELS = 256  # whose names in answers are kept
MOST_ALIASES = 8  # times that they changed, after which they say nothing
LONGEST_FIELD, MOST_FIELDS = 64 << 10, 1024  # bytes of a line of an answer's head; lines
EVERY = 5.0  # seconds between the probes of a server that answers
HEALTH = "/health"
ITSELF = 508  # of a gateway to its own probe
NO_SUCH_ROUTE = (404, 405, 501)
MODELS = "/v1/models"  # probed in place of /health where there is none
OWN_HEADERS = ("User-Agent", "Accept-Encoding", "Accept")  # aiohttp's: the client's own go
Connect = Callable[[str], aiohttp.BaseConnector]


def connector(url: str) -> aiohttp.BaseConnector:
    """Without a limit: the queue has one. Idle connections are kept for less time than servers
    keep them (uvicorn: 5 s).
    """
    del url
    return aiohttp.TCPConnector(limit=0, keepalive_timeout=4.0, ttl_dns_cache=30)


def status_of(response: aiohttp.ClientResponse) -> int:
    """Raises OSError where it is none of HTTP: no answer with it can go on."""
    if not 200 <= response.status < 600:
        raise OSError(f"it answered with the status {response.status}")
    return response.status


def reason_of(error: BaseException) -> str:
    """The cause of a failure, in a few words and without an address."""
    if isinstance(error, aiohttp.ClientConnectorDNSError):
        return "its name is not known"
    if isinstance(error, TimeoutError):
        return "no answer in time"
    if isinstance(error, aiohttp.ClientSSLError):
        return _reason_of_tls(error)
    number = getattr(error, "errno", None)
    if isinstance(error, OSError) and number:
        return os.strerror(number).lower()
    if isinstance(error, aiohttp.ServerDisconnectedError | aiohttp.ClientPayloadError):
        begun = isinstance(error, aiohttp.ClientPayloadError)
        return "it closed the connection" + (" in the middle of an answer" if begun else "")
    return brief(f"{type(error).__name__}: {error}".splitlines()[0])


def _reason_of_tls(error: aiohttp.ClientSSLError) -> str:
    """Its number, of OpenSSL, would be taken for one of the system."""
    cause = error.__cause__ or error
    if isinstance(cause, ssl.SSLCertVerificationError):
        return f"its certificate is not trusted: {cause.verify_message}"
    said = getattr(cause, "reason", None) or type(cause).__name__
    return brief("no TLS connection: " + said.replace("_", " ").lower())


class RawRequest(aiohttp.ClientRequest):
    """Its head is written with the bytes that its headers had (`server.runtime.passed_headers`)."""

    async def write_bytes(self, writer: Any, conn: Any, content_length: int | None = None) -> None:
        """Called with the head in the writer's buffer, unsent."""
        head = writer._headers_buf
        if head is not None and not head.isascii():
            writer._headers_buf = written(head)
        await super().write_bytes(writer, conn, content_length)


class Upstream:
    """Every method is called on the event loop; `on_change` after it was lost, was busy, was put
    aside or came back, with the reason. `verify` says what is wrong with one that comes back,
    `models` with the models of one that serves.
    """

    def __init__(
        self,
        server_id: int,
        url: str,
        key: str | None,
        *,
        on_change: Callable[[Upstream, str], None],
        verify: Callable[[Upstream], Awaitable[str | None]],
        models: Callable[[Upstream], Awaitable[str | None]],
        connect: Connect = connector,
    ) -> None:
        self.id, self.url = server_id, url
        self._on_change, self._verify, self._models = on_change, verify, models
        self._loop = asyncio.get_running_loop()
        self.now = clock_of(self._loop)
        self.breaker, self.standing = Breaker(), ServerStanding()
        self.leaving = False  # it ends what it has, and gets no more
        self.last_fault: str | None = None  # None while it is well
        # calls go without them: as the client sent them
        self.probe_headers: dict[str, str] = {}
        self.tokenizes_at = -math.inf  # instant from which it is asked for counts of tokens
        self._answers_as: dict[str, str] = {}  # the model that its answers name, by that of a call
        self._aliases = 0  # times that it was another one
        self._is_new = False
        self._suspected = False  # a connection failed, and the probe after it is not over
        self.heard_at = self.now()  # the last byte of an answer
        self._health = HEALTH
        self._probing: asyncio.Task[None] | None = None
        self._watching: asyncio.Task[None] | None = None
        self._due: asyncio.TimerHandle | None = None  # of the next probe while it is open
        self._session = aiohttp.ClientSession(
            connector=connect(url),
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=CONNECT),
            headers={} if key is None else {"Authorization": f"Bearer {key}"},
            skip_auto_headers=OWN_HEADERS,
            request_class=RawRequest,
            auto_decompress=False,
            max_line_size=LONGEST_FIELD,
            max_field_size=LONGEST_FIELD,
            max_headers=MOST_FIELDS,
            cookie_jar=aiohttp.DummyCookieJar(),
        )

    @property
    def name(self) -> str:
        """The server's name as clients may read it."""
        return f"server {self.id}"

    @property
    def takes_work(self) -> bool:
        """Whether requests may go there."""
        return self.breaker.closed and not self.leaving

    def post(
        self, path: str, body: bytes, headers: Iterable[tuple[str, str]]
    ) -> aiohttp.client._RequestContextManager:
        """Send a call. Raises LOST."""
        return self._session.post(
            self.url + path, data=body, headers=CIMultiDict(headers), allow_redirects=False
        )

    async def get(self, path: str) -> tuple[int, bytes]:
        """Status and body. Raises LOST."""
        if self._session.closed:
            raise ConnectionError("it was removed")
        async with asyncio.timeout(PROBE):
            asking = self._session.get(
                self.url + path, headers=self.probe_headers, allow_redirects=False
            )
            async with asking as answer:
                return answer.status, await bounded(answer, LARGEST)

    async def ask(self, path: str, body: bytes, limit: float) -> tuple[int, bytes]:
        """POST something small that is answered at once. Raises LOST."""
        async with asyncio.timeout(limit):
            async with self.post(path, body, [("Content-Type", "application/json")]) as answer:
                return answer.status, await bounded(answer, LARGEST)

    def leave_unasked(self, seconds: float) -> None:
        """It did not count the tokens of a prompt: it is not asked for a while."""
        self.tokenizes_at = self.now() + seconds

    def has_other_model(self, asked: str, named: str | None) -> bool:
        """Whether its answer to a call for a model names another one than its answers before."""
        if named is None:
            return False
        if asked not in self._answers_as and len(self._answers_as) >= MOST_MODELS:
            return False
        before = self._answers_as.get(asked, named)
        self._answers_as[asked] = named
        self._aliases += before != named
        return before != named and self._aliases <= MOST_ALIASES

    def hear(self) -> None:
        """A byte of an answer came."""
        self.heard_at = self.now()
        self.breaker.succeed(probed=False)

    def lose(self, reason: str) -> None:
        """A connection failed: it is probed at once. Until that probe is over, other connections
        that fail say no more: calls that a server cannot bear may break off at once, and it serves
        all others.
        """
        if not self._suspected:
            self._suspected = True
            self._failed(reason)
        self.look()

    def give_up(self, reason: str) -> None:
        """It was not there when the engine started, or is not what it was."""
        self.last_fault, was_lost = reason, self.breaker.lost
        self.breaker.give_up(self.now())
        if not was_lost:
            self._look_when_due()
            self._on_change(self, reason)

    def trip(self, pause: float, reason: str) -> None:
        """It is busy: no work for a while."""
        if self.breaker.closed:
            self.last_fault = reason
            self.breaker.trip(self.now(), pause)
            self._look_when_due()
            self._on_change(self, reason)

    def put_aside(self, reason: str) -> None:
        """Its calls fail where other servers answer: no work for a while, then one call at once."""
        if self.breaker.closed:
            self.last_fault = reason
            self.breaker.put_aside(self.now(), self.standing.put_aside(self.now()))
            self._look_when_due()
            self._on_change(self, reason)

    def recall(self) -> None:
        """It is put aside, and needed."""
        if self.breaker.aside:
            self.breaker.recall(self.now())
            self.look()

    def await_answer(self) -> None:
        """It is new: it gets work once it has answered a probe, and the first one begins now."""
        self.last_fault, self._is_new = SILENT, True
        self.breaker.give_up(self.now())
        self.watch()
        self.look()

    def watch(self) -> None:
        """Probe it from now on."""
        if self._watching is None:
            self._watching = asyncio.create_task(self._watch(), name=f"probes-{self.id}")

    def look(self) -> asyncio.Task[None]:
        """The probe under way, or one that begins now."""
        if self._probing is None or self._probing.done():
            self._probing = asyncio.create_task(self._probe())
            self._probing.add_done_callback(self._looked)
        return self._probing

    def _looked(self, probing: asyncio.Task[None]) -> None:
        if not probing.cancelled() and (error := probing.exception()) is not None:
            log.error("%s: what a probe found had no effect", self.name, exc_info=error)

    async def close(self) -> None:
        """No more probes, no connection is left."""
        if self._due is not None:
            self._due.cancel()
        tasks = [task for task in (self._watching, self._probing) if task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self._session.close()

    async def _watch(self) -> None:
        while True:
            await asyncio.sleep(EVERY)
            if self.breaker.closed:
                await asyncio.wait([self.look()])  # it says itself what is wrong with it

    async def _probe(self) -> None:
        """Whatever it answers: a probe that ended in an error would be the last one."""
        began = self.now()
        if self.breaker.lost or began >= self.breaker.due:  # not one that asked for a pause
            self.breaker.probe()
        comes_back = self.breaker.state == "half-open"
        fault = other = None
        try:
            fault = await self.fault()
            if fault is None and comes_back:
                fault = await self._verify(self)
            elif fault is None:
                other = await self._models(self)
        except Exception:
            log.exception("%s (%s): a probe failed; it is repeated", self.name, self.url)
            fault = "its answer to a probe cannot be read"
        self._probed(fault, other, began, comes_back=comes_back)

    def _probed(
        self, fault: str | None, other: str | None, began: float, *, comes_back: bool
    ) -> None:
        """`fault`: what is wrong with its answer; `other`: with its models, which it has changed
        for good.
        """
        self._suspected = False
        if other is not None:
            self.give_up(other)
        elif fault is None:
            self.breaker.succeed(probed=True)
            if not self.breaker.closed:
                return  # it was lost or busy again meanwhile
            self.last_fault = None
            if comes_back:
                again = "it answers" if self._is_new else "it answers again"
                self._is_new = False
                self._on_change(self, again)
        elif comes_back or self.heard_at <= began:  # else it is only slow to answer probes
            self._failed(fault)

    async def fault(self) -> str | None:
        """The fault in its answer to a probe; None where there is none."""
        try:
            status, _ = await self.get(self._health)
            if status in NO_SUCH_ROUTE and self._health != MODELS:
                self._health = MODELS
                status, _ = await self.get(MODELS)
        except LOST as error:
            return reason_of(error)
        if status == ITSELF:
            return "it is this gateway itself"
        return None if status < 400 else f"it answers {status} to {self._health}"

    def _failed(self, reason: str) -> None:
        self.last_fault = reason
        before, was_lost = self.breaker.state, self.breaker.lost
        self.breaker.fail(self.now())
        if before != "open" and self.breaker.state == "open":
            self._look_when_due()
        if self.breaker.lost and not was_lost:
            self._on_change(self, reason)

    def _look_when_due(self) -> None:
        if self._due is not None:
            self._due.cancel()
        self._due = self._loop.call_at(self.breaker.due, self.look)


async def bounded(answer: aiohttp.ClientResponse, most: int) -> bytes:
    """Its body. Raises OSError where it is larger, or LOST."""
    body = bytearray()
    async for data in answer.content.iter_any():
        body += data
        if len(body) > most:
            raise OSError(f"more than {most >> 20} MiB in answer to {answer.url.path}")
    return bytes(body)
