"""Bounds before a body is read and after, on virtual time: who is refused, what they are told, and
that each is recorded once.
"""

from __future__ import annotations

import asyncio
import math
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from kendall.queueing.measurement.record import read_run
from kendall.server.admission.settings import OverloadSettings
from tests.server.asgi import Call, call, completion, running
from tests.virtual_time import run_virtual

PATH = "/v1/completions"


def counted(gateway: Any, name: str, **labels: str) -> float:
    return sum(
        sample.value
        for metric in gateway.metrics.registry.collect()
        for sample in metric.samples
        if sample.name == name and labels.items() <= sample.labels.items()
    )


async def full(app: Any, count: int, **fields: Any) -> list[Call]:
    """That many long calls, all in the system."""
    calls = [
        Call(app, "POST", PATH, completion(**({"max_tokens": 500} | fields))) for _ in range(count)
    ]
    await asyncio.sleep(0.001)
    return calls


async def warm(app: Any, count: int = 3) -> None:
    """Services that waits are computed from."""
    for _ in range(count):
        assert (await call(app, "POST", PATH, completion(max_tokens=500))).status == 200


async def leave(calls: list[Call]) -> None:
    for made in calls:
        made.leave()
        await made.task


@pytest.mark.parametrize("status", [429, 503])
def test_a_full_queue_refuses_before_it_reads_and_says_when_there_is_room(status: int) -> None:
    async def main() -> None:
        settings = OverloadSettings(max_num_queued_reqs=3, overload_status=status)
        async with running("single", overload=settings) as (app, gateway):
            await warm(app)
            began = gateway.now()
            calls = await full(app, 3)
            refused = await call(app, "POST", PATH, b"not even JSON", {"x-request-id": "mine-7"})
            error = refused.json()["error"]
            assert (refused.status, error["code"], refused.headers["x-request-id"]) == (
                status,
                "queue_full",
                "mine-7",
            )
            assert error["kendall"]["queue_length"] == error["kendall"]["queue_position"] == 2
            service = 500 * 0.925e-3 + 2.25e-3
            assert int(refused.headers["retry-after-ms"]) == pytest.approx(
                (service - (gateway.now() - began)) * 1e3, abs=2
            )
            assert error["kendall"]["predicted_wait_ms"] == pytest.approx(
                (3 * service - (gateway.now() - began)) * 1e3, abs=5
            )
            assert refused.headers["retry-after"] == "1"
            assert counted(gateway, "kendall_rejections_total", reason="max_num_queued_reqs") == 1
            assert counted(gateway, "kendall_requests_total", outcome="rejected") == 1
            await calls[0].task
            assert (await call(app, "POST", PATH, completion(max_tokens=1))).status == 200
            await leave(calls[1:])

    run_virtual(main())


def test_the_refused_are_not_all_sent_back_to_the_same_place() -> None:
    """Each is told when the next place after those promised before it is free, round and round
    the backlog.
    """

    async def main() -> None:
        async with running("single", overload=OverloadSettings(max_num_queued_reqs=3)) as (app, _):
            await warm(app)
            calls = await full(app, 3)
            refused = [await call(app, "POST", PATH, completion()) for _ in range(4)]
            first, second, third, fourth = (int(made.headers["retry-after-ms"]) for made in refused)
            assert (second - first, third - first) == (
                pytest.approx(465, abs=2),
                pytest.approx(930, abs=2),
            )
            assert fourth == first
            await leave(calls)

    run_virtual(main())


def test_n_counts_n_and_a_call_is_taken_whole_or_not_at_all() -> None:
    async def main() -> None:
        async with running("single", overload=OverloadSettings(max_num_queued_reqs=4)) as (
            app,
            gateway,
        ):
            calls = await full(app, 2)
            refused = await call(app, "POST", PATH, completion(n=3))
            assert (refused.status, refused.json()["error"]["code"]) == (429, "queue_full")
            assert gateway.batcher.unanswered == 2
            assert counted(gateway, "kendall_requests_total", outcome="rejected") == 3
            taken = Call(app, "POST", PATH, completion(n=2, max_tokens=1))
            await leave(calls)
            await taken.task
            assert taken.status == 200

    run_virtual(main())


