"""One server behind: its probes and what follows from them, before a server that the test writes,
on virtual time.
"""

from __future__ import annotations

import asyncio
import errno
import math
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import aiohttp
import pytest

from kendall.server.engines.http.upstream import Upstream, connector, reason_of
from tests.server.upstream_stub import Stub, sockets
from tests.virtual_time import run_with_sockets

NAMED = "no such file or directory"  # of a server that is not there
MIB = 1 << 20


class Watched:
    """A server, and what is told of it; `wrong` and `others` say what is the matter with it and
    with its models.
    """

    def __init__(
        self,
        stub: Stub,
        key: str | None = None,
        on_change: Callable[[Upstream, str], None] | None = None,
    ) -> None:
        self.changes: list[tuple[float, str, str]] = []
        self.asked: list[str] = []
        self.wrong: str | None = None
        self.others: str | None = None
        self.fails: Exception | None = None
        self.upstream = Upstream(
            3,
            "http://stub-3",
            key,
            on_change=on_change or self.changed,
            verify=self.verify,
            models=self.models,
            connect=lambda _: aiohttp.UnixConnector(stub.path),
        )
        self.upstream.probe_headers = {"x-probe": "1"}

    def changed(self, upstream: Upstream, reason: str) -> None:
        self.changes.append((upstream.now(), upstream.breaker.state, reason))

    async def verify(self, upstream: Upstream) -> str | None:
        assert upstream is self.upstream
        self.asked.append("verify")
        return self.wrong

    async def models(self, upstream: Upstream) -> str | None:
        self.asked.append("models")
        if self.fails is not None:
            raise self.fails
        return self.others


@asynccontextmanager
async def watched(stub: Stub, *, up: bool = True, **options: Any) -> AsyncIterator[Watched]:
    if up:
        await stub.up()
    made = Watched(stub, **options)
    try:
        yield made
    finally:
        await made.upstream.close()
        stub.down()


def play(test: Callable[[Stub], Awaitable[None]]) -> None:
    with sockets() as (stub,):
        run_with_sockets(test(stub))


# what it answers


@pytest.mark.parametrize(
    ("health", "models", "fault"),
    [
        (200, 200, None),
        (399, 500, None),
        (400, 200, "it answers 400 to /health"),
        (503, 200, "it answers 503 to /health"),
        (404, 200, None),
        (405, 200, None),
        (501, 200, None),
        (404, 401, "it answers 401 to /v1/models"),
        (404, 404, "it answers 404 to /v1/models"),
        (508, 200, "it is this gateway itself"),
        (406, 200, "it answers 406 to /health"),
        (500, 200, "it answers 500 to /health"),
        (502, 200, "it answers 502 to /health"),
        (507, 200, "it answers 507 to /health"),
    ],
)
def test_a_probe_is_answered_by_its_health_or_else_by_its_models(
    health: int, models: int, fault: str | None
) -> None:
    async def test(stub: Stub) -> None:
        stub.routes |= {"/health": (health, None), "/v1/models": (models, None)}
        async with watched(stub, key="k") as made:
            assert await made.upstream.fault() == fault
            assert await made.upstream.fault() == fault
        paths = [each.path for each in stub.asked]
        falls = health in (404, 405, 501)
        assert paths == ["/health", *["/v1/models"] * 2] if falls else ["/health"] * 2
        assert {each.headers["x-probe"] for each in stub.asked} == {"1"}
        assert {each.headers["authorization"] for each in stub.asked} == {"bearer k"}

    play(test)


def test_a_server_that_says_too_much_or_nothing_has_not_answered() -> None:
    async def test(stub: Stub) -> None:
        stub.routes |= {"/most": (200, b"x" * 8 * MIB), "/more": (200, b"x" * (8 * MIB + 1))}
        async with watched(stub) as made:
            status, body = await made.upstream.get("/most")
            assert (status, len(body)) == (200, 8 * MIB)
            with pytest.raises(OSError, match="more than 8 MiB in answer to /more"):
                await made.upstream.get("/more")
            stub.routes["/tokenize"] = (200, {"count": 1})
            assert await made.upstream.ask("/tokenize", b"{}", 2.0) == (200, b'{"count": 1}')
            assert stub.asked[-1].headers["content-type"] == "application/json"
            stub.frozen = True
            began = made.upstream.now()
            assert await made.upstream.fault() == "no answer in time"
            assert made.upstream.now() - began == 5.0
            with pytest.raises(TimeoutError):
                await made.upstream.ask("/tokenize", b"{}", 2.0)
            assert made.upstream.now() - began == 7.0
        with pytest.raises(ConnectionError, match="it was removed"):
            await made.upstream.get("/health")

    play(test)


