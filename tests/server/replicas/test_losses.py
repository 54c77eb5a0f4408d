"""A replica that is lost costs only what it had in service, and that goes on elsewhere."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from kendall.server.gateway import restarts_of
from kendall.server.supervision.settings import SupervisionSettings
from tests.server.asgi import call
from tests.server.mortal import words
from tests.server.replicas.pooled import Pooled, pooled
from tests.server.test_poison import MARK, Mute, Poisoned
from tests.virtual_time import run_virtual

Test = Callable[[Pooled], Awaitable[None]]


def play(test: Test, **options: Any) -> None:
    async def main() -> None:
        async with pooled(**options) as made:
            await test(made)

    run_virtual(main())


def text(made: Any) -> str:
    return str(made.json()["choices"][0]["text"])


@pytest.mark.parametrize(
    "policy",
    [
        "single",
        "capped:max_batch_size=4",
        "elastic:max_batch_size=4",
        "continuous:max_batch_size=4",
        "continuous:max_batch_size=2",
    ],
)
def test_requests_of_a_lost_server_go_on_behind_their_tokens_on_another(policy: str) -> None:
    async def test(pool: Pooled) -> None:
        calls = [pool.ask(200, number) for number in range(8)]
        await asyncio.sleep(0.05)
        before = pool.in_service
        assert all(before), "both serve"
        epoch = pool.gateway.batcher.epoch
        pool.engines[0].kill()
        assert await pool.states() == {0: "restarting", 1: "serving"}
        assert (pool.gateway.batcher.servers, pool.gateway.batcher.epoch) == (1, epoch + 1)
        assert (await call(pool.app, "GET", "/ready")).status == 200
        assert pool.in_service[0] == 0
        await asyncio.gather(*(made.task for made in calls))
        assert [(made.status, text(made)) for made in calls] == [(200, words(200))] * 8
        assert Counter(record.interruptions for record in pool.records) == {
            0: 8 - before[0],
            1: before[0],
        }
        assert sum(record.outcome == "completed" for record in pool.records) == 8
        assert all(
            record.server_id == 1 for record in pool.records if record.interruptions
        ) or policy in ("single", "continuous:max_batch_size=2")
        await asyncio.sleep(3.0)
        assert await pool.states() == {0: "serving", 1: "serving"}
        assert (pool.gateway.batcher.servers, pool.gateway.batcher.epoch) == (2, epoch + 2)
        assert (restarts_of(pool.gateway), pool.gateway.supervisor.restarts) == (1, 0)

    play(test, policy=policy)


def test_what_is_lost_goes_before_what_waits() -> None:
    async def test(pool: Pooled) -> None:
        calls = [pool.ask(100, number) for number in range(2)]
        await asyncio.sleep(0.01)
        later = pool.ask(100, 9)
        await asyncio.sleep(0.01)
        pool.engines[1].kill()
        await asyncio.gather(*(made.task for made in (*calls, later)))
        order = sorted(pool.records, key=lambda each: each.dispatched_at or 0)
        assert [record.interruptions for record in order] == [0, 1, 0]

    play(test, policy="single")


def test_what_is_exact_only_from_the_start_begins_anew_and_the_rest_behind_its_tokens() -> None:
    async def test(pool: Pooled) -> None:
        plain = pool.ask(100, 0)
        await asyncio.sleep(0.01)
        other = pool.ask(1000, 1)
        await asyncio.sleep(0.01)
        stateful = pool.ask(100, 2, presence_penalty=0.5, seed=1)
        neither = pool.ask(100, 3, presence_penalty=0.5, temperature=1.0)
        await asyncio.sleep(0.2)
        assert pool.in_service == [2, 2]
        pool.engines[0].kill()
        pool.engines[0].start_takes = 30.0
        await asyncio.sleep(1.0)
        again = {
            each.request.id: len(each.output_token_ids)
            for given in pool.engines[1].given
            for each in given.requests
        }
        await asyncio.gather(*(made.task for made in (plain, other, stateful, neither)))
        assert text(plain) == text(stateful) == words(100)
        lost = {record.request_id for record in pool.records if record.interruptions}
        assert sorted(again.get(request_id, -1) > 0 for request_id in lost) == [False, True]
        assert Counter(record.outcome for record in pool.records) == {"completed": 4}

    play(test, policy="continuous:max_batch_size=4", law="k1=0,k2=0,k3=0,k4=0.01")


def test_with_the_last_one_the_engine_is_down_until_the_first_is_back() -> None:
    async def test(pool: Pooled) -> None:
        calls = [pool.ask(200, number) for number in range(4)]
        await asyncio.sleep(0.05)
        pool.engines[0].kill()
        await asyncio.sleep(1.0)
        pool.engines[1].kill()
        assert (await call(pool.app, "GET", "/ready")).status == 503
        assert pool.gateway.supervisor.state == "restarting"
        assert pool.gateway.batcher.queue_length == 4
        await asyncio.sleep(1.1)
        assert (await call(pool.app, "GET", "/ready")).status == 200
        assert await pool.states() == {0: "serving", 1: "restarting"}
        await asyncio.gather(*(made.task for made in calls))
        assert [(made.status, text(made)) for made in calls] == [(200, words(200))] * 4
        assert {record.server_id for record in pool.records} == {0}
        await asyncio.sleep(5.0)
        assert pool.gateway.batcher.servers == 2

    patient = SupervisionSettings(suspect_after=9, stuck_timeout=0)
    play(test, law="k1=0,k2=0,k3=0,k4=0.02", supervision=patient)


def test_suspects_wait_for_the_server_that_they_were_on_and_are_tried_there_alone() -> None:
    async def test(pool: Pooled) -> None:
        calls = [pool.ask(200, number) for number in range(4)]
        await asyncio.sleep(0.05)
        assert pool.in_service == [2, 2]
        pool.engines[0].kill()
        await asyncio.sleep(1.0)
        assert pool.in_service == [0, 4]
        pool.engines[1].kill()
        assert pool.in_service == [0, 2], "two have seen both die"
        assert pool.gateway.batcher.queue_length == 2
        await asyncio.sleep(1.1)
        assert pool.in_service == [2, 2]
        assert await pool.states() == {0: "serving", 1: "restarting"}
        given = len(pool.engines[1].given)
        await asyncio.gather(*(made.task for made in calls))
        assert [(made.status, text(made)) for made in calls] == [(200, words(200))] * 4
        assert [len(each.requests) for each in pool.engines[1].given[given:]] == [1, 1]
        assert pool.gateway.batcher.servers == 2
        assert pool.gateway.batcher.recovery.statistics()["convicted"] == 0

    play(test, law="k1=0,k2=0,k3=0,k4=0.02")


def test_one_that_has_moved_on_to_another_batch_is_not_started_again_with_the_first() -> None:
    async def test(pool: Pooled) -> None:
        first, long = pool.ask(100, 0), pool.ask(150, 1)
        await asyncio.sleep(0.05)
        second = pool.ask(100, 2)
        pool.engines[0].kill()
        await asyncio.sleep(2.1)
        assert pool.in_service == [2, 1], "the first and the second together"
        third = pool.ask(100, 3)
        pool.engines[0].start_takes = 30.0
        pool.engines[0].kill()
        assert pool.in_service == [1, 1], "the first has seen two deaths"
        await long.task
        await asyncio.sleep(0.1)
        assert pool.in_service == [1, 2], "the second and the third"
        pool.engines[1].kill()
        assert pool.in_service == [1, 1], "the second has seen two deaths, too"
        await asyncio.gather(*(made.task for made in (first, second, third)))
        calls = (first, second, third)
        assert [(made.status, text(made)) for made in calls] == [(200, words(100))] * 3
        assert [len(each.requests) for each in pool.engines[0].given] == [1, 2, 1]
        assert pool.gateway.batcher.servers == 2

    play(test, policy="capped:max_batch_size=2", law="k1=0,k2=0,k3=0,k4=0.02")


def test_the_same_number_again_puts_another_replica_in_the_place_of_one_lost_for_good() -> None:
    async def test(pool: Pooled) -> None:
        pool.engines[0].kill()
        assert await pool.states() == {0: "lost", 1: "serving"}
        answer = await pool.resize(2)
        assert answer.json()["replicas"] == 2
        await asyncio.sleep(0.01)
        assert await pool.states() == {1: "serving", 2: "serving"}
        assert pool.gateway.batcher.servers == 2

    play(test, supervision=SupervisionSettings(max_restarts=0, stuck_timeout=0))


def test_a_server_beyond_its_restarts_is_given_up_alone_and_all_of_them_end_the_gateway() -> None:
    async def test(pool: Pooled) -> None:
        given_up: list[str] = []
        pool.gateway.on_given_up = given_up.append
        for _ in range(2):
            pool.engines[1].kill()
            await asyncio.sleep(10.0)
        for _ in range(3):
            pool.engines[0].kill()
            await asyncio.sleep(10.0)
        assert await pool.states() == {0: "lost", 1: "serving"}
        made = pool.ask(20)
        await made.task
        assert (made.status, pool.gateway.lifecycle.healthy, given_up) == (200, True, [])
        waits = pool.ask(20)
        await asyncio.sleep(0.01)
        pool.engines[1].kill()
        await waits.task
        assert waits.status == 503
        await asyncio.sleep(1.0)
        assert given_up == ["every replica is lost for good"]
        assert not pool.gateway.lifecycle.healthy

    play(test, supervision=SupervisionSettings(max_restarts=2, stuck_timeout=0))


def test_a_replica_that_hangs_is_replaced_and_the_other_goes_on() -> None:
    async def test(pool: Pooled) -> None:
        calls = [pool.ask(400, number) for number in range(8)]
        await asyncio.sleep(0.05)
        assert pool.in_service == [4, 4]
        pool.engines[1].hang()
        await asyncio.gather(*(made.task for made in calls))
        assert [(made.status, text(made)) for made in calls] == [(200, words(400))] * 8
        assert restarts_of(pool.gateway) == 1
        assert pool.engines[0].life == 1
        await pool.resize(1)  # without the one that restarted
        await asyncio.sleep(1.0)
        assert len(pool.pool.replicas) == 1
        await pool.resize(2)
        await asyncio.sleep(1.0)
        assert restarts_of(pool.gateway) == 1, "those of a removed server stay counted"

    play(test, supervision=SupervisionSettings(stuck_timeout=5.0), law="k1=0,k2=0,k3=0,k4=0.02")


def test_losses_by_requests_that_kill_do_not_count_against_any_server() -> None:
    """Each costs both servers one loss: six of them, three allowed."""

    async def test(pool: Pooled) -> None:
        for number in range(6):
            killer = pool.ask(20, prompt=[MARK, number])
            await killer.task
            assert killer.json()["error"]["code"] == "engine_killed"
            again = pool.ask(20, prompt=[MARK, number])
            await again.task
            assert again.status == 400
            await asyncio.sleep(5.0)
            assert await pool.states() == {0: "serving", 1: "serving"}
        assert pool.gateway.batcher.recovery.statistics()["convicted"] == 6
        assert [each.supervisor.restarts for each in pool.pool.replicas.values()] == [6, 6]
        assert not pool.gateway.batcher.recovery.tries

    supervision = SupervisionSettings(max_restarts=3, stuck_timeout=0)
    play(test, policy="single", engine=Poisoned, supervision=supervision)


@pytest.mark.slow
def test_an_answer_gives_back_the_losses_of_a_request_that_kills_where_a_proof_has_failed() -> None:
    """One restart is allowed of each."""

    async def test(pool: Pooled) -> None:
        killer = pool.ask(20, prompt=[MARK])
        await killer.task
        assert killer.json()["error"]["code"] == "engine_killed"
        await asyncio.sleep(20.0)
        assert await pool.states() == {0: "serving", 1: "serving"}
        answered = [pool.ask(20, number) for number in range(2)]
        await asyncio.gather(*(made.task for made in answered))
        assert {record.server_id for record in pool.records[1:]} == {0, 1}
        for server_id in (0, 1):
            pool.engines[server_id].kill()
            assert (await pool.states())[server_id] == "restarting"
            await asyncio.sleep(5.0)
        assert await pool.states() == {0: "serving", 1: "serving"}

    supervision = SupervisionSettings(max_restarts=1, stuck_timeout=0)
    play(test, policy="single", engine=Mute, supervision=supervision)


def test_prompts_are_read_by_a_replica_that_serves() -> None:
    async def test(pool: Pooled) -> None:
        pool.engines[0].kill()
        made = pool.ask(5, prompt="three words here")
        await made.task
        assert (made.status, made.json()["usage"]["prompt_tokens"]) == (200, 3)

    play(test)


@pytest.mark.parametrize("event", ["a server is lost", "a server is removed"])
def test_a_lent_engine_comes_back_where(event: str) -> None:
    async def test(pool: Pooled) -> None:
        lease, ended = pool.gateway.batcher.lease, list[bool]()
        lease.acquire(lambda: ended.append(True))
        if event == "a server is lost":
            pool.engines[1].kill()
        else:
            await pool.resize(1)
        assert (ended, lease.active, lease.blocks) == ([True], False, False)

    play(test)


def test_who_waits_for_an_idle_engine_goes_on_when_the_proof_of_a_server_is_over() -> None:
    """A calibration: no other request ends meanwhile that would wake it."""

    async def test(pool: Pooled) -> None:
        await pool.ask(20, prompt=[MARK]).task
        batcher = pool.gateway.batcher
        while not batcher.recovery.statistics()["proving"]:  # noqa: ASYNC110
            await asyncio.sleep(0.001)
        served = asyncio.ensure_future(batcher.served())
        while batcher.recovery.tries:
            assert not served.done()
            await asyncio.sleep(0.001)
        await asyncio.sleep(0.001)
        assert served.done()

    play(test, policy="single", engine=Poisoned)
