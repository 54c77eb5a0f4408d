"""Is the live prediction right for one queue before two real servers? Engines that the gateway
starts, and two `vllm serve` by URL; three policies at loads 0.5 and 0.7.

Each kind is started and calibrated once; every cell is 90 seconds of Poisson load, in which the
gateway's own prediction is compared with what it observed. A cell holds where the prediction is
within 15 % of the observed mean or in its 95 % interval. "gateway" is the observed mean over that
of the queue recursion on the run's own arrivals and service times: what the gateway's queue does
with them. For servers by URL the mean service by the gateway's records stands beside what the
servers say (`vllm:e2e_request_latency_seconds`). A quiet machine is needed; 25 minutes.

    .venv/bin/python bench/several_servers.py [--kinds replicas,urls] [--seconds 90]
                                              [--json FILE] [--page docs/scaling.md]
                                              [--folder FOLDER]
    .venv/bin/python bench/several_servers.py --kinds urls --cells continuous --keep FILE

Exit status: 0 every cell holds, 1 one does not or a server failed.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import re
import sys
import tempfile
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import ExitStack, asynccontextmanager, contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import httpx

from bench.gateway_cost.page import measured_on, put
from bench.gateway_cost.servers import small_vllm
from bench.several.cells import NAMES, Asked, Cell, measured
from loadgen.compare.compare import compare
from loadgen.gateway.gateway_process import GatewayClient, GatewayError, GatewayProcess, free_port
from queueing.measurement.machine import hardware, versions
from queueing.measurement.record import read_run

SLOTS = 8
POLICIES = [f"{name}:max_batch_size={SLOTS}" for name in ("capped", "elastic", "continuous")]
LOADS = (0.5, 0.7)
GUESS = 20.0  # requests/s of a first pilot
PLAN = {"repeats": 6, "max_batch_size": SLOTS, "max_output_tokens": 64}  # of the calibration
KINDS = {"replicas": "`--replicas 2`", "urls": "two `vllm serve`"}
HEAD = "| servers | policy | load | n | gateway | observed (ms) | predicted (ms) | difference | |"


@contextmanager
def servers(kind: str, folder: Path) -> Iterator[tuple[list[str], list[str]]]:
    """Options of a gateway before two, and the URLs of those that run already."""
    common = ["--max-num-seqs", str(SLOTS)]
    if kind == "replicas":
        yield ["tiny", "--engine", "vllm", "--replicas", "2", *common], []
        return
    with ExitStack() as stack:
        names = ("vllm-0", "vllm-1")
        urls = [stack.enter_context(small_vllm(folder, SLOTS, name)).url for name in names]
        options = [part for url in urls for part in ("--engine-url", url)]
        yield ["--engine", "http", *common, *options], urls


@asynccontextmanager
async def serving(options: Sequence[str], folder: Path) -> AsyncIterator[GatewayProcess]:
    """A gateway, ready."""
    own = ["--prediction-interval", "15", "--prediction-window", "300", "--what-if-interval"]
    own += ["100000", "--record-file", str(folder / "records.jsonl")]
    async with GatewayProcess([*options, *own], free_port(0), folder / "gateway.log") as running:
        await running.ready()
        yield running


def latency_of(urls: Sequence[str]) -> tuple[float, float]:
    """Seconds and requests so far, by the servers' own metrics."""
    total = [0.0, 0.0]
    for url in urls:
        text = httpx.get(f"{url}/metrics", trust_env=False).text
        for place, name in enumerate(("sum", "count")):
            found = re.findall(
                rf"^vllm:e2e_request_latency_seconds_{name}\{{.*\}} (\S+)$", text, re.MULTILINE
            )
            total[place] += sum(map(float, found))
    return total[0], total[1]


def mean_service(folder: Path, first: int) -> float:
    """Of the requests that were recorded from `first` on."""
    served = [
        each.server_free_at - each.dispatched_at
        for each in read_run(folder / "records.jsonl")[1][first:]
        if each.server_free_at is not None and each.dispatched_at is not None
    ]
    return sum(served) / len(served)


def beside_recursion(folder: Path, epoch: int) -> float | None:
    """The observed mean of an epoch over that of the recursion, less 1."""
    records = [each for each in read_run(folder / "records.jsonl")[1] if each.epoch == epoch]
    found = next(each.quantity for each in compare(records) if each.epoch == epoch)
    recursion = found.measured_service
    return None if recursion is None else found.observed.mean / recursion.mean - 1


