"""How late does a pacing clock send, and what does it cost? The kernel's timer, a final spin,
asyncio's own timers.

One run: Poisson arrivals to the emulated engine behind the gateway, both on this machine, clocks in
turn, the same timetable for all in a round. Lateness is sent - intended; the processor time is the
sender's, per request.

    .venv/bin/python bench/pacing_clocks.py
    chrt -r 5 .venv/bin/python bench/pacing_clocks.py
        on a machine that others use: as if it had nothing else to do
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from loadgen.gateway.gateway_process import GatewayProcess, free_port
from loadgen.sending import pacing
from loadgen.sending.client.target import Target
from loadgen.sending.pacing import Clock, Spin, pacing_clock
from loadgen.sending.run import run_load
from queueing.arrivals.timetable import draw
from queueing.distributions.token_distribution import parse_distribution
from queueing.measurement.machine import hardware, versions

LAW = "k1=1e-5,k2=1e-4,k3=1e-5,k4=1e-4"


class Timers:
    """asyncio's timers alone, and yields where they come early."""

    async def until(self, instant: float) -> None:
        """See `Clock.until`."""
        now = asyncio.get_running_loop().time
        await asyncio.sleep(max(0.0, instant - now()))
        while now() < instant:  # noqa: ASYNC110 - an instant, not a condition
            await asyncio.sleep(0)


@contextmanager
def always(clock: Clock) -> Iterator[Clock]:
    """A clock that needs no closing."""
    yield clock


CLOCKS = {
    "timerfd": pacing_clock,
    "final spin": lambda: always(Spin()),
    "asyncio's timers": lambda: always(Timers()),
}


async def one(
    url: str, name: str, rate: float, count: int, seed: int
) -> tuple[float, float, float]:
    """Mean and 99th percentile of the lateness (ms) and processor time per request (us)."""
    pacing.pacing_clock = CLOCKS[name]
    lengths = parse_distribution("deterministic:value=4")
    timetable = draw(rate, count, seed, parse_distribution("deterministic:value=16"), lengths)
    before = time.process_time()
    result = await run_load(Target(base_url=url, model="tiny"), timetable, seed=seed)
    spent = (time.process_time() - before) / count
    assert all(record.outcome == "completed" for record in result.records)
    return result.lateness.mean * 1e3, result.lateness.p99 * 1e3, spent * 1e6


async def measure(
    rate: float, seconds: float, rounds: int
) -> dict[str, tuple[float, float, float]]:
    """Medians over the rounds, by clock."""
    found: dict[str, list[tuple[float, float, float]]] = {name: [] for name in CLOCKS}
    serve = [
        "tiny",
        "--engine",
        "emulated",
        "--latency",
        LAW,
        "--policy",
        "continuous",
        "--allow-forced-lengths",
    ]
    with tempfile.TemporaryDirectory() as folder:
        async with GatewayProcess(
            [*serve, "--prediction-interval", "0"], free_port(0), Path(folder) / "log"
        ) as gateway:
            await gateway.ready()
            for seed in range(rounds):
                for name in CLOCKS:
                    found[name].append(
                        await one(gateway.url, name, rate, round(rate * seconds), seed)
                    )
    return {
        name: tuple(map(statistics.median, zip(*runs, strict=True))) for name, runs in found.items()
    }


def main() -> None:
    """Print the table; JSON where asked."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rate", type=float, default=500.0)
    parser.add_argument("--seconds", type=float, default=4.0)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    found = asyncio.run(measure(arguments.rate, arguments.seconds, arguments.rounds))
    print(
        f"{arguments.rate:g} requests/s, medians of {arguments.rounds} runs of "
        f"{arguments.seconds:g} s"
    )
    print(f"{'':20}{'mean (ms)':>10}{'p99 (ms)':>10}{'CPU us/request':>16}")
    for name, (mean, p99, spent) in found.items():
        print(f"{name:20}{mean:10.3f}{p99:10.2f}{spent:16.0f}")
    if arguments.json:
        arguments.json.write_text(
            json.dumps({"found": found, "versions": versions(), "hardware": hardware()}, indent=1)
        )


if __name__ == "__main__":
    main()
