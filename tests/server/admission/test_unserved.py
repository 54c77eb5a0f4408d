"""Calls that come while the gateway drains, or its engine starts or is gone: each has an
outcome, a reason and a record.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from kendall.queueing.latency.law import parse_law
from kendall.queueing.measurement.record import read_run
from kendall.server.gateway import Gateway
from kendall.server.http.app import create_app
from kendall.server.settings import Settings
from kendall.server.supervision.settings import SupervisionSettings
from tests.server.admission.test_admission import counted
from tests.server.asgi import LAW, Call, call, completion, running
from tests.server.mortal import MortalEngine
from tests.server.statuses import GIVES_UP, ROWS
from tests.virtual_time import run_virtual

PATH = "/v1/completions"


def test_calls_while_the_gateway_drains_are_counted_and_recorded_as_rejected(
    tmp_path: Path,
) -> None:
    """Under load: every request that was sent, one per prompt and choice, has one outcome in the
    counters and in the record file.
    """

    async def main() -> None:
        async with running("single", record_file=tmp_path / "run.jsonl") as (app, gateway):
            served = [Call(app, "POST", PATH, completion(max_tokens=50)) for _ in range(3)]
            await asyncio.sleep(0.01)
            drained = asyncio.create_task(gateway.drain())
            await asyncio.sleep(0.01)
            refused = [
                await call(app, "POST", PATH, completion(), {"x-request-id": f"late-{index}"})
                for index in range(4)
            ]
            refused.append(
                await call(
                    app,
                    "POST",
                    PATH,
                    completion(n=2, prompt=[[5, 6], [7, 8]]),
                    {"x-request-id": "late-4"},
                )
            )
            refused.append(
                await call(app, "POST", "/v1/chat/completions", _chat(), {"x-request-id": "late-5"})
            )
            assert {(made.status, made.json()["error"]["code"]) for made in refused} == {
                (503, "shutting_down")
            }
            await drained
            assert {made.status for made in served} == {200}
            assert counted(gateway, "kendall_rejections_total", reason="shutting_down") == 9
            assert counted(gateway, "kendall_requests_total", outcome="rejected") == 9
            assert gateway.arrivals.count == 9, "three served calls and six that were refused"
            gateway.flush()
            _, records = read_run(tmp_path / "run.jsonl")
            assert Counter(record.outcome for record in records) == {"completed": 3, "rejected": 9}
            rejected = [record for record in records if record.outcome == "rejected"]
            assert {record.error for record in rejected} == {"shutting_down"}
            assert {record.client_request_id for record in rejected} == {
                f"late-{index}" for index in range(6)
            }
            assert len({record.request_id for record in records}) == len(records)
            assert all(
                record.arrived_at is not None and record.policy == "single" for record in rejected
            )
            gateway.live_model().check()
            assert all(check.holds for check in gateway.live_model().checks)

    run_virtual(main())


def _chat() -> dict[str, Any]:
    return {"model": "tiny", "messages": [{"role": "user", "content": "hello"}], "max_tokens": 4}


def test_a_calibration_that_is_refused_while_draining_is_no_rejected_request() -> None:
    async def main() -> None:
        async with running() as (app, gateway):
            await gateway.drain()
            assert (await call(app, "POST", "/admin/calibrate", {})).status == 503
            assert (
                counted(gateway, "kendall_rejections_total")
                == counted(gateway, "kendall_requests_total", outcome="rejected")
                == 0
            )

    run_virtual(main())


def test_calls_to_a_gateway_whose_engine_is_gone_are_counted() -> None:
    async def main() -> None:
        async with running(supervision=GIVES_UP["supervision"]) as (app, gateway):
            assert gateway.engine.on_death is not None
            gateway.engine.on_death("killed")
            assert (await call(app, "POST", PATH, completion())).json()["error"][
                "code"
            ] == "engine_unavailable"
            assert counted(gateway, "kendall_rejections_total", reason="engine_unavailable") == 1
            assert counted(gateway, "kendall_requests_total", outcome="rejected") == 1

    run_virtual(main())


@pytest.mark.parametrize("parked", [0, 1])
def test_calls_that_cannot_wait_for_a_restart_are_counted(parked: int) -> None:
    """No more than `max_parked` texts wait until an engine can read them; the others are
    rejected, each once.
    """

    async def main() -> None:
        supervision = SupervisionSettings(stuck_timeout=0, max_parked=parked)
        settings = Settings(
            model="tiny", served_model_name="tiny", prediction_interval=0, supervision=supervision
        )
        gateway, ready = (
            Gateway(
                settings, engine := MortalEngine(parse_law(LAW), start_takes=2.0), parse_law(LAW)
            ),
            asyncio.Event(),
        )
        app = create_app(gateway, on_ready=lambda _: ready.set())
        async with app.router.lifespan_context(app):
            await ready.wait()
            engine.kill()
            calls = [Call(app, "POST", PATH, completion(prompt="a text")) for _ in range(3)]
            for made in calls:
                await made.task
            assert Counter(made.status for made in calls) == Counter({200: parked, 503: 3 - parked})
            assert (
                counted(gateway, "kendall_rejections_total", reason="engine_unavailable")
                == 3 - parked
            )
            assert counted(gateway, "kendall_requests_total", outcome="rejected") == 3 - parked
            assert counted(gateway, "kendall_requests_total", outcome="completed") == parked

    run_virtual(main())


def test_calls_before_the_engine_serves_are_counted() -> None:
    async def main() -> None:
        starting = next(row for row in ROWS if row.starting)
        async with starting.gateway() as (app, gateway):
            assert (await call(app, "POST", PATH, completion())).status == 503
            assert counted(gateway, "kendall_rejections_total", reason="engine_unavailable") == 1
            assert (
                counted(
                    gateway,
                    "kendall_requests_total",
                    outcome="rejected",
                    policy=gateway.limits.policy_text,
                )
                == 1
            )

    run_virtual(main())


def test_a_call_that_is_wrong_is_no_arrival_while_draining_either() -> None:
    async def main() -> None:
        async with running() as (app, gateway):
            await gateway.drain()
            assert (await call(app, "POST", PATH, completion(max_tokens=0))).status == 400
            assert counted(gateway, "kendall_requests_total", outcome="rejected") == 0

    run_virtual(main())