def test_the_bound_on_waiting_tokens_counts_prompts_that_wait() -> None:
    async def main() -> None:
        async with running("single", overload=OverloadSettings(max_num_queued_tokens=100)) as (
            app,
            gateway,
        ):
            await warm(app)
            calls = await full(app, 3, prompt=[5] * 60)  # one in service, 120 tokens wait
            assert gateway.batcher.waiting_tokens == 120
            refused = await call(app, "POST", PATH, completion())
            assert (refused.status, refused.json()["error"]["code"]) == (429, "queue_full")
            assert counted(gateway, "kendall_queued_tokens") == 120
            assert int(refused.headers["retry-after-ms"]) == pytest.approx(
                464, abs=5
            )  # the next dispatch takes 60 of them
            await leave(calls[:1])
            await asyncio.sleep(0.001)
            assert gateway.batcher.waiting_tokens == 60
            exact = Call(app, "POST", PATH, completion(prompt=[5] * 40, max_tokens=1))
            await asyncio.sleep(0.001)
            assert gateway.batcher.waiting_tokens == 100
            assert (await call(app, "POST", PATH, completion())).status == 429, "at the bound"
            await leave([exact])
            taken = Call(app, "POST", PATH, completion(max_tokens=1))
            await leave(calls[1:])
            await taken.task
            assert taken.status == 200

    run_virtual(main())


def test_every_call_has_one_outcome_and_one_record(tmp_path: Path) -> None:
    """Admitted, rejected before the body is read, rejected after: conservation by records, by
    counters and by the self-checks.
    """

    async def main() -> None:
        settings: dict[str, Any] = {
            "overload": OverloadSettings(max_num_queued_reqs=6),
            "record_file": tmp_path / "run.jsonl",
        }
        async with running("capped:max_batch_size=2", **settings) as (app, gateway):
            calls = []
            for index in range(200):
                calls.append(
                    Call(
                        app,
                        "POST",
                        PATH,
                        completion(n=1 + index % 2, max_tokens=5 + index % 30),
                        {"x-request-id": f"c{index}"},
                    )
                )
                await asyncio.sleep(0.002)
            for made in calls:
                await made.task
            statuses = Counter(made.status for made in calls)
            assert set(statuses) == {200, 429}
            assert min(statuses.values()) > 10
            gateway.flush()
            _, records = read_run(tmp_path / "run.jsonl")
            outcomes = Counter(record.outcome for record in records)
            assert len({record.request_id for record in records}) == len(records)
            assert {record.client_request_id for record in records} == {
                f"c{index}" for index in range(200)
            }
            assert {record.error for record in records if record.outcome == "rejected"} == {
                "queue_full"
            }
            for outcome, count in outcomes.items():
                assert counted(gateway, "kendall_requests_total", outcome=outcome) == count
            assert gateway.arrivals.count == 200, "what clients offered, refused or not"
            gateway.live_model().check()
            assert all(check.holds for check in gateway.live_model().checks)

    run_virtual(main())


@pytest.mark.parametrize(
    ("headers", "fields"), [({"x-llm-d-inference-ttl": "50ms"}, {}), ({}, {"patience": 0.05})]
)
def test_patience_of_a_call_runs_out_while_the_engine_is_busy(
    headers: dict[str, str], fields: dict[str, float]
) -> None:
    async def main() -> None:
        async with running("single", overload=OverloadSettings(overload_status=503)) as (
            app,
            gateway,
        ):
            await warm(app)
            (first,) = await full(app, 1)
            at = gateway.now()
            lost = await call(app, "POST", PATH, completion(**fields), headers)
            assert gateway.now() - at == pytest.approx(0.05)
            error = lost.json()["error"]
            assert (lost.status, error["code"]) == (503, "queue_timeout")
            assert int(lost.headers["retry-after-ms"]) == pytest.approx(
                413, abs=3
            )  # what is left of the service before it
            assert error["kendall"]["predicted_wait_ms"] == pytest.approx(413, abs=3)
            await leave([first])

    run_virtual(main())


