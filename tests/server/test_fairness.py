"""Under vtc service is shared among the flows that ask for it: in the simulator, and in the gateway
on virtual time.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from hashlib import sha256
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kendall.policies import Policy, Request, Waiting, parse_policy, waiting_queues
from kendall.policies.flow_counters import FlowCounters
from kendall.policies.orders.fair import VirtualTokens
from kendall.queueing.latency.law import LatencyModel
from kendall.queueing.measurement.record import Record
from kendall.queueing.simulation.reference import Job, SimulatedEngine, simulate_trace
from kendall.server.admission.settings import OverloadSettings
from kendall.server.http.api.checked_call import flow_of
from kendall.server.security.keys import read_keys
from kendall.server.security.settings import SecuritySettings
from tests.server.asgi import Call, call, completion, running
from tests.server.harness import Collector, replay
from tests.virtual_time import run_virtual

LAW = LatencyModel(k1=1e-3, k2=5e-3, k3=1e-4, k4=2e-3, kp=1e-5, cv=0.2, turnaround=1e-3)
MEMORY = 120  # tokens that fit in service, prompts and limits
FLOWS = ("", "a", "b")
POLICIES = (
    "single",
    "continuous",
    "continuous:max_batch_size=2",
    "capped:max_batch_size=4",
    "dynamic",
    "elastic:max_batch_size=3",
    "fixed:batch_size=3,max_wait=0.05",
)
Trace = list[tuple[Request, int]]


class Watched(FlowCounters):
    """Keeps what is charged to whom, and from when to when each flow waits."""

    log: list[tuple[str, str, float]]

    def join(self, flow: str) -> None:
        if flow not in self._waiting:
            self.log.append(("begins", flow, 0.0))
        super().join(flow)

    def leave(self, flow: str) -> None:
        super().leave(flow)
        if flow not in self._waiting:
            self.log.append(("ends", flow, 0.0))

    def _charge(self, flow: str, virtual_tokens: float) -> None:
        self.log.append(("charge", flow, virtual_tokens))
        super()._charge(flow, virtual_tokens)


@contextmanager
def watched() -> Iterator[list[tuple[str, str, float]]]:
    log: list[tuple[str, str, float]] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Watched, "log", log, raising=False)
        patch.setattr(waiting_queues, "FlowCounters", Watched)
        yield log


def largest_difference(log: Sequence[tuple[str, str, float]]) -> float:
    """Of the service of two flows between any two instants at which both waited all the time."""
    largest = 0.0
    for one, other in itertools.combinations(sorted({flow for _, flow, _ in log}), 2):
        waits: set[str] = set()
        ahead, low, high = 0.0, 0.0, 0.0  # since both wait
        for kind, flow, amount in log:
            if flow not in (one, other):
                continue
            if kind == "charge":
                ahead += amount if flow == one else -amount
            else:
                (waits.add if kind == "begins" else waits.discard)(flow)
                if kind == "begins":
                    low = high = ahead
            if len(waits) == 2:
                low, high = min(low, ahead), max(high, ahead)
                largest = max(largest, high - low)
    return largest


@st.composite
def traces(draw: st.DrawFn) -> Trace:
    """Bursts and pauses of three flows; prompts and limits from the smallest to what fits alone."""
    rows = draw(
        st.lists(
            st.tuples(
                st.sampled_from(FLOWS),
                st.sampled_from([0.0, 0.001, 0.03, 1.0]),
                st.sampled_from([1, 5, MEMORY // 2]),
                st.sampled_from([1, 10, MEMORY // 2]),
                st.floats(0.0, 1.0),
                st.integers(1, 6),
            ),
            min_size=1,
            max_size=40,
        )
    )
    jobs: Trace = []
    at = 0.1
    for flow, gap, prompt, limit, share, copies in rows:
        at += gap
        for _ in range(copies):
            request = Request(
                id=f"r{len(jobs)}x",
                arrived_at=at,
                prompt_tokens=prompt,
                max_output_tokens=limit,
                flow=flow,
            )
            jobs.append((request, max(1, round(share * limit))))
    return jobs


weights = st.sampled_from([(1.0, 2.0), (1.0, 1.0), (0.0, 1.0), (3.0, 1.0), (1.0, 0.0)])


def fair(policy: str, prompt_weight: float, output_weight: float) -> Policy:
    keys = f"order=vtc,prompt_weight={prompt_weight:g},output_weight={output_weight:g}"
    return parse_policy(f"{policy}{',' if ':' in policy else ':'}{keys}")


def bound(jobs: Trace, prompt_weight: float, output_weight: float, servers: int) -> float:
    """2 max(w_p x the longest prompt, w_q x the tokens that fit in service). Where a prompt's
    token weighs more than one made, those that fit weigh as much.
    """
    longest = max(request.prompt_tokens for request, _ in jobs)
    dearest = max(prompt_weight, output_weight)
    return 2 * max(prompt_weight * longest, dearest * MEMORY * servers)


def leaving(jobs: Trace) -> dict[str, float]:
    """The clients of some requests go after a while."""
    return {
        request.id: request.arrived_at + 0.01 + 0.02 * (place % 5)
        for place, (request, _) in enumerate(jobs)
        if place % 4 == 3
    }


@given(traces(), st.sampled_from(POLICIES), weights, st.integers(1, 2))
def test_two_flows_that_wait_get_the_same_service_in_the_simulator(
    jobs: Trace, policy: str, both: tuple[float, float], servers: int
) -> None:
    engine = SimulatedEngine(LAW, 64, max_context_tokens=MEMORY)
    with watched() as log:
        records = simulate_trace(
            fair(policy, *both),
            [Job(request, tokens) for request, tokens in jobs],
            engine,
            [np.random.default_rng(place) for place in range(servers)],
            cancellations=leaving(jobs),
        )
    assert len(records) == len(jobs)
    assert largest_difference(log) <= bound(jobs, *both, servers) + 1e-9
    charged = sum(amount for kind, _, amount in log if kind == "charge")
    assert charged == pytest.approx(
        sum(
            both[0] * (record.prompt_tokens or 0) + both[1] * (record.output_tokens or 0)
            for record in records
            if record.dispatched_at is not None
        )
    )


@settings(max_examples=25)
@given(traces(), st.sampled_from(POLICIES), weights, st.integers(1, 2))
def test_and_in_the_gateway(
    jobs: Trace, policy: str, both: tuple[float, float], servers: int
) -> None:
    with watched() as log:
        records = run_virtual(
            replay(
                fair(policy, *both),
                jobs,
                LAW,
                servers=servers,
                cancellations=leaving(jobs),
                kv_cache_tokens=MEMORY,
            )
        )
    assert len(records) == len(jobs)
    assert largest_difference(log) <= bound(jobs, *both, servers) + 1e-9


def test_the_measure_sees_a_difference() -> None:
    """While both wait, and not before; of what is charged after."""
    log = [("begins", "a", 0.0), ("charge", "a", 50.0), ("begins", "b", 0.0)]
    assert largest_difference(log) == 0.0
    log += [("charge", "a", 5.0), ("charge", "b", 7.0), ("charge", "b", 4.0)]
    assert largest_difference(log) == 11.0
    log += [("charge", "a", 20.0), ("ends", "b", 0.0), ("charge", "a", 90.0)]
    assert largest_difference(log) == 20.0
    log += [("begins", "b", 0.0), ("charge", "b", 12.0)]
    assert largest_difference(log) == 20.0


def test_first_come_first_served_exceeds_the_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same counters, and an order that does not look at them."""
    jobs = [
        (request._replace(flow="heavy" if place < 40 else "other"), tokens)
        for place, (request, tokens) in enumerate(heavy_and_light(80)[:80])
    ]
    differences = []
    for blind in (False, True):
        if blind:
            monkeypatch.setattr(VirtualTokens, "_ranked", lambda _, waiting, __: in_turn(waiting))
        with watched() as log:
            run("single:order=vtc", jobs)
        differences.append(largest_difference(log))
    assert differences[0] <= 2 * 2.0 * 30 < 1000 < differences[1]


