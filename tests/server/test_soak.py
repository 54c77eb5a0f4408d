"""Half an hour on virtual time, ten minutes on the real engine, faults at random: nothing is
lost or grows, by `/metrics` alone.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import re
import signal
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kendall.loadgen.gateway.gateway_process import GatewayProcess
from kendall.queueing.latency.law import parse_law
from kendall.server.engines.vllm.process import descendants
from kendall.server.page import history
from tests.server.asgi import LAW, call
from tests.server.counts import outcomes, resident, tell
from tests.server.mortal import MortalEngine, faulty
from tests.server.processes import command, engine_process, gateway
from tests.server.test_engine_faults import POLICIES, ready_again
from tests.server.test_fault_chaos import CALM, Chaos, check, play, what_is_held
from tests.server.test_real_chaos import Crowd, leave, no_more
from tests.virtual_time import run_virtual

pytestmark = pytest.mark.slow
ROOT = Path(__file__).parents[2]
ROUNDS, ROUND_CALLS, RATE = 18, 6_000, 60.0  # of 100 seconds each
REAL_SECONDS = 600.0
# seconds after which a real gateway has all that it makes once: an engine's successor, a predictor,
# full windows
FIRST_LOOK = 150.0
GROWTH = 20.0  # MiB


def counts(metrics: str) -> tuple[int, Counter[str], int]:
    """Requests received, ended by outcome, and those in the system: the first is the sum of the
    others.
    """

    def total(name: str) -> float:
        return sum(
            float(value)
            for value in re.findall(rf"^{name}(?:{{.*}})? (\S+)$", metrics, re.MULTILINE)
        )

    return (
        int(total("kendall_requests_received_total")),
        outcomes(metrics),
        int(total("kendall_requests_in_system")),
    )


def test_half_an_hour_of_virtual_time_with_all_faults(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Deaths, hangs, starts that fail, clients that leave at every stage, another policy and
    limit every second.
    """
    monkeypatch.setattr(history, "FINE", 90)  # rows; the page's own would fill during the run
    monkeypatch.setattr(history, "COARSE", 9)
    caplog.set_level(logging.CRITICAL + 1, "kendall")  # what it keeps would be counted
    held, calls = [], 0

    async def main() -> None:
        nonlocal calls
        async with faulty(
            "single", MortalEngine(parse_law(LAW), start_takes=0.3), supervision=CALM
        ) as (app, running, engine, records):
            began = running.now()
            for seed in range(ROUNDS):
                chaos = Chaos(500 + seed, ROUND_CALLS, leaving=0.3, rate=RATE)
                check(
                    chaos,
                    await play(
                        chaos, app, running, engine, records, deaths_every=2.0, switch_every=1.0
                    ),
                )
                calls += len(records)
                received, ended, inside = counts((await call(app, "GET", "/metrics")).body.decode())
                assert received == ended.total() + inside == calls
                assert (inside, set(ended)) == (0, {"completed", "cancelled"})
                del chaos
                records.clear()
                engine.given.clear()
                held.append(what_is_held() | {"tasks": len(asyncio.all_tasks())})
            tell(
                "soak, virtual",
                seconds=running.now() - began,
                sequences=calls,
                outcomes=ended,
                first=held[1],
                last=held[-1],
            )
            assert running.now() - began > 1700

    run_virtual(main())
    assert {each["sequence_states"] for each in held} == {0}
    assert len({each["tasks"] for each in held[1:]}) == 1
    assert held[-1]["blocks"] - held[1]["blocks"] < 0.02 * calls, (
        "less than one block of memory in fifty sequences"
    )


