"""Time limits of a call, to its end and to its first token: in the queue and in the engine,
under every policy. Virtual time.
"""

from __future__ import annotations

import asyncio
import math
from collections import Counter
from typing import Any

import pytest

from kendall import cli
from kendall.policies import Request
from kendall.server.http.answer import GeneratedAnswer
from kendall.server.http.api.schema import CompletionRequest
from kendall.server.http.formats import CompletionFormat
from kendall.server.http.submitted import AnswerOptions
from kendall.server.runtime.errors import ApiError
from kendall.server.settings import Settings
from kendall.server.supervision.deadlines import Timeouts, timeouts_of
from tests.server.asgi import Call, call, completion, running
from tests.server.harness import Collector, engine_request_of
from tests.server.mortal import faulty
from tests.virtual_time import run_virtual

POLICIES = [
    "single",
    "dynamic",
    "fixed:batch_size=2,max_wait=0.05",
    "capped:max_batch_size=4",
    "elastic:max_batch_size=4",
    "continuous:max_batch_size=1",
]


def ask(app: Any, **fields: Any) -> Call:
    return Call(app, "POST", "/v1/completions", completion(**fields))


def observed(gateway: Any) -> list[Any]:
    collector = Collector()
    gateway.batcher.observers.add(collector)
    return collector.records


@pytest.mark.thinned(2)
@pytest.mark.parametrize("policy", POLICIES)
def test_a_call_past_its_limit_fails_with_504_wherever_it_is(policy: str) -> None:
    """One in service and one that waits, each at its own instant; the next request is served as
    if they had never been.
    """

    async def main() -> None:
        async with running(policy) as (app, gateway):
            records = observed(gateway)
            serving = ask(app, max_tokens=500, request_timeout=0.2)
            waiting = ask(app, max_tokens=500, request_timeout=0.1)
            patient = (
                None
                if policy.startswith(("fixed", "dynamic", "capped", "elastic"))
                else ask(app, max_tokens=5)
            )
            await waiting.task
            assert gateway.now() == pytest.approx(0.1)
            await serving.task
            assert gateway.now() == pytest.approx(0.2)
            for made in (serving, waiting):
                error = made.json()["error"]
                assert (made.status, error["code"], error["type"]) == (
                    504,
                    "deadline_exceeded",
                    "server_error",
                )
            assert "within 0.2 s" in serving.json()["error"]["message"]
            if patient is not None:
                await patient.task
                assert patient.status == 200
            assert (await call(app, "POST", "/v1/completions", completion())).status == 200
            assert Counter(record.outcome for record in records)["failed"] == 2
            assert (
                gateway.batcher.unanswered,
                gateway.batcher.queue_length,
                gateway.batcher.in_service,
            ) == (0, 0, 0)
            assert (
                b'kendall_failures_total{reason="deadline_exceeded"} 2.0'
                in (await call(app, "GET", "/metrics")).body
            )

    run_virtual(main())


@pytest.mark.parametrize("policy", POLICIES)
def test_the_limit_to_the_first_token_holds_until_the_first_token(policy: str) -> None:
    async def main() -> None:
        async with running(policy, first_token_timeout=0.1) as (app, gateway):
            records = observed(gateway)
            serving = ask(app, max_tokens=300)
            await asyncio.sleep(0.06)
            late = ask(app, max_tokens=5)  # the engine is taken for 0.3 s
            await asyncio.gather(serving.task, late.task)
            assert serving.status == 200, "its first token came in time"
            assert (late.status, late.json()["error"]["code"]) == (504, "first_token_timeout")
            assert Counter(record.outcome for record in records) == {"completed": 1, "failed": 1}
            assert gateway.batcher.failures == {"first_token_timeout": 1}

    run_virtual(main())


def test_limits_count_from_the_calls_own_arrival_though_a_form_was_compiled_since() -> None:
    """The sequence arrives for the queue when its form is compiled, 9 s later; the limit of 10 s
    has 1 s left.
    """

    async def main() -> None:
        async with running("single") as (_, gateway):
            now = gateway.now()
            request = Request(id="late", arrived_at=now + 9.0, prompt_tokens=1, max_output_tokens=5)
            options = AnswerOptions(
                request_id="late",
                arrived_at=now,
                stream=False,
                include_usage=False,
                continuous_usage=False,
                n=1,
                timeouts=Timeouts(whole=10.0),
            )
            made = GeneratedAnswer(
                gateway.batcher,
                [engine_request_of(request, 5)],
                CompletionFormat("late", 0, "tiny", None),
                options,
            )
            made._submit()
            assert made._deadlines is not None
            assert [timer.when() for timer in made._deadlines._timers] == [now + 10.0]
            made._deadlines.close()

    run_virtual(main())


def test_a_stream_that_has_begun_ends_with_an_error_event() -> None:
    async def main() -> None:
        async with running("single") as (app, gateway):
            made = ask(app, max_tokens=500, stream=True, request_timeout=0.1)
            await made.task
            *tokens, error, done = made.events()
            assert (made.status, done, error["error"]["code"]) == (
                200,
                "[DONE]",
                "deadline_exceeded",
            )
            assert 50 < len(tokens) < 120
            assert gateway.batcher.in_service == 0

    run_virtual(main())


def test_all_choices_of_a_call_end_together_and_each_has_one_outcome() -> None:
    async def main() -> None:
        async with running("continuous:max_batch_size=2") as (app, gateway):
            records = observed(gateway)
            made = ask(app, max_tokens=500, n=5, request_timeout=0.1)
            await made.task
            assert made.status == 504
            await asyncio.sleep(0.01)
            assert len({record.request_id for record in records}) == len(records) == 5
            assert Counter(record.outcome for record in records) == {"failed": 5}

    run_virtual(main())


