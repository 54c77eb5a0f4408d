"""The size of an answer is bounded before its call is queued, it is encoded piece by piece, and the
bodies of all calls together have a budget.
"""

from __future__ import annotations

import asyncio
import dataclasses
import json
from contextlib import suppress
from typing import Any

import pytest

from kendall.policies import Request
from kendall.server.engines.base import EngineRequest, Token, TokenLogprob
from kendall.server.http.api.checked_call import MOST_ANSWER_VALUES, check_answer_size
from kendall.server.http.bodies import FREE_BYTES, BodyBudget
from kendall.server.http.formats import ChatFormat, CompletionFormat, encode
from kendall.server.runtime.errors import ApiError
from tests.server.asgi import FOR_THE_RUN, Call, call, completion, running
from tests.server.harness import engine_request_of
from tests.virtual_time import run_virtual

MIB = 1 << 20
CHAT = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}]}


@pytest.mark.thinned(2)
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", completion(n=128, max_tokens=2000, logprobs=20)),
        ("/v1/completions", completion(prompt=["x"] * 128, max_tokens=2000, logprobs=20)),
        (
            "/v1/chat/completions",
            CHAT | {"n": 128, "max_tokens": 2000, "logprobs": True, "top_logprobs": 20},
        ),
        ("/v1/chat/completions", CHAT | {"n": 128, "logprobs": True, "top_logprobs": 20}),
    ],
)
def test_an_answer_that_may_be_huge_is_refused_before_it_is_queued(
    path: str, body: dict[str, Any], stream: bool
) -> None:
    """235 bytes asked for 155 MiB."""

    async def main() -> None:
        async with running() as (app, gateway):
            refused = await call(app, "POST", path, body | {"stream": stream})
            error = refused.json()["error"]
            assert (refused.status, error["code"]) == (400, "answer_too_large")
            assert f"expected at most {MOST_ANSWER_VALUES} in one answer" in error["message"]
            assert gateway.batcher.unanswered == 0

    run_virtual(main())


def test_one_sequence_of_the_whole_context_with_every_log_probability_is_served() -> None:
    async def main() -> None:
        async with running() as (app, gateway):
            gateway.batcher.recovery.resume(
                dataclasses.replace(gateway.batcher.capabilities, max_model_len=MIB)
            )
            long = completion(max_tokens=131_000, logprobs=20, kendall_forced_output_tokens=2)
            asked = await call(app, "POST", "/v1/completions", long)
            assert asked.status == 200, asked.body

    run_virtual(main())


@pytest.mark.parametrize(("more", "status"), [(0, 200), (1, 400)])
def test_as_many_values_as_an_answer_may_have_are_served_and_no_more(
    more: int, status: int
) -> None:
    async def main() -> None:
        async with running() as (app, gateway):
            gateway.batcher.recovery.resume(
                dataclasses.replace(gateway.batcher.capabilities, max_model_len=10_000)
            )
            limit = MOST_ANSWER_VALUES // 128 + more
            asked = completion(n=128, max_tokens=limit, kendall_forced_output_tokens=2)
            assert (await call(app, "POST", "/v1/completions", asked)).status == status

    run_virtual(main())


@pytest.mark.parametrize(
    ("asked", "context", "says"),
    [
        ([(2**20, None, 1, None)], 100, "1 sequence of {0} tokens with 0 log probabilities each"),
        (  # and three values for each token of the prompt
            [(100_000, 4, 8096, 3)] * 2,
            100,
            "2 sequences of {0} tokens with 4 log probabilities each",
        ),
        ([(131_072, 20, 1, 0)], 131_072, "1 sequence of {0} tokens with 20 log probabilities each"),
    ],
)
def test_the_values_of_an_answer_are_its_tokens_and_their_log_probabilities(
    asked: list[tuple[int, int | None, int, int | None]], context: int, says: str
) -> None:
    """The bound: 2^20, or 21 for each token of the context, which is served whole in any case."""

    def made(more: int) -> list[EngineRequest]:
        return [
            engine_request_of(
                Request(id="r", arrived_at=0.0, prompt_tokens=prompt, max_output_tokens=limit),
                None,
                max_tokens=limit + (0 if place else more),
                logprobs=top,
                prompt_logprobs=of_prompt,
            )
            for place, (limit, top, prompt, of_prompt) in enumerate(asked)
        ]

    check_answer_size(made(0), context)
    most = max(1_048_576, 21 * context)
    with pytest.raises(ApiError) as refused:
        check_answer_size(made(1), context)
    values = most + 1 + (asked[0][1] or 0)
    assert refused.value.message == (
        f"got {says.format(asked[0][0] + 1)}, {values} values; expected at most {most} in one "
        "answer: lower n, max_tokens or logprobs"
    )