class Faults:
    """What happens to a real gateway, one thing after the other, drawn at random."""

    def __init__(self, running: GatewayProcess, crowd: Crowd, folder: Path, seed: int) -> None:
        self.running, self.crowd, self.folder = running, crowd, folder
        self.rng = np.random.default_rng(seed)
        self.happened: Counter[str] = Counter()

    async def run(self) -> None:
        """Until cancelled."""
        kinds = (
            self.kill,
            self.hang,
            self.pause,
            self.hang_ups,
            self.leaving,
            self.switches,
            self.stop_the_predictor,
        )
        while True:
            await ready_again(self.running)
            await asyncio.sleep(float(self.rng.uniform(1.0, 5.0)))
            fault = kinds[self.rng.integers(len(kinds))]
            self.happened[fault.__name__] += 1
            await fault()

    async def kill(self) -> None:
        os.kill(engine_process(self.running.pid), signal.SIGKILL)
        await asyncio.sleep(1.0)

    async def hang(self) -> None:
        os.kill(engine_process(self.running.pid), signal.SIGSTOP)
        async with asyncio.timeout(120):
            while await self.running.is_ready():  # noqa: ASYNC110
                await asyncio.sleep(0.1)

    async def pause(self) -> None:
        os.kill(self.running.pid, signal.SIGSTOP)
        await asyncio.sleep(1.0)
        os.kill(self.running.pid, signal.SIGCONT)

    async def hang_ups(self) -> None:
        for _ in range(10):
            os.kill(self.running.pid, signal.SIGHUP)
            await asyncio.sleep(0.1)

    async def leaving(self) -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(2.0):
                await leave(self.running, self.crowd, self.folder)

    async def switches(self) -> None:
        limit = int(self.rng.integers(50, 100))
        await self.running.ask(
            "PUT",
            "/admin/policy",
            {"policy": str(self.rng.choice(POLICIES)), "max_output_tokens": limit},
        )

    async def stop_the_predictor(self) -> None:
        for pid in descendants(self.running.pid):
            if "predictor_process" in command(pid):
                os.kill(pid, signal.SIGSTOP)


def of_process(pid: int) -> dict[str, float]:
    """Resident MiB, threads and open files of the gateway's own process."""
    threads, files = (len(os.listdir(f"/proc/{pid}/{folder}")) for folder in ("task", "fd"))
    return {"mib": resident(pid) / 2**20, "threads": threads, "files": files}


async def quiet(running: GatewayProcess) -> tuple[int, Counter[str], int]:
    """The counters once every client that is not the crowd's has been noticed to be gone."""
    async with asyncio.timeout(60):
        while (found := counts((await running._client.get("/metrics")).text))[2]:  # noqa: ASYNC110
            await asyncio.sleep(0.1)
    return found


async def real_soak(folder: Path) -> dict[str, Any]:
    """Crowds of a thousand calls, one after the other, beside one fault after the other."""
    arguments = (
        "tiny",
        "--engine",
        "vllm",
        "--policy",
        POLICIES[0],
        "--latency",
        "tiny",
        "--prediction-interval",
        "1",
        "--stuck-timeout",
        "5",
    )
    async with gateway(
        folder,
        *arguments,
        "--max-restarts",
        "1000",
        "--max-interruptions",
        "1000",
        "--suspect-after",
        "1000",
    ) as running:
        await running.ready()
        loop = asyncio.get_running_loop()
        began, first, completed = loop.time(), None, 0
        faults = Faults(running, Crowd(running.url, no_more), folder, 1)
        chaos = asyncio.create_task(faults.run())
        try:
            while loop.time() < began + REAL_SECONDS:
                crowd = Crowd(running.url, no_more)
                await crowd.run()
                assert (set(crowd.statuses), crowd.broken) == ({200}, [])
                completed += len(crowd.asked)
                assert not chaos.done(), chaos.exception()
                if first is None and loop.time() > began + FIRST_LOOK:
                    first = of_process(running.pid)
        finally:
            chaos.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await chaos
        os.kill(running.pid, signal.SIGCONT)  # where it was paused
        await ready_again(running)
        received, ended, inside = await quiet(running)
        await asyncio.sleep(10.0)
        last = of_process(running.pid)
        return {
            "received": received,
            "ended": ended,
            "inside": inside,
            "completed": completed,
            "first": first,
            "last": last,
        } | {"faults": faults.happened}


@pytest.mark.engine
def test_ten_minutes_of_the_real_engine_with_all_faults(tmp_path: Path) -> None:
    found = asyncio.run(real_soak(tmp_path))
    tell("soak, real", **found)
    assert found["received"] == found["ended"].total()
    assert found["ended"]["completed"] >= found["completed"], (
        "and those whose client left after the last byte"
    )
    assert set(found["ended"]) <= {"completed", "cancelled"}
    assert found["last"]["mib"] - found["first"]["mib"] < GROWTH
    assert found["last"]["threads"] <= found["first"]["threads"]
    assert found["last"]["files"] <= found["first"]["files"] + 4
    assert len(found["faults"]) >= 6
    ours = re.findall(
        rf'File "{ROOT}/(?:server|queueing|policies)/.*', (tmp_path / "gateway.log").read_text()
    )
    assert ours == [], "vLLM writes a traceback of its own when its engine dies"