def test_admission_by_delay_takes_who_can_be_served_in_time_and_no_more() -> None:
    """Services of 0.465 s, a budget of 1 s: two may wait behind one in service, the third is
    refused; later there is room again.
    """

    async def main() -> None:
        async with running("single", overload=OverloadSettings(slo="p99_queueing_delay=1s")) as (
            app,
            gateway,
        ):
            await warm(app)
            calls = await full(app, 6)
            refused = [made for made in calls if made.status == 429]
            assert len(refused) == 3
            assert {made.json()["error"]["code"] for made in refused} == {"slo_unattainable"}
            assert int(refused[-1].headers["retry-after-ms"]) == pytest.approx(
                (3 * 0.46475 - 1.0) * 1e3, abs=5
            )
            for made in calls:
                await made.task
            delays = [
                float(made.headers["x-kendall-queueing-delay-ms"])
                for made in calls
                if made.status == 200
            ]
            assert len(delays) == 3
            assert max(delays) < 1000
            assert (await call(app, "POST", PATH, completion())).status == 200
            assert counted(gateway, "kendall_rejections_total", reason="slo") == 3

    run_virtual(main())


@pytest.mark.parametrize(
    ("slo", "served"),
    [
        ("p99_sojourn_time=1.2s", 2),  # 0.465 and 0.93 s, the third would take 1.395
        ("mean_sojourn_time<=1.4s", 3),
        ("p90_ttft<=500ms", 2),
        ("p99_service_time=1s", 6),
        ("mean_service_time=400ms", 1),  # who finds the gateway idle
        ("p99.9_itl=0.5ms", 1),
    ],
)
def test_admission_keeps_any_duration_of_the_grammar(slo: str, served: int) -> None:
    """Services of 0.465 s, one at a time; six calls at once."""

    async def main() -> None:
        async with running("single", overload=OverloadSettings(slo=slo)) as (app, _):
            await warm(app)
            calls = await full(app, 6)
            for made in calls:
                await made.task
            answered = [made for made in calls if made.status == 200]
            assert len(answered) == served
            refused = [made.json()["error"] for made in calls if made.status == 429]
            assert {error["code"] for error in refused} <= {"slo_unattainable"}
            assert all("expected at most" in error["message"] for error in refused)

    run_virtual(main())


def test_a_call_names_its_own_budget_for_the_first_token() -> None:
    async def main() -> None:
        async with running("single") as (app, _):
            await warm(app)
            calls = await full(app, 2)
            late = await call(app, "POST", PATH, completion(), {"x-llm-d-slo-ttft-ms": "300"})
            assert (late.status, late.json()["error"]["code"]) == (429, "slo_unattainable")
            patient = Call(app, "POST", PATH, completion(), {"x-llm-d-slo-ttft-ms": "2000"})
            await asyncio.sleep(0.001)
            assert patient.status is None
            await leave(calls)
            await patient.task
            assert patient.status == 200
            bad = await call(app, "POST", PATH, completion(), {"x-llm-d-slo-ttft-ms": "soon"})
            assert (bad.status, bad.json()["error"]["param"]) == (400, "x-llm-d-slo-ttft-ms")

    run_virtual(main())


def test_a_call_may_name_its_budget_where_no_bound_is_set() -> None:
    async def main() -> None:
        unbounded = OverloadSettings(max_num_queued_reqs=None)
        async with running("single", overload=unbounded) as (app, gateway):
            assert not gateway.overload.bounded
            await warm(app)
            calls = await full(app, 2)
            late = await call(app, "POST", PATH, completion(), {"x-llm-d-slo-ttft-ms": "300"})
            assert (late.status, late.json()["error"]["code"]) == (429, "slo_unattainable")
            await leave(calls)

    run_virtual(main())