def in_turn(waiting: Sequence[Waiting]) -> list[tuple[float, int]]:
    return [(0.0, place) for place in range(len(waiting))]


def heavy_and_light(count: int = 60) -> Trace:
    """One flow has all its requests at once; the other asks for one now and then, which takes as
    long.
    """

    def row(name: str, at: float, flow: str) -> tuple[Request, int]:
        request = Request(id=name, arrived_at=at, prompt_tokens=10, max_output_tokens=20, flow=flow)
        return request, 20

    heavy = [row(f"h{place}h", 0.1, "heavy") for place in range(count)]
    return heavy + [row(f"l{place}l", 0.2 + 0.25 * place, "light") for place in range(8)]


def delays(records: Sequence[Record], flow: str) -> list[float]:
    return [record.queueing_delay or 0.0 for record in records if record.flow == flow]


def run(policy: str, jobs: Trace, **options: Any) -> list[Record]:
    return run_virtual(replay(parse_policy(policy), jobs, LAW, **options))


def test_a_light_flow_is_not_starved_by_a_heavy_one() -> None:
    """It waits for what is in service and one request before it, as its counter is then the
    lowest; first come, first served, it waits for all.
    """
    jobs = heavy_and_light()
    records = run("single:order=vtc", jobs)
    longest = max(record.service_time or 0.0 for record in records)
    assert max(delays(records, "light")) < 2 * longest
    first_come = run("single", jobs)
    assert min(delays(first_come, "light")) > 5 * longest
    assert sum(delays(records, "heavy")) < 1.3 * sum(delays(first_come, "heavy"))
    gap = max(record.released_at or 0.0 for record in records) - max(
        record.released_at or 0.0 for record in first_come
    )
    assert abs(gap) < longest, "the server is not left idle for it"