def verification() -> aiohttp.ClientConnectorCertificateError:
    error = ssl.SSLCertVerificationError(1, "x")
    error.verify_message = "self-signed certificate"
    made = aiohttp.ClientConnectorCertificateError(None, error)  # type: ignore[arg-type]
    made.__cause__ = error
    return made


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (TimeoutError(), "no answer in time"),
        (ConnectionRefusedError(errno.ECONNREFUSED, "x"), "connection refused"),
        (aiohttp.ServerDisconnectedError(), "it closed the connection"),
        (aiohttp.ClientPayloadError("x"), "it closed the connection in the middle of an answer"),
        (ValueError("one line\nand more"), "ValueError: one line"),
        (OSError("no number"), "OSError: no number"),
        (
            aiohttp.ClientConnectorDNSError(None, OSError(-2, "x")),  # type: ignore[arg-type]
            "its name is not known",
        ),
        (verification(), "its certificate is not trusted: self-signed certificate"),
        (
            aiohttp.ClientConnectorSSLError(None, OSError(1, "x")),  # type: ignore[arg-type]
            "no TLS connection: clientconnectorsslerror",
        ),
    ],
)
def test_a_failure_has_few_words_without_an_address(error: Exception, words: str) -> None:
    assert reason_of(error) == words


def test_connections_are_not_counted() -> None:
    """The queue bounds the calls."""

    async def main() -> None:
        made = connector("http://x")
        assert made.limit == made.limit_per_host == 0
        await made.close()

    asyncio.run(main())


# whether it is given work


def test_a_server_is_probed_every_five_seconds_lost_after_two_failures_and_verified_when_back() -> (
    None
):
    async def test(stub: Stub) -> None:
        async with watched(stub) as made:
            upstream = made.upstream
            upstream.watch()
            upstream.watch()
            await asyncio.sleep(12.5)
            assert [each.path for each in stub.asked] == ["/health"] * 2
            assert (made.asked, made.changes) == (["models"] * 2, [])
            stub.down()
            await asyncio.sleep(5)
            assert (upstream.takes_work, upstream.last_fault) == (True, NAMED)
            await asyncio.sleep(5)
            assert made.changes == [(20.0, "open", NAMED)]
            assert not upstream.takes_work
            # probes at 20.5 and 21.5 fail; the pause doubles: the next ones are at 23.5 and 27.5
            await asyncio.sleep(0.5)
            made.wrong = "it has another model"
            await stub.up()
            await asyncio.sleep(3)
            assert (made.asked[2:], upstream.last_fault) == (["verify"], "it has another model")
            made.wrong = None
            await asyncio.sleep(5)
            assert made.changes[1:] == [(27.5, "closed", "it answers again")]
            assert (made.asked[2:4], upstream.last_fault) == (["verify"] * 2, None)

    play(test)


def test_after_a_connection_that_failed_it_is_probed_at_once_and_others_say_no_more() -> None:
    async def test(stub: Stub) -> None:
        async with watched(stub) as made:
            upstream = made.upstream
            for _ in range(3):
                upstream.lose("it broke off")
            assert (upstream.breaker.failures, upstream.last_fault) == (1, "it broke off")
            assert upstream.look() is upstream.look()
            await upstream.look()
            assert (upstream.breaker.failures, upstream.last_fault) == (0, None)
            assert len(stub.asked) == 1
            upstream.lose("it broke off")
            assert upstream.breaker.failures == 1, "one after the probe says something again"
            stub.down()
            await asyncio.sleep(0.1)
            assert made.changes == [(0.0, "open", NAMED)]

    play(test)


def test_a_slow_probe_of_a_server_that_is_heard_meanwhile_says_nothing() -> None:
    async def test(stub: Stub) -> None:
        stub.frozen = True
        async with watched(stub) as made:
            for heard, failures in ((True, 0), (False, 1)):
                probe = made.upstream.look()
                await asyncio.sleep(3)
                if heard:
                    made.upstream.hear()
                await probe
                assert made.upstream.breaker.failures == failures

    play(test)


@pytest.mark.parametrize("how", ["trip", "put_aside", "give_up"])
def test_one_that_gets_no_work_for_a_while_is_told_once_and_probed_when_it_is_due(how: str) -> None:
    due = {"trip": 3.0, "put_aside": 5.0, "give_up": 0.5}[how]

    async def test(stub: Stub) -> None:
        async with watched(stub) as made:
            upstream = made.upstream
            given = (3.0, "why") if how == "trip" else ("why",)
            for _ in range(2):
                getattr(upstream, how)(*given)
            assert made.changes == [(0.0, "open", "why")]
            assert (upstream.last_fault, upstream.breaker.lost) == ("why", how == "give_up")
            assert upstream.standing.room == (1 if how == "put_aside" else None)
            await asyncio.sleep(due - 0.1)
            assert stub.asked == []
            await asyncio.sleep(0.2)
            assert [each.path for each in stub.asked] == ["/health"]
            assert made.changes[1:] == [(pytest.approx(due), "closed", "it answers again")]
            assert (made.asked, upstream.last_fault) == (["verify"], None)

    play(test)


