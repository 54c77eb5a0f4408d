"""What the live page costs: bytes of a first visit, and the share of one core that viewers take
from a gateway under load.

Bytes: the document, every file that it names, the history and the first events, as they travel
(compressed, heads included). CPU: processor time of the gateway's own process in
stretches without and with VIEWERS streams that read every event, in turn (ABAB...), at a Poisson
load on the emulated engine; the difference of the means, with a 95 % interval from the pairs. The
predicting process, which draws the distribution while somebody looks, is counted too and shown
apart.

    .venv/bin/python bench/page_cost.py [--viewers 20] [--seconds 20] [--pairs 4] [--rate 20]
    [--json FILE]
"""

from __future__ import annotations

import argparse
import asyncio
import gzip
import json
import re
import sys
import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import asdict
from pathlib import Path
from statistics import fmean
from typing import Any

import aiohttp

from bench.gateway_cost.judging import mean_of
from bench.gateway_cost.servers import cpu_seconds
from tests.page.site import loaded, serving

RATE = 20.0  # requests/s
MOST_BYTES, MOST_SHARE = 200_000, 0.02


async def first_visit(url: str) -> int:
    """The bytes on the wire, heads included as far as aiohttp has them."""
    async with aiohttp.ClientSession(
        auto_decompress=False, headers={"accept-encoding": "gzip"}
    ) as client:
        total = 0

        async def get(path: str) -> bytes:
            nonlocal total
            async with client.get(f"{url}/{path}") as answer:
                body = await answer.read()
                total += len(body) + sum(
                    len(name) + len(value) + 4 for name, value in answer.raw_headers
                )
                return body

        document = gzip.decompress(await get("")).decode()
        named = set(re.findall(r'"(live/static/[^"]+)"', document))
        for path in sorted(named):
            await get(path)
        version = next(iter(named)).split("/")[2]
        assert f"live/static/{version}/vendor/inter-latin.woff2" in named
        await get("live/history")
        async with client.get(f"{url}/live/events") as stream:
            total += len(await stream.content.readuntil(b"event: switches")) + 2000
        return total


@asynccontextmanager
async def viewing(url: str, viewers: int) -> AsyncIterator[list[int]]:
    """So many streams that read every event; the bytes that each received."""
    received = [0] * viewers

    async def view(index: int, client: aiohttp.ClientSession) -> None:
        async with client.get(f"{url}/live/events") as stream:
            async for chunk in stream.content.iter_any():
                received[index] += len(chunk)

    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(
        connector=connector, timeout=aiohttp.ClientTimeout(total=None)
    ) as client:
        tasks = [asyncio.create_task(view(index, client)) for index in range(viewers)]
        try:
            yield received
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)


def children(pid: int) -> list[int]:
    """Its processes: the predicting one, and Python's resource tracker."""
    return [int(each) for each in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


async def stretch(pid: int, seconds: float) -> tuple[float, float]:
    """Shares of a core: the gateway's process, its children."""
    loop = asyncio.get_running_loop()
    start, own, others = loop.time(), cpu_seconds(pid), sum(map(cpu_seconds, children(pid)))
    await asyncio.sleep(seconds)
    taken = loop.time() - start
    return (cpu_seconds(pid) - own) / taken, (sum(map(cpu_seconds, children(pid))) - others) / taken


async def measure(viewers: int, seconds: float, pairs: int, rate: float) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        started = serving(Path(folder), "--prediction-interval", "5", "--what-if-interval", "60")
        async with started as gateway, loaded(gateway, rate, 120 + 2.5 * seconds * pairs):
            await asyncio.sleep(45)  # the first predictions load the mathematics, the history fills
            size = await first_visit(gateway.url)
            rows = []
            for _ in range(pairs):
                without = await stretch(gateway.pid, seconds)
                async with viewing(gateway.url, viewers) as received:
                    await asyncio.sleep(2)
                    before = sum(received)
                    watched = await stretch(gateway.pid, seconds)
                    rows.append((without, watched, (sum(received) - before) / viewers / seconds))
    own = mean_of([watched[0] - without[0] for without, watched, _ in rows])
    others = mean_of([watched[1] - without[1] for without, watched, _ in rows])
    return {
        "first_visit_bytes": size,
        "viewers": viewers,
        "share_of_a_core": asdict(own),
        "predicting_process": asdict(others),
        "without_viewers": fmean(without[0] for without, _, _ in rows),
        "bytes_per_second_and_viewer": fmean(size for _, _, size in rows),
    }


def main() -> int:
    """Exit status 1 where a bound is exceeded."""
    parser = argparse.ArgumentParser(description="What the live page costs.")
    parser.add_argument("--viewers", type=int, default=20)
    parser.add_argument("--seconds", type=float, default=20.0)
    parser.add_argument("--pairs", type=int, default=4)
    parser.add_argument(
        "--rate",
        type=float,
        default=RATE,
        help="requests/s; the fewer, the less noise: 0.01 is an idle gateway",
    )
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    costs = asyncio.run(measure(given.viewers, given.seconds, given.pairs, given.rate))
    share, other = costs["share_of_a_core"], costs["predicting_process"]
    half, other_half = share["high"] - share["value"], other["high"] - other["value"]
    print(
        f"first visit              {costs['first_visit_bytes']:>9,} bytes        (allowed "
        f"{MOST_BYTES:,})"
    )
    print(
        f"{given.viewers} viewers               {share['value']:>9.2%} of a core, +- {half:.2%}  "
        f"(allowed {MOST_SHARE:.0%})"
    )
    print(f"  in the predicting process {other['value']:>6.2%} of a core, +- {other_half:.2%}")
    print(
        f"gateway without viewers  {costs['without_viewers']:>9.1%} of a core at {given.rate:g} "
        "requests/s"
    )
    print(f"a viewer receives        {costs['bytes_per_second_and_viewer']:>9,.0f} bytes/s")
    if given.json is not None:
        given.json.write_text(json.dumps(costs, indent=1) + "\n")
    return int(costs["first_visit_bytes"] > MOST_BYTES or share["value"] > MOST_SHARE)


if __name__ == "__main__":
    sys.exit(main())
