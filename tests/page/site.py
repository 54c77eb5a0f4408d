"""A gateway with something to see: an emulated engine slow enough to watch, under Poisson load."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path

from loadgen.arrivals import Poisson
from loadgen.client import Target
from loadgen.gateway_process import GatewayProcess, free_port
from loadgen.run import run_load
from loadgen.timetable import draw_timetable
from queueing.distributions import parse_distribution

LAW = "k1=1.6e-3,k2=16e-3,k3=0.08e-3,k4=3.2e-3,cv=0.05"  # 8 requests of 10 to 60 tokens take about 0.24 s, so 34/s is the most
LENGTHS, PROMPTS = parse_distribution("uniform:low=10,high=60"), parse_distribution("deterministic:value=16")
CAPPED = "capped:max_batch_size=8"
FLAGS = (
    *("tiny", "--engine", "emulated", "--allow-forced-lengths", "--policy", CAPPED, "--max-num-seqs", "16"),
    *("--prediction-interval", "3", "--prediction-window", "120", "--what-if-interval", "15"),
)


@contextlib.asynccontextmanager
async def serving(folder: Path, *more: str, port: int = 0) -> AsyncIterator[GatewayProcess]:
    """A gateway in a process of its own, ready."""
    async with GatewayProcess([*FLAGS, "--latency", LAW, *more], port or free_port(0), folder / "gateway.log") as gateway:
        await gateway.ready()
        yield gateway


@contextlib.asynccontextmanager
async def loaded(gateway: GatewayProcess, rate: float, seconds: float, seed: int = 1) -> AsyncIterator[asyncio.Task[object]]:
    """Poisson arrivals meanwhile, at most for so long."""
    timetable = draw_timetable(Poisson(rate), duration=seconds, seed=seed, prompt_tokens=PROMPTS, output_tokens=LENGTHS)
    work = run_load(Target(base_url=gateway.url, model="tiny", max_tokens=64), timetable, seed=seed)
    sending: asyncio.Task[object] = asyncio.ensure_future(work)
    try:
        yield sending
    finally:
        sending.cancel()
        await asyncio.gather(sending, return_exceptions=True)
