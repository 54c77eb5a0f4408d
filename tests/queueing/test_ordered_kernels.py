"""The compiled replays under an order that interrupts nobody give the sample paths of the generic
simulator, which drives the policy objects, to the last bit.
"""

import dataclasses

import numpy as np
import pytest

from kendall.policies import parse_policy
from kendall.policies.core import Request
from kendall.policies.ordered import order_of
from kendall.policies.orders.by_length import ShortestFirst as ByLength
from kendall.queueing.distributions.token_distribution import parse_distribution
from kendall.queueing.latency.law import LatencyModel
from kendall.queueing.models.soap.orders import SHORTEST_FIRST
from kendall.queueing.models.soap.queue import solve_order
from kendall.queueing.predictors.laws import ExactPrediction
from kendall.queueing.predictors.predictor_text import parse_predictor
from kendall.queueing.predictors.sizes import token_sizes
from kendall.queueing.queue import Queue
from kendall.queueing.simulation.experiment import draw_jobs, simulate_run
from kendall.queueing.simulation.fast import draw_trace, is_compiled, replay
from kendall.queueing.simulation.orders.policy_order import queue_of
from kendall.queueing.simulation.orders.waiting_kernels import GROUPS, RATIO, ordered_queue
from tests.queueing.made import made_queue
from tests.queueing.test_kernels import FULL, LENGTHS, NOISY, PLAIN, PROMPTS, assert_same, both

RANKED = (
    "spjf",
    "ljf",
    "spjf,aging=0.01",
    "ljf,aging=0.002",
    "threshold,threshold=12",
    "threshold,aging=0.1,threshold=12",
    "edf",
    "priority",
    "priority,aging=3",
    "hrrn",
)
POLICIES = (
    *(f"single:order={order}" for order in RANKED),
    *(f"continuous:max_batch_size=4,order={order}" for order in RANKED),
    *(f"capped:max_batch_size=5,order={order}" for order in (*RANKED, "binned,bins=3")),
    "capped:max_batch_size=1,order=binned,bins=3",
    "dynamic:order=binned,bins=2",
    "dynamic:order=spjf",
    "elastic:max_batch_size=5,order=spjf",
    "elastic:order=binned,bins=4",
    "fixed:batch_size=2,order=spjf",
    "fixed:batch_size=4,order=spjf",
    "fixed:batch_size=4,order=hrrn",
    "fixed:batch_size=4,max_wait=0.05,order=ljf",
    "fixed:batch_size=4,order=binned,bins=3",
    "fixed:batch_size=4,max_wait=0.05,order=binned,bins=3",
    "fixed:batch_size=1,order=binned,bins=3",
)
PREDICTORS = ("lognormal:sigma=0.5", "exact", "none", "onebit:threshold=10,accuracy=0.8")


def model(policy: str, law: LatencyModel = FULL, **settings) -> Queue:
    given = {
        "policy": parse_policy(policy),
        "output_tokens": LENGTHS,
        "law": law,
        "max_num_seqs": 32,
        "prompt_tokens": PROMPTS,
        "predictor": parse_predictor(PREDICTORS[0]),
    }
    return made_queue(**{**given, **settings})


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.thinned(24)
def test_a_replay_is_the_policys_own_sample_path(policy: str) -> None:
    for servers, patience in ((1, None), (1, 0.05), (2, 0.05), (3, None)):
        queue = model(policy, servers=servers, patience=patience)
        assert is_compiled(queue)
        assert_same(*both(queue, 0.9 * queue.largest_stable_rate, 700))


@pytest.mark.thinned(3)
@pytest.mark.parametrize("requests", [1, 2, 3])
@pytest.mark.parametrize("policy", POLICIES)
def test_a_trace_of_few_requests(policy: str, requests: int) -> None:
    queue = model(policy, NOISY)
    assert_same(*both(queue, 0.9 * queue.largest_stable_rate, requests))


@pytest.mark.thinned(6)
@pytest.mark.parametrize("predictor", PREDICTORS[1:])
@pytest.mark.parametrize(
    "policy",
    [
        "single:order=spjf",
        "single:order=hrrn",
        "capped:max_batch_size=5,order=binned,bins=3",
        "continuous:max_batch_size=4,order=threshold,threshold=12",
    ],
)
def test_with_every_predictor(policy: str, predictor: str) -> None:
    queue = model(policy, predictor=parse_predictor(predictor))
    assert_same(*both(queue, 0.95 * queue.largest_stable_rate, 1000))


@pytest.mark.parametrize(
    "policy",
    [
        "single:order=spjf",
        "capped:max_batch_size=5,order=ljf",
        "capped:max_batch_size=5,order=binned,bins=3",
        "fixed:batch_size=4,order=binned,bins=2",
        "continuous:max_batch_size=4,order=hrrn",
    ],
)
def test_with_calls_of_several_sequences(policy: str) -> None:
    for patience in (None, 0.05):
        queue = model(policy, sequences=parse_distribution("geometric:mean=2"), patience=patience)
        assert_same(*both(queue, 0.9 * queue.largest_stable_rate, 1000))


@pytest.mark.slow
@pytest.mark.parametrize("patience", [None, 0.05])
@pytest.mark.parametrize("servers", [1, 2, 3])
@pytest.mark.parametrize("law", [PLAIN, FULL, NOISY], ids=["plain", "full", "noisy"])
@pytest.mark.parametrize("policy", POLICIES)
def test_a_replay_is_the_policys_own_sample_path_throughout(
    policy: str, law: LatencyModel, servers: int, patience: float | None
) -> None:
    queue = model(policy, law, servers=servers, patience=patience)
    for load in (0.2, 0.6, 0.95, 1.2):
        assert_same(*both(queue, load * queue.largest_stable_rate, 2000))


