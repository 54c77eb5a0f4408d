"""`kendall serve` on the emulated engine as a real process: signals, slow readers, and what is
left behind.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import signal
import socket
from collections import Counter
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from kendall.loadgen.gateway.gateway_process import GatewayError, GatewayProcess
from kendall.queueing.measurement.record import read_run
from kendall.server.engines.vllm.process import descendants
from tests.eventually import LIMIT, eventually
from tests.server.processes import SocketCall, arrived, gateway, gone, stream_text

STEP = "k1=0,k2=0,k3=0,k4=10e-3"  # seconds a token
LONGEST = 180.0  # seconds of a scene, the gateway's start in it
FAST = "k1=0,k2=0,k3=1e-7,k4=1e-5"


def body(tokens: int, **fields: Any) -> dict[str, Any]:
    return {
        "model": "tiny",
        "prompt": [5, 6, 7],
        "max_tokens": tokens,
        "ignore_eos": True,
        "stream": True,
    } | fields


def with_gateway(
    folder: Path, scene: Callable[[GatewayProcess], Awaitable[None]], *arguments: str
) -> list[Any]:
    """Play a scene against a gateway; returns its records."""

    async def main() -> None:
        async with (
            asyncio.timeout(LONGEST),
            gateway(folder, "tiny", "--engine", "emulated", *arguments) as running,
        ):
            await running.ready()
            await scene(running)

    asyncio.run(main())
    return read_run(folder / "records.jsonl")[1]


async def closed(running: GatewayProcess) -> None:
    """It takes nothing new any more."""

    async def refuses() -> bool:
        with contextlib.suppress(GatewayError, OSError):
            await running.ask("GET", "/admin/state")
            return False
        return True

    await eventually(refuses)


async def ended(running: GatewayProcess, seconds: float = LIMIT) -> None:
    """Told to stop, it ends, and with status 0."""
    async with asyncio.timeout(seconds):
        await running.finished()
    assert running._process is not None
    assert running._process.returncode == 0


def drain_lines(folder: Path) -> list[str]:
    """What its log says of its end."""
    (path,) = folder.glob("*.log")
    return [line for line in path.read_text().splitlines() if "drain" in line]


@pytest.mark.slow
def test_sigterm_lets_what_has_arrived_be_answered_and_takes_nothing_new(tmp_path: Path) -> None:
    async def scene(running: GatewayProcess) -> None:
        calls = [await SocketCall(running.url, body(100)).send() for _ in range(3)]
        await arrived(running, 3)
        os.kill(running.pid, signal.SIGTERM)
        await closed(running)
        for made in calls:
            text, whole = stream_text((await made.answer())[1])
            assert whole
            assert text.count("word") == 100
        await ended(running)

    records = with_gateway(
        tmp_path, scene, "--latency", STEP, "--policy", "capped:max_batch_size=2"
    )
    assert Counter(record.outcome for record in records) == {"completed": 3}
    begin, end = drain_lines(tmp_path)
    assert "INFO" in begin
    assert re.search(r"draining: [12] waiting, [12] in service; within 30 s$", begin), (
        "the first of them may be served alone"
    )
    assert re.search(r"drained in \d+\.\d s: 3 sequences ended, 0 cut off$", end)


@pytest.mark.parametrize(
    "second", [signal.SIGTERM, pytest.param(signal.SIGINT, marks=pytest.mark.slow)]
)
def test_a_second_signal_tells_the_others_and_ends_the_gateway(
    tmp_path: Path, second: signal.Signals
) -> None:
    """In service and waiting alike, each with a clear error, long before the shutdown time is
    over.
    """

    async def scene(running: GatewayProcess) -> None:
        calls = [await SocketCall(running.url, body(2000)).send() for _ in range(2)]
        await arrived(running, 2)
        os.kill(running.pid, signal.SIGTERM)
        await closed(running)
        os.kill(running.pid, second)
        answers = [await made.answer() for made in calls]
        assert [status for status, _ in answers] == [200, 503]
        assert b"shutting_down" in answers[0][1]
        assert b"shutting_down" in answers[1][1]
        await ended(running)

    records = with_gateway(
        tmp_path, scene, "--latency", STEP, "--policy", "single", "--shutdown-timeout", "150"
    )
    assert Counter(record.outcome for record in records) == {"failed": 2}
    begin, end = drain_lines(tmp_path)
    assert begin.endswith("draining: 1 waiting, 1 in service; within 150 s")
    assert end.endswith("0 sequences ended, 2 cut off")


@pytest.mark.slow
def test_what_is_not_answered_within_the_shutdown_time_is_told(tmp_path: Path) -> None:
    async def scene(running: GatewayProcess) -> None:
        made = await SocketCall(running.url, body(1500)).send()
        await arrived(running, 1)
        os.kill(running.pid, signal.SIGTERM)
        _, answer = await made.answer()
        assert b"within 1 s" in answer
        await ended(running)

    records = with_gateway(
        tmp_path, scene, "--latency", STEP, "--policy", "single", "--shutdown-timeout", "1"
    )
    assert [record.outcome for record in records] == ["failed"]
    assert drain_lines(tmp_path)[1].endswith("0 sequences ended, 1 cut off")


def test_a_killed_gateway_leaves_no_process(tmp_path: Path) -> None:
    """With the predicting process up, which a killed parent tells nothing."""

    async def main() -> None:
        arguments = [
            "tiny",
            "--engine",
            "emulated",
            "--latency",
            STEP,
            "--prediction-interval",
            "0.5",
        ]
        async with asyncio.timeout(LONGEST), gateway(tmp_path, *arguments) as running:
            await running.ready()
            made = await SocketCall(running.url, body(2000)).send()
            while not (below := descendants(running.pid)):  # noqa: ASYNC110 - nothing to wait on
                await asyncio.sleep(0.1)
            await asyncio.sleep(0.5)
            os.kill(running.pid, signal.SIGKILL)
            assert not stream_text((await made.answer())[1])[1]
            assert await gone([running.pid, *below]) == []

    asyncio.run(main())


@pytest.mark.slow
def test_a_client_that_does_not_read_is_cut_off_and_holds_nothing(tmp_path: Path) -> None:
    """32 answers of 2,000 tokens (13 MB) into a socket of 4 KiB; a reader beside it gets all of
    its own.
    """

    async def scene(running: GatewayProcess) -> None:
        host, _, port = running.url.removeprefix("http://").partition(":")
        with socket.socket() as deaf:
            deaf.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            deaf.connect((host, int(port)))
            deaf.setblocking(False)
            made = SocketCall(running.url, body(2000, n=32))
            head = (
                "POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-length: "
                f"{len(made._body)}\r\n\r\n"
            )
            deaf.sendall(head.encode() + made._body)
            other = await SocketCall(running.url, body(100)).send()
            assert stream_text((await other.answer())[1])[1]

            async def nothing_is_held() -> bool:
                state = await running.ask("GET", "/admin/state")
                return (state["unanswered"], state["in_service"]) == (0, 0)

            await eventually(nothing_is_held, 120.0)

    records = with_gateway(
        tmp_path,
        scene,
        "--latency",
        FAST,
        "--policy",
        "continuous:max_batch_size=64",
        "--slow-reader-timeout",
        "1",
    )
    outcomes = Counter(record.outcome for record in records)
    assert outcomes["cancelled"] >= 1
    assert outcomes["completed"] >= 1
    assert sum(outcomes.values()) == 33


@pytest.mark.slow
def test_calls_whose_bodies_do_not_come_are_cancelled_at_the_end_of_a_drain(tmp_path: Path) -> None:
    """They end like calls whose clients have left, without an error and without a record. The call
    in service gets its answer and has a record.
    """

    async def scene(running: GatewayProcess) -> None:
        in_service = await SocketCall(running.url, body(2000)).send()
        await arrived(running, 1)
        unfinished = []
        for path in ("/v1/completions", "/tokenize", "/v1/responses", "/admin/policy"):
            reader, writer = await asyncio.open_connection(
                *running.url.removeprefix("http://").split(":")
            )
            writer.write(
                f"POST {path} HTTP/1.1\r\nhost: localhost\r\n"
                "content-type: application/json\r\ncontent-length: 1000\r\n\r\n{".encode()
            )
            unfinished.append((reader, writer))
        await running.ask("GET", "/admin/state")
        os.kill(running.pid, signal.SIGTERM)
        assert b"within 1 s" in (await in_service.answer())[1]
        await ended(running)
        for reader, writer in unfinished:
            with contextlib.suppress(ConnectionError):
                assert b"500" not in await reader.read()
            writer.close()

    records = with_gateway(
        tmp_path, scene, "--latency", STEP, "--policy", "single", "--shutdown-timeout", "1"
    )
    assert [record.outcome for record in records] == ["failed"]
    assert drain_lines(tmp_path)[1].endswith("0 sequences ended, 1 cut off")
    said = (tmp_path / "gateway.log").read_text()
    assert "Traceback" not in said, said
    assert " ERROR " not in said, said