def test_a_rate_limit_refuses_exactly_what_is_too_fast() -> None:
    async def main() -> None:
        async with running(overload=OverloadSettings(rate_limit=10.0, rate_limit_burst=0.5)) as (
            app,
            gateway,
        ):
            statuses = [
                (await call(app, "POST", PATH, completion(max_tokens=1))).status for _ in range(8)
            ]
            assert statuses[:5] == [200] * 5
            assert statuses[-1] == 429
            refused = await call(app, "POST", PATH, completion())
            assert refused.json()["error"]["code"] == "rate_limit_exceeded"
            await asyncio.sleep(int(refused.headers["retry-after-ms"]) / 1e3 + 1e-6)
            assert (await call(app, "POST", PATH, completion(max_tokens=1))).status == 200
            assert (
                counted(gateway, "kendall_rejections_total", reason="rate_limit")
                == statuses.count(429) + 1
            )

    run_virtual(main())


@pytest.mark.slow
def test_tokens_are_limited_by_what_was_made() -> None:
    async def main() -> None:
        async with running(
            overload=OverloadSettings(rate_limit_tokens=100.0, rate_limit_burst=1.0)
        ) as (app, _):
            assert (
                await call(app, "POST", PATH, completion(max_tokens=400))
            ).status == 200  # 403 tokens of a burst of 100
            refused = await call(app, "POST", PATH, completion())
            assert refused.json()["error"]["code"] == "rate_limit_exceeded"
            assert int(refused.headers["retry-after-ms"]) == pytest.approx(3000, abs=100)

    run_virtual(main())


def test_adaptive_concurrency_bounds_a_queue_that_never_empties() -> None:
    """Twice what the engine serves: the waiting are bounded near the floor, and the engine is
    never without work.
    """

    async def main() -> None:
        async with running(
            "capped:max_batch_size=4", overload=OverloadSettings(adaptive_concurrency=True)
        ) as (app, gateway):
            calls, longest = [], 0
            for _ in range(1500):
                calls.append(Call(app, "POST", PATH, completion(max_tokens=20)))
                await asyncio.sleep(0.003)
                longest = max(longest, gateway.batcher.queue_length)
                assert gateway.batcher.in_service or gateway.now() < 0.1
            for made in calls:
                await made.task
            statuses = Counter(made.status for made in calls)
            assert statuses[200] > 700
            assert statuses[429] > 200
            assert longest <= 24
            assert (
                counted(gateway, "kendall_rejections_total", reason="adaptive_concurrency")
                == statuses[429]
            )

    run_virtual(main())


def test_adaptive_concurrency_admits_its_limit_and_not_one_more() -> None:
    """Before anything was served it is twice what the engine takes: eight."""

    async def main() -> None:
        async with running(
            "capped:max_batch_size=4", overload=OverloadSettings(adaptive_concurrency=True)
        ) as (app, gateway):
            assert counted(gateway, "kendall_concurrency_limit") == 8
            calls = await full(app, 8)
            assert [made.status for made in calls] == [None] * 8
            refused = await call(app, "POST", PATH, completion())
            assert (refused.status, refused.json()["error"]["code"]) == (429, "queue_full")
            await leave(calls[:1])
            pair = await call(app, "POST", PATH, completion(n=2))
            assert pair.status == 429
            (last,) = await full(app, 1)
            assert last.status is None
            assert gateway.batcher.unanswered == 8
            assert counted(gateway, "kendall_rejections_total", reason="adaptive_concurrency") == 3
            await leave([*calls[1:], last])

    run_virtual(main())


