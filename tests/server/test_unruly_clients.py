"""Input of every wrong kind over real sockets: each connection is answered or closed in bounded
time, and nothing is left.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import math
import socket
from collections import Counter
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import uvicorn
import uvloop

from kendall.queueing.latency.law import LatencyModel, parse_law
from kendall.queueing.measurement.record import Record
from kendall.server.engines.emulated import EmulatedEngine
from kendall.server.gateway import Gateway
from kendall.server.http.app import create_app
from kendall.server.http.bounds import LimitedProtocol
from kendall.server.http.connection import protocol_with
from kendall.server.security.settings import SecuritySettings
from kendall.server.settings import Settings
from kendall.server.supervision.settings import SupervisionSettings
from kendall.server.wire.listener import ListeningServer
from tests.eventually import eventually
from tests.server import unruly
from tests.server.counts import open_files, tell
from tests.server.harness import Collector

LAW = parse_law("k1=0,k2=0.1e-3,k3=1e-6,k4=0.2e-3")
STILL = 0.1  # seconds between two turns of the loop: a quarter of the shortest limit
LIMIT = 60.0  # seconds that a connection may last; the gateway's own limits are below two


class Hasty(LimitedProtocol):
    head_timeout = unruly.HEAD_TIMEOUT
    body_timeout = unruly.BODY_TIMEOUT


@dataclass
class Site:
    """A gateway that serves on a socket, in this event loop."""

    port: int
    gateway: Gateway
    records: list[Record]
    server: uvicorn.Server


@contextlib.asynccontextmanager
async def site(policy: str, law: LatencyModel = LAW) -> AsyncIterator[Site]:
    settings = Settings(
        model="tiny",
        served_model_name="tiny",
        policy=policy,
        prediction_interval=0,
        security=SecuritySettings(max_body_bytes=unruly.MAX_BODY),
        supervision=SupervisionSettings(slow_reader_timeout=unruly.READER_PATIENCE),
    )
    gateway, ready, collector = (
        Gateway(settings, EmulatedEngine(law), law),
        asyncio.Event(),
        Collector(),
    )
    protocol = protocol_with(Hasty, settings.supervision.slow_reader_timeout)
    options: dict[str, Any] = {
        "ws": "none",
        "log_config": None,
        "log_level": "error",
        "timeout_keep_alive": 1,
        "proxy_headers": False,
    }
    server = ListeningServer(
        uvicorn.Config(
            create_app(gateway, on_ready=lambda _: ready.set()), http=protocol, **options
        )
    )
    server.capture_signals = contextlib.nullcontext  # type: ignore[method-assign,assignment] - they are the test's
    with socket.create_server(("127.0.0.1", 0), backlog=2048) as sock:
        serving = asyncio.create_task(server.serve(sockets=[sock]))
        await ready.wait()
        gateway.batcher.observers.add(collector)
        try:
            yield Site(sock.getsockname()[1], gateway, collector.records, server)
        finally:
            server.should_exit = True
            await serving


class Turns:
    """Notices when this loop stands still: its timers come then before what clients had sent in
    time.
    """

    def __init__(self) -> None:
        self.stood_at = -math.inf

    async def watch(self) -> None:
        """Until cancelled."""
        loop = asyncio.get_running_loop()
        while True:
            due = loop.time() + 0.01
            await asyncio.sleep(0.01)
            if loop.time() > due + STILL:
                self.stood_at = loop.time()


async def storm(clients: int, rate: float, seed: int, policy: str) -> dict[str, Any]:
    """A Poisson stream of clients, each of a kind that is drawn; what was counted."""
    rng = np.random.default_rng(seed)
    scenes = list(unruly.EXPECTED)
    kinds = [
        *scenes,
        *(scenes[int(index)] for index in rng.integers(len(scenes), size=clients - len(scenes))),
    ]
    async with site(policy) as here:
        await unruly.play(unruly.in_order, rng, here.port, LIMIT)  # what is made once is there
        await left_alone(here)
        turns = Turns()
        watching = asyncio.create_task(turns.watch())
        tasks, files = asyncio.all_tasks(), open_files()
        playing = []
        for kind in rng.permutation(np.array(kinds, dtype=object)):
            playing.append(
                asyncio.create_task(
                    timed(kind, np.random.default_rng(rng.integers(2**32)), here.port, turns)
                )
            )
            await asyncio.sleep(float(rng.exponential(1 / rate)))
        ended = await asyncio.gather(*playing)
        del playing
        watching.cancel()
        await left_alone(here)
        gc.collect()
        batcher = here.gateway.batcher
        answered: dict[str, Counter[str]] = {}
        for kind, client, _ in ended:
            answered.setdefault(kind.__name__, Counter())[client.label] += 1
        return {
            "clients": len(ended),
            "answers": answered,
            "longest": max(seconds for *_, seconds in ended),
            "whole": sum(
                client.whole
                for kind, client, _ in ended
                if kind in (unruly.in_order, unruly.in_pieces)
            )
            + 1,
            "records": here.records,
            "left": (
                batcher.unanswered,
                batcher.in_service,
                batcher.queue_length,
                len(batcher._expiries),
            ),
            "connections": len(here.server.server_state.connections),
            "tasks": len(asyncio.all_tasks() - tasks),
            "descriptors": len(open_files() - files),
        }


async def left_alone(here: Site) -> None:
    """The last that left are noticed, and what they leave to the loop's next turns is done."""
    await eventually(
        lambda: here.gateway.batcher.unanswered == 0 and not here.server.server_state.connections
    )
    for _ in range(10):
        await asyncio.sleep(0.01)


