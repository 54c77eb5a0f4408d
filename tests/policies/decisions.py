"""What each policy decides in a queue state, row by row."""

from __future__ import annotations

import math

import pytest

from kendall.policies import (
    Capped,
    Continuous,
    Decision,
    Dispatch,
    Dynamic,
    Elastic,
    Fixed,
    Policy,
    QueueState,
    Running,
    Server,
    Single,
    Waiting,
    WaitUntil,
)
from tests.policies.states import calls, running, waiting

FIVE = waiting(
    "a", "b", "c", "d", "e", arrived_at=100.0
)  # a arrived at 100 s, e at 104 s; 10 prompt tokens, limit 20
IDLE = WaitUntil(math.inf)
EMPTY = Server(0)
BUSY = Server(0, running("x"))


def batch(ids: str, server: int = 0) -> Dispatch:
    """`batch("abc")`: those requests, in that order."""
    return Dispatch(tuple(ids), server)


def state(*servers: Server, queue: list[Waiting] = FIVE, closing: bool = False) -> QueueState:
    return QueueState(queue, servers or (EMPTY,), closing=closing)


Row = tuple[str, Policy, QueueState, float, Decision]
SINGLE: list[Row] = [
    ("the oldest alone, however many wait", Single(), state(), 105.0, batch("a")),
    ("nothing waits", Single(), state(queue=[]), 105.0, IDLE),
    ("a busy server is left alone", Single(), state(BUSY), 105.0, IDLE),
    ("no server at all", Single(), QueueState(FIVE, ()), 105.0, IDLE),
    ("the second server is the empty one", Single(), state(BUSY, Server(7)), 105.0, batch("a", 7)),
    ("of two empty servers the first", Single(), state(Server(3), Server(4)), 105.0, batch("a", 3)),
    (
        "the oldest runs even where its prompt is above the bound",
        Single(),
        state(Server(0, max_prompt_tokens=9)),
        105.0,
        batch("a"),
    ),
]
DYNAMIC: list[Row] = [
    ("all that wait", Dynamic(), state(), 105.0, batch("abcde")),
    (
        "a server without bounds takes a thousand",
        Dynamic(),
        state(queue=waiting(*(str(n) for n in range(1000)))),
        2000.0,
        Dispatch(tuple(str(n) for n in range(1000)), 0),
    ),
    ("one alone does not wait for company", Dynamic(), state(queue=FIVE[:1]), 105.0, batch("a")),
    ("nothing waits", Dynamic(), state(queue=[]), 105.0, IDLE),
    ("a server with one member left is not empty", Dynamic(), state(BUSY), 105.0, IDLE),
    (
        "the engine's bound holds",
        Dynamic(),
        state(Server(0, max_batch_size=3)),
        105.0,
        batch("abc"),
    ),
    (
        "three prompts of 10 fill a step of 30",
        Dynamic(),
        state(Server(0, max_prompt_tokens=30)),
        105.0,
        batch("abc"),
    ),
    (
        "the third prompt of 10 does not fit into 29",
        Dynamic(),
        state(Server(0, max_prompt_tokens=29)),
        105.0,
        batch("ab"),
    ),
    (
        "two contexts of 10 + 20 fill a memory of 60",
        Dynamic(),
        state(Server(0, max_context_tokens=60)),
        105.0,
        batch("ab"),
    ),
    (
        "the second context does not fit into 59",
        Dynamic(),
        state(Server(0, max_context_tokens=59)),
        105.0,
        batch("a"),
    ),
    (
        "the oldest runs even where both bounds are below it",
        Dynamic(),
        state(Server(0, (), 8, 1, 1)),
        105.0,
        batch("a"),
    ),
    (
        "all go to the one empty server",
        Dynamic(),
        state(BUSY, Server(1), Server(2)),
        105.0,
        batch("abcde", 1),
    ),
    (
        "tokens made before a preemption are computed again: 10 + 15 with 10 make 35",
        Dynamic(),
        state(Server(0, max_prompt_tokens=34), queue=waiting("p", so_far=15) + FIVE[:1]),
        105.0,
        batch("p"),
    ),
    (
        "nobody overtakes: a small one behind a large one that does not fit waits with it",
        Dynamic(),
        state(
            Server(0, max_prompt_tokens=30),
            queue=waiting("a") + waiting("L", prompt=25) + waiting("s", prompt=1),
        ),
        105.0,
        batch("a"),
    ),
]
CAPPED: list[Row] = [
    ("the cap cuts", Capped(max_batch_size=2), state(), 105.0, batch("ab")),
    ("fewer than the cap go at once", Capped(max_batch_size=8), state(), 105.0, batch("abcde")),
    ("exactly the cap", Capped(max_batch_size=5), state(), 105.0, batch("abcde")),
    (
        "the engine's bound is below the cap",
        Capped(max_batch_size=4),
        state(Server(0, max_batch_size=3)),
        105.0,
        batch("abc"),
    ),
    (
        "the cap is below the engine's bound",
        Capped(max_batch_size=3),
        state(Server(0, max_batch_size=4)),
        105.0,
        batch("abc"),
    ),
    (
        "memory cuts below the cap",
        Capped(max_batch_size=4),
        state(Server(0, max_context_tokens=60)),
        105.0,
        batch("ab"),
    ),
    ("a busy server is left alone", Capped(max_batch_size=2), state(BUSY), 105.0, IDLE),
    (
        "the second server is the empty one",
        Capped(max_batch_size=2),
        state(BUSY, Server(1)),
        105.0,
        batch("ab", 1),
    ),
]
ELASTIC: list[Row] = [
    ("without a cap all that wait", Elastic(), state(), 105.0, batch("abcde")),
    ("with a cap as many", Elastic(max_batch_size=2), state(), 105.0, batch("ab")),
    (
        "the engine's bound holds",
        Elastic(),
        state(Server(0, max_batch_size=3)),
        105.0,
        batch("abc"),
    ),
    ("a prompt bound cuts", Elastic(), state(Server(0, max_prompt_tokens=20)), 105.0, batch("ab")),
    (
        "members left, others may not join: the server is not empty",
        Elastic(max_batch_size=8),
        state(BUSY),
        105.0,
        IDLE,
    ),
]
FIXED: list[Row] = [
    (
        "fewer than the batch and nothing else: wait for the next arrival",
        Fixed(batch_size=6),
        state(),
        1e9,
        IDLE,
    ),
    ("exactly the batch", Fixed(batch_size=5), state(), 105.0, batch("abcde")),
    (
        "more than the batch: one batch, the rest keeps its place",
        Fixed(batch_size=3),
        state(),
        105.0,
        batch("abc"),
    ),
    (
        "before max_wait: until the oldest has waited so long",
        Fixed(batch_size=6, max_wait=8.0),
        state(),
        107.9,
        WaitUntil(108.0),
    ),
    (
        "at max_wait: what is there",
        Fixed(batch_size=6, max_wait=8.0),
        state(),
        108.0,
        batch("abcde"),
    ),
    (
        "after max_wait: what is there",
        Fixed(batch_size=6, max_wait=8.0),
        state(),
        109.0,
        batch("abcde"),
    ),
    (
        "a full batch does not wait for max_wait",
        Fixed(batch_size=2, max_wait=8.0),
        state(),
        104.0,
        batch("ab"),
    ),
    (
        "max_wait passed with more than a batch: still batch_size",
        Fixed(batch_size=4, max_wait=1.0),
        state(),
        105.0,
        batch("abcd"),
    ),
    (
        "closing: what is there, no company will come",
        Fixed(batch_size=6),
        state(closing=True),
        105.0,
        batch("abcde"),
    ),
    (
        "closing with more than a batch: batch_size",
        Fixed(batch_size=4),
        state(closing=True),
        105.0,
        batch("abcd"),
    ),
    ("closing and nothing left", Fixed(batch_size=4), state(queue=[], closing=True), 105.0, IDLE),
    (
        "busy past max_wait: only a completion helps",
        Fixed(batch_size=6, max_wait=1.0),
        state(BUSY),
        200.0,
        IDLE,
    ),
    ("busy and closing", Fixed(batch_size=2), state(BUSY, closing=True), 105.0, IDLE),
    ("nothing waits: no deadline", Fixed(batch_size=2, max_wait=1.0), state(queue=[]), 105.0, IDLE),
    (
        "the engine's bound makes a smaller batch full",
        Fixed(batch_size=8),
        state(Server(0, max_batch_size=4)),
        105.0,
        batch("abcd"),
    ),
    (
        "exactly the engine's bound is full",
        Fixed(batch_size=8),
        state(Server(0, max_batch_size=5)),
        105.0,
        batch("abcde"),
    ),
    (
        "not yet full under the engine's bound",
        Fixed(batch_size=8),
        state(Server(0, max_batch_size=6)),
        105.0,
        IDLE,
    ),
    (
        "memory for two makes two a full batch: a sixth would not help",
        Fixed(batch_size=6),
        state(Server(0, (), 8, 99, 60)),
        105.0,
        batch("ab"),
    ),
    (
        "memory for just the five that wait may hold a sixth, smaller one",
        Fixed(batch_size=6),
        state(Server(0, (), 8, 99, 150)),
        105.0,
        IDLE,
    ),
    (
        "max_wait with a bound on prompts",
        Fixed(batch_size=6, max_wait=1.0),
        state(Server(0, max_prompt_tokens=20)),
        105.0,
        batch("ab"),
    ),
    (
        "the second server is the empty one",
        Fixed(batch_size=5),
        state(BUSY, Server(1)),
        105.0,
        batch("abcde", 1),
    ),
]
CONTINUOUS: list[Row] = [
    (
        "an empty server takes all that wait",
        Continuous(max_batch_size=8),
        state(),
        105.0,
        batch("abcde"),
    ),
    (
        "two of four slots are free",
        Continuous(max_batch_size=4),
        state(Server(0, running("x", "y"))),
        105.0,
        batch("ab"),
    ),
    (
        "one slot is free",
        Continuous(max_batch_size=4),
        state(Server(0, running("x", "y", "z"))),
        105.0,
        batch("a"),
    ),
    (
        "no slot is free",
        Continuous(max_batch_size=2),
        state(Server(0, running("x", "y"))),
        105.0,
        IDLE,
    ),
    (
        "more in service than the bound after a switch",
        Continuous(max_batch_size=1),
        state(Server(0, running("x", "y"))),
        105.0,
        IDLE,
    ),
    (
        "without a bound of its own the engine's",
        Continuous(),
        state(Server(0, running("x"), max_batch_size=3)),
        105.0,
        batch("ab"),
    ),
    (
        "the engine's bound is below the policy's",
        Continuous(max_batch_size=8),
        state(Server(0, running("x"), 4)),
        105.0,
        batch("abc"),
    ),
    ("nothing waits", Continuous(), state(queue=[]), 105.0, IDLE),
    ("no server at all", Continuous(), QueueState(FIVE, ()), 105.0, IDLE),
    (
        "the server with the most free slots",
        Continuous(max_batch_size=3),
        state(Server(0, running("x", "y")), Server(1, running("z"))),
        105.0,
        batch("ab", 1),
    ),
    (
        "of servers with equally many free slots the first",
        Continuous(max_batch_size=3),
        state(Server(5, running("x")), Server(6, running("y"))),
        105.0,
        batch("ab", 5),
    ),
    (
        "two in service hold 60 of 119: one more of 30 fits",
        Continuous(),
        state(Server(0, running("x", "y"), 8, 99, 119)),
        105.0,
        batch("a"),
    ),
    (
        "two in service hold 60 of 89: none fits",
        Continuous(),
        state(Server(0, running("x", "y"), 8, 99, 89)),
        105.0,
        IDLE,
    ),
    (
        "the server with the most free slots has no memory, the other has",
        Continuous(max_batch_size=4),
        state(
            Server(0, running("x"), max_context_tokens=59),
            Server(1, running("y", "z"), max_context_tokens=90),
        ),
        105.0,
        batch("a", 1),
    ),
    (
        "an empty server gets the oldest even where its memory is too small",
        Continuous(),
        state(Server(0, (), 8, 1, 1)),
        105.0,
        batch("a"),
    ),
]
SERVED = [Running(each.request, 0.0) for each in calls(x=3)]
WHOLE_CALLS: list[Row] = [
    (
        "calls count with their sequences: 2 + 3 + 3 of 8",
        Capped(max_batch_size=8),
        state(queue=calls(a=2, b=3, c=3, d=1)),
        105.0,
        batch("abc"),
    ),
    (
        "a call is never split: 2 + 3 leave no room for 4",
        Elastic(max_batch_size=8),
        state(queue=calls(a=2, b=3, c=4, d=1)),
        105.0,
        batch("ab"),
    ),
    (
        "the engine's bound counts sequences too",
        Dynamic(),
        state(Server(0, max_batch_size=5), queue=calls(a=2, b=3, c=1)),
        105.0,
        batch("ab"),
    ),
    (
        "a call larger than the bound is served alone",
        Capped(max_batch_size=4),
        state(queue=calls(a=5, b=1)),
        105.0,
        batch("a"),
    ),
    ("single takes one call, whole", Single(), state(queue=calls(a=3, b=1)), 105.0, batch("a")),
    (
        "a fixed batch is full by its sequences",
        Fixed(batch_size=4),
        state(queue=calls(a=1, b=3)),
        105.0,
        batch("ab"),
    ),
    (
        "three of four sequences wait for company",
        Fixed(batch_size=4, max_wait=10.0),
        state(queue=calls(a=1, b=2)),
        5.0,
        WaitUntil(10.0),
    ),
    (
        "a fixed batch goes short of the size where the next call does not fit",
        Fixed(batch_size=4),
        state(queue=calls(a=3, b=2)),
        105.0,
        batch("a"),
    ),
    (
        "the sequences in service take slots: 3 of 5, and 2 fit",
        Continuous(max_batch_size=5),
        state(Server(0, SERVED), queue=calls(a=2, b=1)),
        105.0,
        batch("a"),
    ),
    (
        "a call waits for as many free slots as it has sequences",
        Continuous(max_batch_size=5),
        state(Server(0, SERVED), queue=calls(a=3, b=1)),
        105.0,
        IDLE,
    ),
    (
        "of two servers the one with more free slots, by sequences",
        Continuous(max_batch_size=5),
        state(Server(0, SERVED), Server(1, running("y", "z")), queue=calls(a=3)),
        105.0,
        batch("a", 1),
    ),
    (
        "a call larger than the slots starts on an empty server",
        Continuous(max_batch_size=2),
        state(queue=calls(a=3, b=1)),
        105.0,
        batch("a"),
    ),
]
ROWS = [
    pytest.param(policy, seen, now, expected, id=f"{policy.name}: {sentence}")
    for sentence, policy, seen, now, expected in [
        *SINGLE,
        *DYNAMIC,
        *CAPPED,
        *ELASTIC,
        *FIXED,
        *CONTINUOUS,
        *WHOLE_CALLS,
    ]
]
