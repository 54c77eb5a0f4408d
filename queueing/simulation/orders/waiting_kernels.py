"""Compiled waiting queues in the orders of policies that interrupt nobody (policies.orders): the
requests that a batch or the free slots take next, as `Order.first` chooses them.

    ranked   a heap by (rank, arrival): spjf, ljf, threshold, with aging or without, and what is
             served in order of arrival
    ratio    hrrn: a scan of those that wait at each dispatch, `rank` the predicted lengths
    groups   binned: lists in order of arrival; a batch is of the group of the oldest request

Requests are numbered in order of arrival. With one patience for all, who is lost next is the oldest
that waits; a heap keeps the lost until they come first.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from queueing.simulation.kernels import Floats, Ints, inner
from queueing.simulation.orders.kernels import pop, push

RANKED, RATIO, GROUPS = range(3)
ROWS, WAITING, OLDEST = range(3)  # places in `counts`: rows of the heap; `OLDEST` who may wait


class OrderedQueue(NamedTuple):
    """`rank` and `group` of each request; a heap or a list in order of arrival; of each group its
    first and last request and how many wait, of each request the next one; who waits; counts.
    """

    kind: int
    rank: Floats
    group: Ints
    heap: Floats
    listed: Ints
    ends: Ints
    following: Ints
    waits: npt.NDArray[np.bool_]
    counts: Ints
    chosen: Ints


def ordered_queue(
    kind: int, rank: npt.NDArray[Any], group: npt.NDArray[Any], largest: int
) -> OrderedQueue:
    """An empty queue, of which at most `largest` are taken at once."""
    count = len(rank)
    groups = int(group.max()) + 1 if kind == GROUPS and count else 1
    return OrderedQueue(
        kind,
        np.asarray(rank, float),
        np.asarray(group, np.int64),
        np.empty((count if kind == RANKED else 1, 4)),
        np.empty(count if kind == RATIO else 1, dtype=np.int64),
        np.zeros((3, groups), dtype=np.int64),
        np.zeros(count if kind == GROUPS else 1, dtype=np.int64),
        np.zeros(count, dtype=np.bool_),
        np.zeros(3, dtype=np.int64),
        np.empty(min(largest, max(count, 1)), dtype=np.int64),
    )


@inner
def enter(job, queue):  # type: ignore[no-untyped-def]
    """A request arrives."""
    kind, rank, group, heap, listed, ends, following, waits, counts, _ = queue
    waits[job] = True
    if kind == RANKED:
        push(heap, counts[ROWS], (0.0, rank[job], float(job)), job)
        counts[ROWS] += 1
    elif kind == RATIO:
        listed[counts[WAITING]] = job
    else:
        g = group[job]
        if ends[2, g] == 0:
            ends[0, g] = job
        else:
            following[ends[1, g]] = job
        ends[1, g] = job
        ends[2, g] += 1
    counts[WAITING] += 1


@inner
def oldest(queue):  # type: ignore[no-untyped-def]
    """The request that has waited longest, -1 where nobody waits."""
    waits, counts = queue[7], queue[8]
    if counts[WAITING] == 0:
        return -1
    while not waits[counts[OLDEST]]:
        counts[OLDEST] += 1
    return counts[OLDEST]


@inner
def unlist(job, queue):  # type: ignore[no-untyped-def]
    """Take a request out of the list."""
    listed, counts, k = queue[4], queue[8], 0
    while listed[k] != job:
        k += 1
    for place in range(k, counts[WAITING] - 1):
        listed[place] = listed[place + 1]


@inner
def leave(job, queue):  # type: ignore[no-untyped-def]
    """A request that was first in the heap, or is anywhere else, waits no more."""
    kind, _, group, _, _, ends, following, waits, counts, _ = queue
    if kind == RATIO:
        unlist(job, queue)
    elif kind == GROUPS:
        g = group[job]
        ends[0, g] = following[job]
        ends[2, g] -= 1
    waits[job] = False
    counts[WAITING] -= 1


@inner
def highest_ratio(now, requests, queue):  # type: ignore[no-untyped-def]
    """Of the list: (arrival - now) / predicted least, the oldest of equal ones."""
    arrived_at, rank, listed, counts = requests[0], queue[1], queue[4], queue[8]
    best, least = -1, np.inf
    for k in range(counts[WAITING]):
        job = listed[k]
        ratio = (arrived_at[job] - now) / max(rank[job], 1e-9)
        if ratio < least:
            best, least = job, ratio
    return best


@inner
def full_group(size, queue):  # type: ignore[no-untyped-def]
    """Of the groups of `size` at least the one whose oldest request arrived first; -1: none."""
    ends, best = queue[5], -1
    for g in range(ends.shape[1]):
        if ends[2, g] >= size and (best < 0 or ends[0, g] < ends[0, best]):
            best = g
    return best


@inner
def take(size, group, now, requests, queue):  # type: ignore[no-untyped-def]
    """Put up to `size` requests in the order of service into `chosen`, of that group where there
    are groups; how many.
    """
    kind, _, _, heap, _, ends, _, waits, counts, chosen = queue
    taken = 0
    while taken < size and counts[WAITING] > 0:
        if kind == GROUPS:
            if ends[2, group] == 0:
                break
            job = ends[0, group]
        elif kind == RATIO:
            job = highest_ratio(now, requests, queue)
        else:
            job = pop(heap, counts[ROWS])
            counts[ROWS] -= 1
            if not waits[job]:
                continue  # it was lost
        leave(job, queue)
        chosen[taken] = job
        taken += 1
    return taken


@inner
def ready(bounds, now, closing, requests, queue):  # type: ignore[no-untyped-def]
    """What the next batch is, as a policy decides: its size and its group, and the instant at which
    to ask again if nothing starts yet (size 0).
    """
    _, size_bound, wait_for, max_wait, _ = bounds
    kind, counts = queue[0], queue[8]
    if counts[WAITING] == 0:
        return 0, -1, np.inf
    first = oldest(queue)
    group = queue[2][first]
    if wait_for > 1:
        full = full_group(wait_for, queue) if kind == GROUPS else -1
        if full >= 0:
            return wait_for, full, np.inf
        if kind == GROUPS or counts[WAITING] < wait_for:
            deadline = requests[0][first] + max_wait
            if now < deadline and not closing:
                return 0, -1, deadline
    return min(size_bound, counts[WAITING]), group, np.inf
