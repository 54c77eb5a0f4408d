"""The compiled replay of one request at a time under an order that interrupts gives the sample path
of the generic simulator, which asks the policy at every event and every step, to the last bit.
"""

import dataclasses
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kendall.policies import parse_policy
from kendall.policies.core import Request
from kendall.queueing.distributions.token_distribution import parse_distribution
from kendall.queueing.latency.law import LatencyModel
from kendall.queueing.models.soap.token_orders import TokenService, solve_in_tokens
from kendall.queueing.prediction import predict_model
from kendall.queueing.predictors.predictor_text import parse_predictor
from kendall.queueing.queue import Queue
from kendall.queueing.simulation.experiment import driven_run, simulate_run
from kendall.queueing.simulation.fast import Trace, is_compiled, replay
from kendall.queueing.simulation.reference import Job, SimulatedEngine, simulate_trace
from tests.queueing.made import made_queue
from tests.queueing.test_kernels import FULL, INSTANTS, NOISY, PLAIN, PROMPTS, assert_same, both

LENGTHS = parse_distribution("lognormal:mu=2.5,sigma=0.7", 64)
LONG_TAILED = parse_distribution("weibull:shape=0.4,scale=10", 600)  # where gittins preempts
RESUMES = dataclasses.replace(FULL, kr=2e-3)
ORDERS = (
    "sprpt",
    "sprpt,aging=0.02",
    "sprpt,max_preemptions=1",
    "srpt-b",
    "srpt-b,aging=0.02",
    "srpt-b,max_preemptions=2",
    "skippredict,threshold=12",
    "skippredict,max_preemptions=1,threshold=8.5",
    "delaypredict,limit=8",
    "delaypredict,limit=8,max_preemptions=2",
    "pspjf",
    "threshold-preemptive,threshold=12",
    "threshold-preemptive,aging=0.1,threshold=12",
    "trail",
    "trail,c=0.2",
    "mlfq",
    "mlfq,quantum=4",
    "mlfq,quantum=4,levels=2",
    "mlfq,quantum=3,max_preemptions=2",
    "mlfq,aging=0.05,quantum=5",
    "fb",
    "fb,quantum=7",
    "fb,aging=0.01,quantum=3",
    "gittins",
    "gittins,aging=0.005",
    "gittins,max_preemptions=2",
    "gittins-predicted",
    "gittins-predicted,aging=0.005",
    "sprpt,by=residual",
    "trail,by=residual,c=0.5",
)


def model(order: str, law: LatencyModel = RESUMES, **settings: object) -> Queue:
    given: dict[str, object] = {
        "policy": parse_policy(f"single:order={order}"),
        "output_tokens": LONG_TAILED if order.startswith("gittins") else LENGTHS,
        "law": law,
        "prompt_tokens": PROMPTS,
        "predictor": parse_predictor("lognormal:sigma=0.5"),
    }
    return made_queue(**{**given, **settings})  # type: ignore[arg-type]


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.thinned(30)
def test_a_replay_is_the_policys_own_sample_path(order: str) -> None:
    for servers, patience in ((1, None), (1, 0.1), (2, None), (3, 0.05)):
        queue = model(order, servers=servers, patience=patience)
        assert is_compiled(queue)
        fast, slow = both(queue, 0.85 * queue.largest_stable_rate, 500)
        assert_same(fast, slow)
    assert (fast.queueing_delay[~fast.lost] > 0).any()


@pytest.mark.thinned(3)
@pytest.mark.parametrize("requests", [1, 2, 3])
@pytest.mark.parametrize("order", ORDERS)
def test_a_trace_of_few_requests(order: str, requests: int) -> None:
    queue = model(order, NOISY)
    assert_same(*both(queue, 0.9 * queue.largest_stable_rate, requests))


def slots(order: str, number: int, law: LatencyModel = RESUMES, **settings: object) -> Queue:
    """The same order on a continuous engine."""
    policy = parse_policy(f"continuous:max_batch_size={number},order={order}")
    return model(order, law, policy=policy, max_num_seqs=32, **settings)


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.thinned(30)
def test_slots_are_the_policys_own_sample_path(order: str) -> None:
    for servers, number, tokens in ((1, 1, None), (1, 4, 40), (2, 3, None), (3, 2, 60)):
        queue = slots(order, number, servers=servers, step_tokens=tokens)
        assert is_compiled(queue)
        fast, slow = both(queue, 0.95 * queue.largest_stable_rate, 200)
        assert_same(fast, slow)
    assert (fast.queueing_delay > 0).any()


@pytest.mark.slow
@pytest.mark.parametrize("tokens", [None, 40])
@pytest.mark.parametrize("servers", [1, 2, 3])
@pytest.mark.parametrize("law", [PLAIN, RESUMES, NOISY], ids=["plain", "resumes", "noisy"])
@pytest.mark.parametrize("order", ORDERS)
def test_slots_are_the_sample_path_throughout(
    order: str, law: LatencyModel, servers: int, tokens: int | None
) -> None:
    for number in (1, 2, 5):
        queue = slots(order, number, law, servers=servers, step_tokens=tokens)
        for load in (0.3, 0.7, 0.95, 1.1):
            assert_same(*both(queue, load * queue.largest_stable_rate, 500))


def test_servers_of_different_speed() -> None:
    queue = model("mlfq,quantum=4", PLAIN, servers=3, server_speeds=(1.0, 1.5, 2.0))
    assert_same(*both(queue, 0.9 * queue.largest_stable_rate, 500))


