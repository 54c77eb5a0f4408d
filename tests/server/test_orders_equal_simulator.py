"""Orders of service, preemptive ones too: the gateway on virtual time and the simulator decide the
same at the same instants.
"""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest

from kendall.policies import Policy, Request, parse_policy
from kendall.policies.ordered import with_ranking
from kendall.policies.orders.order import Aging
from kendall.policies.orders.preemptive import (
    Gittins,
    PredictedGittins,
    ShortestRemaining,
    Trail,
)
from kendall.queueing.latency.law import LatencyModel, parse_law
from kendall.queueing.measurement.record import Record
from tests.server.harness import driven_by_both, replay
from tests.virtual_time import run_virtual

LAW = parse_law("k1=0.25e-3,k2=2e-3,k3=25e-6,k4=0.9e-3,kp=1e-5,cv=0.1,turnaround=1.5e-3")
RESUMING = parse_law(f"{LAW},kr=6e-3")
COUNT = 1500
FLOWS = ("heavy", "", "heavy", "light", "heavy")
ORDERS = (
    "spjf",
    "spjf,aging=0.002",
    "ljf",
    "edf",
    "priority",
    "priority,aging=0.05",
    "threshold,threshold=12",
    "boost,gamma=20,token_time=1ms",
    "spjf,by=service,prompt_weight=0.5",
    "ljf,by=memory",
    "hrrn",
    "vtc",
    "vtc,prompt_weight=0.5,output_weight=4",
)
PREEMPTIVE = (
    "sprpt",
    "sprpt,aging=0.001",
    "skippredict,threshold=12",
    "delaypredict,limit=6",
    "pspjf",
    "threshold-preemptive,threshold=12",
    "trail,c=0.5",
    "mlfq,quantum=4,levels=3",
    "fb,quantum=2",
    "fb,quantum=2,max_preemptions=1",
    "sprpt,max_preemptions=2",
)
RATES = {"single": 40.0, "continuous:max_batch_size=3": 110.0, "capped:max_batch_size=4": 90.0}
POLICIES = [
    (f"{policy}{',' if ':' in policy else ':'}order={order}", rate)
    for policy, rate in RATES.items()
    for order in (*ORDERS, *(() if "capped" in policy else PREEMPTIVE))
] + [
    ("capped:max_batch_size=4,order=binned,bins=3", 90.0),
    ("fixed:batch_size=3,max_wait=0.2,order=binned,bins=2", 60.0),
    ("elastic:max_batch_size=3,order=spjf", 80.0),
    ("fixed:batch_size=3,max_wait=0.05,order=spjf", 60.0),
    ("fixed:batch_size=3,max_wait=0.05,order=vtc", 60.0),
    ("elastic:max_batch_size=3,order=vtc", 80.0),
]
EXACT = (
    *("outcome", "policy", "epoch", "server_id", "batch_id", "batch_size", "output_tokens"),
    *("preemptions", "interruptions", "flow"),
)
OF_ANSWERS = (
    "released_at",
    "last_token_at",
    "server_free_at",
    "queueing_delay",
    "service_time",
    "sojourn_time",
)
INSTANTS = ("first_dispatched_at", "dispatched_at", "first_token_at", *OF_ANSWERS)


def trace(rate: float, seed: int) -> list[tuple[Request, int]]:
    """Lognormal errors of prediction, a tenth without one; priorities and patience of some; a flow
    that asks for more than the others, and one without a name.
    """
    rng = np.random.default_rng(seed)
    arrivals = np.cumsum(rng.exponential(1 / rate, COUNT))
    lengths, prompts = rng.integers(1, 33, COUNT), rng.integers(4, 60, COUNT)
    told = lengths * np.exp(0.5 * rng.standard_normal(COUNT))
    return [
        (
            Request(
                id=str(index),
                arrived_at=float(at),
                prompt_tokens=int(prompt),
                max_output_tokens=40,
                predicted_output_tokens=float(prediction) if rng.random() < 0.9 else None,
                priority=int(rng.integers(-2, 3)),
                deadline=float(at + rng.uniform(0.5, 2.0)) if rng.random() < 0.3 else math.inf,
                flow=FLOWS[index % len(FLOWS)],
            ),
            int(length),
        )
        for index, (at, length, prompt, prediction) in enumerate(
            zip(arrivals, lengths, prompts, told, strict=True)
        )
    ]


