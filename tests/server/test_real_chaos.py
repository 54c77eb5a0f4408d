"""A thousand calls on the real engine beside each kind of fault: one outcome each, and clients, records and counters agree."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import os
import re
import signal
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from loadgen.gateway_process import GatewayError, GatewayProcess
from queueing.record import read_run
from server.engines.vllm_process import descendants
from tests.server.counts import tell
from tests.server.processes import SocketCall, engine_process, gateway, gone, stream_text
from tests.server.test_engine_boot_faults import command, parent, stop_in_boot
from tests.server.test_engine_faults import ready_again

pytestmark = [pytest.mark.engine, pytest.mark.slow]
CALLS = 1000
CLIENTS = 24
FIRST = 200  # answers before a fault, so that it comes under load
LONGEST = 600.0  # seconds of a scene
SEQUENCES = {"model": "tiny", "prompt": ["a"] * 1024, "n": 128}  # 131,072 of them in 5 KB


@dataclass
class Crowd:
    """A closed loop of clients that make `CALLS` calls together, each on a connection of its own."""

    url: str
    fields: Callable[[int], dict[str, Any]]
    statuses: Counter[int] = field(default_factory=Counter)
    asked: list[int] = field(default_factory=list)  # output tokens of each sequence that was answered
    broken: list[tuple[int, int, bytes]] = field(default_factory=list)

    async def run(self) -> None:
        """All calls."""
        numbers = iter(range(CALLS))

        async def client() -> None:
            for number in numbers:
                await self.call(number)

        await asyncio.gather(*(client() for _ in range(CLIENTS)))

    async def call(self, number: int) -> None:
        """One, to the end of its answer."""
        tokens = 1 + number * 37 % 24
        body = {"model": "tiny", "prompt": [300, 301 + number % 50], "max_tokens": 100, "stream": number % 2 == 0}
        body |= {"kendall_forced_output_tokens": tokens} | self.fields(number)
        status, answer = await (await SocketCall(self.url, body).send()).answer()
        self.statuses[status] += 1
        if status != 200:
            return
        self.asked += [tokens] * body.get("n", 1)
        whole = stream_text(answer)[1] if body["stream"] else json.loads(answer)["usage"]["completion_tokens"] == tokens * body.get("n", 1)
        if not whole:
            self.broken.append((number, status, answer[-300:]))

    async def answered(self, count: int) -> None:
        """Return when so many calls have their answer."""
        while self.statuses.total() < count:  # noqa: ASYNC110 - a count only
            await asyncio.sleep(0.02)


async def nothing(running: GatewayProcess, crowd: Crowd, folder: Path) -> None:
    """The calls are the fault."""


async def kill(running: GatewayProcess, crowd: Crowd, folder: Path) -> None:
    await crowd.answered(FIRST)
    os.kill(engine_process(running.pid), signal.SIGKILL)


async def hang_in_boot(running: GatewayProcess, crowd: Crowd, folder: Path) -> None:
    """The engine dies, and its successor is stopped while it boots."""
    engine = engine_process(running.pid)
    server = parent(engine)
    await kill(running, crowd, folder)
    stopped = await stop_in_boot(server, {engine})
    await ready_again(running)
    assert await gone([stopped], 5) == []


async def hang_in_calibration(running: GatewayProcess, crowd: Crowd, folder: Path) -> None:
    await crowd.answered(FIRST)
    calibrating = asyncio.create_task(running.ask("POST", "/admin/calibrate", {"max_batch_size": 4, "max_output_tokens": 64}))
    while await running.is_ready():
        assert not calibrating.done()
    await asyncio.sleep(0.3)
    os.kill(engine_process(running.pid), signal.SIGSTOP)
    with pytest.raises(GatewayError, match="503"):
        await calibrating


async def stop_the_predictor(running: GatewayProcess, crowd: Crowd, folder: Path) -> None:
    await crowd.answered(FIRST)
    async with asyncio.timeout(60):
        while not (found := [pid for pid in descendants(running.pid) if "predictor_process" in command(pid)]):  # noqa: ASYNC110
            await asyncio.sleep(0.05)
    os.kill(found[0], signal.SIGSTOP)


async def pause(running: GatewayProcess, crowd: Crowd, folder: Path) -> None:
    """The gateway stands still; all that came meanwhile is admitted at once."""
    for _ in range(3):
        await crowd.answered(crowd.statuses.total() + FIRST)
        os.kill(running.pid, signal.SIGSTOP)
        await asyncio.sleep(2.0)
        os.kill(running.pid, signal.SIGCONT)


async def hang_ups(running: GatewayProcess, crowd: Crowd, folder: Path) -> None:
    while True:
        os.kill(running.pid, signal.SIGHUP)
        await asyncio.sleep(0.1)


async def leave(running: GatewayProcess, crowd: Crowd, folder: Path) -> None:
    """Two requests on one connection whose client does not wait for the answers; the second comes behind the first."""
    body = json.dumps({"model": "tiny", "prompt": [300], "max_tokens": 500, "ignore_eos": True}).encode()
    one = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n" % len(body) + body
    for number in itertools.count():
        _, writer = await asyncio.open_connection("127.0.0.1", int(running.url.rpartition(":")[2]))
        try:
            writer.write(one + one)
            await writer.drain()
            await asyncio.sleep(0.01 * (number % 5))
        finally:
            writer.close()


def no_more(number: int) -> dict[str, Any]:
    return {}


def several(number: int) -> dict[str, Any]:
    return {"n": 1 + number % 8, "stream": False}


def bombs(number: int) -> dict[str, Any]:
    return SEQUENCES if number % 50 == 0 else {}


@dataclass(frozen=True, kw_only=True)
class Kind:
    """A kind of fault, and what it may cost."""

    says: str
    meanwhile: Callable[[GatewayProcess, Crowd, Path], Awaitable[None]] = nothing
    arguments: tuple[str, ...] = ()
    fields: Callable[[int], dict[str, Any]] = no_more
    statuses: dict[int, int] = field(default_factory=lambda: {200: CALLS})
    restarts: int = 0
    leavers: bool = False  # others than the crowd call, too, and leave
    recorded: bool = True
    log_is_read: bool = True


KINDS = [
    Kind(says="an engine is killed", meanwhile=kill, restarts=1),
    Kind(says="a successor hangs in its boot", meanwhile=hang_in_boot, arguments=("--restart-timeout", "15"), restarts=1),
    Kind(says="an engine hangs in a calibration", meanwhile=hang_in_calibration, restarts=1),
    Kind(says="the predictor is stopped", meanwhile=stop_the_predictor, arguments=("--prediction-interval", "1", "--latency", "tiny")),
    Kind(says="the gateway stands still", meanwhile=pause),
    Kind(says="several sequences a call", fields=several),
    Kind(says="nobody reads the log", arguments=("--log-level", "debug", "--log-prompts"), log_is_read=False),
    Kind(says="the disk is full", arguments=("--record-file", "/dev/full"), recorded=False),
    Kind(says="a hangup ten times a second", meanwhile=hang_ups),
    Kind(says="pipelining clients leave", meanwhile=leave, leavers=True),
    Kind(says="131,072 sequences in 5 KB", fields=bombs, statuses={200: CALLS - 20, 400: 20}),
]


async def scene(running: GatewayProcess, kind: Kind, folder: Path) -> tuple[Crowd, dict[str, Any], Counter[str]]:
    """The calls beside the fault; the gateway's state and its counters once nothing is left."""
    await running.ready()
    crowd = Crowd(running.url, kind.fields)
    fault = asyncio.ensure_future(kind.meanwhile(running, crowd, folder))
    await crowd.run()
    if kind.meanwhile in (hang_ups, leave):  # until the calls are over
        fault.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await fault
    await ready_again(running)
    while (state := await running.ask("GET", "/admin/state"))["unanswered"]:  # noqa: ASYNC110 - it tells by being asked
        await asyncio.sleep(0.05)
    counted: Counter[str] = Counter()
    for outcome, count in re.findall(r'kendall_requests_total\{outcome="(\w+)".*\} (\S+)', (await running._client.get("/metrics")).text):
        counted[outcome] += int(float(count))
    return crowd, state, +counted


