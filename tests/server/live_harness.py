"""A serving gateway whose assumptions are broken one at a time, and what its live model says while the last requests come."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import threading
from collections.abc import Callable, Coroutine, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import openai

from loadgen.arrival_text import at_rate, parse_arrivals
from loadgen.arrivals import Arrivals, Poisson
from loadgen.client import Target
from loadgen.gateway_process import GatewayProcess
from loadgen.run import ClosedLoop, run_load
from loadgen.timetable import Timetable, draw_prompts, draw_timetable, streams
from loadgen.urgency import urgent
from policies import parse_policy
from queueing.distributions import TokenDistribution, parse_distribution
from queueing.estimation.batch_times import batch_times
from queueing.estimation.window import snapshot_of
from queueing.latency import LatencyModel
from queueing.prediction import largest_stable_rate
from queueing.profile import Profile
from queueing.record import Record

Look = dict[str, Any]  # `prediction` of GET /admin/prediction
LENGTHS = parse_distribution("uniform:low=4,high=28")
LONGEST, PROMPT, BOUND = 28, 16, 16  # tokens, tokens, sequences in the engine
PROMPTS = parse_distribution(f"deterministic:value={PROMPT}")
CAPPED = "capped:max_batch_size=8"
PATIENCE = 90.0  # seconds that a look may come too late
ON, OFF = 0.004, 0.004  # seconds that a slowed engine runs and rests
BLOCK, BLOCK_DEVIATION, BRACKET_DEVIATION = 5.0, 0.10, 0.05  # AGREEMENT's noise gate: seconds, fractions


@dataclass(frozen=True, eq=False, kw_only=True)
class Site:
    """A gateway in a process of its own, ready and calibrated. `seconds` is how long a run takes."""

    gateway: GatewayProcess
    runner: asyncio.Runner
    law: LatencyModel  # as calibrated, speed 1
    records: Path
    interval: float  # seconds between looks
    seconds: float
    slowed: Callable[[], AbstractContextManager[None]]  # the engine takes twice as long inside

    def run(self, work: Coroutine[Any, Any, Any]) -> Any:
        """Until it is done."""
        return self.runner.run(work)

    def capacity(self, policy: str = CAPPED, lengths: TokenDistribution = LENGTHS, speed: float = 1.0) -> float:
        """Requests/s at which the load is 1."""
        return largest_stable_rate(parse_policy(policy), lengths, self.law.at_speed(speed), max_num_seqs=BOUND)

    def timetable(self, process: Arrivals, seed: int, seconds: float | None = None, lengths: TokenDistribution = LENGTHS) -> Timetable:
        """As long as a run may take at most."""
        return draw_timetable(
            process, duration=(seconds or self.seconds) + PATIENCE, seed=seed, prompt_tokens=PROMPTS, output_tokens=lengths
        )

    def poisson(self, load: float, seed: int, policy: str = CAPPED, speed: float = 1.0, seconds: float | None = None) -> Timetable:
        """Stationary load."""
        return self.timetable(Poisson(load * self.capacity(policy, speed=speed)), seed, seconds)

    def arrivals(self, text: str, load: float, seed: int, policy: str = CAPPED) -> Timetable:
        """`text` of another process, brought to this load."""
        return self.timetable(at_rate(parse_arrivals(text), load * self.capacity(policy)), seed)


@contextlib.contextmanager
def serving(gateway: GatewayProcess, repeats: int, **about: Any) -> Iterator[Site]:
    """Start it, measure its law, wait for a first look; end it. `about`: the other fields of the site."""
    with asyncio.Runner() as runner:

        async def start() -> LatencyModel:
            await gateway.__aenter__()
            await gateway.ready()
            body = {"max_output_tokens": LONGEST, "max_batch_size": BOUND, "prompt_tokens": PROMPT, "repeats": repeats}
            return Profile.from_dict(await gateway.ask("POST", "/admin/calibrate", body)).law.at_speed(1.0)

        try:
            site = Site(gateway=gateway, runner=runner, law=runner.run(start()), **about)
            runner.run(looked(site, CAPPED, sent(site, site.poisson(0.5, 0)), 2.0))  # the first look loads the mathematics
            yield site
        finally:
            runner.run(gateway.__aexit__(None, None, None))


def arguments(interval: float, records: Path, *more: str) -> list[str]:
    """Of `kendall serve`; what-ifs only when asked for."""
    live = ["--prediction-interval", f"{interval:g}", "--prediction-window", "120", "--what-if-interval", "100000"]
    return ["tiny", "--policy", CAPPED, "--max-num-seqs", str(BOUND), "--allow-forced-lengths", *live, "--record-file", str(records), *more]


# load


async def sent(site: Site, timetable: Timetable, seed: int = 1, users: int | None = None, think: float = 0.0) -> None:
    """Send it; in a closed loop, by so many users who think for `think` seconds on average, if told."""
    thinking = streams(seed).think_times.exponential(think, len(timetable))
    loop = None if users is None else ClosedLoop(users=users, think_times=thinking)
    await run_load(Target(base_url=site.gateway.url, model="tiny", max_tokens=LONGEST), timetable, seed=seed, closed_loop=loop)


async def retried(site: Site, timetable: Timetable, patience: float) -> None:
    """OpenAI's own client, told to wait `patience` seconds: it hangs up, waits a little and asks again, twice at most."""
    loop, url = asyncio.get_running_loop(), site.gateway.url + "/v1"
    start = loop.time()
    prompts = draw_prompts(timetable, 1, range(10, 250))
    async with openai.AsyncOpenAI(base_url=url, api_key="none", timeout=patience, max_retries=2) as client:

        async def ask(row: int) -> None:
            forced = {"kendall_forced_output_tokens": int(timetable.output_tokens[row])}
            with contextlib.suppress(openai.APITimeoutError):
                await client.completions.create(model="tiny", prompt=prompts[row].tolist(), max_tokens=LONGEST, extra_body=forced)

        async with asyncio.TaskGroup() as group:
            for row, instant in enumerate(timetable.intended_at):
                await asyncio.sleep(start + float(instant) - loop.time())
                group.create_task(ask(row))


