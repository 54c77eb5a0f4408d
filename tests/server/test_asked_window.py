"""What a question to the predicting process holds besides the records of the window."""

from __future__ import annotations

import asyncio

import pytest

from kendall.server.live.assessment_request import LiveWindow
from tests.server.asgi import Call, completion, running
from tests.virtual_time import run_virtual


def test_those_taken_out_of_service_count_with_what_they_have() -> None:
    """Else long answers under an order that interrupts would not be known of."""

    async def main() -> None:
        async with running("single:order=mlfq,quantum=4,levels=8") as (app, gateway):
            window = LiveWindow(gateway)
            calls = [
                Call(
                    app,
                    "POST",
                    "/v1/completions",
                    completion(max_tokens=500, kendall_forced_output_tokens=400),
                )
                for _ in range(3)
            ]
            await asyncio.sleep(0.2)
            asked = window.question(gateway.live.pilot.bounds, saving=False)
            assert asked is not None
            sequences = list(gateway.batcher.unanswered_sequences())
            assert sum(sequence.batch is None for sequence in sequences) == 2
            assert sorted(tokens for _, tokens in asked.in_service) == sorted(
                sequence.stop_detector.output_tokens for sequence in sequences
            )
            assert min(tokens for _, tokens in asked.in_service) > 0
            for made in calls:
                made.leave()

    run_virtual(main())


@pytest.mark.parametrize(("reserved", "told"), [(77, 77), (None, None)])
def test_the_memory_and_what_is_kept_free_of_it_are_told(
    reserved: int | None, told: int | None
) -> None:
    async def main() -> None:
        async with running("continuous:max_batch_size=4", reserved_tokens=reserved) as (_, gateway):
            asked = LiveWindow(gateway).question(gateway.live.pilot.bounds, saving=False)
            assert asked is not None
            assert asked.engine.max_context_tokens == gateway.batcher.capabilities.kv_cache_tokens
            assert asked.engine.reserved_tokens == told

    run_virtual(main())
