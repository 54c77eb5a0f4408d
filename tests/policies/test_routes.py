"""Which of the free servers the next requests go to."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping

import pytest
from hypothesis import given

from kendall.policies import (
    POLICIES,
    Capped,
    Continuous,
    Decision,
    Dispatch,
    Elastic,
    Fixed,
    Policy,
    QueueState,
    Server,
    Single,
    SpecError,
    WaitUntil,
    format_policy,
    parse_policy,
    served_as,
)
from kendall.policies.routes import PREFIX, ROUTES
from kendall.policies.text import first_come_form, with_order
from kendall.queueing.choosing.candidates import sized, sized_policy
from tests.policies.decisions import FIVE, IDLE, batch
from tests.policies.states import policies, running, seconds, states, waiting

SLOTS = Continuous(max_batch_size=3, route=PREFIX)
Matches = Mapping[str, Mapping[int, int]]
EMPTIES = (Server(0), Server(1), Server(2))
BUSIER = (Server(0, running("x", "y")), Server(1, running("z")), Server(2))
ROWS: list[tuple[str, Policy, tuple[Server, ...], Matches, Decision]] = [
    ("nothing known: the least loaded", SLOTS, BUSIER, {}, batch("abc", 2)),
    ("the server that has its prefix", SLOTS, BUSIER, {"a": {1: 4}}, batch("a", 1)),
    ("the longest prefix wins", SLOTS, BUSIER, {"a": {0: 5, 1: 4}}, batch("a", 0)),
    ("of equal ones the least loaded", SLOTS, BUSIER, {"a": {0: 4, 1: 4}}, batch("a", 1)),
    (
        "a favourite that is full is not waited for",
        SLOTS,
        (Server(0, running("x", "y", "z")), Server(1)),
        {"a": {0: 9}},
        batch("abc", 1),
    ),
    (
        "nor one without memory for it",
        SLOTS,
        (Server(0, running("x"), max_context_tokens=59), Server(1, running("y", "z"))),
        {"a": {0: 9}},
        batch("a", 1),
    ),
    (
        "those behind go along that prefer the same one",
        SLOTS,
        BUSIER,
        {"a": {1: 4}, "b": {1: 2}, "c": {2: 3}},
        batch("ab", 1),
    ),
    (
        "one that prefers nothing takes the least loaded, at the next decision",
        SLOTS,
        BUSIER,
        {"a": {1: 4}, "c": {1: 4}},
        batch("a", 1),
    ),
    (
        "one that prefers another does not go along with the least loaded",
        SLOTS,
        BUSIER,
        {"b": {0: 1}},
        batch("a", 2),
    ),
    (
        "one that prefers a full server goes along",
        SLOTS,
        (Server(0, running("x", "y", "z")), Server(1)),
        {"b": {0: 1}},
        batch("abc", 1),
    ),
    (
        "all full",
        SLOTS,
        (Server(0, running("x", "y", "z")),),
        {"a": {0: 9}},
        IDLE,
    ),
    ("single: the empty server", Single(route=PREFIX), EMPTIES, {"a": {2: 1}}, batch("a", 2)),
    (
        "a batch: the server with the most of its prefixes",
        Capped(max_batch_size=3, route=PREFIX),
        EMPTIES,
        {"a": {1: 2}, "b": {2: 2}, "c": {2: 1}, "d": {1: 9}},
        batch("abc", 2),
    ),
    (
        "of equal ones the first",
        Elastic(max_batch_size=2, route=PREFIX),
        EMPTIES,
        {"a": {2: 2}, "b": {1: 2}},
        batch("ab", 1),
    ),
    (
        "a batch does not wait for a busy server",
        Capped(max_batch_size=3, route=PREFIX),
        (Server(0), Server(1, running("x"))),
        {"a": {1: 2}},
        batch("abc", 0),
    ),
    (
        "a batch goes to no server with other bounds",
        Capped(max_batch_size=3, route=PREFIX),
        (Server(0), Server(1, max_batch_size=2)),
        {"a": {1: 2}},
        batch("abc", 0),
    ),
    (
        "fixed, full",
        Fixed(batch_size=5, route=PREFIX),
        EMPTIES,
        {"e": {1: 2}},
        batch("abcde", 1),
    ),
    (
        "fixed, at the deadline",
        Fixed(batch_size=9, max_wait=1.0, route=PREFIX),
        EMPTIES,
        {"e": {1: 2}},
        batch("abcde", 1),
    ),
    (
        "least_loaded looks at no prefix",
        Continuous(max_batch_size=3),
        BUSIER,
        {"a": {1: 4}},
        batch("abc", 2),
    ),
]


@pytest.mark.parametrize(
    ("policy", "servers", "matches", "expected"),
    [pytest.param(*row[1:], id=row[0]) for row in ROWS],
)
def test_decision(
    policy: Policy, servers: tuple[Server, ...], matches: Matches, expected: Decision
) -> None:
    state = QueueState(FIVE, servers, prefix_matches=matches)
    assert policy.decide(state, 105.0) == expected


@pytest.mark.left_out
@given(policies, states(), seconds)
def test_without_known_prefixes_both_routes_decide_the_same(
    policy: Policy, state: QueueState, now: float
) -> None:
    """As in the simulator, which knows no prompts."""
    state = dataclasses.replace(state, prefix_matches={})
    by_route = [
        dataclasses.replace(policy, route=route).decide(state, now)  # type: ignore[type-var]
        for route in ROUTES
    ]
    assert by_route[0] == by_route[1]


@pytest.mark.slow
@given(policies, states(), seconds)
def test_the_route_lets_no_request_wait_and_changes_no_order(
    policy: Policy, state: QueueState, now: float
) -> None:
    """With prefix something starts whenever it does with least_loaded, from the head on."""
    usual, routed = (
        dataclasses.replace(policy, route=route).decide(state, now)  # type: ignore[type-var]
        for route in ROUTES
    )
    if isinstance(usual, WaitUntil):
        assert routed == usual
    else:
        assert isinstance(usual, Dispatch)
        assert isinstance(routed, Dispatch)
        assert routed.request_ids[0] == usual.request_ids[0]


def test_a_second_decision_sends_the_next_one_to_its_own_server() -> None:
    queue = waiting("a", "b")
    servers = [Server(0), Server(1)]
    matches = {"a": {0: 3}, "b": {1: 3}}
    first = SLOTS.decide(QueueState(queue, servers, prefix_matches=matches), 0.0)
    assert first == batch("a", 0)
    servers = [Server(0, running("a")), Server(1)]
    then = SLOTS.decide(QueueState(queue[1:], servers, prefix_matches=matches), 0.0)
    assert then == batch("b", 1)


@pytest.mark.parametrize("name", POLICIES)
def test_every_policy_has_the_key_and_leaves_out_its_default(name: str) -> None:
    needed = {"fixed": "batch_size=8,", "capped": "max_batch_size=8,"}.get(name, "")
    text = f"{name}:{needed}route=prefix"
    assert format_policy(parse_policy(text)) == text
    usual = parse_policy(f"{name}:{needed}route=least_loaded")
    assert format_policy(usual) == f"{name}:{needed}".rstrip(",:")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "continuous:route=prefixx",
            "got route='prefixx' for policy continuous; expected one of least_loaded, prefix; did "
            "you mean 'prefix'?",
        ),
        ("single:route=random", "got route='random' for policy single; expected one of least_lo"),
        ("single:route=", "got route without a value in 'single:route='; expected route=VALUE"),
        ("single:route=prefix,route=prefix", "got route twice in"),
        ("single:rout=prefix", "got key 'rout' for policy single; expected order, aging"),
    ],
)
def test_what_is_no_route_is_refused(text: str, message: str) -> None:
    with pytest.raises(SpecError, match=f"^{re.escape(message)}"):
        parse_policy(text)


def test_python_refuses_it_too() -> None:
    message = "got route='random'; expected least_loaded or prefix"
    with pytest.raises(SpecError, match=f"^{message}$"):
        Single(route="random")


def test_the_route_stays_when_the_policy_is_changed_otherwise() -> None:
    """On an engine that cannot pad, under another order, at another batch size."""
    assert served_as(Capped(max_batch_size=4, route=PREFIX), pads=False) == Elastic(
        max_batch_size=4, route=PREFIX
    )
    fixed = served_as(Fixed(batch_size=4, route=PREFIX), pads=False)
    assert format_policy(fixed) == "fixed:batch_size=4,route=prefix"
    ordered = with_order(SLOTS, "spjf:aging=0.5")
    assert format_policy(ordered) == "continuous:max_batch_size=3,order=spjf,aging=0.5,route=prefix"
    assert first_come_form(ordered) == SLOTS
    assert sized("continuous", 8, in_force=SLOTS) == "continuous:max_batch_size=8,route=prefix"
    assert sized_policy(parse_policy("dynamic:route=prefix")) == Capped(
        max_batch_size=8, route=PREFIX
    )
