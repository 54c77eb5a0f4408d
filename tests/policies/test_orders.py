"""Orders of service: ranks, aging and its bound, preemption, and the contracts of every policy."""

from __future__ import annotations

import dataclasses
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kendall.policies import (
    Dispatch,
    Policy,
    Preempt,
    QueueState,
    Request,
    Running,
    Server,
    SpecError,
    Waiting,
    WaitUntil,
    format_policy,
    is_first_come,
    parse_policy,
)
from kendall.policies.contract import CONTRACTS, checked
from kendall.policies.ordered import Ordered, in_order, order_of, wants_steps, with_ranking
from kendall.policies.orders import ORDERS
from kendall.policies.orders.order import predicted_tokens
from kendall.policies.orders.preemptive import Gittins
from kendall.queueing.simulation.policy_check import check_policy
from tests.policies.states import seconds, states

TEXTS = {
    "fcfs": "order=fcfs",
    "spjf": "order=spjf",
    "ljf": "order=ljf",
    "threshold": "order=threshold,threshold=40",
    "boost": "order=boost,gamma=0.1,token_time=20ms",
    "binned": "order=binned,bins=3",
    "edf": "order=edf",
    "priority": "order=priority,aging=2",
    "hrrn": "order=hrrn",
    "vtc": "order=vtc,output_weight=3",
    "prefill-first": "order=prefill-first",
    "sprpt": "order=sprpt",
    "srpt-b": "order=srpt-b",
    "skippredict": "order=skippredict,threshold=40",
    "delaypredict": "order=delaypredict,limit=8",
    "pspjf": "order=pspjf,aging=0.5",
    "threshold-preemptive": "order=threshold-preemptive,threshold=40",
    "trail": "order=trail,c=0.5",
    "mlfq": "order=mlfq,quantum=8,levels=3",
    "fb": "order=fb,quantum=4",
    "gittins": "order=gittins,aging=3",
    "gittins-predicted": "order=gittins-predicted",
}
KEPT = dict.fromkeys(contract.name for contract in CONTRACTS)  # each checked, none broken
AT_ONCE = ("single", "continuous:max_batch_size=3", "continuous")
BATCHES = ("dynamic", "capped:max_batch_size=3", "elastic:max_batch_size=3", "fixed:batch_size=3")


def every_policy() -> list[str]:
    found = []
    for text in (*AT_ONCE, *BATCHES):
        for name, keys in TEXTS.items():
            at_once = text in AT_ONCE
            if not (name == "binned" if at_once else ORDERS[name].preemptive):
                found.append(f"{text}{',' if ':' in text else ':'}{keys}")
    return found


def test_a_policy_is_shown_by_its_parameters() -> None:
    shown = repr(parse_policy("single:order=spjf,aging=2"))
    assert shown.startswith("Single(order='spjf', aging=2.0, by=None, prompt_weight=None,")
    assert "ShortestFirst" not in shown


def test_every_order_takes_part() -> None:
    assert list(TEXTS) == list(ORDERS)


@pytest.mark.parametrize("name", TEXTS)
def test_what_a_class_says_of_its_orders_is_what_their_forms_do(name: str) -> None:
    """Before there is an instance, as where they are listed."""
    policy = "fixed:batch_size=3" if ORDERS[name].batches else "single"
    order = order_of(parse_policy(f"{policy}{',' if ':' in policy else ':'}{TEXTS[name]}"))
    form = order.form
    assert order.predicts == (form.quantity == "prediction" or form.bins is not None)
    assert order.batches == (form.bins is not None)
    assert order.is_formal() is (name != "vtc")


def one(
    name: str,
    at: float = 0.0,
    predicted: float | None = None,
    *,
    limit: int = 100,
    so_far: int = 0,
    priority: int = 0,
    deadline: float = math.inf,
) -> Waiting:
    request = Request(
        id=name,
        arrived_at=at,
        prompt_tokens=4,
        max_output_tokens=limit,
        predicted_output_tokens=predicted,
        priority=priority,
        deadline=deadline,
    )
    return Waiting(request, so_far)


def served(each: Waiting, *, preemptible: bool = True, preemptions: int = 0) -> Running:
    return Running(each.request, 0.0, each.output_tokens_so_far, preemptible, preemptions)


