"""`kendall calibrate URL` before a small server that is no gateway, with three slots."""

from __future__ import annotations

import asyncio
import contextlib
import json
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from kendall.policies.text import SpecError
from kendall.queueing.errors import CommandError
from kendall.queueing.latency.profile import Profile, load_profile
from kendall.server.operations import calibrate_server
from kendall.server.operations.calibrate import calibrate

SLOTS, STEP = 3, 0.02  # seconds of a token
PLAN = {"repeats": 2, "max_batch_size": 4, "max_output_tokens": 4}


@dataclass
class SmallServer:
    """Some thirty lines of a server: what it tells of itself, and which key it wants."""

    key: str | None = None
    others: int = 0  # requests of others in it
    ended_of_others: int = 0  # for each of ours
    metrics: bool = True
    url: str = ""
    ended: int = 0

    def __post_init__(self) -> None:
        self._slots = asyncio.Semaphore(SLOTS)

    def _refused(self, request: web.Request) -> bool:
        return self.key is not None and request.headers.get("authorization") != f"Bearer {self.key}"

    async def models(self, request: web.Request) -> web.Response:
        if self._refused(request):
            return web.json_response({"error": "Unauthorized"}, status=401)
        return web.json_response({"data": [{"id": "small", "owned_by": "me"}]})

    async def counters(self, _: web.Request) -> web.Response:
        if not self.metrics:
            raise web.HTTPNotFound
        ended = self.ended * (1 + self.ended_of_others)
        values = {
            "num_requests_running": self.others,
            "num_requests_waiting": 0,
            "request_queue_time_seconds_sum": 0,
            "request_queue_time_seconds_count": ended,
        }
        return web.Response(text="".join(f"vllm:{key} {value}\n" for key, value in values.items()))

    async def complete(self, request: web.Request) -> web.StreamResponse:
        body: dict[str, Any] = await request.json()
        response = web.StreamResponse(headers={"content-type": "text/event-stream"})
        async with self._slots:
            await response.prepare(request)
            for _ in range(body["max_tokens"]):
                await asyncio.sleep(STEP)
                choice = {"index": 0, "text": "t", "finish_reason": None}
                await response.write(b"data: %b\n\n" % json.dumps({"choices": [choice]}).encode())
            self.ended += 1
        usage = {"prompt_tokens": 4, "completion_tokens": body["max_tokens"]}
        await response.write(b"data: %b\n\n" % json.dumps({"choices": [], "usage": usage}).encode())
        await response.write(b"data: [DONE]\n\n")
        return response


@contextlib.contextmanager
def serving(**settings: Any) -> Iterator[SmallServer]:
    loop, started, stop = asyncio.new_event_loop(), threading.Event(), asyncio.Event()
    servers: list[SmallServer] = []

    async def main() -> None:
        server = SmallServer(**settings)
        app = web.Application()
        app.router.add_get("/v1/models", server.models)
        app.router.add_get("/metrics", server.counters)
        app.router.add_post("/v1/completions", server.complete)
        runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        port = site._server.sockets[0].getsockname()[1]  # type: ignore[union-attr]
        server.url = f"http://127.0.0.1:{port}"
        servers.append(server)
        started.set()
        await stop.wait()
        await runner.cleanup()

    thread = threading.Thread(target=loop.run_until_complete, args=(main(),))
    thread.start()
    assert started.wait(60)
    try:
        yield servers[0]
    finally:
        loop.call_soon_threadsafe(stop.set)
        thread.join(60)
        loop.close()


def calibrated(url: str, folder: Path, **more: Any) -> Profile:
    calibrate(url, PLAN, folder / "law.json", json_output=False, **more)
    return load_profile(str(folder / "law.json"))


def test_the_law_and_how_many_are_served_at_once(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with serving() as server:
        profile = calibrated(server.url, tmp_path)
    assert (profile.engine, profile.model, profile.max_num_seqs) == ("http", "small", SLOTS)
    assert max(len(cell["lengths"]) for cell in profile.cells) == SLOTS
    assert profile.law.step(1) > 0
    assert profile.note == f"through the API of {server.url}"
    assert "not known" in capsys.readouterr().out, "what could not be separated"


def test_without_metrics_nobody_knows_of_others(tmp_path: Path) -> None:
    with serving(metrics=False) as server:
        profile = calibrated(server.url, tmp_path)
    assert profile.note is not None
    assert "whether others used the server is not known" in profile.note
    assert "/metrics answered 404" in profile.note


def test_requests_of_others_before_the_measurement(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(calibrate_server, "SETTLE", 0.1)
    with serving(others=2) as server:
        with pytest.raises(CommandError, match="with 2 running and 0 waiting requests of others"):
            calibrated(server.url, tmp_path)
        assert server.ended == 0
        assert calibrated(server.url, tmp_path, share=True).max_num_seqs == SLOTS


def test_requests_of_others_during_the_measurement(tmp_path: Path) -> None:
    with serving(ended_of_others=1) as server:
        with pytest.raises(CommandError, match=r"\d+ requests of others ended during the measur"):
            calibrated(server.url, tmp_path)
        note = calibrated(server.url, tmp_path, share=True).note
    assert note is not None
    assert "of others ended during the measurement" in note


def test_a_key_is_sent_and_a_wrong_one_is_named(tmp_path: Path) -> None:
    with serving(key="right") as server:
        with pytest.raises(SpecError, match=r"/v1/models answered 401: .*; expected --api-key"):
            calibrated(server.url, tmp_path, api_key="wrong")
        assert calibrated(server.url, tmp_path, api_key="right").model == "small"


def test_the_speed_alone_needs_a_gateway(tmp_path: Path) -> None:
    with serving() as server, pytest.raises(SpecError, match="got --speed-only with http"):
        calibrate(server.url, {"speed_only": True}, tmp_path / "x.json", json_output=True)
