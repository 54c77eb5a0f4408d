"""What one call may ask for: bounds on its sequences and on what a client sizes, checked before
anything is built of it.
"""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from kendall.server.admission.settings import MAX_QUEUED, MAX_SEQUENCES, OverloadSettings
from kendall.server.http.api import unserved
from kendall.server.http.api.checked_call import Arrival
from kendall.server.queue.batcher import Batcher
from kendall.server.runtime.wording import excerpt
from tests.server.admission.test_admission import counted, full, leave
from tests.server.asgi import Call, call, completion, running
from tests.virtual_time import run_virtual

PATH = "/v1/completions"
CHAT = {"model": "tiny", "messages": [{"role": "user", "content": "hello"}], "max_tokens": 4}
BOMB = completion(prompt=["a"] * 1024, n=128)


@pytest.mark.parametrize("draining", [False, True])
def test_a_small_body_that_asks_for_131072_sequences_is_refused_before_anything_is_built(
    draining: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No prompt is tokenised, no sequence made, none recorded: not even by a gateway that
    refuses every call.
    """
    monkeypatch.setattr(Arrival, "choices", lambda *_, **__: pytest.fail("sequences were built"))

    async def main() -> None:
        async with running() as (app, gateway):
            monkeypatch.setattr(
                gateway.engine, "encode", lambda _: pytest.fail("a prompt was tokenised")
            )
            if draining:
                await gateway.drain()
            refused = await call(app, "POST", PATH, BOMB)
            error = refused.json()["error"]
            assert (refused.status, error["code"], error["param"]) == (
                400,
                "too_many_sequences",
                "prompt",
            )
            assert "131072 sequences" in error["message"]
            assert f"at most {MAX_SEQUENCES} (--max-sequences-per-call" in error["message"]
            assert (
                counted(gateway, "kendall_requests_total")
                == counted(gateway, "kendall_rejections_total")
                == 0
            )

    run_virtual(main())


def test_the_operator_sets_how_many_sequences_a_call_may_have() -> None:
    async def main() -> None:
        async with running(overload=OverloadSettings(max_sequences_per_call=6)) as (app, _):
            assert (
                await call(app, "POST", PATH, completion(prompt=["a", "b", "c"], n=2))
            ).status == 200
            refused = await call(app, "POST", PATH, completion(prompt=["a"], n=7))
            assert (refused.status, refused.json()["error"]["param"]) == (400, "n")
            assert (await call(app, "POST", "/v1/chat/completions", CHAT | {"n": 7})).status == 400

    run_virtual(main())


def test_a_call_that_never_fits_is_400_and_not_told_to_come_back() -> None:
    async def main() -> None:
        async with running("single", overload=OverloadSettings(max_num_queued_reqs=4)) as (
            app,
            gateway,
        ):
            refused = await call(app, "POST", PATH, completion(n=5))
            assert (refused.status, refused.json()["error"]["code"]) == (400, "too_many_sequences")
            assert "at most 4 (--max-num-queued-reqs" in refused.json()["error"]["message"]
            assert "retry-after" not in refused.headers
            assert (await call(app, "POST", PATH, completion(n=4, max_tokens=1))).status == 200
            assert counted(gateway, "kendall_rejections_total") == 0

    run_virtual(main())


def test_an_idle_gateway_admits_a_call_beyond_the_adaptive_limit() -> None:
    """The limit is at least 2 here; a call of 5 would be refused for ever, with nothing in the
    system.
    """

    async def main() -> None:
        async with running("single", overload=OverloadSettings(adaptive_concurrency=True)) as (
            app,
            _,
        ):
            made = Call(app, "POST", PATH, completion(n=5, max_tokens=20))
            await asyncio.sleep(0.001)
            assert (await call(app, "POST", PATH, completion())).status == 429, (
                "now the limit holds"
            )
            await made.task
            assert made.status == 200

    run_virtual(main())


@pytest.mark.parametrize(
    ("settings", "unanswered", "status"),
    [
        (OverloadSettings(), MAX_QUEUED - 1, 200),
        (OverloadSettings(), MAX_QUEUED, 429),
        (OverloadSettings(max_num_queued_reqs=None), 10 * MAX_QUEUED, 200),
    ],
)
def test_the_queue_is_bounded_by_default_and_may_be_unbounded(
    settings: OverloadSettings, unanswered: int, status: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def main() -> None:
        async with running(overload=settings) as (app, _):
            monkeypatch.setattr(Batcher, "unanswered", property(lambda _: unanswered))
            answer = await call(app, "POST", PATH, completion())
            assert answer.status == status
            assert status == 200 or answer.json()["error"]["code"] == "queue_full"
            monkeypatch.undo()

    run_virtual(main())


LARGE: list[tuple[str, dict[str, Any], str]] = [
    ("completions", {"bad_words": ["x"] * 129}, "bad_words"),
    ("completions", {"bad_words": ["x" * 2048, "y" * 2049]}, "bad_words"),
    ("completions", {"bad_words": ["x" * 4096], "n": 17}, "bad_words"),
    ("completions", {"stop": "x" * 1025}, "stop"),
    ("completions", {"stop": ["x" * 512, "y" * 513]}, "stop"),
    ("completions", {"stop": ["x"] * 17}, "stop"),
    ("completions", {"stop_token_ids": [1] * 1025}, "stop_token_ids"),
    ("completions", {"logit_bias": {str(token): 1 for token in range(4097)}}, "logit_bias"),
    ("chat/completions", {"messages": CHAT["messages"] * 4097}, "messages"),
    (
        "chat/completions",
        {"messages": [{"role": "user", "content": [{"type": "text", "text": "x"}] * 1025}]},
        "messages[0].content",
    ),
    (
        "chat/completions",
        {"messages": [{"role": "user", "content": [{"type": "text", "text": "x"}] * 1000}] * 9},
        "messages",
    ),
]


@pytest.mark.thinned(3)
@pytest.mark.parametrize(("endpoint", "fields", "param"), LARGE)
def test_what_a_client_sizes_is_bounded_before_the_engine_hears_of_it(
    endpoint: str, fields: dict[str, Any], param: str
) -> None:
    async def main() -> None:
        async with running() as (app, gateway):
            for name in ("encode", "encode_chat", "check_sampling"):
                setattr(gateway.engine, name, lambda *_: pytest.fail("the engine was asked"))
            refused = await call(
                app,
                "POST",
                f"/v1/{endpoint}",
                (CHAT if "chat" in endpoint else completion()) | fields,
            )
            error = refused.json()["error"]
            assert (refused.status, error["code"]) == (400, "invalid_request"), error
            assert error["param"].startswith(param)
            assert len(refused.body) < 600

    run_virtual(main())


def test_what_is_within_the_bounds_is_served() -> None:
    async def main() -> None:
        async with running() as (app, _):
            fields: dict[str, Any] = {"stop": ["x" * 64] * 16, "stop_token_ids": [9] * 1024}
            fields["logit_bias"] = {str(token): 1 for token in range(4096)}
            assert (await call(app, "POST", PATH, completion(**fields))).status == 200
            parts = [{"role": "user", "content": [{"type": "text", "text": "x"}] * 900}] * 2
            assert (
                await call(app, "POST", "/v1/chat/completions", CHAT | {"messages": parts})
            ).status == 200
            long = await call(
                app, "POST", "/v1/chat/completions", CHAT | {"messages": CHAT["messages"] * 4096}
            )
            assert long.json()["error"]["code"] == "context_length_exceeded", (
                "the model's own bound"
            )
            words = await call(app, "POST", PATH, completion(bad_words=["x" * 32] * 128))
            assert words.status == 501, "the emulated engine has no such thing"

    run_virtual(main())


def test_the_sequences_of_a_call_share_what_a_client_sized() -> None:
    async def main() -> None:
        async with running("single") as (app, gateway):
            fields = {"stop_token_ids": list(range(9, 500)), "prompt": [[5], [6, 7]], "n": 2}
            first, *others = await full(app, 1, **fields) + await full(app, 1, seed=7, **fields)
            sampled = [
                sequence.engine_request.sampling
                for sequence in gateway.batcher.unanswered_sequences()
            ]
            assert len({id(sampling) for sampling in sampled[:4]}) == 1
            assert [sampling.seed for sampling in sampled[4:]] == [7, 8, 7, 8]
            assert len({id(sampling.stop_token_ids) for sampling in sampled[4:]}) == 1
            await leave([first, *others])

    run_virtual(main())


def test_an_error_looks_at_the_beginning_of_what_was_sent_only(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Unseen:
        def __repr__(self) -> str:
            pytest.fail("a value far behind the beginning was written")

    assert len(excerpt([1] * 10 + [Unseen()])) <= 80
    assert len(excerpt({str(key): 1 for key in range(10)} | {"last": Unseen()})) <= 80
    assert excerpt("it's") == repr("it's")
    asked: list[str] = []
    monkeypatch.setattr(
        unserved.difflib, "get_close_matches", lambda name, *_: asked.append(name) or []
    )

    async def main() -> None:
        async with running() as (app, _):
            refused = await call(app, "POST", PATH, completion(**{"x" * 500_000: 1}))
            assert (refused.status, refused.json()["error"]["code"]) == (400, "unknown_field")
            assert [len(name) for name in asked] == [80]
            many = {f"f{number}": 1 for number in range(5000)}
            for fields in (many, {"stream": True, "stream_options": many}):
                refused = await call(app, "POST", PATH, completion(**fields))
                assert refused.status == 400
                assert len(refused.body) < 400

    run_virtual(main())
