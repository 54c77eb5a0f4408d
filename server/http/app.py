"""The routes: thin calls into the gateway, errors in OpenAI's shape."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from functools import partial
from importlib import metadata
from typing import Any

from fastapi import FastAPI, Request, Response
from fastapi.responses import PlainTextResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from kendall.queueing.json_form import json_object
from kendall.queueing.latency.profile import Profile
from kendall.server.admission.limits_in_force import PolicyChange
from kendall.server.calibration.calibration import (
    CANCELLED,
    CalibrationRequest,
    Calibrator,
    warn_of_fit,
)
from kendall.server.engines.base import describe_engine
from kendall.server.engines.proxied import SENDER
from kendall.server.gateway import Gateway, restarts_of
from kendall.server.http.api.answers import ChatAnswer, CompletionAnswer
from kendall.server.http.api.failures import add_failures, in_words_of
from kendall.server.http.api.models import add_models
from kendall.server.http.api.newer_endpoints import (
    BEYOND,
    Call,
    MessagesRequest,
    ResponsesRequest,
    described,
)
from kendall.server.http.api.openapi import ANSWERING, answers, body, document, errors
from kendall.server.http.api.parameters import CALL_HEADERS
from kendall.server.http.api.schema import AutopilotChange, ChatRequest, CompletionRequest
from kendall.server.http.api.servers import add_servers
from kendall.server.http.api.tokenizing import add_tokenizing
from kendall.server.http.api.validation import parse
from kendall.server.http.bodies import BodyBudget
from kendall.server.http.call import answer, direct
from kendall.server.http.headers import stamped
from kendall.server.http.live_routes import add_live
from kendall.server.http.openai_tools.others import add_others
from kendall.server.http.proxied.routes import add_proxied
from kendall.server.http.unqueued import Unqueued
from kendall.server.live.servers_seen import servers_seen
from kendall.server.page import Feed, add_page
from kendall.server.runtime.errors import ApiError
from kendall.server.security.audit import AuditTrail
from kendall.server.security.cors import cors
from kendall.server.security.denials import Denial
from kendall.server.security.early_answer import LEASE
from kendall.server.security.guard import Guard
from kendall.server.security.routes import ADMIN
from kendall.server.telemetry.metrics import exposition

EVENTS = "/live/events"  # an answer that has no end
BODILESS = frozenset({"GET", "HEAD", "OPTIONS"})  # nobody reads a body of theirs


class _App(FastAPI):
    """FastAPI, but the two routes that carry answers are called without its layers: they cost
    more than the gateway's own work.
    """

    direct: Mapping[str, Callable[[Scope, Receive, Send], Awaitable[None]]]
    guard: Guard
    audit: AuditTrail
    bodies: BodyBudget
    cors: ASGIApp | None = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pages of other origins may be let in, but never to /admin."""
        outermost = (
            self.guarded
            if self.cors is None or scope.get("path", "").startswith(ADMIN)
            else self.cors
        )
        await outermost(scope, receive, send)

    async def guarded(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Whatever comes in passes the guard first."""
        if scope["type"] != "http":
            await super().__call__(scope, receive, send)
        elif (rejection := self.guard.rejection(scope)) is not None:
            if isinstance(rejection, Denial):
                self.audit.denied(scope, rejection.reason)
            told = in_words_of(scope["path"], rejection)
            await told(scope, receive, stamped(scope, send))
        elif scope["method"] in BODILESS:
            if scope["path"] == EVENTS:
                send = self._while_admitted(scope, send)
            await super().__call__(scope, receive, stamped(scope, send))
        else:
            lease = scope[LEASE] = self.bodies.lease(receive)
            try:
                await self._with_a_body(scope, lease.receive, send)
            finally:
                lease.end()

    def _while_admitted(self, scope: Scope, send: Send) -> Send:
        """`send` that ends the answer once its caller would not be let in any more: a key may be
        revoked while a page follows.
        """
        ended = False

        async def sending(message: Message) -> None:
            nonlocal ended
            if ended:
                return
            ended = message["type"] == "http.response.body" and (
                self.guard.rejection(scope) is not None
            )
            await send({"type": "http.response.body", "body": b""} if ended else message)

        return sending

    async def _with_a_body(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["method"] == "POST" and (call := self.direct.get(scope["path"])) is not None:
            await call(scope, receive, send)
            return
        if scope["path"].startswith(ADMIN):
            send = self.audit.changing(scope, send)
        await super().__call__(scope, receive, stamped(scope, send))


def create_app(
    gateway: Gateway,
    on_start_failure: Callable[[BaseException], None] | None = None,
    on_ready: Callable[[Gateway], Any] | None = None,
) -> FastAPI:
    """The ASGI application; HTTP answers at once, the engine comes up behind it."""
    feed = Feed(gateway)
    ended = partial(_report, gateway=gateway, on_failure=on_start_failure, on_ready=on_ready)
    app = _App(
        title="Kendall",
        version=metadata.version("kendall"),
        lifespan=lambda _: _lifespan(gateway, feed, ended),
        docs_url=None,
        redoc_url=None,
        redirect_slashes=False,  # a redirect would repeat the client's Host
    )
    app.state.gateway = gateway
    app.guard = Guard(gateway.settings.security)
    app.bodies = BodyBudget(8 * gateway.settings.security.max_body_bytes)
    app.audit = AuditTrail(gateway.metrics.calls.denied)
    app.cors = cors(app.guarded, gateway.settings.security.allowed_origins)
    add_failures(app)
    if gateway.proxying is not None:
        app.direct = add_proxied(app, gateway)
    else:
        _add_openai(app, gateway)
        unqueued = Unqueued(gateway)
        add_tokenizing(app, gateway, unqueued)
        add_others(app, gateway, unqueued)
    add_models(app, gateway)
    _add_state(app, gateway)
    _add_policy(app, gateway)
    _add_admin(app, gateway)
    add_servers(app, gateway)
    add_live(app, gateway)
    _add_autopilot(app, gateway)
    _add_calibration(app, gateway)
    document(app, {} if gateway.serving_objects is None else BEYOND)
    add_page(app, feed)
    return app


@contextlib.asynccontextmanager
async def _lifespan(
    gateway: Gateway, feed: Feed, on_start_end: Callable[[asyncio.Task[None]], None]
) -> AsyncIterator[None]:
    starting = asyncio.create_task(gateway.start())
    starting.add_done_callback(on_start_end)
    showing = asyncio.create_task(feed.run())
    try:
        yield
    finally:
        starting.cancel()
        showing.cancel()
        await asyncio.gather(starting, showing, return_exceptions=True)
        await gateway.stop()


def _report(
    task: asyncio.Task[None],
    gateway: Gateway,
    on_failure: Callable[[BaseException], None] | None,
    on_ready: Callable[[Gateway], Any] | None,
) -> None:
    if task.cancelled():
        return
    if (error := task.exception()) is not None:
        gateway.lifecycle.fail(str(error))
        if on_failure is not None:
            on_failure(error)
    elif on_ready is not None:
        on_ready(gateway)


def _add_openai(app: _App, gateway: Gateway) -> None:
    models: dict[str, type[Call]] = {
        "completions": CompletionRequest,
        "chat/completions": ChatRequest,
        "responses": ResponsesRequest,
        "messages": MessagesRequest,
    }
    # under /openai, too: KServe has them there
    app.direct = {
        f"{base}/v1/{name}": direct(
            gateway, partial(answer, gateway, model=model), model.endpoint.dialect
        )
        for name, model in models.items()
        for base in ("", "/openai")
    }

    app.post(
        "/v1/completions",
        name="completions",
        responses=answers(CompletionAnswer, *ANSWERING, streams=True),
        openapi_extra=body(CompletionRequest, CALL_HEADERS),
    )(_never)
    for model in (ResponsesRequest, MessagesRequest):
        app.add_api_route(model.endpoint.path, _never, methods=["POST"], **described(model))

    app.post(
        "/v1/chat/completions",
        name="chat_completions",
        responses=answers(ChatAnswer, *ANSWERING, streams=True),
        openapi_extra=body(ChatRequest, CALL_HEADERS),
    )(_never)


# stands in for routes that are called without FastAPI, which needs to know their methods
async def _never() -> None: ...


def _add_state(app: FastAPI, gateway: Gateway) -> None:
    @app.get(
        "/health",
        response_class=Response,
        responses={
            503: {"description": "The engine has failed for good."},
            508: {"description": "The probe is this gateway's own."},
        },
    )
    async def health(request: Request) -> Response:
        passing = gateway.proxying
        if passing is not None and request.headers.get(SENDER) == passing.sender:
            return Response(status_code=508)  # its own probe: it was named as a server behind it
        return Response(status_code=200 if gateway.lifecycle.healthy else 503)

    @app.get(
        "/ready",
        response_class=Response,
        responses={503: {"description": "Starting, calibrating, lost, or shutting down."}},
    )
    async def ready() -> Response:
        life = gateway.lifecycle
        serves = life.ready and not (life.draining or life.leaving or gateway.dispatch_paused)
        return Response(status_code=200 if serves else 503)

    @app.get("/version")
    async def version() -> dict[str, str]:
        return {"version": metadata.version("kendall")}

    @app.get("/metrics", response_class=PlainTextResponse, responses=errors(401))
    async def metrics() -> Response:
        return Response(
            exposition(gateway.metrics), media_type="text/plain; version=0.0.4; charset=utf-8"
        )

    @app.get("/load", responses=errors(401))
    async def load() -> dict[str, int]:
        return {"server_load": gateway.batcher.unanswered if gateway.lifecycle.started else 0}


def _add_policy(app: FastAPI, gateway: Gateway) -> None:
    @app.get("/admin/policy", responses=errors(401, 403, 500, 503))
    async def policy() -> dict[str, Any]:
        return gateway.limits.state()

    @app.put(
        "/admin/policy",
        responses=errors(400, 401, 403, 413, 500, 503),
        openapi_extra=body(PolicyChange),
    )
    async def change_policy(request: Request) -> dict[str, Any]:
        return gateway.limits.change(
            await parse(request.receive, PolicyChange, gateway.settings.security.max_body_bytes)
        )


def _add_admin(app: FastAPI, gateway: Gateway) -> None:
    @app.get("/admin/state", responses=errors(401, 403, 500, 503))
    async def state() -> dict[str, Any]:
        gateway.flush()
        batcher = gateway.batcher
        running = [
            [{"request_id": r.request.id, "output_tokens": r.output_tokens_so_far} for r in server]
            for server in batcher.running()
        ]
        return json_object(
            gateway.limits.state()
            | {
                "engine": describe_engine(batcher.capabilities, gateway.settings.served_model_name),
                "law": None if gateway.latency.law is None else str(gateway.latency.law),
                "record_file": None
                if gateway.settings.record_file is None
                else str(gateway.settings.record_file.resolve()),
                "queue_length": batcher.queue_length,
                "in_service": batcher.in_service,
                "unanswered": batcher.unanswered,
                "running": running,
                "draining": gateway.lifecycle.draining,
                "supervision": gateway.supervisor.statistics()
                | {"stuck": gateway.lifecycle.stuck, "restarts": restarts_of(gateway)}
                | batcher.recovery.statistics()
                | {"refused_prompts": len(gateway.rejected_prompts)},
                "servers": servers_seen(gateway),
                "arrivals": gateway.arrivals.state(batcher.epoch),
                "overload": gateway.overload.state(),
                "estimates": gateway.live_model().estimates,
                "energy": gateway.live_model().meter.described(),
                "idle_probes": None if gateway.probes is None else gateway.probes.state(),
                "autopilot": gateway.live_model().pilot.shown(),
                "self_checks": gateway.live_model().checks,
                "failures": {
                    "prediction": gateway.live_model().failures,
                    "autopilot": gateway.live_model().pilot_failures,
                },
            }
        )


def _add_autopilot(app: FastAPI, gateway: Gateway) -> None:
    @app.put(
        "/admin/autopilot",
        responses=errors(400, 401, 403, 409, 413, 500, 503),
        openapi_extra=body(AutopilotChange),
    )
    async def change_autopilot(request: Request) -> dict[str, Any]:
        change = await parse(
            request.receive, AutopilotChange, gateway.settings.security.max_body_bytes
        )
        return json_object(await gateway.live_model().pilot.steer(change.mode))


def _add_calibration(app: FastAPI, gateway: Gateway) -> None:
    @app.post(
        "/admin/calibrate",
        responses=errors(400, 401, 403, 409, 413, 500, 503, 504),
        openapi_extra=body(CalibrationRequest),
    )
    async def calibrate(request: Request) -> dict[str, Any]:
        plan = await parse(
            request.receive, CalibrationRequest, gateway.settings.security.max_body_bytes
        )
        gateway.admit()
        profile: Profile = await Calibrator(gateway).run(plan)
        if not plan.speed_only:
            warn_of_fit(profile)
        return profile.to_dict()

    @app.delete("/admin/calibrate", responses=errors(401, 403, 500))
    async def end_calibration() -> dict[str, Any]:
        error = ApiError(
            409, CANCELLED, "the calibration was cancelled; the latency law in force did not change"
        )
        return {"cancelled": gateway.latency.stop_calibration(error)}

    @app.post("/admin/drain", responses=errors(401, 403, 500))
    async def drain() -> dict[str, Any]:
        return {"drained": await gateway.drain()}

    @app.delete("/admin/drain", responses=errors(401, 403, 409, 500))
    async def undo_drain() -> dict[str, Any]:
        gateway.undo_drain()
        return {"draining": False}
