"""The HTTP edge on virtual time: shapes, statuses, one outcome each, clients that leave."""

from __future__ import annotations

import asyncio
import re
from pathlib import Path
from typing import Any

import pytest

from kendall.queueing.measurement.record import read_run
from kendall.server.runtime.ids import CallIds
from kendall.server.supervision.settings import SupervisionSettings
from tests.server.asgi import Call, call, completion, running
from tests.virtual_time import run_virtual


def counted(gateway: Any, outcome: str) -> float:
    return sum(
        sample.value
        for metric in gateway.metrics.requests.collect()
        for sample in metric.samples
        if sample.name.endswith("_total") and sample.labels["outcome"] == outcome
    )


def test_a_completion_has_openais_shape_and_our_headers() -> None:
    async def main() -> None:
        async with running() as (app, _):
            answer = await call(
                app, "POST", "/v1/completions", completion(), {"x-request-id": "mine-1"}
            )
            body = answer.json()
            assert answer.status == 200
            assert body["object"] == "text_completion"
            assert body["choices"][0]["finish_reason"] == "length"
            assert body["usage"]["prompt_tokens"] == 3
            assert body["usage"]["completion_tokens"] == 8
            assert answer.headers["x-request-id"] == "mine-1"
            assert float(answer.headers["x-kendall-queueing-delay-ms"]) == 0.0
            assert answer.headers["server-timing"].startswith("queue;dur=0.0, service;dur=")

    run_virtual(main())


def test_the_headers_tell_what_each_call_waited_and_how_long_it_was_served() -> None:
    """Three at once, taken one by one, each of 2.25 ms and eight steps of 0.925 ms."""

    async def main() -> None:
        async with running("single") as (app, _):
            calls = [Call(app, "POST", "/v1/completions", completion()) for _ in range(3)]
            for made in calls:
                await made.task
            service = 2.25 + 8 * 0.925
            for place, made in enumerate(calls):
                queue, served = (
                    float(part.partition("dur=")[2])
                    for part in made.headers["server-timing"].split(", ")
                )
                assert (queue, served) == pytest.approx((place * service, service), abs=0.01)
                assert float(made.headers["x-kendall-queueing-delay-ms"]) == queue
            streamed = await call(
                app,
                "POST",
                "/v1/completions",
                completion(stream=True, stream_options={"include_usage": True}),
            )
            told = streamed.events()[-2]["usage"]["kendall"]
            assert told == pytest.approx(
                {"queueing_delay_ms": 0.0, "service_ms": service, "batch_size": 1}, abs=0.01
            )

    run_virtual(main())


@pytest.mark.parametrize("stream", [False, True])
def test_what_a_preempted_call_is_told_is_what_its_record_has(
    tmp_path: Path, *, stream: bool
) -> None:
    """All its waits, and all its time in service."""
    path = tmp_path / "run.jsonl"

    async def main() -> dict[str, Any]:
        async with running("single:order=sprpt", record_file=path) as (app, _):
            wanted = {"stream": True, "stream_options": {"include_usage": True}} if stream else {}
            long = Call(
                app,
                "POST",
                "/v1/completions",
                completion(max_tokens=60, predicted_output_tokens=60, **wanted),
                {"x-request-id": "long"},
            )
            for _ in range(2):
                await asyncio.sleep(0.02)
                fields = completion(max_tokens=3, predicted_output_tokens=3)
                await call(app, "POST", "/v1/completions", fields)
            await long.task
            usage: dict[str, Any] = (long.events()[-2] if stream else long.json())["usage"]
            if not stream:
                queue, service = re.findall(r"dur=([\d.]+)", long.headers["server-timing"])
                assert float(queue) == usage["kendall"]["queueing_delay_ms"]
                assert float(service) == usage["kendall"]["service_ms"]
            return usage["kendall"]

    told = run_virtual(main())
    records = read_run(path)[1]
    (record,) = (each for each in records if each.client_request_id == "long")
    assert record.preemptions == 2
    assert record.queueing_delay is not None
    assert record.service_time is not None
    assert told["queueing_delay_ms"] == pytest.approx(1e3 * record.queueing_delay, abs=0.01)
    assert told["service_ms"] == pytest.approx(1e3 * record.service_time, abs=0.01)


