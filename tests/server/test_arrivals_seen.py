"""What `/admin/state` says of the arrivals of the epoch."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
import pytest

from kendall.server.live.arrivals_seen import KEPT, ArrivalsSeen
from tests.server.asgi import Call, call, completion, running
from tests.virtual_time import run_virtual


async def _state(app: Any) -> dict[str, Any]:
    return dict((await call(app, "GET", "/admin/state")).json()["arrivals"])


def test_one_call_is_one_arrival_and_retries_are_counted() -> None:
    async def main() -> dict[str, Any]:
        async with running() as (app, _):
            await call(app, "POST", "/v1/completions", completion(n=3))
            for count in ("0", "1", "2"):
                await call(
                    app,
                    "POST",
                    "/v1/completions",
                    completion(),
                    headers={"x-stainless-retry-count": count},
                )
            await call(app, "POST", "/v1/completions", completion(model="another"))
            return await _state(app)

    seen = run_virtual(main())
    assert (seen["count"], seen["retries"], seen["n"]) == (4, 2, 4)
    assert seen["verdict"] == "too few to say: 4 arrivals; expected at least 50"
    assert seen["dispersion"] is None


def test_an_epoch_begins_without_the_arrivals_of_the_one_before() -> None:
    async def main() -> tuple[dict[str, Any], dict[str, Any]]:
        async with running() as (app, _):
            await call(app, "POST", "/v1/completions", completion())
            await call(app, "PUT", "/admin/policy", {"policy": "single"})
            before = await _state(app)
            await call(app, "POST", "/v1/completions", completion())
            return before, await _state(app)

    before, after = run_virtual(main())
    assert (before["count"], before["n"]) == (0, 0)
    assert (after["count"], after["n"]) == (1, 1)


@pytest.mark.slow
def test_the_verdict_is_about_what_arrives() -> None:
    """Poisson and constant arrivals on virtual time, 1 per second as one asks."""

    async def verdict(gaps: list[float]) -> str:
        async with running() as (app, _):
            calls: list[Call] = []
            for gap in gaps:
                await asyncio.sleep(gap)
                calls.append(Call(app, "POST", "/v1/completions", completion(max_tokens=1)))
            await calls[-1].task
            return str((await _state(app))["verdict"])

    poisson = np.random.default_rng(1).exponential(1.0, 2000).tolist()
    assert run_virtual(verdict(poisson)) == "poisson"
    assert run_virtual(verdict([1.0] * 200)).startswith("not poisson: gaps are nearly constant")


@pytest.mark.parametrize(
    "count", [KEPT - 1, KEPT, KEPT + 100, 2 * KEPT - 1, 2 * KEPT, 3 * KEPT + 7]
)
def test_the_last_instants_are_kept_and_the_audit_is_done_once(count: int) -> None:
    seen = ArrivalsSeen()
    for instant in range(count):
        seen.saw(float(instant), 0, retry=False)

    first, second = seen.state(0), seen.state(0)
    kept = min(count, KEPT)
    assert (first.count, first.audit.n, first.audit.span) == (count, kept, kept - 1)
    assert first.audit is second.audit
