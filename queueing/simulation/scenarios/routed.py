"""Servers with a queue of their own each: a router sends every call to one of them as it arrives,
and it stays there. What a load balancer in front of c engines does, where one queue for all would
dispatch.

The same policy at every server. Simulated event by event (queueing.simulation.reference); a call
goes to a server whole.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import numpy as np
from msgspec.structs import replace

from kendall.policies.core import Policy
from kendall.queueing.measurement.record import Record
from kendall.queueing.simulation.reference import Driver, Job, SimulatedEngine, of_one_call

# from the requests that each server has, waiting and in service, to the place of the next call; the
# answer of a request in service has not left
Router = Callable[[Sequence[int]], int]


class FewestRequests:
    """The server with the fewest; of equal ones the next behind the last that was chosen."""

    def __init__(self) -> None:
        self._last = -1

    def __call__(self, held: Sequence[int]) -> int:
        """Its place."""
        first, count = self._last + 1, len(held)
        turn = (place % count for place in range(first, first + count))
        self._last = min(turn, key=held.__getitem__)
        return self._last


class FewerOfTwo:
    """Of two servers for each call, in their order, the one with fewer; the first of equal ones."""

    def __init__(self, choices: Sequence[Sequence[int]]) -> None:
        self._choices = iter(choices)

    def __call__(self, held: Sequence[int]) -> int:
        """Its place."""
        return min(next(self._choices), key=held.__getitem__)


def simulate_routed(
    policy: Policy,
    jobs: Sequence[Job],
    engine: SimulatedEngine,
    rngs: Sequence[np.random.Generator],
    router: Router,
) -> list[Record]:
    """What happens to the jobs (in order of arrival) on one server for each of `rngs`: one record
    each, server by server.
    """
    drivers = [Driver(policy, (), [engine.driven(0, rng)], open_ended=True) for rng in rngs]
    now = 0.0
    for call in _calls(jobs):
        now = call[0].request.arrived_at
        for driver in drivers:
            driver.advance(now)
        chosen = drivers[router([_held(each) for each in drivers])]
        chosen.jobs += call
        chosen.lengths |= {job.request.id: job.output_tokens for job in call}
    for driver in drivers:
        driver.close(now)
    return _numbered([driver.run() for driver in drivers])


def _held(driver: Driver) -> int:
    left = sum(
        started.ended_at is not None
        for engine in driver.engines
        for started in engine.in_service
        if started.batch.policy.release == "request"
    )
    return len(driver.jobs) - len(driver.records) - left


def _numbered(by_server: Sequence[Sequence[Record]]) -> list[Record]:
    """Servers by their place, and the batches of all of them in the order of their dispatch."""
    batches = {
        (record.dispatched_at or 0.0, place, record.batch_id or 0)
        for place, records in enumerate(by_server)
        for record in records
        if record.server_id is not None
    }
    numbers = {batch[1:]: number for number, batch in enumerate(sorted(batches))}
    return [
        record
        if record.server_id is None
        else replace(record, server_id=place, batch_id=numbers[place, record.batch_id or 0])
        for place, records in enumerate(by_server)
        for record in records
    ]


def _calls(jobs: Sequence[Job]) -> Iterator[Sequence[Job]]:
    """Those that arrive together."""
    first = 0
    for place in range(1, len(jobs) + 1):
        if place == len(jobs) or not of_one_call(jobs[place - 1].request, jobs[place].request):
            yield jobs[first:place]
            first = place
