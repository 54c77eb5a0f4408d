"""The real engine stopped while it boots or is idle, and a gateway told to end meanwhile:
everyone is answered, in a stated time.
"""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Awaitable, Callable, Collection
from pathlib import Path
from typing import Any

import pytest

from kendall.loadgen.gateway.gateway_process import GatewayProcess
from kendall.server.engines.vllm.process import descendants
from tests.server.processes import SocketCall, arrived, command, engine_process, gateway, gone
from tests.server.test_engine_faults import ready_again

pytestmark = [pytest.mark.engine, pytest.mark.slow]
# seconds after its fork at which a successor is stopped: it has much of its start ahead
BOOTED_FOR = 0.4
# seconds of a scene on a busy machine, where the first start took long: so may the others, then
LONGEST = 900.0


def body(tokens: int, **fields: Any) -> dict[str, Any]:
    return {
        "model": "tiny",
        "prompt": [300, 301],
        "max_tokens": tokens,
        "temperature": 0,
        "ignore_eos": True,
    } | fields


def parent(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


async def fork_server(gateway: int) -> int:
    """The process that forks the engines of a gateway."""
    while not (found := [pid for pid in descendants(gateway) if "forkserver" in command(pid)]):  # noqa: ASYNC110 - nothing to wait on
        await asyncio.sleep(0.02)
    return found[0]


async def forked(server: int, known: Collection[int]) -> int:
    """The next engine below the fork server, which also runs other programs while it imports."""
    while True:
        for pid in descendants(server):
            if pid not in known and ("forkserver" in command(pid) or "EngineCore" in command(pid)):
                return pid
        await asyncio.sleep(0.02)


async def stop_in_boot(server: int, known: set[int]) -> int:
    """SIGSTOP to the successor that comes next."""
    pid = await forked(server, known)
    known.add(pid)
    await asyncio.sleep(BOOTED_FOR)
    os.kill(pid, signal.SIGSTOP)
    return pid


def play(
    folder: Path, scene: Callable[[GatewayProcess], Awaitable[None]], *arguments: str
) -> int | None:
    """A scene against a gateway on the real engine; returns the gateway's status, if it has
    ended.
    """

    async def main() -> int | None:
        options = ["--engine", "vllm", "--policy", "capped:max_batch_size=2", *arguments]
        async with asyncio.timeout(LONGEST), gateway(folder, "tiny", *options) as running:
            await scene(running)
            assert running._process is not None
            return running._process.returncode

    return asyncio.run(main())


async def under_load(running: GatewayProcess) -> tuple[list[SocketCall], int, set[int]]:
    """Callers in service and waiting; the fork server; the engine, which is killed."""
    await running.ready()
    calls = [await SocketCall(running.url, body(300)).send() for _ in range(6)]
    await arrived(running, 6)
    engine = engine_process(running.pid)
    server = parent(engine)
    os.kill(engine, signal.SIGKILL)
    return calls, server, {engine}


def test_an_engine_stopped_while_it_boots_is_replaced_and_everyone_is_answered(
    tmp_path: Path,
) -> None:
    async def scene(running: GatewayProcess) -> None:
        calls, server, known = await under_load(running)
        stopped = await stop_in_boot(server, known)
        calls.append(
            await SocketCall(running.url, body(20, prompt="a text to be read first")).send()
        )
        assert (await running.is_healthy(), await running.is_ready()) == (True, False)
        assert [(await made.answer())[0] for made in calls] == [200] * 7
        assert await gone([stopped, *known]) == []
        await ready_again(running)
        state = await running.ask("GET", "/admin/state")
        assert state["supervision"]["restarts"] == 1
        assert state["supervision"]["last_loss"].startswith("not done within")
        assert (state["queue_length"], state["in_service"], state["unanswered"]) == (0, 0, 0)

    assert play(tmp_path, scene, "--restart-timeout", "15") is None


def test_an_engine_stopped_in_the_last_boot_that_is_allowed_ends_the_gateway_and_everyone_is_told(
    tmp_path: Path,
) -> None:
    """Within `--restart-timeout`, or the time of the first start where that took longer."""

    async def scene(running: GatewayProcess) -> None:
        calls, server, known = await under_load(running)
        await stop_in_boot(server, known)
        assert [(await made.answer())[0] for made in calls] == [503] * 6
        async with asyncio.timeout(60):
            await running.finished()
        assert await gone([running.pid, server, *known]) == []
        assert (
            "the engine failed and could not be restarted: not done within"
            in (tmp_path / "gateway.log").read_text()
        )

    assert play(tmp_path, scene, "--restart-timeout", "5", "--max-restarts", "1") == 1


@pytest.mark.parametrize("after", [-1.0, 0.0, BOOTED_FOR, 1.0])
def test_sigterm_while_the_engine_boots_ends_the_gateway_without_waiting_for_it(
    tmp_path: Path, after: float
) -> None:
    """Before the fork (-1: vLLM is imported meanwhile), right after it, and later. The engine is
    stopped: its boot would never end.
    """

    async def scene(running: GatewayProcess) -> None:
        async with asyncio.timeout(60):
            while not await running.is_healthy():  # noqa: ASYNC110 - its signals are heard from then on
                await asyncio.sleep(0.02)
        server = await fork_server(running.pid)
        if after >= 0:
            engine = await forked(server, ())
            await asyncio.sleep(after)
            os.kill(engine, signal.SIGSTOP)
        below = descendants(running.pid)
        os.kill(running.pid, signal.SIGTERM)
        async with asyncio.timeout(60):
            await running.finished()
        assert await gone([running.pid, *below]) == []

    assert play(tmp_path, scene) == 0


def test_an_idle_engine_that_is_stopped_is_replaced_before_anybody_asks(tmp_path: Path) -> None:
    async def scene(running: GatewayProcess) -> None:
        await running.ready()
        engine = engine_process(running.pid)
        os.kill(engine, signal.SIGSTOP)
        async with asyncio.timeout(60):
            while await running.is_ready():  # noqa: ASYNC110
                await asyncio.sleep(0.1)
        await ready_again(running)
        assert await gone([engine]) == []
        state = await running.ask("GET", "/admin/state")
        assert state["supervision"]["restarts"] == 1
        assert "did not answer" in state["supervision"]["last_loss"]
        assert (await (await SocketCall(running.url, body(5)).send()).answer())[0] == 200

    assert play(tmp_path, scene) is None
