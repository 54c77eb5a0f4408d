"""When each request must have started, by hand: from arrivals, service times and what a policy
waits for.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest

from kendall.queueing.measurement.record import Record
from kendall.queueing.measurement.recursion import Served, batches, measured_starts, served

ONE = Served(
    id="x",
    policy="single",
    epoch=0,
    server_id=0,
    batch_id=0,
    batch_size=1,
    arrived_at=0.0,
    dispatched_at=0.0,
    server_free_at=0.0,
    released_at=None,
    prompt_tokens=0,
    output_tokens=1,
    completed=True,
)


def member(
    name: str, batch: int, arrived: float, start: float, free: float, **about: Any
) -> Served:
    return replace(
        ONE,
        id=name,
        batch_id=batch,
        arrived_at=arrived,
        dispatched_at=start,
        server_free_at=free,
        **about,
    )


def test_a_record_is_read_with_what_stands_for_what_is_missing() -> None:
    shared: dict[str, Any] = {
        "policy": "single",
        "epoch": 3,
        "server_id": 2,
        "batch_id": 7,
        "batch_size": 4,
        "arrived_at": 1.0,
        "dispatched_at": 2.0,
        "server_free_at": 5.0,
        "released_at": 4.0,
        "prompt_tokens": 9,
        "output_tokens": 6,
    }
    whole = Record(request_id="a", outcome="completed", **shared)
    (found,) = served([whole])
    assert found == Served(id="a", completed=True, **shared)
    bare = Record(
        request_id="b",
        outcome="cancelled",
        policy="single",
        batch_id=0,
        arrived_at=0.0,
        dispatched_at=0.0,
        released_at=4.0,
    )
    (found,) = served([bare])
    assert (found.epoch, found.server_id, found.batch_id, found.batch_size) == (0, 0, 0, 1)
    assert (found.arrived_at, found.dispatched_at, found.server_free_at, found.released_at) == (
        0.0,
        0.0,
        4.0,
        4.0,
    )
    assert (found.prompt_tokens, found.output_tokens, found.completed) == (0, 0, False)


@pytest.mark.parametrize("missing", ["policy", "batch_id", "arrived_at", "dispatched_at"])
def test_who_was_not_dispatched_is_left_out_and_the_rest_are_in_order(missing: str) -> None:
    known: dict[str, Any] = {
        "outcome": "completed",
        "policy": "single",
        "batch_id": 1,
        "dispatched_at": 5.0,
        "released_at": 6.0,
    }
    records = [Record(request_id=str(at), arrived_at=at, **known) for at in (3.0, 1.0, 2.0)]
    lost = Record(request_id="lost", **({"arrived_at": 0.5} | known | {missing: None}))
    assert [each.arrived_at for each in served([*records, lost])] == [1.0, 2.0, 3.0]
    endless = Record(request_id="x", arrived_at=1.0, **(known | {"released_at": None}))
    assert served([endless]) == []


def test_batches_stand_in_the_order_of_their_dispatch() -> None:
    given = (("a", 5, 0.0, 3.0), ("b", 2, 1.0, 3.0), ("c", 9, 2.0, 1.0), ("d", 5, 2.5, 3.0))
    found = batches(
        [member(name, batch, arrived, start, 9.0) for name, batch, arrived, start in given]
    )
    assert [[each.id for each in batch] for batch in found] == [["c"], ["b"], ["a", "d"]]


def test_a_single_request_starts_at_its_arrival_or_when_its_server_is_free() -> None:
    """However late the gateway sent it: half a second here."""
    found = measured_starts(
        [
            member("a", 0, 1.0, 1.5, 3.5),
            member("b", 1, 2.0, 4.0, 6.0),
            member("c", 2, 9.0, 9.5, 10.0),
        ]
    )
    assert found == {"a": 1.0, "b": 3.5, "c": 9.0}


def test_servers_have_their_own_ends() -> None:
    found = measured_starts(
        [
            member("a", 0, 1.0, 1.0, 5.0),
            member("b", 1, 2.0, 2.0, 4.0, server_id=1),
            member("c", 2, 3.0, 4.2, 6.0, server_id=1),
            member("d", 3, 3.5, 5.1, 7.0),
        ]
    )
    assert found == {"a": 1.0, "b": 2.0, "c": 4.0, "d": 5.0}


@pytest.mark.parametrize(
    "policy", ["dynamic", "capped:max_batch_size=2", "elastic:max_batch_size=2"]
)
def test_a_batch_starts_with_its_oldest_and_ends_with_its_last(policy: str) -> None:
    """Members of an elastic batch leave one by one; the server is free with the last."""
    found = measured_starts(
        [
            member("a", 0, 1.0, 1.0, 4.0, policy=policy),
            member("b", 1, 2.0, 6.5, 7.0, policy=policy, batch_size=2),
            member("c", 1, 3.0, 6.5, 8.0, policy=policy, batch_size=2),
            member("d", 2, 7.5, 8.5, 9.0, policy=policy),
        ]
    )
    assert found == {"a": 1.0, "b": 4.0, "c": 4.0, "d": 8.0}


def fixed(policy: str, *dispatched: float) -> dict[str, float]:
    """A full batch of arrivals at 1 and 3 s, then one alone that came at 10 s."""
    return measured_starts(
        [
            member("a", 0, 1.0, 3.4, 5.0, policy=policy, batch_size=2),
            member("b", 0, 3.0, 3.4, 5.0, policy=policy, batch_size=2),
            *(
                member(str(at), 1 + place, 10.0, at, at + 1, policy=policy)
                for place, at in enumerate(dispatched)
            ),
        ]
    )


def test_a_fixed_batch_starts_with_the_member_that_fills_it_or_when_its_oldest_has_waited() -> None:
    assert fixed("fixed:batch_size=2,max_wait=4", 14.6) == {"a": 3.0, "b": 3.0, "14.6": 14.0}
    assert fixed("fixed:batch_size=2,max_wait=4", 12.0)["12.0"] == 12.0, "the queue was closing"
    assert fixed("fixed:batch_size=2", 12.0)["12.0"] == 12.0
    assert fixed("fixed:batch_size=9", 12.0) == {"a": 3.0, "b": 3.0, "12.0": 12.0}, (
        "the engine takes two"
    )
    assert fixed("fixed:batch_size=9,max_wait=1", 12.0)["a"] == 2.0, "two are not nine"
    assert fixed("fixed:batch_size=1", 12.0) == {"a": 3.0, "b": 3.0, "12.0": 10.0}


def test_slots_are_taken_in_turn_for_as_long_as_each_was_held() -> None:
    """Two slots, as the largest number seen in service says; each of the three was sent half a
    second late.
    """
    policy = "continuous:max_batch_size=4"
    found = measured_starts(
        [
            member("a", 0, 1.0, 1.5, 4.5, policy=policy, batch_size=1),
            member("b", 1, 2.0, 2.5, 7.5, policy=policy, batch_size=2),
            member("c", 2, 3.0, 5.0, 6.0, policy=policy, batch_size=2),
            member("d", 3, 3.5, 6.5, 7.0, policy=policy, batch_size=2),
        ]
    )
    assert found == {"a": 1.0, "b": 2.0, "c": 4.0, "d": 5.0}


def test_servers_of_slots_are_counted_apart_and_begin_where_their_last_batch_ended() -> None:
    policy = "continuous:max_batch_size=4"
    before = [member("x", 0, 0.0, 0.0, 4.0), member("y", 1, 0.0, 0.0, 6.0, server_id=1)]
    slots = [
        member("a", 2, 1.0, 4.0, 9.0, policy=policy, epoch=1),
        member("b", 3, 1.0, 6.0, 9.0, policy=policy, epoch=1, server_id=1),
        member("c", 4, 2.0, 9.0, 9.5, policy=policy, epoch=1),
    ]
    assert measured_starts([*before, *slots]) == {"x": 0.0, "y": 0.0, "a": 4.0, "b": 6.0, "c": 9.0}
    after = member("z", 5, 8.0, 11.0, 12.0)
    assert measured_starts([*before, *slots, after])["z"] == 9.5
    assert math.isfinite(measured_starts(slots)["a"])
