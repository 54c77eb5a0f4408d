"""Compiled sample paths of several servers: `run_ranks_on_servers`, under ranks as in `kernels`, of
whose jobs in service the one of the worst rank is interrupted; `run_least_attained`, FB on any
number of servers, exactly, as groups of equal age.
"""

from __future__ import annotations

import numpy as np

from kendall.queueing.simulation.kernels import compiled
from kendall.queueing.simulation.orders.kernels import (
    before,
    exchange,
    overtaking,
    piece_at,
    pop,
    push,
    rank_of,
)


@compiled()
def next_event(ranks, running, now, jobs, heap):  # type: ignore[no-untyped-def]
    """The first end or overtaking among the jobs in service: its instant, place and age there (-1
    for an end). `jobs`: totals, ages, pieces; `heap`: the first waiting rank, or None.
    """
    totals, ages, pieces = jobs
    at, place, reached = np.inf, -1, -1.0
    for k in range(len(running)):
        job = running[k]
        done = now + totals[job] - ages[job]
        if done < at or (done == at and reached >= 0):
            at, place, reached = done, k, -1.0
        if len(heap):
            age = overtaking(ranks, job, pieces[job], ages[job], heap)
            overtaken = now + age - ages[job]
            if overtaken < at:
                at, place, reached = overtaken, k, age
    return at, place, reached


@compiled()
def advance(start, running, jobs, now, at):  # type: ignore[no-untyped-def]
    """Serve all jobs in service from `now` to `at`."""
    _, ages, pieces = jobs
    for job in running:
        ages[job] = ages[job] + at - now
        pieces[job] = piece_at(start, job, pieces[job], ages[job])


@compiled()
def interrupt(ranks, running, jobs, heap, waiting, new):  # type: ignore[no-untyped-def]
    """A job that arrives while all servers are busy takes the place of the one that goes last, if
    it goes before that, or waits; the other one goes into the heap.
    """
    _, ages, pieces = jobs
    place, worst = -1, rank_of(ranks, new, 0, 0.0)
    for k in range(len(running)):
        job = running[k]
        rank = rank_of(ranks, job, pieces[job], ages[job])
        if before(worst[0], worst[1], worst[2], rank[0], rank[1], rank[2]):
            place, worst = k, rank
    if place < 0:
        push(heap, waiting, worst, new)
    else:
        push(heap, waiting, worst, running[place])
        running[place] = new
        pieces[new] = piece_at(ranks[0], new, 0, 0.0)


@compiled()
def run_ranks_on_servers(arrived_at, totals, ranks, servers, rising):  # type: ignore[no-untyped-def]
    """As `run_ranks`. `rising`: whether the rank of a job in service can rise."""
    start, n = ranks[0], len(arrived_at)
    left, heap, in_service = np.full(n, np.nan), np.empty((n, 4)), np.zeros(servers, np.int64)
    jobs = totals, np.zeros(n), np.zeros(n, dtype=np.int64)
    _, ages, pieces = jobs
    busy, waiting, coming, now = 0, 0, 0, 0.0
    while busy > 0 or coming < n:
        running = in_service[:busy]
        at, place, reached = next_event(ranks, running, now, jobs, heap[: waiting * rising])
        arrival = arrived_at[coming] if coming < n else np.inf
        advance(start, running, jobs, now, min(at, arrival))
        now = min(at, arrival)
        if at > arrival:
            if busy < servers:
                in_service[busy] = coming
                pieces[coming] = piece_at(start, coming, 0, 0.0)
                busy += 1
            else:
                interrupt(ranks, running, jobs, heap, waiting, coming)
                waiting += 1
            coming += 1
            continue
        job = running[place]
        if reached >= 0:
            ages[job] = reached  # exactly: a piece that begins there has begun
            pieces[job] = p = piece_at(start, job, pieces[job], reached)
            job = exchange(heap, waiting, rank_of(ranks, job, p, reached), job)
        else:
            left[job] = now
            busy -= waiting == 0
            job = pop(heap, waiting) if waiting > 0 else in_service[busy]
            waiting -= waiting > 0
        in_service[place] = job
        pieces[job] = piece_at(start, job, pieces[job], ages[job])
    return left


@compiled()
def merge(following, sizes, one, other):  # type: ignore[no-untyped-def]
    """Two chains of jobs by increasing size into one; its first job."""
    first = last = -1
    while min(one, other) >= 0:
        if sizes[one] <= sizes[other]:
            job, one = one, following[one]
        else:
            job, other = other, following[other]
        if last < 0:
            first = job
        else:
            following[last] = job
        last = job
    following[last] = max(one, other)
    return first


@compiled()
def next_of_groups(groups, totals, now, servers):  # type: ignore[no-untyped-def]
    """The first instant at which a job ends or a group reaches the age of the next older one:
    instant, group, whether a job ends. Sets `rate` of the groups that are served.
    """
    age, rate, first, count = groups
    at, group, ends = np.inf, -1, True
    free, g = servers, len(age) - 1
    while g >= 0 and free > 0:
        busy = min(free, count[g])
        free -= busy
        rate[g] = busy / count[g]
        done = now + (totals[first[g]] - age[g]) / rate[g]
        if done < at or (done == at and not ends):
            at, group, ends = done, g, True
        slower = min(free, count[g - 1]) / count[g - 1] if g > 0 else rate[g]
        if slower < rate[g]:
            reached = now + (age[g - 1] - age[g]) / (rate[g] - slower)
            if reached < at:
                at, group, ends = reached, g, False
        g -= 1
    return at, group, ends


@compiled()
def serve_groups(age, rate, count, servers, seconds):  # type: ignore[no-untyped-def]
    """Age the groups that are served, the youngest first."""
    free, g = servers, len(age) - 1
    while g >= 0 and free > 0:
        age[g] += rate[g] * seconds
        free -= min(free, count[g])
        g -= 1


@compiled()
def run_least_attained(arrived_at, totals, servers):  # type: ignore[no-untyped-def]
    """Departure of each job under FB: groups of equal age, the youngest served first, each in equal
    shares of as many servers as it has jobs, or of those that are left.
    """
    n = len(arrived_at)
    left, following = np.full(n, np.nan), np.full(n, -1)
    age, rate = np.empty(n), np.empty(n)
    first, count = np.empty(n, np.int64), np.empty(n, np.int64)
    groups, coming, now = 0, 0, 0.0
    while coming < n or groups > 0:
        rows = (age[:groups], rate[:groups], first[:groups], count[:groups])
        at, g, ends = next_of_groups(rows, totals, now, servers)
        arrival = arrived_at[coming] if coming < n else np.inf
        serve_groups(rows[0], rows[1], rows[3], servers, min(at, arrival) - now)
        now = min(at, arrival)
        if at <= arrival:
            if ends:
                job, age[g] = first[g], totals[first[g]]
                left[job], first[g] = now, following[job]
                count[g] -= 1
            else:
                first[g - 1] = merge(following, totals, first[g - 1], first[g])
                count[g - 1] += count[g]
                count[g] = 0
            if count[g] == 0:
                groups -= 1
                for row in range(g, groups):
                    age[row], first[row], count[row] = age[row + 1], first[row + 1], count[row + 1]
            continue
        age[groups], first[groups], count[groups] = 0.0, coming, 1
        groups += 1
        coming += 1
    return left
