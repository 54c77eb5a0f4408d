"""The last minute's rates and times to first token, on virtual time: what was refused, what
failed, what was answered.
"""

from __future__ import annotations

import asyncio

import pytest

from kendall.server.admission.settings import OverloadSettings
from kendall.server.page.minute import MINUTE_COLUMNS, NOTHING, LastMinute, quantile, totals
from kendall.server.telemetry.metrics import Metrics
from tests.server.asgi import Call, call, completion, running
from tests.virtual_time import run_virtual


def test_quantiles_are_interpolated_within_their_bucket() -> None:
    bounds, counts = (1.0, 2.0, 4.0, float("inf")), (10.0, 0.0, 10.0, 0.0)
    assert quantile(0.25, bounds, counts) == pytest.approx(0.5)
    assert quantile(0.5, bounds, counts) == pytest.approx(1.0)
    assert quantile(0.75, bounds, counts) == pytest.approx(3.0)
    assert quantile(1.0, bounds, counts) == pytest.approx(4.0)
    assert quantile(0.99, bounds, (1.0, 0.0, 0.0, 9.0)) is None, (
        "nobody knows how far beyond the last bound"
    )


def test_the_totals_of_a_counter_by_one_label() -> None:
    counter = Metrics().requests
    assert totals(counter, "outcome") == {}
    for policy, outcome, count in (("a", "x", 2), ("b", "x", 3), ("b", "y", 0.5)):
        counter.labels(policy=policy, outcome=outcome).inc(count)
    assert totals(counter, "outcome") == {"x": 5.0, "y": 0.5}
    assert totals(counter, "policy") == {"a": 2.0, "b": 3.5}


def test_requests_and_tokens_of_a_minute_and_no_longer() -> None:
    async def main() -> None:
        async with running() as (app, gateway):
            minute = LastMinute(gateway)
            assert minute.read() == NOTHING, "one reading gives no rate"
            for _ in range(30):
                await call(app, "POST", "/v1/completions", completion(max_tokens=10))
            await asyncio.sleep(30 - gateway.now() % 30)
            seconds = await _read_for(minute, 20)
            found = dict(zip(MINUTE_COLUMNS, minute.read(), strict=True))
            assert found["completed_rate"] == pytest.approx(30 / seconds, rel=0.01)
            assert found["token_rate"] == pytest.approx(300 / seconds, rel=0.01)
            assert 0 < (found["first_token_mean"] or 0) < 0.1
            assert (found["first_token_mean"] or 0) <= (found["first_token_p99"] or 0)
            await _read_for(minute, 62)
            found = dict(zip(MINUTE_COLUMNS, minute.read(), strict=True))
            assert (found["completed_rate"], found["first_token_mean"]) == (0.0, None), (
                "they are older than a minute"
            )

    async def _read_for(minute: LastMinute, seconds: int) -> float:
        start = asyncio.get_running_loop().time()
        for _ in range(seconds):
            await asyncio.sleep(1.0)
            minute.read()
        return asyncio.get_running_loop().time() - start + 30

    run_virtual(main())


def test_what_was_not_answered_is_counted_by_its_reason() -> None:
    async def main() -> None:
        async with running("single", overload=OverloadSettings(max_num_queued_reqs=3)) as (
            app,
            gateway,
        ):
            minute = LastMinute(gateway)
            minute.read()
            calls = [
                Call(app, "POST", "/v1/completions", completion(max_tokens=400)) for _ in range(8)
            ]
            await asyncio.sleep(0.1)
            calls[1].leave()
            await asyncio.sleep(0.1)
            gateway.batcher.fail_all("engine_unavailable", "the engine is gone")
            await asyncio.gather(*(each.task for each in calls), return_exceptions=True)
            await asyncio.sleep(9.8)
            found = dict(zip(MINUTE_COLUMNS, minute.read(), strict=True))
            counts = {
                name: round((rate or 0) * 10)
                for name, rate in found.items()
                if name.endswith("_rate") and rate
            }
            assert counts.pop("token_rate") > 0
            assert counts == {
                "refused_max_num_queued_reqs_rate": 5,
                "cancelled_rate": 1,
                "failed_engine_unavailable_rate": 2,
            }

    run_virtual(main())


def test_a_change_of_the_policy_leaves_the_minute_alone() -> None:
    async def main() -> None:
        async with running() as (app, gateway):
            minute = LastMinute(gateway)
            minute.read()
            for second in range(30):
                await call(app, "POST", "/v1/completions", completion(max_tokens=5))
                if second == 25:
                    gateway.limits.begin_epoch()
                await asyncio.sleep(1.0 - gateway.now() % 1.0)
                found = minute.read()
                if found is not NOTHING:
                    assert found[MINUTE_COLUMNS.index("completed_rate")] == pytest.approx(
                        1.0, rel=0.05
                    )

    run_virtual(main())
