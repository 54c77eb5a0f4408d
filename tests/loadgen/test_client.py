"""Every request sent has one record with one outcome, exact counts, and the instant at which it
was meant to leave.
"""

from __future__ import annotations

import asyncio
import gc
import itertools
import re
from typing import Any

import numpy as np
import pytest
from aiohttp import web

from kendall.loadgen.sending.client.client import run_prefix, timing
from kendall.loadgen.sending.client.endpoint import look_at
from kendall.loadgen.sending.client.stream import StreamedAnswer
from kendall.loadgen.sending.client.target import LoadError, Target
from kendall.loadgen.sending.in_flight import InFlightRequests
from kendall.loadgen.sending.job import Counters, SendOptions
from kendall.loadgen.sending.pacing import BURST
from kendall.loadgen.sending.run import LoadResult, RunOutput, run_load
from kendall.queueing.arrivals.timetable import Timetable
from tests.eventually import eventually
from tests.loadgen.fake_server import (
    DONE,
    MODELS,
    FakeServer,
    Handler,
    answer,
    chat_chunk,
    chunk,
    event,
    serving,
    stream,
    usage,
)


def timetable(n: int = 4, gap: float = 0.005, output_tokens: int = 3) -> Timetable:
    return Timetable(np.arange(n) * gap, np.full(n, 5), np.arange(n) + output_tokens)


def load(
    handler: Handler = answer, table: Timetable | None = None, **settings: Any
) -> tuple[LoadResult, FakeServer]:
    async def main() -> tuple[LoadResult, FakeServer]:
        async with serving(handler) as server:
            shown = RunOutput(progress=settings.pop("progress", None))
            options = SendOptions(
                **{
                    key: settings.pop(key)
                    for key in ("drain_limit", "token_times")
                    if key in settings
                }
            )
            target = Target(base_url=server.url, model="fake", **settings)
            return await run_load(
                target, table or timetable(), seed=3, options=options, output=shown
            ), server

    return asyncio.run(main())


def test_every_answer_is_recorded_with_exact_counts() -> None:
    result, _ = load()
    assert [r.outcome for r in result.records] == ["completed"] * 4
    assert [r.output_tokens for r in result.records] == [3, 4, 5, 6]
    assert [r.prompt_tokens for r in result.records] == [5] * 4
    assert {r.finish_reason for r in result.records} == {"length"}
    assert {r.queueing_delay for r in result.records} == {0.0015}
    for record in result.records:
        instants = [
            record.intended_at,
            record.sent_at,
            record.first_token_at,
            record.last_token_at,
            record.released_at,
        ]
        assert None not in instants
        assert instants == sorted(instants)  # type: ignore[type-var]
        assert record.sojourn_time == record.released_at - record.intended_at  # type: ignore[operator]


