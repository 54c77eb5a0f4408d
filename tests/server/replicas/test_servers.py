"""Replicas added and removed while the gateway serves."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from kendall.server.engines.base import Capabilities
from tests.server.asgi import call, running
from tests.server.mortal import MortalEngine, words
from tests.server.replicas.pooled import Pooled, pooled
from tests.virtual_time import run_virtual

SLOW = "k1=0,k2=0,k3=0,k4=0.02"
Test = Callable[[Pooled], Awaitable[None]]


def play(test: Test, **options: Any) -> None:
    async def main() -> None:
        async with pooled(**options) as made:
            await test(made)

    run_virtual(main())


def text(made: Any) -> str:
    return str(made.json()["choices"][0]["text"])


def test_a_server_that_is_added_joins_when_it_is_up() -> None:
    async def test(pool: Pooled) -> None:
        calls = [pool.ask(100, number) for number in range(3)]
        await asyncio.sleep(0.01)
        assert (pool.in_service, pool.gateway.batcher.queue_length) == ([1, 1], 1)
        epoch = pool.gateway.batcher.epoch
        answer = await pool.resize(3)
        assert (answer.status, answer.json()["replicas"]) == (200, 3)
        assert await pool.states() == {0: "serving", 1: "serving", 2: "starting"}
        assert pool.gateway.batcher.epoch == epoch
        await asyncio.sleep(0.01)
        assert await pool.states() == {0: "serving", 1: "serving", 2: "serving"}
        assert pool.gateway.servers is not None
        assert pool.gateway.servers._starts == {}, "what is over is forgotten"
        assert (pool.in_service, pool.gateway.batcher.queue_length) == ([1, 1, 1], 0)
        assert pool.gateway.batcher.epoch == epoch + 1
        assert pool.gateway.batcher.capabilities.servers == 3
        await asyncio.gather(*(made.task for made in calls))
        assert {record.server_id for record in pool.records} == {0, 1, 2}

    play(test, policy="single", law=SLOW)


def test_a_server_that_is_removed_ends_what_it_has_and_gets_nothing_new() -> None:
    async def test(pool: Pooled) -> None:
        calls = [pool.ask(100, number) for number in range(4)]
        await asyncio.sleep(0.01)
        epoch = pool.gateway.batcher.epoch
        answer = await pool.resize(1)
        assert (answer.status, answer.json()["replicas"]) == (200, 1)
        assert await pool.states() == {0: "serving", 1: "draining"}
        assert [each["in_service"] for each in (await pool.servers())["servers"]] == [1, 1]
        assert (pool.in_service, pool.gateway.batcher.epoch) == ([1, 1], epoch + 1)
        await asyncio.sleep(1.9)
        assert await pool.states() == {0: "serving", 1: "draining"}
        await asyncio.gather(*(made.task for made in calls))
        assert await pool.states() == {0: "serving"}
        assert not pool.engines[1].alive
        assert sorted(record.server_id or 0 for record in pool.records) == [0, 0, 0, 1]
        assert {(record.outcome, record.interruptions) for record in pool.records} == {
            ("completed", 0)
        }
        again = await pool.resize(2)
        assert again.status == 200
        await asyncio.sleep(3.0)
        more = [pool.ask(10, number) for number in range(2)]
        await asyncio.gather(*(made.task for made in more))
        assert {record.server_id for record in pool.records[-2:]} == {0, 1}

    play(test, policy="single", law=SLOW)


def test_a_server_that_dies_while_it_is_removed_loses_nothing_and_does_not_come_back() -> None:
    async def test(pool: Pooled) -> None:
        calls = [pool.ask(100, number) for number in range(2)]
        await asyncio.sleep(0.01)
        await pool.resize(1)
        pool.engines[1].kill()
        await asyncio.gather(*(made.task for made in calls))
        assert [(made.status, text(made)) for made in calls] == [(200, words(100))] * 2
        await asyncio.sleep(5.0)
        assert await pool.states() == {0: "serving"}
        assert pool.engines[1].life == 1

    play(test, policy="single", law=SLOW)


def test_a_server_that_is_removed_during_a_trial_ends_it_and_gets_nothing_new() -> None:
    async def test(pool: Pooled) -> None:
        calls = [pool.ask(100, number) for number in range(4)]
        await asyncio.sleep(0.05)
        pool.engines[0].kill()
        await asyncio.sleep(1.0)
        pool.engines[1].kill()
        await asyncio.sleep(2.1)
        assert pool.gateway.batcher.recovery.statistics()["on_trial"]
        await pool.resize(1)
        epoch = pool.gateway.batcher.epoch
        assert await pool.states() == {0: "serving", 1: "draining"}
        while pool.gateway.batcher.recovery.tries:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        assert pool.gateway.batcher.servers_in_use == {0}
        assert pool.gateway.batcher.epoch == epoch, "as many servers as before"
        more = [pool.ask(10, number) for number in range(4, 12)]
        await asyncio.gather(*(made.task for made in (*calls, *more)))
        assert [made.status for made in (*calls, *more)] == [200] * 12
        short = [record for record in pool.records if record.output_tokens == 10]
        assert {record.server_id for record in short} == {0}
        await asyncio.sleep(0.1)
        assert await pool.states() == {0: "serving"}

    play(test, policy="continuous:max_batch_size=4", law=SLOW)


def test_the_one_that_does_not_serve_is_removed_first() -> None:
    async def test(pool: Pooled) -> None:
        pool.engines[0].kill()
        await pool.resize(2)
        await asyncio.sleep(0.01)
        assert await pool.states() == {1: "serving", 2: "serving"}
        await pool.resize(1)
        await asyncio.sleep(0.01)
        assert await pool.states() == {1: "serving"}
        made = pool.ask(5)
        await made.task
        assert (made.status, pool.records[-1].server_id) == (200, 1)

    play(test, replicas=3)


def test_a_start_that_fails_is_told_and_the_others_serve() -> None:
    async def test(pool: Pooled) -> None:
        make = pool.pool._make

        def broken(server_id: int) -> Any:
            made = make(server_id)
            made.life, made.start_fails = 1, 1
            return made

        pool.pool._make = broken
        await pool.resize(3)
        await asyncio.sleep(1.0)
        assert await pool.states() == {0: "serving", 1: "serving", 2: "starting"}
        await asyncio.sleep(1.5)
        told = await pool.servers()
        assert (told["replicas"], told["last_failure"]) == (
            2,
            "server 2 did not start: got no memory; expected some",
        )
        assert pool.gateway.batcher.servers == 2

    play(test)


def test_the_log_says_which_servers_come_and_go(caplog: pytest.LogCaptureFixture) -> None:
    async def test(pool: Pooled) -> None:
        for count in (3, 3, 1):
            await pool.resize(count)
            await asyncio.sleep(0.1)
        pool.engines[0].kill()
        await asyncio.sleep(3.0)

    with caplog.at_level(logging.INFO, "kendall.supervision"):
        play(test)
    assert caplog.messages == [
        "3 replicas are to serve, were 2",
        "server 2 serves",
        "1 replicas are to serve, were 3",
        "server 2 was removed",
        "server 1 was removed",
        "server 0 failed: killed",
        "the engine failed: no server is left: killed",
        "server 0 was restarted (restart 1)",
        "the engine was restarted (restart 1)",
    ]


def start_slowly(pool: Pooled) -> None:
    """Those that are made from now on take as long as `start_takes` says."""
    make = pool.pool._make

    def slow(server_id: int) -> Any:
        made = make(server_id)
        made.life = 1
        return made

    pool.pool._make = slow


def test_a_start_can_be_taken_back() -> None:
    async def test(pool: Pooled) -> None:
        start_slowly(pool)
        await pool.resize(4)
        await asyncio.sleep(1.0)
        await pool.resize(2)
        await asyncio.sleep(0.1)
        assert await pool.states() == {0: "serving", 1: "serving"}
        assert pool.gateway.batcher.servers == 2

    play(test)


def test_the_last_that_serves_can_end_its_requests_and_go_while_the_other_comes_back() -> None:
    async def test(pool: Pooled) -> None:
        calls = [pool.ask(100, number) for number in range(2)]
        await asyncio.sleep(0.01)
        await pool.resize(1)
        pool.engines[0].start_takes = 5.0
        pool.engines[0].kill()
        stop = pool.engines[1].stop

        async def slow() -> None:
            await asyncio.sleep(1.0)
            await stop()

        pool.engines[1].stop = slow  # type: ignore[method-assign]
        assert await pool.states() == {0: "restarting", 1: "draining"}
        assert (await call(pool.app, "GET", "/ready")).status == 200
        await calls[1].task
        await asyncio.sleep(0.01)
        assert await pool.states() == {0: "restarting", 1: "draining"}
        assert (await call(pool.app, "GET", "/ready")).status == 503, "it is being stopped"
        waits = pool.ask(5, prompt="some words")
        await waits.task
        assert await pool.states() == {0: "serving"}
        await calls[0].task
        assert [made.status for made in (*calls, waits)] == [200, 200, 200]

    play(test, policy="single", law=SLOW)


@pytest.mark.parametrize(
    ("replicas", "says"),
    [
        (0, "replicas: Input should be greater than or equal to 1; got 0"),
        (-1, "replicas: Input should be greater than or equal to 1; got -1"),
        (65, "replicas: Input should be less than or equal to 64; got 65"),
        ("2", "replicas: Input should be a valid integer; got '2'"),
        (
            None,
            "got neither of replicas and urls; expected replicas, of a gateway that starts its "
            "engines, or urls, of one with --engine http",
        ),
    ],
)
def test_another_number_is_refused(replicas: object, says: str) -> None:
    async def test(pool: Pooled) -> None:
        answer = await pool.resize(replicas)
        assert (answer.status, answer.json()["error"]["message"]) == (400, says)
        assert await pool.states() == {0: "serving", 1: "serving"}

    play(test)


def test_one_engine_has_one_server_and_no_replicas() -> None:
    async def main() -> None:
        async with running("single") as (app, _):
            told = (await call(app, "GET", "/admin/servers")).json()
            assert told["servers"] == [{"id": 0, "state": "serving", "in_service": 0}]
            answer = await call(app, "PUT", "/admin/servers", {"replicas": 2})
            assert (answer.status, answer.json()["error"]["code"]) == (409, "no_replicas")
            answer = await call(app, "PUT", "/admin/servers", {"urls": ["http://a"]})
            assert (answer.status, answer.json()["error"]["code"]) == (409, "no_urls")

    run_virtual(main())


def test_one_that_is_lost_while_the_others_start_serves_when_it_is_back() -> None:
    """The queue begins with those that serve then; the return of the other begins an epoch."""
    first: list[MortalEngine] = []

    class Slow(MortalEngine):
        async def start(self) -> Capabilities:
            first.append(self)
            if len(first) == 2:
                first[0].kill()
            return await super().start()

    async def test(pool: Pooled) -> None:
        batcher = pool.gateway.batcher
        assert await pool.states() == {0: "restarting", 1: "serving"}
        assert batcher.servers_in_use == {1}
        calls = [pool.ask(40, number) for number in range(3)]
        await asyncio.gather(*(made.task for made in calls))
        assert {record.server_id for record in pool.records} == {1}
        epoch = batcher.epoch
        await asyncio.sleep(5.0)
        assert await pool.states() == {0: "serving", 1: "serving"}
        assert batcher.servers_in_use == {0, 1}
        assert batcher.epoch == epoch + 1
        calls = [pool.ask(40, number) for number in range(2)]
        await asyncio.gather(*(made.task for made in calls))
        assert {record.server_id for record in pool.records[3:]} == {0, 1}

    play(test, policy="single", engine=Slow, start_takes=5.0)


def test_a_gateway_that_ends_leaves_no_start_behind() -> None:
    async def main() -> None:
        async with pooled(start_takes=1000.0) as pool:
            start_slowly(pool)
            await pool.resize(3)
            await asyncio.sleep(1.0)
            assert await pool.states() == {0: "serving", 1: "serving", 2: "starting"}
            assert "start-server-2" in names()
            ends = asyncio.get_running_loop().time()
        assert names() == set()
        assert asyncio.get_running_loop().time() < ends + 100, "nobody waits for it"

    def names() -> set[str]:
        return {each.get_name() for each in asyncio.all_tasks() if "server" in each.get_name()}

    run_virtual(main())
