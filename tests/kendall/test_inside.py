"""The order of service inside an unmodified vLLM, started by its own command."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import numpy as np
import pytest

from bench.gateway_cost.servers import Server, small_vllm
from kendall.policies.text import SpecError

pytestmark = [
    pytest.mark.engine,
    pytest.mark.timeout(900),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),  # of torch, when it is imported
]
SLOTS = 4
REQUESTS = 600
# float32: vLLM's kernels of bfloat16 end in an illegal instruction on some processors with AMX
INSIDE = ["--scheduler-cls", "kendall.inside.Scheduler", "--dtype", "float32"]


@contextmanager
def served(folder: Path, policy: str) -> Iterator[Server]:
    folder.mkdir()
    settings = {"KENDALL_POLICY": policy}
    with small_vllm(folder, SLOTS, arguments=INSIDE, environment=settings) as server:
        yield server


def answers(url: str) -> dict[int, list[int]]:
    """Tokens by request, all sent within a second; each as long as it was predicted to be."""
    rng = np.random.default_rng(1)
    lengths = np.clip(rng.lognormal(3.5, 0.9, REQUESTS).astype(int), 1, 300).tolist()
    prompts = [rng.integers(5, 200, 3 + number % 17).tolist() for number in range(REQUESTS)]

    async def all_of_them() -> dict[int, list[int]]:
        async with httpx.AsyncClient(base_url=url, timeout=600, trust_env=False) as client:

            async def one(number: int) -> list[int]:
                await asyncio.sleep(number / REQUESTS)
                predicted = {"predicted_output_tokens": lengths[number]}
                body = {"model": "tiny", "prompt": prompts[number], "max_tokens": lengths[number]}
                body |= {"temperature": 0, "ignore_eos": True, "return_token_ids": True}
                answer = await client.post("/v1/completions", json=body | {"vllm_xargs": predicted})
                assert answer.status_code == 200, answer.text
                return list(answer.json()["choices"][0]["token_ids"])

            found = await asyncio.gather(*map(one, range(REQUESTS)))
        return dict(enumerate(found))

    found = asyncio.run(all_of_them())
    assert [len(found[number]) for number in range(REQUESTS)] == lengths
    return found


def preemptions(url: str) -> int:
    metrics = httpx.get(f"{url}/metrics", trust_env=False).text.splitlines()
    (line,) = (line for line in metrics if line.startswith("vllm:num_preemptions_total"))
    return int(float(line.split()[-1]))


@pytest.mark.slow
def test_a_thousand_preempted_requests_have_the_answers_of_those_that_never_were(
    tmp_path: Path,
) -> None:
    with served(tmp_path / "fcfs", "continuous") as server:
        expected = answers(server.url)
        assert preemptions(server.url) == 0
    counts = {}
    # each at most once: as many preemptions as requests that were preempted
    once = [f"{order},max_preemptions=1" for order in ("fb,quantum=8", "mlfq,quantum=4")]
    for order in ("sprpt", "srpt-b", *once):
        with served(tmp_path / order, f"continuous:order={order}") as server:
            assert answers(server.url) == expected, order
            counts[order] = preemptions(server.url)
    assert min(counts.values()) > 0
    assert sum(counts[order] for order in once) >= 1000, counts


@pytest.mark.slow
def test_the_shortest_of_those_that_wait_goes_first(tmp_path: Path) -> None:
    """One slot, taken; those behind it are served by their predicted lengths."""
    with served(tmp_path / "spjf", "continuous:order=spjf,max_batch_size=1") as server:

        async def ends() -> list[int]:
            done: list[int] = []
            async with httpx.AsyncClient(
                base_url=server.url, timeout=600, trust_env=False
            ) as client:

                async def one(length: int) -> None:
                    body = {"model": "tiny", "prompt": "hello", "max_tokens": length}
                    body |= {"ignore_eos": True}
                    predicted = {"predicted_output_tokens": length}
                    await client.post("/v1/completions", json=body | {"vllm_xargs": predicted})
                    done.append(length)

                first = asyncio.create_task(one(1500))
                await asyncio.sleep(0.3)
                await asyncio.gather(first, *map(one, (90, 30, 120, 60)))
            return done

        assert asyncio.run(ends()) == [1500, 30, 60, 90, 120]


@pytest.mark.thinned(7)
@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("dynamic", "got KENDALL_POLICY=dynamic; expected continuous[:order=...], as vLLM batches"),
        ("continuous:order=hrrn", "order hrrn is no fixed rank of a request; expected an order by"),
        ("continuous:order=edf", "order edf is no fixed rank"),
        ("continuous:order=vtc", "order vtc is no fixed rank"),
        (
            "continuous:order=gittins",
            "that only the gateway keeps (kendall serve); expected an order",
        ),
        ("continuous:order=gittins-predicted", "that only the gateway keeps (kendall serve)"),
        ("continuous:order=sjf", "got order='sjf' for policy continuous"),
    ],
)
def test_an_order_that_the_queue_cannot_have_ends_the_start(text: str, message: str) -> None:
    from kendall.inside import policy_of

    with pytest.raises(SpecError, match=re.escape(message)):
        policy_of(text)


@pytest.mark.parametrize("told", [-1, 0, float("nan"), float("inf"), "12", None, [3]])
def test_a_prediction_that_is_no_length_is_none(told: object) -> None:
    from vllm.sampling_params import SamplingParams
    from vllm.v1.request import Request

    from kendall.inside import _asked

    params = SamplingParams(max_tokens=7, extra_args={"predicted_output_tokens": told})
    asked = _asked(Request("a", [1, 2, 3], params, None))
    assert asked.predicted_output_tokens is None
    assert (asked.prompt_tokens, asked.max_output_tokens) == (3, 7)
