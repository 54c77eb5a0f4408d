"""Does `kendall watch` tell a fleet's delays, how its balancer sends requests, and how many
replicas an SLO needs?

Two plain `vllm serve` of the tiny model behind nginx, which sends requests in turn, then to the
server with the fewest; a client of its own sends Poisson arrivals through it, and the spans of both
servers come to one `kendall watch --otlp`. The rule has to be named, the model of the same requests
to be within max(15 %, its interval). Then one and two replicas serve the rate of one replica at
load 0.75: the gain has to be in the interval that the watch of one gave a second replica, and the
number that the watch of two says the SLO needs to keep it, where one fewer does not.

    .venv/bin/python bench/watch_fleet.py [--seconds 90]        needs nginx
"""

from __future__ import annotations

import argparse
import asyncio
import re
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import httpx

from bench.gateway_cost.servers import Server, running, small_vllm
from bench.watch import STALE, WARM, Asked, closed, send, watching
from kendall.loadgen.gateway.gateway_process import free_port

SLOTS, LENGTHS = 4, "geometric"
RULES = {"round_robin": "", "least_requests": "least_conn;"}
NEAR = 0.15
CONFIGURATION = """
daemon off; pid {folder}/nginx.pid; error_log {folder}/nginx.err; worker_processes 1;
events {{ worker_connections 4096; }}
http {{
  access_log off; client_body_temp_path {folder}; proxy_temp_path {folder};
  upstream fleet {{ {rule} {servers} }}
  server {{
    listen 127.0.0.1:{port};
    location / {{
      proxy_pass http://fleet; proxy_http_version 1.1; proxy_buffering off;
      proxy_read_timeout 300s;
    }}
  }}
}}
"""


@contextmanager
def fleet(folder: Path, replicas: int, otlp: int) -> Iterator[list[Server]]:
    """Servers that send their spans to one port."""
    flags = ["--otlp-traces-endpoint", f"http://127.0.0.1:{otlp}/v1/traces"]
    protocol = {"OTEL_EXPORTER_OTLP_TRACES_PROTOCOL": "http/protobuf"}
    with ExitStack() as stack:
        yield [
            stack.enter_context(
                small_vllm(folder, SLOTS, f"vllm-{n}", arguments=flags, environment=protocol)
            )
            for n in range(replicas)
        ]


@contextmanager
def balanced(folder: Path, servers: list[Server], rule: str) -> Iterator[str]:
    """The URL of nginx before them."""
    port = free_port(0)
    behind = " ".join(f"server 127.0.0.1:{server.port};" for server in servers)
    configuration = folder / f"nginx-{port}.conf"
    text = CONFIGURATION.format(folder=folder, rule=RULES[rule], servers=behind, port=port)
    configuration.write_text(text)
    with running(f"nginx-{port}", ["nginx", "-c", str(configuration)], folder, port=port) as proxy:
        yield proxy.url


def watched(
    url: str, servers: list[Server], otlp: int, asked: Asked, slo: str | None = None
) -> tuple[dict[str, Any], str]:
    """What the watch says after the time of the cell: its report and its metrics."""
    page = free_port(0)
    flags = ["--max-num-seqs", str(SLOTS), "--port", str(page)]
    flags += [] if slo is None else ["--slo", slo]
    time.sleep(STALE)
    behind = [server.url for server in servers]
    with (
        watching("--otlp", f"127.0.0.1:{otlp}", *behind, *flags),
        httpx.Client(timeout=180, trust_env=False) as client,
    ):
        time.sleep(WARM)
        asyncio.run(send(url, asked))
        time.sleep(12.0)  # until the last spans are here and assessed
        root = f"http://127.0.0.1:{page}"
        client.get(f"{root}/admin/prediction?what_if=true")
        return client.get(f"{root}/admin/watch").json(), client.get(f"{root}/metrics").text


def asked_for(rate: float, load: float, seconds: float) -> Asked:
    return Asked(slots=SLOTS, lengths=LENGTHS, load=load, rate=rate, seconds=seconds)


