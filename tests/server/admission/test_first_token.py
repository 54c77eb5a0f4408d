"""Admission by the time to first token, on virtual time: a wrong estimate shuts nobody out, and
what makes it wrong is left out.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import Any

import pytest

from kendall.queueing.control.wait_ahead import Pace, SlotService, Wait
from kendall.queueing.latency.law import parse_law
from kendall.queueing.measurement.record import Record
from kendall.server.admission.limits_in_force import PolicyChange
from kendall.server.admission.objectives import AdmissionObjective
from kendall.server.admission.service_seen import HALF_LIFE, Pauses, RecentMoments, ServiceSeen
from kendall.server.admission.settings import DelayTarget, OverloadSettings
from kendall.server.engines.emulated import EmulatedEngine
from kendall.server.gateway import Gateway
from kendall.server.http.app import create_app
from kendall.server.settings import Settings
from kendall.server.supervision.settings import SupervisionSettings
from tests.server.admission.test_admission import counted, full, leave, warm
from tests.server.asgi import LAW, Call, call, completion, running
from tests.virtual_time import run_virtual

PATH = "/v1/completions"
SOON = {"x-llm-d-slo-ttft-ms": "500"}


class Pausing(EmulatedEngine):
    """Stops for a while, as a process does that gets SIGSTOP and SIGCONT."""

    async def pause(self, seconds: float) -> None:
        for server in self._servers:
            if server._timer is not None:
                server._timer.cancel()
                server._timer = None
            server._schedule = lambda: None  # type: ignore[method-assign]
        await asyncio.sleep(seconds)
        for server in self._servers:
            del server._schedule
            server._schedule()


@asynccontextmanager
async def pausing(
    policy: str = "continuous:max_batch_size=4", **settings: Any
) -> AsyncIterator[tuple[Any, Gateway, Pausing]]:
    """A gateway whose engine can be paused; without a watch for stuck engines, which would
    replace it.
    """
    engine = Pausing(parse_law(LAW))
    fixed: dict[str, Any] = {
        "model": "tiny",
        "served_model_name": "tiny",
        "prediction_interval": 0,
        "allow_forced_lengths": True,
    }
    fixed["supervision"] = SupervisionSettings(stuck_timeout=0)
    gateway = Gateway(Settings(policy=policy, **(fixed | settings)), engine, parse_law(LAW))
    ready = asyncio.Event()
    app = create_app(gateway, on_ready=lambda _: ready.set())
    async with app.router.lifespan_context(app):
        await ready.wait()
        yield app, gateway, engine


async def statuses(app: Any, count: int) -> set[int | None]:
    """Of calls one after the other, each with a limit on its time to first token."""
    return {(await call(app, "POST", PATH, completion(), SOON)).status for _ in range(count)}


async def paused_calls(app: Any, engine: Pausing, count: int, seconds: float = 4.0) -> None:
    """So many calls whose first token a pause holds back."""
    calls = [Call(app, "POST", PATH, completion()) for _ in range(count)]
    await asyncio.sleep(1e-4)
    await engine.pause(seconds)
    for made in calls:
        await made.task
        assert made.status == 200


@pytest.mark.parametrize(
    "policy", ["continuous:max_batch_size=4", "single", "capped:max_batch_size=4"]
)
@pytest.mark.parametrize("before", [0, 5])
def test_after_a_pause_an_idle_gateway_takes_every_call(policy: str, before: int) -> None:
    """Even if the pause is all that it has seen: 40 of 40 were refused, for ever."""

    async def main() -> None:
        async with pausing(policy) as (app, _, engine):
            await warm(app, before)
            await paused_calls(app, engine, 1)
            assert await statuses(app, 40) == {200}

    run_virtual(main())


def test_after_a_change_of_the_token_limit_an_idle_gateway_takes_every_call() -> None:
    async def main() -> None:
        async with pausing() as (app, gateway, engine):
            await paused_calls(app, engine, 4)
            gateway.limits.change(PolicyChange(max_output_tokens=50))
            assert await statuses(app, 40) == {200}

    run_virtual(main())


def test_a_change_is_logged_with_what_is_in_force_then(caplog: pytest.LogCaptureFixture) -> None:
    async def main() -> None:
        async with pausing() as (_, gateway, _):
            with caplog.at_level(logging.INFO, "kendall"):
                gateway.limits.change(PolicyChange(max_output_tokens=50, patience=2.5))
                gateway.limits.change(PolicyChange(max_output_tokens=None))

    run_virtual(main())
    said = [text.partition(": ")[2] for text in caplog.messages if text.startswith("epoch ")]
    policy = "policy continuous:max_batch_size=4"
    assert said == [
        f"{policy}, max_output_tokens 50, patience 2.5 s",
        f"{policy}, max_output_tokens none, patience 2.5 s",
    ]


def test_a_pause_changes_no_estimate_once_services_are_known() -> None:
    """All slots but one are taken, so that the estimate decides; it is what it was before the
    pause.
    """

    async def main() -> None:
        async with pausing() as (app, gateway, engine):
            await warm(app, 5)
            assert gateway.overload.waits is not None
            known = gateway.overload.waits.first_token()
            await paused_calls(app, engine, 4)
            assert gateway.overload.waits.first_token() == known < 0.01
            held = await full(app, 3)
            assert (await call(app, "POST", PATH, completion(), SOON)).status == 200
            await leave(held)

    run_virtual(main())


def test_the_refusal_names_the_first_token_and_the_client_comes_back_when_it_is_told_to() -> None:
    """One is in service, and the only service seen was a pause: no wait is short enough. So it
    is told when the gateway will be idle.
    """

    async def main() -> None:
        async with pausing() as (app, gateway, engine):
            await paused_calls(app, engine, 1)
            (held,) = await full(app, 1)
            began = gateway.now()
            refused = await call(app, "POST", PATH, completion(), SOON)
            error = refused.json()["error"]
            assert (refused.status, error["code"], error["param"]) == (
                429,
                "slo_unattainable",
                "x-llm-d-slo-ttft-ms",
            )
            assert "the predicted p90 of the time to first token is 4" in error["message"]
            assert "expected at most 0.5 s" in error["message"]
            assert "-" not in error["message"], "no negative time"
            after = int(refused.headers["retry-after-ms"]) / 1e3
            assert 0 < after <= 4.1
            await asyncio.sleep(max(0.0, began + after - gateway.now()))
            assert held.task.done(), "the gateway is idle again"
            assert (await call(app, "POST", PATH, completion(), SOON)).status == 200
            assert counted(gateway, "kendall_rejections_total", reason="slo") == 1

    run_virtual(main())


@pytest.mark.parametrize(
    "policy", ["continuous:max_batch_size=4", "single", "capped:max_batch_size=4"]
)
def test_where_no_wait_is_short_enough_the_client_is_told_when_the_gateway_is_idle(
    policy: str,
) -> None:
    async def main() -> None:
        async with running(policy) as (app, gateway):
            await warm(app, 5)
            (held,) = await full(app, 1)
            began = gateway.now()
            refused = await call(app, "POST", PATH, completion(), {"x-llm-d-slo-ttft-ms": "1"})
            assert refused.status == 429
            after = int(refused.headers["retry-after-ms"]) / 1e3
            assert after == pytest.approx(0.465, abs=0.01)
            await asyncio.sleep(began + after - gateway.now())
            assert held.task.done()
            assert (
                await call(app, "POST", PATH, completion(), {"x-llm-d-slo-ttft-ms": "1"})
            ).status == 200

    run_virtual(main())


def test_what_one_call_corrects_the_next_may_use() -> None:
    """After the only service seen was a pause, a few services in an idle gateway make room for
    calls beside others.
    """

    async def main() -> None:
        async with pausing() as (app, _, engine):
            await paused_calls(app, engine, 1)
            refused = 0
            for _ in range(60):
                pair = [Call(app, "POST", PATH, completion(), SOON) for _ in range(2)]
                for made in pair:
                    await made.task
                assert pair[0].status == 200
                refused += pair[1].status == 429
            assert 0 < refused < 50
            assert pair[1].status == 200

    run_virtual(main())


@pytest.mark.parametrize("slo", ["p99_queueing_delay=10ms", "mean_queueing_delay=10ms"])
def test_an_idle_gateway_admits_a_call_that_misses_the_operators_objective_by_itself(
    slo: str,
) -> None:
    """Eight sequences under `single`: the last one waits for seven services. Beside another call
    they are refused.
    """

    async def main() -> None:
        async with running("single", overload=OverloadSettings(slo=slo)) as (app, _):
            await warm(app)
            made = Call(app, "POST", PATH, completion(n=8))
            await asyncio.sleep(0.001)
            assert (await call(app, "POST", PATH, completion(n=8))).status == 429
            await made.task
            assert made.status == 200

    run_virtual(main())


def test_without_estimates_a_refusal_says_when_to_come_back_and_no_more() -> None:
    async def main() -> None:
        async with running(
            "single", overload=OverloadSettings(max_num_queued_reqs=1, wait_estimates=False)
        ) as (app, _):
            await warm(app)
            held = await full(app, 1)
            refused = await call(app, "POST", PATH, completion())
            assert "predicted_wait_ms" not in refused.json()["error"]["kendall"]
            assert int(refused.headers["retry-after-ms"]) > 100
            await held[0].task
            assert "x-kendall-queue-position" not in held[0].headers

    run_virtual(main())


def test_an_objective_tells_the_wait_that_must_pass() -> None:
    wait = Wait(2.0)
    for objective, kept, after in [
        (AdmissionObjective(DelayTarget(3.0, 0.9)), True, 0.0),
        (AdmissionObjective(DelayTarget(1.5, None)), False, 0.5),
        (AdmissionObjective(DelayTarget(1.0, 0.9, "time_to_first_token"), Wait(0.25)), False, 1.25),
        (
            AdmissionObjective(DelayTarget(1.0, 0.9, "time_to_first_token"), Wait(2.0)),
            False,
            math.inf,
        ),
        (AdmissionObjective(DelayTarget(3.0, 0.9, "sojourn_time"), Wait(1.5)), False, 0.5),
        (AdmissionObjective(DelayTarget(3.0, 0.9, "sojourn_time"), Wait(1.0)), True, 0.0),
        (AdmissionObjective(DelayTarget(1.0, 0.9, "service_time"), Wait(0.9)), True, 1.0),
        (AdmissionObjective(DelayTarget(1.0, 0.9, "service_time"), Wait(1.1)), False, math.inf),
    ]:
        assert objective.kept(wait) is kept
        assert objective.seconds_until_kept(wait) == after or kept


def test_a_service_across_a_restart_is_left_out() -> None:
    seen = ServiceSeen()
    for number in range(5):
        seen.on_record(record(number, 0.1), number + 1.0, somebody_waits=False)
    seen.on_record(record(9.0, 0.3, interruptions=1), 9.3, somebody_waits=False)
    slots = seen.slots(4)
    assert slots is not None
    assert (slots.first_token, slots.scv) == (pytest.approx(0.1), pytest.approx(0.0))


@pytest.mark.parametrize(
    ("took", "interruptions", "preemptions", "mean"),
    [(0.3, 0, 0, 0.147), (0.3, 1, 0, 0.1), (0.3, 0, 1, 0.1), (6.0, 0, 0, 0.1)],
)
def test_a_batch_across_a_restart_or_a_pause_is_left_out(
    took: float, interruptions: int, preemptions: int, mean: float
) -> None:
    seen = ServiceSeen()
    for number in range(5):
        serve_batch(seen, float(number), 0.1, 0)
    serve_batch(seen, 9.0, took, interruptions, preemptions)
    batches = seen.batches(4, 1)
    assert batches is not None
    assert batches.means == (pytest.approx(mean, abs=0.01),)


def test_the_pace_is_seen_of_answers_of_several_tokens_that_nobody_interrupted() -> None:
    """A first token after 0.3 s, then one each 0.1 s; one that was preempted for 9 s in between
    says nothing but how long it was served.
    """
    seen = ServiceSeen()
    assert seen.pace is None
    seen.on_record(record(1.0, 0.3), 1.3, somebody_waits=False)
    assert seen.pace is None, "of one token"
    more = {"last_token_at": 2.8, "output_tokens": 6, "service_time": 0.8}
    seen.on_record(record(2.0, 0.3, **more), 2.8, somebody_waits=False)
    before = {"preemptions": 1, "last_token_at": 19.0, "output_tokens": 6, "service_time": 0.9}
    seen.on_record(record(12.0, -1.0, **before), 19.0, somebody_waits=False)
    pace = Pace(pytest.approx(0.2), pytest.approx(0.1))  # type: ignore[arg-type]
    assert seen.pace == pace
    slots = seen.slots(1)
    assert slots is not None
    assert slots.pace == pace
    assert 1 / slots.throughput == pytest.approx(2 / 3, abs=0.05)
    serve_batch(seen, 20.0, 0.3, 0)
    one, two = seen.batches(1, 1), seen.batches(2, 1)
    assert one is not None
    assert two is not None
    assert (one.pace is not None, two.pace) == (True, None)


def serve_batch(
    seen: ServiceSeen, began: float, took: float, interruptions: int, preemptions: int = 0
) -> None:
    """Of two requests of one token."""
    detector = SimpleNamespace(output_tokens=1)
    member = SimpleNamespace(
        at=SimpleNamespace(first_token=began + took),
        stop_detector=detector,
        interruptions=interruptions,
        preemptions=preemptions,
    )
    policy = SimpleNamespace(joins_running=False)
    batch: Any = SimpleNamespace(
        policy_text="", policy=policy, server_id=0, dispatched_at=began, sequences=[member, member]
    )
    seen.on_dispatch(batch)
    seen.on_idle(0, began + took)


def record(dispatched_at: float, first_token: float, **fields: Any) -> Record:
    at = dispatched_at + first_token
    times = {
        "dispatched_at": dispatched_at,
        "first_token_at": at,
        "last_token_at": at,
        "service_time": first_token,
        "output_tokens": 1,
    }
    return Record(request_id="r", outcome="completed", policy="", **(times | fields))


def test_a_pause_is_left_out_however_many_it_held_up_and_a_slower_engine_is_not() -> None:
    pauses = Pauses()
    now = 0.0
    for _ in range(20):
        assert not pauses.lengthened(now, now + 0.1, None, 1, now + 0.1)
        now += 0.1
    assert all(
        pauses.lengthened(now, now + 5.0, None, 1, now + 5.0 + late)
        for late in (0.0, 0.1, 0.2, 0.3)
    ), "one pause, four services"
    now += 6.0
    assert not pauses.lengthened(now, now + 0.1, None, 1, now + 0.1)
    left_out = 0
    for _ in range(5):
        now += 5.0
        left_out += pauses.lengthened(now, now + 5.0, None, 1, now + 5.0)
    assert 1 <= left_out <= 2, "the third one in a row is how fast it is"
    assert pauses.first_token.mean > 0.3


def test_a_pause_between_tokens_is_seen_and_a_long_answer_is_none() -> None:
    pauses = Pauses()
    for start in range(10):
        assert not pauses.lengthened(start, start + 0.1, start + 0.2, 11, start + 0.2)
    assert not pauses.lengthened(20.0, 20.1, 60.1, 4001, 60.1), "long, at the usual pace"
    assert pauses.lengthened(70.0, 70.1, 74.2, 11, 74.2)


def test_gaps_between_departures_age_with_time() -> None:
    """One slot, first twice a second for half a minute, then after a long silence once a second:
    the second pace counts.
    """
    seen = ServiceSeen()

    def depart(began: float, gap: float, count: int) -> None:
        for number in range(count):
            now = began + number * gap
            seen.on_record(record(now - 0.1, 0.1), now, somebody_waits=number < count - 1)

    depart(0.5, 0.5, 60)
    before = seen.slots(1)
    assert before is not None
    assert before.throughput == pytest.approx(2.0)
    depart(30.0 + 10 * HALF_LIFE, 1.0, 4)
    after = seen.slots(1)
    assert after is not None
    assert after.throughput == pytest.approx(1.0, rel=0.02), (
        "60 gaps of before weigh less than one of now"
    )


def test_evidence_ages_and_a_silence_alone_changes_nothing() -> None:
    moments = RecentMoments(0.95)
    for at in range(100):
        moments.add(4.0, float(at))
    assert moments.mean == pytest.approx(4.0)
    moments.add(0.0, 99.0 + 10 * HALF_LIFE)
    assert moments.mean < 0.1, "one new observation outweighs all that is old"


def test_one_batch_is_enough_to_know_the_first_token() -> None:
    seen = ServiceSeen()
    assert seen.first_token is None
    serve_batch(seen, 1.0, 0.25, 0)
    assert seen.first_token == pytest.approx(0.25)
    batches = seen.batches(4, 1)
    assert batches is not None
    assert batches.first_token == pytest.approx(0.25)


def test_a_calibration_is_no_gap_between_departures() -> None:
    """A slot is as fast after it as before it."""

    async def main() -> None:
        async with running("continuous:max_batch_size=1") as (app, gateway):
            calls = [Call(app, "POST", PATH, completion(max_tokens=20)) for _ in range(8)]
            await calls[3].task
            asked = {"max_batch_size": 2, "max_output_tokens": 64, "repeats": 2}
            began = gateway.now()
            assert (await call(app, "POST", "/admin/calibrate", asked)).status == 200
            assert gateway.now() - began > 0.5
            waits = gateway.overload.waits
            assert waits is not None
            await asyncio.gather(*(made.task for made in calls))
            service = waits.service()
            assert isinstance(service, SlotService)
            assert service.throughput == pytest.approx(1 / (20 * 0.925e-3 + 2.25e-3), rel=0.1)

    run_virtual(main())


@pytest.mark.slow
def test_the_state_says_where_waits_come_from() -> None:
    async def main() -> None:
        async with pausing() as (_, gateway, _):
            assert gateway.overload.state()["wait_source"] == "services seen"
            gateway.overload.waits = None
            assert gateway.overload.state()["wait_source"] is None

    run_virtual(main())
