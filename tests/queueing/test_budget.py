"""How many requests a simulation may follow: by the looks that an event costs, at servers and at
sequences in service.
"""

from __future__ import annotations

import pytest

from kendall.queueing.distributions.token_distribution import parse_distribution
from kendall.queueing.errors import OutOfReachError
from kendall.queueing.latency.law import LatencyModel
from kendall.queueing.queue import Queue
from kendall.queueing.simulation.fast import MOST_SLOTS, is_compiled
from kendall.queueing.simulation.run_limits import affordable_requests, enough_slots

LENGTHS = parse_distribution("deterministic:value=100")
LAW = LatencyModel(k1=0.001, k3=0.0, k4=0.01)
BACKWARDS = LatencyModel(k2=-0.02, k4=0.01)  # of which nothing is compiled
NO_BOUND = 10**9


def queue(policy: str, law: LatencyModel = LAW, servers: int = 1) -> Queue:
    return Queue.read(policy, LENGTHS, law, servers=servers)


def test_an_event_looks_four_times_at_each_server_and_the_generic_simulator_300_times_more() -> (
    None
):
    compiled, generic, ordered = (
        queue("single"),
        queue("single", BACKWARDS),
        queue("single:order=sprpt", BACKWARDS),
    )
    assert [is_compiled(each) for each in (compiled, generic, ordered)] == [True, False, False]
    assert affordable_requests(compiled, 0.1, NO_BOUND) == 1_500_000_000 // 4
    assert affordable_requests(generic, 0.1, NO_BOUND) == 15_000_000 // 304
    assert affordable_requests(ordered, 0.1, NO_BOUND) == 7_000_000 // 304
    assert affordable_requests(ordered, 0.1, 500) == 500


def test_where_twenty_thousand_requests_are_too_many_nothing_is_simulated() -> None:
    last = queue("single:order=sprpt", BACKWARDS, servers=12)
    assert affordable_requests(last, 0.1, NO_BOUND) == 7_000_000 // 348
    with pytest.raises(OutOfReachError, match="a simulation of servers=13 with 0 sequences"):
        affordable_requests(queue("single:order=sprpt", BACKWARDS, servers=13), 0.1, NO_BOUND)


@pytest.mark.parametrize(
    ("policy", "rate", "together"),
    [
        ("continuous:max_batch_size=8192", 1e6, 8192),
        ("continuous", 1e6, 100 * MOST_SLOTS),
        # 1500 a second, which take a millisecond each to admit
        ("continuous", 1500.0, 100 * MOST_SLOTS),
    ],
)
def test_an_overloaded_engine_has_all_its_slots_taken(
    policy: str, rate: float, together: int
) -> None:
    with pytest.raises(OutOfReachError, match=f"with {together} sequences in service together"):
        affordable_requests(queue(policy), rate, NO_BOUND)


@pytest.mark.parametrize(("rate", "enough"), [(671.0, True), (673.0, False)])
def test_slots_without_a_bound_are_enough_at_twice_those_in_service(
    rate: float, enough: bool
) -> None:
    """R a second stay a second each, less the admissions of the others: R / (1 - 0.001 R), which is
    half of all slots at 671.9.
    """
    model = queue("continuous")
    assert rate / (1 - 0.001 * rate) == pytest.approx(MOST_SLOTS / 2, rel=0.005)
    assert enough_slots(model, rate).bound == (MOST_SLOTS if enough else None)