def test_the_adaptive_limit_grows_where_it_is_met_and_delays_are_short() -> None:
    """Nine at once, one more than it admits, at a gateway that is idle again each time."""

    async def main() -> None:
        async with running(
            "capped:max_batch_size=4", overload=OverloadSettings(adaptive_concurrency=True)
        ) as (app, gateway):
            statuses = []
            for _ in range(4):
                calls = [Call(app, "POST", PATH, completion(max_tokens=20)) for _ in range(9)]
                for made in calls:
                    await made.task
                statuses.append(Counter(made.status for made in calls)[429])
            assert statuses[0] == 1
            assert statuses[-1] == 0
            assert counted(gateway, "kendall_concurrency_limit") == 9

    run_virtual(main())


def test_a_bound_on_the_queue_admits_exactly_as_many_as_it_says() -> None:
    async def main() -> None:
        async with running("single", overload=OverloadSettings(max_num_queued_reqs=4)) as (
            app,
            gateway,
        ):
            calls = await full(app, 3)
            (whole,) = await full(app, 1)
            assert [made.status for made in [*calls, whole]] == [None] * 4
            assert (await call(app, "POST", PATH, completion())).status == 429
            await leave(calls[:2])
            assert (await call(app, "POST", PATH, completion(n=3))).status == 429
            (pair,) = await full(app, 1, n=2)
            assert pair.status is None
            assert gateway.batcher.unanswered == 4
            await leave([calls[2], whole, pair])

    run_virtual(main())


@pytest.mark.parametrize(("waiting", "status"), [(2, None), (3, 429)])
def test_a_bound_on_waiting_tokens_is_met_when_they_reach_it(
    waiting: int, status: int | None
) -> None:
    """Prompts of 50 tokens and a bound of 150."""

    async def main() -> None:
        async with running("single", overload=OverloadSettings(max_num_queued_tokens=150)) as (
            app,
            gateway,
        ):
            calls = await full(app, 1 + waiting, prompt=[5] * 50)
            assert gateway.batcher.waiting_tokens == 50 * waiting
            (last,) = await full(app, 1)
            assert last.status == status
            await leave([*calls, last])

    run_virtual(main())


def test_priorities_are_served_first_and_aged_ones_are_not_starved() -> None:
    async def main() -> None:
        async with running("single", overload=OverloadSettings(priority_aging=1.0)) as (app, _):
            (first,) = await full(app, 1)
            order: list[str] = []

            def make(name: str, priority: int) -> Call:
                made = Call(app, "POST", PATH, completion(max_tokens=300, priority=priority))
                made.task.add_done_callback(lambda _: order.append(name))
                return made

            calls = [make("old, last class", 3), make("plain", 0)]
            await asyncio.sleep(0.1)
            calls.append(make("urgent", -1))
            for round_ in range(20):  # urgent ones without end
                await asyncio.sleep(0.25)
                calls.append(make(f"urgent {round_}", -1))
            for made in [first, *calls]:
                await made.task
            assert order[0] == "urgent"
            assert order.index("plain") < 6
            assert order.index("old, last class") < len(order) - 3
            beyond = await call(app, "POST", PATH, completion(priority=-1000))
            assert (beyond.status, beyond.json()["error"]["param"]) == (400, "priority")

    run_virtual(main())


def test_without_aging_priorities_change_nothing() -> None:
    async def main() -> None:
        async with running("single") as (app, _):
            (first,) = await full(app, 1)
            late, urgent = (Call(app, "POST", PATH, completion(priority=p)) for p in (5, -1000))
            await asyncio.sleep(0.001)
            await leave([first])
            await late.task
            assert urgent.status is None
            await urgent.task
            assert urgent.status == 200

    run_virtual(main())