def assert_equal_runs(
    policy: str | Policy,
    rate: float,
    *,
    law: LatencyModel = LAW,
    servers: int = 1,
    **options: object,
) -> list[Record]:
    live, simulated = driven_by_both(policy, trace(rate, seed=7), law, servers=servers, **options)
    assert len(live) == len(simulated) == COUNT
    by_id = {record.request_id: record for record in simulated}
    for mine in live:
        other = by_id[mine.request_id]
        for name in EXACT:
            assert getattr(mine, name) == getattr(other, name), (name, mine, other)
        for name in INSTANTS:
            if name in OF_ANSWERS and mine.outcome != "completed":
                continue
            a, b = getattr(mine, name), getattr(other, name)
            assert (a is None) == (b is None), (name, mine, other)
            assert a is None or abs(a - b) <= 1e-9, (name, mine, other)
    return live


@pytest.mark.thinned(2)
@pytest.mark.parametrize("text", ["single", "continuous:max_batch_size=3"])
def test_ranks_that_rise_and_fall_with_the_tokens_made(text: str) -> None:
    """Those of a Gittins order that has learned."""
    policy = parse_policy(f"{text}{',' if ':' in text else ':'}order=gittins")
    ranking = Gittins().with_ranks((0, 4, 10, 20), (5.0, 9.0, 3.0, 8.0))
    live = assert_equal_runs(with_ranking(policy, ranking), RATES[text])  # type: ignore[arg-type]
    assert sum(record.preemptions or 0 for record in live) > COUNT / 10
    unranked = assert_equal_runs(policy, RATES[text])
    assert sum(record.preemptions or 0 for record in unranked) == 0


@pytest.mark.thinned(6)
@pytest.mark.parametrize(
    ("order", "unranked"),
    [
        ("gittins-predicted", PredictedGittins()),
        ("sprpt,by=residual", ShortestRemaining(by="residual")),
        ("trail,by=residual,c=0.6", Trail(by="residual", c=0.6)),
    ],
)
@pytest.mark.parametrize("text", ["single", "continuous:max_batch_size=3"])
def test_ranks_by_prediction_and_tokens_made(text: str, order: str, unranked: Aging) -> None:
    """Those of three classes of predictions; requests without one are of the last."""
    policy = parse_policy(f"{text}{',' if ':' in text else ':'}order={order}")
    ranks = (3.0, 2.0, 8.0, 12.0, *(8.0, 6.0, 5.0, 4.0), *(20.0, 25.0, 30.0, 10.0))
    ranking = unranked.with_ranks((0, 4, 10, 20), ranks, (8.5, 20.0))
    live = assert_equal_runs(with_ranking(policy, ranking), RATES[text])  # type: ignore[arg-type]
    assert sum(record.preemptions or 0 for record in live) > COUNT / 10


@pytest.mark.parametrize(
    ("policy", "rate"),
    [
        pytest.param(*each, id=each[0], marks=pytest.mark.slow if number % 3 else ())
        for number, each in enumerate(POLICIES)
    ],
)
@pytest.mark.thinned(46)
def test_the_same_decisions_at_the_same_instants(policy: str, rate: float) -> None:
    live = assert_equal_runs(policy, rate)
    first_come = [record.request_id for record in live if record.outcome == "completed"]
    dispatched = sorted(
        (record for record in live if record.first_dispatched_at is not None),
        key=lambda record: record.first_dispatched_at or 0.0,
    )
    overtaken = sum(
        int(before.request_id) > int(after.request_id)
        for before, after in itertools.pairwise(dispatched)
    )
    assert len(first_come) > COUNT / 2
    parsed = parse_policy(policy)
    if parsed.ranking.preemptive:  # type: ignore[attr-defined]
        preemptions = [record.preemptions for record in live]
        assert sum(preemptions) > COUNT / 50
        most = parsed.max_preemptions  # type: ignore[attr-defined]
        assert max(preemptions) == most if most is not None else max(preemptions) > 1
    else:
        assert overtaken > COUNT / 50, "nobody was overtaken: the trace tests nothing"


@pytest.mark.slow
@pytest.mark.parametrize("order", ["sprpt", "trail,c=0.5", "mlfq,quantum=4,levels=3"])
@pytest.mark.parametrize(
    ("policy", "rate"), [("single:", 25.0), ("continuous:max_batch_size=3,", 70.0)]
)
def test_the_same_where_a_resume_costs_something(policy: str, rate: float, order: str) -> None:
    """And requests are in service for longer than where it costs nothing."""
    text = f"{policy}order={order}"
    live = assert_equal_runs(text, rate, law=RESUMING)
    assert sum(record.preemptions for record in live) > COUNT / 50
    free = run_virtual(replay(parse_policy(text), trace(rate, seed=7), LAW, seed=3))
    assert _served(live) > 1.02 * _served(free)