def first(policy: str, *waiting: Waiting, now: float = 10.0) -> str:
    """The id of the request that is dispatched."""
    parsed = parse_policy(policy)
    decision = parsed.decide(QueueState(in_order(parsed, waiting), [Server(0)]), now)
    assert isinstance(decision, Dispatch)
    return decision.request_ids[0]


@pytest.mark.parametrize("text", every_policy())
@pytest.mark.thinned(108)
def test_every_policy_keeps_its_contracts_in_every_order(text: str) -> None:
    checked = list(check_policy(parse_policy(text), states=150, seed=3))
    assert [(each.contract, each.fault) for each in checked if each.fault] == []
    assert all(each.note is None for each in checked)


@pytest.mark.thinned(3)
@pytest.mark.parametrize("text", AT_ONCE)
def test_ranks_that_were_learned_keep_the_contracts(text: str) -> None:
    plain = parse_policy(f"{text}{',' if ':' in text else ':'}order=gittins")
    ranking = Gittins().with_ranks((0, 8, 20, 50), (9.0, 30.0, 4.0, 12.0))
    assert isinstance(plain, Ordered)
    policy = with_ranking(plain, ranking)
    assert policy == plain
    assert wants_steps(policy)
    assert not wants_steps(plain)
    assert [each.fault for each in check_policy(policy, states=150, seed=3) if each.fault] == []
    ranks = [ranking.rank(one("a").request, made) for made in (0, 7, 8, 20, 49, 50, 99)]
    assert ranks == [9.0, 9.0, 30.0, 4.0, 4.0, 12.0, 12.0]


@pytest.mark.slow
@given(st.sampled_from(every_policy()).map(parse_policy), states(), seconds)
def test_and_in_states_that_are_looked_for(policy: Policy, state: QueueState, now: float) -> None:
    assert checked(policy, state, now) == KEPT
    assert len(CONTRACTS) > 10


def test_a_request_goes_on_with_what_it_has() -> None:
    """A dispatch forgets no token: the rank would be another, and its place be taken at once."""
    queue = [one("a", 1.0, 100.0, so_far=90), one("b", 2.0, 50.0)]
    assert checked(parse_policy("single:order=sprpt"), QueueState(queue, [Server(0)]), 3.0) == KEPT


@pytest.mark.thinned(3)
@pytest.mark.parametrize("text", every_policy())
def test_the_text_reads_back_and_only_fcfs_is_known_to_the_formulas(text: str) -> None:
    policy = parse_policy(text)
    assert parse_policy(format_policy(policy)) == policy
    assert is_first_come(policy) is ("fcfs" in text)
    assert order_of(policy).name in text
    assert wants_steps(policy) is (
        order_of(policy).name in ("mlfq", "fb", "srpt-b", "delaypredict")
    )


def test_keys_of_the_order_stand_last() -> None:
    text = "continuous:aging=0.02,order=spjf,max_batch_size=4"
    assert format_policy(parse_policy(text)) == "continuous:max_batch_size=4,order=spjf,aging=0.02"


@pytest.mark.parametrize(
    ("order", "expected"),
    [
        ("fcfs", "old"),
        ("spjf", "short"),
        ("ljf", "long"),
        ("edf", "urgent"),
        ("priority", "late"),
        ("threshold,threshold=12", "old"),
        ("threshold,threshold=8", "short"),
        ("sprpt", "begun"),
        ("srpt-b", "begun"),
        ("skippredict,threshold=12", "old"),
        ("skippredict,threshold=8", "short"),
        ("skippredict,threshold=4", "begun"),
        ("delaypredict,limit=20", "old"),
        ("delaypredict,limit=0", "begun"),
        ("pspjf", "short"),
        ("trail,c=0.5", "begun"),
        ("mlfq", "old"),
        ("fb", "old"),
    ],
)
def test_who_goes_first(order: str, expected: str) -> None:
    queue = [
        one("old", 0.0, 10.0),
        one("long", 1.0, 90.0),
        one("short", 2.0, 5.0),
        one("urgent", 3.0, 50.0, deadline=11.0),
        one("begun", 4.0, 30.0, so_far=28),
        one("late", 5.0, 60.0, priority=-1),
    ]
    assert first(f"single:order={order}", *queue) == expected


