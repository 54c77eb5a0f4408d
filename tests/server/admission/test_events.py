"""Streams that speak while they wait: comments, keep-alive comments, losses after the headers
have left.
"""

from __future__ import annotations

import asyncio
import dataclasses
import json
import math
from typing import Any

import pytest

from kendall.server.admission.settings import OverloadSettings
from kendall.server.admission.waits import EVERY
from kendall.server.http.queue_stream import KEEP_ALIVE
from tests.server.asgi import Call, call, completion, running
from tests.server.harness import Collector
from tests.virtual_time import run_virtual

PATH = "/v1/completions"


def told(made: Call) -> list[dict[str, Any]]:
    """The queue's comments so far."""
    return [
        json.loads(line[8:]) for line in made.body.split(b"\n\n") if line.startswith(b": queue ")
    ]


def test_a_waiting_stream_has_its_headers_at_once_and_is_told_its_place_until_its_dispatch() -> (
    None
):
    async def main() -> None:
        async with running("single", overload=OverloadSettings(queue_events=True)) as (app, _):
            await call(
                app, "POST", PATH, completion(max_tokens=2000)
            )  # 1.852 s: a service that waits are computed from
            calls = [
                Call(app, "POST", PATH, completion(max_tokens=2000, stream=True)) for _ in range(3)
            ]
            await asyncio.sleep(0.001)
            assert [made.status for made in calls] == [200] * 3
            assert "x-kendall-queueing-delay-ms" not in calls[2].headers
            assert calls[2].headers["x-kendall-queue-position"] == "1"
            assert float(calls[2].headers["x-kendall-predicted-wait-ms"]) == pytest.approx(
                2 * 1852.25, abs=1
            )
            assert told(calls[0]) == []
            await asyncio.sleep(2.5)
            places = [
                (each["queue_position"], each["predicted_wait_ms"]) for each in told(calls[2])
            ]
            assert [place for place, _ in places] == [1, 1, 0]
            assert [wait for _, wait in places] == pytest.approx([3704.5, 2704.5, 1704.5], abs=2)
            for made in calls:
                await made.task
            assert told(calls[2])[-1] == {"queueing_delay_ms": pytest.approx(3704.5, abs=1)}
            assert calls[2].events()[-1] == "[DONE]"
            assert (
                sum(bool(event["choices"][0]["text"]) for event in calls[2].events()[:-1]) == 2000
            )

    run_virtual(main())


def test_places_are_told_each_second_and_a_keep_alive_is_a_comment() -> None:
    assert (EVERY, KEEP_ALIVE) == (1.0, b": keep-alive\n\n")


def test_an_answer_that_is_not_streamed_is_as_ever() -> None:
    async def main() -> None:
        async with running(
            "single", overload=OverloadSettings(queue_events=True, sse_keep_alive_interval=0.001)
        ) as (app, _):
            first = Call(app, "POST", PATH, completion(max_tokens=100))
            answer = await call(app, "POST", PATH, completion())
            await first.task
            assert answer.json()["usage"]["completion_tokens"] == 8

    run_virtual(main())


@pytest.mark.parametrize("events", [True, False])
def test_a_loss_after_the_headers_is_told_in_the_stream(events: bool) -> None:
    async def main() -> None:
        overload = OverloadSettings(
            queue_events=events, sse_keep_alive_interval=0.0 if events else 0.02
        )
        async with running("single", overload=overload) as (app, gateway):
            first = Call(app, "POST", PATH, completion(max_tokens=500))
            await asyncio.sleep(0.001)
            lost = await call(app, "POST", PATH, completion(stream=True, patience=0.05))
            assert lost.status == 200
            error, done = lost.events()
            assert (error["error"]["code"], done) == ("queue_timeout", "[DONE]")
            assert lost.whole
            await first.task
            assert gateway.batcher.unanswered == 0

    run_virtual(main())


def test_a_loss_before_the_headers_has_its_status() -> None:
    async def main() -> None:
        async with running("single", overload=OverloadSettings(sse_keep_alive_interval=10.0)) as (
            app,
            _,
        ):
            first = Call(app, "POST", PATH, completion(max_tokens=500))
            await asyncio.sleep(0.001)
            lost = await call(app, "POST", PATH, completion(stream=True, patience=0.05))
            assert lost.status == 429
            await first.task

    run_virtual(main())


def test_keep_alives_fill_silence_only() -> None:
    """A wait of 0.46 s in the queue: two at 0.2 s; tokens come each millisecond: none."""

    async def main() -> None:
        async with running("single", overload=OverloadSettings(sse_keep_alive_interval=0.2)) as (
            app,
            _,
        ):
            first = Call(app, "POST", PATH, completion(max_tokens=500, stream=True))
            await asyncio.sleep(0.001)
            second = await call(app, "POST", PATH, completion(max_tokens=500, stream=True))
            await first.task
            assert first.body.count(b": keep-alive\n\n") == 0
            assert second.body.count(b": keep-alive\n\n") == 2
            assert second.events()[-1] == "[DONE]"
            assert "x-kendall-queueing-delay-ms" not in second.headers
            assert float(first.headers["x-kendall-queueing-delay-ms"]) == 0.0

    run_virtual(main())


