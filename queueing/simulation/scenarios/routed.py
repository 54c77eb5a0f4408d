"""Servers with a queue of their own each: a router sends every call to one of them as it arrives,
and it stays there. What a load balancer in front of c engines does, where one queue for all would
dispatch.

The same policy at every server. Simulated event by event (queueing.simulation.reference); a call
goes to a server whole.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence

import numpy as np
from msgspec.structs import replace

from policies.core import Policy
from queueing.measurement.record import Record
from queueing.simulation.reference import Driver, Job, SimulatedEngine, of_one_call

# from the requests that each server has, waiting and in service, to the place of the next call
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
        chosen = drivers[router([len(each.jobs) - len(each.records) for each in drivers])]
        chosen.jobs += call
        chosen.lengths |= {job.request.id: job.output_tokens for job in call}
    for driver in drivers:
        driver.advance(math.nextafter(now, math.inf))  # the last arrivals
    return [
        record if record.server_id is None else replace(record, server_id=place)
        for place, driver in enumerate(drivers)
        for record in driver.run(closed_at=now)
    ]


def _calls(jobs: Sequence[Job]) -> Iterator[Sequence[Job]]:
    """Those that arrive together."""
    first = 0
    for place in range(1, len(jobs) + 1):
        if place == len(jobs) or not of_one_call(jobs[place - 1].request, jobs[place].request):
            yield jobs[first:place]
            first = place
