"""What rate does a load generator really send? Kendall, `vllm bench serve` and AIPerf against one
emulated gateway, in one run.

Every tool is asked for evenly spaced requests, whose timetable needs nothing that a tool may not
tell: request k belongs at k / rate. The gateway writes down when each arrived, and the lateness is
counted from the earliest arrival (the alignment that is kindest to the tool). A rate counts as sent
when the 99th percentile of the lateness, median of the rounds, is below 10 ms and nothing is
missing. At its highest rate each then sends Poisson arrivals, which are audited. Gateway and tool
share the machine; answers have one token, so that the sender's work is the sending.

    python -m venv PEERS && PEERS/bin/pip install aiperf
    .venv/bin/python bench/load_generators.py --aiperf PEERS/bin/aiperf
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from kendall.loadgen.gateway.gateway_process import GatewayProcess, free_port
from kendall.queueing.arrivals.timetable import delivered_rate
from kendall.queueing.measurement.arrival_audit import audit_arrivals
from kendall.queueing.measurement.machine import hardware, versions
from kendall.queueing.measurement.record import Record, read_run
from kendall.server.engines.tiny import make_tiny

RATES = (50, 100, 200, 300, 400, 500, 600, 800, 1000, 1250, 1500)
SECONDS = 8.0
LATE = 0.010  # seconds, 99th percentile
LAW = "k1=1e-5,k2=1e-4,k3=1e-5,k4=1e-4"
VLLM = """
import argparse, asyncio
from vllm.benchmarks.serve import add_cli_args, main_async
parser = argparse.ArgumentParser()
add_cli_args(parser)
asyncio.run(main_async(parser.parse_args()))
"""
Command = Callable[[str, float, int, bool], list[str]]  # url, rate, requests, whether Poisson


@dataclass(frozen=True, slots=True)
class Sent:
    """The arrivals of one run."""

    asked: int
    arrived: int
    rate: float
    p99_lateness: float  # seconds
    dispersion: str


def ours(processes: int) -> Command:
    """`kendall load`."""

    def command(url: str, rate: float, requests: int, poisson: bool) -> list[str]:
        options = (
            f"--base-url {url} --request-rate {rate} --num-prompts {requests} "
            f"--burstiness {'1' if poisson else 'inf'} --processes {processes} --seed 1 "
            "--drain-limit 20 --prompt-tokens deterministic:value=16 "
            "--output-tokens deterministic:value=1 --no-save --json"
        )
        return [sys.executable, "-m", "kendall", "load", *options.split()]

    return command


def vllm(tokenizer: Path) -> Command:
    """`vllm bench serve`, by its own functions: the CPU wheel's script does not start."""

    def command(url: str, rate: float, requests: int, poisson: bool) -> list[str]:
        options = (
            f"--base-url {url} --backend openai --endpoint /v1/completions --model tiny "
            "--dataset-name random --random-input-len 16 --random-output-len 1 "
            f"--request-rate {rate} --num-prompts {requests} --disable-tqdm "
            f"--burstiness {'1' if poisson else 'inf'} --seed 1"
        )
        return [sys.executable, "-c", VLLM, "--tokenizer", str(tokenizer), *options.split()]

    return command


def aiperf(program: str, tokenizer: Path, folder: Path) -> Command:
    """AIPerf with two workers, as many as there are cores here."""

    def command(url: str, rate: float, requests: int, poisson: bool) -> list[str]:
        options = (
            f"--url {url} --model tiny --endpoint-type completions --streaming "
            f"--request-rate {rate} --arrival-pattern {'poisson' if poisson else 'constant'} "
            f"--request-count {requests} --isl 16 --osl 1 --use-server-token-count "
            "--workers-max 2 --record-processors 1 --ui none --random-seed 1"
        )
        paths = ["--tokenizer", str(tokenizer), "--artifact-dir", str(folder / "aiperf")]
        return [program, "profile", *paths, *options.split()]

    return command


async def send(
    gateway: GatewayProcess,
    run_file: Path,
    command: Command,
    rate: float,
    *,
    seconds: float,
    poisson: bool,
) -> Sent | str:
    """One run; a text where the tool failed."""
    await gateway.ask("GET", "/admin/state")
    before = len(read_run(run_file)[1])
    requests = round(rate * seconds)
    arguments = command(gateway.url, rate, requests, poisson)
    offline = {} if "aiperf" in arguments[0] else {"HF_HUB_OFFLINE": "1"}
    process = await asyncio.create_subprocess_exec(
        *arguments,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        env=os.environ | offline,
        cwd=run_file.parent,
    )
    try:
        async with asyncio.timeout(seconds * 4 + 120):
            _, errors = await process.communicate()
    except TimeoutError:
        process.kill()
        return "did not end"
    await gateway.ask("GET", "/admin/state")
    records = read_run(run_file)[1][before:]
    if len(records) < requests / 2:
        return (
            errors.decode(errors="replace").strip().splitlines()[-1][:100]
            if errors.strip()
            else "sent next to nothing"
        )
    return judged(records, requests, rate, poisson)


