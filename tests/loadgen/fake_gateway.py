"""A gateway in the test's own process, as far as a sweep can tell: it answers at once, writes a run
file, and says the speeds that it is given.
"""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from aiohttp import web

from kendall.loadgen.gateway.gateway_process import free_port
from kendall.loadgen.sending.client.target import FORCED_FIELD
from kendall.loadgen.sweep.status import Status
from kendall.queueing.latency.law import LatencyModel
from kendall.queueing.latency.profile import Profile
from kendall.queueing.measurement.record import Header, Record, to_line
from tests.loadgen.fake_server import answer

IDLE = {"unanswered": 0, "in_service": 0, "queue_length": 0, "policy": "dynamic"}
LAW = LatencyModel(k1=0.0003, k2=0.001, k3=0.00002, k4=0.001)


class FakeGateway:
    """`speeds`: of the calibrations after the first, in their order."""

    def __init__(self, folder: Path, *speeds: float) -> None:
        self.record_file = folder / "gateway.jsonl"
        self.record_file.write_bytes(to_line(Header(writer="gateway")))
        self.speeds = list(speeds)
        self.asked: list[tuple[str, Any]] = []  # of the admin routes, with their bodies
        self.epoch = 0
        self.records = 0
        self.status = 200  # of an answer to a completion
        self.foreign = False  # whether another client sends a request
        self.url = ""

    async def state(self, _: web.Request) -> web.Response:
        engine = {"max_num_seqs": 4, "max_model_len": 512}
        return web.json_response(IDLE | {"record_file": str(self.record_file), "engine": engine})

    async def switch(self, request: web.Request) -> web.Response:
        self.asked.append(("policy", await request.json()))
        self.epoch += 1
        return web.json_response({"epoch": self.epoch})

    async def calibrate(self, request: web.Request) -> web.Response:
        body = await request.json()
        self.asked.append(("calibrate", body))
        law = LAW.at_speed(self.speeds.pop(0)) if "speed_only" in body else LAW
        profile = Profile(name="fake", law=law, r2=0.99, mape=0.02)
        return web.Response(
            body=msgspec.json.encode(profile.to_dict(), enc_hook=float),
            content_type="application/json",
        )

    async def complete(self, request: web.Request) -> web.StreamResponse:
        if self.status != 200:
            return web.json_response({"error": {"message": "no"}}, status=self.status)
        body = await request.json()
        at, self.records = 0.02 * self.records, self.records + 1
        if self.foreign and self.records == 3:  # another client's, in between
            self.write(Record(request_id="x", outcome="completed", epoch=self.epoch, arrived_at=at))
        record = Record(
            request_id=f"own-{self.records}",
            client_request_id=request.headers["x-request-id"],
            outcome="completed",
            epoch=self.epoch,
            server_id=0,
            batch_id=self.records,
            batch_size=1,
            arrived_at=at,
            dispatched_at=at + 0.001,
            released_at=at + 0.01,
            server_free_at=at + 0.01,
            queueing_delay=0.001,
            service_time=0.009,
            sojourn_time=0.01,
            prompt_tokens=len(body["prompt"]),
            output_tokens=body[FORCED_FIELD],
            policy=self.asked[-1][1].get("policy", "dynamic"),
        )
        self.write(record)
        return await answer(request, body)

    def write(self, record: Record) -> None:
        with self.record_file.open("ab") as file:
            file.write(to_line(record))


def phases_of(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, float]]:
    """What a status line says is done, and how long it should take, as it comes."""
    said: list[tuple[str, float]] = []
    phase = Status.phase

    def told(status: Status, text: str, seconds: float = 0.0) -> None:
        said.append((text, round(seconds, 6)))
        phase(status, text, seconds)

    monkeypatch.setattr(Status, "phase", told)
    return said


async def _fine(_: web.Request) -> web.Response:
    return web.Response()


async def _models(_: web.Request) -> web.Response:
    return web.json_response(
        {"data": [{"id": "fake", "owned_by": "kendall", "output_length_fields": [FORCED_FIELD]}]}
    )


@contextlib.asynccontextmanager
async def serving(gateway: FakeGateway) -> AsyncIterator[FakeGateway]:
    app = web.Application()
    app.router.add_get("/ready", _fine)
    app.router.add_get("/health", _fine)
    app.router.add_get("/v1/models", _models)
    app.router.add_get("/admin/state", gateway.state)
    app.router.add_put("/admin/policy", gateway.switch)
    app.router.add_post("/admin/calibrate", gateway.calibrate)
    app.router.add_post("/v1/completions", gateway.complete)
    runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1)
    await runner.setup()
    port = free_port(0)
    await web.TCPSite(runner, "127.0.0.1", port).start()
    gateway.url = f"http://127.0.0.1:{port}"
    try:
        yield gateway
    finally:
        await runner.cleanup()
