"""The rule of a balancer, read off where requests went: simulated fleets under each rule."""

from __future__ import annotations

import numpy as np
import pytest

from kendall.queueing.distributions.token_distribution import parse_distribution
from kendall.queueing.estimation.routing import Routing, routing_of
from kendall.queueing.latency.law import LatencyModel
from kendall.queueing.queue import Queue
from kendall.queueing.simulation.experiment import run_given
from kendall.queueing.simulation.fast import Trace

LAW = LatencyModel(k1=1e-3, k2=0.0, k3=2e-3, k4=20e-3)
SLOTS = 4


def seen(
    routing: str,
    servers: int,
    *,
    load: float = 0.7,
    late: float = 0.0,
    hidden: tuple[float, float] = (0.0, 1.0),
) -> Routing:
    """Of 2,000 requests, whose instants are known within `late` seconds; the last server's are seen
    from the first share of them on, those of the others up to the second.
    """
    lengths = parse_distribution("geometric:mean=60", 400)
    queue = Queue.read(f"continuous:max_batch_size={SLOTS}", lengths, LAW)
    rate = load * servers * SLOTS / (60 * LAW.step(SLOTS))
    rng = np.random.default_rng(servers)
    queue = queue.but(servers=servers, routing=routing)
    arrived, tokens = np.cumsum(rng.exponential(1 / rate, 2000)), lengths.sample(rng, 2000)
    trace = Trace(arrived, tokens, np.zeros(2000, np.int64))
    run = run_given(queue, trace, np.random.SeedSequence(servers))
    dispatched, freed, server = run.dispatched_at, run.server_free_at, run.server_id
    off = rng.normal(0, late, 2000)
    shares, own = np.arange(2000) / 2000, server == servers - 1
    shown = np.where(own, shares >= hidden[0], shares <= hidden[1])
    times = (each[shown] + off[shown] for each in (arrived, dispatched, freed))
    found = routing_of(*times, server[shown].astype(np.int64), SLOTS)
    assert found is not None
    assert found.requests > 0.9 * 2000 * (hidden[1] - hidden[0])
    return found


@pytest.mark.parametrize("late", [0.0, 0.003])
@pytest.mark.parametrize(
    ("routing", "servers"),
    [
        ("central", 2),
        ("central", 3),
        ("random", 2),
        ("random", 4),
        ("round_robin", 2),
        ("round_robin", 3),
        ("least_requests", 2),
        ("least_requests", 4),
        ("power_of_two", 4),
    ],
)
def test_the_rule_is_named(routing: str, servers: int, late: float) -> None:
    found = seen(routing, servers, late=late)
    assert found.rule == routing
    assert found.out_of_turn is not None
    assert (found.out_of_turn <= 0.05) == (routing == "central")


@pytest.mark.parametrize("routing", ["random", "round_robin", "least_requests"])
def test_it_is_named_too_where_hardly_anybody_waits(routing: str) -> None:
    assert seen(routing, 2, load=0.3).rule == routing


def test_two_that_are_told_in_the_other_order_hide_no_turns() -> None:
    """Instants that are known to most of the time between two arrivals."""
    assert seen("round_robin", 2, late=0.04).rule == "round_robin"
    assert seen("random", 2, late=0.04).rule == "random"


@pytest.mark.parametrize("routing", ["round_robin", "least_requests", "random"])
def test_a_server_that_is_seen_later_and_one_that_is_told_later(routing: str) -> None:
    found = seen(routing, 2, hidden=(0.2, 0.85))
    assert found.rule == routing


def test_one_server_and_few_requests_tell_nothing() -> None:
    numbers = np.arange(100.0)
    one = np.zeros(100, dtype=np.int64)
    assert routing_of(numbers, numbers, numbers + 1, one, 4) is None
    few, two = numbers[:40], np.arange(40) % 2
    assert routing_of(few, few, few + 1, two, 4) is None
