"""received = completed + failed + rejected + abandoned + cancelled + in the system, from the
text of /metrics alone, whatever happens.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from kendall.queueing.latency.law import parse_law
from kendall.server.admission.settings import OverloadSettings
from kendall.server.supervision import restarts
from tests.server.asgi import LAW, call, completion
from tests.server.counts import tell
from tests.server.mortal import MortalEngine, faulty
from tests.server.statuses import ROWS
from tests.server.test_fault_chaos import CALM, Chaos
from tests.virtual_time import run_virtual


async def scraped(app: Any) -> tuple[float, Counter[str], float]:
    """Requests received, their outcomes, and those in the system."""
    text = (await call(app, "GET", "/metrics")).body.decode()
    received = inside = 0.0
    outcomes: Counter[str] = Counter()
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            match sample.name:
                case "kendall_requests_received_total":
                    received += sample.value
                case "kendall_requests_total":
                    outcomes[sample.labels["outcome"]] += int(sample.value)
                case "kendall_requests_in_system":
                    inside += sample.value
    return received, outcomes, inside


class Watcher:
    """Scrapes at random instants and drains now and then."""

    def __init__(self, app: Any, chaos: Chaos) -> None:
        self.app, self.rng = app, chaos.rng
        self.looks: list[tuple[float, int, float]] = []

    async def look(self) -> None:
        while True:
            await asyncio.sleep(float(self.rng.exponential(0.03)))
            received, outcomes, inside = await scraped(self.app)
            self.looks.append((received, outcomes.total(), inside))

    async def drain_and_undo(self) -> None:
        while True:
            await asyncio.sleep(float(self.rng.exponential(1.0)))
            draining = asyncio.create_task(call(self.app, "POST", "/admin/drain"))
            await asyncio.sleep(0.05)
            await call(self.app, "DELETE", "/admin/drain")
            await draining


@pytest.mark.slow
@pytest.mark.parametrize(
    "policy",
    [
        "single",
        "capped:max_batch_size=4",
        "continuous:max_batch_size=4",
        "continuous:max_batch_size=4,order=sprpt",
    ],
)
def test_requests_are_conserved_in_metrics_under_random_faults(
    policy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Deaths, hangs, clients that leave, a full queue, lost patience, drains."""
    monkeypatch.setattr(restarts, "LONGEST_WAIT", 0.1)

    async def main() -> None:
        chaos = Chaos(5, 500, leaving=0.2, rate=80.0)
        engine = MortalEngine(parse_law(LAW), start_takes=0.3)
        overload = OverloadSettings(max_num_queued_reqs=12)
        async with faulty(policy, engine, supervision=CALM, overload=overload, patience=0.15) as (
            app,
            _,
            _,
            _,
        ):
            watcher = Watcher(app, chaos)
            faults = (watcher.look(), watcher.drain_and_undo(), chaos.deaths_and_hangs(engine, 1.0))
            background = [asyncio.create_task(fault) for fault in faults]
            await chaos.arrivals(app)
            async with asyncio.timeout(600):
                await asyncio.gather(*(made.task for made, *_ in chaos.calls))
            for task in background:
                task.cancel()
            await asyncio.gather(*background, return_exceptions=True)
            await asyncio.sleep(5.0)
            received, outcomes, inside = await scraped(app)
        tell(
            "conservation",
            policy=policy,
            looks=len(watcher.looks),
            received=received,
            outcomes=outcomes,
            deaths=chaos.deaths,
        )
        assert [look for look in watcher.looks if look[0] != look[1] + look[2]] == []
        assert len(watcher.looks) > 50
        assert sum(look[2] > 2 for look in watcher.looks) > 20, (
            "with requests in the system, not only between them"
        )
        assert (received, inside) == (outcomes.total(), 0)
        assert {"completed", "rejected", "abandoned", "cancelled"} <= {
            name for name, count in outcomes.items() if count
        }

    run_virtual(main())


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ("an engine that is coming up", "engine_unavailable"),
        ("an engine that is lost", "engine_unavailable"),
        ("a gateway that drains", "shutting_down"),
    ],
)
def test_a_request_refused_before_the_queue_is_received_and_rejected_with_its_reason(
    row: str, reason: str
) -> None:
    async def main() -> None:
        found = next(each for each in ROWS if each.says == row)
        async with found.gateway() as (app, gateway):
            await found.ask(app, gateway)
            received, outcomes, inside = await scraped(app)
            assert (received, outcomes["rejected"], outcomes.total(), inside) == (1, 1, 1, 0)
            assert gateway.overload.rejections.by_reason() == {reason: 1}

    run_virtual(main())


def test_calls_that_are_no_requests_are_counted_by_their_code() -> None:
    async def main() -> None:
        async with faulty() as (app, gateway, _, _):
            for fields in (
                {"max_tokens": 0},
                {"max_tokens": -1},
                {"tools": [{"type": "function"}]},
                {"model": "other"},
                {},
            ):
                await call(app, "POST", "/v1/completions", completion(**fields))
            count = gateway.metrics.registry.get_sample_value
            codes = ("invalid_request", "unsupported", "model_not_found")
            assert [count("kendall_refused_calls_total", {"code": code}) for code in codes] == [
                2,
                1,
                1,
            ]
            assert (await scraped(app))[0] == 1

    run_virtual(main())