def test_one_that_asked_for_a_pause_is_not_probed_before_it_is_over() -> None:
    async def test(stub: Stub) -> None:
        async with watched(stub) as made:
            made.upstream.trip(4.0, "busy")
            await made.upstream.look()
            assert made.upstream.breaker.state == "open"
            assert made.asked == ["models"]
            await asyncio.sleep(4.1)
            assert made.upstream.breaker.closed

    play(test)


def test_one_that_is_put_aside_is_probed_at_once_where_it_is_needed() -> None:
    async def test(stub: Stub) -> None:
        async with watched(stub) as made:
            made.upstream.recall()
            await asyncio.sleep(0.1)
            assert stub.asked == [], "it serves"
            made.upstream.put_aside("why")
            made.upstream.recall()
            await asyncio.sleep(0.1)
            assert made.upstream.takes_work
            assert len(made.changes) == 2

    play(test)


def test_a_new_one_gets_work_once_it_has_answered() -> None:
    async def test(stub: Stub) -> None:
        async with watched(stub, up=False) as made:
            upstream = made.upstream
            upstream.await_answer()
            assert (upstream.last_fault, upstream.takes_work) == ("it has not answered yet", False)
            await asyncio.sleep(3)
            assert made.changes == []
            await stub.up()
            await asyncio.sleep(10)
            assert [each[1:] for each in made.changes] == [("closed", "it answers")]
            upstream.leaving = True
            assert not upstream.takes_work
            upstream.leaving = False
            upstream.give_up("gone")
            await asyncio.sleep(2)
            assert made.changes[-1][1:] == ("closed", "it answers again")

    play(test)


def test_one_whose_models_have_changed_is_given_up() -> None:
    async def test(stub: Stub) -> None:
        async with watched(stub) as made:
            made.others = "it has another model"
            await made.upstream.look()
            assert made.changes == [(0.0, "open", "it has another model")]
            assert made.upstream.breaker.lost

    play(test)


def test_a_probe_that_fails_in_an_unknown_way_is_a_failure_and_not_the_last_one(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def test(stub: Stub) -> None:
        async with watched(stub) as made:
            made.fails = LookupError("nobody thought of it")
            await made.upstream.look()
            fault = "its answer to a probe cannot be read"
            assert (made.upstream.breaker.failures, made.upstream.last_fault) == (1, fault)
            made.fails = None
            await made.upstream.look()
            assert (made.upstream.breaker.failures, made.upstream.last_fault) == (0, None)

    play(test)
    assert caplog.messages == ["server 3 (http://stub-3): a probe failed; it is repeated"]


def test_what_is_made_of_a_probe_may_fail_too(caplog: pytest.LogCaptureFixture) -> None:
    def fails(upstream: Upstream, reason: str) -> None:
        raise LookupError(reason)

    async def test(stub: Stub) -> None:
        async with watched(stub, on_change=fails) as made:
            made.others = "it has another model"
            await asyncio.gather(made.upstream.look(), return_exceptions=True)

    play(test)
    assert caplog.messages == ["server 3: what a probe found had no effect"]


# small things


def test_names_in_answers_are_compared_with_those_before() -> None:
    async def test(stub: Stub) -> None:
        async with watched(stub) as made:
            other = made.upstream.has_other_model
            assert not other("m", None)
            assert not other("m", "a")
            assert not other("m", "a")
            assert not other("n", "b"), "of another model that was asked for"
            assert [other("m", "b" if n % 2 else "a") for n in range(1, 10)] == [True] * 8 + [False]
            assert not other("m", "c"), "they change too often to say anything"

        async with watched(stub) as made:
            other = made.upstream.has_other_model
            for number in range(256):
                assert not other(str(number), "a")
            assert [other(str(number), name) for number, name in ((256, "a"), (256, "b"))] == [
                False,
                False,
            ]
            assert other("255", "b"), "of those that are known"

    play(test)


def test_one_that_did_not_count_is_left_unasked_for_a_while() -> None:
    async def test(stub: Stub) -> None:
        async with watched(stub) as made:
            assert made.upstream.tokenizes_at == -math.inf
            await asyncio.sleep(2)
            made.upstream.leave_unasked(30.0)
            assert made.upstream.tokenizes_at == 32.0
            assert (made.upstream.name, made.upstream.heard_at) == ("server 3", 0.0)

    play(test)
