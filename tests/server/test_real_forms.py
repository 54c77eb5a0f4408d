"""Heavy forms on the real engine: their client is refused, and nobody else notices."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import httpx
import openai
import pytest

from kendall.loadgen.gateway.gateway_process import GatewayProcess
from tests.eventually import eventually
from tests.server.processes import gateway
from tests.serving import started

pytestmark = [pytest.mark.engine, pytest.mark.slow]
PATH = "/v1/completions"
CHOICE = {"model": "tiny", "prompt": "x", "max_tokens": 20, "guided_choice": ["yes", "no"]}
PLAIN = {"model": "tiny", "prompt": "x", "max_tokens": 5, "ignore_eos": True}
WORDS = [
    f"word number {index} of a list" for index in range(20_000)
]  # compiling them takes a minute on a fast machine
HEAVY = {"model": "tiny", "prompt": "x", "max_tokens": 5, "guided_json": {"enum": WORDS}}


@pytest.fixture(scope="module")
def served(
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[tuple[GatewayProcess, asyncio.Runner]]:
    """A gateway in whose eyes an engine is stuck after six seconds."""
    forms = ("--max-form-compile-time", "2", "--max-form-bytes", "2000000")
    limits = ("--stuck-timeout", "6", "--policy", "continuous:max_batch_size=4")
    made = gateway(tmp_path_factory.mktemp("forms"), "tiny", *forms, *limits)
    with started(made) as runner:
        yield made, runner


async def metric(made: GatewayProcess, name: str) -> float:
    async with httpx.AsyncClient(base_url=made.url) as client:
        lines = (await client.get("/metrics")).text.splitlines()
    return sum(float(line.rpartition(" ")[2]) for line in lines if line.startswith(name))


def test_a_heavy_form_is_refused_once_and_harms_no_other_call(
    served: tuple[GatewayProcess, asyncio.Runner],
) -> None:
    """With the retries that the SDK makes by default: there are none. The engine is not
    restarted.
    """
    made, runner = served

    async def main() -> None:
        await made.ask("POST", PATH, CHOICE)  # the compiler is up
        before = await metric(made, "kendall_refused_calls_total")
        async with openai.AsyncOpenAI(
            base_url=made.url + "/v1", api_key="none", timeout=60
        ) as client:
            body: dict[str, Any] = {key: HEAVY[key] for key in ("model", "prompt", "max_tokens")}
            heavy = asyncio.create_task(
                client.completions.create(**body, extra_body={"guided_json": HEAVY["guided_json"]})
            )
            while not heavy.done():
                answer = await made.ask("POST", PATH, PLAIN)
                assert answer["usage"]["completion_tokens"] == 5
            with pytest.raises(openai.BadRequestError, match="max-form-compile-time"):
                await heavy
        assert await metric(made, "kendall_refused_calls_total") == before + 1
        for _ in range(3):
            assert (await made.ask("POST", PATH, CHOICE))["choices"][0]["text"] in ("yes", "no")
        state = await made.ask("GET", "/admin/state")
        assert (state["supervision"]["restarts"], state["unanswered"]) == (0, 0)

    runner.run(main())


def test_a_client_that_leaves_its_heavy_form_stops_the_compilation(
    served: tuple[GatewayProcess, asyncio.Runner],
) -> None:
    made, runner = served

    async def main() -> None:
        heavy = HEAVY | {
            "guided_json": {"enum": WORDS[1:]}
        }  # another one than is known to be too slow
        async with httpx.AsyncClient(
            base_url=made.url, timeout=httpx.Timeout(60, read=0.5)
        ) as client:
            with pytest.raises(httpx.ReadTimeout):
                await client.post(PATH, json=heavy)
        assert (await made.ask("POST", PATH, CHOICE))["choices"][0]["text"] in ("yes", "no")

        async def nobody_is_in_it() -> bool:
            return await metric(made, "kendall_requests_in_system") == 0

        await eventually(nobody_is_in_it)

    runner.run(main())
