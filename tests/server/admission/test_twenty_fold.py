"""Twenty times what the engine serves, over 2,000 connections: rejections are quick, memory is
bounded, the admitted keep their delay.

Counts are judged in every run; costs, memory and times in slow ones. Times that fall short are a
failure where the machine let both sides run: the sender's lateness and the time that the gateway's
thread stood ready without a processor (Linux's schedstat) say so. A run that was held back and fell
short is repeated; where each was, the machine cannot say anything about times.
"""

from __future__ import annotations

import itertools
import json
import logging
import resource
import threading
import urllib.request
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from kendall.loadgen.gateway.gateway_process import GatewayProcess, free_port
from kendall.queueing.latency.law import parse_law
from tests.server.admission.flood import Flood, request_bytes, run_flood
from tests.server.counts import outcomes, resident
from tests.serving import started
from tests.support import missing

LAW = "k1=0.25e-3,k2=2e-3,k3=25e-6,k4=9e-3"
TOKENS, BATCH, BOUND = 32, 8, 40
SERVICE = parse_law(LAW).padded(BATCH, TOKENS)  # of a full batch, seconds
CAPACITY = BATCH / SERVICE  # requests per second
CONNECTIONS = 2000
MOST_LATE, MOST_HELD = 0.01, 0.05  # seconds at p99; of the gateway's own time on a processor
MOST_CPU = 0.8 / (20 * CAPACITY)  # seconds per call or connection: one core keeps up
log = logging.getLogger(__name__)
ARGUMENTS = [
    "tiny",
    "--engine",
    "emulated",
    "--latency",
    LAW,
    "--policy",
    f"capped:max_batch_size={BATCH}",
]


@pytest.fixture(scope="module")
def gateway(tmp_path_factory: pytest.TempPathFactory) -> Iterator[GatewayProcess]:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard < 3 * CONNECTIONS:
        pytest.skip(f"{hard} open files are permitted here; {CONNECTIONS} connections need more")
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    arguments = [*ARGUMENTS, "--max-num-queued-reqs", str(BOUND), "--prediction-interval", "5"]
    process = GatewayProcess(
        arguments, free_port(0), tmp_path_factory.mktemp("flood") / "gateway.log"
    )

    try:
        with started(process):
            yield process
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def offered(process: GatewayProcess, seconds: float) -> Flood:
    port = int(process.url.rsplit(":", 1)[1])
    return run_flood(
        port,
        connections=CONNECTIONS,
        rate=20 * CAPACITY,
        seconds=seconds,
        request=request_bytes(max_tokens=TOKENS),
    )


def outcomes_of(process: GatewayProcess) -> Counter[str]:
    with urllib.request.urlopen(process.url + "/metrics") as answer:
        return outcomes(answer.read().decode())


def processor(process: GatewayProcess) -> tuple[float, float]:
    """Seconds that the gateway's thread ran, and stood ready without a processor."""
    ran, held, _ = Path(f"/proc/{process.pid}/schedstat").read_text().split()
    return int(ran) * 1e-9, int(held) * 1e-9


def conserved(process: GatewayProcess, seconds: float) -> Flood:
    """Flood it; every call has one answer, and the gateway's own counts are those of the
    clients.
    """
    before = outcomes_of(process)
    found = offered(process, seconds)
    after = outcomes_of(process)
    summary = {status: len(each) for status, each in found.latencies.items()}
    counts = f"sent {found.sent}, held back {found.held_back}, by status {summary}"
    times = (
        f"rejections p50 {found.quantile(429, 0.5) * 1e3:.1f} ms, p99 "
        f"{found.quantile(429, 0.99) * 1e3:.1f} ms"
    )
    log.info(
        "%s; %s; longest delay %.0f ms; sender's p99 lateness %.1f ms",
        counts,
        times,
        max(found.delays),
        found.late(0.99) * 1e3,
    )
    assert set(summary) == {200, 429}
    assert found.lost == 0
    assert sum(summary.values()) == found.sent
    assert found.sent + found.held_back == round(20 * CAPACITY * seconds)
    assert after.get("completed", 0) - before.get("completed", 0) == summary[200]
    assert after.get("rejected", 0) - before.get("rejected", 0) == summary[429]
    assert not {
        name
        for name in ("failed", "abandoned", "cancelled")
        if after.get(name, 0) > before.get(name, 0)
    }
    assert all(each > 0 for each in found.retry_after)
    return found


