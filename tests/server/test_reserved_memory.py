"""Memory that is kept free for a request: its whole limit where the engine can afford that, else a
share, so that requests without a limit do not shut the others out.
"""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from kendall.policies.core import UNBOUNDED, Request
from kendall.queueing.latency.law import parse_law
from tests.server.asgi import LAW, Call, completion
from tests.server.mortal import MortalEngine, faulty
from tests.virtual_time import run_virtual

LONG = {"max_model_len": 131072, "max_num_seqs": 16, "kv_cache_tokens": 160_000}  # tokens


@pytest.mark.parametrize(
    ("bounds", "reserved"),
    [
        (LONG, 5_000),
        (LONG | {"kv_cache_tokens": 16 * 131072}, UNBOUNDED),
        (LONG | {"kv_cache_tokens": 16 * 131072 - 1}, 65535),
        (LONG | {"kv_cache_tokens": 8}, 1),
    ],
)
def test_a_share_is_reserved_where_the_memory_does_not_hold_every_context(
    bounds: dict[str, int], reserved: int
) -> None:
    async def main() -> None:
        async with faulty(engine=MortalEngine(parse_law(LAW), **bounds)) as (_, gateway, *_rest):
            assert gateway.limits.reserved_tokens == reserved

    run_virtual(main())


@pytest.mark.parametrize(
    ("limit", "reserved", "sequences", "holds"),
    [(50, UNBOUNDED, 1, 60), (50, 20, 1, 30), (50, 80, 1, 60), (50, 20, 3, 70)],
)
def test_a_request_holds_its_prompt_and_the_smaller_of_limit_and_reservation(
    limit: int, reserved: int, sequences: int, holds: int
) -> None:
    request = Request(
        id="r",
        arrived_at=0.0,
        prompt_tokens=10,
        max_output_tokens=limit,
        sequences=sequences,
        reserved_tokens=reserved,
    )
    assert request.context_tokens == holds


def in_service(count: int, **settings: Any) -> int:
    """Of so many calls with large limits, right after they came."""

    async def main() -> int:
        engine = MortalEngine(parse_law(LAW), **LONG)
        async with faulty("continuous", engine, **settings) as (app, gateway, *_):
            body = completion(max_tokens=100_000, kendall_forced_output_tokens=20)
            calls = [Call(app, "POST", "/v1/completions", body) for _ in range(count)]
            await asyncio.sleep(0.005)  # none is answered yet
            found = gateway.batcher.in_service
            await asyncio.gather(*(each.task for each in calls))
            assert {each.status for each in calls} == {200}
            return found

    found: int = run_virtual(main())
    return found


def test_calls_with_large_limits_start_together() -> None:
    """Each had reserved the whole context: two of them left no room for a third."""
    assert in_service(12) == 12
    assert in_service(20) == 16


def test_the_operator_says_what_is_reserved() -> None:
    assert in_service(12, reserved_tokens=40_000) == 3
    assert in_service(12, reserved_tokens=200_000) == 1