def play(kind: Kind, folder: Path) -> tuple[Crowd, dict[str, Any], Counter[str]]:
    async def main() -> tuple[Crowd, dict[str, Any], Counter[str]]:
        arguments = ("tiny", "--engine", "vllm", "--policy", "continuous:max_batch_size=8", *kind.arguments)
        async with asyncio.timeout(LONGEST), gateway(folder, *arguments) as running:
            return await scene(running, kind, folder)

    if kind.log_is_read:
        return asyncio.run(main())
    pipe = folder / "gateway.log"
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    try:
        return asyncio.run(main())
    finally:
        os.close(reader)


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.says)
def test_a_thousand_calls_beside_a_fault_have_one_outcome_each(kind: Kind, tmp_path: Path) -> None:
    crowd, state, counted = play(kind, tmp_path)
    tell(kind.says, statuses=crowd.statuses, counted=counted, restarts=state["supervision"]["restarts"])
    assert crowd.statuses == kind.statuses
    assert crowd.broken == []
    assert state["supervision"]["restarts"] == kind.restarts
    assert (state["queue_length"], state["in_service"], state["unanswered"]) == (0, 0, 0)
    assert counted["completed"] == len(crowd.asked)
    assert set(counted) == ({"completed", "cancelled"} if kind.leavers else {"completed"})
    if not kind.recorded:
        return
    records = read_run(tmp_path / "records.jsonl")[1]
    assert Counter(record.outcome for record in records) == counted
    assert sorted(record.output_tokens or 0 for record in records if record.outcome == "completed") == sorted(crowd.asked)
    assert len({record.request_id for record in records}) == len(records), "nothing is recorded twice"