def test_an_order_that_decides_by_code_of_its_own_is_event_driven() -> None:
    class Other(ByLength):
        def first(self, *given):
            return super().first(*given)

    queue = model("single:order=spjf")
    assert is_compiled(queue)
    object.__setattr__(queue.policy, "ranking", Other())
    assert not is_compiled(queue)


@pytest.mark.parametrize("order", ["spjf", "ljf,aging=0.01", "threshold,threshold=12", "priority"])
def test_ranks_are_those_of_the_order(order: str) -> None:
    policy = parse_policy(f"single:order={order}")
    rng = np.random.default_rng(3)
    arrived_at, predicted = np.cumsum(rng.random(50)), rng.integers(1, 40, 50).astype(float)
    found = queue_of(policy, arrived_at, predicted, 30.0, 1).rank
    expected = [order_of(policy).rank(each, 0) for each in requests(arrived_at, predicted)]
    assert found.tolist() == expected


def requests(arrived_at, predicted):
    return [
        Request(
            id="",
            arrived_at=at,
            prompt_tokens=1,
            max_output_tokens=30,
            predicted_output_tokens=tokens,
        )
        for at, tokens in zip(arrived_at.tolist(), predicted.tolist(), strict=True)
    ]


@pytest.mark.parametrize("bins", [1, 3, 7, 10])
def test_groups_are_the_bins_of_the_order(bins: int) -> None:
    policy = parse_policy(f"dynamic:order=binned,bins={bins}")
    arrived_at, predicted = np.arange(90.0), np.arange(90.0) / 2
    queue = queue_of(policy, arrived_at, predicted, 30.0, 4)
    assert queue.kind == GROUPS
    bin_of = order_of(policy).bin_of
    assert queue.group.tolist() == [bin_of(each) - 1 for each in requests(arrived_at, predicted)]


@pytest.mark.parametrize(
    ("order", "heap", "lists"), [("spjf", 9, 1), ("hrrn", 0, 1), ("binned,bins=3", 0, 3)]
)
def test_a_queue_has_room_for_all_requests_where_its_kind_puts_them(
    order: str, heap: int, lists: int
) -> None:
    """Compiled code would write beyond it without a word."""
    policy = parse_policy(f"capped:max_batch_size=4,order={order}")
    for lanes in (1, 5):
        queue = queue_of(policy, np.zeros(9), np.arange(1.0, 10.0), 9.0, 4, lanes=lanes)
        each = queue.lane, queue.waits, queue.following, queue.preceding
        assert [len(rows) for rows in each] == [9] * 4
        assert [len(rows) for rows in (queue.child, queue.sibling)] == [heap] * 2
        assert [len(rows) for rows in (queue.tops, queue.waiting)] == [lanes] * 2
        assert (queue.ends.shape, len(queue.chosen)) == ((3, lanes * lists), 4)
        empty = ordered_queue(queue.kind, np.zeros(0), np.zeros(0), 4, lanes)
        assert (empty.ends.shape[1], len(empty.waits), len(empty.chosen)) == (lanes, 0, 1)


def test_ratios_are_by_predicted_tokens_up_to_the_limit() -> None:
    queue = queue_of(parse_policy("single:order=hrrn"), np.zeros(2), np.array([9.0, 50.0]), 30.0, 1)
    assert queue.kind == RATIO
    assert queue.rank.tolist() == [9, 30]


def test_both_simulators_draw_the_same_predictions() -> None:
    queue = model("single:order=spjf", sequences=parse_distribution("geometric:mean=2"))
    jobs, _ = draw_jobs(queue, 5.0, 500, np.random.SeedSequence(4))
    trace = draw_trace(queue, 5.0, 500, np.random.SeedSequence(4))
    assert [each.request.predicted_output_tokens for each in jobs] == trace.predicted.tolist()
    for unread in (
        queue.but(predictor=parse_predictor("none")),
        dataclasses.replace(queue, policy=parse_policy("single")),
    ):
        assert not draw_trace(unread, 5.0, 500, np.random.SeedSequence(4)).predicted.size
        jobs, _ = draw_jobs(unread, 5.0, 500, np.random.SeedSequence(4))
        assert all(each.request.predicted_output_tokens is None for each in jobs)


def test_shortest_first_has_the_exact_mean() -> None:
    law = LatencyModel(k2=0.1, k4=0.04)
    queue = model("single:order=spjf", law, predictor=parse_predictor("exact"), prompt_tokens=None)
    rate = 0.8 * queue.largest_stable_rate
    exact = solve_order(SHORTEST_FIRST, token_sizes(LENGTHS, law), rate, ExactPrediction())
    means = [
        float(simulate_run(queue, rate, 50_000, stream).sojourn_time[5000:].mean())
        for stream in np.random.SeedSequence(9).spawn(24)
    ]
    error = np.std(means, ddof=1) / np.sqrt(24)
    assert error < 0.02 * exact.sojourn
    assert abs(np.mean(means) - exact.sojourn) < 4 * error


def test_where_the_order_changes_nothing_the_path_is_first_come_first_served() -> None:
    for policy, plain in (
        ("single:order=edf", "single"),
        ("capped:max_batch_size=4,order=priority", "capped:max_batch_size=4"),
        ("continuous:max_batch_size=4,order=spjf,aging=0", "continuous:max_batch_size=4"),
        ("capped:max_batch_size=4,order=binned,bins=1", "capped:max_batch_size=4"),
    ):
        queue, other = model(policy, patience=0.3), model(plain, patience=0.3)
        trace = draw_trace(other, 40.0, 3000, np.random.SeedSequence(2))
        with_predictions = draw_trace(queue, 40.0, 3000, np.random.SeedSequence(2))
        assert_same(replay(queue, with_predictions), replay(other, trace))