async def cells(
    kind: str, policies: Sequence[str], given: argparse.Namespace
) -> AsyncIterator[Cell]:
    """All of one kind."""
    seconds, seed = given.seconds, given.seed
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name) if given.folder is None else given.folder / kind
        folder.mkdir(parents=True, exist_ok=True)
        with servers(kind, folder) as (options, urls):
            async with serving(options, folder) as gateway:
                await gateway.ask("POST", "/admin/calibrate", dict(PLAN))
                guess = GUESS
                for policy in policies:
                    for load in LOADS:
                        asked = Asked(
                            kind=kind,
                            policy=policy,
                            load=load,
                            guess=guess,
                            seconds=seconds,
                            seed=seed,
                        )
                        seed += 10
                        cell = await _with_service(gateway, asked, urls, folder)
                        guess = 0.8 * cell.rate
                        yield replace(cell, gateway=beside_recursion(folder, cell.epoch))


async def _with_service(
    gateway: GatewayClient, asked: Asked, urls: Sequence[str], folder: Path
) -> Cell:
    """Service times of the same requests, all of whom have ended."""
    if not urls:
        cell = await measured(gateway, asked)
        await gateway.ask("GET", "/admin/state")
        return cell
    await gateway.ask("GET", "/admin/state")  # writes what is known
    first, before = len(read_run(folder / "records.jsonl")[1]), latency_of(urls)
    cell = await measured(gateway, asked)
    await gateway.ask("GET", "/admin/state")
    after = latency_of(urls)
    engine = (after[0] - before[0]) / (after[1] - before[1])
    return replace(cell, service=mean_service(folder, first), engine=engine)


def with_kept(found: Sequence[Cell], before: Sequence[dict[str, Any]]) -> list[Cell]:
    """The cells of a run before, and in the place of those that were measured again the new."""
    anew = {(each.kind, each.policy, each.wanted): each for each in found}
    kept = [Cell(**{**each, "reasons": tuple(each["reasons"])}) for each in before]
    return [anew.get((each.kind, each.policy, each.wanted), each) for each in kept]


def row(cell: Cell) -> str:
    """Of the table."""
    predicted = cell.predicted or float("nan")
    half = float("nan") if cell.half is None else cell.half
    gateway = "" if cell.gateway is None else f"{cell.gateway:+.2%}"
    said = {"holds": "holds", "does not hold": "**does not hold**"}.get(cell.verdict, cell.verdict)
    return (
        f"| {KINDS[cell.kind]} | `{cell.policy}`, {NAMES[cell.compared]} | {cell.load:.2f} | "
        f"{cell.n:,} | {gateway} | {cell.observed * 1e3:.3g} ± {half * 1e3:.2g} | "
        f"{predicted * 1e3:.3g} | {predicted / cell.observed - 1:+.1%} | {said} |"
    )


def section(found: Sequence[Cell], machine: dict[str, Any], software: dict[str, str]) -> str:
    """For the page."""
    served = [each.service / each.engine for each in found if each.service and each.engine]
    lines = [HEAD, "|---|---|--:|--:|--:|--:|--:|--:|---|", *map(row, found), ""]
    if served:
        lines.append(
            f"Mean service of servers by URL, the gateway's over vLLM's own: {min(served):.3f} to "
            f"{max(served):.3f}."
        )
    return "\n".join([*lines, measured_on(machine, software)])


async def measure(given: argparse.Namespace) -> list[Cell]:
    """All kinds, each cell printed as it comes."""
    found, policies = [], [each for each in POLICIES if given.cells in each]
    for kind in given.kinds.split(","):
        async for cell in cells(kind, policies, given):
            found.append(cell)
            print(row(cell), f"speed {cell.speed:.2f}", *cell.reasons, flush=True)
    return found


def main() -> int:
    """Measure, print, judge."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--kinds", default=",".join(KINDS))
    parser.add_argument("--seconds", type=float, default=90.0, help="of a cell")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--cells", default="", help="those whose policy has this in its text")
    parser.add_argument("--keep", type=Path, help="file of a run whose other cells are kept")
    parser.add_argument("--folder", type=Path, help="new; the records of each kind are kept there")
    parser.add_argument("--json", type=Path, help="file for the numbers")
    parser.add_argument("--page", type=Path, help="page whose section is written anew")
    given = parser.parse_args()
    try:
        found = asyncio.run(measure(given))
    except (GatewayError, RuntimeError) as error:
        print(f"bench/several_servers.py: {error}", file=sys.stderr)
        return 1
    if given.keep:
        found = with_kept(found, json.loads(given.keep.read_text())["cells"])
    machine, software = hardware(), versions()
    if given.json:
        report = {"hardware": machine, "versions": software, "seed": given.seed}
        given.json.write_text(json.dumps(report | {"cells": [asdict(c) for c in found]}, indent=1))
    if given.page:
        put(section(found, machine, software), given.page, "several")
    return 0 if all(cell.verdict == "holds" for cell in found) else 1


if __name__ == "__main__":
    sys.exit(main())
