"""The end of a gateway on virtual time: which connection is closed when, what the log counts."""

from __future__ import annotations

import asyncio
import logging
import threading
from types import SimpleNamespace
from typing import Any

import pytest

from kendall.server.operations.shutdown import (
    CLOSE,
    LINGER,
    DrainLog,
    ExitBound,
    break_off,
    say_close,
    wind_down,
)
from tests.virtual_time import run_virtual


class Connection:
    """Ends when it is told to."""

    def __init__(self, server: Server, *, idle: bool = True) -> None:
        self._server, self.idle = server, idle
        self.hung_up_at: float | None = None
        self.transport = SimpleNamespace(abort=self._abort)
        self.aborted = False
        server.server_state.connections.add(self)

    def hang_up(self) -> None:
        self.hung_up_at = asyncio.get_running_loop().time()
        self._server.server_state.connections.discard(self)

    def _abort(self) -> None:
        self.aborted = True


class Server:
    """As much of uvicorn's as is read."""

    def __init__(self) -> None:
        self.force_exit = False
        self.config = SimpleNamespace(timeout_graceful_shutdown=10, encoded_headers=[(b"a", b"b")])
        self.server_state = SimpleNamespace(
            connections=set[Any](), default_headers=[(b"date", b"today")]
        )
        self.closed_at: float | None = None
        self.servers = [SimpleNamespace(close=self._close)]

    def _close(self) -> None:
        self.closed_at = asyncio.get_running_loop().time()


async def ended_at(server: Server) -> float:
    await wind_down(server, [])  # type: ignore[arg-type]
    return asyncio.get_running_loop().time()


def test_without_a_connection_it_ends_at_once_and_listens_no_more() -> None:
    async def main() -> None:
        server = Server()
        assert await ended_at(server) == 0.0
        assert server.closed_at == 0.0

    run_virtual(main())


def test_a_connection_without_a_request_is_closed_after_a_second() -> None:
    async def main() -> None:
        server = Server()
        connection = Connection(server)
        end = await ended_at(server)
        assert server.closed_at == pytest.approx(LINGER, abs=0.051)
        assert connection.hung_up_at == pytest.approx(LINGER, abs=0.051)
        assert end == pytest.approx(LINGER, abs=0.11)

    run_virtual(main())


def test_the_second_counts_from_the_end_of_its_last_answer() -> None:
    async def main() -> None:
        server, loop = Server(), asyncio.get_running_loop()
        busy, again = Connection(server, idle=False), Connection(server)
        loop.call_at(3.0, setattr, busy, "idle", True)
        loop.call_at(0.5, setattr, again, "idle", False)
        loop.call_at(0.7, setattr, again, "idle", True)
        end = await ended_at(server)
        assert again.hung_up_at == pytest.approx(1.7, abs=0.11)
        assert busy.hung_up_at == pytest.approx(4.0, abs=0.11)
        assert end == pytest.approx(4.0, abs=0.11)

    run_virtual(main())


def test_one_that_goes_on_is_waited_for_until_time_is_up_or_nobody_waits() -> None:
    async def main() -> None:
        server, loop = Server(), asyncio.get_running_loop()
        busy = Connection(server, idle=False)
        assert await ended_at(server) == pytest.approx(10.0, abs=0.051)
        assert busy.hung_up_at is None
        loop.call_later(2.0, setattr, server, "force_exit", True)
        assert await ended_at(server) == pytest.approx(12.0, abs=0.11)

    run_virtual(main())


def test_answers_that_have_not_begun_close_their_connection_and_the_rest_is_broken_off() -> None:
    server = Server()
    begun, waits, idle = (Connection(server) for _ in range(3))
    for connection, started in ((begun, True), (waits, False)):
        connection.cycle = SimpleNamespace(response_started=started, keep_alive=True)  # type: ignore[attr-defined]
    for _ in range(2):
        say_close(server)  # type: ignore[arg-type]
    assert server.config.encoded_headers == [(b"a", b"b"), CLOSE]
    assert server.server_state.default_headers == [(b"date", b"today"), CLOSE]
    assert begun.cycle.keep_alive  # type: ignore[attr-defined]
    assert not waits.cycle.keep_alive  # type: ignore[attr-defined]
    break_off(server)  # type: ignore[arg-type]
    assert begun.aborted
    assert idle.aborted


def gateway(**batcher: int) -> Any:
    return SimpleNamespace(
        now=lambda: 100.0,
        lifecycle=SimpleNamespace(started=bool(batcher)),
        batcher=SimpleNamespace(**batcher),
        settings=SimpleNamespace(shutdown_timeout=30.0),
    )


def test_the_log_says_what_a_drain_was_for_and_what_it_cut_off(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO, "kendall")
    log, draining = DrainLog(), gateway(unanswered=5, queue_length=3, in_service=2)
    log.end(draining)
    log.begin(draining)
    log.begin(draining)
    draining.batcher.unanswered = 2
    log.cut(draining)
    draining.batcher.unanswered, draining.now = 1, lambda: 101.25
    log.end(draining)
    starting = DrainLog()
    starting.begin(gateway())
    starting.cut(gateway())
    starting.end(gateway())
    assert caplog.messages == [
        "draining: 3 waiting, 2 in service; within 30 s",
        "drained in 1.2 s: 2 sequences ended, 3 cut off",
    ]


def test_the_bound_on_the_exit_is_set_once_and_can_be_lifted() -> None:
    def timers() -> set[threading.Thread]:
        return {each for each in threading.enumerate() if isinstance(each, threading.Timer)}

    before, bound = timers(), ExitBound()
    bound.cancel()  # none was set
    bound.start(600.0)
    bound.start(0.0)  # else this process would end now
    (timer,) = timers() - before
    assert timer.daemon
    bound.cancel()
    timer.join(60)
    assert not timer.is_alive()
