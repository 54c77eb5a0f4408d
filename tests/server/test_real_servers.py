"""Two real servers, one killed, one stopped, one added, one removed while calls go on: engines that
the gateway starts, and `vllm serve` by URL. Every call has one answer and one record, and those
that wait lose nothing.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from bench.gateway_cost.servers import Server, small_vllm
from kendall.loadgen.gateway.gateway_process import GatewayProcess, free_port
from kendall.queueing.measurement.record import Record, read_run
from kendall.server.engines.vllm.process import descendants
from tests.server.counts import outcomes, tell
from tests.server.processes import ClosedLoop, SocketCall, command, gateway, stream_text

pytestmark = [pytest.mark.engine, pytest.mark.slow, pytest.mark.timeout(900)]
CALLS, CLIENTS, SLOTS = 3000, 32, 8
POLICIES = [f"{name}:max_batch_size={SLOTS}" for name in ("capped", "elastic", "continuous")]
KILLED, ADDED, STOPPED, REMOVED = 400, 900, 1400, 2400  # answers before each
# later calls wait until one that was added, and one that was stopped, serves
HELD, HELD_AGAIN = 1200, 2200
LONGEST = 800.0  # seconds of a scene


@dataclass
class Crowd(ClosedLoop):
    """Each call on a connection of its own; every third is streamed."""

    calls, clients = CALLS, CLIENTS
    most: int = HELD  # later calls wait: each server serves some, however fast the others are
    broken: int = 0  # streams that ended with an error
    short: list[int] = field(default_factory=list)  # calls whose answer lacks tokens

    async def call(self, number: int) -> None:
        """One, to the end of its answer."""
        while number >= self.most:  # noqa: ASYNC110 - a number only
            await asyncio.sleep(0.02)
        tokens = 1 + number * 37 % 48
        body = {"model": "tiny", "prompt": [300, 301 + number % 50], "max_tokens": tokens}
        body |= {"ignore_eos": True, "stream": number % 3 == 0}
        status, answer = await (await SocketCall(self.url, body).send()).answer()
        self.statuses[status] += 1
        if status == 200 and body["stream"]:
            self.broken += not stream_text(answer)[1]
        elif status == 200 and json.loads(answer)["usage"]["completion_tokens"] != tokens:
            self.short.append(number)


async def states(running: GatewayProcess) -> list[str]:
    """Of the servers, in the order of their ids."""
    said = await running.ask("GET", "/admin/servers")
    return [server["state"] for server in said["servers"]]


async def until(running: GatewayProcess, *expected: str) -> None:
    """The servers are in these states."""
    while await states(running) != list(expected):  # noqa: ASYNC110 - it tells by being asked
        await asyncio.sleep(0.1)


@contextlib.asynccontextmanager
async def stopped(pid: int) -> AsyncIterator[None]:
    os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGCONT)


async def scene(
    running: GatewayProcess, faults: Callable[[GatewayProcess, Crowd], Awaitable[None]]
) -> Crowd:
    crowd = Crowd(running.url)
    meanwhile = asyncio.create_task(faults(running, crowd))
    await crowd.run()
    await meanwhile
    while (await running.ask("GET", "/admin/state"))["unanswered"]:  # noqa: ASYNC110 - likewise
        await asyncio.sleep(0.05)
    return crowd


def checked(crowd: Crowd, metrics: str, folder: Path) -> list[Record]:
    """One outcome for each call, the same for clients, counters and records."""
    records = read_run(folder / "records.jsonl")[1]
    found = Counter(record.outcome for record in records)
    assert crowd.statuses.total() == len(records) == CALLS
    assert len({record.request_id for record in records}) == CALLS
    assert found == outcomes(metrics)
    assert found["completed"] == crowd.statuses[200] - crowd.broken
    assert crowd.short == []
    assert all(record.dispatched_at is not None for record in records), "who waited lost nothing"
    return records


# ---- engines that the gateway starts ----


def engines(running: GatewayProcess) -> list[int]:
    """Their processes, the oldest first."""
    return sorted(pid for pid in descendants(running.pid) if "EngineCore" in command(pid))


async def among_replicas(running: GatewayProcess, crowd: Crowd) -> None:
    await crowd.answered(KILLED)
    os.kill(engines(running)[0], signal.SIGKILL)
    await crowd.answered(ADDED)
    await running.ask("PUT", "/admin/servers", {"replicas": 3})
    await until(running, *["serving"] * 3)
    crowd.most = HELD_AGAIN
    await crowd.answered(STOPPED)
    os.kill(engines(running)[-1], signal.SIGSTOP)  # silent: it is killed and replaced
    await crowd.answered(HELD_AGAIN)
    await until(running, *["serving"] * 3)
    crowd.most = CALLS
    await crowd.answered(REMOVED)
    await running.ask("PUT", "/admin/servers", {"replicas": 2})
    await until(running, *["serving"] * 2)


@pytest.mark.parametrize("policy", POLICIES)
def test_engines_that_the_gateway_starts(policy: str, tmp_path: Path) -> None:
    async def main() -> tuple[Crowd, str]:
        arguments = ["tiny", "--engine", "vllm", "--replicas", "2", "--policy", policy]
        async with asyncio.timeout(LONGEST), gateway(tmp_path, *arguments) as running:
            while not await running.is_ready():  # noqa: ASYNC110 - it tells by being asked
                await asyncio.sleep(0.1)
            crowd = await scene(running, among_replicas)
            return crowd, (await running._client.get("/metrics")).text

    crowd, metrics = asyncio.run(main())
    records = checked(crowd, metrics, tmp_path)
    interrupted = Counter(record.interruptions for record in records)
    tell(policy, statuses=crowd.statuses, interrupted=interrupted)
    assert crowd.statuses == {200: CALLS}
    assert crowd.broken == 0, "what was in service continues elsewhere"
    assert set(interrupted) - {0}
    assert {record.server_id for record in records} == {0, 1, 2}


# ---- servers by URL ----


@dataclass
class Behind:
    """Two that run, and one more for each kill."""

    folder: Path
    stack: ExitStack
    servers: list[Server] = field(default_factory=list)
    started: int = 0

    def have(self, count: int) -> None:
        """So many serve."""
        while len(self.servers) < count:
            name = f"vllm-{self.started}"
            self.started += 1
            self.servers.append(self.stack.enter_context(small_vllm(self.folder, SLOTS, name)))


@pytest.fixture(scope="module")
def behind(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Behind]:
    with ExitStack() as stack:
        yield Behind(tmp_path_factory.mktemp("behind"), stack)


def among_urls(behind: Behind) -> Callable[[GatewayProcess, Crowd], Awaitable[None]]:
    stays, killed, late = behind.servers

    async def faults(running: GatewayProcess, crowd: Crowd) -> None:
        await crowd.answered(KILLED)
        killed.process.send_signal(signal.SIGKILL)
        await until(running, "serving", "lost")
        await crowd.answered(ADDED)
        urls = [stays.url, late.url]
        await running.ask("PUT", "/admin/servers", {"urls": urls})
        await until(running, "serving", "serving")
        crowd.most = HELD_AGAIN
        await crowd.answered(STOPPED)
        async with stopped(late.process.pid):
            await until(running, "serving", "lost")
        await until(running, "serving", "serving")
        crowd.most = CALLS
        await crowd.answered(REMOVED)
        await running.ask("PUT", "/admin/servers", {"urls": urls[:1]})
        await until(running, "serving")

    return faults


@pytest.mark.parametrize("policy", POLICIES)
def test_servers_by_url(policy: str, behind: Behind, tmp_path: Path) -> None:
    behind.have(3)
    stays, killed, late = behind.servers

    async def main() -> tuple[Crowd, str]:
        arguments = ["--engine", "http", "--max-num-seqs", str(SLOTS), "--policy", policy]
        arguments += [part for each in (stays, killed) for part in ("--engine-url", each.url)]
        arguments += ["--record-file", str(tmp_path / "records.jsonl"), "--prediction-interval=0"]
        process = GatewayProcess(arguments, free_port(0), tmp_path / "gateway.log")
        async with asyncio.timeout(LONGEST), process as running:
            while not await running.is_ready():  # noqa: ASYNC110 - it tells by being asked
                await asyncio.sleep(0.1)
            crowd = await scene(running, among_urls(behind))
            return crowd, (await running._client.get("/metrics")).text

    crowd, metrics = asyncio.run(main())
    behind.servers = [stays, late]
    records = checked(crowd, metrics, tmp_path)
    found = Counter(record.outcome for record in records)
    interrupted = Counter(record.interruptions for record in records)
    tell(policy, statuses=crowd.statuses, interrupted=interrupted, outcomes=found)
    assert set(crowd.statuses) <= {200, 503}
    lost = found["failed"]
    assert sum(interrupted[count] for count in interrupted if count) + lost > 0
    assert lost <= 2 * SLOTS * 2 // 3 + 2, "only streams that had begun on a server that was lost"
    assert {record.server_id for record in records} == {0, 1, 2}
