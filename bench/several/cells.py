"""One cell: a policy in force, Poisson load at about a load, and what the gateway predicted while
it served.

A pilot of a few seconds says what the load of a rate is, at the engine's speed under load. Then the
rate for the wanted load flows, a new epoch begins in mid-flow, and the last live prediction is
taken before the flow ends.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from loadgen.gateway.gateway_process import GatewayClient, GatewayError

LENGTHS, PROMPTS, LONGEST = "uniform:low=1,high=63", "deterministic:value=32", 64
LOAD = ("--output-tokens", LENGTHS, "--prompt-tokens", PROMPTS)
PILOTS = 2
PILOT, SETTLE, LAST_LOOK = 10.0, 4.0, 2.0  # seconds; the last look is that long before the end
PATIENCE = 60  # seconds for a first prediction
CLOSE, TELLING = 0.15, 0.5  # of the observed mean; a wider half width says nothing
NAMES = {"queueing_delay": "delay", "sojourn_time": "sojourn"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """Seconds; `load` is what the gateway saw."""

    kind: str
    policy: str
    wanted: float
    load: float
    rate: float
    n: int
    compared: str
    observed: float
    half: float | None
    predicted: float | None
    speed: float
    verdict_of_gateway: str
    reasons: tuple[str, ...]
    epoch: int
    gateway: float | None = None  # the observed mean over that of the recursion, less 1
    service: float | None = None  # mean, by the gateway's records
    engine: float | None = None  # the same by the servers' own metrics

    @property
    def verdict(self) -> str:
        """Whether the prediction is as close as it can be told."""
        if self.predicted is None or self.half is None:
            return "no answer"
        if self.half > TELLING * self.observed:
            return "too short"
        error = abs(self.predicted - self.observed)
        return "holds" if error <= max(CLOSE * self.observed, self.half) else "does not hold"


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """What a cell is to be; `guess`: requests/s that may be far off, below saturation."""

    kind: str
    policy: str
    load: float
    guess: float
    seconds: float
    seed: int


async def measured(gateway: GatewayClient, asked: Asked) -> Cell:
    """The cell. Raises GatewayError."""
    policy, wanted, seconds = asked.policy, asked.load, asked.seconds
    change: dict[str, Any] = {"policy": policy, "max_output_tokens": LONGEST}
    epoch = int((await gateway.ask("PUT", "/admin/policy", change))["epoch"])
    rate = asked.guess
    for pilots in range(PILOTS):  # an engine is slower at a higher load
        pilot = await sent(gateway.url, rate, PILOT, asked.seed + pilots, LOAD)
        await asyncio.sleep(PILOT)
        seen = await looked(gateway, epoch)
        await _over(pilot)
        rate = float(seen["arrival_rate"]) * wanted / float(seen["load"])
        change["max_output_tokens"] += 1  # another limit: a new epoch
        epoch = int((await gateway.ask("PUT", "/admin/policy", change))["epoch"])
    flow = await sent(gateway.url, rate, SETTLE + seconds, asked.seed + PILOTS, LOAD)
    await asyncio.sleep(SETTLE)
    change["max_output_tokens"] += 1
    epoch = int((await gateway.ask("PUT", "/admin/policy", change))["epoch"])
    await asyncio.sleep(seconds - LAST_LOOK)
    found = await looked(gateway, epoch)
    await _over(flow)
    return _cell(found, asked.kind, policy, wanted)


async def looked(gateway: GatewayClient, epoch: int) -> dict[str, Any]:
    """The live prediction of this epoch; the first one of a gateway takes its time. Raises
    GatewayError: there is none.
    """
    said: dict[str, Any] = {}
    for _ in range(PATIENCE):
        said = await gateway.ask("GET", "/admin/prediction")
        found: dict[str, Any] | None = said.get("prediction")
        if found and found["epoch"] == epoch and found["load"]:
            return found
        await asyncio.sleep(1.0)
    raise GatewayError(f"got no prediction under load: {str(said)[:300]}")


async def sent(
    url: str, rate: float, seconds: float, seed: int, options: Sequence[str]
) -> asyncio.subprocess.Process:
    """Load that flows from now on; its summary goes to its standard output."""
    command = [sys.executable, "-m", "kendall.cli", "load", "--base-url", url, "--no-save"]
    command += ["--request-rate", f"{rate:g}", "--duration", f"{seconds:g}s", "--seed", str(seed)]
    pipe, nothing = asyncio.subprocess.PIPE, asyncio.subprocess.DEVNULL
    return await asyncio.create_subprocess_exec(
        *command, *options, "--ignore-eos", "--json", stdout=pipe, stderr=nothing
    )


async def _over(process: asyncio.subprocess.Process) -> None:
    async with asyncio.timeout(120):
        await process.communicate()


def _cell(found: dict[str, Any], kind: str, policy: str, wanted: float) -> Cell:
    compared = found["comparison"]
    low, high = compared["observed"]["low"], compared["observed"]["high"]
    return Cell(
        kind=kind,
        policy=policy,
        wanted=wanted,
        load=float(found["load"]),
        rate=float(found["arrival_rate"]),
        n=int(compared["n"]),
        compared=str(found["compared"]),
        observed=float(compared["observed"]["value"]),
        half=None if low is None or high is None else (high - low) / 2,
        predicted=compared["predicted"]["value"],
        speed=float(found["speed"]),
        epoch=int(found["epoch"]),
        verdict_of_gateway=str(compared["verdict"]),
        reasons=tuple(
            f"{name}: {each['says']}"
            for name, each in compared["assumptions"].items()
            if each["holds"] is False
        ),
    )
