"""Priorities that age: the order of the queue, its starvation bound, and the count of waiting
tokens through every change.
"""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kendall.policies import Request, Waiting, parse_policy
from kendall.policies.orders.by_urgency import ByPriority
from kendall.policies.orders.order import MOST_PRIORITY
from kendall.policies.waiting_queues import RankedQueue, WaitingQueue, moved, queue_for


def one(name: str, at: float, priority: int = 0, prompt: int = 3) -> Waiting:
    return Waiting(
        Request(
            id=name, arrived_at=at, prompt_tokens=prompt, max_output_tokens=9, priority=priority
        )
    )


def aged(aging: float) -> RankedQueue:
    return RankedQueue(ByPriority(aging=aging))


def names(queue: WaitingQueue) -> list[str]:
    return [waiting.request.id for waiting in queue]


def test_a_lower_priority_goes_first_until_the_other_has_aged() -> None:
    queue = aged(10.0)
    for waiting in (
        one("late-class", 0.0, 1),
        one("urgent-soon", 9.0, 0),
        one("urgent-too-late", 11.0, 0),
        one("peer", 11.5, 0),
    ):
        queue.append(waiting)
    assert names(queue) == ["urgent-soon", "late-class", "urgent-too-late", "peer"]
    assert queue.place_of(one("x", 10.5, 0).request) == 2
    assert queue.place_of(one("x", 12.0, -5).request) == 0


def test_a_priority_beyond_the_bound_counts_as_the_bound() -> None:
    """One that was admitted while priorities did not age, where any is allowed."""
    queue = aged(1.0)
    for waiting in (
        one("never", 0.0, 10**9),
        one("last", 2 * MOST_PRIORITY + 1.0, 0),
        one("pushy", MOST_PRIORITY + 0.5, -(10**9)),
    ):
        queue.append(waiting)
    assert names(queue) == ["pushy", "never", "last"]


def test_one_that_is_put_back_stands_where_it_stood() -> None:
    queue = aged(10.0)
    first, second = one("first", 0.0), one("second", 1.0)
    queue.append(first)
    queue.append(second)
    queue.take(["first"])
    queue.append(one("urgent", 2.0, -1))
    queue.put_back([first])
    assert names(queue) == ["urgent", "first", "second"]


arrivals = st.lists(st.tuples(st.floats(0, 100), st.integers(-5, 5)), min_size=1, max_size=40)


@given(arrivals, st.floats(0.1, 30), st.floats(100, 200))
def test_the_order_is_that_of_aged_levels_at_any_instant(
    given_: list[tuple[float, int]], aging: float, now: float
) -> None:
    queue = aged(aging)
    for index, (at, priority) in enumerate(sorted(given_)):
        queue.append(one(str(index), at, priority))
    levels = [
        waiting.request.priority - (now - waiting.request.arrived_at) / aging for waiting in queue
    ]
    assert all(before <= after + 1e-9 for before, after in itertools.pairwise(levels))


@given(arrivals, st.floats(0.1, 30))
def test_nobody_is_overtaken_by_one_that_came_later_than_the_bound(
    given_: list[tuple[float, int]], aging: float
) -> None:
    queue = aged(aging)
    for index, (at, priority) in enumerate(sorted(given_)):
        queue.append(one(str(index), at, priority))
    order = [waiting.request for waiting in queue]
    for place, behind in enumerate(order):
        for ahead in order[:place]:
            assert (
                ahead.arrived_at - behind.arrived_at
                <= (behind.priority - ahead.priority) * aging + 1e-9
            )


@pytest.mark.parametrize("prioritised", [False, True])
def test_those_taken_are_not_kept_while_others_wait(prioritised: bool) -> None:
    queue = aged(5.0) if prioritised else WaitingQueue()
    for number in range(1000):
        queue.append(one(str(number), float(number), 0, 1))
    for _ in range(900):
        queue.take([queue[0].request.id])
    kept = {waiting.request.id for waiting in queue._items if waiting.request.id}
    assert kept == set(names(queue))
    assert len(kept) == 100


@pytest.mark.parametrize("prioritised", [False, True])
def test_a_queue_that_never_empties_does_not_grow_and_an_empty_one_keeps_nothing(
    prioritised: bool,
) -> None:
    queue = aged(5.0) if prioritised else WaitingQueue()
    queue.append(one("0", 0.0))
    longest = 0
    for number in range(1, 10_000):
        queue.append(one(str(number), float(number)))
        assert [taken.request.id for taken in queue.take([str(number - 1)])] == [str(number - 1)]
        longest = max(longest, len(queue._items))
    assert longest < 5000
    queue.take(names(queue))
    assert (len(queue), queue._items) == (0, [])


changes = st.lists(
    st.tuples(
        st.sampled_from(["append", "take", "remove", "back"]), st.integers(0, 9), st.integers(1, 50)
    ),
    max_size=60,
)


@given(changes, st.booleans())
def test_the_count_of_waiting_tokens_never_drifts(
    steps: list[tuple[str, int, int]], prioritised: bool
) -> None:
    queue = aged(5.0) if prioritised else WaitingQueue()
    taken: list[Waiting] = []
    for number, (what, which, prompt) in enumerate(steps):
        ids = names(queue)
        if what == "append":
            queue.append(one(str(number), float(number), which % 3, prompt))
        elif what == "take" and ids:
            taken += queue.take(
                [ids[which % len(ids)]] if which % 2 else ids[: 1 + which % len(ids)]
            )
        elif what == "remove" and ids:
            assert queue.remove(ids[which % len(ids)]) is not None
            assert queue.remove("nobody") is None
        elif what == "back" and taken:
            queue.put_back([taken.pop()])
        assert queue.prompt_tokens == sum(waiting.request.prompt_tokens for waiting in queue)
        assert len(names(queue)) == len(queue)


def test_after_a_switch_to_first_come_first_served_all_wait_in_the_order_of_arrival() -> None:
    queue = queue_for(parse_policy("single:order=spjf"))
    for number, tokens in enumerate((30.0, 10.0, 20.0)):
        request = Request(
            id=f"r{number}",
            arrived_at=float(number),
            prompt_tokens=1,
            max_output_tokens=50,
            predicted_output_tokens=tokens,
        )
        queue.append(Waiting(request))
    assert names(queue) == ["r1", "r2", "r0"]
    plain = moved(queue, queue_for(parse_policy("single")))
    assert names(plain) == ["r0", "r1", "r2"]
    assert names(moved(plain, queue_for(parse_policy("single:order=ljf")))) == ["r0", "r2", "r1"]
