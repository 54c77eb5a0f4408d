"""The simulator: hand-made traces, conservation, Little's law, switches, cancellations,
patience, and agreement with the exact delay.
"""

import dataclasses
import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kendall.policies import Request, Waiting, parse_policy
from kendall.policies.text import SpecError
from kendall.policies.waiting_queues import WaitingQueue
from kendall.queueing.distributions.token_distribution import parse_distribution
from kendall.queueing.errors import PredictionError
from kendall.queueing.latency.law import LatencyModel
from kendall.queueing.measurement.record import Record
from kendall.queueing.prediction import largest_stable_rate, predict
from kendall.queueing.queue import Queue
from kendall.queueing.simulation.experiment import check_draws, draw_jobs, simulate_model
from kendall.queueing.simulation.fast import Trace, replay
from kendall.queueing.simulation.reference import Job, SimulatedEngine, simulate_trace

LAW = LatencyModel(k1=0.3e-3, k2=1.4e-3, k3=25e-6, k4=0.92e-3, cv=0.12, turnaround=1.55e-3)
SECOND = LatencyModel(k4=1.0)  # one second per step, whatever is in it
EVERY_SECOND = SimulatedEngine(SECOND)
UNIFORM = parse_distribution("uniform:low=1,high=32")
POLICIES = [
    "single",
    "dynamic",
    "fixed:batch_size=4",
    "fixed:batch_size=4,max_wait=0.02",
    "capped:max_batch_size=8",
    "elastic",
    "continuous",
]


def jobs(*arrivals_and_lengths: tuple[float, int], patience: float = math.inf) -> list[Job]:
    return [
        Job(
            Request(
                id=str(i),
                arrived_at=at,
                prompt_tokens=3,
                max_output_tokens=99,
                deadline=at + patience,
            ),
            length,
        )
        for i, (at, length) in enumerate(arrivals_and_lengths)
    ]


def run(
    policy: str,
    trace: list[Job],
    engine: SimulatedEngine = EVERY_SECOND,
    servers: int = 1,
    **events: Any,
) -> dict[str, Record]:
    rngs = np.random.default_rng(0).spawn(servers)
    records = simulate_trace(parse_policy(policy), trace, engine, rngs, **events)
    return {record.request_id: record for record in records}


def times(records: dict[str, Record], field: str) -> list[float | None]:
    return [getattr(records[name], field) for name in sorted(records, key=int)]


def test_single_serves_one_after_the_other() -> None:
    records = run("single", jobs((0, 2), (1, 3), (10, 1)))
    assert times(records, "dispatched_at") == [0, 2, 10]
    assert times(records, "released_at") == [2, 5, 11]
    assert times(records, "batch_id") == [0, 1, 2]
    assert records["1"].queueing_delay == 1
    assert records["1"].service_time == 3
    assert records["1"].first_token_at == 3


def test_a_padded_batch_is_released_together_and_knows_each_members_own_end() -> None:
    records = run("capped:max_batch_size=2", jobs((0, 1), (0.1, 2), (0.2, 5), (0.3, 1)))
    assert times(records, "dispatched_at") == [0, 1, 1, 6]
    assert times(records, "released_at") == [1, 6, 6, 7]
    assert times(records, "last_token_at") == [1, 3, 6, 7]
    assert times(records, "batch_size") == [1, 2, 2, 1]


def test_an_elastic_batch_releases_each_at_its_own_end() -> None:
    records = run("elastic", jobs((0, 1), (0.1, 2), (0.2, 5)))
    assert times(records, "released_at") == [1, 3, 6]
    assert times(records, "server_free_at") == [1, 6, 6]


def test_a_fixed_batch_forms_waits_at_most_max_wait_and_closes_with_the_trace() -> None:
    records = run("fixed:batch_size=2,max_wait=3", jobs((0, 1), (1, 1), (5, 1), (20, 1)))
    assert times(records, "dispatched_at") == [1, 1, 8, 20]
    assert times(records, "batch_forming_delay") == [1, 0, 3, 0]


def test_continuous_fills_a_slot_at_the_end_of_a_step() -> None:
    records = run("continuous:max_batch_size=2", jobs((0, 3), (0.5, 1), (0.6, 1)))
    assert times(records, "dispatched_at") == [0, 0.5, 2]
    assert times(records, "released_at") == [3, 2, 3]
    assert times(records, "batch_size") == [1, 2, 2]