def tokens(count: int) -> list[Token]:
    texts = ["a", "é", ' "\\', "\n"]
    return [
        Token(
            place % 4,
            texts[place % 4],
            logprobs={
                number: TokenLogprob(texts[number], -0.5 * number - 1, number)
                for number in range(4)
            },
        )
        for place in range(count)
    ]


@pytest.mark.parametrize("count", [0, 1, 255, 256, 257, 1000])
@pytest.mark.parametrize("kind", [ChatFormat, CompletionFormat])
def test_log_probabilities_in_pieces_are_those_of_the_whole(
    kind: type[ChatFormat | CompletionFormat], count: int
) -> None:
    from kendall.server.http.answer import encoded_logprobs

    form = kind("id", 1, "tiny", 3)

    async def main() -> None:
        made = await encoded_logprobs(form, tokens(count))
        expected = form.logprobs(tokens(count), 0)
        assert (None if made is None else json.loads(encode(made))) == expected

    asyncio.run(main())


@pytest.mark.parametrize(
    ("count", "turns"), [(0, 0), (255, 0), (256, 1), (511, 1), (512, 2), (1025, 4)]
)
def test_the_event_loop_has_its_turn_while_log_probabilities_are_encoded(
    count: int, turns: int
) -> None:
    from kendall.server.http.answer import encoded_logprobs

    work, given = encoded_logprobs(CompletionFormat("id", 1, "tiny", 3), tokens(count)), 0
    with suppress(StopIteration):
        while True:
            work.send(None)
            given += 1
    assert given == turns


def test_bodies_of_all_calls_together_have_a_budget() -> None:
    """Bodies that never end hold it; small calls are served, a large one gets 503 and is read no
    further, and the budget is whole again when they are gone.
    """
    security = dataclasses.replace(FOR_THE_RUN, max_body_bytes=16 * MIB)

    async def main() -> None:
        async with running(security=security) as (app, _):
            budget: BodyBudget = app.bodies  # type: ignore[attr-defined]
            endless = []
            for _ in range(9):
                headers = {"transfer-encoding": "chunked"}
                one = Call(app, "POST", "/v1/completions", b" " * 15 * MIB, headers, more=True)
                endless.append(one)
                await asyncio.sleep(0)
                await asyncio.sleep(0)
            assert budget.held <= 128 * MIB
            refused = endless[-1]
            await refused.task
            assert (refused.status, refused.json()["error"]["code"]) == (503, "too_many_bodies")
            assert "retry-after" in refused.headers
            assert refused.headers["connection"] == "close"
            small = await call(app, "POST", "/v1/completions", completion())
            assert small.status == 200
            assert budget.held > 110 * MIB
            tokenized = await call(app, "POST", "/tokenize", {"prompt": "x" * 15 * MIB})
            assert (tokenized.status, tokenized.json()["error"]["code"]) == (
                503,
                "too_many_bodies",
            )
            for one in endless[:-1]:
                one.leave()
                await one.task
            assert budget.held == 0
            large = await call(app, "POST", "/tokenize", {"prompt": "x" * 3 * MIB})
            assert large.status == 200
            assert budget.held == 0

    asyncio.run(main())


def test_what_a_call_holds_beyond_its_first_bytes_is_given_back_once() -> None:
    async def main() -> None:
        budget = BodyBudget(0)

        async def receive() -> dict[str, Any]:
            return {"type": "http.request", "body": b"x" * FREE_BYTES, "more_body": True}

        lease = budget.lease(receive)
        assert not lease.whole, "nothing of it has been read"
        for read in (0, 1, 2):
            await lease.receive()
            assert budget.held == read * FREE_BYTES
        assert not lease.whole
        lease.end()
        lease.end()
        assert budget.held == 0
        await lease.receive()
        assert budget.held == 0, "what is read behind the end is thrown away"

        async def end() -> dict[str, Any]:
            return {"type": "http.request", "body": b"x" * (FREE_BYTES + 1)}

        last = budget.lease(end)
        await last.receive()
        assert (last.whole, budget.held) == (True, 1)
        last.end()
        with pytest.raises(ApiError, match="fill this gateway's memory"):
            budget.take((128 << 20) + 1)
        budget.take(128 << 20)
        assert (budget.held, FREE_BYTES) == (128 << 20, 262_144)
        larger = BodyBudget((128 << 20) + 5)
        larger.take((128 << 20) + 5)
        assert larger.held == (128 << 20) + 5

    asyncio.run(main())
