"""What measures the engine and the queue, before several replicas."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from kendall.queueing.latency.law import parse_law
from kendall.server.admission.settings import OverloadSettings
from tests.server.asgi import LAW, call
from tests.server.replicas.pooled import Pooled, pooled
from tests.virtual_time import run_virtual

Test = Callable[[Pooled], Awaitable[None]]


def play(test: Test, **options: Any) -> None:
    async def main() -> None:
        async with pooled(**options) as made:
            await test(made)

    run_virtual(main())


@pytest.mark.parametrize("left", [2, 1])
def test_a_calibration_is_of_one_server_that_serves(left: int) -> None:
    async def test(pool: Pooled) -> None:
        pool.engines[0].kill()
        await pool.resize(left)
        await asyncio.sleep(5.0 if left == 2 else 0.1)
        assert set(await pool.states()) == set(range(2 - left, 2))
        answer = await call(
            pool.app,
            "POST",
            "/admin/calibrate",
            {"max_batch_size": 4, "max_output_tokens": 16, "repeats": 2},
        )
        assert answer.status == 200
        law, known = answer.json()["law"], parse_law(LAW)
        for name in ("k1", "k2", "k3", "k4", "turnaround"):
            assert law[name] == pytest.approx(getattr(known, name), rel=1e-3), name

    play(test)


def test_a_calibration_ends_with_the_loss_of_a_server_and_the_queue_goes_on() -> None:
    async def test(pool: Pooled) -> None:
        measuring = asyncio.create_task(call(pool.app, "POST", "/admin/calibrate", {}))
        await asyncio.sleep(0.2)
        pool.engines[1].kill()
        answer = await measuring
        assert (answer.status, answer.json()["error"]["code"]) == (503, "engine_unavailable")
        made = pool.ask(10)
        await made.task
        assert made.status == 200

    play(test)


def test_state_and_metrics_know_the_servers() -> None:
    async def test(pool: Pooled) -> None:
        calls = [pool.ask(400, number) for number in range(2)]
        await asyncio.sleep(0.1)
        state = (await call(pool.app, "GET", "/admin/state")).json()
        assert state["engine"]["servers"] == 2
        assert [(each["id"], each["in_service"]) for each in state["servers"]["servers"]] == [
            (0, 1),
            (1, 1),
        ]
        pool.engines[0].kill()
        state = (await call(pool.app, "GET", "/admin/state")).json()
        assert state["supervision"]["state"] == "serving"
        assert state["servers"]["servers"][0]["last_loss"] == "killed"
        await asyncio.sleep(3.0)
        state = (await call(pool.app, "GET", "/admin/state")).json()
        assert state["supervision"]["restarts"] == 1
        metrics = (await call(pool.app, "GET", "/metrics")).body.decode()
        assert "kendall_engine_restarts 1.0" in metrics
        assert "kendall_engine_up 1.0" in metrics
        await asyncio.gather(*(made.task for made in calls))
        await pool.resize(3)
        await asyncio.sleep(0.1)
        state = (await call(pool.app, "GET", "/admin/state")).json()
        assert state["engine"]["servers"] == 3

    play(test, policy="single")


def test_utilisation_is_of_the_servers_that_there_are() -> None:
    async def test(pool: Pooled) -> None:
        long = pool.ask(2000, max_tokens=2000)
        await asyncio.sleep(30.0)
        live = pool.gateway.live_model()
        assert abs(live.activity.utilisation() - 0.5) < 0.01
        await pool.resize(4)
        await asyncio.sleep(0.01)
        assert abs(live.activity.utilisation() - 0.25) < 0.01
        await long.task

    play(test, policy="single", law="k1=0,k2=0,k3=0,k4=0.02", overload=OverloadSettings())