async def timed(
    kind: unruly.Scene, rng: np.random.Generator, port: int, turns: Turns
) -> tuple[unruly.Scene, unruly.Client, float]:
    """Again where it went wrong while this loop stood still: the client was slow then."""
    loop = asyncio.get_running_loop()
    while True:
        began = loop.time()
        try:
            client = await unruly.play(kind, rng, port, LIMIT)
        except TimeoutError:
            raise AssertionError(
                f"{kind.__name__}: neither answered nor closed in {LIMIT} s"
            ) from None
        if client.label in unruly.EXPECTED[kind] or turns.stood_at < began:
            return kind, client, loop.time() - began


def check(found: dict[str, Any]) -> None:
    unexpected = {
        kind.__name__: dict(found["answers"][kind.__name__])
        for kind, allowed in unruly.EXPECTED.items()
        if not set(found["answers"][kind.__name__]) <= allowed
    }
    assert unexpected == {}
    records = found["records"]
    outcomes = Counter(record.outcome for record in records)
    assert len({record.request_id for record in records}) == len(records), "one record each"
    assert set(outcomes) <= {"completed", "cancelled"}, outcomes
    assert outcomes["completed"] >= found["whole"]
    assert found["left"] == (0, 0, 0, 0)
    assert (found["connections"], found["tasks"], found["descriptors"]) == (0, 0, 0)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("policy", "make"),
    [("continuous:max_batch_size=8", uvloop.new_event_loop), ("dynamic", asyncio.new_event_loop)],
)
def test_every_connection_is_answered_or_closed_and_nothing_is_left(
    policy: str, make: Any, caplog: pytest.LogCaptureFixture
) -> None:
    """Every kind of wrong input, and calls in order among them."""
    with asyncio.Runner(loop_factory=make) as runner:
        found = runner.run(storm(70, 200.0, 1, policy))
    told(found)
    check(found)
    assert errors(caplog) == []


@pytest.mark.slow
def test_five_thousand_connections_of_every_kind(caplog: pytest.LogCaptureFixture) -> None:
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        found = runner.run(storm(5_000, 60.0, 2, "continuous:max_batch_size=32"))
    told(found)
    check(found)
    assert errors(caplog) == []


def errors(caplog: pytest.LogCaptureFixture) -> list[str]:
    """Nothing that a client sends is an error of the gateway's."""
    return [record.getMessage() for record in caplog.records if record.levelno >= logging.ERROR]


def told(found: dict[str, Any]) -> None:
    outcomes = Counter(record.outcome for record in found["records"])
    tell("unruly clients", **(found | {"records": dict(outcomes)}))