def shortfalls(found: Flood, seconds: float) -> list[str]:
    """What took too long; being held back can only make it worse."""
    behind = (BOUND - BATCH) / BATCH + 1  # batches that start before it and the one in service
    drained = BOUND / BATCH + 1  # all that are here, and one more
    served = len(found.latencies[200])
    instants = len({round(each) for each in found.retry_after})
    judged = {
        f"sent back at {instants} instants": instants > 50,
        f"p99 of rejections {found.quantile(429, 0.99) * 1e3:.0f} ms": found.quantile(429, 0.99)
        < 0.05,
        f"sent {found.sent}, held back {found.held_back}": found.sent
        > 0.99 * 20 * CAPACITY * seconds,
        f"served {served}: overload costs throughput": served > 0.85 * CAPACITY * seconds,
        f"delay of an admitted one {max(found.delays):.0f} ms": max(found.delays)
        < 1.25 * behind * SERVICE * 1e3,
        f"sent away for {max(found.retry_after):.0f} ms": max(found.retry_after)
        < 1.25 * drained * SERVICE * 1e3,
    }
    return [what for what, holds in judged.items() if not holds]


def check(process: GatewayProcess, seconds: float) -> str:
    """Judge one flood; where its times fell short on a machine that held it back, says so."""
    ran, held = processor(process)
    found = conserved(process, seconds)
    ran, held = (now - before for now, before in zip(processor(process), (ran, held), strict=True))
    late, per_call = found.late(0.99), ran / (found.sent + CONNECTIONS)
    costs = f"{ran:.2f} s, {per_call * 1e6:.0f} us per call or connection"
    log.info("gateway ran %s; held back %.2f s; %d MiB", costs, held, resident(process.pid) >> 20)
    assert per_call < MOST_CPU
    short = shortfalls(found, seconds)
    if not short:
        return ""
    assert late > MOST_LATE or held > MOST_HELD * seconds, short
    return (
        f"{'; '.join(short)} (sender late by {late * 1e3:.0f} ms at p99, gateway held back for "
        f"{held:.2f} of {seconds:g} s)"
    )


def check_repeatedly(process: GatewayProcess, seconds: float, attempts: int) -> None:
    held_back = [check(process, seconds)]
    while held_back[-1] and len(held_back) < attempts:
        held_back.append(check(process, seconds))
    if held_back[-1]:
        missing("a calm machine", "; ".join(held_back))


@pytest.mark.slow
def test_a_minute_of_it(gateway: GatewayProcess) -> None:
    """60 s; memory after the first ten does not grow."""
    check(gateway, 10.0)
    warm = resident(gateway.pid)
    try:
        check_repeatedly(gateway, 60.0, 2)
    finally:
        assert resident(gateway.pid) < warm + (32 << 20)
        assert resident(gateway.pid) < 1 << 30


def test_the_short_form_of_it(gateway: GatewayProcess) -> None:
    """Its counts: costs and times are the machine's."""
    conserved(gateway, 1.5)


@pytest.mark.slow
def test_the_costs_and_times_of_the_short_form(gateway: GatewayProcess) -> None:
    """Its costs anywhere; its times where the machine lets both sides run."""
    log.info("times: %s", check(gateway, 1.5) or "judged")


def test_policies_are_switched_under_it_and_nothing_is_lost(gateway: GatewayProcess) -> None:
    policies = itertools.cycle(
        [
            f"elastic:max_batch_size={BATCH}",
            f"continuous:max_batch_size={BATCH}",
            "dynamic",
            ARGUMENTS[-1],
        ]
    )
    over = threading.Event()
    switched = 0

    def switch() -> None:
        nonlocal switched
        while not over.wait(0.25) or switched % 4:
            body = json.dumps(
                {"policy": next(policies), "max_output_tokens": 12 + switched % 8}
            ).encode()
            request = urllib.request.Request(
                gateway.url + "/admin/policy",
                body,
                {"content-type": "application/json"},
                method="PUT",
            )
            with urllib.request.urlopen(request) as answer:
                switched += answer.status == 200

    with ThreadPoolExecutor(1) as pool:
        switching = pool.submit(switch)
        try:
            conserved(gateway, 1.5)
        finally:
            over.set()
        switching.result()
    assert switched >= 4, "each of them, however slow the machine"
