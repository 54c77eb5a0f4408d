"""The rule of a balancer, read off where requests went: simulated fleets under each rule."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest

from kendall.queueing.distributions.token_distribution import Vector, parse_distribution
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


def chance_of_two(numbers: list[int], own: int) -> float:
    """Of the pairs of servers, each as likely: the one with fewer, of equal ones either."""
    pairs = list(itertools.combinations(range(len(numbers)), 2))
    wins = [
        0.5 if numbers[a] == numbers[b] else float(own == (a if numbers[a] < numbers[b] else b))
        for a, b in pairs
        if own in (a, b)
    ]
    return sum(wins) / len(pairs)


def told_by_hand(
    arrived: Vector, dispatched: Vector, freed: Vector, server: Vector, slots: int
) -> tuple[dict[str, float], float | None]:
    """The likelihoods and the share of the waits out of turn, request after request."""
    servers = int(server.max()) + 1
    logs: dict[str, list[float]] = {}
    beyond, out = [0.0] * servers, []
    for i, (at, own) in enumerate(zip(arrived, server, strict=True)):
        present = [sum(server[j] == s and freed[j] > at for j in range(i)) for s in range(servers)]
        fewest = [s for s in range(servers) if present[s] == min(present)]
        turn = [math.exp(-each / 0.5) for each in beyond]
        chances = {
            "random": 1 / servers,
            "round_robin": turn[own] / sum(turn),
            "least_requests": (own in fewest) / len(fewest),
        }
        if servers > 2:
            chances["power_of_two"] = chance_of_two(present, own)
        for name, chance in chances.items():
            logs.setdefault(name, []).append(math.log(0.9 * chance + 0.1 / servers))
        beyond = [0.95 * each - 1 / servers + (s == own) for s, each in enumerate(beyond)]
        if dispatched[i] - at > 0.02:
            middle = (at + dispatched[i]) / 2
            others = [j for j in range(arrived.size) if server[j] != own]
            taken = [
                sum(dispatched[j] <= middle < freed[j] for j in others if server[j] == s)
                for s in range(servers)
                if s != own
            ]
            passed = any(j > i and dispatched[j] < dispatched[i] - 0.02 for j in others)
            out.append(passed or min(taken) < slots)
    return {name: float(np.mean(each)) for name, each in logs.items()}, (
        float(np.mean(out)) if out else None
    )


@pytest.mark.parametrize("servers", [2, 3])
@pytest.mark.parametrize("seed", range(8))
def test_likelihoods_and_turns_are_those_by_hand(servers: int, seed: int) -> None:
    """Any instants, in any order; what came before the first or after the last of a server that
    is seen is left out.
    """
    rng = np.random.default_rng(seed)
    arrived = np.sort(rng.random(90) * 20)
    server = np.where(rng.random(90) < 0.3 + 0.09 * seed, np.arange(90) % servers, 0)
    waits = rng.exponential(0.3, 90) * (rng.random(90) < 0.5) * (seed > 0)
    dispatched = arrived + waits
    freed = dispatched + rng.exponential(0.8, 90)
    first = max(arrived[server == each][0] for each in range(servers))
    last = min(arrived[server == each][-1] for each in range(servers))
    known = (arrived >= first) & (arrived <= last)
    shown = (arrived[known], dispatched[known], freed[known], server[known])
    likelihoods, out_of_turn = told_by_hand(*shown, slots=2)
    order = rng.permutation(90)
    found = routing_of(arrived[order], dispatched[order], freed[order], server[order], 2)
    if np.count_nonzero(known) < 50:
        assert found is None
        return
    assert found is not None
    assert found.requests == np.count_nonzero(known)
    assert found.likelihoods == pytest.approx(likelihoods, abs=1e-12)
    assert found.out_of_turn == (None if out_of_turn is None else pytest.approx(out_of_turn))
    best = max(likelihoods, key=lambda name: likelihoods[name])
    if out_of_turn is not None and out_of_turn <= 0.05:
        best = "central"
    elif (likelihoods[best] - likelihoods["random"]) * found.requests <= math.log(1000):
        best = "random"
    assert found.rule == best
