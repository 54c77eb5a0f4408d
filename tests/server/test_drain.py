"""`POST /admin/drain` and its undoing, on virtual time."""

from __future__ import annotations

import asyncio

from kendall.queueing.latency.law import LatencyModel
from kendall.server.engines.emulated import EmulatedEngine
from kendall.server.gateway import Gateway
from kendall.server.settings import Settings
from tests.server.asgi import Call, call, completion, running
from tests.virtual_time import run_virtual

PATH = "/v1/completions"


def test_a_drain_that_is_undone_takes_requests_again() -> None:
    async def main() -> None:
        async with running("single") as (app, gateway):
            served = Call(app, "POST", PATH, completion(max_tokens=500))
            await asyncio.sleep(0.01)
            drain = Call(app, "POST", "/admin/drain")
            await asyncio.sleep(0.01)
            assert (await call(app, "POST", PATH, completion())).status == 503
            assert (await call(app, "GET", "/ready")).status == 503
            undone = await call(app, "DELETE", "/admin/drain")
            assert (undone.status, undone.json()) == (200, {"draining": False})
            await drain.task
            assert drain.json() == {"drained": False}, (
                "who asked for it is told, though a request is still in service"
            )
            assert gateway.batcher.in_service == 1
            assert (await call(app, "GET", "/ready")).status == 200
            assert (await call(app, "POST", PATH, completion())).status == 200
            await served.task
            assert served.status == 200
            assert (await call(app, "POST", "/admin/drain")).json() == {"drained": True}

    run_virtual(main())


def test_a_partial_batch_waits_for_others_again_after_a_drain_was_undone() -> None:
    async def main() -> None:
        async with running("fixed:batch_size=2") as (app, gateway):
            await call(app, "POST", "/admin/drain")
            await call(app, "DELETE", "/admin/drain")
            first = Call(app, "POST", PATH, completion())
            await asyncio.sleep(10)
            assert (gateway.batcher.queue_length, gateway.batcher.in_service) == (1, 0)
            await call(app, "POST", PATH, completion())
            await first.task
            assert first.status == 200

    run_virtual(main())


def test_a_partial_batch_is_served_once_the_process_is_about_to_end() -> None:
    async def main() -> None:
        async with running("fixed:batch_size=2") as (app, gateway):
            asked = Call(app, "POST", PATH, completion())
            await asyncio.sleep(10)
            assert gateway.batcher.queue_length == 1
            gateway.begin_drain()
            await asyncio.sleep(1)
            assert (asked.status, asked.whole) == (200, True)

    run_virtual(main())


def test_a_drain_at_the_end_of_the_process_cannot_be_undone() -> None:
    async def main() -> None:
        async with running() as (app, gateway):
            gateway.begin_drain()
            undone = await call(app, "DELETE", "/admin/drain")
            assert (undone.status, undone.json()["error"]["code"]) == (409, "shutting_down")
            assert (await call(app, "POST", PATH, completion())).status == 503

    run_virtual(main())


def test_undoing_no_drain_changes_nothing() -> None:
    async def main() -> None:
        async with running() as (app, _):
            assert (await call(app, "DELETE", "/admin/drain")).status == 200
            assert (await call(app, "POST", PATH, completion())).status == 200

    run_virtual(main())


def test_before_an_engine_serves_there_is_nothing_to_drain() -> None:
    async def main() -> bool:
        return await Gateway(
            Settings(model="tiny", served_model_name="tiny"), EmulatedEngine(LatencyModel(k4=1e-3))
        ).drain()

    assert run_virtual(main())


def test_a_gateway_that_was_abandoned_takes_nothing_again() -> None:
    async def main() -> None:
        async with running("single") as (app, gateway):
            gateway.abandon("the gateway is shutting down")
            assert (gateway.lifecycle.draining, gateway.lifecycle.leaving) == (True, True)
            assert (await call(app, "POST", PATH, completion())).status == 503
            undone = await call(app, "DELETE", "/admin/drain")
            assert (undone.status, undone.json()["error"]["code"]) == (409, "shutting_down")
            assert gateway.lifecycle.draining

    run_virtual(main())


def test_a_drain_ends_a_calibration() -> None:
    async def main() -> None:
        async with running("single") as (app, _):
            calibrating = Call(app, "POST", "/admin/calibrate", {})
            await asyncio.sleep(0.005)
            waiting = Call(app, "POST", PATH, completion())
            await asyncio.sleep(0.001)
            assert (await call(app, "POST", "/admin/drain")).status == 200
            await asyncio.gather(calibrating.task, waiting.task)
            assert (calibrating.status, calibrating.json()["error"]["code"], waiting.status) == (
                503,
                "shutting_down",
                200,
            )
            assert calibrating.headers["retry-after"] == "10"

    run_virtual(main())
