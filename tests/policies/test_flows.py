"""The order vtc: whose turn it is, and the counters that its drivers keep."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kendall.policies import (
    Dispatch,
    QueueState,
    Request,
    Server,
    Waiting,
    WaitUntil,
    flow_counters,
    parse_policy,
)
from kendall.policies.flow_counters import FlowCounters, TokenWeights
from kendall.policies.ordered import counts, order_of, wants_steps
from kendall.policies.orders import ORDERS
from kendall.policies.orders.fair import VirtualTokens
from kendall.policies.orders.order import Order
from kendall.policies.waiting_queues import CountedQueue, queue_for


def asked(name: str, flow: str, at: float = 0.0, prompt: int = 10, so_far: int = 0) -> Waiting:
    request = Request(id=name, arrived_at=at, prompt_tokens=prompt, max_output_tokens=50, flow=flow)
    return Waiting(request, so_far)


def chosen(policy: str, waiting: list[Waiting], server: Server | None = None, **had: float) -> str:
    """The ids of the batch, each a letter."""
    state = QueueState(waiting, [server or Server(0)], virtual_tokens=had)
    decision = parse_policy(policy).decide(state, 100.0)
    assert isinstance(decision, Dispatch)
    return "".join(decision.request_ids)


QUEUE = [asked("p", "a", 0), asked("q", "a", 1), asked("r", "b", 2), asked("s", "c", 3)]


@pytest.mark.parametrize(
    ("had", "first"),
    [
        ({"a": 5.0, "b": 4.9, "c": 6.0}, "r"),
        ({"a": 5.0, "b": 5.0, "c": 5.0}, "p"),  # equal: who came first
        ({"a": 5.0, "b": 5.0, "c": 1.0}, "s"),
        ({"a": 5.0, "c": 1.0}, "r"),  # nothing had yet: 0
        ({"d": 0.0, "a": 1.0, "b": 2.0, "c": 3.0}, "p"),  # who does not wait has no turn
    ],
)
def test_the_flow_with_the_fewest_virtual_tokens_goes_first(
    had: dict[str, float], first: str
) -> None:
    assert chosen("single:order=vtc", QUEUE, **had) == first


def test_each_of_a_batch_is_charged_with_its_prompt_before_the_next_is_chosen() -> None:
    """10 a prompt: a 0, b 15, c 100."""
    had = {"a": 0.0, "b": 15.0, "c": 100.0}
    queue = [asked(name, "a", at) for at, name in enumerate("uvw")] + QUEUE[2:]
    assert chosen("capped:max_batch_size=9,order=vtc", queue, **had) == "uvrws"
    assert chosen("capped:max_batch_size=3,order=vtc", queue, **had) == "uvr"
    heavier = "capped:max_batch_size=3,order=vtc,prompt_weight=2"
    assert chosen(heavier, queue, **had) == "urv"
    free = "capped:max_batch_size=4,order=vtc,prompt_weight=0"
    assert chosen(free, queue, **had) == "uvwr"


def test_a_flow_is_served_in_the_order_of_arrival() -> None:
    queue = [asked("x", "a", 0, prompt=50), asked("y", "a", 1, prompt=1)]
    assert chosen("continuous:max_batch_size=2,order=vtc", queue, a=3.0) == "xy"


def test_what_does_not_fit_is_waited_for_and_not_passed() -> None:
    queue = [asked("x", "a", 0, prompt=80), asked("y", "b", 1, prompt=1)]
    running = Server(0, [], 8, max_prompt_tokens=80)
    policy = "continuous:max_batch_size=2,order=vtc"
    assert chosen(policy, queue, running, b=1.0) == "x"
    assert chosen(policy, queue, running, a=1.0) == "y"


def test_a_full_server_takes_nobody() -> None:
    full = Server(0, [], 0)
    order = VirtualTokens()
    assert order.first(QUEUE, 3, full, 0.0, {}) == ()
    assert order.first(QUEUE, 0, Server(0), 0.0, {}) == ()
    assert order.first(QUEUE, 1, Server(0), 0.0, {}) == ("p",)


def test_a_fixed_batch_is_formed_across_flows() -> None:
    policy = parse_policy("fixed:batch_size=3,max_wait=50,order=vtc")
    had = {"a": 9.0, "b": 1.0, "c": 8.0}
    full = QueueState(QUEUE, [Server(0)], virtual_tokens=had)
    assert policy.decide(full, 4.0) == Dispatch(("r", "s", "p"), 0)
    few = QueueState(QUEUE[1:3], [Server(0)], virtual_tokens=had)
    assert policy.decide(few, 4.0) == WaitUntil(51.0), "the oldest of any flow"
    assert policy.decide(few, 51.0) == Dispatch(("r", "q"), 0)


def test_vtc_counts_and_is_asked_at_no_step() -> None:
    policy = parse_policy("continuous:order=vtc")
    assert counts(policy)
    assert not wants_steps(policy)
    assert not order_of(policy).preemptive
    assert order_of(policy) == VirtualTokens(prompt_weight=1.0, output_weight=2.0)
    assert [name for name, each in ORDERS.items() if each.weights is not Order.weights] == ["vtc"]
    assert isinstance(queue_for(policy), CountedQueue)


# the counters


def counters(prompt_weight: float = 1.0, output_weight: float = 2.0) -> FlowCounters:
    return FlowCounters(TokenWeights(prompt_weight, output_weight))


def served(found: FlowCounters, flow: str, prompt: int = 10, tokens: int = 0) -> None:
    """One request, from its arrival to its end."""
    found.join(flow)
    found.dispatch(asked("x", flow, prompt=prompt).request)
    found.made(flow, tokens)


def test_a_prompt_counts_at_its_dispatch_and_each_token_when_it_is_made() -> None:
    found = counters(prompt_weight=0.5, output_weight=3.0)
    found.join("a")
    assert found.virtual_tokens == {"a": 0.0}
    found.dispatch(asked("x", "a", prompt=10).request)
    assert found.virtual_tokens == {"a": 5.0}
    found.made("a", 1)
    found.made("a", 4)
    assert found.virtual_tokens == {"a": 20.0}


def test_a_flow_that_was_idle_is_lifted_to_the_lowest_that_waits() -> None:
    found = counters()
    for flow, tokens in (("a", 20), ("b", 40), ("c", 0)):
        served(found, flow, prompt=0, tokens=tokens)
    before = dict(found.virtual_tokens)  # each was lifted to the last that waited
    assert before == {"a": 40.0, "b": 120.0, "c": 120.0}
    found.join("b")
    found.join("a")
    assert found.virtual_tokens == {"a": 120.0, "b": 120.0, "c": 120.0}
    found.made("b", 5)  # of what it still has in service
    found.join("c")
    found.join("new")
    assert found.virtual_tokens == {"a": 120.0, "b": 130.0, "c": 120.0, "new": 120.0}
    found.made("c", 50)
    found.made("a", 2)
    found.join("newer")
    assert found.virtual_tokens["newer"] == 120.0, "of those that wait: new"
    assert found.virtual_tokens["c"] == 220.0


def test_nobody_is_lifted_while_something_of_it_waits() -> None:
    found = counters()
    found.join("a")
    served(found, "b", tokens=50)
    found.join("b")
    found.dispatch(asked("x", "b").request)
    found.join("a")
    assert found.virtual_tokens["a"] == 0.0
    assert found.virtual_tokens["b"] > 100.0


def test_where_nobody_waits_it_is_lifted_to_the_last_that_waited() -> None:
    """To what that one has now, not to what it had then; a higher counter stays."""
    found = counters()
    served(found, "a", prompt=300)
    served(found, "b", prompt=10)
    assert found.virtual_tokens == {"a": 300.0, "b": 310.0}
    found.made("b", 5)
    found.join("c")
    assert found.virtual_tokens["c"] == 320.0
    found.leave("c")  # its client went: the last that waited
    found.made("a", 100)
    found.join("a")
    assert found.virtual_tokens["a"] == 500.0
    found.leave("a")
    found.join("d")
    assert found.virtual_tokens["d"] == 500.0


def test_a_flow_leaves_with_the_last_of_its_requests() -> None:
    found = counters()
    found.join("a")
    found.join("a")
    found.join("b")
    found.leave("a")
    found.made("b", 10)
    found.join("c")
    assert found.virtual_tokens["c"] == 0.0, "a still waits"
    found.leave("c")
    found.leave("a")
    found.join("d")
    assert found.virtual_tokens["d"] == 20.0, "only b does"


def test_what_was_in_service_before_the_counters_counts_from_the_lowest() -> None:
    found = counters()
    found.join("a")
    found.made("a", 10)
    found.made("old", 3)
    assert found.virtual_tokens == {"a": 20.0, "old": 26.0}


# the memory

FEW = 50  # flows that are remembered, in place of MOST_IDLE


@pytest.fixture
def few(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flow_counters, "MOST_IDLE", FEW)


@pytest.mark.usefixtures("few")
def test_a_flow_that_stands_no_higher_than_it_would_be_lifted_to_is_forgotten() -> None:
    """With and without it the same counters follow."""
    found = counters()
    for place in range(10 * FEW):
        served(found, f"f{place}", prompt=1, tokens=1)
        assert len(found.virtual_tokens) <= FEW + 1
    lowest = min(found.virtual_tokens.values())
    found.join("f0")
    assert found.virtual_tokens["f0"] == 30.0 * FEW
    assert lowest > 0.0


@given(
    st.lists(
        st.tuples(st.sampled_from("abcd"), st.booleans(), st.integers(0, 30), st.integers(0, 9)),
        max_size=60,
    )
)
def test_what_is_forgotten_makes_no_difference(
    steps: list[tuple[str, bool, int, int]],
) -> None:
    """Of flows that have nothing in service."""
    forgetful, other, waiting = counters(), counters(), dict.fromkeys("abcd", 0)
    for flow, joins, prompt, tokens in steps:
        waiting[flow] += 1 if joins else -min(1, waiting[flow])
        for found in (forgetful, other):
            if joins:
                found.join(flow)
            elif flow in found._waiting:
                found.dispatch(asked("x", flow, prompt=prompt).request)
                found.made(flow, tokens)
        forgetful._forget()
        for each, number in waiting.items():
            if number:
                assert forgetful.virtual_tokens[each] == other.virtual_tokens[each]
        assert set(forgetful.virtual_tokens) <= set(other.virtual_tokens)


@pytest.mark.usefixtures("few")
def test_of_flows_above_it_the_highest_are_remembered() -> None:
    found = counters()
    found.join("low")
    for place in range(3 * FEW):
        served(found, f"f{place}", prompt=1 + place)
    known = found.virtual_tokens
    assert len(known) <= 2 * FEW + 2
    assert known["low"] == 0.0
    assert known[f"f{3 * FEW - 1}"] == 3.0 * FEW
    assert "f0" not in known
    found.join("f0")
    assert known["f0"] == 0.0
    assert found.virtual_tokens is known, "what policies look at"


@pytest.mark.usefixtures("few")
def test_flows_that_wait_are_not_forgotten() -> None:
    found = counters()
    for place in range(3 * FEW):
        found.join(f"f{place}")
    assert len(found.virtual_tokens) == 3 * FEW


# the queue of both drivers


def test_the_queue_tells_the_counters_who_comes_and_goes() -> None:
    queue = CountedQueue(VirtualTokens().weights)
    for each in QUEUE:
        queue.append(each)
    assert queue.counters is not None
    taken = queue.take(("r", "p"))
    assert [each.request.id for each in taken] == ["r", "p"]
    assert queue.counters.virtual_tokens == {"a": 10.0, "b": 10.0, "c": 0.0}
    assert queue.remove("s") == QUEUE[3]
    assert queue.remove("s") is None
    queue.append(asked("t", "d", 4))
    assert queue.counters.virtual_tokens["d"] == 10.0, "a waits, c no more"
    queue.put_back([asked("z", "e", 0)])
    assert queue.counters.virtual_tokens["e"] == 10.0
    assert [each.request.id for each in queue] == ["z", "q", "t"]


def test_other_orders_have_no_counters() -> None:
    for order in ("fcfs", "spjf", "hrrn"):
        assert queue_for(parse_policy(f"single:order={order}")).counters is None


@pytest.mark.parametrize("order", ["vtc", "hrrn", "binned,bins=2"])
def test_priorities_age_under_first_come_first_served_only(order: str) -> None:
    policy = parse_policy(f"capped:max_batch_size=2,order={order}")
    queue = queue_for(policy, priority_aging=5.0)
    for name, priority in (("a", 9), ("b", 0)):
        queue.append(
            Waiting(
                Request(
                    id=name,
                    arrived_at=0.0,
                    prompt_tokens=1,
                    max_output_tokens=1,
                    priority=priority,
                )
            )
        )
    assert [each.request.id for each in queue] == ["a", "b"]
