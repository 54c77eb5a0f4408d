"""The power of two choices with one bit of advice on n servers: beside the limit of many queues
(papers.two_choices), the sample path of a finite number.

A job joins the server with the fewest jobs among `choices` picked at random, all different; of
equal ones the first picked. Each server serves predicted short jobs before predicted long ones,
preemptive-resume, in order of arrival within either. Arrivals at rate n lam. One choice: n
independent M/M/1 or M/G/1 queues of two classes; as n grows E[T] tends to that of the limit, with a
difference of order 1/n.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from kendall.policies.text import SpecError
from kendall.queueing.distributions.token_distribution import Vector
from kendall.queueing.simulation.kernels import Floats, Ints, compiled, inner
from kendall.queueing.simulation.orders.kernels import pop, push
from papers.scenarios.runs import Measured, Replications, measured, unit_exponential
from papers.two_choices import TwoClasses


class ChoiceWork(NamedTuple):
    """Of each job: arrival, seconds, whether predicted long, the servers that it looks at."""

    arrived_at: Floats
    seconds: Floats
    long: Ints
    picked: Ints


def run_choices(work: ChoiceWork, servers: int) -> Vector:
    """End of each job."""
    count = len(work.arrived_at)
    following = np.full(count, -1, dtype=np.int64)
    heads, tails = np.full((2, servers, 2), -1, dtype=np.int64)
    queue = following, heads, tails, np.zeros((3, servers), dtype=np.int64)
    clock = np.empty((2 * count, 4)), np.zeros(servers), work.seconds.astype(float).copy()
    ended = np.full(count, np.nan)
    _run(work, queue, clock, ended)
    return ended


JOBS, SERVED, VERSION = range(3)  # rows of the counts of a server; SERVED is the job + 1


@inner
def shortest(picked, jobs):  # type: ignore[no-untyped-def]
    """The server with the fewest jobs."""
    best = picked[0]
    for s in picked[1:]:
        if jobs[s] < jobs[best]:
            best = s
    return best


@inner
def serve(s, now, events, queue, clock):  # type: ignore[no-untyped-def]
    """Let a server go on with who goes first there; how many ends are planned then."""
    _, heads, _, counts = queue
    plan, since, left = clock
    before = counts[SERVED, s] - 1
    first = heads[s, 0] if heads[s, 0] >= 0 else heads[s, 1]
    if first == before:
        return events
    if before >= 0:
        left[before] -= now - since[s]
    counts[VERSION, s] += 1
    counts[SERVED, s] = first + 1
    since[s] = now
    if first < 0:
        return events
    push(plan, events, (0.0, now + left[first], float(counts[VERSION, s])), s)
    return events + 1


@inner
def join(s, job, kind, queue):  # type: ignore[no-untyped-def]
    """At the end of its class."""
    following, heads, tails, counts = queue
    if heads[s, kind] < 0:
        heads[s, kind] = job
    else:
        following[tails[s, kind]] = job
    tails[s, kind] = job
    counts[JOBS, s] += 1


@inner
def leave(s, kind, queue):  # type: ignore[no-untyped-def]
    """The first of its class."""
    following, heads, _, counts = queue
    heads[s, kind] = following[heads[s, kind]]
    counts[JOBS, s] -= 1
    counts[SERVED, s] = 0


@compiled()
def _run(work, queue, clock, ended):  # type: ignore[no-untyped-def]
    arrived_at, _, long, picked = work
    counts, plan = queue[3], clock[0]
    coming, events = 0, 0
    while coming < len(arrived_at) or events > 0:
        arrival = arrived_at[coming] if coming < len(arrived_at) else np.inf
        if events > 0 and plan[0, 1] <= arrival:
            now, version = plan[0, 1], int(plan[0, 2])
            s = pop(plan, events)
            events -= 1
            if version != counts[VERSION, s]:
                continue  # it was interrupted
            job = counts[SERVED, s] - 1
            ended[job] = now
            leave(s, long[job], queue)
        else:
            now, s = arrival, shortest(picked[coming], counts[JOBS])
            join(s, coming, long[coming], queue)
            coming += 1
        events = serve(s, now, events, queue, clock)


def _ascending(columns: Ints) -> Iterator[Ints]:
    """The columns, with the values of each row in order."""
    yield from (columns if columns.shape[1] < 2 else np.sort(columns, axis=1)).T


def drawn_choices(
    rng: np.random.Generator, jobs: int, classes: TwoClasses, rate: float, picks: tuple[int, int]
) -> ChoiceWork:
    """Jobs of two exponential classes at this rate, with their bits. `picks`: choices among so many
    servers.
    """
    (choices, servers), count = picks, jobs
    arrived_at = unit_exponential(rng, count) / rate
    truly_long = rng.random(count) < classes.long_share
    means = np.where(truly_long, classes.long_mean, classes.short_mean)
    seconds = means * rng.exponential(size=count)
    wrong = rng.random(count) < np.where(truly_long, classes.long_wrong, classes.short_wrong)
    picked = np.empty((count, choices), dtype=np.int64)
    for k in range(choices):  # the k-th of those not yet picked, in order of their numbers
        place = rng.integers(0, servers - k, count)
        for column in _ascending(picked[:, :k]):
            place += place >= column
        picked[:, k] = place
    return ChoiceWork(arrived_at, seconds, (truly_long ^ wrong).astype(np.int64), picked)


def simulate_choices(
    classes: TwoClasses, load: float, servers: int, choices: int, runs: Replications
) -> Measured:
    """Mean sojourn time at `load` = lam E[S] of each server. Raises SpecError."""
    if not 1 <= choices <= servers or not 0 < load < 1:
        raise SpecError(
            f"got choices={choices} of {servers} servers at load {load:g}; expected 1 to "
            f"{servers} choices, and a load below 1"
        )

    def run(rng: np.random.Generator) -> tuple[Vector, ...]:
        rate = load * servers / classes.mean
        work = drawn_choices(rng, runs.jobs, classes, rate, (choices, servers))
        return (run_choices(work, servers) - work.arrived_at,)

    (sojourn,) = measured(run, runs)
    return sojourn