def test_tokens_of_an_answer_under_way_count_to_its_flow() -> None:
    """When the second ends, the first has made three tokens: its flow had more than the other."""
    trace = [
        dataclasses.replace(job, request=job.request._replace(flow=flow))
        for job, flow in zip(jobs((0, 10), (0.1, 2), (0.5, 1), (0.6, 1)), "abab", strict=True)
    ]
    records = run("continuous:max_batch_size=2,order=vtc", trace)
    assert times(records, "dispatched_at") == [0, 0.1, 4, 3]


def test_a_completion_comes_before_an_arrival_at_the_same_instant() -> None:
    records = run("dynamic", jobs((0, 2), (1, 1), (2, 1)))
    assert times(records, "dispatched_at") == [0, 2, 3]


def test_the_bounds_of_the_engine_make_smaller_batches() -> None:
    trace = jobs((0, 1), (0.1, 1), (0.2, 1), (0.3, 1))
    requests = SimulatedEngine(SECOND, max_batch_size=2)
    tokens = SimulatedEngine(SECOND, max_prompt_tokens=6)
    assert times(run("dynamic", trace, requests), "batch_size") == [1, 2, 2, 1]
    assert times(run("dynamic", trace, tokens), "batch_size") == [1, 2, 2, 1]


def test_two_servers_share_one_queue() -> None:
    records = run("single", jobs((0, 5), (1, 2), (1.5, 1)), servers=2)
    assert times(records, "server_id") == [0, 1, 1]
    assert times(records, "dispatched_at") == [0, 1, 3]


def test_a_switch_waits_for_the_old_batch_and_leaves_it_its_own_rules() -> None:
    records = run(
        "elastic",
        jobs((0, 1), (0.1, 2), (0.2, 6), (2, 1), (3, 1)),
        switches=[(2.5, parse_policy("continuous"))],
    )
    assert times(records, "released_at") == [1, 3, 7, 8, 8]
    assert times(records, "dispatched_at") == [0, 1, 1, 7, 7]
    assert times(records, "epoch") == [0, 0, 0, 1, 1]
    assert times(records, "policy")[2:4] == ["elastic", "continuous"]


def test_two_engines_change_policy_one_by_one() -> None:
    trace = jobs((0, 2), (0.1, 6), (0.2, 3), (0.3, 3), (0.4, 3))
    records = run("single", trace, servers=2, switches=[(1.0, parse_policy("dynamic"))])
    assert times(records, "dispatched_at") == [0, 0.1, 2, 2, 2]
    assert times(records, "batch_size") == [1, 1, 3, 3, 3]


def test_a_server_takes_work_from_the_instant_on_at_which_it_is_in_use() -> None:
    engine = SimulatedEngine(SECOND, in_use=[(0.0, [0]), (2.5, [0, 1])])
    records = run("single", jobs((0, 5), (1, 2), (1.5, 1)), engine, servers=2)
    assert times(records, "dispatched_at") == [0, 2.5, 4.5]
    assert times(records, "server_id") == [0, 1, 1]
    assert times(records, "epoch") == [0, 1, 1]


def test_a_server_that_is_not_in_use_any_more_ends_its_work_and_takes_no_other() -> None:
    engine = SimulatedEngine(SECOND, in_use=[(2.0, [1])])
    records = run("single", jobs((0, 5), (0.5, 1), (3, 1), (6, 1)), engine, servers=2)
    assert times(records, "released_at") == [5, 1.5, 4, 7]
    assert times(records, "server_id") == [0, 1, 1, 1]
    assert times(records, "epoch") == [0, 0, 1, 1]


@pytest.mark.parametrize(
    ("policy", "released", "interruptions"),
    [
        ("capped:max_batch_size=2", [1, 8.5, 8.5, 9.5], [0, 1, 1, 0]),  # padded: one goes with all
        ("elastic:max_batch_size=2", [1, 3, 8.5, 9.5], [0, 0, 1, 0]),
    ],
)
def test_what_an_engine_had_in_service_when_it_died_goes_on_behind_its_tokens(
    policy: str, released: list[float], interruptions: list[int]
) -> None:
    """Of five tokens three are made; two seconds later another engine makes the other two."""
    engine = SimulatedEngine(SECOND, deaths=[(4.5, 2.0)])
    records = run(policy, jobs((0, 1), (0.1, 2), (0.2, 5), (8, 1)), engine)
    assert times(records, "dispatched_at") == [0, 1, 1, 8.5]
    assert times(records, "first_token_at") == [1, 2, 2, 9.5]
    assert times(records, "released_at") == released
    assert times(records, "output_tokens") == [1, 2, 5, 1]
    assert times(records, "interruptions") == interruptions
    assert times(records, "service_time") == [1, 7.5, 7.5, 1]


