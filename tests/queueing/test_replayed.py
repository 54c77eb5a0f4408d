"""Given requests at the speed that a machine had: by hand."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np
import pytest

from kendall.queueing.estimation.replayed import Holding, keeps_pace, replayed
from kendall.queueing.latency.speed_path import SpeedPath
from kendall.queueing.queue import Queue
from kendall.queueing.simulation.fast import Trace

SLOW = SpeedPath(np.array([10.0, 20.0]), np.array([2.0]), 1.0)  # half as fast for ten seconds


def queue(policy: str, law: str = "a=1,c=0") -> Queue:
    """A second for each token."""
    return Queue.read(policy, "uniform:low=1,high=9", law)


def trace(*requests: tuple[float, int], **more: Sequence[float]) -> Trace:
    """Instants of arrival, and tokens."""
    arrived, tokens = np.array(requests).T
    given = Trace(arrived, tokens.astype(np.int64), np.zeros(arrived.size, dtype=np.int64))
    return dataclasses.replace(given, **{name: np.array(each) for name, each in more.items()})


def test_a_machine_that_is_slower_for_a_while() -> None:
    """One from 9: a second at speed 1, three that take six; one from 12 waits for it, takes four
    for two seconds; one comes later.
    """
    given = trace((9.0, 4), (12.0, 2), (30.0, 3))
    found = replayed(queue("single"), given, machine=SLOW)
    assert found.dispatched.tolist() == [[9.0, 16.0, 30.0]]
    assert found.released[0] == pytest.approx([16.0, 20.0, 33.0])
    as_ever = replayed(queue("single", "a=1,c=0,speed=3"), given)
    assert as_ever.dispatched.tolist() == [[9.0, 21.0, 30.0]]
    assert as_ever.released.tolist() == [[21.0, 27.0, 39.0]]
    assert as_ever.speed == 3.0


def test_slots_on_a_machine_that_is_slower_for_a_while() -> None:
    """Each step takes a second, so the second request enters at the end of a step."""
    slots = queue("continuous:max_batch_size=2", "k1=0,k2=0,k3=0,k4=1")
    found = replayed(slots, trace((9.0, 4), (12.5, 2)), machine=SLOW)
    assert found.dispatched[0] == pytest.approx([9.0, 12.5])
    assert found.released[0] == pytest.approx([16.0, 18.0])


@pytest.mark.parametrize("machine", [None, SpeedPath(np.array([0.0, 50]), np.array([1.0]), 1.0)])
def test_the_speed_is_that_with_which_slots_are_held_as_long_as_they_were(
    machine: SpeedPath | None,
) -> None:
    """Requests that share nothing, each held 2.5 times as long as the law says; one is unknown."""
    slots = queue("continuous:max_batch_size=4", "k1=0,k2=0,k3=0,k4=0.1")
    given = trace((1.0, 4), (5.0, 8), (9.0, 6), (20.0, 2))
    held = np.array([1.0, 2.0, np.nan, 0.5])
    found = replayed(slots, given, machine=machine, holding=Holding(given.arrived_at, held))
    assert found.released - found.dispatched == pytest.approx(
        np.array([[1.0, 2.0, 1.5, 0.5]]), rel=1e-3
    )
    assert found.speed == pytest.approx(2.5 if machine is None else 1.0, rel=1e-3)


def test_residuals_are_drawn_as_often_as_asked_and_the_same_for_one_seed() -> None:
    given = trace(*[(float(number), 1) for number in range(20)])
    even, noisy = queue("single"), queue("single", "a=1,c=0,cv=0.5")
    assert replayed(even, given).released.shape == (1, 20)
    found = replayed(noisy, given)
    assert found.released.shape == (16, 20)
    assert len({tuple(row) for row in found.released}) == 16
    again = replayed(noisy, given, draws=3)
    assert np.array_equal(again.released, found.released[:3])
    other = replayed(noisy, given, draws=3, seed=1)
    assert not np.any(other.released == again.released)


def test_who_comes_at_one_instant_is_of_one_batch() -> None:
    law = "k1=0,k2=1,k3=0,k4=1"
    found = replayed(queue("dynamic", law), trace((1.0, 2), (1.0, 3), (2.0, 1), (2.0, 1)))
    assert found.dispatched.tolist() == [[1.0, 1.0, 5.0, 5.0]]
    assert found.released.tolist() == [[5.0, 5.0, 7.0, 7.0]]


@pytest.mark.parametrize(
    ("limits", "predicted", "order"),
    [
        ([9, 4, 6, 3], None, [0, 3, 1, 2]),  # nothing is predicted: as long as its own limit
        ([9, 4, 6, 3], [np.nan, 2, np.nan, 9], [0, 1, 3, 2]),  # never longer than its limit
    ],
)
def test_a_request_without_a_prediction_counts_as_long_as_its_limit(
    limits: list[int], predicted: list[float] | None, order: list[int]
) -> None:
    """The first is served as it comes; the others wait for it."""
    more = {"limits": limits} | ({} if predicted is None else {"predicted": predicted})
    given = trace((1.0, 3), (1.5, 2), (2.0, 2), (2.5, 2), **more)
    found = replayed(queue("single:order=spjf"), given)
    assert np.argsort(found.dispatched[0]).tolist() == order


@pytest.mark.parametrize(
    ("policy", "servers", "keeps"),
    [
        ("single", 1, True),
        ("single", 2, False),
        ("fixed:batch_size=2", 1, True),
        ("fixed:batch_size=2,max_wait=1s", 1, False),
    ],
)
def test_one_clock_serves_one_server_whose_waits_follow_the_machine(
    policy: str, servers: int, keeps: bool
) -> None:
    assert keeps_pace(queue(policy).but(servers=servers)) is keeps
