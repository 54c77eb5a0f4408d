"""Raw ASGI: a client that reads chunk by chunk, and can go away."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, cast

import httpx
from fastapi import FastAPI

from kendall.queueing.latency.law import parse_law
from kendall.server.engines.emulated import EmulatedEngine
from kendall.server.gateway import Gateway
from kendall.server.http.app import create_app
from kendall.server.security.keys import read_keys
from kendall.server.security.routes import paths
from kendall.server.security.settings import SecuritySettings
from kendall.server.settings import Settings
from kendall.server.supervision.settings import SupervisionSettings

OPERATOR = "an-admin-key-of-these-tests"
FOR_THE_RUN = SecuritySettings(
    made_admin_keys=read_keys("--admin-key", [OPERATOR], None)
)  # as `kendall serve` makes one
LAW = "k1=0.25e-3,k2=2e-3,k3=25e-6,k4=0.9e-3,turnaround=1.5e-3"
# 2,000 tokens take 100 s: longer than a test in real time waits for anything
SLOW = "k1=0.25e-3,k2=2e-3,k3=25e-6,k4=50e-3"


@asynccontextmanager
async def running(
    policy: str = "continuous:max_batch_size=4",
    *,
    law: str = LAW,
    servers: int = 1,
    **settings: Any,
) -> AsyncIterator[tuple[FastAPI, Gateway]]:
    """A gateway on the emulated engine, started; its lifespan is run."""
    defaults = {
        "model": "tiny",
        "served_model_name": "tiny",
        "policy": policy,
        "prediction_interval": 0,
        "allow_forced_lengths": True,
    }
    defaults["security"] = FOR_THE_RUN
    defaults["supervision"] = SupervisionSettings(
        stuck_timeout=0
    )  # no timer of its own: a deadlock is seen as one
    gateway = Gateway(
        Settings(**(defaults | settings)),
        EmulatedEngine(parse_law(law), servers=servers),
        parse_law(law),
    )
    ready = asyncio.get_running_loop().create_future()
    app = create_app(gateway, ready.set_exception, lambda _: ready.set_result(None))
    async with app.router.lifespan_context(app):
        await ready
        yield app, gateway


class Call:
    """One HTTP call by raw ASGI messages."""

    def __init__(
        self,
        app: FastAPI,
        method: str,
        path: str,
        body: object = None,
        headers: dict[str, str] | None = None,
        *,
        query: bytes = b"",
        client: str = "127.0.0.1",
        more: bool = False,
    ) -> None:
        raw = (
            body if isinstance(body, bytes) else b"" if body is None else json.dumps(body).encode()
        )
        given = (
            {"authorization": f"Bearer {OPERATOR}"}
            if headers is None and path in paths("admin key")
            else headers or {}
        )
        self._incoming: asyncio.Queue[dict[str, Any]] = asyncio.Queue()
        self._incoming.put_nowait({"type": "http.request", "body": raw, "more_body": more})
        self.status: int | None = None
        self.headers: dict[str, str] = {}
        self.pairs: list[tuple[str, str]] = []  # the headers as they came
        self.chunks: list[bytes] = []
        self.whole = False
        self.started = asyncio.Event()
        scope = {
            "type": "http",
            "asgi": {"version": "3.0"},
            "http_version": "1.1",
            "method": method,
            "path": path,
            "raw_path": path.encode(),
            "query_string": query,
            "root_path": "",
            "scheme": "http",
            "headers": [
                *([] if "host" in given else [(b"host", b"127.0.0.1")]),
                *((key.encode(), value.encode()) for key, value in given.items()),
            ],
            "server": ("test", 80),
            "client": (client, 1),
        }
        self.task = asyncio.create_task(app(scope, self._incoming.get, self._send))

    async def _send(self, message: dict[str, Any]) -> None:
        if message["type"] == "http.response.start":
            self.status = message["status"]
            headers = message["headers"]
            self.pairs = [(key.decode(), value.decode("latin-1")) for key, value in headers]
            self.headers = dict(self.pairs)
            self.started.set()
        else:
            self.chunks.append(message.get("body", b""))
            self.whole = not message.get("more_body", False)

    def leave(self) -> None:
        """The client closes its connection."""
        self._incoming.put_nowait({"type": "http.disconnect"})

    @property
    def body(self) -> bytes:
        return b"".join(self.chunks)

    def json(self) -> Any:
        return json.loads(self.body)

    def events(self) -> list[Any]:
        """SSE data so far; `[DONE]` as a text."""
        data = [line[6:] for line in self.body.split(b"\n\n") if line.startswith(b"data: ")]
        return ["[DONE]" if item == b"[DONE]" else json.loads(item) for item in data]


async def call(
    app: FastAPI, method: str, path: str, body: object = None, headers: dict[str, str] | None = None
) -> Call:
    """A call that is waited for."""
    made = Call(app, method, path, body, headers)
    await made.task
    return made


def through(client: httpx.AsyncClient) -> FastAPI:
    """The application on the other side of a client."""

    async def app(scope: dict[str, Any], receive: Any, send: Any) -> None:
        message = await receive()
        headers = [
            (key.decode(), value.decode()) for key, value in scope["headers"] if key != b"host"
        ]
        answer = await client.request(
            scope["method"], scope["path"], content=message["body"], headers=headers
        )
        raw = [(key.lower(), value) for key, value in answer.headers.raw]
        await send({"type": "http.response.start", "status": answer.status_code, "headers": raw})
        await send({"type": "http.response.body", "body": answer.content, "more_body": False})

    return cast("FastAPI", app)


def completion(**fields: Any) -> dict[str, Any]:
    """A small request."""
    return {"model": "tiny", "prompt": [5, 6, 7], "max_tokens": 8, "ignore_eos": True} | fields