def _served(records: list[Record]) -> float:
    """Mean seconds in service of those that completed."""
    times = [r.service_time for r in records if r.outcome == "completed"]
    return sum(time for time in times if time is not None) / len(times)


@pytest.mark.thinned(4)
@pytest.mark.parametrize(("servers", "seed"), [(1, 11), (2, 11), (2, 17), (2, 19)])
def test_the_same_with_cancellations_and_switches_between_orders(servers: int, seed: int) -> None:
    rate = 100.0 * servers
    rng = np.random.default_rng(seed)
    jobs = trace(rate, seed=7)
    chosen = rng.choice(COUNT, COUNT // 10, replace=False)
    cancellations = {
        jobs[i][0].id: jobs[i][0].arrived_at + float(rng.exponential(0.05)) for i in chosen
    }
    names = [text for text, _ in POLICIES]
    instants = np.sort(rng.uniform(0, jobs[-1][0].arrived_at, len(names)))
    order = rng.permutation(len(names))
    switches = [
        (float(at), parse_policy(names[place])) for at, place in zip(instants, order, strict=True)
    ]
    live = assert_equal_runs(
        "continuous:max_batch_size=3,order=sprpt",
        rate,
        servers=servers,
        cancellations=cancellations,
        switches=switches,
    )
    assert sum(record.outcome == "cancelled" for record in live) > COUNT / 50
    assert len({record.policy for record in live}) > 20
    assert sum(record.preemptions for record in live) > 20


@pytest.mark.slow
@pytest.mark.parametrize(
    ("servers", "seed", "law"), [(1, 23, LAW), (2, 29, LAW), (3, 31, LAW), (2, 37, RESUMING)]
)
def test_the_same_with_deaths_of_the_engine(servers: int, seed: int, law: LatencyModel) -> None:
    """Every policy in turn, each with deaths under it; some clients leave, also while the engine
    is being started again; a third of the requests cannot be continued.
    """
    rng = np.random.default_rng(seed)
    rate = 90.0 * servers
    jobs = trace(rate, seed=7)
    end = jobs[-1][0].arrived_at
    fragile = {jobs[i][0].id for i in rng.choice(COUNT, COUNT // 3, replace=False)}
    cancellations = {
        jobs[i][0].id: jobs[i][0].arrived_at + float(rng.exponential(0.1))
        for i in rng.choice(COUNT, COUNT // 10, replace=False)
    }
    names = rng.permutation([text for text, _ in POLICIES]).tolist()
    switches = [
        (float(at), parse_policy(name))
        for at, name in zip(np.sort(rng.uniform(0, end, len(names))), names, strict=True)
    ]
    deaths = [
        (float(at), float(rng.uniform(0.01, 0.15))) for at in np.sort(rng.uniform(0, end, 60))
    ]
    live = assert_equal_runs(
        "continuous:max_batch_size=3,order=sprpt",
        rate,
        law=law,
        servers=servers,
        cancellations=cancellations,
        switches=switches,
        deaths=deaths,
        fragile=fragile,
    )
    failed = [record for record in live if record.outcome == "failed"]
    assert len(failed) > 10
    assert {record.request_id for record in failed} <= fragile
    assert all(record.output_tokens for record in failed), "before a token it begins again"
    survived = [record for record in live if record.outcome == "completed"]
    assert sum((record.interruptions or 0) > 0 for record in survived) > 30
    assert any(record.preemptions and record.interruptions for record in survived)


def test_a_missing_prediction_is_said_once_for_each_policy(
    caplog: pytest.LogCaptureFixture,
) -> None:
    jobs = [(unpredicted(request), tokens) for request, tokens in trace(40.0, 7)[:20]]
    run_virtual(replay(parse_policy("single:order=spjf"), jobs, LAW))
    said = [text for text in caplog.messages if "predicted_output_tokens" in text]
    assert len(said) == 1
    assert said[0].startswith("policy single:order=spjf orders by predicted lengths, and a request")
    caplog.clear()
    run_virtual(replay(parse_policy("single:order=priority"), jobs, LAW))
    assert caplog.messages == []


def unpredicted(request: Request) -> Request:
    return request._replace(predicted_output_tokens=None, deadline=math.inf)