def test_nothing_starts_between_a_death_and_its_restart_and_a_second_one_changes_nothing() -> None:
    engine = SimulatedEngine(SECOND, deaths=[(0.5, 2.0), (1.5, 2.0)])
    records = run("continuous", jobs((1, 1), (2, 1), (9, 1)), engine)
    assert times(records, "dispatched_at") == [2.5, 2.5, 9]
    assert times(records, "interruptions") == [0, 0, 0]


@pytest.mark.parametrize(
    ("death", "first_token", "released"),
    [
        # 0.3 s for three prompt tokens; behind two tokens 0.5 s for five, and 0.25 s on top
        (2.5, 1.3, 4.5 + 0.75 + 2),
        (1.0, 3.0 + 1.3, 3.0 + 0.3 + 4),  # before its first token it begins again
    ],
)
def test_what_goes_on_has_its_prompt_and_its_tokens_computed_again(
    death: float, first_token: float, released: float
) -> None:
    law = LatencyModel(k4=1.0, kp=0.1, kr=0.25)
    (record,) = run("single", jobs((0, 4)), SimulatedEngine(law, deaths=[(death, 2.0)])).values()
    assert record.first_token_at == pytest.approx(first_token)
    assert record.released_at == pytest.approx(released)
    assert (record.output_tokens, record.interruptions) == (4, 1)


def test_an_answer_that_cannot_be_continued_fails_with_its_engine_once_it_has_begun() -> None:
    trace = [dataclasses.replace(job, resumable=False) for job in jobs((0, 3), (0.25, 3), (1.5, 1))]
    engine = SimulatedEngine(SECOND, deaths=[(1.25, 2.0)])
    records = run("continuous:max_batch_size=2", trace, engine)
    assert [records[str(i)].outcome for i in range(3)] == ["failed", "completed", "completed"]
    assert times(records, "output_tokens") == [1, 3, 1]
    assert times(records, "released_at") == [None, 6.25, 5.25]
    assert times(records, "interruptions") == [1, 1, 0]


def test_a_cancelled_member_leaves_at_once_and_may_end_its_batch() -> None:
    trace = jobs((0, 1), (0.1, 2), (0.2, 9), (0.3, 1), (1.5, 1))
    records = run(
        "capped:max_batch_size=2",
        trace,
        cancellations={"2": 4.5, "3": 2.0, "4": 9.0, "absent": 1.0},
    )
    assert [records[str(i)].outcome for i in range(5)] == [
        "completed",
        "completed",
        "cancelled",
        "cancelled",
        "completed",
    ]
    assert records["1"].released_at == records["4"].dispatched_at == 4.5
    assert records["3"].dispatched_at is None
    assert records["2"].output_tokens == 3


def test_patience_ends_a_wait_but_not_a_service() -> None:
    records = run("single", jobs((0, 5), (1, 1), (4, 1), patience=2.0))
    assert [records[str(i)].outcome for i in range(3)] == ["completed", "abandoned", "completed"]
    assert records["1"].released_at == 3
    assert records["2"].dispatched_at == 5


def test_a_queue_that_is_never_served_is_an_error() -> None:
    with pytest.raises(PredictionError, match="never dispatched"):
        run("continuous", jobs((0, 1)), SimulatedEngine(SECOND, max_batch_size=0))


gaps_and_lengths = st.lists(
    st.tuples(st.floats(0, 0.05), st.integers(1, 20)), min_size=1, max_size=40
)


@given(
    gaps_and_lengths,
    st.sampled_from(POLICIES),
    st.integers(1, 3),
    st.floats(0.001, 0.2),
    st.dictionaries(st.integers(0, 40), st.floats(0, 2)),
)
def test_nothing_is_lost_or_served_twice(
    steps: list[tuple[float, int]],
    policy: str,
    servers: int,
    patience: float,
    cancelled: dict[int, float],
) -> None:
    arrivals = np.cumsum([gap for gap, _ in steps]).tolist()
    trace = jobs(*zip(arrivals, (length for _, length in steps), strict=True), patience=patience)
    leaves = {str(name): at for name, at in cancelled.items()}
    switches = [(0.2, parse_policy("continuous:max_batch_size=2")), (0.4, parse_policy("dynamic"))]
    records = run(
        policy,
        trace,
        SimulatedEngine(LAW, max_batch_size=3),
        servers=servers,
        cancellations=leaves,
        switches=switches,
    )
    assert sorted(records, key=int) == [job.request.id for job in trace]
    for job in trace:
        record = records[job.request.id]
        assert record.arrived_at == job.request.arrived_at
        if record.outcome == "completed":
            assert record.output_tokens == job.output_tokens
            assert record.dispatched_at is not None
            assert record.dispatched_at <= job.request.deadline
            assert record.queueing_delay is not None
            assert record.queueing_delay >= 0