def test_a_stream_has_every_token_once_then_usage_then_done() -> None:
    async def main() -> None:
        async with running() as (app, _):
            whole = (await call(app, "POST", "/v1/completions", completion())).json()["choices"][0][
                "text"
            ]
            answer = await call(
                app,
                "POST",
                "/v1/completions",
                completion(stream=True, stream_options={"include_usage": True}),
            )
            events = answer.events()
            assert events[-1] == "[DONE]"
            assert events[-2]["usage"]["completion_tokens"] == 8
            assert events[-2]["choices"] == []
            assert events[-3]["choices"][0]["finish_reason"] == "length"
            assert "".join(event["choices"][0]["text"] for event in events[:-2]) == whole
            assert "service" not in answer.headers["server-timing"], (
                "a stream's headers leave at dispatch"
            )

    run_virtual(main())


def test_chat_streams_its_role_first_and_n_choices_end_each() -> None:
    async def main() -> None:
        async with running() as (app, _):
            body = {
                "model": "tiny",
                "messages": [{"role": "user", "content": "hi there"}],
                "max_completion_tokens": 4,
                "n": 2,
                "ignore_eos": True,
            }
            events = (
                await call(app, "POST", "/v1/chat/completions", body | {"stream": True})
            ).events()
            for index in (0, 1):
                deltas = [e["choices"][0] for e in events[:-1] if e["choices"][0]["index"] == index]
                assert deltas[0]["delta"]["role"] == "assistant"
                assert [d["finish_reason"] for d in deltas if d["finish_reason"]] == ["length"]
            whole = (await call(app, "POST", "/v1/chat/completions", body)).json()
            assert [choice["message"]["role"] for choice in whole["choices"]] == ["assistant"] * 2
            assert whole["usage"]["completion_tokens"] == 8

    run_virtual(main())


def test_stop_strings_end_the_answer_before_them_padded_and_unpadded() -> None:
    async def main() -> None:
        for policy in ("continuous", "capped:max_batch_size=4"):
            async with running(policy) as (app, gateway):
                body = (
                    await call(
                        app, "POST", "/v1/completions", completion(max_tokens=50, stop=["word6 "])
                    )
                ).json()
                assert body["choices"][0]["text"].endswith(" word5 ")
                assert body["choices"][0]["finish_reason"] == "stop"
                assert body["choices"][0]["stop_reason"] == "word6 "
                assert gateway.batcher.in_service == 0

    run_virtual(main())


def test_clipped_answers_end_with_length_and_are_counted() -> None:
    async def main() -> None:
        async with running(max_output_tokens=5) as (app, gateway):
            clipped = (await call(app, "POST", "/v1/completions", completion(max_tokens=50))).json()
            assert clipped["usage"]["completion_tokens"] == 5
            assert clipped["choices"][0]["finish_reason"] == "length"
            await call(
                app, "POST", "/v1/completions", completion(max_tokens=5)
            )  # the client's own limit: not clipped
            await call(
                app,
                "POST",
                "/v1/completions",
                completion(max_tokens=50, kendall_forced_output_tokens=3),
            )  # ended by itself
            assert gateway.metrics.clipped.labels("continuous:max_batch_size=4").total == 1

    run_virtual(main())


BAD = [
    (b'{"model":', 400, "invalid_json", None),
    (b"[1,2]", 400, "invalid_request", None),
    (completion(model="other"), 404, "model_not_found", "model"),
    (completion(max_tokens=0), 400, "invalid_request", "max_tokens"),
    (completion(max_tokens=5000), 400, "context_length_exceeded", "max_tokens"),
    (completion(prompt=[1] * 3000), 400, "context_length_exceeded", "prompt"),
    (completion(prompt=[]), 400, "invalid_prompt", "prompt"),
    (completion(prompt=[1 << 31]), 400, "invalid_prompt", "prompt"),
    (completion(temperature=-1), 400, "invalid_request", "temperature"),
    (completion(tools=[{"type": "function"}]), 501, "unsupported", "tools"),
    (completion(stream_options={"include_usage": True}), 400, "invalid_request", None),
]