def test_a_call_that_is_whole_in_time_is_not_touched() -> None:
    async def main() -> None:
        async with running("single", request_timeout=5.0, first_token_timeout=5.0) as (
            app,
            gateway,
        ):
            made = await call(app, "POST", "/v1/completions", completion())
            await asyncio.sleep(20.0)
            assert (made.status, gateway.batcher.failures) == (200, {})

    run_virtual(main())


def test_the_limit_holds_through_a_restart_of_the_engine() -> None:
    """In service, in the queue, and before it: a text waits for the tokenizer of the next
    engine.
    """

    async def main() -> None:
        async with faulty("single", request_timeout=1.0) as (app, gateway, engine, records):
            serving, waiting = ask(app, max_tokens=500), ask(app)
            await asyncio.sleep(0.01)
            engine.kill()
            text = ask(app, prompt="a text that has to wait")
            await asyncio.gather(serving.task, waiting.task, text.task)
            assert gateway.now() == pytest.approx(1.01)
            assert [
                (made.status, made.json()["error"]["code"]) for made in (serving, waiting, text)
            ] == [(504, "deadline_exceeded")] * 3
            assert Counter(record.outcome for record in records) == {"failed": 2, "rejected": 1}
            assert gateway.supervisor.statistics()["parked"] == 0
            assert (
                b'kendall_rejections_total{reason="deadline_exceeded"} 1.0'
                in (await call(app, "GET", "/metrics")).body
            )
            await asyncio.sleep(5.0)
            assert (await call(app, "POST", "/v1/completions", completion())).status == 200

    run_virtual(main())


@pytest.mark.parametrize(
    ("header", "code"),
    [
        ("x-envoy-upstream-rq-timeout-ms", "deadline_exceeded"),
        ("x-envoy-expected-rq-timeout-ms", "deadline_exceeded"),
        ("x-kendall-first-token-timeout-ms", "first_token_timeout"),
    ],
)
@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_a_call_fails_with_504_at_the_limit_that_its_header_names(
    path: str, header: str, code: str
) -> None:
    """It waits behind another call; that one, which has the same body and no header, completes."""

    async def main() -> None:
        async with running("single") as (app, gateway):
            prompt = (
                {"prompt": [5, 6, 7]}
                if path == "/v1/completions"
                else {"messages": [{"role": "user", "content": "hello"}]}
            )
            body = {"model": "tiny", "max_tokens": 500, "ignore_eos": True} | prompt
            serving, waiting = (
                Call(app, "POST", path, body),
                Call(app, "POST", path, body, {header: "80"}),
            )
            await waiting.task
            assert gateway.now() == pytest.approx(0.08)
            assert (waiting.status, waiting.json()["error"]["code"]) == (504, code)
            await serving.task
            assert serving.status == 200

    run_virtual(main())


BODY = CompletionRequest(model="tiny", prompt="x", request_timeout=3.0)
SERVER = Settings(
    model="tiny", served_model_name="tiny", request_timeout=4.0, first_token_timeout=2.0
)
NONE = CompletionRequest(model="tiny", prompt="x"), Settings(model="tiny", served_model_name="tiny")


@pytest.mark.parametrize(
    ("headers", "whole", "first_token"),
    [
        ({}, 3.0, 2.0),
        ({"x-envoy-upstream-rq-timeout-ms": "1500"}, 1.5, 2.0),
        ({"x-envoy-expected-rq-timeout-ms": "1500"}, 1.5, 2.0),
        (
            {"x-envoy-upstream-rq-timeout-ms": "9000", "x-kendall-first-token-timeout-ms": "250"},
            3.0,
            0.25,
        ),
        ({"x-envoy-upstream-rq-timeout-ms": "0"}, 3.0, 2.0),
    ],
)
def test_the_shortest_of_header_body_and_server_holds(
    headers: dict[str, str], whole: float, first_token: float
) -> None:
    raw = [(name.encode(), value.encode()) for name, value in headers.items()]
    assert timeouts_of(raw, BODY, SERVER) == Timeouts(whole, first_token)


def test_without_a_limit_nothing_is_timed() -> None:
    assert timeouts_of([(b"host", b"x")], *NONE) is None
    assert timeouts_of([(b"x-envoy-upstream-rq-timeout-ms", b"0")], *NONE) is None
    assert timeouts_of([(b"x-envoy-upstream-rq-timeout-ms", b"20")], *NONE) == Timeouts(
        0.02, math.inf
    )


@pytest.mark.parametrize("value", ["soon", "-1", "nan", "inf", ""])
def test_a_header_that_is_no_time_is_refused_by_name(value: str) -> None:
    with pytest.raises(ApiError) as caught:
        timeouts_of([(b"x-kendall-first-token-timeout-ms", value.encode())], *NONE)
    assert (caught.value.status, caught.value.param) == (400, "x-kendall-first-token-timeout-ms")


@pytest.mark.parametrize("flag", ["--request-timeout", "--first-token-timeout"])
def test_the_flags_take_durations_but_not_zero(
    flag: str, capsys: pytest.CaptureFixture[str]
) -> None:
    for value, status in (("1500ms", 0), ("0", 2)):
        with pytest.raises(SystemExit) as ended:
            cli.main(["serve", "tiny", flag, value, "--show-config"])
        assert ended.value.code == status
    out, err = capsys.readouterr()
    assert f"{flag.removeprefix('--')} = 1.5" in out
    assert "of at least 0.001 s" in err