@pytest.mark.thinned(3)
@pytest.mark.parametrize("policy", POLICIES)
def test_littles_law_holds_on_every_run(policy: str) -> None:
    """Area under the number in system, by sweeping events, = sum of sojourns; here as means over
    one run.
    """
    model = Queue.read(policy, UNIFORM, LAW, max_num_seqs=16)
    trace, rngs = draw_jobs(model, 0.7 * model.largest_stable_rate, 2000, np.random.SeedSequence(4))
    records = simulate_trace(model.policy, trace, SimulatedEngine(LAW, max_batch_size=16), rngs)
    events = sorted(
        [(r.arrived_at or 0.0, 1) for r in records] + [(r.released_at or 0.0, -1) for r in records]
    )
    area, inside, last = 0.0, 0, 0.0
    for at, change in events:
        area, inside, last = area + inside * (at - last), inside + change, at
    assert inside == 0
    assert area == pytest.approx(sum(r.sojourn_time or 0.0 for r in records), rel=1e-9)
    starts = {r.batch_id: r.dispatched_at for r in records}
    assert [starts[i] for i in sorted(key for key in starts if key is not None)] == sorted(
        at for at in starts.values() if at is not None
    )


def test_the_same_seed_gives_the_same_run_and_another_does_not() -> None:
    runs = [
        simulate_model(
            Queue.read("elastic:max_batch_size=4", UNIFORM, LAW), 80.0, num_requests=500, seed=seed
        )
        for seed in (1, 1, 2)
    ]
    assert runs[0] == runs[1]
    assert runs[0].queueing_delay != runs[2].queueing_delay


def test_policies_are_compared_on_the_same_arrivals_and_lengths() -> None:
    traces = [
        draw_jobs(
            Queue.read(text, UNIFORM, LAW),
            50.0,
            50,
            np.random.SeedSequence(1),
        )[0]
        for text in ("single", "dynamic")
    ]
    assert traces[0] == traces[1]


@pytest.mark.parametrize(
    ("policy", "bound"),
    [
        ("single", None),
        ("dynamic", 16),
        ("fixed:batch_size=4", None),
        ("capped:max_batch_size=4", None),
        ("elastic", 8),
    ],
)
def test_simulation_agrees_with_the_exact_delay(policy: str, bound: int | None) -> None:
    rate = 0.6 * largest_stable_rate(parse_policy(policy), UNIFORM, LAW, max_num_seqs=bound)
    exact = predict(parse_policy(policy), rate, UNIFORM, LAW, max_num_seqs=bound)
    simulated = simulate_model(
        Queue.read(policy, UNIFORM, LAW, max_num_seqs=bound),
        rate,
        num_requests=12_000,
        replications=4,
        seed=11,
    )
    for name in ("queueing_delay", "sojourn_time", "batch_size"):
        wanted, got = getattr(exact, name).mean, getattr(simulated, name)
        assert got.standard_error <= 0.05 * wanted  # power guard
        assert abs(got.mean - wanted) <= max(4 * got.standard_error, 1e-9)
    assert simulated.utilisation == pytest.approx(exact.utilisation, rel=0.05)


def test_single_quantiles_agree_with_the_exact_law() -> None:
    exact = predict(parse_policy("single"), 35.0, UNIFORM, LAW)
    simulated = simulate_model(
        Queue.read("single", UNIFORM, LAW), 35.0, num_requests=60_000, seed=1
    )
    for level in ("p50", "p90", "p95", "p99"):
        assert getattr(simulated.queueing_delay, level) == pytest.approx(
            getattr(exact.queueing_delay, level), rel=0.08
        )
        assert getattr(simulated.sojourn_time, level) == pytest.approx(
            getattr(exact.sojourn_time, level), rel=0.08
        )


