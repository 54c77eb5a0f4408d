"""What operators and clients can get wrong about orders: one line of what was got and what is
expected, and service goes on.
"""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.server.asgi import Call, call, completion, running
from tests.server.harness import Collector
from tests.virtual_time import run_virtual

PATH = "/v1/completions"
WRONG = {
    "capped:max_batch_size=4,order=sprpt": "got order sprpt, which interrupts a batch; expected fc",
    "dynamic:order=mlfq": "got order mlfq, which interrupts a batch; expected fcfs, spjf, ljf",
    "fixed:batch_size=2,order=fb": "got order fb, which interrupts a batch; expected fcfs, spjf",
    "elastic:order=trail": "got order trail, which interrupts a batch; expected fcfs, spjf, ljf",
    "single:order=spjf,aging=-1": "got aging=-1; expected finite seconds >= 0",
    "single:order=spjf,aging=x": "got aging='x' for policy single; expected a number",
    "single:order=spjf,agingg=2": "got key 'agingg' for policy single; expected order, aging, ",
    "single:order=spjf,threshold=3": (
        "got threshold for order spjf; expected aging, by, prompt_weight, or nothing"
    ),
    "single:order=threshold": "got order threshold without threshold; expected threshold=NUMBER",
    "single:order=vtc,output_weight=-2": "got output_weight=-2; expected a number >= 0",
    "single:order=vtc,aging=1": "got aging for order vtc; expected prompt_weight, output_weight",
    "single:order=sjf": "expected one of fcfs, spjf, ljf, threshold, boost, edf, priority, hrrn",
}


def said(answer: Call) -> str:
    error = json.loads(b"".join(answer.chunks))["error"]
    assert error["code"] in ("invalid_request", "invalid_policy"), error
    message: str = error["message"]
    assert "\n" not in message
    return message


async def started(app: Any, predicted: list[float | None]) -> list[Call]:
    """Calls that wait for a server one after the other, the first one in service."""
    calls = []
    for number in predicted:
        about: dict[str, Any] = {} if number is None else {"predicted_output_tokens": number}
        calls.append(Call(app, "POST", PATH, completion(**about)))
    return calls


def test_a_wrong_order_changes_nothing_and_service_goes_on_in_the_one_in_force() -> None:
    async def main() -> None:
        collector = Collector()
        async with running("single:order=spjf") as (app, gateway):
            gateway.batcher.observers.add(collector)
            calls = await started(app, [5, 8, 6, 3])
            before = (await call(app, "GET", "/admin/policy")).json()
            for text, says in WRONG.items():
                change = {"policy": text, "max_output_tokens": 3, "patience": 0.001}
                refused = await call(app, "PUT", "/admin/policy", change)
                assert refused.status == 400, text
                assert says in said(refused)
            assert (await call(app, "GET", "/admin/policy")).json() == before
            assert gateway.batcher.queue_length == 3
            for each in calls:
                await each.task
                assert each.status == 200
        served = sorted(collector.records, key=lambda record: record.dispatched_at or 0.0)
        assert [record.predicted_output_tokens for record in served] == [5, 3, 6, 8]
        assert [record.output_tokens for record in served] == [8] * 4
        assert {record.epoch for record in served} == {before["epoch"]}

    run_virtual(main())


def test_an_order_in_force_gives_way_to_another_and_what_waits_is_ranked_again() -> None:
    async def main() -> None:
        collector = Collector()
        async with running("single:order=spjf") as (app, gateway):
            gateway.batcher.observers.add(collector)
            calls = await started(app, [5, 8, 6, 7])
            await call(app, "GET", "/health")  # until they are in the queue
            for text in ("single:order=vtc", "single:order=ljf"):
                changed = await call(app, "PUT", "/admin/policy", {"policy": text})
                assert changed.json()["policy"] == text
                assert (gateway.batcher.counters is not None) is ("vtc" in text)
            for each in calls:
                await each.task
        served = sorted(collector.records, key=lambda record: record.dispatched_at or 0.0)
        assert [record.predicted_output_tokens for record in served] == [5, 8, 7, 6]

    run_virtual(main())


@pytest.mark.parametrize(
    "number", ["-1", "0", "-0.0", "NaN", "Infinity", "1e999", "true", '"5"', "[1]"]
)
def test_what_is_no_prediction_is_refused_before_it_queues(number: str) -> None:
    async def main() -> None:
        async with running("single:order=spjf") as (app, gateway):
            body = json.dumps(completion())[:-1] + f', "predicted_output_tokens": {number}}}'
            answer = await call(app, "POST", PATH, body.encode())
            assert answer.status == 400
            assert said(answer).startswith("predicted_output_tokens: ")
            assert "; got " in said(answer)
            assert gateway.batcher.unanswered == 0

    run_virtual(main())


def test_an_absurd_prediction_counts_as_the_token_limit_or_as_nothing() -> None:
    """The first is in service; then who says least goes first, and no number is beyond reach."""

    async def main() -> None:
        collector = Collector()
        async with running("single:order=spjf") as (app, gateway):
            gateway.batcher.observers.add(collector)
            calls = await started(app, [5, 1e300, 8, 1e-320, None])
            for each in calls:
                await each.task
                assert each.status == 200
        served = sorted(collector.records, key=lambda record: record.dispatched_at or 0.0)
        told = [record.predicted_output_tokens for record in served]
        assert told == [5, 1e-320, 1e300, 8, None], "the limit is 8 tokens: equal, by arrival"

    run_virtual(main())