def test_the_highest_response_ratio_changes_with_time() -> None:
    queue = [one("long", 0.0, 40.0), one("short", 9.0, 4.0)]
    assert first("single:order=hrrn", *queue, now=9.1) == "long"
    assert first("single:order=hrrn", *queue, now=20.0) == "short"


def test_a_request_without_a_prediction_counts_as_long_as_its_limit() -> None:
    assert predicted_tokens(one("a", limit=70).request) == 70
    assert predicted_tokens(one("a", predicted=80, limit=70).request) == 70
    assert predicted_tokens(one("a", predicted=7.5, limit=70).request) == 7.5
    assert first("single:order=spjf", one("a", 0.0, limit=70), one("b", 1.0, 60.0)) == "b"


requests = st.lists(
    st.tuples(st.floats(0, 50), st.floats(1, 100), st.integers(-5, 5)), min_size=1, max_size=30
)


@pytest.mark.parametrize("order", ["spjf", "priority", "sprpt", "pspjf", "trail", "trail,c=0.5"])
def test_no_order_ages_backwards(order: str) -> None:
    parse_policy(f"continuous:order={order},aging=0")
    with pytest.raises(SpecError, match="got aging=-1; expected finite seconds >= 0"):
        parse_policy(f"continuous:order={order},aging=-1")


@given(
    requests,
    st.floats(0, 5),
    st.sampled_from(["spjf", "ljf", "priority", "threshold,threshold=30", "sprpt", "fb"]),
)
def test_nobody_is_overtaken_by_one_that_came_later_than_aging_allows(
    given_: list[tuple[float, float, int]], aging: float, order: str
) -> None:
    """By one that arrives at most aging x (own value - its value) later."""
    policy = parse_policy(f"single:order={order},aging={aging!r}")
    form = order_of(policy).form
    queue = in_order(
        policy,
        [
            one(str(index), at, predicted, priority=priority)
            for index, (at, predicted, priority) in enumerate(sorted(given_))
        ],
    )
    for place, behind in enumerate(queue):
        for ahead in queue[:place]:
            own, other = (form.value(each.request, 0) for each in (behind, ahead))
            later = ahead.request.arrived_at - behind.request.arrived_at
            assert later <= aging * (own - other) + 1e-9
    if aging == 0:
        assert [each.request.arrived_at for each in queue] == sorted(at for at, *_ in given_)


def preempts(policy: str, first_waiting: Waiting, *servers: Server) -> tuple[str, ...] | None:
    decision = parse_policy(policy).decide(QueueState([first_waiting], servers), 10.0)
    if isinstance(decision, WaitUntil):
        return None
    assert isinstance(decision, Preempt)
    return decision.request_ids


def test_the_worst_rank_leaves_for_a_lower_one_and_for_no_equal_one() -> None:
    in_service = [served(one("a", 0, 30, so_far=10)), served(one("b", 1, 90, so_far=30))]
    server = Server(0, in_service)
    policy = "continuous:max_batch_size=2,order=sprpt"
    assert preempts(policy, one("new", 5, 59.0), server) == ("b",)
    assert preempts(policy, one("new", 5, 60.0), server) is None, "it came later"
    assert preempts(policy, one("new", 0.5, 60.0), server) == ("b",), "it came earlier"
    assert preempts("continuous:max_batch_size=2,order=spjf", one("new", 5, 1), server) is None
    assert preempts("continuous:max_batch_size=2", one("new", 5, 1), server) is None


def test_what_cannot_go_on_exactly_stays_in_service() -> None:
    kept = Server(0, [served(one("a", 0, 90), preemptible=False), served(one("b", 1, 50))])
    policy = "continuous:max_batch_size=2,order=sprpt"
    assert preempts(policy, one("new", 5, 10), kept) == ("b",)
    assert preempts(policy, one("new", 5, 60), kept) is None


def test_trail_interrupts_nobody_from_its_share_on() -> None:
    policy = "single:order=trail,c=0.5"
    for so_far, expected in ((9, ("a",)), (10, None), (15, None)):
        server = Server(0, [served(one("a", 0, 20, so_far=so_far))])
        assert preempts(policy, one("new", 5, 1), server) == expected