def test_patience_with_exponential_service_loses_the_textbook_fraction() -> None:
    """M/M/1+D (THEORY b): pi = 1 - U / (1 + rho U), U = 1 + lam (1 - e^{-d tau}) / d, d = mu -
    lam.
    """
    law, one = LatencyModel(k4=1.0, cv=1.0), parse_distribution("deterministic:value=1")
    u = 1 + 0.8 * -math.expm1(-0.2 * 2.0) / 0.2
    answer = simulate_model(
        Queue.read("single", one, law, patience=2.0), 0.8, num_requests=20_000, replications=4
    )
    assert answer.loss_fraction == pytest.approx(1 - u / (1 + 0.8 * u), rel=0.05)
    exact = predict(parse_policy("single"), 0.8, one, law, patience=2.0)
    assert exact.method == "exact"
    assert exact.loss_fraction == pytest.approx(1 - u / (1 + 0.8 * u), rel=1e-9)


def test_the_waiting_queue_is_a_sequence_that_gives_up_any_member() -> None:
    queue = WaitingQueue()
    everyone = [Waiting(job.request) for job in jobs(*[(float(i), 1) for i in range(6)])]
    for waiting in everyone:
        queue.append(waiting)
    assert queue.take(("0", "1")) == everyone[:2]
    assert queue[:2] == everyone[2:4]
    assert queue[-1] is everyone[5]
    assert queue[::-1] == everyone[:1:-1]
    assert queue.take(("4", "2")) == [everyone[4], everyone[2]]
    assert queue.remove("5") is everyone[5]
    assert queue.remove("5") is None
    assert list(queue) == [everyone[3]]
    with pytest.raises(IndexError):
        queue[1]
    with pytest.raises(KeyError):
        queue.take(("9",))


def test_a_run_of_one_batch_says_that_it_saw_too_few() -> None:
    few = simulate_model(
        Queue.read("fixed:batch_size=5000", "geometric:mean=8", "a=0.001,c=0.01"),
        5.0,
        num_requests=1000,
    )
    assert few.assumptions[-1].startswith("TOO FEW BATCHES: only 1 batch in a replication")
    many = simulate_model(
        Queue.read("fixed:batch_size=10", "geometric:mean=8", "a=0.001,c=0.01"),
        5.0,
        num_requests=1000,
    )
    assert not any("BATCHES" in line for line in many.assumptions)


@pytest.mark.parametrize("replications", [1, 2])
@pytest.mark.parametrize(("requests", "batches"), [(105, 19), (110, 20)])
def test_a_run_says_that_it_saw_fewer_than_twenty_batches(
    requests: int, batches: int, replications: int
) -> None:
    """Of five each; those of the first tenth of the requests are left out."""
    model = Queue.read("fixed:batch_size=5", "geometric:mean=8", "a=0.001,c=0.01")
    found = simulate_model(model, 5.0, num_requests=requests, replications=replications)
    said = f"TOO FEW BATCHES: only {batches} batches in a replication, expected at least 20: "
    assert any(line.startswith(said) for line in found.assumptions) == (batches < 20)
    assert any("BATCHES" in line for line in found.assumptions) == (batches < 20)


def test_ten_million_requests_are_the_most() -> None:
    model = Queue.read("single", "geometric:mean=8", "a=0.001,c=0.01")
    for requests, replications in ((10_000_000, 1), (5_000_000, 2)):
        check_draws(model, requests, replications)
        with pytest.raises(SpecError, match=f"got {requests + 1} requests in each of .* 10000000"):
            check_draws(model, requests + 1, replications)


def test_without_bounds_a_batch_is_as_large_as_the_queue() -> None:
    """A hundred wait behind the first: 300 prompt tokens, and contexts of some 10,000."""
    trace = jobs((0, 1), *((0.1, 1) for _ in range(100)))
    assert times(run("dynamic", trace), "batch_size") == [1] + [100] * 100
    queue = Queue.read("dynamic", UNIFORM, SECOND)
    arrived, ones = np.array([0.0] + [0.1] * 100), np.ones(101, dtype=np.int64)
    fast = replay(queue, Trace(arrived, ones, ones, [np.random.default_rng(0)]))
    assert fast.batch_size.tolist() == [1] + [100] * 100


def test_a_simulation_has_two_requests_for_each_batch_of_its_means() -> None:
    model = Queue.read("single", UNIFORM, LAW)
    with pytest.raises(SpecError, match=r"num_requests=39; .* a whole number, at least 40"):
        simulate_model(model, 1.0, num_requests=39)
    assert simulate_model(model, 1.0, num_requests=40).queueing_delay is not None
