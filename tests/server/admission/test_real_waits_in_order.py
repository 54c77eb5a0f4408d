"""Waits told under shortest predicted first come true in the mean on the real vLLM engine."""

from __future__ import annotations

import asyncio
import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from prometheus_client.parser import text_string_to_metric_families

from kendall.loadgen.gateway.gateway_process import GatewayProcess, free_port
from kendall.loadgen.sending.client.target import Target
from kendall.loadgen.sending.run import run_load
from kendall.queueing.arrivals.timetable import Timetable, draw, with_predictions
from kendall.queueing.distributions.token_distribution import parse_distribution
from kendall.queueing.latency.law import LatencyModel
from kendall.queueing.measurement.record import Record
from kendall.queueing.predictors.predictor_text import parse_predictor
from kendall.queueing.queue import Queue
from kendall.server.live.activity import SHOWN
from tests.eventually import eventually
from tests.server.counts import tell
from tests.serving import started
from tests.support import missing

pytestmark = [pytest.mark.engine, pytest.mark.slow, pytest.mark.timeout(900)]
POLICY = "continuous:max_batch_size=4,order=spjf"
LIMIT, PROMPT = 200, "deterministic:value=16"
LENGTHS = parse_distribution("lognormal:mu=3,sigma=1", LIMIT)
# where a machine that becomes 15 % slower makes delays 1.5 times as long, not 2.1 times as at 0.75
LOAD = 0.6
PILOT, MEASURED = 300, 2000  # requests
# seconds at the rate that is measured: a wait estimate counts the arrivals of the last minute
WARM_UP = SHOWN + 5
CHANGED = 0.15  # of the load, by which a sweep too calls a cell disturbed
FIRST_LOAD = 0.5  # of the calibrated law: the machine may have become slower since


@dataclass(frozen=True, kw_only=True)
class Account:
    """Of the measured requests: seconds observed and predicted, mean delay of each tenth of them,
    and their load by the live model at the end.
    """

    observed: float
    predicted: float
    delays: list[float]
    load: float


def test_waits_under_spjf_come_true_within_fifteen_per_cent(tmp_path: Path) -> None:
    """Exact predictions, Poisson arrivals; a pilot run, by the live model, sets the rate."""
    arguments = ["tiny", "--allow-forced-lengths", "--policy", POLICY]
    gateway = GatewayProcess(
        [*arguments, "--prediction-interval", "1"], free_port(0), tmp_path / "gateway.log"
    )
    with started(gateway) as runner:
        found = runner.run(account(gateway))
    tell("waits under spjf", **dataclasses.asdict(found))
    if abs(found.load / LOAD - 1) > CHANGED:
        missing("a quiet machine", f"its speed changed: got load {found.load:.2f}, asked {LOAD}")
    assert found.observed > 5, "nobody waited"
    assert found.observed == pytest.approx(found.predicted, rel=0.15)


async def account(gateway: GatewayProcess) -> Account:
    """Calibrate, look for the rate, warm up, measure."""
    body = {"max_output_tokens": 64, "max_batch_size": 4, "repeats": 3}
    law = LatencyModel(**(await gateway.ask("POST", "/admin/calibrate", body))["law"])
    model = Queue.read(POLICY, LENGTHS, law, max_output_tokens=LIMIT, predictor="exact")
    first = FIRST_LOAD * model.largest_stable_rate
    await sent(gateway, drawn(first, PILOT, 11), seed=11)
    rate = LOAD * capacity(await looked_at(gateway))
    load = asyncio.create_task(
        sent(gateway, drawn(rate, round(rate * WARM_UP) + MEASURED, 12), seed=12)
    )
    await asyncio.sleep(WARM_UP)
    before = await told(gateway)
    records = (await load)[-MEASURED:]
    after = await told(gateway)
    assert (await gateway.ask("GET", "/admin/state"))["overload"]["wait_source"] == "live model"
    observed, predicted = (late - early for late, early in zip(after, before, strict=True))
    delays = np.array([record.queueing_delay for record in records])
    return Account(
        observed=observed,
        predicted=predicted,
        delays=[float(part.mean()) for part in np.array_split(delays, 10)],
        load=rate / capacity(await looked_at(gateway)),
    )


def capacity(look: dict[str, Any]) -> float:
    """Requests/s at a load of 1 by an assessment, whose window begins with the pilot."""
    return float(look["arrival_rate"] / look["load"])


def drawn(rate: float, count: int, seed: int) -> Timetable:
    plain = draw(rate, count, seed, parse_distribution(PROMPT), LENGTHS)
    return with_predictions(plain, parse_predictor("exact"), seed)


async def sent(gateway: GatewayProcess, timetable: Timetable, seed: int) -> list[Record]:
    """All of it, answered in the lengths drawn."""
    target = Target(base_url=gateway.url, model="tiny", max_tokens=LIMIT)
    result = await run_load(target, timetable, seed=seed)
    assert {record.outcome for record in result.records} == {"completed"}
    assert [r.output_tokens for r in result.records] == timetable.output_tokens.tolist()
    assert [r.predicted_output_tokens for r in result.records] == timetable.output_tokens.tolist()
    return result.records


async def looked_at(gateway: GatewayProcess) -> dict[str, Any]:
    """The live model's last assessment; it comes when the predicting process finds the time."""

    async def found() -> dict[str, Any] | None:
        await asyncio.sleep(0.2)
        answer: dict[str, Any] | None = (await gateway.ask("GET", "/admin/prediction"))[
            "prediction"
        ]
        return answer

    last: dict[str, Any] = await eventually(found, 120.0)
    return last


async def told(gateway: GatewayProcess) -> tuple[float, float]:
    """Seconds of delay observed and predicted since the gateway started."""
    async with httpx.AsyncClient(timeout=60) as client:
        text = (await client.get(gateway.url + "/metrics")).text
    totals = {
        sample.name: sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
        if sample.name.startswith("kendall_wait_")
    }
    return (
        totals["kendall_wait_observed_seconds_total"],
        totals["kendall_wait_predicted_seconds_total"],
    )