def test_an_idle_flow_banks_no_credit() -> None:
    """It asked for nothing while the other had 40 requests; then each has ten at once. They take
    turns: the counter of the newcomer is lifted.
    """
    jobs = heavy_and_light(40)[:40]
    late = [
        (
            Request(
                id=f"{flow}{place}x",
                arrived_at=10.0,
                prompt_tokens=10,
                max_output_tokens=20,
                flow=flow,
            ),
            20,
        )
        for place in range(10)
        for flow in ("heavy", "new")
    ]
    records = run("single:order=vtc", [*jobs, *late])
    turns = sorted(
        (record for record in records if record.arrived_at == 10.0),
        key=lambda record: record.dispatched_at or 0.0,
    )
    flows = [record.flow for record in turns]
    assert abs(flows[:10].count("new") - 5) <= 1
    assert all(flows[place : place + 4].count("new") >= 1 for place in range(17))
    assert all(flows[place : place + 4].count("heavy") >= 1 for place in range(17))


def test_one_flow_is_served_first_come_first_served() -> None:
    jobs = [(request, tokens) for request, tokens in heavy_and_light(20) if request.flow == "heavy"]
    for policy in ("single", "continuous:max_batch_size=3", "capped:max_batch_size=4"):
        fair_one = run(f"{policy}{',' if ':' in policy else ':'}order=vtc", jobs)
        first_come = run(policy, jobs)
        instants = [
            {record.request_id: record.dispatched_at for record in records}
            for records in (fair_one, first_come)
        ]
        assert instants[0] == instants[1]


def test_a_switch_begins_fresh_counters_with_those_who_wait() -> None:
    """What the heavy flow had before does not count; from then on they take turns."""
    jobs = heavy_and_light(40)[:40] + [
        (
            Request(
                id=f"n{place}n", arrived_at=0.5, prompt_tokens=10, max_output_tokens=20, flow="new"
            ),
            20,
        )
        for place in range(10)
    ]
    switches = [(0.6, parse_policy("single:order=vtc")), (1.0, parse_policy("single"))]
    records = run("single", jobs, switches=switches)
    by_policy = {
        text: [
            record.flow
            for record in sorted(records, key=lambda record: record.dispatched_at or 0.0)
            if record.policy == text and (record.epoch == 1 or text == "single")
        ]
        for text in ("single", "single:order=vtc")
    }
    turns = by_policy["single:order=vtc"]
    assert len(turns) >= 6
    assert abs(turns.count("new") - turns.count("heavy")) <= 1
    assert {record.outcome for record in records} == {"completed"}
    last = [record.flow for record in records if record.epoch == 2]
    assert last == sorted(last), "first come first served again: heavy came before new"