def test_predicted_short_ones_interrupt_long_ones_only() -> None:
    policy = "single:order=threshold-preemptive,threshold=20"
    assert preempts(policy, one("new", 5, 20), Server(0, [served(one("a", 0, 21))])) == ("a",)
    assert preempts(policy, one("new", 5, 5), Server(0, [served(one("a", 0, 20))])) is None


def test_each_request_is_preempted_so_many_times_at_most() -> None:
    policy = "continuous:max_batch_size=2,order=sprpt,max_preemptions=2"
    long, longer = one("a", 0, 30), one("b", 1, 90)
    newcomer = one("c", 2, 10)
    for of_longer, taken in ((1, ("b",)), (2, ("a",)), (3, ("a",))):
        server = Server(0, [served(long), served(longer, preemptions=of_longer)])
        assert preempts(policy, newcomer, server) == taken
    server = Server(0, [served(each, preemptions=2) for each in (long, longer)])
    assert preempts(policy, newcomer, server) is None


def test_these_orders_read_predicted_lengths() -> None:
    assert {name for name, order in ORDERS.items() if order.predicts} == {
        *("spjf", "ljf", "threshold", "boost", "binned", "hrrn"),
        *("pspjf", "sprpt", "srpt-b", "trail", "threshold-preemptive", "skippredict"),
        *("delaypredict", "gittins-predicted"),
    }


def test_what_outlives_its_prediction_loses_rank_until_it_stands_where_it_began() -> None:
    order = order_of(parse_policy("single:order=srpt-b"))
    request = one("a", 0.0, 10.0).request
    made = {0: 10, 1: 9, 9: 1, 10: 0, 11: 1, 19: 9, 20: 10, 21: 10, 1000: 10}
    assert {so_far: order.rank(request, so_far) for so_far in made} == made


def test_predicted_short_ones_rank_before_all_others_and_the_others_by_what_is_left() -> None:
    order = order_of(parse_policy("single:order=skippredict,threshold=20"))
    short, long = one("a", 0.0, 20.0).request, one("b", 0.0, 21.0).request
    assert {order.rank(short, made) for made in (0, 5, 90)} == {-math.inf}
    assert [order.rank(long, made) for made in (0, 20, 90)] == [21, 1, -69]
    assert order.rank(one("c", 0.0, limit=20).request, 0) == -math.inf, "its limit is its length"
    policy = "single:order=skippredict,threshold=20"
    assert preempts(policy, one("new", 5, 20), Server(0, [served(one("a", 0, 21))])) == ("a",)
    assert preempts(policy, one("new", 5, 5), Server(0, [served(one("a", 0, 20))])) is None
    outlived = Server(0, [served(one("a", 0, 30, so_far=80))])
    assert preempts(policy, one("new", 5, 21), outlived) is None
    assert preempts(policy, one("new", 5, 20), outlived) == ("a",)


def test_the_first_tokens_of_everyone_rank_before_all_others() -> None:
    order = order_of(parse_policy("single:order=delaypredict,limit=8"))
    request = one("a", 0.0, 30.0).request
    assert [order.rank(request, made) for made in (0, 7, 8, 29, 40)] == [
        *(-math.inf, -math.inf, 22, 1, -10)
    ]
    policy = "single:order=delaypredict,limit=8"
    in_service = one("a", 0, 30, so_far=7), one("a", 0, 30, so_far=8)
    for running, expected in zip(in_service, (None, ("a",)), strict=True):
        assert preempts(policy, one("new", 5, 90), Server(0, [served(running)])) == expected


def test_levels_double_their_quantum() -> None:
    order = order_of(parse_policy("single:order=mlfq,quantum=8,levels=3"))
    made = {0: 0, 7: 0, 8: 1, 23: 1, 24: 2, 1000: 2}
    assert {so_far: order.rank(one("a").request, so_far) for so_far in made} == made
    order = order_of(parse_policy("single:order=fb,quantum=4"))
    assert [order.rank(one("a").request, so_far) for so_far in (0, 3, 4, 9)] == [0, 0, 1, 2]
    order = order_of(parse_policy("single:order=mlfq"))
    assert [order.rank(one("a").request, so_far) for so_far in (15, 16, 10_000)] == [0, 1, 3]


