"""What `/metrics` says of queue, engine and drain at one instant; and the run file when it is asked
for.
"""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from fastapi import FastAPI
from prometheus_client.parser import text_string_to_metric_families

from kendall.queueing.measurement.record import read_run
from tests.server.asgi import Call, call, running
from tests.server.mortal import faulty
from tests.virtual_time import run_virtual


async def gauges(app: FastAPI) -> dict[str, float]:
    """Those without labels, without `kendall_`."""
    text = (await call(app, "GET", "/metrics")).body.decode()
    return {
        family.name.removeprefix("kendall_"): family.samples[0].value
        for family in text_string_to_metric_families(text)
        if family.type == "gauge" and len(family.samples) == 1 and not family.samples[0].labels
    }


def prompt(tokens: int) -> dict[str, object]:
    return {
        "model": "tiny",
        "prompt": [5, 6, 7],
        "max_tokens": tokens,
        "kendall_forced_output_tokens": tokens,
    }


def test_gauges_are_of_the_instant_in_which_they_are_read() -> None:
    async def serve() -> None:
        async with running("continuous:max_batch_size=2") as (app, gateway):
            before = await gauges(app)
            asked = [Call(app, "POST", "/v1/completions", prompt(30)) for _ in range(5)]
            await asyncio.sleep(0.01)
            during = await gauges(app)
            assert gateway.batcher.in_service == 2
            await asyncio.gather(*(each.task for each in asked))
            after = await gauges(app)
        for found, expected in ((before, (0, 0, 0)), (during, (2, 3, 5)), (after, (0, 0, 0))):
            names = ("in_service", "queue_length", "requests_in_system")
            assert tuple(found[name] for name in names) == expected
            assert found["engine_up"] == 1
            assert found["queued_tokens"] == 3 * found["queue_length"]

    run_virtual(serve())


def test_records_are_in_the_file_once_the_gateway_has_flushed(tmp_path: Path) -> None:
    path = tmp_path / "records.jsonl"

    async def serve() -> None:
        async with running(record_file=path) as (app, gateway):
            assert (await call(app, "POST", "/v1/completions", prompt(3))).status == 200
            gateway.flush()
            assert len(read_run(path)[1]) == 1

    run_virtual(serve())


@pytest.mark.parametrize("end", ["a drain", "the end of the gateway"])
def test_records_are_in_the_file_after(end: str, tmp_path: Path) -> None:
    path = tmp_path / "records.jsonl"

    async def serve() -> None:
        async with running(record_file=path) as (app, _):
            assert (await call(app, "POST", "/v1/completions", prompt(3))).status == 200
            if end == "a drain":
                assert (await call(app, "POST", "/admin/drain")).json() == {"drained": True}
                assert len(read_run(path)[1]) == 1
        assert len(read_run(path)[1]) == 1

    run_virtual(serve())


def test_an_engine_that_came_up_again_is_told_to_the_process_once() -> None:
    """It gives memory back then."""

    async def serve() -> None:
        async with faulty() as (_, gateway, engine, _):
            told: list[float] = []
            gateway.on_restarted = lambda: told.append(gateway.now())
            killed_at = gateway.now()
            engine.kill()
            await asyncio.sleep(10)
        assert told == [pytest.approx(killed_at + engine.start_takes, abs=0.5)]

    run_virtual(serve())
