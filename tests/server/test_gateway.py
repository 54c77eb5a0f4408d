"""One gateway from its start to its end: what it says when it is ready, whom it refuses, when it
replaces its engine, and what is left of it.
"""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import math
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
from pydantic import ValidationError

from kendall.queueing.latency.law import parse_law
from kendall.server.admission.limits_in_force import PolicyChange
from kendall.server.admission.settings import OverloadSettings
from kendall.server.engines.emulated import EmulatedEngine
from kendall.server.gateway import Gateway
from kendall.server.runtime.errors import ApiError
from kendall.server.security.settings import SecuritySettings, TlsSettings
from kendall.server.settings import Settings
from kendall.server.supervision.settings import SupervisionSettings
from tests.server.asgi import LAW, Call, call, completion, running
from tests.server.mortal import faulty
from tests.server.replicas.pooled import pooled
from tests.virtual_time import run_virtual

PATH = "/v1/completions"


def made(**settings: Any) -> Gateway:
    """Not started."""
    given = {
        "model": "tiny",
        "served_model_name": "small",
        "policy": "single",
        "host": "127.0.0.1",
        "port": 8123,
        "prediction_interval": 0,
    } | settings
    return Gateway(Settings(**given), EmulatedEngine(parse_law(LAW)))


async def stopped(gateway: Gateway) -> None:
    """Within a minute."""
    async with asyncio.timeout(60.0):
        await gateway.stop()


@pytest.mark.parametrize(
    ("tls", "scheme"),
    [(TlsSettings(), "http"), (TlsSettings(certfile=Path("a.pem"), keyfile=Path("b")), "https")],
)
def test_a_gateway_that_is_ready_says_what_it_serves_and_where(
    tls: TlsSettings, scheme: str, caplog: pytest.LogCaptureFixture
) -> None:
    async def main() -> None:
        gateway = made(security=SecuritySettings(tls=tls))
        await gateway.start()
        await stopped(gateway)

    with caplog.at_level(logging.INFO, "kendall"):
        run_virtual(main())
    assert [text for text in caplog.messages if text.startswith("ready: ")] == [
        f"ready: emulated engine, model small, policy single, {scheme}://127.0.0.1:8123"
    ]


def test_the_metrics_name_the_engine_and_the_model_and_show_an_idle_queue() -> None:
    async def main() -> str:
        gateway = made(max_clipped_fraction=0.25)
        await gateway.start()
        found = gateway.metrics.exposition().decode()
        await stopped(gateway)
        return found

    lines = run_virtual(main()).splitlines()
    (engine,) = [text for text in lines if text.startswith("kendall_engine_info{")]
    assert '{engine="emulated",model="small",version="' in engine
    assert engine.endswith(" 1.0")
    idle = ("queue_length", "in_service", "requests_in_system", "queued_tokens", "engine_restarts")
    assert {f"kendall_{name} 0.0" for name in idle} <= set(lines)
    assert {"kendall_engine_up 1.0", "kendall_max_clipped_fraction 0.25"} <= set(lines)
    assert 'kendall_failures_total{reason="engine_error"} 0.0' in lines


def test_a_partial_batch_is_served_where_the_process_ends() -> None:
    async def main() -> None:
        async with running("fixed:batch_size=2") as (app, gateway):
            waiting = Call(app, "POST", PATH, completion())
            await asyncio.sleep(1.0)
            assert gateway.batcher.queue_length == 1
            gateway.begin_drain()
            async with asyncio.timeout(10.0):
                await waiting.task
            assert waiting.status == 200

    run_virtual(main())


def test_who_has_no_answer_when_the_gateway_stops_is_told() -> None:
    async def main() -> None:
        async with running("single") as (app, _):
            calls = [Call(app, "POST", PATH, completion(max_tokens=500)) for _ in range(2)]
            await asyncio.sleep(0.01)
        for each in calls:
            await each.task
            assert (each.status, each.json()["error"]["code"]) == (503, "shutting_down")

    run_virtual(main())


@pytest.mark.parametrize("code", ["shutting_down", "engine_unavailable"])
def test_who_is_refused_for_the_gateways_state_may_ask_again_in_ten_seconds(code: str) -> None:
    async def main() -> None:
        once = SupervisionSettings(max_restarts=0, stuck_timeout=0)
        async with faulty("single", supervision=once) as (app, gateway, engine, _):
            if code == "shutting_down":
                await gateway.drain()
            else:
                calls = [Call(app, "POST", PATH, completion(max_tokens=500)) for _ in range(2)]
                await asyncio.sleep(0.01)
                engine.kill()
                async with asyncio.timeout(10.0):
                    await asyncio.gather(*(each.task for each in calls))
                found = [(each.status, each.json()["error"]["code"]) for each in calls]
                assert found == [(503, code)] * 2, "also who had not come to its turn"
            refused = await call(app, "POST", PATH, completion())
            assert (refused.status, refused.json()["error"]["code"]) == (503, code)
            assert refused.headers["retry-after"] == "10"

    run_virtual(main())


@pytest.mark.parametrize(("timeout", "lives"), [(0.0, 1), (0.5, 2), (1.0, 2)])
def test_an_engine_that_makes_no_token_is_replaced_after_the_time_that_was_set(
    timeout: float, lives: int
) -> None:
    """0 means never."""

    async def main() -> None:
        watched = SupervisionSettings(stuck_timeout=timeout)
        async with faulty("single", supervision=watched) as (app, _, engine, _records):
            asked = Call(app, "POST", PATH, completion())
            await asyncio.sleep(0.005)
            engine.hang()
            await asyncio.sleep(10.0)
            assert (engine.life, asked.status) == (lives, 200 if lives == 2 else None)

    run_virtual(main())


