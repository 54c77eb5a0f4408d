"""`serve` in this process: what it binds, what a signal does, what it says at its end."""

from __future__ import annotations

import asyncio
import gc
import json
import logging
import os
import re
import signal
import socket
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import uvicorn

from kendall.server.gateway import Gateway
from kendall.server.operations.serving import serve
from kendall.server.settings import Settings
from kendall.server.supervision.supervisor import EngineLostError
from tests.eventually import eventually

LISTENING = r"listening on http://127.0.0.1:(\d+); the engine starts \(/ready answers 200 when it"


class Served:
    """One run of `serve`; what it asked of the system and of uvicorn."""

    def __init__(self, caplog: pytest.LogCaptureFixture) -> None:
        self._caplog = caplog
        self.signals: list[int] = []
        self.bounds: list[float] = []  # seconds in which its end was to come
        self.config: dict[str, Any] = {}
        self.bound: dict[str, Any] = {}
        self.answers: list[bytes] = []
        self._tasks: list[asyncio.Task[None]] = []

    @property
    def messages(self) -> list[str]:
        return [text for text in self._caplog.messages if "EMULATED" not in text]

    @property
    def port(self) -> int:
        (found,) = filter(None, (re.match(LISTENING, text) for text in self.messages))
        return int(found[1])

    def run(
        self, on_ready: Any, *, seconds: float = 0.01, reads: bool = False, **settings: Any
    ) -> int:
        """The gateway's engine takes so long for a token. `reads`: SIGHUP takes up the settings."""
        plain: dict[str, Any] = {"model": "tiny", "served_model_name": "tiny", "port": 0}
        plain |= {"engine": "emulated", "latency": f"k1=0,k2=0,k3=0,k4={seconds}"}
        plain |= {"prediction_interval": 0, "shutdown_timeout": 3.0}
        asked = Settings(**plain | settings)
        again = {"read_again": lambda: asked} if reads else {}
        return serve(asked, on_ready=on_ready, on_signal=self.signals.append, **again)

    def calls(self, gateway: Gateway, *then: Any) -> None:
        """A client waits for an answer; what happens once its request is in service."""

        async def call() -> None:
            reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
            body = json.dumps({"model": "tiny", "prompt": "a", "max_tokens": 2}).encode()
            head = f"POST /v1/completions HTTP/1.1\r\nhost: h\r\ncontent-length: {len(body)}\r\n"
            writer.write(f"{head}content-type: application/json\r\n\r\n".encode() + body)
            await eventually(lambda: gateway.batcher.in_service)
            for each in then:
                each()
                await asyncio.sleep(0.01)
            self.answers.append(await reader.read())
            writer.close()

        self._tasks.append(asyncio.get_running_loop().create_task(call()))


def ends(number: int = signal.SIGTERM) -> None:
    os.kill(os.getpid(), number)


