"""The routes: thin calls into the gateway, errors in OpenAI's shape."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable
from importlib import metadata
from typing import Any, TypeVar

from fastapi import FastAPI, Request, Response
from fastapi.responses import JSONResponse
from pydantic import BaseModel
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Receive, Scope, Send

from policies import SpecError
from queueing.profile import Profile
from server.call import answer, direct, read_body, validate
from server.errors import ApiError
from server.exposition import exposition
from server.gateway import Gateway
from server.law.calibration import Calibrator
from server.schema import CalibrationRequest, ChatRequest, CompletionRequest, PolicyChange
from server.security.cors import cors
from server.security.guard import Guard
from server.security.wording import brief

_Model = TypeVar("_Model", bound=BaseModel)


class _App(FastAPI):
    """FastAPI, but the two routes that carry answers are called without its layers: they cost more than the gateway's own work."""

    direct: dict[str, Callable[[Scope, Receive, Send], Awaitable[None]]]
    guard: Guard
    cors: ASGIApp | None = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await (self.guarded if self.cors is None else self.cors)(scope, receive, send)

    async def guarded(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Whatever comes in passes the guard first."""
        if scope["type"] != "http":
            await super().__call__(scope, receive, send)
        elif (refusal := self.guard.refusal(scope)) is not None:
            await refusal(scope, receive, send)
        elif scope["method"] == "POST" and (call := self.direct.get(scope["path"])) is not None:
            await call(scope, receive, send)
        else:
            await super().__call__(scope, receive, send)


def create_app(
    gateway: Gateway,
    on_start_failure: Callable[[BaseException], None] | None = None,
    on_ready: Callable[[Gateway], Any] | None = None,
) -> FastAPI:
    """The ASGI application; HTTP answers at once, the engine comes up behind it."""

    @contextlib.asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        starting = asyncio.create_task(gateway.start())
        starting.add_done_callback(lambda task: _report(task, gateway, on_start_failure, on_ready))
        try:
            yield
        finally:
            starting.cancel()
            await asyncio.gather(starting, return_exceptions=True)
            await gateway.stop()

    app = _App(title="Kendall", version=metadata.version("kendall"), lifespan=lifespan, docs_url=None, redoc_url=None)
    app.state.gateway = gateway
    app.guard = Guard(gateway.settings.security)
    app.cors = cors(app.guarded, gateway.settings.security.allowed_origins)
    app.direct = {"/v1/completions": direct(gateway, CompletionRequest), "/v1/chat/completions": direct(gateway, ChatRequest)}
    _add_errors(app)
    _add_openai(app, gateway)
    _add_state(app, gateway)
    _add_policy(app, gateway)
    _add_admin(app, gateway)
    _add_live(app, gateway)
    _add_calibration(app, gateway)
    return app


def _report(
    task: asyncio.Task[None],
    gateway: Gateway,
    on_failure: Callable[[BaseException], None] | None,
    on_ready: Callable[[Gateway], Any] | None,
) -> None:
    if task.cancelled():
        return
    if (error := task.exception()) is not None:
        gateway.dead = str(error)
        if on_failure is not None:
            on_failure(error)
    elif on_ready is not None:
        on_ready(gateway)


def _add_errors(app: FastAPI) -> None:
    @app.exception_handler(ApiError)
    async def api_error(_: Request, error: ApiError) -> JSONResponse:
        return JSONResponse(error.body(), error.status, error.headers())

    @app.exception_handler(HTTPException)
    async def http_error(request: Request, error: HTTPException) -> JSONResponse:
        code = {404: "not_found", 405: "method_not_allowed"}.get(error.status_code, "error")
        shaped = ApiError(error.status_code, code, f"{request.method} {brief(request.url.path)}: {error.detail}")
        return JSONResponse(shaped.body(), error.status_code)


async def parse(request: Request, model: type[_Model]) -> _Model:
    """The body as `model`. Raises ApiError 400 (never 422) or 413, naming the field."""
    return validate(await read_body(request.receive), model)


def _add_openai(app: FastAPI, gateway: Gateway) -> None:
    @app.post("/v1/completions")
    async def completions(request: Request) -> Response:
        return await answer(gateway, request.scope, request.receive, CompletionRequest)

    @app.post("/v1/chat/completions")
    async def chat_completions(request: Request) -> Response:
        return await answer(gateway, request.scope, request.receive, ChatRequest)

    @app.get("/v1/models")
    async def models() -> dict[str, Any]:
        names = {"id": gateway.settings.served_model_name, "root": gateway.settings.model}  # a benchmark without --model reads both
        entry: dict[str, Any] = {**names, "object": "model", "created": 0, "owned_by": "kendall"}
        if gateway.started:
            entry |= gateway.describe_engine(gateway.batcher.capabilities)
        return {"object": "list", "data": [entry]}


def _add_state(app: FastAPI, gateway: Gateway) -> None:
    @app.get("/health")
    async def health() -> Response:
        return Response(status_code=200 if gateway.healthy else 503)

    @app.get("/ready")
    async def ready() -> Response:
        return Response(status_code=200 if gateway.ready and gateway.healthy and not gateway.draining else 503)

    @app.get("/version")
    async def version() -> dict[str, str]:
        return {"version": metadata.version("kendall")}

    @app.get("/metrics")
    async def metrics() -> Response:
        return Response(exposition(gateway.metrics), media_type="text/plain; version=0.0.4; charset=utf-8")

    @app.get("/load")
    async def load() -> dict[str, int]:
        return {"server_load": gateway.batcher.unanswered if gateway.started else 0}


def _add_policy(app: FastAPI, gateway: Gateway) -> None:
    @app.get("/admin/policy")
    async def policy() -> dict[str, Any]:
        return gateway.policy_in_force()

    @app.put("/admin/policy")
    async def change_policy(request: Request) -> dict[str, Any]:
        return gateway.change(await parse(request, PolicyChange))


def _add_admin(app: FastAPI, gateway: Gateway) -> None:
    @app.get("/admin/state")
    async def state() -> dict[str, Any]:
        gateway.flush()
        batcher = gateway.batcher
        running = [[{"request_id": r.request.id, "output_tokens": r.output_tokens_so_far} for r in server] for server in batcher.running()]
        return gateway.policy_in_force() | {
            "engine": gateway.describe_engine(batcher.capabilities),
            "law": None if gateway.law is None else str(gateway.law),
            "record_file": None if gateway.settings.record_file is None else str(gateway.settings.record_file.resolve()),
            "queue_length": batcher.queue_length,
            "in_service": batcher.in_service,
            "unanswered": batcher.unanswered,
            "running": running,
            "draining": gateway.draining,
            "supervision": gateway.supervisor.statistics() | {"stuck": gateway.stuck},
            "arrivals": gateway.arrivals.state(batcher.epoch),
            "overload": gateway.overload.state(),
            "estimates": gateway.live_model().estimates,
            "energy": gateway.live_model().energy(),
            "idle_probes": None if gateway.probes is None else gateway.probes.state(),
            "autopilot": gateway.live_model().autopilot,
            "self_checks": gateway.live_model().checks,
        }


def _add_live(app: FastAPI, gateway: Gateway) -> None:
    @app.get("/admin/prediction")
    async def prediction(*, what_if: bool = False) -> dict[str, Any]:
        live = gateway.live_model()
        if what_if:
            await live.update_what_if()
        reason = live.why_nothing() if live.prediction is None else None
        return {"prediction": live.prediction, "what_if": live.what_if, "what_if_at": live.what_if_at, "reason": reason}

    @app.get("/admin/advice")
    async def advice(request: Request) -> dict[str, Any]:
        live = gateway.live_model()
        try:
            found = await live.advice(request.query_params)
        except SpecError as error:
            raise ApiError(400, "invalid_objective", str(error)) from None
        return {"advice": found, "reason": None if found else live.why_nothing()}


def _add_calibration(app: FastAPI, gateway: Gateway) -> None:
    @app.post("/admin/calibrate")
    async def calibrate(request: Request) -> dict[str, Any]:
        plan = await parse(request, CalibrationRequest)
        if gateway.calibrating or gateway.admit().in_service or gateway.batcher.queue_length:
            raise ApiError(409, "busy", "calibration needs the engine to itself; wait until nothing is in service")
        profile: Profile = await Calibrator(gateway).run(plan)
        gateway.begin_epoch()  # what waited meanwhile waited for the calibration
        return profile.to_dict()

    @app.post("/admin/drain")
    async def drain() -> dict[str, Any]:
        await gateway.drain()
        return {"drained": True}