def test_nothing_of_a_gateway_that_has_stopped_is_left_on_the_event_loop() -> None:
    async def main() -> None:
        before = asyncio.all_tasks()
        gateway = made(idle_probes=True)
        await gateway.start()
        await asyncio.sleep(0.01)
        assert len(asyncio.all_tasks() - before) == 2, "the watch and the probes"
        await stopped(gateway)
        assert asyncio.all_tasks() == before

    run_virtual(main())


def test_a_replica_that_was_to_be_added_is_not_started_once_the_gateway_has_stopped() -> None:
    async def main() -> None:
        async with pooled() as pool:
            make = pool.pool._make

            def slow(server_id: int) -> Any:
                engine: Any = make(server_id)
                engine.life = 1  # its start takes two seconds
                return engine

            pool.pool._make = slow
            await pool.resize(3)
            await asyncio.sleep(1.0)
            assert await pool.states() == {0: "serving", 1: "serving", 2: "starting"}
        tasks = {task.get_name() for task in asyncio.all_tasks()}
        assert "start-server-2" not in tasks
        await asyncio.sleep(10.0)
        assert not any(engine.alive for engine in pool.engines.values())

    run_virtual(main())


class Measuring:
    """A calibration that runs."""

    def __init__(self) -> None:
        self.errors: list[ApiError] = []

    def stop(self, error: ApiError) -> None:
        self.errors.append(error)


@pytest.mark.parametrize(
    ("event", "code", "says", "retry_after"),
    [
        ("a drain", "shutting_down", "the gateway takes no new requests", 10),
        ("a death", "engine_unavailable", "the engine failed: it burns", None),
        ("the last death", "engine_unavailable", "the engine is gone: it burns", None),
    ],
)
def test_a_calibration_ends_with(
    event: str, code: str, says: str, retry_after: float | None
) -> None:
    async def main() -> None:
        gateway, measuring = made(), Measuring()
        assert not gateway.dispatch_paused
        await gateway.start()
        with gateway.latency.measured_by(measuring):
            assert gateway.dispatch_paused
            if event == "a drain":
                await gateway.drain()
            elif event == "a death":
                assert gateway.engine.on_death is not None
                gateway.engine.on_death("it burns")
            else:
                gateway.supervisor._give_up("it burns")
            (error,) = measuring.errors
        assert not gateway.dispatch_paused
        assert (error.status, error.code, str(error)) == (503, code, f"calibration: {says}")
        assert error.retry_after == retry_after
        await stopped(gateway)

    run_virtual(main())


def test_a_drain_takes_nothing_new_until_it_is_undone_and_at_the_end_for_good() -> None:
    async def main() -> None:
        gateway = made()
        await gateway.start()
        assert await gateway.drain()
        with pytest.raises(ApiError, match="takes no new requests"):
            gateway.admit()
        assert gateway.batcher.closing
        gateway.undo_drain()
        assert gateway.admit() is gateway.batcher
        assert not gateway.batcher.closing
        gateway.begin_drain()
        with pytest.raises(ApiError, match="cannot be undone"):
            gateway.undo_drain()
        assert gateway.batcher.closing
        await stopped(gateway)

    run_virtual(main())


def test_a_reload_puts_patience_and_limits_in_force_and_begins_an_epoch_with_the_patience() -> None:
    async def main() -> None:
        gateway = made()
        await gateway.start()
        for patience, found, epoch in ((5.0, 5.0, 1), (5.0, 5.0, 1), (math.inf, None, 2)):
            overload = OverloadSettings(max_num_queued_reqs=epoch)
            asked = dataclasses.replace(gateway.settings, patience=patience, overload=overload)
            gateway.reload(asked)
            assert (gateway.limits.patience, gateway.batcher.epoch) == (found, epoch)
            assert gateway.settings is asked
            assert gateway.overload.settings is overload
        await stopped(gateway)

    run_virtual(main())


class Noting:
    """What there is of an engine's own serving objects: whether they are open."""

    def __init__(self) -> None:
        self.calls: list[str] = []

    async def open(self) -> None:
        self.calls.append("open")

    def close(self) -> None:
        self.calls.append("close")


def test_serving_objects_are_opened_before_the_queue_and_go_with_their_engine() -> None:
    async def main() -> None:
        desk = Noting()
        with patch("kendall.server.gateway.serving_objects_of", lambda *_: desk):
            gateway = made()
        await gateway.start()
        assert desk.calls == ["open"]
        assert gateway.engine.on_death is not None
        gateway.engine.on_death("killed")
        assert desk.calls == ["open", "close"]
        await asyncio.sleep(5.0)
        assert gateway.lifecycle.ready
        await stopped(gateway)
        assert desk.calls == ["open", "close", "close"]

    run_virtual(main())


@pytest.mark.parametrize(
    ("limit", "taken"), [(0, False), (1, True), (2**31 - 1, True), (2**31, False)]
)
def test_a_token_limit_is_what_an_engine_can_count(limit: int, taken: bool) -> None:
    try:
        change = PolicyChange(max_output_tokens=limit)
    except ValidationError:
        assert not taken
    else:
        assert taken
        assert change.max_output_tokens == limit