@pytest.mark.slow
def test_token_instants_are_kept_where_asked_and_the_first_byte_always(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Every token is sent 20 ms after the client has read the one before."""
    fed: list[bytes] = []
    feed = StreamedAnswer.feed

    def noting(answer: StreamedAnswer, data: bytes, now: float) -> None:
        feed(answer, data, now)
        fed.append(data)

    async def slowly(request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        response = await stream(request, [])
        name = request.headers["x-request-id"]
        for part in (chunk(f"{name} a"), chunk(f"{name} b"), chunk(f"{name} c", finish="length")):
            await response.write(part)
            await eventually(lambda part=part: any(part in data for data in fed))
            await asyncio.sleep(0.02)
        await response.write(usage(5, 3) + DONE)
        return response

    monkeypatch.setattr(StreamedAnswer, "feed", noting)

    for asked in (False, True):
        result, _ = load(slowly, token_times=asked)
        for record in result.records:
            assert record.first_byte_at is not None
            assert record.sent_at is not None
            assert record.first_token_at is not None
            assert record.sent_at <= record.first_byte_at <= record.first_token_at
            if asked:
                assert record.token_at is not None
                assert (record.token_at[0], record.token_at[-1]) == (
                    record.first_token_at,
                    record.last_token_at,
                )
                assert np.diff(record.token_at).min() > 0.01
                assert len(record.token_at) == 3
            else:
                assert record.token_at is None


def test_what_the_gateway_says_of_queue_service_and_batch_is_recorded() -> None:
    async def timed(request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        kendall = {"queueing_delay_ms": 2.5, "service_ms": 7.0, "batch_size": 3}
        parts = [chunk(finish="length"), usage(5, 1, kendall=kendall), DONE]
        return await stream(request, parts, **{"server-timing": "queue;dur=9"})

    async def headers_only(request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        return await stream(
            request,
            [chunk(finish="length"), DONE],
            **{"server-timing": "queue;dur=9, service;dur=4"},
        )

    result, _ = load(timed)
    assert {(r.queueing_delay, r.service_time, r.batch_size) for r in result.records} == {
        (0.0025, 0.007, 3)
    }
    result, _ = load(headers_only)
    assert {(r.queueing_delay, r.service_time, r.batch_size) for r in result.records} == {
        (0.009, 0.004, None)
    }


def test_a_predicted_length_is_sent_and_recorded() -> None:
    table = timetable()
    predicted = Timetable(
        table.intended_at, table.prompt_tokens, table.output_tokens, np.array([7, 8, 9, 10])
    )
    result, server = load(table=predicted)
    assert [body["predicted_output_tokens"] for body in server.bodies] == [7, 8, 9, 10]
    assert [r.predicted_output_tokens for r in result.records] == [7, 8, 9, 10]
    _, server = load()
    assert all("predicted_output_tokens" not in body for body in server.bodies)


def test_natural_lengths_force_nothing() -> None:
    result, server = load(natural_lengths=True)
    assert all(
        "kendall_forced_output_tokens" not in body and "ignore_eos" not in body
        for body in server.bodies
    )
    assert [body["max_tokens"] for body in server.bodies] == [3, 4, 5, 6]
    assert [r.max_output_tokens for r in result.records] == [3, 4, 5, 6]
    _, server = load(natural_lengths=True, max_tokens=50)
    assert {body["max_tokens"] for body in server.bodies} == {50}


def test_the_records_id_is_the_one_that_was_sent() -> None:
    """Whatever the server calls it: a gateway's file is joined by the client's own name."""

    async def renaming(request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        parts = [
            chunk(finish="length"),
            usage(5, int(request.headers["x-request-id"].rsplit("-")[-1])),
            DONE,
        ]
        return await stream(request, parts, **{"x-request-id": "another"})

    result, _ = load(renaming)
    assert [r.request_id.rsplit("-")[-1] for r in result.records] == ["0", "1", "2", "3"]
    assert [r.output_tokens for r in result.records] == [0, 1, 2, 3]


def test_the_timetable_is_kept_and_lateness_reported() -> None:
    instants = np.cumsum(np.random.default_rng(0).exponential(0.01, 60))
    result, server = load(table=Timetable(instants, np.full(60, 5), np.full(60, 2)))
    intended = np.array([r.intended_at for r in result.records], dtype=np.float64)
    assert np.allclose(np.diff(intended), np.diff(instants))
    sent = np.array([r.sent_at for r in result.records], dtype=np.float64)
    assert (sent >= intended).all()
    assert result.lateness.n == 60
    assert result.lateness.mean == pytest.approx((sent - intended).mean())
    assert (np.array(server.arrived_at) >= intended).all()


@pytest.mark.slow
def test_requests_of_an_idle_sender_are_not_late() -> None:
    """Needs a calm machine."""
    instants = np.cumsum(np.random.default_rng(0).exponential(0.01, 60))
    result, server = load(table=Timetable(instants, np.full(60, 5), np.full(60, 2)))
    intended = np.array([r.intended_at for r in result.records], dtype=np.float64)
    assert result.lateness.p50 < 0.005
    assert np.median(np.array(server.arrived_at) - intended) < 0.02


class Blocking:
    """Keeps the loop busy for 100 ms as soon as it gets a turn after the first request; a late
    sender takes `BURST` in one turn.
    """

    blocked_until = 0.0

    async def show(self, counters: Counters) -> None:
        while not counters.sent:  # noqa: ASYNC110 - counters raise no event
            await asyncio.sleep(0)
        now = asyncio.get_running_loop().time
        self.blocked_until = now() + 0.1
        while now() < self.blocked_until:
            pass
        await asyncio.Event().wait()


def test_late_requests_are_sent_at_once_and_keep_their_instant() -> None:
    """What blocks the loop makes the sender late: nothing is rescheduled, and the delay counts
    from the intent.
    """
    blocking = Blocking()
    result, _ = load(table=timetable(n=2 * BURST, gap=0.01), progress=blocking)
    assert np.allclose(np.diff([r.intended_at for r in result.records]), 0.01)  # type: ignore[arg-type]
    assert result.lateness.max > 0.05
    late = next(
        r for r in result.records if r.sent_at is not None and r.sent_at >= blocking.blocked_until
    )
    assert late.sojourn_time is not None
    assert late.sojourn_time > 0.05


def test_only_the_sealed_field_tells_two_lengths_apart() -> None:
    _, server = load()
    for body in server.bodies:
        assert len(body.pop("prompt")) == 5
    assert [body.pop("kendall_forced_output_tokens") for body in server.bodies] == [3, 4, 5, 6]
    assert all(body == server.bodies[0] for body in server.bodies)
    assert server.bodies[0]["max_tokens"] == 6
    assert server.bodies[0]["stream_options"] == {"include_usage": True}


def test_ignore_eos_sets_lengths_by_max_tokens() -> None:
    result, server = load(ignore_eos=True)
    assert [(b["max_tokens"], b["ignore_eos"]) for b in server.bodies] == [
        (n, True) for n in (3, 4, 5, 6)
    ]
    assert not any("kendall_forced_output_tokens" in b for b in server.bodies)
    assert [r.max_output_tokens for r in result.records] == [3, 4, 5, 6]


def test_a_chat_is_streamed_too() -> None:
    async def chat(request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        assert request.path == "/v1/chat/completions"
        assert len(body["messages"][0]["content"].split()) == 5
        opening = chat_chunk({"role": "assistant", "content": ""})
        return await stream(
            request,
            [opening, chat_chunk({"content": "a"}), chat_chunk({}, "stop"), usage(9, 2), DONE],
        )

    result, _ = load(chat, chat=True)
    assert [(r.outcome, r.output_tokens, r.prompt_tokens) for r in result.records] == [
        ("completed", 2, 9)
    ] * 4


def _status(status: int, code: str = "queue_full") -> Handler:
    async def handler(request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        return web.json_response(
            {"error": {"message": "no", "code": code}}, status=status, headers={"retry-after": "1"}
        )

    return handler


def _parts(*parts: bytes) -> Handler:
    async def handler(request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        return await stream(request, list(parts))

    return handler


async def _disconnect(request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
    response = await stream(request, [chunk()], gap=0.01)
    assert request.transport is not None
    request.transport.abort()
    return response


async def _page(request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
    return web.Response(text="<html></html>\n\n", content_type="text/html")


async def _silence(request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
    response = await stream(request, [chunk()])
    await asyncio.Event().wait()
    return response


@pytest.mark.slow
@pytest.mark.parametrize(
    ("handler", "outcome", "error"),
    [
        (_status(429), "rejected", "429 queue_full: no"),
        (_status(503, "shutting_down"), "rejected", "503 shutting_down"),
        (_status(429, "queue_timeout"), "abandoned", "queue_timeout"),
        (_status(400, "bad"), "failed", "400 bad"),
        (_status(500, "oops"), "failed", "500 oops"),
        (_parts(chunk(), chunk()), "failed", "broke off"),
        (_parts(), "failed", "broke off"),
        (_parts(b"data: {not json\n\n"), "failed", "completion chunk"),
        (_parts(chunk(), event({"error": {"message": "engine died"}})), "failed", "engine died"),
        (_parts(chunk(), chunk(finish="abort"), DONE), "failed", "abort"),
        (_page, "failed", "got an answer of content type text/html; expected text/event-stream"),
        (_disconnect, "failed", ""),
        (_silence, "cancelled", "the run ended"),
    ],
)
def test_what_goes_wrong_is_one_outcome_and_says_why(
    handler: Handler, outcome: str, error: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The limit of the answers' time counts from where the server has got the requests."""
    got, drain = [], InFlightRequests.drain

    async def counting(request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        got.append(request)
        return await handler(request, body)

    async def drain_then(in_flight: InFlightRequests, limit: float) -> None:
        await eventually(lambda: len(got) >= 4)
        await drain(in_flight, limit)

    monkeypatch.setattr(InFlightRequests, "drain", drain_then)
    result, server = load(counting, drain_limit=0.1 if outcome == "cancelled" else 60.0)
    assert [r.outcome for r in result.records] == [outcome] * 4
    assert all(r.error and error in r.error for r in result.records)
    assert len(server.bodies) == 4  # nothing is tried twice
    assert all(r.sojourn_time is None for r in result.records)


def test_a_mixture_keeps_each_outcome_with_its_request() -> None:
    async def mixed(request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        handlers = {3: answer, 4: _status(429), 5: _disconnect, 6: answer}
        return await handlers[body["kendall_forced_output_tokens"]](request, body)

    result, _ = load(mixed)
    assert [r.outcome for r in result.records] == ["completed", "rejected", "failed", "completed"]


def test_nobody_listening_is_a_failure_of_each_request() -> None:
    async def main() -> LoadResult:
        return await run_load(Target(base_url="http://127.0.0.1:9", model="m"), timetable(), seed=0)

    result = asyncio.run(main())
    assert [r.outcome for r in result.records] == ["failed"] * 4
    assert all(r.error and "127.0.0.1" in r.error for r in result.records)


def test_an_interrupt_ends_the_run_and_keeps_the_records() -> None:
    async def main() -> LoadResult:
        asked, third = 0, asyncio.Event()

        async def two_answers(request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
            nonlocal asked
            asked += 1
            if asked <= 2:
                return await answer(request, body)
            third.set()
            await asyncio.Event().wait()
            raise AssertionError

        class Watch:
            async def show(self, counters: Counters) -> None:
                while counters.completed < 2:  # noqa: ASYNC110 - counters raise no event
                    await asyncio.sleep(0.01)
                await third.wait()
                run.cancel()

        async with serving(two_answers) as server:
            target = Target(base_url=server.url, model="fake")
            run = asyncio.create_task(
                run_load(
                    target,
                    timetable(n=10_000, gap=0.05),
                    seed=0,
                    output=RunOutput(progress=Watch()),
                )
            )
            return await run

    result = asyncio.run(main())
    assert result.interrupted
    assert 3 <= len(result.records) < 10_000
    assert sorted({r.outcome for r in result.records}) == ["cancelled", "completed"]
    assert sum(r.outcome == "completed" for r in result.records) == 2


@pytest.mark.slow
@pytest.mark.parametrize("turns", range(6))
@pytest.mark.parametrize("processes", [1, 2])
def test_a_second_interrupt_costs_nothing_of_what_the_first_has_kept(
    turns: int, processes: int
) -> None:
    """Wherever it comes while the run ends; so many turns of the loop after the first."""

    async def main() -> LoadResult:
        async def never(request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
            await asyncio.Event().wait()
            raise AssertionError

        class Watch:
            async def show(self, counters: Counters) -> None:
                while counters.sent < 3:  # noqa: ASYNC110 - counters raise no event
                    await asyncio.sleep(0.01)
                run.cancel()
                for _ in range(turns):
                    await asyncio.sleep(0)
                run.cancel()

        async with serving(never) as server:
            run = asyncio.create_task(
                run_load(
                    Target(base_url=server.url, model="fake"),
                    timetable(n=10_000, gap=0.05),
                    seed=0,
                    options=SendOptions(processes=processes),
                    output=RunOutput(progress=Watch()),
                )
            )
            return await run

    result = asyncio.run(main())
    assert result.interrupted
    assert {record.outcome for record in result.records} == {"cancelled"}
    assert len(result.records) >= 3


def test_an_interrupt_before_anything_is_sent_is_an_interrupted_run() -> None:
    async def main() -> LoadResult:
        async with serving(answer) as server:
            run = asyncio.create_task(
                run_load(Target(base_url=server.url, model="fake"), timetable(n=10), seed=0)
            )
            await asyncio.sleep(0)
            await asyncio.sleep(0)
            run.cancel()
            return await run

    result = asyncio.run(main())
    assert (result.interrupted, result.records) == (True, [])


def test_connections_are_not_limited_and_answers_overlap() -> None:
    """None is answered before all are there; were connections limited, the first would wait in
    vain.
    """
    calls, present, all_there = 150, itertools.count(1), asyncio.Event()

    async def together(request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        if next(present) == calls:
            all_there.set()
        await asyncio.wait_for(all_there.wait(), 60)
        return await answer(request, body)

    async def main() -> None:
        async with serving(together) as server:
            result = await run_load(
                Target(base_url=server.url, model="fake"), timetable(n=calls, gap=0.0), seed=0
            )
            assert {r.outcome for r in result.records} == {"completed"}

    asyncio.run(main())


def test_the_collector_is_off_in_a_run_and_back_after_it() -> None:
    seen = []

    async def look(request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        seen.append(gc.isenabled())
        return await answer(request, body)

    load(look)
    assert not any(seen)
    assert gc.isenabled()
    assert gc.get_freeze_count() == 0


def test_progress_sees_every_request_and_the_header_no_key() -> None:
    class Shown:
        counters: Counters

        async def show(self, counters: Counters) -> None:
            self.counters = counters
            await asyncio.Event().wait()

    shown = Shown()
    result, _ = load(progress=shown, api_key="secret")
    assert (shown.counters.sent, shown.counters.completed, shown.counters.other) == (4, 4, 0)
    assert "secret" not in repr(result.header)
    assert result.header.hardware["cores"] >= 1
    assert result.header.configuration["max_tokens"] == 6


def test_every_run_has_a_short_name_of_its_own() -> None:
    """Two runs of one seed beside one another must not share ids of requests."""
    names = {run_prefix() for _ in range(20)}
    assert len(names) == 20
    assert all(re.fullmatch(r"load-[0-9a-f]{8}", name) for name in names)


def test_the_model_is_asked_for_and_a_silent_server_named() -> None:
    async def main() -> tuple[str, ...]:
        async with serving() as server:
            return (await look_at(Target(base_url=server.url, model=""))).models

    assert asyncio.run(main()) == MODELS
    with pytest.raises(LoadError, match="connection refused; is the server up"):
        asyncio.run(look_at(Target(base_url="http://127.0.0.1:9", model="")))


@pytest.mark.parametrize(
    ("headers", "delay"),
    [
        ({"x-kendall-queueing-delay-ms": "12.5"}, 0.0125),
        ({"server-timing": "queue;dur=3.5, service;dur=20"}, 0.0035),
        ({"server-timing": 'cache;desc="x", queue;desc="w";dur=4'}, 0.004),
        ({"server-timing": "service;dur=20"}, None),
        ({"x-kendall-queueing-delay-ms": "soon"}, None),
        ({}, None),
    ],
)
def test_the_delay_is_read_from_either_header(headers: dict[str, str], delay: float | None) -> None:
    assert timing(headers, "queue") == (None if delay is None else pytest.approx(delay))