@pytest.fixture
def served(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> Iterator[Served]:
    found = Served(caplog)
    caplog.set_level(logging.INFO, "kendall")
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    configured, listens, timer = uvicorn.Config, socket.create_server, threading.Timer

    def config(*arguments: Any, **named: Any) -> uvicorn.Config:
        found.config = named
        return configured(*arguments, **named)

    def create_server(address: Any, **named: Any) -> socket.socket:
        found.bound = named
        return listens(address, **named)

    def bound(seconds: float, *more: Any) -> threading.Timer:
        found.bounds.append(seconds)
        return timer(seconds, *more)

    monkeypatch.setattr(uvicorn, "Config", config)
    monkeypatch.setattr(socket, "create_server", create_server)
    monkeypatch.setattr(threading, "Timer", bound)
    thresholds = gc.get_threshold()
    yield found
    gc.unfreeze()
    gc.set_threshold(*thresholds)


def test_sigterm_ends_it_after_the_delay_and_uvicorn_says_nothing_of_its_own(
    served: Served,
) -> None:
    assert served.run(lambda _: ends(), shutdown_delay=0.02, shutdown_timeout=2.5) == 0
    assert served.signals == [signal.SIGTERM]
    assert served.bounds == [0.02 + 2.5 + 2 * 2.0 + 60.0]
    assert (served.bound["backlog"], served.bound["reuse_port"]) == (2048, False)
    names = ("timeout_keep_alive", "timeout_graceful_shutdown", "log_level", "ws")
    assert [served.config[name] for name in names] == [75, 7, "warning", "none"]
    for name in ("access_log", "proxy_headers", "server_header"):
        assert served.config[name] is False
    assert served.config["log_config"] is None
    with socket.socket() as client:
        assert client.connect_ex(("127.0.0.1", served.port)) != 0, "nobody listens"
    said, draining, drained = served.messages[-3:]
    assert said == "SIGTERM: /ready answers 503; requests are accepted for 0.02 s more"
    assert draining == "draining: 0 waiting, 0 in service; within 2.5 s"
    assert re.fullmatch(r"drained in \d\.\d s: 0 sequences ended, 0 cut off", drained)


def test_with_port_0_the_port_that_is_had_is_named_and_a_reload_leaves_it_alone(
    served: Served,
) -> None:
    def ready(_: Gateway) -> None:
        os.kill(os.getpid(), signal.SIGHUP)
        asyncio.get_running_loop().call_later(0.2, ends)

    assert served.run(ready, reads=True) == 0
    (said,) = (text for text in served.messages if text.startswith("ready: "))
    assert said.endswith(f"http://127.0.0.1:{served.port}")
    assert any(text.startswith("SIGHUP: reloaded ") for text in served.messages)
    assert not any("in force only after a restart" in text for text in served.messages)


def test_a_second_signal_ends_what_is_in_service_at_once(served: Served) -> None:
    def ready(gateway: Gateway) -> None:
        served.calls(gateway, ends, ends)

    assert served.run(ready, seconds=600.0) == 0
    (answer,) = served.answers
    assert answer.startswith(b"HTTP/1.1 503 ")
    assert b"connection: close" in answer
    assert b"the gateway is shutting down at once" in answer
    assert served.signals == [signal.SIGTERM] * 2
    draining, drained = served.messages[-2:]
    assert draining == "draining: 0 waiting, 1 in service; within 3 s"
    assert re.fullmatch(r"drained in \d\.\d s: 0 sequences ended, 1 cut off", drained)


def test_what_does_not_end_in_time_is_cut_off_and_only_sigterm_waits_for_the_delay(
    served: Served,
) -> None:
    def ready(gateway: Gateway) -> None:
        served.calls(gateway, lambda: ends(signal.SIGINT))

    assert served.run(ready, seconds=600.0, shutdown_timeout=0.05, shutdown_delay=600.0) == 0
    (answer,) = served.answers
    assert b"is shutting down and this request did not finish within 0.05 s" in answer
    assert served.bounds == [64.05]
    assert not any("SIGTERM" in text for text in served.messages)


def test_an_answer_in_service_is_finished_and_a_lost_record_is_the_status(
    served: Served,
) -> None:
    def ready(gateway: Gateway) -> None:
        served.calls(gateway, ends)

    assert served.run(ready, record_file=Path("/dev/full")) == 1
    (answer,) = served.answers
    assert answer.startswith(b"HTTP/1.1 200 ")
    assert re.fullmatch(r"drained in \d\.\d s: 1 sequence ended, 0 cut off", served.messages[-3])
    assert served.messages[-1] == (
        "exit status 1: 1 record could not be written to /dev/full; free or replace its disk"
    )


def test_an_engine_that_is_given_up_ends_it_without_a_signal(served: Served) -> None:
    def ready(gateway: Gateway) -> None:
        assert gateway.on_given_up is not None
        gateway.on_given_up("it died")

    with pytest.raises(EngineLostError) as lost:
        served.run(ready)
    assert str(lost.value) == "the engine failed and could not be restarted: it died"
    assert (served.signals, served.bounds) == ([], [20.0])
