"""What reaches the server is the Poisson process that was asked for: tests on the gateway's own
instants, 0.001 each.

The instants are those at which the kernel had the requests (`received_at`). A run beyond its
lateness budget is INVALID and not judged, because a shared machine may stand still; it is repeated
with the next seed, and where none of them is valid the machine cannot say anything about arrivals.
"""

from __future__ import annotations

import asyncio
import faulthandler
from pathlib import Path

import numpy as np
import pytest

from kendall.loadgen.gateway.gateway_process import GatewayProcess, free_port
from kendall.loadgen.report.audit import Stream, streams_of
from kendall.loadgen.report.load_verdict import BUDGET
from kendall.loadgen.sending.client.target import Target
from kendall.loadgen.sending.job import SendOptions
from kendall.loadgen.sending.run import RunOutput, run_load
from kendall.queueing.arrivals.timetable import draw
from kendall.queueing.distributions.token_distribution import parse_distribution
from kendall.queueing.measurement import arrival_tests
from kendall.queueing.measurement.arrival_audit import Budget
from kendall.queueing.measurement.record import read_run
from tests.server.asgi import Call, call, completion, running
from tests.support import missing
from tests.virtual_time import run_virtual

SIGNIFICANCE = 0.001
ONE = parse_distribution("deterministic:value=1")
FOUR = parse_distribution("deterministic:value=4")
FAST = "k1=1e-6,k2=1e-6,k3=1e-6,k4=1e-6"  # seconds: the gateway is the queue's only work


def p_values(instants: np.ndarray, rate: float) -> dict[str, float]:
    """Every test of the acceptance, on its own."""
    gaps = np.diff(instants)
    found = {
        "uniform instants": arrival_tests.constant_rate(instants),
        "gaps, rate known": arrival_tests.gap_law(gaps, 1 / rate),
        "gaps, rate fitted": arrival_tests.gap_law(gaps),
        "gap spacings": arrival_tests.gap_spacings(gaps),
        "lag 1": arrival_tests.correlation(gaps),
        "lags 1-10": arrival_tests.correlation(gaps, 10),
        "delivered rate": arrival_tests.rate(gaps.size, float(np.ptp(instants)), rate),
    }
    found |= {
        f"dispersion, {size}": arrival_tests.dispersion(instants, size) for size in (5, 20, 50)
    }
    return {name: finding.p_value for name, finding in found.items()}


async def at_the_server(folder: Path, rate: float, n: int, processes: int, seed: int) -> Stream:
    """One run against a gateway of its own; its arrivals there, beside their timetable."""
    file = folder / f"{rate:g}-{processes}-{seed}.jsonl"
    arguments = [
        "--engine",
        "emulated",
        "--latency",
        FAST,
        "--allow-forced-lengths",
        "--prediction-interval",
        "0",
    ]
    async with GatewayProcess(
        [*arguments, "--record-file", str(file)], free_port(0), file.with_suffix(".log")
    ) as gateway:
        await gateway.ready()
        timetable = draw(rate, n, seed, FOUR, ONE)
        target = Target(base_url=gateway.url, model="tiny", max_tokens=1)
        asked = {"arrivals": f"poisson:rate={rate:g}", "request_rate": rate}
        result = await run_load(
            target,
            timetable,
            seed=seed,
            options=SendOptions(processes=processes, drain_limit=60),
            output=RunOutput(configuration=asked),
        )
        await gateway.ask("POST", "/admin/drain")
    assert {record.outcome for record in result.records} == {"completed"}
    header, records = read_run(file)
    assert len(records) == n
    _, received = streams_of(
        [(Path("load"), result.header, result.records, False), (file, header, records, False)]
    )
    assert received.what == "received"
    return received