async def slowed_midway(site: Site, timetable: Timetable) -> None:
    """After half of the run the engine takes twice as long."""
    load = asyncio.ensure_future(sent(site, timetable))
    try:
        await asyncio.sleep(site.seconds / 2)
        with site.slowed():
            await load
    finally:
        load.cancel()


async def looked(site: Site, policy: str, load: Coroutine[Any, Any, None], seconds: float | None = None, **limits: int | None) -> Look:
    """A new epoch under that policy, loaded until there is a look at its first `seconds`; that look. The load is then ended.

    The look comes when the predicting process, which is niced, finds the time: on a busy machine the run is longer.
    """
    gateway, loop, seconds = site.gateway, asyncio.get_running_loop(), seconds or site.seconds
    epoch = (await gateway.ask("PUT", "/admin/policy", {"policy": policy} | limits))["epoch"]
    deadline = loop.time() + seconds + PATIENCE
    loading = asyncio.ensure_future(load)
    try:
        while not loading.done() and loop.time() < deadline:
            await asyncio.wait([loading], timeout=min(0.2, site.interval / 4))
            found: Look | None = (await gateway.ask("GET", "/admin/prediction"))["prediction"]
            if found is not None and found["epoch"] == epoch and found["window"]["seconds"] >= seconds:
                return found
    finally:
        loading.cancel()
        await asyncio.gather(loading, return_exceptions=True)
        await idle(gateway)
    raise AssertionError(f"no look at {seconds:.0f} s came while requests came")


async def idle(gateway: GatewayProcess) -> None:
    """Nobody is in the system any more."""
    for _ in range(1000):
        if not (await gateway.ask("GET", "/admin/state"))["unanswered"]:
            return
        await asyncio.sleep(0.05)
    raise AssertionError("the gateway does not become idle")


# the machine


@contextlib.contextmanager
def stopped_half_of_the_time(gateway: GatewayProcess) -> Iterator[None]:
    """The engine's process runs for 4 ms and rests for 4 ms: a step, 1 to 2 ms long, takes twice as long on average, and none is lost.

    What is stretched are steps; a batch of many sees about the factor 2, with little scatter. An engine that is given another
    batch while it rests begins it late: that is part of its slowness.
    """
    pid, over = engine_process(gateway.pid), threading.Event()

    def beat() -> None:
        with urgent():
            while not over.wait(ON):
                os.kill(pid, signal.SIGSTOP)
                over.wait(OFF)
                os.kill(pid, signal.SIGCONT)

    thread = threading.Thread(target=beat)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()
        os.kill(pid, signal.SIGCONT)


def engine_process(gateway: int) -> int:
    """The process of the gateway's session that calls itself EngineCore."""
    for entry in Path("/proc").iterdir():
        with contextlib.suppress(OSError):
            if entry.name.isdigit() and os.getsid(int(entry.name)) == gateway and b"EngineCore" in (entry / "cmdline").read_bytes():
                return int(entry.name)
    raise AssertionError(f"the gateway {gateway} has no engine process")


async def speed_now(site: Site) -> float:
    """Of the machine, against the calibrated law."""
    body = {"speed_only": True, "seconds": 2.0, "max_output_tokens": LONGEST, "prompt_tokens": PROMPT, "max_batch_size": BOUND}
    found = await site.gateway.ask("POST", "/admin/calibrate", body | {"latency": str(site.law)})
    return Profile.from_dict(found).law.speed


async def records_of(site: Site, epoch: int) -> list[Record]:
    """What the gateway wrote of one epoch."""
    await site.gateway.ask("GET", "/admin/state")  # flushes the file
    lines = site.records.read_bytes().splitlines()[1:]
    decode = msgspec.json.Decoder(Record).decode
    return [record for record in map(decode, lines) if record.epoch == epoch]


def block_speeds(records: Sequence[Record], policy: str, law: LatencyModel) -> list[float]:
    """Measured over lawful time in blocks of `BLOCK` seconds."""
    ends = [record.arrived_at for record in records if record.arrived_at is not None]
    times = batch_times(parse_policy(policy), snapshot_of(list(records), policy, min(ends) - 1e-6, max(ends)), law)
    block = ((times.at - times.at[0]) / BLOCK).astype(int)
    measured, fitted = np.bincount(block, times.measured), np.bincount(block, times.fitted)
    return [float(one / other) for one, other in zip(measured, fitted, strict=True) if other > BLOCK / 20]


def moved(blocks: Sequence[float], bracket: tuple[float, float]) -> bool:
    """Whether the machine's own speed changed, by AGREEMENT's gate: a block off by a tenth, or the brackets apart by a twentieth."""
    off = max(abs(block / float(np.mean(blocks)) - 1) for block in blocks)
    return off > BLOCK_DEVIATION or abs(bracket[1] / bracket[0] - 1) > BRACKET_DEVIATION
