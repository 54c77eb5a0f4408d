"""One server behind the gateway: its connections, its probes, and whether it is given work."""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Awaitable, Callable, Mapping

import aiohttp

from server.engines.http.breaker import Breaker
from server.runtime.clock import clock_of
from server.runtime.wording import brief

log = logging.getLogger("kendall.engine")
LOST = (aiohttp.ClientError, OSError, TimeoutError, ValueError)  # of a request that failed
CONNECT = 5.0  # seconds for a connection
PROBE = 5.0  # seconds for the answer to a probe
SILENT = "it has not answered yet"
LARGEST = 8 << 20  # bytes of what it says of itself
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
    """What failed, in a few words and without an address."""
    if isinstance(error, aiohttp.ClientConnectorDNSError):
        return "its name is not known"
    if isinstance(error, TimeoutError):
        return "no answer in time"
    number = getattr(error, "errno", None)
    if isinstance(error, OSError) and number:
        return os.strerror(number).lower()
    if isinstance(error, aiohttp.ServerDisconnectedError):
        return "it closed the connection"
    if isinstance(error, aiohttp.ClientPayloadError):
        return "it closed the connection in the middle of an answer"
    return brief(f"{type(error).__name__}: {error}".splitlines()[0])


class Upstream:
    """Every method is called on the event loop; `on_change` after it was lost, was busy or came
    back, with the reason. `verify` says what is wrong with one that comes back.
    """

    def __init__(
        self,
        server_id: int,
        url: str,
        key: str | None,
        on_change: Callable[[Upstream, str], None],
        verify: Callable[[Upstream], Awaitable[str | None]],
        *,
        connect: Connect = connector,
    ) -> None:
        self.id, self.url = server_id, url
        self._on_change, self._verify = on_change, verify
        self._loop = asyncio.get_running_loop()
        self._now = clock_of(self._loop)
        self.breaker = Breaker()
        self.leaving = False  # it ends what it has, and gets no more
        self.last_fault: str | None = None  # None while it is well
        self.probe_headers: Mapping[str, str] = {}  # calls go without them: as the client sent them
        self._is_new = False
        self._suspected = False  # a connection failed, and the probe after it is not over
        self.heard_at = self._now()  # the last byte of an answer
        self._health = HEALTH
        self._probing: asyncio.Task[None] | None = None
        self._watching: asyncio.Task[None] | None = None
        self._due: asyncio.TimerHandle | None = None  # of the next probe while it is open
        self._session = aiohttp.ClientSession(
            connector=connect(url),
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=CONNECT),
            headers={} if key is None else {"Authorization": f"Bearer {key}"},
            skip_auto_headers=OWN_HEADERS,
            auto_decompress=False,
            max_line_size=LONGEST_FIELD,
            max_field_size=LONGEST_FIELD,
            max_headers=MOST_FIELDS,
            cookie_jar=aiohttp.DummyCookieJar(),
        )

    @property
    def name(self) -> str:
        """As clients may read it."""
        return f"server {self.id}"

    @property
    def takes_work(self) -> bool:
        """Whether requests may go there."""
        return self.breaker.closed and not self.leaving

    def post(
        self, path: str, body: bytes, headers: Mapping[str, str]
    ) -> aiohttp.client._RequestContextManager:
        """Send a call. Raises LOST."""
        return self._session.post(
            self.url + path, data=body, headers=headers, allow_redirects=False
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
                body = bytearray()
                async for data in answer.content.iter_any():
                    body += data
                    if len(body) > LARGEST:
                        raise OSError(f"more than {LARGEST >> 20} MiB in answer to {path}")
                return answer.status, bytes(body)

    async def ask(self, path: str, body: bytes, limit: float) -> tuple[int, bytes]:
        """POST something small that is answered at once. Raises LOST."""
        async with asyncio.timeout(limit):
            async with self.post(path, body, {"Content-Type": "application/json"}) as answer:
                return answer.status, await answer.read()

    def hear(self) -> None:
        """A byte of an answer came."""
        self.heard_at = self._now()
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
        """It was not there when the engine started."""
        while not self.breaker.lost:
            self._failed(reason)

    def trip(self, pause: float, reason: str) -> None:
        """It is busy: no work for a while."""
        if self.breaker.closed:
            self.last_fault = reason
            self.breaker.trip(self._now(), pause)
            self._look_when_due()
            self._on_change(self, reason)

    def await_answer(self) -> None:
        """It is new: it gets work once it has answered a probe, and the first one begins now."""
        self.last_fault, self._is_new = SILENT, True
        while not self.breaker.lost:
            self.breaker.fail(self._now())
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
        return self._probing

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
                await asyncio.shield(self.look())

    async def _probe(self) -> None:
        began = self._now()
        self.breaker.probe()
        comes_back = self.breaker.state == "half-open"
        fault = await self.fault()
        if fault is None and comes_back:
            fault = await self._verify(self)
        self._suspected = False
        if fault is None:
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
        """What is wrong with its answer to a probe; None where it is well."""
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
        self.breaker.fail(self._now())
        if before != "open" and self.breaker.state == "open":
            self._look_when_due()
        if self.breaker.lost and not was_lost:
            self._on_change(self, reason)

    def _look_when_due(self) -> None:
        self._due = self._loop.call_at(self.breaker.due, self.look)
