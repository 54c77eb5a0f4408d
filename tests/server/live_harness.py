"""A serving gateway whose assumptions are broken one at a time, and what its live model says
while the last requests come.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import Callable, Coroutine, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import openai

from kendall.loadgen.gateway.gateway_process import GatewayProcess, free_port
from kendall.loadgen.sending.client.target import Target
from kendall.loadgen.sending.job import ClosedLoopUsers, SendOptions
from kendall.loadgen.sending.operating_system import pin_to_gateway_cpus
from kendall.loadgen.sending.run import run_load
from kendall.policies import parse_policy
from kendall.queueing.arrivals.processes import ArrivalStream, Poisson
from kendall.queueing.arrivals.text import at_rate, parse_arrivals
from kendall.queueing.arrivals.timetable import Timetable, draw_prompts, draw_timetable, streams
from kendall.queueing.distributions.token_distribution import TokenDistribution, parse_distribution
from kendall.queueing.latency.law import LatencyModel
from kendall.queueing.latency.profile import Profile
from kendall.queueing.measurement.record import Record
from kendall.queueing.prediction import largest_stable_rate
from tests.server.live_machine import stopped_half_of_the_time
from tests.serving import started

AssessmentJson = dict[str, Any]  # `prediction` of GET /admin/prediction
LENGTHS = parse_distribution("uniform:low=4,high=28")
LONGEST, PROMPT, BOUND = 28, 16, 16  # tokens, tokens, sequences in the engine
PROMPTS = parse_distribution(f"deterministic:value={PROMPT}")
CAPPED = "capped:max_batch_size=8"
PATIENCE = 90.0  # seconds that an assessment may come too late


@dataclass(frozen=True, eq=False, kw_only=True)
class Site:
    """A gateway in a process of its own, ready and calibrated. `seconds` is how long a run
    takes.
    """

    gateway: GatewayProcess
    runner: asyncio.Runner
    law: LatencyModel  # as calibrated, speed 1
    records: Path
    interval: float  # seconds between assessments
    seconds: float
    slowed: Callable[[], AbstractContextManager[None]]  # the engine takes twice as long inside
    speed: float = 1.0  # of the engine now, against the law (> 1: slower)

    def run(self, work: Coroutine[Any, Any, Any]) -> Any:
        """Until it is done."""
        return self.runner.run(work)

    def now(self) -> Site:
        """With the speed measured anew."""
        return replace(self, speed=self.run(speed_now(self)))

    def capacity(self, policy: str = CAPPED, lengths: TokenDistribution = LENGTHS) -> float:
        """Requests/s at which the load is 1."""
        return largest_stable_rate(
            parse_policy(policy), lengths, self.law.at_speed(self.speed), max_num_seqs=BOUND
        )

    def timetable(
        self,
        process: ArrivalStream,
        seed: int,
        seconds: float | None = None,
        lengths: TokenDistribution = LENGTHS,
    ) -> Timetable:
        """As long as a run may take at most."""
        return draw_timetable(
            process,
            duration=(seconds or self.seconds) + PATIENCE,
            seed=seed,
            prompt_tokens=PROMPTS,
            output_tokens=lengths,
        )

    def poisson(
        self, load: float, seed: int, policy: str = CAPPED, seconds: float | None = None
    ) -> Timetable:
        """Stationary load."""
        return self.timetable(Poisson(load * self.capacity(policy)), seed, seconds)

    def arrivals(self, text: str, load: float, seed: int, policy: str = CAPPED) -> Timetable:
        """`text` of another process, brought to this load."""
        return self.timetable(at_rate(parse_arrivals(text), load * self.capacity(policy)), seed)


@contextlib.contextmanager
def serving(
    gateway: GatewayProcess, repeats: int, *, warm: bool = True, **about: Any
) -> Iterator[Site]:
    """Start it, measure its law, and unless told otherwise wait for a first assessment, which
    loads the mathematics; end it.

    `about`: the other fields of the site.
    """
    body = {
        "max_output_tokens": LONGEST,
        "max_batch_size": BOUND,
        "prompt_tokens": PROMPT,
        "repeats": repeats,
    }
    with started(gateway) as runner:
        law = Profile.from_dict(
            runner.run(gateway.ask("POST", "/admin/calibrate", body))
        ).law.at_speed(1.0)
        site = Site(gateway=gateway, runner=runner, law=law, **about)
        if warm:
            runner.run(looked(site, CAPPED, sent(site, site.poisson(0.5, 0)), 2.0))
        yield site


@contextlib.contextmanager
def real_site(folder: Path, *, repeats: int = 5, warm: bool = True) -> Iterator[Site]:
    """A gateway on the real engine; this process keeps off the engine's CPU while it serves.
    `repeats`: of each cell of its law.
    """
    records, interval, cpus = folder / "records.jsonl", 2.0, os.sched_getaffinity(0)
    gateway = GatewayProcess(
        arguments(interval, records, "--engine", "vllm"), free_port(0), folder / "gateway.log"
    )
    slower = partial(stopped_half_of_the_time, gateway)
    with serving(
        gateway, repeats, warm=warm, records=records, interval=interval, seconds=40.0, slowed=slower
    ) as site:
        pin_to_gateway_cpus()
        try:
            yield site
        finally:
            os.sched_setaffinity(0, cpus)


def arguments(interval: float, records: Path, *more: str) -> list[str]:
    """Of `kendall serve`; what-ifs only when asked for."""
    live = [
        "--prediction-interval",
        f"{interval:g}",
        "--prediction-window",
        "300",
        "--what-if-interval",
        "100000",
    ]
    return [
        "tiny",
        "--policy",
        CAPPED,
        "--max-num-seqs",
        str(BOUND),
        "--allow-forced-lengths",
        *live,
        "--record-file",
        str(records),
        *more,
    ]


# load


async def sent(
    site: Site,
    timetable: Timetable,
    seed: int = 1,
    *,
    users: int | None = None,
    think: float = 0.0,
    longest: int = LONGEST,
    n: int = 1,
) -> None:
    """Send it; in a closed loop, by so many users who think for `think` seconds on average, if
    told. `longest`: the clients' limit; `n`: sequences of a call, all of its length.
    """
    thinking = streams(seed).think_times.exponential(think, len(timetable))
    loop = None if users is None else ClosedLoopUsers(users=users, think_times=thinking)
    await run_load(
        Target(base_url=site.gateway.url, model="tiny", max_tokens=longest, n=n),
        timetable,
        seed=seed,
        options=SendOptions(closed_loop=loop),
    )


async def retried(site: Site, timetable: Timetable, patience: float) -> None:
    """OpenAI's own client, told to wait `patience` seconds: it hangs up, waits a little and asks
    again, twice at most.
    """
    loop, url = asyncio.get_running_loop(), site.gateway.url + "/v1"
    start = loop.time()
    prompts = draw_prompts(timetable, 1, range(10, 250))
    async with openai.AsyncOpenAI(
        base_url=url, api_key="none", timeout=patience, max_retries=2
    ) as client:

        async def ask(row: int) -> None:
            forced = {"kendall_forced_output_tokens": int(timetable.output_tokens[row])}
            with contextlib.suppress(openai.APITimeoutError):
                await client.completions.create(
                    model="tiny",
                    prompt=prompts[row].tolist(),
                    max_tokens=LONGEST,
                    extra_body=forced,
                )

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


async def looked(
    site: Site,
    policy: str,
    load: Coroutine[Any, Any, None],
    seconds: float | None = None,
    *,
    limit: int | None = None,
    asked: Sequence[str] = (),
) -> AssessmentJson:
    """A new epoch under that policy, loaded until its first `seconds` are assessed; that
    assessment. The load is then ended.

    Before its end the paths in `asked` are asked for; the assessment has the answers, by path.

    It comes when the predicting process, which is niced, finds the time: on a busy machine
    the run is longer.
    """
    gateway, loop, seconds = site.gateway, asyncio.get_running_loop(), seconds or site.seconds
    # the policy that is in force already begins no epoch
    other = "single" if policy.startswith("dynamic") else "dynamic"
    await gateway.ask("PUT", "/admin/policy", {"policy": other, "max_output_tokens": limit})
    epoch = (
        await gateway.ask("PUT", "/admin/policy", {"policy": policy, "max_output_tokens": limit})
    )["epoch"]
    deadline = loop.time() + seconds + PATIENCE
    loading = asyncio.ensure_future(load)
    try:
        while not loading.done() and loop.time() < deadline:
            await asyncio.wait([loading], timeout=min(0.2, site.interval / 4))
            found: AssessmentJson | None = (await gateway.ask("GET", "/admin/prediction"))[
                "prediction"
            ]
            if (
                found is not None
                and found["epoch"] == epoch
                and found["window"]["seconds"] >= seconds
            ):
                return found | {path: await gateway.ask("GET", path) for path in asked}
    finally:
        loading.cancel()
        await asyncio.gather(loading, return_exceptions=True)
        await idle(gateway)
    raise AssertionError(f"no assessment at {seconds:.0f} s came while requests came")


async def idle(gateway: GatewayProcess) -> None:
    """Nobody is in the system any more."""
    for _ in range(1000):
        if not (await gateway.ask("GET", "/admin/state"))["unanswered"]:
            return
        await asyncio.sleep(0.05)
    raise AssertionError("the gateway does not become idle")


# the machine


async def speed_now(site: Site) -> float:
    """Of the machine, against the calibrated law."""
    body = {
        "speed_only": True,
        "seconds": 2.0,
        "max_output_tokens": LONGEST,
        "prompt_tokens": PROMPT,
        "max_batch_size": BOUND,
    }
    found = await site.gateway.ask("POST", "/admin/calibrate", body | {"latency": str(site.law)})
    return Profile.from_dict(found).law.speed


async def records_of(site: Site, epoch: int) -> list[Record]:
    """What the gateway wrote of one epoch."""
    await site.gateway.ask("GET", "/admin/state")  # flushes the file
    lines = site.records.read_bytes().splitlines()[1:]
    decode = msgspec.json.Decoder(Record).decode
    return [record for record in map(decode, lines) if record.epoch == epoch]


async def answered(gateway: GatewayProcess, path: str, key: str) -> dict[str, Any]:
    """The first answer that has something there."""
    for _ in range(1000):  # the predicting process takes its time to start on a crowded machine
        if (found := await gateway.ask("GET", path))[key]:
            return found
        await asyncio.sleep(0.2)
    raise AssertionError(f"{path} never had {key}")