# whose a call is


ID = b"x-llm-d-inference-fairness-id"


@pytest.mark.parametrize(
    ("value", "caller", "keys", "flow"),
    [
        (None, "", 0, ""),
        (b"tenant-1", "", 0, "tenant-1"),
        (b"a/b@c", "k1", 1, "a/b@c"),
        (None, "k1", 1, "k1"),
        (b"", "k1", 1, "k1"),
        (b"k2", "k1", 2, "k1"),  # several keys: nobody takes another's turn, nor a new one
        (None, "k1", 2, "k1"),
        (b"x" * 128, "", 0, "x" * 128),
        (b"x" * 129, "", 0, sha256(b"x" * 129).hexdigest()[:16]),
        (b"two words", "", 0, sha256(b"two words").hexdigest()[:16]),
        (b"\xe9", "", 0, sha256(b"\xe9").hexdigest()[:16]),
    ],
)
def test_the_flow_of_a_call(value: bytes | None, caller: str, keys: int, flow: str) -> None:
    headers = [(b"x-request-id", b"other")] + ([] if value is None else [(ID, value)])
    assert flow_of(headers, caller, keys) == flow


@pytest.mark.parametrize("keys", [1, 2])
def test_a_call_counts_to_its_id_or_with_several_keys_to_its_key(keys: int) -> None:
    texts = ["sk-client-0123456789", "sk-other-0123456789"][:keys]
    known = read_keys("--api-key", texts, None)

    async def main() -> None:
        collector = Collector()
        security = SecuritySettings(api_keys=known)
        async with running("single:order=vtc", security=security) as (app, gateway):
            gateway.batcher.observers.add(collector)
            for text in texts:
                headers = {"authorization": f"Bearer {text}", ID.decode(): "t7"}
                answer = await call(app, "POST", "/v1/completions", completion(n=2), headers)
                assert answer.status == 200
            counters = gateway.batcher.counters
            assert counters is not None
            had = {known[0].name, known[1].name} if keys == 2 else {"t7"}
            assert set(counters.virtual_tokens) == had
            assert counters.virtual_tokens.popitem()[1] == (3 + 2 * 8) * (4 if keys == 2 else 2)
        flows = [record.flow for record in collector.records]
        names = [key.name for key in known]
        assert flows == ([names[0]] * 2 + [names[1]] * 2 if keys == 2 else ["t7"] * 2)
        assert all(text not in repr(collector.records) for text in texts)

    run_virtual(main())


def test_a_call_that_is_refused_is_recorded_with_its_flow_and_its_size() -> None:
    async def main() -> None:
        collector = Collector()
        overload = OverloadSettings(max_num_queued_reqs=2)
        async with running("single:order=vtc", overload=overload) as (app, gateway):
            gateway.batcher.observers.add(collector)
            busy = Call(app, "POST", "/v1/completions", completion(max_tokens=500))
            await asyncio.sleep(0.001)
            for named in ({ID.decode(): "t7", "x-request-id": "mine"}, {}):
                body = completion(n=2, max_tokens=9)
                assert (await call(app, "POST", "/v1/completions", body, named)).status == 429
            busy.leave()
            await busy.task
        refused = [record for record in collector.records if record.outcome == "rejected"]
        assert [(record.flow, record.client_request_id) for record in refused] == [
            *[("t7", "mine")] * 2,
            *[(None, None)] * 2,
        ]
        assert {(record.prompt_tokens, record.max_output_tokens) for record in refused} == {(3, 9)}

    run_virtual(main())