@pytest.mark.parametrize(("body", "status", "code", "param"), BAD)
def test_bad_input_is_one_clear_error_and_nothing_arrives(
    body: object, status: int, code: str, param: str | None
) -> None:
    async def main() -> None:
        async with running() as (app, gateway):
            answer = await call(app, "POST", "/v1/completions", body)
            error = answer.json()["error"]
            assert answer.status == status
            assert error["code"] == code
            assert error["message"]
            assert set(error) == {"message", "type", "param", "code"}
            if param is not None:
                assert error["param"].startswith(param)
            assert gateway.batcher.unanswered == 0

    run_virtual(main())


def test_the_record_carries_the_callers_name_and_guess(tmp_path: Path) -> None:
    async def main() -> None:
        async with running(record_file=tmp_path / "run.jsonl") as (app, _):
            await call(
                app,
                "POST",
                "/v1/completions",
                completion(predicted_output_tokens=6.5),
                {"x-request-id": "mine-1"},
            )
            await call(app, "POST", "/v1/completions", completion())
            refused = await call(
                app, "POST", "/v1/completions", completion(predicted_output_tokens=0)
            )
            assert refused.json()["error"]["param"] == "predicted_output_tokens"

    run_virtual(main())
    first, second = read_run(tmp_path / "run.jsonl")[1]
    assert (first.client_request_id, first.predicted_output_tokens) == ("mine-1", 6.5)
    assert (second.client_request_id, second.predicted_output_tokens) == (None, None)


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_a_bug_in_one_call_is_a_500_and_the_next_call_is_served(
    path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def main() -> None:
        async with running() as (app, gateway):
            body = (
                completion()
                if path == "/v1/completions"
                else {"model": "tiny", "messages": [{"role": "user", "content": "hi"}]}
            )
            with monkeypatch.context() as patch:
                patch.setattr(gateway.call_ids, "next", lambda *_: 1 / 0)
                broken = await call(app, "POST", path, body)
            assert (broken.status, broken.json()["error"]["code"]) == (500, "internal_error")
            assert (await call(app, "POST", path, body)).status == 200

    run_virtual(main())


def test_a_client_that_goes_while_it_sends_its_body_never_arrived() -> None:
    async def main() -> None:
        async with running() as (app, gateway):
            sent = iter(
                [
                    {"type": "http.request", "body": b'{"model"', "more_body": True},
                    {"type": "http.disconnect"},
                ]
            )
            answered: list[Any] = []

            async def receive() -> Any:
                return next(sent)

            async def send(message: Any) -> None:
                answered.append(message)

            await app(
                {"type": "http", "method": "POST", "path": "/v1/completions", "headers": []},
                receive,
                send,
            )
            assert answered == []
            assert gateway.batcher.unanswered == 0

    run_virtual(main())


def test_forced_lengths_need_the_flag() -> None:
    async def main() -> None:
        async with running(allow_forced_lengths=False) as (app, _):
            answer = await call(
                app, "POST", "/v1/completions", completion(kendall_forced_output_tokens=3)
            )
            assert (answer.status, answer.json()["error"]["code"]) == (
                400,
                "forced_lengths_not_allowed",
            )

    run_virtual(main())


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize(
    "policy", ["single", "capped:max_batch_size=4", "elastic", "continuous:max_batch_size=1"]
)
def test_a_client_that_leaves_frees_queue_and_engine(policy: str, stream: bool) -> None:
    """In service and waiting, streamed or not: both outcomes are `cancelled`, and the next one
    is served at once.
    """

    async def main() -> None:
        async with running(policy) as (app, gateway):
            serving = Call(
                app, "POST", "/v1/completions", completion(max_tokens=500, stream=stream)
            )
            await asyncio.sleep(0.01)
            waiting = Call(
                app, "POST", "/v1/completions", completion(max_tokens=500, stream=stream)
            )
            await asyncio.sleep(0.01)
            assert (gateway.batcher.in_service, gateway.batcher.queue_length) == (1, 1)
            waiting.leave()
            await waiting.task
            assert gateway.batcher.queue_length == 0
            serving.leave()
            await serving.task
            assert (gateway.batcher.in_service, gateway.batcher.unanswered) == (0, 0)
            assert counted(gateway, "cancelled") == 2
            answer = await call(app, "POST", "/v1/completions", completion())
            assert answer.status == 200

    run_virtual(main())


def test_a_cancelled_member_of_a_padded_batch_leaves_the_others_alone() -> None:
    async def main() -> None:
        async with running("fixed:batch_size=3") as (app, gateway):
            calls = [
                Call(
                    app,
                    "POST",
                    "/v1/completions",
                    completion(kendall_forced_output_tokens=n, max_tokens=60),
                )
                for n in (5, 20, 40)
            ]
            await asyncio.sleep(0.03)
            calls[2].leave()  # the longest: the batch is over with the second
            for made in calls:
                await made.task
            assert [made.json()["usage"]["completion_tokens"] for made in calls[:2]] == [5, 20]
            assert gateway.batcher.in_service == 0
            assert (counted(gateway, "completed"), counted(gateway, "cancelled")) == (2, 1)

    run_virtual(main())


def test_padded_answers_leave_together_elastic_ones_each_on_its_own() -> None:
    async def main() -> None:
        ends = {}
        for policy in ("fixed:batch_size=2", "elastic:max_batch_size=2"):
            async with running(policy) as (app, gateway):
                blocker = (
                    Call(app, "POST", "/v1/completions", completion(max_tokens=2))
                    if policy.startswith("elastic")
                    else None
                )
                calls = [
                    Call(
                        app,
                        "POST",
                        "/v1/completions",
                        completion(kendall_forced_output_tokens=n, max_tokens=60),
                    )
                    for n in (5, 40)
                ]
                instants = []
                for made in calls:
                    await made.task
                    instants.append(gateway.now())
                if blocker:
                    await blocker.task
                ends[policy[:5]] = instants
        assert ends["fixed"][0] == ends["fixed"][1]
        assert ends["elast"][1] - ends["elast"][0] > 0.02

    run_virtual(main())


@pytest.mark.parametrize(
    ("method", "path", "body", "code", "param", "says"),
    [
        (
            "PUT",
            "/admin/policy",
            {"polcy": "single"},
            "unknown_field",
            "polcy",
            "did you mean policy?",
        ),
        (
            "PUT",
            "/admin/policy",
            {"zzz": 1},
            "unknown_field",
            "zzz",
            "policy, max_output_tokens, patience: leave it out",
        ),
        (
            "POST",
            "/v1/completions",
            {"model": "tiny", "prompt": "a", "stream_options": {}},
            "invalid_request",
            "stream_options",
            "stream_options is only",
        ),
    ],
)
def test_an_error_names_the_field_and_what_to_do(
    method: str, path: str, body: dict[str, Any], code: str, param: str, says: str
) -> None:
    async def main() -> None:
        async with running() as (app, _):
            answer = await call(app, method, path, body)
            error = answer.json()["error"]
            assert (answer.status, error["code"], error["param"]) == (400, code, param)
            assert says in error["message"]
            assert "Value error" not in error["message"]

    run_virtual(main())


def test_a_change_that_changes_nothing_keeps_the_epoch() -> None:
    async def main() -> None:
        async with running("capped:max_batch_size=8") as (app, gateway):
            changed = (
                await call(app, "PUT", "/admin/policy", {"max_output_tokens": 9, "patience": 30.0})
            ).json()
            assert changed["epoch"] == 1
            nothing = (
                {},
                {"policy": None},
                {"policy": "capped:max_batch_size=8"},
                {"max_output_tokens": 9, "patience": 30},
            )
            for change in nothing:
                answer = await call(app, "PUT", "/admin/policy", change)
                assert (answer.status, answer.json()) == (200, changed), change
            assert gateway.metrics.switches._value.get() == 0, "only limits have changed"
            lifted = (
                await call(
                    app,
                    "PUT",
                    "/admin/policy",
                    {"policy": "capped:max_batch_size=8", "patience": None},
                )
            ).json()
            assert (lifted["epoch"], lifted["patience"], lifted["max_output_tokens"]) == (
                2,
                None,
                9,
            )

    run_virtual(main())


def test_policy_is_switched_at_run_time_and_a_bad_one_changes_nothing() -> None:
    async def main() -> None:
        async with running("single") as (app, gateway):
            before = (await call(app, "GET", "/admin/policy")).json()
            for bad in (
                {"policy": "fixd:batch_size=2", "max_output_tokens": 9},
                {"polcy": "single"},
                {"policy": "fixed"},
                {"max_output_tokens": 0},
                {"max_output_tokens": 2**31},
                {"patience": 0},
            ):
                assert (await call(app, "PUT", "/admin/policy", bad)).status == 400
            assert (await call(app, "GET", "/admin/policy")).json() == before
            after = (
                await call(
                    app,
                    "PUT",
                    "/admin/policy",
                    {"policy": "capped:max_batch_size=8", "max_output_tokens": 9},
                )
            ).json()
            assert after["policy"] == "capped:max_batch_size=8"
            assert after["max_output_tokens"] == 9
            assert after["epoch"] == before["epoch"] + 1
            lifted = (await call(app, "PUT", "/admin/policy", {"max_output_tokens": None})).json()
            assert (lifted["policy"], lifted["max_output_tokens"]) == (
                "capped:max_batch_size=8",
                None,
            )
            for limit in (1, 2**31 - 1):
                answer = await call(app, "PUT", "/admin/policy", {"max_output_tokens": limit})
                assert (answer.status, answer.json()["max_output_tokens"]) == (200, limit)
            assert gateway.metrics.switches._value.get() == 1

    run_virtual(main())


def test_patience_runs_out_in_the_queue_while_the_engine_is_busy() -> None:
    async def main() -> None:
        async with running("single", patience=0.05) as (app, gateway):
            first = Call(app, "POST", "/v1/completions", completion(max_tokens=500))
            await asyncio.sleep(0.001)
            at = gateway.now()
            second = await call(app, "POST", "/v1/completions", completion())
            assert gateway.now() - at == pytest.approx(0.05)
            assert (second.status, second.json()["error"]["code"]) == (429, "queue_timeout")
            assert second.headers["retry-after"]
            await first.task
            assert (counted(gateway, "completed"), counted(gateway, "abandoned")) == (1, 1)

    run_virtual(main())


def test_an_engine_that_refuses_loses_its_requests_and_not_the_loop() -> None:
    async def main() -> None:
        async with running("capped:max_batch_size=4") as (app, gateway):
            works = gateway.engine.dispatch

            def refuse(*_: object, **__: object) -> Any:
                raise RuntimeError("no")

            gateway.engine.dispatch = refuse
            answer = await call(app, "POST", "/v1/completions", completion())
            assert answer.status == 500
            gateway.engine.dispatch = works
            assert (await call(app, "POST", "/v1/completions", completion())).status == 200
            assert (counted(gateway, "failed"), counted(gateway, "completed")) == (1, 1)

    run_virtual(main())


def test_a_lost_engine_fails_everyone_once_and_health_says_so() -> None:
    async def main() -> None:
        async with running("single", supervision=SupervisionSettings(max_restarts=0)) as (
            app,
            gateway,
        ):
            calls = [
                Call(app, "POST", "/v1/completions", completion(max_tokens=500)) for _ in range(3)
            ]
            await asyncio.sleep(0.01)
            gateway.engine.on_death("killed")
            for made in calls:
                await made.task
                assert made.status == 503
            assert (await call(app, "GET", "/health")).status == 503
            assert (await call(app, "GET", "/ready")).status == 503
            refused = await call(app, "POST", "/v1/completions", completion())
            assert (refused.status, refused.json()["error"]["code"]) == (503, "engine_unavailable")
            assert counted(gateway, "failed") == 3

    run_virtual(main())


def test_state_endpoints_answer() -> None:
    async def main() -> None:
        async with running() as (app, _):
            assert (await call(app, "GET", "/health")).status == 200
            assert (await call(app, "GET", "/ready")).status == 200
            assert (await call(app, "GET", "/version")).json()["version"]
            entry = (await call(app, "GET", "/v1/models")).json()["data"][0]
            assert (entry["id"], entry["root"], entry["emulated"]) == ("tiny", "tiny", True)
            metrics = await call(app, "GET", "/metrics")
            assert b"kendall_queue_length 0.0" in metrics.body
            # Prometheus reads no other form, and text elsewhere is Latin-1
            assert metrics.headers["content-type"] == "text/plain; version=0.0.4; charset=utf-8"
            assert (await call(app, "GET", "/load")).json() == {"server_load": 0}
            assert (await call(app, "GET", "/nowhere")).json()["error"]["code"] == "not_found"
            assert (await call(app, "GET", "/v1/completions")).status == 405

    run_virtual(main())


@pytest.mark.parametrize(
    ("allowed", "fields"),
    [(False, ["ignore_eos"]), (True, ["kendall_forced_output_tokens", "ignore_eos"])],
)
def test_the_model_says_which_fields_set_an_answers_length(
    allowed: bool, fields: list[str]
) -> None:
    """And it does as it says: with ignore_eos the answer has max_tokens tokens, though the
    engine's own answers are shorter.
    """

    async def main() -> None:
        async with running(allow_forced_lengths=allowed) as (app, _):
            assert (await call(app, "GET", "/v1/models")).json()["data"][0][
                "output_length_fields"
            ] == fields
            asked = completion(max_tokens=200, ignore_eos=True)
            assert (await call(app, "POST", "/v1/completions", asked)).json()["usage"][
                "completion_tokens"
            ] == 200

    run_virtual(main())


def test_conservation_and_littles_law_under_a_random_load() -> None:
    """arrived = the sum of the outcomes, and the mean number waiting = rate x mean delay."""

    async def main() -> None:
        async with running("capped:max_batch_size=4") as (app, gateway):
            area, last = 0.0, gateway.now()
            calls: list[Call] = []
            for index in range(300):
                calls.append(
                    Call(
                        app,
                        "POST",
                        "/v1/completions",
                        completion(kendall_forced_output_tokens=1 + index * 7 % 20, max_tokens=30),
                    )
                )
                for _ in range(10):
                    area += gateway.batcher.queue_length * (gateway.now() - last)
                    last = gateway.now()
                    await asyncio.sleep(0.0008 if index % 5 else 0.001)
                if index % 11 == 0:
                    calls[-1].leave()
            for made in calls:
                await made.task
            outcomes = {
                name: counted(gateway, name)
                for name in ("completed", "cancelled", "failed", "abandoned", "rejected")
            }
            assert sum(outcomes.values()) == 300
            assert outcomes["completed"] + outcomes["cancelled"] == 300
            assert gateway.batcher.unanswered == 0
            total = sum(
                s.value
                for m in gateway.metrics.durations.queueing_delay.collect()
                for s in m.samples
                if s.name.endswith("_sum")
            )
            assert area == pytest.approx(total, rel=0.15)

    run_virtual(main())


def test_ids_of_calls_are_24_random_digits_and_none_comes_twice() -> None:
    ids = CallIds()
    made = [ids.next("cmpl") for _ in range(1000)]
    assert len(set(made)) == 1000
    assert all(re.fullmatch("cmpl-[0-9a-f]{24}", each) for each in made)
    assert not set(made) & {CallIds().next("cmpl") for _ in range(10)}
