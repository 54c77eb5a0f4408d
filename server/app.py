"""The routes: thin calls into the gateway, errors in OpenAI's shape."""

from __future__ import annotations

import asyncio
import contextlib
import re
import time
from collections.abc import AsyncIterator, Callable
from importlib import metadata
from typing import Any, TypeVar

from fastapi import FastAPI, Request, Response
from fastapi.responses import JSONResponse
from pydantic import BaseModel, ValidationError
from starlette.exceptions import HTTPException

from queueing.profile import Profile
from server.answer import Answer, AnswerOptions
from server.calibration import Calibrator
from server.errors import ApiError
from server.formats import ChatFormat, CompletionFormat
from server.gateway import Gateway
from server.schema import FORCED_FIELD, CalibrationRequest, ChatRequest, CompletionRequest, PolicyChange

MAX_BODY = 16 << 20  # bytes
REQUEST_ID = re.compile(r"[\w.:-]{1,128}")
_Model = TypeVar("_Model", bound=BaseModel)


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

    app = FastAPI(title="Kendall", version=metadata.version("kendall"), lifespan=lifespan, docs_url=None, redoc_url=None)
    app.state.gateway = gateway
    _add_errors(app)
    _add_openai(app, gateway)
    _add_state(app, gateway)
    _add_policy(app, gateway)
    _add_admin(app, gateway)
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
        shaped = ApiError(error.status_code, code, f"{request.method} {request.url.path}: {error.detail}")
        return JSONResponse(shaped.body(), error.status_code)


async def parse(request: Request, model: type[_Model]) -> _Model:
    """The body as `model`. Raises ApiError 400 (never 422) or 413, naming the field."""
    body = bytearray()
    async for part in request.stream():
        body += part
        if len(body) > MAX_BODY:
            raise ApiError(413, "body_too_large", f"got a body of more than {MAX_BODY} bytes; expected less")
    try:
        return model.model_validate_json(bytes(body))
    except ValidationError as error:
        first = error.errors(include_url=False, include_context=False)[0]
        where = ".".join(str(part) for part in first["loc"])
        got = f"; got {first['input']!r:.80}" if where and first["type"] != "missing" else ""
        code = "invalid_json" if first["type"] == "json_invalid" else "invalid_request"
        raise ApiError(400, code, f"{where + ': ' if where else ''}{first['msg']}{got}", param=where or None) from None


def _check(gateway: Gateway, call: CompletionRequest | ChatRequest) -> None:
    if call.model != gateway.settings.served_model_name:
        raise ApiError(
            404, "model_not_found", f"got model {call.model!r}; this gateway serves {gateway.settings.served_model_name!r}", param="model"
        )
    if unsupported := call.unsupported():
        raise ApiError(501, "unsupported", f"{unsupported[0]} is not served by this gateway; leave it out", param=unsupported[0])
    if call.kendall_forced_output_tokens is not None and not gateway.settings.allow_forced_lengths:
        raise ApiError(400, "forced_lengths_not_allowed", "forced lengths need `kendall serve --allow-forced-lengths`", param=FORCED_FIELD)


async def _serve(gateway: Gateway, request: Request, call: CompletionRequest | ChatRequest, prefix: str) -> Response:
    arrived_at = gateway.now()
    batcher = gateway.admit()
    _check(gateway, call)
    call_id = gateway.next_call_id(prefix)
    works = await gateway.works(call, call_id, arrived_at)
    asked_id = request.headers.get("x-request-id", "")
    options = AnswerOptions(
        request_id=asked_id if REQUEST_ID.fullmatch(asked_id) else call_id,
        stream=call.stream,
        include_usage=call.stream_options is not None and call.stream_options.include_usage,
        n=call.n,
        client_limit=call.client_limit(),
    )
    form = ChatFormat if isinstance(call, ChatRequest) else CompletionFormat
    top = works[0].sampling.logprobs
    return Answer(batcher, works, form(call_id, int(time.time()), call.model, top), options)  # noqa: TID251 - a date, not a clock


def _add_openai(app: FastAPI, gateway: Gateway) -> None:
    @app.post("/v1/completions")
    async def completions(request: Request) -> Response:
        return await _serve(gateway, request, await parse(request, CompletionRequest), "cmpl")

    @app.post("/v1/chat/completions")
    async def chat_completions(request: Request) -> Response:
        return await _serve(gateway, request, await parse(request, ChatRequest), "chatcmpl")

    @app.get("/v1/models")
    async def models() -> dict[str, Any]:
        name = gateway.settings.served_model_name
        entry: dict[str, Any] = {"id": name, "object": "model", "created": 0, "owned_by": "kendall"}
        if gateway.ready:
            entry |= gateway.describe_engine(gateway.batcher.capabilities)
        return {"object": "list", "data": [entry]}


def _add_state(app: FastAPI, gateway: Gateway) -> None:
    @app.get("/health")
    async def health() -> Response:
        return Response(status_code=503 if gateway.dead else 200)

    @app.get("/ready")
    async def ready() -> Response:
        return Response(status_code=200 if gateway.ready and not gateway.draining else 503)

    @app.get("/version")
    async def version() -> dict[str, str]:
        return {"version": metadata.version("kendall")}

    @app.get("/metrics")
    async def metrics() -> Response:
        return Response(gateway.metrics.exposition(), media_type="text/plain; version=0.0.4; charset=utf-8")

    @app.get("/load")
    async def load() -> dict[str, int]:
        return {"server_load": gateway.batcher.unanswered if gateway.ready else 0}


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
            "queue_length": batcher.queue_length,
            "in_service": batcher.in_service,
            "unanswered": batcher.unanswered,
            "running": running,
            "draining": gateway.draining,
        }

    @app.get("/admin/prediction")
    async def prediction() -> dict[str, Any]:
        live = gateway.live
        if live is None or live.prediction is None:
            reason = (
                "no latency law: POST /admin/calibrate or start with --latency" if gateway.law is None else "too few requests in the window"
            )
            return {"prediction": None, "reason": reason}
        return {"prediction": live.prediction, "reason": None}

    @app.post("/admin/calibrate")
    async def calibrate(request: Request) -> dict[str, Any]:
        plan = await parse(request, CalibrationRequest)
        if gateway.calibrating or gateway.admit().in_service or gateway.batcher.queue_length:
            raise ApiError(409, "busy", "calibration needs the engine to itself; wait until nothing is in service")
        profile: Profile = await Calibrator(gateway).run(plan)
        return profile.to_dict()

    @app.post("/admin/drain")
    async def drain() -> dict[str, Any]:
        await gateway.drain()
        return {"drained": True}