def test_a_request_is_told_its_place_and_wait_and_the_account_is_kept() -> None:
    """Certain services: the estimate is the delay; both sums and the ratio say so."""

    async def main() -> None:
        async with running("single") as (app, gateway):
            await warm(app)
            calls = await full(app, 4)
            for place, made in enumerate(calls):
                await made.task
                assert int(made.headers["x-kendall-queue-position"]) == max(0, place - 1)
                estimate, delay = (
                    float(made.headers[name])
                    for name in ("x-kendall-predicted-wait-ms", "x-kendall-queueing-delay-ms")
                )
                assert estimate == pytest.approx(delay, abs=2)
            predicted, observed = (
                counted(gateway, f"kendall_wait_{name}_seconds_total")
                for name in ("predicted", "observed")
            )
            assert observed == pytest.approx(6 * 0.46475, rel=1e-3)
            assert predicted == pytest.approx(observed, rel=0.01)
            assert counted(gateway, "kendall_wait_observed_over_predicted_count") == 3

    run_virtual(main())


def test_estimates_can_be_switched_off() -> None:
    async def main() -> None:
        async with running("single", overload=OverloadSettings(wait_estimates=False)) as (app, _):
            answer = await call(app, "POST", PATH, completion())
            assert not [
                name
                for name in answer.headers
                if name.startswith("x-kendall-q") and name != "x-kendall-queueing-delay-ms"
            ]
            assert "x-kendall-predicted-wait-ms" not in answer.headers

    run_virtual(main())


@pytest.mark.thinned(5)
@pytest.mark.parametrize(
    "policy",
    [
        "single",
        "dynamic",
        "capped:max_batch_size=4",
        "elastic:max_batch_size=4",
        "continuous:max_batch_size=4",
    ],
)
def test_waits_are_told_right_in_the_mean_under_every_policy(policy: str) -> None:
    """No law is known: from services seen, predicted over observed is within 15 % (fixed waits
    for batch mates: test_wait_ahead).
    """

    async def main() -> None:
        async with running(policy, prediction_interval=0) as (app, gateway):
            calls = []
            for index in range(600):
                calls.append(
                    Call(
                        app,
                        "POST",
                        PATH,
                        completion(max_tokens=60, kendall_forced_output_tokens=1 + index * 17 % 50),
                    )
                )
                await asyncio.sleep(
                    (0.03 if policy == "single" else 0.012) * (0.2 if index // 10 % 2 else 1.8)
                )
            for made in calls:
                await made.task
                assert made.status == 200
            predicted, observed = (
                counted(gateway, f"kendall_wait_{name}_seconds_total")
                for name in ("predicted", "observed")
            )
            assert observed > 0.5
            assert predicted == pytest.approx(observed, rel=0.15)
            assert math.isfinite(predicted)

    run_virtual(main())


def test_priorities_are_bounded_under_the_order_in_force_not_that_of_the_start() -> None:
    async def main() -> None:
        async with running("single") as (app, _):
            for policy, status in (("single:order=priority", 400), ("single", 200)):
                changed = await call(app, "PUT", "/admin/policy", {"policy": policy})
                assert changed.status == 200
                beyond = await call(app, "POST", PATH, completion(priority=101))
                assert beyond.status == status, policy

    run_virtual(main())


def test_the_live_model_is_told_which_limit_refused_a_call_and_of_no_other_refusal() -> None:
    """A call once, whatever it asks for; what comes while the gateway drains is no limit's."""

    async def main() -> None:
        settings = OverloadSettings(max_num_queued_reqs=3)
        async with running("single", overload=settings) as (app, gateway):
            told: list[str] = []
            gateway.live_model().on_refused = told.append  # type: ignore[method-assign]
            calls = await full(app, 3)
            assert (await call(app, "POST", PATH, completion())).status == 429
            assert told == ["max_num_queued_reqs"]
            await leave(calls[2:])
            assert (await call(app, "POST", PATH, completion(n=2))).status == 429
            assert told == ["max_num_queued_reqs"] * 2
            gateway.batcher.close()
            gateway.lifecycle.drain()
            assert (await call(app, "POST", PATH, completion())).status == 503
            assert len(told) == 2
            await leave(calls[:2])

    run_virtual(main())
