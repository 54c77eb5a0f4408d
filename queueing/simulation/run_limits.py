"""How many requests a simulation may follow within a few seconds and a few hundred megabytes.

An event looks at every server, one of a continuous engine at every sequence in service too, a
service at each of its stalls; the residuals of all servers, and the gaps between their stalls, are
drawn beforehand. The generic simulator takes some hundred times longer than the compiled one, and
where the policy is asked after every step, each step is an event.
"""

from __future__ import annotations

import math

from kendall.policies.immediate import Continuous
from kendall.policies.ordered import wants_steps
from kendall.policies.registry import is_first_come
from kendall.queueing.arrivals.notation import highest_rate
from kendall.queueing.errors import OutOfReachError
from kendall.queueing.latency.stalls import SPARE_GAPS
from kendall.queueing.queue import Queue
from kendall.queueing.simulation.fast import MOST_SLOTS, is_compiled

_LOOKS, _GENERIC_LOOKS = (
    1_500_000_000,
    15_000_000,
)  # at a server or a sequence, in about five seconds
# of a policy from outside, half of it: a live assessment asks for several simulations
_OUTSIDE_LOOKS = 7_000_000
_DRAWS = 30_000_000  # residuals kept: 240 MB; and as many gaps between stalls
_GENERIC_EVENT = 300  # looks that an event of the generic simulator costs besides
_TOKEN = 10  # looks at a request in each of its steps, where memory is taken token by token
_STEP = 60  # and a step after which the policy is asked
FEWEST = 20_000  # requests that a mean can be read from
FIRST = 500  # that a first answer can, with a large error


def affordable_requests(
    model: Queue, arrival_rate: float, most: int, *, of: int = 1, fewest: int = FEWEST
) -> int:
    """At most `most`; `of`: so many simulations share the time. Raises OutOfReachError where less
    than `fewest` are affordable.
    """
    compiled = is_compiled(enough_slots(model, arrival_rate))
    in_service = _in_service(model, arrival_rate)
    stalls = (
        0.0
        if model.policy.joins_running
        else model.engine.law.stall_rate * model.batch_time.mean(1)
    )
    looks = 4 * (model.engine.all_servers + in_service) + stalls
    if model.on_demand:  # each of its steps looks at all in service
        looks += _TOKEN * model.requests.output_tokens.mean
    steps = _steps(model, in_service)
    looks += steps * (model.engine.servers + in_service)
    if not compiled:
        looks += _GENERIC_EVENT + steps * _STEP
    generic = _GENERIC_LOOKS if is_first_come(model.policy) else _OUTSIDE_LOOKS
    affordable = (_LOOKS if compiled else generic) / of / looks
    if model.draws_in_advance:
        affordable = min(
            affordable,
            _DRAWS / model.engine.all_servers - (SPARE_GAPS if model.engine.law.stall_share else 0),
        )
    if affordable < fewest:
        events = (
            f"{in_service:.0f} sequences in service together and {stalls:.0f} stalls in a service"
        )
        what = f"a simulation of servers={model.engine.all_servers} with {events}"
        raise OutOfReachError(
            what,
            "ask for fewer servers, a smaller bound on the batch size, or fewer and longer stalls",
        )
    return int(min(affordable, most))


def _steps(model: Queue, in_service: float) -> float:
    """Of the engine, for each request, after which the policy is asked."""
    if not wants_steps(model.policy):
        return 0.0
    return model.slot_time.mean_tokens / max(1.0, in_service / model.engine.servers)


def enough_slots(model: Queue, arrival_rate: float) -> Queue:
    """The same queue with the slots that the compiled simulator has, where twice as many as are
    in service, at the highest rate of its arrivals, are fewer than these.
    """
    process = model.at_mean_rate(arrival_rate).arrivals.process
    highest = None if process is None else highest_rate(process)
    has_enough = model.bound is not None and model.bound <= MOST_SLOTS
    if (
        not isinstance(model.policy, Continuous)
        or has_enough
        or 2 * _in_service(model, highest or arrival_rate) > MOST_SLOTS
    ):
        return model
    return model.but(max_num_seqs=MOST_SLOTS)


def _in_service(model: Queue, arrival_rate: float) -> float:
    """Sequences together on a continuous engine, from its own load: at most the slots."""
    if not model.policy.joins_running:
        return 0.0
    model = model.decode
    time, law = model.slot_time, model.engine.law
    rate = arrival_rate / model.engine.servers * model.requests.call_size
    shared = rate * (time.admitted + law.speed * law.k3 * time.mean_tokens)
    alone = rate * law.speed * (law.k4 * time.mean_tokens + law.turnaround)
    reached = alone / (1 - shared) if shared < 1 else math.inf
    return min(reached, model.bound or math.inf, 100 * MOST_SLOTS)