def test_the_server_with_the_worst_rank_gives_way() -> None:
    servers = [
        Server(3, [served(one("a", 0, 50))]),
        Server(5, [served(one("b", 0, 80))]),
        Server(7, [served(one("c", 0, 70))]),
    ]
    assert preempts("single:order=pspjf", one("new", 5, 10), *servers) == ("b",)


def test_as_many_leave_as_the_memory_asks_for() -> None:
    """Each holds prompt + limit: 4 + 100 tokens, of 300."""
    in_service = [served(one(name, 0, predicted)) for name, predicted in (("a", 30), ("b", 90))]
    server = Server(0, in_service, max_context_tokens=300)
    policy = "continuous:max_batch_size=3,order=pspjf"
    assert preempts(policy, one("new", 5, 10, limit=100), server) == ("b",)
    assert preempts(policy, one("new", 5, 10, limit=200), server) == ("b", "a")
    tight = dataclasses.replace(server, in_service=[in_service[0], served(one("b", 0, 5))])
    assert preempts(policy, one("new", 5, 10, limit=200), tight) is None, "one would not do"


def test_batches_have_members_of_one_bin() -> None:
    queue = [one("a", 0, 10), one("b", 1, 90), one("c", 2, 20), one("d", 3, 95)]
    policy = parse_policy("capped:max_batch_size=4,order=binned,bins=2")
    assert policy.decide(QueueState(queue, [Server(0)]), 9.0) == Dispatch(("a", "c"), 0)
    fixed = parse_policy("fixed:batch_size=2,order=binned,bins=2")
    assert fixed.decide(QueueState(queue[1:], [Server(0)]), 9.0) == Dispatch(("b", "d"), 0)
    assert fixed.decide(QueueState(queue[:2], [Server(0)]), 9.0) == WaitUntil(math.inf)
    closing = QueueState(queue[:2], [Server(0)], closing=True)
    assert fixed.decide(closing, 9.0) == Dispatch(("a",), 0)
    assert order_of(fixed).bin_of(one("x", predicted=50).request) == 1  # type: ignore[attr-defined]
    assert order_of(fixed).bin_of(one("x", predicted=50.5).request) == 2  # type: ignore[attr-defined]
    assert order_of(fixed).bin_of(one("x", predicted=0.0).request) == 1  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("capped:max_batch_size=4,order=sprpt", "got order sprpt, which interrupts a batch; exp"),
        ("single:order=binned,bins=2", "got order binned, which forms batches of like lengths; ex"),
        (
            "single:order=spjf,threshold=4",
            "got threshold for order spjf; expected aging, by, prompt",
        ),
        ("single:order=hrrn,aging=1", "got aging for order hrrn; expected no parameter"),
        ("single:aging=1", "got aging for order fcfs; expected no parameter"),
        ("single:order=threshold", "got order threshold without threshold; expected threshold=NUM"),
        (
            "single:order=threshold,threshold=0",
            "got threshold=0; expected a finite number of tokens > 0",
        ),
        (
            "single:order=threshold,threshold=inf",
            "got threshold=inf; expected a finite number of tokens > 0",
        ),
        ("single:order=spjf,aging=-1", "got aging=-1; expected finite seconds >= 0"),
        ("single:order=spjf,aging=inf", "got aging=inf; expected finite seconds >= 0"),
        ("single:order=trail,c=-0.1", "got c=-0.1; expected a number >= 0"),
        (
            "single:order=spjf,aging=x",
            "got aging='x' for policy single; expected a number, or a duration with its unit",
        ),
        (
            "single:order=skippredict",
            "got order skippredict without threshold; expected threshold=",
        ),
        (
            "single:order=skippredict,threshold=-1",
            "got threshold=-1; expected a finite number of tokens >= 0",
        ),
        ("single:order=skippredict,threshold=nan", "got threshold='nan' for policy single"),
        ("single:order=skippredict,threshold=9,limit=2", "got limit for order skippredict;"),
        ("single:order=skippredict,threshold=9,aging=1", "got aging for order skippredict;"),
        (
            "single:order=delaypredict",
            "got order delaypredict without limit; expected limit=NUMBER",
        ),
        ("single:order=delaypredict,limit=-1", "got limit=-1; expected a whole number of tokens"),
        (
            "single:order=delaypredict,limit=1.5",
            "got limit=1.5 for policy single; expected a whole number",
        ),
        ("capped:max_batch_size=4,order=delaypredict,limit=4", "which interrupts a batch; expect"),
        ("single:order=mlfq,levels=0", "got levels=0; expected a whole number from 1 to 30"),
        ("single:order=mlfq,levels=31", "got levels=31; expected a whole number from 1 to 30"),
        ("single:order=fb,quantum=1000000000000001", "got quantum=1000000000000001"),
        (
            "single:order=fb,quantum=1.5",
            "got quantum=1.5 for policy single; expected a whole number",
        ),
        ("single:order=fb,quantum=0", "got quantum=0; expected tokens, at least 1"),
        ("single:order=mlfq,quantum=0", "got quantum=0; expected tokens, at least 1"),
        ("single:order=mlfq,aging=-1", "got aging=-1; expected finite seconds >= 0"),
        ("dynamic:order=binned,bins=0", "got bins=0; expected a whole number from 1 to 1000"),
        ("dynamic:order=binned,bins=1001", "got bins=1001; expected a whole number from 1 to 10"),
        ("single:order=vtc,prompt_weight=-1", "got prompt_weight=-1; expected a number >= 0"),
        ("single:order=vtc,output_weight=inf", "got output_weight=inf; expected a number >= 0"),
        (
            "single:order=vtc,prompt_weight=0,output_weight=0",
            "got prompt_weight=0 and output_weight=0; expected one of them > 0: else no service",
        ),
        ("single:order=vtc,aging=1", "got aging for order vtc; expected prompt_weight, output_"),
        (
            "single:order=spjf,prompt_weight=1",
            "got prompt_weight=1 with by=tokens; expected by=service",
        ),
        ("single:order=vtc,max_preemptions=1", "order vtc, which takes nothing out of service"),
        ("single:order=vtc,weight=1", "got key 'weight' for policy single; expected order, agi"),
        ("single:order=sjf", "did you mean 'spjf'?"),
        (
            "continuous:order=foo",
            "expected one of fcfs, spjf, ljf, threshold, boost, edf, priority, hrrn, vtc, pr",
        ),
        ("elastic:order=foo", "threshold, boost, binned, edf"),
        ("elastic:order=trail", "prefill-first, or the policy single or continuous"),
        (
            "continuous:order=binned",
            "gittins-predicted, or the policy dynamic, fixed, capped or el",
        ),
        ("continuous:order=", "expected order=VALUE, for example continuous:order=spjf"),
        ("continuous:order", "expected key=value, for example continuous:order=spjf"),
        ("capped:order", "expected key=value, for example capped:order=spjf"),
        ("continuous:spjf", "expected key=value, for example continuous:max_batch_size=8"),
        ("single:order=trail,c=nan", "got c='nan' for policy single; expected a number"),
        ("single:order=spjf,aging=x", "or a duration with its unit, such as 300ms"),
        ("single:order=sprpt,max_preemptions=0", "got max_preemptions=0; expected a whole number"),
        (
            "single:order=spjf,max_preemptions=1",
            "order spjf, which takes nothing out of service; expected order sprpt, srpt-b, ",
        ),
        ("dynamic:max_preemptions=1", "takes nothing out of service; expected no such key for dyn"),
    ],
)
def test_a_wrong_order_is_told_what_to_do(text: str, says: str) -> None:
    with pytest.raises(SpecError) as raised:
        parse_policy(text)
    assert says in str(raised.value)
    assert "c=" not in text or "duration" not in str(raised.value)


@pytest.mark.parametrize(
    "text",
    [
        "single:order=trail,c=0",
        "single:order=sprpt,max_preemptions=1",
        "single:order=threshold,threshold=1",
        "single:order=threshold,threshold=0.5",
        "single:order=skippredict,threshold=0",
        "single:order=delaypredict,limit=0",
        "single:order=delaypredict,limit=1000000000000000",
        "single:order=fb,quantum=1000000000000000",
        "single:order=spjf,aging=0",
        "single:order=vtc,prompt_weight=0",
        "single:order=vtc,output_weight=0",
        "single:order=mlfq,quantum=1,levels=30",
        "dynamic:order=binned,bins=1000",
    ],
)
def test_borders_are_allowed(text: str) -> None:
    assert parse_policy(text).order in text  # type: ignore[attr-defined]
