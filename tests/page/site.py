"""A gateway with something to see: an emulated engine slow enough to watch, under Poisson load, and a browser to see it with."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path

import httpx

from loadgen.arrivals import Poisson
from loadgen.client import Target
from loadgen.gateway_process import GatewayProcess, free_port
from loadgen.run import run_load
from loadgen.timetable import draw_timetable
from queueing.distributions import parse_distribution
from tests.page.browser import Browser, Page

LAW = "k1=1.6e-3,k2=16e-3,k3=0.08e-3,k4=3.2e-3,cv=0.05"  # 8 requests of 10 to 60 tokens take about 0.24 s, so 34/s is the most
LENGTHS, PROMPTS = parse_distribution("uniform:low=10,high=60"), parse_distribution("deterministic:value=16")
READY = "document.body.dataset.ready === 'true' && document.body.dataset.link === 'live'"
DRAWN = "document.querySelectorAll('.plot[data-drawn=true]').length"
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


@dataclass
class Site:
    """A browser and a gateway that has served for a while."""

    browser: Browser
    gateway: GatewayProcess
    runner: asyncio.Runner

    def run(self, work: Callable[[Page], Awaitable[None]], *, width: int = 1280, path: str = "/") -> None:
        async def main() -> None:
            async with self.browser.page(width) as page:
                await page.open(self.gateway.url + path)
                await page.until(READY)
                await work(page)

        self.runner.run(main())


async def served_for_a_while(gateway: GatewayProcess) -> None:
    """Until there is a prediction; then nothing moves any more."""
    async with loaded(gateway, 20.0, 60.0):
        for _ in range(200):
            await asyncio.sleep(0.3)
            if (await gateway.ask("GET", "/admin/prediction"))["prediction"] is not None:
                break
        await asyncio.sleep(1.0)
    for _ in range(200):
        await asyncio.sleep(0.1)
        if not (await gateway.ask("GET", "/admin/state"))["unanswered"]:
            return
    raise AssertionError("the gateway does not become idle")


async def text_of(gateway: GatewayProcess) -> str:
    """Its metrics."""
    async with httpx.AsyncClient() as client:
        return (await client.get(gateway.url + "/metrics")).text