@pytest.mark.slow
@pytest.mark.parametrize("patience", [None, 0.05])
@pytest.mark.parametrize("servers", [1, 2, 3])
@pytest.mark.parametrize("law", [PLAIN, RESUMES, NOISY], ids=["plain", "resumes", "noisy"])
@pytest.mark.parametrize("order", ORDERS)
def test_a_replay_is_the_sample_path_throughout(
    order: str, law: LatencyModel, servers: int, patience: float | None
) -> None:
    queue = model(order, law, servers=servers, patience=patience)
    for load in (0.2, 0.6, 0.9, 1.1):
        assert_same(*both(queue, load * queue.largest_stable_rate, 1000))


@pytest.mark.slow
@pytest.mark.parametrize(
    "order",
    [
        *("sprpt", "srpt-b", "trail,c=0.5", "pspjf", "mlfq,quantum=2", "fb"),
        *("skippredict,threshold=4", "delaypredict,limit=2", "gittins", "gittins-predicted"),
    ],
)
@settings(deadline=None, max_examples=60)
@given(
    steps=st.lists(
        st.tuples(st.integers(0, 5), st.integers(1, 9), st.integers(0, 2)), min_size=5, max_size=30
    ),
    law=st.sampled_from(
        [LatencyModel(k1=1.0, k2=1.0, k4=1.0), LatencyModel(k4=1.0), LatencyModel(kp=1.0, k4=2.0)]
    ),
    limits=st.sampled_from([(1, None), (1, 3.0), (2, None), (2, 4.0)]),
)
def test_ties_are_broken_as_the_driver_breaks_them(
    order: str,
    steps: list[tuple[int, int, int]],
    law: LatencyModel,
    limits: tuple[int, float | None],
) -> None:
    """Whole seconds everywhere: arrivals, ends, tokens and ends of patience fall on one instant."""
    servers, patience = limits
    queue = model(order, law, servers=servers, patience=patience)
    # no two arrive at once: of equal ranks the one that came first goes first
    arrived = np.cumsum([float(gap) + 1.0 for gap, _, _ in steps])
    lengths, prompts = (np.array([step[i] for step in steps]) for i in (1, 2))
    trace = Trace(
        arrived,
        lengths,
        prompts,
        np.random.default_rng(0).spawn(servers),
        predicted=lengths.astype(float),
    )
    fast = replay(queue, trace)
    limit = math.inf if patience is None else patience
    jobs = [
        Job(
            Request(
                str(i),
                at,
                int(prompts[i]),
                64,
                deadline=at + limit,
                predicted_output_tokens=float(lengths[i]),
            ),
            int(lengths[i]),
        )
        for i, at in enumerate(arrived.tolist())
    ]
    slow = driven_run(queue, jobs, np.random.default_rng(0).spawn(servers))
    assert np.array_equal(fast.lost, slow.lost)
    kept = ~fast.lost
    for name in (*INSTANTS, "batch_id", "server_id"):
        assert np.array_equal(getattr(fast, name)[kept], getattr(slow, name)[kept]), name


@pytest.mark.parametrize("order", ["mlfq", "fb", "sprpt"])
def test_servers_that_keep_step_make_one_token_each_a_step(order: str) -> None:
    """Two requests of ten tokens that begin together end together."""
    jobs = [Job(Request(f"call-{i}", 0.0, 0, 64), 10) for i in range(2)]
    rngs = [np.random.default_rng(0)] * 2
    engine = SimulatedEngine(LatencyModel(k4=1.0))
    records = simulate_trace(parse_policy(f"single:order={order}"), jobs, engine, rngs)
    assert [record.released_at for record in records] == [10.0, 10.0]


def test_what_is_not_covered_goes_to_the_generic_simulator() -> None:
    calls = parse_distribution("geometric:mean=2")
    stalling = dataclasses.replace(PLAIN, stall_share=0.1, stall=0.01)
    routed = model("sprpt", servers=2, routing="least_requests")
    for queue in (model("sprpt", sequences=calls), model("sprpt", stalling), routed):
        assert not is_compiled(queue)
    bounded = slots("sprpt", 4, prompt_tokens=PROMPTS, max_context_tokens=300)
    for queue in (slots("sprpt", 4, patience=0.1), bounded):
        assert not is_compiled(queue)


@pytest.mark.parametrize("order", ["mlfq", "fb,quantum=16"])
def test_the_mean_is_that_of_the_analysis_where_going_on_costs_nothing(order: str) -> None:
    """Scully et al.'s mean for ranks (queueing.models.soap), where no setup is paid again."""
    law, lengths = LatencyModel(k4=0.002), parse_distribution("geometric:mean=100")
    queue = Queue.read(f"single:order={order}", lengths, law)
    rate = 0.7 * queue.largest_stable_rate
    service = TokenService(law.setup(1), law.step(1), TokenService.alone(law, lengths).sizes)
    exact = solve_in_tokens(queue.policy.ranking, service, rate)  # type: ignore[attr-defined]
    means = [
        float(simulate_run(queue, rate, 100_000, stream).sojourn_time[10_000:].mean())
        for stream in np.random.SeedSequence(4).spawn(12)
    ]
    error = np.std(means, ddof=1) / math.sqrt(len(means))
    assert error < 0.02 * exact.sojourn
    # a token in the making is lost with every interruption by an arrival: half of one, 1 ms
    assert abs(np.mean(means) - exact.sojourn) < 4 * error + 0.01 * exact.sojourn


@pytest.mark.slow
def test_a_prediction_of_answers_of_hundreds_of_tokens_has_a_small_error() -> None:
    queue = Queue.read("single:order=mlfq", "geometric:mean=500", "k1=0,k2=0,k3=0,k4=0.002")
    found = predict_model(queue, 0.8).queueing_delay
    assert found.mean is not None
    assert found.standard_error is not None
    assert found.standard_error < 0.02 * found.mean