async def valid_cell(
    folder: Path, rate: float, n: int, processes: int, attempts: int = 4
) -> Stream:
    """The first of a few runs that kept the lateness budget, and whose machine did not hold
    requests back for a mean gap.
    """
    budget = Budget(mean=BUDGET.mean, p99=min(BUDGET.p99, 1 / rate))
    late = []
    for seed in range(attempts):
        received = await at_the_server(folder, rate, n, processes, seed)
        audit = received.audit(budget=budget)
        if audit.valid:
            return received
        assert audit.lateness is not None
        late.append(f"{audit.lateness.p99 * 1e3:.1f}")
    return missing(
        "a calm machine",
        f"p99 of lateness {', '.join(late)} ms at {rate:g}/s; judged up to {budget.p99 * 1e3:g} ms",
    )


def assert_poisson(received: Stream, rate: float) -> None:
    """Every test at 0.001, and sent = timetable."""
    assert received.instants.size >= 2000
    found = p_values(np.sort(received.instants), rate)
    assert min(found.values()) >= SIGNIFICANCE, found
    assert received.intended is not None
    assert np.all(received.instants - received.intended > -1e-4)  # never before its instant


@pytest.mark.slow
def test_what_one_sender_sends_arrives_as_a_poisson_process(tmp_path: Path) -> None:
    """The short cell."""
    assert_poisson(asyncio.run(valid_cell(tmp_path, 250.0, 2000, 1)), 250.0)


@pytest.mark.slow
@pytest.mark.parametrize("processes", [1, 2, 4])
@pytest.mark.parametrize(("rate", "n"), [(100.0, 2000), (1000.0, 2500)])
def test_arrivals_at_the_server_are_poisson(
    tmp_path: Path, rate: float, n: int, processes: int
) -> None:
    assert_poisson(asyncio.run(valid_cell(tmp_path, rate, n, processes)), rate)


@pytest.mark.slow
def test_ten_requests_per_second_by_one_two_and_four_processes(tmp_path: Path) -> None:
    """200 s each, beside each other: 30 requests/s in all leave the machine calm."""
    faulthandler.cancel_dump_traceback_later()  # long by nature, not stuck

    async def all_three() -> list[Stream]:
        return list(
            await asyncio.gather(
                *(valid_cell(tmp_path, 10.0, 2000, processes) for processes in (1, 2, 4))
            )
        )

    for received in asyncio.run(all_three()):
        assert_poisson(received, 10.0)


def test_one_request_per_second_on_virtual_time() -> None:
    """2,000 s of arrivals through the gateway's HTTP layer, every instant exact."""
    timetable = draw(1.0, 2000, 7, FOUR, ONE)

    async def main() -> str:
        async with running(record_file=None) as (app, gateway):
            start = gateway.now()
            calls: list[Call] = []
            for instant in timetable.intended_at.tolist():
                await asyncio.sleep(start + instant - gateway.now())
                calls.append(Call(app, "POST", "/v1/completions", completion(max_tokens=1)))
            await calls[-1].task
            state = (await call(app, "GET", "/admin/state")).json()["arrivals"]
            assert state["count"] == 2000
            seen = np.fromiter(gateway.arrivals.instants, np.float64)
            assert seen - start == pytest.approx(timetable.intended_at, abs=1e-9)
            found = p_values(seen, 1.0)
            assert min(found.values()) >= SIGNIFICANCE, found
            return str(state["verdict"])

    assert run_virtual(main()) == "poisson"


def test_the_same_checks_fail_for_two_senders_of_one_seed_sleeps_that_drift_and_regular_gaps() -> (
    None
):
    """Their power, at the same n."""
    rng = np.random.default_rng(0)
    lock_step = np.cumsum(np.repeat(rng.exponential(0.01, 1000), 2))
    slow = np.cumsum(rng.exponential(0.01, 2000) + 0.0008)
    regular = np.cumsum(rng.gamma(1.2, 0.01 / 1.2, 2000))
    for instants in (lock_step, slow, regular):
        assert min(p_values(instants, 100.0).values()) < SIGNIFICANCE
