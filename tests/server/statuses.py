"""Every status of the HTTP interface, one row each: how it comes about, and what it looks like."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import uvicorn
from fastapi import FastAPI

from kendall.queueing.latency.law import parse_law
from kendall.server.admission.settings import OverloadSettings
from kendall.server.engines.base import Capabilities, EngineRequest, FailureCode, TokenStream
from kendall.server.engines.emulated import EmulatedEngine
from kendall.server.gateway import Gateway
from kendall.server.http.app import create_app
from kendall.server.http.bounds import MAX_HEADERS, LimitedProtocol
from kendall.server.security.keys import read_keys
from kendall.server.security.settings import SecuritySettings
from kendall.server.settings import Settings
from kendall.server.supervision.progress import on_still
from kendall.server.supervision.settings import SupervisionSettings
from kendall.server.wire.listener import ListeningServer
from tests.server.asgi import LAW, OPERATOR, Call, call, completion, running

Ask = Callable[[FastAPI, Gateway], Awaitable[Call]]


@dataclass(frozen=True, kw_only=True)
class Row:
    """One status: `says` is what brings it about."""

    says: str
    status: int
    code: str | None
    ask: Ask
    type: str = "invalid_request_error"
    param: str | None = None
    settings: dict[str, Any] = field(default_factory=dict)
    starting: bool = False  # ask while the engine is coming up
    anywhere: bool = False  # holds for any engine, asked over HTTP alone

    @asynccontextmanager
    async def gateway(self) -> AsyncIterator[tuple[FastAPI, Gateway]]:
        """As the row wants it."""
        async with _starting() if self.starting else running("single", **self.settings) as pair:
            yield pair


@dataclass(frozen=True)
class WireRow:
    """A status that comes before there is a request; the connection ends with it."""

    says: str
    status: int
    code: str
    raw: bytes
    type: str = "invalid_request_error"
    param: str | None = None

    async def ask(self) -> tuple[int, dict[str, str], dict[str, Any]]:
        """Status, headers and body, over a socket and in real time."""
        with socket.create_server(("127.0.0.1", 0)) as sock:
            config = uvicorn.Config(
                _nobody,
                http=_Hasty,
                ws="none",
                lifespan="off",
                log_config=None,
                timeout_graceful_shutdown=1,
            )
            server = ListeningServer(config)
            serving = asyncio.create_task(server.serve(sockets=[sock]))
            reader, writer = await asyncio.open_connection(*sock.getsockname())
            writer.write(self.raw)
            answer = await reader.read()
            writer.close()
            server.should_exit = True
            await serving
        first, *lines = answer.partition(b"\r\n\r\n")[0].decode().split("\r\n")
        headers = dict(line.lower().split(": ", 1) for line in lines)
        return int(first.split()[1]), headers, json.loads(answer.partition(b"\r\n\r\n")[2])


class _Hasty(LimitedProtocol):
    body_timeout = 0.1


async def _nobody(scope: Any, receive: Any, send: Any) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


class _Slow(EmulatedEngine):
    async def start(self) -> Capabilities:
        await asyncio.sleep(1e6)
        return await super().start()


@asynccontextmanager
async def _starting() -> AsyncIterator[tuple[FastAPI, Gateway]]:
    gateway = Gateway(
        Settings(model="tiny", served_model_name="tiny", prediction_interval=0),
        _Slow(parse_law(LAW)),
    )
    app = create_app(gateway)
    async with app.router.lifespan_context(app):
        await asyncio.sleep(0)
        yield app, gateway


def complete(**fields: Any) -> Ask:
    async def ask(app: FastAPI, _: Gateway) -> Call:
        return await call(app, "POST", "/v1/completions", completion(**fields))

    return ask


def send(method: str, path: str, body: object = None, **headers: str) -> Ask:
    async def ask(app: FastAPI, _: Gateway) -> Call:
        return await call(app, method, path, body, headers)

    return ask


async def _out_of_patience(app: FastAPI, _: Gateway) -> Call:
    first = Call(app, "POST", "/v1/completions", completion(max_tokens=500))
    await asyncio.sleep(0.001)
    second = await call(app, "POST", "/v1/completions", completion())
    first.leave()
    await first.task
    return second


async def _too_many(app: FastAPI, _: Gateway) -> Call:
    await call(
        app, "POST", "/v1/completions", completion(max_tokens=500)
    )  # seen: what a service takes
    calls = [Call(app, "POST", "/v1/completions", completion(max_tokens=500)) for _ in range(4)]
    await asyncio.sleep(0.001)
    refused = await call(app, "POST", "/v1/completions", completion(max_tokens=500))
    for made in calls:
        made.leave()
        await made.task
    return refused


async def _too_fast(app: FastAPI, _: Gateway) -> Call:
    await call(app, "POST", "/v1/completions", completion())
    return await call(app, "POST", "/v1/completions", completion())


async def _calibrating_twice(app: FastAPI, _: Gateway) -> Call:
    first = Call(app, "POST", "/admin/calibrate", {"speed_only": True, "seconds": 0.1})
    await asyncio.sleep(0.001)
    second = await call(app, "POST", "/admin/calibrate", {})
    await first.task
    return second


async def _engine_refuses(app: FastAPI, gateway: Gateway) -> Call:
    def refuse(*_: object, **__: object) -> Any:
        raise RuntimeError("no")

    gateway.engine.dispatch = refuse  # type: ignore[method-assign]
    return await call(app, "POST", "/v1/completions", completion())


def _engine_fails(message: str, code: FailureCode) -> Ask:
    async def ask(app: FastAPI, gateway: Gateway) -> Call:
        def fail(_: int, requests: Sequence[EngineRequest], **__: object) -> list[TokenStream]:
            streams = [TokenStream(engine_request.request.id) for engine_request in requests]
            for stream in streams:
                asyncio.get_running_loop().call_soon(stream.fail, message, code)
            return streams

        gateway.engine.dispatch = fail  # type: ignore[method-assign,assignment]
        return await call(app, "POST", "/v1/completions", completion())

    return ask


async def _bug(app: FastAPI, gateway: Gateway) -> Call:
    gateway.call_ids.next = lambda *_: 1 / 0  # type: ignore[method-assign,assignment]
    return await call(app, "POST", "/v1/completions", completion())


async def _engine_lost(app: FastAPI, gateway: Gateway) -> Call:
    assert gateway.engine.on_death is not None
    gateway.engine.on_death("killed")
    return await call(app, "POST", "/v1/completions", completion())


def deaths_in_service(count: int) -> Ask:
    """A call under which the engine dies so often."""

    async def ask(app: FastAPI, gateway: Gateway) -> Call:
        made = Call(app, "POST", "/v1/completions", completion(max_tokens=500))
        for _ in range(count):
            await asyncio.sleep(0.01)
            assert gateway.engine.on_death is not None
            gateway.engine.on_death("killed")
        await made.task
        return made

    return ask


async def _drain_at_the_end(app: FastAPI, gateway: Gateway) -> Call:
    gateway.begin_drain()
    return await call(app, "DELETE", "/admin/drain")


async def _no_token(app: FastAPI, gateway: Gateway) -> Call:
    made = Call(app, "POST", "/v1/completions", completion(max_tokens=500))
    await asyncio.sleep(0.01)
    (sequence,) = gateway.batcher.unanswered_sequences()
    sequence.continued = True
    on_still(gateway.batcher, sequence, 60.0)
    await made.task
    return made


async def _killed_the_engine_before(app: FastAPI, gateway: Gateway) -> Call:
    await deaths_in_service(2)(app, gateway)
    return await call(app, "POST", "/v1/completions", completion(max_tokens=500))


async def _draining(app: FastAPI, gateway: Gateway) -> Call:
    await gateway.drain()
    return await call(app, "POST", "/v1/completions", completion())


SERVER = "server_error"
CLIENT_KEY, ADMIN_KEY = "sk-client-0123456789", "sk-admin-0123456789"
KEYS = {
    "security": SecuritySettings(
        api_keys=read_keys("--api-key", [CLIENT_KEY], None),
        admin_keys=read_keys("--admin-key", [ADMIN_KEY], None),
    )
}
SMALL = {"security": SecuritySettings(max_body_bytes=2048)}
GIVES_UP = {"supervision": SupervisionSettings(max_restarts=0, stuck_timeout=0)}
FULL: dict[str, Any] = {"max_num_queued_reqs": 4}
ROWS = [
    Row(
        says="a body that is no JSON",
        status=400,
        code="invalid_json",
        ask=send("POST", "/v1/completions", b'{"model":'),
        anywhere=True,
    ),
    Row(
        says="a field of the wrong kind",
        status=400,
        code="invalid_request",
        param="max_tokens",
        ask=complete(max_tokens=0),
        anywhere=True,
    ),
    Row(
        says="an unknown field",
        status=400,
        code="unknown_field",
        param="temprature",
        ask=complete(temprature=1),
        anywhere=True,
    ),
    Row(
        says="a prompt longer than the context",
        status=400,
        code="context_length_exceeded",
        param="prompt",
        ask=complete(prompt=[1] * 3000),
        anywhere=True,
    ),
    Row(
        says="a text longer than the context",
        status=400,
        code="context_length_exceeded",
        param="prompt",
        ask=complete(prompt="a word " * 3000),
        anywhere=True,
    ),
    Row(
        says="a limit beyond the context",
        status=400,
        code="context_length_exceeded",
        param="max_tokens",
        ask=complete(max_tokens=5000),
        anywhere=True,
    ),
    Row(
        says="an empty prompt",
        status=400,
        code="invalid_prompt",
        param="prompt",
        ask=complete(prompt=[]),
        anywhere=True,
    ),
    Row(
        says="a form beyond its bound",
        status=400,
        code="form_too_large",
        param="guided_json",
        ask=complete(guided_json={"enum": [f"word {index}" for index in range(200_000)]}),
        anywhere=True,
    ),
    Row(
        says="a form that the engine cannot keep to",
        status=400,
        code="invalid_request",
        ask=_engine_fails("the engine could not produce an answer", "invalid_request"),
    ),
    Row(
        says="a policy that is none",
        status=400,
        code="invalid_policy",
        param="policy",
        ask=send("PUT", "/admin/policy", {"policy": "x"}),
        anywhere=True,
    ),
    Row(
        says="a sealed field of experiments without its flag",
        status=400,
        code="forced_lengths_not_allowed",
        param="kendall_forced_output_tokens",
        ask=complete(kendall_forced_output_tokens=3),
        settings={"allow_forced_lengths": False},
    ),
    Row(
        says="a call of too many sequences",
        status=400,
        code="too_many_sequences",
        param="prompt",
        ask=complete(prompt=["a"] * 1024),
    ),
    Row(
        says="a content type that any page may send, without keys",
        status=400,
        code="unsupported_media_type",
        ask=send("POST", "/v1/completions", completion(), **{"content-type": "text/plain"}),
    ),
    Row(
        says="no key where one is needed",
        status=401,
        code="invalid_api_key",
        type="authentication_error",
        ask=complete(),
        settings=KEYS,
    ),
    Row(
        says="an API key where an admin key is needed",
        status=403,
        code="admin_key_needed",
        type="permission_error",
        ask=send("GET", "/admin/state", authorization=f"Bearer {CLIENT_KEY}"),
        settings=KEYS,
    ),
    Row(
        says="an /admin call of a page of another origin",
        status=403,
        code="other_page",
        type="permission_error",
        ask=send("GET", "/admin/state", **{"sec-fetch-site": "cross-site"}),
    ),
    Row(
        says="a page that calls a gateway without keys by a name of its own",
        status=403,
        code="other_name",
        type="permission_error",
        ask=send(
            "POST",
            "/v1/completions",
            completion(),
            **{
                "host": "evil.example",
                "origin": "http://evil.example",
                "content-type": "application/json",
            },
        ),
    ),
    Row(
        says="a model that is not served",
        status=404,
        code="model_not_found",
        type="not_found_error",
        param="model",
        ask=complete(model="other"),
        anywhere=True,
    ),
    Row(
        says="a path that is none",
        status=404,
        code="not_found",
        type="not_found_error",
        ask=send("GET", "/nowhere"),
        anywhere=True,
    ),
    Row(
        says="a method that the path has not",
        status=405,
        code="method_not_allowed",
        ask=send("GET", "/v1/completions"),
        anywhere=True,
    ),
    Row(
        says="a drain that is undone while the gateway shuts down",
        status=409,
        code="shutting_down",
        ask=_drain_at_the_end,
    ),
    Row(
        says="a calibration while another one runs", status=409, code="busy", ask=_calibrating_twice
    ),
    Row(
        says="another number of replicas, of a gateway with one engine",
        status=409,
        code="no_replicas",
        param="replicas",
        ask=send("PUT", "/admin/servers", {"replicas": 2}, authorization=f"Bearer {OPERATOR}"),
    ),
    Row(
        says="a body that is too large",
        status=413,
        code="body_too_large",
        ask=send("POST", "/v1/completions", b" " * 2049),
        settings=SMALL,
    ),
    Row(
        says="a body that says itself that it is too large",
        status=413,
        code="body_too_large",
        ask=send("POST", "/v1/completions", b" ", **{"content-length": "2049"}),
        settings=SMALL,
    ),
    Row(
        says="a queue that is full",
        status=429,
        code="queue_full",
        type="rate_limit_error",
        ask=_too_many,
        settings={"overload": OverloadSettings(**FULL)},
    ),
    Row(
        says="a queue that is full, for a balancer that tries elsewhere on 503",
        status=503,
        code="queue_full",
        type=SERVER,
        ask=_too_many,
        settings={"overload": OverloadSettings(**FULL, overload_status=503)},
    ),
    Row(
        says="a target of the delay that cannot be kept",
        status=429,
        code="slo_unattainable",
        type="rate_limit_error",
        ask=_too_many,
        settings={"overload": OverloadSettings(slo="p99_queueing_delay=1s")},
    ),
    Row(
        says="a key that sends faster than it may",
        status=429,
        code="rate_limit_exceeded",
        type="rate_limit_error",
        ask=_too_fast,
        settings={"overload": OverloadSettings(rate_limit=0.001, rate_limit_burst=1000)},
    ),
    Row(
        says="patience that runs out in the queue",
        status=429,
        code="queue_timeout",
        type="rate_limit_error",
        ask=_out_of_patience,
        settings={"patience": 0.05},
    ),
    Row(says="a bug of ours", status=500, code="internal_error", type=SERVER, ask=_bug),
    Row(
        says="an engine that refuses one request",
        status=500,
        code="engine_error",
        type=SERVER,
        ask=_engine_refuses,
    ),
    Row(
        says="an engine that fails over one request",
        status=500,
        code="engine_error",
        type=SERVER,
        ask=_engine_fails("no", "engine_error"),
    ),
    Row(
        says="a request that killed the engine",
        status=500,
        code="engine_killed",
        type=SERVER,
        ask=deaths_in_service(2),
    ),
    Row(
        says="a prompt that killed the engine before",
        status=400,
        code="engine_killed",
        param="prompt",
        ask=_killed_the_engine_before,
    ),
    Row(
        says="an answer that takes longer than it may",
        status=504,
        code="deadline_exceeded",
        type=SERVER,
        ask=complete(max_tokens=500, request_timeout=0.05),
    ),
    Row(
        says="a first token that takes longer than it may",
        status=504,
        code="first_token_timeout",
        type=SERVER,
        ask=complete(first_token_timeout=0.0001),
    ),
    Row(
        says="an answer that the engine makes no token of",
        status=504,
        code="sequence_stalled",
        type=SERVER,
        ask=_no_token,
    ),
    Row(
        says="a field that others serve",
        status=501,
        code="unsupported",
        type=SERVER,
        param="tools",
        ask=complete(tools=[{"type": "function"}]),
        anywhere=True,
    ),
    Row(
        says="a form of answers that the engine has not",
        status=501,
        code="unsupported",
        type=SERVER,
        param="structured_outputs",
        ask=complete(response_format={"type": "json_object"}),
    ),
    Row(
        says="an engine that is coming up",
        status=503,
        code="engine_unavailable",
        type=SERVER,
        ask=complete(),
        starting=True,
    ),
    Row(
        says="an engine that is lost",
        status=503,
        code="engine_unavailable",
        type=SERVER,
        ask=_engine_lost,
        settings=GIVES_UP,
    ),
    Row(
        says="an engine lost in the middle of service",
        status=503,
        code="engine_unavailable",
        type=SERVER,
        ask=deaths_in_service(1),
        settings=GIVES_UP,
    ),
    Row(says="a gateway that drains", status=503, code="shutting_down", type=SERVER, ask=_draining),
]
_POST = b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\n"
WIRE_ROWS = [
    WireRow("what is no HTTP", 400, "invalid_http", b"nonsense\r\n\r\n"),
    WireRow("a request without a Host", 400, "invalid_http", b"GET / HTTP/1.1\r\n\r\n"),
    WireRow(
        "a body that does not come", 408, "request_timeout", _POST + b"content-length: 9\r\n\r\nab"
    ),
    WireRow(
        "a head of too many headers",
        431,
        "head_too_large",
        _POST + b"h: x\r\n" * MAX_HEADERS + b"\r\n",
    ),
]
