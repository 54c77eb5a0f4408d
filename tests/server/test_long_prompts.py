"""Prompts longer than what an engine computes in one step."""

from __future__ import annotations

import dataclasses

import pytest

from kendall.queueing.latency.law import parse_law
from kendall.server.engines.base import Capabilities
from tests.server.asgi import LAW, call, completion
from tests.server.mortal import MortalEngine, faulty
from tests.virtual_time import run_virtual

STEP = 64  # tokens


class Stepping(MortalEngine):
    """Computes `STEP` tokens of prompts in a step."""

    def __init__(self, *, chunked: bool) -> None:
        super().__init__(parse_law(LAW), max_num_batched_tokens=STEP, max_model_len=1000)
        self.chunked = chunked

    async def start(self) -> Capabilities:
        return dataclasses.replace(await super().start(), chunked_prefill=self.chunked)


@pytest.mark.parametrize(("chunked", "longest"), [(False, STEP), (True, 999)])
def test_a_prompt_of_several_steps_is_served_where_the_engine_computes_it_in_parts(
    chunked: bool, longest: int
) -> None:
    async def main() -> None:
        async with faulty(engine=Stepping(chunked=chunked)) as (app, *_):
            body = completion(prompt=[5] * longest, max_tokens=1)
            assert (await call(app, "POST", "/v1/completions", body)).status == 200
            body = completion(prompt=[5] * (longest + 1), max_tokens=1)
            refused = await call(app, "POST", "/v1/completions", body)
            assert refused.status == 400
            error = refused.json()["error"]
            assert error["code"] == "context_length_exceeded"
            assert f"expected at most {longest}:" in error["message"]

    run_virtual(main())