def rules(folder: Path, seconds: float) -> bool:
    """Whether each rule is named and the check holds."""
    otlp, holds = free_port(0), True
    with fleet(folder, 2, otlp) as servers:
        for rule in RULES:
            with balanced(folder, servers, rule) as url:
                rate = asyncio.run(closed(url, LENGTHS, 2 * SLOTS, 15.0))
                cell = asked_for(0.6 * rate, 0.6, seconds)
                found, _ = watched(url, servers, otlp, cell)
            check, routing = found["check"], found["setting"]["routing"]
            if check is None or routing is None:
                print(f"{rule}: nothing told: {found['reason']}")
                holds = False
                continue
            half = (check["ratio_high"] - check["ratio_low"]) / 2
            near = abs(check["ratio"] - 1) <= max(NEAR, half)
            holds &= near and routing["rule"] == rule
            print(
                f"{rule}: named {routing['rule']} (of {routing['requests']} requests); observed / "
                f"modelled {check['ratio']:.3f} [{check['ratio_low']:.3f}, "
                f"{check['ratio_high']:.3f}] of {check['requests']}: {near}",
                flush=True,
            )
    return holds


def needed(folder: Path, seconds: float, seconds_of_slo: float) -> bool:
    """Whether as many replicas as the watch asks for keep the SLO, and one fewer does not."""
    slo, observed, told = f"p95_queueing_delay={seconds_of_slo:g}s", {}, 0
    with tempfile.TemporaryDirectory() as other:
        otlp = free_port(0)
        with fleet(folder, 1, otlp) as alone:
            rate = 0.75 * asyncio.run(closed(alone[0].url, LENGTHS, SLOTS, 15.0))
            before, _ = watched(alone[0].url, alone, otlp, asked_for(rate, 0.75, seconds))
            observed[1] = before["observed_queueing_delay"]["p95"]["value"]
        otlp = free_port(0)
        with (
            fleet(Path(other), 2, otlp) as servers,
            balanced(Path(other), servers, "least_requests") as url,
        ):
            cell = asked_for(rate, 0.375, seconds)
            found, metrics = watched(url, servers, otlp, cell, slo)
            observed[2] = found["observed_queueing_delay"]["p95"]["value"]
    gained = what_if_gain(before, found)
    if number := re.search(r"^kendall_replicas_needed\S* ([\d.]+)$", metrics, re.MULTILINE):
        told = int(float(number[1]))
    keeps = [count for count, delay in observed.items() if delay <= seconds_of_slo]
    print(
        f"{slo}: {told} replicas needed by the watch; observed p95 "
        + ", ".join(f"{1e3 * delay:.0f} ms with {count}" for count, delay in observed.items())
    )
    return gained and told == min(keeps, default=0)


def what_if_gain(before: dict[str, Any], after: dict[str, Any]) -> bool:
    """Whether the gain of a second replica is in the interval that the watch of one gave it."""
    in_force = before["setting"]["policy"]
    told = next(
        (
            each
            for each in before["what_if"] or ()
            if (each["policy"], each["servers"], each["max_output_tokens"]) == (in_force, 2, None)
        ),
        None,
    )
    if told is None or None in (told["next_gain_low"], told["next_gain_high"]):
        print("no gain of a second replica was told")
        return False
    low, high = told["next_gain_low"], told["next_gain_high"]
    gain = 1 - after["check"]["observed"] / before["check"]["observed"]
    print(f"a second replica: gain of the mean sojourn told {low:.2f}..{high:.2f}, seen {gain:.2f}")
    return bool(low <= gain <= high)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seconds", type=float, default=90.0)
    parser.add_argument("--slo", type=float, default=0.3, help="seconds, of p95_queueing_delay")
    parser.add_argument("--part", choices=("rules", "needed"), action="append")
    options = parser.parse_args()
    holds = []
    with tempfile.TemporaryDirectory() as first, tempfile.TemporaryDirectory() as second:
        if "rules" in (options.part or ("rules",)):
            holds.append(rules(Path(first), options.seconds))
        if "needed" in (options.part or ("needed",)):
            holds.append(needed(Path(second), options.seconds, options.slo))
    return 0 if all(holds) else 1


if __name__ == "__main__":
    sys.exit(main())