def judged(records: list[Record], requests: int, rate: float, poisson: bool) -> Sent:
    """Lateness and audit of the last `requests` arrivals: what came before is a tool's own trial
    request.
    """
    arrived = np.sort(
        np.array([record.received_at or record.arrived_at for record in records], dtype=np.float64)
    )[-requests:]
    offsets = arrived - np.arange(arrived.size) / rate
    verdict = audit_arrivals(arrived, asked_rate=rate).verdict if poisson else ""
    return Sent(
        requests,
        arrived.size,
        delivered_rate(arrived),
        float(np.quantile(offsets - offsets.min(), 0.99)),
        verdict,
    )


async def measure(
    tools: dict[str, Command], folder: Path, rates: list[float], rounds: int, seconds: float
) -> dict[str, object]:
    """Climb the rates, tools in turn, until a tool has failed twice; then its Poisson run."""
    run_file = folder / "gateway.jsonl"
    serve = ["tiny", "--engine", "emulated", "--latency", LAW, "--policy", "continuous"]
    serve += ["--allow-forced-lengths", "--prediction-interval", "0"]
    serve += ["--record-file", str(run_file)]
    best: dict[str, float] = {}
    failures = dict.fromkeys(tools, 0)
    rows: list[dict[str, object]] = []
    async with GatewayProcess(serve, free_port(8097), folder / "gateway.log") as gateway:
        await gateway.ready()
        for rate in rates:
            for name in [name for name in tools if failures[name] < 2]:
                runs = [
                    await send(gateway, run_file, tools[name], rate, seconds=seconds, poisson=False)
                    for _ in range(rounds)
                ]
                row = summary(name, rate, runs)
                rows.append(row)
                print(line(row), flush=True)
                if row["sent"]:
                    best[name], failures[name] = rate, 0
                else:
                    failures[name] += 1
        audits = {}
        for name, rate in best.items():
            longer = max(seconds, 2000 / rate)
            run = await send(gateway, run_file, tools[name], rate, seconds=longer, poisson=True)
            audits[name] = (
                run if isinstance(run, str) else f"{run.rate:.1f}/s delivered: {run.dispersion}"
            )
            print(f"{name}: highest rate {rate:g}/s; Poisson there: {audits[name]}", flush=True)
    return {"rows": rows, "highest_rate": best, "poisson": audits}


def summary(name: str, rate: float, runs: list[Sent | str]) -> dict[str, object]:
    """The rounds of one tool at one rate."""
    good = [run for run in runs if isinstance(run, Sent)]
    row: dict[str, object] = {
        "tool": name,
        "asked_rate": rate,
        "failed": [run for run in runs if isinstance(run, str)],
    }
    if not good:
        return row | {"sent": False}
    p99 = statistics.median(run.p99_lateness for run in good)
    complete = len(good) == len(runs) and all(run.arrived == run.asked for run in good)
    delivered = statistics.median(run.rate for run in good)
    return row | {
        "delivered_rate": delivered,
        "p99_lateness": p99,
        "complete": complete,
        "sent": complete and p99 < LATE,
    }


def line(row: dict[str, object]) -> str:
    if "p99_lateness" not in row:
        return f"{row['tool']:<22}{row['asked_rate']:>6g}/s  failed: {row['failed']}"
    verdict = "sent" if row["sent"] else "NOT sent"
    return (
        f"{row['tool']:<22}{row['asked_rate']:>6g}/s  delivered {row['delivered_rate']:8.1f}/s"
        f"  p99 lateness {float(str(row['p99_lateness'])) * 1e3:9.2f} ms  {verdict}"
    )


def main() -> int:
    """Print the table; JSON where asked."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--aiperf", default=shutil.which("aiperf"), help="AIPerf's program")
    parser.add_argument("--rates", type=float, nargs="+", default=list(RATES))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=SECONDS)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    tokenizer = make_tiny()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        tools = {
            "kendall": ours(1),
            "kendall, 2 processes": ours(2),
            "vllm bench serve": vllm(tokenizer),
        }
        if arguments.aiperf:
            tools["aiperf"] = aiperf(arguments.aiperf, tokenizer, folder)
        results = asyncio.run(
            measure(tools, folder, arguments.rates, arguments.rounds, arguments.seconds)
        )
    if arguments.json:
        arguments.json.write_text(
            json.dumps(results | {"versions": versions(), "hardware": hardware()}, indent=1)
        )
    best = dict(results["highest_rate"])  # type: ignore[call-overload]
    peers = [rate for tool, rate in best.items() if not tool.startswith("kendall")]
    return (
        0
        if peers and max(best.get("kendall", 0), best.get("kendall, 2 processes", 0)) >= max(peers)
        else 1
    )


if __name__ == "__main__":
    sys.exit(main())