def test_a_waiting_stream_whose_client_leaves_is_gone_from_queue_and_listeners() -> None:
    async def main() -> None:
        async with running("single", overload=OverloadSettings(queue_events=True)) as (
            app,
            gateway,
        ):
            first = Call(app, "POST", PATH, completion(max_tokens=2000))
            await asyncio.sleep(0.001)
            waiting = Call(app, "POST", PATH, completion(stream=True))
            await asyncio.sleep(1.2)
            waiting.leave()
            await waiting.task
            assert gateway.batcher.queue_length == 0
            places = gateway.overload.places
            assert not places._listeners
            assert places._timer is None
            await first.task

    run_virtual(main())


class Walked:
    """Places that a test tells of."""

    def __init__(self) -> None:
        self.listeners: dict[str, Any] = {}

    def listen(self, request_id: str, listener: Any) -> None:
        self.listeners[request_id] = listener

    def forget(self, request_id: str) -> None:
        del self.listeners[request_id]


def test_a_stream_is_told_what_is_known_of_its_wait_and_the_last_of_several_places() -> None:
    """Of its last sequence; whole microseconds, and no wait where none can be foreseen."""

    async def main() -> None:
        async with running("single", overload=OverloadSettings(queue_events=True)) as (
            app,
            gateway,
        ):
            walked = gateway.overload.places = Walked()  # type: ignore[assignment]
            first = Call(app, "POST", PATH, completion(max_tokens=2000))
            await asyncio.sleep(0.001)
            waiting = Call(app, "POST", PATH, completion(stream=True, n=2))
            await asyncio.sleep(0.1)
            ((name, tell),) = walked.listeners.items()
            assert name.endswith("-1")
            assert told(waiting) == [{"queue_position": 1}]  # two behind the first one
            for place, wait in ((4, None), (3, math.inf), (2, 1.2345678), (0, 0.0)):
                tell(place, wait)
                await asyncio.sleep(0.001)
            tell(7, 1.0)
            tell(6, 0.5)
            await asyncio.sleep(0.001)
            assert told(waiting)[1:] == [
                {"queue_position": 4},
                {"queue_position": 3},
                {"queue_position": 2, "predicted_wait_ms": 1234.568},
                {"queue_position": 0, "predicted_wait_ms": 0.0},
                {"queue_position": 6, "predicted_wait_ms": 500.0},
            ]
            assert waiting.body.endswith(b'"predicted_wait_ms":500.0}\n\n')
            await waiting.task
            assert walked.listeners == {}
            assert set(told(waiting)[-1]) == {"queueing_delay_ms"}
            await first.task

    run_virtual(main())


def test_a_stream_that_does_not_wait_has_its_delay_in_its_headers() -> None:
    async def main() -> None:
        overload = OverloadSettings(queue_events=True, sse_keep_alive_interval=10.0)
        async with running(overload=overload) as (app, _):
            asked = await call(app, "POST", PATH, completion(stream=True))
            assert asked.headers["x-kendall-queueing-delay-ms"] == "0.0"
            assert told(asked) == []
            assert asked.events()[-1] == "[DONE]"

    run_virtual(main())


def test_a_keep_alive_comes_after_each_interval_of_silence() -> None:
    """In a wait of 1.85 s, whose headers leave with the first of them."""

    async def main() -> None:
        async with running("single") as (app, gateway):
            for interval, count in ((0.0, 0), (0.5, 3), (1.0, 1), (2.0, 0)):
                overload = OverloadSettings(sse_keep_alive_interval=interval)
                gateway.reload(dataclasses.replace(gateway.settings, overload=overload))
                first = Call(app, "POST", PATH, completion(max_tokens=2000))
                await asyncio.sleep(0)
                waiting = Call(app, "POST", PATH, completion(stream=True))
                await asyncio.sleep(0.999 * interval if count else 1.8)
                assert waiting.status is None
                await waiting.task
                await first.task
                assert waiting.body.count(b": keep-alive\n\n") == count
                assert ("x-kendall-queueing-delay-ms" in waiting.headers) == (count == 0)
                named = ("content-type", "cache-control", "x-accel-buffering")
                assert [waiting.headers[name] for name in named] == [
                    "text/event-stream; charset=utf-8",
                    *("no-cache", "no"),
                ]

    run_virtual(main())


class Broken(Call):
    """Its transport fails with the first message."""

    async def _send(self, message: dict[str, Any]) -> None:
        raise ZeroDivisionError


def test_an_answer_that_cannot_be_written_has_failed() -> None:
    async def main() -> None:
        async with running() as (app, gateway):
            gateway.batcher.observers.add(collector := Collector())
            for stream in (True, False):
                broken = Broken(app, "POST", PATH, completion(stream=stream, n=2))
                with pytest.raises(ZeroDivisionError):
                    await broken.task
            message = "internal error of the gateway; its log has the details"
            found = [(record.outcome, record.error) for record in collector.records]
            assert found == [("failed", message)] * 4
            assert gateway.batcher.failures == {"internal_error": 4}

    run_virtual(main())
