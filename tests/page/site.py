"""A gateway with something to see: an emulated engine slow enough to watch, under Poisson load,
and a browser to see it with.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import httpx

from kendall.loadgen.gateway.gateway_process import GatewayProcess, free_port
from kendall.loadgen.sending.client.target import Target
from kendall.loadgen.sending.run import run_load
from kendall.queueing.arrivals.processes import Poisson
from kendall.queueing.arrivals.timetable import draw_timetable
from kendall.queueing.distributions.token_distribution import parse_distribution
from kendall.server.live.assessment_request import ENOUGH
from kendall.server.page.minute import MINUTE
from tests.page.browser import PATIENCE, Browser, Page

# 8 requests of 10 to 60 tokens take about 0.24 s, so 34/s is the most
LAW = "k1=1.6e-3,k2=16e-3,k3=0.08e-3,k4=3.2e-3,cv=0.05"
LENGTHS, PROMPTS = (
    parse_distribution("uniform:low=10,high=60"),
    parse_distribution("deterministic:value=16"),
)
READY = (
    "document.body.dataset.ready === 'true' && document.body.dataset.link === 'live' && "
    "document.querySelector('#as-of').textContent"
)
DRAWN = "document.querySelectorAll('.plot[data-drawn=true]').length"
CHARTS = 10  # over time
TIMES = "[...document.querySelectorAll('.plot[data-start]')].filter(e => e.offsetParent)"
SPANS = f"{TIMES}.map(e => e.dataset.start + '-' + e.dataset.end)"
CAPPED = "capped:max_batch_size=8"
LONGEST = 240.0  # seconds of load, and for a gateway to have something to show
_Fact = TypeVar("_Fact")
_Shown = TypeVar("_Shown")
FLAGS = (
    *(
        "tiny",
        "--engine",
        "emulated",
        "--allow-forced-lengths",
        "--policy",
        CAPPED,
        "--max-num-seqs",
        "16",
    ),
    *("--prediction-interval", "3", "--prediction-window", "120", "--what-if-interval", "15"),
)


@contextlib.asynccontextmanager
async def serving(folder: Path, *more: str, port: int = 0) -> AsyncIterator[GatewayProcess]:
    """A gateway in a process of its own, ready."""
    async with GatewayProcess(
        [*FLAGS, "--latency", LAW, *more], port or free_port(0), folder / "gateway.log"
    ) as gateway:
        await gateway.ready()
        yield gateway


@contextlib.asynccontextmanager
async def loaded(
    gateway: GatewayProcess, rate: float, seconds: float, seed: int = 1
) -> AsyncIterator[asyncio.Task[object]]:
    """Poisson arrivals meanwhile, at most for so long."""
    timetable = draw_timetable(
        Poisson(rate), duration=seconds, seed=seed, prompt_tokens=PROMPTS, output_tokens=LENGTHS
    )
    work = run_load(Target(base_url=gateway.url, model="tiny", max_tokens=64), timetable, seed=seed)
    sending: asyncio.Task[object] = asyncio.ensure_future(work)
    try:
        yield sending
    finally:
        sending.cancel()
        await asyncio.gather(sending, return_exceptions=True)


async def at_rest(
    fact: Callable[[], Awaitable[_Fact]],
    look: Callable[[], Awaitable[_Shown]],
    judge: Callable[[_Fact, _Shown], None],
) -> None:
    """Hold a fact of the gateway against what the page shows while the fact does not change, until
    they agree: the page follows it.

    Raises what was wrong last.
    """
    deadline = asyncio.get_running_loop().time() + PATIENCE
    fault: Exception = AssertionError("the numbers never stood still")
    while asyncio.get_running_loop().time() < deadline:
        before = await fact()
        shown = await look()
        if await fact() == before:
            try:
                judge(before, shown)
            except (AssertionError, LookupError, TypeError, ValueError) as error:
                fault = error
            else:
                return
        await asyncio.sleep(0.1)
    raise fault


@dataclass
class Site:
    """A browser and a gateway."""

    browser: Browser
    gateway: GatewayProcess
    runner: asyncio.Runner

    def run(
        self, work: Callable[[Page], Awaitable[None]], *, width: int = 1280, path: str = "/"
    ) -> None:
        async def main() -> None:
            async with self.browser.page(width) as page:
                await page.open(self.gateway.url + path)
                await page.until(READY)
                await work(page)

        self.runner.run(main())


async def served_lately(gateway: GatewayProcess) -> None:
    """Under load until there is a prediction from the last minute, where there is none; then
    nothing moves any more.
    """

    async def idle() -> bool:
        return not (await gateway.ask("GET", "/admin/state"))["unanswered"]

    if not await shows_enough(gateway):
        async with loaded(gateway, 20.0, LONGEST):
            await becomes(lambda: shows_enough(gateway))
        await becomes(idle)


async def becomes(true: Callable[[], Awaitable[bool]]) -> None:
    """Return once it is so. Raises TimeoutError where it never is."""
    async with asyncio.timeout(LONGEST):
        while True:
            if await true():
                return
            await asyncio.sleep(0.1)


async def shows_enough(gateway: GatewayProcess) -> bool:
    """Whether every chart has a line, and the window will hold enough for looks for another
    minute.
    """
    history = await history_of(gateway.url)
    newest = {
        name: column[-1] for name, column in zip(history["columns"], history["fine"], strict=False)
    }
    known = all(
        newest.get(name) is not None
        for name in ("observed_delay", "predicted_delay", "first_token_mean")
    )
    return known and newest["completed_rate"] * MINUTE > 1.5 * ENOUGH


async def in_force(gateway: GatewayProcess) -> dict[str, Any]:
    """The setting, with its epoch."""
    return await gateway.ask("GET", "/admin/policy")


async def put_in_force(gateway: GatewayProcess) -> None:
    """The setting of FLAGS, so that a page that is opened now shows it."""
    wanted = {"policy": CAPPED, "max_output_tokens": None, "patience": None}
    found = await gateway.ask("PUT", "/admin/policy", wanted)

    async def shown() -> bool:
        return bool((await topics_of(gateway.url))["gateway"].get("in_force") == found)

    await becomes(shown)


async def history_of(url: str) -> dict[str, Any]:
    """What the charts of a page that is opened now begin with."""
    async with httpx.AsyncClient(timeout=PATIENCE) as client:
        found: dict[str, Any] = (await client.get(f"{url}/live/history")).json()
        return found


async def topics_of(url: str) -> dict[str, Any]:
    """The first events of a page that is opened now; that of the distribution is their last."""
    text = ""
    async with (
        httpx.AsyncClient(timeout=PATIENCE) as client,
        client.stream("GET", f"{url}/live/events") as answer,
    ):
        async for chunk in answer.aiter_text():
            text += chunk
            events = [
                dict(line.split(": ", 1) for line in block.splitlines())
                for block in text.split("\n\n")[:-1]
            ]
            topics = {
                event["event"]: json.loads(event["data"]) for event in events if "event" in event
            }
            if "distribution" in topics:
                return topics
    raise AssertionError("the stream ended before it began")


async def text_of(gateway: GatewayProcess) -> str:
    """Its metrics."""
    async with httpx.AsyncClient(timeout=PATIENCE) as client:
        return (await client.get(gateway.url + "/metrics")).text
